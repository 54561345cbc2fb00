"""Files of one /proc tree, read and parsed: nothing here blocks on a sick process (see blocking_reads for those).

Read here: stat, io, cgroup, status, fd links, ns links, /proc/stat, the last PID.  They answer even while a process
holds its mmap lock; cmdline, environ, maps and smaps do not.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..descriptors import Room
from ..model import ProcessId
from .cgroup_roots import absolute

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KERNEL_THREAD = 0x00200000
"""PF_KTHREAD in the flags of /proc/PID/stat (include/linux/sched.h)."""

CGROUP_BYTES = 65536
"""As much of a cgroup file as is read."""

_ENDED = ("Z", "X", "x")

_REASONS = {
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.ENOENT: "vanished",
    errno.ESRCH: "vanished",
    errno.ETIMEDOUT: "timeout",
}


def reason_of(error: OSError) -> str:
    """The read reason (READ_REASONS) of a failed system call."""
    return _REASONS.get(error.errno or 0, "error")


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/PID/stat says; CPU times in seconds, memory in bytes."""

    pid: int
    comm: str
    state: str
    ppid: int
    flags: int
    minor_faults: int
    major_faults: int
    cpu_seconds: float
    reaped_cpu_seconds: float
    threads: int
    start_ticks: int
    virtual_bytes: int
    resident_bytes: int
    start_stack: int = 0
    """Where the stack begins; another place after each exec.  0 without the right to look."""

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)

    @property
    def has_memory(self) -> bool:
        """False for a zombie, also one whose other threads live: what it says of its memory is nothing."""
        return self.state not in _ENDED

    @property
    def is_over(self) -> bool:
        """A zombie without living threads (a leader that ended before its threads is a zombie too)."""
        return self.state in _ENDED and self.threads <= 1


def parse_stat(content: bytes) -> Stat:
    """Parse one line of stat.  The comm may hold blanks and brackets: it ends at the last `)`."""
    opening, closing = content.index(b"("), content.rindex(b")")
    fields = content[closing + 2 :].split()
    return Stat(
        pid=int(content[:opening]),
        comm=content[opening + 1 : closing].decode("utf-8", "replace"),
        state=fields[0].decode("ascii", "replace"),
        ppid=int(fields[1]),
        flags=int(fields[6]),
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / CLOCK_TICKS,
        reaped_cpu_seconds=(int(fields[13]) + int(fields[14])) / CLOCK_TICKS,
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        virtual_bytes=int(fields[20]),
        resident_bytes=int(fields[21]) * PAGE_BYTES,
        start_stack=int(fields[25]),
    )


@dataclass(frozen=True, slots=True)
class Io:
    """What /proc/PID/io says, in bytes."""

    read_chars: int
    written_chars: int
    storage_read: int


_IO = re.compile(rb"rchar: (\d+)\nwchar: (\d+)\n.*?read_bytes: (\d+)\n", re.DOTALL)


def parse_io(content: bytes) -> Io:
    match = _IO.search(content)
    if match is None:
        raise OSError(errno.EIO, "io has another form")
    return Io(int(match[1]), int(match[2]), int(match[3]))


def inner_pid_of(status: bytes) -> int | None:
    """The PID in the process's own PID namespace, of the text of its status (the last of NSpid)."""
    match = re.search(rb"^NSpid:[\t \d]*?(\d+)$", status, re.MULTILINE)
    return int(match[1]) if match else None


class KeptFile:
    """A file of /proc, opened at the first read, kept open while there is room and read again by pread.

    The descriptor pins the process: after its end every read fails with ESRCH, and a later process with the
    same PID is never seen.  Without room the file is opened for each read, and whoever reads it has to look
    whose it is.  A file without content (a recorded tree) is a process that ended, too.
    """

    def __init__(self, path: str | Path, room: Room, size: int = 1024) -> None:
        self._path, self._room, self._size = path, room, size
        self._fd = -1

    def read(self) -> bytes:
        """OSError when it cannot be read, ProcessLookupError or FileNotFoundError when the process ended."""
        fd = self._fd if self._fd >= 0 else os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.pread(fd, self._size, 0)
        finally:
            if self._fd < 0:
                self._keep_or_close(fd)
        if not content:
            raise ProcessLookupError(errno.ESRCH, "the process ended")
        return content

    def _keep_or_close(self, fd: int) -> None:
        if self._room.take():
            self._fd = fd
        else:
            os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._room.give_back()
            self._fd = -1


