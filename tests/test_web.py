"""HTTP over real loopback sockets; the Report and the clock are the test's."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import http.client
import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stallwatch.descriptors import Shares
from stallwatch.model import GpuState, RankState, Report, Signal, Verdict
from stallwatch.presentation import document, verdict_words
from stallwatch.web import Deadlines, HttpServer, ListenError, Published, serve_http
from stallwatch.web.addresses import listen, split_address
from stallwatch.web.app import wants_openmetrics
from stallwatch.web.page import html
from stallwatch.web.server import LoopErrors

LEVEL = Signal("test_level", "A level of the test.", ("subject",))
TICK = 5.0
PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)

Serve = Callable[..., HttpServer]


class Clock:
    """Monotonic seconds that stand still until told."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(report: Report) -> Clock:
    return Clock(report.monotonic)


@pytest.fixture
def published(report: Report, clock: Clock) -> Published:
    published = Published(TICK, clock)
    published.publish(report)
    return published


@pytest.fixture
def serve(published: Published) -> Iterator[Serve]:
    """Starts servers on free ports of the loopback and stops them at the end."""
    started: list[HttpServer] = []

    def start(published: Published = published, address: str = "127.0.0.1:0", **settings: object) -> HttpServer:
        started.append(serve_http(published, [address], **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.stop()


def connect(running: HttpServer, timeout: float = 5.0) -> socket.socket:
    return socket.create_connection(split_address(running.addresses[0]), timeout=timeout)


def ask(
    running: HttpServer, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in lower case, body."""
    client = http.client.HTTPConnection(*split_address(running.addresses[0]), timeout=5)
    client.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = client.getresponse()
    answer = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    client.close()
    return answer


def until_closed(client: socket.socket) -> bytes:
    """What comes until the server closes, by a reset or not."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := client.recv(65536):
            received += chunk
    return received


def until(holds: Callable[[], bool]) -> None:
    """Ask again, for at most five seconds."""
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end


# --- the pages ---------------------------------------------------------------------------------------------


def test_metrics_come_as_text_unless_openmetrics_is_asked_for(serve: Serve) -> None:
    running = serve()

    _, text_headers, text = ask(running)
    _, open_headers, openmetrics = ask(running, accept=PROMETHEUS_ACCEPT)

    assert text_headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert open_headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert b"# TYPE stallwatch_server_starts_total counter" in text
    assert openmetrics.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        (PROMETHEUS_ACCEPT, True),
        ("text/plain;q=0.9, application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=high", False),
    ],
)
def test_the_accept_header_is_weighed(accept: str, expected: bool) -> None:
    assert wants_openmetrics(accept) is expected


def test_a_page_is_compressed_for_those_who_take_it(serve: Serve) -> None:
    running = serve()

    _, plain_headers, plain = ask(running, accept_encoding="identity")
    _, headers, compressed = ask(running, accept_encoding="gzip, deflate")
    _, refused_headers, _ = ask(running, accept_encoding="gzip;q=0")

    assert headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain_headers | refused_headers
    assert gzip.decompress(compressed) == plain


def test_a_report_is_rendered_once_for_all_scrapes(published: Published, report: Report) -> None:
    pages = published.pages()
    assert not isinstance(pages, str)

    assert pages.metrics(False) is pages.metrics(False)
    assert pages.metrics(False).gzipped is pages.metrics(False).gzipped
    published.publish(report)
    renewed = published.pages()
    assert not isinstance(renewed, str)
    assert renewed.metrics(False) is not pages.metrics(False)


def test_the_report_comes_as_json(serve: Serve, report: Report) -> None:
    status, headers, body = ask(serve(), "/api/v1/report")

    assert (status, headers["content-type"]) == (200, "application/json; charset=utf-8")
    assert json.loads(body) == document(report)


def test_the_first_page_has_a_row_per_server(serve: Serve, report: Report) -> None:
    status, headers, body = ask(serve(), "/")

    page = body.decode()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert re.findall(r'<th scope="row">([^<]+)</th><td>([^<]+)', page.partition("</table>")[0]) == [
        (server["server"], verdict_words(server)) for server in document(report)["servers"]
    ]
    assert not re.search(r"<script|<link|<img|src=|https?://", page)


def test_a_hostile_title_cannot_inject_into_the_page(report: Report) -> None:
    hostile = "<script>alert(1)</script>\"'&"
    server = replace(report.servers[0].server, name=hostile, model=hostile, version=hostile)
    stalled = replace(
        report.servers[0],
        server=server,
        verdict=Verdict("stalled", "idle_wait", 0.0, hostile),
        ranks=(RankState(hostile, gpu=hostile), RankState("TP1", gpus=(GpuState(hostile, hostile),))),
    )
    tags: set[str] = set()
    texts: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.add(tag)

        def handle_data(self, data: str) -> None:
            texts.append(data)

    Reader().feed(html(document(replace(report, servers=(stalled,)))))

    assert not tags & {"script", "img"}
    assert texts.count(hostile) == 3  # name, model, index of a card
    assert {f"Ranks of {hostile}", f"{hostile} (waited for)"} <= set(texts)
    assert hostile[:12] in texts


def test_the_page_shows_the_ranks_as_check_does_and_marks_the_one_that_is_waited_for(report: Report) -> None:
    page = html(document(report))

    rows = re.findall(r'<tr( class="bad")?><th scope="row">(TP[^<]+)</th>(.*)</tr>', page)
    assert [(bool(kind), name) for kind, name, _ in rows] == [
        (False, "TP0"),
        (True, "TP1 (waited for)"),
        (False, "TP2"),
    ]
    assert re.findall(r"<td>([^<]*)</td>", rows[0][2]) == (
        [
            "4010",
            "post_load",
            "100%",
            "0",
            "76.0 GiB",
            "0%",
            "118 W, idle 117 W",
            "6m41s ago",
            "futex 205 (main), poll 3",
        ]
    )
    assert "<details open><summary>Ranks of sglang-8000" in page


def test_the_ranks_of_a_server_that_is_well_are_folded_and_none_is_marked(report: Report) -> None:
    working = replace(report.servers[0], verdict=Verdict("working", "none", 0.0, "TP1"))

    page = html(document(replace(report, servers=(working,))))

    assert "<details><summary>Ranks of sglang-8000" in page
    assert "waited for" not in page


def test_a_page_of_64_servers_of_8_ranks_is_below_150_kb(report: Report) -> None:
    ranks = tuple(replace(report.servers[0].ranks[0], rank=f"TP{number}") for number in range(8))
    servers = tuple(
        replace(
            report.servers[0], server=replace(report.servers[0].server, name=f"sglang-{8000 + number}"), ranks=ranks
        )
        for number in range(64)
    )

    page = html(document(replace(report, servers=servers)))

    assert page.count("</tr>") == 1 + 64 + 64 * 9
    assert len(page.encode()) < 150_000


def test_a_node_without_servers_has_a_page(report: Report) -> None:
    page = html(document(replace(report, servers=())))

    assert "no inference servers on this node, as of 2023-11-14T22:21:41Z" in page
    assert "<table" not in page


# --- routes ------------------------------------------------------------------------------------------------


def test_healthy_and_ready_depend_on_the_process_alone(serve: Serve, published: Published, clock: Clock) -> None:
    fresh, old = serve(Published(TICK, clock)), serve(published)
    clock.now += 1000

    assert ask(fresh, "/-/healthy")[0] == 200
    assert ask(fresh, "/-/ready")[0] == 503
    assert ask(old, "/-/ready")[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/", "/api/v1/report"])
def test_before_the_first_report_there_is_nothing_to_serve(serve: Serve, clock: Clock, path: str) -> None:
    status, _, body = ask(serve(Published(TICK, clock)), path)

    assert (status, body) == (503, b"no report yet: the first tick has not finished\n")


@pytest.mark.parametrize("path", ["/metrics", "/", "/api/v1/report"])
def test_an_old_report_is_never_served_as_new(serve: Serve, clock: Clock, path: str) -> None:
    running = serve()
    clock.now += 3 * TICK
    assert ask(running, path)[0] == 200

    clock.now += 0.5
    status, _, body = ask(running, path)

    assert (status, body) == (503, b"the last report is 15.5 s old, more than 3 ticks: not served as new\n")


def test_the_telemetry_path_can_be_changed(serve: Serve) -> None:
    running = serve(telemetry_path="/stalls")

    assert ask(running, "/stalls")[0] == 200
    assert ask(running, "/metrics")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("POST", "/metrics", 405, "GET, HEAD"),
        ("DELETE", "/", 405, "GET, HEAD"),
        ("GET", "/-/reload", 405, "POST"),
        ("GET", "/nothing", 404, None),
        ("GET", "/metrics/../metrics", 404, None),
        ("GET", "/metrics?name[]=up", 200, None),
        ("GET", "http://node:10077/metrics", 200, None),
        ("POST", "/-/reload", 403, None),
    ],
)
def test_methods_and_paths(serve: Serve, method: str, path: str, status: int, allow: str | None) -> None:
    answered, headers, _ = ask(serve(), path, method)

    assert (answered, headers.get("allow")) == (status, allow)


