"""The helper that asks the driver: the real binding and a stand-in library, whose every call may fail or hang."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stallwatch.drill.nvml_standin import StandIn
from stallwatch.sources.gpus import nvml, nvml_child
from stallwatch.sources.gpus.nvml import Calls, Mean, Note, memory, pci_address, utilization
from stallwatch.sources.gpus.nvml_child import Absent, Answer, CardAnswer, Nvml, Row, Unanswered, start_child

GIB = 1 << 30
CODES = (*range(1, 31), 999)
PATIENT_SECONDS = 30.0
"""Where nothing hangs: the machine may be busy."""
SHORT_SECONDS = 0.05
FIRST, SECOND = ("GPU-5ca1ab1e-0000-4000-8000-000000000000", "GPU-5ca1ab1e-0000-4000-8000-000001000000")

PROGRAM = """
import json, os, sys
from stallwatch.sources.gpus import nvml

nvml.LEAST_WINDOW = 0.0  # two cycles may follow each other at once
memory = os.memfd_create("note")
os.truncate(memory, nvml.NOTE.size)
note = nvml.Note(memory)
_, pynvml = nvml.load(sys.argv[1], note)
for line in sys.stdin:
    if line == "new\\n":
        driver = nvml.Driver(nvml.Calls(pynvml, note))
        print(flush=True)
    else:
        processes, events = map(int, line.split())
        print(json.dumps(driver.answer(bool(processes), bool(events))), flush=True)
"""


class Helper:
    """The helper's own code in a process that begins anew when told, and takes a mean over any time."""

    def __init__(self, cards: StandIn) -> None:
        self.cards = cards
        found = importlib.util.find_spec("pynvml")
        assert found is not None
        assert found.origin is not None
        package = Path(nvml.__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(Path(found.origin).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**cards.environment(), "PYTHONPATH": str(package)},
        )

    def new(self) -> None:
        self._ask("new")

    def cycle(self, processes: bool = False, events: bool = False) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._ask(f"{processes:d} {events:d}"))
        return answer

    def cards_of(self, processes: bool = False) -> dict[str, dict[str, Any]]:
        return {card["index"]: card for card in self.cycle(processes)["cards"]}

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.communicate(timeout=PATIENT_SECONDS)


BUSY = {
    # Nothing is 0, so that a 0 among the values is one that nobody said.
    "mem_total": 80 * GIB,
    "mem_reserved": GIB,
    "mem_used": 60 * GIB,
    "util_gpu": 97,
    "util_mem": 40,
    "power_mw": 300_000,
    "power_limit_mw": 700_000,
    "clock_sm_mhz": 1980,
    "temperature": 61,
    "gpm_sm": 30,
    "gpm_tensor": 20,
    "gpm_dram": 10,
    "pcie_tx_per_second": 100_000_000,
    "pcie_rx_per_second": 900_000_000,
    "recovery_action": 1,
}
FIGURES = {
    *("memory_used", "memory_total", "memory_reserved", "utilization", "memory_utilization", "energy", "power"),
    *("power_limit", "sm_clock", "temperature", "pcie_receive", "pcie_transmit", "recovery_action"),
    *("sm_activity", "tensor_activity", "dram_activity"),
}


@pytest.fixture
def cards(tmp_path: Path, nvml_standin: Path) -> StandIn:
    made = StandIn(tmp_path, nvml_standin, count=2)
    made.update(dict(BUSY))
    made.processes(0, [(4001, 30 * GIB), (4002, 20 * GIB)])
    made.processes(1, [(4003, 30 * GIB)])
    return made


@pytest.fixture
def helper(cards: StandIn) -> Iterator[Helper]:
    made = Helper(cards)
    made.new()
    yield made
    made.close()


def test_a_card_comes_with_every_figure_in_si_units(helper: Helper) -> None:
    first, second = helper.cycle(processes=True), helper.cycle()

    card = second["cards"][0]
    values = card.pop("values")
    about = {name: values.pop(name) for name in ("power", "pcie_receive", "pcie_transmit")}
    assert first["cards"][0]["processes"] == [[4001, 30 * GIB], [4002, 20 * GIB]]
    assert card == {
        "uuid": FIRST,
        "index": "0",
        "name": "NVIDIA H100 80GB HBM3",
        "capability": "9.0",
        "pci": "0000:10:00.0",
        "mig": "",
        "codes": {},
        "processes": None,
    }
    assert values.pop("energy") > 0
    assert values == {
        "memory_used": 60 * GIB,
        "memory_total": 80 * GIB,
        "memory_reserved": GIB,
        "utilization": 0.97,
        "memory_utilization": 0.4,
        "power_limit": 700.0,
        "sm_clock": 1.98e9,
        "temperature": 61,
        "recovery_action": 1,
        "sm_activity": 0.3,
        "tensor_activity": 0.2,
        "dram_activity": 0.1,
    }
    assert about == {
        "power": pytest.approx(300.0, rel=0.2),
        "pcie_receive": pytest.approx(9e8, rel=0.5),
        "pcie_transmit": pytest.approx(1e8, rel=0.5),
    }
    assert second["driver"] == "580.95.05"
    assert (second["code"], second["lost"], second["broken"]) == (0, [], {})


