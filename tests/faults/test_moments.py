"""Clocks that jump, an exporter that does not run for a while, and one that ends at any moment.

Twins without any right: test_daemon.py (pauses and steps of injected clocks), test_state_file.py (what a killed process
left half written).
"""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.harness import free_port

from .harness import CONFIG, PATIENCE, STALL_AFTER, TICK, Exporter, Scrape, Victim, all_hold, stopped

pytestmark = pytest.mark.faults

SECOND = 10**9
HOUR = 3600.0
HERE = Path(__file__).parent
WRITER_KILLS, EXPORTER_KILLS = 200, 200


class Clocks:
    """The two clocks of a program that runs with the shim: seconds that are added to each."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self._file = folder / "clocks"
        self._file.write_bytes(struct.pack("<qq", 0, 0))
        self.environment = {"LD_PRELOAD": str(shim), "CLOCK_SHIM": str(self._file)}

    def add(self, wall: float, monotonic: float = 0.0) -> None:
        with self._file.open("r+b") as file:
            file.write(struct.pack("<qq", round(wall * SECOND), round(monotonic * SECOND)))


@contextmanager
def progress(log: Path) -> Iterator[None]:
    """A model is loaded meanwhile: a dot more every second."""
    ended = threading.Event()

    def load() -> None:
        with log.open("a") as file:
            while not ended.wait(1.0):
                file.write(".")
                file.flush()

    with log.open("a") as file:
        file.write("llama_model_load: loading model tensors\n..")
    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    try:
        yield
    finally:
        ended.set()
        loading.join(10)


def are_fresh(pages: Sequence[Scrape], ahead: float = 0.0) -> bool:
    """None of them is an old report that is served as new; `ahead`: of the exporter's wall clock."""
    oldest = 4 * TICK + 1.0
    return all((page.value("report_timestamp_seconds") or 0) - ahead > page.at - oldest for page in pages)


def test_steps_of_the_wall_clock_change_no_verdict_and_no_silence(folder: Path, victim: Path, shim: Path) -> None:
    clocks = Clocks(folder, shim)
    with Exporter(folder, environment=clocks.environment) as exporter:
        loading, quiet = Victim(victim, folder / "loading.log"), Victim(victim, folder / "quiet.log")
        with loading, quiet, progress(loading.output):
            quiet.output.write_text("build: 11434 (abc) with gcc\n")
            exporter.wait_for("a stall", lambda page: page.state(quiet.name) == "stalled")
            begun = time.time()
            for ahead in (HOUR, -HOUR, 0.0):
                clocks.add(ahead)
                time.sleep(2 * TICK + 0.5)
                assert are_fresh(exporter.rest(3.0), ahead)
            pages = exporter.scrapes.since(begun)
    all_hold(pages, lambda page: page.state(loading.name) == "working", "it goes on working")
    all_hold(pages, lambda page: page.state(quiet.name) == "stalled", "it goes on being stalled")
    all_hold(pages, lambda page: not page.failed(), "every collector works")
    silences = [page.value("log_silence_seconds", server=loading.name) or 0.0 for page in pages]
    assert max(silences) < 4.0
    silences = [page.value("log_silence_seconds", server=quiet.name) or 0.0 for page in pages]
    assert silences[-1] - silences[0] < 60.0
    assert not exporter.said("pause not counted")


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_a_start_behind_a_step_of_the_wall_clock_pages_nobody(
    ahead: float, folder: Path, victim: Path, shim: Path
) -> None:
    """The log's last change is as far away as the step; the server works all the same."""
    clocks = Clocks(folder, shim)
    clocks.add(ahead)
    loading = Victim(victim, folder / "loading.log")
    with loading, progress(loading.output), Exporter(folder, environment=clocks.environment) as exporter:
        exporter.wait_for_server(loading.name)
        pages = exporter.rest(3.0)
        assert {page.state(loading.name) for page in exporter.scrapes.since(0)} <= {"", "working", "quiet"}
    assert are_fresh(pages, ahead)
    assert pages[-1].state(loading.name) == "working"


