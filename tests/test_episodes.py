"""The story of a server name across ticks and restarts."""

from __future__ import annotations

import pytest

from feed import WALL, Feed, server
from stallwatch import signals
from stallwatch.episodes import FAILED_KEPT_SECONDS, MOST_ENDED
from stallwatch.model import Process, ProcessId, Verdict
from stallwatch.timeline import MIB


def started(feed: Feed | None = None) -> Feed:
    """Seen at second 0, with a baseline for everything."""
    feed = feed or Feed()
    feed.look(0.0)
    feed.tick(0.0)
    return feed


def states(verdicts: list[Verdict]) -> list[str]:
    """States in order, each once in a row."""
    found = [verdict.state for verdict in verdicts]
    return [state for index, state in enumerate(found) if index == 0 or found[index - 1] != state]


def ready(feed: Feed, t: float = 5.0) -> Feed:
    feed.tell(t, "ready")
    feed.look(t)
    feed.tick(t)
    return feed


# --- since and stalled time --------------------------------------------------------------------------------


def test_a_silent_start_goes_from_working_over_quiet_to_stalled_by_the_clock() -> None:
    feed = started()
    verdicts = feed.quiet_until(0.0, 300.0)

    assert states(verdicts) == ["working", "quiet", "stalled"]
    assert verdicts[-1] == Verdict("stalled", "idle_wait", since=240.0)


def test_since_as_unix_time_does_not_follow_a_step_of_the_wall_clock() -> None:
    feed = started()
    feed.quiet_until(0.0, 300.0)
    feed.look(305.0)

    assert feed.tick(305.0, wall=WALL + 305 + 3600).since_timestamp == WALL + 240


def test_a_step_of_the_wall_clock_changes_no_verdict() -> None:
    feed, twin = started(), started()
    for number in range(1, 60):
        t = 5.0 * number
        feed.look(t)
        twin.look(t)
        step = 3600.0 if number % 2 else -3600.0
        assert feed.tick(t, wall=WALL + t + step).verdict == twin.tick(t).verdict


def test_stalled_seconds_add_up_over_episodes_and_restarts() -> None:
    feed = started()
    feed.quiet_until(0.0, 250.0)
    assert feed.tick(250.0).stalled_seconds == 10.0

    feed.server = server(started_at=WALL + 255)
    feed.look(255.0)
    assert feed.tick(255.0).stalled_seconds == 15.0
    feed.quiet_until(255.0, 505.0)
    assert feed.tick(505.0).stalled_seconds == 25.0


def test_each_change_of_a_verdict_is_told_once() -> None:
    feed = started()
    told = []
    for number in range(1, 60):
        feed.look(5.0 * number)
        feed.tick(5.0 * number)
        told += [(change.before and change.before.state, change.after.state) for change in feed.episodes.changes]

    assert told == [("working", "quiet"), ("quiet", "stalled")]


# --- ready -------------------------------------------------------------------------------------------------


def test_ready_stays_ready_when_the_health_endpoint_stops_answering() -> None:
    """Else a ready server would become one that has been silent in its start for hours."""
    feed = started()
    feed.timeline.put([signals.HEALTH_STATUS.read(200, "s", "health")], 5.0, 5.0)
    feed.look(5.0)
    assert feed.tick(5.0).ready

    feed.timeline.put([signals.HEALTH_STATUS.missing("timeout", "s", "health")], 10.0, 5.0)
    verdicts = feed.quiet_until(5.0, 900.0)
    assert states(verdicts) == ["idle"]


def test_a_start_that_never_became_ready_stalls_in_the_same_silence() -> None:
    feed = started()
    feed.timeline.put([signals.HEALTH_STATUS.read(503, "s", "health")], 5.0, 5.0)

    assert states(feed.quiet_until(0.0, 900.0)) == ["working", "quiet", "stalled"]


