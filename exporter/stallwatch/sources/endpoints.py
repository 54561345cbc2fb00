"""Ask servers that listen: one cheap endpoint, and their own metrics page.

No request leaves before the server listens, and none makes it generate (the framework names the endpoint).
Requests go only to the server's own sockets, as `sockets` found them, or to a configured URL.
"""

from __future__ import annotations

import math
import os
import re
import ssl
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote, urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ..config import Config
from ..model import HealthTarget, Listener, Observation, ProcessId, Scene, Server, Signal
from ..signals import (
    FINISHED_REQUESTS,
    GENERATED_TOKENS,
    HEALTH_STATUS,
    HEALTH_TIMEOUTS,
    PROMPT_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    SERVER_PAUSED,
)
from . import Host, Moment
from .http_probe import Answer, Names, Request, fetch_all
from .logs.guard import Guards, Questions
from .logs.mounts import Mounts

HEALTH_DURATION = Signal(
    "health_duration_seconds",
    "Time from connect to the end of the last answer; absent when there was none; "
    "endpoint is health, models or metrics.",
    ("server", "endpoint"),
)

PAGE_SIGNALS: Mapping[str, Signal] = {
    "requests_running": REQUESTS_RUNNING,
    "requests_waiting": REQUESTS_WAITING,
    "generated_tokens": GENERATED_TOKENS,
    "prompt_tokens": PROMPT_TOKENS,
    "finished_requests": FINISHED_REQUESTS,
}
"""What is taken from a server's own metrics page, by the keys of Framework.metrics."""

AWAKE_ENGINES = "awake_engines"
"""Engines that are awake, by the same keys: a server with none is paused."""

_NAME = re.compile(r'(?P<name>[^{]+)(?:\{(?P<label>\w+)="(?P<value>[^"\\]*)"\})?')
"""A metric's name, or only its samples with one label of one value."""

DEADLINE_SECONDS = 5.0
LOOK_UP_SECONDS = 1.0
ASK_AGAIN_EVERY = 10
"""A metrics page that is not there (404) is asked for again every this many reads."""

_LINE_LIMIT_BYTES = 4 << 10
_KEPT_LIMIT_BYTES = 256 << 10
_TOKEN_LIMIT_BYTES = 64 << 10


class MetricsPage:
    """The wanted lines of a metrics page, picked from its bytes as they come.

    Only these lines reach the parser.  A page whose wanted lines are too long or too many is refused as a
    whole: part of a sum is a wrong sum.
    """

    def __init__(self, names: Mapping[str, tuple[str, ...]]) -> None:
        self._names = names
        every = {name.partition("{")[0].encode() for alternatives in names.values() for name in alternatives}
        self._starts = tuple(name + after for name in every for after in (b"{", b" ", b"\t"))
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._tail = b""
        self._overlong = False  # inside a line that is longer than the limit

    def take(self, data: bytes) -> None:
        """The next bytes of the page."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            if not self._overlong:
                self._keep(line)
            self._overlong = False
        if len(self._tail) > _LINE_LIMIT_BYTES:
            if not self._overlong:
                self._keep(self._tail)
            self._overlong, self._tail = True, b""

    def _keep(self, line: bytes) -> None:
        if line.startswith(self._starts):
            over = len(line) > _LINE_LIMIT_BYTES
            self._kept_bytes += _KEPT_LIMIT_BYTES + 1 if over else len(line)
            if self._kept_bytes <= _KEPT_LIMIT_BYTES:
                self._kept.append(line)

    def totals(self) -> dict[str, float]:
        """Sum over all label sets by key; of alternative names the first that is on the page counts.

        ValueError when the page cannot be trusted.  NaN and infinite samples are left out.
        """
        if not self._overlong:
            self._keep(self._tail)
        self._tail = b""
        if self._kept_bytes > _KEPT_LIMIT_BYTES:
            raise ValueError("the wanted lines are too long")
        text = b"\n".join([*self._kept, b""]).decode("utf-8", "replace")
        try:
            families = list(text_string_to_metric_families(text))
        except IndexError as error:  # the parser's answer to some broken labels
            raise ValueError("the page is no metrics page") from error
        samples = [sample for family in families for sample in family.samples if math.isfinite(sample.value)]
        sums = {name: _sum(name, samples) for names in self._names.values() for name in names}
        found = {key: [name for name in names if sums[name] is not None] for key, names in self._names.items()}
        return {key: total for key, names in found.items() if names and (total := sums[names[0]]) is not None}


def _sum(name: str, samples: Iterable[Sample]) -> float | None:
    """Of the samples with that name (and label); None when there is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    wanted, label, value = match.group("name", "label", "value")
    values = [s.value for s in samples if s.name == wanted and (label is None or s.labels.get(label) == value)]
    return sum(values) if values else None


@dataclass(frozen=True, slots=True)
class _Probe:
    """One endpoint of one server; `problem` says why the request cannot even be made."""

    server: Server
    endpoint: str
    request: Request | None
    page: MetricsPage | None = None
    problem: str = ""


