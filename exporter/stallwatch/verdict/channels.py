"""What of a server can be read at a moment, and how its channels are.  Pure.

Everything too old is unreadable: a verdict never rests on a stale number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .. import signals
from ..model import ChannelState, Signal
from ..server_timeline import ServerTimeline
from ..tracks import Track

_STORAGE_SIGNALS = (signals.STORAGE_READ, signals.READ_BYTES)
_BESIDE_STORAGE = (signals.PAGE_FAULTS, signals.WRITTEN_BYTES, signals.RESIDENT_MEMORY)
TOKENS = (signals.GENERATED_TOKENS, signals.PROMPT_TOKENS, signals.FINISHED_REQUESTS)


@dataclass(frozen=True, slots=True)
class Sight:
    """What of one server can be read at `now`, on the clock of the timeline."""

    now: float
    window: float
    live: tuple[str, ...]  # labels of the live ranks; of every process while there is no rank
    storage: bool  # and all that was read beside it
    storage_reason: str | None
    watched_age: float  # since when storage is watched on all of them; inf while there is nothing to watch
    oldest_look: float | None  # the last look at the storage or log that was looked at longest ago
    log: str  # readable unreadable absent
    log_reason: str | None
    was_whole: bool  # storage and log could be read a moment ago, if not now


def sight_of(timeline: ServerTimeline, now: float, window: float) -> Sight:
    live = _live_labels(timeline, now)
    stored = [timeline.track(signal, timeline.name, label) for label in live for signal in _STORAGE_SIGNALS]
    watched = [*stored, *_beside_storage(timeline, live)]
    unread = [track for track in watched if track is None or not track.is_readable(now)]
    since = [track.known_since for track in stored if track is not None and track.known_since is not None]
    logs = timeline.of(signals.LOG_BYTES).values()
    read_logs = [track for track in logs if track.is_readable(now)]
    read = [track for track in watched if track is not None and track.is_readable(now)] if unread else watched
    looks = [track.read_at for track in (*read, *read_logs) if track is not None and track.read_at is not None]
    return Sight(
        now=now,
        window=window,
        live=live,
        storage=bool(live) and not unread,
        storage_reason=unread[0].reason if unread and unread[0] is not None else None,
        watched_age=now - max(since) if since else math.inf,
        oldest_look=min(looks, default=None),
        log="readable" if read_logs else "unreadable" if logs else "absent",
        log_reason=min((track.reason for track in logs if track.reason is not None), default=None),
        was_whole=all(track is not None and track.was_readable(now) for track in unread)
        and (bool(read_logs) or any(track.was_readable(now) for track in logs)),
    )


def _beside_storage(timeline: ServerTimeline, live: tuple[str, ...]) -> Iterator[Track]:
    """What else was followed of these processes and of their children: a channel that fell silent is not flat."""
    for signal in _BESIDE_STORAGE:
        yield from (track for labels, track in timeline.of(signal).items() if track.is_followed and labels[1] in live)
    yield from (track for track in timeline.of(signals.CHILD_CPU).values() if track.is_followed)


def _live_labels(timeline: ServerTimeline, now: float) -> tuple[str, ...]:
    ranks = tuple(name for name in timeline.rank_names if timeline.is_alive(name) is not False)
    if ranks:
        return ranks
    known = {labels[1] for labels in timeline.of(signals.CPU_SECONDS)}
    return tuple(sorted(name for name in known if timeline.is_alive(name) is not False))


def any_fresh(timeline: ServerTimeline, now: float, *wanted: Signal) -> bool:
    """Whether a series of one of these signals can be read."""
    return any(track.is_readable(now) for signal in wanted for track in timeline.of(signal).values())


def channel_of(timeline: ServerTimeline, name: str, sight: Sight, ready: bool) -> ChannelState:
    readable = _CHANNEL_READABLE[name](timeline, sight, ready)
    if readable is None:
        return ChannelState(name, "absent", None)
    if not readable:
        return ChannelState(name, "unreadable", None)
    last = timeline.moves.get(name)
    age = None if last is None else max(0.0, sight.now - last)
    return ChannelState(name, "moving" if age is not None and age <= sight.window else "flat", age)


def _cards(channel: str) -> Callable[[ServerTimeline, Sight, bool], bool | None]:
    def readable(timeline: ServerTimeline, sight: Sight, ready: bool) -> bool | None:
        return None if timeline.cards is None else timeline.cards.channel(timeline.name, channel, sight.now)

    return readable


def _tokens(timeline: ServerTimeline, sight: Sight, ready: bool) -> bool | None:
    if not ready:
        return None
    return True if timeline.stats.says_speed(sight.now) or any_fresh(timeline, sight.now, *TOKENS) else None


_CHANNEL_READABLE: Mapping[str, Callable[[ServerTimeline, Sight, bool], bool | None]] = {
    "log": lambda timeline, sight, ready: None if sight.log == "absent" else sight.log == "readable",
    "storage": lambda timeline, sight, ready: sight.storage,
    "memory": lambda timeline, sight, ready: any_fresh(timeline, sight.now, signals.PAGE_FAULTS),
    "children": lambda timeline, sight, ready: any_fresh(timeline, sight.now, signals.CHILD_CPU),
    "gpu_memory": _cards("gpu_memory"),
    "gpu_bus": _cards("gpu_bus"),
    "gpu_power": _cards("gpu_power"),
    "tokens": _tokens,
    "cpu": lambda timeline, sight, ready: any_fresh(timeline, sight.now, signals.CPU_SECONDS),
    "gpu_utilization": _cards("gpu_utilization"),
}
"""True readable, False unreadable, None absent (does not apply)."""
