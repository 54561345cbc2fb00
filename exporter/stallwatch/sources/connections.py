"""Many non-blocking conversations in one thread, all under one deadline.

A conversation is a generator that yields the socket it waits for and returns its result; whoever stops
waiting closes the generator, and the generator closes its socket.  Nothing is left behind by a peer that
never answers.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

Talk = Generator[tuple[socket.socket, int], None, T]
"""Yields (socket, READ or WRITE) whenever it has to wait, returns its result."""

CONNECT_RESULTS = ("ok", "refused", "timeout", "reset", "unreachable", "error")

_RESULT_OF_ERRNO = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timeout",
    errno.ECONNRESET: "reset",
    errno.ENETUNREACH: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETDOWN: "unreachable",
    errno.EHOSTDOWN: "unreachable",
    errno.EADDRNOTAVAIL: "unreachable",
    errno.EAFNOSUPPORT: "unreachable",
}


class ProtocolError(ValueError):
    """The peer does not speak what was agreed."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How a conversation ended after `seconds`: a value, an error, or (both None) the deadline."""

    value: T | None
    error: OSError | ProtocolError | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """A literal IPv4 or IPv6 address with its port."""

    address: str
    port: int

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


def is_literal(host: str) -> bool:
    """Whether `host` is an address that needs no look-up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def run_together(
    talks: Sequence[Talk[T]], seconds: float, clock: Callable[[], float] = time.monotonic
) -> list[Outcome[T]]:
    """Run all conversations at once for at most `seconds`; one outcome for each, in their order."""
    start = clock()
    outcomes: list[Outcome[T]] = [Outcome(None, None, seconds) for _ in talks]
    with selectors.DefaultSelector() as selector:
        try:
            for number in range(len(talks)):
                _advance(talks, number, outcomes, selector, start, clock)
            while selector.get_map() and (left := start + seconds - clock()) > 0:
                for key, _ in selector.select(left):
                    selector.unregister(key.fileobj)
                    _advance(talks, key.data, outcomes, selector, start, clock)
        finally:
            for talk in talks:
                talk.close()
    return outcomes


def _advance(
    talks: Sequence[Talk[T]],
    number: int,
    outcomes: list[Outcome[T]],
    selector: selectors.BaseSelector,
    start: float,
    clock: Callable[[], float],
) -> None:
    """Let one conversation go on until it waits again or ends."""
    try:
        waits_for, events = next(talks[number])
    except StopIteration as end:
        outcomes[number] = Outcome(end.value, None, clock() - start)
    except (OSError, ProtocolError) as error:
        outcomes[number] = Outcome(None, error, clock() - start)
    else:
        selector.register(waits_for, events, number)


def connect(addresses: Sequence[SocketAddress]) -> Talk[socket.socket]:
    """Connect to the first address that accepts; OSError of the last one when none does."""
    failure = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for target in addresses:
        connected = False
        sock = socket.socket(target.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            yield from connect_socket(sock, target)
            connected = True
            return sock
        except OSError as error:
            failure = error
        finally:
            if not connected:
                sock.close()
    raise failure


def connect_socket(sock: socket.socket, target: SocketAddress) -> Talk[None]:
    """Connect a non-blocking socket; OSError when that fails."""
    code = sock.connect_ex((target.address, target.port))
    if code == errno.EINPROGRESS:
        yield sock, WRITE
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code == 0 and sock.getsockname() == sock.getpeername():
        # The kernel gave us the very port we asked for: we talk to ourselves, and nobody listens.  Reset, so
        # that no TIME_WAIT keeps the server from its port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        code = errno.ECONNREFUSED
    if code:
        raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A TCP connect to try; `is_theirs` gets our own end of the connection while it stands."""

    target: SocketAddress
    is_theirs: Callable[[SocketAddress], bool] | None = None


STRANGER = "stranger"
"""Connected, but `is_theirs` said that somebody else answered."""


def connect_all(attempts: Sequence[Attempt], seconds: float) -> list[str]:
    """Try every connect at once for at most `seconds`: one of CONNECT_RESULTS or STRANGER for each."""
    outcomes = run_together([_try(attempt) for attempt in attempts], seconds)
    return [_result(outcome) for outcome in outcomes]


def _try(attempt: Attempt) -> Talk[str]:
    sock = yield from connect((attempt.target,))
    with sock:
        address, port = sock.getsockname()[:2]
        if attempt.is_theirs is None or attempt.is_theirs(SocketAddress(address, port)):
            return "ok"
        return STRANGER


def _result(outcome: Outcome[str]) -> str:
    if outcome.value is not None:
        return outcome.value
    if outcome.error is None:
        return "timeout"
    code = outcome.error.errno if isinstance(outcome.error, OSError) else None
    return _RESULT_OF_ERRNO.get(code or 0, "error")
