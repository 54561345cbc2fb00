"""A tree of files, the `processes` collector over it, and what its last look said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proc_tree import BOOT, DirectReads, ProcTree
from stallwatch.config import Config, ConfiguredServer
from stallwatch.frameworks import load_frameworks
from stallwatch.model import GpuUse, RankName, Reading, Scene, Server
from stallwatch.sources import Host, Moment
from stallwatch.sources.processes import Processes
from stallwatch.sources.unit_state import UnitStates

FRAMEWORKS = load_frameworks()
SPAWN = ("python3", "-c", "from multiprocessing.spawn import spawn_main(tracker_fd=5)", "--multiprocessing-fork")
TRACKER = ("python3", "-c", "from multiprocessing.resource_tracker import main;main(4)")
INDUCTOR = ("python3", "/x/torch/_inductor/compile_worker/__main__.py", "--workers=8")


class Node:
    """A tree, the collector over it, and what its last look said.  Each look is 5 s after the one before."""

    def __init__(
        self,
        root: Path,
        config: Config | None = None,
        most_kept: int | None = None,
        units: UnitStates | None = None,
    ) -> None:
        self.root = root
        self.tree = ProcTree(root / "proc")
        self.reads = DirectReads(self.tree)
        host = Host(config or Config(), FRAMEWORKS, self.tree.root, root)
        self.source = Processes(host, self.reads, most_kept, units)
        self.now = 1000.0
        self.ready: frozenset[str] = frozenset()
        self.rank_names: tuple[RankName, ...] = ()
        self.gpu_uses: tuple[GpuUse, ...] = ()
        self.items: list[object] = []

    def look(self, seconds: float = 5.0) -> Node:
        self.now += seconds
        scene = Scene(self.servers, self.rank_names, ready=self.ready, gpu_uses=self.gpu_uses)
        self.items = list(self.source.read(scene, Moment(self.now, BOOT + self.now)))
        return self

    @property
    def servers(self) -> tuple[Server, ...]:
        return tuple(item for item in self.items if isinstance(item, Server))

    @property
    def server(self) -> Server:
        (found,) = self.servers
        return found

    @property
    def names(self) -> list[str]:
        return sorted(server.name for server in self.servers)

    @property
    def ranks(self) -> dict[int, str]:
        """PID -> what the process is, of the only server."""
        return {process.id.pid: process.rank for process in self.server.processes}

    def reading(self, name: str, *labels: str) -> Reading:
        (found,) = self.readings(name, *labels)
        return found

    def readings(self, name: str, *labels: str) -> list[Reading]:
        """Those whose labels behind the server begin with `labels`."""
        readings = (item for item in self.items if isinstance(item, Reading))
        return [r for r in readings if r.signal.name == name and r.labels[1 : 1 + len(labels)] == labels]

    def value(self, name: str, *labels: str) -> float | None:
        return self.reading(name, *labels).value

    def alive(self) -> dict[str, float | None]:
        return {reading.labels[1]: reading.value for reading in self.readings("rank_alive")}

    def vllm(self, first: int = 100, ranks: int = 2, command: str = "vllm serve org/m -tp 2", **given: Any) -> None:
        """`vllm serve`, below it the engine, below that its workers; PIDs first, first + 1, first + 10 and on."""
        self.tree.add(first, command, comm="vllm", **given)
        self.tree.add(first + 1, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=first, **given)
        for rank in range(ranks):
            pid = first + 10 + rank
            self.tree.add(pid, f"VLLM::Worker_TP{rank}", comm="VLLM::Worker_TP", ppid=first + 1, **given)


def configured(folder: Path, *servers: ConfiguredServer, **given: Any) -> Node:
    return Node(folder, Config(servers=servers, **given))
