"""Threads by what they wait in, also where the kernel does not tell."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proc_tree import FUTEX, ProcTree, Thread, threads
from stallwatch.config import Config
from stallwatch.model import WAITS, Process, ProcessId, Reading, Scene, Server
from stallwatch.sources import Host, Moment
from stallwatch.sources.procfs import parse_stat
from stallwatch.sources.threads import ACTIVE_LOOKS, Threads

NOW = Moment(1.0, 1.0)
FUTEX_NUMBERS, READ_NUMBERS = {"x86_64": "202 ", "aarch64": "98 "}, {"x86_64": "0 ", "aarch64": "63 "}
"""How the syscall file of a thread begins that waits for a lock, or reads."""


class Node:
    """One rank TP0 with PID 10 in a tree of files, looked at by the collector."""

    def __init__(self, root: Path, machine: str = "x86_64", most_kept: int = 1000) -> None:
        self.tree = ProcTree(root)
        self.source = Threads(Host(Config(), (), proc=root), machine, most_kept)
        self.processes: dict[int, Process] = {}

    def show(self, tasks: dict[int, Thread], pid: int = 10, rank: str = "TP0", state: str = "S") -> None:
        if pid in self.processes:
            self.tree.change(pid, tasks=tasks, state=state)
        else:
            spec = self.tree.add(pid, "x", tasks=tasks, state=state)
            self.processes[pid] = Process(spec.id, rank)

    def read(self) -> list[Reading]:
        server = Server("s", "vllm", "server", ProcessId(10, 1), 0.0, tuple(self.processes.values()))
        items = self.source.read(Scene(servers=(server,)), NOW)
        return [item for item in items if isinstance(item, Reading)]

    def look(self, rank: str = "TP0") -> dict[str, float | None]:
        """Class -> threads; a class that is asked for and not readable is None."""
        found = {r.labels[2]: r.value for r in self.read() if r.signal.name == "threads" and r.labels[1] == rank}
        assert tuple(found) in (WAITS, ())
        return {wait: value for wait, value in found.items() if value != 0}

    def main(self) -> str | None:
        return next((r.labels[2] for r in self.read() if r.signal.name == "main_thread"), None)

    def open_files(self) -> int:
        """Descriptors that lead into the tree."""
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum(1 for link in links if os.path.lexists(link) and str(self.tree.root) in os.readlink(link))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.source.close()
    assert made.open_files() == 0


POLL = Thread("232 0x5 0x7f 0x40 0xffffffff 0x0 0x8 0x7f 0x7f", "do_epoll_wait")
SLEEP = Thread("230 0x0 0x0 0x7f 0x0 0x0 0x0 0x7f 0x7f", "hrtimer_nanosleep")
RUNNING = Thread("running", "0", "R")
READS = Thread("0 0x3 0x7f 0x1000 0x0 0x0 0x0 0x7f 0x7f", "anon_pipe_read")
WRITES = Thread("1 0x1 0x7f 0x79 0x0 0x0 0x0 0x7f 0x7f", "anon_pipe_write")
DISK = Thread("0 0x3 0x7f 0x1000 0x0 0x0 0x0 0x7f 0x7f", "folio_wait_bit_common", "D")
FAULT = Thread("-1 0x7ffd 0x7f01", "folio_wait_bit_common", "D")
ALL_UNREADABLE = dict.fromkeys(WAITS[:-1])


def test_a_silent_rank_is_two_hundred_threads_in_futex(node: Node) -> None:
    node.show({10: Thread(), **threads(203, Thread(), 11), 300: POLL})

    assert node.look() == {"futex": 204, "poll": 1}
    assert node.main() == "futex"


def test_the_class_comes_from_the_system_call_and_from_the_state_where_that_does_not_say(node: Node) -> None:
    node.show({10: RUNNING, 11: Thread(), 12: POLL, 13: SLEEP, 14: READS, 15: DISK, 16: FAULT})

    assert node.look() == {"running": 1, "futex": 1, "poll": 1, "sleep": 1, "other": 1, "disk": 2}
    assert node.main() == "running"


@pytest.mark.parametrize(
    ("main", "expected"),
    [(WRITES, "write"), (READS, "other"), (replace(WRITES, state="D"), "disk"), (RUNNING, "running")],
)
@pytest.mark.parametrize("with_syscall", [True, False])
def test_a_main_thread_whose_write_nobody_takes_is_told_from_others(
    node: Node, main: Thread, expected: str, with_syscall: bool
) -> None:
    shown = {10: main, 11: Thread(), 12: WRITES}
    node.show(shown if with_syscall else {thread: replace(each, syscall=None) for thread, each in shown.items()})

    assert node.look().get("other") == (2 if expected in ("write", "other") else 1)
    assert node.main() == expected


def test_a_stopped_process_is_stopped_although_its_threads_still_show_futex(node: Node) -> None:
    """After SIGSTOP the syscall file keeps the number of the wait that was interrupted."""
    node.show({10: Thread(state="T"), 11: Thread(state="T")}, state="T")

    assert node.look() == {"stopped": 2}
    assert node.main() == "stopped"


def test_a_process_that_a_debugger_holds_is_not_stopped(node: Node) -> None:
    """State T for a window pages; gdb on a rank must not."""
    node.show({10: Thread(state="t")}, state="t")

    assert node.look() == {"other": 1}
    assert node.main() == "other"


def test_a_sleep_taken_up_again_is_what_its_symbol_says(node: Node) -> None:
    """After SIGCONT the number is that of restart_syscall."""
    again = "219 0x0 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f"
    node.show({10: Thread(again, "hrtimer_nanosleep"), 11: Thread(again, "futex_do_wait"), 12: Thread(again, "0")})

    assert node.look() == {"sleep": 1, "futex": 1, "other": 1}


def test_numbers_of_another_architecture_mean_other_things(tmp_path: Path) -> None:
    node = Node(tmp_path, "aarch64")
    node.show({10: Thread("98 0x7f 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f"), 11: Thread(FUTEX, "inet_csk_accept")})

    assert node.look() == {"futex": 1, "other": 1}
    node.source.close()


def test_an_unknown_architecture_is_read_by_symbols(tmp_path: Path) -> None:
    node = Node(tmp_path, "riscv64")
    node.show({10: Thread(), 11: Thread("98 0x0", "hrtimer_nanosleep"), 12: RUNNING})

    assert node.look() == {"futex": 1, "sleep": 1, "running": 1}
    node.source.close()


def test_an_unknown_architecture_without_symbols_is_unreadable(tmp_path: Path) -> None:
    node = Node(tmp_path, "riscv64")
    node.show({10: Thread(wchan="0"), 11: Thread(wchan="0")})

    assert node.look() == {**ALL_UNREADABLE, "unreadable": 2}
    node.source.close()


def test_without_the_right_to_syscall_the_symbols_count(node: Node) -> None:
    node.show({10: Thread(None), 11: Thread(None, "do_epoll_wait"), 12: Thread(None, "0", "R")})

    assert node.look() == {"futex": 1, "poll": 1, "running": 1}


def test_a_thread_in_disk_sleep_is_known_by_its_state_where_only_symbols_are(node: Node) -> None:
    node.show({10: Thread(None), 11: Thread(None, "folio_wait_bit_common", "D"), 12: Thread(None, "anon_pipe_read")})

    assert node.look() == {"futex": 1, "disk": 1, "other": 1}


@pytest.mark.parametrize("symbol", ["0", None])
def test_a_zero_for_a_sleeping_thread_makes_all_unreadable_and_never_no_blocked_threads(
    node: Node, symbol: str | None
) -> None:
    """No right to look, an x86 kernel before 5.16, or a kernel without the file: all the same to us."""
    node.show({10: Thread(None, symbol), 11: Thread(None, symbol, "R"), 12: Thread(None, symbol, "D")})

    assert node.look() == {**ALL_UNREADABLE, "unreadable": 3}
    assert {r.reason for r in node.read() if r.value is None} == {"permission"}
    assert node.main() is None


def test_a_zero_while_every_thread_runs_or_has_ended_proves_nothing(node: Node) -> None:
    node.show({10: Thread(None, "0", "R"), 11: Thread(None, "0", "Z")})

    assert node.look() == {"running": 1, "other": 1}


def test_files_that_open_and_cannot_be_read_are_unreadable_and_never_zero(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.show({10: Thread(None), 11: Thread(None)})
    for thread in (10, 11):
        (node.tree.folder(10) / f"task/{thread}/syscall").mkdir()

    assert node.look() == dict.fromkeys(WAITS)
    assert {r.reason for r in node.read()} == {"error"}
    node.source.close()


def test_the_set_of_threads_changes(node: Node) -> None:
    node.show({10: Thread(), 11: Thread()})
    before = node.look()
    node.show({10: Thread(), 12: POLL, 13: POLL})
    after = node.look()
    node.show({10: Thread()})

    assert (before, after, node.look()) == ({"futex": 2}, {"futex": 1, "poll": 2}, {"futex": 1})
    assert node.open_files() == 1


def test_as_many_threads_as_before_may_be_other_threads(node: Node) -> None:
    node.show({10: Thread(), 11: Thread()})
    node.look()
    node.show({10: Thread(), 12: POLL})

    assert node.look() == {"futex": 1, "poll": 1}


def test_a_leader_that_ended_before_its_threads_does_not_hide_them(node: Node) -> None:
    node.show({10: Thread("-1 0x0 0x0", "0", "Z"), 11: Thread(), 12: Thread()}, state="Z")

    assert node.look() == {"futex": 2, "other": 1}


def test_a_process_that_vanished_is_not_spoken_of(node: Node) -> None:
    node.show({10: Thread()})
    node.look()
    node.tree.end(10)

    assert node.read() == []


def test_a_process_that_vanishes_while_it_is_read_is_not_spoken_of(node: Node) -> None:
    node.show({10: Thread()})
    shutil.rmtree(node.tree.folder(10) / "task")

    assert node.read() == []


def test_another_process_with_the_same_pid_is_not_counted(node: Node) -> None:
    node.show({10: Thread()})
    node.tree.replace(10, "y", started=500.0, tasks={10: POLL})

    assert node.read() == []


def test_front_ends_are_summed_and_have_no_main_thread(node: Node) -> None:
    node.show({10: POLL}, 10, "main")
    node.show({20: POLL, 21: Thread()}, 20, "detokenizer")
    node.show({30: Thread()}, 30, "engine")

    assert node.look("frontend") == {"poll": 2, "futex": 1}
    assert [r.labels[1:] for r in node.read() if r.signal.name == "main_thread"] == [("engine", "futex")]


def test_one_unreadable_front_end_makes_their_sum_unreadable(node: Node) -> None:
    node.show({10: POLL}, 10, "main")
    node.show({20: Thread(None, "0")}, 20, "detokenizer")

    assert node.look("frontend") == {**ALL_UNREADABLE, "unreadable": 1}


def test_a_garbled_file_is_an_error_and_not_a_death(node: Node) -> None:
    node.show({10: Thread()})
    (node.tree.folder(10) / "stat").write_text("10 (x")

    assert {(r.value, r.reason) for r in node.read()} == {(None, "error")}


def test_without_room_for_descriptors_threads_are_read_without_keeping_them(tmp_path: Path) -> None:
    node = Node(tmp_path, most_kept=3)
    node.show({10: Thread(), 11: POLL}, 10, "TP0")
    node.show({20: Thread(), 21: POLL, 22: POLL}, 20, "TP1")

    assert (node.look("TP0"), node.look("TP1")) == ({"futex": 1, "poll": 1}, {"futex": 1, "poll": 2})
    assert node.open_files() == 2
    node.source.close()


def test_without_room_and_without_the_right_it_is_unreadable_all_the_same(tmp_path: Path) -> None:
    node = Node(tmp_path, most_kept=0)
    node.show({10: Thread(None, "0"), 11: Thread(None, "0")})

    assert node.look() == {**ALL_UNREADABLE, "unreadable": 2}
    node.source.close()


def test_room_is_given_back_when_a_process_goes(tmp_path: Path) -> None:
    node = Node(tmp_path, most_kept=2)
    for number in range(5):
        node.show({10: Thread(), 11: Thread()})
        assert node.look() == {"futex": 2}, number
        assert node.open_files() == 2
        node.tree.end(10)
        node.processes.clear()
        node.look()
    node.source.close()


def marked(thread: Thread, mark: str = "900 70 3") -> Thread:
    """With what schedstat says: ns on a CPU, ns of waiting for one, times it was put on one."""
    return replace(thread, schedstat=mark)


def test_a_thread_that_slept_and_did_not_run_since_is_not_read_again(node: Node) -> None:
    node.show({10: marked(Thread()), 11: marked(Thread())})
    before = node.look()
    node.show({10: marked(POLL), 11: marked(POLL, "950 70 4")})

    assert (before, node.look()) == ({"futex": 2}, {"futex": 1, "poll": 1})
    assert node.open_files() == 2 + 1


def test_the_file_of_a_thread_stays_open_while_it_runs_between_all_looks(node: Node) -> None:
    """A busy node may have many of them, and a file that is open costs half."""
    node.show({10: marked(Thread()), 11: marked(Thread())})
    for mark, is_open in (("1 0 1", 0), ("2 0 2", 1), ("3 0 3", 1), ("3 0 3", 0)):
        node.show({10: marked(SLEEP, mark), 11: marked(Thread())})
        assert (node.look(), node.open_files() - 2) == ({"sleep": 1, "futex": 1}, is_open), mark


@pytest.mark.parametrize("mark", ["900 70 3", None])
def test_a_thread_that_ended_is_not_the_next_one_of_the_same_number(node: Node, mark: str | None) -> None:
    node.show({10: replace(RUNNING, schedstat=mark), 11: replace(Thread(), schedstat=mark)})
    node.look()
    node.show({10: replace(RUNNING, schedstat=mark)})
    node.show({10: replace(RUNNING, schedstat=mark), 11: replace(POLL, schedstat=mark)})

    assert node.look() == {"running": 1, "poll": 1}
    assert node.look() == {"running": 1, "poll": 1}


@pytest.mark.parametrize("before", [RUNNING, Thread(None, "0", "R")])
def test_a_thread_that_did_not_sleep_is_read_again_though_schedstat_says_the_same(node: Node, before: Thread) -> None:
    """What it ran for before it went to sleep may be counted as another's."""
    node.show({10: marked(before)})
    node.look()
    node.show({10: marked(POLL)})

    assert node.look() == {"poll": 1}


