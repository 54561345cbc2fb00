"""`stallwatch replay`: a recording through the timeline and the verdicts of `serve`, with the recorded clock."""

from __future__ import annotations

import gzip
import json
import math
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from .. import signals
from ..catalogue import all_signals, collectors, derived_signals, read_signals
from ..clock import Clock
from ..config import Config, Thresholds
from ..daemon import own_timeouts, ready_markers
from ..deadlines import NO_TIMEOUTS, OwnTimeouts
from ..episodes import Episodes
from ..frameworks import Framework, load_frameworks
from ..model import (
    FRONTEND,
    FRONTEND_NAMES,
    Event,
    Reading,
    Server,
    ServerReport,
    StartOutcome,
    StartupHistogram,
    Verdict,
)
from ..presentation import BAD_STATES, REASON_WORDS, duration
from ..printable import printable
from ..strict_yaml import InputError
from ..timeline import Timeline
from .format import (
    ALSO_OTHER,
    LONGEST_LINE_BYTES,
    Facts,
    Header,
    Line,
    Look,
    Pause,
    Reader,
    RecordedServer,
    known_names,
    told_servers,
    unknown_server,
)
from .rebuild import rebuilt
from .scrapes import LARGEST_ANSWER_BYTES, Scrape, is_answer, scrapes_of
from .told import NEVER_STARTED, Series, Told, sum_of

SCHEMA = 1
OTHER = "other"
"""The wait class that several recorded ones are added to."""

_GZIP = b"\x1f\x8b"
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
_BEGINNING_BYTES = 4096
_EPSILON = 1e-6
"""Seconds: decimal fractions are no binary ones."""

_PROCESS = "process_"
_THREADS = (signals.THREADS.name, signals.MAIN_THREAD.name)

Json = dict[str, Any]
Frameworks = tuple[Framework, ...] | None
"""None: those that are shipped, read only when a server needs them (that takes longer than judging ten minutes)."""


def replay(files: Sequence[str], config: Config | None, frameworks: Frameworks, output: str) -> int:
    """Print what the verdicts would have been; exit code 1 when any ends stalled or failed, else 0.

    `config` None: the thresholds that a recording's header names, else the defaults.
    """
    found: Json = {"schema": SCHEMA, "recordings": [replay_file(file, config, frameworks) for file in files]}
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if output == "json" else text(found))
    finals = [server["final"]["state"] for recording in found["recordings"] for server in recording["servers"]]
    return int(any(state in BAD_STATES for state in finals))


def replay_file(file: str, config: Config | None, frameworks: Frameworks) -> Json:
    """The verdicts of one recording.  InputError names file and line of the first mistake."""
    known = known_names(read_signals(), derived_signals())
    answer = read_answer(file)
    lines = None if answer is None else rebuilt(_scrapes(file, answer), known, collectors())
    talkative = told_servers(lines_of(file) if lines is None else lines)
    records = Reader(file, known).read(lines_of(file) if lines is None else lines)
    return {"file": file, "servers": replay_lines(records, talkative, config, frameworks)}


def _scrapes(file: str, answer: bytes) -> list[Scrape]:
    return scrapes_of(file, answer, {signal.name: signal for signal in all_signals()})


def replay_lines(
    lines: Iterable[Line], talkative: Iterable[str], config: Config | None, frameworks: Frameworks
) -> list[Json]:
    """The records of a Reader, judged.  `talkative`: the servers of which there is any event or line."""
    records = iter(lines)
    header = next(records)
    assert isinstance(header, Header)  # noqa: S101  # the reader sees to it
    run = Replay(header, frozenset(talkative), config, frameworks)
    for record in records:
        run.take(record)
    return run.finish()


# --- files -------------------------------------------------------------------------------------------------


def lines_of(file: str) -> Iterator[bytes]:
    """The lines of a recording, unpacked.  InputError when it cannot be read, or is cut off."""
    number = 0
    with _opened(file) as stream:
        try:
            while line := stream.readline(LONGEST_LINE_BYTES + 1):
                number += 1
                yield line
        except _DAMAGED:
            problem = "the packed data is damaged or cut off here; `gzip -dc FILE` shows what is before it"
            raise InputError(file, number + 1, "", problem) from None


