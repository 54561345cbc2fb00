"""What happens to log files while they are followed, with real files; and everything at once against a reference."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stallwatch.config import Limits
from stallwatch.frameworks import load_frameworks
from stallwatch.sources.logs.lines import LogScanner
from stallwatch.sources.logs.opened import FINGERPRINT_BYTES
from stallwatch.sources.logs.tail import CHUNK_BYTES, LogTail
from test_logs import Node, key_of, patterned, restarted, values
from test_logs import seal as seal_of_logs

MUCH = 1 << 30
FRAMEWORK = next(framework for framework in load_frameworks() if framework.name == "sglang")
BANNER = b"the same first line of every start\n"


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

    def counts(self) -> tuple[int, int, int]:
        return self.tail.rotations, self.tail.truncations, self.tail.errors


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_bytes(b"first\n")
    return path


@pytest.fixture
def reader(log: Path) -> Reader:
    reader = Reader(log)
    assert reader.read() == b"first\n"
    return reader


# --- cut, written anew -----------------------------------------------------------------------------------------


def test_a_copied_and_truncated_log_goes_on_with_nothing_lost_or_doubled(log: Path, reader: Reader) -> None:
    with log.open("ab", buffering=0) as writer:
        shutil.copy(log, log.with_suffix(".1"))
        os.truncate(log, 0)
        writer.write(b"new\n")

        assert reader.read() == b"new\n"
        writer.write(b"more\n")
        assert reader.read() == b"more\n"
    assert reader.counts() == (0, 1, 0)


def test_a_log_cut_twice_by_a_writer_that_keeps_its_offset_is_seen_to_be_cut_twice(tmp_path: Path) -> None:
    path, block = tmp_path / "x.log", b"a" * 50_000
    with path.open("wb", buffering=0) as writer:
        writer.write(block)
        reader = Reader(path)
        reader.read()
        for text in (b"one\n" * 9000, b"two\n" * 9000):
            os.truncate(path, 0)
            writer.write(text)
            reader.read()

    assert reader.parts == [block, b"one\n" * 9000, b"two\n" * 9000]
    assert reader.counts() == (0, 2, 0)


def test_a_log_that_begins_with_a_hole_when_it_is_found_is_read_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    with path.open("wb", buffering=0) as writer:
        writer.seek(1 << 33)
        writer.write(b"after\n")
    reader = Reader(path)

    assert reader.read() == b"after\n"
    assert reader.tail.bytes_read == 6
    assert (reader.tail.offset, reader.tail.backlog) == (path.stat().st_size, 0)


def test_a_log_cut_and_not_written_since_is_all_hole_and_nothing_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.touch()
    os.truncate(path, 1 << 33)
    reader = Reader(path)

    assert reader.read() == b""
    append(path, b"here\n")
    assert reader.read() == b"here\n"


@pytest.mark.parametrize("size", ["shorter", "the same", "longer"])
def test_a_log_written_anew_with_another_beginning_is_told_by_it(size: str, log: Path, reader: Reader) -> None:
    text = {"shorter": b"x\n", "the same": b"other\n", "longer": b"other and longer\n"}[size]
    log.write_bytes(text)

    assert reader.read() == text
    assert reader.counts() == (0, 1, 0)


def test_a_log_written_anew_in_the_same_moment_with_the_same_size_is_told_by_its_beginning(
    log: Path, reader: Reader
) -> None:
    before = log.stat()
    log.write_bytes(b"other\n")
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert reader.read() == b"other\n"


def test_banners_alike_do_not_hide_that_a_log_was_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(BANNER * 20 + b"one\n")
    reader = Reader(path)
    reader.read()

    path.write_bytes(BANNER * 20 + b"two\n" * 9)

    assert reader.read() == BANNER * 20 + b"two\n" * 9
    assert reader.counts() == (0, 1, 0)


def test_a_log_that_only_grows_is_never_taken_for_another(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.touch()
    reader = Reader(path)
    for _ in range(3 * FINGERPRINT_BYTES // 7):
        append(path, b"a line\n")
        assert reader.read() == b"a line\n"
        path.chmod(0o640)
        os.utime(path)

    assert reader.counts() == (0, 0, 0)


def test_a_file_that_shrinks_while_it_is_read_is_read_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"a" * (3 * CHUNK_BYTES))
    reader, chunks = Reader(path), list[bytes]()
    for chunk in reader.tail.read(MUCH):
        chunks.append(chunk)
        os.truncate(path, CHUNK_BYTES // 2)

    assert b"".join(chunks) == b"a" * CHUNK_BYTES
    assert reader.read() == b"a" * (CHUNK_BYTES // 2)
    assert reader.counts() == (0, 1, 0)


# --- moved, deleted, replaced -----------------------------------------------------------------------------------


def test_the_number_of_a_deleted_log_is_not_given_to_another_while_it_is_open(log: Path, reader: Reader) -> None:
    """An inode is used again once nobody has it open: so the descriptor is kept."""
    identity = reader.tail.identity
    log.unlink()
    log.write_bytes(b"again\n")

    assert reader.read() == b"again\n"
    assert reader.tail.identity != identity
    assert reader.counts() == (1, 0, 0)


def test_a_rotated_log_is_read_to_its_end_though_it_was_packed_and_deleted(log: Path, reader: Reader) -> None:
    append(log, b"last\n")
    old = log.rename(log.with_suffix(".log.1"))
    with gzip.open(log.with_suffix(".log.1.gz"), "wb") as packed:
        packed.write(old.read_bytes())
    old.unlink()
    log.write_bytes(b"new\n")

    reader.read()
    assert reader.parts == [b"first\nlast\n", b"new\n"]
    assert reader.counts() == (1, 0, 0)


def test_of_three_rotations_between_two_looks_the_first_and_the_last_file_are_read(log: Path, reader: Reader) -> None:
    for number in range(3):
        append(log, b"end of %d\n" % number)
        log.rename(log.with_suffix(f".{number}"))
        log.touch()
    append(log, b"last\n")
    reader.read()

    assert reader.parts == [b"first\nend of 0\n", b"last\n"]
    assert reader.tail.rotations == 1


ORDERS = {
    "numbers": ("{log}.2", "{log}.1"),
    "dates": ("{log}-20260601", "{log}-20260602"),
    "times": ("{log}.2026-06-02_08-00-00", "{log}.2026-06-02_09-00-00"),
    "within": ("server-20260601.log", "server-20260602.log"),
    "kubelet": ("{log}.20260602-080000", "{log}.20260602-090000"),
}
"""Names of the file that was open and of the one after it."""


def rotate_twice(log: Path, names: tuple[str, ...]) -> list[Path]:
    """Between two looks: the file that was open, the one that came and went, and a new one at the path."""
    moved = [log.parent / name.format(log=log.name) for name in names]
    append(log, b"end\n")
    log.rename(moved[0])
    log.write_bytes(b"between\n")
    log.rename(moved[1])
    log.write_bytes(b"new\n")
    return moved


@pytest.mark.parametrize("names", ORDERS.values(), ids=ORDERS)
def test_what_came_and_went_between_two_looks_is_read_where_the_names_show_its_place(
    names: tuple[str, ...], log: Path, reader: Reader
) -> None:
    rotate_twice(log, names)

    reader.read()
    append(log, b"more\n")
    reader.read()

    assert reader.parts == [b"first\nend\n", b"between\n", b"new\nmore\n"]
    assert reader.counts() == (2, 0, 0)


def test_ten_rotations_between_two_looks_are_read_in_bounded_steps(log: Path, reader: Reader) -> None:
    log.rename(log.with_name("server.log.10"))
    for number in range(9, 0, -1):
        log.with_name(f"server.log.{number}").write_bytes(b"%d\n" % number)
    log.write_bytes(b"new\n")

    steps = [reader.read(3) for _ in range(12)]

    assert b"".join(steps) == b"9\n8\n7\n6\n5\n4\n3\n2\n1\nnew\n"
    assert max(map(len, steps)) <= 3
    assert reader.counts() == (10, 0, 0)


@pytest.mark.parametrize(
    "how", ["foreign names", "packed", "two kinds", "apart", "a link", "of another user", "rising"]
)
def test_what_may_be_of_another_log_is_no_part_of_this_one(
    how: str, log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"foreign names": ("{log}.a", "{log}.b"), "two kinds": ("{log}.2", "{log}-20260602")}
    between = rotate_twice(log, names.get(how, ORDERS["numbers"]))[1]
    if how == "packed":
        between.rename(f"{between}.gz")
    elif how == "a link":
        between.rename(log.with_name("other"))
        between.symlink_to("other")
    elif how == "apart":
        reader.tail.is_apart = lambda path: path == str(between)
    elif how == "rising":  # numbers that rise with time: this one was read long ago
        os.utime(between, (1000, 1000))
    elif how == "of another user":
        reader.tail.owner, real = 1, os.lstat

        def lstat(path: str) -> os.stat_result:
            fields = list(real(path))
            fields[4] = 2 if os.path.basename(path) == between.name else 1
            return os.stat_result(fields)

        monkeypatch.setattr(os, "lstat", lstat)
        monkeypatch.setattr(LogTail, "_check", lambda tail, status: None)

    reader.read()

    assert b"".join(reader.parts) == b"first\nend\nnew\n"
    assert reader.tail.rotations == 1


def test_a_rotated_log_that_is_far_behind_is_read_in_bounded_steps_before_its_successor(
    log: Path, reader: Reader
) -> None:
    append(log, b"a" * 1000)
    log.rename(log.with_suffix(".1"))
    log.write_bytes(b"new\n")

    steps = [reader.read(400) for _ in range(5)]

    assert [len(step) for step in steps] == [400, 400, 204, 0, 0]
    assert b"".join(steps) == b"a" * 1000 + b"new\n"


def test_a_link_to_dated_files_is_followed_from_file_to_file(tmp_path: Path) -> None:
    link = tmp_path / "current.log"
    parts = []
    reader = Reader(link)
    for day in range(4):
        dated, new = tmp_path / f"{day}.log", tmp_path / "new"
        dated.write_bytes(b"day %d\n" % day)
        new.symlink_to(dated)
        new.replace(link)
        parts.append(dated.read_bytes())
        reader.read()

    assert reader.parts == parts
    assert reader.counts() == (3, 0, 0)


def test_a_link_that_leads_nowhere_for_a_while_loses_nothing(log: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(log)
    reader = Reader(link)
    reader.read()

    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    append(log, b"late\n")
    assert reader.read() == b"late\n"
    link.unlink()
    link.symlink_to(log)
    append(log, b"later\n")

    assert reader.read() == b"later\n"
    assert reader.counts() == (0, 0, 0)


# --- errors ----------------------------------------------------------------------------------------------------


class Failing:
    """os.fstat that fails for a while, as a handle does whose file server forgot it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self._fstat = os.fstat
        monkeypatch.setattr(os, "fstat", self)

    def __call__(self, descriptor: int) -> os.stat_result:
        if self.error is not None:
            error, self.error = self.error, None
            raise OSError(error, os.strerror(error))
        return self._fstat(descriptor)


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
def test_a_stale_handle_is_opened_anew_and_read_on_where_it_was(
    error: int, log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch)
    append(log, b"second\n")
    failing.error = error

    assert (reader.read(), reader.tail.reason) == (b"", "error")
    assert (reader.read(), reader.tail.reason) == (b"second\n", None)
    assert reader.parts == [b"first\nsecond\n"]
    assert reader.counts() == (0, 0, 1)


