"""What is known over time about the present start of one server.  Pure; Timeline feeds it, evidence reads it."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median

from . import signals
from .cards import Cards
from .deadlines import Deadlines
from .model import AMBIGUOUS_CHANNELS, STRONG_CHANNELS, Reading, Server, Signal, is_rank_name
from .startup import MOST_RANKS, PHASE_OF_EVENT, Startup
from .tracks import STALE_AFTER_GAPS, Track, Waits, usual

DEMAND = (signals.REQUESTS_RUNNING, signals.REQUESTS_WAITING)

STATS_GAP_SECONDS = 10.0
"""Usual gap between two stats lines until two were seen; vLLM writes one every 10 s while it works."""

MOST_STEPS = 256
SLOW_STEP_SHARE = 3
"""A counter is slow when its median step takes longer than `stall_after` divided by this."""
STRETCH_STEPS = 3
LONGEST_STRETCH_SECONDS = 1800.0

LONGEST_ROW_GAP_SECONDS = 300.0
"""Time-outs further apart than this are in no row."""


@dataclass(slots=True)
class Steps:
    """How long one counter with a total takes from one k to the next, in this phase."""

    last: float | None = None
    amount: float = 0.0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))

    def step(self, at: float, amount: float) -> None:
        """The counter moved to `amount`; one that starts again lower is a new bar and took no step."""
        if self.last is not None and amount > self.amount:
            self.durations.append(at - self.last)
        self.last, self.amount = at, amount

    def stretch(self, stall_after: float) -> float:
        """What silence must exceed because of this counter; 0 when it is not slow."""
        if not self.durations or median(self.durations) <= stall_after / SLOW_STEP_SHARE:
            return 0.0
        return min(STRETCH_STEPS * max(self.durations), LONGEST_STRETCH_SECONDS)


@dataclass(slots=True)
class Speaker:
    """Who writes stats lines (a rank, or the server), and what it said last; holds for three of their usual gaps."""

    at: float | None = None
    usual_gap: float = STATS_GAP_SECONDS
    running: float | None = None
    waiting: float | None = None
    says_speed: bool = False

    def put(self, fields: Mapping[str, float | str], at: float) -> None:
        if self.at is not None and at > self.at:
            self.usual_gap = usual(self.usual_gap, at - self.at, 1.0)
        self.at, self.running, self.waiting = at, _count(fields, "running"), _count(fields, "waiting")
        self.says_speed = isinstance(fields.get("generation_tokens_per_second"), int | float)

    def is_fresh(self, now: float) -> bool:
        return self.at is not None and now - self.at <= STALE_AFTER_GAPS * self.usual_gap


def _count(fields: Mapping[str, float | str], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) else None


@dataclass(slots=True)
class Stats:
    """Demand and speed as the server's own stats lines say them; together, where several ranks write some."""

    speakers: dict[str, Speaker] = field(default_factory=dict)

    def put(self, fields: Mapping[str, float | str], at: float, rank: str | None = None) -> None:
        if (rank or "") in self.speakers or len(self.speakers) < MOST_RANKS:
            self.speakers.setdefault(rank or "", Speaker()).put(fields, at)

    def _fresh(self, now: float) -> list[Speaker]:
        return [speaker for speaker in self.speakers.values() if speaker.is_fresh(now)]

    def told(self, now: float) -> tuple[float | None, float | None]:
        """Requests that run, and that wait."""
        fresh = self._fresh(now)
        return _sum([speaker.running for speaker in fresh]), _sum([speaker.waiting for speaker in fresh])

    def demand(self, now: float) -> float | None:
        return _sum(self.told(now))

    def says_speed(self, now: float) -> bool:
        return any(speaker.says_speed for speaker in self._fresh(now))

    @property
    def usual_gap(self) -> float:
        return max((speaker.usual_gap for speaker in self.speakers.values()), default=STATS_GAP_SECONDS)


