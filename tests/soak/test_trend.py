"""What counts as growth."""

from __future__ import annotations

import random

import pytest

from soak.sizes import by_place, entries
from soak.trend import trend_of


def noise(seed: int, number: int = 60) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(1000.0, 20.0) for _ in range(number)]


def test_noise_around_a_level_is_flat() -> None:
    assert sum(trend_of(noise(seed)).is_flat for seed in range(50)) >= 45


def test_a_slow_leak_under_the_same_noise_is_not() -> None:
    for seed in range(50):
        assert not trend_of([value + 2.0 * at for at, value in enumerate(noise(seed))]).is_flat


def test_a_constant_is_flat_and_a_single_step_of_a_constant_is_seen() -> None:
    assert trend_of([5.0] * 60).is_flat
    assert trend_of([5.0] * 30 + [6.0] * 30).growth > 0.5


def test_few_values_say_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        trend_of([1.0] * 20)


def test_entries_of_containers_are_counted_once_and_named_by_their_place() -> None:
    shared = [1, 2, 3]

    assert entries(({"a": shared}, shared)) == 2 + 1 + 3
    assert by_place(trend_of([5.0] * 60))["Trend.mean"] == 0
