"""The `gpu` collector with cards that answer as a test says: what is told, and what is not told while they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_node import GIB, VALUES, GpuNode, answer, card, instance, silent
from stallwatch.config import Config, Intervals
from stallwatch.model import READ_REASONS, GpuUse, Process, ProcessId
from stallwatch.sources.gpus.collector import FIGURES, FORGET_SECONDS, MOST_CARDS, reason_of
from stallwatch.sources.gpus.faults import MOST_SERIES
from stallwatch.sources.gpus.nvml_child import Absent, Answer, Unanswered
from stallwatch.sources.gpus.xid import Lost, Xid

HANGS = Unanswered(990.0, "nvmlDeviceGetMemoryInfo", 3)
PIDS = {"TP0": 100, "TP1": 101}


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    """Two cards, one rank of a server on each with 75 GiB; nothing was read yet."""
    node = GpuNode(tmp_path)
    node.serve("vllm-8000", PIDS)
    node.driver.says = answer(card(0, [(100, 75 * GIB)]), card(1, [(101, 75 * GIB)]))
    return node


def lost(node: GpuNode) -> dict[str, float | str | None]:
    return {labels[0]: value for labels, value in node.series("gpu_lost").items()}


def reasons(node: GpuNode, uuid: str) -> set[str | None]:
    """Why the card's own figures are missing."""
    names = {signal.name for signal in FIGURES.values()}
    return {r.reason for r in node.found if r.labels == (uuid,) and r.value is None and r.signal.name in names}


def figures(node: GpuNode, uuid: str) -> set[str]:
    """Names of the figures the card has values for."""
    signals = {signal.name: figure for figure, signal in FIGURES.items()}
    found = (r for r in node.found if r.labels == (uuid,) and r.value is not None)
    return {signals[r.signal.name] for r in found if r.signal.name in signals}


# --- cards that answer -------------------------------------------------------------------------------------


def test_every_figure_of_a_card_is_told_in_its_unit(node: GpuNode) -> None:
    node.look()

    told = {figure: node.value(signal.name, "GPU-0") for figure, signal in FIGURES.items()}
    assert told == {figure: VALUES[figure] for figure in FIGURES}
    assert node.series("gpu_info") == {
        ("GPU-0", "0", "NVIDIA H100 80GB HBM3", "9.0", "580.95.05", "0000:10:00.0", "disabled"): 1.0,
        ("GPU-1", "1", "NVIDIA H100 80GB HBM3", "9.0", "580.95.05", "0000:11:00.0", "disabled"): 1.0,
    }
    assert lost(node) == {"GPU-0": 0.0, "GPU-1": 0.0}
    assert node.value("gpu_call_in_flight_seconds") == 0.0
    assert (node.source.absent, node.source.incomplete, node.source.in_flight_since) == (False, False, None)


def test_what_a_card_says_again_is_told_by_the_very_same_reading_and_what_changed_anew(node: GpuNode) -> None:
    node.look()
    before = {(r.signal.name, r.labels): r for r in node.found if r.labels[:1] == ("GPU-0",)}
    other = card(0, [(100, 75 * GIB)], values={**VALUES, "power": 300.5}, name="another")
    node.look(answer(other, card(1, [(101, 75 * GIB)])))
    after = {(r.signal.name, r.labels): r for r in node.found if r.labels[:1] == ("GPU-0",)}

    assert node.value("gpu_power_watts", "GPU-0") == 300.5
    assert [labels[2] for labels in node.series("gpu_info") if labels[0] == "GPU-0"] == ["another"]
    figures = {signal.name for signal in FIGURES.values()} | {"gpu_lost"}
    assert {key[0] for key, r in after.items() if key[0] in figures and before[key] is not r} == {"gpu_power_watts"}


def test_a_figure_without_an_answer_yet_is_neither_told_nor_counted(node: GpuNode) -> None:
    first = {figure: value for figure, value in VALUES.items() if figure != "power"}
    node.look(answer(card(values=first)))

    assert node.series("gpu_power_watts") == {}


