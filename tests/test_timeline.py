from __future__ import annotations

from typing import Any

import pytest

from feed import CardFigures, Counters, Feed, Serving, server
from stallwatch import signals
from stallwatch.model import FRONTEND, Reading, Signal
from stallwatch.timeline import FLOORS, MIB, MOST_COUNTERS, MOST_NOVEL_LINES
from stallwatch.tracks import Track
from stallwatch.verdict import gather

READ = Counters()


def at_rest(feed: Feed, until: float = 10.0) -> Feed:
    """Two looks: everything has a baseline."""
    feed.look(0.0)
    feed.look(until)
    return feed


# --- floors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "amount", "channel"),
    [
        ("storage", 1 * MIB, "storage"),
        ("major", 16, "storage"),
        ("read", 8 * MIB, "storage"),
        ("written", 16 * MIB, "storage"),
        ("minor", 1024, "memory"),
        ("resident", 16 * MIB, "memory"),
        ("resident", -16 * MIB, "memory"),
    ],
)
def test_a_channel_moves_at_its_floor_and_not_below(counter: str, amount: float, channel: str) -> None:
    below, at = at_rest(Feed()), at_rest(Feed())
    setattr(below.of["TP1"], counter, getattr(READ, counter) + amount - (1 if amount > 0 else -1))
    setattr(at.of["TP1"], counter, getattr(READ, counter) + amount)

    below.look(15.0)
    at.look(15.0)

    assert below.now.moves == {}
    assert at.now.moves == {channel: 15.0}
    assert at.now.rank_moves == {"TP1": 15.0}


def test_every_floor_is_a_number_above_zero() -> None:
    assert [floor for floor in FLOORS if floor.amount <= 0] == []


def test_small_amounts_add_up_within_one_window_and_move_at_the_reading_that_reaches_the_floor() -> None:
    feed = at_rest(Feed(), 0.0)
    for number in range(1, 7):
        feed.of["TP0"].storage += 0.25 * MIB
        feed.look(10.0 * number)

    assert feed.now.moves == {"storage": 40.0}


def test_amounts_that_need_longer_than_one_window_never_move() -> None:
    feed = at_rest(Feed(), 0.0)
    for number in range(1, 100):
        feed.of["TP0"].storage += 0.16 * MIB  # 0.96 MiB in a window of 60 s
        feed.look(10.0 * number)

    assert feed.now.moves == {}


def test_what_moved_once_does_not_count_again() -> None:
    feed = at_rest(Feed(), 0.0)
    feed.of["TP0"].storage += 1 * MIB
    feed.look(10.0)
    feed.of["TP0"].storage += 0.9 * MIB
    feed.look(20.0)

    assert feed.now.moves == {"storage": 10.0}


def test_noise_of_a_stuck_server_moves_nothing_for_an_hour() -> None:
    feed = Feed()
    feed.look(0.0)

    feed.quiet_until(0.0, 3600.0)

    assert feed.now.moves == {}


def test_a_counter_that_begins_anew_is_no_move() -> None:
    feed = at_rest(Feed())
    feed.of["TP0"] = Counters(storage=0.5 * MIB, read=0.0, minor=0.0, major=0.0, written=0.0)
    feed.look(15.0)

    assert feed.now.moves == {}


def test_a_counter_that_begins_anew_is_watched_from_there() -> None:
    feed = at_rest(Feed())
    feed.of["TP0"].storage = 0.0
    feed.look(15.0)

    track = feed.now.track(signals.STORAGE_READ, "s", "TP0")
    assert track is not None
    assert track.known_since == 15.0


def test_what_came_together_while_nobody_looked_is_a_move() -> None:
    feed = at_rest(Feed())
    feed.of["TP0"].storage += 1 * MIB
    feed.look(600.0)

    assert feed.now.moves == {"storage": 600.0}


def test_noise_of_ten_minutes_in_which_nobody_looked_is_no_move() -> None:
    feed = at_rest(Feed())
    feed.noise(610.0)
    feed.look(610.0)

    assert feed.now.moves == {}


def test_an_unreadable_time_does_not_lose_what_was_read_in_it() -> None:
    feed = at_rest(Feed())
    feed.of["TP0"].storage += 0.6 * MIB
    feed.processes(15.0, io=False)
    feed.of["TP0"].storage += 0.4 * MIB
    feed.look(20.0)

    assert feed.now.moves == {"storage": 20.0}


# --- what is written into the followed logs ----------------------------------------------------------------


