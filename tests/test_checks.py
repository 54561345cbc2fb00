"""Each check of docs/VERDICTS.md: where it speaks, and the twin in which it must not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from stallwatch.cards import Spin
from stallwatch.config import Thresholds
from stallwatch.model import ChannelState, Verdict
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


@pytest.mark.parametrize(("wait", "reason"), [("write", "blocked_io"), ("other", "idle_wait")])
def test_a_write_that_nobody_takes_is_blocked_io(wait: str, reason: str) -> None:
    """The runtime that reads a container's output is stopped, and the pipe is full."""
    blocked = tuple(replace(each, main_wait=wait) for each in two())

    assert judged(replace(STUCK, ranks=blocked))[:2] == ("stalled", reason)


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


@pytest.mark.parametrize(("silence", "state"), [(120.0, "failed"), (60.0, "failed"), (59.0, "working")])
def test_a_fatal_line_after_which_the_start_went_on_for_a_while_may_still_have_ended_it(
    silence: float, state: str
) -> None:
    """The line stood 120 s ago; the last move was at it, or up to a window later."""
    assert judged(replace(FATAL, fatal_age=120.0, progress_age=silence))[0] == state


def test_a_fatal_line_after_which_the_start_went_on_for_a_window_was_none() -> None:
    assert judged(replace(FATAL, fatal_age=161.0, progress_age=100.0))[0] == "quiet"
    assert judged(replace(FATAL, fatal_age=9000.0, progress_age=100.0))[0] == "quiet"


@pytest.mark.parametrize(("unserved", "state"), [(60.0, "failed"), (59.0, "working"), (None, "working")])
def test_a_fatal_line_in_a_server_that_owes_work_and_stands_still_has_failed(
    unserved: float | None, state: str
) -> None:
    """Its first process may live on and answer health checks after the engine died elsewhere."""
    owing = replace(READY, fatal_age=70.0, demand=2.0, unserved_age=unserved, channels=CPU_FLAT)

    assert judged(owing)[0] == state


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
    assert judged(replace(ENDED, ready=False, log_speaks=False))[:2] == ("idle", "none")


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
    assert judged(replace(job, log="readable", log_speaks=False))[:2] == ("gone", "none")
    assert judged(replace(job, role="server"))[:2] == ("failed", "exited")
    assert judged(replace(job, role="server", log="readable", log_speaks=False))[:2] == ("failed", "exited")
    assert judged(replace(job, fatal_age=6.0))[0] == "failed"


# --- out of memory -------------------------------------------------------------------------------------------

DIED = replace(STUCK, progress_age=5.0, deaths=((10.0, "TP1"),), live_ranks=1)
"""TP1 was seen gone ten seconds ago."""


@pytest.mark.parametrize("oom_age", [10.0 + 30.0, 10.0, 0.0])
def test_a_kill_by_the_kernel_near_a_death_explains_it(oom_age: float) -> None:
    assert judged(replace(DIED, oom_age=oom_age)) == ("failed", "out_of_memory", "TP1")


@pytest.mark.parametrize("oom_age", [None, 10.0 + 30.1, 600.0])
def test_a_kill_of_something_else_long_before_explains_no_death(oom_age: float | None) -> None:
    assert judged(replace(DIED, oom_age=oom_age)) == ("failed", "rank_dead", "TP1")


@pytest.mark.parametrize(("death_age", "reason"), [(15.0, "out_of_memory"), (15.1, "rank_dead")])
def test_a_kill_may_be_seen_a_moment_after_the_death(death_age: float, reason: str) -> None:
    died = replace(DIED, deaths=((death_age, "TP1"),), oom_age=0.0)

    assert judged(died)[1] == reason


def test_a_kill_on_the_node_is_no_failure_of_a_server_that_lost_nobody() -> None:
    assert judged(replace(STUCK, progress_age=5.0, oom_age=0.0))[0] == "working"
    assert judged(replace(READY, oom_age=0.0))[0] == "idle"


def test_the_first_process_killed_for_memory_after_ready_has_failed_and_is_not_just_gone() -> None:
    assert judged(replace(READY, root_gone_age=2.0, oom_age=5.0)) == ("failed", "out_of_memory", None)
    assert judged(replace(READY, root_gone_age=2.0, oom_age=33.0))[0] == "gone"


@pytest.mark.parametrize("orderly", [{"shutdown_age": 12.0}, {"stopping": True}])
def test_a_kill_during_an_orderly_end_is_not_the_end_of_it(orderly: dict[str, object]) -> None:
    """Another container on the node dies while this one is stopped."""
    ending = replace(DIED, oom_age=8.0, **orderly)  # type: ignore[arg-type]

    assert judged(ending)[0] == "working"
    assert judged(replace(ending, root_gone_age=1.0, live_ranks=0))[0] == "gone"


