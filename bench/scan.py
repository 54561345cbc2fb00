"""What a full cycle costs, as a ratio to a process-exporter scrape on the same load, in one run.

    python -m bench.scan [--processes 2000] [--rounds 20]

Load, made here and ended here: a stand-in server of 8 ranks with about 200 threads each (really in futex, with
100 Hz pollers, so that no CPU clock stands still) and 2,000 sleeping processes.  Ours: every collector read
once, the tick, and the page rendered.  Theirs: prometheus-process-exporter, one scrape with threads.
Rounds alternate; CPU seconds; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

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
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start_server(stack)
        start_sleepers(arguments.processes, stack)
        peer = start_peer(folder, stack)
        print(json.dumps(measure(peer, arguments.rounds, arguments.settle), indent=1))


def measure(peer: tuple[subprocess.Popen[bytes], str] | None, rounds: int, settle: float) -> dict[str, object]:
    reports: list[Report] = []
    daemon = make_daemon(Settings(), reports.append)
    exposition = Exposition()
    parts: dict[str, list[float]] = {poller.source.name: [] for poller in daemon.pollers}
    ours: list[float] = []
    theirs: list[float] = []
    until = time.monotonic() + settle
    while time.monotonic() < until:
        for poller in daemon.pollers:
            poller.turn()
        daemon.tick()
        time.sleep(1.0)
    for number in range(rounds + 3):
        began = own_cpu()
        for poller in daemon.pollers:
            parts[poller.source.name].append(1000 * poller.turn().cpu_seconds)
        exposition.page(daemon.tick(), ()).text(openmetrics=True)
        if number >= 3:  # the first ones open files and read command lines
            ours.append(1000 * (own_cpu() - began))
        if peer is not None:
            began = cpu_of(peer[0].pid)
            with urllib.request.urlopen(peer[1], timeout=60) as answer:
                answer.read()
            if number >= 3:
                theirs.append(1000 * (cpu_of(peer[0].pid) - began))
        time.sleep(0.5)
    daemon.close()
    threads = sum(r.value or 0 for r in reports[-1].readings if r.signal.name == "threads")
    result: dict[str, object] = {
        "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
        "threads_of_servers": int(threads),
        "ours_ms": round(statistics.median(ours), 2),
        "parts_ms": {name: round(statistics.median(values[3:]), 2) for name, values in parts.items()},
    }
    if theirs:
        result["process_exporter_ms"] = round(statistics.median(theirs), 2)
        result["ratio"] = f"1/{statistics.median(theirs) / statistics.median(ours):.1f}"
    return result


if __name__ == "__main__":
    main()
