"""The processes that make up a server, kept between looks: counters of members, CPU of their children."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from .. import signals
from ..config import ConfiguredServer
from ..descriptors import Room
from ..frameworks import Framework
from ..model import Process, ProcessId, Server, is_rank_name
from .admission import TRUSTED, Berth
from .attribution import Home
from .cgroup_state import Surroundings
from .cgroups import Placement
from .discovery import Facts
from .process_table import Known
from .procfs import CGROUP_BYTES, Io, KeptFile, ProcFs, Stat, parse_io, parse_stat, reason_of
from .told import Told

SECOND_LOOK_SECONDS = 1.0
"""A rank is dead when it is missing on two looks this far apart: a single read that raced is no death."""

COUNTERS = (
    (signals.CPU_SECONDS, ()),
    (signals.PAGE_FAULTS, ("minor",)),
    (signals.PAGE_FAULTS, ("major",)),
    (signals.STORAGE_READ, ()),
    (signals.READ_BYTES, ()),
    (signals.WRITTEN_BYTES, ()),
)
"""Signal and further labels of each counter of a process."""

LONE_RANK = "TP0"
"""The rank of a model that has one process, whatever it prints."""

_TRACER = re.compile(rb"^TracerPid:\t(\d+)$", re.MULTILINE)
_STATUS_BYTES = 4096


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
    """A process of a server with its kept files.

    `role` is one of frameworks.ROLES; `rank` its name, which changes when its title or its log names it;
    `name` the last such name ("" = it has none of its own).  `missing_since` is set from the first look that
    does not find it, `unreadable` while it lives and its counters cannot be read.  `traced` is known of ranks and
    engines: 1, 0, or why it could not be read.
    """

    def __init__(self, proc: ProcFs, known: Known, role: str, rank: str, now: float, room: Room) -> None:
        self.id, self.user, self.ppid, self.comm = known.id, known.user, known.stat.ppid, known.stat.comm
        self.role, self.rank, self.name, self.adopted_at = role, rank, "", now
        self.missing_since: float | None = None
        self.dead = False
        self.usage: Usage | None = None
        self.last: Stat | None = None  # as last read, also while it cannot be read now
        self.unreadable: str | None = None
        self.traced: float | str | None = None
        self._proc = proc
        self._clock: int | None = None
        self._room = room
        self._kept: dict[str, KeptFile] = {}  # by the name of the file
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
        """Its PID in its own namespace, as its log prints it; asked again while that cannot be read."""
        if not self._inner_pid:
            with suppress(OSError):
                self._inner_pid = self._proc.certain_inner_pid(self.id.pid)
        return self._inner_pid or self.id.pid

    def look(self, now: float, known: Known | None = None) -> None:
        """Read the counters, and whether a debugger holds the process.  `known`: as the table has it at this look."""
        self._look_at_counters(now, known)
        self.traced = self._tracer() if self.is_watched and self.missing_since is None else None

    def _look_at_counters(self, now: float, known: Known | None) -> None:
        """Read them, unless the CPU clock proves that nothing ran since the last look."""
        is_read = known is not None and known.read_at == now and known.id == self.id
        clock = known.clock if known is not None and is_read else self._proc.cpu_clock(self.id.pid)
        is_same = clock is not None and clock == self._clock
        if is_same and self.usage is not None and self.missing_since is None:
            return
        try:
            stat = known.stat if known is not None and is_read else self._read_stat()
        except OSError as error:
            self._fail(reason_of(error), now)
            return
        except (ValueError, IndexError):
            self._fail("error", now)
            return
        if stat.id != self.id or stat.is_over:
            self._fail("vanished", now)
            return
        self.missing_since, self.unreadable, self._clock = None, None, clock
        self.comm, self.last, self.usage = stat.comm, stat, Usage(stat, self._read_io(), self._io_reason)

    def stat(self) -> Stat | None:
        """As of now, by the file that is kept open; None when it cannot be read."""
        try:
            return self._read_stat()
        except (OSError, ValueError, IndexError):
            return None

    def _fail(self, reason: str, now: float) -> None:
        """Gone is not the same as unreadable: only the first may ever mean a death."""
        if reason != "vanished":
            self.usage, self.unreadable = None, reason
            return
        self.missing_since = now if self.missing_since is None else self.missing_since
        self.dead = now - self.missing_since >= SECOND_LOOK_SECONDS

    def _tracer(self) -> float | str | None:
        """State t, or a TracerPid in status (0 when the tracer is in a PID namespace that cannot be seen).

        Read at each look, also while the process works: status costs 17 us however many threads there are, 1 % of
        a cycle that looks at 200 threads of each rank.  No cheaper sign will do: a traced rank that was let go on
        uses CPU, and so do the polling threads of a stuck one.
        """
        if self.last is not None and self.last.state == "t":
            return 1.0
        try:
            match = _TRACER.search(self._read("status", _STATUS_BYTES))
        except OSError as error:
            reason = reason_of(error)
            return None if reason == "vanished" else reason
        return float(match[1] != b"0") if match else None

    def cgroup(self) -> str:
        """The text of its cgroup file, as ProcFs.cgroup has it; empty when it cannot be read."""
        try:
            return self._proc.cgroup_text(self._read("cgroup", CGROUP_BYTES))
        except OSError:
            return ""

    def _read_stat(self) -> Stat:
        return parse_stat(self._read("stat"))

    def _read_io(self) -> Io | None:
        try:
            self._io_reason = None
            return parse_io(self._read("io"))
        except OSError as error:
            self._io_reason = reason_of(error)
            return None

    def _read(self, name: str, size: int = 1024) -> bytes:
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = KeptFile(self._proc.path(self.id.pid, name), self._room, size)
        return kept.read()

    def close(self) -> None:
        for kept in self._kept.values():
            kept.close()


@dataclass(slots=True)
class Account:
    """What was counted so far of one process, in CPU seconds: its own, and that of its ended children."""

    own: float
    reaped: float
    parent: int
    kind: str


@dataclass(slots=True)
class Debt:
    """What was counted of ended children and does not show in their parent's account yet, in CPU seconds.

    `ranks`: of ranks and engines, which their parent waits for sooner or later.  `late`: of others, good for one
    more look: who ignores its children never accounts for them.
    """

    ranks: float = 0.0
    fresh: float = 0.0
    late: float = 0.0

    def take(self, grown: float) -> float:
        """What of the growth of the parent's account was not counted before."""
        left = self.ranks + self.fresh + self.late - grown
        self.ranks = max(0.0, min(left, self.ranks))
        self.late, self.fresh = max(0.0, min(left - self.ranks, self.fresh)), 0.0
        return max(0.0, -left)


