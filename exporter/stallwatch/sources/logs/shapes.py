"""Unknown lines by their shape: a start that shows a new one moves, one that only repeats itself does not."""

from __future__ import annotations

import re
from itertools import groupby

from ...frameworks import RANKED, Framework
from .text import text_of

MAX_SHAPES = 20_000
"""Distinct line shapes remembered in one start; beyond it every unknown line counts as a repeat."""

_DIGITS = b"0123456789"
_MASK = re.compile(
    r"'[^']*'|\"[^\"]*\"|`[^`]*`"  # quoted
    r"|(?:\b\w+://|/|\.{1,2}/)\S+"  # URLs and paths
    r"|\b(?:0x)?(?=[a-fA-F]*\d)[0-9a-fA-F]++\b(?:[-:.](?:0x)?[0-9a-fA-F]+)*"  # hashes, UUIDs, addresses
    r"|\d+"
)
_NOT_NOVEL = re.compile(
    r"\s|$"  # continuation lines: traceback frames, banners
    r"|\[(?:rank\d+\]:\[)?[WEF]\d{0,4}|\[rank\d+\]:"  # C++ warnings, NCCL and c10d dumps
    r"|[\w.]*(?:Error|Exception|Warning|Interrupt|Exit)\b"
    r"|Traceback |During handling |The above exception |File \"|Fatal Python error"
    r"|Thread (?:0x|\d+ \()|Current thread |Process \d+: |Python v\d"  # stacks, by faulthandler and by py-spy
)
_LOUD = frozenset(("WARNING", "WARN", "ERROR", "CRITICAL", "FATAL"))


class Shapes:
    """The shapes that one start showed so far, in bounded memory."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self.shapes: set[int] = set()
        self.cheap_shapes: set[int] = set()

    @property
    def are_full(self) -> bool:
        return len(self.cheap_shapes) >= MAX_SHAPES

    def clear(self) -> None:
        self.shapes, self.cheap_shapes = set(), set()

    def new_in(self, part: bytes, hit_offsets: list[int]) -> list[int]:
        """Offsets of lines of a shape not shown yet; a first, cheap shape only drops digits.

        `part`: whole lines; `hit_offsets`: where those begin that a pattern knows, rising.
        """
        shapes = list(map(hash, part.translate(None, _DIGITS).split(b"\n")))
        seen = self.cheap_shapes
        fresh = [number for number, shape in enumerate(shapes) if shape not in seen]
        if not fresh:
            return []
        lines, hits, offsets = part.split(b"\n"), _line_indexes(part, hit_offsets), list[int]()
        offset, before = 0, 0
        for number in fresh:
            if shapes[number] in seen or number in hits:
                continue
            seen.add(shapes[number])
            if self._is_new(lines[number]):
                offset += sum(map(len, lines[before:number])) + number - before
                before = number
                offsets.append(offset)
        return offsets

    def _is_new(self, line: bytes) -> bool:
        text = text_of(line)[:2000]
        prefix, message = self._framework.split(text)
        if prefix.level in _LOUD or RANKED.search(text[: len(text) - len(message)]):
            return False
        if _NOT_NOVEL.match(message):
            return False
        shape = hash(_MASK.sub("#", message))
        if shape in self.shapes:
            return False
        self.shapes.add(shape)
        return True


def _line_indexes(part: bytes, offsets: list[int]) -> set[int]:
    """The numbers, within a part, of the lines that begin at the given (rising) offsets."""
    indexes, number, before = set[int](), 0, 0
    for offset, _ in groupby(offsets):
        number += part.count(b"\n", before, offset)
        before = offset
        indexes.add(number)
    return indexes
