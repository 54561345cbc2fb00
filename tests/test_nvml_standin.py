"""The stand-in libnvidia-ml.so.1 answers the real binding as told, and stops answering as told.

Every call goes through the real pynvml in a process of its own: the library is loaded once per process.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stallwatch.drill.nvml_standin import KEPT_XIDS, LIBRARY, SOURCE, Call, NoCompilerError, StandIn, build

GIB = 1 << 30
CODES = (*range(1, 30), 999)

PROGRAM = """
import ctypes, json, sys, threading, time
import pynvml
from pynvml import *

def plain(thing):
    if isinstance(thing, ctypes.Structure):
        return {name: getattr(thing, name) for name, *_ in thing._fields_}
    return vars(thing) if hasattr(thing, "__dict__") else thing.value

card = nvmlDeviceGetHandleByIndex
handles = {}

def held(index):
    if index not in handles:
        handles[index] = card(index)
    return handles[index]

def instance(index, which):
    return nvmlDeviceGetMigDeviceHandleByIndex(held(index), which)

def fields(device, *ids):
    return [[value.nvmlReturn, value.valueType, value.value.ullVal] for value in nvmlDeviceGetFieldValues(device, ids)]

samples = {}

def sample(name, take, *of):
    samples[name] = nvmlGpmSampleAlloc()
    take(*of, samples[name])

def metrics(*ids):
    asked = c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics = NVML_GPM_METRICS_GET_VERSION, len(ids)
    asked.sample1, asked.sample2 = samples["first"], samples["second"]
    for row, wanted in zip(asked.metrics, ids):
        row.metricId = wanted
    nvmlGpmMetricsGet(asked)
    return [[row.nvmlReturn, row.value] for row in asked.metrics[:len(ids)]]

events = []

def register(index, types):
    events.append(nvmlEventSetCreate())
    nvmlDeviceRegisterEvents(held(index), types, events[-1])

def event():
    told = nvmlEventSetWait(events[-1], 0)
    return [nvmlDeviceGetIndex(told.device), told.eventType, told.eventData]

def code_of(call, *arguments):
    try:
        call(*arguments)
    except NVMLError as error:
        return error.value
    except NVMLLibraryMismatchError:  # what the unversioned names make of FUNCTION_NOT_FOUND; no NVMLError
        return 13
    return 0

for line in sys.stdin:
    try:
        answer = eval(line)
    except NVMLError as error:
        answer = {"code": error.value}
    print(json.dumps(answer, default=plain), flush=True)
"""

ON_A_CARD = {
    # What the binding calls -> the function it looks up; each takes one handle of a card.
    "nvmlDeviceGetUUID": "nvmlDeviceGetUUID",
    "nvmlDeviceGetName": "nvmlDeviceGetName",
    "nvmlDeviceGetIndex": "nvmlDeviceGetIndex",
    "nvmlDeviceGetMinorNumber": "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetPciInfo": "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetCudaComputeCapability": "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetMemoryInfo": "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates": "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTotalEnergyConsumption": "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetPowerUsage": "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit": "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPerformanceState": "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetComputeRunningProcesses": "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2": "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetMPSComputeRunningProcesses": "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses": "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMaxMigDeviceCount": "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlGpmQueryDeviceSupport": "nvmlGpmQueryDeviceSupport",
    "nvmlDeviceGetSupportedEventTypes": "nvmlDeviceGetSupportedEventTypes",
}


class Binding:
    """A process that has the real pynvml loaded and evaluates one expression at a time."""

    def __init__(self, cards: StandIn) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=cards.environment(),
        )

    def __enter__(self) -> Binding:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def __call__(self, expression: str) -> Any:
        self.begin(expression)
        return self.end()

    def begin(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def is_silent(self, milliseconds: int) -> bool:
        assert self.process.stdout is not None
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        return not poll.poll(milliseconds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cards")


@pytest.fixture
def cards(folder: Path, nvml_standin: Path) -> StandIn:
    """Two cards that nobody has changed yet."""
    for file in folder.iterdir():
        file.unlink()
    return StandIn(folder, nvml_standin, count=2)


@pytest.fixture(scope="module")
def shared(folder: Path, nvml_standin: Path) -> Iterator[Binding]:
    with Binding(StandIn(folder, nvml_standin, count=2)) as binding:
        assert binding("nvmlInit()") is None
        yield binding


@pytest.fixture
def nvml(cards: StandIn, shared: Binding) -> Binding:
    """One process for all tests that leave it as it was; `cards` first, so that it meets fresh ones."""
    return shared


@pytest.fixture
def fresh(cards: StandIn) -> Iterator[Callable[[], Binding]]:
    """Processes of a test's own, which it may spoil."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Binding(cards))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_the_binding_knows_every_function_there_is() -> None:
    """A name that nobody looks up is a typing error, and would be found as an old driver only."""
    ours = set(re.findall(r"^(?:API [^=;]*?|[A-Z_0-9]+\()(nvml[A-Z]\w+)", SOURCE.read_text(), flags=re.MULTILINE))
    binding = find_spec("pynvml")
    assert binding is not None
    assert binding.origin is not None
    known = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(binding.origin).read_text()))

    assert len(ours) > 50
    assert ours - known == {"nvmlInit_v2"}  # what programs other than the binding begin with


