"""A case played, replayed, and what is worth keeping of it: a whole corpus of lines is too much for one memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from stallwatch.catalogue import derived_signals, read_signals
from stallwatch.frameworks import Framework, load_frameworks
from stallwatch.recordings.format import Reader, known_names, told_servers
from stallwatch.recordings.replay import replay_lines

from .corpus import make
from .kept import once
from .stage import Stage
from .truth import Outcome, Truth, load_truth, outcome
from .twins import Difference, difference

TRUTH: Mapping[str, Truth] = load_truth()

Series = tuple[str, str, str]
"""Signal, process, kind."""


@dataclass(frozen=True, slots=True)
class Played:
    """One case.  `grown`: how much counters of its own processes changed from the last progress to the verdict."""

    outcome: Outcome
    silent_at: float | None
    ends_at: float
    is_in_order: bool  # no line is earlier than the one before
    grown: Mapping[Series, float]


@once
def play(case: str) -> Played:
    """Make a recording and put it through the code of `stallwatch replay`, in memory."""
    stage, truth = make(case), TRUTH[case]
    begin, seconds = stage.silent_at, truth.by or 0.0
    values = {} if begin is None else _values(stage, begin, begin + seconds)
    return Played(
        outcome=_replayed(case, stage),
        silent_at=begin,
        ends_at=stage.t,
        is_in_order=all(before["t"] <= after["t"] for before, after in pairwise(stage.lines)),
        grown={series: max(read) - min(read) for series, read in values.items()},
    )


def _replayed(case: str, stage: Stage) -> Outcome:
    lines = [line.encode() for line in stage.text().splitlines(keepends=True)]
    reader = Reader(case, known_names(read_signals(), derived_signals()))
    found = replay_lines(reader.read(iter(lines)), told_servers(iter(lines)), None, frameworks())
    return outcome(found, stage.servers[0].name, stage.silent_at)


@cache
def frameworks() -> tuple[Framework, ...]:
    return load_frameworks()


def _values(stage: Stage, since: float, until: float) -> dict[Series, list[float]]:
    """What the counters of the first server's processes read in this time."""
    own, series = stage.servers[0].name, dict[Series, list[float]]()
    for line in stage.lines:
        for signal, labels, value, *_ in line.get("readings", ()) if since <= line["t"] <= until else ():
            if labels.get("server") == own and signal.startswith("process_") and value is not None:
                series.setdefault((signal, labels["rank"], labels.get("kind", "")), []).append(value)
    return series


@once
def difference_of(case: str) -> Difference:
    """Of a hang and its twin, until its verdict must stand."""
    truth, stage = TRUTH[case], make(case)
    assert truth.twin is not None
    assert stage.silent_at is not None
    assert truth.by is not None
    return difference(stage, make(truth.twin), stage.silent_at + truth.by)
