"""Whole log files, read once and told: phases, ranks, silences, errors (the `parse` subcommand).

The document is described in docs/REFERENCE.md, "JSON documents".  Nothing of the log's text comes out: events,
line numbers and the times the log prints only.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BufferedReader
from itertools import chain
from string import digits
from typing import Any, TextIO

from ..config import Limits
from ..frameworks import Framework, Pattern, whole_number
from ..sources.logs.kind import recognise
from ..sources.logs.lines import Batch, Hit, LogScanner, _Line
from ..sources.logs.times import parse_time, seconds_between
from ..startup import COUNTERS, FIRST_RANK, MARKERS, MOST_RANKS, PHASE_OF_EVENT, PROGRESS_EVENTS, RankStartup, Startup
from ..strict_yaml import InputError
from .input import LONGEST_LINE_BYTES, Block, LogInput, opened, sample_of
from .silences import Gap, Line, LogClock, Silences, listen, meaning
from .text import format_file

MAX_ERRORS = 1000
MAX_PHASES = 10_000
MAX_STARTS = 1000
NOVEL_IN_A_ROW = 10
"""Unknown lines of new shapes show progress only so many times in a row: they are weak evidence."""
SCHEMA = 1
AUTO = "auto"

_PROOF = MARKERS | {"listening", "ready"}
"""Without a line that begins a start: what a start must have been there for."""
_OF_RANKS = MARKERS | COUNTERS
_SIGNS = PROGRESS_EVENTS | {"fatal", "shutdown"}
"""By any of these there was a start."""
_STAMP = re.compile(r"[\d\-/:.,TZ+ ]{1,40}")

Json = dict[str, Any]


def parse_files(
    paths: Sequence[str],
    framework: str | None,
    frameworks: Sequence[Framework],
    stdin: BufferedReader | None = None,
) -> Json:
    """Read every file from its beginning.  `framework` None or "auto" = the one whose lines are found.

    "-" is standard input (or `stdin`); gzip is recognised.  InputError when a file cannot be read as a log.
    """
    chosen = _chosen(framework, frameworks)
    return _document([_parse_file(path, chosen, frameworks, stdin) for path in paths])


def parse(
    paths: Sequence[str],
    framework: str | None,
    frameworks: Sequence[Framework],
    as_json: bool,
    out: TextIO,
    problems: TextIO,
) -> int:
    """Print what the files tell; of one that cannot be read what is wrong with it.  0, or 2 when there was one."""
    chosen = _chosen(framework, frameworks)
    told: list[Json] = []
    status = 0
    for path in paths:
        try:
            one = _parse_file(path, chosen, frameworks, None, problems)
        except InputError as error:
            print(f"stallwatch: {error}", file=problems)
            status = 2
            continue
        told.append(one)
        if not as_json:
            print(format_file(one), file=out)
    if as_json and told:
        print(json.dumps(_document(told), indent=1), file=out)
    return status


def format_text(document: Json) -> str:
    """The document as a report for people: fit for a bug report, without a word of the log itself."""
    return "\n".join(map(format_file, document["files"])) + "\n"


def _document(files: list[Json]) -> Json:
    return {"schema": SCHEMA, "files": files}


def _chosen(name: str | None, frameworks: Sequence[Framework]) -> Framework | None:
    by_name = {one.name: one for one in frameworks}
    if name not in (None, AUTO) and name not in by_name:
        raise InputError("--framework", 0, "", f"{name!r} is unknown; allowed are auto, {', '.join(by_name)}")
    return by_name.get(name or AUTO)


def _parse_file(
    path: str,
    chosen: Framework | None,
    frameworks: Sequence[Framework],
    stdin: BufferedReader | None,
    terminal: TextIO | None = None,
) -> Json:
    with opened(path, stdin, terminal) as log:
        blocks, sample, recognised = log.blocks(), list[Block](), True
        if chosen is None:
            sample = sample_of(blocks)
            found = recognise([block.text for block in sample], frameworks)
            chosen, recognised = found.framework, found.is_certain
        account = _Account(chosen)
        for block in chain(sample, blocks):
            account.read(block)
        return _told(log, account, recognised)


def _told(log: LogInput, account: _Account, recognised: bool) -> Json:
    document = account.finish()
    lines = document.pop("lines")
    return {
        "file": log.name,
        "lines": lines if log.lines_on_disk is None else log.lines_on_disk,
        "bytes": log.bytes_read,
        "container": log.form or None,
        "framework": account.framework.name,
        "recognised": recognised,
        **document,
        "warnings": log.warnings,
    }


# --- one file ------------------------------------------------------------------------------------------------


class _Reader(LogScanner):
    """A scanner that also tells on which lines heartbeats stand."""

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework, Limits(line_bytes=LONGEST_LINE_BYTES), numbered=True)
        self.beats: list[int] = []

    def _take(
        self,
        pattern: Pattern,
        match: re.Match[str],
        prefix: Any,
        block: bytes,
        line: _Line,
        batch: Batch,
    ) -> Hit | None:
        before = self.heartbeats
        hit = super()._take(pattern, match, prefix, block, line, batch)
        if self.heartbeats > before:
            self.beats.append(self._line_number(block, line.start))
        return hit


@dataclass(slots=True)
class _OpenPhase:
    """A phase that goes on: what was written of it, and its time on the log's clock."""

    document: Json
    since: float | None


