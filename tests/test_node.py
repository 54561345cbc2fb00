from __future__ import annotations

from pathlib import Path

import pytest

from stallwatch.config import Config
from stallwatch.model import Reading, Scene
from stallwatch.signals import LOCK_AGE, LOCK_HELD
from stallwatch.sources import Host, Moment
from stallwatch.sources.node import Node

MEMINFO = "MemTotal:       527958208 kB\nMemFree: 9 kB\nMemAvailable:   435000000 kB\nCached:  416000000 kB\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A machine with half a terabyte, most of it page cache; the root has a /dev/shm."""
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 3\noom_kill_other 9\n")
    return tmp_path


def read(folder: Path) -> dict[str, Reading]:
    node = Node(Host(Config(), (), proc=folder, root=folder))
    found = [item for item in node.read(Scene(), Moment(1.0, 1.0)) if isinstance(item, Reading)]
    node.close()
    assert {reading.signal for reading in found} == set(Node.signals) - {LOCK_AGE, LOCK_HELD}  # no server, no lock
    return {reading.signal.name: reading for reading in found}


def test_memory_is_in_bytes_and_cache_is_not_lost_memory(folder: Path) -> None:
    found = read(folder)

    assert found["node_memory_total_bytes"].value == 527958208 * 1024
    assert found["node_memory_available_bytes"].value == 435000000 * 1024
    assert found["node_memory_cached_bytes"].value == 416000000 * 1024


def test_kills_of_the_kernel_are_counted(folder: Path) -> None:
    assert read(folder)["node_oom_kills_total"].value == 3


def test_an_old_kernel_does_not_count_kills(folder: Path) -> None:
    (folder / "vmstat").write_text("pgfault 12\n")

    found = read(folder)["node_oom_kills_total"]

    assert (found.value, found.reason) == (None, "kernel")


def test_without_vmstat_the_rest_is_still_read(folder: Path) -> None:
    (folder / "vmstat").unlink()

    found = read(folder)

    assert (found["node_oom_kills_total"].value, found["node_oom_kills_total"].reason) == (None, "vanished")
    assert found["node_memory_total_bytes"].value is not None


def test_a_line_that_is_missing_is_absent_and_never_zero(folder: Path) -> None:
    (folder / "meminfo").write_text("MemTotal: 5 kB\n")

    found = read(folder)["node_memory_available_bytes"]

    assert (found.value, found.reason) == (None, "not_supported")


def test_shared_memory_is_what_its_file_system_says(folder: Path) -> None:
    used = read(folder)["node_shm_used_bytes"].value
    (folder / "dev/shm").rmdir()
    missing = read(folder)["node_shm_used_bytes"]

    assert used is not None
    assert used > 0
    assert (missing.value, missing.reason) == (None, "vanished")


def test_without_meminfo_the_source_fails_as_a_whole(folder: Path) -> None:
    (folder / "meminfo").unlink()

    with pytest.raises(FileNotFoundError):
        read(folder)
