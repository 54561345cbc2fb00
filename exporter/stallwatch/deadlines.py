"""When a server's own time-outs will strike: a barrier, a collective, a watchdog.

Pure: events begin and end the clocks.  What each waits for stands in docs/VERDICTS.md, "The server's own time-outs".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .model import Server
from .startup import COUNTERS, MARKERS, MOST_RANKS

STRUCK_SECONDS = 60.0
"""A time-out that did not end the server so long after its moment is none of it, or was set otherwise."""

PARALLEL = frozenset(("barrier", "nccl", "gloo", "execute"))
"""Clocks of what several processes do together: a model of one process has none."""

_ENDS: Mapping[str, frozenset[str]] = {
    "warmup": frozenset(("warmup_end",)),
    "handshake": frozenset(("listening",)),
}
"""Clock -> the events that end it; every other ends with the next marker of a rank that waits."""
_RENEWED = frozenset(("gloo",))
"""Clocks that begin anew with each step of a counter: each thing done together has the whole time."""
_OPENS_HANDSHAKE = ("start", "args")
_ALL_OVER = ("ready", "shutdown")
_RELEASE = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Limit:
    """After how many seconds the server gives up, counted from a line, in these releases."""

    clock: str
    seconds: float
    versions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnTimeouts:
    """The time-outs of one framework.

    `by_event`: event -> what it opens, oldest release first.  `serving`: clock -> seconds without a token while work
    is owed.
    """

    by_event: Mapping[str, tuple[Limit, ...]] = field(default_factory=dict)
    serving: Mapping[str, float] = field(default_factory=dict)

    def opened_by(self, event: str, version: str) -> Mapping[str, float]:
        """Clock -> seconds, by the release; of one that is not known, as the newest that was examined does it."""
        found: dict[str, float] = {}
        for limit in self.by_event.get(event, ()):
            if limit.clock not in found or not version or _is_since(limit, version):
                found[limit.clock] = limit.seconds
        return found


def _is_since(limit: Limit, version: str) -> bool:
    return not limit.versions or _release(limit.versions[0]) <= _release(version)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number[:9]) for number in _RELEASE.findall(version.partition("+")[0])[:4])


NO_TIMEOUTS = OwnTimeouts()


@dataclass(slots=True)
class Wait:
    """A clock that runs for one group of ranks, since the first of them came.  `arrived`: those that wait."""

    since: float
    seconds: float
    opened_by: str
    arrived: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Deadlines:
    """The clocks of one start that run: (clock, group of ranks) -> since when."""

    waits: dict[tuple[str, str], Wait] = field(default_factory=dict)

    def tell(self, event: str, rank: str | None, at: float, server: Server, limits: Mapping[str, float]) -> None:
        """Fold one event in, which was progress.  `limits`: what it opens, by the framework's data."""
        if event in _ALL_OVER:
            self.waits.clear()
        elif event in COUNTERS:
            self._renew(rank, at, server)
        elif event in MARKERS or event == "listening":
            self._end(event, rank, limits)
        if event in _OPENS_HANDSHAKE and server.timeouts.get("handshake"):
            self.waits.setdefault(("handshake", ""), Wait(at, server.timeouts["handshake"], event))
        for clock, seconds in limits.items():
            if clock not in PARALLEL or _group_size(clock, rank, server) > 1:
                self._open(clock, seconds, event, rank, at, server)

    def _open(self, clock: str, seconds: float, event: str, rank: str | None, at: float, server: Server) -> None:
        """The first that comes begins; when all of a barrier came it is over."""
        key = clock, _group(clock, rank, server)
        if key not in self.waits and len(self.waits) >= MOST_RANKS:
            return
        wait = self.waits.setdefault(key, Wait(at, seconds, event))
        wait.arrived.add(rank or "")
        all_are_here = server.nnodes == 1 and len(wait.arrived) >= _group_size(clock, rank, server)
        if clock == "barrier" and rank is not None and all_are_here:
            del self.waits[key]

    def _end(self, event: str, rank: str | None, opens: Mapping[str, float]) -> None:
        """A marker of a rank that waits says that the wait is over, for all of its group."""
        for key, wait in tuple(self.waits.items()):
            clock = key[0]
            if clock in opens or event == wait.opened_by:
                continue
            if clock in _ENDS:
                is_over = event in _ENDS[clock]
            else:
                is_over = rank is None or rank in wait.arrived or "" in wait.arrived
            if is_over:
                del self.waits[key]

    def _renew(self, rank: str | None, at: float, server: Server) -> None:
        for (clock, group), wait in self.waits.items():
            if clock in _RENEWED and (rank is None or group == _group(clock, rank, server)):
                wait.since = at

    def running(self, now: float, told: Mapping[str, float]) -> dict[str, float]:
        """Clock -> the moment at which it strikes, of several the first.  `told`: seconds the server was told."""
        ends = ((clock, wait.since + told.get(clock, wait.seconds)) for (clock, _), wait in self.waits.items())
        return soonest((clock, at) for clock, at in ends if told.get(clock, 1.0) > 0 and now <= at + STRUCK_SECONDS)


def soonest(ends: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for clock, at in ends:
        found[clock] = min(at, found.get(clock, at))
    return found


def serving_deadlines(
    now: float, unserved: float, server: Server, serving: Mapping[str, float], ranks: int
) -> dict[str, float]:
    """Clocks that run since a token was owed, `unserved` seconds ago."""
    found = {}
    for clock, default in serving.items():
        seconds = server.timeouts.get(clock, default)
        is_one = ranks <= 1 and clock in PARALLEL
        if seconds > 0 and not is_one and unserved <= seconds + STRUCK_SECONDS:
            found[clock] = now - unserved + seconds
    return found


def ranks_of_a_copy(server: Server) -> int:
    """How many ranks run one copy of the model, on all nodes together."""
    named = len({name for name in server.expected_ranks if _parts(name, ("DP",)) == _parts(_first(server), ("DP",))})
    return max(named, server.tensor_parallel * server.pipeline_parallel)


def _first(server: Server) -> str:
    return server.expected_ranks[0] if server.expected_ranks else ""


def _group(clock: str, rank: str | None, server: Server) -> str:
    """Which ranks wait for each other: of a barrier one stage of the pipeline, else one copy of the model.

    With attention-only data parallelism the copies share their ranks, and all wait for all.
    """
    if rank is None:
        return ""
    dimensions = (*(("DP",) if server.data_parallel > 1 else ()), *(("PP",) if clock == "barrier" else ()))
    return _parts(rank, dimensions)


def _parts(rank: str, dimensions: tuple[str, ...]) -> str:
    return "-".join(part for part in rank.split("-") if part.startswith(dimensions)) if dimensions else ""


def _group_size(clock: str, rank: str | None, server: Server) -> int:
    group = _group(clock, rank, server)
    named = sum(1 for name in server.expected_ranks if _group(clock, name, server) == group)
    by_arguments = server.tensor_parallel * (1 if clock == "barrier" else server.pipeline_parallel)
    return max(named, by_arguments)
