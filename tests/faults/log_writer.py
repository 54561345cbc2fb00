"""Writes lines into a file at a pace: `log_writer.py FILE BYTES_PER_SECOND SECONDS`, then prints how many, and waits.

A flood begins when a line comes on stdin.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

LINES = 10_000
BLOCK = b"".join(
    b"INFO 06-02 08:00:%02d [loader.py:%d] some word about request %d that nobody asked for\n" % (n % 60, n % 900, n)
    for n in range(LINES)
)


def flood(file: Path, bytes_per_second: float, seconds: float) -> int:
    """Lines written."""
    lines, begun = 0, time.monotonic()
    with file.open("ab", buffering=0) as log:
        while (spent := time.monotonic() - begun) < seconds:
            if lines / LINES * len(BLOCK) > spent * bytes_per_second:
                time.sleep(0.001)
                continue
            view = memoryview(BLOCK)
            while view:
                view = view[os.write(log.fileno(), view) :]
            lines += LINES
    return lines


if __name__ == "__main__":
    sys.stdin.readline()
    print(flood(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])), flush=True)
    time.sleep(600)
