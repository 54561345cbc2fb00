"""What a fleet costs its Prometheus: many nodes, served from recordings by one process and scraped by a real one.

    .venv/bin/python -m bench.fleet [--nodes 60] [--for 180] [--interval 5] [RECORDING …]

Each node has a page of its own: a recording is replayed once, its pages are kept, and node N is a few pages further
on than node N - 1, so that some load while others serve.  Without RECORDING: an hour of a server of 8 ranks on 8 cards,
and on every fiftieth node one that loads and then stands still.  One address serves them all, told apart by a parameter
that relabelling makes of the target, as with any exporter for many devices.

Every scrape brings the next page, 15 s of recorded time, so figures are per sample and do not depend on --interval.
Printed is one JSON object: what was measured, and in proportion 1,000 and 10,000 nodes.  Needs Prometheus (Debian:
prometheus).
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench import replay as hour
from stallwatch.catalogue import derived_signals, read_signals
from stallwatch.config import COLLECTORS
from stallwatch.exposition import Exposition
from stallwatch.model import Reading, Report, SourceHealth
from stallwatch.recordings.format import Header, Look, Reader, known_names
from stallwatch.recordings.replay import Replay, lines_of
from stallwatch.rules import DEFAULT_FILES, one_file, rule_files

SCRAPE_SECONDS = 15
"""Between two pages, in recorded time; and the interval that the sums are for."""

ILL_EVERY = 50
PAGES_APART = 7
"""Between one node and the next."""

SIZES = (1_000, 10_000)
PORT = 21193
HOURS_IN_MEMORY = 3
"""The head holds up to two hours and a half before it is written out."""

SETUP = """\
global: {{scrape_interval: {interval}s, scrape_timeout: {interval}s, evaluation_interval: 15s}}
rule_files: [{rules}]
remote_write: [{{url: 'http://127.0.0.1:{port}/write', queue_config: {{capacity: 20000, max_samples_per_send: 5000}}}}]
scrape_configs:
- job_name: stallwatch
  static_configs: [{{targets: [{targets}]}}]
  relabel_configs:
  - {{source_labels: [__address__], target_label: instance}}
  - {{source_labels: [__address__], regex: 'node(.+):.*', target_label: __param_node}}
  - {{target_label: __address__, replacement: '127.0.0.1:{port}'}}