def test_a_card_says_what_it_is(cards: StandIn, nvml: Binding) -> None:
    cards.update({"driver": "610.43.02", "0.pci": "0000:b3:00.0", "1.capability": "12.1", "1.name": "NVIDIA GB10"})

    assert nvml("[nvmlSystemGetDriverVersion(), nvmlDeviceGetCount()]") == ["610.43.02", 2]
    assert nvml("[nvmlDeviceGetIndex(held(1)), nvmlDeviceGetName(held(1))]") == [1, "NVIDIA GB10"]
    assert nvml("nvmlDeviceGetCudaComputeCapability(held(0))") == [9, 0]
    assert nvml("nvmlDeviceGetCudaComputeCapability(held(1))") == [12, 1]
    assert nvml("[nvmlDeviceGetPciInfo(held(i)).busId for i in (0, 1)]") == ["00000000:B3:00.0", "00000000:11:00.0"]


def test_a_card_is_found_by_index_by_uuid_and_by_its_place(cards: StandIn, nvml: Binding) -> None:
    by_uuid = "nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(held(1)).encode())"

    assert nvml("nvmlDeviceGetUUID(held(0)) != nvmlDeviceGetUUID(held(1))")
    assert nvml(f"nvmlDeviceGetIndex({by_uuid})") == 1
    assert nvml("nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId(b'0000:11:00.0'))") == 1
    assert nvml("nvmlDeviceGetHandleByUUID(b'GPU-not-there')") == {"code": 6}
    assert nvml("card(2)") == {"code": 2}


def test_figures_are_those_of_the_file(cards: StandIn, nvml: Binding) -> None:
    cards.update({"0.power_mw": 152_000, "*.util_gpu": 97, "1.util_gpu": 3, "0.temperature": 61, "0.clock_sm_mhz": 345})
    cards.update({"0.power_limit_mw": 1_000_000, "0.pstate": 8})

    assert nvml("[nvmlDeviceGetPowerUsage(held(i)) for i in (0, 1)]") == [152_000, 70_000]
    assert nvml("[nvmlDeviceGetUtilizationRates(held(i)).gpu for i in (0, 1)]") == [97, 3]
    assert nvml("[nvmlDeviceGetTemperature(held(0), 0), nvmlDeviceGetTemperatureV(held(0), 0)]") == [61, 61]
    assert nvml("[nvmlDeviceGetClockInfo(held(0), kind) for kind in (0, 1)]") == [1980, 345]
    assert nvml("[nvmlDeviceGetEnforcedPowerLimit(held(0)), nvmlDeviceGetPerformanceState(held(0))]") == [1_000_000, 8]


