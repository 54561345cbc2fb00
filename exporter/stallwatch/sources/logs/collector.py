"""Every server's log, whole and then followed: counts for `/metrics`, events for the verdict.

What a line means is decided in lines, how bytes are got in tail; here both meet the servers of the
Scene.  Never a word of a log leaves: events, numbers and names of ranks only.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from operator import add
from typing import ClassVar

from ...frameworks import Framework
from ...model import (
    ERROR_KINDS,
    EVENTS,
    Event,
    LogCounts,
    LogPlace,
    LogSums,
    Observation,
    ProcessId,
    RankName,
    Reading,
    Scene,
    Server,
    Signal,
)
from ...signals import LOG_BYTES
from .. import Host, Moment
from .decode import Part, StreamUnwrapper
from .earlier import CHUNK_BYTES, Earlier, earlier_files, in_line, is_runtimes, moved_aside, read_earlier
from .guard import Guards, Questions
from .journal import PLACE as JOURNAL
from .journal import JournalTail
from .lines import Batch, Hit, LogScanner
from .mounts import Mounts
from .places import LogPlaces
from .tail import FolderWatch, Identity, LogTail, mark_in
from .times import seconds_between

READ_BYTES = 32 << 20
"""Most bytes read of one log in one turn, so that a long history does not delay the other logs."""
CATCH_UP_SECONDS = 0.05
"""Pause before the next turn while some log has a backlog."""
LAST_WORDS_READS = 5
"""Turns for which the logs of a server that is gone are still read: a fatal line may come after the death."""
MOST_EVENTS = 2000
"""Events told of one log in one turn; the counters count them all."""
MOST_KEPT = 8 * MOST_EVENTS
"""Of a turn that reads on."""
TOLD_ONCE = frozenset(("error", "watchdog", "waiting", "lock_wait", "stats"))
"""Events of which one turn tells the last of each kind and rank only."""
LONGEST_LOG_SECONDS = 10 * 366 * 86400.0
"""Times printed further apart than this are no times."""
FALLBACK = "generic"
ALL = 1 << 62
"""More bytes than any file has."""
MOST_SUMS = 256
"""Logs of a server of which it is kept what was counted of them, closed ones included; of more the events only."""
KEPT_TURNS = 64
"""Turns of which it is remembered how far the logs were read: more than may wait for the daemon."""

_RAYS_WORKER = re.compile(r"worker-[0-9a-f]{1,80}-[0-9a-f]{1,20}-(?P<pid>[0-9]{1,9})\.(?:out|err)")
"""The files of Ray's workers are named by id, job and PID; their lines do not say who wrote them."""

Place = tuple[str, Identity, int, str]
"""One followed log: name, file, bytes of the file that were read, and their mark."""

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
    "Recognised lines in all logs of the server by event: " + " ".join(EVENTS) + ".",
    ("server", "event"),
    kind="counter",
)
LOG_ERRORS = Signal(
    "log_errors_total",
    "Lines of error and fatal in all logs of the server by kind: " + " ".join(ERROR_KINDS) + ".",
    ("server", "kind"),
    kind="counter",
)


@dataclass(slots=True)
class _Voice:
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


_Heard = tuple[_Voice, Batch]
_Counts = tuple[int, ...]


@dataclass(slots=True)
class _Before:
    """What was counted of a log before it was opened: of closed ones of its name, and before a restart of ours."""

    streams: dict[str, _Counts] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, counts: LogCounts) -> _Before:
        return cls(dict(counts.streams), Counter(counts.events), Counter(counts.errors))

    def add(self, log: _Log) -> None:
        for stream, voice in log.voices.items():
            self.streams[stream] = _sum(_counts(log, voice), self.streams.get(stream))
            self.events.update(voice.scanner.events)
            self.errors.update(voice.scanner.errors)

    def take_off(self, log: _Log, *, at_least_none: bool) -> None:
        """Lines that were counted before, and have been counted once more by now."""
        again = _Before()
        again.add(log)
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


_NOTHING = _Before()


def _some(numbers: Counter[str]) -> dict[str, int]:
    return {word: number for word, number in numbers.items() if number > 0}


