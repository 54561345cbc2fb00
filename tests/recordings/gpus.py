"""Stories about GPUs: spins, lost cards, a driver that hangs, and what looks like them.

Each function plays one report.  A parameter turns the hang into its twin, and changes nothing else.  Watts are those
that were reported; where nobody told what a card takes at rest, it has to be learned from the story.
"""

from __future__ import annotations

from random import Random

from .pieces import (
    SPINNING,
    bar,
    begin_load,
    cards_do,
    compiled,
    compiling,
    counts_tokens,
    end_load,
    finish,
    join,
    known_cards,
    owes,
    rests,
    rests_and_reads,
    serving,
    sglang,
    spawn,
    stands_still,
    up_to_load,
    vllm,
)
from .serving import WEDGED
from .stage import MIB, WAITING, Beat, Card, Doing, Server, Stage
from .startup import LONG

COLLECTIVE = (("TP0", 152.0, 1.0), ("TP1", 129.0, 0.0), ("TP2", 137.0, 0.0), ("TP3", 135.0, 0.0))
"""nccl #1550, eight H100: rank, watts, utilisation.  122 W at rest with a context, 700 W at most."""


def _waits_on_cards(server: Server) -> None:
    for rank, watts, utilization in COLLECTIVE:
        cards_do(server, watts, utilization, only=(rank,))


def collective(stage: Stage, learned: bool = True, peer: str = "", polls: bool = False) -> None:
    """One card at 100 % and 152 W, its siblings at 0 % (nccl #1550).

    `learned`: the cards rested before, after their weights had come over the bus.  `peer`: what TP1 does meanwhile, for
    ten minutes: it `compiles` with compilers below it (H58), `computes` on its CPU with nothing to show for it, or
    `comes` late; "" is for ever.
    `polls`: the thread of the rank that spins asks its card again and again.
    """
    server = sglang(stage, 4)
    known_cards(server)
    for card in server.cards:
        card.bus_rate = 400.0
    up_to_load(server)
    for card in server.cards:
        card.bus_rate = 0.3
    if learned:
        rests_and_reads(server)
    _waits_on_cards(server)
    if polls:
        server.do(SPINNING, "TP0")
    if not peer:
        return stands_still(server, LONG)
    if peer == "computes":
        server.do(SPINNING, "TP1")
    stage.run(600, *([compiling(server)] if peer == "compiles" else []))
    compiled(server)
    rests(server)
    cards_do(server, 122, 0.0)
    return finish(server)


def every_card(
    stage: Stage, power: float = 269.0, memory: float | str = 0.0, seconds: float = LONG, worked: bool = True
) -> None:
    """B200: 100 % on all ranks, 259 to 279 W of 1000 W, for ever (TensorRT-LLM #5391).  The twin draws 400 W.

    `memory`: how much its memory is used, or why that cannot be read.  `worked` is for cards without a limit.
    """
    server = vllm(stage, 2)
    known_cards(server, rest=195.0, limit=1000.0 if worked else None)
    up_to_load(server)
    rests_and_reads(server)
    for card in server.cards:
        card.power, card.utilization, card.memory_utilization = power, 1.0, memory
    if power < 300:
        return stands_still(server, seconds)
    stage.run(600)
    cards_do(server, 195, 0.0)
    return finish(server)


def unified_memory(stage: Stage, power: float = 15.0, worked: bool = True, ends: bool = False) -> None:
    """GB10: 96 % and 15 W, the use of memory 0 %; how much memory is used is not supported, and there is no limit.

    What work takes is known only when it was seen (`worked`).  The twin draws 40 W at the same 96 %.
    """
    server = vllm(stage, 1)
    known_cards(server, rest=11.2, limit=None)
    server.cards[0].shows_memory = False
    up_to_load(server)
    if worked:
        cards_do(server, 45, 0.9, 0.4)
        stage.run(75)
        cards_do(server, 11.2, 0.0)
    rests_and_reads(server)
    cards_do(server, power, 0.96)
    if power < 30 and not ends:
        return stands_still(server, LONG)
    stage.run(600)
    cards_do(server, 11.2, 0.0)
    return finish(server)


