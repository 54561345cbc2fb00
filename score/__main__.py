"""`make score`: run everything and write the tables of docs/SCORE.md.

--check writes nothing, and fails when a table is not what the run gives.  --drills runs the drills first, live, as
root, for some five minutes; without it their table is that of the last such run (score/drills.jsonl).
"""

from __future__ import annotations

import sys

from . import drills
from .document import DOCUMENT, tables, written
from .measure import measure
from .naive import NoPromtoolError


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"], ["--drills"]):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments == ["--drills"] and (status := drills.run()):
        return status
    before = DOCUMENT.read_text(encoding="utf-8")
    try:
        places = tables(measure())
    except NoPromtoolError as error:
        print(f"score: {error}", file=sys.stderr)
        return 1
    print(places["summary"], places["classes"], sep="\n\n")
    after = written(before, places)
    if arguments == ["--check"]:
        return int(after != before)
    DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
