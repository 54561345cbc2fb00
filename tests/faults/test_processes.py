"""Processes that do not let themselves be looked at, that are many, or that are not who they were.

Twins without any right: test_blocking_reads.py (a command line that hangs), test_vanishing.py (what goes while it is
read), test_processes.py (a PID that is used again), test_process_table.py (10,000 at once).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from e2e.harness import wait_until

from .fuse_folder import FuseFolder
from .harness import CONFIG, PATIENCE, Exporter, Scrape, Victim, all_hold, holds_in_time

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("as_root")]

NOBODY = 65534
AS_NOBODY = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--bounding-set=-all"]
AS_NOBODY += ["--inh-caps=-all"]
MOST_LOOK_SECONDS = 5.0
"""No look of a collector may take longer, however much there is to be seen."""


UNHURRIED = CONFIG.replace("processes: 500ms, threads: 1s", "processes: 2s, threads: 2s").replace(
    "window: 3s", "window: 4s"
)
"""Intervals in which crowds can be looked at even on a busy machine."""


def cmdline_answers(pid: int) -> bool:
    """Whether the kernel lets the command line be read; asked in a process of its own."""
    asking = subprocess.Popen(["cat", f"/proc/{pid}/cmdline"], stdout=subprocess.DEVNULL)
    try:
        return asking.wait(2.0) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        asking.kill()
        asking.wait(60.0)


def test_a_process_that_holds_its_mmap_lock_is_watched_all_the_same(folder: Path, victim: Path) -> None:
    """One thread unmaps what it wrote on a mount that is dead, another waits to map: cmdline and maps hang."""
    with FuseFolder(folder) as far, Exporter(folder) as exporter:
        before = Victim(victim, folder / "sick.log", "maplock", str(far.mount / "mapped"), is_ready=is_mapped)
        with before as sick, Victim(victim, folder / "well.log") as well:
            exporter.wait_for_server(sick.name)
            with far.hanging():
                os.kill(sick.pid, signal.SIGUSR1)
                time.sleep(1.5)
                if cmdline_answers(sick.pid):
                    pytest.skip("this kernel reads a command line past the lock")
                second = Victim(victim, folder / "second.log")
                with second:  # its command line is read after the sick ones were asked for
                    exporter.wait_for_server(second.name)
                    exporter.wait_for("its verdict", lambda page: page.reason(sick.name) == "blocked_io")
                    meanwhile = exporter.rest(3.0)
            after = exporter.wait_for("the sick one", lambda page: page.value("threads", server=sick.name) == 3)

    names = (sick.name, well.name, second.name)
    holds_in_time(
        meanwhile, lambda page: all(page.value("threads", server=name) for name in names), "threads of all three"
    )
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    holds_in_time(
        meanwhile,
        lambda page: page.value("process_resident_memory_bytes", server=sick.name),
        "its memory",
        "processes",
        0.5,
    )
    holds_in_time(meanwhile, lambda page: page.value("threads", server=sick.name, wait="disk"), "where they wait")
    all_hold(meanwhile, lambda page: page.state(sick.name) == "stalled", "its verdict, whose silence goes on")
    holds_in_time(meanwhile, lambda page: page.reason(sick.name) == "blocked_io", "the reason of its verdict")
    all_hold(meanwhile, lambda page: page.reason(well.name) != "blocked_io", "which is nobody else's")
    assert not after.failed()


def is_mapped(victim: Victim) -> bool:
    return "mapped" in victim.tail()


def test_a_server_that_holds_its_mmap_lock_from_the_beginning_is_said_to_be_unidentified(
    folder: Path, victim: Path
) -> None:
    with FuseFolder(folder) as far:
        before = Victim(victim, folder / "sick.log", "maplock", str(far.mount / "mapped"), is_ready=is_mapped)
        with before as sick, Victim(victim, folder / "well.log") as well, far.hanging():
            os.kill(sick.pid, signal.SIGUSR1)
            time.sleep(1.5)
            if cmdline_answers(sick.pid):
                pytest.skip("this kernel reads a command line past the lock")
            with Exporter(folder) as exporter:
                exporter.wait_for_server(well.name)
                exporter.wait_for("a word about it", lambda page: page.value("unidentified_processes"))
                meanwhile = exporter.rest(2.0)
                exporter.stop()
    assert meanwhile[-1].value("read_errors_total", collector="processes", reason="timeout")
    all_hold(meanwhile, lambda page: page.value("threads", server=sick.name) is None, "it is no server yet")
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")


def duration(page: Scrape, collector: str) -> float:
    return page.value("collector_duration_seconds", collector=collector) or 0.0


@pytest.mark.parametrize("order", [("children", 10_000), ("threads", 20_000)], ids=["processes", "threads"])
def test_very_many_of_them_cost_time_and_nothing_else(order: tuple[str, int], folder: Path, victim: Path) -> None:
    what, number = order
    if what == "children" and int(Path("/proc/sys/kernel/pid_max").read_text()) < 2 * number:
        pytest.skip("needs more PIDs than this machine has")

    def is_whole(crowd: Victim) -> bool:
        if what == "threads":
            return psutil.Process(crowd.pid).num_threads() == number + 1
        return len(Path(f"/proc/{crowd.pid}/task/{crowd.pid}/children").read_text().split()) == number

    with Exporter(folder, config=UNHURRIED) as exporter, Victim(victim, folder / "well.log") as well:
        before = exporter.wait_for_server(well.name)
        descriptors = exporter.open_files
        with Victim(victim, folder / "crowd.log", what, str(number), is_ready=is_whole) as crowd:
            exporter.wait_for("all of them", lambda page: is_counted(page, crowd.name, what, number))
            meanwhile = exporter.rest(4.0)
        exporter.wait_for("their end", lambda page: page.state(crowd.name) in ("failed", "gone"))
        after = exporter.wait_for("a look without them", lambda page: duration(page, "processes") < 0.5)
        wait_until(lambda: exporter.open_files <= descriptors + 20, PATIENCE, "descriptors given back")

    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    holds_in_time(meanwhile, lambda page: page.value("threads", server=well.name) == 1, "the other server is watched")
    for collector in ("processes", "threads", "sockets"):
        assert max(duration(page, collector) for page in meanwhile) < MOST_LOOK_SECONDS
    assert not before.failed() | after.failed()


def is_counted(page: Scrape, server: str, what: str, number: int) -> bool:
    return page.value("threads", server=server) == (number + 1 if what == "threads" else 1)


@pytest.fixture
def launcher(folder: Path, victim: Path) -> Path:
    """The same program under a name that says nothing."""
    copy = folder / "launcher"
    copy.write_bytes(victim.read_bytes())
    copy.chmod(0o755)
    return copy


@contextmanager
def under_pid(pid: int, command: Sequence[str | Path], *order: str) -> Iterator[None]:
    """A process that has this very PID, which has just become free."""
    starting = subprocess.Popen(command, env={"VICTIM": " ".join(("as", str(pid), *order))})
    try:
        wait_until(lambda: psutil.pid_exists(pid), PATIENCE, "the same PID")
        assert psutil.Process(pid).ppid() == starting.pid
        yield
    finally:
        starting.kill()
        starting.wait(10)


def test_a_server_under_a_pid_that_was_used_before_is_a_new_start(folder: Path, victim: Path, launcher: Path) -> None:
    """Nothing of the one before is the new one's."""
    with Exporter(folder) as exporter:
        with Victim(victim, folder / "first.log") as first:
            pid = first.pid
            old = exporter.wait_for_server(first.name)
        with under_pid(pid, [launcher, "--port", first.name.rpartition("-")[2], "-m", "model.gguf"], str(victim)):
            exporter.wait_for("its start", lambda page: page.value("server_starts_total", server=first.name) == 2)
            new = exporter.wait_for_server(first.name)
    assert new.labels("rank_info", "pid") >= {str(pid)}
    before, after = (page.value("server_start_timestamp_seconds", server=first.name) for page in (old, new))
    assert before is not None
    assert after is not None
    assert after > before
    assert new.value("server_starts_total", server=first.name) == 2
    assert new.state(first.name) in ("working", "quiet")