def phase_spins(
    stage: Stage,
    event: str,
    end: str = "",
    spinning: int = 2,
    comes: bool = False,
    power: float = 152.0,
    rest: float = 122.0,
    limit: float = 700.0,
) -> None:
    """Cards spin in a phase in which they may wait for long.  `end`: an event that says that the phase is over.

    `spinning`: on so many of two ranks; the card of the other one rests.  `power`: of those that spin.  H49's autotune
    worked at 100 % and 256 W for hours; on a GB300 that is no more than a spin takes, so only its begin tells.
    """
    server = vllm(stage, 2)
    known_cards(server, rest, limit)
    up_to_load(server)
    rests_and_reads(server)
    for each in filter(None, (event, end)):
        for rank in server.ranks:
            server.say(each, rank)
    cards_do(server, power, 1.0, only=server.ranks[:spinning])
    if not comes:
        return stands_still(server, 660)
    stage.run(900)
    cards_do(server, rest, 0.0)
    if not end and event == "autotune_begin":
        for rank in server.ranks:
            server.say("autotune_end", rank)
    return finish(server)


def empty_card(stage: Stage, loads: bool = False) -> None:
    """A Blackwell card whose last process was killed: 100 % for days, about 100 W, nobody on it (lium-io #1142).

    The server is about to load onto it, and does not; in the twin it reads its weights into memory for ten minutes.
    """
    server = vllm(stage, 1)
    known_cards(server)
    for card in server.cards:
        card.memory, card.utilization, card.power = 0.0, 1.0, 100.0
    spawn(server)
    join(server)
    begin_load(server)
    if not loads:
        return stands_still(server, LONG)
    server.do(Doing(storage=2, cpu=0.02, minor=400, resident=2, wait="disk"))
    stage.run(600)
    end_load(server)
    cards_do(server, 122, 0.0)
    server.cards[0].memory = 76.0 * 1024 * MIB
    return finish(server)


def two_tenants(stage: Stage, loads: bool = False) -> None:
    """Somebody else computes on the card: what it shows is not ours.  Only what our own rank holds tells of it."""
    server = vllm(stage, 1)
    known_cards(server)
    server.cards[0].tenant, server.cards[0].memory = 30e9, 2e9
    spawn(server)
    join(server)
    begin_load(server)
    cards_do(server, 500, 0.98, 0.4)
    if not loads:
        return stands_still(server, LONG)
    server.cards[0].memory_rate = 2.0
    stage.run(600)
    server.cards[0].memory_rate = 0.0
    end_load(server)
    return finish(server)


def direct_load(stage: Stage, loads: bool = True) -> None:
    """A first start that loads from storage to the card directly: nothing is read by the process, the bus is busy."""
    server = vllm(stage, 1)
    known_cards(server)
    spawn(server)
    join(server)
    begin_load(server)
    server.cards[0].bus_rate = 3000.0
    stage.run(30)
    if not loads:
        server.cards[0].bus_rate = 0.3
        return stands_still(server, LONG)
    stage.run(600)
    server.cards[0].bus_rate = 0.3
    end_load(server)
    return finish(server)


def driver_hangs(stage: Stage, works: bool = False) -> None:
    """A call into the driver does not return (open-gpu-kernel-modules #446); the server stands, or loads on."""
    server = sglang(stage, 2)
    known_cards(server)
    spawn(server)
    join(server)
    begin_load(server)
    server.do(Doing(storage=50, cpu=0.2, minor=9000, resident=50, wait="running"))
    stage.run(60)
    for card in server.cards:
        card.trouble = "driver_unresponsive"
    in_flight = _call_in_flight(stage)
    if not works:
        server.do(WAITING)
        return stands_still(server, LONG, in_flight)
    server.do(WAITING)
    stage.run(600, in_flight, bar(server, "load_progress", 163, 20, "TP0"))
    stage.call_in_flight = 0.0
    for card in server.cards:
        card.trouble = ""
    end_load(server)
    return finish(server)


def _call_in_flight(stage: Stage) -> Beat:
    def grow(number: int) -> None:
        stage.call_in_flight = stage.interval * number

    return Beat(stage.interval, grow)


