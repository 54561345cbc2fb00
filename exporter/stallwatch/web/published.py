"""The latest Report and its pages, swapped by one assignment: the only thing the tick and HTTP share."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from ..exposition import CONTENT_TYPES, Exposition, OwnMetric, Page, own_process
from ..model import Report
from ..presentation import document
from .changes import Change, Changes
from .log_facts import log_facts
from .page import Beside, html, live

TICKS_UNTIL_OLD = 3
HTML = "text/html; charset=utf-8"
_GZIP_LEVEL = 1  # 3,000 samples: 16 times smaller in 0.6 ms; level 6 is 19 times in 2.1 ms


@dataclass(frozen=True, slots=True)
class Body:
    """One page in one format; `gzipped` is compressed on first use."""

    content_type: str
    plain: bytes
    _gzipped: list[bytes] = field(default_factory=list)

    @property
    def gzipped(self) -> bytes:
        if not self._gzipped:
            self._gzipped.append(gzip.compress(self.plain, _GZIP_LEVEL, mtime=0))
        return self._gzipped[0]


class Pages:
    """The pages of one Report, each made when first asked for.  Used by the HTTP thread alone."""

    def __init__(
        self,
        report: Report,
        own: tuple[OwnMetric, ...],
        exposition: Exposition,
        changes: tuple[Change, ...] = (),
        tick_seconds: float = 5.0,
    ) -> None:
        self.report = report
        self._changes = changes
        self._tick_seconds = tick_seconds
        self._own = own
        self._exposition = exposition
        self._samples: Page | None = None
        self._made: dict[str, Body] = {}

    def metrics(self, openmetrics: bool) -> Body:
        return self._once(f"metrics {openmetrics}", CONTENT_TYPES[openmetrics], lambda: self._metrics_text(openmetrics))

    def json(self) -> Body:
        return self._once("json", "application/json; charset=utf-8", self._json_text)

    def html(self, telemetry_path: str) -> Body:
        return self._once("html", HTML, lambda: html(document(self.report), telemetry_path, self._beside()).encode())

    def live(self) -> Body:
        """The part of the page that changes with each report."""
        return self._once("live", HTML, lambda: live(document(self.report), self._beside()).encode())

    def _beside(self) -> Beside:
        return Beside(log_facts(self.report.readings), self._changes, self._tick_seconds)

    def _metrics_text(self, openmetrics: bool) -> bytes:
        if self._samples is None:
            self._samples = self._exposition.page(self.report, self._own)
        return self._samples.text(openmetrics)

    def _json_text(self) -> bytes:
        return (json.dumps(document(self.report), allow_nan=False) + "\n").encode()

    def _once(self, name: str, content_type: str, make: Callable[[], bytes]) -> Body:
        if name not in self._made:
            self._made[name] = Body(content_type, make())
        return self._made[name]


class Published:
    """Holds the latest pages.  `publish` is called by the tick, everything else by the HTTP thread.

    `clock` gives monotonic seconds, as in Report.monotonic.  `tick_seconds` may be assigned after a reload.
    """

    def __init__(self, tick_seconds: float, clock: Callable[[], float], exposition: Exposition | None = None) -> None:
        self.tick_seconds = tick_seconds
        self._clock = clock
        self._exposition = exposition or Exposition()
        self._changes = Changes()
        self._pages: Pages | None = None

    def publish(self, report: Report) -> None:
        """Make `report` the one that is served.  Reads the exporter's own /proc/self; renders nothing."""
        changes = self._changes.hear(report)
        self._pages = Pages(report, own_process(), self._exposition, changes, self.tick_seconds)

    @property
    def has_report(self) -> bool:
        """True once a first Report was published, however old."""
        return self._pages is not None

    def pages(self) -> Pages | str:
        """The pages to serve, or the sentence why there are none: no Report yet, or one three ticks old."""
        pages = self._pages
        if pages is None:
            return "no report yet: the first tick has not finished"
        age = self._clock() - pages.report.monotonic
        if age > TICKS_UNTIL_OLD * self.tick_seconds:
            return f"the last report is {age:.1f} s old, more than {TICKS_UNTIL_OLD} ticks: not served as new"
        return pages
