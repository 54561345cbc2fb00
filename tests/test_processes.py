"""Finding servers and naming their ranks, on a folder that looks like /proc."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from proc_tree import BOOT
from process_node import INDUCTOR, SPAWN, TRACKER, Node, configured
from stallwatch.config import Config, ConfiguredServer, Discovery, Limits, Match
from stallwatch.model import GpuUse, ProcessId, RankName, Reading
from stallwatch.sources.procfs import KERNEL_THREAD, ProcFs


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.source.close()


# --- finding -----------------------------------------------------------------------------------------------


def test_vllm_is_found_with_its_engine_and_ranks(node: Node) -> None:
    node.vllm(command="vllm serve /hub/org/m --port 9000 -tp 2 --node-rank 1 --nnodes 2 --master-addr a")
    node.tree.add(50, TRACKER, ppid=100)
    node.tree.add(51, "cron", comm="cron")

    server = node.look().server

    assert (server.name, server.framework, server.role) == ("vllm-9000", "vllm", "server")
    assert (server.model, server.tensor_parallel, server.nnodes, server.node_rank) == ("org/m", 2, 2, 1)
    assert (server.ports, server.starts, server.started_at) == ((9000,), 1, BOOT + 100.0)
    assert node.ranks == {100: "main", 101: "engine", 110: "TP0", 111: "TP1"}
    assert node.alive() == {"engine": 1.0, "TP0": 1.0, "TP1": 1.0}
    assert node.value("server_alive") == 1.0
    assert {r.labels[1:] for r in node.readings("rank_info")} == {
        ("engine", "101", ""),
        ("TP0", "110", ""),
        ("TP1", "111", ""),
    }


def test_a_rank_says_which_cards_it_uses_and_one_that_uses_none_says_so(node: Node) -> None:
    node.vllm(ranks=3)
    node.gpu_uses = (GpuUse("GPU-a", 110), GpuUse("GPU-b", 110), GpuUse("GPU-c", 111), GpuUse("GPU-d", 999))

    node.look()

    assert {r.labels[1:] for r in node.readings("rank_info")} == {
        ("engine", "101", ""),
        ("TP0", "110", "GPU-a"),
        ("TP0", "110", "GPU-b"),
        ("TP1", "111", "GPU-c"),
        ("TP2", "112", ""),
    }


def test_sglang_is_found_below_its_controller(node: Node) -> None:
    node.tree.add(100, "python3 -m sglang.launch_server --model-path m --dp 2 --tp 2")
    node.tree.add(101, "sglang::data_parallel_controller", comm="sglang::data_pa", ppid=100)
    node.tree.add(102, "sglang::detokenizer", comm="sglang::detoken", ppid=100)
    node.tree.add(110, "sglang::scheduler_DP0_TP0", comm="sglang::schedul", ppid=101)
    node.tree.add(111, "sglang::scheduler_DP1_TP1", comm="sglang::schedul", ppid=101)

    server = node.look().server

    assert (server.name, server.ports, server.ranks_expected) == ("sglang-30000", (30000,), 4)
    assert node.ranks == {100: "main", 101: "controller", 102: "detokenizer", 110: "DP0-TP0", 111: "DP1-TP1"}


def test_attention_only_data_parallelism_of_sglang_has_the_ranks_of_tensor_parallelism(node: Node) -> None:
    node.tree.add(100, "python3 -m sglang.launch_server --model-path m --dp-size 4 --tp 4 --enable-dp-attention")
    node.tree.add(101, "sglang::data_parallel_controller", comm="sglang::data_pa", ppid=100)
    for rank in range(4):
        node.tree.add(110 + rank, f"sglang::scheduler_DP{rank}_TP{rank}", comm="sglang::schedul", ppid=101)

    assert node.look().server.ranks_expected == len(node.server.ranks) == 4


def test_a_node_of_a_vllm_group_expects_the_copies_that_run_on_it(node: Node) -> None:
    node.tree.add(100, "vllm serve m -tp 2 -dp 4 -dpl 2 -dpa head --headless --data-parallel-start-rank 2", comm="vllm")
    for copy in (2, 3):
        node.tree.add(110 + 10 * copy, f"VLLM::EngineCore_DP{copy}", comm="VLLM::EngineCor", ppid=100)
        for rank in (0, 1):
            pid = 111 + 10 * copy + rank
            title = f"VLLM::Worker_DP{copy}_TP{rank}"
            node.tree.add(pid, title, comm="VLLM::Worker_DP", ppid=110 + 10 * copy)

    server = node.look().server

    assert server.ranks_expected == len(server.ranks) == 4
    assert (server.nnodes, server.node_rank, server.ports, len(server.group)) == (2, 1, (), 12)


def test_the_server_is_the_program_and_not_the_shell_that_holds_its_command(node: Node) -> None:
    node.tree.add(90, ("bash", "-c", "vllm serve org/m --port 1"), comm="bash")
    node.vllm(command="vllm serve org/m --port 1")
    node.tree.change(100, ppid=90)

    assert node.look().server.root.pid == 100


@pytest.mark.parametrize(
    "between",
    [
        (),
        (("bash", "-c", "while true; do vllm serve org/m; done"),),
        (("/usr/bin/python3", "/usr/bin/supervisord", "-n"), ("bash", "-c", "exec vllm serve org/m")),
        (("tini", "--", "vllm", "serve", "org/m"),),
        (("tini", "--", "sh", "-c", "vllm serve org/m"), ("sh", "-c", "vllm serve org/m")),
        (("timeout", "1h", "vllm", "serve", "org/m"), ("env", "A=b", "vllm", "serve", "org/m")),
    ],
)
def test_whoever_starts_a_server_again_is_seen_through(node: Node, between: tuple[tuple[str, ...], ...]) -> None:
    """systemd, a shell's loop, supervisord, a container's init: starts of one name are counted."""
    above = 1
    for number, argv in enumerate(between):
        node.tree.add(90 + number, argv, comm=argv[0].rpartition("/")[2][:15], ppid=above)
        above = 90 + number
    found = []
    for start in range(3):
        pid = 100 + 50 * start
        node.tree.add(pid, "vllm serve org/m", comm="vllm", ppid=above, started=100.0 + 60 * start)
        server = node.look().server
        found.append((server.name, server.starts, server.root.pid))
        node.tree.end(pid)
        node.look(2.0)
        node.look(2.0)

    assert found == [("vllm-8000", 1, 100), ("vllm-8000", 2, 150), ("vllm-8000", 3, 200)]


def test_a_program_whose_main_thread_pytorch_renamed_is_found(node: Node) -> None:
    """PyTorch 2.4 names the thread that imports it, and with it the process."""
    node.tree.add(100, "python3 -m sglang.launch_server --tp 1", comm="pt_main_thread")

    assert node.look().names == ["sglang-30000"]


def test_a_launcher_that_becomes_the_server_is_found(node: Node) -> None:
    node.tree.add(100, "python3 launcher.py")
    before = node.look().names
    node.tree.change(100, "python3 -m sglang.launch_server", stack=9)

    assert (before, node.look().names) == ([], ["sglang-30000"])


def test_a_server_whose_command_line_was_not_read_in_time_is_not_named_after_its_ranks_alone(node: Node) -> None:
    """A busy machine: the helper that reads command lines starts too late, once."""
    node.vllm()
    node.reads.reasons[100] = "timeout"
    first = node.look().names
    del node.reads.reasons[100]

    assert (first, node.look().names) == ([], ["vllm-8000"])


def test_a_server_whose_command_line_cannot_be_read_is_known_by_its_ranks(node: Node) -> None:
    """Its first process holds its memory lock: it is found all the same, a look later."""
    node.vllm()
    node.reads.reasons[100] = "timeout"

    assert (node.look().names, node.look().names) == ([], ["vllm-1"])
    assert set(node.ranks.values()) == {"main", "engine", "TP0", "TP1"}


def test_the_helper_stays_while_there_are_command_lines_to_read_and_rests_then(node: Node) -> None:
    """A start brings new processes at each look; a helper of its own for each look is late on a busy machine."""
    node.vllm()
    rests = []
    for looked in range(4):
        if looked == 1:
            node.tree.add(120, SPAWN, ppid=101)
        node.look()
        rests.append(node.reads.rests)

    assert rests == [0, 0, 1, 2]


def test_an_engine_in_a_script_is_embedded_in_that_script(node: Node) -> None:
    node.tree.add(80, "bash", comm="bash")
    node.tree.add(100, "python3 batch.py --secret x", ppid=80)
    node.tree.add(101, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=100)
    node.tree.add(110, "VLLM::Worker_TP0", comm="VLLM::Worker_TP", ppid=101)
    node.tree.add(111, "VLLM::Worker_TP1", comm="VLLM::Worker_TP", ppid=101)

    server = node.look().server

    assert (server.name, server.role, server.root.pid, server.ports) == ("vllm-1", "embedded", 100, ())
    assert node.ranks == {100: "main", 101: "engine", 110: "TP0", 111: "TP1"}


def test_an_engine_in_a_notebook_is_embedded_in_its_kernel(node: Node) -> None:
    node.tree.add(90, "python3 -m jupyterlab", comm="jupyter-lab")
    node.tree.add(100, "python3 -m ipykernel_launcher -f k.json", ppid=90)
    node.tree.add(101, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=100)

    server = node.look().server

    assert (server.role, server.root.pid, node.ranks) == ("embedded", 100, {100: "main", 101: "engine"})


def test_a_script_that_is_the_first_process_of_its_container_is_found(node: Node) -> None:
    node.tree.add(1, "python3 batch.py", ppid=0)
    node.tree.add(101, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=1)

    assert node.look().server.root.pid == 1


def test_a_server_that_is_the_first_process_keeps_the_engine_that_comes_later(node: Node) -> None:
    node.tree.add(1, "vllm serve org/m", comm="vllm", ppid=0)
    node.look()
    node.tree.add(101, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=1)

    assert node.look().names == ["vllm-8000"]
    assert node.ranks == {1: "main", 101: "TP0"}


@pytest.mark.parametrize(("ppid", "comm"), [(1, "systemd"), (70, "containerd-shim"), (70, "bash")])
def test_an_engine_whose_program_is_gone_is_nobodys_server(node: Node, ppid: int, comm: str) -> None:
    node.tree.add(ppid, "x", comm=comm, ppid=0)
    node.tree.add(101, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=ppid)

    assert node.look().names == []


def test_what_is_excluded_is_not_found_by_its_engine_either(tmp_path: Path) -> None:
    node = configured(tmp_path, discovery=Discovery(exclude=(re.compile("--smoke-test"),)))
    node.vllm(command="vllm serve org/m --smoke-test")

    assert node.look().names == []


def test_patterns_of_the_configuration_see_the_beginning_of_a_command_line(tmp_path: Path) -> None:
    far = "x" * 5000
    node = configured(
        tmp_path,
        ConfiguredServer("mine", Match(command=re.compile("needle"))),
        discovery=Discovery(exclude=(re.compile("secret"),)),
    )
    node.tree.add(100, f"vllm serve m --port 1 {far} secret needle", comm="vllm")
    node.tree.add(200, f"vllm serve needle --port 2 {far}", comm="vllm", started=200.0)
    node.tree.add(300, f"vllm serve secret --port 3 {far}", comm="vllm", started=300.0)

    assert set(node.look().names) == {"vllm-1", "mine"}


@pytest.mark.parametrize("number", ["\N{SUPERSCRIPT TWO}", "9" * 5000])
def test_a_foreign_word_that_is_no_number_fails_nothing(tmp_path: Path, number: str) -> None:
    node = configured(tmp_path, discovery=Discovery(users=(number, str(os.geteuid()))))
    node.tree.add(100, f"vllm serve m --port {number} -tp {number}", comm="vllm")
    (node.tree.root / "\N{SUPERSCRIPT TWO}").mkdir()

    assert node.look().names == ["vllm-8000"]


def test_only_wanted_frameworks_and_users_are_discovered(tmp_path: Path) -> None:
    here = str(os.geteuid())
    for discovery, expected in (
        (Discovery(), ["sglang-30000", "vllm-8000"]),
        (Discovery(frameworks=("sglang",)), ["sglang-30000"]),
        (Discovery(users=(here,)), ["sglang-30000", "vllm-8000"]),
        (Discovery(users=("4294967", "no-such-user")), []),
        (Discovery(enabled=False), []),
    ):
        node = configured(tmp_path / str(id(discovery)), discovery=discovery)
        node.vllm()
        node.tree.add(200, "python3 -m sglang.launch_server")
        assert node.look().names == expected


def test_a_user_is_named_as_on_this_machine(tmp_path: Path) -> None:
    node = configured(tmp_path, discovery=Discovery(users=("root",)))
    node.vllm()

    assert node.look().names == (["vllm-8000"] if os.geteuid() == 0 else [])


def test_at_the_limit_further_servers_are_counted_once_each(tmp_path: Path) -> None:
    node = configured(tmp_path, limits=Limits(servers=1))
    node.vllm(100, command="vllm serve m --port 1")
    node.vllm(200, command="vllm serve m --port 2", started=200.0)
    node.look()
    node.look()

    assert node.names == ["vllm-1"]
    assert node.source.dropped_servers == 1


# --- names and starts --------------------------------------------------------------------------------------


def test_a_second_live_server_with_the_same_port_is_told_apart(node: Node) -> None:
    node.vllm(100)
    node.vllm(200, started=200.0)

    assert [(s.name, s.root.pid) for s in node.look().servers] == [("vllm-8000", 100), ("vllm-8000-2", 200)]


def test_the_place_is_part_of_the_name(node: Node) -> None:
    node.vllm(100, cgroup=f"0::/docker/{'4f' * 32}\n")
    node.vllm(200, cgroup="0::/system.slice/llm.service\n")
    node.vllm(300, cgroup="0::/slurm/uid_1/job_77/step_0\n")

    found = {s.root.pid: s for s in node.look().servers}

    assert {pid: s.name for pid, s in found.items()} == {
        100: "vllm-8000@4f4f4f4f4f4f",
        200: "vllm-8000@llm.service",
        300: "vllm-8000",
    }
    assert (found[100].container, found[200].unit, found[300].slurm_job) == ("4f4f4f4f4f4f", "llm.service", "77")


def test_a_restart_keeps_the_name_and_counts(node: Node) -> None:
    node.vllm(100)
    node.look()
    node.tree.end(100, 101, 110, 111)
    node.look()
    node.look()
    node.vllm(200, started=200.0)
    node.look()

    assert (node.server.name, node.server.starts, node.server.root.pid) == ("vllm-8000", 2, 200)
    assert node.value("server_starts_total") == 2
    assert node.value("server_start_timestamp_seconds") == BOOT + 200.0


def test_a_pid_that_is_used_again_between_two_looks_is_a_new_start(node: Node) -> None:
    node.tree.add(100, "vllm serve m", comm="vllm", cpu=50.0)
    node.look()
    node.tree.replace(100, "vllm serve m", comm="vllm", cpu=1.0, started=300.0)
    node.look()
    node.look()

    assert (node.server.starts, node.server.started_at) == (2, BOOT + 300.0)
    assert node.value("process_cpu_seconds_total", "frontend") == 1.0


def test_a_script_that_is_started_again_keeps_its_number(node: Node) -> None:
    for start in (1, 2, 3):
        node.tree.add(100 * start, "python3 batch.py", started=100.0 * start)
        node.tree.add(100 * start + 1, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=100 * start)
        node.look()
        assert (node.server.name, node.server.starts) == ("vllm-1", start)
        node.tree.end(100 * start, 100 * start + 1)
        node.look()
        node.look()


def test_what_an_earlier_start_left_behind_is_not_a_server_of_its_own(node: Node) -> None:
    node.vllm(100)
    node.look()
    node.tree.end(100)
    for pid in (101, 110, 111):
        node.tree.change(pid, ppid=1)
    node.tree.add(1, "init", comm="systemd", ppid=0)
    node.look()
    node.look()
    node.vllm(200, started=200.0)
    node.look()
    node.look()

    assert (node.names, node.server.root.pid) == (["vllm-8000"], 200)
    assert node.alive() == {"engine": 1.0, "TP0": 1.0, "TP1": 1.0}


def test_an_ended_server_is_known_as_gone_until_it_is_forgotten(node: Node) -> None:
    node.vllm()
    node.look()
    node.tree.end(100, 101, 110, 111)
    node.look()
    node.look()
    after_end = (node.servers, node.value("server_alive"))
    node.look(599.0)
    before_retention = node.value("server_alive")
    node.look(2.0)

    assert (after_end, before_retention) == (((), 0.0), 0.0)
    assert node.readings("server_alive") == []


def test_a_first_process_that_nobody_waits_for_is_no_new_start(node: Node) -> None:
    """In a container without an init a zombie stays for ever."""
    node.vllm()
    node.look()
    node.tree.end(101, 110, 111)
    node.tree.change(100, (), state="Z")
    for _ in range(3):
        node.look()
    node.look(700.0)
    node.look(40.0)

    assert node.servers == ()
    assert node.readings("server_starts_total") == []


# --- configured servers ------------------------------------------------------------------------------------


def test_a_server_is_found_by_its_command_and_not_by_a_shell_or_a_child_with_the_same(tmp_path: Path) -> None:
    match = Match(command=re.compile(r"my_server\.py"))
    node = configured(tmp_path, ConfiguredServer("mine", match, model="org/x", port=7000, labels={"team": "a"}))
    node.tree.add(90, ("sh", "-c", "python3 my_server.py"), comm="sh")
    node.tree.add(100, "python3 my_server.py", ppid=90)
    node.tree.add(101, "python3 my_server.py", ppid=100)

    server = node.look().server

    assert (server.name, server.framework, server.root.pid) == ("mine", "generic", 100)
    assert (server.model, server.ports, dict(server.labels)) == ("org/x", (7000,), {"team": "a"})
    assert node.ranks == {100: "main", 101: "worker"}


def test_a_program_that_is_no_python_is_found_by_its_command(tmp_path: Path) -> None:
    match = Match(command=re.compile("own-server"))
    node = configured(tmp_path, ConfiguredServer("llama", match))
    node.tree.add(100, "/opt/own-server -m x.gguf", comm="llama-server")

    assert node.look().server.root.pid == 100


def test_a_server_is_found_by_its_pid_file_below_the_root(tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(pid_file="/run/llm.pid")))
    node.tree.add(100, "own-server", comm="llama-server")
    before = node.look().server.starts
    (tmp_path / "run").mkdir()
    (tmp_path / "run/llm.pid").write_text("not yet")
    half = node.look().server.starts
    (tmp_path / "run/llm.pid").write_text("100\n")

    assert (before, half, node.look().server.root.pid) == (0, 0, 100)


@pytest.mark.parametrize("unit", ["llm.service", "llm"])
def test_a_server_is_found_by_its_unit(tmp_path: Path, unit: str) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(unit=unit)))
    node.tree.add(99, "x", comm="x", cgroup="0::/system.slice/other.service\n")
    node.tree.add(100, "x", comm="x", cgroup="0::/system.slice/llm.service\n")

    assert (node.look().server.root.pid, node.server.unit) == (100, "llm.service")


def test_a_server_is_found_by_its_container(tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(container="4f4f4f")))
    node.tree.add(99, "x", comm="x")
    node.tree.add(100, "x", comm="x", cgroup=f"0::/docker/{'4f' * 32}\n")

    assert node.look().server.root.pid == 100


def test_a_server_is_found_by_the_port_in_its_arguments(tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(port=8001), ranks=4))
    node.vllm(100, command="vllm serve m --port 8000")
    node.vllm(200, command="vllm serve m --port 8001")

    found = {server.name: server for server in node.look().servers}

    assert {name: server.root.pid for name, server in found.items()} == {"mine": 200, "vllm-8000": 100}
    assert (found["mine"].framework, found["mine"].ranks_expected) == ("vllm", 4)


def test_a_configured_server_that_never_came_is_known_with_no_start(tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(unit="llm"), framework="vllm", model="m"))

    server = node.look().server

    assert (server.name, server.framework, server.model, server.starts) == ("mine", "vllm", "m", 0)
    assert server.processes == ()
    assert node.value("server_starts_total") == 0


def test_a_configured_server_is_not_dropped_after_its_end(tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(unit="llm")))
    node.tree.add(100, "x", comm="x", cgroup="0::/system.slice/llm.service\n")
    node.look()
    node.tree.end(100)
    node.look(40.0)
    node.look()
    node.look(700.0)

    assert (node.names, node.server.processes) == (["mine"], ())
    assert node.value("server_starts_total") == 1


def test_the_first_match_is_the_oldest_process(tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(unit="llm")))
    node.tree.add(100, "x", comm="x", cgroup="0::/system.slice/llm.service\n", started=300.0)
    node.tree.add(101, "x", comm="x", cgroup="0::/system.slice/llm.service\n", started=200.0)

    assert node.look().server.root.pid == 101


def test_a_new_configuration_holds_from_the_next_look(node: Node) -> None:
    node.tree.add(100, "python3 my_server.py")
    before = node.look().names
    match = Match(command=re.compile(r"my_server"))
    node.source.configure(Config(servers=(ConfiguredServer("mine", match),)))

    assert (before, node.look().names, node.server.starts) == ([], ["mine"], 1)


# --- ranks and their names ---------------------------------------------------------------------------------


def test_titles_that_come_late_rename_and_the_front_ends_sums_never_fall(node: Node) -> None:
    node.tree.add(100, "vllm serve m -tp 2", comm="vllm", cpu=10.0)
    node.tree.add(101, SPAWN, ppid=100, cpu=1.0)
    node.tree.add(110, SPAWN, ppid=101, cpu=2.0)
    node.tree.add(111, SPAWN, ppid=101, cpu=3.0)
    seen = [node.look().ranks]
    sums = [node.value("process_cpu_seconds_total", "frontend")]
    for pid, title, comm in (
        (101, "VLLM::EngineCore", "VLLM::EngineCor"),
        (110, "VLLM::Worker", "VLLM::Worker"),
        (110, "VLLM::Worker_TP0", "VLLM::Worker_TP"),
        (111, "VLLM::Worker_TP1", "VLLM::Worker_TP"),
    ):
        node.tree.change(pid, title, comm=comm)
        seen.append(node.look().ranks)
        sums.append(node.value("process_cpu_seconds_total", "frontend"))

    assert [list(ranks.values()) for ranks in seen] == [
        ["main", "worker", "worker", "worker"],
        ["main", "engine", "worker", "worker"],
        ["main", "engine", "worker", "worker"],
        ["main", "engine", "TP0", "worker"],
        ["main", "engine", "TP0", "TP1"],
    ]
    assert sums == [16.0] * 5
    assert node.value("process_cpu_seconds_total", "TP1") == 3.0


def test_names_of_fifteen_bytes_are_told_apart_by_the_titles(node: Node) -> None:
    """The comm is cut: all ranks are called `VLLM::Worker_TP`."""
    node.vllm(ranks=12, command="vllm serve m -tp 12")

    assert sorted(rank for rank in node.look().ranks.values() if rank.startswith("TP")) == sorted(
        f"TP{number}" for number in range(12)
    )


def test_a_new_title_behind_the_same_cut_name_is_found_while_the_server_starts(node: Node) -> None:
    node.vllm()
    node.look()
    node.tree.change(111, "VLLM::Worker_TP7")
    early = node.look().ranks[111]
    late = node.look(30.0).ranks[111]
    node.ready = frozenset({"vllm-8000"})
    node.tree.change(111, "VLLM::Worker_TP8")
    node.look(30.0)

    assert (early, late, node.ranks[111]) == ("TP1", "TP7", "TP7")


def test_a_title_that_hangs_while_it_is_read_again_keeps_the_rank(node: Node) -> None:
    node.vllm()
    node.look()
    node.reads.reasons = dict.fromkeys((101, 110, 111), "timeout")

    assert node.look(31.0).ranks == {100: "main", 101: "engine", 110: "TP0", 111: "TP1"}
    assert [r.reason for r in node.readings("unidentified_processes") if r.value is None] == ["timeout"] * 3


def test_the_log_names_workers_without_a_title_by_their_inner_pid(node: Node) -> None:
    node.tree.add(100, "vllm serve m -tp 2", comm="vllm")
    node.tree.add(101, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=100)
    node.tree.add(110, "VLLM::Worker", comm="VLLM::Worker", ppid=101, inner_pid=33)
    node.tree.add(111, SPAWN, ppid=101, inner_pid=34)
    node.look()
    node.rank_names = (
        RankName("vllm-8000", 33, "TP0"),
        RankName("vllm-8000", 34, "TP1"),
        RankName("other", 34, "TP9"),
        RankName("vllm-8000", 100, "TP5"),
    )

    assert node.look().ranks == {100: "main", 101: "engine", 110: "TP0", 111: "TP1"}


def test_an_engine_that_runs_the_model_itself_is_the_only_rank(node: Node) -> None:
    node.vllm(ranks=0, command="vllm serve m")

    assert node.look().ranks == {100: "main", 101: "TP0"}
    assert node.alive() == {"TP0": 1.0}


def test_the_only_rank_counts_what_it_did_and_no_more(node: Node) -> None:
    """Its name differs from its title at every look; that is no reason to count it again."""
    node.vllm(ranks=0, command="vllm serve m", cpu=7.0, io={"read_bytes": 5})
    values = [(node.look().value("process_cpu_seconds_total", "TP0"),) for _ in range(4)]

    assert values == [(7.0,)] * 4
    assert node.value("process_storage_read_bytes_total", "TP0") == 5


def test_the_only_worker_of_an_engine_is_the_rank_and_not_the_engine(node: Node) -> None:
    node.vllm(ranks=0, command="vllm serve m")
    node.look()
    node.tree.add(110, "VLLM::Worker", comm="VLLM::Worker", ppid=101)

    assert node.look().ranks == {100: "main", 101: "engine", 110: "TP0"}


def test_engines_of_a_data_parallel_server_are_its_ranks(node: Node) -> None:
    node.tree.add(100, "vllm serve m -dp 2", comm="vllm")
    node.tree.add(101, "VLLM::EngineCore_DP0", comm="VLLM::EngineCor", ppid=100)
    node.tree.add(102, "VLLM::EngineCore_DP1", comm="VLLM::EngineCor", ppid=100)

    assert node.look().ranks == {100: "main", 101: "DP0", 102: "DP1"}


def test_forked_children_with_the_parents_command_become_what_their_titles_say(node: Node) -> None:
    """`LLM()` in a script forks; until it sets its title a child looks like the script."""
    node.tree.add(100, "python3 batch.py")
    node.tree.add(101, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=100)
    node.tree.add(110, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=101)
    node.tree.add(111, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=101)
    before = node.look().ranks
    node.tree.change(110, "VLLM::Worker_TP0", comm="VLLM::Worker_TP")
    node.tree.change(111, "VLLM::Worker_TP1", comm="VLLM::Worker_TP")

    assert before == {100: "main", 101: "engine", 110: "worker", 111: "worker"}
    assert node.look().ranks == {100: "main", 101: "engine", 110: "TP0", 111: "TP1"}


@pytest.mark.parametrize("parent", [101, 111])
def test_a_tool_that_still_shows_the_title_of_a_rank_or_engine_is_neither(node: Node, parent: int) -> None:
    """Between fork and exec `g++` looks like the rank that runs it; its end is nobody's death."""
    node.vllm()
    node.look()
    title = "VLLM::EngineCore" if parent == 101 else "VLLM::Worker_TP1"
    node.tree.add(120, title, comm=title[:15], ppid=parent, started=200.0)
    during = node.look().alive()
    node.tree.change(120, "g++ -c x.cpp", comm="g++", stack=7)
    compiling = node.look().value("server_child_processes", "compiler")
    node.tree.end(120)
    node.look()
    node.look()

    assert during == {"engine": 1.0, "TP0": 1.0, "TP1": 1.0}
    assert compiling == 1
    assert node.alive() == {"engine": 1.0, "TP0": 1.0, "TP1": 1.0}


