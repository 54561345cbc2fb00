"""Stories of reports about the watcher, the paths between cards, and logs whose shape misleads.

Each function plays one report.  A parameter turns the hang into its twin, and changes nothing else.
"""

from __future__ import annotations

from .pieces import (
    bar,
    begin_load,
    cards_do,
    end_load,
    finish,
    join,
    known_cards,
    load,
    reading,
    rests,
    spawn,
    stands_still,
    up_to_load,
    vllm,
)
from .stage import WAITING, Beat, Doing, Stage
from .startup import LONG


def peer_path(stage: Stage, bus_rate: float = 0.0) -> None:
    """H11: the first collective between two cards that cannot reach each other: 99 %, 4 % of memory, bus at 0.

    Nothing was learned yet of what the cards take at rest.  In the twin bytes go over the bus, for ten minutes.
    """
    server = vllm(stage, 2)
    known_cards(server)
    for card in server.cards:
        card.memory = 4e9
    spawn(server)
    for rank in server.ranks:
        server.say("dist_init_begin", rank)
    cards_do(server, 98, 0.99)
    for card in server.cards:
        card.bus_rate = bus_rate
    if not bus_rate:
        return stands_still(server, LONG)
    stage.run(600)
    for card in server.cards:
        card.bus_rate = 0.0
    cards_do(server, 80, 0.0)
    join(server)
    load(server)
    return finish(server)


def launcher_counts(stage: Stage, loads: bool = False) -> None:
    """H37: the launcher says every ten seconds that it waits for its shard, which says nothing, and stands."""
    server = stage.add("tgi-8080", "tgi", ("TP0",), ("main",))
    spawn(server)
    begin_load(server)
    server.do(reading(3) if loads else WAITING)
    waits = Beat(10, lambda number: server.say("waiting"))
    if not loads:
        return stands_still(server, LONG, waits)
    stage.run(900, waits)
    end_load(server)
    return finish(server)


def kernels_tuned_one_by_one(stage: Stage, tunes: bool = True) -> None:
    """H61: every ten seconds a line that another kernel was tuned, none like the one before, while a core works."""
    server = vllm(stage, 2)
    up_to_load(server)
    tuned = Beat(10, lambda number: server.line("novel"))
    server.do(Doing(cpu=0.9, minor=40, wait="running"))
    stage.run(60, tuned)
    if not tunes:
        rests(server)
        return stands_still(server, LONG)
    stage.run(800, tuned)
    return finish(server)


def cards_time_out(stage: Stage, loads: bool = True) -> None:
    """H119: calls to the cards take too long under load, again and again; the server loads on, or stands."""
    server = vllm(stage, 2)
    known_cards(server)
    spawn(server)
    join(server)
    begin_load(server)

    def flicker(number: int) -> None:
        for card in server.cards:
            card.trouble = "timeout" if number % 3 else ""

    troubled = Beat(15, flicker)
    server.do(reading(30))
    stage.run(60, troubled, bar(server, "load_progress", 64, 15, "TP0"))
    server.do(reading(2) if loads else WAITING)
    if not loads:
        return stands_still(server, LONG, troubled)
    stage.run(600, troubled)
    for card in server.cards:
        card.trouble = ""
    end_load(server)
    return finish(server)
