"""How long Prometheus takes for all rules, by the number of simulated nodes; extrapolated openly to 1,000 nodes.

    .venv/bin/python -m bench.rules [NODES …]

Every node has a page with each metric there is: 8 servers of 8 ranks, 8 cards, in each a stalled, a slow and an unknown
server, so that templates are filled as well.  Needs Prometheus (Debian: prometheus).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from stallwatch.catalogue import all_signals
from stallwatch.model import CHANNEL_STATES, CHANNELS, STATES, Signal
from stallwatch.rules import DEFAULT_FILES, one_file, rule_files

SERVERS, RANKS, NODES, TARGET_NODES = 8, 8, (5, 10, 20), 1000
PORT = 21190
STATE_OF = {0: "stalled", 1: "slow", 2: "unknown"}
"""Server number -> its state; the others are idle."""

SCRAPE = """\
global: {{scrape_interval: 15s, evaluation_interval: 15s}}
rule_files: [{rules}]
scrape_configs:
- job_name: stallwatch
  metrics_path: /metrics
  static_configs: [{{targets: [{targets}]}}]
  relabel_configs:
  - {{source_labels: [__address__], target_label: instance}}
  - {{target_label: __address__, replacement: '127.0.0.1:{port}'}}
"""

ONE_OF = {"state", "reason", "phase", "result", "wait"}
WORDS = {
    "channel": CHANNELS,
    "wait": ("running", "futex", "poll", "sleep"),
    "kind": ("major", "minor"),
    "log": ("stdout", "stderr"),
    "endpoint": ("health", "models", "metrics"),
    "collector": ("processes", "threads", "sockets", "logs", "gpu", "endpoints", "node"),
    "event": ("load_begin", "load_end", "ready", "stats", "error"),
    "reason": ("idle_wait",),
    "phase": ("post_load",),
    "port": ("8000",),
    "result": ("ok",),
    "xid": ("13",),
    "clock": ("barrier",),
}


def samples(signal: Signal) -> Iterator[str]:
    """The series of a metric on one node."""
    name, values = f"stallwatch_{signal.name}", []
    for label in signal.labels:
        if label == "server":
            values.append([f"vllm-{8000 + n}" for n in range(SERVERS)])
        elif label == "rank":
            values.append([f"TP{n}" for n in range(RANKS)])
        elif label == "gpu":
            values.append([f"GPU-{n}" for n in range(RANKS)] if signal.name != "rank_info" else ["GPU-0"])
        elif label == "state":
            values.append(list(STATES if signal.name in ("server_state", "servers") else CHANNEL_STATES[1:2]))
        else:
            values.append(list(WORDS.get(label, ("x",))))
    for chosen in itertools.product(*values):
        labels = dict(zip(signal.labels, chosen, strict=True))
        if signal.name == "gpu_process_memory_bytes" and labels["gpu"][4:] != labels["rank"][2:]:
            continue
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        yield f"{name}{{{text}}} {value_of(signal, labels)}\n"


def value_of(signal: Signal, labels: dict[str, str]) -> int:
    if signal.name == "server_state":
        return int(STATE_OF.get(int(labels["server"][5:]) - 8000, "idle") == labels["state"])
    return int(time.time()) if signal.name.endswith("_timestamp_seconds") else 1


def page() -> bytes:
    return "".join(line for s in all_signals() if s.kind != "histogram" for line in samples(s)).encode()


class Node(BaseHTTPRequestHandler):
    page = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *arguments: object) -> None:
        """Not of interest."""


def durations() -> Iterator[tuple[str, float]]:
    """Rule group and seconds of its last evaluation, by what Prometheus says of itself."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=30).read().decode()
    for family in text_string_to_metric_families(text):
        if family.name == "prometheus_rule_group_last_duration_seconds":
            yield from ((sample.labels["rule_group"].rpartition(";")[2], sample.value) for sample in family.samples)


def measure(nodes: int) -> dict[str, float]:
    """Group -> seconds of its slowest evaluation in the minute after the first two."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Node)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rules.yml").write_text(one_file(rule_files(DEFAULT_FILES)))
        targets = ",".join(f"'node{n}:10077'" for n in range(nodes))
        config = SCRAPE.format(rules=folder / "rules.yml", targets=targets, port=server.server_address[1])
        (folder / "prometheus.yml").write_text(config)
        command = f"prometheus --config.file={folder}/prometheus.yml --storage.tsdb.path={folder}/data --log.level=warn"
        command += f" --web.listen-address=127.0.0.1:{PORT}"
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command.split()])
        try:
            time.sleep(60)  # discovery, a scrape of every node, two evaluations
            slowest: dict[str, float] = {}
            for _ in range(4):
                time.sleep(15)
                for group, seconds in durations():
                    slowest[group] = max(seconds, slowest.get(group, 0.0))
            return slowest
        finally:
            process.terminate()
            process.wait(30)
            server.shutdown()


def main() -> int:
    Node.page = page()
    lines = Node.page.count(b"\n")
    print(f"a node: {SERVERS} servers of {RANKS} ranks, {lines} series, {len(Node.page) / 1e6:.2f} MB")
    measured = {}
    for nodes in [int(word) for word in sys.argv[1:]] or NODES:
        measured[nodes] = measure(nodes)
        print(
            f"{nodes:5d} nodes: " + ", ".join(f"{g} {s * 1000:.1f} ms" for g, s in measured[nodes].items()), flush=True
        )
    most = max(measured)
    for group, seconds in measured[most].items():
        print(f"{TARGET_NODES} nodes, in proportion to {most}: {group} {seconds * TARGET_NODES / most:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
