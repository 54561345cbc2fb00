"""The two stories of the design, and their neighbours, live: stand-in servers watched by a real exporter."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stallwatch.drill.story import PLANTED_SECRET

from .harness import (
    LOOK,
    PATIENCE,
    SAMPLE_SECONDS,
    SLACK,
    STALL_AFTER,
    SUSPECT_AFTER,
    TICK,
    WINDOW,
    Exporter,
    StandIn,
    fetch,
    rest,
)

pytestmark = pytest.mark.e2e

RANKS = {f"TP{number}" for number in range(8)}
FEW: Mapping[str, float] = {"ranks": 4, "threads": 50}
"""Of the servers beside the first: two cores bear six of them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One exporter, and everything it watches at the same time."""

    exporter: Exporter
    deadlock: StandIn
    slow: StandIn
    spin: StandIn
    stopped: StandIn
    dead: StandIn
    phantom: StandIn
    phantom_loaded: float


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The first has loaded before the others begin, and is on its way to a stall while they load."""
    folder = tmp_path_factory.mktemp("stories")
    with ExitStack() as stack:
        exporter = stack.enter_context(Exporter(folder))

        def start(condition: str, **settings: float) -> StandIn:
            server = stack.enter_context(StandIn(condition, folder, None, **settings))
            server.wait_for_line("Load weight begin", int(settings.get("ranks", 8)))
            return server

        deadlock = start("barrier-deadlock", culprit=5)
        deadlock.wait_for_line("Load weight end", 8)
        beside = (
            start("slow-load", slow_seconds=3 * STALL_AFTER, **FEW),
            start("busy-spin", spinner=2, **FEW),
            start("stopped-rank", culprit=2, **FEW),
            start("dead-rank", culprit=1, load_seconds=15, **FEW),
        )
        phantom = start("phantom-hang", slow_seconds=3 * STALL_AFTER)
        phantom.wait_for_line("Load weight end", 8)
        yield Stage(exporter, deadlock, *beside, phantom, time.time())


def test_a_phantom_hang_reads(stage: Stage) -> None:
    """Before it is too late: it does so for a minute."""
    culprit = stage.phantom.rank(3)
    before = culprit.io_counters()
    time.sleep(3.0)
    after = culprit.io_counters()

    assert after.read_chars - before.read_chars >= 8 << 20
    assert after.read_bytes - before.read_bytes >= 1 << 20


def test_silent_deadlock_is_stalled_and_the_sleeping_rank_is_named(stage: Stage) -> None:
    exporter, server = stage.exporter, stage.deadlock
    last_progress = server.log.stat().st_mtime

    stalled = exporter.watch.wait_for(
        server.name, STALL_AFTER + PATIENCE, state="stalled", reason="idle_wait", suspect_rank="TP5"
    )

    last = exporter.watch.last()
    assert stalled - last_progress <= STALL_AFTER + 2 * TICK + LOOK + SAMPLE_SECONDS + SLACK
    assert stalled - last_progress >= STALL_AFTER - LOOK
    assert exporter.watch.states(server.name) <= {"working", "quiet", "stalled"}
    assert {rank["rank"] for rank in last.servers[server.name]["ranks"]} == RANKS
    assert all(rank["load_progress"] == 1.0 for rank in last.servers[server.name]["ranks"])
    assert min(last.values("stallwatch_threads", server=server.name, wait="futex").values()) >= 100
    assert last.values("stallwatch_rank_suspect", server=server.name) == {(("rank", "TP5"),): 1.0}
    assert not last.values("stallwatch_port_listening", server=server.name, port=str(server.port)).get((), 0)
    assert PLANTED_SECRET not in last.page
    assert parse(server.log)["markers"]["load_end"] == 8


def test_check_answers_a_silent_deadlock_at_once_from_dated_evidence(stage: Stage, tmp_path: Path) -> None:
    server, config = stage.deadlock, tmp_path / "check.yml"
    config.write_text("verdict: {window: 6s, stall_after: 20s}\nintervals: {tick: 500ms, processes: 1s, threads: 1s}\n")
    rest(max(0.0, server.log.stat().st_mtime + STALL_AFTER - time.time()), server)

    began = time.monotonic()
    answer = stallwatch(
        "check",
        "--for",
        "8s",
        "--server",
        server.name,
        "--url",
        "http://127.0.0.1:1",
        "--format",
        "json",
        "--config.file",
        str(config),
    )

    assert time.monotonic() - began < 30  # ten in quiet; it waits for nothing that takes minutes
    document = json.loads(answer.stdout)
    assert [(s["state"], s["suspect_rank"]) for s in document["servers"]] == [("stalled", "TP5")], answer
    assert answer.returncode == 1


