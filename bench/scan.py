"""What a full cycle costs, as a ratio to a process-exporter scrape on the same load, in one run.

    python -m bench.scan [--processes 2000] [--rounds 20]

Load, made here and ended here: a stand-in server of 8 ranks with about 200 threads each (really in futex, with
100 Hz pollers, so that no CPU clock stands still) and 2,000 sleeping processes.  Ours: every collector read
once, the tick, and the page rendered.  Theirs: prometheus-process-exporter, one scrape with threads.  Floor: the
same threads read once by a C loop of nothing but pread, against which the collector `threads` is held.
Rounds alternate; CPU seconds; medians, and the middle half of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from bench.alone import be_alone
from bench.floor import Floor
from stallwatch.assembly import Settings, make_daemon
from stallwatch.exposition import Exposition
from stallwatch.model import Report

EXPORTER = "prometheus-process-exporter"
PORT_OF_SERVER = 31777


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start_server(stack: ExitStack, *more: str) -> None:
    """The stand-in; it ends itself when its launcher's standard input closes.  `more`: further arguments of it."""
    command = [sys.executable, "-m", "stallwatch.drill.standin", "barrier-deadlock", "--port", str(PORT_OF_SERVER)]
    launcher = subprocess.Popen([*command, "--for", "8m", *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(launcher.wait, 20)
    stack.callback(launcher.terminate)


def start_sleepers(number: int, stack: ExitStack) -> None:
    for _ in range(number):
        sleeper = subprocess.Popen(["sleep", "900"])
        stack.callback(sleeper.wait, 10)
        stack.callback(sleeper.kill)


def start_peer(folder: Path, stack: ExitStack) -> tuple[subprocess.Popen[bytes], str] | None:
    names = "process_names:\n- name: '{{.Comm}}'\n  comm: [sglang::schedul, sglang::detoken, python, python3]\n"
    folder.joinpath("names.yml").write_text(names)
    address = f"127.0.0.1:{free_port()}"
    command = [EXPORTER, "-config.path", str(folder / "names.yml"), "-web.listen-address", address]
    try:
        peer = subprocess.Popen([*command, "-gather-smaps=false"], stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        return None
    stack.callback(peer.wait, 10)
    stack.callback(peer.kill)
    return peer, f"http://{address}/metrics"


def cpu_of(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)


def own_cpu() -> float:
    """Ours and that of the helper that reads command lines, in seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--settle", type=float, default=40.0, help="seconds until no process counts as young")
    arguments = parser.parse_args()
    be_alone()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start_server(stack)
        start_sleepers(arguments.processes, stack)
        peer = start_peer(folder, stack)
        print(json.dumps(Measurement(peer, folder, stack).run(arguments.rounds, arguments.settle), indent=1))


class Measurement:
    """One daemon, read by hand; a peer that is scraped between its cycles, and the floor."""

    def __init__(self, peer: tuple[subprocess.Popen[bytes], str] | None, folder: Path, stack: ExitStack) -> None:
        self._peer, self._folder, self._stack = peer, folder, stack
        self._reports: list[Report] = []
        self._daemon = make_daemon(Settings(), self._reports.append)
        stack.callback(self._daemon.close)
        self._exposition = Exposition()
        self._floor: Floor | None = None
        self._spent: dict[str, list[float]] = {poller.source.name: [] for poller in self._daemon.pollers}
        self._spent |= {"ours": [], "peer": [], "floor": []}

    def run(self, rounds: int, settle: float) -> dict[str, object]:
        until = time.monotonic() + settle
        while time.monotonic() < until:
            self._cycle()
            time.sleep(1.0)
        if shutil.which("cc"):
            servers = self._daemon.scene.servers
            self._floor = Floor(self._folder, {process.id.pid for server in servers for process in server.processes})
            self._stack.callback(self._floor.close)
        for values in self._spent.values():
            values.clear()
        for _ in range(rounds):
            self._cycle()
            self._ask_others()
            time.sleep(0.5)
        return self._result()

    def _cycle(self) -> None:
        began = own_cpu()
        for poller in self._daemon.pollers:
            self._spent[poller.source.name].append(poller.turn().cpu_seconds)
        self._exposition.page(self._daemon.tick(), ()).text(openmetrics=True)
        self._spent["ours"].append(own_cpu() - began)

    def _ask_others(self) -> None:
        if self._floor is not None:
            self._spent["floor"].append(self._floor.look()[1])
        if self._peer is not None:
            began = cpu_of(self._peer[0].pid)
            with urllib.request.urlopen(self._peer[1], timeout=60) as answer:
                answer.read()
            self._spent["peer"].append(cpu_of(self._peer[0].pid) - began)

    def _result(self) -> dict[str, object]:
        readings = self._reports[-1].readings
        middle = {name: round(1000 * statistics.median(values), 2) for name, values in self._spent.items() if values}
        result: dict[str, object] = {
            "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
            "threads_of_servers": int(sum(r.value or 0 for r in readings if r.signal.name == "threads")),
            "ours_ms": middle.pop("ours"),
        }
        if "peer" in middle:
            result["process_exporter_ms"] = middle.pop("peer")
            result["process_exporter_to_ours"] = ratios(self._spent["peer"], self._spent["ours"])
        if "floor" in middle:
            result["floor_ms"] = middle.pop("floor")
            result["threads_to_floor"] = ratios(self._spent["threads"], self._spent["floor"])
        return result | {"parts_ms": middle}


def ratios(one: list[float], other: list[float]) -> dict[str, float]:
    """The ratio round by round: its median, and the quarters of the rounds that are below and above."""
    found = statistics.quantiles([a / b for a, b in zip(one, other, strict=True)], n=4)
    return {name: round(value, 2) for name, value in zip(("quarter", "median", "three_quarters"), found, strict=True)}


if __name__ == "__main__":
    main()
