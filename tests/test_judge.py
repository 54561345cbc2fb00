"""One episode keeps one `since` and one name; judging is total."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.cards import Spin
from stallwatch.config import Thresholds
from stallwatch.model import (
    AMBIGUOUS_CHANNELS,
    CHANNEL_STATES,
    CHANNELS,
    PHASES,
    READ_REASONS,
    REASONS,
    STATES,
    WAITS,
    ChannelState,
    Verdict,
)
from stallwatch.verdict import Evidence, judge
from stallwatch.verdict.evidence import RankEvidence

T = Thresholds()


def ranks(markers: int = 3) -> tuple[RankEvidence, ...]:
    return (RankEvidence("TP0", markers=3), RankEvidence("TP1", markers=markers))


STUCK = Evidence(progress_age=300.0, live_ranks=2, ranks=ranks(2))
SPIN = replace(STUCK, channels=(ChannelState("cpu", "moving", 1.0),))


def test_since_stays_while_the_state_stays() -> None:
    first = judge(STUCK, T, None, 1000.0)
    second = judge(replace(STUCK, progress_age=305.0), T, first, 1005.0)

    assert (first.state, first.since) == ("stalled", 1000.0)
    assert (second.state, second.since) == ("stalled", 1000.0)


def test_since_is_now_when_the_state_changes() -> None:
    stalled = judge(STUCK, T, None, 1000.0)

    assert judge(replace(STUCK, progress_age=1.0), T, stalled, 1005.0).since == 1005.0


def test_another_reason_is_the_same_episode() -> None:
    first = judge(STUCK, T, None, 1000.0)
    second = judge(replace(STUCK, ranks=(replace(STUCK.ranks[0], disk_age=99.0), STUCK.ranks[1])), T, first, 1005.0)

    assert (first.reason, second.reason) == ("idle_wait", "blocked_io")
    assert second.since == 1000.0


def test_the_name_sticks_while_the_episode_lasts() -> None:
    first = judge(STUCK, T, None, 1000.0)
    second = judge(replace(STUCK, ranks=ranks(9)), T, first, 1005.0)

    assert (first.suspect_rank, second.suspect_rank) == ("TP1", "TP1")


def test_the_name_sticks_from_suspect_to_stalled_and_back() -> None:
    suspect = judge(SPIN, T, None, 1000.0)
    stalled = judge(replace(STUCK, ranks=ranks(9)), T, suspect, 1005.0)
    again = judge(replace(SPIN, ranks=ranks(9)), T, stalled, 1010.0)

    assert [v.state for v in (suspect, stalled, again)] == ["suspect", "stalled", "suspect"]
    assert [v.suspect_rank for v in (suspect, stalled, again)] == ["TP1"] * 3


def test_a_name_that_is_found_later_is_taken() -> None:
    nobody = judge(replace(STUCK, ranks=ranks()), T, None, 1000.0)

    assert nobody.suspect_rank is None
    assert judge(STUCK, T, nobody, 1005.0).suspect_rank == "TP1"


def test_another_episode_finds_its_own_name() -> None:
    first = judge(STUCK, T, None, 1000.0)
    between = judge(replace(STUCK, progress_age=1.0), T, first, 1005.0)
    second = judge(replace(STUCK, ranks=ranks(9)), T, between, 1300.0)

    assert (between.suspect_rank, second.suspect_rank) == (None, "TP0")


def test_a_failure_names_its_own_rank_after_a_stall() -> None:
    stalled = judge(STUCK, T, None, 1000.0)
    dead = replace(STUCK, deaths=((1.0, "TP0"),), live_ranks=1)

    assert judge(dead, T, stalled, 1005.0) == Verdict("failed", "rank_dead", 1005.0, "TP0")


def test_failed_stays_with_its_first_reason_and_name_whatever_comes_after() -> None:
    failed = judge(replace(STUCK, deaths=((1.0, "TP0"),), live_ranks=1), T, None, 1000.0)
    later = (
        replace(STUCK, progress_age=0.0),
        replace(STUCK, ready=True),
        replace(STUCK, root_gone_age=1.0, shutdown_age=2.0),
        replace(STUCK, fatal_age=1.0, root_gone_age=1.0, deaths=((1.0, "TP1"),)),
    )

    assert [judge(evidence, T, failed, 2000.0) for evidence in later] == [failed] * len(later)


def test_a_stall_that_moves_again_is_over() -> None:
    stalled = judge(STUCK, T, None, 1000.0)

    assert judge(replace(STUCK, progress_age=3.0), T, stalled, 1005.0).state == "working"


# --- total -------------------------------------------------------------------------------------------------

SECONDS = st.one_of(
    st.sampled_from((0.0, 9.9, 10.0, 15.0, 30.0, 59.9, 60.0, 119.9, 120.0, 239.9, 240.0, 480.0, math.inf)),
    st.floats(0, 1e6),
)
"""The limits of the rules are where they go wrong."""

AGES = st.one_of(st.none(), SECONDS)
CHANNEL = st.builds(ChannelState, st.sampled_from(CHANNELS), st.sampled_from(CHANNEL_STATES), AGES)
CLASSES = st.one_of(st.none(), st.frozensets(st.sampled_from(WAITS)))
NAMES = st.sampled_from(("TP0", "TP1", "TP2", "engine", "DP0-TP1"))
RANK_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "rank": NAMES,
    "alive": st.sampled_from((True, False, None)),
    "markers": st.integers(0, 3),
    "main_wait": st.one_of(st.none(), st.sampled_from(WAITS)),
    "waits": CLASSES,
    "progress_age": AGES,
    "stopped_age": AGES,
    "disk_age": AGES,
    "traced": st.booleans(),
    "is_engine": st.booleans(),
    "unread": st.frozensets(st.sampled_from(CHANNELS), max_size=2),
}
RANK = st.builds(RankEvidence, **RANK_FIELDS)
READ_REASON = st.one_of(st.none(), st.sampled_from(READ_REASONS))
EVIDENCE_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "role": st.sampled_from(("server", "embedded")),
    "nnodes": st.integers(0, 3),
    "known": st.sampled_from((True, True, True, False)),
    "ready": st.booleans(),
    "phase": st.sampled_from(PHASES),
    "phase_age": SECONDS,
    "progress_age": SECONDS,
    "stretch": SECONDS,
    "channels": st.lists(CHANNEL, max_size=8).map(tuple),
    "storage_readable": st.booleans(),
    "watched_age": SECONDS,
    "log": st.sampled_from(("readable", "unreadable", "absent")),
    "log_speaks": st.booleans(),
    "gpu_readable": st.booleans(),
    "blinks": st.booleans(),
    "unreadable_reason": READ_REASON,
    "log_reason": READ_REASON,
    "autotune_open": st.booleans(),
    "root_gone_age": AGES,
    "scope_alive": st.sampled_from((True, False, None)),
    "stopping": st.sampled_from((True, False, None)),
    "shutdown_age": AGES,
    "deaths": st.lists(st.tuples(SECONDS, st.sampled_from(("TP0", "TP1", "engine"))), max_size=3).map(tuple),
    "oom_age": AGES,
    "live_ranks": st.integers(0, 3),
    "missing": st.integers(0, 3),
    "missing_ranks": st.sampled_from(((), ("TP5",), ("TP5", "TP6"))),
    "fatal_age": AGES,
    "ranks": st.lists(RANK, max_size=4).map(tuple),
    "threads_readable": st.booleans(),
    "cpu_readable": st.booleans(),
    "frozen": st.booleans(),
    "stale_lock": st.booleans(),
    "held_lock": st.booleans(),
    "port_foreign": st.booleans(),
    "demand": st.one_of(st.none(), st.just(0.0), st.floats(0, 10)),
    "unserved_age": AGES,
    "tokens_age": SECONDS,
    "tokens_counted": st.booleans(),
    "paused": st.booleans(),
    "timeouts": st.integers(0, 5),
    "timeouts_span": SECONDS,
    "cards_rest": st.sampled_from((True, False, None)),
    "compile_open": st.booleans(),
    "spins": st.lists(st.builds(Spin, NAMES, SECONDS, st.booleans()), max_size=3).map(tuple),
    "cards_work": st.booleans(),
    "busy": st.frozensets(NAMES),
    "lost_cards": st.lists(st.tuples(SECONDS, st.one_of(NAMES, st.just("frontend"))), max_size=2).map(tuple),
    "cards_reason": st.sampled_from(("", "shared", "learning", *READ_REASONS)),
    "driver_hangs": st.booleans(),
}
EVIDENCE = st.builds(Evidence, **EVIDENCE_FIELDS)


def test_whatever_evidence_there_is_is_tried() -> None:
    assert set(EVIDENCE_FIELDS) == {field.name for field in fields(Evidence)}
    assert set(RANK_FIELDS) == {field.name for field in fields(RankEvidence)}


PREVIOUS = st.one_of(
    st.none(),
    st.builds(
        Verdict,
        st.sampled_from(STATES),
        st.sampled_from(REASONS),
        st.floats(0, 900),
        st.one_of(st.none(), st.just("TP1")),
    ),
)


@given(EVIDENCE, PREVIOUS)
def test_any_evidence_gives_a_verdict_of_the_closed_sets(evidence: Evidence, previous: Verdict | None) -> None:
    verdict = judge(evidence, T, previous, 1000.0)

    assert verdict.state in STATES
    assert verdict.reason in REASONS
    assert verdict.since <= 1000.0
    assert verdict.suspect_rank is None or verdict.state in ("suspect", "stalled", "failed")


@given(EVIDENCE, PREVIOUS)
def test_judging_twice_changes_nothing(evidence: Evidence, previous: Verdict | None) -> None:
    once = judge(evidence, T, previous, 1000.0)

    assert judge(evidence, T, once, 1000.0) == once


@given(EVIDENCE, PREVIOUS, st.sampled_from(AMBIGUOUS_CHANNELS))
def test_nothing_is_stalled_while_an_ambiguous_channel_moves(
    evidence: Evidence, previous: Verdict | None, channel: str
) -> None:
    """But a server that owes work and whose cards are known to do none: a collective that spins polls."""
    moving = replace(evidence, channels=(*evidence.channels, ChannelState(channel, "moving", 1.0)))
    verdict = judge(moving, T, previous, 1000.0)

    assert verdict.state != "stalled" or (verdict.reason in SERVING and evidence.cards_rest)


SERVING = ("no_tokens", "health_timeout")
"""Reasons of a server that is ready; how long its start would have been silent does not matter then."""


@given(EVIDENCE, PREVIOUS, st.floats(0, 59.9))
def test_nothing_is_stalled_without_storage_or_while_progress_is_young(
    evidence: Evidence, previous: Verdict | None, young: float
) -> None:
    starting = replace(evidence, ready=False)
    unreadable = replace(starting, storage_readable=False, blinks=False)
    for twin in (unreadable, replace(starting, progress_age=young)):
        assert judge(twin, T, previous, 1000.0).state != "stalled"


@given(EVIDENCE, PREVIOUS)
def test_a_look_that_fails_begins_no_stall(evidence: Evidence, previous: Verdict | None) -> None:
    blind = replace(evidence, ready=False, storage_readable=False, blinks=True)

    stalled = judge(blind, T, previous, 1000.0).state == "stalled"
    assert not stalled or (previous is not None and previous.state == "stalled")


@given(EVIDENCE, PREVIOUS)
def test_nothing_that_somebody_holds_is_stalled(evidence: Evidence, previous: Verdict | None) -> None:
    traced = tuple(replace(rank, traced=True) for rank in (*evidence.ranks, RankEvidence("TP7")))

    assert judge(replace(evidence, frozen=True), T, previous, 1000.0).state != "stalled"
    assert judge(replace(evidence, ranks=traced), T, previous, 1000.0).state != "stalled"


@pytest.mark.parametrize("change", [{"frozen": True}, {"ranks": (RankEvidence("TP0", traced=True),)}])
def test_a_look_that_fails_beside_one_that_sees_a_holder_ends_the_stall(change: dict[str, Any]) -> None:
    stalled = Verdict("stalled", "idle_wait", 0.0)
    blind = Evidence(known=True, progress_age=240.0, blinks=True)

    assert judge(blind, T, stalled, 1000.0).state == "stalled"
    assert judge(replace(blind, **change), T, stalled, 1000.0).state == "suspect"


@given(EVIDENCE, PREVIOUS)
def test_nothing_is_stalled_by_elapsed_time_alone(evidence: Evidence, previous: Verdict | None) -> None:
    """Ready and nothing owed, or a start of which nothing but the clock is known."""
    idle = replace(evidence, ready=True, demand=0.0, unserved_age=None)
    unseen = Evidence(progress_age=evidence.progress_age, storage_readable=False, log="absent")

    assert judge(idle, T, previous, 1000.0).state != "stalled"
    assert judge(unseen, T, previous, 1000.0).state != "stalled"


@given(EVIDENCE, PREVIOUS)
def test_a_name_is_that_of_a_rank_that_is_known(evidence: Evidence, previous: Verdict | None) -> None:
    known = {rank.rank for rank in evidence.ranks} | {*evidence.missing_ranks}
    known |= {name for _, name in (*evidence.deaths, *evidence.lost_cards)}
    verdict = judge(evidence, T, previous, 1000.0)

    assert verdict.suspect_rank in known | {None, previous.suspect_rank if previous else None}


@given(EVIDENCE)
def test_a_failure_stays_one_whatever_is_seen_after(evidence: Evidence) -> None:
    known = replace(evidence, known=True)
    verdict = judge(known, T, Verdict("failed", "fatal_log", 5.0, "TP1"), 1000.0)

    assert verdict == Verdict("failed", "fatal_log", 5.0, "TP1")


@pytest.mark.parametrize("state", STATES)
def test_every_state_but_failed_gives_way_to_progress(state: str) -> None:
    verdict = judge(Evidence(progress_age=1.0), T, Verdict(state, "none", 5.0), 1000.0)

    assert verdict.state == ("failed" if state == "failed" else "working")


def test_a_reason_that_was_found_outlives_a_look_that_finds_none() -> None:
    """One thread that happens to run at one look must not change the page's text."""
    stalled = judge(STUCK, T, None, 1000.0)
    running = tuple(replace(rank, waits=frozenset(("running",))) for rank in STUCK.ranks)

    assert stalled.reason == "idle_wait"
    assert judge(replace(STUCK, ranks=running), T, stalled, 1005.0).reason == "idle_wait"
    assert judge(replace(STUCK, ranks=running), T, None, 1005.0).reason == "none"
