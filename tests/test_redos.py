"""No expression takes longer than the length of its text: each is fed what makes a backtracking search go wrong.

For every repetition in an expression a text is made that comes to it, goes on with what it repeats, and then does not
end as the expression wants.  Of one that has four times as many rounds it must take about four times as many steps: one
that is quadratic takes sixteen times.  No time is measured; steps are counted (regex_steps), and what whole lines cost
is added up (text_costs), so that it is the same on every machine.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]  # how an expression is built is told there only
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from regex_steps import OF_ONE, REPEATS, Steps, TooManyStepsError
from stallwatch.config import Limits
from stallwatch.frameworks import load_frameworks
from stallwatch.sources.logs.lines import LogScanner
from stallwatch.sources.logs.text import CLASSIFIED_CHARACTERS, text_of
from text_costs import Meter, metered, steps_of, told

SOURCE = Path(__file__).parents[1] / "exporter" / "stallwatch"

LENGTH = 100
"""Characters of the shorter text, at least, without those that lead to the repetition."""
ROUNDS = 4
"""Of what is repeated, at least; and how much longer the longer text is."""
MOST_RATIO = 5.0
"""The steps of the longer text to those of the shorter; what grows with the text only has 4.7 at most."""
FAR = 10.0
MOST_STEPS = 200_000
"""Of the shorter text; none that is well made takes 20,000."""
ENDLESS = 1000
"""A repetition of so many may go on for ever, as far as these lengths tell."""
LONGEST_NAME, AT_ONCE_STEPS = 255, 150_000
"""Bytes of a part of a path; steps of so many."""
COST_LENGTHS = (500, 2000)
"""Of what is hostile in a line or a title."""
MANY = 16
"""A repetition of at least so many is one."""
PUMPS = (
    "\n",
    "0",
    "a",
    "A",
    "f",
    " ",
    "\t",
    "-",
    ".",
    "_",
    "/",
    ":",
    ",",
    '"',
    "'",
    "[",
    "]",
    "(",
    "|",
    "=",
    "\\",
    "\x1b",
    "é",
)
ENDS = ("", "\0", "\n", "!", "z")


class Expression(NamedTuple):
    """Where it is, and how it is used: `match` from the beginning, or `search` anywhere."""

    name: str
    pattern: re.Pattern[Any]
    use: str = "match"


# --- texts that go wrong -------------------------------------------------------------------------------------


def examples(items: Iterable[Any]) -> Iterator[tuple[str, str | None]]:
    """What fits a sequence, made longer from part to part: (text, None) at its end; before that (text that leads to a
    repetition, what it repeats).
    """
    before = ""
    for code, argument in items:
        for lead, pump in _inside(code, argument):
            yield before + lead, pump
        before += _shortest_of(code, argument)
    yield before, None


def _inside(code: Any, argument: Any) -> Iterator[tuple[str, str]]:
    """Repetitions in one part of an expression."""
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        least, most, body = argument
        yield from ((lead, pump) for lead, pump in examples(body) if pump is not None)
        if most is codes.MAXREPEAT or most >= MANY:
            yield shortest(body) * least, shortest(body) or "0"
    elif code is codes.SUBPATTERN:
        yield from ((lead, pump) for lead, pump in examples(argument[-1]) if pump is not None)
    elif code is codes.BRANCH:
        for branch in argument[1]:
            yield from ((lead, pump) for lead, pump in examples(branch) if pump is not None)
    elif code is codes.ATOMIC_GROUP:
        yield from ((lead, pump) for lead, pump in examples(argument) if pump is not None)


def shortest(items: Iterable[Any]) -> str:
    """The shortest text, or one of them, that fits; as well as it can be told."""
    return "".join(_shortest_of(code, argument) for code, argument in items)


def _shortest_of(code: Any, argument: Any) -> str:
    made: Mapping[Any, Callable[[], str]] = {
        codes.LITERAL: lambda: chr(argument),
        codes.NOT_LITERAL: lambda: "x" if argument != ord("x") else "y",
        codes.ANY: lambda: "x",
        codes.IN: lambda: _one_of(argument),
        codes.BRANCH: lambda: shortest(argument[1][0]),
        codes.SUBPATTERN: lambda: shortest(argument[-1]),
        codes.ATOMIC_GROUP: lambda: shortest(argument),
        codes.MAX_REPEAT: lambda: shortest(argument[2]) * argument[0],
        codes.MIN_REPEAT: lambda: shortest(argument[2]) * argument[0],
        codes.POSSESSIVE_REPEAT: lambda: shortest(argument[2]) * argument[0],
    }
    return made[code]() if code in made else ""  # what takes no room: anchors, looks ahead; a group again


_CLASSES = {
    codes.CATEGORY_DIGIT: "0",
    codes.CATEGORY_SPACE: " ",
    codes.CATEGORY_WORD: "a",
    codes.CATEGORY_NOT_DIGIT: "a",
    codes.CATEGORY_NOT_SPACE: "a",
    codes.CATEGORY_NOT_WORD: " ",
}


def _one_of(members: list[tuple[Any, Any]]) -> str:
    """A character of a class."""
    if members[0][0] is codes.NEGATE:
        return next(sign for sign in "x0 -\x1b" if not any(_is_in(sign, member) for member in members[1:]))
    code, argument = members[0]
    if code is codes.CATEGORY:
        return _CLASSES[argument]
    return chr(argument if code is codes.LITERAL else argument[0])


def _is_in(sign: str, member: tuple[Any, Any]) -> bool:
    code, argument = member
    if code is codes.LITERAL:
        return bool(ord(sign) == argument)
    if code is codes.RANGE:
        return bool(argument[0] <= ord(sign) <= argument[1])
    return _CLASSES.get(argument) == sign


class Text(NamedTuple):
    """What leads to a repetition, what is repeated, and how it ends."""

    lead: str
    repeated: str
    end: str

    def of(self, length: int, times: int = 1) -> str:
        return self.lead + self.repeated * max(ROUNDS, length // len(self.repeated)) * times + self.end


def texts_for(steps: Steps) -> Iterator[Text]:
    """Texts that differ to an expression.

    Where it can tell one character from another, but not whether a text comes again, those it cannot tell apart are as
    good as the same.
    """
    seen, look, is_alike = set[Any](), looks(steps), "GROUPREF" not in repr(steps.tree)
    for lead, pump in examples(steps.tree):
        for repeated in dict.fromkeys((pump or lead or "0", lead + (pump or ""), *(PUMPS if pump else ()))):
            for end in ENDS:
                text = Text(lead, repeated, end)
                seems = tuple(tuple(map(look, part)) for part in text) if is_alike else text
                if repeated and seems not in seen:
                    seen.add(seems)
                    yield text


def looks(steps: Steps) -> Callable[[str], tuple[bool, ...]]:
    """What an expression can tell of a character; of bytes, of each of those that it is made of."""

    @cache
    def look(sign: str) -> tuple[bool, ...]:
        signs = sign if steps.flags & re.UNICODE else sign.encode("utf-8", "replace").decode("latin-1")
        return tuple(test[each] for each in signs for test in steps.tests)

    return look


# --- how many steps it takes ---------------------------------------------------------------------------------


@cache
def length_for(steps: Steps) -> int:
    return max(LENGTH, reach(steps.tree) * 5 // 4)


def reach(items: Iterable[Any]) -> int:
    """Characters until all that is bounded in an expression has come to its bounds."""
    return sum(_reach(code, argument) for code, argument in items)


def _reach(code: Any, argument: Any) -> int:
    if code in REPEATS:
        least, most, body = argument
        most = least if most is codes.MAXREPEAT or most > ENDLESS else most
        return max(1, int(most)) * reach(body)
    if code is codes.BRANCH:
        return max(map(reach, argument[1]))
    if code in (codes.SUBPATTERN, codes.ATOMIC_GROUP):
        return reach(argument[-1] if code is codes.SUBPATTERN else argument)
    return int(code in OF_ONE)


def slow_texts(expression: Expression, most: float = MOST_RATIO) -> Iterator[str]:
    """The beginnings of texts that take longer than their length.

    Of those that differ in their ends only, and take as many steps as each other, one is made longer.
    """
    steps = steps_of(expression.pattern)
    length, seen = length_for(steps), set[tuple[str, str, int]]()
    for text in texts_for(steps):
        few = steps_for(expression, text.of(length), MOST_STEPS)
        if (text.lead, text.repeated, few) in seen:
            continue
        seen.add((text.lead, text.repeated, few))
        if few > MOST_STEPS or steps_for(expression, text.of(length, ROUNDS), int(most * few)) > most * few:
            yield text.of(1)[:40]


def steps_for(expression: Expression, text: str, budget: int) -> int:
    """Steps that a text takes, or some more than the budget; they are those to what `re` finds."""
    pattern, steps = expression.pattern, steps_of(expression.pattern)
    read = text.encode("utf-8", "replace") if isinstance(pattern.pattern, bytes) else text
    try:
        span = steps.run(expression.use, read, budget=budget)
    except TooManyStepsError:
        return steps.steps
    found = getattr(pattern, expression.use)(read)
    assert span == (found and found.span()), (pattern.pattern, expression.use, text[:80])
    return steps.steps


# --- the expressions -----------------------------------------------------------------------------------------


@cache
def shipped() -> list[Expression]:
    """All of the files of the frameworks."""
    found: dict[tuple[Any, str], Expression] = {}
    for framework in load_frameworks():
        name = framework.name
        every = [Expression(f"{name}: prefix", framework.prefix)]
        every += [Expression(f"{name}: {pattern.event}", pattern.regex) for pattern in framework.patterns]
        every += [Expression(f"{name}: title", title.pattern) for title in framework.titles]
        for expression in every:
            found.setdefault((expression.pattern.pattern, expression.use), expression)
    return list(found.values())


_ALL = """
import json, pkgutil, re, sys, importlib
made, compiled = [], re.compile
def compile(pattern, flags=0):
    found = compiled(pattern, flags)
    frame = sys._getframe(1)
    if frame.f_globals.get("__name__", "").startswith("stallwatch"):
        made.append((frame.f_globals["__name__"], found))
    return found
