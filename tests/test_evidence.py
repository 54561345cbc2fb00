"""From a timeline to Evidence: what is too old is not known, and silence is only what was watched."""

from __future__ import annotations

import math

import pytest

from feed import Feed, server
from stallwatch import signals
from stallwatch.model import ChannelState, Process, ProcessId
from stallwatch.timeline import MIB
from stallwatch.verdict import Evidence, gather
from stallwatch.verdict.evidence import RankEvidence


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
