"""What is known over time about one start: steps of counters, stats lines, time-outs, demand, names."""

from __future__ import annotations

import pytest

from stallwatch import signals
from stallwatch.server_timeline import (
    MOST_STEPS,
    STATS_GAP_SECONDS,
    ServerTimeline,
    Stats,
    Steps,
    Timeouts,
    natural,
)
from stallwatch.startup import MOST_RANKS
from stallwatch.tracks import Track

STALL_AFTER = 240.0

# --- steps of counters -------------------------------------------------------------------------------------


def counted(*moments: float) -> Steps:
    """A counter that takes one step at each of the moments."""
    steps = Steps()
    for number, at in enumerate(moments):
        steps.step(at, float(number))
    return steps


@pytest.mark.parametrize(("step", "stretch"), [(80.0, 0.0), (80.1, 240.3), (200.0, 600.0), (600.0, 1800.0)])
def test_a_counter_whose_steps_take_longer_than_a_third_of_stall_after_stretches_it(
    step: float, stretch: float
) -> None:
    assert counted(0.0, step, 2 * step).stretch(STALL_AFTER) == pytest.approx(stretch)


def test_the_usual_step_says_whether_a_counter_is_slow_and_the_longest_by_how_much() -> None:
    assert counted(0, 100, 200, 500).stretch(STALL_AFTER) == 900.0
    assert counted(0, 10, 20, 320).stretch(STALL_AFTER) == 0.0  # one long step among short ones


def test_a_stretch_is_at_most_half_an_hour_and_of_short_settings_as_many_times_less() -> None:
    assert counted(0.0, 2000.0).stretch(STALL_AFTER) == 1800.0
    assert counted(0.0, 200.0).stretch(24.0) == 600.0
    assert counted(0.0, 1200.0).stretch(3600.0) == 0.0


def test_one_number_is_no_step_yet() -> None:
    assert Steps().stretch(STALL_AFTER) == 0.0
    assert counted(0.0).stretch(STALL_AFTER) == 0.0


def test_a_bar_that_begins_anew_took_no_step() -> None:
    steps = counted(0.0, 10.0, 20.0)
    steps.step(520.0, 0.0)  # the next bar, after a long phase without one
    steps.step(530.0, 1.0)

    assert list(steps.durations) == [10.0, 10.0, 10.0]


def test_of_a_counter_only_the_last_steps_are_kept() -> None:
    steps = counted(*(1.0 * number for number in range(10 * MOST_STEPS)))

    assert len(steps.durations) == MOST_STEPS


# --- stats lines -------------------------------------------------------------------------------------------


def test_a_stats_line_holds_for_three_of_its_usual_gaps() -> None:
    stats = Stats()
    stats.put({"running": 2.0, "waiting": 1.0}, 100.0)

    assert stats.demand(100.0 + 3 * STATS_GAP_SECONDS) == 3.0
    assert stats.demand(100.1 + 3 * STATS_GAP_SECONDS) is None


def test_stats_lines_that_come_every_minute_hold_longer() -> None:
    stats = Stats()
    for number in range(20):
        stats.put({"running": 1.0}, 60.0 * number)

    assert stats.demand(19 * 60.0 + 170.0) == 1.0
    assert stats.demand(19 * 60.0 + 190.0) is None


def test_stats_lines_of_one_moment_do_not_make_it_hold_shorter() -> None:
    """Lines found on start all arrive at once."""
    stats = Stats()
    for _ in range(100):
        stats.put({"running": 1.0}, 50.0)

    assert stats.usual_gap == STATS_GAP_SECONDS


def test_a_stats_line_without_a_number_of_requests_says_nothing_of_the_demand() -> None:
    stats = Stats()
    stats.put({"generation_tokens_per_second": 20.0}, 10.0)
    assert (stats.demand(10.0), stats.says_speed(10.0)) == (None, True)

    stats.put({"running": "many", "waiting": 2.0}, 20.0)
    assert (stats.demand(20.0), stats.says_speed(20.0)) == (2.0, False)


