"""Servers that start again and again: because they crash, because somebody tries, because they are redeployed."""

from __future__ import annotations

from .pieces import IMPORTING, capture, finish, get_ready, owes, rests, spawn, up_to_load, vanish, vllm
from .stage import WAITING, Beat, Doing, Server, Stage

BREAK = 5.0
"""Seconds from the end of a start to the next one; shorter than it takes to know that a session lives on."""
DRAIN = 40.0


def start_again(server: Server) -> None:
    server.starts += 1
    server.started_at += server.stage.t + 1.0
    for process in server.processes.values():
        process.alive, process.doing = True, WAITING
        process.cpu, process.resident, process.minor = 1.0, 4e8, 9000.0


def crash_loop(stage: Stage, ends: int = 8, in_container: bool = False, seconds: float = 10.0) -> None:
    """Each start is over after ten seconds (or five minutes of work), and the next one comes at once: the fifth end is
    no accident.  Or the fifth start is well, for somebody only tried again by hand until it was."""
    server = vllm(stage, 2)
    server.gauge("server_scope_alive", 1)
    for number in range(ends):
        spawn(server, seconds)
        if number == 4:
            stage.falls_silent()
        vanish(server)
        server.gauge("server_scope_alive", 0 if in_container else 1)
        stage.run(BREAK)
        server.gauge("server_scope_alive", 1)
        start_again(server)
    up_to_load(server)
    if ends < 5:
        finish(server)


def silent_engine(stage: Stage, jobs: int = 3) -> None:
    """A program that builds an engine, works with it and ends, again and again; its log holds its own lines alone."""
    server = vllm(stage, 2, role="embedded")
    server.gauge("server_scope_alive", 1)
    stage.begin()
    for number in range(jobs):
        if number:
            start_again(server)
        server.line("novel")
        server.do(IMPORTING)
        stage.run(60)
        server.do(Doing(cpu=0.5, wait="running"))
        stage.run(120, Beat(10, lambda _: server.line("repeat")))
        vanish(server)
        stage.run(30)


def fails_twice(stage: Stage, seconds: float = 20.0, again: bool = True) -> None:
    """Two starts that fail so that it is seen, with half a minute between: the third is one of a loop at once."""
    server = vllm(stage, 2)
    server.gauge("server_scope_alive", 1)
    for number in range(3):
        spawn(server, seconds)
        if not again:
            return finish(server)
        if not number:
            stage.falls_silent()
        vanish(server)
        stage.run(30)
        start_again(server)
    return spawn(server, seconds)


def redeploys(stage: Stage, times: int = 6) -> None:
    """A new configuration every few minutes: the container is killed without a word, and comes up each time."""
    server = vllm(stage, 1)
    for number in range(times + 1):
        server.gauge("server_scope_alive", 1)
        up_to_load(server)
        capture(server)
        get_ready(server)
        stage.run(60)
        if number == times:
            return
        vanish(server)
        _says_nothing(server)
        server.gauge("server_scope_alive", 0)
        stage.run(BREAK)
        start_again(server)


def rolling_update(stage: Stage) -> None:
    """Three times a new container comes up beside the old one, which says that it ends and drains for 40 s."""
    old = vllm(stage, 1)
    up_to_load(old)
    finish(old)
    for number in range(3):
        new = vllm(stage, 1, f"vllm-8000@{number}")
        up_to_load(new)
        finish(new)
        owes(old, running=2)
        old.say("shutdown")
        stage.run(DRAIN)
        vanish(old)
        _says_nothing(old)
        stage.run(30)
        old = new
    rests(old)


def _says_nothing(server: Server) -> None:
    server.listens = False
    for answers in (server.gauges, server.health, server.counters, server.rates):
        answers.clear()
