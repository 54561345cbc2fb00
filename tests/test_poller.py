"""One thread per source: what a source that raises or hangs does to itself, and to nobody else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from stallwatch import signals
from stallwatch.model import Event, GpuUse, Listener, Observation, ProcessId, RankName, Result, Scene, Server, Signal
from stallwatch.poller import MOST_WAITING, Poller, is_urgent, sort
from stallwatch.sources import Moment

SOON = 60.0
"""Longest wait for something that happens at once; only a failure takes that long."""


class Clock:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A source that does one step of its script at each read; the last step again and again."""

    name: ClassVar[str] = "node"
    signals: ClassVar[tuple[Signal, ...]] = ()

    def __init__(self, *steps: Sequence[Observation] | BaseException, clock: Clock | None = None) -> None:
        self.steps, self.reads, self.clock = list(steps), 0, clock
        self.moments: list[Moment] = []
        self.scenes: list[Scene] = []

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        step = self.steps[min(self.reads, len(self.steps) - 1)]
        self.reads += 1
        self.moments.append(now)
        self.scenes.append(scene)
        if self.clock is not None:
            self.clock.now += 0.25
        if isinstance(step, BaseException):
            raise step
        yield from step

    def close(self) -> None:
        """Nothing to give back."""


class Blocking(Scripted):
    """A source whose read returns only when it is let go."""

    def __init__(self) -> None:
        super().__init__([])
        self.entered, self.let_go = threading.Event(), threading.Event()

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        self.entered.set()
        assert self.let_go.wait(SOON)
        yield from super().read(scene, now)


def poller(source: Scripted, clock: Clock | None = None) -> Poller:
    """A poller whose thread is not started."""
    return Poller(source, 5.0, Scene, lambda result: None, clock or Clock(), lambda: 1_700_000_000.0)


ALIVE = signals.SERVER_ALIVE.read(1, "s")
UNREADABLE = signals.SERVER_ALIVE.missing("permission", "s")


# --- one read ----------------------------------------------------------------------------------------------


def test_what_a_source_yields_is_sorted_by_kind() -> None:
    server = Server("s", "sglang", "server", ProcessId(1, 1), 0.0, ())
    event, name, listener = Event(1.0, "s", "ready"), RankName("s", 5, "TP0"), Listener("s", 8000, "127.0.0.1")

    processes = sort("processes", [ALIVE, server, name], 1.0)
    logs = sort("logs", [event, ALIVE], 1.0)
    sockets = sort("sockets", [listener], 1.0)

    assert (processes.readings, processes.servers, processes.rank_names) == ((ALIVE,), (server,), (name,))
    assert (logs.events, logs.servers, logs.listeners) == ((event,), None, None)
    assert sockets.listeners == (listener,)


def test_only_the_collectors_that_find_them_say_that_there_are_none() -> None:
    assert sort("processes", [], 1.0).servers == ()
    assert sort("sockets", [], 1.0).listeners == ()
    assert sort("threads", [], 1.0).servers is None
    assert (sort("gpu", [], 1.0).gpu_uses, sort("node", [], 1.0).gpu_uses) == ((), None)
    assert sort("gpu", [GpuUse("GPU-0", 5)], 1.0).gpu_uses == (GpuUse("GPU-0", 5),)


def test_a_read_is_measured_on_the_clock_it_was_given() -> None:
    clock = Clock()
    source = Scripted([ALIVE], clock=clock)
    polled = poller(source, clock)
    result = polled.turn()

    assert (result.started, result.finished, result.error) == (1000.0, 1000.25, None)
    assert source.moments == [Moment(1000.0, 1_700_000_000.0)]
    health = polled.health()
    assert (health.success, health.duration_seconds, health.last_success) == (True, 0.25, 1000.25)
    assert health.in_flight_since is None


def test_results_wait_until_they_are_taken_oldest_first() -> None:
    clock = Clock()
    polled = poller(Scripted([ALIVE], clock=clock), clock)
    polled.turn()
    polled.turn()

    assert [result.finished for result in polled.take()] == [1000.25, 1000.5]
    assert polled.take() == []


def test_readings_that_are_as_they_were_are_the_very_same() -> None:
    alike, fallen = signals.SERVER_ALIVE.read(1, "s"), signals.SERVER_ALIVE.read(0, "s")
    polled = poller(Scripted([ALIVE, UNREADABLE], [alike, UNREADABLE], [fallen, UNREADABLE]))
    first, again, other = (polled.turn().readings for _ in range(3))

    assert again is first
    assert other == (fallen, UNREADABLE)


