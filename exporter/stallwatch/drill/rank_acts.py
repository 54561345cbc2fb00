"""What ranks do out of the ordinary: each act really happens, in the process of the rank."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import Thread
from types import FrameType

from .conditions import Condition
from .crowd import wait_for_ever
from .memory_cgroup import enter
from .pen import Pen
from .places import BLOB, COMPILERS, FILE_LOCK, FLOCK
from .weights import read_slowly

RELEASE = signal.SIGUSR1
"""Sent to a culprit that sleeps: it wakes and goes to the barrier, and the start goes on."""

STEPS = 20
"""Of a bar that crawls."""

_FOR_EVER = 86_400
_BATON_SECONDS, _FLOCK_SECONDS = 0.1, 0.05
"""How often torch's FileBaton and filelock look again."""

_CLONE_VFORK = 0x4000
_STACK_BYTES = 64 << 10
_MEBIBYTE = 1 << 20
_MOST_MEMORY_MIB = 256

_SLEEPING_COMPILER = "import time; time.sleep(86400)"
_WORKING_COMPILER = """
import os, sys, time
os.nice(10)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    busy = time.monotonic() + 0.04
    while time.monotonic() < busy:
        pass
    time.sleep(0.06)
"""


@dataclass(frozen=True, slots=True)
class Actor:
    """A rank as its acts see it.  `folder`: that of the stand-in."""

    condition: Condition
    pen: Pen
    weights: Path
    folder: Path
    barrier: Barrier

    def read_for(self, seconds: float) -> None:
        speed = self.condition.slow_bytes_per_second
        for _ in read_slowly(self.weights, int(seconds * speed), speed):
            pass

    def steps(self) -> Iterator[float]:
        """Shares of slow work, each after its time."""
        for step in range(1, STEPS + 1):
            time.sleep(self.condition.slow_seconds / STEPS)
            yield step / STEPS


class ReleasedError(Exception):
    """Raised by the RELEASE signal in a culprit that sleeps."""


def _sleep(_actor: Actor) -> None:
    def release(_number: int, _frame: FrameType | None) -> None:
        raise ReleasedError

    signal.signal(RELEASE, release)
    with suppress(ReleasedError):
        while True:
            time.sleep(_FOR_EVER)


def _spin(actor: Actor) -> None:
    os.nice(19)
    while actor.barrier.n_waiting < actor.barrier.parties - 1:
        pass


def _stop_briefly(actor: Actor) -> None:
    """A child wakes us: a stopped process cannot wake itself."""
    command = ["/bin/sh", "-c", f"sleep {actor.condition.beat_seconds / 2:.3f}; kill -CONT {os.getpid()}"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL):
        os.kill(os.getpid(), signal.SIGSTOP)


def _block(seconds: float) -> None:
    """Be in state D while a child made by vfork sleeps: the kernel lets no other signal than SIGKILL through."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    stack = ctypes.create_string_buffer(_STACK_BYTES)
    top = (ctypes.addressof(stack) + _STACK_BYTES) & ~15
    sleep = ctypes.cast(libc.sleep, ctypes.c_void_p)
    child = libc.clone(sleep, top, _CLONE_VFORK | signal.SIGCHLD, ctypes.c_void_p(max(1, round(seconds))))
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone")
    os.waitpid(child, 0)


def _await_file(actor: Actor) -> None:
    """As torch's FileBaton: until the file is gone, however long that takes."""
    while (actor.folder / FILE_LOCK).exists():
        time.sleep(_BATON_SECONDS)


def _await_lock(actor: Actor) -> None:
    """As huggingface_hub around filelock: tries again and again, and says so every 10 s (times divided by speed)."""
    path, began = actor.folder / FLOCK, time.monotonic()
    with path.open("ab") as file:
        for beat in count(1):
            if _is_locked_within(file.fileno(), began + beat * actor.condition.beat_seconds / 6):
                return
            actor.pen.draw(f"Still waiting to acquire lock on {path} (elapsed: {10.0 * beat} seconds)\n")


