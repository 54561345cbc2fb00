"""`--web.config.file`: what is read, and who is let in, over real loopback sockets."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import bcrypt
import pytest

from certificates import NEW_KEY, Authority, Pair, authority, openssl, speaks
from stallwatch.descriptors import Shares
from stallwatch.model import Report
from stallwatch.strict_yaml import InputError
from stallwatch.web import Access, Deadlines, HttpServer, Published, Renewal, serve_http
from stallwatch.web.access import REFUSED, load_access
from stallwatch.web.addresses import split_address
from stallwatch.web.app import Request, Response
from stallwatch.web.connections import DEADLINES, Clients
from stallwatch.web.passwords import (
    CROWDED,
    MOST_OF_ONE,
    MOST_REMEMBERED,
    MOST_WAITING,
    UNAUTHORIZED,
    Doubt,
    Gate,
    basic_credentials,
    is_password,
)
from stallwatch.web.secure import Secure
from stallwatch.web.wire import SocketWire

HASH = bcrypt.hashpw(b"right", b"$2b$04$abcdefghijklmnopqrstuu").decode()
OTHER_HASH = bcrypt.hashpw(b"other", b"$2b$05$abcdefghijklmnopqrstuu").decode()
USERS = f"basic_auth_users: {{prometheus: {HASH}}}\n"
ASK = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def asking(authorization: str) -> bytes:
    return ASK.replace(b"Host", f"Authorization: {authorization}\r\nHost".encode())


@dataclasses.dataclass(frozen=True)
class Keys:
    """A folder with certificates: server.* and next.* by one authority, client.* too, stranger.* by another."""

    folder: Path
    authority: Authority
    client: Pair
    stranger: Pair


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    ours, theirs = authority(folder), authority(folder, "foreign")
    ours.sign("server")
    ours.sign("next")
    return Keys(folder, ours, ours.sign("client", "DNS:prometheus.example,IP:::1"), theirs.sign("stranger"))


@pytest.fixture
def write(tmp_path: Path, keys: Keys) -> Callable[[str], str]:
    """Writes web.yml next to copies of the certificates; returns its path."""
    shutil.copytree(keys.folder, tmp_path, dirs_exist_ok=True)

    def write(text: str) -> str:
        (tmp_path / "web.yml").write_text(text)
        return str(tmp_path / "web.yml")

    return write


def tls(*more: str) -> str:
    return "tls_server_config:\n" + "".join(
        f"  {line}\n" for line in ("cert_file: server.pem", "key_file: server.key", *more)
    )


CLIENTS = ("client_auth_type: RequireAndVerifyClientCert", "client_ca_file: authority.pem")


# --- the file ----------------------------------------------------------------------------------------------


def test_what_the_file_says_is_taken(write: Callable[[str], str]) -> None:
    access = load_access(
        write(
            tls("min_version: TLS13", *CLIENTS, "client_allowed_sans: ['0:0:0:0:0:0:0:1', node]")
            + "http_server_config: {http2: false, headers: {X-Frame-Options: deny, X-XSS-Protection: ''}}\n"
            + USERS
        )
    )

    assert access.tls is not None
    assert access.tls.minimum_version == ssl.TLSVersion.TLSv1_3
    assert access.tls.verify_mode == ssl.CERT_REQUIRED
    assert access.client_names == {"::1", "node"}
    assert access.headers == {"X-Frame-Options": "deny"}
    assert access.users == {"prometheus": HASH.encode()}
    assert {Path(file).name for file in access.seen} == {"web.yml", "server.pem", "server.key", "authority.pem"}


def test_an_empty_file_lets_everybody_in_as_the_toolkit_does(write: Callable[[str], str]) -> None:
    access = load_access(write(""))

    assert (access.tls, access.users, access.headers) == (None, {}, {})


def test_tls_1_2_is_the_least_unless_said_otherwise(write: Callable[[str], str]) -> None:
    access = load_access(write(tls()))

    assert access.tls is not None
    assert access.tls.minimum_version == ssl.TLSVersion.TLSv1_2
    assert access.tls.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_of_the_toolkit_that_is_not_there_is_refused_by_name(write: Callable[[str], str], key: str) -> None:
    section, _, name = key.rpartition(".")
    text = f"{section}:\n  {name}: x\n" if section else f"{name}: x\n"

    with pytest.raises(InputError, match=rf"web\.yml:{2 if section else 1}: {key}: not supported by stallwatch; "):
        load_access(write(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tls_config: {}\n", ":1: tls_config: unknown key; allowed are basic_auth_users, "),
        (tls("insecure: true"), ":4: tls_server_config.insecure: unknown key"),
        ("tls_server_config: {cert_file: server.pem}\n", ":1: tls_server_config.key_file: the key is required"),
        ("tls_server_config: {}\n", ":1: tls_server_config.cert_file: the key is required"),
        (tls("min_version: TLS11"), ":4: tls_server_config.min_version: 'TLS11' is unknown; allowed are TLS12, TLS13"),
        (tls("min_version: TLS13", "max_version: TLS12"), ":5: tls_server_config.max_version: is below min_version"),
        (
            tls("client_auth_type: RequireAnyClientCert"),
            ":4: tls_server_config.client_auth_type: 'RequireAnyClientCert'",
        ),
        (tls(CLIENTS[0]), ":4: tls_server_config.client_auth_type: RequireAndVerifyClientCert needs client_ca_file"),
        (tls(CLIENTS[1]), ":4: tls_server_config.client_ca_file: is of no use without client_auth_type"),
        (tls("client_allowed_sans: [node]"), ":4: tls_server_config.client_allowed_sans: needs names, and client_auth"),
        (tls(*CLIENTS, "client_allowed_sans: []"), ":6: tls_server_config.client_allowed_sans: needs names"),
        (tls(CLIENTS[0], "client_ca_file: server.key"), ":5: tls_server_config.client_ca_file: holds no certificate"),
        (
            tls().replace("server.key", "next.key"),
            ":3: tls_server_config.key_file: is not the key of the certificate in cert_file",
        ),
        (tls().replace("server.pem", "web.yml"), ":2: tls_server_config.cert_file: no certificate with a key"),
        (tls().replace("server.pem", "gone.pem"), ":2: tls_server_config.cert_file: cannot be read: No such file"),
        ("http_server_config: {http2: true}\n", ":1: http_server_config.http2: HTTP/2 is not spoken"),
        ("http_server_config: {headers: {Server: x}}\n", ":1: http_server_config.headers.Server: unknown key"),
        (
            "http_server_config: {headers: {X-Frame-Options: allow}}\n",
            ":1: http_server_config.headers.X-Frame-Options: 'allow' is unknown; allowed are deny, sameorigin",
        ),
        (
            'http_server_config: {headers: {X-XSS-Protection: "0\\r\\nSet-Cookie: a"}}\n',
            ":1: http_server_config.headers.X-XSS-Protection: printable ASCII on one line is needed",
        ),
        ("basic_auth_users: {a: hunter2}\n", ":1: basic_auth_users.a: no bcrypt hash is given"),
        (
            f"basic_auth_users: {{a: {HASH.replace('$04$', '$17$')}}}\n",
            ":1: basic_auth_users.a: a cost of 17 takes too",
        ),
        (f"basic_auth_users:\n  a: {HASH}\n  a: {HASH}\n", ":3: basic_auth_users.a: the key is given twice"),
    ],
)
def test_a_mistake_is_named_with_line_and_key(write: Callable[[str], str], text: str, expected: str) -> None:
    file = write(text)
    with pytest.raises(InputError) as caught:
        load_access(file)

    assert str(caught.value).startswith(file + expected)
    assert "hunter2" not in str(caught.value)
    assert HASH[10:] not in str(caught.value)


def test_an_encrypted_key_is_refused_instead_of_asking_at_the_terminal(write: Callable[[str], str]) -> None:
    file = write(tls())
    folder = Path(file).parent
    plain, secret = folder / "server.key", folder / "encrypted.key"
    openssl("pkey", "-in", plain, "-aes256", "-passout", "pass:secret", "-out", secret)
    secret.replace(plain)

    with pytest.raises(InputError, match="no certificate with a key that is not encrypted"):
        load_access(file)


# --- reading it again --------------------------------------------------------------------------------------


def test_a_change_of_the_users_is_taken_without_a_restart(write: Callable[[str], str]) -> None:
    file = write(USERS)
    renewal = Renewal(file)
    before = renewal.access
    assert renewal.look() is None
    assert renewal.access is before

    write(f"basic_auth_users: {{prometheus: {OTHER_HASH}}}\n")

    assert renewal.look() is None
    assert renewal.current().users == {"prometheus": OTHER_HASH.encode()}


def test_a_certificate_is_taken_once_its_key_is_there(
    write: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """Files change one after the other: in between the pair does not fit, and the old one serves on."""
    folder = Path(write(tls())).parent
    renewal = Renewal(str(folder / "web.yml"))
    before = renewal.access

    (folder / "next.pem").replace(folder / "server.pem")
    problems = [renewal.look(), renewal.look()]
    assert renewal.access is before
    (folder / "next.key").replace(folder / "server.key")

    assert renewal.look() is None
    assert renewal.access.tls is not before.tls
    assert [str(problem).partition(": ")[2] for problem in problems] == [
        "tls_server_config.key_file: is not the key of the certificate in cert_file"
    ] * 2
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "web configuration not reloaded"
    ]


@pytest.mark.parametrize(
    ("left", "lost"),
    [
        ("", "tls_server_config"),
        (tls(*CLIENTS), "basic_auth_users"),
        (USERS, "tls_server_config"),
        (tls() + USERS, "client_auth_type"),
    ],
)
def test_protection_is_not_taken_away_by_a_file_that_is_half_written(
    write: Callable[[str], str], left: str, lost: str
) -> None:
    renewal = Renewal(write(tls(*CLIENTS) + USERS))
    before = renewal.access
    write(left)

    assert f"{lost}: is taken away; that needs a restart" in str(renewal.look())
    assert renewal.access is before


def test_protection_may_be_added_without_a_restart(write: Callable[[str], str]) -> None:
    renewal = Renewal(write(""))
    write(tls(*CLIENTS) + USERS)

    assert renewal.look() is None
    assert renewal.access.tls is not None


# --- passwords ---------------------------------------------------------------------------------------------


class Checks:
    """A Gate whose answers are taken when `turn` is called, as the HTTP loop would."""

    def __init__(self, **users: str) -> None:
        self.access = Access(users={user: hashed.encode() for user, hashed in users.items()})
        self._due: list[Callable[[], None]] = []
        self.gate = Gate(lambda: self.access, self._due.append)
        self.said: list[Response | None] = []

    def judge(self, user: str, password: str) -> Response | Doubt | None:
        return self.gate.judge(Request("GET", "/", {"authorization": basic(user, password)}))

    def ask(self, user: str, password: str, address: str = "") -> None:
        judged = self.judge(user, password)
        if isinstance(judged, Doubt):
            self.gate.settle(judged, self.said.append, address)
        else:
            self.said.append(judged)

    def turn(self, count: int) -> list[Response | None]:
        """Wait until `count` passwords were checked; everything that was answered so far."""
        end = time.monotonic() + 60
        while len(self._due) < count:
            assert time.monotonic() < end
            time.sleep(0.001)
        for each in self._due:
            each()
        self._due.clear()
        return self.said


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (basic("a", "b:c"), ("a", b"b:c")),
        ("basic  " + base64.b64encode(b"a:").decode(), ("a", b"")),
        ("Bearer abc", None),
        ("Basic", None),
        ("Basic !!!", None),
        ("Basic " + base64.b64encode(b"no colon").decode(), None),
        ("Basic " + base64.b64encode(b"\xff:x").decode(), None),
        ("", None),
    ],
)
def test_credentials_are_read(header: str, expected: tuple[str, bytes] | None) -> None:
    assert basic_credentials(header) == expected


def test_without_users_nobody_is_asked() -> None:
    assert Checks().judge("anybody", "x") is None


def test_a_right_password_is_checked_once_and_then_known() -> None:
    checks = Checks(prometheus=HASH)
    checks.ask("prometheus", "right")

    assert checks.turn(1) == [None]
    assert checks.judge("prometheus", "right") is None
    assert checks.gate.waiting == 0


def test_a_wrong_password_is_refused_and_checked_each_time() -> None:
    checks = Checks(prometheus=HASH)
    for _ in range(2):
        checks.ask("prometheus", "wrong")
        checks.turn(1)

    assert checks.said == [UNAUTHORIZED, UNAUTHORIZED]
    assert isinstance(checks.judge("prometheus", "wrong"), Doubt)


def test_an_unknown_user_costs_what_a_known_one_costs_and_never_comes_in() -> None:
    checks = Checks(cheap=HASH, dear=OTHER_HASH)
    doubt = checks.judge("nobody", "other")
    assert isinstance(doubt, Doubt)

    checks.ask("nobody", "other")

    assert doubt.hash == OTHER_HASH.encode()  # the costliest; its password is right, and of no use
    assert checks.turn(1) == [UNAUTHORIZED]
    assert isinstance(checks.judge("nobody", "other"), Doubt)


def test_a_password_of_one_user_is_none_of_another() -> None:
    checks = Checks(a=HASH, b=OTHER_HASH)
    checks.ask("a", "right")
    checks.turn(1)

    checks.ask("b", "right")

    assert checks.turn(1) == [None, UNAUTHORIZED]


def test_a_changed_hash_ends_what_was_known() -> None:
    checks = Checks(a=HASH)
    checks.ask("a", "right")
    checks.turn(1)

    checks.access = Access(users={"a": OTHER_HASH.encode()})
    checks.ask("a", "right")

    assert checks.turn(1) == [None, UNAUTHORIZED]


def test_the_same_password_of_many_clients_is_checked_once() -> None:
    """200 scrapes at once after a start."""
    checks = Checks(a=HASH)
    for _ in range(200):
        checks.ask("a", "right")
    assert checks.gate.waiting == 200

    assert checks.turn(1) == [None] * 200


def test_guesses_wait_in_a_bounded_queue_and_push_nobody_out() -> None:
    checks = Checks(a=HASH)
    checks.ask("a", "right")
    checks.turn(1)
    checks.said.clear()

    for number in range(MOST_REMEMBERED + MOST_WAITING):
        checks.ask("a", f"guess {number}")
    refused = checks.said.count(CROWDED)

    assert refused == MOST_REMEMBERED
    assert checks.judge("a", "right") is None
    assert checks.turn(MOST_WAITING).count(UNAUTHORIZED) == MOST_WAITING


def test_guesses_from_one_address_leave_room_for_a_scraper_at_another() -> None:
    checks = Checks(a=HASH)
    for number in range(MOST_WAITING):
        checks.ask("a", f"guess {number}", "10.6.6.6")
    assert checks.said.count(CROWDED) == MOST_WAITING - MOST_OF_ONE
    checks.said.clear()

    checks.ask("a", "right", "10.0.0.1")

    assert checks.said == []
    assert checks.turn(MOST_OF_ONE + 1) == [UNAUTHORIZED] * MOST_OF_ONE + [None]
    checks.said.clear()
    checks.ask("a", "one more", "10.6.6.6")
    assert checks.turn(1) == [UNAUTHORIZED], "those that were checked count no more"


def test_a_password_for_which_no_thread_can_be_started_is_asked_for_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = Checks(prometheus=HASH)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        checks.ask("prometheus", "right")
        assert [answer.status if answer else None for answer in checks.said] == [503]
    checks.ask("prometheus", "right")

    assert checks.turn(1)[1:] == [None]
    assert checks.gate.waiting == 0


def test_of_a_password_72_bytes_count_as_bcrypt_has_it() -> None:
    long = "x" * 80
    hashed = bcrypt.hashpw(long.encode()[:72], bcrypt.gensalt(4)).decode()
    checks = Checks(a=hashed)
    checks.ask("a", long)
    checks.ask("a", "x" * 71)

    assert checks.turn(2) == [None, UNAUTHORIZED]


def test_a_hash_that_only_looks_like_one_lets_nobody_in() -> None:
    hashed = ("$2b$04$" + "!" * 53).encode()

    assert not is_password(Doubt(b"", hashed, b"x", is_known=True))


# --- over sockets ------------------------------------------------------------------------------------------


Serve = Callable[..., HttpServer]


@pytest.fixture
def serve(report: Report) -> Iterator[Serve]:
    started: list[HttpServer] = []

    def start(access: Callable[[], Access], **settings: object) -> HttpServer:
        published = Published(5.0, lambda: report.monotonic)
        published.publish(report)
        started.append(serve_http(published, ["127.0.0.1:0"], access=access, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.stop()


def connect(running: HttpServer) -> socket.socket:
    return socket.create_connection(split_address(running.addresses[0]), timeout=60)


def answer_of(client: socket.socket) -> str:
    received = b""
    with contextlib.suppress(ConnectionResetError, ssl.SSLError):
        while chunk := client.recv(65536):
            received += chunk
    return received.decode()


def ask(running: HttpServer, authorization: str = "") -> str:
    """The whole answer over plain HTTP."""
    with connect(running) as client:
        client.sendall(asking(authorization))
        return answer_of(client)


def ask_secure(running: HttpServer, context: ssl.SSLContext) -> str:
    """The whole answer over TLS; "" when there is none."""
    refused = contextlib.suppress(ssl.SSLError, ConnectionResetError)
    with refused, connect(running) as raw, context.wrap_socket(raw, server_hostname="localhost") as client:
        client.sendall(ASK)
        return answer_of(client)
    return ""


def test_who_has_no_password_gets_401_for_every_path(serve: Serve) -> None:
    running = serve(lambda: Access(users={"prometheus": HASH.encode()}, headers={"X-Frame-Options": "deny"}))

    without, wrong = ask(running), ask(running, basic("prometheus", "wrong"))
    right = ask(running, basic("prometheus", "right"))

    for refused in (without, wrong):
        assert refused.startswith("HTTP/1.1 401 ")
        assert 'WWW-Authenticate: Basic realm="stallwatch"\r\n' in refused
    assert right.startswith("HTTP/1.1 200 ")
    assert "X-Frame-Options: deny\r\n" in right


def test_configured_headers_replace_ours(serve: Serve) -> None:
    running = serve(lambda: Access(headers={"Content-Security-Policy": "default-src 'self'"}))
    with connect(running) as client:
        client.sendall(ASK.replace(b"/-/healthy", b"/"))
        answer = answer_of(client)

    assert answer.count("Content-Security-Policy:") == 1
    assert "Content-Security-Policy: default-src 'self'\r\n" in answer


def test_guesses_do_not_count_as_requests_in_flight(serve: Serve) -> None:
    """The costliest hash allowed is being computed while a scrape comes: the only one that is allowed at once."""
    users = {"prometheus": HASH.encode(), "slow": HASH.replace("$04$", "$14$").encode()}
    running = serve(lambda: Access(users=users), max_requests=1)
    assert ask(running, basic("prometheus", "right")).startswith("HTTP/1.1 200 ")
    scrape = asking(basic("prometheus", "right")).replace(b"/-/healthy", b"/metrics")

    with contextlib.ExitStack() as clients:
        for number in range(3):
            guess = clients.enter_context(connect(running))
            guess.sendall(asking(basic("slow", f"guess {number}")))
        with connect(running) as honest:
            honest.sendall(scrape)
            answer = answer_of(honest)

    assert answer.startswith("HTTP/1.1 200 ")


def test_a_new_certificate_serves_new_clients_while_the_old_ones_go_on(
    serve: Serve, write: Callable[[str], str], keys: Keys
) -> None:
    folder = Path(write(tls())).parent
    renewal = Renewal(str(folder / "web.yml"))
    running = serve(renewal.current)
    context = keys.authority.client()

    with connect(running) as raw, context.wrap_socket(raw, server_hostname="localhost") as old:
        old.sendall(ASK.replace(b"close", b"keep-alive"))
        assert old.recv(15) == b"HTTP/1.1 200 OK"
        for kind in ("pem", "key"):
            (folder / f"next.{kind}").replace(folder / f"server.{kind}")
        assert renewal.look() is None

        with connect(running) as second, context.wrap_socket(second, server_hostname="localhost") as new:
            subjects = [dict(client.getpeercert()["subject"][0]) for client in (old, new)]  # type: ignore[index, arg-type]
        old.sendall(ASK)
        rest = answer_of(old)

    assert [subject["commonName"] for subject in subjects] == ["server", "next"]
    assert rest.count("stallwatch is healthy") == 2


@pytest.mark.parametrize(
    ("more", "spoken"),
    [
        ((), {"tls1_2", "tls1_3"}),
        (("min_version: TLS13",), {"tls1_3"}),
        (("max_version: TLS12",), {"tls1_2"}),
    ],
)
def test_versions_of_tls(serve: Serve, write: Callable[[str], str], more: tuple[str, ...], spoken: set[str]) -> None:
    running = serve(Renewal(write(tls(*more))).current)

    assert {v for v in ("tls1", "tls1_1", "tls1_2", "tls1_3") if speaks(running.addresses[0], v)} == spoken


@pytest.mark.parametrize(
    ("more", "who", "is_let_in"),
    [
        ((), "client", True),
        ((), "stranger", False),
        ((), "", False),
        (("client_allowed_sans: [prometheus.example]",), "client", True),
        (("client_allowed_sans: ['::1']",), "client", True),
        (("client_allowed_sans: [other.example]",), "client", False),
    ],
)
def test_client_certificates(
    serve: Serve, write: Callable[[str], str], keys: Keys, more: tuple[str, ...], who: str, is_let_in: bool
) -> None:
    running = serve(Renewal(write(tls(*CLIENTS, *more))).current)
    own = {"client": keys.client, "stranger": keys.stranger, "": None}[who]

    answer = ask_secure(running, keys.authority.client(own))

    assert answer.startswith("HTTP/1.1 200 ") is is_let_in
    assert bool(answer) is is_let_in


def test_a_certificate_that_has_expired_lets_nobody_in(
    serve: Serve, write: Callable[[str], str], keys: Keys, tmp_path: Path
) -> None:
    expired, key, asks = tmp_path / "expired.pem", tmp_path / "expired.key", tmp_path / "expired.csr"
    openssl("req", *NEW_KEY.split(), "-subj", "/CN=client", "-keyout", key, "-out", asks)
    signed_by = ("-CA", keys.authority.certificate, "-CAkey", keys.authority.key)
    running = serve(Renewal(write(tls(*CLIENTS))).current)
    answers = []
    for days in (-1, 1):
        openssl("x509", "-req", "-in", asks, *signed_by, "-days", days, "-out", expired)
        answers.append(ask_secure(running, keys.authority.client(Pair(expired, key))))

    assert [bool(answer) for answer in answers] == [False, True]


def test_nobody_may_begin_the_handshake_anew(serve: Serve, write: Callable[[str], str]) -> None:
    running = serve(Renewal(write(tls())).current)
    program = shutil.which("openssl")
    assert program is not None
    command = [program, "s_client", "-connect", running.addresses[0], "-tls1_2"]
    done = subprocess.run(command, input=b"R\n", capture_output=True, timeout=600, check=False)

    assert b"RENEGOTIATING" in done.stdout + done.stderr
    assert b"no renegotiation" in done.stderr


def test_no_ticket_is_given_that_nobody_uses(serve: Serve, write: Callable[[str], str], keys: Keys) -> None:
    """Of TLS 1.3; one of TLS 1.2 spares us to keep the session."""
    running = serve(Renewal(write(tls())).current)
    with connect(running) as raw, keys.authority.client().wrap_socket(raw, server_hostname="localhost") as client:
        client.sendall(ASK)
        assert client.recv(15) == b"HTTP/1.1 200 OK"

        assert client.version() == "TLSv1.3"
        assert client.session is None or not client.session.has_ticket


def test_a_password_of_10_megabytes_is_neither_kept_nor_told(
    serve: Serve, write: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    running = serve(Renewal(write(USERS)).current)
    with connect(running) as client:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(asking(basic("prometheus", "secret" * 2_000_000)))
        answer = answer_of(client)

    assert answer[:13] in ("HTTP/1.1 431 ", "")
    assert ask(running, basic("prometheus", "right")).startswith("HTTP/1.1 200 ")
    assert not caplog.records


def test_a_certificate_of_a_client_is_checked_only_if_given_where_that_is_asked_for(
    serve: Serve, write: Callable[[str], str], keys: Keys
) -> None:
    running = serve(Renewal(write(tls("client_auth_type: VerifyClientCertIfGiven", CLIENTS[1]))).current)

    answers = [ask_secure(running, keys.authority.client(own)) for own in (None, keys.client, keys.stranger)]

    assert [bool(answer) for answer in answers] == [True, True, False]


def test_a_request_in_the_packet_that_ends_the_handshake_is_answered(
    serve: Serve, write: Callable[[str], str], keys: Keys
) -> None:
    running = serve(Renewal(write(tls())).current)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    shaking = keys.authority.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with connect(running) as client:
        while True:
            try:
                shaking.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.sendall(outgoing.read())
                incoming.write(client.recv(65536))
        shaking.write(ASK)
        client.sendall(outgoing.read())
        answer = b""
        while not answer:
            incoming.write(client.recv(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer = shaking.read(65536)

    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("is_secure", [True, False], ids=["TLS", "plain"])
def test_requests_sent_ahead_of_a_half_close_are_all_answered(
    serve: Serve, write: Callable[[str], str], keys: Keys, is_secure: bool
) -> None:
    """The end of what a client sends may be here before the requests before it were looked at."""
    running = serve(Renewal(write(tls() if is_secure else "")).current)
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connect(running)) for _ in range(5)]
        if is_secure:
            context = keys.authority.client()
            clients = [opened.enter_context(context.wrap_socket(each, server_hostname="localhost")) for each in clients]
        for client in clients:
            for _ in range(20):
                client.sendall(ASK.replace(b"Connection: close\r\n", b""))
            socket.socket.shutdown(client, socket.SHUT_WR)
        answers = [answer_of(client).count("HTTP/1.1 200 ") for client in clients]

    assert answers == [20] * 5


class Heard:
    """Stands for the socket's wire and for the other clients: keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.turns: list[Callable[[], None]] = []
        self.loop, self.deadlines = SimpleNamespace(call_later=lambda *_: None), DEADLINES

    def wait(self, client: object) -> None: ...
    def leave(self, client: object) -> None: ...
    def is_closing(self) -> bool:
        return False

    def in_turn(self, act: Callable[[], None], address: str) -> None:
        self.turns.append(act)

    def pause_reading(self) -> None:
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.told.append("resume")