def test_helpers_of_an_engine_are_no_members(node: Node) -> None:
    node.vllm()
    node.tree.add(50, TRACKER, ppid=100)
    node.tree.add(51, TRACKER, ppid=101)
    node.tree.add(52, INDUCTOR, ppid=101)
    node.tree.add(53, INDUCTOR, ppid=52)
    node.tree.add(54, "python3 -m vllm.model_executor.models.registry", ppid=100)
    node.tree.add(55, ("sh", "-c", "nvcc"), comm="sh", ppid=110)

    assert node.look().ranks == {100: "main", 101: "engine", 110: "TP0", 111: "TP1"}


def test_workers_that_come_and_go_are_forgotten(node: Node) -> None:
    node.vllm()
    for number in range(20):
        node.tree.add(200 + number, SPAWN, ppid=100, cpu=1.0)
        node.look()
        node.tree.end(200 + number)
    node.look()
    node.look()

    assert node.ranks == {100: "main", 101: "engine", 110: "TP0", 111: "TP1"}
    assert node.value("process_cpu_seconds_total", "frontend") == 20.0


def test_ranks_beyond_the_limit_are_left_out_and_counted_once_each(tmp_path: Path) -> None:
    node = configured(tmp_path, limits=Limits(ranks=2))
    node.vllm(ranks=9)
    node.look()
    node.look()

    assert node.ranks == {100: "main", 101: "engine", 110: "TP0", 111: "TP1"}
    assert node.source.dropped_ranks == 7
    node.tree.add(120, "VLLM::APIServer_1", comm="VLLM::APIServer", ppid=100)
    node.tree.add(121, "VLLM::APIServer_2", comm="VLLM::APIServer", ppid=100)
    node.look()
    assert set(node.ranks) == {100, 101, 110, 111, 120}
    assert node.source.dropped_ranks == 8


