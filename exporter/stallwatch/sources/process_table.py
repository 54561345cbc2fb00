"""Every process of the node, kept between looks: who is new, who is gone, what its command line said.

Looking is cheap because it is mostly not done: only PIDs given out since are looked for, and all are listed seldom
(where the kernel does not tell the last PID, whenever its counter of forks moved).  So one that ended may still be here
for a while: whoever takes one in has it refreshed first.  Of what is known only what ran is read again: members
of servers and young processes (one may still exec or set its title) at each look, the others from time to time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..model import ProcessId
from .blocking_reads import CommandLine
from .discovery import Command
from .procfs import KERNEL_THREAD, ProcFs, Stat

YOUNG_SECONDS = 30.0
FULL_LOOK_SECONDS = 30.0
LISTING_SECONDS = 120.0
"""Between listings where PIDs are looked for as they are given out: half of a full look would be to list 2,000."""
MOST_GIVEN = 512
"""PIDs that may have been given out lately and are looked for one by one; of more all processes are listed."""
RETRY_SECONDS = 60.0
SOON_SECONDS = 5.0
"""The first retry comes earlier: on a busy machine the helper may just have been slow to start."""
_ASKED_AGAIN = ("timeout", "error", "vanished")
"""Why a command line is read again; what has really vanished is not in the table any more by then."""
MOST_COMMANDS = 2048
"""Command lines read in one look (each costs about 0.1 ms); the rest waits for the next."""
MOST_HUNG, MOST_HUNG_OF_ALL = 2, 8
"""Readings of one user's processes, and of all, that may hang in one look: each costs a deadline."""


Read = Callable[[], Stat | None]
"""A way to the stat of a process; None where there is none any more."""


def _nothing() -> None:
    """No cheaper way."""


@dataclass(slots=True)
class Known:
    """A process that was seen.  `command` None = its command line was not (yet) read."""

    stat: Stat
    first_seen: float
    user: int
    command: Command | None = None
    command_read: float = 0.0
    failures: int = 0  # readings in a row that hung or failed
    clock: int | None = None  # its CPU time just before stat was read
    read_at: float = float("-inf")  # the last look that read stat, or knew it to be the same
    id: ProcessId = field(init=False)
    _read_as: tuple[str, int] = ("", 0)  # comm and stack when the command line was read

    def __post_init__(self) -> None:
        self.id = self.stat.id

    @property
    def is_changed(self) -> bool:
        """Another name, or another program, since the command line was read."""
        return self._read_as != (self.stat.comm, self.stat.start_stack)

    @property
    def is_doubtful(self) -> bool:
        """Its command line could not be read once, and is asked for again soon."""
        return self.failures == 1

    def is_due_again(self, now: float) -> bool:
        """A reading that failed is repeated, soon and then seldom: each costs a deadline when it hangs."""
        wait = SOON_SECONDS if self.is_doubtful else RETRY_SECONDS
        return self.failures > 0 and now - self.command_read >= wait

    def take(self, command: Command, now: float) -> None:
        """Remember what its command line says.

        A failed second reading does not undo the first, unless another program runs since: a launcher in Python
        that became the server is not for ever what it was.
        """
        known = self.command is not None and self.command.reason is None
        is_same_program = self._read_as[1] == self.stat.start_stack
        if command.reason is None or not (known and is_same_program):
            self.command = command
        self.failures = self.failures + 1 if command.reason in _ASKED_AGAIN else 0
        self.command_read, self._read_as = now, (self.stat.comm, self.stat.start_stack)


def in_turn(due: Iterable[Known]) -> list[Known]:
    """One process of each user after the other, so that nobody who starts many keeps the others waiting."""
    turns = Counter[int]()
    ordered = []
    for known in due:
        turns[known.user] += 1
        ordered.append((turns[known.user], known))
    return [known for _, known in sorted(ordered, key=lambda pair: pair[0])]


