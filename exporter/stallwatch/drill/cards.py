"""The stand-in cards that a stand-in server holds: one for each rank, filled while it loads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from .conditions import Condition
from .nvml_standin import LIBRARY, StandIn

GIB = 1 << 30
CONTEXT_GIB = 0.5
"""What a process holds before it has loaded anything."""

_STEP_SECONDS = 0.5
_LOADING_WATTS = 140.0
_LIMIT_WATTS = 700.0


@dataclass(frozen=True, slots=True)
class CardPlan:
    """What the cards of a server show, as a share of its load done (0 to 1)."""

    condition: Condition
    pids: Sequence[int]

    def held_bytes(self, share: float) -> int:
        return int((CONTEXT_GIB + (self.condition.held_gib - CONTEXT_GIB) * share) * GIB)

    def figures(self, share: float) -> dict[str, object]:
        """Keys and values of the stand-in's state, the same for every card."""
        condition, loading = self.condition, share < 1.0
        bytes_per_second = (condition.held_gib - CONTEXT_GIB) * GIB / max(condition.load_seconds, _STEP_SECONDS)
        return {
            "pcie_rx_per_second": int(bytes_per_second) if loading else 0,
            "power_mw": int(1000 * (_LOADING_WATTS if loading else condition.gpu_watts)),
            "power_limit_mw": int(1000 * _LIMIT_WATTS),
            "util_gpu": 0 if loading else round(100 * condition.gpu_utilization),
            "util_mem": 0 if loading else round(100 * condition.gpu_memory_utilization),
            **{f"{card}.processes": f"{pid}:{self.held_bytes(share)}" for card, pid in enumerate(self.pids)},
        }


def hold_cards(folder: Path, condition: Condition, pids: Sequence[int]) -> None:
    """Fill the cards in a thread of its own: at its end the load is over."""
    cards = StandIn(folder, folder / LIBRARY, count=len(pids))
    plan = CardPlan(condition, tuple(pids))
    Thread(target=_fill, args=(cards, plan), daemon=True).start()


def _fill(cards: StandIn, plan: CardPlan) -> None:
    started, share = time.monotonic(), 0.0
    while share < 1.0:
        share = min(1.0, (time.monotonic() - started) / max(plan.condition.load_seconds, _STEP_SECONDS))
        cards.update(plan.figures(share))
        time.sleep(_STEP_SECONDS)