def test_the_first_cycle_has_no_mean_yet_and_no_code_for_it(helper: Helper) -> None:
    first = helper.cycle()["cards"][0]

    assert set(first["values"]) == FIGURES - {
        *("power", "pcie_receive", "pcie_transmit"),
        *("sm_activity", "tensor_activity", "dram_activity"),
    }
    assert first["codes"] == {}


ONCE = ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID")
IDENTITY = (
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetMigMode",
)
EVENTS = (
    "nvmlEventSetCreate",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait_v2",
)
ACTIVITIES = ("sm_activity", "tensor_activity", "dram_activity")
COSTS = {
    # A call -> what there is no value of when it fails.
    "nvmlDeviceGetMemoryInfo_v2": ("memory_used", "memory_total", "memory_reserved"),
    "nvmlDeviceGetUtilizationRates": ("utilization", "memory_utilization"),
    "nvmlDeviceGetEnforcedPowerLimit": ("power_limit",),
    "nvmlDeviceGetClockInfo": ("sm_clock",),
    "nvmlDeviceGetTemperatureV": ("temperature",),
    "nvmlDeviceGetTotalEnergyConsumption": ("energy",),
    "nvmlGpmSampleAlloc": ACTIVITIES,
    "nvmlGpmSampleGet": ACTIVITIES,
    "nvmlGpmMetricsGet": ACTIVITIES,
    "nvmlDeviceGetFieldValues": ("recovery_action",),
    "nvmlDeviceGetComputeRunningProcesses_v3": ("processes",),
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": ("processes",),
}
INSTEAD: dict[str, dict[str, int]] = {
    # Calls that another one stands in for when the driver does not know them -> what is missing all the same.
    "nvmlDeviceGetMemoryInfo_v2": {"memory_reserved": 13},
    "nvmlDeviceGetTemperatureV": {},
    "nvmlDeviceGetComputeRunningProcesses_v3": {},
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": {},
}
EVERY_CALL = (*ONCE, *IDENTITY, *EVENTS, *COSTS)


def expected_codes(call: str, code: int) -> dict[str, int]:
    if code in nvml.SETTLED and call in INSTEAD:
        return INSTEAD[call]
    return dict.fromkeys(COSTS.get(call, ()), code)


def test_the_list_of_calls_is_complete(cards: StandIn, helper: Helper) -> None:
    cards.count_calls()
    helper.new()
    helper.cycle(True, True)
    helper.cycle(True, True)

    assert set(EVERY_CALL) == {call.name for call in cards.calls()}


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_code_of_any_call_costs_its_own_figures_only_and_gives_no_zero(
    cards: StandIn, helper: Helper, call: str
) -> None:
    """All codes there are, on one card, or where a call belongs to none, on all."""
    is_cards = call.startswith(("nvmlDevice", "nvmlGpmSampleGet")) and call != "nvmlDeviceGetCount_v2"

    for code in CODES:
        cards.fail(call, code, card=0 if is_cards else None)
        helper.new()
        helper.cycle(True, True)
        answer = helper.cycle(True, True)
        cards.clear()

        if call in ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2"):
            assert answer == {"code": code}
            continue
        told = {card["uuid"]: card for card in answer["cards"]}
        if call in ONCE:
            assert (answer["broken"], set(told)) == ({"0": code}, {SECOND})
            continue
        _check_card(told[FIRST], expected_codes(call, code), all_the_rest=code not in nvml.FATAL)
        if is_cards:
            _check_card(told[SECOND], {}, all_the_rest=True)
        assert (FIRST in answer["lost"]) == (code == nvml.LOST and call in COSTS)
        assert (SECOND in answer["lost"]) == (code == nvml.LOST and call in COSTS and not is_cards)


def _check_card(card: dict[str, Any], codes: dict[str, int], all_the_rest: bool) -> None:
    wanted = {**dict.fromkeys(FIGURES), "processes": None}
    if all_the_rest:
        assert codes == card["codes"]
        assert set(card["values"]) == FIGURES - set(codes)
        assert (card["processes"] is None) == ("processes" in codes)
    assert codes.items() <= card["codes"].items()
    assert set(card["values"]).isdisjoint(card["codes"])
    assert set(card["codes"]) <= set(wanted)
    assert all(card["values"].values())


