"""cmdline and environ of a process, through a helper process that may be left behind when it hangs.

Reading those two files waits for the process's mmap lock (a page fault on dead storage holds it for hours).
So a child does it (blocking_child); the parent waits no longer than a deadline.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..children import Child
from ..model import ProcessId

log = logging.getLogger(__name__)

MOST_ABANDONED = 2
"""Helpers that may hang at once; a process in uninterruptible sleep does not even die of SIGKILL."""

_END_SECONDS = 0.2
_LIBRARIES = "LD_LIBRARY_PATH"
"""The one variable a helper may need to start at all: where the interpreter's own libraries are."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Arguments and the few known variables of a process; `reason` is set when they could not be read.

    The words may hold secrets: they are parsed into facts and then dropped, never stored or shown.
    """

    argv: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None


def from_answer(answer: Mapping[str, Any]) -> CommandLine:
    """What the helper says of one process (blocking_child.answer)."""
    if "reason" in answer:
        return CommandLine(reason=answer["reason"])
    return CommandLine(tuple(answer["argv"]), answer["environ"])


class CommandLines(Protocol):
    """Whoever reads command lines; a test does without a helper process."""

    def command_line(self, process: ProcessId) -> CommandLine: ...

    def rest(self) -> None: ...

    def close(self) -> None: ...


_READER = (str(Path(__file__).with_name("blocking_child.py")),)


def start_helper(
    proc: Path, popen: type[subprocess.Popen[bytes]] = Child, program: Sequence[str] = _READER
) -> subprocess.Popen[bytes]:
    """A helper that reads below `proc`, with nothing of our environment; `program` is what Python is to run."""
    return popen(
        [sys.executable, "-I", "-S", *program, str(proc)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={_LIBRARIES: os.environ[_LIBRARIES]} if _LIBRARIES in os.environ else {},
    )


class BlockingReads:
    """Asks the helper; starts one when needed, gives it up when it hangs."""

    def __init__(
        self,
        proc: Path,
        deadline_seconds: float,
        start: Callable[[Path], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self._proc, self._deadline, self._start = proc, deadline_seconds, start or start_helper
        self._child: subprocess.Popen[bytes] | None = None
        self._abandoned: list[subprocess.Popen[bytes]] = []
        self._buffer = b""
        self._failed = False

    def command_line(self, process: ProcessId) -> CommandLine:
        """Read once, within the deadline; `reason` is timeout, permission, vanished or error otherwise."""
        return from_answer(self.ask(f"{process.pid} {process.start_ticks}"))

    def ask(self, request: str) -> Mapping[str, Any]:
        """What the helper answers to one line, within the deadline; else only a `reason`, timeout or error."""
        self._abandoned = [child for child in self._abandoned if child.poll() is None]
        if len(self._abandoned) >= MOST_ABANDONED:
            return {"reason": "timeout"}
        try:
            self._send(f"{request}\n".encode())
            line = self._receive(time.monotonic() + self._deadline)
        except (OSError, EOFError):
            self._give_up()
            return {"reason": "error"}
        if line is None:
            self._give_up()
            return {"reason": "timeout"}
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def rest(self) -> None:
        """End the helper until it is needed again."""
        if self._child is not None:
            child, self._child = self._child, None
            self._end(child)

    def close(self) -> None:
        """End every helper; only one that the kernel does not let die is left."""
        self.rest()
        for child in self._abandoned:
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_END_SECONDS)

    def _send(self, request: bytes) -> None:
        if self._child is None or self._child.poll() is not None:
            self.rest()
            self._buffer = b""
            self._child = self._started()
        assert self._child.stdin is not None  # noqa: S101  # both pipes were asked for
        self._child.stdin.write(request)

    def _started(self) -> subprocess.Popen[bytes]:
        """A new helper; said once when none can be started, for then no server is found."""
        try:
            child = self._start(self._proc)
        except OSError as error:
            if not self._failed:
                facts = {"interpreter": sys.executable, "problem": error.strerror or "error"}
                log.error("command lines cannot be read: the helper does not start", extra=facts)
            self._failed = True
            raise
        self._failed = False
        return child

    def _receive(self, until: float) -> bytes | None:
        """One line of the helper; None when it does not come in time."""
        assert self._child is not None  # noqa: S101  # _send made it
        assert self._child.stdout is not None  # noqa: S101
        fd = self._child.stdout.fileno()
        answers = select.poll()  # select() refuses descriptors above 1023, and the threads collector keeps more
        answers.register(fd, select.POLLIN)
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not answers.poll(1000 * left):
                return None
            part = os.read(fd, 1 << 16)
            if not part:
                raise EOFError
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _give_up(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            self._end(child)

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        try:
            child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            self._abandoned.append(child)
