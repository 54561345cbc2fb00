"""Files of a machine below one root: the mounted tree of the host, or the root of a node that is a container itself.

Links are followed by hand: an absolute link below the mounted tree of the host means the host's file, not ours.
"""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import untrusted_paths
from .logs.mounts import FarError

MOST_DOCUMENT_BYTES = 1 << 20
MOST_LINKS = 20


class HostFiles:
    """Paths are given relative to the root.

    `far` tells the far mount that a path without links is under, if any: it is not touched, but FarError raised.
    """

    def __init__(self, root: Path, far: Callable[[str], str | None] = lambda path: None) -> None:
        self._root, self._far = str(root), far

    def unguarded(self) -> HostFiles:
        """The same to be used in a thread: it goes to far mounts, too."""
        return HostFiles(Path(self._root))

    def names(self, folder: str) -> list[str]:
        """Names in a folder; none where there is none."""
        path = self.resolved(folder)
        if path is None:
            return []
        try:
            return untrusted_paths.names_in(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def file(self, path: str) -> str | None:
        """Where a regular file is, without links; None when there is none."""
        real = self.resolved(path)
        return real if real is not None and self.is_file(real) else None

    def json(self, path: str) -> Any:
        """A JSON document of a runtime; None where there is none, or while it is written anew."""
        content = self.content(path, MOST_DOCUMENT_BYTES)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            return None

    def document(self, path: str) -> dict[str, Any]:
        """A JSON object; empty where there is none."""
        found = self.json(path)
        return found if isinstance(found, dict) else {}

    def content(self, path: str, most_bytes: int) -> bytes:
        """The beginning of a regular file; empty where there is none."""
        real = self.file(path)
        if real is None:
            return b""
        return untrusted_paths.content(real, most_bytes)

    def resolved(self, path: str) -> str | None:
        """The path without links, each followed below the root; None when it does not exist."""
        left, done, links = deque(path.split("/")), list[str](), 0
        while left:
            part = left.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                del done[-1:]
                continue
            here = os.path.join(self._root, *done, part)
            self._touch(here)
            try:
                status = os.lstat(here)
                if not stat.S_ISLNK(status.st_mode):
                    done.append(part)
                    continue
                target = os.readlink(here)
            except (FileNotFoundError, NotADirectoryError):
                return None
            links += 1
            if links > MOST_LINKS:
                return None
            if target.startswith("/"):
                done = []
            left.extendleft(reversed(target.split("/")))
        return os.path.join(self._root, *done)

    def is_file(self, path: str) -> bool:
        """Whether a path that `resolved` gave is a regular file."""
        self._touch(path)
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _touch(self, path: str) -> None:
        if (mount := self._far(path)) is not None:
            raise FarError(mount)


def of(document: object, *keys: str) -> object:
    """A value inside JSON objects; None where there is none."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document
