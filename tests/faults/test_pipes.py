"""The container runtime stands still: whoever reads a server's output reads no more, and its ranks block in a write.

Twin without processes: test_checks.py and test_naming.py, "a write that nobody takes".  With a real runtime:
tests/deploy/test_stopped_runtime.py.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from e2e.harness import StandIn, wait_until

from .harness import ALONE, PATIENCE, STALL_AFTER, Exporter, all_hold

pytestmark = pytest.mark.faults

PIPE_BYTES = 4096
NAME = "piped"
LATE = 10.0
"""The ranks do not block all at once; and a machine with two cores."""

BLINK, GAP = 0.1, 1.0
"""How long a slow reader reads, and how long it does not."""


class Runtime:
    """Copies what comes through a small pipe into a log, as a container runtime does."""

    def __init__(self, folder: Path) -> None:
        self.pipe, self.log = folder / "normal.log", folder / "container.log"
        os.mkfifo(self.pipe)
        self._kept = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)  # so that no end of it is ever closed
        fcntl.fcntl(self._kept, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with self.log.open("ab") as log:
            self._copier = subprocess.Popen(["cat", str(self.pipe)], stdout=log)

    def stop(self) -> None:
        self._copier.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._copier.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._copier.kill()
        self._copier.wait()
        os.close(self._kept)

    @contextmanager
    def reading_slowly(self) -> Iterator[None]:
        """A little now and then."""
        is_over = threading.Event()

        def blink() -> None:
            while not is_over.wait(GAP):
                self.go_on()
                time.sleep(BLINK)
                self.stop()
            self.go_on()

        reader = threading.Thread(target=blink)
        self.stop()
        reader.start()
        try:
            yield
        finally:
            is_over.set()
            reader.join()


@pytest.fixture
def runtime(folder: Path) -> Iterator[Runtime]:
    made = Runtime(folder)
    try:
        yield made
    finally:
        made.end()


def configuration(server: StandIn, runtime: Runtime) -> str:
    match = f'{{command: "sglang.launch_server .*--port {server.port}"}}'
    return ALONE + f'servers:\n  - {{name: {NAME}, framework: sglang, match: {match}, logs: ["{runtime.log}"]}}\n'


def until_it_loads(runtime: Runtime) -> None:
    wait_until(lambda: "Load weight begin" in runtime.log.read_text(), PATIENCE, "a rank that loads", 0.01)


def writers(server: StandIn) -> list[psutil.Process]:
    """Ranks that sleep in a write into a pipe, where the kernel tells."""
    return [each for each in server.family() if "pipe_write" in Path(f"/proc/{each.pid}/wchan").read_text()]


def test_a_server_that_blocks_in_a_write_is_stalled_and_says_so(folder: Path, runtime: Runtime, as_root: None) -> None:
    server = StandIn("normal", folder)
    with Exporter(folder, config=configuration(server, runtime)) as exporter, server:
        until_it_loads(runtime)
        runtime.stop()
        wait_until(lambda: len(writers(server)) > 1, PATIENCE, "ranks that block in a write")
        blocked_at = time.time()
        told = exporter.wait_for("a stall", lambda page: page.state(NAME) == "stalled", STALL_AFTER + LATE)
        stacks = subprocess.run(
            [exporter.command[0], "check", "--stacks", "--url", exporter.url],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        meanwhile = exporter.rest(1.0)
        runtime.go_on()
        afterwards = exporter.wait_for("a server that is ready", lambda page: page.state(NAME) == "idle")

    assert told.at - blocked_at <= STALL_AFTER + LATE
    assert told.labels("server_reason", "reason") == {"blocked_io"}
    assert told.labels("main_thread", "wait") == {"write"}
    assert not told.labels("rank_suspect", "rank"), "they wait for their reader, and not for one of them"
    assert "pipe_write" in stacks
    assert afterwards.labels("server_reason", "reason") == {"no_evidence"}, "ready; whether it has work is not known"
    assert "write" not in afterwards.labels("main_thread", "wait")
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")


def test_a_server_whose_reader_is_slow_is_not(folder: Path, runtime: Runtime) -> None:
    server = StandIn("normal", folder)
    with Exporter(folder, config=configuration(server, runtime)) as exporter, server:
        until_it_loads(runtime)
        begun = exporter.wait_for("the server", lambda page: page.state(NAME) not in ("", "gone")).at
        with runtime.reading_slowly():
            exporter.wait_for("a server that is ready", lambda page: page.state(NAME) == "idle")
        states = {page.state(NAME) for page in exporter.scrapes.since(begun)}

    assert states <= {"working", "slow", "quiet", "idle"}
