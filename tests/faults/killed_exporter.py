"""Kills `stallwatch serve` with SIGKILL at random moments of its life, and reads what it left.

`killed_exporter.py FOLDER TIMES SEED serve ...` forks from a process that has everything imported, so that 200 lives
take two minutes and the moments fall into the start, the looks, the ticks and the writes.  Prints how many times a
state was read, and how many times it was another than the life before had left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import stallwatch.serve  # noqa: F401  # all that it needs is here before the first fork
from stallwatch import cli, state_file
from stallwatch.frameworks import load_frameworks
from stallwatch.state_file import CORRUPT, STATE, StateFolder

LONGEST_LIFE_SECONDS = 1.0
"""On a machine that writes a first state soon; on a slower one three times what that takes."""
MOST_SECONDS = 120.0
"""For a first state."""


def serve(words: list[str]) -> None:
    """As a process of its own, that writes its state with each tick."""
    state_file.WRITE_SECONDS = 0.1
    os._exit(cli.main(words))


def left(folder: str) -> tuple[bytes | None, bool]:
    """The state as it lies there, and whether it is one; half-written files are no business of a reader."""
    try:
        state = StateFolder(folder)
    except FileNotFoundError:
        return None, True
    found = state.read()
    state.close()
    path = os.path.join(folder, STATE)
    if not os.path.exists(path):
        return None, not os.path.exists(os.path.join(folder, CORRUPT))
    with open(path, "rb") as file:
        return file.read(), found is not None


def seconds_to_a_state(folder: str, words: list[str]) -> float:
    """Of one life, which then ends, too; SystemExit when it wrote none."""
    begun, exporter = time.monotonic(), os.fork()
    if exporter == 0:
        serve(words)
    while not os.path.exists(os.path.join(folder, STATE)):
        if os.waitpid(exporter, os.WNOHANG) != (0, 0):
            raise SystemExit("the first of them ended by itself")
        if time.monotonic() - begun > MOST_SECONDS:
            break
        time.sleep(0.01)
    took = time.monotonic() - begun
    os.kill(exporter, signal.SIGKILL)
    os.waitpid(exporter, 0)
    if took > MOST_SECONDS:
        raise SystemExit("the first of them wrote no state")
    return took


def main(folder: str, times: int, chance: random.Random, words: list[str]) -> int:
    load_frameworks()  # kept for all lives
    longest = max(LONGEST_LIFE_SECONDS, 3 * seconds_to_a_state(folder, words))
    before, read, newer = None, 0, 0
    for _ in range(times):
        exporter = os.fork()
        if exporter == 0:
            serve(words)
        time.sleep(chance.uniform(0.0, longest))
        os.kill(exporter, signal.SIGKILL)
        os.waitpid(exporter, 0)
        content, is_whole = left(folder)
        if not is_whole or (content is None and before is not None):
            return 1
        read += content is not None
        newer += content not in (None, before)
        before = content
    print(read, newer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3])), sys.argv[4:]))
