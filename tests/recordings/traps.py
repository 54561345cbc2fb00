"""Constructed traps: what fools a verdict, each with what it must not be taken for."""

from __future__ import annotations

from dataclasses import replace

from .pieces import (
    ASLEEP,
    STOPPED,
    accessed,
    begin_load,
    capture,
    counts_tokens,
    end_load,
    finish,
    get_ready,
    heartbeat,
    join,
    load,
    reading,
    reading_from_cache,
    serving,
    sglang,
    spawn,
    stands_still,
    up_to_load,
    vanish,
    vllm,
    warm_up,
    with_cards,
)
from .stage import WAITING, Beat, Doing, Server, Stage
from .startup import LONG


def lines_that_prove_nothing(stage: Stage, kind: str, loads: bool = False) -> None:
    """Access lines (a prompt may stand in them), retry lines with fresh ids, heartbeats: every 5 s, all the time."""
    server = sglang(stage, 2)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(30))
    stage.run(30)
    server.do(WAITING, "TP0")
    server.do(reading_from_cache(10) if loads else WAITING, "TP1")
    lines = (
        Beat(5, lambda number: server.line(kind)),
        Beat(7, lambda number: server.say("waiting", done=number, total=999)),
    )
    if not loads:
        return stands_still(server, LONG, *lines)
    stage.run(600, *lines)
    end_load(server)
    return finish(server)


def novel_lines_alone(stage: Stage, markers: bool = False) -> None:
    """A line of a new shape every 20 s, and nothing else: ten of them count.  The twin has markers too."""
    server = sglang(stage, 1)
    up_to_load(server)
    novel = Beat(20, lambda number: server.line("novel"))
    if not markers:
        return stands_still(server, 700, novel)
    stage.run(700, novel, Beat(150, lambda number: server.say("post_load", "TP0")))
    return finish(server)


def nine_novel_lines(stage: Stage, lines: int = 9) -> None:
    """A line of a new shape every 40 s, nine times, and a marker 150 s after the last.  Or no line and no marker."""
    server = sglang(stage, 1)
    up_to_load(server)
    if not lines:
        return stands_still(server, LONG)
    stage.run(40 * lines + 5, Beat(40, lambda number: server.line("novel")))
    stage.run(150)
    return finish(server)


def slow_counter(stage: Stage, stops_after: int = 0) -> None:
    """A bar of minutes per step while nothing else moves: stall_after is stretched by what was seen.  Or it stops."""
    server = sglang(stage, 1)
    up_to_load(server)
    server.say("capture_begin", "TP0")
    server.say("capture_progress", "TP0", done=0, total=12)
    steps = (100, 120, 150, 150, 290, 600, 290, 240, 290, 150)
    for number, seconds in enumerate(steps[: stops_after or None], start=1):
        stage.run(seconds)
        server.say("capture_progress", "TP0", done=number, total=12)
    if stops_after:
        return stands_still(server, 700)
    return finish(server)


def notebook(
    stage: Stage, log: bool = True, loads: bool = True, foreign: bool = False, ranks: int = 2, ends: bool = False
) -> None:
    """`LLM()` in a notebook: an engine without a port, idle between cells.  Or it never gets through its load.

    Somebody on its port and a rank that never came mean nothing for it.  `ends`: `del llm`.
    """
    server = vllm(stage, ranks, role="embedded")
    server.log = log
    if foreign:
        server.gauge("port_foreign", 1, port="8000")
    if ranks > 2:
        server.processes.pop(server.ranks[-1])
    spawn(server)
    join(server)
    if not loads:
        begin_load(server)
        server.do(reading(100))
        stage.run(20)
        server.do(WAITING)
        return stands_still(server, LONG)
    load(server)
    capture(server)
    warm_up(server)
    if not log:
        stage.forget_log()
    if ends:
        stage.run(60)
        server.kill("engine", *server.ranks)
        return stage.run(300)
    return stage.run(900)


def follower(stage: Stage, comes_up: bool = True) -> None:
    """The second node of two: it never says ready, and serves.  Or it stands in its load."""
    server = vllm(stage, 2, nnodes=2, node_rank=1)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(100))
    stage.run(20)
    server.do(WAITING)
    if not comes_up:
        return stands_still(server, LONG)
    end_load(server)
    capture(server)
    warm_up(server)
    return stage.run(900)


