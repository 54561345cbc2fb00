"""What servers do, as small pieces that stories are put together from.

Rates of a loading server are those measured: 335 MB and 77,000 minor faults in 9 s, a quarter of a core
(docs/NOISE.md, row g).  Seconds, MiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from .stage import MIB, WAITING, Beat, Card, Doing, Server, Stage

FAULTS_PER_MIB = 230.0
"""Minor faults per MiB of mapped weights."""

ASLEEP = Doing(wait="sleep")
IN_POLL = Doing(wait="poll")
IN_DISK = Doing(wait="disk")
STOPPED = Doing(wait="stopped", silent=True)
SPINNING = Doing(cpu=0.99, wait="running")
IMPORTING = Doing(cpu=0.8, minor=3000, read=4, resident=50, wait="running")


def reading(mib: float) -> Doing:
    """Weights from storage into memory."""
    return Doing(cpu=0.25, minor=mib * FAULTS_PER_MIB, storage=mib, resident=mib, wait="disk" if mib < 5 else "running")


def reading_from_cache(mib: float) -> Doing:
    """Weights that are in the page cache: nothing is read from storage, pages are mapped."""
    return Doing(cpu=0.4, minor=mib * FAULTS_PER_MIB, resident=mib, wait="running")


def faulting(major: float) -> Doing:
    """Mapped weights that come page by page from a file system that accounts no reads (FUSE)."""
    return Doing(cpu=0.02, major=major, minor=major, resident=major / 256, wait="disk")


# --- servers -----------------------------------------------------------------------------------------------


def sglang(
    stage: Stage, ranks: int = 4, name: str = "sglang-8000", framework: str = "sglang", **facts: object
) -> Server:
    """A launcher, a detokenizer, and one scheduler per rank."""
    names = tuple(f"TP{number}" for number in range(ranks))
    return stage.add(name, framework, names, ("main", "detokenizer"), **facts)


def vllm(stage: Stage, ranks: int = 2, name: str = "vllm-8000", **facts: object) -> Server:
    """An API server, an engine core, and one worker per rank."""
    server = stage.add(name, "vllm", tuple(f"TP{number}" for number in range(ranks)), ("main", "engine"), **facts)
    server.do(IN_POLL, "main", "engine")
    return server


def trtllm(stage: Stage, ranks: int = 4, name: str = "trtllm-8000", **facts: object) -> Server:
    """A launcher, and one MPI worker per rank."""
    return stage.add(name, "trtllm", tuple(f"TP{number}" for number in range(ranks)), ("main",), **facts)


def llamacpp(stage: Stage, name: str = "llamacpp-8080", **facts: object) -> Server:
    """One process that is everything."""
    server = stage.add(name, "llamacpp", ("TP0",), (), **facts)
    server.processes["TP0"].threads = 34
    return server


# --- the way up --------------------------------------------------------------------------------------------


def spawn(server: Server, seconds: float = 10.0) -> None:
    """Processes come and import what they need."""
    if not server.stage.lines:
        server.stage.begin()
    server.say("args")
    server.do(IMPORTING)
    server.stage.run(seconds)
    server.do(WAITING)


def join(server: Server, seconds: float = 5.0) -> None:
    """The ranks find each other."""
    for rank in server.ranks:
        server.say("dist_init_begin", rank)
    server.do(Doing(cpu=0.1, minor=600, resident=5))
    server.stage.run(seconds)
    for rank in server.ranks:
        server.say("dist_init_end", rank)
    server.do(WAITING)


def begin_load(server: Server, *ranks: str) -> None:
    for rank in ranks or server.ranks:
        server.say("load_begin", rank)


def end_load(server: Server, *ranks: str) -> None:
    """`load_end` of these ranks (of all, if none is named); from now on they wait."""
    for rank in ranks or server.live_ranks:
        server.say("load_end", rank)
    server.do(WAITING, *(ranks or server.live_ranks))


def bar(
    server: Server, event: str, total: int, every: float, rank: str | None = None, start: int = 0, step: int = 1
) -> Beat:
    """A bar that rises by `step` every so many seconds; with step 0 it is drawn again with the same k."""
    return Beat(every, lambda number: server.say(event, rank, done=min(total, start + step * number), total=total))


def load(server: Server, seconds: float = 20.0, mib: float = 400.0, end: Iterable[str] | None = None) -> None:
    """All ranks read their weights at `mib` per second; then `load_end` of `end` (default: of all)."""
    begin_load(server)
    server.do(reading(mib))
    server.stage.run(seconds, bar(server, "load_progress", 16, seconds / 16, "TP0" if "TP0" in server.ranks else None))
    server.do(WAITING)
    ending = tuple(server.ranks if end is None else end)
    if ending:
        end_load(server, *ending)


def up_to_load(server: Server, **how: object) -> None:
    """Spawned, joined, loaded."""
    spawn(server)
    join(server)
    load(server, **how)  # type: ignore[arg-type]


def capture(server: Server, seconds: float = 10.0) -> None:
    """Memory pool, then graphs."""
    for rank in server.live_ranks:
        server.say("memory_pool", rank)
    server.do(Doing(cpu=0.6, minor=900, resident=6, wait="running"))
    server.stage.run(5)
    for rank in server.live_ranks:
        server.say("capture_begin", rank)
    server.stage.run(seconds, bar(server, "capture_progress", 20, seconds / 20, server.live_ranks[0]))
    for rank in server.live_ranks:
        server.say("capture_end", rank)
    server.do(WAITING)


def warm_up(server: Server, seconds: float = 5.0) -> None:
    for rank in server.live_ranks:
        server.say("warmup_begin", rank)
    server.do(Doing(cpu=0.5, wait="running"))
    server.stage.run(seconds)
    for rank in server.live_ranks:
        server.say("warmup_end", rank)
    server.do(WAITING)


def get_ready(server: Server) -> None:
    """The port opens, health answers, nobody asks anything yet."""
    server.listens = True
    server.say("listening")
    server.say("ready")
    server.answers(200)
    owes(server, running=0)
    counts_tokens(server)
    server.stage.run(10)


def finish(server: Server, seconds: float = 60.0) -> None:
    """What is left of the way from loaded weights to an idle server."""
    capture(server)
    get_ready(server)
    server.stage.run(seconds)


def serving(stage: Stage, server: Server) -> None:
    """A whole quick start, then two minutes of work: what stories after ready begin with."""
    up_to_load(server)
    capture(server)
    get_ready(server)
    owes(server, running=4)
    counts_tokens(server, generated=80, prompt=120, finished=0.2)
    server.do(Doing(cpu=0.6, wait="running"))
    stage.run(60)


# --- serving -----------------------------------------------------------------------------------------------


def owes(server: Server, running: int | None, waiting: int | None = 0) -> None:
    """Requests by the server's own word; None = it does not say."""
    server.gauge("server_requests_running", running)
    server.gauge("server_requests_waiting", None if running is None else waiting)


