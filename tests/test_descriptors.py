"""The budget of open files."""

from __future__ import annotations

import resource

import pytest

from stallwatch.descriptors import Room, Shares, shares


@pytest.mark.parametrize("limit", [64, 100, 256, 1024, 4096, 65536])
def test_whatever_is_taken_some_descriptors_are_left(limit: int) -> None:
    found = shares(limit)

    assert found.connections == min(256, limit // 4)
    assert found.threads <= limit // 2
    assert found.connections + found.accepted + found.threads + found.members <= limit - 32


def test_a_small_limit_keeps_nothing_open_and_still_answers() -> None:
    assert shares(3) == Shares(connections=1, accepted=1, threads=0, members=0)


def test_no_limit_is_a_large_one() -> None:
    assert shares(resource.RLIM_INFINITY) == shares(1 << 20)


def test_room_is_taken_whole_or_not_at_all() -> None:
    room = Room(3)

    assert [room.take(2), room.take(2), room.take(), room.take()] == [True, False, True, False]
    room.give_back()
    assert room.take()
