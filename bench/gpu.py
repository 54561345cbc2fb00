"""What the GPUs cost: `python -m bench.gpu [--cards 8] [--cycles 60] [--settle 60]` prints one JSON object.

The cards are stand-ins (a libnvidia-ml.so.1 built here), everything else is as it is with real ones: the real pynvml in
the helper process, the parent's side, the collector.  A card holds one rank of a stand-in server.

CPU of a cycle: ours and the helper's, mean over all cycles; every sixth asks for the process lists too, as at 5 s and
30 s.  The stand-in's own work is in it (a stat of its state file in each call), a real driver's is not.
Memory: PSS of every process of a `stallwatch serve` with these cards and a server of 8 ranks, after scrapes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import psutil

from bench.memory import MIB, SCRAPES, SETTLE_SECONDS, pss, start
from bench.scan import cpu_of, free_port, start_server
from stallwatch.config import Config
from stallwatch.drill.nvml_standin import StandIn, build
from stallwatch.frameworks import load_frameworks
from stallwatch.model import Process, ProcessId, Reading, Scene, Server
from stallwatch.sources import Host, Moment
from stallwatch.sources.gpus.collector import Gpu
from stallwatch.sources.procfs import ProcFs

GIB = 1 << 30
EVERY_SECONDS, LISTS_EVERY = 0.2, 6
WARM_UP = 6


def occupy(cards: StandIn, count: int, stack: ExitStack) -> Scene:
    """One process on each card; they are the ranks of a server."""
    sleepers = [start(["sleep", "900"], stack) for _ in range(count)]
    for card, sleeper in enumerate(sleepers):
        cards.processes(card, [(sleeper.pid, 76 * GIB)])
    proc = ProcFs(Path("/proc"))
    ids = [stat.id for sleeper in sleepers if (stat := proc.stat(sleeper.pid)) is not None]
    ranks = tuple(Process(pid, f"TP{number}") for number, pid in enumerate(ids))
    return Scene(servers=(Server("bench-1", "sglang", "server", ProcessId(os.getpid(), 1), 0.0, ranks),))


def measure(cards: StandIn, count: int, cycles: int) -> dict[str, object]:
    """CPU of a cycle in ms."""
    plain: list[tuple[float, float]] = []
    listed: list[tuple[float, float]] = []
    readings: list[Reading] = []
    with ExitStack() as stack:
        scene = occupy(cards, count, stack)
        gpu = Gpu(Host(Config(), load_frameworks()))
        stack.callback(gpu.close)
        at, until = time.monotonic(), time.monotonic() + 10
        while gpu.absent and time.monotonic() < until:  # the helper starts
            list(gpu.read(scene, Moment(at, time.time())))
        helpers = [
            child.pid for child in psutil.Process().children() if any("nvml" in word for word in child.cmdline())
        ]
        interval = Config().intervals.gpu
        for number in range(WARM_UP + cycles):
            time.sleep(EVERY_SECONDS)
            at += interval
            began = time.process_time(), sum(map(cpu_of, helpers))
            readings = [item for item in gpu.read(scene, Moment(at, time.time())) if isinstance(item, Reading)]
            took = time.process_time() - began[0], sum(map(cpu_of, helpers)) - began[1]
            if number >= WARM_UP:
                (plain if number % LISTS_EVERY else listed).append(took)
    values = [reading for reading in readings if reading.value is not None]
    both = [*plain, *listed]
    return {
        "cards": count,
        "cycles": cycles,
        "readings": len(values),
        "cycle_ms": _mean(own + helper for own, helper in both),
        "of_it_ours_ms": _mean(own for own, _ in both),
        "of_it_helper_ms": _mean(helper for _, helper in both),
        "median_ms": round(1000 * statistics.median(map(sum, both)), 2),
    }


def _mean(seconds: Iterable[float]) -> float:
    return round(1000 * statistics.mean(seconds), 2)


def memory(cards: StandIn, settle: float) -> dict[str, object]:
    """PSS in MiB."""
    with ExitStack() as stack:
        start_server(stack, "--cards", str(cards.path.parent))
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "stallwatch", "serve", "--web.listen-address", address]
        ours = start(command, stack)
        time.sleep(settle)
        page = b""
        for _ in range(SCRAPES):
            page = urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read()
        children = {child.pid: child for child in psutil.Process(ours.pid).children(recursive=True)}
        return {
            "pss_mib": round(pss(ours.pid), 1),
            "of_it_helpers_mib": round(sum(child.memory_full_info().pss for child in children.values()) / MIB, 1),
            "helpers": len(children),
            "gpu_samples": page.count(b"\nstallwatch_gpu_"),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cards = StandIn(folder, build(folder), count=arguments.cards)
        os.environ.update(cards.environment())
        result = measure(cards, arguments.cards, arguments.cycles)
        result |= memory(cards, arguments.settle)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
