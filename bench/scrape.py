"""What a scrape costs: `python bench/scrape.py [--tls]` prints one JSON object.

The server runs in a process of its own with a Report of 3,000 samples, published anew at every tick of 5 s: of
50 scrapes one renders and compresses, and those are the slow ones.  This process scrapes 100 times at 10/s, as
Prometheus does (OpenMetrics, gzip, one connection): alone, then with 50 clients that have sent half a request
(50 new ones every second, for the server closes them in time).  p99 of 100 is the second longest.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from stallwatch import signals
from stallwatch.config import COLLECTORS
from stallwatch.exposition import Exposition
from stallwatch.model import (
    CHANNELS,
    WAITS,
    ChannelState,
    ProcessId,
    RankState,
    Reading,
    Report,
    Server,
    ServerReport,
    SourceHealth,
    Verdict,
)
from stallwatch.web import Access, Published, serve_http
from stallwatch.web.published import Body

SERVERS, RANKS = 8, 8
TICK_SECONDS = 5.0
SCRAPES, PER_SECOND, SLOW_CLIENTS = 100, 10, 50
HEADERS = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}


def readings() -> Iterator[Reading]:
    """Values that change with every report, for 64 ranks."""
    now = time.monotonic()
    per_rank = (
        signals.CPU_SECONDS,
        signals.STORAGE_READ,
        signals.READ_BYTES,
        signals.WRITTEN_BYTES,
        signals.RESIDENT_MEMORY,
        signals.RANK_ALIVE,
    )
    for server in range(SERVERS):
        for number in range(RANKS):
            labels = (f"sglang-{8000 + server}", f"TP{number}")
            yield from (signal.read(now * 1e6, *labels) for signal in per_rank)
            yield from (signals.THREADS.read(200 + now % 7, *labels, wait) for wait in WAITS)
            yield from (signals.PAGE_FAULTS.read(now * 1e3, *labels, kind) for kind in ("major", "minor"))
            yield from (Reading(signals.LOG_BYTES, (labels[0], f"log-{number}-{part}"), now) for part in range(22))


def server_report(number: int) -> ServerReport:
    name = f"sglang-{8000 + number}"
    return ServerReport(
        server=Server(name, "sglang", "server", ProcessId(number, 1), 0.0, (), model="org/model"),
        verdict=Verdict("stalled", "idle_wait", 0.0, "TP3"),
        since_timestamp=time.time(),
        phase="loading_weights",
        phase_start_timestamp=time.time(),
        phase_budget_seconds=1800.0,
        ready=False,
        ranks_alive=RANKS,
        channels=tuple(ChannelState(channel, "flat", 300.0) for channel in CHANNELS),
        ranks=tuple(RankState(f"TP{rank}", rank, None, "post_load", 1.0, True, 300.0) for rank in range(RANKS)),
        starts=1,
        stalled_seconds=60.0,
    )


def report() -> Report:
    return Report(
        timestamp=time.time(),
        monotonic=time.monotonic(),
        readings=tuple(readings()),
        servers=tuple(server_report(number) for number in range(SERVERS)),
        health=tuple(SourceHealth(name, True, 0.1, 0.0, 0.0) for name in COLLECTORS),
        read_errors={},
    )


def page_cost() -> dict[str, float]:
    """Samples of the page, and the median CPU time of making and of compressing it."""
    exposition, making, compressing = Exposition(), [], []
    for _ in range(30):
        one = report()
        begin = time.thread_time()
        body = Body("", exposition.page(one).text(openmetrics=True))
        made = time.thread_time()
        assert body.gzipped
        making.append(made - begin)
        compressing.append(time.thread_time() - made)
    return {
        "samples": sum(not line.startswith(b"#") for line in body.plain.splitlines()),
        "render_milliseconds": round(statistics.median(making) * 1e3, 2),
        "gzip_milliseconds": round(statistics.median(compressing) * 1e3, 2),
    }


def serve(folder: str | None) -> None:
    """The server's process: says its address, publishes every tick until its standard input ends."""
    tls = None
    if folder:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(Path(folder, "certificate.pem"), Path(folder, "key.pem"))
    published = Published(TICK_SECONDS, time.monotonic)
    one = report()
    published.publish(one)
    server = serve_http(published, ["127.0.0.1:0"], access=lambda: Access(tls))
    print(server.addresses[0], flush=True)
    while not select.select([sys.stdin], [], [], TICK_SECONDS)[0]:
        published.publish(replace(one, timestamp=time.time(), monotonic=time.monotonic()))
    server.stop()


