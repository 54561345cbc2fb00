"""The stand-ins are what they claim to be, whoever watches them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from .harness import StandIn, fetch

pytestmark = pytest.mark.e2e


def test_a_rank_looks_like_a_real_one_and_makes_no_more_noise(tmp_path: Path) -> None:
    with StandIn("barrier-deadlock", tmp_path, load_seconds=1) as server:
        server.wait_for_line("Load weight end", 8)
        rank = server.rank(0).pid

        waits = [Path(f"/proc/{rank}/task/{task}/syscall").read_text() for task in os.listdir(f"/proc/{rank}/task")]

        assert Path(f"/proc/{rank}/comm").read_text() == "sglang::schedul\n"
        assert Path(f"/proc/{rank}/cmdline").read_bytes().strip(b"\0") == b"sglang::scheduler_TP0"
        assert not Path(f"/proc/{rank}/environ").read_bytes().strip(b"\0")
        assert len(waits) >= 200
        assert sum(wait.split()[0] in ("202", "98") for wait in waits) >= 195  # futex; x86-64 and aarch64

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
