"""A folder that stands for a mount of another machine, which answers or does not when it is told to.

While it is watched, only threads may touch what is in it: the test's own thread is a collector's there.
"""

from __future__ import annotations

import builtins
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stallwatch.sources.logs.guard import Guards

TABLE = "22 1 254:0 / / rw - ext4 /dev/vda rw\n31 22 0:41 / {far} rw - nfs4 server:/x rw\n"


class FarMount:
    """`watch` it with the Guards of the collector that is tested; then it answers until it is made to `hang`."""

    def __init__(self, folder: Path, proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.touched, self.is_mounted = folder, 0, True
        self._proc, self._monkeypatch, self._answers = proc, monkeypatch, threading.Event()
        self._guards: list[Guards] = []
        if not folder.exists():
            folder.mkdir(parents=True)
        (proc / "self").mkdir(parents=True, exist_ok=True)
        (proc / "self" / "mountinfo").write_text(TABLE.format(far=folder))
        self._answers.set()

    def seen_by(self, pid: int) -> None:
        """A process has the same mounts."""
        (self._proc / str(pid) / "mountinfo").write_text(TABLE.format(far=self.folder))

    def opened(self, pid: int, descriptor: int, inode: int = 0, mount: int = 31) -> None:
        """What the kernel tells of an open file of it; without its inode before Linux 5.14."""
        folder = self._proc / str(pid) / "fdinfo"
        folder.mkdir(exist_ok=True)
        shown = f"ino:\t{inode}\n" if inode else ""
        (folder / str(descriptor)).write_text(f"pos:\t0\nflags:\t0100001\nmnt_id:\t{mount}\n{shown}")

    def watch(self, guards: Guards) -> None:
        """From now on it is a mount.  A turn waits for it as long as it takes while it answers, else not at all."""
        self._guards.append(guards)
        guards.turn = 60.0
        begin = guards._begin
        self._monkeypatch.setattr(
            guards, "_begin", lambda mount, work, *how: begin(mount, lambda: self._held(work), *how)
        )
        if len(self._guards) == 1:
            for name in ("stat", "lstat", "scandir", "listdir", "open"):
                self._monkeypatch.setattr(os, name, self._touching(getattr(os, name)))
            self._monkeypatch.setattr(builtins, "open", self._touching(open))

    def hang(self) -> None:
        self._answers.clear()
        for guards in self._guards:
            guards.turn = 0.0

    def answer(self) -> None:
        """It answers again, and whoever waited for it has come back when this returns."""
        self._answers.set()
        for guards in self._guards:
            guards.turn = 60.0
            for job in list(guards._jobs.values()):
                assert job.done.wait(60)

    def _held(self, work: Callable[[], Any]) -> Any:
        """What is read from an open file hangs as well."""
        assert self._answers.wait(60)
        return work()

    def _touching(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def touch(path: Any = ".", *how: Any, **named: Any) -> Any:
            if self._leads_here(path):
                assert threading.current_thread() is not threading.main_thread(), "touched outside of its thread"
                self.touched += 1
                assert self._answers.wait(60)
            return call(path, *how, **named)

        return touch

    def _leads_here(self, path: Any) -> bool:
        if isinstance(path, int) or not self.is_mounted:
            return False
        name = os.fspath(path)
        with suppress(OSError):
            name = os.readlink(name)
        return f"{name}/".startswith(f"{self.folder}/")