class Resting(Scripted):
    """A source that says whether it has anything to do."""

    does_rest = True

    def rests(self, scene: Scene, at: float) -> bool:
        return self.does_rest


def test_a_source_that_rests_is_not_read_and_says_what_it_said_but_for_events() -> None:
    clock = Clock()
    polled = poller(source := Resting([ALIVE, UNREADABLE, Event(1.0, "s", "ready")], clock=clock), clock)
    first = polled.turn()
    clock.now += 5.0
    second = polled.turn()

    assert source.reads == 1  # the first read there was nothing to say again
    assert (len(first.events), second.events) == (1, ())
    assert second.readings is first.readings
    assert (second.started, second.wall, second.error) == (1005.25, 1_700_000_000.0, None)
    assert polled.read_errors() == {"permission": 2}
    assert (polled.finished, polled.health().last_success) == (2, 1005.25)
    source.does_rest = False
    polled.turn()
    assert source.reads == 2


def test_a_source_that_failed_is_read_whatever_it_says() -> None:
    polled = poller(source := Resting(OSError("gone"), [ALIVE]))
    polled.turn()

    assert (polled.turn().readings, source.reads) == ((ALIVE,), 2)
    assert polled.read_errors() == {"error": 1}


def test_before_the_first_read_nothing_is_known() -> None:
    health = poller(Scripted([])).health()

    assert (health.success, health.duration_seconds, health.last_success) == (None, None, None)


# --- a source that raises ----------------------------------------------------------------------------------


def test_a_source_that_raises_gives_a_result_without_readings_and_a_count() -> None:
    polled = poller(Scripted(OSError("secret path"), [ALIVE]))
    result = polled.turn()

    assert (result.error, result.readings) == ("OSError", ())
    assert polled.health().success is False
    assert polled.read_errors() == {"error": 1}


def test_a_source_that_raises_half_way_gives_none_of_its_readings() -> None:
    class HalfWay(Scripted):
        def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
            yield ALIVE
            raise ValueError

    polled = poller(HalfWay([]))
    result = polled.turn()

    assert (result.error, result.readings) == ("ValueError", ())


