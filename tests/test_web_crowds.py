"""Whose turn it is and who goes, without sockets; then over a socket, whose other end the test holds."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from stallwatch.web.addresses import listen
from stallwatch.web.crowds import Crowds, Turns, address_of
from stallwatch.web.wire import READ_BYTES, Door, SocketWire

# --- who goes


@dataclass(eq=False)
class Guest:
    address: str
    was_answered: bool = False
    is_asking: bool = False

    def abort(self) -> None:
        raise AssertionError("who goes is only named")


def crowd(*guests: Guest) -> Crowds:
    crowds = Crowds()
    for guest in guests:
        crowds.wait(guest)
    return crowds


def test_who_comes_from_the_address_with_most_connections_goes_and_not_who_has_waited_longest() -> None:
    scraper, first, second = Guest("10.0.0.1", True), Guest("10.6.6.6"), Guest("10.6.6.6")
    crowds = crowd(scraper, first, second)

    assert crowds.victim() is first
    crowds.leave(first)
    assert crowds.victim() is scraper, "of equals the one that has waited longest"


def test_half_requests_put_out_no_connection_that_is_kept_and_kept_ones_no_half_request() -> None:
    """All from one address, as behind a proxy."""
    kept, halves = Guest("10.0.0.1", True), [Guest("10.0.0.1") for _ in range(3)]
    half, many_kept = Guest("10.0.0.1"), [Guest("10.0.0.1", True) for _ in range(3)]

    assert crowd(kept, *halves).victim() is halves[0]
    assert crowd(half, *many_kept).victim() is many_kept[0]


def test_whose_bytes_are_here_does_not_go() -> None:
    asking, silent = Guest("10.0.0.1", is_asking=True), Guest("10.0.0.1")

    assert crowd(asking, silent).victim() is silent
    assert crowd(asking).victim() is None


def test_while_all_of_the_largest_crowd_are_looked_at_or_answered_nobody_goes_in_their_place() -> None:
    scraper, kept = Guest("10.0.0.1", True), Guest("10.6.6.6", True)
    answered, asking = Guest("10.6.6.6"), Guest("10.6.6.6", is_asking=True)
    crowds = crowd(scraper, kept, answered, asking)
    crowds.answer(answered)

    assert crowds.victim() is None
    crowds.wait(answered)
    assert crowds.victim() is answered, "the silent twin"


def test_what_came_and_went_is_counted_no_more() -> None:
    guests = [Guest(f"10.0.0.{number}", number % 2 == 0) for number in range(4)] * 2
    crowds = crowd(*guests)
    for guest in guests[:4]:
        crowds.answer(guest)
        guest.was_answered = True
        crowds.wait(guest)
    assert (len(crowds), crowds.answering) == (4, 0)

    for guest in guests:
        crowds.leave(guest)

    assert (len(crowds), crowds.victim(), crowds.everybody()) == (0, None, ())
    assert not crowds._of_address
    assert not crowds._of_kind


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (("10.0.0.1", 9100), "10.0.0.1"),
        (("::ffff:10.0.0.1", 9100, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 9100, 0, 0), "20010db800010002"),
        (("2001:db8:1:2:ffff::6", 9100, 0, 0), "20010db800010002"),
        (("2001:db8:1:3::6", 9100, 0, 0), "20010db800010003"),
        (("fe80::1%eth0", 9100, 0, 3), "fe80000000000000"),
    ],
)
def test_an_address_is_whose_it_is(place: tuple[str | int, ...], expected: str) -> None:
    assert address_of(place) == expected


# --- whose turn it is


class Loop:
    """What was put off until after the next look."""

    def __init__(self) -> None:
        self.due: list[Callable[[], object]] = []

    def later(self, act: Callable[[], object]) -> None:
        self.due.append(act)

    def look(self) -> None:
        due, self.due = self.due, []
        for act in due:
            act()


def order(*wants: tuple[str, str, bool]) -> str:
    """The names of acts (name, address, whether calm) in the order in which they are done, one at each look."""
    loop, done = Loop(), []
    turns = Turns(loop.later)
    for name, address, is_calm in wants:
        turns.put(lambda name=name: done.append(name), address, is_calm)  # type: ignore[misc]
    looks = 0
    while loop.due:
        loop.look()
        looks += 1
        assert len(done) == looks, "one act at each look"
    return "".join(done)


def test_addresses_take_turns_and_of_one_who_came_first() -> None:
    assert order(("a", "x", False), ("b", "x", False), ("c", "x", False), ("d", "y", False)) == "adbc"
    assert order(("a", "x", False), ("b", "x", False), ("c", "x", False), ("d", "x", False)) == "abcd"


def test_who_asks_after_a_pause_goes_first_and_of_those_addresses_take_turns() -> None:
    wants = (("a", "x", False), ("b", "x", False), ("c", "x", True), ("d", "x", True), ("e", "y", True))

    assert order(*wants) == "cedab"


def test_an_act_that_fails_loses_nobody_a_turn() -> None:
    loop, done = Loop(), []
    turns = Turns(loop.later)

    def fail() -> None:
        raise LookupError

    turns.put(fail, "x")
    turns.put(lambda: done.append("well"), "x")
    with pytest.raises(LookupError):
        loop.look()
    loop.look()

    assert done == ["well"]


# --- a client's socket


@dataclass
class Taker:
    said: list[bytes | str] = field(default_factory=list)
    is_calm: bool = False

    def data_received(self, data: bytes) -> None:
        self.said.append(data)

    def pause_writing(self) -> None:
        self.said.append("paused")

    def resume_writing(self) -> None:
        self.said.append("resumed")

    def connection_lost(self, error: Exception | None) -> None:
        self.said.append("lost")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(5)
    yield ours, theirs
    ours.close()
    theirs.close()


Pair = tuple[socket.socket, socket.socket]


def looks(loop: asyncio.AbstractEventLoop, number: int = 6) -> None:
    async def some() -> None:
        for _ in range(number):
            await asyncio.sleep(0)

    loop.run_until_complete(some())


def test_what_came_waits_for_its_turn_and_no_more_is_read_meanwhile(
    loop: asyncio.AbstractEventLoop, pair: Pair
) -> None:
    acts: list[Callable[[], object]] = []
    wire, taker = SocketWire(loop, Turns(acts.append), pair[0], "x"), Taker()
    pair[1].sendall(b"y" * (READ_BYTES + 1))

    wire.begin(taker)
    looks(loop)
    assert (wire.is_asking, taker.said, len(acts)) == (True, [], 1)
    acts.pop()()
    assert (wire.is_asking, taker.said) == (False, [b"y" * READ_BYTES])
    looks(loop)
    acts.pop()()

    assert taker.said[1:] == [b"y"]
    wire.abort()
    looks(loop)


def test_a_paused_wire_reads_nothing_and_goes_on_when_it_is_resumed(
    loop: asyncio.AbstractEventLoop, pair: Pair
) -> None:
    wire, taker = SocketWire(loop, Turns(loop.call_soon), pair[0], "x"), Taker()
    wire.begin(taker)
    wire.pause_reading()
    pair[1].sendall(b"later")
    looks(loop)
    assert taker.said == []

    wire.resume_reading()
    looks(loop)

    assert taker.said == [b"later"]
    wire.abort()
    looks(loop)


def test_what_is_closed_before_its_turn_is_not_looked_at(loop: asyncio.AbstractEventLoop, pair: Pair) -> None:
    wire, taker = SocketWire(loop, Turns(loop.call_soon), pair[0], "x"), Taker()
    pair[1].sendall(b"too late")
    wire.begin(taker)
    wire.abort()
    wire.abort()
    wire.close()
    wire.write(b"nothing")
    looks(loop)

    assert taker.said == ["lost"]
    assert wire.get_extra_info("socket") is None


def fill(wire: SocketWire, theirs: socket.socket) -> bytes:
    """Writes more than the kernel keeps."""
    sent = bytes(range(256)) * 16384
    wire.write(sent)
    wire.write(b"end")
    return sent + b"end"


def read_all(loop: asyncio.AbstractEventLoop, theirs: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        looks(loop, 2)
        received += theirs.recv(1 << 20)
    looks(loop)
    return received


def test_what_the_kernel_does_not_take_is_sent_as_the_client_takes_it(
    loop: asyncio.AbstractEventLoop, pair: Pair
) -> None:
    wire, taker = SocketWire(loop, Turns(loop.call_soon), pair[0], "x"), Taker()
    wire.begin(taker)
    sent = fill(wire, pair[1])
    assert taker.said == ["paused", "paused"]

    assert read_all(loop, pair[1], len(sent)) == sent

    assert taker.said[2:] == ["resumed"]
    wire.write(b"more")
    assert (taker.said[3:], pair[1].recv(10)) == ([], b"more"), "what is taken at once pauses nothing"
    wire.abort()
    looks(loop)


def test_a_wire_that_is_closed_sends_the_rest_first_and_one_that_is_aborted_does_not(
    loop: asyncio.AbstractEventLoop, pair: Pair
) -> None:
    wire, taker = SocketWire(loop, Turns(loop.call_soon), pair[0], "x"), Taker()
    wire.begin(taker)
    sent = fill(wire, pair[1])
    wire.close()
    assert (wire.is_closing(), taker.said) == (True, ["paused", "paused"])

    received = read_all(loop, pair[1], len(sent))

    assert (received, pair[1].recv(1)) == (sent, b"")
    assert taker.said[2:] == ["lost"]


def test_of_a_client_that_takes_nothing_nothing_more_is_read(loop: asyncio.AbstractEventLoop, pair: Pair) -> None:
    """What it asks for would pile up: TLS answers some messages by itself, whoever takes the answers."""
    wire, taker = SocketWire(loop, Turns(loop.call_soon), pair[0], "x"), Taker()
    wire.begin(taker)
    sent = fill(wire, pair[1])
    pair[1].sendall(b"more")
    wire.resume_reading()
    looks(loop)
    assert taker.said == ["paused", "paused"]

    read_all(loop, pair[1], len(sent))
    looks(loop)

    assert taker.said[2:] == ["resumed", b"more"]
    wire.abort()
    looks(loop)


def test_a_client_that_resets_while_it_is_answered_is_lost_once(loop: asyncio.AbstractEventLoop, pair: Pair) -> None:
    wire, taker = SocketWire(loop, Turns(loop.call_soon), pair[0], "x"), Taker()
    wire.begin(taker)
    fill(wire, pair[1])
    pair[1].close()
    looks(loop)

    assert taker.said == ["paused", "paused", "lost"]
    assert pair[0].fileno() == -1


# --- the door


@dataclass
class House:
    is_full: bool = False
    inside: list[socket.socket] = field(default_factory=list)

    def has_room(self) -> bool:
        return not self.is_full

    def welcome(self, client: socket.socket, address: str) -> None:
        assert address == "127.0.0.1"
        self.inside.append(client)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with listen("127.0.0.1:0") as bound:
        yield bound


def close_all(*clients: socket.socket) -> None:
    for client in clients:
        client.close()


def test_clients_come_in_a_few_at_each_look_and_wait_in_the_kernel_while_there_is_no_room(
    loop: asyncio.AbstractEventLoop, listening: socket.socket
) -> None:
    house = House()
    door = Door(loop, listening, house, house.welcome, 2)
    clients = [socket.create_connection(listening.getsockname()) for _ in range(5)]
    door.unlock()

    door._ready()
    assert len(house.inside) == 2
    house.is_full = True
    door._ready()
    looks(loop)
    assert len(house.inside) == 2
    assert door._later is not None
    house.is_full = False
    door._later.cancel()
    door.unlock()
    looks(loop)

    assert len(house.inside) == 5
    assert {client.getblocking() for client in house.inside} == {False}
    door.close()
    close_all(*clients, *house.inside)


def test_an_answer_is_not_kept_back_until_what_went_before_it_is_acknowledged(
    loop: asyncio.AbstractEventLoop, listening: socket.socket
) -> None:
    house = House()
    door = Door(loop, listening, house, house.welcome, 1)
    client = socket.create_connection(listening.getsockname())
    door._ready()

    assert house.inside[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    door.close()
    close_all(client, *house.inside)


@pytest.mark.parametrize(
    ("number", "told"), [(errno.EMFILE, 1), (errno.ENFILE, 1), (errno.ECONNABORTED, 0)], ids=["ours", "all", "client"]
)
def test_without_descriptors_it_rests_and_says_so_and_a_client_that_is_gone_again_is_nothing(
    loop: asyncio.AbstractEventLoop, listening: socket.socket, number: int, told: int
) -> None:
    class Failing:
        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            raise OSError(number, "no")

    house, said = House(), []
    loop.set_exception_handler(lambda loop, context: said.append(context["exception"].errno))
    door = Door(loop, listening, house, house.welcome, 4)
    door.unlock()
    door._listening = Failing()  # type: ignore[assignment]
    door._rest = lambda seconds: said.append("rests")  # type: ignore[method-assign]

    door._ready()

    assert said == (["rests", number] if told else [])
    door._listening = listening
    door.close()
