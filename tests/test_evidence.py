"""From a timeline to Evidence: what is too old is not known, and silence is only what was watched."""

from __future__ import annotations

import math
from typing import Any

import pytest

from feed import CardFigures, Feed, Serving, server
from stallwatch import signals
from stallwatch.model import ChannelState, Process, ProcessId, Signal
from stallwatch.timeline import MIB
from stallwatch.verdict import Evidence, gather
from stallwatch.verdict.evidence import MOST_NAMED, RankEvidence


def fed(feed: Feed | None = None, until: float = 100.0) -> Feed:
    feed = feed or Feed()
    feed.look(0.0)
    feed.quiet_until(0.0, until)
    return feed


def evidence(feed: Feed, t: float) -> Evidence:
    return gather(feed.now, t, feed.thresholds)


def channel(feed: Feed, t: float, name: str) -> tuple[str, float | None]:
    state = next(each for each in evidence(feed, t).channels if each.channel == name)
    return state.state, state.age_seconds


def rank(feed: Feed, t: float, name: str) -> RankEvidence:
    return next(each for each in evidence(feed, t).ranks if each.rank == name)


# --- silence -----------------------------------------------------------------------------------------------


def test_silence_counts_from_the_last_strong_move() -> None:
    feed = fed()
    feed.of["TP1"].storage += 2 * MIB
    feed.look(105.0)
    feed.quiet_until(105.0, 150.0)

    assert evidence(feed, 150.0).progress_age == 45.0


def test_no_silence_counts_from_before_we_watched() -> None:
    """Lines found on start are as old as their file."""
    feed = Feed()
    feed.look(1000.0)
    feed.tell(20.0, "load_begin", "TP0")

    assert evidence(feed, 1000.0).progress_age == 0.0


def test_silence_counts_up_to_the_last_look() -> None:
    """What moved since then is not known yet: a collector that is late, or our own pause."""
    feed = fed()

    assert evidence(feed, 104.0).progress_age == 100.0
    assert evidence(feed, 114.9).progress_age == 100.0


def test_the_collector_that_looked_least_lately_decides() -> None:
    feed = fed()
    feed.logs(104.0)
    assert evidence(feed, 104.0).progress_age == 100.0

    feed.processes(104.0)
    assert evidence(feed, 104.0).progress_age == 104.0


def test_silence_goes_on_when_nobody_looks_any_more() -> None:
    feed = fed()

    assert evidence(feed, 116.0).progress_age == 116.0
    assert not evidence(feed, 116.0).storage_readable


def test_ambiguous_channels_do_not_end_a_silence() -> None:
    feed = fed()
    feed.of["TP0"].cpu += 4.0
    feed.look(105.0)

    assert evidence(feed, 105.0).progress_age == 105.0
    assert evidence(feed, 105.0).ambiguous_moving == ("cpu",)


# --- what can be read --------------------------------------------------------------------------------------


def test_storage_is_readable_when_it_is_on_every_live_rank() -> None:
    feed = fed()
    assert evidence(feed, 100.0).storage_readable

    feed.timeline.put([signals.READ_BYTES.missing("permission", "s", "TP1")], 101.0, 5.0)
    found = evidence(feed, 101.0)
    assert (found.storage_readable, found.unreadable_reason) == (False, "permission")


def test_storage_of_a_dead_rank_does_not_count() -> None:
    feed = fed()
    feed.dead = {"TP1"}
    feed.quiet_until(100.0, 130.0)

    assert evidence(feed, 130.0).storage_readable


def test_without_ranks_storage_is_needed_on_every_process() -> None:
    feed = fed(Feed(ranks=()))
    assert evidence(feed, 100.0).storage_readable

    feed.processes(105.0, io=False)
    assert not evidence(feed, 105.0).storage_readable


def test_storage_is_watched_since_the_last_rank_could_be_read() -> None:
    feed = Feed()
    feed.processes(0.0, io=False)
    feed.processes(50.0)
    feed.processes(55.0)

    assert evidence(feed, 55.0).watched_age == 5.0


