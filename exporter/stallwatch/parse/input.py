"""Log files as blocks of whole lines: opened so that nothing hangs, unpacked, taken out of a container's records.

Every problem is an InputError that names the file; what is damaged behind a good beginning is read so far, with a
warning.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Protocol, TextIO

from ..printable import printable
from ..sources.logs.decode import Unwrapper
from ..strict_yaml import InputError

BLOCK_BYTES = 1 << 18
LONGEST_LINE_BYTES = 8 << 20
SAMPLE_BYTES = 4 << 20
"""How much of a file is read with every framework to see which one wrote it."""
BAR_BYTES = 100_000_000
"""Files larger than this have a progress bar, on a terminal."""
BAR_WIDTH = 40

STDIN = "-"
_TEXT_CONTROL = frozenset(b"\t\n\r\x08\x0b\x0c\x1b\0")
_HOLE = re.compile(rb"\0{16,}")
_PACKED_BYTES = 64 << 10
_STEP_BYTES = 64
_GZIP = b"\x1f\x8b"
_PACKERS = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}
_KINDS = (
    (stat.S_ISDIR, "is a directory; a log file is needed"),
    (stat.S_ISFIFO, "is a pipe or socket; a log file is needed, or - for standard input"),
    (stat.S_ISSOCK, "is a pipe or socket; a log file is needed, or - for standard input"),
    (stat.S_ISCHR, "is a device; a log file is needed"),
    (stat.S_ISBLK, "is a device; a log file is needed"),
)

TimeOf = Callable[[int], float | None]


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines; only the last one of a file may lack its end.

    `time_of`: the Unix time that a container's runtime gave to the line of this number; None where no runtime wrote.
    It answers for lines of this block, and until the next block is read.
    """

    text: bytes
    time_of: TimeOf | None = None


