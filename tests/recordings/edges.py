"""Stories at the edges of the rules: a little more of one thing is a move, a little less is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .pieces import (
    ASLEEP,
    IN_DISK,
    IN_POLL,
    SPINNING,
    STOPPED,
    bar,
    begin_load,
    capture,
    cards_do,
    counts_tokens,
    end_load,
    finish,
    get_ready,
    join,
    load,
    owes,
    reading,
    reading_from_cache,
    rests,
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
from .serving import WEDGED
from .stage import WAITING, Beat, Card, Doing, Server, Stage
from .startup import LONG

UNREADABLE = replace(WAITING, wait="unreadable")


def trickle(stage: Stage, doing: Doing, moves: bool) -> None:
    """One rank does just more, or just less, than the floor of one channel, and everything else stands."""
    server = sglang(stage, 2)
    up_to_load(server)
    server.do(doing, "TP1")
    if not moves:
        return stands_still(server, LONG)
    stage.run(900)
    return finish(server)


def children(stage: Stage, cores: float) -> None:
    """Children that are no compilers use 6 % of a core (they work), or 3 % (they poll)."""
    server = vllm(stage, 1)
    up_to_load(server)
    server.say("compile_begin", "TP0")
    server.child_rates = {"compiler": 0.0, "other": cores}
    if cores < 0.05:
        return stands_still(server, LONG)
    stage.run(900)
    server.child_rates = {"compiler": 0.0, "other": 0.0}
    server.say("compile_end", "TP0")
    return finish(server)


def busy(stage: Stage, cores: float, bars: bool = False) -> None:
    """A rank at 6 % of a core may be working: at most suspect.  At 3 % it polls.  With a bar it works."""
    server = sglang(stage, 2)
    up_to_load(server)
    server.say("capture_begin", "TP0")
    server.say("capture_begin", "TP1")
    server.do(Doing(cpu=cores), "TP0", "TP1")
    if not bars:
        return stands_still(server, LONG)
    stage.run(900, bar(server, "capture_progress", 52, 60, "TP0"))
    return finish(server)


def bursts(stage: Stage, every: float = 230.0, burst: float = 64.0) -> None:
    """Some MiB are read every 230 s, and nothing in between; or the next burst does not come."""
    server = sglang(stage, 2)
    up_to_load(server, end=("TP0",))
    for _ in range(3):
        _burst(server, 64.0, every)
    if not burst:
        stage.silent_at = stage.t - every
        return stage.run(LONG)
    for _ in range(2):
        _burst(server, burst, every)
    end_load(server, "TP1")
    return finish(server)


def _burst(server: Server, mib: float, every: float) -> None:
    interval = server.stage.interval
    server.do(reading(mib / interval), "TP1")
    server.stage.run(interval)
    server.do(WAITING, "TP1")
    server.stage.run(every)


def spinning_barrier(stage: Stage, mib: float = 0.0) -> None:
    """Three ranks spin in a collective, the fourth reads from slow storage; or it stands in its read.

    A spin cannot be told from work, so the hang is a warning that names the rank.
    """
    server = sglang(stage, 4)
    up_to_load(server, end=("TP0", "TP1", "TP2"))
    server.do(SPINNING, "TP0", "TP1", "TP2")
    server.do(reading(mib) if mib else IN_DISK, "TP3")
    if not mib:
        return stands_still(server, LONG)
    stage.run(1200)
    end_load(server)
    return finish(server)


def threads_unreadable(stage: Stage, loads: bool = False) -> None:
    """A kernel that does not tell what threads wait in: the page comes all the same, without that reason."""
    server = sglang(stage, 2)
    server.do(UNREADABLE, "main", "detokenizer")
    up_to_load(server, end=("TP0",))
    server.do(UNREADABLE)
    if loads:
        server.do(replace(reading(2), wait="unreadable"), "TP1")
        stage.run(900)
        end_load(server, "TP1")
        return finish(server)
    return stands_still(server, LONG)


def scraped(stage: Stage, reads_on: bool = False) -> None:
    """The silent deadlock and the phantom hang as they stand in Prometheus: everything every 15 s."""
    server = sglang(stage, 4)
    server.is_scraped = True
    up_to_load(server, end=("TP0", "TP1", "TP3"))
    server.do(replace(reading(3.5), wait="sleep") if reads_on else ASLEEP, "TP2")
    if not reads_on:
        return stands_still(server, LONG)
    stage.run(1200)
    end_load(server, "TP2")
    return finish(server)


def scraped_exit(stage: Stage, says_so: bool = False) -> None:
    """The whole server ends before ready, as that stands in Prometheus: its series end, and no word of the root."""
    server = sglang(stage, 2)
    server.is_scraped = True
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(40))
    stage.run(60)
    if says_so:
        server.say("shutdown")
    vanish(server)
    if says_so:
        return stage.run(180)
    return stands_still(server, 180)


def no_rank_yet(stage: Stage, imports: bool = False) -> None:
    """The first process has started no rank yet, and stands in an import; or imports slowly for ten minutes (H62)."""
    server = sglang(stage, 2)
    late = {name: server.processes.pop(name) for name in server.ranks}
    stage.begin()
    server.say("args")
    server.do(Doing(cpu=0.5, minor=800, resident=4, wait="running"), "main")
    stage.run(20)
    server.do(Doing(cpu=0.02, major=2, read=0.5, wait="disk") if imports else WAITING, "main")
    if not imports:
        return stands_still(server, LONG)
    stage.run(600)
    server.do(WAITING, "main")
    server.processes.update(late)
    join(server)
    load(server)
    return finish(server)


def storage_flickers(stage: Stage, loads: bool = False) -> None:
    """Once a minute storage cannot be read, for one look; the silence in between is silence all the same."""
    server = sglang(stage, 2)
    up_to_load(server, end=("TP0",))
    server.storage_flickers = 60
    server.do(reading(2) if loads else ASLEEP, "TP1")
    if not loads:
        return stands_still(server, 600)
    stage.run(900)
    end_load(server, "TP1")
    server.storage_flickers = 0
    return finish(server)


def bars_without_numbers(stage: Stage, loads: bool = False) -> None:
    """Lines of a bar whose numbers nobody could read, and one that counts in seconds: no progress."""
    server = sglang(stage, 1)
    up_to_load(server)
    server.say("compile_begin", "TP0")
    bare = (
        Beat(10, lambda number: server.say("compile_progress", "TP0")),
        bar(server, "compile_progress", 9, 60, "TP0", step=0),
    )
    server.do(reading_from_cache(2) if loads else WAITING)
    server.say("compile_progress", "TP0", done=0, total=9)
    if not loads:
        return stands_still(server, LONG, *bare)
    stage.run(600, *bare)
    server.say("compile_end", "TP0")
    return finish(server)


def two_frozen_bars(stage: Stage, rises: bool = False) -> None:
    """Bars of two ranks that both stand, drawn again by turns in the same place.  In the twin they rise."""
    server = sglang(stage, 2)
    up_to_load(server)

    def draw(number: int) -> None:
        more = number // 6 if rises else 0
        server.say("capture_progress", done=(5 if number % 2 else 9) + more, total=99)

    if not rises:
        return stands_still(server, LONG, Beat(10, draw))
    stage.run(600, Beat(10, draw))
    return finish(server)


def stands_in(stage: Stage, where: str, seconds: float | None = None) -> None:
    """A start that stands in one phase after another; the twin goes on after 220 s."""
    server = sglang(stage, 2)
    spawn(server)
    if where != "spawned":
        join(server)
    if where not in ("spawned", "distributed_init"):
        load(server)
    if where == "memory_pool":
        for rank in server.ranks:
            server.say("memory_pool", rank)
    if where == "listening":
        capture(server)
        server.listens = True
        server.say("listening")
    rests(server)
    if seconds is None:
        return stands_still(server, LONG)
    stage.run(seconds)
    return finish(server) if where != "listening" else get_ready(server)


def autotune_closed(stage: Stage, event: str = "autotune_end", seconds: float | None = None) -> None:
    """After the end of an autotune (or of the compile it was part of) silence proves something again."""
    server = vllm(stage, 1)
    up_to_load(server)
    server.say("autotune_begin", "TP0")
    stage.run(100)
    server.say(event, "TP0")
    if seconds is None:
        return stands_still(server, LONG)
    stage.run(seconds)
    return finish(server)


def after_a_slow_counter(stage: Stage, seconds: float | None = None) -> None:
    """The patience that a slow bar earned ends with its phase."""
    server = sglang(stage, 1)
    up_to_load(server)
    server.say("capture_begin", "TP0")
    for number in range(4):
        server.say("capture_progress", "TP0", done=number, total=4)
        stage.run(200)
    server.say("capture_end", "TP0")
    server.say("warmup_begin", "TP0")
    server.do(WAITING)
    if seconds is None:
        return stands_still(server, LONG)
    stage.run(seconds)
    return get_ready(server)


def blind_for_a_while(stage: Stage, loads: bool = True) -> None:
    """Nothing can be read of the processes for two minutes in the middle; what moved meanwhile is seen later."""
    server = sglang(stage, 2)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(5))
    stage.run(60)
    server.do(reading(5) if loads else WAITING)
    if not loads:
        stage.falls_silent()
    server.is_read = False
    stage.run(120)
    server.is_read = True
    stage.run(LONG)
    if loads:
        end_load(server)
        finish(server)


def bars_alone(stage: Stage, goes_on: bool = True) -> None:
    """Short bars, one after another; a bar that begins again lower is a new one.  Or the last is drawn again."""
    server = sglang(stage, 1)
    up_to_load(server)
    server.say("capture_begin", "TP0")
    _bars(server, 3)
    if not goes_on:
        return stands_still(server, LONG, bar(server, "capture_progress", 4, 60, "TP0", start=4, step=0))
    _bars(server, 2)
    return finish(server)


def _bars(server: Server, number: int) -> None:
    for _ in range(number):
        for done in range(1, 5):
            server.say("capture_progress", "TP0", done=done, total=4)
            server.stage.run(70 if done < 4 else 5)


def process_stopped(stage: Stage, name: str, seconds: float | None = None) -> None:
    """The engine core or the API server is stopped (state T), the workers wait.  In the twin it goes on in time.

    Of the engine that is a reason; of a front end it only shows as silence.
    """
    server = vllm(stage, 2)
    up_to_load(server)
    server.do(STOPPED, name)
    if seconds is None:
        return stands_still(server, LONG)
    stage.run(seconds)
    server.do(IN_POLL, name)
    return finish(server)


def never_came(stage: Stage, comes: bool = False) -> None:
    """A configured server that has no process is gone, and no trouble; one that comes later starts as any other."""
    server = sglang(stage, 1)
    server.starts, server.is_read, server.log = 0, False, False
    stage.begin()
    stage.run(300)
    if comes:
        server.starts, server.is_read, server.log = 1, True, True
        server.started_at += stage.t
        up_to_load(server)
        finish(server)
    stage.run(60)


def only_the_card(stage: Stage, moves: bool, **does: float) -> None:
    """Loaded, and only figures of the card tell whether anything goes on.  `does`: fields of `Card`."""
    server = sglang(stage, 1)
    with_cards(server)
    up_to_load(server)
    card = server.cards[0]
    at_rest = {name: getattr(card, name) for name in does}
    _set_card(card, does)
    if not moves:
        return stands_still(server, LONG)
    stage.run(900)
    _set_card(card, at_rest)
    return finish(server)


def _set_card(card: Card, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        setattr(card, name, value)


def another_tenant_serving(stage: Stage, unowned: float = 30e9) -> None:
    """Tokens owed and none made, and the card is busy: with somebody else's work.  If it is its own, it works."""
    server = vllm(stage, 1)
    with_cards(server)
    serving(stage, server)
    rests(server)
    owes(server, 1)
    counts_tokens(server)
    cards_do(server, 600, 0.99, 0.4)
    server.cards[0].unowned = unowned
    if unowned:
        return stands_still(server, WEDGED)
    stage.run(600)
    counts_tokens(server, 30, 0, 0.1)
    return stage.run(60)