def test_an_unreadable_time_in_between_does_not_end_the_watch() -> None:
    """Counters of the kernel go on: what moved in that time is seen afterwards."""
    feed = fed()
    feed.processes(105.0, io=False)
    feed.look(110.0)

    assert evidence(feed, 110.0).watched_age == 110.0


@pytest.mark.parametrize(("has_log", "expected"), [(True, "readable"), (False, "absent")])
def test_a_server_without_any_log_has_none_to_be_silent(has_log: bool, expected: str) -> None:
    feed = fed(Feed(log=has_log))

    assert evidence(feed, 100.0).log == expected
    assert channel(feed, 100.0, "log")[0] == ("flat" if has_log else "absent")


def test_a_log_that_is_not_read_any_more_is_unreadable() -> None:
    feed = fed()
    feed.processes(116.0)

    assert evidence(feed, 116.0).log == "unreadable"
    assert channel(feed, 116.0, "log") == ("unreadable", None)


def test_one_readable_log_of_two_is_enough() -> None:
    feed = fed()
    feed.timeline.put([signals.LOG_BYTES.missing("permission", "s", "stderr")], 100.0, 5.0)

    assert evidence(feed, 100.0).log == "readable"


# --- channels ----------------------------------------------------------------------------------------------


def test_a_channel_moves_for_one_window_and_its_age_goes_on() -> None:
    feed = fed()
    feed.of["TP0"].minor += 5000
    feed.look(105.0)
    feed.quiet_until(105.0, 170.0)

    assert channel(feed, 165.0, "memory") == ("moving", 60.0)
    assert channel(feed, 166.0, "memory") == ("flat", 61.0)


def test_channels_that_never_moved_are_flat_without_an_age() -> None:
    feed = fed()

    assert evidence(feed, 100.0).channels == (
        ChannelState("log", "flat", None),
        ChannelState("storage", "flat", None),
        ChannelState("memory", "flat", None),
        ChannelState("children", "flat", None),
        ChannelState("gpu_memory", "absent", None),
        ChannelState("gpu_bus", "absent", None),
        ChannelState("gpu_power", "absent", None),
        ChannelState("tokens", "absent", None),
        ChannelState("cpu", "flat", None),
        ChannelState("gpu_utilization", "absent", None),
    )


def test_channels_of_a_collector_that_stopped_are_unreadable() -> None:
    feed = fed()
    feed.logs(120.0)

    unreadable = [each.channel for each in evidence(feed, 120.0).channels if each.state == "unreadable"]
    assert unreadable == ["storage", "memory", "children", "cpu"]


def test_tokens_are_absent_before_ready() -> None:
    feed = fed()
    feed.timeline.put([signals.GENERATED_TOKENS.read(7, "s")], 100.0, 5.0)
    assert channel(feed, 100.0, "tokens")[0] == "absent"

    feed.tell(101.0, "ready")
    assert channel(feed, 101.0, "tokens") == ("flat", None)


# --- ready, demand -----------------------------------------------------------------------------------------


def test_the_ready_line_and_health_200_make_ready() -> None:
    by_line, by_health, unhealthy = fed(), fed(), fed()
    by_line.tell(100.0, "ready")
    by_health.timeline.put([signals.HEALTH_STATUS.read(200, "s", "health")], 100.0, 30.0)
    unhealthy.timeline.put([signals.HEALTH_STATUS.read(503, "s", "health")], 100.0, 30.0)

    assert [evidence(feed, 100.0).ready for feed in (by_line, by_health, unhealthy)] == [True, True, False]


def test_the_list_of_models_makes_ready_only_where_no_log_can_tell_better() -> None:
    """SGLang answers it while it still warms up."""
    with_log, without = fed(), fed(Feed(log=False))
    for feed in (with_log, without):
        feed.timeline.put([signals.HEALTH_STATUS.read(200, "s", "models")], 100.0, 30.0)

    assert not evidence(with_log, 100.0).ready
    assert evidence(without, 100.0).ready


