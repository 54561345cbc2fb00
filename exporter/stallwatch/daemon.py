"""The tick: latest results -> timeline -> verdicts -> Report.

Owns the clock.  The Report is published by one assignment (`publish`); nobody waits for a tick, and a tick
waits for nobody: a source that hangs is seen as one whose results are old.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from . import signals
from .bell import Bell
from .clock import Clock
from .config import Config, Thresholds
from .deadlines import NO_TIMEOUTS, Limit, OwnTimeouts
from .episodes import Episodes
from .frameworks import Framework
from .kept import Document
from .memory import Memory, Place
from .model import (
    Listener,
    LogSums,
    ProcessId,
    Reading,
    Report,
    Result,
    Scene,
    Server,
    ServerReport,
    Signal,
)
from .poller import Poller, is_urgent
from .rights import NO_RIGHT
from .server_timeline import ServerTimeline
from .sources import Host
from .sources.logs.collector import Logs
from .sources.procfs import CLOCK_TICKS
from .timeline import Timeline, news_of

log = logging.getLogger(__name__)

RESULTS_CURRENT_INTERVALS = 3
"""Readings of an older result are not exported."""

MOST_RANK_NAMES = 4096

CYCLES_TO_KNOW = 3
"""Reads behind the first that found servers after which every source has seen what the others found: the first may
have been under way, then come sockets, then answers."""

LOG_SILENCE = Signal(
    "log_silence_seconds",
    "Seconds since the last line of the log arrived (for a log found on start: since the file's last change).",
    ("server", "log"),
    "log",
)
LOG_PROGRESS_SILENCE = Signal(
    "log_progress_silence_seconds",
    "Seconds since the last line of the log that shows progress arrived.",
    ("server", "log"),
    "log",
)
NO_PROCESS = ProcessId(0, 0)
"""Root of a configured server that has not come."""

LAST_LINE = "log_last_line_timestamp_seconds"


class Daemon:
    """Pollers, timeline, verdicts.  `report` is the last published one."""

    def __init__(
        self,
        host: Host,
        pollers: Callable[[Callable[[], Scene], Callable[[Result], None]], Iterable[Poller]],
        publish: Callable[[Report], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        witness: Callable[[Result, float, float], None] | None = None,
        memory: Memory | None = None,
        no_right: str = NO_RIGHT,
    ) -> None:
        """`witness` is told of every result that is taken, with its time on our clock and its source's interval.

        `memory`: what was known before a restart of ours.  `no_right`: see Episodes.
        """
        self.config: Config = host.config
        self._publish, self._monotonic, self._wall, self._witness = publish, monotonic, wall, witness
        self._memory = memory
        self._wake = Bell()
        self._stopping = False
        self.scene = Scene()
        self.pollers = tuple(pollers(lambda: self.scene, self._notice))
        self._clock = Clock(self.config.intervals.tick)
        self._timeline = Timeline(
            thresholds_of=self._thresholds_of,
            ready_markers=ready_markers(host.frameworks),
            timeouts_of=partial(_known_timeouts, own_timeouts(host.frameworks)),
        )
        self._episodes = Episodes(self._timeline, self._thresholds_of, self.config.retention, no_right)
        self._latest: dict[str, Result] = {}
        self._seen_roots: set[ProcessId] = set()
        self._awaited: set[str] = set()  # sources woken for a new server, whose next result ticks at once
        self._arrivals: dict[tuple[str, ...], tuple[float, float]] = {}  # log -> its last line as Unix time, when seen
        self._now = 0.0
        self._config_reload = (True, wall())
        self.report: Report | None = None
        self.tell_pause: Callable[[float, float], None] = lambda since, until: None
        """Told from when to when (monotonic) no clock counts, before what was read meanwhile is taken."""

    def _thresholds_of(self, server: str) -> Thresholds:
        return self.config.thresholds_for(server)

    # --- life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        for poller in self.pollers:
            poller.start()

    def run(self) -> None:
        """Tick until `stop`.  A bug in the tick is not caught: the process ends rather than lie."""
        while not self._stopping:
            self._wake.wait(self.config.intervals.tick)
            if not self._stopping:
                self.tick()

    def stop(self) -> None:
        """End `run`; may be called from a signal handler."""
        self._stopping = True
        self._wake.ring()

    def close(self, seconds: float = 1.0) -> None:
        """End the pollers; sources whose thread ended are closed, one that hangs is left behind with its own."""
        for poller in self.pollers:
            poller.stop()
        until = time.monotonic() + seconds
        for poller in self.pollers:
            if poller.join(max(0.0, until - time.monotonic())):
                poller.source.close()
            else:
                poller.leave()

    def reconfigure(self, config: Config | None) -> None:
        """Take a new configuration, or note that the new one was wrong (None)."""
        if config is None:
            self._config_reload = (False, self._config_reload[1])
            return
        self.config, self._config_reload = config, (True, self._wall())
        self._clock.tick_seconds, self._episodes.retention = config.intervals.tick, config.retention
        for poller in self.pollers:
            poller.interval = config.intervals.of(poller.source.name)
            if (configure := getattr(poller.source, "configure", None)) is not None:
                configure(config)

    def _notice(self, result: Result) -> None:
        """Called by the pollers: a first look (at a new server too) or a certain sign ticks at once.

        A process that went missing is known dead at the next look; whether the kernel killed it is read until then.
        """
        if is_loss(result):
            for poller in self.pollers:
                if poller.source.name == "node":
                    poller.wake()
        if result.source not in self._latest or result.source in self._awaited or is_urgent(result):
            self._awaited.discard(result.source)
            self._wake.ring()

    def once(self, seconds: float) -> Report:
        """One complete cycle: every source has read once with all servers known, or `seconds` are over."""
        self.start()
        until = time.monotonic() + seconds
        goals: dict[Poller, int] | None = None
        finds = {poller.source.name for poller in self.pollers} & {"processes"}
        reads: dict[Poller, tuple[int, float]] = {}
        while time.monotonic() < until:
            time.sleep(0.05)
            self.gather()
            self._wake_rested(reads, time.monotonic())
            if goals is None and finds <= self._latest.keys():
                goals = {poller: poller.finished + CYCLES_TO_KNOW for poller in self.pollers}
            if goals is not None and all(poller.finished >= goal for poller, goal in goals.items()):
                break
        return self.tick()

    def _wake_rested(self, reads: dict[Poller, tuple[int, float]], now: float) -> None:
        """Let each poller read again; means need time in between.  `reads`: how many, since when."""
        for poller in self.pollers:
            if reads.get(poller, (-1, now))[0] != poller.finished:
                reads[poller] = poller.finished, now
            if now - reads[poller][1] >= poller.mean_seconds:
                poller.wake()

    # --- one tick ---------------------------------------------------------------------------------------

    def tick(self, dated: bool = False) -> Report:
        """Take what the sources found, judge, publish.  `dated`: see Episodes.tick (`check`)."""
        monotonic, wall, now = self.gather()
        servers = self._episodes.tick(now, wall, self._dated() if dated else None)
        self._show_learned(monotonic, now)
        self._log_changes()
        self._set_scene(servers)
        report = self._make_report(servers, monotonic, wall)
        self.report = report
        self._publish(report)
        return report

    def _show_learned(self, monotonic: float, now: float) -> None:
        """What was learned of cards goes into a recording too: it may rest on more than the recording holds."""
        if self._witness is not None and (learned := self._timeline.cards.learned(now)):
            result = Result("cards", monotonic, monotonic, readings=tuple(learned))
            self._witness(result, now, self.config.intervals.tick)

    def gather(self) -> tuple[float, float, float]:
        """Take what the sources found since the last time; (monotonic, Unix, clock) of this moment."""
        earliest = self._now
        results = sorted((r for p in self.pollers for r in p.take()), key=lambda result: result.finished)
        monotonic, wall = self._monotonic(), self._wall()  # behind what was taken: nothing is read in the future
        skipped = self._clock.skipped
        self._now = now = self._clock.tick(monotonic)
        if self._clock.skipped > skipped:
            log.warning("pause not counted", extra={"seconds": round(self._clock.skipped - skipped, 1)})
            self.tell_pause(earliest + skipped, monotonic)
        last = {result.source: result for result in results}
        for result in results:
            self._take(result, earliest, says_nothing=says_the_same(result, last[result.source]))
        return monotonic, wall, now

    def _take(self, result: Result, earliest: float, says_nothing: bool = False) -> None:
        """`says_nothing`: a later result of this tick says the same.  It is put, too, and when it was first said."""
        before, self._latest[result.source] = self._latest.get(result.source), result
        at = self._clock.of(result.finished, earliest)
        is_news = before is None or result.readings is not before.readings
        news = None if before is None else news_of(before.readings, result.readings)
        if result.source == Logs.name and result.error is None and is_news:
            self._note_arrivals(result, news, at)
        if result.servers is not None:
            self._timeline.see(result.servers, at)
            self._recall(result.servers, at, result.finished)
        interval = max(self.config.intervals.of(result.source), self.config.intervals.tick)
        if self._witness is not None:
            self._witness(result, at, interval)
        if says_nothing and not is_news:
            return
        readings: Iterable[Reading] = result.readings
        if self._memory is not None:
            readings = self._memory.settle(self._timeline, readings, at)
        self._timeline.put(readings, at, interval, result.finished, result.source, news)
        pause = result.finished - at
        events = (replace(event, at=event.at - pause) for event in result.events) if pause else result.events
        self._timeline.tell(events)
        if result.servers is not None:
            self.scene = replace(self.scene, servers=result.servers)
            self._wake_others(result)
        if result.listeners is not None:
            self._see_listeners(_distinct(result.listeners))
        if result.gpu_uses is not None:
            self.scene = replace(self.scene, gpu_uses=result.gpu_uses)
        if result.rank_names:
            known = dict.fromkeys((*self.scene.rank_names, *result.rank_names))
            self.scene = replace(self.scene, rank_names=tuple(known)[-MOST_RANK_NAMES:])

    def _recall(self, servers: Iterable[Server], at: float, measured: float) -> None:
        """What was known of servers before a restart of ours is known again before their first readings."""
        if self._memory is None:
            return
        names = self._memory.meet(self._timeline, self._episodes, servers, at, measured)
        if names:
            self.scene = replace(self.scene, rank_names=(*self.scene.rank_names, *names)[-MOST_RANK_NAMES:])

    def remembered(self) -> Document | None:
        """All that is known as of the last tick, as a document (see memory); None when nothing is kept."""
        if self._memory is None:
            return None
        places: Mapping[str, Iterable[Place]] = {}
        sums: Mapping[str, Iterable[LogSums]] = {}
        for poller in self.pollers:
            latest = self._latest.get(poller.source.name)
            if latest is not None and isinstance(poller.source, Logs):
                places, sums = poller.source.past.places(latest.started), poller.source.past.sums(latest.started)
        monotonic = self._now + self._clock.skipped
        return self._memory.document(
            self._timeline, self._episodes, self.scene.rank_names, places, self._now, monotonic, sums
        )

    def _see_listeners(self, listeners: tuple[Listener, ...]) -> None:
        """A port that opened is asked now, not an interval of `endpoints` later."""
        opened = set(listeners) - set(self.scene.listeners)
        self.scene = replace(self.scene, listeners=listeners)
        for poller in self.pollers:
            if opened and poller.source.name == "endpoints":
                poller.wake()

    def _wake_others(self, result: Result) -> None:
        """A server came: the other sources look at it now, not an interval later."""
        seen = {server.root for server in result.servers or ()}
        if seen - self._seen_roots:
            for poller in self.pollers:
                if poller.source.name != result.source:
                    self._awaited.add(poller.source.name)
                    poller.wake()
        self._seen_roots = seen

    def _set_scene(self, servers: Iterable[ServerReport]) -> None:
        ready = frozenset(report.server.name for report in servers if report.ready)
        if ready != self.scene.ready:
            self.scene = replace(self.scene, ready=ready)

    def _dated(self) -> dict[str, float]:
        """server -> Unix time of its last progress: the log's last progress line, or its youngest process."""
        dated = {}
        for timeline in self._timeline:
            moments = [timeline.startup.last_dated, _youngest(timeline)]
            known = [moment for moment in moments if moment is not None]
            if known:
                dated[timeline.name] = max(known)
        return dated

    def _make_report(self, servers: tuple[ServerReport, ...], monotonic: float, wall: float) -> Report:
        current = [r for r in self._latest.values() if self._is_current(r, monotonic)]
        readings = [reading for result in current for reading in result.readings if reading.value is not None]
        return Report(
            timestamp=wall,
            monotonic=monotonic,
            readings=(*readings, *self._silences(current), *self._concluded()),
            servers=servers,
            health=tuple(poller.health() for poller in self.pollers if not poller.is_absent),
            read_errors={
                (poller.source.name, reason): count
                for poller in self.pollers
                if not poller.is_absent
                for reason, count in poller.read_errors().items()
            },
            startups=self._episodes.startups(),
            config_reload=self._config_reload,
            dropped=self._dropped(),
            outcomes=tuple(self._episodes.outcomes.told()),
        )

    def _concluded(self) -> Iterator[Reading]:
        """What is told, but by no reading: demand by lines of the log, what cards take at rest."""
        for timeline in self._timeline:
            yield from timeline.told_demand(self._now)
        yield from self._timeline.cards.learned(self._now)

    def _dropped(self) -> dict[str, int]:
        sources = [poller.source for poller in self.pollers]
        counts = {
            f"{what}_limit": sum(int(getattr(source, f"dropped_{what}", 0)) for source in sources)
            for what in ("servers", "ranks", "logs")
        }
        return {**counts, "kinds_limit": self._episodes.outcomes.dropped}

    def _is_current(self, result: Result, monotonic: float) -> bool:
        interval = max(self.config.intervals.of(result.source), self.config.intervals.tick)
        return result.error is None and monotonic - result.finished <= RESULTS_CURRENT_INTERVALS * interval

    def _note_arrivals(self, result: Result, news: Iterable[Reading] | None, at: float) -> None:
        """When the last line of each log came, by the Unix time of the very look that saw it first.

        The wall clock may step between that look and the next one, or the tick.  `news`: see `news_of`.
        """
        before, wall = self._arrivals, result.wall or 0.0
        self._arrivals = arrivals = {} if news is None else before
        for reading in result.readings if news is None else news:
            if reading.signal.name != LAST_LINE:
                continue
            known = before.get(reading.labels)
            if reading.value is None:
                arrivals.pop(reading.labels, None)
            elif known is None or known[0] != reading.value:
                arrivals[reading.labels] = reading.value, at - max(0.0, wall - reading.value)
            else:
                arrivals[reading.labels] = known

    def _silences(self, results: Iterable[Result]) -> list[Reading]:
        """Ages of the logs as of this Report; no step of the wall clock changes them."""
        if not any(result.source == Logs.name for result in results):
            return []
        silences = list[Reading]()
        for (server, name), (_, arrived) in self._arrivals.items():
            silences.append(LOG_SILENCE.read(max(0.0, self._now - arrived), server, name))
            timeline = self._timeline.of(server)
            moved = timeline.progress_by_log.get(name) if timeline else None
            if moved is not None:
                silences.append(LOG_PROGRESS_SILENCE.read(max(0.0, self._now - moved), server, name))
        return silences

    def _log_changes(self) -> None:
        for change in self._episodes.changes:
            log.info(
                "verdict changed",
                extra={
                    "server": change.server,
                    "before": change.before.state if change.before else "none",
                    "state": change.after.state,
                    "reason": change.after.reason,
                    "rank": change.after.suspect_rank or "",
                    "phase": change.phase,
                },
            )


