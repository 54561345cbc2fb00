"""Our own tick hangs, or raises: an old report is not served as new, and the process ends rather than go on so.

Twins without processes: test_heartbeat.py, test_web.py (old reports), test_daemon.py (a bug in the tick).
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest

from e2e.harness import fetch, free_port, wait_until
from e2e.prometheus import Prometheus
from stallwatch.heartbeat import STUCK_STATUS

from .harness import CONFIG, OLD_SECONDS, PATIENCE, TICK, Exporter, Scrape, Victim, all_hold, tell

pytestmark = pytest.mark.faults

BUSY_SECONDS = 1.5
"""What a busy machine needs to answer."""
SLOW_TICK = 1.0
"""Three of them may be late by more than a busy machine is, and come before the process is given up."""
REFUSED = "server returned HTTP status 503"
END_SECONDS = 60.0
"""Two looks of five seconds; the rest is for a busy machine."""


def disturbed(folder: Path, config: str = CONFIG) -> tuple[Exporter, Path]:
    """An exporter, and the file that says what its tick does."""
    order = folder / "order"
    tell(order, "go on")
    command = [sys.executable, str(Path(__file__).with_name("stuck_tick.py")), str(order)]
    exporter = Exporter(folder, config=config, command=command)
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


def test_prometheus_says_up_0_while_the_tick_hangs_and_1_while_ticks_go_on(folder: Path) -> None:
    """The silent twin is the time before: as long, and each scrape of it is a good one."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    exporter, order = disturbed(folder, CONFIG.replace(f"tick: {TICK * 1000:g}ms", f"tick: {SLOW_TICK:g}s"))
    with exporter, Prometheus(folder, exporter.port, "groups: []\n", free_port()) as prometheus:
        begun = time.time()
        time.sleep(3 * SLOW_TICK + BUSY_SECONDS)
        tell(order, "hang")
        hung = time.time()
        wait_until(lambda: REFUSED in prometheus.problem(), PATIENCE, "a scrape that is refused")
        wait_until(lambda: prometheus.query("up == 0"), PATIENCE, "up 0")
        tell(order, "go on")
        went_on = time.time()
        wait_until(lambda: prometheus.query("up == 1"), PATIENCE, "up 1 again")
        up = prometheus.samples("up")

    before, meanwhile, after = (
        [value for at, value in up if since <= at < until]
        for since, until in ((begun, hung), (hung, went_on), (went_on, inf))
    )
    assert len(before) >= 3
    assert set(before) == {1.0}
    assert meanwhile == sorted(meanwhile, reverse=True), "good ones until the report is old, then none"
    assert meanwhile[-1] == 0.0
    assert after[-1] == 1.0


def test_a_tick_that_raises_ends_the_process(folder: Path) -> None:
    exporter, order = disturbed(folder)
    with exporter:
        exporter.may_end = True
        tell(order, "raise")
        status = exporter.process.wait(END_SECONDS)

    assert status == 1
    assert fetch(f"{exporter.url}/metrics")[0] == 0, "nobody answers any more"
    check_no_old_page(exporter.scrapes.history)
