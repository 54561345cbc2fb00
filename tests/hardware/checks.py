"""The checks, each a function of the place where it runs that yields what it found."""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stallwatch import signals
from stallwatch.config import Config, Intervals
from stallwatch.model import GpuUse, Process, Reading, Scene, Server, Signal
from stallwatch.sources import Host, Moment
from stallwatch.sources.gpus.collector import MEMORY_TOTAL, RECOVERY_ACTION, SM_ACTIVITY, TEMPERATURE, Gpu
from stallwatch.sources.gpus.xid_log import XidLog
from stallwatch.sources.procfs import ProcFs

from .machines import GIB, MIB, Machine, NotRunError, Peer, Work

SAME, DIFFERS, SEEN, NOT_RUN = "same", "differs", "seen", "not run"
NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Found:
    """One line of the result.  `verdict`: same or differs (from nvidia-smi, or from what was done), seen, not run."""

    check: str
    verdict: str
    said: str


@dataclass(frozen=True, slots=True)
class Look:
    """What one cycle of the collector said."""

    values: Mapping[tuple[str, tuple[str, ...]], float]
    missing: Mapping[tuple[str, tuple[str, ...]], str]
    uses: frozenset[tuple[str, int]]
    info: Mapping[str, tuple[str, ...]]  # by uuid

    def of(self, signal: Signal, *labels: str) -> float | None:
        return self.values.get((signal.name, labels))


@dataclass(slots=True)
class Place:
    """The collector under test, on a machine.  Process lists are asked for in each cycle unless `lists` is long."""

    machine: Machine
    gpu: Gpu = field(default_factory=lambda: Gpu(host()))

    def look(self, scene: Scene | None = None) -> Look:
        moment = Moment(time.monotonic(), time.time())
        values, missing, uses, info = dict[Any, float](), dict[Any, str](), set[tuple[str, int]](), dict[str, Any]()
        for item in self.gpu.read(scene or Scene(), moment):
            if isinstance(item, GpuUse):
                uses.add((item.gpu, item.pid))
            elif isinstance(item, Reading) and item.value is None:
                missing[item.signal.name, item.labels] = item.reason or ""
            elif isinstance(item, Reading) and item.value is not None:
                values[item.signal.name, item.labels] = item.value
                if item.signal == signals.GPU_INFO:
                    info[item.labels[0]] = item.labels[1:]
        return Look(values, missing, frozenset(uses), info)

    def watch(self, seconds: float, scene: Scene | None = None) -> list[Look]:
        """Cycles over so long; at least two."""
        until, looks = time.monotonic() + seconds, [self.look(scene)]
        while time.monotonic() < until or len(looks) < 2:
            time.sleep(self.machine.pace.every)
            looks.append(self.look(scene))
        return looks

    def card(self) -> Peer:
        """The first card, as nvidia-smi has it."""
        peers = self.machine.peers()
        if not peers:
            raise NotRunError("nvidia-smi shows no card")
        return peers[0]

    def figures(self, uuid: str) -> dict[str, float]:
        """Means over a period, of those that are there."""
        looks = self.watch(self.machine.pace.period)[1:]
        found: dict[str, float] = {}
        for name, ours in FIGURES.items():
            values = [value for look in looks if (value := look.of(ours, uuid)) is not None]
            if values:
                found[name] = statistics.mean(values)
        return found


def host(gpu_processes: float = 0.1) -> Host:
    return Host(Config(intervals=Intervals(gpu=0.1, gpu_processes=gpu_processes)), ())


FIGURES: Mapping[str, Signal] = {
    "power": signals.GPU_POWER,
    "utilization": signals.GPU_UTILIZATION,
    "memory_utilization": signals.GPU_MEMORY_UTILIZATION,
    "sm_activity": SM_ACTIVITY,
    "tensor_activity": signals.GPU_TENSOR_ACTIVITY,
    "dram_activity": signals.GPU_DRAM_ACTIVITY,
    "pcie_receive": signals.GPU_PCIE_RECEIVE,
    "pcie_transmit": signals.GPU_PCIE_TRANSMIT,
    "sm_clock": signals.GPU_SM_CLOCK,
}

