"""The logs of one server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ...config import Limits
from ...model import LogPlace, LogSums, ProcessId, Reading, Server
from .counters import Before, total_of
from .followed import FollowedLog
from .opened import Identity
from .places import LogPlaces

Place = tuple[str, Identity, int, str]
"""One followed log: name, file, bytes of the file that were read, and their mark."""

MOST_CLOSED = 64
"""Closed logs of a server whose own counts are kept, in case their names come again; of older ones the events only.
A server that writes each start to a log of another name leaves one behind with every start."""


@dataclass(slots=True)
class Calm:
    """What is told of a server in every turn that goes by without reading a log of it.

    `until`: when one is to be read, or files are to be looked for again (monotonic seconds).
    None = not known yet: `folders` of its logs, and `noted` of them for a state: how far they are read, and their sums.
    """

    readings: tuple[Reading, ...]
    until: float
    folders: set[str] | None = None
    noted: tuple[list[Place], tuple[LogSums, ...]] | None = None


@dataclass(slots=True)
class ServerLogs:
    """The logs of one server name, over its starts.

    `unclaimed`: what was counted before a restart of ours of logs that are not there (yet), by the hash of the log.
    """

    server: Server
    root: ProcessId
    places: LogPlaces
    named: tuple[LogPlace, ...] | None = None  # by discovery: places and patterns
    wanted: tuple[LogPlace, ...] = ()  # the same, on the machine that is looked at
    arranged: tuple[LogPlace, ...] | None = None  # the files whose logs are all followed; None = to be arranged
    logs: dict[str, FollowedLog] = field(default_factory=dict)
    before: dict[str, Before] = field(default_factory=dict)  # by place
    given_up: Before = field(default_factory=Before)  # events of places that are no more
    unclaimed: dict[str, LogSums] = field(default_factory=dict)
    absent_turns: int = 0
    is_ready: bool = False  # as of the last turn that looked at it
    alert_until: float = float("-inf")  # monotonic seconds: until then no log rests, for a process came or went
    calm: Calm | None = None  # None = a log was read, opened or closed since
    told: dict[str, Reading] = field(default_factory=dict)  # the readings of the last turn, by event
    told_errors: dict[str, Reading] = field(default_factory=dict)  # the same, by kind
    limits: Limits | None = None  # that were taken last

    def is_calm(self, server: Server, ready: bool, at: float) -> bool:
        """Whether the turn at `at` has nothing to do here, and tells what the one before told."""
        calm = self.calm
        if calm is None or self.arranged is None or self.absent_turns or ready != self.is_ready:
            return False
        return at < calm.until and (server is self.server or server == self.server)

    def calm_until(self) -> float:
        """When a log is to be read next, or files are to be looked for (monotonic seconds)."""
        return min((self.places.holds_until, *(log.due for log in self.logs.values() if not log.is_hidden)))

    def take(self, limits: Limits) -> None:
        """From now on; a reload may have changed them."""
        self.limits, self.places.most_files = limits, limits.logs
        for voice in [voice for log in self.logs.values() for voice in log.voices.values()]:
            voice.scanner.line_bytes = limits.line_bytes

    def stir(self) -> None:
        """What was told last does not hold any more."""
        self.calm = None

    def hide(self, name: str) -> None:
        self.stir()
        self.logs[name].is_hidden = True

    def show(self) -> None:
        """None is hidden any more."""
        for log in self.logs.values():
            if log.is_hidden:
                self.stir()
                log.is_hidden = False

    def drop(self, name: str) -> None:
        """Close a log; what it counted stays counted."""
        self.stir()
        log = self.logs.pop(name)
        if log.sums is not None:
            self.unclaimed[log.sums.key] = log.sums
            self.before.pop(name, None)
        else:
            self.before[name] = before = self.before.pop(name, None) or Before()  # the last one closed comes last
            before.add(log.tail, log.voices)
        log.tail.close()
        closed = [name for name in self.before if name not in self.logs]
        for oldest in closed[:-MOST_CLOSED]:
            self.give_up(oldest)

    def give_up(self, name: str) -> None:
        """Nobody will ask for this log again; its events stay counted."""
        self.stir()
        if (before := self.before.pop(name, None)) is not None:
            self.given_up.events.update(before.events)
            self.given_up.errors.update(before.errors)

    def claim(self, log: FollowedLog, key: str) -> None:
        """Let a log that was opened go on from what was counted of it before a restart of ours."""
        log.sums = log.kept = self.unclaimed.pop(key, None)
        if log.sums is not None:
            log.before = self.before[log.place.name] = Before.of(log.sums.counts)

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
            total_of([one.events for part in (closed, elsewhere, open_ones) for one in part]),
            total_of([one.errors for part in (closed, elsewhere, open_ones) for one in part]),
        )
