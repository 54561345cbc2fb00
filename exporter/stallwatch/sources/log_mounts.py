"""Which mounts may stop answering, told without touching them.

`stat` of a file on a dead network mount waits for ever, and so does `readlink` of the place where it is mounted.
So the table of mounts and the links on the way decide: a path is `far` when it leads below a mount whose file
system is not known to be local.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

_LOCAL_NAMES = (
    "ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs nilfs2 tmpfs ramfs rootfs overlay aufs squashfs erofs "
    "iso9660 vfat exfat ntfs3 proc sysfs devtmpfs devpts cgroup cgroup2 mqueue hugetlbfs tracefs debugfs"
)
LOCAL = frozenset(_LOCAL_NAMES.split())
"""File systems that answer without another machine or program; any other is taken for one that may not."""
LOOK_SECONDS = 5.0
MOST_LINKS = 40

_ESCAPE = re.compile(rb"\\([0-7]{3})")
_DESCRIPTOR = re.compile(r"(\d+)/fd/(\d+)")
_ROOT = re.compile(r"(\d+)/root(/.*)")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of a table of mounts; `key` is the same for all mounts of one file system."""

    number: int
    key: str
    point: str
    is_far: bool


@dataclass(slots=True)
class Mounts:
    """The mounts as we see them, and those of other processes where a path leads through /proc."""

    proc: str = "/proc"
    _own: tuple[Mount, ...] = ()
    _looked_at: float = float("-inf")
    _by_descriptor: dict[str, str | None] = field(default_factory=dict)

    def refresh(self, at: float) -> None:
        """Look at the table again, not at every turn: on some nodes it is long.  `at` in monotonic seconds."""
        if at - self._looked_at >= LOOK_SECONDS:
            self._looked_at, self._own, self._by_descriptor = at, self._table("self"), {}

    def far(self, path: str) -> str | None:
        """The key of the far mount that a path leads to; None when it is local."""
        inside = path.removeprefix(self.proc + "/") if path.startswith(self.proc + "/") else ""
        if match := _DESCRIPTOR.fullmatch(inside):
            if path not in self._by_descriptor:
                self._by_descriptor[path] = self._of_descriptor(match[1], match[2])
            return self._by_descriptor[path]
        if match := _ROOT.fullmatch(inside):
            return _far(self._table(match[1]), f"{self.proc}/{match[1]}/root", match[2])
        return _far(self._own, "", path)

    def _of_descriptor(self, pid: str, descriptor: str) -> str | None:
        """The kernel names the mount of an open file beside the file."""
        number = re.search(rb"^mnt_id:\s*(\d+)", _content(f"{self.proc}/{pid}/fdinfo/{descriptor}"), re.M)
        if number is None:
            return None
        mounts = (mount for mount in self._table(pid) if mount.number == int(number[1]))
        return next((mount.key for mount in mounts if mount.is_far), None)

    def _table(self, pid: str) -> tuple[Mount, ...]:
        lines = _content(f"{self.proc}/{pid}/mountinfo").splitlines()
        return tuple(mount for line in lines if (mount := _mount(line)) is not None)


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _mount(line: bytes) -> Mount | None:
    """36 35 98:0 /root /point rw,noatime master:1 - ext4 /dev/root rw"""
    before, _, after = line.partition(b" - ")
    words, kind = before.split(b" "), after.split(b" ")[0].decode("ascii", "replace")
    if len(words) < 5 or not words[0].isdigit():
        return None
    point = os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 255]), words[4]))
    return Mount(int(words[0]), words[2].decode("ascii", "replace"), point, kind not in LOCAL)


def _far(mounts: tuple[Mount, ...], root: str, path: str) -> str | None:
    """Go along a path, over links, until it is beneath a far mount or at its end."""
    if not any(mount.is_far for mount in mounts):
        return None
    points = {mount.point: mount for mount in mounts}  # of several at one point the last is on top
    at, todo, links = "", path.split("/")[::-1], 0
    under = points.get("/")
    while todo:
        if under is not None and under.is_far:
            return under.key
        name = todo.pop()
        if name in ("", "."):
            continue
        there = at.rpartition("/")[0] if name == ".." else f"{at}/{name}"
        under = _mount_of(points, there)
        if name != ".." and not (under is not None and under.is_far) and links < MOST_LINKS:
            try:
                target = os.readlink(root + there)
            except OSError:
                target = ""
            if target:
                links += 1
                todo += target.split("/")[::-1]
                there = "" if target.startswith("/") else at
                under = _mount_of(points, there)
        at = there
    return under.key if under is not None and under.is_far else None


def _mount_of(points: dict[str, Mount], path: str) -> Mount | None:
    while path and path not in points:
        path = path.rpartition("/")[0]
    return points.get(path or "/")
