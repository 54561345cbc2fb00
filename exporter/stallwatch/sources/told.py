"""What a source told at its last look: what did not change is told by the very same readings, which are not made anew.

Whoever takes them (the clocks, the page) sees by that alone that there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..model import Reading


@dataclass(frozen=True, slots=True)
class Told:
    """The readings of one subject, and everything they were made of (`found`, compared as a whole)."""

    found: object
    readings: tuple[Reading, ...]


def again(before: Told | None, found: object, make: Callable[[], Iterable[Reading]]) -> Told:
    """What `make` says of `found`: all of it as before when that is the same, else each reading that is the same."""
    if before is None:
        return Told(found, tuple(make()))
    if before.found == found:
        return before
    same = {(reading.signal.name, reading.labels): reading for reading in before.readings}
    return Told(found, tuple(_same(same.get((reading.signal.name, reading.labels)), reading) for reading in make()))


def _same(old: Reading | None, new: Reading) -> Reading:
    return old if old is not None and old.value == new.value and old.reason == new.reason else new
