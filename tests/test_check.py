"""`check`: asks a `serve` on the loopback, else looks itself; exit codes 0, 1 and 3."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from certificates import authority
from stallwatch.assembly import Settings
from stallwatch.check import Peer, check, fetch, watch
from stallwatch.config import Config
from stallwatch.model import Report, Verdict
from stallwatch.presentation import document
from stallwatch.strict_yaml import InputError
from stallwatch.web import Access, Published, serve_http

NOBODY = Settings(collectors=())
"""Looking ourselves sees nothing with no collector: fast, and the same on every machine."""

Answer = tuple[int, bytes]
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a tiny HTTP server on the loopback that gives one answer; returns its URL."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes, path: str = "/api/v1/report") -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == path else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                """Not to stderr."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def closed() -> str:
    """A URL at which nobody listens: the port was ours until a moment ago."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_address[1]
    return f"http://127.0.0.1:{port}"


def body(report: Report) -> bytes:
    return json.dumps(document(report)).encode()


def in_state(report: Report, *states: str) -> Report:
    """The report with as many servers as states."""
    one = report.servers[1]
    servers = [
        replace(one, server=replace(one.server, name=f"s{number}"), verdict=Verdict(state, "none", 1.0))
        for number, state in enumerate(states)
    ]
    return replace(report, servers=tuple(servers))


# --- the report of a running serve -------------------------------------------------------------------------


def test_the_report_of_a_running_serve_is_printed(
    serve: Serve, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    code = check(NOBODY, Peer(serve(200, body(report))), 0.0, None, "text")

    out, err = capsys.readouterr()
    assert code == 1
    assert "sglang-8000  stalled (idle_wait)" in out
    assert "vllm-8001" in out
    assert err.startswith("what the stallwatch serve at http://127.0.0.1:")


def test_json_is_the_document_itself(serve: Serve, report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    check(NOBODY, Peer(serve(200, body(report))), 0.0, None, "json")

    assert json.loads(capsys.readouterr().out) == json.loads(body(report))


def test_a_path_before_our_own_is_kept(serve: Serve, report: Report) -> None:
    url = serve(200, body(report), "/gpu/api/v1/report")

    assert fetch(Peer(url + "/gpu/")) is not None
    assert fetch(Peer(url)) is None


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (("stalled",), 1),
        (("failed",), 1),
        (("idle", "unknown", "failed"), 1),
        (("idle",), 0),
        (("working", "unknown"), 0),
        (("quiet", "suspect", "slow"), 0),
        (("unknown",), 3),
        (("gone", "unknown"), 3),
        ((), 3),
    ],
)
def test_the_exit_code_is_that_of_the_worst_server(
    serve: Serve, report: Report, states: tuple[str, ...], code: int
) -> None:
    assert check(NOBODY, Peer(serve(200, body(in_state(report, *states)))), 0.0, None, "text") == code


def test_only_the_named_server_counts(serve: Serve, report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(200, body(in_state(report, "stalled", "idle")))

    assert check(NOBODY, Peer(url), 0.0, "s1", "json") == 0
    assert [server["server"] for server in json.loads(capsys.readouterr().out)["servers"]] == ["s1"]
    assert check(NOBODY, Peer(url), 0.0, "s0", "json") == 1
    assert check(NOBODY, Peer(url), 0.0, "s7", "json") == 3


# --- nobody, or somebody else ------------------------------------------------------------------------------


def test_where_nobody_answers_we_look_ourselves_and_say_so(closed: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = check(NOBODY, Peer(closed), 0.0, None, "json")

    out, err = capsys.readouterr()
    assert code == 3
    assert json.loads(out)["servers"] == []
    assert err == f"no stallwatch serve at {closed}: watching for 0 s\n"


@pytest.mark.parametrize(
    "answer",
    [
        (503, b'{"schema": 1, "servers": []}'),
        (200, b"<html>hello</html>"),
        (200, b"\xff\xfe"),
        (200, b"[]"),
        (200, b'{"schema": 2, "servers": []}'),
        (200, b'{"schema": 1}'),
        (200, b'{"schema": 1, "servers": {}}'),
        (200, b'{"schema": 1, "servers": [{}]}'),
        (200, b'{"schema": 1, "servers": ["s"]}'),
        (302, b""),
    ],
)
def test_somebody_else_at_the_address_is_nobody(serve: Serve, answer: Answer) -> None:
    assert fetch(Peer(serve(*answer))) is None


@pytest.mark.parametrize("damage", ["ranks", "channels"])
def test_a_document_with_damaged_parts_is_nobodys(serve: Serve, report: Report, damage: str) -> None:
    found = document(report)
    found["servers"][0][damage] = [{"rank": "TP0", "channel": "log"}]

    assert fetch(Peer(serve(200, json.dumps(found).encode()))) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("state", "confused"), ("state", ["stalled"]), ("reason", {}), ("since", "x"), ("server", 5)],
    ids=lambda value: str(value)[:20],
)
def test_a_document_with_values_that_we_do_not_know_is_nobodys(
    serve: Serve, report: Report, key: str, value: object
) -> None:
    """Else `check` ends with a traceback, whose exit code means that a server is stalled."""
    found = document(report)
    found["servers"] *= 2
    found["servers"][0] = {**found["servers"][0], key: value}

    assert fetch(Peer(serve(200, json.dumps(found).encode()))) is None


def test_an_empty_report_of_a_serve_is_an_answer(serve: Serve) -> None:
    assert fetch(Peer(serve(200, b'{"schema": 1, "servers": []}'))) == {"schema": 1, "servers": []}


@pytest.mark.parametrize(
    "url", ["localhost", "ftp://localhost", "http://", "http://h:port", "http://[::1", "file:///x"]
)
def test_an_address_that_is_none_is_an_error(url: str) -> None:
    with pytest.raises(InputError) as wrong:
        fetch(Peer(url))

    assert str(wrong.value) == f"{url}: --url: an http:// or https:// address is needed"


@pytest.mark.parametrize("url", ["ftp://user:hunter2@h/x?hunter2", "user:hunter2@h", "ftp://a/b:hunter2@h#hunter2"])
def test_a_wrong_address_is_told_without_its_password(url: str) -> None:
    with pytest.raises(InputError) as wrong:
        fetch(Peer(url))

    assert str(wrong.value).endswith(": --url: an http:// or https:// address is needed")
    assert "hunter2" not in str(wrong.value)


# --- looking ourselves -------------------------------------------------------------------------------------


def test_the_watch_ends_after_its_time() -> None:
    """The sleep is the test's: it must be asked for no more than what is left."""
    asked: list[float] = []
    found = watch(NOBODY, Config(), 0.05, asked.append)

    assert found["servers"] == []
    assert asked != []
    assert max(asked) <= 0.05


