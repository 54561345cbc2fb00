"""A folder that looks like /proc, for sources that take the root of /proc as an argument.

Times are in seconds, memory in bytes; the kernel's units are made here.  Two things a real /proc does for us are
done by hand: a process that ends empties its files before they go (a kept descriptor then reads nothing, where the
kernel says ESRCH), and the counter of forks rises with each new process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stallwatch.model import ProcessId
from stallwatch.sources.blocking_child import answer
from stallwatch.sources.blocking_reads import CommandLine, from_answer
from stallwatch.sources.procfs import CLOCK_TICKS, PAGE_BYTES

BOOT = 1_700_000_000
"""btime of the tree, Unix seconds."""

FUTEX = "202 0x7f00 0x80 0x0 0x0 0x0 0x0 0x7ffd 0x7f01"
"""A syscall file of a thread that waits in a futex (x86-64)."""


@dataclass(frozen=True)
class Thread:
    """One thread; `syscall`, `wchan` or `schedstat` None = the file is missing."""

    syscall: str | None = FUTEX
    wchan: str | None = "futex_do_wait"
    state: str = "S"
    schedstat: str | None = None


@dataclass(frozen=True)
class Spec:
    """Everything one process shows."""

    pid: int
    argv: tuple[str, ...]
    comm: str = "python3"
    ppid: int = 1
    started: float = 100.0
    state: str = "S"
    flags: int = 0
    cpu: float = 0.0
    reaped_cpu: float = 0.0
    minor: int = 0
    major: int = 0
    virtual: int = 1 << 30
    resident: int = 1 << 20
    stack: int = 1 << 40
    threads: int | None = None
    io: Mapping[str, int] | None = field(default_factory=dict)
    cgroup: str = "0::/\n"
    environ: Mapping[str, str] = field(default_factory=dict)
    inner_pid: int | None = None
    tracer: int = 0
    tasks: Mapping[int, Thread] = field(default_factory=dict)

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, round(self.started * CLOCK_TICKS))


def stat_line(spec: Spec, pid: int | None = None, state: str | None = None) -> str:
    """The stat file of a process (proc_pid_stat(5))."""
    ticks = [round(seconds * CLOCK_TICKS) for seconds in (spec.cpu, 0.0, spec.reaped_cpu, 0.0)]
    threads = max(1, len(spec.tasks)) if spec.threads is None else spec.threads
    fields: list[object] = [
        *(state or spec.state, spec.ppid, spec.pid, spec.pid, 0, -1, spec.flags),
        *(spec.minor, 0, spec.major, 0),
        *ticks,
        *(20, 0, threads, 0, spec.id.start_ticks),
        *(spec.virtual, spec.resident // PAGE_BYTES, 2**64 - 1, 1, 1, spec.stack),
        *[0] * 24,
    ]
    return f"{pid or spec.pid} ({spec.comm}) {' '.join(map(str, fields))}\n"


def io_text(given: Mapping[str, int]) -> str:
    """The io file of a process; counters that are not given are 0."""
    names = ("rchar", "wchar", "syscr", "syscw", "read_bytes", "write_bytes", "cancelled_write_bytes")
    return "".join(f"{name}: {given.get(name, 0)}\n" for name in names)


class ProcTree:
    """The folder.  `add`, `change` and `end` processes; each look of a source then sees what a machine would show."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._specs: dict[int, Spec] = {}
        self._forks = 0
        root.mkdir(parents=True, exist_ok=True)
        self._write_forks()

    def add(self, pid: int, command: str | Sequence[str], **given: Any) -> Spec:
        """A new process; `command` is split at blanks unless it is split already, `given` are fields of Spec."""
        spec = Spec(pid, _split(command), **given)
        self.folder(pid).mkdir()
        for name in ("fd", "task"):
            (self.folder(pid) / name).mkdir()
        self._write(spec)
        self._forks += 1
        self._write_forks()
        return spec

    def change(self, pid: int, command: str | Sequence[str] | None = None, **given: Any) -> Spec:
        """The same process later: another title, other counters."""
        argv = self._specs[pid].argv if command is None else _split(command)
        self._write(replace(self._specs[pid], argv=argv, **given))
        return self._specs[pid]

    def end(self, *pids: int) -> None:
        """The processes are gone."""
        for pid in pids:
            del self._specs[pid]
            for path in self.folder(pid).rglob("*"):
                if path.is_file() and not path.is_symlink():
                    path.write_bytes(b"")
            shutil.rmtree(self.folder(pid))

    def replace(self, pid: int, command: str | Sequence[str], **given: Any) -> Spec:
        """The process is gone and another one has its PID, all between two looks."""
        self.end(pid)
        return self.add(pid, command, **given)

    def redirect(self, pid: int, fd: int, target: str | Path) -> None:
        """Where a descriptor leads."""
        link = self.folder(pid) / "fd" / str(fd)
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    def forbid(self, pid: int, name: str) -> None:
        """A file of the process that cannot be read: a directory stands in its place, for root may read any file."""
        path = self.folder(pid) / name
        path.unlink()
        path.mkdir()

    def folder(self, pid: int) -> Path:
        return self.root / str(pid)

    def _write_forks(self) -> None:
        (self.root / "stat").write_text(f"cpu  1 2 3\nbtime {BOOT}\nprocesses {self._forks}\n")

    def _write(self, spec: Spec) -> None:
        self._specs[spec.pid] = spec
        folder = self.folder(spec.pid)
        files = {
            "stat": stat_line(spec),
            "io": None if spec.io is None else io_text(spec.io),
            "cgroup": spec.cgroup,
            "cmdline": "".join(word + "\0" for word in spec.argv),
            "environ": "".join(f"{name}={value}\0" for name, value in spec.environ.items()),
            "status": f"Name:\t{spec.comm}\nNSpid:\t{spec.pid}\t{spec.inner_pid or spec.pid}\n"
            f"TracerPid:\t{spec.tracer}\nThreads:\t1\n",
        }
        for name, text in files.items():
            _put(folder / name, text)
        self._write_tasks(folder / "task", spec)

    def _write_tasks(self, folder: Path, spec: Spec) -> None:
        for name in os.listdir(folder):
            if int(name) not in spec.tasks:
                for path in (folder / name).iterdir():
                    path.write_bytes(b"")
                shutil.rmtree(folder / name)
        for thread, task in spec.tasks.items():
            (folder / str(thread)).mkdir(exist_ok=True)
            _put(folder / str(thread) / "syscall", _line(task.syscall))
            _put(folder / str(thread) / "wchan", task.wchan)
            _put(folder / str(thread) / "schedstat", _line(task.schedstat))
            _put(folder / str(thread) / "stat", stat_line(spec, thread, task.state))


