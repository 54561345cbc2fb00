"""Cleans up behind a launcher, whatever ended it: waits for its pipe to close, then removes what is left.

`python -m stallwatch.drill.janitor FOLDER`, with the launcher's pipe as stdin.  The first line
on it is the process group to end; the folder is removed when the group is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

_PATIENCE_SECONDS = 1.0


def main() -> None:
    folder = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = sys.stdin.read().split()
    if words:
        end_group(int(words[0]))
    shutil.rmtree(folder, ignore_errors=True)


def end_group(group: int) -> None:
    """SIGKILL the process group until nothing of it is left; zombies are waited for no longer than 1 s."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.05)


if __name__ == "__main__":
    main()
