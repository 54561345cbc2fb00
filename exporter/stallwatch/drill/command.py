"""`stallwatch drill`: lists the conditions, and starts a stand-in server that really is in one of them.

Whatever ends this program (Ctrl-C, the time limit, kill -9) ends what it started and removes its files.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from ..config import DEFAULT_LISTEN_ADDRESS, Intervals, Thresholds
from ..model import PHASES
from .conditions import Condition
from .janitor import cleaned_up
from .leash import die_with_parent
from .memory_cgroup import NoCgroupError, refusal
from .nvml_standin import StandIn, build
from .table import CONDITIONS, find_condition

SHORTEST_INTERVAL_SECONDS = 0.1
SHORTEST_LOOK_SECONDS, SHORTEST_TICK_SECONDS = 1.0, 0.5
"""Of `processes`, but no more than half a window: CPU time comes in ticks of 10 ms, and in a shorter time one tick of a
polling thread looks like a busy CPU; and where a machine is busy a look takes a second.  Of `tick`: a time in which
three of our own fail to come counts for nothing.
"""
FASTEST = 60.0
"""Beyond this a look takes longer than a verdict may."""

_END_SECONDS = 10.0
_LISTEN_VARIABLE = "STALLWATCH_WEB_LISTEN_ADDRESS"


def list_conditions(out: TextIO) -> int:
    """One line each, the name first."""
    width = max(len(condition.name) for condition in CONDITIONS)
    for condition in CONDITIONS:
        print(f"{condition.name:{width}}  {condition.summary}", file=out)
    return 0


@dataclass(frozen=True, slots=True)
class Pace:
    """The times of a verdict, divided by `speed`; seconds."""

    speed: float = 1.0

    @property
    def thresholds(self) -> Thresholds:
        shipped = Thresholds()
        times = {f.name: getattr(shipped, f.name) / self.speed for f in fields(Thresholds) if f.name != "budgets"}
        return Thresholds(**times, budgets={phase: shipped.budget(phase) / self.speed for phase in PHASES})

    @property
    def intervals(self) -> Intervals:
        shipped, look = Intervals(), min(SHORTEST_LOOK_SECONDS, self.thresholds.window / 2)
        shortest = {"processes": look, "tick": SHORTEST_TICK_SECONDS}
        return Intervals(
            **{
                f.name: max(shortest.get(f.name, SHORTEST_INTERVAL_SECONDS), getattr(shipped, f.name) / self.speed)
                for f in fields(Intervals)
            }
        )

    def config(self) -> str:
        """The configuration file with these times."""
        thresholds, intervals = self.thresholds, self.intervals
        verdict = {f.name: getattr(thresholds, f.name) for f in fields(Thresholds) if f.name != "budgets"}
        lines = ["verdict:", *_yaml(verdict), "  budgets:", *(f"  {line}" for line in _yaml(dict(thresholds.budgets)))]
        lines += ["intervals:", *_yaml({f.name: getattr(intervals, f.name) for f in fields(Intervals)})]
        return "\n".join([f"# the shipped times divided by {self.speed:g}", *lines]) + "\n"


def _yaml(times: dict[str, float]) -> list[str]:
    return [f"  {name}: {duration(seconds)}" for name, seconds in times.items()]


def duration(seconds: float) -> str:
    """As the configuration takes it: whole seconds, else whole milliseconds."""
    return f"{seconds:.0f}s" if seconds == round(seconds) else f"{max(1, round(seconds * 1000))}ms"


def expectation(condition: Condition, thresholds: Thresholds) -> str:
    """What stallwatch should say, and when."""
    words = [condition.expected_state]
    if condition.expected_reason != "none":
        words.append(condition.expected_reason)
    if condition.expected_rank is not None:
        words.append(f"rank {condition.expected_rank}")
    return f"{', '.join(words)}; {_moment(condition, thresholds)}"


_AT_ONCE: Mapping[str, str] = {
    "failed": "a few seconds after the rank is gone",
    "idle": "as soon as the server is ready, and never stalled before",
    "working": "while it goes on, and never stalled",
}
_SILENCES: Mapping[str, str] = {
    "stopped": "window",
    "no_tokens": "serve_stall_after",
    "health_timeout": "serve_stall_after",
}


def _moment(condition: Condition, thresholds: Thresholds) -> str:
    if condition.expected_state in _AT_ONCE:
        return _AT_ONCE[condition.expected_state]
    silence = getattr(thresholds, _SILENCES.get(condition.expected_reason, "stall_after"))
    return f"{duration(silence)} after {condition.since}"


@dataclass(frozen=True, slots=True)
class Drill:
    """What the command line asks for.  `gpus`: the stand-in holds memory on stand-in cards."""

    condition: Condition
    limit_seconds: float
    speed: float = 1.0
    serves: bool = False
    gpus: bool = False

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """That of the server and, where there are two, of the one beside it."""
        return (self.condition, *([find_condition(self.condition.also)] if self.condition.also else []))


def run(drill: Drill, out: TextIO) -> int:
    """Start the stand-in, say what to expect, and wait for the time limit or a signal.

    NoCompilerError when cards are asked for and nothing can build them, NoCgroupError when a memory cgroup is needed
    and none can be made.
    """
    condition, pace = drill.condition, Pace(drill.speed)
    if any(act == "make-cgroup" for act in condition.acts("before", "launcher")) and (why := refusal()):
        raise NoCgroupError(f"{condition.name} cannot be run: {why}")
    with ExitStack() as stack:
        folder, _ = stack.enter_context(cleaned_up())
        cards = StandIn(folder, build(folder), condition.ranks) if drill.gpus or condition.needs_cards else None
        config = folder / "stallwatch.yml"
        config.write_text(pace.config())
        servers = {_free_port(): each for each in drill.conditions}
        print(f"{condition.name}: {condition.summary}", file=out)
        for port, each in servers.items():
            print(f"server: {server_name(each, port)}, for {duration(drill.limit_seconds)}", file=out)
            print(f"stallwatch should say: {expectation(each, pace.thresholds)}", file=out)
        if condition.note:
            print(f"note: {condition.note}", file=out)
        if not drill.serves and drill.speed != 1.0:
            print(f"an exporter without this configuration takes {drill.speed:g} times as long to say so", file=out)
        print(f"configuration: {config}\n\n{pace.config()}", file=out, flush=True)
        sight = {} if cards is None else cards.environment()
        for name, value in sight.items():
            print(f"an exporter that is to see the cards needs {name}={value}", file=out, flush=True)
        stack.enter_context(_ended_by_signals())
        with suppress(_EndedError):
            standins = [
                stack.enter_context(
                    _child(_standin(drill, each, port, folder if cards else None), signal.SIGKILL, True)
                )
                for port, each in servers.items()
            ]
            stack.callback(_terminate, standins)  # all at once, and only then each is waited for
            if drill.serves:
                stack.enter_context(_child(_exporter(config), signal.SIGTERM, environment=sight))
            with suppress(subprocess.TimeoutExpired):
                standins[0].wait(drill.limit_seconds)
    return 0


def server_name(condition: Condition, port: int) -> str:
    """As stallwatch will call it, when no other server has the name."""
    return f"{condition.launch.framework}-{1 if condition.launch.embedded else port}"


def _standin(drill: Drill, condition: Condition, port: int, cards: Path | None) -> list[str]:
    command = [sys.executable, "-m", "stallwatch.drill.standin", condition.name, "--port", str(port)]
    command += ["--for", duration(drill.limit_seconds + _END_SECONDS)]  # we end it, and the exporter before it
    command += ["--speed", f"{drill.speed:g}"]
    return command if cards is None or condition is not drill.condition else [*command, "--cards", str(cards)]


def _exporter(config: Path) -> list[str]:
    """On the usual port; where an exporter of this node has it, on another one of this machine's loopback."""
    command = [sys.executable, "-m", "stallwatch", "serve", "--config.file", str(config)]
    if _LISTEN_VARIABLE not in os.environ and _is_taken(int(DEFAULT_LISTEN_ADDRESS.rpartition(":")[2])):
        command += ["--web.listen-address", f"127.0.0.1:{_free_port()}"]
    return command


class _EndedError(Exception):
    """Raised by SIGINT and SIGTERM."""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    def end(_number: int, _frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # the second Ctrl-C must not stop the cleaning up
        raise _EndedError

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _child(
    command: Sequence[str],
    last_word: signal.Signals,
    quiet: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that gets `last_word` should we be killed; in a process group of its own, so that Ctrl-C is ours."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | dict(environment or {}),
        process_group=0,
        preexec_fn=partial(die_with_parent, os.getpid(), last_word),
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _terminate(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended take no port
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
