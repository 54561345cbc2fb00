"""A clock without pauses of ours: live, ticks that did not come; in a recording, stretches without readings.  Pure."""

from __future__ import annotations

LONGEST_GAP_TICKS = 3
"""A longer pause between ticks is ours (stopped, suspended): no clock counts it."""


class Clock:
    """Seconds of whatever runs steadily (monotonic, or a recording's `t`), without our own pauses."""

    def __init__(self, tick_seconds: float) -> None:
        self.tick_seconds = tick_seconds
        self.skipped = 0.0
        self._last: float | None = None

    def is_gap(self, seconds: float) -> bool:
        """Whether a time without ticks, or without readings, is one that no clock counts."""
        return seconds > LONGEST_GAP_TICKS * self.tick_seconds

    def tick(self, moment: float) -> float:
        """The time of a tick; a pause longer than LONGEST_GAP_TICKS counts as one tick."""
        if self._last is not None and self.is_gap(gap := moment - self._last):
            self.skipped += gap - self.tick_seconds
        self._last = moment
        return moment - self.skipped

    def of(self, moment: float, earliest: float) -> float:
        """The time of a reading, not before `earliest` (the tick before)."""
        return max(earliest, moment - self.skipped)