@pytest.mark.parametrize("code", [*range(1, 30), 999, 12345])
def test_every_code_is_a_reason_and_never_a_value(tmp_path: Path, code: int) -> None:
    node = GpuNode(tmp_path)
    without = {figure: value for figure, value in VALUES.items() if figure != "utilization"}
    node.look(answer(card(values=without, codes={"utilization": code})))

    assert node.value("gpu_utilization_ratio", "GPU-0") == reason_of(code)
    assert reason_of(code) in READ_REASONS
    assert node.value("gpu_memory_used_bytes", "GPU-0") == 76 * GIB


def test_codes_that_mean_that_the_card_has_no_such_thing_are_told_apart() -> None:
    names = {code: reason_of(code) for code in (1, 2, 3, 4, 10, 13, 15, 16, 17, 18, 25, 27, 999)}

    assert {code for code, reason in names.items() if reason == "not_supported"} == {3, 13, 25}
    assert {code for code, reason in names.items() if reason == "permission"} == {4, 17}
    assert {code for code, reason in names.items() if reason == "gpu_lost"} == {15, 16}
    assert {code for code, reason in names.items() if reason == "timeout"} == {10}
    assert {code for code, reason in names.items() if reason == "error"} == {1, 2, 18, 27, 999}


def test_what_a_card_does_not_have_is_counted_once_and_again_when_that_changes(node: GpuNode) -> None:
    """GB10: no memory of its own, no bus; but who is on it, and with how much, is known."""
    few = {figure: VALUES[figure] for figure in ("utilization", "power", "energy")}
    bare = answer(card(0, [(100, 75 * GIB)], values=few, codes={"memory_used": 3, "pcie_receive": 13}))
    node.look(bare)
    first = reasons(node, "GPU-0")
    node.look()
    again = reasons(node, "GPU-0")
    node.look(answer(card(values={**few, "memory_used": GIB}, codes={"pcie_receive": 13})))
    had = node.value("gpu_memory_used_bytes", "GPU-0")
    node.look(bare)

    assert (first, again, had) == ({"not_supported"}, set(), GIB)
    assert node.value("gpu_memory_used_bytes", "GPU-0") == "not_supported"
    assert node.series("gpu_pcie_receive_bytes_per_second") == {}
    assert node.value("gpu_process_memory_bytes", "GPU-0", "vllm-8000", "TP0") == 75 * GIB
    assert node.unowned() == 0.0


def test_other_reasons_are_counted_at_every_look(node: GpuNode) -> None:
    for _ in range(2):
        node.look(answer(card(values={"utilization": 0.0}, codes={"memory_used": 4})))
        assert node.value("gpu_memory_used_bytes", "GPU-0") == "permission"


# --- no cards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["library", "driver", "cards"])
def test_without_cards_there_is_no_collector(tmp_path: Path, why: str) -> None:
    node = GpuNode(tmp_path)
    assert node.source.absent

    node.look(Absent(why))

    assert (node.found, node.uses) == ([], [])
    assert (node.source.absent, node.source.incomplete) == (True, False)


def test_a_driver_that_is_unloaded_under_known_cards_is_no_machine_without_cards(node: GpuNode) -> None:
    node.look()
    node.look(Absent("driver"))

    assert lost(node) == {"GPU-0": "error", "GPU-1": "error"}
    assert (node.source.absent, node.source.incomplete) == (False, True)


def test_a_driver_that_came_later_is_found(tmp_path: Path) -> None:
    node = GpuNode(tmp_path)
    node.look(Absent("driver"))
    node.look(answer(card()))

    assert not node.source.absent
    assert lost(node) == {"GPU-0": 0.0}


# --- a driver that hangs -----------------------------------------------------------------------------------


def test_while_a_call_hangs_everything_is_missing_and_the_call_gets_older(node: GpuNode) -> None:
    node.look()
    node.look(HANGS)
    young = node.value("gpu_call_in_flight_seconds")
    node.look(seconds=600.0)

    for uuid in ("GPU-0", "GPU-1"):
        assert (figures(node, uuid), reasons(node, uuid)) == (set(), {"driver_unresponsive"})
    assert lost(node) == {"GPU-0": "driver_unresponsive", "GPU-1": "driver_unresponsive"}
    assert node.unowned() == "driver_unresponsive"
    assert node.held() == {
        ("GPU-0", "vllm-8000", "TP0"): "driver_unresponsive",
        ("GPU-1", "vllm-8000", "TP1"): "driver_unresponsive",
    }
    assert node.series("gpu_info") == {}
    assert (young, node.value("gpu_call_in_flight_seconds")) == (20.0, 620.0)
    assert (node.source.in_flight_since, node.source.incomplete, node.source.absent) == (990.0, True, False)


