"""The tick beats; systemd hears it, and a tick that is stuck ends the process."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallwatch.heartbeat import LOOKS_UNTIL_STUCK, STUCK_STATUS, Heartbeat, Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """What NOTIFY_SOCKET says, and the service manager's end of it."""
    place = str(tmp_path / "notify") if request.param == "path" else f"@stallwatch-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hearing:
        hearing.bind(place.replace("@", "\0") if place[0] == "@" else place)
        hearing.setblocking(False)
        yield place, hearing


def heard(hearing: socket.socket) -> list[bytes]:
    messages = []
    try:
        while True:
            messages.append(hearing.recv(4096))
    except BlockingIOError:
        return messages


def heartbeat(notifier: Notifier) -> Heartbeat:
    return Heartbeat(notifier, lambda: 5.0, lambda: None)


def test_systemd_is_told_by_each_tick_and_by_nothing_else(manager: tuple[str, socket.socket]) -> None:
    place, hearing = manager
    environ = {"NOTIFY_SOCKET": place, "PATH": "/bin"}
    beating = heartbeat(Notifier(environ))
    for _ in range(3):
        beating.look()
    assert heard(hearing) == []

    beating.beat()
    beating.beat()
    beating.stop()
    beating.beat()

    assert heard(hearing) == [b"READY=1\nWATCHDOG=1", b"WATCHDOG=1", b"STOPPING=1"]
    assert environ == {"PATH": "/bin"}  # no child speaks for us


def test_a_manager_that_does_not_read_holds_nothing_up(manager: tuple[str, socket.socket]) -> None:
    place, hearing = manager
    beating = heartbeat(Notifier({"NOTIFY_SOCKET": place}))

    for _ in range(2000):  # more than its queue takes
        beating.beat()
    beating.stop()

    assert 0 < len(heard(hearing)) < 2000


@pytest.mark.parametrize(("place", "warnings"), [("", 0), ("vsock:2:1234", 0), ("/nowhere/notify", 1)])
def test_without_a_manager_nothing_is_said(place: str, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        beating = heartbeat(Notifier({"NOTIFY_SOCKET": place}))
        beating.beat()
        beating.stop()

    assert len(caplog.records) == warnings


def test_a_tick_is_stuck_after_so_many_looks_without_one() -> None:
    beating = heartbeat(Notifier({}))
    beating.beat()

    looks = [beating.look() for _ in range(LOOKS_UNTIL_STUCK + 1)]

    assert looks == [False] * LOOKS_UNTIL_STUCK + [True]


def test_one_tick_in_between_is_enough() -> None:
    beating = heartbeat(Notifier({}))
    for _ in range(5):
        assert not any(beating.look() for _ in range(LOOKS_UNTIL_STUCK - 1))
        beating.beat()


STUCK = """\
import logging, os, sys, threading
from stallwatch.heartbeat import Heartbeat, Notifier
if sys.argv[1] == "silenced":
    logging.getLogger().addHandler(handler := logging.StreamHandler())
    handler.acquire()  # the thread that is stuck holds the log
begin = threading.Thread.start
def start(thread):
    if sys.argv[1] == "limited" and thread.name == "last-words":
        raise RuntimeError("can't start new thread")
    begin(thread)
threading.Thread.start = start
looks, may_look = threading.Semaphore(0), threading.Semaphore(0)
def tick_seconds():
    looks.release()
    if sys.argv[1] == "well":
        may_look.acquire()  # a beat comes before each look, however busy the machine is
    return 0.01
beating = Heartbeat(Notifier({}), tick_seconds, shortest_look=0.01)
beating.start()
def tick():
    if sys.argv[1] == "well":
        for _ in range(50):
            looks.acquire()
            beating.beat()
            may_look.release()
        os._exit(0)
    threading.Event().wait()
tick()
"""


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("stuck", STUCK_STATUS, "in tick"),
        ("silenced", STUCK_STATUS, ""),
        ("limited", STUCK_STATUS, ""),
        ("well", 0, ""),
    ],
)
def test_a_process_whose_tick_is_stuck_ends_and_says_where(how: str, status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", STUCK, how], capture_output=True, text=True, timeout=600)

    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert bool(done.stderr) is bool(said)
