"""The processes that make up a server, kept between looks: counters of members, CPU of their children."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .. import signals
from ..model import Process, ProcessId, is_rank_name
from .process_table import Known
from .procfs import Io, KeptFile, ProcFs, Stat, parse_io, parse_stat, reason_of

SECOND_LOOK_SECONDS = 1.0
"""A rank is dead when it is missing on two looks this far apart (CONTRACT section 4)."""

COUNTERS = (
    (signals.CPU_SECONDS, ()),
    (signals.PAGE_FAULTS, ("minor",)),
    (signals.PAGE_FAULTS, ("major",)),
    (signals.STORAGE_READ, ()),
    (signals.READ_BYTES, ()),
    (signals.WRITTEN_BYTES, ()),
)
"""Signal and further labels of each counter of a process."""


@dataclass(slots=True)
class Usage:
    """Counters of one process as last read, in the order of COUNTERS; `io_reason` when io is unreadable."""

    stat: Stat
    io: Io | None
    io_reason: str | None = None

    def counters(self) -> tuple[float | None, ...]:
        io = self.io
        return (
            self.stat.cpu_seconds,
            self.stat.minor_faults,
            self.stat.major_faults,
            io.storage_read if io else None,
            io.read_chars if io else None,
            io.written_chars if io else None,
        )


class Member:
    """A process of a server with its kept files.  `rank` changes when its title or its log names it."""

    def __init__(self, proc: ProcFs, known: Known, rank: str) -> None:
        self.id, self.rank, self.user, self.ppid = known.id, rank, known.user, known.stat.ppid
        self.comm = known.stat.comm
        self.missing_since: float | None = None
        self.dead = False
        self.usage: Usage | None = None
        self._proc, self._clock = proc, -1
        self._stat: KeptFile | None = None
        self._io: KeptFile | None = None
        self._io_reason: str | None = None
        self._inner_pid = 0

    @property
    def label(self) -> str:
        return Process(self.id, self.rank).label

    @property
    def is_watched(self) -> bool:
        """Ranks and engines: their death is a certain sign."""
        return is_rank_name(self.rank) or self.rank.startswith("engine")

    @property
    def inner_pid(self) -> int:
        """Its PID in its own namespace, as its log prints it."""
        if not self._inner_pid:
            self._inner_pid = self._proc.inner_pid(self.id.pid)
        return self._inner_pid

    def look(self, now: float) -> None:
        """Read the counters, unless the CPU clock proves that nothing ran since the last look."""
        clock = self._proc.cpu_clock(self.id.pid)
        if clock is not None and clock == self._clock and self.usage is not None and not self.missing_since:
            return
        stat = self._read_stat()
        if stat is None or stat.id != self.id or (stat.state in "ZX" and stat.threads <= 1):
            self.missing_since = self.missing_since if self.missing_since is not None else now
            self.dead = now - self.missing_since >= SECOND_LOOK_SECONDS
            return
        self.missing_since, self._clock, self.comm = None, -1 if clock is None else clock, stat.comm
        self.usage = Usage(stat, self._read_io(), self._io_reason)

    def _read_stat(self) -> Stat | None:
        try:
            if self._stat is None:
                self._stat = KeptFile(self._proc.path(self.id.pid, "stat"))
            return parse_stat(self._stat.read())
        except (OSError, ValueError, IndexError):
            return None

    def _read_io(self) -> Io | None:
        try:
            if self._io is None:
                self._io = KeptFile(self._proc.path(self.id.pid, "io"))
            self._io_reason = None
            return parse_io(self._io.read())
        except OSError as error:
            self._io_reason = reason_of(error)
            return None

    def close(self) -> None:
        for kept in (self._stat, self._io):
            if kept is not None:
                kept.close()


@dataclass(slots=True)
class Child:
    """A child process of a rank or engine that is no rank itself."""

    id: ProcessId
    kind: str
    cpu_seconds: float = 0.0


@dataclass(slots=True)
class Children:
    """CPU of the children of one server by kind; ended ones stay counted, so the sums never fall."""

    live: dict[ProcessId, Child] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=lambda: {"compiler": 0.0, "other": 0.0})
    reaped: float = 0.0  # CPU of ended children as their parents account for it
    last_kind: str = "other"

    def update(self, children: Iterable[tuple[Known, str]], reaped_cpu_seconds: float) -> None:
        """Take in the live children and what the ranks say of the ended ones.

        A child that came and went between two looks is only in its parent's account; that rest goes to the
        kind that ended last.
        """
        present = {known.id: (known, kind) for known, kind in children}
        known_ended = 0.0
        for process in self.live.keys() - present.keys():
            child = self.live.pop(process)
            self.ended[child.kind] += child.cpu_seconds
            known_ended += child.cpu_seconds
            self.last_kind = child.kind
        for process, (known, kind) in present.items():
            cpu = known.stat.cpu_seconds + known.stat.reaped_cpu_seconds
            self.live[process] = Child(
                process, kind, max(cpu, self.live[process].cpu_seconds if process in self.live else 0)
            )
        unseen = reaped_cpu_seconds - self.reaped - known_ended
        if unseen > 0 and self.reaped:
            self.ended[self.last_kind] += unseen
        self.reaped = max(self.reaped, reaped_cpu_seconds)

    def totals(self) -> dict[str, tuple[int, float]]:
        """kind -> (live children, CPU seconds)."""
        counts = {kind: [0, seconds] for kind, seconds in self.ended.items()}
        for child in self.live.values():
            counts[child.kind][0] += 1
            counts[child.kind][1] += child.cpu_seconds
        return {kind: (int(number), float(seconds)) for kind, (number, seconds) in counts.items()}