def test_what_a_card_has_not_is_not_supported_and_no_zero(cards: StandIn, nvml: Binding) -> None:
    cards.update({"0.power_mw": "none", "0.mem_used": "none", "0.energy_mj": "none", "0.processes": "none"})
    asked = "[code_of(call, held({})) for call in (nvmlDeviceGetPowerUsage, nvmlDeviceGetMemoryInfo,"
    asked += " nvmlDeviceGetTotalEnergyConsumption, nvmlDeviceGetComputeRunningProcesses)]"

    assert nvml(asked.format(0)) == [3, 3, 3, 3]
    assert nvml(asked.format(1)) == [0, 0, 0, 0]


def test_the_reserve_is_used_memory_in_the_first_version_only(cards: StandIn, nvml: Binding) -> None:
    cards.update({"0.mem_total": 80 * GIB, "0.mem_used": 76 * GIB, "0.mem_reserved": GIB})

    first = nvml("nvmlDeviceGetMemoryInfo(held(0))")
    second = nvml("nvmlDeviceGetMemoryInfo(held(0), version=nvmlMemory_v2)")

    assert first == {"total": 80 * GIB, "free": 3 * GIB, "used": 77 * GIB}
    assert second == {
        "version": second["version"], "total": 80 * GIB, "reserved": GIB, "free": 3 * GIB, "used": 76 * GIB
    }  # fmt: skip
    assert nvml("nvmlDeviceGetMemoryInfo(held(0), version=2)") == {"code": 25}


def test_used_memory_is_what_the_processes_hold_unless_it_is_set(cards: StandIn, nvml: Binding) -> None:
    used = "nvmlDeviceGetMemoryInfo(held(0), version=nvmlMemory_v2).used"

    cards.processes(0, [(41, 2 * GIB), (42, 3 * GIB), (43, None)])
    assert nvml(used) == 5 * GIB

    cards.set("0.mem_used", 7 * GIB)
    assert nvml(used) == 7 * GIB

    cards.unset("0.mem_used")
    cards.processes(0, [])
    assert nvml(used) == 0


def test_processes_are_listed_with_their_memory_where_it_is_known(cards: StandIn, nvml: Binding) -> None:
    cards.processes(0, [(41, 2 * GIB), (42, None)])
    cards.set("1.processes", ",".join(f"{pid}:{pid}" for pid in range(1, 65)))

    rows = nvml("nvmlDeviceGetComputeRunningProcesses(held(0))")
    many = nvml("nvmlDeviceGetComputeRunningProcesses(held(1))")

    assert [(row["pid"], row["usedGpuMemory"]) for row in rows] == [(41, 2 * GIB), (42, None)]
    assert {row["gpuInstanceId"] for row in rows} == {0xFFFFFFFF}
    assert [row["pid"] for row in many] == list(range(1, 65))
    assert nvml(
        "[nvmlDeviceGetMPSComputeRunningProcesses(held(0)), nvmlDeviceGetGraphicsRunningProcesses(held(0))]"
    ) == [
        [],
        [],
    ]


def energy(nvml: Binding) -> int:
    value = nvml("nvmlDeviceGetTotalEnergyConsumption(held(0))")
    assert isinstance(value, int)
    return value


def test_the_energy_counter_goes_on_by_itself_and_alike_in_every_process(
    cards: StandIn, nvml: Binding, fresh: Callable[[], Binding]
) -> None:
    other = fresh()
    other("nvmlInit()")
    began = time.monotonic()
    cards.update({"0.power_mw": 300_000, "0.energy_mj": f"5000@{began!r}"})

    for process in (nvml, other):
        earliest = time.monotonic()
        reached = energy(process)
        latest = time.monotonic()

        assert 5000 + 300_000 * (earliest - began) - 1 <= reached <= 5000 + 300_000 * (latest - began) + 1