def test_an_embedded_engine_without_a_log_is_ready_when_it_has_worked_and_memory_is_flat() -> None:
    feed = fed(Feed(log=False, server=server(role="embedded")))
    assert not evidence(feed, 100.0).ready

    feed.of["TP0"].cpu += 4.0
    feed.of["TP0"].minor += 9000
    feed.look(105.0)
    feed.quiet_until(105.0, 165.0)
    assert not evidence(feed, 165.0).ready
    assert evidence(feed, 166.0).ready


@pytest.mark.parametrize(("event", "is_ready"), [("repeat", True), ("novel", True), ("load_begin", False)])
def test_a_log_with_a_program_s_own_lines_alone_says_nothing_of_its_engine(event: str, is_ready: bool) -> None:
    """The engine's logging is switched off, or goes elsewhere."""
    feed = fed(Feed(server=server(role="embedded")))
    feed.tell(100.0, event)
    feed.of["TP0"].cpu += 4.0
    feed.of["TP0"].minor += 9000
    feed.look(105.0)
    feed.quiet_until(105.0, 170.0)

    assert evidence(feed, 170.0).ready == is_ready


def test_a_server_that_opens_a_port_is_not_ready_by_work_alone() -> None:
    feed = fed(Feed(log=False))
    feed.of["TP0"].cpu += 4.0
    feed.of["TP0"].minor += 9000
    feed.look(105.0)
    feed.quiet_until(105.0, 170.0)

    assert not evidence(feed, 170.0).ready


def test_demand_is_running_and_waiting_requests_while_both_are_fresh() -> None:
    feed = fed()
    requests = [signals.REQUESTS_RUNNING.read(2, "s"), signals.REQUESTS_WAITING.read(3, "s")]
    assert evidence(feed, 100.0).demand is None

    feed.timeline.put(requests, 100.0, 30.0)
    assert evidence(feed, 190.0).demand == 5.0
    assert evidence(feed, 191.0).demand is None


# --- ranks and threads -------------------------------------------------------------------------------------


def test_a_rank_is_what_its_threads_markers_and_moves_say() -> None:
    feed = fed(Feed(waits={"TP1": "disk"}))
    feed.tell(80.0, "load_begin", "TP1")

    assert rank(feed, 100.0, "TP1") == RankEvidence(
        "TP1",
        alive=True,
        markers=1,
        main_wait="disk",
        waits=frozenset(("disk",)),
        progress_age=20.0,
        disk_age=100.0,
    )


def test_a_rank_that_never_moved_is_as_old_as_the_watch() -> None:
    assert rank(fed(), 100.0, "TP0").progress_age == 100.0


def test_threads_nobody_looks_at_any_more_tell_nothing() -> None:
    feed = fed(Feed(waits={"TP1": "stopped"}))
    feed.processes(120.0)

    old = rank(feed, 120.0, "TP1")
    assert (old.main_wait, old.waits, old.stopped_age) == (None, None, None)
    assert not evidence(feed, 120.0).threads_readable


def test_threads_are_readable_when_they_are_on_every_live_rank() -> None:
    feed = fed()
    assert evidence(feed, 100.0).threads_readable

    feed.waits["TP1"] = ""
    feed.threads(101.0)
    assert not evidence(feed, 101.0).threads_readable


def test_an_unreadable_rank_waits_in_nothing_known_and_not_in_nothing() -> None:
    assert rank(fed(Feed(waits={"TP1": ""})), 100.0, "TP1").waits is None


def test_deaths_and_the_root_are_ages() -> None:
    feed = fed()
    feed.dead, feed.root = {"TP1"}, False
    feed.look(105.0)

    found = evidence(feed, 110.0)
    assert (found.deaths, found.live_ranks, found.root_gone_age) == (((5.0, "TP1"),), 1, 5.0)


def test_fatal_and_shutdown_lines_are_ages() -> None:
    feed = fed()
    feed.tell(90.0, "fatal", "TP1", kind="oom")
    feed.tell(95.0, "shutdown")

    found = evidence(feed, 100.0)
    assert (found.fatal_age, found.shutdown_age, found.ends_orderly) == (10.0, 5.0, True)