def test_bytes_that_went_into_the_log_are_no_storage_move() -> None:
    feed = at_rest(Feed())
    feed.log_bytes += 20 * MIB
    feed.logs(11.0)
    feed.of["TP0"].written += 20 * MIB
    feed.look(15.0)

    assert feed.now.moves == {}


def test_a_log_that_grows_by_another_rank_does_not_hide_what_this_rank_writes() -> None:
    feed = at_rest(Feed(), 0.0)
    for number in range(1, 5):  # 10 MiB written in every second look, the log grows in all of them
        feed.log_bytes += 2000
        feed.of["TP0"].written += 10 * MIB if number % 2 else 0
        feed.logs(10.0 * number - 1)
        feed.look(10.0 * number)

    assert feed.now.moves == {"storage": 30.0}


def test_a_log_that_becomes_unreadable_is_no_storage_move() -> None:
    feed = Feed(log_bytes=100 * MIB)
    at_rest(feed)
    feed.timeline.put([signals.LOG_BYTES.missing("permission", "s", "log")], 12.0, 5.0)
    feed.processes(15.0)

    assert feed.now.moves == {}


# --- children, cpu, tokens ---------------------------------------------------------------------------------


def test_children_move_from_five_percent_of_a_core() -> None:
    busy, sleeping = at_rest(Feed()), at_rest(Feed())
    busy.child_cpu += 0.25
    sleeping.child_cpu += 0.24
    busy.look(15.0)
    sleeping.look(15.0)

    assert busy.now.moves == {"children": 15.0}
    assert sleeping.now.moves == {}


def test_children_of_all_kinds_count_together() -> None:
    feed = Feed()
    feed.look(0.0)

    def read(t: float, compiler: float, other: float) -> None:
        kinds = {"compiler": compiler, "other": other}
        feed.timeline.put([signals.CHILD_CPU.read(v, "s", k) for k, v in kinds.items()], t, 5.0)

    read(5.0, 0.0, 3.0)
    read(10.0, 0.15, 3.15)

    assert feed.now.moves == {"children": 10.0}


def test_a_burst_of_children_cpu_between_two_distant_looks_is_a_move() -> None:
    """A collector that was late must not make a compile invisible."""
    feed = at_rest(Feed())
    feed.child_cpu += 2.0
    feed.look(130.0)

    assert feed.now.moves == {"children": 130.0}


@pytest.mark.parametrize("change", [1, -1])
def test_a_compiler_born_or_gone_moves_children(change: int) -> None:
    feed = at_rest(Feed(compilers=4))
    feed.compilers += change
    feed.look(15.0)

    assert feed.now.moves == {"children": 15.0}


def test_a_pool_of_sleeping_compile_workers_is_flat() -> None:
    feed = Feed(compilers=8)
    feed.look(0.0)
    feed.quiet_until(0.0, 300.0)

    assert feed.now.moves == {}


def test_cpu_moves_above_five_percent_of_a_core_of_a_rank_and_is_not_strong() -> None:
    feed, below = at_rest(Feed()), at_rest(Feed())
    feed.of["TP0"].cpu += 0.26
    below.of["TP0"].cpu += 0.25
    feed.look(15.0)
    below.look(15.0)

    assert feed.now.moves == {"cpu": 15.0}
    assert feed.now.rank_moves == {}
    assert below.now.moves == {}


def test_cpu_of_front_ends_is_no_cpu_move() -> None:
    feed = at_rest(Feed())
    feed.of[FRONTEND].cpu += 5
    feed.look(15.0)

    assert feed.now.moves == {}


def test_cpu_over_a_pause_of_ours_is_the_mean_of_the_pause() -> None:
    """Ten minutes of 0.9 % of a core are not a busy second."""
    feed = at_rest(Feed())
    feed.of["TP0"].cpu += 0.009 * 600
    feed.processes(15.0, measured=610.0)

    assert feed.now.moves == {}


def test_a_late_look_and_the_next_in_time_make_no_burst_of_the_noise_between_them() -> None:
    """A busy machine: the noise of seven seconds between two looks that are over half a second apart."""
    stuck, spinning = at_rest(Feed()), at_rest(Feed())
    stuck.of["TP0"].cpu += 0.009 * 7
    stuck.child_cpu += 0.009 * 7
    spinning.of["TP0"].cpu += 0.5
    stuck.processes(10.5)
    spinning.processes(10.5)

    assert stuck.now.moves == {}
    assert spinning.now.moves == {"cpu": 10.5}


