"""SOURCES: every collector there is, in the order in which they first need each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import Host, Source
from .endpoints import Endpoints
from .gpus.collector import Gpu
from .logs.collector import Logs
from .node import Node
from .processes import Processes
from .sockets import Sockets
from .threads import Threads

SOURCES: Mapping[str, Callable[[Host], Source]] = {
    "processes": Processes,
    "threads": Threads,
    "sockets": Sockets,
    "logs": Logs,
    "gpu": Gpu,
    "endpoints": Endpoints,
    "node": Node,
}
