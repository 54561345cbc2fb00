"""How many steps an expression takes of a text: its tree is walked as CPython's engine does, and each step is counted.

Times say something of the machine they were measured on, steps do not.  What fits one character, and where an anchor
holds, is asked of `re` itself; in which order ways are tried, and how far it goes back, is told here.  One step is a
character looked at, a way tried, or a repetition made shorter.  tests/test_regex_steps.py holds it against `re`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from re import _compiler as compiler  # type: ignore[attr-defined]  # how an expression is built is told there only
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

DEEPEST = 200_000
"""Calls in each other: a few for each round of a repetition of more than one character."""
NO_BUDGET = sys.maxsize
REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
OF_ONE = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
"""What takes one character."""

_WORD = codes.IN, [(codes.CATEGORY, codes.CATEGORY_WORD)]

Node = Callable[[str, int], bool]
"""Whether a part of an expression, and all that comes after it, fits a text from a position on."""
Item = tuple[Any, Any]


class TooManyStepsError(Exception):
    """The budget is used up."""


class Steps:
    """An expression that counts: `steps` are those of the last call, `marks` what its groups hold.

    `tests` are all that it asks of one character, anchors included: those that answer alike are as good as the same.
    """

    def __init__(self, pattern: re.Pattern[Any]) -> None:
        tree = parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
        self.tree: list[Item] = list(tree)
        self.flags: int = tree.state.flags
        self.steps = 0
        self.marks: dict[int, tuple[int, int]] = {}
        self._budget = NO_BUDGET
        self._end, self._is_whole = 0, False
        self.tests = [Fits((codes.LITERAL, ord("\n")), self.flags), Fits(_WORD, self.flags)]
        self._match = _Builder(self).nodes(self.tree, self.flags, self._finish)
        self._first = first_of(self.tree, self.flags)

    def run(self, use: str, text: str | bytes, at: int = 0, budget: int = NO_BUDGET) -> tuple[int, int] | None:
        """The span that `match`, `fullmatch` or `search` finds from a position on.  Raises TooManyStepsError."""
        read = text if isinstance(text, str) else text.decode("latin-1")
        self.steps, self._budget, self._is_whole = 0, budget, use == "fullmatch"
        if use != "search" and self._first is not None and not self._first[read[at : at + 1]]:
            self.count(2)
            return None
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(DEEPEST)
        try:
            for begin in self._begins(read, at) if use == "search" else (at,):
                self.count(1)
                self.marks.clear()
                if self._match(read, begin):
                    return begin, self._end
        finally:
            sys.setrecursionlimit(limit)
        return None

    def _begins(self, text: str, at: int) -> Iterator[int]:
        """Where a match may begin; what is passed over is a step for each place, too."""
        if self._first is None:
            yield from range(at, len(text) + 1)
            return
        while found := self._first.pattern.search(text, at):
            self.count(found.start() - at)
            yield found.start()
            at = found.start() + 1
        self.count(max(0, len(text) - at))

    def count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > self._budget:
            raise TooManyStepsError

    def _finish(self, text: str, at: int) -> bool:
        self._end = at
        return not self._is_whole or at == len(text)


def by_itself(item: Item, flags: int) -> re.Pattern[Any]:
    """One part of a tree as `re` compiles it; it takes text and, with flags of bytes, Latin-1 for them."""
    pattern: re.Pattern[Any] = compiler.compile(_sequence(item, flags), flags)
    return pattern


def _sequence(item: Item, flags: int) -> Any:
    state = parser.State()
    state.flags = flags
    return parser.SubPattern(state, [item])


class Fits(dict[str, bool]):
    """Whether a character fits; `re` is asked once."""

    def __init__(self, item: Item, flags: int) -> None:
        super().__init__()
        self.pattern = by_itself(item, flags)

    def __missing__(self, sign: str) -> bool:
        fits = self[sign] = self.pattern.match(sign) is not None
        return fits

    def places(self, text: str, ways: range) -> Sequence[int]:
        """Those where the character fits."""
        low, high = min(ways[0], ways[-1]), max(ways[0], ways[-1])
        found = [match.start() for match in self.pattern.finditer(text, low, high + 1)]
        return found[:: ways.step] if found else found


def first_of(items: Sequence[Item], flags: int) -> Fits | None:
    """What the first character must fit, where that is one test."""
    if not items:
        return None
    code, argument = items[0]
    if code in OF_ONE:
        return Fits((code, argument), flags)
    if code in REPEATS and argument[0] > 0:
        return first_of(argument[2], flags)
    if code is codes.SUBPATTERN:
        return first_of(argument[3], compiler._combine_flags(flags, argument[1], argument[2]))
    return None


class _Ways(dict[str, list[Node]]):
    """Branches that may begin with a character, in their order; the others are only looked at."""

    def __init__(self, every: list[tuple[Fits | None, Node]]) -> None:
        super().__init__()
        self.every = every

    def __missing__(self, sign: str) -> list[Node]:
        ways = self[sign] = [way for first, way in self.every if first is None or first[sign]]
        return ways


class _Builder:
    """Makes nodes of a tree, each with all that comes after it."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._made: dict[Any, Callable[[Any, int, Node], Node]] = {
            codes.AT: self._anchor,
            codes.BRANCH: self._branch,
            codes.SUBPATTERN: self._group,
            codes.ATOMIC_GROUP: self._atomic,
            codes.GROUPREF: self._again,
            codes.GROUPREF_EXISTS: self._if_group,
            codes.ASSERT: self._look,
            codes.ASSERT_NOT: self._look_not,
            codes.FAILURE: lambda argument, flags, then: lambda text, at: False,
        }

    def nodes(self, items: Iterable[Item], flags: int, then: Node) -> Node:
        """Of a sequence, made from its end to its beginning."""
        following: Fits | None = None
        for code, argument in reversed(list(items)):
            if code in OF_ONE:
                following = self._fits((code, argument), flags)
                then = self._one(following, then)
                continue
            if code in REPEATS:
                then = self._repeat(code, argument, flags, then, following)
            else:
                then = self._made[code](argument, flags, then)
            following = None
        return then

    def _fits(self, item: Item, flags: int) -> Fits:
        self._steps.tests.append(fits := Fits(item, flags))
        return fits

    # --- what takes characters -------------------------------------------------------------------------------

    def _one(self, fits: Fits, then: Node) -> Node:
        steps = self._steps

        def node(text: str, at: int) -> bool:
            steps.steps += 1
            return at < len(text) and fits[text[at]] and then(text, at + 1)

        return node

    def _repeat(self, code: Any, argument: Any, flags: int, then: Node, following: Fits | None) -> Node:
        least, most, body = argument
        most = sys.maxsize if most is codes.MAXREPEAT else most
        if len(body) == 1 and body[0][0] in OF_ONE:
            self._fits(body[0], flags)
            every = codes.MAX_REPEAT, (0, codes.MAXREPEAT, _sequence(body[0], flags))
            ways = partial(_WAYS[code], by_itself(every, flags), least, most)
            return self._repeat_one(ways, then, following)
        if code is codes.POSSESSIVE_REPEAT:
            return self._possessive(least, most, body, flags, then)
        rounds = _Rounds(self._steps, least, most, code is codes.MAX_REPEAT, then)
        rounds.body = self.nodes(body, flags, rounds.again)
        return rounds.begin

    def _repeat_one(self, ways_of: Callable[[str, int], range], then: Node, following: Fits | None) -> Node:
        """What comes after it is called only where the character fits that must follow: there are many ways."""
        count = self._steps.count

        def node(text: str, at: int) -> bool:
            ways = ways_of(text, at)
            if not ways:
                count(1)
                return False
            first, last = ways[0], ways[-1]
            count(1 + max(first, last) - at)
            before = first
            for way in ways if following is None else following.places(text, ways):
                count(abs(way - before) + 1)
                before = way
                if then(text, way):
                    return True
            count(abs(last - before))
            return False

        return node

    def _again(self, group: int, flags: int, then: Node) -> Node:
        steps, is_folded = self._steps, bool(flags & re.IGNORECASE)

        def folded(text: str) -> str:
            return "".join(sign.lower()[0] if flags & re.UNICODE or sign.isascii() else sign for sign in text)

        def node(text: str, at: int) -> bool:
            if group not in steps.marks:
                return False
            begin, end = steps.marks[group]
            held, here = text[begin:end], text[at : at + end - begin]
            steps.count(1 + len(here))
            is_same = folded(held) == folded(here) if is_folded else held == here
            return is_same and then(text, at + len(held))

        return node

    # --- what takes none -------------------------------------------------------------------------------------

    def _anchor(self, argument: Any, flags: int, then: Node) -> Node:
        holds, count = by_itself((codes.AT, argument), flags).match, self._steps.count

        def node(text: str, at: int) -> bool:
            count(1)
            return holds(text, at) is not None and then(text, at)

        return node

    def _look(self, argument: Any, flags: int, then: Node, is_wanted: bool = True) -> Node:
        direction, items = argument
        body, back = self.nodes(items, flags, _Place()), items.getwidth()[0] if direction < 0 else 0
        steps = self._steps

        def node(text: str, at: int) -> bool:
            steps.count(1)
            kept = dict(steps.marks)
            if (at >= back and body(text, at - back)) is is_wanted and then(text, at):
                return True
            steps.marks = kept
            return False

        return node

    def _look_not(self, argument: Any, flags: int, then: Node) -> Node:
        return self._look(argument, flags, then, False)

    # --- ways ------------------------------------------------------------------------------------------------

    def _branch(self, argument: Any, flags: int, then: Node) -> Node:
        ways = _Ways([(first_of(items, flags), self.nodes(items, flags, then)) for items in argument[1]])
        count = self._steps.count

        def node(text: str, at: int) -> bool:
            count(len(ways.every))
            for way in ways[text[at : at + 1]]:  # noqa: SIM110  # `any` calls from C, of which calls are few deep
                if way(text, at):
                    return True
            return False

        return node

    def _group(self, argument: Any, flags: int, then: Node) -> Node:
        group, more, less, items = argument
        flags = compiler._combine_flags(flags, more, less)
        if group is None:
            return self.nodes(items, flags, then)
        mark = _Mark(self._steps, group, then)
        mark.body = self.nodes(items, flags, mark.close)
        return mark.open

    def _if_group(self, argument: Any, flags: int, then: Node) -> Node:
        group, yes, no = argument
        steps = self._steps
        ways = self.nodes(yes, flags, then), self.nodes(no or (), flags, then)

        def node(text: str, at: int) -> bool:
            steps.count(1)
            return ways[group not in steps.marks](text, at)

        return node

    def _atomic(self, items: Any, flags: int, then: Node) -> Node:
        return self._possessive(1, 1, items, flags, then)

    def _possessive(self, least: int, most: int, items: Any, flags: int, then: Node) -> Node:
        """Each round is done once and for all; one that takes nothing is the last."""
        place, steps = _Place(), self._steps
        body = self.nodes(items, flags, place)

        def node(text: str, at: int) -> bool:
            kept, before, rounds = dict(steps.marks), -1, 0
            while rounds < least or (rounds < most and at != before):
                steps.count(1)
                marks = dict(steps.marks)
                if not body(text, at):
                    steps.marks = marks
                    break
                before, at, rounds = at if rounds >= least else -1, place.at, rounds + 1
            if rounds >= least and then(text, at):
                return True
            steps.marks = kept
            return False

        return node


