"""HTTP over real loopback sockets; the Report and the clock are the test's."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import gc
import gzip
import hashlib
import http.client
import json
import logging
import re
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from page_node import HOSTILE, NOW, failed, logs_of, node, ranks, report_of, server, slow, stalled, unknown
from stallwatch.descriptors import Shares
from stallwatch.model import GpuState, RankState, Report, ServerReport, Signal, Verdict
from stallwatch.presentation import document, verdict_words
from stallwatch.web import Access, Deadlines, HttpServer, ListenError, Published, serve_http
from stallwatch.web.addresses import listen, split_address
from stallwatch.web.app import MOST_WISHES, qualities, wants_openmetrics
from stallwatch.web.assets import STYLE
from stallwatch.web.changes import MOST_CHANGES, Change, Changes
from stallwatch.web.connections import Clients, takes_at_once
from stallwatch.web.log_facts import log_facts
from stallwatch.web.page import FRAME, LONGEST, Beside, html
from stallwatch.web.server import LoopErrors
from stallwatch.web.wire import SocketWire
from stallwatch.web.words import counts, names, sentence

LEVEL = Signal("test_level", "A level of the test.", ("subject",))
TICK = 5.0
PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)

Serve = Callable[..., HttpServer]

CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"


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


def connect(running: HttpServer, timeout: float = 60.0, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(split_address(running.addresses[0]), timeout=timeout, source_address=(source, 0))


def ask(
    running: HttpServer, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in lower case, body."""
    client = http.client.HTTPConnection(*split_address(running.addresses[0]), timeout=60)
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
    """Ask again, for at most a minute."""
    end = time.monotonic() + 60
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
    assert re.findall(r"<th scope=row><a href=#s\w+>([^<]+)</a><td class=v>([^<]+)", page.partition("</table>")[0]) == [
        ("sglang-8000", f"{verdict_words(document(report)['servers'][0])}, last progress 7m ago"),
        ("vllm-8001", "idle for 15m"),
    ]
    assert not re.search(r"<link|<img|src=|https?://", page)


def test_a_browser_may_run_the_script_of_the_page_and_no_other(serve: Serve) -> None:
    _, headers, body = ask(serve(), "/")

    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", body.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert " style=" not in body.decode()


def test_the_part_that_changes_is_the_same_in_the_page_and_by_itself(serve: Serve) -> None:
    running = serve()

    _, headers, part = ask(running, "/live")

    assert headers["content-type"] == "text/html; charset=utf-8"
    assert part.startswith(b'<div id="live" data-tick="5" ')
    assert part in ask(running, "/")[2]


