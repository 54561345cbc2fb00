"""A collector that raises, each of them and of every kind; a configuration that is broken while we run.

Twins without processes: test_poller.py, test_serve.py.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from stallwatch.sources.table import SOURCES

from .harness import CONFIG, TICK, Exporter, Scrape, Victim, all_hold, tell

pytestmark = pytest.mark.faults

ERRORS = ("RuntimeError", "MemoryError", "RecursionError", "UnicodeError", "OSError", "AssertionError", "KeyError")
"""One for each collector: what a bug, a lack of memory or a strange file may raise."""


OLDEST_REPORT = 3 * TICK + 1.0
"""An older one is refused; and what a busy machine needs to answer."""


@pytest.fixture
def orders(folder: Path) -> Path:
    """The folder where a file tells a collector what to raise."""
    made = folder / "orders"
    made.mkdir()
    return made


def age(page: Scrape) -> float:
    return page.at - (page.value("report_timestamp_seconds") or 0.0)


def works(page: Scrape, name: str) -> bool:
    """As far as the machine has something for it."""
    return page.value("collector_success", collector=name) in (1, None)


def failures(page: Scrape, name: str) -> float:
    return page.value("read_errors_total", collector=name, reason="error") or 0.0


def while_it_fails(exporter: Exporter, order: Path, error: str) -> list[Scrape]:
    """The pages from its first failure to its third."""
    name = order.name
    before = failures(exporter.scrapes.look(), name)
    tell(order, error)
    first = exporter.wait_for(f"{name} failed", lambda page: not works(page, name))
    exporter.wait_for(f"{name} failed thrice", lambda page: failures(page, name) >= before + 3)
    pages = exporter.scrapes.since(first.at)
    order.unlink()
    exporter.wait_for(f"{name} again", lambda page: works(page, name))
    return pages


def test_a_collector_that_raises_stops_itself_only_and_comes_back(folder: Path, orders: Path, victim: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("raising.py")), str(orders)]
    with Exporter(folder, command=command) as exporter, Victim(victim, folder / "victim.log") as server:
        exporter.wait_for_server(server.name)
        for name, error in zip(SOURCES, ERRORS, strict=True):
            meanwhile = while_it_fails(exporter, orders / name, error)

            assert not any(works(page, name) for page in meanwhile), name
            assert all(works(page, other) for page in meanwhile for other in SOURCES if other != name), name
            assert max(map(age, meanwhile)) < OLDEST_REPORT, name
            if name == "threads":
                assert meanwhile[-1].value("threads", server=server.name) is None
        exporter.wait_for_server(server.name)

    assert [exporter.said(f"error={error}") for error in ERRORS] == [1] * len(ERRORS)
    assert exporter.said("source failed") == exporter.said("source works again") == len(SOURCES), "said once each"


def test_a_broken_configuration_changes_nothing_and_is_told(folder: Path, victim: Path) -> None:
    with Exporter(folder, "--web.enable-lifecycle") as exporter, Victim(victim, folder / "victim.log") as server:
        exporter.wait_for_server(server.name)
        file = folder / "stallwatch.yml"
        file.write_text("verdict: {window: never}\n")
        os.kill(exporter.pid, signal.SIGHUP)
        told = exporter.wait_for("a failed reload", lambda page: page.value("config_last_reload_successful") == 0)
        meanwhile = exporter.rest(2.0)
        file.write_text(CONFIG)
        os.kill(exporter.pid, signal.SIGHUP)
        after = exporter.wait_for("a reload", lambda page: page.value("config_last_reload_successful") == 1)

    all_hold(meanwhile, lambda page: page.value("threads", server=server.name), "the server is watched as before")
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    before = told.value("config_last_reload_success_timestamp_seconds") or 0.0
    assert before < told.at < (after.value("config_last_reload_success_timestamp_seconds") or 0.0)
    assert exporter.said("configuration not reloaded") == 1
    assert exporter.said("verdict.window") == 1