re.compile = compile
import stallwatch
for module in pkgutil.walk_packages(stallwatch.__path__, "stallwatch."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
rows = []
for module, found in made:
    text, kind = found.pattern, type(found.pattern).__name__
    text = text.decode("latin-1") if kind == "bytes" else text
    names = [name for name, value in vars(sys.modules[module]).items() if value is found]
    rows.append((module, names, kind, text, found.flags & ~int(re.UNICODE)))
json.dump(rows, sys.stdout)
"""
"""What every module compiles when it is imported, and under which names."""

OF_OURS = {
    "stallwatch.sources.logs.search",  # the expressions of the frameworks
    "stallwatch.rules",  # the rules we ship
}
"""Modules whose expressions never see a text of somebody else."""

BOUNDED = {
    "stallwatch.sources.cgroups": "one part of a path, which has 255 bytes at most",
    "stallwatch.sources.procfs": "/proc/PID/io, which the kernel writes, of some 150 bytes",
    "sources/procfs.py": "/proc/PID/status, which the kernel writes; one number for each of 32 nested PID namespaces",
    "stallwatch.sources.runtime_folders": "the name of a folder, which has 255 bytes at most",
}
"""Modules whose texts are so short that no expression takes long."""

SHORT = {r"(\d+)(ms|[smhdwy])": "a duration that another expression has found to be one, of 77 characters at most"}
"""Expressions that only see short texts."""


def uses_of(names: list[str], source: str) -> list[str]:
    """How a module uses an expression: `match` and `fullmatch` begin at one place, all else anywhere."""
    called = {method for name in names for method in re.findall(rf"\b{name}\.(\w+)\(", source)}
    anchored = sorted(called & {"match", "fullmatch"})
    return anchored + (["search"] if not called or called - {"match", "fullmatch"} else [])


@cache
def in_code() -> list[Expression]:
    """All that modules compile when they are imported, and what they search for by an expression in the call."""
    return [*compiled(lambda module: module not in OF_OURS and module not in BOUNDED), *in_calls()]


@cache
def made_by_import() -> list[Any]:
    return list(json.loads(subprocess.run([sys.executable, "-c", _ALL], capture_output=True, check=True).stdout))


def compiled(is_wanted: Callable[[str], bool]) -> list[Expression]:
    found: dict[tuple[Any, int, str], Expression] = {}
    for module, names, kind, text, flags in made_by_import():
        if text in SHORT or not is_wanted(module):
            continue
        pattern = re.compile(text.encode("latin-1") if kind == "bytes" else text, flags)
        for use in uses_of(names, source_of(module).read_text()):
            found.setdefault((pattern.pattern, flags, use), Expression(f"{module}: {text}", pattern, use))
    return list(found.values())


def source_of(module: str) -> Path:
    path = SOURCE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def in_calls() -> Iterator[Expression]:
    """`re.search(r"...", text)` and the like."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") in _METHODS
                and ast.unparse(node.func) in _CALLS
                and isinstance(node.args[0], ast.Constant)
            ):
                text = node.args[0].value
                use = ast.unparse(node.func).removeprefix("re.")
                use = use if use in ("match", "fullmatch") else "search"
                place = str(path.relative_to(SOURCE))
                if isinstance(text, str | bytes) and place not in BOUNDED and f"stallwatch.{path.stem}" not in OF_OURS:
                    pattern: re.Pattern[Any] = re.compile(text, re.MULTILINE | re.DOTALL)
                    yield Expression(f"{place}:{node.lineno}", pattern, use)