class Reader(HTMLParser):
    """Tags, their attributes, and the texts between them, of what a browser would make of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_a_hostile_title_or_log_cannot_inject_into_the_page() -> None:
    told = server(
        HOSTILE, "stalled", "idle_wait", of=(RankState(HOSTILE, gpu=HOSTILE),), waited_for=HOSTILE, model=HOSTILE
    )
    told = replace(told, advice=(HOSTILE,), deadlines={HOSTILE: 1.0})
    card = RankState("TP1", gpus=(GpuState(HOSTILE, HOSTILE),))
    report = report_of([replace(told, ranks=(*told.ranks, card))])
    logs = (*report.readings, *logs_of(HOSTILE, HOSTILE))
    beside = Beside(log_facts(logs), (Change(NOW, HOSTILE, "stalled", "working"),))

    harmless = Reader(html(document(report_of([server("a", of=ranks(1))]))))
    found = Reader(html(document(report), beside=beside))

    assert set(found.tags) - set(harmless.tags) <= {"li", "ul", "span"}
    assert (found.tags["script"], found.tags["img"]) == (1, 0)
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "src"]
    assert found.texts.count(HOSTILE) == 5  # name in the table and the section, model, index of a card, advice
    assert {f"{HOSTILE} (waited for)", f"log {HOSTILE}", f"its own time-out ({HOSTILE})"} <= set(found.texts)


def test_the_page_shows_the_ranks_as_check_does_and_marks_the_one_that_is_waited_for(report: Report) -> None:
    page = html(document(report))

    rows = re.findall(r"<tr( class=bad)?><th>(TP[^<]+)(.*)", page)
    assert [(bool(kind), name) for kind, name, _ in rows] == [
        (False, "TP0"),
        (True, "TP1 (waited for)"),
        (False, "TP2"),
    ]
    assert re.findall(r"<td>([^<]*)", rows[0][2]) == (
        ["4010", "0", "76.0 GiB", "0%", "118 W, idle 117 W", "6m41s ago", "futex 205 (main), poll 3"]
    )
    assert " open><summary><h2>sglang-8000" in page


def test_ranks_stand_by_phase_in_the_order_of_a_start_and_the_dead_and_unknown_below() -> None:
    each = (
        *ranks(1, "post_load"),
        RankState("TP1", phase="loading_weights", load_progress=0.64, alive=True),
        RankState("TP2", phase="post_load", alive=False),
        RankState("TP3"),
        RankState("TP4", phase="loading_weights", load_progress=1.0, alive=True),
    )

    page = html(document(report_of([server("a", "stalled", "idle_wait", of=each, waited_for="TP1")])))

    grid = page.partition("<dl>")[2].partition("</dl>")[0]
    assert re.findall(r"<dt>([^<]+)<dd>((?:<b.*?</b> ?)+)", grid) == [
        ("loading_weights", '<b class="p6 bad">TP1 64% (waited for)</b> <b class=p10>TP4 100%</b>'),
        ("post_load", "<b>TP0</b>"),
        ("dead", "<b>TP2</b>"),
        ("phase not known", "<b>TP3</b>"),
    ]


def test_the_ranks_of_a_server_that_is_well_are_folded_and_none_is_marked(report: Report) -> None:
    working = replace(report.servers[0], verdict=Verdict("working", "none", 0.0, "TP1"))

    page = html(document(replace(report, servers=(working,))))

    assert "><summary><h2>sglang-8000" in page
    assert " open><summary>" not in page
    assert "waited for" not in page


def test_the_part_of_a_server_says_what_a_phone_has_no_column_for() -> None:
    slow_part, idle_part = html(document(report_of([server("b", "idle"), slow("a")]))).split("<details")[1:]

    about = "<dt>about<dd>vllm 0.5.9, org/model-547b, 8 of 8 ranks alive, slow since 2023-11-14T22:16:31Z"
    assert f"{about}<dt>phase<dd>post_load since 2023-11-14T22:14:51Z, slow after 10m" in slow_part
    assert "<dt>about<dd>sglang 0.5.9, org/model-547b, ? of 1 ranks alive, idle since 2023-11-14T22:15:01Z" in idle_part
    assert "<dt>phase" not in idle_part


def test_channels_and_logs_are_told_with_their_ages() -> None:
    report = report_of([failed("a"), server("b")])

    first, second = html(document(report), beside=Beside(log_facts(report.readings))).split("<details")[1:]

    assert "<dt>flat<dd>log 1m30s, storage 1m33s, " in first
    assert "<dt>log stdout<dd>last line 12s ago, 412 lines, 3 no pattern knows" in first
    assert "<dt>errors in logs<dd>2 nccl" in first
    assert "<dt>moving<dd>log 4s, " in second
    assert "errors in logs" not in second


def test_the_last_changes_of_verdict_are_told_the_newest_first() -> None:
    changes = Changes()
    told = [
        report_of([server("a"), server("b")], NOW),
        report_of([server("a", "stalled", "idle_wait"), server("b")], NOW + 5),
        report_of([server("a", "stalled", "idle_wait"), server("c")], NOW + 10),
    ]

    assert changes.hear(told[0]) == ()
    assert changes.hear(told[1]) == (Change(NOW + 5, "a", "stalled (idle_wait)", "working"),)
    after = changes.hear(told[2])
    assert changes.hear(told[2]) == after
    assert after[:2] == (Change(NOW + 10, "b", None, "working"), Change(NOW + 10, "c", "working", None))

    page = html(document(told[2]), beside=Beside(changes=after))
    assert re.findall(r"<li><span>[^<]*:(\d\d)Z</span> ([^<]+)</li>", page) == [
        ("51", "b: not shown any more, was working"),
        ("51", "c: found, working"),
        ("46", "a: stalled (idle_wait), was working"),
    ]
    assert "None since stallwatch was started" not in page


def test_no_more_changes_are_kept_than_are_shown() -> None:
    changes = Changes()
    for number in range(100):
        kept = changes.hear(report_of([server("a", ("working", "idle")[number % 2])], NOW + number))

    assert [change.timestamp for change in kept] == [NOW + 99 - number for number in range(MOST_CHANGES)]


def test_changes_are_on_the_published_page(clock: Clock) -> None:
    published = Published(TICK, clock)
    for state in ("working", "idle"):
        published.publish(report_of([server("a", state)], monotonic=clock.now))
    pages = published.pages()

    assert not isinstance(pages, str)
    assert b"</span> a: idle, was working" in pages.live().plain
    assert b"<dt>log stdout<dd>last line 12s ago" in pages.html("/metrics").plain


@pytest.mark.parametrize("path", ["/metrics", "/stalls"])
def test_links_are_relative(path: str) -> None:
    page = html(document(node(1)), path)

    assert f'<a href="{path[1:]}">metrics</a>' in page
    assert '<a href="api/v1/report">' in page
    assert 'href="/' not in page


def brightness(colour: str) -> float:
    """Relative luminance as WCAG 2 has it, of `#rgb` or `#rrggbb`."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, brighter = sorted(map(brightness, (one, other)))
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(scheme: int) -> None:
    """Also from the bars, which axe-core cannot measure."""
    colours = dict(re.findall(r"--(\w+):(#\w+)", STYLE.split("@media")[scheme]))
    behind = {"page": ("text", "soft", "bad", "warn", "good", "link"), "chip": ("text", "bad"), "load": ("text", "bad")}

    pairs = {(word, back): contrast(colours[word], colours[back]) for back, words in behind.items() for word in words}

    assert {pair: value for pair, value in pairs.items() if value < 4.5} == {}
    assert contrast("#777777", "#ffffff") < 4.5 < contrast("#767676", "#fff")


