"""Every server's log, whole and then followed: counts for `/metrics`, events for the verdict.

What a line means is decided in lines, how bytes are got in tail; here both meet the servers of the
Scene.  Never a word of a log leaves: events, numbers and names of ranks only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from ...config import Config
from ...frameworks import Framework
from ...model import ERROR_KINDS, EVENTS, Event, LogPlace, Observation, RankName, Reading, Scene, Server, Signal
from ...signals import LOG_BYTES
from .. import Host, Moment
from .counters import (
    COUNTERS,
    LOG_BACKLOG,
    LOG_ERRORS,
    LOG_EVENTS,
    LOG_LAST_LINE,
    LOG_READ_ERRORS,
    NOTHING,
    Before,
    Voice,
    counts_of,
    sum_of,
)
from .followed import FollowedLog, Heard
from .guard import Guards, Questions
from .hits import MOST_KEPT, bounded, dated, told_of
from .journal import PLACE as JOURNAL
from .journal import JournalTail
from .lines import Hit, LogScanner
from .mounts import Mounts
from .of_server import Calm, ServerLogs
from .past import Past
from .places import LogPlaces
from .tail import FolderWatch, LogTail

READ_BYTES = 32 << 20
"""Most bytes read of one log in one turn, so that a long history does not delay the other logs."""
CATCH_UP_SECONDS = 0.05
"""Pause before the next turn while some log has a backlog."""
LAST_WORDS_READS = 5
"""Turns for which the logs of a server that is gone are still read: a fatal line may come after the death."""
ALERT_SECONDS = 15.0
"""For so long every log of a server is read in each turn when a process of it came or went: why may be told later."""
FALLBACK = "generic"

_RAYS_WORKER = re.compile(r"worker-[0-9a-f]{1,80}-[0-9a-f]{1,20}-(?P<pid>[0-9]{1,9})\.(?:out|err)")
"""The files of Ray's workers are named by id, job and PID; their lines do not say who wrote them."""