def test_an_energy_counter_without_a_clock_stands_still(cards: StandIn, nvml: Binding) -> None:
    cards.set("0.energy_mj", 5000)

    assert [energy(nvml), energy(nvml)] == [5000, 5000]


def test_a_new_power_leaves_no_step_in_the_energy_counter(cards: StandIn, nvml: Binding) -> None:
    began = time.monotonic()
    before = energy(nvml)
    cards.set("*.power_mw", 0)
    stopped = energy(nvml)
    allowed = before + 70_000 * (time.monotonic() - began) + 1  # the counter itself is as old as the machine

    assert before <= stopped <= allowed
    assert energy(nvml) == stopped


def test_fields_answer_one_by_one(cards: StandIn, nvml: Binding) -> None:
    cards.update({"0.pcie_tx_bytes": (1 << 32) + 4, "0.pcie_rx_bytes": 9, "0.recovery_action": 1})
    cards.update({"0.nvlink_tx_bytes": 4096, "0.field.160": 17, "0.field.161": "5:3", "0.field.162": "ret:4"})

    ids = "197, 198, 230, (138, 0xffffffff), 160, 161, 162, 163"
    assert nvml(f"fields(held(0), {ids})") == [
        [0, 3, (1 << 32) + 4],
        [0, 3, 9],
        [0, 1, 1],
        [0, 3, 4],
        [0, 3, 17],
        [0, 5, 3],
        [4, 0, 0],
        [3, 0, 0],
    ]


def test_pcie_bytes_wrap_where_they_have_32_bits(cards: StandIn, nvml: Binding) -> None:
    cards.update({"*.pcie_tx_bytes": (1 << 32) + 4, "0.pcie_bits": 32})

    assert nvml("[fields(held(i), 197)[0] for i in (0, 1)]") == [[0, 1, 4], [0, 3, (1 << 32) + 4]]


def test_gpm_gives_rates_between_two_samples(cards: StandIn, nvml: Binding) -> None:
    cards.update({"0.util_gpu": 100, "0.gpm_sm": 15.5, "0.gpm_tensor": "ret:999", "0.pcie_rx_bytes": 0})

    nvml("sample('first', nvmlGpmSampleGet, held(0))")
    cards.set("0.pcie_rx_bytes", 100 << 20)
    nvml("sample('second', nvmlGpmSampleGet, held(0))")
    graphics, sm, tensor, transmitted, received, unknown = nvml("metrics(1, 2, 5, 20, 21, 400)")

    assert [graphics, sm, tensor] == [[0, 100.0], [0, 15.5], [999, 0.0]]
    assert [transmitted, unknown] == [[0, 0.0], [3, 0.0]]
    assert received[0] == 0
    assert received[1] > 0


def test_gpm_is_for_hopper_and_later(cards: StandIn, nvml: Binding) -> None:
    cards.set("0.capability", "8.9")

    assert nvml("[nvmlGpmQueryDeviceSupport(held(i)).isSupportedDevice for i in (0, 1)]") == [0, 1]
    assert nvml("sample('first', nvmlGpmSampleGet, held(0))") == {"code": 3}


def test_gpm_samples_of_two_cards_make_no_rate(cards: StandIn, nvml: Binding) -> None:
    nvml("sample('first', nvmlGpmSampleGet, held(0))")
    nvml("sample('second', nvmlGpmSampleGet, held(1))")

    assert nvml("metrics(2)") == {"code": 2}


def mig(cards: StandIn) -> None:
    cards.update({"0.mig": "on", "0:1.instance": "9/0", "0:1.mem_total": 10 * GIB, "0:1.gpm_sm": 40})
    cards.processes("0:1", [(77, GIB)])


