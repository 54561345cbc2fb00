"""The `processes` collector: finds the servers of this node and reads what their processes do.

Discovery (discovery.py) understands command lines, `crew` says who belongs to a server and which rank each is; this
module keeps the servers that were found and notices deaths.  What it says of them stands in `readings`.
"""

from __future__ import annotations

import itertools
import logging
import os
import pwd
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from .. import signals
from ..config import Config, ConfiguredServer
from ..descriptors import Room, shares
from ..frameworks import Framework
from ..model import Observation, ProcessId, Scene, Server, Signal
from . import Host, Moment
from .admission import TRUSTED, Berth, berth_of, has_room
from .attribution import RETRY_SECONDS, Attribution, Home
from .blocking_reads import BlockingReads, CommandLine, CommandLines
from .cgroup_roots import roots
from .cgroup_state import CgroupFiles, Surroundings
from .cgroups import Cgroup, parse_cgroup
from .crew import Crew
from .discovery import Command, Facts, matched_part, understand
from .logs.guard import Guards, Questions
from .logs.mounts import Mounts
from .logs.streams import StreamPlaces
from .members import LONE_RANK, SECOND_LOOK_SECONDS, Member, Tracked
from .process_table import Known, ProcessTable
from .procfs import CLOCK_TICKS, ProcFs
from .readings import VIRTUAL_MEMORY, report
from .unit_state import UnitStates, find_program, is_stopping
from .untrusted_paths import content

log = logging.getLogger(__name__)

UNIDENTIFIED = Signal(
    "unidentified_processes",
    "Processes that may belong to a server and whose command line could not be read.",
    (),
    "node",
)

MOST_STARTS = 1024
"""Server names whose starts are remembered."""
NEVER = ProcessId(0, 0)
"""First process of a configured server that has none."""

MOST_ASKED = 4096
"""Processes whose control group is read to know who is in one."""

_PYTHONS = ("python", "pypy", "pt_main_thread")
"""Beginnings of comm of Python processes; PyTorch 2.4 renamed the main thread of whatever imported it."""

_USER_ID = re.compile(r"[0-9]{1,10}")

_SUPERVISORS = frozenset(
    [
        *("sh", "bash", "dash", "zsh", "fish", "sudo", "su", "env", "timeout", "nohup", "setsid"),
        *("tini", "dumb-init", "docker-init", "systemd", "init", "s6-supervise", "s6-svscan", "runsv", "supervisord"),
        *("containerd-shim", "conmon", "crun", "runc", "slurmstepd", "sshd", "login", "tmux: server", "screen"),
    ]
)
"""comm of what starts programs and is never the program itself."""

_ENGINES = ("engine", "rank", "worker", "controller")
"""Roles by title that show an engine inside another program."""


