"""The driver's answers (NVML), got by a program of its own that may hang: the only place that knows pynvml.

Run by nvml_child as `python -I -S nvml.py FOLDER NOTE`: FOLDER holds pynvml, NOTE is a descriptor of shared memory in
which stands what the program is about to do, so that the parent can name a call that does not come back.

Input: one line `PROCESSES EVENTS` (0 or 1 each) per cycle.  Output: one JSON line per cycle, as Driver.answer makes it.
A call that fails costs its own figures only: they are left out, and the driver's code stands in `codes`.

The library is initialised once and never shut down: a shutdown waits for a wedged call, and the kernel cleans up all
the same.  What needs a new process (another driver, dead handles) the parent notices.  The program is not killed in
the middle of a call, for that can break a card: the end of its input, or SIGTERM, ends it when the call is over.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NOTE = struct.Struct("<di52s")
"""Monotonic seconds at which a call began (0: it is over), its card (-1: none), its name (empty: none was made)."""

OVER = struct.Struct("<d")

LIBRARY = "libnvidia-ml.so.1"
NOT_SUPPORTED, INSUFFICIENT_SIZE, TIMEOUT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, UNKNOWN = 3, 7, 10, 12, 13, 999
UNINITIALIZED, INVALID_ARGUMENT, NOT_FOUND, LOST, MISMATCH, VERSION, NO_GPU = 1, 2, 6, 15, 18, 25, 28
NO_BINDING = -1
"""Ours, not the driver's: its library is there, and Python's module for it is not."""
IMPLAUSIBLE = UNKNOWN
"""A value that cannot be true is none."""

SETTLED = (NOT_SUPPORTED, FUNCTION_NOT_FOUND, VERSION)
"""The driver does not know that; it is asked again rarely."""
FATAL = (UNINITIALIZED, LOST, MISMATCH)
"""Every other call on that card ends the same, and may take its time to do so."""
GONE = (INVALID_ARGUMENT, NOT_FOUND, NO_GPU)
"""What calls with a handle of a card that was removed or reset say."""

HOLES = (INVALID_ARGUMENT, NOT_FOUND, *SETTLED)
"""What the driver says of an instance that there is none of."""

AGAIN_SECONDS = 600.0
"""How long a NOT_SUPPORTED is believed."""
LEAST_WINDOW, MOST_WINDOW = 0.1, 60.0
"""Seconds over which a mean is taken; the driver's own counters are too coarse below (energy: 20 to 100 ms)."""
SLOW_SECONDS = 1.0
"""After a call that took longer than this, the program looks whether anybody still waits."""
MOST_EVENTS = 64
MOST_PID = 1 << 22
HOPPER = 9
EVENT_XID = 0x8
CLOCK_SM, SENSOR_GPU = 1, 0
MEMORY_V2 = 0x02000028
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Where a field's value stands in its union, by valueType."""
FIELDS = {197: "pcie_transmit", 198: "pcie_receive", 230: "recovery_action"}
RATES = ("pcie_transmit", "pcie_receive")
GPM_METRICS = {2: "sm_activity", 5: "tensor_activity", 10: "dram_activity", 20: "pcie_transmit", 21: "pcie_receive"}
ACTIVITIES = ("sm_activity", "tensor_activity", "dram_activity")
MEBIBYTE = 1 << 20

Converted = Mapping[str, float] | int
"""Figures, or the code that stands for all of them."""


class Way(NamedTuple):
    """A call that gives a figure: its name (as it is shown), pynvml's function, and what follows the handle."""

    call: str
    function: str
    arguments: tuple[Any, ...] = ()


def way(function: str, *arguments: int) -> Way:
    return Way(function, function, arguments)


def memory(found: Any) -> Converted:
    """Bytes.  Cards without memory of their own say 0, or what belongs to the whole machine."""
    if not found.total:
        return NOT_SUPPORTED
    if found.used > found.total:
        return IMPLAUSIBLE
    parts = {"memory_used": found.used, "memory_total": found.total}
    reserved = getattr(found, "reserved", None)  # the older call counts it as used
    return parts if reserved is None else {**parts, "memory_reserved": reserved}


def utilization(found: Any) -> Converted:
    parts = {"utilization": found.gpu / 100, "memory_utilization": found.memory / 100}
    return parts if all(0 <= part <= 1 for part in parts.values()) else IMPLAUSIBLE


