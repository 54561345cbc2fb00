"""Records of the kernel log, from /dev/kmsg below the host's root: what is there is read, and nothing waited for.

Each read of the device is one record, from the oldest that the ring still holds.  Its time is that of the kernel's own
clock, which like CLOCK_MONOTONIC stands still while the machine sleeps: a record is as old as the difference of the
two says, so that only one from before such a sleep is dated too late (by the length of the sleep).  The boot time is
not used, for with it every record after a sleep would be wrong.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from .. import Moment
from ..procfs import reason_of

PLACE = "dev/kmsg"
DEVICE = os.makedev(1, 11)
"""The number of /dev/kmsg on every Linux (Documentation/admin-guide/devices.txt)."""
MOST_RECORDS = 20_000
"""Per look; the rest is read at the next one.  A ring of 1 MiB holds about 10,000 records, read in some 40 ms."""
RECORD_BYTES = 16 << 10
"""The kernel makes them no longer than 8 KiB (PRINTK_MESSAGE_MAX, before Linux 6.4 CONSOLE_EXT_LOG_MAX)."""

_PREFIX = re.compile(rb"(\d+),(\d+),(\d+),([^,;]*)(?:,[^;]*)?;")
"""Facility and level, number, microseconds, flags, then perhaps fields of newer kernels."""
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Record:
    """One message.  `facility` 0 is the kernel's own, which no user can write; `at` in Unix seconds.

    `text` may hold line ends; the `KEY=value` lines behind the message are left out.
    """

    facility: int
    number: int
    at: float
    text: str
    continues: bool = False


class Device(Protocol):
    """An open log that gives one record for each read, OSError where the device does."""

    def read(self) -> bytes: ...

    def close(self) -> None: ...


class _Kmsg:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self) -> bytes:
        return os.read(self._fd, RECORD_BYTES)

    def close(self) -> None:
        os.close(self._fd)


class _Plain:
    """A regular file in the place of the device: each whole line is a record."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""

    def read(self) -> bytes:
        while b"\n" not in self._rest:
            part = os.read(self._fd, RECORD_BYTES)
            if not part:
                raise BlockingIOError(errno.EAGAIN, "no more")
            self._rest += part
        record, _, self._rest = self._rest.partition(b"\n")
        return record + b"\n"

    def close(self) -> None:
        os.close(self._fd)


def open_log(path: Path, may_be_file: bool = False) -> Device:
    """The log, to be read without waiting; OSError when it is not to be had, ENODEV when it is something else.

    It is looked at before it is opened, for opening another device may do something.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY
    _check(os.lstat(path), may_be_file)
    fd = os.open(path, flags)
    try:
        status = os.fstat(fd)
        _check(status, may_be_file)
    except OSError:
        os.close(fd)
        raise
    return _Kmsg(fd) if stat.S_ISCHR(status.st_mode) else _Plain(fd)


def _check(status: os.stat_result, may_be_file: bool) -> None:
    is_device = stat.S_ISCHR(status.st_mode) and status.st_rdev == DEVICE
    if not is_device and not (may_be_file and stat.S_ISREG(status.st_mode)):
        raise OSError(errno.ENODEV, "no kernel log")


def parse_record(raw: bytes, offset: float) -> Record | None:
    """A record as the device gives it; None when it has another form.

    `offset`: what the time since boot, in seconds, is to be raised by to be Unix time.
    """
    prefix = _PREFIX.match(raw)
    if prefix is None:
        return None
    message = raw[prefix.end() :].split(b"\n", 1)[0]
    text = _ESCAPED.sub(lambda escaped: bytes([int(escaped[1], 16)]), message).decode("utf-8", "replace")
    return Record(int(prefix[1]) >> 3, int(prefix[2]), offset + int(prefix[3]) / 1e6, text, continues=prefix[4] == b"+")


class KernelLog:
    """The log, opened at the first look and kept open.

    `reason` (of READ_REASONS) says why it could not be read at the last look, None = it could.  `is_caught_up`:
    everything there was had been read then.  `missed`: stretches that the ring overwrote before they were read, and
    records that were too long.
    """

    def __init__(self, root: Path, may_be_file: bool = False, most_records: int = MOST_RECORDS) -> None:
        self._path, self._may_be_file, self._most = root / PLACE, may_be_file, most_records
        self._device: Device | None = None
        self._next = 0
        self.reason: str | None = None
        self.is_caught_up = False
        self.missed = 0

    def read(self, now: Moment) -> Iterator[Record]:
        """What came since the last look, oldest first; nothing when it cannot be read, see `reason`."""
        self.is_caught_up, self.reason = False, None
        try:
            self._device = self._device or self.opened()
        except OSError as error:
            self._fail(error)
        else:
            yield from self._records(self._device, now)

    def opened(self) -> Device:
        return open_log(self._path, self._may_be_file)

    def close(self) -> None:
        """Opened again at the next look, which begins behind what was read."""
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def _records(self, device: Device, now: Moment) -> Iterator[Record]:
        held: Record | None = None  # what a fragment behind it may go on with
        for raw in self._raw(device):
            record = parse_record(raw, now.wall - now.monotonic)
            if record is None or record.number < self._next:
                continue  # another form, or read before the log was opened again
            self._next = record.number + 1
            if record.continues and held is not None:
                held = replace(held, text=held.text + record.text)
                continue
            if held is not None:
                yield held
            held = replace(record, at=min(record.at, now.wall))
        if held is not None:
            yield held

    def _raw(self, device: Device) -> Iterator[bytes]:
        for _ in range(self._most):
            try:
                raw = device.read()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EINVAL):
                    self._fail(error)
                    return
                self.missed += 1  # the next read goes on behind the gap, or behind the record that was too long
                continue
            if not raw:
                break
            yield raw
        else:
            return
        self.is_caught_up = True

    def _fail(self, error: OSError) -> None:
        """Where the device is not there (a container that was not given it), or something else is, nothing vanished."""
        absent = error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)
        self.reason = "not_supported" if absent else reason_of(error)
        self.close()
