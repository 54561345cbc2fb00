"""How long Prometheus takes for all rules, by the number of simulated nodes; extrapolated openly to 1,000 nodes.

    .venv/bin/python -m bench.rules [NODES …]

Every node has a page with each metric there is: 8 servers of one rank and card each, all of them in a namespace.  On
every twentieth node a server is stalled, one slow and one unknown, so that templates are filled as well: an alert that
fires costs several queries.  Shown is the fastest of eight evaluations of each group, and its dearest rules.  As root
Prometheus goes before everybody else on this machine (chrt): on a busy one it would be measured how busy that is.
Needs Prometheus (Debian: prometheus).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from stallwatch.catalogue import all_signals
from stallwatch.model import CHANNEL_STATES, CHANNELS, STATES, Signal
from stallwatch.rules import DEFAULT_FILES, one_file, rule_files

SERVERS, RANKS, NODES, TARGET_NODES = 8, 1, (20, 100), 1000
LOOKS = 8
FIRST = ["chrt", "--fifo", "5"] if os.geteuid() == 0 else []
PORT = 21190
STATE_OF = {"vllm-8000": "stalled", "vllm-8001": "slow", "vllm-8002": "unknown"}
"""Server of an ill node -> its state; the others are idle."""

ILL_EVERY = 20
NOW = 1234567
"""Stands for the time of the scrape."""

QUIET = re.compile("lost|foreign|unowned|orphan|dropped|in_flight|frozen|paused|traced|timeouts|xid|oom|recovery")
"""Metrics that are 0 where all is well."""

SCRAPE = """\
global: {{scrape_interval: 15s, evaluation_interval: 15s}}
rule_files: [{rules}]
scrape_configs:
- job_name: stallwatch
  metrics_path: /metrics
  static_configs: [{{targets: [{targets}]}}]
  relabel_configs:
  - {{source_labels: [__address__], target_label: instance}}
  - {{source_labels: [__address__], regex: 'node(.+):.*', target_label: __param_node}}
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
    "group": ("",),  # each of them on one node
    "nnodes": ("1",),
}


def samples(signal: Signal, is_ill: bool) -> Iterator[str]:
    """The series of a metric on one node."""
    name, values = f"stallwatch_{signal.name}", []
    for label in signal.labels:
        if label == "server":
            values.append([f"vllm-{8000 + n}" for n in range(SERVERS)])
        elif label == "rank":
            values.append([f"TP{n}" for n in range(RANKS)])
        elif label == "gpu":
            values.append([f"GPU-{n}" for n in range(SERVERS)])
        elif label == "state":
            values.append(list(STATES if signal.name in ("server_state", "servers") else CHANNEL_STATES[1:2]))
        else:
            values.append(list(WORDS.get(label, ("x",))))
    for chosen in itertools.product(*values):
        labels = dict(zip(signal.labels, chosen, strict=True))
        if signal.name == "server_deadline_timestamp_seconds" and not is_starting(labels["server"], is_ill):
            continue  # the time-outs of a start
        if {"gpu", "server"} <= labels.keys() and labels["gpu"][4:] != labels["server"][-1]:
            continue
        if signal.name == "rank_suspect" and (not is_ill or chosen != ("vllm-8000", "TP0")):
            continue
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        yield f"{name}{{{text}}} {value_of(signal, labels, is_ill)}\n"


def is_starting(server: str, is_ill: bool) -> bool:
    return is_ill and server in STATE_OF


def value_of(signal: Signal, labels: dict[str, str], is_ill: bool) -> int:
    if signal.name == "server_state":
        return int((STATE_OF.get(labels["server"], "idle") if is_ill else "idle") == labels["state"])
    if signal.name == "server_ready":
        return int(not is_starting(labels["server"], is_ill))
    if signal.name == "rank_phase_number":
        return 3 if is_starting(labels["server"], is_ill) else 9
    if QUIET.search(signal.name):
        return 0
    if signal.name == "report_timestamp_seconds":
        return NOW
    return int(time.time()) if signal.name.endswith("_timestamp_seconds") else 1


def page(is_ill: bool) -> bytes:
    return "".join(line for s in all_signals() if s.kind != "histogram" for line in samples(s, is_ill)).encode()


class Node(BaseHTTPRequestHandler):
    well, ill = b"", b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        number = int(self.path.partition("node=")[2] or 1)
        page = self.ill if number % ILL_EVERY == 0 else self.well
        self.wfile.write(page.replace(b" %d\n" % NOW, b" %d\n" % time.time()))

    def log_message(self, *arguments: object) -> None:
        """Not of interest."""


Group = tuple[float, list[tuple[float, str]]]
"""Seconds of one evaluation of a group, and of each of its rules with its name."""


def evaluations() -> dict[str, Group]:
    """The last one of each group."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api/v1/rules", timeout=30) as answer:
        groups = json.load(answer)["data"]["groups"]
    return {
        group["name"]: (group["evaluationTime"], [(rule["evaluationTime"], rule["name"]) for rule in group["rules"]])
        for group in groups
        if group["evaluationTime"]
    }


def measure(nodes: int) -> dict[str, Group]:
    """The fastest evaluation of each group."""
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
        process = subprocess.Popen(
            [*FIRST, "setpriv", "--pdeathsig", "KILL", *command.split()], stderr=subprocess.DEVNULL
        )
        try:
            time.sleep(60)  # discovery, a scrape of every node, two evaluations
            return fastest()
        finally:
            process.terminate()
            process.wait(30)
            server.shutdown()


def fastest() -> dict[str, Group]:
    seen: dict[str, Group] = {}
    for _ in range(LOOKS):
        time.sleep(15)
        for name, group in evaluations().items():
            seen[name] = min(group, seen.get(name, group))
    return seen


def main() -> int:
    Node.well, Node.ill = page(False), page(True)
    lines = Node.well.count(b"\n")
    print(f"a node: {SERVERS} servers of {RANKS} ranks, {lines} series, {len(Node.well) / 1e6:.2f} MB")
    for nodes in [int(word) for word in sys.argv[1:]] or NODES:
        print(f"{nodes} nodes of {SERVERS} servers, and in proportion {TARGET_NODES} nodes:", flush=True)
        for name, (seconds, rules) in measure(nodes).items():
            dearest = ", ".join(f"{rule} {took * 1000:.0f} ms" for took, rule in sorted(rules)[:-3:-1])
            print(f"  {name}: {seconds * 1000:.0f} ms, {seconds * TARGET_NODES / nodes:.2f} s ({dearest})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
