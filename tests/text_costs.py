"""What it costs to read a text, in characters looked at and lines of ours that run, whatever machine it is.

Our modules are imported once more, with each call, slice, concatenation, look into a text and round of a loop told to a
`Meter`.  What is built in costs the texts it is given and what it makes; an expression the steps it takes of its text.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from regex_steps import Steps

NAME = "_meter_"
"""What a module knows its meter as."""
TEXTS = (str, bytes, bytearray, memoryview)
SIZED = (*TEXTS, list, tuple, dict, set, frozenset)
FOUND = {"find": 1, "index": 1, "rfind": -1, "rindex": -1}
"""What stops where it finds something, and in which direction it goes."""
BY_THE_OTHER = ("startswith", "endswith", "removeprefix", "removesuffix")
"""What looks at no more than what it is given."""
OF_A_FRAME = ("super", "locals", "globals", "vars", "dir")
CHEAP = (len, isinstance, id, ord, chr, iter, memoryview)
"""What takes as long however long its text is."""


def size(value: object) -> int:
    return len(value) if isinstance(value, SIZED) else 0


@cache
def steps_of(pattern: re.Pattern[Any]) -> Steps:
    return Steps(pattern)


class Meter:
    """Adds up what a package does; `cost` only grows."""

    def __init__(self, package: str) -> None:
        self.cost = 0
        self._package = package

    def call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        self.cost += 1
        module, name = str(getattr(function, "__module__", "")), str(getattr(function, "__name__", ""))
        if module.split(".")[0] == self._package or function in CHEAP:
            return function(*arguments, **named)
        if module == "re" and hasattr(re.Pattern, name):
            expression, *arguments_left = arguments
            searched = getattr(re.compile(expression, named.pop("flags", 0)), name)
            return self.call(searched, *arguments_left, **named)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, re.Pattern):
            self._search(owner, name, arguments)
            return function(*arguments, **named)
        made = function(*arguments, **named)
        self.cost += _built_in(owner, name, arguments, made)
        return made

    def _search(self, pattern: re.Pattern[Any], name: str, arguments: Any) -> None:
        """All steps that are taken, also of what only asks for the first place."""
        steps, use = steps_of(pattern), name if name in ("match", "fullmatch") else "search"
        text, *more = arguments[name in ("sub", "subn") :]
        at = more[0] if more and name not in ("sub", "subn", "split") else 0
        while at <= len(text):
            found = steps.run(use, text, at)
            self.cost += steps.steps
            if found is None or name in ("match", "fullmatch", "search"):
                break
            at = found[1] + (found[0] == found[1])

    def made(self, value: Any) -> Any:
        """What a slice or a concatenation has copied."""
        self.cost += 1 + (size(value) if not isinstance(value, memoryview) else 0)
        return value

    def within(self, one: Any, other: Any) -> bool:
        self.cost += 1 + (size(other) if isinstance(other, (*TEXTS, list, tuple)) else size(one))
        return one in other

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.cost += 1
            yield item

    def once(self, value: Any) -> Any:
        """The condition of a loop."""
        self.cost += 1
        return value


def _built_in(owner: Any, name: str, arguments: Any, made: Any) -> int:
    """What is built in, or not ours, looks at all it is given, and makes what it answers."""
    if name in FOUND and isinstance(owner, TEXTS):
        return _way(owner, made, FOUND[name], *arguments)
    if name in BY_THE_OTHER:
        return sum(map(size, arguments))
    if isinstance(owner, SIZED) and not isinstance(owner, TEXTS):
        return 0
    return sum(map(size, (owner, *arguments, made)))


def _way(owner: Any, found: int, direction: int, sought: Any, begin: int | None = None, end: int | None = None) -> int:
    """Characters looked at until something was found."""
    begin, end, _ = slice(begin, end).indices(len(owner))
    if found < 0:
        return max(0, end - begin)
    return found - begin + 1 if direction > 0 else end - found


class _Told(ast.NodeTransformer):
    """Tells the meter of what a module does."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in OF_A_FRAME:
            return node
        return _call("call", node.func, *node.args, keywords=node.keywords)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        is_slice = isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load)
        return _call("made", node) if is_slice else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return _call("made", node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        return _call("made", node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        node.value = self.visit(node.value)
        return node  # how it is formatted is a text without a name of its own

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], ast.In | ast.NotIn):
            return node
        found = _call("within", node.left, node.comparators[0])
        return found if isinstance(node.ops[0], ast.In) else ast.UnaryOp(ast.Not(), found)

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = _call("each", node.iter)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.iter = _call("each", node.iter)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.test = _call("once", node.test)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value else None
        return node


def _call(name: str, *arguments: ast.expr, keywords: Iterable[ast.keyword] = ()) -> ast.Call:
    function = ast.Attribute(ast.Name(NAME, ast.Load()), name, ast.Load())
    return ast.Call(function, list(arguments), list(keywords))


def told(source: str, name: str = "<told>") -> Any:
    """Source that tells the meter its module knows."""
    tree = ast.fix_missing_locations(_Told().visit(ast.parse(source)))
    return compile(tree, name, "exec", dont_inherit=True)


class _Loader(SourceFileLoader):
    def __init__(self, meter: Meter, name: str, path: str) -> None:
        super().__init__(name, path)
        self._meter = meter

    def get_code(self, fullname: str) -> Any:
        return told(Path(self.path).read_text(), self.path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[NAME] = self._meter
        super().exec_module(module)


class _Finder:
    def __init__(self, meter: Meter, package: str, folder: Path) -> None:
        self._meter, self._package, self._folder = meter, package, folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        first, *parts = name.split(".")
        if first != self._package:
            return None
        place = self._folder.joinpath(*parts)
        is_package = place.is_dir()
        file = place / "__init__.py" if is_package else place.with_suffix(".py")
        places = [str(place)] if is_package else None
        loader = _Loader(self._meter, name, str(file))
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=places)


@contextmanager
def _instead(package: str, folder: Path, meter: Meter) -> Iterator[None]:
    """A package is imported anew, and is as before afterwards."""

    def take_out() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.split(".")[0] == package]
        return {name: sys.modules.pop(name) for name in names}

    finder, before = _Finder(meter, package, folder), take_out()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        take_out()
        sys.modules.update(before)


def metered(folder: Path, *names: str) -> tuple[Meter, list[ModuleType]]:
    """Modules of the package in a folder, in a copy of their own that tells a meter what it does."""
    meter = Meter(folder.name)
    with _instead(folder.name, folder, meter):
        return meter, [import_module(name) for name in names]
