"""A GET that cannot be led astray: no redirects, proxies or cookies, bounded bytes, one deadline for all.

Only literal addresses are connected to; names (of configured targets alone) are looked up beside the
conversation, because a resolver may block for longer than any deadline.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from .. import __version__
from .connections import (
    READ,
    WRITE,
    ProtocolError,
    SocketAddress,
    Talk,
    connect,
    is_literal,
    run_together,
)

T = TypeVar("T")

BODY_LIMIT_BYTES = 1 << 20
HEAD_LIMIT_BYTES = 32 << 10
_CHUNK_LINE_LIMIT_BYTES = 1 << 10
_RECEIVE_BYTES = 64 << 10

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: [^\r\n]*)?\r?\n")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?")


@dataclass(frozen=True, slots=True)
class Request:
    """One GET.  `take` gets the body as it comes; without it the body is read and dropped."""

    addresses: tuple[str, ...]  # literal; the first that accepts is asked
    port: int
    host: str  # for the Host header, with the port where one is given
    path: str
    tls: ssl.SSLContext | None = None
    server_name: str = ""  # the name the certificate must carry
    bearer: str = field(default="", repr=False)
    take: Callable[[bytes], None] | None = None

    def head(self) -> bytes:
        """The request as it is sent."""
        lines = [
            f"GET {self.path} HTTP/1.1",
            f"Host: {self.host}",
            f"User-Agent: stallwatch/{__version__}",
            "Accept: */*",
            "Accept-Encoding: identity",
            "Connection: close",
        ]
        if self.bearer:
            lines.append(f"Authorization: Bearer {self.bearer}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back within the deadline.  `status` None = no answer, see `reason`.

    `reason`: `timeout` (the answer was not complete at the deadline), `refused` (nobody listens), `error`
    (closed, reset, no HTTP, TLS refused).  `complete` False: the body was cut at BODY_LIMIT_BYTES, ended
    early, or is encoded in a way that was not asked for.
    """

    status: int | None
    seconds: float
    complete: bool = False
    reason: str | None = None


