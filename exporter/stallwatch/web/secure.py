"""TLS between a socket and its Connection, by the memory BIOs of `ssl`.

asyncio can do that by itself, but its handshakes are counted by nobody, its certificate is one for ever, each of
its connections takes a buffer of 256 KiB (1,000 clients were seen to take 300 MB), and closing waits for the
client.  Here each handshake takes the context that holds at its moment, and counts as a client that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

from .access import Access, names_in
from .connections import Clients, Connection
from .wire import SocketWire

_READ_BYTES = 16 << 10  # what a record holds at most


class Secure:
    """Shakes hands, then is the Wire of a Connection.

    What is wrong with a client is the client's business, and is not logged.
    """

    was_answered = False

    def __init__(self, clients: Clients, access: Access, context: ssl.SSLContext, address: str) -> None:
        self.address = address
        self._clients, self._access = clients, access
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._raw: SocketWire | None = None
        self._connection: Connection | None = None  # once hands are shaken
        self._deadline: asyncio.TimerHandle | None = None
        self._is_paused = False

    # --- called by the socket's wire

    def take(self, wire: SocketWire) -> None:
        """Begin to wait for the handshake; there is room."""
        self._raw = wire
        self._clients.wait(self)
        self._deadline = self._clients.loop.call_later(self._clients.deadlines.request, self.abort)

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        self._advance()

    def pause_writing(self) -> None:
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._raw = None
        self._end_handshake()
        if self._connection is not None:
            self._connection.connection_lost(error)

    @property
    def is_calm(self) -> bool:
        return self._connection is not None and self._connection.is_calm

    # --- called by the Connection, and by the other clients while hands are shaken

    @property
    def is_asking(self) -> bool:
        return self._raw is not None and self._raw.is_asking

    def write(self, data: bytes) -> None:
        with memoryview(data) as view:
            sent = 0
            while sent < len(view):
                sent += self._tls.write(view[sent:])
        self._flush()

    def close(self) -> None:
        """Say so and close; whether the client says so too is not waited for."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._flush()
        if self._raw is not None:
            self._raw.close()

    def abort(self) -> None:
        self._end_handshake()
        if self._raw is not None:
            self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw is None or self._raw.is_closing()

    def get_extra_info(self, name: str) -> Any:
        return None if self._raw is None else self._raw.get_extra_info(name)

    def pause_reading(self) -> None:
        self._is_paused = True
        if self._raw is not None:
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        """First what came before the pause, else a client that closed behind its requests ends before their answers."""
        if self._is_paused:
            self._is_paused = False
            self._clients.in_turn(self._advance, self.address)
        elif self._raw is not None:
            self._raw.resume_reading()

    # --- the two states

    def _advance(self) -> None:
        if self.is_closing():
            return
        try:
            if self._connection is None:
                self._shake()
            if self._connection is not None:
                self._read(self._connection)
        except ssl.SSLWantReadError:
            self._flush()
            if self._raw is not None and not self._is_paused:
                self._raw.resume_reading()
        except ssl.SSLError:
            self._flush()  # tells the client why
            if self._raw is not None:
                self._raw.close()

    def _shake(self) -> None:
        self._tls.do_handshake()
        self._flush()
        self._end_handshake()
        names = self._access.client_names
        if names and not names & names_in(self._tls.getpeercert()):
            self.abort()
            return
        self._connection = Connection(self._clients, self.address)
        self._connection.take(self)

    def _read(self, connection: Connection) -> None:
        while not self._is_paused and not self.is_closing():
            data = self._tls.read(_READ_BYTES)
            if not data:  # the client closes
                self.close()
                return
            connection.data_received(data)

    def _flush(self) -> None:
        if self._outgoing.pending and self._raw is not None:
            self._raw.write(self._outgoing.read())

    def _end_handshake(self) -> None:
        self._clients.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
