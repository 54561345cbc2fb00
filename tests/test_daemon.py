"""The tick: what it does with results that are late, missing or from before a pause, and what it publishes.

The pollers are real; their threads are started only where a test is about threads.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from feed import TICK, WALL, Feed, server
from stallwatch import signals
from stallwatch.clock import Clock
from stallwatch.config import Config, Intervals, Thresholds
from stallwatch.daemon import (
    CYCLES_TO_KNOW,
    LAST_LINE,
    LOG_PROGRESS_SILENCE,
    LOG_SILENCE,
    MOST_RANK_NAMES,
    Daemon,
    is_loss,
)
from stallwatch.memory import Memory
from stallwatch.model import (
    Event,
    GpuUse,
    Listener,
    Observation,
    ProcessId,
    RankName,
    Reading,
    Report,
    Result,
    Scene,
    Signal,
)
from stallwatch.poller import Poller, sort
from stallwatch.sources import Host, Moment
from stallwatch.timeline import MIB

SOON = 60.0
LAST = Signal(LAST_LINE, "Unix time of the last line.", ("server", "log"), "log")


class Stub:
    """A source that yields what a function returns; raises what it raises."""

    signals = ()

    def __init__(self, name: str, yields: Callable[[], Iterable[Observation]]) -> None:
        self.name, self.yields = name, yields
        self.closed, self.configs = False, list[Config]()
        self.dropped_servers = 0
        self.dropped_ranks = 0
        self.absent = False
        self.mean_seconds = 0.0

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        yield from self.yields()

    def configure(self, config: Config) -> None:
        self.configs.append(config)

    def close(self) -> None:
        self.closed = True


class Node:
    """A node with one server (a Feed's counters) under a daemon whose clock the test moves."""

    def __init__(self, config: Config | None = None, **extra: Callable[[], Iterable[Observation]]) -> None:
        self.feed = Feed(server=server())
        self.now, self.wall_step = 5000.0, 0.0
        self.events: list[Event] = []
        self.published: list[Report] = []
        yields: dict[str, Callable[[], Iterable[Observation]]] = {
            "processes": lambda: [self.feed.server, *self.feed.process_readings()],
            "threads": self.feed.thread_readings,
            "logs": lambda: [*self.feed.log_readings(), *self._new_events()],
        }
        self.sources = {name: Stub(name, function) for name, function in (yields | extra).items()}
        host = Host(config or Config(), (), Path("/nowhere"), Path("/nowhere"))
        self.daemon = Daemon(host, self._pollers, self.published.append, self.monotonic, self.wall)

    def _pollers(self, scene: Callable[[], Scene], notify: Callable[[Result], None]) -> list[Poller]:
        self.pollers = {
            name: Poller(source, 5.0, scene, notify, self.monotonic, self.wall)  # type: ignore[arg-type]
            for name, source in self.sources.items()
        }
        return list(self.pollers.values())

    def _new_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return WALL + self.now + self.wall_step

    def step(self, *but: str, seconds: float = TICK) -> Report:
        """After some seconds of noise every collector but the named ones reads, and the daemon ticks."""
        self.now += seconds
        self.feed.noise(self.now)
        for name, poller in self.pollers.items():
            if name not in but:
                poller.turn()
        return self.daemon.tick()

    def steps(self, number: int, *but: str) -> Report:
        for _ in range(number):
            report = self.step(*but)
        return report

    def states(self) -> list[str]:
        """States in order, each once in a row."""
        found = [report.servers[0].verdict.state for report in self.published if report.servers]
        return [state for index, state in enumerate(found) if not index or found[index - 1] != state]


# --- our own clock -----------------------------------------------------------------------------------------


def test_a_clock_counts_ticks_but_no_pause_of_ours() -> None:
    clock = Clock(5.0)
    times = [clock.tick(t) for t in (100.0, 105.0, 120.0, 720.0, 725.0)]

    assert times == [100.0, 105.0, 120.0, 125.0, 130.0]


def test_the_time_of_a_reading_is_not_before_the_tick_before() -> None:
    clock = Clock(5.0)
    clock.tick(100.0)
    clock.tick(700.0)

    assert clock.of(101.0, earliest=100.0) == 100.0
    assert clock.of(699.0, earliest=100.0) == 104.0


def test_a_silent_server_is_stalled_in_time() -> None:
    """The twin of all the pauses below."""
    node = Node()
    node.steps(50)

    assert node.states() == ["working", "quiet", "stalled"]


@pytest.mark.parametrize(("before", "loaded"), [(1, True), (47, True), (1, False), (45, False)])
def test_a_paused_exporter_does_not_page_when_it_goes_on(before: int, loaded: bool) -> None:
    """SIGSTOP for ten minutes: neither the pause nor what was not seen in it is the server's silence."""
    node = Node()
    node.steps(before)
    node.now += 600.0
    if loaded:
        node.feed.of["TP0"].storage += 5000 * MIB
    node.daemon.tick()  # before any collector has looked again
    node.step()

    assert "stalled" not in node.states()
    node.steps(46 if loaded else 46 - before)
    assert "stalled" not in node.states()
    node.steps(4)
    assert node.states()[-1] == "stalled"


def test_a_pause_of_the_exporter_does_not_interrupt_a_stall() -> None:
    node = Node()
    node.steps(50)
    node.now += 600.0
    node.daemon.tick()
    node.steps(10)

    assert node.states() == ["working", "quiet", "stalled"]
    assert node.published[-1].servers[0].stalled_seconds == pytest.approx(TICK * (10 + 1 + 1 + 1), abs=TICK)


def test_results_from_before_a_pause_are_not_taken_for_new_ones() -> None:
    node = Node()
    node.steps(2)
    node.now += 2.0
    node.feed.of["TP0"].storage += 9 * MIB
    node.pollers["processes"].turn()
    node.now += 600.0
    report = node.daemon.tick()

    age = next(each.age_seconds for each in report.servers[0].channels if each.channel == "storage")
    assert age == TICK


def test_a_step_of_the_wall_clock_changes_nothing_but_the_timestamp() -> None:
    stepped, twin = Node(), Node()
    stepped.steps(10)
    stepped.wall_step = 3600.0
    stepped.steps(45)
    twin.steps(55)

    assert stepped.states() == twin.states()
    assert stepped.published[-1].timestamp == twin.published[-1].timestamp + 3600.0


# --- sources that fail or hang -----------------------------------------------------------------------------


def values(report: Report, name: str) -> list[float | None]:
    return [reading.value for reading in report.readings if reading.signal.name == name]


def broken() -> Iterable[Observation]:
    raise OSError


def test_a_source_that_raises_is_told_and_the_others_go_on() -> None:
    node = Node(node=broken)
    report = node.steps(2)

    health = {each.source: each.success for each in report.health}
    assert health == {"processes": True, "threads": True, "logs": True, "node": False}
    assert report.read_errors[("node", "error")] == 2
    assert values(report, "threads") == [205.0, 205.0]


def test_readings_of_a_source_that_fails_leave_the_report_at_once() -> None:
    node = Node()
    assert values(node.step(), "threads") != []

    node.sources["threads"].yields = broken
    assert values(node.step(), "threads") == []


def test_readings_of_a_source_that_hangs_leave_the_report_after_three_intervals() -> None:
    node = Node(Config(intervals=Intervals(tick=5.0, threads=10.0)))
    node.step()

    counts = [len(values(node.step("threads"), "threads")) for _ in range(8)]

    assert counts == [2, 2, 2, 2, 2, 2, 0, 0]
    assert values(node.published[-1], "process_resident_memory_bytes") != []


def test_values_that_cannot_be_read_are_counted_and_not_published() -> None:
    missing = signals.HEALTH_STATUS.missing("timeout", "s", "health")
    node = Node(endpoints=lambda: [missing])
    report = node.step()

    assert values(report, "health_status") == []
    assert report.read_errors == {("endpoints", "timeout"): 1}


def test_a_collector_that_hangs_makes_a_silent_server_unknown_and_never_a_page() -> None:
    node = Node()
    node.step()
    node.steps(60, "processes")

    assert node.states() == ["working", "quiet", "unknown"]


def test_series_that_were_dropped_are_counted() -> None:
    node = Node()
    before = node.step().dropped
    node.sources["processes"].dropped_servers = 7
    node.sources["processes"].dropped_ranks = 3

    assert before == {"servers_limit": 0, "ranks_limit": 0, "logs_limit": 0, "kinds_limit": 0}
    assert node.step().dropped == {"servers_limit": 7, "ranks_limit": 3, "logs_limit": 0, "kinds_limit": 0}


# --- what sources tell each other --------------------------------------------------------------------------


def test_the_scene_holds_what_was_found() -> None:
    listener, name = Listener("s", 8000, "127.0.0.1"), RankName("s", 77, "TP1")
    node = Node(sockets=lambda: [listener, listener])
    node.sources["logs"].yields = lambda: [name, name]
    node.step()

    scene = node.daemon.scene
    assert (scene.servers, scene.listeners, scene.rank_names) == ((node.feed.server,), (listener,), (name,))
    assert scene.ready == frozenset()


def test_the_scene_says_which_servers_are_ready() -> None:
    node = Node()
    node.events = [Event(node.now, "s", "ready")]
    node.step()

    assert node.daemon.scene.ready == {"s"}


def test_names_of_ranks_are_bounded() -> None:
    numbers = iter(range(10))
    node = Node()
    node.sources["logs"].yields = lambda: [
        RankName("s", pid, "TP1") for number in [next(numbers)] for pid in range(1000 * number, 1000 * number + 1000)
    ]
    node.steps(10)

    assert len(node.daemon.scene.rank_names) == MOST_RANK_NAMES
    assert node.daemon.scene.rank_names[-1].pid == 9999


def test_a_new_server_wakes_the_other_sources_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.step()
    woken: list[str] = []
    for name, poller in node.pollers.items():
        monkeypatch.setattr(poller, "wake", lambda name=name: woken.append(name))
    node.feed.server = replace(node.feed.server, root=replace(node.feed.server.root, pid=200), started_at=WALL + 9)
    node.steps(3)

    assert woken == ["threads", "logs"]


def test_a_port_that_opened_is_asked_at_once_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[Listener] = []
    node = Node(sockets=lambda: list(ports), endpoints=list)
    node.step()
    woken: list[str] = []
    for name, poller in node.pollers.items():
        monkeypatch.setattr(poller, "wake", lambda name=name: woken.append(name))
    ports.append(Listener("s", 8000, "127.0.0.1"))
    node.steps(3)
    ports.clear()
    node.step()

    assert woken == ["endpoints"]


# --- ticks -------------------------------------------------------------------------------------------------


def test_a_certain_sign_ticks_at_once_and_a_plain_result_does_not() -> None:
    """The tick is an hour away: only a wake-up can publish."""
    reports = threading.Semaphore(0)
    node = Node(Config(intervals=Intervals(tick=3600.0)))
    node.step()
    node.daemon._publish = lambda report: reports.release()
    thread = threading.Thread(target=node.daemon.run)
    thread.start()

    node.daemon._notice(node.pollers["processes"].turn())
    assert not reports.acquire(blocking=False)
    node.feed.dead = {"TP1"}
    node.daemon._notice(node.pollers["processes"].turn())
    assert reports.acquire(timeout=SOON)

    node.daemon.stop()
    thread.join(SOON)
    assert not thread.is_alive()
    assert node.daemon.report is not None
    assert node.daemon.report.servers[0].verdict.reason == "rank_dead"


def test_the_first_look_of_a_source_ticks_at_once() -> None:
    node = Node()
    result = node.pollers["processes"].turn()
    assert not node.daemon._wake.is_rung

    node.daemon._notice(result)
    assert node.daemon._wake.is_rung


def test_a_bug_in_the_tick_ends_the_process_and_is_not_swallowed() -> None:
    node = Node()

    def bug(report: Report) -> None:
        raise ZeroDivisionError

    node.daemon._publish = bug
    node.daemon._wake.ring()

    with pytest.raises(ZeroDivisionError):
        node.daemon.run()


def test_once_completes_a_cycle_in_which_all_have_seen_what_the_others_found() -> None:
    node = Node()
    report = node.daemon.once(SOON)
    node.daemon.close()

    assert all(poller.finished >= CYCLES_TO_KNOW for poller in node.pollers.values())
    assert [each.server.name for each in report.servers] == ["s"]
    assert all(source.closed for source in node.sources.values())


def test_once_leaves_time_for_means_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(gpu=lambda: ())
    node.sources["gpu"].mean_seconds = 1.0
    reads: dict[Poller, tuple[int, float]] = {}

    def woken(now: float) -> set[str]:
        names = set[str]()
        for name, poller in node.pollers.items():
            monkeypatch.setattr(poller, "wake", lambda name=name: names.add(name))
        node.daemon._wake_rested(reads, now)
        return names

    others = {"processes", "threads", "logs"}
    assert [woken(now) for now in (100.0, 100.9, 101.0)] == [others, others, others | {"gpu"}]
    node.pollers["gpu"].turn()
    assert [woken(now) for now in (101.1, 102.0, 102.2)] == [others, others, others | {"gpu"}]
    node.sources["gpu"].absent = True
    node.pollers["gpu"].turn()
    assert "gpu" in woken(102.3)


def test_once_ends_when_there_was_time_for_means() -> None:
    node = Node(gpu=lambda: ())
    node.sources["gpu"].mean_seconds = 0.1
    node.daemon.once(SOON)
    node.daemon.close()

    assert node.pollers["gpu"].finished >= CYCLES_TO_KNOW


def test_once_and_close_do_not_wait_for_a_source_that_hangs() -> None:
    entered, let_go = threading.Event(), threading.Event()

    def hang() -> Iterable[Observation]:
        entered.set()
        assert let_go.wait(SOON)
        return ()

    node = Node(node=hang)
    report = node.daemon.once(0.2)
    assert entered.wait(SOON)
    until = time.monotonic() + SOON
    while not report.servers and time.monotonic() < until:  # on a busy machine the others may take longer
        time.sleep(0.01)
        report = node.daemon.tick()
    node.daemon.close(0.0)

    hung = next(each for each in report.health if each.source == "node")
    assert (hung.success, hung.in_flight_since) == (None, 5000.0)
    assert [each.server.name for each in report.servers] == ["s"]
    assert not node.sources["node"].closed
    let_go.set()
    assert node.pollers["node"].join(SOON)
    assert node.sources["node"].closed  # by its own thread, so that no helper of it is left over


def test_a_source_whose_thread_ended_meanwhile_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends just when it is given up."""
    node = Node()
    closed = list[str]()
    for name, poller in node.pollers.items():
        monkeypatch.setattr(node.sources[name], "close", partial(closed.append, name))
        poller.start()
        poller.stop()
        assert poller.join(SOON)
        monkeypatch.setattr(poller, "join", lambda seconds: False)

    node.daemon.close(0.0)

    assert sorted(closed) == sorted(node.pollers)


def test_each_change_of_a_verdict_is_one_line_of_our_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stallwatch.daemon")
    Node().steps(60)

    changes = [(r.__dict__["before"], r.__dict__["state"]) for r in caplog.records if r.message == "verdict changed"]
    assert changes == [("none", "working"), ("working", "quiet"), ("quiet", "stalled")]


# --- log silences ------------------------------------------------------------------------------------------


def silences(report: Report) -> tuple[list[float | None], list[float | None]]:
    return values(report, LOG_SILENCE.name), values(report, LOG_PROGRESS_SILENCE.name)


def test_silences_of_a_log_are_as_of_the_report_and_do_not_follow_the_wall_clock() -> None:
    node = Node()
    line = [WALL + 5005.0]
    node.sources["logs"].yields = lambda: [LAST.read(line[0], "s", "log"), *node._new_events()]
    node.step()
    node.events = [Event(node.now, "s", "load_begin", log="log")]
    node.step()
    assert silences(node.step()) == ([10.0], [10.0])

    node.wall_step = 3600.0
    assert silences(node.step()) == ([15.0], [15.0])
    line[0] = node.wall() + TICK
    assert silences(node.step()) == ([0.0], [20.0])


@pytest.mark.parametrize("step", [3600.0, -3600.0])
@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_step_between_the_reading_of_a_log_and_the_tick_is_no_silence(step: float, looks: int) -> None:
    """The line was dated by the clock of before; were it never followed by another, it would be wrong for good.

    `looks`: at the log between the step and the tick, which find nothing new.
    """
    node = Node()
    node.step()
    node.now += TICK
    line = node.wall() - 2.0
    node.sources["logs"].yields = lambda: [LAST.read(line, "s", "log")]
    node.pollers["logs"].turn()
    node.wall_step = step
    for _ in range(looks):
        node.pollers["logs"].turn()

    assert silences(node.daemon.tick())[0] == [2.0]
    assert silences(node.step())[0] == [2.0 + TICK]


# --- several looks in one tick -----------------------------------------------------------------------------


def looks(node: Node, *each: Iterable[Observation]) -> tuple[list[float], list[float]]:
    """Looks at the log, a second apart, then a tick: when they were recorded, and when they were put."""
    recorded, put, timeline = list[float](), list[float](), node.daemon._timeline
    node.daemon._witness = lambda result, at, interval: recorded.append(at)
    take = timeline.put
    timeline.put = lambda readings, at, *more, **named: (put.append(at), take(readings, at, *more, **named))  # type: ignore
    for observations in each:
        node.now += 1.0
        node.sources["logs"].yields = lambda told=observations: told  # type: ignore[misc]
        node.pollers["logs"].turn()
    node.daemon.tick()
    timeline.put = take  # type: ignore[method-assign]
    return recorded, put


def log_bytes(value: float) -> Reading:
    return signals.LOG_BYTES.read(value, "s", "log")


def test_of_looks_that_say_the_same_each_is_recorded_and_the_first_and_the_last_are_put() -> None:
    node = Node()
    node.step()
    now = node.now
    recorded, put = looks(node, *[[log_bytes(5.0)]] * 4)
    again = looks(node, *[[log_bytes(5.0)]] * 3)

    assert recorded == [now + 1.0, now + 2.0, now + 3.0, now + 4.0]
    assert put == [now + 1.0, now + 4.0]
    assert again == ([now + 5.0, now + 6.0, now + 7.0], [now + 7.0])


def test_a_change_is_dated_by_the_look_that_saw_it_first() -> None:
    node = Node()
    node.step()
    now = node.now
    recorded, put = looks(
        node, [log_bytes(5.0)], [log_bytes(6.0)], [log_bytes(5.0)], [log_bytes(5.0)], [log_bytes(5.0)]
    )

    assert len(recorded) == 5
    assert put == [now + 1.0, now + 2.0, now + 3.0, now + 5.0]


def test_an_event_between_looks_that_say_the_same_is_told() -> None:
    node = Node()
    node.step()
    begin = Event(node.now + 1.0, "s", "load_begin", log="log")
    looks(node, [log_bytes(5.0)], [log_bytes(5.0), begin], [log_bytes(5.0)])

    timeline = node.daemon._timeline.of("s")
    assert timeline is not None
    assert timeline.progress_by_log == {"log": pytest.approx(node.daemon._now - 2.0)}


# --- configuration -----------------------------------------------------------------------------------------


def test_a_new_configuration_reaches_thresholds_intervals_and_sources() -> None:
    node = Node()
    node.step()
    config = Config(verdict=Thresholds(window=20.0, stall_after=30.0), intervals=Intervals(processes=7.0, ports=8.0))
    node.daemon.reconfigure(config)
    node.steps(8)

    assert node.states()[-1] == "stalled"
    assert node.pollers["processes"].interval == 7.0
    assert node.sources["threads"].configs == [config]
    assert node.published[-1].config_reload == (True, WALL + 5005.0)


def test_a_wrong_configuration_is_told_and_changes_nothing() -> None:
    node = Node()
    before = node.daemon.config
    node.step()
    node.daemon.reconfigure(None)

    assert node.step().config_reload == (False, WALL + 5000.0)
    assert node.daemon.config is before
    assert node.sources["threads"].configs == []


# --- a process that went missing ---------------------------------------------------------------------------


class Woken(Poller):
    """Counts who wakes it."""

    wakes = 0

    def wake(self) -> None:
        self.wakes += 1


def woken_by(result: Result) -> dict[str, int]:
    """How often each source is woken when `processes` has read this."""
    notify: list[Callable[[Result], None]] = []
    pollers: list[Woken] = []

    def make(scene: Callable[[], Scene], notice: Callable[[Result], None]) -> list[Woken]:
        notify.append(notice)
        for name in ("processes", "threads", "node"):
            pollers.append(Woken(Stub(name, tuple), 5.0, scene, notice))  # type: ignore[arg-type]
        return pollers

    Daemon(Host(Config(), (), Path("/nowhere"), Path("/nowhere")), make, lambda report: None)
    notify[0](result)
    return {poller.source.name: poller.wakes for poller in pollers}


def processes_read(*observations: Observation) -> Result:
    return sort("processes", observations, 1.0, lambda: 1.0)


def test_when_a_rank_went_missing_the_kills_of_the_kernel_are_read_at_once() -> None:
    alive, missing = signals.RANK_ALIVE.read(1.0, "s", "TP0"), signals.RANK_ALIVE.missing("vanished", "s", "TP1")

    assert woken_by(processes_read(server(), alive, missing)) == {"processes": 0, "threads": 0, "node": 1}


def test_when_the_first_process_went_missing_the_kills_of_the_kernel_are_read_at_once() -> None:
    whole = server()
    left = tuple(process for process in whole.processes if process.id != whole.root)

    assert woken_by(processes_read(replace(whole, processes=left)))["node"] == 1
    assert woken_by(processes_read(replace(whole, processes=())))["node"] == 1


def test_while_nothing_is_missing_nothing_is_read_early() -> None:
    unreadable = signals.RANK_ALIVE.missing("permission", "s", "TP1")
    never_came = replace(server(), root=ProcessId(0, 0), processes=())

    assert not is_loss(processes_read(server(), never_came, signals.RANK_ALIVE.read(1.0, "s", "TP0"), unreadable))
    assert woken_by(processes_read(server())) == {"processes": 0, "threads": 0, "node": 0}


# --- a restart of ours --------------------------------------------------------------------------------------


def seal(*parts: object) -> str:
    return f"{hash(parts):x}"


def restarted(before: Node, down: float) -> Node:
    """The next process, `down` seconds later; the server is what it was."""
    node = Node()
    document = before.daemon.remembered()
    assert document is not None
    node.daemon._memory = Memory(seal, "boot")
    node.now = before.now + down
    assert node.daemon._memory.load(json.loads(document.text()), node.now) is None
    node.feed.of, node.feed.last_look = before.feed.of, before.feed.last_look
    node.feed.ranks, node.feed.waits, node.feed.log_bytes = before.feed.ranks, before.feed.waits, before.feed.log_bytes
    return node


@pytest.fixture
def stalled() -> Node:
    node = Node()
    node.daemon._memory = Memory(seal, "boot")
    node.feed.waits = {"TP1": "sleep"}
    node.step()
    node.step(seconds=500.0)  # a pause of ours: our clock and the monotonic one are apart from here on
    node.steps(60)
    assert node.states() == ["working", "quiet", "stalled"]
    return node


def test_the_first_report_after_a_restart_says_what_the_last_one_before_said(stalled: Node) -> None:
    (before,) = stalled.published[-1].servers
    node = restarted(stalled, down=60.0)
    (after,) = node.step("threads", "logs").servers

    assert after.verdict.reason == "idle_wait"
    assert after.verdict.suspect_rank == "TP1"
    assert after.since_timestamp == before.since_timestamp
    node.steps(60)
    assert node.states() == ["stalled"]
    assert node.published[-1].servers[0].since_timestamp == before.since_timestamp


def test_a_server_that_read_its_weights_while_we_were_down_works(stalled: Node) -> None:
    node = restarted(stalled, down=60.0)
    node.feed.of["TP1"].storage += 100 * MIB

    assert node.step().servers[0].verdict.state == "working"


def test_who_is_which_rank_is_known_again_before_the_log_is_read(stalled: Node) -> None:
    stalled.daemon.scene = replace(stalled.daemon.scene, rank_names=(RankName("s", 7, "TP1"),))
    node = restarted(stalled, down=60.0)
    node.step()

    assert node.daemon.scene.rank_names == (RankName("s", 7, "TP1"),)


def test_a_daemon_without_memory_remembers_nothing() -> None:
    node = Node()
    node.steps(3)

    assert node.daemon.remembered() is None


# --- what sources tell each other, and sources that have nothing to read -----------------------------------


def test_who_uses_a_card_stays_known_until_the_collector_says_otherwise() -> None:
    uses = [GpuUse("GPU-0", 100)]
    node = Node(gpu=lambda: uses)
    node.step()
    first = node.daemon.scene.gpu_uses
    node.step("gpu")
    kept = node.daemon.scene.gpu_uses
    uses.clear()
    node.step()

    assert (first, kept, node.daemon.scene.gpu_uses) == ((GpuUse("GPU-0", 100),), (GpuUse("GPU-0", 100),), ())


def test_a_collector_without_anything_to_read_has_no_health() -> None:
    unreadable = signals.GPU_LOST.missing("error", "GPU-0")
    node = Node(gpu=lambda: [unreadable])
    there = node.step()
    node.sources["gpu"].absent = True
    absent = node.step()

    assert "gpu" in {health.source for health in there.health}
    assert there.read_errors["gpu", "error"] == 1
    assert {health.source for health in absent.health} == {"processes", "threads", "logs"}
    assert {collector for collector, _ in absent.read_errors} <= {"processes", "threads", "logs"}
