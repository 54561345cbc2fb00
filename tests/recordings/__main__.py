"""`python -m recordings FOLDER [CASE…]`, in tests/: write recordings to files, all cases if none is named."""

from __future__ import annotations

import sys
from pathlib import Path

from .corpus import CASES, make


def main(arguments: list[str]) -> int:
    if not arguments or (unknown := [case for case in arguments[1:] if case not in CASES]):
        print(f"unknown: {', '.join(unknown)}" if arguments else __doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for case in arguments[1:] or CASES:
        make(case).save(folder / f"{case}.jsonl.gz")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
