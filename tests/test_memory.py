"""What outlasts a restart of stallwatch, and what must not: the timeline of before meets the readings of after."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feed import TICK, WALL, CardFigures, Feed, SayingAgain, Serving, server
from stallwatch import signals
from stallwatch.deadlines import Wait
from stallwatch.exposition import render
from stallwatch.kept import (
    CARRIED,
    CARRIED_SIGNALS,
    LEFT_OUT,
    MOST_NUMBERS,
    Hashes,
    Shift,
    json_text,
    record,
    record_text,
    record_writer,
)
from stallwatch.memory import COUNTED_GAP_SECONDS, HISTORY_SECONDS, MOST_SERVERS, NAMING_SECONDS, Memory, Place
from stallwatch.model import LogCounts, LogSums, ProcessId, RankName, Reading, Report, ServerReport
from stallwatch.presentation import document as document_of
from stallwatch.restarts import Restarts
from stallwatch.server_timeline import MOST_STEPS, Steps
from stallwatch.timeline import FLOORS, MIB, news_of
from stallwatch.tracks import Track

NAME = "sglang-8000@secret-unit"
SKIPPED = 1000.0
"""Pauses the clock of the process before had left out."""


def seal(*parts: str | int | bytes) -> str:
    return blake2b(repr(parts).encode(), digest_size=16, key=b"key of the tests").hexdigest()


@dataclass(slots=True)
class Run(Feed):
    """One process of ours: a feed that goes through the memory, as the daemon does it."""

    server: Any = field(default_factory=lambda: server(NAME, model="org/secret-model"))
    memory: Memory = field(default_factory=lambda: Memory(seal, "this boot"))
    skipped: float = 0.0
    places: Mapping[str, Iterable[Place]] = field(default_factory=dict)
    sums: Mapping[str, Iterable[LogSums]] = field(default_factory=dict)
    names: tuple[RankName, ...] = ()
    again: SayingAgain = field(default_factory=SayingAgain)
    before: dict[str, tuple[Reading, ...]] = field(default_factory=dict)

    def put(self, readings: Iterable[Reading], t: float, source: str = "") -> None:
        said = self.again(source, readings)
        news = news_of(self.before.get(source, ()), said)
        self.before[source] = said
        found = self.memory.settle(self.timeline, said, t)
        self.timeline.put(found, t, self.interval, t + self.skipped, source, news)

    def processes(self, t: float, *, io: bool = True, measured: float | None = None) -> None:
        self.timeline.see([self.server], t)
        self.names += self.memory.meet(self.timeline, self.episodes, [self.server], t, t + self.skipped)
        self.put(self.process_readings(io), t, "processes")

    def logs(self, t: float) -> None:
        self.put(self.log_readings(), t, "logs")

    def threads(self, t: float, measured: float | None = None) -> None:
        self.put(self.thread_readings(), t, "threads")

    def endpoints(self, t: float, interval: float | None = None) -> None:
        self.put(self.serving.readings(self.server.name), t, "endpoints")

    def document(self, t: float) -> dict[str, Any]:
        """As it is read when it was written."""
        made = self.memory.document(
            self.timeline, self.episodes, self.names, self.places, t, t + self.skipped, self.sums
        )
        document: dict[str, Any] = json.loads(made.text())
        assert json_text(document) == made.text()
        return document

    def restarted(self, t: float, after: float = 10.0, boot: str = "this boot") -> Run:
        """The next process, which begins `after` seconds on a clock without pauses; what the server did stays."""
        document = self.document(t)
        memory = Memory(seal, boot)
        memory.load(document, t + self.skipped + after)
        run = Run(ranks=self.ranks, thresholds=self.thresholds, server=self.server, memory=memory, waits=self.waits)
        run.of, run.child_cpu, run.log_bytes = self.of, self.child_cpu, self.log_bytes
        run.serving = replace(self.serving, timeouts=None if self.serving.timeouts is None else 0.0)
        run.lock_age, run.lock_held = self.lock_age, self.lock_held
        run.dead, run.compilers, run.last_look = self.dead, self.compilers, t + self.skipped
        return run

    def first_report(self, t: float) -> ServerReport:
        """The processes are read first, and that ticks at once."""
        self.noise(t)
        self.processes(t)
        return self.tick(t)


def stalled(until: float = 300.0, **facts: Any) -> Run:
    """A run in which the server is silent from second 10 on; stalled since 250."""
    run = Run(skipped=SKIPPED, **facts)
    run.look(0.0)
    run.tell(5.0, "load_begin", "TP0", version="0.5.21")
    run.tell(10.0, "load_end", "TP0")
    run.waits["TP1"] = "sleep"
    run.look(10.0)
    run.tick(10.0)
    run.quiet_until(10.0, until)
    return run


def states(reports: Iterable[ServerReport]) -> list[str]:
    return [report.verdict.state for report in reports]


def go_on(run: Run, begin: float, seconds: float) -> list[str]:
    return [verdict.state for verdict in run.quiet_until(begin, begin + seconds)]


# --- one alert, no resolve ------------------------------------------------------------------------------------


def test_the_first_report_after_a_restart_says_stalled_with_the_old_since_reason_and_rank() -> None:
    before = stalled()
    old = before.tick(300.0)
    assert (old.verdict.state, old.verdict.reason, old.verdict.suspect_rank) == ("stalled", "idle_wait", "TP1")

    after = before.restarted(300.0, after=30.0)
    report = after.first_report(1330.0)

    assert (report.verdict.state, report.verdict.reason, report.verdict.suspect_rank) == ("stalled", "idle_wait", "TP1")
    assert report.since_timestamp == old.since_timestamp
    assert report.phase == "post_load"
    assert report.server.version == "0.5.21"
    assert set(go_on(after, 1330.0, 900.0)) == {"stalled"}
    assert after.tick(2230.0).since_timestamp == old.since_timestamp


@pytest.mark.parametrize(
    ("what", "move"),
    [
        ("storage", lambda run: setattr(run.of["TP1"], "storage", run.of["TP1"].storage + MIB)),
        ("read", lambda run: setattr(run.of["TP1"], "read", run.of["TP1"].read + 9 * MIB)),
        ("written", lambda run: setattr(run.of["TP0"], "written", run.of["TP0"].written + 17 * MIB)),
        ("minor", lambda run: setattr(run.of["TP1"], "minor", run.of["TP1"].minor + 1100)),
        ("major", lambda run: setattr(run.of["TP1"], "major", run.of["TP1"].major + 16)),
        ("resident", lambda run: setattr(run.of["TP1"], "resident", run.of["TP1"].resident - 16 * MIB)),
        ("children", lambda run: setattr(run, "child_cpu", run.child_cpu + 5.0)),
    ],
)
def test_a_server_that_moved_while_we_were_down_is_not_stalled(what: str, move: Callable[[Run], None]) -> None:
    after = stalled().restarted(300.0, after=60.0)
    move(after)

    assert after.first_report(1360.0).verdict.state == "working", what


def test_a_line_of_progress_that_was_written_while_we_were_down_ends_the_stall() -> None:
    after = stalled().restarted(300.0)
    assert after.first_report(1310.0).verdict.state == "stalled"
    after.tell(1310.0, "load_end", "TP1")

    assert after.tick(1311.0).verdict.state == "working"


def test_a_time_out_of_the_server_itself_goes_on_while_we_are_down() -> None:
    before = Run(skipped=SKIPPED, server=server(NAME, tensor_parallel=2))
    before.look(0.0)
    before.tell(10.0, "load_end", "TP0", clock="barrier", timeout=480.0)
    strikes = before.tick(10.0).deadlines
    after = before.restarted(10.0, after=30.0)

    assert strikes.keys() == {"barrier"}
    assert after.first_report(1040.0).deadlines["barrier"] - WALL == pytest.approx(1040.0 + 450.0)


def test_words_of_a_newer_version_are_not_taken_in() -> None:
    document = stalled().document(300.0)
    document["servers"][0]["episode"]["verdict"]["reason"] = "moonshine"
    memory = Memory(seal, "this boot")
    memory.load(document, 1310.0)

    assert Run(memory=memory).first_report(1310.0).verdict.reason == "none"
    assert memory.unusable == 1


@pytest.mark.parametrize("down", [1.0, 60.0, COUNTED_GAP_SECONDS, 3600.0, 86000.0])
def test_the_noise_of_a_stuck_server_is_no_move_however_long_we_were_down(down: float) -> None:
    before = stalled()
    since = before.tick(300.0).since_timestamp
    after = before.restarted(300.0, after=down)
    report = after.first_report(1300.0 + down)

    assert (report.verdict.state, report.since_timestamp) == ("stalled", since)
    assert set(go_on(after, 1300.0 + down, 300.0)) == {"stalled"}


@settings(max_examples=40, deadline=None)
@given(steps=st.integers(2, 60), down=st.floats(0.5, COUNTED_GAP_SECONDS))
def test_whenever_we_are_restarted_a_silence_goes_one_way_and_pages_in_time(steps: int, down: float) -> None:
    until = 10.0 + 5.0 * steps
    before = stalled(until)
    first = before.tick(until).verdict.state
    after = before.restarted(until, after=down)
    begin = SKIPPED + until + down
    found = [first, after.first_report(begin).verdict.state, *go_on(after, begin, 300.0)]

    order = ["working", "quiet", "stalled"]
    assert [order.index(state) for state in found] == sorted(order.index(state) for state in found)
    pages_after = max(0.0, 250.0 - until - down)  # silent since second 10, for stall_after
    assert "stalled" in found[: 3 + int(pages_after / TICK) + 1]


def test_a_short_time_without_us_is_silence_when_nothing_moved_in_it() -> None:
    after = stalled(until=200.0).restarted(200.0, after=60.0)

    assert after.first_report(1260.0).verdict.state == "stalled"  # silent since second 10


def test_a_long_time_without_us_is_no_silence() -> None:
    """Too much may happen in it that leaves no trace."""
    before = stalled(until=200.0)
    after = before.restarted(200.0, after=COUNTED_GAP_SECONDS + 1)
    begin = 1201.0 + COUNTED_GAP_SECONDS

    assert after.first_report(begin).verdict.state == "quiet"
    found = go_on(after, begin, 60.0)
    assert (found[0], found[-1]) == ("quiet", "stalled")


def test_a_working_server_goes_on_working() -> None:
    before = Run(skipped=SKIPPED)
    for t in range(0, 100, 5):
        before.of["TP0"].storage += 100 * MIB
        before.look(float(t))
        before.tick(float(t))
    after = before.restarted(95.0)
    after.of["TP0"].storage += 100 * MIB

    assert after.first_report(1105.0).verdict.state == "working"
    assert after.tick(1105.0).since_timestamp == WALL


def test_ready_stays_ready_and_idle() -> None:
    before = Run(skipped=SKIPPED)
    before.look(0.0)
    before.tell(5.0, "ready")
    before.look(10.0)
    before.tick(10.0)
    after = before.restarted(10.0)

    assert after.first_report(1020.0).ready
    assert set(go_on(after, 1020.0, 900.0)) == {"idle"}


def test_a_stopped_rank_stays_stalled_also_before_the_silence_is_long_enough_for_more() -> None:
    before = Run(skipped=SKIPPED, waits={"TP0": "futex", "TP1": "stopped"})
    before.look(0.0)
    before.tick(0.0)
    assert before.quiet_until(0.0, 100.0)[-1].reason == "stopped"
    after = before.restarted(100.0, after=30.0)

    assert after.first_report(1130.0).verdict.reason == "stopped"
    assert {v.reason for v in after.quiet_until(1130.0, 1200.0)} == {"stopped"}


def serving(**figures: float) -> Run:
    """Ready, and stalled at second 300 by what the server says of itself."""
    run = Run(skipped=SKIPPED, serving=Serving(**figures))
    run.look(0.0)
    run.tell(5.0, "ready")
    for number in range(10):
        if run.serving.timeouts is not None:
            run.serving.timeouts += 1.0
        verdicts = run.quiet_until(5.0 + 30 * number, 35.0 + 30 * number)
    assert verdicts[-1].state == "stalled"
    return run


@pytest.mark.parametrize(
    ("figures", "reason"),
    [({"running": 3.0, "generated": 9.0}, "no_tokens"), ({"timeouts": 0.0}, "health_timeout")],
)
def test_a_server_that_serves_nothing_stays_stalled(figures: dict[str, float], reason: str) -> None:
    before = serving(**figures)
    since = before.tick(305.0).since_timestamp
    after = before.restarted(305.0, after=20.0)
    report = after.first_report(1325.0)

    assert (report.verdict.state, report.verdict.reason, report.since_timestamp) == ("stalled", reason, since)
    assert set(go_on(after, 1325.0, 20.0)) == {"stalled"}


def test_a_server_that_served_while_we_were_down_works() -> None:
    after = serving(running=3.0, generated=9.0).restarted(305.0)
    after.serving.generated = 10.0
    assert after.first_report(1315.0).verdict.state == "stalled"  # not asked yet

    assert set(go_on(after, 1315.0, 100.0)) == {"working"}


def test_a_stale_lock_stays_the_reason() -> None:
    before = stalled(lock_age={"build": 9000.0}, lock_held={"build": 0.0})
    assert before.tick(300.0).verdict.reason == "stale_lock"
    after = before.restarted(300.0)

    assert after.first_report(1310.0).verdict.reason == "stale_lock"
    assert {verdict.reason for verdict in after.quiet_until(1310.0, 1400.0)} == {"stale_lock"}


def test_a_restart_during_a_restart_changes_nothing() -> None:
    """The second process ends before it has found anything."""
    before = stalled()
    since = before.tick(300.0).since_timestamp
    between = before.restarted(300.0)
    after = between.restarted(1305.0)
    report = after.first_report(1320.0)

    assert (report.verdict.state, report.since_timestamp) == ("stalled", since)


def test_a_restart_right_after_the_first_look_changes_nothing() -> None:
    """What was not found again yet, as the log, is handed on."""
    after = stalled().restarted(300.0)
    after.first_report(1310.0)
    last = after.restarted(1310.0)

    assert last.first_report(1320.0).verdict.state == "stalled"
    assert set(go_on(last, 1320.0, 300.0)) == {"stalled"}


def test_stalled_seconds_and_startups_go_on() -> None:
    before = Run(skipped=SKIPPED, server=server(NAME, started_at=WALL - 50))
    before.look(0.0)
    before.tell(10.0, "ready")
    before.look(15.0)
    assert before.tick(15.0).startup_seconds == 60.0
    (histogram,) = before.episodes.startups()
    after = before.restarted(15.0)
    assert after.episodes.startups() == ()

    assert after.first_report(1025.0).startup_seconds == 60.0
    assert after.episodes.startups() == (histogram,)
    assert stalled().restarted(300.0).first_report(1310.0).stalled_seconds == pytest.approx(60.0)


# --- never onto something else --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("another process with the same number", {"root": ProcessId(100, 2)}),
        ("another process", {"root": ProcessId(101, 1)}),
        ("another name", {"name": "sglang-8001"}),
    ],
)
def test_nothing_is_put_back_onto_another_server(what: str, other: dict[str, Any]) -> None:
    after = stalled().restarted(300.0)
    after.server = replace(after.server, **other)

    report = after.first_report(1310.0)
    assert (report.verdict.state, report.phase) == ("working", "spawned"), what
    assert report.since_timestamp == WALL + 1310.0


def test_a_new_start_of_the_same_name_keeps_the_sum_of_stalled_time_only() -> None:
    after = stalled().restarted(300.0)
    after.server = replace(after.server, root=ProcessId(500, 9), started_at=WALL + 305)

    report = after.first_report(1310.0)
    assert report.verdict.state == "working"
    assert report.stalled_seconds == pytest.approx(50.0)


def test_after_a_reboot_nothing_is_put_back() -> None:
    after = stalled().restarted(300.0, boot="another boot")

    assert after.first_report(1310.0).verdict.state == "working"


def test_a_document_from_the_future_of_this_clock_is_not_used() -> None:
    document = stalled().document(300.0)
    memory = Memory(seal, "this boot")
    memory.load(document, 1299.0)
    run = Run(memory=memory)

    assert run.first_report(1299.0).verdict.state == "working"


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_step_of_the_wall_clock_while_we_were_down_changes_nothing(step: float) -> None:
    """It also moves the boot, and so the start of every process, as Unix time."""
    before = stalled()
    since = before.tick(300.0).since_timestamp
    after = before.restarted(300.0)
    after.server = replace(after.server, started_at=after.server.started_at + step)
    after.processes(1310.0)

    report = after.tick(1310.0, wall=WALL + 310 + step)
    assert (report.verdict.state, report.since_timestamp) == ("stalled", since)


# --- first looks that know less -------------------------------------------------------------------------------


def test_ranks_that_only_their_log_names_are_waited_for() -> None:
    """Until then their processes are summed with the front ends, which is no progress."""
    before = stalled()
    before.names = (RankName(NAME, 7, "TP1"), RankName("other", 8, "TP0"))
    after = before.restarted(300.0)
    ranks, of = after.ranks, after.of
    summed = replace(of["frontend"], minor=of["frontend"].minor + of["TP1"].minor)
    after.ranks, after.of = ("TP0",), {"TP0": of["TP0"], "frontend": summed}
    assert after.first_report(1310.0).verdict.state == "stalled"
    assert after.names == (RankName(NAME, 7, "TP1"),)
    after.processes(1315.0)
    assert after.tick(1315.0).verdict.state == "stalled"

    after.ranks, after.of = ranks, of
    assert set(go_on(after, 1315.0, 300.0)) == {"stalled"}
    assert {rank.rank for rank in after.tick(1616.0).ranks} == {"TP0", "TP1"}


def test_a_rank_that_does_not_come_back_is_forgotten() -> None:
    """It died, or has another name now: nothing certain can be said of it."""
    after = stalled().restarted(300.0)
    after.ranks = ("TP0",)
    del after.of["TP1"]
    go_on(after, 1310.0, NAMING_SECONDS + 10)

    report = after.tick(1340.0)
    assert [rank.rank for rank in report.ranks] == ["TP0"]
    assert report.verdict.state == "stalled"


def test_a_first_process_that_went_meanwhile_is_no_reason_to_wait() -> None:
    after = stalled().restarted(300.0)
    after.root, after.ranks = False, ()

    assert after.first_report(1310.0).verdict.state == "failed"


def test_a_log_that_is_read_again_is_readable_until_it_is_read() -> None:
    after = stalled().restarted(300.0)
    after.first_report(1310.0)
    for t in range(1311, 1400):
        after.noise(float(t))
        after.put([signals.LOG_BYTES.missing("timeout", NAME, "log")], float(t))
        after.processes(float(t))
        after.threads(float(t))
        assert after.tick(float(t)).verdict.state == "stalled"
    assert set(go_on(after, 1400.0, 100.0)) == {"stalled"}


def test_what_a_source_said_before_a_server_was_found_again_is_put_as_a_whole_when_it_is_said_after_it() -> None:
    after = stalled().restarted(300.0)
    after.timeline.see([after.server], 1305.0)
    said = (signals.LOG_BYTES.read(10.0, NAME, "log"),)
    after.timeline.put(said, 1305.0, TICK, source="logs")
    for t in (1310.0, 1315.0 + HISTORY_SECONDS, 1320.0 + HISTORY_SECONDS):
        after.processes(t)  # and after the last of them nothing is awaited any more
    after.timeline.put(said, 1325.0 + HISTORY_SECONDS, TICK, source="logs", news=[])
    track = after.now.track(signals.LOG_BYTES, NAME, "log")

    assert track is not None
    assert track.read_at == 1325.0 + HISTORY_SECONDS


def test_a_log_that_takes_for_ever_to_be_read_again_becomes_unreadable() -> None:
    after = stalled().restarted(300.0)
    for t in range(1310, 1310 + int(HISTORY_SECONDS) + 60, 5):
        after.processes(float(t))
        after.threads(float(t))
        after.put([signals.LOG_BYTES.missing("timeout", NAME, "log")], float(t))
        state = after.tick(float(t)).verdict.state

    assert state == "unknown"


def test_a_log_that_is_gone_leaves_no_trace() -> None:
    after = stalled().restarted(300.0)
    after.log = False
    go_on(after, 1310.0, HISTORY_SECONDS + 10)

    assert after.now.of(signals.LOG_BYTES) == {}
    assert list(after.now.progress_by_log) == []


def test_sums_that_lost_what_ended_processes_did_are_as_watched_as_before() -> None:
    before = stalled()
    after = before.restarted(300.0)
    for counters in after.of.values():
        counters.read -= 1e8
        counters.storage -= 1e8

    assert after.first_report(1310.0).verdict.state == "stalled"
    assert set(go_on(after, 1310.0, 100.0)) == {"stalled"}


# --- what failed ----------------------------------------------------------------------------------------------


def failed() -> Run:
    run = Run(skipped=SKIPPED)
    run.look(0.0)
    run.tick(0.0)
    run.dead = {"TP1"}
    run.look(5.0)
    assert run.verdict(5.0).reason == "rank_dead"
    return run


def test_a_failed_server_whose_first_process_lives_stays_failed() -> None:
    after = failed().restarted(5.0)
    after.ranks = ("TP0",)  # the dead one is not found again

    verdict = after.first_report(1015.0).verdict
    assert (verdict.state, verdict.reason, verdict.suspect_rank) == ("failed", "rank_dead", "TP1")


def absent(run: Run, starts: int) -> None:
    """The processes collector about a configured server without a process."""
    run.server = replace(run.server, root=ProcessId(0, 0), started_at=0.0, starts=0, processes=())
    run.ranks, run.of, run.log = (), {}, False
    run.timeline.see([run.server], 1015.0)
    run.memory.meet(run.timeline, run.episodes, [run.server], 1015.0, 1015.0)
    run.put([signals.SERVER_STARTS.read(starts, NAME)], 1015.0)


def test_a_configured_server_that_failed_and_is_gone_stays_failed_also_over_two_restarts() -> None:
    before = failed()
    before.root = False
    before.look(10.0)
    before.tick(10.0)
    after = before.restarted(10.0)
    assert after.memory.starts_before(NAME, ProcessId(0, 0)) == 1
    absent(after, starts=1)
    assert after.tick(1015.0).verdict.reason == "rank_dead"
    last = after.restarted(1015.0)
    absent(last, starts=1)

    assert last.tick(1015.0).verdict.reason == "rank_dead"


def test_a_configured_server_that_never_came_is_gone_and_its_entry_waits() -> None:
    after = stalled().restarted(300.0)
    found = after.server
    absent(after, starts=0)
    assert after.tick(1015.0).verdict.state == "gone"
    assert len(after.document(1015.0)["servers"]) == 1

    after.server = found
    assert len(after.document(1015.0)["servers"]) == 1


# --- a loop of restarts -----------------------------------------------------------------------------------------


def another_start(run: Run, t: float, number: int, pod_uid: str = "") -> None:
    root, started_at = ProcessId(100 + number, number), WALL + t
    run.server = replace(run.server, root=root, started_at=started_at, starts=number, pod_uid=pod_uid)
    run.root = True


def loop_restarted(starts: int, after: float, pods: tuple[str, str] = ("", "")) -> tuple[Run, ServerReport, float]:
    """So many starts that fail 20 s after they began, and then a restart of ours in which another one begins.

    `pods`: uids of the pod of those, and of the last one's.

    The run after it, the last report before it, and the moment at which the next one is due.
    """
    run, t = Run(), 0.0
    for number in range(1, starts + 1):
        another_start(run, t, number, pods[0])
        run.scope = 1.0
        for at in (t, t + 10.0, t + 20.0):
            run.of["TP0"].storage += 5e6
            run.look(at)
            run.tick(at)
        run.root = False
        run.quiet_until(t + 20.0, t + 40.0)
        report = run.tick(t + 40.0)
        t += 45.0
    then = run.restarted(t - 5.0, after=after)
    another_start(then, t - 5.0 + after, starts + 1, pods[1])
    then.scope = 1.0
    return then, report, t - 5.0 + after


def test_a_loop_goes_on_over_a_restart_of_ours_in_which_the_next_start_began() -> None:
    after, before, t = loop_restarted(2, after=15.0)
    report = after.first_report(t)

    assert (report.verdict.state, report.verdict.reason) == ("failed", "exited")
    assert report.since_timestamp == WALL + 25.0  # when the first of them was seen to be over
    assert report.stalled_seconds == before.stalled_seconds
    after.tell(t + 5.0, "ready")
    assert after.tick(t + 5.0).verdict.state == "idle"


POD = "0a1b2c3d-0000-1111-2222-333344445555"


@pytest.mark.parametrize(("last", "state"), [(POD, "failed"), (POD.replace("0a1b", "ffff"), "working")])
def test_a_loop_that_goes_on_over_a_restart_of_ours_is_of_one_pod(last: str, state: str) -> None:
    after, _, t = loop_restarted(2, after=15.0, pods=(POD, last))

    assert after.first_report(t).verdict.state == state


@pytest.mark.parametrize(("starts", "gap"), [(1, 15.0), (2, COUNTED_GAP_SECONDS + 60.0)])
def test_one_failure_or_one_of_long_ago_is_over_when_the_next_start_is_found(starts: int, gap: float) -> None:
    after, before, t = loop_restarted(starts, after=gap)

    assert before.verdict.state == "failed"
    assert after.first_report(t).verdict.state == "working"


# --- starts ---------------------------------------------------------------------------------------------------


def test_starts_are_counted_on() -> None:
    before = stalled()
    before.server = replace(before.server, starts=3)
    before.processes(300.0)
    memory = before.restarted(300.0).memory

    assert memory.starts_before(NAME, before.server.root) == 2  # the present one will be counted
    assert memory.starts_before(NAME, ProcessId(1, 1)) == 3
    assert memory.starts_before("other", before.server.root) == 0


# --- logs -----------------------------------------------------------------------------------------------------


def test_places_of_logs_are_known_for_the_same_start_and_file_only() -> None:
    before = stalled()
    before.places = {NAME: [("server.log", (1, 2), 4096, "mark")]}
    after = before.restarted(300.0)
    position = after.memory.position

    assert position(after.server, "server.log", (1, 2)) == (4096, "mark")
    assert position(after.server, "server.log", (1, 3)) is None
    assert position(after.server, "other.log", (1, 2)) is None
    assert position(replace(after.server, root=ProcessId(1, 1)), "server.log", (1, 2)) is None


def sums(run: Run, log: str = "server.log", file: tuple[int, ...] = (1, 2)) -> LogSums:
    counts = LogCounts({"": (9, 4096, 3, 1, 2, 1, 0), "stderr": (1,) * 7}, {"load_end": 4}, {"oom": 1})
    position = run.memory.log_key(run.server, log, *file)
    return LogSums(run.memory.log_key(run.server, log), position, 4096, "mark", counts)


def test_what_was_counted_of_logs_is_known_for_the_same_start_only() -> None:
    before = stalled()
    kept = sums(before)
    before.sums = {NAME: [kept]}
    after = before.restarted(300.0)

    assert after.memory.counted(after.server) == {after.memory.log_key(after.server, "server.log"): kept}
    assert after.memory.position(after.server, "server.log", (1, 2)) == (4096, "mark")
    assert after.memory.counted(replace(after.server, root=ProcessId(1, 1))) == {}
    assert after.memory.counted(replace(after.server, name="another")) == {}
    assert before.restarted(300.0, boot="another boot").memory.counted(after.server) == {}


def test_a_restart_before_the_logs_were_looked_at_forgets_no_count() -> None:
    before = stalled()
    before.sums = {NAME: [sums(before)]}
    after = before.restarted(300.0)
    after.first_report(310.0)

    again = after.restarted(310.0).memory
    assert again.counted(before.server) == after.memory.counted(before.server) != {}
    assert again.position(before.server, "server.log", (1, 2)) == (4096, "mark")
    after.sums = {NAME: []}
    assert after.restarted(310.0).memory.counted(before.server) == {}


def test_a_document_of_before_there_were_sums_is_read_without() -> None:
    before = stalled()
    before.places, before.sums = {NAME: [("server.log", (1, 2), 4096, "mark")]}, {NAME: [sums(before, "other.log")]}
    document = before.document(300.0)
    for entry in document["servers"]:
        del entry["counted"]
    memory = Memory(seal, "this boot")

    assert memory.load(document, 300.0 + SKIPPED) is None
    assert memory.counted(before.server) == {}
    assert memory.position(before.server, "server.log", (1, 2)) == (4096, "mark")


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        ["key", "position", 1, "mark", [], []],
        ["key", "position", "1", "mark", [], [], []],
        ["key", "position", 1, "mark", [["", [-1]]], [], []],
        ["key", "position", 1, "mark", [["", [1.5]]], [], []],
        ["key", "position", 1, "mark", [], [["load_end", 1 << 60]], []],
        ["key", "position", 1, "mark", [], [[["a"], 1]], []],
        ["a key", "position", 1, "mark", [], [], []],
    ],
)
def test_sums_that_are_none_are_not_taken_and_cost_no_other(wrong: object) -> None:
    before = stalled()
    before.sums = {NAME: [sums(before)]}
    document = before.document(300.0)
    document["servers"][0]["counted"].insert(0, wrong)
    memory = Memory(seal, "this boot")
    memory.load(document, 300.0 + SKIPPED)

    assert list(memory.counted(before.server).values()) == [sums(before)]


def test_words_that_another_version_counts_are_left_out() -> None:
    before = stalled()
    before.sums = {NAME: [sums(before)]}
    document = before.document(300.0)
    *_, events, errors = document["servers"][0]["counted"][0]
    events.append(["invented", 5])
    errors.append(["invented", 5])
    memory = Memory(seal, "this boot")
    memory.load(document, 300.0 + SKIPPED)

    assert list(memory.counted(before.server).values()) == [sums(before)]


# --- the document ---------------------------------------------------------------------------------------------


def test_nothing_that_names_anything_is_in_the_document() -> None:
    run = stalled()
    run.places = {NAME: [("private-job.log", (1, 2), 4096, "mark")]}
    run.sums = {NAME: [sums(run, "private-job.log")]}
    run.tell(301.0, "load_end", "TP1")
    run.tell(302.0, "novel", "rank of a stranger")
    run.tell(303.0, "args", None, version="hunter2 password")
    run.timeline.put([signals.LOG_BYTES.read(10.0, NAME, "private-job.log")], 304.0, TICK)
    run.tick(304.0)
    text = json.dumps(run.document(304.0))

    for word in (NAME, "secret", "org/", "private", "job", "hunter2", "stranger", "sglang"):
        assert word not in text
    assert '"TP1"' in text


# --- cards ----------------------------------------------------------------------------------------------------


def spinning(until: float = 400.0) -> Run:
    """Two cards that rested for a while, and then spin for ever; stalled since 285."""
    cards = {rank: CardFigures(memory_utilization=0.0, power=122.0, limit=700.0) for rank in ("TP0", "TP1")}
    run = Run(skipped=SKIPPED, cards=cards)
    run.look(0.0)
    run.tell(5.0, "load_begin", "TP0")
    run.quiet_until(5.0, 45.0)
    run.tell(45.0, "load_end", "TP0")
    for card in cards.values():
        card.utilization, card.power = 1.0, 152.0
    run.quiet_until(45.0, until)
    return run


def test_a_spin_is_one_alert_although_the_cards_are_read_late() -> None:
    before = spinning()
    old = before.tick(400.0)
    assert (old.verdict.state, old.verdict.reason) == ("stalled", "gpu_spin")

    after = before.restarted(400.0)
    after.cards = before.cards
    report = after.first_report(1410.0)

    assert (report.verdict.state, report.verdict.reason) == ("stalled", "gpu_spin")
    assert report.since_timestamp == old.since_timestamp
    assert set(go_on(after, 1410.0, 300.0)) == {"stalled"}
    assert after.tick(1710.0).verdict.reason == "gpu_spin"

    for card in after.cards.values():
        card.utilization, card.power = 1.0, 500.0
    assert set(go_on(after, 1710.0, 30.0)[2:]) == {"slow"}


@pytest.mark.parametrize("boot", ["this boot", "another boot"])
def test_what_was_learned_of_a_card_outlasts_a_restart_and_a_reboot(boot: str) -> None:
    before = spinning()
    (first, *_) = before.timeline.cards.learned(400.0)
    assert (first.labels, first.value) == (("GPU-TP0",), 122.0)

    after = before.restarted(400.0, boot=boot)
    after.cards = before.cards
    after.look(1410.0)
    after.look(1415.0)

    assert [reading.value for reading in after.timeline.cards.learned(1415.0)] == [122.0, 122.0]


def test_another_card_begins_anew_and_what_was_learned_of_the_first_is_kept_for_it() -> None:
    before = spinning()
    after = before.restarted(400.0)
    after.look(1410.0)
    strange = CardFigures(memory_utilization=0.0, power=122.0)
    for t in (1410.0, 1415.0):
        after.timeline.put(strange.readings(NAME, "TP9"), t, TICK)
        after.processes(t)
    assert after.timeline.cards.learned(1415.0) == []

    again = after.restarted(1415.0)
    again.cards = before.cards
    again.look(2430.0)
    again.look(2435.0)
    assert len(again.timeline.cards.learned(2435.0)) == 2


def test_no_card_is_named_in_the_document() -> None:
    text = json.dumps(spinning().document(400.0))

    assert "GPU" not in text
    assert "122.0" in text


@pytest.mark.parametrize(
    "rows", [None, 7, [[]], [["a"]], [["a", "b"]], [["a", 0]], [["a", -5]], [["a", 1e9]], [[1, 122.0]], [["a", None]]]
)
def test_watts_that_are_none_are_not_put_back(rows: object) -> None:
    before = spinning()
    document = before.document(400.0)
    good = document["cards"]
    memory, twin = Memory(seal, "this boot"), Memory(seal, "this boot")
    memory.load({**document, "cards": rows}, 1410.0)
    twin.load({**document, "cards": good}, 1410.0)

    assert (memory._cards, twin._cards) == ({}, dict(good))


def test_every_field_is_carried_or_left_out_on_purpose() -> None:
    """A new field of a timeline goes into a table of kept.py: into CARRIED with what its numbers are, or LEFT_OUT."""
    for kind, carried in CARRIED.items():
        left_out = LEFT_OUT.get(kind, frozenset())
        assert {each.name for each in fields(kind)} == carried.keys() | left_out, kind
        assert not carried.keys() & left_out


def test_every_counter_that_makes_a_move_is_carried() -> None:
    assert {floor.signal.name for floor in FLOORS} <= CARRIED_SIGNALS.keys()


def test_every_field_that_is_carried_can_be_made_text_and_read_back() -> None:
    """An annotation that is new to kept.py is found here, not in a tick."""
    for kind in CARRIED:
        assert record_writer(kind), kind

    wait = Wait(5.0, 600.0, "load_begin", {"TP1", "TP0", "rank of a stranger"})
    text = record_text(wait)
    assert text == '{"arrived":["TP0","TP1"],"opened_by":"load_begin","seconds":600.0,"since":5.0}'
    assert record(Wait, json.loads(text), Shift(0.0, 0.0)) == replace(wait, arrived={"TP0", "TP1"})


def test_numbers_that_are_alike_are_written_as_what_they_are() -> None:
    for value in (True, 1, 1.0, 0.0, False, 0, 2.5, 1e299, -1.0):
        track = Track(value=value, is_followed=bool(value), known=float(value))
        restarts = Restarts(failed=int(value > 0), ended=1, was_orderly=bool(value))
        back = record(Track, json.loads(record_text(track)), Shift(0.0, 0.0))
        again = record(Restarts, json.loads(record_text(restarts)), Shift(0.0, 0.0))

        assert (back.value, back.is_followed, back.known) == (float(value), bool(value), float(value))
        assert (type(back.value), type(back.is_followed)) == (float, bool)
        assert (again, type(again.failed), type(again.was_orderly)) == (restarts, int, bool)


def test_more_numbers_than_are_remembered_are_all_written() -> None:
    for number in range(3 * MOST_NUMBERS):
        track = Track(value=number / 7, known=None)

        assert record(Track, json.loads(record_text(track)), Shift(0.0, 0.0)) == track


def test_what_is_infinite_is_left_out_and_what_is_no_number_is_an_error() -> None:
    assert "longest" not in json.loads(record_text(Restarts(longest=math.inf)))
    assert "longest" in json.loads(record_text(Restarts(longest=5.0)))
    for wrong in (Restarts(longest=math.nan), Steps(durations=deque((math.inf,)))):
        with pytest.raises(ValueError, match="number"):
            record_text(wrong)


@pytest.mark.parametrize(
    ("version", "kept"), [("0.5.12", "0.5.12"), ("\N{ARABIC-INDIC DIGIT THREE}", ""), ('3"', ""), ("secret", "")]
)
def test_a_version_is_written_as_it_is_read_or_not_at_all(version: str, kept: str) -> None:
    """One word that reads otherwise than it was written, and the seal of the whole document is wrong."""
    run = stalled()
    run.now.startup.version = version

    (entry,) = run.document(300.0)["servers"]
    assert entry["timeline"]["startup"]["version"] == kept


@pytest.mark.parametrize("wrong", [math.nan, math.inf, "much"])
def test_a_server_with_a_number_that_is_none_costs_no_other(wrong: Any) -> None:
    run = stalled()
    run.timeline.see([run.server, server("other")], 300.0)
    run.tick(300.0)
    assert len(run.document(300.0)["servers"]) == 2

    run.now.moves["log"] = wrong

    (entry,) = run.document(300.0)["servers"]
    assert entry["name"] == seal("name", "other")


@pytest.mark.parametrize(("name", "wrong"), [("was_ready", 2), ("novel_in_a_row", 1.5), ("novel_in_a_row", "much")])
def test_a_server_with_a_part_that_is_none_costs_no_other(name: str, wrong: Any) -> None:
    run = stalled()
    run.timeline.see([run.server, server("other")], 300.0)
    run.tick(300.0)

    setattr(run.now, name, wrong)

    (entry,) = run.document(300.0)["servers"]
    assert entry["name"] == seal("name", "other")


def test_rows_keep_the_bound_they_were_made_with() -> None:
    steps = Steps(5.0, 3.0)
    steps.durations.extend(float(n) for n in range(200))
    back = record(Steps, json.loads(record_text(steps)), Shift(100.0, 0.0))

    assert back.durations.maxlen == MOST_STEPS
    assert (back.last, back.amount) == (105.0, 3.0)
    assert back.stretch(1.0) == pytest.approx(steps.stretch(1.0))


def test_what_is_urgent_is_kept_when_there_is_no_room_for_all() -> None:
    run = stalled()
    for number in range(MOST_SERVERS):
        run.timeline.see([server(f"idle-{number}")], 300.0)
    run.look(300.0)
    run.episodes.tick(300.0, WALL)
    entries = run.document(300.0)["servers"]

    assert len(entries) == MOST_SERVERS
    assert entries[0]["episode"]["verdict"]["state"] == "stalled"


def test_each_server_has_the_rank_names_of_its_own() -> None:
    run = stalled()
    run.timeline.see([run.server, server("other"), server("nameless")], 300.0)
    run.tick(300.0)
    run.names = (RankName("other", 7, "TP0"), RankName(NAME, 5, "TP1"), RankName("other", 8, "rank of a stranger"))

    ranks = {entry["name"]: entry["ranks"] for entry in run.document(300.0)["servers"]}

    told = {NAME: [[5, "TP1"]], "other": [[7, "TP0"]], "nameless": []}
    assert ranks == {seal("name", name): own for name, own in told.items()}


def test_a_server_that_was_forgotten_is_not_handed_on() -> None:
    run = stalled()
    run.timeline.forget(NAME)

    assert run.document(300.0)["servers"] == []


# --- any document at all --------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def changed(value: Any, path: list[int], new: Any) -> Any:
    """A copy with one part replaced: the one to which the numbers of `path` lead."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = changed(value[key], path[1:], new)
    return copy


