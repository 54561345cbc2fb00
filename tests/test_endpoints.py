"""Real servers on loopback, each good or bad in one way; deadlines are a fraction of a second."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from far_mount import FarMount
from stallwatch.config import Config
from stallwatch.frameworks import Framework, load_frameworks
from stallwatch.model import (
    HealthTarget,
    Listener,
    Observation,
    Process,
    ProcessId,
    Reading,
    Scene,
    Server,
    Signal,
)
from stallwatch.signals import HEALTH_STATUS
from stallwatch.sources import Host, Moment
from stallwatch.sources.endpoints import ASK_AGAIN_EVERY, HEALTH_DURATION, Endpoints, MetricsPage, read_token

DEADLINE = 0.3
"""Where somebody is silent, so that it goes by."""
PATIENT = 60.0
"""Where everybody answers: the machine may be busy."""

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_running_by_state{engine="0"} 100
vllm:num_requests_waiting{engine="0",model_name="with } brace and \\"quote\\""} 0.0
vllm:num_requests_waiting_total{engine="0"} 100
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 1.5e+06
vllm:request_success_total{engine="0",finished_reason="stop"} 7
vllm:request_success_total{engine="0",finished_reason="length"} NaN
vllm:request_success_total{engine="0",finished_reason="abort"} 2 1700000000000
unrelated{x="y"} broken line that no parser would take
"""

PATIENCE = (DEADLINE, 10 * DEADLINE, 100 * DEADLINE)
"""Where one is silent and another answers: of a busy machine it is asked again, with more time."""

NAMES = {
    "requests_running": ("vllm:num_requests_running",),
    "requests_waiting": ("vllm:num_requests_waiting",),
    "generated_tokens": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "finished_requests": ("vllm:request_success_total",),
}


@dataclass(frozen=True)
class Kind:
    """As much of a Framework as `endpoints` looks at."""

    name: str = "vllm"
    default_endpoint: str = "health"
    endpoints: Mapping[str, str] = field(
        default_factory=lambda: {"health": "/health", "models": "/v1/models", "metrics": "/metrics"}
    )
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: NAMES)


