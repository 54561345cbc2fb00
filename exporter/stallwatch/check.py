"""`stallwatch check`: what is every server on this node doing?

Asks a running `serve` first; otherwise watches for a while itself and counts dated evidence from before.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .assembly import Settings, make_daemon, read_config
from .config import Config, Intervals
from .daemon import Daemon
from .frameworks import load_frameworks
from .presentation import document, exit_code, text
from .printable import printable
from .stacks import Tools, add_stacks, find_py_spy
from .strict_yaml import InputError

ANSWER_SECONDS = 3.0
LARGEST_ANSWER = 16 << 20
LOOKS = 5
"""Times each collector looks, at least, while `check` watches by itself."""


_SERVER_KEYS = frozenset(
    ("server", "framework", "role", "state", "reason", "since", "phase", "ready", "suspect_rank", "ranks", "channels")
)
_RANK_KEYS = frozenset(("rank", "pid", "phase", "load_progress", "alive", "wait", "gpu"))
_CHANNEL_KEYS = frozenset(("channel", "state", "age_seconds"))


@dataclass(frozen=True, slots=True)
class Peer:
    """The `serve` that is asked, and what it takes to be let in (`--web.config.file`)."""

    url: str
    ca_file: str | None = None  # who may have signed its certificate; None: those the system trusts
    password_file: str | None = None  # one line USER:PASSWORD


class RefusedError(Exception):
    """Somebody answers and does not let us in; the text says how to."""


def check(
    settings: Settings, peer: Peer, seconds: float, server: str | None, output: str, with_stacks: bool = False
) -> int:
    """Print the document or the text; exit code 1 stalled or failed, 3 nothing to judge, else 0.

    `with_stacks`: and the stacks of the ranks of servers that stand still.
    """
    config = read_config(settings, load_frameworks())  # a wrong file is said even when it is not needed
    found = fetch(peer)
    if found is None:
        print(f"no stallwatch serve at {_address(peer.url)}: watching for {seconds:g} s", file=sys.stderr)
        logging.getLogger(Daemon.__module__).setLevel(logging.WARNING)  # the answer comes at the end
        found = watch(settings, config, seconds)
    else:
        print(f"what the stallwatch serve at {_address(peer.url)} says:", file=sys.stderr)
    if server is not None:
        found["servers"] = _only(server, found["servers"])
    if with_stacks:
        add_stacks(found["servers"], Tools(Path(settings.procfs), find_py_spy()))
    print(json.dumps(found, indent=1) if output == "json" else text(found), end="" if output == "text" else "\n")
    return exit_code(found)


def _only(name: str, servers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The server of that name; says on stderr which there are when there is none."""
    chosen = [server for server in servers if server["server"] == name]
    if not chosen and servers:
        known = ", ".join(printable(str(server["server"])) for server in servers)
        print(f"stallwatch: no server {printable(name)!r}; there are {known}", file=sys.stderr)
    return chosen


def fetch(peer: Peer) -> dict[str, Any] | None:
    """The document of a running `serve`; None when none answers within ANSWER_SECONDS, bytes that trickle included.

    One that does not let us in is said on stderr.  InputError when the address or a file is wrong.
    """
    connection, path = _connection(peer)
    headers = _headers(peer)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(_answer(connection, path, headers)), daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    if found and isinstance(found[0], RefusedError):
        print(f"stallwatch: {_address(peer.url)}: {found[0]}", file=sys.stderr)
    return _without_stacks(found[0]) if found and _is_document(found[0]) else None


def _without_stacks(found: dict[str, Any]) -> dict[str, Any]:
    """The key `stacks` is ours to give: no `serve` sends it, and what somebody else put there is not shown."""
    for server in found["servers"]:
        for rank in server["ranks"]:
            rank.pop("stacks", None)
    return found


def _answer(connection: http.client.HTTPConnection, path: str, headers: dict[str, str]) -> Any:
    """What is there, as JSON; None when it is none; a RefusedError when we are not let in."""
    try:
        connection.request("GET", path + "/api/v1/report", headers=headers)
        answer = connection.getresponse()
        content = answer.read(LARGEST_ANSWER)
        if answer.status == 401:
            return RefusedError("wants a user and a password: --password-file")
        return json.loads(content) if answer.status == 200 else None
    except ssl.SSLCertVerificationError as error:
        return RefusedError(f"its certificate is not trusted ({error.verify_message}): --ca-file")
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return None
    finally:
        connection.close()


def _headers(peer: Peer) -> dict[str, str]:
    """Those that let us in.  A password goes over TLS, or does not leave this machine."""
    if peer.password_file is None:
        return {}
    parts = urlsplit(peer.url)
    if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise InputError(_address(peer.url), 0, "--url", "a password is sent to https:// only, or to this machine")
    try:
        line = Path(peer.password_file).read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(peer.password_file, 0, "--password-file", f"cannot be read: {problem}") from None
    if ":" not in line:
        raise InputError(peer.password_file, 1, "--password-file", "USER:PASSWORD is needed on the first line")
    return {"Authorization": "Basic " + base64.b64encode(line.encode()).decode()}


def _address(url: str) -> str:
    """The URL as it may be printed: without a user, a password or a query."""
    plain = re.match(r"(\w+://)?(?:.*@)?([^?#@]*)", url)
    return f"{plain[1] or ''}{plain[2]}" if plain else ""


def _context(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise InputError(str(ca_file), 0, "--ca-file", "holds no certificate in PEM") from None
    except OSError as error:
        raise InputError(str(ca_file), 0, "--ca-file", f"cannot be read: {error.strerror}") from None


def _connection(peer: Peer) -> tuple[http.client.HTTPConnection, str]:
    """A connection that is not made yet, and the path in front of our own ones."""
    url = peer.url
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https"):
        raise InputError(_address(url), 0, "--url", "an http:// or https:// address is needed")
    path = parts.path.rstrip("/")
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS), path
    context = _context(peer.ca_file)
    return http.client.HTTPSConnection(host, port, timeout=ANSWER_SECONDS, context=context), path


def _is_document(found: Any) -> bool:
    """Whether it is the document of a `serve` (docs/REFERENCE.md), and not of whatever else listens there."""
    if not isinstance(found, dict) or found.get("schema") != 1:
        return False
    return (
        _are(found.get("servers"), _SERVER_KEYS)
        and all(_are(s["ranks"], _RANK_KEYS) and _are(s["channels"], _CHANNEL_KEYS) for s in found["servers"])
        and _can_be_shown(found)
    )


def _can_be_shown(found: dict[str, Any]) -> bool:
    """Whether every value is of a kind, and every state a word, that we know: of another version it may not be."""
    try:
        text(found)
        exit_code(found)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return False
    return True


def _are(found: Any, keys: frozenset[str]) -> bool:
    """Whether it is a list of objects with these keys."""
    return isinstance(found, list) and all(isinstance(each, dict) and keys <= each.keys() for each in found)


def watch(
    settings: Settings, config: Config, seconds: float, sleep: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """Watch for `seconds`, then judge with dated evidence from before.

    A short watch looks more often: "flat" must rest on several looks.
    """
    often = max(0.2, seconds / LOOKS)
    shorter = {each.name: min(often, getattr(config.intervals, each.name)) for each in fields(config.intervals)}
    daemon = make_daemon(settings, lambda report: None, replace(config, intervals=Intervals(**shorter)))
    try:
        daemon.start()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            sleep(min(left, daemon.config.intervals.tick, 1.0))
            daemon.gather()
        return document(daemon.tick(dated=True))
    finally:
        daemon.close()