@dataclass(slots=True)
class Children:
    """CPU of the children of one server's ranks and engines, by kind.

    An ended child shows in its parent's account (cutime of /proc/PID/stat) once the parent waited for it;
    what was counted while it lived is taken off there.  So each second counts once, also those of a child that
    came and went between two looks, and the sums never fall.
    """

    seconds: dict[str, float] = field(default_factory=lambda: {"compiler": 0.0, "other": 0.0})
    live: Counter[str] = field(default_factory=Counter)
    _accounts: dict[ProcessId, Account] = field(default_factory=dict)
    _debts: dict[int, Debt] = field(default_factory=dict)
    _last_kind: str = "other"

    @property
    def are_counted(self) -> bool:
        """Whether an update without anybody would change anything: the last one saw somebody."""
        return bool(self._accounts or self._debts or self.live)

    def update(self, parents: Iterable[Stat], children: Sequence[tuple[Stat, str]]) -> None:
        """Take in ranks and engines (`parents`) and their live children with kinds, parents before children."""
        everyone = [*((stat, "") for stat in parents), *children]
        present = {stat.id for stat, _ in everyone}
        self._note_ended({p: account for p, account in self._accounts.items() if p not in present})
        before, self._accounts = self._accounts, {}
        for stat, kind in everyone:
            self._count(stat, kind, before.get(stat.id))
        pids = {stat.pid for stat, _ in everyone}
        self._debts = {pid: debt for pid, debt in self._debts.items() if pid in pids}
        self.live = Counter(kind for stat, kind in children if not stat.is_over)

    def _note_ended(self, ended: Mapping[ProcessId, Account]) -> None:
        """Whoever waited for them, or for the one that waited for them, has them in its account."""
        by_pid = {process.pid: account for process, account in ended.items()}
        for account in ended.values():
            parent = account.parent
            for _ in ended:
                parent = by_pid[parent].parent if parent in by_pid else parent
            debt = self._debts.setdefault(parent, Debt())
            if account.kind:
                debt.fresh += account.own + account.reaped
                self._last_kind = account.kind
            else:
                debt.ranks += account.own + account.reaped

    def _count(self, stat: Stat, kind: str, before: Account | None) -> None:
        last = before or Account(0.0, 0.0 if kind else stat.reaped_cpu_seconds, 0, kind)
        own, reaped = max(last.own, stat.cpu_seconds), max(last.reaped, stat.reaped_cpu_seconds)
        if kind:
            self.seconds[kind] += own - last.own
        unseen = self._debts.setdefault(stat.pid, Debt()).take(reaped - last.reaped)
        self.seconds[kind or self._last_kind] += unseen
        self._accounts[stat.id] = Account(own, reaped, stat.ppid, kind)