def test_a_page_of_64_servers_of_8_ranks_is_below_150_kb() -> None:
    """The longest: every rank has its own share of the weights, and each server two logs and a GPU per rank."""
    report = report_of(
        [
            server(f"sglang-{8000 + number}", phase="loading_weights", of=ranks(8, "loading_weights"))
            for number in range(64)
        ]
    )
    changes = tuple(Change(NOW, f"sglang-{8000 + number}", "stalled (idle_wait)", "working") for number in range(20))

    page = html(document(report), beside=Beside(log_facts(report.readings), changes))

    assert page.count("<tr") == 1 + 64 + 64 * 9
    assert page.count("<dt>log ") == 2 * 64
    assert len(page.encode()) <= LONGEST < 150_000


def test_the_worst_node_there_can_be_leaves_out_tables_of_ranks_and_no_server() -> None:
    """All of 64 stalled, with the names that containers give; of eight nothing is left out."""
    name = "sglang-{}@search-5d8f9c7b6d-x2x4z/engine"
    pages = {
        number: html(document(report_of([stalled(name.format(8000 + each)) for each in range(number)])))
        for number in (8, 64)
    }

    told = {number: page.count("aria-label=ranks") for number, page in pages.items()}
    assert told[8] == 8
    assert 32 < told[64] < 64
    assert [page.count("tells them one by one") for page in pages.values()] == [0, 64 - told[64]]
    assert pages[64].count("TP3 64% (waited for)") == 64
    assert pages[64].index("aria-label=ranks") < pages[64].index("tells them one by one")
    assert len(pages[64].encode()) <= LONGEST < 150_000