def memory_kilobytes(pid: int) -> dict[str, int]:
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    threads = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_kilobytes": int(fields["Rss"].split()[0]),
        "pss_kilobytes": int(fields["Pss"].split()[0]),
        "threads": int(threads["Threads"]),
    }


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def scrape_many(
    address: str, pid: int, tls: ssl.SSLContext | None, every_second: Callable[[], None]
) -> dict[str, float]:
    host, _, port = address.rpartition(":")
    client = http.client.HTTPConnection(host, int(port), timeout=10)
    if tls:
        client = http.client.HTTPSConnection("localhost", int(port), timeout=10, context=tls)
    times, cpu, begin = [], cpu_seconds(pid), time.perf_counter()
    for number in range(SCRAPES):
        if number % PER_SECOND == 0:
            every_second()
        time.sleep(max(0.0, begin + number / PER_SECOND - time.perf_counter()))
        asked = time.perf_counter()
        client.request("GET", "/metrics", headers=HEADERS)
        response = client.getresponse()
        body = response.read()
        times.append(time.perf_counter() - asked)
        assert response.status == 200, response.status
    client.close()
    times.sort()
    return {
        "p50_milliseconds": round(times[SCRAPES // 2] * 1e3, 2),
        "p99_milliseconds": round(times[SCRAPES - 2] * 1e3, 2),
        "cpu_milliseconds_per_scrape": round((cpu_seconds(pid) - cpu) / SCRAPES * 1e3, 2),
        "bytes": len(body),
    }


def certificate(folder: str) -> ssl.SSLContext:
    """A key and a certificate in `folder`, and the client that trusts it."""
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -days 2"
    files = ["-keyout", f"{folder}/key.pem", "-out", f"{folder}/certificate.pem"]
    subprocess.run(["openssl", *command.split(), *files], check=True, capture_output=True)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(f"{folder}/certificate.pem")
    return client


class SlowClients:
    """50 clients that have sent half a request; over TLS, half of the handshake's first message."""

    def __init__(self, address: str, tls: bool) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host, int(port))
        self._half = b"\x16\x03\x01\x02\x00\x01\x00" if tls else b"GET /metrics HTTP/1.1\r\nHost: node\r\nX-Slow: "
        self._stack = ExitStack()

    def renew(self) -> None:
        self.close()
        for _ in range(SLOW_CLIENTS):
            client = self._stack.enter_context(socket.create_connection(self._place))
            client.sendall(self._half)

    def close(self) -> None:
        self._stack.close()


def measure(tls: bool) -> dict[str, object]:
    found: dict[str, object] = {**page_cost()}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        client = certificate(folder) if tls else None
        command = [sys.executable, __file__, "--serve", folder if tls else ""]
        server = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert server.stdin
        assert server.stdout
        stack.callback(server.stdin.close)
        address, pid = server.stdout.readline().decode().strip(), server.pid
        slow = SlowClients(address, tls)
        stack.callback(slow.close)
        found["alone"] = scrape_many(address, pid, client, lambda: None) | memory_kilobytes(pid)
        found["with_50_slow_clients"] = scrape_many(address, pid, client, slow.renew) | memory_kilobytes(pid)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", action="store_true", help="over TLS")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
    else:
        print(json.dumps(measure(options.tls), indent=1))


if __name__ == "__main__":
    main()
