"""Who listens in our own network namespace, as the kernel lists it (sock_diag(7), NETLINK_SOCK_DIAG).

It lists nothing but what listens.  Behind the same rows of /proc/net/tcp and tcp6 the kernel walks through its whole
table of connections, also where it is empty: two hundred times the work on a machine with some memory.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_DIAG, _DIAG_BY_FAMILY = 4, 20  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_INTERRUPTED = 0x10  # NLM_F_DUMP_INTR
_ERROR, _DONE = 2, 3
_LISTEN = 10  # TCP_LISTEN
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")  # inet_diag_req_v2: of any address
_MESSAGE = struct.Struct("=BBxx2s2x16s16x12x4xI8xI")  # inet_diag_msg: family, state, port, address, rqueue, inode
_ANSWER_BYTES = 64 << 10
_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """A listening socket."""

    address: Address
    port: int
    inode: int
    queue: int  # connections not yet accepted


def listening_here() -> list[Row]:
    """The listening TCP sockets of our network namespace, IPv4 first.

    OSError where the kernel does not tell; EINTR when the list changed while it was told.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _DIAG) as link:
        link.settimeout(_SECONDS)
        return [row for family in (socket.AF_INET, socket.AF_INET6) for row in _listening(link, family)]


def _listening(link: socket.socket, family: int) -> Iterator[Row]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _LISTEN)
    link.send(_HEADER.pack(_HEADER.size + len(request), _DIAG_BY_FAMILY, _DUMP, 0, 0) + request)
    while True:
        for kind, message in messages(link.recv(_ANSWER_BYTES)):
            if kind == _DONE:
                return
            if (row := parse_message(message)) is not None:
                yield row


def messages(answer: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and content of what one answer holds.  OSError when it is an error, or damaged."""
    offset = 0
    while offset < len(answer):
        if len(answer) - offset < _HEADER.size:
            raise _damaged()
        length, kind, flags, _, _ = _HEADER.unpack_from(answer, offset)
        content = answer[offset + _HEADER.size : offset + length]
        if length < _HEADER.size or len(content) < length - _HEADER.size:
            raise _damaged()
        if flags & _INTERRUPTED:
            raise InterruptedError(errno.EINTR, "the list changed")
        if kind == _ERROR:
            number = -struct.unpack_from("=i", content)[0] if len(content) >= 4 else errno.EIO
            raise OSError(number, os.strerror(number))
        yield kind, content
        offset += (length + 3) & ~3


def parse_message(message: bytes) -> Row | None:
    """None for a socket that does not listen.  OSError when it is damaged."""
    if len(message) < _MESSAGE.size:
        raise _damaged()
    family, state, port, packed, queue, inode = _MESSAGE.unpack_from(message)
    if state != _LISTEN:
        return None
    address: Address = ipaddress.IPv4Address(packed[:4])
    if family == socket.AF_INET6:
        address = ipaddress.IPv6Address(packed).ipv4_mapped or ipaddress.IPv6Address(packed)
    return Row(address, int.from_bytes(port, "big"), inode, queue)


def _damaged() -> OSError:
    return OSError(errno.EIO, "an answer of another form")