def test_the_frame_of_a_page_is_as_long_as_is_reckoned_with(report: Report) -> None:
    assert len(html(document(replace(report, servers=()))).encode()) < FRAME


def test_a_node_without_servers_has_a_page(report: Report) -> None:
    page = html(document(replace(report, servers=())))

    assert 'role="status">no inference servers on this node.</p>' in page
    assert "As of <time>2023-11-14T22:21:41Z</time>" in page
    assert "<table" not in page


# --- the verdict in words ----------------------------------------------------------------------------------


def said(told: ServerReport) -> str:
    return sentence(document(report_of([told]))["servers"][0])


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (slow(), "slow: still reading weights on TP3, 41 of 64 shards, last progress 12s ago"),
        (
            server("a", phase="loading_weights", of=ranks(8, "loading_weights", 30.0)),
            "working: reading weights on all 8 ranks, at least 41 of 64 shards, last progress 30s ago",
        ),
        (
            server("a", phase="loading_weights", of=(RankState("TP1", phase="loading_weights", load_progress=0.644),)),
            "working: reading weights on TP1, 64% read, last progress 4s ago",
        ),
        (
            server("a", phase="loading_weights", of=ranks(1, "loading_weights"), framework="dynamo-trtllm"),
            "working: reading weights on TP0, 41 of 64 parts, last progress 4s ago",
        ),
        (server("a", phase="compiling", of=ranks(1, "compiling")), "working: compiling on TP0, last progress 4s ago"),
        (server("a", phase="compiling", age=9.0), "working: compiling, last progress 9s ago"),
        (
            server("a", phase="spawned", of=(RankState("TP0"),), age=9.0),
            "working: starting its processes, last progress 9s ago",
        ),
        (server("a", "idle"), "idle for 6m40s"),
        (
            stalled(),
            "stalled (idle_wait) for 6m41s in post_load: every thread is asleep, "
            "on each of 8 GPUs 76 to 77 GiB held, 0 % used, waiting for TP3, last progress 7m18s ago",
        ),
        (unknown(), "unknown (unreadable) for 6m40s in spawned: the evidence cannot be read"),
    ],
)
def test_the_verdict_is_told_in_words(told: ServerReport, expected: str) -> None:
    assert said(told) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [(1, "TP0"), (2, "TP0 and TP1"), (3, "TP0, TP1 and TP2"), (7, "TP0, TP1, TP2 and 4 more")],
)
def test_no_more_names_are_told_than_one_can_read(number: int, expected: str) -> None:
    assert names([{"rank": f"TP{each}"} for each in range(number)]) == expected


def test_a_summary_counts_what_needs_a_person_first() -> None:
    assert counts(document(node(5))["servers"]) == (
        "5 inference servers on this node: 1 stalled, 1 failed, 1 unknown, 1 slow, 1 working."
    )
    assert counts(document(report_of([server("a")]))["servers"]) == "1 inference server on this node: 1 working."


# --- routes ------------------------------------------------------------------------------------------------


