"""A real Prometheus that scrapes the exporter and evaluates rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .harness import PATIENCE, Program, fetch, free_port, wait_until

SETUP = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s, scrape_timeout: 1s}}
rule_files: [{rules}]
scrape_configs:
- job_name: stallwatch
  static_configs: [{{targets: ['127.0.0.1:{port}']}}]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{alertmanager}']}}]}}]}}
"""


class Prometheus(Program):
    """Scrapes the exporter each second; `rules` is the text of a rule file."""

    def __init__(self, folder: Path, exporter_port: int, rules: str, alertmanager_port: int) -> None:
        self.port = free_port()
        file = folder / "rules.yml"
        file.write_text(rules)
        config = folder / "prometheus.yml"
        config.write_text(SETUP.format(rules=file, port=exporter_port, alertmanager=alertmanager_port))
        command = ["prometheus", "--config.file", str(config), "--log.level", "warn"]
        command += ["--storage.tsdb.path", str(folder / "data"), "--rules.alert.resend-delay", "2s"]
        command += ["--web.listen-address", f"127.0.0.1:{self.port}"]
        super().__init__(command, folder / "prometheus.log")

    def wait_started(self) -> None:
        """A first sample, not only a first answer: discovery holds the target back for five seconds."""
        wait_until(lambda: self.query("up == 1"), PATIENCE, f"a first scrape\n{self.tail()}")

    def query(self, expression: str) -> list[dict[str, Any]]:
        status, body = self.answer(expression)
        return list(json.loads(body)["data"]["result"]) if status == 200 else []

    def samples(self, selector: str, seconds: int = 300) -> list[tuple[float, float]]:
        """(Unix time, value) of the only series that fits, over the last seconds; oldest first."""
        found = self.query(f"{selector}[{seconds}s]")
        return [(float(at), float(value)) for at, value in found[0]["values"]] if found else []

    def problem(self) -> str:
        """What was wrong with the last scrape; "" when it worked."""
        status, body = fetch(f"http://127.0.0.1:{self.port}/api/v1/targets")
        targets = json.loads(body)["data"]["activeTargets"] if status == 200 else []
        return str(targets[0]["lastError"]) if targets else ""

    def answer(self, expression: str) -> tuple[int, str]:
        """Status and body, as they come."""
        return fetch(f"http://127.0.0.1:{self.port}/api/v1/query?query={quote(expression)}")
