"""From a server's timeline to Evidence: a few numbers, as of one moment.  Pure.

Everything too old is None: a verdict never rests on a stale number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .. import signals
from ..cards import Spin
from ..config import Thresholds
from ..model import AMBIGUOUS_CHANNELS, CHANNELS, STRONG_CHANNELS, ChannelState, Server, Signal
from ..server_timeline import ServerTimeline, Timeouts
from ..tracks import Track
from .channels import TOKENS, Sight, channel_of, sight_of


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
    traced: bool = False  # a debugger is attached
    is_engine: bool = False
    unread: frozenset[str] = frozenset()  # strong channels of its GPUs that cannot be read


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
    stretch: float = 0.0  # silence shorter than this is the usual step of a slow counter
    channels: tuple[ChannelState, ...] = ()
    storage_readable: bool = True
    watched_age: float = math.inf  # since when storage is watched on every live rank
    log: str = "readable"  # readable unreadable absent
    log_speaks: bool = True  # a line of it said where the start is; a program's own lines around its engine do not
    gpu_readable: bool = False
    blinks: bool = False  # what cannot be read now could be read a moment ago
    unreadable_reason: str | None = None  # of storage, and so of most
    log_reason: str | None = None
    autotune_open: bool = False
    compile_open: bool = False
    root_gone_age: float | None = None
    scope_alive: bool | None = None  # its container, unit, job step or session; None: in none, or not known
    stopping: bool | None = None  # somebody stops its unit or container; False: it ended or failed by itself
    shutdown_age: float | None = None
    deaths: tuple[tuple[float, str], ...] = ()  # (age, rank), oldest first
    oom_age: float | None = None  # since the kernel last killed a process of the node for memory
    live_ranks: int = 0
    missing: int = 0  # ranks this node expects and that never came
    missing_ranks: tuple[str, ...] = ()  # their names, where they are known
    fatal_age: float | None = None
    ranks: tuple[RankEvidence, ...] = ()
    threads_readable: bool = True
    cpu_readable: bool = True  # of every live rank
    frozen: bool = False
    stale_lock: bool = False  # it waits for a lock that nobody can hold
    held_lock: bool = False  # it waits for a lock that somebody may hold
    port_foreign: bool = False
    demand: float | None = None  # requests running and waiting; None = unknown
    unserved_age: float | None = None  # work is owed, and no token or finished request came for so long
    tokens_age: float = math.inf  # since the last token or finished request
    tokens_counted: bool = False  # the server's own counters say so, not only its stats lines
    paused: bool = False  # sleep mode
    timeouts: int = 0  # of the health endpoint, in a row
    timeouts_span: float = 0.0  # from the first of them to the last
    cards_rest: bool | None = None  # its GPUs do no work; None: not known
    spins: tuple[Spin, ...] = ()  # ranks whose card spins
    cards_work: bool = False  # a card of it was seen neither at rest nor spinning within a window
    busy: frozenset[str] = frozenset()  # ranks and engines that used CPU within a window
    lost_cards: tuple[tuple[float, str], ...] = ()  # (age, rank that was on it), the first loss first
    cards_reason: str = ""  # why a channel of its GPUs cannot be read: shared, learning, or one of READ_REASONS
    driver_hangs: bool = False  # a call into the GPU driver has not returned for a window

    def moving(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(c.channel for c in self.channels if c.channel in names and c.state == "moving")

    @property
    def ambiguous_moving(self) -> tuple[str, ...]:
        return self.moving(AMBIGUOUS_CHANNELS)

    @property
    def strong_moving(self) -> tuple[str, ...]:
        return self.moving(STRONG_CHANNELS)

    def is_flat(self, channel: str) -> bool:
        """Readable, and not moving."""
        return any(c.channel == channel and c.state == "flat" for c in self.channels)

    def is_unread(self, channel: str) -> bool:
        """Not readable any more, or not known yet."""
        return any(c.channel == channel and c.state in ("absent", "unreadable") for c in self.channels)

    @property
    def ends_orderly(self) -> bool:
        """The server said that it ends, or somebody stops its unit or container."""
        return self.shutdown_age is not None or self.stopping is True

    @property
    def rank_count(self) -> int:
        """Ranks that came or should have come."""
        return self.missing + sum(1 for rank in self.ranks if not rank.is_engine)


def gather(timeline: ServerTimeline, now: float, thresholds: Thresholds, progress_age: float | None = None) -> Evidence:
    """Evidence of one server at `now`.  `progress_age` replaces the observed one (`check`, dated evidence)."""
    startup, server, window = timeline.startup, timeline.server, thresholds.window
    sight = sight_of(timeline, now, window)
    ready = timeline.was_ready or _is_ready(timeline, sight)
    unread = timeline.cards.unread(timeline.name, now) if timeline.cards is not None else {}
    ranks = tuple(_rank(timeline, name, now, unread.get(name, frozenset())) for name in timeline.watched_names)
    missing, missing_names = _missing(timeline)
    locks = _locks(timeline, now)
    timeouts = _timeouts(timeline, now)
    tokens_at, owed = timeline.moves.get("tokens"), timeline.owed_since
    channels = tuple(channel_of(timeline, name, sight, ready) for name in CHANNELS)
    return Evidence(
        role=server.role if server else "server",
        nnodes=server.nnodes if server else 1,
        known=(server is None or server.starts != 0) and _value(timeline, now, signals.SERVER_STARTS, fresh=False) != 0,
        ready=ready,
        phase="ready" if ready and startup.phase != "stopped" else startup.phase,
        phase_age=now - max(startup.phase_since, timeline.anchor),
        progress_age=observed_progress_age(timeline, sight) if progress_age is None else progress_age,
        stretch=timeline.stretch(thresholds.stall_after),
        channels=channels,
        storage_readable=sight.storage,
        watched_age=sight.watched_age if progress_age is None else math.inf,
        log=sight.log,
        log_speaks=startup.is_told,
        gpu_readable=any(c.channel in ("gpu_memory", "gpu_power") and c.state in ("moving", "flat") for c in channels),
        blinks=sight.was_whole and not (sight.storage and sight.log == "readable"),
        unreadable_reason=sight.storage_reason,
        log_reason=sight.log_reason,
        autotune_open=bool(startup.open_autotunes),
        compile_open=startup.compiles,
        root_gone_age=_age(now, timeline.root_gone_at),
        scope_alive=_is_one(_value(timeline, now, signals.SERVER_SCOPE_ALIVE, fresh=False)),
        stopping=_is_one(_value(timeline, now, signals.SERVER_STOPPING, fresh=False)),
        shutdown_age=_age(now, startup.shutdown_at),
        deaths=tuple((now - at, rank) for at, rank in timeline.deaths),
        oom_age=_age(now, timeline.oom_killed_at),
        live_ranks=sum(1 for rank in ranks if rank.alive and not rank.is_engine),
        missing=missing,
        missing_ranks=missing_names,
        fatal_age=_age(now, startup.fatal_at),
        ranks=ranks,
        threads_readable=_threads_readable(timeline, sight),
        cpu_readable=_cpu_readable(timeline, sight),
        frozen=_value(timeline, now, signals.SERVER_FROZEN) == 1,
        stale_lock=True in locks,
        held_lock=False in locks,
        port_foreign=any(t.is_readable(now) and t.value for t in timeline.of(signals.PORT_FOREIGN).values()),
        demand=timeline.demand(now),
        unserved_age=None if owed is None else now - max(owed, owed if tokens_at is None else tokens_at),
        tokens_age=math.inf if tokens_at is None else now - tokens_at,
        tokens_counted=_all_fresh(timeline, now, *TOKENS),
        paused=_value(timeline, now, signals.SERVER_PAUSED) == 1,
        timeouts=timeouts.in_a_row,
        timeouts_span=timeouts.span(now),
        busy=frozenset(name for name, at in timeline.busy_at.items() if now - at <= window),
        **_of_cards(timeline, now, progress_age or 0.0),
    )


def _of_cards(timeline: ServerTimeline, now: float, dated: float) -> dict[str, Any]:
    """What its GPUs tell; nothing where there are none.  What spins as long as we watch spins for `dated` seconds."""
    cards, name = timeline.cards, timeline.name
    if cards is None:
        return {}
    if not cards.has(name):
        return {"driver_hangs": cards.driver_hangs(name, now)}  # for whoever asks
    return {
        "cards_rest": cards.at_rest(name, now),
        "spins": tuple(replace(spin, age=max(spin.age, dated)) for spin in cards.spins(name, now)),
        "cards_work": cards.works(name, now),
        "lost_cards": cards.lost(name, now),
        "driver_hangs": cards.driver_hangs(name, now),
        "cards_reason": cards.why_unreadable(name, now),
    }


def _age(now: float, at: float | None) -> float | None:
    return None if at is None else now - at


def _value(timeline: ServerTimeline, now: float, signal: Signal, fresh: bool = True) -> float | None:
    """The value of a signal that has no label but the server; None when it cannot be read."""
    track = timeline.track(signal, timeline.name)
    return track.value if track is not None and (not fresh or track.is_fresh(now)) else None


def _all_fresh(timeline: ServerTimeline, now: float, *wanted: Signal) -> bool:
    """Whether every series there is of these signals can be read, and there is one."""
    tracks = [track for signal in wanted for track in timeline.of(signal).values()]
    return bool(tracks) and all(track.is_readable(now) for track in tracks)


def _timeouts(timeline: ServerTimeline, now: float) -> Timeouts:
    """Time-outs in a row; none when nobody asks any more."""
    track = timeline.track(signals.HEALTH_TIMEOUTS, timeline.name, "health")
    return timeline.timeouts if track is not None and track.is_readable(now) else Timeouts()


def _is_one(value: float | None) -> bool | None:
    return None if value is None else value == 1


# --- silence -----------------------------------------------------------------------------------------------


def observed_progress_age(timeline: ServerTimeline, sight: Sight) -> float:
    """Seconds of silence of all strong channels, never more than we have watched.

    While storage and log are read the silence ends with the last look at them: what moved since then is not
    known yet (a collector that is late, our own pause).  While they are not, it goes on: it is `unknown` then.
    """
    last = timeline.last_strong_move
    begin = timeline.anchor if last is None else max(timeline.anchor, last)
    end = sight.now if sight.oldest_look is None else min(sight.now, sight.oldest_look)
    return max(0.0, end - begin)


# --- ready -------------------------------------------------------------------------------------------------


def _is_ready(timeline: ServerTimeline, sight: Sight) -> bool:
    return timeline.startup.ready_at is not None or _healthy(timeline, sight) or _worked_then_flat(timeline, sight)


def _healthy(timeline: ServerTimeline, sight: Sight) -> bool:
    """A health 200 makes ready; the list of models does so only where no log can tell better."""
    if timeline.server is not None and timeline.server.role == "embedded":
        return False
    if any(track.is_readable(sight.now) and track.value for track in timeline.of(signals.PORT_FOREIGN).values()):
        return False  # somebody else may have answered
    for endpoint in ("health", "models"):
        track = timeline.track(signals.HEALTH_STATUS, timeline.name, endpoint)
        speaks = endpoint == "health" or sight.log != "readable"
        if speaks and track and track.value == 200 and track.is_fresh(sight.now):
            return True
    return False


def _worked_then_flat(timeline: ServerTimeline, sight: Sight) -> bool:
    """An embedded engine without a log, or with one of its program's alone, is ready when a rank has worked and memory
    is flat."""
    server = timeline.server
    has_log = sight.log == "unreadable" or (sight.log == "readable" and timeline.startup.is_told)
    if server is None or server.role != "embedded" or has_log:
        return False
    memory, cpu = timeline.moves.get("memory"), timeline.moves.get("cpu")
    return memory is not None and cpu is not None and sight.now - memory > sight.window


# --- ranks -------------------------------------------------------------------------------------------------


def _threads_readable(timeline: ServerTimeline, sight: Sight) -> bool:
    """Whether the kernel tells what the threads of every live rank wait in."""
    waits = [timeline.waits.get(label) for label in sight.live]
    return bool(waits) and all(each is not None and each.is_fresh(sight.now) and each.is_readable for each in waits)


def _cpu_readable(timeline: ServerTimeline, sight: Sight) -> bool:
    tracks = [timeline.track(signals.CPU_SECONDS, timeline.name, label) for label in sight.live]
    return bool(tracks) and all(track is not None and track.is_readable(sight.now) for track in tracks)


def _rank(timeline: ServerTimeline, name: str, now: float, unread: frozenset[str]) -> RankEvidence:
    waits = timeline.waits.get(name)
    if waits is not None and not waits.is_fresh(now):
        waits = None
    progress_age = rank_progress_age(timeline, name, now)
    traced = timeline.track(signals.RANK_TRACED, timeline.name, name)
    return RankEvidence(
        rank=name,
        alive=timeline.is_alive(name),
        markers=len(timeline.markers.get(name, ())),
        main_wait=waits.usual_main() if waits else None,
        waits=waits.usual_classes() if waits and waits.is_readable else None,
        progress_age=now - timeline.anchor if progress_age is None else progress_age,
        stopped_age=_age(now, waits.stopped_since) if waits else None,
        disk_age=_age(now, waits.disk_since) if waits else None,
        traced=traced is not None and traced.value == 1 and traced.is_fresh(now),
        is_engine=name.startswith("engine"),
        unread=unread,
    )


def rank_progress_age(timeline: ServerTimeline, rank: str, now: float) -> float | None:
    """Seconds since the rank's own last strong move or progress line; None when it made none yet."""
    startup = timeline.startup.ranks.get(rank)
    moments = [timeline.rank_moves.get(rank), startup.last_progress if startup else None]
    known = [moment for moment in moments if moment is not None]
    return max(0.0, now - max(known)) if known else None


