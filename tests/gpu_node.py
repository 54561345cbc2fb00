"""Cards that answer as a test says, processes in a tree of files, and the `gpu` collector over both."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proc_tree import BOOT, ProcTree
from stallwatch.config import Config
from stallwatch.model import GpuUse, Process, ProcessId, Reading, Scene, Server
from stallwatch.sources import Host, Moment
from stallwatch.sources.gpus.collector import Gpu
from stallwatch.sources.gpus.nvml_child import Absent, Answer, CardAnswer, Row, Unanswered
from stallwatch.sources.gpus.xid import Lost, Xid
from stallwatch.sources.procfs import KERNEL_THREAD

GIB = 1 << 30
VALUES: Mapping[str, float] = {
    "memory_used": 76 * GIB,
    "memory_total": 80 * GIB,
    "memory_reserved": GIB // 2,
    "utilization": 0.25,
    "memory_utilization": 0.125,
    "energy": 1000.5,
    "power": 120.5,
    "power_limit": 700.0,
    "sm_clock": 1.98e9,
    "temperature": 41.0,
    "pcie_receive": 1e6,
    "pcie_transmit": 2e6,
    "recovery_action": 0.0,
    "sm_activity": 0.5,
    "tensor_activity": 0.25,
    "dram_activity": 0.125,
}
"""What a Hopper card says."""

Rows = Sequence[tuple[int, int | None]]


def address(number: int) -> str:
    return f"0000:{number + 16:02x}:00.0"


def card(number: int = 0, rows: Rows | None = (), **given: Any) -> CardAnswer:
    """Card `number`; `rows`: PIDs and bytes, None where the list was not had."""
    fields: dict[str, Any] = {
        "uuid": f"GPU-{number}",
        "index": str(number),
        "name": "NVIDIA H100 80GB HBM3",
        "capability": "9.0",
        "pci": address(number),
        "mig": "disabled",
        "values": VALUES,
        "codes": {},
        "processes": None if rows is None else tuple(Row(pid, size) for pid, size in rows),
    }
    return CardAnswer(**{**fields, **given})


def instance(number: int, position: int, rows: Rows | None = (), **given: Any) -> CardAnswer:
    """A MIG instance of a card."""
    fields: dict[str, Any] = {
        "uuid": f"MIG-{number}-{position}",
        "index": f"{number}:{position}",
        "mig": "instance",
        "pci": address(number),
        "values": {"memory_used": 9 * GIB, "memory_total": 20 * GIB},
    }
    return card(number, rows, **{**fields, **given})


def silent(number: int, code: int) -> CardAnswer:
    """A card that refuses everything."""
    return card(number, None, values={}, codes={**dict.fromkeys(VALUES, code), "processes": code})


def answer(*cards: CardAnswer, **given: Any) -> Answer:
    return Answer(driver="580.95.05", cards=cards, **given)


class Driver:
    """Gives the answer it was told to; lists only when they are asked for."""

    def __init__(self) -> None:
        self.says: Answer | Unanswered | Absent = answer()
        self.asked: list[tuple[bool, bool]] = []
        self.closed = False

    def ask(self, processes: bool, events: bool) -> Answer | Unanswered | Absent:
        self.asked.append((processes, events))
        if not isinstance(self.says, Answer) or processes:
            return self.says
        cards = (card(int(each.index[0]), None, **_without_list(each)) for each in self.says.cards)
        return Answer(**{**{name: getattr(self.says, name) for name in Answer.__slots__}, "cards": tuple(cards)})

    def close(self) -> None:
        self.closed = True


def _without_list(each: CardAnswer) -> dict[str, Any]:
    fields = {name: getattr(each, name) for name in CardAnswer.__slots__ if name != "processes"}
    return {**fields, "codes": {figure: code for figure, code in each.codes.items() if figure != "processes"}}


class Kernel:
    """A kernel log that says what it was told to, once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_caught_up = True
        self.faults: list[Xid | Lost] = []
        self.closed = False

    def read(self, now: Moment) -> tuple[Xid | Lost, ...]:
        told, self.faults = tuple(self.faults), []
        return told

    def close(self) -> None:
        self.closed = True


class GpuNode:
    """Each look is an interval after the one before.

    All processes can be seen, unless `blind`; `mounted`: the tree is not of the namespace that we run in.
    """

    def __init__(self, root: Path, blind: bool = False, mounted: bool = False, config: Config | None = None) -> None:
        self.tree, self.driver, self.kernel = ProcTree(root / "proc"), Driver(), Kernel()
        (root / "proc/self").symlink_to("1" if mounted else str(os.getpid()))
        self.tree.add(1, "systemd", comm="systemd")
        if not blind:
            self.tree.add(2, "", comm="kthreadd", flags=KERNEL_THREAD, ppid=0)
        self.source = Gpu(Host(config or Config(), (), self.tree.root, root), self.driver, self.kernel)
        self.servers: list[Server] = []
        self.now = 1000.0
        self.found: list[Reading] = []
        self.uses: list[GpuUse] = []

    def serve(self, name: str, ranks: Mapping[str, int]) -> None:
        """A server of such ranks (name -> PID), whose processes live."""
        for pid in ranks.values():
            self.tree.add(pid, "worker", comm="python3")
        processes = tuple(Process(ProcessId(pid, 10000), rank, 1) for rank, pid in ranks.items())
        self.servers.append(Server(name, "vllm", "server", processes[0].id, BOOT + 100.0, processes))

    def look(self, says: Answer | Unanswered | Absent | None = None, seconds: float = 5.0) -> GpuNode:
        """One read; `says`: what the driver answers from now on."""
        self.driver.says = self.driver.says if says is None else says
        self.now += seconds
        items = list(self.source.read(Scene(tuple(self.servers)), Moment(self.now, BOOT + self.now)))
        self.found = [item for item in items if isinstance(item, Reading)]
        self.uses = [item for item in items if isinstance(item, GpuUse)]
        assert len(items) == len(self.found) + len(self.uses)
        assert {reading.signal for reading in self.found} <= set(Gpu.signals)
        return self

    def series(self, name: str) -> dict[tuple[str, ...], float | str | None]:
        """Labels -> value, or the reason why there is none."""
        readings = [reading for reading in self.found if reading.signal.name == name]
        assert len({reading.labels for reading in readings}) == len(readings)
        return {r.labels: r.reason if r.value is None else r.value for r in readings}

    def value(self, name: str, *labels: str) -> float | str | None:
        return self.series(name)[labels]

    def held(self) -> dict[tuple[str, ...], float | str | None]:
        return self.series("gpu_process_memory_bytes")

    def unowned(self, number: int = 0) -> float | str | None:
        """Of a card; "nothing" when it is not told."""
        return self.series("gpu_unowned_memory_bytes").get((f"GPU-{number}",), "nothing")
