"""Honest scrapes among floods: `python -m bench.flood [--from 127.0.0.1] [--only WORDS]` prints one JSON object.

Three processes for each figure: the exporter, with a page of 3,000 samples that is made anew at every tick of 5 s; one
that attacks it (bench/attackers.py, at full priority); and one that scrapes honestly, 20 times a second: in turn on
one of 15 connections that it keeps, as so many Prometheuses would, and on a new one.  Beside ours, flood by flood, the
peer from apt with the exporter-toolkit (prometheus-node-exporter), which serves the same page from a file.  A scrape
that is refused or put out is counted, and not timed.  `waited_for_core` is how long of the longest scrape our HTTP
thread and the scraper were ready to run and had no core: that is the machine's doing, and no exporter's.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import select
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import bcrypt
import psutil

from bench.attackers import FLOODS
from bench.scan import free_port
from bench.scrape import TICK_SECONDS, certificate, report
from stallwatch.exposition import Exposition
from stallwatch.web import Access, Published, Renewal, serve_http

SECONDS, PER_SECOND, SETTLE_SECONDS, PATIENCE_SECONDS = 10.0, 20, 1.0, 10.0
KEPT = 15
"""Connections that the scraper keeps: each rests for 1.5 s, for nobody scrapes a node ten times a second."""
PEER = "prometheus-node-exporter"
HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0",
    "Accept-Encoding": "gzip",
    "Authorization": "Basic " + base64.b64encode(b"prometheus:right").decode(),
}


# --- the exporters


@dataclass(frozen=True, slots=True)
class Exporter:
    name: str
    process: subprocess.Popen[str]
    port: int
    thread: int  # the one that serves HTTP; 0: many do


def serve(port: int, web: str) -> None:
    """Ours: says the id of its HTTP thread, publishes every tick until its standard input ends."""
    published = Published(TICK_SECONDS, time.monotonic)
    one = report()
    published.publish(one)
    renewal = Renewal(web) if web else None
    server = serve_http(published, [f"127.0.0.1:{port}"], access=renewal.current if renewal else Access)
    print(server._thread.native_id, flush=True)
    while not select.select([sys.stdin], [], [], TICK_SECONDS)[0]:
        published.publish(replace(one, timestamp=time.time(), monotonic=time.monotonic()))
    server.stop()


@contextmanager
def ours(folder: Path, is_secured: bool) -> Iterator[Exporter]:
    port, web = free_port(), str(folder / "web.yml") if is_secured else ""
    command = [sys.executable, "-m", "bench.flood", "--serve", str(port), web]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield Exporter("stallwatch", process, port, int(process.stdout.readline()))
        finally:
            process.stdin.close()


@contextmanager
def peer(folder: Path, is_secured: bool) -> Iterator[Exporter]:
    port = free_port()
    command = [PEER, f"--web.listen-address=127.0.0.1:{port}", "--collector.disable-defaults"]
    command += ["--collector.textfile", f"--collector.textfile.directory={folder}", "--web.disable-exporter-metrics"]
    command += [f"--web.config.file={folder / 'web.yml'}"] if is_secured else []
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True) as process:
        time.sleep(SETTLE_SECONDS)
        try:
            yield Exporter(PEER, process, port, 0)
        finally:
            process.terminate()


def prepare(folder: Path) -> None:
    """The page for the peer, a certificate, and the configuration that both read."""
    page = Exposition().page(report()).text(openmetrics=False)
    (folder / "page.prom").write_bytes(page)
    certificate(str(folder))
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(10)).decode()
    (folder / "web.yml").write_text(
        "tls_server_config: {cert_file: certificate.pem, key_file: key.pem}\n"
        f"basic_auth_users: {{prometheus: '{hashed}'}}\n"
    )


# --- the honest scraper


@dataclass(slots=True)
class Times:
    """Of scrapes on one kind of connection; milliseconds."""

    taken: list[tuple[float, float]] = field(default_factory=list)  # how long, and how much of it without a core
    refused: Counter[str] = field(default_factory=Counter)

    def told(self) -> dict[str, object]:
        ordered = sorted(self.taken)
        if not ordered:
            return {"answered": 0, "refused": dict(self.refused)}
        at = {share: ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.95, 0.99)}
        return {
            "answered": len(ordered),
            "refused": dict(self.refused),
            **{f"p{share * 100:.0f}": round(at[share][0], 1) for share in at},
            "longest": round(ordered[-1][0], 1),
            "waited_for_core": round(ordered[-1][1], 1),
        }


class Scraper:
    def __init__(self, port: int, thread: str, folder: str) -> None:
        """`thread`: whose wait for a core is taken, as PID/TID; `folder`: whose certificate is trusted; "": none."""
        self._port = port
        self._waits = [f"/proc/{name}/schedstat" for name in ("self", thread.replace("/", "/task/")) if name]
        self._context = None
        if folder:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._context.load_verify_locations(f"{folder}/certificate.pem")
        self._kept = [self._client() for _ in range(KEPT)]

    def _client(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_SECONDS)
        return http.client.HTTPSConnection("localhost", self._port, timeout=PATIENCE_SECONDS, context=self._context)

    def on_kept(self, times: Times) -> None:
        """As Prometheus: where the connection was closed meanwhile, at once on a new one."""
        client = self._kept.pop(0)
        self._kept.append(client)
        begin, waited = time.perf_counter(), self._waited()
        is_open = client.sock is not None
        status = self._ask(client)
        if is_open and not status.isdigit():
            client.close()
            status = self._ask(client)
        if not status.isdigit():
            client.close()
        self._note(times, status, begin, waited)

    def on_new(self, times: Times) -> None:
        begin, waited = time.perf_counter(), self._waited()
        client = self._client()
        status = self._ask(client)
        client.close()
        self._note(times, status, begin, waited)

    @staticmethod
    def _ask(client: http.client.HTTPConnection) -> str:
        """The status, or the name of what went wrong."""
        try:
            client.request("GET", "/metrics", headers=HEADERS)
            answer = client.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        return str(answer.status)

    def _waited(self) -> float:
        """Milliseconds without a core, of the scraper and of who serves it."""
        return sum(int(Path(path).read_text().split()[1]) for path in self._waits) / 1e6

    def _note(self, times: Times, status: str, begin: float, waited: float) -> None:
        if status == "200":
            times.taken.append(((time.perf_counter() - begin) * 1e3, self._waited() - waited))
        else:
            times.refused[status] += 1


def scrape(port: int, thread: str, folder: str, seconds: float) -> None:
    scraper, kept, new = Scraper(port, thread, folder), Times(), Times()
    for _ in range(KEPT):
        scraper.on_kept(Times())
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    for number in range(int(seconds * PER_SECOND)):
        time.sleep(max(0.0, begin + number / PER_SECOND - time.perf_counter()))
        if time.perf_counter() > begin + seconds:  # those before were late
            break
        (scraper.on_new, scraper.on_kept)[number % 2]((new, kept)[number % 2])
    print(json.dumps({"kept connection": kept.told(), "new connection": new.told()}))


# --- the floods


def memory(exporter: Exporter) -> dict[str, float]:
    process = psutil.Process(exporter.process.pid)
    mib = round(process.memory_full_info().pss / 2**20, 1)
    return {"pss_mib": mib, "threads": process.num_threads(), "descriptors": process.num_fds()}


def scraped(
    exporter: Exporter, folder: Path | None, seconds: float, flood: AbstractContextManager[None] | None = None
) -> tuple[dict[str, object], dict[str, float]]:
    """What the scraper tells, and the exporter's memory just before its end; what is kept is opened before `flood`."""
    thread = f"{exporter.process.pid}/{exporter.thread}" if exporter.thread else ""
    arguments = [str(exporter.port), thread, str(folder or ""), str(seconds)]
    command = [sys.executable, "-m", "bench.flood", "--scrape", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        with flood or nullcontext():
            process.stdin.write("begin\n")
            process.stdin.flush()
            time.sleep(seconds * 0.8)
            meanwhile = memory(exporter)
            told = process.communicate(timeout=seconds + 4 * PATIENCE_SECONDS)[0]
        return json.loads(told), meanwhile


@contextmanager
def attackers(kind: str, port: int, source: str) -> Iterator[None]:
    command = [sys.executable, "-m", "bench.attackers", kind, str(port), "--from", source]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            time.sleep(SETTLE_SECONDS)
            yield
        finally:
            process.kill()


def cpu_seconds(exporter: Exporter) -> float:
    times = psutil.Process(exporter.process.pid).cpu_times()
    return times.user + times.system


def flooded(exporter: Exporter, kind: str, folder: Path | None, source: str, seconds: float) -> dict[str, object]:
    before = memory(exporter)
    cpu, begin = cpu_seconds(exporter), time.perf_counter()
    print(f"{kind} against {exporter.name}", file=sys.stderr)
    told, meanwhile = scraped(exporter, folder, seconds, attackers(kind, exporter.port, source))
    share = (cpu_seconds(exporter) - cpu) / (time.perf_counter() - begin)
    time.sleep(SETTLE_SECONDS)
    return {**told, "cores": round(share, 2), "before": before, "meanwhile": meanwhile, "after": memory(exporter)}


def measure(source: str, only: str, seconds: float, without_peer: bool) -> dict[str, object]:
    found: dict[str, object] = {"attackers": source, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        prepare(folder)
        kinds = [ours] if without_peer else [ours, peer]
        for is_secured in (False, True):
            exporters = [stack.enter_context(kind(folder, is_secured)) for kind in kinds]
            trusted = folder if is_secured else None
            quiet = "quiet, TLS and password" if is_secured else "quiet"
            found[quiet] = {each.name: scraped(each, trusted, seconds / 2)[0] for each in exporters}
            for kind, flood in FLOODS.items():
                if flood.is_secured == is_secured and only in kind:
                    flooding = [(each.name, flooded(each, kind, trusted, source, seconds)) for each in exporters]
                    found[kind] = dict(flooding)
        found["load after"] = os.getloadavg()[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", default="127.0.0.2", help="the attackers' address (%(default)s)")
    parser.add_argument("--only", default="", metavar="WORDS", help="floods whose name holds them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of scraping, each flood (%(default)s)")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--scrape", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(int(options.serve[0]), options.serve[1])
    elif options.scrape:
        port, thread, folder, seconds = options.scrape
        scrape(int(port), thread, folder, float(seconds))
    else:
        found = measure(options.source, options.only, options.seconds, options.without_peer)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