def read_answer(file: str) -> bytes | None:
    """The file, unpacked, when it is an answer of Prometheus and no recording."""
    with _opened(file) as stream:
        try:
            beginning = stream.read(_BEGINNING_BYTES)
        except _DAMAGED:
            return None  # who reads it line by line says where
        if not is_answer(beginning):
            return None
        try:
            answer = beginning + stream.read(LARGEST_ANSWER_BYTES)
        except _DAMAGED:
            raise InputError(file, 0, "", "the packed data is damaged or cut off") from None
    if len(answer) > LARGEST_ANSWER_BYTES:
        raise InputError(file, 0, "", f"is larger than {LARGEST_ANSWER_BYTES >> 20} MiB: ask for a shorter time")
    return answer


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    """A file, unpacked while it is read."""
    try:
        kind = os.stat(file).st_mode
        if not stat.S_ISREG(kind):
            what = "a directory" if stat.S_ISDIR(kind) else "no regular file"
            raise InputError(file, 0, "", f"is {what}; a recording (.jsonl or .jsonl.gz) is needed")
        with open(file, "rb") as raw:
            is_packed = raw.peek(2)[:2] == _GZIP
            yield cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if is_packed else raw
    except OSError as error:
        raise InputError(file, 0, "", f"cannot be read: {error.strerror}") from None


# --- a whole recording -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """What the readings of one series mean.  `of` None: the node, or a card."""

    of: Told | None = None
    process: str = ""  # the process that is there when this is read
    says_life: str = ""  # the rank or engine that this says to live or not
    says_front: bool = False  # this says whether a front end lives
    share_of: tuple[str, ...] | None = None  # labels of the sum that this is a share of


_NODE = Route()
_NO_MARKERS: Mapping[str, tuple[str, ...]] = {"": ()}
_DEFAULTS = Thresholds()
_NEVER_JUDGED = Verdict("unknown", "no_evidence", 0.0)


