"""One log file as bytes: from its beginning, then followed, through everything that happens to log files.

A regular `stat` decides; watchdog (imported here only) merely wakes a reader early when a file is created,
moved or deleted.  The open descriptor is kept: what is written to a renamed or deleted file is still read.
Only regular files are opened: opening a FIFO or a device would disturb its writer.  A file that a person named
is opened for its server only: it is no link, and belongs to the server's user or to root.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..untrusted_paths import NotAFileError, open_file
from .copies import copy_of
from .earlier import moved_aside, next_in_line
from .opened import FINGERPRINT_BYTES, Identity, OpenFile, identity_of

CHUNK_BYTES = 1 << 18
MOST_ROTATIONS = 64
"""Files that one read goes through, one after the other."""
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_REASONS = {
    errno.ENOENT: "vanished",
    errno.ESRCH: "vanished",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.ELOOP: "not_supported",  # a link where none is followed
}
_STREAM = re.compile(r"/(?:[0-9]+|self)/fd/[0-9]+\Z")
"""The kernel's own link to what a process has open."""


@dataclass(slots=True)
class LogTail:
    """Follows one path.  `read` never raises for what the file does; `reason` says why nothing can be read.

    `boundary` is called when the next bytes belong to another file, or to the same one written anew.
    Counters only grow: `bytes_read`, `rotations`, `truncations`, `errors`.  `backlog` is what a bounded read
    left for the next one; `found` the size of the first file when it was opened (bytes, None before);
    `modified` the file's last change (Unix seconds).  `owner`: see model.LogPlace.  `is_apart`: whether a path in the
    same folder is followed as a log of its own, so that it is not taken for a part of this one.
    """

    path: str
    boundary: Callable[[], None] = lambda: None
    owner: int | None = None
    is_apart: Callable[[str], bool] = lambda path: False
    bytes_read: int = 0
    rotations: int = 0
    truncations: int = 0
    errors: int = 0
    backlog: int = 0
    found: int | None = None
    modified: float | None = None
    reason: str | None = None
    _file: OpenFile | None = field(default=None, repr=False)
    _before: OpenFile | None = field(default=None, repr=False)  # closed; what is opened next may go on where it ended
    _rests: bool = field(default=False, repr=False)  # it was closed before it was known to be read to its end

    @property
    def far_mount(self) -> str | None:
        """The mount in whose thread the log is read; None when it is read at once."""
        return None

    @property
    def is_waiting(self) -> bool:
        """Whether the last read did not come back, or found no thread to begin in: the next may bring what it read."""
        return False

    @property
    def identity(self) -> Identity | None:
        """Device and inode of the open file."""
        return self._file.identity if self._file else None

    @property
    def offset(self) -> int:
        """Bytes of the open file that were read."""
        return self._file.offset if self._file else 0

    def mark(self, offset: int, seal: Callable[..., str]) -> str | None:
        """Keyed hash of what stands at the beginning of the open file and before `offset`; None = it is not there.

        With the identity it tells, also in another process, whether the file still holds what was read.
        """
        return None if self._file is None else _mark(self._file.descriptor, offset, seal)

    def read(self, most_bytes: int) -> Iterator[bytes]:
        """What was written since the last call, in chunks, at most `most_bytes`.

        A renamed file is read to its end before its successor is opened; of several rotations since the last look
        every file, as far as the names in the folder show which one followed which.
        """
        left = most_bytes
        for _ in range(MOST_ROTATIONS):
            successor = self._look()
            if self._file is None:
                return
            for chunk in self._drain(self._file, left):
                left -= len(chunk)
                yield chunk
            if self.backlog or not successor or left <= 0 or self._file is None:
                return
            self._follow_on(self._file)

    def close(self) -> None:
        if (file := self._file) is None:
            return
        self._file = None  # first of all: where closing fails the number is free all the same, and soon another file's
        with suppress(OSError):
            os.close(file.descriptor)

    def rest(self) -> None:
        """Keep nothing open until the next read, which goes on where this one ended, also where it was moved aside."""
        if self._file is not None:
            self._leave()
            self._rests = True

    def _look(self) -> bool:
        """Open what is to be read; whether another file stands at the path by now."""
        try:
            found = os.stat(self.path, follow_symlinks=self.owner is None)
        except OSError as error:
            self._fail(error)
            return False
        if self._file is not None:
            self.reason = None
            return (found.st_dev, found.st_ino) != self._file.identity and stat.S_ISREG(found.st_mode)
        if self._woke_elsewhere((found.st_dev, found.st_ino)):
            return True
        try:
            self._file = self._opened(found, self.path)
            self.reason = None
        except OSError as error:
            self._fail(error)
        return False

    def _woke_elsewhere(self, at_path: Identity) -> bool:
        """Whether the file that was at rest was moved aside meanwhile, and is open again under its new name."""
        before, was_at_rest, self._rests = self._before, self._rests, False
        if before is None or not was_at_rest or before.identity == at_path:
            return False
        files = (file for files in moved_aside(self.path, self.owner).values() for file in files)
        moved = next((file for file in files if file.identity == before.identity), None)
        if moved is None or self.is_apart(moved.path):
            return False
        with suppress(OSError):
            self._file = self._opened(os.lstat(moved.path), moved.path, moved.identity)
            self.reason = None
        return self._file is not None

    def _follow_on(self, file: OpenFile) -> None:
        """Leave a file that was replaced and is read to its end for the one that came next."""
        after = next_in_line(self.path, file.identity, self.owner)
        self._leave()
        if after is not None and not self.is_apart(after.path):
            with suppress(OSError):  # it is gone, or another one by now: the file at the path comes next
                self._file = self._opened(os.lstat(after.path), after.path, after.identity)

    def _opened(self, found: os.stat_result, path: str, identity: Identity | None = None) -> OpenFile:
        self._check(found)
        follows = self.owner is None and identity is None
        is_stream = follows and _STREAM.search(path)
        descriptor = os.open(path, _FLAGS) if is_stream else open_file(path, follows)
        opened = os.fstat(descriptor)
        try:
            self._check(opened)
            if identity is not None and (opened.st_dev, opened.st_ino) != identity:
                raise FileNotFoundError(errno.ENOENT, "another file")
            target = os.readlink(path) if is_stream else ""
            file = OpenFile(descriptor, identity_of(opened), target)
            file.begin(opened.st_size)
            file = self._continued(file)
        except OSError:
            os.close(descriptor)
            raise
        self.found = opened.st_size if self.found is None else self.found
        return file

    def _continued(self, file: OpenFile) -> OpenFile:
        """A file that was opened: the one that was followed before, by another handle, or its successor.

        A stale handle is opened anew, and a mount that went and came has another number of its device.
        """
        if (before := self._before) is None:
            return file
        again = replace(before, descriptor=file.descriptor, identity=file.identity, target=file.target)
        if before.goes_on_in(file) or self._was_copied(before, again):
            file = again
        elif before.offset or before.identity != file.identity:
            self.rotations += 1
            self.boundary()
        self._before = None
        return file

    def _check(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise NotAFileError(errno.EINVAL, "not a regular file")
        if self.owner is not None and status.st_uid not in (0, self.owner):
            raise PermissionError(errno.EACCES, "a file of another user")

    def _fail(self, error: OSError) -> None:
        """Note why the path cannot be read.  An open file is read on, whatever became of its path."""
        if self._file is not None:
            return
        reason = "not_supported" if isinstance(error, NotAFileError) else _REASONS.get(error.errno or 0, "error")
        self.errors += reason != self.reason
        self.reason = reason

    def _drain(self, file: OpenFile, most_bytes: int) -> Iterator[bytes]:
        try:
            status = os.fstat(file.descriptor)
            self.modified, self.backlog = status.st_mtime, 0
            if file.is_cut(status.st_size):
                for chunk in self._read_copy(file, most_bytes):
                    most_bytes -= len(chunk)
                    yield chunk
                if self.backlog:
                    return  # what was cut off comes first
                self.truncations += 1
                self.boundary()
                file.begin(status.st_size)
            file.saw(status)
            yield from self._pieces(file, file.descriptor, status.st_size, most_bytes)
        except OSError as error:  # a stale network handle, an I/O error: open it anew next time
            self._leave()
            self._fail(error)

    def _pieces(self, file: OpenFile, descriptor: int, size: int, most_bytes: int) -> Iterator[bytes]:
        """What stands behind the offset in the file, or in its copy that is open as `descriptor`."""
        while file.offset < size and most_bytes > 0:
            chunk = os.pread(descriptor, min(CHUNK_BYTES, size - file.offset, most_bytes), file.offset)
            if not chunk:
                break
            file.took(chunk, descriptor)
            self.bytes_read += len(chunk)
            most_bytes -= len(chunk)
            yield chunk
        self.backlog = max(0, size - file.offset)

    def _read_copy(self, file: OpenFile, most_bytes: int) -> Iterator[bytes]:
        """Of a file that was cut what stands in a copy of it behind the offset, which moves on there.

        With a `backlog` the file is left as it is: it is seen to be cut again, and the copy is found again.
        """
        if (descriptor := self._copy_of(file)) is None:
            return
        try:
            with suppress(OSError):  # the rest of it is lost
                yield from self._pieces(file, descriptor, os.fstat(descriptor).st_size, most_bytes)
        finally:
            with suppress(OSError):
                os.close(descriptor)

    def _was_copied(self, before: OpenFile, again: OpenFile) -> bool:
        """Whether a file that is open again was cut meanwhile, and a copy shows that it is the one of before."""
        is_it = before.identity == again.identity and again.is_cut(os.fstat(again.descriptor).st_size)
        if not is_it or (descriptor := self._copy_of(again)) is None:
            return False
        os.close(descriptor)
        return True

    def _copy_of(self, file: OpenFile) -> int | None:
        """Open the copy that was made of a file before it was cut; None where none is found."""
        copies = (copy_of(file, path, self.is_apart) for path in self._named(file))
        return next((copy for copy in copies if copy is not None), None)

    def _named(self, file: OpenFile) -> Iterator[str]:
        """Paths of a file that may be looked at, and beside which its copies are.

        A stream is known by what its link says.  This holds where its process runs, and may be another file here.
        """
        if not _STREAM.search(self.path):
            if self._is_here(self.path):
                yield self.path
            return
        root = self.path.rpartition("/fd/")[0] + "/root"
        for path in (file.target, root + file.target):
            with suppress(OSError):
                if self._is_here(path) and _is_at(path, file.identity):
                    yield path
                    return

    def _is_here(self, path: str) -> bool:
        """Whether looking at a path, and beside it, waits for nobody but who is waited for anyway."""
        return True

    def _leave(self) -> None:
        """Close a file that was replaced and is read to its end, or whose handle is worth nothing any more."""
        self._before = self._file
        self.close()


def _is_at(path: str, file: Identity) -> bool:
    """Whether a path leads to a file, and over no link that another user made.  OSError when it leads nowhere."""
    descriptor = open_file(path)
    try:
        return identity_of(os.fstat(descriptor)) == file
    finally:
        os.close(descriptor)


def mark_in(path: str, file: Identity, offset: int, seal: Callable[..., str]) -> str | None:
    """As LogTail.mark, of a file that is not followed; None when it is another one or cannot be read."""
    try:
        descriptor = open_file(path)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        is_it = stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == file
        return _mark(descriptor, offset, seal) if is_it else None
    finally:
        os.close(descriptor)


def _mark(descriptor: int, offset: int, seal: Callable[..., str]) -> str | None:
    begin = max(0, offset - FINGERPRINT_BYTES)
    try:
        head = os.pread(descriptor, min(FINGERPRINT_BYTES, offset), 0)
        last = os.pread(descriptor, offset - begin, begin)
    except OSError:
        return None
    return seal("mark", head, last) if len(last) == offset - begin else None


class FolderWatch:
    """Says early that files were created, moved or deleted in some folders.  Nothing depends on it.

    Writes to files are not watched: a busy log would cost an event per line.  Without inotify (or with its
    limits used up) it is silent.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._observer: Any = None
        self._watches: dict[str, Any] = {}

    def watch(self, folders: set[str]) -> None:
        """Watch exactly these folders from now on."""
        for folder in [folder for folder in self._watches if folder not in folders]:
            if (watch := self._watches.pop(folder)) is not None:
                self._observer.unschedule(watch)
        for folder in folders - self._watches.keys():
            try:
                self._watches[folder] = self._schedule(folder)
            except (OSError, RuntimeError):
                self._watches[folder] = None

    def close(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            self._observer = None
        self._watches = {}

    def _schedule(self, folder: str) -> Any:
        from watchdog.events import (
            FileCreatedEvent,
            FileDeletedEvent,
            FileMovedEvent,
            FileSystemEvent,
            FileSystemEventHandler,
        )
        from watchdog.observers import Observer

        changed = self._changed

        class Waker(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                changed()

        if self._observer is None:
            self._observer = Observer()
            self._observer.daemon = True
            self._observer.start()
        wanted = [FileCreatedEvent, FileDeletedEvent, FileMovedEvent]
        return self._observer.schedule(Waker(), folder, event_filter=wanted)