class Endpoints:
    """Source `endpoints`."""

    name: ClassVar[str] = "endpoints"
    signals: ClassVar[tuple[Signal, ...]] = (
        HEALTH_STATUS,
        HEALTH_DURATION,
        HEALTH_TIMEOUTS,
        *PAGE_SIGNALS.values(),
        SERVER_PAUSED,
    )

    def __init__(self, host: Host, *, deadline_seconds: float = DEADLINE_SECONDS, names: Names | None = None) -> None:
        self._frameworks = {framework.name: framework for framework in host.frameworks}
        self._deadline_seconds = deadline_seconds
        self._names = names or Names()
        self._timeouts: dict[tuple[str, str], int] = {}
        self._pages_not_there: dict[tuple[str, ProcessId], int] = {}  # reads left until the next try
        self._contexts: dict[bool, ssl.SSLContext] = {}
        self._far = Questions(Guards(Mounts(str(host.proc)), host.read_deadline_seconds))
        self._config, self._pending = host.config, host.config

    def configure(self, config: Config) -> None:
        """Take a new configuration at the next read."""
        self._pending = config

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """Ask every server that listens, all at once, and say what came within the deadline.

        Status and duration are absent without a complete answer (reason timeout or error).  Values of the
        server's own page are absent when the page does not have them.
        """
        self._far.guards.mounts.refresh(now.monotonic)
        if self._pending is not self._config:
            self._apply(self._pending)
        self._forget(scene)
        self._count_from_zero(scene)
        probes = list(self._probes(scene))
        ready = [probe.request for probe in probes if probe.request is not None]
        answers = iter(fetch_all(ready, self._deadline_seconds))
        for probe in probes:
            answer = Answer(None, 0.0, reason=probe.problem) if probe.request is None else next(answers)
            yield from self._observe(probe, answer)
        for (server, endpoint), count in self._timeouts.items():
            yield HEALTH_TIMEOUTS.read(count, server, endpoint)

    def close(self) -> None:
        """Nothing is kept open between reads."""

    def _apply(self, config: Config) -> None:
        """What is not asked for any more is forgotten; a token above all."""
        before, targets = (_targets(each) for each in (self._config, config))
        self._config = config
        gone = {target.bearer_file for target in before} - {target.bearer_file for target in targets}
        self._far.forget([f"token {path}" for path in gone])
        self._names.keep({_host_name(target.url) for target in targets})

    def _forget(self, scene: Scene) -> None:
        names = {server.name for server in scene.servers}
        starts = {(server.name, server.root) for server in scene.servers}
        self._timeouts = {key: count for key, count in self._timeouts.items() if key[0] in names}
        self._pages_not_there = {key: n for key, n in self._pages_not_there.items() if key in starts}

    def _count_from_zero(self, scene: Scene) -> None:
        """A counter of time-outs stands at 0 before its server can be asked: an increase() must see the first."""
        for server in scene.servers:
            framework = self._frameworks.get(server.framework)
            known = framework.endpoints if framework else {}
            health = "health" if server.health is not None else framework.default_endpoint if framework else ""
            asked = [health] if server.health is not None or health in known else []
            asked += ["metrics"] if server.metrics_enabled and "metrics" in known else []
            if server.role == "server" and server.processes:
                self._timeouts.update(
                    {(server.name, name): self._timeouts.get((server.name, name), 0) for name in asked}
                )

    def _probes(self, scene: Scene) -> Iterator[_Probe]:
        servers = [server for server in scene.servers if server.role == "server"]
        configured = {server.name: server.health for server in servers if server.health}
        hosts = [name for target in configured.values() if (name := _host_name(target.url))]
        addresses = self._names.look_up(hosts, LOOK_UP_SECONDS)
        for server in servers:
            listener = _listener_of(server, scene.listeners)
            if server.health is not None:
                yield self._configured(server, server.health, addresses)
            elif listener is not None:
                yield from self._default(server, listener)
            if listener is not None:
                yield from self._metrics(server, listener)

    def _default(self, server: Server, listener: Listener) -> Iterator[_Probe]:
        framework = self._frameworks.get(server.framework)
        endpoint = framework.default_endpoint if framework else ""
        path = framework.endpoints.get(endpoint) if framework else None
        if path:
            yield _Probe(server, endpoint, _plain(listener, path))

    def _metrics(self, server: Server, listener: Listener) -> Iterator[_Probe]:
        framework = self._frameworks.get(server.framework)
        path = framework.endpoints.get("metrics") if framework else None
        if framework is None or not path or not server.metrics_enabled or self._is_skipped(server):
            return
        names = {key: framework.metrics[key] for key in (*PAGE_SIGNALS, AWAKE_ENGINES) if framework.metrics.get(key)}
        if names:
            page = MetricsPage(names)
            yield _Probe(server, "metrics", _plain(listener, path, page), page)

    def _is_skipped(self, server: Server) -> bool:
        """Whether the page was not there lately; counts this read."""
        left = self._pages_not_there.pop((server.name, server.root), 0)
        if left > 1:
            self._pages_not_there[server.name, server.root] = left - 1
        return left > 0

    def _configured(self, server: Server, target: HealthTarget, addresses: Mapping[str, tuple[str, ...]]) -> _Probe:
        try:
            request = self._request(target, addresses)
        except PermissionError:
            return _Probe(server, "health", None, problem="permission")
        except (OSError, ValueError):
            return _Probe(server, "health", None, problem="error")
        return _Probe(server, "health", request)

    def _request(self, target: HealthTarget, addresses: Mapping[str, tuple[str, ...]]) -> Request:
        """ValueError or OSError when the URL, the name or the token file is unusable."""
        parts = urlsplit(target.url)
        host = _host_name(target.url)
        secured = parts.scheme == "https"
        port = parts.port or (443 if secured else 80)
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (
            "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?") if parts.query else ""
        )
        if not addresses.get(host):
            raise ValueError("the name has no address")
        return Request(
            addresses=addresses[host],
            port=port,
            host=quote(parts.netloc, safe="[]:%"),
            path=path,
            tls=self._context(target.insecure) if secured else None,
            server_name=host,
            bearer=self._token(target.bearer_file) if target.bearer_file else "",
        )

    def _token(self, path: str) -> str:
        """As read_token; of a file on a mount that does not answer what it said last, or OSError."""
        answer = self._far.ask(f"token {path}", self._far.guards.mounts.far(path), lambda: _token_or_problem(path))
        if answer is None:
            raise OSError("the mount does not answer")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _context(self, insecure: bool) -> ssl.SSLContext:
        if insecure not in self._contexts:
            context = ssl.create_default_context()
            if insecure:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._contexts[insecure] = context
        return self._contexts[insecure]

    def _observe(self, probe: _Probe, answer: Answer) -> Iterator[Observation]:
        labels = (probe.server.name, probe.endpoint)
        self._timeouts.setdefault(labels, 0)
        if answer.status is not None:
            yield HEALTH_STATUS.read(answer.status, *labels)
            yield HEALTH_DURATION.read(answer.seconds, *labels)
        elif answer.reason != "refused":  # refused: nobody listens (any more); `sockets` says so
            self._timeouts[labels] += answer.reason == "timeout"
            yield HEALTH_STATUS.missing(answer.reason or "error", *labels)
        if probe.page is not None:
            yield from self._observe_page(probe.server, probe.page, answer)

    def _observe_page(self, server: Server, page: MetricsPage, answer: Answer) -> Iterator[Observation]:
        if answer.status == 404:
            self._pages_not_there[server.name, server.root] = ASK_AGAIN_EVERY - 1
        if answer.status == 404 or answer.reason == "refused":
            return
        reason = "timeout" if answer.reason == "timeout" else "error"
        if answer.status in (401, 403):
            reason = "permission"
        try:
            totals = page.totals() if answer.status == 200 and answer.complete else None
        except ValueError:
            totals = None
        for key, signal in PAGE_SIGNALS.items():
            if totals is None:
                yield signal.missing(reason, server.name)
            elif key in totals:
                yield signal.read(totals[key], server.name)
        if totals is not None and AWAKE_ENGINES in totals:
            yield SERVER_PAUSED.read(float(totals[AWAKE_ENGINES] == 0), server.name)


