"""Every recording of the corpus, judged twice: by stallwatch (a replay), and by the rules of rules/naive.yml."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from recordings.corpus import make
from recordings.played import TRUTH, play
from recordings.stage import Stage
from recordings.truth import PAGES, Outcome, Truth, first, misses
from stallwatch.catalogue import derived_signals, read_signals
from stallwatch.recordings.format import Line, Reader, known_names

from . import naive
from .series import held, input_series, scrapes

HELD_SECONDS = 2100.0
"""How long a hang goes on after its recording, for rules that wait for half an hour."""

ALWAYS_KEPT = frozenset(("log_bytes_total",))
"""Says whether a log can be read; no rule looks at it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One recording.  `alerts`: naive rule -> when it first fired for this server; `foreign`: rules that fired for
    another server of the node; `metrics`: what there was for the rules to look at."""

    truth: Truth
    outcome: Outcome
    seconds: float
    misses: tuple[str, ...]
    alerts: Mapping[str, naive.Firing] = field(default_factory=dict)
    foreign: frozenset[str] = frozenset()
    metrics: frozenset[str] = frozenset()

    @property
    def is_hang(self) -> bool:
        return self.truth.kind != "never"

    @property
    def silent_at(self) -> float | None:
        return self.outcome.silent_at

    @property
    def delay(self) -> float | None:
        """Seconds from the last progress to the page (of the class warn: to the suspicion); None = not found."""
        found = first(self.outcome, PAGES if self.truth.kind == "page" else ("suspect",))
        if not self.is_hang or self.silent_at is None or found is None or found < self.silent_at:
            return None
        return found - self.silent_at

    @property
    def is_in_time(self) -> bool:
        return self.is_hang and not any(miss.startswith(("late", "page")) for miss in self.misses)

    @property
    def is_false_page(self) -> bool:
        return any(miss.startswith("page") for miss in self.misses)

    @property
    def is_explained(self) -> bool:
        """Reason and rank right, when it first stood and at the end."""
        return not any(miss.startswith(("reason", "suspect_rank")) for miss in self.misses)

    @property
    def is_steady(self) -> bool:
        return not any(miss.startswith("flaps") for miss in self.misses)

    def is_false_alert(self, alert: str) -> bool:
        """It fired while nothing was wrong, or for a server with which nothing was."""
        ever = self.alerts.get(alert, naive.Firing()).ever
        return alert in self.foreign or (ever is not None and (self.silent_at is None or ever < self.silent_at))

    def false_alert_while(self, alert: str) -> str | None:
        """What the server did when the alert fired for nothing: starting, idle or serving; None = it did not."""
        if not self.is_false_alert(alert):
            return None
        ever = self.alerts.get(alert, naive.Firing()).ever
        before = [change for change in self.outcome.changes if ever is None or change["t"] <= ever]
        if not before or before[-1]["phase"] != "ready":
            return "starting"
        return "idle" if before[-1]["state"] == "idle" else "serving"

    def alert_delay(self, alert: str) -> float | None:
        """Seconds from the last progress to the alert; None when it did not fire, or had fired before for nothing."""
        after = self.alerts.get(alert, naive.Firing()).after
        if not self.is_hang or self.silent_at is None or after is None or self.is_false_alert(alert):
            return None
        return after - self.silent_at


def measure(with_naive: bool = True) -> list[Measured]:
    """The whole corpus, in the order of the truth table."""
    questions = [question(case) for case in TRUTH] if with_naive else []
    answers = naive.ask(questions) if with_naive else {}
    series = {each.case: frozenset(_metric(row["series"]) for row in each.series) for each in questions}
    return [_measured(case, answers.get(case, {}), series.get(case, frozenset())) for case in TRUTH]


def _measured(case: str, fired: Mapping[tuple[str, str], naive.Firing], metrics: frozenset[str]) -> Measured:
    played, own = play(case), server_of(case)
    return Measured(
        truth=TRUTH[case],
        outcome=played.outcome,
        seconds=played.ends_at,
        misses=tuple(misses(TRUTH[case], played.outcome)),
        alerts={alert: firing for (alert, server), firing in fired.items() if server in ("", own)},
        foreign=frozenset(alert for alert, server in fired if server not in ("", own)),
        metrics=metrics,
    )


def server_of(case: str) -> str:
    """The server that the truth table speaks of."""
    return _OWN.get(case) or _OWN.setdefault(case, make(case).servers[0].name)


_OWN: dict[str, str] = {}


def question(case: str) -> naive.Question:
    """A recording as promtool is asked about it."""
    stage = make(case)
    _OWN[case] = stage.servers[0].name
    wanted, until = naive.metrics(), stage.t
    lines: Iterable[Line] = _records(case, stage, wanted | ALWAYS_KEPT)
    if stage.silent_at is not None:
        lines, until = held(lines, stage.silent_at, HELD_SECONDS), until + HELD_SECONDS
    return naive.Question(case, input_series(scrapes(lines, wanted, until)), stage.silent_at, until)


def _records(case: str, stage: Stage, wanted: frozenset[str]) -> Iterator[Line]:
    """The recording without the readings that nobody asks for, which are most of it."""
    reader = Reader(case, known_names(read_signals(), derived_signals()))
    return reader.read(json.dumps(line).encode() for line in _thinned(stage, wanted))


def _thinned(stage: Stage, wanted: frozenset[str]) -> Iterator[Mapping[str, Any]]:
    yield stage.header()
    for line in stage.lines:
        if "readings" in line:
            yield {**line, "readings": [row for row in line["readings"] if row[0] in wanted]}
        else:
            yield line


def _metric(selector: str) -> str:
    return selector.partition("{")[0].removeprefix("stallwatch_")


def hours(found: Iterable[Measured]) -> float:
    """Hours in which nothing was wrong: a page in one of them would have been false."""
    return sum(each.seconds if each.silent_at is None else each.silent_at for each in found) / 3600