def test_a_call_counts_as_overdue_from_the_first_look_on(node: GpuNode) -> None:
    node.look(Unanswered(node.now + 5.0, "nvmlInit", None))

    assert node.value("gpu_call_in_flight_seconds") == 2.0
    assert (node.source.absent, node.source.incomplete) == (False, True)


def test_figures_that_a_card_does_not_have_are_not_missed_while_it_hangs(node: GpuNode) -> None:
    node.look(answer(card(values={"utilization": 0.0}, codes={"memory_used": 3})))
    node.look(HANGS)

    assert node.series("gpu_memory_used_bytes") == {}
    assert node.value("gpu_utilization_ratio", "GPU-0") == "driver_unresponsive"


def test_a_tie_holds_while_the_driver_hangs_and_the_process_lives(node: GpuNode) -> None:
    node.look()
    node.look(HANGS, seconds=7200.0)
    both = node.uses
    node.servers.clear()
    node.look()

    assert both == [GpuUse("GPU-0", 100), GpuUse("GPU-1", 101)]
    assert node.uses == []


def test_another_process_with_the_same_pid_is_not_on_the_card(node: GpuNode) -> None:
    node.look()
    node.look(HANGS)
    node.servers.clear()
    node.tree.end(100, 101)
    node.serve("vllm-8000", {"TP0": 100})
    assert node.look().uses == [GpuUse("GPU-0", 100)]  # the same start time: the same process

    node.tree.replace(100, "worker", started=900.0)
    node.servers[0] = replace(node.servers[0], processes=(Process(ProcessId(100, 90000), "TP0", 1),))

    assert node.look().uses == []


def test_after_a_hang_everything_is_there_at_the_first_answer(node: GpuNode) -> None:
    good = node.driver.says
    node.look()
    node.look(HANGS, seconds=600.0)
    node.look(good)

    assert figures(node, "GPU-0") == set(FIGURES)
    assert node.held()["GPU-0", "vllm-8000", "TP0"] == 75 * GIB
    assert (node.source.in_flight_since, node.source.incomplete) == (None, False)


def test_a_list_that_hangs_does_not_take_the_figures_with_it_for_good(node: GpuNode) -> None:
    """The list is then asked for less and less often; a hang of another call changes nothing."""
    good = node.driver.says
    node.look()
    hangs = Unanswered(990.0, "nvmlDeviceGetComputeRunningProcesses_v3", 0)
    node.look(hangs, seconds=30.0)
    first = node.driver.asked[-1]
    node.look()
    node.look(good, seconds=20.0)
    between = node.driver.asked[-1]
    node.look(hangs, seconds=10.0)
    second = node.driver.asked[-1]
    node.look(good, seconds=35.0)
    third = node.driver.asked[-1]
    node.look(seconds=25.0)

    assert [first[0], between[0], second[0], third[0]] == [True, False, True, False]
    assert node.driver.asked[-1][0]


# --- a card that is lost -----------------------------------------------------------------------------------


def test_a_lost_card_says_so_and_nothing_else_while_the_others_go_on(node: GpuNode) -> None:
    node.look()
    node.look(answer(silent(0, 15), card(1, [(101, 75 * GIB)]), lost=("GPU-0",)))

    assert lost(node) == {"GPU-0": 1.0, "GPU-1": 0.0}
    assert (figures(node, "GPU-0"), reasons(node, "GPU-0")) == (set(), {"gpu_lost"})
    assert figures(node, "GPU-1") == set(FIGURES)
    assert [labels[0] for labels in node.series("gpu_info")] == ["GPU-1"]
    assert node.held()["GPU-0", "vllm-8000", "TP0"] == "gpu_lost"
    assert GpuUse("GPU-0", 100) in node.uses
    assert not node.source.incomplete


