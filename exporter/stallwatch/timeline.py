"""Readings and events over time: for every series its last value and when it last moved by its floor.

Pure: all times are passed in, in seconds of a clock that does not count our own pauses.  The same code serves
live results and recordings.  What a move is stands in FLOORS; what it means is the verdict's business.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from . import signals
from .model import FRONTEND, Event, Reading, Server, Signal, is_rank_name
from .startup import Startup

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Floor:
    """The least amount that is a move of `channel`; below it is what stuck servers still do."""

    signal: Signal
    channel: str
    amount: float
    kind: str = ""  # value of the `kind` label, where the signal has one
    beyond_logs: bool = False  # what went into the followed logs does not count


FLOORS: tuple[Floor, ...] = (
    # Stuck, measured: 0 storage reads, <= 0.2 MB/min by read() (REAL-SERVERS, rows a, c, d).
    Floor(signals.STORAGE_READ, "storage", 1 * MIB),
    Floor(signals.PAGE_FAULTS, "storage", 16, kind="major"),
    Floor(signals.READ_BYTES, "storage", 8 * MIB),
    Floor(signals.WRITTEN_BYTES, "storage", 16 * MIB, beyond_logs=True),
    # Stuck <= 2 minor faults per minute; loading 77,000 in 9 s (rows a, g).
    Floor(signals.PAGE_FAULTS, "memory", 1024, kind="minor"),
    Floor(signals.RESIDENT_MEMORY, "memory", 16 * MIB),
    Floor(signals.GENERATED_TOKENS, "tokens", 1),
    Floor(signals.PROMPT_TOKENS, "tokens", 1),
    Floor(signals.FINISHED_REQUESTS, "tokens", 1),
)

BUSY_CORES = 0.05
"""A rank, or the children of the ranks, above this share of a core are busy.  Stuck <= 0.009 (row c)."""

MOST_NOVEL_LINES = 10
"""Novel lines that may carry the log channel in a row, with nothing else moving."""

_FLOORS: Mapping[tuple[str, str], Floor] = {(floor.signal.name, floor.kind): floor for floor in FLOORS}
_TWO_WAYS = frozenset((signals.RESIDENT_MEMORY.name,))
_STALE_AFTER_GAPS = 3


@dataclass(slots=True)
class Track:
    """One series.  `value` None = unreadable at the last look (`reason`); `samples` reach back one window."""

    value: float | None = None
    reason: str | None = None
    read_at: float = 0.0
    usual_gap: float = 0.0
    rate: float | None = None  # per second, between the last two neighbouring readings
    samples: deque[tuple[float, float]] = field(default_factory=deque)

    def put(self, value: float | None, reason: str | None, at: float, interval: float) -> None:
        """Take one reading."""
        gap = at - self.read_at
        self.rate = None
        if self.read_at and value is not None and self.value is not None and gap > 0:
            self.rate = (value - self.value) / gap
        if self.read_at and gap > 0:
            self.usual_gap = (
                gap if not self.usual_gap else min(0.7 * self.usual_gap + 0.3 * gap, 4 * self.usual_gap)
            )
        self.usual_gap = max(self.usual_gap, interval)
        self.value, self.reason, self.read_at = value, reason, at

    def is_fresh(self, now: float) -> bool:
        return now - self.read_at <= _STALE_AFTER_GAPS * self.usual_gap + 1e-6

    def is_readable(self, now: float) -> bool:
        return self.value is not None and self.is_fresh(now)

    def gathers(self, value: float, at: float, floor: float, window: float, two_ways: bool) -> bool:
        """Whether the amount since the last move reached the floor within one window.

        After a time without readings longer than the window it is not known when the amount came together:
        then it counts, for a wrong page is worse than a late one.
        """
        samples = self.samples
        while len(samples) > 1 and at - samples[0][0] > window:
            samples.popleft()
        if not two_ways and samples and value < samples[-1][1]:
            samples.clear()  # the counter began anew
        if not samples:
            samples.append((at, value))
            return False
        amount = max(abs(value - earlier) for _, earlier in samples) if two_ways else value - samples[0][1]
        moved = amount >= floor
        if moved:
            samples.clear()
        elif at - samples[0][0] > window:
            samples.popleft()
        samples.append((at, value))
        return moved


@dataclass(slots=True)
class Waits:
    """Wait classes of one rank (or engine) over the last window."""

    main: deque[tuple[float, str]] = field(default_factory=deque)
    counts: Mapping[str, int] | None = None
    readable: bool = False
    read_at: float = 0.0
    stopped_since: float | None = None
    disk_since: float | None = None

    def put(self, counts: Mapping[str, int] | None, main: str | None, at: float, window: float) -> None:
        self.counts, self.readable, self.read_at = counts, counts is not None, at
        if main is None and counts and len(present := [w for w, n in counts.items() if n]) == 1:
            main = present[0]
        if main is not None:
            self.main.append((at, main))
        while self.main and at - self.main[0][0] > window:
            self.main.popleft()
        stopped = main == "stopped"
        self.stopped_since = (self.stopped_since or at) if stopped else None
        in_disk = bool(counts and counts.get("disk")) or main == "disk"
        self.disk_since = (self.disk_since or at) if in_disk else None

    def usual_main(self) -> str | None:
        """The class the main thread was in most often over the window."""
        return Counter(wait for _, wait in self.main).most_common(1)[0][0] if self.main else None


@dataclass(slots=True)
class ServerTimeline:
    """Everything known over time about the present start of one server."""

    name: str
    anchor: float  # since when we watch; no silence is counted from before
    server: Server | None = None
    startup: Startup = field(default_factory=Startup)
    tracks: dict[tuple[str, tuple[str, ...]], Track] = field(default_factory=dict)
    waits: dict[str, Waits] = field(default_factory=dict)
    moves: dict[str, float] = field(default_factory=dict)  # channel -> last move
    rank_moves: dict[str, float] = field(default_factory=dict)
    progress_by_log: dict[str, float] = field(default_factory=dict)
    deaths: list[tuple[float, str]] = field(default_factory=list)
    root_gone_at: float | None = None
    start_timestamp: float | None = None
    novel_in_a_row: int = 0
    solid_move: float | None = None  # last strong move that was more than a novel line
    compilers: float | None = None

    def track(self, signal: Signal, *labels: str) -> Track | None:
        return self.tracks.get((signal.name, labels))

    def moved(self, channel: str, at: float, rank: str | None = None, solid: bool = True) -> None:
        self.moves[channel] = max(at, self.moves.get(channel, at))
        if solid:
            self.solid_move = max(at, self.solid_move or at)
            self.novel_in_a_row = 0
        if rank:
            self.rank_moves[rank] = max(at, self.rank_moves.get(rank, at))

    @property
    def rank_names(self) -> list[str]:
        """Ranks of this start, seen alive or dead, without engines and front ends."""
        names = {labels[1] for name, labels in self.tracks if name == signals.RANK_ALIVE.name}
        return sorted((name for name in names if is_rank_name(name)), key=_natural)

    @property
    def watched_names(self) -> list[str]:
        """Ranks and engines."""
        names = {labels[1] for name, labels in self.tracks if name == signals.RANK_ALIVE.name}
        return sorted(names, key=_natural)

    def is_alive(self, rank: str) -> bool | None:
        track = self.track(signals.RANK_ALIVE, self.name, rank)
        return None if track is None or track.value is None else track.value > 0

    def log_bytes(self) -> float:
        return sum(
            track.value or 0.0 for (name, _), track in self.tracks.items() if name == signals.LOG_BYTES.name
        )


def _natural(name: str) -> tuple[object, ...]:
    """TP2 before TP10."""
    return tuple(int(part) if part.isdigit() else part for part in _split_numbers(name))


def _split_numbers(name: str) -> list[str]:
    parts, last_digit = [""], False
    for character in name:
        if character.isdigit() != last_digit and parts[-1]:
            parts.append("")
        parts[-1] += character
        last_digit = character.isdigit()
    return parts


class Timeline:
    """All servers.  Feed it with `servers`, `put` and `tell`; ask `of(name)`."""

    def __init__(
        self,
        window_of: Mapping[str, float] | None = None,
        default_window: float = 60.0,
        suspect_after: float = 900.0,
        ready_markers: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """`ready_markers`: framework -> events after which an embedded engine or a follower is ready."""
        self._windows, self._default_window = window_of or {}, default_window
        self._suspect_after = suspect_after
        self._ready_markers = ready_markers or {}
        self._servers: dict[str, ServerTimeline] = {}

    def __iter__(self) -> Iterator[ServerTimeline]:
        return iter(self._servers.values())

    def of(self, name: str) -> ServerTimeline | None:
        return self._servers.get(name)

    def forget(self, name: str) -> None:
        self._servers.pop(name, None)

    def see(self, servers: Iterable[Server], at: float) -> None:
        """Discovery's present picture of the servers."""
        for server in servers:
            timeline = self._begin(server.name, server.started_at, at)
            timeline.server = server

    def _begin(self, name: str, started_at: float | None, at: float) -> ServerTimeline:
        """The timeline of the present start; a start time that differs is a new start."""
        current = self._servers.get(name)
        known = current.start_timestamp if current else None
        if current is None or (
            started_at is not None and known is not None and abs(known - started_at) > 0.5
        ):
            current = self._servers[name] = ServerTimeline(name, anchor=at)
        if started_at is not None:
            current.start_timestamp = started_at
        return current

    def put(self, readings: Iterable[Reading], at: float, interval: float) -> None:
        """Take the readings of one result.  `interval`: how often that source looks, in seconds."""
        threads: dict[tuple[str, str], dict[str, float | None]] = {}
        main: dict[tuple[str, str], str] = {}
        for reading in readings:
            labels = reading.labels
            if not reading.signal.labels or reading.signal.labels[0] != "server":
                continue
            if reading.signal.name == signals.THREADS.name:
                threads.setdefault((labels[0], labels[1]), {})[labels[2]] = reading.value
            elif reading.signal.name == signals.MAIN_THREAD.name:
                main[labels[0], labels[1]] = labels[2]
            else:
                self._put_one(reading, at, interval)
        for (server, rank), counts in threads.items():
            if (timeline := self._servers.get(server)) is not None:
                known = {wait: int(value) for wait, value in counts.items() if value is not None}
                readable = not known.get("unreadable")
                waits = timeline.waits.setdefault(rank, Waits())
                waits.put(known if readable else None, main.get((server, rank)), at, self._window(server))

    def _window(self, server: str) -> float:
        return self._windows.get(server, self._default_window)

    def _put_one(self, reading: Reading, at: float, interval: float) -> None:
        signal, labels, value = reading.signal, reading.labels, reading.value
        if signal is signals.SERVER_START and value is not None:
            self._begin(labels[0], value, at)
        timeline = self._servers.get(labels[0])
        if timeline is None:
            return
        track = timeline.tracks.setdefault((signal.name, labels), Track())
        before = track.value
        track.put(value, reading.reason, at, interval)
        if value is None:
            return
        kind = labels[2] if len(labels) > 2 else ""
        floor = _FLOORS.get((signal.name, kind))
        if floor is not None:
            self._gather(timeline, track, floor, labels, value, at)
        elif signal is signals.CPU_SECONDS:
            if labels[1] != FRONTEND and track.rate is not None and track.rate > BUSY_CORES:
                timeline.moves["cpu"] = at
        elif signal is signals.CHILD_CPU:
            if track.rate is not None and track.rate >= BUSY_CORES:
                timeline.moved("children", at)
        elif signal is signals.CHILD_PROCESSES:
            if labels[1] == "compiler" and before is not None and before != value:
                timeline.moved("children", at)
        elif signal is signals.RANK_ALIVE:
            self._note_death(timeline, labels[1], value, at)
        elif signal is signals.SERVER_ALIVE:
            timeline.root_gone_at = None if value else timeline.root_gone_at or at

    def _gather(
        self,
        timeline: ServerTimeline,
        track: Track,
        floor: Floor,
        labels: tuple[str, ...],
        value: float,
        at: float,
    ) -> None:
        if floor.beyond_logs:
            value -= timeline.log_bytes()
        two_ways = floor.signal.name in _TWO_WAYS
        window = self._window(timeline.name)
        if not track.gathers(value, at, floor.amount, window, two_ways):
            return
        rank = labels[1] if len(labels) > 1 else None
        if rank == FRONTEND and self.is_listening(timeline):
            return
        timeline.moved(floor.channel, at, rank)

    @staticmethod
    def is_listening(timeline: ServerTimeline) -> bool:
        """Whether the start came as far as `listening`: from then on front ends work for clients."""
        if timeline.startup.phase in ("listening", "ready", "stopped"):
            return True
        return any(
            track.value for (name, _), track in timeline.tracks.items() if name == signals.PORT_LISTENING.name
        )

    @staticmethod
    def _note_death(timeline: ServerTimeline, rank: str, value: float, at: float) -> None:
        dead = {name for _, name in timeline.deaths}
        if not value and rank not in dead:
            timeline.deaths.append((at, rank))

    def tell(self, events: Iterable[Event], earliest: float | None = None) -> None:
        """Fold log events in.  `earliest`: no event counts as older than this (our own pause)."""
        for event in events:
            timeline = self._servers.get(event.server)
            if timeline is None:
                continue
            at = event.at if earliest is None else max(event.at, earliest)
            if event.event == "novel":
                self._novel(timeline, event, at)
                continue
            moved = timeline.startup.apply(event.event, event.rank, event.fields, at, event.dated)
            if moved:
                timeline.moved("log", at, event.rank)
                timeline.progress_by_log[event.log] = at
            self._note_last_marker(timeline, event.event, at)

    def _novel(self, timeline: ServerTimeline, event: Event, at: float) -> None:
        """A line of a new shape is progress, but not for ever by itself."""
        if timeline.startup.ready_at is not None:
            return
        timeline.novel_in_a_row += 1
        solid = timeline.solid_move if timeline.solid_move is not None else timeline.anchor
        if timeline.novel_in_a_row <= MOST_NOVEL_LINES and at - solid < self._suspect_after:
            timeline.moved("log", at, event.rank, solid=False)
            timeline.progress_by_log[event.log] = at
            if event.dated is not None:
                timeline.startup.last_dated = event.dated

    def _note_last_marker(self, timeline: ServerTimeline, event: str, at: float) -> None:
        server = timeline.server
        if server is None or timeline.startup.ready_at is not None:
            return
        follows = server.role == "embedded" or server.node_rank > 0
        if follows and event in self._ready_markers.get(server.framework, ()):
            timeline.startup.apply("ready", None, {}, at)
