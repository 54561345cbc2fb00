"""Lines that come again and again with other digits: one is read, the others are known by all but their digits.

A writer in trouble says the same thousands of times a second.  What such a line says does not depend on its digits,
but for those that tell who wrote it: they are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ...frameworks import NO_EVENT, RANKED, Framework, Pattern
from ...frameworks.json_lines import BEGIN
from ...startup import MARKERS
from .search import Lexicon

MAX_REPEATS = 1024
"""Lines that are known so, and writers of each of them; with more lines all are forgotten."""
REPEAT_CHARACTERS = 2000
"""A longer line is never known so."""

COUNTED = frozenset(("access", "heartbeat", NO_EVENT, "error", "watchdog", "waiting", "lock_wait"))
"""Events of which the number counts and the last one, not what each of them said."""
_FIRST_AND_LAST = MARKERS | {"listening", "fatal", "shutdown"}
"""Events of which the first one of a moment counts too; those between say nothing more."""
_MASKED = bytes.maketrans(b"0123456789", b"0" * 10)
_WRITER = frozenset(("parts", "rank", "pid", "engine"))
"""Groups of a prefix that tell who wrote the line."""

Fields = dict[str, float | str]
Meaning = tuple[Pattern, str, str | None, Fields]
"""What a line was found to say: the pattern that fits, its event, whose it is, and the event's fields."""


@dataclass(slots=True)
class Repeat:
    """What one writer says in such a line.

    `read_in`: the last block in which one was read.  Of the present block: `count` lines that were merely counted,
    `last` where the last of them begins, `time` of the last hit before it.
    """

    pattern: Pattern
    event: str
    rank: str | None
    fields: Fields
    read_in: int
    count: int = 0
    last: int = 0
    time: float | None = None

    @property
    def needs_first(self) -> bool:
        return self.event in _FIRST_AND_LAST


@dataclass(slots=True)
class _Form:
    """A line with its digits masked: between which offsets its writer stands, and what each writer says."""

    begin: int
    stop: int
    known: dict[bytes, Repeat] = field(default_factory=dict)


class Repeats:
    """The lines of one log that are known to repeat, in bounded memory.

    What they say must hold for as long as they are known: whoever learns otherwise calls `forget`.
    """

    def __init__(self, framework: Framework, lexicon: Lexicon) -> None:
        self._prefix, self._blind = framework.prefix, lexicon.blind
        self._with_digits = tuple(
            masked for literal in lexicon.full_literals if (masked := literal.translate(_MASKED)) != literal
        )
        self._forms: dict[bytes, _Form] = {}
        self._block = 0
        self._came: list[Repeat] = []

    def __len__(self) -> int:
        return len(self._forms)

    def forget(self) -> None:
        """What was counted of the present block stays counted."""
        self._forms.clear()

    def take(self) -> list[Repeat]:
        """The block ends: what came in it."""
        came, self._came = self._came, []
        self._block += 1
        return came

    def learn(self, raw: bytes, indexes: set[int], meaning: Meaning) -> None:
        """Know a line from now on, if nothing of it depends on its digits.  `indexes`: the patterns it was tried on."""
        pattern, event, rank, fields = meaning
        if event not in COUNTED and event not in _FIRST_AND_LAST:
            return
        if rank is None and event in MARKERS:
            return  # whose it is depends on the ranks that other lines name
        if pattern.regex.groupindex or pattern.proves_ready or pattern.every_rank or pattern.again not in ("", event):
            return
        if not self._blind >= indexes or len(raw) > REPEAT_CHARACTERS:
            return
        if not raw.isascii() or b"\r" in raw or b"\x1b" in raw or raw.startswith(b"\0"):
            return
        masked, text = raw.translate(_MASKED), raw.decode()
        if any(literal in masked for literal in self._with_digits):
            return  # with other digits other patterns may fit
        prefix = self._prefix.match(text)
        behind = prefix.end() if prefix else 0
        if text.startswith(BEGIN, behind):
            return  # a record may name its writer anywhere
        if len(self._forms) >= MAX_REPEATS:
            self._forms.clear()
        form = self._forms.setdefault(masked, _Form(*_writer(prefix, RANKED.match(text, behind))))
        if len(form.known) < MAX_REPEATS or raw[form.begin : form.stop] in form.known:
            told = {name: value for name, value in fields.items() if name != "version"}
            form.known[raw[form.begin : form.stop]] = Repeat(pattern, event, rank, told, self._block)

    def counts(self, raw: bytes, start: int, time: float | None) -> bool:
        """Count a line that begins at `start` if it need not be read.  `time` of the last hit before it."""
        form = self._forms.get(raw.translate(_MASKED))
        repeat = form.known.get(raw[form.begin : form.stop]) if form is not None else None
        if repeat is None or (repeat.read_in != self._block and repeat.needs_first):
            return False
        self._count(repeat, start, time)
        return True

    def pass_over(self, block: bytes, time: Callable[[], float | None]) -> Iterator[tuple[int, int]]:
        """Count what need not be read; between that come the stretches of whole lines that are to be read.

        A line is looked up behind the reading of all before it: that may teach, or make forget.
        """
        lines, masks = block.split(b"\n"), block.translate(_MASKED).split(b"\n")
        begin, offset, last_time = 0, len(lines[0]) + 1, time()
        del lines[-1], masks[-1]  # what has no end yet
        for raw, mask in zip(lines[1:], masks[1:], strict=True):
            start, offset = offset, offset + len(raw) + 1
            if (repeat := self._find(raw, mask)) is None:
                continue
            if repeat.read_in != self._block and repeat.needs_first:
                yield begin, offset
                begin, last_time = offset, time()
                continue
            if begin < start:
                yield begin, start
                begin, last_time = start, time()
                if (repeat := self._find(raw, mask)) is None or (repeat.read_in != self._block and repeat.needs_first):
                    continue
            self._count(repeat, start, last_time)
            begin = offset
        if begin < len(block):
            yield begin, len(block)

    def _find(self, raw: bytes, mask: bytes) -> Repeat | None:
        form = self._forms.get(mask)
        return None if form is None else form.known.get(raw[form.begin : form.stop])

    def _count(self, repeat: Repeat, start: int, time: float | None) -> None:
        if not repeat.count:
            self._came.append(repeat)
        repeat.count += 1
        repeat.last, repeat.time = start, time


def _writer(*matches: re.Match[str] | None) -> tuple[int, int]:
    """From where to where a prefix, and torch's behind it, tell who wrote the line."""
    spans = [
        match.span(group)
        for match in matches
        if match is not None
        for group in match.re.groupindex
        if _is_writer(group) and match[group]
    ]
    return min((begin for begin, _ in spans), default=0), max((stop for _, stop in spans), default=0)


@lru_cache(maxsize=64)
def _is_writer(group: str) -> bool:
    """Whether a group of a prefix, or of another form of it, tells who wrote the line."""
    return re.sub(r"_\d+$", "", group) in _WRITER
