"""Writes lines into a file at a pace: `log_writer.py FILE BURST BYTES_PER_SECOND BLOCKS [ROTATED]`.

It begins when a line comes on stdin: so many blocks at once, then so many at that pace.  Then it says so and waits.
When so many blocks as ROTATED are written, it renames the file and goes on in a new one of the same name.
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


def flood(file: Path, burst: int, bytes_per_second: float, blocks: int, rotated: int | None = None) -> None:
    begun = time.monotonic()
    log = file.open("ab", buffering=0)
    for number in range(-burst, blocks):
        time.sleep(max(0.0, begun + number * len(BLOCK) / bytes_per_second - time.monotonic()))
        if number + burst == rotated:
            log.close()
            file.rename(file.with_name(f"{file.name}.1"))
            log = file.open("ab", buffering=0)
        view = memoryview(BLOCK)
        while view:
            view = view[os.write(log.fileno(), view) :]
    log.close()


if __name__ == "__main__":
    sys.stdin.readline()
    flood(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
    print("written", flush=True)
    time.sleep(600)
