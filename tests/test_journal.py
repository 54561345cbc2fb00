"""Units in the journal: a child that follows them (a small program in its place), and sockets that lead there."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.sources import Moment
from stallwatch.sources.logs import journal
from stallwatch.sources.logs.journal import (
    FIRST_WORD_SECONDS,
    LONGEST_BREAK_SECONDS,
    SETTLE_SECONDS,
    JournalTail,
    journal_behind,
    parse_record,
    place_of,
)

WALL = 1780000100.0
"""When the child is started; what it tells is older unless said."""
UNIT = r"vllm\x2d7b@a:1.service"


def record(message: object = "Load weight begin.", cursor: str = "c1", **more: object) -> bytes:
    """A line as `journalctl -o json` prints it."""
    fields = {"__CURSOR": cursor, "__REALTIME_TIMESTAMP": "1780000000500000", "_SYSTEMD_UNIT": UNIT, "MESSAGE": message}
    return json.dumps({**fields, **more}).encode() + b"\n"


class Child:
    """A tail over a script in the place of journalctl, with a clock that stands still unless it is set."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.now = folder, 1000.0
        self.program = folder / "journalctl"
        self.program.write_text(f'#!/bin/sh\necho "$0 $*" >> {folder}/asked\n{script}')
        self.program.chmod(0o755)
        self.tail = JournalTail(f"journal::{UNIT}", 1780000000.7, self.moment, str(self.program))

    def moment(self) -> Moment:
        return Moment(self.now, WALL + self.now - 1000)

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()

    def until(self, size: int) -> bytes:
        """Read until so many bytes came; the child takes its time."""
        text = b"".join(self.tail.read(1 << 20))
        while len(text) < size and self.comes():
            text += b"".join(self.tail.read(1 << 20))
        return text

    def comes(self) -> bool:
        """Wait for the child to write or to end."""
        child = self.tail._child
        pipe = child.process.stdout if child is not None else None
        return pipe is not None and bool(select.select([pipe], [], [], 20)[0])

    def until_it_ends(self) -> bytes:
        text, child = b"".join(self.tail.read(1 << 20)), self.tail._child
        while child is not None and self.tail._child is child and self.comes():
            text += b"".join(self.tail.read(1 << 20))
        return text


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = len(os.listdir("/proc/self/fd"))
    yield tmp_path
    assert len(os.listdir("/proc/self/fd")) == before


def printed(*records: bytes) -> str:
    return "".join(f"cat <<'EOF'\n{one.decode()}EOF\n" for one in records)


def test_a_unit_is_followed_from_the_begin_of_its_server(folder: Path) -> None:
    child = Child(folder, printed(record(), record("Load weight end.", "c2")) + "exec sleep 60")
    text = child.until(36)
    child.tail.close()

    assert text == b"Load weight begin.\nLoad weight end.\n"
    (asked,) = child.asked
    for part in ("--follow", "--lines=all", "--all", "--output=json", "--since=@1780000000", f"_SYSTEMD_UNIT={UNIT}"):
        assert f" {part}" in asked
    assert child.tail.modified == 1780000000.5


def test_a_users_unit_is_asked_for_with_its_user(folder: Path) -> None:
    own = {"_SYSTEMD_UNIT": "user@1000.service", "_SYSTEMD_USER_UNIT": UNIT}
    other = {**own, "_SYSTEMD_USER_UNIT": "other.service"}
    child = Child(folder, printed(record("a", **own), record("b", "c2", **other)) + "exec sleep 60")
    child.tail.path = f"journal::1000/{UNIT}"
    text = child.until(2)
    child.tail.close()

    assert text == b"a\n"
    assert child.asked[0].endswith(f" _SYSTEMD_USER_UNIT={UNIT} _UID=1000")


@pytest.mark.parametrize(("root", "namespace"), [("/", ""), ("/host", "gpu")])
def test_the_journal_of_another_root_or_namespace_is_asked_by_name(folder: Path, root: str, namespace: str) -> None:
    child = Child(folder, printed(record()) + "exec sleep 60")
    child.tail.path, child.tail.root = f"journal:{namespace}:{UNIT}", root
    child.until(1)
    child.tail.close()

    assert ("--root=/host" in child.asked[0]) is (root == "/host")
    assert ("--namespace=gpu" in child.asked[0]) is (namespace == "gpu")


