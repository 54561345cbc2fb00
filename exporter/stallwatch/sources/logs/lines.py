"""Bytes of one log become what they say: recognised lines, counts, names of ranks, shapes of unknown lines.

A block of whole lines is searched once for the literals of all patterns (see search); regular expressions
run on hit lines only.  Nothing here raises on any input: NUL bytes, invalid UTF-8, endless lines are read like
everything else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...config import Limits
from ...frameworks import NO_EVENT, Framework, Pattern, Prefix
from .ranks import Ranks
from .repeats import Meaning, Repeat, Repeats
from .search import Steady, lexicon_of, line_count, steady_search
from .shapes import Shapes
from .text import groups_of, is_drawn, numbers_of, pieces_of, text_of
from .times import parse_time

MAX_NOVEL = 16
"""Novel lines reported per block; ten in a row carry the stall clock at most, so more say nothing."""
LOOK_BACK = 48
"""Lines looked at backwards for the last printed time."""
REPEAT_LOOK_BACK = 512
"""The same for a line that repeats, of which each block tells the last one only."""
MAX_PASSED = 65_536
"""Markers and ranks that passed them, remembered in one start: of more it is not known that they come again."""
MAX_BARS = 512
"""Bars remembered in one start; a download draws one for each of its files."""
FIRST_STRETCH = 4096
"""Bytes searched at once behind the end of a start, then twice as many each time: another end may be near."""
MANY = 4
"""A block of which more than one in so many lines repeats is followed by one more of the kind, mostly."""

_VERSION = re.compile(r"\d{1,9}|v?\d{1,4}\.\d{1,4}[\w.+-]{0,40}")
"""It becomes a label: what only stands in its place is none."""
_QUIET_EVENTS = frozenset(("access", "heartbeat", NO_EVENT))


@dataclass(frozen=True, slots=True)
class Hit:
    """One recognised line.

    `line` is its 1-based number in the file, `time` the printed time in seconds of an arbitrary clock (only
    differences mean anything; of the last line before that has one when it has none), `stamp` the printed
    time itself or "" when this line has none.
    """

    event: str
    rank: str | None
    fields: dict[str, float | str]
    line: int
    time: float | None
    stamp: str = ""


@dataclass(slots=True)
class Batch:
    """What one block said, in the order of its lines."""

    hits: list[Hit] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # pid -> rank, new ones


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted before the present start began, so that its own counts can be told."""

    lines: int = 0
    matched: int = 0
    heartbeats: int = 0
    events: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Start:
    """What is remembered of the present start only."""

    seen: set[str] = field(default_factory=set)
    passed: set[tuple[str, str | None]] = field(default_factory=set)  # (event, rank)
    bars: dict[tuple[str, str | None, str], dict[str, float | str]] = field(default_factory=dict)
    every_rank: bool = False
    time: float | None = None  # of the last hit


@dataclass(slots=True)
class _Line:
    """The physical line in progress: what was already counted of it."""

    start: int = 0
    end: int = 0
    events: set[str] = field(default_factory=set)
    matched: bool = False


@dataclass(slots=True)
class _Stretch:
    """Whole lines of a block that were looked at: from where to where, and where those begin that a pattern knows."""

    begin: int
    end: int
    hits: list[int] = field(default_factory=list)


