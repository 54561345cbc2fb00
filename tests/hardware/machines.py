"""Where the checks run: a machine with a GPU, or the stand-in driver that shows that the checks themselves work."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stallwatch.drill.nvml_standin import StandIn

MIB = 1 << 20
GIB = 1 << 30
READY_SECONDS, END_SECONDS = 120.0, 20.0

QUERY = (
    *("index", "uuid", "name", "pci.bus_id", "driver_version", "compute_cap"),
    *("memory.used", "memory.total", "utilization.gpu", "power.draw", "enforced.power.limit"),
    *("temperature.gpu", "clocks.sm"),
)


class NotRunError(Exception):
    """A check cannot be made here; `args[0]` says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A card as nvidia-smi shows it, in our units; None = it says nothing."""

    index: str
    uuid: str
    name: str
    pci: str
    driver: str
    capability: str
    memory_used: float | None = None
    memory_total: float | None = None
    utilization: float | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: float | None = None
    sm_clock: float | None = None


@dataclass(slots=True)
class Work:
    """Known work on a card, by this process; `moved` is the bytes it copied in `seconds`, known at its end."""

    pid: int
    moved: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between cycles, of a measurement, until work shows, and between the `cycles` whose cost is taken."""

    every: float
    period: float
    settle: float
    between: float
    cycles: int = 200


class Machine(Protocol):
    title: str
    pace: Pace

    def peers(self) -> list[Peer]:
        """NotRunError when there is nothing to compare with."""
        ...

    def work(self, kind: str, card: Peer, size: int) -> Any:
        """A context with Work in it; NotRunError when the card cannot be used."""
        ...


def start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[list[bytes]]:
    """What it says after its standard input has ended is in the list at the end."""
    said: list[bytes] = []
    try:
        yield said
    finally:
        try:
            said += process.communicate(timeout=END_SECONDS)[0].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_SECONDS)


class Real:
    """This machine."""

    title = "the real driver"
    pace = Pace(every=1.0, period=6.0, settle=3.0, between=0.1)

    def peers(self) -> list[Peer]:
        command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except FileNotFoundError as error:
            raise NotRunError("there is no nvidia-smi") from error
        except (OSError, subprocess.SubprocessError) as error:
            raise NotRunError(f"nvidia-smi failed: {type(error).__name__}") from error
        return [peer(line) for line in done.stdout.splitlines() if line.strip()]

    @contextmanager
    def work(self, kind: str, card: Peer, size: int) -> Iterator[Work]:
        command = [sys.executable, str(Path(__file__).with_name("work.py")), kind, str(size)]
        process = start(command, {"CUDA_VISIBLE_DEVICES": card.uuid})
        work = Work(process.pid)
        with ended(process) as said:
            first = first_line(process)
            if first != b"ready\n":
                with suppress(ValueError):
                    raise NotRunError(f"no work on the card: {json.loads(first)['failed']}")
                raise NotRunError("no work on the card: it did not begin in time")
            yield work
        for line in said:
            with suppress(ValueError, KeyError):
                found = json.loads(line)
                work.moved, work.seconds = found["moved"], found["seconds"]


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    """Empty when none comes in time; then it is killed."""
    assert process.stdout is not None
    if select.select([process.stdout], [], [], READY_SECONDS)[0]:
        return process.stdout.readline()
    process.kill()
    return b""


def peer(line: str) -> Peer:
    """One line of nvidia-smi; memory in MiB, clocks in MHz there."""
    index, uuid, name, pci, driver, capability, *figures = (word.strip() for word in line.split(","))
    used, total, utilization, power, limit, temperature, clock = map(number, figures)
    return Peer(
        index,
        uuid,
        name,
        pci,
        driver,
        "" if capability.startswith("[") else capability,
        *(scaled(used, MIB), scaled(total, MIB), scaled(utilization, 0.01), power, limit, temperature),
        scaled(clock, 1e6),
    )


def number(word: str) -> float | None:
    """[N/A], [Not Supported] and the like are none."""
    try:
        return float(word)
    except ValueError:
        return None


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


IDLE_WATTS = 70
AT_WORK: Mapping[str, tuple[int, Mapping[str, object]]] = {
    # What a card shows at each kind of work: watts, and the rest in the stand-in's keys.
    "hold": (118, {}),
    "spin": (152, {"util_gpu": 100}),
    "busy": (640, {"util_gpu": 100, "util_mem": 3, "gpm_sm": 99}),
    "copy": (135, {"pcie_rx_per_second": 20_000_000_000}),
}
RATE = 20e9


class Pretended:
    """One card of the stand-in driver, and work that is only written into its state."""

    title = "a stand-in driver"
    pace = Pace(every=0.12, period=0.2, settle=0.0, between=0.0, cycles=30)

    def __init__(self, cards: StandIn) -> None:
        self.cards, self._watts = cards, IDLE_WATTS
        cards.update({"count": 1, "power_mw": 1000 * IDLE_WATTS, "mem_used": 4 * MIB, "clock_sm_mhz": 1980})

    def peers(self) -> list[Peer]:
        """What nvidia-smi would say of a card with the stand-in's defaults; of work it shows the power."""
        uuid = "GPU-5ca1ab1e-0000-4000-8000-000000000000"
        names = ("0", uuid, "NVIDIA H100 80GB HBM3", "00000000:10:00.0", "580.95.05", "9.0")
        return [Peer(*names, 4 * MIB, 85520809984, 0.0, self._watts, 700.0, 35.0, 1980e6)]

    @contextmanager
    def work(self, kind: str, card: Peer, size: int) -> Iterator[Work]:
        process = start(["cat"], {})
        watts, figures = AT_WORK[kind]
        with ended(process):
            rows = f"{process.pid}:{size + 500 * MIB}"
            self._watts = watts
            self.cards.update({**figures, "power_mw": 1000 * watts, "0.processes": rows, "mem_used": size + 504 * MIB})
            began = time.monotonic()
            work = Work(process.pid)
            try:
                yield work
            finally:
                work.seconds = time.monotonic() - began
                work.moved = RATE * work.seconds if kind == "copy" else 0.0
                self.cards.update(dict.fromkeys(figures))
                self._watts = IDLE_WATTS
                self.cards.update({"power_mw": 1000 * IDLE_WATTS, "0.processes": None, "mem_used": 4 * MIB})
