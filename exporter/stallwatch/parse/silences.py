"""The longest silences of a log: gaps between neighbouring lines that have a time.

A line's time is the one it prints; where it prints none, the one a container's runtime noted, moved to the clock of
the printed ones.  The times in a block of plain text are read only where a long gap can be.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..frameworks import NO_EVENT, Framework
from ..frameworks.json_lines import BEGIN
from ..sources.logs.lines import Hit, LogScanner
from ..sources.logs.text import text_of
from ..sources.logs.times import on_one_scale, parse_time, seconds_between
from .input import Block, TimeOf

MOST_SILENCES = 5
PREFIX_BYTES = 400
KEPT_BYTES = 4096
"""So much of the line before a silence is kept until it is known what it means."""
CLOCK_STEP_SECONDS = 900.0
"""Clocks of two time zones differ by quarters of an hour; less is the time a line took to be written."""
CLOCK_LINES = 20_000
"""Lines of a container's log in which a printed time is looked for."""
_LINE_END = re.compile(rb"\n")
_TIME_GROUP = re.compile(r"time(?:_\d)?")
EPOCH_2000 = 946_684_800.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line with a time.  `event`: what it is, "" = not known yet; `text`: its beginning, which never leaves."""

    number: int
    time: float
    event: str = ""
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class Gap:
    """`undated`: lines of the same kind in between that have no time."""

    seconds: float
    after: Line
    until: Line
    undated: int = 0


@dataclass(slots=True)
class Silences:
    """The longest gaps, longest first; of equal ones the first."""

    gaps: list[Gap] = field(default_factory=list)
    first: Line | None = None
    last: Line | None = None
    undated: int = 0  # since the last

    @property
    def floor(self) -> float:
        """A gap must be longer than this to be among the longest."""
        return self.gaps[-1].seconds if len(self.gaps) == MOST_SILENCES else 0.0

    def see(self, line: Line) -> None:
        """The next line with a time."""
        if self.last is None:
            self.first = line
        else:
            self.add(self.last, line)
        self.last, self.undated = line, 0

    def add(self, after: Line, until: Line) -> None:
        seconds = round(seconds_between(after.time, until.time), 6)
        if seconds > self.floor:
            self.gaps.append(Gap(seconds, after, until, self.undated))
            self.gaps.sort(key=lambda gap: (-gap.seconds, gap.after.number))
            del self.gaps[MOST_SILENCES:]

    def document(self) -> dict[str, float | int | None]:
        """The longest; 0 s where there are two lines with a time and no gap, null where there are not."""
        if self.gaps:
            return {"seconds": self.gaps[0].seconds, "after_line": self.gaps[0].after.number}
        if self.first is not None and self.last is not None and self.first.number != self.last.number:
            return {"seconds": 0.0, "after_line": self.first.number}
        return {"seconds": None, "after_line": None}


# --- clocks --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LogClock:
    """The times of lines on one clock: that of the printed ones, or the runtime's where no line prints a time."""

    framework: Framework
    shift: float = -EPOCH_2000  # from Unix time to this clock
    has_printed: bool = False
    looked: int = 0
    groups: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = tuple(name for name in self.framework.prefix.groupindex if _TIME_GROUP.fullmatch(name))

    def of(self, text: bytes, unix_of: Callable[[], float | None] | None) -> float | None:
        """Seconds of an arbitrary clock, of a line; `unix_of`: what a runtime noted.  None = the line has no time."""
        printed = self.printed(text) if self.has_printed else None
        if printed is not None or unix_of is None:
            return printed
        return None if (unix := unix_of()) is None else unix + self.shift

    def printed(self, text: bytes) -> float | None:
        """The printed time of a line.  Hundreds are asked for in a block: only that group of the prefix is read."""
        line = text_of(text[:PREFIX_BYTES])
        match = self.framework.prefix.match(line)
        stamp = next((stamp for name in self.groups if (stamp := match[name])), None) if match else None
        if stamp is None and line.startswith(BEGIN, match.end() if match else 0):
            stamp = self.framework.split(line)[0].time
        return parse_time(stamp) if stamp else None

    def learn(self, block: Block, first_line: int) -> float:
        """Find out which clock there is.  By how much times told before must be moved, mostly 0."""
        unix_of = block.time_of
        if unix_of is None:
            self.has_printed = True
        if unix_of is None or self.has_printed or self.looked >= CLOCK_LINES:
            return 0.0
        for number, text in enumerate(block.text.split(b"\n"), first_line):
            self.looked += 1
            if (printed := self.printed(text)) is not None and (unix := unix_of(number)) is not None:
                before, self.has_printed = self.shift, True
                self.shift = round((printed - unix) / CLOCK_STEP_SECONDS) * CLOCK_STEP_SECONDS
                return self.shift - before
        return 0.0


