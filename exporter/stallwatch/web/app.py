"""Which request gets which answer.  Pure but for the reload it may ask for; knows no socket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .assets import CONTENT_POLICY
from .published import Body, Pages, Published

TEXT = "text/plain; charset=utf-8"
MOST_WISHES = 32
"""Types of a header, and parameters of a type, that are looked at."""


@dataclass(frozen=True, slots=True)
class Request:
    """What of a request the answer depends on; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


Slow = Callable[[], Response]
"""An answer that has to wait for something: the server makes it on a thread of its own."""

Reload = Callable[[], str | None]
"""Reloads the configuration; returns None, or the sentence what is wrong with the new one."""


def plain(status: int, sentence: str, *headers: tuple[str, str]) -> Response:
    return Response(status, TEXT, f"{sentence}\n".encode(errors="replace"), headers)


class App:
    """The routes of docs/REFERENCE.md, "HTTP"."""

    def __init__(self, published: Published, telemetry_path: str = "/metrics", reload: Reload | None = None) -> None:
        self._published = published
        self._reload = reload
        self._routes: dict[str, Callable[[Request], Response]] = {
            "/": lambda request: self._page(request, lambda pages: pages.html(telemetry_path)),
            "/live": lambda request: self._page(request, Pages.live),
            "/api/v1/report": lambda request: self._page(request, Pages.json),
            "/-/healthy": lambda request: plain(200, "stallwatch is healthy"),
            "/-/ready": self._ready,
            telemetry_path: self._metrics,
        }

    def answer(self, request: Request) -> Response | Slow:
        """The answer to `request`; to HEAD the same as to GET, the server leaves the body out."""
        if request.path == "/-/reload":
            return self._reload_answer(request)
        route = self._routes.get(request.path)
        if route is None:
            return plain(404, "not found")
        if request.method not in ("GET", "HEAD"):
            return plain(405, "only GET and HEAD are allowed here", ("Allow", "GET, HEAD"))
        return route(request)

    def _reload_answer(self, request: Request) -> Response | Slow:
        reload = self._reload
        if request.method != "POST":
            return plain(405, "only POST is allowed here", ("Allow", "POST"))
        if reload is None:
            return plain(403, "reload by HTTP is off: start with --web.enable-lifecycle, or send SIGHUP")
        return lambda: _reloaded(reload())

    def _ready(self, request: Request) -> Response:
        if self._published.has_report:
            return plain(200, "stallwatch is ready")
        return plain(503, "no report yet: the first tick has not finished")

    def _metrics(self, request: Request) -> Response:
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        return self._page(request, lambda pages: pages.metrics(openmetrics))

    def _page(self, request: Request, choose: Callable[[Pages], Body]) -> Response:
        pages = self._published.pages()
        if isinstance(pages, str):
            return plain(503, pages, ("Cache-Control", "no-store"))
        body = choose(pages)
        headers = [
            ("Vary", "Accept, Accept-Encoding"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Content-Security-Policy", CONTENT_POLICY),
        ]
        if qualities(request.headers.get("accept-encoding", "")).get("gzip", 0.0) > 0:
            return Response(200, body.content_type, body.gzipped, (*headers, ("Content-Encoding", "gzip")))
        return Response(200, body.content_type, body.plain, tuple(headers))


def _reloaded(mistake: str | None) -> Response:
    return plain(200, "reloaded") if mistake is None else plain(500, f"not reloaded: {mistake}")


def wants_openmetrics(accept: str) -> bool:
    """True if the Accept header names OpenMetrics and likes plain text no better."""
    by_type = qualities(accept)
    wish = by_type.get("application/openmetrics-text", 0.0)
    return wish > 0 and wish >= by_type.get("text/plain", 0.0)


def qualities(header: str) -> dict[str, float]:
    """`a;q=0.5, b` -> {"a": 0.5, "b": 1.0}: the best quality of each; other parameters are not looked at.

    Neither is what stands behind the first MOST_WISHES: no client has so many, and each costs time.
    """
    best: dict[str, float] = {}
    for part in header.split(",", MOST_WISHES)[:MOST_WISHES]:
        name, *parameters = (piece.strip().lower() for piece in part.split(";", MOST_WISHES)[:MOST_WISHES])
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                quality = _quality(parameter[2:])
        best[name] = max(best.get(name, 0.0), quality)
    return best


def _quality(text: str) -> float:
    """A quality that is no number counts as 0: the type is not wished for."""
    digits = text.replace(".", "", 1)
    return float(text) if digits.isascii() and digits.isdigit() else 0.0
