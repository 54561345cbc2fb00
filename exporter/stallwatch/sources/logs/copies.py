"""The copy of a log that was emptied in place, as logrotate's `copytruncate` does: what was not read yet stands in it.

A copy lies beside the log, under a name that begins with the log's or has a number or a date in it, packed or not.
It is known by what it holds: what was read of the log before.  That alone proves nothing: a log without times begins
alike with every start of its server, so that an old copy, of an earlier start, may hold the same.  So it must also have
been written, and changed, after what the last look at the log saw: what it holds more than was read was written later.
Both, because a time of writing can be set, and to move a file or to give it away changes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ..untrusted_paths import open_file
from .earlier import Earlier, beside, order_of, unpacked
from .opened import OpenFile, identity_of

PACKED = ".gz"
SECOND = 1_000_000_000
PACKED_BYTES = 1 << 16
MOST_UNPACKED = 256 << 20
"""Bytes of a packed copy that are gone through: half a second of one core.  What stands further behind is not found."""
MOST_REST = 32 << 20
"""Bytes of a packed copy behind what was read that are kept in memory."""
MOST_COPIES = 32
"""Files that are looked into."""
MOST_TRIED = 2
"""As many packed files are unpacked at most as far as one may be: beside a log may lie many that begin as it did."""


@dataclass(slots=True)
class _Budget:
    """Bytes that may still be unpacked, of files that begin as the log did."""

    left: int


def copy_of(file: OpenFile, path: str, is_apart: Callable[[str], bool]) -> int | None:
    """A descriptor of the copy beside the path of a file that was cut, with everything at its place; None without one.

    `is_apart`: whether a path is followed as a log of its own, which tells what it holds.
    OSError when the file itself does not answer any more.
    """
    owner, budget = os.fstat(file.descriptor).st_uid, _Budget(MOST_TRIED * _reach(file))
    for found in _changed_last(path, owner, file)[:MOST_COPIES]:
        if not is_apart(found.path) and (descriptor := _opened(found, file, owner, budget)) is not None:
            return descriptor
    return None


def _changed_last(path: str, owner: int, file: OpenFile) -> list[Earlier]:
    """Of each kind of name that one of the fresh files that changed last; packed ones behind the others.

    Whoever makes a copy moves the older ones on first, which changes them, too.  When two changed at once it is the
    one with the newest name.
    """
    fresh = [[one for one in files if _is_fresh(one, file)] for files in beside(path, owner, _order).values()]
    last = [max(reversed(files), key=lambda one: one.changed) for files in fresh if files]
    return sorted(last, key=lambda one: (one.path.endswith(PACKED), -one.changed))


def _is_fresh(found: Earlier, file: OpenFile) -> bool:
    """Equal times do, for those of many file systems are coarse.  Some programs that pack set whole seconds."""
    since = file.written if not found.path.endswith(PACKED) else file.written // SECOND * SECOND
    return found.changed >= file.changed and found.written >= since


def _order(name: str, other: str) -> tuple[str, str] | None:
    """As for what was moved aside, packed ones apart; another name that begins with the log's is a kind of its own."""
    plain = other.removesuffix(PACKED)
    if (order := order_of(name, plain)) is not None:
        return (f"{order[0]} packed", order[1]) if plain != other else order
    return (f"named {other}", "") if other.startswith(name) and other != name else None


def _opened(found: Earlier, file: OpenFile, owner: int, budget: _Budget) -> int | None:
    """None when it is no copy, or cannot be read."""
    try:
        descriptor = open_file(found.path)
    except OSError:
        return None
    with suppress(OSError):
        status = os.fstat(descriptor)
        if identity_of(status) == found.identity and status.st_uid in (0, owner):
            if found.path.endswith(PACKED):
                packed, descriptor = descriptor, os.memfd_create("log-copy")
                with open(packed, "rb", buffering=0):
                    _unpack(packed, descriptor, file, budget)
            if file.is_in(descriptor):
                return descriptor
    os.close(descriptor)
    return None


def _reach(file: OpenFile) -> int:
    """How far one packed copy is gone through."""
    return min(MOST_UNPACKED, file.offset + MOST_REST)


def _unpack(packed: int, memory: int, file: OpenFile, budget: _Budget) -> None:
    """What is needed of a packed copy, each byte at its place: the beginning, and from the last bytes read on."""
    head, last, at = file.begins + file.head_bytes, file.offset - file.last_bytes, 0
    is_begun = False
    if file.offset >= MOST_UNPACKED:
        return
    for chunk in unpacked(_pieces(packed)):
        _put(memory, chunk, at, file.begins, min(head, last))
        _put(memory, chunk, at, last, file.offset + MOST_REST)
        at += len(chunk)
        if not is_begun and at >= head:
            is_begun = file.begins_in(memory)
            if not is_begun:
                return  # it is none
        budget.left -= len(chunk)
        if at > _reach(file) or budget.left <= 0:
            return


def _pieces(packed: int) -> Iterator[bytes]:
    at = 0
    while piece := os.pread(packed, PACKED_BYTES, at):
        at += len(piece)
        yield piece


def _put(memory: int, chunk: bytes, at: int, begin: int, end: int) -> None:
    """Write what of a chunk, which stands at `at`, is between two places."""
    first, behind = max(at, begin), min(at + len(chunk), end)
    if first < behind:
        os.pwrite(memory, chunk[first - at : behind - at], first)
