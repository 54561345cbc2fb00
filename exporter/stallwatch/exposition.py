"""Report -> the text of /metrics, in the Prometheus text format 0.0.4 and in OpenMetrics 1.0.

The page before is kept: of the one after it most is the same.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any

from . import __version__
from .derived import (
    BUILD_INFO,
    FAILURES,
    OUTCOMES,
    PER_REPORT,
    PER_SERVER,
    PREFIX,
    SERIES_DROPPED,
    SERVER_INFO,
    STALLED_BY_REASON,
    STARTUPS,
    Row,
    info_labels,
)
from .model import (
    OUTCOME_BUCKETS_SECONDS,
    STARTUP_BUCKETS_SECONDS,
    Reading,
    Report,
    Signal,
    StartOutcome,
    StartupHistogram,
)
from .printable import printable

CONTENT_TYPES = {
    False: "text/plain; version=0.0.4; charset=utf-8",
    True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
"""Content-Type by `openmetrics`."""

_SPECIAL_VALUES = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


@dataclass(frozen=True, slots=True)
class OwnMetric:
    """One `process_*` metric of the exporter itself, under the client library's name."""

    name: str
    kind: str
    help: str
    value: float


_OWN = (
    ("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes."),
    ("process_resident_memory_bytes", "gauge", "Resident memory size in bytes."),
    ("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds."),
    ("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds."),
    ("process_open_fds", "gauge", "Number of open file descriptors."),
    ("process_max_fds", "gauge", "Maximum number of open file descriptors."),
)
"""Names and texts of the client libraries."""


def own_process() -> tuple[OwnMetric, ...]:
    """CPU, memory, descriptors of this process, read now.

    Taken when a report is published, not in a scrape.  Empty where there is no /proc.
    """
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            pages = [int(number) * resource.getpagesize() for number in file.read(256).split()[:2]]
        values = (*pages, _started_at(), time.process_time(), _open_descriptors(), _most_descriptors())
    except (OSError, ValueError, IndexError):
        return ()
    return tuple(OwnMetric(*names, float(value)) for names, value in zip(_OWN, values, strict=True))


