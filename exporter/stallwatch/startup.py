"""Log events of one start, folded into phases, markers and load progress.

Pure: the same fold serves the timeline (live and replay) and `parse`.  See docs/VERDICTS.md, "Phases".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PHASE_OF_EVENT: Mapping[str, str] = {
    "start": "spawned",
    "args": "spawned",
    "dist_init_begin": "distributed_init",
    "dist_init_end": "distributed_init",
    "load_begin": "loading_weights",
    "load_progress": "loading_weights",
    "download_progress": "loading_weights",
    "draft_load_begin": "loading_weights",
    "load_end": "post_load",
    "draft_load_end": "post_load",
    "post_load": "post_load",
    "memory_pool": "memory_pool",
    "profile": "memory_pool",
    "compile_begin": "compiling",
    "compile_progress": "compiling",
    "compile_end": "compiling",
    "autotune_begin": "compiling",
    "autotune_progress": "compiling",
    "autotune_end": "compiling",
    "capture_begin": "capturing_graphs",
    "capture_progress": "capturing_graphs",
    "capture_end": "capturing_graphs",
    "warmup_begin": "warming_up",
    "warmup_progress": "warming_up",
    "warmup_end": "warming_up",
    "listening": "listening",
    "ready": "ready",
    "shutdown": "stopped",
}

COUNTERS = frozenset(event for event in PHASE_OF_EVENT if event.endswith("_progress"))
"""Events that carry k of n: progress only when k rises, or a new bar begins."""

MARKERS = frozenset(PHASE_OF_EVENT) - COUNTERS - {"start", "args", "listening", "ready", "shutdown"}
"""Start-up markers: what a rank passes on its way; always progress."""

PROGRESS_EVENTS = MARKERS | COUNTERS | {"start", "args", "listening", "ready"}

FIRST_RANK = "TP0"
"""Owner of a bar or marker that names no rank, when the server has ranks at all."""

MOST_RANKS = 1024

SHARED = "shared"
"""Field of a marker that only one rank of a server writes: a rank that did not write it is not behind."""

NAMELESS = "nameless"
"""Field of a marker of a rank that is not the first one, and not known: it says nothing of any rank that is."""

MOST_SHARDS = 10_000
"""A counter beyond this counts no shards: bytes, most often."""

SAME_TROUBLE_SECONDS = 60.0
"""A fatal line later than this after another one is another trouble."""

EVERY_RANK = ""
"""Owner of what a line without a rank opens: it may speak of any."""

LOADED = ("load_end", "post_load")
"""Markers that say that a rank's weights are read."""


@dataclass(slots=True)
class RankStartup:
    """How far one rank came.  `load_progress` 0..1, None = nothing known."""

    phase: str = "spawned"
    markers: set[str] = field(default_factory=set)
    load_progress: float | None = None
    last_progress: float | None = None  # in the clock of the events
    bars: dict[str, float] = field(default_factory=dict)
    is_loaded: bool = False
    is_named: bool = False  # a line named it; else it is only whose lines without a name are

    @property
    def load_counts(self) -> tuple[int, int] | None:
        """`(41, 64)`: shards (or other parts) read, and all.  None where the log tells a share, bytes, or nothing."""
        done, share = self.bars.get("load_progress"), self.load_progress
        if self.is_loaded or not done or not share or done == share or done > MOST_SHARDS:
            return None
        return round(done), round(done / share)


