"""Marks every case here as end-to-end, and says what the machine lacks for some of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("e2e") is None:
            raise pytest.UsageError(f"{item.nodeid} starts real things and lacks @pytest.mark.e2e")


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: another user's processes, or cgroup limits")
