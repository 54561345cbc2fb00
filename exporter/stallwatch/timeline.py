"""Readings and events over time: for every series its last value and when it last moved by its floor.

Pure: all times are passed in, in seconds of a clock that does not count our own pauses.  The same code serves
live results and recordings.  What a move is stands in FLOORS; what it means is the verdict's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from . import signals
from .cards import Cards
from .config import Thresholds
from .deadlines import NO_TIMEOUTS, OwnTimeouts
from .model import FRONTEND, Event, Reading, Server, Signal
from .server_timeline import DEMAND, ServerTimeline, Steps
from .startup import COUNTERS, FIRST_RANK, MARKERS, MOST_RANKS, NAMELESS, PHASE_OF_EVENT, SHARED
from .tracks import STALE_AFTER_GAPS, Track, Waits, put_again

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
    # Stuck, measured: 0 storage reads, <= 0.2 MB/min by read() (docs/NOISE.md, rows a c d).
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

_FLOORS: Mapping[str, Mapping[str, Floor]] = {
    floor.signal.name: {other.kind: other for other in FLOORS if other.signal == floor.signal} for floor in FLOORS
}
"""Signal -> value of its `kind` label, or "" -> floor."""
_TWO_WAYS = frozenset((signals.RESIDENT_MEMORY.name,))
_SAME_START_SECONDS = 0.5

HISTORY_SECONDS = 30.0
"""How long after a server was first seen what its log held before may still be coming in."""

MOST_COUNTERS = 4096
"""Counters (event and rank) of one start whose steps are measured."""

_MOST_FORGOTTEN = 1024
"""Names of ended servers kept so that late readings about them do not begin them anew."""


@dataclass(frozen=True, slots=True)
class Look:
    """When a source looked, and how often it does; seconds.  See Timeline.put."""

    at: float
    interval: float
    measured: float


@dataclass(slots=True)
class Batch:
    """What of one result can be understood only together."""

    threads: dict[tuple[str, str], dict[str, float | None]] = field(default_factory=dict)
    main: dict[tuple[str, str], str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # servers whose demand was read
    parents: set[str] = field(default_factory=set)  # servers the CPU of whose children was read


@dataclass(slots=True)
class LastLook:
    """What there is to do with what a source said at its last look, where it says it again.

    Thrown away when it says anything of other series, and when series were taken away (Timeline.look_anew).
    """

    standing: tuple[Track, ...]  # what needs no more than `put_again`
    always: tuple[int, ...]  # which readings are put whether they changed or not
    batch: Batch

    def to_put(self, readings: tuple[Reading, ...], news: list[Reading]) -> list[Reading]:
        ids = set(map(id, news))
        again = [reading for index in self.always if id(reading := readings[index]) not in ids]
        return [*again, *news]


def news_of(before: tuple[Reading, ...], readings: tuple[Reading, ...]) -> list[Reading] | None:
    """Which readings of a look are not the very same as in the look before; None where they are of other series, or of
    another start."""
    if readings is before:
        return []
    if len(readings) != len(before):
        return None
    pairs = [(old, new) for old, new in zip(before, readings, strict=True) if old is not new]
    for old, new in pairs:
        if old.signal is not new.signal or old.labels != new.labels or new.signal is signals.SERVER_START:
            return None
    return [new for _, new in pairs]


class Timeline:
    """All servers.  Feed it with `see`, `put` and `tell`; ask `of(name)`."""

    def __init__(
        self,
        thresholds_of: Callable[[str], Thresholds] = lambda server: Thresholds(),
        ready_markers: Mapping[str, tuple[str, ...]] | None = None,
        timeouts_of: Callable[[str], OwnTimeouts] = lambda framework: NO_TIMEOUTS,
    ) -> None:
        """`ready_markers`: framework -> events after which an embedded engine or a follower is ready.

        `timeouts_of`: the time-outs of a framework itself.
        """
        self.timeouts_of = timeouts_of
        self._thresholds_of = thresholds_of
        self._ready_markers = {} if ready_markers is None else ready_markers
        self._servers: dict[str, ServerTimeline] = {}
        self._forgotten: dict[str, float | None] = {}  # name -> start time of the start that is over
        self._kills = Track()
        self._last_looks: dict[str, LastLook] = {}  # of each source
        self.cards = Cards(self._card_moved, lambda server: self._thresholds_of(server).window, self._may_rest)

    def __iter__(self) -> Iterator[ServerTimeline]:
        return iter(self._servers.values())

    def of(self, name: str) -> ServerTimeline | None:
        return self._servers.get(name)

    def forget(self, name: str) -> None:
        """Drop a server.  If its first process is gone, late readings do not begin this start anew."""
        timeline = self._servers.pop(name, None)
        self.look_anew()
        self.cards.forget(name)
        if timeline is not None and timeline.root_gone_at is not None:
            self._forgotten.pop(name, None)
            self._forgotten[name] = timeline.start_timestamp
            while len(self._forgotten) > _MOST_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]

    def look_anew(self) -> None:
        """Series were taken away, or are others now: what each source says next is put as a whole."""
        self._last_looks.clear()

    def see(self, servers: Iterable[Server], at: float) -> None:
        """Discovery's present picture of the servers."""
        for server in servers:
            if server.starts == 0 and server.name in self._servers:
                continue  # a configured server that has no process: what its last start came to is not over yet
            timeline = self._begin(server.name, server.started_at, at)
            if timeline is not None:
                timeline.server = server

    def _begin(self, name: str, started_at: float, at: float) -> ServerTimeline | None:
        """The timeline of the present start; a start time that differs is a new start.  None = over and gone."""
        current = self._servers.get(name)
        if current is None and _same_start(self._forgotten.get(name), started_at):
            return None
        if current is None or (
            current.start_timestamp is not None and not _same_start(current.start_timestamp, started_at)
        ):
            current = self._servers[name] = ServerTimeline(name, anchor=at, cards=self.cards)
            self.look_anew()
            self.cards.forget(name)
        current.start_timestamp = started_at
        return current

    def put(
        self,
        readings: Iterable[Reading],
        at: float,
        interval: float,
        measured: float | None = None,
        source: str = "",
        news: list[Reading] | None = None,
    ) -> None:
        """Take the readings of one result.  `interval`: how often that source looks, in seconds.

        `measured`: the same moment on a clock that counts our own pauses too (default: there was none).
        `source`: whose look it is, of a tuple of readings; `news`: those that changed since its look before, see
        `news_of`.  With both, what did not change is not worked out again.
        """
        look = Look(at, interval, at if measured is None else measured)
        last = self._last_looks.pop(source, None)
        known = readings if source and isinstance(readings, tuple) else None
        if last is None or known is None or news is None:
            batch = Batch()
            self._put_all(readings, look, batch)
            if known is not None and (last := self._last_look(known, batch)) is not None:
                self._last_looks[source] = last
        else:
            self._last_looks[source], batch = last, last.batch
            self._put_all(last.to_put(known, news), look, batch)
            put_again(last.standing, at, interval, look.measured)
        self._conclude(look, batch)

    def _put_all(self, readings: Iterable[Reading], look: Look, batch: Batch) -> None:
        for reading in [reading for reading in readings if reading.signal.name in _PUTS]:
            _PUTS[reading.signal.name](self, reading, look, batch)

    def _last_look(self, readings: tuple[Reading, ...], batch: Batch) -> LastLook | None:
        """None when a series is in them twice, which no source should say: then the last word counts, each time."""
        standing, always, series = list[Track](), list[int](), set[tuple[str, tuple[str, ...]]]()
        for index, reading in enumerate(readings):
            if (name := reading.signal.name) not in _PUTS:
                continue
            if (name, reading.labels) in series:
                return None
            series.add((name, reading.labels))
            if (track := self._standing(reading)) is not None:
                standing.append(track)
            elif name not in _OF_BATCHES:
                always.append(index)
        return LastLook(tuple(standing), tuple(always), batch)

    def _standing(self, reading: Reading) -> Track | None:
        """The series of a reading which means nothing when it comes again, but that it still holds."""
        if reading.signal.name not in _STANDING or (timeline := self._servers.get(reading.labels[0])) is None:
            return None
        track = timeline.tracks.get(reading.signal.name, {}).get(reading.labels)
        holds = track is not None and track.value == reading.value and track.reason == reading.reason
        return track if holds else None

    def _conclude(self, look: Look, batch: Batch) -> None:
        """Draw what the readings of one result say together."""
        self.cards.settle(look.at)
        for (server, rank), counts in batch.threads.items():
            if (timeline := self._servers.get(server)) is not None:
                window = self._thresholds_of(server).window
                waits = timeline.waits.setdefault(rank, Waits())
                known = _readable_counts(counts)
                usual_main = None if known is None else batch.main.get((server, rank))
                waits.put(known, usual_main, look.at, window, look.interval, look.measured)
        for server in batch.parents:
            if (timeline := self._servers.get(server)) is not None:
                _note_children_cpu(timeline, look)
        for server in batch.asked:
            if (timeline := self._servers.get(server)) is not None:
                timeline.note_demand(look.at)

    def _put_card(self, reading: Reading, look: Look, batch: Batch) -> None:
        self.cards.put(reading, look.at, look.interval, look.measured)

    def _put_call(self, reading: Reading, look: Look, batch: Batch) -> None:
        self.cards.call.put(reading.value, reading.reason, look.at, look.interval, look.measured)

    def _put_threads(self, reading: Reading, look: Look, batch: Batch) -> None:
        server, rank, wait = reading.labels
        batch.threads.setdefault((server, rank), {})[wait] = reading.value

    def _put_main(self, reading: Reading, look: Look, batch: Batch) -> None:
        server, rank, wait = reading.labels
        batch.main[server, rank] = wait

    def _put_start(self, reading: Reading, look: Look, batch: Batch) -> None:
        if reading.value is not None:
            self._begin(reading.labels[0], reading.value, look.at)
        self._put_one(reading, look, batch)

    def _put_demand(self, reading: Reading, look: Look, batch: Batch) -> None:
        if self._put_one(reading, look, batch):
            batch.asked.add(reading.labels[0])

    def _put_children(self, reading: Reading, look: Look, batch: Batch) -> None:
        if self._put_one(reading, look, batch):
            batch.parents.add(reading.labels[0])

    def _put_one(self, reading: Reading, look: Look, batch: Batch) -> bool:
        """Take a reading that stands for itself; False when it is of no server that is there."""
        signal, labels, value = reading.signal, reading.labels, reading.value
        name = signal.name
        timeline = self._servers.get(labels[0])
        if timeline is None:
            return False
        try:
            track = timeline.tracks[name][labels]
        except KeyError:
            track = timeline.tracks.setdefault(name, {}).setdefault(labels, Track())
        before = track.known
        track.put(value, reading.reason, look.at, look.interval, look.measured)
        if (note := _NOTES.get(name)) is not None:
            note(timeline, track, reading, before, look)
        if value is None:
            return True
        if before is not None and value < before and signal.kind == "counter":
            track.begins_anew(look.at)
        if name in _FLOORS and (floor := _FLOORS[name].get(labels[2] if len(labels) > 2 else "")) is not None:
            self._gather(timeline, track, floor, labels, value, look.at)
        return True

    def _card_moved(self, server: str, channel: str, at: float, rank: str | None) -> None:
        timeline = self._servers.get(server)
        if timeline is not None and (rank != FRONTEND or not self.is_listening(timeline)):
            timeline.moved(channel, at, rank)

    def _may_rest(self, server: str, at: float) -> bool:
        """Whether a card of it that seems to rest does: never told in a silence, for that may be a hang."""
        timeline = self._servers.get(server)
        if timeline is None:
            return False
        return timeline.is_idle if timeline.is_ready else not timeline.is_quiet(at, self._thresholds_of(server).window)

    def _put_kills(self, reading: Reading, look: Look, batch: Batch) -> None:
        before = self._kills.known
        self._kills.put(reading.value, reading.reason, look.at, look.interval, look.measured)
        if before is None or reading.value is None or reading.value <= before:
            return
        for timeline in self._servers.values():
            timeline.oom_killed_at = look.at

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
            value -= timeline.logged
        if track.stands(value, at):
            return
        window = self._thresholds_of(timeline.name).window
        if not track.gathers(value, at, floor.amount, window, floor.signal.name in _TWO_WAYS):
            return
        rank = labels[1] if len(labels) > 1 else None
        if floor.channel == "tokens" and not timeline.is_ready:
            return  # a warm-up request is no service
        if rank != FRONTEND or not self.is_listening(timeline):
            timeline.moved(floor.channel, at, rank)

    @staticmethod
    def is_listening(timeline: ServerTimeline) -> bool:
        """Whether the start came as far as `listening`: from then on front ends work for clients."""
        if timeline.startup.phase in ("listening", "ready", "stopped"):
            return True
        return any(track.value for track in timeline.of(signals.PORT_LISTENING).values())

    def tell(self, events: Iterable[Event]) -> None:
        """Fold log events in."""
        for event in events:
            timeline = self._servers.get(event.server)
            if timeline is None:
                continue
            if event.event == "novel":
                self._novel(timeline, event)
                continue
            if _is_of_another_server(timeline, event):
                continue
            self._note_marker(timeline, event)
            moved = timeline.startup.apply(event.event, event.rank, event.fields, event.at, event.dated)
            if moved:
                timeline.moved("log", event.at, event.rank)
                timeline.progress_by_log[event.log] = event.at
            if moved and event.event in COUNTERS:
                self._note_step(timeline, event)
            if moved or event.event == "shutdown":
                self._note_deadlines(timeline, event)
            if event.event == "stats":
                self._note_stats(timeline, event)
            self._note_last_marker(timeline, event)

    def _note_deadlines(self, timeline: ServerTimeline, event: Event) -> None:
        """What a server waits for, it does not wait for ever.  A line may say itself which time-out begins with it."""
        server = timeline.server
        if server is None or event.fields.get(NAMELESS):
            return
        clock, seconds = event.fields.get("clock"), event.fields.get("timeout")
        limits: Mapping[str, float]
        if isinstance(clock, str) and isinstance(seconds, float):
            limits = {clock: seconds}
        else:
            version = timeline.startup.version or server.version
            limits = self.timeouts_of(server.framework).opened_by(event.event, version)
        timeline.deadlines.tell(event.event, event.rank, event.at, server, limits)

    @staticmethod
    def _note_step(timeline: ServerTimeline, event: Event) -> None:
        """Keep how long the steps of a counter take, for as long as its phase lasts."""
        phase = PHASE_OF_EVENT[event.event]
        key = (event.event, event.rank or FIRST_RANK)
        if key not in timeline.steps:
            gone = [other for other in timeline.steps if other[1] == key[1] and PHASE_OF_EVENT[other[0]] != phase]
            for other in gone:
                del timeline.steps[other]
            if len(timeline.steps) >= MOST_COUNTERS:
                return
        timeline.steps.setdefault(key, Steps()).step(event.at, _amount(event))

    @staticmethod
    def _note_stats(timeline: ServerTimeline, event: Event) -> None:
        """A stats line says what is owed, and how fast tokens came since the line before."""
        timeline.stats.put(event.fields, event.at, event.rank)
        timeline.note_demand(event.at)
        speed = event.fields.get("generation_tokens_per_second")
        if isinstance(speed, int | float) and speed > 0 and timeline.is_ready:
            timeline.moved("tokens", event.at)

    def _novel(self, timeline: ServerTimeline, event: Event) -> None:
        """A line of a new shape is progress, but not for ever by itself."""
        if timeline.startup.ready_at is not None:
            return
        timeline.novel_in_a_row += 1
        solid = timeline.solid_move if timeline.solid_move is not None else timeline.anchor
        suspect_after = self._thresholds_of(timeline.name).suspect_after
        if timeline.novel_in_a_row <= MOST_NOVEL_LINES and event.at - solid < suspect_after:
            timeline.moved("log", event.at, event.rank, solid=False)
            timeline.progress_by_log[event.log] = event.at
            if event.dated is not None:
                timeline.startup.last_dated = event.dated

    @staticmethod
    def _note_marker(timeline: ServerTimeline, event: Event) -> None:
        """Markers of ranks the log names; a line that names none, or speaks for all, tells no ranks apart."""
        if timeline.startup.begins_anew(event.event):
            timeline.markers.clear()
            timeline.steps.clear()
            timeline.deadlines.waits.clear()
            timeline.was_ready = False
        if event.event not in MARKERS or event.rank is None or event.fields.get(SHARED):
            return
        if event.rank in timeline.markers or len(timeline.markers) < MOST_RANKS:
            timeline.markers.setdefault(event.rank, set()).add(event.event)

    def _note_last_marker(self, timeline: ServerTimeline, event: Event) -> None:
        """A follower or an embedded engine is ready when its ranks have passed their last marker."""
        server = timeline.server
        if server is None or timeline.startup.ready_at is not None:
            return
        follows = server.role == "embedded" or server.node_rank > 0
        if not follows or event.event not in self._ready_markers.get(server.framework, ()):
            return
        if (
            event.rank is None
            or event.fields.get(SHARED)
            or all(event.event in passed for passed in timeline.markers.values())
        ):
            timeline.startup.apply("ready", None, {}, event.at)


