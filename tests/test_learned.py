"""How long a start takes on this node is learned; it only tells working from slow."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from feed import WALL, Feed, server
from stallwatch.config import Thresholds
from stallwatch.exposition import render
from stallwatch.frameworks import load_frameworks
from stallwatch.learned import (
    CEILING_SECONDS,
    FACTOR,
    FLOOR_SECONDS,
    MOST_KINDS,
    MOST_STARTS,
    Learned,
    kind_of,
    plain_kinds,
)
from stallwatch.memory import Memory
from stallwatch.model import Report, Server
from stallwatch.sources.discovery import read_facts
from stallwatch.timeline import MIB

GIB = float(1 << 30)
SPEC = server(model="org/m", version="0.5.9", tensor_parallel=2)
COLD, WARM = 100 * GIB, 2 * GIB


def taught(*starts: tuple[float, float], of: Server = SPEC) -> Learned:
    """Starts by seconds in the load and bytes read from storage."""
    learned = Learned()
    for number, (seconds, read) in enumerate(starts):
        learned.learn(of, {"loading_weights": seconds}, read, WALL + number)
    return learned


def budget(learned: Learned, phase: str = "loading_weights", of: Server = SPEC, **configured: float) -> float:
    return learned.applied(of, Thresholds(budgets=configured)).budget(phase)


DEFAULT = Thresholds().budget("loading_weights")


def test_what_two_starts_took_makes_the_budget() -> None:
    learned = taught((300.0, COLD), (200.0, COLD))

    assert budget(learned) == FACTOR * 300.0
    assert budget(learned, "compiling") == Thresholds().budget("compiling")  # of that nothing was seen


def test_a_start_that_takes_long_here_may_take_long() -> None:
    assert budget(taught((3000.0, COLD))) == FACTOR * 3000.0


@pytest.mark.parametrize(("seconds", "found"), [(1.0, FLOOR_SECONDS), (90000.0, CEILING_SECONDS)])
def test_there_is_a_floor_and_a_ceiling(seconds: float, found: float) -> None:
    assert budget(taught((seconds, COLD), (seconds, COLD))) == found


def test_one_start_alone_makes_no_budget_shorter() -> None:
    assert budget(taught((10.0, COLD))) == DEFAULT


def test_warm_starts_make_no_budget_shorter_until_a_cold_one_was_seen() -> None:
    warm = [(10.0, GIB / 4)] * 4
    assert budget(taught(*warm)) == DEFAULT
    assert budget(taught(*warm, (600.0, COLD))) == FACTOR * 600.0


def test_many_warm_starts_do_not_drive_out_a_cold_one() -> None:
    learned = taught((600.0, COLD), *[(20.0, WARM)] * (3 * MOST_STARTS))

    assert budget(learned) == FACTOR * 600.0


def test_where_no_reads_are_accounted_nothing_becomes_shorter() -> None:
    assert budget(taught(*[(10.0, 0.0)] * 9)) == DEFAULT


def test_a_configured_budget_wins() -> None:
    assert budget(taught((300.0, COLD), (300.0, COLD)), loading_weights=77.0) == 77.0


@pytest.mark.parametrize(
    "change",
    [
        {"framework": "vllm"},
        {"version": "0.5.10"},
        {"model": "org/other"},
        {"tensor_parallel": 4},
        {"pipeline_parallel": 2},
        {"data_parallel": 2},
        {"nnodes": 2},
        {"speculative": "EAGLE"},
        {"eager": True},
    ],
)
def test_another_kind_of_start_learns_nothing_from_it(change: dict[str, Any]) -> None:
    learned = taught((10.0, COLD), (10.0, COLD))

    assert budget(learned) == FLOOR_SECONDS
    assert budget(learned, of=replace(SPEC, **change)) == DEFAULT


def test_kinds_are_bounded_and_the_least_recent_goes_first() -> None:
    learned = taught((10.0, COLD), (10.0, COLD))
    for number in range(MOST_KINDS):
        budget(learned)  # it is asked for again and again
        learned.learn(replace(SPEC, model=f"m{number}"), {"compiling": 1.0}, 0.0, WALL)

    assert len(learned.kinds) == MOST_KINDS
    assert budget(learned) == FLOOR_SECONDS
    assert budget(learned, "compiling", replace(SPEC, model="m0")) == Thresholds().budget("compiling")


# --- similar starts -------------------------------------------------------------------------------------------------


def test_starts_of_the_same_model_are_told_with_and_without_speculation() -> None:
    learned = taught((10.0, COLD), (10.0, COLD), (10.0, COLD))
    speculative = replace(SPEC, speculative="EAGLE3", version="0.5.12")
    assert learned.similar(speculative) == {"no": (3, WALL + 2)}
    learned.learn(speculative, {}, 0.0, WALL + 60)

    assert learned.similar(SPEC) == {"yes": (1, WALL + 60), "no": (3, WALL + 2)}
    assert learned.similar(replace(SPEC, tensor_parallel=8)) == {}


def test_the_page_shows_them() -> None:
    feed = Feed(server=replace(SPEC, speculative="EAGLE"))
    feed.episodes.learned = taught((10.0, COLD), (10.0, COLD))
    feed.look(0.0)
    page = render(Report(WALL, 0.0, (), (feed.tick(0.0),), (), {})).decode()

    assert 'stallwatch_server_similar_starts{server="s",speculative="no"} 2\n' in page
    assert f'stallwatch_server_similar_start_timestamp_seconds{{server="s",speculative="no"}} {WALL + 1}\n' in page
    assert 'similar_starts{server="s",speculative="yes"}' not in page


# --- from a start -------------------------------------------------------------------------------------------------


def start(feed: Feed, begin: float, load: float, ready: bool = True, came_late: float = 0.0) -> float:
    """A cold start that loads for so many seconds; the second at which it was over."""
    feed.server = replace(feed.server, started_at=WALL + begin - came_late, starts=feed.server.starts + 1)
    for counters in feed.of.values():
        counters.storage = 0.0
    feed.look(begin)
    feed.tick(begin)
    feed.tell(begin, "load_begin", "TP0")
    t = begin
    while t < begin + load:
        t += 20.0
        feed.of["TP0"].storage += 500 * MIB
        feed.look(t)
        feed.tick(t)
    if ready:
        feed.tell(t, "ready")
        feed.look(t + 5.0)
        feed.tick(t + 5.0)
    return t + 10.0


def fresh() -> Feed:
    return Feed(server=replace(SPEC, starts=0), interval=20.0)


def test_a_phase_that_takes_much_longer_than_before_is_slow_and_no_page() -> None:
    feed = fresh()
    at = start(feed, 0.0, 200.0)
    at = start(feed, at, 200.0)
    start(feed, at, 380.0, ready=False)
    before = feed.tick(at + 385.0)
    after = [feed.tick(at + 385.0 + t).verdict.state for t in (10.0, 20.0, 40.0)]

    assert (before.verdict.state, before.phase_budget_seconds) == ("working", 400.0)
    assert after == ["working", "slow", "slow"]


@pytest.mark.parametrize("seconds", [1.0, 600.0, 9000.0])
def test_no_page_depends_on_it(seconds: float) -> None:
    """Moves now and then, then stands still: only `slow` may differ."""
    told = []
    for known in (Learned(), taught((seconds, COLD), (seconds, COLD))):
        feed = Feed(server=SPEC)
        feed.episodes.learned = known
        feed.look(0.0)
        feed.tell(0.0, "load_begin", "TP0")
        states = []
        for number in range(40):
            feed.of["TP0"].storage += 50 * MIB
            states += [verdict.state for verdict in feed.quiet_until(number * 60.0, number * 60.0 + 60.0)]
        states += [verdict.state for verdict in feed.quiet_until(2400.0, 3000.0)]
        told.append(states)
    without, learned = ([state.replace("slow", "working") for state in states] for states in told)

    assert without == learned
    assert {"working", "quiet", "stalled"} <= set(learned)
    assert told[0] != told[1]


def test_the_first_start_of_a_kind_has_the_default_budget() -> None:
    feed = fresh()
    at = start(feed, 0.0, 200.0)

    assert feed.tick(at).similar == {"no": (1, WALL + 205.0)}
    feed.server = replace(feed.server, model="org/other", started_at=WALL + at)
    feed.look(at)
    feed.tell(at, "load_begin", "TP0")
    assert feed.tick(at).phase_budget_seconds == DEFAULT


def test_a_start_whose_beginning_nobody_saw_teaches_nothing() -> None:
    feed = fresh()
    start(feed, 0.0, 200.0, came_late=100.0)

    assert feed.episodes.learned.kinds == {}


def test_a_start_that_stood_still_teaches_nothing() -> None:
    feed = fresh()
    at = start(feed, 0.0, 100.0, ready=False)
    assert feed.quiet_until(at, at + 300.0)[-1].state == "stalled"
    feed.tell(at + 300.0, "ready")
    feed.tick(at + 300.0)

    assert feed.episodes.learned.kinds == {}


def test_a_start_that_never_becomes_ready_teaches_nothing() -> None:
    feed = fresh()
    start(feed, start(feed, 0.0, 100.0, ready=False), 100.0, ready=False)

    assert feed.episodes.learned.kinds == {}


# --- kept -----------------------------------------------------------------------------------------------------------


def seal(*parts: str | int | bytes) -> str:
    return f"{hash(parts) & (1 << 64) - 1:016x}"


def remembered(document: Any, boot: str = "this boot") -> Feed:
    """A process of ours that begins with such a document."""
    feed, memory = fresh(), Memory(seal, boot)
    memory.load(document, 1000.0)
    feed.timeline.see([feed.server], 0.0)
    memory.meet(feed.timeline, feed.episodes, [feed.server], 0.0, 1000.0)
    return feed


def written() -> Any:
    feed = remembered({})
    start(feed, start(feed, 0.0, 200.0), 200.0)
    memory = Memory(seal, "this boot")
    memory.meet(feed.timeline, feed.episodes, [], 0.0, 0.0)
    document = memory.document(feed.timeline, feed.episodes, (), {}, 0.0, 0.0).text()
    assert "org/m" not in document
    return json.loads(document)


@pytest.mark.parametrize("boot", ["this boot", "another"])
def test_what_was_learned_outlasts_a_restart_and_a_boot(boot: str) -> None:
    feed = remembered(written(), boot)

    assert budget(feed.episodes.learned) == 400.0
    assert feed.episodes.learned.similar(SPEC) == {"no": (2, WALL + 415.0)}


def test_what_was_learned_is_kept_while_no_server_was_found() -> None:
    memory = Memory(seal, "this boot")
    memory.load(written(), 1000.0)
    feed = Feed()

    document = memory.document(feed.timeline, feed.episodes, (), {}, 0.0, 0.0)
    assert json.loads(document.text())["learned"] == written()["learned"]


@pytest.mark.parametrize(
    "broken",
    [
        [["k", 0, 1.0, 1.0, [], []]],
        [["k", 1, -1.0, 1.0, [], []]],
        [["k", 1, 1.0, 1e300, [], []]],
        [["k", 1, 1.0, 1.0, [[[99, 1.0]]], []]],
        [["k", 1, 1.0, 1.0, [[[1, -5.0]]], []]],
        [["k", 1, 1.0, 1.0, [[[1, "soon"]]], []]],
        [["org/secret model", 1, 1.0, 1.0, [], []]],
        [["k"]],
        "nothing",
    ],
)
def test_what_is_no_start_is_not_taken_in(broken: Any) -> None:
    assert remembered({"learned": broken}).episodes.learned.kinds == {}


def test_kinds_come_back_as_they_were() -> None:
    learned = taught((300.0, COLD), (20.0, WARM))
    back = {key: kind_of(*rest) for key, *rest in json.loads(json.dumps(plain_kinds(learned.kinds)))}

    assert back == learned.kinds


# --- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "words", "eager"),
    [
        ("vllm", "m --enforce-eager", True),
        ("vllm", "m", False),
        ("sglang", "--disable-cuda-graph", True),
        ("sglang", "--tp 2", False),
        ("trtllm", "m", False),
    ],
)
def test_whether_graphs_are_captured_is_told_by_the_arguments(framework: str, words: str, eager: bool) -> None:
    known = {each.name: each for each in load_frameworks()}

    assert read_facts(known[framework], words.split()).eager is eager
