"""A real Prometheus scrapes the exporter and evaluates the shipped rules."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .harness import ROOT, STALL_AFTER, Exporter, Program, StandIn, fetch, free_port, wait_until

pytestmark = pytest.mark.e2e

ALERT = "InferenceServerStalled"
SPEED = 12
"""keep_firing_for of the rules is divided by what the verdict's times are divided by."""

SCRAPE = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s, scrape_timeout: 1s}}
rule_files: [{rules}]
scrape_configs:
- job_name: stallwatch
  static_configs: [{{targets: ['127.0.0.1:{port}']}}]
"""
ALERTING = """\
alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]}}
"""


def scaled_servers() -> str:
    """servers.yml, kept as short as the verdict's times are."""
    text = (ROOT / "rules" / "servers.yml").read_text()
    return re.sub(r"keep_firing_for: (\d+)m\b", lambda m: f"keep_firing_for: {int(m[1]) * 60 // SPEED}s", text)


class Prometheus(Program):
    """Scrapes the exporter each second; `rules` is the text of a rule file."""

    def __init__(
        self, folder: Path, exporter_port: int, rules: str | None = None, alertmanager_port: int | None = None
    ) -> None:
        self.port = free_port()
        file = folder / "rules.yml"
        file.write_text(scaled_servers() if rules is None else rules)
        config = folder / "prometheus.yml"
        alerting = "" if alertmanager_port is None else ALERTING.format(port=alertmanager_port)
        config.write_text(SCRAPE.format(rules=file, port=exporter_port) + alerting)
        command = ["prometheus", "--config.file", str(config), "--log.level", "warn"]
        command += ["--storage.tsdb.path", str(folder / "data"), "--rules.alert.resend-delay", "2s"]
        command += ["--web.listen-address", f"127.0.0.1:{self.port}"]
        super().__init__(command, folder / "prometheus.log")

    def wait_started(self) -> None:
        """A first sample, not only a first answer: discovery holds the target back for five seconds."""
        wait_until(lambda: self.query("up == 1"), 30.0, f"a first scrape\n{self.tail()}")

    def query(self, expression: str) -> list[dict[str, Any]]:
        quoted = expression.replace(" ", "%20").replace("=", "%3D")
        status, body = fetch(f"http://127.0.0.1:{self.port}/api/v1/query?query={quoted}")
        return list(json.loads(body)["data"]["result"]) if status == 200 else []

    def alerts(self, server: str) -> list[dict[str, Any]]:
        """Those of a server that wake somebody."""
        status, body = fetch(f"http://127.0.0.1:{self.port}/api/v1/alerts")
        every = json.loads(body)["data"]["alerts"] if status == 200 else []
        return [a for a in every if a["labels"].get("server") == server and a["labels"]["severity"] == "critical"]


@dataclass(slots=True)
class Pager:
    """Looks at the alerts of one server every 0.3 s: each `activeAt` of a firing alert is one page."""

    prometheus: Prometheus
    server: str
    pages: dict[str, dict[str, Any]] = field(default_factory=dict)
    firing: bool = False
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stopping.wait(0.3):
            firing = [a for a in self.prometheus.alerts(self.server) if a["state"] == "firing"]
            self.pages |= {alert["activeAt"] + alert["labels"]["alertname"]: alert for alert in firing}
            self.firing = bool(firing)

    def stop(self) -> None:
        self._stopping.set()


def test_the_stalled_alert_fires_once_and_resolves(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    with (
        Exporter(tmp_path) as exporter,
        Prometheus(tmp_path, exporter.port) as prometheus,
        StandIn("barrier-deadlock", tmp_path, load_seconds=1) as server,
    ):
        pager = Pager(prometheus, server.name)
        thread = threading.Thread(target=pager.run, daemon=True)
        thread.start()
        try:
            server.wait_for_line("Load weight end", 8)
            wait_until(lambda: pager.firing, STALL_AFTER + 15, f"a page: {exporter.watch.story()}")
            time.sleep(10.0)
            server.rank(3).send_signal(signal.SIGUSR1)
            server.wait_for_line("ready to roll")
            wait_until(lambda: not pager.firing, 40.0, "the page resolved")
            time.sleep(5.0)
        finally:
            pager.stop()
            thread.join(10.0)

    (page,) = pager.pages.values()
    assert page["labels"]["alertname"] == ALERT
    assert not {"reason", "rank", "phase", "pid"} & page["labels"].keys()
    assert "TP3" in page["annotations"]["description"]
    assert "idle_wait" in page["annotations"]["description"]