def says_the_same(result: Result, later: Result) -> bool:
    """Whether a result brings nothing but the very readings of a later one of its source."""
    if result is later or result.readings is not later.readings or result.error is not None or later.error is not None:
        return False
    found = result.servers, result.listeners, result.gpu_uses
    return not result.events and not result.rank_names and all(each is None for each in found)


def is_loss(result: Result) -> bool:
    """A rank, an engine or the first process of a server was not there at this look, for the first time or again."""
    if result.servers is None:
        return False
    if any(reading.reason == "vanished" and reading.signal == signals.RANK_ALIVE for reading in result.readings):
        return True
    started = (server for server in result.servers or () if server.root != NO_PROCESS)
    return any(all(process.id != server.root for process in server.processes) for server in started)


def ready_markers(frameworks: Iterable[Framework]) -> dict[str, tuple[str, ...]]:
    return {framework.name: framework.embedded_ready for framework in frameworks}


def own_timeouts(frameworks: Iterable[Framework]) -> dict[str, OwnTimeouts]:
    """Framework -> its own time-outs.  Of an event that several lines mean, the framework's own line counts."""
    return {framework.name: _own_timeouts(framework) for framework in frameworks}


def _own_timeouts(framework: Framework) -> OwnTimeouts:
    by_event: dict[str, list[Limit]] = {}
    for pattern in framework.patterns:
        for event in (pattern.event, *([pattern.again] if pattern.again else [])) if pattern.clock else ():
            limits = by_event.setdefault(event, [])
            if not limits or limits[0].clock == pattern.clock:
                limits.append(Limit(pattern.clock, pattern.timeout_seconds, pattern.versions))
    return OwnTimeouts(
        by_event={event: tuple(limits) for event, limits in by_event.items()},
        serving={clock: timeout.seconds for clock, timeout in framework.timeouts.items() if timeout.serving},
    )


def _known_timeouts(known: Mapping[str, OwnTimeouts], framework: str) -> OwnTimeouts:
    return known.get(framework, NO_TIMEOUTS)


def _distinct(listeners: Iterable[Listener]) -> tuple[Listener, ...]:
    return tuple(dict.fromkeys(listeners))


def _youngest(timeline: ServerTimeline) -> float | None:
    """Unix time at which the youngest process of the server started."""
    server = timeline.server
    if server is None or not server.processes:
        return None
    youngest = max(process.id.start_ticks for process in server.processes)
    return server.started_at + (youngest - server.root.start_ticks) / CLOCK_TICKS
