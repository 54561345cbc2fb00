"""The stand-ins are what they claim to be, whoever watches them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from .harness import StandIn, fetch, wait_until

pytestmark = pytest.mark.e2e


def test_a_rank_looks_like_a_real_one(tmp_path: Path) -> None:
    with StandIn("barrier-deadlock", tmp_path, load_seconds=1) as server:
        server.wait_for_line("Load weight end", 8)
        rank = server.rank(0).pid

        waits = [Path(f"/proc/{rank}/task/{task}/syscall").read_text() for task in os.listdir(f"/proc/{rank}/task")]

        assert Path(f"/proc/{rank}/comm").read_text() == "sglang::schedul\n"
        assert Path(f"/proc/{rank}/cmdline").read_bytes().strip(b"\0") == b"sglang::scheduler_TP0"
        assert not Path(f"/proc/{rank}/environ").read_bytes().strip(b"\0")
        assert len(waits) >= 200
        assert sum(wait.split()[0] in ("202", "98") for wait in waits) >= 195  # futex; x86-64 and aarch64


def test_its_noise_is_that_of_polling_threads_and_nothing_moves(tmp_path: Path) -> None:
    with StandIn("barrier-deadlock", tmp_path, load_seconds=1) as server:
        server.wait_for_line("Load weight end", 8)
        time.sleep(1.0)
        ranks = [server.rank(number) for number in range(8)]
        before = [(rank.cpu_times(), rank.io_counters().read_chars) for rank in ranks]
        time.sleep(5.0)
        after = [(rank.cpu_times(), rank.io_counters().read_chars) for rank in ranks]

        for (cpu, read), (later_cpu, later_read) in zip(before, after, strict=True):
            used = later_cpu.user + later_cpu.system - cpu.user - cpu.system
            assert 0.0 < used < 0.25  # below 5 % of a core, and never exactly nothing
            assert later_read - read < 100_000
        assert fetch(f"http://127.0.0.1:{server.port}/health")[0] == 0


def test_a_phantom_hang_ends_ready_with_312_lines(tmp_path: Path) -> None:
    with StandIn("phantom-hang", tmp_path, load_seconds=1, slow_seconds=6) as server:
        server.wait_for_line("Load weight end", 8)
        culprit = server.rank(3)
        before = culprit.io_counters()
        time.sleep(3.0)
        after = culprit.io_counters()
        server.wait_for_line("fired up and ready to roll")
        wait_until(lambda: server.log.read_bytes().count(b"\n") >= 312, 5.0, "the last lines")

        assert after.read_chars - before.read_chars >= 8 << 20
        assert after.read_bytes - before.read_bytes >= 1 << 20
        log = server.log.read_bytes()
        assert log.count(b"\n") == 312
        assert b"ready to roll" in log.split(b"\n")[308]
        assert [fetch(f"http://127.0.0.1:{server.port}{path}")[0] for path in ("/health", "/v1/models")] == [
            200,
            200,
        ]


def test_a_released_culprit_lets_the_start_go_on(tmp_path: Path) -> None:
    with StandIn("barrier-deadlock", tmp_path, load_seconds=1, culprit=6) as server:
        server.wait_for_line("Load weight end", 8)
        time.sleep(1.0)
        assert not server.lines("KV Cache is allocated")

        server.rank(6).send_signal(signal.SIGUSR1)

        server.wait_for_line("fired up and ready to roll")
