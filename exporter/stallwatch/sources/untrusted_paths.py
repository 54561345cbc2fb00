"""Opening what lies on a path that somebody we watch may change under us.

A path is gone along folder by folder, each held by a descriptor, so that nothing can be exchanged on the way.
Opened is a regular file only, never a FIFO, a socket or a device.  A link on the way is followed when root or we
ourselves made it; behind another user's link only that user's own files count, which he can read without us.  Below
the root folder of another process (/proc/PID/root) no link is followed at all.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice

MOST_LINKS = 40
MOST_NAMES = 10_000
"""Names of one folder that are looked at."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_PASS = os.O_PATH | os.O_CLOEXEC
_WILD = re.compile(r"[*?[]")


class NotAFileError(OSError):
    """The path leads to a directory, FIFO, socket or device."""


@dataclass(slots=True)
class _Way:
    """As far as a path was gone: `at` the descriptors of what was gone into; `users` whose links were followed."""

    at: list[int]
    users: set[int] = field(default_factory=set)
    links: int = 0
    first: int = 0  # which of `at` is the root folder, above which is nothing; another process's unless it is the first

    def enter(self, name: str) -> str:
        """Into what is below; what a link says, which is to be gone along instead, "" when it is none."""
        below = os.open(name, _PASS | os.O_NOFOLLOW, dir_fd=self.at[-1])
        self.at.append(below)
        status = os.fstat(below)
        if not stat.S_ISLNK(status.st_mode):
            return ""
        self.at.pop()
        try:
            return self._link(name, below, status)
        finally:
            os.close(below)

    def _link(self, name: str, link: int, status: os.stat_result) -> str:
        self.links += 1
        if self.first or self.links > MOST_LINKS:
            raise OSError(errno.ELOOP, "a link that is not followed")
        if not status.st_size:  # the kernel's own, in /proc: what it says holds for the process
            self.at.append(os.open(name, _PASS, dir_fd=self.at[-1]))
            self.first = len(self.at) - 1
            return ""
        if status.st_uid not in (0, os.geteuid()):
            self.users.add(status.st_uid)
        return os.readlink("", dir_fd=link)

    def leave(self, whole: bool = False) -> None:
        """To the folder above, or to the first one; above that one is nothing."""
        while len(self.at) > self.first + 1:
            os.close(self.at.pop())
            if not whole:
                return


@contextmanager
def _gone(path: str, follow_last: bool) -> Iterator[tuple[_Way, str]]:
    """The way to the folder of `path`, and the last part of it; to all of it, and "", with `follow_last`."""
    way = _Way([os.open("/" if path.startswith("/") else ".", _PASS | os.O_DIRECTORY)])
    left = [part for part in path.split("/")[::-1] if part not in ("", ".")]
    last = "" if follow_last or not left else left.pop(0)
    try:
        while left:
            if (name := left.pop()) == "..":
                way.leave()
                continue
            target = way.enter(name)
            if target.startswith("/"):
                way.leave(whole=True)
            left += [part for part in target.split("/")[::-1] if part not in ("", ".")]
        yield way, last
    finally:
        for descriptor in way.at:
            os.close(descriptor)


def open_file(path: str, follow_last: bool = False) -> int:
    """A descriptor of the regular file at `path`, which by default is no link itself; reading it waits for nothing.

    OSError as of open(2); NotAFileError when it is something else; ELOOP for a link that is not followed; EACCES for a
    file behind another user's link that is not his.
    """
    with _gone(path, follow_last) as (way, name):
        before = os.stat(name, dir_fd=way.at[-1], follow_symlinks=False) if name else os.fstat(way.at[-1])
        _check(before, way)
        if name:
            descriptor = os.open(name, _READ | os.O_NOFOLLOW, dir_fd=way.at[-1])
        else:  # to be read: the link in /proc leads to this very file, whatever stands at its path by now
            descriptor = os.open(f"/proc/thread-self/fd/{way.at[-1]}", _READ)
    after = os.fstat(descriptor)
    if (after.st_dev, after.st_ino) != (before.st_dev, before.st_ino):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "another file")
    return descriptor


def _check(status: os.stat_result, way: _Way) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "a link that is not followed")
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(errno.EINVAL, "not a regular file")
    if way.users - {status.st_uid}:
        raise PermissionError(errno.EACCES, "not the file of who made the link to it")


def content(path: str, most_bytes: int, follow_last: bool = False) -> bytes:
    """The beginning of the regular file at `path`; OSError as of open_file."""
    with open(open_file(path, follow_last), "rb") as file:
        return file.read(most_bytes)


def names_in(folder: str) -> list[str]:
    """Names in a folder, MOST_NAMES at most; of one behind another user's link those of his own.

    OSError when it is none, or cannot be read.
    """
    with _gone(folder, follow_last=True) as (way, _):
        listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=way.at[-1])
        try:
            with os.scandir(listed) as entries:
                found = [entry.name for entry in islice(entries, MOST_NAMES)]
            return [name for name in found if _is_of(way.users, name, listed)] if way.users else found
        finally:
            os.close(listed)


def _is_of(users: set[int], name: str, folder: int) -> bool:
    try:
        return users == {os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid}
    except OSError:
        return False  # gone by now


def matching(pattern: str) -> Iterator[str]:
    """Paths that a pattern stands for, as glob.iglob without `**`; one that ends in a plain name need not exist."""
    yield from _matching("/" if pattern.startswith("/") else "", [part for part in pattern.split("/") if part])


def _matching(folder: str, parts: Sequence[str]) -> Iterator[str]:
    wild = next((number for number, part in enumerate(parts) if _WILD.search(part)), len(parts))
    folder = os.path.join(folder, *parts[:wild])
    if wild == len(parts):
        yield folder
        return
    wanted = parts[wild]
    try:
        found = names_in(folder or ".")
    except OSError:
        return
    for name in found:
        if fnmatchcase(name, wanted) and (wanted.startswith(".") or not name.startswith(".")):
            yield from _matching(os.path.join(folder, name), parts[wild + 1 :])
