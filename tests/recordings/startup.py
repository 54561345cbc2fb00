"""Stories of the way up: what was reported of servers that did not become ready, or did so very late.

Each function plays one report.  A parameter turns the hang into its twin, and changes nothing else.
"""

from __future__ import annotations

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
    compiled,
    compiling,
    end_load,
    faulting,
    finish,
    get_ready,
    heartbeat,
    join,
    llamacpp,
    load,
    lock,
    reading,
    reading_from_cache,
    rests,
    sglang,
    spawn,
    stands_still,
    trtllm,
    unlock,
    up_to_load,
    vanish,
    vllm,
    with_cards,
)
from .stage import WAITING, Beat, Doing, Stage

LONG = 400.0
"""Seconds a stuck server is watched for: stall_after and something."""


# --- the two stories this project began with, and the real servers that were measured ------------------------


def silent_deadlock(stage: Stage, reads_on: bool = False) -> None:
    """Eight ranks have loaded; one sleeps and never reaches the barrier.  Its twin reads on from slow storage."""
    server = sglang(stage, 8)
    up_to_load(server, end=[rank for rank in server.ranks if rank != "TP5" or not reads_on])
    server.do(replace(reading(3.5), wait="sleep") if reads_on else ASLEEP, "TP5")
    if not reads_on:
        return stands_still(server, LONG)
    stage.run(1200)
    end_load(server, "TP5")
    return finish(server)


def worker_stopped(stage: Stage, seconds: float = LONG, continues: bool = False) -> None:
    """vLLM, one of two workers stopped before the group joined (row a of docs/NOISE.md)."""
    server = vllm(stage)
    spawn(server)
    server.say("dist_init_begin", "TP0")
    server.say("dist_init_begin", "TP1")
    server.do(ASLEEP, "TP0")
    server.do(STOPPED, "TP1")
    if not continues:
        return stands_still(server, seconds)
    stage.run(seconds)
    join(server)
    load(server)
    return finish(server)


def disk_gives_nothing(stage: Stage, mib: float = 0.0) -> None:
    """vLLM, its disk throttled to 1 byte per second in the middle of loading (row d); the twin gets `mib`."""
    server = vllm(stage, 1)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(40))
    stage.run(20, bar(server, "load_progress", 8, 10, "TP0"))
    server.do(replace(reading(mib), cpu=0.0))
    if not mib:
        return stands_still(server, LONG)
    stage.run(LONG)
    server.do(reading(40))
    stage.run(30, bar(server, "load_progress", 8, 10, "TP0", start=1))
    end_load(server)
    return finish(server)


def node_never_comes(stage: Stage, comes: bool = False) -> None:
    """vLLM, node 0 of 2 (row c): the other node is not there.  In the twin it comes, after ten minutes."""
    server = vllm(stage, 1, nnodes=2)
    spawn(server)
    server.say("dist_init_begin", "TP0")
    server.do(ASLEEP)
    if not comes:
        return stands_still(server, LONG)
    stage.run(600)
    join(server)
    load(server)
    return finish(server)


# --- dead ranks ----------------------------------------------------------------------------------------------


def rank_killed_by_oom(stage: Stage, dies: bool = True, killed_before: bool = False, kill: bool = True) -> None:
    """H01: the kernel kills a rank while the launcher waits for rank 0's pipe.

    Twins: the kernel kills something else on the node; and a rank dies by itself ten minutes after such a kill.
    """
    server = sglang(stage, 4)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(300))
    if killed_before:
        stage.oom_kills += 1
        server.do(reading(20))
        stage.run(600)
    stage.run(30)
    if kill:
        stage.oom_kills += 1
    if dies:
        server.kill("TP2")
        server.do(WAITING)
        return stands_still(server, 60)
    stage.run(60)
    end_load(server)
    return finish(server)