def test_a_configured_server_that_never_came_is_not_known() -> None:
    feed = Feed(ranks=(), server=server(starts=0, processes=()))
    feed.timeline.see([feed.server], 0.0)
    feed.timeline.put([signals.SERVER_STARTS.read(0, "s")], 0.0, 5.0)

    assert not evidence(feed, 0.0).known


def test_given_a_dated_age_the_watch_of_the_call_is_enough() -> None:
    feed = Feed(server=server(processes=(Process(ProcessId(1, 1), "main"),)))
    feed.look(0.0)
    found = gather(feed.now, 15.0, feed.thresholds, progress_age=2460.0)

    assert (found.progress_age, found.watched_age) == (2460.0, math.inf)


# --- what is too old is not known ----------------------------------------------------------------------------

LOOK = 100.0
"""The last look of a collector that looks every five seconds: it is believed for 15 s."""


def looked(**facts: object) -> Feed:
    """A ready server of which all this was read until LOOK, and nothing after."""
    feed = Feed(**facts)  # type: ignore[arg-type]
    feed.look(LOOK - 5)
    feed.tell(LOOK - 5, "ready")
    feed.look(LOOK)
    return feed


SPEAKING = {
    "frozen": looked(frozen=1.0),
    "paused": looked(serving=Serving(paused=1.0)),
    "port_foreign": looked(serving=Serving(foreign=1.0)),
    "stale_lock": looked(lock_age={"build": 50.0}, lock_held={"build": 0.0}),
    "held_lock": looked(lock_age={"build": 50.0}, lock_held={"build": 1.0}),
    "demand": looked(serving=Serving(running=1.0)),
    "tokens_counted": looked(serving=Serving(generated=7.0)),
    "gpu_readable": looked(cards={"TP0": CardFigures()}),
    "cards_rest": looked(cards={"TP0": CardFigures(), "TP1": CardFigures()}),
}
SILENT = looked(
    frozen=0.0,
    scope=1.0,
    stopping=0.0,
    serving=Serving(paused=0.0, foreign=0.0, running=0.0, timeouts=0.0),
    cards={"TP0": CardFigures(utilization=0.5)},
)


@pytest.mark.parametrize("name", sorted(SPEAKING))
def test_what_is_read_is_believed_for_three_gaps_and_not_longer(name: str) -> None:
    feed = SPEAKING[name]

    assert getattr(evidence(feed, LOOK), name)
    assert getattr(evidence(feed, LOOK + 15.0), name)
    assert not getattr(evidence(feed, LOOK + 15.1), name)


@pytest.mark.parametrize("name", sorted(set(SPEAKING) - {"tokens_counted", "gpu_readable"}))
def test_a_server_of_which_the_opposite_is_read_says_the_opposite(name: str) -> None:
    assert not getattr(evidence(SILENT, LOOK), name)


def test_a_traced_rank_is_traced_while_it_is_read() -> None:
    feed = looked(traced={"TP1"})

    assert [rank(feed, LOOK, name).traced for name in ("TP0", "TP1")] == [False, True]
    assert not rank(feed, LOOK + 15.1, "TP1").traced


@pytest.mark.parametrize(("timeouts", "expected"), [(3.0, 3), (0.0, 0)])
def test_timeouts_are_in_a_row_while_somebody_asks(timeouts: float, expected: int) -> None:
    feed = looked(serving=Serving(timeouts=0.0))
    feed.serving.timeouts = timeouts
    feed.look(LOOK + 5)

    found = evidence(feed, LOOK + 20.0)
    assert (found.timeouts, found.timeouts_span) == (expected, 0.0)  # all seen at one look
    later = evidence(feed, LOOK + 20.1)
    assert (later.timeouts, later.timeouts_span) == (0, 0.0)


def test_how_a_server_ended_is_remembered_when_nothing_is_left_to_be_read() -> None:
    """Its unit and its container are gone with it."""
    feed = looked(scope=0.0, stopping=1.0)
    late = evidence(feed, LOOK + 5000.0)
    assert (late.scope_alive, late.stopping, late.ends_orderly) == (False, True, True)

    silent = evidence(SILENT, LOOK + 5000.0)
    assert (silent.scope_alive, silent.stopping, silent.ends_orderly) == (True, False, False)
    nothing = evidence(looked(), LOOK)
    assert (nothing.scope_alive, nothing.stopping) == (None, None)