PEERS: Mapping[str, tuple[Signal, float, float]] = {
    # Figure of nvidia-smi -> ours, and by how much they may differ: absolutely, or as a share of nvidia-smi's.
    "memory_used": (signals.GPU_MEMORY_USED, 64 * MIB, 0.02),
    "memory_total": (MEMORY_TOTAL, MIB, 0.0),
    "utilization": (signals.GPU_UTILIZATION, 0.10, 0.0),
    "power": (signals.GPU_POWER, 10.0, 0.15),
    "power_limit": (signals.GPU_POWER_LIMIT, 1.0, 0.0),
    "temperature": (TEMPERATURE, 4.0, 0.0),
}


def compared(check: str, ours: float | None, theirs: float | None, absolute: float, share: float = 0.0) -> Found:
    """Absent on both sides is the same; on one side it is not."""
    said = f"{shown(ours)}, nvidia-smi {shown(theirs)}"
    if ours is None or theirs is None:
        return Found(check, SAME if ours is theirs else DIFFERS, said)
    return Found(check, SAME if abs(ours - theirs) <= max(absolute, share * abs(theirs)) else DIFFERS, said)


def shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def within(check: str, value: float | None, least: float, most: float, unit: str) -> Found:
    ok = value is not None and least <= value <= most
    return Found(check, SAME if ok else DIFFERS, f"{shown(value)} {unit}, expected {shown(least)} to {shown(most)}")


# --- against nvidia-smi --------------------------------------------------------------------------------------


def names(place: Place) -> Iterator[Found]:
    """Index, name, capability, driver and address of each card."""
    info, peers = place.look().info, place.machine.peers()
    for peer in peers:
        ours = info.get(peer.uuid)
        theirs = (peer.index, peer.name, peer.capability, peer.driver, short(peer.pci))
        told = "not there" if ours is None else ", ".join(ours[:5])
        yield Found(f"card {peer.index}", SAME if ours is not None and ours[:5] == theirs else DIFFERS, told)
    extra = [names for names in info.values() if names[-1] != "instance"]
    yield Found("number of cards", SAME if len(extra) == len(peers) else DIFFERS, f"{len(extra)}, {len(peers)}")


