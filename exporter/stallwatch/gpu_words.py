"""What `check` and the page say of a rank's cards: its part of the document, table cells, and half a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .model import GpuState
from .printable import printable

Record = Mapping[str, Any]
"""A rank of the document, or one of its `gpus`, as `json.loads` gives it."""

_GIB = 1 << 30
_NOTEWORTHY_BYTES = 1 * _GIB
"""So much more in use on a card than its rank holds is shown.  The driver's own share and a context are less."""

_SHORT_UUID = 12
"""Characters of a UUID that stand for a card without an index."""


def gpu_document(gpu: GpuState) -> dict[str, Any]:
    """One of a rank's `gpus`: see docs/REFERENCE.md, "JSON documents"."""
    return {
        "gpu": printable(gpu.gpu),
        "index": printable(gpu.index) or None,
        "memory_held_bytes": _number(gpu.held_bytes),
        "memory_used_bytes": _number(gpu.used_bytes),
        "utilization": _number(gpu.utilization),
        "power_watts": _number(gpu.power_watts),
        "idle_power_watts": _number(gpu.idle_power_watts),
    }


def _number(value: float | None) -> float | None:
    """JSON has no infinity and no NaN: they are not known."""
    return value if value is not None and math.isfinite(value) else None


def cards_of(rank: Record) -> Sequence[Record]:
    """The cards of a rank; a document of another version may only name the first."""
    return rank.get("gpus") or ([{"gpu": rank["gpu"]}] if rank["gpu"] else [])


def gpu_words(ranks: Iterable[Record]) -> str:
    """`on each of 8 GPUs 76 GiB held, 0 % used`; empty where no card is known, or nothing of the cards."""
    held: dict[str, list[Any]] = {}  # of all ranks on a card
    used: dict[str, Any] = {}
    for card in (card for rank in ranks for card in cards_of(rank)):
        held.setdefault(card["gpu"], []).append(card.get("memory_held_bytes"))
        used[card["gpu"]] = card.get("utilization")
    sums = _known(_total(each) for each in held.values())
    shares = _known(used.values())
    words = [f"{_range(map(_gibibytes, sorted(sums)), 'GiB')} held"] if sums else []
    words += [f"{_range(map(_percent, sorted(shares)), '%')} used"] if shares else []
    where = f"on each of {len(held)} GPUs" if len(held) > 1 else "on its GPU"
    return f"{where} {', '.join(words)}" if words else ""


def _gibibytes(size: float) -> str:
    return f"{size / _GIB:.{0 if size >= 10 * _GIB else 1}f}"


def _percent(share: float) -> str:
    return f"{share * 100:.0f}"


def _range(amounts: Iterable[str], unit: str, to: str = " to ", gap: str = " ") -> str:
    """`76 GiB`, `70 to 76 GiB`: of amounts in order, at least one."""
    first, *rest = amounts
    return f"{first}{gap}{unit}" if not rest or rest[-1] == first else f"{first}{to}{rest[-1]}{gap}{unit}"


def _known(values: Iterable[float | None]) -> list[float]:
    """The values; none at all when one of them is not known, for a part is not what it seems to be."""
    every = list(values)
    return [] if None in every else [value for value in every if value is not None]


def _values(cards: Iterable[Record], key: str) -> list[float]:
    return _known(card.get(key) for card in cards)


def _total(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None


# --- cells of the table: of several cards memory and power together, utilisation from the lowest to the highest ---


def _indices(cards: Sequence[Record]) -> str:
    """`3`, `0,2`, `0-7`; of a card without an index the beginning of its UUID."""
    names = [str(card.get("index") or card["gpu"][:_SHORT_UUID]) for card in cards]
    if len(names) > 2 and all(name.isdecimal() and len(name) < 5 for name in names):
        numbers = [int(name) for name in names]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(names)


def _memory(cards: Sequence[Record]) -> str:
    """`76.0 GiB` held; `76.0/80.1 GiB` where noticeably more is in use on the card than the rank holds."""
    held, used = _total(_values(cards, "memory_held_bytes")), _total(_values(cards, "memory_used_bytes"))
    if used is None or (held is not None and used - held < _NOTEWORTHY_BYTES):
        return "?" if held is None else f"{held / _GIB:.1f} GiB"
    return f"{'?' if held is None else f'{held / _GIB:.1f}'}/{used / _GIB:.1f} GiB"


def _used(cards: Sequence[Record]) -> str:
    shares = sorted(_values(cards, "utilization"))
    return _range(map(_percent, shares), "%", to="-", gap="") if shares else "?"


def _power(cards: Sequence[Record]) -> str:
    """`118 W, idle 117 W`."""
    power, idle = _total(_values(cards, "power_watts")), _total(_values(cards, "idle_power_watts"))
    if power is None:
        return "?"
    return f"{power:.0f} W, idle " + ("?" if idle is None else f"{idle:.0f} W")


def _or_dash(words: Callable[[Sequence[Record]], str]) -> Callable[[Record], str]:
    return lambda rank: words(cards) if (cards := cards_of(rank)) else "-"


GPU_CELLS: Mapping[str, Callable[[Record], str]] = {
    "gpu": _or_dash(_indices),
    "memory": _or_dash(_memory),
    "used": _or_dash(_used),
    "power": _or_dash(_power),
}
"""Heading -> what stands below it for a rank: `-` no card is known, `?` it is, and the figure is not."""