def test_a_wrong_proc_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError) as wrong:
        watch(Settings(procfs=str(tmp_path)), Config(), 0.0)

    assert str(wrong.value).startswith(f"{tmp_path}: --path.procfs: is no /proc")


def test_a_wrong_configuration_is_said_although_a_serve_answers(serve: Serve, report: Report, tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("verdikt: {}\n")

    with pytest.raises(InputError, match=r"a\.yml:1: verdikt: unknown key"):
        check(Settings(config_file=str(file)), Peer(serve(200, body(report))), 0.0, None, "text")


# --- a serve that lets not everybody in --------------------------------------------------------------------


@pytest.fixture
def protected(tmp_path: Path, report: Report) -> Iterator[str]:
    """A real server with TLS and a password; returns its URL, and leaves ca.pem and password in the folder."""
    signer = authority(tmp_path)
    pair = signer.sign("server")
    signer.certificate.rename(tmp_path / "ca.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.certificate, pair.key)
    access = Access(tls=tls, users={"node": bcrypt.hashpw("pässword:1".encode(), bcrypt.gensalt(4))})
    (tmp_path / "password").write_text("node:pässword:1\n")
    published = Published(5.0, lambda: report.monotonic)
    published.publish(report)
    server = serve_http(published, ["127.0.0.1:0"], access=lambda: access)
    yield f"https://{server.addresses[0]}"
    server.stop()


def test_a_serve_with_tls_and_a_password_is_asked(protected: str, tmp_path: Path, report: Report) -> None:
    found = fetch(Peer(protected, str(tmp_path / "ca.pem"), str(tmp_path / "password")))

    assert found == json.loads(body(report))


@pytest.mark.parametrize(
    ("trusted", "password", "said"),
    [
        (True, None, "wants a user and a password: --password-file"),
        (True, "node:wrong", "wants a user and a password: --password-file"),
        (
            False,
            "node:pässword:1",
            "its certificate is not trusted (unable to get local issuer certificate): --ca-file",
        ),
    ],
)
def test_a_serve_that_does_not_let_us_in_is_said(
    protected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    trusted: bool,
    password: str | None,
    said: str,
) -> None:
    file = tmp_path / "given"
    file.write_text(password or "")

    found = fetch(Peer(protected, str(tmp_path / "ca.pem") if trusted else None, str(file) if password else None))

    assert found is None
    assert capsys.readouterr().err == f"stallwatch: {protected}: {said}\n"


@pytest.mark.parametrize(
    ("url", "password", "ca", "expected"),
    [
        ("http://far.example:10077", "a:b", None, "http://far.example:10077: --url: a password is sent to https://"),
        ("https://localhost", "no colon", None, "{folder}/password:1: --password-file: USER:PASSWORD is needed"),
        ("https://localhost", None, "nothing", "{folder}/ca: --ca-file: holds no certificate in PEM"),
        ("https://localhost", None, None, "{folder}/ca: --ca-file: cannot be read: No such file"),
    ],
)
def test_what_lets_us_in_is_checked_before_it_is_used(
    tmp_path: Path, url: str, password: str | None, ca: str | None, expected: str
) -> None:
    (tmp_path / "password").write_text(password or "a:b")
    if ca is not None:
        (tmp_path / "ca").write_text(ca)
    given = str(tmp_path / "password") if password else None

    with pytest.raises(InputError) as caught:
        fetch(Peer(url, None if password else str(tmp_path / "ca"), given))

    assert str(caught.value).startswith(expected.format(folder=tmp_path))
    assert "no colon" not in str(caught.value)
