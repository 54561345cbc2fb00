"""Writes lines into a file at a pace: `log_writer.py FILE BYTES_PER_SECOND BLOCKS`, says so on stdout, and waits.

It begins when a line comes on stdin.
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


def flood(file: Path, bytes_per_second: float, blocks: int) -> None:
    begun = time.monotonic()
    with file.open("ab", buffering=0) as log:
        for number in range(blocks):
            time.sleep(max(0.0, begun + number * len(BLOCK) / bytes_per_second - time.monotonic()))
            view = memoryview(BLOCK)
            while view:
                view = view[os.write(log.fileno(), view) :]


if __name__ == "__main__":
    sys.stdin.readline()
    flood(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    print("written", flush=True)
    time.sleep(600)
