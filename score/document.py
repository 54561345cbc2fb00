"""The tables of docs/SCORE.md, made of what was measured.  What stands around them is written by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from . import drills, naive
from .measure import Measured, hours
from .reports import Report, load_reports

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "SCORE.md"
RECORDINGS = ROOT / "docs" / "RECORDINGS.md"

SOON_SECONDS = 300.0
"""A page for a hang is to come within this time of the last progress."""

DEATHS = ("rank_dead", "exited", "out_of_memory", "fatal_log", "gpu_lost")
SERVING = ("no_tokens", "health_timeout")

GROUPS: Mapping[str, Callable[[Measured], bool]] = {
    "page: a certain sign (death, fatal line, lost card)": lambda each: (
        each.truth.kind == "page" and each.truth.first in DEATHS
    ),
    "page: silence on the way up": lambda each: (
        each.truth.kind == "page" and each.truth.first not in (*DEATHS, *SERVING)
    ),
    "page: silence while serving": lambda each: each.truth.kind == "page" and each.truth.first in SERVING,
    "warn: cannot be told from slow": lambda each: each.truth.kind == "warn",
}
"""Row of the table -> the hangs in it."""

LATE: Mapping[str, str] = {
    "novel-lines-only": "lines that are new, but mark nothing, count as progress ten times in a row",
    "slow-counter-stops": "a bar whose steps took minutes may take three of its longest",
    "no-log-cards-at-rest": "without a log silence must last twice as long",
    "log-unreadable-cards-at-rest": "a log that cannot be read counts as none: twice as long",
    "capture-all-spin": "while graphs are captured all cards must spin for twice as long",
    "exporter-paused": "nobody looked for ten minutes, and a time without looks counts for nothing",
    "exporter-paused-serving-hangs": "nobody looked for ten minutes, and a time without looks counts for nothing",
}
"""Hang that is found later than SOON_SECONDS -> why; tests/test_score.py sees to it that none is left out."""

GRADES = "ABC"


def tables(found: Sequence[Measured]) -> dict[str, str]:
    """Name of a place in the document -> what stands there."""
    return {
        "headline": headline(found),
        "summary": "\n".join(summary(found)),
        "classes": "\n".join(classes(found)),
        "late": "\n".join(late(found)),
        "missed": "\n".join(missed(found)),
        "corpus": "\n".join(corpus(found)),
        "drills": "\n".join(drills.table(drills.load())),
        "reports": "\n".join(reports(found)),
    }


def written(text: str, places: Mapping[str, str]) -> str:
    """The document with the places filled; ValueError for one that it does not have."""
    for name, table in places.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        head, begins, rest = text.partition(begin)
        _, ends, tail = rest.partition(end)
        if not (begins and ends):
            raise ValueError(f"docs/SCORE.md has no place for {name}")
        text = f"{head}{begin}{table}\n{end}{tail}"
    return text


# --- tables ------------------------------------------------------------------------------------------------


def headline(found: Sequence[Measured]) -> str:
    """The table below it in two sentences: ours, and the rule of the others that finds most."""
    pages = [each for each in found if each.truth.kind == "page"]
    times = _delays(pages)
    ours = sum(each.is_false_page for each in found)
    best = max(naive.alerts(), key=lambda alert: len(_alert_delays(pages, alert)))
    theirs = _alert_delays(pages, best)
    false = sum(each.is_false_alert(best) for each in found)
    return (
        f"stallwatch finds {len(times)} of {len(pages)} hangs that must page, {median(times):.0f} s after the last "
        f"progress (median), and pages for nothing in {ours} of {len(found)} recordings. Of the obvious rules the one "
        f"that finds most, `{best}`, finds {len(theirs)}, after {median(theirs):.0f} s, and pages for nothing in "
        f"{false}."
    )


def summary(found: Sequence[Measured]) -> Iterator[str]:
    pages = [each for each in found if each.truth.kind == "page"]
    warns = [each for each in found if each.truth.kind == "warn"]
    yield f"| | hangs found, of {len(pages)} | median delay | worst | also found, of {len(warns)} | false pages |"
    yield "| --- | --- | --- | --- | --- | --- |"
    times = _delays(pages)
    pages_for_nothing = sum(each.is_false_page for each in found)
    also = f"{len(_delays(warns))}, as a warning"
    yield _row("**stallwatch**", len(times), *_middle_and_worst(times), also, pages_for_nothing)
    for alert, expr in naive.alerts().items():
        times = _alert_delays(pages, alert)
        data = sum(_metrics_of(expr) <= each.metrics for each in pages)
        caught = f"{len(times)}" if data == len(pages) else f"{len(times)} ({data} have what it looks at)"
        whiles = Counter(each.false_alert_while(alert) for each in found if each.is_false_alert(alert))
        false = f"{whiles.total()} ({', '.join(f'{whiles[what]} {what}' for what in sorted(whiles, key=str))})"
        yield _row(f"`{alert}`", caught, *_middle_and_worst(times), len(_alert_delays(warns, alert)), false)


def classes(found: Sequence[Measured]) -> Iterator[str]:
    yield "| class | hangs | in time | median delay | worst | reason and rank right | steady |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, is_in in GROUPS.items():
        those = [each for each in found if is_in(each)]
        yield _row(
            name,
            len(those),
            _share(sum(each.is_in_time for each in those), len(those)),
            *_middle_and_worst(_delays(those)),
            _share(sum(each.is_explained for each in those), len(those)),
            _share(sum(each.is_steady for each in those), len(those)),
        )


def late(found: Iterable[Measured]) -> Iterator[str]:
    for each in found:
        if each.delay is not None and each.delay > SOON_SECONDS:
            yield f"- `{each.truth.case}`, {each.delay:.0f} s: {LATE.get(each.truth.case, 'cause unknown')}."


def missed(found: Iterable[Measured]) -> Iterator[str]:
    causes = causes_of_misses()
    for each in found:
        if each.misses:
            cause = causes.get(each.truth.case, "cause unknown.")
            yield f"- `{each.truth.case}`: {cause} What the table of cases says: {'; '.join(each.misses)}."


def corpus(found: Sequence[Measured]) -> Iterator[str]:
    never = [each for each in found if not each.is_hang]
    rows = load_reports()
    cases = [each.truth.case for each in found]
    played = [report for report in rows if report.recordings(cases)]
    yield f"- {len(found)} recordings: {len(found) - len(never)} hangs, {len(never)} that must never page."
    yield f"- {hours(found):.0f} hours in which nothing was wrong, and every page would have been false."
    graded = ", ".join(f"{sum(report.grade == grade for report in played)} of grade {grade}" for grade in GRADES)
    yield f"- {len(played)} public reports are played ({graded}), {len(rows) - len(played)} are not."
    constructed = sum(not each.truth.case.startswith(tuple(f"{report.id}-" for report in rows)) for each in found)
    yield f"- {constructed} of the recordings follow no report: measured servers, traps and edges."


def reports(found: Iterable[Measured]) -> Iterator[str]:
    of = {each.truth.case: each for each in found}
    yield "| report | grade | what | where | recordings |"
    yield "| --- | --- | --- | --- | --- |"
    for report in load_reports():
        yield _row(report.id, report.grade, report.what, report.where, _played(report, of))


def _played(report: Report, of: Mapping[str, Measured]) -> str:
    words = [f"`{case}` {of[case].truth.kind}" for case in report.recordings(of)]
    return ", ".join(words) if words else f"none: {report.instead}"


def causes_of_misses() -> dict[str, str]:
    """Case -> why it is missed, as docs/RECORDINGS.md says."""
    text = RECORDINGS.read_text(encoding="utf-8").partition("## What is missed")[2].partition("\n## ")[0]
    found = re.findall(r"^- `([\w-]+)`: (.*?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL)
    return {case: " ".join(cause.split()) for case, cause in found}


# --- cells -------------------------------------------------------------------------------------------------


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _share(number: int, of: int) -> str:
    return f"{number} ({number / of:.0%})" if of else "–"


def _delays(those: Iterable[Measured]) -> list[float]:
    return [each.delay for each in those if each.delay is not None and not each.is_false_page]


def _alert_delays(those: Iterable[Measured], alert: str) -> list[float]:
    delays = (each.alert_delay(alert) for each in those)
    return [delay for delay in delays if delay is not None]


def _middle_and_worst(times: Sequence[float]) -> tuple[str, str]:
    return (f"{median(times):.0f} s", f"{max(times):.0f} s") if times else ("–", "–")


def _metrics_of(expr: str) -> frozenset[str]:
    return frozenset(re.findall(r"\bstallwatch_(\w+)", expr))