def test_front_ends_count_until_the_server_listens() -> None:
    starting, listening = at_rest(Feed()), at_rest(Feed())
    listening.timeline.put([signals.PORT_LISTENING.read(1, "s", "8000")], 10.0, 10.0)
    for feed in (starting, listening):
        feed.of[FRONTEND].storage += 2 * MIB
        feed.look(15.0)

    assert starting.now.moves == {"storage": 15.0}
    assert listening.now.moves == {}


@pytest.mark.parametrize(("ready", "moves"), [(True, {"tokens": 30.0}), (False, {})])
def test_one_token_is_a_move_of_a_server_that_is_ready(ready: bool, moves: dict[str, float]) -> None:
    """Before that it is a request of the server's own."""
    feed = at_rest(Feed())
    feed.now.was_ready = ready
    for t, value in ((10.0, 7), (20.0, 7), (30.0, 8)):
        feed.timeline.put([signals.GENERATED_TOKENS.read(value, "s")], t, 10.0)

    assert feed.now.moves == moves


def test_children_of_both_kinds_may_be_read_at_different_times() -> None:
    feed = at_rest(Feed())
    for number in range(12):
        kind, t = ("compiler", "other")[number % 2], 10.0 + 2.5 * number
        feed.timeline.put([signals.CHILD_CPU.read(t if kind == "compiler" else 3.0, "s", kind)], t, 5.0)

    assert feed.now.moves["children"] == 35.0


# --- the log -----------------------------------------------------------------------------------------------


def test_a_bar_moves_the_log_only_when_its_k_changes() -> None:
    feed = at_rest(Feed())
    for t, done in ((20.0, 3), (30.0, 3), (40.0, 4), (50.0, 4)):
        feed.tell(t, "load_progress", "TP0", done=done, total=64)

    assert feed.now.moves == {"log": 40.0}
    assert feed.now.rank_moves == {"TP0": 40.0}


@pytest.mark.parametrize(
    "event", ["heartbeat", "waiting", "lock_wait", "access", "watchdog", "repeat", "stats", "error"]
)
def test_lines_that_show_no_progress_move_nothing_whatever_number_they_carry(event: str) -> None:
    feed = at_rest(Feed())
    for number in range(5):
        feed.tell(20.0 + number, event, "TP0", done=number, total=64)

    assert feed.now.moves == {}


def test_novel_lines_alone_carry_ten_in_a_row() -> None:
    feed = at_rest(Feed())
    for number in range(MOST_NOVEL_LINES + 5):
        feed.tell(20.0 + number, "novel")

    assert feed.now.moves == {"log": 20.0 + MOST_NOVEL_LINES - 1}


def test_anything_solid_gives_novel_lines_a_new_budget() -> None:
    feed = at_rest(Feed())
    for number in range(MOST_NOVEL_LINES + 5):
        feed.tell(20.0 + number, "novel")
    feed.of["TP0"].storage += 2 * MIB
    feed.look(50.0)
    feed.tell(55.0, "novel")

    assert feed.now.moves["log"] == 55.0


def test_novel_lines_alone_carry_no_longer_than_suspect_after() -> None:
    feed = at_rest(Feed())
    feed.tell(899.0, "novel")
    feed.tell(901.0, "novel")

    assert feed.now.moves == {"log": 899.0}


def test_novel_lines_after_ready_move_nothing() -> None:
    feed = at_rest(Feed())
    feed.tell(20.0, "ready")
    feed.tell(30.0, "novel")

    assert feed.now.moves == {"log": 20.0}


# --- starts, deaths, waits ---------------------------------------------------------------------------------


def test_a_new_start_time_is_a_new_timeline() -> None:
    feed = at_rest(Feed())
    feed.tell(20.0, "load_begin", "TP0")
    feed.server = server(started_at=feed.server.started_at + 30)
    feed.look(30.0)

    assert feed.now.anchor == 30.0
    assert feed.now.moves == {}
    assert feed.now.startup.phase == "spawned"


def test_the_same_start_seen_again_is_the_same_timeline() -> None:
    feed = at_rest(Feed())

    assert feed.now.anchor == 0.0


def test_a_start_that_is_over_and_forgotten_does_not_begin_anew_but_the_next_one_does() -> None:
    feed = at_rest(Feed(root=False))
    feed.timeline.forget("s")
    feed.look(20.0)
    assert feed.timeline.of("s") is None

    feed.server = server(started_at=feed.server.started_at + 60)
    feed.look(60.0)
    assert feed.now.anchor == 60.0


