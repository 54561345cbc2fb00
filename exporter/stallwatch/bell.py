"""Wakes a thread that waits; may be rung by a signal handler."""

from __future__ import annotations

import queue
from contextlib import suppress


class Bell:
    """One thread waits, any may ring.

    threading.Event is not for this: its lock is not reentrant, so that a handler that runs while its own thread
    goes into `wait`, or comes out, waits for itself for ever.  SimpleQueue.put may be called at any point.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        self._rings.put(None)

    @property
    def is_rung(self) -> bool:
        """Whether it was rung since the last `wait`."""
        return not self._rings.empty()

    def wait(self, seconds: float) -> None:
        """Until it is rung, or `seconds` are over.  However often it was rung before, it is quiet afterwards."""
        with suppress(queue.Empty):
            self._rings.get(timeout=seconds)
            for _ in range(self._rings.qsize()):
                self._rings.get_nowait()
