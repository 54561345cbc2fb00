"""A container runtime that is stopped: Podman's conmon reads no more what the server says, which blocks in a write.

A start that says more than a pipe holds, and a server that is ready and says a line for each request; each with its
silent twin, whose runtime goes on.  Without a container: tests/faults/test_pipes.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from e2e.harness import PATIENCE, fetch, free_port, wait_until
from faults.harness import ALONE, STALL_AFTER, Exporter, Scrape, all_hold, stopped

from .engine import LIMITS, PYTHON, podman, running

pytestmark = pytest.mark.e2e

NAME = "contained"
AS_LONG = STALL_AFTER + 10.0
"""How long a twin is watched: in this time the other one is stalled."""

LINES = 4000
"""Of a start: half a megabyte, and no rank alone fills a pipe, which holds 64 KiB."""

REQUESTS = 1500
"""A line of 75 bytes or more for each, so that not all of them fit into a pipe."""

LONGEST_STOP = 240.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A condition of a stand-in server, and how its first process is known."""

    framework: str
    command: str
    words: tuple[str, ...]


STARTS = Kind("sglang", "sglang.launch_server", ("normal", "--set", f"total_lines={LINES}"))
SERVES = Kind("vllm", "vllm.entrypoints.cli.main", ("slow-download", "--set", "slow_seconds=2"))
"""With one rank; its health endpoint is asked, other than SGLang's."""


@dataclass(frozen=True, slots=True)
class Contained:
    """A stand-in in a container: who reads its output (conmon), its first process, the file of what it says."""

    name: str
    port: int
    conmon: int
    first: int
    log: Path

    def lines(self) -> int:
        """As they are on disk; what stands in pieces is several."""
        return self.log.read_bytes().count(b"\n")

    def wait_until_said(self, text: str) -> None:
        wait_until(lambda: text in self.log.read_text(errors="replace"), PATIENCE, f"{text} in the log", 0.01)

    def writers(self) -> set[int]:
        """Processes that sleep in a write into a pipe."""
        found = set()
        for each in psutil.Process(self.first).children(recursive=True):
            with suppress(OSError):
                if "pipe_write" in Path(f"/proc/{each.pid}/wchan").read_text():
                    found.add(each.pid)
        return found

    def answered(self) -> int:
        """How many of the requests, one after the other, up to the first that has no answer."""
        url = f"http://127.0.0.1:{self.port}/v1/models"
        return next((number for number in range(REQUESTS) if fetch(url)[0] != 200), REQUESTS)

    @contextmanager
    def runtime_stopped(self) -> Iterator[None]:
        """Its runtime does nothing meanwhile.  At last it goes on, also when nobody is here any more to say so."""
        rescue = ["/bin/sh", "-c", f"sleep {LONGEST_STOP:g}; kill -CONT {self.conmon}"]
        with subprocess.Popen(rescue, start_new_session=True) as waiting:
            try:
                with stopped(self.conmon):
                    yield
            finally:
                os.killpg(waiting.pid, signal.SIGKILL)


@contextmanager
def watched(image: str, folder: Path, kind: Kind) -> Iterator[tuple[Contained, Exporter]]:
    """The server begins when the exporter is there; where its log is the exporter has to find out."""
    port = free_port()
    match = f'{{command: "{kind.command} .*--port {port}"}}'
    config = ALONE + f"servers:\n  - {{name: {NAME}, framework: {kind.framework}, match: {match}}}\n"
    name = f"piped-{port}"
    words = ["run", "--detach", "--name", name, "--network", "host", "--user", "0:0", *LIMITS, "--pids-limit", "4096"]
    words += ["--log-driver", "k8s-file", "--entrypoint", PYTHON, image, "-m", "stallwatch.drill.standin", *kind.words]
    words += ["--port", str(port), "--for", "5m", "--log", "/dev/stdout"]
    with Exporter(folder, config=config) as exporter, running(name, words):
        (found,) = json.loads(podman("inspect", name))
        log = Path(found["HostConfig"]["LogConfig"]["Path"])
        yield Contained(name, port, found["State"]["ConmonPid"], found["State"]["Pid"], log), exporter


def is_ready(page: Scrape) -> bool:
    return page.labels("server_phase", "phase") == {"ready"}


def is_stalled(page: Scrape) -> bool:
    return page.state(NAME) == "stalled"


def answers(page: Scrape) -> bool:
    return page.value("health_status", server=NAME, endpoint="health") == 200


def reasons(page: Scrape) -> set[str]:
    return page.labels("server_reason", "reason")


def lines(page: Scrape) -> float | None:
    return page.value("log_lines_total", server=NAME)


