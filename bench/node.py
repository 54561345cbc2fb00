"""What everything costs on a busy node: `python -m bench.node [--seconds 120] [--mtail]` prints one JSON object.

Load, made here and ended here: 8 stand-in cards that a serving stand-in of 8 ranks holds (about 1,770 threads, real
requests), 2,000 sleeping processes, and 8 more servers, configured, with 8 logs each that grow by 1 MB/s in all.
Ours: `stallwatch serve` with the intervals it is shipped with and every collector, helpers included, scraped every
15 s.  Beside it, for as long and scraped as often: the peers from apt that watch parts of the same.
CPU is the share of one core over the measured time, by the kernel's own count; memory is PSS after it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.alone import be_alone
from bench.logs import mtail_program, write_log
from bench.memory import MIB, pss
from bench.scan import free_port, start_peer, start_sleepers
from stallwatch.drill.nvml_standin import StandIn, build
from stallwatch.frameworks import load_frameworks

SERVERS, LOGS, CARDS, PROCESSES = 8, 8, 8, 2000
BYTES_PER_SECOND, WRITES_PER_SECOND = 1_000_000, 4
SETTLE_SECONDS, SCRAPE_SECONDS = 60.0, 15.0
EXPORTERS = {"node-exporter": "prometheus-node-exporter"}


@dataclass(frozen=True, slots=True)
class Watched:
    """A program whose cost is taken; `url` is what is scraped of it."""

    name: str
    process: subprocess.Popen[str] | subprocess.Popen[bytes]
    url: str

    def cpu_seconds(self) -> float:
        """Of the process and of all below it, those that ended included."""
        return sum(map(_cpu_seconds, (self.process.pid, *_children(self.process.pid))))


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return time.clock_gettime((~pid << 3) | 2) + times.children_user + times.children_system


def write_logs(paths: list[Path], text: Path) -> None:
    """In a process of its own, which is not measured: every log grows a little several times a second."""
    share = BYTES_PER_SECOND // WRITES_PER_SECOND // len(paths)
    with text.open("rb") as whole:
        due = time.monotonic()
        while True:
            for path in paths:
                lines = whole.read(share) + whole.readline()
                if not lines:
                    whole.seek(0)
                with path.open("ab") as file:
                    file.write(lines)
            due += 1 / WRITES_PER_SECOND
            time.sleep(max(0.0, due - time.monotonic()))


def configure(folder: Path, stack: ExitStack) -> tuple[Path, list[Path]]:
    """Servers that are a sleeping process and 8 logs each: the configuration file, and the logs."""
    lines, logs = ["servers:"], list[Path]()
    for number in range(SERVERS):
        sleeper = subprocess.Popen(["sleep", "3600"])
        stack.callback(sleeper.wait, 10)
        stack.callback(sleeper.kill)
        (folder / f"{number}.pid").write_text(str(sleeper.pid))
        own = [folder / f"{number}-{log}.log" for log in range(LOGS)]
        for path in own:
            path.write_text("[2026-06-02 00:00:00] The server is fired up and ready to roll!\n")
        logs += own
        lines.append(f"- name: logs-{number}\n  framework: sglang\n  match: {{pid_file: {folder}/{number}.pid}}")
        lines.append(f"  logs: [{', '.join(map(str, own))}]")
    config = folder / "config.yml"
    config.write_text("\n".join(lines) + "\n")
    return config, logs


def start_load(folder: Path, stack: ExitStack) -> tuple[Path, list[Path], StandIn]:
    cards = StandIn(folder, build(folder), count=CARDS)
    command = [sys.executable, "-m", "stallwatch.drill.standin", "serving", "--port", str(free_port())]
    more = ["--for", "30m", "--cards", str(folder)]
    server = subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(server.wait, 20)
    stack.callback(server.terminate)
    start_sleepers(PROCESSES, stack)
    config, logs = configure(folder, stack)
    write_log(folder / "text", 50_000_000)
    writer = multiprocessing.Process(target=write_logs, args=(logs, folder / "text"), daemon=True)
    writer.start()
    stack.callback(writer.kill)
    return config, logs, cards


def start_ours(config: Path, cards: StandIn, stack: ExitStack) -> Watched:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "bench.named_threads", "serve", "--config.file", str(config)]
    process = subprocess.Popen(
        [*command, "--web.listen-address", address, "--state.dir", str(config.parent / "state")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **cards.environment()},
    )
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    return Watched("stallwatch", process, f"http://{address}/metrics")


def start_peers(folder: Path, logs: list[Path], with_mtail: bool, stack: ExitStack) -> list[Watched]:
    peers = []
    if (found := start_peer(folder, stack)) is not None:
        peers.append(Watched("process-exporter -threads", *found))
    address = f"127.0.0.1:{free_port()}"
    commands = {
        "node-exporter": ["prometheus-node-exporter", f"--web.listen-address={address}"],
    }
    if with_mtail:
        port = free_port()
        (folder / "sglang.mtail").write_text(mtail_program(next(f for f in load_frameworks() if f.name == "sglang")))
        program = ["mtail", "--progs", str(folder / "sglang.mtail"), "--address", "127.0.0.1", "--port", str(port)]
        commands["mtail"] = [*program, "--logs", f"{folder}/*.log"]
    for name, command in commands.items():
        if shutil.which(command[0]) is None:
            continue
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait, 10)
        stack.callback(process.kill)
        peers.append(Watched(name, process, f"http://{address if name != 'mtail' else f'127.0.0.1:{port}'}/metrics"))
    return peers


def by_thread(ours: Watched) -> dict[str, float]:
    """CPU seconds so far of each of our threads, by its name."""
    process = ours.process
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("names\n")  # type: ignore[call-overload]
    process.stdin.flush()
    line = ""
    while not line.startswith("threads "):
        line = str(process.stdout.readline())
    names: Mapping[str, str] = json.loads(line.removeprefix("threads "))
    spent: dict[str, float] = {}
    for thread, name in names.items():
        nanoseconds = Path(f"/proc/{process.pid}/task/{thread}/schedstat").read_text().split()[0]
        spent[name] = spent.get(name, 0.0) + int(nanoseconds) / 1e9
    return spent


def measure(ours: Watched, peers: list[Watched], seconds: float) -> dict[str, object]:
    everyone = [ours, *peers]
    began = time.monotonic()
    before, threads = {one.name: one.cpu_seconds() for one in everyone}, by_thread(ours)
    parts = list[float]()  # our CPU between two scrapes, as a share of a core
    page, last = b"", (began, before[ours.name])
    while time.monotonic() - began < seconds:
        time.sleep(SCRAPE_SECONDS)
        pages = [urllib.request.urlopen(one.url, timeout=30).read() for one in everyone]
        page = pages[0]
        now = time.monotonic(), ours.cpu_seconds()
        parts.append((now[1] - last[1]) / (now[0] - last[0]))
        last = now
    took = time.monotonic() - began
    after = by_thread(ours)
    helpers = sum(map(_cpu_seconds, _children(ours.process.pid)))
    return {
        "seconds": round(took),
        "percent_of_a_core": {
            one.name: round(100 * (one.cpu_seconds() - before[one.name]) / took, 3) for one in everyone
        },
        "ours_between_scrapes": [round(100 * part, 3) for part in (min(parts), statistics.median(parts), max(parts))],
        "by_thread": {
            name: round(100 * (spent - threads.get(name, 0.0)) / took, 3)
            for name, spent in sorted(after.items(), key=lambda item: -item[1])
        },
        "helpers_cpu_seconds_so_far": round(helpers, 3),
        "pss_mib": {one.name: round(pss(one.process.pid), 1) for one in everyone},
        "of_it_helpers_mib": round(sum(map(_own_pss, _children(ours.process.pid))), 1),
        "helpers": len(_children(ours.process.pid)),
        "samples": sum(not line.startswith(b"#") for line in page.splitlines()),
        "logs": page.count(b"\nstallwatch_log_bytes_total{"),
        "gpu_samples": page.count(b"\nstallwatch_gpu_"),
    }


def _own_pss(pid: int) -> float:
    return float(psutil.Process(pid).memory_full_info().pss) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS)
    parser.add_argument("--mtail", action="store_true", help="follow the logs with mtail too; it takes a core")
    parser.add_argument("--alone", action="store_true", help="without the others")
    arguments = parser.parse_args()
    be_alone()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config, logs, cards = start_load(folder, stack)
        ours = start_ours(config, cards, stack)
        peers = [] if arguments.alone else start_peers(folder, logs, arguments.mtail, stack)
        time.sleep(arguments.settle)
        print(json.dumps(measure(ours, peers, arguments.seconds), indent=1))


if __name__ == "__main__":
    main()
