"""The state folder: whole or not at all, ours or not used, and never in the way of a tick."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stallwatch import state_file
from stallwatch.kept import Document, json_text
from stallwatch.state_file import (
    CORRUPT,
    KEY,
    KEY_BYTES,
    LARGEST_BYTES,
    LOCK,
    NEW,
    STATE,
    WRITE_SECONDS,
    Schedule,
    StateError,
    StateFolder,
    StateWriter,
    open_state,
)

DOCUMENT: Mapping[str, Any] = {"boot": "b", "servers": [{"name": "0a", "saved": 12.5, "starts": 2}], "startups": []}
SOON = 60.0


def state(**changed: Any) -> Document:
    """DOCUMENT, with other parts, as it is given to be written."""
    rest = {**DOCUMENT, **changed}
    servers = tuple(map(json_text, rest.pop("servers")))
    return Document(servers, rest)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def folder(place: Path) -> Iterator[StateFolder]:
    opened = StateFolder(str(place))
    yield opened
    opened.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- what is written is read ----------------------------------------------------------------------------------


def test_what_was_written_is_read_by_the_next_process(place: Path) -> None:
    first = StateFolder(str(place))
    assert first.read() is None
    first.write(state())
    sealed = first.seal("name", "vllm-8000")
    first.close()
    second = StateFolder(str(place))

    assert second.read() == DOCUMENT
    assert second.seal("name", "vllm-8000") == sealed
    second.close()


def test_only_we_may_read_what_is_there(folder: StateFolder, place: Path) -> None:
    folder.write(state())

    assert {path.name: mode(path) for path in place.iterdir()} == {STATE: 0o600, KEY: 0o600, LOCK: 0o600}
    assert mode(place) == 0o700


def test_hashes_need_the_key_and_do_not_mix_up_their_parts(folder: StateFolder, tmp_path: Path) -> None:
    other = StateFolder(str(tmp_path / "other"))

    assert folder.seal("name", "a") != other.seal("name", "a")
    assert folder.seal("ab", "c") != folder.seal("a", "bc")
    assert folder.seal("a", 1) == folder.seal("a", "1")
    assert folder.seal("\udcff") != folder.seal("?")
    other.close()


def test_servers_beyond_the_bound_are_left_out_the_least_urgent_first(
    folder: StateFolder, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        folder.write(state(servers=[{"name": str(n), "fill": "x" * 10_000} for n in range(200)]))

    assert (place / STATE).stat().st_size <= LARGEST_BYTES
    kept = folder.read()["servers"]
    assert [entry["name"] for entry in kept] == [str(n) for n in range(len(kept))]
    assert 90 < len(kept) < 200
    assert [record.getMessage() for record in caplog.records] == ["state is cut"]


def test_a_server_that_is_too_large_itself_takes_no_room_from_the_others(folder: StateFolder) -> None:
    """One of some hundred ranks may be."""
    small = [{"name": "b"}, {"name": "c"}]

    folder.write(state(servers=[{"name": "a", "fill": "x" * LARGEST_BYTES}, *small]))

    assert folder.read()["servers"] == small


def test_a_write_that_fails_leaves_the_old_document(
    folder: StateFolder, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write(state())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder.write(state(boot="other"))

    assert folder.read() == DOCUMENT
    assert not (place / NEW).exists()


def test_what_a_killed_process_left_half_written_is_no_obstacle(folder: StateFolder, place: Path) -> None:
    (place / NEW).write_text("half")
    folder.write(state())

    assert folder.read() == DOCUMENT


# --- what cannot be trusted is set aside ----------------------------------------------------------------------


def written(place: Path) -> bytes:
    folder = StateFolder(str(place))
    folder.write(state())
    folder.close()
    return (place / STATE).read_bytes()


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("is no state", b""),
        ("is no state", b"\x00" * 100),
        ("is no state", b"\xff\xfe"),
        ("is no state", b"[" * 100_000),
        ("is no state", b'{"a":' * 100_000),
        ("is no state", b"[]"),
        ("is no state", b"7"),
        ("is no state", b'{"version":1,"mac":"00","state":{"a":NaN}}'),
        ("is no state", b'{"version":1,"mac":"00","state":{"a":1e999}}'),
        ("is no state", b'{"version":1,"mac":"00","state":' + b"9" * 5000 + b"}"),
        ("has another version", b'{"version":2,"mac":"00","state":{}}'),
        ("was changed", b'{"version":1,"mac":"00","state":{}}'),
        ("was changed", b'{"version":1,"mac":"\\ud800","state":{}}'),
        ("was changed", b'{"version":1,"mac":7,"state":{}}'),
        ("is too large", b" " * (2 * LARGEST_BYTES)),
    ],
)
def test_what_is_no_state_of_ours_is_set_aside_with_one_warning(
    what: str, content: bytes, folder: StateFolder, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (place / STATE).write_bytes(content)

    assert folder.read() is None
    assert [what in record.problem for record in caplog.records] == [True]  # type: ignore[attr-defined]
    assert (place / CORRUPT).read_bytes() == content
    assert not (place / STATE).exists()
    assert folder.read() is None
    folder.write(state())
    assert folder.read() == DOCUMENT


def test_only_the_last_one_set_aside_is_kept(folder: StateFolder, place: Path) -> None:
    for content in (b"first", b"second"):
        (place / STATE).write_bytes(content)
        folder.read()

    assert (place / CORRUPT).read_bytes() == b"second"


def test_a_document_written_with_another_key_is_not_used(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(place)
    (place / KEY).write_bytes(os.urandom(KEY_BYTES))
    folder = StateFolder(str(place))

    assert folder.read() is None
    assert (place / CORRUPT).exists()
    folder.close()


@pytest.mark.parametrize("key", [b"", b"short", b"x" * (KEY_BYTES + 1)])
def test_a_key_that_is_none_is_made_anew(key: bytes, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(place)
    (place / KEY).write_bytes(key)
    StateFolder(str(place)).close()

    assert len((place / KEY).read_bytes()) == KEY_BYTES
    assert "state key" in caplog.text


def test_a_key_that_others_may_read_is_made_anew(place: Path) -> None:
    written(place)
    key = (place / KEY).read_bytes()
    (place / KEY).chmod(0o644)
    StateFolder(str(place)).close()

    assert (place / KEY).read_bytes() != key
    assert mode(place / KEY) == 0o600


@pytest.mark.parametrize("name", [STATE, KEY])
def test_no_link_is_followed(name: str, place: Path, tmp_path: Path) -> None:
    written(place)
    elsewhere = tmp_path / "elsewhere"
    (place / name).rename(elsewhere)
    (place / name).symlink_to(elsewhere)
    folder = StateFolder(str(place))

    assert folder.read() is None
    folder.write(state())
    assert folder.read() == DOCUMENT
    assert not (place / name).is_symlink()
    assert elsewhere.exists()
    folder.close()


def test_a_fifo_in_place_of_the_document_holds_nobody_up(folder: StateFolder, place: Path) -> None:
    os.mkfifo(place / STATE)

    assert folder.read() is None
    folder.write(state())
    assert folder.read() == DOCUMENT


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_random_bytes_are_no_state(folder: StateFolder, place: Path, content: bytes) -> None:
    (place / STATE).write_bytes(content)

    assert folder.read() is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(0, 255), st.sampled_from(["put", "cut", "double"]))
def test_a_changed_document_is_read_as_it_was_or_not_at_all(
    folder: StateFolder, place: Path, where: int, byte: int, how: str
) -> None:
    folder.write(state())
    whole = (place / STATE).read_bytes()
    where %= len(whole)
    changes = {
        "put": whole[:where] + bytes((byte,)) + whole[where + 1 :],
        "cut": whole[:where],
        "double": whole[:where] + whole[where // 2 :],
    }
    (place / STATE).write_bytes(changes[how])

    assert folder.read() in (None, DOCUMENT)


# --- folders that cannot be used ------------------------------------------------------------------------------


def test_a_folder_is_made_but_not_its_parent(tmp_path: Path) -> None:
    StateFolder(str(tmp_path / "state")).close()

    with pytest.raises(FileNotFoundError):
        StateFolder(str(tmp_path / "missing" / "state"))


def test_a_link_to_the_folder_is_followed(tmp_path: Path) -> None:
    """systemd makes one for units with a dynamic user."""
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "private")
    StateFolder(str(tmp_path / "state")).close()

    assert (tmp_path / "private" / KEY).exists()


def test_the_second_process_does_not_get_the_folder(
    folder: StateFolder, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "LOCK_SECONDS", 0.0)
    with pytest.raises(StateError, match="another stallwatch"):
        StateFolder(str(place))


def test_a_process_that_is_about_to_end_is_waited_for(place: Path) -> None:
    first = StateFolder(str(place))
    timer = threading.Timer(0.1, first.close)
    timer.start()

    StateFolder(str(place)).close()
    timer.join()


def test_a_folder_everybody_may_write_into_is_used_with_a_warning(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.mkdir()
    StateFolder(str(place)).close()
    assert caplog.records == []
    place.chmod(0o777)
    StateFolder(str(place)).close()

    assert "writable by everybody" in caplog.text


def test_a_folder_of_another_user_is_not_used(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    place.mkdir()
    os.chown(place, 12345, 12345)

    with pytest.raises(StateError, match="another user"):
        StateFolder(str(place))


def test_a_document_of_another_user_is_not_used(folder: StateFolder, place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file of another user")
    folder.write(state())
    os.chown(place / STATE, 12345, 12345)

    assert folder.read() is None


def proc(tmp_path: Path) -> str:
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("c0ffee\n")
    return str(tmp_path / "proc")


def test_a_start_gets_folder_boot_and_document(place: Path, tmp_path: Path) -> None:
    written(place)
    found = open_state(str(place), proc(tmp_path))

    assert found is not None
    folder, boot, document = found
    assert (boot, document) == (folder.seal("boot", "c0ffee"), DOCUMENT)
    folder.close()


@pytest.mark.parametrize(
    ("path", "proc_at"), [("missing/state", "proc"), ("file", "proc"), ("state", "nowhere")], ids=str
)
def test_a_start_goes_on_without_state_and_says_so_once(
    path: str, proc_at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proc(tmp_path)
    (tmp_path / "file").write_text("")

    assert open_state(str(tmp_path / path), str(tmp_path / proc_at)) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_start_does_not_wait_for_a_disk_that_hangs(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = threading.Event()

    def open_folder(path: str) -> int:
        hanging.wait(SOON)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(state_file, "_open_folder", open_folder)
    try:
        assert open_state(str(place), proc(tmp_path), seconds=0.05) is None
        assert caplog.records[0].problem == "the disk does not answer"  # type: ignore[attr-defined]
    finally:
        hanging.set()


# --- the writer -----------------------------------------------------------------------------------------------


class Disk(StateFolder):
    """A folder whose writes are counted, held or refused by the test."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.writes: list[Document] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.go_on.set()

    def write(self, state: Document) -> None:
        self.begun.set()
        self.go_on.wait(SOON)
        if self.error is not None:
            raise self.error
        self.writes.append(state)
        super().write(state)


