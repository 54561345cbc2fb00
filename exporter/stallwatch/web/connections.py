"""The open connections: h11 parses, asyncio moves the bytes, and nothing waits for a client.

A connection is in one of two states, and each has its deadline (Deadlines): it waits for a request, or it is
being answered, until the client has taken the whole answer.  When `most` are open, one of the largest crowd is closed
for a new one (Crowds), so that clients who never finish a request keep no honest one out.  When too many answers are in
flight, one that the kernel takes at once is given all the same, for it never is; for another the one that has lain
untaken for longest is given up.  So clients who never take an answer keep no honest one out either.  What a client
sent is looked at when it is its turn (Turns).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import socket
import struct
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import h11

from .app import App, Request, Response, Slow, plain
from .crowds import Act, Client, Crowds, Turns
from .passwords import Doubt, Gate, Settled

_MAX_HEAD_BYTES = 16 << 10
_MAX_BODY_BYTES = 64 << 10
_MOST_ANSWER_HEAD_BYTES = 2 << 10
_SHARED_BYTES = 32 << 10  # a shorter body is sent in one call with its head
_MOST_PIECES = 64  # of a body, before others have their turn

ALWAYS_ANSWERED = frozenset({"/-/healthy", "/-/ready", "/-/reload"})
"""Paths that are answered even when too many requests are in flight."""

INTERNAL_ERROR = plain(500, "internal error")
NO_REQUEST = Request("", "")
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a client may take; seconds."""

    request: float = 5.0  # from connecting, or from the first byte of a later request, to its last byte
    keep_alive: float = 120.0  # between requests: Prometheus keeps its connection between scrapes
    answer: float = 10.0  # to take the answer: the usual scrape_timeout
    untaken: float = 0.1  # the same, where others wait for its place: a scrape over a LAN takes a tenth of that


DEADLINES = Deadlines()

CALM_SECONDS = 1.0
"""Who asks again after so long on the same connection is looked at first: who wears a server down does not wait."""


