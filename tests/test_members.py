"""Deaths, counters and the CPU of children, on a folder that looks like /proc."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process_node import INDUCTOR, Node
from stallwatch.descriptors import Room
from stallwatch.sources.members import Children, Member
from stallwatch.sources.process_table import Known
from stallwatch.sources.procfs import ProcFs, Stat


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.source.close()


# --- deaths ------------------------------------------------------------------------------------------------


def test_a_rank_that_is_missing_on_one_look_is_not_dead(node: Node) -> None:
    node.vllm()
    node.look()
    node.tree.end(111)
    node.look()
    first = (node.alive(), node.reading("rank_alive", "TP1").reason, node.source.again_seconds)
    node.look(0.9)
    second = node.alive()
    node.look(0.1)

    assert first == ({"engine": 1.0, "TP0": 1.0, "TP1": None}, "vanished", 1.0)
    assert second == {"engine": 1.0, "TP0": 1.0, "TP1": None}
    assert node.alive() == {"engine": 1.0, "TP0": 1.0, "TP1": 0.0}
    assert node.source.again_seconds is None
    assert node.look().alive()["TP1"] == 0.0
    assert node.value("server_alive") == 1.0


def test_a_missing_rank_is_not_among_the_processes_others_look_at(node: Node) -> None:
    node.vllm()
    node.look()
    node.tree.end(111)

    assert 111 not in node.look().ranks


def test_a_zombie_is_dead_on_the_second_look(node: Node) -> None:
    node.vllm()
    node.look()
    node.tree.change(111, (), state="Z")
    first = node.look(5.0).alive()["TP1"]

    assert (first, node.look(1.0).alive()["TP1"]) == (None, 0.0)
    assert node.look(31.0).alive()["TP1"] == 0.0


def test_a_leader_that_ended_before_its_threads_is_not_dead_and_says_nothing_of_its_memory(node: Node) -> None:
    node.vllm()
    node.look()
    node.tree.change(111, (), state="Z", threads=7, resident=0, virtual=0)
    node.look()
    node.look()

    assert node.alive()["TP1"] == 1.0
    assert node.value("process_resident_memory_bytes", "TP1") is None
    assert node.value("process_cpu_seconds_total", "TP1") == 0.0


def test_a_rank_that_comes_back_under_another_pid_lives(node: Node) -> None:
    node.vllm()
    node.look()
    node.tree.end(111)
    node.look()
    dead = node.look().alive()["TP1"]
    node.tree.add(120, "VLLM::Worker_TP1", comm="VLLM::Worker_TP", ppid=101, started=500.0, cpu=3.0)
    node.look()

    assert (dead, node.alive()["TP1"]) == (0.0, 1.0)


def test_a_rank_that_cannot_be_read_is_not_dead(node: Node) -> None:
    """No descriptor left, or a file of another form: unreadable, and never a death."""
    node.vllm(cpu=5.0)
    node.look()
    path = node.tree.folder(111) / "stat"
    whole = path.read_text()
    path.write_text("111 (VLLM::Work")
    for _ in range(3):
        node.look()
    alive, cpu = node.alive()["TP1"], node.reading("process_cpu_seconds_total", "TP1")
    path.write_text(whole)

    assert (alive, cpu.value, cpu.reason) == (1.0, None, "error")
    assert node.look().value("process_cpu_seconds_total", "TP1") == 5.0


def test_when_the_first_process_is_gone_the_server_is_not_alive_while_ranks_linger(node: Node) -> None:
    node.vllm()
    node.look()
    node.tree.end(100)
    first = node.look().value("server_alive")
    node.look()

    assert (first, node.value("server_alive")) == (1.0, 0.0)
    assert node.ranks == {101: "engine", 110: "TP0", 111: "TP1"}


def test_front_ends_that_end_are_no_deaths(node: Node) -> None:
    node.vllm()
    node.tree.add(120, "VLLM::APIServer_1", comm="VLLM::APIServer", ppid=100)
    node.look()
    node.tree.end(120)
    node.look()
    node.look()

    assert node.alive() == {"engine": 1.0, "TP0": 1.0, "TP1": 1.0}


def test_a_process_that_vanishes_while_it_is_read_raises_nothing(node: Node) -> None:
    node.vllm()
    (node.tree.folder(111) / "cmdline").unlink()
    (node.tree.folder(110) / "cgroup").unlink()
    (node.tree.folder(101) / "status").unlink()

    assert node.look().names == ["vllm-8000"]


# --- what processes did ------------------------------------------------------------------------------------


def test_counters_are_in_seconds_and_bytes(node: Node) -> None:
    node.vllm()
    node.tree.change(
        111,
        cpu=12.5,
        minor=77,
        major=3,
        resident=8192,
        virtual=425 << 30,
        io={"rchar": 11, "wchar": 22, "read_bytes": 33},
    )
    node.look()

    assert node.value("process_cpu_seconds_total", "TP1") == 12.5
    assert node.value("process_page_faults_total", "TP1", "minor") == 77
    assert node.value("process_page_faults_total", "TP1", "major") == 3
    assert node.value("process_read_bytes_total", "TP1") == 11
    assert node.value("process_written_bytes_total", "TP1") == 22
    assert node.value("process_storage_read_bytes_total", "TP1") == 33
    assert node.value("process_resident_memory_bytes", "TP1") == 8192
    assert node.value("process_virtual_memory_bytes", "TP1") == 425 << 30


IO_SIGNALS = ("process_storage_read_bytes_total", "process_read_bytes_total", "process_written_bytes_total")


def test_io_that_cannot_be_read_is_absent_and_never_zero(node: Node) -> None:
    node.vllm(cpu=5.0)
    node.tree.forbid(111, "io")
    node.look()

    for signal in IO_SIGNALS:
        assert (node.value(signal, "TP1"), node.value(signal, "TP0")) == (None, 0.0)
    assert node.value("process_cpu_seconds_total", "TP1") == 5.0


class Refusing(ProcFs):
    """Refuses io, as the kernel does without CAP_SYS_PTRACE (root, who runs tests in containers, may read any file)."""

    def path(self, pid: int, *parts: str) -> str:
        if parts == ("io",):
            raise PermissionError(errno.EACCES, "refused")
        return super().path(pid, *parts)


class Exhausted(ProcFs):
    """Nothing can be opened any more."""

    def path(self, pid: int, *parts: str) -> str:
        raise OSError(errno.EMFILE, "too many open files")


def test_without_the_right_the_reason_is_permission(node: Node) -> None:
    spec = node.tree.add(100, "x", cpu=5.0)
    proc = Refusing(node.tree.root)
    stat = proc.stat(100)
    assert stat is not None
    member = Member(proc, Known(stat, 0.0, 0), "rank", "TP0", 0.0, Room(2))

    member.look(0.0)
    member.close()

    assert member.id == spec.id
    assert member.usage is not None
    assert (member.usage.io, member.usage.io_reason) == (None, "permission")
    assert member.usage.counters() == (5.0, 0, 0, None, None, None)


def test_no_descriptor_left_is_unreadable_and_not_a_death(node: Node) -> None:
    """Principle 5: a failure of ours must never look like one of theirs."""
    node.tree.add(100, "x")
    stat = ProcFs(node.tree.root).stat(100)
    assert stat is not None
    member = Member(Exhausted(node.tree.root), Known(stat, 0.0, 0), "rank", "TP0", 0.0, Room(2))

    member.look(0.0)
    member.look(10.0)

    assert (member.dead, member.missing_since, member.unreadable) == (False, None, "error")


def test_what_the_table_read_at_this_look_is_not_read_again(node: Node) -> None:
    node.tree.add(100, "x", cpu=5.0)
    stat = ProcFs(node.tree.root).stat(100)
    assert stat is not None
    known = Known(stat, 0.0, 0, read_at=7.0)
    member = Member(Exhausted(node.tree.root), known, "rank", "TP0", 0.0, Room(2))

    member.look(7.0, known)
    now = member.last, member.unreadable
    member.look(8.0, known)

    assert now == (stat, None)
    assert member.unreadable == "error"


def test_one_unreadable_front_end_makes_the_sum_unreadable_and_not_partial(node: Node) -> None:
    node.vllm(cpu=5.0, io={"read_bytes": 100})
    node.tree.add(120, "VLLM::APIServer_1", comm="VLLM::APIServer", ppid=100, cpu=1.0, io={"read_bytes": 50})
    both = node.look().value(IO_SIGNALS[0], "frontend")
    node.tree.add(121, "VLLM::APIServer_2", comm="VLLM::APIServer", ppid=100, cpu=1.0, io=None)
    node.look()

    assert both == 150
    assert node.value(IO_SIGNALS[0], "frontend") is None
    assert node.value("process_cpu_seconds_total", "frontend") == 7.0


def test_the_front_ends_sum_does_not_dip_while_one_of_them_goes(node: Node) -> None:
    node.vllm(cpu=5.0)
    node.tree.add(120, "VLLM::APIServer_1", comm="VLLM::APIServer", ppid=100, cpu=100.0)
    values = [node.look().value("process_cpu_seconds_total", "frontend")]
    node.tree.end(120)
    values += [node.look().value("process_cpu_seconds_total", "frontend") for _ in range(3)]

    assert values == [105.0] * 4
    assert node.value("process_resident_memory_bytes", "frontend") == 1 << 20


def test_a_missing_ranks_counters_are_absent(node: Node) -> None:
    node.vllm(cpu=5.0)
    node.look()
    node.tree.end(111)

    assert node.look().readings("process_cpu_seconds_total", "TP1") == []


def compile_tree(node: Node) -> None:
    """TP1 runs ninja, that g++, that cc1plus; TP0 runs something else."""
    node.tree.add(200, "ninja", comm="ninja", ppid=111, cpu=1.0)
    node.tree.add(201, "g++ x", comm="g++", ppid=200, cpu=0.5)
    node.tree.add(202, "cc1plus x", comm="cc1plus", ppid=201, cpu=8.0)
    node.tree.add(203, "lscpu", comm="lscpu", ppid=110, cpu=0.25)


def test_compilers_below_a_rank_are_counted_with_their_cpu(node: Node) -> None:
    node.vllm()
    node.tree.add(210, "curl x", comm="curl", ppid=100, cpu=99.0)
    compile_tree(node)
    node.look()

    assert node.value("server_child_processes", "compiler") == 3
    assert node.value("server_child_processes", "other") == 1
    assert node.value("server_child_cpu_seconds_total", "compiler") == 9.5
    assert node.value("server_child_cpu_seconds_total", "other") == 0.25


def test_each_second_of_a_compiler_counts_once_as_it_ends_and_is_waited_for(node: Node) -> None:
    node.vllm()
    compile_tree(node)
    sums = [node.look().value("server_child_cpu_seconds_total", "compiler")]
    node.tree.change(202, cpu=10.0)
    sums.append(node.look().value("server_child_cpu_seconds_total", "compiler"))
    node.tree.end(202)  # 2 s more at its end; g++ waited for it
    node.tree.change(201, reaped_cpu=12.0)
    sums.append(node.look().value("server_child_cpu_seconds_total", "compiler"))
    node.tree.end(201)
    node.tree.change(200, reaped_cpu=12.5)
    sums.append(node.look().value("server_child_cpu_seconds_total", "compiler"))
    node.tree.end(200)
    node.tree.change(111, reaped_cpu=13.5)
    sums += [node.look().value("server_child_cpu_seconds_total", "compiler") for _ in range(3)]

    assert sums == [9.5, 11.5, 13.5, 13.5, 13.5, 13.5, 13.5]
    assert node.value("server_child_processes", "compiler") == 0


def test_a_compiler_between_two_looks_counts_by_its_parents_account(node: Node) -> None:
    node.vllm()
    compile_tree(node)
    node.look()
    node.tree.end(200, 201, 202)
    node.tree.change(111, reaped_cpu=9.5)
    node.look()
    node.tree.change(111, reaped_cpu=14.5)
    node.look()

    assert node.value("server_child_cpu_seconds_total", "compiler") == 14.5


def test_the_first_short_compiler_of_a_rank_counts_too(node: Node) -> None:
    node.vllm()
    node.look()
    node.tree.change(111, reaped_cpu=4.0)
    node.look()

    totals = [node.value("server_child_cpu_seconds_total", kind) for kind in ("compiler", "other")]
    assert sum(value or 0.0 for value in totals) == 4.0


def test_children_nobody_waits_for_do_not_make_the_sum_fall_nor_hide_later_ones(node: Node) -> None:
    node.vllm()
    compile_tree(node)
    node.look()
    node.tree.end(200, 201, 202)
    sums = [node.look().value("server_child_cpu_seconds_total", "compiler") for _ in range(3)]
    node.tree.change(111, reaped_cpu=5.0)

    assert sums == [9.5] * 3
    assert node.look().value("server_child_cpu_seconds_total", "compiler") == 14.5


def test_a_rank_that_its_engine_waited_for_is_no_childs_cpu(node: Node) -> None:
    node.vllm(cpu=500.0)
    node.look()
    node.tree.end(111)
    node.tree.change(101, reaped_cpu=500.0)
    node.look()
    node.look()

    assert node.value("server_child_cpu_seconds_total", "other") == 0.0


def test_a_pool_of_compile_workers_is_counted_and_asleep(node: Node) -> None:
    node.vllm()
    node.tree.add(200, INDUCTOR, ppid=110, cpu=3.0)
    node.tree.add(201, INDUCTOR, ppid=200, cpu=1.0)
    values = [node.look().value("server_child_cpu_seconds_total", "compiler") for _ in range(2)]

    assert values == [4.0, 4.0]
    assert node.value("server_child_processes", "compiler") == 2


def test_a_zombie_child_is_no_live_child(node: Node) -> None:
    node.vllm()
    node.tree.add(200, (), comm="g++", ppid=110, state="Z", cpu=1.0)
    node.look()

    assert node.value("server_child_processes", "compiler") == 0
    assert node.value("server_child_cpu_seconds_total", "compiler") == 1.0


# --- the ledger of children --------------------------------------------------------------------------------


def line(pid: int, ppid: int, own: float, waited: float, state: str = "R") -> Stat:
    return Stat(pid, "x", state, ppid, 0, 0, 0, own, waited, 1, pid, 0, 0)


class Family:
    """Two ranks (PIDs 1 and 2) and what they start; every ended process is waited for by its parent."""

    def __init__(self) -> None:
        self.parents = {1: 0, 2: 0}
        self.own = {1: 0, 2: 0}
        self.waited = {1: 0, 2: 0}
        self.spent = 0  # by all children that ever were
        self.born = 2

    def start(self, below: int) -> None:
        self.born += 1
        pid = self.born
        self.parents[pid], self.own[pid], self.waited[pid] = below, 0, 0

    def run(self, pid: int, seconds: int) -> None:
        self.own[pid] += seconds
        self.spent += seconds if pid > 2 else 0

    def end(self, pid: int) -> None:
        for child in [child for child, parent in self.parents.items() if parent == pid]:
            self.end(child)
        if pid > 2:
            parent = self.parents.pop(pid)
            self.waited[parent] += self.own.pop(pid) + self.waited.pop(pid)

    def show(self, children: Children) -> None:
        stats = [line(pid, self.parents[pid], self.own[pid], self.waited[pid]) for pid in sorted(self.own)]
        children.update(stats[:2], [(stat, "compiler" if stat.pid % 2 else "other") for stat in stats[2:]])


STEPS = st.lists(
    st.tuples(st.sampled_from(["start", "run", "end", "look"]), st.integers(0, 30), st.integers(1, 9)), max_size=60
)


@given(STEPS)
def test_whatever_comes_and_goes_each_second_counts_once(steps: list[tuple[str, int, int]]) -> None:
    family, children, last = Family(), Children(), {"compiler": 0.0, "other": 0.0}
    family.show(children)

    for what, choice, seconds in [*steps, ("look", 0, 0)]:
        pid = sorted(family.own)[choice % len(family.own)]
        if what == "start":
            family.start(pid)
        elif what == "run":
            family.run(pid, seconds)
        elif what == "end":
            family.end(pid)
        else:
            family.show(children)
            assert sum(children.seconds.values()) == family.spent
            assert all(children.seconds[kind] >= last[kind] for kind in last)
            last = dict(children.seconds)


def test_an_engine_that_waits_late_for_its_rank_adds_nothing() -> None:
    """The zombie stays a while; then all it ever used is in the engine's account at once."""
    children = Children()
    children.update([line(1, 0, 5.0, 0.0), line(2, 1, 500.0, 40.0)], [])
    for _ in range(3):
        children.update([line(1, 0, 5.0, 0.0)], [])
    children.update([line(1, 0, 5.0, 541.0)], [])

    assert children.seconds == {"compiler": 0.0, "other": 1.0}