def again(evidence: Evidence, reason: str, rank: str | None = "TP1") -> tuple[str, str, str | None]:
    """Judged a second time, after a failure."""
    verdict = judge(evidence, T, Verdict("failed", reason, 990.0, rank), now=1000.0)
    return verdict.state, verdict.reason, verdict.suspect_rank


@pytest.mark.parametrize("reason", ["rank_dead", "exited"])
@pytest.mark.parametrize(("oom_age", "expected"), [(0.0, "out_of_memory"), (None, None), (60.0, None)])
def test_a_kill_that_is_read_after_the_failure_becomes_its_reason(
    reason: str, oom_age: float | None, expected: str | None
) -> None:
    assert again(replace(DIED, oom_age=oom_age), reason) == ("failed", expected or reason, "TP1")


def test_a_kill_much_later_is_another_story() -> None:
    assert again(replace(DIED, deaths=((16.0, "TP1"),), oom_age=0.0), "rank_dead")[1] == "rank_dead"


def test_a_kill_does_not_replace_what_the_log_said() -> None:
    assert again(replace(DIED, oom_age=0.0), "fatal_log")[1] == "fatal_log"


def test_a_kill_at_a_later_death_does_not_become_the_reason_of_the_first() -> None:
    """A rank died by itself; at the teardown a minute later the kernel killed something."""
    torn_down = replace(DIED, deaths=((60.0, "TP1"), (1.0, "TP0")), oom_age=0.0)

    assert again(torn_down, "rank_dead")[1] == "rank_dead"


def test_a_kill_during_an_orderly_end_does_not_become_the_reason_of_an_earlier_failure() -> None:
    assert again(replace(DIED, oom_age=0.0, shutdown_age=5.0), "exited")[1] == "exited"


@pytest.mark.parametrize(
    ("before", "blinks", "state"),
    [
        ("stalled", True, "stalled"),
        ("suspect", True, "suspect"),
        ("quiet", True, "unknown"),
        ("stalled", False, "unknown"),
    ],
)
def test_one_look_that_fails_undoes_no_stall(before: str, blinks: bool, state: str) -> None:
    blind = replace(STUCK, storage_readable=False, blinks=blinks)

    assert judge(blind, T, Verdict(before, "idle_wait", 900.0, "TP1"), 1000.0).state == state


# --- orderly ends, and what ends together with the first process -----------------------------------------------


@pytest.mark.parametrize("evidence", [STUCK, READY])
def test_a_first_process_that_goes_while_its_unit_is_stopped_is_gone(evidence: Evidence) -> None:
    stopped = replace(evidence, stopping=True, root_gone_age=1.0, deaths=((2.0, "TP1"),), live_ranks=1)

    assert judged(stopped) == ("gone", "none", None)


def test_ranks_that_go_while_the_unit_is_stopped_have_not_died() -> None:
    stopped = replace(READY, stopping=True, deaths=((2.0, "TP1"),), live_ranks=1)

    assert judged(stopped)[0] == "idle"
    assert judged(replace(stopped, stopping=False))[:2] == ("failed", "rank_dead")


def test_a_fatal_line_before_the_shutdown_line_is_no_orderly_end() -> None:
    ended = replace(READY, root_gone_age=1.0, shutdown_age=2.0)

    assert judged(replace(ended, fatal_age=3.1))[:2] == ("failed", "fatal_log")
    assert judged(replace(ended, fatal_age=3.0))[0] == "gone"
    assert judged(replace(ended, fatal_age=1.0))[0] == "gone"


EXITED = replace(STUCK, progress_age=5.0, root_gone_age=0.0, live_ranks=0)
"""The first process went without a word, before ready."""


@pytest.mark.parametrize("age", [0.0, 9.9, 10.0, 500.0])
def test_a_start_that_ends_together_with_its_container_is_gone(age: float) -> None:
    assert judged(replace(EXITED, root_gone_age=age, scope_alive=False)) == ("gone", "none", None)


def test_a_start_that_ends_in_no_container_has_failed_at_once() -> None:
    assert judged(EXITED) == ("failed", "exited", None)


@pytest.mark.parametrize(("age", "state"), [(0.0, "working"), (9.9, "working"), (10.0, "failed")])
def test_the_rest_of_the_container_has_a_moment_to_end_too(age: float, state: str) -> None:
    assert judged(replace(EXITED, root_gone_age=age, scope_alive=True))[0] == state


@pytest.mark.parametrize(("stopping", "state"), [(False, "failed"), (None, "gone"), (True, "gone")])
def test_a_unit_that_failed_by_itself_was_ended_by_nobody(stopping: bool | None, state: str) -> None:
    """Every crash of a unit's main process empties the unit."""
    assert judged(replace(EXITED, root_gone_age=1.0, scope_alive=False, stopping=stopping))[0] == state


