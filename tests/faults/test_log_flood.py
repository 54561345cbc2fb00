"""A log that grows by 200 MB a second: not a line is lost, no other log waits for it, and memory is bounded.

Twin without processes: test_log_tail.py, test_counters.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage, rmtree
from tempfile import mkdtemp

import psutil
import pytest

from e2e.harness import TIED

from .harness import ALONE, Exporter, Scrape, all_hold
from .log_writer import BLOCK, LINES

pytestmark = pytest.mark.faults

BYTES_PER_SECOND = 200e6
BURST, PACED = int(300e6) // len(BLOCK), int(400e6) // len(BLOCK)
"""Blocks.  A reader that is quick enough for the pace is behind after the burst, for many turns and some ticks."""
ROTATED = {"never": None, "in the burst": BURST // 2}
"""After so many blocks: a reader has most of the old file still before it."""
BLOCKS = BURST + PACED
WRITTEN = BLOCKS * len(BLOCK)

MOST_MEMORY_BYTES = 24 << 20
CATCH_UP_SECONDS = 180.0
"""For a machine that is busy with other things; what must not wait for what is told by the order of the pages."""


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """Below /dev/shm: no disk takes so much."""
    if not Path("/dev/shm").is_dir() or disk_usage("/dev/shm").free < 1e9:
        pytest.skip("needs 1 GB below /dev/shm")
    made = Path(mkdtemp(prefix="stallwatch-flood-", dir="/dev/shm"))
    yield made
    rmtree(made)


def configuration(logs: list[Path]) -> str:
    match = f'{{command: "log_writer.py {logs[0]} "}}'
    globs = ", ".join(f'"{log}"' for log in logs)
    return ALONE + f"servers:\n  - {{name: flooded, framework: vllm, match: {match}, logs: [{globs}]}}\n"


def writer(log: Path, rotated: int | None) -> subprocess.Popen[bytes]:
    script = str(Path(__file__).with_name("log_writer.py"))
    command = [*TIED, sys.executable, script, str(log), str(BURST), str(BYTES_PER_SECOND), str(PACED)]
    command += [] if rotated is None else [str(rotated)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("rotated", ROTATED.values(), ids=ROTATED)
def test_a_flood_costs_no_line_and_no_other_log(rotated: int | None, folder: Path, memory_folder: Path) -> None:
    flooded, calm = memory_folder / "flooded.log", folder / "calm.log"
    flooded.touch()
    calm.write_text("INFO 06-02 08:00:00 [loader.py:1] a line\n")
    with Exporter(folder, config=configuration([flooded, calm])) as exporter, writer(flooded, rotated) as flooding:
        try:
            assert flooding.stdin is not None
            assert flooding.stdout is not None
            exporter.wait_for("both logs, and every collector", is_begun)
            memory = psutil.Process(exporter.pid).memory_info().rss
            flooding.stdin.write(b"\n")
            flooding.stdin.flush()
            begun = exporter.scrapes.look().at
            with calm.open("a") as log:
                log.write("INFO 06-02 08:00:09 [loader.py:1] another line\n")
            calm_page = exporter.wait_for("the calm log", lambda page: _calm_lines(page) == 2)
            flooding.stdout.readline()
            exporter.wait_for("all of it", lambda page: _of("bytes_total", page) == WRITTEN, CATCH_UP_SECONDS)
            after = exporter.rest(1.0)
            more = psutil.Process(exporter.pid).memory_info().rss - memory
            meanwhile = exporter.scrapes.since(begun)
        finally:
            flooding.kill()

    assert flooded.stat().st_size == WRITTEN - (rotated or 0) * len(BLOCK)
    assert {(_of("lines_total", page), _of("backlog_bytes", page)) for page in after} == {(BLOCKS * LINES, 0)}
    assert (_of("bytes_total", calm_page) or 0) < WRITTEN, "the calm log waited until the flood was read"
    assert any(_of("backlog_bytes", page) for page in meanwhile), "what is behind is told"
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    assert more < MOST_MEMORY_BYTES


def is_begun(page: Scrape) -> bool:
    return _calm_lines(page) == 1 and _of("bytes_total", page) == 0 and not page.failed()


def _calm_lines(page: Scrape) -> float | None:
    return page.value("log_lines_total", log="calm.log")


def _of(name: str, page: Scrape) -> float | None:
    return page.value(f"log_{name}", log="flooded.log")
