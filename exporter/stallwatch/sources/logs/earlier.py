"""What a log held before it was rotated: a runtime, or logrotate, moves the file aside, then packs it.

    <id>-json.log.2.gz  <id>-json.log.1  <id>-json.log                          Docker
    0.log.20260602-080000.gz  0.log.20260602-090000  0.log                      kubelet
    <id>-json-2026-06-02T08-00-00.000.log  <id>-json.log                        nerdctl
    server.log.2  server.log-20260602  server-20260602.log  server.log          others

Found by name in the file's own folder; files of another start of the container are older than the server.  Of a log
that no runtime wrote a file of before counts only where it is known by device and inode: names alone prove nothing.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass

from .. import untrusted_paths

CHUNK_BYTES = 1 << 20
MOST_FILES = 32
_GZIP = 16 + zlib.MAX_WBITS

_OF_A_RUNTIME = re.compile(r"/[0-9a-f-]{32,66}-json\.log|/(?:pods|crio)/[^/]+/(?:[^/]+/)?[^/]+\.log")
_DOCKER = re.compile(r"\.(?P<age>\d{1,6})(?:\.gz)?")
_KUBELET = re.compile(r"\.(?P<time>\d{8}-\d{6})(?:\.gz)?")
_NERDCTL = re.compile(r"-(?P<time>\d{4}-\d\d-\d\dT[\d.:-]{5,30})\.log(?:\.gz)?")

_NUMBER = re.compile(r"[.-](?P<number>\d{1,3})")
_TIME = re.compile(r"[._-](?P<time>\d{4}-?\d\d-?\d\d(?:[T_-]?[\d:.-]{2,24})?)")

Identity = tuple[int, int]
Order = Callable[[str, str], tuple[str, str] | None]
"""Of a log's name and another one: kind of that name, and what sorts the oldest of its kind first; None = no order."""


@dataclass(slots=True)
class Earlier:
    """One file of before.  `told`: bytes of it (unpacked) that are not told again.

    `written`: when that was last done, and `changed`: of its last change of any kind, which nobody can set (both in
    nanoseconds of Unix time; 0 = not looked at).
    """

    path: str
    identity: Identity
    modified: float
    told: int = 0
    written: int = 0
    changed: int = 0


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


def moved_aside(path: str, owner: int | None = None) -> dict[str, list[Earlier]]:
    """What a log that no runtime wrote may have been moved to, by the kind of its name, oldest first; none is packed.

    `owner`: only files of that user or of root.
    """
    return beside(path, owner, order_of)


def beside(path: str, owner: int | None, order: Order) -> dict[str, list[Earlier]]:
    """The files in the folder of a path for whose names there is an order: by kind of name, oldest first."""
    folder, name = os.path.split(path)
    found: dict[str, list[tuple[str, Earlier]]] = {}
    for other in _names(folder):
        if (kind := order(name, other)) is None:
            continue
        try:
            status = os.lstat(os.path.join(folder, other))
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and (owner is None or status.st_uid in (0, owner)):
            identity = status.st_dev, status.st_ino
            times = status.st_mtime, 0, status.st_mtime_ns, status.st_ctime_ns
            file = Earlier(os.path.join(folder, other), identity, *times)
            found.setdefault(kind[0], []).append((kind[1], file))
    return {kind: [file for _, file in sorted(files, key=lambda pair: pair[0])] for kind, files in found.items()}


def next_in_line(path: str, file: Identity, owner: int | None = None) -> Earlier | None:
    """The file that was moved aside right after a known one; None when that one is not there, or was the last."""
    for files in moved_aside(path, owner).values():
        for index, one in enumerate(files):
            if one.identity == file:
                return next(iter(in_line(files, index)[1:]), None)
    return None


def in_line(files: list[Earlier], index: int) -> list[Earlier]:
    """One of the files of a kind and those moved aside after it; where numbers rise with time there are none.

    Whatever the names say, the next one was not written before this one was.
    """
    line = files[index : index + 1]
    for file in files[index + 1 :]:
        if file.modified < line[-1].modified:
            break
        line.append(file)
    return line


def order_of(name: str, other: str) -> tuple[str, str] | None:
    """Kind of a name, and what sorts the oldest of its kind first; None for the name of something else."""
    stem, dot, ending = name.rpartition(".")
    inside = other.removesuffix(dot + ending).removeprefix(stem) if stem and other.startswith(stem) else ""
    behind = other.removeprefix(name) if other.startswith(name) else ""
    for place, rest in (("behind", behind), ("inside", inside if other.endswith(dot + ending) else "")):
        if match := _NUMBER.fullmatch(rest):
            return f"number {place}", f"{999 - int(match['number']):03}"
        if match := _TIME.fullmatch(rest):
            return f"time {place}", re.sub(r"\D", "", match["time"])
    return None


def _names(folder: str) -> list[str]:
    try:
        return untrusted_paths.names_in(folder)
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


def read_earlier(file: Earlier, keeps: bool = True) -> Generator[bytes]:
    """Its bytes, unpacked; as many as can be read.  `keeps`: whether it stays open from one chunk to the next."""
    if keeps:
        return _read_open(file)
    return unpacked(_read_anew(file)) if file.path.endswith(".gz") else _read_anew(file)


def _read_open(file: Earlier) -> Generator[bytes]:
    try:
        descriptor = untrusted_paths.open_file(file.path)
    except OSError:
        return
    with suppress(OSError), open(descriptor, "rb") as raw:  # to close it may fail, too
        if not _is(file, descriptor):
            return
        source = gzip.GzipFile(fileobj=raw) if file.path.endswith(".gz") else raw
        try:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
        except (OSError, EOFError, zlib.error):
            return


def _read_anew(file: Earlier) -> Generator[bytes]:
    """As it stands there, opened for each chunk."""
    offset = 0
    while chunk := _chunk(file, offset):
        offset += len(chunk)
        yield chunk


def _chunk(file: Earlier, offset: int) -> bytes:
    """Empty at its end, and when it is there no more."""
    with suppress(OSError):
        descriptor = untrusted_paths.open_file(file.path)
        with open(descriptor, "rb", buffering=0):
            return os.pread(descriptor, CHUNK_BYTES, offset) if _is(file, descriptor) else b""
    return b""


def _is(file: Earlier, descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == file.identity


def unpacked(packed: Iterable[bytes]) -> Generator[bytes]:
    """Several gzip members, one after the other, until there is no more or something else."""
    engine = zlib.decompressobj(_GZIP)
    for part in packed:
        left = part
        while left:
            if engine.eof:
                engine = zlib.decompressobj(_GZIP)
            try:
                chunk = engine.decompress(left, CHUNK_BYTES)
            except zlib.error:
                return
            left = engine.unused_data if engine.eof else engine.unconsumed_tail
            if chunk:
                yield chunk
