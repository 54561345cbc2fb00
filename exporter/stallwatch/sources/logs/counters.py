"""What is counted of the logs: the signals, and sums that go on when a file is closed or read again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add

from ...model import ERROR_KINDS, EVENTS, LogCounts, LogSums, Reading, Signal
from ...signals import LOG_BYTES
from .journal import JournalTail
from .lines import LogScanner
from .tail import LogTail

ALL = 1 << 62
"""More bytes than any file has."""


_LOG = ("server", "log")


def _counter(name: str, what: str) -> Signal:
    return Signal(name, what, _LOG, "log", "counter")


LOG_LINES = _counter("log_lines_total", "Lines of the log read so far.")
LOG_UNMATCHED = _counter("log_unmatched_lines_total", "Lines of the log that no pattern of the framework knows.")
LOG_HEARTBEATS = _counter("log_heartbeat_lines_total", "Lines that only repeat: neither progress nor trouble.")
LOG_ROTATIONS = _counter("log_rotations_total", "Times the log was replaced by a new file.")
LOG_TRUNCATIONS = _counter("log_truncations_total", "Times the log was truncated or written anew.")
LOG_READ_ERRORS = _counter("log_read_errors_total", "Times the log became unreadable.")
LOG_BACKLOG = Signal("log_backlog_bytes", "Bytes of the log written and not read yet.", _LOG, "log")
LOG_LAST_LINE = Signal(
    "log_last_line_timestamp_seconds",
    "Unix time at which the last line arrived (for a log found on start: the file's last change).",
    _LOG,
    "log",
)
LOG_EVENTS = Signal(
    "log_events_total",
    "Recognised lines in all logs of the server by event, of those its framework has patterns for: "
    + " ".join(EVENTS)
    + ".",
    ("server", "event"),
    kind="counter",
)
LOG_ERRORS = Signal(
    "log_errors_total",
    "Lines of error and fatal in all logs of the server by kind: " + " ".join(ERROR_KINDS) + ".",
    ("server", "kind"),
    kind="counter",
)


COUNTERS = (
    LOG_LINES,
    LOG_BYTES,
    LOG_UNMATCHED,
    LOG_HEARTBEATS,
    LOG_ROTATIONS,
    LOG_TRUNCATIONS,
    LOG_READ_ERRORS,
)
_NONE: Counts = (0,) * len(COUNTERS)
_OF_LINES = COUNTERS.index(LOG_ROTATIONS)
"""So many of them are about what stands in a file; the others about the file."""


Counts = tuple[int, ...]


@dataclass(slots=True)
class Voice:
    """One log as it is told of: a whole file, or one stream of a file that a container runtime wrote.

    `bytes_read`: on disk; `heard`: Unix time the runtime gave to its last line; `last_line`: when that arrived;
    `told`: its readings of the last turn.
    """

    name: str
    scanner: LogScanner
    bytes_read: int = 0
    heard: float | None = None
    last_line: float | None = None
    told: dict[str, Reading] = field(default_factory=dict)


@dataclass(slots=True)
class Before:
    """What was counted of a log before it was opened: of closed ones of its name, and before a restart of ours."""

    streams: dict[str, Counts] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, counts: LogCounts) -> Before:
        return cls(dict(counts.streams), Counter(counts.events), Counter(counts.errors))

    def add(self, tail: LogTail | JournalTail, voices: Mapping[str, Voice]) -> None:
        for stream, voice in voices.items():
            self.streams[stream] = sum_of(counts_of(tail, voice), self.streams.get(stream))
            self.events.update(voice.scanner.events)
            self.errors.update(voice.scanner.errors)

    def take_off(self, voices: Mapping[str, Voice], tail: LogTail | JournalTail, *, at_least_none: bool) -> None:
        """Lines that were counted before, and have been counted once more by now."""
        again = Before()
        again.add(tail, voices)
        least = 0 if at_least_none else -ALL
        for stream, counts in again.streams.items():
            known = self.streams.get(stream, _NONE)
            of_lines = [max(least, one - other) for one, other in zip(known, counts[:_OF_LINES], strict=False)]
            self.streams[stream] = (*of_lines, *known[_OF_LINES:])
        for mine, others in ((self.events, again.events), (self.errors, again.errors)):
            for word, number in others.items():
                mine[word] = max(least, mine[word] - number)

    def counts(self) -> LogCounts:
        return LogCounts(dict(self.streams), _some(self.events), _some(self.errors))


NOTHING = Before()


def _some(numbers: Counter[str]) -> dict[str, int]:
    return {word: number for word, number in numbers.items() if number > 0}


def counts_of(tail: LogTail | JournalTail, voice: Voice | None = None) -> Counts:
    """Of one log, in the order of `COUNTERS`; all zero but those of the file while nothing was read."""
    of_file = tail.rotations, tail.truncations, tail.errors
    if voice is None:
        return (0, 0, 0, 0, *of_file)
    scanner = voice.scanner
    return (scanner.lines, voice.bytes_read, scanner.unmatched, scanner.heartbeats, *of_file)


def sum_of(counts: Counts, before: Counts | None) -> Counts:
    return counts if before is None else tuple(map(add, counts, before))


def counted(tail: LogTail | JournalTail, voices: Mapping[str, Voice], before: Before | None) -> LogCounts:
    """What was counted of a log so far, with what was `before` it was opened."""
    if before is None and len(voices) == 1:  # nearly always; and it is asked for in every turn
        ((stream, voice),) = voices.items()
        return LogCounts({stream: counts_of(tail, voice)}, _some(voice.scanner.events), _some(voice.scanner.errors))
    both = Before.of(before.counts()) if before is not None else Before()
    both.add(tail, voices)
    return both.counts()


def sharing(row: LogSums, before: LogSums) -> LogSums:
    """The row with the parts that are as before: many turns are kept."""
    events, errors = before.counts.events, before.counts.errors
    return LogSums(
        before.key if before.key == row.key else row.key,
        before.position if before.position == row.position else row.position,
        row.told,
        row.mark,
        LogCounts(
            row.counts.streams,
            events if events == row.counts.events else row.counts.events,
            errors if errors == row.counts.errors else row.counts.errors,
        ),
    )


def total_of(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = dict[str, int]()
    for part in parts:
        for word, number in part.items():
            total[word] = total.get(word, 0) + number
    return total
