"""A real systemd, booted beside this machine's own services, to run the unit as users do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from e2e.harness import Program, wait_until

from .packages import ROOT

HERE = Path(__file__).parent
SYSTEMD = Path("/lib/systemd/systemd")
NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount", "--cgroup", "--uts", "--ipc")
BOOT_SECONDS = 180.0
"""Whoever cannot boot within them is said to be unable to."""
COMMAND_SECONDS = 180.0


class CannotBootError(RuntimeError):
    """This machine does not let a systemd start; the text says what it said."""


class Booted:
    """Its network is this machine's; its processes, mounts and control groups are its own."""

    def __init__(self, folder: Path) -> None:
        place = folder / "boot"
        place.mkdir()
        self._place = place
        environment = {
            "STALLWATCH_TREE": str(ROOT),
            "STALLWATCH_ENVIRONMENT": str(Path(sys.prefix)),
        }
        words = ["unshare", *NAMESPACES, "bash", str(HERE / "boot.sh"), str(place)]
        self._program = Program(words, folder / "boot.log", environment)

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("nsenter") is None:
            raise CannotBootError("root, systemd and util-linux are needed")
        self._program.__enter__()
        try:
            wait_until(self._is_up, BOOT_SECONDS, "a systemd that answers")
        except AssertionError:
            self._program.end()
            raise CannotBootError(self._program.tail(4)) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.run("journalctl", "--no-pager", "-n", "60", "-u", "stallwatch", check=False).stdout)
        self._program.end(1.0)  # unshare passes no signal on

    def _is_up(self) -> bool:
        assert self._program.process.poll() is None
        if self.first is None:
            return False
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in ("running", "degraded")

    @property
    def first(self) -> int | None:
        """PID, here, of the process that is the first one there; None while it is not systemd yet."""
        for child in psutil.Process(self._program.pid).children():
            if child.name() == "systemd":
                return child.pid
        return None

    def inside(self, *words: str) -> list[str]:
        """The command that runs `words` in there, as root."""
        return ["nsenter", "-t", str(self.first), "-m", "-p", "-u", "-i", "-C", "-r", "-w", *words]

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.inside(*words), capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def write(self, path: str, text: str) -> None:
        subprocess.run(self.inside("tee", path), input=text.encode(), stdout=subprocess.DEVNULL, check=True)

    def property(self, name: str) -> str:
        return self.run("systemctl", "show", "--value", "-p", name, "stallwatch").stdout.strip()
