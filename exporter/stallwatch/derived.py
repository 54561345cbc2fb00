"""What is worked out from a report: its metrics, and where the values come from.  Pure.

Readings are exported as they are; the families about verdicts, phases and ourselves are here, one line per family in
PER_SERVER and PER_REPORT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from .config import COLLECTORS
from .model import (
    CHANNEL_STATES,
    CHANNELS,
    CLOCKS,
    PHASES,
    READ_REASONS,
    REASONS,
    SERVER_INFO_LABELS,
    STATES,
    Report,
    ServerReport,
    Signal,
    SourceHealth,
)

PREFIX = "stallwatch_"

Row = tuple[tuple[str, ...], float]
"""Label values in the order of the signal's labels, and the value."""

_PER_SERVER = ("server",)
_RANK = ("server", "rank")
_EPISODE_STATES = ("suspect", "stalled", "failed")
_GPU_ONLY_REASONS = ("driver_unresponsive", "gpu_lost")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def _one_of(values: Iterable[str]) -> str:
    return f"One of: {' '.join(values)}."


# --- servers -----------------------------------------------------------------------------------------------
SERVER_INFO = Signal(
    "server_info",
    "The server's present start (command line, cgroup) and its configured labels; always 1. "
    "role is server or embedded.",
    SERVER_INFO_LABELS,
    kind="info",
)
SERVER_STATE = Signal(
    "server_state", f"1 for the server's verdict, 0 for the others. {_one_of(STATES)}", ("server", "state")
)
SERVER_REASON = Signal(
    "server_reason",
    f"Why the server is in its state; only the present reason is exported, as 1. {_one_of(REASONS)}",
    ("server", "reason"),
)
SERVER_STATE_SINCE = Signal(
    "server_state_since_timestamp_seconds", "Unix time since which the server is in its state.", _PER_SERVER
)
SERVER_PHASE = Signal(
    "server_phase",
    f"Phase of the start; only the present phase is exported, as 1. {_one_of(PHASES)}",
    ("server", "phase"),
)
SERVER_PHASE_NUMBER = Signal(
    "server_phase_number",
    "Phase of the start as a number, for display: "
    + ", ".join(f"{number} {phase}" for number, phase in enumerate(PHASES))
    + ".",
    _PER_SERVER,
)
SERVER_PHASE_START = Signal(
    "server_phase_start_timestamp_seconds", "Unix time at which the present phase began.", _PER_SERVER
)
SERVER_PHASE_BUDGET = Signal(
    "server_phase_budget_seconds",
    "Seconds the present phase may take before working becomes slow: configured, else learned from starts on this "
    "node, else a default.",
    _PER_SERVER,
)
_SIMILAR = (
    "on this node that became ready and are remembered: of the same framework, model, parallelism and use of graphs, "
    "in any release; only for servers that decode speculatively, speculative yes as they do or no without."
)
SIMILAR_STARTS = Signal("server_similar_starts", f"Starts {_SIMILAR}", ("server", "speculative"))
SIMILAR_LAST = Signal(
    "server_similar_start_timestamp_seconds",
    f"Unix time at which the last of the starts was ready, of those {_SIMILAR}",
    ("server", "speculative"),
)
SERVER_READY = Signal("server_ready", "1 once the present start of the server became ready.", _PER_SERVER)
RANKS_EXPECTED = Signal(
    "server_ranks_expected", "This node's share of the ranks the server's arguments ask for.", _PER_SERVER
)
RANKS_ALIVE = Signal("server_ranks_alive", "Ranks of the server that live on this node.", _PER_SERVER)
STARTUP_DURATION = Signal(
    "server_startup_duration_seconds",
    "Seconds from start to ready of the last successful start.",
    _PER_SERVER,
)
STALLED_SECONDS = Signal(
    "server_stalled_seconds_total",
    "Seconds the server has spent in the state stalled.",
    _PER_SERVER,
    kind="counter",
)
SERVER_DEADLINE = Signal(
    "server_deadline_timestamp_seconds",
    "Unix time at which one of the server's own time-outs will strike; absent while it does not run. "
    f"{_one_of(CLOCKS)}",
    ("server", "clock"),
)

# --- channels and ranks ------------------------------------------------------------------------------------
CHANNEL_STATE = Signal(
    "channel_state",
    f"How a channel of progress is; only the present state is exported, as 1. {_one_of(CHANNEL_STATES)} "
    f"Channels: {' '.join(CHANNELS)}.",
    ("server", "channel", "state"),
)
CHANNEL_AGE = Signal(
    "channel_age_seconds",
    "Seconds since the last move of a channel; absent before the first move and while it is unreadable. "
    + _one_of(CHANNELS),
    ("server", "channel"),
)
RANK_PHASE_NUMBER = Signal(
    "rank_phase_number", "Phase the rank has proved, numbered as in server_phase_number.", _RANK, "rank"
)
RANK_LOAD_PROGRESS = Signal(
    "rank_load_progress_ratio", "Share of the weights the rank has loaded, 0 to 1.", _RANK, "rank"
)
RANK_PROGRESS_AGE = Signal(
    "rank_progress_age_seconds", "Seconds since anything of this rank showed progress.", _RANK, "rank"
)
RANK_SUSPECT = Signal(
    "rank_suspect",
    f"1 for the rank the others wait for; only in the states {' '.join(_EPISODE_STATES)}.",
    _RANK,
    "rank",
)

