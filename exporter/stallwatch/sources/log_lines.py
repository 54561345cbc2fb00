"""Bytes of one log become what they say: recognised lines, counts, names of ranks, shapes of unknown lines.

A block of whole lines is searched once for the literals of all patterns (see log_search); regular expressions
run on hit lines only.  Nothing here raises on any input: NUL bytes, invalid UTF-8, endless lines are read like
everything else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ..config import Limits
from ..frameworks import NO_EVENT, RANKED, Framework, Pattern, Prefix
from .log_ranks import Ranks
from .log_search import Steady, lexicon_of, steady_search
from .log_shapes import Shapes
from .log_text import groups_of, is_drawn, numbers_of, pieces_of, text_of
from .log_times import parse_time

MAX_NOVEL = 16
"""Novel lines reported per block; ten in a row carry the stall clock at most, so more say nothing."""
LOOK_BACK = 48
"""Lines looked at backwards for the last printed time."""
REPEAT_LOOK_BACK = 512
"""The same for a line that repeats, of which each block tells the last one only."""
MAX_BARS = 512
"""Bars remembered in one start; a download draws one for each of its files."""
MAX_REPEATS = 1024
"""Lines that repeat but for their digits and are known as such; with more of them all are forgotten."""
REPEAT_CHARACTERS = 2000
"""A longer line is never known as one that repeats."""

_VERSION = re.compile(r"\d{1,9}|v?\d{1,4}\.\d{1,4}[\w.+-]{0,40}")
"""It becomes a label: what only stands in its place is none."""
_MASKED = bytes.maketrans(b"0123456789", b"0" * 10)
_COUNTED = frozenset(("access", "heartbeat", NO_EVENT, "error", "watchdog", "waiting", "lock_wait"))
"""Events of which the number counts and the last one, not what each of them said."""
_WRITER = frozenset(("parts", "rank", "pid", "engine"))
"""Groups of a prefix that tell who wrote the line."""
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


_NOWHERE = (0, 0)


@dataclass(slots=True)
class _Repeat:
    """What a writer said in a line that comes again and again with other digits.

    `last`: where in the block it came last.
    """

    pattern: Pattern
    event: str
    last: tuple[int, int] = _NOWHERE
    time: float | None = None  # of the last hit before it


@dataclass(slots=True)
class _Repeats:
    """A line with its digits masked: patterns to try on it, where its writer stands, and what each writer said."""

    indexes: frozenset[int]
    spans: tuple[tuple[int, int], ...]
    known: dict[tuple[bytes, ...], _Repeat] = field(default_factory=dict)


class LogScanner:
    """Reads one log from its beginning.  Public counters only grow; `ready` says which search is used.

    `numbered`: lines get numbers and a line drawn with carriage returns stays whole (for `parse`); else a bar
    is seen as soon as it is drawn.
    """

    def __init__(
        self,
        framework: Framework,
        limits: Limits | None = None,
        *,
        track_shapes: bool = True,
        numbered: bool = False,
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
        self._line_bytes = (limits or Limits()).line_bytes
        self._track_shapes = track_shapes
        self._numbered = numbered
        self._tail = b""
        self._peeked = b""
        self._skipping = False
        self._open = _Line()
        self._ranks = Ranks()
        self._shapes = Shapes(framework)
        self._start = _Start()
        self._turned = ""  # the event that begins or ends a start, until the block is settled
        self._timed_to = 0  # offset of the last hit in the block
        self._number, self._numbered_to = 1, 0  # number of the line at an offset
        self._repeats: dict[bytes, _Repeats] = {}
        self._repeated: list[_Repeat] = []  # those that came in this block
        self._taken: tuple[Pattern, str] | None = None  # the pattern that fitted last, and its event

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
        if len(self._tail) > self._line_bytes:
            self._scan(self._tail[: self._line_bytes], batch)
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
        self._repeats.clear()
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
        while block:
            used = self._scan_part(block, batch)
            block = block[used:]

    def _scan_part(self, block: bytes, batch: Batch) -> int:
        was_ready, found = self.ready, list[tuple[int, Hit]]()
        used, hit_offsets = self._search(block, was_ready, found, batch)
        part = block if used == len(block) else block[:used]
        if was_ready:
            self._count_bulk(part, found)
        elif self._track_shapes and not self._shapes.are_full:
            self._find_novel(part, hit_offsets, found)
        self.lines += part.count(b"\n")
        batch.hits.extend(hit for _, hit in sorted(found, key=lambda pair: pair[0]))
        self._settle_mode()
        later = self._time_before(part, len(part), 0)
        self.last_time = later if later is not None else self.last_time
        return used

    def _search(self, block: bytes, steady: bool, found: list[tuple[int, Hit]], batch: Batch) -> tuple[int, list[int]]:
        """Classify every line with a literal in it.  Bytes used, and offsets of the lines that matched."""
        lexicon = self._lexicon
        candidates = lexicon.rare_candidates if steady else lexicon.full_candidates
        positions = self._find_rare(block) if steady else lexicon.find_all(block)
        matched: list[int] = []
        self._number, self._numbered_to = self.lines + 1, 0
        line = self._open
        line.start, line.end = 0, 0
        for start, end, indexes in self._hit_lines(block, positions, candidates):
            raw = block[start:end]
            if steady:
                for literal, index in lexicon.bulk_patterns:
                    if literal in raw:
                        indexes.add(index)
            is_whole = start > 0 and end < len(block) and not self._numbered
            if is_whole and self._is_repeat(raw, start, indexes):
                matched.append(start)
                continue
            if start > 0:
                line = _Line(start)
            line.start, line.end = start, end
            self._taken = None
            if self._read_line(block, line, indexes, found, batch):
                matched.append(start)
            if self._turned:
                end = min(end + 1, len(block))
                self._close_line(block[:end], line)
                self._tell_repeats(block, found, batch)
                return end, matched
            if is_whole and self._taken is not None:
                self._learn_repeat(raw, indexes, *self._taken)
        self._close_line(block, line)
        self._tell_repeats(block, found, batch)
        return len(block), matched

    # --- lines that repeat but for their digits ---------------------------------------------------------

    def _is_repeat(self, raw: bytes, start: int, indexes: set[int]) -> bool:
        """Count a line that is known as one that repeats."""
        repeats = self._repeats.get(raw.translate(_MASKED))
        if repeats is None or repeats.indexes != indexes:
            return False
        spans = repeats.spans
        repeat = repeats.known.get(tuple([raw[begin:stop] for begin, stop in spans]) if spans else ())
        if repeat is None:
            return False
        pattern, event = repeat.pattern, repeat.event
        if self.ready and pattern.bulk:
            return True  # counted as a whole
        self.matched += 1
        if event != NO_EVENT:
            self.events[event] += 1
        if event == "heartbeat":
            self.heartbeats += 1
        if pattern.kind:
            self.errors[pattern.kind] += 1
        if event not in _QUIET_EVENTS:
            if repeat.last is _NOWHERE:
                self._repeated.append(repeat)
            repeat.last, repeat.time = (start, start + len(raw)), self._start.time
        return True

    def _learn_repeat(self, raw: bytes, indexes: set[int], pattern: Pattern, event: str) -> None:
        """Know a line from now on by everything but its digits, where those mean nothing but who wrote it."""
        if event not in _COUNTED or pattern.regex.groupindex or pattern.proves_ready or pattern.every_rank:
            return
        if pattern.again or not self._lexicon.blind >= indexes or len(raw) > REPEAT_CHARACTERS:
            return
        if not raw.isascii() or b"\r" in raw or b"\x1b" in raw or raw.startswith(b"\0"):
            return
        text = raw.decode()
        if "[rank" in text and RANKED.search(text):
            return  # who wrote it stands behind the prefix
        prefix = self.framework.prefix.match(text)
        groups = prefix.re.groupindex if prefix else {}
        spans = tuple(prefix.span(group) for group in groups if _is_writer(group) and prefix[group]) if prefix else ()
        if len(self._repeats) >= MAX_REPEATS:
            self._repeats.clear()
        repeats = self._repeats.setdefault(raw.translate(_MASKED), _Repeats(frozenset(indexes), spans))
        if len(repeats.known) < MAX_REPEATS and repeats.indexes == indexes and repeats.spans == spans:
            repeats.known[tuple([raw[begin:stop] for begin, stop in spans])] = _Repeat(pattern, event)

    def _tell_repeats(self, block: bytes, found: list[tuple[int, Hit]], batch: Batch) -> None:
        """Of what came again in this block the last of each is told."""
        told, self._repeated = self._repeated, []
        times = [self._start.time]
        for repeat in told:
            start, end = repeat.last
            prefix, message = self.framework.split(text_of(block[start:end]))
            if match := self.framework.fits(repeat.pattern, prefix, message):
                groups, line = groups_of(match), _Line(start, end)
                rank = self._ranks.of(repeat.pattern, groups, prefix, batch.names)
                time = None if prefix.time else self._time_before(block, start, 0, REPEAT_LOOK_BACK)
                self._start.time, self._timed_to = repeat.time if time is None else time, start
                fields = self._fields(repeat.pattern, groups, prefix)
                found.append((start, self._hit(repeat.event, rank, fields, prefix, block, line)))
                times.append(self._start.time)
            repeat.last = _NOWHERE
        self._start.time = max((time for time in times if time is not None), default=None)

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
        self, block: bytes, positions: Iterable[tuple[int, int]], candidates: list[tuple[int, ...]]
    ) -> Iterator[tuple[int, int, set[int]]]:
        """Physical lines that hold a literal: start, end, and the patterns to try."""
        end, start, indexes = -1, 0, set[int]()
        for literal, offset in positions:
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
            self._taken = pattern, pattern.event
            return None  # counted as a whole
        self.matched += first
        groups = groups_of(match)
        self._learn_server(pattern, groups)
        rank = self._ranks.of(pattern, groups, prefix, batch.names)
        event = self._event(pattern, rank)
        self._count(event, pattern.kind, line)
        self._turn(event)
        self._taken = pattern, event
        fields = self._fields(pattern, groups, prefix)
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
        self._start.time, self._timed_to = time, line.end
        if self.version and not self._version_told:
            fields["version"], self._version_told = self.version, True
        return Hit(event, rank, fields, self._line_number(block, line.start), time, stamp)

    def _fields(self, pattern: Pattern, groups: dict[str, str], prefix: Prefix) -> dict[str, float | str]:
        fields = numbers_of(groups)
        if pattern.kind:
            fields["kind"] = pattern.kind
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
        if pattern.every_rank:
            self._start.every_rank = True
        if pattern.proves_ready and not self.ready and "listening" in self._start.seen:
            return "ready"
        if pattern.again and (event, rank) in self._start.passed:
            return pattern.again
        self._start.passed.add((event, rank))
        return event

    def _count(self, event: str, kind: str, line: _Line) -> None:
        if event == NO_EVENT or event in line.events:
            return
        line.events.add(event)
        self.events[event] += 1
        if event == "heartbeat":
            self.heartbeats += 1
        if kind:
            self.errors[kind] += 1

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
            self._repeats.clear()

    def _learn_server(self, pattern: Pattern, groups: dict[str, str]) -> None:
        """What a line says of the server itself: its version, the sizes of its groups."""
        if pattern.event == "args":
            self._ranks.forget()
            self._repeats.clear()
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
        last = -1
        for literal in self._steady.frequent if self._steady else ():
            if not (number := part.count(literal)):
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

    def _find_novel(self, part: bytes, hit_offsets: list[int], found: list[tuple[int, Hit]]) -> None:
        """Report lines of a shape this start has not shown yet."""
        for offset in self._shapes.new_in(part, hit_offsets)[:MAX_NOVEL]:
            found.append((offset, self._novel_hit(part, offset)))

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


@lru_cache(maxsize=64)
def _is_writer(group: str) -> bool:
    """Whether a group of a prefix, or of another form of it, tells who wrote the line."""
    return re.sub(r"_\d+$", "", group) in _WRITER
