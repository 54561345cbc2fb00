"""What is said of a drill live is what its recording says when it is replayed: one drill for each kind of evidence."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from stallwatch.drill.command import Pace

from .harness import Program, wait_until
from .test_drills import PAGES, SPEED, WITHIN, Drilled
from .test_recording import COMMAND, Changes, live_changes

pytestmark = pytest.mark.e2e

GROUPS = (
    ("stopped-rank", "dead-rank", "blocked-io", "slow-bar"),
    ("stale-lock", "serving-wedge", "heartbeats-only", "serving"),
)
"""A path of evidence each: threads, deaths, kernel, bars; locks, metrics, logs.  One of each raises no alarm."""


@pytest.mark.parametrize("group", GROUPS, ids="+".join)
def test_a_recorded_drill_replays_to_what_was_said_live(tmp_path: Path, group: tuple[str, ...]) -> None:
    config, out = tmp_path / "stallwatch.yml", tmp_path / "drills.jsonl"
    config.write_text(Pace(SPEED).config())
    command = [COMMAND, "record", "--out", str(out), "--config.file", str(config), "--log.format", "json"]
    with ExitStack() as stack:
        recorder = stack.enter_context(Program(command, tmp_path / "record.log"))
        drills = [stack.enter_context(Drilled(name, tmp_path)) for name in group]
        for drill in drills:
            await_change(recorder, drill)
        recorder.process.send_signal(signal.SIGINT)
        assert recorder.process.wait(20.0) == 0, recorder.tail()
        live = {drill.name: alarms(live_changes(recorder, drill.name)) for drill in drills}

    answer = subprocess.run([COMMAND, "replay", "--format", "json", str(out)], capture_output=True, timeout=60.0)

    servers = {each["server"]: each for each in json.loads(answer.stdout)["recordings"][0]["servers"]}
    assert {name: alarms(replayed_changes(servers[name])) for name in live} == live, recorder.tail(40)
    assert any(live.values())
    assert not all(live.values()), "a drill that must raise no alarm is in each group, and did"


def await_change(recorder: Program, drill: Drilled) -> None:
    """Until the recorder has said what is expected."""
    condition = drill.condition
    expected = (condition.expected_state, condition.expected_reason, condition.expected_rank)

    def is_said() -> bool:
        changes = live_changes(recorder, drill.name)
        if condition.expected_state in PAGES:
            return expected in changes
        return any(state == condition.expected_state for state, _, _ in changes)

    wait_until(is_said, WITHIN, f"{drill.condition.name}: {expected}\n{recorder.tail(40)}")


def alarms(changes: Changes) -> Changes:
    """The changes to a state that pages or warns."""
    return [change for change in changes if change[0] in PAGES]


def replayed_changes(server: dict[str, list[dict[str, str | None]]]) -> Changes:
    return [(str(c["state"]), str(c["reason"]), c["suspect_rank"]) for c in server["changes"]]
