"""Which rank the others wait for.  Pure; in words: docs/VERDICTS.md, "The rank the others wait for"."""

from __future__ import annotations

from collections.abc import Mapping

from ..model import WRITE
from .evidence import Evidence, RankEvidence

CULPRIT_WAITS = (frozenset(("stopped",)), frozenset(("disk",)), frozenset(("sleep", "running")))
"""What the awaited rank waits in while the others are in futex or poll; the surest first."""


def first_dead(evidence: Evidence) -> str | None:
    """The rank seen dead first; None when several went at once, or when there is only one."""
    if not evidence.deaths or evidence.rank_count <= 1:
        return None
    oldest = max(age for age, _ in evidence.deaths)
    first = [rank for age, rank in evidence.deaths if age >= oldest - 1e-6]
    return first[0] if len(first) == 1 else None


def awaited_rank(evidence: Evidence, window: float) -> str | None:
    """See docs/VERDICTS.md, "The rank the others wait for"; None when nothing singles one out."""
    ranks = [rank for rank in evidence.ranks if not rank.is_engine]
    if evidence.rank_count < 2:
        return None
    if evidence.missing:
        return evidence.missing_ranks[0] if len(evidence.missing_ranks) == evidence.missing == 1 else None
    if dead := [rank.rank for rank in ranks if rank.alive is False]:
        return first_dead(evidence) if len(dead) > 1 else dead[0]
    if writers := [rank.rank for rank in ranks if rank.main_wait == WRITE]:
        return writers[0] if len(writers) == 1 else None  # what it passed it cannot say; several wait for their reader
    fewest = min(rank.markers for rank in ranks)
    behind = [rank.rank for rank in ranks if rank.markers == fewest]
    if len(behind) == 1:
        return behind[0]
    return _other_wait(ranks, behind) or _oldest_progress(ranks, behind, window)


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
    """The one whose progress is older than everybody else's by more than one window.

    Not of a rank whose GPU is read worse than another's: it may have moved as late as all the others, unseen.
    """
    known = sorted((r.progress_age, r.rank) for r in ranks if r.progress_age is not None)
    if len(known) < len(ranks) or known[-1][0] - known[-2][0] <= window:
        return None
    name, unread = known[-1][1], {rank.rank: rank.unread for rank in ranks}
    return name if name in behind and all(unread[name] <= each for each in unread.values()) else None