class Processes:
    """See the module.  `again_seconds` asks the poller for an earlier look after a process went missing."""

    name: ClassVar[str] = "processes"
    signals: ClassVar[tuple[Signal, ...]] = (
        signals.SERVER_ALIVE,
        signals.SERVER_START,
        signals.SERVER_STARTS,
        signals.SERVER_SCOPE_ALIVE,
        signals.SERVER_STOPPING,
        signals.SERVER_FROZEN,
        signals.RANK_ALIVE,
        signals.RANK_TRACED,
        signals.RANK_INFO,
        signals.CPU_SECONDS,
        signals.PAGE_FAULTS,
        signals.STORAGE_READ,
        signals.READ_BYTES,
        signals.WRITTEN_BYTES,
        signals.RESIDENT_MEMORY,
        VIRTUAL_MEMORY,
        signals.CHILD_PROCESSES,
        signals.CHILD_CPU,
        UNIDENTIFIED,
    )

    def __init__(
        self,
        host: Host,
        reads: CommandLines | None = None,
        most_kept: int | None = None,
        units: UnitStates | None = None,
    ) -> None:
        self._host = host
        self._pending: Config | None = None
        self._proc = ProcFs(host.proc)
        self._boot = self._proc.boot_time()
        self._reads = reads or BlockingReads(host.proc, host.read_deadline_seconds)
        self._table = ProcessTable(self._proc, self._reads.command_line, self._understand)
        self._groups = CgroupFiles(host.root)
        first, ours = self._proc.cgroup(1), self._proc.own_cgroup()
        self._proc.cgroup_roots = roots(first, ours, self._groups.mounts, os.getpid())
        self._has_groups = bool(ours)  # then everybody has one, and an empty file is one that could not be read
        self._far = Questions(Guards(Mounts(str(host.proc)), host.read_deadline_seconds))
        self._streams = StreamPlaces.of(self._proc, host.root, self._far)
        self._homes = Attribution(
            self._proc, host.root, self._far, lambda process: self._reads.command_line(process).argv
        )
        self._pids: dict[str, int] = {}  # by file that holds one, at this look
        self._units = units or UnitStates(find_program(host.root))
        self._room = Room(shares().members if most_kept is None else most_kept)
        self._crew = Crew(self._proc, self._table, self._room)
        self._config = host.config
        self._apply(host.config)
        self._tracked: dict[str, Tracked] = {}
        self._starts: dict[str, int] = {}
        self.starts_before: Callable[[str, ProcessId], int] = lambda name, root: 0
        """Starts counted before a restart of ours, without the present one; set where a state is kept."""
        self._left: set[ProcessId] = set()  # still alive after their server started anew
        self._dropped: dict[ProcessId, Berth] = {}  # servers without room, and where they would have it
        self._now = 0.0
        self.again_seconds: float | None = None
        self._hidden = False  # at the last look, others' processes were not shown to us
        self._has_looked = False
        self.dropped_servers = 0  # servers that found no room, so far

    @property
    def dropped_ranks(self) -> int:
        """Processes of servers that found no room, so far."""
        return self._crew.dropped

    def configure(self, config: Config) -> None:
        """Take a new configuration at the next read."""
        self._pending = config

    def _apply(self, config: Config) -> None:
        gone = {self._pid_path(name) for name in _pid_files(self._config) - _pid_files(config)}
        self._far.forget([f"pid {path}" for path in gone])
        self._config, self._pending = config, None
        self._users = _user_ids(config.discovery.users)
        wanted = config.discovery.frameworks
        self._wanted = frozenset(f.name for f in self._host.frameworks if not wanted or f.name in wanted)
        prefixes = [*_PYTHONS, *(comm for framework in self._host.frameworks for comm in framework.comms)]
        self._candidate = re.compile("|".join(map(re.escape, prefixes)))
        self._crew.configure(self._candidate, config.limits.ranks)
        self._reads_all = any(server.match.command for server in config.servers)

    def close(self) -> None:
        self._reads.close()
        self._units.close()
        for tracked in self._tracked.values():
            _close(tracked)

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """Look at every process once; yield the servers and what their processes did.

        stallwatch_process_cpu_seconds_total{server="sglang-30000",rank="TP3"} 81.5
        """
        self.again_seconds = None
        if self._pending is not None:
            self._apply(self._pending)
            self._table.forget_commands()
        self._now = now.monotonic
        self._far.guards.mounts.refresh(now.monotonic)
        self._pids = {}
        self._groups.begin()
        members = [member for tracked in self._tracked.values() for member in tracked.members.values()]
        self._table.look(now.monotonic, {member.id: member.stat for member in members})
        self._table.read_commands(self._is_candidate, now.monotonic)
        self._find_servers(now.monotonic)
        self._crew.note_strays({process for tracked in self._tracked.values() for process in tracked.members})
        for tracked in self._tracked.values():
            if tracked.ended_at is None:
                self._follow(tracked, scene, now.monotonic)
            self._look_around(tracked, now.monotonic)
        if not self._table.has_asked:
            self._reads.rest()  # while a server starts there is more to ask at the next look
        self._forget(now.monotonic)
        gpus = _gpus_by_pid(scene)
        for tracked in self._tracked.values():
            yield from report(self._streams, tracked, gpus)
        yield from self._report_absent()
        yield from self._report_unidentified()

    # --- finding servers ---------------------------------------------------------------------------------

    def _understand(self, line: CommandLine) -> Command:
        command = understand(self._host.frameworks, line.argv, line.environ, line.reason)
        beginning = matched_part(line.argv)
        configured = next(
            (s.name for s in self._config.servers if s.match.command and s.match.command.search(beginning)), ""
        )
        excluded = any(pattern.search(beginning) for pattern in self._config.discovery.exclude)
        return replace(command, configured=configured, excluded=excluded)

    def _is_candidate(self, known: Known) -> bool:
        if self._reads_all:
            return True
        of_user = not self._users or known.user in self._users
        return of_user and self._candidate.match(known.stat.comm) is not None

    def _find_servers(self, now: float) -> None:
        taken = {process for tracked in self._tracked.values() for process in tracked.members} | self._left
        for configured in self._config.servers:
            self._find_configured(configured, taken, now)
        if not self._config.discovery.enabled:
            return
        found = (known for known in self._table.told if self._may_discover(known))
        for known in sorted(found, key=_by_start):
            if known.id not in taken:
                self._find_discovered(known, taken, now)

    def _may_discover(self, known: Known) -> bool:
        command = known.command
        if command is None or known.stat.is_over or (self._users and known.user not in self._users):
            return False
        shows_engine = command.titled_by in self._wanted and command.role in _ENGINES
        return command.framework in self._wanted or shows_engine

    def _find_discovered(self, known: Known, taken: set[ProcessId], now: float) -> None:
        chain = [known, *self._table.ancestors(known)]
        if any(other.command and other.command.excluded for other in chain):
            return
        if self._is_apart(known):
            chain = [known]
        if any(other.id in taken for other in chain):
            return
        for root in reversed(chain):
            if root.command is not None and root.command.framework in self._wanted:
                self._track(root, root.command.framework, "server", taken, now)
                return
        if any(other.is_doubtful for other in chain):
            return  # one of them may be the server's first process: soon its command line is read again
        top, command = [
            (other, other.command)
            for other in chain
            if other.command and other.command.role in _ENGINES and other.command.titled_by in self._wanted
        ][-1]
        parent = self._table.get(top.stat.ppid)
        if parent is None or parent.stat.comm in _SUPERVISORS:
            return  # an engine whose program is gone: nobody's server
        if parent.stat.pid > 1 or self._candidate.match(parent.stat.comm):
            self._track(parent, command.titled_by, "embedded", taken, now)

    def _is_apart(self, known: Known) -> bool:
        """Whether it is a server of its own below one of the same kind: what a router starts for each model."""
        command, parent = known.command, self._table.get(known.stat.ppid)
        framework = self._framework(command.framework) if command is not None else None
        if command is None or framework is None or not framework.single_process or parent is None:
            return False
        is_same = parent.command is not None and parent.command.framework == framework.name
        return is_same and not self._crew.is_copy(known)

    def _find_configured(self, configured: ConfiguredServer, taken: set[ProcessId], now: float) -> None:
        current = self._tracked.get(configured.name)
        if current is not None and self._lives(current):
            return
        for known in sorted(self._table, key=_by_start):
            is_free = known.id not in taken and not known.stat.is_over
            if is_free and self._matches(configured, known) and self._is_living(known.id):
                if known.command is None:
                    self._table.read_command(known, now)
                found = known.command.framework if known.command else ""
                self._track(known, configured.framework or found or "generic", configured.role, taken, now, configured)
                return

    def _matches(self, configured: ConfiguredServer, known: Known) -> bool:
        match, command = configured.match, known.command
        if match.command is not None:
            return self._matches_command(configured.name, known)
        if match.pid_file is not None:
            return known.stat.pid == self._pid_in(match.pid_file)
        if match.port is not None:
            return command is not None and command.facts is not None and self._port(command) == match.port
        if match.unit is not None:
            unit = parse_cgroup(self._proc.cgroup(known.stat.pid)).unit
            return unit in (match.unit, f"{match.unit}.service")
        return self._homes.container(known.stat.pid, self._now).is_called(match.container or "")

    def _pid_in(self, name: str) -> int:
        """What a file says, looked at once in a look; what it said last while its mount does not answer."""
        if name not in self._pids:
            path = self._pid_path(name)
            answer = self._far.ask(f"pid {path}", self._far.guards.mounts.far(path), lambda: _pid_in_file(path))
            self._pids[name] = -1 if answer is None else answer
        return self._pids[name]

    def _pid_path(self, name: str) -> str:
        return str(self._host.root / name.lstrip("/"))

    def _matches_command(self, name: str, known: Known) -> bool:
        """The first process whose own command fits: not a shell that holds it, not a child that inherited it."""
        if known.command is None or known.command.configured != name or known.stat.comm in _SUPERVISORS:
            return False
        parent = self._table.get(known.stat.ppid)
        inherited = parent is not None and parent.command is not None and parent.command.configured == name
        return not inherited or (parent is not None and parent.stat.comm in _SUPERVISORS)

    def _port(self, command: Command) -> int | None:
        framework = self._framework(command.framework)
        port = command.facts.port if command.facts else None
        return port or (framework.default_port if framework else None)

    def _framework(self, name: str) -> Framework | None:
        return next((framework for framework in self._host.frameworks if framework.name == name), None)

    def _track(
        self,
        root: Known,
        framework_name: str,
        role: str,
        taken: set[ProcessId],
        now: float,
        configured: ConfiguredServer | None = None,
    ) -> None:
        framework = self._framework(framework_name)
        group = self._proc.cgroup(root.stat.pid)
        if self._has_groups and not group:
            return  # that says where it runs and what it is called: at the next look
        berth = TRUSTED if configured else self._berth(root, group)
        if framework is None or not self._is_living(root.id) or not self._has_room(root.id, berth):
            return
        command = root.command or Command()
        facts = _with_configuration(command.facts or Facts(), configured)
        try:
            home = self._homes.home(root.stat.pid, now, group)
        except OSError:
            return
        job = home.placement.slurm_job or command.slurm_job or self._homes.job(root.stat.pid)
        name = configured.name if configured else self._name(framework, role, facts, home)
        tracked = Tracked(
            name=name,
            framework=framework,
            role=role,
            root=root.id,
            facts=facts,
            started_at=self._boot + root.id.start_ticks / CLOCK_TICKS,
            starts=self._count_start(name, root.id),
            home=home,
            home_read=now,
            around=Surroundings(self._groups, group),
            configured=configured,
            berth=berth,
            slurm_job=job,
        )
        if (before := self._tracked.pop(name, None)) is not None:
            self._left.update(before.members)
            _close(before)
        rank = LONE_RANK if framework.single_process else "main"
        tracked.members[root.id] = Member(self._proc, root, "main", rank, now, self._room)
        self._tracked[name] = tracked
        self._crew.adopt(tracked, now)
        taken.update(tracked.members)

    def _move(self, tracked: Tracked, now: float) -> None:
        """Where a server runs may be known by now, or be another place; what cannot be read now changes nothing."""
        group = self._proc.cgroup(tracked.root.pid)
        with suppress(OSError):
            if group or not self._has_groups:
                tracked.home, tracked.home_read = self._homes.home(tracked.root.pid, now, group), now

    def _lives(self, tracked: Tracked) -> bool:
        """Whether its first process is still there: a restart between two looks ends the old start at once."""
        return not tracked.root_gone and self._is_living(tracked.root)

    def _has_room(self, root: ProcessId, berth: Berth) -> bool:
        taken = [tracked.berth for tracked in self._tracked.values() if tracked.ended_at is None]
        if has_room(berth, taken, self._config.limits.servers):
            return True
        self.dropped_servers += root not in self._dropped
        self._dropped[root] = berth
        return False

    def _berth(self, root: Known, group: str) -> Berth:
        known = self._dropped.get(root.id)
        return known or berth_of(group, root.user)

    def _count_start(self, name: str, root: ProcessId) -> int:
        """Starts of the name; the least recent names are forgotten, long after their servers."""
        known = self._starts.pop(name, None)
        starts = (self.starts_before(name, root) if known is None else known) + 1
        self._starts[name] = starts
        while len(self._starts) > MOST_STARTS:
            del self._starts[next(iter(self._starts))]
        return starts

    def _name(self, framework: Framework, role: str, facts: Facts, home: Home) -> str:
        """`<framework>-<port>`, or the first free number; `@` and the place it runs in (docs/REFERENCE.md).

        Pods of two namespaces may be called the same: of several names that are free the one it had before.
        """
        port = facts.port or (framework.default_port if role == "server" else None)
        stem = f"{framework.name}-{port}" if port else framework.name
        suffix, free = f"@{home.place}" if home.place else "", ""
        for number in itertools.count(1):
            name = stem + suffix if port and number == 1 else f"{stem}-{number}{suffix}"
            other = self._tracked.get(name)
            if other is None:
                break
            if not self._lives(other):
                if other.placement.pod_uid == home.placement.pod_uid:
                    return name
                free = free or name
        return free or name

    # --- following a server -------------------------------------------------------------------------------

    def _follow(self, tracked: Tracked, scene: Scene, now: float) -> None:
        """Adopt new members, name the ranks, notice deaths, count the children."""
        children = self._crew.follow(tracked, scene, now)
        for member in tuple(tracked.members.values()):
            member.look(now, self._table.find(member.id))
            if member.dead:
                tracked.bury(member, now)
            elif member.missing_since is not None:
                self.again_seconds = SECOND_LOOK_SECONDS
        self._crew.count_children(tracked, children, now)
        tracked.forget_dead(self._config.limits.ranks)
        if not tracked.members:
            tracked.ended_at = now

    def _look_around(self, tracked: Tracked, now: float) -> None:
        """What is around the first process: its scope, a freezer, a unit that may be being stopped."""
        root = tracked.members.get(tracked.root)
        if root is not None and root.missing_since is None:
            tracked.around.look(root.cgroup())
            self._look_for_names(tracked, now)
        else:
            tracked.around.look_after(now, self._residents, self._is_living)
        self._ask_unit(tracked, now)

    def _look_for_names(self, tracked: Tracked, now: float) -> None:
        """What its container and pod are called may not be known at once; the server's own name stays as it is."""
        if not tracked.home.is_complete and now - tracked.home_read >= RETRY_SECONDS:
            self._move(tracked, now)

    def _ask_unit(self, tracked: Tracked, now: float) -> None:
        """Once something went missing: is it on purpose?  A stop that has begun leads to this start's end."""
        unit = tracked.placement.unit
        if not unit or tracked.stopping:
            return
        answer = self._units.answer(tracked.name, now)
        tracked.stopping = None if answer is None else is_stopping(answer, tracked.around.text)
        if tracked.is_losing and not tracked.stopping:
            self._units.ask(tracked.name, unit, now)

    def _residents(self, group: Cgroup) -> tuple[ProcessId, ...] | None:
        """Who is in a group; None when there are too many processes to ask."""
        everyone = [known for known in self._table if not known.stat.is_over]
        if len(everyone) > MOST_ASKED:
            return None
        return tuple(known.id for known in everyone if group.holds(self._proc.cgroup(known.stat.pid)))

    def _is_living(self, process: ProcessId) -> bool:
        return self._table.is_living(process, self._now)

    def _forget(self, now: float) -> None:
        for name, tracked in tuple(self._tracked.items()):
            if tracked.ended_at is not None and now - tracked.ended_at > self._config.retention:
                del self._tracked[name]
        self._streams.forget({tracked.placement.container_id for tracked in self._tracked.values()})
        self._homes.forget({tracked.placement.container for tracked in self._tracked.values()})
        self._left = {process for process in self._left if self._table.find(process)}
        self._dropped = {process: berth for process, berth in self._dropped.items() if self._table.find(process)}
        self._crew.forget()

    # --- what belongs to no tracked server ----------------------------------------------------------------

    def _report_absent(self) -> Iterator[Observation]:
        """Configured servers without a process: known, with 0 starts when they never came."""
        for configured in self._config.servers:
            if configured.name in self._tracked:
                continue
            if configured.name not in self._starts and (before := self.starts_before(configured.name, NEVER)):
                self._starts[configured.name] = before
            yield signals.SERVER_STARTS.read(self._starts.get(configured.name, 0), configured.name)
            yield Server(
                name=configured.name,
                framework=configured.framework or "generic",
                role="embedded" if configured.role == "embedded" else "server",
                root=NEVER,
                started_at=0.0,
                processes=(),
                starts=0,
                model=configured.model,
                labels=dict(configured.labels),
            )

    def _report_unidentified(self) -> Iterator[Observation]:
        """stallwatch_unidentified_processes 2"""
        unknown = sum(1 for known in self._table.told if known.command is not None and known.command.reason is not None)
        yield UNIDENTIFIED.read(unknown)
        for reason, count in self._table.unread.items():
            if reason != "vanished":  # it came and went: nothing to know
                yield from (UNIDENTIFIED.missing(reason) for _ in range(count))
        if self._are_others_hidden():
            yield UNIDENTIFIED.missing("permission")

    def _are_others_hidden(self) -> bool:
        """Said when it begins: a server that is not there would not be missed."""
        if not self._has_looked and self._proc.is_inner:
            advice = "--pid host or hostPID: true lets us see the others"
            log.info("only processes of our own PID namespace are seen", extra={"advice": advice})
        self._has_looked = True
        before, self._hidden = self._hidden, self._proc.hides_others
        if self._hidden and not before:
            advice = "CAP_SYS_PTRACE, or the group that /proc was mounted with (gid=), lets us see them"
            log.warning("processes of others are hidden from us (hidepid)", extra={"advice": advice})
        return self._hidden