def test_a_fatal_line_is_not_undone_by_a_container_that_ends_with_its_first_process() -> None:
    """The server is the first process of its container: they always end together."""
    crashed = replace(EXITED, scope_alive=False, fatal_age=2.0)

    assert judged(crashed)[:2] == ("failed", "fatal_log")
    assert judged(replace(crashed, fatal_age=100.0))[:2] == ("failed", "exited")


# --- stopped after ready, under a debugger, frozen -------------------------------------------------------------

OWED = replace(READY, progress_age=61.0, demand=1.0, channels=CPU_FLAT, ranks=two(stopped_age=61.0))


@pytest.mark.parametrize(("unserved_age", "state"), [(60.0, "stalled"), (59.9, "working"), (None, "working")])
def test_a_ready_server_is_stopped_only_while_work_is_owed(unserved_age: float | None, state: str) -> None:
    assert judged(replace(OWED, unserved_age=unserved_age))[0] == state


def test_a_ready_server_that_is_asked_nothing_may_be_stopped_for_hours() -> None:
    assert judged(replace(OWED, demand=0.0, progress_age=9e3, ranks=two(stopped_age=9e3)))[:2] == ("idle", "none")


@pytest.mark.parametrize("evidence", [STOPPED, replace(OWED, unserved_age=70.0)])
def test_a_rank_under_a_debugger_or_in_a_frozen_cgroup_is_not_stopped(evidence: Evidence) -> None:
    traced = tuple(replace(rank, traced=True) for rank in evidence.ranks)

    assert judged(evidence)[:2] == ("stalled", "stopped")
    assert judged(replace(evidence, frozen=True))[:2] != ("stalled", "stopped")
    assert judged(replace(evidence, ranks=traced))[:2] != ("stalled", "stopped")


def test_a_rank_that_is_stopped_while_another_is_traced_is_stopped() -> None:
    ranks = (replace(STOPPED.ranks[0], traced=True), STOPPED.ranks[1])

    assert judged(replace(STOPPED, ranks=ranks)) == ("stalled", "stopped", "TP1")


def test_a_frozen_server_is_at_most_suspect() -> None:
    assert judged(replace(STUCK, frozen=True)) == ("suspect", "frozen", None)
    assert judged(replace(STUCK, frozen=True, progress_age=239.0))[0] == "quiet"
    assert judged(replace(READY, demand=0.0, frozen=True))[0] == "idle"


def test_a_traced_rank_is_at_most_suspect_and_named() -> None:
    assert judged(replace(STUCK, ranks=two(traced=True))) == ("suspect", "traced", "TP1")


@pytest.mark.parametrize(
    "ranks",
    [
        tuple(replace(rank, traced=True) for rank in two()),
        (RankEvidence("TP0", traced=True),),
        (*two(), RankEvidence("engine", traced=True, is_engine=True)),
    ],
)
def test_several_traced_ranks_the_only_one_or_an_engine_name_nobody(ranks: tuple[RankEvidence, ...]) -> None:
    assert judged(replace(STUCK, ranks=ranks)) == ("suspect", "traced", None)


def test_a_debugger_on_a_busy_rank_is_told_before_its_spin() -> None:
    assert judged(replace(STUCK, channels=CPU_MOVES, ranks=two(traced=True)))[1] == "traced"
    assert judged(replace(STUCK, channels=CPU_MOVES, frozen=True, ranks=two(traced=True)))[1] == "frozen"


# --- serving: no tokens ----------------------------------------------------------------------------------------

TOKENS_FLAT = (ChannelState("tokens", "flat", 130.0), ChannelState("cpu", "flat", 130.0))
WEDGED = replace(
    READY,
    demand=3.0,
    unserved_age=130.0,
    tokens_age=130.0,
    tokens_counted=True,
    channels=TOKENS_FLAT,
    progress_age=130.0,
)
"""Three requests run, and no token came for two minutes; nobody uses CPU."""


def test_owed_work_without_a_token_is_a_serving_stall() -> None:
    assert judged(WEDGED) == ("stalled", "no_tokens", None)
    assert judged(replace(WEDGED, ranks=two(markers=2))) == ("stalled", "no_tokens", "TP1")