_METHODS = ("search", "match", "fullmatch", "sub", "subn", "findall", "finditer", "split")
_CALLS = {f"re.{name}" for name in _METHODS}


@pytest.mark.parametrize("group", range(4))
def test_the_steps_of_every_shipped_expression_grow_with_its_text_only(group: int) -> None:
    slow = {each.name: found for each in shipped()[group::4] if (found := list(slow_texts(each)))}

    assert slow == {}


def test_the_steps_of_every_expression_in_the_code_grow_with_its_text_only() -> None:
    slow = {f"{each.name} ({each.use})": found for each in in_code() if (found := list(slow_texts(each)))}

    assert slow == {}


def slow_of_short(expressions: Iterable[Expression]) -> list[str]:
    """Texts as long as a part of a path that take more steps than some for each character."""
    return [
        f"{expression.name}: {text.of(1)[:40]!r}"
        for expression in expressions
        for text in texts_for(steps_of(expression.pattern))
        if steps_for(expression, text.of(LONGEST_NAME), AT_ONCE_STEPS) > AT_ONCE_STEPS
    ]


def test_what_is_short_is_read_at_once_however_it_is_made() -> None:
    """An exponential one would take for ever of a few dozen characters."""
    assert slow_of_short(compiled(lambda module: module in BOUNDED)) == []


