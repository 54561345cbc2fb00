"""Builds a tree like /proc of a machine in kernels.yaml, with one server in it, and looks at it as the exporter does.

From the sources over the daemon to the verdict everything is the real code; only the tree and the clock are ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from kernels.rights import without_file_rights
from proc_tree import BOOT, DirectReads, ProcTree, Spec, Thread, io_text, stat_line
from stallwatch.config import Config, Thresholds
from stallwatch.daemon import Daemon
from stallwatch.drill import story
from stallwatch.frameworks import load_frameworks
from stallwatch.model import Report, Result, Scene, ServerReport
from stallwatch.poller import Poller
from stallwatch.sources import Host, Source
from stallwatch.sources.connections import Attempt
from stallwatch.sources.logs.collector import Logs
from stallwatch.sources.processes import Processes
from stallwatch.sources.sockets import Sockets
from stallwatch.sources.threads import Threads

DATA: Mapping[str, Any] = yaml.safe_load((Path(__file__).with_name("kernels.yaml")).read_text())
FRAMEWORKS = load_frameworks()
CONTAINER = "0123456789abcdef" * 4
STATE_WORDS = {"S": "sleeping", "D": "disk sleep", "R": "running", "T": "stopped", "t": "tracing stop"}
MIB = 1 << 20

RANKS, FIRST = 8, 200
"""Ranks of the server, and the PID of the first."""

CROWD = ("futex", "epoll", "poll")
"""What the other threads of a rank wait in."""

STEP = 10.0
THRESHOLDS = Thresholds(window=30.0, stall_after=45.0)
LOADS, STANDS_STILL = 3, 6
"""Looks while it loads, and looks after that: 60 s, more than `stall_after`, which is short to be quick."""


@dataclass(frozen=True)
class Machine:
    """A line of `machines` in kernels.yaml; `wchan` zero and `syscall` none take these files' words away."""

    name: str
    kernel: str
    arch: str
    cgroup: str
    wchan: str = "symbols"
    syscall: str = "numbers"

    def shows_waits(self, reader: str) -> bool:
        """Whether the kernel tells this reader what a thread sleeps in."""
        denied = DATA["readers"][reader]
        by_number = self.syscall == "numbers" and "syscall" not in denied["denied"]
        return by_number or (self.wchan == "symbols" and not denied["blank"])


MACHINES = tuple(Machine(name, **facts) for name, facts in DATA["machines"].items())


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