def test_instances_are_cards_of_their_own(cards: StandIn, nvml: Binding) -> None:
    mig(cards)

    assert nvml("nvmlDeviceGetMigMode(held(0))") == [1, 1]
    assert nvml("nvmlDeviceGetMaxMigDeviceCount(held(0))") == 7
    assert nvml("instance(0, 0)") == {"code": 6}
    assert nvml("[nvmlDeviceGetUUID(instance(0, 1))[:4], nvmlDeviceGetName(instance(0, 1))]") == [
        "MIG-",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ]
    ids = "[nvmlDeviceGetGpuInstanceId(instance(0, 1)), nvmlDeviceGetComputeInstanceId(instance(0, 1))]"
    assert nvml(ids) == [9, 0]
    assert nvml("nvmlDeviceGetMemoryInfo(instance(0, 1), version=nvmlMemory_v2).used") == GIB
    assert nvml("nvmlDeviceGetIndex(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance(0, 1)))") == 0
    assert nvml("nvmlDeviceGetAttributes(instance(0, 1)).memorySizeMB") == 10 * 1024
    assert nvml("nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(instance(0, 1)).encode()))") == 1


def test_an_instance_has_no_power_and_its_card_no_utilisation(cards: StandIn, nvml: Binding) -> None:
    mig(cards)

    assert nvml("nvmlDeviceGetPowerUsage(instance(0, 1))") == {"code": 3}
    assert nvml("nvmlDeviceGetUtilizationRates(held(0))") == {"code": 3}
    assert nvml("nvmlDeviceGetUtilizationRates(held(1)).gpu") == 0
    assert nvml("nvmlDeviceGetMigMode(held(1))") == {"code": 3}


def test_a_card_lists_the_processes_of_its_instances(cards: StandIn, nvml: Binding) -> None:
    mig(cards)

    rows = nvml("nvmlDeviceGetComputeRunningProcesses(held(0))")

    assert rows == [{"pid": 77, "usedGpuMemory": GIB, "gpuInstanceId": 9, "computeInstanceId": 0}]


def test_gpm_reaches_an_instance_by_handle_and_by_its_id(cards: StandIn, nvml: Binding) -> None:
    mig(cards)

    nvml("sample('first', nvmlGpmSampleGet, instance(0, 1))")
    nvml("sample('second', nvmlGpmMigSampleGet, held(0), 9)")

    assert nvml("metrics(2)") == [[0, 40.0]]
    assert nvml("sample('second', nvmlGpmMigSampleGet, held(0), 5)") == {"code": 6}


def test_a_destroyed_instance_leaves_a_dead_handle(cards: StandIn, nvml: Binding) -> None:
    mig(cards)
    nvml("handles.__setitem__('gone', instance(0, 1))")
    cards.unset("0:1.instance")

    assert nvml("nvmlDeviceGetUUID(handles.pop('gone'))") == {"code": 2}


def test_xids_are_told_in_order_to_those_who_registered_before(cards: StandIn, nvml: Binding) -> None:
    cards.xid(1, 31)
    nvml("register(1, nvmlEventTypeXidCriticalError)")
    assert nvml("event()") == {"code": 10}

    cards.xid(1, 13)
    cards.xid(1, 45)
    cards.xid(0, 79)
    assert [nvml("event()") for _ in range(3)] == [[1, 8, 13], [1, 8, 45], {"code": 10}]


def test_only_so_many_xids_are_kept(cards: StandIn, nvml: Binding) -> None:
    nvml("register(0, nvmlEventTypeXidCriticalError)")
    for code in range(100, 100 + KEPT_XIDS + 2):
        cards.xid(0, code)

    assert nvml("event()") == [0, 8, 102]


def test_events_that_a_card_does_not_have_cannot_be_registered(cards: StandIn, nvml: Binding) -> None:
    cards.set("0.event_types", 1)

    assert nvml("nvmlDeviceGetSupportedEventTypes(held(0))") == 1
    assert nvml("register(0, nvmlEventTypeXidCriticalError)") == {"code": 3}