class _Log:
    """One place of one server: the bytes, what they say, and since when they come as they are written.

    `name_of` names a stream that speaks in a file for the first time.
    """

    def __init__(
        self,
        place: LogPlace,
        tail: LogTail | JournalTail,
        make_scanner: Callable[[], LogScanner],
        name_of: Callable[[str], str],
    ) -> None:
        self.place, self.tail = place, tail
        self.voices: dict[str, _Voice] = {}  # by stream, "" for a file that no runtime wrote
        self.told: int | None = None  # bytes whose events were told before a restart of ours; None = not known yet
        self.marked = 0, ""  # bytes read, and their mark
        self.marked_at: tuple[object, ...] = ()  # a file written anew may have been read as far as the one before
        self.sums: LogSums | None = None  # of before a restart of ours, until it is read as far as then
        self.kept: LogSums | None = None  # the same, for ever
        self.before: _Before | None = None  # with the numbers of `sums`
        self.is_known = False  # whether the file is the one that was followed then
        self.is_certain = True  # whether it is known where that reading ended, or that its file is gone
        self.noted: tuple[tuple[object, ...], LogSums] | None = None
        self.earlier: list[Earlier] | None = None  # files of before that are still to be read; None = not looked for
        self._make_scanner, self._name_of = make_scanner, name_of
        self._unwrapper = StreamUnwrapper()
        self._past: Iterator[list[_Heard] | None] | None = None
        self.chunks_of: Callable[[Earlier], Iterator[bytes | None]] = read_earlier  # None = not there yet
        self._is_waiting = False
        self._truncations = 0
        self._caught_up = False
        self._pending: list[_Heard] = []
        if isinstance(tail, LogTail):
            tail.boundary = self._at_boundary

    @property
    def is_history(self) -> bool:
        """Whether what is read now was there before we came."""
        return not self._caught_up

    @property
    def catching_up(self) -> bool:
        """Whether the log is open and part of what it held then is still to be read: its counts are not whole."""
        return not self._caught_up and self.tail.identity is not None

    @property
    def is_placed(self) -> bool:
        """Whether all that was counted is what its file holds up to the offset, or was known before.

        While a log is read that nothing was known of, nothing is, so that it is told of as a whole.
        """
        if not self.catching_up:
            return True
        tail = self.tail
        return self.kept is not None and self.sums is None and (not isinstance(tail, LogTail) or self._is_passed(tail))

    @property
    def is_behind(self) -> bool:
        if self._is_waiting or self.tail.reason is not None:
            return False  # coming sooner would not help
        return bool(self.tail.backlog or self.earlier or self._past)

    @property
    def is_silent(self) -> bool:
        """Whether it is not known to be this server's: a unit that never wrote to the journal."""
        return isinstance(self.tail, JournalTail) and not self.tail.heard

    def be_ready(self) -> None:
        for voice in self.voices.values():
            if not voice.scanner.ready:
                voice.scanner.be_ready()

    def read(self, most_bytes: int) -> Iterator[_Heard]:
        """Read on; the batches of this turn.  What was told before a restart says only who is which rank."""
        tail = self.tail
        if self.earlier is None:
            most_bytes = 0  # not open yet: what was before is to be read first
        most_bytes = yield from self._read_earlier(most_bytes)
        while isinstance(tail, LogTail) and (left := (self.told or 0) - tail.offset) > 0 and most_bytes > 0:
            before = tail.bytes_read
            yield from map(_names_only, self._read(min(most_bytes, left)))
            most_bytes -= tail.bytes_read - before
            if tail.rotations or tail.truncations or tail.bytes_read == before:
                self.told = 0  # it is another file by now
        if isinstance(tail, LogTail) and self._is_passed(tail):
            self.settle()
        yield from self._read(most_bytes)

    def _is_passed(self, tail: LogTail) -> bool:
        """Whether all that was told before a restart has been read again."""
        is_open = tail.identity is not None and self.told is not None and self.earlier is not None
        return is_open and not self.earlier and self._past is None and tail.offset >= (self.told or 0)

    def settle(self, *, at_end: bool = False) -> None:
        """Go on from the sums of before a restart: what was counted then and was read again is counted once.

        Called where that reading ended.  Where this is not known, `at_end` of what was there when we came: the
        numbers are those of before, or those of what is there, whichever are higher.
        """
        if self.sums is None or self.before is None or not (self.is_certain or at_end):
            return
        self.before.take_off(self, at_least_none=not self.is_certain)
        self.sums = None

    def _read_earlier(self, most_bytes: int) -> Generator[_Heard, None, int]:
        """Files of before, each in its turn; returns how many bytes may still be read."""
        while self.earlier and most_bytes > 0:
            file = self.earlier[0]
            self._past = self._past or self._heard_of(file)
            for heard in self._past:
                self._is_waiting = heard is None
                if heard is None:
                    return 0
                yield from heard
                most_bytes -= CHUNK_BYTES
                if most_bytes <= 0:
                    return 0
            self._past = None
            del self.earlier[0]
        return most_bytes

    def _heard_of(self, file: Earlier) -> Iterator[list[_Heard] | None]:
        left = file.told
        for chunk in self.chunks_of(file):
            if chunk is None:
                yield None
                continue
            if old := chunk[: max(0, left)]:
                yield list(map(_names_only, self._feed(old)))
            if new := chunk[len(old) :]:
                self.settle()
                yield list(self._feed(new))
            left -= len(chunk)
        yield list(self._hear(self._unwrapper.leave()))
        if not self._unwrapper.form:
            self._unwrapper = StreamUnwrapper()

    def _read(self, most_bytes: int) -> Iterator[_Heard]:
        for chunk in self.tail.read(most_bytes):
            yield from self._take_pending()
            if isinstance(self.tail, JournalTail) and self.tail.is_old:
                yield from map(_names_only, self._feed(chunk))
            else:
                if isinstance(self.tail, JournalTail):
                    self.settle()
                yield from self._feed(chunk)
        yield from self._take_pending()

    def _feed(self, chunk: bytes) -> Iterator[_Heard]:
        return self._hear(self._unwrapper.feed(chunk))

    def _hear(self, parts: dict[str, Part]) -> Iterator[_Heard]:
        for stream, part in parts.items():
            voice = self.voices.get(stream)
            if voice is None:
                name = self._name_of(stream) if stream else self.place.name
                voice = self.voices[stream] = _Voice(name, self._make_scanner())
            voice.bytes_read += part.size
            voice.heard = part.time if part.time is not None else voice.heard
            yield voice, voice.scanner.feed(part.text)

    def finish(self) -> list[_Heard]:
        """Nothing more will come: what has no line end is a line all the same."""
        left = list(self._hear(self._unwrapper.leave()))
        return [*left, *((voice, voice.scanner.finish()) for voice in self.voices.values())]

    def turn_done(self, spoke: Collection[_Voice], wall: float) -> None:
        for voice in spoke:
            voice.last_line = wall if self._caught_up else self.modified(voice)
        self._caught_up = self._caught_up or self._history_is_read()
        if self._caught_up:
            self.settle(at_end=True)

    def modified(self, voice: _Voice) -> float | None:
        """Unix time of the last line of a voice: the file's last change, or as much earlier as its runtime says."""
        heard = [other.heard for other in self.voices.values() if other.heard is not None]
        if self.tail.modified is None or voice.heard is None:
            return self.tail.modified if voice.heard is None else voice.heard
        return self.tail.modified - (max(heard) - voice.heard)

    def move(self, place: LogPlace) -> None:
        """The same file is reached by another path now."""
        self.place, self.tail.path, self.tail.owner = place, place.path, place.owner

    def _history_is_read(self) -> bool:
        """All that was there at the first look: a log that is written faster than read never has no backlog."""
        tail = self.tail
        is_read = not tail.backlog or tail.bytes_read >= (tail.found or 0)
        return tail.identity is not None and is_read and self.earlier == [] and self._past is None

    def _at_boundary(self) -> None:
        """Another file follows, or the same one anew.

        A line that a runtime wrote in pieces may go on in the file it made when it moved this one aside.
        """
        self.settle()
        if self._unwrapper.form and self.tail.truncations == self._truncations:
            self._pending.extend(self._hear(self._unwrapper.leave()))
            return
        self._truncations = self.tail.truncations
        self._pending.extend(self.finish())
        self._unwrapper = StreamUnwrapper()

    def _take_pending(self) -> list[_Heard]:
        pending, self._pending = self._pending, []
        return pending


