"""A day of 24 hours, replayed with a look every 30 s: nothing pages, nothing comes and goes, restarts change nothing.

The day is made when it is needed (recordings/life.py).  stallwatch itself is restarted in it, and what it keeps then
goes through its document, as `serve` does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from itertools import groupby
from typing import Any

import pytest

from recordings.life import CYCLES, IDLE, REDEPLOYED, SLOW, Day, day
from stallwatch.catalogue import derived_signals, read_signals
from stallwatch.episodes import Episodes
from stallwatch.frameworks import load_frameworks
from stallwatch.memory import Memory
from stallwatch.model import Reading, Server
from stallwatch.recordings.format import Header, Line, Look, Reader, known_names
from stallwatch.recordings.replay import Replay
from stallwatch.recordings.told import Told
from stallwatch.timeline import Timeline

AWAY_SECONDS = 60.0
"""How long a restart of ours takes."""

WORDS = {SLOW: ("working", "slow", "working", "idle", "gone"), REDEPLOYED: ("working", "idle", "gone")}
"""What is said of one start, from its beginning to its end; a start that is not over lacks the end."""

SLOW_PHASES = 3
"""Of the four ways up: the load (twice), the wait for a late rank, the compilation."""

Changes = list[dict[str, Any]]


def seal(*parts: str | int | bytes) -> str:
    return blake2b(repr(parts).encode(), digest_size=16, key=b"key of the tests").hexdigest()


class Reminded(Timeline):
    """A timeline whose readings pass through the memory, as the daemon does it."""

    memory: Memory

    def put(
        self,
        readings: Any,
        at: float,
        interval: float,
        measured: float | None = None,
        source: str = "",
        news: list[Reading] | None = None,
    ) -> None:
        found: Iterator[Reading] = iter(self.memory.settle(self, readings, at))
        super().put(found, at, interval, measured, source, news)


class Process(Replay):
    """One process of ours: a replay that knows what the one before it kept."""

    def __init__(self, header: Header, talkative: frozenset[str], memory: Memory) -> None:
        super().__init__(header, talkative, None, load_frameworks())
        self.timeline = Reminded(self._thresholds_of, self._markers)
        self.timeline.memory = self.memory = memory
        self._episodes = Episodes(self.timeline, self._thresholds_of, 600.0)

    def _see(self, told: Told, at: float) -> None:
        super()._see(told, at)
        known = self.timeline.of(told.name)
        server: Server = (known.server if known else None) or told.recorded.server
        self.memory.meet(self.timeline, self._episodes, [server], at, at + self._clock.skipped)

    def document(self) -> Any:
        """What it keeps, through JSON and back."""
        moment = (self._ticks - 1) * self._clock.tick_seconds
        return json.loads(self.memory.document(self.timeline, self._episodes, (), {}, moment, moment).text())

    @property
    def changes(self) -> dict[str, Changes]:
        return self._changes


def lived(a_day: Day, is_forgetful: bool = False) -> dict[str, Changes]:
    """Every change of verdict of the day, by server.  `is_forgetful`: nothing is kept over a restart of ours."""
    header, *lines = records(a_day)
    assert isinstance(header, Header)
    talkative, waiting = frozenset((SLOW, REDEPLOYED, IDLE)), list(a_day.restarts)
    process = Process(header, talkative, Memory(seal, "this boot"))
    found: dict[str, Changes] = {}
    for line in lines:
        at = line.t if isinstance(line, Look) else getattr(line, "at", 0.0)
        if waiting and at > waiting[0] + AWAY_SECONDS:
            memory = Memory(seal, "this boot")
            assert is_forgetful or memory.load(process.document(), at) is None
            gather(found, process)
            process, _ = Process(header, talkative, memory), waiting.pop(0)
        if not (waiting and at > waiting[0]):  # else nobody looks
            process.take(line)
    process.finish()
    gather(found, process)
    return found


def gather(found: dict[str, Changes], process: Process) -> None:
    for server, changes in process.changes.items():
        found.setdefault(server, []).extend(changes)


def records(a_day: Day) -> list[Line]:
    lines = (line.encode() for line in a_day.stage.text().splitlines(keepends=True))
    return list(Reader("day", known_names(read_signals(), derived_signals())).read(lines))


@cache
def quiet_day() -> Day:
    return day()


@cache
def changes() -> dict[str, Changes]:
    return lived(quiet_day())


def said(found: Changes) -> list[str]:
    """The states, each once for as long as it stands."""
    return [state for state, _ in groupby(change["state"] for change in found)]


def test_the_day_is_long_and_full() -> None:
    stage = quiet_day().stage

    assert stage.t >= 24 * 3600
    assert {server.name: server.starts for server in stage.servers} == {SLOW: CYCLES, REDEPLOYED: 11, IDLE: 1}
    assert len(quiet_day().restarts) == 3


def test_nothing_of_the_day_pages_or_is_suspected() -> None:
    assert set(changes()) == {SLOW, REDEPLOYED, IDLE}
    for server, found in changes().items():
        assert set(said(found)) <= {"working", "slow", "idle", "gone"}, server


@pytest.mark.parametrize("server", [SLOW, REDEPLOYED])
def test_nothing_comes_and_goes(server: str) -> None:
    """Each start is told once, from its beginning to its end, whoever watches.  What is slow the first time is known
    then, over restarts of ours too."""
    starts, new = (CYCLES, SLOW_PHASES) if server == SLOW else (11, 0)
    expected = list(WORDS[server]) * new + list(WORDS[REDEPLOYED]) * (starts - new)

    assert said(changes()[server]) == expected[: len(expected) - (server == REDEPLOYED)]


def test_a_server_that_is_only_idle_is_told_once() -> None:
    assert said(changes()[IDLE]) == ["working", "idle"]


@pytest.mark.parametrize(("is_forgetful", "pages"), [(False, 1), (True, 2)])
def test_a_start_that_hangs_in_such_a_day_pages_once_though_we_are_restarted_in_it(
    is_forgetful: bool, pages: int
) -> None:
    """Without what is kept it would be found anew, and page again: the restart is a real one."""
    a_day = day(cycles=6, hangs_in=4)

    found = lived(a_day, is_forgetful)

    assert [change["state"] for change in found[SLOW]].count("stalled") == pages
    assert not {"failed", "suspect"} & {change["state"] for change in found[SLOW]}
    assert all("stalled" not in said(found[server]) for server in (REDEPLOYED, IDLE))
