from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from stallwatch.sources import Moment
from stallwatch.sources.gpus.kernel_log import PLACE, RECORD_BYTES, Device, KernelLog, Record, open_log, parse_record
from stallwatch.sources.gpus.xid import Lost, Xid
from stallwatch.sources.gpus.xid_log import XidLog

BOOT = 1_700_000_000.0
NOW = Moment(1000.0, BOOT + 1000.0)


def raw(number: int, text: str = "a message", seconds: float = 5.0, facility: int = 0) -> bytes:
    return f"{facility * 8 + 3},{number},{seconds * 1e6:.0f},-;{text}\n".encode()


class Replay:
    """A device: gives what it holds one by one (an OSError is raised), then has no more for now."""

    def __init__(self, items: Iterable[bytes | OSError] = ()) -> None:
        self.items, self.closed = list(items), False

    def read(self) -> bytes:
        if not self.items:
            raise BlockingIOError(errno.EAGAIN, "no more")
        item = self.items.pop(0)
        if isinstance(item, OSError):
            raise item
        return item

    def close(self) -> None:
        self.closed = True


class Replayed(KernelLog):
    """A log that opens these devices, one after the other."""

    def __init__(self, *devices: Replay | OSError, most_records: int = 100) -> None:
        super().__init__(Path("/nowhere"), most_records=most_records)
        self.devices = list(devices)

    def opened(self) -> Device:
        device = self.devices.pop(0)
        if isinstance(device, OSError):
            raise device
        return device

    def numbers(self) -> list[int]:
        return [record.number for record in self.read(NOW)]


# --- records -------------------------------------------------------------------------------------------------


def test_a_record_has_its_facility_number_time_and_text() -> None:
    found = parse_record(b"6,339,5140900,-;NET: Registered protocol family 10\n SUBSYSTEM=net\n DEVICE=n3\n", BOOT)

    assert found == Record(0, 339, BOOT + 5.1409, "NET: Registered protocol family 10")


def test_what_a_user_wrote_has_another_facility() -> None:
    found = parse_record(b"12,340,5690716,-;hello; world\n", BOOT)

    assert found == Record(1, 340, BOOT + 5.690716, "hello; world")


def test_a_newer_kernel_tells_more_before_the_text() -> None:
    found = parse_record(b"4,1,2000000,c,caller=T123,more=x;text\n", 0.0)

    assert found == Record(0, 1, 2.0, "text")


def test_escaped_bytes_are_read_back() -> None:
    found = parse_record(rb"4,1,0,-;two\x0alines \x5cx41 \xc3\xa4 \xff" + b"\n", 0.0)

    assert found is not None
    assert found.text == "two\nlines \\x41 ä \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("other", [b"", b"\n", b"no record", b"4,1,x,-;text\n", b"4,1,2\n", b" KEY=value\n"])
def test_another_form_is_no_record(other: bytes) -> None:
    assert parse_record(other, 0.0) is None


# --- reading -------------------------------------------------------------------------------------------------


def test_each_look_tells_what_came_since() -> None:
    device = Replay([raw(1), raw(2)])
    log = Replayed(device)

    first = log.numbers()
    device.items.append(raw(3))

    assert (first, log.numbers(), log.numbers()) == ([1, 2], [3], [])
    assert (log.reason, log.is_caught_up, log.missed) == (None, True, 0)


def test_a_record_is_as_old_as_the_clock_says_and_never_of_the_future() -> None:
    log = Replayed(Replay([raw(1, seconds=400.0), raw(2, seconds=1000.5)]))

    assert [record.at for record in log.read(NOW)] == [BOOT + 400.0, NOW.wall]


def test_a_long_log_is_read_in_parts() -> None:
    log = Replayed(Replay([raw(number) for number in range(5)]), most_records=2)

    looks = [(log.numbers(), log.is_caught_up) for _ in range(4)]

    assert looks == [([0, 1], False), ([2, 3], False), ([4], True), ([], True)]


@pytest.mark.parametrize("code", [errno.EPIPE, errno.EINVAL], ids=["overwritten", "too long"])
def test_a_gap_is_counted_and_read_over(code: int) -> None:
    log = Replayed(Replay([raw(1), OSError(code, "gap"), raw(90)]))

    assert (log.numbers(), log.missed, log.reason) == ([1, 90], 1, None)


def test_a_device_that_has_only_gaps_does_not_hold_us() -> None:
    log = Replayed(Replay([OSError(errno.EPIPE, "gap")] * 1000), most_records=10)

    assert (log.numbers(), log.missed, log.is_caught_up) == ([], 10, False)


def test_parts_of_one_message_are_one_record() -> None:
    parts = [b"4,1,0,c;NVRM: \n", b"4,2,0,+;Xid (PCI:0000:61:00): \n", b"4,3,0,+;79\n", raw(4)]

    found = list(Replayed(Replay(parts)).read(NOW))

    assert [(record.number, record.text) for record in found] == [
        (1, "NVRM: Xid (PCI:0000:61:00): 79"),
        (4, "a message"),
    ]


