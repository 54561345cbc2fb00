"""The stand-ins' tables and log, without starting a process (tests/e2e starts them)."""

from __future__ import annotations

import re

import pytest

from stallwatch.drill import story
from stallwatch.drill.conditions import (
    CONDITIONS,
    Condition,
    UnknownSettingError,
    find_condition,
    from_record,
    to_record,
    with_settings,
)
from stallwatch.model import REASONS, STATES


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_what_a_condition_expects_is_a_state_and_reason_of_the_contract(condition: Condition) -> None:
    assert condition.expected_state in STATES
    assert condition.expected_reason in REASONS
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", condition.name)


def test_names_are_unique() -> None:
    assert len({condition.name for condition in CONDITIONS}) == len(CONDITIONS)


def test_a_condition_survives_the_way_to_the_main_process() -> None:
    condition = find_condition("busy-spin")

    assert from_record(to_record(condition)) == condition


def test_settings_change_numbers_only() -> None:
    changed = with_settings(find_condition("phantom-hang"), ["culprit=6", "slow_seconds=1.5", "spinner=2"])

    assert (changed.culprit, changed.slow_seconds, changed.spinner) == (6, 1.5, 2)
    assert changed.expected_rank is None


@pytest.mark.parametrize("setting", ["name=x", "culprit", "culprit=8", "culprit=-1", "slow_load=maybe", "x=1"])
def test_a_setting_that_makes_no_sense_is_refused(setting: str) -> None:
    with pytest.raises(UnknownSettingError):
        with_settings(find_condition("normal"), [setting])


def test_an_unknown_condition_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(UnknownSettingError, match="barrier-deadlock"):
        find_condition("barrier")


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_phantom_hang_writes_312_lines_and_is_ready_at_309(ranks: int) -> None:
    condition = with_settings(find_condition("phantom-hang"), [f"ranks={ranks}", "culprit=0"])

    log = _whole_log(condition)

    assert log.count("\n") == 312
    assert log.split("\n")[308].endswith(story.ready())


def _whole_log(condition: Condition) -> str:
    """The log of a start in which the ranks write one after another."""
    lines = [story.arguments("/models/m", condition.ranks, 30000)]
    for rank in range(condition.ranks):
        lines += story.import_notices(condition, rank) + story.joining()
        lines += [story.load_begin(), story.load_end(4.0), *story.after_barrier()]
        lines += [story.capture_begin(), story.capture_end()]
    bars = "".join(story.shard_bar(share / 10) for share in range(11)) + "".join(story.capture_bars())
    lines += [story.scheduler_ready(), *(text for _, text in story.serving(1, 30000)), story.ready()]
    return bars + "".join(f"[2026-06-02 08:00:00] {line}\n" for line in lines + story.first_visitors())