def test_a_stale_handle_whose_file_was_replaced_meanwhile_is_a_rotation(
    log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch)
    failing.error = errno.ESTALE
    reader.read()
    log.unlink()  # its number is free now, and mostly given to the next file
    log.write_bytes(b"other\n")

    assert reader.read() == b"other\n"
    assert reader.parts == [b"first\n", b"other\n"]
    assert reader.counts() == (1, 0, 1)


def test_an_error_that_stays_is_told_and_counted_once(
    log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> bytes:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fails)
        for _ in range(3):
            reader.read()
            assert reader.tail.reason == "error"
    append(log, b"second\n")

    assert (reader.read(), reader.tail.reason) == (b"second\n", None)
    assert reader.counts()[:2] == (0, 0)


def test_permission_that_is_lost_and_comes_back_loses_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has a file open may go on; only the opening of its successor fails."""
    opened: Callable[..., int] = os.open
    reader, denied = Reader(log), True

    def guarded(path: str, *flags: int, dir_fd: int | None = None) -> int:
        if denied:
            raise PermissionError(errno.EACCES, "denied")
        return opened(path, *flags, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", guarded)
    assert (reader.read(), reader.tail.reason, reader.tail.errors) == (b"", "permission", 1)
    assert (reader.read(), reader.tail.errors) == (b"", 1)
    denied = False
    assert (reader.read(), reader.tail.reason) == (b"first\n", None)
    denied = True
    append(log, b"second\n")
    assert (reader.read(), reader.tail.reason) == (b"second\n", None)

    log.rename(log.with_suffix(".1"))
    log.write_bytes(b"new\n")
    assert (reader.read(), reader.tail.reason) == (b"", "permission")
    denied = False
    assert (reader.read(), reader.tail.reason) == (b"new\n", None)
    assert reader.counts() == (1, 0, 2)


MOUNTED = """
    import ctypes, os, sys
    from pathlib import Path
    from stallwatch.sources.logs.tail import LogTail

    libc, folder = ctypes.CDLL(None, use_errno=True), Path(sys.argv[1])
    point, store = folder / "point", folder / "store"
    def mount(what, where, flags):
        return libc.mount(str(what).encode(), str(where).encode(), b"none", flags, None) == 0
    if libc.unshare(0x00020000) or not mount("none", "/", 0x4000 | 0x40000):  # a namespace of our own, private
        sys.exit(77)
    point.mkdir(), store.mkdir()
    log = store / "x.log"
    log.write_text("first\\n")
    if not mount(store, point, 0x1000):  # bind
        sys.exit(77)
    tail = LogTail(str(point / "x.log"))
    read = lambda: b"".join(tail.read(1 << 30)).decode()
    told = [read()]
    assert libc.umount2(str(point).encode(), 2) == 0  # though it is in use
    with log.open("a") as writer:
        writer.write("while it was away\\n")
    told.append(read())
    assert mount(store, point, 0x1000)
    with log.open("a") as writer:
        writer.write("back\\n")
    told.append(read())
    print(told, tail.rotations, tail.truncations)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_mount_that_goes_and_comes_back_loses_and_doubles_nothing(tmp_path: Path) -> None:
    code = [sys.executable, "-c", textwrap.dedent(MOUNTED), str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == 77:
        pytest.skip("no mount namespace here")

    assert done.stdout.strip() == "['first\\n', 'while it was away\\n', 'back\\n'] 0 0", done.stderr


def test_the_same_file_behind_another_number_of_its_device_is_read_on(
    log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system that is mounted anew has a new device."""
    assert reader.tail._file is not None
    device, inode = reader.tail._file.identity
    reader.tail._file.identity = device + 1, inode
    append(log, b"second\n")

    reader.read()
    reader.read()
    assert reader.parts == [b"first\nsecond\n"]
    assert reader.tail.identity == (device, inode)
    assert reader.counts() == (0, 0, 0)


@pytest.mark.parametrize("when", ["read", "closed"])
def test_a_handle_that_fails_even_to_be_closed_is_left_behind(
    when: str, log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on FUSE when its program dies in the middle: the number is free then, and soon another file's."""
    real, before = os.close, set(os.listdir("/proc/self/fd"))

    def close(descriptor: int) -> None:
        real(descriptor)
        raise OSError(errno.ENOTCONN, "no")

    def pread(*how: int) -> bytes:
        raise OSError(errno.ENOTCONN, "no")

    append(log, b"second\n")
    with monkeypatch.context() as broken:
        broken.setattr(os, "close", close)
        if when == "read":
            broken.setattr(os, "pread", pread)
            assert reader.read() == b""
            assert reader.tail.reason == "error"
        else:
            reader.tail.rest()
    assert reader.tail.identity is None
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1

    assert reader.read() == b"second\n"
    assert reader.parts == [b"first\nsecond\n"]


# --- what is in them --------------------------------------------------------------------------------------------


def followed(path: Path, line_bytes: int = 1 << 20) -> LogScanner:
    scanner, tail = LogScanner(FRAMEWORK, Limits(line_bytes=line_bytes)), LogTail(str(path))
    for chunk in tail.read(MUCH):
        scanner.feed(chunk)
        assert len(scanner._tail) <= line_bytes + CHUNK_BYTES
    tail.close()
    return scanner


def test_a_line_of_ten_megabytes_is_one_line_and_what_follows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"x" * 10_000_000 + b"\n[2026-06-02 08:00:00 TP0] Load weight begin.\n")

    scanner = followed(path)

    assert scanner.lines == 2
    assert scanner.events["load_begin"] == 1


@pytest.mark.parametrize(
    "before",
    [
        b"\0" * 300_000 + b"\n",
        b"\xff\xfe\xc3\x28\n",
        b"\r\n",
        b"\x1b[31m\n",
        "\u2028\u2588\n".encode(),
        b"\x00\xff\r\n",
    ],
    ids=["NUL", "UTF-8", "CRLF", "colour", "bars", "mixed"],
)
def test_odd_bytes_before_a_line_do_not_hide_it(before: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(before + b"[2026-06-02 08:00:00 TP0] Load weight begin.\r\n")

    scanner = followed(path)

    assert (scanner.lines, scanner.events["load_begin"]) == (2, 1)


def test_a_writer_faster_than_the_reader_shows_as_backlog_that_shrinks_when_he_rests(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.touch()
    reader, behind = Reader(path), []
    for turn in range(6):
        if turn < 3:
            append(path, b"x" * 99 + b"\n" + b"y" * 100)
        reader.read(100)
        behind.append(reader.tail.backlog)

    assert behind == [100, 200, 300, 200, 100, 0]
    assert reader.tail.bytes_read == 600


@given(st.lists(st.binary(max_size=2000), max_size=6), st.integers(1, 3000))
@settings(deadline=None)
def test_any_bytes_are_read_as_they_are_and_raise_nothing(contents: list[bytes], most: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.log"
        path.touch()
        reader, scanner = Reader(path), LogScanner(FRAMEWORK, Limits(line_bytes=500))
        reader.read()  # empty when it is found: NUL bytes in front are no hole then
        for content in contents:
            append(path, content)
            scanner.feed(reader.read(most))
            assert len(scanner._tail) <= 500
        scanner.feed(reader.read())
        scanner.finish()
        reader.tail.close()

    whole = b"".join(contents)
    assert reader.parts == [whole]
    assert scanner.lines == whole.count(b"\n") + (whole != b"" and not whole.endswith(b"\n"))


# --- everything at once ------------------------------------------------------------------------------------------


def seal(*parts: object) -> str:
    return repr(parts)


class FileLife(RuleBasedStateMachine):
    """A log that is written, rotated and cut in every way, and a reader that is restarted, against a reference.

    `owed`: what was written and not yet read, file by file, oldest first.  The reader must get exactly that: the
    bytes of a file that was replaced first, a line never from two files, nothing twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "x.log"
        self.path.touch()
        self.number = self.rotations = self.truncations = 0
        self.owed = b""
        self.size = 0  # of the file that the path leads to
        self.replaced = False  # since the last look
        self.start_reader()
        self.look()

    def start_reader(self) -> None:
        self.reader = Reader(self.path)
        self.rotations = self.truncations = 0

    def look(self, most: int = MUCH) -> None:
        got = self.reader.read(most)
        self.mark = self.reader.tail.mark(self.reader.tail.offset, seal)
        assert self.owed.startswith(got)
        assert len(got) == min(most, len(self.owed))
        self.owed = self.owed[len(got) :]
        if not self.owed and (len(got) < most or most == MUCH):
            self.replaced = False

    def catch_up(self) -> None:
        self.look()
        assert self.owed == b""

    def write(self, mode: str, lines: int) -> None:
        data = b""
        for _ in range(lines):
            self.number += 1
            data += f"{self.number:06} line\n".encode()
        with self.path.open(mode) as file:
            file.write(data)
            self.size = file.tell()
        self.owed += data

    @rule(lines=st.integers(1, 200))
    def grows(self, lines: int) -> None:
        self.write("ab", lines)

    @rule(lines=st.integers(0, 5), how=st.sampled_from(["moved", "deleted", "packed"]))
    def is_rotated(self, lines: int, how: str) -> None:
        if self.replaced:
            self.catch_up()  # of a second rotation under such names the file between is not found
        old = self.path.rename(self.path.with_suffix(f".{self.number}.{self.rotations}"))
        if how != "moved":
            old.unlink()
        if how == "packed":
            with gzip.open(f"{old}.gz", "wb") as packed:
                packed.write(b"packed")
        self.write("wb", lines)
        self.replaced = True
        self.rotations += 1

    @rule(lines=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def is_rotated_by_numbers(self, lines: list[int]) -> None:
        """Once or several times before the next look: x.log.1 is the last one moved aside."""
        if self.replaced:
            self.catch_up()
        for number in lines:
            self.shift()
            self.path.rename(self.path.with_name("x.log.1"))
            self.write("wb", number)
            self.replaced = True
            self.rotations += 1

    def shift(self) -> None:
        for old in range(9, 0, -1):
            moved = self.path.with_name(f"x.log.{old}")
            if moved.exists():
                moved.rename(self.path.with_name(f"x.log.{old + 1}"))

    @rule(before=st.integers(0, 200), late=st.integers(0, 3), after=st.integers(0, 400))
    def is_copied_and_cut(self, before: int, late: int, after: int) -> None:
        """By copytruncate: only what was written between its copy and its cut is lost."""
        self.look(0)  # what came of a cut before must be known by its beginning
        if self.replaced or not self.reader.tail.offset:
            self.catch_up()
        self.write("ab", before)
        self.shift()
        shutil.copy(self.path, self.path.with_name("x.log.1"))
        is_known, owed = self.reader.tail.offset > 0, self.owed if self.reader.tail.offset else b""
        self.write("ab", late)
        self.owed = owed
        self.write("wb", after)
        self.replaced = True  # it is read to its end before anything else is done with its names
        self.truncations += is_known

    @rule(lines=st.integers(1, 400))
    def is_cut(self, lines: int) -> None:
        """By `>`, what it held being read; the new text may be shorter or longer."""
        self.catch_up()
        was_read = self.size > 0
        self.write("wb", lines)
        self.truncations += was_read

    @rule(lines=st.integers(1, 20))
    def is_cut_under_a_writer_that_keeps_its_offset(self, lines: int) -> None:
        self.catch_up()
        with self.path.open("r+b") as writer:
            writer.seek(0, os.SEEK_END)
            end = writer.tell()
            os.truncate(self.path, 0)
            self.number += 1
            text = f"{self.number:06} line\n".encode() * lines
            writer.write(text)
        self.size = end + len(text)
        got = self.reader.read()
        self.mark = self.reader.tail.mark(self.reader.tail.offset, seal)
        assert got == text
        self.truncations += end > 0

    @rule()
    def goes_and_comes_back(self) -> None:
        away = self.path.rename(self.path.with_suffix(".away"))
        self.reader.read(0)
        away.rename(self.path)

    @rule()
    def is_touched(self) -> None:
        self.path.chmod(0o600)
        os.utime(self.path)

    @rule()
    def handle_goes_stale(self) -> None:
        self.catch_up()
        self.reader.tail._leave()
        self.look()

    @rule()
    def is_read(self) -> None:
        self.catch_up()

    @rule(most=st.integers(0, 300))
    def is_read_a_little(self, most: int) -> None:
        self.look(most)

    @rule()
    @precondition(lambda self: not self.replaced)
    def reader_is_restarted(self) -> None:
        """What was told is known by file, offset and mark: the next reader passes over just that."""
        before, told = self.reader.tail, self.reader.tail.offset
        self.start_reader()
        after = self.reader.tail
        self.reader.read(0)
        assert after.identity == before.identity
        if after.mark(told, seal) == self.mark:
            while after.offset < told:
                self.reader.read(told - after.offset)
        before.close()

    @invariant()
    def counters_and_offset_are_right(self) -> None:
        tail = self.reader.tail
        if self.replaced or self.owed:
            return
        assert (tail.rotations, tail.truncations, tail.errors) == (self.rotations, self.truncations, 0)
        assert (tail.offset, tail.backlog) == (self.size, 0)

    def teardown(self) -> None:
        self.folder.cleanup()
        self.reader.tail.close()


TestFileLife = FileLife.TestCase
TestFileLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class CountedLife(RuleBasedStateMachine):
    """A log named in the configuration, rotated and cut while we run, read it again, or are down.

    What was written is in a file, or was read, whatever happens: every line counts once, however often we begin anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.written = self.moved = 0
        self.node = Node(Path(self.folder.name))
        self.node.source.past.seal, self.node.source.past.key_of = seal_of_logs, key_of
        self.write(1)
        patterned(self.node, "stdout")
        self.catch_up()
        self.is_down = False

    @property
    def path(self) -> Path:
        return self.node.folder / "stdout"

    def write(self, lines: int, mode: str = "ab") -> None:
        with self.path.open(mode) as file:
            for _ in range(lines):
                self.written += 1
                file.write(f"[2026-06-02 08:00:10 TP0] Load weight begin. {self.written:06}\n".encode())

    def catch_up(self) -> None:
        behind = 3  # where a turn ends with a file, its successor is not seen to wait
        for _ in range(500):
            self.seen = self.node.read()
            behind = behind - 1 if self.node.source.again_seconds is None else 3
            if not behind:
                break
        self.is_down, self.moved = False, 0

    def move(self) -> None:
        for old in range(30, 0, -1):
            moved = self.path.with_name(f"stdout.{old}")
            if moved.exists():
                moved.rename(self.path.with_name(f"stdout.{old + 1}"))
        self.path.rename(self.path.with_name("stdout.1"))

    @rule(lines=st.integers(1, 10))
    def grows(self, lines: int) -> None:
        self.write(lines)

    @rule(lines=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def is_rotated_by_numbers(self, lines: list[int]) -> None:
        self.moved += len(lines)
        if self.moved > 20:
            self.catch_up()  # the oldest ones are deleted
        for number in lines:
            self.move()
            self.write(number)

    @rule(lines=st.integers(1, 10), how=st.sampled_from(["cut", "deleted"]))
    @precondition(lambda self: not self.is_down)
    def is_replaced(self, lines: int, how: str) -> None:
        self.catch_up()
        self.replace(lines, how)

    @rule(lines=st.integers(1, 10), how=st.sampled_from(["cut", "deleted"]))
    def is_replaced_while_we_are_down(self, lines: int, how: str) -> None:
        self.begin_anew(most=None)
        self.replace(lines, how)

    def replace(self, lines: int, how: str) -> None:
        if how == "deleted":
            self.path.unlink()
        self.write(lines, "wb")
        self.catch_up()

    @rule(turns=st.integers(0, 3), most=st.sampled_from([200, None]))
    def begin_anew(self, most: int | None, turns: int = 0) -> None:
        """Ended, it may be before what was there had been read again."""
        if self.moved:
            most = most and MUCH  # of files that are moved on while they wait to be read nothing is found
        if most is None:
            self.catch_up()
        elif self.is_down:
            self.node.read()
        before, self.node = self.node, restarted(self.node, most or MUCH)
        before.source.close()
        self.is_down = turns == 0
        for _ in range(turns):
            self.node.read()

    @rule()
    def is_read(self) -> None:
        self.catch_up()
        assert values(self.seen, "log_lines_total") == {("stdout",): float(self.written)}
        assert sum(float(one or 0) for one in values(self.seen, "log_events_total").values()) == self.written

    def teardown(self) -> None:
        self.is_read()
        self.node.source.close()
        self.folder.cleanup()


TestCountedLife = CountedLife.TestCase
TestCountedLife.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