def test_a_start_that_became_ready_is_counted_once_with_its_duration() -> None:
    feed = ready(started(Feed(server=server(started_at=WALL - 30, model="org/m"))), 65.0)
    feed.look(70.0)

    assert feed.tick(70.0).startup_seconds == 95.0
    (histogram,) = feed.episodes.startups()
    assert (histogram.model, histogram.counts[-1], histogram.total_seconds) == ("org/m", 1, 95.0)
    assert histogram.counts[:3] == (0, 0, 1)  # 30 s, 60 s, 120 s


def test_a_server_that_was_ready_before_we_came_is_no_start_of_ours() -> None:
    feed = Feed()
    feed.look(1000.0)
    feed.tell(20.0, "ready")

    assert feed.tick(1000.0).startup_seconds is None
    assert feed.episodes.startups() == ()


# --- ends --------------------------------------------------------------------------------------------------


def test_a_server_that_ended_orderly_is_dropped_after_retention() -> None:
    feed = ready(started())
    feed.tell(10.0, "shutdown")
    feed.root = False
    feed.look(10.0)
    assert feed.verdict(10.0).state == "gone"

    assert feed.episodes.tick(610.0, WALL) != ()
    assert feed.episodes.tick(611.0, WALL) == ()


def test_late_readings_about_a_dropped_server_do_not_bring_it_back_as_a_failed_one() -> None:
    """A child that outlives the first process keeps the collector reporting it."""
    feed = ready(started())
    feed.root = False
    feed.look(10.0)
    feed.tick(10.0)
    feed.episodes.tick(700.0, WALL)
    feed.look(705.0)

    assert feed.episodes.tick(705.0, WALL) == ()


def test_a_failed_server_is_kept_for_a_day() -> None:
    feed = started()
    feed.root = False
    feed.look(5.0)
    assert feed.verdict(5.0).state == "failed"

    assert feed.episodes.tick(5.0 + FAILED_KEPT_SECONDS, WALL)[0].verdict.state == "failed"
    assert feed.episodes.tick(6.0 + FAILED_KEPT_SECONDS, WALL) == ()


def test_a_failed_server_that_starts_again_works_again() -> None:
    feed = started()
    feed.dead = {"TP1"}
    feed.look(5.0)
    assert feed.verdict(5.0) == Verdict("failed", "rank_dead", 5.0, "TP1")

    feed.dead, feed.server = set(), server(started_at=WALL + 30, starts=2)
    feed.look(30.0)
    assert feed.verdict(30.0) == Verdict("working", "none", 30.0)
    assert feed.tick(30.0).starts == 2


def test_a_failed_server_stays_failed_when_it_is_only_seen_again() -> None:
    feed = started()
    feed.dead = {"TP1"}
    feed.look(5.0)
    feed.tick(5.0)
    feed.dead = set()
    feed.of["TP0"].storage += 5 * MIB
    feed.look(10.0)

    assert feed.verdict(10.0).state == "failed"


def test_a_configured_server_that_never_came_is_gone_and_not_dropped() -> None:
    feed = Feed(ranks=(), server=server(started_at=0.0, starts=0, processes=()))
    for t in (0.0, 5000.0):
        feed.timeline.see([feed.server], t)
        feed.timeline.put([signals.SERVER_STARTS.read(0, "s")], t, 5.0)

    assert feed.verdict(5000.0).state == "gone"
    assert feed.verdict(9000.0).state == "gone"
    assert feed.tick(9000.0).starts == 0


def test_restart_loops_under_ever_new_names_are_bounded() -> None:
    feed = Feed(ranks=())
    for number in range(3 * MOST_ENDED):
        feed.server, feed.root = server(f"vllm-{number}", started_at=WALL + number), False
        feed.look(float(number))
        feed.episodes.tick(float(number), WALL)

    reports = feed.episodes.tick(1000.0, WALL)
    assert len(reports) == MOST_ENDED
    assert f"vllm-{3 * MOST_ENDED - 1}" in [report.server.name for report in reports]
    assert len(feed.episodes._episodes) == MOST_ENDED


# --- check: dated evidence ---------------------------------------------------------------------------------


def watched(feed: Feed, seconds: float = 15.0) -> Feed:
    feed.look(0.0)
    for number in range(1, int(seconds) + 1):
        feed.look(float(number))
    return feed


