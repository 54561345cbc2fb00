"""Listen addresses: `HOST:PORT` -> a bound socket, or a sentence why not."""

from __future__ import annotations

import errno
import re
import socket

BACKLOG = 1024
"""Clients that wait in the kernel: one that finds it full asks again after a second, an honest one too."""


class ListenError(Exception):
    """An address cannot be listened on; the text is a sentence for people."""


def listen(address: str) -> socket.socket:
    """A bound socket for `address`; ListenError says what is wrong with it."""
    host, port = split_address(address)
    try:
        return _bound(host, port)
    except OSError as error:
        why = error.strerror or "it is not an address of this machine"
        if error.errno == errno.EADDRINUSE:
            why = "another process listens there; choose another with --web.listen-address"
        raise ListenError(f"cannot listen on {address}: {why}") from error


def split_address(address: str) -> tuple[str, int]:
    """`127.0.0.1:80`, `[::1]:80`, `:80` -> host without brackets and port."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s]*)):([0-9]{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise ListenError(f"cannot listen on {address!r}: allowed are HOST:PORT, [IPV6]:PORT and :PORT")
    return match[1] or match[2], int(match[3])


def _bound(host: str, port: int) -> socket.socket:
    """Without a host: IPv6 and IPv4 in one socket; IPv4 alone where the kernel has no IPv6."""
    bound = _made(host, port)
    # Inherited by each client's socket: else the kernel keeps an answer back for 40 ms, until what went before it (of a
    # handshake, for one) is acknowledged.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _made(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    family, _, _, _, place = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]  # noqa: S104 - asked for
    return socket.create_server(place[:2], family=family, backlog=BACKLOG)


def address_text(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