class Asked(NamedTuple):
    """Figures that one call gives; the ways to get them, the newest first."""

    figures: tuple[str, ...]
    ways: tuple[Way, ...]
    convert: Callable[[Any], Converted]


MEMORY = Asked(
    ("memory_used", "memory_total", "memory_reserved"),
    (
        Way("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo", (MEMORY_V2,)),
        way("nvmlDeviceGetMemoryInfo"),
    ),
    memory,
)
SIMPLE = (
    Asked(
        ("utilization", "memory_utilization"),
        (way("nvmlDeviceGetUtilizationRates"),),
        utilization,
    ),
    Asked(("power_limit",), (way("nvmlDeviceGetEnforcedPowerLimit"),), lambda mw: {"power_limit": mw / 1000}),
    Asked(("sm_clock",), (way("nvmlDeviceGetClockInfo", CLOCK_SM),), lambda mhz: {"sm_clock": mhz * 1e6}),
    Asked(
        ("temperature",),
        (way("nvmlDeviceGetTemperatureV", SENSOR_GPU), way("nvmlDeviceGetTemperature", SENSOR_GPU)),
        lambda celsius: {"temperature": celsius},
    ),
)
ENERGY = (way("nvmlDeviceGetTotalEnergyConsumption"),)
POWER = Asked(("power",), (way("nvmlDeviceGetPowerUsage"),), lambda mw: {"power": mw / 1000})
PROCESSES = (way("nvmlDeviceGetComputeRunningProcesses_v3"), way("nvmlDeviceGetComputeRunningProcesses_v2"))
MPS_PROCESSES = (way("nvmlDeviceGetMPSComputeRunningProcesses_v3"),)


