"""One server on a timeline, fed the way the sources do it: what the tests of timeline and episodes share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stallwatch import signals
from stallwatch.config import Thresholds
from stallwatch.episodes import Episodes
from stallwatch.model import Event, Process, ProcessId, Reading, Server, ServerReport, Verdict
from stallwatch.server_timeline import ServerTimeline
from stallwatch.timeline import MIB, Timeline

TICK = 5.0
WALL = 1_700_000_000.0
"""Unix time of second 0 of the tests' clock."""


def server(name: str = "s", *, started_at: float = WALL, **facts: Any) -> Server:
    return Server(
        name=name,
        framework=facts.pop("framework", "sglang"),
        role=facts.pop("role", "server"),
        root=ProcessId(100, 1),
        started_at=started_at,
        processes=facts.pop("processes", (Process(ProcessId(100, 1), "main"),)),
        **facts,
    )


@dataclass(slots=True)
class Counters:
    """What one rank's process has done so far; a stuck one still does a little (docs/NOISE.md, rows a c d)."""

    cpu: float = 100.0
    minor: float = 200_000.0
    major: float = 100.0
    storage: float = 5e9
    read: float = 1e9
    written: float = 1e6
    resident: float = 5e9

    def idle(self, seconds: float) -> None:
        """The noise of a stuck process."""
        self.cpu += 0.009 * seconds
        self.minor += 2 / 60 * seconds
        self.read += 0.2 * MIB / 60 * seconds


@dataclass(slots=True)
class Serving:
    """What the server's own metrics and its endpoints say; None = not asked for."""

    running: float | None = None
    waiting: float | None = None
    generated: float | None = None
    prompt: float | None = None
    finished: float | None = None
    health: float | None = None
    timeouts: float | None = None  # of the health endpoint, so far
    paused: float | None = None
    foreign: float | None = None  # another process has its port

    def readings(self, name: str) -> list[Reading]:
        plain = {
            signals.REQUESTS_RUNNING: self.running,
            signals.REQUESTS_WAITING: self.waiting,
            signals.GENERATED_TOKENS: self.generated,
            signals.PROMPT_TOKENS: self.prompt,
            signals.FINISHED_REQUESTS: self.finished,
            signals.SERVER_PAUSED: self.paused,
        }
        labelled = {
            (signals.HEALTH_STATUS, "health"): self.health,
            (signals.HEALTH_TIMEOUTS, "health"): self.timeouts,
            (signals.PORT_FOREIGN, "8000"): self.foreign,
        }
        return [
            *(signal.read(value, name) for signal, value in plain.items() if value is not None),
            *(signal.read(value, name, label) for (signal, label), value in labelled.items() if value is not None),
        ]


class SayingAgain:
    """Makes of the readings of each source what it is that comes from a source: what did not change is the same."""

    def __init__(self) -> None:
        self._known: dict[str, dict[tuple[str, tuple[str, ...]], Reading]] = {}

    def __call__(self, source: str, readings: Iterable[Reading]) -> tuple[Reading, ...]:
        before = self._known.get(source, {})
        now = {(reading.signal.name, reading.labels): reading for reading in readings}
        now = {key: before[key] if before.get(key) == reading else reading for key, reading in now.items()}
        self._known[source] = now
        return tuple(now.values())


@dataclass(slots=True)
class CardFigures:
    """One card, with one rank alone on it that holds its share of the weights."""

    held: float = 76e9
    utilization: float = 0.0
    dram_activity: float | None = 0.0
    pcie: float = 200e3  # bytes per second: an idle link chatters
    memory_utilization: float | None = None  # this and what follows: None = not read
    power: float | None = None  # watts
    limit: float | None = None
    idle_power: float | None = None
    lost: float | None = None
    answers: bool = True  # False: the driver does not

    def readings(self, name: str, rank: str) -> list[Reading]:
        gpu = f"GPU-{rank}"
        further = {
            signals.GPU_MEMORY_UTILIZATION: self.memory_utilization,
            signals.GPU_POWER: self.power,
            signals.GPU_POWER_LIMIT: self.limit,
            signals.GPU_IDLE_POWER: self.idle_power,
            signals.GPU_LOST: self.lost,
            signals.GPU_DRAM_ACTIVITY: self.dram_activity,
        }
        read = [*self._usual(name, rank, gpu), *(s.read(v, gpu) for s, v in further.items() if v is not None)]
        if self.answers:
            return read
        asked = [reading for reading in read if reading.signal.name.startswith("gpu_")]
        return [read[0], *(each.signal.missing("driver_unresponsive", *each.labels) for each in asked)]

    def _usual(self, name: str, rank: str, gpu: str) -> list[Reading]:
        return [
            signals.RANK_INFO.read(1.0, name, rank, "7", gpu),
            signals.GPU_PROCESS_MEMORY.read(self.held, gpu, name, rank),
            signals.GPU_UTILIZATION.read(self.utilization, gpu),
            signals.GPU_PCIE_RECEIVE.read(self.pcie, gpu),
        ]


