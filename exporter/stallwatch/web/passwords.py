"""Basic authentication: bcrypt on a thread of its own, and which passwords it has accepted.

bcrypt is slow on purpose (70 ms at cost 10), so it never runs on the HTTP thread, one password at a time, and
at most MOST_WAITING wait, of one address MOST_OF_ONE.  An accepted one is remembered; the next scrape does not wait
at all, whoever else guesses passwords meanwhile.  One that is refused is not remembered: guesses cannot push an
accepted one out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .access import Access
from .app import Request, Response, plain

MOST_WAITING = 16
MOST_OF_ONE = 8
MOST_REMEMBERED = 100  # as exporter-toolkit
BCRYPT_BYTES = 72
"""bcrypt looks at no more of a password; the library refuses longer ones instead."""

UNAUTHORIZED = plain(401, "a user and a password are needed", ("WWW-Authenticate", 'Basic realm="stallwatch"'))
CROWDED = plain(503, "too many passwords are being checked", ("Retry-After", "1"))

Settled = Callable[[Response | None], None]
"""Called with the refusal, or None when the password is right."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A password that has to be checked.  `key` stands for user, hash and password, and tells none of them."""

    key: bytes
    hash: bytes
    password: bytes
    is_known: bool


class Gate:
    """Who is let in, and what each answer carries besides.  Everything but the thread runs on the HTTP loop."""

    def __init__(self, access: Callable[[], Access], later: Callable[[Callable[[], None]], object]) -> None:
        """`later` has something called on the HTTP loop, from any thread; RuntimeError once that is closed."""
        self.access = access
        self.waiting = 0  # requests whose password is being checked
        self._later = later
        self._accepted: dict[bytes, None] = {}
        self._asked: dict[bytes, list[Settled]] = {}
        self._asked_by: dict[bytes, str] = {}
        self._secret = os.urandom(32)
        self._queue: queue.SimpleQueue[Doubt] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def judge(self, request: Request) -> Response | Doubt | None:
        """None: come in.  A Doubt is settled by `settle`."""
        users = self.access().users
        if not users:
            return None
        credentials = basic_credentials(request.headers.get("authorization", ""))
        if credentials is None:
            return UNAUTHORIZED
        doubt = self._doubt(users, *credentials)
        return None if doubt.key in self._accepted else doubt

    def _doubt(self, users: Mapping[str, bytes], user: str, password: bytes) -> Doubt:
        """Of an unknown user the costliest hash is computed as well: how long it takes tells nobody's name."""
        found = users.get(user)
        compared = found or max(users.values(), key=_cost)
        parts = (user.encode(), compared, password)
        key = hashlib.blake2b(b"".join(len(p).to_bytes(8, "big") + p for p in parts), key=self._secret).digest()
        return Doubt(key, compared, password[:BCRYPT_BYTES], found is not None)

    def settle(self, doubt: Doubt, settled: Settled, address: str = "") -> None:
        """Have the password checked; the same one of several clients once.  `address` "": not known."""
        others = self._asked.get(doubt.key)
        if others is None and (self._is_crowded(address) or not self._is_started()):
            settled(CROWDED)
            return
        self.waiting += 1
        self._asked.setdefault(doubt.key, []).append(settled)
        if others is None:
            self._asked_by[doubt.key] = address
            self._queue.put(doubt)

    def _is_crowded(self, address: str) -> bool:
        """Whether one more may not wait: who guesses from one address leaves room for a scraper at another."""
        of_one = sum(each == address for each in self._asked_by.values()) if address else 0
        return len(self._asked) >= MOST_WAITING or of_one >= MOST_OF_ONE

    def _is_started(self) -> bool:
        """Whether there is a thread that checks; False while a limit of processes allows none."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="passwords", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            doubt = self._queue.get()
            is_right = is_password(doubt)
            try:
                self._later(lambda doubt=doubt, is_right=is_right: self._tell(doubt, is_right))  # type: ignore[misc]
            except RuntimeError:
                return  # the server was stopped meanwhile

    def _tell(self, doubt: Doubt, is_right: bool) -> None:
        if is_right:
            self._accepted[doubt.key] = None
            if len(self._accepted) > MOST_REMEMBERED:
                del self._accepted[next(iter(self._accepted))]
        del self._asked_by[doubt.key]
        for settled in self._asked.pop(doubt.key):
            self.waiting -= 1
            settled(None if is_right else UNAUTHORIZED)

    def dressed(self, headers: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """The headers of an answer with those that are configured; these win over ours."""
        configured = self.access().headers
        ours = tuple(header for header in headers if header[0] not in configured)
        return (*ours, *configured.items())


def basic_credentials(header: str) -> tuple[str, bytes] | None:
    """User and password of an Authorization header; None when it is no Basic one."""
    scheme, _, coded = header.strip().partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(coded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def is_password(doubt: Doubt) -> bool:
    """The whole comparison also for a user who does not exist."""
    import bcrypt  # 1 MB that only those pay who have users

    try:
        is_right = bcrypt.checkpw(doubt.password, doubt.hash)
    except ValueError:  # a hash that has the form of one and is none
        return False
    return is_right and doubt.is_known


def _cost(hashed: bytes) -> int:
    return int(hashed[4:6])
