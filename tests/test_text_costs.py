"""The meter finds what grows faster than its text, whatever it is made of, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from text_costs import Meter, metered, told

LINEAR = {
    "a loop": "sum(1 for sign in text)",
    "a search": 're.search(r"b+", text)',
    "a search by method": 're.compile(r"b+").search(text)',
    "all that is found": 're.findall(r"a", text)',
    "replaced": 're.compile(r"a").sub("b", text)',
    "found one by one": "one_by_one(text)",
    "split": '[part.strip() for part in text.split("a")]',
    "a look at the beginning": '[text.startswith("ab") for sign in text]',
    "its length": "[len(text) for sign in text]",
    "of a set": "[sign in signs for signs in [set(text)] for sign in text]",
    "a short slice": "[text[at:at + 5] for at in range(len(text))]",
}
QUADRATIC = {
    "loops": "[0 for one in text for other in text]",
    "copies": "[text[at:] for at in range(len(text))]",
    "put together": "put_together(text)",
    "formatted": '[f"{text}!" for sign in text]',
    "looked into": '["b" in text for sign in text]',
    "not looked into": '["b" not in text for sign in text]',
    "found nowhere": '[text.find("b") for sign in text]',
    "found from the end": '[text.rfind("b") for sign in text]',
    "replaced": '[text.replace("b", "c") for sign in text]',
    "counted": '[text.count("b") for sign in text]',
    "sorted": "[sorted(text) for sign in text]",
    "encoded": "[text.encode() for sign in text]",
    "a search each": '[re.search("b", text) for sign in text]',
    "goes back": 're.search("a+b", text)',
    "goes back in each": 're.compile("a+b").sub("", text)',
    "taken off": "taken_off(text)",
}
PARTS = """
import re

def one_by_one(text):
    at = text.find("a")
    while at >= 0:
        at = text.find("a", at + 1)

def put_together(text):
    made = ""
    for sign in text:
        made = made + sign

def taken_off(text):
    while text:
        text = text[1:]
"""


def growth(work: str) -> float:
    """How many times more four times the text costs."""
    meter = Meter("none")
    known: dict[str, Any] = {"_meter_": meter}
    exec(told(f"{PARTS}\ndef work(text):\n    return {work}\n"), known)  # noqa: S102  # our own text, above

    def cost(length: int) -> int:
        before = meter.cost
        known["work"]("a" * length)
        return meter.cost - before

    return cost(400) / cost(100)


@pytest.mark.parametrize("work", LINEAR)
def test_what_grows_with_its_text_only_costs_four_times_as_much(work: str) -> None:
    assert growth(LINEAR[work]) < 4.1


@pytest.mark.parametrize("work", QUADRATIC)
def test_what_grows_with_the_square_costs_sixteen_times_as_much(work: str) -> None:
    assert 12 < growth(QUADRATIC[work]) < 16.1


def test_modules_are_imported_anew_and_are_as_before_afterwards(tmp_path: Path) -> None:
    package = tmp_path / "told_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("def read(text):\n    return [sign for sign in text] + [super]\n")
    before = set(sys.modules)

    meter, (inner,) = metered(package, "told_package.inner")
    built = meter.cost
    inner.read("a" * 50)

    assert meter.cost > built + 50
    assert set(sys.modules) == before
    assert not any(type(finder).__module__ == "text_costs" for finder in sys.meta_path)


def test_what_is_told_does_what_it_did() -> None:
    known: dict[str, Any] = {"_meter_": Meter("none")}
    source = """
class Base:
    def __init__(self, text):
        self.text = text

class Inner(Base):
    def __init__(self, text):
        super().__init__(f"{text:>4}{text!r}")

text: str = Inner("a").text + "b" * 2
text += text[:2]
is_in, is_not = "b" in text, "b" not in text
one = [number for number in range(3) if 0 < number in (1, 2)]
while len(one) < 4:
    one.append(len("x", *()))
"""
    exec(told(source), known)  # noqa: S102  # our own text, above

    assert known["text"] == "   a'a'bb  "
    assert (known["is_in"], known["is_not"], known["one"]) == (True, False, [1, 2, 1, 1])