OLDER = {
    # What an older driver does not know -> what is asked instead, and what there is no value of when that fails.
    "nvmlDeviceGetMemoryInfo_v2": ("nvmlDeviceGetMemoryInfo", ("memory_used", "memory_total", "memory_reserved")),
    "nvmlDeviceGetTemperatureV": ("nvmlDeviceGetTemperature", ("temperature",)),
    "nvmlDeviceGetTotalEnergyConsumption": ("nvmlDeviceGetPowerUsage", ("power",)),
    "nvmlDeviceGetComputeRunningProcesses_v3": ("nvmlDeviceGetComputeRunningProcesses_v2", ("processes",)),
}


@pytest.mark.parametrize("newer", OLDER)
def test_codes_of_what_an_older_driver_is_asked_instead(cards: StandIn, helper: Helper, newer: str) -> None:
    instead, figures = OLDER[newer]

    for code in CODES:
        cards.fail(newer, 13, card=0)
        cards.fail(instead, code, card=0)
        helper.new()
        card = helper.cards_of(processes=True)["0"]
        cards.clear()

        assert dict.fromkeys(figures, code).items() <= card["codes"].items()
        assert set(card["values"]).isdisjoint(card["codes"])
        assert all(card["values"].values())


def test_an_older_driver_counts_the_reserve_as_used_memory_and_that_is_said(cards: StandIn, helper: Helper) -> None:
    cards.fail("nvmlDeviceGetMemoryInfo_v2", 13)

    card = helper.cards_of()["0"]

    assert (card["values"]["memory_used"], card["codes"]) == (61 * GIB, {"memory_reserved": 13})


def test_a_card_without_energy_counter_says_its_power(cards: StandIn, helper: Helper) -> None:
    cards.set("0.energy_mj", "none")

    card = helper.cards_of()["0"]

    assert (card["values"]["power"], card["codes"]) == (300.0, {"energy": 3})


def test_an_energy_counter_that_stands_still_is_none(cards: StandIn, helper: Helper) -> None:
    """Some virtual cards have one that never moves; no card runs on 0 W."""
    cards.set("0.energy_mj", 5000)

    helper.cycle()
    card = helper.cards_of()["0"]

    assert card["values"]["power"] == 300.0


def test_an_energy_counter_that_begins_anew_is_no_power(cards: StandIn, helper: Helper) -> None:
    cards.set("0.energy_mj", 5000)
    helper.cycle()
    cards.set("0.energy_mj", 10)

    card = helper.cards_of()["0"]

    assert (card["values"]["energy"], "power" in card["values"], "power" in card["codes"]) == (0.01, False, False)


def test_what_the_driver_does_not_support_is_not_asked_again(cards: StandIn, helper: Helper) -> None:
    cards.fail("nvmlDeviceGetUtilizationRates", 3)
    cards.set("*.gpm", 0)
    cards.count_calls()

    told = [helper.cards_of()["0"]["codes"] for _ in range(3)]

    missing = ("utilization", "memory_utilization", *ACTIVITIES)
    assert told == [dict.fromkeys(missing, 3)] * 3
    counts = Counter(call.name for call in cards.calls())
    assert (counts["nvmlDeviceGetUtilizationRates"], counts["nvmlGpmSampleGet"]) == (2, 2)  # once a card
    assert counts["nvmlDeviceGetClockInfo"] == 6


def test_a_card_before_hopper_is_not_asked_for_what_only_later_ones_know(cards: StandIn, helper: Helper) -> None:
    cards.set("0.capability", "8.0")
    cards.count_calls()
    helper.new()

    helper.cycle()
    card = helper.cards_of()["0"]

    assert card["codes"] == dict.fromkeys(ACTIVITIES, 3)
    assert card["values"]["pcie_receive"] == pytest.approx(9e8, rel=0.5)  # from the field instead
    assert {call.card for call in cards.calls() if call.name == "nvmlGpmSampleGet"} == {1}


def test_costly_and_dangerous_calls_are_never_made_and_the_driver_is_initialised_once(
    cards: StandIn, helper: Helper
) -> None:
    cards.count_calls()
    helper.new()

    for _ in range(3):
        helper.cycle(True, True)

    names = Counter(call.name for call in cards.calls())
    assert names["nvmlInitWithFlags"] == 1
    assert names["nvmlDeviceGetHandleByIndex_v2"] == 2
    assert not {"nvmlShutdown", "nvmlDeviceGetPcieThroughput", "nvmlDeviceGetSupportedGraphicsClocks"} & set(names)


def test_the_process_list_is_asked_for_only_when_wanted(cards: StandIn, helper: Helper) -> None:
    cards.count_calls()

    helper.cycle(processes=False)

    assert not [call for call in cards.calls() if "Processes" in call.name]


