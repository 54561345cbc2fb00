"""Whether a system unit is being stopped on purpose: one question to systemd, which nobody waits for.

`systemctl show` runs as a child.  Its answer is taken at the next look, and a child that gives none in time is
ended.  Asked is only the systemd of this very machine, and believed only when the unit has the control group that
the server was seen in.
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..children import Child
from .cgroups import cgroups_in

DEADLINE_SECONDS = 2.0
MOST_ASKED = 8
"""Questions in flight at once, those included whose child does not even die of SIGKILL."""

_BOOTED = "run/systemd/system"
"""There when systemd is the first process (sd_booted(3))."""
_PROGRAMS = ("/usr/bin/systemctl", "/bin/systemctl")
_SHOW = ("show", "--no-pager", "--property=ActiveState,Result,ControlGroup", "--")
_NAME = re.compile(r"[A-Za-z0-9:_.@\\-]+\.service")
"""A unit's name as systemd escapes it; any other would be a pattern of many units to systemctl."""
_SYSTEM = "/system.slice"
_MOST_BYTES = 4096
_END_SECONDS = 0.2


def find_program(root: Path) -> str:
    """systemctl, if it would ask the systemd of the machine whose root this is; "" if not."""
    try:
        if not os.path.samefile(root / _BOOTED, f"/{_BOOTED}"):
            return ""
    except OSError:
        return ""
    return next((path for path in _PROGRAMS if os.access(path, os.X_OK)), "")


def is_stopping(answer: bytes, text: str) -> bool | None:
    """From the answer of systemctl and the cgroup file of the server; None when the answer is not about it.

    A unit whose main process crashed is `deactivating` as well while the rest is ended; its Result is then no
    success any more.  Once a unit has ended it has no group: then only a failure is believed, for a unit in the
    system's own slice.
    """
    pairs = (line.partition("=") for line in answer.decode("utf-8", "replace").splitlines())
    found = {name: value for name, _, value in pairs}
    group, result = found.get("ControlGroup", "").rstrip("/"), found.get("Result", "success")
    is_its_own = any((other.path + "/").startswith(f"{group or _SYSTEM}/") for other in cgroups_in(text))
    if not is_its_own or (not group and result == "success"):
        return None
    return found.get("ActiveState") == "deactivating" and result == "success"


@dataclass(slots=True)
class _Question:
    child: subprocess.Popen[bytes]
    asked_at: float


class UnitStates:
    """Questions in flight, by the name of the server they are about."""

    def __init__(self, program: str, popen: type[subprocess.Popen[bytes]] = Child) -> None:
        self._program, self._popen = program, popen
        self._questions: dict[str, _Question] = {}
        self._abandoned: list[subprocess.Popen[bytes]] = []

    def ask(self, server: str, unit: str, now: float) -> None:
        """Ask about the unit of a server, unless a question is in flight already, or there is nobody to ask."""
        self._abandoned = [child for child in self._abandoned if child.poll() is None]
        is_full = len(self._questions) + len(self._abandoned) >= MOST_ASKED
        if not self._program or server in self._questions or is_full or not _NAME.fullmatch(unit):
            return
        try:
            child = self._popen(
                [self._program, *_SHOW, unit],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={"LC_ALL": "C"},
            )
        except OSError:
            return  # no answer, as where there is no systemd
        self._questions[server] = _Question(child, now)

    def answer(self, server: str, now: float) -> bytes | None:
        """What was answered; None when nothing was asked, when it is not there yet, or does not come in time."""
        question = self._questions.get(server)
        if question is None:
            return None
        status = question.child.poll()
        if status is None and now - question.asked_at < DEADLINE_SECONDS:
            return None
        del self._questions[server]
        if status is None:
            self._give_up(question.child)
            return None
        assert question.child.stdout is not None  # noqa: S101  # the pipe was asked for
        with question.child.stdout as pipe:
            os.set_blocking(pipe.fileno(), False)
            return (pipe.read(_MOST_BYTES) or b"") if status == 0 else None

    def _give_up(self, child: subprocess.Popen[bytes]) -> None:
        child.kill()
        if child.stdout is not None:
            child.stdout.close()
        self._abandoned.append(child)

    def close(self) -> None:
        """End every child; only one that the kernel does not let die is left."""
        for question in self._questions.values():
            self._give_up(question.child)
        self._questions.clear()
        for child in self._abandoned:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_END_SECONDS)
