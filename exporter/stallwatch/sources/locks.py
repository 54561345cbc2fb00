"""Lock files in the caches of servers that are not ready: how old they are, and whether anybody can hold them.

A killed build or download leaves its lock behind, and the next start waits for it for ever.  Which files are
locks, and how they are looked for, stands in locks_child; here it is decided what a found one means:

- one that is held by being there (`exists`) is held while a process lives that may have made it: it was there
  before the file, and has it open or is named in it;
- one that the kernel keeps (flock) is held while the kernel names a holder.  Without one the file merely rests,
  unless somebody tries it again and again.

Only what cannot be held by anybody is told as not held.  On a file system that other machines may share, and
where not every process can be seen, that cannot be known.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..model import ProcessId, Reading, Scene, Server
from ..signals import LOCK_AGE, LOCK_HELD
from . import Host, Moment
from .blocking_reads import BlockingReads, start_helper
from .discovery import COMPILERS
from .locks_child import KINDS, Found
from .procfs import CLOCK_TICKS, KERNEL_THREAD, ProcFs, Stat, inner_pid_of, reason_of

LOOK_SECONDS = 10.0
RETRY_SECONDS = 60.0
"""After a look that hung."""
SLACK_SECONDS = 2.0
"""Between the start of a process, told in whole ticks since a boot told in whole seconds, and the time of a file."""

_PACKAGES = str(Path(__file__).parents[2])
_PROGRAM = (
    "-c",
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from stallwatch.sources.locks_child import main; main()",
    _PACKAGES,
)
start_looker = partial(start_helper, program=_PROGRAM)

_INIT = 1
"""The first process of the node, where every process can be seen: it builds nothing, and may show nothing of itself."""

_PYTHON = re.compile(r"python|pypy|pt_main_thread")
_UNRELATED = frozenset(
    [
        *("networkd-dispat", "unattended-upgr", "firewalld", "fail2ban-server", "tuned", "supervisord", "cloud-init"),
        *("systemd", "init", "sh", "bash", "dash", "zsh", "fish", "sudo", "su", "tmux: server", "screen", "login"),
        *("sshd", "sshd-session", "sshd-auth", "tini", "dumb-init", "docker-init", "dockerd", "containerd", "conmon"),
        *("containerd-shim", "slurmstepd", "slurmd", "kubelet", "dbus-daemon", "cron", "crond"),
    ]
)
"""comm of processes that never build or download for a server, some of them Python."""


_File = tuple[int, int]
"""Device and inode."""

_INODE = re.compile(rb"^ino:\s+(\d+)", re.MULTILINE)
_USERS = re.compile(rb"^Uid:\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", re.MULTILINE)


class Looks(Protocol):
    """Whoever looks for lock files; a test does without a process of its own."""

    def ask(self, request: str) -> Mapping[str, Any]: ...

    def rest(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Lock:
    """What is said of one lock: since when (Unix seconds), and `held`; None = see `reason`."""

    since: float
    held: bool | None
    reason: str = ""

    def readings(self, server: str, kind: str, now: float) -> Iterator[Reading]:
        yield LOCK_AGE.read(max(0.0, now - self.since), server, kind)
        if self.held is None:
            yield LOCK_HELD.missing(self.reason, server, kind)
        else:
            yield LOCK_HELD.read(float(self.held), server, kind)


@dataclass(slots=True)
class _Watched:
    """One start of a server.  Times are monotonic seconds, but `seen` (flock -> when first, Unix seconds).

    `free`: the flocks that nobody held at the last look.
    """

    root: ProcessId
    environ: Mapping[str, str] | None = None
    looked_at: float = float("-inf")
    due: float = float("-inf")
    told: dict[str, Lock] = field(default_factory=dict)  # by kind
    problems: Mapping[str, str] = field(default_factory=dict)
    seen: dict[_File, float] = field(default_factory=dict)
    free: frozenset[_File] = frozenset()

    def readings(self, server: str, now: float) -> Iterator[Reading]:
        for kind in KINDS:
            if kind in self.told:
                yield from self.told[kind].readings(server, kind, now)
            elif kind in self.problems:
                yield LOCK_AGE.missing(self.problems[kind], server, kind)
                yield LOCK_HELD.missing(self.problems[kind], server, kind)


@dataclass(frozen=True, slots=True)
class _Holder:
    """A live process that may have made a lock file; `started` in Unix seconds."""

    stat: Stat
    users: frozenset[int]
    started: float


@dataclass(slots=True)
class _Opened:
    """The open files of all who may hold a lock: by the last part of their path, each with its number.

    `hidden`: whose open files cannot be seen.
    """

    by_name: dict[str, list[tuple[_Holder, str]]] = field(default_factory=dict)
    hidden: list[_Holder] = field(default_factory=list)


class Crowd:
    """Every process of the node that may hold a lock, read when first asked for.

    Whoever could not be read now may be the one: then every question is an OSError.
    """

    def __init__(self, proc: ProcFs, boot: float) -> None:
        self._proc, self._boot = proc, boot
        self._holders: tuple[_Holder, ...] | None = None
        self._inner: dict[int, list[_Holder]] | None = None
        self._opened: _Opened | None = None
        self._blind: str | None = None

    @property
    def blind(self) -> str:
        """Why not every process can be seen; "" when all can.

        The first kernel thread is seen by all and only those who see everything: not inside a PID namespace, and
        not through hidepid.
        """
        if self._blind is None:
            first, second = self._proc.stat(1), self._proc.stat(2)
            sees_all = second is not None and second.flags & KERNEL_THREAD
            self._blind = "" if sees_all else "namespace" if first is not None else "permission"
        return self._blind

    def may_hold(self, found: Found, server: Server) -> bool:
        """Whether a live process may have made the file and be about to remove it.

        It is of the file's user, older than the file, and has it open (who makes such a file keeps it open), or
        is the one the file names.  Whose open files cannot be seen may have it.
        """
        latest = found.modified + SLACK_SECONDS
        return any(
            holder.started <= latest
            and found.user in holder.users
            and not (found.layered and self._is_elsewhere(holder.stat.pid, server.root.pid))
            for holder in self._claimants(found)
        )

    def _claimants(self, found: Found) -> Iterator[_Holder]:
        """Who is named in the file; else who has a file of its name open, or does not let that be seen."""
        if found.pid is not None:
            yield from self._by_inner_pid().get(found.pid, ())
            return
        if self._opened is None:
            self._opened = self._look_at_files()
        yield from self._opened.hidden
        for holder, number in self._opened.by_name.get(found.name, ()):
            if self._may_be(holder.stat.pid, number, found):
                yield holder

    def _by_inner_pid(self) -> Mapping[int, list[_Holder]]:
        if self._inner is None:
            self._inner = {}
            for holder in self._all():
                pid = holder.stat.pid
                self._inner.setdefault(inner_pid_of(self._status(pid)) or pid, []).append(holder)
        return self._inner

    def _look_at_files(self) -> _Opened:
        """Once for all locks of a server: a cache may hold hundreds of them, and a node thousands of processes."""
        opened = _Opened()
        for holder in self._all():
            try:
                for number, name in self._open(holder.stat.pid):
                    opened.by_name.setdefault(name, []).append((holder, number))
            except OSError:
                opened.hidden.append(holder)
        return opened

    def look_again(self) -> None:
        """What was seen of open files is too old for what is to be asked next."""
        self._opened = None

    def _open(self, pid: int) -> Iterator[tuple[str, str]]:
        """Number and last part of the path of each open file.  OSError when the process does not let them be seen.

        Without CAP_SYS_PTRACE the numbers alone may be seen.
        """
        folder = self._proc.path(pid, "fd")
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended
            for number in os.listdir(folder):
                with suppress(FileNotFoundError):  # closed by now
                    yield number, _last_part(os.readlink(f"{folder}/{number}"))

    def _may_be(self, pid: int, number: str, found: Found) -> bool:
        """Whether an open file of the lock's name may be the lock; from Linux 5.14 on its inode tells.

        The file itself is never looked at, for it may lie on a dead file system.  A layer has other inodes.
        """
        try:
            match = _INODE.search(self._content(pid, f"fdinfo/{number}"))
        except OSError:  # also when it ended: another may have got the file from it
            return True
        return match is None or found.layered or int(match[1]) == found.inode

    def belongs(self, pid: int, server: Server) -> bool:
        """Whether a process is one of the server, or was started by one."""
        own = {process.id.pid for process in server.processes} | {server.root.pid}
        for _ in range(64):
            if pid in own:
                return True
            try:
                stat = self._proc.certain_stat(pid)
            except PermissionError:
                return False
            if stat is None or stat.ppid <= 1:
                return False
            pid = stat.ppid
        return False

    def _all(self) -> tuple[_Holder, ...]:
        if self._holders is None:
            self._holders = tuple(self._look())
        return self._holders

    def _look(self) -> Iterator[_Holder]:
        me = self._own_pid()
        for pid in set(self._proc.pids()) - {_INIT}:
            stat, user = self._proc.certain_stat(pid), self._owner(pid)
            if stat is None or user is None or stat.flags & KERNEL_THREAD or stat.is_over or me in (pid, stat.ppid):
                continue
            if self._is_builder(stat):
                started = self._boot + stat.start_ticks / CLOCK_TICKS
                yield _Holder(stat, self._users(pid) | {user}, started)

    def _owner(self, pid: int) -> int | None:
        try:
            return os.stat(self._proc.path(pid)).st_uid
        except (FileNotFoundError, ProcessLookupError):
            return None

    def _users(self, pid: int) -> frozenset[int]:
        """Real, effective, saved and file system user: one that gave up rights shows as root's in the listing."""
        match = _USERS.search(self._status(pid))
        return frozenset(map(int, match.groups())) if match else frozenset()

    def _status(self, pid: int) -> bytes:
        """Empty when it is gone."""
        try:
            return self._content(pid, "status")
        except (FileNotFoundError, ProcessLookupError):
            return b""

    def _content(self, pid: int, name: str) -> bytes:
        with open(self._proc.path(pid, name), "rb", buffering=0) as file:
            return file.read(8192)

    def _own_pid(self) -> int:
        """Our own PID in this tree; -1 when we are not in it."""
        target = self._link(os.path.join(self._proc.root, "self"))
        return int(target) if target.isascii() and target.isdigit() else -1

    def _is_builder(self, stat: Stat) -> bool:
        """Python and compilers.  Whose program cannot be seen may be one, unless his name says that he is none."""
        if stat.comm in _UNRELATED:
            return False
        program = _last_part(self._link(self._proc.path(stat.pid, "exe")))
        known = _PYTHON.search(stat.comm) or stat.comm in COMPILERS
        return bool(known or not program or _PYTHON.search(program) or program in COMPILERS)

    def _is_elsewhere(self, pid: int, other: int) -> bool:
        """Whether two processes certainly live in different mount namespaces, where one has a layer of its own."""
        one, two = (self._link(self._proc.path(each, "ns", "mnt")) for each in (pid, other))
        return bool(one and two and one != two)

    @staticmethod
    def _link(path: str) -> str:
        try:
            return os.readlink(path)
        except OSError:
            return ""


