"""The bell that wakes the tick."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from stallwatch.bell import Bell

LONG, SHORT = 60.0, 0.01


def test_a_ring_before_the_wait_is_not_lost_and_many_are_one() -> None:
    bell = Bell()
    for _ in range(3):
        bell.ring()
    assert bell.is_rung

    bell.wait(LONG)

    assert not bell.is_rung


def test_nobody_rings_and_the_wait_ends_all_the_same() -> None:
    bell = Bell()
    bell.wait(SHORT)

    assert not bell.is_rung


def test_another_thread_wakes_who_waits() -> None:
    bell = Bell()
    threading.Timer(SHORT, bell.ring).start()

    bell.wait(LONG)  # the test would take a minute


def test_it_may_be_rung_at_any_point_of_the_wait_by_the_thread_that_waits() -> None:
    """As a signal handler does.  With threading.Event this test never ends."""
    bell, rings = Bell(), []

    def ring(frame: FrameType, event: str, argument: Any) -> Any:
        rings.append(event)
        bell.ring()
        return ring

    before = sys.gettrace()
    sys.settrace(ring)
    try:
        bell.wait(LONG)
    finally:
        sys.settrace(before)

    assert len(rings) > 3