@pytest.mark.parametrize("text", [r"(a+)+b", r"\w*\w*\w*;"])
def test_what_is_short_and_takes_long_is_found(text: str) -> None:
    assert slow_of_short([Expression("", re.compile(text))]) != []


LOOKED_AT = ("logs.shapes", "logs.text", "discovery.py", "json_lines", "http_probe.py", "strict_yaml", "web.access")


def test_all_expressions_are_looked_at() -> None:
    names = " ".join(expression.name for expression in (*shipped(), *in_code()))

    assert all(f"{framework.name}: " in names for framework in load_frameworks())
    assert all(part in names for part in LOOKED_AT)


@pytest.mark.parametrize(
    ("text", "use"),
    [
        (r"(a+)+b", "match"),
        (r"x(?:\w+\s?)*!", "match"),
        (r"\s*\s*x", "match"),
        (r"\d+x", "search"),
        (r"a[^!]*?b[^!]*?c", "match"),
        (r"\w+://", "search"),
        (r"\b[0-9a-f]*\d[0-9a-f]*\b", "search"),  # once masked hashes
        (r"([A-Z]+(?:_[A-Z]+)*)(\d{1,5})(?!\d)", "search"),  # once read the parts of a rank's name
        (r"(?:a|a)*b", "match"),
        (r"(?:a|aa)+$", "match"),
        (r"(?:[a-z]+[0-9]*)*;", "fullmatch"),
        (r"\s+$", "search"),
        (r"(?m)^\s*#", "search"),
        (r"(?i)[a-z]+@", "search"),
        (r"(?s).*,.*;", "match"),
        (r"\w*?\w*?-", "match"),
        (r"(a*)\1b", "match"),
        (r"(?:(?=\w*;)|\w)*!", "match"),
        (r"(?>\w+)=", "search"),
        (r"\w++=", "search"),
        (rb"[^>]*>", "search"),
    ],
)
def test_an_expression_that_backtracks_is_found(text: str | bytes, use: str) -> None:
    """Far from where it would not be."""
    assert next(slow_texts(Expression("", re.compile(text), use), FAR), None) is not None


