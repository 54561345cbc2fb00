"""The configuration file as frozen records, with the shipped defaults; its keys: docs/REFERENCE.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from .model import PHASES, SERVER_INFO_LABELS, HealthTarget
from .strict_yaml import InputError, Section, load, shown

COLLECTORS = ("processes", "threads", "sockets", "logs", "gpu", "endpoints", "node")
DEFAULT_LISTEN_ADDRESS = ":10077"

DEFAULT_BUDGETS: Mapping[str, float] = {
    "loading_weights": 1800.0,
    "compiling": 1800.0,
    "capturing_graphs": 900.0,
}
"""Seconds a phase may take before `working` becomes `slow`; every other phase has DEFAULT_BUDGET."""
DEFAULT_BUDGET = 600.0

SHORTEST_LINE_LIMIT = 256
"""Bytes; below this no pattern could match."""

LONGEST_NAME_BYTES = 128
"""Of a label value: a name is the `server` label, and must not be cut there."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When silence becomes a verdict; seconds."""

    window: float = 60.0
    stall_after: float = 240.0
    suspect_after: float = 900.0
    serve_stall_after: float = 120.0
    budgets: Mapping[str, float] = field(default_factory=dict)

    def budget(self, phase: str) -> float:
        return self.budgets.get(phase, DEFAULT_BUDGETS.get(phase, DEFAULT_BUDGET))


@dataclass(frozen=True, slots=True)
class Intervals:
    """How often each part looks; seconds."""

    tick: float = 5.0
    threads: float = 10.0
    processes: float = 5.0
    ports: float = 10.0
    gpu: float = 5.0
    gpu_processes: float = 30.0
    logs: float = 1.0
    health: float = 30.0

    def of(self, collector: str) -> float:
        """The interval of a collector: `ports` is sockets, `health` is endpoints, node follows processes."""
        names = {"sockets": "ports", "endpoints": "health", "node": "processes"}
        return float(getattr(self, names.get(collector, collector)))


@dataclass(frozen=True, slots=True)
class Limits:
    servers: int = 64
    ranks: int = 256
    logs: int = 128
    line_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Match:
    """How a configured server's first process is found; exactly one is set."""

    command: re.Pattern[str] | None = None
    pid_file: str | None = None
    unit: str | None = None
    container: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class ConfiguredServer:
    name: str
    match: Match
    framework: str | None = None
    role: str = "server"
    logs: tuple[str, ...] = ()
    port: int | None = None
    health: HealthTarget | None = None
    ranks: int | None = None
    model: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    thresholds: Thresholds | None = None


@dataclass(frozen=True, slots=True)
class Discovery:
    enabled: bool = True
    frameworks: tuple[str, ...] = ()  # empty = all
    users: tuple[str, ...] = ()  # empty = all
    exclude: tuple[re.Pattern[str], ...] = ()  # command lines never taken for a server


@dataclass(frozen=True, slots=True)
class Config:
    servers: tuple[ConfiguredServer, ...] = ()
    discovery: Discovery = Discovery()
    intervals: Intervals = Intervals()
    verdict: Thresholds = Thresholds()
    limits: Limits = Limits()
    retention: float = 600.0
    file: str | None = None

    def thresholds_for(self, server: str) -> Thresholds:
        for configured in self.servers:
            if configured.name == server and configured.thresholds is not None:
                return configured.thresholds
        return self.verdict


def load_config(path: str | Path, framework_names: tuple[str, ...]) -> Config:
    """Read a configuration file.  InputError names file, line and key of the first mistake."""
    top = load(path)
    if top is None:
        return Config(file=str(path))
    verdict = _thresholds(top, Thresholds())
    config = Config(
        servers=_servers(top, verdict, framework_names),
        discovery=_discovery(top, framework_names),
        intervals=_intervals(top),
        verdict=verdict,
        limits=_limits(top),
        retention=top.duration("retention", 600.0),
        file=str(path),
    )
    top.finish()
    _check_times(top, config)
    return config


def _thresholds(parent: Section, base: Thresholds) -> Thresholds:
    section = parent.section("verdict")
    if section is None:
        return base
    budgets = dict(base.budgets)
    if (below := section.section("budgets")) is not None:
        for phase in PHASES:
            if phase in below:
                budgets[phase] = below.duration(phase, 0.0)
        below.finish(PHASES)
    result = Thresholds(
        window=section.duration("window", base.window),
        stall_after=section.duration("stall_after", base.stall_after),
        suspect_after=section.duration("suspect_after", base.suspect_after),
        serve_stall_after=section.duration("serve_stall_after", base.serve_stall_after),
        budgets=budgets,
    )
    section.finish()
    if result.stall_after <= result.window:
        raise section.wrong(
            "stall_after" if "stall_after" in section else "window",
            f"stall_after ({result.stall_after:g}s) must be longer than window ({result.window:g}s)",
        )
    return result


def _intervals(top: Section) -> Intervals:
    section = top.section("intervals")
    if section is None:
        return Intervals()
    values = {f.name: section.duration(f.name, float(f.default)) for f in fields(Intervals)}  # type: ignore[arg-type]
    section.finish()
    for key, value in values.items():
        if value < 0.1:
            raise section.wrong(key, f"{value:g}s is too short; allowed is at least 100ms")
    return Intervals(**values)


