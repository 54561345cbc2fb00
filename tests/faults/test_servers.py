"""Servers whose HTTP answers are meant to hurt whoever asks: endless, packed, slow, led in circles, or none.

All at once, beside one that answers well.  Twins without processes: test_http_probe.py, test_endpoints.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from e2e.harness import Program, free_port

from .harness import ALONE, Exporter, Scrape, all_hold, tell
from .hostile_server import BY_NAME

pytestmark = pytest.mark.faults

PATIENT = ALONE.replace("health: 1s", "health: 5s")
"""A round that waits for its slowest takes 5 s; shipped is one every 30 s."""

MOST_MEMORY_BYTES = 30 << 20
"""What all of it may cost; one of the answers alone is a gigabyte."""

HURTS = {
    "gigabyte": (200, False),
    "endless": (200, False),
    "endless_line": (200, False),
    "huge_chunks": (200, False),
    "bomb": (200, False),
    "redirects": (302, False),
    "endless_header": (None, False),
    "trickle": (None, True),
    "mute": (None, True),
    "half_a_header": (None, True),
}
"""Way -> what stands for its health, and whether its time-outs are counted."""


@dataclass(frozen=True)
class Hostile:
    """A server on its port; `word` is the file that says how it answers."""

    name: str
    port: int
    word: Path

    @property
    def configuration(self) -> str:
        match = f'{{command: "hostile_server.py {self.port}"}}'
        return f"  - {{name: {self.name}, framework: vllm, match: {match}, port: {self.port}}}\n"

    def program(self, folder: Path) -> Program:
        script = Path(__file__).with_name("hostile_server.py")
        return Program([sys.executable, str(script), str(self.port), str(self.word)], folder / f"{self.name}.out")


@contextmanager
def running(folder: Path, names: list[str]) -> Iterator[list[Hostile]]:
    """One of each."""
    found = [Hostile(name.replace("_", "-"), free_port(), folder / f"{name}.word") for name in names]
    with ExitStack() as programs:
        for name, hostile in zip(names, found, strict=True):
            tell(hostile.word, name)
            programs.enter_context(hostile.program(folder))
        yield found


def running_requests(page: Scrape, server: str) -> float | None:
    return page.value("server_requests_running", server=server)


def test_every_way_has_its_line() -> None:
    assert set(HURTS) == set(BY_NAME) - {"well"}


def test_no_answer_of_a_server_hurts_the_others_or_us(folder: Path) -> None:
    with running(folder, ["well", *HURTS]) as (well, *hostile):
        config = PATIENT + "servers:\n" + "".join(each.configuration for each in (well, *hostile))
        with Exporter(folder, config=config) as exporter:
            exporter.wait_for("the well one", lambda page: running_requests(page, well.name) == 3)
            slow = {each.name: timeouts for each, (_, timeouts) in zip(hostile, HURTS.values(), strict=True)}
            exporter.wait_for(
                "a round",
                lambda page: all(_timeouts(page, name) >= is_slow for name, is_slow in slow.items()),
            )
            memory = psutil.Process(exporter.pid).memory_info().rss
            meanwhile = exporter.rest(12.0)
            more = psutil.Process(exporter.pid).memory_info().rss - memory
            for each in hostile:
                tell(each.word, "well")
            exporter.wait_for(
                "all of them well", lambda page: all(running_requests(page, each.name) == 3 for each in hostile)
            )

    all_hold(meanwhile, lambda page: running_requests(page, well.name) == 3, "the well one is told as it is")
    all_hold(
        meanwhile,
        lambda page: _health(page, well.name) == 200,
        "and is healthy",
    )
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    late = {each.name: _timeouts(meanwhile[-1], each.name) - _timeouts(meanwhile[0], each.name) for each in hostile}
    for each, (status, is_slow) in zip(hostile, HURTS.values(), strict=True):
        told = {(_health(page, each.name), running_requests(page, each.name)) for page in meanwhile}
        assert told == {(status, None)}, each.name
        assert (late[each.name] > 0) == is_slow, each.name
        assert not each.word.with_suffix(".elsewhere").exists()
    longest = [page.value("collector_in_flight_seconds", collector="endpoints") or 0.0 for page in meanwhile]
    assert 4.0 < max(longest) < 7.0  # the slow ones cost the collector their deadline, and nothing else
    assert more < MOST_MEMORY_BYTES


def _health(page: Scrape, server: str) -> float | None:
    return page.value("health_status", endpoint="health", server=server)


def _timeouts(page: Scrape, server: str) -> float:
    return page.value("health_timeouts_total", server=server) or 0.0
