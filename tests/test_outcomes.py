"""How starts end is counted once each: ready, failed, stalled or stopped; and what stalls cost."""

from __future__ import annotations

import pytest

from recordings.corpus import make
from recordings.played import TRUTH, frameworks
from stallwatch.catalogue import derived_signals, read_signals
from stallwatch.exposition import Exposition
from stallwatch.model import OUTCOME_BUCKETS_SECONDS, ProcessId, Report, Server, StartOutcome
from stallwatch.outcomes import MOST_KINDS, Outcomes
from stallwatch.recordings.format import Header, Reader, known_names, told_servers
from stallwatch.recordings.replay import Replay


def server(**facts: str) -> Server:
    return Server("s", facts.pop("framework", "sglang"), "server", ProcessId(1, 1), 0.0, (), **facts)  # type: ignore[arg-type]


# --- sums --------------------------------------------------------------------------------------------------


def test_a_start_is_counted_in_every_bucket_it_fits() -> None:
    outcomes = Outcomes()
    outcomes.end(server(model="m", version="1"), "ready", "none", 300.0)
    outcomes.end(server(model="m", version="1"), "ready", "none", 9000.0)

    (kind,) = outcomes.told()

    assert (kind.framework, kind.version, kind.model, kind.speculative) == ("sglang", "1", "m", "")
    assert OUTCOME_BUCKETS_SECONDS == (120.0, 600.0, 1800.0, 7200.0)
    assert kind.durations == {"ready": ((0, 1, 1, 1, 2), 9300.0)}
    assert kind.failures == {}


def test_failures_have_a_reason_and_what_was_stopped_has_none() -> None:
    outcomes = Outcomes()
    for outcome, reason in [("failed", "exited"), ("failed", "exited"), ("stalled", "idle_wait"), ("stopped", "none")]:
        outcomes.end(server(), outcome, reason, 10.0)

    (kind,) = outcomes.told()

    assert kind.failures == {"exited": 2, "idle_wait": 1}
    assert {outcome: counts[-1] for outcome, (counts, _) in kind.durations.items()} == {
        "failed": 2,
        "stalled": 1,
        "stopped": 1,
    }


def test_with_and_without_a_feature_are_two_kinds() -> None:
    outcomes = Outcomes()
    outcomes.end(server(model="m", speculative="eagle"), "stalled", "idle_wait", 400.0)
    outcomes.end(server(model="m"), "ready", "none", 100.0)

    assert [(kind.speculative, list(kind.durations)) for kind in outcomes.told()] == [
        ("", ["ready"]),
        ("eagle", ["stalled"]),
    ]


def test_more_kinds_than_there_is_room_for_are_counted_as_dropped() -> None:
    outcomes = Outcomes()
    for number in range(MOST_KINDS + 5):
        outcomes.end(server(model=f"made-up-{number}"), "ready", "none", 1.0)
        outcomes.stall(server(model=f"made-up-{number}"), "idle_wait", 1.0)

    assert len(list(outcomes.told())) == MOST_KINDS
    assert outcomes.dropped == 5


# --- from recordings ---------------------------------------------------------------------------------------


def outcomes_of(case: str) -> StartOutcome | None:
    stage = make(case)
    lines = [line.encode() for line in stage.text().splitlines(keepends=True)]
    records = Reader(case, known_names(read_signals(), derived_signals())).read(iter(lines))
    header = next(records)
    assert isinstance(header, Header)
    run = Replay(header, frozenset(told_servers(iter(lines))), None, frameworks())
    for record in records:
        run.take(record)
    run.finish()
    return next(run.outcomes(), None)


@pytest.mark.parametrize(
    ("case", "outcome", "reason"),
    [
        ("scraped-exit", "failed", "exited"),
        ("h68-rank-dies", "failed", "rank_dead"),
    ],
)
def test_a_start_that_fails_is_counted_once_with_its_reason(case: str, outcome: str, reason: str) -> None:
    kind = outcomes_of(case)

    assert kind is not None
    assert {name: counts[-1] for name, (counts, _) in kind.durations.items()} == {outcome: 1}
    assert kind.failures == {reason: 1}


def test_a_start_that_becomes_ready_is_no_failure_and_cost_nothing() -> None:
    kind = outcomes_of(str(TRUTH["silent-deadlock"].twin))

    assert kind is not None
    assert kind.durations["ready"][0][-1] == 1
    assert (kind.failures, kind.stalled_seconds) == ({}, {})


def test_a_start_that_stands_costs_time_and_has_not_ended() -> None:
    kind = outcomes_of("silent-deadlock")

    assert kind is not None
    assert kind.durations == {}
    assert kind.stalled_seconds["idle_wait"] > 0


# --- on the page -------------------------------------------------------------------------------------------


def test_the_families_are_on_the_page() -> None:
    outcomes = Outcomes()
    outcomes.end(server(model="m"), "failed", "exited", 300.0)
    outcomes.stall(server(model="m"), "idle_wait", 60.0)
    report = Report(0.0, 0.0, (), (), (), {}, outcomes=tuple(outcomes.told()))

    text = Exposition().page(report).text(False).decode()

    kind = 'framework="sglang",version="",model="m",speculative=""'
    assert f'stallwatch_startup_outcome_duration_seconds_bucket{{{kind},outcome="failed",le="600.0"}} 1\n' in text
    assert f'stallwatch_startup_outcome_duration_seconds_sum{{{kind},outcome="failed"}} 300.0\n' in text
    assert f'stallwatch_startup_failures_total{{{kind},reason="exited"}} 1\n' in text
    assert f'stallwatch_stalled_seconds_total{{{kind},reason="idle_wait"}} 60.0\n' in text
