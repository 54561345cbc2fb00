from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from proc_tree import BOOT, ProcTree
from stallwatch.descriptors import Room
from stallwatch.model import ProcessId
from stallwatch.sources.procfs import CLOCK_TICKS, Io, KeptFile, ProcFs, parse_io, parse_stat, reason_of

REAL = (
    b"4001 (python3) S 1 4001 4001 0 -1 4194560 77000 12 16 3 6691 33 250 50 20 0 205 0 282034 457123456000 "
    b"19251200 18446744073709551615 94103210115072 94103210119217 140722222222222 0 0 0 0 16781312 2 0 0 0 17 1 "
    b"0 0 0 0 0 94103210129552 94103210130192 94103226167296 140737 140738 140738 140739 0\n"
)


def test_stat_is_read_in_seconds_and_bytes() -> None:
    stat = parse_stat(REAL)

    assert stat.id == ProcessId(4001, 282034)
    assert (stat.comm, stat.state, stat.ppid, stat.threads) == ("python3", "S", 1, 205)
    assert (stat.minor_faults, stat.major_faults) == (77000, 16)
    assert stat.cpu_seconds == (6691 + 33) / CLOCK_TICKS
    assert stat.reaped_cpu_seconds == 300 / CLOCK_TICKS
    assert stat.virtual_bytes == 457123456000
    assert stat.resident_bytes == 19251200 * os.sysconf("SC_PAGE_SIZE")
    assert stat.start_stack == 140722222222222


@pytest.mark.parametrize(
    "comm", [b"a) R 1 2 3", b"(sd-pam)", b"tmux: server", b")", b"", b") S (", b"VLLM::EngineCor", b"two\nlines"]
)
def test_a_comm_ends_at_the_last_bracket(comm: bytes) -> None:
    stat = parse_stat(REAL.replace(b"python3", comm))

    assert stat.comm == comm.decode()
    assert (stat.state, stat.ppid, stat.id) == ("S", 1, ProcessId(4001, 282034))


def test_a_comm_that_is_no_utf_8_is_still_a_name() -> None:
    assert parse_stat(REAL.replace(b"python3", b"caf\xe9")).comm == "caf�"


@pytest.mark.parametrize(
    ("state", "threads", "is_over", "has_memory"),
    [("S", 205, False, True), ("Z", 1, True, False), ("X", 1, True, False), ("Z", 204, False, False)],
)
def test_a_zombie_with_living_threads_is_not_over(state: str, threads: int, is_over: bool, has_memory: bool) -> None:
    line = REAL.replace(b") S ", f") {state} ".encode()).replace(b" 205 ", f" {threads} ".encode())
    stat = parse_stat(line)

    assert (stat.is_over, stat.has_memory) == (is_over, has_memory)


@pytest.mark.parametrize("content", [b"", b"4001", b"4001 (python3", b"4001 (python3) S 1 2"])
def test_what_is_no_stat_line_is_refused(content: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        parse_stat(content)


def test_io_is_read_in_bytes() -> None:
    content = b"rchar: 11\nwchar: 22\nsyscr: 3\nsyscw: 4\nread_bytes: 55\nwrite_bytes: 66\ncancelled_write_bytes: 7\n"

    assert parse_io(content) == Io(read_chars=11, written_chars=22, storage_read=55)


def test_io_without_storage_counters_is_unreadable_not_zero() -> None:
    """A kernel without CONFIG_TASK_IO_ACCOUNTING has only the first four lines."""
    with pytest.raises(OSError, match="another form"):
        parse_io(b"rchar: 11\nwchar: 22\nsyscr: 3\nsyscw: 4\n")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, "permission"),
        (errno.EPERM, "permission"),
        (errno.ENOENT, "vanished"),
        (errno.ESRCH, "vanished"),
        (errno.ETIMEDOUT, "timeout"),
        (errno.EMFILE, "error"),
        (None, "error"),
    ],
)
def test_why_a_read_failed_is_one_of_few_words(number: int | None, reason: str) -> None:
    error = OSError() if number is None else OSError(number, "x")

    assert reason_of(error) == reason


def test_a_kept_file_shows_what_stands_in_it_now(tmp_path: Path) -> None:
    path = tmp_path / "wchan"
    path.write_text("futex_do_wait")
    kept = KeptFile(path, Room(1))

    first = kept.read()
    path.write_text("0")
    second = kept.read()
    kept.close()
    kept.close()

    assert (first, second) == (b"futex_do_wait", b"0")