@pytest.mark.parametrize("row", [(0, GIB), (1 << 31, GIB), (4001, 81 * GIB)])
def test_one_impossible_row_spoils_the_list(cards: StandIn, helper: Helper, row: tuple[int, int]) -> None:
    """Some drivers mix up the columns: then the other rows are wrong as well."""
    cards.processes(0, [(4002, GIB), row])

    listed = helper.cards_of(processes=True)

    assert (listed["0"]["processes"], listed["0"]["codes"]) == (None, {"processes": 999})
    assert (listed["1"]["processes"], listed["1"]["codes"]) == ([[4003, 30 * GIB]], {})


def test_memory_of_a_process_may_be_unknown_and_mps_clients_are_listed_once(cards: StandIn, helper: Helper) -> None:
    cards.processes(0, [(4001, None), (4002, GIB)])
    cards.set("0.mps", f"4002:{2 * GIB},4005:{GIB}")

    rows = helper.cards_of(processes=True)["0"]["processes"]

    assert rows == [[4001, None], [4002, 2 * GIB], [4005, GIB]]


def test_a_card_without_memory_of_its_own_has_none(cards: StandIn, helper: Helper) -> None:
    cards.update({"0.mem_total": 0, "0.mem_used": 0})

    card = helper.cards_of()["0"]

    assert card["codes"] == dict.fromkeys(("memory_used", "memory_total", "memory_reserved"), 3)


def test_fields_that_the_driver_does_not_know_are_not_asked_again(cards: StandIn, helper: Helper) -> None:
    cards.update({"*.field.230": "ret:2", "*.field.197": "none", "*.gpm": 0})

    told = [helper.cards_of()["0"] for _ in range(2)]

    assert told[1]["codes"] == {"recovery_action": 3, "pcie_transmit": 3, **dict.fromkeys(ACTIVITIES, 3)}
    assert told[1]["values"]["pcie_receive"] > 0


def test_a_field_of_another_type_is_read_by_its_type(cards: StandIn, helper: Helper) -> None:
    cards.update({"0.field.230": "5:6", "1.field.230": "9:6"})

    listed = helper.cards_of()

    assert listed["0"]["values"]["recovery_action"] == 6
    assert listed["1"]["codes"] == {"recovery_action": 999}


@pytest.mark.parametrize(("metric", "text"), [("gpm_sm", "130.0"), ("gpm_sm", "-1"), ("gpm_sm", "nan")])
def test_an_activity_that_cannot_be_is_none(cards: StandIn, helper: Helper, metric: str, text: str) -> None:
    cards.set(f"0.{metric}", text)

    helper.cycle()
    card = helper.cards_of()["0"]

    assert card["codes"] == {"sm_activity": 999}
    assert card["values"]["dram_activity"] == 0.1


def test_one_metric_that_fails_leaves_the_others(cards: StandIn, helper: Helper) -> None:
    cards.set("0.gpm_tensor", "ret:3")

    helper.cycle()
    card = helper.cards_of()["0"]

    assert (card["codes"], card["values"]["sm_activity"]) == ({"tensor_activity": 3}, 0.3)


def test_a_lost_card_is_asked_one_thing_a_cycle_and_the_others_go_on(cards: StandIn, helper: Helper) -> None:
    cards.lose(0)
    cards.count_calls()

    answer = helper.cycle(processes=False)

    assert answer["lost"] == [FIRST]
    assert (answer["cards"][0]["values"], set(answer["cards"][0]["codes"].values())) == ({}, {15})
    assert answer["cards"][1]["codes"] == {}
    assert len([call for call in cards.calls() if call.card == 0]) == 1


def test_a_lost_card_that_is_back_answers(cards: StandIn, helper: Helper) -> None:
    cards.lose(0)
    helper.cycle()
    cards.restore(0)

    answer = helper.cycle()

    assert (answer["lost"], answer["cards"][0]["codes"]) == ([], {})


@pytest.mark.parametrize(("code", "lost"), [(2, [FIRST]), (28, [FIRST]), (999, []), (3, [])])
def test_a_handle_that_leads_nowhere_is_a_lost_card(cards: StandIn, helper: Helper, code: int, lost: list[str]) -> None:
    cards.fail("*", code, card=0)

    answer = helper.cycle()

    assert (answer["lost"], answer["cards"][0]["values"]) == (lost, {})


def test_without_access_every_card_says_so_and_none_is_lost(cards: StandIn, helper: Helper) -> None:
    cards.set("access", "lost")

    answer = helper.cycle()

    assert answer["lost"] == []
    assert [set(card["codes"].values()) for card in answer["cards"]] == [{999}, {999}]


# Instances


