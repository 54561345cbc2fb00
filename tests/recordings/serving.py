"""Stories after ready: servers that owe an answer and give none, servers that are slow, and idle ones.

Each function plays one report.  A parameter turns the hang into its twin, and changes nothing else.
"""

from __future__ import annotations

from .pieces import (
    IN_POLL,
    SPINNING,
    STOPPED,
    accessed,
    bar,
    capture,
    cards_do,
    compiled,
    compiling,
    counts_tokens,
    finish,
    get_ready,
    heartbeat,
    llamacpp,
    owes,
    rests,
    serving,
    sglang,
    spawn,
    stands_still,
    trtllm,
    up_to_load,
    vanish,
    vllm,
    with_cards,
)
from .stage import WAITING, Beat, Doing, Stage

WEDGED = 240.0
"""Seconds a wedged server is watched for: twice serve_stall_after."""


def counters_frozen(
    stage: Stage,
    running: int = 2,
    waiting: int = 0,
    generated: float = 0.0,
    ranks: int = 1,
    nnodes: int = 1,
    asked_every: float = 0.0,
) -> None:
    """H74 (12 days), H71, H76, H80, H82: requests run, counters stand, health is 200, no figure of any card.

    Twins: nothing is owed (H112); tokens come, slowly (H85: 5.4 a second with 14 waiting).
    """
    server = vllm(stage, ranks, nnodes=nnodes)
    server.metrics_every = asked_every
    serving(stage, server)
    rests(server)
    owes(server, running, waiting)
    counts_tokens(server, generated)
    if running and not generated:
        return stands_still(server, WEDGED, accessed(server))
    return stage.run(1200, accessed(server))


def stats_line_stops(stage: Stage, stops: bool = True) -> None:
    """H76: the last stats line says 0.0 tokens/s with one running, and none follows.  H86: they go on."""
    server = vllm(stage, 1)
    serving(stage, server)
    server.say("stats", running=1, waiting=0, generation_tokens_per_second=0.0)
    rests(server)
    owes(server, 1)
    counts_tokens(server, 0.0 if stops else 170.0)
    if stops:
        return stands_still(server, WEDGED)
    rate = Beat(10, lambda number: server.say("stats", running=1, waiting=0, generation_tokens_per_second=170.0))
    return stage.run(900, rate)


def kernel_never_returns(stage: Stage, power: float = 19.0, memory: float = 0.0, seconds: float = WEDGED) -> None:
    """H73: GPU 96 % at 19 W, 130 threads asleep.  The twin, a very long prefill, draws 36 W at the same 96 %.

    `memory`: a kernel that moves memory is no spin, whatever it draws: at most suspect.
    """
    server = vllm(stage, 1)
    with_cards(server, idle_power=15.0, limit=140.0)
    serving(stage, server)
    rests(server)
    owes(server, 2)
    counts_tokens(server)
    cards_do(server, power, 0.96, memory)
    if power < 30:
        return stands_still(server, seconds)
    stage.run(seconds)
    counts_tokens(server, 60, 400, 0.1)
    return stage.run(120)


def high_power_silence(stage: Stage, power: float = 267.0) -> None:
    """H83: 15.8 minutes without a token at 267 W, one thread running: it recovered.  At idle power it would not."""
    server = vllm(stage, 1)
    with_cards(server, idle_power=30.0, limit=350.0)
    serving(stage, server)
    server.do(SPINNING)
    owes(server, 1)
    counts_tokens(server)
    cards_do(server, power, 1.0, 0.0)
    if power < 100:
        return stands_still(server, WEDGED)
    stage.run(950)
    counts_tokens(server, 30)
    return stage.run(120)


def collective_mismatch(stage: Stage, prompt: float = 0.0) -> None:
    """H88: utilisation 100 / 0 / 0 / 0 % at 152 / 129 / 137 / 135 W of 700; rank 1 polls a stream.

    In the twin the same watts, and prompt tokens are taken in.
    """
    server = trtllm(stage)
    with_cards(server)
    serving(stage, server)
    rests(server)
    server.do(SPINNING, "TP1")
    owes(server, 8)
    counts_tokens(server, 0, prompt)
    for rank, watts, utilization in (("TP0", 152, 1.0), ("TP1", 129, 0.0), ("TP2", 137, 0.0), ("TP3", 135, 0.0)):
        cards_do(server, watts, utilization, only=(rank,))
    if not prompt:
        return stands_still(server, WEDGED)
    stage.run(600)
    counts_tokens(server, 50, prompt, 0.1)
    return stage.run(60)


