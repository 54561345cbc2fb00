"""Logs on mounts that may stop answering: read in threads of their own, so that a dead one stops its own logs only.

One thread at a time for each mount, and a bounded number of them in all, because one that waits for a dead mount
cannot be ended.  It ends by itself when the mount answers or goes; its log is then read on where it was.
A log on a local file system is read at once, without a thread.
On FUSE no log is kept open between two reads (see Mounts.may_keep), and what is open during one is the thread's alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ...descriptors import keep_apart
from .mounts import Mounts
from .tail import LogTail

MOST_WAITING = 8
"""Mounts that may be waited for at once; the logs on others are not read meanwhile."""
TURN_SECONDS = 0.25
"""How long a turn waits for a far log; what comes later is taken up at the next one."""
FAR_BYTES = 8 << 20
"""Most bytes of a far log in one turn: they are all kept until they are taken."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Job:
    """Something done on a mount, in its thread; `then` is done behind it."""

    work: Callable[[], Any]
    began: float
    is_apart: bool = False  # no child may get what it opens
    result: Any = None
    done: threading.Event = field(default_factory=threading.Event)
    then: list[Callable[[], Any]] = field(default_factory=list)


class Guards:
    """Who is waited for.  `deadline_seconds`: a mount that answers later than that is said to be dead."""

    def __init__(
        self,
        mounts: Mounts,
        deadline_seconds: float = 2.0,
        turn_seconds: float = TURN_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mounts, self.deadline, self.turn, self._monotonic = mounts, deadline_seconds, turn_seconds, monotonic
        self._jobs: dict[str, _Job] = {}  # by mount, those that are not done
        self._refused: set[str] = set()  # mounts for which no thread could be started at the last try
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Threads that have not come back."""
        return len(self._jobs)

    def start(self, mount: str, work: Callable[[], Any], shares: bool = False) -> _Job | None:
        """Begin something on a mount; None while it is busy, or too many others are, or no thread can be started.

        `shares`: it goes on with a file that was opened outside of its thread.
        """
        with self._lock:
            if mount in self._jobs or len(self._jobs) >= MOST_WAITING:
                return None
            return self._begin(mount, work, shares)

    def afterwards(self, mount: str, work: Callable[[], None]) -> None:
        """Do something on a mount as soon as it, or with too many waiting any other, is free; nobody waits for it."""
        with self._lock:
            if mount not in self._jobs and len(self._jobs) < MOST_WAITING:
                self._begin(mount, work)
            else:
                (self._jobs.get(mount) or next(iter(self._jobs.values()))).then.append(work)

    def _begin(self, mount: str, work: Callable[[], Any], shares: bool = False) -> _Job | None:
        job = _Job(work, self._monotonic(), is_apart=not shares and not self.mounts.may_keep(mount))
        try:
            threading.Thread(target=self._run, args=(mount, job), name="far-log", daemon=True).start()
        except RuntimeError:  # a limit of processes and threads; who asks, asks again
            self._refused.add(mount)
            return None
        self._refused.discard(mount)
        self._jobs[mount] = job
        return job

    def is_late(self, mount: str) -> bool:
        """Whether what is being done there should have been done."""
        with self._lock:
            job = self._jobs.get(mount)
        if job is None:
            return len(self._jobs) >= MOST_WAITING or mount in self._refused
        return self._monotonic() - job.began >= self.deadline

    def tail(self, path: str, owner: int | None) -> LogTail:
        return GuardedTail(self, path, owner)

    def chunks(self, mount: str, source: Generator[bytes]) -> Iterator[bytes | None]:
        """What `source` yields, got in the mount's thread; None while it does not come, to be asked again later."""
        try:
            while True:
                while (job := self.start(mount, lambda: next(source, None))) is None:
                    yield None
                seconds = self.turn
                while not job.done.wait(seconds):
                    seconds = 0.0
                    yield None
                if job.result is None:
                    return
                yield job.result
        except GeneratorExit:  # left in the middle: closing the file may hang, too
            self.afterwards(mount, source.close)
            raise

    def _run(self, mount: str, job: _Job) -> None:
        if job.is_apart:
            keep_apart()
        try:
            job.result = job.work()
            while (work := self._next(mount, job)) is not None:
                work()
        finally:
            with self._lock:
                if self._jobs.get(mount) is job:
                    del self._jobs[mount]
            job.done.set()

    def _next(self, mount: str, job: _Job) -> Callable[[], Any] | None:
        with self._lock:
            if job.then:
                return job.then.pop(0)
            del self._jobs[mount]
            return None


@dataclass(slots=True)
class _Question:
    """`answer` in a list: none yet, or the last one."""

    mount: str = ""
    job: _Job | None = None
    answer: list[Any] = field(default_factory=list)


class Questions:
    """What is asked again and again of paths that may be far.

    Near ones answer at once.  A far one answers in its mount's thread; until it does its last answer holds.
    """

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self._asked: dict[str, _Question] = {}

    def ask(self, name: str, mount: str | None, work: Callable[[], _T]) -> _T | None:
        """The answer, or the one before; None while there never was one.  `work` must not fail, nor answer None."""
        if mount is None:
            self._asked.pop(name, None)
            return work()
        question, seconds = self._asked.setdefault(name, _Question()), 0.0
        if question.job is None:
            question.mount, question.job = mount, self.guards.start(mount, work)
            seconds = self.guards.turn
        if question.job is not None and question.job.done.wait(seconds):
            if question.job.result is not None:
                question.answer = [question.job.result]
            question.job = None
        return question.answer[0] if question.answer else None

    def is_open(self, name: str) -> bool:
        """Whether there is no answer, or the next one is overdue."""
        question = self._asked.get(name)
        if question is None:
            return False
        return not question.answer or (question.job is not None and self.guards.is_late(question.mount))

    def forget(self, names: Collection[str]) -> None:
        """Nobody will ask these again."""
        for name in names:
            self._asked.pop(name, None)


class GuardedTail(LogTail):
    """Follows one path as LogTail does, and in a thread while it leads to a far mount.

    What is seen from outside is as of the last read that came back; `timeout` is the reason while none does.
    """

    def __init__(self, guards: Guards, path: str, owner: int | None = None) -> None:
        super().__init__(path, owner=owner)
        self._guards = guards
        self._far: LogTail | None = None  # belongs to the thread while a job runs
        self._mount = ""
        self._job: _Job | None = None
        self._late = 0  # times it did not answer
        self._is_waiting = False

    @property
    def is_waiting(self) -> bool:
        return self._is_waiting

    @property
    def far_mount(self) -> str | None:
        return None if self._far is None else self._mount

    def read(self, most_bytes: int) -> Iterator[bytes]:
        mount = self._guards.mounts.far(self.path)
        if mount is None and self._far is None:
            return super().read(most_bytes)
        if self._far is None:
            if not self._guards.mounts.may_keep(mount or ""):
                self.rest()  # its thread has files of its own
            self._far = LogTail(self.path, owner=self.owner, is_apart=self.is_apart)
            self._take_over(self, self._far)
        if self._job is None:  # else it is still the one that is waited for
            self._mount = mount or self._mount
        return self._read_far(self._far, min(most_bytes, FAR_BYTES))

    def mark(self, offset: int, seal: Callable[..., str]) -> str | None:
        far = self._far
        if far is None:
            return super().mark(offset, seal)
        job = self._guards.start(self._mount, lambda: _mark(far, offset, seal)) if self._job is None else None
        if job is None or not job.done.wait(self._guards.deadline):
            return None
        mark: str | None = job.result
        return mark

    def close(self) -> None:
        if self._far is None:
            super().close()
        else:
            self._guards.afterwards(self._mount, self._far.close)

    def _is_here(self, path: str) -> bool:
        mounts = self._guards.mounts
        return mounts.far(path) is None and not mounts.far_inside(os.path.dirname(path))

    def _read_far(self, far: LogTail, most_bytes: int) -> Iterator[bytes]:
        seconds = 0.0
        if self._job is None:
            path, owner, seconds = self.path, self.owner, self._guards.turn
            rests = not self._guards.mounts.may_keep(self._mount)
            is_open = far.identity is not None
            self._job = self._guards.start(
                self._mount, lambda: _read_all(far, path, owner, most_bytes, rests), shares=is_open
            )
        self._is_waiting = self._job is None or not self._job.done.wait(seconds)
        if self._job is None or self._is_waiting:
            self._wait_on()
            return
        parts, self._job = self._job.result, None
        for part in parts or ():
            if isinstance(part, bytes):
                yield part
            else:
                self.rotations, self.truncations = part
                self.boundary()
        self._take_over(far, self)
        self.errors += self._late

    def _wait_on(self) -> None:
        """Nothing came this time; what was seen last holds until the mount is late."""
        if self.identity is None or self._guards.is_late(self._mount):
            self._late += self.reason != "timeout"
            self.errors += self.reason != "timeout"
            self.reason = "timeout"

    def _take_over(self, one: LogTail, other: LogTail) -> None:
        for name in ("bytes_read", "rotations", "truncations", "errors", "backlog", "found", "modified", "reason"):
            setattr(other, name, getattr(one, name))
        file = one._file or (one._before if one.reason is None else None)  # it may be at rest
        other._file = replace(file) if file is not None else None


def _mark(tail: LogTail, offset: int, seal: Callable[..., str]) -> str | None:
    """In the thread: the mark of its file, also when that is at rest."""
    if tail._file is not None or tail._before is None:
        return tail.mark(offset, seal)
    other = LogTail(tail.path, owner=tail.owner)
    try:
        for _ in other.read(0):
            pass
        return other.mark(offset, seal) if other.identity == tail._before.identity else None
    finally:
        other.close()


def _read_all(
    tail: LogTail, path: str, owner: int | None, most_bytes: int, rests: bool
) -> list[bytes | tuple[int, int]]:
    """In the thread: the chunks, and between them rotations and truncations so far, where another file begins."""
    parts: list[bytes | tuple[int, int]] = []
    tail.path, tail.owner = path, owner
    tail.boundary = lambda: parts.append((tail.rotations, tail.truncations))
    for chunk in tail.read(most_bytes):
        parts.append(chunk)
    if rests:
        tail.rest()
    return parts