def _names_only(heard: _Heard) -> _Heard:
    return heard[0], Batch(names=heard[1].names)


@dataclass(slots=True)
class _ServerLogs:
    """The logs of one server name, over its starts.

    `unclaimed`: what was counted before a restart of ours of logs that are not there (yet), by the hash of the log.
    """

    server: Server
    root: ProcessId
    places: LogPlaces
    wanted: tuple[LogPlace, ...] = ()  # places and patterns, as configured
    logs: dict[str, _Log] = field(default_factory=dict)
    before: dict[str, _Before] = field(default_factory=dict)  # by place
    given_up: _Before = field(default_factory=_Before)  # events of places that are no more
    unclaimed: dict[str, LogSums] = field(default_factory=dict)
    absent_turns: int = 0
    told: dict[str, Reading] = field(default_factory=dict)  # the readings of the last turn: event or kind -> its own

    def drop(self, name: str) -> None:
        """Close a log; what it counted stays counted."""
        log = self.logs.pop(name)
        if log.sums is not None:
            self.unclaimed[log.sums.key] = log.sums
            self.before.pop(name, None)
        else:
            self.before.setdefault(name, _Before()).add(log)
        log.tail.close()

    def give_up(self, name: str) -> None:
        """Nobody will ask for this log again; its events stay counted."""
        if (before := self.before.pop(name, None)) is not None:
            self.given_up.events.update(before.events)
            self.given_up.errors.update(before.errors)

    def claim(self, log: _Log, key: str) -> None:
        """Let a log that was opened go on from what was counted of it before a restart of ours."""
        log.sums = log.kept = self.unclaimed.pop(key, None)
        if log.sums is not None:
            log.before = self.before[log.place.name] = _Before.of(log.sums.counts)

    def name_of(self, place: LogPlace, stream: str) -> str:
        """The name of a stream in a runtime's file: its own, unless another log has it."""
        taken = {name for name in self.logs if name != place.name}
        taken |= {voice.name for name, log in self.logs.items() if name != place.name for voice in log.voices.values()}
        return f"{place.name}-{stream}" if stream in taken else stream

    def is_found(self, path: str) -> bool:
        """Whether a path is one that a pattern or a folder of the configuration stands for."""
        named = [place.path for place in self.wanted if place.owner is not None]
        return any(fnmatchcase(path, one) or os.path.dirname(path) == one.rstrip("/") for one in named)

    def close(self) -> None:
        for log in self.logs.values():
            log.tail.close()

    def totals(self) -> tuple[dict[str, int], dict[str, int]]:
        """Events, and errors by kind, of all logs."""
        closed, elsewhere = (self.given_up, *self.before.values()), [sums.counts for sums in self.unclaimed.values()]
        open_ones = [voice.scanner for log in self.logs.values() for voice in log.voices.values()]
        return (
            _total([one.events for part in (closed, elsewhere, open_ones) for one in part]),
            _total([one.errors for part in (closed, elsewhere, open_ones) for one in part]),
        )


