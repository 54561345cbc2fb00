"""The checks, in order of certainty.  Each looks at Evidence and either speaks (a Finding) or abstains (None).

CHECKS is the whole of the rules; the first that speaks wins.  In words: docs/VERDICTS.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import Thresholds
from ..model import Verdict
from .evidence import Evidence, RankEvidence

ROOT_GRACE_SECONDS = 60.0
"""How long a dead set of ranks waits for its root, and within which a death confirms a fatal line."""

SHUTDOWN_LAG_SECONDS = 1.0
"""A fatal line that is older than the shutdown line by more than this was no part of the orderly end."""

CULPRIT_WAITS = (frozenset(("stopped",)), frozenset(("disk",)), frozenset(("sleep", "running")))
"""What the awaited rank waits in while the others are in futex or poll; the surest first."""


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
    """The server said that it ends, and its first process is gone."""
    if evidence.root_gone_age is None or not evidence.shutdown or _fatal_before_shutdown(evidence):
        return None
    return Finding("gone")


def engine_ended(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """An engine inside a program is gone as a whole and the program lives on: `del llm` in a notebook.

    Before it was ready this is an end of its work only where no log could tell of a failure.
    """
    over = evidence.deaths and not any(rank.alive for rank in evidence.ranks)
    if evidence.role != "embedded" or not over or evidence.root_gone_age is not None:
        return None
    if evidence.fatal_age is not None or not _may_have_been_done(evidence):
        return None
    return Finding("idle")


def _may_have_been_done(evidence: Evidence) -> bool:
    return evidence.ready or (evidence.role == "embedded" and evidence.log != "readable")


def rank_dead(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A rank or engine that was seen is gone while others live.  When all went together: wait for the root."""
    if not evidence.deaths or evidence.shutdown:
        return None
    waited = max(age for age, _ in evidence.deaths)
    if not evidence.live_ranks and (evidence.root_gone_age is not None or waited < ROOT_GRACE_SECONDS):
        return None
    return Finding("failed", "rank_dead", first_dead(evidence))


