"""What a Prometheus would hold that scraped some nodes while the recordings of the corpus happened.

Each recording is one node.  It goes through the code of `stallwatch replay`, and every 15 s the report of the moment is
rendered by the exporter's own code, as /metrics would have been.  So names, labels and verdicts are those of the
exporter.  What a recording does not hold is added here, at rest: the host's memory, the collectors' health, the log's
lines as counted from its events, figures of cards that no verdict needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recordings.corpus import make
from recordings.played import frameworks
from recordings.stage import WALL, Stage
from stallwatch import signals
from stallwatch.catalogue import all_signals, derived_signals, read_signals
from stallwatch.config import COLLECTORS
from stallwatch.exposition import Exposition, OwnMetric
from stallwatch.model import ERROR_KINDS, EVENTS, Event, Reading, Report, Signal, SourceHealth
from stallwatch.recordings.format import Facts, Header, Line, Look, Pause, Reader, known_names
from stallwatch.recordings.replay import Replay

SCRAPE_SECONDS = 15.0
END = 1_700_003_700.0
"""Unix time of the last page of every node."""

JOB = "stallwatch"
GIB = 1 << 30
LOG = "stdout"

_BY_NAME = {signal.name: signal for signal in all_signals()}
_HELD_SECONDS = 3 * SCRAPE_SECONDS
_SLOW_HELD_SECONDS = 100.0
"""Health is asked every 30 s."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node.  `until`: seconds of the recording after which nobody looks any more."""

    instance: str
    case: str
    facts: Mapping[str, Any]
    until: float | None = None


STALL = Node("node-1:10077", "collective-spins", {"version": "0.5.9", "model": "org/model-70b", "tensor_parallel": 4})
SLOW_START = Node(
    "node-2:10077", "h41-laggard", {"version": "0.5.9", "model": "org/model-547b", "tensor_parallel": 4}, until=690.0
)
SERVING = Node("node-3:10077", "owed-at-620-w", {"version": "0.32.0", "model": "org/model-8b", "tensor_parallel": 2})
LOCKED = Node("node-4:10077", "h22-stale-ops-lock", {"version": "0.5.9", "model": "org/model-8b"})
DEADLOCK = Node(
    "node-5:10077", "silent-deadlock", {"version": "0.5.9", "model": "org/model-547b", "tensor_parallel": 8}
)
NODES = (
    STALL,
    SLOW_START,
    SERVING,
    LOCKED,
    DEADLOCK,
    Node(
        "node-6:10077",
        "restarted-after-hang",
        {"version": "0.5.9", "model": "org/model-8b", "tensor_parallel": 2, "speculative": "EAGLE"},
    ),
    Node("node-7:10077", "no-log", {"model": "org/model-8b", "tensor_parallel": 2}),
    Node("node-8:10077", "driver-hangs", {"version": "0.5.9", "model": "org/model-70b", "tensor_parallel": 2}),
    Node("node-9:10077", "h56-weights-processed", {"model": "org/model-405b", "tensor_parallel": 2}),
)


def openmetrics(nodes: Iterable[Node] = NODES) -> Iterator[str]:
    """Lines for `promtool tsdb create-blocks-from openmetrics`."""
    for node in nodes:
        for at, page in pages(node):
            lines = [line for line in page.splitlines() if not line.startswith("#")]
            for line in (*lines, "up 1", "scrape_duration_seconds 0.004", f"scrape_samples_scraped {len(lines)}"):
                yield f"{_labelled(line, node.instance)} {at:.3f}\n"
    yield "# EOF\n"


def _labelled(line: str, instance: str) -> str:
    name, bracket, rest = re.split(r"([{ ])", line, maxsplit=1)
    own = f'{{job="{JOB}",instance="{instance}"'
    return f"{name}{own},{rest}" if bracket == "{" else f"{name}{own}}} {rest}"


def pages(node: Node) -> Iterator[tuple[float, str]]:
    """(Unix time, /metrics of that moment), every 15 s; the last is at END."""
    stage = make(node.case)
    last = min(stage.t, node.until or stage.t)
    begun = END - last // SCRAPE_SECONDS * SCRAPE_SECONDS
    player = Player(node, begun)
    exposition, due = Exposition(revision="0f1e2d3", python="3.12.7"), SCRAPE_SECONDS
    for record in Reader(node.case, known_names(read_signals(), derived_signals())).read(_lines(stage, node, begun)):
        at = record.at if isinstance(record, Event) else record.t if isinstance(record, Look) else 0.0
        while at > due and due <= last:
            yield begun + due, exposition.page(player.report(due), player.own(due)).text(openmetrics=False).decode()
            due += SCRAPE_SECONDS
        player.take(record)
    while due <= last:
        yield begun + due, exposition.page(player.report(due), player.own(due)).text(openmetrics=False).decode()
        due += SCRAPE_SECONDS


