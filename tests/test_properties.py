"""What must hold for every history of readings: random servers through timeline and episodes.

A history is a list of looks, one per tick: what each collector may read at it and what the server did before
it.  Moves are at least a floor, noise is that of stuck servers (docs/NOISE.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from feed import TICK, WALL, CardFigures, Feed, Serving, server
from stallwatch.config import Thresholds
from stallwatch.model import Reading, Verdict
from stallwatch.timeline import MIB

T = Thresholds()
MOST_TICKS = int(0.99 * T.stall_after / TICK)
"""The longest gap between two strong moves, in ticks: 47, 235 s of 240 s."""

bounded = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # shrinking such histories takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
few = settings(bounded, max_examples=12)
"""For long histories, each of them told twice."""


def _add(counter: str, amount: float) -> Callable[[Feed, str, float], None]:
    def move(feed: Feed, rank: str, t: float) -> None:
        setattr(feed.of[rank], counter, getattr(feed.of[rank], counter) + amount)

    return move


def _child_cpu(feed: Feed, rank: str, t: float) -> None:
    feed.child_cpu += 0.051 * TICK


def _compiler(feed: Feed, rank: str, t: float) -> None:
    """One is born or gone; none lives without using CPU."""
    feed.compilers = 0 if feed.compilers else 1
    feed.child_cpu += 0.06 * TICK


def _resident(feed: Feed, rank: str, t: float) -> None:
    """Memory that is taken is faulted in, page by page."""
    feed.of[rank].resident += 16 * MIB
    feed.of[rank].minor += 4096


def _held_on_card(feed: Feed, rank: str, t: float) -> None:
    if card := feed.cards.get(rank):
        card.held += 16 * MIB


def _for_one_look(figure: str, value: float) -> Callable[[Feed, str, float], None]:
    def move(feed: Feed, rank: str, t: float) -> None:
        if card := feed.cards.get(rank):
            setattr(card, figure, value)

    return move


def _progress_line(feed: Feed, rank: str, t: float) -> None:
    feed.tell(t, "load_progress", rank, done=t, total=1e6)


STRONG: dict[str, Callable[[Feed, str, float], None]] = {
    "storage": _add("storage", MIB),
    "major faults": _add("major", 16),
    "read": _add("read", 8 * MIB),
    "written": _add("written", 24 * MIB),  # the log grows too
    "minor faults": _add("minor", 1024),
    "resident": _resident,
    "resident down": _add("resident", -16 * MIB),
    "children": _child_cpu,
    "compiler": _compiler,
    "log": _progress_line,
    "gpu memory": _held_on_card,
    "gpu bus": _for_one_look("pcie", 2048 * MIB / TICK),
    "gpu power": _for_one_look("dram_activity", 0.03),
}


def _stale_lock(feed: Feed, rank: str, t: float) -> None:
    feed.lock_age["build"], feed.lock_held["build"] = 50.0, 0.0


WEAK: dict[str, Callable[[Feed, str, float], None]] = {
    "cpu": _add("cpu", TICK),
    "heartbeat": lambda feed, rank, t: feed.tell(t, "heartbeat", rank, done=t, total=1e6),
    "same bar": lambda feed, rank, t: feed.tell(t, "capture_progress", rank, done=1, total=9),
    "waits": lambda feed, rank, t: feed.waits.update({rank: "futex" if feed.waits.get(rank) == "disk" else "disk"}),
    "unreadable waits": lambda feed, rank, t: feed.waits.update({rank: ""}),
    "log bytes": lambda feed, rank, t: setattr(feed, "log_bytes", feed.log_bytes + 1e6),
    "a little storage": _add("storage", 1000.0),
    "utilisation": _for_one_look("utilization", 1.0),
    "stats": lambda feed, rank, t: feed.stats(t, running=2, speed=0.0),
    "error": lambda feed, rank, t: feed.tell(t, "error", rank, kind="traceback"),
    "foreign port": lambda feed, rank, t: setattr(feed.serving, "foreign", 1.0),
    "lock": _stale_lock,
    "kill elsewhere": lambda feed, rank, t: setattr(feed, "kills", (feed.kills or 0.0) + 1.0),
}

AMBIGUOUS = ("cpu", "utilisation")


def _card_shows(**figures: Any) -> Callable[[Feed, str, float], None]:
    def show(feed: Feed, rank: str, t: float) -> None:
        for name, value in figures.items():
            setattr(feed.cards[rank], name, value)

    return show


SHOWN: dict[str, Callable[[Feed, str, float], None]] = {
    "rests": _card_shows(),
    "spins": _card_shows(utilization=1.0, power=152.0),
    "small kernels": _card_shows(utilization=0.3, memory_utilization=0.1, power=140.0),
    "copies": _card_shows(utilization=1.0, memory_utilization=0.3, power=150.0),
    "no use of memory": _card_shows(utilization=1.0, power=152.0, memory_utilization=None),
    "no answer": _card_shows(answers=False),
    "empty": _card_shows(utilization=1.0, held=0.0),
}
"""What a card may show at one look that is no strong move; it takes 122 W at rest, and works from 198 W on."""

RANKS = ("TP0", "TP1", "TP2")


@dataclass(frozen=True, slots=True)
class Look:
    """One tick: what happens before it, who looks.  `ticks` since the one before."""

    ticks: int = 1
    moves: tuple[tuple[str, str], ...] = ()  # (name in STRONG or WEAK, rank)
    processes: bool = True
    io: bool = True
    logs: bool = True
    threads: bool = True
    gpus: bool = True
    hidden: frozenset[Series] = frozenset()


Series = tuple[str, str]
"""Name of a signal, and the rank (or kind) it is about; "" where it is about the whole server."""


def whole_card() -> CardFigures:
    """All figures are read, and its idle power is known."""
    return CardFigures(memory_utilization=0.0, power=IDLE, limit=700.0, idle_power=IDLE, lost=0.0)


IDLE = 122.0


def new_feed(**facts: Any) -> Feed:
    """Three ranks, each with a card, and what is said differently."""
    usual: dict[str, Any] = {"server": server(), "cards": {rank: CardFigures() for rank in RANKS}}
    return Feed(ranks=RANKS, **usual | deepcopy(facts))


@dataclass(slots=True)
class Story:
    """Feeds looks and keeps the verdicts.  Time in whole ticks."""

    feed: Feed = field(default_factory=new_feed)
    t: float = 0.0
    verdicts: list[tuple[float, Verdict]] = field(default_factory=list)

    def begin(self) -> Story:
        """The first look ever, which gives the counters their baseline."""
        return self.look(Look())

    def look(self, look: Look) -> Story:
        for _ in range(look.ticks - 1):
            self._tick(replace(look, moves=()))
        self._tick(look)
        return self

    def _tick(self, look: Look) -> None:
        if self.verdicts:
            self.t += TICK
        feed, t = self.feed, self.t
        feed.noise(t)
        for name, rank in look.moves:
            (STRONG_OF_ALL.get(name) or WEAK.get(name) or SHOWN[name])(feed, rank, t)
        feed.timeline.see([feed.server], t)
        for readings in self._read(look):
            seen = [r for r in readings if (r.signal.name, (*r.labels, "", "")[1]) not in look.hidden]
            feed.timeline.put(seen, t, TICK)
        for card in feed.cards.values():
            card.pcie, card.dram_activity, card.utilization, card.answers = 0.0, 0.0, 0.0, True
            if card.power is not None:
                card.power, card.memory_utilization = IDLE, 0.0
        self.verdicts.append((t, feed.verdict(t)))

    def _read(self, look: Look) -> Iterator[list[Reading]]:
        feed, name = self.feed, self.feed.server.name
        if look.processes:
            yield feed.process_readings(look.io)
        if look.logs:
            yield feed.log_readings()
        if look.threads:
            yield feed.thread_readings()
        yield feed.serving.readings(name) + feed.node_readings()
        if look.gpus:
            yield [reading for rank, card in feed.cards.items() for reading in card.readings(name, rank)]

    @property
    def states(self) -> list[str]:
        return [verdict.state for _, verdict in self.verdicts]

    @property
    def pages(self) -> list[float]:
        return [t for t, verdict in self.verdicts if verdict.state in ("stalled", "failed")]


def moves_of(names: Iterable[str], least: int = 0) -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    one = st.tuples(st.sampled_from(sorted(names)), st.sampled_from(RANKS))
    return st.lists(one, min_size=least, max_size=3).map(tuple)


QUIET_LOOKS = st.lists(st.builds(Look, moves=moves_of(WEAK)), max_size=MOST_TICKS - 1)


@bounded
@given(st.lists(st.tuples(QUIET_LOOKS, moves_of(STRONG, least=1)), min_size=1, max_size=6))
def test_a_move_in_every_stall_after_is_never_stalled(
    gaps: list[tuple[list[Look], tuple[tuple[str, str], ...]]],
) -> None:
    """Whatever else happens, and with silences up to 0.99 of `stall_after`."""
    story = Story().begin()
    for quiet, moves in gaps:
        for look in quiet:
            story.look(look)
        story.look(Look(ticks=MOST_TICKS - len(quiet), moves=moves))

    assert story.pages == []


@bounded
@given(
    st.lists(
        st.builds(Look, ticks=st.integers(1, MOST_TICKS), moves=moves_of(STRONG | {"cpu": WEAK["cpu"]})), max_size=5
    ),
    st.sampled_from(sorted(STRONG)),
    st.sampled_from(RANKS),
)
def test_what_stands_still_from_some_moment_on_is_stalled_in_time(before: list[Look], last: str, rank: str) -> None:
    story = Story().begin()
    for look in before:
        story.look(look)
    story.look(Look(moves=((last, rank),)))
    stood_still = story.t
    patience = max(T.stall_after, story.feed.now.stretch(T.stall_after))  # a slow counter is given more

    story.look(Look(ticks=math.ceil(patience / TICK) + 2))

    after = [t - stood_still for t in story.pages if t > stood_still]
    assert patience <= after[0] <= patience + 2 * TICK
    assert story.states[-1] == "stalled"


@bounded
@given(st.lists(st.tuples(st.integers(1, 12), st.lists(st.sampled_from(AMBIGUOUS), min_size=1)), min_size=1))
def test_ambiguous_channels_alone_never_page(looks: list[tuple[int, list[str]]]) -> None:
    """Whatever they do, and in whatever order: a core that is busy, a card that is used."""
    story = Story().begin()
    for ticks, names in looks:
        story.look(Look(ticks=ticks, moves=tuple((name, "TP1") for name in names)))

    assert story.pages == []


BLIND = {
    "processes": lambda look: replace(look, processes=False),
    "io": lambda look: replace(look, io=False),
    "logs": lambda look: replace(look, logs=False),
    "threads": lambda look: replace(look, threads=False),
}


@few
@given(
    st.lists(
        st.builds(Look, ticks=st.integers(1, MOST_TICKS), moves=moves_of(STRONG, least=1)), min_size=1, max_size=6
    ),
    st.lists(st.lists(st.sampled_from(sorted(BLIND)), max_size=3), min_size=6, max_size=6),
    st.integers(0, 60),
)
def test_removing_readings_never_makes_a_page(looks: list[Look], blind: list[list[str]], more: int) -> None:
    """Collectors that stop, values that become unreadable: and then they see again."""
    story = Story().begin()
    for look, names in zip(looks, blind, strict=False):
        for name in names:
            look = BLIND[name](look)
        story.look(look)
    seen = Story().begin()
    for look in looks:
        seen.look(look)
    assert seen.pages == []
    assert story.pages == []

    for _ in range(more):  # and a page afterwards comes no earlier than with all readings
        story.look(Look())
        seen.look(Look())
    assert not story.pages or (seen.pages and story.pages[0] >= seen.pages[0])


@bounded
@given(st.integers(1, 200), st.sampled_from(sorted(BLIND)), moves_of(STRONG, least=1))
def test_a_collector_that_was_blind_while_the_server_loaded_does_not_page_when_it_is_back(
    ticks: int, name: str, moves: tuple[tuple[str, str], ...]
) -> None:
    story = Story().begin()
    for _ in range(ticks):
        story.look(BLIND[name](Look(moves=moves)))
    story.look(Look())

    assert story.pages == []


@pytest.mark.parametrize("name", ["processes", "logs", "io"])
@pytest.mark.parametrize("late", [1, 2, 3, 4, 20])
def test_a_collector_that_is_late_just_when_the_silence_would_be_long_enough_does_not_page(
    name: str, late: int
) -> None:
    move = "log" if name == "logs" else "storage"
    story = Story().begin().look(Look(ticks=46))
    story.look(BLIND[name](Look(ticks=1, moves=() if name == "logs" else ((move, "TP1"),))))
    story.look(BLIND[name](Look(ticks=late)))
    story.look(Look(moves=((move, "TP1"),) if name == "logs" else ()))

    assert story.pages == []


def test_storage_that_can_be_read_only_late_does_not_page_at_once() -> None:
    """Read through the page cache, a load shows nowhere else."""
    story = Story()
    for _ in range(120):
        story.look(Look(io=False, moves=(("read", "TP1"),)))
    assert story.states[-1] == "unknown"

    story.look(Look(ticks=40))
    assert story.pages == []
    story.look(Look(ticks=10))
    assert story.states[-1] == "stalled"


def test_an_exporter_started_in_a_silent_phase_does_not_page_at_once() -> None:
    """Lines found on start are old; silence counts from when we began to watch."""
    story = Story()
    story.t = 5000.0
    story.begin()
    story.feed.tell(100.0, "load_begin", "TP0")

    story.look(Look(ticks=47))
    assert story.pages == []
    story.look(Look(ticks=2))
    assert story.states[-1] == "stalled"


@few
@given(st.lists(st.builds(Look, ticks=st.integers(1, MOST_TICKS), moves=moves_of(STRONG | WEAK)), max_size=8))
def test_verdicts_do_not_flap(looks: list[Look]) -> None:
    """A state that was left comes back only after something moved, or stopped moving, for a window."""
    story = Story().begin()
    for look in looks:
        story.look(look)
    story.look(Look(ticks=120))

    tail = story.states[-120:]
    changes = sum(1 for before, after in pairwise(tail) if before != after)
    assert changes <= 3  # working, quiet, suspect, stalled: each once, in this order
    assert tail[-1] == "stalled"


@bounded
@given(st.integers(50, 90), st.floats(-7200, 7200))
def test_a_stall_is_one_episode_whatever_the_wall_clock_does(ticks: int, step: float) -> None:
    story = Story().begin().look(Look(ticks=ticks))
    feed, t = story.feed, story.t
    for number in range(1, 10):
        feed.look(t + number * TICK)
        report = feed.tick(t + number * TICK, wall=WALL + t + number * TICK + step)

        assert report.verdict == story.verdicts[-1][1]
        assert report.since_timestamp == WALL + T.stall_after


# --- what cards show ---------------------------------------------------------------------------------------


def watched_cards() -> Story:
    return Story(new_feed(cards={rank: whole_card() for rank in RANKS})).begin()


SHOWING = st.lists(st.tuples(st.sampled_from(sorted(SHOWN)), st.sampled_from(RANKS)), max_size=4).map(tuple)
NOT_OF_CARDS = {name: move for name, move in STRONG.items() if not name.startswith("gpu")}


@bounded
@given(
    st.lists(
        st.tuples(st.lists(SHOWING, min_size=1, max_size=4), st.integers(1, MOST_TICKS), moves_of(STRONG, least=1)),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_cards_show_a_move_in_every_stall_after_is_never_stalled(
    gaps: list[tuple[list[tuple[tuple[str, str], ...]], int, tuple[tuple[str, str], ...]]],
) -> None:
    """Spins of any rank for minutes, drivers that do not answer, cards that stand empty at full use."""
    story = watched_cards()
    for shown, ticks, moves in gaps:
        for number in range(ticks - 1):
            story.look(Look(moves=shown[number % len(shown)]))
        story.look(Look(moves=moves))

    assert story.pages == []


@bounded
@given(
    st.lists(st.builds(Look, ticks=st.integers(1, MOST_TICKS), moves=moves_of(STRONG | SHOWN)), max_size=4),
    st.sampled_from(sorted(NOT_OF_CARDS)),
    st.lists(st.sampled_from(("rests", "spins", "empty")), min_size=3, max_size=3),
)
def test_what_stands_still_while_its_cards_rest_or_spin_is_stalled_in_time(
    before: list[Look], last: str, shown: list[str]
) -> None:
    """At idle power that is known.  One of them may be empty: what stands at full use there is no spin."""
    story = watched_cards()
    for look in before:
        story.look(look)
    steady = tuple(zip(shown, RANKS, strict=True))
    story.look(Look(moves=((last, "TP1"), *steady)))
    stood_still = story.t
    patience = max(T.stall_after, story.feed.now.stretch(T.stall_after))
    for _ in range(math.ceil(patience / TICK) + 2):
        story.look(Look(moves=steady))

    after = [t - stood_still for t in story.pages if t > stood_still]
    assert patience <= after[0] <= patience + 2 * TICK
    spins = any(kind == "spins" and story.feed.cards[rank].held for kind, rank in steady)
    assert story.verdicts[-1][1].reason == ("gpu_spin" if spins else "idle_wait")


@bounded
@given(SHOWING.filter(bool), st.sampled_from(("small kernels", "copies", "no use of memory")), st.integers(60, 120))
def test_a_card_that_does_anything_but_rest_or_spin_holds_the_page_back(
    shown: tuple[tuple[str, str], ...], last: str, ticks: int
) -> None:
    story = watched_cards()
    others = tuple(each for each in shown if each[1] != "TP1" and each[0] != "spins")
    for _ in range(ticks):
        story.look(Look(moves=(*others, (last, "TP1"))))

    assert story.pages == []
    assert story.states[-1] == "suspect"


@few
@given(
    st.lists(
        st.tuples(st.integers(1, MOST_TICKS), moves_of(NOT_OF_CARDS, least=1), SHOWING, st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 60),
)
def test_cards_that_cannot_be_read_never_make_a_page_nor_an_earlier_one(
    looks: list[tuple[int, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...], bool]], more: int
) -> None:
    """While the rest moves, and when it stands still afterwards."""
    full, partly = watched_cards(), watched_cards()
    for ticks, moves, shown, is_read in looks:
        for story, gpus in ((full, True), (partly, is_read)):
            story.look(Look(ticks=ticks, moves=(*moves, *shown), gpus=gpus))
    assert (full.pages, partly.pages) == ([], [])

    full.look(Look(ticks=more + 1))
    partly.look(Look(ticks=more + 1))
    assert not partly.pages or (full.pages and partly.pages[0] >= full.pages[0])


# --- serving -----------------------------------------------------------------------------------------------

MOST_SERVING_TICKS = int(0.99 * T.serve_stall_after / TICK)
"""The longest time between two tokens, in ticks: 23, 115 s of 120 s."""


def _served(counter: str) -> Callable[[Feed, str, float], None]:
    def move(feed: Feed, rank: str, t: float) -> None:
        setattr(feed.serving, counter, (getattr(feed.serving, counter) or 0.0) + 1.0)

    return move


STRONG_WHEN_READY = {
    "generated": _served("generated"),
    "prompt": _served("prompt"),
    "finished": _served("finished"),
    "speed": lambda feed, rank, t: feed.stats(t, running=2, speed=0.1),
}
STRONG_OF_ALL = STRONG | STRONG_WHEN_READY


def serving_story() -> Story:
    """Ready; two requests run, and all counters were read."""
    serving = Serving(running=2.0, waiting=0.0, generated=5.0, prompt=90.0, finished=1.0)
    story = Story(new_feed(serving=serving)).begin()
    story.feed.tell(story.t, "ready")
    return story


@bounded
@given(st.lists(st.tuples(st.integers(1, MOST_SERVING_TICKS), st.sampled_from(sorted(STRONG_WHEN_READY))), max_size=20))
def test_a_token_in_every_serve_stall_after_is_never_a_page(served: list[tuple[int, str]]) -> None:
    """Whichever of the counters it is: an embedding server generates nothing."""
    story = serving_story()
    for ticks, name in served:
        story.look(Look(ticks=ticks, moves=((name, "TP0"),)))

    assert story.pages == []
    assert set(story.states[1:]) <= {"working"}


@bounded
@given(
    st.lists(st.tuples(st.integers(1, MOST_SERVING_TICKS), st.sampled_from(sorted(STRONG_WHEN_READY))), max_size=5),
    moves_of(WEAK.keys() - set(AMBIGUOUS)),
)
def test_work_that_is_owed_and_not_served_from_some_moment_on_is_stalled_in_time(
    served: list[tuple[int, str]], noise: tuple[tuple[str, str], ...]
) -> None:
    story = serving_story()
    for ticks, name in served:
        story.look(Look(ticks=ticks, moves=((name, "TP0"),)))
    stood_still = story.t
    story.look(Look(moves=noise))
    story.look(Look(ticks=MOST_SERVING_TICKS + 2))

    assert stood_still + T.serve_stall_after <= story.pages[0] <= stood_still + T.serve_stall_after + 2 * TICK
    assert story.states[-1] == "stalled"


# --- less to read, more that moves -------------------------------------------------------------------------

NEEDED = {
    "server_alive": "a start whose first process nobody looks at is no start",
    "server_start_timestamp_seconds": "and so is one that nobody dates",
    "server_starts_total": "the same",
    "rank_alive": "a rank nobody tells of has no storage to be read",
    "process_cpu_seconds_total": "an ambiguous channel that cannot be read does not move",
    "rank_info": "machines without readable cards are judged too: what is on a card is not asked for",
    "gpu_process_memory_bytes": "the same; a move that only a card shows is not seen",
    "gpu_pcie_receive_bytes_per_second": "the same",
    "gpu_dram_activity_ratio": "the same",
    "gpu_power_watts": "the same",
    "gpu_resident_idle_power_watts": "the same: what it takes is compared with it",
    "gpu_utilization_ratio": "an ambiguous channel that cannot be read does not move",
    "gpu_memory_utilization_ratio": "of a serving stall a condition that cannot be read is left out",
    "server_requests_running": "nothing owed is innocent, but a wedged server does not tell what it owes either",
    "server_requests_waiting": "the same",
}
"""Readings whose absence may make a page, and why."""


def hideable() -> list[Series]:
    """Every series of a story but the needed ones."""
    feed = serving_story().feed
    feed.lock_age["build"], feed.lock_held["build"], feed.kills, feed.serving.timeouts = 50.0, 0.0, 0.0, 0.0
    readings = [
        *whole_card().readings("s", "TP0"),
        *feed.process_readings(),
        *feed.log_readings(),
        *feed.thread_readings(),
        *feed.serving.readings("s"),
        *feed.node_readings(),
    ]
    found = {(reading.signal.name, (*reading.labels, "", "")[1]) for reading in readings}
    return sorted(each for each in found if each[0] not in NEEDED)


HIDDEN = st.frozensets(st.sampled_from(hideable()), max_size=4)
STORIES = {"starting": lambda: Story().begin(), "serving": serving_story, "with cards": watched_cards}
"""The second without figures of cards but their use, the third with all of them."""


@pytest.mark.parametrize("begin", sorted(STORIES))
@few
@given(
    st.lists(st.tuples(st.integers(1, MOST_TICKS), moves_of(STRONG_OF_ALL | WEAK), HIDDEN), min_size=1, max_size=5),
    st.integers(0, 60),
)
def test_series_that_end_or_pause_never_make_a_page_nor_an_earlier_one(
    begin: str, looks: list[tuple[int, tuple[tuple[str, str], ...], frozenset[Series]]], more: int
) -> None:
    full, partly = STORIES[begin](), STORIES[begin]()
    for ticks, moves, hidden in looks:
        full.look(Look(ticks=ticks, moves=moves))
        partly.look(Look(ticks=ticks, moves=moves, hidden=hidden))
    full.look(Look(ticks=more + 1))
    partly.look(Look(ticks=more + 1))

    assert not partly.pages or (full.pages and partly.pages[0] >= full.pages[0])


def test_what_is_hidden_decides() -> None:
    """The property above can fail: with the needed readings gone there are pages that were none."""
    busy = ("cpu", "TP1")
    hidden = frozenset(("process_cpu_seconds_total", rank) for rank in (*RANKS, "frontend"))
    seen, unseen = Story().begin(), Story().begin()
    for _ in range(60):
        seen.look(Look(moves=(busy,)))
        unseen.look(Look(moves=(busy,), hidden=hidden))

    assert (seen.pages, unseen.states[-1]) == ([], "stalled")


NOT_ADDED = {"log"}
"""A counter that steps more often is less slow, and is given less time."""


@pytest.mark.parametrize("begin", sorted(STORIES))
@few
@given(
    st.lists(st.builds(Look, ticks=st.integers(1, MOST_TICKS), moves=moves_of(STRONG_OF_ALL | WEAK)), max_size=4),
    st.integers(0, 4),
    moves_of({name: move for name, move in STRONG_OF_ALL.items() if name not in NOT_ADDED}, least=1),
)
def test_one_more_strong_move_never_makes_a_page_earlier(
    begin: str, looks: list[Look], place: int, moves: tuple[tuple[str, str], ...]
) -> None:
    without, with_one = STORIES[begin](), STORIES[begin]()
    end = Look(ticks=MOST_TICKS + 10)
    for number, look in enumerate([*looks, end]):
        without.look(look)
        with_one.look(replace(look, moves=look.moves + moves) if number == place % (len(looks) + 1) else look)

    assert not with_one.pages or (without.pages and with_one.pages[0] >= without.pages[0])


# --- a server without a log --------------------------------------------------------------------------------


@few
@given(moves_of(STRONG, least=1), moves_of(WEAK.keys() - set(AMBIGUOUS)))
def test_without_a_log_silent_cards_need_twice_the_time(
    moves: tuple[tuple[str, str], ...], noise: tuple[tuple[str, str], ...]
) -> None:
    moves = tuple(move for move in moves if move[0] != "log") or (("gpu memory", "TP1"),)
    story = Story(new_feed(log=False)).begin().look(Look(ticks=3, moves=moves))
    stood_still = story.t
    story.look(Look(moves=noise)).look(Look(ticks=2 * MOST_TICKS + 3))

    assert 2 * T.stall_after <= story.pages[0] - stood_still <= 2 * T.stall_after + 2 * TICK
    assert "unknown" in story.states


# --- no flaps ----------------------------------------------------------------------------------------------

ORDER = ("working", "idle", "slow", "quiet", "unknown", "suspect", "stalled", "failed")
"""The way a server that does nothing new goes; it never goes back."""

STEADY: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no log": {"log": False},
    "no cards": {"cards": {}},
    "neither": {"log": False, "cards": {}},
    "frozen": {"frozen": 1.0},
    "traced": {"traced": {"TP1"}},
    "stopped": {"waits": {"TP1": "stopped"}},
    "in D": {"waits": {"TP1": "disk"}},
    "held lock": {"lock_age": {"build": 9.0}, "lock_held": {"build": 1.0}},
    "stale lock": {"lock_age": {"build": 9.0}, "lock_held": {"build": 0.0}},
    "rank missing": {"server": server(expected_ranks=(*RANKS, "TP3"))},
    "two nodes": {"server": server(nnodes=2)},
    "rank dead": {"dead": {"TP2"}},
}
"""How a server may be from the first look on."""


def assert_goes_one_way(verdicts: list[tuple[float, Verdict]]) -> None:
    for (_, before), (t, after) in pairwise(verdicts):
        assert ORDER.index(before.state) <= ORDER.index(after.state)
        assert after.since == (before.since if before.state == after.state else t)
        assert before.suspect_rank in (after.suspect_rank, None)


@bounded
@given(
    st.lists(st.sampled_from(sorted(STEADY)), max_size=2),
    moves_of(WEAK),
    st.one_of(st.none(), st.tuples(st.integers(1, 12), st.sampled_from(sorted(STRONG)))),
    st.booleans(),
)
def test_a_server_that_goes_on_as_it_does_goes_one_way(
    kinds: list[str], noise: tuple[tuple[str, str], ...], steady: tuple[int, str] | None, io: bool
) -> None:
    """The same at every look, for so long that budgets and doubled limits are over too."""
    facts: dict[str, Any] = {}
    for kind in kinds:
        facts |= STEADY[kind]
    story = Story(new_feed(**facts))
    for number in range(150):
        moves = noise if steady is None or number % steady[0] else (*noise, (steady[1], "TP0"))
        story.look(Look(moves=moves, io=io))

    assert_goes_one_way(story.verdicts)


@bounded
@given(
    st.sampled_from((0.0, 2.0, None)),
    moves_of(STRONG_WHEN_READY | WEAK),
    st.lists(st.sampled_from(sorted(STEADY.keys() - {"rank dead"})), max_size=1),
    st.integers(0, 7),
)
def test_a_server_that_serves_as_it_does_goes_one_way(
    demand: float | None, moves: tuple[tuple[str, str], ...], kinds: list[str], timeouts_every: int
) -> None:
    story = Story(new_feed(**{key: value for kind in kinds for key, value in STEADY[kind].items()})).begin()
    serving = story.feed.serving
    serving.running, serving.generated, serving.timeouts = demand, 5.0, 0.0
    story.feed.tell(story.t, "ready")
    for number in range(60):
        serving.timeouts += 1.0 if timeouts_every and number % timeouts_every == 0 else 0.0
        story.look(Look(moves=moves))

    assert_goes_one_way(story.verdicts[1:])
