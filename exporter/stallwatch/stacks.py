"""`check --stacks`: where the ranks of a server that stands still are, in Python and in the kernel.

For a person at a terminal: never in a Report, on a page, in a metric or in a recording.  Only names leave: of
functions, files and kernel symbols; no arguments, no local variables, no command line.

Python stacks come from py-spy (https://github.com/benfred/py-spy) where somebody installed it, in its mode that
only reads the memory of the process and does not stop it.  Kernel stacks come from /proc/PID/task/TID/stack.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .children import Child
from .printable import printable
from .rights import are_calls_filtered
from .sources.procfs import ProcFs, Stat, parse_stat

STATES = ("stalled", "suspect")
"""Of servers in these states stacks are taken."""

SPY_SECONDS = 10.0
"""py-spy hangs when the process holds its mmap lock (a page fault on dead storage does): it is killed then."""

KERNEL_SECONDS = 3.0
WHOLE_SECONDS = 60.0
"""For all ranks of all servers; what has not begun by then is not begun."""

LARGEST_OUTPUT = 8 << 20
"""Bytes of py-spy's answer: about 350 for each frame, a rank has some 200 threads of 10 to 40 frames."""

MOST_FRAMES = 64
MOST_STACKS = 32
"""Different stacks of one rank; threads with the same frames are one stack."""

AT_ONCE = 4
_END_SECONDS = 0.5

NOT_INSTALLED = "py-spy is not installed (`pip install py-spy`; it is looked for on PATH and beside our interpreter)"
ANOTHER_NAMESPACE = "py-spy needs PIDs of its own PID namespace: run check on the host itself"
ANOTHER_PROCESS = (
    "its PID is another process here: it ended, or the serve that answered runs on another machine or in a container"
)
OLDER_SERVE = "the serve that answered does not say when the process started, so its PID may be another one's by now"
NO_KERNEL_RIGHT = "only root with CAP_SYS_ADMIN may read it"
NO_SPY_RIGHT = "py-spy may not read the process: CAP_SYS_PTRACE (or root) is needed"
NO_TIME = "the time for all stacks together is over"

Ended = str
"""How a bounded program ended: `end`, `time` or `size`."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stack:
    """The frames that one or more threads have in common, innermost first; `name` is that of the first thread."""

    threads: tuple[int, ...]
    frames: tuple[str, ...]
    name: str = ""

    def document(self) -> dict[str, Any]:
        return {"threads": list(self.threads), "name": self.name, "frames": list(self.frames)}


@dataclass(frozen=True, slots=True)
class Stacks:
    """What is known of one rank; an empty tuple = not to be had, then `problems` says why and what would help."""

    python: tuple[Stack, ...] = ()
    kernel: tuple[Stack, ...] = ()
    problems: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The value of a rank's key `stacks`: docs/REFERENCE.md, "JSON documents"."""
        return {
            "python": [stack.document() for stack in self.python],
            "kernel": [stack.document() for stack in self.kernel],
            "problems": list(self.problems),
        }


class UnreadableError(Exception):
    """No stack of this kind; the text says why and what would help."""


@dataclass(frozen=True, slots=True)
class Tools:
    """How stacks are taken: the tree of /proc, py-spy (None = there is none), and the limits."""

    proc: Path = Path("/proc")
    py_spy: str | None = None
    spy_seconds: float = SPY_SECONDS
    kernel_seconds: float = KERNEL_SECONDS
    whole_seconds: float = WHOLE_SECONDS
    largest_output: int = LARGEST_OUTPUT


def find_py_spy(path: str | None = None) -> str | None:
    """The absolute path of py-spy: on PATH (default: the environment's), else beside our interpreter."""
    beside = os.path.dirname(sys.executable)
    places = (path if path is not None else os.environ.get("PATH", os.defpath), beside)
    found = (shutil.which("py-spy", path=place) for place in places if place)
    return next((each for each in found if each is not None and os.path.isabs(each)), None)


