"""The literals of a framework's patterns, found in blocks of bytes in one pass (Aho-Corasick).

After ready the frequent lines are left out of that search and merely counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...frameworks import Framework

GROUP = 32
"""Most literals that are searched with the quickest vector instructions; of up to 64 it takes twice as long."""
MANY_BYTES = 512
"""Where one literal comes in so many bytes the whole block is searched for all of them."""

_ANY_DIGIT = re.compile(r"\{\d*,?\d*\}|\\d|0-9|\(\?P<\w+>")

Find = Callable[[bytes], Iterable[tuple[int, int]]]
"""Positions in a block: (index of the literal, offset), line by line."""


def literal_finder(literals: list[bytes]) -> Find:
    """The fastest search for many literals at hand: Aho-Corasick, else one pass per literal.

    A few dozen literals are searched with vector instructions, more of them byte by byte.  So they are searched in
    groups, which find the lines, and only those are searched for all.  A literal that holds another one is in no group,
    for its line is found anyway, and those that begin alike are in one, for fewer places look like a beginning then.
    No literal holds a line end.
    """
    if not literals:
        return lambda block: ()
    try:
        from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind
    except ImportError:
        return _plain_finder(literals)
    small = Implementation.ContiguousNFA
    least = sorted(one for one in literals if not any(other != one and other in one for other in literals))
    size = -(-len(least) // -(-len(least) // GROUP))
    groups = [
        BytesAhoCorasick(least[at : at + size], matchkind=MatchKind.LeftmostFirst, implementation=small)
        for at in range(0, len(least), size)
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


def counter(literals: Sequence[bytes]) -> Callable[[bytes], list[int]]:
    """How often each of some literals comes in a block, by itself.

    Of text the search gives the literal itself for each place, of bytes it makes three numbers, which takes longer
    than to find it.  Either takes less time than `bytes.count`.
    """
    try:
        from ahocorasick_rs import AhoCorasick, BytesAhoCorasick
    except ImportError:
        return lambda block: [block.count(literal) for literal in literals]
    in_text = [AhoCorasick([literal.decode()], store_patterns=True) for literal in literals]
    in_bytes = [BytesAhoCorasick([literal]) for literal in literals]

    def count(block: bytes) -> list[int]:
        try:
            text = block.decode("ascii")
        except UnicodeDecodeError:
            return [len(one.find_matches_as_indexes(block)) for one in in_bytes]
        return [len(one.find_matches_as_strings(text)) for one in in_text]

    return count


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

    frequent: tuple[bytes, ...]
    count: Callable[[bytes], list[int]]  # how often each of these comes in a block
    absent: tuple[bytes, ...]
    rare: int  # number of the rare literals; a literal with this index or above is an absent one
    find: Find


@lru_cache(maxsize=8)
def steady_search(framework: Framework, frequent: frozenset[bytes]) -> Steady:
    lexicon = lexicon_of(framework)
    absent = tuple(literal for literal in lexicon.bulk if literal not in frequent)
    shown = tuple(literal for literal in lexicon.bulk if literal in frequent)
    return Steady(shown, counter(shown), absent, len(lexicon.rare), literal_finder([*lexicon.rare, *absent]))
