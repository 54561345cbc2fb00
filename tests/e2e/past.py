"""A real Prometheus that holds the recorded past (dashboard_past), and nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dashboard_past import END, openmetrics
from grafana.evaluate import View

from .harness import PATIENCE, Program, fetch, free_port, wait_until

MINUTES = 20
"""What the dashboards show: up to the last page of every node."""


class PastPrometheus(Program):
    """Blocks written by promtool.

    It looks back for less than a scrape: real scrapes mark a series that ended, and these blocks do not.
    """

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._text, self._data = folder / "past.om", folder / "data"
        config = folder / "prometheus.yml"
        config.write_text("scrape_configs: []\n")
        command = ["prometheus", "--config.file", str(config), "--log.level", "warn"]
        command += ["--storage.tsdb.path", str(self._data), "--storage.tsdb.retention.time", "100y"]
        command += ["--query.lookback-delta", "14s", "--web.listen-address", f"127.0.0.1:{self.port}"]
        super().__init__(command, folder / "prometheus.log")

    def write(self) -> None:
        with self._text.open("w") as text:
            text.writelines(openmetrics())
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(self._text), str(self._data)]
        subprocess.run(command, check=True, capture_output=True, timeout=5 * PATIENCE)

    def wait_started(self) -> None:
        wait_until(lambda: fetch(f"{self.url}/-/ready")[0] == 200, PATIENCE, f"a Prometheus\n{self.tail()}")

    def view(self, chosen: Mapping[str, str] | None = None, minutes: float = MINUTES) -> View:
        return View(self.url, END - minutes * 60, END, chosen or {})


@contextmanager
def recorded_past(folder: Path) -> Iterator[PastPrometheus]:
    prometheus = PastPrometheus(folder)
    prometheus.write()
    with prometheus:
        yield prometheus
