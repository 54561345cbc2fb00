"""The `processes` collector: finds the servers of this node and reads what their processes do.

Discovery (DESIGN section 6) decides which processes belong to which server; this module keeps the servers it
found, notices deaths, and sums counters per rank.
"""

from __future__ import annotations

import os
import re
import stat as file_types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from .. import signals
from ..config import Config, ConfiguredServer
from ..frameworks import Framework
from ..model import LogPlace, Observation, Process, ProcessId, Reading, Scene, Server, Signal, is_rank_name
from . import Host, Moment
from .blocking_reads import BlockingReads, CommandLine
from .cgroups import Placement, parse_cgroup
from .discovery import COMPILERS, Command, Facts, understand
from .members import COUNTERS, SECOND_LOOK_SECONDS, Children, Member, Usage
from .process_table import Known, ProcessTable
from .procfs import CLOCK_TICKS, ProcFs, reason_of

VIRTUAL_MEMORY = Signal(
    "process_virtual_memory_bytes",
    "Virtual memory of the rank's process in bytes; large for every GPU process, no sign of trouble.",
    ("server", "rank"),
    "rank",
)

TITLE_SECONDS = 30.0
"""How often the titles of a starting server's processes are read again."""

_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "fish", "tini", "dumb-init", "systemd", "sudo", "su", "env"))
_TITLED_ROLES = ("engine", "rank", "worker", "controller")
_NO_LOG = "absent"