def test_head_has_the_headers_of_get_and_no_body(serve: Serve) -> None:
    running = serve()

    status, headers, body = ask(running, method="HEAD", accept_encoding="gzip")

    _, got, _ = ask(running, accept_encoding="gzip")
    assert (status, body) == (200, b"")
    assert headers["content-length"] == got["content-length"]


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (None, (200, b"reloaded\n")),
        ("c.yml:3: x: unknown key", (500, b"not reloaded: c.yml:3: x: unknown key\n")),
    ],
)
def test_reload_is_done_where_it_is_enabled(serve: Serve, mistake: str | None, expected: tuple[int, bytes]) -> None:
    calls: list[int] = []

    def reload() -> str | None:
        calls.append(1)
        return mistake

    status, _, body = ask(serve(reload=reload), "/-/reload", "POST")

    assert ((status, body), len(calls)) == (expected, 1)


def test_a_reload_that_hangs_holds_up_nothing_else(serve: Serve) -> None:
    """A configuration on a dead mount."""
    entered, release = threading.Event(), threading.Event()

    def reload() -> None:
        entered.set()
        release.wait(10)

    running = serve(reload=reload)
    with connect(running) as first:
        first.sendall(b"POST /-/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert entered.wait(5)

        assert ask(running)[0] == 200
        assert ask(running, "/-/reload", "POST")[0] == 503
        release.set()
        assert first.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_bug_in_rendering_is_a_500(serve: Serve, report: Report, clock: Clock) -> None:
    broken = Published(TICK, clock)
    broken.publish(replace(report, readings=(LEVEL.read(1.0, "one", "label too many"),)))
    running = serve(broken)

    assert ask(running)[0] == 500
    assert ask(running, "/-/healthy")[0] == 200


# --- listening and stopping --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (":10077", ("", 10077)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:10077", ("::1", 10077)),
        ("node-1.example:80", ("node-1.example", 80)),
    ],
)
def test_addresses_are_split(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "10077", "::1:80", "[::1]", "a:70000", "a:-1", "http://a:80", "a b:80"])
def test_an_address_that_is_none_is_a_sentence(address: str) -> None:
    with pytest.raises(ListenError, match=re.escape(f"cannot listen on {address!r}: allowed are HOST:PORT")):
        split_address(address)


