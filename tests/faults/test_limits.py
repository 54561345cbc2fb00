"""What the exporter itself stands on runs out: descriptors, processes, disk, a root that can be written to.

Twins without any right: test_descriptors.py, test_blocking_reads.py (no helper starts), test_log_guard.py (no thread
starts), test_state_file.py (writes that fail).
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from e2e.harness import wait_until
from stallwatch.state_file import StateFolder

from .harness import PATIENCE, QUICK_STATE, Exporter, Scrape, Victim, all_hold, holds_in_time

pytestmark = pytest.mark.faults
as_root = pytest.mark.usefixtures("as_root")
"""One's own limits anybody may lower; a mount or a cgroup takes root."""

FEW = 64
"""Descriptors: the least with which a process of this kind may be expected to be started."""


def test_with_few_descriptors_everything_is_read_and_nothing_is_kept(folder: Path, victim: Path) -> None:
    with (
        Exporter(folder, prefix=["prlimit", f"--nofile={FEW}"]) as exporter,
        Victim(victim, folder / "many.log", "threads", "300") as many,
        Victim(victim, folder / "few.log") as few,
    ):
        exporter.wait_for_server(few.name)
        exporter.wait_for("all threads", lambda page: page.value("threads", server=many.name) == 301)
        pages = exporter.rest(3.0)
        assert exporter.open_files < FEW
    all_hold(pages, lambda page: not page.failed(), "every collector works")
    holds_in_time(pages, lambda page: page.value("threads", server=many.name) == 301, "all threads are counted")
    assert not pages[-1].value("read_errors_total", reason="error")


def limit_files(pid: int, number: int) -> None:
    subprocess.run(["prlimit", "--pid", str(pid), f"--nofile={number}:"], check=True)


def test_when_no_descriptor_is_left_nobody_is_taken_for_dead(folder: Path, victim: Path) -> None:
    """The limit is lowered to what is open: nothing more can be opened, nobody new is let in."""
    with Exporter(folder) as exporter, Victim(victim, folder / "server.log") as server:
        exporter.wait_for_server(server.name)
        exporter.scrapes.stop()
        client = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=5)
        scrape(client)
        limit_files(exporter.pid, 3)
        cpu = cpu_seconds(exporter.pid)
        meanwhile = [later(0.5, client) for _ in range(12)]
        cpu = cpu_seconds(exporter.pid) - cpu
        limit_files(exporter.pid, 20000)
        wait_until(lambda: not scrape(client).failed(), PATIENCE, "every collector works again")
        after = scrape(client)
        client.close()
        assert exporter.scrapes.look().status == 200  # somebody new is let in again
    answered = [page for page in meanwhile if page.status == 200]
    assert len(answered) >= 10
    all_hold(answered, lambda page: page.state(server.name) in ("working", "quiet", "unknown", "stalled"), "not dead")
    all_hold(answered, lambda page: page.value("server_starts_total", server=server.name) in (None, 1), "no new start")
    assert "processes" in answered[-1].failed()
    assert answered[-1].value("process_cpu_seconds_total", server=server.name) is None
    assert cpu < 4.0, "it does not spin"
    assert after.value("server_starts_total", server=server.name) == 1
    assert after.value("rank_alive", server=server.name) == 1
    assert after.state(server.name) not in ("failed", "gone")


def scrape(client: http.client.HTTPConnection) -> Scrape:
    begun = time.monotonic()
    client.request("GET", "/metrics")
    answer = client.getresponse()
    page = answer.read().decode()
    return Scrape(time.time(), time.monotonic() - begun, answer.status, page)


def later(seconds: float, client: http.client.HTTPConnection) -> Scrape:
    time.sleep(seconds)
    return scrape(client)


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@contextmanager
def no_more_tasks(pid: int) -> Iterator[Path]:
    """The process can start neither a thread nor a child meanwhile: a cgroup, and its limit, below what it has."""
    group = pids_group()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "pids.max").write_text("1")
        wait_until(lambda: not readers(pid), PATIENCE, "the end of the child that reads")
        yield group / "pids.max"
    finally:
        (group / "pids.max").write_text("max")
        wait_until(lambda: is_emptied(group), PATIENCE, "an empty cgroup")
        group.rmdir()