def scheduler_dead_health_green(stage: Stage, dies: bool = True) -> None:
    """H92: the health endpoint is 200 for an hour after the scheduler died.  In the twin the server is idle."""
    server = sglang(stage, 1)
    serving(stage, server)
    rests(server)
    owes(server, 0)
    counts_tokens(server)
    if dies:
        server.kill("TP0")
        return stands_still(server, 120, accessed(server))
    return stage.run(600, accessed(server))


def health_times_out(stage: Stage, prompt: float = 0.0, scraped: bool = False) -> None:
    """Health gives no answer any more, and the server does not say what it owes.

    H94 is the twin: during a long chunked prefill health gives none either, and prompt tokens are taken in.
    `scraped`: the count of time-outs is in the recording at every look, as when it is rebuilt from Prometheus.
    """
    server = sglang(stage, 2)
    server.is_scraped = scraped
    serving(stage, server)
    owes(server, None)
    counts_tokens(server, 0.0, prompt)
    server.answers(None)
    rests(server)
    if not prompt:
        return stands_still(server, 300)
    stage.run(400)
    server.answers(200)
    counts_tokens(server, 50, prompt, 0.1)
    return stage.run(60)


def gloo_mismatch(stage: Stage, owed: int = 3) -> None:
    """H95: an all-gather of a data-parallel group never comes together, silent for 2 hours.  Idle looks the same."""
    ranks = ("DP0-TP0", "DP0-TP1", "DP1-TP0", "DP1-TP1")
    server = stage.add("sglang-8000", "sglang", ranks, ("main", "controller", "detokenizer"))
    serving(stage, server)
    rests(server)
    owes(server, owed)
    counts_tokens(server)
    if owed:
        return stands_still(server, WEDGED)
    return stage.run(900)


def slot_never_released(stage: Stage, cards: bool = True, ends: bool = False) -> None:
    """H100: the process runs, the card is at 0 %, one request is never answered.

    Without figures of the card nobody can tell: at most suspect.  In the twin the answer comes after 100 s.
    """
    server = llamacpp(stage)
    if cards:
        with_cards(server, idle_power=20.0, limit=300.0)
    serving(stage, server)
    server.do(SPINNING)
    owes(server, 1)
    counts_tokens(server)
    if not ends:
        return stands_still(server, WEDGED)
    stage.run(100)
    counts_tokens(server, 20, 0, 0.1)
    return stage.run(120)


def workers_left_over(stage: Stage, ranks_die: bool = False) -> None:
    """H106: the job is gone and its first process with it, the workers stay and hold their memory.

    In the twin it is the workers that go, and the first process stays.
    """
    server = sglang(stage, 2)
    serving(stage, server)
    rests(server)
    counts_tokens(server)
    owes(server, None)
    if ranks_die:
        server.kill(*server.ranks)
        return stands_still(server, 120)
    server.kill("main", "detokenizer")
    return stage.run(120)


def long_input(stage: Stage, seconds: float = 110.0, ends: bool = True) -> None:
    """H113: 32 requests of 120,000 tokens; the first token takes two minutes.  Or it never comes, the card at rest."""
    server = vllm(stage, 2)
    with_cards(server)
    serving(stage, server)
    cards_do(server, 620, 0.99, 0.3)
    owes(server, 32)
    counts_tokens(server)
    if not ends:
        cards_do(server, 130, 0.0)
        rests(server)
        return stands_still(server, WEDGED)
    for _ in range(4):
        counts_tokens(server)
        stage.run(seconds)
        counts_tokens(server, 900, 32_000, 0.2)
        stage.run(20)
    return None


def worker_stopped_while_serving(stage: Stage, owed: bool = True) -> None:
    """Row f2 of docs/NOISE.md: one worker is stopped, the other spins, health is 200.

    The twin is idle, and its workers poll at a whole core each, as those of many releases do (H115).
    """
    server = vllm(stage, 2)
    serving(stage, server)
    owes(server, int(owed))
    counts_tokens(server)
    server.do(SPINNING)
    if owed:
        server.do(STOPPED, "TP1")
        return stands_still(server, WEDGED, heartbeat(server))
    return stage.run(900, accessed(server))


def idle_card_looks_busy(stage: Stage, owed: int = 0) -> None:
    """H116: a resident context keeps the card boosted: 100 % and 44 W, nothing runs.  With work owed it is a hang."""
    server = llamacpp(stage)
    with_cards(server, idle_power=44.0, limit=180.0)
    serving(stage, server)
    rests(server)
    owes(server, owed)
    counts_tokens(server)
    cards_do(server, 45, 1.0)
    if owed:
        return stands_still(server, WEDGED)
    return stage.run(900)


