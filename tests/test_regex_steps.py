"""The matcher that counts steps finds what `re` finds, and its steps are those of an engine that goes back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regex_steps import Steps, TooManyStepsError

USES = ("match", "fullmatch", "search")
TEXTS = (
    "",
    "a",
    "b",
    "ab",
    "aab",
    "aaab!",
    "abab",
    "ba\nab\n",
    "a b",
    "A aB",
    "x=1;y=22",
    "İıſK",
    "éa\n",
    "aXbXc",
    "(a)",
    "aa",
    "aaa",
    "abcabc",
)
EXPRESSIONS = (
    r"",
    r"a*",
    r"a+?b",
    r"a*?$",
    r"(a|ab)(c|bcd)*",
    r"(?:a|b)*?b",
    r"(?:a?b?)*",
    r"(?:a?b?)*?$",
    r"(?:a*)+b",
    r"(?:ab|a){2,3}",
    r"(?:|a)+",
    r"(?:a|)+?b",
    r"a{2}",
    r"a{0,2}?a",
    r"^a|b$",
    r"(?m)^a.$",
    r"\Aa\Z",
    r"\ba\b",
    r"\Ba",
    r"(?s)a.",
    r"a.",
    r"(?i)AB|x",
    r"(?i)[a-k]+",
    r"(?i)i",
    r"(?i)[^s]",
    r"(?ia)k",
    r"(?i:A)b",
    r"(?-i:a)B",
    r"(?i:(a)b)\1",
    r"(a+)\1",
    r"(?i)(a)\1",
    r"(?P<one>a)(?P=one)?b",
    r"(a)?(?(1)b|a)",
    r"(a)?(?(1)b)",
    r"(?=a)\w",
    r"(?!a)\w",
    r"(?=(a+))\1b",
    r"(?<=a)b",
    r"(?<!a)b",
    r"(?<=a.)b|a",
    r"(?>a+)b",
    r"(?>a|ab)b",
    r"(?>a*)a",
    r"a++b",
    r"a*+a",
    r"a?+a",
    r"a{1,2}+a",
    r"(?:ab)++a",
    r"(?:ab)*+$",
    r"(?:a*+b)*+a",
    r"[^\W\d]+=",
    r"(\w+)=(\d+)(?:;|$)",
    r"(?:(\w)(?=.*X)|X)*",
)


def same(pattern: re.Pattern[Any], text: str | bytes, budget: int = 10**6) -> int:
    """How many steps it takes in all; each use finds the same span."""
    steps, total = Steps(pattern), 0
    for use in USES:
        found = getattr(pattern, use)(text)
        assert steps.run(use, text, budget=budget) == (found and found.span()), (use, text)
        total += steps.steps
    return total


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_it_finds_what_re_finds(expression: str) -> None:
    for text in TEXTS:
        same(re.compile(expression), text)


@pytest.mark.parametrize("expression", [text for text in EXPRESSIONS if text.isascii()])
def test_it_finds_what_re_finds_in_bytes(expression: str) -> None:
    for text in TEXTS:
        same(re.compile(expression.encode()), text.encode())


@pytest.mark.parametrize("expression", [r"a", r"\Ba", r"^a", r"(?<=a)b|$", r"(?<!b)a"])
def test_a_search_goes_on_where_it_is_told_to(expression: str) -> None:
    pattern, text = re.compile(expression), "ab aa"
    for at in range(len(text) + 1):
        found = pattern.search(text, at)

        assert Steps(pattern).run("search", text, at) == (found and found.span())


SIGNS = st.sampled_from(("a", "b", ".", "[ab]", "[^a]", r"\d", r"\s", "(?i:A)", "é", r"\b", "^", "$", "a*+", "[ab]?+"))
AFTER = st.sampled_from(("*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{0,2}?", "{2,}"))
AROUND = st.sampled_from(("(?={})", "(?!{})", "(?>{})", "({})", "(?i:{})", "(?s:{})"))


def _larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("{}{}".format, parts, parts),
        st.builds("(?:{}|{})".format, parts, parts),
        st.builds("(?:{}){}".format, parts, AFTER),
        st.builds(str.format, AROUND, parts),
    )


@settings(max_examples=400)
@given(
    expression=st.recursive(SIGNS, _larger, max_leaves=8),
    text=st.text("abA1 \né", max_size=8),
    flags=st.sampled_from((0, re.IGNORECASE, re.MULTILINE, re.DOTALL)),
)
def test_it_finds_what_re_finds_whatever_the_expression(expression: str, text: str, flags: int) -> None:
    try:
        same(re.compile(expression, flags), text)
    except TooManyStepsError:
        assume(False)


# --- the steps -----------------------------------------------------------------------------------------------


def steps_of(expression: str, use: str, text: str) -> int:
    steps = Steps(re.compile(expression))
    steps.run(use, text)
    return steps.steps


@pytest.mark.parametrize(
    ("expression", "use", "power"),
    [
        (r"a*b", "match", 1),
        (r"a*+b", "match", 1),
        (r"a*?b", "match", 1),
        (r"(?:aa?)*+b", "match", 1),
        (r"b", "search", 1),
        (r"bc", "search", 1),
        (r"a{0,4}b", "search", 1),
        (r"a*b", "search", 2),
        (r"a++b", "search", 2),
        (r"a*a*b", "match", 2),
        (r"a*?a*?b", "match", 2),
        (r"(?:(?=a*b)|a)*b", "match", 2),
        (r"a*a*b", "search", 3),
        (r"a*a*a*b", "match", 3),
    ],
)
def test_steps_grow_with_a_power_of_the_length(expression: str, use: str, power: int) -> None:
    grown = steps_of(expression, use, "a" * 200) / steps_of(expression, use, "a" * 100)

    assert 2 ** (power - 0.2) < grown < 2 ** (power + 0.2)


@pytest.mark.parametrize("expression", [r"(?:a+)+b", r"(?:a|a)*b", r"(?:a?a?)*b"])
def test_steps_double_with_each_character(expression: str) -> None:
    assert steps_of(expression, "match", "a" * 11) > 1.6 * steps_of(expression, "match", "a" * 10)


def test_it_stops_where_the_budget_ends() -> None:
    steps = Steps(re.compile(r"(?:a|a)*b"))

    with pytest.raises(TooManyStepsError):
        steps.run("match", "a" * 1000, budget=5000)

    assert 5000 < steps.steps < 6000
    assert steps.run("match", "ab", budget=5000) == (0, 2)


def test_what_it_asks_of_a_character_tells_all_that_differ() -> None:
    steps = Steps(re.compile(r"(?i)a[bc]*(?:d|\b)$"))

    def seems(sign: str) -> tuple[bool, ...]:
        return tuple(test[sign] for test in steps.tests)

    assert seems("b") == seems("C")
    assert len({seems(sign) for sign in "ABD- \n"}) == 5