def _listener_of(server: Server, listeners: tuple[Listener, ...]) -> Listener | None:
    """Where to ask: the first of the server's ports that listens.

    Without a known port only a single listening one is taken: among several, others may be the private
    sockets of a store or a message queue, which a stray request could upset.
    """
    own = [listener for listener in listeners if listener.server == server.name]
    if not server.ports:
        return own[0] if len(own) == 1 and own[0].reachable else None
    by_port = {listener.port: listener for listener in reversed(own) if listener.reachable}
    return next((by_port[port] for port in server.ports if port in by_port), None)


def _plain(listener: Listener, path: str, page: MetricsPage | None = None) -> Request:
    address = f"[{listener.address}]" if ":" in listener.address else listener.address
    return Request(
        addresses=(listener.address,),
        port=listener.port,
        host=f"{address}:{listener.port}",
        path=path,
        take=page.take if page else None,
    )


def _targets(config: Config) -> list[HealthTarget]:
    return [server.health for server in config.servers if server.health is not None]


def _token_or_problem(path: str) -> str | OSError | ValueError:
    try:
        return read_token(path)
    except (OSError, ValueError) as error:
        return error


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def read_token(path: str) -> str:
    """The bearer token in a file, without surrounding white space; read anew each time, as it may rotate.

    OSError when it cannot be read; ValueError when it is no regular file or no token.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no regular file")
        token = os.read(descriptor, _TOKEN_LIMIT_BYTES).decode("ascii").strip()
    finally:
        os.close(descriptor)
    if not token or not token.isprintable() or " " in token:
        raise ValueError("no token")
    return token