@cache
def _started_at() -> float:
    """Unix time; as of the first call, so that no step of the clock looks like another start."""
    with open("/proc/self/stat", "rb", buffering=0) as file:
        ticks = int(file.read(1024).rpartition(b")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _open_descriptors() -> int:
    """The size of the folder since Linux 6.2; to list it costs much more, for one is open per watched thread."""
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


def _most_descriptors() -> float:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if most == resource.RLIM_INFINITY else most


def sample_text(name: str, labels: Iterable[tuple[str, str]]) -> str:
    """`name{a="b"} `: a sample up to its value, label values cleaned and escaped."""
    pairs = ",".join(f'{label}="{_escaped(printable(value))}"' for label, value in labels)
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def number_text(value: float) -> str:
    """A number as both formats write it; booleans are 1 and 0."""
    text = repr(+value)  # the sign makes a bool a number
    return _SPECIAL_VALUES.get(text, text)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_Key = tuple[str, ...] | str
"""The labels of a series; or its whole text up to the value, where that does not follow the signal's labels."""

_KeyAndValue = tuple[_Key, float | None]
_OF_READING: Callable[[Any], _KeyAndValue] = attrgetter("labels", "value")
_SIGNAL: Callable[[Reading], Signal] = attrgetter("signal")


def _of_row(row: _KeyAndValue) -> _KeyAndValue:
    return row


@dataclass(frozen=True, slots=True)
class _Block:
    """One family, ready to be written: head lines for both formats, and the sample lines they share."""

    name: str
    head: bytes
    openmetrics_head: bytes
    samples: bytes


@dataclass(slots=True)
class _Family:
    """One metric family as the page before had it, of which all is kept that did not change.

    A new page throws away what its rows do not have: the block with the first row that is another, texts with their
    series.
    """

    signal: Signal
    key_and_value: Callable[[Any], _KeyAndValue]  # of a row
    rows: Sequence[Any] = ()
    texts: list[str] = field(default_factory=list)  # of each row, up to the value
    are_distinct: bool = False  # no two of these are alike, so that none hides another
    lines: list[str] = field(default_factory=list)  # of each row; "" = not shown
    block: _Block | None = None  # None = without a sample
    duplicates: int = 0

    def show(self, rows: Sequence[Any]) -> _Family:
        """Make the block of these rows; the very same one where they are the same."""
        if rows != self.rows:  # readings of what did not change are the very same, which costs next to nothing here
            if not self._renew(rows):
                self._lay(rows)
            self.rows = rows
            signal, lines = self.signal, [line for line in self.lines if line]
            self.block = _block(PREFIX + signal.name, signal.kind, signal.help, lines) if lines else None
        return self

    def _renew(self, rows: Sequence[Any]) -> bool:
        """Write the lines of values that changed; False where they are not of the same series: then lay all."""
        if not self.are_distinct or len(rows) != len(self.rows):
            return False
        of, texts, lines = self.key_and_value, self.texts, self.lines.copy()
        for index, (row, before) in enumerate(zip(rows, self.rows, strict=True)):
            if row is before:
                continue
            (key, value), (old_key, old_value) = of(row), of(before)
            if key != old_key:
                return False
            if value != old_value:
                lines[index] = self._line(texts[index], value)
        self.lines = lines
        return True

    def _lay(self, rows: Sequence[Any]) -> None:
        """Write all lines; two series that read alike once cleaned are one."""
        known = dict(zip((self.key_and_value(row)[0] for row in self.rows), self.texts, strict=True))
        keys_and_values = list(map(self.key_and_value, rows))
        texts = [known.get(key) or self._text(key) for key, _ in keys_and_values]
        lines = [self._line(text, value) for text, (_, value) in zip(texts, keys_and_values, strict=True)]
        self.are_distinct = len(set(texts)) == len(texts)
        self.duplicates = 0 if self.are_distinct else _drop_duplicates(texts, lines)
        self.texts, self.lines = texts, lines

    def _line(self, text: str, value: float | None) -> str:
        if value is None or (not value and self.signal.zero_is_absent):
            return ""
        number = repr(+value)  # number_text, spelled out: this runs for every value that changed
        return text + _SPECIAL_VALUES.get(number, number)

    def _text(self, key: _Key) -> str:
        if isinstance(key, str):
            return key
        return sample_text(PREFIX + self.signal.name, zip(self.signal.labels, key, strict=True))


def _drop_duplicates(texts: Sequence[str], lines: list[str]) -> int:
    """How many lines were emptied, for one before them is of the same series."""
    shown, dropped = set[str](), 0
    for index, (text, line) in enumerate(zip(texts, lines, strict=True)):
        if line and text in shown:
            lines[index] = ""
            dropped += 1
        elif line:
            shown.add(text)
    return dropped


def _block(name: str, kind: str, documentation: str, lines: Iterable[str]) -> _Block:
    documentation = documentation.replace("\\", "\\\\").replace("\n", "\\n")
    bare = name.removesuffix({"counter": "_total", "info": "_info"}.get(kind, ""))
    quoted = documentation.replace('"', '\\"')
    return _Block(
        name,
        f"# HELP {name} {documentation}\n# TYPE {name} {'gauge' if kind == 'info' else kind}\n".encode(),
        f"# HELP {bare} {quoted}\n# TYPE {bare} {kind}\n".encode(),
        ("\n".join(lines) + "\n").encode(),
    )


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of one report, to be written in either format."""

    blocks: tuple[_Block, ...]

    def text(self, openmetrics: bool) -> bytes:
        if openmetrics:
            parts = [part for block in self.blocks for part in (block.openmetrics_head, block.samples)]
            return b"".join([*parts, b"# EOF\n"])
        return b"".join([part for block in self.blocks for part in (block.head, block.samples)])


class _Readings:
    """The families of what was read, and where in a report their readings stand: as before, if the same were read."""

    def __init__(self) -> None:
        self._signals: tuple[Signal, ...] = ()
        self._families: dict[str, tuple[_Family, Callable[[tuple[Reading, ...]], tuple[Reading, ...]]]] = {}

    def show(self, readings: tuple[Reading, ...]) -> list[_Family]:
        signals = tuple(map(_SIGNAL, readings))
        if signals != self._signals:
            self._learn(signals)
        return [family.show(own(readings)) for family, own in self._families.values()]

    def _learn(self, signals: tuple[Signal, ...]) -> None:
        """Families that are not read any more are forgotten."""
        places: dict[str, list[int]] = {}
        for place, signal in enumerate(signals):
            places.setdefault(signal.name, []).append(place)
        before, self._signals = self._families, signals
        self._families = {
            name: (before[name][0] if name in before else _Family(signals[own[0]], _OF_READING), _picker(own))
            for name, own in places.items()
        }


def _picker(places: Sequence[int]) -> Callable[[tuple[Reading, ...]], tuple[Reading, ...]]:
    """Takes what stands in these places."""
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


class Exposition:
    """Turns reports into pages.  Keeps the page before, of which most is as it was; not for two threads at once.

    A series that comes twice is shown once and counted as dropped, reason `duplicate`.
    """

    def __init__(self, revision: str = "unknown", python: str = platform.python_version()) -> None:
        self._build = (__version__, revision, python)
        self._readings = _Readings()
        self._families: dict[str, _Family] = {}  # those that are worked out
        self._written: dict[str, tuple[object, list[_KeyAndValue]]] = {}
        self._duplicates = 0

    def page(self, report: Report, own: Iterable[OwnMetric] = ()) -> Page:
        """The samples of `report`, and those of the exporter's own process."""
        shown = [*self._readings.show(report.readings), *self._worked_out(report)]
        self._duplicates += sum(family.duplicates for family in shown)
        dropped = {"duplicate": 0, **report.dropped}
        dropped["duplicate"] += self._duplicates
        shown.append(self._show(SERIES_DROPPED, [((reason,), count) for reason, count in dropped.items()]))
        blocks = [family.block for family in shown if family.block is not None]
        blocks += [_block(m.name, m.kind, m.help, [f"{m.name} {number_text(m.value)}"]) for m in own]
        return Page(tuple(sorted(blocks, key=lambda block: block.name)))

    def _show(self, signal: Signal, rows: Sequence[Row] | Sequence[_KeyAndValue]) -> _Family:
        family = self._families.get(signal.name)
        if family is None:
            family = self._families[signal.name] = _Family(signal, _of_row)
        return family.show(rows)

    def _worked_out(self, report: Report) -> Iterator[_Family]:
        yield self._show_text(SERVER_INFO, [server.server for server in report.servers], lambda: _infos(report))
        for signal, of_server in PER_SERVER:
            yield self._show(signal, [row for server in report.servers for row in of_server(server)])
        for signal, of_report in PER_REPORT:
            yield self._show(signal, list(of_report(report)))
        yield self._show(BUILD_INFO, [(self._build, 1.0)])
        yield self._show_text(STARTUPS, report.startups, lambda: _startups(report))
        yield self._show_text(OUTCOMES, report.outcomes, lambda: _ends(report))
        kinds = [(tuple(_labels_of(kind, FAILURES)), kind) for kind in report.outcomes]
        yield self._show(FAILURES, [((*labels, why), n) for labels, kind in kinds for why, n in kind.failures.items()])
        lost = [((*labels, why), s) for labels, kind in kinds for why, s in kind.stalled_seconds.items()]
        yield self._show(STALLED_BY_REASON, lost)

    def _show_text(self, signal: Signal, found: object, write: Callable[[], Iterable[_KeyAndValue]]) -> _Family:
        """Of series that do not follow the signal's name and labels: not written anew while what they tell is equal."""
        before, rows = self._written.get(signal.name, (None, []))
        if before != found:
            rows = list(write())
            self._written[signal.name] = found, rows
        return self._show(signal, rows)


def _infos(report: Report) -> Iterator[_KeyAndValue]:
    for server in report.servers:
        yield sample_text(PREFIX + SERVER_INFO.name, info_labels(server)), 1.0


def _startups(report: Report) -> Iterator[_KeyAndValue]:
    for kind in report.startups:
        labels = _labels_of(kind, STARTUPS)
        yield from _histogram(STARTUPS, labels, STARTUP_BUCKETS_SECONDS, kind.counts, kind.total_seconds)


def _ends(report: Report) -> Iterator[_KeyAndValue]:
    for kind in report.outcomes:
        for outcome, (counts, seconds) in kind.durations.items():
            labels = [*_labels_of(kind, OUTCOMES), outcome]
            yield from _histogram(OUTCOMES, labels, OUTCOME_BUCKETS_SECONDS, counts, seconds)


def _labels_of(kind: StartupHistogram | StartOutcome, signal: Signal) -> list[str]:
    """The labels that the kind has itself; the last one of an outcome or a reason is its own."""
    return [str(getattr(kind, label)) for label in signal.labels if hasattr(kind, label)]


def _histogram(
    signal: Signal, values: Iterable[str], bounds: tuple[float, ...], counts: tuple[int, ...], seconds: float
) -> Iterator[_KeyAndValue]:
    name, labels = PREFIX + signal.name, list(zip(signal.labels, values, strict=True))
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        yield sample_text(f"{name}_bucket", [*labels, ("le", number_text(bound))]), count
    yield sample_text(f"{name}_sum", labels), seconds
    yield sample_text(f"{name}_count", labels), counts[-1]


def render(report: Report, openmetrics: bool = False) -> bytes:
    """One page of `report`, nothing kept: for `serve --once`."""
    return Exposition().page(report, own_process()).text(openmetrics)