@dataclass(slots=True)
class Tracked:
    """One start of one server."""

    name: str
    framework: Framework
    role: str
    root: ProcessId
    facts: Facts
    started_at: float
    starts: int
    placement: Placement
    configured: ConfiguredServer | None = None
    members: dict[ProcessId, Member] = field(default_factory=dict)
    children: Children = field(default_factory=Children)
    retired: dict[tuple[str, int], float] = field(default_factory=dict)
    dead_ranks: dict[str, ProcessId] = field(default_factory=dict)
    titles_read: float = 0.0
    ended_at: float | None = None
    slurm_job: str = ""

    @property
    def expected(self) -> int:
        facts = self.facts
        world = facts.tensor_parallel * facts.pipeline_parallel * facts.data_parallel
        return max(1, world // facts.nnodes)

    def live_members(self) -> list[Member]:
        return [member for member in self.members.values() if not member.dead]

    def is_alive(self) -> bool:
        root = self.members.get(self.root)
        return root is not None and not root.dead

    def retire(self, member: Member, label: str) -> None:
        """Keep what a process counted under a label that it leaves, so that the label's sums never fall."""
        if member.usage is None:
            return
        for index, value in enumerate(member.usage.counters()):
            if value is not None:
                self.retired[label, index] = self.retired.get((label, index), 0.0) + value


class Processes:
    """See the module.  `again_seconds` asks the poller for an earlier look after a process went missing."""

    name: ClassVar[str] = "processes"
    signals: ClassVar[tuple[Signal, ...]] = (
        signals.SERVER_ALIVE,
        signals.SERVER_START,
        signals.SERVER_STARTS,
        signals.RANK_ALIVE,
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
    )

    def __init__(self, host: Host) -> None:
        self._host = host
        self._pending: Config | None = None
        self._apply(host.config)
        self._proc = ProcFs(host.proc)
        self._boot = self._proc.boot_time()
        self._reads = BlockingReads(host.proc, host.read_deadline_seconds)
        self._table = ProcessTable(self._proc, self._reads.command_line, self._understand)
        self._tracked: dict[str, Tracked] = {}
        self._starts: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self.again_seconds: float | None = None
        self.dropped_servers = 0

    def configure(self, config: Config) -> None:
        """Take a new configuration at the next read."""
        self._pending = config

    def _apply(self, config: Config) -> None:
        self._config = config
        wanted = config.discovery.frameworks
        self._frameworks = tuple(f for f in self._host.frameworks if not wanted or f.name in wanted)
        self._users = _user_ids(config.discovery.users)
        prefixes = ["python", "pypy", *(comm for f in self._frameworks for comm in f.comms)]
        self._candidate = re.compile("|".join(map(re.escape, prefixes)))
        self._reads_all = any(server.match.command for server in config.servers)
        self._pending = None

    def close(self) -> None:
        self._reads.close()
        for tracked in self._tracked.values():
            for member in tracked.members.values():
                member.close()

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """Look at every process once; yield the servers and what their processes did.

        stallwatch_process_cpu_seconds_total{server="sglang-30000",rank="TP3"} 81.5
        """
        self.again_seconds = None
        if self._pending is not None:
            self._apply(self._pending)
            self._table.forget_commands()
        self._table.look(now.monotonic)
        self._table.read_commands(self._is_candidate, now.monotonic)
        self._find_servers(now)
        for tracked in self._tracked.values():
            if tracked.ended_at is None:
                self._follow(tracked, scene, now)
        self._reads.rest()
        self._forget(now.monotonic)
        for tracked in self._tracked.values():
            yield from self._report(tracked)
        yield from self._report_absent()

    # --- finding servers ---------------------------------------------------------------------------------

    def _understand(self, line: CommandLine) -> Command:
        command = understand(self._frameworks, line.argv, line.environ, line.reason)
        joined = " ".join(line.argv)
        configured = next(
            (s.name for s in self._config.servers if s.match.command and s.match.command.search(joined)), ""
        )
        excluded = any(pattern.search(joined) for pattern in self._config.discovery.exclude)
        return replace(command, configured=configured, excluded=excluded)

    def _is_candidate(self, known: Known) -> bool:
        if self._users and known.user not in self._users and not self._reads_all:
            return False
        return self._reads_all or self._candidate.match(known.stat.comm) is not None

    def _find_servers(self, now: Moment) -> None:
        taken = {process for tracked in self._tracked.values() for process in tracked.members}
        for configured in self._config.servers:
            self._find_configured(configured, taken, now)
        if not self._config.discovery.enabled:
            return
        for known in sorted(self._table, key=lambda known: (known.stat.start_ticks, known.stat.pid)):
            if known.id not in taken and self._may_discover(known):
                self._find_discovered(known, taken, now)

    def _may_discover(self, known: Known) -> bool:
        command = known.command
        if command is None or command.excluded or (self._users and known.user not in self._users):
            return False
        return bool(command.framework or command.role in _TITLED_ROLES)

    def _find_discovered(self, known: Known, taken: set[ProcessId], now: Moment) -> None:
        chain = [known, *self._table.ancestors(known)]
        if any(other.id in taken for other in chain):
            return
        entries = [other for other in chain if other.command and other.command.framework]
        if entries:
            root = entries[-1]
            assert root.command is not None  # noqa: S101  # chosen for having one
            self._track(root, root.command.framework, "server", taken, now)
            return
        top = [other for other in chain if other.command and other.command.role in _TITLED_ROLES][-1]
        parent = self._table.get(top.stat.ppid)
        is_script = parent is not None and parent.stat.pid > 1 and parent.stat.comm not in _SHELLS
        root = parent if parent is not None and is_script else top
        assert top.command is not None  # noqa: S101  # chosen for having one
        self._track(root, top.command.titled_by, "embedded", taken, now)

    def _find_configured(self, configured: ConfiguredServer, taken: set[ProcessId], now: Moment) -> None:
        current = self._tracked.get(configured.name)
        if current is not None and current.ended_at is None and current.is_alive():
            return
        for known in sorted(self._table, key=lambda known: known.stat.start_ticks):
            if known.id not in taken and self._matches(configured, known):
                framework = configured.framework or (known.command.framework if known.command else "") or "generic"
                self._track(known, framework, configured.role, taken, now, configured)
                return

    def _matches(self, configured: ConfiguredServer, known: Known) -> bool:
        match, command = configured.match, known.command
        if match.command is not None:
            parent = self._table.get(known.stat.ppid)
            inherited = (
                parent is not None
                and parent.command is not None
                and (parent.command.configured == configured.name and parent.stat.comm not in _SHELLS)
            )
            shell = known.stat.comm in _SHELLS
            return command is not None and command.configured == configured.name and not inherited and not shell
        if match.pid_file is not None:
            return known.stat.pid == _pid_in_file(self._host.root / match.pid_file.lstrip("/"))
        if match.port is not None:
            return command is not None and command.facts is not None and self._port(command) == match.port
        placement = parse_cgroup(self._proc.cgroup(known.stat.pid))
        if match.unit is not None:
            return placement.unit == match.unit
        return bool(placement.container_id) and placement.container_id.startswith(match.container or "-")

    def _port(self, command: Command) -> int | None:
        if command.facts is None:
            return None
        framework = self._framework(command.framework)
        return command.facts.port or (framework.default_port if framework else None)

    def _framework(self, name: str) -> Framework | None:
        return next((f for f in self._host.frameworks if f.name == name), None)

    def _track(
        self,
        root: Known,
        framework_name: str,
        role: str,
        taken: set[ProcessId],
        now: Moment,
        configured: ConfiguredServer | None = None,
    ) -> None:
        framework = self._framework(framework_name)
        if framework is None:
            return
        alive = sum(1 for tracked in self._tracked.values() if tracked.ended_at is None)
        if alive >= self._config.limits.servers:
            self.dropped_servers += 1
            return
        command = root.command or Command()
        facts = _with_configuration(command.facts or Facts(), configured)
        placement = parse_cgroup(self._proc.cgroup(root.stat.pid))
        name = configured.name if configured else self._name(framework, role, facts, placement, root.id)
        self._close(self._tracked.pop(name, None))
        self._starts[name] = self._starts.get(name, 0) + 1
        tracked = Tracked(
            name=name,
            framework=framework,
            role=role,
            root=root.id,
            facts=facts,
            started_at=self._boot + root.id.start_ticks / CLOCK_TICKS,
            starts=self._starts[name],
            placement=placement,
            configured=configured,
            slurm_job=placement.slurm_job or command.slurm_job,
        )
        tracked.members[root.id] = Member(self._proc, root, "main")
        self._tracked[name] = tracked
        self._adopt(tracked, now.monotonic)
        taken.update(tracked.members)

    def _name(self, framework: Framework, role: str, facts: Facts, placement: Placement, root: ProcessId) -> str:
        """`<framework>-<port>`, or a number in order of start; `@` and the place it runs in (CONTRACT section 3)."""
        port = facts.port or (framework.default_port if role == "server" else None)
        if port:
            stem = f"{framework.name}-{port}"
        else:
            self._numbers[framework.name] = self._numbers.get(framework.name, 0) + 1
            stem = f"{framework.name}-{self._numbers[framework.name]}"
        place = placement.container_id[:12] or placement.unit
        suffix, attempt = f"@{place}" if place else "", 1
        name = stem + suffix
        while (other := self._tracked.get(name)) is not None and other.ended_at is None and other.is_alive():
            attempt += 1
            name = f"{stem}-{attempt}{suffix}"
        return name

    # --- following a server -------------------------------------------------------------------------------

    def _follow(self, tracked: Tracked, scene: Scene, now: Moment) -> None:
        """Refresh the members, adopt new ones, name the ranks, notice deaths."""
        self._read_titles(tracked, scene, now.monotonic)
        for member in tracked.live_members():
            self._table.refresh(member.id, now.monotonic)
        self._adopt(tracked, now.monotonic)
        self._name_ranks(tracked, scene)
        for member in tracked.live_members():
            member.look(now.monotonic)
            if member.missing_since is not None and not member.dead:
                self.again_seconds = SECOND_LOOK_SECONDS
            if member.dead:
                self._bury(tracked, member)
        if not tracked.live_members():
            tracked.ended_at = now.monotonic

    def _read_titles(self, tracked: Tracked, scene: Scene, now: float) -> None:
        """While a server starts its processes are still being named."""
        starting = tracked.name not in scene.ready and now - tracked.titles_read >= TITLE_SECONDS
        if starting:
            tracked.titles_read = now
        for member in tracked.live_members():
            known = self._table.find(member.id)
            if known is None or member.id == tracked.root:
                continue
            if starting or known.command is None or known.command_comm != known.stat.comm:
                self._table.read_command(known, now)

    def _adopt(self, tracked: Tracked, now: float) -> None:
        """Take in descendants: members by title or as spawned workers, the rest as children of ranks."""
        children_of: dict[int, list[Known]] = {}
        for known in self._table:
            children_of.setdefault(known.stat.ppid, []).append(known)
        others: list[tuple[Known, str]] = []
        queue = [(member.id.pid, member.rank, False) for member in tracked.live_members()]
        seen = {pid for pid, _, _ in queue}
        while queue:
            pid, rank, below_rank = queue.pop()
            for known in children_of.get(pid, ()):
                if known.stat.pid in seen:
                    continue
                seen.add(known.stat.pid)
                if known.command is None and self._candidate.match(known.stat.comm):
                    self._table.read_command(known, now)
                role = "" if below_rank else self._role(tracked, known, rank)
                if role and len(tracked.members) < self._config.limits.ranks * 2:
                    tracked.members[known.id] = Member(self._proc, known, role)
                    queue.append((known.stat.pid, role, False))
                    continue
                counts = below_rank or is_rank_name(rank) or rank.startswith("engine")
                if counts and not (known.command and known.command.kind == "tracker"):
                    others.append((known, self._child_kind(known)))
                queue.append((known.stat.pid, rank, counts))
        for known, _ in others:
            self._table.refresh(known.id, now)
        reaped = sum(
            member.usage.stat.reaped_cpu_seconds
            for member in tracked.live_members()
            if member.usage is not None and member.is_watched
        )
        tracked.children.update(others, reaped)

    def _child_kind(self, known: Known) -> str:
        compiles = known.stat.comm in COMPILERS or (known.command is not None and known.command.kind == "compiler")
        return "compiler" if compiles else "other"

    def _role(self, tracked: Tracked, known: Known, parent: str) -> str:
        """The role of a descendant; '' when it is no member (a tool, a compiler, a helper)."""
        command = known.command
        if command is None or command.kind in ("tracker", "compiler"):
            return ""
        if command.role:
            return command.rank or command.role
        if parent not in ("main", "engine", "controller", "worker") and not parent.startswith("engine"):
            return ""
        above = self._table.get(known.stat.ppid)
        forked = (
            above is not None
            and above.command is not None
            and (command.fingerprint == above.command.fingerprint and command.fingerprint != "")
        )
        return "worker" if command.kind == "spawned" or forked else ""

    def _name_ranks(self, tracked: Tracked, scene: Scene) -> None:
        """Titles first, then what the log says, then: the only worker, or the engine without workers, is TP0."""
        by_log = {item.pid: item.rank for item in scene.rank_names if item.server == tracked.name}
        members = tracked.live_members()
        for member in members:
            known = self._table.find(member.id)
            titled = (known.command.rank or known.command.role) if known and known.command else ""
            if member.id != tracked.root and titled:
                self._rename(tracked, member, titled)
            if member.rank == "worker" and by_log:
                self._rename(tracked, member, by_log.get(member.inner_pid, "worker"))
        if tracked.expected != 1 or any(is_rank_name(member.rank) for member in members):
            return
        engines = [member for member in members if member.rank.startswith("engine")]
        workers = [m for m in members if m.rank == "worker" and any(m.ppid == e.id.pid for e in engines)]
        if len(workers) == 1:
            self._rename(tracked, workers[0], "TP0")
        elif not workers and len(engines) == 1 and tracked.role == "server":
            self._rename(tracked, engines[0], "TP0")

    def _rename(self, tracked: Tracked, member: Member, rank: str) -> None:
        if member.rank == rank:
            return
        tracked.retire(member, member.label)
        member.rank = rank

    def _bury(self, tracked: Tracked, member: Member) -> None:
        tracked.retire(member, member.label)
        if member.is_watched:
            tracked.dead_ranks[member.rank] = member.id
        member.close()

    def _forget(self, now: float) -> None:
        for name, tracked in tuple(self._tracked.items()):
            if tracked.ended_at is not None and now - tracked.ended_at > self._config.retention:
                self._close(self._tracked.pop(name))

    def _close(self, tracked: Tracked | None) -> None:
        for member in tracked.members.values() if tracked else ():
            member.close()

    # --- reporting ----------------------------------------------------------------------------------------

    def _report(self, tracked: Tracked) -> Iterator[Observation]:
        name = tracked.name
        yield signals.SERVER_ALIVE.read(float(tracked.is_alive()), name)
        yield signals.SERVER_START.read(tracked.started_at, name)
        yield signals.SERVER_STARTS.read(tracked.starts, name)
        for rank in tracked.dead_ranks:
            yield signals.RANK_ALIVE.read(0.0, name, rank)
        if tracked.ended_at is not None:
            return
        yield self._server(tracked)
        for member in tracked.live_members():
            if member.is_watched and member.rank not in tracked.dead_ranks:
                missing = member.missing_since is not None
                if missing:
                    yield signals.RANK_ALIVE.missing("vanished", name, member.rank)
                else:
                    yield signals.RANK_ALIVE.read(1.0, name, member.rank)
                yield signals.RANK_INFO.read(1.0, name, member.rank, str(member.id.pid), "")
        yield from self._usage(tracked)
        for kind, (number, seconds) in tracked.children.totals().items():
            yield signals.CHILD_PROCESSES.read(number, name, kind)
            yield signals.CHILD_CPU.read(seconds, name, kind)

    def _usage(self, tracked: Tracked) -> Iterator[Reading]:
        """Sums per label.  One unreadable process makes the label's value unreadable: never a partial sum."""
        by_label: dict[str, list[Usage]] = {}
        for member in tracked.live_members():
            if member.usage is not None and member.missing_since is None:
                by_label.setdefault(member.label, []).append(member.usage)
        for label, usages in by_label.items():
            reasons = {usage.io_reason for usage in usages if usage.io_reason}
            for index, (signal, kind) in enumerate(COUNTERS):
                values = [usage.counters()[index] for usage in usages]
                known = [value for value in values if value is not None]
                if len(known) < len(values):
                    yield signal.missing(min(reasons, default="error"), tracked.name, label, *kind)
                else:
                    total = sum(known) + tracked.retired.get((label, index), 0.0)
                    yield signal.read(total, tracked.name, label, *kind)
            resident = sum(usage.stat.resident_bytes for usage in usages)
            yield signals.RESIDENT_MEMORY.read(resident, tracked.name, label)
            yield VIRTUAL_MEMORY.read(sum(u.stat.virtual_bytes for u in usages), tracked.name, label)

    def _server(self, tracked: Tracked) -> Server:
        facts, placement, configured = tracked.facts, tracked.placement, tracked.configured
        port = facts.port or (tracked.framework.default_port if tracked.role == "server" else None)
        return Server(
            name=tracked.name,
            framework=tracked.framework.name,
            role="embedded" if tracked.role == "embedded" else "server",
            root=tracked.root,
            started_at=tracked.started_at,
            processes=tuple(
                Process(member.id, member.rank, member.ppid, member.comm, member.user)
                for member in tracked.live_members()
                if member.missing_since is None
            ),
            logs=self._logs(tracked),
            ports=(port,) if port and tracked.role == "server" and not facts.headless else (),
            health=configured.health if configured else None,
            starts=tracked.starts,
            model=facts.model,
            tensor_parallel=facts.tensor_parallel,
            pipeline_parallel=facts.pipeline_parallel,
            data_parallel=facts.data_parallel,
            nnodes=facts.nnodes,
            node_rank=facts.node_rank,
            group=facts.group,
            speculative=facts.speculative,
            unit=placement.unit,
            container=placement.container_id[:12],
            slurm_job=tracked.slurm_job,
            labels=dict(configured.labels) if configured else {},
            metrics_enabled=facts.metrics_enabled,
        )

    def _logs(self, tracked: Tracked) -> tuple[LogPlace, ...]:
        """The configured files, else where stdout and stderr of the first process go."""
        configured = tracked.configured
        if configured is not None and configured.logs:
            return tuple(LogPlace(os.path.basename(path) or path, path) for path in configured.logs)
        living = next((m for m in tracked.live_members() if m.missing_since is None), None)
        root = tracked.members.get(tracked.root)
        holder = root if root is not None and not root.dead and root.missing_since is None else living
        if holder is None:
            return ()
        places: list[LogPlace] = []
        for fd, stream in ((1, "stdout"), (2, "stderr")):
            place = stream_place(self._proc, holder.id.pid, fd, stream)
            same = any(p.inode == place.inode and p.device == place.device and p.path for p in places)
            if not same or not place.path:
                taken = any(p.name == place.name for p in places)
                places.append(replace(place, name=stream) if taken else place)
        return tuple(places)

    def _report_absent(self) -> Iterator[Observation]:
        """Configured servers that never came: known with 0 starts."""
        for configured in self._config.servers:
            if self._starts.get(configured.name, 0) == 0:
                yield signals.SERVER_STARTS.read(0.0, configured.name)
                yield Server(
                    name=configured.name,
                    framework=configured.framework or "generic",
                    role="embedded" if configured.role == "embedded" else "server",
                    root=ProcessId(0, 0),
                    started_at=0.0,
                    processes=(),
                    starts=0,
                    model=configured.model,
                    labels=dict(configured.labels),
                )


def stream_place(proc: ProcFs, pid: int, fd: int, stream: str) -> LogPlace:
    """Where a standard stream goes.  Only a regular file can be read; nothing else is ever opened."""
    path = proc.path(pid, "fd", str(fd))
    try:
        target = os.readlink(path)
        status = os.stat(path)
    except OSError as error:
        return LogPlace(stream, reason=reason_of(error))
    if not file_types.S_ISREG(status.st_mode):
        return LogPlace(stream, reason=_NO_LOG)
    name = os.path.basename(target.removesuffix(" (deleted)")) or stream
    return LogPlace(name, path, None, status.st_dev, status.st_ino)


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


def _pid_in_file(path: object) -> int:
    try:
        with open(str(path), "rb") as file:
            return int(file.read(32).split()[0])
    except (OSError, ValueError, IndexError):
        return -1


def _user_ids(names: tuple[str, ...]) -> frozenset[int]:
    """User ids of names or numbers; unknown names match nobody."""
    import pwd

    ids = set()
    for name in names:
        try:
            ids.add(int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            ids.add(-1)
    return frozenset(ids)