def test_the_history_is_read_when_nothing_came_for_a_while(folder: Path) -> None:
    child = Child(folder, printed(record()) + "exec sleep 60")
    child.until(1)
    assert (child.tail.backlog, child.tail.heard) == (1, True)
    assert child.tail.bytes_read < (child.tail.found or 0)

    child.now += SETTLE_SECONDS
    list(child.tail.read(1 << 20))
    child.tail.close()

    assert (child.tail.backlog, child.tail.found) == (0, child.tail.bytes_read)


def test_the_history_is_read_when_a_word_is_younger_than_the_child(folder: Path) -> None:
    """Also of a unit that never pauses."""
    young = record("young", __REALTIME_TIMESTAMP=str(int(WALL * 1e6)))
    child = Child(folder, printed(record("old")) + "exec sleep 60")
    child.until(4)
    assert (child.tail.backlog, child.tail.bytes_read < (child.tail.found or 0)) == (1, True)

    child.tail.close()
    again = Child(folder, printed(record("old"), young) + "exec sleep 60")
    again.until(10)
    again.tail.close()

    assert (again.tail.backlog, again.tail.found) == (0, 10)


def test_a_unit_that_never_wrote_there_is_not_heard(folder: Path) -> None:
    child = Child(folder, printed(record(_SYSTEMD_UNIT="other.service"), b"-- No entries --\n") + "exec sleep 60")
    list(child.tail.read(1 << 20))
    assert child.tail.backlog == 1
    child.now += FIRST_WORD_SECONDS
    assert list(child.tail.read(1 << 20)) == []
    child.tail.close()

    assert (child.tail.heard, child.tail.bytes_read, child.tail.backlog) == (False, 0, 0)


def test_what_was_told_before_a_restart_of_ours_is_known_by_its_time(folder: Path) -> None:
    records = [record(str(number), __REALTIME_TIMESTAMP=str(1780000000000000 + number)) for number in (1, 2, 3)]
    child = Child(folder, printed(*records) + "exec sleep 60")
    child.tail.told = 1780000000000002
    old: list[bytes] = []
    new: list[bytes] = []
    while not new and (child.tail._child is None or child.comes()):
        for text in child.tail.read(1 << 20):
            (old if child.tail.is_old else new).append(text)
    child.tail.close()

    assert (b"".join(old), b"".join(new)) == (b"1\n2\n", b"3\n")
    assert child.tail.offset == 1780000000000003


def test_a_child_that_ends_is_started_again_behind_what_it_told(folder: Path) -> None:
    child = Child(folder, printed(record(cursor="c1"), record(cursor="s=c2;i=9")))
    child.until_it_ends()
    list(child.tail.read(1 << 20))
    assert len(child.asked) == 1

    child.now += 1
    child.until_it_ends()

    assert "--since=" in child.asked[0]
    assert "--after-cursor=s=c2;i=9" in child.asked[1]
    assert child.tail.reason is None


def test_a_child_that_only_fails_is_asked_less_and_less_and_is_a_reason(folder: Path) -> None:
    child = Child(folder, "exit 1")
    starts: list[int] = []
    for second in range(200):
        child.now = 1000.0 + second
        child.until_it_ends()
        if len(child.asked) > len(starts):
            starts.append(second)

    assert starts == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert starts[-1] - starts[-2] == LONGEST_BREAK_SECONDS
    assert (child.tail.reason, child.tail.errors) == ("error", 1)


def test_without_journalctl_nothing_is_read_and_nothing_raised(folder: Path) -> None:
    tail = JournalTail(f"journal::{UNIT}", 0.0, lambda: Moment(0.0, 0.0), str(folder / "none"))

    assert list(tail.read(1 << 20)) == []
    assert (tail.identity, tail.heard) == (None, False)


def test_closing_ends_the_child(folder: Path) -> None:
    child = Child(folder, "exec sleep 60")
    list(child.tail.read(1 << 20))
    process = child.tail._child.process if child.tail._child else None
    child.tail.close()
    child.tail.close()

    assert process is not None
    assert process.returncode is not None


def test_a_read_is_bounded_and_goes_on(folder: Path) -> None:
    child = Child(folder, f"yes '{record('x' * 100).decode().strip()}'")
    text = b"".join(child.tail.read(1))
    while not text and child.comes():
        text = b"".join(child.tail.read(1))
    child.tail.close()

    assert len(text) <= journal.READ_BYTES
    assert child.tail.backlog == 1


