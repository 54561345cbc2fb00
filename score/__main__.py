"""`make score`: run everything and write the tables of docs/SCORE.md.  With --check, only say whether they are true."""

from __future__ import annotations

import sys

from .document import DOCUMENT, tables, written
from .measure import measure
from .naive import NoPromtoolError


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    before = DOCUMENT.read_text(encoding="utf-8")
    try:
        places = tables(measure())
    except NoPromtoolError as error:
        print(f"score: {error}", file=sys.stderr)
        return 1
    print(places["summary"], places["classes"], sep="\n\n")
    after = written(before, places)
    if arguments:
        return int(after != before)
    DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