class Replay:
    """Feeds one recording to a timeline, ticks once per interval, and keeps every change of verdict."""

    def __init__(
        self, header: Header, talkative: frozenset[str], config: Config | None, frameworks: Frameworks
    ) -> None:
        self._header, self._talkative, self._config = header, talkative, config
        self._servers: dict[str, Told] = {}
        self._routes: dict[Series, Route] = {}
        self._frameworks = frameworks
        self._markers = ready_markers(frameworks or ()) or dict(_NO_MARKERS)  # filled later, where they are not known
        self._timeouts: dict[str, OwnTimeouts] | None = None  # filled when they are asked for
        self.timeline = Timeline(self._thresholds_of, self._markers, self._timeouts_of)
        self._episodes = Episodes(self.timeline, self._thresholds_of, (config or Config()).retention)
        self._clock = Clock(header.interval_seconds)
        self._ticks = 0  # the next tick is after this many intervals
        self._earliest = 0.0  # the last tick before a pause: what was read in it counts as read then
        self._resumed = -math.inf  # `t` of the end of the last pause
        self._last: float | None = None  # `t` of the last line with readings; before there is one, of the first line
        self._looks: list[Look] = []  # of one moment, not taken yet
        self._waiting: list[Event] = []  # since that line: the next one tells whether they are in a gap
        self._changes: dict[str, list[Json]] = {}
        self._final: dict[str, Verdict] = {}
        self.reports: tuple[ServerReport, ...] = ()
        """As of the last tick."""
        self._learn(header.servers)

    def _thresholds_of(self, server: str) -> Thresholds:
        if self._config is not None:
            return self._config.thresholds_for(server)
        told = self._servers.get(server)
        return (told.recorded.thresholds if told else None) or _DEFAULTS

    def take(self, record: Line) -> None:
        if isinstance(record, Look):
            if self._looks and (self._looks[0].t, self._looks[0].interval) != (record.t, record.interval):
                self._take_looks()
            self._looks.append(record)
            return
        self._take_looks()
        if isinstance(record, Facts):
            self._learn(record.servers)
        elif isinstance(record, Pause):
            self._pause(record)
        elif isinstance(record, Event):
            self._begin(record.at)
            self._waiting.append(record)

    def _take_looks(self) -> None:
        """Lines of one moment are one look, whatever stands on which of them."""
        if not self._looks:
            return
        first, self._looks = replace(self._looks[0], readings=tuple(r for k in self._looks for r in k.readings)), []
        self._begin(first.t)
        self._come_to(first.t)
        self._look(first)

    def startups(self) -> tuple[StartupHistogram, ...]:
        """The starts that became ready so far."""
        return self._episodes.startups()

    def outcomes(self) -> Iterator[StartOutcome]:
        """How starts ended so far, and what stalls cost."""
        return self._episodes.outcomes.told()

    def finish(self) -> list[Json]:
        """Tick once more after the last line; what was found out, by server.

        Where no readings follow, the lines themselves say where a gap is.
        """
        self._take_looks()
        for event in self._waiting:
            self._waiting = [event]
            self._come_to(event.at)
        if self._last is not None:
            self._tick()
        return [self._document(name) for name in sorted(self._servers)]

    def _document(self, name: str) -> Json:
        verdict = self._final.get(name, _NEVER_JUDGED)
        final: Json = {"state": verdict.state, "reason": verdict.reason, "suspect_rank": verdict.suspect_rank}
        report = next((report for report in self.reports if report.server.name == name), None)
        if report is not None and report.deadlines:
            final["deadlines"] = {
                clock: round(at - self._header.begun, 3) for clock, at in sorted(report.deadlines.items())
            }
        return {"server": name, "changes": self._changes.get(name, []), "final": final}

    # --- the clock: a tick per interval, none in a gap

    def _begin(self, t: float) -> None:
        if self._last is None:
            self._last = t
            self._clock.tick(t)
            self._set_ticks(t)

    def _set_ticks(self, t: float) -> None:
        """The next tick is the first at `t` or later."""
        self._ticks = math.ceil((t - _EPSILON) / self._clock.tick_seconds)

    def _come_to(self, t: float) -> None:
        """Tick until a line with readings, and take what the log said until then; in a gap do so at its end."""
        assert self._last is not None  # noqa: S101  # `_begin` was called
        last = max(self._last, self._resumed)
        is_gap = self._clock.is_gap(t - last - _EPSILON)
        if is_gap:
            self._tick_before(last + 2 * _EPSILON)
            self._clock.tick(t)
            self._set_ticks(t)
        for event in self._waiting:
            at = t if is_gap else event.at
            self._tick_before(at)
            self._tell(event, at)
        self._tick_before(t)
        self._waiting, self._last = [], t

    def _pause(self, pause: Pause) -> None:
        """No tick until its end; its length is one interval."""
        if self._last is None or not self._clock.is_gap(pause.seconds):
            return
        self._come_to(pause.t)
        self._tick_before(pause.t + 2 * _EPSILON)
        self._earliest = self._clock.of(pause.t, self._earliest)
        self._clock.tick(pause.t)
        self._resumed = pause.t + pause.seconds
        self._clock.tick(self._resumed)
        self._set_ticks(self._resumed)

    def _tick_before(self, t: float) -> None:
        """Every tick before `t`: what is read at the moment of a tick belongs to it."""
        while self._ticks * self._clock.tick_seconds < t - _EPSILON:
            self._tick()

    def _tick(self) -> None:
        t = self._ticks * self._clock.tick_seconds
        self._ticks += 1
        now = self._clock.tick(t)
        self._conclude(now, t)
        self.reports = self._episodes.tick(now, self._header.begun + t)
        for report in self.reports:
            self._final[report.server.name] = report.verdict
        for change in self._episodes.changes:
            self._changes.setdefault(change.server, []).append(
                {
                    "t": round(t, 3),
                    "state": change.after.state,
                    "reason": change.after.reason,
                    "phase": change.phase,
                    "suspect_rank": change.after.suspect_rank,
                }
            )

    def _conclude(self, now: float, t: float) -> None:
        """Feed what follows from what was read; with the same clock as the readings themselves."""
        read = {name: told.last_read() for name, told in self._servers.items()}
        latest = sorted(read, key=lambda name: read[name])[-2:]
        for name, told in self._servers.items():
            if told.is_begun:
                others = max((read[other] for other in latest if other != name), default=-math.inf)
                self.timeline.put(told.conclude(now, others), now, self._clock.tick_seconds, t)

    # --- servers

    def _learn(self, servers: Iterable[RecordedServer]) -> None:
        for recorded in servers:
            self._know_markers(recorded.server)
            name = recorded.server.name
            told = self._servers.setdefault(name, Told(name, recorded, name in self._talkative))
            if told.recorded is not recorded:
                told.recorded, told.is_begun = recorded, False

    def _know_markers(self, server: Server) -> None:
        """Followers and embedded engines are ready after the last marker of their framework."""
        if server.role == "embedded" or server.node_rank > 0:
            self._known_frameworks()

    def _timeouts_of(self, framework: str) -> OwnTimeouts:
        if self._timeouts is None:
            self._timeouts = own_timeouts(self._known_frameworks())
        return self._timeouts.get(framework, NO_TIMEOUTS)

    def _known_frameworks(self) -> tuple[Framework, ...]:
        """Whoever needs them first has them read; then their markers are known too."""
        if self._frameworks is None:
            self._frameworks = load_frameworks()
            self._markers.update(ready_markers(self._frameworks))
        return self._frameworks

    def _server(self, name: str) -> Told:
        if name not in self._servers:
            self._learn([unknown_server(name)])
        return self._servers[name]

    def _see(self, told: Told, at: float) -> None:
        """What discovery does.  A start whose time is not known becomes the one whose time is told later."""
        started = 0.0 if told.started is None else told.started
        starts = 0 if told.started == NEVER_STARTED else told.starts
        self.timeline.see([replace(told.recorded.server, started_at=started, starts=starts)], at)
        told.is_begun = True
        timeline = self.timeline.of(told.name)
        if timeline is not None and told.started is None:
            timeline.start_timestamp = None

    # --- lines

    def _tell(self, event: Event, t: float) -> None:
        at, told = self._clock.of(t, self._earliest), self._server(event.server)
        if not told.is_begun:
            self._see(told, at)
        self.timeline.tell([replace(event, at=at)])

    def _look(self, look: Look) -> None:
        at, interval = self._clock.of(look.t, self._earliest), max(look.interval or 0.0, self._clock.tick_seconds)
        self._note_starts(look, at)
        readings: list[Reading] = []
        shares: list[tuple[Route, Reading]] = []
        processes: dict[tuple[str, str], tuple[Route, bool]] = {}
        routes = self._routes
        for reading in look.readings:
            key = reading.signal.name, reading.labels
            route = routes.get(key)
            if route is None:
                route = routes[key] = self._route(reading)
            told = route.of
            if told is None:
                readings.append(reading)
                continue
            if not told.is_begun:
                self._see(told, at)
            if route.says_life and reading.value is not None:
                told.ranks_said[route.says_life] = at
            if route.process:
                is_there = reading.reason != "vanished" and (not route.says_front or bool(reading.value))
                before = processes.get((told.name, route.process))
                processes[told.name, route.process] = route, is_there or (before is not None and before[1])
            if route.share_of is not None:
                shares.append((route, reading))
            elif reading.signal.name == signals.LOG_BYTES.name:
                readings.insert(0, reading)  # what was written is more than what went into the log
            elif not route.says_front:
                readings.append(reading)
        for route, is_there in processes.values():
            if route.of is not None:
                route.of.note_process(route.process, route.process in _FRONTS, is_there, at, interval)
        self.timeline.put([*readings, *self._totals(shares, at)], at, interval, look.t)

    def _note_starts(self, look: Look, at: float) -> None:
        """Another start begins before anything else of the line is read.  No start at all yet is one, too."""
        for reading in look.readings:
            name, value = reading.signal.name, reading.value
            if name == signals.SERVER_STARTS.name and value == 0:
                value = NEVER_STARTED
            elif name != signals.SERVER_START.name or value is None:
                continue
            told = self._server(reading.labels[0])
            if told.start(value):
                self._see(told, at)

    def _route(self, reading: Reading) -> Route:
        signal, labels = reading.signal, reading.labels
        if "server" not in signal.labels:
            return _NODE
        server = labels[signal.labels.index("server")]
        if not server:
            return _NODE  # what a process of no known server holds on a card
        told = self._server(server)
        if signal.name == signals.SERVER_ALIVE.name:
            told.says_alive = True
        elif signal.name == signals.LOG_BYTES.name:
            told.says_log = True
        if signal.labels[:2] != ("server", "rank"):
            return Route(told)
        rank = labels[1]
        if signal.name == signals.RANK_ALIVE.name:
            return Route(told, rank, says_front=True) if rank in _FRONTS else Route(told, says_life=rank)
        is_threads = signal.name in _THREADS
        process = rank if is_threads or signal.name.startswith(_PROCESS) else ""
        is_single = bool(process) and rank in FRONTEND_NAMES
        summed = tuple(
            FRONTEND if index == 1 and is_single else _WAITS.get(label, label) for index, label in enumerate(labels)
        )
        is_share = is_single or (is_threads and summed[-1] == OTHER)
        return Route(told, process, share_of=summed if is_share else None)

    def _totals(self, shares: Iterable[tuple[Route, Reading]], at: float) -> list[Reading]:
        """Sums over front ends that are named singly, and over waits that are one here."""
        threads: dict[Series, list[Reading]] = {}
        totals: dict[Series, tuple[Told, Reading]] = {}
        for route, reading in shares:
            if route.of is None or route.share_of is None:
                continue
            total = reading.signal.name, route.share_of
            if reading.signal.name in _THREADS:
                threads.setdefault(total, []).append(reading)
            else:
                route.of.share(reading.labels[1], reading, total)
                totals[total] = route.of, reading
        return [
            *(_sum(found, labels) for (_, labels), found in threads.items()),
            *(told.total(reading.signal, labels, at) for (_, labels), (told, reading) in totals.items()),
        ]