class Reply:
    """Takes the bytes of one HTTP/1.x response as they come, in whatever pieces.

    ProtocolError when they are none.  Holds at most one head or one piece in memory.
    """

    def __init__(self, take: Callable[[bytes], None] | None = None) -> None:
        self.status: int | None = None
        self.finished = False
        self.complete = False
        self._take = take
        self._buffer = bytearray()
        self._received = 0
        self._expected = 0  # bytes of the body, or of the chunk, still to come
        self._encoded = False
        self._step: Callable[[], bool] = self._head

    def feed(self, data: bytes) -> bool:
        """True when no more bytes are wanted."""
        self._received += len(data)
        self._buffer += data
        while not self.finished and self._step():
            pass
        if self._received > BODY_LIMIT_BYTES + HEAD_LIMIT_BYTES:
            self.finished = True
        return self.finished

    def end(self) -> None:
        """The peer closed the connection."""
        if self.status is None:
            raise ProtocolError("closed without an answer")
        self.complete = self.complete or (self._step == self._until_closed and not self._encoded)
        self.finished = True

    def _finish(self) -> bool:
        self.finished, self.complete = True, not self._encoded
        return False

    def _head(self) -> bool:
        if not self._buffer.startswith(b"HTTP/"[: len(self._buffer)]):
            raise ProtocolError("no HTTP")
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_LIMIT_BYTES:
                raise ProtocolError("endless header")
            return False
        head = bytes(self._buffer[: end + 2])
        del self._buffer[: end + 4]
        first = _STATUS_LINE.match(head)
        if first is None:
            raise ProtocolError("no status line")
        status = int(first[1])
        if status >= 200:  # what comes before is interim
            self.status = status
            self._enter_body(_headers(head[first.end() :]))
        return not self.finished

    def _enter_body(self, headers: Mapping[bytes, bytes]) -> None:
        self._encoded = headers.get(b"content-encoding", b"identity").lower() != b"identity"
        length = headers.get(b"content-length")
        if self.status in (204, 304):
            self._finish()
        elif headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._step = self._chunk_size
        elif length is None:
            self._step = self._until_closed
        elif not re.fullmatch(rb"\d{1,18}", length):
            raise ProtocolError("no content length")
        else:
            self._expected, self._step = int(length), self._counted

    def _pass_on(self, count: int) -> None:
        if self._take is not None and count:
            self._take(bytes(self._buffer[:count]))
        del self._buffer[:count]

    def _until_closed(self) -> bool:
        self._pass_on(len(self._buffer))
        return False

    def _pass_expected(self) -> bool:
        """Pass on what came of the expected bytes; True when all came."""
        count = min(self._expected, len(self._buffer))
        self._pass_on(count)
        self._expected -= count
        return self._expected == 0

    def _counted(self) -> bool:
        return self._finish() if self._pass_expected() else False

    def _chunk_size(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > _CHUNK_LINE_LIMIT_BYTES:
                raise ProtocolError("endless chunk line")
            return False
        size = _CHUNK_LINE.fullmatch(bytes(self._buffer[:end]))
        if size is None:
            raise ProtocolError("no chunk size")
        del self._buffer[: end + 2]
        self._expected = int(size[1], 16)
        if self._expected == 0:
            return self._finish()
        self._step = self._chunk
        return True

    def _chunk(self) -> bool:
        if not self._pass_expected() or len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise ProtocolError("chunk longer than it says")
        del self._buffer[:2]
        self._step = self._chunk_size
        return True


def _headers(lines: bytes) -> dict[bytes, bytes]:
    """Names in lower case; of a repeated one the last counts."""
    pairs = (line.partition(b":") for line in lines.split(b"\r\n"))
    return {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}


def fetch_all(requests: Sequence[Request], seconds: float) -> list[Answer]:
    """Send all requests at once and wait at most `seconds` for all answers together, in their order."""
    outcomes = run_together([_fetch(request) for request in requests], seconds)
    answers = []
    for outcome in outcomes:
        if outcome.value is not None:
            answers.append(Answer(outcome.value.status, outcome.seconds, outcome.value.complete))
        elif outcome.error is None or isinstance(outcome.error, TimeoutError):
            answers.append(Answer(None, outcome.seconds, reason="timeout"))
        else:
            refused = isinstance(outcome.error, ConnectionRefusedError)
            answers.append(Answer(None, outcome.seconds, reason="refused" if refused else "error"))
    return answers


def _fetch(request: Request) -> Talk[Reply]:
    sock = yield from connect([SocketAddress(address, request.port) for address in request.addresses])
    try:
        if request.tls is not None:
            sock = secured = _wrap(sock, request.tls, request.server_name)
            yield from _until_done(sock, secured.do_handshake, WRITE)
        unsent = request.head()
        while unsent:
            sent = yield from _until_done(sock, partial(sock.send, unsent), WRITE)
            unsent = unsent[sent:]
        reply = Reply(request.take)
        while not reply.finished:
            data = yield from _until_done(sock, partial(sock.recv, _RECEIVE_BYTES), READ)
            if data:
                reply.feed(data)
            else:
                reply.end()
        return reply
    finally:
        sock.close()


def _wrap(sock: socket.socket, tls: ssl.SSLContext, server_name: str) -> ssl.SSLSocket:
    try:
        return tls.wrap_socket(sock, server_hostname=server_name, do_handshake_on_connect=False)
    except ValueError:
        raise ProtocolError("no name a certificate could carry") from None


def _until_done(sock: socket.socket, action: Callable[[], T], events: int) -> Talk[T]:
    """Repeat a non-blocking action until it neither would block nor needs TLS to go on first."""
    while True:
        try:
            return action()
        except ssl.SSLWantReadError:
            yield sock, READ
        except ssl.SSLWantWriteError:
            yield sock, WRITE
        except BlockingIOError:
            yield sock, events


def ask_resolver(host: str) -> list[str]:
    """The system's answer for a host name; may block for many seconds."""
    return [str(answer[4][0]) for answer in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


class Names:
    """Addresses of host names: looked up in one thread per name, at most one at a time for each.

    A look-up that hangs costs its thread and nothing else; the last addresses found stand until it ends.
    """

    def __init__(self, ask: Callable[[str], Iterable[str]] = ask_resolver) -> None:
        self._ask = ask
        self._found: dict[str, tuple[str, ...]] = {"localhost": ("127.0.0.1", "::1")}
        self._running: dict[str, threading.Thread] = {}

    def look_up(self, hosts: Iterable[str], seconds: float) -> Mapping[str, tuple[str, ...]]:
        """Addresses by host; a host of which nothing is known after `seconds` (for all) is left out."""
        wanted = set(hosts)
        literals = {host: (host,) for host in wanted if is_literal(host)}
        asked = [self._start(host) for host in wanted if host not in literals and host != "localhost"]
        deadline = time.monotonic() + seconds
        for thread in filter(None, asked):
            thread.join(max(0.0, deadline - time.monotonic()))
        return literals | {host: self._found[host] for host in wanted if host in self._found}

    def keep(self, hosts: Collection[str]) -> None:
        """Forget all others, but for whom a look-up is running."""
        running = {host for host, thread in list(self._running.items()) if thread.is_alive()}
        for known in (self._found, self._running):
            for host in tuple(known):  # a look-up that ends now adds one
                if host not in hosts and host not in running and host != "localhost":
                    del known[host]

    def _start(self, host: str) -> threading.Thread | None:
        """None while a limit of processes allows no thread: what was found before stands."""
        running = self._running.get(host)
        if running is None or not running.is_alive():
            running = threading.Thread(target=self._look_up, args=(host,), name="look-up", daemon=True)
            try:
                running.start()
            except RuntimeError:
                return None
            self._running[host] = running
        return running

    def _look_up(self, host: str) -> None:
        try:
            self._found[host] = tuple(dict.fromkeys(self._ask(host)))
        except (OSError, ValueError):
            return  # no such name, or not now: what was found before stands
