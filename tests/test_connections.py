"""Real loopback sockets: what is tested is what the kernel answers.  No deadline is longer than 0.3 s."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stallwatch.sources.connections import (
    READ,
    STRANGER,
    Attempt,
    ProtocolError,
    SocketAddress,
    Talk,
    connect,
    connect_all,
    connect_socket,
    run_together,
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def at(server: socket.socket) -> SocketAddress:
    address, port = server.getsockname()[:2]
    return SocketAddress(address, port)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return at(server).port


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_each_connect_has_its_own_result(listener: socket.socket) -> None:
    attempts = [
        Attempt(at(listener)),
        Attempt(SocketAddress("127.0.0.1", free_port())),
        Attempt(SocketAddress("255.255.255.255", 9)),
    ]

    results = connect_all(attempts, 0.3)

    assert results == ["ok", "refused", "unreachable"]


def test_a_server_whose_accept_queue_is_full_costs_one_deadline_whatever_the_others_do(
    listener: socket.socket,
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as clients:
        for _ in range(3):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())

        results = connect_all([Attempt(at(full)), Attempt(at(full)), Attempt(at(listener))], 0.1)

    assert results == ["timeout", "timeout", "ok"]


def test_an_answer_of_somebody_else_is_a_stranger(listener: socket.socket) -> None:
    seen: list[SocketAddress] = []

    def is_theirs(peer: SocketAddress) -> bool:
        seen.append(peer)
        return False

    results = connect_all([Attempt(at(listener), is_theirs)], 0.3)

    accepted, peer = listener.accept()
    accepted.close()
    assert results == [STRANGER]
    assert seen == [SocketAddress(*peer)]


def test_talking_to_oneself_is_refused() -> None:
    """With the port in the ephemeral range the kernel may pick it as our own: then nobody listens there."""

    def to_itself() -> Talk[socket.socket]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            own = SocketAddress(*probe.getsockname())
            probe.setblocking(False)
            yield from connect_socket(probe, own)
            return probe

    (outcome,) = run_together([to_itself()], 0.3)

    assert isinstance(outcome.error, ConnectionRefusedError)


def test_the_next_address_is_tried_when_one_refuses(listener: socket.socket) -> None:
    addresses = [SocketAddress("127.0.0.1", free_port()), at(listener)]

    (outcome,) = run_together([connect(addresses)], 0.3)

    assert outcome.value is not None
    with outcome.value as sock:
        assert sock.getpeername() == listener.getsockname()


def test_no_address_at_all_is_an_error_and_no_hang() -> None:
    (outcome,) = run_together([connect([])], 0.3)

    assert isinstance(outcome.error, OSError)


def test_an_error_of_one_conversation_leaves_the_others_alone() -> None:
    def speaks() -> Talk[str]:
        yield from ()
        return "well"

    def stumbles() -> Talk[str]:
        yield from ()
        raise ProtocolError("no")

    outcomes = run_together([stumbles(), speaks()], 0.3)

    assert isinstance(outcomes[0].error, ProtocolError)
    assert outcomes[1].value == "well"


def test_who_waits_at_the_deadline_is_closed_and_no_descriptor_stays() -> None:
    before = open_descriptors()
    ends: list[str] = []

    def waits_for_ever() -> Talk[str]:
        near, far = socket.socketpair()
        with near, far:
            try:
                yield near, READ
            finally:
                ends.append("closed")
        return "never"

    (outcome,) = run_together([waits_for_ever()], 0.05)

    assert (outcome.value, outcome.error) == (None, None)
    assert ends == ["closed"]
    assert open_descriptors() == before


def test_descriptors_do_not_grow_over_many_probes(listener: socket.socket) -> None:
    attempts = [Attempt(at(listener)), Attempt(SocketAddress("127.0.0.1", free_port()))]
    before = open_descriptors()

    for _ in range(50):
        connect_all(attempts, 0.3)
        listener.accept()[0].close()

    assert open_descriptors() == before