def driver_hangs_first(stage: Stage, returns: bool = False) -> None:
    """The first call into the driver does not return: no card is known.  In the twin it does after 40 s."""
    server = vllm(stage, 1)
    stage.cards, stage.call_in_flight = True, 0.0
    spawn(server)
    server.say("dist_init_begin", "TP0")
    in_flight = _call_in_flight(stage)
    if not returns:
        return stands_still(server, LONG, in_flight)
    stage.run(40, in_flight)
    stage.call_in_flight = 0.0
    known_cards(server)
    server.do(Doing(cpu=0.3, minor=900, resident=1))
    stage.run(300)
    join(server)
    return finish(server)


def card_lost(
    stage: Stage, ours: bool = True, back: bool = False, trouble: str = "gpu_lost", ready: bool = False
) -> None:
    """A card falls off the bus (nvidia-docker #1648).  It is `back` after a minute; it was ours, or nobody's.

    Twin: none of the cards can be read for a minute (the devices were taken out of our cgroup), and none is lost.
    """
    server = sglang(stage, 4)
    known_cards(server)
    server.cards.append(Card("GPU-9", "", Random(f"{stage.seed}/spare"), 72.0, None, clock=345e6, lost=0.0, memory=0.0))
    if ready:
        serving(stage, server)
    else:
        up_to_load(server)
        server.do(Doing(storage=50, cpu=0.2, minor=9000, resident=50, wait="running"))
        stage.run(60)
    lost = server.cards if trouble == "error" else [server.cards[2 if ours else 4]]
    for card in lost:
        card.trouble, card.lost = trouble, float(trouble == "gpu_lost")
    is_failure = ours and trouble == "gpu_lost"
    if is_failure:
        stage.falls_silent()
    stage.run(60)
    if back:
        for card in lost:
            card.trouble, card.lost = "", 0.0
    if is_failure:
        return stage.run(60)
    stage.run(60)
    server.do(WAITING)
    return finish(server)


def instances(stage: Stage, loads: bool = False) -> None:
    """A rank on a MIG instance: no utilisation, no power.  Another instance computes, and the whole card shows it."""
    server = vllm(stage, 1)
    known_cards(server)
    (own,) = server.cards
    own.mig, own.is_whole, own.utilization, own.memory_utilization = "instance", False, *["not_supported"] * 2
    own.power, own.memory, own.limit = "not_supported", 2e9, None
    parent = Card("GPU-0-whole", "TP0", Random(f"{stage.seed}/parent"), 400.0, None, clock=1_980e6, mig="enabled")
    parent.utilization, parent.memory_utilization, parent.is_whole = "not_supported", "not_supported", False
    server.cards.append(parent)
    spawn(server)
    join(server)
    begin_load(server)
    if not loads:
        return stands_still(server, LONG)
    own.memory_rate = 2.0
    stage.run(600)
    own.memory_rate = 0.0
    end_load(server)
    return finish(server)


def owed_at(stage: Stage, power: float = 152.0) -> None:
    """Ready and idle for two minutes, then work is owed: a decode that spins, or a prefill of ten minutes at 620 W."""
    server = vllm(stage, 2)
    known_cards(server)
    serving(stage, server)
    owes(server, 0)
    counts_tokens(server)
    rests(server)
    stage.run(120)
    owes(server, 2)
    cards_do(server, power, 1.0, 0.3 if power > 300 else 0.0)
    if power < 300:
        return stands_still(server, WEDGED)
    stage.run(600)
    counts_tokens(server, 50, 4000, 0.1)
    return stage.run(60)


def one_card_shared(stage: Stage, stops: bool = True) -> None:
    """Somebody else is on the card of TP3: its work is not seen, that of its siblings is.  Then none of them works.

    Nothing tells the ranks apart, so none is named.  The twin goes on after a minute and a half.
    """
    server = vllm(stage, 4)
    known_cards(server)
    server.cards[3].tenant = 8e9
    serving(stage, server)
    owes(server, 0)
    counts_tokens(server)
    rests(server)
    stage.run(120)
    owes(server, 4)
    counts_tokens(server, 80, 120, 0.2)
    cards_do(server, 330, 0.8, 0.5)
    stage.run(150)
    counts_tokens(server)
    cards_do(server, 122, 0.0)
    if stops:
        return stands_still(server, WEDGED)
    stage.run(90)
    counts_tokens(server, 80, 120, 0.2)
    cards_do(server, 330, 0.8, 0.5)
    return stage.run(150)