def counts_tokens(server: Server, generated: float = 0.0, prompt: float = 0.0, finished: float = 0.0) -> None:
    """Its own counters and how they grow per second."""
    server.count("server_generated_tokens_total", generated)
    server.count("server_prompt_tokens_total", prompt)
    server.count("server_finished_requests_total", finished)


def accessed(server: Server, every: float = 10.0) -> Beat:
    """Access lines, of our own probes or somebody else's."""
    return Beat(every, lambda number: server.line("access"))


def heartbeat(server: Server, every: float = 60.0) -> Beat:
    """`No available shared memory broadcast block found in 60 seconds` and its like."""
    return Beat(every, lambda number: server.say("heartbeat"))


# --- compilers, locks --------------------------------------------------------------------------------------


def compiling(server: Server, cores: float = 1.0, others: float = 0.0) -> Beat:
    """From now on compilers below the ranks use so many cores, and one is born or gone every 15 s."""
    server.child_rates = {"compiler": cores, "other": others}

    def change(number: int) -> None:
        server.compilers = 1 + number % 2

    return Beat(15, change)


def compiled(server: Server) -> None:
    """No compiler is left."""
    server.compilers = 0
    server.child_rates = {"compiler": 0.0, "other": 0.0}


def lock(server: Server, kind: str, age: float, held: int | None) -> Beat:
    """A known lock file of that age.  `held` None: a network file system, nobody can tell.

    The beat lets it grow older.
    """
    server.gauge("server_lock_held", "not_supported" if held is None else held, kind=kind)
    server.gauge("server_lock_age_seconds", age, kind=kind)
    every = server.stage.interval
    return Beat(every, lambda number: server.gauge("server_lock_age_seconds", age + every * number, kind=kind))


def unlock(server: Server, kind: str) -> None:
    server.gauge("server_lock_held", None, kind=kind)
    server.gauge("server_lock_age_seconds", None, kind=kind)


# --- cards -------------------------------------------------------------------------------------------------


def with_cards(server: Server, idle_power: float | None = 125.0, limit: float = 700.0) -> None:
    """One card per rank, at rest and holding what a loaded model holds."""
    server.stage.cards = True
    server.cards = [
        Card(
            f"GPU-{number}",
            rank,
            Random(f"{server.stage.seed}/{server.name}/card{number}"),
            power=(idle_power or 125.0) + 4,
            idle_power=idle_power,
            limit=limit,
            memory=76.0 * 1024 * MIB,
        )
        for number, rank in enumerate(server.ranks)
    ]


def known_cards(server: Server, rest: float = 122.0, limit: float | None = 700.0) -> None:
    """One card per rank as a collector reads it: what it takes at rest is not said, and has to be learned."""
    with_cards(server, idle_power=None)
    for card in server.cards:
        card.power, card.limit, card.clock, card.lost = rest, limit, 1_980e6, 0.0


def rests_and_reads(server: Server, seconds: float = 50.0) -> None:
    """Something else moves, so that it is no silence, and the cards rest: long enough to learn what they take."""
    doing = server.processes[server.ranks[0]].doing
    server.do(reading(20), server.ranks[0])
    server.stage.run(seconds)
    server.do(doing, server.ranks[0])


def cards_do(
    server: Server, power: float, utilization: float, memory_utilization: float = 0.0, only: Iterable[str] = ()
) -> None:
    """From now on the cards (of these ranks only) draw and show this."""
    for card in server.cards:
        if not only or card.rank in only:
            card.power, card.utilization, card.memory_utilization = power, utilization, memory_utilization


# --- standing still ----------------------------------------------------------------------------------------


def stands_still(server: Server, seconds: float, *beats: Beat) -> None:
    """Nothing moves any more from the last look on; what still happens is noise, and the beats."""
    server.stage.falls_silent()
    server.stage.run(seconds, *beats)


def rests(server: Server, *names: str, wait: str | None = None) -> None:
    """These processes (all ranks) do no more than wait, in their own class or in `wait`."""
    for name in names or server.live_ranks:
        doing = server.processes[name].doing
        server.processes[name].doing = replace(
            WAITING, wait=wait or ("futex" if doing.wait == "running" else doing.wait)
        )


def vanish(server: Server) -> None:
    """Every process of the server is gone."""
    server.kill(*server.processes)