def debugger(stage: Stage, attached: bool = True, seconds: float = LONG, detaches: bool = False) -> None:
    """gdb holds a rank: at most suspect.  Without it the same rank is stopped, and that is a page."""
    server = sglang(stage, 2)
    up_to_load(server)
    server.gauge("rank_traced", 0, rank="TP0")
    server.gauge("rank_traced", int(attached), rank="TP1")
    server.do(replace(STOPPED, wait="other") if attached else STOPPED, "TP1")  # state t is no state T
    if not detaches:
        return stands_still(server, seconds)
    stage.run(seconds)
    server.gauge("rank_traced", 0, rank="TP1")
    server.do(WAITING, "TP1")
    return finish(server)


def frozen(stage: Stage, is_frozen: bool = True, thaws: bool = False) -> None:
    """A frozen cgroup: every process stands, not even its noise is left.  Thawed it goes on."""
    server = sglang(stage, 2)
    up_to_load(server)
    server.gauge("server_frozen", int(is_frozen))
    server.do(replace(WAITING, silent=is_frozen), *server.processes)
    if not thaws:
        return stands_still(server, LONG)
    stage.run(LONG)
    server.gauge("server_frozen", 0)
    server.do(WAITING, *server.processes)
    return finish(server)


def container_removed(stage: Stage, whole: bool = True) -> None:
    """While it loads the container is removed, everything in it goes at once.  Or only the server goes."""
    server = sglang(stage, 2)
    server.gauge("server_scope_alive", 1)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(50))
    stage.run(60)
    vanish(server)
    server.gauge("server_scope_alive", int(not whole))
    if whole:
        return stage.run(120)
    return stands_still(server, 120)


def exits(stage: Stage, says_so: bool = False) -> None:
    """The first process ends before ready, its ranks with it; in the twin it says that it ends."""
    server = sglang(stage, 2)
    spawn(server)
    join(server)
    if says_so:
        server.say("shutdown")
    stage.run(5)
    vanish(server)
    if says_so:
        return stage.run(120)
    return stands_still(server, 120)


def rank_before_root(stage: Stage, says_so: bool = False) -> None:
    """One rank dies, then the others, then the root: the first is named.  Or the server is being stopped."""
    server = sglang(stage, 4)
    up_to_load(server)
    if says_so:
        server.say("shutdown")
    stage.run(5)
    server.kill("TP2")
    if not says_so:
        stage.falls_silent()
    stage.run(10)
    server.kill(*server.ranks)
    stage.run(10)
    vanish(server)
    stage.run(60)


def paused_exporter(stage: Stage, seconds: float = 600.0, goes_on: bool = False) -> None:
    """stallwatch itself is stopped for ten minutes in a silence: they are nobody's silence.

    The twin moves 220 s of watched silence after its last move.
    """
    server = sglang(stage, 2)
    up_to_load(server)
    if not goes_on:
        stage.falls_silent()
    stage.run(150)
    stage.pause(seconds)
    stage.run(70 if goes_on else LONG)
    if goes_on:
        finish(server)


def loads_while_paused(stage: Stage) -> None:
    """stallwatch is stopped while the server loads; it has moved when stallwatch is back."""
    server = sglang(stage, 2)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading_from_cache(10))
    stage.run(60)
    stage.pause(900)
    stage.run(60)
    end_load(server)
    finish(server)


def restarted(stage: Stage, hangs: bool = True) -> None:
    """A start that hangs is killed and started again, and then works.  Or the first was stopped in good order."""
    server = sglang(stage, 2)
    up_to_load(server)
    if hangs:
        stands_still(server, LONG)
    else:
        finish(server)
        server.say("shutdown")
        stage.run(5)
    vanish(server)
    stage.run(30)
    _start_again(server)
    up_to_load(server)
    finish(server)


def _start_again(server: Server) -> None:
    """New processes under the same name."""
    server.starts += 1
    server.started_at += server.stage.t
    server.listens = False
    server.health, server.gauges, server.counters, server.rates = {}, {}, {}, {}
    for process in server.processes.values():
        process.alive, process.cpu, process.resident, process.minor = True, 1.0, 4e8, 9000.0
        process.storage = process.read = process.written = 1e6


