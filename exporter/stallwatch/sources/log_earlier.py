"""What a container's log held before it was rotated: the runtime moves the file aside, then packs it.

    <id>-json.log.2.gz  <id>-json.log.1  <id>-json.log                          Docker
    0.log.20260602-080000.gz  0.log.20260602-090000  0.log                      kubelet
    <id>-json-2026-06-02T08-00-00.000.log  <id>-json.log                        nerdctl

Found by name in the file's own folder; files of another start of the container are older than the server.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice

CHUNK_BYTES = 1 << 20
MOST_NAMES = 10_000
MOST_FILES = 32
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_OF_A_RUNTIME = re.compile(r"/[0-9a-f-]{32,66}-json\.log|/(?:pods|crio)/[^/]+/(?:[^/]+/)?[^/]+\.log")
_DOCKER = re.compile(r"\.(?P<age>\d{1,6})(?:\.gz)?")
_KUBELET = re.compile(r"\.(?P<time>\d{8}-\d{6})(?:\.gz)?")
_NERDCTL = re.compile(r"-(?P<time>\d{4}-\d\d-\d\dT[\d.:-]{5,30})\.log(?:\.gz)?")

Identity = tuple[int, int]


@dataclass(slots=True)
class Earlier:
    """One file of before.  `told`: bytes of it (unpacked) that are not told again."""

    path: str
    identity: Identity
    modified: float
    told: int = 0


def is_runtimes(path: str) -> bool:
    """Whether a path is that of a log that a container runtime writes and rotates."""
    return any(match.end() == len(path) for match in _OF_A_RUNTIME.finditer(path))


def earlier_files(path: str, since: float, current: Identity | None) -> list[Earlier]:
    """The files of before, oldest first, without those last written before `since` (Unix) and the `current` one."""
    folder, name = os.path.split(path)
    found: dict[tuple[int, str], Earlier] = {}
    for other in _names(folder):
        if not other.startswith(name.removesuffix(".log")) or (age := _age(name, other)) is None:
            continue
        try:
            status = os.lstat(os.path.join(folder, other))
        except OSError:
            continue
        identity = status.st_dev, status.st_ino
        if not stat.S_ISREG(status.st_mode) or status.st_mtime < since or identity == current:
            continue
        if age not in found or found[age].path.endswith(".gz"):  # while it is packed both are there
            found[age] = Earlier(os.path.join(folder, other), identity, status.st_mtime)
    return [found[age] for age in sorted(found)][-MOST_FILES:]


def _names(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, MOST_NAMES)]
    except OSError:
        return []


def _age(name: str, other: str) -> tuple[int, str] | None:
    """What sorts the oldest first; None for the name of something else."""
    rest = other.removeprefix(name)
    if rest != other:
        if match := _DOCKER.fullmatch(rest):
            return -int(match["age"]), ""
        match = _KUBELET.fullmatch(rest)
        return (0, match["time"]) if match else None
    match = _NERDCTL.fullmatch(other.removeprefix(name.removesuffix(".log")))
    return (0, match["time"]) if match else None


def read_earlier(file: Earlier) -> Generator[bytes]:
    """Its bytes, unpacked; as many as can be read."""
    try:
        descriptor = os.open(file.path, _FLAGS)
    except OSError:
        return
    with open(descriptor, "rb") as raw:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != file.identity:
            return
        source = gzip.GzipFile(fileobj=raw) if file.path.endswith(".gz") else raw
        try:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
        except (OSError, EOFError, zlib.error):
            return