def test_before_any_stats_line_nothing_is_known() -> None:
    assert (Stats().demand(0.0), Stats().says_speed(0.0)) == (None, False)
    assert Stats().usual_gap == STATS_GAP_SECONDS


# --- time-outs ---------------------------------------------------------------------------------------------


def test_timeouts_add_up_from_the_first_until_an_answer() -> None:
    timeouts = Timeouts()
    for at in (30.0, 60.0, 90.0):
        timeouts.put(1.0, at, 90.0)
    assert (timeouts.in_a_row, timeouts.since) == (3, 30.0)

    timeouts.clear()
    assert (timeouts.in_a_row, timeouts.since) == (0, None)


@pytest.mark.parametrize(("later", "row"), [(120.0, (2, 30.0)), (120.1, (1, 120.1))])
def test_timeouts_with_a_time_between_them_in_which_nobody_looked_are_in_no_row(
    later: float, row: tuple[int, float]
) -> None:
    timeouts = Timeouts()
    timeouts.put(1.0, 30.0, 90.0)
    timeouts.put(1.0, later, 90.0)

    assert (timeouts.in_a_row, timeouts.since) == row


def test_looks_at_a_count_that_did_not_grow_keep_the_row() -> None:
    """The count is read more often than the endpoint is asked."""
    timeouts = Timeouts()
    for number in range(41):
        timeouts.put(1.0 if number % 20 == 0 else 0.0, 5.0 * number, 15.0)

    assert (timeouts.in_a_row, timeouts.since) == (3, 0.0)


# --- demand ------------------------------------------------------------------------------------------------


def asked(timeline: ServerTimeline, at: float, running: float, waiting: float | None = None) -> None:
    """The server's own metrics, every 30 s."""
    for signal, value in ((signals.REQUESTS_RUNNING, running), (signals.REQUESTS_WAITING, waiting)):
        if value is not None:
            tracks = timeline.tracks.setdefault(signal.name, {})
            tracks.setdefault((timeline.name,), Track()).put(value, None, at, 30.0, at)
    timeline.note_demand(at)


def test_work_is_owed_since_it_was_first_seen_without_a_break() -> None:
    timeline = ServerTimeline("s", anchor=0.0)
    asked(timeline, 0.0, 0)
    assert timeline.owed_since is None

    asked(timeline, 30.0, 0, waiting=2)
    asked(timeline, 60.0, 1, waiting=0)
    assert timeline.owed_since == 30.0

    asked(timeline, 90.0, 0, waiting=0)
    assert timeline.owed_since is None


@pytest.mark.parametrize(("back", "owed_since"), [(90.0, 0.0), (600.0, 600.0)])
def test_work_after_a_time_of_which_nothing_is_known_is_owed_anew(back: float, owed_since: float) -> None:
    timeline = ServerTimeline("s", anchor=0.0)
    asked(timeline, 0.0, 1)
    asked(timeline, back, 1)

    assert timeline.owed_since == owed_since


def test_stats_lines_with_hours_between_them_owe_nothing_of_before() -> None:
    """An idle server writes none."""
    timeline = ServerTimeline("s", anchor=0.0)
    for at in (0.0, 10.0, 20.0, 7200.0, 7210.0):
        timeline.stats.put({"running": 1.0}, at)
        timeline.note_demand(at)

    assert timeline.owed_since == 7200.0


def test_the_servers_own_metrics_say_more_than_its_stats_lines() -> None:
    timeline = ServerTimeline("s", anchor=0.0)
    timeline.stats.put({"running": 7.0}, 100.0)
    asked(timeline, 90.0, 2, waiting=1)

    assert timeline.demand(100.0) == 3.0
    assert timeline.demand(130.0) == 3.0
    assert timeline.demand(190.0) is None


def test_stats_lines_stand_in_when_the_metrics_are_too_old() -> None:
    timeline = ServerTimeline("s", anchor=0.0)
    asked(timeline, 0.0, 2)
    timeline.stats.put({"running": 7.0}, 100.0)

    assert timeline.demand(100.0) == 7.0


