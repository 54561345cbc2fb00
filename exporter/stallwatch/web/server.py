"""The HTTP server: sockets, one thread with an asyncio loop, and the way to stop it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..descriptors import Shares, shares
from .access import EVERYBODY, Access
from .addresses import ListenError, address_text, listen
from .app import App, Reload
from .connections import DEADLINES, Clients, Connection, Deadlines
from .passwords import Gate
from .published import Published
from .secure import Secure
from .wire import EXHAUSTED, Door, SocketWire

MAX_REQUESTS = 40  # as node_exporter
STOP_SECONDS = 1.5
ASK_SECONDS = 20.0
"""How often HTTP has to show that it does something; each time wakes its thread."""
STUCK_LOOKS, STUCK_SECONDS = 12, 60.0
"""Looks in a row, over this time at least, at which HTTP did nothing: no busy machine is that slow, and a process that
was stopped has not looked meanwhile."""

QUIET_SECONDS = 60.0
"""How often it is said, at most, that clients cannot be accepted."""

log = logging.getLogger(__name__)


def serve_http(
    published: Published,
    addresses: Sequence[str],
    *,
    telemetry_path: str = "/metrics",
    max_requests: int = MAX_REQUESTS,
    reload: Reload | None = None,
    access: Callable[[], Access] = lambda: EVERYBODY,
    deadlines: Deadlines = DEADLINES,
    room: Shares | None = None,
) -> HttpServer:
    """Listen on every address and answer on a thread of its own until `stop` is called.

    An address is `HOST:PORT`, `[IPV6]:PORT` or `:PORT` (all of this machine's); port 0 is any free one.
    `reload` None: `/-/reload` is refused.  It runs on a thread of its own, since it may wait for a file.
    `access`: who is let in; asked for each connection and each request.
    `max_requests`: answers in flight beyond which others get 503; 0 = no limit.
    `room`: descriptors for clients; by default our share of what this process may open.
    ListenError when an address is malformed, taken or not ours; then nothing is left open.
    """
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            sockets.append(listen(address))
    except ListenError:
        for each in sockets:
            each.close()
        raise
    app = App(published, telemetry_path, reload)
    server = HttpServer(app, access, sockets, max_requests, deadlines, room or shares())
    server.start()
    return server


class HttpServer:
    """A running server: `addresses` it is bound to, and `stop`.  Made by `serve_http`."""

    def __init__(
        self,
        app: App,
        access: Callable[[], Access],
        sockets: Sequence[socket.socket],
        max_requests: int,
        deadlines: Deadlines,
        room: Shares,
    ) -> None:
        self.addresses: tuple[str, ...] = tuple(map(address_text, sockets))
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(LoopErrors())
        self._access = access
        gate = Gate(access, self._loop.call_soon_threadsafe)
        self._clients = Clients(app, gate, max_requests, deadlines, self._loop, room.connections)
        self._doors = [Door(self._loop, each, self._clients, self._welcome, room.accepted) for each in sockets]
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._asked, self._asked_at, self._looks = 0, float("-inf"), 0  # these are the looker's,
        self._answered = 0  # this the thread's own

    def start(self) -> None:
        for door in self._doors:
            door.unlock()
        self._thread.start()

    def _welcome(self, client: socket.socket, address: str) -> None:
        """Make room for a new client, and have somebody speak to it."""
        self._clients.admit()
        wire, access = SocketWire(self._loop, self._clients.turns, client, address), self._access()
        if access.tls is None:
            speaker: Connection | Secure = Connection(self._clients, address)
        else:
            speaker = Secure(self._clients, access, access.tls, address)
        speaker.take(wire)
        wire.begin(speaker)

    def stop(self) -> None:
        """Close the sockets and every connection, and end the thread; returns within two seconds."""
        if self.is_running:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def is_stuck(self, now: float) -> bool:
        """Whether HTTP did nothing for too long; `now`: monotonic seconds.  Called now and then, by one thread."""
        if self._answered == self._asked:
            if now - self._asked_at < ASK_SECONDS:
                return False
            self._asked, self._asked_at, self._looks = self._asked + 1, now, 0
            self._loop.call_soon_threadsafe(self._answer, self._asked)
        self._looks += 1
        return self._looks > STUCK_LOOKS and now - self._asked_at >= STUCK_SECONDS

    def _answer(self, number: int) -> None:
        self._answered = number

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        """Close what listens and what is open (or shakes hands)."""
        for door in self._doors:
            door.close()
        self._clients.close()
        await _turns()


class LoopErrors:
    """Errors nobody awaits.  A failed accept is said once in QUIET_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in EXHAUSTED:
            loop.default_exception_handler(dict(context))
        elif self._clock() - self._said >= QUIET_SECONDS:
            self._said = self._clock()
            log.warning("HTTP clients cannot be accepted", extra={"problem": error.strerror or str(error)})


async def _turns() -> None:
    """Lets the loop do what is due: tell connections that they are closed."""
    for _ in range(5):
        await asyncio.sleep(0)