@pytest.fixture
def split(cards: StandIn, helper: Helper) -> StandIn:
    """Card 1 in two instances, whose handles are 0 and 2."""
    cards.update({"1.mig": "on", "0.mig": "off", "1:0.instance": "9/0", "1:2.instance": "5/0", "1:2.gpm_sm": 30})
    cards.update({"1:0.mem_used": GIB, "1:2.mem_used": 2 * GIB})
    cards.processes("1:2", [(4010, 2 * GIB)])
    helper.new()
    return cards


def test_instances_have_memory_processes_and_activity_of_their_own(split: StandIn, helper: Helper) -> None:
    helper.cycle()
    listed = helper.cards_of(processes=True)

    assert {index: card["mig"] for index, card in listed.items()} == {
        "0": "disabled",
        "1": "enabled",
        "1:0": "instance",
        "1:2": "instance",
    }
    instance = listed["1:2"]
    assert instance["uuid"].startswith("MIG-")
    assert (instance["pci"], instance["capability"]) == (listed["1"]["pci"], "9.0")
    assert set(instance["values"]) == {"memory_used", "memory_total", "memory_reserved", *ACTIVITIES}
    assert (instance["values"]["memory_used"], instance["values"]["sm_activity"]) == (2 * GIB, 0.3)
    assert (instance["processes"], listed["1:0"]["processes"]) == ([[4010, 2 * GIB]], [])


def test_a_card_in_instances_lists_no_processes_and_no_utilization_of_its_own(split: StandIn, helper: Helper) -> None:
    card = helper.cards_of(processes=True)["1"]

    assert card["processes"] is None
    assert card["codes"] == {"utilization": 3, "memory_utilization": 3}


def test_instances_that_are_made_and_destroyed_are_seen(split: StandIn, helper: Helper) -> None:
    split.update({"1:0.instance": None, "1:1.instance": "7/0"})

    between = helper.cycle()
    after = helper.cards_of(processes=True)

    gone = next(card for card in between["cards"] if card["index"] == "1:0")
    assert gone["values"] == {}
    assert between["lost"] == []  # an instance is never a lost card
    assert set(after) == {"0", "1", "1:1", "1:2"}


MIG_CALLS = (
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlGpmMigSampleGet",
)


@pytest.mark.parametrize("call", MIG_CALLS)
def test_codes_of_calls_about_instances_cost_the_instances_only(split: StandIn, helper: Helper, call: str) -> None:
    for code in CODES:
        split.fail(call, code, card=1)
        helper.new()
        helper.cycle()
        listed = helper.cards_of(processes=True)
        split.clear()

        assert (listed["0"]["codes"], listed["1"]["values"]["memory_used"]) == ({}, 60 * GIB)
        for index, card in listed.items():
            assert set(card["values"]).isdisjoint(card["codes"])
            if ":" in index:
                assert card["codes"].keys() <= {*ACTIVITIES, *(("processes",) if code in nvml.FATAL else ())}


@pytest.mark.parametrize("call", ["nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"])
def test_instances_that_cannot_be_looked_for_are_still_there(split: StandIn, helper: Helper, call: str) -> None:
    before = set(helper.cards_of(processes=True))
    for code in set(CODES) - set(nvml.HOLES):
        split.fail(call, code, card=1)
        assert set(helper.cards_of(processes=True)) == before == {"0", "1", "1:0", "1:2"}
        split.clear()


# Events


def test_xids_come_as_events_to_those_who_want_them(cards: StandIn, helper: Helper) -> None:
    helper.cycle(events=True)
    cards.xid(1, 79)
    cards.xid(1, 154)
    cards.xid(0, 45)

    found = [helper.cycle(events=True)["xids"] for _ in range(2)]

    assert sorted(found[0]) == [[FIRST, 45], [SECOND, 79], [SECOND, 154]]
    assert found[1] == []


def test_without_events_no_xid_comes_and_nothing_is_registered(cards: StandIn, helper: Helper) -> None:
    cards.count_calls()
    helper.cycle()
    cards.xid(1, 79)

    assert helper.cycle()["xids"] == []
    assert not [call for call in cards.calls() if call.name in EVENTS]


# The parts that need no driver


def test_a_mean_is_what_was_counted_over_the_time_between() -> None:
    mean = Mean()

    rates = [mean.rate(now, count) for now, count in ((0.0, 100.0), (5.0, 600.0), (5.05, 700.0), (7.0, 800.0))]

    assert rates == [None, 100.0, 100.0, 100.0]  # the third comes too soon: nothing is said anew