def test_check_says_stalled_at_once_when_the_last_dated_progress_is_old() -> None:
    report = watched(Feed()).tick(15.0, dated={"s": WALL + 15 - 2460})

    assert (report.verdict.state, report.verdict.reason) == ("stalled", "idle_wait")
    assert report.since_timestamp == WALL + 15 - 2460


@pytest.mark.parametrize(("age", "state"), [(30.0, "working"), (100.0, "quiet"), (239.0, "quiet")])
def test_check_is_not_hasty_when_the_dated_progress_is_young(age: float, state: str) -> None:
    assert watched(Feed()).tick(15.0, dated={"s": WALL + 15 - age}).verdict.state == state


def test_check_says_working_when_anything_strong_moves_meanwhile() -> None:
    feed = Feed()
    feed.look(0.0)
    feed.of["TP0"].storage += 2 * MIB
    feed.look(10.0)

    assert feed.tick(15.0, dated={"s": WALL - 9000}).verdict.state == "working"


def test_check_says_suspect_when_only_cpu_moves_meanwhile() -> None:
    feed = Feed()
    feed.look(0.0)
    feed.of["TP0"].cpu += 9.0
    feed.look(10.0)

    verdict = feed.tick(15.0, dated={"s": WALL - 9000}).verdict
    assert (verdict.state, verdict.reason) == ("suspect", "busy_spin")


def test_check_without_dated_evidence_is_quiet_and_says_how_long_to_watch() -> None:
    report = watched(Feed()).tick(15.0, dated={})

    assert report.verdict.state == "quiet"
    assert report.advice[0] == "nothing moved yet; watch for 180 s more to know"


def test_check_without_the_right_to_read_is_unknown() -> None:
    feed = Feed()
    for t in (0.0, 10.0, 15.0):
        feed.processes(t, io=False)
        feed.logs(t)

    report = feed.tick(15.0, dated={"s": WALL - 9000})
    assert (report.verdict.state, report.verdict.reason) == ("unknown", "unreadable")
    assert "CAP_SYS_PTRACE" in report.advice[0]


# --- what a report says ------------------------------------------------------------------------------------


def test_a_rank_state_holds_what_is_known_of_the_rank() -> None:
    processes = (Process(ProcessId(100, 1), "main"), Process(ProcessId(200, 2), "TP1"))
    feed = started(Feed(server=server(processes=processes)))
    feed.tell(1.0, "load_progress", "TP1", done=16, total=64)
    feed.look(5.0)

    zero, one = feed.tick(5.0).ranks
    assert (one.rank, one.pid, one.phase, one.load_progress) == ("TP1", 200, "loading_weights", 0.25)
    assert (one.alive, one.progress_age_seconds, one.main_wait) == (True, 4.0, "futex")
    assert one.wait == {"futex": 205}
    assert (zero.rank, zero.pid, zero.phase, zero.progress_age_seconds) == ("TP0", None, None, None)


def test_waits_of_a_collector_that_stopped_are_not_told() -> None:
    feed = started()
    feed.processes(60.0)

    assert [(rank.wait, rank.main_wait) for rank in feed.tick(60.0).ranks] == [(None, None)] * 2


def test_a_server_without_a_log_is_told_how_to_give_one() -> None:
    feed = started(Feed(log=False))

    assert any("server.log" in sentence for sentence in feed.tick(5.0).advice)
    assert not any("server.log" in sentence for sentence in started().tick(5.0).advice)


def test_the_version_the_log_prints_is_the_version_of_the_server() -> None:
    feed = started()
    feed.tell(1.0, "start", version="0.5.9")

    assert feed.tick(5.0).server.version == "0.5.9"


def test_ranks_alive_are_counted_without_engines_and_dead_ones() -> None:
    feed = started(Feed(ranks=("TP0", "TP1", "engine")))
    assert feed.tick(1.0).ranks_alive == 2

    feed.dead = {"TP1"}
    feed.look(5.0)
    assert feed.tick(5.0).ranks_alive == 1