def _sum(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


_MOST_IN_A_ROW = 1e9
"""Of one look: a counter of a recording may leap by more than a float holds."""


@dataclass(slots=True)
class Timeouts:
    """Requests to the health endpoint that had no answer, in a row."""

    in_a_row: int = 0
    since: float | None = None
    last: float | None = None
    read_at: float | None = None

    def put(self, number: float, at: float, longest_gap: float) -> None:
        """So many more since the look before; after a time of `longest_gap` without a look they are in no row."""
        if self.read_at is not None and at - self.read_at > longest_gap:
            self.clear()
        self.read_at = at
        if number > 0:
            if self.last is not None and at - self.last > LONGEST_ROW_GAP_SECONDS:
                self.clear()
            self.since, self.last = at if self.since is None else self.since, at
            self.in_a_row += round(min(number, _MOST_IN_A_ROW))

    def clear(self) -> None:
        self.in_a_row, self.since, self.last = 0, None, None

    def span(self, now: float) -> float:
        """Seconds from the first to the last of a row that still goes on."""
        if self.since is None or self.last is None or now - self.last > LONGEST_ROW_GAP_SECONDS:
            return 0.0
        return self.last - self.since


@dataclass(slots=True)
class ServerTimeline:
    """Everything known over time about the present start of one server."""

    name: str
    anchor: float  # since when we watch; no silence is counted from before
    server: Server | None = None
    startup: Startup = field(default_factory=Startup)
    tracks: dict[str, dict[tuple[str, ...], Track]] = field(default_factory=dict)  # signal name -> labels -> track
    waits: dict[str, Waits] = field(default_factory=dict)
    moves: dict[str, float] = field(default_factory=dict)  # channel -> last move
    rank_moves: dict[str, float] = field(default_factory=dict)
    busy_at: dict[str, float] = field(default_factory=dict)  # rank or engine -> when its CPU last moved
    progress_by_log: dict[str, float] = field(default_factory=dict)
    deaths: list[tuple[float, str]] = field(default_factory=list)
    root_gone_at: float | None = None
    start_timestamp: float | None = None
    novel_in_a_row: int = 0
    solid_move: float | None = None  # last strong move that was more than a novel line
    was_ready: bool = False  # once ready is ready, until another start begins
    is_idle: bool = False  # at the last tick
    logged: float = 0.0  # bytes the followed logs grew
    children_cpu: Track = field(default_factory=Track)  # of all kinds together
    markers: dict[str, set[str]] = field(default_factory=dict)  # rank the log names -> its start-up markers
    steps: dict[tuple[str, str], Steps] = field(default_factory=dict)  # (event, rank) -> its steps in this phase
    stats: Stats = field(default_factory=Stats)
    timeouts: Timeouts = field(default_factory=Timeouts)
    deadlines: Deadlines = field(default_factory=Deadlines)
    owed_since: float | None = None  # since when work is owed without a break, as far as is known
    demand_until: float = -math.inf  # how long what was last said of the demand holds
    oom_killed_at: float | None = None  # last time the kernel killed a process of the node for memory
    cards: Cards | None = None  # of the whole node

    @property
    def last_strong_move(self) -> float | None:
        return max((at for channel, at in self.moves.items() if channel in STRONG_CHANNELS), default=None)

    def is_quiet(self, at: float, window: float) -> bool:
        """Whether nothing strong moved for more than a window, as far as we watched."""
        last = self.last_strong_move
        return at - (self.anchor if last is None else max(self.anchor, last)) > window

    def track(self, signal: Signal, *labels: str) -> Track | None:
        return self.of(signal).get(labels)

    def of(self, signal: Signal) -> Mapping[tuple[str, ...], Track]:
        """Every track of a signal, by its labels."""
        return self.tracks.get(signal.name, _NO_TRACKS)

    def moved(self, channel: str, at: float, rank: str | None = None, solid: bool = True) -> None:
        self.moves[channel] = max(at, self.moves.get(channel, at))
        if channel in AMBIGUOUS_CHANNELS:
            return
        if solid:
            self.solid_move = at if self.solid_move is None else max(at, self.solid_move)
            self.novel_in_a_row = 0
        if rank:
            self.rank_moves[rank] = max(at, self.rank_moves.get(rank, at))

    @property
    def rank_names(self) -> list[str]:
        """Ranks of this start, seen alive or dead, without engines and front ends."""
        return [name for name in self.watched_names if is_rank_name(name)]

    @property
    def watched_names(self) -> list[str]:
        """Ranks and engines."""
        return sorted((labels[1] for labels in self.of(signals.RANK_ALIVE)), key=natural)

    @property
    def is_ready(self) -> bool:
        """By its log, or as it was at the last tick."""
        return self.was_ready or self.startup.ready_at is not None

    def is_alive(self, rank: str) -> bool | None:
        track = self.track(signals.RANK_ALIVE, self.name, rank)
        return None if track is None or track.value is None else track.value > 0

    def demand(self, now: float) -> float | None:
        """Requests that run or wait, by the server's metrics, else by its stats lines; None = not known."""
        return self._demand_by(self._demand_tracks(now), now)

    def _demand_by(self, tracks: list[Track], now: float) -> float | None:
        return sum(track.value or 0.0 for track in tracks) if tracks else self.stats.demand(now)

    def told_demand(self, now: float) -> Iterator[Reading]:
        """What runs and waits by its stats lines, where its own metrics do not say it."""
        if not self._demand_tracks(now):
            for signal, value in zip(DEMAND, self.stats.told(now), strict=True):
                if value is not None:
                    yield signal.read(value, self.name)

    def _demand_tracks(self, now: float) -> list[Track]:
        return [track for signal in DEMAND for track in self.of(signal).values() if track.is_readable(now)]

    def note_demand(self, at: float) -> None:
        """Keep since when work is owed.  What is owed after a time of which nothing is known is owed anew."""
        tracks = self._demand_tracks(at)
        if not self._demand_by(tracks, at):
            self.owed_since = None
        elif self.owed_since is None or at > self.demand_until:
            self.owed_since = at
        gap = max(track.usual_gap for track in tracks) if tracks else self.stats.usual_gap
        self.demand_until = at + STALE_AFTER_GAPS * gap

    def stretch(self, stall_after: float) -> float:
        """What silence must exceed in this phase because a counter in it takes long steps; see Steps."""
        slow = (steps.stretch(stall_after) for (event, rank), steps in self.steps.items() if self._is_in(event, rank))
        return max(slow, default=0.0)

    def _is_in(self, event: str, rank: str) -> bool:
        """Whether the server, or the rank itself, is in the phase of this event: others may be ahead of it."""
        own = self.startup.ranks.get(rank)
        return PHASE_OF_EVENT[event] in (self.startup.phase, own.phase if own else "")


_NO_TRACKS: Mapping[tuple[str, ...], Track] = {}


@lru_cache(maxsize=4096)
def natural(name: str) -> tuple[tuple[int, str], ...]:
    """TP2 before TP10.  Digits that are too many to be a rank's number are text (int() refuses some thousands)."""
    return tuple((int(part) if part.isdecimal() and len(part) <= 9 else -1, part) for part in re.split(r"(\d+)", name))