def test_a_lost_card_stays_known_for_a_day_and_comes_back(node: GpuNode) -> None:
    good, gone = node.driver.says, answer(card(1, [(101, 75 * GIB)]), lost=("GPU-0",))
    node.look()
    node.look(gone, seconds=FORGET_SECONDS - 60.0)
    still = lost(node)
    node.look(good)
    back = lost(node)
    node.look(gone, seconds=FORGET_SECONDS)

    assert (still["GPU-0"], back["GPU-0"]) == (1.0, 0.0)
    assert lost(node) == {"GPU-1": 0.0}


def test_there_is_a_limit_to_cards_that_are_remembered(node: GpuNode) -> None:
    """MIG instances get a new name each time they are made; the card they are of may be silent meanwhile."""
    older = [instance(0, number) for number in range(100)]
    newer = [instance(0, number) for number in range(100, 100 + MOST_CARDS)]
    node.look(answer(*older))
    node.look(answer(*newer))

    assert lost(node) == {f"MIG-0-{number}": 0.0 for number in range(100, 100 + MOST_CARDS)}


def test_only_the_last_one_of_all_is_kept_for_a_day(node: GpuNode) -> None:
    node.look()
    node.look(Absent("driver"), seconds=FORGET_SECONDS)

    assert node.found == []
    assert node.source.absent


@pytest.mark.parametrize(("code", "reason"), [(999, "error"), (17, "permission")])
def test_when_every_card_is_refused_at_once_none_is_lost(node: GpuNode, code: int, reason: str) -> None:
    """The control group of our container lost the devices; the cards are well."""
    node.look()
    node.look(answer(broken={0: code, 1: code}, lost=("GPU-0", "GPU-1")))
    new_process = lost(node)
    node.look(answer(silent(0, code), silent(1, code)))

    assert new_process == {"GPU-0": reason, "GPU-1": reason}
    assert lost(node) == new_process
    assert (reasons(node, "GPU-0"), node.source.incomplete) == ({reason}, True)


def test_one_card_that_cannot_be_opened_any_more_is_lost(node: GpuNode) -> None:
    node.look()
    node.look(answer(card(1), broken={0: 999}, lost=("GPU-0",)))

    assert lost(node) == {"GPU-0": 1.0, "GPU-1": 0.0}


def test_one_card_that_merely_fails_is_not_called_lost(node: GpuNode) -> None:
    node.look()
    node.look(answer(silent(0, 999), card(1)))

    assert lost(node) == {"GPU-0": "error", "GPU-1": 0.0}


@pytest.mark.parametrize(("code", "reason"), [(18, "error"), (999, "error"), (15, "error"), (4, "permission")])
def test_a_driver_that_refuses_as_a_whole_blinds_and_loses_nothing(node: GpuNode, code: int, reason: str) -> None:
    node.look()
    node.look(Answer(code=code))

    assert lost(node) == {"GPU-0": reason, "GPU-1": reason}
    assert node.source.incomplete


@pytest.mark.parametrize("code", [15, 16])
def test_when_one_lost_card_keeps_the_driver_from_counting_the_others_are_not_lost(node: GpuNode, code: int) -> None:
    node.look()
    node.kernel.faults = [Xid("0000:10:00.0", 79, None, 1.0)]
    node.look(Answer(code=code))

    assert lost(node) == {"GPU-0": 1.0, "GPU-1": "error"}


def test_a_refusal_before_any_card_was_seen_is_counted(tmp_path: Path) -> None:
    node = GpuNode(tmp_path)
    node.look(Answer(code=18))
    whole = node.series("gpu_recovery_action")
    node.look(answer(card(1), broken={0: 4}))

    assert whole == {("unknown",): "error"}
    assert node.series("gpu_recovery_action") == {("unknown",): "permission", ("GPU-1",): 0.0}
    assert lost(node) == {"GPU-1": 0.0}


# --- faults the kernel tells -------------------------------------------------------------------------------


