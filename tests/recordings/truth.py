"""The truth table, read and compared with what a replay said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PAGES = ("stalled", "failed")


@dataclass(frozen=True, slots=True)
class Truth:
    """One row of truth.yaml."""

    case: str
    kind: str  # page, warn or never
    by: float | None
    state: str
    reason: str
    rank: str | None
    twin: str | None
    report: str
    first: str  # the reason when it first stood, where something else stands at the end


def load_truth() -> dict[str, Truth]:
    rows = yaml.safe_load((Path(__file__).parent / "truth.yaml").read_text(encoding="utf-8"))
    known = [
        Truth(
            case=row["case"],
            kind=row["class"],
            by=row.get("by"),
            state=row["state"],
            reason=row["reason"],
            rank=row["rank"],
            twin=row.get("twin"),
            report=row["report"],
            first=row.get("first", row["reason"]),
        )
        for row in rows
    ]
    return {truth.case: truth for truth in known}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay said of a case: every change of its own server, and pages of other servers."""

    changes: tuple[Mapping[str, Any], ...]
    final: Mapping[str, Any]
    pages_of_others: int
    silent_at: float | None


def outcome(documents: Iterable[Mapping[str, Any]], server: str, silent_at: float | None) -> Outcome:
    """`documents`: one per server, as `replay` prints them."""
    of = {document["server"]: document for document in documents}
    others = [change for name, document in of.items() if name != server for change in document["changes"]]
    return Outcome(
        tuple(of[server]["changes"]),
        of[server]["final"],
        sum(change["state"] in PAGES for change in others),
        silent_at,
    )


def first(result: Outcome, states: tuple[str, ...]) -> float | None:
    """Seconds of the first change to one of these states; None = never."""
    return next((change["t"] for change in result.changes if change["state"] in states), None)


def misses(truth: Truth, result: Outcome) -> list[str]:
    """What is wrong, in words; empty = all as it must be."""
    found = [*_false_pages(truth, result), *_too_late(truth, result), *_flaps(truth, result)]
    for name, must in (("state", truth.state), ("reason", truth.reason), ("suspect_rank", truth.rank)):
        if result.final[name] != must:
            found.append(f"{name} {result.final[name]}, must be {must}")
    return found


def _false_pages(truth: Truth, result: Outcome) -> list[str]:
    paged = first(result, PAGES)
    if result.pages_of_others:
        return ["page: of another server"]
    if paged is None:
        return []
    if truth.kind != "page":
        return [f"page: at {paged} s"]
    if result.silent_at is None or paged < result.silent_at:
        return [f"page: at {paged} s, too early"]
    return []


def _flaps(truth: Truth, result: Outcome) -> list[str]:
    """A state that ends while nothing has changed resolves an alert, and then repeats it."""
    begins = first(result, (truth.state,))
    if truth.state not in ("stalled", "suspect") or begins is None:
        return []
    ends = sum(change["t"] > begins and change["state"] != truth.state for change in result.changes)
    return [f"flaps: {ends} times"] if ends else []


def _too_late(truth: Truth, result: Outcome) -> list[str]:
    """Whether the page (or the suspicion) stood in time, and for the right reason from the first."""
    if truth.kind == "never" or result.silent_at is None or truth.by is None:
        return []
    states = PAGES if truth.kind == "page" else ("suspect",)
    came = next((change for change in result.changes if change["state"] in states), None)
    if came is None:
        return ["late: never"]
    found, seconds = [], came["t"] - result.silent_at
    if seconds > truth.by + 1e-6:
        found.append(f"late: {seconds:.0f} s, must be {truth.by} s")
    if came["reason"] != truth.first:
        found.append(f"reason first {came['reason']}, must be {truth.first}")
    return found
