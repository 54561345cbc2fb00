"""Minutes of 10 scrapes a second: `PYTHONPATH=tests python -m soak.scrapes [--for 10m]`; exit status 1 = it grew.

A real `serve` with every collector, and a stand-in server that serves beside it, in a PID namespace of their own where
root may make one.  Scraped as Prometheus does, over one connection, by turns as text and as OpenMetrics.  Every answer
is a 200; series, resident memory, descriptors and threads are flat over the second half.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from bench.alone import be_alone
from bench.scan import free_port
from soak.trend import trend_of
from stallwatch.strict_yaml import parse_duration

PER_SECOND = 10
SAMPLE_SECONDS = 2.0
SETTLE_SECONDS = 60.0
READY_SECONDS = 240.0
"""The stand-in loads for 4 s; on a busy machine its processes take a while to start."""
ACCEPT = ("text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0")
LOST_IN_NOISE = {"resident_kib": 512.0, "descriptors": 2.0, "threads": 0.5, "series": 0.0}
SLOWEST_SECONDS = 20.0
"""No answer may take longer, on however busy a machine; what it takes on a quiet one is in docs/COST.md."""


def start(stack: ExitStack, folder: str) -> tuple[psutil.Process, http.client.HTTPConnection]:
    address, server_port = ("127.0.0.1", free_port()), free_port()
    serving = [sys.executable, "-m", "stallwatch.drill.standin", "serving", "--port", str(server_port), "--for", "2h"]
    serve = [sys.executable, "-m", "stallwatch", "serve", "--state.dir", f"{folder}/state"]
    for command in (serving, [*serve, "--web.listen-address", f"{address[0]}:{address[1]}"]):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
    client = http.client.HTTPConnection(*address, timeout=30)
    stack.callback(client.close)
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        time.sleep(1.0)
        try:
            status, page = scrape(client, 0)
        except (OSError, http.client.HTTPException):
            client.close()
            continue
        if status == 200 and b'stallwatch_server_ready{server="vllm-' in page and b"} 1\n" in page:
            return psutil.Process(process.pid), client
    raise SystemExit("the stand-in was not found")


def scrape(client: http.client.HTTPConnection, number: int) -> tuple[int, bytes]:
    client.request("GET", "/metrics", headers={"Accept": ACCEPT[number % 2]})
    answer = client.getresponse()
    return answer.status, answer.read()


def watch(process: psutil.Process, client: http.client.HTTPConnection, seconds: float) -> dict[str, Any]:
    took, samples, refused = list[float](), list[dict[str, float]](), 0
    began, cpu, number = time.monotonic(), sum(process.cpu_times()[:2]), 0
    while (now := time.monotonic()) - began < seconds:
        status, page = scrape(client, number)
        took.append(time.monotonic() - now)
        refused += status != 200
        if number % int(SAMPLE_SECONDS * PER_SECOND) == 0:
            samples.append(sample(process, page))
        number += 1
        time.sleep(max(0.0, began + number / PER_SECOND - time.monotonic()))
    took.sort()
    return {
        "scrapes": number,
        "refused": refused,
        "p50_milliseconds": round(1000 * took[number // 2], 2),
        "p99_milliseconds": round(1000 * took[number * 99 // 100], 2),
        "longest_milliseconds": round(1000 * took[-1], 2),
        "percent_of_a_core": round(100 * (sum(process.cpu_times()[:2]) - cpu) / seconds, 2),
        "samples": samples,
    }


def sample(process: psutil.Process, page: bytes) -> dict[str, float]:
    with process.oneshot():
        return {
            "resident_kib": process.memory_info().rss / 1024,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "series": sum(not line.startswith(b"#") for line in page.splitlines()),
        }


def grown(samples: list[dict[str, float]]) -> dict[str, str]:
    """What grew in the second half, and how."""
    half, found = samples[len(samples) // 2 :], {}
    for measure in half[0]:
        trend = trend_of([one[measure] for one in half])
        if not trend.is_flat and trend.growth > LOST_IN_NOISE[measure]:
            found[measure] = str(trend)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="seconds", type=parse_duration, default=600.0, metavar="DURATION")
    parser.add_argument("--out", type=Path, help="where the samples go, as JSON")
    arguments = parser.parse_args()
    be_alone()
    with ExitStack() as stack:
        process, client = start(stack, stack.enter_context(tempfile.TemporaryDirectory()))
        time.sleep(SETTLE_SECONDS)
        found = watch(process, client, arguments.seconds)
        processes = [process.pid, *(child.pid for child in process.children(recursive=True))]
        found["pss_mib"] = round(sum(psutil.Process(pid).memory_full_info().pss for pid in processes) / (1 << 20), 1)
    if arguments.out:
        arguments.out.write_text(json.dumps(found) + "\n")
    problems = grown(found.pop("samples"))
    print(json.dumps({**found, "grown": problems}, indent=1))
    if problems or found["refused"] or found["longest_milliseconds"] > 1000 * SLOWEST_SECONDS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
