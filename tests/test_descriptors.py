"""The budget of open files."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from stallwatch.descriptors import Room, Shares, is_on_fuse, keep_apart, shares


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


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_file_of_a_thread_that_keeps_apart_is_no_one_elses(is_apart: bool, tmp_path: Path) -> None:
    kept, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    seen: dict[str, bool] = {}
    opened, looked = threading.Event(), threading.Event()

    def work() -> None:
        if is_apart and not keep_apart(kept):
            seen["refused"] = True
        seen.update(kept=is_open(kept), other=is_open(other), stream=is_open(2))
        made = seen["file"] = os.open("file", os.O_CREAT | os.O_RDWR, dir_fd=kept)  # type: ignore[assignment]
        opened.set()
        assert looked.wait(30)
        os.close(made)

    thread = threading.Thread(target=work)
    thread.start()
    assert opened.wait(30)
    ours = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    looked.set()
    thread.join(30)
    for descriptor in (kept, other):
        os.close(descriptor)

    if "refused" in seen:
        pytest.skip("this kernel, or a filter, has no close_range")
    assert (seen["kept"], seen["other"], seen["stream"]) == (True, not is_apart, True)
    assert (str(tmp_path / "file") in ours) is not is_apart


def test_a_thread_that_keeps_apart_closes_nothing_for_others(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)

    thread = threading.Thread(target=keep_apart)
    thread.start()
    thread.join(30)

    assert is_open(descriptor)
    os.close(descriptor)


def test_a_local_folder_is_not_on_fuse(tmp_path: Path) -> None:
    """The twin, with a real one, is tests/faults/test_mounts.py."""
    descriptor = os.open(tmp_path, os.O_RDONLY)

    assert not is_on_fuse(descriptor)
    os.close(descriptor)
    assert not is_on_fuse(descriptor)