DOCUMENT = stalled().document(300.0)


@given(path=st.lists(st.integers(0, 60), min_size=1, max_size=9), new=JSON)
def test_a_document_with_any_part_replaced_raises_nothing(path: list[int], new: Any) -> None:
    memory = Memory(seal, "this boot")
    memory.load(changed(DOCUMENT, path, new), 1310.0)
    run = Run(memory=memory)
    run.noise(10.0)

    for t in (1310.0, 1315.0):
        run.look(t)
        run.tell(t, "load_progress", "TP1", done=1.0, total=8.0)
        run.tell(t, "stats", None, running=1.0)
        reports = run.episodes.tick(t, WALL + t)
        report = Report(WALL + t, t, (), reports, (), {}, run.episodes.startups())
        assert render(report)
        assert document_of(report)
    assert run.document(1320.0)


@given(JSON)
def test_any_document_raises_nothing(document: Any) -> None:
    memory = Memory(seal, "this boot")

    memory.load({"boot": "this boot", "servers": document, "startups": document}, 1310.0)
    assert memory.load(document, 1310.0) in (None, "of another boot or host")


def test_a_timeline_that_cannot_be_read_is_begun_anew() -> None:
    document = stalled().document(300.0)
    document["servers"][0]["timeline"]["moves"] = "none"
    memory = Memory(seal, "this boot")
    memory.load(document, 1310.0)
    run = Run(memory=memory)

    assert run.first_report(1310.0).verdict.state == "working"
    assert memory.unusable == 1
    assert run.now.moves == {}


def test_servers_that_come_and_go_under_ever_new_names_leave_nothing_behind() -> None:
    memory, run = Memory(seal, "this boot"), Feed()

    for number in range(1000):
        memory.meet(run.timeline, run.episodes, [server(f"vllm-{number}"), server("stays")], float(number), 0.0)

    assert sum(len(getattr(memory, each.name)) for each in fields(memory) if each.name.startswith("_")) < 10


def test_a_document_asks_anew_only_for_hashes_that_the_one_before_did_not_need() -> None:
    asked: list[tuple[str | int, ...]] = []

    def counting(*words: str | int) -> str:
        asked.append(words)
        return seal(*words)

    hashes = Hashes(counting)
    for names in (("a", "b"), ("b", "c"), ("a",)):
        hashes.begin()
        for name in (*names, *names):
            assert hashes("log", name, 1) == seal("log", name, 1)

    assert asked == [("log", "a", 1), ("log", "b", 1), ("log", "c", 1), ("log", "a", 1)]
    assert len(hashes) == 3