# --- the node and the exporter itself ----------------------------------------------------------------------
SERVERS = Signal("servers", f"Servers on this node by state. {_one_of(STATES)}", ("state",), "node")
REPORT_TIMESTAMP = Signal(
    "report_timestamp_seconds", "Unix time of the report on this page; every age is as of then.", (), "self"
)
COLLECTOR_SUCCESS = Signal(
    "collector_success",
    f"1 if the last finished call of the collector succeeded. {_one_of(COLLECTORS)}",
    ("collector",),
    "self",
)
COLLECTOR_DURATION = Signal(
    "collector_duration_seconds",
    f"Seconds the last finished call of the collector took. {_one_of(COLLECTORS)}",
    ("collector",),
    "self",
)
COLLECTOR_LAST_SUCCESS = Signal(
    "collector_last_success_timestamp_seconds",
    f"Unix time of the collector's last successful call; absent before the first. {_one_of(COLLECTORS)}",
    ("collector",),
    "self",
)
COLLECTOR_IN_FLIGHT = Signal(
    "collector_in_flight_seconds",
    f"Seconds the collector's present call has been running; 0 when none runs. {_one_of(COLLECTORS)}",
    ("collector",),
    "self",
)
READ_ERRORS = Signal(
    "read_errors_total",
    f"Values that were asked for and could not be read, by reason. {_one_of(READ_REASONS)} "
    f"Collectors: {' '.join(COLLECTORS)}.",
    ("collector", "reason"),
    "self",
    "counter",
)
SERIES_DROPPED = Signal(
    "series_dropped_total",
    "Series left out: duplicate (two with the same labels), or the name of the limit that was hit.",
    ("reason",),
    "self",
    "counter",
)
CONFIG_RELOAD = Signal(
    "config_last_reload_successful", "1 if the last reload of the configuration succeeded.", (), "self"
)
CONFIG_RELOAD_TIMESTAMP = Signal(
    "config_last_reload_success_timestamp_seconds",
    "Unix time at which the configuration was last loaded without a mistake.",
    (),
    "self",
)
BUILD_INFO = Signal(
    "build_info",
    "Version and revision of stallwatch, version of the Python it runs on; always 1.",
    ("version", "revision", "python"),
    "self",
    "info",
)
STARTUPS = Signal(
    "startup_duration_seconds",
    "Successful starts by seconds from start to ready.",
    ("framework", "model", "speculative"),
    "node",
    "histogram",
)

_KIND = ("framework", "version", "model", "speculative")
OUTCOMES = Signal(
    "startup_outcome_duration_seconds",
    "Starts that ended, by seconds from start to that end.  outcome is ready, failed, stalled (it stalled, and was "
    "ended without having become ready) or stopped (it was ended before it could).",
    (*_KIND, "outcome"),
    "node",
    "histogram",
)
FAILURES = Signal(
    "startup_failures_total",
    f"Starts that failed or stalled before they were ready, by reason. {_one_of(REASONS)}",
    (*_KIND, "reason"),
    "node",
    "counter",
)
STALLED_BY_REASON = Signal(
    "stalled_seconds_total",
    f"Seconds servers were stalled, starting or ready, by reason. {_one_of(REASONS)}",
    (*_KIND, "reason"),
    "node",
    "counter",
)

# --- what is derived from the report ------------------------------------------------------------------------


def info_labels(server: ServerReport) -> Iterator[tuple[str, str]]:
    """The labels of `server_info`: the fixed ones, then the configured ones that do not hide one of them."""
    about = server.server
    yield "server", about.name
    for label in SERVER_INFO.labels[1:]:
        yield label, str(getattr(about, label))
    for label, value in about.labels.items():
        if _LABEL_NAME.fullmatch(label) and label not in SERVER_INFO.labels:
            yield label, value


def _channel_ages(server: ServerReport) -> Iterator[Row]:
    """An age is absent while its source is unreadable, and where there is nothing to read."""
    for channel in server.channels:
        if channel.age_seconds is not None and channel.state in ("moving", "flat"):
            yield (server.server.name, channel.channel), channel.age_seconds


def _suspect(server: ServerReport) -> Iterator[Row]:
    verdict = server.verdict
    if verdict.suspect_rank is not None and verdict.state in _EPISODE_STATES:
        yield (server.server.name, verdict.suspect_rank), 1.0


def _similar(server: ServerReport) -> Iterable[tuple[str, tuple[int, float]]]:
    """What is asked when a start with speculative decoding stalls: does the model start without?"""
    return server.similar.items() if server.server.speculative else ()


def _known(value: float | None, *labels: str) -> list[Row]:
    """One row, or none when the value is not known: absent beats wrong."""
    return [] if value is None else [(labels, value)]