def test_an_innocent_process_under_a_servers_pid_does_not_keep_it_alive(
    folder: Path, victim: Path, launcher: Path
) -> None:
    with Exporter(folder) as exporter:
        with Victim(victim, folder / "first.log") as first:
            pid = first.pid
            exporter.wait_for_server(first.name)
        with under_pid(pid, [launcher]):
            after = exporter.wait_for("its end", lambda page: page.state(first.name) in ("failed", "gone"))
            meanwhile = exporter.rest(2.0)
    assert after.value("rank_alive", server=first.name) == 0
    all_hold(meanwhile, lambda page: page.value("threads", server=first.name) is None, "nothing of it is counted")


@contextmanager
def hidden(mount: Path) -> Iterator[Path]:
    """A /proc that shows only our own processes to whoever may not trace."""
    mount.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"proc", os.fsencode(mount), b"proc", 0, b"hidepid=2,gid=54321") != 0:
        pytest.skip("needs the right to mount a /proc of its own")
    try:
        yield mount
    finally:
        libc.umount2(os.fsencode(mount), 2)


def test_under_hidepid_what_is_hidden_is_not_there_and_comes_when_it_is_shown(folder: Path, victim: Path) -> None:
    with hidden(folder / "proc") as proc:
        exporter = Exporter(
            folder,
            "--path.procfs",
            str(proc),
            prefix=["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"],
        )
        seen = Victim(victim, folder / "seen.log", prefix=["setpriv", "--bounding-set=-all", "--inh-caps=-all"])
        unseen = Victim(victim, folder / "unseen.log", prefix=AS_NOBODY)
        with exporter, seen, unseen:
            exporter.wait_for_server(seen.name)
            meanwhile = exporter.rest(3.0)
            subprocess.run(["mount", "-o", "remount,hidepid=0", "-t", "proc", "proc", str(proc)], check=True)
            after = exporter.wait_for("the hidden one", lambda page: page.state(unseen.name))
            later = exporter.rest(2.0)
    all_hold(meanwhile, lambda page: not page.state(unseen.name), "no word of it")
    assert exporter.said("hidden from us") == 1
    assert meanwhile[-1].value("read_errors_total", collector="processes", reason="permission")
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    assert after.value("server_starts_total", server=unseen.name) == 1
    all_hold(later, lambda page: not page.failed(), "every collector works")