class ProcFs:
    """One mounted /proc."""

    def __init__(self, root: Path) -> None:
        self.root, self._top = root, str(root)
        self.is_ours = self._is_our_pid_namespace()
        self._listed: tuple[list[str], list[int]] = [], []  # names of the last listing, and the PIDs among them
        self.cgroup_roots: Mapping[str, str] = {}
        """Where our cgroup namespace begins in the machine's hierarchies (see cgroup_roots)."""

    def _is_our_pid_namespace(self) -> bool:
        """Whether the PIDs in this tree are PIDs to our own system calls (CPU clocks need that)."""
        try:
            return int(os.readlink(self.root / "self")) == os.getpid()
        except (OSError, ValueError):
            return False

    def path(self, pid: int, *parts: str) -> str:
        return "/".join((self._top, str(pid), *parts))

    def pids(self) -> list[int]:
        names = os.listdir(self.root)
        if names != self._listed[0]:
            self._listed = names, [int(name) for name in names if name.isascii() and name.isdigit()]
        return self._listed[1]

    @property
    def hides_others(self) -> bool:
        """Whether the processes of others are not shown to us (`hidepid`): the first process of all is not there.

        Only a mounted /proc can hide: a recorded tree has no link to who reads it.
        """
        return os.path.islink(self.root / "self") and not os.path.exists(self.root / "1")

    @property
    def is_inner(self) -> bool:
        """Whether only a PID namespace is shown, as in a container: the first kernel thread is not there.

        Known of a mounted /proc that hides nobody, see above.
        """
        if self.hides_others or not os.path.islink(self.root / "self"):
            return False
        second = self.stat(2)
        return second is None or not second.flags & KERNEL_THREAD

    def forks(self) -> int | None:
        """Processes and threads created since boot on the whole machine; None when unknown."""
        match = re.search(rb"^processes (\d+)", self._content("stat"), re.MULTILINE)
        return int(match[1]) if match else None

    def last_pid(self) -> int | None:
        """The PID given out last, to a process or a thread of this PID namespace; None when unknown.

        They are given out upwards, and from the bottom again at the end (pid_namespaces(7)).
        """
        content = self._content("sys/kernel/ns_last_pid").strip() if self.is_ours else b""
        return int(content) or None if content.isdigit() else None

    def boot_time(self) -> float:
        """Unix time of the boot (btime of /proc/stat); 0 when unknown."""
        match = re.search(rb"^btime (\d+)", self._content("stat"), re.MULTILINE)
        return float(match[1]) if match else 0.0

    def _content(self, name: str) -> bytes:
        """A file at the top of the tree; empty when there is none."""
        try:
            with open(self.root / name, "rb", buffering=0) as file:
                return b"".join(iter(lambda: file.read(1 << 16), b""))
        except OSError:
            return b""

    def stat(self, pid: int) -> Stat | None:
        """None when the process is gone (or not visible)."""
        try:
            with open(self.path(pid, "stat"), "rb", buffering=0) as file:
                return parse_stat(file.read(1024))
        except (OSError, ValueError, IndexError):
            return None

    def certain_stat(self, pid: int) -> Stat | None:
        """As `stat`, None only when it is gone; OSError when it could not be read, which may pass (passing)."""
        try:
            with open(self.path(pid, "stat"), "rb", buffering=0) as file:
                return parse_stat(file.read(1024))
        except (FileNotFoundError, ProcessLookupError, ValueError, IndexError):
            return None

    def cgroup(self, pid: int) -> str:
        """The text of /proc/PID/cgroup, with the machine's own paths if they are known; empty when unreadable."""
        return self.cgroup_text(self._cgroup(self.path(pid, "cgroup")))

    def cgroup_text(self, content: bytes) -> str:
        """The same of the content of such a file."""
        return absolute(content.decode("utf-8", "replace"), self.cgroup_roots)

    def own_cgroup(self) -> str:
        """The same of this process, as the kernel tells it."""
        return self._cgroup(os.path.join(self.root, "self", "cgroup")).decode("utf-8", "replace")

    @staticmethod
    def _cgroup(path: str) -> bytes:
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read(CGROUP_BYTES)
        except OSError:
            return b""

    def owner(self, pid: int) -> int | None:
        """Effective user of the process."""
        try:
            return os.stat(self.path(pid)).st_uid
        except OSError:
            return None

    def inner_pid(self, pid: int) -> int:
        """The PID the process has in its own PID namespace; `pid` when unknown."""
        try:
            return self.certain_inner_pid(pid)
        except OSError:
            return pid

    def certain_inner_pid(self, pid: int) -> int:
        """As `inner_pid`; OSError when it could not be read."""
        with open(self.path(pid, "status"), "rb", buffering=0) as file:
            return inner_pid_of(file.read(8192)) or pid

    def cpu_clock(self, pid: int) -> int | None:
        """CPU time of the process in ns, exact, without /proc and without rights; None when not to be had.

        An unchanged clock proves that none of its threads ran (clock_getcpuclockid(3)).
        """
        if not self.is_ours:
            return None
        try:
            return time.clock_gettime_ns((~pid << 3) | 2)
        except OSError:
            return None

    def cpu_clocks(self, pids: Sequence[int]) -> list[int | None]:
        """`cpu_clock` of many at once."""
        if not self.is_ours:
            return [self.cpu_clock(pid) for pid in pids]
        clocks = list[int | None]()
        told = map(time.clock_gettime_ns, [(~pid << 3) | 2 for pid in pids])
        while len(clocks) < len(pids):
            try:
                clocks.extend(told)
            except OSError:  # of the next one: those before it stand in the list, those behind it are still to be told
                clocks.append(None)
        return clocks