@pytest.mark.parametrize(
    ("text", "use"),
    [
        (r"\d+x", "match"),
        (r"[^x]*x", "match"),
        (r"ab+c", "search"),
        (r"\S{1,20} x", "search"),
        (r"(?:\w+\s)*!", "match"),
        (r"(?>a+)+b", "match"),
        (r"(?:a++)+b", "match"),
        (r"(?<!\s)\s+$", "search"),
        (r"(?m)^[ \t]*#", "search"),
        (r"(?<!\w)\w++=", "search"),
        (r"(a{0,9})\1b", "search"),
        (rb"<[^<>]*>", "search"),
    ],
)
def test_an_expression_that_does_not_backtrack_is_not(text: str | bytes, use: str) -> None:
    assert list(slow_texts(Expression("", re.compile(text), use))) == []


# --- what is done with whole lines and titles ----------------------------------------------------------------

HOSTILE = {
    "letters": "x",
    "digits": "1",
    "digits and letters": "1" * 99 + "x",
    "quotes": "'\"`",
    "slashes": "./",
    "bars": " 1%|#| 1/2 [",
    "drawn": "1%|#| 1/2 [00:01]\r",
    "drawn without end": "a|\r",
    "escapes": "\x1b[1m",
    "unfinished escapes": "\x1b[1;",
    "brackets": "[rank0]: ",
    "parts": "_A",
    "JSON": '{"a":{"time":"',
    "deep JSON": '{"fields":',
    "NUL": "\0",
    "another alphabet": "é中",
    "Prometheus": 'x{a="b",',
}


LEADS = ("", "INFO 01-01 00:00:00 [x.py:1] ", "[2026-01-01 00:00:00 TP0] ", '{"time":"1","message":"')