def test_a_title_that_makes_a_rank_of_another_process_does_not_pass_the_limit(node: Node, tmp_path: Path) -> None:
    node = configured(tmp_path / "limited", limits=Limits(ranks=2))
    node.vllm(ranks=2)
    node.tree.add(120, "VLLM::APIServer_1", comm="VLLM::APIServer", ppid=100)
    node.look()
    node.tree.change(120, "VLLM::Worker_TP7", comm="VLLM::Worker_TP")
    node.look()

    assert len([rank for rank in node.ranks.values() if rank.startswith("TP")]) == 2
    assert node.source.dropped_ranks == 1


def test_names_of_dead_ranks_are_limited_and_the_latest_death_is_known(tmp_path: Path) -> None:
    node = configured(tmp_path, limits=Limits(ranks=2))
    node.vllm(ranks=1)
    for number in range(3, 9):
        node.tree.add(110 + number, f"VLLM::Worker_TP{number}", comm="VLLM::Worker_TP", ppid=101)
        node.look()
        node.tree.end(110 + number)
        node.look()
        node.look()

    assert node.alive() == {"engine": 1.0, "TP0": 1.0, "TP8": 0.0}


# --- what must not be said ---


def test_secrets_in_arguments_and_environment_leave_by_no_way(node: Node) -> None:
    secret = "sk-" + "PLANTED"
    environ = {"OPENAI_API_KEY": secret, "HF_TOKEN": secret, "RANK": "0", "SLURM_JOB_ID": secret}
    node.vllm(
        command=f"vllm serve s3://key:{secret}@bucket/org/m --api-key {secret} --hf-token={secret}"
        f" --master-addr {secret} --nnodes 2 --speculative-config /{secret}/x --port {secret} {secret}",
        environ=environ,
    )
    node.tree.add(200, f"python3 x.py --password {secret}", ppid=110, environ=environ)

    node.look()
    node.look()

    assert node.names == ["vllm-8000"]
    assert secret not in repr(node.items)