def _is_of_another_server(timeline: ServerTimeline, event: Event) -> bool:
    """A server that is ready does not begin anew in the same process: another one writes into its log.

    What was in the file when it was found is another matter (earlier starts of the same server), and so is an
    engine inside a program, which may be built again.
    """
    if not timeline.startup.begins_anew(event.event) or event.at <= timeline.anchor + HISTORY_SECONDS:
        return False
    embedded = timeline.server is not None and timeline.server.role == "embedded"
    return not embedded and (timeline.was_ready or timeline.startup.ready_at is not None)


def _amount(event: Event) -> float:
    """How far a counter is: k of k/N, or the share."""
    amount = event.fields.get("done", event.fields.get("ratio"))
    return float(amount) if isinstance(amount, int | float) else 0.0


def _same_start(known: float | None, started_at: float) -> bool:
    return known is not None and abs(known - started_at) <= _SAME_START_SECONDS


def _readable_counts(counts: Mapping[str, float | None]) -> dict[str, int] | None:
    """Threads by class; None when the kernel does not tell."""
    known = {wait: int(value) for wait, value in counts.items() if value is not None}
    return known if known and not known.get("unreadable") else None


# --- what single readings mean beside FLOORS ---------------------------------------------------------------


def _note_cpu(timeline: ServerTimeline, track: Track, reading: Reading, before: float | None, look: Look) -> None:
    cores = track.rate_over(look.interval)
    if reading.labels[1] != FRONTEND and cores is not None and cores > BUSY_CORES:
        timeline.moved("cpu", look.at)
        timeline.busy_at[reading.labels[1]] = look.at