@pytest.mark.parametrize(
    ("twin", "state"),
    [
        ({"unserved_age": 120.0}, "stalled"),
        ({"unserved_age": 119.9}, "working"),  # tokens came, or the work came, later
        ({"unserved_age": None}, "working"),
        ({"demand": 0.0}, "idle"),
        ({"demand": None}, "idle"),
        ({"ready": False, "progress_age": 5.0}, "working"),
        ({"channels": (ChannelState("cpu", "flat", 130.0),)}, "working"),  # nothing tells of tokens
        ({"channels": (ChannelState("tokens", "unreadable", None), *CPU_FLAT)}, "working"),
    ],
)
def test_no_tokens_needs_owed_work_two_minutes_and_counters(twin: dict[str, object], state: str) -> None:
    assert judged(replace(WEDGED, **twin))[0] == state  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "twin",
    [
        {"channels": (TOKENS_FLAT[0], ChannelState("cpu", "moving", 3.0))},  # a long prefill
        {"channels": (TOKENS_FLAT[0], ChannelState("cpu", "unreadable", None))},
        {"channels": TOKENS_FLAT[:1]},
        {"channels": (*TOKENS_FLAT, ChannelState("gpu_utilization", "moving", 3.0))},  # idle power is not known
        {"cards_rest": False},
        {"cpu_readable": False},
        {"tokens_counted": False},  # only stats lines say so
    ],
)
def test_no_tokens_is_at_most_suspect_while_something_works_or_is_not_known(twin: dict[str, object]) -> None:
    assert judged(replace(WEDGED, **twin))[:2] == ("suspect", "no_tokens")  # type: ignore[arg-type]


def test_cards_at_rest_outweigh_a_polling_cpu_in_a_serving_stall() -> None:
    """A collective that spins keeps a core busy."""
    spinning = (TOKENS_FLAT[0], ChannelState("cpu", "moving", 3.0))

    assert judged(replace(WEDGED, channels=spinning, cards_rest=True))[:2] == ("stalled", "no_tokens")


@pytest.mark.parametrize("evidence", [WEDGED, replace(WEDGED, timeouts=4, timeouts_span=130.0)])
def test_a_serving_stall_of_a_server_that_sleeps_is_frozen_or_traced_is_at_most_suspect(evidence: Evidence) -> None:
    assert judged(replace(evidence, paused=True))[:2] == ("suspect", "paused")
    assert judged(replace(evidence, frozen=True))[:2] == ("suspect", "frozen")
    assert judged(replace(evidence, ranks=two(traced=True))) == ("suspect", "traced", "TP1")


def test_a_server_in_sleep_mode_that_owes_nothing_is_idle() -> None:
    assert judged(replace(READY, demand=0.0, paused=True)) == ("idle", "none", None)


# --- serving: health -------------------------------------------------------------------------------------------

SILENT = replace(READY, demand=1.0, timeouts=3, timeouts_span=120.0, tokens_age=120.0, channels=CPU_FLAT)


def test_a_health_endpoint_that_does_not_answer_three_times_in_two_minutes_is_a_serving_stall() -> None:
    assert judged(SILENT)[:2] == ("stalled", "health_timeout")
    assert judged(replace(SILENT, demand=None))[:2] == ("stalled", "health_timeout")
    assert judged(replace(SILENT, tokens_age=math.inf))[:2] == ("stalled", "health_timeout")


@pytest.mark.parametrize(
    ("twin", "state"),
    [
        ({"timeouts": 2, "timeouts_span": 900.0}, "working"),
        ({"timeouts": 9, "timeouts_span": 119.9}, "working"),
        ({"tokens_age": 119.9}, "working"),  # it serves, and has no time to answer
        ({"demand": 0.0}, "idle"),
        ({"ready": False, "progress_age": 5.0}, "working"),
        ({"channels": CPU_MOVES}, "suspect"),
        ({"channels": ()}, "suspect"),
        ({"cards_rest": False}, "suspect"),
    ],
)
def test_health_timeouts_need_three_in_two_minutes_and_a_server_at_rest(twin: dict[str, object], state: str) -> None:
    assert judged(replace(SILENT, **twin))[0] == state  # type: ignore[arg-type]


def test_a_health_endpoint_that_is_silent_is_told_before_the_tokens_that_do_not_come() -> None:
    assert judged(replace(WEDGED, timeouts=3, timeouts_span=120.0))[1] == "health_timeout"


# --- locks -----------------------------------------------------------------------------------------------------


def test_a_lock_that_nobody_holds_is_a_stall_and_one_that_may_be_held_is_not() -> None:
    assert judged(replace(STUCK, stale_lock=True))[:2] == ("stalled", "stale_lock")
    assert judged(replace(STUCK, held_lock=True))[:2] == ("suspect", "lock_wait")
    assert judged(replace(STUCK, held_lock=True, stale_lock=True))[:2] == ("suspect", "lock_wait")


@pytest.mark.parametrize(
    ("most", "found"),
    [({"nnodes": 2}, ("suspect", "waiting_remote")), ({"autotune_open": True}, ("suspect", "stale_lock"))],
)
def test_a_lock_that_nobody_holds_undoes_no_other_caution(most: dict[str, object], found: tuple[str, str]) -> None:
    """It may be a leftover that nobody waits for."""
    assert judged(replace(STUCK, stale_lock=True, **most))[:2] == found  # type: ignore[arg-type]