def workers_killed_before_ready(stage: Stage, orderly: bool = False) -> None:
    """H02: the MPI job is aborted while loading, the proxy in front of it does not notice.

    In the twin somebody stops the server: it says so, and the first process goes too.
    """
    server = trtllm(stage)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(200))
    stage.run(60)
    if orderly:
        server.say("shutdown")
    server.kill(*server.ranks)
    if orderly:
        stage.run(10)
        server.kill("main")
        return stage.run(120)
    return stands_still(server, 120)


def ray_rank_died(stage: Stage, dies: bool = True) -> None:
    """H04: a minute of starving heartbeats, then `RayWorkerProc rank=[0] died unexpectedly`; /v1/models is 200.

    In the twin the starving passes, as it does in healthy starts.
    """
    server = vllm(stage, 1, nnodes=8)
    up_to_load(server)
    server.answers(200, "models")
    stage.run(120, heartbeat(server))
    if dies:
        server.kill("TP0")
        server.say("fatal", kind="rank_died")
        return stands_still(server, 60)
    return finish(server)


def front_end_dies(stage: Stage, name: str = "worker") -> None:
    """H68: an API server process gives up while the ranks load.  In the twin it is a rank that dies."""
    server = stage.add("vllm-8000", "vllm", ("TP0", "TP1"), ("main", "engine", "worker"))
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(50))
    stage.run(60, bar(server, "load_progress", 163, 5, "TP0"))
    server.say("error", kind="traceback")
    server.kill(name)
    if name != "worker":
        server.do(WAITING)
        return stands_still(server, 60)
    stage.run(300, bar(server, "load_progress", 163, 5, "TP0", start=12))
    end_load(server)
    return finish(server)


def killed_by_supervisor(stage: Stage, killed: bool = True) -> None:
    """H65: a supervisor with a fixed limit kills a llama.cpp server that loads; without it the start succeeds."""
    server = llamacpp(stage)
    spawn(server, 5)
    begin_load(server)
    server.do(reading(30))
    progress = Beat(20, lambda number: server.say("load_progress", "TP0", ratio=round(0.02 * number, 2)))
    stage.run(300, progress)
    if killed:
        vanish(server)
        return stands_still(server, 90)
    stage.run(300, Beat(20, lambda number: server.say("load_progress", "TP0", ratio=round(0.3 + 0.02 * number, 2))))
    end_load(server)
    return get_ready(server)


# --- loading -------------------------------------------------------------------------------------------------


def shard_bar_stops_on_nfs(stage: Stage, mib: float = 0.0) -> None:
    """H05: cold NFS; the driver's lock is held across a page fault.  The twin's bar stops too, and it reads."""
    server = sglang(stage, 4)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(100))
    stage.run(30, bar(server, "load_progress", 64, 3, "TP0"))
    server.do(WAITING)
    server.do(IN_DISK if not mib else reading(mib), "TP1")
    redraws = bar(server, "load_progress", 64, 30, "TP0", start=9, step=0)
    if not mib:
        return stands_still(server, LONG, redraws)
    stage.run(LONG, redraws)
    end_load(server)
    return finish(server)


def barrier_waits_for_cold_node(stage: Stage, mib: float = 0.0, minutes: float = 20) -> None:
    """H40: three ranks wait after their load, the fourth still reads from a cold NFS; or it hangs in it."""
    server = sglang(stage, 4)
    up_to_load(server, end=("TP0", "TP1", "TP2"))
    server.do(reading(mib) if mib else IN_DISK, "TP3")
    if not mib:
        return stands_still(server, LONG)
    stage.run(60 * minutes)
    end_load(server, "TP3")
    return finish(server)


