"""The image that cases with a real engine run; made once."""

from __future__ import annotations

import pytest

from .containers import CannotBuildError, base, build
from .engine import need


@pytest.fixture(scope="session")
def engine_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Skips where no container of it can be run, with the reason."""
    folder = tmp_path_factory.mktemp("engine")
    try:
        found = build(base(folder), folder)
        need(found)
    except CannotBuildError as error:
        pytest.skip(f"no container can be run here: {error}")
    return found