def _missing(timeline: ServerTimeline) -> tuple[int, tuple[str, ...]]:
    """How many ranks of this node never came, and their names where they are known.

    Nothing is missed before the first rank came, nor while a process has not said yet which rank it is.
    """
    server, seen = timeline.server, timeline.rank_names
    if server is None or server.role == "embedded" or not (seen or server.expected_ranks):
        return 0, ()
    if server.expected_ranks:
        came = frozenset(seen)
        names = tuple(name for name in server.expected_ranks if name not in came)
        return len(names), names
    missing = server.ranks_expected - len(seen)
    if missing <= 0 or any(process.rank == "worker" for process in server.processes):
        return 0, ()
    return missing, _gaps(server, seen)


MOST_NAMED = 1024
"""Ranks of one node that are missed by name."""


def _gaps(server: Server, seen: list[str]) -> tuple[str, ...]:
    """Which of `TP0`, `TP1` … are missing; empty where the ranks have other names, or more are asked for than any
    node has (an argument may say anything)."""
    if server.ranks_expected > MOST_NAMED or not all(re.fullmatch(r"TP\d+", name) for name in seen):
        return ()
    first = server.node_rank * server.ranks_expected
    expected = [f"TP{number}" for number in range(first, first + server.ranks_expected)]
    return tuple(name for name in expected if name not in seen) if set(seen) <= set(expected) else ()


# --- locks -------------------------------------------------------------------------------------------------


def _locks(timeline: ServerTimeline, now: float) -> list[bool]:
    """Per lock the server may wait for: whether nobody can hold it."""
    return [
        _is_stale(timeline.track(signals.LOCK_HELD, *labels), now)
        for labels, track in timeline.of(signals.LOCK_AGE).items()
        if track.is_readable(now)
    ]


def _is_stale(held: Track | None, now: float) -> bool:
    """Only a lock that is said to be unheld; one of which nothing is said may be held elsewhere."""
    return held is not None and held.value == 0 and held.is_fresh(now)
