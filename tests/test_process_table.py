"""Looking is mostly not done: what must be noticed all the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from proc_tree import DirectReads, ProcTree
from stallwatch.model import ProcessId
from stallwatch.sources.blocking_reads import CommandLine
from stallwatch.sources.discovery import Command
from stallwatch.sources.process_table import (
    FULL_LOOK_SECONDS,
    LISTING_SECONDS,
    MOST_COMMANDS,
    MOST_GIVEN,
    RETRY_SECONDS,
    SOON_SECONDS,
    YOUNG_SECONDS,
    Known,
    ProcessTable,
)
from stallwatch.sources.procfs import KERNEL_THREAD, ProcFs, Stat


class Node:
    """A tree, the table over it, and who reads command lines; the command of a process is its first word."""

    def __init__(self, root: Path) -> None:
        self.tree = ProcTree(root)
        self.reads = DirectReads(self.tree)
        self.table = ProcessTable(ProcFs(root), self.reads.command_line, _understand)

    def look(self, now: float, wanted: Callable[[Known], bool] = lambda known: True) -> None:
        self.table.look(now)
        self.reads.asked.clear()
        self.table.read_commands(wanted, now)

    def pids(self) -> list[int]:
        return sorted(known.stat.pid for known in self.table)

    def command(self, pid: int) -> str | None:
        known = self.table.get(pid)
        assert known is not None
        return None if known.command is None else known.command.reason or known.command.rank


def _understand(line: CommandLine) -> Command:
    return Command(rank=" ".join(line.argv), reason=line.reason)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_processes_come_and_go(node: Node) -> None:
    node.tree.add(10, "a")
    node.look(0.0)
    node.tree.add(11, "b")
    node.tree.end(10)
    node.look(5.0)

    assert node.pids() == [11]
    assert node.command(11) == "b"


def test_kernel_threads_are_nobody(node: Node) -> None:
    node.tree.add(2, "", comm="kworker/0:1", flags=KERNEL_THREAD)
    node.tree.add(10, "a")
    node.look(0.0)

    assert node.pids() == [10]


def test_a_process_that_inherits_the_pid_of_a_kernel_thread_is_found(node: Node) -> None:
    """Workers of the kernel come and go all day, and both may happen between two looks."""
    node.tree.add(20, "", comm="kworker/0:1", flags=KERNEL_THREAD)
    node.look(0.0)
    node.tree.replace(20, "vllm serve", started=200.0)
    node.look(FULL_LOOK_SECONDS)

    assert node.pids() == [20]


def test_pid_reuse_between_two_looks_is_a_new_process(node: Node) -> None:
    old = node.tree.add(10, "old")
    node.look(0.0)
    new = node.tree.replace(10, "new", started=200.0)
    node.look(5.0)

    assert node.table.find(old.id) is None
    assert node.table.find(new.id) is not None
    assert node.command(10) == "new"


def test_a_listing_is_skipped_while_nothing_was_forked(node: Node) -> None:
    """Measured: listing 2,000 processes costs 300 times the look at the counter."""
    node.tree.add(10, "a")
    node.look(0.0)
    forks = (node.tree.root / "stat").read_text()
    node.tree.add(11, "b")
    (node.tree.root / "stat").write_text(forks)

    node.look(5.0)
    skipped = node.pids()
    node.look(FULL_LOOK_SECONDS)

    assert (skipped, node.pids()) == ([10], [10, 11])


def test_without_the_counter_of_forks_every_look_lists(node: Node) -> None:
    node.tree.add(10, "a")
    node.look(0.0)
    node.tree.add(11, "b")
    (node.tree.root / "stat").write_text("btime 5\n")
    node.look(5.0)

    assert node.pids() == [10, 11]


def test_an_old_process_that_ended_is_noticed_without_a_fork(node: Node) -> None:
    node.tree.add(10, "a")
    node.look(0.0)
    node.look(YOUNG_SECONDS + 1)
    node.tree.end(10)
    node.look(YOUNG_SECONDS + FULL_LOOK_SECONDS + 2)

    assert node.pids() == []


def test_from_time_to_time_those_that_ran_are_read_again_and_no_others(tmp_path: Path) -> None:
    """Measured: to read stat of 2,000 processes costs ten times as much as to look at their clocks."""
    clocks, looks = {1: 5, 10: 7, 11: 8}, list[int]()
    table = clocked_table(family(tmp_path), clocks, looks)
    table.look(0.0)
    table.look(YOUNG_SECONDS + 1)
    looks.clear()

    clocks[11] = 9
    table.look(YOUNG_SECONDS + FULL_LOOK_SECONDS + 2)

    assert [pid for pid in looks if pid > 1] == [11]  # the first process has no parent that could be looked at


def test_a_process_that_never_ran_since_is_read_when_its_parent_is_gone_or_another(tmp_path: Path) -> None:
    """It was handed to another parent then, and no clock of its own tells."""
    clocks, looks, tree = {1: 5, 10: 7, 11: 8}, list[int](), family(tmp_path)
    table = clocked_table(tree, clocks, looks)
    table.look(0.0)
    table.look(YOUNG_SECONDS + 1)
    looks.clear()

    tree.replace(10, "another", started=500.0)
    clocks[10] = 1
    table.look(YOUNG_SECONDS + FULL_LOOK_SECONDS + 2)
    table.look(YOUNG_SECONDS + 2 * FULL_LOOK_SECONDS + 3)

    assert 11 in looks


def family(root: Path) -> ProcTree:
    """A first process, a child of it, and a child of that."""
    tree = ProcTree(root)
    tree.add(1, "init", ppid=0)
    tree.add(10, "parent", ppid=1)
    tree.add(11, "child", ppid=10)
    return tree


def clocked_table(
    tree: ProcTree, clocks: dict[int, int], looks: list[int], given: Iterator[int | None] | None = None
) -> ProcessTable:
    """A table of processes that have CPU clocks.  `looks`: whose stat was read, 0 for a listing; `given`: last PIDs."""

    class Clocked(ProcFs):
        def last_pid(self) -> int | None:
            return next(given) if given is not None else None

        def pids(self) -> list[int]:
            looks.append(0)
            return super().pids()

        def cpu_clock(self, pid: int) -> int | None:
            return clocks.get(pid)

        def stat(self, pid: int) -> Stat | None:
            looks.append(pid)
            return super().stat(pid)

    return ProcessTable(Clocked(tree.root), DirectReads(tree).command_line, _understand)


def test_a_command_line_is_read_once(node: Node) -> None:
    node.tree.add(10, "a")
    node.look(0.0)
    node.look(5.0)

    assert node.reads.asked == []
    assert node.command(10) == "a"


def test_an_exec_of_a_young_process_is_noticed_without_a_fork(node: Node) -> None:
    node.tree.add(10, "bash start.sh", comm="bash")
    node.look(0.0)
    node.tree.change(10, "vllm serve m", comm="vllm", stack=5)
    node.look(5.0)

    assert node.command(10) == "vllm serve m"


def test_an_exec_that_keeps_the_name_is_noticed_by_its_new_stack(node: Node) -> None:
    """A launcher in Python that becomes the server: same PID, same start, same comm."""
    node.tree.add(10, "python launcher.py", comm="python3")
    node.look(0.0)
    node.look(YOUNG_SECONDS + 1)
    node.tree.change(10, "python -m sglang.launch_server", comm="python3", stack=5)
    node.look(YOUNG_SECONDS + FULL_LOOK_SECONDS + 2)

    assert node.command(10) == "python -m sglang.launch_server"


def test_a_title_that_comes_late_is_read(node: Node) -> None:
    node.tree.add(10, "python -c spawn", comm="python3")
    node.look(0.0)
    node.tree.change(10, "VLLM::Worker_TP1", comm="VLLM::Worker_TP")
    node.look(5.0)

    assert node.command(10) == "VLLM::Worker_TP1"


def test_only_wanted_processes_are_asked(node: Node) -> None:
    node.tree.add(10, "a", comm="bash")
    node.tree.add(11, "b", comm="python3")
    node.look(0.0, lambda known: known.stat.comm == "python3")

    assert node.reads.asked == [11]
    assert node.command(10) is None


@pytest.mark.parametrize("reason", ["timeout", "error"])
def test_a_command_line_that_hung_is_tried_again_soon_and_then_seldom(node: Node, reason: str) -> None:
    node.tree.add(10, "a")
    node.reads.reasons[10] = reason
    node.look(0.0)
    before, counted = node.command(10), dict(node.table.unread)
    asked = {}
    again = SOON_SECONDS + RETRY_SECONDS
    for now in (SOON_SECONDS - 1, SOON_SECONDS, 2 * SOON_SECONDS, again - 1):
        node.look(now)
        asked[now] = bool(node.reads.asked)
    del node.reads.reasons[10]
    node.look(again)

    assert list(asked.values()) == [False, True, False, False]
    assert (before, node.command(10)) == (reason, "a")
    assert (counted, node.table.unread) == ({reason: 1}, {})


def test_after_a_reading_that_went_well_a_failure_is_the_first_again(node: Node) -> None:
    node.tree.add(10, "a")
    node.reads.reasons[10] = "timeout"
    node.look(0.0)
    del node.reads.reasons[10]
    node.look(SOON_SECONDS)
    known = node.table.get(10)
    assert known is not None
    node.reads.reasons[10] = "timeout"
    node.table.read_command(known, 10.0)

    assert known.is_doubtful


def test_no_right_to_read_is_not_tried_again(node: Node) -> None:
    node.tree.add(10, "a")
    node.reads.reasons[10] = "permission"
    node.look(0.0)
    node.look(RETRY_SECONDS)

    assert node.reads.asked == []


def test_a_title_that_cannot_be_read_again_is_still_known(node: Node) -> None:
    """The process holds its mmap lock: exactly in the hang its name must not be lost."""
    node.tree.add(10, "VLLM::Worker_TP1")
    node.look(0.0)
    node.reads.reasons[10] = "timeout"
    known = node.table.get(10)
    assert known is not None
    node.table.read_command(known, 5.0)

    assert node.command(10) == "VLLM::Worker_TP1"
    assert node.table.unread == {"timeout": 1}


def test_what_a_launcher_was_is_forgotten_when_the_program_behind_it_cannot_be_read_at_once(node: Node) -> None:
    """On a busy machine the helper may be too slow: the server is not for ever what its launcher was."""
    node.tree.add(10, "python launcher.py", comm="python3")
    node.look(0.0)
    node.tree.change(10, "python -m sglang.launch_server", comm="python3", stack=5)
    node.reads.reasons[10] = "timeout"
    node.look(1.0)
    meanwhile = node.command(10)
    del node.reads.reasons[10]
    node.look(1.0 + SOON_SECONDS)

    assert (meanwhile, node.command(10)) == ("timeout", "python -m sglang.launch_server")


def test_a_process_that_vanishes_while_it_is_read_is_counted_as_that(node: Node) -> None:
    node.tree.add(10, "a")
    node.table.look(0.0)
    node.tree.end(10)
    node.table.read_commands(lambda known: True, 0.0)

    assert node.command(10) == "vanished"
    node.look(5.0 + FULL_LOOK_SECONDS)
    assert node.pids() == []


def test_forgotten_commands_are_read_anew(node: Node) -> None:
    node.tree.add(10, "a")
    node.look(0.0)
    node.table.forget_commands()
    node.look(1.0)

    assert node.reads.asked == [10]


def test_ancestors_are_named_up_to_the_first_process_and_circles_end(node: Node) -> None:
    node.tree.add(1, "init", ppid=0)
    node.tree.add(10, "a", ppid=1)
    node.tree.add(11, "b", ppid=10)
    node.tree.add(20, "c", ppid=21)
    node.tree.add(21, "d", ppid=20)
    node.look(0.0)

    def chain(pid: int) -> list[int]:
        known = node.table.get(pid)
        assert known is not None
        return [other.stat.pid for other in node.table.ancestors(known)]

    assert chain(11) == [10, 1]
    assert chain(1) == []
    assert len(chain(20)) == 64


def test_children_stand_below_their_parent(node: Node) -> None:
    node.tree.add(10, "a")
    node.tree.add(11, "b", ppid=10)
    node.tree.add(12, "c", ppid=10)
    node.look(0.0)

    assert sorted(known.stat.pid for known in node.table.children_of(10)) == [11, 12]


def below(node: Node) -> dict[int, list[int]]:
    parents = {known.stat.ppid for known in node.table} | {known.stat.pid for known in node.table}
    found = {parent: sorted(known.stat.pid for known in node.table.children_of(parent)) for parent in parents}
    return {parent: children for parent, children in found.items() if children}


def test_who_stands_below_whom_is_known_anew_when_one_comes_goes_or_gets_another_parent(node: Node) -> None:
    node.tree.add(1, "init", ppid=0)
    node.tree.add(10, "a", ppid=1)
    node.tree.add(11, "b", ppid=10)
    node.look(0.0)
    seen = [below(node)]
    node.look(1.0)
    seen.append(below(node))
    node.tree.add(12, "c", ppid=10)
    node.look(2.0)
    seen.append(below(node))
    node.tree.change(11, "b", ppid=1)
    node.look(3.0)
    seen.append(below(node))
    node.tree.end(12)
    node.look(4.0)

    assert seen[0] == seen[1] == {0: [1], 1: [10], 10: [11]}
    assert seen[2] == {0: [1], 1: [10], 10: [11, 12]}
    assert seen[3] == {0: [1], 1: [10, 11], 10: [12]}
    assert below(node) == {0: [1], 1: [10, 11]}
    node.tree.replace(11, "d", ppid=10, started=200.0)
    node.look(5.0)
    known = node.table.get(11)
    assert below(node) == {0: [1], 1: [10], 10: [11]}
    assert node.table.children_of(10) == (known,)


def test_who_is_not_wanted_is_not_thought_of_again_until_it_is_another(node: Node) -> None:
    node.tree.add(10, "a", comm="bash")
    thought_of = list[str]()

    def wanted(known: Known) -> bool:
        thought_of.append(known.stat.comm)
        return known.stat.comm == "python3"

    for now in (0.0, YOUNG_SECONDS + 1, YOUNG_SECONDS + 2):  # it is read again for as long as it is young
        node.look(now, wanted)
    before = len(thought_of)
    node.look(YOUNG_SECONDS + 3, wanted)
    unchanged = len(thought_of)
    node.tree.change(10, "a", comm="python3")
    node.look(YOUNG_SECONDS + 3 + FULL_LOOK_SECONDS, wanted)

    assert unchanged == before
    assert thought_of[-1] == "python3"
    assert node.command(10) == "a"


def test_who_was_not_wanted_is_thought_of_again_when_something_else_is_looked_for(node: Node) -> None:
    node.tree.add(10, "a", comm="bash")
    node.look(0.0, lambda known: False)
    node.look(YOUNG_SECONDS + 1, lambda known: False)
    node.table.forget_commands()
    node.look(YOUNG_SECONDS + 2, lambda known: True)

    assert node.reads.asked == [10]


def test_a_member_is_read_once_in_a_look_and_only_if_it_ran(tmp_path: Path) -> None:
    clocks, looks, tree = {1: 5, 10: 7, 11: 8}, list[int](), family(tmp_path)
    table = clocked_table(tree, clocks, looks)
    child = tree.change(11).id
    table.look(0.0)
    looks.clear()

    for now, clock in ((1.0, 9), (2.0, 9), (3.0, 10)):
        clocks[11] = clock
        table.refresh(child, now)
        table.refresh(child, now)

    assert looks == [11, 11]


def test_a_young_process_is_read_again_only_if_it_ran(tmp_path: Path) -> None:
    clocks, looks, tree = {1: 5, 10: 7, 11: 8}, list[int](), family(tmp_path)
    table = clocked_table(tree, clocks, looks)
    table.look(0.0)
    looks.clear()
    clocks[11] = 9
    tree.change(11, "vllm serve", comm="vllm")
    table.look(5.0)

    known = table.get(11)
    assert known is not None
    assert known.stat.comm == "vllm"
    assert [pid for pid in looks if pid > 1] == [11]


@pytest.mark.parametrize("ran", [True, False])
def test_a_watched_process_is_read_at_each_look_if_it_ran_since_however_old_it_is(tmp_path: Path, ran: bool) -> None:
    clocks, looks, tree = {1: 5, 10: 7, 11: 8}, list[int](), family(tmp_path)
    table = clocked_table(tree, clocks, looks)
    table.look(0.0)
    table.look(YOUNG_SECONDS + 1)
    found = table.get(11)
    assert found is not None
    clocks[11] += ran
    tree.change(11, "vllm serve", comm="vllm")
    looks.clear()
    table.look(YOUNG_SECONDS + 2)
    unwatched = [pid for pid in looks if pid > 1]
    table.look(YOUNG_SECONDS + 3, {found.id: lambda: None})

    assert unwatched == []
    assert (table.get(11) or found).stat.comm == ("vllm" if ran else found.stat.comm)
    assert [pid for pid in looks if pid > 1] == [11] * ran


def test_a_watched_process_that_ended_is_lost_and_nothing_is_listed_for_it(tmp_path: Path) -> None:
    clocks, looks, tree = {1: 5, 10: 7, 11: 8}, list[int](), family(tmp_path)
    table = clocked_table(tree, clocks, looks)
    table.look(0.0)
    found = table.get(11)
    assert found is not None
    del clocks[11]
    tree.end(11)
    table.look(5.0, {found.id: lambda: None})

    assert table.get(11) is None
    assert not table._has_missed


def test_a_cheaper_way_to_stat_is_taken_and_where_it_ends_the_pid_may_be_anothers(node: Node) -> None:
    old = node.tree.add(10, "old")
    node.look(0.0)
    node.look(YOUNG_SECONDS + 1)
    cheap = ProcFs(node.tree.root).stat(10)
    node.tree.replace(10, "new", started=200.0)

    node.table.look(YOUNG_SECONDS + 2, {old.id: lambda: cheap})
    before = node.table.find(old.id)
    node.table.look(YOUNG_SECONDS + 3, {old.id: lambda: None})

    assert before is not None
    assert before.stat is cheap
    assert (known := node.table.get(10)) is not None
    assert known.id.start_ticks == 20000


def test_a_listing_like_the_one_before_is_gone_through_where_somebody_was_lost_since(node: Node) -> None:
    """The PID of a member that ended may be another's by then."""
    old = node.tree.add(10, "old")
    node.look(0.0)
    node.tree.end(10)
    node.table.refresh(old.id, 1.0)
    lost = node.pids()
    node.tree.add(10, "new", started=200.0)
    node.look(5.0)

    assert lost == []
    assert node.command(10) == "new"


