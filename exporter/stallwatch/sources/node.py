"""The `node` collector: memory of the host, shared memory, kills by the kernel, and locks that servers wait for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import ClassVar

from ..model import Observation, Reading, Scene, Signal
from ..signals import LOCK_AGE, LOCK_HELD, OOM_KILLS
from . import Host, Moment
from .locks import Locks
from .procfs import reason_of
from .shm import SHM_ORPHAN, Orphans

MEMORY_AVAILABLE = Signal(
    "node_memory_available_bytes", "Memory available without swapping, in bytes (MemAvailable).", (), "node"
)
MEMORY_CACHED = Signal(
    "node_memory_cached_bytes", "Page cache in bytes (Cached); given back on demand, not lost.", (), "node"
)
MEMORY_TOTAL = Signal("node_memory_total_bytes", "Memory of the host in bytes (MemTotal).", (), "node")
SHM_USED = Signal("node_shm_used_bytes", "Used bytes of /dev/shm.", (), "node")

_MEMINFO = (
    (MEMORY_AVAILABLE, re.compile(rb"^MemAvailable:\s+(\d+) kB", re.MULTILINE)),
    (MEMORY_CACHED, re.compile(rb"^Cached:\s+(\d+) kB", re.MULTILINE)),
    (MEMORY_TOTAL, re.compile(rb"^MemTotal:\s+(\d+) kB", re.MULTILINE)),
)
_OOM_KILL = re.compile(rb"^oom_kill (\d+)", re.MULTILINE)


class Node:
    """See the module."""

    name: ClassVar[str] = "node"
    signals: ClassVar[tuple[Signal, ...]] = (
        MEMORY_AVAILABLE,
        MEMORY_CACHED,
        MEMORY_TOTAL,
        OOM_KILLS,
        SHM_USED,
        SHM_ORPHAN,
        LOCK_AGE,
        LOCK_HELD,
    )

    def __init__(self, host: Host, locks: Locks | None = None) -> None:
        self._proc, self._shm = host.proc, host.root / "dev/shm"  # the host's own tmpfs is measured
        self._locks = locks or Locks(host)
        self._orphans = Orphans(host)

    def close(self) -> None:
        self._locks.close()
        self._orphans.close()

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """stallwatch_node_memory_available_bytes 4.46e+11"""
        meminfo = (self._proc / "meminfo").read_bytes()
        for signal, pattern in _MEMINFO:
            match = pattern.search(meminfo)
            yield signal.read(int(match[1]) * 1024) if match else signal.missing("not_supported")
        yield self._oom_kills()
        try:
            space = os.statvfs(self._shm)
        except OSError as error:
            yield SHM_USED.missing(reason_of(error))
        else:
            yield SHM_USED.read((space.f_blocks - space.f_bfree) * space.f_frsize)
        yield from self._orphans.read(now)
        yield from self._locks.read(scene, now)

    def _oom_kills(self) -> Reading:
        """Counted since Linux 4.13."""
        try:
            kills = _OOM_KILL.search((self._proc / "vmstat").read_bytes())
        except OSError as error:
            return OOM_KILLS.missing(reason_of(error))
        return OOM_KILLS.read(int(kills[1])) if kills else OOM_KILLS.missing("kernel")
