"""How much a twin differs from its hang: in which readings and events, until the verdict must stand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .stage import Stage

Series = tuple[str, tuple[str, ...]]
"""Signal, and the values of its labels."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What two recordings of one story differ in, up to one moment."""

    readings: int
    of_readings: int
    events: int
    signals: tuple[str, ...]


def difference(hang: Stage, twin: Stage, until: float) -> Difference:
    """A counter's reading differs when it grew otherwise since the one before; what it grew earlier is past."""
    ours, theirs = dict(_readings(hang, until)), dict(_readings(twin, until))
    differing = [at for at in ours.keys() | theirs.keys() if ours.get(at) != theirs.get(at)]
    said, heard = Counter(_events(hang, until)), Counter(_events(twin, until))
    return Difference(
        readings=len(differing),
        of_readings=len(ours.keys() | theirs.keys()),
        events=sum(((said - heard) + (heard - said)).values()),
        signals=tuple(sorted({series[0] for _, series in differing})),
    )


def _readings(stage: Stage, until: float) -> Iterator[tuple[tuple[float, Series], Any]]:
    before: dict[Series, float] = {}
    for line in stage.lines:
        if line["t"] > until:
            return
        for signal, labels, value, *reason in line.get("readings", ()):
            series = (signal, tuple(labels.values()))
            if value is None:
                yield (line["t"], series), tuple(reason)
            elif signal.endswith("_total"):
                yield (line["t"], series), round(value - before.get(series, 0.0), 2)
                before[series] = value
            else:
                yield (line["t"], series), value


def _events(stage: Stage, until: float) -> Iterator[str]:
    return (json.dumps(line, sort_keys=True) for line in stage.lines if "readings" not in line and line["t"] <= until)