def test_a_counter_that_goes_back_begins_anew_or_has_gone_round() -> None:
    epoch, narrow, wide = Mean(), Mean(wraps=True), Mean(wraps=True)

    assert [epoch.rate(0.0, 500.0), epoch.rate(5.0, 0.0), epoch.rate(10.0, 5.0)] == [None, None, 1.0]
    assert [narrow.rate(0.0, (1 << 32) - 100), narrow.rate(1.0, 400)] == [None, 500.0]
    assert [wide.rate(0.0, 1 << 40), wide.rate(1.0, 5)] == [None, None]


def test_bytes_over_a_long_gap_are_no_rate() -> None:
    """A counter of 32 bits may have gone round any number of times."""
    mean = Mean(wraps=True)

    assert [mean.rate(0.0, 0), mean.rate(600.0, 100), mean.rate(605.0, 600)] == [None, None, 100.0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("00000000:10:00.0", "0000:10:00.0"),
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("00010000:01:00.0", "00010000:01:00.0"),
        ("", ""),
    ],
)
def test_a_pci_address_has_four_digits_of_domain_where_they_are_enough(found: str, expected: str) -> None:
    assert pci_address(found) == expected


def test_more_used_than_there_is_cannot_be() -> None:
    assert memory(SimpleNamespace(total=GIB, used=2 * GIB, reserved=0)) == 999
    assert memory(SimpleNamespace(total=GIB, used=GIB)) == {"memory_used": GIB, "memory_total": GIB}


def test_more_than_all_the_time_cannot_be() -> None:
    assert utilization(SimpleNamespace(gpu=255, memory=0)) == 999
    assert utilization(SimpleNamespace(gpu=100, memory=0)) == {"utilization": 1.0, "memory_utilization": 0.0}


