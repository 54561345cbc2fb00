"""A recording from what Prometheus kept of one exporter, so that last night's stall can be judged again.  Pure.

The readings are those of `/metrics`.  What the logs said is not in Prometheus, but what follows from it is: how many
lines of which event, the phase and load progress of every rank, when a log last showed progress.  The events are
made from these, at the resolution of the scrapes: right in kind and time, not in number.  No verdict is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from .. import signals
from ..config import Thresholds
from ..derived import (
    CHANNEL_AGE,
    RANK_LOAD_PROGRESS,
    RANK_PHASE_NUMBER,
    RANKS_EXPECTED,
    READ_ERRORS,
    SERVER_PHASE_NUMBER,
)
from ..model import ERROR_KINDS, EVENTS, PHASES, Event, LogPlace, ProcessId, Reading, Server, Signal, is_rank_name
from ..startup import COUNTERS, MARKERS, NAMELESS, PHASE_OF_EVENT, PROGRESS_EVENTS
from .format import event_line, header_line, look_line, server_document
from .scrapes import Scrape, Series

LOG_EVENTS, LOG_ERRORS = "log_events_total", "log_errors_total"

USUAL_MARKER: Mapping[str, str] = {
    "distributed_init": "dist_init_begin",
    "loading_weights": "load_begin",
    "post_load": "load_end",
    "memory_pool": "memory_pool",
    "compiling": "compile_begin",
    "capturing_graphs": "capture_begin",
    "warming_up": "warmup_begin",
}
"""What brings a rank into a phase of which no marker was counted."""

SAID_ONCE = ("heartbeat", "waiting", "lock_wait", "watchdog", "access")
"""Never progress: one line of each says as much as many."""

LEAST_INTERVAL, USUAL_INTERVAL = 1.0, 15.0


def rebuilt(scrapes: Sequence[Scrape], known: Mapping[str, Signal | None], reader_of: Mapping[str, str]) -> list[bytes]:
    """The lines of the recording.

    `known`: signals by name, None for those that are derived; `reader_of`: name of a signal -> its collector.
    """
    gaps = [after.at - before.at for before, after in pairwise(scrapes)]
    interval = max(LEAST_INTERVAL, median(gaps)) if gaps else USUAL_INTERVAL
    tellers = [_Teller(server, scrapes) for server in _servers(scrapes)]
    begun = scrapes[0].at
    lines = [header_line(interval, begun, [server_document(teller.server, Thresholds()) for teller in tellers])]
    before: Scrape | None = None
    for scrape in scrapes:
        told = [event for teller in tellers for event in teller.tell(scrape, before)]
        lines += [event_line(event.at - begun, event) for event in sorted(told, key=lambda event: event.at)]
        readings = [*_readings(scrape, known), *_lost(scrape, before, known, reader_of)]
        lines.append(look_line(scrape.at - begun, "prometheus", interval, readings))
        before = scrape
    return [line.encode() for line in lines]


# --- readings ----------------------------------------------------------------------------------------------


def _readings(scrape: Scrape, known: Mapping[str, Signal | None]) -> Iterator[Reading]:
    for (name, labels), value in scrape.values.items():
        if (signal := known.get(name)) is not None:
            yield Reading(signal, labels, value)


def _lost(
    scrape: Scrape, before: Scrape | None, known: Mapping[str, Signal | None], reader_of: Mapping[str, str]
) -> Iterator[Reading]:
    """Series that are there no more: 0 where a 0 is shown so, else what their collector says it cannot read."""
    if before is None:
        return
    reasons = {
        labels[0]: labels[1]
        for (name, labels), value in scrape.values.items()
        if name == READ_ERRORS.name and value > before.values.get((name, labels), 0.0)
    }
    for name, labels in before.values.keys() - scrape.values.keys():
        signal = known.get(name)
        if signal is None:
            continue
        if signal.zero_is_absent:
            yield signal.read(0.0, *labels)
        elif (reason := reasons.get(reader_of.get(name, ""))) is not None:
            yield signal.missing(reason, *labels)


# --- servers -----------------------------------------------------------------------------------------------


def _servers(scrapes: Iterable[Scrape]) -> list[Server]:
    """Every server there was, as it was last described."""
    infos: dict[str, Mapping[str, str]] = {}
    seen: dict[str, dict[Series, None]] = {}
    wanted: dict[str, int] = {}
    for scrape in scrapes:
        infos |= scrape.info
        for series in scrape.values:
            if series[0] in _OF_SERVERS:
                seen.setdefault(series[1][0], {})[series] = None
        wanted |= {
            labels[0]: int(value) for (name, labels), value in scrape.values.items() if name == RANKS_EXPECTED.name
        }
    return [_server(name, infos[name], seen.get(name, {}), wanted.get(name, 0)) for name in sorted(infos) if name]


_OF_SERVERS = (signals.RANK_ALIVE.name, signals.PORT_LISTENING.name, signals.LOG_BYTES.name)
"""What says which ranks, ports and logs a server has."""


def _server(name: str, info: Mapping[str, str], seen: Iterable[Series], wanted: int) -> Server:
    by_signal: dict[str, list[str]] = {}
    for signal, labels in seen:
        by_signal.setdefault(signal, []).append(labels[1])
    ports = [int(port) for port in by_signal.get(signals.PORT_LISTENING.name, ()) if port.isdecimal()]
    ranks = tuple(rank for rank in by_signal.get(signals.RANK_ALIVE.name, ()) if is_rank_name(rank))
    return Server(
        name=name,
        framework=info.get("framework") or "generic",
        role="embedded" if info.get("role") == "embedded" else "server",
        root=ProcessId(0, 0),
        started_at=0.0,
        processes=(),
        logs=tuple(LogPlace(log) for log in by_signal.get(signals.LOG_BYTES.name, ())),
        ports=tuple(ports),
        version=info.get("version", ""),
        model=info.get("model", ""),
        tensor_parallel=_number(info, "tensor_parallel", 1),
        pipeline_parallel=_number(info, "pipeline_parallel", 1),
        data_parallel=_number(info, "data_parallel", 1),
        expected_ranks=ranks if len(ranks) >= wanted else (),
        nnodes=_number(info, "nnodes", 1),
        node_rank=_number(info, "node_rank", 0),
        group=info.get("group", ""),
        speculative=info.get("speculative", ""),
    )


def _number(info: Mapping[str, str], label: str, least: int) -> int:
    text = info.get(label, "")
    return max(least, int(text)) if text.isdecimal() and len(text) < 7 else least


# --- what the logs said ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Gap:
    """What changed of one server from one scrape to the next.

    `at`: when its log last moved, if it moved in the gap, else the scrape; `fresh`: lines by event.
    """

    at: float
    moved: bool
    fresh: Counter[str]
    events: list[Event] = field(default_factory=list)


class _Teller:
    """Makes the events of one server from what was counted of them."""

    def __init__(self, server: Server, scrapes: Sequence[Scrape]) -> None:
        self.server = server
        self._ranks = server.expected_ranks
        self._log = server.logs[0].name if server.logs else ""
        self._counted: Counter[str] = Counter()
        """Lines by event up to the last scrape: the k of counters, whose n is the number of all."""
        self._loads = sorted(
            {
                series
                for scrape in scrapes
                for series in scrape.values
                if series[0] == RANK_LOAD_PROGRESS.name and series[1][0] == server.name
            }
        )
        self._held: dict[str, int] = {}
        """Lines of counters of the last gap, in which the log is not known to have moved."""
        self._says_phases = any(self._rises(event, scrapes) for event in PHASE_OF_EVENT)
        self._markers = self._markers_by_phase(scrapes)
        self._all = Counter({event: self._rises(event, scrapes) for event in COUNTERS})

    def _rises(self, event: str, scrapes: Sequence[Scrape]) -> int:
        series = LOG_EVENTS, (self.server.name, event)
        counts = [0.0, *(scrape.values[series] for scrape in scrapes if series in scrape.values)]
        return int(sum(max(0.0, after - before) for before, after in pairwise(counts)))

    def _markers_by_phase(self, scrapes: Sequence[Scrape]) -> dict[str, list[str]]:
        """Phase -> its markers that were counted at any time, in the order of a start; else the usual one."""
        of_phases = RANK_PHASE_NUMBER.name, SERVER_PHASE_NUMBER.name
        reached = {
            PHASES[int(value)]
            for scrape in scrapes
            for (name, labels), value in scrape.values.items()
            if name in of_phases and labels[0] == self.server.name and 0 <= value < len(PHASES)
        }
        found: dict[str, list[str]] = {phase: [] for phase in PHASES}
        for event in EVENTS:
            if event in MARKERS and self._rises(event, scrapes):
                found[PHASE_OF_EVENT[event]].append(event)
        for phase, marker in USUAL_MARKER.items():
            found[phase] = found[phase] or [marker] * (phase in reached)
        return found

    def tell(self, scrape: Scrape, before: Scrape | None) -> list[Event]:
        """The events between two scrapes; before the first one, how far the start had come."""
        name = self.server.name
        age = scrape.values.get((CHANNEL_AGE.name, (name, "log")))
        earlier = scrape.at if before is None else before.at
        moved_at = None if age is None or before is None or scrape.at - age <= earlier else scrape.at - age
        gap = _Gap(moved_at or scrape.at, moved_at is not None, self._fresh(LOG_EVENTS, scrape, before))
        self._begin(gap)
        self._pass_phases(gap, scrape, before)
        self._load(gap, scrape, before)
        if before is not None:
            self._other_progress(gap)
        self._trouble(gap, self._fresh(LOG_ERRORS, scrape, before) if before is not None else Counter())
        self._counted += gap.fresh
        return gap.events

    def _fresh(self, signal: str, scrape: Scrape, before: Scrape | None) -> Counter[str]:
        """Lines by event (or kind) since the scrape before.  A counter that fell was counted anew: nothing is new."""
        found: Counter[str] = Counter()
        for kind in EVENTS if signal == LOG_EVENTS else ERROR_KINDS:
            series = signal, (self.server.name, kind)
            known = 0.0 if before is None else before.values.get(series, 0.0)
            found[kind] = int(max(0.0, scrape.values.get(series, 0.0) - known))
        return found

    def _say(self, gap: _Gap, event: str, rank: str | None = None, **fields: float | str) -> None:
        gap.events.append(Event(gap.at, self.server.name, event, rank, self._log, fields))

    def _begin(self, gap: _Gap) -> None:
        """The first words of a start."""
        for event in ("start", "args"):
            if gap.fresh[event]:
                self._say(gap, event)

    def _pass_phases(self, gap: _Gap, scrape: Scrape, before: Scrape | None) -> None:
        """Ranks that are in a later phase than before have passed its markers; so has a server without ranks."""
        name, unclaimed = self.server.name, gap.fresh.copy()
        places: list[tuple[str | None, Series]] = [
            (rank, (RANK_PHASE_NUMBER.name, (name, rank))) for rank in self._ranks
        ]
        if not any(series in scrape.values for _, series in places):
            places = [(None, (SERVER_PHASE_NUMBER.name, (name,)))]
        for rank, series in places:
            number = int(scrape.values.get(series, 0.0))
            earlier = 0 if before is None else int(before.values.get(series, 0.0))
            for marker in self._passed(earlier, number) if self._says_phases else ():
                self._say(gap, marker, rank)
                unclaimed[marker] -= 1
        for event in MARKERS:
            for _ in range(min(unclaimed[event], 1) if before is not None else 0):
                self._say(gap, event, None, **_nobodys(self._ranks))
        for event in ("listening", "ready"):
            if gap.fresh[event]:
                self._say(gap, event)

    def _passed(self, earlier: int, number: int) -> Iterator[str]:
        """What a rank said on its way between two phases, by their numbers.

        Who of a phase wrote which marker is not known.  So a rank has the first one of the phase it is in and all of
        those it left, whenever they were counted: ranks in one phase are equally far.
        """
        for place in range(max(0, earlier), min(number, len(PHASES) - 1)):
            yield from self._markers[PHASES[place]][1:]
            yield from self._markers[PHASES[place + 1]][:1]

    def _load(self, gap: _Gap, scrape: Scrape, before: Scrape | None) -> None:
        for series in self._loads:
            ratio = scrape.values.get(series)
            if ratio is not None and (before is None or before.values.get(series) != ratio):
                self._say(gap, "load_progress", series[1][1], ratio=ratio)

    def _other_progress(self, gap: _Gap) -> None:
        """Counters of which only the number of lines is known; of a log that moved otherwise it is not known how."""
        said = {event.event for event in gap.events}
        for event in COUNTERS - said:
            fresh, held = gap.fresh[event], self._held.pop(event, 0)
            if gap.moved and fresh + held and event != "load_progress":
                done, total = self._counted[event] + fresh, self._all[event]
                self._say(gap, event, done=float(done), total=float(max(done, total)))
            elif fresh:
                self._say(gap, "heartbeat")  # a bar that is drawn again and stands, or the log's clock is behind
                self._held[event] = fresh
        if gap.moved and not any(event.event in PROGRESS_EVENTS for event in gap.events):
            self._say(gap, "novel")

    def _trouble(self, gap: _Gap, kinds: Counter[str]) -> None:
        worst = next((kind for kind in kinds if kinds[kind]), "other")
        for event in ("error", "fatal"):
            if gap.fresh[event]:
                self._say(gap, event, kind=worst)
        for event in (*SAID_ONCE, "shutdown"):
            if gap.fresh[event]:
                self._say(gap, event)


def _nobodys(ranks: Sequence[str]) -> dict[str, float | str]:
    """Fields of a marker that may be any rank's: it is progress, and says nothing of who is ahead."""
    return {NAMELESS: 1.0} if ranks else {}
