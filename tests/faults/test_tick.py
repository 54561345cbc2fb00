"""Our own tick hangs, or raises: an old report is not served as new, and the process ends rather than go on so.

Twins without processes: test_heartbeat.py, test_web.py (old reports), test_daemon.py (a bug in the tick).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from e2e.harness import fetch
from stallwatch.heartbeat import STUCK_STATUS

from .harness import TICK, Exporter, Scrape, Victim, all_hold, tell

pytestmark = pytest.mark.faults

OLD_SECONDS = 3 * TICK
BUSY_SECONDS = 1.5
"""What a busy machine needs to answer."""
END_SECONDS = 60.0
"""Two looks of five seconds; the rest is for a busy machine."""


def disturbed(folder: Path) -> tuple[Exporter, Path]:
    """An exporter, and the file that says what its tick does."""
    order = folder / "order"
    tell(order, "go on")
    command = [sys.executable, str(Path(__file__).with_name("stuck_tick.py")), str(order)]
    exporter = Exporter(folder, command=command)
    exporter.is_checked = False  # it refuses on purpose
    return exporter, order


def check_no_old_page(scrapes: Sequence[Scrape]) -> None:
    """Whatever was answered with 200 was of its moment."""
    pages = [scrape for scrape in scrapes if scrape.status == 200]
    fresh = OLD_SECONDS + BUSY_SECONDS
    all_hold(pages, lambda page: page.at - (page.value("report_timestamp_seconds") or 0) < fresh, "no old report")


def test_a_tick_that_hangs_serves_nothing_old_and_ends_the_process(folder: Path, victim: Path) -> None:
    exporter, order = disturbed(folder)
    with exporter, Victim(victim, folder / "server.log") as server:
        exporter.may_end = True
        exporter.wait_for_server(server.name)
        tell(order, "hang")
        begun = time.time()
        time.sleep(OLD_SECONDS + BUSY_SECONDS)
        meanwhile = [exporter.scrapes.look() for _ in range(4)]
        other = {path: fetch(f"{exporter.url}{path}")[0] for path in ("/", "/api/v1/report", "/-/healthy")}
        status = exporter.process.wait(END_SECONDS)

    assert {scrape.status for scrape in meanwhile} == {503}
    assert "not served as new" in meanwhile[-1].page
    assert other == {"/": 503, "/api/v1/report": 503, "/-/healthy": 200}
    check_no_old_page([scrape for scrape in exporter.scrapes.history if scrape.at > begun])
    assert status == STUCK_STATUS
    assert exporter.said("the tick is stuck: ending") == 1
    assert exporter.said("in disturbed_tick") == 1, "it says where"


def test_a_tick_that_goes_on_in_time_is_served_again(folder: Path, victim: Path) -> None:
    """The silent twin."""
    exporter, order = disturbed(folder)
    with exporter, Victim(victim, folder / "server.log") as server:
        exporter.wait_for_server(server.name)
        tell(order, "hang")
        time.sleep(OLD_SECONDS + BUSY_SECONDS)
        refused = exporter.scrapes.look()
        tell(order, "go on")
        after = exporter.wait_for_server(server.name)
        check_no_old_page(exporter.scrapes.history)

    assert refused.status == 503
    assert after.value("server_starts_total", server=server.name) == 1
    assert not exporter.said("stuck")


def test_a_tick_that_raises_ends_the_process(folder: Path) -> None:
    exporter, order = disturbed(folder)
    with exporter:
        exporter.may_end = True
        tell(order, "raise")
        status = exporter.process.wait(END_SECONDS)

    assert status == 1
    assert fetch(f"{exporter.url}/metrics")[0] == 0, "nobody answers any more"
    check_no_old_page(exporter.scrapes.history)