def _last_part(link: str) -> str:
    """The file's name in the target of a link of /proc."""
    return os.path.basename(link.removesuffix(" (deleted)"))


class Locks:
    """The locks of all servers that are not ready; run by the `node` collector, which must not wait for them long.

    A look that hangs costs one deadline, after which nothing more is looked at in this turn; the server it was
    for is left alone for a minute.
    """

    def __init__(self, host: Host, looks: Looks | None = None) -> None:
        self._proc, self._root = ProcFs(host.proc), host.root
        self._looks = looks or BlockingReads(host.proc, host.read_deadline_seconds, _start)
        self._watched: dict[str, _Watched] = {}

    def close(self) -> None:
        self._looks.close()

    def read(self, scene: Scene, now: Moment) -> Iterator[Reading]:
        """stallwatch_server_lock_age_seconds{server="sglang-30000",kind="build"} 5400

        A server that is ready waits for no build and no download: it is not looked at.
        """
        waiting = {server.name: server for server in scene.servers if server.name not in scene.ready}
        self._watched = {name: self._of(server) for name, server in waiting.items()}
        self._look(waiting, now)
        for name, watched in self._watched.items():
            yield from watched.readings(name, now.wall)

    def _of(self, server: Server) -> _Watched:
        watched = self._watched.get(server.name)
        return watched if watched is not None and watched.root == server.root else _Watched(server.root)

    def _look(self, servers: Mapping[str, Server], now: Moment) -> None:
        due = [(watched.looked_at, name) for name, watched in self._watched.items() if watched.due <= now.monotonic]
        crowd = Crowd(self._proc, self._proc.boot_time()) if due else None
        for _, name in sorted(due):
            watched = self._watched[name]
            watched.looked_at, watched.due = now.monotonic, now.monotonic + LOOK_SECONDS
            assert crowd is not None  # noqa: S101  # somebody is due
            if not self._look_at(servers[name], watched, crowd, now):
                watched.due = now.monotonic + RETRY_SECONDS
                break
        if not servers:
            self._looks.rest()

    def _look_at(self, server: Server, watched: _Watched, crowd: Crowd, now: Moment) -> bool:
        """One look; False when it took too long."""
        environ = watched.environ
        if environ is None:
            answer = self._ask(server, ask="environ")
            environ = answer.get("environ", {})  # without it: the defaults
            if answer.get("reason") != "error":  # which may pass
                watched.environ = environ
            if answer.get("reason") == "timeout":
                return False
        user = next((process.user for process in server.processes if process.id == server.root), 0)
        root = None if server.container else str(self._root)
        answer = self._ask(server, ask="locks", user=user, environ=environ, root=root)
        if "reason" in answer:
            gone = answer["reason"] == "vanished"
            watched.problems = {} if gone else dict.fromkeys(KINDS, str(answer["reason"]))
            watched.told = {}
            return bool(answer["reason"] != "timeout")
        watched.problems = answer["problems"]
        found = [Found(**lock) for lock in answer["locks"]]
        crowd.look_again()
        try:
            watched.told = self._told(found, server, watched, crowd, now.wall)
        except OSError as error:
            watched.problems, watched.told = dict.fromkeys(KINDS, reason_of(error)), {}
        return True

    def _ask(self, server: Server, **request: Any) -> Mapping[str, Any]:
        return self._looks.ask(json.dumps({"pid": server.root.pid, "ticks": server.root.start_ticks, **request}))

    def _told(self, found: list[Found], server: Server, watched: _Watched, crowd: Crowd, now: float) -> dict[str, Lock]:
        """Of each kind the oldest lock that nobody holds, else the oldest."""
        flocks = {(lock.device, lock.inode): lock for lock in found if not lock.exists}
        was_free = watched.free
        watched.seen = {file: watched.seen.get(file, now) for file in flocks}
        watched.free = frozenset(file for file, lock in flocks.items() if not lock.holders)
        told: dict[str, Lock] = {}
        for lock in found:
            file = (lock.device, lock.inode)
            said = judged(lock, server, crowd, watched.seen.get(file, lock.modified), file in was_free)
            if said is not None and (lock.kind not in told or _rank(said) < _rank(told[lock.kind])):
                told[lock.kind] = said
        return told


def _start(proc: Path) -> subprocess.Popen[bytes]:
    return start_looker(proc)


def _rank(lock: Lock) -> tuple[bool, float]:
    return lock.held is not False, lock.since


def judged(found: Found, server: Server, crowd: Crowd, since: float, was_free: bool) -> Lock | None:
    """What is said of a lock; None when nobody waits for it.

    `since` in Unix seconds: since when a held flock is held is not to be had from its file, which its waiters
    change; it counts from when it was first seen.  `was_free`: it was held by nobody at the last look either;
    free once only, it is passed on this moment.
    """
    if found.holders:
        if not found.exists and all(crowd.belongs(pid, server) for pid in found.holders):
            return None  # the server holds it itself: what it waits for is no lock
        return Lock(since, True)
    if not found.local:
        return Lock(since, None, "not_supported")
    if crowd.blind:
        return Lock(since, None, crowd.blind)
    if found.exists:
        return Lock(since, crowd.may_hold(found, server))
    return Lock(since, False) if was_free else None
