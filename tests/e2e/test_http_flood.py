"""Everything at once that clients can do to wear HTTP down, while one honest client goes on scraping."""

from __future__ import annotations

import asyncio
import base64
import http.client
import os
import re
import resource
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import bcrypt
import psutil
import pytest

from certificates import authority

from .harness import CONFIG, Program, free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.aside]

SLOW, PARALLEL, IDLE, GUESSES = 50, 200, 1000, 60
LAZY, ASKED_AHEAD, ROOM_BYTES = 60, 900, 4096
"""More than may be in flight by themselves, and more answers than the kernel keeps for a client."""
MORE_MEMORY_BYTES = 40 << 20
MOST_CONNECTIONS, MOST_BESIDES = 256, 64
"""Descriptors: of clients, and of clients that are just taken in or turned away, and what collectors open."""

PATIENCE_SECONDS = 10.0
"""The usual scrape_timeout."""

PASSWORD = "Basic " + base64.b64encode(b"prometheus:right").decode()
ASK = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: {PASSWORD}\r\n"
DRIP_SECONDS, LONG_SECONDS = 0.5, 30.0


class Node(Program):
    """An exporter, with TLS and a password if `is_secured`; what asks it does so with `context`."""

    def __init__(self, folder: Path, is_secured: bool) -> None:
        self.port = free_port()
        self.context: ssl.SSLContext | None = None
        self.opened: list[asyncio.StreamWriter] = []
        (folder / "stallwatch.yml").write_text(CONFIG + "discovery: {enabled: false}\n")
        command = [str(Path(sys.executable).with_name("stallwatch")), "serve"]
        command += ["--config.file", str(folder / "stallwatch.yml"), "--web.listen-address", f"127.0.0.1:{self.port}"]
        if is_secured:
            command += ["--web.config.file", str(self._secure(folder))]
        super().__init__(command, folder / "stallwatch.log")

    def _secure(self, folder: Path) -> Path:
        signer = authority(folder)
        pair = signer.sign("server")
        self.context = signer.client()
        hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(10)).decode()
        web = folder / "web.yml"
        web.write_text(
            f"tls_server_config: {{cert_file: {pair.certificate.name}, key_file: {pair.key.name}}}\n"
            f"basic_auth_users: {{prometheus: '{hashed}'}}\n"
        )
        return web

    def wait_started(self) -> None:
        wait_until(lambda: self.scrape() == 200, 20.0, f"a first report\n{self.tail()}")

    def scrape(self) -> int:
        """Status of an honest scrape on a connection of its own; 0 when nothing comes."""
        client = http.client.HTTPConnection("localhost", self.port, timeout=PATIENCE_SECONDS)
        if self.context is not None:
            client = http.client.HTTPSConnection("localhost", self.port, timeout=PATIENCE_SECONDS, context=self.context)
        try:
            client.request("GET", "/metrics", headers={"Authorization": PASSWORD})
            answer = client.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            client.close()

    async def open(
        self, is_plain: bool = False, room_bytes: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection; `room_bytes`: what the kernel may keep of what comes."""
        context = None if is_plain else self.context
        client = socket.socket()
        if room_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
        client.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        except BaseException:
            client.close()
            raise
        opened = await asyncio.open_connection(
            sock=client, ssl=context, server_hostname="localhost" if context else None
        )
        self.opened.append(opened[1])
        return opened


Client = Callable[[Node, int], Awaitable[None]]


async def slow(node: Node, number: int) -> None:
    """A request, or a handshake, that comes byte by byte; connects again when it is closed."""
    half = b"\x16\x03\x01\x02\x00\x01\x00" if node.context and number % 2 else ASK.encode()
    while True:
        _, writer = await node.open(is_plain=half[0] == 0x16)
        with suppress(OSError):
            writer.write(half)
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(DRIP_SECONDS)


async def take_answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    await reader.readexactly(int(length[1]) if length else 0)


async def parallel(node: Node, number: int) -> None:
    reader, writer = await node.open()
    writer.write((ASK + "Connection: close\r\n\r\n").encode())
    await take_answer(reader)


async def idle(node: Node, number: int) -> None:
    """Asks once, and keeps its connection."""
    reader, writer = await node.open()
    writer.write((ASK + "\r\n").encode())
    await take_answer(reader)
    await asyncio.sleep(LONG_SECONDS)


async def lazy(node: Node, number: int) -> None:
    """Asks a lot and takes no answer; connects again when it is closed."""
    while True:
        _, writer = await node.open(room_bytes=ROOM_BYTES)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with suppress(OSError):
            writer.write((ASK + "\r\n").encode() * ASKED_AHEAD)
            while not writer.is_closing():
                writer.write(b"x")  # a transport that does not read learns only so that it was closed
                await asyncio.sleep(DRIP_SECONDS)


async def long_header(node: Node, number: int) -> None:
    _, writer = await node.open()
    writer.write(b"GET / HTTP/1.1\r\nX: ")
    for _ in range(10):
        writer.write(b"y" * 1_000_000)
        await writer.drain()


async def garbage(node: Node, number: int) -> None:
    _, writer = await node.open(is_plain=number % 2 == 0)
    writer.write(os.urandom(100_000))
    await writer.drain()


async def guess(node: Node, number: int) -> None:
    """A password that is wrong: costs the server a bcrypt."""
    reader, writer = await node.open()
    wrong = base64.b64encode(f"prometheus:{number}".encode()).decode()
    writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Basic {wrong}\r\n\r\n".encode())
    await reader.read(1000)


async def flood(node: Node, seconds: float) -> None:
    """All of them at once; what becomes of each is its own business."""

    async def one(client: Client, number: int) -> None:
        with suppress(OSError, EOFError):
            await client(node, number)

    crowd = (
        (slow, SLOW),
        (idle, IDLE),
        (parallel, PARALLEL),
        (lazy, LAZY),
        (long_header, 5),
        (garbage, 50),
        (guess, GUESSES),
    )
    tasks = [asyncio.create_task(one(client, number)) for client, count in crowd for number in range(count)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for writer in node.opened:
        writer.transport.abort()
    await asyncio.sleep(0.5)


@contextmanager
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine allows too few descriptors for 1,000 clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # clients cut off in their handshake
@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "secured"])
def test_a_flood_of_clients_keeps_no_scrape_out_and_costs_bounded_memory(tmp_path: Path, is_secured: bool) -> None:
    with many_descriptors(), Node(tmp_path, is_secured) as node:
        process = psutil.Process(node.pid)
        threads, memory, descriptors = process.num_threads(), process.memory_info().rss, process.num_fds()
        flooding = threading.Thread(target=lambda: asyncio.run(flood(node, 8.0)))
        flooding.start()
        statuses, most_threads, most_memory, most_descriptors = [], 0, 0, 0
        while flooding.is_alive():
            statuses.append(node.scrape())
            most_threads = max(most_threads, process.num_threads())
            most_memory = max(most_memory, process.memory_info().rss)
            most_descriptors = max(most_descriptors, process.num_fds())
            flooding.join(0.2)
        statuses.append(node.scrape())
        said = node.output.read_text()

    assert len(statuses) >= 3
    assert statuses.count(200) >= len(statuses) - 1  # one may be put out in the first second, and comes again
    assert most_threads <= threads + 2  # that of the passwords; one that a collector may start for a moment
    assert most_memory - memory < MORE_MEMORY_BYTES
    assert most_descriptors - descriptors <= MOST_CONNECTIONS + MOST_BESIDES
    assert "Traceback" not in said
