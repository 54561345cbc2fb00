"""Starts of one server name that end one after the other, none of which becomes ready: one story, not many.  Pure.

A container that is started again in its pod is the same one; another pod of the same name is another story.

In words: docs/VERDICTS.md, "A loop of restarts".
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import Thresholds
from .model import Verdict

LEAST_FAILED = 2
"""Starts in a row that were seen to fail make a loop."""
LEAST_ENDED = 5
"""So many that only ended, or lived for `stall_after`, too: somebody who starts a server again by hand, and looks how
it gets on, does it two or three times."""

LONGEST_LIFE = 15.0
"""Starts that lived for so many times `stall_after` (an hour) have a story of their own."""
LONGEST_BREAK = 2.5
"""A break longer than this many times `stall_after` (10 min) ends the row: supervisors wait at most 5 min."""


@dataclass(slots=True)
class Restarts:
    """The row of starts so far, and what is known of the present one.  Moments are of our clock."""

    failed: int = 0  # were seen to fail soon
    ended: int = 0  # ended, and nobody said why; or failed late
    longest: float = 0.0  # seconds the longest of them lived
    since: float | None = None  # when the first of them was over
    began: float | None = None  # the present start, as far as we watched
    over_at: float | None = None  # since when the present start is over
    was_orderly: bool = False  # the present one said that it ends, or somebody stops it
    was_unsure: bool = False  # the present one stood still where it may have been ready without a word
    tells_ready: bool = False  # a log of this name could be read, and says when a start is ready
    is_held: bool = False  # the present one counts as failed, for all before it did
    pod_uid: str = ""  # whose starts they are, where it is known

    @property
    def is_loop(self) -> bool:
        return self.failed >= LEAST_FAILED or self.failed + self.ended >= LEAST_ENDED

    def note(self, *, ready: bool, orderly: bool, over: bool, unsure: bool, tells_ready: bool, now: float) -> None:
        """What is seen of the present start at a tick."""
        self.was_orderly, self.was_unsure = self.was_orderly or orderly, self.was_unsure or unsure
        self.tells_ready = self.tells_ready or tells_ready
        self.over_at = (now if self.over_at is None else self.over_at) if over else None
        if ready:
            self._clear()

    def begin(
        self,
        last: Verdict | None,
        was_ready: bool,
        is_job: bool,
        now: float,
        thresholds: Thresholds,
        pod_uid: str = "",
    ) -> Verdict | None:
        """Another start began at `now`.  What it counts as from its first moment on; None: judged by itself.

        `last`: the verdict on the start before; `is_job`: such programs end when their work is done; `pod_uid`: of
        the pod it is in, "" = in none, or not known.
        """
        is_moved = bool(self.pod_uid and pod_uid and self.pod_uid != pod_uid)
        self.pod_uid = pod_uid or self.pod_uid
        if is_moved:
            self._clear()
        elif last is not None and self.began is not None:
            self._add(last, was_ready, is_job, now, thresholds)
        self.began, self.over_at, self.was_orderly, self.was_unsure = now, None, False, False
        self.is_held = self.is_loop
        if not self.is_held or last is None:
            return None
        reason = last.reason if last.state == "failed" else "exited"
        return Verdict("failed", reason, now if self.since is None else self.since)

    def _add(self, last: Verdict, was_ready: bool, is_job: bool, now: float, thresholds: Thresholds) -> None:
        """The start before is over.  What may have been ready is no part of a row, nor what a long time is between."""
        assert self.began is not None  # noqa: S101  # the caller asked
        over_at = now if self.over_at is None else self.over_at
        lived = over_at - self.began
        is_failure = last.state == "failed" and not self.is_held
        is_orderly = self.was_orderly or was_ready or (is_job and not is_failure)
        may_have_worked = self.was_unsure or lived > LONGEST_LIFE * thresholds.stall_after
        if is_orderly or may_have_worked or now - over_at > LONGEST_BREAK * thresholds.stall_after:
            self._clear()
            return
        if not is_failure and not self.tells_ready:
            return
        is_quick_failure = is_failure and lived < thresholds.stall_after
        self.failed += is_quick_failure
        self.ended += not is_quick_failure
        self.longest = max(self.longest, lived)
        self.since = over_at if self.since is None else self.since

    def _clear(self) -> None:
        self.failed, self.ended, self.longest, self.since, self.is_held = 0, 0, 0.0, None, False

    def lets_go(self, now: float, thresholds: Thresholds) -> bool:
        """Whether the present start, which counted as failed, is to be judged by itself from now on.

        It is ready (`note`), lived longer than all before it, or was ended on purpose; or nothing starts it any more.
        """
        if self.began is None or not self.is_held:
            return True
        if self.over_at is not None:
            return self.was_orderly or now - self.over_at > LONGEST_BREAK * thresholds.stall_after
        return now - self.began > self.longest + thresholds.window
