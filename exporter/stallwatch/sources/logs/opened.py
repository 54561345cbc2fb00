"""An open log: how far it was read, and how what was read is known again, in it or in a copy of it."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from dataclasses import dataclass

FINGERPRINT_BYTES = 1024
"""The first bytes of a file tell whether it was truncated and has grown again beyond what was read."""

BLOCK_BYTES = 1 << 16
"""The largest block of usual file systems: the one in which a hole ends begins with NUL bytes."""

_KEY = secrets.token_bytes(16)

Identity = tuple[int, int]
"""Device and inode."""


def identity_of(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


@dataclass(slots=True)
class OpenFile:
    """One opened file and how far it was read.

    Only keyed hashes of its text are kept: of the first bytes from `begins` on, and of the last ones that were read.
    `target` is the path that a stream of a process led to, "" for what was opened by its own path.  `written` and
    `changed`: nanoseconds of Unix time of the last writing, and of the last change of any kind, that the last look saw.
    """

    descriptor: int
    identity: Identity
    target: str = ""
    written: int = 0
    changed: int = 0
    begins: int = 0  # where its content begins: behind a hole
    offset: int = 0
    head: bytes = b""
    head_bytes: int = 0
    last: bytes = b""
    last_bytes: int = 0

    def is_cut(self, size: int) -> bool:
        """Whether the file, of `size` bytes by now, was truncated, or begins otherwise than when it was read."""
        if size < self.offset:
            return True
        return bool(self.head_bytes) and not self.begins_in(self.descriptor)

    def saw(self, status: os.stat_result) -> None:
        """Remember when it was as it is read now."""
        self.written, self.changed = status.st_mtime_ns, status.st_ctime_ns

    def took(self, chunk: bytes, descriptor: int) -> None:
        """Remember what was read behind the offset, and move it.  `descriptor` of what it was read from."""
        offset = self.offset + len(chunk)
        if self.head_bytes < (wanted := min(FINGERPRINT_BYTES, offset - self.begins)):
            head = os.pread(descriptor, wanted, self.begins)
            self.head, self.head_bytes = _digest(head), len(head)
        self.offset = offset
        self.last, self.last_bytes = _digest(chunk[-FINGERPRINT_BYTES:]), len(chunk[-FINGERPRINT_BYTES:])

    def begin(self, size: int) -> None:
        """Read from the beginning, of which nothing is known yet.  `size` of the file, in bytes."""
        self.begins = self.offset = _first_data(self.descriptor, size)
        self.head = self.last = b""
        self.head_bytes = self.last_bytes = 0

    def goes_on_in(self, other: OpenFile) -> bool:
        """Whether another handle leads to this very file: its inode, and everything that was read is there."""
        return self.identity[1] == other.identity[1] and self.is_in(other.descriptor)

    def is_in(self, descriptor: int) -> bool:
        """Whether what was read stands in an open file, as far as the hashes show it; False when nothing was."""
        if not self.head_bytes or not self.begins_in(descriptor):
            return False
        return _digest(os.pread(descriptor, self.last_bytes, self.offset - self.last_bytes)) == self.last

    def begins_in(self, descriptor: int) -> bool:
        return _digest(os.pread(descriptor, self.head_bytes, self.begins)) == self.head


def _first_data(descriptor: int, size: int) -> int:
    """Where the file's content begins: a writer that keeps its offset leaves a hole when it is truncated."""
    try:
        begins = min(size, os.lseek(descriptor, 0, os.SEEK_DATA))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size  # nothing but a hole
        begins = 0  # a file system that does not know
    head = os.pread(descriptor, min(BLOCK_BYTES, size - begins), begins)
    return begins + len(head) - len(head.lstrip(b"\0"))


def _digest(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=8, key=_KEY).digest()