def _note_child_processes(
    timeline: ServerTimeline, track: Track, reading: Reading, before: float | None, look: Look
) -> None:
    if reading.labels[1] == "compiler" and None not in (before, reading.value) and before != reading.value:
        timeline.moved("children", look.at)


def _note_death(timeline: ServerTimeline, track: Track, reading: Reading, before: float | None, look: Look) -> None:
    """A rank that came back (an engine built again inside a program) is not dead any more."""
    rank = reading.labels[1]
    if reading.value:
        timeline.deaths[:] = [death for death in timeline.deaths if death[1] != rank]
    elif reading.value == 0 and rank not in {name for _, name in timeline.deaths}:
        timeline.deaths.append((look.at, rank))


def _note_root(timeline: ServerTimeline, track: Track, reading: Reading, before: float | None, look: Look) -> None:
    if reading.value:
        timeline.root_gone_at = None
    elif reading.value == 0 and timeline.root_gone_at is None:
        timeline.root_gone_at = look.at


def _note_log_bytes(timeline: ServerTimeline, track: Track, reading: Reading, before: float | None, look: Look) -> None:
    if before is not None and reading.value is not None and reading.value > before:
        timeline.logged += reading.value - before


def _note_timeouts(timeline: ServerTimeline, track: Track, reading: Reading, before: float | None, look: Look) -> None:
    if reading.labels[1] == "health" and reading.value is not None:
        more = 0.0 if before is None else reading.value - before
        timeline.timeouts.put(more, look.at, STALE_AFTER_GAPS * track.usual_gap)


