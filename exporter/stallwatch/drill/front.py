"""The HTTP side of a stand-in server: health, a metrics page, and requests that make tokens."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from .conditions import Condition
from .crowd import wait_for_ever
from .pen import Pen

_PATHS = ("/health", "/v1/models", "/model_info", "/get_model_info", "/ping", "/ready")
_GENERATE = ("/v1/completions", "/generate")

_PROMPT_TOKENS, _TOKENS, _ANSWER_SECONDS = 7, 24, 0.6
_SERVED_BEFORE_WEDGE = 6
_PORT_RETRY_SECONDS = 0.5


class Front:
    """Serves in threads of its own.  `hangs`: every question waits for ever; `wedges`: requests do after a few."""

    def __init__(self, condition: Condition, pen: Pen) -> None:
        self.hangs = self.wedges = False
        self._condition, self._pen = condition, pen
        self._lock = threading.Lock()
        self._running = self._prompt_tokens = self._tokens = self._finished = 0

    def listen(self, port: int) -> None:
        """Open the port, as soon as nobody else has it."""
        while True:
            try:
                server = _Server(("127.0.0.1", port), self._handler())
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            self._pen.say([self._pen.story.port_in_use(port)])
            time.sleep(_PORT_RETRY_SECONDS)
        Thread(target=server.serve_forever, daemon=True).start()

    def write_stats(self) -> None:
        """A line of statistics every 10 s (divided by speed), in a thread of its own; none from a wedged engine."""
        Thread(target=self._write_stats, daemon=True).start()

    def _write_stats(self) -> None:
        pause, before = self._condition.beat_seconds / 6, 0
        while not self._is_wedged:
            time.sleep(pause)
            with self._lock:
                running, made, before = self._running, self._tokens - before, self._tokens
            self._pen.say([self._pen.story.stats(running, made / pause)])

    @property
    def _is_wedged(self) -> bool:
        return self.wedges and self._finished >= _SERVED_BEFORE_WEDGE

    def page(self) -> str:
        with self._lock:
            return self._pen.story.metrics(self._running, self._prompt_tokens, self._tokens, self._finished)

    def answer(self) -> None:
        """One request, from prompt to last token."""
        with self._request():
            for _ in range(_TOKENS):
                if self._is_wedged:
                    wait_for_ever()
                time.sleep(_ANSWER_SECONDS / _TOKENS)
                with self._lock:
                    self._tokens += 1

    @contextmanager
    def _request(self) -> Iterator[None]:
        with self._lock:
            self._running += 1
            self._prompt_tokens += _PROMPT_TOKENS
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._finished += 1

    def _handler(front) -> type[BaseHTTPRequestHandler]:  # noqa: N805  # the handler below has a self of its own
        class Handler(BaseHTTPRequestHandler):
            """Answers every known path with 200."""

            def do_GET(self) -> None:
                if front.hangs:
                    wait_for_ever()
                page = front.page() if self.path == "/metrics" else ""
                self._reply(page or "{}\n", 200 if page or self.path in _PATHS else 404)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path in _GENERATE:
                    front.answer()
                self._reply('{"text": "one two three"}\n', 200 if self.path in _GENERATE else 404)

            def _reply(self, text: str, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if text.startswith("#") else "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                if front._condition.logs_access:
                    host, port = self.client_address[:2]
                    line = front._pen.story.access_line(f"{host}:{port}", self.command, self.path, int(code))
                    front._pen.say([line])

            def log_message(self, *_: object) -> None:
                """Nothing else is said: clients come and go."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away before its answer is no news."""


def ask(port: int, path: str = _GENERATE[0]) -> None:
    """One request, waited for as long as it takes.  OSError while nobody answers."""
    body = b'{"prompt": "count to three", "max_tokens": 24}'
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        while connection.recv(4096):
            pass
