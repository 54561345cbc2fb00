"""Kills a writer of the state with SIGKILL at random moments, and reads what it left.

`killed_writer.py FOLDER TIMES SEED` forks from a process that has everything imported, so that the moments fall into
the work and not into a start.  Prints how many times a document was read, and how many times a half-written file lay
beside it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

from stallwatch.kept import Document, json_text
from stallwatch.state_file import CORRUPT, NEW, StateFolder

LONGEST_LIFE_SECONDS = 0.02


def write_on(folder: str, begin: int, chance: random.Random) -> None:
    """One document after the other, of any size."""
    state = StateFolder(folder)
    for number in range(begin, begin + 1_000_000):
        state.write(Document((json_text({"x": "y" * chance.randrange(20_000)}),), {"number": number}))


def main(folder: str, times: int, chance: random.Random) -> int:
    last, read, half_written = -1, 0, 0
    for _ in range(times):
        writer = os.fork()
        if writer == 0:
            write_on(folder, last + 1, random.Random(chance.random()))
            os._exit(1)
        time.sleep(chance.uniform(0.0, LONGEST_LIFE_SECONDS))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        half_written += os.path.exists(os.path.join(folder, NEW))
        state = StateFolder(folder)
        found = state.read()
        state.close()
        if os.path.exists(os.path.join(folder, CORRUPT)) or (found is None and read):
            return 1
        if found is not None:
            if found["number"] < last:
                return 1
            last, read = found["number"], read + 1
    print(read, half_written)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))))
