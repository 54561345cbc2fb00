"""Where our own cgroup namespace begins, so that the paths of others are those of the machine.

The kernel writes a path relative to the namespace of whoever reads the file: from inside a container a neighbour is
`/../docker-<id>.scope`, and of a container of the same pod not even the pod is in the text.  The mounted control
groups of the host tell where we are: the one group there that our own PID is in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from .cgroups import cgroups_in

MOST_FOLDERS = 16_384
"""Groups that are looked into."""
_MOST_BYTES = 1 << 16


def roots(first: str, ours: str, mounts: Callable[[str], tuple[str, ...]], pid: int) -> dict[str, str]:
    """Controllers of a hierarchy -> the path at which our namespace begins there; only where that is below the top.

    `first` and `ours`: cgroup files of the first process and of this one, as this process reads them; `mounts`: where
    a hierarchy of the host may be mounted, by its controllers; `pid`: ours, as this process sees it.
    """
    own = {group.controllers: group.path for group in cgroups_in(ours)}
    found = {}
    for group in cgroups_in(first):
        depth = group.path.split("/").count("..")
        path = own.get(group.controllers, "")
        if depth and path and ".." not in path.split("/"):
            inside = path.rstrip("/")
            for top in mounts(group.controllers):
                if (place := _place(top, depth, inside, pid)) is not None:
                    found[group.controllers] = place
                    break
    return found


def _place(top: str, depth: int, inside: str, pid: int) -> str | None:
    """The folder `depth` levels below `top` whose group `inside` holds the process."""
    wanted = str(pid).encode()
    for folder in _below(top, depth):
        try:
            with open(f"{folder}{inside}/cgroup.procs", "rb", buffering=0) as file:
                content = file.read(_MOST_BYTES)
        except OSError:
            continue
        if wanted in content.split():
            return folder.removeprefix(top)
    return None


def _below(top: str, depth: int) -> Iterator[str]:
    """The folders at one depth."""
    level, left = [top], MOST_FOLDERS
    for _ in range(depth):
        level = [path for folder in level for path in _folders(folder)]
        left -= len(level)
        if left < 0:
            return
    yield from level


def _folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def absolute(text: str, known: Mapping[str, str]) -> str:
    """A cgroup file with the machine's own paths, as far as the beginnings of its hierarchies are known."""
    if not known:
        return text
    lines = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        begin = known.get(controllers)
        lines.append(line if begin is None else f"{number}:{controllers}:{_joined(begin, path)}")
    return "\n".join(lines) + "\n"


def _joined(begin: str, path: str) -> str:
    done = [part for part in begin.split("/") if part]
    for part in path.split("/"):
        if part == "..":
            del done[-1:]
        elif part:
            done.append(part)
    return "/" + "/".join(done)
