"""No memory is left: it ends and says so by its status, or goes on; a page it serves meanwhile is whole and of now."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from .harness import COLLECTORS, TICK, Exporter, Victim

pytestmark = pytest.mark.faults

SHORT_SECONDS = 10.0
OLDEST_REPORT = 3 * TICK + 1.0
"""An older one is refused; and what a busy machine needs to answer."""


def test_without_memory_it_ends_or_goes_on_and_never_lies(folder: Path, victim: Path) -> None:
    order, log = folder / "order", folder / "victim.log"
    command = [sys.executable, str(Path(__file__).with_name("hoarding.py")), str(order)]
    with Exporter(folder, command=command) as exporter, Victim(victim, log) as server:
        exporter.may_end, exporter.is_checked = True, False
        exporter.wait_for_server(server.name)
        begun = time.time()
        order.touch()
        with log.open("a") as lines:
            lines.write("INFO 06-02 08:00:09 [loader.py:1] a line\n" * 100_000)
        with suppress(subprocess.TimeoutExpired):
            exporter.process.wait(SHORT_SECONDS)
        status, meanwhile = exporter.process.poll(), list(exporter.scrapes.history)
        order.unlink()
        if status is None:
            exporter.wait_for("every collector", lambda page: not page.failed() and page.state(server.name))

    assert status is None or status > 0
    assert (status is None) or exporter.said("MemoryError")
    pages = [page for page in meanwhile if page.at > begun and page.status == 200]
    for page in pages:
        told = page.value("report_timestamp_seconds")
        assert told is not None
        assert page.at - told < OLDEST_REPORT
        assert {name for name in COLLECTORS if page.value("collector_success", collector=name) is None} == set()
    assert {page.status for page in meanwhile if page.at > begun} <= {0, 200, 500, 503}