def _simple(value: Callable[[ServerReport], float | None]) -> Callable[[ServerReport], list[Row]]:
    """One value per server."""
    return lambda server: _known(value(server), server.server.name)


PER_SERVER: tuple[tuple[Signal, Callable[[ServerReport], Iterable[Row]]], ...] = (
    (SERVER_STATE, lambda s: [((s.server.name, state), state == s.verdict.state) for state in STATES]),
    (SERVER_REASON, lambda s: [((s.server.name, s.verdict.reason), 1.0)]),
    (SERVER_STATE_SINCE, _simple(lambda s: s.since_timestamp)),
    (SERVER_PHASE, lambda s: [((s.server.name, s.phase), 1.0)]),
    (SERVER_PHASE_NUMBER, _simple(lambda s: PHASES.index(s.phase))),
    (SERVER_PHASE_START, _simple(lambda s: s.phase_start_timestamp)),
    (SERVER_PHASE_BUDGET, _simple(lambda s: s.phase_budget_seconds)),
    (SIMILAR_STARTS, lambda s: [((s.server.name, kind), number) for kind, (number, _) in _similar(s)]),
    (SIMILAR_LAST, lambda s: [((s.server.name, kind), last) for kind, (_, last) in _similar(s)]),
    (SERVER_READY, _simple(lambda s: s.ready)),
    (RANKS_EXPECTED, _simple(lambda s: s.server.ranks_expected)),
    (RANKS_ALIVE, _simple(lambda s: s.ranks_alive)),
    (STARTUP_DURATION, _simple(lambda s: s.startup_seconds)),
    (STALLED_SECONDS, _simple(lambda s: s.stalled_seconds)),
    (SERVER_DEADLINE, lambda s: [((s.server.name, clock), at) for clock, at in s.deadlines.items()]),
    (CHANNEL_STATE, lambda s: [((s.server.name, c.channel, c.state), 1.0) for c in s.channels]),
    (CHANNEL_AGE, _channel_ages),
    (RANK_SUSPECT, _suspect),
    (
        RANK_PHASE_NUMBER,
        lambda s: [((s.server.name, r.rank), PHASES.index(r.phase)) for r in s.ranks if r.phase is not None],
    ),
    (
        RANK_LOAD_PROGRESS,
        lambda s: [row for r in s.ranks for row in _known(r.load_progress, s.server.name, r.rank)],
    ),
    (
        RANK_PROGRESS_AGE,
        lambda s: [row for r in s.ranks for row in _known(r.progress_age_seconds, s.server.name, r.rank)],
    ),
)
"""Families with a row or more per server: a new one is one line."""


def _servers(report: Report) -> Iterator[Row]:
    for state in STATES:
        yield (state,), sum(server.verdict.state == state for server in report.servers)


def _last_success(report: Report) -> Iterator[Row]:
    """Monotonic moments, shown on the report's wall clock."""
    for health in report.health:
        if health.last_success is not None:
            yield (health.source,), report.timestamp - (report.monotonic - health.last_success)


def _in_flight(health: SourceHealth, now: float) -> float:
    return 0.0 if health.in_flight_since is None else max(0.0, now - health.in_flight_since)


def _read_errors(report: Report) -> Iterator[Row]:
    """From 0 for every reason a collector can give, so that an increase() sees the first one."""
    counts = dict.fromkeys(
        (health.source, reason)
        for health in report.health
        for reason in READ_REASONS
        if health.source == "gpu" or reason not in _GPU_ONLY_REASONS
    )
    for key in counts | dict(report.read_errors):
        yield key, report.read_errors.get(key, 0)


PER_REPORT: tuple[tuple[Signal, Callable[[Report], Iterable[Row]]], ...] = (
    (SERVERS, _servers),
    (REPORT_TIMESTAMP, lambda r: [((), r.timestamp)]),
    (COLLECTOR_SUCCESS, lambda r: [((h.source,), h.success) for h in r.health if h.success is not None]),
    (COLLECTOR_DURATION, lambda r: [row for h in r.health for row in _known(h.duration_seconds, h.source)]),
    (COLLECTOR_LAST_SUCCESS, _last_success),
    (COLLECTOR_IN_FLIGHT, lambda r: [((h.source,), _in_flight(h, r.monotonic)) for h in r.health]),
    (READ_ERRORS, _read_errors),
    (CONFIG_RELOAD, lambda r: [((), r.config_reload[0])]),
    (CONFIG_RELOAD_TIMESTAMP, lambda r: [((), r.config_reload[1])] if r.config_reload[1] else []),
)
"""Families about the node and the exporter: a new one is one line."""

SIGNALS: tuple[Signal, ...] = (
    SERVER_INFO,
    *(signal for signal, _ in PER_SERVER),
    *(signal for signal, _ in PER_REPORT),
    SERIES_DROPPED,
    BUILD_INFO,
    STARTUPS,
    OUTCOMES,
    FAILURES,
    STALLED_BY_REASON,
)
"""What this module exports beside the readings."""
