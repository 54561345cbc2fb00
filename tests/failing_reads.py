"""The n-th read below a folder fails, whichever way it is made: by `os`, `pathlib`, `io`, an entry of a folder.

Nothing that reads gets past: every module and class that holds one of the calls, under whatever name, gets the guarded
one, and a file opened in Python reads by them (_pyio).  What a descriptor leads to the kernel says.  Python tells of
each open and each listing (audit events), also of those from C: one that was not counted is an error of its own.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import pytest

OF_PATHS = ("open", "listdir", "scandir", "stat", "lstat", "readlink", "statvfs", "access", "getxattr", "listxattr")
OF_DESCRIPTORS = ("read", "pread", "readv", "preadv", "fstat", "fstatvfs", "sendfile")
_pyio: Any = importlib.import_module("_pyio")  # the io module in Python; nobody has types for it
AUDITED = ("open", "os.listdir", "os.scandir")
_READLINK = os.readlink


class _Entry:
    """Of a folder; what asks the kernel once more does so by the guarded calls."""

    def __init__(self, entry: os.DirEntry[Any], ask: Callable[[Callable[[], Any]], Any]) -> None:
        self._entry, self._ask = entry, ask
        self.name, self.path = entry.name, entry.path

    def __fspath__(self) -> Any:
        return self.path

    def inode(self) -> int:
        return self._entry.inode()

    def is_symlink(self) -> bool:
        return self._entry.is_symlink()

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return bool(self._ask(lambda: self._entry.is_dir(follow_symlinks=follow_symlinks)))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return bool(self._ask(lambda: self._entry.is_file(follow_symlinks=follow_symlinks)))

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        found: os.stat_result = self._ask(lambda: self._entry.stat(follow_symlinks=follow_symlinks))
        return found


class _Entries:
    """What scandir returns; its first step is a read of its own."""

    def __init__(self, entries: Any, ask: Callable[[Callable[[], Any]], Any]) -> None:
        self._entries, self._ask, self._began = entries, ask, False

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        entry = next(self._entries) if self._began else self._ask(lambda: next(self._entries))
        self._began = True
        return _Entry(entry, self._ask)


class _Announced(threading.local):
    """Whether this thread is in a call that was counted."""

    now = False


class Reads:
    """Counts the calls that look below a folder, and fails the `n`-th of them; -1 = none."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = f"{root}/"
        self._error, self._left = 0, -1
        self._announced = _Announced()
        self.is_counting = False
        self.seen = 0
        self.hit = ""
        self.evaded: list[str] = []
        guarded = {getattr(os, name): self._failing(getattr(os, name)) for name in (*OF_PATHS, *OF_DESCRIPTORS)}
        guarded[os.scandir] = self._scandir(guarded[os.scandir])
        guarded[io.open] = self._opening(io.open)
        guarded[io.FileIO] = self._opening_raw(io.FileIO)
        _replace(guarded, monkeypatch)
        _listen(self)

    def move(self, root: Path) -> None:
        """From now on below another folder."""
        self._root = f"{root}/"

    def during(self, work: Callable[[], Any], n: int = -1, error: int = errno.ENOENT) -> Any:
        """Do something, and fail its n-th read."""
        self.is_counting, self.seen, self._left, self._error, self.hit = True, 0, n, error, ""
        try:
            return work()
        finally:
            self.is_counting = False
            assert self.evaded == []

    def heard(self, what: Any) -> None:
        """Of an open or a listing, by Python itself."""
        if self.is_counting and not isinstance(what, int) and not self._announced.now:
            path = os.fsdecode(what) if isinstance(what, (str, bytes, os.PathLike)) else ""
            if f"{path}/".startswith(self._root):
                self.evaded.append(path)

    def _count(self, where: str) -> None:
        if self.is_counting and f"{where}/".startswith(self._root):
            self.seen += 1
            if self.seen - 1 == self._left:
                self.hit = where
                raise OSError(self._error, os.strerror(self._error))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        is_copy = call.__name__ == "sendfile"  # which has the source behind the target

        def attempt(what: Any = ".", *how: Any, **named: Any) -> Any:
            if self.is_counting:
                self._count(_where(how[0] if is_copy else what, named.get("dir_fd")))
            self._announced.now = True
            try:
                return call(what, *how, **named)
            finally:
                self._announced.now = False

        return attempt

    def _scandir(self, scandir: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(what: Any = ".") -> Any:
            def ask(step: Callable[[], Any]) -> Any:
                if self.is_counting:
                    self._count(_where(what, None))
                return step()

            return _Entries(scandir(what), ask)

        return attempt

    def _opening(self, opening: Callable[..., Any]) -> Callable[..., Any]:
        """Below the folder a file that reads by calls of `os`, always: it may be kept, and be read when that counts."""

        def attempt(file: Any, *how: Any, **named: Any) -> Any:
            below = f"{_where(file, None)}/".startswith(self._root)
            return (_pyio.open if below else opening)(file, *how, **named)

        return attempt

    def _opening_raw(self, raw: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(file: Any, *how: Any, **named: Any) -> Any:
            below = f"{_where(file, None)}/".startswith(self._root)
            return (_pyio.FileIO if below else raw)(file, *how, **named)

        return attempt


def _where(what: Any, folder: int | None) -> str:
    """The path that a call is about."""
    if isinstance(what, int):
        try:
            return _READLINK(f"/proc/self/fd/{what}")
        except OSError:
            return ""
    path = os.fsdecode(what)
    if folder is None or path.startswith("/"):
        return path
    return f"{_where(folder, None)}/{path}"


def _replace(guarded: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever one of the calls is kept, in a module or a class of one."""
    own = sys.modules[__name__]
    for module in [each for each in sys.modules.values() if each is not None and each is not own]:
        for name, value in list(vars(module).items()):
            if _is_one(value, guarded):
                monkeypatch.setattr(module, name, guarded[value])
            elif isinstance(value, type):
                _replace_in(value, guarded, monkeypatch)


def _replace_in(owner: type, guarded: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in list(vars(owner).items()):
        held = value.__func__ if isinstance(value, staticmethod) else value
        if _is_one(held, guarded):
            monkeypatch.setattr(owner, name, staticmethod(guarded[held]))


def _is_one(value: Any, guarded: dict[Any, Any]) -> bool:
    return type(value) in (BuiltinFunctionType, type) and value in guarded


# --- what Python tells of itself -----------------------------------------------------------------------------

_listening: list[Reads] = []
"""Who is told: a hook cannot be taken away, so there is one, for the last guard."""


def _listen(reads: Reads) -> None:
    if not _listening:
        sys.addaudithook(_heard)
    _listening[:] = [reads]


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event in AUDITED and _listening and _listening[0].is_counting and arguments:
        _listening[0].heard(arguments[0])
