"""Resident-idle power, learned: what a card takes while somebody holds memory on it and nothing runs.

Pure.  It depends on the card, on the driver and on the clock that a context pins (26 to 66 W of difference), not on
how much memory is held, so it is kept by these three.  Within one of them it drifts by some watts with the
temperature: a card that has just worked takes more at rest than a cold one.

The estimate is the mean over 30 s of rest; a lower one replaces it at once, a higher one raises it by an eighth.  A
rest that takes little is certainly a rest, one that takes more may be warm, or work that was not seen between two
looks.  So it errs on the low side, where a spin may count as work and is missed; on the high side work would count as
a spin, and that would be a false page.  It is the mean of a span and no single reading: spins begin a few watts above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

REST_SECONDS = 30.0
RISE_SHARE = 1 / 8

LOWEST_CLOCK_HERTZ = 300e6
UNKNOWN_CLOCK = -1

LARGEST_WATTS = 1e5
MOST_LEARNED = 1024
"""Cards times drivers times clocks that are kept; of more the one learned longest ago is dropped."""


class IdleKey(NamedTuple):
    """What resident-idle power depends on.  A card replaced is another UUID."""

    gpu: str
    driver: str  # "" = not known
    bucket: int  # see bucket_of


def bucket_of(hertz: float | None) -> int:
    """Octave of an SM clock.  None = not known.

    Wide, for a clock that sways by some steps must not sway between two buckets; narrow enough to tell a card that a
    context keeps awake (above 1 GHz) from one that sleeps (below 400 MHz).
    """
    if hertz is None or not math.isfinite(hertz):
        return UNKNOWN_CLOCK
    if hertz < LOWEST_CLOCK_HERTZ:
        return 0
    return 1 + math.floor(math.log2(hertz / LOWEST_CLOCK_HERTZ))


@dataclass(slots=True)
class Rest:
    """A span in which one card is at rest."""

    key: IdleKey | None = None
    seconds: float = 0.0
    joules: float = 0.0

    def end(self) -> None:
        self.key = None

    def begin(self, key: IdleKey) -> None:
        """The first look at rest: before it, until an unknown moment, the card may have worked."""
        self.key, self.seconds, self.joules = key, 0.0, 0.0

    def add(self, key: IdleKey, watts: float, seconds: float) -> float | None:
        """Take the mean power since the look before.  Watts when the span is long enough; then another begins."""
        if self.key != key:
            self.begin(key)
            return None
        self.seconds += seconds
        self.joules += watts * seconds
        if self.seconds < REST_SECONDS:
            return None
        mean = self.joules / self.seconds
        self.seconds = self.joules = 0.0
        return mean


@dataclass(slots=True)
class IdlePowers:
    """What was learned of all cards, in watts."""

    watts: dict[IdleKey, float] = field(default_factory=dict)

    def of(self, key: IdleKey) -> float | None:
        return self.watts.get(key)

    def learn(self, key: IdleKey, mean: float) -> None:
        """Take the mean of one span of rest; a card that takes nothing, or no end, is one whose power is not known."""
        if not 0 < mean < LARGEST_WATTS:
            return
        before = self.watts.pop(key, mean)
        self.watts[key] = mean if mean <= before else before + RISE_SHARE * (mean - before)
        while len(self.watts) > MOST_LEARNED:
            del self.watts[next(iter(self.watts))]
