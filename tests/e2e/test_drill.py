"""`stallwatch drill run` tests paging end to end, and leaves nothing behind, whatever ends it."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from .harness import PATIENCE, Program, free_port, wait_until

pytestmark = pytest.mark.e2e


class Drill(Program):
    def __init__(self, name: str, folder: Path, *flags: str) -> None:
        self.port = free_port()
        command = [str(Path(sys.executable).with_name("stallwatch")), "drill", "run", name, *flags]
        environment = {"STALLWATCH_WEB_LISTEN_ADDRESS": f"127.0.0.1:{self.port}"}
        super().__init__(command, folder / "drill.out", environment)

    def said(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, self.output.read_text(errors="replace"), re.MULTILINE)

    def wait_for(self, pattern: str, within: float) -> re.Match[str]:
        found = wait_until(lambda: self.said(pattern), within, f"{pattern}\n{self.tail(40)}")
        assert isinstance(found, re.Match)
        return found


def test_a_deadlock_is_called_stalled_and_the_end_of_the_drill_is_no_failure(tmp_path: Path) -> None:
    with Drill("barrier-deadlock", tmp_path, "--speed", "20", "--serve") as drill:
        drill.wait_for(r"^stallwatch should say: stalled, idle_wait, rank TP3", PATIENCE)
        server = drill.wait_for(r"^server: (sglang-\d+)", PATIENCE)[1]
        drill.wait_for(rf"^{server}  stalled \(idle_wait\).*TP3", 2 * PATIENCE)
        drill.process.send_signal(signal.SIGINT)
        assert drill.process.wait(PATIENCE) == 0

        assert not drill.said(rf"^{server}  failed")  # others on this machine may fail
        assert not Path(drill.wait_for(r"^configuration: (.*)$", 1)[1]).parent.exists()


def test_neither_it_nor_its_exporter_outlives_a_kill(tmp_path: Path) -> None:
    with Drill("dead-rank", tmp_path, "--serve") as drill:
        config = Path(drill.wait_for(r"^configuration: (.*)$", PATIENCE)[1])
        server = drill.wait_for(r"^server: (sglang-\d+)", PATIENCE)[1]
        drill.wait_for(rf"^{server} ", PATIENCE)
        family = wait_until(lambda: f if len(f := drill.family()) >= 12 else None, PATIENCE, "all processes")

        drill.process.kill()

        drill.process.wait(PATIENCE)
        wait_until(lambda: not any(_lives(process) for process in family), PATIENCE, f"all gone: {family}")
        wait_until(lambda: not config.parent.exists(), PATIENCE, f"{config.parent} removed")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
