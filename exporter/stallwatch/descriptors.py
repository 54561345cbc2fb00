"""How the files that this process may have open are shared out, so that some are left whatever the node runs.

Each share is held by its owner alone.  What is in no share is for the rest: logs, probes, single reads.

Here is also how a thread has files of its own.  A child gets a copy of every file that is open where it is started,
and closes it before it becomes another program.  On FUSE closing waits for the file system's program: while that
does not answer no child would ever start.
"""

from __future__ import annotations

import ctypes
import itertools
import resource
from dataclasses import dataclass

MOST_CONNECTIONS = 256
MOST_ACCEPTED = 16
"""As many as may be connected would put out, in a burst, a client whose request has come and was not looked at."""

_ENDLESS = 1 << 20
"""Taken for a limit that is none."""

_REST = 32
"""Of a small limit: the standard streams, event loops, pipes of the child that reads, what is read just now."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Most descriptors for each use."""

    connections: int  # HTTP clients
    accepted: int  # clients that are taken in at once and may still have to be turned away
    threads: int  # kept files of threads
    members: int  # kept files of the servers' processes


def shares(limit: int | None = None) -> Shares:
    """The shares of `limit` descriptors; by default of as many as this process may have open now."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        limit = _ENDLESS
    connections = max(1, min(MOST_CONNECTIONS, limit // 4))
    accepted = max(1, min(MOST_ACCEPTED, limit // 8))
    kept = max(0, limit - connections - accepted - _REST)
    threads = min(limit // 2, kept * 3 // 4)
    return Shares(connections, accepted, threads, kept // 8)


class Room:
    """How many descriptors one owner may keep open; what finds no room is opened for each read."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, number: int = 1) -> bool:
        if self._left < number:
            return False
        self._left -= number
        return True

    def give_back(self, number: int = 1) -> None:
        self._left += number


_CLOSE_RANGE = 436  # the number on every architecture
_UNSHARE = 2  # CLOSE_RANGE_UNSHARE
_LAST = (1 << 32) - 1
_FUSE_MAGIC = 0x65735546


def keep_apart(*kept: int) -> bool:
    """From now on the calling thread has files of its own: the standard streams, `kept`, and what it opens itself.

    What it opens is closed with the thread, and no child gets it; it is for threads that nobody shares a file with.
    False where the kernel (before Linux 5.9) or a filter has no such call: then all is as it was.
    """
    call = ctypes.CDLL(None, use_errno=True).syscall
    gaps = [(low + 1, high - 1) for low, high in itertools.pairwise((2, *sorted(kept), _LAST + 1)) if high - low > 1]
    done = [call(_CLOSE_RANGE, ctypes.c_uint(low), ctypes.c_uint(high), _UNSHARE) == 0 for low, high in gaps[::-1]]
    return all(done)


def is_on_fuse(descriptor: int) -> bool:
    """Whether an open file or folder lies on FUSE (statfs(2): the type is the first number)."""
    answer = (ctypes.c_long * 64)()
    found = ctypes.CDLL(None, use_errno=True).fstatfs(descriptor, answer) == 0
    return found and answer[0] == _FUSE_MAGIC