def _note_health(timeline: ServerTimeline, track: Track, reading: Reading, before: float | None, look: Look) -> None:
    """Any answer ends a row of time-outs."""
    if reading.labels[1] == "health" and reading.value is not None:
        timeline.timeouts.clear()


def _note_children_cpu(timeline: ServerTimeline, look: Look) -> None:
    """CPU of the children of all kinds together; each counts with what was last read of it."""
    kinds = timeline.of(signals.CHILD_CPU).values()
    if any(kind.value is None for kind in kinds):
        return
    total, sums = sum(kind.value or 0.0 for kind in kinds), timeline.children_cpu
    earlier, usual_gap = sums.known, sums.usual_gap
    gap = None if sums.read_at is None else look.at - sums.read_at
    sums.put(total, None, look.at, look.interval, look.measured)
    if earlier is None or not gap:
        return
    # After a gap it is not known when the CPU was used: it counts as if all came in one usual interval.
    if (total - earlier) / min(max(gap, look.interval), usual_gap) >= BUSY_CORES:
        timeline.moved("children", look.at)


Note = Callable[[ServerTimeline, Track, Reading, float | None, Look], None]

_NOTES: Mapping[str, Note] = {
    signals.CPU_SECONDS.name: _note_cpu,
    signals.CHILD_PROCESSES.name: _note_child_processes,
    signals.RANK_ALIVE.name: _note_death,
    signals.SERVER_ALIVE.name: _note_root,
    signals.LOG_BYTES.name: _note_log_bytes,
    signals.HEALTH_TIMEOUTS.name: _note_timeouts,
    signals.HEALTH_STATUS.name: _note_health,
}
"""Signal -> (timeline, its track, the reading, the last known value before, when)."""