def laggard_at_160_of_163(stage: Stage, every: float = 10.0, moves: bool = True) -> None:
    """H41: one rank is at shard 98 of 163 when the others are done, and goes on at 10 s a shard.  Or it does not."""
    server = sglang(stage, 4)
    up_to_load(server, end=("TP0", "TP1", "TP3"))
    server.do(reading_from_cache(8) if moves else WAITING, "TP2")
    shards = bar(server, "load_progress", 163, every, "TP2", start=97, step=1 if moves else 0)
    if not moves:
        return stands_still(server, LONG, shards)
    stage.run(660, shards)
    end_load(server, "TP2")
    return finish(server)


def lazy_after_100_percent(stage: Stage, faults: float = 0.0) -> None:
    """H44: a FUSE mount; the bar is full within a minute, the weights come page by page afterwards, for 90 minutes."""
    server = sglang(stage, 2)
    up_to_load(server, seconds=60, mib=10, end=())
    server.do(faulting(faults) if faults else IN_DISK)
    if not faults:
        return stands_still(server, 900)
    stage.run(5400)
    end_load(server)
    return finish(server)


def lazy_on_eight_nodes(stage: Stage, major: float = 0.0) -> None:
    """H53: mapped weights materialise for an hour after the bar; one rank on each of eight nodes."""
    server = vllm(stage, 1, nnodes=8)
    up_to_load(server, end=())
    server.do(Doing(cpu=0.05, major=major, storage=major / 8, resident=major / 64, wait="disk") if major else WAITING)
    if not major:
        return stands_still(server, 600)
    stage.run(3600)
    end_load(server)
    return finish(server)


def cache_warm_up(stage: Stage, reads: bool = True, blocked: str = "TP0") -> None:
    """H55: `Warming up GCSFuse cache`, then nothing for 20 minutes but read().

    H109 is its twin: one look-up on such a mount is never answered, the thread stays in D.
    """
    server = sglang(stage, 2)
    spawn(server)
    join(server)
    begin_load(server)
    server.line("novel")
    server.do(Doing(cpu=0.1, read=120, wait="disk"), *server.ranks)
    stage.run(60)
    if not reads:
        server.do(WAITING)
        server.do(IN_DISK, blocked)
        return stands_still(server, LONG)
    stage.run(1140)
    load(server)
    return finish(server)


def weights_processed(stage: Stage, works: bool = True) -> None:
    """H56: all shards are read, then nothing for 15 minutes; or nothing ever."""
    server = trtllm(stage, 2)
    up_to_load(server, end=())
    server.do(WAITING)
    server.do(Doing(cpu=1.0, minor=60, resident=0.5, wait="running") if works else WAITING, "TP1")
    if not works:
        return stands_still(server, LONG)
    stage.run(900)
    end_load(server)
    return finish(server)


def mapped_by_llamacpp(stage: Stage, faults: float = 0.0) -> None:
    """H64: 70B mapped, over a slow bus.  Dots without a newline, so the log has bytes and no lines."""
    server = llamacpp(stage)
    spawn(server, 5)
    begin_load(server)
    server.do(reading(100))
    stage.run(30)
    server.do(faulting(faults) if faults else IN_DISK)
    dots = Beat(60, lambda number: server.gauge("log_bytes_total", 4000 + (number if faults else 0), log="stderr"))
    if not faults:
        return stands_still(server, 900, dots)
    stage.run(5400, dots)
    end_load(server)
    return get_ready(server)


def resident_memory_collapses(stage: Stage, falls: bool = True) -> None:
    """H67: resident memory climbs while the file is mapped and falls once the layers are on the card."""
    server = llamacpp(stage)
    spawn(server, 5)
    begin_load(server)
    server.do(reading(400))
    stage.run(300)
    server.do(Doing(cpu=0.02, resident=-300) if falls else WAITING)
    if not falls:
        return stands_still(server, LONG)
    stage.run(360)
    end_load(server)
    return get_ready(server)


def starts_to_load_and_nothing(stage: Stage, mib: float = 0.0) -> None:
    """H26: `Starting to load model`, then no line; for 3.5 hours, or for the 7 minutes a load takes."""
    server = vllm(stage, 1)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(reading(mib) if mib else WAITING)
    if not mib:
        return stands_still(server, LONG)
    stage.run(420)
    end_load(server)
    return finish(server)


