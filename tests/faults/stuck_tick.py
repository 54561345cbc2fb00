"""`stallwatch` whose tick does what a file says: `stuck_tick.py FILE serve ...`; `hang` while it says so, or `raise`.

The tick is given up after fewer looks than usual, for the minute that is shipped would be waited for by the case.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from stallwatch import heartbeat
from stallwatch.cli import main
from stallwatch.daemon import Daemon

LOOKS = 2
"""Of five seconds each."""


def disturb(order: Path) -> None:
    tick = Daemon.tick

    def disturbed_tick(daemon: Daemon, dated: bool = False) -> object:
        if order.read_text() == "raise":
            raise RuntimeError("as told")
        while order.read_text() == "hang":
            time.sleep(0.05)
        return tick(daemon, dated)

    Daemon.tick = disturbed_tick  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    disturb(Path(sys.argv.pop(1)))
    heartbeat.LOOKS_UNTIL_STUCK = LOOKS
    sys.exit(main(sys.argv[1:]))
