"""Servers in network namespaces of their own: one joined to the machine by a pair of links, and one that is alone.

The server is a small program that is called like vLLM's and answers as it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from .harness import PATIENCE, Exporter, Program, free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.aside, pytest.mark.usefixtures("as_root")]

NETWORK = "198.51.100"
"""TEST-NET-2: no machine has an address in it."""

SERVER = f"""\
#!{sys.executable}
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        page = b"vllm:num_requests_running 3\\n" if self.path == "/metrics" else b"{{}}"
        self.send_response(int(sys.argv[-1]))
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


words = sys.argv
ThreadingHTTPServer((words[words.index("--host") + 1], int(words[words.index("--port") + 1])), Answer).serve_forever()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=PATIENCE)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace, joined to ours by a pair of links; it is .2 and we are .1."""
    name, ours, theirs = (f"sw{letter}{os.getpid()}" for letter in "nab")
    try:
        ip("netns", "add", name)
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", f"{NETWORK}.1/30", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "addr", "add", f"{NETWORK}.2/30", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        with suppress(OSError, subprocess.SubprocessError):
            ip("link", "del", ours)
        with suppress(OSError, subprocess.SubprocessError):
            ip("netns", "del", name)


class Vllm(Program):
    """Listens on a port; `within` are the words that lead into a namespace, `status` is what it answers."""

    def __init__(self, folder: Path, host: str, port: int, within: Sequence[str] = (), status: int = 200) -> None:
        program = folder / "vllm"
        program.write_text(SERVER)
        program.chmod(0o755)
        command = [str(program), "serve", "org/m", "--host", host, "--port", str(port), "--answer", str(status)]
        super().__init__([*within, *command], folder / f"{host}-{status}.out")


class Stranger(Program):
    """Listens on our loopback at the same port, and answers that it is broken."""

    def __init__(self, folder: Path, port: int) -> None:
        program = folder / "stranger"
        program.write_text(SERVER)
        program.chmod(0o755)
        super().__init__([str(program), "--host", "127.0.0.1", "--port", str(port), "503"], folder / "stranger.out")


def values(exporter: Exporter, metric: str, **labels: str) -> list[float]:
    return list(exporter.watch.last().values(f"stallwatch_{metric}", **labels).values())


def test_a_server_behind_a_pair_of_links_is_asked_at_its_own_address(namespace: str, tmp_path: Path) -> None:
    port = free_port()
    name = f"vllm-{port}"
    with (
        Stranger(tmp_path, port),
        Vllm(tmp_path, "0.0.0.0", port, ["ip", "netns", "exec", namespace]),  # in there
        Exporter(tmp_path) as exporter,
    ):
        asked = {"server": name, "endpoint": "health"}
        wait_until(lambda: values(exporter, "health_status", **asked), PATIENCE, "an answer of the server")

        assert values(exporter, "health_status", **asked) == [200.0]
        assert values(exporter, "port_connect", server=name, result="ok") == [1.0]
        assert values(exporter, "port_foreign", server=name) == [0.0]
        wait_until(
            lambda: values(exporter, "server_requests_running", server=name) == [3.0], PATIENCE, "its own metrics"
        )


@pytest.mark.parametrize("rootless", [False, True])
def test_a_server_on_the_loopback_of_its_namespace_listens_and_is_asked_nothing(
    rootless: bool, namespace: str, tmp_path: Path
) -> None:
    """Also in a user namespace, as containers without root are.  Whoever has that port here is not the server."""
    port = free_port()
    name = f"vllm-{port}"
    within = ["unshare", "--user", "--map-root-user", "--net"] if rootless else ["ip", "netns", "exec", namespace]
    with (
        Stranger(tmp_path, port),
        Vllm(tmp_path, "127.0.0.1", port, within),
        Exporter(tmp_path) as exporter,
    ):
        wait_until(lambda: values(exporter, "port_listening", server=name) == [1.0], PATIENCE, "a port that listens")
        refused = {"collector": "sockets", "reason": "namespace"}
        wait_until(lambda: sum(values(exporter, "read_errors_total", **refused)) >= 3, PATIENCE, "three looks at it")

        assert values(exporter, "port_foreign", server=name) == [0.0]
        assert values(exporter, "port_connect", server=name) == []
        assert values(exporter, "health_status", server=name) == []
        assert values(exporter, "server_requests_running", server=name) == []
