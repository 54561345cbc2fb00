"""The public reports behind the corpus (reports.yaml), and which recordings play each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

KINDS = ("hang", "dead", "driver", "slow", "idle", "monitor")
_FILE = Path(__file__).parent / "reports.yaml"


@dataclass(frozen=True, slots=True)
class Report:
    """One row of reports.yaml.  `instead`: why nothing is recorded; empty where something is."""

    id: str
    kind: str
    grade: str
    where: str
    what: str
    also: tuple[str, ...] = ()
    instead: str = ""

    def recordings(self, cases: Iterable[str]) -> list[str]:
        """Those of `cases` that play it, in their order."""
        return [case for case in cases if case.startswith(f"{self.id}-") or case in self.also]


@cache
def load_reports() -> tuple[Report, ...]:
    rows = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return tuple(Report(**{**row, "also": tuple(row.get("also", ()))}) for row in rows)


def unknown_ids(cases: Iterable[str]) -> set[str]:
    """Ids in names of recordings that no row explains."""
    named = {found.group(1) for case in cases if (found := re.match(r"(h\d+)-", case))}
    return named - {report.id for report in load_reports()}
