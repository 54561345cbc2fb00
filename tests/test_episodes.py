"""The story of a server name across ticks and restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from feed import TICK, WALL, CardFigures, Counters, Feed, Serving, server
from stallwatch import signals
from stallwatch.episodes import FAILED_KEPT_SECONDS, MOST_ENDED
from stallwatch.model import GpuState, Process, ProcessId, Reading, Verdict
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


def test_a_configured_server_that_failed_stays_failed_when_its_process_is_forgotten() -> None:
    """The collector forgets an ended start after `retention`; its failure stands for a day."""
    feed = started(Feed())
    feed.root, feed.dead = False, {"TP0", "TP1"}
    feed.look(5.0)
    absent = server(started_at=0.0, starts=0, processes=())

    seen = [feed.verdict(5.0)]
    for t in (700.0, 705.0, 5000.0):
        feed.timeline.see([absent], t)
        feed.timeline.put([signals.SERVER_STARTS.read(1, "s")], t, 5.0)
        seen.append(feed.verdict(t))
    for t in (FAILED_KEPT_SECONDS + 10.0, FAILED_KEPT_SECONDS + 20.0):
        feed.episodes.tick(t, WALL + t)
        feed.timeline.see([absent], t)
        feed.timeline.put([signals.SERVER_STARTS.read(1, "s")], t, 5.0)

    assert {(verdict.state, verdict.reason, verdict.since) for verdict in seen} == {("failed", "exited", 5.0)}
    assert feed.verdict(FAILED_KEPT_SECONDS + 20.0).state == "gone"


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


def advice_on_cards(card: CardFigures, *more: Reading) -> list[str]:
    feed = watched(Feed(cards={"TP0": card}))
    for t in (20.0, 25.0):
        feed.look(t)
        feed.timeline.put(more, t, TICK)
    return [sentence for sentence in feed.tick(25.0).advice if "gpu" in sentence]


WHOLE = CardFigures(memory_utilization=0.0, power=122.0, limit=700.0, idle_power=122.0)
SOMEBODY = signals.GPU_PROCESS_MEMORY.read(5e9, "GPU-TP0", "", "")


@pytest.mark.parametrize(
    ("card", "more", "words"),
    [
        (replace(WHOLE, idle_power=None, dram_activity=None), (), "what the card takes at rest is not known yet"),
        (replace(WHOLE, answers=False), (), "the GPU driver does not answer"),
        (replace(WHOLE, lost=1.0), (), "a card is lost"),
        (WHOLE, (SOMEBODY,), "others are on its cards too"),
    ],
)
def test_why_a_card_tells_nothing_is_said(card: CardFigures, more: tuple[Reading, ...], words: str) -> None:
    (sentence,) = advice_on_cards(card, *more)

    assert sentence.endswith(words)


def test_of_a_card_that_tells_all_nothing_is_said() -> None:
    assert advice_on_cards(WHOLE) == []


@pytest.mark.parametrize(("utilization", "reason"), [(1.0, "gpu_spin"), (0.5, "none")])
def test_check_sees_a_spin_in_the_seconds_it_watches(utilization: float, reason: str) -> None:
    """Not proven, for what the card takes at rest was not learned in that time."""
    card = CardFigures(utilization=utilization, memory_utilization=0.0, power=152.0, limit=700.0)
    verdict = watched(Feed(cards={"TP0": card})).tick(15.0, dated={"s": WALL + 15 - 2460}).verdict

    assert (verdict.state, verdict.reason) == ("suspect", reason)


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
    assert (one.load_counts, zero.load_counts) == ((16, 64), None)
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


def test_the_server_of_a_report_is_the_same_object_until_another_is_found_or_another_release_told() -> None:
    feed = started()
    feed.tell(1.0, "start", version="0.5.9")
    first = feed.tick(5.0).server
    assert feed.tick(10.0).server is first

    feed.tell(11.0, "args", version="0.5.10")
    assert feed.tick(15.0).server.version == "0.5.10"

    feed.server = replace(feed.server, model="another")
    feed.processes(20.0)
    found = feed.tick(20.0).server
    assert (found.version, found.model) == ("0.5.10", "another")


def test_ranks_alive_are_counted_without_engines_and_dead_ones() -> None:
    feed = started(Feed(ranks=("TP0", "TP1", "engine")))
    assert feed.tick(1.0).ranks_alive == 2

    feed.dead = {"TP1"}
    feed.look(5.0)
    assert feed.tick(5.0).ranks_alive == 1


# --- whole stories -------------------------------------------------------------------------------------------


def reasons(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    """State and reason in order, each once in a row."""
    found = [(verdict.state, verdict.reason) for verdict in verdicts]
    return [each for index, each in enumerate(found) if index == 0 or found[index - 1] != each]


@pytest.mark.parametrize(("read_at", "reason"), [(20.0, "out_of_memory"), (25.0, "rank_dead")])
def test_a_kill_that_is_counted_after_the_death_explains_it_in_the_same_episode(read_at: float, reason: str) -> None:
    feed = started(Feed(kills=1.0))
    feed.dead = {"TP1"}
    feed.look(5.0)
    assert feed.verdict(5.0) == Verdict("failed", "rank_dead", 5.0, "TP1")

    feed.quiet_until(5.0, read_at - 5.0)
    feed.kills = 2.0
    feed.look(read_at)
    assert feed.verdict(read_at) == Verdict("failed", reason, 5.0, "TP1")
    assert feed.quiet_until(read_at, 900.0)[-1] == Verdict("failed", reason, 5.0, "TP1")


def test_a_kill_that_is_counted_before_the_death_is_seen_explains_it_too() -> None:
    feed = started(Feed(kills=1.0))
    feed.kills = 2.0
    assert states(feed.quiet_until(0.0, 10.0)) == ["working"]

    feed.dead = {"TP1"}
    feed.look(15.0)
    assert feed.verdict(15.0) == Verdict("failed", "out_of_memory", 15.0, "TP1")


def test_a_unit_that_is_stopped_ends_orderly_however_long_it_takes() -> None:
    feed = ready(started(Feed(stopping=0.0)))
    feed.stopping = 1.0
    feed.look(10.0)
    feed.dead = {"TP0", "TP1"}
    assert states(feed.quiet_until(10.0, 100.0)) == ["idle"]

    feed.root, feed.stopping = False, None
    assert states(feed.quiet_until(100.0, 130.0)) == ["gone"]


def test_ranks_that_go_without_a_stop_of_the_unit_have_died() -> None:
    feed = ready(started(Feed(stopping=0.0)))
    feed.dead = {"TP0"}

    assert reasons(feed.quiet_until(5.0, 100.0)) == [("failed", "rank_dead")]


@pytest.mark.parametrize(
    ("rest", "expected"), [(1.0, ["working", "failed"]), (0.0, ["working", "gone"]), (None, ["failed"])]
)
def test_a_start_that_ends_is_told_by_what_ends_with_it(rest: float | None, expected: list[str]) -> None:
    """The first look after the end finds the container still there."""
    feed = started(Feed(scope=None if rest is None else 1.0))
    feed.root, feed.dead = False, {"TP0", "TP1"}
    verdicts = feed.quiet_until(0.0, 5.0)
    feed.scope = rest

    assert states(verdicts + feed.quiet_until(5.0, 60.0)) == expected


def test_a_container_that_is_paused_in_its_start_is_suspect_until_it_goes_on() -> None:
    feed = started()
    feed.frozen = 1.0
    assert reasons(feed.quiet_until(0.0, 500.0)) == [("working", "none"), ("quiet", "none"), ("suspect", "frozen")]

    feed.frozen = 0.0
    feed.of["TP0"].storage += 2 * MIB
    assert states(feed.quiet_until(500.0, 550.0)) == ["working"]


def test_a_rank_under_a_debugger_is_suspect_and_one_that_was_just_stopped_is_a_stall() -> None:
    traced, stopped = started(Feed(traced={"TP1"})), started()
    for feed in (traced, stopped):
        feed.waits["TP1"] = "stopped"

    assert reasons(traced.quiet_until(0.0, 300.0))[-1] == ("suspect", "traced")
    assert traced.verdict(300.0).suspect_rank == "TP1"
    assert states(stopped.quiet_until(0.0, 300.0)) == ["working", "stalled"]
    assert stopped.verdict(300.0) == Verdict("stalled", "stopped", 65.0, "TP1")


def busy(feed: Feed) -> Feed:
    """Ready, three requests run, and tokens were read once."""
    feed.serving.running, feed.serving.generated, feed.serving.prompt, feed.serving.finished = 3.0, 9.0, 90.0, 1.0
    return ready(started(feed))


def test_a_server_that_owes_work_and_makes_no_token_stalls_once_and_recovers() -> None:
    feed = busy(Feed())
    assert reasons(feed.quiet_until(5.0, 300.0)) == [("working", "none"), ("stalled", "no_tokens")]
    assert feed.verdict(300.0).since == 120.0

    feed.serving.generated = 10.0
    assert states(feed.quiet_until(300.0, 400.0)) == ["working"]


@pytest.mark.parametrize("counter", ["generated", "prompt", "finished"])
def test_one_counter_of_three_that_moves_serves(counter: str) -> None:
    """An embedding server generates nothing; a long answer finishes nothing; a queue of prompts answers nothing."""
    feed = busy(Feed())
    verdicts = []
    for number in range(10):
        setattr(feed.serving, counter, getattr(feed.serving, counter) + 1)
        verdicts += feed.quiet_until(5.0 + 100.0 * number, 105.0 + 100.0 * number)

    assert states(verdicts) == ["working"]


def test_a_long_prefill_that_uses_cpu_is_at_most_suspect() -> None:
    feed = busy(Feed())
    verdicts = []
    for number in range(60):
        feed.of["TP0"].cpu += 4.0
        verdicts += feed.quiet_until(5.0 + 5.0 * number, 10.0 + 5.0 * number)

    assert reasons(verdicts) == [("working", "none"), ("suspect", "no_tokens")]


def test_a_server_that_is_asked_nothing_is_idle_for_hours() -> None:
    feed = busy(Feed())
    feed.serving.running = 0.0

    assert reasons(feed.quiet_until(5.0, 2000.0)) == [("idle", "none")]


def test_a_server_of_which_only_stats_lines_tell_is_at_most_suspect() -> None:
    feed = ready(started())
    verdicts = []
    for number in range(40):
        feed.stats(5.0 + 10.0 * number, running=2, speed=0.0)
        verdicts += feed.quiet_until(5.0 + 10.0 * number, 15.0 + 10.0 * number)

    assert reasons(verdicts) == [("working", "none"), ("suspect", "no_tokens")]


def silent_health(feed: Feed, begin: float, end: float, answer_at: float | None = None) -> list[Verdict]:
    """The health endpoint is asked every 30 s and gives no answer."""
    verdicts = []
    for number in range(round((end - begin) / 30.0)):
        t = begin + 30.0 * number
        feed.serving.timeouts = (feed.serving.timeouts or 0.0) + 1.0
        feed.serving.health = 503.0 if t == answer_at else None
        verdicts += feed.quiet_until(t, t + 30.0)
    return verdicts


def test_a_server_that_serves_nothing_and_answers_no_health_request_is_stalled() -> None:
    feed = ready(started(Feed(serving=Serving(timeouts=0.0))))

    assert reasons(silent_health(feed, 5.0, 305.0)) == [("idle", "no_evidence"), ("stalled", "health_timeout")]
    assert feed.verdict(305.0).since == 130.0


def test_one_answer_in_between_begins_the_row_anew() -> None:
    feed = ready(started(Feed(serving=Serving(timeouts=0.0))))

    assert states(silent_health(feed, 5.0, 125.0, answer_at=95.0)) == ["idle"]
    assert states(silent_health(feed, 125.0, 215.0)) == ["idle"]


def test_a_health_collector_that_ends_does_not_let_a_row_grow_old() -> None:
    feed = ready(started(Feed(serving=Serving(timeouts=0.0))))
    silent_health(feed, 5.0, 95.0)
    feed.serving.timeouts = None

    assert states(feed.quiet_until(95.0, 600.0)) == ["idle"]


def test_a_ready_server_that_is_stopped_is_stalled_while_it_owes_work_and_else_idle() -> None:
    owing, idle = busy(Feed()), busy(Feed())
    idle.serving.running = 0.0
    for feed in (owing, idle):
        feed.waits = dict.fromkeys(feed.ranks, "stopped")

    assert reasons(owing.quiet_until(5.0, 100.0)) == [("working", "none"), ("stalled", "stopped")]
    assert reasons(idle.quiet_until(5.0, 1000.0)) == [("idle", "none")]


def test_a_slow_counter_is_given_three_of_its_longest_steps() -> None:
    feed = started()
    for number in range(4):  # a step each 200 s
        feed.tell(200.0 * number, "capture_progress", "TP0", done=number, total=60)
        assert "stalled" not in states(feed.quiet_until(200.0 * number, 200.0 * (number + 1)))

    verdicts = feed.quiet_until(800.0, 1300.0)
    assert states(verdicts) == ["quiet", "stalled"]
    assert verdicts[-1].since == 600.0 + 600.0


def test_a_counter_of_short_steps_is_given_no_more_than_any_silence() -> None:
    feed = started()
    for number in range(4):
        feed.tell(60.0 * number, "capture_progress", "TP0", done=number, total=60)
        feed.quiet_until(60.0 * number, 60.0 * (number + 1))

    assert feed.quiet_until(240.0, 500.0)[-1].since == 180.0 + 240.0


def test_a_lock_nobody_holds_stalls_and_one_that_may_be_held_is_suspect() -> None:
    for held, expected in ((0.0, ("stalled", "stale_lock")), (1.0, ("suspect", "lock_wait"))):
        feed = started(Feed(lock_age={"build": 50.0}, lock_held={"build": held}))

        assert reasons(feed.quiet_until(0.0, 300.0)) == [("working", "none"), ("quiet", "none"), expected]


def test_a_rank_that_never_came_is_named_and_one_that_comes_late_is_not_missed() -> None:
    missing, late = (started(Feed(server=server(expected_ranks=("TP0", "TP1", "TP2")))) for _ in range(2))
    assert missing.quiet_until(0.0, 300.0)[-1] == Verdict("stalled", "rank_missing", 240.0, "TP2")

    late.quiet_until(0.0, 100.0)
    late.ranks = ("TP0", "TP1", "TP2")
    late.of["TP2"] = Counters()
    late.look(105.0)
    late.of["TP2"].storage += 100 * MIB
    assert "rank_missing" not in [verdict.reason for verdict in late.quiet_until(105.0, 700.0)]


def test_a_port_of_somebody_else_is_named_once_the_start_stands_still() -> None:
    feed = started(Feed(serving=Serving(foreign=1.0)))

    assert reasons(feed.quiet_until(0.0, 300.0))[-1] == ("stalled", "port_taken")


def test_the_report_names_the_cards_of_each_rank() -> None:
    feed = started(Feed(cards={"TP1": CardFigures(held=76e9, utilization=1.0)}))
    feed.gpus(5.0)
    feed.look(5.0)

    ranks = {rank.rank: rank for rank in feed.tick(5.0).ranks}
    assert (ranks["TP1"].gpu, ranks["TP1"].gpus) == ("GPU-TP1", (GpuState("GPU-TP1", "", 76e9, None, 1.0),))
    assert (ranks["TP0"].gpu, ranks["TP0"].gpus) == (None, ())


def test_the_cards_of_a_rank_are_in_order_of_their_indices() -> None:
    feed = started()
    for index in ("10", "9", "2"):
        gpu = f"GPU-{index}"
        readings = [
            signals.GPU_INFO.read(1, gpu, index, "", "", "", "", ""),
            signals.GPU_PROCESS_MEMORY.read(1e9, gpu, "s", "TP0"),
        ]
        feed.timeline.put(readings, 5.0, 5.0)

    (rank, _) = feed.tick(5.0).ranks
    assert [gpu.index for gpu in rank.gpus] == ["2", "9", "10"]
    assert rank.gpu == "GPU-2"