def test_a_kill_on_the_node_is_an_age() -> None:
    feed = looked(kills=4.0)
    assert evidence(feed, LOOK).oom_age is None

    feed.kills = 5.0
    feed.look(LOOK + 5)
    assert evidence(feed, LOOK + 25).oom_age == 20.0


def test_what_could_be_read_a_moment_ago_blinks_and_what_could_not_does_not() -> None:
    feed = fed()
    for t, blinks in ((105.0, True), (110.0, True), (115.0, True), (120.0, False)):
        feed.processes(t, io=False)
        feed.logs(t)
        feed.threads(t)
        assert evidence(feed, t).blinks is blinks, t
    feed.look(125.0)

    assert not evidence(feed, 125.0).blinks


# --- locks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "held", "expected"),
    [
        (9000.0, {"build": 0.0}, (True, False)),
        (1.0, {"build": 0.0}, (True, False)),
        (9000.0, {"build": 1.0}, (False, True)),
        (9000.0, {"build": None}, (False, True)),  # a network file system
        (9000.0, {}, (False, True)),  # nothing is said of that: it may be held elsewhere
        (1.0, {"download": 0.0}, (False, True)),  # that is said of another one
    ],
)
def test_a_lock_is_stale_when_nobody_can_hold_it(
    age: float, held: dict[str, float | None], expected: tuple[bool, bool]
) -> None:
    feed = fed(Feed(lock_age={"build": age}, lock_held=held))

    found = evidence(feed, 100.0)
    assert (found.stale_lock, found.held_lock) == expected


def test_whether_a_lock_is_held_is_not_believed_when_it_was_read_long_ago() -> None:
    feed = fed(Feed(lock_age={"build": 9000.0}, lock_held={"build": 0.0}))
    feed.lock_held = {}
    feed.quiet_until(100.0, 120.0)

    found = evidence(feed, 120.0)
    assert (found.stale_lock, found.held_lock) == (False, True)


def test_locks_of_both_kinds_are_seen_side_by_side() -> None:
    feed = fed(Feed(lock_age={"build": 9.0, "download": 9.0}, lock_held={"build": 0.0, "download": 1.0}))

    found = evidence(feed, 100.0)
    assert (found.stale_lock, found.held_lock) == (True, True)


def test_a_lock_file_that_is_gone_is_no_lock() -> None:
    feed = fed(Feed(lock_age={"build": 9.0}, lock_held={"build": 0.0}))
    feed.lock_age.clear()
    feed.quiet_until(100.0, 120.0)

    found = evidence(feed, 120.0)
    assert (found.stale_lock, found.held_lock) == (False, False)


# --- ranks that never came -----------------------------------------------------------------------------------


def missing(ranks: tuple[str, ...], **facts: Any) -> tuple[int, tuple[str, ...]]:
    found = evidence(fed(Feed(ranks=ranks, server=server(**facts))), 100.0)
    return found.missing, found.missing_ranks


def test_ranks_whose_names_are_known_beforehand_are_missed_by_name() -> None:
    expected = ("TP0", "TP1", "TP2")

    assert missing(("TP0", "TP1"), expected_ranks=expected) == (1, ("TP2",))
    assert missing(expected, expected_ranks=expected) == (0, ())


def test_ranks_of_a_known_number_are_missed_and_named_where_only_tensor_parallel() -> None:
    assert missing(("TP0", "TP2"), tensor_parallel=4) == (2, ("TP1", "TP3"))
    assert missing(("TP4", "TP6", "TP7"), tensor_parallel=8, nnodes=2, node_rank=1) == (1, ("TP5",))
    assert missing(("DP0-TP0", "DP0-TP1"), tensor_parallel=2, data_parallel=2) == (2, ())
    assert missing(("TP0", "TP9"), tensor_parallel=4) == (2, ())  # names that nobody expects
    assert missing(("TP0", "TP1"), tensor_parallel=2) == (0, ())
    assert missing(("TP0", "TP1", "TP2"), tensor_parallel=2) == (0, ())


