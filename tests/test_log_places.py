"""What patterns and folders find where it lies on a mount that may not answer; the rest is in test_logs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from far_mount import FarMount
from stallwatch.model import LogPlace
from stallwatch.sources.logs.guard import Guards, Questions
from stallwatch.sources.logs.mounts import LOOK_SECONDS as MOUNTS_SECONDS
from stallwatch.sources.logs.mounts import Mounts
from stallwatch.sources.logs.places import FILE_SECONDS, GONE_LOOKS, LOOK_SECONDS, LogPlaces

MOST = 16
LOOKS_AT_FILES = int(FILE_SECONDS / LOOK_SECONDS)


class Looks:
    """The files of one server, looked for again and again; all but `far` is near."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.near = 100.0, folder / "near"
        self.near.mkdir()
        self.far = FarMount(folder / "far", folder / "proc", monkeypatch)
        self.guards = Guards(Mounts(str(folder / "proc")), monotonic=lambda: self.at)
        self.places: LogPlaces | None = None

    def write(self, *names: str, folder: Path | None = None) -> None:
        for name in names:
            path = (folder or self.far.folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x\n")

    def look(self, *paths: Path | str) -> dict[str, str | None]:
        """name -> reason of what is found, at the next look."""
        if self.places is None:
            self.far.watch(self.guards)
            self.places = LogPlaces(MOST, Questions(self.guards))
        self.at += LOOK_SECONDS
        self.guards.mounts.refresh(self.at)
        wanted = [LogPlace(os.path.basename(path), str(path), owner=0) for path in paths]
        return {place.name: place.reason for place in self.places.files(wanted, self.at)}


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    looks = Looks(tmp_path, monkeypatch)
    yield looks
    looks.far.answer()


def test_on_a_far_mount_all_is_found_that_is_found_on_a_near_one(looks: Looks) -> None:
    found = []
    for folder in (looks.far.folder, looks.near):
        looks.write("a.log", "b.log", "run/c.log", "d.log.gz", folder=folder)
        found.append(looks.look(folder / "*.log*", folder / "run", folder / "a.log", folder / "no.*"))

    assert found[0] == {"a.log": None, "b.log": None, "c.log": None, "no.*": "vanished"}
    assert found[1] == found[0]
    assert looks.far.touched > 0


def test_without_far_mounts_there_is_no_thread(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", None)
    looks.write("a.log", "run/c.log", folder=looks.near)

    assert looks.look(looks.near / "*.log", looks.near / "run") == {"a.log": None, "c.log": None}


def test_a_path_that_becomes_a_folder_is_one_at_once_where_nothing_was_and_soon_where_a_file_was(looks: Looks) -> None:
    was_file, was_nothing = looks.near / "file", looks.near / "nothing"
    looks.write("file", folder=looks.near)
    assert looks.look(was_file, was_nothing) == {"file": None, "nothing": None}

    was_file.unlink()
    looks.write("file/a.log", "nothing/b.log", folder=looks.near)

    found = [looks.look(was_file, was_nothing) for _ in range(LOOKS_AT_FILES)]
    assert all("b.log" in each for each in found)
    assert found[-1] == {"a.log": None, "b.log": None}


@pytest.mark.parametrize(("other", "seconds"), [("b.log", FILE_SECONDS), ("*.txt", LOOK_SECONDS), ("no", LOOK_SECONDS)])
def test_where_all_are_files_they_are_looked_at_seldom(other: str, seconds: float, looks: Looks) -> None:
    """A pattern may find more, and what is not there may come."""
    looks.write("a.log", "b.log", folder=looks.near)
    looks.look(looks.near / "a.log", looks.near / other)

    assert looks.places is not None
    assert looks.places.holds_until == looks.at + seconds


def test_a_mount_that_hangs_from_the_first_look_on_is_said_to_and_holds_nothing_else(looks: Looks) -> None:
    looks.write("a.log", "run/c.log")
    looks.write("n.log", folder=looks.near)
    wanted = (looks.far.folder / "*.log", looks.far.folder / "run", looks.far.folder / "plain", looks.near / "*.log")
    looks.look()
    looks.far.hang()

    for _ in range(3):
        assert looks.look(*wanted) == {"*.log": "timeout", "run": "timeout", "plain": "timeout", "n.log": None}
    assert looks.guards.waiting == 1

    looks.far.answer()
    looks.look(*wanted)  # takes what was asked before
    assert looks.look(*wanted) == {"a.log": None, "c.log": None, "plain": None, "n.log": None}


def test_what_was_found_stays_while_its_mount_hangs(looks: Looks) -> None:
    """A log that is given up would be read from its beginning when the mount is back, and counted twice."""
    looks.write("a.log", "run/c.log", "plain")
    wanted = (looks.far.folder / "*.log", looks.far.folder / "run", looks.far.folder / "plain")
    found = looks.look(*wanted)
    looks.far.hang()

    for _ in range(GONE_LOOKS + 2):
        assert looks.look(*wanted) == found == {"a.log": None, "c.log": None, "plain": None}

    looks.far.answer()
    (looks.far.folder / "a.log").unlink()
    for _ in range(GONE_LOOKS + 1):
        looks.look(*wanted)
    assert looks.look(*wanted) == {"*.log": "vanished", "c.log": None, "plain": None}


def test_a_pattern_that_found_nothing_is_unknown_once_its_mount_is_late(looks: Looks) -> None:
    wanted = looks.far.folder / "*.log"
    assert looks.look(wanted) == {"*.log": "vanished"}
    looks.far.hang()

    assert looks.look(wanted) == {"*.log": "vanished"}  # asked, and not late yet
    assert looks.look(wanted) == {"*.log": "timeout"}


def test_between_two_looks_a_far_mount_is_left_alone(looks: Looks) -> None:
    looks.write("a.log", "plain")
    wanted = (looks.far.folder / "*.log", looks.far.folder / "plain")
    looks.look(*wanted)
    touched, looks.at = looks.far.touched, looks.at - LOOK_SECONDS

    looks.look(*wanted)
    assert looks.far.touched == touched


@pytest.mark.parametrize("end", ["*.log", ""])
def test_a_far_file_in_a_near_folder_holds_only_itself(end: str, looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes mounts single files."""
    folder = looks.far.folder.parent / "mixed"
    looks.write("far.log", "near.log", "far.txt", folder=folder)
    looks.far = FarMount(folder / "far.log", folder.parent / "proc", monkeypatch)
    wanted = folder / end if end else folder
    names = {"near.log"} if end else {"near.log", "far.txt"}
    looks.look()
    looks.far.hang()

    assert looks.look(wanted).keys() == names
    looks.far.answer()
    looks.look(wanted)
    assert looks.look(wanted).keys() == names | {"far.log"}


def test_where_a_link_may_lead_anywhere_the_pattern_is_looked_for_in_a_thread(looks: Looks) -> None:
    looks.write("a.log")
    looks.write("one/b.log", folder=looks.near)
    (looks.near / "two").symlink_to(looks.far.folder)
    wanted = (looks.near / "*" / "*.log", looks.near / "one" / "*")
    looks.look()
    looks.far.hang()

    assert looks.look(*wanted) == {"*.log": "timeout", "b.log": None}
    looks.far.answer()
    looks.look(*wanted)
    assert looks.look(*wanted).keys() == {"a.log", "b.log"}


def test_what_becomes_a_far_mount_later_is_one_then(looks: Looks) -> None:
    table = looks.near.parent / "proc" / "self" / "mountinfo"
    far, none = table.read_text(), table.read_text().splitlines(keepends=True)[0]
    table.write_text(none)
    looks.far.is_mounted = False
    looks.write("n.log", folder=looks.near)
    assert looks.look(looks.far.folder / "*.log", looks.near / "*.log") == {"*.log": "vanished", "n.log": None}

    looks.write("a.log")
    table.write_text(far)
    looks.far.is_mounted = True
    looks.at += MOUNTS_SECONDS
    assert looks.look(looks.far.folder / "*.log", looks.near / "*.log") == {"a.log": None, "n.log": None}
    assert looks.far.touched > 0
