"""How the files that this process may have open are shared out, so that some are left whatever the node runs.

Each share is held by its owner alone.  What is in no share is for the rest: logs, probes, single reads.
"""

from __future__ import annotations

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