def test_a_server_whose_first_process_lives_is_seen_again_after_it_was_forgotten() -> None:
    feed = at_rest(Feed())
    feed.timeline.forget("s")
    feed.look(20.0)

    assert feed.now.anchor == 20.0


def test_ten_thousand_ended_servers_leave_a_bounded_memory_of_names() -> None:
    feed = Feed(root=False)
    for number in range(3000):
        feed.server = server(f"vllm-{number}")
        feed.look(float(number))
        feed.timeline.forget(feed.server.name)

    feed.server = server("vllm-2999")
    feed.look(3001.0)

    assert list(feed.timeline) == []
    assert len(feed.timeline._forgotten) <= 1024


def test_deaths_are_kept_in_the_order_they_were_seen_and_once() -> None:
    feed = at_rest(Feed())
    for t, dead in ((20.0, {"TP1"}), (25.0, {"TP0", "TP1"}), (30.0, {"TP0", "TP1"})):
        feed.dead = dead
        feed.look(t)

    assert feed.now.deaths == [(20.0, "TP1"), (25.0, "TP0")]


def test_the_root_is_gone_since_the_first_look_without_it() -> None:
    feed = at_rest(Feed())
    feed.root = False
    feed.look(20.0)
    feed.look(30.0)

    assert feed.now.root_gone_at == 20.0


def test_ranks_are_in_the_order_of_their_numbers() -> None:
    feed = at_rest(Feed(ranks=("TP10", "TP2", "engine", "7", "DP1-TP0")))

    assert feed.now.watched_names == ["7", "DP1-TP0", "TP2", "TP10", "engine"]
    assert feed.now.rank_names == ["7", "DP1-TP0", "TP2", "TP10"]


def test_stopped_lasts_while_every_look_says_so() -> None:
    feed = Feed(waits={"TP0": "stopped"})
    feed.quiet_until(0.0, 30.0)
    assert feed.now.waits["TP0"].stopped_since == 5.0

    feed.waits["TP0"] = "futex"
    feed.look(35.0)
    assert feed.now.waits["TP0"].stopped_since is None


def test_stopped_does_not_last_over_a_time_in_which_nobody_looked() -> None:
    late, paused = at_rest(Feed(waits={"TP0": "stopped"})), at_rest(Feed(waits={"TP0": "stopped"}))
    late.threads(75.0)
    paused.threads(15.0, measured=610.0)

    assert late.now.waits["TP0"].stopped_since == 75.0
    assert paused.now.waits["TP0"].stopped_since == 15.0


def test_an_unreadable_look_ends_what_lasted() -> None:
    feed = Feed(waits={"TP0": "disk"})
    feed.quiet_until(0.0, 20.0)
    feed.waits["TP0"] = ""
    feed.look(25.0)

    waits = feed.now.waits["TP0"]
    assert (waits.disk_since, waits.counts, waits.is_readable) == (None, None, False)


def test_wait_classes_are_those_of_most_looks_of_the_window() -> None:
    feed = Feed()
    for number, wait in enumerate(("futex", "running", "futex", "futex", "sleep", "futex")):
        feed.waits["TP0"] = wait
        feed.look(5.0 * number)

    assert feed.now.waits["TP0"].usual_main() == "futex"
    assert feed.now.waits["TP0"].usual_classes() == {"futex"}


def test_a_rank_without_any_readable_class_is_unreadable_and_not_without_threads() -> None:
    feed = at_rest(Feed())
    missing = [signals.THREADS.missing("permission", "s", "TP0", wait) for wait in ("futex", "poll")]
    feed.timeline.put(missing, 15.0, 5.0)

    assert feed.now.waits["TP0"].counts is None


# --- tracks ------------------------------------------------------------------------------------------------


def test_a_track_is_stale_after_three_of_its_usual_gaps_and_at_least_three_intervals() -> None:
    track = Track()
    for t in (0.0, 5.0, 10.0):
        track.put(1.0, None, t, 5.0, t)

    assert track.is_fresh(25.0)
    assert not track.is_fresh(25.1)


def test_a_slow_collector_makes_its_tracks_stale_later() -> None:
    track = Track()
    for number in range(30):
        track.put(1.0, None, 20.0 * number, 5.0, 20.0 * number)

    assert track.is_fresh(29 * 20.0 + 55)
    assert not track.is_fresh(29 * 20.0 + 65)


