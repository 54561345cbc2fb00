"""The state folder of `serve`: one document, written whole and read with suspicion; nothing here stops a tick.

Every failure costs the memory of what was before a restart and one line of the log, never more.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .descriptors import is_on_fuse, keep_apart
from .kept import Document, json_text

log = logging.getLogger(__name__)

VERSION = 1
STATE, NEW, CORRUPT, KEY, LOCK = "state.json", "state.json.new", "state.json.corrupt", "key", "lock"

LARGEST_BYTES = 1 << 20
_FRAME_BYTES = 256
"""What stands around the state in its file: version, hash, names."""
KEY_BYTES = 32
DIGEST_BYTES = 16

WRITE_SECONDS = 15.0
"""The state is written no more often than this; at once when a server becomes stalled or failed, and at the end."""

OPEN_SECONDS = 5.0
"""`serve` waits no longer than this for a disk that hangs, then goes on without state."""
LOCK_SECONDS = 2.0
"""How long the process before may take to let go of the folder."""
LAST_WRITE_SECONDS = 3.0

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class StateError(Exception):
    """The folder cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class _Held:
    """An open folder and the lock that makes it ours: descriptors, and which file is locked."""

    folder: int
    lock: int
    lock_name: str
    identity: tuple[int, int]

    def is_at(self, path: str) -> bool:
        """Whether the path still leads there, and others would find our lock; what cannot be told counts as that."""
        try:
            there = os.stat(path)
            lock = os.stat(self.lock_name, dir_fd=self.folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return os.path.samestat(there, os.fstat(self.folder)) and (lock.st_dev, lock.st_ino) == self.identity

    def close(self) -> None:
        os.close(self.lock)
        os.close(self.folder)


class StateFolder:
    """An open, locked state folder.  StateError when it cannot be used, OSError when the disk says so."""

    def __init__(self, path: str) -> None:
        self._is_cut = False
        self._path = path
        self._held = self._at_first = _take(path)
        self._is_keyed = True
        try:
            self._key = self._read_key() or self._make_key()
        except BaseException:
            self.close()
            raise

    @property
    def _folder(self) -> int:
        return self._held.folder

    def keep_apart(self) -> None:
        """In a thread that only writes: what it has open when the disk hangs hinders no child (see descriptors)."""
        keep_apart(self._folder)

    def close(self) -> None:
        """Close what was opened at first, and so give it free; `leave` comes before."""
        self._at_first.close()

    # --- what is removed while we run --------------------------------------------------------------------------

    def renew(self) -> bool:
        """Take what is at the path by now, made anew if need be; False when all that we hold is in its place.

        Called by the thread that writes, which has files of its own: what was opened at first is its owner's to close.
        The key stays ours, for what is remembered was sealed with it; what another one sealed there will be replaced.
        StateError and OSError as at first.
        """
        if not self._held.is_at(self._path):
            taken = _take(self._path)
            self.leave()
            self._held, self._is_keyed = taken, False
        elif self._is_keyed and _is_there(KEY, self._folder):
            return False
        self._replace(KEY, self._key)
        self._is_keyed = True
        return True

    def leave(self) -> None:
        """Close what was taken by `renew`."""
        if self._held is not self._at_first:
            held, self._held = self._held, self._at_first
            held.close()

    def seal(self, *parts: str | int | bytes) -> str:
        """Keyed hash of words and numbers; without the key nothing can be learned from it, not even by guessing."""
        digest = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES)
        for part in parts:
            piece = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
            digest.update(b"%d:" % len(piece) + piece)
        return digest.hexdigest()

    # --- the key ----------------------------------------------------------------------------------------------

    def _read_key(self) -> bytes | None:
        """The key; None when there is none that only we can read."""
        try:
            with _opened(KEY, os.O_RDONLY, self._folder) as (file, status):
                private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
                key = os.read(file, KEY_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EACCES, errno.EINVAL, errno.ENXIO):
                raise
            private, key = False, b""
        if private and len(key) == KEY_BYTES:
            return key
        log.warning("state key is not ours alone, or no key: a new one is made and the state begins anew")
        return None

    def _make_key(self) -> bytes:
        key = secrets.token_bytes(KEY_BYTES)
        self._replace(KEY, key)
        return key

    # --- the document -----------------------------------------------------------------------------------------

    def read(self) -> Any:
        """The document that was written last; None when there is none, or none that can be trusted.

        One that cannot is set aside, so that a person may look at it and nothing falls over it twice.
        """
        try:
            with _opened(STATE, os.O_RDONLY, self._folder) as (file, status):
                content = _content(file, status)
            return self._unpack(content)
        except FileNotFoundError:
            return None
        except (StateError, OSError) as error:
            problem = str(error) if isinstance(error, StateError) else (error.strerror or "cannot be read")
            log.warning("state not used and set aside", extra={"problem": problem, "file": CORRUPT})
            with suppress(OSError):
                os.rename(STATE, CORRUPT, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            return None

    def _unpack(self, content: bytes) -> Any:
        try:
            outer = json.loads(content, parse_constant=_no_number)
            state = outer["state"] if outer["version"] == VERSION else None
            given, text = outer["mac"], json_text(state)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise StateError("is no state") from None
        if outer["version"] != VERSION:
            raise StateError("has another version")
        if not isinstance(given, str) or not hmac.compare_digest(
            self._mac(text).encode(), given.encode("utf-8", "replace")
        ):
            raise StateError("was changed, or written with another key")
        return state

    def write(self, state: Document) -> None:
        """Replace the document: the old one stands until the new one is whole on the disk."""
        kept, text = state, state.text()
        if len(text) > LARGEST_BYTES - _FRAME_BYTES:
            kept = _cut(state)
            text = kept.text()
        cut, self._is_cut = self._is_cut, len(kept.servers) < len(state.servers)
        if self._is_cut and not cut:
            log.warning("state is cut", extra={"servers": len(state.servers), "kept": len(kept.servers)})
        self._replace(STATE, f'{{"version":{VERSION},"mac":"{self._mac(text)}","state":{text}}}\n'.encode())

    def _mac(self, text: str) -> str:
        return self.seal("state", VERSION, text)

    def _replace(self, name: str, content: bytes) -> None:
        with suppress(FileNotFoundError):
            os.unlink(NEW, dir_fd=self._folder)
        try:
            with _opened(NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._folder) as (file, _):
                view = memoryview(content)
                while view:
                    view = view[os.write(file, view) :]
                os.fsync(file)
            os.rename(NEW, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            os.fsync(self._folder)
        except OSError:
            with suppress(OSError):
                os.unlink(NEW, dir_fd=self._folder)
            raise


def _open_folder(path: str) -> int:
    """The folder, made when only it is missing (its parent is not made: a missing mount is no folder)."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    status = os.fstat(folder)
    if status.st_uid not in (0, os.geteuid()):
        os.close(folder)
        raise StateError("the folder belongs to another user")
    if status.st_mode & stat.S_IWOTH:
        log.warning("state folder is writable by everybody", extra={"mode": f"{stat.S_IMODE(status.st_mode):o}"})
    return folder


def _is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _take(path: str) -> _Held:
    """The folder, opened and locked; StateError and OSError when it cannot be."""
    folder = _open_folder(path)
    try:
        name = "." if is_on_fuse(folder) else LOCK
        lock = _locked(folder, name)
    except BaseException:
        os.close(folder)
        raise
    status = os.fstat(lock)
    return _Held(folder, lock, name, (status.st_dev, status.st_ino))


def _lockable(folder: int, name: str) -> int:
    """What the lock is held on: a file, but on FUSE, where none may be kept open (see descriptors), the folder."""
    if name == ".":
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    return os.open(name, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=folder)


def _locked(folder: int, name: str) -> int:
    """The lock, held until it is closed: two that write one state would each undo what the other knew."""
    lock = _lockable(folder, name)
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            os.close(lock)
            raise StateError("another stallwatch uses it") from None
        except BaseException:
            os.close(lock)
            raise
        return lock


@contextmanager
def _opened(name: str, flags: int, folder: int) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file of the folder, over no link."""
    file = os.open(name, flags | _OPEN, 0o600, dir_fd=folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        yield file, status
    finally:
        os.close(file)


def _content(file: int, status: os.stat_result) -> bytes:
    """All of it; StateError when it is another user's, or larger than we write."""
    if status.st_uid != os.geteuid():
        raise StateError("belongs to another user")
    pieces, left = list[bytes](), 2 * LARGEST_BYTES
    while left > 0 and (piece := os.read(file, left)):
        pieces.append(piece)
        left -= len(piece)
    if left <= 0:
        raise StateError("is too large")
    return b"".join(pieces)


def _no_number(name: str) -> Any:
    raise ValueError(name)


def _cut(state: Document) -> Document:
    """As many servers, in their order, as there is room for; one that is too large takes no room from the others."""
    left = LARGEST_BYTES - len(replace(state, servers=()).text()) - _FRAME_BYTES
    servers = list[str]()
    for entry in state.servers:
        size = len(entry) + 1
        if size <= left:
            left -= size
            servers.append(entry)
    return replace(state, servers=tuple(servers))


class StateWriter:
    """Writes the newest document in a thread of its own: a disk that hangs holds nobody up.

    One warning when writing begins to fail, one line when it works again.
    """

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._waiting: Document | None = None
        self._written: Document | None = None
        self._busy = self._stopping = self._failing = False
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, state: Document) -> None:
        """Have this written; one that is still waiting is forgotten."""
        with self._changed:
            self._waiting = state
            self._changed.notify_all()

    def close(self, seconds: float = LAST_WRITE_SECONDS) -> bool:
        """End after what was offered is written; False when the disk takes longer than that."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("state not written in time", extra={"seconds": seconds})
            return False
        self._folder.close()
        return True

    def _run(self) -> None:
        self._folder.keep_apart()
        while True:
            with self._changed:
                while self._waiting is None and not self._stopping:
                    self._changed.wait()
                state, self._waiting = self._waiting, None
            if state is None:
                self._folder.leave()
                return
            self._write(state)

    def _write(self, state: Document) -> None:
        """Write it, unless it stands there already; into a new folder, if need be (StateFolder.renew)."""
        try:
            if self._folder.renew():
                self._written = None
                log.warning("state folder was removed or replaced: the state is written anew")
            if state != self._written:
                self._folder.write(state)
        except (OSError, StateError) as error:
            problem = str(error) if isinstance(error, StateError) else error.strerror
            if not self._failing:
                log.warning("state cannot be written", extra={"problem": problem or type(error).__name__})
            self._failing = True
            return
        self._written = state
        if self._failing:
            log.info("state is written again")
        self._failing = False


class Schedule:
    """When the state is due: every WRITE_SECONDS, and at once when a server becomes stalled or failed."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._certain: frozenset[str] = frozenset()

    def is_due(self, monotonic: float, certain: frozenset[str]) -> bool:
        """`certain`: names of the servers that are stalled or failed now."""
        due = monotonic - self._last >= WRITE_SECONDS or bool(certain - self._certain)
        self._certain = certain
        if due:
            self._last = monotonic
        return due


def open_state(path: str, procfs: str, seconds: float = OPEN_SECONDS) -> tuple[StateFolder, str, Any] | None:
    """The folder, the identity of this boot as a hash, and the document kept there; None (said once) without.

    Done in a thread: a disk that hangs must not keep `serve` from starting.
    """
    found: list[tuple[StateFolder, str, Any]] = []
    problem: list[str] = ["the disk does not answer"]
    late = threading.Event()

    def look() -> None:
        try:
            boot = Path(procfs, "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            folder = StateFolder(path)
            kept = folder.seal("boot", boot), folder.read()
            if late.is_set():
                folder.close()
            else:
                found.append((folder, *kept))
        except (OSError, StateError, UnicodeError) as error:
            problem[0] = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__

    thread = threading.Thread(target=look, name="state-open", daemon=True)
    thread.start()
    thread.join(seconds)
    late.set()
    if not found:
        log.warning("no state is kept: verdicts begin anew with every start", extra={"problem": problem[0]})
        return None
    return found[0]