# --- deaths --------------------------------------------------------------------------------------------------


def engine_dies(stage: Stage, says_so: bool = False) -> None:
    """The engine core of a serving vLLM is gone, workers and API server live.  Or the server was told to end."""
    server = vllm(stage, 2)
    serving(stage, server)
    if says_so:
        server.say("shutdown")
    server.kill("engine")
    if not says_so:
        return stands_still(server, 60)
    stage.run(10)
    vanish(server)
    return stage.run(60)


def launcher_dies(stage: Stage, says_so: bool = False) -> None:
    """The first process is gone before ready, the ranks live on.  Or it said that it ends, and they end later."""
    server = sglang(stage, 2)
    up_to_load(server)
    if says_so:
        server.say("shutdown")
    server.kill("main", "detokenizer")
    if not says_so:
        return stands_still(server, 60)
    stage.run(10)
    vanish(server)
    return stage.run(60)


def whole_server_goes(stage: Stage, killed: bool = True) -> None:
    """A ready server is gone as a whole, without a word: killed for memory, or ended by somebody."""
    server = sglang(stage, 2)
    serving(stage, server)
    stage.oom_kills += int(killed)
    vanish(server)
    if killed:
        return stands_still(server, 60)
    return stage.run(60)


def follower_rank_dies(stage: Stage, dies: bool = True) -> None:
    """A rank of the second node dies while it loads: certain, whatever the other node does."""
    server = vllm(stage, 2, nnodes=2, node_rank=1)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(60))
    stage.run(60)
    if dies:
        server.kill("TP1")
        return stands_still(server, 60)
    stage.run(60)
    end_load(server)
    capture(server)
    warm_up(server)
    return stage.run(60)