def test_a_log_that_fails_is_opened_again_and_nothing_is_told_twice() -> None:
    broken, again = Replay([raw(1), OSError(errno.EIO, "broken"), raw(2)]), Replay([raw(1), raw(2)])
    log = Replayed(broken, again)

    first = (log.numbers(), log.reason, log.is_caught_up)

    assert first == ([1], "error", False)
    assert broken.closed
    assert (log.numbers(), log.reason) == ([2], None)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.EPERM, "permission"), (errno.EACCES, "permission"), (errno.ENOENT, "not_supported"), (errno.EIO, "error")],
)
def test_a_log_that_cannot_be_opened_has_a_reason(code: int, reason: str) -> None:
    log = Replayed(OSError(code, "no"), Replay([raw(1)]))

    first = (log.numbers(), log.reason, log.is_caught_up)

    assert first == ([], reason, False)
    assert (log.numbers(), log.reason) == ([1], None)


def test_closing_gives_the_device_back() -> None:
    device = Replay()
    log = Replayed(device)
    log.numbers()

    log.close()
    log.close()

    assert device.closed


# --- what is opened ------------------------------------------------------------------------------------------


def place(root: Path) -> Path:
    (root / "dev").mkdir(exist_ok=True)
    return root / PLACE


def test_a_file_stands_in_where_it_may(tmp_path: Path) -> None:
    place(tmp_path).write_bytes(raw(1, "long " * RECORD_BYTES) + b" KEY=value\n" + raw(2) + b"4,3,0,-;unfinished")
    log = KernelLog(tmp_path, may_be_file=True)

    first = [record.number for record in log.read(NOW)]
    with place(tmp_path).open("ab") as file:
        file.write(b" line\n")
    second = [record.text for record in log.read(NOW)]
    log.close()

    assert (first, second) == ([1, 2], ["unfinished line"])


def a_file(path: Path) -> None:
    path.write_bytes(raw(1))


def a_link_to_the_log(path: Path) -> None:
    path.symlink_to("/dev/kmsg")


def a_link_to_a_file(path: Path) -> None:
    path.with_name("other").write_bytes(raw(1))
    path.symlink_to("other")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(os.path.relpath(path))


def nothing(path: Path) -> None:
    pass


@pytest.mark.parametrize("make", [a_file, a_link_to_the_log, a_link_to_a_file, a_pipe, a_socket, Path.mkdir, nothing])
def test_nothing_but_the_device_is_opened(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(place(tmp_path))
    log = KernelLog(tmp_path)

    assert (list(log.read(NOW)), log.reason) == ([], "not_supported")


@pytest.mark.parametrize("make", [a_link_to_a_file, a_pipe, Path.mkdir])
def test_where_a_file_may_stand_in_nothing_else_may(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(place(tmp_path))

    with pytest.raises(OSError, match="no kernel log"):
        open_log(place(tmp_path), may_be_file=True)


def test_the_kernels_own_log_is_read_to_its_end() -> None:
    """The real device, where we may read it."""
    log = KernelLog(Path("/"))

    numbers = [record.number for record in log.read(NOW)]
    log.close()

    if log.reason in ("permission", "not_supported"):
        pytest.skip(f"/dev/kmsg is not readable here: {log.reason}")
    assert (log.reason, numbers) == (None, sorted(set(numbers)))
    assert numbers


# --- faults --------------------------------------------------------------------------------------------------

OFF = "NVRM: GPU 0000:18:00.0: GPU has fallen off the bus."
XID = "NVRM: Xid (PCI:0000:61:00): 119, pid=7, name=python3, Timeout"


def faults_of(records: Sequence[bytes | OSError]) -> tuple[Xid | Lost, ...]:
    return XidLog(Path("/nowhere"), Replayed(Replay(records))).read(NOW)


def test_the_history_and_what_comes_are_told_once() -> None:
    device = Replay([raw(1), raw(2, XID, 10.0), raw(3, XID, 10.1), raw(4, OFF, 11.0)])
    log = XidLog(Path("/nowhere"), Replayed(device))

    history = log.read(NOW)
    device.items.append(raw(5, XID, 990.0))

    assert history == (Xid("0000:61:00.0", 119, 7, BOOT + 10.0), Lost("0000:18:00.0", BOOT + 11.0))
    assert log.read(NOW) == (Xid("0000:61:00.0", 119, 7, BOOT + 990.0),)
    assert (log.read(NOW), log.reason, log.is_caught_up, log.missed) == ((), None, True, 0)


def test_what_a_user_writes_is_no_fault() -> None:
    assert len(faults_of([raw(1, XID)])) == 1
    assert faults_of([raw(1, XID, facility=1), raw(2, OFF, facility=3)]) == ()


def test_a_log_that_cannot_be_read_tells_nothing_and_why() -> None:
    log = XidLog(Path("/nowhere"), Replayed(OSError(errno.EPERM, "no")))

    assert (log.read(NOW), log.reason, log.is_caught_up) == ((), "permission", False)
    log.close()