def test_healthy_and_ready_depend_on_the_process_alone(serve: Serve, published: Published, clock: Clock) -> None:
    fresh, old = serve(Published(TICK, clock)), serve(published)
    clock.now += 1000

    assert ask(fresh, "/-/healthy")[0] == 200
    assert ask(fresh, "/-/ready")[0] == 503
    assert ask(old, "/-/ready")[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/", "/live", "/api/v1/report"])
def test_before_the_first_report_there_is_nothing_to_serve(serve: Serve, clock: Clock, path: str) -> None:
    status, _, body = ask(serve(Published(TICK, clock)), path)

    assert (status, body) == (503, b"no report yet: the first tick has not finished\n")


@pytest.mark.parametrize("path", ["/metrics", "/", "/live", "/api/v1/report"])
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


def test_a_reload_for_which_no_thread_can_be_started_is_refused_and_the_next_one_done(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = serve(reload=lambda: None)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        assert ask(running, "/-/reload", "POST")[0] == 503
    assert ask(running, "/-/reload", "POST")[0] == 200


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

    with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as client:
        client.sendall(b"GET /-/healthy HTTP/1.0\r\n\r\n")
        assert until_closed(client).startswith(b"HTTP/1.1 200 ")


def test_several_addresses_are_listened_on(published: Published) -> None:
    running = serve_http(published, ["127.0.0.1:0", "127.0.0.1:0"])

    ports = {split_address(address)[1] for address in running.addresses}
    for port in ports:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    running.stop()

    assert len(ports) == 2
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)


def test_stopping_ends_open_connections_and_may_come_twice(serve: Serve) -> None:
    running = serve()
    with connect(running) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")

        running.stop()
        running.stop()

        assert until_closed(client) == b""
    assert not running.is_running


# --- hostile and slow clients ------------------------------------------------------------------------------


def test_http_that_does_nothing_for_a_minute_of_looks_is_stuck(serve: Serve) -> None:
    running, held = serve(), threading.Event()
    running._loop.call_soon_threadsafe(held.wait)
    try:
        at_once = [running.is_stuck(1000.0 + look) for look in range(0, 59, 5)]
        later = [running.is_stuck(1000.0 + look) for look in range(60, 75, 5)]
    finally:
        held.set()
    until(lambda: running._answered == running._asked)

    assert (any(at_once), all(later)) == (False, True)
    assert not running.is_stuck(2000.0)


def test_http_is_asked_now_and_then_whether_it_does_something(serve: Serve) -> None:
    running = serve()
    asked = []
    for look in range(0, 50, 5):
        assert not running.is_stuck(1000.0 + look)
        until(lambda: running._answered == running._asked)
        asked.append(running._asked)

    assert asked == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]