class Note:
    """Says in shared memory what is being done."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, NOTE.size)
        os.close(descriptor)

    def begin(self, call: str, card: int = -1) -> float:
        began = time.monotonic()
        NOTE.pack_into(self._memory, 0, began, card, call.encode())
        return began

    def end(self) -> None:
        OVER.pack_into(self._memory, 0, 0.0)


class Calls:
    """Calls pynvml, and turns whatever it raises into a code."""

    def __init__(self, pynvml: Any, note: Note) -> None:
        self.pynvml, self._note = pynvml, note
        mismatch = getattr(pynvml, "NVMLLibraryMismatchError", TypeError)  # is no NVMLError
        self._unknown: tuple[type[Exception], ...] = (TypeError, mismatch)

    def __call__(self, call: str, *arguments: Any, card: int = -1, function: str = "") -> tuple[int, Any]:
        """(0, what the call gives) or (code, None)."""
        wanted = getattr(self.pynvml, function or call, None)
        if wanted is None:
            return FUNCTION_NOT_FOUND, None
        began = self._note.begin(call, card)
        try:
            return 0, wanted(*arguments)
        except self._unknown:  # TypeError: other bindings under the same name know fewer arguments
            return FUNCTION_NOT_FOUND, None
        except self.pynvml.NVMLError as error:  # its text is never made: that may call the driver
            return int(error.value) or UNKNOWN, None
        except ValueError:  # a text that is no text
            return UNKNOWN, None
        finally:
            self._note.end()
            if time.monotonic() - began > SLOW_SECONDS:
                leave_if_alone()


@dataclass(slots=True)
class Cycle:
    """What one cycle finds out about one card."""

    now: float
    values: dict[str, float] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    processes: list[tuple[int, int | None]] | None = None
    fatal: int = 0

    def take(self, figures: Iterable[str], found: Converted) -> None:
        """Values, or the code for those that there are none of."""
        if not isinstance(found, int):
            self.values.update(found)
        for figure in figures:
            if figure not in self.values:
                self.codes[figure] = found if isinstance(found, int) else FUNCTION_NOT_FOUND


class Mean:
    """The rate of a counter between two cycles; None while there is none."""

    def __init__(self, wraps: bool = False) -> None:
        self._wraps = wraps
        self._last: tuple[float, float] | None = None
        self._rate: float | None = None

    def rate(self, now: float, count: float) -> float | None:
        """Per second.  A counter that went back has begun anew, or gone round at 32 bits (once, at most, we assume)."""
        if self._last is None:
            self._last = now, count
            return None
        then, before = self._last
        if now - then < LEAST_WINDOW:
            return self._rate
        moved = count - before
        if moved < 0 and self._wraps and before < 1 << 32:
            moved += 1 << 32
        self._last, self._rate = (now, count), None
        if moved >= 0 and not (self._wraps and now - then > MOST_WINDOW):
            self._rate = moved / (now - then)
        return self._rate


class Gpm:
    """What kind of work a card does, from two samples; the last one is kept, so that a cycle takes one."""

    def __init__(self, calls: Calls, card: int, sample: Callable[[Any], tuple[int, Any]]) -> None:
        self._calls, self._card, self._take = calls, card, sample
        self._samples: list[Any] = []  # the one to be filled, and the last that was
        self._filled: float | None = None
        self._found: dict[str, float] = {}
        self._codes: dict[str, int] = {}

    def read(self, now: float) -> tuple[dict[str, float], dict[str, int]]:
        """Figures and codes; neither while there is one sample only."""
        if self._filled is not None and now - self._filled < LEAST_WINDOW:
            return self._found, self._codes
        self._found, self._codes = {}, {}
        code = self._sample(now)
        if code:
            self._codes = dict.fromkeys(GPM_METRICS.values(), code)
        return self._found, self._codes

    def _sample(self, now: float) -> int:
        while len(self._samples) < 2:
            code, sample = self._calls("nvmlGpmSampleAlloc", card=self._card)
            if code:
                return code
            self._samples.append(sample)
        empty, last = self._samples
        code, _ = self._take(empty)
        if code:
            self._filled = None
            return code
        before, self._filled, self._samples = self._filled, now, [last, empty]
        if before is None or now - before > MOST_WINDOW:
            return 0
        return self._compare(last, empty)

    def _compare(self, first: Any, second: Any) -> int:
        wanted = self._calls.pynvml.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics = self._calls.pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
        wanted.sample1, wanted.sample2 = first, second
        for place, metric in enumerate(GPM_METRICS):
            wanted.metrics[place].metricId = metric
        code, _ = self._calls("nvmlGpmMetricsGet", wanted, card=self._card)
        if code:
            return code
        for place, name in enumerate(GPM_METRICS.values()):
            got = wanted.metrics[place]
            most = 100.0 if name in ACTIVITIES else float("inf")
            if got.nvmlReturn:
                self._codes[name] = got.nvmlReturn
            elif not 0 <= got.value <= most or got.value == float("inf"):
                self._codes[name] = IMPLAUSIBLE
            else:
                self._found[name] = got.value / 100 if name in ACTIVITIES else got.value * MEBIBYTE
        return 0


class Device:
    """A card, or an instance of one (MIG), behind its handle."""

    def __init__(self, calls: Calls, handle: Any, number: int, uuid: str, index: str) -> None:
        self.calls, self.handle, self.number, self.uuid, self.index = calls, handle, number, uuid, index
        self.name = self.capability = self.pci = self.mig = ""
        self._refused: dict[str, tuple[float, int]] = {}  # call -> until when, code
        self._gpm = Gpm(calls, number, self._gpm_sample)

    def _gpm_sample(self, sample: Any) -> tuple[int, Any]:
        return self.calls("nvmlGpmSampleGet", self.handle, sample, card=self.number)

    def ask(self, cycle: Cycle, ways: Iterable[Way]) -> tuple[int, Any]:
        """The first way that the driver knows; (0, value) or (code, None)."""
        code = FUNCTION_NOT_FOUND
        for call, function, arguments in ways:
            if cycle.fatal:
                return cycle.fatal, None
            until, code = self._refused.get(call, (0.0, 0))
            if cycle.now < until:
                continue
            code, found = self.calls(call, self.handle, *arguments, card=self.number, function=function)
            if code in SETTLED:
                self._refused[call] = cycle.now + AGAIN_SECONDS, code
                continue
            if code in FATAL:
                cycle.fatal = code
            return code, found
        return code, None

    def take(self, cycle: Cycle, asked: Asked) -> None:
        code, found = self.ask(cycle, asked.ways)
        cycle.take(asked.figures, code or asked.convert(found))

    def take_gpm(self, cycle: Cycle) -> None:
        """Where it works: what kind of work, and bytes over the bus."""
        until, code = self._refused.get("gpm", (0.0, 0))
        major = self.capability.partition(".")[0]
        found: dict[str, float] = {}
        if cycle.fatal:
            codes = dict.fromkeys(ACTIVITIES, cycle.fatal)
        elif cycle.now < until or (major and int(major) < HOPPER):
            codes = dict.fromkeys(ACTIVITIES, code or NOT_SUPPORTED)
        else:
            found, codes = self._gpm.read(cycle.now)
            code = codes.get(ACTIVITIES[0], 0)
            if code in SETTLED:
                self._refused["gpm"] = cycle.now + AGAIN_SECONDS, code
            if code in FATAL:
                cycle.fatal = code
        cycle.values.update(found)
        cycle.codes.update((name, code) for name, code in codes.items() if name in ACTIVITIES)

    def take_processes(self, cycle: Cycle) -> None:
        """PIDs and bytes; no row at all when one of them is impossible (some drivers mix up the columns)."""
        rows: dict[int, int | None] = {}
        for ways, optional in ((PROCESSES, False), (MPS_PROCESSES, True)):
            code, found = self.ask(cycle, ways)
            if code == INSUFFICIENT_SIZE:  # more came in between
                code, found = self.ask(cycle, ways)
            if code and not (optional and code in SETTLED):
                cycle.codes["processes"] = code
                return
            for row in found or ():
                if not self._plausible(cycle, row.pid, row.usedGpuMemory):
                    cycle.codes["processes"] = IMPLAUSIBLE
                    return
                held = [size for size in (rows.get(row.pid), row.usedGpuMemory) if size is not None]
                rows[row.pid] = max(held) if held else None  # who is in both lists is the same
        cycle.processes = list(rows.items())

    def _plausible(self, cycle: Cycle, pid: int, size: int | None) -> bool:
        most = cycle.values.get("memory_total", float("inf"))
        return 0 < pid < MOST_PID and (size is None or size <= most)

    def told(self, cycle: Cycle) -> dict[str, object]:
        """As it goes to the parent."""
        names = ("uuid", "index", "name", "capability", "pci", "mig")
        return {
            **{name: getattr(self, name) for name in names},
            "values": cycle.values,
            "codes": cycle.codes,
            "processes": cycle.processes,
        }


class Instance(Device):
    """A MIG instance.  Energy, clocks and bus belong to the whole card."""

    def __init__(self, card: Card, handle: Any, position: int, uuid: str, gpu_instance: int) -> None:
        super().__init__(card.calls, handle, card.number, uuid, f"{card.index}:{position}")
        self.capability, self.pci, self.mig = card.capability, card.pci, "instance"
        self._card, self._gpu_instance = card, gpu_instance
        self.name = text(self.calls("nvmlDeviceGetName", handle, card=self.number)[1])

    def _gpm_sample(self, sample: Any) -> tuple[int, Any]:
        return self.calls("nvmlGpmMigSampleGet", self._card.handle, self._gpu_instance, sample, card=self.number)

    def read(self, now: float, processes: bool) -> Cycle:
        cycle = Cycle(now)
        self.take(cycle, MEMORY)
        self.take_gpm(cycle)
        for rate in RATES:
            cycle.values.pop(rate, None)
        if processes:
            self.take_processes(cycle)
        return cycle


class Card(Device):
    """A whole card."""

    def __init__(self, calls: Calls, handle: Any, number: int, uuid: str) -> None:
        super().__init__(calls, handle, number, uuid, str(number))
        self.instances: list[Instance] = []
        self._energy = Mean()
        self._rates = {name: Mean(wraps=True) for name in RATES}
        self._fields: dict[int, tuple[float, int]] = {}  # field -> until when it is believed to be refused, code
        self.identify()

    def identify(self) -> None:
        """Ask for what does not change, as far as it is not known; and which instances there are."""
        if not self.name:
            self.name = text(self.calls("nvmlDeviceGetName", self.handle, card=self.number)[1])
        if not self.pci:
            code, found = self.calls("nvmlDeviceGetPciInfo_v3", self.handle, card=self.number)
            self.pci = "" if code else pci_address(text(found.busId))
        if not self.capability:
            code, found = self.calls("nvmlDeviceGetCudaComputeCapability", self.handle, card=self.number)
            self.capability = "" if code else "{}.{}".format(*found)
        self._find_instances()

    def _find_instances(self) -> None:
        code, found = self.calls("nvmlDeviceGetMigMode", self.handle, card=self.number)
        if code and code not in SETTLED:
            return  # as before
        self.mig = "" if code else ("enabled" if found[0] else "disabled")
        count = 0
        if self.mig == "enabled":
            code, count = self.calls("nvmlDeviceGetMaxMigDeviceCount", self.handle, card=self.number)
            if code and code not in SETTLED:
                return
        known = {instance.uuid: instance for instance in self.instances}
        made = [self._instance(position, known) for position in range(count or 0)]
        self.instances = [instance for instance in made if instance is not None]

    def _instance(self, position: int, known: Mapping[str, Instance]) -> Instance | None:
        code, handle = self.calls("nvmlDeviceGetMigDeviceHandleByIndex", self.handle, position, card=self.number)
        if code in HOLES:
            return None
        if code:  # not to be had now: who was there says why it has no figures, or still has them
            return next((each for each in self.instances if each.index == f"{self.index}:{position}"), None)
        code, uuid = self.calls("nvmlDeviceGetUUID", handle, card=self.number)
        code_id, number = self.calls("nvmlDeviceGetGpuInstanceId", handle, card=self.number)
        if code:
            return None
        before = known.get(text(uuid))
        if before is not None and not code_id and before.index == f"{self.index}:{position}":
            before.handle = handle
            return before
        return Instance(self, handle, position, text(uuid), -1 if code_id else number)

    def read(self, now: float, processes: bool) -> Cycle:
        """One cycle.  The first call that shows the card to be lost is the last one."""
        cycle = Cycle(now)
        self.take(cycle, MEMORY)
        for asked in SIMPLE:
            self.take(cycle, asked)
        self._take_power(cycle)
        self.take_gpm(cycle)
        self._take_fields(cycle)
        if processes and self.mig != "enabled":  # else the instances' own lists have them
            self.take_processes(cycle)
        return cycle

    def _take_power(self, cycle: Cycle) -> None:
        """Mean power over our own interval, from the energy counter; what the driver says where there is none."""
        code, millijoules = self.ask(cycle, ENERGY)
        now = time.monotonic()
        if code:
            cycle.codes["energy"] = code
        else:
            cycle.values["energy"] = millijoules / 1000
            watts = self._energy.rate(now, millijoules / 1000)
            if watts:
                cycle.values["power"] = watts
            if watts != 0:  # not known yet; no card runs on nothing, so a counter that stands still is none
                return
        self.take(cycle, POWER)

    def _take_fields(self, cycle: Cycle) -> None:
        wanted = [number for number, name in FIELDS.items() if name not in cycle.values]
        ids = [number for number in wanted if self._fields.get(number, (0.0, 0))[0] <= cycle.now]
        code, found = 0, None
        if ids:
            call = "nvmlDeviceGetFieldValues"
            code, found = self.ask(cycle, (Way(call, call, (ids,)),))
        got: dict[int, Any] = dict(zip(ids, found or (), strict=False))
        for number in wanted:
            name = FIELDS[number]
            if number in got:
                self._take_field(cycle, number, name, got[number])
            else:
                cycle.codes[name] = code or self._fields[number][1]

    def _take_field(self, cycle: Cycle, number: int, name: str, found: Any) -> None:
        code = NOT_SUPPORTED if found.nvmlReturn == INVALID_ARGUMENT else found.nvmlReturn  # one it does not know
        kind = found.valueType
        if code in SETTLED:
            self._fields[number] = cycle.now + AGAIN_SECONDS, code
        if not code and not 0 <= kind < len(VALUE_MEMBERS):
            code = IMPLAUSIBLE
        if code:
            cycle.codes[name] = code
            return
        value = getattr(found.value, VALUE_MEMBERS[kind])
        rate = self._rates[name].rate(time.monotonic(), value) if name in RATES else value
        if rate is not None:
            cycle.values[name] = rate


class Events:
    """Xids as the driver reports them; none where it does not."""

    def __init__(self, calls: Calls, cards: Iterable[Card]) -> None:
        self._calls = calls
        code, self._set = calls("nvmlEventSetCreate")
        self._uuids = {} if code else {address(card.handle): card.uuid for card in cards if self._register(card)}

    def _register(self, card: Card) -> bool:
        code, kinds = self._calls("nvmlDeviceGetSupportedEventTypes", card.handle, card=card.number)
        if code or not kinds & EVENT_XID:
            return False
        code, _ = self._calls("nvmlDeviceRegisterEvents", card.handle, EVENT_XID, self._set, card=card.number)
        return not code

    def read(self) -> Iterator[tuple[str, int]]:
        for _ in range(MOST_EVENTS if self._uuids else 0):
            code, event = self._calls("nvmlEventSetWait_v2", self._set, 0)
            if code:  # nothing more, as a rule
                return
            uuid = self._uuids.get(address(event.device))
            if event.eventType & EVENT_XID and uuid:
                yield uuid, event.eventData


class Driver:
    """The driver: initialised once, its cards looked for once."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._cards: list[Card] = []
        self._broken: dict[int, int] = {}
        self._events: Events | None = None
        self._version = ""
        self._code, _ = calls("nvmlInit")
        if not self._code:
            self._version = text(calls("nvmlSystemGetDriverVersion")[1])
            self._code = self._look()

    def _look(self) -> int:
        code, count = self._calls("nvmlDeviceGetCount")
        for number in range(count or 0):
            refused, handle = self._calls("nvmlDeviceGetHandleByIndex", number, card=number)
            uuid = None
            if not refused:
                refused, uuid = self._calls("nvmlDeviceGetUUID", handle, card=number)
            if refused:
                self._broken[number] = refused
            else:
                self._cards.append(Card(self._calls, handle, number, text(uuid)))
        return code

    def answer(self, processes: bool, events: bool) -> dict[str, object]:
        """What a cycle finds; see nvml_child.Answer."""
        if self._code:
            return {"code": self._code}
        told: list[dict[str, object]] = []
        lost = []
        for card in self._cards:
            if processes:
                card.identify()
            now = time.monotonic()
            cycle = card.read(now, processes)
            told.append(card.told(cycle))
            if is_lost(cycle):
                lost.append(card.uuid)
            told += [instance.told(instance.read(now, processes)) for instance in card.instances]
        return {
            "code": 0,
            "driver": self._version,
            "cards": told,
            "lost": lost,
            "broken": self._broken,
            "xids": list(self._xids()) if events else [],
            "resident": resident_bytes(),
        }

    def _xids(self) -> Iterator[tuple[str, int]]:
        if self._events is None:
            self._events = Events(self._calls, self._cards)
        return self._events.read()


