"""A day in the life of a node, too long to be kept: slow starts, redeploys, and a server that is only idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .pieces import (
    bar,
    begin_load,
    capture,
    compiled,
    compiling,
    end_load,
    faulting,
    finish,
    get_ready,
    join,
    load,
    reading,
    sglang,
    spawn,
    up_to_load,
    vanish,
    vllm,
)
from .stage import WAITING, Server, Stage

INTERVAL = 30.0
CYCLES, CYCLE_SECONDS = 20, 4320.0
SLOW_SECONDS = 2700.0
"""How long the slow part of a start takes: three quarters of an hour without a line."""

SLOW, REDEPLOYED, IDLE = "slow-8000", "redeployed-8001", "idle-8002"


@dataclass(frozen=True, slots=True)
class Day:
    """The recording, and when it is a good moment to restart whoever watches: idle, in a slow start, after one."""

    stage: Stage
    restarts: tuple[float, ...]


def day(cycles: int = CYCLES, hangs_in: int | None = None) -> Day:
    """24 hours: one server starts slowly 20 times, another is redeployed 10 times, the third is idle.

    `cycles`: fewer starts, and a shorter day.  `hangs_in`: the number of a slow start in which nothing moves after
    its slow part began.
    """
    stage = Stage(seed="day", interval=INTERVAL)
    redeployed = vllm(stage, 1, REDEPLOYED)
    _come_up(redeployed)
    _come_up(vllm(stage, 1, IDLE))
    slow, restarts = sglang(stage, 2, SLOW), []
    for number in range(cycles):
        begin = stage.t
        if number:
            _start_again(slow)
        spawn(slow)
        join(slow)
        if number in (4, 11):
            restarts.append(stage.t + SLOW_SECONDS / 2)
        SLOW_STARTS[number % len(SLOW_STARTS)](slow, number == hangs_in)
        finish(slow)
        if number % 2:
            _redeploy(redeployed)
        if number == 16:
            restarts.append(stage.t + 60)
        stage.run(CYCLE_SECONDS - 2 * INTERVAL - (stage.t - begin))
        _end(slow)
    return Day(stage, tuple(restarts))


def _come_up(server: Server) -> None:
    up_to_load(server)
    capture(server)
    get_ready(server)


def _end(server: Server) -> None:
    """In good order; a minute later nothing of it is left."""
    server.say("shutdown")
    server.stage.run(INTERVAL)
    vanish(server)
    server.listens = False
    for answers in (server.gauges, server.health, server.counters, server.rates):
        answers.clear()
    server.stage.run(INTERVAL)


def _redeploy(server: Server) -> None:
    _end(server)
    _start_again(server)
    _come_up(server)


def _start_again(server: Server) -> None:
    server.starts += 1
    server.started_at += server.stage.t
    for process in server.processes.values():
        process.alive, process.doing = True, WAITING
        process.cpu, process.resident, process.minor = 1.0, 4e8, 9000.0


# --- slow starts -------------------------------------------------------------------------------------------


def _lazy(server: Server, hangs: bool) -> None:
    """The bar is full after two minutes, the weights come for long after it."""
    begin_load(server)
    server.do(reading(20))
    server.stage.run(120, bar(server, "load_progress", 8, 14, "TP0"))
    server.do(WAITING if hangs else reading(1.5))
    server.stage.run(SLOW_SECONDS)
    end_load(server)


def _late_rank(server: Server, hangs: bool) -> None:
    """One rank reads on from slow storage, the other waits for it at a barrier."""
    load(server, end=("TP0",))
    server.do(WAITING if hangs else replace(reading(3), wait="sleep"), "TP1")
    server.stage.run(SLOW_SECONDS)
    end_load(server, "TP1")


def _cold_compile(server: Server, hangs: bool) -> None:
    """Compilers below the ranks, and no line."""
    load(server)
    server.say("compile_begin", "TP0")
    server.stage.run(SLOW_SECONDS, *([] if hangs else [compiling(server)]))
    compiled(server)
    server.say("compile_end", "TP0")


def _page_by_page(server: Server, hangs: bool) -> None:
    """Mapped weights that come page by page."""
    begin_load(server)
    server.do(WAITING if hangs else faulting(20))
    server.stage.run(SLOW_SECONDS)
    end_load(server)


SLOW_STARTS: tuple[Callable[[Server, bool], None], ...] = (_lazy, _late_rank, _cold_compile, _page_by_page)
