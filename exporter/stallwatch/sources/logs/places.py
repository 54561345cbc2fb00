"""Which files the places of a server's logs are: a pattern such as `/var/log/vllm/*.log` stands for what it finds.

A folder stands for every file in it, the newest first.  Both are looked at again every few seconds.  A file keeps
its name (the `log` label) while it is there; one that is gone stays for a last look, so that its last lines are
read.  A file that was renamed to another name the pattern finds is still the same log, not a new one.
What may lie on a mount that does not answer is looked at in its thread: until it answers, all is as it was.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice

from ...model import LogPlace
from ..untrusted_paths import matching, names_in
from .guard import Questions

LOOK_SECONDS = 3.0
FILE_SECONDS = 5 * LOOK_SECONDS
"""What was a file is looked at only as often as this whether it is a folder by now."""
GONE_LOOKS = 2
"""A file missing on so many looks in a row is given up."""
MOST_FILES = 10_000
"""Looked at per pattern."""
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
"""Ends of names of files that are no text any more."""

Identity = tuple[int, int]

_KIND, _LIST = "kind ", "list "
"""What is asked: whether a path is a folder, and what a pattern finds."""


@dataclass(slots=True)
class _File:
    """A file that a pattern found; `identity`: device and inode of what its path last was."""

    pattern: str
    name: str
    identity: Identity
    gone: int = 0


class LogPlaces:
    """The files of one server, at most `most_files`.  `given_up`: names of the files that the last call gave up."""

    def __init__(self, most_files: int, questions: Questions) -> None:
        self.most_files = most_files
        self._questions = questions
        self._far: dict[str, str | None] = {}  # path or pattern -> mount, as of the last look
        self._kind: dict[str, bool | None] = {}  # far path -> whether it is a folder; None = not known yet
        self._plain: set[str] = set()  # near paths that are no folder but a file
        self._files_from = float("-inf")  # since when what is a file is known to be one
        self._files: dict[str, _File] = {}  # by path
        self._known: set[Identity] = set()
        self._covered: set[str] = set()  # patterns that found files of other places
        self._patterns: tuple[LogPlace, ...] = ()
        self._looked_at, self._lasts = float("-inf"), LOOK_SECONDS  # when, and for how long that holds
        self._asked: tuple[LogPlace, ...] = ()
        self._answer: tuple[LogPlace, ...] = ()  # to the places that were asked for last
        self.given_up: tuple[str, ...] = ()

    def files(self, places: Sequence[LogPlace], at: float) -> tuple[LogPlace, ...]:
        """The places, each pattern replaced by the files it finds; by `vanished` while it finds none.

        By `timeout` while it is not known what it finds, or whether it is a folder.
        One file more than allowed is told of, so that the excess shows.  `at` in monotonic seconds.
        """
        is_due, self.given_up = at - self._looked_at >= self._lasts, ()
        asked = tuple(places)
        if not is_due and asked == self._asked and not any(self._far.values()):
            return self._answer
        if is_due:
            self._looked_at, self._far = at, {}
            if at - self._files_from >= FILE_SECONDS:
                self._files_from = at
                self._plain.clear()
        patterns = tuple(place for place in places if self._is_pattern(place, is_due))
        if patterns != self._patterns or (patterns and is_due):
            self._patterns, self._looked_at = patterns, at
            self._look([place for place in places if place not in patterns])
        self._asked, self._answer = asked, tuple(file for place in places for file in self._of(place))
        self._lasts = FILE_SECONDS if all(map(self._is_one_file, places)) else LOOK_SECONDS
        return self._answer

    @property
    def holds_until(self) -> float:
        """Before that (monotonic seconds) the same places are the same files."""
        return float("-inf") if any(self._far.values()) else self._looked_at + self._lasts

    def _is_one_file(self, place: LogPlace) -> bool:
        """Whether a place is no pattern, and its path was a file when it was looked at."""
        return bool(place.reason or place.inode) or place.path in self._plain

    def _of(self, place: LogPlace) -> Iterator[LogPlace]:
        if place not in self._patterns:
            yield replace(place, reason="timeout") if self._kind.get(place.path, False) is None else place
            return
        found = [(path, file.name) for path, file in self._files.items() if file.pattern == place.path]
        for path, name in found:
            yield replace(place, name=name, path=path)
        if not found and place.path not in self._covered:
            is_known = self._far_of(place.path) is None or not self._questions.is_open(_LIST + place.path)
            yield replace(place, reason="vanished" if is_known else "timeout")

    def _far_of(self, path: str) -> str | None:
        if path not in self._far:
            self._far[path] = self._questions.guards.mounts.far_around(path)
        return self._far[path]

    def _is_pattern(self, place: LogPlace, is_due: bool) -> bool:
        """Streams of processes are known by device and inode; only a path that a person wrote can be a pattern."""
        path = place.path
        if place.reason or place.inode or place.owner is None:
            return False
        if _is_wild(path):
            return True
        mount = self._far_of(path)
        if mount is None:
            self._kind.pop(path, None)
            return path not in self._plain and self._is_near_folder(path)
        if is_due or self._kind.get(path) is None:
            self._kind[path] = self._questions.ask(_KIND + path, mount, lambda: _is_folder(path))
        return bool(self._kind[path])

    def _is_near_folder(self, path: str) -> bool:
        status = _status(path.rstrip("/"))
        if status is not None and stat.S_ISREG(status.st_mode):
            self._plain.add(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def _look(self, others: Sequence[LogPlace]) -> None:
        listed = self._listed({place.path for place in others})
        alive = {identity for identity, _ in listed.values()}
        self._known &= alive | {file.identity for file in self._files.values()}
        for path, file in self._files.items():
            if path in listed:
                file.identity, file.gone = listed[path][0], 0
                self._known.add(file.identity)
            elif file.identity not in alive:  # else it was renamed, and its writer may still write to it
                file.gone += 1
        self._give_up()
        for path, (identity, pattern) in listed.items():
            if path not in self._files and identity not in self._known and len(self._files) <= self.most_files:
                taken = {place.name for place in others} | {file.name for file in self._files.values()}
                self._files[path] = _File(pattern, _free_name(path, taken), identity)
                self._known.add(identity)

    def _listed(self, others: set[str]) -> dict[str, tuple[Identity, str]]:
        """path -> (identity, pattern) of all regular files that the patterns find now, by path."""
        listed: dict[str, tuple[Identity, str]] = {}
        self._covered = set()
        for pattern in self._patterns:
            for path, identity in self._found_by(pattern.path):
                if path in others or path in listed:
                    self._covered.add(pattern.path)
                else:
                    listed[path] = identity, pattern.path
        return listed

    def _found_by(self, pattern: str) -> Sequence[tuple[str, Identity]]:
        mount, ask = self._far_of(pattern), self._questions.ask
        if mount is not None:
            return ask(_LIST + pattern, mount, lambda: tuple(_found(pattern))) or ()
        is_folder = _is_folder(pattern)
        folder, wanted = (pattern, "*") if is_folder else os.path.split(pattern)
        inside = self._questions.guards.mounts.far_inside(folder)
        found = list(_found(pattern, inside))
        for name, far in inside.items():
            if fnmatchcase(name, wanted):
                path = os.path.join(folder, name)
                found += ask(_LIST + path, far, partial(_file_at, path)) or ()
        return found

    def _give_up(self) -> None:
        patterns = {pattern.path for pattern in self._patterns}
        over = [path for path, file in self._files.items() if file.gone >= GONE_LOOKS or file.pattern not in patterns]
        self.given_up = tuple(self._files.pop(path).name for path in over)


def _is_wild(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _is_folder(path: str) -> bool:
    status = _status(path.rstrip("/"))
    return status is not None and stat.S_ISDIR(status.st_mode)


def _found(path: str, without: Collection[str] = ()) -> Iterator[tuple[str, Identity]]:
    """Regular files that a pattern finds, by name; of a folder the newest first.  `without` those of some names."""
    is_folder = _is_folder(path)
    names = _inside(path) if is_folder else matching(path)
    files = [
        (name, status)
        for name in sorted(islice(names, MOST_FILES))
        if os.path.basename(name) not in without
        and not name.endswith(PACKED)
        and (status := _status(name)) is not None
        and stat.S_ISREG(status.st_mode)
    ]
    if is_folder:
        files.sort(key=lambda file: file[1].st_mtime, reverse=True)
    for name, status in files:
        yield name, (status.st_dev, status.st_ino)


def _inside(folder: str) -> list[str]:
    """Paths of what is in a folder, but for hidden files."""
    try:
        return [os.path.join(folder, name) for name in names_in(folder) if not name.startswith(".")]
    except OSError:
        return []


def _file_at(path: str) -> tuple[tuple[str, Identity], ...]:
    status = _status(path)
    return ((path, (status.st_dev, status.st_ino)),) if status is not None and stat.S_ISREG(status.st_mode) else ()


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (OSError, ValueError):
        return None


def _free_name(path: str, taken: set[str]) -> str:
    name = stem = os.path.basename(path)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name
