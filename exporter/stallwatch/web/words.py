"""Sentences of the page that `check` has no room for: where a start is, and since when nothing moved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ..model import PHASES, STRONG_CHANNELS
from ..presentation import EPISODE_STATES, SEVERITY, Document, duration, moment, verdict_words

PHASE_WORDS = {
    "spawned": "starting its processes",
    "distributed_init": "joining its ranks",
    "loading_weights": "reading weights",
    "post_load": "preparing its weights",
    "memory_pool": "laying out its memory",
    "compiling": "compiling",
    "capturing_graphs": "capturing graphs",
    "warming_up": "warming up",
    "listening": "opening its port",
    "ready": "getting ready",
    "stopped": "stopping",
}
"""What a server does in a phase of its start."""

COUNT_PARTS = ("trtllm", "generic")
"""Kinds of servers whose logs count something else than shards: modules, or nobody knows what."""

MOST_NAMES = 3


def sentence(server: Document) -> str:
    """`slow: still reading weights on TP3, 41 of 64 shards, last progress 12s ago`; else what `check` says."""
    late = behind(server["ranks"])
    ago = last_progress(server, late)
    moved = [] if ago is None else [f"last progress {duration(ago)} ago"]
    if server["state"] in ("working", "slow") and not server["ready"]:
        return f"{server['state']}: {', '.join([_start(server, late), *moved])}"
    words = verdict_words(server)
    return ", ".join([words, *moved]) if server["state"] in EPISODE_STATES else words


def behind(ranks: Iterable[Document]) -> list[Document]:
    """The living ranks in the earliest phase; none when no phase is known."""
    alive = [rank for rank in ranks if rank["alive"] is not False and rank["phase"] in PHASES]
    first = min((PHASES.index(rank["phase"]) for rank in alive), default=0)
    return [rank for rank in alive if rank["phase"] == PHASES[first]]


def last_progress(server: Document, ranks: Sequence[Document] = ()) -> float | None:
    """Seconds since one of `ranks` made progress; where that is not known, since anything moved that counts."""
    ages = [rank["progress_age_seconds"] for rank in ranks if rank.get("progress_age_seconds") is not None]
    moves = [
        channel["age_seconds"]
        for channel in server["channels"]
        if channel["channel"] in STRONG_CHANNELS and channel["age_seconds"] is not None
    ]
    return min(ages or moves, default=None)


def _start(server: Document, late: Sequence[Document]) -> str:
    """`still reading weights on TP3, 41 of 64 shards`."""
    phase = late[0]["phase"] if late else server["phase"]
    still = "still " if server["state"] == "slow" else ""
    words = f"{still}{PHASE_WORDS.get(phase, phase)}"
    if len(late) < len(server["ranks"]) or len(late) == 1:
        words += f" on {names(late)}" if late else ""
    else:
        words += f" on all {len(late)} ranks" if late else ""
    if phase == "loading_weights" and (known := [rank for rank in late if rank["load_progress"] is not None]):
        least = min(known, key=lambda rank: float(rank["load_progress"]))
        words += f", {'at least ' if len(late) > 1 else ''}{_read(least, server['framework'])}"
    return words


def _read(rank: Document, framework: str) -> str:
    """`41 of 64 shards`, `64% read`."""
    done, total = rank.get("load_done"), rank.get("load_total")
    if done is None or total is None:
        return f"{percent(rank['load_progress'])} read"
    return f"{done} of {total} {'parts' if framework.endswith(COUNT_PARTS) else 'shards'}"


def about(server: Document) -> str:
    """`vllm 0.11.0, org/model, 8 of 8 ranks alive, slow since 2023-11-14T22:16:31Z`."""
    alive = "?" if server["ranks_alive"] is None else server["ranks_alive"]
    facts = (
        f"{server['framework']} {server['version']}".strip(),
        server["model"],
        f"{alive} of {server['ranks_expected']} ranks alive",
        f"{server['state']} since {moment(server['since'])}",
    )
    return ", ".join(filter(None, facts))


def phase_words(server: Document) -> str:
    """`post_load since 2023-11-14T22:14:51Z, slow after 10m`."""
    budget = server.get("phase_budget_seconds")
    slow = "" if budget is None else f", slow after {duration(budget)}"
    return f"{server['phase']} since {moment(server.get('phase_since'))}{slow}"


def names(ranks: Sequence[Document]) -> str:
    """`TP3`, `TP1 and TP3`, `TP0, TP1, TP2 and 4 more`."""
    told = [str(rank["rank"]) for rank in ranks[:MOST_NAMES]]
    rest = len(ranks) - len(told)
    last = [f"{rest} more"] if rest else [told.pop()]
    return " and ".join([", ".join(told), *last] if told else last)


def percent(share: float) -> str:
    """Rounded down: 100% is all of it."""
    return f"{math.floor(share * 100 + 1e-9)}%"


def counts(servers: Sequence[Document]) -> str:
    """`3 inference servers on this node: 1 stalled, 2 working.`"""
    total = len(servers)
    what = "1 inference server" if total == 1 else f"{total or 'no'} inference servers"
    by_state = Counter(server["state"] for server in servers)
    told = ", ".join(f"{by_state[state]} {state}" for state in SEVERITY if by_state[state])
    return f"{what} on this node{': ' if told else ''}{told}."
