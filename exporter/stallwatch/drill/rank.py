"""One rank of a stand-in server: a process that loads, meets the others at a barrier, and then waits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import FrameType

from . import story
from .conditions import Condition
from .crowd import start_crowd, wait_for_ever
from .leash import tie_to_parent
from .title import write_title
from .weights import BYTES_PER_RANK, read_slowly

_BAR_STEPS = 20
RELEASE = signal.SIGUSR1
"""Sent to a culprit that sleeps: it wakes and goes to the barrier, and the start goes on."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    rank: int
    condition: Condition
    weights: Path
    parent_pid: int
    limit_seconds: float


class ReleasedError(Exception):
    """Raised by the RELEASE signal in a culprit that sleeps."""


def write_line(text: str, rank: int | None = None) -> None:
    """One write() to stdout, which is a file opened for appending: lines of processes never mix."""
    write_raw(story.stamp(datetime.now().astimezone(), text, rank))


def write_raw(text: str) -> None:
    os.write(1, text.encode())


def run_rank(plan: RankPlan, barrier: Barrier, ready: Connection) -> None:
    """The whole life of a rank; entry point of the process."""
    tie_to_parent(plan.parent_pid, plan.limit_seconds)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_title(f"sglang::scheduler_TP{plan.rank}")
    start_crowd(plan.condition.threads, plan.condition.poller_threads)
    _say(plan, story.import_notices(plan.condition, plan.rank))
    _join(plan, barrier)
    _load(plan)
    _meet(plan, barrier)
    _capture(plan)
    ready.send(plan.rank)
    wait_for_ever()


def run_detokenizer(parent_pid: int, limit_seconds: float, threads: int) -> None:
    """The process that turns tokens into text; in a start it only waits."""
    tie_to_parent(parent_pid, limit_seconds)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_title("sglang::detokenizer")
    start_crowd(threads, 0)
    wait_for_ever()


def _say(plan: RankPlan, lines: Iterable[str]) -> None:
    for line in lines:
        write_line(line, plan.rank)


def _join(plan: RankPlan, barrier: Barrier) -> None:
    begin, *ends = story.joining()
    write_line(begin, plan.rank)
    barrier.wait()
    time.sleep(plan.condition.step_seconds)
    _say(plan, ends)


def _load(plan: RankPlan) -> None:
    condition, started = plan.condition, time.monotonic()
    write_line(story.load_begin(), plan.rank)
    _draw_shard_bar(plan, 0.0)
    if condition.slow_load:
        _read_for(plan, condition.slow_seconds)
    drawn = 0
    for share in read_slowly(plan.weights, BYTES_PER_RANK, BYTES_PER_RANK / condition.load_seconds):
        if int(share * _BAR_STEPS) > drawn:
            drawn = int(share * _BAR_STEPS)
            _draw_shard_bar(plan, share)
    write_line(story.load_end(time.monotonic() - started), plan.rank)


def _draw_shard_bar(plan: RankPlan, share: float) -> None:
    if plan.rank == 0:
        write_raw(story.shard_bar(share))


def _read_for(plan: RankPlan, seconds: float) -> None:
    speed = plan.condition.slow_bytes_per_second
    for _ in read_slowly(plan.weights, int(seconds * speed), speed):
        pass


def _meet(plan: RankPlan, barrier: Barrier) -> None:
    """The barrier after the load; the culprit does its own thing first, a spinner never sleeps in it."""
    condition = plan.condition
    if plan.rank == condition.culprit:
        _misbehave(plan)
    if plan.rank == condition.spinner:
        os.nice(19)
        while barrier.n_waiting < barrier.parties - 1:
            pass
    barrier.wait()


def _misbehave(plan: RankPlan) -> None:
    match plan.condition.behaviour:
        case "sleep":
            _sleep_until_released()
        case "read":
            _read_for(plan, plan.condition.slow_seconds)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pass":
            pass


def _sleep_until_released() -> None:
    def release(_number: int, _frame: FrameType | None) -> None:
        raise ReleasedError

    signal.signal(RELEASE, release)
    try:
        while True:
            time.sleep(86_400)
    except ReleasedError:
        return


def _capture(plan: RankPlan) -> None:
    pause = plan.condition.step_seconds
    _say(plan, story.after_barrier())
    time.sleep(pause)
    write_line(story.capture_begin(), plan.rank)
    if plan.rank == 0:
        for bar in story.capture_bars():
            write_raw(bar)
            time.sleep(pause / 4)
    time.sleep(pause)
    write_line(story.capture_end(), plan.rank)
    if plan.rank == 0:
        write_line(story.scheduler_ready(), plan.rank)
