"""Where stdout and stderr of a process go: a file, a container runtime's log behind a pipe, the journal, or nowhere.

Only a regular file is ever opened.  A pipe is not: that would take its data away from whoever reads it; nor is a
FIFO, a terminal or a device.  Nothing on a far mount is touched here, but in its thread: it may never answer.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...model import LogPlace
from ..attribution import node_root
from ..cgroups import Placement
from ..procfs import ProcFs, reason_of
from .containers import ContainerLogs
from .guard import Questions
from .journal import find_program, journal_behind, place_of
from .mounts import FarError, FarFile

NO_LOG = "absent"
SLACK_SECONDS = 2.0
"""A log that was last written so long before the server began holds no word of it."""

_ANONYMOUS = re.compile(r"(?P<kind>pipe|socket):\[(?P<inode>\d+)\]")
_FLAGS = re.compile(rb"^flags:\s*([0-7]+)$", re.MULTILINE)
_FDINFO_BYTES = 1024
_MOUNTINFO_BYTES = 256 << 10
_MOST_NODES = 64


@dataclass(frozen=True, slots=True)
class Whose:
    """The process whose streams are asked for: its PID, where it runs, and when its server began (Unix seconds)."""

    pid: int
    placement: Placement
    started_at: float


@dataclass(slots=True)
class StreamPlaces:
    """Looks at descriptors of processes in one /proc, and for what lies behind them below one root."""

    proc: ProcFs
    containers: ContainerLogs
    far: Questions
    has_journal: Callable[[], bool] = field(default=lambda: bool(find_program()))
    journal_behind: Callable[[int], str | None] = journal_behind
    _asked: set[str] = field(default_factory=set)  # of far mounts; each ends with the container's id
    _nodes: dict[str, ContainerLogs] = field(default_factory=dict)  # by the root of a node that is a container itself

    @classmethod
    def of(cls, proc: ProcFs, root: Path, far: Questions) -> StreamPlaces:
        return cls(proc, ContainerLogs(root, far.guards.mounts.under), far)

    def forget(self, containers: set[str]) -> None:
        """Keep what is known of these containers only."""
        for each in (self.containers, *self._nodes.values()):
            each.forget(containers)
        self.far.forget([name for name in self._asked if name.rpartition(" ")[2] not in containers])
        self._asked = {name for name in self._asked if name.rpartition(" ")[2] in containers}

    def place(self, whose: Whose, fd: int, stream: str) -> LogPlace:
        """Where stream `fd` of a process goes; `absent` where it leaves no log."""
        path = self.proc.path(whose.pid, "fd", str(fd))
        try:
            target = os.readlink(path)
            anonymous = _ANONYMOUS.fullmatch(target)
            file = None if anonymous else self.far.guards.mounts.far_file(whose.pid, fd)
            status = os.stat(path) if anonymous is None and file is None else None
        except OSError as error:
            return self._unseen(whose, stream, reason_of(error))
        if anonymous is not None:
            return self._behind(whose, stream, anonymous["kind"], int(anonymous["inode"]))
        if file is not None:
            return self._far_place(whose.pid, fd, target, file)
        if status is None or not stat.S_ISREG(status.st_mode) or not self._is_written(whose.pid, fd):
            return LogPlace(stream, reason=NO_LOG)
        return LogPlace(_name(target) or stream, path, None, status.st_dev, status.st_ino)

    def _is_written(self, pid: int, fd: int) -> bool:
        """Whether the process may write there: what it only reads is no log of its, but perhaps somebody's secret."""
        try:
            with open(self.proc.path(pid, "fdinfo", str(fd)), "rb", buffering=0) as file:
                flags = _FLAGS.search(file.read(_FDINFO_BYTES))
        except OSError:
            return True  # not told
        return flags is None or int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY

    def _far_place(self, pid: int, fd: int, target: str, file: FarFile) -> LogPlace:
        """Whether it is a regular file is left to who reads it.

        Without its inode it is known by its path alone: one that leads where an earlier stream does is that one.
        """
        path = self.proc.path(pid, "fd", str(fd))
        if fd > 1 and not file.inode:
            first = self.proc.path(pid, "fd", "1")
            with suppress(OSError):
                path = first if os.readlink(first) == target else path
        return LogPlace(_name(target), path, None, file.device, file.inode)

    def _unseen(self, whose: Whose, stream: str, reason: str) -> LogPlace:
        """Without the right to see the descriptor, the control group still tells the container."""
        if reason == "permission" and whose.placement.container_id:
            found = self._container(whose, stream)
            if found.path:
                return found
        return LogPlace(stream, reason=reason)

    def _behind(self, whose: Whose, stream: str, kind: str, inode: int) -> LogPlace:
        if kind == "pipe" and whose.placement.container_id:
            return self._container(whose, stream)
        unit = whose.placement.unit or whose.placement.user_unit
        if kind == "socket" and unit and self.has_journal():
            namespace = self.journal_behind(inode)
            path = None if namespace is None else place_of(unit, namespace)
            if path is not None:
                return LogPlace(stream, path)
        return LogPlace(stream, reason=NO_LOG)

    def _container(self, whose: Whose, stream: str) -> LogPlace:
        """The file of a container's runtime; of one that runs in a node that is a container itself, the node's file.

        In a pod everybody may call his groups what he likes: an id in there is none of this machine's containers.
        """
        nowhere = LogPlace(stream, reason=NO_LOG)
        found = nowhere if whose.placement.is_nested else self._searched(self.containers, whose, stream)
        if found.reason == NO_LOG and (inside := self._inside_node(whose)) is not None:
            return self._searched(inside, whose, stream)
        return found

    def _inside_node(self, whose: Whose) -> ContainerLogs | None:
        """The files as the node's own processes see them."""
        node = whose.placement.node_id
        root = node_root(self.proc, whose.pid, node) if node else None
        if root is None:
            return None
        if root not in self._nodes and len(self._nodes) >= _MOST_NODES:
            self._nodes.clear()
        return self._nodes.setdefault(root, ContainerLogs(Path(root), self.far.guards.mounts.far))

    def _searched(self, containers: ContainerLogs, whose: Whose, stream: str) -> LogPlace:
        """What is found, looked for in a thread where the search leads to a far mount."""
        container = whose.placement.container_id
        try:
            return self._runtimes(containers, whose, stream)
        except FarError as far:
            name, other = f"{stream} of {whose.pid} in {container}", containers.unguarded(container)
            self._asked.add(name)
            answer = self.far.ask(name, far.mount, lambda: (self._runtimes(other, whose, stream), other))
        if answer is None:
            return LogPlace(stream, reason="timeout")
        containers.learn(answer[1])
        return answer[0]

    def _runtimes(self, containers: ContainerLogs, whose: Whose, stream: str) -> LogPlace:
        """The runtime's file.  One that nothing was written to since the server began is not where it writes:
        what is run in a container later (`exec`) writes to whoever ran it.
        """
        placement = whose.placement
        pod = "" if placement.is_nested else placement.pod_uid  # the log of the container around it is another
        found = containers.find(placement.container_id, pod, lambda: self._mountinfo(whose.pid))
        if not found.path:
            return LogPlace(stream, reason=found.reason)
        try:
            status = os.lstat(found.path)
        except OSError as error:
            return LogPlace(stream, found.path if reason_of(error) == "vanished" else "", _unless_gone(error))
        if status.st_mtime < whose.started_at - SLACK_SECONDS:
            return LogPlace(stream, reason=NO_LOG)
        return LogPlace(stream, found.path, None, status.st_dev, status.st_ino)

    def _mountinfo(self, pid: int) -> str:
        try:
            with open(self.proc.path(pid, "mountinfo"), "rb", buffering=0) as file:
                return file.read(_MOUNTINFO_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""


def _name(target: str) -> str:
    return os.path.basename(target.removesuffix(" (deleted)"))


def _unless_gone(error: OSError) -> str | None:
    """A log that is being rotated is read on."""
    reason = reason_of(error)
    return None if reason == "vanished" else reason