class Binding:
    """As much of pynvml as a dead fork of it has."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            self.value = value

        def __str__(self) -> str:
            raise AssertionError("the text of an error may call the driver")

    @staticmethod
    def nvmlRefuses() -> None:  # noqa: N802  # as in pynvml
        raise Binding.NVMLError(15)

    @staticmethod
    def nvmlLies() -> None:  # noqa: N802  # as in pynvml
        raise Binding.NVMLError(0)

    @staticmethod
    def nvmlDeviceGetName() -> str:  # noqa: N802  # as in pynvml
        return b"\xff".decode()


@pytest.mark.parametrize(
    ("call", "arguments", "code"),
    [("nvmlRefuses", (), 15), ("nvmlLies", (), 999), ("nvmlDeviceGetName", (), 999), ("nvmlRefuses", (1,), 13)],
)
def test_whatever_a_binding_raises_is_a_code(call: str, arguments: tuple[int, ...], code: int) -> None:
    assert calls_of(Binding)(call, *arguments) == (code, None)


def test_a_function_that_the_binding_lacks_is_one_that_the_driver_lacks() -> None:
    assert calls_of(Binding)("nvmlGpmSampleAlloc") == (13, None)


def calls_of(binding: object) -> Calls:
    memory = os.memfd_create("note")
    os.truncate(memory, nvml.NOTE.size)
    return Calls(binding, Note(memory))


# A driver that hangs: the real helper and its parent


@pytest.fixture
def here(cards: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    for name, text in cards.environment().items():
        monkeypatch.setenv(name, text)
    return cards


def eventually(found: Callable[[], Any]) -> Any:
    """The first that is something; asked again and again, for a helper needs its time to start."""
    until = time.monotonic() + PATIENT_SECONDS
    while not (value := found()):
        assert time.monotonic() < until
        time.sleep(0.005)
    return value


def answer_of(driver: Nvml) -> Answer:
    def asked() -> Answer | None:
        found = driver.ask(True, True)
        return found if isinstance(found, Answer) else None

    found: Answer = eventually(asked)
    return found


def hang_of(driver: Nvml, call: str) -> Unanswered:
    def asked() -> Unanswered | None:
        found = driver.ask(True, True)
        return found if isinstance(found, Unanswered) and found.call == call else None

    found: Unanswered = eventually(asked)
    return found


class Started(list[subprocess.Popen[bytes]]):
    """Starts helpers and remembers them."""

    def start(self, note: int) -> subprocess.Popen[bytes]:
        self.append(start_child(note))
        return self[-1]


def resources() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


NOTED = {
    # The name that a hung call is told by, where it is another one than the library's.
    "nvmlInitWithFlags": "nvmlInit",
    "nvmlDeviceGetCount_v2": "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex_v2": "nvmlDeviceGetHandleByIndex",
}


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_hang_in_any_call_is_named_and_passes(here: StandIn, call: str) -> None:
    before = resources()
    started = Started()
    driver = Nvml(SHORT_SECONDS, start=started.start)
    is_early = call in (*ONCE, *IDENTITY, *EVENTS[:3], "nvmlGpmSampleAlloc")
    if not is_early:
        answer_of(driver)
    here.hang(call)

    begun = time.monotonic()
    hung = hang_of(driver, NOTED.get(call, call))
    again = driver.ask(False, False)
    assert isinstance(again, Unanswered)
    assert begun - PATIENT_SECONDS < hung.since <= again.since <= time.monotonic()
    assert driver.in_flight_since == again.since
    here.clear()
    answer = answer_of(driver)
    driver.close()

    assert [card.uuid for card in answer.cards] == [FIRST, SECOND]
    assert driver.in_flight_since is None
    assert [child.poll() for child in started] == [0]
    assert resources() == before


def test_which_card_the_hung_call_is_about_is_told(here: StandIn) -> None:
    driver = Nvml(SHORT_SECONDS)
    answer_of(driver)
    here.hang("nvmlDeviceGetClockInfo", card=1)

    assert hang_of(driver, "nvmlDeviceGetClockInfo").card == 1

    here.clear()
    answer_of(driver)
    driver.close()


def hung_helper(here: StandIn, deaf: bool = False) -> tuple[Nvml, subprocess.Popen[bytes]]:
    started = Started()
    driver = Nvml(SHORT_SECONDS, start=started.start)
    answer_of(driver)
    here.hang("nvmlDeviceGetMemoryInfo_v2", deaf=deaf)
    hang_of(driver, "nvmlDeviceGetMemoryInfo_v2")
    return driver, started[0]


def test_closing_does_not_wait_for_a_hung_helper_and_that_one_ends_with_its_call(
    here: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, child = hung_helper(here, deaf=True)
    pauses: list[float] = []

    with monkeypatch.context() as patch:
        patch.setattr(nvml_child, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
        driver.close()
    was_alive = child.poll() is None
    here.clear()

    assert sum(pauses) < 1.0
    assert was_alive
    assert child.wait(PATIENT_SECONDS) == 0


def pending(pid: int) -> int:
    """Signals that were sent and did not come yet."""
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)


def test_a_helper_that_is_told_to_stop_in_a_call_ends_after_it(here: StandIn) -> None:
    """Whoever kills a client in the middle of a call can break the card."""
    driver, child = hung_helper(here)

    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGINT)
    eventually(lambda: not pending(child.pid))
    was_alive = child.poll() is None
    here.clear()

    assert was_alive
    assert child.wait(PATIENT_SECONDS) == 0
    driver.close()


def test_an_idle_helper_ends_when_it_is_told_to(here: StandIn) -> None:
    started = Started()
    driver = Nvml(SHORT_SECONDS, start=started.start)
    answer_of(driver)

    started[0].send_signal(signal.SIGTERM)

    assert started[0].wait(PATIENT_SECONDS) == 0
    driver.close()


def test_a_helper_gets_next_to_nothing_of_our_environment(here: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_PLANTED")
    started = Started()
    driver = Nvml(SHORT_SECONDS, start=started.start)
    answer_of(driver)

    environ = Path(f"/proc/{started[0].pid}/environ").read_bytes()
    driver.close()

    names = {line.split(b"=")[0] for line in environ.split(b"\0") if line}
    assert names == {b"LD_LIBRARY_PATH", b"NVML_STANDIN_STATE"}


def test_an_answer_is_made_of_what_the_helper_tells(here: StandIn) -> None:
    driver = Nvml(SHORT_SECONDS)

    answer = answer_of(driver)
    driver.close()

    first = answer.cards[0]
    assert isinstance(first, CardAnswer)
    assert (first.uuid, first.index, first.mig, first.codes) == (FIRST, "0", "", {})
    assert first.values["memory_used"] == 60 * GIB
    assert first.processes == (Row(4001, 30 * GIB), Row(4002, 20 * GIB))
    assert (answer.driver, answer.code, answer.lost, answer.broken, answer.xids) == ("580.95.05", 0, (), {}, ())


class Clock:
    """Goes a fifth of a second with each look, so that pauses of a minute take no time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.2
        return self.now


def later(driver: Nvml, is_so: Callable[[Answer], bool]) -> Answer:
    """The first answer that is so; with a Clock, minutes go by meanwhile."""

    def asked() -> Answer | None:
        found = driver.ask(False, False)
        return found if isinstance(found, Answer) and is_so(found) else None

    found: Answer = eventually(asked)
    return found


def is_whole(answer: Answer) -> bool:
    return not answer.code and [bool(card.values) for card in answer.cards] == [True, True]


@pytest.fixture
def driver(here: StandIn) -> Iterator[Nvml]:
    """Has seen both cards."""
    made = Nvml(PATIENT_SECONDS, monotonic=Clock())
    assert is_whole(answer_of(made))
    yield made
    made.close()