def test_xids_are_counted_by_card_and_kind(node: GpuNode) -> None:
    node.kernel.faults = [Xid("0000:10:00.0", 43, 100, 1.0), Xid("0000:10:00.0", 43, 101, 7.0)]
    node.kernel.faults += [Xid("0000:11:00.0", 94, None, 3.0), Xid("0000:99:00.0", 31, None, 4.0)]
    node.look()
    node.look()

    assert node.series("gpu_xid_errors_total") == {("GPU-0", "43"): 2, ("GPU-1", "94"): 1, ("unknown", "31"): 1}
    last = node.series("gpu_xid_last_timestamp_seconds")
    assert last == {("GPU-0", "43"): 7.0, ("GPU-1", "94"): 3.0, ("unknown", "31"): 4.0}


def test_a_fault_of_a_card_that_has_not_answered_finds_its_name_later(node: GpuNode) -> None:
    good = node.driver.says
    node.kernel.faults = [Xid("0000:10:00.0", 119, None, 1.0)]
    node.look(HANGS)
    before = node.series("gpu_xid_errors_total")
    node.look(good)

    assert before == {("unknown", "119"): 1}
    assert node.series("gpu_xid_errors_total") == {("GPU-0", "119"): 1}


def test_there_is_a_limit_to_kinds_of_faults(node: GpuNode) -> None:
    node.kernel.faults = [Xid("0000:10:00.0", code, None, 1.0) for code in range(1, MOST_SERIES + 9)]
    node.kernel.faults += [Xid("0000:10:00.0", 1, None, 2.0)]
    node.look()

    found = node.series("gpu_xid_errors_total")
    assert (len(found), found["GPU-0", "1"]) == (MOST_SERIES, 2)


def test_a_fault_of_a_lost_card_keeps_its_name(node: GpuNode) -> None:
    node.look()
    node.kernel.faults = [Xid("0000:10:00.0", 79, None, 1.0)]
    node.look(answer(card(1), lost=("GPU-0",)))

    assert node.series("gpu_xid_errors_total") == {("GPU-0", "79"): 1}


@pytest.mark.parametrize("fault", [Xid("0000:10:00.0", 79, None, 1.0), Lost("0000:10:00.0", 1.0)])
@pytest.mark.parametrize("says", [HANGS, Answer(code=999), answer(broken={0: 999, 1: 999}), Absent("driver")])
def test_a_card_the_kernel_calls_gone_is_lost_whatever_the_driver_says(
    node: GpuNode, fault: Xid | Lost, says: Answer | Unanswered | Absent
) -> None:
    node.look()
    node.kernel.faults = [fault]
    node.look(says)

    assert lost(node)["GPU-0"] == 1.0
    assert lost(node)["GPU-1"] in ("driver_unresponsive", "error")
    assert reasons(node, "GPU-0") == {"gpu_lost"}


def test_a_card_that_answers_after_that_is_there(node: GpuNode) -> None:
    """History: it was off the bus before the last reset."""
    good = node.driver.says
    node.kernel.faults = [Xid("0000:10:00.0", 79, None, 1.0), Lost("0000:11:00.0", 1.0)]
    node.look()
    now = lost(node)
    node.look(HANGS)
    hanging = lost(node)
    node.look(good)

    assert now == lost(node) == {"GPU-0": 0.0, "GPU-1": 0.0}
    assert set(hanging.values()) == {"driver_unresponsive"}


@pytest.mark.parametrize("code", [43, 45, 119, 154])
def test_another_fault_loses_no_card(node: GpuNode, code: int) -> None:
    node.look()
    node.kernel.faults = [Xid("0000:10:00.0", code, None, 1.0)]
    node.look(HANGS)

    assert lost(node)["GPU-0"] == "driver_unresponsive"


def test_faults_are_told_when_all_of_the_history_is_known_and_not_before(node: GpuNode) -> None:
    """What was read of it later would look like faults that happened in between."""
    node.kernel.is_caught_up = False
    node.kernel.faults = [Xid("0000:10:00.0", 43, None, 1.0)]
    node.look()
    half = node.series("gpu_xid_errors_total")
    node.kernel.is_caught_up = True
    node.kernel.faults = [Xid("0000:10:00.0", 43, None, 9.0)]
    node.look()
    whole = node.series("gpu_xid_errors_total")
    node.kernel.is_caught_up = False
    node.look()

    assert (half, whole) == ({}, {("GPU-0", "43"): 2})
    assert node.series("gpu_xid_errors_total") == whole