class KernelTree(ProcTree):
    """A tree whose files have the form of one kernel, as one reader may see them."""

    def __init__(self, root: Path, machine: Machine, reader: str = "root") -> None:
        self.machine, self._reader = machine, DATA["readers"][reader]
        super().__init__(root)

    def thread(self, wait: str, state: str = "S", symbol: str | None = None) -> Thread:
        """A thread that sleeps in `wait`, a key of `syscalls`; `symbol` another key of `symbols` than that."""
        machine, blank = self.machine, self._reader["blank"]
        number = DATA["syscalls"][machine.arch][wait]
        arguments = "" if number < 0 else " 0x7f00" + " 0x0" * 5
        text = f"{number}{arguments} 0x7ffd 0x7f01"
        name = DATA["symbols"][machine.kernel][symbol or wait]
        shown = "0" if blank or machine.wchan == "zero" else name
        return Thread(text if machine.syscall == "numbers" else None, shown, state)

    def _write(self, spec: Spec) -> None:
        """Files that the reader may not read keep their content and lose their mode."""
        folder = self.folder(spec.pid)
        self._set_modes(folder, 0o700)
        super()._write(spec)
        (folder / "status").write_text(self._status(spec))
        for name in ("ns", "net"):
            (folder / name).mkdir(exist_ok=True)
        if not (folder / "ns/net").is_symlink():
            (folder / "ns/net").symlink_to("net:[4026531840]")
            (folder / "net/tcp").write_text("  sl  local_address rem_address   st\n")
        self._set_modes(folder, 0)

    def _set_modes(self, folder: Path, mode: int) -> None:
        """Of what the reader may not read; whoever runs the tests without being root needs them back to write."""
        for name in self._reader["denied"]:
            for path in folder.glob("task/*/syscall" if name == "syscall" else name):
                path.chmod(mode)

    def open_up(self, pid: int) -> None:
        """Every mode as it was, so that whoever made the tree can remove it."""
        self.folder(pid).chmod(0o700)
        self._set_modes(self.folder(pid), 0o700)

    def lead_into(self, pid: int, log: Path) -> None:
        """Where stdout and stderr of a process go."""
        self._set_modes(self.folder(pid), 0o700)
        for number in (1, 2):
            self.redirect(pid, number, log)
        self._set_modes(self.folder(pid), 0)

    def count(self, pid: int, **counters: Any) -> None:
        """The process later, when only its counters have changed."""
        spec = self._specs[pid] = replace(self._specs[pid], **counters)
        (self.folder(pid) / "stat").write_text(stat_line(spec))
        io, is_denied = self.folder(pid) / "io", "io" in self._reader["denied"]
        if is_denied:
            io.chmod(0o600)
        io.write_text(io_text(counters["io"]))
        if is_denied:
            io.chmod(0)

    def _status(self, spec: Spec) -> str:
        release, arch = _release(self.machine.kernel), self.machine.arch
        lines = (
            each["line"]
            for each in DATA["status"]
            if release >= _release(each.get("since", "0")) and each.get("arch", arch) == arch
        )
        return "".join(line + "\n" for line in lines).format(
            comm=spec.comm,
            state=spec.state,
            state_word=STATE_WORDS[spec.state],
            pid=spec.pid,
            ppid=spec.ppid,
            tracer=0,
            threads=max(1, len(spec.tasks)),
            namespaced=f"{spec.pid}\t{spec.inner_pid}" if spec.inner_pid else str(spec.pid),
        )


