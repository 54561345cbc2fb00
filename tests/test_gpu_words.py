"""What is said of a rank's cards: cells of the table, and half a sentence."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from stallwatch.gpu_words import GPU_CELLS, gpu_document, gpu_words
from stallwatch.model import GpuState

GIB = 1 << 30


def rank(*gpus: GpuState) -> dict[str, Any]:
    """A rank of the document that uses these cards."""
    return {"gpu": gpus[0].gpu if gpus else None, "gpus": [gpu_document(gpu) for gpu in gpus]}


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    return tuple(words(found) for words in GPU_CELLS.values())


CARD = GpuState("GPU-a", "3", 76 * GIB, 76.4 * GIB, 0.0, 118.2, 117.4)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((), ("-", "-", "-", "-")),
        ((CARD,), ("3", "76.0 GiB", "0%", "118 W, idle 117 W")),
        ((GpuState("GPU-a", "3"),), ("3", "?", "?", "?")),
        ((GpuState("GPU-3f2a1b9c-0000-4000-8000-000000000000"),), ("GPU-3f2a1b9c", "?", "?", "?")),
        # Somebody else is on the card, or it is not read what the rank holds.
        ((GpuState("g", "3:1", 76 * GIB, 77 * GIB),), ("3:1", "76.0/77.0 GiB", "?", "?")),
        ((GpuState("g", "3:1", 76 * GIB, 77 * GIB - 1),), ("3:1", "76.0 GiB", "?", "?")),
        ((GpuState("g", "3", None, 80 * GIB),), ("3", "?/80.0 GiB", "?", "?")),
        ((GpuState("g", "3", 0.0, None, 1.0, 259.0),), ("3", "0.0 GiB", "100%", "259 W, idle ?")),
        ((GpuState("g", "3", idle_power_watts=117.0),), ("3", "?", "?", "?")),
        # Several cards.
        (
            (CARD, GpuState("GPU-b", "4", 4 * GIB, 4 * GIB, 1.0, 700.0, 100.0)),
            ("3,4", "80.0 GiB", "0-100%", "818 W, idle 217 W"),
        ),
        ((CARD, GpuState("GPU-b", "4")), ("3,4", "?", "?", "?")),
        (tuple(GpuState(f"g{n}", str(n)) for n in range(8)), ("0-7", "?", "?", "?")),
        (tuple(GpuState(f"g{n}", str(n)) for n in (0, 2, 3)), ("0,2,3", "?", "?", "?")),
        (tuple(GpuState(f"g{n}", f"0:{n}") for n in range(3)), ("0:0,0:1,0:2", "?", "?", "?")),
    ],
)
def test_cells(gpus: tuple[GpuState, ...], expected: tuple[str, ...]) -> None:
    assert cells(rank(*gpus)) == expected


def test_a_document_that_only_names_the_card_is_told() -> None:
    assert cells({"gpu": "GPU-3f2a1b9c-0000"}) == ("GPU-3f2a1b9c", "?", "?", "?")
    assert cells({"gpu": None}) == ("-", "-", "-", "-")


def test_what_is_no_number_is_not_known() -> None:
    made = gpu_document(GpuState("g", "", math.inf, math.nan, math.nan, -math.inf, None))

    assert set(made.values()) == {"g", None}
    assert json.dumps(made, allow_nan=False)


def card(number: int, held: float | None = 76.2 * GIB, used: float | None = 0.0) -> GpuState:
    return GpuState(f"GPU-{number}", str(number), held, None, used)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], ""),
        ([rank()], ""),
        ([rank(GpuState("g"))], ""),
        ([rank(card(0))], "on its GPU 76 GiB held, 0 % used"),
        ([rank(card(0)), rank(card(1))], "on each of 2 GPUs 76 GiB held, 0 % used"),
        ([rank(card(0)), rank(card(1, 70 * GIB, 1.0))], "on each of 2 GPUs 70 to 76 GiB held, 0 to 100 % used"),
        ([rank(card(0, 1.04 * GIB))], "on its GPU 1.0 GiB held, 0 % used"),
        # Two ranks on one card: what both hold.
        ([rank(card(0)), rank(card(0, 10 * GIB))], "on its GPU 86 GiB held, 0 % used"),
        # A part of the cards says nothing about all of them.
        ([rank(card(0)), rank(card(1, None))], "on each of 2 GPUs 0 % used"),
        ([rank(card(0)), rank(card(1, used=None))], "on each of 2 GPUs 76 GiB held"),
    ],
)
def test_the_cards_in_half_a_sentence(ranks: list[dict[str, Any]], expected: str) -> None:
    assert gpu_words(ranks) == expected
