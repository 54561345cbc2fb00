"""Stand-ins as `drill run` starts them, but small and fast; and what must go with them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from stallwatch.drill.command import server_name
from stallwatch.drill.table import find_condition

from . import harness
from .harness import PATIENCE, wait_until

SPEED = 16.0
SMALL: Mapping[str, float] = {
    "ranks": 4,
    "spinner": 2,
    "threads": 20,
    "frontend_threads": 10,
    "poller_threads": 1,
    "load_seconds": 6.0,
    "slow_seconds": 33.0,
}
"""What two cores bear several times at once.  Slow work takes more than two stalls."""
SEEN_FIRST: Mapping[str, float] = {"dead-rank": 15.0, "zombie-rank": 15.0, "oom-killed-rank": 15.0}
"""Seconds of load: a rank that dies before it was seen did not die, it is missing."""


class Drilled(harness.StandIn):
    """A stand-in as `drill run` starts it, but small."""

    def __init__(self, name: str, folder: Path, cards: Path | None = None, limit: str = "3m") -> None:
        self.condition = find_condition(name)
        settings = {key: value for key, value in SMALL.items() if key != "ranks" or self.condition.ranks > 1}
        settings["load_seconds"] = SEEN_FIRST.get(name, SMALL["load_seconds"])
        super().__init__(name, folder, cards, **settings)
        self.command += ["--speed", f"{SPEED:g}"]
        self.command[self.command.index("10m")] = limit
        self.name = server_name(self.condition, self.port)

    def wait_started(self) -> None:
        wait_until(lambda: "pid " in self.tail(), PATIENCE, f"a stand-in\n{self.tail()}")


def assert_gone(drill: Drilled, family: list[psutil.Process], paths: list[Path]) -> None:
    wait_until(lambda: not any(map(lives, family)), PATIENCE, f"{drill.condition.name}: all gone: {family}")
    wait_until(lambda: not any(map(os.path.exists, paths)), PATIENCE, f"{drill.condition.name}: {paths} removed")
    wait_until(lambda: is_free(drill.port), PATIENCE, f"{drill.condition.name}: port {drill.port} free")


def remains(drill: Drilled) -> tuple[list[psutil.Process], list[Path]]:
    """What must go with it: its processes, once the ranks run, and its folder and cgroup."""
    ranks = find_condition(drill.condition.name).ranks if drill.condition.ranks == 1 else int(SMALL["ranks"])
    family = wait_until(lambda: f if len(f := drill.family()) >= 2 + ranks else None, PATIENCE, "all", 0.3)
    folder = next(path for process in family if (path := Path(cwd_of(process))).name.startswith("stallwatch-drill-"))
    cgroup = folder / "cgroup"
    return family, [folder, *([Path(cgroup.read_text())] if cgroup.exists() else [])]


def cwd_of(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return "/"


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
