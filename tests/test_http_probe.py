"""The reply parser alone: bytes in, whatever pieces they come in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch import __version__
from stallwatch.sources.connections import ProtocolError
from stallwatch.sources.http_probe import BODY_LIMIT_BYTES, Names, Reply, Request

COUNTED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length:5\r\n\r\nhello"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\nhello"


def received(pieces: Iterable[bytes]) -> tuple[Reply, bytes]:
    body: list[bytes] = []
    reply = Reply(body.append)
    for piece in pieces:
        if reply.feed(piece):
            break
    else:
        reply.end()
    return reply, b"".join(body)


@given(st.sampled_from([COUNTED, CHUNKED, INTERIM, UNTIL_CLOSED]), st.sets(st.integers(1, 90)))
def test_the_pieces_an_answer_comes_in_do_not_matter(answer: bytes, cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(answer)), len(answer)]
    pieces = [answer[a:b] for a, b in pairwise(edges)]

    reply, body = received(pieces)

    assert (reply.status, reply.complete, body) == (200, True, b"hello")


@given(st.binary(max_size=200), st.booleans())
def test_any_garbage_ends_or_is_refused(garbage: bytes, after_head: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" if after_head else b""
    try:
        reply, _ = received([head + garbage])
    except ProtocolError:
        return

    assert reply.finished
    assert reply.status is not None


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00\x00\x00\x12\x04",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000,
        b"",
    ],
)
def test_what_is_no_http_is_refused(answer: bytes) -> None:
    with pytest.raises(ProtocolError):
        received([answer])


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", 200),
        (b"HTTP/1.1 503 Unavailable\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", 503),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", 200),
    ],
)
def test_a_body_that_ends_early_or_is_packed_leaves_the_status(answer: bytes, status: int) -> None:
    reply, _ = received([answer])

    assert (reply.status, reply.complete) == (status, False)


def test_nothing_is_waited_for_after_no_content() -> None:
    reply, body = received([b"HTTP/1.1 204 No Content\r\n\r\n"])

    assert (reply.status, reply.complete, body) == (204, True, b"")


def test_a_flood_is_cut_at_the_limit_and_not_kept() -> None:
    reply = Reply()
    reply.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
    pieces = 0
    while not reply.feed(b"x" * 65536):
        pieces += 1

    assert pieces * 65536 <= BODY_LIMIT_BYTES + 65536
    assert (reply.status, reply.complete) == (200, False)


def test_the_request_asks_for_a_closed_connection_and_nothing_packed() -> None:
    sent = Request(("127.0.0.1",), 8000, "127.0.0.1:8000", "/health").head()

    assert sent == (
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"
        b"User-Agent: stallwatch/" + __version__.encode() + b"\r\nAccept: */*\r\n"
        b"Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
    )


def test_a_token_is_sent_and_never_shown() -> None:
    request = Request(("127.0.0.1",), 8000, "host", "/", bearer="planted-secret")

    assert b"Authorization: Bearer planted-secret\r\n" in request.head()
    assert "planted-secret" not in repr(request)


def test_literals_and_localhost_need_no_look_up() -> None:
    def ask(host: str) -> list[str]:
        raise AssertionError("asked")

    found = Names(ask).look_up(["10.0.0.1", "::1", "localhost"], 0.1)

    assert found == {"10.0.0.1": ("10.0.0.1",), "::1": ("::1",), "localhost": ("127.0.0.1", "::1")}


def test_a_resolver_that_hangs_costs_one_thread_and_the_known_address_stands() -> None:
    answers = [["10.0.0.7", "10.0.0.7"]]
    asked = threading.Semaphore(0)
    release = threading.Event()

    def ask(host: str) -> list[str]:
        asked.release()
        if answers:
            return answers.pop()
        release.wait(60)
        return []

    names = Names(ask)
    first = names.look_up(["node.example"], 60.0)
    while_hung = [names.look_up(["node.example"], 0.01) for _ in range(3)]
    release.set()

    assert [first, *while_hung] == [{"node.example": ("10.0.0.7",)}] * 4
    assert [asked.acquire(blocking=False) for _ in range(3)] == [True, True, False]


class Wanted(set[str]):
    """The hosts that are still asked for; while somebody looks who is, something else happens."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def __contains__(self, host: object) -> bool:
        self._meanwhile()
        return super().__contains__(host)


def test_a_look_up_may_end_while_names_are_forgotten() -> None:
    began, release, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def ask(host: str) -> list[str]:
        if host == "late.example":
            threads.append(threading.current_thread())
            began.set()
            release.wait(60)
        elif release.is_set():
            raise OSError("unknown")
        return ["10.0.0.3"]

    def end() -> None:
        release.set()
        for thread in threads:
            thread.join(60)

    names = Names(ask)
    names.look_up(["gone.example"], 60.0)
    names.look_up(["late.example"], 0.0)
    assert began.wait(60)
    names.keep(Wanted(end))

    assert names.look_up(["gone.example", "late.example"], 60.0) == {"late.example": ("10.0.0.3",)}


def test_a_name_that_does_not_exist_is_left_out() -> None:
    def ask(host: str) -> list[str]:
        raise OSError("unknown")

    assert Names(ask).look_up(["nowhere.example"], 1.0) == {}


def test_a_name_for_which_no_thread_can_be_started_is_looked_up_later(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(lambda host: ["10.0.0.2"])

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        assert names.look_up(["node.example", "::1"], 0.0) == {"::1": ("::1",)}

    assert names.look_up(["node.example"], 30.0) == {"node.example": ("10.0.0.2",)}