def port_taken(stage: Stage, reads_on: bool = False) -> None:
    """Somebody else listens on its port, and it stands still.  In the twin one rank still reads: no trouble yet."""
    server = sglang(stage, 2)
    up_to_load(server, end=("TP0",))
    server.gauge("port_listening", 0, port="8000")
    server.gauge("port_foreign", 1, port="8000")
    server.do(reading(3) if reads_on else WAITING, "TP1")
    if not reads_on:
        server.say("load_end", "TP1")
        return stands_still(server, LONG)
    stage.run(900)
    server.gauge("port_foreign", 0, port="8000")
    end_load(server, "TP1")
    server.gauge("port_listening", None, port="8000")
    return finish(server)


def rank_missing(stage: Stage, comes: bool = False) -> None:
    """Three of four ranks come.  In the twin the fourth comes after 200 s."""
    server = sglang(stage, 4)
    late = server.processes.pop("TP3")
    spawn(server)
    for rank in ("TP0", "TP1", "TP2"):
        server.say("dist_init_begin", rank)
    server.do(WAITING)
    if not comes:
        return stands_still(server, LONG)
    stage.run(200)
    server.processes["TP3"] = late
    join(server)
    load(server)
    return finish(server)


def without_log(stage: Stage, log: bool | str, cards: bool = False, moves: bool = False, seconds: float = 900) -> None:
    """No log, or one that cannot be read: silence proves something only with figures of the cards, and later."""
    server = sglang(stage, 2)
    server.log = log
    if cards:
        with_cards(server)
    spawn(server)
    server.do(reading(100))
    stage.run(30)
    server.do(reading(2) if moves else WAITING)
    stage.forget_log()
    if moves:
        return stage.run(seconds)
    return stands_still(server, seconds)


def storage_unreadable(stage: Stage, readable: bool = False) -> None:
    """No right to read what the ranks read: `unknown`, never a page.  With it the same is a hang."""
    server = sglang(stage, 2)
    server.storage_readable = readable
    up_to_load(server)
    return stands_still(server, LONG)


def fatal_line(stage: Stage, others_move: bool = False) -> None:
    """A fatal line, and nothing moves after it.  In the twin a rank reads on: no death, no silence, no page."""
    server = sglang(stage, 2)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(50))
    stage.run(60)
    server.do(reading_from_cache(9) if others_move else WAITING, "TP1")
    server.do(WAITING, "TP0")
    server.say("fatal", "TP0", kind="oom")
    if not others_move:
        return stands_still(server, 120)
    stage.run(600)
    end_load(server)
    return finish(server)


def neighbour_loads(stage: Stage, hangs: bool = True) -> None:
    """Two servers on one node: one stands still, the other loads; neither's moves are the other's."""
    stuck = sglang(stage, 2)
    other = vllm(stage, 1, name="vllm-8001")
    spawn(stuck)
    spawn(other)
    join(stuck)
    load(stuck)
    begin_load(other)
    other.do(reading(20))
    if hangs:
        stands_still(stuck, LONG)
    else:
        finish(stuck, LONG)
    end_load(other)
    finish(other)


def only_heartbeats_then_stop(stage: Stage, loads: bool = False) -> None:
    """Heartbeats every 60 s, a watchdog's line in between, and `Waiting for shard`: none of it is progress."""
    server = vllm(stage, 2)
    up_to_load(server, end=("TP0",))
    server.do(reading(1.5) if loads else ASLEEP, "TP1")
    lines = (heartbeat(server), Beat(45, lambda number: server.say("watchdog")), accessed(server, 30))
    if not loads:
        return stands_still(server, LONG, *lines)
    stage.run(900, *lines)
    end_load(server, "TP1")
    return finish(server)


def drains_slowly(stage: Stage) -> None:
    """Ready, drained and quiet for ten minutes before its end: nothing is owed, nothing is wrong."""
    server = sglang(stage, 2)
    serving(stage, server)
    server.say("shutdown")
    counts_tokens(server)
    server.gauge("server_requests_running", 0)
    server.do(Doing())
    stage.run(600)
    vanish(server)
    stage.run(60)


def late_health(stage: Stage) -> None:
    """The port opens early and answers 503 while the model loads, as llama.cpp does."""
    server = sglang(stage, 1)
    spawn(server)
    server.listens = True
    server.answers(503)
    join(server)
    load(server, 120, 20)
    capture(server)
    get_ready(server)
    stage.run(30)
