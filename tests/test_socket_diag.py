"""What the kernel answers, and answers of another form."""

from __future__ import annotations

import errno
import socket
import struct
from pathlib import Path

import pytest

from stallwatch.sources.socket_diag import Row, listening_here, messages, parse_message
from stallwatch.sources.sockets import listening_rows, parse_address

LISTEN, ESTABLISHED, DONE, ERROR = 10, 1, 3, 2


def message(family: int, address: str, port: int, *, inode: int = 7, queue: int = 0, state: int = LISTEN) -> bytes:
    """An inet_diag_msg as linux/inet_diag.h lays it out."""
    packed = socket.inet_pton(family, address).ljust(16, b"\0")
    ports = port.to_bytes(2, "big") + bytes(2)
    identity = ports + packed + bytes(16) + struct.pack("=III", 0, 0, 0)
    return bytes((family, state, 0, 0)) + identity + struct.pack("=IIIII", 0, queue, 128, 1000, inode)


def framed(content: bytes, kind: int = 20, flags: int = 2) -> bytes:
    return struct.pack("=IHHII", 16 + len(content), kind, flags, 0, 0) + content + bytes(-len(content) % 4)


@pytest.mark.parametrize(
    ("family", "address", "shown"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::ffff:10.0.0.7", "10.0.0.7"),
        (socket.AF_INET6, "::", "::"),
    ],
)
def test_a_listening_socket_is_a_row(family: int, address: str, shown: str) -> None:
    found = parse_message(message(family, address, 8000, inode=77, queue=3))

    assert found is not None
    assert (str(found.address), found.port, found.inode, found.queue) == (shown, 8000, 77, 3)


def test_a_connection_is_no_row() -> None:
    assert parse_message(message(socket.AF_INET, "127.0.0.1", 8000, state=ESTABLISHED)) is None


def test_an_answer_holds_several_messages() -> None:
    answer = framed(b"one!") + framed(b"three") + framed(b"", DONE)

    assert list(messages(answer)) == [(20, b"one!"), (20, b"three"), (DONE, b"")]


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (framed(struct.pack("=i", -errno.ENOENT) + bytes(16), ERROR), errno.ENOENT),
        (framed(b"", ERROR), errno.EIO),
        (framed(b"four")[:-1], errno.EIO),
        (framed(b"")[:8], errno.EIO),
        (bytes(16), errno.EIO),
        (framed(b"four", flags=0x12), errno.EINTR),
    ],
    ids=["refused", "no number", "cut", "half a header", "no length", "changed meanwhile"],
)
def test_what_is_no_list_is_an_error(answer: bytes, number: int) -> None:
    with pytest.raises(OSError, match=r"\w") as found:
        list(messages(answer))

    assert found.value.errno == number


def test_a_message_that_is_too_short_is_an_error() -> None:
    with pytest.raises(OSError, match="another form"):
        parse_message(message(socket.AF_INET, "127.0.0.1", 8000)[:-1])


def test_the_kernel_lists_what_its_table_shows() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        try:
            told = [row for row in listening_here() if row.port == port]
        except OSError as error:
            pytest.skip(f"the kernel does not tell: {error}")
        shown = [row for row in listening_rows(Path("/proc/self/net/tcp")) if row.port == port]

    assert told == shown == [Row(parse_address(b"0100007F"), port, told[0].inode, 0)]


def test_a_socket_that_was_closed_is_not_listed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    try:
        told = listening_here()
    except OSError as error:
        pytest.skip(f"the kernel does not tell: {error}")

    assert port not in {row.port for row in told}
