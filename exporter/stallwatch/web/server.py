"""The HTTP server: sockets, one thread with an asyncio loop, and the way to stop it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence

from .addresses import BACKLOG, ListenError, address_text, listen
from .app import App, Reload
from .connections import DEADLINES, Clients, Connection, Deadlines
from .published import Published

MAX_REQUESTS = 40  # as node_exporter
STOP_SECONDS = 1.5


def serve_http(
    published: Published,
    addresses: Sequence[str],
    *,
    telemetry_path: str = "/metrics",
    max_requests: int = MAX_REQUESTS,
    reload: Reload | None = None,
    tls: ssl.SSLContext | None = None,
    deadlines: Deadlines = DEADLINES,
) -> HttpServer:
    """Listen on every address and answer on a thread of its own until `stop` is called.

    An address is `HOST:PORT`, `[IPV6]:PORT` or `:PORT` (all of this machine's); port 0 is any free one.
    `reload` None: `/-/reload` is refused.  It runs on a thread of its own, since it may wait for a file.
    `max_requests`: answers in flight beyond which others get 503; 0 = no limit.
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
    server = HttpServer(App(published, telemetry_path, reload), sockets, max_requests, deadlines)
    server.start(sockets, tls)
    return server


class HttpServer:
    """A running server: `addresses` it is bound to, and `stop`.  Made by `serve_http`."""

    def __init__(self, app: App, sockets: Sequence[socket.socket], max_requests: int, deadlines: Deadlines) -> None:
        self.addresses: tuple[str, ...] = tuple(map(address_text, sockets))
        self._loop = asyncio.new_event_loop()
        self._clients = Clients(app, max_requests, deadlines, self._loop)
        self._listeners: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self, sockets: Iterable[socket.socket], tls: ssl.SSLContext | None) -> None:
        for each in sockets:
            listening = self._loop.create_server(
                lambda: Connection(self._clients),
                sock=each,
                ssl=tls,
                backlog=BACKLOG,
                ssl_handshake_timeout=self._clients.deadlines.request if tls else None,
            )
            self._listeners.append(self._loop.run_until_complete(listening))
        self._thread.start()

    def stop(self) -> None:
        """Close the sockets and every connection, and end the thread; returns within two seconds."""
        if self.is_running:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        """Close what listens, what is open, and what is just being accepted (or shakes hands)."""
        for listener in self._listeners:
            listener.close()
        self._clients.close()
        await _turns()
        accepting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in accepting:
            task.cancel()
        if accepting:
            await asyncio.wait(accepting, timeout=STOP_SECONDS / 2)
        await _turns()


async def _turns() -> None:
    """Lets the loop do what is due: accept, close sockets, tell their connections."""
    for _ in range(5):
        await asyncio.sleep(0)
