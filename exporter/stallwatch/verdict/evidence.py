"""From a server's timeline to Evidence: a few numbers, as of one moment.  Pure.

Everything too old is None or `unreadable`: a verdict never rests on a stale number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .. import signals
from ..model import AMBIGUOUS_CHANNELS, CHANNELS, STRONG_CHANNELS, ChannelState, Signal
from ..server_timeline import ServerTimeline
from ..tracks import Track


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank (or engine).  Ages in seconds; None = not known, or not so."""

    rank: str
    alive: bool | None = True
    markers: int = 0  # distinct start-up markers passed
    main_wait: str | None = None  # usual class of its main thread over the window
    waits: frozenset[str] | None = None  # usual classes of all its threads over the window; None = unreadable
    progress_age: float | None = None
    stopped_age: float | None = None
    disk_age: float | None = None
    is_engine: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict may look at.  Ages in seconds as of the tick."""

    role: str = "server"
    nnodes: int = 1
    known: bool = True  # False: a configured server that never came
    ready: bool = False
    phase: str = "spawned"
    phase_age: float = 0.0
    progress_age: float = 0.0  # silence of all strong channels that was watched; see observed_progress_age
    channels: tuple[ChannelState, ...] = ()
    storage_readable: bool = True
    watched_age: float = math.inf  # since when storage is watched on every live rank
    log: str = "readable"  # readable unreadable absent
    gpu_readable: bool = False
    unreadable_reason: str | None = None  # of storage, and so of most
    log_reason: str | None = None
    autotune_open: bool = False
    root_gone_age: float | None = None
    shutdown_age: float | None = None
    deaths: tuple[tuple[float, str], ...] = ()  # (age, rank), oldest first
    live_ranks: int = 0
    fatal_age: float | None = None
    ranks: tuple[RankEvidence, ...] = ()
    demand: float | None = None  # requests running and waiting; None = unknown
    threads_readable: bool = True

    def moving(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(c.channel for c in self.channels if c.channel in names and c.state == "moving")

    @property
    def ambiguous_moving(self) -> tuple[str, ...]:
        return self.moving(AMBIGUOUS_CHANNELS)

    @property
    def shutdown(self) -> bool:
        """Whether the server said that it ends."""
        return self.shutdown_age is not None

    @property
    def has_one_rank(self) -> bool:
        return sum(1 for rank in self.ranks if not rank.is_engine) <= 1


def gather(timeline: ServerTimeline, now: float, window: float, progress_age: float | None = None) -> Evidence:
    """Evidence of one server at `now`.  `progress_age` replaces the observed one (`check`, dated evidence)."""
    startup, server = timeline.startup, timeline.server
    storage, reason = _storage(timeline, now)
    log = _log(timeline, now)
    ready = timeline.was_ready or _is_ready(timeline, now, window, log)
    starts = timeline.track(signals.SERVER_STARTS, timeline.name)
    ranks = tuple(_rank(timeline, name, now, window) for name in timeline.watched_names)
    return Evidence(
        role=server.role if server else "server",
        nnodes=server.nnodes if server else 1,
        known=starts is None or starts.value != 0,
        ready=ready,
        phase="ready" if ready and startup.phase != "stopped" else startup.phase,
        phase_age=now - max(startup.phase_since, timeline.anchor),
        progress_age=observed_progress_age(timeline, now) if progress_age is None else progress_age,
        channels=tuple(_channel(timeline, name, now, window, ready, log, storage) for name in CHANNELS),
        storage_readable=storage,
        watched_age=_watched_age(timeline, now) if progress_age is None else math.inf,
        log=log,
        unreadable_reason=reason,
        log_reason=_log_reason(timeline),
        autotune_open=bool(startup.open_autotunes),
        root_gone_age=_age(now, timeline.root_gone_at),
        shutdown_age=_age(now, startup.shutdown_at),
        deaths=tuple((now - at, rank) for at, rank in timeline.deaths),
        live_ranks=sum(1 for rank in ranks if rank.alive and not rank.is_engine),
        fatal_age=_age(now, startup.fatal_at),
        ranks=ranks,
        demand=_demand(timeline, now),
        threads_readable=_threads_readable(timeline, now),
    )


def _age(now: float, at: float | None) -> float | None:
    return None if at is None else now - at


def _is_ready(timeline: ServerTimeline, now: float, window: float, log: str) -> bool:
    return (
        timeline.startup.ready_at is not None
        or _healthy(timeline, now, log)
        or _worked_then_flat(timeline, now, window, log)
    )


def last_strong_move(timeline: ServerTimeline) -> float | None:
    moves = [at for channel, at in timeline.moves.items() if channel in STRONG_CHANNELS]
    return max(moves, default=None)


def observed_progress_age(timeline: ServerTimeline, now: float) -> float:
    """Seconds of silence of all strong channels, never more than we have watched.

    While storage and log are read the silence ends with the last look at them: what moved since then is not
    known yet (a collector that is late, our own pause).  While they are not, it goes on: it is `unknown` then.
    """
    last = last_strong_move(timeline)
    begin = timeline.anchor if last is None else max(timeline.anchor, last)
    looks = [
        track.read_at for track in _decisive(timeline, now) if track.is_readable(now) and track.read_at is not None
    ]
    return max(0.0, min([now, *looks]) - begin) if looks else now - begin


def _decisive(timeline: ServerTimeline, now: float) -> list[Track]:
    """The tracks without which nothing is concluded from silence."""
    storage = [
        timeline.track(signal, timeline.name, label)
        for label in _live_labels(timeline, now)
        for signal in _STORAGE_SIGNALS
    ]
    logs = list(timeline.of(signals.LOG_BYTES).values())
    return [track for track in (*storage, *logs) if track is not None]


def _watched_age(timeline: ServerTimeline, now: float) -> float:
    """Seconds since which the storage of every live rank is watched; inf while there is nothing to watch."""
    since = [
        track.known_since
        for label in _live_labels(timeline, now)
        for signal in _STORAGE_SIGNALS
        if (track := timeline.track(signal, timeline.name, label)) is not None and track.known_since is not None
    ]
    return now - max(since) if since else math.inf


_STORAGE_SIGNALS = (signals.STORAGE_READ, signals.READ_BYTES)


def _fresh(timeline: ServerTimeline, now: float, signal: Signal, *labels: str) -> bool:
    track = timeline.track(signal, timeline.name, *labels)
    return track is not None and track.is_readable(now)


def _live_labels(timeline: ServerTimeline, now: float) -> list[str]:
    """Labels of the live ranks; of every process of the server while there is no rank."""
    ranks = [name for name in timeline.rank_names if timeline.is_alive(name)]
    if ranks:
        return ranks
    return sorted({labels[1] for labels, track in timeline.of(signals.CPU_SECONDS).items() if track.is_fresh(now)})


def _storage(timeline: ServerTimeline, now: float) -> tuple[bool, str | None]:
    """Whether storage can be read on every live rank, and why not."""
    labels = _live_labels(timeline, now)
    for label in labels:
        for signal in _STORAGE_SIGNALS:
            if not _fresh(timeline, now, signal, label):
                track = timeline.track(signal, timeline.name, label)
                return False, track.reason if track else None
    return bool(labels), None


def _log(timeline: ServerTimeline, now: float) -> str:
    tracks = list(timeline.of(signals.LOG_BYTES).values())
    if any(track.is_readable(now) for track in tracks):
        return "readable"
    return "unreadable" if tracks else "absent"


def _log_reason(timeline: ServerTimeline) -> str | None:
    """Why a log cannot be read; None when all can, or none was looked at."""
    tracks = list(timeline.of(signals.LOG_BYTES).values())
    return min((track.reason for track in tracks if track.reason is not None), default=None)


def _healthy(timeline: ServerTimeline, now: float, log: str) -> bool:
    """A health 200 makes ready; the list of models does so only where no log can tell better."""
    for endpoint in ("health", "models"):
        track = timeline.track(signals.HEALTH_STATUS, timeline.name, endpoint)
        if track and track.value == 200 and track.is_fresh(now) and (endpoint == "health" or log != "readable"):
            return True
    return False


def _worked_then_flat(timeline: ServerTimeline, now: float, window: float, log: str) -> bool:
    """An embedded engine without a log is ready when a rank has worked and memory is flat."""
    server = timeline.server
    if server is None or server.role != "embedded" or log != "absent":
        return False
    memory, cpu = timeline.moves.get("memory"), timeline.moves.get("cpu")
    return memory is not None and cpu is not None and now - memory > window


def _channel(
    timeline: ServerTimeline, name: str, now: float, window: float, ready: bool, log: str, storage: bool
) -> ChannelState:
    readable = _CHANNEL_READABLE[name](timeline, now, ready, log, storage)
    if readable is None:
        return ChannelState(name, "absent", None)
    last = timeline.moves.get(name)
    age = None if last is None else max(0.0, now - last)
    if not readable:
        return ChannelState(name, "unreadable", None)
    return ChannelState(name, "moving" if age is not None and age <= window else "flat", age)


def _any_fresh(timeline: ServerTimeline, now: float, signal: Signal) -> bool:
    return any(track.is_readable(now) for track in timeline.of(signal).values())


def _never(timeline: ServerTimeline, now: float, ready: bool, log: str, storage: bool) -> bool | None:
    return None


_CHANNEL_READABLE: Mapping[str, Callable[[ServerTimeline, float, bool, str, bool], bool | None]] = {
    "log": lambda t, now, ready, log, storage: None if log == "absent" else log == "readable",
    "storage": lambda t, now, ready, log, storage: storage,
    "memory": lambda t, now, ready, log, storage: _any_fresh(t, now, signals.PAGE_FAULTS),
    "children": lambda t, now, ready, log, storage: _any_fresh(t, now, signals.CHILD_CPU),
    "gpu_memory": _never,
    "gpu_bus": _never,
    "gpu_power": _never,
    "tokens": lambda t, now, ready, log, storage: (
        True if ready and _any_fresh(t, now, signals.GENERATED_TOKENS) else None
    ),
    "cpu": lambda t, now, ready, log, storage: _any_fresh(t, now, signals.CPU_SECONDS),
    "gpu_utilization": _never,
}
"""True readable, False unreadable, None absent (does not apply)."""


def _threads_readable(timeline: ServerTimeline, now: float) -> bool:
    """Whether the kernel tells what the threads of every live rank wait in."""
    waits = [timeline.waits.get(label) for label in _live_labels(timeline, now)]
    return bool(waits) and all(each is not None and each.is_fresh(now) and each.is_readable for each in waits)


def _rank(timeline: ServerTimeline, name: str, now: float, window: float) -> RankEvidence:
    waits = timeline.waits.get(name)
    if waits is not None and not waits.is_fresh(now):
        waits = None
    progress_age = rank_progress_age(timeline, name, now)
    return RankEvidence(
        rank=name,
        alive=timeline.is_alive(name),
        markers=len(timeline.markers.get(name, ())),
        main_wait=waits.usual_main() if waits else None,
        waits=waits.usual_classes() if waits and waits.is_readable else None,
        progress_age=now - timeline.anchor if progress_age is None else progress_age,
        stopped_age=_age(now, waits.stopped_since) if waits else None,
        disk_age=_age(now, waits.disk_since) if waits else None,
        is_engine=name.startswith("engine"),
    )


def rank_progress_age(timeline: ServerTimeline, rank: str, now: float) -> float | None:
    """Seconds since the rank's own last strong move or progress line; None when it made none yet."""
    startup = timeline.startup.ranks.get(rank)
    moments = [timeline.rank_moves.get(rank), startup.last_progress if startup else None]
    known = [moment for moment in moments if moment is not None]
    return max(0.0, now - max(known)) if known else None


def _demand(timeline: ServerTimeline, now: float) -> float | None:
    total = None
    for signal in (signals.REQUESTS_RUNNING, signals.REQUESTS_WAITING):
        track = timeline.track(signal, timeline.name)
        if track is not None and track.is_readable(now) and track.value is not None:
            total = (total or 0.0) + track.value
    return total