def test_a_number_of_ranks_that_no_node_has_is_counted_and_not_spelled_out() -> None:
    """Whoever may start a process may write any number behind --tp-size."""
    assert missing(("TP0",), tensor_parallel=10**9, pipeline_parallel=10**9) == (10**18 - 1, ())
    assert len(missing(("TP0",), tensor_parallel=MOST_NAMED)[1]) == MOST_NAMED - 1


def test_nothing_is_missed_before_the_first_rank_came_nor_of_an_embedded_engine() -> None:
    assert missing((), tensor_parallel=4) == (0, ())
    assert missing(("engine",), tensor_parallel=4) == (0, ())
    assert missing(("TP0",), tensor_parallel=4, role="embedded") == (0, ())
    assert missing(("TP0",), tensor_parallel=4) == (3, ("TP1", "TP2", "TP3"))


def test_nothing_is_missed_while_a_process_has_not_said_which_rank_it_is() -> None:
    nameless = (Process(ProcessId(100, 1), "main"), Process(ProcessId(101, 1), "worker"))

    assert missing(("TP0",), tensor_parallel=2, processes=nameless) == (0, ())
    assert missing(("TP0",), tensor_parallel=2, processes=nameless[:1]) == (1, ("TP1",))


def test_a_rank_that_came_and_died_is_not_missing() -> None:
    feed = fed(Feed(server=server(tensor_parallel=2)))
    feed.dead = {"TP1"}
    feed.look(105.0)

    found = evidence(feed, 105.0)
    assert (found.missing, found.rank_count) == (0, 2)


# --- serving -------------------------------------------------------------------------------------------------


def serving(feed: Feed, *looks: tuple[float, dict[str, float | None]]) -> Feed:
    for t, facts in looks:
        for name, value in facts.items():
            setattr(feed.serving, name, value)
        feed.look(t)
    return feed


def test_work_is_unserved_since_the_later_of_the_last_token_and_the_moment_it_was_owed() -> None:
    first = serving(
        looked(serving=Serving(running=0.0, generated=5.0)),
        (105.0, {"generated": 9.0}),
        (110.0, {"running": 1.0}),
        (115.0, {}),
    )
    assert (evidence(first, 115.0).unserved_age, evidence(first, 115.0).tokens_age) == (5.0, 10.0)

    serving(first, (120.0, {"generated": 10.0}), (125.0, {}))
    assert (evidence(first, 125.0).unserved_age, evidence(first, 125.0).tokens_age) == (5.0, 5.0)


def test_nothing_is_unserved_of_a_server_that_owes_nothing() -> None:
    feed = serving(looked(serving=Serving(running=1.0, generated=5.0)), (105.0, {"running": 0.0}))

    assert evidence(feed, 105.0).unserved_age is None
    assert evidence(looked(), LOOK).unserved_age is None


def test_a_server_that_never_made_a_token_is_unserved_since_the_work_came() -> None:
    feed = serving(looked(serving=Serving(running=1.0, generated=5.0)), (105.0, {}))

    assert (evidence(feed, 105.0).unserved_age, evidence(feed, 105.0).tokens_age) == (10.0, math.inf)


def test_finished_requests_alone_serve_an_embedding_server() -> None:
    """It generates nothing: its other counters stand still for ever."""
    feed = serving(
        looked(serving=Serving(running=1.0, generated=0.0, finished=5.0)), (105.0, {"finished": 6.0}), (110.0, {})
    )

    assert evidence(feed, 110.0).unserved_age == 5.0


def test_a_counter_that_cannot_be_read_any_more_is_not_flat() -> None:
    """The one that is left is not the one that moves."""
    feed = serving(looked(serving=Serving(running=1.0, generated=0.0, finished=5.0)), (105.0, {}))
    assert evidence(feed, 105.0).tokens_counted

    feed.serving.finished = None
    feed.quiet_until(105.0, 130.0)
    assert not evidence(feed, 130.0).tokens_counted


