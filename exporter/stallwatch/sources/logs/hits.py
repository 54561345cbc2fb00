"""Which hits of a turn are told: however much it reads, a bounded number."""

from __future__ import annotations

from .counters import Voice
from .lines import Hit
from .times import seconds_between

MOST_EVENTS = 2000
"""Events told of one log in one turn; the counters count them all."""
MOST_KEPT = 8 * MOST_EVENTS
"""Of a turn that reads on."""
TOLD_ONCE = frozenset(("error", "watchdog", "waiting", "lock_wait", "stats"))
"""Events of which one turn tells the last of each kind and rank only."""
LONGEST_LOG_SECONDS = 10 * 366 * 86400.0
"""Times printed further apart than this are no times."""


def bounded(hits: list[Hit]) -> list[Hit]:
    """What may still be told of a turn that goes on: however much it reads, no more is kept of it."""
    once = [hit for hit in hits if hit.event in TOLD_ONCE]
    each = [hit for hit in hits if hit.event not in TOLD_ONCE]
    kept = {id(hit) for hit in [*_last_of_each(once)[-MOST_EVENTS:], *each[-MOST_EVENTS:]]}
    return [hit for hit in hits if id(hit) in kept]


def told_of(hits: list[Hit]) -> list[Hit]:
    """What is told of a turn: of repeating kinds the last one, and no more than a bounded number."""
    return _last_of_each(hits)[-MOST_EVENTS:] if len(hits) > 1 else hits


def _last_of_each(hits: list[Hit]) -> list[Hit]:
    last = {(hit.event, hit.rank, hit.fields.get("kind")): hit for hit in hits if hit.event in TOLD_ONCE}
    return [
        hit for hit in hits if hit.event not in TOLD_ONCE or last[hit.event, hit.rank, hit.fields.get("kind")] is hit
    ]


def dated(voice: Voice, modified: float | None, hit: Hit) -> float | None:
    """Unix time of a line: that of the last one, less the time the log printed since; None for an absurd one."""
    if hit.time is None or voice.scanner.last_time is None or modified is None:
        return None
    since = seconds_between(hit.time, voice.scanner.last_time)
    return modified - since if since < LONGEST_LOG_SECONDS else None