def _split(command: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(command.split(" ")) if isinstance(command, str) else tuple(command)


def _line(text: str | None) -> str | None:
    return None if text is None else text + "\n"


def _put(path: Path, text: str | None) -> None:
    """Write a file in place, so that descriptors kept open read the new content; None removes it."""
    if path.is_dir():
        return
    if text is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(text, errors="surrogateescape")


def threads(number: int, thread: Thread, first: int) -> dict[int, Thread]:
    """Many threads of one kind, numbered from `first` (the main thread's number is the PID)."""
    return {first + index: thread for index in range(number)}


class DirectReads:
    """Command lines read without the helper process; `reasons`: PIDs whose command line cannot be read."""

    def __init__(self, tree: ProcTree) -> None:
        self._tree = tree
        self.reasons: dict[int, str] = {}
        self.asked: list[int] = []
        self.rests = 0

    def command_line(self, process: ProcessId) -> CommandLine:
        self.asked.append(process.pid)
        if process.pid in self.reasons:
            return CommandLine(reason=self.reasons[process.pid])
        return from_answer(answer(str(self._tree.root), str(process.pid), process.start_ticks))

    def rest(self) -> None:
        """There is nothing to end."""
        self.rests += 1

    def close(self) -> None:
        """There is nothing to end."""
