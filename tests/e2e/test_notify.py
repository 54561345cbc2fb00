"""A real `serve` under a service manager: what it is told, and when it is not."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from .harness import PATIENCE, Exporter, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.aside]


def test_systemd_hears_each_tick_and_nothing_while_there_is_none(tmp_path: Path) -> None:
    place = tmp_path / "notify"
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(place))
        manager.settimeout(20.0)
        with Exporter(tmp_path, environment={"NOTIFY_SOCKET": str(place)}) as exporter:
            exporter.watch.stop()  # a stopped process owes it no answer
            heard += [manager.recv(4096) for _ in range(3)]
            exporter.process.send_signal(signal.SIGSTOP)
            wait_until(lambda: is_silent(manager), PATIENCE, "a stopped process that says nothing")
            exporter.process.send_signal(signal.SIGCONT)
            manager.settimeout(20.0)
            after = manager.recv(4096)
        manager.settimeout(1.0)
        while heard[-1] != b"STOPPING=1":
            heard.append(manager.recv(4096))

    assert heard[:3] == [b"READY=1\nWATCHDOG=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    assert after == b"WATCHDOG=1"


def is_silent(manager: socket.socket) -> bool:
    """Whether nothing more comes for 2 ticks of half a second."""
    manager.settimeout(1.0)
    try:
        manager.recv(4096)
    except TimeoutError:
        return True
    return False