def _check_times(top: Section, config: Config) -> None:
    longest, slowest = max((getattr(config.intervals, name), name) for name in ("tick", "threads", "processes"))
    every = [(config.verdict, top.section("verdict"))]
    every += [
        (configured.thresholds, section.section("verdict"))
        for configured, section in zip(config.servers, top.sections("servers"), strict=True)
        if configured.thresholds
    ]
    for thresholds, section in every:
        if thresholds.window >= 2 * longest:
            continue
        problem = (
            f"window ({thresholds.window:g}s) must be at least twice the longest of intervals.tick, "
            f"threads and processes ({longest:g}s)"
        )
        if section is not None and "window" in section:
            raise section.wrong("window", problem)
        raise (top.section("intervals") or top).wrong(slowest, problem)


def _limits(top: Section) -> Limits:
    section = top.section("limits")
    if section is None:
        return Limits()
    limits = Limits(
        servers=section.integer("servers", 64, 1),
        ranks=section.integer("ranks", 256, 1),
        logs=section.integer("logs", 128, 1),
        line_bytes=section.size("line_bytes", 1 << 20),
    )
    section.finish()
    if limits.line_bytes < SHORTEST_LINE_LIMIT:
        raise section.wrong("line_bytes", f"allowed is at least {SHORTEST_LINE_LIMIT} bytes")
    return limits


def _discovery(top: Section, framework_names: tuple[str, ...]) -> Discovery:
    section = top.section("discovery")
    if section is None:
        return Discovery()
    names = section.texts("frameworks")
    for name in names:
        if name not in framework_names:
            raise section.wrong("frameworks", f"{shown(name)} is unknown; allowed are {', '.join(framework_names)}")
    discovery = Discovery(
        enabled=section.boolean("enabled", True),
        frameworks=names,
        users=section.texts("users"),
        exclude=section.expressions("exclude"),
    )
    section.finish()
    return discovery


def _servers(top: Section, verdict: Thresholds, framework_names: tuple[str, ...]) -> tuple[ConfiguredServer, ...]:
    servers: list[ConfiguredServer] = []
    for section in top.sections("servers"):
        server = _server(section, verdict, framework_names)
        if any(server.name == other.name for other in servers):
            raise section.wrong("name", f"{shown(server.name)} is used by another server")
        servers.append(server)
    return tuple(servers)


def _server(section: Section, verdict: Thresholds, framework_names: tuple[str, ...]) -> ConfiguredServer:
    name = section.text("name")
    if not name or len(name.encode()) > LONGEST_NAME_BYTES or not name.isprintable():
        raise section.wrong("name", f"a name of 1 to {LONGEST_NAME_BYTES} bytes, all printable, is needed")
    below = section.section("health")
    health = None
    if below is not None:
        health = HealthTarget(
            url=_health_url(below),
            insecure=below.boolean("insecure", False),
            bearer_file=below.text("bearer_file", "") or None,
        )
        below.finish()
    server = ConfiguredServer(
        name=name,
        match=_match(section),
        framework=section.choice("framework", framework_names, "") if "framework" in section else None,
        role=section.choice("role", ("server", "embedded"), "server"),
        logs=_log_paths(section),
        port=section.integer("port", 0, 1, 65535) or None,
        health=health,
        ranks=section.integer("ranks", 0, 1) or None,
        model=section.text("model", ""),
        labels=_labels(section),
        thresholds=_thresholds(section, verdict) if "verdict" in section else None,
    )
    section.finish(("framework", "verdict"))
    return server


def _log_paths(section: Section) -> tuple[str, ...]:
    paths = section.texts("logs")
    for path in paths:
        if not path.startswith("/"):
            raise section.wrong("logs", f"{shown(path)} is no absolute path")
    return paths


def _labels(section: Section) -> dict[str, str]:
    """Labels added to `server_info`: Prometheus label names that hide none of its own."""
    labels = section.mapping("labels")
    for name in labels:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
            raise section.wrong("labels", f"{shown(name)} is no label name; allowed are letters, digits and _")
        if name in SERVER_INFO_LABELS:
            raise section.wrong("labels", f"{shown(name)} is a label that server_info has already")
    return labels


def _health_url(section: Section) -> str:
    url = section.text("url")
    if not re.fullmatch(r"https?://[^/@\s]+(/\S*)?", url):
        raise section.wrong("url", "an http:// or https:// URL without user and password is needed")
    return url


def _match(section: Section) -> Match:
    below = section.section("match")
    if below is None:
        raise InputError(section.file, section.line, f"{section.path}.match", "the key is required")
    ways = ("command", "pid_file", "unit", "container", "port")
    given = [way for way in ways if way in below]
    if len(given) != 1:
        raise InputError(
            below.file,
            below.line,
            below.path,
            f"exactly one of {', '.join(ways)} is needed, not {len(given)}",
        )
    if not below.text(given[0]):
        raise below.wrong(given[0], "must not be empty: that would fit everything or nothing")
    match = Match(
        command=below.expression("command"),
        pid_file=below.text("pid_file", "") or None,
        unit=below.text("unit", "") or None,
        container=below.text("container", "") or None,
        port=below.integer("port", 0, 1, 65535) or None,
    )
    below.finish()
    return match


def scaled(config: Config, speed: float) -> Config:
    """The same configuration with verdict times and intervals divided by `speed`; no interval below 100 ms."""

    def faster(thresholds: Thresholds) -> Thresholds:
        return Thresholds(
            window=thresholds.window / speed,
            stall_after=thresholds.stall_after / speed,
            suspect_after=thresholds.suspect_after / speed,
            serve_stall_after=thresholds.serve_stall_after / speed,
            budgets={phase: thresholds.budget(phase) / speed for phase in PHASES},
        )

    intervals = Intervals(**{f.name: max(0.1, getattr(config.intervals, f.name) / speed) for f in fields(Intervals)})
    return replace(config, verdict=faster(config.verdict), intervals=intervals)
