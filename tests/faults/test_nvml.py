"""NVML does not return, in every class of call: the helper hangs, the exporter does not, and nothing of cards is told.

The driver is a stand-in library in real helpers.  Twins without processes: test_nvml_child.py, test_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from e2e.harness import wait_until
from stallwatch.drill.nvml_standin import NoCompilerError, StandIn, build
from stallwatch.sources.gpus.nvml_child import MOST_CHILDREN

from .harness import PATIENCE, Exporter, Scrape, Victim, all_hold

pytestmark = pytest.mark.faults

CARDS = 2
CALLS = {
    "opening the driver": "nvmlInitWithFlags",
    "finding cards": "nvmlDeviceGetCount_v2",
    "opening a card": "nvmlDeviceGetHandleByIndex_v2",
    "a figure of a card": "nvmlDeviceGetMemoryInfo_v2",
    "its processes": "nvmlDeviceGetComputeRunningProcesses_v3",
    "its events": "nvmlEventSetWait_v2",
}
FROM_THE_START = ("opening the driver", "finding cards", "opening a card")
"""Calls that a helper makes before its first answer, and mostly never again."""


def without_kernel_log(folder: Path) -> list[str]:
    """Flags with which the driver is asked for its Xids, too, for the host is said to have no /dev/kmsg."""
    root = folder / "root"
    root.mkdir()
    return ["--path.rootfs", str(root)]


@pytest.fixture
def cards(folder: Path) -> Iterator[StandIn]:
    try:
        library = build(folder)
    except NoCompilerError as error:
        pytest.skip(str(error))
    cards = StandIn(folder, library, CARDS)
    yield cards
    cards.clear()


def shown(page: Scrape) -> int:
    """Cards whose memory is told."""
    return len(page.labels("gpu_info", "gpu")) if page.value("gpu_memory_total_bytes") else 0


def in_flight(page: Scrape) -> float:
    return page.value("collector_in_flight_seconds", collector="gpu") or 0.0


def succeeds(page: Scrape) -> bool:
    """On a machine so busy that looks are old, their figures are gone before it is known that a call hangs."""
    return page.value("collector_success", collector="gpu") == 1


def helpers(exporter: Exporter) -> list[psutil.Process]:
    """Its children that may be in the driver."""
    found = []
    for child in psutil.Process(exporter.pid).children(recursive=True):
        try:
            if any(word.endswith("nvml.py") for word in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def check(meanwhile: Sequence[Scrape], server: str) -> None:
    """Nothing of a card, the rest as ever; and how long the driver owes its answer."""
    all_hold(meanwhile, lambda page: not shown(page), "no figure of a card")
    all_hold(meanwhile, lambda page: not succeeds(page), "it is no success")
    all_hold(meanwhile, lambda page: not page.failed(), "every other collector works")
    all_hold(meanwhile, lambda page: page.state(server) in ("working", "quiet", "stalled"), "the server is judged")
    assert in_flight(meanwhile[-1]) > in_flight(meanwhile[0])


@pytest.mark.parametrize("is_deaf", [False, True], ids=["", "deaf"])
@pytest.mark.parametrize("what", [what for what in CALLS if what not in FROM_THE_START])
def test_a_call_that_hangs_while_cards_are_watched(
    what: str, is_deaf: bool, cards: StandIn, folder: Path, victim: Path
) -> None:
    """`deaf`: a helper that hears no signal either, as in a driver call that cannot be interrupted."""
    flags = without_kernel_log(folder) if what == "its events" else []
    with (
        Exporter(folder, *flags, environment=cards.environment()) as exporter,
        Victim(victim, folder / "server.log") as server,
    ):
        exporter.wait_for_server(server.name)
        exporter.wait_for("the cards", lambda page: shown(page) == CARDS)
        cards.hang(CALLS[what], deaf=is_deaf)
        exporter.wait_for("no cards", lambda page: not shown(page) and in_flight(page) and not succeeds(page))
        meanwhile = exporter.rest(4.0)
        hanging = len(helpers(exporter))
        cards.clear()
        after = exporter.wait_for("the cards again", lambda page: shown(page) == CARDS and not page.failed())
        wait_until(lambda: len(helpers(exporter)) == 1, PATIENCE, "no helper is left over")

    check(meanwhile, server.name)
    assert 1 <= hanging <= MOST_CHILDREN
    assert after.value("server_starts_total", server=server.name) == 1


@pytest.mark.parametrize("what", FROM_THE_START)
def test_a_call_that_hangs_from_before_our_start(what: str, cards: StandIn, folder: Path, victim: Path) -> None:
    cards.hang(CALLS[what])
    with (
        Exporter(folder, environment=cards.environment()) as exporter,
        Victim(victim, folder / "server.log") as server,
    ):
        exporter.wait_for_server(server.name)
        exporter.wait_for("a call in flight", in_flight)
        meanwhile = exporter.rest(4.0)
        hanging = len(helpers(exporter))
        cards.clear()
        exporter.wait_for("the cards", lambda page: shown(page) == CARDS and not page.failed())
        wait_until(lambda: len(helpers(exporter)) == 1, PATIENCE, "no helper is left over")

    check(meanwhile, server.name)
    assert 1 <= hanging <= MOST_CHILDREN


def test_a_driver_that_is_only_slow_is_watched(cards: StandIn, folder: Path, victim: Path) -> None:
    """The silent twin."""
    cards.delay(CALLS["a figure of a card"], 100)
    with (
        Exporter(folder, environment=cards.environment()) as exporter,
        Victim(victim, folder / "server.log") as server,
    ):
        exporter.wait_for_server(server.name)
        exporter.wait_for("the cards", lambda page: shown(page) == CARDS)
        pages = exporter.rest(3.0)

    assert any(shown(page) == CARDS and page.value("collector_success", collector="gpu") == 1 for page in pages)
    assert not exporter.said("driver")