@dataclass(slots=True)
class Startup:
    """The present start, as its log tells it.  Times are in the clock of the events."""

    phase: str = "spawned"
    phase_since: float = 0.0
    starts: int = 0
    ready_at: float | None = None
    fatal_at: float | None = None
    fatal_rank: str | None = None
    shutdown_at: float | None = None
    last_progress: float | None = None
    last_dated: float | None = None
    version: str = ""
    ranks: dict[str, RankStartup] = field(default_factory=dict)
    open_autotunes: set[str] = field(default_factory=set)
    open_compiles: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)

    @property
    def is_told(self) -> bool:
        """Whether any line said where the start is.  A program's own lines around an engine that is silent do not."""
        return not self.seen.isdisjoint(PHASE_OF_EVENT)

    def rank(self, name: str | None) -> RankStartup:
        """What is known of a rank.  A log that names more than MOST_RANKS is not believed: the rest is not kept."""
        state = RankStartup("ready" if self.ready_at is not None else "spawned", is_named=name is not None)
        owner = name or FIRST_RANK
        if len(self.ranks) >= MOST_RANKS:
            return self.ranks.get(owner, state)
        found = self.ranks.setdefault(owner, state)
        found.is_named = found.is_named or name is not None
        return found

    @property
    def compiles(self) -> bool:
        """Whether a rank, or the server, is in a compile whose end was not said, and has not gone on to another phase.

        Many frameworks never say the end: what comes after it does.
        """
        phases = (self.ranks[owner].phase if owner in self.ranks else self.phase for owner in self.open_compiles)
        return "compiling" in phases

    def begins_anew(self, event: str) -> bool:
        """Whether `event` opens another start: `start`, or `args` when this start is past its own."""
        if event == "start":
            return bool(self.seen - {"start"}) or "start" in self.seen
        return event == "args" and bool(self.seen - {"start"})

    def apply(
        self,
        event: str,
        rank: str | None,
        fields: Mapping[str, float | str],
        at: float,
        dated: float | None = None,
    ) -> bool:
        """Fold one event in; True when it is progress.

        Unknown fields are ignored.  A *_progress event without a usable counter is no progress.
        """
        if self.begins_anew(event):
            self._reset(at)
        if event in ("start", "args") and not self.seen:
            self.starts += 1
            self.phase_since = at
        self.seen.add(event)
        self.version = str(fields.get("version") or self.version)
        moved = self._counter_moves(event, rank, fields) if event in COUNTERS else event in PROGRESS_EVENTS
        if event in PHASE_OF_EVENT and not fields.get(NAMELESS):
            self._enter(event, rank, at, bool(fields.get(SHARED)))
        self._note(event, rank, at)
        if moved:
            self.last_progress = at
            self.last_dated = dated if dated is not None else self.last_dated
            if rank is not None or event in COUNTERS:
                self.rank(rank).last_progress = at
        return moved

    def _reset(self, at: float) -> None:
        starts = self.starts
        self.__init__()  # type: ignore[misc]
        self.starts, self.phase_since = starts, at

    def _counter_moves(self, event: str, rank: str | None, fields: Mapping[str, float | str]) -> bool:
        done, total, ratio = fields.get("done"), fields.get("total"), fields.get("ratio")
        if isinstance(done, (int, float)) and isinstance(total, (int, float)) and total > 0:
            value, share = float(done), float(done) / float(total)
        elif isinstance(ratio, (int, float)):
            value = share = float(ratio)
        else:
            return False
        state = self.rank(rank)
        before = state.bars.get(event)
        state.bars[event] = value
        if event == "load_progress" and not state.is_loaded:
            state.load_progress = min(1.0, share)
        return before is None or value != before

    def _enter(self, event: str, rank: str | None, at: float, shared: bool) -> None:
        """Set the phase of the rank, and of the server when no rank is ahead of this one."""
        phase = PHASE_OF_EVENT[event]
        whole_server = event in ("start", "args", "listening", "ready", "shutdown")
        if not whole_server:
            state = self.rank(rank)
            if event == "download_progress" and state.is_loaded:
                return  # shards are brought into the page cache behind its back
            state.phase = phase if self.ready_at is None else "ready"
            if event in MARKERS and not shared:
                state.markers.add(event)
            if event in LOADED:
                state.load_progress, state.is_loaded = 1.0, True
            named = [other for other in self.ranks.values() if other.is_named]  # else there is one, without a name
            leader = max((len(other.markers) for other in named), default=0)
            if state.is_named and len(state.markers) < leader:
                return
        if phase != self.phase and not (self.ready_at is not None and phase != "stopped"):
            self.phase, self.phase_since = phase, at
        if event == "ready":
            for state in self.ranks.values():
                state.phase = "ready"

    def _is_first_fatal(self, at: float) -> bool:
        """Of a trouble: what follows within a minute, or after the shutdown line, is the same one."""
        again = self.fatal_at is not None and at - self.fatal_at > SAME_TROUBLE_SECONDS and self.shutdown_at is None
        return self.fatal_at is None or again

    def _note(self, event: str, rank: str | None, at: float) -> None:
        if event == "ready" and self.ready_at is None:
            self.ready_at = at
        elif event == "fatal" and self._is_first_fatal(at):
            self.fatal_at, self.fatal_rank = at, rank
        elif event == "shutdown" and self.shutdown_at is None:
            self.shutdown_at = at
        elif event in ("autotune_begin", "autotune_progress"):
            self.open_autotunes.add(rank or EVERY_RANK)
        elif event in ("compile_begin", "compile_progress"):
            self.open_compiles.add(rank or EVERY_RANK)
        elif event in ("autotune_end", "compile_end"):
            for opened in (self.open_autotunes, self.open_compiles):
                opened -= {rank, EVERY_RANK} if rank else set(opened)
