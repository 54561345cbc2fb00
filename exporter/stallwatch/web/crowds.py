"""The open connections by whom they come from: who goes when there is room for no more, and whose turn it is.

An address is a client: IPv4 in full; of IPv6 the first half, for the other is its owner's to choose.  Whoever opens
many connections, or sends much on each, takes room and turns from himself, and from no scraper that has an address of
its own.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

Act = Callable[[], None]

_MAPPED = "::ffff:"  # IPv4 on a socket that takes both


class Client(Protocol):
    """What holds a socket: a Connection, or one that is still in its handshake."""

    address: str

    @property
    def was_answered(self) -> bool: ...
    @property
    def is_asking(self) -> bool:
        """Whether bytes of it are here that nobody has looked at yet."""

    def abort(self) -> None: ...


class Crowds:
    """Every open connection waits for a request, or is being answered."""

    def __init__(self) -> None:
        self._waiting: dict[Client, None] = {}  # the longest waiting first
        self._answering: set[Client] = set()
        self._of_address: Counter[str] = Counter()
        self._kinds: dict[Client, tuple[str, bool]] = {}
        self._of_kind: Counter[tuple[str, bool]] = Counter()  # address, whether it was ever answered

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def answering(self) -> int:
        return len(self._answering)

    def everybody(self) -> tuple[Client, ...]:
        return tuple(self._kinds)

    def wait(self, client: Client) -> None:
        self._enter(client)
        self._waiting[client] = None

    def answer(self, client: Client) -> None:
        self._enter(client)
        self._answering.add(client)

    def _enter(self, client: Client) -> None:
        self.leave(client)
        kind = (client.address, client.was_answered)
        self._kinds[client] = kind
        self._of_kind[kind] += 1
        self._of_address[client.address] += 1

    def leave(self, client: Client) -> None:
        kind = self._kinds.pop(client, None)
        if kind is None:
            return
        self._waiting.pop(client, None)
        self._answering.discard(client)
        self._of_kind[kind] -= 1
        self._of_address[kind[0]] -= 1
        if not self._of_address[kind[0]]:  # addresses without number may come and go
            del self._of_address[kind[0]], self._of_kind[kind]
            self._of_kind.pop((kind[0], not kind[1]), None)

    def victim(self) -> Client | None:
        """Who goes for a new one: of the address with most connections the one that has waited longest.

        Of those never answered, if they are most of that address, else of those that were: half requests without
        number put out no scraper that keeps its connection, and the other way round.  Nobody whose bytes are here
        goes.  None when nobody of them only waits: no other is put out in their place, for they soon do.
        """
        most = max(self._of_address.values(), default=0)
        for client in self._waiting:
            is_of_most = self._of_address[client.address] == most and self._of_kind[self._kinds[client]] * 2 >= most
            if is_of_most and not client.is_asking:
                return client
        return None


class Turns:
    """One act between two looks at all clients, so that a thousand that are due delay nobody's.

    Addresses take turns; of one address who came first.  Before all go those that are calm: a scraper that keeps its
    connection asks after a pause, and those that wear a server down do not.
    """

    def __init__(self, later: Callable[[Act], object]) -> None:
        """`later` has something called after the next look (`call_soon`)."""
        self._later = later
        self._calm: dict[str, deque[Act]] = {}  # whose turn is next stands first
        self._others: dict[str, deque[Act]] = {}

    def put(self, act: Act, address: str = "", is_calm: bool = False) -> None:
        is_first = not self._calm and not self._others
        (self._calm if is_calm else self._others).setdefault(address, deque()).append(act)
        if is_first:
            self._later(self._next)

    def _next(self) -> None:
        queues = self._calm or self._others
        address = next(iter(queues))
        acts = queues.pop(address)
        act = acts.popleft()
        if acts:
            queues[address] = acts  # behind all others
        if self._calm or self._others:
            self._later(self._next)
        act()


def address_of(place: tuple[str | int, ...]) -> str:
    """Whom the other end of a connection counts as; `place` is as `accept` tells it."""
    host = str(place[0]).partition("%")[0]
    if host.startswith(_MAPPED) and "." in host:
        return host.removeprefix(_MAPPED)
    return socket.inet_pton(socket.AF_INET6, host)[:8].hex() if ":" in host else host
