"""Report -> the text of /metrics, in the Prometheus text format 0.0.4 and in OpenMetrics 1.0.

A sample's text up to its value is cached between renders.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

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
    Report,
    ServerReport,
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


@dataclass(slots=True)
class _Sample:
    """The cached text of a series up to its value, the page it was last on, and its value and whole line there."""

    text: str
    page: int = 0
    value: float | None = None
    line: str = ""


@dataclass(frozen=True, slots=True)
class _Block:
    """One family, ready to be written: head lines for both formats, and the sample lines they share."""

    name: str
    head: str
    openmetrics_head: str
    samples: str


@dataclass(slots=True)
class _Family:
    """One metric family: its series so far by raw labels and by text, and the lines of the present page."""

    signal: Signal
    known: dict[tuple[str, ...], _Sample] = field(default_factory=dict)
    by_text: dict[str, _Sample] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, labels: tuple[str, ...], value: float, page: int) -> bool:
        """Add a line; False if this page already has the series (then nothing is added)."""
        return self._put(self.known.get(labels) or self._learn(labels), value, page)

    def add_text(self, text: str, value: float, page: int) -> bool:
        """The same for a series that does not follow the signal's name and labels."""
        return self._put(self.by_text.setdefault(text, _Sample(text)), value, page)

    def _put(self, sample: _Sample, value: float, page: int) -> bool:
        if sample.page == page:
            return False
        sample.page = page
        if sample.value != value:  # most are as they were on the page before
            text = repr(+value)  # number_text, spelled out: this line runs for every sample
            sample.value, sample.line = value, sample.text + _SPECIAL_VALUES.get(text, text)
        self.lines.append(sample.line)
        return True

    def _learn(self, labels: tuple[str, ...]) -> _Sample:
        """Two raw label sets that read alike once cleaned are one series."""
        text = sample_text(PREFIX + self.signal.name, zip(self.signal.labels, labels, strict=True))
        sample = self.by_text.setdefault(text, _Sample(text))
        self.known[labels] = sample
        return sample

    def finish(self, page: int) -> _Block:
        """The page's lines; series that are gone are forgotten once they outnumber those of the page."""
        signal, lines = self.signal, self.lines
        self.lines = []
        if len(self.by_text) > 2 * len(lines) + 16:
            self.known = {labels: sample for labels, sample in self.known.items() if sample.page == page}
            self.by_text = {text: sample for text, sample in self.by_text.items() if sample.page == page}
        return _block(PREFIX + signal.name, signal.kind, signal.help, lines)


