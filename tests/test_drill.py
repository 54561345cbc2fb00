"""The stand-ins' tables and log, without starting a process (tests/e2e starts them)."""

from __future__ import annotations

import io
import re
import socket
from pathlib import Path

import pytest

from stallwatch.config import Thresholds, load_config
from stallwatch.drill import command as drill_command
from stallwatch.drill import neighbours, rank_acts, server, story
from stallwatch.drill.cards import CardPlan
from stallwatch.drill.command import FASTEST, Pace, duration, expectation, list_conditions
from stallwatch.drill.conditions import (
    Condition,
    UnknownSettingError,
    from_record,
    to_record,
    with_settings,
)
from stallwatch.drill.table import CONDITIONS, find_condition
from stallwatch.model import REASONS, STATES


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_what_a_condition_expects_is_a_state_and_reason_of_the_contract(condition: Condition) -> None:
    assert condition.expected_state in STATES
    assert condition.expected_reason in REASONS
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", condition.name)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_every_deed_is_one_that_somebody_can_do(condition: Condition) -> None:
    known = {"launcher": neighbours.ACTS, "main": server.ACTS, "engine": server.ENGINE_ACTS}

    for step in condition.steps:
        assert step.act in known.get(step.who, rank_acts.ACTS), step


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_whatever_pages_or_warns_has_a_twin_that_does_not(condition: Condition) -> None:
    silent = condition.expected_state in ("idle", "working")

    assert silent == (condition.twin == "")
    assert silent or find_condition(condition.twin).expected_state in ("idle", "working")
    assert not silent or condition.expected_reason == "none"


def test_the_table_of_the_document_is_that_of_the_code() -> None:
    text = (Path(__file__).parents[1] / "docs" / "DRILLS.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]

    assert rows == [row(condition) for condition in CONDITIONS]


def row(condition: Condition) -> str:
    note, twin = f"; {condition.note}" if condition.note else "", f"`{condition.twin}`" if condition.twin else ""
    said = expectation(condition, Thresholds())
    return f"| `{condition.name}` | {condition.summary}{note} | {said} | {twin} |"


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
        with_settings(find_condition("barrier-deadlock"), [setting])


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


def test_the_list_has_a_line_for_each_condition_with_its_name_first() -> None:
    out = io.StringIO()

    assert list_conditions(out) == 0

    assert [line.split()[0] for line in out.getvalue().splitlines()] == [condition.name for condition in CONDITIONS]


@pytest.mark.parametrize("speed", [1.0, 3.0, 10.0, FASTEST])
def test_the_times_of_a_drill_are_a_configuration_that_serve_takes(tmp_path: Path, speed: float) -> None:
    file = tmp_path / "drill.yml"
    file.write_text(Pace(speed).config())

    config = load_config(str(file), ("sglang",))

    assert config.verdict.stall_after == pytest.approx(240 / speed, abs=0.001)
    assert config.verdict.budget("loading_weights") == pytest.approx(1800 / speed, abs=0.001)
    assert config.intervals.threads == pytest.approx(max(0.1, 10 / speed), abs=0.001)
    assert min(config.intervals.tick, config.intervals.logs) >= 0.1


@pytest.mark.parametrize(("seconds", "text"), [(240.0, "240s"), (0.1, "100ms"), (3.3333, "3333ms"), (0.0001, "1ms")])
def test_durations_are_written_as_the_configuration_takes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("barrier-deadlock", "stalled, idle_wait, rank TP3; 24s after"),
        ("stopped-rank", "stalled, stopped, rank TP3; 6s after"),
        ("phantom-hang", "idle; as soon as"),
        ("dead-rank", "failed, rank_dead, rank TP3; a few seconds"),
    ],
)
def test_a_drill_says_what_to_expect(name: str, words: str) -> None:
    assert expectation(find_condition(name), Pace(10).thresholds).startswith(words)


def test_cards_fill_while_the_server_loads_and_then_show_what_the_condition_says() -> None:
    plan = CardPlan(find_condition("gpu-spin"), (101, 102))

    begin, middle, end = (plan.figures(share) for share in (0.0, 0.5, 1.0))

    assert [plan.held_bytes(share) // (1 << 30) for share in (0.0, 0.5, 1.0)] == [0, 38, 76]
    assert (begin["util_gpu"], middle["util_gpu"], end["util_gpu"], end["util_mem"]) == (0, 0, 100, 0)
    assert middle["pcie_rx_per_second"]
    assert (end["pcie_rx_per_second"], end["power_mw"]) == (0, 152_000)
    assert end["1.processes"] == f"102:{76 << 30}"


def test_the_exporter_of_a_drill_keeps_off_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STALLWATCH_WEB_LISTEN_ADDRESS", raising=False)
    monkeypatch.setattr(drill_command, "_is_taken", lambda port: port == 10077)

    *_, flag, address = drill_command._exporter(Path("/a.yml"))

    assert flag == "--web.listen-address"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert not address.endswith(":10077")


@pytest.mark.parametrize(("variable", "taken"), [(None, False), ("127.0.0.1:1", True)])
def test_it_listens_where_it_is_told_and_else_where_an_exporter_does(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, taken: bool
) -> None:
    monkeypatch.delenv("STALLWATCH_WEB_LISTEN_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("STALLWATCH_WEB_LISTEN_ADDRESS", variable)
    monkeypatch.setattr(drill_command, "_is_taken", lambda _: taken)

    assert drill_command._exporter(Path("/a.yml"))[-2:] == ["--config.file", "/a.yml"]


def test_a_port_is_taken_while_somebody_listens_on_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert drill_command._is_taken(port)
    assert not drill_command._is_taken(port)