_FRONTS = frozenset((*FRONTEND_NAMES, FRONTEND))
_WAITS = dict.fromkeys(ALSO_OTHER, OTHER)


def _sum(readings: Sequence[Reading], labels: tuple[str, ...]) -> Reading:
    """Readings of one look together; not readable when one of them is not."""
    signal = readings[0].signal
    reasons = [reading.reason for reading in readings if reading.reason]
    if reasons:
        return signal.missing(min(reasons), *labels)
    return sum_of(readings, signal, labels)


# --- words -------------------------------------------------------------------------------------------------


def text(found: Json) -> str:
    """The document in words: every change of every server, then how it ended."""
    lines = []
    for recording in found["recordings"]:
        lines.append(printable(recording["file"]))
        for server in recording["servers"]:
            lines.append(f"  {printable(server['server'])}")
            lines += [f"    at {duration(change['t']):>6}  {_words(change)}" for change in server["changes"]]
            lines.append(f"    in the end {_words(server['final'])}")
            lines += [
                f"    at {duration(at):>6}  its own time-out would strike ({clock})"
                for clock, at in server["final"].get("deadlines", {}).items()
            ]
        if not recording["servers"]:
            lines.append("  no server")
    return "".join(f"{line}\n" for line in lines)


def _words(verdict: Json) -> str:
    """`stalled (idle_wait) in loading_weights: every thread sleeps; the others wait for TP3`."""
    words = str(verdict["state"])
    if verdict["reason"] != "none":
        words += f" ({verdict['reason']})"
    if "phase" in verdict:
        words += f" in {verdict['phase']}"
    because = [REASON_WORDS[verdict["reason"]]] if verdict["reason"] in REASON_WORDS else []
    if verdict["suspect_rank"]:
        because.append(f"the others wait for {printable(verdict['suspect_rank'])}")
    return words + (f": {', '.join(because)}" if because else "")