def test_a_listing_like_the_one_before_is_gone_through_where_somebody_could_not_be_read(node: Node) -> None:
    node.tree.add(10, "a")
    stat = (node.tree.root / "10" / "stat").read_bytes()
    (node.tree.root / "10" / "stat").write_bytes(b"")
    node.look(0.0)
    unread = node.pids()
    (node.tree.root / "10" / "stat").write_bytes(stat)
    (node.tree.root / "stat").write_text("processes 7\n")
    node.look(5.0)

    assert (unread, node.pids()) == ([], [10])


def test_a_listing_like_the_one_before_is_not_gone_through_else(tmp_path: Path) -> None:
    """Threads are forked on a busy machine all the time."""
    clocks, looks, tree = {1: 5, 10: 7, 11: 8}, list[int](), family(tmp_path)
    tree.add(2, "", comm="kthreadd", flags=KERNEL_THREAD, ppid=0)
    table = clocked_table(tree, clocks, looks)
    table.look(0.0)
    table.look(YOUNG_SECONDS + 1)
    looks.clear()
    (tree.root / "stat").write_text("processes 7\n")
    table.look(YOUNG_SECONDS + 2)

    assert looks == [0]


def test_a_pid_that_is_a_kernel_threads_by_now_is_nobodys(node: Node) -> None:
    node.tree.add(20, "a")
    node.look(0.0)
    node.tree.replace(20, "", comm="kworker/0:1", flags=KERNEL_THREAD, started=200.0)
    node.look(5.0)

    assert node.pids() == []


