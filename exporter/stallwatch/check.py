"""`stallwatch check`: what is every server on this node doing?

Asks a running `serve` first; otherwise watches for a while itself and counts dated evidence from before.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from .assembly import Settings, make_daemon
from .presentation import document, exit_code, text
from .strict_yaml import InputError

ANSWER_SECONDS = 3.0
LARGEST_ANSWER = 16 << 20


def check(settings: Settings, url: str, seconds: float, server: str | None, output: str) -> int:
    """Print the document or the text; exit code 1 stalled or failed, 3 nothing to judge, else 0."""
    found = fetch(url)
    if found is None:
        print(f"no stallwatch serve at {url}: watching for {seconds:g} s", file=sys.stderr)
        found = watch(settings, seconds)
    if server is not None:
        found["servers"] = [each for each in found["servers"] if each["server"] == server]
    print(json.dumps(found, indent=1) if output == "json" else text(found))
    return exit_code(found)


def fetch(url: str) -> dict[str, Any] | None:
    """The document of a running `serve`; None when none answers."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(url, 0, "--url", "an http:// or https:// address is needed")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", parts.path.rstrip("/") + "/api/v1/report")
        answer = connection.getresponse()
        content = answer.read(LARGEST_ANSWER)
        found = json.loads(content) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    known = isinstance(found, dict) and found.get("schema") == 1 and isinstance(found.get("servers"), list)
    return found if known else None


def watch(settings: Settings, seconds: float, sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """Watch for `seconds`, then judge with dated evidence from before."""
    daemon = make_daemon(settings, lambda report: None)
    try:
        daemon.start()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            sleep(min(left, daemon.config.intervals.tick, 1.0))
            daemon.gather()
        return document(daemon.tick(dated=True))
    finally:
        daemon.close()
