"""When a server's own time-outs strike: each clock with what begins it, and with what ends it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feed import WALL, Feed, Serving, server
from stallwatch.daemon import own_timeouts
from stallwatch.deadlines import NO_TIMEOUTS, STRUCK_SECONDS, Limit, OwnTimeouts
from stallwatch.exposition import render
from stallwatch.frameworks import load_frameworks
from stallwatch.model import CLOCKS, EVENTS, Event, Report
from stallwatch.recordings.format import Reader, header_line, server_document
from stallwatch.recordings.replay import replay_lines
from stallwatch.sources.discovery import read_facts
from stallwatch.timeline import Timeline

KNOWN = {framework.name: framework for framework in load_frameworks()}
OWN = own_timeouts(KNOWN.values())
TWO = ("TP0", "TP1")


@dataclass(slots=True)
class Run(Feed):
    """A feed whose timeline knows the time-outs of the frameworks."""

    server: Any = field(default_factory=lambda: server(tensor_parallel=2, version="0.5.9"))

    def __post_init__(self) -> None:
        Feed.__post_init__(self)
        self.timeline.timeouts_of = lambda framework: OWN.get(framework, NO_TIMEOUTS)

    def deadlines(self, t: float) -> dict[str, float]:
        """Clock -> second of the test at which it strikes."""
        return {clock: round(at - WALL, 3) for clock, at in self.tick(t).deadlines.items()}


def started(**facts: Any) -> Run:
    run = Run(server=server(**{"tensor_parallel": 2, "version": "0.5.9", **facts}))
    run.look(0.0)
    run.tick(0.0)
    return run


def told(run: Run, *events: tuple[float, str, str | None]) -> Run:
    for t, event, rank in events:
        run.tell(t, event, rank)
    return run


Told = tuple[float, str, str | None]

POSITIVE: dict[str, tuple[dict[str, Any], list[Told], float]] = {
    "barrier": ({}, [(10, "load_begin", "TP0"), (10, "load_begin", "TP1"), (50, "load_end", "TP0")], 50 + 480),
    "nccl": ({}, [(10, "dist_init_begin", "TP0"), (20, "dist_init_begin", "TP1")], 10 + 600),
    "gloo": ({}, [(10, "capture_begin", "TP0"), (11, "capture_begin", "TP1")], 10 + 1800),
    "warmup": ({}, [(10, "listening", None)], 10 + 600),
    "handshake": ({"framework": "vllm", "timeouts": {"handshake": 600.0}}, [(10, "args", None)], 10 + 600),
}
"""Clock -> facts of the server, what its log says, and the second at which it strikes."""

TWINS: dict[str, list[Told]] = {
    "barrier": [(60, "load_end", "TP1")],
    "nccl": [(30, "dist_init_end", "TP0")],
    "gloo": [(30, "capture_end", "TP1")],
    "warmup": [(30, "ready", None)],
    "handshake": [(30, "listening", None)],
}
"""Clock -> what its log says next when all goes well."""


@pytest.mark.parametrize("clock", POSITIVE)
def test_a_time_out_that_runs_says_when_it_strikes(clock: str) -> None:
    facts, events, at = POSITIVE[clock]

    assert told(started(**facts), *events).deadlines(70.0)[clock] == at


@pytest.mark.parametrize("clock", POSITIVE)
def test_a_time_out_ends_with_what_was_waited_for(clock: str) -> None:
    facts, events, _ = POSITIVE[clock]

    assert clock not in told(started(**facts), *events, *TWINS[clock]).deadlines(70.0)


def owing(generated: float | None = 9.0, **facts: Any) -> Run:
    """Ready; work is owed from second 10 on."""
    run = started(**facts)
    run.serving = Serving(running=0.0, generated=generated)
    run.look(5.0)
    run.tell(5.0, "ready")
    run.tick(5.0)
    run.serving.running = 2.0
    run.look(10.0)
    return run


@pytest.mark.parametrize(("framework", "clock"), [("sglang", "watchdog"), ("vllm", "execute")])
def test_a_time_out_of_serving_runs_since_work_is_owed(framework: str, clock: str) -> None:
    run = owing(framework=framework)
    run.quiet_until(10.0, 100.0)

    assert run.deadlines(100.0) == {clock: 310.0}


@pytest.mark.parametrize(("framework", "clock"), [("sglang", "watchdog"), ("vllm", "execute")])
def test_no_time_out_of_serving_runs_while_tokens_come(framework: str, clock: str) -> None:
    run = owing(framework=framework)
    for t in range(15, 105, 5):
        run.serving.generated = float(t)
        run.quiet_until(t - 5.0, float(t))

    assert clock not in run.deadlines(100.0)


@pytest.mark.parametrize("what", ["nothing is owed", "no counter tells of tokens", "one process", "switched off"])
def test_no_time_out_of_serving_runs_when_nobody_can_say_so(what: str) -> None:
    framework = "vllm" if what == "one process" else "sglang"
    facts: dict[str, Any] = {"framework": framework}
    if what == "one process":
        facts["tensor_parallel"] = 1
    if what == "switched off":
        facts["timeouts"] = {"watchdog": 0.0}
    run = owing(generated=None if what == "no counter tells of tokens" else 9.0, **facts)
    if what == "nothing is owed":
        run.serving.running = 0.0
    run.quiet_until(10.0, 100.0)

    assert run.deadlines(100.0) == {}


# --- what begins and ends them, closely -------------------------------------------------------------------------


def test_who_still_loads_does_not_end_the_barrier_the_others_wait_at() -> None:
    """A slow rank is a rank that works: the barrier kills it all the same."""
    run = told(started(), (10, "load_end", "TP0"), (20, "load_begin", "TP1"))
    run.tell(60.0, "load_progress", "TP1", done=3, total=9)

    assert run.deadlines(70.0) == {"barrier": 490.0}


def test_a_marker_of_a_rank_that_waited_ends_the_wait_of_all() -> None:
    run = told(started(nnodes=2), (10, "load_end", "TP0"), (11, "load_end", "TP1"))
    assert run.deadlines(20.0) == {"barrier": 490.0}  # ranks of the other node are waited for
    run.tell(30.0, "memory_pool", "TP1")

    assert run.deadlines(40.0) == {}


def test_the_draft_model_has_a_barrier_of_its_own() -> None:
    run = told(started(), (10, "load_end", "TP0"), (20, "load_end", "TP1"), (40, "draft_load_end", "TP1"))

    assert run.deadlines(50.0) == {"barrier": 520.0}


def test_each_step_of_a_capture_has_the_whole_time() -> None:
    run = told(started(), (10, "capture_begin", "TP0"))
    run.tell(60.0, "capture_progress", "TP0", done=3, total=9)

    assert run.deadlines(70.0) == {"gloo": 1860.0}


def test_copies_of_the_model_wait_apart_and_the_first_to_strike_is_shown() -> None:
    run = told(started(data_parallel=2), (10, "load_end", "DP0-TP0"), (30, "load_end", "DP1-TP0"))
    assert run.deadlines(40.0) == {"barrier": 490.0}
    run.tell(50.0, "load_end", "DP0-TP1")

    assert run.deadlines(60.0) == {"barrier": 510.0}


@pytest.mark.parametrize(
    ("facts", "came", "deadline"),
    [
        ({"pipeline_parallel": 2}, ["PP0-TP0", "PP0-TP1"], {}),  # the other stage loads on, and waits for itself
        ({"pipeline_parallel": 2}, ["PP0-TP0", "PP1-TP0"], {"barrier": 490.0}),
        ({"tensor_parallel": 4}, ["DP0-TP0", "DP1-TP1", "DP2-TP2", "DP3-TP3"], {}),  # attention alone is parallel
        ({"tensor_parallel": 4}, ["DP0-TP0", "DP1-TP1", "DP2-TP2"], {"barrier": 490.0}),
        ({"tensor_parallel": 1, "expected_ranks": ("a", "b")}, ["a"], {"barrier": 490.0}),
        ({"tensor_parallel": 1, "expected_ranks": ("a", "b")}, ["a", "b"], {}),
    ],
)
def test_who_waits_for_whom_at_a_barrier(facts: dict[str, Any], came: list[str], deadline: dict[str, float]) -> None:
    run = told(started(**facts), *((10.0, "load_end", rank) for rank in came))

    assert run.deadlines(20.0) == deadline


RANKS = st.sampled_from([None, "TP0", "TP1", "DP0-TP1", "PP1-TP0", "engine", "TP999999"])


@settings(max_examples=60, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(EVENTS), RANKS), max_size=30), copies=st.integers(1, 3))
def test_whatever_a_log_says_each_clock_runs_once_and_ends_with_the_start(
    events: list[tuple[str, str | None]], copies: int
) -> None:
    run = started(data_parallel=copies, timeouts={"handshake": 600.0})
    for number, (event, rank) in enumerate(events):
        run.timeline.tell([Event(float(number), "s", event, rank, "log", {"done": float(number), "total": 99.0})])

    assert all(0 <= at <= 31 + 1800 for at in run.deadlines(31.0).values())
    assert len(run.now.deadlines.waits) <= len(CLOCKS) * 6
    run.tell(32.0, "ready")
    assert run.deadlines(33.0).keys() <= {"watchdog"}


def test_a_model_of_one_process_waits_for_nobody() -> None:
    run = told(started(tensor_parallel=1), (10, "dist_init_begin", "TP0"), (20, "load_end", "TP0"))

    assert run.deadlines(30.0) == {}


@pytest.mark.parametrize("over", ["ready", "shutdown", "args"])
def test_nothing_of_a_start_runs_when_it_is_over(over: str) -> None:
    run = told(started(), (5, "args", None), (10, "load_end", "TP0"), (20, over, None))

    assert "barrier" not in run.deadlines(30.0)


def test_nothing_runs_of_a_server_that_is_gone() -> None:
    run = told(started(), (10, "load_end", "TP0"))
    run.root = False
    run.look(20.0)

    assert run.deadlines(20.0) == {}


def test_a_time_out_that_did_not_strike_is_none() -> None:
    run = told(started(), (10, "load_end", "TP0"))

    assert run.deadlines(490.0 + STRUCK_SECONDS) == {"barrier": 490.0}
    assert run.deadlines(491.0 + STRUCK_SECONDS) == {}


def test_a_rank_that_does_not_say_its_name_ends_nothing() -> None:
    run = told(started(), (10, "load_end", "TP0"))
    run.tell(20.0, "memory_pool", None, nameless=1.0)

    assert run.deadlines(30.0) == {"barrier": 490.0}


# --- how long -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "seconds"), [("0.4.6", 300), ("0.5.5", 300), ("0.5.9", 480), ("0.9.0", 480)])
def test_the_release_says_how_long(version: str, seconds: float) -> None:
    assert told(started(version=version), (10, "load_end", "TP0")).deadlines(20.0) == {"barrier": 10.0 + seconds}


def test_of_an_unknown_release_the_newest_is_believed() -> None:
    assert told(started(version=""), (10, "load_end", "TP0")).deadlines(20.0) == {"barrier": 490.0}


def test_a_line_that_says_itself_what_begins_is_believed() -> None:
    """The same event, of a line that only an old release prints."""
    run = started()
    run.tell(10.0, "load_end", "TP0", clock="barrier", timeout=300.0)

    assert run.deadlines(20.0) == {"barrier": 310.0}


def test_what_the_server_was_told_counts() -> None:
    run = told(started(timeouts={"nccl": 1200.0}), (10, "dist_init_begin", "TP0"))

    assert run.deadlines(20.0) == {"nccl": 1210.0}


@pytest.mark.parametrize(
    ("framework", "words", "environ", "found"),
    [
        ("sglang", "--dist-timeout 1200 --watchdog-timeout=1e9", {}, {"nccl": 1200.0}),
        ("sglang", "--watchdog-timeout 3000", {"SGLANG_WARMUP_TIMEOUT": "90.5"}, {"watchdog": 3000.0, "warmup": 90.5}),
        ("sglang", "--tp 8", {}, {}),
        ("vllm", "serve m", {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "900"}, {"execute": 900.0}),
        ("vllm", "m --api-server-count 4", {}, {"handshake": 600.0}),
        ("vllm", "m -asc=2", {"VLLM_ENGINE_READY_TIMEOUT_S": "3600"}, {"handshake": 3600.0}),
        ("vllm", "m --api-server-count 1", {"VLLM_ENGINE_READY_TIMEOUT_S": "3600"}, {}),
        ("vllm", "m", {"VLLM_ENGINE_READY_TIMEOUT_S": "3600"}, {}),
        ("vllm", "m", {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "sk-secret"}, {}),
    ],
)
def test_arguments_and_variables_set_time_outs(
    framework: str, words: str, environ: dict[str, str], found: dict[str, float]
) -> None:
    assert read_facts(KNOWN[framework], words.split(), environ).timeouts == found


def test_an_older_release_than_all_that_were_examined_has_the_oldest_time_out() -> None:
    own = OwnTimeouts({"load_end": (Limit("barrier", 1.0, ("1.0", "2.0")), Limit("barrier", 2.0, ("3.0",)))})

    assert [own.opened_by("load_end", version)["barrier"] for version in ("0.1", "2.5", "3.0.post1", "9")] == [
        1,
        1,
        2,
        2,
    ]
    assert own.opened_by("load_begin", "1.0") == {}


def test_every_clock_is_one_that_some_framework_has() -> None:
    opened = {pattern.clock for framework in KNOWN.values() for pattern in framework.patterns if pattern.clock}
    told_by = {
        clock for framework in KNOWN.values() for clock, timeout in framework.timeouts.items() if timeout.seconds
    }

    assert opened | told_by == set(CLOCKS)


# --- shown --------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_moment() -> None:
    run = told(started(), (10, "load_end", "TP0"))
    page = partial(render, Report(WALL, 0.0, (), (run.tick(20.0),), (), {}))

    assert (
        f'stallwatch_server_deadline_timestamp_seconds{{server="s",clock="barrier"}} {WALL + 490}\n' in page().decode()
    )


def lines(recorded: Iterable[dict[str, Any]], **facts: Any) -> list[bytes]:
    document = server_document(server(tensor_parallel=2, **facts), Feed().thresholds)
    return [header_line(5.0, WALL, [document]).encode(), *(json.dumps(line).encode() + b"\n" for line in recorded)]


def replayed(recorded: Iterable[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    (found,) = replay_lines(Reader("r", {}).read(lines(recorded, **facts)), {"s"}, None, None)
    final: dict[str, Any] = found["final"]
    return final


LOADED = {"t": 10.0, "server": "s", "event": "load_end", "rank": "TP0"}
LATER = [{"t": float(t), "server": "s", "line": "repeat"} for t in range(20, 65, 5)]


def test_a_recording_that_ends_in_a_wait_says_when_it_would_have_ended() -> None:
    assert replayed([LOADED, *LATER])["deadlines"] == {"barrier": 490.0}
    assert replayed([LOADED, *LATER], timeouts={"barrier": 100.0})["deadlines"] == {"barrier": 110.0}


def test_a_recording_in_which_all_came_says_nothing_of_it() -> None:
    assert "deadlines" not in replayed([LOADED, {**LOADED, "rank": "TP1"}, *LATER])


def test_a_timeline_that_knows_no_framework_knows_no_time_out() -> None:
    assert Timeline().timeouts_of("sglang") is NO_TIMEOUTS