def test_what_ended_before_the_first_look_is_not_counted() -> None:
    children = Children()
    children.update([line(1, 0, 5.0, 300.0)], [])

    assert children.seconds == {"compiler": 0.0, "other": 0.0}


def test_the_ledger_forgets_what_is_gone() -> None:
    children = Children()
    for number in range(100):
        children.update([line(1, 0, 0.0, float(number))], [(line(100 + number, 1, 1.0, 0.0), "other")])

    assert len(children._accounts) == 2
    assert len(children._debts) == 2


# --- a debugger --------------------------------------------------------------------------------------------


def traced(node: Node) -> dict[str, float | None]:
    return {reading.labels[1]: reading.value for reading in node.look().readings("rank_traced")}


def test_ranks_and_engines_that_are_traced_are_told_from_those_that_are_not(node: Node) -> None:
    node.vllm()
    node.tree.add(120, "VLLM::APIServer_1", comm="VLLM::APIServer", ppid=100)
    before = traced(node)
    node.tree.change(111, tracer=4711)
    node.tree.change(101, state="t")
    node.tree.change(120, tracer=4711)
    node.tree.change(110, state="T")
    during = traced(node)
    node.tree.change(111, tracer=0)
    node.tree.change(101, state="S")

    assert before == {"engine": 0.0, "TP0": 0.0, "TP1": 0.0}
    assert during == {"engine": 1.0, "TP0": 0.0, "TP1": 1.0}
    assert traced(node) == before


def test_a_rank_that_works_under_a_tracer_is_traced(node: Node) -> None:
    """Polling threads of a stuck rank use CPU as well: its clock says nothing of a tracer."""
    node.vllm()
    node.look()
    node.tree.change(111, tracer=4711, cpu=5.0)

    assert traced(node) == {"engine": 0.0, "TP0": 0.0, "TP1": 1.0}


def test_whether_a_rank_is_traced_may_be_unreadable_or_unsaid(node: Node) -> None:
    node.vllm()
    node.tree.forbid(111, "status")
    (node.tree.folder(110) / "status").unlink()
    (node.tree.folder(101) / "status").write_text("Name:\tx\nTracerPid:\tx\n")

    assert traced(node) == {"TP1": None}
    assert node.reading("rank_traced", "TP1").reason == "error"


def test_a_rank_that_is_missing_is_not_said_to_be_traced(node: Node) -> None:
    node.vllm()
    node.tree.change(111, tracer=4711)
    node.look()
    node.tree.end(111)
    found = [traced(node), traced(node)]

    assert found == [{"engine": 0.0, "TP0": 0.0}] * 2