def test_command_lines_that_cannot_be_read_are_counted(node: Node) -> None:
    node.vllm()
    node.reads.reasons = {100: "permission"}
    node.look()

    assert [(r.value, r.reason) for r in node.readings("unidentified_processes")] == [
        (1, None),
        (None, "permission"),
    ]


def test_ten_thousand_names_are_not_all_remembered(node: Node) -> None:
    for number in range(1100):
        node.source._count_start(f"vllm-8000@{number}", ProcessId(number, 1))

    assert len(node.source._starts) == 1024
    assert node.source._count_start("vllm-8000@1099", ProcessId(2000, 1)) == 2


def test_starts_that_were_counted_before_a_restart_of_ours_are_counted_on(node: Node) -> None:
    node.source.starts_before = lambda name, root: 4 if name == "vllm-8000" else 0

    counted = [node.source._count_start(name, ProcessId(7, 1)) for name in ("vllm-8000", "vllm-8000", "vllm-9000")]

    assert counted == [5, 6, 1]


def test_closing_gives_every_descriptor_back(node: Node) -> None:
    node.vllm()
    node.look()
    node.source.close()

    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    assert not [link for link in links if os.path.lexists(link) and str(node.tree.root) in os.readlink(link)]


def test_without_room_for_descriptors_members_are_read_without_keeping_their_files(tmp_path: Path) -> None:
    """The rest of the exporter needs descriptors too: a server with 500 ranks must not take them all."""
    before = len(os.listdir("/proc/self/fd"))
    node = Node(tmp_path, most_kept=3)
    node.vllm(ranks=8, cpu=5.0)
    node.look()
    kept = len(os.listdir("/proc/self/fd")) - before
    node.tree.change(117, (), cpu=7.0)
    node.tree.end(100)
    node.look()
    node.look()

    assert kept == 3
    assert node.value("process_cpu_seconds_total", "TP7") == 7.0
    assert node.value("server_alive") == 0.0
    assert node.value("rank_alive", "TP7") == 1.0
    node.source.close()
    assert len(os.listdir("/proc/self/fd")) == before