def _lines(stage: Stage, node: Node, begun: float) -> Iterator[bytes]:
    """The recording as if it had begun at `begun`, with what is known of its servers."""
    header = stage.header()
    servers = [{**server, **node.facts} for server in header["servers"]]
    yield json.dumps({**header, "servers": servers, "begun_timestamp_seconds": begun}).encode()
    for line in stage.lines:
        for reading in line.get("readings", ()):
            if reading[0] == signals.SERVER_START.name:
                reading[2] += begun - WALL
        yield json.dumps(line).encode()


@dataclass(slots=True)
class Voice:
    """What was counted of one log."""

    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENTS, 0))
    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ERROR_KINDS, 0))
    unmatched: int = 0
    last_at: float = 0.0

    def take(self, event: Event) -> None:
        self.last_at = event.at
        if event.event in self.events:
            self.events[event.event] += 1
        else:
            self.unmatched += 1
        if event.event in ("error", "fatal"):
            self.errors[str(event.fields.get("kind", "other"))] += 1

    @property
    def lines(self) -> int:
        return sum(self.events.values()) + self.unmatched


class Player:
    """Replays one node and tells its report at any moment between."""

    def __init__(self, node: Node, begun: float) -> None:
        self._node, self._begun = node, begun
        self._run: Replay | None = None
        self._held: dict[tuple[str, tuple[str, ...]], tuple[float, Reading]] = {}
        self._voices: dict[str, Voice] = {}
        self._errors: dict[tuple[str, str], int] = {}

    def take(self, record: Line) -> None:
        if isinstance(record, Header):
            talkative = frozenset(each.server.name for each in record.servers if each.log is True)
            self._voices = {name: Voice() for name in talkative}
            self._run = Replay(record, talkative, None, frameworks())
            return
        assert self._run is not None
        assert not isinstance(record, Facts | Pause)
        self._run.take(record)
        if isinstance(record, Event):
            self._voices.setdefault(record.server, Voice()).take(record)
            return
        for reading in record.readings:
            self._held[_key(reading)] = record.t, reading
            if reading.reason is not None:
                collector = "gpu" if reading.signal.scope == "gpu" else "processes"
                key = collector, reading.reason
                self._errors[key] = self._errors.get(key, 0) + 1

    def report(self, now: float) -> Report:
        assert self._run is not None
        current = [
            reading
            for at, reading in self._held.values()
            if now - at <= (_SLOW_HELD_SECONDS if reading.signal.name.startswith("health_") else _HELD_SECONDS)
        ]
        shown = [_described(reading) for reading in current if reading.value is not None]
        known = {(reading.signal.name, reading.labels) for reading in shown}
        cards = self._run.timeline.cards.learned(now)
        added = [*self._of_logs(now), *_at_rest(shown, now, self._begun), *cards]
        return Report(
            timestamp=self._begun + now,
            monotonic=now,
            readings=(*shown, *(each for each in added if (each.signal.name, each.labels) not in known)),
            servers=self._run.reports,
            health=tuple(_health(collector, now, shown) for collector in COLLECTORS),
            read_errors=self._errors,
            startups=self._run.startups(),
            outcomes=tuple(self._run.outcomes()),
            config_reload=(True, self._begun),
            dropped={f"{what}_limit": 0 for what in ("servers", "ranks", "logs", "kinds")},
        )

    @staticmethod
    def own(now: float) -> tuple[OwnMetric, ...]:
        return (
            OwnMetric("process_cpu_seconds_total", "counter", "CPU", 0.4 + 0.011 * now),
            OwnMetric("process_resident_memory_bytes", "gauge", "Memory", 52e6 + 400 * now),
            OwnMetric("process_open_fds", "gauge", "Descriptors", 210),
        )

    def _of_logs(self, now: float) -> Iterator[Reading]:
        assert self._run is not None
        for server, voice in self._voices.items():
            timeline = self._run.timeline.of(server)
            progress = max(timeline.progress_by_log.values(), default=None) if timeline else None
            values: dict[str, float] = {
                "log_lines_total": voice.lines,
                "log_unmatched_lines_total": voice.unmatched,
                "log_heartbeat_lines_total": voice.events["heartbeat"],
                "log_bytes_total": 90 * voice.lines,
                "log_backlog_bytes": 0,
                "log_rotations_total": 0,
                "log_truncations_total": 0,
                "log_read_errors_total": 0,
                "log_last_line_timestamp_seconds": self._begun + voice.last_at,
                "log_silence_seconds": max(0.0, now - voice.last_at),
            }
            if progress is not None:
                values["log_progress_silence_seconds"] = max(0.0, now - progress)
            for name, value in values.items():
                yield _BY_NAME[name].read(value, server, LOG)
            for event, count in voice.events.items():
                yield _BY_NAME["log_events_total"].read(count, server, event)
            for kind, count in voice.errors.items():
                yield _BY_NAME["log_errors_total"].read(count, server, kind)


