"""The exporter is restarted while a server stalls: one alert.  Its twin moves on meanwhile: none."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from stallwatch.drill.rank import RELEASE

from .harness import STALL_AFTER, Exporter, StandIn, rest

pytestmark = pytest.mark.e2e


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("STALLWATCH_STATE_DIR", str(folder))
    return folder


FIRST_LOOK = 3.0
"""Seconds within which every collector has read once, on a busy machine."""


def test_a_restart_during_a_stall_is_one_alert(tmp_path: Path, state: Path) -> None:
    with StandIn("barrier-deadlock", tmp_path, culprit=5, load_seconds=1) as server:
        with Exporter(tmp_path) as before:
            before.watch.wait_for(server.name, STALL_AFTER + 30, state="stalled", reason="idle_wait")
            rest(3.0, before)
        since = before.watch.last().servers[server.name]["since"]
        rest(4.0, server)
        with Exporter(tmp_path) as after:
            after.watch.wait_for(server.name, 15.0, state="stalled")
            rest(STALL_AFTER, after)

        found = [document for _, document in after.watch.of(server.name)]
        assert {document["state"] for document in found} == {"stalled"}
        assert {document["reason"] for document in found} == {"idle_wait"}
        assert {document["suspect_rank"] for document in found} == {"TP5"}
        assert [document["since"] for document in found] == [pytest.approx(since)] * len(found)
        assert {document["starts"] for document in found} == {1}
        assert all(rank["load_progress"] == 1.0 for rank in found[0]["ranks"])
        assert before.watch.phases(server.name)[-1:] == after.watch.phases(server.name)
        text = (state / "state.json").read_text()
        assert not re.search(f"{server.name}|{tmp_path}|{server.log.name}|sglang", text)


def test_a_server_that_moves_on_while_the_exporter_is_down_is_not_stalled(tmp_path: Path, state: Path) -> None:
    with StandIn("barrier-deadlock", tmp_path, culprit=5, load_seconds=1) as server:
        with Exporter(tmp_path) as before:
            before.watch.wait_for(server.name, STALL_AFTER + 30, state="stalled", reason="idle_wait")
        os.kill(server.rank(5).pid, RELEASE)
        server.wait_for_line("Memory pool end", 8)
        with Exporter(tmp_path) as after:
            after.watch.wait_for(server.name, 60.0, ready=True, state="idle")
            rest(STALL_AFTER, after)

        found = after.watch.of(server.name)
        begun = found[0][0]
        # Until its log was read for the first time what was known stands.
        assert {document["state"] for at, document in found if at - begun < FIRST_LOOK} <= {
            "stalled",
            "working",
            "idle",
        }
        assert {document["state"] for at, document in found if at - begun >= FIRST_LOOK} <= {"working", "idle"}
        states = [document["state"] for _, document in found]
        assert "stalled" not in states[states.index("working") if "working" in states else states.index("idle") :]