def fatal_then_death(stage: Stage, dies: bool = True) -> None:
    """A fatal line of one rank, the others move on, and half a minute later another rank is dead."""
    server = sglang(stage, 4)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(50))
    stage.run(60)
    server.say("fatal", "TP0", kind="nccl")
    stage.run(30)
    if dies:
        server.kill("TP1")
        return stands_still(server, 60)
    stage.run(120)
    end_load(server)
    return finish(server)


def restart_loop(stage: Stage, in_order: bool = False) -> None:
    """Each start hangs for 150 s and is killed: no start is ever silent long enough, and each end is a failure."""
    server = sglang(stage, 2)
    for number in range(3):
        if number:
            _start_again(server)
        up_to_load(server)
        stage.run(150)
        if in_order:
            server.say("shutdown")
        elif not number:
            stage.falls_silent()
        vanish(server)
        stage.run(20)


def _start_again(server: Server) -> None:
    server.starts += 1
    server.started_at += server.stage.t
    for process in server.processes.values():
        process.alive, process.cpu, process.resident, process.minor = True, 1.0, 4e8, 9000.0


# --- serving -------------------------------------------------------------------------------------------------


def owed_after_idle(stage: Stage, seconds: float | None = 100.0) -> None:
    """Idle for 20 minutes, then a request whose first token takes 100 s: the last token was long ago, the request
    was not.  Or it never comes."""
    server = vllm(stage, 1)
    serving(stage, server)
    rests(server)
    owes(server, 0)
    counts_tokens(server)
    stage.run(1200)
    owes(server, 1)
    if seconds is None:
        return stands_still(server, WEDGED)
    stage.run(seconds)
    counts_tokens(server, 30, 0, 0.1)
    return stage.run(60)