def _is_locked_within(descriptor: int, deadline: float) -> bool:
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_FLOCK_SECONDS)
    return False


def _take_memory(actor: Actor) -> None:
    """Join the cgroup with the limit and take more than it allows: the kernel ends this process here."""
    enter(actor.folder)
    taken = [bytearray(os.urandom(1) * _MEBIBYTE) for _ in range(_MOST_MEMORY_MIB)]
    raise MemoryError(f"{len(taken)} MiB were allowed")


def _download(actor: Actor, stops_at: float = 1.0) -> None:
    """Over a real connection, into a file beside the cache; nothing comes any more after `stops_at` (a share)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    Thread(target=_feed, args=(actor, far, stops_at), daemon=True).start()
    blob = actor.folder / BLOB
    blob.parent.mkdir(parents=True, exist_ok=True)
    with closing(near), blob.with_suffix(".incomplete").open("ab") as file:
        for step in range(1, STEPS + 1):
            file.write(near.recv(4096, socket.MSG_WAITALL))
            done, total = 0.25 * step, 0.25 * STEPS
            actor.pen.draw(
                f"\rmodel-00001-of-00001.safetensors: {100 * step // STEPS:3d}%|{'#' * (step // 2):<10}| "
                f"{done:.2f}G/{total:.2f}G [00:{step:02d}<00:{STEPS - step:02d}, 7.10MB/s]"
            )
    actor.pen.draw("\n")


def _feed(actor: Actor, far: socket.socket, stops_at: float) -> None:
    for share in actor.steps():
        if share > stops_at:
            wait_for_ever()
        far.sendall(bytes(4096))
    far.close()


def _crawl(actor: Actor) -> None:
    """The bar of a load, and nothing else."""
    for share in actor.steps():
        if share < 1:
            actor.pen.draw(actor.pen.story.bar(share, actor.pen.speaker))


def _compile(actor: Actor) -> None:
    """One compiler after the other, each at work for half a minute (divided by speed)."""
    actor.pen.say(actor.pen.story.begin_compile())
    end, each = time.monotonic() + actor.condition.slow_seconds, actor.condition.beat_seconds / 2
    while time.monotonic() < end:
        _run_compiler(actor, _WORKING_COMPILER, f"{each:.3f}")
    actor.pen.say(actor.pen.story.end_compile())


def _compile_for_ever(actor: Actor) -> None:
    actor.pen.say(actor.pen.story.begin_compile())
    _run_compiler(actor, _SLEEPING_COMPILER)


def _run_compiler(actor: Actor, code: str, *words: str) -> None:
    """A child with a compiler's name; we read its output, as a build does."""
    name = actor.folder / COMPILERS / "cicc"
    name.parent.mkdir(exist_ok=True)
    if not name.exists():
        name.symlink_to(os.path.realpath(sys.executable))
    subprocess.run(
        [str(name), "-I", "-S", "-c", code, *words], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )


ACTS: Mapping[str, Callable[[Actor], None]] = {
    "sleep": _sleep,
    "wait": lambda _actor: wait_for_ever(),
    "spin": _spin,
    "read": lambda actor: actor.read_for(actor.condition.slow_seconds),
    "stop": lambda _actor: os.kill(os.getpid(), signal.SIGSTOP),
    "stop-briefly": _stop_briefly,
    "die": lambda _actor: os.kill(os.getpid(), signal.SIGKILL),
    "block": lambda _actor: _block(_FOR_EVER),
    "block-briefly": lambda actor: _block(actor.condition.pause_seconds),
    "await-file": _await_file,
    "await-lock": _await_lock,
    "take-memory": _take_memory,
    "download": _download,
    "download-until-stuck": lambda actor: _download(actor, stops_at=0.1),
    "crawl": _crawl,
    "compile": _compile,
    "compile-for-ever": _compile_for_ever,
}