def test_a_track_first_read_at_second_zero_has_been_read() -> None:
    track = Track()
    track.put(1.0, None, 0.0, 5.0, 0.0)
    track.put(2.0, None, 5.0, 5.0, 5.0)

    assert track.rate == pytest.approx(0.2)


def test_a_rate_is_only_between_neighbouring_readings() -> None:
    track = Track()
    track.put(1.0, None, 5.0, 5.0, 5.0)
    track.put(None, "permission", 10.0, 5.0, 10.0)
    track.put(9.0, None, 15.0, 5.0, 15.0)

    assert track.rate is None


def test_readings_of_no_server_or_of_an_unknown_one_are_ignored() -> None:
    feed = at_rest(Feed())
    unknown = [signals.CPU_SECONDS.read(1, "other", "TP0"), Reading(signals.RANK_INFO, ("s", "TP0", "1", ""), 1.0)]
    feed.timeline.put(unknown, 20.0, 5.0)

    assert [each.name for each in feed.timeline] == ["s"]
    assert feed.now.track(signals.RANK_INFO, "s", "TP0", "1", "") is None


# --- ready of those that open no port ----------------------------------------------------------------------


def test_an_embedded_engine_is_ready_when_all_its_ranks_have_passed_their_last_marker() -> None:
    feed = at_rest(Feed(server=server(role="embedded")))
    for rank in ("TP0", "TP1"):
        feed.tell(20.0, "capture_begin", rank)
    feed.tell(30.0, "capture_end", "TP0")
    assert feed.now.startup.ready_at is None

    feed.tell(40.0, "capture_end", "TP1")
    assert feed.now.startup.ready_at == 40.0


def test_a_last_marker_that_one_rank_writes_for_all_makes_ready() -> None:
    feed = at_rest(Feed(server=server(role="embedded")))
    feed.tell(20.0, "load_end", "TP0")
    feed.tell(20.0, "load_end", "TP1")
    feed.tell(30.0, "capture_end", "TP0", shared=1.0)

    assert feed.now.startup.ready_at == 30.0


def test_a_follower_is_ready_after_its_last_marker_and_a_server_is_not() -> None:
    follower, first = at_rest(Feed(server=server(nnodes=2, node_rank=1))), at_rest(Feed(server=server(nnodes=2)))
    for feed in (follower, first):
        feed.tell(30.0, "capture_end", "TP0")

    assert follower.now.startup.ready_at == 30.0
    assert first.now.startup.ready_at is None


def test_markers_that_name_no_rank_or_speak_for_all_tell_no_ranks_apart() -> None:
    feed = at_rest(Feed())
    feed.tell(20.0, "load_begin")
    feed.tell(20.0, "load_begin", "TP0", shared=1.0)
    feed.tell(21.0, "load_begin", "TP1")
    feed.tell(22.0, "load_begin", "TP1")

    assert feed.now.markers == {"TP1": {"load_begin"}}


def test_another_start_in_the_same_log_forgets_markers_and_ready() -> None:
    feed = at_rest(Feed())
    feed.tell(20.0, "args")
    feed.tell(21.0, "load_begin", "TP1")
    feed.now.was_ready = True
    feed.tell(30.0, "args")

    assert feed.now.markers == {}
    assert not feed.now.was_ready


def test_a_start_in_the_log_of_a_server_that_is_ready_is_another_servers() -> None:
    """Two servers append to one file: the second must not make the first one start again."""
    feed, engine = at_rest(Feed()), at_rest(Feed(server=server(role="embedded")))
    for each in (feed, engine):
        each.tell(20.0, "args")
        each.tell(21.0, "ready")
        each.tell(100.0, "args")

    assert feed.now.startup.ready_at == 21.0
    assert engine.now.startup.ready_at is None  # a program may build its engine again


def test_a_rank_that_came_back_is_not_dead_any_more() -> None:
    feed = at_rest(Feed())
    feed.dead.add("TP1")
    feed.look(15.0)
    assert feed.now.deaths == [(15.0, "TP1")]

    feed.dead.clear()
    feed.look(20.0)
    assert feed.now.deaths == []


# --- slow counters -----------------------------------------------------------------------------------------


