"""Tells systemd that the tick goes on, and ends the process when it does not.

Only the tick beats: a thread that is well says nothing about another one that is stuck.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, MutableMapping
from contextlib import suppress

STUCK_STATUS = 70
"""Exit status of a process whose tick is stuck (EX_SOFTWARE of sysexits.h)."""

LOOKS_UNTIL_STUCK = 12
SHORTEST_LOOK_SECONDS = 5.0
"""A look is one tick, and not shorter than this: a loaded machine may be slow, and is not stuck."""

LAST_WORDS_SECONDS = 1.0

log = logging.getLogger(__name__)


class Notifier:
    """The service manager's socket (sd_notify(3)); says nothing where there is none, and never waits for it."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Takes NOTIFY_SOCKET out of `environ`, so that no child speaks for us."""
        self._socket: socket.socket | None = None
        place = environ.pop("NOTIFY_SOCKET", "")
        if place[:1] not in ("/", "@"):
            return
        address = "\0" + place[1:] if place[0] == "@" else place  # @: an abstract socket
        speaking = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        speaking.setblocking(False)
        try:
            speaking.connect(address)
        except OSError as error:
            speaking.close()
            log.warning("the service manager cannot be told of us", extra={"problem": error.strerror or str(error)})
            return
        self._socket = speaking

    def say(self, *facts: str) -> None:
        """`READY=1`, `WATCHDOG=1` …; lost when the manager does not read them."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send("\n".join(facts).encode())

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Heartbeat:
    """`beat` is called by every tick.  Without one for LOOKS_UNTIL_STUCK looks `end` is called.

    Looks are counted, not seconds: a process that was stopped for ten minutes has not looked meanwhile.
    """

    def __init__(
        self,
        notifier: Notifier,
        tick_seconds: Callable[[], float],
        end: Callable[[], None] | None = None,
        shortest_look: float = SHORTEST_LOOK_SECONDS,
    ) -> None:
        self._notifier, self._tick_seconds, self._shortest_look = notifier, tick_seconds, shortest_look
        self._end = end or end_stuck
        self._beats = 0
        self._seen = 0
        self._looks = 0
        self._stopping = threading.Event()

    def beat(self) -> None:
        first, self._beats = self._beats == 0, self._beats + 1
        self._notifier.say(*(("READY=1",) if first else ()), "WATCHDOG=1")

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """The ticks end because they were told to."""
        self._stopping.set()
        self._notifier.say("STOPPING=1")
        self._notifier.close()

    def look(self) -> bool:
        """True when there was no tick for too many looks."""
        beats = self._beats
        self._looks = self._looks + 1 if beats == self._seen else 0
        self._seen = beats
        return self._looks >= LOOKS_UNTIL_STUCK

    def _run(self) -> None:
        while not self._stopping.wait(max(self._tick_seconds(), self._shortest_look)):
            if self.look():
                self._end()
                return


def end_stuck() -> None:
    """End this process, whatever its threads hold: the log's lock or a full pipe must not keep it alive."""
    saying = threading.Thread(target=_last_words, name="last-words", daemon=True)
    with suppress(RuntimeError):  # a limit of processes: then without a word
        saying.start()
        saying.join(LAST_WORDS_SECONDS)
    os._exit(STUCK_STATUS)


def _last_words() -> None:
    """Where each thread is: names of functions and of our files."""
    log.error("the tick is stuck: ending")
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
