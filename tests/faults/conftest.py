"""Marks every case here as one of injected faults, and says what the machine lacks for some of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("faults") is None:
            raise pytest.UsageError(f"{item.nodeid} breaks real things and lacks @pytest.mark.faults")


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts, limits of other processes, chosen PIDs")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can read, unlike pytest's own."""
    made = Path(mkdtemp(prefix="stallwatch-faults-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def compiled(source: Path, target: Path, *flags: str) -> Path:
    """A program or library made from one file of C."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *flags, "-o", str(target), str(source)]
    subprocess.run(command, check=True, timeout=60)
    target.chmod(0o755)
    return target


@pytest.fixture(scope="session")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program of victim.c under the name of a real inference server, which every user may start."""
    made = Path(mkdtemp(prefix="stallwatch-victim-"))
    made.chmod(0o755)
    try:
        yield compiled(HERE / "victim.c", made / "llama-server")
    finally:
        shutil.rmtree(made)


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of clock_shim.c."""
    made = tmp_path_factory.mktemp("shim") / "clock.so"
    return compiled(HERE / "clock_shim.c", made, "-shared", "-fPIC")
