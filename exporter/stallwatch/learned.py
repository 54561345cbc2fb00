"""How long the phases of a start take on this node, learned from starts that became ready.  Pure.

It only tells `working` from `slow`: no page depends on it.  In words: docs/VERDICTS.md, "Learned budgets".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from .config import Thresholds
from .model import PHASES, Server

FACTOR = 2.0
"""A phase is slow when it takes so many times what it took before."""
FLOOR_SECONDS, CEILING_SECONDS = 120.0, 4 * 3600.0
QUANTILE = 0.9

LEAST_STARTS = 2
"""So many must be known before a budget is less than the default one."""
MOST_STARTS = 5
"""Starts of one kind that are kept, cold ones and warm ones apart: many warm ones do not drive out a cold one."""
MOST_KINDS = 64
"""Kinds of starts, and counts of similar ones; what was not asked for for the longest time is forgotten first."""
MOST_KEYS = 1024
LONGEST_PHASE_SECONDS = 7 * 86400.0

LEAST_READ_BYTES = 1 << 30
"""Below it nothing is known of cold and warm: small weights, or a file system that accounts no reads."""
COLD_SHARE = 0.5
"""Of the most that a start of this kind read from storage: one that read so much found little in the page cache."""

TAUGHT = tuple(phase for phase in PHASES if phase not in ("ready", "stopped"))
SPECULATIVE, PLAIN_DECODING = "yes", "no"

Seal = Callable[..., str]
"""Keyed hash of words and numbers; what is kept names no model."""


def unsealed(*parts: str | int | bytes) -> str:
    """Where nothing is written anywhere."""
    return "\x1f".join(map(str, parts))


@dataclass(slots=True)
class Kind:
    """Starts that were alike: seconds by phase of the last ones, how many there were, and when the last was ready."""

    cold: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=MOST_STARTS))
    warm: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=MOST_STARTS))
    most_read: float = 0.0
    starts: int = 0
    last_timestamp: float = 0.0
    _budgets: dict[str, float] | None = field(default=None, compare=False)  # of what is known now

    def add(self, seconds: Mapping[str, float], read_bytes: float, timestamp: float) -> None:
        self.most_read = max(self.most_read, read_bytes)
        is_cold = read_bytes >= max(LEAST_READ_BYTES, COLD_SHARE * self.most_read)
        (self.cold if is_cold else self.warm).append(
            {phase: round(seconds[phase], 1) for phase in TAUGHT if phase in seconds}
        )
        self.starts, self.last_timestamp, self._budgets = self.starts + 1, timestamp, None

    def budgets(self) -> dict[str, float]:
        """Phase -> seconds.  Of cold and warm starts the slower; less than the default only with a cold one known."""
        if self._budgets is None:
            self._budgets = self._make_budgets(Thresholds().budget)
        return self._budgets

    def _make_budgets(self, default: Callable[[str], float]) -> dict[str, float]:
        found: dict[str, float] = {}
        knows = bool(self.cold) and len(self.cold) + len(self.warm) >= LEAST_STARTS
        for phase in TAUGHT:
            slowest = max(_quantile([s[phase] for s in row if phase in s]) for row in (self.cold, self.warm))
            if slowest <= 0.0:
                continue
            budget = min(max(FACTOR * slowest, FLOOR_SECONDS), CEILING_SECONDS)
            found[phase] = budget if knows else max(budget, default(phase))
        return found


def _quantile(values: list[float]) -> float:
    """The nearest one of those that were seen; 0 when there is none."""
    return sorted(values)[math.ceil(QUANTILE * len(values)) - 1] if values else 0.0


@dataclass(slots=True)
class Learned:
    """What is known of starts on this node, by kind.  Keys are hashes once `use` gave something to make them."""

    seal: Seal = unsealed
    kinds: dict[str, Kind] = field(default_factory=dict)
    _keys: dict[tuple[str | int, ...], str] = field(default_factory=dict)  # asked for at every tick

    def use(self, seal: Seal, kept: Mapping[str, Kind]) -> None:
        """Make keys with `seal`, and know what was kept with it."""
        self.seal, self.kinds, self._keys = seal, dict(list(kept.items())[-MOST_KINDS:]), {}

    def learn(self, server: Server, seconds: Mapping[str, float], read_bytes: float, timestamp: float) -> None:
        """A start became ready, after so many seconds in each phase."""
        key = self._key(server, bool(server.speculative), server.version)
        kind = self.kinds.pop(key, None) or Kind()
        kind.add(seconds, read_bytes, timestamp)
        self.kinds[key] = kind
        self._count_family(server, timestamp)
        while len(self.kinds) > MOST_KINDS:
            del self.kinds[next(iter(self.kinds))]

    def _count_family(self, server: Server, timestamp: float) -> None:
        """Of any release: an update changes how long it takes, not whether it works."""
        key = self._key(server, bool(server.speculative), None)
        family = self.kinds.pop(key, None) or Kind()
        family.starts, family.last_timestamp = family.starts + 1, timestamp
        self.kinds[key] = family

    def applied(self, server: Server, thresholds: Thresholds) -> Thresholds:
        """The thresholds with budgets as they were learned; configured ones win."""
        key = self._key(server, bool(server.speculative), server.version)
        kind = self.kinds.get(key)
        if kind is None:
            return thresholds
        self.kinds[key] = self.kinds.pop(key)
        return replace(thresholds, budgets={**kind.budgets(), **thresholds.budgets})

    def similar(self, server: Server) -> dict[str, tuple[int, float]]:
        """Starts that became ready, of this model with the same arguments: by whether they decoded speculatively,
        how many, and when the last of them was ready (Unix seconds)."""
        found = {}
        for label, speculative in ((SPECULATIVE, True), (PLAIN_DECODING, False)):
            family = self.kinds.get(self._key(server, speculative, None))
            if family is not None:
                found[label] = family.starts, family.last_timestamp
        return found

    def _key(self, server: Server, speculative: bool, version: str | None) -> str:
        """`version` None: any."""
        method = server.speculative if version is not None else ""
        words = (
            server.framework,
            server.model,
            server.tensor_parallel,
            server.pipeline_parallel,
            server.data_parallel,
            server.nnodes,
            int(server.eager),
            int(speculative),
            method,
            "any" if version is None else f"release {version}",
        )
        if words not in self._keys:
            if len(self._keys) >= MOST_KEYS:
                self._keys.clear()
            self._keys[words] = self.seal("kind of start", *words)
        return self._keys[words]


def plain_kinds(kinds: Mapping[str, Kind]) -> list[list[object]]:
    """As plain values: [key, starts, last, most read, cold starts, warm starts]; a start is [number of phase, s] …"""
    return [
        [key, kind.starts, kind.last_timestamp, kind.most_read, _rows(kind.cold), _rows(kind.warm)]
        for key, kind in kinds.items()
    ]


def _rows(starts: Iterable[Mapping[str, float]]) -> list[list[list[float]]]:
    return [[[PHASES.index(phase), seconds] for phase, seconds in start.items()] for start in starts]


Row = list[list[tuple[int, float]]]


def kind_of(starts: int, last: float, most_read: float, cold: Row, warm: Row) -> Kind:
    """Back again; ValueError when it cannot be."""
    numbers = (last, most_read, *(seconds for row in (*cold, *warm) for _, seconds in row))
    if starts < 1 or not all(0.0 <= number < 1e15 for number in numbers):
        raise ValueError("no such starts")
    kind = Kind(most_read=most_read, starts=starts, last_timestamp=last)
    for row, into in ((cold, kind.cold), (warm, kind.warm)):
        into.extend({_phase(number): min(seconds, LONGEST_PHASE_SECONDS) for number, seconds in start} for start in row)
    return kind


def _phase(number: int) -> str:
    if not 0 <= number < len(TAUGHT):
        raise ValueError("no phase of a start")
    return TAUGHT[number]
