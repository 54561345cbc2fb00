"""Shared memory that nobody holds: segments left in /dev/shm by processes that were killed.

They take the memory that the next start needs, and none of it belongs to a process.  Which ones they are is found by
shm_child, a child that nobody waits for long; here it is decided when it looks.  As long as there is nothing old and
large in the folder, it does not.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..model import Reading, Signal
from . import Host, Moment
from .blocking_reads import MOST_ABANDONED, start_helper
from .procfs import reason_of
from .shm_child import LEAST_BYTES, LONGEST_SECONDS, segments

SHM_ORPHAN = Signal(
    "node_shm_orphan_bytes",
    "Bytes of files in /dev/shm, a minute old or more, that no live process maps or has open; less than 1 MiB counts "
    "as none.  Absent when not every process can be looked at.",
    (),
    "node",
)

LOOK_SECONDS = 60.0
SHARE = 500.0
"""A look that took so much CPU time is followed by that many times as long without one: 0.2 % of a core at most."""
TURN_SECONDS = 0.25
"""How long a turn waits for an answer; one that comes later is taken at the next turn."""
GIVE_UP_SECONDS = LONGEST_SECONDS + 10.0

_MOST_BYTES = 4 << 20
_END_SECONDS = 0.2
_PACKAGES = str(Path(__file__).parents[2])
_PROGRAM = (
    "-c",
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from stallwatch.sources.shm_child import main; main()",
    _PACKAGES,
)
start_looker = partial(start_helper, program=_PROGRAM)

Start = Callable[[Path], "subprocess.Popen[bytes]"]


class _UnknownError(Exception):
    """It cannot be known; `args[0]` is the reason."""


class _Look:
    """One child at work."""

    def __init__(self, child: subprocess.Popen[bytes], request: Mapping[str, Any], began: float) -> None:
        self.child, self.began, self._answer = child, began, b""
        assert child.stdin is not None  # noqa: S101  # both pipes were asked for
        assert child.stdout is not None  # noqa: S101
        self._pipe = child.stdout
        with suppress(OSError):  # it ended at once: the answer is empty
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.close()

    def answer(self, seconds: float) -> Mapping[str, Any] | None:
        """What it says, waited for so long; None = nothing yet."""
        come = select.poll()  # select() refuses descriptors above 1023, and the threads collector keeps more
        come.register(self._pipe.fileno(), select.POLLIN)
        while come.poll(1000 * seconds):
            part = os.read(self._pipe.fileno(), 1 << 16)
            if not part or len(self._answer) > _MOST_BYTES:
                return self._parsed()
            self._answer += part
        return None

    def _parsed(self) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = json.loads(self._answer)
        except ValueError:
            return {"reason": "error"}
        return found

    def end(self) -> bool:
        """Whether it is gone; one in uninterruptible sleep does not even die of SIGKILL."""
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self.child.kill()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(_END_SECONDS)
        return self.child.poll() is not None


class Orphans:
    """When to look, and what the last look said; run by the `node` collector, which must not wait for it long."""

    def __init__(self, host: Host, start: Start | None = None, turn_seconds: float = TURN_SECONDS) -> None:
        self._proc, self._folder, self._start = host.proc, host.root / "dev/shm", start or start_looker
        self._turn_seconds = turn_seconds
        self._due = self._look_due = float("-inf")
        self._look: _Look | None = None
        self._abandoned: list[subprocess.Popen[bytes]] = []
        self._unheld: Mapping[int, int] | None = None  # of the last look: inode -> bytes; None = not known
        self._counted: Mapping[int, int] | None = None  # those of them that are told of
        self._holders: list[int] = []

    def read(self, now: Moment) -> Iterator[Reading]:
        """stallwatch_node_shm_orphan_bytes 1.93e+10; nothing before the first look has ended."""
        try:
            self._turn(now)
        except OSError as error:
            yield self._missing(reason_of(error))
        except _UnknownError as problem:
            yield self._missing(str(problem))
        if self._counted is not None:
            total = sum(self._counted.values())
            yield SHM_ORPHAN.read(float(total) if total >= LEAST_BYTES else 0.0)

    def close(self) -> None:
        """End the child; only one that the kernel does not let die is left."""
        if self._look is not None:
            self._look.end()
            self._look = None

    def _turn(self, now: Moment) -> None:
        if self._look is None and now.monotonic >= self._due:
            self._due = now.monotonic + LOOK_SECONDS
            self._begin(now)
        if self._look is not None:
            self._take(self._look, now)

    def _begin(self, now: Moment) -> None:
        """Who is gone is found in the folder; who holds the rest, by a look, when one is due."""
        found = segments(os.fspath(self._folder), now.wall)
        if not found.are_many:
            self._unheld = self._counted = {}
        elif now.monotonic >= self._look_due:
            self._abandoned = [child for child in self._abandoned if child.poll() is None]
            if len(self._abandoned) >= MOST_ABANDONED:
                raise _UnknownError("timeout")
            request = {"folder": os.fspath(self._folder), "first": self._holders}
            self._look = _Look(self._start(self._proc), request, now.monotonic)
        elif self._counted is not None:
            self._counted = {inode: found.bytes[inode] for inode in self._counted if inode in found.bytes}

    def _take(self, look: _Look, now: Moment) -> None:
        answer = look.answer(self._turn_seconds)
        if answer is None and now.monotonic - look.began < GIVE_UP_SECONDS:
            return
        self._look = None
        if not look.end():
            self._abandoned.append(look.child)
        if answer is None or "reason" in answer:
            raise _UnknownError("timeout" if answer is None else answer["reason"])
        self._look_due = now.monotonic + SHARE * answer["cpu"]
        self._learn({int(inode): size for inode, size in answer["unheld"].items()})
        self._holders = answer["holders"]

    def _learn(self, unheld: Mapping[int, int]) -> None:
        """A segment that was held at the last look, and is not at this one, may be changing hands: it waits."""
        before, self._unheld = self._unheld, unheld
        self._counted = {inode: size for inode, size in unheld.items() if before is None or inode in before}

    def _missing(self, reason: str) -> Reading:
        """Said once for each look that failed."""
        self._unheld = self._counted = None
        return SHM_ORPHAN.missing(reason)