# --- servers of other kinds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "comm"),
    [("/opt/llama-server -m x.gguf", "llama-server"), ("lmdeploy serve api_server m --tp 8", "lmdeploy")],
)
def test_the_only_process_of_a_model_is_its_rank(node: Node, command: str, comm: str) -> None:
    """Its port may be open while it loads: what it does must not count as work of a front end for clients."""
    node.tree.add(100, command, comm=comm)

    node.look()

    assert node.ranks == {100: "TP0"}
    assert node.server.ranks_expected == 1
    assert node.alive() == {"TP0": 1.0}


def test_the_first_process_of_a_server_with_ranks_is_none_itself(node: Node) -> None:
    node.tree.add(100, "trtllm-serve org/m --tp_size 8", comm="trtllm-serve")

    node.look()

    assert node.ranks == {100: "main"}
    assert node.server.ranks_expected == 8
    assert node.alive() == {}


def test_shards_are_ranks_by_the_number_in_their_environment(node: Node) -> None:
    node.tree.add(100, "text-generation-launcher --model-id m --num-shard 2", comm="text-generation")
    for rank in (0, 1):
        shard = "/opt/conda/bin/python /opt/conda/bin/text-generation-server serve m --uds-path /tmp/x"
        node.tree.add(101 + rank, shard, ppid=100, comm="text-generation", environ={"RANK": str(rank)})
    node.tree.add(103, "text-generation-router --port 80", ppid=100, comm="text-generation")

    node.look()

    assert node.ranks == {100: "main", 101: "TP0", 102: "TP1", 103: "controller"}


