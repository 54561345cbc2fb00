"""What one worker of a test run worked out, kept for the others of the same run: the corpus is played once for all.

The folder is named by KEPT_CORPUS_FOLDER, which conftest.py sets before there are workers, and removes with the run.
Without it everything is worked out where it is asked for.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import TypeVar

VARIABLE = "KEPT_CORPUS_FOLDER"

Found = TypeVar("Found")


def once(work_out: Callable[[str], Found]) -> Callable[[str], Found]:
    """The same function of a case, which is asked once in a process and, as good as always, once in a run.

    Two workers that ask at the same time both work it out, and find the same.
    """

    @cache
    @wraps(work_out)
    def found(case: str) -> Found:
        if not (folder := os.environ.get(VARIABLE)):
            return work_out(case)
        path = Path(folder, f"{work_out.__name__}-{case}")
        if path.exists():
            before: Found = pickle.loads(path.read_bytes())  # noqa: S301  # of this very run, in its own folder
            return before
        now = work_out(case)
        _write_whole(path, pickle.dumps(now))
        return now

    return found


def _write_whole(path: Path, content: bytes) -> None:
    """So that nobody reads a half."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)
