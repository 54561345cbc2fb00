"""The verdict on one server: pure, no clock, no I/O.

`judge` runs the checks in order of certainty; the first that speaks wins.  One episode keeps one `since`.
"""

from __future__ import annotations

from ..config import Thresholds
from ..model import Verdict
from .checks import CHECKS
from .evidence import Evidence, gather

__all__ = ["CHECKS", "Evidence", "gather", "judge"]

_NAMING_STATES = ("suspect", "stalled", "failed")


def judge(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None, now: float) -> Verdict:
    """The verdict at `now` (monotonic seconds).  `since` stays while the state stays, and so does the name."""
    finding = next(found for check in CHECKS if (found := check(evidence, thresholds, previous)) is not None)
    same = previous is not None and previous.state == finding.state
    rank = finding.suspect_rank if finding.state in _NAMING_STATES else None
    if same and previous is not None and previous.suspect_rank is not None:
        rank = previous.suspect_rank
    return Verdict(
        state=finding.state,
        reason=finding.reason,
        since=previous.since if same and previous is not None else now,
        suspect_rank=rank,
    )