def fatal_log(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """A fatal line, confirmed by a death or by a window in which nothing moved."""
    if evidence.fatal_age is None or (evidence.shutdown and not _fatal_before_shutdown(evidence)):
        return None
    ends = [age for age, _ in evidence.deaths]
    if evidence.root_gone_age is not None:
        ends.append(evidence.root_gone_age)
    confirmed = any(abs(age - evidence.fatal_age) <= ROOT_GRACE_SECONDS for age in ends)
    still_since = min(evidence.progress_age, evidence.fatal_age)
    silent = still_since >= thresholds.window and _nothing_moves(evidence, thresholds.window)
    if confirmed or (silent and not evidence.ready):  # nothing moves in a server that nobody asks anything
        rank = first_dead(evidence) if evidence.deaths else awaited_rank(evidence, thresholds)
        return Finding("failed", "fatal_log", rank)
    return None


def _fatal_before_shutdown(evidence: Evidence) -> bool:
    fatal, shutdown = evidence.fatal_age, evidence.shutdown_age
    return fatal is not None and shutdown is not None and fatal - shutdown > SHUTDOWN_LAG_SECONDS


def _nothing_moves(evidence: Evidence, seconds: float) -> bool:
    """Nothing moved for so long, and enough could be read all the time to say so."""
    silent = evidence.progress_age >= seconds and not evidence.ambiguous_moving
    return silent and can_conclude(evidence, seconds)


def can_conclude(evidence: Evidence, seconds: float) -> bool:
    """See docs/VERDICTS.md, "Sufficient evidence": whether `seconds` of silence prove anything."""
    if not evidence.storage_readable or evidence.watched_age < seconds:
        return False
    return evidence.log == "readable" or (evidence.gpu_readable and evidence.progress_age >= 2 * seconds)


def exited(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """The first process is gone without a word: a failure before ready, an end after (we see no exit code)."""
    if evidence.root_gone_age is None:
        return None
    if evidence.fatal_age is None and _may_have_been_done(evidence):
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
    halted = [r for r in evidence.ranks if r.stopped_age is not None and r.stopped_age >= thresholds.window]
    if not halted or not _nothing_moves(evidence, thresholds.window):
        return None
    named = halted[0].rank if len(halted) == 1 and not evidence.has_one_rank else None
    return Finding("stalled", "stopped", named or awaited_rank(evidence, thresholds))


def progresses(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    if evidence.progress_age > thresholds.window:
        return None
    slow = evidence.phase_age > thresholds.budget(evidence.phase)
    return Finding("slow" if slow else "working")


def quiet(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    return Finding("quiet") if evidence.progress_age < thresholds.stall_after else None


def cannot_tell(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """Too little is readable, or was watched for too short, to conclude anything from silence."""
    if can_conclude(evidence, thresholds.stall_after):
        return None
    return Finding("unknown", "no_evidence" if evidence.storage_readable else "unreadable")


def busy(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """An ambiguous channel moves and nothing else: at most suspect."""
    moving = evidence.ambiguous_moving
    if not moving:
        return None
    return Finding("suspect", "busy_spin" if "cpu" in moving else "none", awaited_rank(evidence, thresholds))


def waiting_remote(evidence: Evidence, thresholds: Thresholds, previous: Verdict | None) -> Finding | None:
    """One node of several stands still: the cause may be on another.  Only a rule over the group pages."""
    return Finding("suspect", "waiting_remote", awaited_rank(evidence, thresholds)) if evidence.nnodes > 1 else None


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
    engine_ended,
    rank_dead,
    fatal_log,
    exited,
    is_ready,
    stopped,
    progresses,
    quiet,
    cannot_tell,
    busy,
    waiting_remote,
    open_autotune,
    still,
)


def _quiet_reason(evidence: Evidence, thresholds: Thresholds) -> str:
    if any(r.disk_age is not None and r.disk_age >= thresholds.window for r in evidence.ranks):
        return "blocked_io"
    asleep = evidence.threads_readable and not any("running" in (rank.waits or ()) for rank in evidence.ranks)
    return "idle_wait" if asleep else "none"


def first_dead(evidence: Evidence) -> str | None:
    """The rank seen dead first; None when several went at once, or when there is only one."""
    if not evidence.deaths or evidence.has_one_rank:
        return None
    oldest = max(age for age, _ in evidence.deaths)
    first = [rank for age, rank in evidence.deaths if age >= oldest - 1e-6]
    return first[0] if len(first) == 1 else None


def awaited_rank(evidence: Evidence, thresholds: Thresholds) -> str | None:
    """See docs/VERDICTS.md, "The rank the others wait for"; None when nothing singles one out."""
    ranks = [rank for rank in evidence.ranks if not rank.is_engine]
    if len(ranks) < 2:
        return None
    if dead := [rank.rank for rank in ranks if rank.alive is False]:
        return first_dead(evidence) if len(dead) > 1 else dead[0]
    fewest = min(rank.markers for rank in ranks)
    behind = [rank.rank for rank in ranks if rank.markers == fewest]
    if len(behind) == 1:
        return behind[0]
    return _other_wait(ranks, behind) or _oldest_progress(ranks, behind, thresholds.window)


def _other_wait(ranks: list[RankEvidence], behind: list[str]) -> str | None:
    """The one whose main thread waits in something else than all the others; then the one with another set."""
    mains = {r.rank: frozenset((r.main_wait,)) for r in ranks if r.main_wait is not None}
    sets = {r.rank: r.waits for r in ranks if r.waits is not None}
    for classes in (mains, sets):
        name = _odd_one(classes) if len(classes) == len(ranks) else None
        if name in behind:
            return name
    return None


def _odd_one(classes: Mapping[str, frozenset[str | None]]) -> str | None:
    """The single rank that is in a culprit's class in which none of the others is."""
    for culprit in CULPRIT_WAITS:
        inside = {rank: own & culprit for rank, own in classes.items() if own & culprit}
        odd = [rank for rank, own in inside.items() if own - _shared(inside, rank)]
        if odd:
            return odd[0] if len(odd) == 1 else None
    return None


def _shared(inside: Mapping[str, frozenset[str | None]], rank: str) -> frozenset[str | None]:
    return frozenset().union(*(theirs for other, theirs in inside.items() if other != rank))


def _oldest_progress(ranks: list[RankEvidence], behind: list[str], window: float) -> str | None:
    """The one whose progress is older than everybody else's by more than one window."""
    known = sorted((r.progress_age, r.rank) for r in ranks if r.progress_age is not None)
    if len(known) < len(ranks) or known[-1][0] - known[-2][0] <= window:
        return None
    return known[-1][1] if known[-1][1] in behind else None
