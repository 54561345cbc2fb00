"""The literals of a framework's patterns, found in blocks of bytes in one pass (Aho-Corasick).

After ready the frequent lines are left out of that search and merely counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ...frameworks import Framework

GROUP = 64
"""Most literals that are searched with vector instructions."""
MANY_BYTES = 512
"""Where one literal comes in so many bytes the whole block is searched for all of them."""

_ANY_DIGIT = re.compile(r"\{\d*,?\d*\}|\\d|0-9|\(\?P<\w+>")

Find = Callable[[bytes], Iterable[tuple[int, int]]]
"""Positions in a block: (index of the literal, offset), line by line."""


def literal_finder(literals: list[bytes]) -> Find:
    """The fastest search for many literals at hand: Aho-Corasick, else one pass per literal.

    A few dozen literals are searched with vector instructions, more of them byte by byte.  So they are searched in
    groups, which find the lines, and only those are searched for all.  No literal holds a line end.
    """
    if not literals:
        return lambda block: ()
    try:
        from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind
    except ImportError:
        return _plain_finder(literals)
    small = Implementation.ContiguousNFA
    size = -(-len(literals) // -(-len(literals) // GROUP))
    groups = [
        BytesAhoCorasick(literals[at : at + size], matchkind=MatchKind.LeftmostFirst, implementation=small)
        for at in range(0, len(literals), size)
    ]
    every = BytesAhoCorasick(literals, matchkind=MatchKind.Standard, implementation=small)

    def find(block: bytes) -> Iterable[tuple[int, int]]:
        found = [match for group in groups for match in group.find_matches_as_indexes(block)]
        if not found:
            return ()
        if len(found) * MANY_BYTES > len(block):
            return [(index, start) for index, start, _ in every.find_matches_as_indexes(block, overlapping=True)]
        return [
            (index, begin + start)
            for begin, end in _lines_at(block, sorted(start for _, start, _ in found))
            for index, start, _ in every.find_matches_as_indexes(block[begin:end], overlapping=True)
        ]

    return find


def line_count(block: bytes) -> int:
    """As `block.count` of the line end, which looks at each byte by itself and takes three times as long."""
    return len(block) - len(block.replace(b"\n", b""))


def counter(literal: bytes) -> Callable[[bytes], int]:
    """How often one literal comes in a block; vector instructions take half the time of `bytes.count`."""
    try:
        from ahocorasick_rs import BytesAhoCorasick
    except ImportError:
        return lambda block: block.count(literal)
    searched = BytesAhoCorasick([literal])
    return lambda block: len(searched.find_matches_as_indexes(block))


def _lines_at(block: bytes, offsets: list[int]) -> Iterator[tuple[int, int]]:
    """From where to where the lines go that hold any of the (rising) offsets."""
    end = -1
    for offset in offsets:
        if offset < end:
            continue
        begin = block.rfind(b"\n", 0, offset) + 1
        end = block.find(b"\n", offset)
        end = len(block) if end < 0 else end
        yield begin, end


def _plain_finder(literals: list[bytes]) -> Find:
    def find(block: bytes) -> Iterable[tuple[int, int]]:
        found = []
        for index, literal in enumerate(literals):
            offset = block.find(literal)
            while offset >= 0:
                found.append((index, offset))
                offset = block.find(literal, offset + 1)
        return sorted(found, key=lambda pair: pair[1])

    return find


class Lexicon:
    """The literals of a framework, prepared for search: all of them, and those that matter after ready."""

    def __init__(self, framework: Framework) -> None:
        self.patterns = framework.patterns
        by_literal = framework.by_literal
        self.bulk = {
            literal: self.patterns[indexes[0]].event
            for literal, indexes in by_literal.items()
            if all(self.patterns[index].bulk for index in indexes)
        }
        self.full_literals = list(by_literal)
        self.full_candidates = [by_literal[literal] for literal in self.full_literals]
        self.rare = [literal for literal in by_literal if literal not in self.bulk]
        self.rare_candidates = [by_literal[literal] for literal in self.rare]
        self.find_all = literal_finder(self.full_literals)
        self.blind = _blind(framework)
        self.bulk_patterns = tuple(
            (pattern.literal, index) for index, pattern in enumerate(self.patterns) if pattern.literal in self.bulk
        )


def _blind(framework: Framework) -> frozenset[int]:
    """Patterns to which one digit is as good as another; none at all when the prefix is not of that kind."""

    def is_blind(text: str) -> bool:
        return re.search(r"\d", _ANY_DIGIT.sub("", text)) is None

    if not is_blind(framework.prefix.pattern):
        return frozenset()
    return frozenset(
        index
        for index, pattern in enumerate(framework.patterns)
        if is_blind(pattern.regex.pattern) and is_blind(pattern.literal.decode())
    )


@lru_cache(maxsize=64)
def lexicon_of(framework: Framework) -> Lexicon:
    return Lexicon(framework)


@dataclass(frozen=True, slots=True)
class Steady:
    """The search after ready: `frequent` literals are merely counted, each in a pass of its own.

    Those that a log has not shown yet (`absent`) are searched with the rare ones, which costs nothing.
    """

    frequent: Mapping[bytes, Callable[[bytes], int]]  # literal -> its count in a block
    absent: tuple[bytes, ...]
    rare: int  # number of the rare literals; a literal with this index or above is an absent one
    find: Find


@lru_cache(maxsize=8)
def steady_search(framework: Framework, frequent: frozenset[bytes]) -> Steady:
    lexicon = lexicon_of(framework)
    absent = tuple(literal for literal in lexicon.bulk if literal not in frequent)
    shown = {literal: counter(literal) for literal in lexicon.bulk if literal in frequent}
    return Steady(shown, absent, len(lexicon.rare), literal_finder([*lexicon.rare, *absent]))