def test_told_are_those_whose_command_line_was_asked_for(node: Node) -> None:
    node.tree.add(10, "a")
    node.tree.add(11, "b")
    node.look(0.0, lambda known: known.stat.pid == 10)
    told = [known.stat.pid for known in node.table.told]
    node.table.forget_commands()
    forgotten = list(node.table.told)
    node.look(1.0)
    node.tree.end(10)
    node.look(2.0)

    assert (told, forgotten) == ([10], [])
    assert [known.stat.pid for known in node.table.told] == [11]


def given_table(root: Path, *last: int | None) -> tuple[ProcTree, dict[int, int], list[int], ProcessTable]:
    """A family that was looked at twice and is young no more, its clocks, and what is looked at; then come `last`."""
    clocks, looks, tree = {1: 5, 10: 7, 11: 8}, list[int](), family(root)
    table = clocked_table(tree, clocks, looks, chain((11, 11), last))
    table.look(0.0)
    table.look(YOUNG_SECONDS + 1)
    looks.clear()
    return tree, clocks, looks, table


def test_who_got_a_pid_since_is_found_without_a_listing(tmp_path: Path) -> None:
    """Measured: a listing of 2,000 processes is two fifths of a look.  12 is a thread's, as no clock tells."""
    tree, clocks, looks, table = given_table(tmp_path, 13)
    tree.add(13, "new", ppid=10)
    clocks[13] = 3
    table.look(YOUNG_SECONDS + 2)

    assert looks == [13]
    assert (known := table.get(13)) is not None
    assert known.stat.ppid == 10


