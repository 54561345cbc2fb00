"""The checks, in order of certainty.  Each looks at Evidence and either speaks (a Finding) or abstains (None).

CHECKS is the whole of the rules of CONTRACT section 4 that exist; the first that speaks wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config import Thresholds
from ..model import Verdict
from .evidence import Evidence, RankEvidence

ROOT_GRACE_SECONDS = 60.0
"""How long a dead set of ranks waits for its root: an orderly end takes its time."""

CULPRIT_WAITS = frozenset(("stopped", "disk", "sleep", "running"))


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check says."""

    state: str
    reason: str = "none"
    suspect_rank: str | None = None


Check = Callable[[Evidence, Thresholds, Verdict | None], Finding | None]


def never_came(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A configured server without a process."""
    return None if evidence.known else Finding("gone")


def stays_failed(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Over is over: until the name starts again (which begins another timeline)."""
    if previous is not None and previous.state == "failed":
        return Finding("failed", previous.reason, previous.suspect_rank)
    return None


def ended_orderly(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    if evidence.root_gone_age is not None and evidence.shutdown:
        return Finding("gone")
    return None


def rank_dead(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A rank or engine that was seen is gone while others live.  When all went together: wait for the root."""
    if not evidence.deaths or evidence.shutdown:
        return None
    first_age = evidence.deaths[0][0]
    others_live = evidence.live_ranks > 0
    if not others_live and (evidence.root_gone_age is not None or first_age < ROOT_GRACE_SECONDS):
        return None
    return Finding("failed", "rank_dead", first_dead(evidence))


def fatal_log(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A fatal line, confirmed by a death or by a window in which nothing moved."""
    if evidence.fatal_age is None or evidence.shutdown:
        return None
    confirmed = evidence.root_gone_age is not None or any(
        abs(age - evidence.fatal_age) <= ROOT_GRACE_SECONDS for age, _ in evidence.deaths
    )
    quiet = min(evidence.progress_age, evidence.fatal_age) > thresholds.window
    if confirmed or (quiet and not evidence.ambiguous_moving):
        return Finding("failed", "fatal_log", first_dead(evidence) or evidence.fatal_rank)
    return None


def exited(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """The first process is gone without a word: a failure before ready, an end after (we see no exit code)."""
    if evidence.root_gone_age is None:
        return None
    if evidence.ready:
        return Finding("gone")
    return Finding("failed", "exited", first_dead(evidence))


def is_ready(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Ready: working while work is owed, else idle whatever threads and log do."""
    if not evidence.ready:
        return None
    if evidence.demand is None:
        return Finding("idle", "no_evidence")
    return Finding("working" if evidence.demand > 0 else "idle")


def stopped(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """State T on a rank or engine for one window, nothing else moving."""
    frozen = [r for r in evidence.ranks if r.stopped_age is not None and r.stopped_age >= thresholds.window]
    if not frozen or evidence.progress_age < thresholds.window or evidence.ambiguous_moving:
        return None
    return Finding(
        "stalled", "stopped", frozen[0].rank if len(frozen) == 1 else awaited_rank(evidence, thresholds)
    )


def progresses(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    if evidence.progress_age > thresholds.window:
        return None
    slow = evidence.phase_age > thresholds.budget(evidence.phase)
    return Finding("slow" if slow else "working")


def quiet(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    return Finding("quiet") if evidence.progress_age < thresholds.stall_after else None


def cannot_tell(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Too little is readable to conclude anything from silence."""
    if not evidence.storage_readable:
        return Finding("unknown", "unreadable")
    if evidence.log == "readable" or evidence.gpu_readable:
        return None
    return Finding("unknown", "unreadable" if evidence.log == "unreadable" else "no_evidence")


def busy_spin(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """CPU busy, nothing else moves: at most suspect."""
    if not evidence.ambiguous_moving:
        return None
    return Finding("suspect", "busy_spin", awaited_rank(evidence, thresholds))


def waiting_remote(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """One node of several stands still: the cause may be on another.  Only a rule over the group pages."""
    return (
        Finding("suspect", "waiting_remote", awaited_rank(evidence, thresholds))
        if evidence.nnodes > 1
        else None
    )


def open_autotune(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Silent, near-idle autotunes of hours exist: at most suspect."""
    if not evidence.autotune_open:
        return None
    return Finding("suspect", _quiet_reason(evidence, thresholds), awaited_rank(evidence, thresholds))


def still(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Nothing moves, and enough is readable to say so."""
    return Finding("stalled", _quiet_reason(evidence, thresholds), awaited_rank(evidence, thresholds))


CHECKS: tuple[Check, ...] = (
    never_came,
    stays_failed,
    ended_orderly,
    rank_dead,
    fatal_log,
    exited,
    is_ready,
    stopped,
    progresses,
    quiet,
    cannot_tell,
    busy_spin,
    waiting_remote,
    open_autotune,
    still,
)


def _quiet_reason(evidence: Evidence, thresholds: Thresholds) -> str:
    if any(r.disk_age is not None and r.disk_age >= thresholds.window for r in evidence.ranks):
        return "blocked_io"
    return "idle_wait" if evidence.threads_readable else "none"


def first_dead(evidence: Evidence) -> str | None:
    """The rank seen dead first; None when several went at once."""
    if not evidence.deaths:
        return None
    oldest = max(age for age, _ in evidence.deaths)
    first = [rank for age, rank in evidence.deaths if age >= oldest - 1e-6]
    return first[0] if len(first) == 1 else None


def awaited_rank(evidence: Evidence, thresholds: Thresholds) -> str | None:
    """The rank the others wait for (CONTRACT section 4, "phase"); None when nothing singles one out."""
    ranks = [rank for rank in evidence.ranks if not rank.is_engine]
    if len(ranks) < 2:
        return None
    for single_out in (_dead_one, _fewest_markers, _other_wait, _oldest_progress):
        if (name := single_out(ranks, thresholds)) is not None:
            return name
    return None


def _dead_one(ranks: list[RankEvidence], thresholds: Thresholds) -> str | None:
    return _single([rank for rank in ranks if rank.alive is False])


def _fewest_markers(ranks: list[RankEvidence], thresholds: Thresholds) -> str | None:
    fewest = min(rank.markers for rank in ranks)
    return _single([rank for rank in ranks if rank.markers == fewest])


def _other_wait(ranks: list[RankEvidence], thresholds: Thresholds) -> str | None:
    """The one whose main thread waits in something else than all the others; then the one with another set."""
    for classes in (_main_waits(ranks), _all_waits(ranks)):
        odd = _odd_one(classes)
        if odd is not None:
            return odd
    return None


def _main_waits(ranks: list[RankEvidence]) -> dict[str, frozenset[str]]:
    return {r.rank: frozenset((r.main_wait,)) for r in ranks if r.main_wait is not None}


def _all_waits(ranks: list[RankEvidence]) -> dict[str, frozenset[str]]:
    return {r.rank: r.waits for r in ranks if r.waits is not None}


def _odd_one(classes: dict[str, frozenset[str]]) -> str | None:
    """The single rank in a culprit's class that none of the others is in."""
    odd = []
    for rank, own in classes.items():
        others = [theirs for name, theirs in classes.items() if name != rank]
        shared = frozenset().union(*others) if others else frozenset()
        if others and (own & CULPRIT_WAITS) - shared:
            odd.append(rank)
    return odd[0] if len(odd) == 1 else None


def _oldest_progress(ranks: list[RankEvidence], thresholds: Thresholds) -> str | None:
    """The one whose progress is older than everybody else's by more than one window."""
    known = sorted((r.progress_age, r.rank) for r in ranks if r.progress_age is not None)
    if len(known) < len(ranks) or known[-1][0] - known[-2][0] <= thresholds.window:
        return None
    return known[-1][1]


def _single(ranks: list[RankEvidence]) -> str | None:
    return ranks[0].rank if len(ranks) == 1 else None