def _longest(run: re.Pattern[Any], most: int, text: str, at: int) -> int:
    """Where a run of what fits one character ends, at most."""
    found = run.match(text, at, min(at + most, len(text)))
    return found.end() if found else at


def _greedy(run: re.Pattern[Any], least: int, most: int, text: str, at: int) -> range:
    return range(_longest(run, most, text, at), at + least - 1, -1)


def _lazy(run: re.Pattern[Any], least: int, most: int, text: str, at: int) -> range:
    return range(at + least, _longest(run, most, text, at) + 1)


def _only(run: re.Pattern[Any], least: int, most: int, text: str, at: int) -> range:
    return _greedy(run, least, most, text, at)[:1]


_WAYS = {codes.MAX_REPEAT: _greedy, codes.MIN_REPEAT: _lazy, codes.POSSESSIVE_REPEAT: _only}


class _Place:
    """The end of what is tried by itself."""

    at = 0

    def __call__(self, text: str, at: int) -> bool:
        self.at = at
        return True


class _Mark:
    """A group: where it began and ended, and as before when what comes after it does not fit."""

    body: Node

    def __init__(self, steps: Steps, group: int, then: Node) -> None:
        self._steps, self._group, self._then = steps, group, then
        self._begin = 0

    def open(self, text: str, at: int) -> bool:
        before, self._begin = self._begin, at
        if self.body(text, at):
            return True
        self._begin = before
        return False

    def close(self, text: str, at: int) -> bool:
        before, begin = self._steps.marks.get(self._group), self._begin
        self._steps.marks[self._group] = begin, at
        if self._then(text, at):
            return True
        self._begin = begin
        if before is None:
            self._steps.marks.pop(self._group, None)
        else:
            self._steps.marks[self._group] = before
        return False


