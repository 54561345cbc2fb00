"""Whose processes are on the cards: PIDs as the driver lists them -> server and rank.

The driver gives the host's PIDs, a newer one those of the namespace it is asked from.  Neither need be the PIDs that
our /proc shows: without the host's PID namespace, or with another driver than thought, nobody can be found by them.
That is said then, and never taken for a process that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ...model import Process, ProcessId, Server
from ..procfs import KERNEL_THREAD, ProcFs, Stat
from .nvml_child import Row

MOST_ANCESTORS = 64
"""How far up a process that is no rank is followed to the one that started it."""


@dataclass(frozen=True, slots=True)
class CardList:
    """The processes a card listed, and when (monotonic seconds).

    `identity`: who had such a PID in our /proc then; nobody where it is missing.
    """

    rows: tuple[Row, ...]
    at: float
    identity: Mapping[int, ProcessId]


@dataclass(frozen=True, slots=True)
class Owner:
    """Who a listed process belongs to.  Server and rank "" = to no known server; `process`: of ours the one."""

    server: str = ""
    rank: str = ""
    process: Process | None = None


FOREIGN = Owner()
"""Somebody lives who is none of ours."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One card's list, resolved: `owners` of the rows that live, `gone`: rows of PIDs nobody has any more.

    `reason` (of READ_REASONS): nobody can be found by these PIDs, so that both are empty though there are rows.
    """

    owners: tuple[tuple[Row, Owner], ...] = ()
    gone: tuple[Row, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Certain:
    """An answer that holds until a list or a server is another: all who are listed are ours, as /proc need not say."""

    lists: Mapping[str, CardList]
    servers: Sequence[Server]
    joined: Mapping[str, Joined]


@dataclass(slots=True)
class _People:
    """Who is who at one look; /proc is asked only about who is none of ours."""

    proc: ProcFs
    servers: Sequence[Server]
    members: dict[int, Owner] = field(default_factory=dict)
    _found: dict[int, Owner | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for server in self.servers:
            for process in server.processes:
                self.members[process.id.pid] = Owner(server.name, process.label, process)

    @property
    def has_asked(self) -> bool:
        """Whether /proc was asked about one of those who are no ranks; it may say something else the next time."""
        return bool(self._found)

    def owner(self, listed: ProcessId) -> Owner | None:
        """Whom a process belongs to; None when it is over, also if another one has its PID now."""
        if member := self._member(listed):
            return member
        if listed.pid not in self._found:
            self._found[listed.pid] = self._look(listed)
        return self._found[listed.pid]

    def _look(self, listed: ProcessId) -> Owner | None:
        """A process that is no rank: what it holds belongs to the member that started it, else to a stranger."""
        stat = user_process(self.proc, listed.pid)
        if stat is None or stat.id != listed:
            return None
        for _ in range(MOST_ANCESTORS):
            if stat is None or stat.ppid <= 1:
                break
            stat = _seen(self.proc, stat.ppid)
            if stat is not None and (member := self._member(stat.id)):
                return member
        return FOREIGN

    def _member(self, process: ProcessId) -> Owner | None:
        """The process as one of ours; None also when its PID was one's that is dead."""
        member = self.members.get(process.pid)
        return member if member is not None and member.process is not None and member.process.id == process else None

    def by_inner_pid(self) -> dict[int, Owner]:
        """Ours by the PID in their own namespace, where it is another one and only one has it."""
        found: dict[int, list[Owner]] = {}
        for pid, owner in self.members.items():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended
                inner = self.proc.certain_inner_pid(pid)
                if inner != pid:
                    found.setdefault(inner, []).append(owner)
        return {inner: owners[0] for inner, owners in found.items() if len(owners) == 1}


def _seen(proc: ProcFs, pid: int) -> Stat | None:
    """None when it is gone, or hidden from us (see `blind`); OSError when that could not be read now."""
    try:
        return proc.certain_stat(pid)
    except PermissionError:
        return None


def user_process(proc: ProcFs, pid: int) -> Stat | None:
    """The process, unless it is over or a thread of the kernel (which is on no card's list).

    OSError when that could not be read now.
    """
    stat = _seen(proc, pid)
    return None if stat is None or stat.is_over or stat.flags & KERNEL_THREAD else stat