def told(timeline: ServerTimeline, at: float) -> dict[str, float | None]:
    return {reading.signal.name: reading.value for reading in timeline.told_demand(at)}


def test_ranks_that_each_write_stats_lines_owe_together_what_they_owe() -> None:
    """One data-parallel rank that is idle says nothing of the others."""
    timeline = ServerTimeline("s", anchor=0.0)
    for at in (100.0, 110.0, 120.0):
        timeline.stats.put({"running": 5.0, "waiting": 2.0, "generation_tokens_per_second": 0.0}, at, "DP1-TP0")
        timeline.stats.put({"running": 0.0}, at + 1, "DP0-TP0")
        timeline.note_demand(at + 1)

    assert (timeline.demand(121.0), timeline.owed_since) == (7.0, 101.0)
    assert told(timeline, 121.0) == {"server_requests_running": 5.0, "server_requests_waiting": 2.0}
    assert timeline.stats.says_speed(121.0)


def test_what_a_rank_said_holds_for_three_of_its_own_gaps() -> None:
    timeline = ServerTimeline("s", anchor=0.0)
    timeline.stats.put({"running": 5.0}, 100.0, "DP1-TP0")
    for at in (100.0, 110.0, 120.0, 130.0, 140.0):
        timeline.stats.put({"running": 0.0}, at, "DP0-TP0")

    assert (timeline.demand(130.0), timeline.demand(130.1)) == (5.0, 0.0)
    assert timeline.demand(300.0) is None
    assert told(timeline, 300.0) == {}


def test_demand_by_lines_is_not_told_where_the_servers_metrics_say_it() -> None:
    timeline = ServerTimeline("s", anchor=0.0)
    timeline.stats.put({"running": 7.0}, 100.0)
    assert told(timeline, 100.0) == {"server_requests_running": 7.0}

    asked(timeline, 90.0, 2, waiting=1)
    assert told(timeline, 100.0) == {}


def test_ranks_that_write_stats_lines_are_bounded() -> None:
    stats = Stats()
    for number in range(MOST_RANKS + 5):
        stats.put({"running": 1.0}, 0.0, f"DP{number}")
    stats.put({"running": 2.0}, 1.0, "DP0")

    assert stats.told(1.0)[0] == MOST_RANKS + 1


# --- slow phases -------------------------------------------------------------------------------------------


def test_a_slow_counter_counts_in_its_own_phase_only() -> None:
    timeline = ServerTimeline("s", anchor=0.0)
    timeline.steps["capture_progress", "TP0"] = counted(0.0, 200.0)
    assert timeline.stretch(STALL_AFTER) == 0.0

    timeline.startup.phase = "capturing_graphs"
    assert timeline.stretch(STALL_AFTER) == 600.0


def test_the_slowest_counter_of_a_phase_counts() -> None:
    timeline = ServerTimeline("s", anchor=0.0)
    timeline.startup.phase = "loading_weights"
    timeline.steps["load_progress", "TP0"] = counted(0.0, 100.0)
    timeline.steps["load_progress", "TP1"] = counted(0.0, 150.0)
    timeline.steps["download_progress", "TP0"] = counted(0.0, 1.0)

    assert timeline.stretch(STALL_AFTER) == 450.0


def test_a_leap_of_the_counter_of_timeouts_that_no_float_holds_is_many() -> None:
    timeouts = Timeouts()
    timeouts.put(float("inf"), 10.0, 30.0)

    assert timeouts.in_a_row > 1000


# --- names -------------------------------------------------------------------------------------------------


def test_names_are_in_the_order_of_their_numbers() -> None:
    assert sorted(("TP10", "TP2", "DP0-TP1", "engine1", "7"), key=natural) == [
        "7",
        "DP0-TP1",
        "TP2",
        "TP10",
        "engine1",
    ]


def test_a_name_with_more_digits_than_a_number_may_have_is_a_name() -> None:
    endless = "TP" + "9" * 5000

    assert sorted((endless, "TP2"), key=natural) == [endless, "TP2"]
