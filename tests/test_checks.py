"""Each check of docs/VERDICTS.md: where it speaks, and the twin in which it must not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stallwatch.config import Thresholds
from stallwatch.model import ChannelState
from stallwatch.verdict import Evidence, judge
from stallwatch.verdict.checks import CHECKS
from stallwatch.verdict.evidence import RankEvidence

T = Thresholds()

CPU_MOVES = (ChannelState("cpu", "moving", 3.0),)
CPU_FLAT = (ChannelState("cpu", "flat", 300.0),)


def two(**second: object) -> tuple[RankEvidence, ...]:
    """Two ranks alike, but for what is said of TP1."""
    alike = RankEvidence("TP0", markers=3, main_wait="futex", waits=frozenset(("futex", "poll")), progress_age=300.0)
    return alike, replace(alike, rank="TP1", **second)  # type: ignore[arg-type]


STUCK = Evidence(progress_age=300.0, channels=CPU_FLAT, live_ranks=2, ranks=two())
"""Nothing moves, everything is readable, long enough."""

READY = Evidence(ready=True, phase="ready", progress_age=3000.0, live_ranks=2, ranks=two())


def judged(evidence: Evidence, thresholds: Thresholds = T) -> tuple[str, str, str | None]:
    verdict = judge(evidence, thresholds, None, now=1000.0)
    return verdict.state, verdict.reason, verdict.suspect_rank


# --- working, slow, quiet, stalled -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress_age", "state"),
    [(0.0, "working"), (60.0, "working"), (60.1, "quiet"), (239.9, "quiet"), (240.0, "stalled"), (9e9, "stalled")],
)
def test_silence_grows_from_working_over_quiet_to_stalled(progress_age: float, state: str) -> None:
    assert judged(replace(STUCK, progress_age=progress_age))[0] == state


@pytest.mark.parametrize(
    ("phase", "phase_age", "state"),
    [
        ("loading_weights", 1800.0, "working"),
        ("loading_weights", 1801.0, "slow"),
        ("compiling", 1801.0, "slow"),
        ("capturing_graphs", 901.0, "slow"),
        ("capturing_graphs", 899.0, "working"),
        ("warming_up", 601.0, "slow"),
        ("warming_up", 599.0, "working"),
    ],
)
def test_progress_past_the_budget_of_its_phase_is_slow(phase: str, phase_age: float, state: str) -> None:
    assert judged(Evidence(phase=phase, phase_age=phase_age, progress_age=1.0))[0] == state


def test_a_budget_of_the_configuration_replaces_the_default() -> None:
    budgets = Thresholds(budgets={"loading_weights": 60.0})

    assert judged(Evidence(phase="loading_weights", phase_age=61.0), budgets)[0] == "slow"


def test_a_slow_start_that_stands_still_is_stalled_and_not_slow() -> None:
    assert judged(replace(STUCK, phase="loading_weights", phase_age=9000.0))[0] == "stalled"


# --- sufficient evidence -----------------------------------------------------------------------------------


def test_silence_while_storage_cannot_be_read_is_unknown() -> None:
    assert judged(replace(STUCK, storage_readable=False)) == ("unknown", "unreadable", None)


@pytest.mark.parametrize("log", ["absent", "unreadable"])
def test_silence_without_a_log_is_unknown(log: str) -> None:
    assert judged(replace(STUCK, log=log)) == ("unknown", "no_evidence", None)


@pytest.mark.parametrize("log", ["absent", "unreadable"])
@pytest.mark.parametrize(("progress_age", "state"), [(479.0, "unknown"), (480.0, "stalled")])
def test_without_a_log_gpu_evidence_needs_twice_as_long(log: str, progress_age: float, state: str) -> None:
    assert judged(replace(STUCK, log=log, gpu_readable=True, progress_age=progress_age))[0] == state


def test_gpu_evidence_does_not_stand_in_for_storage() -> None:
    assert judged(replace(STUCK, storage_readable=False, gpu_readable=True, progress_age=9e9))[0] == "unknown"


def test_storage_that_was_watched_for_less_than_stall_after_concludes_nothing() -> None:
    assert judged(replace(STUCK, watched_age=239.0)) == ("unknown", "no_evidence", None)
    assert judged(replace(STUCK, watched_age=240.0))[0] == "stalled"


def test_before_stall_after_too_little_evidence_is_no_matter() -> None:
    assert judged(replace(STUCK, storage_readable=False, progress_age=100.0))[0] == "quiet"


# --- reasons from absence ----------------------------------------------------------------------------------


def test_all_threads_asleep_is_idle_wait() -> None:
    assert judged(STUCK) == ("stalled", "idle_wait", None)


def test_threads_of_which_nothing_is_told_are_not_said_to_be_asleep() -> None:
    assert judged(replace(STUCK, threads_readable=False)) == ("stalled", "none", None)


def test_a_thread_that_usually_runs_is_not_asleep() -> None:
    running = two(waits=frozenset(("futex", "running")))

    assert judged(replace(STUCK, ranks=running))[:2] == ("stalled", "none")


@pytest.mark.parametrize(("disk_age", "reason"), [(60.0, "blocked_io"), (59.0, "idle_wait"), (None, "idle_wait")])
def test_a_thread_in_d_for_the_whole_window_is_blocked_io(disk_age: float | None, reason: str) -> None:
    assert judged(replace(STUCK, ranks=two(disk_age=disk_age)))[:2] == ("stalled", reason)


STOPPED = replace(STUCK, progress_age=61.0, ranks=two(stopped_age=61.0, main_wait="stopped"))


def test_a_stopped_rank_is_stalled_after_one_window_and_named() -> None:
    assert judged(STOPPED) == ("stalled", "stopped", "TP1")


@pytest.mark.parametrize(
    "twin",
    [
        replace(STOPPED, ranks=two(stopped_age=59.0)),
        replace(STOPPED, progress_age=59.0),
        replace(STOPPED, channels=CPU_MOVES),
        replace(STOPPED, storage_readable=False),
        replace(STOPPED, watched_age=59.0),
        replace(STOPPED, log="absent"),
        replace(STOPPED, ready=True),
    ],
)
def test_a_stopped_rank_is_not_stalled_early_or_while_something_moves_or_may_move(twin: Evidence) -> None:
    assert judged(twin)[:2] != ("stalled", "stopped")


def test_a_stopped_engine_is_named() -> None:
    engine = RankEvidence("engine", stopped_age=61.0, is_engine=True)

    assert judged(replace(STOPPED, ranks=(*two(), engine))) == ("stalled", "stopped", "engine")


def test_a_stopped_server_with_one_rank_names_none() -> None:
    ranks = (RankEvidence("TP0", stopped_age=61.0), RankEvidence("engine", is_engine=True))

    assert judged(replace(STOPPED, ranks=ranks)) == ("stalled", "stopped", None)


def test_several_stopped_ranks_name_the_one_that_is_behind() -> None:
    ranks = (
        RankEvidence("TP0", stopped_age=61.0, markers=3),
        RankEvidence("TP1", stopped_age=61.0, markers=2),
        RankEvidence("TP2", markers=3),
    )

    assert judged(replace(STOPPED, ranks=ranks)) == ("stalled", "stopped", "TP1")


# --- at most suspect ---------------------------------------------------------------------------------------


def test_cpu_that_moves_alone_is_a_spin_and_at_most_suspect() -> None:
    assert judged(replace(STUCK, channels=CPU_MOVES, progress_age=9e9))[:2] == ("suspect", "busy_spin")


def test_utilisation_that_moves_alone_is_suspect_without_a_reason() -> None:
    moving = (ChannelState("gpu_utilization", "moving", 1.0), *CPU_FLAT)

    assert judged(replace(STUCK, channels=moving))[:2] == ("suspect", "none")


def test_a_spin_of_which_too_little_is_readable_is_unknown() -> None:
    assert judged(replace(STUCK, channels=CPU_MOVES, storage_readable=False))[0] == "unknown"


def test_one_node_of_several_waits_for_another_and_never_pages() -> None:
    assert judged(replace(STUCK, nnodes=2, progress_age=9e9))[:2] == ("suspect", "waiting_remote")
    assert judged(replace(STUCK, nnodes=1, progress_age=9e9))[:2] == ("stalled", "idle_wait")


def test_a_silent_open_autotune_is_at_most_suspect() -> None:
    assert judged(replace(STUCK, autotune_open=True, progress_age=9e9))[:2] == ("suspect", "idle_wait")
    assert judged(replace(STUCK, phase="compiling", progress_age=9e9))[0] == "stalled"


# --- certain signs -----------------------------------------------------------------------------------------


def test_a_rank_that_is_gone_while_others_live_fails_at_once() -> None:
    dead = Evidence(progress_age=0.0, deaths=((0.5, "TP1"),), live_ranks=1, ranks=two(alive=False))

    assert judged(dead) == ("failed", "rank_dead", "TP1")


def test_a_dead_rank_of_a_ready_server_fails_it() -> None:
    assert judged(replace(READY, deaths=((0.5, "TP1"),), live_ranks=1)) == ("failed", "rank_dead", "TP1")


def test_a_dead_engine_is_named_too() -> None:
    engine = RankEvidence("engine", alive=False, is_engine=True)

    assert judged(replace(STUCK, deaths=((1.0, "engine"),), ranks=(*two(), engine)))[2] == "engine"


def test_ranks_that_end_after_a_shutdown_line_are_an_orderly_end() -> None:
    ending = replace(READY, deaths=((0.5, "TP1"),), live_ranks=1, shutdown_age=4.0)

    assert judged(ending)[0] == "idle"


def test_the_rank_seen_dead_first_is_named_and_none_if_several_went_at_once() -> None:
    dead = replace(STUCK, deaths=((9.0, "TP1"), (3.0, "TP0")), live_ranks=1)

    assert judged(dead)[2] == "TP1"
    assert judged(replace(dead, deaths=((9.0, "TP1"), (9.0, "TP0"))))[2] is None


def test_a_dead_rank_of_a_server_with_one_rank_is_not_named() -> None:
    ranks = (RankEvidence("TP0", alive=False), RankEvidence("engine", is_engine=True))

    assert judged(Evidence(deaths=((61.0, "TP0"),), ranks=ranks)) == ("failed", "rank_dead", None)


@pytest.mark.parametrize(("age", "state"), [(59.0, "idle"), (60.0, "failed")])
def test_ranks_that_are_all_gone_wait_a_minute_for_the_root(age: float, state: str) -> None:
    gone = replace(READY, deaths=((age, "TP0"), (age - 1, "TP1")), live_ranks=0, demand=0.0)

    assert judged(gone)[0] == state


def test_all_ranks_gone_and_then_the_root_of_a_ready_server_is_an_end() -> None:
    gone = replace(READY, deaths=((20.0, "TP0"), (20.0, "TP1")), live_ranks=0, root_gone_age=1.0)

    assert judged(gone) == ("gone", "none", None)


def test_the_root_gone_before_ready_has_failed() -> None:
    assert judged(replace(STUCK, root_gone_age=1.0, live_ranks=0)) == ("failed", "exited", None)
    assert judged(replace(STUCK, root_gone_age=1.0, deaths=((1.0, "TP1"),), live_ranks=0))[1:] == ("exited", "TP1")


def test_the_root_gone_after_ready_without_a_word_is_gone() -> None:
    assert judged(replace(READY, root_gone_age=1.0)) == ("gone", "none", None)


def test_the_root_gone_after_ready_and_an_old_fatal_line_has_failed() -> None:
    assert judged(replace(READY, root_gone_age=1.0, fatal_age=500.0, progress_age=5.0))[:2] == ("failed", "exited")


@pytest.mark.parametrize("evidence", [STUCK, READY])
def test_the_root_gone_with_a_shutdown_line_is_gone(evidence: Evidence) -> None:
    ended = replace(evidence, root_gone_age=1.0, shutdown_age=9.0, deaths=((2.0, "TP1"),), live_ranks=1)

    assert judged(ended) == ("gone", "none", None)


FATAL = replace(STUCK, fatal_age=10.0, progress_age=10.0)


@pytest.mark.parametrize(
    "confirmed",
    [
        replace(FATAL, root_gone_age=1.0),
        replace(FATAL, root_gone_age=69.0, fatal_age=10.0),
        replace(READY, fatal_age=10.0, root_gone_age=1.0),
        replace(FATAL, deaths=((3.0, "TP1"),), live_ranks=0),
        replace(FATAL, fatal_age=60.0, progress_age=60.0),
        replace(READY, fatal_age=10.0, shutdown_age=8.0, root_gone_age=1.0),
    ],
)
def test_a_fatal_line_with_a_death_near_it_or_a_window_of_silence_has_failed(confirmed: Evidence) -> None:
    assert judged(confirmed)[:2] == ("failed", "fatal_log")


@pytest.mark.parametrize(
    "twin",
    [
        FATAL,
        replace(FATAL, fatal_age=300.0, progress_age=59.0),
        replace(FATAL, fatal_age=59.0, progress_age=200.0),
        replace(FATAL, fatal_age=70.0, progress_age=70.0, channels=CPU_MOVES),
        replace(FATAL, fatal_age=70.0, progress_age=70.0, storage_readable=False),
        replace(READY, fatal_age=3.0, shutdown_age=2.5, root_gone_age=1.0),
        replace(READY, fatal_age=3.0, shutdown_age=30.0, root_gone_age=1.0),
    ],
)
def test_a_fatal_line_alone_or_in_an_orderly_end_is_no_failure(twin: Evidence) -> None:
    assert judged(twin)[0] != "failed"


def test_at_the_same_moment_a_dead_rank_comes_before_a_fatal_line_and_that_before_an_exit() -> None:
    dead = replace(FATAL, deaths=((1.0, "TP1"),), live_ranks=1)

    assert judged(dead)[1] == "rank_dead"
    assert judged(replace(dead, live_ranks=0, root_gone_age=1.0))[1] == "fatal_log"


def test_a_configured_server_that_never_came_is_gone() -> None:
    assert judged(Evidence(known=False, progress_age=9e9)) == ("gone", "none", None)


# --- ready -------------------------------------------------------------------------------------------------


def test_ready_is_idle_whatever_threads_gpu_and_log_do() -> None:
    for evidence in (READY, replace(READY, channels=CPU_MOVES), replace(READY, storage_readable=False, log="absent")):
        assert judged(replace(evidence, demand=0.0)) == ("idle", "none", None)


def test_ready_with_demand_unknown_is_idle_without_evidence() -> None:
    assert judged(READY) == ("idle", "no_evidence", None)


def test_ready_with_work_owed_is_working() -> None:
    assert judged(replace(READY, demand=2.0)) == ("working", "none", None)


def test_ready_and_stopped_or_silent_for_hours_is_still_idle() -> None:
    assert judged(replace(READY, demand=0.0, ranks=two(stopped_age=9e3)))[0] == "idle"


def test_names_of_working_servers_are_not_told() -> None:
    assert judged(replace(STUCK, ranks=two(markers=1), progress_age=100.0)) == ("quiet", "none", None)
    assert judged(replace(STUCK, ranks=two(markers=1))) == ("stalled", "idle_wait", "TP1")


# --- the table ---------------------------------------------------------------------------------------------


def test_of_a_plain_silence_no_check_speaks_but_the_last() -> None:
    assert [check.__name__ for check in CHECKS if check(STUCK, T, None) is not None] == ["still"]


def test_a_fatal_line_in_a_server_that_is_ready_needs_a_death() -> None:
    """Nothing moves in a server that nobody asks anything: its silence confirms nothing."""
    assert judged(replace(READY, fatal_age=600.0))[0] == "idle"
    assert judged(replace(READY, fatal_age=10.0, deaths=((5.0, "TP1"),)))[:2] == ("failed", "rank_dead")


# --- engines inside programs ---------------------------------------------------------------------------------

DEAD = tuple(replace(rank, alive=False) for rank in two())
ENDED = replace(READY, role="embedded", deaths=((900.0, "TP0"), (900.0, "TP1")), live_ranks=0, ranks=DEAD)


def test_an_engine_that_ended_inside_its_program_is_idle() -> None:
    """`del llm` in a notebook, or a script that goes on with the answers."""
    assert judged(ENDED)[:2] == ("idle", "none")
    assert judged(replace(ENDED, ready=False, log="absent"))[:2] == ("idle", "none")


@pytest.mark.parametrize(
    "not_done",
    [
        replace(ENDED, role="server"),
        replace(ENDED, ready=False),
        replace(ENDED, live_ranks=1, ranks=(DEAD[0], replace(DEAD[1], alive=True))),
    ],
)
def test_an_engine_that_died_before_its_time_or_in_part_has_failed(not_done: Evidence) -> None:
    assert judged(not_done)[:2] == ("failed", "rank_dead")


def test_a_program_without_a_log_that_exits_is_gone_and_one_whose_log_never_said_ready_has_failed() -> None:
    job = Evidence(role="embedded", log="absent", root_gone_age=5.0)

    assert judged(job)[:2] == ("gone", "none")
    assert judged(replace(job, log="readable"))[:2] == ("failed", "exited")
    assert judged(replace(job, role="server"))[:2] == ("failed", "exited")
    assert judged(replace(job, fatal_age=6.0))[0] == "failed"