def download_stands_still(stage: Stage, mib: float = 0.0) -> None:
    """H28: 528 GB of a model are there, and no byte more comes; the bar is drawn again and again."""
    server = vllm(stage, 1)
    spawn(server)
    server.do(Doing(cpu=0.3, written=60, read=0.1, wait="poll"))
    stage.run(60, Beat(20, lambda number: server.say("download_progress", "TP0", ratio=round(0.9 + 0.01 * number, 2))))
    server.do(Doing(written=mib, cpu=0.01 * bool(mib), wait="poll"))
    same = Beat(20, lambda number: server.say("download_progress", "TP0", ratio=0.92))
    if not mib:
        return stands_still(server, LONG, same)
    stage.run(1200, same)
    join(server)
    load(server)
    return finish(server)


def log_of_bars_without_newline(stage: Stage, loads: bool = True) -> None:
    """H125: a collector that waits for a newline; the file grows and no line comes.  Bytes alone prove nothing."""
    server = sglang(stage, 2)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(WAITING, "TP0")
    server.do(reading_from_cache(20), "TP1")
    server.gauge("log_bytes_total", 9000, log="stderr")
    grows = Beat(5, lambda number: server.gauge("log_bytes_total", 9000 + 90 * number, log="stderr"))
    stage.run(30)
    if not loads:
        server.do(WAITING, "TP1")
        return stands_still(server, LONG, grows)
    stage.run(600, grows)
    end_load(server)
    return finish(server)


# --- rendezvous ----------------------------------------------------------------------------------------------


def two_of_four_at_a_barrier(stage: Stage, prefetches: bool = False) -> None:
    """H08: two ranks enter a barrier that the two others walk past.  In the twin those two prefetch the files."""
    server = trtllm(stage)
    spawn(server)
    join(server)
    begin_load(server, "TP0", "TP3")
    server.do(reading(40), "TP1", "TP2")
    stage.run(20)
    server.do(reading(2) if prefetches else WAITING, "TP1", "TP2")
    if not prefetches:
        return stands_still(server, LONG)
    stage.run(900)
    load(server)
    return finish(server)


def mpi_on_a_dead_path(stage: Stage, passes: bool = False) -> None:
    """H19: `Initializing MPI with thread mode 3` and no more; in the twin the path is given up after 220 s."""
    server = trtllm(stage, 1)
    spawn(server)
    server.say("dist_init_begin", "TP0")
    server.do(IN_POLL)
    if not passes:
        return stands_still(server, LONG)
    stage.run(220)
    server.say("dist_init_end", "TP0")
    load(server)
    return finish(server)


def gloo_barrier_between_nodes(stage: Stage, arrives: bool = False) -> None:
    """H32: a barrier over two nodes; it ends in a time-out after 1800 s, or the other node arrives after 20 min."""
    server = vllm(stage, 4, nnodes=2)
    spawn(server)
    for rank in server.ranks:
        server.say("dist_init_begin", rank)
    rests(server, wait="poll")
    if not arrives:
        return stands_still(server, 1500, heartbeat(server))
    stage.run(1200, heartbeat(server))
    join(server)
    load(server)
    return finish(server)


def peer_node_compiles(stage: Stage) -> None:
    """H59: the head is warm and waits 30 minutes for a peer node that tunes 856 profiles."""
    server = vllm(stage, 1, nnodes=2)
    up_to_load(server)
    server.say("compile_begin", "TP0")
    server.say("compile_end", "TP0")
    stage.run(1800, heartbeat(server))
    finish(server)


# --- compiling, tuning, capturing, warming up -----------------------------------------------------------------