def test_nobody_is_looked_for_where_no_pid_was_given_out(tmp_path: Path) -> None:
    tree, clocks, looks, table = given_table(tmp_path, 11)
    tree.add(13, "new", ppid=10)
    clocks[13] = 3
    table.look(YOUNG_SECONDS + 2)

    assert looks == []


def test_who_was_not_there_yet_when_its_pid_was_given_out_is_found_at_the_next_look(tmp_path: Path) -> None:
    """The kernel counts the PID up before the process can be seen."""
    tree, clocks, looks, table = given_table(tmp_path, 13, 14)
    table.look(YOUNG_SECONDS + 2)
    tree.add(13, "new", ppid=10)
    clocks[13] = 3
    table.look(YOUNG_SECONDS + 7)

    assert looks == [13]


@pytest.mark.parametrize("last", [10, 11 + MOST_GIVEN + 1, None])
def test_all_are_listed_where_pids_began_again_or_are_too_many_or_are_not_told(
    tmp_path: Path, last: int | None
) -> None:
    tree, clocks, looks, table = given_table(tmp_path, last)
    tree.add(9, "new", ppid=10)
    clocks[9] = 3
    table.look(YOUNG_SECONDS + 2)

    assert looks[:2] == [0, 9]
    assert table.get(9) is not None


