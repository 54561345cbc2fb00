"""A log that was copied and emptied in place (logrotate's copytruncate): what was not read yet stands in the copy."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallwatch.sources.logs import copies
from stallwatch.sources.logs.earlier import Earlier, Order, beside
from stallwatch.sources.logs.opened import OpenFile
from stallwatch.sources.logs.tail import CHUNK_BYTES, LogTail
from test_log_life import MUCH, ORDERS, Reader, append

NAMES = {kind: names[-1] for kind, names in ORDERS.items()} | {"of its own": "{log}-02-06-2026", "by hand": "{log}.old"}
"""What the newest copy is called."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_bytes(b"first\n")
    return path


@pytest.fixture
def reader(log: Path) -> Iterator[Reader]:
    reader = Reader(log)
    assert reader.read() == b"first\n"
    yield reader
    reader.tail.close()


def copied(log: Path, name: str = "{log}.1") -> Path:
    """As logrotate does: a copy beside the log, which is empty then."""
    copy = log.with_name(name.format(log=log.name))
    shutil.copy(log, copy)
    os.truncate(log, 0)
    return copy


def change_later(path: Path, than: Path) -> None:
    """Let the clock of the file system go on: what changed before is older than what changes now."""
    while path.stat().st_ctime_ns <= than.stat().st_ctime_ns:
        path.chmod(0o640)


def write_later(path: Path, than: Path) -> None:
    while path.stat().st_mtime_ns <= than.stat().st_mtime_ns:
        os.utime(path)


# --- what is read from a copy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_what_was_not_read_before_a_log_was_copied_and_cut_is_read_from_the_copy(
    name: str, log: Path, reader: Reader
) -> None:
    append(log, b"before\n")
    copied(log, name)
    append(log, b"after\n")

    assert reader.read() == b"before\nafter\n"
    append(log, b"more\n")
    reader.read()
    assert reader.parts == [b"first\nbefore\n", b"after\nmore\n"]
    assert reader.counts() == (0, 1, 0)
    assert reader.tail.bytes_read == sum(map(len, reader.parts))


def test_a_copy_of_which_everything_was_read_tells_nothing_twice(log: Path, reader: Reader) -> None:
    copied(log)
    append(log, b"after\n")

    assert reader.read() == b"after\n"
    assert reader.counts() == (0, 1, 0)


def test_a_log_that_grows_beyond_what_was_read_is_seen_to_be_cut_and_nothing_is_lost(log: Path, reader: Reader) -> None:
    append(log, b"before\n")
    copied(log)
    append(log, b"longer than all there was\n")

    assert reader.read() == b"before\nlonger than all there was\n"
    assert reader.counts() == (0, 1, 0)


def test_a_line_that_the_cut_divides_ends_there(log: Path, reader: Reader) -> None:
    append(log, b"half a li")
    copied(log)
    append(log, b"ne\n")
    reader.read()

    assert reader.parts == [b"first\nhalf a li", b"ne\n"]


def test_a_log_is_copied_again_and_again_and_every_copy_is_read_once(log: Path, reader: Reader) -> None:
    for number in range(5):
        append(log, b"%d read\n" % number)
        reader.read()
        append(log, b"%d not yet\n" % number)
        for old in range(5, 0, -1):
            if (path := log.with_name(f"server.log.{old}")).exists():
                path.rename(log.with_name(f"server.log.{old + 1}"))
        copied(log)

    reader.read()
    assert b"".join(reader.parts) == b"first\n" + b"".join(b"%d read\n%d not yet\n" % (n, n) for n in range(5))
    assert reader.counts() == (0, 5, 0)


def test_a_copy_of_which_much_was_not_read_is_read_in_bounded_steps(log: Path, reader: Reader) -> None:
    append(log, b"a" * 1000)
    copied(log)
    append(log, b"new\n")

    steps, backlogs = list[bytes](), list[int]()
    for _ in range(5):
        steps.append(reader.read(400))
        backlogs.append(reader.tail.backlog)

    assert [len(step) for step in steps] == [400, 400, 204, 0, 0]
    assert backlogs == [600, 200, 0, 0, 0]
    assert reader.parts == [b"first\n" + b"a" * 1000, b"new\n"]
    assert reader.counts() == (0, 1, 0)


def test_no_piece_of_a_copy_is_larger_than_of_any_file(log: Path, reader: Reader) -> None:
    append(log, b"a" * (3 * CHUNK_BYTES))
    copied(log)

    assert [len(chunk) for chunk in reader.tail.read(MUCH)] == [CHUNK_BYTES] * 3


