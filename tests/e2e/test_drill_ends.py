"""Nothing outlives a drill, whatever ends it and whenever.  `kill -9` late ends the drills of test_drills."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from stallwatch.drill.memory_cgroup import refusal
from stallwatch.drill.table import CONDITIONS

from .drilled import Drilled, assert_gone, remains
from .harness import PATIENCE, Program, free_port, wait_until

pytestmark = pytest.mark.e2e

ENDED = tuple(tuple(c.name for c in CONDITIONS if c.name != "gpu-spin")[start::3] for start in range(3))
WAYS = [*((group, "ctrl-c") for group in ENDED), (ENDED[0][:4], "time-limit")]
"""The kernel's own clock is the same for every condition; `kill -9` ends the drills above."""


@pytest.mark.parametrize(("group", "how"), WAYS, ids=lambda each: each if isinstance(each, str) else each[0])
def test_nothing_outlives_a_drill(tmp_path: Path, group: tuple[str, ...], how: str) -> None:
    """No process, no folder, no lock, no cgroup and no port, whatever ends the launcher."""
    names = [name for name in group if name != "oom-killed-rank" or not refusal()]
    with ExitStack() as stack:
        limit = "15s" if how == "time-limit" else "3m"
        every = [stack.enter_context(Drilled(name, tmp_path, limit=limit)) for name in names]
        kept = [(drill, *remains(drill)) for drill in every]
        if how == "ctrl-c":
            for drill in every:
                drill.process.send_signal(signal.SIGINT)
        for drill, family, paths in kept:
            drill.process.wait(PATIENCE)
            assert_gone(drill, family, paths)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_drill_that_has_hardly_begun(tmp_path: Path, number: signal.Signals) -> None:
    for after in (0.1, 0.3, 0.6, 1.0):
        temporary = tmp_path / f"tmp-{after:g}"
        temporary.mkdir()
        command = [str(Path(sys.executable).with_name("stallwatch")), "drill", "run", "two-servers"]
        with Program(command, tmp_path / "drill.out", {"TMPDIR": str(temporary)}) as drill:
            with suppress(subprocess.TimeoutExpired):
                drill.process.wait(after)

            drill.process.send_signal(number)
            drill.process.wait(PATIENCE)

            wait_until(
                partial(is_forgotten, temporary), PATIENCE, "no process that knows the folder, and nothing in it"
            )


def is_forgotten(folder: Path) -> bool:
    return not any(mentions(str(folder))) and not list(folder.iterdir())


def mentions(path: str) -> Iterator[bool]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield any(path in word for word in process.cmdline())


def test_a_drill_says_of_each_server_what_to_expect(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("stallwatch")), "drill", "run", "two-servers"]
    environment = {"STALLWATCH_WEB_LISTEN_ADDRESS": f"127.0.0.1:{free_port()}"}
    with Program(command, tmp_path / "drill.out", environment) as drill:
        wait_until(lambda: "configuration:" in drill.tail(60), PATIENCE, "a word")
        said = [line for line in drill.output.read_text().splitlines() if line.startswith("stallwatch should say")]

        assert [line.split(":")[1].split(",")[0].split(";")[0].strip() for line in said] == ["stalled", "idle"]