def test_a_stopped_rank_is_named_after_one_window(stage: Stage) -> None:
    server = stage.stopped
    server.wait_for_line("Load weight end", 4)

    stalled = stage.exporter.watch.wait_for(
        server.name, STALL_AFTER, state="stalled", reason="stopped", suspect_rank="TP2"
    )

    assert stalled - server.log.stat().st_mtime < STALL_AFTER


def test_a_dead_rank_fails_the_server_within_seconds(stage: Stage) -> None:
    server = stage.dead
    server.wait_for_line("Load weight end", 4)
    died = server.log.stat().st_mtime

    failed = stage.exporter.watch.wait_for(
        server.name, PATIENCE, state="failed", reason="rank_dead", suspect_rank="TP1"
    )

    assert failed - died <= 2 * LOOK + 1.0 + 2 * TICK + SAMPLE_SECONDS + SLACK


def test_phantom_hang_is_never_stalled(stage: Stage) -> None:
    """The same picture, but one rank still reads: for three times `stall_after` nothing else moves."""
    exporter, server = stage.exporter, stage.phantom
    slow_from = stage.phantom_loaded + WINDOW
    server.wait_for_line("ready to roll", within=3 * STALL_AFTER + PATIENCE)
    ready = server.log.stat().st_mtime
    exporter.watch.wait_for(server.name, PATIENCE, state="idle", phase="ready", ready=True)
    rest(STALL_AFTER / 2, server)

    assert exporter.watch.states(server.name) <= {"working", "slow", "idle"}
    reading = [doc for at, doc in exporter.watch.of(server.name, slow_from) if at < ready - 2]
    assert {doc["state"] for doc in reading} <= {"working", "slow"}
    assert all(rank["load_progress"] == 1.0 for rank in reading[-1]["ranks"])
    moving = {channel["channel"] for channel in reading[-1]["channels"] if channel["state"] == "moving"}
    assert "storage" in moving
    assert "log" not in moving
    log = parse(server.log)
    assert (log["lines"], log["ready"], log["markers"]["load_end"]) == (312, True, 8)
    assert b"ready to roll" in server.log.read_bytes().split(b"\n")[308]
    assert [fetch(f"http://127.0.0.1:{server.port}{path}")[0] for path in ("/health", "/v1/models")] == [200, 200]


def test_a_slow_reader_is_working_for_three_times_stall_after(stage: Stage) -> None:
    """The twin of the throttled vLLM load that needs no cgroup: bytes trickle, the log is silent."""
    exporter, server = stage.exporter, stage.slow
    server.wait_for_line("ready to roll", within=3 * STALL_AFTER + PATIENCE)
    exporter.watch.wait_for(server.name, PATIENCE, state="idle", phase="ready")

    assert exporter.watch.states(server.name) <= {"working", "slow", "idle"}
    phases = exporter.watch.phases(server.name)
    assert phases.index("loading_weights") < phases.index("ready")


def test_a_waiter_that_spins_is_suspect_and_never_stalled(stage: Stage) -> None:
    exporter, server = stage.exporter, stage.spin
    server.wait_for_line("Load weight end", 4)
    suspect = exporter.watch.wait_for(server.name, STALL_AFTER + 15, state="suspect", reason="busy_spin")
    rest(max(0.0, suspect + SUSPECT_AFTER - time.time()), server)

    assert "stalled" not in exporter.watch.states(server.name)
    assert exporter.watch.last().servers[server.name]["state"] == "suspect"


def parse(log: Path) -> dict[str, Any]:
    """What `stallwatch parse` says about one log."""
    answer = stallwatch("parse", "--format", "json", str(log))
    assert answer.returncode == 0, answer
    assert PLANTED_SECRET not in answer.stdout
    (document,) = json.loads(answer.stdout)["files"]
    assert isinstance(document, dict)
    return document


def stallwatch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("stallwatch")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