@pytest.mark.parametrize("lock", ["stale_lock", "held_lock"])
def test_a_lock_file_of_a_server_that_moves_is_no_matter(lock: str) -> None:
    for twin, state in (
        (replace(STUCK, progress_age=5.0), "working"),
        (replace(STUCK, progress_age=239.9), "quiet"),
        (replace(STUCK, channels=CPU_MOVES), "suspect"),
        (replace(STUCK, storage_readable=False), "unknown"),
        (replace(READY, demand=0.0), "idle"),
    ):
        found = judged(replace(twin, **{lock: True}))  # type: ignore[arg-type]
        assert (found[0], found[1] in ("stale_lock", "lock_wait")) == (state, False)


def test_a_lock_names_the_rank_that_is_behind() -> None:
    assert judged(replace(STUCK, stale_lock=True, ranks=two(markers=2)))[2] == "TP1"
    assert judged(replace(STUCK, held_lock=True, ranks=two(markers=2)))[2] == "TP1"


# --- ranks that never came, ports, blocked reads ---------------------------------------------------------------

MISSING = replace(STUCK, missing=1, missing_ranks=("TP2",))
FOREIGN = replace(STUCK, port_foreign=True)


def test_a_rank_that_never_came_is_missed_when_all_stand_still() -> None:
    assert judged(MISSING) == ("stalled", "rank_missing", "TP2")
    assert judged(replace(MISSING, progress_age=5.0)) == ("working", "none", None)
    assert judged(replace(MISSING, progress_age=200.0)) == ("quiet", "none", None)


def test_a_port_of_another_process_is_the_reason_when_nothing_else_explains_the_silence() -> None:
    assert judged(FOREIGN)[:2] == ("stalled", "port_taken")
    assert judged(replace(FOREIGN, port_foreign=False))[:2] == ("stalled", "idle_wait")


@pytest.mark.parametrize(
    ("twin", "reason"),
    [
        ({"ranks": two(markers=2)}, "idle_wait"),  # a rank is behind: it is not the port
        ({"ranks": two(disk_age=60.0)}, "blocked_io"),
        ({"missing": 2}, "rank_missing"),
        ({"role": "embedded"}, "idle_wait"),  # it opens none
        ({"stale_lock": True}, "stale_lock"),
    ],
)
def test_a_taken_port_is_not_blamed_for_what_something_else_explains(twin: dict[str, object], reason: str) -> None:
    assert judged(replace(FOREIGN, **twin))[:2] == ("stalled", reason)  # type: ignore[arg-type]


def test_a_taken_port_of_a_server_that_moves_or_serves_is_no_stall() -> None:
    assert judged(replace(FOREIGN, progress_age=5.0))[0] == "working"
    assert judged(replace(READY, port_foreign=True, demand=0.0))[0] == "idle"


def test_a_thread_blocked_in_the_kernel_comes_before_a_rank_that_never_came() -> None:
    assert judged(replace(MISSING, ranks=two(disk_age=60.0)))[1] == "blocked_io"
    assert judged(replace(MISSING, ranks=two(disk_age=59.9)))[1] == "rank_missing"


# --- several nodes, autotune -----------------------------------------------------------------------------------


def test_one_of_several_nodes_stands_still_and_its_own_reasons_do_not_page() -> None:
    far = replace(STUCK, nnodes=2)
    for twin in (far, replace(far, missing=1), replace(far, port_foreign=True), replace(far, ranks=two(disk_age=99.0))):
        assert judged(twin)[:2] == ("suspect", "waiting_remote")


def test_a_certain_sign_on_one_of_several_nodes_pages() -> None:
    assert judged(replace(STUCK, nnodes=2, deaths=((1.0, "TP1"),), live_ranks=1))[:2] == ("failed", "rank_dead")
    assert judged(replace(STOPPED, nnodes=2))[:2] == ("stalled", "stopped")


def test_an_open_autotune_says_why_it_is_silent_and_never_pages() -> None:
    tuning = replace(STUCK, autotune_open=True)

    assert judged(replace(tuning, ranks=two(disk_age=60.0)))[:2] == ("suspect", "blocked_io")
    assert judged(replace(tuning, missing=1))[:2] == ("suspect", "rank_missing")
    assert judged(replace(tuning, autotune_open=False, missing=1))[:2] == ("stalled", "rank_missing")


def test_a_rank_that_dies_in_an_open_autotune_fails() -> None:
    assert judged(replace(STUCK, autotune_open=True, deaths=((1.0, "TP1"),), live_ranks=1))[0] == "failed"


# --- spins on cards --------------------------------------------------------------------------------------------