def readers(pid: int) -> list[psutil.Process]:
    """The children that read what may block; other tests' processes keep one busy."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            found += [child] * any(word.endswith("blocking_child.py") for word in child.cmdline())
    return found


def is_emptied(group: Path) -> bool:
    """Whether nobody is left in it; who is goes to the cgroup above, the children of the process too."""
    left = (group / "cgroup.procs").read_text().split()
    for pid in left:
        with suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    return not left


def pids_group() -> Path:
    """A new cgroup in the first hierarchy that limits tasks."""
    for root in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
        group = root / f"stallwatch-faults-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            if (group / "pids.max").exists():
                return group
            group.rmdir()
    pytest.skip("needs a cgroup that limits tasks")


@as_root
def test_when_fork_fails_known_servers_are_watched_and_new_ones_come_later(folder: Path, victim: Path) -> None:
    with Exporter(folder, "--web.enable-lifecycle") as exporter, Victim(victim, folder / "known.log") as known:
        exporter.wait_for_server(known.name)
        new = Victim(victim, folder / "new.log")
        with no_more_tasks(exporter.pid) as limit, new:
            exporter.process.send_signal(signal.SIGHUP)  # reads the configuration, in a thread
            exporter.wait_for("an error", lambda page: page.value("unidentified_processes"))
            meanwhile = exporter.rest(3.0)
            said = exporter.said("the helper does not start")
            limit.write_text("max")
            exporter.wait_for_server(new.name)
        exporter.process.send_signal(signal.SIGHUP)
        after = exporter.wait_for("a reload", lambda page: page.value("config_last_reload_successful") == 1)
    assert [exporter.said(f"configuration {what}") for what in ("not reloaded", "reloaded")] == [1, 1]
    assert meanwhile[-1].value("config_last_reload_successful") == 0
    holds_in_time(meanwhile, lambda page: page.value("threads", server=known.name) == 1, "the known one is watched")
    all_hold(meanwhile, lambda page: not page.state(new.name), "the new one is not known yet")
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works with what it has")
    assert said == 1
    assert meanwhile[-1].value("read_errors_total", collector="processes", reason="error")
    assert not after.failed()
    assert after.value("server_starts_total", server=new.name) == 1


@contextmanager
def small_disk(mount: Path) -> Iterator[Path]:
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@as_root
def test_a_full_disk_below_the_state_is_said_once_and_keeps_the_last_state(folder: Path, victim: Path) -> None:
    with small_disk(folder / "disk") as disk, Victim(victim, folder / "server.log") as server:
        place = disk / "state"
        with Exporter(folder, "--state.dir", str(place), command=QUICK_STATE) as exporter:
            exporter.wait_for_server(server.name)
            wait_until((place / "state.json").exists, PATIENCE, "a first state")
            with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(b"x" * 4096)
            wait_until(lambda: exporter.said("state cannot be written"), PATIENCE, "a word about it")
            meanwhile = exporter.rest(3.0)
            kept = (place / "state.json").read_bytes()
            (disk / "filler").unlink()
            wait_until(lambda: exporter.said("state is written again"), PATIENCE, "a word about the end of it")
        assert exporter.said("state cannot be written") == 1
        state = StateFolder(str(place))
        assert state.read() is not None
        state.close()
    assert kept.endswith(b"}\n")
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")


@as_root
def test_a_root_that_cannot_be_written_to_is_enough(folder: Path, victim: Path) -> None:
    """`ProtectSystem=strict`, `readOnlyRootFilesystem`: the state is done without, and said to be."""
    read_only = 'mount --make-rprivate / && mount -o remount,bind,ro / && exec "$@"'
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", read_only, "sh"]
    if subprocess.run([*prefix, "true"], check=False).returncode != 0:
        pytest.skip("needs mount namespaces")
    with Victim(victim, folder / "server.log") as server:
        place = Path("/var/lib") / folder.name
        with Exporter(folder, "--state.dir", str(place), prefix=prefix) as exporter:
            exporter.wait_for_server(server.name)
            pages = exporter.rest(3.0)
            assert exporter.said("no state is kept") == 1
            assert exporter.said("Read-only file system") == 1
    assert not place.exists()
    all_hold(pages, lambda page: not page.failed(), "every collector works")
