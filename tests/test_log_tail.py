"""Following one file through everything that happens to log files."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from stallwatch.sources.logs.tail import FolderWatch, LogTail

MUCH = 1 << 30


class Reader:
    """A tail and what it read: the parts between boundaries."""

    def __init__(self, path: Path) -> None:
        self.parts = [b""]
        self.tail = LogTail(str(path), lambda: self.parts.append(b""))

    def read(self, most_bytes: int = MUCH) -> bytes:
        new = b""
        for chunk in self.tail.read(most_bytes):
            self.parts[-1] += chunk
            new += chunk
        return new


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_bytes(b"first\n")
    return path


def test_a_log_is_read_from_its_beginning_and_then_followed(log: Path) -> None:
    reader = Reader(log)

    assert reader.read() == b"first\n"
    append(log, b"second\n")
    assert reader.read() == b"second\n"
    assert reader.read() == b""
    assert reader.tail.bytes_read == 13


def test_a_renamed_log_is_read_to_its_end_before_its_successor(log: Path) -> None:
    reader = Reader(log)
    reader.read()

    append(log, b"late\n")
    log.rename(log.with_suffix(".1"))
    log.write_bytes(b"new\n")
    reader.read()

    assert reader.parts == [b"first\nlate\n", b"new\n"]
    assert reader.tail.rotations == 1


def test_a_renamed_log_without_a_successor_is_followed_on(log: Path) -> None:
    reader = Reader(log)
    reader.read()

    old = log.rename(log.with_suffix(".1"))
    reader.read()
    append(old, b"still\n")

    assert reader.read() == b"still\n"
    assert (reader.tail.rotations, reader.tail.reason) == (0, None)


def test_a_truncated_log_is_read_from_its_beginning_again(log: Path) -> None:
    reader = Reader(log)
    reader.read()

    log.write_bytes(b"new\n")
    reader.read()

    assert reader.parts == [b"first\n", b"new\n"]
    assert (reader.tail.truncations, reader.tail.rotations) == (1, 0)


def test_a_log_truncated_and_grown_beyond_what_was_read_is_read_again(log: Path) -> None:
    reader = Reader(log)
    reader.read()

    log.write_bytes(b"other beginning and longer\n")
    reader.read()

    assert reader.parts[-1] == b"other beginning and longer\n"
    assert reader.tail.truncations == 1


def test_a_writer_that_keeps_its_offset_leaves_a_hole_that_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    with path.open("wb", buffering=0) as writer:
        writer.write(b"a" * 50_000)
        reader = Reader(path)
        reader.read()

        os.truncate(path, 0)
        writer.write(b"after\n")
        reader.read()

    assert reader.parts[-1].lstrip(b"\0") == b"after\n"
    assert len(reader.parts[-1]) < 50_000
    assert reader.tail.truncations == 1


def test_a_log_deleted_and_made_anew_is_a_rotation(log: Path) -> None:
    reader = Reader(log)
    reader.read()

    log.unlink()
    assert reader.read() == b""
    log.write_bytes(b"new\n")

    assert reader.read() == b"new\n"
    assert reader.tail.rotations == 1


def test_a_link_that_points_elsewhere_is_a_rotation(log: Path, tmp_path: Path) -> None:
    link, other = tmp_path / "link", tmp_path / "other.log"
    link.symlink_to(log)
    reader = Reader(link)
    reader.read()

    other.write_bytes(b"other\n")
    link.unlink()
    link.symlink_to(other)

    assert reader.read() == b"other\n"
    assert reader.tail.rotations == 1


def test_the_descriptor_of_a_process_leads_to_its_log_even_when_deleted(log: Path) -> None:
    with log.open("ab", buffering=0) as writer:
        place = Path(f"/proc/self/fd/{writer.fileno()}")
        log.unlink()
        reader = Reader(place)

        assert reader.read() == b"first\n"
        writer.write(b"more\n")
        assert reader.read() == b"more\n"

    writer_gone = reader.read()
    assert (writer_gone, reader.tail.reason) == (b"", None)


def test_a_read_is_bounded_and_says_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "big.log"
    path.write_bytes(b"x" * (3 << 20))
    reader = Reader(path)

    first = len(reader.read(1 << 20))
    left = reader.tail.backlog
    reader.read(MUCH)

    assert (first, left, reader.tail.backlog) == (1 << 20, 2 << 20, 0)


@pytest.mark.parametrize("kind", ["directory", "fifo", "socket"])
def test_what_is_no_regular_file_is_not_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        if kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            listener.bind(str(path))
        reader = Reader(path)

        assert reader.read() == b""
        assert (reader.tail.reason, reader.tail.errors) == ("not_supported", 1)
        reader.read()
        assert reader.tail.errors == 1


@pytest.mark.parametrize("owner", [None, os.geteuid()])
def test_a_link_is_followed_only_where_no_owner_is_asked_for(owner: int | None, log: Path) -> None:
    link = log.with_name("link")
    link.symlink_to(log)

    tail = LogTail(str(link), owner=owner)

    assert b"".join(tail.read(MUCH)) == (b"first\n" if owner is None else b"")
    assert tail.reason == (None if owner is None else "not_supported")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize(
    ("of", "owner", "reason"), [(0, 7, None), (7, 7, None), (8, 7, "permission"), (8, 0, "permission")]
)
def test_a_file_of_another_user_is_not_read_for_a_server(of: int, owner: int, reason: str | None, log: Path) -> None:
    os.chown(log, of, of)
    tail = LogTail(str(log), owner=owner)

    assert b"".join(tail.read(MUCH)) == (b"" if reason else b"first\n")
    assert tail.reason == reason


def test_a_file_of_mine_is_not_read_for_the_server_of_another_user(log: Path) -> None:
    tail = LogTail(str(log), owner=os.geteuid() + 1)

    assert b"".join(tail.read(MUCH)) == (b"first\n" if os.geteuid() == 0 else b"")


def test_a_log_that_is_not_there_yet_is_read_when_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "later.log"
    reader = Reader(path)

    assert (reader.read(), reader.tail.reason) == (b"", "vanished")
    path.write_bytes(b"here\n")
    assert (reader.read(), reader.tail.reason) == (b"here\n", None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_log_without_the_right_to_read_says_so_and_is_read_when_the_right_comes(log: Path) -> None:
    log.chmod(0)
    reader = Reader(log)

    assert (reader.read(), reader.tail.reason) == (b"", "permission")
    log.chmod(0o600)
    assert (reader.read(), reader.tail.reason) == (b"first\n", None)


def test_closing_gives_the_descriptor_back(log: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = Reader(log)
    reader.read()

    reader.tail.close()

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_new_file_in_a_watched_folder_wakes_and_writing_does_not(tmp_path: Path) -> None:
    woken = threading.Event()
    watch = FolderWatch(woken.set)
    busy = tmp_path / "busy.log"
    busy.touch()
    try:
        watch.watch({str(tmp_path)})
        append(busy, b"line\n")
        assert not woken.wait(0.1)

        (tmp_path / "new.log").touch()

        assert woken.wait(60)
    finally:
        watch.close()


def test_a_folder_that_cannot_be_watched_is_none_of_our_business(tmp_path: Path) -> None:
    watch = FolderWatch(lambda: None)

    watch.watch({str(tmp_path / "missing")})
    watch.watch(set())
    watch.close()

    assert watch._watches == {}