def test_steps_are_those_of_a_counter_that_rises() -> None:
    feed = at_rest(Feed())
    for t, done in ((20.0, 0), (120.0, 1), (150.0, 1), (220.0, 2)):
        feed.tell(t, "capture_progress", "TP0", done=done, total=9)

    assert list(feed.now.steps["capture_progress", "TP0"].durations) == [100.0, 100.0]
    assert feed.now.stretch(240.0) == 300.0


def test_a_share_steps_too_and_a_bar_of_nobody_is_the_first_ranks() -> None:
    feed = at_rest(Feed())
    feed.tell(20.0, "download_progress", ratio=0.1)
    feed.tell(170.0, "download_progress", ratio=0.2)

    assert list(feed.now.steps["download_progress", "TP0"].durations) == [150.0]


@pytest.mark.parametrize("event", ["heartbeat", "waiting", "watchdog", "stats"])
def test_what_is_no_counter_stretches_nothing_whatever_number_it_carries(event: str) -> None:
    feed = at_rest(Feed())
    for number in range(4):
        feed.tell(20.0 + 200.0 * number, event, "TP0", done=number, total=9)

    assert feed.now.steps == {}


def test_steps_of_a_phase_are_forgotten_when_a_counter_of_another_begins() -> None:
    feed = at_rest(Feed())
    feed.tell(20.0, "load_progress", "TP0", done=1, total=9)
    feed.tell(220.0, "load_progress", "TP0", done=2, total=9)
    feed.tell(230.0, "capture_begin", "TP0")
    assert feed.now.stretch(240.0) == 0.0

    feed.tell(240.0, "capture_progress", "TP0", done=1, total=9)
    assert list(feed.now.steps) == [("capture_progress", "TP0")]


def test_a_new_start_in_the_log_forgets_the_steps_of_the_one_before() -> None:
    feed = at_rest(Feed())
    feed.tell(20.0, "args")
    feed.tell(21.0, "load_progress", "TP0", done=1, total=9)
    feed.tell(30.0, "args")

    assert feed.now.steps == {}


def test_counters_whose_steps_are_measured_are_bounded() -> None:
    feed = at_rest(Feed())
    for number in range(MOST_COUNTERS + 50):
        feed.tell(20.0 + number, "load_progress", f"TP{number}", done=1, total=9)

    assert len(feed.now.steps) == MOST_COUNTERS


# --- stats lines and demand --------------------------------------------------------------------------------


def test_a_stats_line_says_what_is_owed_and_only_a_speed_moves_tokens() -> None:
    feed = at_rest(Feed())
    feed.tell(20.0, "ready")
    feed.stats(30.0, running=2, speed=0.0)
    assert (feed.now.owed_since, feed.now.moves) == (30.0, {"log": 20.0})

    feed.stats(40.0, running=2, speed=17.5)
    assert (feed.now.owed_since, feed.now.moves) == (30.0, {"log": 20.0, "tokens": 40.0})

    feed.stats(50.0, running=0)
    assert (feed.now.owed_since, feed.now.moves["tokens"]) == (None, 40.0)


@pytest.mark.parametrize("signal", ["generated", "prompt", "finished"])
def test_each_of_the_three_counters_moves_tokens(signal: str) -> None:
    feed = at_rest(Feed())
    feed.now.was_ready = True
    setattr(feed.serving, signal, 7.0)
    feed.look(20.0)
    assert feed.now.moves == {}

    setattr(feed.serving, signal, 8.0)
    feed.look(30.0)
    assert feed.now.moves == {"tokens": 30.0}


def test_counters_that_begin_anew_are_no_tokens() -> None:
    feed = at_rest(Feed())
    for t, generated in ((20.0, 500.0), (25.0, 3.0)):
        feed.serving.generated = generated
        feed.look(t)

    assert feed.now.moves == {}


def test_work_is_owed_since_both_numbers_of_requests_are_read() -> None:
    feed = at_rest(Feed())
    feed.serving.running, feed.serving.waiting = 0.0, 3.0
    feed.look(20.0)
    feed.look(25.0)
    assert feed.now.owed_since == 20.0

    feed.serving.waiting = 0.0
    feed.look(30.0)
    assert feed.now.owed_since is None


def test_work_is_owed_anew_after_a_time_in_which_nobody_could_ask() -> None:
    """What was finished meanwhile, and whether anything waited, nobody knows."""
    feed = at_rest(Feed())
    feed.serving.running = 1.0
    for t in (20.0, 25.0):
        feed.look(t)
    feed.serving.running = None
    feed.quiet_until(25.0, 325.0)
    feed.serving.running = 1.0
    feed.look(330.0)

    assert feed.now.owed_since == 330.0