"""


# --- pages ---------------------------------------------------------------------------------------------------


def built_in(stalls: bool) -> Iterator[dict[str, Any]]:
    """The lines of a recording: it loads for ten minutes; then it serves, or (`stalls`) stands still."""
    chance = random.Random(1)  # figures that jitter as real ones do
    skipped = 0 if stalls else hour.STUCK_SECONDS - hour.LOAD_SECONDS
    lines = hour.lines()
    yield {**next(lines), "nvidia": True}
    for t in range(0, hour.SECONDS, hour.INTERVAL):
        then = t if t < hour.LOAD_SECONDS else t + skipped
        is_still = hour.LOAD_SECONDS <= then < hour.STUCK_SECONDS
        looks = hour.readings(hour.LOAD_SECONDS if is_still else then)
        yield {"t": t, "readings": [*looks, *cards(t, then < hour.STUCK_SECONDS, chance)]}
        if then == 0:
            yield {"t": t + 1, "server": hour.SERVER, "event": "load_begin"}
        if then == hour.STUCK_SECONDS:
            yield {"t": t + 1, "server": hour.SERVER, "event": "ready"}


def cards(t: int, is_idle: bool, chance: random.Random) -> Iterator[list[Any]]:
    """One card for each rank."""
    for number, rank in enumerate(hour.RANKS):
        card = {"gpu": f"GPU-{number:08x}-1111-2222-3333-444444444444"}
        used = min(t, hour.LOAD_SECONDS) * 128.0 * hour.MIB
        watts = 120 + (0 if is_idle else 400) + chance.random() * 30
        yield ["rank_info", {"server": hour.SERVER, "rank": rank, "pid": str(4000 + number), **card}, 1]
        yield ["gpu_memory_used_bytes", card, used]
        yield ["gpu_memory_total_bytes", card, 8e10]
        yield ["gpu_utilization_ratio", card, 0.0 if is_idle else round(0.9 + chance.random() / 10, 2)]
        yield ["gpu_memory_utilization_ratio", card, round(chance.random() / 2, 2)]
        yield ["gpu_power_watts", card, round(watts, 1)]
        yield ["gpu_energy_joules_total", card, round(t * 300.0 + watts, 3)]
        yield ["gpu_power_limit_watts", card, 700]
        yield ["gpu_sm_clock_hertz", card, 1.98e9 - int(chance.random() * 10) * 1.5e7]
        yield ["gpu_temperature_celsius", card, 50 + int(chance.random() * 5)]
        yield ["gpu_pcie_receive_bytes_per_second", card, 0 if is_idle else int(chance.random() * 1e8)]
        yield ["gpu_pcie_transmit_bytes_per_second", card, 0 if is_idle else int(chance.random() * 1e8)]
        yield ["gpu_process_memory_bytes", {"server": hour.SERVER, "rank": rank, **card}, used]


def pages(file: Path) -> list[bytes]:
    """The page of every scrape of a recording, compressed."""
    records = iter(Reader(str(file), known_names(read_signals(), derived_signals())).read(lines_of(str(file))))
    header = next(records)
    assert isinstance(header, Header)
    run, exposition = Replay(header, frozenset(s.server.name for s in header.servers), None, None), Exposition()
    latest: dict[tuple[str, tuple[str, ...]], Reading] = {}
    found, due = [], float(SCRAPE_SECONDS)
    for record in records:
        run.take(record)
        if not isinstance(record, Look):
            continue
        latest |= {(reading.signal.name, reading.labels): reading for reading in record.readings}
        if record.t >= due:
            due += SCRAPE_SECONDS
            page = exposition.page(report(run, latest.values(), header.begun + record.t))
            found.append(gzip.compress(page.text(openmetrics=False), 1))
    return found


def report(run: Replay, readings: Iterable[Reading], at: float) -> Report:
    return Report(
        timestamp=at,
        monotonic=at,
        readings=tuple(reading for reading in readings if reading.value is not None),
        servers=run.reports,
        health=tuple(SourceHealth(name, True, 0.01, at, at) for name in COLLECTORS),
        read_errors={},
        startups=run.startups(),
    )


# --- nodes, and who is written to ------------------------------------------------------------------------------


class Nodes(BaseHTTPRequestHandler):
    """Every node's page by `?node=`; and the other end of remote write, which keeps nothing."""

    well: Sequence[bytes] = ()
    ill: Sequence[bytes] = ()
    begun = 0.0
    interval = 0.0

    def do_GET(self) -> None:
        node = int(self.path.partition("node=")[2] or 1)
        kept = self.ill if node % ILL_EVERY == 0 else self.well
        turn = int((time.monotonic() - self.begun) / self.interval)
        self.answer(200, kept[(node * PAGES_APART + turn) % len(kept)])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(204, b"")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        if body:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Not of interest."""


# --- the engine ------------------------------------------------------------------------------------------------


Figures = Mapping[str, float]
"""Sums over all series of a metric of Prometheus' own, by its name; `wal_bytes` beside them."""

_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{.*\})? (?P<value>\S+)$", re.MULTILINE)
_GROUP = re.compile(
    r'^prometheus_rule_group_last_duration_seconds\{rule_group="[^;]*;(?P<name>[^"]+)"\} (?P<value>\S+)$', re.M
)


def own_page() -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def figures(data: Path) -> dict[str, float]:
    found: dict[str, float] = {"at": time.monotonic(), "wal_bytes": size_of(data / "wal")}
    for sample in _SAMPLE.finditer(own_page()):
        found[sample["name"]] = found.get(sample["name"], 0.0) + float(sample["value"])
    return found


def rule_seconds(seen: Mapping[str, float]) -> dict[str, float]:
    """The fastest evaluation of each group so far: the others measured the neighbours on this machine."""
    now = {group["name"]: float(group["value"]) for group in _GROUP.finditer(own_page())}
    return {name: min(value or 1e9, seen.get(name, 1e9)) for name, value in now.items()}


