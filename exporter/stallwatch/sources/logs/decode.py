"""Takes off what a container runtime puts around each line of a log: Docker's JSON, the form of CRI.

    {"log":"INFO ready\\n","stream":"stderr","time":"2026-06-02T08:00:00.1Z"}
    2026-06-02T08:00:00.100000000Z stderr F INFO ready

Line n of the file stays line n: a long line that the runtime wrote in pieces stands where its first piece stood,
and the lines of the other pieces are empty.  Pure; no input raises.  A log that no runtime wrote passes unchanged.

Two uses: `Unwrapper` for a whole file as one text, `StreamUnwrapper` for stdout and stderr apart as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter

MOST_PHYSICAL_BYTES = 8 << 20
"""Of a longer line on disk only the beginning is read."""
MOST_HELD_BYTES = 8 << 20
MOST_HELD_LINES = 50_000
"""Lines behind one whose end has not come are held back so far; then it ends where it is."""
UNDECIDED_BYTES = 64 << 10
"""So much of a beginning without a line end is looked at before it is taken for text."""
UNDECIDED_LINES = 8
"""So many first lines may be damaged: a log can begin in the middle of a line."""

DOCKER_PIECE_BYTES = 16_384
DOCKER_PIECE_SECONDS = 10.0
"""Docker cuts at 16 KiB.  A shorter piece without an end is a line that grows, or the last words of a process: what
the next one writes later is another line."""

_STAMP = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)"
_DOCKER = re.compile(
    rb'^\{"log":"([^"\\\n]*+(?:\\[^n\n][^"\\\n]*+)*+)((?:\\n)?)","stream":"(stdout|stderr)",'
    rb'(?:"attrs":\{[^{}\n]*\},)?"time":"([^"\\\n]*)"(?:,"attrs":\{[^{}\n]*\})?\}\r?$',
    re.MULTILINE,
)
"""Groups: text, its line end, stream, time.  A line end within the text, or an order of its own, is read as JSON."""
_DOCKER_SEAM = re.compile(rb'\\n","stream":"(stdout|stderr)","time":"([^"\\\n]*)"\}\n')
"""Between the texts of usual lines: a block is taken apart there at once."""
_CRI = re.compile(rb"^(" + _STAMP + rb") (stdout|stderr) ([FP])(?::\S*)?(?: ([^\n]*))?$", re.MULTILINE)
"""Groups: time, stream, tag, text.  Some pipelines strip the blank in front of an empty text."""

_STREAMS = ("stdout", "stderr")
_BEGIN = b'{"log":'
_SEAM_BEGIN = b'\n{"log":"'
MOST_RECORDS = 4
"""Records on one line that are tried, the last one first."""
_JSON = json.JSONDecoder(strict=False)
_BEGINS_CRI = re.compile(rb"\d{1,4}(?:$|-[-+\d:.TZ]{0,35}(?:$| (?:$|s)))")
"""A beginning that may become a line of CRI."""
_ESCAPE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u\n]|\\u?")
_FREQUENT = ((b'\\"', b'"'), (b"\\u001b", b"\x1b"), (b"\\t", b"\t"), (b"\\r", b"\r"))
_SHORT = {
    b'\\"': b'"',
    b"\\\\": b"\\",
    b"\\/": b"/",
    b"\\b": b"\b",
    b"\\f": b"\f",
    b"\\n": b"\r",
    b"\\r": b"\r",
    b"\\t": b"\t",
}
"""A line end inside of a text must not make two lines of one; scanners take lines apart at `\\r` too."""

Row = tuple[bytes, bool, bytes, bytes]
"""One line on disk: text without line end, whether the line ends here, stream (empty: unknown), time."""


def unix_time(stamp: bytes | str) -> float | None:
    """Seconds since 1970 of a runtime's time; None when it is none."""
    text = stamp.decode("ascii", "replace") if isinstance(stamp, bytes) else stamp
    try:
        moment = datetime.fromisoformat(text)
        return moment.timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError, OSError):
        return None


