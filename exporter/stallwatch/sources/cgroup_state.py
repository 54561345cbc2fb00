"""What the control groups around a server say: is anything left in its container, unit, step or session; is it frozen.

Asked through the files of the cgroup file system (/sys/fs/cgroup), v2 or v1.  They answer at once, whatever the
processes in them do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from ..model import ProcessId
from .cgroups import Cgroup, cgroups_in, scope_of
from .procfs import reason_of

SETTLE_SECONDS = 15.0
"""How long after the first process' end its scope is looked at again: a container takes a moment to be taken down."""

MOST_FOLDERS = 256
"""Groups below a scope of cgroup v1 that are looked into."""

_POPULATED = re.compile(rb"^populated (\d)", re.MULTILINE)
_FROZEN = re.compile(rb"^frozen (\d)", re.MULTILINE)

_Identity = tuple[int, int]


class CgroupFiles:
    """The mounted control groups of one machine, below `<root>/sys/fs/cgroup`."""

    def __init__(self, root: Path) -> None:
        self._top = str(root / "sys/fs/cgroup")
        self._frozen_now: dict[str, float | str | None] = {}  # by cgroup file, in this look

    def begin(self) -> None:
        """A new look: what was read of groups is read again, once for all servers that are in the same ones."""
        self._frozen_now.clear()

    def folder(self, group: Cgroup) -> tuple[str, _Identity] | None:
        """Where a group is mounted, with device and inode; None when it is not there.

        A group made anew has another inode, also under the same name.  A path that leads upwards is written as
        another cgroup namespace sees it: it cannot be found.
        """
        if ".." in group.path.split("/"):
            return None
        for mount in self.mounts(group.controllers):
            path = f"{mount}{group.path}"
            try:
                status = os.stat(path)
            except OSError as error:
                if reason_of(error) == "vanished":
                    continue
                raise
            return path, (status.st_dev, status.st_ino)
        return None

    def mounts(self, controllers: str) -> tuple[str, ...]:
        """Where a hierarchy may be: `cpu,cpuacct` is mounted under that name, or under a link for each."""
        if controllers:
            names = controllers.removeprefix("name=")
            return tuple(f"{self._top}/{name}" for name in dict.fromkeys((names, *names.split(","))))
        is_unified = os.path.exists(f"{self._top}/cgroup.controllers")
        return (self._top,) if is_unified else (f"{self._top}/unified",)

    def frozen(self, text: str) -> float | str | None:
        """1 when a group of this cgroup file, or one above it, is frozen; a reason when that cannot be read.

        None: no cgroup file system, or none that tells (v2 before Linux 5.2).  Both files tell of the groups above.
        """
        if text not in self._frozen_now:
            self._frozen_now[text] = self._read_frozen(text)
        return self._frozen_now[text]

    def _read_frozen(self, text: str) -> float | str | None:
        answers = [self._frozen(group) for group in _freezing(text)]
        known = [answer for answer in answers if answer is not None]
        reasons = [answer for answer in known if isinstance(answer, str)]
        if 1.0 in known or not reasons:
            return max((answer for answer in known if not isinstance(answer, str)), default=None)
        return min(reasons)

    def _frozen(self, group: Cgroup) -> float | str | None:
        name = "freezer.state" if group.controllers else "cgroup.events"
        try:
            content = self._in_folder(group, name)
        except OSError as error:
            return reason_of(error)
        if content is None:
            return None
        if group.controllers:  # FREEZING: a thread of it does not stop yet
            return float(content.strip() in (b"FROZEN", b"FREEZING"))
        match = _FROZEN.search(content)
        return float(match[1]) if match else None

    def _in_folder(self, group: Cgroup, name: str) -> bytes | None:
        """A file of a group; None when it is not there (see `folder`)."""
        for mount in self.mounts(group.controllers) if ".." not in group.path.split("/") else ():
            try:
                return _content(f"{mount}{group.path}/{name}")
            except OSError as error:
                if reason_of(error) != "vanished":
                    raise
        return None

    def is_populated(self, path: str, identity: _Identity) -> bool | None:
        """Whether a living process is in the group or below it; zombies do not count.  None = not to be known."""
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) != identity:
                return False
            events = _content(f"{path}/cgroup.events")
        except OSError as error:
            if not os.path.exists(path):
                return False
            return _has_processes(path) if reason_of(error) == "vanished" else None
        match = _POPULATED.search(events)
        return match[1] != b"0" if match else None


@lru_cache(maxsize=256)
def _freezing(text: str) -> tuple[Cgroup, ...]:
    """The groups of a cgroup file that can say whether they are frozen."""
    return tuple(g for g in cgroups_in(text) if not g.controllers or "freezer" in g.controllers.split(","))


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)


def _has_processes(path: str) -> bool | None:
    """cgroup v1: each folder lists only its own processes."""
    for number, (folder, _, _) in enumerate(os.walk(path)):
        if number >= MOST_FOLDERS:
            return None
        try:
            if _content(f"{folder}/cgroup.procs"):
                return True
        except OSError as error:
            if reason_of(error) != "vanished":
                return None
    return False


class Surroundings:
    """The groups around one start of one server, as its first process was last seen in them (`text`).

    `scope_alive`: whether anything runs in its scope, None = it is in none, or that cannot be known.  `frozen`: see
    CgroupFiles.frozen; None once the first process is gone.
    """

    def __init__(self, files: CgroupFiles, text: str) -> None:
        self._files = files
        self.text = text
        self._scope: Cgroup | None = None
        self._place: tuple[str, _Identity] | None = None
        self._residents: tuple[ProcessId, ...] | None = None
        self._until: float | None = None
        self.scope_alive: bool | None = None
        self.frozen: float | str | None = None
        self._place_in(text)

    def _place_in(self, text: str) -> None:
        self.text, self._scope, self._place = text, scope_of(text), None
        self.scope_alive = True if self._scope else None
        if self._scope:
            try:
                self._place = self._files.folder(self._scope)
            except OSError:
                self._place = None  # asked by its processes instead

    def look(self, text: str) -> None:
        """While the first process lives: its cgroup file now.  What it is in lives, too."""
        if text and text != self.text:
            self._place_in(text)
        self.scope_alive = True if self._scope else None
        self._until = self._residents = None
        self.frozen = self._files.frozen(self.text)

    def look_after(
        self,
        now: float,
        residents: Callable[[Cgroup], tuple[ProcessId, ...] | None],
        is_living: Callable[[ProcessId], bool],
    ) -> None:
        """Once it is gone or going: what is left in its scope, until that has settled.

        By the files of the group.  Without them by the processes that are in it at the first look (`residents`):
        younger ones may be the next start under the same name.
        """
        self.frozen = None
        self._until = now + SETTLE_SECONDS if self._until is None else self._until
        if self._scope is None or now > self._until:
            return
        if self._place is not None:
            self.scope_alive = self._files.is_populated(*self._place)
            return
        if self._residents is None:
            self._residents = residents(self._scope)
        self.scope_alive = None if self._residents is None else any(map(is_living, self._residents))