def short(pci: str) -> str:
    """Four digits of domain, where they are enough."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if not domain[:-4].strip("0") else f"{domain}:{rest}"


def idle_figures(place: Place) -> Iterator[Found]:
    """All figures of each card while nothing is done by us; power is a mean here and a sample there."""
    look = place.watch(place.machine.pace.period)[-1]
    for peer in place.machine.peers():
        for name, (ours, absolute, share) in PEERS.items():
            check, theirs = f"{name} of card {peer.index}", getattr(peer, name)
            yield compared(check, look.of(ours, peer.uuid), theirs, absolute, share)


# --- against known work --------------------------------------------------------------------------------------


def holder(place: Place) -> Iterator[Found]:
    """A process that holds 1 GiB: a stranger, then a rank, then gone."""
    card, memory = place.card(), signals.GPU_PROCESS_MEMORY
    before = place.watch(place.machine.pace.settle)[-1]
    with place.machine.work("hold", card, GIB) as work:
        look = place.watch(place.machine.pace.settle)[-1]
        strangers = (look.of(memory, card.uuid, "", "") or 0) - (before.of(memory, card.uuid, "", "") or 0)
        yield within("memory of a stranger", strangers, GIB, 3 * GIB, "bytes")
        used = (look.of(signals.GPU_MEMORY_USED, card.uuid) or 0) - (before.of(signals.GPU_MEMORY_USED, card.uuid) or 0)
        yield within("memory used more than before", used, GIB, 3 * GIB, "bytes")
        look = place.look(scene_of(work))
        yield within("memory of a rank", look.of(memory, card.uuid, "hardware-1", "TP0"), GIB, 3 * GIB, "bytes")
        tied = (card.uuid, work.pid) in look.uses
        yield Found("the rank is tied to its card", SAME if tied else DIFFERS, "tied" if tied else "not tied")
    look = place.watch(place.machine.pace.settle)[-1]
    left = (look.of(memory, card.uuid, "", "") or 0) - (before.of(memory, card.uuid, "", "") or 0)
    yield within("memory of a stranger that has ended", left, -GIB // 4, GIB // 4, "bytes")
    yield within("memory of nobody afterwards", look.of(signals.GPU_UNOWNED_MEMORY, card.uuid), 0, GIB // 4, "bytes")


def scene_of(work: Work) -> Scene:
    """The work is a rank of a server."""
    stat = ProcFs(Path("/proc")).stat(work.pid)
    if stat is None:
        raise NotRunError("the process is gone")
    rank = Process(stat.id, "TP0")
    return Scene(servers=(Server("hardware-1", "generic", "embedded", stat.id, 0.0, (rank,)),))


def energy(place: Place) -> Iterator[Found]:
    """Mean power of an empty card, one that is held, one whose kernel only waits, and one that computes."""
    card = place.card()
    empty = place.figures(card.uuid)
    yield Found("an empty card", SEEN, told(empty))
    found = {"empty": empty}
    for kind, title in (("hold", "held"), ("spin", "a kernel that only waits"), ("busy", "a kernel that computes")):
        with place.machine.work(kind, card, GIB):
            time.sleep(place.machine.pace.settle)
            found[kind] = place.figures(card.uuid)
            peer = place.card()
        yield Found(title, SEEN, told(found[kind]))
        yield compared(f"power, {title}", found[kind].get("power"), peer.power, 10.0, 0.15)
        yield compared(f"clock, {title}", found[kind].get("sm_clock"), peer.sm_clock, 60e6, 0.15)
    yield within("utilization of a kernel that only waits", found["spin"].get("utilization"), 0.95, 1.0, "")
    yield within("its memory utilization", found["spin"].get("memory_utilization"), 0.0, 0.05, "")
    with place.machine.work("spin", card, GIB) as work:
        os.kill(work.pid, signal.SIGKILL)
    time.sleep(place.machine.pace.settle)
    yield Found("empty again, after its process was killed", SEEN, told(place.figures(card.uuid)))
    above = found["busy"].get("power", 0.0) - found["spin"].get("power", 0.0)
    yield within("what computing takes more than waiting", above, 20.0, 2000.0, "W")


def told(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in figures.items()) or "nothing"


def bus(place: Place) -> Iterator[Found]:
    """Bytes over the bus at rest, and while a process copies to the card, against its own count."""
    card = place.card()
    rest = place.figures(card.uuid)
    yield Found("bytes/s over the bus at rest", SEEN, told({name: rest[name] for name in rest if "pcie" in name}))
    with place.machine.work("copy", card, GIB // 4) as work:
        time.sleep(place.machine.pace.settle)
        moving = place.figures(card.uuid)
    rate = work.moved / work.seconds if work.seconds else 0.0
    yield within("bytes/s received while copying", moving.get("pcie_receive"), 0.7 * rate, 1.4 * rate, "bytes/s")


# --- cost, and what was not settled --------------------------------------------------------------------------


def cost(place: Place) -> Iterator[Found]:
    """CPU of ours and the helper for a cycle over all cards, with and without process lists."""
    for title, every in (("without process lists", 1e9), ("with process lists", 0.0)):
        gpu = Gpu(host(gpu_processes=every))
        try:
            yield Found(f"a cycle {title}", SEEN, cost_of(Place(place.machine, gpu)))
        finally:
            gpu.close()


def cost_of(place: Place) -> str:
    place.watch(0.0)
    helpers, cycles = children(), place.machine.pace.cycles
    walls: list[float] = []
    began = own_cpu() + sum(map(cpu_of, helpers))
    for _ in range(cycles):
        start = time.perf_counter()
        place.look()
        walls.append(1000 * (time.perf_counter() - start))
        time.sleep(place.machine.pace.between)
    cpu = 1000 * (own_cpu() + sum(map(cpu_of, helpers)) - began) / cycles
    return (
        f"{cpu:.2f} ms CPU in all, {statistics.median(walls):.2f} ms waited (longest {max(walls):.1f}), {cycles} cycles"
    )


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_of(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def fields(place: Place) -> Iterator[Found]:
    """Which fields this driver knows, and in what form; whether the bus counters go round at 32 bits."""
    card, first = place.card(), probe()
    for number, (code, kind, value) in first["fields"].items():
        yield Found(f"field {number}", SEEN, f"code {code}" if code else f"kind {kind}, value {value:.6g}")
    yield Found("events", SEEN, "code {}, kinds {:#x}".format(*first["events"]))
    yield Found("one process list", SEEN, f"{1000 * first['list_seconds']:.2f} ms")
    recovery = place.look().of(RECOVERY_ACTION, card.uuid)
    yield Found(
        "recovery action as told",
        SAME if (recovery is None) == bool(first["fields"]["230"][0]) else DIFFERS,
        shown(recovery),
    )
    with place.machine.work("copy", card, GIB // 4):
        time.sleep(place.machine.pace.period)
        second = probe()["fields"]["198"][2]
    most = max(second, first["fields"]["198"][2])
    yield Found(
        "bus counter after copying", SEEN, f"{most:.6g}, {'more' if most > 1 << 32 else 'not more'} than 32 bits"
    )


def probe(user: int | None = None) -> Mapping[str, Any]:
    """What the driver says to single calls, to us or to another user."""
    command = [sys.executable, str(Path(__file__).with_name("probe.py"))]
    spec = find_spec("pynvml")  # its folder, for a user who may not see our own
    environment = {**os.environ, "PYTHONPATH": str(Path(spec.origin).parent) if spec and spec.origin else ""}
    try:
        done = subprocess.run(
            command, env=environment, user=user, capture_output=True, text=True, timeout=60, check=True
        )
        found: Mapping[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise NotRunError(f"the program for single calls failed: {type(error).__name__}") from error
    if found["code"]:
        raise NotRunError(f"the driver said {found['code']}")
    return found


def without_rights(place: Place) -> Iterator[Found]:
    """What another user than root is told."""
    if os.geteuid() != 0:
        raise NotRunError("only root can ask as somebody else")
    found = probe(NOBODY)
    yield Found("activities (GPM), as nobody", SEEN, f"code {found['gpm']}")
    yield Found("energy, as nobody", SEEN, f"code {found['energy']}")


def kernel_log(place: Place) -> Iterator[Found]:
    """Whether Xids can be read, and how many the kernel still has."""
    log = XidLog(Path("/"))
    faults = log.read(Moment(time.monotonic(), time.time()))
    log.close()
    said = f"{len(faults)} faults since boot" if log.reason is None else f"not readable: {log.reason}"
    yield Found("kernel log", SEEN, said)


CHECKS: Mapping[str, Callable[[Place], Iterator[Found]]] = {
    "Names, against nvidia-smi": names,
    "Figures of idle cards, against nvidia-smi": idle_figures,
    "A process that holds memory": holder,
    "Energy": energy,
    "The bus": bus,
    "Cost": cost,
    "Fields, events, lists": fields,
    "Without rights": without_rights,
    "Xids": kernel_log,
}


def run(machine: Machine) -> Iterator[tuple[str, list[Found]]]:
    """Every check by itself: one that cannot be made here does not stop the others."""
    for title, check in CHECKS.items():
        place = Place(machine)
        found: list[Found] = []
        try:
            place.watch(0.0)
            found.extend(check(place))
        except NotRunError as why:
            found.append(Found(check.__name__.replace("_", " "), NOT_RUN, str(why)))
        finally:
            place.gpu.close()
        yield title, found
