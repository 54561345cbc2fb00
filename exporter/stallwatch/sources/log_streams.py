"""Where stdout and stderr of a process go: a file, a container runtime's log behind a pipe, the journal, or nowhere.

Only a regular file is ever opened.  A pipe is not: that would take its data away from whoever reads it; nor is a
FIFO, a terminal or a device.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..model import LogPlace
from .cgroups import Placement
from .journal import find_program, journal_behind, place_of
from .log_containers import ContainerLogs
from .procfs import ProcFs, reason_of

NO_LOG = "absent"
SLACK_SECONDS = 2.0
"""A log that was last written so long before the server began holds no word of it."""

_ANONYMOUS = re.compile(r"(?P<kind>pipe|socket):\[(?P<inode>\d+)\]")
_MOUNTINFO_BYTES = 256 << 10


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
    has_journal: Callable[[], bool] = field(default=lambda: bool(find_program()))
    journal_behind: Callable[[int], str | None] = journal_behind

    @classmethod
    def of(cls, proc: ProcFs, root: Path) -> StreamPlaces:
        return cls(proc, ContainerLogs(root))

    def place(self, whose: Whose, fd: int, stream: str) -> LogPlace:
        """Where stream `fd` of a process goes; `absent` where it leaves no log."""
        path = self.proc.path(whose.pid, "fd", str(fd))
        try:
            target = os.readlink(path)
            anonymous = _ANONYMOUS.fullmatch(target)
            status = None if anonymous else os.stat(path)
        except OSError as error:
            return self._unseen(whose, stream, reason_of(error))
        if anonymous is not None:
            return self._behind(whose, stream, anonymous["kind"], int(anonymous["inode"]))
        if status is None or not stat.S_ISREG(status.st_mode):
            return LogPlace(stream, reason=NO_LOG)
        name = os.path.basename(target.removesuffix(" (deleted)")) or stream
        return LogPlace(name, path, None, status.st_dev, status.st_ino)

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
        if kind == "socket" and whose.placement.unit and self.has_journal():
            namespace = self.journal_behind(inode)
            path = None if namespace is None else place_of(whose.placement.unit, namespace)
            if path is not None:
                return LogPlace(stream, path)
        return LogPlace(stream, reason=NO_LOG)

    def _container(self, whose: Whose, stream: str) -> LogPlace:
        """The runtime's file.  One that nothing was written to since the server began is not where it writes:
        what is run in a container later (`exec`) writes to whoever ran it.
        """
        placement = whose.placement
        found = self.containers.find(placement.container_id, placement.pod_uid, lambda: self._mountinfo(whose.pid))
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


def _unless_gone(error: OSError) -> str | None:
    """A log that is being rotated is read on."""
    reason = reason_of(error)
    return None if reason == "vanished" else reason