def test_a_lost_card_ends_the_wait_for_events_after_its_xid(cards: StandIn, nvml: Binding) -> None:
    nvml("register(0, nvmlEventTypeXidCriticalError)")
    cards.xid(0, 79)
    assert nvml("event()") == [0, 8, 79]

    cards.lose(0)
    assert nvml("event()") == {"code": 15}


@pytest.mark.parametrize("call", ON_A_CARD)
def test_a_call_fails_with_any_code_on_the_card_it_is_told_for(call: str, cards: StandIn, nvml: Binding) -> None:
    answers = []
    for code in CODES:
        cards.fail(ON_A_CARD[call], code, card=0)
        answers.append(nvml(f"[code_of({call}, held(i)) for i in (0, 1)]"))
    cards.clear(ON_A_CARD[call], card=0)

    assert answers == [[code, 0] for code in CODES]
    assert nvml(f"code_of({call}, held(0))") == 0


def test_the_nearest_order_wins(cards: StandIn, nvml: Binding) -> None:
    cards.fail("*", 999)
    cards.fail("*", 17, card=0)
    cards.fail("nvmlDeviceGetPowerUsage", 3)
    asked = "[code_of(call, held(i)) for call in (nvmlDeviceGetPowerUsage, nvmlDeviceGetName) for i in (0, 1)]"

    assert nvml("[code_of(nvmlDeviceGetCount), held(0) and 0, held(1) and 0]") == [999, 0, 0]
    assert nvml(asked) == [3, 3, 17, 999]

    cards.clear()
    assert nvml(asked) == [0, 0, 0, 0]


def test_a_delayed_call_answers_later(cards: StandIn, nvml: Binding) -> None:
    cards.delay("nvmlDeviceGetPowerUsage", 30, card=0)
    began = time.monotonic()

    assert nvml("nvmlDeviceGetPowerUsage(held(0))") == 70_000
    assert time.monotonic() - began >= 0.03


def in_call(cards: StandIn) -> tuple[str, int | None] | None:
    """The last call that anyone began."""
    calls = cards.calls()
    return (calls[-1].name, calls[-1].card) if calls else None


def test_a_hang_lasts_until_it_is_cleared_and_the_call_then_answers(cards: StandIn, nvml: Binding) -> None:
    cards.count_calls()
    cards.hang("nvmlDeviceGetPowerUsage", card=0)

    assert nvml("nvmlDeviceGetPowerUsage(held(1))") == 70_000
    nvml.begin("nvmlDeviceGetPowerUsage(held(0))")
    wait_until(lambda: in_call(cards) == ("nvmlDeviceGetPowerUsage", 0))
    silent = nvml.is_silent(60)
    cards.update({"0.power_mw": 80_000, "0.nvmlDeviceGetPowerUsage": None})

    assert silent
    assert nvml.end() == 80_000


def test_a_hung_call_does_not_block_another_thread(cards: StandIn, nvml: Binding) -> None:
    cards.count_calls()
    cards.hang("nvmlDeviceGetPowerUsage", card=0)
    thread = "threading.Thread(target=nvmlDeviceGetPowerUsage, args=(held(0),))"
    nvml(f"handles.__setitem__('thread', {thread}) or handles['thread'].start()")
    wait_until(lambda: in_call(cards) == ("nvmlDeviceGetPowerUsage", 0))

    assert nvml("[nvmlDeviceGetPowerUsage(held(1)), handles['thread'].is_alive()]") == [70_000, True]

    cards.clear()
    assert nvml("handles.pop('thread').join()") is None


