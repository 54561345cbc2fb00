"""What a condition is made of: who does what out of the ordinary, and when; and how the server is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Moment = Literal["before", "starting", "joining", "loading", "loaded", "compiling", "serving"]
"""`before` the server is started; `starting`: its processes run; `joining`: before the ranks have met; `loading`:
after the line that begins it, before the weights; `loaded`: between the end of the load and the barrier where the
others wait; `compiling`: before the graphs are captured; `serving`: after the last word of the start."""

Who = Literal["culprit", "spinner", "first", "all", "engine", "main", "launcher"]
"""The first four are ranks.  An `engine` exists where the framework has one; the `launcher` is outside the server."""

RANKS: tuple[Who, ...] = ("culprit", "spinner", "first", "all")


@dataclass(frozen=True, slots=True)
class Step:
    """One deed; `act` is a key of rank_acts.ACTS, server.ACTS or neighbours.ACTS, by `who`."""

    at: Moment
    act: str
    who: Who = "culprit"


@dataclass(frozen=True, slots=True)
class Launch:
    """How the server is started.  `log`: where its output goes (`buffered`: a file, in blocks of 8 KiB).

    `embedded`: an engine inside a script, without a port.  `nodes`: this one has its share of the ranks; `node_rank` is
    its number among them (None: the last).  `supervised`: a shell starts it again whenever it ends.
    """

    framework: Literal["sglang", "vllm"] = "sglang"
    embedded: bool = False
    nodes: int = 1
    node_rank: int | None = None
    log: Literal["file", "buffered", "nowhere"] = "file"
    supervised: bool = False

    @property
    def number(self) -> int:
        """Of this node; the first one has number 0 and serves."""
        return self.nodes - 1 if self.node_rank is None else self.node_rank
