"""Whose log is it?  Tries every framework on the beginning of a log and counts the kinds of lines it knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...frameworks import Framework, Pattern, Prefix
from .lines import Batch, Hit, LogScanner, _Line

FALLBACK = "generic"


@dataclass(frozen=True, slots=True)
class Recognised:
    """The framework that a log is read with, and whether the log says so itself.

    `is_certain`: lines behind that framework's own prefix were found, more kinds of them than of any other.  Else it
    is a guess by bars and the web server's lines, which others write too; and where there is not even that, the
    fallback, for a log of an unknown kind.
    """

    framework: Framework
    is_certain: bool


@dataclass(frozen=True, order=True, slots=True)
class _Score:
    """Kinds of lines behind the framework's own prefix, other kinds of its own file, lines in all."""

    own: int = 0
    other: int = 0
    lines: int = 0

    @property
    def kinds(self) -> tuple[int, int]:
        return self.own, self.other


class _Witness(LogScanner):
    """A scanner that remembers which patterns matched."""

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework, track_shapes=False, numbered=True)
        self.found: dict[Pattern, int] = {}

    def _take(
        self,
        pattern: Pattern,
        match: re.Match[str],
        prefix: Prefix,
        block: bytes,
        line: _Line,
        batch: Batch,
    ) -> Hit | None:
        self.found[pattern] = self.found.get(pattern, 0) + 1
        return super()._take(pattern, match, prefix, block, line, batch)


def recognise(sample: Iterable[bytes], frameworks: Sequence[Framework]) -> Recognised:
    """Blocks of whole lines -> whose they are.  `frameworks` holds at least one; `generic` is for what is left."""
    blocks = tuple(sample)
    shared = _shared(frameworks)
    scores = {one.name: _score(one, blocks, shared) for one in frameworks if one.name != FALLBACK}
    by_name = {one.name: one for one in frameworks}
    ranking = sorted(scores, key=lambda name: (scores[name], not by_name[name].extends), reverse=True)
    best = _Score() if not ranking else scores[ranking[0]]
    next_best = scores[ranking[1]] if len(ranking) > 1 else _Score()
    if best.kinds <= (0, 0) or (best.own == 0 and best.kinds == next_best.kinds):
        return Recognised(by_name.get(FALLBACK) or frameworks[0], False)
    return Recognised(by_name[ranking[0]], best.own > next_best.own)


def _shared(frameworks: Sequence[Framework]) -> frozenset[Pattern]:
    """Patterns of the common file: every framework has them, also under other prefixes."""
    sets = [frozenset(one.patterns) - one.own for one in frameworks if not one.extends]
    return frozenset.intersection(*sets) if sets else frozenset()


def _score(framework: Framework, blocks: Sequence[bytes], shared: frozenset[Pattern]) -> _Score:
    """Nothing for a framework that extends another when only the other's lines are there, or those of its web server.

    An engine inside another program has none; where there is one, what looks like the other program's is a quotation.
    """
    witness = _Witness(framework)
    for block in blocks:
        witness.feed(block)
    witness.finish()
    known = {pattern: count for pattern, count in witness.found.items() if pattern not in shared}
    if framework.extends and (not framework.own & known.keys() or any(map(_serves, known.keys() - framework.own))):
        return _Score()
    own = sum(1 for pattern in known if pattern.prefix == "own")
    return _Score(own, len(known) - own, sum(known.values()))


def _serves(pattern: Pattern) -> bool:
    """Whether a line tells of an engine's own web server."""
    return pattern.prefix == "uvicorn" or pattern.event in ("listening", "ready")
