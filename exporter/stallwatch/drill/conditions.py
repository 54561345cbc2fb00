"""The conditions a stand-in server can be in: their type, and how one is changed.  The table stands in `table`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .steps import RANKS, Launch, Moment, Step, Who

TIMES = ("slow_seconds", "beat_seconds", "pause_seconds")
"""Fields that are divided by the speed of a drill, as the times of a verdict are."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition.  `expected_state` and `expected_reason` are what stallwatch should say in the end.

    `since`: what the silence that leads to it counts from.  `twin`: a condition that looks much like this one and
    is no stall.  `also`: the condition of a second server beside it.  `note`: for people.

    `culprit` is the number of the rank that behaves differently.  `slow_seconds` is how long slow work takes,
    `beat_seconds` how often a heartbeat comes, `pause_seconds` a wait that is longer than a window and shorter
    than a stall.  Speeds are bytes a second and rank.  `poller_threads` wake 100 times a second, as the epoll
    threads of gloo do.
    """

    name: str
    summary: str
    expected_state: str
    expected_reason: str = "none"
    names_culprit: bool = False
    since: str = "the last progress, which is the end of the load"
    twin: str = ""
    also: str = ""
    note: str = ""
    steps: tuple[Step, ...] = ()
    launch: Launch = field(default_factory=Launch)
    culprit: int = 3
    spinner: int = 5
    ranks: int = 8
    threads: int = 200
    frontend_threads: int = 130
    poller_threads: int = 2
    load_seconds: float = 4.0
    slow_seconds: float = 720.0
    slow_bytes_per_second: int = 4 << 20
    beat_seconds: float = 60.0
    pause_seconds: float = 150.0
    step_seconds: float = 0.2
    logs_access: bool = True
    total_lines: int = 0
    held_gib: float = 76.0
    gpu_utilization: float = 0.0
    gpu_memory_utilization: float = 0.0
    gpu_watts: float = 122.0
    needs_cards: bool = False

    @property
    def expected_rank(self) -> str | None:
        return f"TP{self.culprit}" if self.names_culprit else None

    @property
    def all_ranks(self) -> int:
        """Those of other nodes included."""
        return self.ranks * self.launch.nodes

    def acts(self, at: Moment, who: Who) -> list[str]:
        """What somebody does at a moment."""
        return [step.act for step in self.steps if (step.at, step.who) == (at, who)]

    def acts_of_rank(self, at: Moment, number: int) -> list[str]:
        """The same for a rank of this node, by its number on it."""
        roles = {"culprit": self.culprit, "spinner": self.spinner, "first": 0, "all": number}
        who = [role for role in RANKS if roles[role] == number]
        return [step.act for step in self.steps if step.at == at and step.who in who]

    def at_speed(self, speed: float) -> Condition:
        """With the times of a verdict divided by `speed`."""
        changes: dict[str, Any] = {name: getattr(self, name) / speed for name in TIMES}
        return replace(self, **changes)


class UnknownSettingError(ValueError):
    """A condition, or a setting of one, that does not exist; the text says what is allowed."""


def with_settings(condition: Condition, settings: Iterable[str]) -> Condition:
    """The condition with `key=value` settings applied, each as a number or true/false."""
    numbers = {f.name: f.type for f in fields(Condition) if f.type in ("int", "float", "bool")}
    changes: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in numbers:
            raise UnknownSettingError(f"{key!r} is no setting; allowed are {', '.join(sorted(numbers))}")
        changes[key] = _value(setting, numbers[key], text)
    changed = replace(condition, **changes)
    for who, number in (("culprit", changed.culprit), ("spinner", changed.spinner)):
        if any(step.who == who for step in changed.steps) and not 0 <= number < changed.ranks:
            raise UnknownSettingError(f"{who} {number} is not one of {changed.ranks} ranks")
    return changed


def _value(setting: str, kind: Any, text: str) -> float | int | bool:
    if kind == "bool":
        if text not in ("true", "false"):
            raise UnknownSettingError(f"{setting!r}: true or false is needed")
        return text == "true"
    try:
        return float(text) if kind == "float" else int(text)
    except ValueError:
        raise UnknownSettingError(f"{setting!r}: a number is needed") from None


def to_record(condition: Condition) -> dict[str, Any]:
    """As plain data, for the file that the launcher hands to the main process."""
    return asdict(condition)


def from_record(record: Mapping[str, Any]) -> Condition:
    steps = tuple(Step(**step) for step in record["steps"])
    return Condition(**{**record, "steps": steps, "launch": Launch(**record["launch"])})