def _block(name: str, kind: str, documentation: str, lines: Iterable[str]) -> _Block:
    documentation = documentation.replace("\\", "\\\\").replace("\n", "\\n")
    bare = name.removesuffix({"counter": "_total", "info": "_info"}.get(kind, ""))
    quoted = documentation.replace('"', '\\"')
    return _Block(
        name,
        f"# HELP {name} {documentation}\n# TYPE {name} {'gauge' if kind == 'info' else kind}\n",
        f"# HELP {bare} {quoted}\n# TYPE {bare} {kind}\n",
        "\n".join(lines) + "\n",
    )


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of one report, to be written in either format."""

    blocks: tuple[_Block, ...]

    def text(self, openmetrics: bool) -> bytes:
        if openmetrics:
            parts = [block.openmetrics_head + block.samples for block in self.blocks]
            return "".join([*parts, "# EOF\n"]).encode()
        return "".join([block.head + block.samples for block in self.blocks]).encode()


class Exposition:
    """Turns reports into pages.  Keeps the text of known series between pages; not for two threads at once.

    A series that comes twice is shown once and counted as dropped, reason `duplicate`.
    """

    def __init__(self, revision: str = "unknown", python: str = platform.python_version()) -> None:
        self._build = (__version__, revision, python)
        self._families: dict[str, _Family] = {}
        self._page = 0
        self._duplicates = 0

    def page(self, report: Report, own: Iterable[OwnMetric] = ()) -> Page:
        """The samples of `report`, and those of the exporter's own process."""
        self._page += 1
        self._add_readings(report)
        for server in report.servers:
            self._add_server(server)
        for signal, rows in PER_REPORT:
            self._add(signal, rows(report))
        self._add(BUILD_INFO, [(self._build, 1.0)])
        self._add_startups(report)
        dropped = {"duplicate": 0, **report.dropped}
        dropped["duplicate"] += self._duplicates
        self._add(SERIES_DROPPED, [((reason,), count) for reason, count in dropped.items()])
        blocks = [family.finish(self._page) for family in self._families.values() if family.lines]
        blocks += [_block(m.name, m.kind, m.help, [f"{m.name} {number_text(m.value)}"]) for m in own]
        return Page(tuple(sorted(blocks, key=lambda block: block.name)))

    def _family(self, signal: Signal) -> _Family:
        family = self._families.get(signal.name)
        if family is None:
            family = self._families[signal.name] = _Family(signal)
        return family

    def _add(self, signal: Signal, rows: Iterable[Row]) -> None:
        family = self._family(signal)
        for labels, value in rows:
            self._duplicates += not family.add(labels, value, self._page)

    def _add_readings(self, report: Report) -> None:
        families, page = self._families, self._page
        for reading in report.readings:
            value = reading.value
            if value is not None and (value or not reading.signal.zero_is_absent):
                family = families.get(reading.signal.name) or self._family(reading.signal)
                self._duplicates += not family.add(reading.labels, value, page)

    def _add_server(self, server: ServerReport) -> None:
        text = sample_text(PREFIX + SERVER_INFO.name, info_labels(server))
        self._duplicates += not self._family(SERVER_INFO).add_text(text, 1.0, self._page)
        for signal, rows in PER_SERVER:
            self._add(signal, rows(server))

    def _add_startups(self, report: Report) -> None:
        ready = ((_labels_of(startup, STARTUPS), startup.counts, startup.total_seconds) for startup in report.startups)
        self._add_histograms(STARTUPS, STARTUP_BUCKETS_SECONDS, ready)
        ended = (
            ([*_labels_of(kind, OUTCOMES), outcome], counts, seconds)
            for kind in report.outcomes
            for outcome, (counts, seconds) in kind.durations.items()
        )
        self._add_histograms(OUTCOMES, OUTCOME_BUCKETS_SECONDS, ended)
        kinds = [(tuple(_labels_of(kind, FAILURES)), kind) for kind in report.outcomes]
        self._add(FAILURES, [((*labels, why), n) for labels, kind in kinds for why, n in kind.failures.items()])
        lost = [((*labels, why), s) for labels, kind in kinds for why, s in kind.stalled_seconds.items()]
        self._add(STALLED_BY_REASON, lost)

    def _add_histograms(
        self, signal: Signal, bounds: tuple[float, ...], rows: Iterable[tuple[list[str], tuple[int, ...], float]]
    ) -> None:
        family = self._family(signal)
        for values, counts, seconds in rows:
            labels = list(zip(signal.labels, values, strict=True))
            for text, value in _histogram(PREFIX + signal.name, labels, bounds, counts, seconds):
                self._duplicates += not family.add_text(text, value, self._page)


def _labels_of(kind: StartupHistogram | StartOutcome, signal: Signal) -> list[str]:
    """The labels that the kind has itself; the last one of an outcome or a reason is its own."""
    return [str(getattr(kind, label)) for label in signal.labels if hasattr(kind, label)]


def _histogram(
    name: str, labels: list[tuple[str, str]], bounds: tuple[float, ...], counts: tuple[int, ...], seconds: float
) -> Iterator[tuple[str, float]]:
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        yield sample_text(f"{name}_bucket", [*labels, ("le", number_text(bound))]), count
    yield sample_text(f"{name}_sum", labels), seconds
    yield sample_text(f"{name}_count", labels), counts[-1]


def render(report: Report, openmetrics: bool = False) -> bytes:
    """One page of `report`, nothing kept: for `serve --once`."""
    return Exposition().page(report, own_process()).text(openmetrics)