def test_a_worker_of_mpi_is_a_rank_below_tensorrt_llm_and_else_nothing(node: Node) -> None:
    worker = "/usr/bin/python3 -m mpi4py.futures.server"
    node.tree.add(100, "trtllm-serve m --tp_size 2", comm="trtllm-serve")
    node.tree.add(101, "orted -mca x", ppid=100, comm="orted")
    for rank in (0, 1):
        node.tree.add(102 + rank, worker, ppid=101, comm="python3", environ={"OMPI_COMM_WORLD_RANK": str(rank)})
    node.tree.add(200, "/usr/bin/python3 simulate.py", comm="python3")
    node.tree.add(201, worker, ppid=200, comm="python3", environ={"OMPI_COMM_WORLD_RANK": "0"})

    node.look()

    assert node.names == ["trtllm-8000"]
    assert node.ranks == {100: "main", 102: "TP0", 103: "TP1"}


RAYLET = "/opt/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/session_1/sockets/raylet"


def ray_workers(node: Node, parent: int, *first: int) -> None:
    """Two actors of vLLM below Ray's daemon, and one that waits for work."""
    for pid in first:
        node.tree.add(pid, "ray::RayWorkerWrapper.execute_method", comm="ray::RayWorkerW", ppid=parent)
    node.tree.add(first[0] + 50, "ray::IDLE", comm="ray::IDLE", ppid=parent)