def test_a_driver_loaded_anew_is_met_by_a_new_helper(here: StandIn, driver: Nvml) -> None:
    here.reload_driver("590.10.01")

    refused = driver.ask(False, False)
    found = later(driver, is_whole)

    assert isinstance(refused, Answer)
    assert {code for card in refused.cards for code in card.codes.values()} == {nvml.MISMATCH}
    assert found.driver == "590.10.01"


def test_a_card_that_was_reset_is_lost_and_found(here: StandIn, driver: Nvml) -> None:
    here.lose(1)
    gone = driver.ask(False, False)
    here.restore(1, reset=True)

    found = later(driver, is_whole)

    assert isinstance(gone, Answer)
    assert gone.lost == (SECOND,)
    assert found.lost == ()


def test_a_card_that_is_gone_for_good_stays_lost(here: StandIn, driver: Nvml) -> None:
    """A new helper cannot open it any more, and the old one is as good."""
    here.lose(1, handle_code=999)
    driver.ask(False, False)

    told = [driver.ask(False, False) for _ in range(40)]

    assert all(isinstance(answer, Answer) and answer.lost == (SECOND,) for answer in told)


def test_access_that_comes_back_is_found_and_no_card_is_lost_meanwhile(here: StandIn, driver: Nvml) -> None:
    here.set("access", "lost")
    closed = [driver.ask(False, False) for _ in range(20)]
    here.set("access", "ok")

    found = later(driver, is_whole)

    assert all(isinstance(answer, Answer) and answer.lost == () for answer in closed)
    assert found.lost == ()


def test_an_init_that_fails_is_tried_again(here: StandIn) -> None:
    here.fail("nvmlInitWithFlags", 18)
    driver = Nvml(PATIENT_SECONDS, monotonic=Clock())
    refused = driver.ask(False, False)
    here.clear()

    found = later(driver, is_whole)
    driver.close()

    assert refused == Answer(code=18)
    assert is_whole(found)


@pytest.mark.parametrize(("state", "why"), [({"count": 0}, "cards"), ({"nvmlInitWithFlags": "ret:9"}, "driver")])
def test_a_machine_without_cards_is_no_failure(here: StandIn, state: dict[str, object], why: str) -> None:
    here.update(state)
    driver = Nvml(PATIENT_SECONDS)

    found = driver.ask(False, False)
    driver.close()

    assert found == Absent(why)


def test_a_machine_without_library_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    driver = Nvml(PATIENT_SECONDS)

    found = driver.ask(False, False)
    driver.close()

    assert found == Absent("library")


def test_a_library_that_python_has_no_module_for_is_no_failure_and_told_apart(
    here: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    driver = Nvml(PATIENT_SECONDS)

    found = driver.ask(False, False)
    driver.close()

    assert found == Absent("binding")


def test_a_helper_that_is_killed_is_replaced(here: StandIn) -> None:
    started = Started()
    before = resources()
    driver = Nvml(PATIENT_SECONDS, start=started.start, monotonic=Clock())
    answer_of(driver)
    started[0].kill()

    refused = driver.ask(False, False)
    found = later(driver, is_whole)
    driver.close()

    assert refused == Answer(code=999)
    assert is_whole(found)
    assert [child.poll() for child in started] == [-signal.SIGKILL, 0]
    assert resources() == before


def test_a_hang_of_ten_minutes_leaves_nothing_behind(here: StandIn) -> None:
    """The second helper hangs as well, and some are killed; the clock is ours, so that it takes no ten minutes."""
    started, clock = Started(), Clock()
    before = resources()
    driver = Nvml(PATIENT_SECONDS, start=started.start, monotonic=clock)
    answer_of(driver)
    here.hang("nvmlDeviceGetMemoryInfo_v2", card=1)
    hung = clock.now
    driver._deadline = 0.0  # from here on nobody waits

    most = 0
    while clock.now - hung < 900:
        assert isinstance(driver.ask(False, False), Unanswered)
        most = max(most, sum(child.poll() is None for child in started))
    here.clear()
    driver._deadline = PATIENT_SECONDS
    found = later(driver, is_whole)
    driver.close()

    assert most == 2
    assert is_whole(found)
    assert {child.wait(PATIENT_SECONDS) for child in started} <= {0, -signal.SIGKILL}
    assert resources() == before


def test_what_a_library_prints_does_not_get_into_the_answers(here: StandIn, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("print('a word from the library', flush=True)\nNVMLError = ValueError\n")
    note = os.memfd_create("note")
    os.truncate(note, nvml.NOTE.size)

    done = subprocess.run(
        [sys.executable, "-I", "-S", nvml.__file__, str(tmp_path), str(note)],
        input=b"0 0\n",
        capture_output=True,
        pass_fds=(note,),
        timeout=PATIENT_SECONDS,
        check=True,
    )
    os.close(note)

    assert done.stdout == b'{"code": 13}\n'  # it has no nvmlInit