def test_a_known_pid_that_was_given_out_again_is_another_process(tmp_path: Path) -> None:
    tree, clocks, _, table = given_table(tmp_path, 14, 14)
    tree.add(13, "old", ppid=10)
    clocks[13] = 3
    table.look(YOUNG_SECONDS + 2)
    new = tree.replace(13, "new", ppid=10, started=500.0)
    clocks[13] = 1
    table.look(YOUNG_SECONDS + 7)

    assert table.find(new.id) is not None


def test_seldom_all_are_listed_anyway(tmp_path: Path) -> None:
    """A process may be given a PID of somebody's choice (clone3(2), set_tid)."""
    tree, clocks, looks, table = given_table(tmp_path, *[11] * 9)
    tree.add(9, "chosen", ppid=10)
    clocks[9] = 3
    seconds = YOUNG_SECONDS + 1
    while seconds < YOUNG_SECONDS + 1 + LISTING_SECONDS:
        assert table.get(9) is None
        seconds += FULL_LOOK_SECONDS
        table.look(seconds)

    assert looks.count(0) == 1
    assert table.get(9) is not None


def test_who_ended_is_missed_by_its_clock_without_a_listing(tmp_path: Path) -> None:
    tree, clocks, looks, table = given_table(tmp_path, 11)
    tree.end(11)
    del clocks[11]
    table.look(YOUNG_SECONDS + FULL_LOOK_SECONDS + 2)

    assert 0 not in looks
    assert table.get(11) is None
    assert table.get(10) is not None