def _gpus_by_pid(scene: Scene) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for use in scene.gpu_uses:
        found.setdefault(use.pid, []).append(use.gpu)
    return found


def _by_start(known: Known) -> tuple[int, int]:
    return known.stat.start_ticks, known.stat.pid


def _close(tracked: Tracked) -> None:
    for member in tracked.members.values():
        member.close()


def _with_configuration(facts: Facts, configured: ConfiguredServer | None) -> Facts:
    if configured is None:
        return facts
    ranks = configured.ranks
    return replace(
        facts,
        model=configured.model or facts.model,
        port=configured.port or configured.match.port or facts.port,
        tensor_parallel=ranks * facts.nnodes if ranks else facts.tensor_parallel,
        pipeline_parallel=1 if ranks else facts.pipeline_parallel,
        data_parallel=1 if ranks else facts.data_parallel,
    )


def _pid_files(config: Config) -> set[str]:
    return {server.match.pid_file for server in config.servers if server.match.pid_file is not None}


def _pid_in_file(path: str) -> int:
    try:
        return int(content(path, 32, follow_last=True).split()[0])
    except (OSError, ValueError, IndexError):
        return -1


def _user_ids(names: tuple[str, ...]) -> frozenset[int]:
    """User ids of names or numbers; an unknown name matches nobody."""
    ids = set()
    for name in names:
        try:
            ids.add(int(name) if _USER_ID.fullmatch(name) else pwd.getpwnam(name).pw_uid)
        except KeyError:
            ids.add(-1)
    return frozenset(ids)