def autotune_parts_ways(stage: Stage, step: int = 0) -> None:
    """H07: rank 0 finds a tuned configuration and skips what the others enter: their bar stays at 0 of 22.

    H50 is the twin: the bar rises every 43 s, with heartbeats in between.
    """
    server = sglang(stage, 4, framework="vllm")
    up_to_load(server)
    server.say("autotune_end", "TP0")
    for rank in ("TP1", "TP2", "TP3"):
        server.say("autotune_begin", rank)
    tuned = [bar(server, "autotune_progress", 22, 43, rank, step=step) for rank in ("TP1", "TP2", "TP3")]
    for rank in ("TP1", "TP2", "TP3"):
        server.say("autotune_progress", rank, done=0, total=22)
    if not step:
        return stands_still(server, LONG, heartbeat(server), *tuned)
    stage.run(22 * 43 + 5, heartbeat(server), *tuned)
    for rank in ("TP1", "TP2", "TP3"):
        server.say("autotune_end", rank)
    return finish(server)


def silent_autotune(stage: Stage, power: float = 256.0, utilization: float = 1.0, hours: float = 2.0) -> None:
    """H49: two hours without a line; the card draws 256 W.  In the twin it is at rest: nobody can tell, so no page."""
    server = vllm(stage, 1)
    with_cards(server, idle_power=120.0)
    up_to_load(server)
    server.say("autotune_begin", "TP0")
    cards_do(server, power, utilization, 0.05 if power > 150 else 0.0)
    if power < 150:
        return stands_still(server, 900)
    stage.run(3600 * hours)
    server.say("autotune_end", "TP0")
    cards_do(server, 124, 0.0)
    return finish(server)


def one_core_spins(stage: Stage, ends: bool = False) -> None:
    """H17: both nodes stop at the same line, one core spins, the card is idle.  It came back after 11 min, or never."""
    server = vllm(stage, 1, nnodes=2)
    up_to_load(server)
    server.say("memory_pool", "TP0")
    server.do(SPINNING)
    if not ends:
        return stands_still(server, 660)
    stage.run(660)
    return finish(server)


def capture_on_the_cpu(stage: Stage, ends: bool = True) -> None:
    """H47: graphs of many adapters are captured on the CPU for 3 h 10 min, the card idle.  Its twin never ends."""
    server = vllm(stage, 1)
    up_to_load(server)
    server.say("capture_begin", "TP0")
    server.do(SPINNING)
    if not ends:
        return stands_still(server, 1800)
    stage.run(11_400)
    server.say("capture_end", "TP0")
    server.do(WAITING)
    return get_ready(server)


def first_kernel_of_warm_up(stage: Stage, builds: bool = False) -> None:
    """H14: the first sampling call of the warm-up does not return; whether it compiles is told by its children."""
    server = vllm(stage, 1)
    up_to_load(server)
    server.say("warmup_begin", "TP0")
    waiting = Beat(10, lambda number: server.say("waiting"))
    server.do(SPINNING)
    if not builds:
        return stands_still(server, LONG, waiting)
    stage.run(LONG, waiting, compiling(server))
    compiled(server)
    return finish(server)


def ops_lock_of_a_killed_run(stage: Stage, builds: bool = False, held: int | None = 0) -> None:
    """H22: the lock of a run that was killed is waited for; in the twin a compiler holds it."""
    server = sglang(stage, 1)
    up_to_load(server)
    server.say("compile_begin", "TP0")
    held = 1 if builds else held
    grows = lock(server, "build", 86_000 if not builds else 2, held)
    server.do(replace(ASLEEP, resident=0.1))
    if not builds:
        return stands_still(server, LONG, grows)
    stage.run(LONG, grows, compiling(server))
    compiled(server)
    unlock(server, "build")
    server.say("compile_end", "TP0")
    return finish(server)


