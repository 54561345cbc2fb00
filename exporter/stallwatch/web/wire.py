"""A client's socket: bytes in at its turn, bytes out as they are taken.  And the door where clients come in.

asyncio has both, and each new client costs it four looks at all the others and a buffer of 256 KiB for each read.
Here a client is taken in with one call, what it has sent is read with the next, and waits for its turn.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from .crowds import Turns, address_of

READ_BYTES = 16 << 10
"""At most these of each client wait for a turn: a record of TLS, or more than a head may have."""

FULL_SECONDS = 0.002
EXHAUSTED_SECONDS = 1.0
"""Until it is tried again to take a client in: when all places are taken; when the system gives no socket."""

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Taker(Protocol):
    """Who is told of what comes.  `connection_lost` is called last, once, from the loop."""

    def data_received(self, data: bytes) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def connection_lost(self, error: Exception | None) -> None: ...
    @property
    def is_calm(self) -> bool:
        """Whether what it sends goes before what others send (Turns)."""


class SocketWire:
    """The Wire of a socket, which is not blocking.  Its owner calls `begin` once somebody is there to be told."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: Turns, client: socket.socket, address: str) -> None:
        self.address = address
        self.is_asking = False
        self._loop, self._turns, self._socket = loop, turns, client
        self._number = client.fileno()  # for asyncio, which writes a text about a socket each time that it is new to it
        self._taker: Taker | None = None
        self._paused = False
        self._listens = False  # whether the loop tells us that something came
        self._unsent: deque[memoryview] = deque()
        self._closing = self._closed = False

    def begin(self, taker: Taker) -> None:
        """What the client sent while it waited for us is read at once."""
        self._taker = taker
        self._readable()

    # --- in

    def _readable(self) -> None:
        if self._closing or self._paused or self.is_asking or self._taker is None:
            self._listen(False)
            return
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            self._listen(True)
        except OSError:
            self.abort()
        else:
            self._came(data, self._taker)

    def _came(self, data: bytes, taker: Taker) -> None:
        if not data:
            self.close()
            return
        self._listen(False)
        self.is_asking = True
        self._turns.put(lambda: self._deliver(data), self.address, taker.is_calm)

    def _deliver(self, data: bytes) -> None:
        self.is_asking = False
        if self._closing or self._taker is None:
            return
        try:
            self._taker.data_received(data)
        finally:
            self._listen(not self._paused)

    def pause_reading(self) -> None:
        self._paused = True
        self._listen(False)

    def resume_reading(self) -> None:
        self._paused = False
        self._listen(not self.is_asking)

    def _listen(self, wanted: bool) -> None:
        wanted = wanted and not self._closing and not self._unsent  # what a client asks for and does not take piles up
        if wanted == self._listens or self._closed:
            return
        self._listens = wanted
        if wanted:
            self._loop.add_reader(self._number, self._readable)
        else:
            self._loop.remove_reader(self._number)

    # --- out

    def write(self, data: bytes) -> None:
        """Send what the kernel takes; the rest as the client takes it, and until then its writing is paused."""
        if self._closing:
            return
        left = memoryview(data)
        if not self._unsent:
            sent = self._send(left)
            left = left[sent:]
            if not left or self._closing:
                return
            self._loop.add_writer(self._number, self._writable)
        self._unsent.append(left)
        self._listen(False)
        if self._taker is not None:
            self._taker.pause_writing()

    def _send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.abort()
            return 0

    def _writable(self) -> None:
        while self._unsent:
            left = self._unsent[0][self._send(self._unsent[0]) :]
            if self._closed:
                return
            if left:
                self._unsent[0] = left
                return
            self._unsent.popleft()
        self._drained()

    def _drained(self) -> None:
        self._loop.remove_writer(self._number)
        if self._closing:
            self._end()
        elif self._taker is not None:
            self._listen(not self._paused and not self.is_asking)
            self._taker.resume_writing()

    # --- the end

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Read no more, and end when all is sent."""
        if self._closing:
            return
        self._listen(False)
        self._closing = True
        if not self._unsent:
            self._end()

    def abort(self) -> None:
        """End now, whatever is unsent."""
        if self._closed:
            return
        self._listen(False)
        self._closing = True
        if self._unsent:
            self._loop.remove_writer(self._number)
            self._unsent.clear()
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._socket.close()
        if self._taker is not None:
            self._loop.call_soon(self._taker.connection_lost, None)

    def get_extra_info(self, name: str) -> Any:
        return self._socket if name == "socket" and not self._closed else None


class Room(Protocol):
    """What the door asks of those who are in."""

    def has_room(self) -> bool:
        """Whether one more may come in, if need be in another's place."""


class Door:
    """Takes clients in from one listening socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        room: Room,
        welcome: Callable[[socket.socket, str], None],
        at_once: int,
    ) -> None:
        """`welcome` gets each client and its address; at most `at_once` between two looks at those who are in."""
        listening.setblocking(False)
        self._loop, self._listening, self._room = loop, listening, room
        self._welcome, self._at_once = welcome, at_once
        self._later: asyncio.TimerHandle | None = None

    def unlock(self) -> None:
        self._later = None
        self._loop.add_reader(self._listening, self._ready)

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _ready(self) -> None:
        for _ in range(self._at_once):
            if not self._room.has_room():
                self._rest(FULL_SECONDS)
                return
            try:
                client, place = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._rest(EXHAUSTED_SECONDS)
                    self._loop.call_exception_handler({"message": "no client can be accepted", "exception": error})
                return  # else it is the client's trouble, who is gone again
            self._let_in(client, address_of(place))

    def _let_in(self, client: socket.socket, address: str) -> None:
        client.setblocking(False)
        self._welcome(client, address)

    def _rest(self, seconds: float) -> None:
        """Leave clients with the kernel, where they cost nothing."""
        self._loop.remove_reader(self._listening)
        self._later = self._loop.call_later(seconds, self.unlock)
