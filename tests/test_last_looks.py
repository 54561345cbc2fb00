"""What a source says again is not worked out again: a timeline that relies on that and one that takes all anew."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from feed import CardFigures, Feed, SayingAgain, server
from stallwatch import signals
from stallwatch.model import Reading
from stallwatch.server_timeline import ServerTimeline
from stallwatch.timeline import MIB, Timeline, news_of
from stallwatch.tracks import Track, put_again

SOURCES: dict[str, Callable[[Feed], list[Reading]]] = {
    "processes": Feed.process_readings,
    "logs": Feed.log_readings,
    "threads": Feed.thread_readings,
    "endpoints": lambda feed: feed.serving.readings(feed.server.name),
    "node": Feed.node_readings,
    "gpu": lambda feed: [
        reading for rank, card in feed.cards.items() for reading in card.readings(feed.server.name, rank)
    ],
}

Step = Callable[[Feed, random.Random], None]


def grows(counter: str, *amounts: float) -> Step:
    def step(feed: Feed, chance: random.Random) -> None:
        counters = feed.of[chance.choice(list(feed.of))]
        setattr(counters, counter, getattr(counters, counter) + chance.choice(amounts))

    return step


def is_set(name: str, *values: Any) -> Step:
    return lambda feed, chance: setattr(feed, name, chance.choice(values))


def serves(name: str, *values: Any) -> Step:
    return lambda feed, chance: setattr(feed.serving, name, chance.choice(values))


def grow_log(feed: Feed, chance: random.Random) -> None:
    feed.log_bytes += chance.choice((100.0, MIB, -MIB))


def wait(feed: Feed, chance: random.Random) -> None:
    feed.waits[chance.choice(feed.ranks)] = chance.choice(("futex", "running", "stopped", ""))


def die(feed: Feed, chance: random.Random) -> None:
    feed.dead = chance.choice((set(), set(), {"TP1"}))


def use_card(feed: Feed, chance: random.Random) -> None:
    feed.cards["TP0"] = replace(feed.cards["TP0"], held=chance.choice((76e9, 77e9)), power=chance.choice((None, 80.0)))


def begin_anew(feed: Feed, chance: random.Random) -> None:
    feed.server = server(started_at=feed.server.started_at + 60.0)


STEPS: tuple[Step, ...] = (
    grows("cpu", 0.01, 4.0),
    grows("minor", 1.0, 600.0, 5000.0, -9.0),
    grows("storage", 400_000.0, 10 * MIB),
    grows("read", 5 * MIB),
    grows("written", 10 * MIB, 40 * MIB),
    grows("resident", 9 * MIB, -9 * MIB, 64 * MIB),
    is_set("child_cpu", 3.0, 4.0, 9.0),
    is_set("compilers", 0, 1),
    is_set("log", True, True, False),
    is_set("root", True, True, False),
    is_set("kills", None, 0.0, 1.0),
    serves("running", None, 0.0, 2.0),
    serves("generated", None, 1.0, 7.0),
    serves("timeouts", 0.0, 1.0, 2.0),
    serves("health", None, 200.0, 503.0),
    grow_log,
    wait,
    die,
    use_card,
    begin_anew,
)


def known_of(timeline: Timeline) -> Any:
    """All that is known, but for samples that are too old to count, whose time to go is the next move."""
    found = {}
    for each in timeline:
        plain = {field.name: getattr(each, field.name) for field in fields(ServerTimeline) if field.name != "cards"}
        tracks = [
            (name, labels, asdict(replace(track, samples=type(track.samples)(list(track.samples)[-1:]))))
            for name, kept in sorted(each.tracks.items())
            for labels, track in sorted(kept.items())
        ]
        found[each.name] = plain | {"tracks": tracks}
    return found, timeline.cards._cards


def live(seed: int, looks: int, each: Callable[[str, list[Reading], tuple[Reading, ...], float, Feed], None]) -> None:
    """A server of which little changes from look to look."""
    chance, feed, again, at = random.Random(seed), Feed(), SayingAgain(), 0.0
    feed.cards["TP0"] = CardFigures()
    for _ in range(looks):
        at += chance.choice((5.0, 5.0, 5.0, 5.2, 1.0, 40.0))
        for step in chance.choices(STEPS[:-1], k=chance.choice((0, 1, 3))):
            step(feed, chance)
        if chance.random() < 0.02:
            begin_anew(feed, chance)
        for source, read in SOURCES.items():
            if chance.random() < 0.9:
                each(source, read(feed), again(source, read(feed)), at, feed)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_known_is_the_same_as_if_all_were_put_at_each_look(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, relying, counts, before = Timeline(), Timeline(), Counter[str](), dict[str, tuple[Reading, ...]]()

    def counted(tracks: tuple[Track, ...], at: float, interval: float, measured: float) -> None:
        counts["tracks"] += len(tracks)
        put_again(tracks, at, interval, measured)

    monkeypatch.setattr("stallwatch.timeline.put_again", counted)

    def put(source: str, anew: list[Reading], same: tuple[Reading, ...], at: float, feed: Feed) -> None:
        for timeline in (whole, relying):
            if source == "processes":
                timeline.see([feed.server], at)
        whole.put(anew, at, 5.0, at + 0.1)
        relying.put(same, at, 5.0, at + 0.1, source, news_of(before.get(source, ()), same))
        before[source] = same
        if source == "processes":
            assert known_of(relying) == known_of(whole)

    live(seed, 150, put)

    assert counts["tracks"] > 1000  # else nothing was relied on


class Run:
    """A source that looks at logs, and what it says of a server."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.timeline.see([server()], 0.0)
        self._before: tuple[Reading, ...] = ()

    def once_more(self, readings: tuple[Reading, ...], *moments: float) -> None:
        for at in moments:
            self.timeline.put(readings, at, 5.0, source="logs", news=news_of(self._before, readings))
            self._before = readings

    def track(self, name: str = "log") -> Track | None:
        found = self.timeline.of("s")
        assert found is not None
        return found.track(signals.LOG_BYTES, "s", name)

    def read_at(self, name: str = "log") -> float | None:
        track = self.track(name)
        return None if track is None else track.read_at