def test_http_that_was_stopped_with_us_or_is_asked_very_often_is_not_stuck(serve: Serve) -> None:
    running, held = serve(), threading.Event()
    running._loop.call_soon_threadsafe(held.wait)
    try:
        often = [running.is_stuck(1000.0 + look / 10) for look in range(590)]
    finally:
        held.set()
    until(lambda: running._answered == running._asked)

    assert not any(often)
    assert [running.is_stuck(1000.0), running.is_stuck(1600.0)] == [False, False]


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
        (CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n", 400),  # where it ends is told in two ways
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n" + b"Content-Length: 6\r\n\r\nabcdef", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\nabcde", 400),
        (CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n", 400),  # who speaks 1.0 does not know of chunks
        (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n0\r\n\r\n", 501),
        (CHUNKED + b"\r\n5\r\nabcdefgh\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\rX: y\r\n\r\n", 400),  # a bare CR
        (b"GET / HTTP/1.1\r\nHost: x\r\nX : y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n X: y\r\nHost: x\r\n\r\n", 400),  # goes on from no header
        (b"GET /metrics\r\n\r\n", 400),  # HTTP/0.9
        (b"GET /metrics x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET\t/metrics\tHTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1_0\r\n\r\n0123456789", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0xA\r\n\r\n0123456789", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (CHUNKED.replace(b"chunked", b"xchunked") + b"\r\n0\r\n\r\n", 501),
        (CHUNKED.replace(b"chunked", b"\x0bchunked") + b"\r\n0\r\n\r\n", 400),
        (CHUNKED + CHUNKED.splitlines()[2] + b"\r\n\r\n0\r\n\r\n", 501),
        (CHUNKED + b"\r\n3\r\nabcXX0\r\n\r\n", 400),
        (CHUNKED + b"\r\n3;\nxx\r\nabc\r\n0\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
)
def test_what_is_no_fair_request_is_refused_and_closed(
    serve: Serve, sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    running = serve()
    with connect(running) as client:
        client.sendall(sent)

        answer = client.recv(4096)

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"Connection: close" in answer
    assert ask(running)[0] == 200
    assert not caplog.records, "a client's trouble is its own"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /metrics HTTP/1.0\r\n\r\n",
        b"GET http://other:1/metrics?a=b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3, 3\r\n\r\nabc",
        CHUNKED.replace(b"POST /", b"GET /metrics") + b"Connection: close\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"GET /metrics HTTP/1.1\nHost: x\nConnection: close\n\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: y\r\n z\r\n\r\n",
        b"GET /%6detrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Encoding: gzip\r\n"
        b"Content-Length: 9\r\n\r\n\x1f\x8b\x08bombs!",
    ],
    ids=[
        "1.0",
        "as to a proxy",
        "body of GET",
        "one length twice",
        "chunks",
        "bare LF",
        "a header on two lines",
        "percent",
        "HTTP/2 is offered",
        "a body is never unpacked",
    ],
)
def test_what_is_unusual_and_can_be_read_in_one_way_only_is_answered_once(serve: Serve, sent: bytes) -> None:
    """The silent twin."""
    with connect(serve()) as client:
        client.sendall(sent)

        answer = until_closed(client)

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\nstallwatch_servers{" in answer


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("CONNECT", "other:443", 404),
        ("OPTIONS", "*", 404),
        ("OPTIONS", "/metrics", 405),
        ("TRACE", "/metrics", 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%00%0d%0aX:%20y%ff", 404),
        ("GET", "http://other", 200),
        ("GET", "https://other?x", 200),
        ("GET", "http:///live", 200),
    ],
)
def test_what_is_asked_for_as_if_we_were_something_else(serve: Serve, method: str, target: str, status: int) -> None:
    with connect(serve()) as client:
        client.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        client.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

        answer = until_closed(client)

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1 ") == 2
    assert answer.endswith(b"stallwatch is healthy\n")
    assert b"\nX: y" not in answer


@pytest.mark.parametrize("number", [1, 3])
def test_a_client_that_says_it_has_sent_all_gets_its_answers(serve: Serve, number: int) -> None:
    with connect(serve(deadlines=Deadlines(keep_alive=60.0))) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * number)
        client.shutdown(socket.SHUT_WR)

        answer = until_closed(client)

    assert answer.count(b"HTTP/1.1 200 ") == number
    assert answer.count(answer[-1000:]) == number, "each is whole"


def test_clients_that_reset_leave_nothing_behind(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    running = serve()
    assert ask(running)[0] == 200
    until(lambda: len(running._clients._crowds) == 0)  # the one that asked is gone, and none of the 90 has come
    gc.collect()  # what other tests left would make room for what is looked for here
    before = len(list(Path("/proc/self/fd").iterdir()))
    for sent in (b"", b"GET /metrics HTTP/1.1\r\nHost", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") * 30:
        with connect(running) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(sent)

    until(lambda: len(running._clients._crowds) == 0)

    assert ask(running)[0] == 200
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
    assert not caplog.records


def test_a_body_in_a_thousand_pieces_takes_turns(serve: Serve) -> None:
    """Otherwise one client's 16 KiB would take as long as fifty scrapes."""
    running = serve()
    put = running._clients.turns.put
    acts: list[str] = []

    def counted(act: Callable[[], None], address: str = "", is_calm: bool = False) -> None:
        acts.append(address)
        put(act, address, is_calm)

    running._clients.turns.put = counted  # type: ignore[method-assign]
    pieces = b"1\r\nx\r\n" * 1000
    with connect(running) as client:
        client.sendall(CHUNKED.replace(b"POST /", b"GET /metrics") + b"Connection: close\r\n\r\n" + pieces)
        client.sendall(b"0\r\n\r\n")

        assert until_closed(client).startswith(b"HTTP/1.1 200 ")

    assert len(acts) > 15


def test_of_a_wish_without_end_the_beginning_is_looked_at() -> None:
    assert len(qualities(",".join(f"x/{number}" for number in range(5000)))) == MOST_WISHES
    assert qualities("text/plain;q=0.5" + ";a=b" * 5000) == {"text/plain": 0.5}
    assert qualities(", ".join(f"x/{number};q=0.1" for number in range(20)))["x/19"] == 0.1


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"], ids=["of the same address", "of another"])
def test_who_keeps_a_connection_keeps_it_among_half_requests_without_number(serve: Serve, source: str) -> None:
    room = Shares(connections=10, accepted=10, threads=0, members=0)
    running = serve(room=room)
    request = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
    with contextlib.ExitStack() as clients:
        scraper = clients.enter_context(connect(running))
        scraper.sendall(request)
        assert scraper.recv(4096).endswith(b"healthy\n")
        slow = [clients.enter_context(connect(running, source=source)) for _ in range(30)]
        for client in slow:
            with contextlib.suppress(OSError):  # it was put out
                client.sendall(b"GET")
        assert until_closed(slow[0]) == b""

        scraper.sendall(request)
        assert scraper.recv(4096).endswith(b"healthy\n")


def test_who_keeps_a_connection_keeps_it_while_others_elsewhere_keep_too_many(serve: Serve) -> None:
    running = serve(room=Shares(connections=10, accepted=10, threads=0, members=0))
    request = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
    with contextlib.ExitStack() as clients:
        scraper = clients.enter_context(connect(running))
        for number in range(21):
            client = clients.enter_context(connect(running, source="127.0.0.2")) if number else scraper
            client.sendall(request)
            assert client.recv(4096).endswith(b"healthy\n")

        scraper.sendall(request)

        assert scraper.recv(4096).endswith(b"healthy\n")


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
        (b"", Deadlines(0.05, 600.0, 600.0, 600.0)),
        (b"GET /metrics HTTP/1.1\r\nHost:", Deadlines(0.05, 600.0, 600.0, 600.0)),
        (b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n", Deadlines(60.0, 0.05, 600.0, 600.0)),
        (b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\nGET /", Deadlines(0.2, 600.0, 600.0, 600.0)),
    ],
)
def test_a_client_that_is_too_slow_is_closed(serve: Serve, sent: bytes, deadlines: Deadlines) -> None:
    """The other deadlines are longer than the client's own patience."""
    with connect(serve(deadlines=deadlines), timeout=30.0) as client:
        client.sendall(sent)

        assert until_closed(client).count(b"HTTP/1.1 200 ") == sent.count(b"\r\n\r\n")


def test_a_client_that_does_not_take_its_answer_is_closed(serve: Serve, report: Report, clock: Clock) -> None:
    big = Published(TICK, clock)
    big.publish(replace(report, readings=tuple(LEVEL.read(1.0, f"{n:0100}") for n in range(60_000))))
    running = serve(big, max_requests=1, deadlines=Deadlines(answer=0.3, untaken=60.0))
    with connect(running) as lazy:
        lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert lazy.recv(1) == b"H"

        until(lambda: ask(running)[0] == 200)

        assert len(until_closed(lazy)) < 6_000_000


@pytest.mark.parametrize(
    ("max_requests", "connections"), [(3, 20), (0, 3)], ids=["all that may be in flight", "all that may be open"]
)
def test_answers_that_nobody_takes_keep_nobody_out(
    serve: Serve, report: Report, clock: Clock, max_requests: int, connections: int
) -> None:
    """The one that has lain for longest goes; the others stay until their own deadline."""
    big = Published(TICK, clock)
    big.publish(replace(report, readings=tuple(LEVEL.read(1.0, f"{n:0100}") for n in range(60_000))))
    room = Shares(connections=connections, accepted=20, threads=0, members=0)
    running = serve(big, max_requests=max_requests, deadlines=Deadlines(untaken=0.0), room=room)
    with contextlib.ExitStack() as clients:
        lazy = [clients.enter_context(connect(running)) for _ in range(3)]
        for client in lazy:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(1) == b"H"

        assert [ask(running, Connection="close")[0] for _ in range(2)] == [
            200,
            200,
        ]  # the first is gone when the next comes

        taken = [until_closed(client).count(b"\nstallwatch_test_level{") for client in lazy]
    assert taken[0] < 60_000
    assert taken[1:] == [60_000, 60_000]


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
    running = serve(access=lambda: Access(ours))

    with connect(running) as raw, theirs.wrap_socket(raw, server_hostname="localhost") as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = until_closed(client)

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\nstallwatch_servers{" in answer


def test_more_requests_in_flight_than_allowed_are_refused(serve: Serve, report: Report, clock: Clock) -> None:
    """A client that is about to take its answer keeps its request in flight."""
    big = Published(TICK, clock)
    big.publish(replace(report, readings=tuple(LEVEL.read(1.0, f"{n:0100}") for n in range(60_000))))
    running = serve(big, max_requests=1, deadlines=Deadlines(untaken=60.0))
    with connect(running) as lazy:
        lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert lazy.recv(1) == b"H"

        status, _, body = ask(running)

        assert (status, body) == (503, b"more than 1 requests in flight\n")
        assert ask(running, "/-/healthy")[0] == 200
        assert ask(running, "/nothing")[0] == 404, "what the kernel takes at once is never in flight"
    assert ask(running, "/-/healthy")[0] == 200


def test_an_answer_that_is_taken_at_once_is_given_however_many_are_in_flight(
    serve: Serve, report: Report, clock: Clock
) -> None:
    """Here since it is small when it is packed."""
    big = Published(TICK, clock)
    big.publish(replace(report, readings=tuple(LEVEL.read(1.0, f"{n:0100}") for n in range(60_000))))
    running = serve(big, max_requests=1, deadlines=Deadlines(untaken=60.0))
    with connect(running) as lazy:
        lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert lazy.recv(1) == b"H"

        packed = ask(running, "/metrics", Accept_Encoding="gzip")

        assert packed[0] == 200
        assert gzip.decompress(packed[2]).count(b"\nstallwatch_test_level{") == 60_000
        assert ask(running)[0] == 503


def test_what_is_taken_at_once_is_half_of_a_buffer_less_what_lies_there() -> None:
    listening = listen("127.0.0.1:0")
    ours, theirs = socket.create_connection(listening.getsockname()), listening.accept()[0]
    half = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2

    assert takes_at_once(ours, half - 4096)
    assert not takes_at_once(ours, half)
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(b"x" * 65536)
    assert not takes_at_once(ours, 1)
    assert not takes_at_once(None, 1)
    for each in (ours, theirs, listening):
        each.close()


def test_of_requests_that_were_sent_ahead_one_is_answered_between_two_looks_at_all_clients() -> None:
    turns: list[Callable[[], None]] = []
    loop = SimpleNamespace(call_soon=turns.append)
    clients = Clients(None, None, 0, Deadlines(), loop, 10)  # type: ignore[arg-type]  # as much as is looked at
    answered: list[str] = []

    def eager(name: str, left: int) -> Callable[[], None]:
        def advance() -> None:
            answered.append(name)
            if left:
                clients.in_turn(eager(name, left - 1))

        return advance

    for name in "abc":
        clients.in_turn(eager(name, 2))
    looks = 0
    while turns:
        (turn,) = turns
        turns.clear()
        turn()
        looks += 1
        assert len(answered) == looks, "one at each look"

    assert "".join(answered) == "abcabcabc"


@pytest.mark.parametrize("number", [10, 5000])
def test_a_long_answer_is_kept_once_for_all_who_have_not_taken_it(
    serve: Serve, report: Report, clock: Clock, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Published(TICK, clock)
    published.publish(replace(report, readings=tuple(LEVEL.read(1.0, f"{n:0100}") for n in range(number))))
    running, written, write = serve(published), [], SocketWire.write

    def noted(wire: SocketWire, data: bytes) -> None:
        written.append(data)
        write(wire, data)

    monkeypatch.setattr(SocketWire, "write", noted)
    assert [ask(running)[2].count(b"\nstallwatch_test_level{") for _ in range(2)] == [number, number]

    assert len(written) == (4 if number == 5000 else 2)
    assert (written[-1] is written[len(written) // 2 - 1]) == (number == 5000)


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
