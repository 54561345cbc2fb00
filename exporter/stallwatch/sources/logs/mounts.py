"""Which mounts may stop answering, told without touching them.

`stat` of a file on a dead network mount waits for ever, and so does `readlink` of the place where it is mounted.
So the table of mounts and the links on the way decide: a path is `far` when it leads below a mount whose file
system is not known to be local.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ..passing import may_pass

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
_MOUNT = re.compile(rb"^mnt_id:\s*(\d+)", re.MULTILINE)
_INODE = re.compile(rb"^ino:\s*(\d+)", re.MULTILINE)
_WILD = re.compile(r"[*?[]")


class FarError(Exception):
    """What was asked for lies on a far mount, and is to be asked for in its thread."""

    def __init__(self, mount: str) -> None:
        super().__init__(mount)
        self.mount = mount


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of a table of mounts; `key` (its device) is the same for all mounts of one file system."""

    number: int
    key: str
    point: str
    is_far: bool
    is_fuse: bool

    @property
    def device(self) -> int:
        major, _, minor = self.key.partition(":")
        return os.makedev(int(major), int(minor)) if major.isdigit() and minor.isdigit() else 0


@dataclass(frozen=True, slots=True)
class FarFile:
    """An open file on a far mount: the mount's key, its device and the file's inode; 0 where they are not told."""

    mount: str
    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class _Table:
    """The mounts of one mount namespace; of several at one point the last is on top."""

    by_number: Mapping[int, Mount]
    points: Mapping[str, Mount]
    has_far: bool
    lasting: frozenset[str]  # keys of those on which a file may be kept open

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, content: bytes) -> _Table:
        """Kept by all that it says: it is read again and again, and hardly ever another."""
        mounts = [mount for line in content.splitlines() if (mount := _mount(line)) is not None]
        far = any(mount.is_far for mount in mounts)
        lasting = frozenset(mount.key for mount in mounts if not mount.is_fuse)
        return cls({mount.number: mount for mount in mounts}, {mount.point: mount for mount in mounts}, far, lasting)


_NO_TABLE = _Table({}, {}, False, frozenset())
UNKNOWN = "unknown"
"""In the place of a mount's key: whether it is far could not be read now, and what is near would not be waited for."""
_UNREAD = _Table({}, {"/": Mount(-1, UNKNOWN, "/", is_far=True, is_fuse=True)}, has_far=True, lasting=frozenset())


