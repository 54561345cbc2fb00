"""Whole log files, read once and told: phases, ranks, silences, errors (the `parse` subcommand).

The document is described in docs/REFERENCE.md, "JSON documents".  Nothing of the log's text comes out: events,
line numbers and the times the log prints only.
"""

from __future__ import annotations

import gzip
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import chain
from string import digits
from typing import Any

from .config import Limits
from .frameworks import Framework, whole_number
from .sources.log_kind import FALLBACK, recognise
from .sources.log_lines import Batch, Hit, LogScanner, parse_time, seconds_between
from .startup import PROGRESS_EVENTS, Startup
from .strict_yaml import InputError

BLOCK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 8 << 20
SAMPLE_BYTES = 4 << 20
"""How much of a file is read with every framework to see which one wrote it."""
MAX_ERRORS = 1000
NOVEL_IN_A_ROW = 10
"""Unknown lines of new shapes show progress only so many times in a row: they are weak evidence."""
SCHEMA = 1

_TEXT_CONTROL = frozenset(b"\t\n\r\x08\x0b\x0c\x1b\0")
_GZIP = b"\x1f\x8b"

Json = dict[str, Any]
_Stream = BufferedReader | gzip.GzipFile
_At = tuple[int, float]
"""A line with a time: offset of its beginning, time."""


def parse_files(
    paths: Sequence[str],
    framework: str | None,
    frameworks: Sequence[Framework],
    stdin: BufferedReader | None = None,
) -> Json:
    """Read every file from its beginning.  `framework` None or "auto" = the one whose lines are found.

    "-" is standard input (or `stdin`); gzip is recognised.  InputError when a file cannot be read as a log.
    """
    by_name = {one.name: one for one in frameworks}
    if framework not in (None, "auto") and framework not in by_name:
        raise InputError("--framework", 0, "", f"{framework!r} is unknown; allowed are auto, {', '.join(by_name)}")
    chosen = by_name.get(framework or "auto")
    return {"schema": SCHEMA, "files": [_parse_file(path, chosen, by_name, stdin) for path in paths]}


def _parse_file(
    path: str, chosen: Framework | None, frameworks: dict[str, Framework], stdin: BufferedReader | None
) -> Json:
    name = "<stdin>" if path == "-" else path
    with _opened(path, name, stdin) as stream:
        blocks = _blocks(stream, name)
        if chosen is None:
            sample, blocks = _sample(blocks)
            chosen = recognise(sample, tuple(frameworks.values())).framework
        account = _Account(chosen)
        for block in blocks:
            account.read(block)
    return {"file": name, **account.finish()}


# --- files ---------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: str, name: str, stdin: BufferedReader | None) -> Iterator[_Stream]:
    with ExitStack() as stack:
        raw = stdin or _stdin() if path == "-" else stack.enter_context(_file(path, name))
        stream: _Stream = raw
        if raw.peek(2)[:2] == _GZIP:
            stream = stack.enter_context(gzip.GzipFile(fileobj=raw))
        yield stream


def _stdin() -> BufferedReader:
    return open(sys.stdin.fileno(), "rb", closefd=False)


def _file(path: str, name: str) -> BufferedReader:
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise InputError(name, 0, "", "is a directory; a log file is needed")
        if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
            raise InputError(name, 0, "", "is a pipe or socket; a log file is needed, or - for standard input")
        return open(path, "rb")
    except OSError as error:
        raise InputError(name, 0, "", f"cannot be read: {error.strerror}") from None


def _blocks(stream: _Stream, name: str) -> Iterator[bytes]:
    """The file in blocks of whole lines; a line longer than allowed is cut."""
    rest, first = b"", True
    while chunk := _read(stream, name):
        if first and _is_binary(chunk):
            raise InputError(name, 0, "", "is not a text file; a log file is needed")
        block, first = rest + chunk, False
        end = block.rfind(b"\n") + 1
        if end == 0 and len(block) > LONGEST_LINE_BYTES:
            end = len(block)
        rest = block[end:]
        if end:
            yield block[:end]
    if rest:
        yield rest


