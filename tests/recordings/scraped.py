"""A recording as Prometheus would have kept it: replayed, shown as `/metrics`, scraped every 15 seconds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from stallwatch.catalogue import collectors, derived_signals, read_signals
from stallwatch.exposition import Exposition
from stallwatch.model import ERROR_KINDS, EVENTS, Event, Reading, Report
from stallwatch.recordings.format import Header, Line, Look, Reader, known_names, told_servers
from stallwatch.recordings.replay import Replay
from stallwatch.signals import LOG_BYTES
from stallwatch.sources.logs.counters import LOG_ERRORS, LOG_EVENTS

from .played import frameworks
from .stage import WALL

SCRAPE_SECONDS = 15.0
STALE_SECONDS = 35.0
"""A series that was not read for so long is not on the page."""

PAUSE_SECONDS = 90.0
"""An exporter that reads nothing for so long answers no scrape."""

INSTANCE = "node7:10077"

Answer = dict[str, Any]


class Kept:
    """What Prometheus keeps: series by their labels, with raw samples."""

    def __init__(self) -> None:
        self._series: dict[tuple[tuple[str, str], ...], list[list[Any]]] = {}

    def scrape(self, page: str, at: float) -> None:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {"__name__": sample.name, "instance": INSTANCE, "job": "stallwatch", **sample.labels}
                self._series.setdefault(tuple(sorted(labels.items())), []).append([at, repr(sample.value)])

    def answer(self) -> Answer:
        """What the query API says to a query of a range."""
        result = [{"metric": dict(labels), "values": values} for labels, values in self._series.items()]
        return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def kept_of(name: str, text: str) -> Answer:
    """The answer of a Prometheus that scraped the exporter whose recording this is."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    reader = Reader(name, known_names(read_signals(), derived_signals()))
    records = reader.read(iter(lines))
    header = next(records)
    assert isinstance(header, Header)
    run = Replay(header, frozenset(told_servers(iter(lines))), None, frameworks())
    kept, exposition, seen = Kept(), Exposition(), _Seen()
    scrape_at, read_at, published = SCRAPE_SECONDS, 0.0, None
    for record in records:
        at = _time_of(record)
        while at is not None and at > scrape_at:
            if published is not None and scrape_at - read_at < PAUSE_SECONDS:
                kept.scrape(exposition.page(published).text(False).decode(), WALL + scrape_at)
            scrape_at += SCRAPE_SECONDS
        read_at = at if isinstance(record, Look) and at is not None else read_at
        before = run.reports
        run.take(record)
        if run.reports is not before:
            published = seen.report(run, (run._ticks - 1) * header.interval_seconds)
        seen.note(record)
    return kept.answer()


def _time_of(record: Line) -> float | None:
    return record.t if isinstance(record, Look) else record.at if isinstance(record, Event) else None


class _Seen:
    """The readings that are on the page, and the lines that were counted."""

    def __init__(self) -> None:
        self._readings: dict[tuple[str, tuple[str, ...]], tuple[float, Reading]] = {}
        self._events: Counter[tuple[str, str]] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()
        self._read_errors: Counter[tuple[str, str]] = Counter()
        self._reader_of = collectors()

    def note(self, record: Line) -> None:
        if isinstance(record, Event):
            self._events[record.server, record.event] += 1
            if record.event in ("error", "fatal"):
                self._errors[record.server, str(record.fields.get("kind", "other"))] += 1
        elif isinstance(record, Look):
            for reading in record.readings:
                self._readings[reading.signal.name, reading.labels] = record.t, reading
                if reading.reason is not None and reading.signal.name in self._reader_of:
                    self._read_errors[self._reader_of[reading.signal.name], reading.reason] += 1

    def report(self, run: Replay, at: float) -> Report:
        fresh = [reading for read_at, reading in self._readings.values() if at - read_at <= STALE_SECONDS]
        servers = [report.server.name for report in run.reports]
        logs = [log for server in servers for log in self._log(run, server)]
        return Report(
            timestamp=WALL + at,
            monotonic=at,
            readings=(*fresh, *logs, *self._counts(servers)),
            servers=run.reports,
            health=(),
            read_errors=dict(self._read_errors),
        )

    def _log(self, run: Replay, server: str) -> Iterator[Reading]:
        """A log that can be read has its bytes on the page; a recording need not have them."""
        if any(name == LOG_BYTES.name and labels[0] == server for name, labels in self._readings):
            return
        timeline = run.timeline.of(server)
        for labels, track in timeline.of(LOG_BYTES).items() if timeline is not None else ():
            if track.value is not None:
                yield LOG_BYTES.read(100.0 * sum(self._events[server, event] for event in EVENTS), *labels)

    def _counts(self, servers: Iterable[str]) -> Iterator[Reading]:
        for server in servers:
            for event in EVENTS:
                yield LOG_EVENTS.read(float(self._events[server, event]), server, event)
            for kind in ERROR_KINDS:
                yield LOG_ERRORS.read(float(self._errors[server, kind]), server, kind)


def text_of(answer: Answer) -> bytes:
    return json.dumps(answer).encode()