@pytest.mark.parametrize(("is_paused", "first"), [(True, ["pause"]), (False, ["resume"])], ids=["paused", "never"])
def test_the_socket_is_read_on_only_behind_what_came_before_the_pause(
    write: Callable[[str], str], is_paused: bool, first: list[str]
) -> None:
    heard, context = Heard(), load_access(write(tls())).tls
    assert context is not None
    secure = Secure(cast("Clients", heard), Access(), context, "")
    secure.take(cast("SocketWire", heard))
    if is_paused:
        secure.pause_reading()

    secure.resume_reading()
    before = list(heard.told)
    for act in heard.turns:
        act()

    assert (before, heard.told[-1], len(heard.turns)) == (first, "resume", int(is_paused))


def test_clients_that_never_end_their_handshake_keep_no_honest_one_out(
    serve: Serve, write: Callable[[str], str], keys: Keys
) -> None:
    room = Shares(connections=10, accepted=40, threads=0, members=0)
    running = serve(Renewal(write(tls())).current, room=room)
    with contextlib.ExitStack() as clients:
        slow = [clients.enter_context(connect(running)) for _ in range(30)]
        for client in slow[20:]:
            client.sendall(b"\x16\x03\x01\x02\x00\x01\x00")

        assert ask_secure(running, keys.authority.client()).startswith("HTTP/1.1 200 ")
        assert answer_of(slow[0]) == ""


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_handshake_that_does_not_come_is_closed(serve: Serve, write: Callable[[str], str], sent: bytes) -> None:
    running = serve(Renewal(write(tls())).current, deadlines=Deadlines(request=0.05))
    with connect(running) as client:
        client.sendall(sent)

        assert not answer_of(client).startswith("HTTP")


def test_stopping_ends_a_handshake(serve: Serve, write: Callable[[str], str]) -> None:
    running = serve(Renewal(write(tls())).current)
    with connect(running) as client:
        client.sendall(b"\x16\x03\x01")

        running.stop()

        assert answer_of(client) == ""
    assert not running.is_running