class LogScanner:
    """Reads one log from its beginning.  Public counters only grow; `ready` says which search is used.

    `numbered`: lines get numbers and a line drawn with carriage returns stays whole (for `parse`); else a bar
    is seen as soon as it is drawn.  `writer`: see ranks.Ranks.
    """

    def __init__(
        self,
        framework: Framework,
        limits: Limits | None = None,
        *,
        track_shapes: bool = True,
        numbered: bool = False,
        writer: int = 0,
    ) -> None:
        self.framework = framework
        self.lines = 0
        self.matched = 0
        self.heartbeats = 0
        self.events: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.version = ""
        self.ready = False
        self._version_told = True
        self.last_time: float | None = None
        self.before_start = Totals()
        self._lexicon = lexicon_of(framework)
        self._steady: Steady | None = None  # once it is ready
        self.line_bytes = (limits or Limits()).line_bytes
        self._track_shapes = track_shapes
        self._numbered = numbered
        self._tail = b""
        self._peeked = b""
        self._skipping = False
        self._open = _Line()
        self._repeats = Repeats(framework, self._lexicon)
        self._ranks = Ranks(self._repeats.forget, writer)
        self._shapes = Shapes(framework)
        self._start = _Start()
        self._turned = ""  # the event that begins or ends a start, until the block is settled
        self._timed_to = 0  # offset of the last hit in the block
        self._number, self._numbered_to = 1, 0  # number of the line at an offset
        self._repeats_much = False  # in the block before
        self._taken: Meaning | None = None  # what the line read last says

    @property
    def unmatched(self) -> int:
        """Lines no pattern knows, blank ones included."""
        return max(0, self.lines - self.matched)

    @property
    def partial(self) -> bool:
        """Whether the last line has no end yet."""
        return bool(self._tail) or self._skipping or self._open.end > 0

    def feed(self, chunk: bytes) -> Batch:
        """Read the next bytes of the log."""
        batch = Batch()
        chunk = self._skip_rest(chunk)
        cut = chunk.rfind(b"\n") + 1
        if not self._numbered:
            cut = max(cut, chunk.rfind(b"\r", cut) + 1)
        if cut:
            whole = cut == len(chunk) and not self._tail
            self._scan(chunk if whole else b"".join((self._tail, memoryview(chunk)[:cut])), batch)
        self._tail = chunk[cut:] if cut else self._tail + chunk
        if len(self._tail) > self.line_bytes:
            self._scan(self._tail[: self.line_bytes], batch)
            self._tail, self._skipping = b"", True
        self._peek(batch)
        return batch

    def finish(self) -> Batch:
        """The file ends here (or another one follows): what is left is a line."""
        batch = Batch()
        if self.partial:
            self._scan(self._tail + b"\n", batch)
        self._tail, self._skipping = b"", False
        return batch

    def be_ready(self) -> None:
        """From now on lines are read as those of a server that serves: shapes are dropped."""
        self.ready = True
        self._repeats.forget()
        self._shapes.clear()

    # --- blocks ----------------------------------------------------------------------------------------

    def _skip_rest(self, block: bytes) -> bytes:
        """Drop what is left of a line that was longer than allowed."""
        if not self._skipping:
            return block
        end = block.find(b"\n")
        if end < 0:
            return b""
        self._skipping = False
        return block[end:]

    def _scan(self, block: bytes, batch: Batch) -> None:
        """Search a block; where a start begins or the server gets ready, the rest is searched anew."""
        begin, size = 0, len(block)
        while begin < len(block):
            end = block.find(b"\n", begin + size) + 1 if begin + size < len(block) else 0
            part = block[begin : end or len(block)]
            used = self._scan_part(part, batch)
            size = FIRST_STRETCH if used < len(part) else 2 * size
            begin += used

    def _scan_part(self, block: bytes, batch: Batch) -> int:
        was_ready, found = self.ready, list[tuple[int, Hit]]()
        used, stretches = self._search(block, was_ready, found, batch)
        part = block if used == len(block) else block[:used]
        lines = line_count(part)
        self._settle_repeats(part, lines, found)
        if was_ready:
            self._count_bulk(part, found)
        elif self._track_shapes and not self._shapes.are_full:
            self._find_novel(part, stretches, found)
        self.lines += lines
        batch.hits.extend(hit for _, hit in sorted(found, key=lambda pair: pair[0]))
        self._settle_mode()
        later = self._time_before(part, len(part), 0)
        self.last_time = later if later is not None else self.last_time
        return used

    def _search(
        self, block: bytes, steady: bool, found: list[tuple[int, Hit]], batch: Batch
    ) -> tuple[int, list[_Stretch]]:
        """Classify every line with a literal in it.  Bytes used, and the stretches of lines that were looked at."""
        self._number, self._numbered_to = self.lines + 1, 0
        self._open.start, self._open.end = 0, 0
        stretches, line = list[_Stretch](), self._open
        for begin, end in self._stretches(block):
            stretches.append(stretch := _Stretch(begin, end))
            line = self._search_stretch(block, stretch, steady, line, found, batch)
            if self._turned:
                self._close_line(block[: stretch.end], line)
                return stretch.end, stretches
        self._close_line(block, line)
        return len(block), stretches

    def _stretches(self, block: bytes) -> Iterable[tuple[int, int]]:
        """A block, but for what is known to repeat where there is much of that."""
        if not self._repeats_much:
            return ((0, len(block)),)
        return self._repeats.pass_over(block, lambda: self._start.time)

    def _search_stretch(
        self, block: bytes, stretch: _Stretch, steady: bool, line: _Line, found: list[tuple[int, Hit]], batch: Batch
    ) -> _Line:
        """Classify the lines of a stretch, up to one that begins or ends a start.  The line that was read last."""
        lexicon = self._lexicon
        candidates = lexicon.rare_candidates if steady else lexicon.full_candidates
        text = block[stretch.begin : stretch.end]
        positions = self._find_rare(text) if steady else lexicon.find_all(text)
        for start, end, indexes in self._hit_lines(block, stretch.begin, positions, candidates):
            raw = block[start:end]
            if steady:
                for literal, index in lexicon.bulk_patterns:
                    if literal in raw:
                        indexes.add(index)
            is_whole = start > 0 and end < len(block) and not self._numbered
            if is_whole and self._repeats.counts(raw, start, self._start.time):
                stretch.hits.append(start)
                continue
            if start > 0:
                line = _Line(start)
            line.start, line.end = start, end
            self._taken = None
            if self._read_line(block, line, indexes, found, batch):
                stretch.hits.append(start)
            if self._turned:
                stretch.end = min(end + 1, len(block))
                break
            if is_whole and self._taken is not None:
                self._repeats.learn(raw, indexes, self._taken)
        return line

    def _settle_repeats(self, part: bytes, lines: int, found: list[tuple[int, Hit]]) -> None:
        """Take account of the lines of a block that only repeat; the last of each is told."""
        counted, timed_to, time = 0, self._timed_to, self._start.time
        for repeat in self._repeats.take():
            count, repeat.count = repeat.count, 0
            counted += count
            if self.ready and repeat.pattern.bulk:
                continue  # counted as a whole
            self.matched += count
            self._add(repeat.event, repeat.pattern.kind, count)
            if repeat.event in _QUIET_EVENTS:
                continue
            found.append((repeat.last, self._last_repeat(repeat, part)))
            if repeat.last >= timed_to:
                timed_to, time = repeat.last, self._start.time
        self._start.time = time
        self._repeats_much = counted * MANY > lines if lines else self._repeats_much

    def _last_repeat(self, repeat: Repeat, part: bytes) -> Hit:
        start, end = repeat.last, part.find(b"\n", repeat.last)
        prefix, _ = self.framework.split(text_of(part[start:end]))
        time = None if prefix.time else self._time_before(part, start, 0, REPEAT_LOOK_BACK)
        self._start.time, self._timed_to = repeat.time if time is None else time, start
        return self._hit(repeat.event, repeat.rank, dict(repeat.fields), prefix, part, _Line(start, end))

    # --- blocks, line by line --------------------------------------------------------------------------

    def _find_rare(self, block: bytes) -> Iterable[tuple[int, int]]:
        """Literals of lines that are not frequent; a frequent line that comes for the first time is noted."""
        if self._steady is None:
            self._steady = steady_search(self.framework, frozenset())
        steady = self._steady
        positions = steady.find(block)
        if come := {steady.absent[index - steady.rare] for index, _ in positions if index >= steady.rare}:
            self._steady = steady_search(self.framework, frozenset(come.union(steady.frequent)))
            positions = [(index, offset) for index, offset in positions if index < steady.rare]
        return positions

    def _hit_lines(
        self, block: bytes, begin: int, positions: Iterable[tuple[int, int]], candidates: list[tuple[int, ...]]
    ) -> Iterator[tuple[int, int, set[int]]]:
        """Physical lines that hold a literal: start, end, and the patterns to try.  Positions count from `begin`."""
        end, start, indexes = -1, 0, set[int]()
        for literal, position in positions:
            offset = begin + position
            if offset >= end:
                if indexes:
                    yield start, end, indexes
                start = block.rfind(b"\n", 0, offset) + 1
                end = block.find(b"\n", offset)
                end = len(block) if end < 0 else end
                indexes = set()
            indexes.update(candidates[literal])
        if indexes:
            yield start, end, indexes

    def _close_line(self, block: bytes, line: _Line) -> None:
        """Remember what was counted of a line that goes on in the next block."""
        if block.endswith(b"\n"):
            self._open = _Line()
        else:
            last = block.rfind(b"\n") + 1
            self._open = line if line.start == last else _Line()
            self._open.end = len(block)

    # --- lines -----------------------------------------------------------------------------------------

    def _read_line(
        self, block: bytes, line: _Line, indexes: set[int], found: list[tuple[int, Hit]], batch: Batch
    ) -> bool:
        pieces = pieces_of(block[line.start : line.end])
        several, order = len(pieces) > 1, sorted(indexes)
        patterns, split, fits = self._lexicon.patterns, self.framework.split, self.framework.fits
        for piece in pieces:
            prefix, message = split(text_of(piece))
            for index in order:
                pattern = patterns[index]
                if several and pattern.literal not in piece:
                    continue
                if match := fits(pattern, prefix, message):
                    hit = self._take(pattern, match, prefix, block, line, batch)
                    if hit is not None:
                        found.append((line.start, hit))
                    break
        if several:
            self._taken = None  # what the whole line said is not what one of its pieces did
        return line.matched

    def _take(
        self,
        pattern: Pattern,
        match: re.Match[str],
        prefix: Prefix,
        block: bytes,
        line: _Line,
        batch: Batch,
    ) -> Hit | None:
        """Count a line that a pattern named; the Hit when it is worth telling."""
        first = not line.matched
        line.matched = True
        if self.ready and pattern.bulk:
            self._taken = pattern, pattern.event, None, {}
            return None  # counted as a whole
        self.matched += first
        groups = groups_of(match)
        if groups or pattern.event == "args":
            self._learn_server(pattern, groups)
        rank = self._ranks.of(pattern, groups, prefix, batch.names)
        is_nameless = rank is None and prefix.nameless is not None
        event = self._event(pattern, f"pid {prefix.pid}" if is_nameless else rank)
        self._count(event, pattern.kind, line)
        self._turn(event)
        fields = self._fields(pattern, groups, prefix)
        if is_nameless:
            fields["nameless"] = 1.0
        self._taken = pattern, event, rank, fields
        if event in _QUIET_EVENTS or self._is_redrawn(event, rank, fields, match):
            return None
        return self._hit(event, rank, fields, prefix, block, line)

    def _hit(
        self,
        event: str,
        rank: str | None,
        fields: dict[str, float | str],
        prefix: Prefix,
        block: bytes,
        line: _Line,
    ) -> Hit:
        stamp = prefix.time or ""
        time = parse_time(stamp) if stamp else self._time_before(block, line.start, self._timed_to)
        time = self._start.time if time is None else time
        self._start.time, self._timed_to = time, line.end + 1
        if self.version and not self._version_told:
            fields["version"], self._version_told = self.version, True
        return Hit(event, rank, fields, self._line_number(block, line.start), time, stamp)

    def _fields(self, pattern: Pattern, groups: dict[str, str], prefix: Prefix) -> dict[str, float | str]:
        fields = numbers_of(groups)
        if pattern.kind:
            fields["kind"] = pattern.kind
        if pattern.clock:
            fields["clock"], fields["timeout"] = pattern.clock, pattern.timeout_seconds
        first = pattern.speaker == "first" or (pattern.speaker == "first_classic" and not self._start.every_rank)
        if first or prefix.relay is not None:
            fields["shared"] = 1.0
        return fields

    def _line_number(self, block: bytes, offset: int) -> int:
        if self._numbered:
            self._number += block.count(b"\n", self._numbered_to, offset)
            self._numbered_to = offset
        return self._number

    def _event(self, pattern: Pattern, rank: str | None) -> str:
        """The event of a pattern; where the same words come again they mean another: the draft's load."""
        event = pattern.event
        if pattern.every_rank and not self._start.every_rank:
            self._start.every_rank = True
            self._repeats.forget()
        if pattern.proves_ready and not self.ready and "listening" in self._start.seen:
            return "ready"
        if pattern.again and (event, rank) in self._start.passed:
            return pattern.again
        if len(self._start.passed) < MAX_PASSED:
            self._start.passed.add((event, rank))
        return event

    def _count(self, event: str, kind: str, line: _Line) -> None:
        if event == NO_EVENT or event in line.events:
            return
        line.events.add(event)
        self._add(event, kind, 1)

    def _add(self, event: str, kind: str, number: int) -> None:
        if event != NO_EVENT:
            self.events[event] += number
        if event == "heartbeat":
            self.heartbeats += number
        if kind:
            self.errors[kind] += number

    def _is_redrawn(self, event: str, rank: str | None, fields: dict[str, float | str], match: re.Match[str]) -> bool:
        """Whether a bar only shows again what it showed before; of several at once each by its own name."""
        if not event.endswith("_progress"):
            return False
        bars, key = self._start.bars, (event, rank, match.string[: match.end()].partition(":")[0][:160])
        same = bars.pop(key, None) == fields
        bars[key] = fields
        if len(bars) > MAX_BARS:
            del bars[next(iter(bars))]
        return same

    # --- starts ----------------------------------------------------------------------------------------

    def _turn(self, event: str) -> None:
        """Note where a start begins or ends its way: there the search changes."""
        if event == NO_EVENT:
            return
        begins = event == "start" or event == "args"
        if begins and (self._start.seen - {"start"} or (event == "start" and self._start.seen)):
            self._turned = event
        elif event == "ready" and not self.ready:
            self._turned = "ready"
        self._start.seen.add(event)

    def _settle_mode(self) -> None:
        turned, self._turned, self._timed_to = self._turned, "", 0
        if turned == "ready":
            self.be_ready()
        elif turned:
            events = self.events - Counter([turned])
            self.before_start = Totals(self.lines - 1, self.matched - 1, self.heartbeats, events)
            self.ready, self._start = False, _Start(seen={turned})
            self._ranks.begin()
            self._shapes.clear()
            self._repeats.forget()

    def _learn_server(self, pattern: Pattern, groups: dict[str, str]) -> None:
        """What a line says of the server itself: its version, the sizes of its groups."""
        if pattern.event == "args":
            self._ranks.forget()
            self._repeats.forget()
        if (version := groups.get("version", self.version)) != self.version and _VERSION.fullmatch(version):
            self.version, self._version_told = version, False
        self._ranks.learn_sizes(groups)

    # --- times -----------------------------------------------------------------------------------------

    def _time_before(self, block: bytes, offset: int, limit: int, lines: int = LOOK_BACK) -> float | None:
        """The last time printed between two offsets; None when the lines before show none."""
        for _ in range(lines):
            start = block.rfind(b"\n", limit, max(limit, offset - 1)) + 1
            start = max(start, limit)
            if start >= offset:
                return None
            prefix, _ = self.framework.split(text_of(block[start : min(offset, start + 400)]))
            if prefix.time:
                return parse_time(prefix.time)
            offset = start
        return None

    # --- frequent lines, unknown lines, lines in progress ----------------------------------------------

    def _count_bulk(self, part: bytes, found: list[tuple[int, Hit]]) -> None:
        """Count the frequent lines of a server that serves; of stats only the last is read."""
        if (steady := self._steady) is None:
            return
        last = -1
        for literal, number in zip(steady.frequent, steady.count(part), strict=True):
            if not number:
                continue
            event = self._lexicon.bulk[literal]
            self.matched += number
            self.events[event] += number
            if event == "stats":
                last = max(last, part.rfind(literal))
        if last >= 0 and (hit := self._last_stats(part, last)):
            found.append((last, hit))

    def _last_stats(self, part: bytes, offset: int) -> Hit | None:
        start = part.rfind(b"\n", 0, offset) + 1
        end = part.find(b"\n", offset)
        prefix, message = self.framework.split(text_of(part[start : end if end >= 0 else len(part)]))
        for _, index in self._lexicon.bulk_patterns:
            pattern = self._lexicon.patterns[index]
            if pattern.event == "stats" and (match := self.framework.fits(pattern, prefix, message)):
                groups = groups_of(match)
                rank = self._ranks.of(pattern, groups, prefix, {})
                self._number, self._numbered_to = self.lines + 1, 0
                return self._hit("stats", rank, numbers_of(groups), prefix, part, _Line(start))
        return None

    def _find_novel(self, part: bytes, stretches: list[_Stretch], found: list[tuple[int, Hit]]) -> None:
        """Report lines of a shape this start has not shown yet."""
        offsets = list[int]()
        for stretch in stretches:
            text, begin = part[stretch.begin : stretch.end], stretch.begin
            new = self._shapes.new_in(text, [offset - begin for offset in stretch.hits] if begin else stretch.hits)
            offsets.extend(begin + offset for offset in new)
        found.extend((offset, self._novel_hit(part, offset)) for offset in offsets[:MAX_NOVEL])

    def _novel_hit(self, part: bytes, offset: int) -> Hit:
        stamp = self.framework.split(text_of(part[offset : offset + 400].partition(b"\n")[0]))[0].time or ""
        time = parse_time(stamp) if stamp else self._time_before(part, offset, 0)
        number = self.lines + 1 + (part.count(b"\n", 0, offset) if self._numbered else 0)
        return Hit("novel", None, {}, number, self.last_time if time is None else time, stamp)

    def _peek(self, batch: Batch) -> None:
        """A bar that is drawn but not ended: its counter is read now, its line is counted later."""
        if self._numbered or not self._tail or self._tail == self._peeked or not is_drawn(self._tail):
            return
        self._peeked = self._tail
        piece = pieces_of(self._tail)[0]
        prefix, message = self.framework.split(text_of(piece))
        for pattern in self._lexicon.patterns:
            if not pattern.event.endswith("_progress") or pattern.literal not in piece:
                continue
            if match := self.framework.fits(pattern, prefix, message):
                groups = groups_of(match)
                rank, fields = (
                    self._ranks.of(pattern, groups, prefix, batch.names),
                    self._fields(pattern, groups, prefix),
                )
                if not self._is_redrawn(pattern.event, rank, fields, match):
                    batch.hits.append(Hit(pattern.event, rank, fields, self.lines + 1, self.last_time))
                return