def a_log(of: float = 1.0, name: str = "log") -> Reading:
    return signals.LOG_BYTES.read(of, "s", name)


def test_a_series_that_is_not_said_any_more_is_as_old_as_its_last_look() -> None:
    run, log, other = Run(), a_log(), a_log(name="other")
    run.once_more((log, other), 5.0, 10.0)
    run.once_more((log,), 15.0, 20.0)

    assert (run.read_at(), run.read_at("other")) == (20.0, 10.0)


def test_a_series_in_the_place_of_another_is_put_and_the_other_is_not() -> None:
    run = Run()
    run.once_more((a_log(),), 5.0, 10.0)
    run.once_more((a_log(name="other"),), 15.0)

    assert (run.read_at(), run.read_at("other")) == (10.0, 15.0)


def test_what_changed_is_told_and_all_of_it_when_there_are_other_series_or_another_start() -> None:
    log, grown, other, start = a_log(), a_log(2.0), a_log(name="other"), signals.SERVER_START.read(1.0, "s")

    assert news_of((log, other), (log, other)) == []
    assert news_of((log, other), (grown, other)) == [grown]
    assert news_of((log, other), (log,)) is None
    assert news_of((log, other), (other, log)) is None
    assert news_of((log, start), (grown, start)) == [grown]
    assert news_of((log, start), (log, signals.SERVER_START.read(2.0, "s"))) is None


def test_what_another_source_says_leaves_alone_what_this_one_said() -> None:
    run, log = Run(), (a_log(),)
    run.once_more(log, 5.0)
    run.timeline.put((), 10.0, 5.0, source="node", news=[])
    assert run.read_at() == 5.0

    run.once_more(log, 15.0)
    assert run.read_at() == 15.0


def test_a_server_that_was_forgotten_or_began_anew_is_told_of_what_is_said_again() -> None:
    run, log = Run(), (a_log(),)
    run.once_more(log, 5.0, 10.0)
    run.timeline.see([server(started_at=server().started_at + 60)], 12.0)
    assert run.read_at() is None
    run.once_more(log, 15.0)
    assert run.read_at() == 15.0

    run.timeline.forget("s")
    run.timeline.see([server()], 17.0)
    run.once_more(log, 20.0)
    assert run.read_at() == 20.0


def test_a_series_that_was_taken_away_comes_again_when_sources_are_looked_at_anew() -> None:
    run, log = Run(), (a_log(),)
    run.once_more(log, 5.0, 10.0)
    found = run.timeline.of("s")
    assert found is not None
    found.tracks.clear()
    run.timeline.look_anew()
    run.once_more(log, 15.0)

    assert run.read_at() == 15.0


def test_a_series_that_is_said_twice_is_what_was_said_last() -> None:
    run = Run()
    run.once_more((a_log(1.0), a_log(2.0)), 5.0, 10.0)
    track = run.track()

    assert track is not None
    assert (track.value, track.read_at) == (2.0, 10.0)
