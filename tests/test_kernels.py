"""A stalled server with eight ranks on kernels from 4.18 to 6.18, x86-64 and aarch64, seen by whoever may see what.

Where the kernel tells what threads wait in, the stall has its reason and its rank; where it does not, it is a stall
without them; and where the counters cannot be read nothing is concluded.  Each has a twin in which one counter moves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kernels.machine import DATA, FIRST, MACHINES, MIB, RANKS, Machine, Stage
from stallwatch.model import WAITS, ServerReport

PAGES = {"stalled", "failed"}
ODD = 5
ODD_PID = FIRST + 10 * ODD

each_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)

each_kernel = pytest.mark.parametrize(
    "machine", list({machine.kernel: machine for machine in MACHINES}.values()), ids=lambda machine: machine.kernel
)
"""One machine of each kernel, the last of its lines, where the kernel's version is all that matters."""

Make = Callable[..., Stage]


@pytest.fixture
def make() -> Iterator[Make]:
    """Builds stages, and closes them.  In memory where possible: a new file costs a tenth there."""
    memory = "/dev/shm"
    stages: list[Stage] = []
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:

        def build(machine: Machine, reader: str = "root", place: str = "unit") -> Stage:
            stages.append(Stage(Path(folder) / str(len(stages)), machine, reader, place))
            return stages[-1]

        yield build
        for stage in stages:
            stage.close()


def with_a_sleeper(stage: Stage) -> Stage:
    """TP5 sleeps and looks again, as who waits for a lock does; the others wait for it at a barrier."""
    stage.sglang(**{f"TP{ODD}": stage.tree.thread("nanosleep")})
    stage.load()
    return stage


def facts(server: ServerReport) -> tuple[str, str, str | None]:
    verdict = server.verdict
    return verdict.state, verdict.reason, verdict.suspect_rank


UNREADABLE = {(f"TP{rank}", "unreadable"): 4.0 for rank in range(RANKS)}
"""Threads of the ranks where the kernel does not tell: no class has a number, not even 0."""

WAITS_OF_ALL = {
    (f"TP{rank}", wait): count
    for rank in range(RANKS)
    for wait, count in {
        **dict.fromkeys(WAITS, 0.0),
        **({"futex": 2.0, "poll": 2.0} if rank != ODD else {"futex": 1.0, "poll": 2.0, "sleep": 1.0}),
    }.items()
}


def of_ranks(stage: Stage) -> dict[tuple[str, ...], float]:
    """Threads of the ranks by class, as exported."""
    return {labels: count for labels, count in stage.values("threads").items() if labels[0] != "frontend"}


def channel(server: ServerReport, name: str) -> str:
    return next(each.state for each in server.channels if each.channel == name)


# --- root --------------------------------------------------------------------------------------------------


@each_machine
def test_a_stall_is_seen_and_has_its_rank_where_the_kernel_tells_what_threads_wait_in(
    make: Make, machine: Machine
) -> None:
    stage = with_a_sleeper(make(machine))

    server = stage.stand_still()

    known = machine.shows_waits("root")
    assert (server.server.name, server.ranks_alive) == ("sglang-30000@chat.service", RANKS)
    assert facts(server) == (("stalled", "idle_wait", f"TP{ODD}") if known else ("stalled", "none", None))
    assert stage.states == {"working", "quiet", "stalled"}
    assert (channel(server, "storage"), channel(server, "log")) == ("flat", "flat")
    assert of_ranks(stage) == (WAITS_OF_ALL if known else UNREADABLE)


@each_machine
def test_the_twin_in_which_one_rank_still_reads_is_working(make: Make, machine: Machine) -> None:
    stage = with_a_sleeper(make(machine))

    server = stage.stand_still(ODD_PID, read_bytes=2 * MIB)

    assert facts(server) == ("working", "none", None)
    assert stage.states == {"working"}


@each_machine
@pytest.mark.parametrize("wait", ["read", "fault"])
def test_a_rank_on_dead_storage_is_blocked_where_the_state_can_be_told(make: Make, machine: Machine, wait: str) -> None:
    """D is in /proc/PID/task/TID/stat, which every kernel has; but only threads known one by one are counted."""
    stage = make(machine)
    stage.sglang(**{f"TP{ODD}": stage.tree.thread(wait, "D", "nfs" if wait == "read" else "fault")})
    stage.load()

    server = stage.stand_still()

    known = machine.shows_waits("root")
    assert facts(server) == (("stalled", "blocked_io", f"TP{ODD}") if known else ("stalled", "none", None))


@each_kernel
def test_a_stopped_rank_is_seen_on_every_kernel_by_its_state(make: Make, machine: Machine) -> None:
    stage = with_a_sleeper(make(machine))
    stage.tree.change(ODD_PID, state="T")

    server = stage.stand_still()

    assert facts(server) == ("stalled", "stopped", f"TP{ODD}")