class Code(NamedTuple):
    """Our modules as they are, but for what they tell the meter."""

    meter: Meter
    frameworks: list[Any]
    lines: ModuleType
    shapes: ModuleType
    discovery: ModuleType
    without: dict[int, int]

    def feed(self, framework: Any, text: str) -> None:
        """Also with the literals of all patterns in it, so that each is tried."""
        lead = LEADS[self.frameworks.index(framework) % len(LEADS)]
        literals = " ".join(dict.fromkeys(pattern.literal.decode() for pattern in framework.patterns))
        self.lines.LogScanner(framework).feed(f"{lead}{text}\n{lead}{literals}{text}\n".encode())

    def read_title(self, lead: str, text: str) -> None:
        words = tuple(f"{lead}{text}9999999".split(" "))
        self.discovery.understand(self.frameworks, words, {})
        self.discovery.matched_part(words)

    def is_superlinear(self, read: Callable[[Any, str], None], first: Any, name: str) -> bool:
        """What it costs in any case is left out: what is added must not grow faster than the text."""
        short, long = (HOSTILE[name] * (length // len(HOSTILE[name])) for length in COST_LENGTHS)
        if id(first) not in self.without:
            read(first, "")  # what is kept from call to call is made here
            self.without[id(first)] = self.cost(read, first, "")
        without = self.without[id(first)]
        added = max(self.cost(read, first, short) - without, len(short))
        return self.cost(read, first, long) - without > MOST_RATIO * added

    def cost(self, read: Callable[[Any, str], None], first: Any, text: str) -> int:
        before = self.meter.cost
        read(first, text)
        return self.meter.cost - before


@pytest.fixture(scope="module")
def code() -> Code:
    names = ("sources.logs.lines", "sources.logs.shapes", "sources.discovery", "frameworks")
    meter, (lines, shapes, discovery, frameworks) = metered(SOURCE, *(f"stallwatch.{name}" for name in names))
    return Code(meter, list(frameworks.load_frameworks()), lines, shapes, discovery, {})


@pytest.mark.parametrize("name", HOSTILE)
def test_the_cost_of_a_line_grows_with_its_length_only(code: Code, name: str) -> None:
    slow = [framework.name for framework in code.frameworks if code.is_superlinear(code.feed, framework, name)]

    assert slow == []


QUADRATIC = {
    "an expression": ("_MASK", 're.compile(r"x+!")'),
    "copies": ("text_of", "slow_text_of"),
    "rounds": ("text_of", "deep_text_of"),
}
SLOW = """
import re

def slow_text_of(piece):
    text = ""
    for sign in piece.decode():
        text = text + sign
    return text

def deep_text_of(piece):
    text = piece.decode()
    return "".join(sign for place, sign in enumerate(text) if all(sign for sign in text[place:place + 1] * place))

def slow_base(path):
    while "/" in path or "x" in path:
        path = path[1:]
    return path
"""


@pytest.mark.parametrize("change", QUADRATIC)
def test_a_line_that_costs_more_than_its_length_is_found(
    code: Code, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value = QUADRATIC[change]
    monkeypatch.setattr(code.shapes, name, slow(code, value))
    changed = code._replace(without={})

    assert changed.is_superlinear(changed.feed, changed.frameworks[0], "letters")


def slow(code: Code, value: str) -> Any:
    """Something that is told like all else."""
    known: dict[str, Any] = {"_meter_": code.meter}
    exec(told(SLOW), known)  # noqa: S102  # our own text, above
    return eval(value, known)  # noqa: S307  # the same


def test_of_a_line_only_its_beginning_is_searched() -> None:
    """Endless lines are as good as long ones: of a megabyte not more is matched than of 16 KiB."""
    framework = next(each for each in load_frameworks() if each.name == "sglang")
    seen: list[int] = []

    class Watched(LogScanner):
        pass

    for length in (CLASSIFIED_CHARACTERS, 64 * CLASSIFIED_CHARACTERS):
        text = text_of(b"Load weight begin " + b"x" * length)
        seen.append(len(text))
        scanner = Watched(framework, Limits(line_bytes=4096))
        scanner.feed(b"Load weight begin " + b"x" * length)
        assert len(scanner._tail) <= 4096

    assert seen == [CLASSIFIED_CHARACTERS] * 2


TITLES = (
    "",
    "sglang::scheduler_",
    "VLLM::Worker_",
    "vllm serve --speculative-config ",
    "python -m sglang.launch_server --model ",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_cost_of_a_command_line_grows_with_its_length_only(code: Code, name: str) -> None:
    """Any user of the node may write what he likes there, 128 KiB of it."""
    assert [lead for lead in TITLES if code.is_superlinear(code.read_title, lead, name)] == []


@pytest.mark.parametrize(
    ("name", "value"), [("_TRACKER", 're.compile(r"x+!")'), ("_base", "slow_base")], ids=("expression", "copies")
)
def test_a_command_line_that_costs_more_than_its_length_is_found(
    code: Code, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code.discovery, name, slow(code, value))
    changed = code._replace(without={})

    assert any(changed.is_superlinear(changed.read_title, lead, "letters") for lead in TITLES)
