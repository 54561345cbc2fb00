"""How long from the last progress to the webhook, with nothing scaled: shipped times, 15 s scrape, 15 s evaluation.

    .venv/bin/python -m bench.page_delay

Runs about seven minutes: a stand-in server that deadlocks at a barrier, then one that loses a rank.  Needs Prometheus
and Alertmanager (Debian: prometheus, prometheus-alertmanager).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from stallwatch.rules import DEFAULT_FILES, one_file, rule_files

ROOT = Path(__file__).resolve().parents[1]
EXPORTER, PROMETHEUS, ALERTMANAGER, SERVER = 21077, 21090, 21093, 21000
CONFIG = """\
global: {{scrape_interval: 15s, evaluation_interval: 15s}}
rule_files: [{rules}]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{alertmanager}']}}]}}]}}
scrape_configs:
- job_name: stallwatch
  static_configs: [{{targets: ['127.0.0.1:{exporter}']}}]
"""
TARGETS = {"InferenceServerStalled": 300.0, "InferenceServerFailed": 45.0}
"""Alert -> seconds it may take."""

_told: list[tuple[float, dict[str, Any]]] = []


class Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _told.extend((time.time(), alert) for alert in message["alerts"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Not of interest."""


def wait(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    end = time.time() + seconds
    while time.time() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    sys.exit(f"not within {seconds:.0f} s: {what}")


def told_at(alert: str, server: str) -> float | None:
    labels = {"alertname": alert, "server": server}
    found = (at for at, each in list(_told) if labels.items() <= each["labels"].items() and each["status"] == "firing")
    return next(found, None)


def start(folder: Path, hook: int) -> list[subprocess.Popen[bytes]]:
    (folder / "rules.yml").write_text(one_file(rule_files(DEFAULT_FILES)))
    text = CONFIG.format(rules=folder / "rules.yml", alertmanager=ALERTMANAGER, exporter=EXPORTER)
    (folder / "prometheus.yml").write_text(text)
    routes = (ROOT / "deploy/alertmanager/alertmanager.yml").read_text()
    (folder / "alertmanager.yml").write_text(routes.replace("127.0.0.1:9099", f"127.0.0.1:{hook}"))
    files = f"--config.file={folder}"
    exporter = f"{sys.prefix}/bin/stallwatch serve --web.listen-address 127.0.0.1:{EXPORTER}"
    prometheus = f"prometheus {files}/prometheus.yml --storage.tsdb.path={folder}/data --log.level=warn"
    alertmanager = f"prometheus-alertmanager {files}/alertmanager.yml --storage.path={folder}/am --log.level=warn"
    commands = (
        exporter,
        f"{prometheus} --web.listen-address=127.0.0.1:{PROMETHEUS}",
        f"{alertmanager} --cluster.listen-address= --web.listen-address=127.0.0.1:{ALERTMANAGER}",
    )
    output = (folder / "output").open("wb")
    return [
        subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *c.split()], stdout=output, stderr=output) for c in commands
    ]


def scraped() -> bool:
    try:
        url = f"http://127.0.0.1:{PROMETHEUS}/api/v1/query?query=up%3D%3D1"
        return bool(json.load(urllib.request.urlopen(url))["data"]["result"])
    except OSError:
        return False


def stand_in(folder: Path, port: int, limit: str) -> tuple[subprocess.Popen[bytes], Path]:
    log = folder / f"{port}.log"
    command = [sys.executable, "-m", "stallwatch.drill.standin", "barrier-deadlock", "--port", str(port)]
    command += ["--for", limit, "--log", str(log), "--set", "load_seconds=5"]
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=subprocess.DEVNULL), log


def loaded(log: Path) -> bool:
    return log.exists() and log.read_text(errors="replace").count("Load weight end") >= 8


def report(alert: str, since: float, server: str) -> bool:
    at = wait(lambda: told_at(alert, server), TARGETS[alert] + 120, f"{alert}: {_told[-3:]}")
    seconds, target = at - since, TARGETS[alert]
    print(f"{alert}: {seconds:.0f} s (at most {target:.0f} s) {'ok' if seconds <= target else 'TOO LATE'}", flush=True)
    return bool(seconds <= target)


def main() -> int:
    hook = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    running: list[subprocess.Popen[bytes]] = []
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            running += start(folder, hook.server_address[1])
            wait(scraped, 60, "a first scrape")
            server, log = stand_in(folder, SERVER, "8m")
            running.append(server)
            wait(lambda: loaded(log), 60, "a server that has loaded")
            is_soon = report("InferenceServerStalled", time.time(), f"sglang-{SERVER}")
            server, log = stand_in(folder, SERVER + 1, "5m")
            running.append(server)
            wait(lambda: loaded(log), 60, "a server that has loaded")
            time.sleep(20)
            ranks = [
                p for p in psutil.process_iter(["cmdline"]) if "scheduler_TP5" in " ".join(p.info["cmdline"] or ())
            ]
            below = {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
            (rank,) = (process for process in ranks if process.pid in below)
            rank.kill()
            return 0 if report("InferenceServerFailed", time.time(), f"sglang-{SERVER + 1}") and is_soon else 1
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(20)


if __name__ == "__main__":
    sys.exit(main())