@dataclass(slots=True)
class Feed:
    """Counters that stay as they are until a test moves them, and looks at them."""

    ranks: tuple[str, ...] = ("TP0", "TP1")
    thresholds: Thresholds = field(default_factory=Thresholds)
    server: Server = field(default_factory=server)
    interval: float = TICK
    log: bool = True
    timeline: Timeline = field(init=False)
    episodes: Episodes = field(init=False)
    of: dict[str, Counters] = field(init=False)
    child_cpu: float = 3.0
    compilers: int = 0
    log_bytes: float = 0.0
    waits: dict[str, str] = field(default_factory=dict)  # rank -> class of all its threads; "" = unreadable
    dead: set[str] = field(default_factory=set)
    root: bool = True
    last_look: float = 0.0
    serving: Serving = field(default_factory=Serving)
    cards: dict[str, CardFigures] = field(default_factory=dict)  # by rank
    lock_age: dict[str, float] = field(default_factory=dict)  # by kind
    lock_held: dict[str, float | None] = field(default_factory=dict)  # by kind; None = unreadable
    scope: float | None = None  # whether anything of its container or unit runs; None = it is in none
    stopping: float | None = None
    frozen: float | None = None
    traced: set[str] = field(default_factory=set)
    kills: float | None = None  # by the kernel for memory, on the node, since boot

    def __post_init__(self) -> None:
        markers = {"sglang": ("capture_end",)}
        self.timeline = Timeline(lambda name: self.thresholds, markers)
        self.episodes = Episodes(self.timeline, lambda name: self.thresholds)
        self.of = {rank: Counters() for rank in (*self.ranks, "frontend")}

    @property
    def now(self) -> ServerTimeline:
        found = self.timeline.of(self.server.name)
        assert found is not None
        return found

    def noise(self, t: float) -> None:
        """Let every process do what stuck ones do, since the last time."""
        for counters in self.of.values():
            counters.idle(t - self.last_look)
        self.last_look = t

    def processes(self, t: float, *, io: bool = True, measured: float | None = None) -> None:
        """One read of the `processes` collector.  `io` False: no right to read /proc/PID/io."""
        self.timeline.see([self.server], t)
        self.timeline.put(self.process_readings(io), t, self.interval, measured)

    def process_readings(self, io: bool = True) -> list[Reading]:
        name = self.server.name
        readings = [
            signals.SERVER_ALIVE.read(float(self.root), name),
            signals.SERVER_START.read(self.server.started_at, name),
            signals.SERVER_STARTS.read(self.server.starts, name),
            signals.CHILD_CPU.read(self.child_cpu, name, "other"),
            signals.CHILD_CPU.read(0.0, name, "compiler"),
            signals.CHILD_PROCESSES.read(self.compilers, name, "compiler"),
        ]
        whole = {
            signals.SERVER_SCOPE_ALIVE: self.scope,
            signals.SERVER_STOPPING: self.stopping,
            signals.SERVER_FROZEN: self.frozen,
        }
        readings += [signal.read(value, name) for signal, value in whole.items() if value is not None]
        for rank in self.ranks:
            readings.append(signals.RANK_ALIVE.read(float(rank not in self.dead), name, rank))
            if self.traced:
                readings.append(signals.RANK_TRACED.read(float(rank in self.traced), name, rank))
        for label, counters in self.of.items():
            if label not in self.dead:
                readings += _usage(name, label, counters, io)
        return readings

    def logs(self, t: float) -> None:
        """One read of the `logs` collector."""
        self.timeline.put(self.log_readings(), t, self.interval)

    def log_readings(self) -> list[Reading]:
        return [signals.LOG_BYTES.read(self.log_bytes, self.server.name, "log")] if self.log else []

    def threads(self, t: float, measured: float | None = None) -> None:
        """One read of the `threads` collector."""
        self.timeline.put(self.thread_readings(), t, self.interval, measured)

    def thread_readings(self) -> list[Reading]:
        waits = {rank: self.waits.get(rank, "futex") for rank in self.ranks}
        return [signals.THREADS.read(205.0, self.server.name, r, w or "unreadable") for r, w in waits.items()]

    def endpoints(self, t: float, interval: float | None = None) -> None:
        """One read of the `endpoints` and `sockets` collectors."""
        self.timeline.put(self.serving.readings(self.server.name), t, interval or self.interval)

    def node(self, t: float) -> None:
        """One read of the `node` collector."""
        self.timeline.put(self.node_readings(), t, self.interval)

    def node_readings(self) -> list[Reading]:
        name = self.server.name
        readings = [signals.LOCK_AGE.read(age, name, kind) for kind, age in self.lock_age.items()]
        for kind, held in self.lock_held.items():
            unreadable = signals.LOCK_HELD.missing("not_supported", name, kind)
            readings.append(unreadable if held is None else signals.LOCK_HELD.read(held, name, kind))
        return readings + ([] if self.kills is None else [signals.OOM_KILLS.read(self.kills)])

    def gpus(self, t: float) -> None:
        """One read of the cards."""
        readings = [reading for rank, card in self.cards.items() for reading in card.readings(self.server.name, rank)]
        self.timeline.put(readings, t, self.interval)

    def stats(self, t: float, running: float, waiting: float = 0.0, speed: float | None = None) -> None:
        """One stats line of the log."""
        if speed is None:
            self.tell(t, "stats", running=running, waiting=waiting)
        else:
            self.tell(t, "stats", running=running, waiting=waiting, generation_tokens_per_second=speed)

    def tell(self, t: float, event: str, rank: str | None = None, **fields: float | str) -> None:
        """One line of the log."""
        self.log_bytes += 100
        self.timeline.tell([Event(t, self.server.name, event, rank, "log", fields)])

    def look(self, t: float) -> None:
        """Every collector reads."""
        self.processes(t)
        self.logs(t)
        self.threads(t)
        self.endpoints(t)
        self.node(t)
        self.gpus(t)

    def tick(self, t: float, wall: float | None = None, dated: Mapping[str, float] | None = None) -> ServerReport:
        """What the daemon does at a tick, after the collectors."""
        reports = self.episodes.tick(t, WALL + t if wall is None else wall, dated)
        return next(report for report in reports if report.server.name == self.server.name)

    def verdict(self, t: float) -> Verdict:
        return self.tick(t).verdict

    def quiet_until(self, begin: float, end: float, step: float = TICK) -> list[Verdict]:
        """Look and tick every `step` seconds after `begin` up to `end` while the server does nothing."""
        verdicts = []
        for number in range(1, round((end - begin) / step) + 1):
            t = begin + number * step
            self.noise(t)
            self.look(t)
            verdicts.append(self.verdict(t))
        return verdicts


def _usage(name: str, label: str, counters: Counters, io: bool) -> list[Reading]:
    from_io = {
        signals.STORAGE_READ: counters.storage,
        signals.READ_BYTES: counters.read,
        signals.WRITTEN_BYTES: counters.written,
    }
    return [
        signals.CPU_SECONDS.read(counters.cpu, name, label),
        signals.PAGE_FAULTS.read(counters.minor, name, label, "minor"),
        signals.PAGE_FAULTS.read(counters.major, name, label, "major"),
        signals.RESIDENT_MEMORY.read(counters.resident, name, label),
        *(s.read(value, name, label) if io else s.missing("permission", name, label) for s, value in from_io.items()),
    ]