_COUNTERS = (
    LOG_LINES,
    LOG_BYTES,
    LOG_UNMATCHED,
    LOG_HEARTBEATS,
    LOG_ROTATIONS,
    LOG_TRUNCATIONS,
    LOG_READ_ERRORS,
)
_NONE: _Counts = (0,) * len(_COUNTERS)
_OF_LINES = _COUNTERS.index(LOG_ROTATIONS)
"""So many of them are about what stands in a file; the others about the file."""


def _counts(log: _Log, voice: _Voice | None = None) -> _Counts:
    """Of one log, in the order of `_COUNTERS`; all zero but those of the file while nothing was read."""
    tail = log.tail
    of_file = tail.rotations, tail.truncations, tail.errors
    if voice is None:
        return (0, 0, 0, 0, *of_file)
    scanner = voice.scanner
    return (scanner.lines, voice.bytes_read, scanner.unmatched, scanner.heartbeats, *of_file)


def _sum(counts: _Counts, before: _Counts | None) -> _Counts:
    return counts if before is None else tuple(map(add, counts, before))


def _sharing(row: LogSums, before: LogSums) -> LogSums:
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


def _total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = dict[str, int]()
    for part in parts:
        for word, number in part.items():
            total[word] = total.get(word, 0) + number
    return total


def _again(told: dict[str, Reading], key: str, signal: Signal, value: float, *labels: str) -> Reading:
    """The reading, which is the one told before when it says the same: most of them do, and to make one costs more."""
    reading = told.get(key)
    if reading is None or reading.value != value:
        reading = told[key] = signal.read(value, *labels)
    return reading


def _bounded(hits: list[Hit]) -> list[Hit]:
    """What may still be told of a turn that goes on: however much it reads, no more is kept of it."""
    once = [hit for hit in hits if hit.event in TOLD_ONCE]
    each = [hit for hit in hits if hit.event not in TOLD_ONCE]
    kept = {id(hit) for hit in [*_last_of_each(once)[-MOST_EVENTS:], *each[-MOST_EVENTS:]]}
    return [hit for hit in hits if id(hit) in kept]