_ONE_OF = ("main_thread", "port_connect")
"""Signals of which only the present word is exported."""


def _key(reading: Reading) -> tuple[str, tuple[str, ...]]:
    name, labels = reading.signal.name, reading.labels
    return name, labels[:-1] if name in _ONE_OF else labels


def _described(reading: Reading) -> Reading:
    """Every card of the corpus is called `card`, index 0."""
    if reading.signal.name != "gpu_info":
        return reading
    labels = dict(zip(reading.signal.labels, reading.labels, strict=True))
    number = labels["gpu"].rpartition("-")[2]
    labels |= {"index": number, "name": "NVIDIA H100 80GB HBM3", "pci_bus_id": f"00000000:{number}8:00.0"}
    return replace(reading, labels=tuple(labels.values()))


def _at_rest(shown: Sequence[Reading], now: float, begun: float) -> Iterator[Reading]:
    """What no recording of the corpus holds."""
    node: dict[str, float] = {
        "node_memory_total_bytes": 2048 * GIB,
        "node_memory_available_bytes": 1790 * GIB - min(now, 120.0) * GIB,
        "node_memory_cached_bytes": 340 * GIB + min(now, 120.0) * 2 * GIB,
        "node_shm_used_bytes": 2.1 * GIB,
        "node_shm_orphan_bytes": 0.2 * GIB,
        "unidentified_processes": 0,
    }
    for name, value in node.items():
        yield _BY_NAME[name].read(value)
    if any(reading.signal.name == "gpu_info" for reading in shown):
        yield _BY_NAME["gpu_call_in_flight_seconds"].read(0)
    for reading in shown:
        match reading.signal.name:
            case "port_listening":
                server, port = reading.labels
                yield _BY_NAME["port_connect"].read(1, server, port, "ok" if reading.value else "refused")
                yield _BY_NAME["port_foreign"].read(0, server, port)
                if reading.value:
                    yield _BY_NAME["port_accept_queue"].read(0, server, port)
            case "server_starts_total":
                for name, value in {"frozen": 0, "paused": 0, "stopping": 0, "scope_alive": 1}.items():
                    yield _BY_NAME[f"server_{name}"].read(value, *reading.labels)
            case "rank_alive":  # somebody looks at it for a minute
                yield _BY_NAME["rank_traced"].read(200 <= now < 260, *reading.labels)
            case "health_status":
                yield _BY_NAME["health_duration_seconds"].read(0.004 + now % 60 / 2e4, *reading.labels)
            case "gpu_info":
                yield from _of_card(reading.labels[0], now, begun)


def _of_card(gpu: str, now: float, begun: float) -> Iterator[Reading]:
    number = int(gpu.rpartition("-")[2])
    values = {"memory_total_bytes": 80 * GIB, "temperature_celsius": 38 + number + now % 45 / 30, "recovery_action": 0}
    for name, value in values.items():
        yield _BY_NAME[f"gpu_{name}"].read(value, gpu)
    if number == 1 and now >= 200:
        yield _BY_NAME["gpu_xid_errors_total"].read(1, gpu, "13")
        yield _BY_NAME["gpu_xid_last_timestamp_seconds"].read(begun + 200, gpu, "13")


_DURATIONS = dict(zip(COLLECTORS, (0.041, 0.018, 0.009, 0.006, 0.087, 0.012, 0.002), strict=True))


def _health(collector: str, now: float, shown: Iterable[Reading]) -> SourceHealth:
    """All is well, but a call into the driver that does not return is the gpu collector's."""
    in_flight = max((r.value or 0.0 for r in shown if r.signal.name == "gpu_call_in_flight_seconds"), default=0.0)
    if collector == "gpu" and in_flight:
        return SourceHealth(collector, False, 5.0, now - in_flight - 2, now - in_flight)
    return SourceHealth(collector, True, _DURATIONS[collector] * (1 + now % 60 / 240), now - 2, None)


def signals_by_metric() -> dict[str, Signal]:
    """Metric name -> signal, of everything the exporter can export."""
    return {f"stallwatch_{name}": signal for name, signal in _BY_NAME.items()}