class ProcessTable:
    """`look` brings the table up to date; reading a command line is the caller's choice (`wanted`)."""

    def __init__(
        self,
        proc: ProcFs,
        read_command: Callable[[ProcessId], CommandLine],
        understand: Callable[[CommandLine], Command],
    ) -> None:
        self._proc, self._read_command, self._understand = proc, read_command, understand
        self._known: dict[int, Known] = {}
        self._changed: dict[int, None] = {}  # PIDs whose command line may have to be read
        self._told: dict[int, Known] = {}  # those whose command line was asked for
        self._listed: list[int] | None = None  # the last listing, while all that is in it is known
        self._kernel_threads: set[int] = set()
        self._young: set[int] = set()
        self._forks: int | None = None
        self._last_pids: tuple[int | None, ...] = ()  # given out last before the last two looks
        self._full_look = self._listing = float("-inf")  # when it was last
        self._has_missed = False  # since the last listing, somebody who is there and whose stat could not be read
        self._below: dict[int, dict[int, Known]] = {}  # by parent and by its own PID
        self.unread: dict[str, int] = {}  # reason -> command lines that could not be read in the last look
        self.has_asked = False  # a command line was read in the last look, or after it

    def __iter__(self) -> Iterator[Known]:
        return iter(self._known.values())

    @property
    def told(self) -> Iterable[Known]:
        """The processes with a command (an unreadable one, too), the least recently found first."""
        return self._told.values()

    def get(self, pid: int) -> Known | None:
        return self._known.get(pid)

    def find(self, process: ProcessId) -> Known | None:
        known = self._known.get(process.pid)
        return known if known is not None and known.id.start_ticks == process.start_ticks else None

    def look(self, now: float, watched: Mapping[ProcessId, Read] | None = None) -> None:
        """Find new, changed and vanished processes.

        `watched`: members of servers, whose titles change late, each with a cheaper way to its stat.
        """
        self.has_asked = False
        reads = {process.pid: read for process, read in (watched or {}).items()}
        given, full = self._given_out(), now - self._full_look >= FULL_LOOK_SECONDS
        is_listing_due = self._has_missed or now - self._listing >= LISTING_SECONDS
        if given is None or (full and is_listing_due):
            self._list_if_forked(now, full)
        elif full:
            self._refresh_all(now)
        self._look_at(given or (), reads, now)
        for pid in tuple(self._young):
            known = self._known.get(pid)
            if known is None or now - known.first_seen > YOUNG_SECONDS:
                self._young.discard(pid)

    def _look_at(self, given: Iterable[int], reads: Mapping[int, Read], now: float) -> None:
        """Those that may have got a PID lately, the young ones and the watched ones: all clocks at once."""
        known = self._known
        due = dict.fromkeys((*given, *self._young, *reads))
        pids = [pid for pid in due if pid not in known or known[pid].read_at != now]
        for pid, clock in zip(pids, self._proc.cpu_clocks(pids), strict=True):
            if pid in known:
                is_due = not self._stands_still(known[pid], clock, now)
            else:
                is_due = clock is not None or pid in reads  # a thread has no clock of a process
            if is_due:
                self._refresh(pid, now, clock, reads.get(pid, _nothing))
                is_missed = clock is not None and pid not in known and pid not in self._kernel_threads
                self._has_missed = self._has_missed or is_missed

    def refresh(self, process: ProcessId, now: float) -> None:
        """Read stat of one process again, once in a look.  Not if no thread of it ran since."""
        known = self._known.get(process.pid)
        if known is not None and known.read_at == now:
            return
        clock = self._proc.cpu_clock(process.pid)
        if known is None or not self._stands_still(known, clock, now):
            self._refresh(process.pid, now, clock)

    def _given_out(self) -> range | None:
        """The PIDs given out since the look before the last one: who had one then may just not have been there yet.

        None when they are too many, or not known.
        """
        last = self._proc.last_pid()
        before, self._last_pids = self._last_pids, (*self._last_pids[-1:], last)
        if last is None or len(before) < 2 or None in before:
            return None
        first, second = before
        if first is None or second is None or not first <= second <= last or last - first > MOST_GIVEN:
            return None
        return range(first + 1, last + 1)

    def _list_if_forked(self, now: float, full: bool) -> None:
        forks = self._proc.forks()
        if full or forks is None or forks != self._forks:
            self._list(now, full)
        self._forks = forks

    def is_living(self, process: ProcessId, now: float) -> bool:
        """As of this look."""
        self.refresh(process, now)
        known = self.find(process)
        return known is not None and not known.stat.is_over

    def _list(self, now: float, full: bool) -> None:
        listed = self._proc.pids()
        if listed is self._listed and not full:
            return  # what the machine forked were threads, or is gone already
        pids = set(listed)
        for pid in self._known.keys() - pids:
            self._lose(pid)
        if full:
            self._kernel_threads.clear()  # a worker thread of the kernel may have left its PID to a process
        new = pids - self._known.keys() - self._kernel_threads
        for pid in new:
            self._refresh(pid, now, self._proc.cpu_clock(pid))
        is_whole = all(pid in self._known or pid in self._kernel_threads for pid in new)
        self._listed = listed if is_whole else None
        if full:
            self._listing, self._has_missed = now, False
            self._refresh_all(now)

    def _refresh_all(self, now: float) -> None:
        """Nearly all stand still, so their clocks are asked for at once; one that is gone has none."""
        self._full_look = now
        clocks = self._proc.cpu_clocks(list(self._known))
        for known, clock in zip(tuple(self._known.values()), clocks, strict=True):
            if not self._stands_still(known, clock, now):
                self._refresh(known.stat.pid, now, clock)

    def _lose(self, pid: int) -> None:
        """The process is gone."""
        self._listed = None
        if (known := self._known.pop(pid, None)) is not None:
            self._take_from_parent(known)
        self._told.pop(pid, None)
        self._changed.pop(pid, None)

    def _stands_still(self, known: Known, clock: int | None, now: float) -> bool:
        """Whether stat would say the same: no thread of it ran, and it was not left to another parent.

        `clock`: of the process as of now.
        """
        if clock is None or clock != known.clock:
            return False
        parent = self._known.get(known.stat.ppid)
        if parent is None or parent.stat.start_ticks > known.stat.start_ticks:
            return False
        known.read_at = now
        return True

    def _refresh(self, pid: int, now: float, clock: int | None, read: Read = _nothing) -> None:
        """`clock`: of the process, asked before: what runs in between is read again at the next look."""
        stat = read() or self._proc.stat(pid)
        known = self._known.get(pid)
        is_kernels = stat is not None and bool(stat.flags & KERNEL_THREAD)
        if is_kernels:
            self._kernel_threads.add(pid)
        if stat is None or is_kernels:
            if known is not None:
                self._lose(pid)
            return
        if known is not None and known.id == stat.id:
            if known.stat.ppid != stat.ppid:
                self._take_from_parent(known)
                self._below.setdefault(stat.ppid, {})[pid] = known
            known.stat, known.clock, known.read_at = stat, clock, now
            self._changed[pid] = None
            return
        owner = self._proc.owner(pid)
        if owner is not None:
            self._lose(pid)
            known = self._known[pid] = Known(stat, now, owner, clock=clock, read_at=now)
            self._below.setdefault(stat.ppid, {})[pid] = known
            self._changed[pid] = None
            self._young.add(pid)

    def read_commands(self, wanted: Callable[[Known], bool], now: float) -> None:
        """Read the command lines of the wanted processes that have none yet, or whose comm changed since."""
        self.unread = {}
        due = [known for known in self._wanted(wanted) if self._is_due(known, now)]
        hung = Counter[int]()
        for known in in_turn(due)[:MOST_COMMANDS]:
            if hung[known.user] < MOST_HUNG and hung.total() < MOST_HUNG_OF_ALL:
                hung[known.user] += self.read_command(known, now) == "timeout"

    def _wanted(self, wanted: Callable[[Known], bool]) -> list[Known]:
        """Most processes are not, and it is known of them for as long as stat is not read again."""
        found = [self._known[pid] for pid in self._changed]
        found = [known for known in found if wanted(known)]
        self._changed = dict.fromkeys(known.stat.pid for known in found)
        return found

    @staticmethod
    def _is_due(known: Known, now: float) -> bool:
        return known.command is None or known.is_changed or known.is_due_again(now)

    def read_command(self, known: Known, now: float) -> str | None:
        """Read (again) the command line of one process; a hung one is tried again after a while.

        The reason why it could not be read; None when it was.
        """
        line, self.has_asked = self._read_command(known.id), True
        known.take(self._understand(line), now)
        if self._known.get(known.stat.pid) is known:
            self._told[known.stat.pid] = known
        if line.reason is not None:
            self.unread[line.reason] = self.unread.get(line.reason, 0) + 1
        return line.reason

    def forget_commands(self) -> None:
        """Read every command line again: what is looked for has changed."""
        for known in self._known.values():
            known.command = None
        self._told.clear()
        self._changed = dict.fromkeys(self._known)

    def ancestors(self, known: Known) -> Iterator[Known]:
        """Parents up to the first process, nearest first."""
        for _ in range(64):
            parent = self._known.get(known.stat.ppid)
            if parent is None or parent is known:
                return
            yield parent
            known = parent

    def children_of(self, pid: int) -> tuple[Known, ...]:
        """The processes it started (or inherited)."""
        return tuple(self._below[pid].values()) if pid in self._below else ()

    def _take_from_parent(self, known: Known) -> None:
        siblings = self._below[known.stat.ppid]
        del siblings[known.stat.pid]
        if not siblings:
            del self._below[known.stat.ppid]