def test_one_look_that_was_missed_does_not_begin_the_work_anew() -> None:
    feed = at_rest(Feed())
    feed.serving.running = 1.0
    for t in (20.0, 25.0, 35.0):
        feed.endpoints(t)

    assert feed.now.owed_since == 20.0


# --- time-outs of the health endpoint ----------------------------------------------------------------------


def test_timeouts_count_from_the_first_that_was_seen_and_until_an_answer() -> None:
    feed = at_rest(Feed())
    for t, timeouts in ((20.0, 5.0), (25.0, 5.0), (30.0, 6.0), (35.0, 7.0), (40.0, 8.0)):
        feed.serving.timeouts = timeouts
        feed.look(t)
    assert (feed.now.timeouts.in_a_row, feed.now.timeouts.since) == (3, 30.0)

    feed.serving.health = 503.0
    feed.look(45.0)
    assert feed.now.timeouts.in_a_row == 0


def test_an_answer_between_two_timeouts_breaks_the_row() -> None:
    feed = at_rest(Feed())
    feed.serving.timeouts = 0.0
    for t, timeouts, health in ((20.0, 0.0, None), (25.0, 2.0, None), (30.0, 2.0, 200.0), (35.0, 3.0, None)):
        feed.serving.timeouts, feed.serving.health = timeouts, health
        feed.look(t)

    assert (feed.now.timeouts.in_a_row, feed.now.timeouts.since) == (1, 35.0)


@pytest.mark.parametrize("endpoint", ["models", "metrics"])
def test_timeouts_and_answers_of_other_endpoints_are_no_matter(endpoint: str) -> None:
    feed = at_rest(Feed())
    feed.serving.timeouts = 0.0
    feed.look(20.0)
    feed.serving.timeouts = 1.0
    feed.look(25.0)
    other = (signals.HEALTH_TIMEOUTS.read(9.0, "s", endpoint), signals.HEALTH_STATUS.read(200.0, "s", endpoint))
    feed.timeline.put([signals.HEALTH_TIMEOUTS.read(0.0, "s", endpoint)], 25.0, 5.0)
    feed.timeline.put(other, 30.0, 5.0)

    assert feed.now.timeouts.in_a_row == 1


def test_a_counter_of_timeouts_that_begins_anew_adds_none() -> None:
    feed = at_rest(Feed())
    for t, timeouts in ((20.0, 50.0), (25.0, 0.0)):
        feed.serving.timeouts = timeouts
        feed.look(t)

    assert feed.now.timeouts.in_a_row == 0


# --- kills by the kernel -----------------------------------------------------------------------------------


def test_a_kill_is_seen_when_the_count_grows_and_not_when_it_is_first_read() -> None:
    feed = at_rest(Feed(kills=17.0))
    assert feed.now.oom_killed_at is None

    feed.look(15.0)
    assert feed.now.oom_killed_at is None
    feed.kills = 18.0
    feed.look(20.0)
    feed.look(25.0)
    assert feed.now.oom_killed_at == 20.0


def test_a_count_of_kills_that_cannot_be_read_or_falls_is_no_kill() -> None:
    feed = at_rest(Feed(kills=17.0))
    feed.timeline.put([signals.OOM_KILLS.missing("permission")], 15.0, 5.0)
    feed.kills = 3.0
    feed.look(20.0)

    assert feed.now.oom_killed_at is None


# --- cards -------------------------------------------------------------------------------------------------


def with_cards(*ranks: str) -> Feed:
    return at_rest(Feed(cards={rank: CardFigures() for rank in ranks}))


def test_what_a_card_says_reaches_the_server_that_is_alone_on_it() -> None:
    feed = with_cards("TP0", "TP1")
    feed.look(15.0)
    feed.cards["TP1"].held += 16 * MIB
    feed.look(20.0)
    assert (feed.now.moves, feed.now.rank_moves) == ({"gpu_memory": 20.0}, {"TP1": 20.0})

    feed.cards["TP0"].dram_activity = 0.5
    feed.look(25.0)
    assert feed.now.moves == {"gpu_memory": 20.0, "gpu_power": 25.0}


def test_cards_that_only_chatter_move_nothing() -> None:
    feed = with_cards("TP0", "TP1")
    feed.quiet_until(10.0, 600.0)

    assert feed.now.moves == {}