def test_a_copy_that_goes_while_it_is_read_in_steps_is_lost_from_there_on(log: Path, reader: Reader) -> None:
    append(log, b"a" * 1000)
    copy = copied(log)
    append(log, b"new\n")
    reader.read(400)
    copy.unlink()

    assert reader.read() == b"new\n"
    assert reader.counts() == (0, 1, 0)


def test_behind_a_hole_the_copy_is_known_too(tmp_path: Path) -> None:
    """A writer that does not append goes on where it was: the log begins with a hole when it was cut before."""
    path = tmp_path / "server.log"
    with path.open("wb", buffering=0) as writer:
        writer.write(b"a" * 50_000)
        reader = Reader(path)
        reader.read()
        copied(path)
        writer.write(b"read\n")
        assert reader.read() == b"read\n"
        writer.write(b"not yet\n")
        copied(path)
        writer.write(b"after\n")

        assert reader.read() == b"not yet\nafter\n"
    assert reader.counts() == (0, 2, 0)


def test_a_handle_that_went_stale_as_the_log_was_cut_loses_nothing(log: Path, reader: Reader) -> None:
    before = len(os.listdir("/proc/self/fd"))
    append(log, b"before\n")
    reader.tail._leave()
    copied(log)
    append(log, b"after\n")

    assert reader.read() == b"before\nafter\n"
    assert reader.counts() == (0, 1, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_not_seen_to_be_cut_is_not_read_on_because_there_is_a_copy(log: Path) -> None:
    """It begins as before, and is longer, but is another one where the reading ended."""
    log.write_bytes(b"a" * 2000 + b"read\n")
    reader = Reader(log)
    reader.read()
    append(log, b"not yet\n")
    reader.tail._leave()
    copied(log)
    append(log, b"a" * 2000 + b"something else\n")

    assert reader.read() == b"a" * 2000 + b"something else\n"


def test_nothing_stays_open_of_a_copy(log: Path, reader: Reader) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for most in (3, MUCH):
        append(log, b"before\n")
        copied(log)
        append(log, b"after %d\n" % most)
        reader.read(most)
        reader.read()

    assert reader.counts() == (0, 2, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_copy_that_cannot_be_read_does_not_stop_the_log(
    log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, b"before\n")
    copy, real = copied(log).stat(), os.pread
    append(log, b"after\n")

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == copy.st_ino and size == len(b"before\n"):
            raise OSError(errno.EIO, "I/O error")
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)

    assert reader.read() == b"after\n"
    assert reader.counts() == (0, 1, 0)


# --- packed copies --------------------------------------------------------------------------------------------------


def packed(copy: Path, content: bytes | None = None) -> Path:
    """As logrotate does without `delaycompress`: at once."""
    path = copy.with_name(f"{copy.name}.gz")
    path.write_bytes(gzip.compress(copy.read_bytes()) if content is None else content)
    copy.unlink()
    return path


def lines(count: int, word: str) -> bytes:
    return b"".join(b"%06d %s\n" % (number, word.encode()) for number in range(count))


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_copy_that_was_packed_at_once_is_read_too(name: str, log: Path, reader: Reader) -> None:
    append(log, b"before\n")
    packed(copied(log, name))
    append(log, b"after\n")

    assert reader.read() == b"before\nafter\n"
    assert reader.counts() == (0, 1, 0)


@pytest.mark.parametrize("read", [1, 300, 200_000])
def test_of_a_packed_copy_is_unpacked_what_was_not_read(read: int, log: Path) -> None:
    whole, rest = lines(read, "read"), lines(150_000, "not yet")
    log.write_bytes(whole)
    reader = Reader(log)
    reader.read()
    append(log, rest)
    packed(copied(log))

    assert reader.read() == rest


def test_much_of_a_packed_copy_is_read_in_bounded_steps(log: Path, reader: Reader) -> None:
    append(log, b"a" * 1000)
    packed(copied(log))
    append(log, b"new\n")

    assert [len(reader.read(400)) for _ in range(5)] == [400, 400, 204, 0, 0]
    assert reader.counts() == (0, 1, 0)


def test_behind_a_hole_a_packed_copy_is_known_too(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with path.open("wb", buffering=0) as writer:
        writer.seek(3 << 20)
        writer.write(b"read\n")
        reader = Reader(path)
        reader.read()
        writer.write(b"not yet\n")
        packed(copied(path))

    assert reader.read() == b"not yet\n"


def test_a_copy_that_is_being_packed_is_read_as_it_is(log: Path, reader: Reader) -> None:
    append(log, b"before\n")
    copy = copied(log)
    copy.with_name("server.log.1.gz").write_bytes(gzip.compress(b"first\nbef"))

    assert reader.read() == b"before\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip at all",
        gzip.compress(b"first"),
        gzip.compress(b"other\nbefore\n"),
        gzip.compress(b"first\n")[:-9],
    ],
    ids=["empty", "no gzip", "less", "another", "cut"],
)
def test_what_is_packed_and_holds_something_else_is_no_copy(content: bytes, log: Path, reader: Reader) -> None:
    append(log, b"before\n")
    packed(copied(log), content)
    append(log, b"after\n")
    before = len(os.listdir("/proc/self/fd"))

    assert reader.read() == b"after\n"
    assert reader.counts() == (0, 1, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_packed_copy_costs_no_more_than_allowed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory: what stands behind the limit is lost.  Time: nothing is unpacked that cannot be reached, or kept."""
    pieces = pieces_unpacked(monkeypatch)
    monkeypatch.setattr(copies, "MOST_REST", 1000)
    log.write_bytes(lines(100, "read"))
    for most, told in ((copies.MOST_UNPACKED, 1000), (log.stat().st_size, 0)):
        monkeypatch.setattr(copies, "MOST_UNPACKED", most)
        log.write_bytes(lines(100, "read"))
        reader = Reader(log)
        reader.read()
        append(log, lines(100_000, "not yet"))
        packed(copied(log))

        assert len(reader.read()) == told
    assert len(pieces) == 1


def pieces_unpacked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is read of packed copies from here on."""
    pieces, real = list[bytes](), copies._pieces

    def counted(descriptor: int) -> Iterator[bytes]:
        for piece in real(descriptor):
            pieces.append(piece)
            yield piece

    monkeypatch.setattr(copies, "_pieces", counted)
    return pieces


def test_of_a_packed_file_that_begins_otherwise_only_the_beginning_is_unpacked(
    log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(copied(log), gzip.compress(os.urandom(20 * copies.PACKED_BYTES)))
    pieces = pieces_unpacked(monkeypatch)

    assert reader.read() == b""
    assert len(pieces) == 1


@pytest.mark.parametrize("decoys", [1, 20])
def test_many_packed_files_that_begin_as_the_log_did_cost_no_more_than_two(
    decoys: int, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes the log may lay as many beside it as he likes.  A copy that is small is found all the same."""
    monkeypatch.setattr(copies, "MOST_REST", 1 << 18)
    log.write_bytes(read := lines(200, "read"))
    reader = Reader(log)
    reader.read()
    append(log, b"before\n")
    copy = packed(copied(log))
    noise = gzip.compress(read[:1500] + os.urandom(1 << 18))
    for number in range(decoys):
        decoy = log.with_name(f"{log.name}-decoy-{number}.gz")
        decoy.write_bytes(noise)
        change_later(decoy, copy)
    pieces, of_one = pieces_unpacked(monkeypatch), -(-len(noise) // copies.PACKED_BYTES)

    assert reader.read() == b"before\n"
    assert len(pieces) <= 2 * of_one + decoys


# --- what is no copy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["foreign name", "link", "folder", "FIFO", "apart", "gone", "shorter"])
def test_what_is_not_known_to_be_a_copy_is_not_read(how: str, log: Path, reader: Reader) -> None:
    append(log, b"before\n")
    copy = copied(log)
    append(log, b"after\n")
    if how == "foreign name":
        copy.rename(log.with_name("another.log.1"))
    elif how == "link":
        copy.rename(log.with_name("other"))
        copy.symlink_to("other")
    elif how == "folder":
        copy.unlink()
        copy.mkdir()
    elif how == "FIFO":
        copy.unlink()
        os.mkfifo(copy)
    elif how == "apart":
        reader.tail.is_apart = lambda path: path == str(copy)
    elif how == "gone":
        copy.unlink()
    else:
        os.truncate(copy, len(b"firs"))

    assert reader.read() == b"after\n"
    assert reader.counts() == (0, 1, 0)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a" * 2000 + b"c" * 2000 + b"old\n", b"old\n"),
        (b"b" + b"a" * 1999 + b"c" * 2000 + b"old\n", b""),  # begins otherwise
        (b"a" * 2000 + b"c" * 1999 + b"b" + b"old\n", b""),  # otherwise where the reading ended
        (b"a" * 2000 + b"c" * 2000, b""),
    ],
)
def test_a_file_that_holds_something_else_is_no_copy(content: bytes, told: bytes, log: Path) -> None:
    log.write_bytes(b"a" * 2000 + b"c" * 2000)
    reader = Reader(log)
    reader.read()
    log.with_name("server.log.1").write_bytes(content)
    log.write_bytes(b"new\n")

    assert reader.read() == told + b"new\n"


@pytest.mark.parametrize("how", ["new", "old", "old and given away since", "written by a clock that is ahead"])
def test_an_old_copy_of_a_log_without_times_is_not_read_as_if_it_were_new(how: str, log: Path) -> None:
    """Every start of such a server begins alike.  What an earlier one ended with must not be told of this one."""
    copy = log.with_name("server.log.1")
    copy.write_bytes(b"loading\nserving\nfatal\n")
    log.write_bytes(b"loading\nserving\n")
    if how == "new":
        write_later(copy, log)
    elif how == "written by a clock that is ahead":
        os.utime(copy, (1 << 33, 1 << 33))
        change_later(log, copy)
    else:
        write_later(log, copy)
    reader = Reader(log)
    reader.read()
    if how == "old and given away since":  # as a script may do with the whole folder before it starts the server
        change_later(copy, log)
    log.write_bytes(b"loading\n")

    assert reader.read() == (b"fatal\n" if how == "new" else b"") + b"loading\n"
    assert reader.counts() == (0, 1, 0)


def test_the_time_of_a_packed_copy_may_be_one_in_whole_seconds(log: Path) -> None:
    for behind, told in ((0, b"before\n"), (1, b"")):
        log.write_bytes(b"first\n")
        os.utime(log, ns=(0, 1_796_000_000_999_999_999))
        reader = Reader(log)
        reader.read()
        append(log, b"before\n")
        copy = packed(copied(log))
        os.utime(copy, (0, 1_796_000_000 - behind))

        assert reader.read() == told


@pytest.mark.parametrize("name", ["server.log.1", "server.log-20260602"])
def test_an_old_copy_that_was_moved_on_is_not_taken_for_the_new_one(name: str, log: Path) -> None:
    """Moving it changes it: it is as fresh as the new one, but not what changed last."""
    old = log.with_name(name)
    old.write_bytes(b"loading\nserving\nfatal\n")
    log.write_bytes(b"loading\nserving\n")
    change_later(log, old)
    reader = Reader(log)
    reader.read()
    append(log, b"all is well\n")
    old.rename(log.with_name("server.log.2" if name.endswith(".1") else "server.log-20260601"))
    copied(log, name)

    assert reader.read() == b"all is well\n"


def test_a_copy_of_another_kind_of_name_that_grows_meanwhile_does_not_hide_it(log: Path, reader: Reader) -> None:
    append(log, b"before\n")
    copy = copied(log)
    other = log.with_name("server-1.log")  # of another process, it may be
    other.write_bytes(b"something else\n")
    change_later(other, copy)

    assert reader.read() == b"before\n"


def found(name: str, changed: int) -> Earlier:
    return Earlier(f"/logs/{name}", (1, changed), 0.0, written=9, changed=changed)


@pytest.mark.parametrize(
    ("kinds", "last"),
    [
        ([[("x.2", 7), ("x.1", 8)]], ["x.1"]),
        ([[("x.2", 8), ("x.1", 7)]], ["x.2"]),
        ([[("x.3", 8), ("x.2", 8), ("x.1", 8)]], ["x.1"]),
        ([[("x.1", 7)], [("x-2026", 8)]], ["x-2026", "x.1"]),
        ([[("x.1.gz", 8)], [("x.1", 7)]], ["x.1", "x.1.gz"]),
        ([[("x.1", 4)], [("x-2026", 3)]], []),
    ],
)
def test_of_every_kind_of_name_the_file_that_changed_last_is_looked_into(
    kinds: list[list[tuple[str, int]]], last: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {str(kind): [found(name, changed) for name, changed in kind] for kind in kinds}
    monkeypatch.setattr(copies, "beside", lambda *how: files)
    file = OpenFile(-1, (1, 1), written=9, changed=5)

    assert [os.path.basename(one.path) for one in copies._changed_last("/logs/x", 0, file)] == last


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_another_user_does_not_hide_the_copy_and_is_none_when_it_takes_its_place(
    log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, b"before\n")
    copy, other = copied(log), log.with_name("server.log.2")
    other.write_bytes(b"something else\n")
    os.chown(other, 7, 7)
    change_later(other, copy)
    assert reader.read() == b"before\n"

    append(log, b"second\n")
    reader.read()
    append(log, b"third\n")
    foreign = copied(log)

    def looked_at_too_early(path: str, owner: int | None, order: Order) -> dict[str, list[Earlier]]:
        kinds = beside(path, owner, order)
        os.chown(foreign, 7, 7)
        return kinds

    monkeypatch.setattr(copies, "beside", looked_at_too_early)
    assert reader.read() == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize(("of_log", "of_copy", "is_read"), [(7, 7, True), (7, 0, True), (7, 8, False), (0, 7, False)])
@pytest.mark.parametrize("owner", [None, 7])
def test_a_copy_is_of_the_user_of_the_log_or_of_root(
    owner: int | None, of_log: int, of_copy: int, is_read: bool, log: Path
) -> None:
    os.chown(log, of_log, of_log)
    reader = Reader(log)
    reader.tail.owner = owner
    reader.read()
    append(log, b"before\n")
    os.chown(copied(log), of_copy, of_copy)

    assert reader.read() == (b"before\n" if is_read else b"")
    assert reader.counts() == (0, 1, 0)


def test_a_log_of_which_nothing_was_read_has_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.touch()
    reader = Reader(path)
    reader.read()
    append(path, b"before\n")
    copied(path)

    assert reader.read() == b""
    assert reader.counts() == (0, 0, 0)


# --- streams of processes -----------------------------------------------------------------------------------------


class Stream:
    """A process's stream in a /proc of our own, where it runs in a folder that stands for its root."""

    def __init__(self, folder: Path) -> None:
        self.root, self.descriptor = folder / "proc/7/root", folder / "proc/7/fd/1"
        self.log = self.root / "logs/server.log"
        self.log.parent.mkdir(parents=True)
        self.descriptor.parent.mkdir()
        self.log.write_bytes(b"first\n")
        self.descriptor.symlink_to(self.log)
        self.reader = Reader(self.descriptor)
        self.reader.read()

    def says(self, target: str) -> None:
        """What its link says where a process of another root reads it."""
        assert self.reader.tail._file is not None
        assert self.reader.tail._file.target == str(self.log)
        self.reader.tail._file.target = target


def test_a_copy_of_a_stream_is_found_beside_the_file_that_its_link_names(log: Path) -> None:
    with log.open("ab", buffering=0) as writer:
        reader = Reader(Path(f"/proc/self/fd/{writer.fileno()}"))
        reader.read()
        writer.write(b"before\n")
        copied(log)
        writer.write(b"after\n")

        assert reader.read() == b"before\nafter\n"
    append(log, b"the last words\n")
    copied(log)
    assert reader.read() == b"the last words\n"  # its process is gone, the name was kept
    assert reader.counts() == (0, 2, 0)


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_copy_of_a_stream_is_found_where_its_process_runs(is_moved: bool, tmp_path: Path) -> None:
    """Of a file that stands elsewhere by now nothing is known, whatever is beside the place where it was."""
    stream = Stream(tmp_path)
    stream.says("/logs/server.log")
    append(stream.log, b"before\n")
    copied(stream.log)
    if is_moved:
        away = stream.log.rename(stream.root / "server.log")
        shutil.copy(away, stream.log)

    assert stream.reader.read() == (b"" if is_moved else b"before\n")
    assert stream.reader.tail.truncations == 1


@pytest.mark.parametrize("target", ["{other}", "{other} (deleted)", "pipe:[7]", "", "/nowhere/server.log"])
def test_a_name_that_means_another_file_here_is_not_looked_at(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, other = Stream(tmp_path), tmp_path / "here/server.log"
    other.parent.mkdir()
    other.write_bytes(b"first\n")
    append(stream.log, b"before\n")
    shutil.copy(copied(stream.log), other.with_name("server.log.1"))
    stream.says(target.format(other=other))
    monkeypatch.setattr("stallwatch.sources.logs.tail.copy_of", lambda *about: pytest.fail(f"looked at {about}"))

    assert stream.reader.read() == b""
    assert stream.reader.counts() == (0, 1, 0)


def test_a_tail_that_may_look_nowhere_finds_no_copy(log: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, b"before\n")
    copied(log)
    monkeypatch.setattr(LogTail, "_is_here", lambda tail, path: False)

    assert reader.read() == b""
    assert reader.counts() == (0, 1, 0)
