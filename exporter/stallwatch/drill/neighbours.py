"""What lives beside a stand-in server, in the process of its launcher: holders of locks and ports, clients.

All of it ends with the launcher, whatever ends that.
"""

from __future__ import annotations

import fcntl
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread, Timer
from typing import IO

from .conditions import Condition
from .front import ask
from .memory_cgroup import limited
from .places import CGROUP, FILE_LOCK, FLOCK

_CLIENTS = 3
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server lives.  `janitor`: what is written there is cleaned up behind us."""

    condition: Condition
    folder: Path
    port: int
    janitor: IO[str]


@contextmanager
def _leave_lock(place: Place) -> Iterator[None]:
    """As a build that was killed: the file is there, and its maker is gone."""
    lock = place.folder / FILE_LOCK
    lock.parent.mkdir(parents=True)
    lock.touch(exist_ok=False)
    yield


@contextmanager
def _hold_lock(place: Place, is_brief: bool = False) -> Iterator[None]:
    lock = place.folder / FLOCK
    lock.parent.mkdir(parents=True)
    with lock.open("ab") as file, _released(place, is_brief, partial(fcntl.flock, file, fcntl.LOCK_UN)):
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _hold_port(place: Place, is_brief: bool = False) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", place.port)) as listener, _released(place, is_brief, listener.close):
        yield


@contextmanager
def _released(place: Place, is_brief: bool, release: Callable[[], object]) -> Iterator[None]:
    """Let go after the pause of the condition, if it is to be brief."""
    timer = Timer(place.condition.pause_seconds, release)
    timer.daemon = True
    if is_brief:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _make_cgroup(place: Place) -> Iterator[None]:
    """NoCgroupError where none can be made."""
    with limited(place.folder.name) as cgroup:
        print(cgroup, file=place.janitor, flush=True)
        (place.folder / CGROUP).write_text(str(cgroup))
        yield


@contextmanager
def _ask(place: Place) -> Iterator[None]:
    for _ in range(_CLIENTS):
        Thread(target=_ask_for_ever, args=(place.port,), daemon=True).start()
    yield


def _ask_for_ever(port: int) -> None:
    while True:
        with suppress(OSError):  # not ready yet
            ask(port)
            continue
        time.sleep(_RETRY_SECONDS)


ACTS: Mapping[str, Callable[[Place], AbstractContextManager[None]]] = {
    "leave-lock": _leave_lock,
    "hold-lock": _hold_lock,
    "hold-lock-briefly": partial(_hold_lock, is_brief=True),
    "hold-port": _hold_port,
    "hold-port-briefly": partial(_hold_port, is_brief=True),
    "make-cgroup": _make_cgroup,
    "ask": _ask,
}