@pytest.mark.parametrize("mark", ["0 0 0", None])
def test_where_schedstat_says_nothing_every_thread_is_read_each_time(node: Node, mark: str | None) -> None:
    node.show({10: replace(Thread(), schedstat=mark), 11: replace(SLEEP, schedstat=mark)})
    before = node.look()
    node.show({10: replace(POLL, schedstat=mark), 11: replace(SLEEP, schedstat=mark)})

    assert (before, node.look()) == ({"futex": 1, "sleep": 1}, {"poll": 1, "sleep": 1})
    assert node.open_files() == 2


def test_a_thread_that_never_ran_does_not_make_schedstat_worth_nothing(node: Node) -> None:
    """It was made a moment ago, or waits for a CPU; what the others say still holds."""
    node.show({10: marked(Thread()), 11: marked(RUNNING, "0 0 0")})
    before = node.look()
    node.show({10: marked(POLL), 11: marked(POLL, "40 9 1")})

    assert (before, node.look()) == ({"futex": 1, "running": 1}, {"futex": 1, "poll": 1})


@pytest.mark.parametrize("left", [0, 1, None])
def test_where_no_more_files_can_be_opened_none_is_lost(
    left: int | None, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of the whole machine may be full for a while: what was opened until then is closed like any other."""
    node.show({10: marked(Thread()), 11: marked(Thread()), 12: marked(POLL)})
    real, opened = os.open, list[str]()

    def scarce(path: str, *how: int) -> int:
        if str(path).endswith("schedstat"):
            opened.append(path)
            if left is not None and len(opened) > left:
                raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return real(path, *how)

    with monkeypatch.context() as context:
        context.setattr(os, "open", scarce)
        reasons = {(reading.value is None, reading.reason) for reading in node.read()}
    assert reasons == ({(False, None)} if left is None else {(True, "error")})
    assert node.open_files() == (3 if left is None else left)

    assert node.look() == {"futex": 2, "poll": 1}
    assert node.open_files() == 3
    node.tree.end(10)
    node.processes.clear()
    node.look()
    assert (node.open_files(), node.source._room._left) == (0, 1000)


def test_threads_come_and_go_where_schedstat_tells_who_ran(node: Node) -> None:
    node.show({10: marked(Thread()), 11: marked(Thread()), 12: marked(SLEEP)})
    before = node.look()
    node.show({10: marked(Thread()), 12: marked(SLEEP), 13: marked(POLL)})
    as_many = node.look()
    node.show({10: marked(Thread()), 13: marked(SLEEP), 14: marked(POLL), 15: marked(POLL)})

    assert (before, as_many) == ({"futex": 2, "sleep": 1}, {"futex": 1, "sleep": 1, "poll": 1})
    assert node.look() == {"futex": 1, "poll": 3}
    assert node.open_files() == 4


def test_the_right_to_syscall_may_be_lost_after_the_first_look(node: Node) -> None:
    """Symbols count for all threads then, also of those that did not run."""
    node.show({10: marked(Thread(wchan="hrtimer_nanosleep")), 11: marked(Thread())})
    node.look()
    node.show({10: marked(Thread(None, "hrtimer_nanosleep")), 11: marked(Thread(None), "901 70 4")})

    assert node.look() == {"sleep": 1, "futex": 1}


@pytest.mark.parametrize(("code", "expected"), [(errno.EPERM, {"poll": 2}), (errno.ESRCH, {"futex": 1, "poll": 1})])
def test_a_kept_file_that_cannot_be_read_any_more(
    node: Node, code: int, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused: the symbols count.  Of one that ended the descriptor says so; the others are told all the same."""
    node.show({10: Thread(wchan="do_epoll_wait"), 11: Thread(wchan="do_epoll_wait")})
    node.look()
    if code == errno.ESRCH:
        node.show({10: Thread(wchan="do_epoll_wait"), 12: POLL})
    read = os.pread

    def refuse(fd: int, size: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)").endswith("11/syscall"):
            raise OSError(code, os.strerror(code))
        return read(fd, size, offset)

    monkeypatch.setattr(os, "pread", refuse)

    assert node.look() == expected


def _let_run(node: Node, monkeypatch: pytest.MonkeyPatch, shown: dict[int, Thread]) -> list[str]:
    """Show threads, and a clock that is their sum; the files that are read by a kept descriptor from now on."""
    node.show(shown)
    total = sum(int((each.schedstat or "0").split()[0]) for each in shown.values())
    monkeypatch.setattr(node.source._proc, "cpu_clock", lambda pid: total)
    read, files = os.pread, list[str]()

    def noted(fd: int, size: int, offset: int) -> bytes:
        files.append("/".join(os.readlink(f"/proc/self/fd/{fd}").split("/")[-2:]))
        return read(fd, size, offset)

    monkeypatch.setattr(os, "pread", noted)
    return files


def _settle(node: Node, monkeypatch: pytest.MonkeyPatch) -> dict[int, Thread]:
    """Three looks at eight threads that sleep beside one that runs, and who is shown last."""
    shown = {10: marked(SLEEP, "1000 0 1"), **threads(8, marked(Thread(), "500 0 1"), 11)}
    for mark in ("1000 0 1", "2000 0 2", "3000 0 3"):
        shown[10] = marked(SLEEP, mark)
        with monkeypatch.context() as context:
            _let_run(node, context, shown)
            assert node.look() == {"sleep": 1, "futex": 8}
    return shown


def test_where_the_clock_moved_by_what_the_busy_few_ran_no_other_thread_is_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = _settle(node, monkeypatch)
    files = _let_run(node, monkeypatch, {**shown, 10: marked(POLL, "3500 0 4")})

    assert node.look() == {"poll": 1, "futex": 8}
    assert files == ["10/schedstat", "10/syscall"]


@pytest.mark.parametrize("ns", [1, 499, 500])
def test_where_it_moved_by_more_all_are_read(node: Node, monkeypatch: pytest.MonkeyPatch, ns: int) -> None:
    """Also where another thread alone ran, and for as short as can be."""
    shown = _settle(node, monkeypatch)
    changed = {**shown, 10: marked(SLEEP, "3500 0 4"), 15: marked(POLL, f"{500 + ns} 0 2")}
    files = _let_run(node, monkeypatch, changed)

    assert node.look() == {"sleep": 1, "poll": 1, "futex": 7}
    assert {f"{thread}/schedstat" for thread in shown} <= set(files)

    files = _let_run(node, monkeypatch, {**changed, 15: marked(SLEEP, f"{501 + ns} 0 3")})
    assert node.look() == {"sleep": 2, "futex": 7}
    assert [file for file in files if file.endswith("schedstat")] == ["10/schedstat", "15/schedstat"]


@pytest.mark.parametrize("change", [{19: marked(POLL, "0 0 0")}, {19: marked(POLL, "70 0 1")}])
def test_a_new_thread_is_seen_though_only_the_busy_few_ran(
    node: Node, monkeypatch: pytest.MonkeyPatch, change: dict[int, Thread]
) -> None:
    shown = {**_settle(node, monkeypatch), 10: marked(SLEEP, "3500 0 4")}
    _let_run(node, monkeypatch, shown | change)

    assert node.look() == {"sleep": 1, "futex": 8, "poll": 1}


def test_one_of_the_busy_few_that_ended_is_not_told_of(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another that began may have its number: the descriptor says that it is another."""
    shown = {**_settle(node, monkeypatch), 12: marked(SLEEP, "900 0 2")}
    _let_run(node, monkeypatch, shown)
    assert node.look() == {"sleep": 2, "futex": 7}
    node.show({thread: each for thread, each in shown.items() if thread != 12})
    _let_run(node, monkeypatch, {**shown, 12: marked(POLL, "30 0 1")})

    assert node.look() == {"sleep": 1, "futex": 7, "poll": 1}


def test_a_busy_thread_that_ran_for_the_last_time_long_ago_is_one_of_the_others_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = _settle(node, monkeypatch)
    for look in range(1, ACTIVE_LOOKS + 2):
        shown[11] = marked(Thread(), f"{600 + look} 0 {1 + look}")
        with monkeypatch.context() as context:
            files = _let_run(node, context, shown)
            node.look()
        assert ("10/schedstat" in files) == (look <= ACTIVE_LOOKS), look
    files = _let_run(node, monkeypatch, {**shown, 10: marked(POLL, "3001 0 4")})

    assert node.look() == {"poll": 1, "futex": 8}
    assert "12/schedstat" in files


def test_a_read_of_the_busy_few_that_fails_is_told_of_and_the_next_look_is_as_any(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = _settle(node, monkeypatch)
    _let_run(node, monkeypatch, {**shown, 10: marked(POLL, "3500 0 4")})

    def broken(fd: int, size: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as context:
        context.setattr(os, "pread", broken)
        assert {(r.value, r.reason) for r in node.read()} == {(None, "error")}

    assert node.look() == {"poll": 1, "futex": 8}


def test_a_process_is_stopped_though_only_the_busy_few_ran(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _settle(node, monkeypatch)
    _let_run(node, monkeypatch, {**shown, 10: marked(SLEEP, "3500 0 4")})
    node.show({**shown, 10: marked(SLEEP, "3500 0 4")}, state="T")

    assert node.look() == {"stopped": 9}


def test_what_is_told_again_is_the_very_same(node: Node) -> None:
    """And what changed is told anew, though nothing else did."""
    node.show({10: Thread(), 11: Thread(), 12: POLL})
    first, second = node.read(), node.read()
    node.show({10: Thread(), 11: POLL, 12: POLL})
    third = node.read()

    assert [new is old for new, old in zip(second, first, strict=True)] == [True] * len(first)
    assert {new.labels[2] for new, old in zip(third, first, strict=True) if new is not old} == {"futex", "poll"}
    assert [r.value for r in third if r.labels[2] in ("futex", "poll")] == [1, 2, 1]


def test_a_process_whose_clock_stands_is_not_read_again(tmp_path: Path) -> None:
    """A real process and its clock, its files in a tree of ours: an unmoved clock proves that no thread ran."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    try:
        _wait_asleep(child)
        node = Node(tmp_path)
        (tmp_path / "self").symlink_to(str(os.getpid()))
        node.source = Threads(Host(Config(), (), proc=tmp_path), "x86_64", 100)
        node.show({child.pid: Thread()}, child.pid)
        before = node.look()
        node.show({child.pid: POLL}, child.pid)
        skipped = node.look()
    finally:
        child.communicate()
        node.source.close()

    assert (before, skipped) == ({"futex": 1}, {"futex": 1})


def _wait_asleep(cat: subprocess.Popen[bytes]) -> None:
    """Until it has echoed one byte, so that it has started, and sleeps in its next read."""
    assert cat.stdin is not None
    assert cat.stdout is not None
    cat.stdin.write(b"x")
    assert cat.stdout.read(1) == b"x"
    stat = Path(f"/proc/{cat.pid}/stat")
    until = time.monotonic() + 60
    while parse_stat(stat.read_bytes()).state != "S":
        assert time.monotonic() < until


def test_a_process_whose_clock_moves_is_read_again(tmp_path: Path) -> None:
    """The twin of the test above: our own clock moves with each line."""
    node = Node(tmp_path)
    (tmp_path / "self").symlink_to(str(os.getpid()))
    node.source = Threads(Host(Config(), (), proc=tmp_path), "x86_64", 100)
    node.show({os.getpid(): Thread()}, os.getpid())
    before = node.look()
    node.show({os.getpid(): POLL}, os.getpid())

    assert (before, node.look()) == ({"futex": 1}, {"poll": 1})
    node.source.close()


def test_our_own_threads_are_read_from_the_real_files() -> None:
    source = Threads(Host(Config(), ()))
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    process = Process(ProcessId(os.getpid(), ticks), "TP0")
    server = Server("s", "vllm", "server", process.id, 0.0, (process,))

    found = {r.labels[2]: r.value for r in source.read(Scene(servers=(server,)), NOW) if isinstance(r, Reading)}
    source.close()

    assert sys.platform == "linux"
    assert found["running"] == 1


def test_a_thread_of_a_real_process_that_goes_on_to_wait_for_something_else_is_seen() -> None:
    """Ours, whose main thread is busy at each look: the one that mostly sleeps shows in the clock alone."""
    may_go_on, tell, until = threading.Lock(), list[int](), time.monotonic() + 60
    reads, writes = os.pipe()

    def other() -> None:
        tell.append(threading.get_native_id())
        with may_go_on:
            os.read(reads, 1)

    def waits_in(call: str) -> None:
        while not tell or not Path(f"/proc/self/task/{tell[0]}/syscall").read_text().startswith(call):
            assert time.monotonic() < until

    source, helper = Threads(Host(Config(), ())), threading.Thread(target=other)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    process = Process(ProcessId(os.getpid(), ticks), "TP0")
    scene = Scene(servers=(Server("s", "vllm", "server", process.id, 0.0, (process,)),))

    def look(wait: str) -> float:
        found = {r.labels[2]: r.value for r in source.read(scene, NOW) if isinstance(r, Reading)}
        return found[wait] or 0.0

    may_go_on.acquire()
    helper.start()
    try:
        waits_in(FUTEX_NUMBERS[os.uname().machine])
        for _ in range(3):
            look("futex")
        asleep, before = look("futex"), look("other")
        may_go_on.release()
        waits_in(READ_NUMBERS[os.uname().machine])
        assert (look("futex"), look("other")) == (asleep - 1, before + 1)
    finally:
        os.write(writes, b"x")
        helper.join()
        source.close()
        os.close(reads)
        os.close(writes)