def test_a_taken_port_is_a_sentence_and_leaves_nothing_open(serve: Serve, published: Published) -> None:
    taken = serve().addresses[0]
    with listen("127.0.0.1:0") as free:
        other = f"127.0.0.1:{free.getsockname()[1]}"

    with pytest.raises(ListenError, match=f"cannot listen on {taken}: another process listens there"):
        serve_http(published, [other, taken])

    listen(other).close()


def test_a_foreign_address_is_a_sentence(published: Published) -> None:
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:0: "):
        serve_http(published, ["192.0.2.1:0"])


def test_without_a_host_ipv4_clients_are_served(serve: Serve) -> None:
    running = serve(address=":0")
    port = running.addresses[0].rpartition(":")[2]

    with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as client:
        client.sendall(b"GET /-/healthy HTTP/1.0\r\n\r\n")
        assert until_closed(client).startswith(b"HTTP/1.1 200 ")


def test_several_addresses_are_listened_on(published: Published) -> None:
    running = serve_http(published, ["127.0.0.1:0", "127.0.0.1:0"])

    ports = {split_address(address)[1] for address in running.addresses}
    for port in ports:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    running.stop()

    assert len(ports) == 2
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_stopping_ends_open_connections_and_may_come_twice(serve: Serve) -> None:
    running = serve()
    with connect(running) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")

        running.stop()
        running.stop()

        assert until_closed(client) == b""
    assert not running.is_running


# --- hostile and slow clients ------------------------------------------------------------------------------


def test_a_connection_serves_many_requests_also_sent_ahead(serve: Serve) -> None:
    request = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(serve()) as client:
        client.sendall(request * 50 + last)

        assert until_closed(client).count(b"HTTP/1.1 200 ") == 51


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000, 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"z" * 70_000, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n", 417),
    ],
)
def test_what_is_no_fair_request_is_refused_and_closed(serve: Serve, sent: bytes, status: int) -> None:
    running = serve()
    with connect(running) as client:
        client.sendall(sent)

        answer = client.recv(4096)

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"Connection: close" in answer
    assert ask(running)[0] == 200


