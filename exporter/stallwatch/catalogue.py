"""Every signal there is, from the code itself: what the sources yield and what is derived from it."""

from __future__ import annotations

from . import daemon, exposition, signals
from .model import Signal
from .sources.table import SOURCES


def all_signals() -> list[Signal]:
    """Sorted by name, each once."""
    read = [signal for source in SOURCES.values() for signal in source.signals]  # type: ignore[attr-defined]
    declared = [
        value
        for module in (signals, daemon, exposition)
        for value in vars(module).values()
        if isinstance(value, Signal)
    ]
    return sorted(
        {signal.name: signal for signal in (*read, *declared)}.values(), key=lambda signal: signal.name
    )