def baton_of_a_killed_build(stage: Stage, builds: bool = False) -> None:
    """H23: four ranks wait for a baton that nobody holds; in the twin one of them builds the module."""
    server = sglang(stage, 4)
    up_to_load(server)
    waits = Beat(30, lambda number: server.say("lock_wait"))
    grows = lock(server, "build", 5 if builds else 4000, 1 if builds else 0)
    server.do(ASLEEP)
    if not builds:
        return stands_still(server, LONG, waits, grows)
    stage.run(LONG, waits, grows, compiling(server))
    compiled(server)
    unlock(server, "build")
    return finish(server)


def extension_lock_in_warm_up(stage: Stage, stale: bool = True) -> None:
    """H25: the warm-up of one runner times out again and again on a stale lock; elsewhere it takes 24 s."""
    server = sglang(stage, 1)
    up_to_load(server)
    capture(server)
    server.say("warmup_begin", "TP0")
    server.do(ASLEEP)
    if stale:
        return stands_still(server, LONG, lock(server, "build", 7000, 0))
    stage.run(25)
    server.say("warmup_end", "TP0")
    get_ready(server)
    return stage.run(LONG)


def hub_lock_without_flock(stage: Stage, downloads: bool = False) -> None:
    """H29: `Still waiting to acquire lock` every 10 s, on a file system without flock, left by a killed pod.

    In the twin another rank of the server downloads, as somebody must.
    """
    server = vllm(stage, 2)
    spawn(server)
    waits = Beat(10, lambda number: server.say("lock_wait", "TP0"))
    grows = lock(server, "download", 5 if downloads else 9000, None)
    server.do(ASLEEP, "TP0")
    server.do(Doing(cpu=0.03, written=20, wait="poll") if downloads else ASLEEP, "TP1")
    if not downloads:
        return stands_still(server, LONG, waits, grows)
    stage.run(LONG, waits, grows)
    unlock(server, "download")
    join(server)
    load(server)
    return finish(server)


def pipeline_warm_up(stage: Stage, compiles: bool = False) -> None:
    """H34: all main threads wait in gloo, in futex; after 300 s the framework's own watchdog ends it.

    In the twin the first request compiles for ten minutes.
    """
    server = stage.add("sglang-8000", "sglang", ("PP0", "PP1"), ("main", "detokenizer"))
    up_to_load(server)
    capture(server)
    server.listens = True
    server.say("listening")
    for rank in server.ranks:
        server.say("warmup_begin", rank)
    if compiles:
        stage.run(600, compiling(server))
        compiled(server)
        return get_ready(server)
    stands_still(server, 300)
    server.say("watchdog")
    server.say("fatal", kind="exit")
    vanish(server)
    return stage.run(60)


def precompile_on_one_rank(stage: Stage, works: bool = True) -> None:
    """H58: one rank compiles kernels, the others spin in a collective.  In the twin that rank sleeps for ever."""
    server = sglang(stage, 4)
    up_to_load(server)
    for rank in server.ranks:
        server.say("compile_begin", rank)
    server.do(SPINNING, "TP0", "TP2", "TP3")
    server.do(ASLEEP, "TP1")
    if not works:
        return stands_still(server, LONG)
    stage.run(900, compiling(server, 0.0, 0.6), bar(server, "compile_progress", 16384, 60, "TP1", step=270))
    compiled(server)
    for rank in server.ranks:
        server.say("compile_end", rank)
    server.do(WAITING)
    return finish(server)


def cold_compile(stage: Stage, pool: bool = False) -> None:
    """A cold torch.compile (row h): silent for minutes, compilers come and go.

    In the twin, a hang, the pool of compile workers sleeps: it lives, and does nothing.
    """
    server = vllm(stage, 1)
    up_to_load(server)
    server.say("compile_begin", "TP0")
    server.other_children = 17
    if pool:
        return stands_still(server, LONG)
    stage.run(LONG, compiling(server, 0.4, 0.2))
    compiled(server)
    server.say("compile_end", "TP0")
    return finish(server)