def _read(stream: _Stream, name: str) -> bytes:
    try:
        return stream.read(BLOCK_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or "damaged"
        raise InputError(name, 0, "", f"cannot be read: {problem}") from None


def _is_binary(chunk: bytes) -> bool:
    """More than a tenth control characters; the hole that a truncated log begins with does not count."""
    head = chunk.lstrip(b"\0")[:8192]
    odd = sum(1 for byte in head if byte < 32 and byte not in _TEXT_CONTROL) + 5 * head.count(b"\0")
    return odd * 10 > len(head)


def _sample(blocks: Iterator[bytes]) -> tuple[list[bytes], Iterator[bytes]]:
    sample: list[bytes] = []
    while sum(map(len, sample)) < SAMPLE_BYTES and (block := next(blocks, None)) is not None:
        sample.append(block)
    return sample, chain(sample, blocks)


# --- one file ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Silence:
    """The longest gap between neighbouring lines that have a time."""

    seconds: float | None = None
    after_line: int | None = None
    last_time: float | None = None
    last_line: int = 0

    def see(self, time: float, line: int) -> None:
        if self.last_time is not None:
            gap = seconds_between(self.last_time, time)
            if self.seconds is None or gap > self.seconds:
                self.seconds, self.after_line = gap, self.last_line
        self.last_time, self.last_line = time, line

    def document(self) -> Json:
        return {"seconds": self.seconds, "after_line": self.after_line}


@dataclass(slots=True)
class _Account:
    """What is known of a file so far; all but lines, bytes and starts is of its last start."""

    framework: Framework
    scanner: LogScanner = field(init=False)
    startup: Startup = field(default_factory=Startup)
    bytes_read: int = 0
    ready_line: int | None = None
    phases: list[Json] = field(default_factory=list)
    open_phases: dict[str | None, Json] = field(default_factory=dict)
    errors: list[Json] = field(default_factory=list)
    any_line: _Silence = field(default_factory=_Silence)
    progress: _Silence = field(default_factory=_Silence)
    novel_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.scanner = LogScanner(self.framework, Limits(line_bytes=LONGEST_LINE_BYTES), numbered=True)

    def read(self, block: bytes) -> None:
        first_line = self.scanner.lines + 1
        self.bytes_read += len(block)
        batch = self.scanner.feed(block)
        if not block.endswith(b"\n"):
            batch.hits.extend(self.scanner.finish().hits)
        self._listen(block, first_line, self._take(batch))

    def _take(self, batch: Batch) -> list[int]:
        """Fold the hits of a block; the lines at which another start begins."""
        begins = []
        for hit in batch.hits:
            if self.startup.begins_anew(hit.event):
                begins.append(hit.line)
                self._begin_start()
            self._fold(hit)
        return begins

    def _begin_start(self) -> None:
        self.ready_line = None
        self.phases, self.open_phases, self.errors = [], {}, []
        self.progress, self.novel_in_a_row = _Silence(), 0

    def _fold(self, hit: Hit) -> None:
        if hit.event == "novel":
            self.novel_in_a_row += 1
            moved = self.novel_in_a_row <= NOVEL_IN_A_ROW
        else:
            moved = self.startup.apply(hit.event, hit.rank, hit.fields, float(hit.line))
            self.novel_in_a_row = 0 if moved else self.novel_in_a_row
            self._follow_phases(hit)
        if hit.event == "ready" and self.ready_line is None:
            self.ready_line = hit.line
        if hit.event in ("error", "fatal") and len(self.errors) < MAX_ERRORS:
            self.errors.append({"kind": hit.fields["kind"], "line": hit.line, "rank": hit.rank})
        if moved and hit.stamp and hit.time is not None:
            self.progress.see(hit.time, hit.line)

    def _follow_phases(self, hit: Hit) -> None:
        now: dict[str | None, str] = {None: self.startup.phase} if self.startup.seen else {}
        if self.startup.ready_at is None:
            now.update((name, state.phase) for name, state in self.startup.ranks.items())
        for name, phase in now.items():
            if (was := self.open_phases.get(name)) is None or was["phase"] != phase:
                self._close_phase(name, hit)
                opened: Json = {"phase": phase, "rank": name, "begin_line": hit.line, "end_line": None}
                opened.update(begin=hit.stamp or None, end=None)
                self.phases.append(opened)
                self.open_phases[name] = opened
        if hit.event == "ready":
            for name in [name for name in self.open_phases if name is not None]:
                self._close_phase(name, hit)

    def _close_phase(self, name: str | None, hit: Hit) -> None:
        if (was := self.open_phases.pop(name, None)) is not None:
            was.update(end_line=hit.line, end=hit.stamp or None)

    # --- silences --------------------------------------------------------------------------------------

    def _listen(self, block: bytes, first_line: int, begins: list[int]) -> None:
        """Look for the longest silence in a block; where a start begins, begin anew."""
        for line in begins[-1:]:
            block, first_line = block[_offset_of_line(block, line - first_line) :], line
            self.any_line = _Silence()
        times = _Times(block, self._time_of)
        first, last = times.next_from(0, len(block)), times.last()
        if first is None or last is None:
            return
        self.any_line.see(first[1], first_line + block.count(b"\n", 0, first[0]))
        self._search(times, first, last, first_line)
        self.any_line.last_time = last[1]
        self.any_line.last_line = first_line + block.count(b"\n", 0, last[0])

    def _search(self, times: _Times, low: _At, high: _At, first_line: int) -> None:
        """Find gaps longer than the longest so far, halving where there can be one."""
        silence, todo = self.any_line, [(low, high)]
        while todo:
            low, high = todo.pop()
            if high[0] <= low[0] or seconds_between(low[1], high[1]) <= (silence.seconds or 0.0):
                continue
            if (middle := times.between(low[0], high[0])) is not None:
                todo.extend([(middle, high), (low, middle)])
                continue
            silence.seconds = seconds_between(low[1], high[1])
            silence.after_line = first_line + times.block.count(b"\n", 0, low[0])

    def _time_of(self, line: bytes) -> float | None:
        prefix = self.framework.prefix.match(line[:400].decode("utf-8", "replace"))
        stamp = self.framework.prefix_group(prefix, "time")
        return parse_time(stamp) if stamp else None

    # --- the document ----------------------------------------------------------------------------------

    def finish(self) -> Json:
        scanner, startup, before = self.scanner, self.startup, self.scanner.before_start
        events = scanner.events - before.events
        started = startup.starts or (1 if any(event in PROGRESS_EVENTS for event in events) else 0)
        return {
            "lines": scanner.lines,
            "bytes": self.bytes_read,
            "framework": self.framework.name,
            "version": scanner.version or None,
            "starts": started,
            "ready": startup.ready_at is not None,
            "ready_line": self.ready_line,
            "failed": startup.fatal_at is not None,
            "phases": self.phases,
            "ranks": {
                name: {"phase": startup.ranks[name].phase, "load_progress": startup.ranks[name].load_progress}
                for name in sorted(startup.ranks, key=_natural)
            },
            "markers": {event: count for event, count in sorted(events.items()) if event in PROGRESS_EVENTS},
            "errors": self.errors,
            "heartbeats": scanner.heartbeats - before.heartbeats,
            "unmatched": max(0, scanner.lines - before.lines - (scanner.matched - before.matched)),
            "longest_silence": self.any_line.document(),
            "longest_progress_silence": self.progress.document(),
        }


@dataclass(frozen=True, slots=True)
class _Times:
    """The printed times in a block, found only where asked for: (offset of the line, time)."""

    block: bytes
    time_of: Callable[[bytes], float | None]

    def next_from(self, offset: int, limit: int) -> _At | None:
        """The first line at or behind an offset (a line's beginning) that has a time."""
        while offset < limit:
            end = self.block.find(b"\n", offset)
            end = len(self.block) if end < 0 else end
            if (time := self.time_of(self.block[offset : min(end, offset + 400)])) is not None:
                return offset, time
            offset = end + 1
        return None

    def last(self) -> _At | None:
        end = len(self.block)
        while end > 0:
            start = self.block.rfind(b"\n", 0, end - 1) + 1
            if (time := self.time_of(self.block[start : min(end, start + 400)])) is not None:
                return start, time
            end = start
        return None

    def between(self, low: int, high: int) -> _At | None:
        """A line with a time strictly between two offsets, near the middle; None when there is none."""
        middle = self.block.find(b"\n", (low + high) // 2, high) + 1
        if middle > 0 and (found := self.next_from(middle, high)):
            return found
        begin = self.block.find(b"\n", low, high) + 1
        return self.next_from(begin, high) if begin > 0 else None


def _offset_of_line(block: bytes, number: int) -> int:
    offset = 0
    for _ in range(number):
        offset = block.find(b"\n", offset) + 1
    return offset


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorting key of a rank's name: PP2 before PP10."""
    return [(part.rstrip(digits), whole_number(part[len(part.rstrip(digits)) :]) or 0) for part in name.split("-")]


# --- text ----------------------------------------------------------------------------------------------


def format_text(document: Json) -> str:
    """The document as a report for people: fit for a bug report, without a word of the log itself."""
    return "\n".join(chain.from_iterable(_file_lines(one) for one in document["files"])) + "\n"


def _file_lines(one: Json) -> Iterator[str]:
    yield f"{one['file']}: {one['framework']} {one['version'] or '(version not printed)'}"
    yield f"  {one['lines']} lines read; {_outcome(one)}"
    if one["starts"] > 1:
        yield f"  {one['starts']} starts in this file; what follows is the last one"
    yield from _phase_lines(one)
    yield from _rank_lines(one)
    for key, what in (("longest_silence", "any line"), ("longest_progress_silence", "progress")):
        if (silence := one[key])["seconds"]:
            yield f"  longest silence ({what}): {silence['seconds']:g} s after line {silence['after_line']}"
    if one["heartbeats"]:
        yield f"  {one['heartbeats']} heartbeat lines, which are neither progress nor trouble"
    if one["lines"] and one["framework"] == FALLBACK and not one["markers"]:
        yield "  no line of a known server was found: this log is of an unknown kind"
    yield f"  {one['unmatched']} lines no pattern knows"
    for error in one["errors"]:
        yield f"  line {error['line']}: {error['kind']}" + (f" on {error['rank']}" if error["rank"] else "")


def _outcome(one: Json) -> str:
    if one["failed"]:
        return "failed" + (f" after it was ready at line {one['ready_line']}" if one["ready"] else "")
    return f"ready at line {one['ready_line']}" if one["ready"] else "not ready"


def _phase_lines(one: Json) -> Iterator[str]:
    for phase in one["phases"]:
        if phase["rank"] is None:
            end = f"line {phase['end_line']}" if phase["end_line"] else "the end"
            times = f"  {phase['begin'] or '?'} to {phase['end'] or '?'}"
            yield f"  {phase['phase']:<17} line {phase['begin_line']} to {end}{times}"


def _rank_lines(one: Json) -> Iterator[str]:
    for name, rank in one["ranks"].items():
        loaded = "?" if rank["load_progress"] is None else f"{100 * rank['load_progress']:.0f} %"
        yield f"  {name:<14} {rank['phase']:<17} weights {loaded}"