def check_a_pause(exporter: Exporter, quiet: Victim, resumed: float, ahead: float = 0.0) -> None:
    """Nothing is stalled by the pause; but the silence goes on, and is one in the end."""
    stalled = exporter.wait_for("a stall", lambda page: page.state(quiet.name) == "stalled", 2 * STALL_AFTER + PATIENCE)
    pages = exporter.scrapes.since(resumed)
    before = [page for page in pages if page.at < stalled.at]
    assert stalled.at - resumed > 2.0
    all_hold(before, lambda page: page.state(quiet.name) in ("working", "quiet"), "no stall from the pause")
    assert are_fresh(pages, ahead)
    assert exporter.said("pause not counted") == 1


def wait_for_quiet(exporter: Exporter, quiet: Victim) -> None:
    exporter.wait_for("its silence", lambda page: page.state(quiet.name) == "quiet")


@pytest.mark.parametrize(
    "seconds", [STALL_AFTER + 1, pytest.param(600.0, marks=pytest.mark.minutes)], ids=["longer than a stall", "600 s"]
)
def test_an_exporter_that_was_stopped_pages_nobody_and_serves_nothing_old(
    seconds: float, folder: Path, victim: Path
) -> None:
    quiet = Victim(victim, folder / "quiet.log")
    with quiet, Exporter(folder) as exporter:
        exporter.is_checked = False  # while it is stopped it answers nobody
        wait_for_quiet(exporter, quiet)
        with stopped(exporter.pid):
            time.sleep(seconds)
        resumed = time.time()
        check_a_pause(exporter, quiet, resumed)
        later = [scrape for scrape in exporter.scrapes.history if scrape.at > resumed + 1]
        assert {scrape.status for scrape in later} <= {200, 503}


def test_ten_minutes_without_us_page_nobody(folder: Path, victim: Path, shim: Path) -> None:
    """A machine that was suspended, or a process that was stopped: both clocks are ten minutes further."""
    clocks = Clocks(folder, shim)
    quiet = Victim(victim, folder / "quiet.log")
    with quiet, Exporter(folder, environment=clocks.environment) as exporter:
        wait_for_quiet(exporter, quiet)
        exporter.leap = 600.0
        clocks.add(600.0, 600.0)
        time.sleep(2 * TICK)
        check_a_pause(exporter, quiet, time.time(), 600.0)


def test_a_writer_that_is_killed_leaves_a_whole_state(tmp_path: Path) -> None:
    """Killed at many random moments of opening, writing and replacing; each document is whole and none is lost."""
    command = [sys.executable, str(HERE / "killed_writer.py"), str(tmp_path / "state"), str(WRITER_KILLS), "7"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert answer.returncode == 0, answer.stderr
    read, half_written = (int(word) for word in answer.stdout.split())
    assert read > WRITER_KILLS // 2
    assert half_written > 0, "no moment hit a write: this shows nothing"


def test_an_exporter_that_is_killed_leaves_a_whole_state(folder: Path, victim: Path) -> None:
    """At 200 random moments of its life, each of which goes on from the state of the one before."""
    state, config = folder / "state", folder / "stallwatch.yml"
    config.write_text(CONFIG)
    serve = ["serve", "--config.file", str(config), "--state.dir", str(state)]
    serve += ["--web.listen-address", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, str(HERE / "killed_exporter.py"), str(state), str(EXPORTER_KILLS), "11", *serve]
    with Victim(victim, folder / "server.log") as server:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert answer.returncode == 0, answer.stderr[-2000:]
        read, newer = (int(word) for word in answer.stdout.splitlines()[-1].split())
        with Exporter(folder, "--state.dir", str(state)) as exporter:
            page = exporter.wait_for_server(server.name)
            assert exporter.said('before="taken up"') == 1
    assert read > EXPORTER_KILLS // 2
    assert newer > EXPORTER_KILLS // 10, "hardly a life came to a write: this shows nothing"
    assert answer.stderr.count("set aside") == exporter.said("set aside") == 0
    assert page.value("server_starts_total", server=server.name) == 1