@dataclass(slots=True)
class _Start:
    """What is known of one start."""

    begin_line: int = 1
    ready_line: int | None = None
    failed_line: int | None = None
    stopped_line: int | None = None
    last_progress: Json | None = None
    phases: list[Json] = field(default_factory=list)
    open_phases: dict[str | None, _OpenPhase] = field(default_factory=dict)
    errors: list[Json] = field(default_factory=list)
    error_lines: int = 0
    named: set[str] = field(default_factory=set)  # ranks that lines name
    beats: list[int] = field(default_factory=list)  # first and last line
    any_line: Silences = field(default_factory=Silences)
    progress: Silences = field(default_factory=Silences)
    novel_in_a_row: int = 0

    def beat(self, line: int) -> None:
        self.beats = [*self.beats[:1], line]

    def move_clock(self, seconds: float) -> None:
        """Times told so far were on another clock."""
        for silences in (self.any_line, self.progress):
            if (last := silences.last) is not None:
                silences.last = Line(last.number, last.time + seconds, last.event, last.text)
        for phase in self.open_phases.values():
            phase.since = None if phase.since is None else phase.since + seconds


@dataclass(slots=True)
class _Account:
    """What is known of a file so far; all but lines and starts is of its last start."""

    framework: Framework
    scanner: _Reader = field(init=False)
    clock: LogClock = field(init=False)
    startup: Startup = field(default_factory=Startup)
    start: _Start = field(default_factory=_Start)
    earlier: list[Json] = field(default_factory=list)
    headless_starts: int = 0
    last_block: Block = field(default_factory=lambda: Block(b""))

    def __post_init__(self) -> None:
        self.scanner, self.clock = _Reader(self.framework), LogClock(self.framework)

    def read(self, block: Block) -> None:
        first_line, self.last_block = self.scanner.lines + 1, block
        if moved := self.clock.learn(block, first_line):
            self.start.move_clock(moved)
        batch = self.scanner.feed(block.text)
        self._listen(block, first_line, batch.hits, self._take(batch, block))

    def _take(self, batch: Batch, block: Block) -> list[int]:
        """Fold the hits of a block; the lines at which another start begins."""
        begins = []
        beats, self.scanner.beats = deque(self.scanner.beats), []
        for hit in batch.hits:
            while beats and beats[0] < hit.line:
                self.start.beat(beats.popleft())
            if self.startup.begins_anew(hit.event):
                begins.append(hit.line)
                self._begin_start(hit.line)
            self._fold(hit, block)
        for line in beats:
            self.start.beat(line)
        return begins

    def _begin_start(self, line: int) -> None:
        started = self.startup.starts > 0
        if not started and self.startup.seen & _PROOF:
            started, self.headless_starts = True, 1
        if started and len(self.earlier) < MAX_STARTS:
            self.earlier.append(self._earlier_start(line - 1))
        self.start = _Start(begin_line=line)

    def _earlier_start(self, end_line: int) -> Json:
        start = self.start
        return {
            "begin_line": start.begin_line,
            "end_line": end_line,
            "ready_line": start.ready_line,
            "failed_line": start.failed_line,
            "stopped_line": start.stopped_line,
            "phase": self.startup.phase,
        }

    def _fold(self, hit: Hit, block: Block) -> None:
        start = self.start
        if hit.event == "novel":
            start.novel_in_a_row += 1
            moved = start.novel_in_a_row <= NOVEL_IN_A_ROW
        else:
            rank = self._owner(hit)
            moved = self.startup.apply(hit.event, rank, hit.fields, float(hit.line))
            start.novel_in_a_row = 0 if moved else start.novel_in_a_row
            if hit.event in PHASE_OF_EVENT:
                self._follow_phases(hit, rank or FIRST_RANK, block)
            if moved:
                start.last_progress = {"line": hit.line, "event": hit.event, "rank": hit.rank}
        self._note(hit)
        if moved and (time := self._time(hit, block)) is not None:
            start.progress.see(Line(hit.line, time, hit.event))
        elif moved:
            start.progress.undated += 1

    def _owner(self, hit: Hit) -> str | None:
        """The rank a hit is about; what names none is the first one's, which need not be called TP0."""
        named = self.start.named
        if hit.rank is not None:
            if len(named) < MOST_RANKS:
                named.add(hit.rank)
            return hit.rank
        if hit.event not in _OF_RANKS or not named or FIRST_RANK in named:
            return None
        return min(named, key=_natural)

    def _note(self, hit: Hit) -> None:
        start = self.start
        if hit.event == "ready":
            start.ready_line = start.ready_line or hit.line
        elif hit.event == "shutdown":
            start.stopped_line = start.stopped_line or hit.line
        elif hit.event in ("error", "fatal"):
            start.error_lines += 1
            if hit.event == "fatal":
                start.failed_line = start.failed_line or hit.line
            if len(start.errors) < MAX_ERRORS:
                start.errors.append({"kind": hit.fields["kind"], "line": hit.line, "rank": hit.rank})

    # --- phases ----------------------------------------------------------------------------------------------

    def _follow_phases(self, hit: Hit, owner: str, block: Block) -> None:
        startup, opened = self.startup, self.start.open_phases
        now: dict[str | None, str] = {None: startup.phase}
        if startup.ready_at is None and (rank := startup.ranks.get(owner)) is not None:
            now[owner] = rank.phase
        for name, phase in now.items():
            if (was := opened.get(name)) is None or was.document["phase"] != phase:
                self._close_phase(name, hit, block)
                self._open_phase(name, phase, hit, block)
        if hit.event == "ready":
            for name in [name for name in opened if name is not None]:
                self._close_phase(name, hit, block)

    def _open_phase(self, name: str | None, phase: str, hit: Hit, block: Block) -> None:
        document: Json = {"phase": phase, "rank": name, "begin_line": hit.line, "end_line": None}
        document.update(begin=self._stamp(hit, block), end=None, seconds=None)
        if len(self.start.phases) < MAX_PHASES:
            self.start.phases.append(document)
        self.start.open_phases[name] = _OpenPhase(document, self._time(hit, block, near=True))

    def _close_phase(self, name: str | None, hit: Hit, block: Block) -> None:
        if (was := self.start.open_phases.pop(name, None)) is not None:
            was.document.update(end_line=hit.line, end=self._stamp(hit, block))
            was.document["seconds"] = _seconds(was.since, self._time(hit, block, near=True))

    def _time(self, hit: Hit, block: Block, near: bool = False) -> float | None:
        """Of a line on the log's clock.  `near`: of one without a time that of the last line before it."""
        if hit.stamp and self.clock.has_printed:
            return hit.time
        if block.time_of is not None and (unix := block.time_of(hit.line)) is not None:
            return unix + self.clock.shift
        return hit.time if near and self.clock.has_printed else None

    def _stamp(self, hit: Hit, block: Block) -> str | None:
        """The time a line prints, as it stands there; of one that prints none the container's, in UTC."""
        if hit.stamp:
            return hit.stamp if _STAMP.fullmatch(hit.stamp) and parse_time(hit.stamp) is not None else None
        unix = block.time_of(hit.line) if block.time_of is not None else None
        return None if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    # --- silences --------------------------------------------------------------------------------------------

    def _listen(self, block: Block, first_line: int, hits: list[Hit], begins: list[int]) -> None:
        """Look for the longest silences in a block; where a start begins, begin anew."""
        for line in begins[-1:]:
            text = block.text[_offset_of_line(block.text, line - first_line) :]
            block, first_line = Block(text, block.time_of), line
            hits = [hit for hit in hits if hit.line >= line]
        listen(self.start.any_line, block, first_line, hits, self.clock)

    # --- the document ----------------------------------------------------------------------------------------

    def finish(self) -> Json:
        self._take(self.scanner.finish(), self.last_block)
        scanner, startup, before, start = self.scanner, self.startup, self.scanner.before_start, self.start
        events = scanner.events - before.events
        unnamed = {FIRST_RANK} - start.named if start.named else set()
        ranks = {name: startup.ranks[name] for name in sorted(startup.ranks.keys() - unnamed, key=_natural)}
        last = start.any_line.last
        for phase in start.open_phases.values():
            phase.document["seconds"] = _seconds(phase.since, last.time if last is not None else None)
        return {
            "lines": scanner.lines,
            "version": scanner.version or None,
            "starts": (startup.starts + self.headless_starts) or (1 if startup.seen & _SIGNS else 0),
            "earlier_starts": self.earlier,
            "begin_line": start.begin_line,
            "ready": startup.ready_at is not None,
            "ready_line": start.ready_line,
            "failed": startup.fatal_at is not None,
            "failed_line": start.failed_line,
            "stopped_line": start.stopped_line,
            "last_progress": start.last_progress,
            "phases": [phase for phase in start.phases if phase["rank"] not in unnamed],
            "ranks": {name: {"phase": rank.phase, "load_progress": rank.load_progress} for name, rank in ranks.items()},
            "rank_progress": {name: _passed(rank) for name, rank in ranks.items()},
            "markers": {event: count for event, count in sorted(events.items()) if event in PROGRESS_EVENTS},
            "other_events": {event: count for event, count in sorted(events.items()) if event not in PROGRESS_EVENTS},
            "errors": start.errors,
            "error_lines": start.error_lines,
            "heartbeats": scanner.heartbeats - before.heartbeats,
            "heartbeat_lines": [start.beats[0], start.beats[-1]] if start.beats else None,
            "unmatched": max(0, scanner.lines - before.lines - (scanner.matched - before.matched)),
            "longest_silence": start.any_line.document(),
            "longest_progress_silence": start.progress.document(),
            "silences": list(self._gaps(start.any_line)),
            "progress_silences": list(self._gaps(start.progress)),
        }

    def _gaps(self, silences: Silences) -> Iterator[Json]:
        for gap in silences.gaps:
            yield self._gap(gap)

    def _gap(self, gap: Gap) -> Json:
        return {
            "seconds": gap.seconds,
            "after_line": gap.after.number,
            "after_event": meaning(self.framework, gap.after),
            "until_line": gap.until.number,
            "until_event": meaning(self.framework, gap.until),
            "undated_lines": gap.undated,
        }


def _passed(rank: RankStartup) -> Json:
    """How many kinds of start-up markers a rank passed, and the last line on which it showed progress."""
    last = None if rank.last_progress is None else int(rank.last_progress)
    return {"markers": len(rank.markers), "last_line": last}


def _seconds(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else round(seconds_between(earlier, later), 6)


def _offset_of_line(block: bytes, number: int) -> int:
    offset = 0
    for _ in range(number):
        offset = block.find(b"\n", offset) + 1
    return offset


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorting key of a rank's name: PP2 before PP10."""
    return [(part.rstrip(digits), whole_number(part[len(part.rstrip(digits)) :]) or 0) for part in name.split("-")]