def test_utilisation_of_a_card_is_ambiguous() -> None:
    feed = with_cards("TP0")
    feed.cards["TP0"].utilization = 1.0
    feed.look(15.0)
    feed.look(20.0)

    assert list(feed.now.moves) == ["gpu_utilization"]
    assert feed.now.rank_moves == {}


def test_bytes_over_the_bus_move_the_server() -> None:
    feed = with_cards("TP0")
    feed.cards["TP0"].pcie = 10e9
    feed.look(15.0)
    feed.look(20.0)

    assert list(feed.now.moves) == ["gpu_bus"]


def test_cards_of_a_server_nobody_knows_move_nobody() -> None:
    feed = with_cards("TP0")
    strange = CardFigures()
    for t in (15.0, 20.0):
        feed.timeline.put(strange.readings("other", "TP7"), t, 5.0)
        strange.held += 1e9

    assert feed.now.moves == {}
    assert feed.timeline.of("other") is None


def resting(**facts: Any) -> Feed:
    """A server whose card takes 122 W and does nothing; nothing was judged yet."""
    return Feed(cards={"TP0": CardFigures(memory_utilization=0.0, power=122.0, limit=700.0)}, **facts)


def what_is_learned(feed: Feed, t: float) -> list[float | None]:
    return [reading.value for reading in feed.timeline.cards.learned(t)]


def test_what_a_card_takes_is_learned_while_a_start_is_not_silent() -> None:
    """The last move is over a window ago before the 30 s are over: that may be a hang already."""
    feed, twin = resting(), resting()
    for each, moves_until in ((feed, 25.0), (twin, 0.0)):
        each.look(0.0)
        for t in range(5, 200, 5):
            each.of["TP0"].storage += MIB if t <= moves_until else 0
            each.cards["TP0"].utilization = 0.0 if t > 50 else 0.01
            each.noise(t)
            each.look(float(t))

    assert what_is_learned(feed, 195.0) == [122.0]
    assert what_is_learned(twin, 195.0) == []


@pytest.mark.parametrize(("running", "expected"), [(0.0, [122.0]), (None, [122.0]), (1.0, [])])
def test_what_a_card_takes_is_learned_of_a_server_that_is_idle(running: float | None, expected: list[float]) -> None:
    feed = resting(serving=Serving(running=running, generated=5.0))
    feed.look(0.0)
    feed.tell(1.0, "ready")
    feed.quiet_until(0.0, 100.0)

    assert what_is_learned(feed, 100.0) == expected


def test_a_server_that_does_not_answer_is_not_idle() -> None:
    """Its demand is not known; a card of it at 0 % may wait in a collective all the same."""
    feed = resting(serving=Serving(generated=5.0, timeouts=0.0))
    feed.look(0.0)
    feed.cards["TP0"].utilization = 0.01
    feed.tell(1.0, "ready")
    for t in range(5, 400, 5):
        feed.serving.timeouts = (feed.serving.timeouts or 0.0) + 1.0
        feed.cards["TP0"].utilization = 0.01 if t < 150 else 0.0
        feed.look(float(t))
        state = feed.verdict(float(t)).state

    assert state != "idle"
    assert what_is_learned(feed, 395.0) == []


def test_who_used_cpu_is_known_by_name() -> None:
    feed = at_rest(Feed())
    for t in (15.0, 20.0, 25.0):
        feed.of["TP1"].cpu += 5.0
        feed.of["frontend"].cpu += 5.0
        feed.processes(t)

    assert feed.now.busy_at == {"TP1": 25.0}


def test_a_call_into_the_driver_reaches_the_servers_without_a_card() -> None:
    feed = at_rest(Feed())
    for t, seconds in ((15.0, 0.0), (20.0, 61.0)):
        feed.timeline.put([signals.GPU_CALL_IN_FLIGHT.read(seconds)], t, 5.0)
        assert gather(feed.now, t, feed.thresholds).driver_hangs is (seconds > 60)


def test_what_no_verdict_looks_at_is_not_kept() -> None:
    """Most readings of a node with many logs are counters of lines."""
    feed = at_rest(Feed())
    lines = Signal("log_lines_total", "", ("server", "log"), "log", "counter")

    feed.timeline.put([lines.read(5.0, "s", "log"), signals.LOG_BYTES.read(900.0, "s", "log")], 20.0, 5.0)

    assert "log_lines_total" not in feed.now.tracks
    assert feed.now.tracks["log_bytes_total"]["s", "log"].value == 900.0
