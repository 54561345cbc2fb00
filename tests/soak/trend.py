"""Whether a row of measurements grows: a straight line through it, and how sure one can be of its slope."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 12
"""Neighbouring samples are alike (what is kept for a minute is in many of them), so means of blocks are taken."""
_STUDENT = 2.764
"""Quantile 0.99 of Student's distribution with BLOCKS - 2 degrees of freedom: one chance in 50, both sides together."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Growth over the whole row as the line has it, and the interval in which it lies with 98 % certainty."""

    mean: float
    growth: float
    error: float

    @property
    def is_flat(self) -> bool:
        """Whether the growth cannot be told from none."""
        return abs(self.growth) <= self.error or self.growth == 0.0

    def __str__(self) -> str:
        return f"{self.mean:,.0f}, grows by {self.growth:+,.1f} ± {self.error:,.1f}"


def trend_of(values: Sequence[float]) -> Trend:
    """Least squares; ValueError when there are fewer than two values for each block."""
    size = len(values) // BLOCKS
    if size < 2:
        raise ValueError("too few values")
    rest = len(values) - size * BLOCKS
    blocks = [statistics.fmean(values[at : at + size]) for at in range(rest, len(values), size)]
    line = statistics.linear_regression(range(BLOCKS), blocks)
    left = [value - (line.intercept + line.slope * at) for at, value in enumerate(blocks)]
    spread = sum((at - (BLOCKS - 1) / 2) ** 2 for at in range(BLOCKS))
    error = math.sqrt(sum(each**2 for each in left) / (BLOCKS - 2) / spread)
    return Trend(statistics.fmean(values), line.slope * BLOCKS, _STUDENT * error * BLOCKS)