@dataclass(slots=True)
class _Decoded:
    """The lines of one block.  `texts` is set instead of `rows` where every line is whole: their texts as one."""

    rows: list[Row]
    texts: bytes | None
    streams: list[bytes]
    stamps: list[bytes]

    def each(self) -> list[Row]:
        """Every line by itself."""
        if self.texts is None:
            return self.rows
        texts = self.texts[:-1].split(b"\n")
        return [
            (text, True, stream, stamp) for text, stream, stamp in zip(texts, self.streams, self.stamps, strict=True)
        ]


# --- one line on disk ----------------------------------------------------------------------------------------


def _unescape(text: bytes) -> bytes:
    """The escapes of a JSON string (one or many, joined by line ends) put back."""
    if b"\\" not in text:
        return text
    if b"\\\\" not in text:
        for escape, meant in _FREQUENT:
            text = text.replace(escape, meant)
        if b"\\" not in text:
            return text
    return _ESCAPE.sub(_meant, text)


def _meant(match: re.Match[bytes]) -> bytes:
    escape = match[0]
    if (short := _SHORT.get(escape)) is not None:
        return short
    if len(escape) < 6:
        return escape  # not JSON: as it stands
    return _utf8("".join(chr(int(part, 16)) for part in escape.decode("ascii").split("\\u")[1:]))