def chunk_bytes(data: Path) -> int:
    """What all samples so far take on disk, without index: a snapshot of what is in memory."""
    url = f"http://127.0.0.1:{PORT}/api/v1/admin/tsdb/snapshot"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=120) as answer:
        name = json.load(answer)["data"]["name"]
    return sum(size_of(chunks) for chunks in (data / "snapshots" / name).glob("*/chunks"))


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one run."""

    nodes: int
    series: float
    bytes_in_memory_per_series: float
    wal_bytes_per_sample: float
    remote_bytes_per_sample: float
    chunk_bytes_per_sample: float
    cpu_seconds_per_million_samples: float
    rule_milliseconds: Mapping[str, float]


def measure(folder: Path, nodes: int, seconds: float, interval: float) -> Measured:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Nodes)
    Nodes.begun, Nodes.interval = time.monotonic(), interval
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (folder / "rules.yml").write_text(one_file(rule_files(DEFAULT_FILES)))
    targets = ",".join(f"'node{n}:10077'" for n in range(1, nodes + 1))
    setup = SETUP.format(interval=f"{interval:g}", rules=folder / "rules.yml", port=server.server_port, targets=targets)
    (folder / "prometheus.yml").write_text(setup)
    data = folder / "data"
    command = f"prometheus --config.file={folder}/prometheus.yml --storage.tsdb.path={data} --log.level=error"
    command += f" --web.enable-admin-api --web.listen-address=127.0.0.1:{PORT}"
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command.split()])
    try:
        time.sleep(30 + interval)  # discovery, and every series once
        first, rules = figures(data), rule_seconds({})
        while time.monotonic() < first["at"] + seconds:
            time.sleep(5)
            rules = rule_seconds(rules)
        return summary(nodes, first, figures(data), rules, chunk_bytes(data))
    finally:
        process.terminate()
        process.wait(60)
        server.shutdown()


def summary(nodes: int, first: Figures, last: Figures, rules: Mapping[str, float], chunks: int) -> Measured:
    def grown(name: str) -> float:
        return last[name] - first[name]

    samples = grown("prometheus_tsdb_head_samples_appended_total")
    return Measured(
        nodes=nodes,
        series=last["prometheus_tsdb_head_series"],
        bytes_in_memory_per_series=last["process_resident_memory_bytes"] / last["prometheus_tsdb_head_series"],
        wal_bytes_per_sample=grown("wal_bytes") / samples,
        remote_bytes_per_sample=grown("prometheus_remote_storage_bytes_total")
        / grown("prometheus_remote_storage_samples_total"),
        chunk_bytes_per_sample=chunks / last["prometheus_tsdb_head_samples_appended_total"],
        cpu_seconds_per_million_samples=grown("process_cpu_seconds_total") / samples * 1e6,
        rule_milliseconds={name: took * 1000 for name, took in sorted(rules.items())},
    )


# --- sums --------------------------------------------------------------------------------------------------------


def in_proportion(measured: Measured, nodes: int) -> dict[str, float]:
    """A fleet of so many nodes, scraped every SCRAPE_SECONDS: a proportion, and no measurement."""
    series = measured.series / measured.nodes * nodes
    rate = series / SCRAPE_SECONDS
    return {
        "nodes": nodes,
        "series": round(series),
        "samples_per_second": round(rate),
        "memory_gib": round(series * measured.bytes_in_memory_per_series / 2**30, 1),
        "wal_gib": round(rate * measured.wal_bytes_per_sample * 3600 * HOURS_IN_MEMORY / 2**30, 1),
        "disk_gib_per_day": round(rate * measured.chunk_bytes_per_sample * 86400 / 2**30, 1),
        "remote_write_mbit_per_second": round(rate * measured.remote_bytes_per_sample * 8 / 1e6, 1),
        "cores": round(rate * measured.cpu_seconds_per_million_samples / 1e6, 2),
        "rule_seconds": round(sum(measured.rule_milliseconds.values()) / 1000 / measured.nodes * nodes, 2),
    }


def rounded(measured: Measured) -> dict[str, Any]:
    plain = {name: getattr(measured, name) for name in Measured.__slots__}
    return {
        name: {key: round(each, 1) for key, each in value.items()} if isinstance(value, dict) else round(value, 2)
        for name, value in plain.items()
    }


def prepared(recordings: Sequence[str], folder: Path) -> tuple[list[bytes], list[bytes]]:
    """The pages of nodes that are well and of those that are ill."""
    if recordings:
        kept = [page for name in recordings for page in pages(Path(name))]
        return kept, kept
    for stalls in (False, True):
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in built_in(stalls))
        (folder / f"{stalls}.jsonl").write_text(text)
    return pages(folder / "False.jsonl"), pages(folder / "True.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", metavar="RECORDING")
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--for", dest="seconds", type=float, default=180.0, metavar="SECONDS")
    parser.add_argument("--interval", type=float, default=5.0, metavar="SECONDS", help="between two scrapes of a node")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Nodes.well, Nodes.ill = prepared(options.recordings, folder)
        measured = measure(folder, options.nodes, options.seconds, options.interval)
    sums = [in_proportion(measured, nodes) for nodes in SIZES]
    print(json.dumps({"measured": rounded(measured), "in_proportion": sums}, indent=1))


if __name__ == "__main__":
    main()
