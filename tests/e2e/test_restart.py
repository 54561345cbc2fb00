"""The exporter is restarted while two servers stall: one alert of that which goes on, none of that which moved."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from stallwatch.drill.rank import RELEASE

from .harness import PATIENCE, STALL_AFTER, Exporter, StandIn, rest

pytestmark = pytest.mark.e2e


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("STALLWATCH_STATE_DIR", str(folder))
    return folder


FIRST_LOOK = 3.0
"""Seconds within which every collector has read once, on a busy machine."""


def test_a_restart_is_one_alert_of_what_stalls_on_and_none_of_what_moved_meanwhile(tmp_path: Path, state: Path) -> None:
    folders = [tmp_path / "stuck", tmp_path / "freed"]
    for folder in folders:
        folder.mkdir()
    with (
        StandIn("barrier-deadlock", folders[0], culprit=5, load_seconds=1) as stuck,
        StandIn("barrier-deadlock", folders[1], culprit=5, load_seconds=1) as freed,
    ):
        with Exporter(tmp_path) as before:
            for server in (stuck, freed):
                before.watch.wait_for(server.name, STALL_AFTER + PATIENCE, state="stalled", reason="idle_wait")
            rest(3.0, before)
        since = before.watch.last().servers[stuck.name]["since"]
        os.kill(freed.rank(5).pid, RELEASE)
        freed.wait_for_line("Memory pool end", 8)
        rest(4.0, stuck)
        with Exporter(tmp_path) as after:
            after.watch.wait_for(stuck.name, PATIENCE, state="stalled")
            after.watch.wait_for(freed.name, PATIENCE, ready=True, state="idle")
            rest(STALL_AFTER, after)

        found = [document for _, document in after.watch.of(stuck.name)]
        assert {document["state"] for document in found} == {"stalled"}
        assert {document["reason"] for document in found} == {"idle_wait"}
        assert {document["suspect_rank"] for document in found} == {"TP5"}
        assert [document["since"] for document in found] == [pytest.approx(since)] * len(found)
        assert {document["starts"] for document in found} == {1}
        assert all(rank["load_progress"] == 1.0 for rank in found[0]["ranks"])
        assert before.watch.phases(stuck.name)[-1:] == after.watch.phases(stuck.name)
        assert_moved_on(after, freed)
        text = (state / "state.json").read_text()
        assert not re.search(f"{stuck.name}|{freed.name}|{tmp_path}|{stuck.log.name}|sglang", text)


def assert_moved_on(exporter: Exporter, server: StandIn) -> None:
    found = exporter.watch.of(server.name)
    begun = found[0][0]
    # Until its log was read for the first time what was known stands.
    first = {document["state"] for at, document in found if at - begun < FIRST_LOOK}
    assert first <= {"stalled", "working", "idle"}
    assert {document["state"] for at, document in found if at - begun >= FIRST_LOOK} <= {"working", "idle"}
    states = [document["state"] for _, document in found]
    assert "stalled" not in states[states.index("working") if "working" in states else states.index("idle") :]
