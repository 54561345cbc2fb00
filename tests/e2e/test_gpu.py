"""Eight ranks on eight cards: real processes, the real pynvml, and a stand-in driver that is steered from here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stallwatch.drill.nvml_standin import NoCompilerError, StandIn, build

from . import harness
from .harness import GPU_LOOK, PATIENCE, SLACK, STALL_AFTER, TICK, WINDOW, Exporter, rest, wait_until

pytestmark = pytest.mark.e2e

RANKS = 8


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[StandIn]:
    """Eight empty cards in `tmp_path`."""
    try:
        library = build(tmp_path)
    except NoCompilerError as error:
        pytest.skip(str(error))
    cards = StandIn(tmp_path, library, RANKS)
    yield cards
    cards.clear()


def exporter(folder: Path, cards: StandIn) -> Exporter:
    return Exporter(folder, environment=cards.environment())


def server(condition: str, folder: Path, **settings: float) -> harness.StandIn:
    return harness.StandIn(condition, folder, cards=folder, **{"load_seconds": 2.0, **settings})


def steered(folder: Path) -> StandIn:
    """The state as the server under test left it: from here on only this process writes it."""
    return StandIn(folder, folder / "libnvidia-ml.so.1")


def seen(exporter: Exporter, metric: str, **labels: str) -> list[float]:
    return list(exporter.watch.last().values(metric, **labels).values())


def loaded(exporter: Exporter, server: harness.StandIn) -> None:
    """The cards are full, every rank is joined to its own, and the server writes no more of their state."""
    server.wait_for_line("Load weight end", RANKS)

    def full() -> bool:
        held = exporter.watch.last().values("stallwatch_gpu_process_memory_bytes", server=server.name)
        return len(held) == RANKS and min(held.values()) == 76 << 30

    wait_until(full, PATIENCE, f"76 GiB on each card\n{exporter.tail(40)}", 0.2)
    time.sleep(1.0)


def test_a_driver_that_hangs_stops_nothing_else(tmp_path: Path, cards: StandIn) -> None:
    """While the server still reads: never stalled, the GPU series gone, the rest of the page as before."""
    with exporter(tmp_path, cards) as watcher, server("phantom-hang", tmp_path, slow_seconds=60) as standin:
        loaded(watcher, standin)
        driver = steered(tmp_path)
        before = _helpers(watcher)

        driver.hang("nvmlDeviceGetMemoryInfo_v2", card=3)
        began = time.time()
        wait_until(lambda: not seen(watcher, "stallwatch_gpu_memory_used_bytes"), PATIENCE, "no GPU series", 0.1)
        gone_after = time.time() - began
        rest(WINDOW + 2, standin)
        in_flight = seen(watcher, "stallwatch_collector_in_flight_seconds", collector="gpu")[0]
        success = seen(watcher, "stallwatch_collector_success", collector="gpu")
        others = seen(watcher, "stallwatch_process_cpu_seconds_total", server=standin.name)
        driver.clear()
        freed = time.time()
        wait_until(
            lambda: len(seen(watcher, "stallwatch_gpu_memory_used_bytes")) == RANKS, PATIENCE, "they are back", 0.1
        )
        back_after = time.time() - freed

        assert gone_after <= 2.0 + 3 * GPU_LOOK + TICK + SLACK  # the deadline of a call, then three intervals
        assert in_flight >= WINDOW
        assert success == [0.0]
        assert len(others) >= RANKS
        assert back_after <= 2 * GPU_LOOK + TICK + SLACK
        assert watcher.watch.states(standin.name) <= {"working", "slow", "idle"}
        wait_until(lambda: len(_helpers(watcher)) <= len(before), PATIENCE, "no helper is left over")


def test_a_deadlock_under_a_hung_driver_is_told_from_a_plain_one(tmp_path: Path, cards: StandIn) -> None:
    with exporter(tmp_path, cards) as watcher, server("barrier-deadlock", tmp_path) as standin:
        loaded(watcher, standin)
        steered(tmp_path).hang("nvmlDeviceGetUtilizationRates")

        watcher.watch.wait_for(standin.name, STALL_AFTER + 20, state="stalled", reason="driver_unresponsive")

        steered(tmp_path).clear()
        wait_until(
            lambda: len(seen(watcher, "stallwatch_gpu_memory_used_bytes")) == RANKS, PATIENCE, "they are back", 0.1
        )


def test_the_exporter_ends_in_two_seconds_while_the_driver_hangs(tmp_path: Path, cards: StandIn) -> None:
    watcher = exporter(tmp_path, cards)
    watcher.__enter__()
    helpers: list[psutil.Process] = []
    try:
        wait_until(lambda: len(seen(watcher, "stallwatch_gpu_memory_used_bytes")) == RANKS, PATIENCE, "cards", 0.1)
        cards.hang("nvmlDeviceGetTotalEnergyConsumption", deaf=True)
        wait_until(lambda: not seen(watcher, "stallwatch_gpu_memory_used_bytes"), PATIENCE, "no GPU series", 0.1)
        helpers = _helpers(watcher)
        watcher.watch.stop()

        began = time.monotonic()
        watcher.process.send_signal(signal.SIGTERM)
        status = watcher.process.wait(PATIENCE)

        assert status == 0
        assert time.monotonic() - began <= 2.0 + SLACK
    finally:
        cards.clear()
        wait_until(_all_ended(helpers), PATIENCE, "the helper ends by itself once its call returns")
        watcher.end()


def test_a_lost_card_fails_the_server_that_used_it_and_names_the_rank(tmp_path: Path, cards: StandIn) -> None:
    with exporter(tmp_path, cards) as watcher, server("normal", tmp_path) as standin:
        loaded(watcher, standin)
        watcher.watch.wait_for(standin.name, PATIENCE, state="idle", ready=True)
        driver = steered(tmp_path)

        driver.lose(5)
        lost = time.time()
        at = watcher.watch.wait_for(standin.name, PATIENCE, state="failed", reason="gpu_lost", suspect_rank="TP5")

        assert at - lost <= 4 * GPU_LOOK + 2 * TICK + SLACK
        assert sum(seen(watcher, "stallwatch_gpu_lost")) == 1
        driver.restore(5)
        wait_until(lambda: sum(seen(watcher, "stallwatch_gpu_lost")) == 0, PATIENCE, "it is back", 0.2)
        assert len(seen(watcher, "stallwatch_gpu_memory_used_bytes")) == RANKS


def _helpers(watcher: Exporter) -> list[psutil.Process]:
    """Its children that may be in the driver."""
    return [p for p in psutil.Process(watcher.pid).children(recursive=True) if _is_helper(p)]


def _is_helper(process: psutil.Process) -> bool:
    try:
        return any(word.endswith("nvml.py") for word in process.cmdline())
    except psutil.Error:
        return False


def _all_ended(processes: list[psutil.Process]) -> Callable[[], bool]:
    return lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