@dataclass(slots=True)
class Mounts:
    """The mounts as we see them, and those of other processes where a path leads through /proc."""

    proc: str = "/proc"
    _own: _Table = _NO_TABLE
    _looked_at: float = float("-inf")
    _by_descriptor: dict[str, str | None] = field(default_factory=dict)
    _tables: dict[str, _Table] = field(default_factory=dict)  # by namespace
    _reread: set[str] = field(default_factory=set)  # namespaces whose table was read twice

    def refresh(self, at: float) -> None:
        """Look at the table again, not at every turn: on some nodes it is long.  `at` in monotonic seconds."""
        if at - self._looked_at >= LOOK_SECONDS:
            self._looked_at, self._by_descriptor, self._tables = at, {}, {}
            self._reread.clear()
            table = self._table("self")
            if table is not _UNREAD or self._own is _NO_TABLE:  # else the one before holds until the next look
                self._own = table

    def far(self, path: str) -> str | None:
        """The key of the far mount that a path leads to; None when it is local."""
        inside = path.removeprefix(self.proc + "/") if path.startswith(self.proc + "/") else ""
        if match := _DESCRIPTOR.fullmatch(inside):
            if path not in self._by_descriptor:
                file = self.far_file(int(match[1]), int(match[2]))
                self._by_descriptor[path] = None if file is None else file.mount
            return self._by_descriptor[path]
        if match := _ROOT.fullmatch(inside):
            return _far(self._table(match[1]), f"{self.proc}/{match[1]}/root", match[2])
        return _far(self._own, "", path)

    def under(self, path: str) -> str | None:
        """As `far`, for a path without links, of whose parents none is far."""
        mount = _mount_of(self._own.points, path) if self._own.has_far else None
        return mount.key if mount is not None and mount.is_far else None

    def far_around(self, path: str) -> str | None:
        """As `far`, for looking at what a pattern finds, or what is in a folder, but for the mounts right in it.

        Behind a wildcard that stands for a folder a link may lead anywhere: such a pattern has a key of its own.
        """
        if not self._own.has_far:
            return None
        parts = path.split("/")
        wild = next((number for number, part in enumerate(parts) if _WILD.search(part)), len(parts))
        fixed = "/".join(parts[:wild]) or "/"
        if (key := self.far(fixed)) is not None:
            return key
        return path if wild < len(parts) - 1 else None

    def far_inside(self, folder: str) -> dict[str, str]:
        """name -> key of the far mounts right in a near folder: a single file may be one.

        Below the root folder of a process the folder is one without links, as the kernel names it.
        """
        inside = _ROOT.fullmatch(f"{folder}/".removeprefix(f"{self.proc}/"))
        table = self._own if inside is None else self._table(inside[1])
        if not table.has_far:
            return {}
        mounts = [(os.path.split(mount.point), mount) for mount in table.points.values() if mount.is_far]
        real = os.path.realpath(folder) if inside is None else os.path.normpath(inside[2])
        return {name: mount.key for (parent, name), mount in mounts if parent == real}

    def may_keep(self, key: str) -> bool:
        """Whether a file on a mount may be kept open.

        Closing one on FUSE waits for its program, also in a child that we start: it has copies of all that is open.
        With that program dead no child would start any more.
        """
        return any(key in table.lasting for table in (self._own, *self._tables.values()))

    def far_file(self, pid: int, descriptor: int) -> FarFile | None:
        """An open file that is far; None for a near one.

        The kernel names the mount beside the file, and from Linux 5.14 on the inode.  A mount that is in no table
        was taken out of it while the file was open, as is done with those that died: nothing is known of it.
        """
        content = _content(f"{self.proc}/{pid}/fdinfo/{descriptor}")
        if content is None:
            return FarFile(UNKNOWN, 0, 0)
        number, inode = _MOUNT.search(content), _INODE.search(content)
        if number is None:
            return None
        mount = self._numbered(str(pid), int(number[1]))
        if mount is None:
            table = self._table(str(pid))
            key, device = UNKNOWN if table is _UNREAD else f"mount {int(number[1])}" if table.by_number else "", 0
        else:
            key, device = (mount.key, mount.device) if mount.is_far else ("", 0)
        return FarFile(key, device, int(inode[1]) if inode else 0) if key else None

    def _numbered(self, pid: str, number: int) -> Mount | None:
        """A mount as the process sees it, or as we do: a file may have been opened before it had its own mounts."""
        found = self._table(pid).by_number.get(number) or self._own.by_number.get(number)
        if found is None and (namespace := self._namespace(pid)) not in self._reread:  # made since the last look
            self._reread.add(namespace)
            self._tables.pop(namespace, None)
            found = self._table(pid).by_number.get(number)
        return found

    def _table(self, pid: str) -> _Table:
        namespace = self._namespace(pid)
        if namespace not in self._tables:
            content = _content(f"{self.proc}/{pid}/mountinfo")
            if content is None:
                return _UNREAD
            self._tables[namespace] = _Table.of(content)
        return self._tables[namespace]

    def _namespace(self, pid: str) -> str:
        try:
            return os.readlink(f"{self.proc}/{pid}/ns/mnt")
        except OSError:
            return pid


def _content(path: str) -> bytes | None:
    """Empty when there is none, or it is not for us; None when it could not be read now."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        return None if may_pass(error) else b""


def _mount(line: bytes) -> Mount | None:
    """36 35 98:0 /root /point rw,noatime master:1 - ext4 /dev/root rw"""
    before, _, after = line.partition(b" - ")
    words, kind = before.split(b" "), after.split(b" ")[0].decode("ascii", "replace")
    if len(words) < 5 or not words[0].isdigit():
        return None
    point = os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 255]), words[4]))
    is_fuse = kind.startswith("fuse") or kind == "virtiofs"
    return Mount(int(words[0]), words[2].decode("ascii", "replace"), point, kind not in LOCAL, is_fuse)


def _far(table: _Table, root: str, path: str) -> str | None:
    """Go along a path, over links, until it is beneath a far mount or at its end."""
    if not table.has_far:
        return None
    points = table.points
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


def _mount_of(points: Mapping[str, Mount], path: str) -> Mount | None:
    while path and path not in points:
        path = path.rpartition("/")[0]
    return points.get(path or "/")