class Logs:
    """The source `logs`.

    `wake`, when set, is called as soon as a file appears, moves or goes in a folder of a followed log; the
    regular reads find the same without it.
    """

    name: ClassVar[str] = "logs"
    signals: ClassVar[tuple[Signal, ...]] = (
        *COUNTERS,
        LOG_BACKLOG,
        LOG_LAST_LINE,
        LOG_EVENTS,
        LOG_ERRORS,
    )

    def __init__(self, host: Host, turn_bytes: int = READ_BYTES) -> None:
        self._turn_bytes = turn_bytes
        self._limits, self._interval = host.config.limits, host.config.intervals.logs
        self._frameworks = {framework.name: framework for framework in host.frameworks}
        self._events = {each.name: frozenset(pattern.event for pattern in each.patterns) for each in host.frameworks}
        self._servers: dict[str, ServerLogs] = {}
        self._watch = FolderWatch(self.folder_changed)
        self._changes = self._changes_seen = 0  # of folders of followed logs
        self._proc = os.path.join(str(host.proc), "")
        self._root = str(host.root)
        self._guards = Guards(Mounts(str(host.proc)), host.read_deadline_seconds)
        self._far = Questions(self._guards)
        self._now = Moment(0.0, 0.0)
        self.wake: Callable[[], None] | None = None
        self.again_seconds: float | None = None
        self.dropped_logs = 0  # logs that found no room, so far
        self._refused: set[tuple[str, str]] = set()  # server and log, at the last turn
        self.past = Past(self._guards, self._far)

    def configure(self, config: Config) -> None:
        self._limits, self._interval = config.limits, config.intervals.logs

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """Read every log on, and tell what was new and all counts.

        stallwatch_log_lines_total{server="vllm-8000",log="stdout"} 312
        A log that cannot be read is a log_bytes_total without value and with the reason; so is one whose history
        is not read to its end yet (`timeout`), so that its counters begin with the whole history.
        """
        self._now = now
        news = self._changes_seen != (changes := self._changes)
        self._changes_seen = changes
        busy = {server.name for server in scene.servers if news or not self._is_calm(server, scene, now.monotonic)}
        present = {server.name for server in scene.servers}
        gone = [name for name in self._servers if name not in present]
        if busy:
            self._guards.mounts.refresh(now.monotonic)
        refused, self._refused = self._refused, set()
        for server in scene.servers:
            if server.name in busy:
                yield from self._read_server(server, server.name in scene.ready, news, now)
            if (calm := self._servers[server.name].calm) is not None:
                yield from calm.readings
        for name in gone:
            yield from self._last_words(name, now)
        if not busy and not gone:
            return
        self.dropped_logs += len(self._refused - refused)
        self.past.note(self._servers, now)
        self._look_out()

    def rests(self, scene: Scene, at: float) -> bool:
        """Whether no log is to be read at `at`, nothing is to be looked for, and the servers are who they were."""
        if self._changes_seen != self._changes or len(scene.servers) != len(self._servers):
            return False
        return all(self._is_calm(server, scene, at) for server in scene.servers)

    def folder_changed(self) -> None:
        self._changes += 1
        if self.wake is not None:
            self.wake()

    def close(self) -> None:
        self._watch.close()
        for logs in self._servers.values():
            logs.close()
        self._servers = {}

    # --- one server --------------------------------------------------------------------------------------

    def _is_calm(self, server: Server, scene: Scene, at: float) -> bool:
        logs = self._servers.get(server.name)
        is_known = logs is not None and logs.is_calm(server, server.name in scene.ready, at)
        return is_known and bool(server.processes or server.logs)

    def _read_server(self, server: Server, ready: bool, news: bool, now: Moment) -> Iterator[Observation]:
        """Read what is due; what is then told of the server is its `calm`, but for a history that is still read.

        `news`: a folder changed, it may be one of its logs; a process that came or went is news too, and a server that
        is not ready any more.
        """
        logs = self._servers.get(server.name) or self._begin(server)
        if logs.server.processes != server.processes:
            news, logs.alert_until = True, now.monotonic + ALERT_SECONDS
        news = news or (logs.is_ready and not ready)
        logs.server, logs.is_ready, logs.absent_turns = server, ready, 0
        if logs.limits is not self._limits:
            logs.take(self._limits)
        yield from self._arrange(logs, server, now.monotonic)
        seen = [log for log in logs.logs.values() if not log.is_hidden]
        due = [log for log in seen if news or log.due <= now.monotonic]
        if not due and logs.calm is not None:
            logs.calm.until = logs.calm_until()
            return
        if due:
            logs.stir()
        for log in due:
            if ready:
                log.be_ready()
            self.past.open(logs, log)
            yield from self._read_log(log, server.name, now)
            log.rest(ready and now.monotonic >= logs.alert_until, now.monotonic, self._interval)
            log.last_readings = tuple(self._log_readings(log, server.name, logs.before.get(log.place.name, NOTHING)))
        of_logs = [reading for log in seen for reading in log.last_readings]
        if any(log.catching_up for log in due):
            yield from of_logs
            return  # a part of the history now would be a step later
        counts = _counts(logs, server.name, self._events.get(server.framework, EVENTS))
        logs.calm = Calm((*of_logs, *counts), logs.calm_until())

    def _begin(self, server: Server) -> ServerLogs:
        logs = ServerLogs(server, server.root, LogPlaces(self._limits.logs, self._far))
        self.past.begin(logs)
        self._servers[server.name] = logs
        return logs

    def _arrange(self, logs: ServerLogs, server: Server, at: float) -> Iterator[Reading]:
        """Open and close logs so that they are those of the server's places, each file once.

        When no process is left that shows where the server writes, all stay: its last words are still to be read.
        """
        if not server.processes and not server.logs:
            logs.show()
            return
        if logs.named is not server.logs:
            logs.named, logs.wanted = server.logs, tuple(map(self._rooted, server.logs))
        found, restarted = logs.places.files(logs.wanted, at), logs.root != server.root
        if found is logs.arranged and not restarted and not logs.places.given_up:
            return
        logs.arranged = None
        places = _distinct(found)
        if restarted:
            logs.stir()
        logs.root = server.root
        _keep(logs, places, restarted)
        room = self._limits.logs - sum(len(other.logs) for other in self._servers.values())
        for name, place in places.items():
            if place.reason == "absent" or (name in logs.logs and not place.reason):
                continue
            if not place.reason and room <= 0:
                self._refused.add((server.name, name))
            if place.reason or room <= 0:
                yield LOG_BYTES.missing(place.reason or "error", server.name, name)
                continue
            log = logs.logs[name] = self._log(logs, place, server)
            logs.stir()
            self.past.claim(logs, log)
            room -= 1
        if all(place.reason == "absent" or (name in logs.logs and not place.reason) for name, place in places.items()):
            logs.arranged = found

    def _log(self, logs: ServerLogs, place: LogPlace, server: Server) -> FollowedLog:
        framework, writer = self._framework(server.framework), _RAYS_WORKER.fullmatch(place.name)
        pid = int(writer["pid"]) if writer else 0
        tail: LogTail | JournalTail
        if place.path.startswith(JOURNAL):
            tail = JournalTail(place.path, server.started_at, lambda: self._now, root=self._root)
        else:
            tail = self._guards.tail(place.path, place.owner)
            tail.is_apart = logs.is_found
        return FollowedLog(
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
        logs.stir()
        for log in logs.logs.values():
            yield from self._read_log(log, name, now)
            log.rest(False, now.monotonic, self._interval)  # should the server come again, its log is read
            if logs.absent_turns >= LAST_WORDS_READS:
                yield from self._tell(log, name, log.finish(), now)
        if logs.absent_turns >= LAST_WORDS_READS:
            logs.close()
            del self._servers[name]

    # --- one log -----------------------------------------------------------------------------------------

    def _read_log(self, log: FollowedLog, server: str, now: Moment) -> Iterator[Observation]:
        before = {stream: voice.bytes_read for stream, voice in log.voices.items()}
        yield from self._tell(log, server, log.read(self._turn_bytes), now)
        log.turn_done([v for stream, v in log.voices.items() if v.bytes_read > before.get(stream, 0)], now.wall)

    def _tell(self, log: FollowedLog, server: str, heard: Iterable[Heard], now: Moment) -> Iterator[Observation]:
        names, told = dict[int, str](), dict[str, list[Hit]]()
        for voice, batch in heard:
            if batch.names:
                names.update(batch.names)
            if batch.hits:
                of_voice = told[voice.name] = [*told.get(voice.name, ()), *batch.hits]
                if len(of_voice) > MOST_KEPT:
                    told[voice.name] = bounded(of_voice)
        for pid, rank in names.items():
            yield RankName(server, pid, rank)
        for voice in log.voices.values():
            if voice.name not in told:
                continue
            at, modified = now.monotonic, log.modified(voice)
            if log.is_history and modified is not None and not log.told:
                at -= max(0.0, now.wall - modified)
            for hit in told_of(told[voice.name]):
                yield Event(at, server, hit.event, hit.rank, voice.name, hit.fields, dated(voice, modified, hit))

    def _log_readings(self, log: FollowedLog, server: str, before: Before) -> Iterator[Reading]:
        if log.is_silent:
            return
        voices: dict[str, Voice | None] = dict(log.voices)
        for stream, voice in (voices or {"": None}).items():
            name, told = (voice.name, voice.told) if voice is not None else (log.place.name, {})
            counts = sum_of(counts_of(log.tail, voice), before.streams.get(stream))
            if log.tail.reason is not None:
                yield LOG_READ_ERRORS.read(float(counts[COUNTERS.index(LOG_READ_ERRORS)]), server, name)
                yield LOG_BYTES.missing(log.tail.reason, server, name)
                continue
            yield _again(told, LOG_BACKLOG.name, LOG_BACKLOG, float(log.tail.backlog), server, name)
            if log.catching_up:
                yield LOG_BYTES.missing("timeout", server, name)
                continue
            for signal, count in zip(COUNTERS, counts, strict=True):
                yield _again(told, signal.name, signal, float(count), server, name)
            if voice is not None and voice.last_line is not None:
                yield _again(told, LOG_LAST_LINE.name, LOG_LAST_LINE, voice.last_line, server, name)

    # --- the next turn -------------------------------------------------------------------------------------

    def _look_out(self) -> None:
        """Come again soon when there is a backlog; watch the folders of the logs that have a path of their own."""
        behind, folders = False, set[str]()
        for logs in self._servers.values():
            if logs.calm is None:
                behind = behind or any(log.is_behind for log in logs.logs.values() if not log.is_hidden)
                folders |= self._folders(logs)
                continue
            if logs.calm.folders is None:
                logs.calm.folders = self._folders(logs)
                behind = behind or any(log.is_behind for log in logs.logs.values() if not log.is_hidden)
            folders |= logs.calm.folders
        self.again_seconds = CATCH_UP_SECONDS if behind else None
        if self.wake is not None:
            self._watch.watch(folders)

    def _folders(self, logs: ServerLogs) -> set[str]:
        near = (log for log in logs.logs.values() if isinstance(log.tail, LogTail) and log.tail.far_mount is None)
        return {os.path.dirname(log.place.path) for log in near if not log.place.path.startswith(self._proc)}


def _counts(logs: ServerLogs, server: str, named: Collection[str]) -> list[Reading]:
    """What was counted in all logs of a server; `named`: the events that are there from 0 on."""
    events, errors = logs.totals()
    of_events = [
        _again(logs.told, event, LOG_EVENTS, float(events.get(event, 0)), server, event)
        for event in EVENTS
        if event in named or event in events
    ]
    told = logs.told_errors
    of_errors = [_again(told, kind, LOG_ERRORS, float(errors.get(kind, 0)), server, kind) for kind in ERROR_KINDS]
    return of_events + of_errors


def _again(told: dict[str, Reading], key: str, signal: Signal, value: float, *labels: str) -> Reading:
    """The reading, which is the one told before when it says the same: most of them do, and to make one costs more."""
    reading = told.get(key)
    if reading is None or reading.value != value:
        reading = told[key] = signal.read(value, *labels)
    return reading


def _keep(logs: ServerLogs, places: Mapping[str, LogPlace], restarted: bool) -> None:
    """Of the logs that are followed keep those that are places still.

    One whose place cannot be looked at this time is only hidden: opened anew it would count its lines a second time.
    """
    logs.show()
    for name in list(logs.logs):
        log, place = logs.logs[name], places.get(name)
        if place is None or place.reason == "absent" or (restarted and _is_another(place, log.tail.identity)):
            logs.drop(name)
        elif place.reason:
            logs.hide(name)
        elif (place.path, place.owner) != (log.place.path, log.place.owner):
            logs.stir()
            log.move(place)
    for name in logs.places.given_up:
        logs.give_up(name)


def _is_another(place: LogPlace, followed: tuple[int, int] | None) -> bool:
    """Whether a place of a new start is not known to be the file that was followed before."""
    return bool(place.reason) or (place.inode != 0 and followed != (place.device, place.inode))


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
