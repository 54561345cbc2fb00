"""Tracks: one series each, as its last value and when it last moved, and what the threads of a rank wait in.

Pure, and constant memory per series: a track keeps no history but the samples of one window.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

STALE_AFTER_GAPS = 3
"""Usual gaps without a reading after which a track says nothing any more."""


@dataclass(slots=True)
class Track:
    """One series.  `value` None = unreadable at the last look (`reason`); `samples` reach back one window.

    Of looks in a row that read the same the last one is kept.
    """

    value: float | None = None
    reason: str | None = None
    read_at: float | None = None
    usual_gap: float = 0.0
    known: float | None = None  # the last value that could be read
    known_at: float | None = None  # when that was read
    known_since: float | None = None  # since when every amount is seen: the first value, or where it began anew
    rate: float | None = None  # per second, between the last two neighbouring readings
    samples: deque[tuple[float, float]] = field(default_factory=deque)
    is_followed: bool = False  # read at two moments at least
    _measured: float = 0.0
    _rate_seconds: float = 0.0  # what `rate` is a mean over

    def put(self, value: float | None, reason: str | None, at: float, interval: float, measured: float) -> None:
        """Take one reading.  `measured`: the same moment on a clock that counts our pauses, for rates."""
        earlier, gap = self.read_at, 0.0
        real_gap = measured - self._measured
        self.rate = None
        if earlier is not None:
            gap = at - earlier
            if value is not None and self.value is not None and real_gap > 0:
                self.rate = (value - self.value) / real_gap
            self.is_followed = self.is_followed or gap > 0
        self._rate_seconds = real_gap
        if gap > interval or self.usual_gap != interval:  # else it stays what it is, as nearly always
            self.usual_gap = usual(self.usual_gap, gap, interval)
        self.value, self.reason, self.read_at, self._measured = value, reason, at, measured
        if value is not None:
            self.known, self.known_at = value, at
            if self.known_since is None:
                self.known_since = at

    def rate_over(self, least_seconds: float) -> float | None:
        """The rate as if so much time lay between the readings at least.

        A look that takes long on a busy machine is over just before the next: what a process used in a whole interval
        then seems to have come in a moment.
        """
        if self.rate is None or self._rate_seconds >= least_seconds:
            return self.rate
        return self.rate * self._rate_seconds / least_seconds

    def is_fresh(self, now: float) -> bool:
        return self.read_at is not None and now - self.read_at <= STALE_AFTER_GAPS * self.usual_gap + 1e-6

    def is_readable(self, now: float) -> bool:
        return self.value is not None and self.is_fresh(now)

    def was_readable(self, now: float) -> bool:
        """Readable now, or a moment ago: one look that failed makes nothing old."""
        return self.known_at is not None and now - self.known_at <= STALE_AFTER_GAPS * self.usual_gap + 1e-6

    def begins_anew(self, at: float) -> None:
        """The counter fell: what it counted before is gone."""
        self.samples.clear()
        self.known_since = at

    def gathers(self, value: float, at: float, floor: float, window: float, two_ways: bool = False) -> bool:
        """Whether the amount since the last move reached the floor within one window.

        After a time without readings longer than the window it is not known when the amount came together:
        then it counts, for a wrong page is worse than a late one.
        """
        if self.stands(value, at):
            return False
        samples = self.samples
        while len(samples) > 1 and at - samples[0][0] > window:
            samples.popleft()
        if two_ways:
            moved = any(abs(value - earlier) >= floor for _, earlier in samples)
        else:
            moved = any(value - earlier >= floor for _, earlier in samples)
        if moved:
            samples.clear()
        elif samples and samples[-1][1] == value:
            samples.pop()  # of a time in which it stood still the last look says all
        samples.append((at, value))
        return moved

    def stands(self, value: float, at: float) -> bool:
        """Whether it stood still for as long as it is remembered: so do most of them, most of the time."""
        samples = self.samples
        if len(samples) != 1 or samples[0][1] != value:
            return False
        samples[0] = at, value
        return True


def put_again(tracks: Iterable[Track], at: float, interval: float, measured: float) -> None:
    """Put into each track the very value that was put last, and have its samples gather it: what `put` and `gathers`
    do, in one go, for so it is with most series at most looks.  What was put at this look already is left."""
    for track in tracks:
        real_gap = measured - track._measured
        if not real_gap:
            continue
        gap = at - (track.read_at or 0.0)
        if gap > 0:
            track.is_followed = True
        if gap > interval or track.usual_gap != interval:
            track.usual_gap = usual(track.usual_gap, gap, interval)
        track.read_at, track._measured, track._rate_seconds = at, measured, real_gap
        if track.value is None:
            track.rate = None
            continue
        track.rate = 0.0 if real_gap > 0 else None
        track.known_at = at
        if track.samples:
            track.samples[-1] = at, track.samples[-1][1]


def usual(before: float, gap: float, interval: float) -> float:
    """The usual gap between looks after one more of them; a single long one does not count for much."""
    return max(interval, min(0.7 * before + 0.3 * gap, 4 * before) if gap > 0 else before)


@dataclass(frozen=True, slots=True)
class WaitSample:
    """What the threads of one rank waited in at one look."""

    at: float
    main: str | None
    classes: frozenset[str]


@dataclass(slots=True)
class Waits:
    """Wait classes of one rank (or engine) over the last window."""

    samples: deque[WaitSample] = field(default_factory=deque)
    counts: Mapping[str, int] | None = None
    read_at: float | None = None
    stopped_since: float | None = None
    disk_since: float | None = None
    usual_gap: float = 0.0
    _measured: float = 0.0

    def put(
        self,
        counts: Mapping[str, int] | None,
        main: str | None,
        at: float,
        window: float,
        interval: float,
        measured: float,
    ) -> None:
        """Take one look; `counts` None = unreadable.  After a gap (on the clock of `measured`, which counts our
        own pauses) nothing is known to have lasted."""
        self.usual_gap = max(self.usual_gap, interval)
        if measured - self._measured > STALE_AFTER_GAPS * self.usual_gap:
            self.stopped_since = self.disk_since = None
        self.usual_gap = usual(self.usual_gap, at - self.read_at if self.read_at is not None else 0.0, interval)
        self.counts, self.read_at, self._measured = counts, at, measured
        present = frozenset(wait for wait, number in (counts or {}).items() if number)
        if main is None and len(present) == 1:
            main = next(iter(present))
        if main is not None or present:
            self.samples.append(WaitSample(at, main, present))
        while self.samples and at - self.samples[0].at > window:
            self.samples.popleft()
        self.stopped_since = _since(self.stopped_since, main == "stopped", at)
        self.disk_since = _since(self.disk_since, "disk" in present or main == "disk", at)

    @property
    def is_readable(self) -> bool:
        return self.counts is not None

    def is_fresh(self, now: float) -> bool:
        return self.read_at is not None and now - self.read_at <= STALE_AFTER_GAPS * self.usual_gap + 1e-6

    def usual_main(self) -> str | None:
        """The class the main thread was in most often over the window."""
        mains = [sample.main for sample in self.samples if sample.main is not None]
        if not mains or mains.count(mains[0]) == len(mains):  # mostly they do not change
            return mains[0] if mains else None
        return Counter(mains).most_common(1)[0][0]

    def usual_classes(self) -> frozenset[str]:
        """The classes in which threads were at more than half of the looks of the window."""
        looks = [sample.classes for sample in self.samples]
        if looks and looks.count(looks[0]) == len(looks):
            return looks[0]
        seen = Counter(wait for classes in looks for wait in classes)
        return frozenset(wait for wait, times in seen.items() if 2 * times > len(self.samples))


def _since(before: float | None, holds: bool, at: float) -> float | None:
    """Since when something holds, or None when it does not."""
    if not holds:
        return None
    return at if before is None else before
