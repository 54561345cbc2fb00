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
"""At first: it grows as long as hardly a life comes to a newer state, as on a machine that is slow, or busy."""
LONGER, ENOUGH = 1.05, 0.25


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


def main(folder: str, times: int, chance: random.Random, words: list[str]) -> int:
    load_frameworks()  # kept for all lives
    before, read, newer, longest = None, 0, 0, LONGEST_LIFE_SECONDS
    for number in range(times):
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
        longest *= LONGER if newer < ENOUGH * number else 1.0
    print(read, newer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3])), sys.argv[4:]))
