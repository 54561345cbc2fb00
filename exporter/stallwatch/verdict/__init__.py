"""The verdict on one server: pure, no clock, no I/O.

`judge` runs the checks in order of certainty; the first that speaks wins.  One episode keeps one `since`.
"""

from __future__ import annotations

from ..config import Thresholds
from ..model import Verdict
from .checks import CHECKS, Finding
from .evidence import Evidence, gather

__all__ = ["CHECKS", "Evidence", "gather", "judge"]

_NAMING_STATES = ("suspect", "stalled", "failed")


def judge(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None, now: float) -> Verdict:
    """The verdict at `now` (monotonic seconds).  `since` stays while the state stays."""
    finding = next(found for check in CHECKS if (found := check(evidence, thresholds, previous)) is not None)
    return Verdict(
        state=finding.state,
        reason=_reason(finding, previous),
        since=previous.since if previous is not None and previous.state == finding.state else now,
        suspect_rank=_named(finding, previous),
    )


def _reason(finding: Finding, previous: Verdict | None) -> str:
    """A reason that was found stays while the state stays and nothing better is found: one look tells too little."""
    if finding.reason == "none" and previous is not None and previous.state == finding.state == "stalled":
        return previous.reason
    return finding.reason


def _named(finding: Finding, previous: Verdict | None) -> str | None:
    """The rank the others wait for.  The name sticks while the episode lasts; a failure names its own."""
    if finding.state not in _NAMING_STATES:
        return None
    sticks = previous is not None and previous.state in _NAMING_STATES and finding.state != "failed"
    return (previous.suspect_rank if previous is not None and sticks else None) or finding.suspect_rank
