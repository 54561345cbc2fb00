"""How much a program keeps: the entries of every container that can be reached from some objects."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

_FOLLOWED = ("stallwatch", "soak")
"""Packages whose objects are looked into."""


def entries(roots: Any) -> int:
    return sum(by_place(roots).values())


def by_place(roots: Any) -> Counter[str]:
    """Class and attribute -> entries of the containers there; to see what it is that grows."""
    found, seen = Counter[str](), set[int]()
    left: list[tuple[str, Any]] = [("", roots)]
    while left:
        place, one = left.pop()
        if id(one) in seen or isinstance(one, str | bytes | int | float | type(None)):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            found[place] += len(one)
            left += [(place, each) for pair in one.items() for each in pair]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            found[place] += len(one)
            left += [(place, each) for each in one]
        elif type(one).__module__.partition(".")[0] in _FOLLOWED:
            left += [(f"{type(one).__name__}.{name}", each) for name, each in _attributes(one)]
    return found


def _attributes(one: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(one, name):
                yield name, getattr(one, name)
