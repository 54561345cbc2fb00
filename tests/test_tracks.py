"""A track beside the plain account of what it says: all looks of the window are kept, and everything is worked out."""

from __future__ import annotations

import random
from collections import deque

import pytest

from stallwatch.tracks import Track, Waits, usual

WINDOW, FLOOR, INTERVAL = 60.0, 16.0, 5.0


def moves(looks: list[tuple[float, float]], *, two_ways: bool) -> list[float]:
    """When an amount came together, by all that was seen within a window."""
    seen, found = deque[tuple[float, float]](), []
    for at, value in looks:
        while len(seen) > 1 and at - seen[0][0] > WINDOW:
            seen.popleft()
        amounts = [value - earlier for _, earlier in seen]
        if any(abs(amount) >= FLOOR if two_ways else amount >= FLOOR for amount in amounts):
            seen.clear()
            found.append(at)
        seen.append((at, value))
    return found


def some_looks(seed: int) -> list[tuple[float, float]]:
    """Mostly nothing happens; sometimes it comes in small steps, leaps, falls, or is not read for long."""
    chance, at, value, looks = random.Random(seed), 0.0, 0.0, list[tuple[float, float]]()
    for _ in range(120):
        at += chance.choice((5.0, 5.0, 5.0, 5.0, 1.0, 30.0, 100.0))
        value += chance.choice((0.0, 0.0, 0.0, 0.0, 1.0, 4.0, 7.0, 20.0, -5.0, -20.0))
        looks.append((at, value))
    return looks


@pytest.mark.parametrize("two_ways", [False, True])
def test_an_amount_comes_together_as_if_every_look_were_kept(two_ways: bool) -> None:
    for seed in range(200):
        looks, track = some_looks(seed), Track()

        found = [at for at, value in looks if track.gathers(value, at, FLOOR, WINDOW, two_ways)]

        assert found == moves(looks, two_ways=two_ways)
        assert 0 < len(found) < len(looks)


def test_what_stands_still_is_remembered_as_one_look_and_what_creeps_as_all_of_the_window() -> None:
    still, creeping = Track(), Track()
    for number in range(100):
        assert not still.gathers(7.0, INTERVAL * number, FLOOR, WINDOW)
        assert not creeping.gathers(number * 0.1, INTERVAL * number, FLOOR, WINDOW)

    assert list(still.samples) == [(495.0, 7.0)]
    assert len(creeping.samples) == WINDOW / INTERVAL + 1


def test_a_step_after_a_long_rest_counts_from_where_it_rested() -> None:
    rested, short = Track(), Track()
    for number in range(100):
        rested.gathers(7.0, INTERVAL * number, FLOOR, WINDOW)
        short.gathers(7.0, INTERVAL * number, FLOOR, WINDOW)

    assert rested.gathers(7.0 + FLOOR, 500.0, FLOOR, WINDOW)
    assert not short.gathers(6.9 + FLOOR, 500.0, FLOOR, WINDOW)


def test_the_usual_gap_is_what_it_is_when_it_is_worked_out_at_every_look() -> None:
    for seed in range(50):
        track, expected, before = Track(), 0.0, None
        for at, value in some_looks(seed):
            gap = 0.0 if before is None else at - before
            expected, before = usual(expected, gap, INTERVAL), at
            track.put(value, None, at, INTERVAL, at)

            assert track.usual_gap == pytest.approx(expected, rel=1e-12)
            assert track.is_fresh(at + 3 * expected)
            assert not track.is_fresh(at + 3 * expected + 0.001)


def looked(*looks: tuple[dict[str, int], str | None]) -> Waits:
    waits = Waits()
    for number, (counts, main) in enumerate(looks):
        waits.put(counts, main, INTERVAL * number, WINDOW, INTERVAL, INTERVAL * number)
    return waits


def test_what_threads_usually_wait_in_is_what_most_looks_say() -> None:
    same, other = ({"futex": 3, "poll": 1}, "futex"), ({"disk": 1}, "disk")

    always, mostly, seldom = looked(same, same, same), looked(other, same, same), looked(same, other, other)

    assert always.usual_classes() == mostly.usual_classes() == {"futex", "poll"}
    assert seldom.usual_classes() == {"disk"}
    assert (always.usual_main(), mostly.usual_main(), seldom.usual_main()) == ("futex", "futex", "disk")


def test_nothing_is_usual_before_the_first_look_nor_when_looks_are_split_evenly() -> None:
    assert Waits().usual_classes() == looked(({"futex": 1}, None), ({"disk": 1}, None)).usual_classes() == set()
    assert Waits().usual_main() is None
