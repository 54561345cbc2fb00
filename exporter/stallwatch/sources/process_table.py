"""Every process of the node, kept between looks: who is new, who is gone, what its command line said.

Looking is cheap because it is mostly not done: the listing is skipped while the kernel's fork counter stands,
only young processes are read again (a process may still exec or set its title), and from time to time those that ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..model import ProcessId
from .blocking_reads import CommandLine
from .discovery import Command
from .procfs import KERNEL_THREAD, ProcFs, Stat

YOUNG_SECONDS = 30.0
FULL_LOOK_SECONDS = 30.0
RETRY_SECONDS = 60.0
SOON_SECONDS = 5.0
"""The first retry comes earlier: on a busy machine the helper may just have been slow to start."""
_ASKED_AGAIN = ("timeout", "error", "vanished")
"""Why a command line is read again; what has really vanished is not in the table any more by then."""
MOST_COMMANDS = 2048
"""Command lines read in one look (each costs about 0.1 ms); the rest waits for the next."""
MOST_HUNG, MOST_HUNG_OF_ALL = 2, 8
"""Readings of one user's processes, and of all, that may hang in one look: each costs a deadline."""


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
    unwanted: Stat | None = None  # as which its command line was not asked for
    _read_as: tuple[str, int] = ("", 0)  # comm and stack when the command line was read

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

    @property
    def id(self) -> ProcessId:
        return self.stat.id


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
        self._kernel_threads: set[int] = set()
        self._young: set[int] = set()
        self._forks: int | None = None
        self._full_look = float("-inf")
        self._below: dict[int, list[Known]] | None = None  # None = to be made anew
        self.unread: dict[str, int] = {}  # reason -> command lines that could not be read in the last look
        self.has_asked = False  # a command line was read in the last look, or after it

    def __iter__(self) -> Iterator[Known]:
        return iter(self._known.values())

    def get(self, pid: int) -> Known | None:
        return self._known.get(pid)

    def find(self, process: ProcessId) -> Known | None:
        known = self._known.get(process.pid)
        return known if known is not None and known.id == process else None

    def look(self, now: float) -> None:
        """Find new, changed and vanished processes."""
        self.has_asked = False
        forks, full = self._proc.forks(), now - self._full_look >= FULL_LOOK_SECONDS
        if full or forks is None or forks != self._forks:
            self._list(now, full)
        self._forks = forks
        for pid in tuple(self._young):
            known = self._known.get(pid)
            if known is None or now - known.first_seen > YOUNG_SECONDS:
                self._young.discard(pid)
            if known is not None:
                self._refresh(pid, now)

    def refresh(self, process: ProcessId, now: float) -> None:
        """Read stat of one process again (members of servers: titles change late)."""
        if process.pid not in self._young:
            self._refresh(process.pid, now)

    def _list(self, now: float, full: bool) -> None:
        pids = set(self._proc.pids())
        for pid in self._known.keys() - pids:
            del self._known[pid]
            self._below = None
        if full:
            self._kernel_threads.clear()  # a worker thread of the kernel may have left its PID to a process
        for pid in pids - self._known.keys() - self._kernel_threads:
            self._refresh(pid, now)
        if full:
            self._full_look = now
            for known in tuple(self._known.values()):
                if not self._stood_still(known):
                    self._refresh(known.stat.pid, now)

    def _stood_still(self, known: Known) -> bool:
        """Whether stat would say the same: no thread of it ran, and it was not left to another parent."""
        parent = self._known.get(known.stat.ppid)
        is_there = parent is not None and parent.stat.start_ticks <= known.stat.start_ticks
        return is_there and known.clock is not None and known.clock == self._proc.cpu_clock(known.stat.pid)

    def _refresh(self, pid: int, now: float) -> None:
        clock = self._proc.cpu_clock(pid)
        stat = self._proc.stat(pid)
        if stat is None:
            if self._known.pop(pid, None) is not None:
                self._below = None
            return
        if stat.flags & KERNEL_THREAD:
            self._kernel_threads.add(pid)
            return
        known = self._known.get(pid)
        if known is not None and known.id == stat.id:
            if known.stat.ppid != stat.ppid:
                self._below = None
            known.stat, known.clock = stat, clock
            return
        owner = self._proc.owner(pid)
        if owner is not None:
            self._known[pid] = Known(stat, now, owner, clock=clock)
            self._below = None
            self._young.add(pid)

    def read_commands(self, wanted: Callable[[Known], bool], now: float) -> None:
        """Read the command lines of the wanted processes that have none yet, or whose comm changed since."""
        self.unread = {}
        due = [known for known in self._known.values() if known.unwanted is not known.stat]
        due = [known for known in due if self._is_wanted(known, wanted) and self._is_due(known, now)]
        hung = Counter[int]()
        for known in in_turn(due)[:MOST_COMMANDS]:
            if hung[known.user] < MOST_HUNG and hung.total() < MOST_HUNG_OF_ALL:
                hung[known.user] += self.read_command(known, now) == "timeout"

    @staticmethod
    def _is_wanted(known: Known, wanted: Callable[[Known], bool]) -> bool:
        """Most are not, and it is known of them for as long as stat is not read again."""
        known.unwanted = None if wanted(known) else known.stat
        return known.unwanted is None

    @staticmethod
    def _is_due(known: Known, now: float) -> bool:
        return known.command is None or known.is_changed or known.is_due_again(now)

    def read_command(self, known: Known, now: float) -> str | None:
        """Read (again) the command line of one process; a hung one is tried again after a while.

        The reason why it could not be read; None when it was.
        """
        line, self.has_asked = self._read_command(known.id), True
        known.take(self._understand(line), now)
        if line.reason is not None:
            self.unread[line.reason] = self.unread.get(line.reason, 0) + 1
        return line.reason

    def forget_commands(self) -> None:
        """Read every command line again: what is looked for has changed."""
        for known in self._known.values():
            known.command = known.unwanted = None

    def ancestors(self, known: Known) -> Iterator[Known]:
        """Parents up to the first process, nearest first."""
        for _ in range(64):
            parent = self._known.get(known.stat.ppid)
            if parent is None or parent is known:
                return
            yield parent
            known = parent

    def children(self) -> dict[int, list[Known]]:
        """parent PID -> the processes it started (or inherited)."""
        if self._below is None:
            self._below = {}
            for known in self._known.values():
                self._below.setdefault(known.stat.ppid, []).append(known)
        return self._below
