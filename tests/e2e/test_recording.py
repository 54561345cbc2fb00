"""A recorded live run replays to the verdicts it had live."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stallwatch.drill.story import PLANTED_SECRET

from .harness import CONFIG, STALL_AFTER, Program, StandIn, wait_until

pytestmark = pytest.mark.e2e

COMMAND = str(Path(sys.executable).with_name("stallwatch"))
Changes = list[tuple[str, str, str | None]]


def live_changes(recorder: Program, server: str) -> Changes:
    """(state, reason, rank) of every change the recorder's own daemon logged."""
    lines = [json.loads(line) for line in recorder.output.read_text().splitlines() if line.startswith("{")]
    return [
        (line["state"], line["reason"], line["rank"] or None)
        for line in lines
        if line["msg"] == "verdict changed" and line["server"] == server
    ]


def test_a_recorded_deadlock_replays_to_its_live_verdicts(tmp_path: Path) -> None:
    config, out = tmp_path / "stallwatch.yml", tmp_path / "a.jsonl"
    config.write_text(CONFIG)
    command = [COMMAND, "record", "--out", str(out), "--config.file", str(config), "--log.format", "json"]
    recorder = Program(command, tmp_path / "record.log")
    with recorder, StandIn("barrier-deadlock", tmp_path, culprit=5) as server:
        wait_until(
            lambda: ("stalled", "idle_wait", "TP5") in live_changes(recorder, server.name),
            STALL_AFTER + 40.0,
            f"a stall\n{recorder.tail()}",
        )
        recorder.process.send_signal(signal.SIGINT)
        status = recorder.process.wait(20.0)
        live = live_changes(recorder, server.name)

    answer = subprocess.run([COMMAND, "replay", "--format", "json", str(out)], capture_output=True, timeout=60.0)

    assert status == 0, recorder.tail()
    assert answer.returncode == 1, answer.stderr
    servers = {each["server"]: each for each in json.loads(answer.stdout)["recordings"][0]["servers"]}
    replayed = [(c["state"], c["reason"], c["suspect_rank"]) for c in servers[server.name]["changes"]]
    assert replayed == live
    recorded = out.read_text()
    assert PLANTED_SECRET not in recorded
    assert str(tmp_path) not in recorded
