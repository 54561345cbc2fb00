"""The judge of ten minutes of scrapes: what grows is named, what merely moves is not."""

from __future__ import annotations

import pytest

from soak.scrapes import LOST_IN_NOISE, grown

SAMPLES = 120
LEVEL = {"resident_kib": 60_000.0, "descriptors": 90.0, "threads": 12.0, "series": 700.0}


def row(measure: str = "", step: float = 0.0) -> list[dict[str, float]]:
    """Samples that move up and down a little, of which one measure also grows by `step` with each."""
    wave = [{name: value + (number % 2) for name, value in LEVEL.items()} for number in range(SAMPLES)]
    return [one | ({measure: one[measure] + number * step} if measure else {}) for number, one in enumerate(wave)]


def test_what_moves_up_and_down_does_not_grow() -> None:
    assert grown(row()) == {}


@pytest.mark.parametrize("measure", LEVEL)
def test_each_measure_that_grows_is_named(measure: str) -> None:
    step = 4 * (LOST_IN_NOISE[measure] + 1) / SAMPLES

    assert grown(row(measure, step)).keys() == {measure}


def test_what_grew_at_first_only_is_level() -> None:
    assert grown([one | {"series": min(number, SAMPLES // 4)} for number, one in enumerate(row())]) == {}


def test_every_measure_that_is_sampled_has_a_bound() -> None:
    assert LOST_IN_NOISE.keys() == LEVEL.keys()