def answer(status: int, body: bytes = b"", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", *more, "", ""]
    return "\r\n".join(lines).encode() + body


Behaviour = Callable[[socket.socket, bytes], None]


class Peer:
    """A server in threads: reads a request, then behaves.  `asked` holds the requests."""

    def __init__(self, behave: Behaviour, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[bytes] = []
        self.stop = threading.Event()
        self._behave, self._tls = behave, tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                thread = threading.Thread(target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(PATIENT)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                request = b""
                while b"\r\n\r\n" not in request and (data := connection.recv(65536)):
                    request += data
                self.asked.append(request)
                self._behave(connection, request)

    def close(self) -> None:
        """Stop, and wait for the ends of all conversations; may be called again."""
        self.stop.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(PATIENT)


Start = Callable[..., Peer]


def never(connection: socket.socket, request: bytes) -> None:
    """Do not answer; wait until the client closes."""
    connection.recv(1)


@pytest.fixture
def start() -> Iterator[Start]:
    peers: list[Peer] = []

    def start_peer(behave: Behaviour | bytes, tls: ssl.SSLContext | None = None) -> Peer:
        says = behave
        peers.append(Peer(says if callable(says) else lambda sock, _: sock.sendall(says), tls))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.close()


def server(name: str = "vllm-8000", ports: tuple[int, ...] = (), **more: object) -> Server:
    root = ProcessId(10, 1)
    made = Server(name, "vllm", "server", root, 0.0, (Process(root, "main"),), ports=ports)
    return replace(made, **more)  # type: ignore[arg-type]


def source(kind: Kind | None = None, deadline: float = PATIENT, proc: Path = Path("/proc")) -> Endpoints:
    frameworks = (cast(Framework, kind or Kind()),)
    return Endpoints(Host(Config(), frameworks, proc), deadline_seconds=deadline)


def scene_of(peers: Mapping[str, Peer], **more: object) -> Scene:
    servers = tuple(server(name, (peer.port,), **more) for name, peer in peers.items())
    listeners = tuple(Listener(name, peer.port, "127.0.0.1") for name, peer in peers.items())
    return Scene(servers, listeners=listeners)


def look(endpoints: Endpoints, scene: Scene) -> list[Observation]:
    return list(endpoints.read(scene, Moment(0.0, 0.0)))


UNASKED = {("health_timeouts_total", "health"): 0, ("health_timeouts_total", "metrics"): 0}
"""What is said of a server that nobody asks: its counters exist from 0."""


def values(seen: Sequence[Observation]) -> dict[tuple[str, ...], float | str | None]:
    """Readings by name and labels after the server; a missing one shows its reason.  Durations left out."""
    return {
        (item.signal.name, *item.labels[1:]): item.reason if item.value is None else item.value
        for item in seen
        if isinstance(item, Reading) and item.signal.name != "health_duration_seconds"
    }


def readings(seen: Sequence[Observation], signal: Signal) -> dict[str, Reading]:
    """The readings of one signal by server."""
    return {item.labels[0]: item for item in seen if isinstance(item, Reading) and item.signal is signal}


def health_of(behaviour: Behaviour | bytes, start: Start) -> tuple[float | str | None, float | str | None]:
    """Status (or the reason why there is none) and time-outs after one probe of the default endpoint."""
    seen = values(look(source(), scene_of({"vllm-8000": start(behaviour)}, metrics_enabled=False)))
    return seen["health_status", "health"], seen["health_timeouts_total", "health"]


def test_the_default_endpoint_and_the_servers_own_page_are_read(start: Start) -> None:
    def behave(connection: socket.socket, request: bytes) -> None:
        connection.sendall(answer(200, PAGE if b"GET /metrics " in request else b""))

    peer = start(behave)
    seen = look(source(), scene_of({"vllm-8000": peer}))

    assert values(seen) == {
        ("health_status", "health"): 200,
        ("health_status", "metrics"): 200,
        ("health_timeouts_total", "health"): 0,
        ("health_timeouts_total", "metrics"): 0,
        ("server_requests_running",): 7,
        ("server_requests_waiting",): 0,
        ("server_generated_tokens_total",): 1.5e6,
        ("server_finished_requests_total",): 9,
    }
    assert {request.split(b" ")[1] for request in peer.asked} == {b"/health", b"/metrics"}


def test_the_framework_names_the_endpoint(start: Start) -> None:
    peer = start(answer(401))

    seen = look(source(Kind(default_endpoint="models")), scene_of({"vllm-8000": peer}, metrics_enabled=False))

    assert values(seen)["health_status", "models"] == 401
    assert peer.asked[0].startswith(b"GET /v1/models HTTP/1.1\r\n")


def test_a_duration_comes_with_an_answer_only(start: Start) -> None:
    peers = {"good": start(answer(200)), "silent": start(never)}

    for deadline in PATIENCE:
        durations = readings(look(source(deadline=deadline), scene_of(peers, metrics_enabled=False)), HEALTH_DURATION)
        if durations:
            break

    assert list(durations) == ["good"]
    assert 0 < (durations["good"].value or 0) < deadline


@pytest.mark.parametrize("listeners", [(), (Listener("vllm-8000", 1, "", reachable=False),)])
def test_nothing_is_asked_before_the_server_listens_where_we_reach_it(
    listeners: tuple[Listener, ...], start: Start
) -> None:
    peer = start(answer(200))
    listeners = tuple(replace(listener, port=peer.port) for listener in listeners)

    seen = look(source(), Scene((server(ports=(peer.port,)),), listeners=listeners))

    assert values(seen) == UNASKED
    assert peer.asked == []


def test_only_the_servers_own_listener_is_asked(start: Start) -> None:
    peer = start(answer(200))

    seen = look(source(), Scene((server(),), listeners=(Listener("other", peer.port, "127.0.0.1"),)))

    assert (values(seen), peer.asked) == (UNASKED, [])


def test_among_several_unknown_ports_none_is_asked(start: Start) -> None:
    """One of them may be the store or the message queue of the ranks."""
    peers = [start(answer(200)), start(answer(200))]
    listeners = tuple(Listener("vllm-8000", peer.port, "127.0.0.1") for peer in peers)

    both = look(source(), Scene((server(),), listeners=listeners))
    one = look(source(), Scene((server(metrics_enabled=False),), listeners=listeners[:1]))

    assert values(both) == UNASKED
    assert values(one)["health_status", "health"] == 200


def test_a_second_known_port_is_asked_when_the_first_does_not_listen(start: Start) -> None:
    peer = start(answer(200))
    one = server(ports=(1, peer.port), metrics_enabled=False)

    seen = look(source(), Scene((one,), listeners=(Listener(one.name, peer.port, "127.0.0.1"),)))

    assert values(seen)["health_status", "health"] == 200


def test_a_server_that_never_answers_is_a_time_out_and_has_no_status(start: Start) -> None:
    silent = start(never)
    endpoints, scene = source(deadline=DEADLINE), scene_of({"vllm-8000": silent}, metrics_enabled=False)

    first, second = values(look(endpoints, scene)), values(look(endpoints, scene))

    assert first == {("health_status", "health"): "timeout", ("health_timeouts_total", "health"): 1}
    assert second["health_timeouts_total", "health"] == 2


def test_bytes_that_trickle_do_not_extend_the_deadline(start: Start) -> None:
    def trickle(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):  # a second at least: all of it would be an answer
            peer.stop.wait(0.001)
            connection.sendall(b"x")

    peer = start(trickle)

    seen = values(look(source(deadline=DEADLINE), scene_of({"vllm-8000": peer}, metrics_enabled=False)))

    assert seen["health_status", "health"] == "timeout"


def test_bytes_that_trickle_in_time_are_an_answer(start: Start) -> None:
    """The silent twin."""

    def trickle(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        for _ in range(10):
            peer.stop.wait(0.001)
            connection.sendall(b"x")

    peer = start(trickle)

    seen = values(look(source(), scene_of({"vllm-8000": peer}, metrics_enabled=False)))

    assert seen["health_status", "health"] == 200


def test_a_header_that_never_ends_is_an_error(start: Start) -> None:
    def endless(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"X-Y: z\r\n" * 20_000)

    assert health_of(endless, start) == ("error", 0)


def test_a_gigabyte_is_cut_and_the_status_stands(start: Start) -> None:
    sent: list[int] = []

    def flood(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
        for _ in range(1024):
            connection.sendall(b"x" * (1 << 20))
            sent.append(1)

    status, timeouts = health_of(flood, start)

    assert (status, timeouts) == (200, 0)
    assert len(sent) < 100


def test_a_redirect_is_reported_and_not_followed(start: Start) -> None:
    other = start(answer(200))

    status, _ = health_of(answer(302, b"", f"Location: http://127.0.0.1:{other.port}/"), start)

    assert status == 302
    assert other.asked == []


@pytest.mark.parametrize("says", [b"", b"220 smtp ready\r\n", b"\x00" * 100, b"HTTP/1.1 200"])
def test_garbage_and_a_closed_connection_are_errors_and_no_time_outs(says: bytes, start: Start) -> None:
    assert health_of(says, start) == ("error", 0)


def test_who_stopped_listening_meanwhile_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = int(gone.getsockname()[1])

    seen = look(source(), Scene((server(ports=(port,)),), listeners=(Listener("vllm-8000", port, "127.0.0.1"),)))

    assert values(seen) == {
        ("health_timeouts_total", "health"): 0,
        ("health_timeouts_total", "metrics"): 0,
    }


def test_many_bad_servers_cost_one_deadline_and_leave_nothing_behind(start: Start) -> None:
    """All wait at the same time, so that the deadline goes by once."""
    began: list[int] = []
    ended: list[tuple[bytes, int]] = []

    def wait(connection: socket.socket, request: bytes) -> None:
        began.append(1)
        ended.append((connection.recv(1), len(began)))

    for deadline in PATIENCE:
        began.clear()
        ended.clear()
        silent = {f"vllm-{i}": start(wait) for i in range(20)}
        scene = scene_of(silent | {"good": start(answer(200))}, metrics_enabled=False)
        status = readings(look(source(deadline=deadline), scene), HEALTH_STATUS)
        for peer in silent.values():
            peer.close()
        good = [name for name, reading in status.items() if reading.value == 200]
        if good and ended == [(b"", 20)] * 20:
            break

    assert good == ["good"]
    assert ended == [(b"", 20)] * 20  # each saw us close, when all had been asked


def test_a_page_that_is_not_there_is_no_error_and_asked_for_seldom(start: Start) -> None:
    def behave(connection: socket.socket, request: bytes) -> None:
        connection.sendall(answer(404 if b"/metrics" in request else 200))

    peer = start(behave)
    endpoints, scene = source(), scene_of({"vllm-8000": peer})
    reads = [values(look(endpoints, scene)) for _ in range(ASK_AGAIN_EVERY + 1)]

    asked = [("health_status", "metrics") in seen for seen in reads]
    assert asked == [True] + [False] * (ASK_AGAIN_EVERY - 1) + [True]
    assert not any("server_requests_running" in key for seen in reads for key in seen)


def test_tensorrt_llm_is_asked_for_its_second_page_and_one_that_lacks_it_says_nothing(start: Start) -> None:
    """Its /metrics is a list of iterations; without return_perf_metrics there is no other page."""
    page = b"".join(
        b'trtllm_request_success_total{finished_reason="%s"} %d\n' % pair for pair in ((b"stop", 7), (b"x", 2))
    )
    sources = Endpoints(Host(Config(), load_frameworks()), deadline_seconds=PATIENT)

    def behave(there: bool) -> Behaviour:
        def answers(connection: socket.socket, request: bytes) -> None:
            is_page = b"GET /prometheus/metrics " in request
            connection.sendall(answer(200 if there or not is_page else 404, page if is_page and there else b""))

        return answers

    scene = scene_of({"there": start(behave(True)), "not": start(behave(False))}, framework="trtllm")
    seen = [item for item in look(sources, scene) if isinstance(item, Reading)]

    told = {(item.labels[0], item.signal.name): item.value for item in seen if item.signal.name.startswith("server_")}
    assert told == {("there", "server_finished_requests_total"): 9.0}


def test_a_new_start_is_asked_for_its_page_at_once(start: Start) -> None:
    peer = start(answer(404))
    endpoints, scene = source(), scene_of({"vllm-8000": peer})
    look(endpoints, scene)
    restarted = replace(scene, servers=(replace(scene.servers[0], root=ProcessId(11, 2)),))

    assert values(look(endpoints, restarted))["health_status", "metrics"] == 404


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (answer(500), "error"),
        (answer(403), "permission"),
        (answer(200, b"vllm:num_requests_running{ 1\n"), "error"),
        (answer(200, b"vllm:num_requests_running{, == }\n"), "error"),  # the parser's own IndexError
        (answer(200, PAGE).replace(b"Content-Length: ", b"Content-Length: 9"), "error"),
        (answer(200, PAGE, "Content-Encoding: gzip"), "error"),
    ],
)
def test_a_page_that_cannot_be_trusted_gives_no_value_at_all(says: bytes, reason: str, start: Start) -> None:
    seen = values(look(source(), scene_of({"vllm-8000": start(says)})))

    counts = {value for key, value in seen.items() if key[0].startswith("server_")}
    assert counts == {reason}


def test_a_page_that_is_switched_off_is_not_asked_for(start: Start) -> None:
    peer = start(answer(200))

    look(source(), scene_of({"vllm-8000": peer}, metrics_enabled=False))

    assert [request.split(b" ")[1] for request in peer.asked] == [b"/health"]


def test_a_configured_url_takes_the_place_of_the_default_endpoint(start: Start, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("planted-secret\n")
    peer = start(answer(204))
    target = HealthTarget(f"http://localhost:{peer.port}/deep/check?full=1#part", bearer_file=str(token))
    endpoints = source()
    scene = Scene((server(health=target),))

    first = values(look(endpoints, scene))
    token.write_text("rotated")
    look(endpoints, scene)

    assert first == {("health_status", "health"): 204, **UNASKED}
    assert peer.asked[0].startswith(b"GET /deep/check?full=1 HTTP/1.1\r\n")
    tokens = [line for request in peer.asked for line in request.split(b"\r\n") if b"Bearer" in line]
    assert tokens == [b"Authorization: Bearer planted-secret", b"Authorization: Bearer rotated"]


def test_a_token_goes_to_the_configured_url_only(start: Start, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("planted-secret")
    configured, own = start(answer(200)), start(answer(200, PAGE))
    target = HealthTarget(f"http://127.0.0.1:{configured.port}", bearer_file=str(token))
    one = server(ports=(own.port,), health=target)

    look(source(), Scene((one,), listeners=(Listener(one.name, own.port, "127.0.0.1"),)))

    assert b"planted-secret" in configured.asked[0]
    assert [request.split(b" ")[1] for request in own.asked] == [b"/metrics"]
    assert b"planted-secret" not in own.asked[0]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999/", "http://[::1/", "http://name.invalid.:80/", "http://\x01host/"]
)
def test_a_configured_url_that_leads_nowhere_is_an_error_of_its_own_server_only(url: str, start: Start) -> None:
    scene = scene_of({"vllm-8000": start(answer(200))}, metrics_enabled=False)
    bad = server("bad", health=HealthTarget(url))

    status = readings(look(source(), replace(scene, servers=(bad, *scene.servers))), HEALTH_STATUS)

    assert (status["bad"].reason, status["vllm-8000"].value) == ("error", 200)


def test_without_its_token_file_a_configured_url_is_not_asked(start: Start, tmp_path: Path) -> None:
    peer = start(answer(200))
    target = HealthTarget(f"http://127.0.0.1:{peer.port}/", bearer_file=str(tmp_path / "none"))

    seen = values(look(source(), Scene((server(health=target),))))

    assert seen["health_status", "health"] == "error"
    assert peer.asked == []


def test_a_token_on_a_mount_that_does_not_answer_holds_nobody(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said last is used; where it never said anything its own server is not asked, and others are."""
    far, known, unknown = (
        FarMount(tmp_path / "far", tmp_path / "proc", monkeypatch),
        start(answer(200)),
        start(answer(200)),
    )
    for name in ("known", "unknown"):
        (far.folder / name).write_text(f"secret-{name}")
    endpoints = Endpoints(Host(Config(), (cast(Framework, Kind()),), proc=tmp_path / "proc"))
    far.watch(endpoints._far.guards)
    servers = {
        name: server(name, health=HealthTarget(f"http://127.0.0.1:{peer.port}", bearer_file=str(far.folder / name)))
        for name, peer in (("known", known), ("unknown", unknown))
    }
    before = readings(look(endpoints, Scene((servers["known"],))), HEALTH_STATUS)
    far.hang()

    dead = readings(look(endpoints, Scene(tuple(servers.values()))), HEALTH_STATUS)
    far.answer()
    back = readings(look(endpoints, Scene(tuple(servers.values()))), HEALTH_STATUS)

    assert before["known"].value == 200
    assert (dead["known"].value, dead["unknown"].reason) == (200, "error")
    assert (back["known"].value, back["unknown"].value) == (200, 200)
    assert b"secret-known" in known.asked[1]
    assert [b"secret-unknown" in request for request in unknown.asked] == [True]


@pytest.mark.parametrize("content", ["", "two words", "a\nb", "\x1b[0m", "ü"])
def test_a_file_without_a_token_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(content, encoding="utf-8")

    with pytest.raises(ValueError):  # noqa: PT011  # UnicodeDecodeError is one too
        read_token(str(tmp_path / "token"))


def test_a_folder_given_as_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError)):
        read_token(str(tmp_path))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """A certificate nobody signed, made by the openssl program."""
    folder = tmp_path_factory.mktemp("tls")
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    subprocess.run(
        [*command.split(), "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


@pytest.mark.parametrize(("insecure", "status"), [(True, 200), (False, "error")])
def test_an_unknown_certificate_is_taken_only_when_told_so(
    insecure: bool, status: object, start: Start, certificate: ssl.SSLContext
) -> None:
    peer = start(answer(200), certificate)
    target = HealthTarget(f"https://localhost:{peer.port}/health", insecure=insecure)

    seen = values(look(source(), Scene((server(health=target),))))

    assert seen["health_status", "health"] == status


def test_a_peer_that_never_finishes_tls_is_a_time_out(start: Start) -> None:
    silent = start(never)
    target = HealthTarget(f"https://127.0.0.1:{silent.port}/", insecure=True)

    seen = values(look(source(deadline=DEADLINE), Scene((server(health=target),))))

    assert seen["health_status", "health"] == "timeout"


def test_time_outs_are_forgotten_with_their_server(start: Start) -> None:
    silent = start(never)
    endpoints = source(deadline=0.05)
    scene = scene_of({"vllm-8000": silent}, metrics_enabled=False)

    look(endpoints, scene)
    not_listening = values(look(endpoints, replace(scene, listeners=())))
    gone = look(endpoints, Scene())

    assert not_listening == {("health_timeouts_total", "health"): 1}
    assert gone == []


@given(st.sets(st.integers(0, len(PAGE))))
def test_the_pieces_a_page_comes_in_do_not_matter(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(PAGE)]
    page = MetricsPage(NAMES)
    for a, b in pairwise(edges):
        page.take(PAGE[a:b])

    assert page.totals() == {
        "requests_running": 7,
        "requests_waiting": 0,
        "generated_tokens": 1.5e6,
        "finished_requests": 9,
    }


def test_of_alternative_names_the_first_on_the_page_counts() -> None:
    page = MetricsPage({"generated_tokens": ("new_total", "old_total")})
    page.take(b"old_total 5\nnew_total 7")

    assert page.totals() == {"generated_tokens": 7}


def test_of_a_metric_with_a_label_only_the_samples_with_that_label_count() -> None:
    page = MetricsPage({"awake": ('state{is="awake"}',), "all": ("state",), "none": ('state{is="x"}',)})
    page.take(b'state{is="awake",n="0"} 1\nstate{is="awake",n="1"} 2\nstate{is="asleep"} 4\nstate{other="awake"} 8\n')

    assert page.totals() == {"awake": 3, "all": 15}


SLEEP = 'vllm:engine_sleep_state{{engine="{}",model_name="m",sleep_state="{}"}} {}\n'


def sleep_page(*engines: str) -> bytes:
    """Its page when each engine is in this state (`level 0`: asleep, and neither of the two levels)."""
    states = ("awake", "weights_offloaded", "discard_all")
    lines = (SLEEP.format(n, state, float(state == now)) for n, now in enumerate(engines) for state in states)
    return PAGE + "".join(lines).encode()


@pytest.mark.parametrize(
    ("engines", "paused"),
    [
        (("awake",), 0.0),
        (("weights_offloaded",), 1.0),
        (("discard_all",), 1.0),
        (("level 0",), 1.0),
        (("discard_all", "discard_all"), 1.0),
        (("discard_all", "awake"), 0.0),
        ((), None),
    ],
)
def test_a_server_none_of_whose_engines_is_awake_is_paused(
    engines: tuple[str, ...], paused: float | None, start: Start
) -> None:
    vllm = next(framework for framework in load_frameworks() if framework.name == "vllm")
    peer = start(answer(200, sleep_page(*engines)))
    endpoints = source(cast(Kind, vllm))

    assert values(look(endpoints, scene_of({"vllm-8000": peer}))).get(("server_paused",)) == paused


@pytest.mark.parametrize("says", [answer(503), answer(404), answer(200, b"not a page {")])
def test_a_server_that_does_not_say_is_not_said_to_be_paused(says: bytes, start: Start) -> None:
    vllm = next(framework for framework in load_frameworks() if framework.name == "vllm")
    seen = values(look(source(cast(Kind, vllm)), scene_of({"vllm-8000": start(says)})))

    assert ("server_paused",) not in seen


def test_an_endless_comment_is_skipped_and_the_rest_read() -> None:
    page = MetricsPage({"requests_running": ("running",)})
    page.take(b"# " + b"x" * 100_000)
    page.take(b"running 5\n")  # still the comment
    page.take(b"running 6\n")

    assert page.totals() == {"requests_running": 6}


@pytest.mark.parametrize("flood", [b'running{x="' + b'\\"' * 50_000, b'running{x="1"} 1\n' * 20_000])
def test_too_many_bytes_of_wanted_lines_refuse_the_page(flood: bytes) -> None:
    """The parser's time must not be in the server's hands."""
    page = MetricsPage({"requests_running": ("running",)})
    for at in range(0, len(flood), 65536):
        page.take(flood[at : at + 65536])

    with pytest.raises(ValueError, match="too long"):
        page.totals()
