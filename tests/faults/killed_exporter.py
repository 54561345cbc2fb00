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
"""On a machine that comes to a newer state soon; on a slower one twice what that takes."""
MOST_SECONDS = 120.0
"""For a newer state."""


def serve(words: list[str]) -> None:
    """As a process of its own, that writes its state with each tick."""
    state_file.WRITE_SECONDS = 0.1
    os._exit(cli.main(words))


def content(folder: str) -> bytes | None:
    """The state as it lies there."""
    try:
        with open(os.path.join(folder, STATE), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def left(folder: str) -> tuple[bytes | None, bool]:
    """The state as it lies there, and whether it is one; half-written files are no business of a reader."""
    try:
        state = StateFolder(folder)
    except FileNotFoundError:
        return None, True
    found = state.read()
    state.close()
    kept = content(folder)
    if kept is None:
        return None, not os.path.exists(os.path.join(folder, CORRUPT))
    return kept, found is not None


def seconds_to_a_newer_state(folder: str, words: list[str]) -> float:
    """Of one life, which then ends, too; SystemExit when it wrote none."""
    before, begun, exporter = content(folder), time.monotonic(), os.fork()
    if exporter == 0:
        serve(words)
    while content(folder) in (None, before):
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
    first, second = seconds_to_a_newer_state(folder, words), seconds_to_a_newer_state(folder, words)
    longest = max(LONGEST_LIFE_SECONDS, 2 * first, 2 * second)
    before, read, newer = None, 0, 0
    for _ in range(times):
        exporter = os.fork()
        if exporter == 0:
            serve(words)
        time.sleep(chance.uniform(0.0, longest))
        os.kill(exporter, signal.SIGKILL)
        os.waitpid(exporter, 0)
        kept, is_whole = left(folder)
        if not is_whole or (kept is None and before is not None):
            return 1
        read += kept is not None
        newer += kept not in (None, before)
        before = kept
    print(read, newer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3])), sys.argv[4:]))
