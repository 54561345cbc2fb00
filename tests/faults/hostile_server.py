"""An HTTP server that answers as the word in a file says: `hostile_server.py PORT FILE`.  Ends with whoever started it.

The word is looked up for each request; `well` is a healthy server with a metrics page.
"""

from __future__ import annotations

import gzip
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PAGE = b'vllm:num_requests_running{model_name="m"} 3\nvllm:generation_tokens_total{model_name="m"} 5\n'
ZEROS = b"0" * (1 << 20)
GIGABYTE = 1 << 30
DRIP_SECONDS, FOR_EVER_SECONDS = 1.0, 600.0


def head(*headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()


def well() -> Iterator[bytes]:
    yield head(f"Content-Length: {len(PAGE)}") + PAGE


def gigabyte() -> Iterator[bytes]:
    """Says so before, and sends it."""
    yield head(f"Content-Length: {GIGABYTE}") + PAGE
    for _ in range(GIGABYTE // len(ZEROS)):
        yield ZEROS


def endless() -> Iterator[bytes]:
    """Lines that are wanted, without an end."""
    yield head()
    while True:
        yield PAGE * 1000


def endless_line() -> Iterator[bytes]:
    yield head() + b"vllm:num_requests_running{model_name="
    while True:
        yield ZEROS


def trickle() -> Iterator[bytes]:
    yield head(f"Content-Length: {len(PAGE)}")
    for number in PAGE:
        time.sleep(DRIP_SECONDS)
        yield bytes([number])


def bomb() -> Iterator[bytes]:
    """A gigabyte of zeros in a megabyte."""
    packed = gzip.compress(ZEROS) * 1000
    yield head("Content-Encoding: gzip", f"Content-Length: {len(packed)}") + packed


def redirects() -> Iterator[bytes]:
    yield head("Location: /elsewhere", "Content-Length: 0", status="302 Found")


def mute() -> Iterator[bytes]:
    time.sleep(FOR_EVER_SECONDS)
    yield b""


def half_a_header() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Len"
    time.sleep(FOR_EVER_SECONDS)


def endless_header() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nX: "
    while True:
        yield ZEROS


def huge_chunks() -> Iterator[bytes]:
    yield head("Transfer-Encoding: chunked") + b"ffffffff\r\n"
    while True:
        yield ZEROS


WAYS = (
    well,
    gigabyte,
    endless,
    endless_line,
    trickle,
    bomb,
    redirects,
    mute,
    half_a_header,
    endless_header,
    huge_chunks,
)
BY_NAME = {way.__name__: way for way in WAYS}


def answer(client: socket.socket, word: Path) -> None:
    """One request; who was led elsewhere is noted beside the word."""
    with client, suppress(OSError):
        asked = client.recv(4096)
        if asked.startswith(b"GET /elsewhere"):
            word.with_suffix(".elsewhere").touch()
        for piece in BY_NAME[word.read_text()]():
            client.sendall(piece)


def main(port: int, word: Path) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=answer, args=(client, word), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