Put = Callable[[Timeline, Reading, Look, Batch], object]

_OWN_PUTS: Mapping[str, Put] = {
    signals.THREADS.name: Timeline._put_threads,
    signals.MAIN_THREAD.name: Timeline._put_main,
    signals.SERVER_START.name: Timeline._put_start,
    signals.CHILD_CPU.name: Timeline._put_children,
    **{signal.name: Timeline._put_demand for signal in DEMAND},
    signals.RANK_INFO.name: Timeline._put_card,
    signals.OOM_KILLS.name: Timeline._put_kills,
    signals.GPU_CALL_IN_FLIGHT.name: Timeline._put_call,
}


def _put_of(signal: Signal) -> Put | None:
    """Who takes the readings of a signal; None for one that is about nothing a verdict looks at."""
    if signal.name in _OWN_PUTS:
        return _OWN_PUTS[signal.name]
    if signal.labels[:1] == ("server",) and signal.kind != "info":
        return Timeline._put_one
    return Timeline._put_card if signal.labels[:1] == ("gpu",) else None


_PUTS: Mapping[str, Put] = {
    signal.name: put
    for signal in vars(signals).values()
    if isinstance(signal, Signal) and (put := _put_of(signal)) is not None
}
"""What the timeline keeps: the signals a verdict may look at."""

_STANDING = frozenset(name for name, put in _PUTS.items() if put in (Timeline._put_one, Timeline._put_children)) - {
    signals.HEALTH_TIMEOUTS.name,
    signals.HEALTH_STATUS.name,
    signals.WRITTEN_BYTES.name,
}
"""Signals that say nothing new when they say the same: not those of rows of looks, nor one with a floor that moves."""

_OF_BATCHES = frozenset((signals.THREADS.name, signals.MAIN_THREAD.name))
"""What only the batch keeps, and keeps from look to look."""