CARD_USED = (ChannelState("gpu_utilization", "moving", 1.0),)
SPINS = replace(STUCK, channels=(*CPU_FLAT, *CARD_USED), spins=(Spin("TP0", 250.0, True),))
"""TP0 waits on its card for TP1, whose card is at rest."""

BOTH = (Spin("TP0", 480.0, True), Spin("TP1", 490.0, True))


def test_a_proven_spin_of_one_rank_is_a_stall() -> None:
    assert judged(SPINS) == ("stalled", "gpu_spin", None)
    assert judged(replace(SPINS, ranks=two(markers=2))) == ("stalled", "gpu_spin", "TP1")


@pytest.mark.parametrize(
    ("twin", "found"),
    [
        pytest.param({"progress_age": 60.0}, ("working", "none"), id="something strong moves"),
        pytest.param({"progress_age": 239.0}, ("quiet", "none"), id="not long enough"),
        pytest.param({"spins": (Spin("TP0", 250.0, False),)}, ("suspect", "gpu_spin"), id="not proven"),
        pytest.param({"spins": ()}, ("suspect", "none"), id="used, and no more is known"),
        pytest.param({"cards_work": True}, ("suspect", "gpu_spin"), id="another card works a little"),
        pytest.param({"busy": frozenset(("TP1",))}, ("suspect", "gpu_spin"), id="a rank works that does not spin"),
        pytest.param({"busy": frozenset(("engine",))}, ("suspect", "gpu_spin"), id="an engine works"),
        pytest.param({"compile_open": True}, ("suspect", "gpu_spin"), id="somebody compiles"),
        pytest.param({"autotune_open": True}, ("suspect", "gpu_spin"), id="somebody tunes"),
        pytest.param({"held_lock": True}, ("suspect", "gpu_spin"), id="a lock may be held"),
        pytest.param({"frozen": True}, ("suspect", "frozen"), id="frozen"),
        pytest.param({"ranks": two(traced=True)}, ("suspect", "traced"), id="a debugger"),
        pytest.param({"nnodes": 2}, ("suspect", "waiting_remote"), id="another node"),
        pytest.param({"nnodes": 2, "compile_open": True}, ("suspect", "gpu_spin"), id="another node, compiling"),
        pytest.param({"storage_readable": False}, ("unknown", "unreadable"), id="storage cannot be read"),
        pytest.param({"log": "absent"}, ("unknown", "no_evidence"), id="no log"),
    ],
)
def test_what_a_spin_may_wait_for_makes_it_no_page(twin: dict[str, object], found: tuple[str, str]) -> None:
    assert judged(replace(SPINS, **twin))[:2] == found  # type: ignore[arg-type]


def test_the_cpu_of_a_rank_that_spins_is_part_of_the_spin() -> None:
    """Its thread asks the card again and again whether it is done; that says no more than the card does."""
    polls = replace(SPINS, channels=(*CPU_MOVES, *CARD_USED), busy=frozenset(("TP0",)))

    assert judged(polls)[:2] == ("stalled", "gpu_spin")
    assert judged(replace(polls, busy=frozenset(("TP0", "TP1"))))[:2] == ("suspect", "gpu_spin")
    assert judged(replace(polls, spins=()))[:2] == ("suspect", "busy_spin")


def test_a_spin_lasts_for_a_window_before_it_is_one() -> None:
    assert judged(replace(SPINS, spins=(Spin("TP0", 60.0, True),)))[:2] == ("stalled", "gpu_spin")
    assert judged(replace(SPINS, spins=(Spin("TP0", 59.0, True),)))[:2] == ("suspect", "none")


GOES_ON = Verdict("stalled", "gpu_spin", 900.0, "TP1")
NOT_READ = (*CPU_MOVES, ChannelState("gpu_utilization", "unreadable", None))
NOT_KNOWN = (*CPU_MOVES, ChannelState("gpu_utilization", "absent", None))


def test_a_spin_that_was_found_goes_on_until_a_card_shows_otherwise() -> None:
    """After a restart of ours the cards come late, and what they take is not known at the first look."""
    first = replace(SPINS, spins=(Spin("TP0", 0.0, False),), phase="warming_up")
    for evidence, found in (
        (replace(STUCK, channels=NOT_KNOWN, busy=frozenset(("TP0",))), "gpu_spin"),
        (replace(STUCK, channels=NOT_READ, busy=frozenset(("TP0",))), "gpu_spin"),
        (first, "gpu_spin"),
        (replace(first, spins=()), "none"),
    ):
        verdict = judge(evidence, T, GOES_ON, now=1000.0)
        state = "stalled" if found == "gpu_spin" else "suspect"
        assert (verdict.state, verdict.reason, verdict.suspect_rank) == (state, found, "TP1")

    assert judge(replace(first, cards_work=True), T, GOES_ON, now=1000.0).state == "suspect"
    assert judge(first, T, replace(GOES_ON, state="suspect"), now=1000.0).state == "suspect"
    for channels in (NOT_KNOWN, NOT_READ):
        assert judge(replace(STUCK, channels=channels), T, None, now=1000.0).reason == "busy_spin"