def add_stacks(servers: Iterable[dict[str, Any]], tools: Tools) -> None:
    """Give every rank of a server that stands still a key `stacks` (see Stacks.document).

    `servers` are those of a document, perhaps of another process: nothing in it is trusted.
    """
    ranks = [rank for server in servers if server["state"] in STATES for rank in server["ranks"]]
    asked = [rank for rank in ranks if _is_pid(rank["pid"]) and rank["alive"] is not False]
    until = time.monotonic() + tools.whole_seconds
    with ThreadPoolExecutor(AT_ONCE) as pool:
        taken = pool.map(lambda rank: _taken(rank["pid"], rank.get("start_ticks"), tools, until), asked)
        for rank, stacks in zip(asked, taken, strict=True):
            rank["stacks"] = stacks.document()


def _is_pid(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _taken(pid: int, start_ticks: object, tools: Tools, until: float) -> Stacks:
    """The stacks of one process that is known by its PID and its start time."""
    if not isinstance(start_ticks, int):
        return Stacks(problems=(OLDER_SERVE,))
    if time.monotonic() >= until:
        return Stacks(problems=(NO_TIME,))
    process = Subject(tools.proc, pid, start_ticks)
    problems: list[str] = []
    python = _or_problem("Python", lambda: _python_stacks(process, tools), problems)
    kernel = _or_problem("kernel", lambda: _within(tools.kernel_seconds, process.kernel_stacks), problems)
    return Stacks(python, kernel, tuple(problems))


def _or_problem(kind: str, take: Callable[[], tuple[Stack, ...]], problems: list[str]) -> tuple[Stack, ...]:
    try:
        return take()
    except UnreadableError as error:
        problems.append(f"no {kind} stack: {error}")
    except OSError as error:
        gone = error.errno in (errno.ENOENT, errno.ESRCH)
        problems.append(f"no {kind} stack: {'the process is gone' if gone else error.strerror or 'reading fails'}")
    return ()


def _within(seconds: float, take: Callable[[], T]) -> T:
    """What `take` returns or raises; UnreadableError when it hangs, its thread is left behind then."""
    found: list[T] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            found.append(take())
        except (OSError, ValueError, IndexError, UnreadableError) as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if found:
        return found[0]
    if raised:
        error = raised[0]
        raise error if isinstance(error, OSError | UnreadableError) else UnreadableError("reading fails")
    raise UnreadableError(f"reading takes longer than {seconds:g} s")


# --- one process in /proc ----------------------------------------------------------------------------------


class Subject:
    """One process in a /proc tree.  None of the files read here waits for its mmap lock (docs/NOISE.md)."""

    def __init__(self, proc: Path, pid: int, start_ticks: int) -> None:
        self.pid, self._proc, self._start_ticks = pid, proc, start_ticks

    @property
    def is_ours(self) -> bool:
        """Whether its PID means the same to the programs we start."""
        return ProcFs(self._proc).is_ours

    def confirm(self) -> None:
        """UnreadableError when the PID is not that process any more."""
        self._confirm(_stat(_content(self._proc / str(self.pid) / "stat")))

    def _confirm(self, stat: Stat) -> None:
        if stat.start_ticks != self._start_ticks:
            raise UnreadableError(ANOTHER_PROCESS)

    def tracer(self) -> int:
        """PID of the debugger that holds it; 0 for none."""
        match = re.search(rb"^TracerPid:\s*(\d+)$", _content(self._proc / str(self.pid) / "status"), re.MULTILINE)
        return int(match[1]) if match else 0

    def kernel_stacks(self) -> tuple[Stack, ...]:
        """Of the main thread and of threads in D.  The opened folder pins the process: no other one is read."""
        folder = os.open(self._proc / str(self.pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._confirm(_stat(_content("stat", folder)))
            stacks = [(thread, kernel_frames(text)) for thread, text in self._stack_files(folder)]
        finally:
            os.close(folder)
        return tuple(_together((thread, "", frames) for thread, frames in stacks))

    def _stack_files(self, folder: int) -> Iterator[tuple[int, bytes]]:
        for thread in self._worth_a_look(folder):
            try:
                yield thread, _content(f"task/{thread}/stack", folder)
            except PermissionError:
                raise UnreadableError(NO_KERNEL_RIGHT) from None
            except FileNotFoundError:
                if thread == self.pid:
                    raise UnreadableError("this kernel does not tell (CONFIG_STACKTRACE)") from None
            except ProcessLookupError:
                continue  # the thread ended a moment ago

    def _worth_a_look(self, folder: int) -> list[int]:
        """The main thread, and those in uninterruptible sleep."""
        tasks = os.open("task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            others = sorted(int(name) for name in os.listdir(tasks) if name.isdecimal() and int(name) != self.pid)
        finally:
            os.close(tasks)
        blocked = [thread for thread in others if self._is_blocked(thread, folder)]
        return [self.pid, *blocked]

    @staticmethod
    def _is_blocked(thread: int, folder: int) -> bool:
        try:
            return _stat(_content(f"task/{thread}/stat", folder)).state == "D"
        except (FileNotFoundError, ProcessLookupError):
            return False


def _stat(content: bytes) -> Stat:
    try:
        return parse_stat(content)
    except (ValueError, IndexError):
        raise UnreadableError("the process is gone") from None


def _content(path: str | Path, folder: int | None = None) -> bytes:
    """At most 64 KiB of a file, `path` below the opened folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


_FRAME = re.compile(r"\[<[0-9a-f]*>\] ([\w.]+)(?:\+0x[0-9a-f]+/0x[0-9a-f]+)?( \[\w+\])?")


def kernel_frames(text: bytes) -> tuple[str, ...]:
    """Symbols of a stack file, innermost first, without addresses: `[<0>] ep_poll+0x1/0x2` -> `ep_poll`."""
    found = _FRAME.findall(text.decode("ascii", "replace"))
    return tuple(printable(symbol + module) for symbol, module in found[:MOST_FRAMES])


# --- py-spy ------------------------------------------------------------------------------------------------


def _python_stacks(process: Subject, tools: Tools) -> tuple[Stack, ...]:
    if tools.py_spy is None:
        raise UnreadableError(NOT_INSTALLED)
    if not process.is_ours:
        raise UnreadableError(ANOTHER_NAMESPACE)
    process.confirm()
    if tracer := process.tracer():
        raise UnreadableError(f"another program (PID {tracer}) traces the process already")
    command = [tools.py_spy, "dump", "--nonblocking", "--json", "--pid", str(process.pid)]
    output = run_bounded(command, tools.spy_seconds, tools.largest_output)
    process.confirm()
    if output.ended == "time":
        raise UnreadableError(f"py-spy did not end within {tools.spy_seconds:g} s and was killed")
    if output.ended == "size":
        raise UnreadableError(f"py-spy said more than {tools.largest_output >> 20} MiB and was killed")
    if output.status != 0:
        raise UnreadableError(_why(output, tools.proc))
    return python_stacks(output.text, process.pid)


def _why(output: Output, proc: Path) -> str:
    """What py-spy's failure means, and what would help."""
    lines = [line.strip() for line in output.errors.decode("utf-8", "replace").splitlines() if line.strip()]
    said = printable(lines[0]) if lines else "without a word"
    if "permission denied" not in output.errors.decode("utf-8", "replace").lower():
        return f"py-spy failed ({_ending(output.status)}): {said}"
    if are_calls_filtered():
        return f"{NO_SPY_RIGHT}, and no seccomp filter: this process is under one"
    scope = _ptrace_scope(proc)
    if scope >= "2":
        return f"{NO_SPY_RIGHT}, and kernel.yama.ptrace_scope is {scope} ({_SCOPES.get(scope, 'unknown')})"
    return NO_SPY_RIGHT + (", or kernel.yama.ptrace_scope 0 and the same user" if scope == "1" else "")


def _ending(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"


_SCOPES = {"2": "only with CAP_SYS_PTRACE", "3": "nobody may, until the next boot"}


def _ptrace_scope(proc: Path) -> str:
    """kernel.yama.ptrace_scope; empty where the kernel has none."""
    try:
        return _content(proc / "sys/kernel/yama/ptrace_scope").decode("ascii", "replace").strip()
    except OSError:
        return ""


def python_stacks(text: bytes, pid: int) -> tuple[Stack, ...]:
    """What `py-spy dump --json` says; of each frame the function, the short file name and the line.

    The main thread stands first.  UnreadableError when it is something else.
    """
    try:
        threads = [_thread(found) for found in json.loads(text)]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise UnreadableError("this py-spy answers in another form") from None
    return tuple(_together(sorted(threads, key=lambda each: each[0] != pid)))


def _thread(found: Mapping[str, Any]) -> tuple[int, str, tuple[str, ...]]:
    """Its number, its name, its frames."""
    frames = tuple(_frame(frame) for frame in found["frames"][:MOST_FRAMES])
    return int(found.get("os_thread_id") or 0), printable(str(found.get("thread_name") or "")), frames


def _frame(found: Mapping[str, Any]) -> str:
    file = found.get("short_filename") or os.path.basename(found["filename"])
    return printable(f"{found['name']} ({file}:{int(found['line'])})")


def _together(threads: Iterable[tuple[int, str, tuple[str, ...]]]) -> list[Stack]:
    """Threads with the same frames as one stack, in the order of the first of each."""
    groups: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for thread, name, frames in threads:
        groups.setdefault(frames, []).append((thread, name))
    stacks = [Stack(tuple(t for t, _ in group), frames, group[0][1]) for frames, group in groups.items() if frames]
    return stacks[:MOST_STACKS]


# --- a program with limits ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Output:
    """What a program said before it ended, or was ended; `status` None = it was ended."""

    text: bytes
    errors: bytes
    ended: Ended
    status: int | None = None


def _gather(texts: Mapping[int, bytearray], until: float, most: int) -> Ended:
    """Read descriptors until all are at their end, the time is over, or more than `most` bytes came."""
    answers = select.poll()
    for fd in texts:
        answers.register(fd, select.POLLIN)
    left = set(texts)
    while left:
        seconds = until - time.monotonic()
        ready = answers.poll(1000 * seconds) if seconds > 0 else []
        if not ready:
            return "time"
        for fd, _ in ready:
            part = os.read(fd, 1 << 16)
            texts[fd].extend(part)
            if not part:
                answers.unregister(fd)
                left.discard(fd)
        if sum(map(len, texts.values())) > most:
            return "size"
    return "end"


def run_bounded(command: list[str], seconds: float, most: int) -> Output:
    """Run a program without a shell, our environment or input, for so long and for so many bytes.

    UnreadableError when it does not start.  One that the kernel does not let die is left behind.
    """
    try:
        child = Child(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={},
            bufsize=0,
            start_new_session=True,  # so that what it starts can be ended with it
        )
    except OSError as error:
        raise UnreadableError(f"{os.path.basename(command[0])} does not start: {error.strerror or 'error'}") from None
    until = time.monotonic() + seconds
    try:
        assert child.stdout is not None  # noqa: S101  # both pipes were asked for
        assert child.stderr is not None  # noqa: S101
        out, err = child.stdout.fileno(), child.stderr.fileno()
        texts = {out: bytearray(), err: bytearray()}
        ended = _gather(texts, until, most)
        if ended == "end":
            ended = _wait(child, max(_END_SECONDS, until - time.monotonic()))
        return Output(bytes(texts[out]), bytes(texts[err]), ended, child.returncode)
    finally:
        _end(child)


def _wait(child: Child, seconds: float) -> Ended:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return "time"
    return "end"


def _end(child: Child) -> None:
    if child.returncode is None:
        child.kill_group()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_SECONDS)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