def is_lost(cycle: Cycle) -> bool:
    """Whether the driver says that the card is not there any more, or the handle leads nowhere."""
    refusals = set(cycle.codes.values()) - set(SETTLED)
    return cycle.fatal == LOST or (not cycle.values and bool(refusals) and refusals <= set(GONE))


def text(found: Any) -> str:
    """A name; older bindings give bytes."""
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found or ""


def pci_address(found: str) -> str:
    """0000:10:00.0 in lower case, with four digits of domain where they are enough."""
    domain, colon, rest = found.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if colon and domain[:-4].strip("0") == "" else f"{domain}{colon}{rest}"


def address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def leave(*_: object) -> None:
    """End without the library's own clean-up, which may hang."""
    os._exit(0)


def leave_if_alone() -> None:
    """End when nobody will read the answer: the pipe's other end is closed, or its owner is dead."""
    asked = select.poll()
    asked.register(0, 0)
    if asked.poll(0):
        leave()


def requests() -> Iterator[tuple[bool, bool]]:
    asked = select.poll()  # unlike a read it is never restarted, so that SIGTERM is seen at once
    asked.register(0, select.POLLIN)
    rest = b""
    while True:
        asked.poll()
        part = os.read(0, 4096)
        if not part:
            return
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            processes, events = line.split()
            yield processes == b"1", events == b"1"


def tell(output: int, answer: Mapping[str, object]) -> None:
    left = memoryview(json.dumps(answer).encode() + b"\n")
    while left:
        left = left[os.write(output, left) :]


def load(folder: str, note: Note) -> tuple[int, Any]:
    """(0, pynvml) or (code, None); it is not imported where there is no library."""
    note.begin("dlopen")
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return LIBRARY_NOT_FOUND, None
    finally:
        note.end()
    sys.path.append(folder)
    try:
        import pynvml  # type: ignore[import-untyped]  # it has no types; late: it stands in a folder told to us
    except ImportError:
        return NO_BINDING, None
    return 0, pynvml


def main() -> None:
    folder, descriptor = sys.argv[1:]
    output = os.dup(1)
    os.dup2(2, 1)  # whatever the library prints goes nowhere
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
        signal.siginterrupt(number, False)  # the driver's own calls go on
    driver = None
    note = Note(int(descriptor))
    code, pynvml = load(folder, note)
    try:
        for processes, events in requests():
            if not code and driver is None:
                driver = Driver(Calls(pynvml, note))
            tell(output, {"code": code} if driver is None else driver.answer(processes, events))
    except BrokenPipeError:
        pass
    leave()


if __name__ == "__main__":
    main()