class Wire(Protocol):
    """What a Connection needs of a socket (wire.SocketWire), or of TLS upon one."""

    address: str

    @property
    def is_asking(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...
    def get_extra_info(self, name: str) -> Any: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Clients:
    """The open connections, and the limits they share."""

    def __init__(
        self, app: App, gate: Gate, max_requests: int, deadlines: Deadlines, loop: asyncio.AbstractEventLoop, most: int
    ) -> None:
        self.loop = loop
        self._most = most
        self.deadlines = deadlines
        self._app = app
        self._gate = gate
        self._max_requests = max_requests
        self._crowds = Crowds()
        self._victim: Client | None = None  # who goes for the client that is just coming in
        self.turns = Turns(loop.call_soon)
        self._untaken: dict[Client, float] = {}  # since when (loop time) the written answer lies there, oldest first
        self._slow = threading.Lock()
        self._is_closed = False

    def has_room(self) -> bool:
        """Whether one more may come in, if need be in another's place (`admit`); not after `close`."""
        if self._is_closed:
            return False
        is_full = len(self._crowds) >= self._most
        self._victim = self._crowds.victim() or self._slowest() if is_full else None
        return not is_full or self._victim is not None

    def admit(self) -> None:
        """Make the room that there was a moment ago, for a new connection."""
        if self._victim is not None:
            self._victim.abort()
            self._victim = None

    def _slowest(self) -> Client | None:
        """Whose answer has lain untaken for longest; None when nobody's has for long enough."""
        slowest, since = next(iter(self._untaken.items()), (None, 0.0))
        return None if self.loop.time() - since < self.deadlines.untaken else slowest

    def wait(self, connection: Client) -> None:
        self._untaken.pop(connection, None)
        self._crowds.wait(connection)

    def leave(self, connection: Client) -> None:
        self._crowds.leave(connection)
        self._untaken.pop(connection, None)

    def close(self) -> None:
        """Close every connection, and from now on each new one."""
        self._is_closed = True
        for connection in self._crowds.everybody():
            connection.abort()

    def begin(self, connection: Client) -> None:
        self._untaken.pop(connection, None)
        self._crowds.answer(connection)

    def lies(self, connection: Client) -> None:
        """Its whole answer is written, and not yet taken."""
        self._untaken[connection] = self.loop.time()

    def answer(self, request: Request, takes: Callable[[int], bool]) -> Response | Slow | Doubt:
        """The app's answer, 503 if it is one more than may be in flight, 401, or a password to check.

        `takes`: whether the client's connection takes so many bytes at once; then they are not in flight.  Nor are
        those whose password is being checked: guesses must not use up what honest clients need.
        """
        judged = self._gate.judge(request)
        answer = self._app.answer(request) if judged is None else judged
        if request.path in ALWAYS_ANSWERED or not self._is_crowded():
            return answer
        if isinstance(answer, Response) and takes(len(answer.body)):
            return answer
        if (slowest := self._slowest()) is not None:
            slowest.abort()
            return answer
        return plain(503, f"more than {self._max_requests} requests in flight")

    def _is_crowded(self) -> bool:
        return 0 < self._max_requests < self._crowds.answering - self._gate.waiting

    def in_turn(self, advance: Act, address: str = "") -> None:
        """Look at a request that was sent ahead, when it is its turn: one of all clients between two looks at all.

        Those who send many at once then wait for each other, and nobody else for them.
        """
        self.turns.put(advance, address)

    def settle(self, doubt: Doubt, settled: Settled, address: str) -> None:
        self._gate.settle(doubt, settled, address)

    def dressed(self, headers: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return self._gate.dressed(headers)

    def run_slow(self, make: Slow, done: Callable[[Response], None]) -> None:
        """Run `make` on a thread of its own, one at a time; `done` is called with its answer on this loop."""
        if not self._slow.acquire(blocking=False):
            done(plain(503, "the one before has not finished"))
            return
        try:
            threading.Thread(target=self._work, args=(make, done), name="http-slow", daemon=True).start()
        except RuntimeError:  # a limit of processes
            self._slow.release()
            done(plain(503, "no thread can be started for it"))

    def _work(self, make: Slow, done: Callable[[Response], None]) -> None:
        response = INTERNAL_ERROR
        try:
            response = make()
        finally:
            self._slow.release()
            with contextlib.suppress(RuntimeError):  # the server was stopped meanwhile: its loop is closed
                self.loop.call_soon_threadsafe(done, response)


class Connection:
    """One client: waits for a request, answers it, and waits again."""

    def __init__(self, clients: Clients, address: str) -> None:
        self.address = address
        self.was_answered = False
        self._clients = clients
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._request = NO_REQUEST
        self._body_bytes = 0
        self._idle = False  # answered before, and no byte of the next request has come
        self._idle_since = 0.0  # loop time
        self._answered = False  # the answer is written, though perhaps not yet taken
        self._undrained = False  # what is written has not been taken yet
        self._transport: Wire | None = None
        self._deadline: asyncio.TimerHandle | None = None

    # --- called by the wire

    def take(self, wire: Wire) -> None:
        """Begin to wait for requests on it; there is room."""
        self._transport = wire
        self._wait(self._clients.deadlines.request)

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._idle = False
            self._set_deadline(self._clients.deadlines.request)
        self._http.receive_data(data)
        self._advance()

    def pause_writing(self) -> None:
        self._undrained = True

    def resume_writing(self) -> None:
        self._undrained = False
        if self._answered:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._clients.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()

    @property
    def is_calm(self) -> bool:
        return self._idle and self._clients.loop.time() - self._idle_since >= CALM_SECONDS

    # --- called by the other connections and by the timer

    @property
    def is_asking(self) -> bool:
        return self._transport is not None and self._transport.is_asking

    def abort(self) -> None:
        """Close at once, whatever is unsent."""
        self._clients.leave(self)
        if self._transport is not None:
            self._transport.abort()

    # --- the two states

    def _wait(self, seconds: float) -> None:
        self._clients.wait(self)
        self._set_deadline(seconds)

    def _set_deadline(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._clients.loop.call_later(seconds, self.abort)

    def _advance(self) -> None:
        """Take what has come up to the end of a request, and answer that one."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            for _ in range(_MOST_PIECES):
                event = self._http.next_event()
                if event in (h11.NEED_DATA, h11.PAUSED):
                    self._transport.resume_reading()
                    return
                if isinstance(event, h11.EndOfMessage):
                    self._answer()
                    return
                if not self._take(event):
                    return
        except h11.RemoteProtocolError as error:
            self._refuse(plain(error.error_status_hint, "this is no HTTP request"))
            return
        self._transport.pause_reading()
        self._clients.in_turn(self._advance, self.address)

    def _take(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> bool:
        """A part of a request; False if the connection ends with it."""
        if isinstance(event, h11.Request):
            self._request, self._body_bytes = _request(event), 0
            if refusal := _refusal(event):
                self._refuse(refusal)
                return False
        elif isinstance(event, h11.Data):
            self._body_bytes += len(event.data)
        if isinstance(event, h11.ConnectionClosed):
            self.abort()
        elif self._body_bytes > _MAX_BODY_BYTES:
            self._refuse(plain(413, "the body is too long"))
        elif self._http.they_are_waiting_for_100_continue:
            self._refuse(plain(417, "send the request without Expect"))
        else:
            return True
        return False

    def _answer(self) -> None:
        self._begin()
        self._respond()

    def _respond(self) -> None:
        """A bug in making the answer is not caught here: the client gets 500, asyncio logs it."""
        answer: Response | Slow | Doubt = INTERNAL_ERROR
        try:
            answer = self._clients.answer(self._request, self._takes)
        finally:
            if isinstance(answer, Response):
                self._send(answer)
            elif isinstance(answer, Doubt):
                self._clients.settle(answer, self._settled, self.address)
            else:
                self._clients.run_slow(answer, self._send)

    def _takes(self, size: int) -> bool:
        wire = None if self._undrained else self._transport
        return wire is not None and takes_at_once(wire.get_extra_info("socket"), size)

    def _settled(self, refusal: Response | None) -> None:
        """The password was checked; a right one is known now, so that the question is asked once more."""
        if refusal is not None:
            self._send(refusal)
        elif self._transport is not None and not self._transport.is_closing():
            self._respond()

    def _begin(self) -> None:
        """Nothing more is read until the answer is gone: what a client sends ahead must not pile up."""
        self._clients.begin(self)
        self._set_deadline(self._clients.deadlines.answer)
        if self._transport is not None:
            self._transport.pause_reading()

    def _refuse(self, response: Response) -> None:
        """Answer what cannot be understood, and close."""
        self._begin()
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            closing = replace(response, headers=(*response.headers, ("Connection", "close")))
            self._send(closing)
        else:
            self.abort()

    def _send(self, response: Response) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        for part in self._parts(response):
            self._transport.write(part)
        self._answered = True
        if self._undrained:
            self._clients.lies(self)
        else:
            self._finish()

    def _parts(self, response: Response) -> list[bytes]:
        """Bytes to be sent; a long body as it is, of which all who have not taken it share one."""
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *self._clients.dressed(response.headers),
        ]
        head = h11.Response(status_code=response.status, headers=headers, reason=_PHRASES[response.status])
        parts = [self._http.send(head)]
        if self._request.method != "HEAD":
            parts.append(self._http.send(h11.Data(data=response.body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        sent = [part for part in parts if part]
        return sent if len(response.body) > _SHARED_BYTES else [b"".join(sent)]

    def _finish(self) -> None:
        """The client has the answer: wait for its next request, unless one of us wants to close."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._transport.close()
            return
        self._http.start_next_cycle()
        self._request, self._answered, self.was_answered = NO_REQUEST, False, True
        self._idle, self._idle_since = not self._http.trailing_data[0], self._clients.loop.time()
        deadlines = self._clients.deadlines
        self._wait(deadlines.keep_alive if self._idle else deadlines.request)
        if self._idle:
            self._clients.loop.call_soon(self._advance)
        else:
            self._clients.in_turn(self._advance, self.address)


def _refusal(event: h11.Request) -> Response | None:
    """What h11 understands, and others may understand in another way (RFC 9112, 2.3 and 6.1)."""
    if not event.http_version.startswith(b"1."):
        return plain(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    names = {name for name, _ in event.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or event.http_version == b"1.0"):
        return plain(400, "where the request ends can be read in two ways")
    return None


def takes_at_once(client: socket.socket | None, size: int) -> bool:
    """Whether the kernel surely keeps so many bytes for a client, beside what it has not sent yet.

    Half of what the buffer is said to hold: the rest is what the kernel reckons for keeping it.
    """
    if client is None:
        return False
    room = client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
    (unsent,) = struct.unpack("i", fcntl.ioctl(client.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    return bool(unsent + size + _MOST_ANSWER_HEAD_BYTES <= room)


def _request(event: h11.Request) -> Request:
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    target = re.sub("^https?://[^/?]*", "", event.target.decode("latin-1"))  # the form proxies use
    return Request(event.method.decode("latin-1"), unquote(target.partition("?")[0]) or "/", headers)