def _utf8(text: str) -> bytes:
    """On one line; halves of surrogate pairs are put together, lone ones replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\n", "\r").encode()


def _docker_row(line: bytes) -> Row | None:
    """A line that is not as usual: another order, NULs of a crash in front, half a record before the whole one."""
    line = line.strip(b"\0")
    if match := _DOCKER.match(line):
        return _unescape(match[1]), match[2] == b"\\n", match[3], match[4]
    end = len(line)
    for _ in range(MOST_RECORDS):
        end = line.rfind(_BEGIN, 0, end)
        if end < 0:
            return None
        if (row := _json_row(line[end:])) is not None:
            return row
    return None


def _docker_block(block: bytes) -> _Decoded | None:
    """Whole lines that all are as usual, faster than one by one; None when one is not."""
    parts = _DOCKER_SEAM.split(block)
    texts = b"\n".join(parts[:-1:3])
    number = len(parts) // 3
    if parts[-1] or number != block.count(b"\n") or texts.count(_SEAM_BEGIN) != number - 1:
        return None
    if not texts.startswith(_SEAM_BEGIN[1:]):
        return None
    texts = texts[len(_SEAM_BEGIN) - 1 :].replace(_SEAM_BEGIN, b"\n") + b"\n"
    escapes, quotes = texts.count(b"\\"), texts.count(b'\\"')
    if texts.count(b'"') != quotes:
        return None
    if escapes == quotes:  # no other escape, nor one of a backslash
        return _Decoded([], texts.replace(b'\\"', b'"') if quotes else texts, parts[1::3], parts[2::3])
    if b"\\\\" in texts or b"\\n" in texts or b"\\\n" in texts:
        return None
    return _Decoded([], _unescape(texts), parts[1::3], parts[2::3])


def _json_row(text_of_record: bytes) -> Row | None:
    try:
        record, _ = _JSON.raw_decode(text_of_record.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    text, stream, stamp = record.get("log"), record.get("stream"), record.get("time", "")
    if not isinstance(text, str) or stream not in _STREAMS or not isinstance(stamp, str):
        return None
    ended = text.endswith("\n")
    return _utf8(text.removesuffix("\n")), ended, stream.encode(), _utf8(stamp)


def _cri_row(line: bytes) -> Row | None:
    match = _CRI.match(line.lstrip(b"\0"))
    return (match[4] or b"", match[3] == b"F", match[2], match[1]) if match else None


@dataclass(frozen=True, slots=True)
class _Form:
    """How one runtime writes: a pattern for all usual lines of a block at once, and a slow way for any line."""

    name: str
    pattern: re.Pattern[bytes]
    text: int  # positions of the groups
    end: int
    stream: int
    stamp: int
    ended: bytes  # what the group `end` holds when the line ends
    escaped: bool
    row: Callable[[bytes], Row | None]
    quick: Callable[[bytes], _Decoded | None] = lambda block: None  # the same for a block without anything special


_FORMS = (
    _Form("docker", _DOCKER, 0, 1, 2, 3, b"\\n", True, _docker_row, _docker_block),
    _Form("cri", _CRI, 3, 2, 1, 0, b"F", False, _cri_row),
)


def form_of(line: bytes) -> str:
    """`docker` or `cri` for a line of that form, "" for any other."""
    line = line.strip(b"\0\r\n")
    name = "docker" if line.startswith(_BEGIN) else "cri"
    return next((form.name for form in _FORMS if form.name == name and form.row(line) is not None), "")


def _decode(form: _Form, block: bytes) -> _Decoded:
    """Whole lines; a line that cannot be read is an empty one of an unknown stream."""
    if (decoded := form.quick(block)) is not None:
        return decoded
    found = form.pattern.findall(block)
    if len(found) != block.count(b"\n"):
        rows = [form.row(line) or (b"", True, b"", b"") for line in block[:-1].split(b"\n")]
        return _Decoded(rows, None, [row[2] for row in rows], [row[3] for row in rows])
    streams, stamps = list(map(itemgetter(form.stream), found)), list(map(itemgetter(form.stamp), found))
    texts = list(map(itemgetter(form.text), found))
    ends = list(map(itemgetter(form.end), found))
    if ends.count(form.ended) == len(ends):
        joined = b"\n".join(texts) + b"\n"
        return _Decoded([], _unescape(joined) if form.escaped else joined, streams, stamps)
    if form.escaped:
        texts = list(map(_unescape, texts))
    rows = list(zip(texts, (end == form.ended for end in ends), streams, stamps, strict=True))
    return _Decoded(rows, None, streams, stamps)


class _Lines:
    """Whole lines out of chunks, and the form they have.  `form` None = not known yet, "" = plain text."""

    def __init__(self) -> None:
        self.form: str | None = None
        self.of: _Form | None = None
        self._rest: list[bytes] = []
        self._size = 0
        self._skipping = False

    def take(self, chunk: bytes) -> bytes:
        """The whole lines there are by now; while nothing is known, and of plain text, whatever there is to give."""
        if self.form == "":
            return chunk
        end = chunk.rfind(b"\n") + 1
        if not end and self.form:
            self._keep(chunk)
            return b""
        block = b"".join((*self._rest, chunk[:end] if self.form else chunk))
        self._rest, self._size = [], 0
        if self.form is None:
            return self._decide(block)
        self._skipping = False
        if end < len(chunk):
            self._keep(chunk[end:])
        return block

    def leave(self) -> bytes:
        """What is left at the end of a file: a line without its end, or nothing."""
        rest = b"".join(self._rest)
        self._rest, self._size, self._skipping = [], 0, False
        if self.form is None and rest:
            self.form = ""
        return rest

    def _keep(self, part: bytes) -> None:
        if self._skipping:
            return
        part = part[: MOST_PHYSICAL_BYTES - self._size]
        self._rest.append(part)
        self._size += len(part)
        self._skipping = self._size >= MOST_PHYSICAL_BYTES

    def _decide(self, block: bytes) -> bytes:
        end = block.rfind(b"\n") + 1
        lines = [line for line in block[:end].split(b"\n", UNDECIDED_LINES)[:UNDECIDED_LINES] if line.strip(b"\0\r ")]
        name = next(filter(None, map(form_of, lines)), "")
        if not name and len(lines) < UNDECIDED_LINES and len(block) < UNDECIDED_BYTES and self._may_be(lines, block):
            self._keep(block)
            return b""
        self.form, self.of = name, next((form for form in _FORMS if form.name == name), None)
        if not name:
            return block
        if end < len(block):
            self._keep(block[end:])
        return block[:end]

    def _may_be(self, lines: list[bytes], block: bytes) -> bool:
        """Whether a form can still show: the only line so far has no end, or looks like half a record."""
        if lines:
            return any(b'"stream":"std' in line for line in lines)
        begin = block.lstrip(b"\0")[:64]
        return not begin or begin.startswith(_BEGIN[: len(begin)]) or _BEGINS_CRI.match(begin) is not None


# --- a whole file --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Slot:
    """One line to come out."""

    stamp: bytes
    pieces: list[bytes] = field(default_factory=list)


class Unwrapper:
    """A whole file as text: what is given out are whole lines, as many as came in, in their order.

        unwrapper = Unwrapper()
        for block in blocks:          # of any size
            text = unwrapper.feed(block)
        text = unwrapper.finish()     # what was held back; without a line end where the file has none

    `form` is `docker`, `cri`, or "" (plain text passes unchanged; also while too little was seen).
    """

    def __init__(self) -> None:
        self._lines = _Lines()
        self._slots: list[_Slot] = []
        self._open: dict[bytes, int] = {}  # stream -> number of the slot its line stands in
        self._first = 0  # number of the first slot held
        self._held = 0  # bytes
        self._last: dict[bytes, tuple[bytes, int]] = {}  # stream -> time and size of the last piece
        self._given = 0  # lines given out so far
        self._stamps: list[bytes] = []  # of the lines given out last

    @property
    def form(self) -> str:
        return self._lines.form or ""

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes of the file; returns the text that can be given out now."""
        self._stamps = []
        block = self._lines.take(chunk)
        return self._decoded(block) if block and self._lines.of is not None else block

    def finish(self) -> bytes:
        """The end of the file."""
        self._stamps = []
        rest = self._lines.leave()
        if self._lines.of is None:
            return rest
        text = self._decoded(rest + b"\n") if rest else b""
        self._open.clear()
        text += self._given_out(len(self._slots))
        return text[:-1] if rest else text

    def time_of(self, line: int) -> float | None:
        """Unix time the runtime gave to a line (1-based, of the file) among those given out last; None = none."""
        index = line - 1 - (self._given - len(self._stamps))
        return unix_time(self._stamps[index]) if 0 <= index < len(self._stamps) else None

    def _decoded(self, block: bytes) -> bytes:
        assert self._lines.of is not None  # noqa: S101  # asked for wrapped lines only
        decoded = _decode(self._lines.of, block)
        if decoded.texts is not None and not self._slots:
            self._first += len(decoded.stamps)
            self._note(decoded.stamps)
            return decoded.texts
        for row in decoded.each():
            self._take(row)
        if self._held > MOST_HELD_BYTES or len(self._slots) > MOST_HELD_LINES:
            self._open.clear()
        return self._given_out(min(self._open.values(), default=self._first + len(self._slots)) - self._first)

    def _take(self, row: Row) -> None:
        text, ended, stream, stamp = row
        if stream in self._open and _is_another(self._lines.form, self._last.get(stream), stamp):
            del self._open[stream]
        slot = _Slot(stamp)
        self._slots.append(slot)
        number = self._open.get(stream, self._first + len(self._slots) - 1)
        self._slots[number - self._first].pieces.append(text)
        self._held += len(text)
        if ended:
            self._open.pop(stream, None)
        else:
            self._open[stream], self._last[stream] = number, (stamp, len(text))

    def _given_out(self, number: int) -> bytes:
        """The first so many slots."""
        slots, self._slots = self._slots[:number], self._slots[number:]
        self._first += number
        self._note([slot.stamp for slot in slots])
        self._held = sum(len(piece) for slot in self._slots for piece in slot.pieces)
        return b"".join(b"".join(slot.pieces) + b"\n" for slot in slots)

    def _note(self, stamps: list[bytes]) -> None:
        self._stamps.extend(stamps)
        self._given += len(stamps)