def signal_set(pid: int, which: str) -> int:
    """A mask of /proc/PID/status: SigBlk of the main thread, ShdPnd of the process."""
    (mask,) = re.findall(rf"^{which}:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(mask, 16)


def test_a_deaf_hang_holds_signals_back_as_an_uninterruptible_one(cards: StandIn, fresh: Callable[[], Binding]) -> None:
    nvml = fresh()
    nvml("nvmlInit()")
    cards.count_calls()
    cards.hang("nvmlDeviceGetCount_v2", deaf=True)
    nvml.begin("nvmlDeviceGetCount()")
    wait_until(lambda: in_call(cards) is not None)
    wait_until(lambda: signal_set(nvml.process.pid, "SigBlk") != 0)

    nvml.process.terminate()
    waits = signal_set(nvml.process.pid, "ShdPnd")
    cards.clear()

    assert waits & 1 << (signal.SIGTERM - 1)
    assert nvml.process.wait() == -signal.SIGTERM


def test_another_hang_lets_a_signal_end_the_process(cards: StandIn, fresh: Callable[[], Binding]) -> None:
    nvml = fresh()
    nvml("nvmlInit()")
    cards.count_calls()
    cards.hang("nvmlDeviceGetCount_v2")
    nvml.begin("nvmlDeviceGetCount()")
    wait_until(lambda: in_call(cards) is not None)

    nvml.process.terminate()

    assert nvml.process.wait() == -signal.SIGTERM


def test_a_hang_ends_when_the_file_is_gone(cards: StandIn, nvml: Binding) -> None:
    cards.hang("nvmlDeviceGetCount_v2")
    nvml.begin("nvmlDeviceGetCount()")
    cards.path.unlink()

    assert nvml.end() == 1


def test_a_lost_card_is_still_counted_and_may_come_back(cards: StandIn, nvml: Binding) -> None:
    assert nvml("[held(0) and 0, held(1) and 0]") == [0, 0]
    cards.lose(0, handle_code=999)

    assert nvml("nvmlDeviceGetCount()") == 2
    assert nvml("[code_of(card, 0), code_of(card, 1)]") == [999, 0]
    assert nvml("[code_of(nvmlDeviceGetUUID, held(i)) for i in (0, 1)]") == [15, 0]

    cards.restore(0)
    assert nvml("[code_of(card, 0), code_of(nvmlDeviceGetUUID, held(0))]") == [0, 0]


def test_a_reset_card_answers_new_processes_only(cards: StandIn, fresh: Callable[[], Binding]) -> None:
    before = fresh()
    before("nvmlInit() or held(0) and held(1) and None")
    cards.lose(0)
    cards.restore(0, reset=True)
    after = fresh()
    after("nvmlInit()")

    assert before("[code_of(nvmlDeviceGetUUID, held(i)) for i in (0, 1)]") == [15, 0]
    assert before("code_of(card, 0)") == 15
    assert after("[code_of(nvmlDeviceGetUUID, held(i)) for i in (0, 1)]") == [0, 0]


@pytest.mark.parametrize("code", [18, 999])
def test_a_driver_that_was_loaded_anew_answers_new_processes_only(
    code: int, cards: StandIn, fresh: Callable[[], Binding]
) -> None:
    before = fresh()
    before("nvmlInit() or held(0) and None")
    cards.reload_driver("610.43.02", code)
    after = fresh()
    after("nvmlInit()")

    assert before("[code_of(nvmlDeviceGetCount), code_of(nvmlDeviceGetUUID, held(0)), code_of(nvmlInit)]") == [code] * 3
    assert after("[nvmlSystemGetDriverVersion(), nvmlDeviceGetCount()]") == ["610.43.02", 2]


@pytest.mark.parametrize(("access", "code"), [("lost", 999), (17, 17), ("ok", 0)])
def test_without_access_cards_are_counted_and_not_read(
    access: object, code: int, cards: StandIn, nvml: Binding
) -> None:
    assert nvml("held(0) and None") is None
    cards.set("access", access)

    assert nvml("nvmlDeviceGetCount()") == 2
    assert nvml("[code_of(card, 1), code_of(nvmlDeviceGetUUID, held(0))]") == [code, code]


def test_a_card_that_was_taken_out_is_lost(cards: StandIn, nvml: Binding) -> None:
    assert nvml("held(1) and None") is None
    cards.set("count", 1)

    assert nvml("[code_of(card, 1), code_of(nvmlDeviceGetUUID, held(1)), nvmlDeviceGetCount()]") == [2, 15, 1]


def test_init_fails_as_told_and_is_needed_and_can_be_undone(cards: StandIn, fresh: Callable[[], Binding]) -> None:
    cards.fail("nvmlInitWithFlags", 9)
    nvml = fresh()
    assert nvml("nvmlInit()") == {"code": 9}

    cards.clear()
    assert nvml("nvmlInit() or nvmlDeviceGetCount()") == 2
    assert nvml("nvmlShutdown()") is None
    assert nvml("nvmlDeviceGetCount()") == {"code": 1}


def test_calls_are_counted_when_asked_for(cards: StandIn, fresh: Callable[[], Binding]) -> None:
    nvml = fresh()
    nvml("nvmlInit()")
    assert cards.calls() == []

    cards.count_calls()
    nvml("nvmlDeviceGetPowerUsage(held(1))")

    pid = nvml.process.pid
    assert cards.calls() == [
        Call(pid, "nvmlDeviceGetHandleByIndex_v2", 1),
        Call(pid, "nvmlDeviceGetPowerUsage", 1),
    ]


def test_the_file_is_read_again_only_when_it_was_replaced(cards: StandIn, nvml: Binding) -> None:
    """A cycle over eight cards makes hundreds of calls; each may look at the file, none may parse it for nothing."""
    cards.set("0.power_mw", 111_000)
    assert nvml("nvmlDeviceGetPowerUsage(held(0))") == 111_000

    as_before = cards.path.stat()
    with cards.path.open("r+") as file:
        file.write(cards.path.read_text().replace("111000", "222000"))
    os.utime(cards.path, ns=(as_before.st_atime_ns, as_before.st_mtime_ns))
    assert nvml("nvmlDeviceGetPowerUsage(held(0))") == 111_000

    cards.set("0.temperature", 50)
    cards.set("0.power_mw", 222_000)
    assert nvml("nvmlDeviceGetPowerUsage(held(0))") == 222_000


def test_changes_in_quick_succession_are_all_seen(cards: StandIn, nvml: Binding) -> None:
    """Equally long files within one tick of the file system's clock, the third perhaps with the first one's inode."""
    seen = []
    for power in range(100_000, 100_200, 4):
        cards.set("0.power_mw", power)
        nvml("nvmlDeviceGetPowerUsage(held(0))")
        cards.set("0.power_mw", power + 1)
        cards.set("0.power_mw", power + 2)
        seen.append(nvml("nvmlDeviceGetPowerUsage(held(0))"))

    assert seen == [power + 2 for power in range(100_000, 100_200, 4)]


def test_a_file_that_is_there_is_taken_over(cards: StandIn, folder: Path, nvml_standin: Path) -> None:
    cards.set("*.power_mw", 111_000)

    StandIn(folder, nvml_standin).set("0.temperature", 50)

    assert sorted(cards.path.read_text().splitlines())[-2:] == ["count 2", "power_mw 111000"]
    assert "0.temperature 50" in cards.path.read_text()


@pytest.mark.parametrize(("key", "value"), [("0.name", "a\nb"), ("0 name", "a"), ("", 1), ("0.name", "")])
def test_what_would_break_the_file_is_refused(key: str, value: object, cards: StandIn) -> None:
    before = cards.path.read_text()

    with pytest.raises(ValueError, match="one word and a value"):
        cards.set(key, value)
    assert cards.path.read_text() == before


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(NoCompilerError, match="none of cc, gcc, clang is on PATH"):
        build(tmp_path)


def test_what_does_not_compile_leaves_no_library(tmp_path: Path, nvml_standin: Path) -> None:
    assert nvml_standin.name == LIBRARY
    with pytest.raises(RuntimeError, match=r"nvml\.c does not compile"):
        build(tmp_path, "-DCARDS=")
    assert list(tmp_path.iterdir()) == []