def test_stats_lines_are_tokens_and_demand_for_three_of_their_gaps_and_no_counters() -> None:
    feed = looked()
    feed.stats(LOOK, running=2, speed=0.0)

    found = evidence(feed, 130.0)
    assert (found.demand, found.tokens_counted, channel(feed, 130.0, "tokens")[0]) == (2.0, False, "flat")
    late = evidence(feed, 130.1)
    assert (late.demand, channel(feed, 130.1, "tokens")[0]) == (None, "absent")


def test_stats_lines_without_a_speed_say_nothing_of_tokens() -> None:
    feed = looked()
    feed.stats(LOOK, running=2)

    assert (evidence(feed, LOOK).demand, channel(feed, LOOK, "tokens")[0]) == (2.0, "absent")


def test_a_slow_counter_of_this_phase_reaches_the_verdict() -> None:
    feed = fed()
    for number in range(3):
        feed.tell(100.0 + 200.0 * number, "capture_progress", "TP0", done=number, total=9)
    assert evidence(feed, 500.0).stretch == 600.0

    feed.tell(510.0, "warmup_begin", "TP0")
    assert evidence(feed, 510.0).stretch == 0.0


# --- cards ---------------------------------------------------------------------------------------------------


def test_cards_at_rest_are_so_for_a_window() -> None:
    feed = looked(cards={"TP0": CardFigures(dram_activity=0.5), "TP1": CardFigures()})
    assert evidence(feed, LOOK).cards_rest is False

    feed.cards["TP0"].dram_activity = 0.0
    feed.quiet_until(LOOK, LOOK + 65.0)
    assert evidence(feed, LOOK + 60.0).cards_rest is False
    assert evidence(feed, LOOK + 65.0).cards_rest is True


def test_cards_that_are_used_without_known_idle_power_are_not_said_to_rest() -> None:
    feed = looked(cards={"TP0": CardFigures(utilization=1.0, dram_activity=0.0)})

    assert evidence(feed, LOOK).cards_rest is None
    assert evidence(feed, LOOK).ambiguous_moving == ("gpu_utilization",)


# --- once ready ----------------------------------------------------------------------------------------------


def test_once_ready_is_ready_until_another_start() -> None:
    feed = fed()
    feed.serving.health = 200.0
    feed.look(105.0)
    assert feed.tick(105.0).ready

    feed.serving.health = 503.0
    feed.quiet_until(105.0, 300.0)
    assert evidence(feed, 300.0).ready

    feed.server = server(started_at=feed.server.started_at + 400.0, starts=2)
    feed.look(400.0)
    assert not evidence(feed, 400.0).ready


def test_a_follower_is_ready_by_its_last_marker_and_the_first_node_is_not() -> None:
    for node_rank, expected in ((1, True), (0, False)):
        feed = fed(Feed(server=server(nnodes=2, node_rank=node_rank)))
        for name in ("TP0", "TP1"):
            feed.tell(100.0, "capture_end", name)

        assert evidence(feed, 100.0).ready is expected


# --- what was read beside storage ----------------------------------------------------------------------------

BESIDE = (
    (signals.PAGE_FAULTS, ("s", "TP1", "minor")),
    (signals.RESIDENT_MEMORY, ("s", "TP1")),
    (signals.WRITTEN_BYTES, ("s", "TP1")),
    (signals.CHILD_CPU, ("s", "other")),
)


@pytest.mark.parametrize(("signal", "labels"), BESIDE)
def test_a_channel_that_was_followed_and_fell_silent_is_not_flat(signal: Signal, labels: tuple[str, ...]) -> None:
    feed = fed()
    feed.timeline.put([signal.missing("error", *labels)], 100.0, 5.0)

    found = evidence(feed, 100.0)
    assert (found.storage_readable, found.unreadable_reason) == (False, "error")


@pytest.mark.parametrize(("signal", "labels"), BESIDE)
def test_a_figure_that_was_said_once_is_a_fact_and_no_channel(signal: Signal, labels: tuple[str, ...]) -> None:
    feed = fed()
    track = feed.now.track(signal, *labels)
    assert track is not None
    track.read_at, track.is_followed = 0.0, False

    assert evidence(feed, 100.0).storage_readable
