"""`stallwatch` in which a collector raises while a file with its name lies in a folder: `raising.py FOLDER serve ...`.

What is raised is the word in the file: at once at every second look, at the others after all was yielded.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from stallwatch.cli import main
from stallwatch.model import Observation, Scene
from stallwatch.sources import Moment
from stallwatch.sources.table import SOURCES

Read = Callable[[Any, Scene, Moment], Iterator[Observation]]


def raising(read: Read, order: Path) -> Read:
    looks = count()

    def reads(source: object, scene: Scene, now: Moment) -> Iterator[Observation]:
        error = getattr(builtins, order.read_text()) if order.exists() else None
        if error is not None and next(looks) % 2:
            raise error("as told")
        yield from read(source, scene, now)
        if error is not None:
            raise error("as told, at the end")

    return reads


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    for name, source in SOURCES.items():
        source.read = raising(source.read, folder / name)  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:]))
