"""Every signal there is, from the code itself: what the sources yield and what is derived from it."""

from __future__ import annotations

from types import ModuleType

from . import daemon, derived, signals
from .derived import PREFIX
from .model import Signal
from .sources.table import SOURCES


def read_signals() -> list[Signal]:
    """What the sources yield, and what a verdict may look at."""
    read = [signal for source in SOURCES.values() for signal in source.signals]  # type: ignore[attr-defined]
    return [*read, *_declared(signals)]


def derived_signals() -> list[Signal]:
    """What is worked out from them."""
    return [*_declared(daemon), *_declared(derived)]


def _declared(module: ModuleType) -> list[Signal]:
    return [value for value in vars(module).values() if isinstance(value, Signal)]


def collectors() -> dict[str, str]:
    """Name of a signal -> the collector that reads it."""
    return {signal.name: name for name, source in SOURCES.items() for signal in source.signals}  # type: ignore[attr-defined]


def all_signals() -> list[Signal]:
    """Sorted by name, each once."""
    found = {signal.name: signal for signal in (*read_signals(), *derived_signals())}
    return sorted(found.values(), key=lambda signal: signal.name)


HEADINGS = {
    "server": "Servers",
    "rank": "Ranks",
    "log": "Logs",
    "gpu": "GPUs",
    "node": "The node",
    "self": "The exporter itself",
}
"""Scope -> heading of its table, in the order of the document."""


def markdown() -> str:
    """Tables of every metric by scope: the generated part of docs/METRICS.md."""
    signals_by_scope = {scope: [each for each in all_signals() if each.scope == scope] for scope in HEADINGS}
    return "".join(
        f"\n## {HEADINGS[scope]}\n\n| metric | type | labels | is |\n| --- | --- | --- | --- |\n"
        + "".join(_row(signal) for signal in found)
        for scope, found in signals_by_scope.items()
        if found
    )


def _row(signal: Signal) -> str:
    labels = " ".join(f"`{label}`" for label in signal.labels)
    about = signal.help.replace("|", "\\|").replace("*", "\\*")
    return f"| `{PREFIX}{signal.name}` | {signal.kind} | {labels} | {about} |\n"