def _told(hits: list[Hit]) -> list[Hit]:
    """What is told of a turn: of repeating kinds the last one, and no more than a bounded number."""
    return _last_of_each(hits)[-MOST_EVENTS:] if len(hits) > 1 else hits


def _last_of_each(hits: list[Hit]) -> list[Hit]:
    last = {(hit.event, hit.rank, hit.fields.get("kind")): hit for hit in hits if hit.event in TOLD_ONCE}
    return [
        hit for hit in hits if hit.event not in TOLD_ONCE or last[hit.event, hit.rank, hit.fields.get("kind")] is hit
    ]


class Logs:
    """The source `logs`.

    `wake`, when set, is called as soon as a file appears, moves or goes in a folder of a followed log; the
    regular reads find the same without it.
    """

    name: ClassVar[str] = "logs"
    signals: ClassVar[tuple[Signal, ...]] = (
        *_COUNTERS,
        LOG_BACKLOG,
        LOG_LAST_LINE,
        LOG_EVENTS,
        LOG_ERRORS,
    )

    def __init__(self, host: Host, turn_bytes: int = READ_BYTES) -> None:
        self._turn_bytes = turn_bytes
        self._limits = host.config.limits
        self._frameworks = {framework.name: framework for framework in host.frameworks}
        self._servers: dict[str, _ServerLogs] = {}
        self._watch = FolderWatch(lambda: self.wake() if self.wake is not None else None)
        self._proc = os.path.join(str(host.proc), "")
        self._root = str(host.root)
        self._guards = Guards(Mounts(str(host.proc)), host.read_deadline_seconds)
        self._far = Questions(self._guards)
        self._now = Moment(0.0, 0.0)
        self.wake: Callable[[], None] | None = None
        self.again_seconds: float | None = None
        self.dropped_logs = 0  # logs that found no room, so far
        self._refused: set[tuple[str, str]] = set()  # server and log, at the last turn
        self.seal: Callable[..., str] | None = None  # set where a state is kept
        self.told_before: Callable[[Server, str, Identity], tuple[int, str] | None] = lambda server, log, file: None
        self.key_of: Callable[..., str] | None = (
            None  # hash of server, log and file (device, inode) or none; with `seal`
        )
        self.counted_before: Callable[[Server], Mapping[str, LogSums]] = lambda server: {}
        self._places: tuple[tuple[float, dict[str, list[Place]], dict[str, tuple[LogSums, ...]]], ...] = ()

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """Read every log on, and tell what was new and all counts.

        stallwatch_log_lines_total{server="vllm-8000",log="stdout"} 312
        A log that cannot be read is a log_bytes_total without value and with the reason; so is one whose history
        is not read to its end yet (`timeout`), so that its counters begin with the whole history.
        """
        self._now = now
        self._guards.mounts.refresh(now.monotonic)
        present = {server.name for server in scene.servers}
        refused, self._refused = self._refused, set()
        for server in scene.servers:
            yield from self._read_server(server, server.name in scene.ready, now)
        for name in [name for name in self._servers if name not in present]:
            yield from self._last_words(name, now)
        self.dropped_logs += len(self._refused - refused)
        self._note_places(now)
        self._look_out()

    def close(self) -> None:
        self._watch.close()
        for logs in self._servers.values():
            logs.close()
        self._servers = {}

    # --- one server --------------------------------------------------------------------------------------

    def _read_server(self, server: Server, ready: bool, now: Moment) -> Iterator[Observation]:
        logs = self._servers.get(server.name) or self._begin(server)
        logs.server, logs.absent_turns = server, 0
        yield from self._arrange(logs, server, now.monotonic)
        for log in logs.logs.values():
            if ready:
                log.be_ready()
            if log.told is None and self.seal is not None:
                self._pass_over(log, server)
            if log.earlier is None:
                self._look_back(log, server)
            yield from self._read_log(log, server.name, now)
            yield from self._log_readings(log, server.name, logs.before.get(log.place.name, _NOTHING))
        if any(log.catching_up for log in logs.logs.values()):
            return  # a part of the history now would be a step later
        events, errors = logs.totals()
        for event in EVENTS:
            yield _again(logs.told, event, LOG_EVENTS, float(events.get(event, 0)), server.name, event)
        for kind in ERROR_KINDS:
            yield _again(logs.told, f"error {kind}", LOG_ERRORS, float(errors.get(kind, 0)), server.name, kind)

    def _begin(self, server: Server) -> _ServerLogs:
        logs = _ServerLogs(server, server.root, LogPlaces(self._limits.logs, self._far))
        if self.key_of is not None:
            logs.unclaimed = dict(self.counted_before(server))
            if (sums := logs.unclaimed.pop(self.key_of(server, ""), None)) is not None:
                logs.given_up = _Before.of(sums.counts)
        self._servers[server.name] = logs
        return logs

    def _arrange(self, logs: _ServerLogs, server: Server, at: float) -> Iterator[Reading]:
        """Open and close logs so that they are those of the server's places, each file once."""
        logs.wanted = tuple(map(self._rooted, server.logs))
        places = _distinct(logs.places.files(logs.wanted, at))
        restarted = logs.root != server.root
        logs.root = server.root
        for name in list(logs.logs):
            place, identity = places.get(name), logs.logs[name].tail.identity
            if place is None or place.reason or (restarted and place.inode and identity != (place.device, place.inode)):
                logs.drop(name)
            elif (place.path, place.owner) != (logs.logs[name].place.path, logs.logs[name].place.owner):
                logs.logs[name].move(place)
        for name in logs.places.given_up:
            logs.give_up(name)
        room = self._limits.logs - sum(len(other.logs) for other in self._servers.values())
        for name, place in places.items():
            if place.reason == "absent" or name in logs.logs:
                continue
            if not place.reason and room <= 0:
                self._refused.add((server.name, name))
            if place.reason or room <= 0:
                yield LOG_BYTES.missing(place.reason or "error", server.name, name)
                continue
            log = logs.logs[name] = self._log(logs, place, server)
            if self.key_of is not None and logs.unclaimed:
                logs.claim(log, self.key_of(server, name))
            room -= 1

    def _log(self, logs: _ServerLogs, place: LogPlace, server: Server) -> _Log:
        framework, writer = self._framework(server.framework), _RAYS_WORKER.fullmatch(place.name)
        pid = int(writer["pid"]) if writer else 0
        tail: LogTail | JournalTail
        if place.path.startswith(JOURNAL):
            tail = JournalTail(place.path, server.started_at, lambda: self._now, root=self._root)
        else:
            tail = self._guards.tail(place.path, place.owner)
            tail.is_apart = logs.is_found
        return _Log(
            place,
            tail,
            lambda: LogScanner(framework, self._limits, writer=pid),
            lambda stream: logs.name_of(place, stream),
        )

    def _rooted(self, place: LogPlace) -> LogPlace:
        """A path that a person wrote is one of the machine that is looked at."""
        if place.owner is None or self._root == "/":
            return place
        return replace(place, path=os.path.join(self._root, place.path.lstrip("/")))

    def _framework(self, name: str) -> Framework:
        return self._frameworks.get(name) or self._frameworks[FALLBACK]

    def _last_words(self, name: str, now: Moment) -> Iterator[Observation]:
        logs = self._servers[name]
        logs.absent_turns += 1
        for log in logs.logs.values():
            yield from self._read_log(log, name, now)
            if logs.absent_turns >= LAST_WORDS_READS:
                yield from self._tell(log, name, log.finish(), now)
        if logs.absent_turns >= LAST_WORDS_READS:
            logs.close()
            del self._servers[name]

    # --- one log -----------------------------------------------------------------------------------------

    def _read_log(self, log: _Log, server: str, now: Moment) -> Iterator[Observation]:
        before = {stream: voice.bytes_read for stream, voice in log.voices.items()}
        yield from self._tell(log, server, log.read(self._turn_bytes), now)
        log.turn_done([v for stream, v in log.voices.items() if v.bytes_read > before.get(stream, 0)], now.wall)

    def _tell(self, log: _Log, server: str, heard: Iterable[_Heard], now: Moment) -> Iterator[Observation]:
        names, told = dict[int, str](), dict[str, list[Hit]]()
        for voice, batch in heard:
            if batch.names:
                names.update(batch.names)
            if batch.hits:
                of_voice = told[voice.name] = [*told.get(voice.name, ()), *batch.hits]
                if len(of_voice) > MOST_KEPT:
                    told[voice.name] = _bounded(of_voice)
        for pid, rank in names.items():
            yield RankName(server, pid, rank)
        for voice in log.voices.values():
            if voice.name not in told:
                continue
            at, modified = now.monotonic, log.modified(voice)
            if log.is_history and modified is not None and not log.told:
                at -= max(0.0, now.wall - modified)
            for hit in _told(told[voice.name]):
                yield Event(at, server, hit.event, hit.rank, voice.name, hit.fields, _dated(voice, modified, hit))

    def _log_readings(self, log: _Log, server: str, before: _Before) -> Iterator[Reading]:
        if log.is_silent:
            return
        voices: dict[str, _Voice | None] = dict(log.voices)
        for stream, voice in (voices or {"": None}).items():
            name, told = (voice.name, voice.told) if voice is not None else (log.place.name, {})
            counts = _sum(_counts(log, voice), before.streams.get(stream))
            if log.tail.reason is not None:
                yield LOG_READ_ERRORS.read(float(counts[_COUNTERS.index(LOG_READ_ERRORS)]), server, name)
                yield LOG_BYTES.missing(log.tail.reason, server, name)
                continue
            yield _again(told, LOG_BACKLOG.name, LOG_BACKLOG, float(log.tail.backlog), server, name)
            if log.catching_up:
                yield LOG_BYTES.missing("timeout", server, name)
                continue
            for signal, count in zip(_COUNTERS, counts, strict=True):
                yield _again(told, signal.name, signal, float(count), server, name)
            if voice is not None and voice.last_line is not None:
                yield _again(told, LOG_LAST_LINE.name, LOG_LAST_LINE, voice.last_line, server, name)

    # --- over a restart of ours ----------------------------------------------------------------------------

    def _pass_over(self, log: _Log, server: Server) -> None:
        """Open the log, and find out how much of it was told of before a restart."""
        for _ in log.tail.read(0):
            pass
        if (file := log.tail.identity) is None:
            return
        before, sums, now = self.told_before(server, log.place.name, file), log.sums, None
        told, mark = before or ((sums.told, sums.mark) if sums else (0, ""))  # its device may have another number now
        if told and mark and self.seal is not None:
            now = log.tail.mark(told, self.seal)
        log.told = told if now is not None and now == mark else 0
        log.is_known = bool(log.told) or (before is not None and not told)
        if sums is not None:
            is_another = bool(mark) and (now is not None or (log.tail.found or 0) < told)
            log.is_certain = bool(sums.position) and (log.is_known or not told or is_another)
        if isinstance(log.tail, JournalTail):
            log.tail.told = log.told

    def _look_back(self, log: _Log, server: Server) -> None:
        """Once a log is open: what was moved aside before we came, of a container's log since its server began."""
        is_named = log.place.owner is not None and self.seal is not None and not log.told
        if not isinstance(log.tail, LogTail) or not (is_named or is_runtimes(log.place.path)):
            log.earlier = []
            return
        if log.tail.identity is None:
            for _ in log.tail.read(0):
                pass
        if (file := log.tail.identity) is None:
            return
        path, mount, asked = log.place.path, log.tail.far_mount, f"earlier {server.name} {log.place.path}"
        if is_runtimes(path):
            log.earlier = self._far.ask(asked, mount, lambda: earlier_files(path, server.started_at, file))
        else:
            log.earlier = self._far.ask(asked, mount, lambda: self._moved_while_away(log, server))
        if log.earlier is None:
            return
        if mount is not None:
            self._far.forget([asked])
            log.chunks_of = lambda earlier: self._guards.chunks(mount, read_earlier(earlier))
        if not is_runtimes(path):
            return
        is_told = log.is_known
        for earlier in reversed(log.earlier):
            before = self.told_before(server, log.place.name, earlier.identity)
            earlier.told = ALL if is_told else before[0] if before else 0
            is_told = is_told or before is not None
        if log.earlier and not is_told:
            log.is_certain = False  # packed since, it may be, so that it is not known again

    def _moved_while_away(self, log: _Log, server: Server) -> list[Earlier]:
        """The file that was followed before a restart of ours, under another name by now, and those that came after.

        It is known by device, inode and mark.  Where it is followed under that name there is nothing to do.
        """
        is_apart = self._servers[server.name].is_found
        for files in moved_aside(log.place.path, log.place.owner).values():
            for index, file in enumerate(files):
                before = self.told_before(server, log.place.name, file.identity)
                if before is None or self.seal is None:
                    continue
                file.told, mark = before
                if file.told and mark_in(file.path, file.identity, file.told, self.seal) != mark:
                    continue
                line = in_line(files, index)
                return [] if any(is_apart(one.path) for one in line) else line
        return []

    def _note_places(self, now: Moment) -> None:
        """Keep how far every log is read as of this turn: the daemon takes the results of a turn later."""
        if self.seal is None:
            return
        places, sums = dict[str, list[Place]](), dict[str, tuple[LogSums, ...]]()
        for name, logs in self._servers.items():
            for log in logs.logs.values():
                if (file := log.tail.identity) is None or not log.is_placed:
                    continue
                stamp = file, log.tail.offset, log.tail.rotations, log.tail.truncations
                if log.marked_at != stamp:
                    log.marked_at = stamp
                    log.marked = log.tail.offset, log.tail.mark(log.tail.offset, self.seal) or ""
                places.setdefault(name, []).append((log.place.name, file, *log.marked))
            if self.key_of is not None:
                sums[name] = self._sums(logs, self.key_of)
        self._places = (*self._places[-KEPT_TURNS:], (now.monotonic, places, sums))

    def _sums(self, logs: _ServerLogs, key_of: Callable[..., str]) -> tuple[LogSums, ...]:
        """What was counted of every log of a server; of more than there is room for the events only."""
        names = dict.fromkeys((*logs.logs, *logs.before))
        rows = [row for name in names if (row := self._sums_of(logs, name, key_of)) is not None]
        rows += logs.unclaimed.values()
        rest = _Before.of(logs.given_up.counts())
        for row in rows[MOST_SUMS:]:
            rest.events.update(row.counts.events)
            rest.errors.update(row.counts.errors)
        if rest.events or rest.errors:
            rows[MOST_SUMS:] = [LogSums(key_of(logs.server, ""), "", 0, "", rest.counts())]
        return tuple(rows[: MOST_SUMS + 1])

    @staticmethod
    def _sums_of(logs: _ServerLogs, name: str, key_of: Callable[..., str]) -> LogSums | None:
        """None while nothing is known: of what is still read only what was counted before counts."""
        log, before = logs.logs.get(name), logs.before.get(name)
        if log is not None and log.kept is not None and (log.sums is not None or not log.is_placed):
            return log.kept
        if log is None or not log.is_placed:
            return None if before is None else LogSums(key_of(logs.server, name), "", 0, "", before.counts())
        tail, file, server = log.tail, log.tail.identity, logs.server
        stamp = server.root, file, log.marked, tail.bytes_read, tail.rotations, tail.truncations, tail.errors
        if log.noted is None or log.noted[0] != stamp:
            both = _Before.of(before.counts()) if before is not None else _Before()
            both.add(log)
            place = (key_of(server, name, *file), *log.marked) if file is not None else ("", 0, "")
            row = LogSums(key_of(server, name), *place, both.counts())
            log.noted = stamp, row if log.noted is None else _sharing(row, log.noted[1])
        return log.noted[1]

    def places(self, started: float) -> dict[str, list[Place]]:
        """server -> its logs, as of the turn that began at `started` (or the last one before)."""
        return next((places for at, places, _ in reversed(self._places) if at <= started), {})

    def sums(self, started: float) -> dict[str, tuple[LogSums, ...]]:
        """server -> what was counted of its logs, as of the same turn."""
        return next((sums for at, _, sums in reversed(self._places) if at <= started), {})

    # --- the next turn -------------------------------------------------------------------------------------

    def _look_out(self) -> None:
        """Come again soon when there is a backlog; watch the folders of the logs that have a path of their own."""
        followed = [log for logs in self._servers.values() for log in logs.logs.values()]
        behind = any(log.is_behind for log in followed)
        self.again_seconds = CATCH_UP_SECONDS if behind else None
        if self.wake is not None:
            near = [log.place.path for log in followed if isinstance(log.tail, LogTail) and log.tail.far_mount is None]
            paths = [path for path in near if not path.startswith(self._proc)]
            self._watch.watch({os.path.dirname(path) for path in paths})


def _distinct(places: tuple[LogPlace, ...]) -> dict[str, LogPlace]:
    """The places by name; of several that are one file the first."""
    seen: set[tuple[int, int]] = set()
    distinct: dict[str, LogPlace] = {}
    for place in places:
        identity = (place.device, place.inode)
        if place.inode and identity in seen:
            continue
        seen.add(identity)
        distinct.setdefault(place.name, place)
    return distinct


def _dated(voice: _Voice, modified: float | None, hit: Hit) -> float | None:
    """Unix time of a line: that of the last one, less the time the log printed since; None for an absurd one."""
    if hit.time is None or voice.scanner.last_time is None or modified is None:
        return None
    since = seconds_between(hit.time, voice.scanner.last_time)
    return modified - since if since < LONGEST_LOG_SECONDS else None
