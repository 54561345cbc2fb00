"""What a recording tells of one server, and what follows from it where it says nothing.  Pure.

Live, the `processes` collector says that a server and its ranks live, and the `logs` collector that a log can be
read.  A recording need not (docs/REFERENCE.md, "Recordings"): then it follows from what is read at all.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from .. import signals
from ..model import Reading, Signal, is_rank_name
from ..tracks import STALE_AFTER_GAPS, Track
from .format import RecordedServer

ROOT = "main"
"""The front end that is the server's first process, where front ends are named singly."""

LOG = "log"
"""Label of a log that no series is about."""

NEVER_STARTED = 0.0
"""The start of a configured server that has not come yet."""

_EPSILON = 1e-6
_SAME_START_SECONDS = 0.5

Series = tuple[str, tuple[str, ...]]
"""Name of a signal, labels."""


@dataclass(slots=True)
class Told:
    """One server of a recording.  A track of `fronts` and `ranks` says when the process was read; its value is
    None when it was asked for and has vanished."""

    name: str
    recorded: RecordedServer
    has_lines: bool  # any event or line of it occurs
    started: float | None = None
    starts: int = 1
    is_begun: bool = False
    fronts: dict[str, Track] = field(default_factory=dict)
    ranks: dict[str, Track] = field(default_factory=dict)  # and engines
    shares: dict[Series, dict[str, Reading]] = field(default_factory=dict)  # sum -> front end -> its share
    says_alive: bool = False  # a series says whether the server lives
    says_log: bool = False  # a series says whether its log can be read
    ranks_said: dict[str, float] = field(default_factory=dict)  # rank -> when a series last said whether it lives
    is_root_alive: bool = True

    def start(self, started: float) -> bool:
        """Whether it is another start than known; then what was known of its processes is over."""
        if self.started is not None and abs(started - self.started) <= _SAME_START_SECONDS:
            return False
        if self.started is not None:
            self.starts += self.started != NEVER_STARTED
            self.fronts, self.ranks, self.shares, self.ranks_said = {}, {}, {}, {}
            self.is_root_alive = True
        self.started = started
        return True

    def note_process(self, name: str, is_front: bool, is_there: bool, at: float, interval: float) -> None:
        """A process was read, or asked for and not there."""
        tracks = self.fronts if is_front else self.ranks
        value, reason = (1.0, None) if is_there else (None, "vanished")
        tracks.setdefault(name, Track()).put(value, reason, at, interval, at)

    def last_read(self, but: Container[str] = ()) -> float:
        """When anything about a process of the server was last read, leaving some front ends out."""
        tracks = [*self.ranks.values(), *(track for name, track in self.fronts.items() if name not in but)]
        times = [track.read_at for track in tracks if track.read_at is not None]
        return max((*times, *self.ranks_said.values()), default=-math.inf)

    def conclude(self, now: float, others_read: float) -> Iterator[Reading]:
        """What follows at a tick.  `others_read`: when a process of another server was last read."""
        if not self.says_alive:
            self.is_root_alive = self._root_lives(now, others_read)
            yield signals.SERVER_ALIVE.read(float(self.is_root_alive), self.name)
        for rank, track in self.ranks.items():
            if rank not in self.ranks_said and _is_watched(rank) and track.is_fresh(now):
                is_there = track.value is not None
                alive = signals.RANK_ALIVE
                yield alive.read(1.0, self.name, rank) if is_there else alive.missing("vanished", self.name, rank)
        if not self.says_log:
            log = self.has_lines if self.recorded.log is None else self.recorded.log
            if log == "unreadable":
                yield signals.LOG_BYTES.missing("permission", self.name, LOG)
            elif log:
                yield signals.LOG_BYTES.read(0.0, self.name, LOG)

    def _root_lives(self, now: float, others_read: float) -> bool:
        """The root is `main`, else any front end.  It is gone when it is not read any more while others are."""
        roots = {ROOT: self.fronts[ROOT]} if ROOT in self.fronts else self.fronts
        if not roots or any(track.is_readable(now) for track in roots.values()):
            return True
        still_read = max(self.last_read(but=roots), others_read)
        return self.is_root_alive and not all(_is_gone(track, still_read) for track in roots.values())

    # --- front ends that are named singly

    def share(self, front: str, reading: Reading, total: Series) -> None:
        """Keep a front end's share of a sum; what an ended one had counted stays in it."""
        shares = self.shares.setdefault(total, {})
        ended = reading.reason == "vanished" and reading.signal.kind == "counter"
        if not (ended and front in shares):
            shares[front] = reading

    def total(self, signal: Signal, labels: tuple[str, ...], now: float) -> Reading:
        """The sum over the front ends; not readable while one of them is not."""
        shares = self.shares[signal.name, labels]
        present = [
            share for front, share in shares.items() if signal.kind == "counter" or self.fronts[front].is_readable(now)
        ]
        reasons = [share.reason for share in (present or shares.values()) if share.reason]
        if reasons:
            return signal.missing(min(reasons), *labels)
        return sum_of(present, signal, labels)


def sum_of(shares: Iterable[Reading], signal: Signal, labels: tuple[str, ...]) -> Reading:
    """The sum of what could be read; of numbers so large that no float holds their sum it is none."""
    total = sum(share.value for share in shares if share.value is not None)
    return signal.read(total, *labels) if math.isfinite(total) else signal.missing("error", *labels)


def _is_watched(name: str) -> bool:
    """Ranks and engines: processes of which it matters whether they live."""
    return is_rank_name(name) or name.startswith("engine")


def _is_gone(track: Track, still_read: float) -> bool:
    """It has vanished, or was left out for longer than it ever is, while others were read."""
    last = 0.0 if track.read_at is None else track.read_at
    return still_read >= last + (0.0 if track.value is None else STALE_AFTER_GAPS * track.usual_gap + _EPSILON)
