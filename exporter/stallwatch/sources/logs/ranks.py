"""Who wrote a line: ranks by what prefixes and messages say, and by what the log said of its groups before."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from ...frameworks import Pattern, Prefix, rank_name, whole_number

MOST_NAMES = 4096
"""Processes whose rank is known; with more of them all are forgotten."""

_SIZES = ("tp_size", "pp_size", "dp_size")


class Ranks:
    """What one log said of the ranks of its server so far.

    `changed` is called when a line that was read before may be another rank's by now.  `writer`: PID of the only
    process that writes there, as it knows itself; 0 = there may be several.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None, writer: int = 0) -> None:
        self._changed, self._writer = changed, writer
        self._first: str | None = None
        self._names: dict[int, str] = {}  # PID -> rank
        self._sizes: dict[str, int] = {}

    def begin(self) -> None:
        """Another start: its first rank is still to be seen."""
        self._first = None

    def forget(self) -> None:
        """Another server's arguments come: its processes and groups are others."""
        self._sizes = {}
        self._names.clear()
        self._changed()

    def learn_sizes(self, groups: Mapping[str, str]) -> None:
        for size in _SIZES:
            if size in groups and (number := whole_number(groups[size])) not in (None, self._sizes.get(size)):
                self._sizes[size] = number
                self._changed()

    def of(self, pattern: Pattern, groups: Mapping[str, str], prefix: Prefix, told: dict[int, str]) -> str | None:
        """Which rank wrote (or is named by) a line; None = none in particular.  A name that is new goes to `told`."""
        pid = whole_number(prefix.pid) or self._writer
        printed = prefix.parts
        number = whole_number(prefix.rank)
        rank = rank_name(printed) if printed else self._named_by(groups)
        if rank is None and number is not None:
            rank = self._numbered(number)
        if rank is None:
            rank = self._names.get(pid) or self._engine(prefix)
        elif pid and pattern.kind == "" and self._names.get(pid) != rank:
            if len(self._names) >= MOST_NAMES:
                self._names.clear()
            self._names[pid] = told[pid] = rank
            self._changed()
        if rank is None and pattern.prefix == "any" and pattern.event.endswith("_progress"):
            return self._first
        if rank is not None and (self._first is None or _order(rank) < _order(self._first)):
            self._first = rank
        return rank

    def _named_by(self, groups: Mapping[str, str]) -> str | None:
        """The rank a message names: DP, PP and TP where there are several, or its number alone."""
        if (number := whole_number(groups.get("rank"))) is not None:
            return self._numbered(number)
        if (tp := whole_number(groups.get("tp"))) is None:
            return None
        parts = [(key, whole_number(groups.get(key.lower())), f"{key.lower()}_size") for key in ("DP", "PP")]
        shown = [f"{key}{at}" for key, at, size in parts if at is not None and (at or self._sizes.get(size, 1) > 1)]
        if not shown or self._sizes.get("tp_size", 2) > 1:
            shown.append(f"TP{tp}")
        return "-".join(shown)

    def _numbered(self, number: int) -> str | None:
        """The name of a rank known by its number in the world; None where that is ambiguous (DP)."""
        tensor, pipeline = self._sizes.get("tp_size", 0), self._sizes.get("pp_size", 1)
        if self._sizes.get("dp_size", 1) > 1:
            return None
        if pipeline <= 1:
            return f"TP{number}"
        tensor = max(1, tensor)
        stage = f"PP{number // tensor % pipeline}"
        return stage if tensor == 1 else f"{stage}-TP{number % tensor}"

    def _engine(self, prefix: Prefix) -> str | None:
        """An engine that runs the model itself, one of several by data parallelism, is a rank: DP3."""
        engine = whole_number(prefix.engine)
        if engine is not None and self._sizes.get("dp_size", 1) > 1 and self._sizes.get("tp_size", 1) == 1:
            return f"DP{engine}"
        return None


@lru_cache(maxsize=1024)
def _order(rank: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", rank))