@pytest.mark.parametrize("is_hidden", [True, False])
def test_all_are_listed_soon_when_somebody_could_not_be_read_who_is_there(tmp_path: Path, is_hidden: bool) -> None:
    tree, clocks, looks, table = given_table(tmp_path, 13, 13, 13, 13)
    tree.add(13, "new", ppid=10)
    clocks[13] = 3
    if is_hidden:
        tree.forbid(13, "stat")
    table.look(YOUNG_SECONDS + 2)
    table.look(YOUNG_SECONDS + 7)
    if is_hidden:
        (tree.folder(13) / "stat").rmdir()
        tree.change(13)
    table.look(YOUNG_SECONDS + 12)
    assert (table.get(13) is None) is is_hidden
    assert 0 not in looks
    table.look(YOUNG_SECONDS + FULL_LOOK_SECONDS + 2)

    assert looks.count(0) == is_hidden
    assert table.get(13) is not None


class Crowd(ProcFs):
    """A server, and beside it a crowd of another user's, which needs no files; counts whose stat is read."""

    def __init__(self, tree: ProcTree) -> None:
        super().__init__(tree.root)
        self.pids_of_crowd = range(0)
        self.read: list[int] = []
        self._pattern = super().stat(1)

    def pids(self) -> list[int]:
        return [*super().pids(), *self.pids_of_crowd]

    def stat(self, pid: int) -> Stat | None:
        self.read.append(pid)
        if pid in self.pids_of_crowd and self._pattern is not None:
            return replace(self._pattern, pid=pid, ppid=1, comm="idle")
        return super().stat(pid)

    def owner(self, pid: int) -> int | None:
        return 1000 if pid in self.pids_of_crowd else 0

    def cpu_clock(self, pid: int) -> int | None:
        return 1 if pid in self.pids_of_crowd or os.path.exists(self.path(pid)) else None


