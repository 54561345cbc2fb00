"""What is known of each server's logs, from the readings of a report: counts and moments, never any text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..model import Reading
from ..printable import printable


@dataclass(slots=True)
class LogFacts:
    """One log; None = not known."""

    lines: float | None = None
    unmatched: float | None = None
    backlog_bytes: float | None = None
    last_line: float | None = None  # Unix seconds


@dataclass(slots=True)
class ServerLogs:
    """The logs of one server by name, and how many lines of each kind of error all of them hold."""

    logs: dict[str, LogFacts] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)


_FIELDS: Mapping[str, str] = {
    "log_lines_total": "lines",
    "log_unmatched_lines_total": "unmatched",
    "log_backlog_bytes": "backlog_bytes",
    "log_last_line_timestamp_seconds": "last_line",
}
"""Signal -> the field it fills.  Names, as on `/metrics`: the page imports no collector."""


def log_facts(readings: Iterable[Reading]) -> dict[str, ServerLogs]:
    """By server, under the name it has in the JSON document."""
    found: dict[str, ServerLogs] = {}
    for reading in readings:
        name, value = reading.signal.name, reading.value
        if name in _FIELDS:
            server, log = map(printable, reading.labels)
            facts = found.setdefault(server, ServerLogs()).logs.setdefault(log, LogFacts())
            setattr(facts, _FIELDS[name], value)
        elif name == "log_errors_total" and value:
            server, kind = map(printable, reading.labels)
            found.setdefault(server, ServerLogs()).errors[kind] = int(value)
    return found