def check_stalled(pages: list[Scrape], server: Contained, said: int) -> None:
    """All is read, and that the log stands still is known: it is the container's, and nothing is wrong with it."""
    assert server.lines() == said, "its runtime reads all the same"
    all_hold(pages, lambda page: is_stalled(page) and not page.failed(), "every collector works")
    all_hold(pages, lambda page: page.labels("server_info", "container") == {server.name}, "the container's name")
    all_hold(pages, lambda page: lines(page) == said, "its log to the last line")
    all_hold(pages, lambda page: page.value("channel_state", channel="log", state="flat") == 1, "the log stands still")


def check_counted_once(exporter: Exporter, server: Contained, at_least: int) -> None:
    """Each line of the log; it stands still for a moment, for what asks the server's health makes lines."""
    with server.runtime_stopped():
        said = server.lines()
        exporter.wait_for("all lines", lambda page: lines(page) == said)
        pages = exporter.rest(1.0)

    assert said >= at_least
    all_hold(pages, lambda page: lines(page) == said, "no line twice")


def test_a_server_that_starts_while_its_runtime_is_stopped_is_stalled(engine_image: str, tmp_path: Path) -> None:
    with watched(engine_image, tmp_path, STARTS) as (server, exporter):
        server.wait_until_said("server_args=")
        with server.runtime_stopped():
            wait_until(lambda: len(server.writers()) > 1, PATIENCE, "ranks that block in a write")
            said = server.lines()
            exporter.wait_for("a stall", is_stalled)
            meanwhile = exporter.rest(2.0)
            check_stalled(meanwhile, server, said)
        exporter.wait_for("a server that is ready", is_ready)
        check_counted_once(exporter, server, LINES)
        afterwards = exporter.rest(1.0)

    all_hold(meanwhile, lambda page: reasons(page) == {"blocked_io"}, "what it waits for")
    all_hold(meanwhile, lambda page: page.labels("main_thread", "wait") == {"write"}, "what its ranks wait in")
    all_hold(meanwhile, lambda page: not page.labels("rank_suspect", "rank"), "they do not wait for one of them")
    all_hold(afterwards, lambda page: (page.state(NAME), reasons(page)) == ("idle", {"no_evidence"}), "all is well")


def test_a_server_that_starts_while_its_runtime_goes_on_is_not(engine_image: str, tmp_path: Path) -> None:
    with watched(engine_image, tmp_path, STARTS) as (server, exporter):
        begun = exporter.wait_for("the server", lambda page: page.state(NAME) not in ("", "gone")).at
        exporter.wait_for("a server that is ready", is_ready)
        check_counted_once(exporter, server, LINES)
        exporter.rest(max(0.0, begun + AS_LONG - time.time()))
        pages = exporter.scrapes.since(begun)

    assert {page.state(NAME) for page in pages} <= {"working", "slow", "quiet", "idle"}
    assert "blocked_io" not in set().union(*map(reasons, pages))


def test_a_server_that_is_ready_when_its_runtime_is_stopped_is_stalled(engine_image: str, tmp_path: Path) -> None:
    with watched(engine_image, tmp_path, SERVES) as (server, exporter):
        exporter.wait_for("a server that is ready", is_ready)
        with server.runtime_stopped():
            exporter.wait_for("all lines", lambda page: lines(page) == server.lines())
            said, answered = server.lines(), server.answered()
            exporter.wait_for("a stall", is_stalled)
            meanwhile = exporter.rest(2.0)
            check_stalled(meanwhile, server, said)
        exporter.wait_for("a server that answers", lambda page: answers(page) and not is_stalled(page))
        check_counted_once(exporter, server, said + answered)
        afterwards = exporter.rest(1.0)

    assert answered < REQUESTS, "a pipe has no end"
    all_hold(meanwhile, lambda page: reasons(page) == {"health_timeout"}, "what it does not do")
    all_hold(afterwards, lambda page: page.state(NAME) in ("idle", "working"), "no stall any more")
    all_hold(afterwards, lambda page: "health_timeout" not in reasons(page), "no reason any more")


def test_a_server_that_is_ready_while_its_runtime_goes_on_is_not(engine_image: str, tmp_path: Path) -> None:
    with watched(engine_image, tmp_path, SERVES) as (server, exporter):
        begun = exporter.wait_for("a server that is ready", is_ready).at
        answered = server.answered()
        exporter.rest(AS_LONG)
        check_counted_once(exporter, server, answered)
        pages = exporter.scrapes.since(begun)

    assert answered == REQUESTS
    assert {page.state(NAME) for page in pages} <= {"working", "idle"}
    assert "health_timeout" not in set().union(*map(reasons, pages))