def test_without_a_log_a_spin_needs_twice_the_time() -> None:
    quiet = replace(SPINS, log="absent", gpu_readable=True)

    assert judged(replace(quiet, progress_age=479.0))[0] == "unknown"
    assert judged(replace(quiet, progress_age=480.0))[:2] == ("stalled", "gpu_spin")


@pytest.mark.parametrize("phase", ["capturing_graphs", "warming_up"])
@pytest.mark.parametrize(
    ("spins", "progress_age", "state"),
    [
        (BOTH, 480.0, "stalled"),
        (BOTH, 479.0, "suspect"),
        ((Spin("TP0", 479.0, True), BOTH[1]), 600.0, "suspect"),
        (BOTH[:1], 9e9, "suspect"),
        ((replace(BOTH[0], is_proven=False), BOTH[1]), 9e9, "suspect"),
    ],
)
def test_where_ranks_wait_on_cards_for_one_that_is_late_all_must_spin_for_twice_the_time(
    phase: str, spins: tuple[Spin, ...], progress_age: float, state: str
) -> None:
    spinning = replace(SPINS, phase=phase, spins=spins, progress_age=progress_age)

    assert judged(spinning)[:2] == (state, "gpu_spin")
    assert judged(replace(spinning, phase="memory_pool", progress_age=300.0))[0] == (
        "stalled" if any(spin.is_proven for spin in spins) else "suspect"
    )


def test_a_dead_rank_need_not_spin() -> None:
    ranks = (*two(), RankEvidence("engine", is_engine=True))
    spinning = replace(SPINS, phase="warming_up", spins=BOTH, progress_age=480.0, ranks=ranks)

    assert judged(spinning)[0] == "stalled"
    assert judged(replace(spinning, ranks=(*ranks, RankEvidence("TP2"))))[0] == "suspect"


def test_a_counter_of_long_steps_makes_a_spin_longer_too() -> None:
    spinning = replace(SPINS, phase="capturing_graphs", spins=BOTH, progress_age=500.0, stretch=300.0)

    assert judged(spinning)[:2] == ("suspect", "gpu_spin")
    assert judged(replace(spinning, stretch=0.0))[0] == "stalled"


def test_a_spin_of_a_ready_server_is_the_business_of_its_requests() -> None:
    ready = replace(SPINS, ready=True, phase="ready", demand=0.0)

    assert judged(ready)[0] == "idle"
    owed = replace(ready, demand=1.0, unserved_age=120.0, tokens_counted=True, cards_rest=True)
    owed = replace(owed, channels=(*owed.channels, ChannelState("tokens", "flat", 300.0)))
    assert judged(owed)[:2] == ("stalled", "no_tokens")
    assert judged(replace(owed, cards_rest=None))[:2] == ("suspect", "no_tokens")


# --- lost cards, a driver that hangs ---------------------------------------------------------------------------

LOST = replace(STUCK, progress_age=1.0, lost_cards=((4.0, "TP1"),))


def test_a_card_that_a_live_rank_used_and_that_is_lost_is_a_failure_at_once() -> None:
    assert judged(LOST) == ("failed", "gpu_lost", "TP1")
    assert judged(replace(LOST, lost_cards=()))[0] == "working"
    assert judged(replace(READY, demand=0.0, lost_cards=LOST.lost_cards)) == ("failed", "gpu_lost", "TP1")


def test_the_rank_whose_card_was_lost_first_is_named_and_of_several_at_once_none() -> None:
    assert judged(replace(LOST, lost_cards=((4.0, "TP1"), (1.0, "TP0"))))[2] == "TP1"
    assert judged(replace(LOST, lost_cards=((4.0, "TP0"), (4.0, "TP1"))))[2] is None
    assert judged(replace(LOST, lost_cards=((4.0, "TP0"),), ranks=(RankEvidence("TP0"),)))[2] is None
    assert judged(replace(LOST, lost_cards=((4.0, "TP0"), (4.0, "engine"))))[2] == "TP0"


def test_a_card_of_an_engine_is_lost_too_and_that_of_a_front_end_is_no_matter() -> None:
    assert judged(replace(LOST, lost_cards=((4.0, "engine"),))) == ("failed", "gpu_lost", None)
    assert judged(replace(LOST, lost_cards=((4.0, "frontend"),)))[0] == "working"


