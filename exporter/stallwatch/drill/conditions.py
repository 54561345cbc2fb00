"""The conditions a stand-in server can be in, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Behaviour = Literal["pass", "sleep", "read", "stop", "die"]
"""What the culprit does between its own `Load weight end` and the barrier where the others wait for it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition.  `expected_state` and `expected_reason` are what stallwatch should say in the end.

    `culprit` is the number of the rank that behaves differently.  `slow_seconds` is how long it reads
    (behaviour `read`), or how long every rank takes to load when `slow_load` is set.  Speeds are bytes a
    second and rank.  `poller_threads` wake 100 times a second, as the epoll threads of gloo do.
    """

    name: str
    summary: str
    expected_state: str
    expected_reason: str = "none"
    names_culprit: bool = False
    culprit: int = 3
    behaviour: Behaviour = "pass"
    spinner: int | None = None
    slow_load: bool = False
    ranks: int = 8
    threads: int = 200
    frontend_threads: int = 130
    poller_threads: int = 2
    load_seconds: float = 4.0
    slow_seconds: float = 720.0
    slow_bytes_per_second: int = 4 << 20
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


CONDITIONS: tuple[Condition, ...] = (
    Condition("normal", "loads, becomes ready, then nobody asks anything", "idle"),
    Condition(
        "barrier-deadlock",
        "every rank has loaded; all but one wait in a barrier for one that sleeps",
        "stalled",
        "idle_wait",
        names_culprit=True,
        behaviour="sleep",
    ),
    Condition(
        "phantom-hang",
        "looks like barrier-deadlock, but the last rank still reads, slowly; then the server is ready",
        "idle",
        behaviour="read",
        logs_access=False,
        total_lines=312,
    ),
    Condition(
        "slow-load",
        "every rank reads its weights slowly and the log is silent; then the server is ready",
        "idle",
        slow_load=True,
    ),
    Condition(
        "busy-spin",
        "barrier-deadlock with one waiter that spins on the CPU instead of sleeping",
        "suspect",
        "busy_spin",
        behaviour="sleep",
        spinner=5,
    ),
    Condition(
        "stopped-rank",
        "one rank is stopped by a signal after its load; the others wait for it in a barrier",
        "stalled",
        "stopped",
        names_culprit=True,
        behaviour="stop",
    ),
    Condition(
        "gpu-spin",
        "barrier-deadlock in which every card spins in a collective at little more than idle power",
        "suspect",
        "gpu_spin",
        behaviour="sleep",
        gpu_utilization=1.0,
        gpu_watts=152.0,
        needs_cards=True,
    ),
    Condition(
        "dead-rank",
        "one rank dies without a word after its load; its parent never looks",
        "failed",
        "rank_dead",
        names_culprit=True,
        behaviour="die",
    ),
)


class UnknownSettingError(ValueError):
    """A condition, or a setting of one, that does not exist; the text says what is allowed."""


def find_condition(name: str) -> Condition:
    for condition in CONDITIONS:
        if condition.name == name:
            return condition
    allowed = ", ".join(condition.name for condition in CONDITIONS)
    raise UnknownSettingError(f"{name!r} is no condition; allowed are {allowed}")


def with_settings(condition: Condition, settings: Iterable[str]) -> Condition:
    """The condition with `key=value` settings applied, each as a number or true/false."""
    numbers = {f.name: f.type for f in fields(Condition) if f.type in ("int", "float", "bool", "int | None")}
    changes: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in numbers:
            raise UnknownSettingError(f"{key!r} is no setting; allowed are {', '.join(sorted(numbers))}")
        changes[key] = _value(setting, numbers[key], text)
    changed = replace(condition, **changes)
    if not 0 <= changed.culprit < changed.ranks:
        raise UnknownSettingError(f"culprit {changed.culprit} is not one of {changed.ranks} ranks")
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
    return Condition(**record)