class Stage:
    """A machine on which a server with eight ranks loads and then stands still, and the exporter that looks at it."""

    def __init__(self, root: Path, machine: Machine, reader: str = "root", place: str = "unit") -> None:
        self.machine, self.reader = machine, reader
        root.mkdir()
        self.tree = KernelTree(root / "proc", machine, reader)
        self.log = root / "server.log"
        self.log.write_text("")
        self.now, self.published = 1000.0, list[Report]()
        self._cgroup = DATA["cgroups"][machine.cgroup][place].format(id=CONTAINER)
        self._counters: dict[int, dict[str, Any]] = {}
        host = Host(Config(verdict=THRESHOLDS), FRAMEWORKS, self.tree.root, root)
        reads = DirectReads(self.tree)
        self.sources: tuple[Source, ...] = (
            Processes(host, reads),
            Threads(host, machine.arch),
            Sockets(host, connect=_refused),
            Logs(host),
        )
        self.daemon = Daemon(host, self._pollers, self.published.append, lambda: self.now, self._wall)

    def close(self) -> None:
        """End the sources, and make the tree one that can be removed."""
        for source in self.sources:
            source.close()
        for pid in self.pids:
            self.tree.open_up(pid)

    def _wall(self) -> float:
        return BOOT + self.now

    def _pollers(self, scene: Callable[[], Scene], notify: Callable[[Result], None]) -> list[Poller]:
        self.pollers = [Poller(s, STEP, scene, notify, lambda: self.now, self._wall) for s in self.sources]
        return self.pollers

    # --- what the machine does ---------------------------------------------------------------------------

    def add(self, pid: int, command: str | Sequence[str], **given: Any) -> None:
        """A process whose stdout and stderr go into the log."""
        started = self.now - 5.0
        self.tree.add(pid, command, started=started, cgroup=self._cgroup, **given)
        self.tree.lead_into(pid, self.log)
        self._counters[pid] = {"cpu": 40.0, "minor": 200_000, "io": {"rchar": 9 << 30, "read_bytes": 8 << 30}}

    def sglang(self, **odd: Thread) -> None:
        """`sglang.launch_server --tp 8` and its ranks; `TP5=thread`: the main thread of that rank."""
        self.add(100, "python3 -m sglang.launch_server --model-path /models/m --tp 8 --port 30000", comm="python3")
        self.add(101, "sglang::detokenizer", comm="sglang::detoken", ppid=100)
        for rank in range(RANKS):
            pid = FIRST + 10 * rank
            main = odd.get(f"TP{rank}", self.tree.thread("futex"))
            crowd = {pid + 1 + index: self.tree.thread(wait) for index, wait in enumerate(CROWD)}
            tasks = {pid: main, **crowd}
            self.add(
                pid, f"sglang::scheduler_TP{rank}", comm="sglang::schedul", ppid=100, tasks=tasks, state=main.state
            )

    @property
    def pids(self) -> list[int]:
        return list(self._counters)

    def hide(self, pid: int) -> None:
        """The folder is not there any more; the process and descriptors that lead into the folder are."""
        self.tree.folder(pid).rename(self.tree.root.parent / f"hidden-{pid}")
        del self._counters[pid]

    def write(self, text: str, rank: int | None = None) -> None:
        """A line of SGLang's log."""
        self.write_raw(story.stamp(datetime.fromtimestamp(self._wall(), UTC), text, rank))

    def write_raw(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)
        os.utime(self.log, (self._wall(), self._wall()))

    def grow(self, pid: int, **amounts: int) -> None:
        """A process gets on: `read_bytes`, `rchar`, `minor`."""
        counters = self._counters[pid]
        counters["minor"] += amounts.pop("minor", 0)
        counters["io"] = {name: value + amounts.get(name, 0) for name, value in counters["io"].items()}

    def noise(self) -> None:
        """What stuck processes still do (docs/NOISE.md, rows a c d)."""
        for counters in self._counters.values():
            counters["cpu"] += 0.009 * STEP
            counters["minor"] += 1
            counters["io"]["rchar"] += 30_000

    # --- what the exporter makes of it -------------------------------------------------------------------

    def _as_reader(self) -> AbstractContextManager[None]:
        return nullcontext() if self.reader == "root" else without_file_rights()

    def look(self, *moving: int, **amounts: int) -> Report:
        """STEP seconds later, after some noise and the given amounts in the `moving` processes."""
        self.now += STEP
        self.noise()
        for pid in moving:
            self.grow(pid, **amounts)
        for pid, counters in self._counters.items():
            self.tree.count(pid, **counters)
        with self._as_reader():
            for poller in self.pollers:
                poller.turn()
            report = self.daemon.tick()
        assert [each.source for each in report.health if not each.success] == []
        return report

    def load(self) -> Report:
        """All ranks load alike: storage, log and memory move."""
        self.write(story.arguments("/models/m", RANKS, 30000))
        for rank in range(RANKS):
            self.write(story.load_begin(), rank)
        ranks = [FIRST + 10 * rank for rank in range(RANKS)]
        for _ in range(LOADS):
            report = self.look(*ranks, read_bytes=300 * MIB, minor=70_000)
        return report

    def stand_still(self, *moving: int, **amounts: int) -> ServerReport:
        """Until more than `stall_after` is over."""
        for _ in range(STANDS_STILL):
            report = self.look(*moving, **amounts)
        (server,) = report.servers
        return server

    @property
    def states(self) -> set[str]:
        """Every state any server had so far."""
        return {server.verdict.state for report in self.published for server in report.servers}

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Labels behind the server -> value, of the last report."""
        readings = self.published[-1].readings
        return {r.labels[1:]: r.value for r in readings if r.signal.name == name and r.value is not None}

    def errors(self, source: str) -> set[str]:
        """Reasons for which values of a source could not be read."""
        return {reason for name, reason in self.published[-1].read_errors if name == source}


def _refused(attempts: Sequence[Attempt], seconds: float) -> list[str]:
    return ["refused" for _ in attempts]