def test_a_lost_card_explains_the_death_and_the_fatal_line_that_follow() -> None:
    died = replace(LOST, deaths=((3.0, "TP1"),), live_ranks=1)
    assert judged(replace(died, fatal_age=3.0))[1] == "gpu_lost"
    assert judged(replace(died, fatal_age=3.0, root_gone_age=1.0))[1] == "gpu_lost"
    assert judged(replace(died, deaths=((4.0, "TP1"),)))[1] == "gpu_lost"
    assert judged(replace(died, deaths=((4.1, "TP1"),)))[1] == "rank_dead"
    assert judged(replace(died, oom_age=3.0))[1] == "out_of_memory"


def test_a_card_lost_at_an_orderly_end_is_no_failure() -> None:
    assert judged(replace(LOST, shutdown_age=9.0))[0] == "working"
    assert judged(replace(LOST, shutdown_age=9.0, root_gone_age=1.0))[0] == "gone"
    assert judged(replace(LOST, stopping=True))[0] == "working"


HANGS = replace(STUCK, driver_hangs=True)


def test_a_driver_that_hangs_explains_a_silence_and_makes_none() -> None:
    assert judged(HANGS)[:2] == ("stalled", "driver_unresponsive")
    assert judged(replace(HANGS, progress_age=200.0))[:2] == ("quiet", "none")
    assert judged(replace(HANGS, progress_age=5.0))[:2] == ("working", "none")
    assert judged(replace(HANGS, channels=CPU_MOVES))[:2] == ("suspect", "busy_spin")
    assert judged(replace(HANGS, storage_readable=False))[0] == "unknown"
    assert judged(replace(HANGS, nnodes=2))[:2] == ("suspect", "waiting_remote")
    assert judged(replace(READY, demand=0.0, driver_hangs=True))[:2] == ("idle", "none")


@pytest.mark.parametrize(
    ("twin", "reason"),
    [
        ({"ranks": two(disk_age=99.0)}, "driver_unresponsive"),  # it hangs in the kernel because of that
        ({"missing": 1}, "driver_unresponsive"),
        ({"stale_lock": True}, "stale_lock"),
    ],
)
def test_a_driver_that_hangs_is_named_before_what_it_explains(twin: dict[str, object], reason: str) -> None:
    assert judged(replace(HANGS, **twin))[1] == reason  # type: ignore[arg-type]


# --- slow counters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("progress_age", "state"), [(60.0, "working"), (599.9, "quiet"), (600.0, "stalled")])
def test_a_slow_counter_makes_the_silence_that_is_a_stall_longer(progress_age: float, state: str) -> None:
    assert judged(replace(STUCK, stretch=600.0, progress_age=progress_age))[0] == state


def test_a_counter_makes_no_silence_shorter() -> None:
    assert judged(replace(STUCK, stretch=100.0, progress_age=239.9))[0] == "quiet"
    assert judged(replace(STUCK, stretch=0.0, progress_age=240.0))[0] == "stalled"


def test_a_longer_silence_must_have_been_watched_as_long() -> None:
    assert judged(replace(STUCK, stretch=600.0, progress_age=700.0, watched_age=599.0))[0] == "unknown"
    assert judged(replace(STUCK, stretch=600.0, progress_age=700.0, watched_age=600.0))[0] == "stalled"


def test_a_slow_counter_delays_no_certain_sign_and_no_stopped_rank() -> None:
    assert judged(replace(STOPPED, stretch=1800.0))[:2] == ("stalled", "stopped")
    assert judged(replace(STUCK, stretch=1800.0, deaths=((1.0, "TP1"),), live_ranks=1))[0] == "failed"


# --- which check speaks ----------------------------------------------------------------------------------------


def test_every_check_speaks_somewhere_and_none_of_a_server_that_loads_but_the_one_for_it() -> None:
    speaks = {check.__name__ for evidence in SPEAKING for check in CHECKS if check(evidence, T, FAILED) is not None}
    loading = [check.__name__ for check in CHECKS if check(LOADING, T, None) is not None]

    assert speaks == {check.__name__ for check in CHECKS}
    assert loading[0] == "progresses"


FAILED = Verdict("failed", "rank_dead", 900.0)
LOADING = Evidence(progress_age=1.0, phase="loading_weights", channels=(ChannelState("storage", "moving", 1.0),))
SPEAKING = (
    Evidence(known=False),
    replace(READY, root_gone_age=1.0, shutdown_age=2.0),
    replace(DIED, oom_age=10.0),
    ENDED,
    DIED,
    LOST,
    SPINS,
    replace(FATAL, root_gone_age=1.0),
    STOPPED,
    SILENT,
    WEDGED,
    replace(STUCK, progress_age=100.0),
    LOADING,
    replace(STUCK, storage_readable=False),
    replace(STUCK, frozen=True),
    replace(STUCK, channels=CPU_MOVES),
    replace(STUCK, stale_lock=True),
    replace(STUCK, held_lock=True),
    replace(STUCK, nnodes=2),
    replace(STUCK, autotune_open=True),
)