def test_the_driver_is_asked_for_xids_only_where_the_kernel_log_cannot_be_read(node: GpuNode) -> None:
    node.look()
    node.kernel.reason = "permission"
    node.look(answer(card(), xids=(("GPU-0", 31), ("GPU-9", 31))))
    said = node.series("gpu_xid_errors_total")
    node.look(answer(card()))

    assert [events for _, events in node.driver.asked] == [False, True, True]
    assert said == {("GPU-0", "31"): 1, ("unknown", "unknown"): "permission"}
    assert node.series("gpu_xid_errors_total") == {("GPU-0", "31"): 1}  # that it cannot be read is counted once


# --- process lists -----------------------------------------------------------------------------------------


def test_lists_are_asked_for_at_their_own_interval_and_repeated_in_between(node: GpuNode) -> None:
    for _ in range(14):
        node.look()
        assert node.held()["GPU-0", "vllm-8000", "TP0"] == 75 * GIB
        assert node.unowned() == 0.0

    asked = [index for index, (processes, _) in enumerate(node.driver.asked) if processes]
    assert asked == [0, 6, 12]


def test_a_new_configuration_changes_the_intervals(node: GpuNode) -> None:
    node.look()
    node.source.configure(Config(intervals=Intervals(gpu_processes=10.0)))
    for _ in range(8):
        node.look()

    assert [index for index, (processes, _) in enumerate(node.driver.asked) if processes] == [0, 6, 8]


def test_what_an_old_list_said_is_not_told_for_ever(node: GpuNode) -> None:
    node.look()
    node.look(Unanswered(990.0, "nvmlDeviceGetComputeRunningProcesses_v3", 0), seconds=30.0)
    node.look(answer(card(), card(1)), seconds=25.0)
    recent = node.held()["GPU-0", "vllm-8000", "TP0"]
    for _ in range(8):
        node.driver.says = Unanswered(990.0, "nvmlDeviceGetComputeRunningProcesses_v3", 0)
        node.look()
    node.source._lists_due = float("inf")
    node.look(answer(card(), card(1)))

    assert recent == 75 * GIB
    assert node.held()["GPU-0", "vllm-8000", "TP0"] == "timeout"
    assert node.unowned() == "timeout"
    assert GpuUse("GPU-0", 100) in node.uses


def test_a_list_that_is_refused_says_why_and_the_tie_holds(node: GpuNode) -> None:
    node.look()
    node.look(answer(card(0, None, codes={"processes": 999}), card(1, [(101, 75 * GIB)])), seconds=30.0)

    assert node.held() == {("GPU-0", "vllm-8000", "TP0"): "error", ("GPU-1", "vllm-8000", "TP1"): 75 * GIB}
    assert (node.unowned(0), node.unowned(1)) == ("error", 0.0)
    assert GpuUse("GPU-0", 100) in node.uses


def test_a_card_that_has_no_lists_says_so_once(node: GpuNode) -> None:
    without = answer(card(0, None, codes={"processes": 3}))

    assert node.look(without).held() == {("GPU-0", "", ""): "not_supported"}
    assert node.look().held() == {}
    assert node.look(seconds=30.0).held() == {}


def test_rows_without_sizes_tie_and_say_no_size(node: GpuNode) -> None:
    """WSL, vGPU.  A stranger among them is told again and again, or the card would seem to be ours alone."""
    node.tree.add(500, "python3 train.py")
    node.look(answer(card(0, [(100, None), (500, None)])))
    first = node.held()
    node.look()

    assert first == {("GPU-0", "vllm-8000", "TP0"): "not_supported", ("GPU-0", "", ""): "not_supported"}
    assert node.held() == {("GPU-0", "", ""): "not_supported"}
    assert node.uses == [GpuUse("GPU-0", 100)]


def test_one_row_without_a_size_makes_no_partial_sum(node: GpuNode) -> None:
    node.tree.add(200, "helper", ppid=100)
    node.look(answer(card(0, [(100, 75 * GIB), (200, None)])))

    assert node.held() == {("GPU-0", "vllm-8000", "TP0"): "not_supported"}


