"""The disposable looker for segments of shared memory that nobody holds, run as a program of its own by shm.

Who maps a file stands in /proc/PID/maps, and reading that waits for the process's mmap lock: whoever does it may hang
until he is killed.  This program gives up every right but those two that looking needs, and dies with its parent.

Input: one JSON line {"folder": .., "first": [pid, ..]}; `first` are looked at first, for they held something before.
Output: one JSON line {"unheld": {inode: bytes}, "holders": [pid, ..], "cpu": seconds}, or {"reason": ..} when it cannot
be known: whoever cannot be looked at may hold everything.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .blocking_child import content, drop_rights

OLD_SECONDS = 60.0
"""A younger segment may just be on its way from one process to another."""
LEAST_BYTES = 1 << 20
"""In sum: as long as there is no more, nobody is looked at."""
MOST_FILES = 50_000
MOST_HOLDERS = 64
LONGEST_SECONDS = 20.0

_SCHEDULED_LAST = 10
_INIT = 1
"""The first process of the node: it uses no segments, and may show nothing of itself."""
_KERNEL_THREAD, _EXITING = 0x00200000, 0x00000004  # PF_KTHREAD, PF_EXITING (include/linux/sched.h)
_NAMED = re.compile(r"(?:torch_|sgl_shm_mm_|sem\.loky-)(\d{1,10})[_-]")
"""Segments that name their maker, who is likely to hold them (or is gone)."""
_INODE = re.compile(rb"^ino:\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Segments:
    """The old ones of one folder: inode -> bytes in memory.  `makers`: PIDs in their names."""

    device: int
    bytes: dict[int, int]
    makers: tuple[int, ...] = ()

    @property
    def are_many(self) -> bool:
        return sum(self.bytes.values()) >= LEAST_BYTES


class UnknownError(Exception):
    """It cannot be known what a process holds; `args[0]` is the reason."""


def segments(folder: str, now: float) -> Segments:
    """Regular files right in `folder` (shm_open makes no others); `now` in Unix seconds.  OSError as of the folder."""
    device, found, makers = os.stat(folder).st_dev, dict[int, int](), list[int]()
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= MOST_FILES:
                raise OSError("too many files")
            with suppress(FileNotFoundError):  # gone by now
                status = entry.stat(follow_symlinks=False)
                is_old = now - max(status.st_mtime, status.st_ctime) >= OLD_SECONDS
                if stat.S_ISREG(status.st_mode) and status.st_dev == device and is_old:
                    found[status.st_ino] = status.st_blocks * 512
                    makers += map(int, _NAMED.findall(entry.name))
    return Segments(device, found, tuple(dict.fromkeys(makers)))


class Holders:
    """Who holds which of some inodes of one device, below one /proc."""

    def __init__(self, proc: str, device: int) -> None:
        self._proc, self._device = proc, device
        numbers = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
        self._mapped = re.compile(rb"^\S+ \S+ \S+ " + numbers + rb" (\d+)", re.MULTILINE)

    def blind(self) -> str:
        """Why not everybody can be seen; "" when all can.

        The first kernel thread is seen by those who see everybody: outside a PID namespace, and past hidepid.
        """
        first, second = (self._flags(pid) for pid in (_INIT, 2))
        if second is not None and second & _KERNEL_THREAD:
            return ""
        return "permission" if first is None else "namespace"

    def _flags(self, pid: int) -> int | None:
        try:
            return self._state(f"{self._proc}/{pid}")[1]
        except OSError:
            return None

    def pids(self) -> list[int]:
        """Youngest first: servers come after the services of the machine."""
        pids = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        return sorted(pids - {_INIT}, reverse=True)

    def held(self, pid: int, inodes: set[int]) -> set[int]:
        """Those of `inodes` that the process maps or has open; nothing when it has ended.  UnknownError when it may."""
        try:
            folder = self._living(f"{self._proc}/{pid}")
            if folder is None:
                return set()
            mapped = {int(inode) for inode in self._mapped.findall(_maps(folder))}
            return inodes & mapped | self._open(folder, inodes - mapped)
        except PermissionError as error:
            raise UnknownError("permission") from error
        except (FileNotFoundError, ProcessLookupError):
            return set()
        except (OSError, ValueError) as error:
            raise UnknownError("error") from error

    def _living(self, folder: str) -> str | None:
        """Where the memory and the files of a process are to be seen; None when it has none.

        A thread that ended shows nothing of either: when it is the first one, another is taken.  One on its way out
        shows nothing either, but may still have to give back what it holds.
        """
        state, flags = self._state(folder)
        if flags & _KERNEL_THREAD:
            return None
        if state not in "ZX" and not flags & _EXITING:
            return folder
        ends = False
        for thread in os.listdir(f"{folder}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                state, flags = self._state(other := f"{folder}/task/{thread}")
                if state not in "ZX" and not flags & _EXITING:
                    return other
                ends = ends or state not in "ZX"
        if ends:
            raise UnknownError("vanished")
        return None

    @staticmethod
    def _state(folder: str) -> tuple[str, int]:
        """State and flags."""
        text = content(f"{folder}/stat")
        fields = text[text.rindex(b")") + 2 :].split(b" ", 7)
        return fields[0].decode(), int(fields[6])

    def _open(self, folder: str, inodes: set[int]) -> set[int]:
        """Those of `inodes` that are open.

        A link's target is asked for its device only when its inode is one of them: it might lie on a dead file
        system, which would not answer.  Before Linux 5.14 only its name tells that.
        """
        return {inode for number in os.listdir(f"{folder}/fd") for inode in self._behind(folder, number, inodes)}

    def _behind(self, folder: str, number: str, inodes: set[int]) -> Iterator[int]:
        with suppress(FileNotFoundError):  # closed by now
            link = os.readlink(f"{folder}/fd/{number}")
            if not link.startswith("/") or (link.startswith("/dev/") and not link.startswith("/dev/shm/")):  # noqa: S108
                return  # a socket, a device ..
            match = _INODE.search(content(f"{folder}/fdinfo/{number}"))
            if match is None or int(match[1]) in inodes:
                status = os.stat(f"{folder}/fd/{number}")
                if status.st_dev == self._device and status.st_ino in inodes:
                    yield status.st_ino


def _maps(folder: str) -> bytes:
    """All of it: the kernel gives a page at a time."""
    with open(f"{folder}/maps", "rb", buffering=0) as file:
        return b"".join(iter(lambda: file.read(1 << 16), b""))


def look(proc: str, folder: str, first: Iterable[int], now: float) -> dict[str, Any]:
    """One look, as in the module; `now` in Unix seconds."""
    found = segments(folder, now)
    if not found.are_many:
        return {"unheld": {}, "holders": []}
    holders, unheld, holding = Holders(proc, found.device), set(found.bytes), list[int]()
    until, unknown = time.monotonic() + LONGEST_SECONDS, holders.blind()
    everybody = holders.pids()
    alive = set(everybody)
    for pid in dict.fromkeys([*(pid for pid in (*first, *found.makers) if pid in alive), *everybody]):
        if not unheld:
            break  # whoever comes now can change nothing
        if time.monotonic() > until:
            return {"reason": "timeout"}
        try:
            held = holders.held(pid, unheld)
        except UnknownError as problem:
            unknown = unknown or str(problem)
            continue
        if held:
            holding.append(pid)
            unheld -= held
    if unheld and unknown:
        return {"reason": unknown}
    return {"unheld": {inode: found.bytes[inode] for inode in unheld}, "holders": holding[:MOST_HOLDERS]}


def answer(proc: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    try:
        found = look(proc, request["folder"], request["first"], time.time())
    except PermissionError:
        return {"reason": "permission"}
    except OSError:
        return {"reason": "error"}
    return {**found, "cpu": time.process_time()}


def main() -> None:
    """Answer one request."""
    drop_rights()
    os.nice(_SCHEDULED_LAST)
    sys.stdout.write(json.dumps(answer(sys.argv[1], json.loads(sys.stdin.readline()))) + "\n")
