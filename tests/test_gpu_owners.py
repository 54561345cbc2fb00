"""Whose processes are on a card, and memory that nobody holds: by PIDs of a tree that looks like /proc."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_node import GIB, VALUES, GpuNode, Rows, answer, card
from stallwatch.model import GpuUse, Process, ProcessId, Reading
from stallwatch.sources.gpus.nvml_child import Answer

RANK = {"TP0": 100}
LISTS = 30.0
"""Seconds between process lists."""


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    """One server with one rank."""
    node = GpuNode(tmp_path)
    node.serve("vllm-8000", RANK)
    return node


def says(rows: Rows, used: int | None = None, name: str = "NVIDIA H100 80GB HBM3") -> Answer:
    """One card with so much in use; by default what the rows hold and 100 MiB."""
    total = sum(size or 0 for _, size in rows) + (100 << 20) if used is None else used
    return answer(card(0, rows, values={**VALUES, "memory_used": total}, name=name))


def lists(node: GpuNode, number: int, told: Answer | None = None) -> list[float | str | None]:
    """What of so many lists is unowned."""
    return [node.look(told, LISTS).unowned() for _ in range(number)]


# --- whose it is -------------------------------------------------------------------------------------------


def test_a_rank_s_memory_is_the_rank_s(node: GpuNode) -> None:
    node.look(says([(100, 70 * GIB)]))

    assert node.held() == {("GPU-0", "vllm-8000", "TP0"): 70 * GIB}
    assert node.uses == [GpuUse("GPU-0", 100)]


def test_two_tenants_are_seen_as_two(node: GpuNode) -> None:
    node.serve("vllm-9000", {"TP0": 300, "main": 301, "detokenizer": 302})
    node.tree.add(500, "python3 train.py")
    node.tree.add(501, "python3 train.py")
    rows = [(100, 30 * GIB), (300, 20 * GIB), (301, GIB), (302, GIB), (500, 5 * GIB), (501, 5 * GIB)]
    node.look(says(rows))

    assert node.held() == {
        ("GPU-0", "vllm-8000", "TP0"): 30 * GIB,
        ("GPU-0", "vllm-9000", "TP0"): 20 * GIB,
        ("GPU-0", "vllm-9000", "frontend"): 2 * GIB,
        ("GPU-0", "", ""): 10 * GIB,
    }
    assert {use.pid for use in node.uses} == {100, 300, 301, 302}
    assert node.unowned() == 0.0


def test_what_a_rank_s_child_holds_is_the_rank_s_and_an_orphan_s_is_not(node: GpuNode) -> None:
    node.tree.add(200, "sh", ppid=100)
    node.tree.add(201, "python3 helper.py", ppid=200)
    node.tree.add(202, "python3 orphan.py", ppid=1)
    node.look(says([(100, 70 * GIB), (201, GIB), (202, GIB)]))

    assert node.held() == {("GPU-0", "vllm-8000", "TP0"): 71 * GIB, ("GPU-0", "", ""): GIB}
    assert node.uses == [GpuUse("GPU-0", 100)]


def test_a_loop_of_parents_ends(node: GpuNode) -> None:
    node.tree.add(200, "a", ppid=201)
    node.tree.add(201, "b", ppid=200)
    node.look(says([(200, GIB)]))

    assert node.held() == {("GPU-0", "", ""): GIB}


def test_a_server_that_is_found_later_has_its_memory_without_a_new_list(node: GpuNode) -> None:
    found = node.servers.pop()
    stranger = node.look(says([(100, 70 * GIB)])).held()
    node.servers.append(found)
    known = node.look().held()

    assert stranger == {("GPU-0", "", ""): 70 * GIB}
    assert known == {("GPU-0", "vllm-8000", "TP0"): 70 * GIB, ("GPU-0", "", ""): "vanished"}
    assert node.look().held() == {("GPU-0", "vllm-8000", "TP0"): 70 * GIB}


def test_a_process_that_ended_since_the_list_holds_nothing(node: GpuNode) -> None:
    node.look(says([(100, 70 * GIB)]))
    node.servers.clear()
    node.tree.end(100)

    assert (node.look().held(), node.uses) == ({("GPU-0", "vllm-8000", "TP0"): "vanished"}, [])
    assert node.look().held() == {}


def test_a_rank_s_child_that_ended_since_the_list_holds_nothing(node: GpuNode) -> None:
    """What is known of ranks is kept; of others /proc is asked at every look."""
    node.tree.add(300, "worker", comm="python3", ppid=100)
    node.look(says([(100, 70 * GIB), (300, GIB)]))
    assert node.look().held() == {("GPU-0", "vllm-8000", "TP0"): 71 * GIB}
    node.tree.end(300)

    assert node.look().held() == {("GPU-0", "vllm-8000", "TP0"): 70 * GIB}


def test_whose_the_ranks_are_is_worked_out_anew_with_a_list_and_with_a_server_only(node: GpuNode) -> None:
    def joined() -> object:
        return node.look().source._joined

    node.look(says([(100, 70 * GIB)]))
    first = joined()
    assert joined() is first
    node.look(says([(100, 60 * GIB)]), LISTS)
    assert node.held() == {("GPU-0", "vllm-8000", "TP0"): 60 * GIB}
    second = joined()
    assert second is not first
    node.serve("vllm-9000", {"TP0": 300})
    assert joined() is not second


def test_while_a_stranger_is_on_a_card_it_is_looked_at_every_time(node: GpuNode) -> None:
    node.tree.add(500, "python3 train.py")
    node.look(says([(100, 70 * GIB), (500, GIB)]))

    assert node.look().source._joined is not node.look().source._joined


def test_memory_that_did_not_change_is_told_by_the_very_same_readings_also_with_a_new_list(node: GpuNode) -> None:
    def told() -> list[Reading]:
        names = ("gpu_process_memory_bytes", "gpu_unowned_memory_bytes")
        return [reading for reading in node.look(seconds=LISTS).found if reading.signal.name in names]

    node.look(says([(100, 70 * GIB)]))
    first, second = told(), told()
    node.look(says([(100, 71 * GIB)]))
    third = told()

    assert [before is after for before, after in zip(first, second, strict=True)] == [True, True]
    assert [before is after for before, after in zip(first, third, strict=True)] == [False, True]


@pytest.mark.parametrize("is_child", [False, True])
def test_whoever_has_the_pid_of_a_dead_rank_is_a_stranger(node: GpuNode, is_child: bool) -> None:
    node.tree.replace(100, "train.py", started=900.0)
    node.tree.add(300, "worker", comm="python3", ppid=100)
    told = says([(300 if is_child else 100, 70 * GIB)])

    assert lists(node, 8, told)[-1] == 0.0  # it lives, so its memory is not nobody's
    assert (node.held(), node.uses) == ({("GPU-0", "", ""): 70 * GIB}, [])


# --- PIDs of another namespace -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[(4711, 70 * GIB)], [(4711, 70 * GIB), (4712, GIB)]])
def test_without_the_host_s_pids_nobody_is_found_and_nothing_is_called_nobody_s(tmp_path: Path, rows: Rows) -> None:
    node = GpuNode(tmp_path, blind=True)
    node.serve("vllm-8000", RANK)

    assert lists(node, 3, says(rows, 76 * GIB)) == ["namespace"] * 3
    assert node.held() == {("GPU-0", "", ""): "namespace"}
    assert node.uses == []
    assert node.value("gpu_memory_used_bytes", "GPU-0") == 76 * GIB


def test_in_the_server_s_own_container_its_processes_are_found(tmp_path: Path) -> None:
    """The driver translates PIDs; whoever is not seen may live elsewhere."""
    node = GpuNode(tmp_path, blind=True)
    node.serve("vllm-8000", RANK)
    node.look(says([(100, 70 * GIB), (4711, GIB)]))

    assert node.held() == {("GPU-0", "vllm-8000", "TP0"): 70 * GIB, ("GPU-0", "", ""): GIB}
    assert node.uses == [GpuUse("GPU-0", 100)]
    assert lists(node, 3) == ["namespace"] * 3


def test_an_empty_card_is_not_called_free_by_who_does_not_see_all(tmp_path: Path) -> None:
    node = GpuNode(tmp_path, blind=True)

    assert lists(node, 3, says([], 70 * GIB)) == ["namespace"] * 3
    assert node.held() == {}


def test_processes_that_are_hidden_are_a_matter_of_rights(tmp_path: Path) -> None:
    """hidepid: not even the first process is seen."""
    node = GpuNode(tmp_path, blind=True)
    node.tree.end(1)
    node.look(says([(4711, GIB)]))

    assert node.held() == {("GPU-0", "", ""): "permission"}


def test_pids_of_an_inner_namespace_are_found_by_nspid(tmp_path: Path) -> None:
    """The host's /proc is mounted, and the driver gives the PIDs of the server's pod, that we are in."""
    node = GpuNode(tmp_path, mounted=True)
    node.serve("vllm-8000", {"TP0": 100, "TP1": 101})
    node.tree.change(100, inner_pid=7)
    node.tree.change(101, inner_pid=8)
    told = answer(card(0, [(7, 70 * GIB), (9, GIB)]), card(1, [(8, 70 * GIB)]))
    node.look(told)

    assert node.uses == [GpuUse("GPU-0", 100), GpuUse("GPU-1", 101)]
    assert node.held() == {
        ("GPU-0", "vllm-8000", "TP0"): 70 * GIB,
        ("GPU-0", "", ""): GIB,
        ("GPU-1", "vllm-8000", "TP1"): 70 * GIB,
    }
    assert lists(node, 3) == ["namespace"] * 3


def test_the_same_inner_pid_in_two_containers_says_nothing(tmp_path: Path) -> None:
    node = GpuNode(tmp_path, mounted=True)
    node.serve("a", {"TP0": 100})
    node.serve("b", {"TP0": 101})
    node.tree.change(100, inner_pid=7)
    node.tree.change(101, inner_pid=7)
    node.look(says([(7, GIB)]))

    assert (node.uses, node.held()) == ([], {("GPU-0", "", ""): "namespace"})


def test_where_a_pid_is_found_as_it_stands_no_inner_one_is_looked_for(node: GpuNode) -> None:
    """A stranger with PID 7 is not the rank that is 7 in its container."""
    node.tree.change(100, inner_pid=7)
    node.tree.add(7, "python3 train.py")
    node.look(says([(7, GIB)]))

    assert (node.uses, node.held()) == ([], {("GPU-0", "", ""): GIB})


def test_a_thread_of_the_kernel_is_on_no_card(tmp_path: Path) -> None:
    """PID 2 of a pod's namespace is not the host's."""
    node = GpuNode(tmp_path, mounted=True)
    node.serve("vllm-8000", RANK)
    node.tree.change(100, inner_pid=2)
    node.look(says([(2, 70 * GIB)]))

    assert node.uses == [GpuUse("GPU-0", 100)]


# --- memory that nobody holds ------------------------------------------------------------------------------


def test_what_is_listed_for_a_pid_that_is_gone_is_nobody_s_after_the_teardown(node: GpuNode) -> None:
    rows = [(100, 10 * GIB), (666, 60 * GIB)]

    assert lists(node, 3, says(rows)) == [0.0, 60 * GIB, 60 * GIB]
    assert node.held() == {("GPU-0", "vllm-8000", "TP0"): 10 * GIB}
    assert node.look(says(rows)).unowned() == 60 * GIB  # repeated between the lists
    assert lists(node, 1, says([(100, 10 * GIB)])) == [0.0]


def test_a_teardown_that_ends_in_time_was_no_leak(node: GpuNode) -> None:
    assert lists(node, 1, says([(666, 60 * GIB)])) == [0.0]
    assert lists(node, 3, says([])) == [0.0, 0.0, 0.0]


def test_a_dead_rank_of_ours_leaves_its_memory(node: GpuNode) -> None:
    node.look(says([(100, 70 * GIB)]))
    node.servers.clear()
    node.tree.end(100)

    assert lists(node, 2) == [0.0, 70 * GIB]
    assert node.held() == {}  # said at the first of them


def test_a_zombie_holds_nothing_but_one_whose_threads_live_does(node: GpuNode) -> None:
    node.tree.add(200, "dead", state="Z", threads=1)
    node.tree.add(201, "dying", state="Z", threads=4)

    assert lists(node, 2, says([(200, 5 * GIB), (201, 7 * GIB)])) == [0.0, 5 * GIB]
    assert node.held() == {("GPU-0", "", ""): 7 * GIB}


def test_of_a_gone_pid_without_a_size_it_is_not_known(node: GpuNode) -> None:
    assert lists(node, 2, says([(666, None)])) == [0.0, "not_supported"]


def test_lists_that_come_too_often_prove_nothing_sooner(node: GpuNode) -> None:
    found = []
    for _ in range(7):
        node.source._lists_due = 0.0
        found.append(node.look(says([(666, 60 * GIB)])).unowned())

    assert found == [0.0] * 6 + [60 * GIB]


def test_the_driver_of_a_mounted_tree_has_to_show_first_whose_pids_it_gives(tmp_path: Path) -> None:
    node = GpuNode(tmp_path, mounted=True)
    node.serve("vllm-8000", RANK)

    assert lists(node, 3, says([(666, 60 * GIB)])) == ["namespace"] * 3
    assert lists(node, 3, says([(100, GIB), (666, 60 * GIB)])) == [0.0, 60 * GIB, 60 * GIB]
    assert lists(node, 1, says([(666, 60 * GIB)])) == [60 * GIB]


def test_what_no_list_has_is_nobody_s_while_nobody_is_there(node: GpuNode) -> None:
    """A killed peer-to-peer hang: no process, and the memory stays."""
    node.look(says([], 0))

    assert lists(node, 3, says([], 70 * GIB)) == [0.0, 70 * GIB, 70 * GIB]
    assert lists(node, 2, says([(100, GIB)], 71 * GIB)) == [70 * GIB, 70 * GIB]  # the restart that will fail
    assert lists(node, 2, says([(100, 31 * GIB)], 71 * GIB)) == [40 * GIB, 40 * GIB]
    assert lists(node, 1, says([(100, 71 * GIB)], 71 * GIB)) == [0.0]


def test_a_leak_from_before_we_looked_is_seen_but_for_what_may_be_the_reserve(node: GpuNode) -> None:
    assert lists(node, 2, says([], 70 * GIB)) == [0.0, 69 * GIB]


@pytest.mark.parametrize("used", [4 << 20, 570 << 20, 700 << 20, (1 << 30) - 1])
def test_the_driver_s_reserve_and_small_change_are_no_leak(node: GpuNode, used: int) -> None:
    assert lists(node, 4, says([], used)) == [0.0] * 4
    assert lists(node, 2, says([], used + GIB // 2)) == [0.0] * 2


def test_memory_the_driver_does_not_account_to_its_process_is_nobody_s_neither(node: GpuNode) -> None:
    """cudaMallocManaged: 10 GB allocated, 1 GB listed.  Not known, then; and never zero."""
    node.look(says([(100, GIB)], 10 * GIB))
    first = node.unowned()
    later = [node.look(None, LISTS).unowned() for _ in range(3)]

    assert first == "not_supported"
    assert set(later) == {"nothing"}


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA GB10"])
def test_memory_in_use_that_is_partly_the_system_s_is_no_leak(node: GpuNode, name: str) -> None:
    assert lists(node, 3, says([], 70 * GIB, name=name)) == [0.0] * 3
    assert lists(node, 2, says([(666, 60 * GIB)], 70 * GIB, name=name)) == [0.0, 60 * GIB]


@pytest.mark.parametrize(
    ("device", "comm", "expected"),
    [
        ("/dev/nvidia-uvm", "python3", [0.0, "not_supported"]),
        ("/dev/nvidia-modeset", "Xorg", [0.0, "not_supported"]),
        ("/dev/nvidia-modeset", "nvidia-persiste", [0.0, 0.0, 70 * GIB]),
        ("/dev/nvidia0", "dcgm-exporter", [0.0, 0.0, 70 * GIB]),
        ("/dev/null", "python3", [0.0, 0.0, 70 * GIB]),
    ],
)
def test_what_an_unlisted_process_may_hold_is_not_nobody_s(
    node: GpuNode, device: str, comm: str, expected: list[float | str]
) -> None:
    """A desktop holds memory and is on no list of compute processes; who only watches cards holds none."""
    node.tree.add(300, "x", comm=comm)
    node.tree.redirect(300, 5, device)
    node.look(says([], 0))

    assert [0.0, *lists(node, len(expected) - 1, says([], 70 * GIB))] == expected


def test_who_does_not_let_his_files_be_seen_may_hold_it(node: GpuNode) -> None:
    node.tree.add(300, "x")
    node.tree.folder(300).joinpath("fd").rmdir()
    node.tree.folder(300).joinpath("fd").write_text("")  # no directory: root may read any

    node.look(says([], 0))

    assert lists(node, 1, says([], 70 * GIB)) == ["permission"]


def test_a_list_that_was_missing_once_does_not_begin_the_teardown_anew(node: GpuNode) -> None:
    rows = [(666, 60 * GIB)]
    node.look(says(rows))
    node.look(answer(card(0, None, codes={"processes": 999})), LISTS)

    assert lists(node, 1, says(rows)) == [60 * GIB]


def test_the_identity_of_a_listed_pid_is_that_of_the_list(node: GpuNode) -> None:
    """The PID of a process that ended goes to a new rank: what the old list says is not the new rank's."""
    node.look(says([(100, 70 * GIB)]))
    node.tree.replace(100, "worker", started=900.0)
    node.servers[0] = replace(node.servers[0], processes=(Process(ProcessId(100, 90000), "TP0", 1),))

    assert (node.look().held(), node.uses) == ({("GPU-0", "vllm-8000", "TP0"): "vanished"}, [])
