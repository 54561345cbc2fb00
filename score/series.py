"""A recording as what a Prometheus would have scraped of it, in the words of promtool's `input_series`.

Pure.  Every fifteen seconds a scrape takes what stallwatch would have exported then: the last reading of each
series, nothing of a series that cannot be read or is not read any more, and nothing at all while nobody looked.
Front ends that a recording names singly are left out: they are exported as one, and no rule here looks at them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from stallwatch import signals
from stallwatch.model import FRONTEND_NAMES, Event, Reading
from stallwatch.recordings.format import Header, Line, Look
from stallwatch.tracks import STALE_AFTER_GAPS, Track

SCRAPE_SECONDS, MINUTE = 15.0, 60.0

LOG_SILENCE = "log_silence_seconds"
"""Exported, but not recorded: it follows from the lines of a recording."""

TARGET = {"job": "stallwatch", "instance": "node1:10077"}

_EPSILON = 1e-6

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a metric without stallwatch_, and its labels."""

Value = float | None
"""None: the scrape did not have it."""


@dataclass(slots=True)
class Log:
    """The log of one server.  `said` None = what the header does not tell."""

    said: bool | str | None = None
    last_line: float | None = None
    is_unreadable: bool = False

    def silence(self, t: float) -> Value:
        """Seconds since the last line; None without a line, and of a log that is not or cannot be read."""
        if self.last_line is None or self.is_unreadable or self.said in (False, "unreadable"):
            return None
        return t - self.last_line


@dataclass(slots=True)
class Exporter:
    """What is exported at any moment of a recording; only of these metrics."""

    wanted: Container[str]
    interval: float
    tracks: dict[Key, Track] = field(default_factory=dict)
    logs: dict[str, Log] = field(default_factory=dict)
    looked_at: float | None = None

    def take(self, record: Line) -> None:
        if isinstance(record, Header):
            self.interval = record.interval_seconds
            self.logs = {each.server.name: Log(each.log) for each in record.servers}
        elif isinstance(record, Event):
            self.logs.setdefault(record.server, Log()).last_line = record.at
        elif isinstance(record, Look):
            self.looked_at = record.t
            for reading in record.readings:
                self._read(reading, record)

    def _read(self, reading: Reading, look: Look) -> None:
        labels = tuple(zip(reading.signal.labels, reading.labels, strict=True))
        if reading.signal.name == signals.LOG_BYTES.name:
            self.logs.setdefault(reading.labels[0], Log()).is_unreadable = reading.value is None
        if reading.signal.name not in self.wanted or dict(labels).get("rank") in FRONTEND_NAMES:
            return
        track = self.tracks.setdefault((reading.signal.name, labels), Track())
        track.put(reading.value, reading.reason, look.t, look.interval or self.interval, look.t)

    def scrape(self, t: float) -> Mapping[Key, Value]:
        """What is there at `t`; empty while nobody looks."""
        if self.looked_at is None or t - self.looked_at > STALE_AFTER_GAPS * self.interval + _EPSILON:
            return {}
        found: dict[Key, Value] = {key: track.value for key, track in self.tracks.items() if track.is_readable(t)}
        for server, log in self.logs.items() if LOG_SILENCE in self.wanted else ():
            found[LOG_SILENCE, (("server", server), ("log", "log"))] = log.silence(t)
        return {key: value for key, value in found.items() if value is not None}


def held(lines: Iterable[Line], silent_at: float, seconds: float) -> Iterator[Line]:
    """A hang does not end where its recording does: its last minute again and again, for so many seconds more.

    Of its log only what had come again and again since it stood still (heartbeats, access lines) goes on.
    """
    last: list[Look | Event] = []
    said: Counter[tuple[str, str | None, str]] = Counter()
    for record in lines:
        yield record
        if isinstance(record, Event) and record.at > silent_at:
            said[record.server, record.rank, record.event] += 1
        if isinstance(record, Look | Event):
            last.append(record)
    end = max((_at(record) for record in last if isinstance(record, Look)), default=0.0)
    goes_on = [record for record in last if _at(record) > end - MINUTE + _EPSILON and _comes_again(record, said)]
    for number in range(1, int(seconds / MINUTE) + 1):
        for record in goes_on:
            yield _moved(record, number * MINUTE)


def _comes_again(record: Look | Event, said: Mapping[tuple[str, str | None, str], int]) -> bool:
    return isinstance(record, Look) or said.get((record.server, record.rank, record.event), 0) > 1


def _moved(record: Look | Event, by: float) -> Look | Event:
    return replace(record, t=record.t + by) if isinstance(record, Look) else replace(record, at=record.at + by)


def _at(record: Line) -> float:
    """When it was; the header and facts about servers have no time of their own."""
    return record.t if isinstance(record, Look) else record.at if isinstance(record, Event) else 0.0


def scrapes(lines: Iterable[Line], wanted: Container[str], until: float) -> Iterator[Mapping[Key, Value]]:
    """One scrape every fifteen seconds from second 0 on, up to `until`."""
    exporter, number = Exporter(wanted, SCRAPE_SECONDS), 0
    for record in lines:
        while number * SCRAPE_SECONDS < _at(record) - _EPSILON and number * SCRAPE_SECONDS <= until:
            yield exporter.scrape(number * SCRAPE_SECONDS)
            number += 1
        exporter.take(record)
    while number * SCRAPE_SECONDS <= until + _EPSILON:
        yield exporter.scrape(number * SCRAPE_SECONDS)
        number += 1


def input_series(found: Iterable[Mapping[Key, Value]]) -> list[dict[str, str]]:
    """Scrapes as `input_series` of a promtool test: `stale` where a series ends, `_` where it is not there."""
    taken = list(found)
    keys = sorted({key for scrape in taken for key in scrape})
    return [{"series": _selector(key), "values": _values([scrape.get(key) for scrape in taken])} for key in keys]


def _selector(key: Key) -> str:
    name, labels = key
    selected = ",".join(f'{label}="{value}"' for label, value in (*TARGET.items(), *labels))
    return f"stallwatch_{name}{{{selected}}}"


def _values(samples: list[Value]) -> str:
    words: list[str] = []
    before: Value = None
    for sample in samples:
        words.append("_" if sample is None and before is None else "stale" if sample is None else f"{sample:.12g}")
        before = sample
    return " ".join(_packed(words))


def _packed(words: Iterable[str]) -> Iterator[str]:
    """Equal samples in promtool's short form: `5x3` is four times 5, `_x3` three times none."""
    for word, run in groupby(words):
        times = len(list(run))
        if times == 1 or word == "stale":
            yield word
        else:
            yield f"_x{times}" if word == "_" else f"{word}x{times - 1}"