def test_ten_thousand_that_come_at_once_are_read_once_keep_nobody_waiting_and_leave_nothing(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(1, "init", ppid=0)
    crowd, asked = Crowd(tree), list[int]()

    def command_line(process: ProcessId) -> CommandLine:
        asked.append(process.pid)
        return CommandLine(("idle",))

    table = ProcessTable(crowd, command_line, _understand)
    table.look(0.0)
    table.read_commands(lambda known: True, 0.0)
    crowd.pids_of_crowd = range(100, 10_100)
    tree.add(20_000, "server")
    crowd.read.clear()
    asked.clear()
    table.look(1.0)
    table.read_commands(lambda known: True, 1.0)
    assert sorted(crowd.read) == [1, *crowd.pids_of_crowd, 20_000]
    assert len(asked) == MOST_COMMANDS
    assert 20_000 in asked[:2], "each user has his turn"

    crowd.read.clear()
    table.look(2.0)
    assert crowd.read == [1], "who stands still is not read again; the first process has no parent that could tell"

    crowd.pids_of_crowd = range(0)
    table.look(2.0 + FULL_LOOK_SECONDS)
    assert {known.stat.pid for known in table} == {1, 20_000}
    assert {known.stat.pid for known in table.told} == {1, 20_000}
    assert [known.stat.pid for known in table.children_of(1)] == [20_000]