def test_a_header_of_10_megabytes_is_not_kept(serve: Serve) -> None:
    with connect(serve()) as client:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 10_000_000)

        assert until_closed(client)[:13] in (b"HTTP/1.1 431 ", b"")


def test_slow_clients_do_not_keep_honest_ones_out(serve: Serve) -> None:
    """More half requests than connections are allowed: the longest waiting ones go."""
    running = serve(room=Shares(connections=10, accepted=10, threads=0, members=0))
    with contextlib.ExitStack() as clients:
        slow = [clients.enter_context(connect(running)) for _ in range(30)]
        for client in slow[20:]:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost:")

        assert ask(running)[0] == 200

        assert until_closed(slow[0]) == b""
        slow[-1].sendall(b" x\r\n\r\n")
        assert slow[-1].recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("sent", "deadlines"),
    [
        (b"", Deadlines(request=0.05)),
        (b"GET /metrics HTTP/1.1\r\nHost:", Deadlines(request=0.05)),
        (b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n", Deadlines(keep_alive=0.05)),
        (b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\nGET /", Deadlines(request=0.2)),
    ],
)
def test_a_client_that_is_too_slow_is_closed(serve: Serve, sent: bytes, deadlines: Deadlines) -> None:
    """The other deadlines are longer than the client's own patience."""
    with connect(serve(deadlines=deadlines), timeout=3) as client:
        client.sendall(sent)

        assert until_closed(client).count(b"HTTP/1.1 200 ") == sent.count(b"\r\n\r\n")


def test_a_client_that_does_not_take_its_answer_is_closed(serve: Serve, report: Report, clock: Clock) -> None:
    big = Published(TICK, clock)
    big.publish(replace(report, readings=tuple(LEVEL.read(1.0, f"{n:0100}") for n in range(60_000))))
    running = serve(big, max_requests=1, deadlines=Deadlines(answer=0.3))
    with connect(running) as lazy:
        lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert lazy.recv(1) == b"H"

        until(lambda: ask(running)[0] == 200)

        assert len(until_closed(lazy)) < 6_000_000


def test_tls_is_spoken_where_it_is_asked_for(serve: Serve, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -days 2"
    subprocess.run([openssl, *command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ours.load_cert_chain(certificate, key)
    theirs.load_verify_locations(certificate)
    running = serve(tls=ours)

    with connect(running) as raw, theirs.wrap_socket(raw, server_hostname="localhost") as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = until_closed(client)

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\nstallwatch_servers{" in answer


def test_more_requests_in_flight_than_allowed_are_refused(serve: Serve, report: Report, clock: Clock) -> None:
    """A client that does not take its answer keeps its request in flight."""
    big = Published(TICK, clock)
    big.publish(replace(report, readings=tuple(LEVEL.read(1.0, f"{n:0100}") for n in range(60_000))))
    running = serve(big, max_requests=1)
    with connect(running) as lazy:
        lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert lazy.recv(1) == b"H"

        status, _, body = ask(running)

        assert (status, body) == (503, b"more than 1 requests in flight\n")
        assert ask(running, "/-/healthy")[0] == 200
    assert ask(running, "/-/healthy")[0] == 200


def test_a_client_that_takes_its_big_answer_late_gets_all_of_it(serve: Serve, report: Report, clock: Clock) -> None:
    big = Published(TICK, clock)
    big.publish(replace(report, readings=tuple(LEVEL.read(1.0, f"{n:0100}") for n in range(60_000))))
    running = serve(big)
    with connect(running) as lazy:
        lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /-/healthy HTTP/1.0\r\n\r\n")
        assert ask(running, "/-/healthy")[0] == 200

        received = until_closed(lazy)

    assert received.count(b"\nstallwatch_test_level{") == 60_000
    assert received.endswith(b"stallwatch is healthy\n")


def test_accepts_that_fail_are_said_once_a_minute_and_other_errors_each_time(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    errors = LoopErrors(clock)
    loop = asyncio.new_event_loop()
    full = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "too many files")}

    with caplog.at_level(logging.WARNING):
        for seconds in (0.0, 1.0, 58.0, 1.0):
            clock.now += seconds
            for _ in range(100):
                errors(loop, full)
        for _ in range(2):
            errors(loop, {"message": "a bug", "exception": ValueError("x")})
    loop.close()

    said = [record.message.splitlines()[0] for record in caplog.records]
    assert said == ["HTTP clients cannot be accepted", "HTTP clients cannot be accepted", "a bug", "a bug"]
