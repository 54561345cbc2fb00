"""How starts ended, how long they took, and what stalls cost: sums by framework, version, model and speculation.  Pure.

They begin at 0 with this exporter, like any counter; a fleet's figures are increase() over all nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .model import OUTCOME_BUCKETS_SECONDS, Server, StartOutcome

MOST_KINDS = 64
"""Kinds of servers on one node; starts of further ones are counted as dropped only."""


class Kind(NamedTuple):
    """What starts are told apart by; `version` is empty where neither command line nor log says it."""

    framework: str
    version: str
    model: str
    speculative: str


@dataclass(slots=True)
class Sums:
    """Of one kind.  `durations`: by outcome, how many starts took up to each bound of OUTCOME_BUCKETS_SECONDS."""

    durations: dict[str, list[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)  # by reason, of the outcomes failed and stalled
    stalled_seconds: dict[str, float] = field(default_factory=dict)  # by reason, ready or not


class Outcomes:
    """The sums of all kinds of one node."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, Sums] = {}
        self.dropped = 0  # ends of starts, and stalls, that found no room

    def _sums(self, server: Server) -> Sums | None:
        kind = Kind(server.framework, server.version, server.model, server.speculative)
        if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
            return None
        return self._kinds.setdefault(kind, Sums())

    def end(self, server: Server, outcome: str, reason: str, seconds: float) -> None:
        """A start ended: `outcome` of START_OUTCOMES after `seconds`, `reason` of one that failed or stalled."""
        sums = self._sums(server)
        if sums is None:
            self.dropped += 1
            return
        counts = sums.durations.setdefault(outcome, [0] * (len(OUTCOME_BUCKETS_SECONDS) + 1))
        for index, bound in enumerate((*OUTCOME_BUCKETS_SECONDS, float("inf"))):
            counts[index] += seconds <= bound
        sums.seconds[outcome] = sums.seconds.get(outcome, 0.0) + seconds
        if outcome in ("failed", "stalled"):
            sums.failures[reason] = sums.failures.get(reason, 0) + 1

    def stall(self, server: Server, reason: str, seconds: float) -> None:
        """So long it has been stalled since the last tick."""
        sums = self._sums(server)
        if sums is not None:
            sums.stalled_seconds[reason] = sums.stalled_seconds.get(reason, 0.0) + seconds

    def told(self) -> Iterator[StartOutcome]:
        for kind, sums in sorted(self._kinds.items()):
            durations = {outcome: (tuple(counts), sums.seconds[outcome]) for outcome, counts in sums.durations.items()}
            yield StartOutcome(*kind, durations, dict(sums.failures), dict(sums.stalled_seconds))