# --- a block -------------------------------------------------------------------------------------------------


def listen(silences: Silences, block: Block, first_line: int, hits: Sequence[Hit], clock: LogClock) -> None:
    """Find the longest gaps in a block of whole lines, and the one between it and the block before."""
    times = _Times(block.text, first_line, block.time_of, clock)
    first, last = times.next_from(0, len(block.text)), times.last()
    if first is None or last is None:
        return
    silences.see(times.line(first))
    _search(silences, times, first, last)
    silences.last = times.line(last)
    _name(silences, hits)


def _search(silences: Silences, times: _Times, low: _At, high: _At) -> None:
    """Halve wherever there can be a gap longer than those found; where the clock was set back there can be one."""
    todo = [(low, high)]
    while todo:
        low, high = todo.pop()
        earlier, later = on_one_scale(low[1], high[1])
        if high[0] <= low[0] or (earlier <= later and seconds_between(earlier, later) <= silences.floor):
            continue
        if (middle := times.between(low[0], high[0])) is not None:
            todo.extend([(middle, high), (low, middle)])
            continue
        silences.add(times.line(low), times.line(high))


def _name(silences: Silences, hits: Sequence[Hit]) -> None:
    """Say what the lines beside a gap are, as far as they are among the block's hits."""

    def named(line: Line) -> Line:
        index = bisect_left(hits, line.number, key=lambda hit: hit.line)
        if line.event or index == len(hits) or hits[index].line != line.number:
            return line
        return Line(line.number, line.time, hits[index].event, line.text)

    silences.gaps = [Gap(gap.seconds, named(gap.after), named(gap.until), gap.undated) for gap in silences.gaps]
    silences.last = silences.last and named(silences.last)


_At = tuple[int, float]
"""A line with a time: offset of its beginning, time."""


@dataclass(frozen=True, slots=True)
class _Times:
    """The times in a block, found only where asked for."""

    block: bytes
    first_line: int
    unix_of: TimeOf | None
    clock: LogClock
    ends: list[int] = field(default_factory=list)

    def line(self, at: _At) -> Line:
        offset, time = at
        return Line(self.number(offset), time, "", self.block[offset : self._end(offset, KEPT_BYTES)])

    def number(self, offset: int) -> int:
        """The line's number; where times are asked by number, the ends of all lines are found at once."""
        if self.unix_of is None:
            return self.first_line + self.block.count(b"\n", 0, offset)
        if not self.ends and self.block:
            self.ends.extend(match.start() for match in _LINE_END.finditer(self.block))
        return self.first_line + bisect_left(self.ends, offset)

    def next_from(self, offset: int, limit: int) -> _At | None:
        """The first line at or behind an offset (a line's beginning) that has a time."""
        while offset < limit:
            if (time := self._time(offset)) is not None:
                return offset, time
            offset = self._end(offset) + 1
        return None

    def last(self) -> _At | None:
        end = len(self.block)
        while end > 0:
            start = self.block.rfind(b"\n", 0, end - 1) + 1
            if (time := self._time(start)) is not None:
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

    def _time(self, offset: int) -> float | None:
        text, unix_of = self.block[offset : self._end(offset, PREFIX_BYTES)], self.unix_of
        return self.clock.of(text, None if unix_of is None else lambda: unix_of(self.number(offset)))

    def _end(self, offset: int, most: int | None = None) -> int:
        limit = len(self.block) if most is None else min(len(self.block), offset + most)
        end = self.block.find(b"\n", offset, limit)
        return limit if end < 0 else end


def meaning(framework: Framework, line: Line) -> str | None:
    """The event of a line; "none" for one that is known to mean nothing, None for one no pattern knows."""
    if line.event:
        return line.event
    scanner = LogScanner(framework, track_shapes=False, numbered=True)
    scanner.feed(line.text + b"\n")
    return next(iter(scanner.events), NO_EVENT if scanner.matched else None)