def test_a_failure_is_logged_once_per_change_of_state(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    polled = poller(Scripted(ValueError(), ValueError(), [ALIVE], [ALIVE], ValueError()))
    for _ in range(5):
        polled.turn()

    assert [record.message for record in caplog.records] == ["source failed", "source works again", "source failed"]
    assert {record.__dict__["source"] for record in caplog.records} == {"node"}
    assert polled.read_errors() == {"error": 3}


def test_a_source_that_has_nothing_to_read_here_is_absent_unless_it_fails() -> None:
    class Bare(Scripted):
        absent = True

    polled = poller(Bare([], ValueError(), []))

    assert [polled.is_absent, *(polled.turn() and polled.is_absent for _ in range(3))] == [True, True, False, True]


def test_the_last_success_stays_when_a_source_fails_later() -> None:
    clock = Clock()
    polled = poller(Scripted([ALIVE], ValueError(), clock=clock), clock)
    polled.turn()
    polled.turn()

    health = polled.health()
    assert (health.success, health.last_success) == (False, 1000.25)


def test_a_source_whose_call_outlived_its_read_is_no_success_and_shows_since_when() -> None:
    class Leaving(Scripted):
        in_flight_since: float | None = None
        incomplete = False

    clock, source = Clock(), Leaving([ALIVE])
    polled = poller(source, clock)
    polled.turn()
    source.in_flight_since, source.incomplete = 990.0, True
    clock.now = 1010.0
    result = polled.turn()
    overdue = polled.health()
    source.in_flight_since, source.incomplete = None, False
    polled.turn()

    assert (result.error, result.readings) == (None, (ALIVE,))
    assert (overdue.success, overdue.in_flight_since, overdue.last_success) == (False, 990.0, 1000.0)
    health = polled.health()
    assert (health.success, health.in_flight_since, health.last_success) == (True, None, 1010.0)


def test_values_that_cannot_be_read_are_counted_by_reason() -> None:
    polled = poller(Scripted([UNREADABLE, ALIVE, UNREADABLE]))
    polled.turn()
    polled.turn()

    assert polled.read_errors() == {"permission": 4}


# --- the thread --------------------------------------------------------------------------------------------


def test_a_source_that_hangs_shows_since_when_and_stop_returns() -> None:
    clock, source = Clock(), Blocking()
    polled = poller(source, clock)
    polled.start()
    assert source.entered.wait(SOON)
    clock.now += 100.0

    assert polled.health().in_flight_since == 1000.0
    assert polled.health().success is None
    assert polled.take() == []
    polled.stop()
    assert not polled.join(0.0)

    source.let_go.set()
    assert polled.join(SOON)
    assert polled.health().in_flight_since is None


def test_a_poller_reads_again_when_it_is_woken_and_not_before() -> None:
    read = threading.Semaphore(0)
    source = Scripted([ALIVE])
    polled = Poller(source, 3600.0, Scene, lambda result: read.release())
    polled.start()
    assert read.acquire(timeout=SOON)
    assert source.reads == 1

    polled.wake()
    assert read.acquire(timeout=SOON)
    polled.stop()
    assert polled.join(SOON)
    assert source.reads == 2


def test_a_source_may_ask_for_an_earlier_turn() -> None:
    """A process that went missing is looked at again after a second, not after the interval."""
    read = threading.Semaphore(0)

    class Again(Scripted):
        again_seconds = 0.01

    polled = Poller(Again([ALIVE]), 3600.0, Scene, lambda result: read.release())
    polled.start()
    assert read.acquire(timeout=SOON)
    assert read.acquire(timeout=SOON)
    polled.stop()
    assert polled.join(SOON)


def test_a_source_is_not_read_again_while_too_many_results_wait() -> None:
    full, enough = threading.Semaphore(0), threading.Semaphore(0)
    source = Scripted([ALIVE])

    def told(result: Result) -> None:
        full.release()
        if source.reads >= MOST_WAITING:
            enough.release()

    polled = Poller(source, 0.0, Scene, told)
    polled.start()
    assert enough.acquire(timeout=SOON)
    polled.wake()
    assert source.reads == MOST_WAITING

    assert len(polled.take()) == MOST_WAITING  # and now there is room
    assert enough.acquire(timeout=SOON)
    polled.stop()
    assert polled.join(SOON)


def test_each_read_gets_the_scene_of_its_moment() -> None:
    scenes = iter((Scene(), Scene(ready=frozenset(("s",)))))
    source = Scripted([])
    polled = Poller(source, 5.0, lambda: next(scenes), lambda result: None)
    polled.turn()
    polled.turn()

    assert [scene.ready for scene in source.scenes] == [frozenset(), frozenset(("s",))]


# --- urgent ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observation", "urgent"),
    [
        (signals.RANK_ALIVE.read(0, "s", "TP1"), True),
        (signals.SERVER_ALIVE.read(0, "s"), True),
        (Event(1.0, "s", "fatal"), True),
        (Event(1.0, "s", "shutdown"), True),
        (Event(1.0, "s", "ready"), True),
        (signals.RANK_ALIVE.read(1, "s", "TP1"), False),
        (signals.RANK_ALIVE.missing("vanished", "s", "TP1"), False),
        (signals.THREADS.read(0, "s", "TP1", "disk"), False),
        (Event(1.0, "s", "load_end"), False),
    ],
)
def test_a_certain_sign_is_urgent_and_nothing_else(observation: Observation, urgent: bool) -> None:
    assert is_urgent(sort("processes", [observation], 1.0)) is urgent


def test_events_that_came_before_a_failure_are_kept_and_readings_are_not() -> None:
    """Lines that were read from a log are not read again."""

    class Breaking(Scripted):
        def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
            yield from super().read(scene, now)
            raise ValueError

    event = Event(1000.0, "s", "load_begin")
    result = poller(Breaking([event, ALIVE])).turn()

    assert (result.error, result.events, result.readings, result.servers) == ("ValueError", (event,), (), None)


def test_a_thread_that_ended_unasked_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """SystemExit is not caught, as no bug would raise it; a lack of memory may strike where errors are caught."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    exits, well = poller(Scripted(SystemExit())), poller(Scripted([ALIVE]))
    assert not exits.is_lost

    for polled in (exits, well):
        polled.start()
    assert exits.join(SOON)

    assert (exits.is_lost, well.is_lost) == (True, False)
    well.stop()
    assert well.join(SOON)
    assert not well.is_lost