def _is_another(form: str | None, last: tuple[bytes, int] | None, stamp: bytes) -> bool:
    """Whether a piece that follows one without an end begins another line."""
    if form != "docker" or last is None or last[1] >= DOCKER_PIECE_BYTES:
        return False
    before, now = unix_time(last[0]), unix_time(stamp)
    return before is not None and now is not None and now - before > DOCKER_PIECE_SECONDS


# --- stdout and stderr apart ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    """What one chunk held of one stream.

    `size`: bytes on disk; `time`: Unix time of its last line.  `text` may end within a line; so many line ends as
    the line had pieces stand behind it once it ends.
    """

    text: bytes = b""
    size: int = 0
    time: float | None = None


@dataclass(slots=True)
class _Stream:
    owed: int = 0  # pieces of the line that has not ended
    last: tuple[bytes, int] | None = None


class StreamUnwrapper:
    """A log that is followed: "" -> a plain text, `stdout` and `stderr` -> what a runtime wrote of each.

    `form` is None until enough was seen; then it stays until `reset`.
    """

    def __init__(self) -> None:
        self._lines = _Lines()
        self._streams: dict[bytes, _Stream] = {}
        self._speaker = b"stdout"

    @property
    def form(self) -> str | None:
        return self._lines.form

    def feed(self, chunk: bytes) -> dict[str, Part]:
        """The next bytes; texts by stream."""
        block = self._lines.take(chunk)
        if self._lines.of is None:
            return {"": Part(block, len(block))} if block else {}
        return self._parts(block) if block else {}

    def leave(self) -> dict[str, Part]:
        """The file ends here, perhaps within a line; a line in pieces may go on in the next file."""
        rest = self._lines.leave()
        if self._lines.of is None:
            return {"": Part(rest, len(rest))} if rest else {}
        parts = self._parts(rest + b"\n") if rest else {}
        for part in parts.values():
            part.size -= 1
        return parts

    def _parts(self, block: bytes) -> dict[str, Part]:
        assert self._lines.of is not None  # noqa: S101  # asked for wrapped lines only
        decoded = _decode(self._lines.of, block)
        if decoded.texts is not None and decoded.streams.count(decoded.streams[0]) == len(decoded.streams):
            stream = self._speaker = decoded.streams[0]
            if not self._streams.setdefault(stream, _Stream()).owed:
                return {stream.decode(): Part(decoded.texts, len(block), unix_time(decoded.stamps[-1]))}
        return self._sorted(decoded, block)

    def _sorted(self, decoded: _Decoded, block: bytes) -> dict[str, Part]:
        texts: dict[bytes, list[bytes]] = {}
        sizes: dict[bytes, int] = {}
        stamps: dict[bytes, bytes] = {}
        lines = block[:-1].split(b"\n")
        for (text, ended, known, stamp), line in zip(decoded.each(), lines, strict=True):
            stream = self._speaker = known or self._speaker
            state = self._streams.get(stream) or self._streams.setdefault(stream, _Stream())
            out = texts.setdefault(stream, [])
            if state.owed and _is_another(self._lines.form, state.last, stamp):
                out.append(b"\n" * state.owed)
                state.owed = 0
            out.append(text)
            if ended:
                out.append(b"\n" * (state.owed + 1))
                state.owed = 0
            else:
                state.owed, state.last = state.owed + 1, (stamp, len(text))
            sizes[stream] = sizes.get(stream, 0) + len(line) + 1
            stamps[stream] = stamp or stamps.get(stream, b"")
        return {
            stream.decode(): Part(b"".join(out), sizes[stream], unix_time(stamps[stream]))
            for stream, out in texts.items()
        }
