"""serve, record and check under the shipped seccomp profile, killed at the first call that it does not allow."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from stallwatch.drill.nvml_standin import NoCompilerError, build
from stallwatch.drill.nvml_standin import StandIn as Cards

from .harness import PATIENCE, ROOT, Exporter, StandIn, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.aside, pytest.mark.server]

STRICT = [sys.executable, str(ROOT / "tests/seccomp_launcher.py"), str(ROOT / "deploy/seccomp/stallwatch.json")]
STRICT += ["--kill"]
STALLWATCH = str(Path(sys.executable).with_name("stallwatch"))


@pytest.fixture(scope="module", autouse=True)
def filtered() -> None:
    tried = subprocess.run([*STRICT, sys.executable, "-I", "-c", "pass"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no seccomp here: {tried.stderr.decode().strip()[-80:]}")


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    try:
        library = build(tmp_path)
    except NoCompilerError as error:
        pytest.skip(str(error))
    return Cards(tmp_path, library, 8)


def test_serve_outlives_a_driver_that_hangs_and_ends_when_it_is_told_to(tmp_path: Path, cards: Cards) -> None:
    watcher = Exporter(tmp_path, prefix=STRICT, environment=cards.environment())
    used = "stallwatch_gpu_memory_used_bytes"
    with StandIn("slow-load", tmp_path, slow_seconds=60) as server:
        watcher.__enter__()
        try:
            wait_until(lambda: watcher.watch.last().values(used), PATIENCE, f"cards\n{watcher.tail()}", 0.2)
            wait_until(
                lambda: server.name in watcher.watch.last().servers, PATIENCE, f"the server\n{watcher.tail()}", 0.2
            )
            filters = Path(f"/proc/{watcher.pid}/status").read_text()
            cards.hang("nvmlDeviceGetMemoryInfo_v2", card=3)
            wait_until(lambda: not watcher.watch.last().values(used), PATIENCE, "a hung driver", 0.2)
            cards.clear()
            wait_until(lambda: watcher.watch.last().values(used), PATIENCE, "cards again", 0.2)
            watcher.watch.stop()

            watcher.process.send_signal(signal.SIGTERM)

            assert watcher.process.wait(PATIENCE) == 0, watcher.tail(40)
            assert "Seccomp:\t2" in filters
        finally:
            cards.clear()
            watcher.end()


def test_serve_is_under_a_filter_of_its_own_wherever_it_runs_and_so_are_its_children(
    tmp_path: Path, cards: Cards
) -> None:
    with Exporter(tmp_path, environment=cards.environment()) as watcher:
        used = "stallwatch_gpu_memory_used_bytes"
        wait_until(lambda: watcher.watch.last().values(used), PATIENCE, f"cards\n{watcher.tail()}", 0.2)
        children = psutil.Process(watcher.pid).children(recursive=True)
        told = [Path(f"/proc/{pid}/status").read_text() for pid in (watcher.pid, *(one.pid for one in children))]

    assert children
    assert ["Seccomp:\t2" in one for one in told] == [True] * len(told)


@pytest.mark.parametrize("words", [["check", "--for", "3s"], ["record", "--for", "3s", "--out", "x.jsonl"]])
def test_check_and_record_make_no_other_call(tmp_path: Path, words: list[str]) -> None:
    with StandIn("slow-load", tmp_path, slow_seconds=60) as server:
        server.wait_for_line("Load weight begin", 8)
        done = subprocess.run(
            [*STRICT, STALLWATCH, *words], capture_output=True, check=False, timeout=120, cwd=tmp_path
        )

    assert done.returncode in (0, 1, 3), done.stderr
    said = done.stdout if words[0] == "check" else (tmp_path / "x.jsonl").read_bytes()
    assert server.name.encode() in said