def requests_on_and_off(stage: Stage, generated: float = 2.0) -> None:
    """Short requests, one every 40 s, each served: what is owed begins anew each time."""
    server = vllm(stage, 1)
    serving(stage, server)
    rests(server)
    for _ in range(20):
        owes(server, 1)
        counts_tokens(server, generated, 10, 0.2)
        stage.run(10)
        owes(server, 0)
        counts_tokens(server)
        stage.run(30)


def queued(stage: Stage, waiting: int) -> None:
    """Nothing runs and four wait: work is owed.  Or nothing waits."""
    server = vllm(stage, 1)
    serving(stage, server)
    rests(server)
    owes(server, 0, waiting)
    counts_tokens(server)
    if waiting:
        return stands_still(server, WEDGED)
    return stage.run(600)


def without_counters(stage: Stage) -> None:
    """It says what it owes and counts no tokens: nobody knows whether it serves."""
    server = vllm(stage, 1)
    up_to_load(server)
    capture(server)
    server.listens = True
    server.say("ready")
    server.answers(200)
    owes(server, 1)
    stage.run(900)


def prefill_in_chunks(stage: Stage, comes: bool = True) -> None:
    """A chunk of prompt tokens every 100 s, and no other counter grows; or the next chunk does not come."""
    server = sglang(stage, 1)
    serving(stage, server)
    rests(server)
    owes(server, 1)
    counts_tokens(server)
    for _ in range(4):
        stage.run(95)
        counts_tokens(server, 0, 1600)
        stage.run(5)
        counts_tokens(server)
    if not comes:
        return stands_still(server, WEDGED)
    for _ in range(3):
        stage.run(95)
        counts_tokens(server, 0, 1600)
        stage.run(5)
        counts_tokens(server)
    return None


