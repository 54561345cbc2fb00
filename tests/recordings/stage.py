"""A node with servers on it, and a clock: what the sources would read, written as the lines of a recording.

Nothing here knows what a verdict is.  Everything is deterministic: each process has a random generator of its
own, seeded by its names, that is asked equally often whatever the process does.  So two recordings made by the
same function with one parameter changed differ in what that parameter does, and in nothing else.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

INTERVAL = 5.0
"""Seconds between two looks at processes; recordings of hours take 30."""

THREADS_EVERY, PORTS_EVERY, HEALTH_EVERY = 10.0, 10.0, 30.0
"""How often the other sources look, in seconds, as shipped."""

WALL = 1_700_000_000.0
"""Unix time of second 0."""

MIB = 1 << 20

TICK_SECONDS = 0.01
"""CPU time is counted in ticks of 10 ms."""

NOISE_TICKS_PER_MINUTE: Mapping[str, tuple[float, float]] = {
    "rank": (30.0, 54.0),
    "engine": (0.0, 1.0),
    "front": (0.5, 4.0),
}
"""CPU ticks of a process that waits, by its role: least and most.  Measured: docs/NOISE.md, rows a, c, d."""

NOISE_FAULTS_PER_MINUTE = 2.0
NOISE_READ_MIB_PER_MINUTE = 0.2


@dataclass(frozen=True, slots=True)
class Doing:
    """What one process does per second on top of its noise, and what its main thread waits in.

    `cpu` in cores; `minor`, `major` in faults; `storage`, `read`, `written`, `resident` in MiB, the last may be
    negative.  `silent`: not even noise (a stopped or frozen process, one that sleeps in a single futex).
    """

    cpu: float = 0.0
    minor: float = 0.0
    major: float = 0.0
    storage: float = 0.0
    read: float = 0.0
    written: float = 0.0
    resident: float = 0.0
    wait: str = "futex"
    silent: bool = False


WAITING = Doing()
"""At a barrier, or stuck: all threads asleep, and the noise of pollers and timers."""


@dataclass(slots=True)
class Process:
    """One process of a server: its counters and what it is doing."""

    name: str
    role: str  # rank, engine or front
    random: Random
    threads: int = 205
    doing: Doing = WAITING
    alive: bool = True
    reads: bool = False  # whether its noise has read() calls, as some have
    cpu: float = 2.0
    minor: float = 9_000.0
    major: float = 40.0
    storage: float = 30.0 * MIB
    read: float = 80.0 * MIB
    written: float = 1.0 * MIB
    resident: float = 400.0 * MIB
    seen_waits: set[str] = field(default_factory=set)

    def advance(self, seconds: float) -> None:
        """Do for `seconds` what it is doing.  Always four draws, so that twins stay in step."""
        draws = [self.random.random() for _ in range(4)]
        if not self.alive:
            return
        doing, jitter = self.doing, 0.9 + 0.2 * draws[0]
        if not doing.silent:
            self._noise(seconds, draws)
        self.cpu += doing.cpu * seconds * jitter
        self.minor += round(doing.minor * seconds * jitter)
        self.major += round(doing.major * seconds * jitter)
        self.storage += doing.storage * seconds * jitter * MIB
        self.read += doing.read * seconds * jitter * MIB
        self.written += doing.written * seconds * jitter * MIB
        self.resident = max(1.0 * MIB, self.resident + doing.resident * seconds * jitter * MIB)

    def _noise(self, seconds: float, draws: list[float]) -> None:
        least, most = NOISE_TICKS_PER_MINUTE[self.role]
        self.cpu += (least + (most - least) * draws[1]) * TICK_SECONDS * seconds / 60
        self.minor += draws[2] < NOISE_FAULTS_PER_MINUTE / 2 * seconds / 60
        self.read += self.reads * NOISE_READ_MIB_PER_MINUTE * seconds / 60 * draws[3] * MIB

    def usage(self) -> Iterator[tuple[str, dict[str, str], float]]:
        yield "process_cpu_seconds_total", {}, int(self.cpu / TICK_SECONDS) * TICK_SECONDS
        yield "process_page_faults_total", {"kind": "minor"}, self.minor
        yield "process_page_faults_total", {"kind": "major"}, self.major
        yield "process_storage_read_bytes_total", {}, self.storage
        yield "process_read_bytes_total", {}, self.read
        yield "process_written_bytes_total", {}, self.written
        yield "process_resident_memory_bytes", {}, self.resident // 4096 * 4096

    def waits(self) -> dict[str, int]:
        """Threads by class; a class once seen stays, with 0."""
        wait = self.doing.wait
        if wait in ("stopped", "unreadable"):
            now = {wait: self.threads}
        elif self.threads == 1:
            now = {wait: 1}
        else:
            pollers = max(1, self.threads // 16)
            now = {"futex": self.threads - pollers - 1, "poll": pollers}
            now[wait] = now.get(wait, 0) + 1
        self.seen_waits |= now.keys()
        return {wait: now.get(wait, 0) for wait in sorted(self.seen_waits)}


@dataclass(slots=True)
class Card:
    """One GPU of a rank.  Watts, ratios, bytes."""

    gpu: str
    rank: str
    random: Random
    power: float | str = 130.0
    idle_power: float | None = 125.0
    limit: float | None = 700.0
    utilization: float | str = 0.0
    memory_utilization: float | str = 0.0
    memory: float = 2e9
    memory_rate: float = 0.0  # MiB per second
    bus_rate: float = 0.0  # MiB per second
    unowned: float = 0.0  # bytes that no process of a server here holds
    clock: float | None = None  # of the SMs in hertz; None: neither clock nor driver are read
    mig: str = ""
    tenant: float | None = None  # bytes a process of no known server holds
    lost: float | None = None  # None: not read
    trouble: str = ""  # why none of its figures can be read
    shows_memory: bool = True  # False: unified memory
    is_whole: bool = True  # False: a MIG instance, or the card it is a part of, with fewer figures

    def advance(self, seconds: float) -> None:
        self.memory += self.memory_rate * seconds * MIB

    def readings(self, server: str, pid: int) -> Iterator[tuple[str, dict[str, str], float | str]]:
        """A text is why it cannot be read.  Without a rank it is a card nobody is on."""
        gpu = {"gpu": self.gpu}
        if self.rank:
            yield "rank_info", {"server": server, "rank": self.rank, "pid": str(pid), **gpu}, 1
        if self.lost is not None:
            yield "gpu_lost", gpu, "driver_unresponsive" if self.trouble == "driver_unresponsive" else self.lost
        if self.clock is not None and not self.trouble:
            facts = {"index": "0", "name": "card", "compute_capability": "9.0", "driver": "580.95", "pci_bus_id": "0"}
            yield "gpu_info", {**gpu, **facts, "mig": self.mig}, 1
        for signal, labels, value in self._figures(server):
            yield signal, {**gpu, **labels}, self.trouble or value

    def _figures(self, server: str) -> Iterator[tuple[str, dict[str, str], float | str]]:
        flicker = 2 * self.random.random() - 1
        yield "gpu_power_watts", {}, self.power if isinstance(self.power, str) else self.power + flicker
        if self.idle_power is not None:
            yield "gpu_resident_idle_power_watts", {}, self.idle_power
        if self.limit is not None:
            yield "gpu_power_limit_watts", {}, self.limit
        if self.clock is not None:
            yield "gpu_sm_clock_hertz", {}, self.clock
        yield "gpu_utilization_ratio", {}, self.utilization
        yield "gpu_memory_utilization_ratio", {}, self.memory_utilization
        used = self.memory + self.unowned + (self.tenant or 0.0)
        yield "gpu_memory_used_bytes", {}, used if self.shows_memory else "not_supported"
        if self.rank:
            yield "gpu_process_memory_bytes", {"server": server, "rank": self.rank}, self.memory
        if self.tenant is not None:
            yield "gpu_process_memory_bytes", {"server": "", "rank": ""}, self.tenant
        yield "gpu_unowned_memory_bytes", {}, self.unowned
        yield "gpu_pcie_receive_bytes_per_second", {}, self.bus_rate * MIB if self.is_whole else "not_supported"


@dataclass(slots=True)
class Server:
    """One server of the node: its processes, and what else is read about it.

    `gauges` are read at every look, `health` every 30 s, counters grow by `rates` per second.  A key of any of
    them is (signal, labels as JSON), see `key`.
    """

    stage: Stage
    name: str
    framework: str
    ranks: tuple[str, ...]
    processes: dict[str, Process]
    facts: dict[str, Any] = field(default_factory=dict)  # for the header
    log: bool | str = True
    compilers: int = 0
    other_children: int = 1
    child_rates: dict[str, float] = field(default_factory=lambda: {"compiler": 0.0, "other": 0.0})
    child_cpu: dict[str, float] = field(default_factory=lambda: {"compiler": 0.0, "other": 1.0})
    gauges: dict[tuple[str, str], float | str] = field(default_factory=dict)  # a text is why it cannot be read
    health: dict[tuple[str, str], float | str] = field(default_factory=dict)
    counters: dict[tuple[str, str], float] = field(default_factory=dict)
    rates: dict[tuple[str, str], float] = field(default_factory=dict)
    cards: list[Card] = field(default_factory=list)
    listens: bool = False
    starts: int = 1
    started_at: float = WALL
    storage_readable: bool = True
    is_read: bool = True  # False: nothing of its processes is read
    is_scraped: bool = False  # rebuilt from what was scraped: everything at every look, front ends as one
    metrics_every: float = 0.0  # seconds between two looks at what it says of requests and tokens
    storage_flickers: float = 0.0  # every so many seconds storage cannot be read, once

    @property
    def root_lives(self) -> bool:
        """Whether the first process lives: `main`, or all there is."""
        main = self.processes.get("main")
        return main.alive if main is not None else any(process.alive for process in self.processes.values())

    def rank(self, name: str) -> Process:
        return self.processes[name]

    @property
    def live_ranks(self) -> list[str]:
        return [name for name in self.ranks if name in self.processes and self.processes[name].alive]

    def do(self, doing: Doing, *names: str) -> None:
        """From now on these processes (all live ranks, if none is named) do this."""
        for name in names or self.live_ranks:
            self.processes[name].doing = doing

    def wait(self, wait: str, *names: str) -> None:
        """From now on the main threads of these wait in another class; else they do what they did."""
        for name in names or self.live_ranks:
            self.processes[name].doing = replace(self.processes[name].doing, wait=wait)

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].alive = False

    def say(self, event: str, rank: str | None = None, **fields: float | str) -> None:
        """A line of the log that an event names, at this moment."""
        line: dict[str, Any] = {"server": self.name, "event": event}
        if rank is not None:
            line["rank"] = rank
        if fields:
            line["fields"] = fields
        self.stage.write(line)

    def line(self, kind: str) -> None:
        """A line of the log that no event names: novel, repeat, heartbeat or access."""
        self.stage.write({"server": self.name, "line": kind})

    def gauge(self, signal: str, value: float | str | None, **labels: str) -> None:
        """From now on this is read, or is asked for in vain (a text says why), or (None) is not asked for."""
        _set(self.gauges, signal, value, labels)

    def answers(self, status: int | None, endpoint: str = "health") -> None:
        """From now on the endpoint answers so; None: no answer in time, which is counted."""
        _set(self.health, "health_status", status, {"endpoint": endpoint})
        timeouts = key("health_timeouts_total", {"endpoint": endpoint})
        self.counters.setdefault(timeouts, 0.0)
        self.rates[timeouts] = 1 / HEALTH_EVERY if status is None else 0.0

    def count(self, signal: str, per_second: float) -> None:
        """From now on this counter of the server grows so."""
        self.counters.setdefault(key(signal, {}), 0.0)
        self.rates[key(signal, {})] = per_second

    def header(self) -> dict[str, Any]:
        facts = {"server": self.name, "framework": self.framework, "port": 8000, "ranks": list(self.ranks)}
        return {**facts, "log": self.log, **self.facts}

    def advance(self, seconds: float) -> None:
        for process in self.processes.values():
            process.advance(seconds)
        for kind, rate in self.child_rates.items():
            self.child_cpu[kind] += rate * seconds
        for series, rate in self.rates.items():
            self.counters[series] += rate * seconds
        for card in self.cards:
            card.advance(seconds)

    def readings(self, t: float) -> Iterator[list[Any]]:
        """Everything that is read about it at `t`."""
        yield from self._of_server(t)
        if self.is_scraped:
            yield from self._fronts(t)
        for process in self.processes.values() if self.is_read else ():
            if not (self.is_scraped and process.role == "front"):
                yield from self._of_process(process, t)
        for number, card in enumerate(self.cards):
            for signal, labels, value in card.readings(self.name, 4000 + number):
                yield [signal, labels, None, value] if isinstance(value, str) else [signal, labels, _rounded(value)]

    def _of_server(self, t: float) -> Iterator[list[Any]]:
        own = {"server": self.name}
        if not self.starts:
            yield ["server_starts_total", own, 0]
            return
        if not self.is_scraped:
            yield ["server_alive", own, int(self.root_lives)]
        yield ["server_start_timestamp_seconds", own, self.started_at]
        yield ["server_starts_total", own, self.starts]
        for kind, number in (("compiler", self.compilers), ("other", self.other_children)):
            yield ["server_child_processes", {**own, "kind": kind}, number]
            yield ["server_child_cpu_seconds_total", {**own, "kind": kind}, _rounded(self.child_cpu[kind])]
        if _is_due(t, PORTS_EVERY, self.stage.interval) and "port_listening" not in {name for name, _ in self.gauges}:
            yield ["port_listening", {**own, "port": "8000"}, int(self.listens)]
        for series in (self.gauges, self.health if _is_due(t, HEALTH_EVERY, self.stage.interval) else {}):
            for (signal, labels), value in series.items():
                if not self._is_told(signal, t):
                    continue
                read = [None, value] if isinstance(value, str) else [_rounded(value)]
                yield [signal, {**own, **json.loads(labels)}, *read]
        for (signal, labels), value in self.counters.items():
            is_health = signal == "health_timeouts_total"
            due = self.is_scraped or _is_due(t, HEALTH_EVERY, self.stage.interval)
            if due if is_health else self._is_told(signal, t):
                yield [signal, {**own, **json.loads(labels)}, int(value + 1e-6)]

    def _is_told(self, signal: str, t: float) -> bool:
        """Whether it is asked at `t` for what it says itself."""
        own_word = signal.startswith("server_requests_") or signal.endswith(
            ("_tokens_total", "_finished_requests_total")
        )
        return not own_word or _is_due(t, self.metrics_every, self.stage.interval)

    def _is_storage_readable(self, t: float) -> bool:
        return self.storage_readable and not (self.storage_flickers and t % self.storage_flickers < 1e-6)

    def _fronts(self, t: float) -> Iterator[list[Any]]:
        """All front ends as one, as they are exported."""
        fronts = [process for process in self.processes.values() if process.role == "front" and process.alive]
        sums: dict[tuple[str, str], float] = {}
        for process in fronts:
            for signal, more, value in process.usage():
                sums[key(signal, more)] = sums.get(key(signal, more), 0.0) + value
        for (signal, labels), total in sums.items():
            yield [signal, {"server": self.name, "rank": "frontend", **json.loads(labels)}, _rounded(total)]

    def _of_process(self, process: Process, t: float) -> Iterator[list[Any]]:
        labels = {"server": self.name, "rank": process.name}
        if process.role != "front":
            yield ["rank_alive", labels, int(process.alive)]
        if not process.alive:
            return
        for signal, more, value in process.usage():
            if signal not in _FROM_IO or self._is_storage_readable(t):
                yield [signal, {**labels, **more}, _rounded(value)]
            else:
                yield [signal, {**labels, **more}, None, "permission"]
        if _is_due(t, THREADS_EVERY, self.stage.interval):
            for wait, number in process.waits().items():
                yield ["threads", {**labels, "wait": wait}, number]
            if process.doing.wait != "unreadable":
                yield ["main_thread", {**labels, "wait": process.doing.wait}, 1]


_FROM_IO = ("process_storage_read_bytes_total", "process_read_bytes_total", "process_written_bytes_total")


def key(signal: str, labels: Mapping[str, str]) -> tuple[str, str]:
    return signal, json.dumps(labels, sort_keys=True)


def _set(
    series: dict[tuple[str, str], float | str], signal: str, value: float | str | None, labels: Mapping[str, str]
) -> None:
    if value is None:
        series.pop(key(signal, labels), None)
    else:
        series[key(signal, labels)] = value


def _rounded(value: float) -> float:
    """Short and the same on every machine."""
    return round(value, 2) if value % 1 else int(value)


def _is_due(t: float, every: float, interval: float) -> bool:
    """Whether a source looks at `t`; never more often than everything is looked at."""
    return t % max(every, interval) < 1e-6


@dataclass(frozen=True, slots=True)
class Beat:
    """Something that happens every so many seconds while the clock runs; `act` gets 1, 2, 3 …"""

    every: float
    act: Callable[[int], None]


@dataclass(slots=True)
class Stage:
    """The node and its clock.  `lines` is the recording so far, without its header."""

    seed: str
    interval: float = INTERVAL
    t: float = 0.0
    moment: float = 0.0
    servers: list[Server] = field(default_factory=list)
    oom_kills: int = 3
    cards: bool = False
    call_in_flight: float | None = None  # seconds a call into the driver has been running; None: not read
    lines: list[dict[str, Any]] = field(default_factory=list)
    silent_at: float | None = None
    """When the server made its last progress, or when the certain sign came; None = it never stands still."""

    def add(self, name: str, framework: str, ranks: tuple[str, ...], fronts: tuple[str, ...], **facts: Any) -> Server:
        """A server of these ranks and other processes (an engine is one of `fronts`)."""
        processes = {
            each: Process(each, _role(each), Random(f"{self.seed}/{name}/{each}"), 131 if each in fronts else 205)
            for each in (*fronts, *ranks)
        }
        for rank in ranks[:1]:
            processes[rank].reads = True
        server = Server(self, name, framework, ranks, processes, facts)
        self.servers.append(server)
        return server

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append({"t": _rounded(round(self.moment, 2)), **line})

    def run(self, seconds: float, *beats: Beat) -> None:
        """Let time pass: one look per interval, and between the looks what the beats do."""
        begin, end = self.t, self.t + seconds
        due = sorted(
            (begin + number * beat.every, order, number)
            for order, beat in enumerate(beats)
            for number in range(1, int((seconds - 1e-6) / beat.every) + 1)
        )
        while self.t < end - 1e-6:
            upcoming = self.t + self.interval
            while due and due[0][0] < upcoming - 1e-6:
                self.moment, order, number = due.pop(0)
                beats[order].act(number)
            self._look(upcoming)

    def _look(self, t: float) -> None:
        for server in self.servers:
            server.advance(self.interval)
        self.t = self.moment = t
        self._write_readings()
        self.moment = t + 0.4  # what is said between two looks comes after the first

    def _write_readings(self) -> None:
        readings: list[list[Any]] = [["node_oom_kills_total", {}, self.oom_kills]]
        if self.call_in_flight is not None:
            readings.append(["gpu_call_in_flight_seconds", {}, self.call_in_flight])
        for server in self.servers:
            readings += server.readings(self.t)
        self.write({"readings": readings})

    def begin(self) -> None:
        """The first look, at second 0."""
        self._write_readings()
        self.moment = 0.4

    def pause(self, seconds: float) -> None:
        """Nobody looks for so long, and the servers go on (stallwatch stopped, not they)."""
        for server in self.servers:
            server.advance(seconds)
        self.t += seconds
        self.moment = self.t + 0.4

    def forget_log(self) -> None:
        """Nothing of what was said so far was ever written anywhere."""
        self.lines[:] = [line for line in self.lines if "readings" in line]

    def falls_silent(self) -> None:
        """The last look was the last one at which anything moved."""
        self.silent_at = self.t

    def header(self) -> dict[str, Any]:
        return {
            "stallwatch_recording": 1,
            "interval_seconds": _rounded(self.interval),
            "servers": [server.header() for server in self.servers],
            "nvidia": self.cards,
        }

    def text(self) -> str:
        """The recording as JSON Lines."""
        lines = (json.dumps(line, separators=(",", ":")) for line in (self.header(), *self.lines))
        return "\n".join(lines) + "\n"

    def save(self, path: Path) -> None:
        """Write it to a file, packed if its name ends in .gz; the same bytes on every machine."""
        data = self.text().encode()
        path.write_bytes(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)


def _role(name: str) -> str:
    if name.startswith("engine"):
        return "engine"
    return "rank" if name[:1].isupper() else "front"
