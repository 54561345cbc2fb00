"""What the driver says to single calls, as one JSON line: `python probe.py`, on card 0, through pynvml.

A program of its own, so that it can be run as another user, and because the library is loaded once per process.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pynvml  # type: ignore[import-untyped]  # it has no types

FIELDS = (83, 138, 139, 140, 141, 186, 197, 198, 230)
MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
LISTS = 20


def code_of(function: str, *arguments: Any) -> tuple[int, Any]:
    """(0, answer) or (code, None); 13 when the driver or pynvml does not have it."""
    try:
        return 0, getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value), None
    except (AttributeError, pynvml.NVMLLibraryMismatchError):
        return 13, None


def fields(card: Any) -> dict[int, tuple[int, int, float]]:
    """Code, kind of value, value."""
    code, found = code_of("nvmlDeviceGetFieldValues", card, list(FIELDS))
    if code:
        return dict.fromkeys(FIELDS, (code, -1, 0.0))
    return {
        number: (
            (got.nvmlReturn, got.valueType, getattr(got.value, MEMBERS[got.valueType]))
            if not got.nvmlReturn and got.valueType < len(MEMBERS)
            else (got.nvmlReturn, -1, 0.0)
        )
        for number, got in zip(FIELDS, found, strict=True)
    }


def gpm(card: Any) -> int:
    """The code of a sample, which alone shows whether it works."""
    code, sample = code_of("nvmlGpmSampleAlloc")
    return code or code_of("nvmlGpmSampleGet", card, sample)[0]


def list_seconds(card: Any) -> float:
    began = time.perf_counter()
    for _ in range(LISTS):
        code_of("nvmlDeviceGetComputeRunningProcesses_v3", card)
    return (time.perf_counter() - began) / LISTS


def main() -> None:
    code, _ = code_of("nvmlInit")
    code, card = (code, None) if code else code_of("nvmlDeviceGetHandleByIndex", 0)
    if code:
        print(json.dumps({"code": code}))
        return
    energy, _ = code_of("nvmlDeviceGetTotalEnergyConsumption", card)
    events, mask = code_of("nvmlDeviceGetSupportedEventTypes", card)
    answer = {
        "code": 0,
        "fields": fields(card),
        "gpm": gpm(card),
        "energy": energy,
        "events": (events, mask or 0),
        "list_seconds": list_seconds(card),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