def stopped_while_idle(stage: Stage, owed: int = 0) -> None:
    """A worker is stopped and nobody asks anything: no trouble yet.  With a request it is one."""
    server = vllm(stage, 2)
    serving(stage, server)
    rests(server)
    owes(server, owed)
    counts_tokens(server)
    server.do(STOPPED, "TP1")
    if owed:
        return stands_still(server, WEDGED)
    return stage.run(600)


def held_while_serving(stage: Stage, signal: str, rank: str = "", owed: int = 1) -> None:
    """A debugger, or a frozen cgroup, while work is owed: somebody's wish, at most suspect."""
    server = vllm(stage, 2)
    serving(stage, server)
    rests(server)
    owes(server, owed)
    counts_tokens(server)
    if rank:
        server.gauge(signal, 1, rank=rank)
        server.do(replace(STOPPED, wait="other"), rank)
    else:
        server.gauge(signal, 1)
    server.do(IN_POLL, "engine")
    if owed:
        return stands_still(server, WEDGED)
    return stage.run(600)


def paused_while_serving(stage: Stage, seconds: float | None = 40.0) -> None:
    """stallwatch is stopped for ten minutes while a first token takes its time.  Nobody's silence, again."""
    server = vllm(stage, 1)
    serving(stage, server)
    rests(server)
    owes(server, 1)
    counts_tokens(server)
    if seconds is None:
        stage.falls_silent()
    stage.run(60)
    stage.pause(600)
    stage.run(WEDGED if seconds is None else seconds)
    if seconds is not None:
        counts_tokens(server, 30, 0, 0.1)
        stage.run(120)


def ready_by_health(stage: Stage) -> None:
    """No line says ready; the health endpoint does.  Silence after that is nobody's business."""
    server = sglang(stage, 1)
    up_to_load(server)
    server.listens = True
    server.answers(200)
    owes(server, 0)
    counts_tokens(server)
    stage.run(900, Beat(60, lambda number: server.line("access")))