def test_an_empty_card_has_nobody_and_nothing_of_nobody(node: GpuNode) -> None:
    node.look(answer(card(0, values={**VALUES, "memory_used": 4 << 20, "utilization": 1.0})))

    assert (node.held(), node.uses, node.unowned()) == ({}, [], 0.0)


# --- cards that are split, or share their memory with the system -------------------------------------------


def test_the_processes_of_a_split_card_are_on_its_instances(node: GpuNode) -> None:
    whole = card(0, None, mig="enabled", codes={"utilization": 3, "memory_used": 4}, values={"power": 100.0})
    node.look(answer(whole, instance(0, 0, [(100, 8 * GIB)]), instance(0, 1, [(101, 8 * GIB)])))

    assert node.held() == {("MIG-0-0", "vllm-8000", "TP0"): 8 * GIB, ("MIG-0-1", "vllm-8000", "TP1"): 8 * GIB}
    assert node.uses == [GpuUse("MIG-0-0", 100), GpuUse("MIG-0-1", 101)]
    assert {labels[0]: labels[6] for labels in node.series("gpu_info")} == {
        "GPU-0": "enabled",
        "MIG-0-0": "instance",
        "MIG-0-1": "instance",
    }
    assert {labels[0] for labels in node.series("gpu_unowned_memory_bytes")} == {"MIG-0-0", "MIG-0-1"}


def test_a_card_that_is_split_later_has_no_processes_of_its_own_any_more(node: GpuNode) -> None:
    node.look()
    node.look(answer(card(0, None, mig="enabled"), instance(0, 0, [(100, 8 * GIB)])), seconds=30.0)

    assert set(node.uses) == {GpuUse("MIG-0-0", 100), GpuUse("GPU-1", 101)}
    assert ("GPU-0", "vllm-8000", "TP0") not in node.held()
    assert node.unowned(0) == "nothing"


def test_an_instance_that_was_removed_is_not_lost(node: GpuNode) -> None:
    whole = card(0, None, mig="enabled")
    node.look(answer(whole, instance(0, 0), instance(0, 1)))
    node.look(answer(whole, instance(0, 1)))

    assert lost(node) == {"GPU-0": 0.0, "MIG-0-1": 0.0}


def test_an_instance_is_lost_with_its_card(node: GpuNode) -> None:
    whole = card(0, None, mig="enabled")
    node.look(answer(whole, instance(0, 0, [(100, GIB)]), card(1)))
    node.look(answer(silent(0, 15), card(1), lost=("GPU-0",)))

    assert lost(node) == {"GPU-0": 1.0, "MIG-0-0": 1.0, "GPU-1": 0.0}
    assert node.uses == [GpuUse("MIG-0-0", 100)]


def test_a_fault_of_a_split_card_is_the_card_s(node: GpuNode) -> None:
    node.kernel.faults = [Xid("0000:10:00.0", 43, None, 1.0)]
    node.look(answer(instance(0, 0), card(0, None, mig="enabled"), instance(0, 1)))

    assert node.series("gpu_xid_errors_total") == {("GPU-0", "43"): 1}


# --- the end -----------------------------------------------------------------------------------------------


def test_cards_whose_address_is_not_told_are_kept_apart(node: GpuNode) -> None:
    first, second = card(0, pci=""), card(1, pci="", mig="enabled")
    part = instance(1, 0, pci="")
    node.kernel.reason = "permission"
    node.look(answer(first, second, part, xids=(("GPU-0", 79),)))

    assert node.series("gpu_xid_errors_total")["GPU-0", "79"] == 1
    node.look(answer(first, silent(1, 999), part))
    assert lost(node)["GPU-1"] == "error"
    node.look(answer(first, silent(1, 15), lost=("GPU-1",)))
    assert lost(node) == {"GPU-0": 0.0, "GPU-1": 1.0, "MIG-1-0": 1.0}


def test_close_gives_everything_back(node: GpuNode) -> None:
    node.source.close()

    assert node.driver.closed
    assert node.kernel.closed
