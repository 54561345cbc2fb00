"""Memory of a card that nobody holds: what a restart fails for when a killed server left it behind.

Above all it is what the card lists for PIDs that are gone.  Besides, it is what is in use beyond everything listed;
that is believed only while no process is on the card, for there is memory that the driver does not account to its
process (managed memory, the graphics stack).  Both must be seen for longer than the teardown of a large context takes.
What the driver keeps for itself is no leak: the least that was ever left over is taken for it, up to a limit.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field

from ..procfs import ProcFs
from .owners import Joined

TEARDOWN_SECONDS = 30.0
"""Unmapping 80 to 180 GB takes seconds."""
SLACK_SECONDS = 1.0
"""Two lists that are to be TEARDOWN_SECONDS apart come a little earlier or later."""
LEAK_BYTES = 1 << 30
"""What is left over is small change below: residues of 100 MB, a desktop's 700 MB."""
MOST_RESERVE_BYTES = 1 << 30
"""A driver's reserve is not larger: 570 MiB on an A40, and newer drivers do not count it as used."""

_HOLDING = frozenset(("/dev/nvidia-uvm", "/dev/nvidia-modeset"))
"""Open in whoever computes or draws on a card.  Who only looks at cards (monitors) opens others."""
_HARMLESS = frozenset(("nvidia-persiste",))
"""comm of what has one of them open and holds no memory."""


@dataclass(frozen=True, slots=True)
class Left:
    """Bytes of a card that nobody holds, or why that cannot be known (of READ_REASONS)."""

    bytes: float | None
    reason: str = "not_supported"


@dataclass(slots=True)
class Unowned:
    """Of one card, from one process list to the next.  Times are monotonic seconds, sizes bytes."""

    _gone: dict[int, float] = field(default_factory=dict)  # PID -> since when it is listed and gone
    _least: float = float("inf")  # that was ever left over
    _left_since: float | None = None
    _claimed: float = 0.0  # left over, and nobody's

    def look(self, joined: Joined, used: float | None, now: float, holder: Holders) -> Left:
        """Take a new list, with the memory in use read together with it (None = not known, or of no meaning)."""
        dead = self._dead(joined, now)
        rest = self._rest(joined, used)
        if rest is None:
            self._left_since, self._claimed = None, 0.0
            return Left(dead)
        self._least = min(self._least, rest)
        over = max(0.0, rest - min(self._least, MOST_RESERVE_BYTES))
        if over < LEAK_BYTES:
            self._left_since, self._claimed = None, 0.0
        elif joined.owners:
            self._claimed, self._left_since = min(self._claimed, over), None  # never more than when nobody was there
            if not self._claimed and not dead:
                return Left(None)
        elif reason := holder.reason({row.pid for row in joined.gone}):
            self._left_since, self._claimed = None, 0.0
            return Left(dead or None, reason)
        else:
            self._left_since = now if self._left_since is None else self._left_since
            self._claimed = over if _is_over(self._left_since, now) else 0.0
        return Left(None if dead is None else dead + self._claimed)

    def _dead(self, joined: Joined, now: float) -> float | None:
        """Memory of processes that are gone; None = listed without its size."""
        self._gone = {row.pid: self._gone.get(row.pid, now) for row in joined.gone}
        sizes = [row.bytes for row in joined.gone if _is_over(self._gone[row.pid], now)]
        return None if None in sizes else float(sum(size for size in sizes if size is not None))

    @staticmethod
    def _rest(joined: Joined, used: float | None) -> float | None:
        """In use beyond all that is listed."""
        sizes = [row.bytes for row in (*(row for row, _ in joined.owners), *joined.gone)]
        if used is None or None in sizes:
            return None
        return max(0.0, used - sum(size for size in sizes if size is not None))


def _is_over(since: float, now: float) -> bool:
    return now - since >= TEARDOWN_SECONDS - SLACK_SECONDS


class Holders:
    """Whether a process that no card lists may hold memory of one; looked for at most once in a look.

    Costs the open files of every process, and is asked only while memory seems to be nobody's.
    """

    def __init__(self, proc: ProcFs) -> None:
        self._proc = proc
        self._found: dict[int, str] | None = None  # PID -> why it may hold some

    def reason(self, listed: set[int]) -> str:
        """ "" = nobody holds any; else of READ_REASONS."""
        try:
            if self._found is None:
                self._found = {pid: found for pid in self._proc.pids() if (found := self._of(pid))}
        except OSError:
            return "error"
        reasons = {reason for pid, reason in self._found.items() if pid not in listed}
        return "not_supported" if "not_supported" in reasons else next(iter(reasons), "")

    def _of(self, pid: int) -> str:
        folder = self._proc.path(pid, "fd")
        try:
            for name in os.listdir(folder):
                with suppress(FileNotFoundError, ProcessLookupError):  # closed by now
                    if os.readlink(f"{folder}/{name}") in _HOLDING and not self._is_harmless(pid):
                        return "not_supported"
        except (FileNotFoundError, ProcessLookupError):
            return ""  # it ended
        except OSError:
            return "permission"
        return ""

    def _is_harmless(self, pid: int) -> bool:
        stat = self._proc.certain_stat(pid)
        return stat is None or stat.comm in _HARMLESS
