"""The last changes of verdict, for the page: what was said before, and what is said now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..model import Report
from ..printable import printable

MOST_CHANGES = 20


@dataclass(frozen=True, slots=True)
class Change:
    """One change: `now` and `before` as `stalled (idle_wait)`; None: the server is not, or was not, there."""

    timestamp: float  # Unix seconds of the report that said it first
    server: str
    now: str | None
    before: str | None


class Changes:
    """Compares each report with the one before.  Used by the tick alone; what it returns never changes."""

    def __init__(self) -> None:
        self._last: dict[str, str] | None = None
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)

    def hear(self, report: Report) -> tuple[Change, ...]:
        """The changes up to `report`, the newest first.  What the first report says is no change."""
        now = {each.server.name: _said(each.verdict.state, each.verdict.reason) for each in report.servers}
        before = now if self._last is None else self._last
        for name in sorted(now.keys() | before.keys(), reverse=True):
            if now.get(name) != before.get(name):
                change = Change(report.timestamp, printable(name), now.get(name), before.get(name))
                self._changes.appendleft(change)
        self._last = now
        return tuple(self._changes)


def _said(state: str, reason: str) -> str:
    return state if reason == "none" else f"{state} ({reason})"
