"""Scrapes while every collector hangs: `python -m bench.wedged` prints one JSON object.

Each collector of a real daemon is wrapped: it reads once, then blocks for good in its second read, as a wedged
driver call or a dead mount would.  A stand-in server gives them something to read.  10 scrapes a second, from
this process over loopback: latency, how the in-flight ages grow, and how many readings of the hung collectors
are still served after three intervals (it must be none).
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from bench.scan import start_server
from stallwatch.config import Config, Intervals
from stallwatch.daemon import Daemon
from stallwatch.frameworks import load_frameworks
from stallwatch.model import Observation, Scene
from stallwatch.poller import Poller
from stallwatch.sources import Host, Moment, Source
from stallwatch.sources.table import SOURCES
from stallwatch.web import Published, serve_http

INTERVALS = Intervals(tick=1, threads=1, processes=1, ports=1, logs=1, health=1)
HEALTHY_SECONDS, SCRAPES, PER_SECOND = 8.0, 200, 10
FROM_COLLECTORS = tuple(f"stallwatch_{family}" for family in ("threads", "process_", "log_", "node_", "port_"))


class Wedging:
    """A source that works until `hang` is set, and then never returns."""

    def __init__(self, inner: Source, hang: threading.Event) -> None:
        self.name, self.signals, self._inner, self._hang = inner.name, inner.signals, inner, hang

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        if self._hang.is_set():
            threading.Event().wait()
        yield from self._inner.read(scene, now)

    def close(self) -> None:
        self._inner.close()


def main() -> None:
    config, hang = Config(intervals=INTERVALS), threading.Event()
    host = Host(config, load_frameworks(), Path("/proc"), Path("/"))
    published = Published(config.intervals.tick, time.monotonic)
    daemon = Daemon(
        host,
        lambda scene, notify: [
            Poller(cast(Source, Wedging(make(host), hang)), config.intervals.of(name), scene, notify)
            for name, make in SOURCES.items()
        ],
        published.publish,
    )
    with ExitStack() as stack:
        start_server(stack)
        http = serve_http(published, ["127.0.0.1:0"])
        stack.callback(http.stop)
        threading.Thread(target=daemon.run, daemon=True).start()
        stack.callback(daemon.stop)
        daemon.start()
        time.sleep(HEALTHY_SECONDS)
        url = f"http://{http.addresses[0]}/metrics"
        healthy = scrape(url)[1]
        hang.set()
        print(json.dumps(measure(url, healthy), indent=1))


def scrape(url: str) -> tuple[float, dict[tuple[str, ...], float]]:
    """Seconds it took, and the samples."""
    began = time.perf_counter()
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    took = time.perf_counter() - began
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return took, samples


def measure(url: str, healthy: dict[tuple[str, ...], float]) -> dict[str, Any]:
    took: list[float] = []
    samples: dict[tuple[str, ...], float] = {}
    for _ in range(SCRAPES):
        seconds, samples = scrape(url)
        took.append(1000 * seconds)
        time.sleep(1 / PER_SECOND)
    ages = [value for key, value in samples.items() if key[0] == "stallwatch_collector_in_flight_seconds"]
    return {
        "scrapes": SCRAPES,
        "p50_ms": round(statistics.median(took), 2),
        "p99_ms": round(sorted(took)[int(0.99 * SCRAPES) - 1], 2),
        "in_flight_seconds": [round(age, 1) for age in ages],
        "readings_before": sum(key[0].startswith(FROM_COLLECTORS) for key in healthy),
        "readings_after": sum(key[0].startswith(FROM_COLLECTORS) for key in samples),
        "states": sorted(key[-1] for key, value in samples.items() if key[0] == "stallwatch_server_state" and value),
    }


if __name__ == "__main__":
    main()