class _Raw(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(slots=True)
class LogInput:
    """One log while it is read.

    `size`: bytes there were to read when it was opened; None = not known.  `lines_on_disk`: so far, of a container's
    log; None of any other, whose lines are those of the text.
    """

    name: str
    raw: BufferedReader
    size: int | None = None
    terminal: TextIO | None = None
    bytes_read: int = 0
    lines_on_disk: int | None = None
    form: str = ""
    warnings: list[str] = field(default_factory=list)

    def blocks(self) -> Iterator[Block]:
        """The file from its beginning.  `bytes_read` counts what was there after unpacking and before unwrapping."""
        unwrapper, rest, on_disk = Unwrapper(), b"", _LineCount()
        with _bar(self) as bar:
            for chunk in self._chunks():
                bar()
                text = rest + unwrapper.feed(chunk)
                if unwrapper.form or not text:  # of a container, or not known yet
                    on_disk.take(chunk)
                end = len(text) if unwrapper.form else _end_of_lines(text)
                block, rest = text[:end], text[end:]
                if block:
                    yield self._block(block, unwrapper)
        if text := rest + unwrapper.finish():
            yield self._block(text, unwrapper)
        self.lines_on_disk = on_disk.lines if unwrapper.form else None

    def _block(self, text: bytes, unwrapper: Unwrapper) -> Block:
        self.form = unwrapper.form
        return Block(text, unwrapper.time_of if unwrapper.form else None)

    def _chunks(self) -> Iterator[bytes]:
        stream: _Raw = _Bounded(self.raw, self.size)
        head = self._peek()
        packer = next((name for magic, name in _PACKERS.items() if head.startswith(magic)), None)
        if packer is not None:
            raise self.wrong(f"is packed by {packer}; only gzip is unpacked here, others by a pipe into parse -")
        if head[:2] == _GZIP:
            stream = _Unpacked(self.raw, self.warnings)
        first = True
        while chunk := self._read(stream):
            if first and _is_binary(chunk):
                raise self.wrong("is not a text file; a log file is needed")
            first = False
            self.bytes_read += len(chunk)
            yield chunk
        if first and self.warnings:
            raise self.wrong("cannot be read: damaged")

    def _peek(self) -> bytes:
        try:
            return self.raw.peek(8)[:8]
        except OSError as error:
            raise self.wrong(f"cannot be read: {error.strerror}") from None

    def _read(self, stream: _Raw) -> bytes:
        """The next bytes; a disk that fails on the way leaves what came before it."""
        try:
            return stream.read(BLOCK_BYTES) or b""
        except OSError as error:
            if not self.bytes_read:
                raise self.wrong(f"cannot be read: {error.strerror}") from None
            problem = f"reading failed after {self.bytes_read} bytes ({error.strerror}): told is what was read"
            self.warnings.append(problem)
            return b""

    def wrong(self, problem: str) -> InputError:
        return InputError(self.name, 0, "", problem)


@dataclass(slots=True)
class _LineCount:
    """Line ends, and 1 for a last line without one."""

    ends: int = 0
    last: bytes = b"\n"

    def take(self, chunk: bytes) -> None:
        self.ends, self.last = self.ends + chunk.count(b"\n"), chunk[-1:]

    @property
    def lines(self) -> int:
        return self.ends + (self.last != b"\n")


# --- opening -------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: str, stdin: BufferedReader | None = None, terminal: TextIO | None = None) -> Iterator[LogInput]:
    """A log by its path, or "-" for standard input.  What never ends or never begins is refused."""
    if path == STDIN:
        raw = stdin or _stdin()
        yield LogInput("<stdin>", raw, _size(raw), terminal)
        return
    name = shown(path)
    with _file(path, name) as raw:
        yield LogInput(name, raw, _size(raw), terminal)


def shown(path: str) -> str:
    """A path as it may be printed: a file's name can hold anything."""
    return "".join(map(printable, path))


def _stdin() -> BufferedReader:
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except (AttributeError, OSError, ValueError):
        raise InputError("<stdin>", 0, "", "cannot be read: it is closed") from None


def _file(path: str, name: str) -> BufferedReader:
    """Looked at before it is opened, for to open a device can do something; opened without waiting for anybody."""
    try:
        _refuse(os.stat(path).st_mode, name)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(name, 0, "", f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise InputError(name, 0, "", "cannot be read: its name is none") from None
    try:
        _refuse(os.fstat(descriptor).st_mode, name)  # it may be another one by now
    except InputError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def _refuse(mode: int, name: str) -> None:
    if problem := next((problem for is_kind, problem in _KINDS if is_kind(mode)), None):
        raise InputError(name, 0, "", problem)


def _size(raw: BufferedReader) -> int | None:
    """Bytes left of a regular file; of a file system that does not know sizes, and of a pipe, None."""
    try:
        status = os.fstat(raw.fileno())
        left = status.st_size - raw.tell() if stat.S_ISREG(status.st_mode) else 0
    except (OSError, ValueError):
        return None
    return left if left > 0 else None


class _Bounded:
    """A file up to the size it had: one that is written faster than it is read ends, too."""

    def __init__(self, raw: BufferedReader, size: int | None) -> None:
        self._raw, self._left = raw, size

    def read(self, size: int, /) -> bytes:
        if self._left is None:
            return self._raw.read(size)
        chunk = self._raw.read(min(size, self._left))
        self._left -= len(chunk)
        return chunk


class _Unpacked:
    """gzip, member by member.  What comes before damage is given out, and the damage is noted."""

    def __init__(self, raw: BufferedReader, warnings: list[str]) -> None:
        self._raw, self._warnings = raw, warnings
        self._packed, self._ended = b"", False
        self._member = zlib.decompressobj(wbits=31)

    def read(self, size: int, /) -> bytes:
        pieces, length = [], 0
        while length < size and not self._ended:
            piece = self._piece(size - length)
            pieces.append(piece)
            length += len(piece)
        return b"".join(pieces)

    def _piece(self, size: int) -> bytes:
        if self._member.eof and not self._next_member():
            return b""
        self._packed = self._packed or self._raw.read(_PACKED_BYTES)
        if not self._packed:
            return self._end("the packed data end early: told is what could be unpacked")
        before = self._member.copy()
        try:
            piece = self._member.decompress(self._packed, size)
        except zlib.error:
            self._end("the packed data are damaged: told is what could be unpacked before")
            return _up_to_damage(before, self._packed, size)
        self._packed = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
        return piece

    def _next_member(self) -> bool:
        """Files that were joined; zeros that fill up a tape are the end."""
        self._packed = self._packed.lstrip(b"\0") or self._raw.read(_PACKED_BYTES).lstrip(b"\0")
        if len(self._packed) == 1:
            self._packed += self._raw.read(_PACKED_BYTES)
        if self._packed[:2] == _GZIP:
            self._member = zlib.decompressobj(wbits=31)
            return True
        if self._packed:
            self._end("behind the packed data are others that were not read")
        self._ended = True
        return False

    def _end(self, warning: str) -> bytes:
        self._ended = True
        self._warnings.append(warning)
        return b""


def _up_to_damage(member: zlib._Decompress, packed: bytes, size: int) -> bytes:
    """What can be unpacked before damage, in small steps, for a step that fails gives nothing."""
    unpacked = b""
    with suppress(zlib.error):
        for offset in range(0, len(packed), _STEP_BYTES):
            unpacked += member.decompress(packed[offset : offset + _STEP_BYTES])
    return unpacked[:size]


# --- blocks --------------------------------------------------------------------------------------------------


def _end_of_lines(text: bytes) -> int:
    """Where the last whole line ends; a line longer than allowed is cut."""
    end = text.rfind(b"\n") + 1
    return len(text) if end == 0 and len(text) > LONGEST_LINE_BYTES else end


def _is_binary(chunk: bytes) -> bool:
    """More than a tenth control characters.  Holes do not count: a log that was truncated, or a crash, leaves them."""
    head = _HOLE.sub(b"", chunk).lstrip(b"\0")[:8192]
    odd = sum(1 for byte in head if byte < 32 and byte not in _TEXT_CONTROL) + 5 * head.count(b"\0")
    return odd * 10 > len(head)


def sample_of(blocks: Iterator[Block]) -> list[Block]:
    """The beginning of a file; times stay known while later blocks are read."""
    sample: list[Block] = []
    size, lines = 0, 0
    while size < SAMPLE_BYTES and (block := next(blocks, None)) is not None:
        number = block.text.count(b"\n") + 1
        if (time_of := block.time_of) is not None:
            times = {line: time_of(line) for line in range(lines + 1, lines + number + 1)}
            block = Block(block.text, times.get)
        sample.append(block)
        size, lines = size + len(block.text), lines + number - 1
    return sample


# --- progress ------------------------------------------------------------------------------------------------


@contextmanager
def _bar(log: LogInput) -> Iterator[Callable[[], None]]:
    """A bar on the terminal for a large file; called once per block."""
    size, terminal = log.size or 0, log.terminal
    if terminal is None or size <= BAR_BYTES or not terminal.isatty():
        yield lambda: None
        return
    begun, drawn = _position(log.raw), -1

    def draw() -> None:
        nonlocal drawn
        percent = min(100, 100 * (_position(log.raw) - begun) // size)
        if percent != drawn:
            drawn = percent
            filled = "#" * (percent * BAR_WIDTH // 100)
            _tell(terminal, f"\r{log.name} [{filled:<{BAR_WIDTH}}] {percent:3} % of {size / 1e6:,.0f} MB")

    try:
        yield draw
    finally:
        _tell(terminal, "\r\x1b[K")


def _position(raw: BufferedReader) -> int:
    with suppress(OSError, ValueError):
        return raw.tell()
    return 0


def _tell(terminal: TextIO, text: str) -> None:
    """A terminal that is gone costs the bar, not the report."""
    with suppress(OSError, ValueError):
        terminal.write(text)
        terminal.flush()
