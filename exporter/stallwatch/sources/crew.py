"""Who belongs to a server and what each process is called: descendants by title, workers that its log names.

`Processes` says which one is a server's first; from there on it is decided here, at each look.
"""

from __future__ import annotations

import re
from collections import Counter, deque

from ..descriptors import Room
from ..model import ProcessId, Scene, is_rank_name
from .cgroups import parse_cgroup
from .discovery import COMPILERS
from .members import LONE_RANK, Member, Tracked
from .process_table import Known, ProcessTable
from .procfs import ProcFs

TITLE_SECONDS = 30.0
"""How often the titles of a starting server's processes are read again."""

_MAY_START_WORKERS = ("main", "engine", "controller", "worker")


class Crew:
    """See the module.  At each look `note_strays` once its servers are found, then `follow` each of them.

    `dropped`: processes that found no room beside `most_ranks` ranks of their server, so far.
    """

    def __init__(self, proc: ProcFs, table: ProcessTable, room: Room) -> None:
        self._proc, self._table, self._room = proc, table, room
        self._candidate = re.compile("")
        self._most_ranks = 0
        self._strays: list[Known] = []
        self._refused: set[ProcessId] = set()
        self.dropped = 0

    def configure(self, candidate: re.Pattern[str], most_ranks: int) -> None:
        """`candidate`: beginnings of comm of processes whose command lines are worth reading."""
        self._candidate, self._most_ranks = candidate, most_ranks

    def note_strays(self, taken: set[ProcessId]) -> None:
        """Workers by a title that other programs have as well, which belong to no server yet (`taken` do)."""
        self._strays = [
            known
            for known in self._table.told
            if known.command is not None
            and known.command.role == "worker"
            and not known.command.titled_by
            and not known.stat.is_over
            and known.id not in taken
        ]

    def follow(self, tracked: Tracked, scene: Scene, now: float) -> list[tuple[ProcessId, str]]:
        """Adopt new members, name the ranks; the ranks' other children with their kinds, parents before children."""
        self._read_titles(tracked, scene, now)
        if self._is_alone(tracked):
            return []
        self._dismiss(tracked)
        self._adopt_named(tracked, scene, now)
        children = self.adopt(tracked, now)
        self._name_ranks(tracked, scene)
        self._keep_to_limit(tracked)
        return children

    def _is_alone(self, tracked: Tracked) -> bool:
        """One process without children: nobody is to be taken in, let go or given a name."""
        is_one = len(tracked.members) == 1 and tracked.root in tracked.members
        return is_one and not self._strays and not self._table.children_of(tracked.root.pid)

    def forget(self) -> None:
        """Processes that are gone."""
        self._refused = {process for process in self._refused if self._table.find(process)}

    def _read_titles(self, tracked: Tracked, scene: Scene, now: float) -> None:
        """While a server starts its processes are still being named."""
        is_due = tracked.name not in scene.ready and now - tracked.titles_read >= TITLE_SECONDS
        if is_due:
            tracked.titles_read = now
        for process in tracked.members:
            known = self._table.find(process)
            if known is None or process == tracked.root:
                continue
            if known.command is None or known.is_changed or (is_due and now > known.command_read):
                self._table.read_command(known, now)

    def _dismiss(self, tracked: Tracked) -> None:
        """Let go of workers without a title that became something else: a tool, a compiler."""
        roles = {member.id.pid: member.role for member in tracked.members.values()}
        for member in tuple(tracked.members.values()):
            known = self._table.find(member.id)
            if member.role != "worker" or member.name or known is None or known.command is None:
                continue
            above = roles.get(known.stat.ppid)
            if known.command.reason is None and above is not None and not self._role(known, above):
                tracked.retire(member)
                tracked.drop(member)

    def adopt(self, tracked: Tracked, now: float) -> list[tuple[ProcessId, str]]:
        """Take in descendants as members, by title or as spawned workers; return the ranks' other children.

        In order of descent: a parent stands before its children.
        """
        others: list[tuple[ProcessId, str]] = []
        queue = deque((member.id.pid, member.role, False) for member in tracked.members.values())
        seen = {pid for pid, _, _ in queue}
        while queue:
            pid, above, is_below_rank = queue.popleft()
            for known in self._table.children_of(pid):
                if known.stat.pid in seen:
                    continue
                seen.add(known.stat.pid)
                if known.command is None and self._candidate.match(known.stat.comm):
                    self._table.read_command(known, now)
                role = "" if is_below_rank or known.stat.is_over else self._role(known, above)
                if role and not self._table.is_living(known.id, now):
                    continue
                if role and len(tracked.members) > self._most_ranks * 2:
                    self._refuse(known.id)
                    continue
                if role:
                    tracked.members[known.id] = Member(self._proc, known, role, _rank_of(known, role), now, self._room)
                    queue.append((known.stat.pid, role, False))
                    continue
                counts = is_below_rank or above in ("rank", "engine")
                if counts and not (known.command and known.command.kind == "tracker"):
                    others.append((known.id, _child_kind(known)))
                queue.append((known.stat.pid, above, counts))
        return others

    def _adopt_named(self, tracked: Tracked, scene: Scene, now: float) -> None:
        """Take in workers that another program keeps for this server, as Ray's daemon does: its log names their PIDs.

        A title that other programs have, too, is not enough; nor is a PID, which another container may have as well.
        """
        named = {item.pid for item in scene.rank_names if item.server == tracked.name} if self._strays else set()
        root = self._table.find(tracked.root)
        if not named or root is None:
            return
        for known in tuple(self._strays):
            is_ours = known.user == root.user and self._table.is_living(known.id, now)
            if is_ours and self._proc.inner_pid(known.stat.pid) in named and self._is_beside(tracked, known):
                tracked.members[known.id] = Member(self._proc, known, "worker", "worker", now, self._room)
                self._strays.remove(known)

    def _is_beside(self, tracked: Tracked, known: Known) -> bool:
        """Whether a process is in the server's container, or in none as the server."""
        theirs, its = (parse_cgroup(text) for text in (self._proc.cgroup(known.stat.pid), tracked.around.text))
        return theirs.container == its.container

    def _keep_to_limit(self, tracked: Tracked) -> None:
        """Let go of ranks beyond the limit, and of as many others; titles may make a rank of any process."""
        found: Counter[bool] = Counter()
        for member in tuple(tracked.members.values()):
            kind = is_rank_name(member.rank)
            found[kind] += member.id != tracked.root
            if found[kind] > self._most_ranks:
                self._refuse(member.id)
                tracked.retire(member)
                tracked.drop(member)

    def _refuse(self, process: ProcessId) -> None:
        self.dropped += process not in self._refused
        self._refused.add(process)

    def _role(self, known: Known, above: str) -> str:
        """The role of a descendant of a member of role `above`; "" when it is none (a tool, a compiler).

        A child that still shows its parent's command was forked by it and is about to become something: below
        a rank a tool it runs, else perhaps a worker, but never what its title says.
        """
        command = known.command
        if command is None or above == "rank" or command.kind in ("tracker", "compiler"):
            return ""
        is_copy = self.is_copy(known)
        if command.role and not is_copy:
            return command.role
        return "worker" if above in _MAY_START_WORKERS and (is_copy or command.kind == "spawned") else ""

    def is_copy(self, known: Known) -> bool:
        above = self._table.get(known.stat.ppid)
        if above is None or above.command is None or known.command is None:
            return False
        return bool(known.command.fingerprint) and known.command.fingerprint == above.command.fingerprint

    def _name_ranks(self, tracked: Tracked, scene: Scene) -> None:
        """Titles first, then what the log says; what is still unnamed may be the only one there can be."""
        by_log = {item.pid: item.rank for item in scene.rank_names if item.server == tracked.name}
        for member in tracked.members.values():
            known = self._table.find(member.id)
            command = known.command if known is not None else None
            is_titled = command is not None and command.role and known is not None and not self.is_copy(known)
            if member.id != tracked.root and command is not None and is_titled:
                member.role, member.name = command.role, command.rank or command.role
            if member.role == "worker" and by_log:
                member.name = by_log.get(member.inner_pid, member.name)
        lone = self._lone_ranks(tracked)
        for member in tracked.members.values():
            if member.id != tracked.root:
                tracked.rename(member, lone.get(member.id) or member.name or "worker")

    def _lone_ranks(self, tracked: Tracked) -> dict[ProcessId, str]:
        """Engines that run the model themselves, and the one worker of an engine: ranks without a rank's name."""
        members = tracked.members.values()
        facts = tracked.facts
        if tracked.role != "server" or any(is_rank_name(member.name) for member in members):
            return {}
        engines = [member for member in members if member.role == "engine"]
        workers = [m for m in members if m.name == "worker" and any(m.ppid == e.id.pid for e in engines)]
        if tracked.expected == 1 and len(engines) == 1 and len(workers) <= 1:
            return {(workers or engines)[0].id: LONE_RANK}
        if facts.data_parallel > 1 and facts.tensor_parallel * facts.pipeline_parallel == 1 and not workers:
            return {engine.id: f"DP{engine.name.removeprefix('engine') or 0}" for engine in engines}
        return {}

    def count_children(self, tracked: Tracked, children: list[tuple[ProcessId, str]], now: float) -> None:
        for process, _ in children:
            self._table.refresh(process, now)
        found = [(self._table.find(process), kind) for process, kind in children]
        watched = [m for m in tracked.members.values() if m.role in ("rank", "engine") and m.missing_since is None]
        if watched or found or tracked.children.are_counted:
            tracked.children.update(
                [member.last for member in watched if member.last is not None],
                [(known.stat, kind) for known, kind in found if known is not None and known.id not in tracked.members],
            )


def _rank_of(known: Known, role: str) -> str:
    command = known.command
    titled = command.rank if command is not None and command.role == role else ""
    return titled or role


def _child_kind(known: Known) -> str:
    is_tool = known.command is not None and known.command.kind == "compiler"
    return "compiler" if is_tool or known.stat.comm in COMPILERS else "other"