class _Rounds:
    """A repetition of more than one character; a round that took nothing is followed by no other."""

    body: Node

    def __init__(self, steps: Steps, least: int, most: int, is_greedy: bool, then: Node) -> None:
        self._count, self._least, self._most = steps.count, least, most
        self._then, self._is_greedy = then, is_greedy
        self._done, self._before = 0, -1

    def begin(self, text: str, at: int) -> bool:
        kept = self._done, self._before
        self._done, self._before = 0, -1
        if self.again(text, at):
            return True
        self._done, self._before = kept
        return False

    def again(self, text: str, at: int) -> bool:
        self._count(1)
        if self._done < self._least:
            return self._round(text, at, self._before)
        if self._is_greedy:
            return self._one_more(text, at) or self._leave(text, at)
        return self._leave(text, at) or self._one_more(text, at)

    def _one_more(self, text: str, at: int) -> bool:
        return self._done < self._most and at != self._before and self._round(text, at, at)

    def _round(self, text: str, at: int, before: int) -> bool:
        kept = self._done, self._before
        self._done, self._before = self._done + 1, before
        if self.body(text, at):
            return True
        self._done, self._before = kept
        return False

    def _leave(self, text: str, at: int) -> bool:
        """What comes after it may come to it again, as the first of its rounds."""
        kept = self._done, self._before
        if self._then(text, at):
            return True
        self._done, self._before = kept
        return False
