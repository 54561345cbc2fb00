"""A client that has connected and shakes hands: counts as one that waits, like all who have asked for nothing yet.

asyncio can do that by itself, but then connections in a handshake are counted by nobody, and a certificate is
one for ever.  Here each handshake takes the context that holds at its moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import cast

from .access import Access, names_in
from .connections import Clients, Connection


class Handshake(asyncio.Protocol):
    """Becomes a Connection, or is closed: after the deadline for a request, or when room is needed."""

    def __init__(self, clients: Clients, access: Access, context: ssl.SSLContext) -> None:
        self._clients, self._access, self._context = clients, access, context
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()
        if not self._clients.admit():
            self._transport.abort()
            return
        self._clients.wait(self)
        self._task = self._clients.loop.create_task(self._shake(self._transport))

    def abort(self) -> None:
        """Close at once."""
        self._clients.leave(self)
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()

    async def _shake(self, transport: asyncio.Transport) -> None:
        """What is wrong with a client's handshake is the client's business: nothing is logged."""
        connection = Connection(self._clients)
        secure: asyncio.Transport | None = None
        try:
            with contextlib.suppress(OSError):  # also TimeoutError and all of ssl
                secure = await self._clients.loop.start_tls(
                    transport,
                    connection,
                    self._context,
                    server_side=True,
                    ssl_handshake_timeout=self._clients.deadlines.request,
                    ssl_shutdown_timeout=self._clients.deadlines.request,
                )
        finally:
            self._clients.leave(self)
            if secure is None:
                transport.abort()
        if secure is None or secure.is_closing():
            return
        names = self._access.client_names
        if names and not names & names_in(secure.get_extra_info("peercert")):
            secure.abort()
        else:
            connection.connection_made(secure)