def test_workers_below_a_daemon_of_ray_that_the_engine_started_are_ranks_by_the_log(node: Node) -> None:
    node.vllm(ranks=0, command="vllm serve m -tp 2 --distributed-executor-backend ray")
    node.tree.add(102, "/opt/ray/core/src/ray/gcs/gcs_server --log_dir=/x", comm="gcs_server", ppid=101)
    node.tree.add(103, RAYLET, comm="raylet", ppid=101)
    ray_workers(node, 103, 110, 111)

    unnamed = dict(node.look().ranks)
    node.rank_names = tuple(RankName("vllm-8000", 110 + rank, f"TP{rank}") for rank in (0, 1))
    node.look()

    front = {100: "main", 101: "engine", 102: "controller", 103: "controller"}
    assert unnamed == {**front, 110: "worker", 111: "worker"}
    assert node.ranks == {**front, 110: "TP0", 111: "TP1"}
    assert node.alive() == {"engine": 1.0, "TP0": 1.0, "TP1": 1.0}


def test_workers_below_a_daemon_of_ray_that_was_there_before_are_those_whose_pids_the_log_names(node: Node) -> None:
    node.tree.add(40, RAYLET, comm="raylet")
    node.vllm(ranks=0, command="vllm serve m -tp 2 --distributed-executor-backend ray")
    ray_workers(node, 40, 60, 61, 62)
    alone = dict(node.look().ranks)

    node.rank_names = tuple(RankName("vllm-8000", 60 + rank, f"TP{rank}") for rank in (0, 1))
    node.look()

    assert alone == {100: "main", 101: "engine"}
    assert node.ranks == {100: "main", 101: "engine", 60: "TP0", 61: "TP1"}  # 62 is another program's
    assert node.look().alive() == {"engine": 1.0, "TP0": 1.0, "TP1": 1.0}
    node.tree.end(61)
    assert node.look().look().alive()["TP1"] == 0.0


@pytest.mark.parametrize("other", ["title", "container", "log"])
def test_a_process_is_no_worker_of_a_server_by_its_pid_alone(node: Node, other: str) -> None:
    """A PID in a log may be that of another node or container, or a process of the machine may have it by now."""
    container = f"0::/system.slice/docker-{64 * 'a'}.scope\n" if other == "container" else "0::/\n"
    title = "ray::train" if other == "title" else "ray::RayWorkerWrapper"
    node.vllm(ranks=0, command="vllm serve m -tp 2 --distributed-executor-backend ray")
    node.tree.add(60, title, comm=title[:15], ppid=1, cgroup=container)
    node.rank_names = (RankName("vllm-9000" if other == "log" else "vllm-8000", 60, "TP0"),)

    node.look().look()

    assert node.ranks == {100: "main", 101: "engine"}


