"""Cleans up behind a launcher, whatever ended it: waits for its pipe to close, then removes what is left.

`python -m stallwatch.drill.janitor FOLDER`, with the launcher's pipe as stdin.  A number on it is a process group
to end, a path a cgroup to remove; the folder is removed when the group is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PATIENCE_SECONDS = 1.0


def main() -> None:
    folder = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = sys.stdin.read().split()
    for word in words:
        if word.isdecimal():
            end_group(int(word))
    for word in words:
        if word.startswith("/"):
            _remove_cgroup(word)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_cgroup(path: str) -> None:
    """Who is in it was ended; the kernel may take a moment."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while os.path.isdir(path) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        time.sleep(0.05)


def end_group(group: int) -> None:
    """SIGKILL the process group until nothing of it is left; zombies are waited for no longer than 1 s."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.05)


@contextlib.contextmanager
def cleaned_up(folder: Path) -> Iterator[IO[str]]:
    """A janitor for `folder`: yields its stdin.  Closing that (our end does, too) sets it to work; waits for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None  # noqa: S101  # stdin=PIPE
    try:
        yield process.stdin
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