def never_scheduled(stage: Stage, arrives: bool = False) -> None:
    """H79, and row f3: requests are taken in and never scheduled; the server says that it owes nothing.

    No reading tells it from an idle server, which is its twin.
    """
    server = vllm(stage, 2)
    serving(stage, server)
    rests(server)
    owes(server, 0)
    counts_tokens(server)
    if arrives:
        return stands_still(server, WEDGED, heartbeat(server), accessed(server))
    return stage.run(WEDGED, heartbeat(server), accessed(server))


def embeddings(stage: Stage, finished: float = 0.3) -> None:
    """A server of embeddings makes no tokens; finished requests are all that grows.  Or nothing grows."""
    server = vllm(stage, 1)
    up_to_load(server)
    finish(server)
    owes(server, 4)
    counts_tokens(server, finished=0.3)
    server.do(Doing(cpu=0.3, wait="running"))
    stage.run(60)
    counts_tokens(server, finished=finished)
    if not finished:
        rests(server)
        return stands_still(server, WEDGED)
    return stage.run(900)


def asleep(stage: Stage, owed: int = 0, paused: bool = True) -> None:
    """Sleep mode: the server gave its memory back on purpose.  With work in its queue it is at most suspect.

    Not in sleep mode, the same is a hang.
    """
    server = vllm(stage, 1)
    serving(stage, server)
    rests(server)
    counts_tokens(server)
    owes(server, 0)
    server.gauge("server_paused", int(paused))
    server.do(Doing(resident=-60))
    stage.run(5)
    server.do(WAITING)
    owes(server, owed)
    if owed:
        return stands_still(server, WEDGED)
    return stage.run(600)


def demand_unknown(stage: Stage, owed: int | None = None) -> None:
    """A ready server without metrics: nobody knows what it owes.  Told that it owes something, it is a hang."""
    server = sglang(stage, 2)
    up_to_load(server)
    capture(server)
    server.listens = True
    server.say("ready")
    server.answers(200)
    if owed:
        counts_tokens(server)
        owes(server, 0)
    stage.run(60)
    rests(server)
    owes(server, owed)
    if owed:
        return stands_still(server, WEDGED)
    return stage.run(900)


def demand_from_stats_lines(stage: Stage, goes_on: bool = False) -> None:
    """No metrics, only stats lines.  They stop with one running: what is owed is soon not known any more."""
    server = vllm(stage, 1)
    up_to_load(server)
    capture(server)
    server.say("ready")
    server.answers(200)
    server.do(Doing(cpu=0.5, wait="running"))
    stats = Beat(10, lambda number: server.say("stats", running=1, waiting=0, generation_tokens_per_second=42.0))
    stage.run(60, stats)
    if goes_on:
        return stage.run(600, stats)
    rests(server)
    return stage.run(600)


def rolling_update(stage: Stage, says_so: bool = True) -> None:
    """A drain of 40 s: the server says that it ends, its ranks go first.  Without the word ranks have died."""
    server = sglang(stage, 4)
    serving(stage, server)
    if says_so:
        server.say("shutdown")
    stage.run(35)
    server.kill("TP1")
    stage.falls_silent()
    stage.run(5)
    server.kill(*server.ranks)
    stage.run(5)
    vanish(server)
    if says_so:
        stage.silent_at = None
    stage.run(60)


def unit_stopped(stage: Stage, on_purpose: bool = True) -> None:
    """A system unit is being stopped; no line says so.  Without a stop a rank has died."""
    server = vllm(stage, 2)
    serving(stage, server)
    server.gauge("server_stopping", int(on_purpose))
    stage.run(10)
    server.kill("TP0")
    if not on_purpose:
        return stands_still(server, 60)
    stage.run(10)
    vanish(server)
    return stage.run(60)


def compiles_while_serving(stage: Stage, compiles: bool = True) -> None:
    """The first request after ready compiles for some minutes; or it hangs."""
    server = sglang(stage, 1)
    up_to_load(server)
    finish(server)
    owes(server, 1)
    server.do(SPINNING if compiles else IN_POLL)
    if not compiles:
        return stands_still(server, WEDGED)
    stage.run(400, compiling(server))
    compiled(server)
    counts_tokens(server, 20, 0, 0.1)
    return stage.run(60)


def bar_while_ready(stage: Stage) -> None:
    """A bar of a second model in the log of a server that is idle: nothing of its own."""
    server = sglang(stage, 1)
    up_to_load(server)
    finish(server)
    stage.run(400, bar(server, "load_progress", 99, 60, "TP0", step=0))


def starts_idle(stage: Stage) -> None:
    """H112: started, ready, and nobody asks anything for half an hour."""
    server = sglang(stage, 2)
    spawn(server)
    up_to_load(server)
    capture(server)
    get_ready(server)
    stage.run(1800)
