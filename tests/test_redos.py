"""No expression takes longer than the length of its text: each is fed what makes a backtracking search go wrong.

For every repetition in an expression a text is made that comes to it, goes on with what it repeats, and then does not
end as the expression wants.  Where a text of one length takes long, one of four times the length must take about four
times as long: with one that is quadratic it takes sixteen times.  No time by itself is judged, a machine may be busy.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]  # how an expression is built is told there only
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import pytest

from stallwatch.config import Limits
from stallwatch.frameworks import Framework, load_frameworks
from stallwatch.sources.discovery import matched_part, understand
from stallwatch.sources.logs.lines import LogScanner
from stallwatch.sources.logs.text import CLASSIFIED_CHARACTERS, text_of

SOURCE = Path(__file__).parents[1] / "exporter" / "stallwatch"

LENGTHS = (4000, 16000)
"""Characters of the two texts; the longest that is ever searched has CLASSIFIED_CHARACTERS or is bounded below that."""
SUSPECT_SECONDS = 0.6e-3
"""Below this the shorter text is not worth a second look: the longest one takes 16 times as long at most."""
FEWER = (1000, 4000)
"""For what is known to be slow, or has its time for other reasons."""
MOST_RATIO = 8.0
TRIES = 5
LONGEST_NAME, AT_ONCE_SECONDS = 255, 0.05
"""Bytes of a part of a path; a hundred times of what the slowest takes of so many."""
MANY = 16
"""A repetition of at least so many is one."""
PUMPS = (
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


def texts_for(pattern: re.Pattern[Any]) -> Iterator[Callable[[int], str]]:
    """Makers of texts of any length."""
    tree = parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
    seen = set()
    for lead, pump in examples(tree):
        for repeated in dict.fromkeys((pump or lead or "0", lead + (pump or ""), *(PUMPS if pump else ()))):
            for end in ENDS:
                if repeated and (lead, repeated, end) not in seen:
                    seen.add((lead, repeated, end))
                    yield partial(_text, lead, repeated, end)


def _text(lead: str, repeated: str, end: str, length: int) -> str:
    return lead + repeated * (length // len(repeated)) + end


# --- how long it takes ---------------------------------------------------------------------------------------


def seconds(run: Callable[[Any], object], text: str | bytes, tries: int = 1) -> float:
    """The shortest of some tries."""
    best = float("inf")
    for _ in range(tries):
        begin = time.thread_time()
        run(text)
        best = min(best, time.thread_time() - begin)
    return best


def slow_texts(expression: Expression) -> list[str]:
    """The beginnings of texts that take longer than their length."""
    pattern = expression.pattern
    run: Callable[[Any], object] = getattr(pattern, expression.use)
    found = []
    for make in texts_for(pattern):
        if is_superlinear(run, make, isinstance(pattern.pattern, bytes)):
            found.append(make(40))
    return found


def is_superlinear(
    run: Callable[[Any], object], make: Callable[[int], str], as_bytes: bool = False, lengths: tuple[int, int] = LENGTHS
) -> bool:
    short, long = (make(length).encode("utf-8", "replace") if as_bytes else make(length) for length in lengths)
    if seconds(run, short) < SUSPECT_SECONDS or seconds(run, short, TRIES) < SUSPECT_SECONDS:
        return False
    return seconds(run, long, TRIES) > MOST_RATIO * seconds(run, short, TRIES)


# --- the expressions -----------------------------------------------------------------------------------------


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


def in_code() -> list[Expression]:
    """All that modules compile when they are imported, and what they search for by an expression in the call."""
    return [*compiled(lambda module: module not in OF_OURS and module not in BOUNDED), *in_calls()]


def compiled(is_wanted: Callable[[str], bool]) -> list[Expression]:
    answer = subprocess.run([sys.executable, "-c", _ALL], capture_output=True, check=True)
    found: dict[tuple[Any, int, str], Expression] = {}
    for module, names, kind, text, flags in json.loads(answer.stdout):
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


_CALLS = {f"re.{name}" for name in ("search", "match", "fullmatch", "sub", "subn", "findall", "finditer", "split")}


@pytest.mark.parametrize("group", range(4))
def test_the_time_of_every_shipped_expression_grows_with_its_text_only(group: int) -> None:
    slow = {each.name: found for each in shipped()[group::4] if (found := slow_texts(each))}

    assert slow == {}


def test_the_time_of_every_expression_in_the_code_grows_with_its_text_only() -> None:
    slow = {f"{each.name} ({each.use})": found for each in in_code() if (found := slow_texts(each))}

    assert slow == {}


def test_what_is_short_is_read_at_once_however_it_is_made() -> None:
    """An exponential one would take for ever of a few dozen characters."""
    slow = []
    for expression in compiled(lambda module: module in BOUNDED):
        run, is_bytes = getattr(expression.pattern, expression.use), isinstance(expression.pattern.pattern, bytes)
        for make in texts_for(expression.pattern):
            text = make(LONGEST_NAME).encode("utf-8", "replace") if is_bytes else make(LONGEST_NAME)
            if seconds(run, text) > AT_ONCE_SECONDS and seconds(run, text, TRIES) > AT_ONCE_SECONDS:
                slow.append(f"{expression.name}: {make(20)!r}")

    assert slow == []


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
    ],
)
def test_an_expression_that_backtracks_is_found(text: str, use: str) -> None:
    run = partial(_bounded, re.compile(text), use)

    assert any(is_superlinear(run, make, lengths=FEWER) for make in texts_for(re.compile(text)))


def _bounded(pattern: re.Pattern[str], use: str, text: str) -> object:
    """Exponential ones are cut to what they do in milliseconds: twice as long for a few characters more."""
    if pattern.pattern.startswith(("(a+)+", "x(?:")):
        text = text[: 14 + len(text) // 1000]
    return getattr(pattern, use)(text)


@pytest.mark.parametrize(
    ("text", "use"), [(r"\d+x", "match"), (r"[^x]*x", "match"), (r"ab+c", "search"), (r"\S{1,20} x", "search")]
)
def test_an_expression_that_does_not_backtrack_is_not(text: str, use: str) -> None:
    assert slow_texts(Expression("", re.compile(text), use)) == []


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


def feed_to(framework: Framework, lead: str, text: str) -> None:
    """Also with the literals of all patterns in it, so that each is tried."""
    literals = " ".join(dict.fromkeys(pattern.literal.decode() for pattern in framework.patterns))
    LogScanner(framework).feed(f"{lead}{text}\n{lead}{literals}{text}\n".encode())


@pytest.mark.parametrize("name", HOSTILE)
def test_the_time_of_a_line_grows_with_its_length_only(name: str) -> None:
    def make(length: int) -> str:
        return HOSTILE[name] * (length // len(HOSTILE[name]))

    for number, framework in enumerate(load_frameworks()):
        lead = LEADS[number % len(LEADS)]

        assert not is_superlinear(partial(feed_to, framework, lead), make, lengths=FEWER), framework.name


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


@pytest.mark.parametrize("name", HOSTILE)
def test_the_time_of_a_command_line_grows_with_its_length_only(name: str) -> None:
    """Any user of the node may write what he likes there, 128 KiB of it."""
    frameworks = load_frameworks()
    for lead in (
        "",
        "sglang::scheduler_",
        "VLLM::Worker_",
        "vllm serve --speculative-config ",
        "python -m sglang.launch_server --model ",
    ):

        def read(text: str, lead: str = lead) -> None:
            words = tuple(f"{lead}{text}9999999".split(" "))
            understand(frameworks, words, {})
            matched_part(words)

        def make(length: int) -> str:
            return HOSTILE[name] * (length // len(HOSTILE[name]))

        assert not is_superlinear(read, make), lead
