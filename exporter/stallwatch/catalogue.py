"""Every signal there is, from the code itself: what the sources yield and what is derived from it."""

from __future__ import annotations

from . import daemon, exposition, signals
from .exposition import PREFIX
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
    return sorted({signal.name: signal for signal in (*read, *declared)}.values(), key=lambda signal: signal.name)


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