@dataclass(slots=True)
class Tracked:
    """One start of one server.  `members` are the living ones; `dead_ranks`: rank -> when it was found dead."""

    name: str
    framework: Framework
    role: str
    root: ProcessId
    facts: Facts
    started_at: float
    starts: int
    home: Home
    around: Surroundings
    configured: ConfiguredServer | None = None
    berth: Berth = TRUSTED
    slurm_job: str = ""
    home_read: float = float("-inf")
    members: dict[ProcessId, Member] = field(default_factory=dict)
    children: Children = field(default_factory=Children)
    retired: dict[tuple[str, int], float] = field(default_factory=dict)
    dead_ranks: dict[str, float] = field(default_factory=dict)
    log_names: dict[tuple[ProcessId | int, int], str] = field(default_factory=dict)
    """Names of logs by (process, stream) and by (device, inode): they outlast a renaming and a new file."""
    titles_read: float = float("-inf")
    root_gone: bool = False
    stopping: bool | None = None
    """Its unit is being stopped on purpose, as last answered; None = nobody was asked, or there is no answer now."""
    ended_at: float | None = None
    told: dict[object, Told] = field(default_factory=dict)
    """What was told at the last look, by subject (readings.report)."""
    shown: tuple[object, Server] | None = None
    """Its record at the last look, and all that it was made of."""

    @property
    def placement(self) -> Placement:
        return self.home.placement

    @property
    def expected(self) -> int:
        """This node's share of the ranks."""
        facts = self.facts
        world = facts.tensor_parallel * facts.pipeline_parallel * facts.data_parallel
        return max(1, world // facts.nnodes)

    @property
    def is_losing(self) -> bool:
        """A rank, an engine or the first process was not there at this look."""
        missing = [member for member in self.members.values() if member.missing_since is not None]
        return any(member.is_watched or member.id == self.root for member in missing)

    @property
    def holder(self) -> Member | None:
        """Whose standard streams are the server's: the first process, else any that lives."""
        living = [member for member in self.members.values() if member.missing_since is None]
        root = self.members.get(self.root)
        return root if root in living else next(iter(living), None)

    def rename(self, member: Member, rank: str) -> None:
        """Give a member another name; what it counted so far stays with the old one, whose sums never fall."""
        if member.rank != rank:
            self.retire(member)
            member.rank = rank

    def retire(self, member: Member) -> None:
        """Keep what a process counted under the label that it leaves."""
        if member.usage is None:
            return
        label = member.label
        for index, value in enumerate(member.usage.counters()):
            if value is not None:
                self.retired[label, index] = self.retired.get((label, index), 0.0) + value

    def bury(self, member: Member, now: float) -> None:
        """The member is dead."""
        self.retire(member)
        if member.is_watched:
            self.dead_ranks.pop(member.rank, None)
            self.dead_ranks[member.rank] = now  # the latest death stands last
        self.root_gone = self.root_gone or member.id == self.root
        self.drop(member)

    def drop(self, member: Member) -> None:
        """The process lives or not, it is no member any more."""
        member.close()
        del self.members[member.id]

    def forget_dead(self, most: int) -> None:
        """Keep the names of ranks, living and dead, to a number; the latest death is always known."""
        living = {member.rank for member in self.members.values() if is_rank_name(member.rank)}
        gone = [rank for rank in self.dead_ranks if rank not in living]
        for rank in gone[: max(0, min(len(gone) - 1, len(living) + len(gone) - most))]:
            del self.dead_ranks[rank]

    def is_dead(self, rank: str) -> bool:
        """A rank that died, and that no younger process has taken the place of."""
        died = self.dead_ranks.get(rank)
        heirs = (member.adopted_at for member in self.members.values() if member.rank == rank)
        return died is not None and not any(adopted > died for adopted in heirs)