class Owners:
    """See the module.  Remembers whether the driver speaks of PIDs as in our /proc."""

    def __init__(self, proc: ProcFs) -> None:
        self._proc = proc
        self._speaks_ours = False
        self._last: _Certain | None = None

    def listed(self, rows: tuple[Row, ...], at: float) -> CardList:
        """A list as it comes, with who the PIDs are now: a PID may have another process when it is looked at again.

        OSError when that could not be read of each: who is not found would count as gone.
        """
        stats = (user_process(self._proc, row.pid) for row in rows)
        return CardList(rows, at, {stat.pid: stat.id for stat in stats if stat is not None})

    @property
    def blind(self) -> str:
        """Why a PID that is not in our /proc may live all the same; "" = it is gone.

        The first kernel thread is seen by those who see everything.  And unless our /proc is of the namespace that
        we run in, one listed PID must have been a server's: that shows which PIDs the driver speaks of.
        """
        try:
            return self._blind()
        except OSError:
            return "error"

    def _blind(self) -> str:
        second = _seen(self._proc, 2)
        if second is None or not second.flags & KERNEL_THREAD:
            return "permission" if self._proc.stat(1) is None else "namespace"
        return "" if self._proc.is_ours or self._speaks_ours else "namespace"

    def join(self, lists: Mapping[str, CardList], servers: Sequence[Server]) -> Mapping[str, Joined]:
        """uuid -> whose processes are on the card now."""
        last, self._last = self._last, None
        if last is not None and last.lists == lists and last.servers == servers:
            self._last = last
            return last.joined
        try:
            return self._joined_anew(lists, servers)
        except OSError:
            return {uuid: Joined(reason="error" if listed.rows else "") for uuid, listed in lists.items()}

    def _joined_anew(self, lists: Mapping[str, CardList], servers: Sequence[Server]) -> Mapping[str, Joined]:
        """OSError when somebody's parent could not be read: whose child he is decides whose the memory is."""
        people = _People(self._proc, servers)
        direct = {uuid: tuple(_resolve(people, listed)) for uuid, listed in lists.items()}
        found = [owner for rows in direct.values() for _, owner in rows if owner is not None]
        joined = self._joined(people, lists, direct, found)
        if not people.has_asked and len(found) == sum(map(len, direct.values())):
            self._last = _Certain(lists, servers, joined)
        return joined

    def _joined(
        self,
        people: _People,
        lists: Mapping[str, CardList],
        direct: Mapping[str, Sequence[tuple[Row, Owner | None]]],
        found: Sequence[Owner],
    ) -> Mapping[str, Joined]:
        if any(owner.process is not None for owner in found):
            self._speaks_ours = True
        elif not found and (inner := self._by_inner_pid(people, lists)):
            return {uuid: _inner(listed, inner) for uuid, listed in lists.items()}
        blind = self._blind() if any(rows for rows in direct.values()) else ""
        if blind and not found:
            return {uuid: Joined(reason=blind if rows else "") for uuid, rows in direct.items()}
        return {uuid: _joined(rows, blind) for uuid, rows in direct.items()}

    def _by_inner_pid(self, people: _People, lists: Mapping[str, CardList]) -> dict[int, Owner]:
        """Some drivers give the PIDs of a namespace below that of our /proc; only where nobody here has one of them."""
        pids = {row.pid for listed in lists.values() for row in listed.rows}
        if not pids or self._speaks_ours:
            return {}
        inner = people.by_inner_pid()
        return inner if pids & inner.keys() else {}


def _resolve(people: _People, listed: CardList) -> Iterator[tuple[Row, Owner | None]]:
    for row in listed.rows:
        process = listed.identity.get(row.pid)
        yield row, None if process is None else people.owner(process)


def _inner(listed: CardList, inner: Mapping[int, Owner]) -> Joined:
    """Whoever is not found may be in a namespace that none of ours is in."""
    return Joined(tuple((row, inner.get(row.pid, FOREIGN)) for row in listed.rows))


def _joined(rows: Sequence[tuple[Row, Owner | None]], blind: str) -> Joined:
    """Who sees not everybody takes a PID he does not find for a stranger, not for one that is gone."""
    gone = tuple(row for row, owner in rows if owner is None)
    owners = [(row, owner) for row, owner in rows if owner is not None]
    if blind:
        return Joined((*owners, *((row, FOREIGN) for row in gone)))
    return Joined(tuple(owners), gone)
