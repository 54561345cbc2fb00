"""`stallwatch` that has no memory left while a file lies there: `hoarding.py FILE serve ...`.

What the limit on the address space leaves is taken, down to the last kilobyte, and given back when the file goes.  If
the file says "touch", all of it is written to and no limit is set: somebody else's strikes.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

from stallwatch.cli import main

ROOM_BYTES = 8 << 20
PIECES = (1 << 20, 64 << 10, 4 << 10, 512)
GLANCE_SECONDS = 0.02


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def hoard() -> list[bytearray]:
    """Everything."""
    taken: list[bytearray] = []
    for size in PIECES:
        try:
            while True:
                taken.append(bytearray(size))
        except MemoryError:
            continue
    return taken


def touch_all() -> None:
    taken = []
    while True:
        taken.append(b"x" * PIECES[0])
        time.sleep(GLANCE_SECONDS / 10)


def watch(order: Path) -> None:
    """Take what comes free, again and again, as long as the file is there."""
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    while True:
        time.sleep(GLANCE_SECONDS)
        if not order.exists():
            continue
        if order.read_text() == "touch":
            touch_all()
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + ROOM_BYTES, unlimited[1]))
        hoards = [hoard()]
        while order.exists():
            try:
                hoards.append(hoard())
                time.sleep(GLANCE_SECONDS)
            except MemoryError:
                continue
        hoards.clear()
        resource.setrlimit(resource.RLIMIT_AS, unlimited)


if __name__ == "__main__":
    threading.Thread(target=watch, args=(Path(sys.argv.pop(1)),), daemon=True).start()
    sys.exit(main(sys.argv[1:]))