def test_workers_of_ray_alone_are_nobodys_server(node: Node) -> None:
    node.tree.add(40, RAYLET, comm="raylet")
    ray_workers(node, 40, 60, 61)

    assert node.look().names == []


def test_an_engine_in_a_replica_of_ray_serve_is_embedded_in_it(node: Node) -> None:
    node.tree.add(40, RAYLET, comm="raylet")
    node.tree.add(50, "ray::ServeReplica:llm:LLMServer", comm="ray::ServeRepli", ppid=40)
    node.tree.add(51, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=50)
    node.tree.add(60, "VLLM::Worker_TP0", comm="VLLM::Worker_TP", ppid=51)

    server = node.look().server

    assert (server.framework, server.role, server.root.pid) == ("vllm", "embedded", 50)
    assert node.ranks == {50: "main", 51: "engine", 60: "TP0"}


def test_each_model_of_a_router_of_llama_cpp_is_a_server_of_its_own(node: Node) -> None:
    """The router holds no model; it ends the one that was used least when another is wanted."""
    node.tree.add(100, "llama-server --port 8080 --models-max 2", comm="llama-server")
    for pid, port in ((110, 49823), (111, 49824)):
        words = f"/opt/llama-server --host 127.0.0.1 --port {port} --alias m{port} --model /models/m.gguf"
        node.tree.add(pid, words, comm="llama-server", ppid=100)
    found = {server.name: [process.id.pid for process in server.processes] for server in node.look().servers}

    assert found == {"llamacpp-8080": [100], "llamacpp-49823": [110], "llamacpp-49824": [111]}
    node.tree.end(111)
    alive = {r.labels[0]: r.value for r in node.look().look().readings("server_alive")}
    assert alive == {"llamacpp-8080": 1.0, "llamacpp-49823": 1.0, "llamacpp-49824": 0.0}


def test_a_child_of_a_router_is_a_server_once_it_has_its_own_command(node: Node) -> None:
    node.tree.add(100, "llama-server --port 8080", comm="llama-server")
    node.tree.add(110, "llama-server --port 8080", comm="llama-server", ppid=100)
    forked = node.look().names

    node.tree.change(110, "llama-server --port 49823 --model m.gguf", stack=2 << 40)
    node.look()

    assert forked == ["llamacpp-8080"]
    assert node.look().names == ["llamacpp-49823", "llamacpp-8080"]


def test_a_worker_of_dynamo_has_no_port_to_be_watched(node: Node) -> None:
    node.tree.add(100, "python3 -m dynamo.vllm --model org/m", comm="python3")
    node.tree.add(101, "VLLM::EngineCore", ppid=100, comm="VLLM::EngineCor")
    node.tree.add(200, "python3 -m dynamo.frontend", comm="python3")

    node.look()

    assert {server.name: server.ports for server in node.servers} == {"dynamo-vllm-1": (), "dynamo-8000": (8000,)}


@pytest.mark.parametrize(
    ("second", "is_mounted", "is_said"),
    [(None, True, True), (0, True, True), (KERNEL_THREAD, True, False), (None, False, False)],
    ids=["nobody", "a process", "the machine", "a recorded tree"],
)
def test_that_only_a_pid_namespace_is_seen_is_said_once(
    second: int | None, is_mounted: bool, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A container without the host's PIDs finds no server and misses none."""
    node = Node(tmp_path)
    node.tree.add(1, "init", comm="init")
    if second is not None:
        node.tree.add(2, "second", comm="second", flags=second)
    if is_mounted:
        (node.tree.root / "self").symlink_to("1")
    caplog.set_level(logging.INFO)
    node.look()
    node.look()

    assert ["PID namespace" in record.message for record in caplog.records] == [True] * is_said


@pytest.mark.parametrize("is_hidden", [True, False])
def test_that_others_are_hidden_is_said_once_and_counted(
    is_hidden: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """hidepid: without the first process of all, a server that is not there says nothing."""
    node = Node(tmp_path)
    (node.tree.root / "self").symlink_to("100")
    if not is_hidden:
        node.tree.add(1, "init", comm="init")
    reasons = [
        [reading.reason for reading in node.look().items if isinstance(reading, Reading) and reading.reason]
        for _ in range(2)
    ]

    assert reasons == [["permission"] * is_hidden] * 2
    assert ["hidepid" in record.message for record in caplog.records] == [True] * is_hidden


# --- what is still in the table though it ended ---------------------------------------------------------------------


@pytest.fixture
def unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No PID is given out, so that who ended is missed at the next listing only."""
    monkeypatch.setattr(ProcFs, "last_pid", lambda proc: 5000)


@pytest.mark.usefixtures("unlisted")
def test_a_process_that_ended_a_while_ago_is_no_start_of_a_configured_server(tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(command=re.compile("serve-it"))))
    node.tree.add(100, "python3 serve-it", comm="python3")
    node.tree.add(200, "python3 serve-it", comm="python3", started=150.0)
    for seconds in (5.0, 31.0):
        node.look(seconds)
    node.tree.end(100, 200)
    for seconds in (5.0, 1.0, 1.0):
        node.look(seconds)

    assert node.value("server_starts_total") == 1.0


@pytest.mark.usefixtures("unlisted")
def test_a_process_that_lives_is_the_next_start_of_a_configured_server(tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(command=re.compile("serve-it"))))
    node.tree.add(100, "python3 serve-it", comm="python3")
    node.tree.add(200, "python3 serve-it", comm="python3", started=150.0)
    for seconds in (5.0, 31.0):
        node.look(seconds)
    node.tree.end(100)
    for seconds in (5.0, 1.0, 1.0):
        node.look(seconds)

    assert node.value("server_starts_total") == 2.0
    assert node.server.root.pid == 200