def test_the_newest_document_wins_and_the_last_one_is_written_at_the_end(place: Path) -> None:
    disk = Disk(str(place))
    writer = StateWriter(disk)
    writer.start()
    disk.go_on.clear()
    writer.offer(state(boot="1"))
    assert disk.begun.wait(SOON)
    for number in range(2, 100):
        writer.offer(state(boot=str(number)))  # returns while the disk hangs
    disk.go_on.set()

    assert writer.close(SOON)
    assert [state.rest["boot"] for state in disk.writes] == ["1", "99"]
    assert json.loads((place / STATE).read_text())["state"]["boot"] == "99"


def test_what_is_written_already_is_not_written_again(place: Path) -> None:
    disk = Disk(str(place))
    writer = StateWriter(disk)
    writer._write(state())
    writer.start()
    writer.offer(state())

    assert writer.close(SOON)
    assert len(disk.writes) == 1


def test_a_disk_that_hangs_does_not_hold_up_the_end(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(str(place))
    writer = StateWriter(disk)
    writer.start()
    disk.go_on.clear()
    writer.offer(state())

    assert not writer.close(0.05)
    assert "not written in time" in caplog.text
    disk.go_on.set()
    writer._thread.join(SOON)
    disk.close()


def test_writes_that_fail_are_said_once_and_again_when_they_work(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = Disk(str(place))
    writer = StateWriter(disk)
    for error in (OSError(errno.ENOSPC, "full"), OSError(errno.EROFS, "read-only"), None, None):
        disk.error = error
        writer._write(state())

    assert [record.getMessage() for record in caplog.records] == ["state cannot be written", "state is written again"]
    disk.close()


def _removed(place: Path) -> None:
    shutil.rmtree(place)


def _removed_and_made_again(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir(0o700)


def _moved_aside(place: Path) -> None:
    """What was there stays open, and has names all the same."""
    place.rename(place.with_name("aside"))
    place.mkdir(0o700)


def _replaced_by_anothers(place: Path) -> None:
    shutil.rmtree(place)
    written(place)  # with a key that is not ours


def _emptied(place: Path) -> None:
    for file in place.iterdir():
        file.unlink()


def _without_lock(place: Path) -> None:
    (place / LOCK).unlink()


def _without_key(place: Path) -> None:
    (place / KEY).unlink()


@pytest.mark.parametrize(
    "remove",
    [
        _removed,
        _removed_and_made_again,
        _moved_aside,
        _replaced_by_anothers,
        _emptied,
        _without_lock,
        _without_key,
    ],
)
def test_what_is_removed_while_we_run_is_made_again_also_when_nothing_changed(
    remove: Callable[[Path], None], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = StateFolder(str(place))
    sealed, writer = folder.seal("x"), StateWriter(folder)
    writer._write(state())
    remove(place)
    caplog.clear()
    writer.start()
    writer.offer(state())
    with pytest.MonkeyPatch.context() as hurry:
        hurry.setattr(state_file, "LOCK_SECONDS", 0.0)
        wait_for(lambda: (place / LOCK).exists() and (place / STATE).exists() and bool(caplog.records))
        with pytest.raises(StateError, match="another stallwatch uses it"):
            StateFolder(str(place))
    assert writer.close(SOON)
    after = StateFolder(str(place))

    assert after.read() == DOCUMENT
    assert after.seal("x") == sealed
    assert [record.getMessage() for record in caplog.records] == [
        "state folder was removed or replaced: the state is written anew"
    ]
    after.close()


def wait_for(condition: Callable[[], bool]) -> None:
    """Of another thread."""
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_what_nobody_removed_is_not_made_again(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The silent twin: also where the path is a link, and where another folder beside it comes and goes."""
    place.mkdir()
    link = place.with_name("link")
    link.symlink_to(place)
    folder = StateFolder(str(link))
    writer = StateWriter(folder)
    for number in range(3):
        (place / f"{number}").mkdir()
        writer._write(state(boot=str(number)))

    assert not folder.renew()
    assert not caplog.records
    folder.close()


def test_a_folder_that_cannot_be_made_again_is_said_once_and_taken_when_it_is_there(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else is in its place, then another process has it, then it goes."""
    monkeypatch.setattr(state_file, "LOCK_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    folder = StateFolder(str(place))
    writer = StateWriter(folder)
    shutil.rmtree(place)
    place.write_text("a file")
    writer._write(state())
    place.unlink()
    other = StateFolder(str(place))
    writer._write(state())
    other.close()
    writer._write(state())

    assert [record.getMessage() for record in caplog.records] == [
        "state cannot be written",
        "state folder was removed or replaced: the state is written anew",
        "state is written again",
    ]
    folder.leave()
    folder.close()


def test_folders_that_are_removed_again_and_again_leave_nothing_open(place: Path) -> None:
    folder = StateFolder(str(place))
    writer = StateWriter(folder)
    writer._write(state())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        shutil.rmtree(place)
        writer._write(state())

    assert len(os.listdir("/proc/self/fd")) == before + 2
    folder.leave()
    assert len(os.listdir("/proc/self/fd")) == before
    folder.close()


def test_it_is_due_every_so_often_and_at_once_for_a_new_page() -> None:
    schedule, none, page = Schedule(), frozenset[str](), frozenset(("s",))
    due = [schedule.is_due(t, none) for t in (100.0, 105.0, 110.0, 100.0 + WRITE_SECONDS)]

    assert due == [True, False, False, True]
    assert [schedule.is_due(116.0, page), schedule.is_due(117.0, page), schedule.is_due(118.0, none)] == [
        True,
        False,
        False,
    ]
