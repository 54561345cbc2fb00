"""A mount that does not answer: below a log, below our state, below a working directory, in the middle of a read.

Twins without any right: test_log_guard.py (mounts that hang), test_state_file.py (disks that hang), test_poller.py (an
end while a read hangs), test_security_opens.py and test_blocking_reads.py (working directories).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from e2e.harness import fetch, wait_until

from .fuse_folder import FuseFolder
from .harness import PATIENCE, QUICK_STATE, Exporter, Scrape, Victim, all_hold, holds_in_time

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("as_root", "fuse")]

LINE = "llama_model_loader: loaded meta data\n"
KEPT = '"state is kept"'
MIB = 1 << 20
LATE = 2.5
"""A mount is late when it did not answer for 2 s."""


@pytest.fixture
def fuse() -> None:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse")


def append(file: Path, lines: int) -> None:
    with file.open("a") as log:
        log.write(LINE * lines)


def log_bytes(page: Scrape, server: str) -> float | None:
    return page.value("log_bytes_total", server=server)


def test_a_dead_mount_below_a_log_stops_that_log_only(folder: Path, victim: Path) -> None:
    with FuseFolder(folder) as far, Exporter(folder) as exporter:
        sick_log, well_log = far.mount / "sick.log", folder / "well.log"
        with Victim(victim, sick_log) as sick, Victim(victim, well_log) as well:
            append(far.backing / "sick.log", 100)
            append(well_log, 100)
            exporter.wait_for(
                "both logs", lambda page: log_bytes(page, sick.name) == log_bytes(page, well.name) == 3700
            )
            with far.hanging():
                time.sleep(LATE)
                exporter.wait_for("no word of the dead log", lambda page: log_bytes(page, sick.name) is None)
                append(far.backing / "sick.log", 50)
                append(well_log, 50)
                meanwhile = exporter.rest(4.0)
            exporter.wait_for("the log again, whole", lambda page: log_bytes(page, sick.name) == 5550)

    all_hold(meanwhile, lambda page: log_bytes(page, sick.name) is None, "the dead log has no bytes")
    assert log_bytes(meanwhile[-1], well.name) == 5550
    errors = [page.value("read_errors_total", collector="logs", reason="timeout") or 0 for page in meanwhile]
    assert errors[-1] > errors[0]
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    holds_in_time(meanwhile, lambda page: page.value("threads", server=sick.name) == 1, "threads are counted")
    all_hold(meanwhile, lambda page: page.state(sick.name) in ("working", "unknown", "quiet"), "no verdict from it")


def test_a_read_that_hangs_in_the_middle_of_a_log_is_left_behind_and_taken_up_again(folder: Path, victim: Path) -> None:
    """Taken by the server and never answered: such a wait outlives SIGKILL, so nothing may wait for its thread."""
    with FuseFolder(folder, hold_from=MIB) as far, Exporter(folder) as exporter:
        sick_log, well_log = far.mount / "sick.log", folder / "well.log"
        lines = 3 * MIB // len(LINE)
        append(far.backing / "sick.log", lines)
        with Victim(victim, sick_log) as sick, Victim(victim, well_log) as well:
            exporter.wait_for_server(sick.name)
            append(well_log, 10)
            exporter.wait_for("the other log", lambda page: log_bytes(page, well.name) == 370)
            time.sleep(LATE)
            meanwhile = exporter.rest(3.0)
            far.let_go()
            after = exporter.wait_for("the whole log", lambda page: log_bytes(page, sick.name) == lines * len(LINE))

    all_hold(meanwhile, lambda page: log_bytes(page, sick.name) is None, "a part of its history is no value")
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    assert after.value("log_lines_total", server=sick.name) == lines


def test_an_exporter_whose_read_hangs_can_be_ended_and_started_again(folder: Path, victim: Path) -> None:
    """The kernel keeps the old process until the mount answers; the new one has its port."""
    with FuseFolder(folder, hold_from=0) as far:
        append(far.backing / "sick.log", 100)
        with Victim(victim, far.mount / "sick.log") as sick, Exporter(folder) as old:
            old.wait_for_server(sick.name)
            old.stop()
            wait_until(lambda: fetch(f"{old.url}/metrics")[0] == 0, PATIENCE, "nobody answers on the old port")
            with Exporter(folder) as new:
                new.wait_for_server(sick.name)
                assert not new.rest(2.0)[-1].failed()
                far.let_go()
                new.wait_for("its log", lambda page: log_bytes(page, sick.name) == 3700)
            old.process.wait(PATIENCE)


def test_state_on_a_mount_that_is_dead_at_the_start_is_done_without(folder: Path, victim: Path) -> None:
    with FuseFolder(folder) as far, Victim(victim, folder / "server.log") as server:
        with far.hanging(), Exporter(folder, "--state.dir", str(far.mount / "state")) as exporter:
            exporter.wait_for_server(server.name)
            assert exporter.said("no state is kept") == 1
            all_hold(exporter.rest(2.0), lambda page: not page.failed(), "every collector works")
        with Exporter(folder, "--state.dir", str(far.mount / "state")) as exporter:
            exporter.wait_for_server(server.name)
            assert exporter.said(KEPT) == 1
        assert (far.backing / "state" / "state.json").stat().st_size > 0


def test_state_on_a_mount_that_dies_holds_neither_the_tick_nor_the_end(folder: Path, victim: Path) -> None:
    with FuseFolder(folder) as far, Victim(victim, folder / "server.log") as server:
        place, written = str(far.mount / "state"), far.backing / "state" / "state.json"
        with Exporter(folder, "--state.dir", place, command=QUICK_STATE) as exporter:
            exporter.wait_for_server(server.name)
            wait_until(written.exists, PATIENCE, "a first state")
            with far.hanging():
                exporter.rest(1.0)  # a write is due, and hangs
                with Victim(victim, folder / "second.log") as second:
                    exporter.wait_for_server(second.name)  # a helper was started meanwhile
                meanwhile = exporter.rest(2.0)
                exporter.stop()
                wait_until(lambda: fetch(f"{exporter.url}/metrics")[0] == 0, PATIENCE, "nobody answers any more")
            exporter.process.wait(PATIENCE)  # before, the kernel may wait for the mount to close what was being written
        before = written.read_bytes()
        with Exporter(folder, "--state.dir", place) as exporter:
            exporter.wait_for_server(server.name)
            assert exporter.said('before="taken up"') == 1
        assert exporter.said("set aside") == 0
        assert before.startswith(b'{"version"')
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")


def test_a_working_directory_on_a_dead_mount_is_never_touched(folder: Path, victim: Path) -> None:
    """The server's, and our own."""
    with (
        FuseFolder(folder) as far,
        Victim(victim, folder / "server.log", folder=far.mount) as server,
        Exporter(folder, working_folder=far.mount) as exporter,
    ):
        exporter.wait_for_server(server.name)
        with far.hanging(), Victim(victim, folder / "second.log") as second:
            exporter.wait_for_server(second.name)  # a helper was started from the dead directory
            meanwhile = exporter.rest(3.0)
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    holds_in_time(meanwhile, lambda page: page.value("threads", server=server.name) == 1, "the server is watched")
    assert not meanwhile[-1].value("read_errors_total", reason="timeout")


def test_a_program_that_dies_in_the_middle_of_a_read_keeps_no_child_from_starting(folder: Path, victim: Path) -> None:
    """Every child gets a copy of what is open, and closing a file on FUSE waits for its program."""
    lines = 3 * MIB // len(LINE)
    written = lines * len(LINE)
    with FuseFolder(folder, hold_from=MIB) as far, Exporter(folder) as exporter:
        append(far.backing / "sick.log", lines)
        with Victim(victim, far.mount / "sick.log") as sick:
            exporter.wait_for_server(sick.name)
            time.sleep(LATE)
            with far.hanging(), Victim(victim, folder / "second.log") as second:
                exporter.wait_for_server(second.name)
                meanwhile = exporter.rest(3.0)
            far.let_go()
            after = exporter.wait_for("the whole log", lambda page: log_bytes(page, sick.name) == written, 40.0)
    all_hold(meanwhile, lambda page: not page.failed(), "every collector works")
    all_hold(meanwhile, lambda page: log_bytes(page, sick.name) is None, "a part of its history is no value")
    assert after.value("log_lines_total", server=sick.name) == lines
