"""The `threads` collector: how many threads of each rank wait in what.

One descriptor per thread stays open (its syscall file, else wchan) and is read again by pread.  A process whose
CPU clock did not move since the last look had no thread running, so nothing changed: it is not read at all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import repeat
from typing import ClassVar

from .. import signals
from ..model import WAITS, Observation, Process, ProcessId, Scene, Signal
from . import Host, Moment
from .procfs import ProcFs, parse_stat
from .wait_class import class_of_state, class_of_symbol, class_of_syscall

SYSCALL_BYTES = 48
"""Enough for the number; the arguments (addresses) are not looked at."""

_BLOCKED_OUTSIDE = b"-1"
"""Sleeping without a system call: a page fault, mostly."""
_INTERRUPTED = (b"219", b"128")
"""restart_syscall: a sleep taken up again after a stop; the symbol says which."""


class ThreadFiles:
    """The kept files of one process.  `count` returns classes, or None when the process is gone."""

    def __init__(self, proc: ProcFs, process: ProcessId, by_number: dict[bytes, str]) -> None:
        self.id = process
        self._proc, self._by_number = proc, by_number
        self._fds: dict[int, int] = {}
        self._file = "syscall"
        self._clock: int | None = -1
        self.counts: Counter[str] | None = None
        self.main: str | None = None

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def look(self) -> None:
        """Count again unless nothing ran.  After a failure `counts` is None (gone)."""
        clock = self._proc.cpu_clock(self.id.pid)
        if clock is not None and clock == self._clock and self.counts is not None:
            return
        self._clock = clock
        try:
            self._count()
        except OSError:
            self.counts = self.main = None

    def _count(self) -> None:
        state = self._state(self.id.pid)
        contents = self._contents()
        whole = class_of_state(state)
        if whole == "stopped":
            self.counts, self.main = Counter(stopped=len(contents)), "stopped"
            return
        classes = self._classes(contents)
        self.counts = Counter(classes.values())
        self.main = classes.get(self.id.pid)

    def _contents(self) -> dict[int, bytes]:
        """thread -> content of its file; the set of threads is brought up to date first when it changed."""
        folder = self._proc.path(self.id.pid, "task")
        if os.stat(folder).st_nlink - 2 != len(self._fds):
            self._relist(folder)
        try:
            return dict(
                zip(
                    self._fds,
                    map(os.pread, self._fds.values(), repeat(SYSCALL_BYTES), repeat(0)),
                    strict=True,
                )
            )
        except ProcessLookupError:
            self._relist(folder)
        except PermissionError:
            self._use_symbols()
        return self._one_by_one()

    def _one_by_one(self) -> dict[int, bytes]:
        contents = {}
        for thread, fd in tuple(self._fds.items()):
            try:
                contents[thread] = os.pread(fd, SYSCALL_BYTES, 0)
            except ProcessLookupError:
                os.close(self._fds.pop(thread))
            except PermissionError:
                contents[thread] = b"0"
        return contents

    def _relist(self, folder: str) -> None:
        present = {int(name) for name in os.listdir(folder)}
        for thread in self._fds.keys() - present:
            os.close(self._fds.pop(thread))
        for thread in present - self._fds.keys():
            self._open(thread)

    def _open(self, thread: int) -> None:
        try:
            self._fds[thread] = self._open_file(thread)
        except PermissionError:
            self._use_symbols()
            self._fds.setdefault(thread, self._open_file(thread))
        except (FileNotFoundError, ProcessLookupError):
            return  # it ended between the listing and here

    def _open_file(self, thread: int) -> int:
        return os.open(self._thread_path(thread, self._file), os.O_RDONLY | os.O_CLOEXEC)

    def _use_symbols(self) -> None:
        """No right to read syscall: keep wchan files instead."""
        if self._file == "wchan":
            return
        self._file = "wchan"
        threads = tuple(self._fds)
        self.close()
        for thread in threads:
            self._open(thread)

    def _thread_path(self, thread: int, name: str) -> str:
        return self._proc.path(self.id.pid, "task", str(thread), name)

    def _classes(self, contents: dict[int, bytes]) -> dict[int, str]:
        if self._file == "wchan":
            return self._classes_by_symbol(contents)
        return {thread: self._class_by_number(thread, text) for thread, text in contents.items()}

    def _class_by_number(self, thread: int, text: bytes) -> str:
        word = text.split(b" ", 1)[0].strip()
        if (known := self._by_number.get(word)) is not None:
            return known
        if word == b"running":
            return "running"
        if word in _INTERRUPTED or not self._by_number:
            return self._symbol(thread) or "other"
        return class_of_state(self._state(thread, thread)) or "other"

    def _symbol(self, thread: int) -> str | None:
        try:
            with open(self._thread_path(thread, "wchan"), "rb", buffering=0) as file:
                return class_of_symbol(file.read(64).decode("ascii", "replace"))
        except OSError:
            return None

    def _classes_by_symbol(self, contents: dict[int, bytes]) -> dict[int, str]:
        """By wchan.  `0` of a sleeping thread means that the kernel does not tell: then nothing of it counts."""
        classes: dict[int, str] = {}
        denied = False
        for thread, text in contents.items():
            known = class_of_symbol(text.decode("ascii", "replace").strip())
            if known is None and not denied:
                state = class_of_state(self._state(thread, thread))
                denied = state not in ("running", "stopped")
                known = state
            classes[thread] = known or "unreadable"
        return dict.fromkeys(classes, "unreadable") if denied else classes

    def _state(self, pid: int, thread: int | None = None) -> str:
        path = self._thread_path(thread, "stat") if thread else self._proc.path(pid, "stat")
        with open(path, "rb", buffering=0) as file:
            return parse_stat(file.read(1024)).state


class Threads:
    """See the module."""

    name: ClassVar[str] = "threads"
    signals: ClassVar[tuple[Signal, ...]] = (signals.THREADS, signals.MAIN_THREAD)

    def __init__(self, host: Host, machine: str | None = None) -> None:
        self._proc = ProcFs(host.proc)
        self._by_number = dict(class_of_syscall(machine))
        self._files: dict[ProcessId, ThreadFiles] = {}

    def close(self) -> None:
        for files in self._files.values():
            files.close()
        self._files.clear()

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """Count the threads of every process of every server.

        stallwatch_threads{server="sglang-30000",rank="TP3",wait="futex"} 205
        stallwatch_main_thread{server="sglang-30000",rank="TP3",wait="futex"} 1

        Where the kernel does not tell, all threads of the process are `unreadable` and the other classes of
        that rank are absent: never "0 blocked threads".
        """
        wanted = {process.id for server in scene.servers for process in server.processes}
        for ended in self._files.keys() - wanted:
            self._files.pop(ended).close()
        for server in scene.servers:
            by_label: dict[str, list[ThreadFiles]] = {}
            for process in server.processes:
                files = self._look(process)
                if files.counts is not None:
                    by_label.setdefault(process.label, []).append(files)
            for label, group in by_label.items():
                yield from self._report(server.name, label, group)

    def _look(self, process: Process) -> ThreadFiles:
        files = self._files.get(process.id)
        if files is None:
            files = self._files[process.id] = ThreadFiles(self._proc, process.id, self._by_number)
        files.look()
        return files

    def _report(self, server: str, label: str, group: list[ThreadFiles]) -> Iterator[Observation]:
        counts: Counter[str] = Counter()
        for files in group:
            counts.update(files.counts or {})
        unreadable = counts.get("unreadable", 0)
        for wait in WAITS:
            if wait == "unreadable" or not unreadable:
                yield signals.THREADS.read(counts.get(wait, 0), server, label, wait)
            else:
                yield signals.THREADS.missing("permission", server, label, wait)
        if len(group) == 1 and group[0].main is not None:
            yield signals.MAIN_THREAD.read(1.0, server, label, group[0].main)