@pytest.mark.parametrize(("pieces", "backlog"), [(1, 0), (journal.PIPE_BYTES // 1024 - 1, 0), (64, 1), (65, 1)])
def test_a_child_whose_pipe_was_full_has_more_to_tell(
    pieces: int, backlog: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not get to write before we are through, and a log that was read to its end may rest."""
    child = Child(folder, "exec sleep 60")
    list(child.tail.read(1 << 20))
    child.now += FIRST_WORD_SECONDS
    list(child.tail.read(1 << 20))
    assert child.tail.backlog == 0
    piece = record("x" * (1024 - len(record(""))))
    there = iter([piece] * pieces)
    monkeypatch.setattr(JournalTail, "_available", lambda tail, child: next(there, None))
    assert len(piece) == 1024

    assert len(b"".join(child.tail.read(1 << 20))) > 0
    assert child.tail.backlog == backlog
    assert list(child.tail.read(1 << 20)) == []
    assert child.tail.backlog == 0
    child.tail.close()


def test_a_record_without_end_is_dropped_at_a_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_RECORD_BYTES", 1000)
    child = Child(folder, "head -c 100000 /dev/zero; echo; " + printed(record("after")) + "exec sleep 60")
    text = child.until(6)
    child.tail.close()

    assert text == b"after\n"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("plain", b"plain\n"),
        (list(b"\x1b[1mcolour\xff"), b"\x1b[1mcolour\xff\n"),
        (["twice", list(b"set")], b"twice set\n"),
        (None, b"\n"),
        ("two\nlines", b"two\rlines\n"),
        ("half a \ud800 pair", b"half a ? pair\n"),
        ([256], b"\n"),
        ([[[1]]], b"\n"),
        ({"odd": 1}, b"\n"),
    ],
)
def test_a_message_is_text_or_numbers_or_a_list_of_both(message: object, text: bytes) -> None:
    found = parse_record(record(message), UNIT)

    assert found is not None
    assert found.text == text


@pytest.mark.parametrize(
    ("line_break", "text"), [("line-max", b"x"), ("eof", b"x\n"), ("nul", b"x\n"), ("pid-change", b"x\n")]
)
def test_only_a_line_that_was_too_long_goes_on(line_break: str, text: bytes) -> None:
    found = parse_record(record("x", _LINE_BREAK=line_break), UNIT)

    assert found is not None
    assert found.text == text


def test_records_of_others_and_damaged_ones_are_none() -> None:
    for line in (record(_SYSTEMD_UNIT="init.scope"), b"", b"{", b"[]", b"[" * 100_000, b"\xff"):
        assert parse_record(line, UNIT) is None


def test_a_time_that_is_none_is_none() -> None:
    times: tuple[object, ...] = ("x", None, "9" * 4000, "9" * 5000, [])
    for time in times:
        found = parse_record(record(__REALTIME_TIMESTAMP=time), UNIT)
        assert found is not None
        assert found.time == 0


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(record))
def test_no_bytes_raise(line: bytes) -> None:
    parse_record(line, UNIT)


@pytest.mark.parametrize(
    "unit",
    [
        "",
        "*.service",
        "a b.service",
        "root/a.service",
        "1/2/a.service",
        "/a.service",
        "x" * 300,
        "a\nb.service",
        "--root=x y",
    ],
)
def test_what_is_no_unit_has_no_place(unit: str) -> None:
    assert place_of(unit) is None
    assert place_of("vllm.service", "a/b") is None
    assert place_of(UNIT, "gpu") == f"journal:gpu:{UNIT}"


@pytest.mark.parametrize(
    ("path", "namespace"),
    [
        ("/run/systemd/journal/stdout", ""),
        ("/run/systemd/journal.gpu/stdout", "gpu"),
        ("/run/systemd/journal/socket", None),
        ("/run/systemd/private", None),
        ("/tmp/run/systemd/journal/stdout", None),
        (None, None),
    ],
)
def test_a_socket_leads_to_the_journal_when_its_other_end_does(path: str | None, namespace: str | None) -> None:
    assert journal_behind(7, lambda inode: path) == namespace


def test_the_kernel_tells_what_a_socket_is_connected_to(tmp_path: Path) -> None:
    """Its own row has no name: a process's side of a connection is not bound."""
    path = str(tmp_path / "stdout")
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as client,
    ):
        listener.bind(path)
        listener.listen()
        client.connect(path)
        with listener.accept()[0]:
            assert journal._peer_name(os.fstat(client.fileno()).st_ino) in (path, None)  # None: a kernel without
        one, other = socket.socketpair()
        with one, other:
            assert journal._peer_name(os.fstat(one.fileno()).st_ino) is None
    assert journal._peer_name(1) is None