def test_a_kept_file_of_a_real_process_ends_with_it() -> None:
    """The descriptor pins the process: whoever gets its PID later is never seen through it."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    kept = KeptFile(f"/proc/{child.pid}/stat", Room(1))

    alive = parse_stat(kept.read())
    child.communicate()
    with pytest.raises(ProcessLookupError):
        kept.read()
    kept.close()

    assert alive.pid == child.pid


def test_a_kept_file_without_content_is_a_process_that_ended(tmp_path: Path) -> None:
    (tmp_path / "stat").touch()
    kept = KeptFile(tmp_path / "stat", Room(1))

    with pytest.raises(ProcessLookupError):
        kept.read()
    kept.close()


def test_a_file_without_room_is_read_and_not_kept_until_another_is_closed() -> None:
    room = Room(1)
    first, second = (KeptFile("/proc/self/stat", room) for _ in range(2))
    before = len(os.listdir("/proc/self/fd"))

    own = f"{os.getpid()} (".encode()
    assert all(file.read().startswith(own) for file in (first, second, second))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    first.close()
    assert second.read()
    assert not room.take()
    second.close()
    assert room.take()


def test_a_tree_of_files_is_as_good_as_a_machine(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    spec = tree.add(7, "vllm serve m", comm="vllm", inner_pid=3, cgroup="0::/system.slice/a.service\n")
    tree.add(8, "sleep 1")
    proc = ProcFs(tmp_path)

    assert sorted(proc.pids()) == [7, 8]
    assert proc.forks() == 2
    assert proc.boot_time() == BOOT
    stat = proc.stat(7)
    assert stat is not None
    assert stat.id == spec.id
    assert proc.cgroup(7) == "0::/system.slice/a.service\n"
    assert proc.owner(7) == os.geteuid()
    assert (proc.inner_pid(7), proc.inner_pid(8)) == (3, 8)


def test_the_last_pid_is_told_of_our_own_processes_only(tmp_path: Path) -> None:
    """In another namespace PIDs are given out that we do not see."""
    tree = ProcTree(tmp_path)
    (tree.root / "sys/kernel").mkdir(parents=True)
    (tree.root / "sys/kernel/ns_last_pid").write_text("4711\n")
    foreign = ProcFs(tmp_path).last_pid()
    (tree.root / "self").symlink_to(str(os.getpid()))
    ours = ProcFs(tmp_path)
    told = ours.last_pid()
    (tree.root / "sys/kernel/ns_last_pid").write_text("0\n")

    assert (foreign, told, ours.last_pid()) == (None, 4711, None)


def test_what_is_not_there_is_unknown(tmp_path: Path) -> None:
    proc = ProcFs(tmp_path)

    assert proc.forks() is None
    assert proc.last_pid() is None
    assert proc.boot_time() == 0.0
    assert proc.stat(7) is None
    assert proc.cgroup(7) == ""
    assert proc.owner(7) is None
    assert proc.inner_pid(7) == 7


def test_a_stat_that_is_cut_off_is_no_process(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(7, "x")
    (tree.folder(7) / "stat").write_text("7 (x) S 1")

    assert ProcFs(tmp_path).stat(7) is None


def test_pids_of_another_tree_have_no_clock(tmp_path: Path) -> None:
    """Our own system calls would ask about other processes with the same numbers."""
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))

    assert ProcFs(tmp_path).cpu_clock(os.getpid()) is None


def test_our_own_clock_moves_and_that_of_nobody_is_unknown() -> None:
    proc = ProcFs(Path("/proc"))

    first = proc.cpu_clock(os.getpid())
    sum(range(10000))
    second = proc.cpu_clock(os.getpid())

    assert proc.is_ours
    assert first is not None
    assert second is not None
    assert second > first
    assert proc.cpu_clock(1 << 22) is None


def test_the_clocks_of_many_are_those_of_each_and_who_is_gone_has_none() -> None:
    """No PID is larger than 1 << 22; a clock of ours moves with each line."""
    gone = [(1 << 22) + 1, (1 << 22) + 2]
    proc = ProcFs(Path("/proc"))

    before = proc.cpu_clock(os.getpid())
    clocks = proc.cpu_clocks([gone[0], os.getpid(), *gone, os.getpid(), gone[1]])

    assert before is not None
    assert [clock is None for clock in clocks] == [True, False, True, True, False, True]
    assert before < (clocks[1] or 0) <= (clocks[4] or 0)
    assert proc.cpu_clocks([]) == []


def test_no_clocks_are_asked_for_processes_of_another_tree(tmp_path: Path) -> None:
    assert ProcFs(tmp_path).cpu_clocks([os.getpid()]) == [None]
