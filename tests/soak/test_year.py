"""A year of starts and ends in minutes: memory, descriptors, threads, series and everything that is kept stay flat.

`make soak`.  What is measured is drawn in docs/pictures/soak.png (`python -m soak.picture FILE`, in tests/).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soak.trend import Trend, trend_of
from soak.year import YEAR

MEASURES = ("resident_kib", "objects", "entries", "descriptors", "threads", "series", "state_kib")
LOST_IN_NOISE = {"resident_kib": 512.0, "objects": 300.0}
"""Growth over half a year that is none of ours: two arenas of Python's allocator, the objects of its caches."""


@pytest.fixture(scope="module")
def year(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the year came to, in a process of its own; kept where STALLWATCH_SOAK says."""
    out = Path(os.environ.get("STALLWATCH_SOAK") or tmp_path_factory.mktemp("soak") / "year.json")
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "soak.year", "--out", str(out)]
    subprocess.run(command, check=True, cwd=tests, env=os.environ | {"PYTHONPATH": path}, timeout=3600)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def second_half(year: dict[str, Any], measure: str) -> Trend:
    values = [float(sample[measure]) for sample in year["samples"]]
    return trend_of(values[len(values) // 2 :])


@pytest.mark.soak
def test_everything_happened(year: dict[str, Any]) -> None:
    """A soak in which nothing happened would be flat, too."""
    happened = year["happened"]

    assert happened["starts"] >= 10_000
    assert happened["lines"] >= 1_000_000
    assert (happened["rotations"], happened["reloads"], happened["refused"]) == (100, 100, 50)
    assert (happened["failures"], happened["counted_failures"]) == (YEAR.failures, YEAR.failures)
    assert set(year["healthy"].values()) == {True}


@pytest.mark.soak
@pytest.mark.parametrize("measure", MEASURES)
def test_nothing_grows(measure: str, year: dict[str, Any]) -> None:
    trend = second_half(year, measure)

    assert trend.is_flat or trend.growth <= LOST_IN_NOISE.get(measure, 0.0), str(trend)