# --- others ------------------------------------------------------------------------------------------------


@each_machine
@pytest.mark.parametrize("reader", ["stranger", "ptrace"])
def test_a_reader_without_the_right_to_counters_concludes_nothing(make: Make, machine: Machine, reader: str) -> None:
    stage = with_a_sleeper(make(machine, reader))

    server = stage.stand_still()

    assert (server.server.name, server.ranks_alive) == ("sglang-30000@chat.service", RANKS)
    assert facts(server) == ("unknown", "unreadable", None)
    assert stage.states & {*PAGES, "suspect"} == set()
    assert (channel(server, "storage"), channel(server, "log")) == ("unreadable", "unreadable")
    assert stage.values("process_storage_read_bytes_total") == {}
    assert stage.errors("processes") == {"permission"}
    sees_symbols = reader == "ptrace" and machine.wchan == "symbols"
    assert of_ranks(stage) == (WAITS_OF_ALL if sees_symbols else UNREADABLE)


@each_kernel
@pytest.mark.parametrize("reader", ["stranger", "ptrace"])
def test_such_a_reader_still_sees_faults_and_so_that_it_works(make: Make, machine: Machine, reader: str) -> None:
    """The twin: stat is for everybody."""
    stage = with_a_sleeper(make(machine, reader))

    server = stage.stand_still(ODD_PID, minor=2000)

    assert facts(server) == ("working", "none", None)


# --- PID namespaces and hidden processes -------------------------------------------------------------------


@each_kernel
def test_ranks_are_named_by_the_pids_their_log_prints(make: Make, machine: Machine) -> None:
    """Inside a container PIDs are others; NSpid of /proc/PID/status has both, among other lines on each kernel."""
    stage = make(machine, place="container")
    stage.add(100, "vllm serve org/m -tp 2", comm="vllm", inner_pid=1)
    stage.add(101, "VLLM::EngineCore", comm="VLLM::EngineCor", ppid=100, inner_pid=20)
    for rank in range(2):
        stage.add(110 + rank, "VLLM::Worker", comm="VLLM::Worker", ppid=101, inner_pid=33 + rank)
    stage.write_raw(
        "(VllmWorker rank=1 pid=33) INFO 11-29 15:31:08 [gpu_model_runner.py:68] Starting to load model m\n"
    )
    stage.write_raw(
        "(VllmWorker rank=0 pid=34) INFO 11-29 15:31:08 [gpu_model_runner.py:68] Starting to load model m\n"
    )

    for _ in range(3):
        report = stage.look()

    (server,) = report.servers
    assert server.server.container == "0123456789ab"
    assert {rank.rank: rank.pid for rank in server.ranks if rank.rank.startswith("TP")} == {"TP1": 110, "TP0": 111}


@each_kernel
def test_processes_that_are_hidden_are_no_servers(make: Make, machine: Machine) -> None:
    """hidepid=1: the folders are there and nothing in them may be read."""
    stage = make(machine, "stranger")
    stage.sglang()
    for pid in stage.pids:
        stage.tree.folder(pid).chmod(0)

    for _ in range(3):
        report = stage.look()

    assert report.servers == ()
    assert stage.states == set()


@each_kernel
def test_processes_that_become_invisible_while_we_watch_are_no_death(make: Make, machine: Machine) -> None:
    """`mount -o remount,hidepid=2 /proc`: the folders vanish, the kept descriptors do not."""
    stage = with_a_sleeper(make(machine))
    for pid in stage.pids:
        stage.hide(pid)

    stage.look()
    stage.look()

    assert stage.states & PAGES == set()


# --- the data itself ---------------------------------------------------------------------------------------


def test_every_kernel_stands_there_for_both_architectures() -> None:
    assert {(machine.kernel, machine.arch) for machine in MACHINES} == {
        (kernel, arch) for kernel in DATA["symbols"] for arch in DATA["syscalls"]
    }


def test_every_kernel_names_the_same_waits() -> None:
    assert len({frozenset(names) for names in DATA["symbols"].values()}) == 1
    assert len({frozenset(numbers) for numbers in DATA["syscalls"].values()}) == 1


def test_what_is_written_differs_between_kernels(make: Make) -> None:
    """Otherwise the other tests here would be one test fifteen times."""
    by_name = {machine.name: machine for machine in MACHINES}
    texts = {}
    for name in ("rhel8-x86", "new-x86", "new-arm"):
        stage = make(by_name[name])
        stage.sglang()
        folder = stage.tree.folder(FIRST)
        texts[name] = [
            *((folder / file).read_text() for file in ("status", "cgroup")),
            *((folder / f"task/{FIRST}/{file}").read_text() for file in ("syscall", "wchan")),
        ]

    old, new, arm = texts.values()
    assert [a != b for a, b in zip(old, new, strict=True)] == [True, True, False, True]
    assert [a != b for a, b in zip(new, arm, strict=True)] == [True, False, True, False]
