"""Cleans up behind a launcher, whatever ended it: waits for its pipe to close, then removes what is left.

`python -m stallwatch.drill.janitor`, with the launcher's pipe as stdin.  It makes the folder itself and prints its
path, so that there is no folder that nobody would remove.  A number on the pipe is a process group to end, a path a
cgroup to remove; the folder is removed when the group is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PATIENCE_SECONDS = 1.0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix="stallwatch-drill-")
    with contextlib.suppress(BrokenPipeError):
        print(folder, flush=True)
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
def cleaned_up() -> Iterator[tuple[Path, IO[str]]]:
    """A new folder, and the stdin of its janitor.  Closing that (our end does, too) sets it to work; waits for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None  # noqa: S101  # stdin=PIPE
    assert process.stdout is not None  # noqa: S101  # stdout=PIPE
    try:
        yield Path(process.stdout.readline().rstrip("\n")), process.stdin
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()


if __name__ == "__main__":
    main()
