"""YAML read strictly: every mistake is named as `file:line: key: what is wrong, what is allowed`.

`Section` wraps one mapping of a file.  Its readers take a key once, check the type and return a plain value;
`finish()` refuses the keys nobody asked for.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import yaml

T = TypeVar("T")

_DURATION_PART = re.compile(r"(\d+)(ms|[smhdwy])")
_DURATION = re.compile(r"(?:\d{1,9}(?:ms|[smhdwy])){1,7}")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
_SIZE = re.compile(r"(\d{1,15})(B|KiB|MiB|GiB)?")
_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NULL = "tag:yaml.org,2002:null"
_UNREADABLE_YAML = (yaml.YAMLError, RecursionError, ValueError, OverflowError)
"""What the parser raises; the last two for escapes of characters that do not exist."""
LARGEST_BYTES = 4 << 20


_SHORT, _LONG_WORDS = 12, 32
_WORD = "(?:[A-Z]+|[A-Z]?[a-z]{2,}(?:[A-Z][a-z]{2,})*|[a-z])"
_WORDS = re.compile(f"{_WORD}(?:[._-]{_WORD})*")
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")


def is_plain(text: str) -> bool:
    """Whether it is short, or longer and made of words: a misspelled name, and no secret in the wrong place."""
    return len(text) <= _SHORT or (len(text) <= _LONG_WORDS and _WORDS.fullmatch(text) is not None)


def shown(text: str) -> str:
    """A wrong word in a sentence.  What may be a secret is not repeated: line and key say where it stands."""
    return repr(text) if is_plain(text) else f"a text of {len(text)} characters"


def _without_quotes(problem: str) -> str:
    """The sentence of a parser, whatever it quotes."""
    return _QUOTED.sub(lambda match: shown(match[1] or match[2] or ""), problem)


class InputError(Exception):
    """A file the user gave is wrong.  `str()` is the whole sentence, with file, line and key."""

    def __init__(self, file: str, line: int, key: str, problem: str) -> None:
        where = f"{file}:{line}: " if line else f"{file}: "
        super().__init__(where + (f"{key}: " if key else "") + problem)


def parse_duration(text: str) -> float:
    """Seconds of a Prometheus duration: `90s`, `5m`, `1h30m`, `100ms`, `0`.  ValueError when it is none."""
    if text == "0":
        return 0.0
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{shown(text)} is no duration; write it as 90s, 5m or 1h30m")
    return float(sum(int(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text)))


def parse_size(text: str) -> int:
    """Bytes of `1MiB`, `64KiB`, `4096`.  ValueError when it is no size."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError(f"{shown(text)} is no size; write it as 64KiB, 1MiB or a number of bytes")
    return int(match[1]) * _BYTES[match[2] or ""]


class Section:
    """One mapping in a file; `path` is the dotted key that leads to it."""

    def __init__(self, file: str, node: yaml.Node, path: str = "") -> None:
        self.file, self.path, self.line = file, path, node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise InputError(file, self.line, path, "a mapping (key: value) is needed here")
        self._nodes: dict[str, tuple[int, yaml.Node]] = {}
        self._asked: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in self._nodes:
                raise InputError(file, key.start_mark.line + 1, self._dotted(name), "the key is given twice")
            self._nodes[name] = (key.start_mark.line + 1, value)

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def names(self) -> list[str]:
        """The keys, as written."""
        return list(self._nodes)

    def line_of(self, key: str) -> int:
        return self._nodes[key][0] if key in self._nodes else self.line

    def _dotted(self, key: str) -> str:
        name = key if is_plain(key) else f"({shown(key)})"
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, key: str, problem: str) -> InputError:
        """The error to raise when the value of `key` is not acceptable."""
        return InputError(self.file, self.line_of(key), self._dotted(key), problem)

    def _scalar(self, key: str, allowed: str) -> yaml.ScalarNode | None:
        self._asked.add(key)
        if key not in self._nodes:
            return None
        node = self._nodes[key][1]
        if not isinstance(node, yaml.ScalarNode):
            raise self.wrong(key, f"{allowed} is needed here")
        return node

    def text(self, key: str, default: str | None = None) -> str:
        """A string (numbers count as their text).  Without a default the key is required."""
        node = self._scalar(key, "a string")
        if node is None:
            if default is None:
                raise InputError(self.file, self.line, self._dotted(key), "the key is required")
            return default
        if node.tag == _NULL:
            raise self.wrong(key, "a string is needed here")
        return str(node.value)

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in allowed:
            raise self.wrong(key, f"{shown(value)} is unknown; allowed are {', '.join(allowed)}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        node = self._scalar(key, "true or false")
        if node is None:
            return default
        if node.tag != "tag:yaml.org,2002:bool" or node.value.lower() not in ("true", "false"):
            raise self.wrong(key, f"{shown(node.value)} is no boolean; allowed are true and false")
        return bool(node.value.lower() == "true")

    def integer(self, key: str, default: int, minimum: int = 0, maximum: int | None = None) -> int:
        node = self._scalar(key, "a whole number")
        if node is None:
            return default
        if not re.fullmatch(r"-?\d{1,18}", node.value) or node.style is not None:
            raise self.wrong(key, f"{shown(node.value)} is no whole number")
        value = int(node.value)
        if value < minimum or (maximum is not None and value > maximum):
            upper = "" if maximum is None else f" and at most {maximum}"
            raise self.wrong(key, f"{value} is out of range; allowed is at least {minimum}{upper}")
        return value

    def _parsed(self, key: str, default: T, parse: Callable[[str], T]) -> T:
        if key not in self._nodes:
            self._asked.add(key)
            return default
        try:
            return parse(self.text(key))
        except ValueError as error:
            raise self.wrong(key, str(error)) from None

    def duration(self, key: str, default: float) -> float:
        """Seconds."""
        return self._parsed(key, default, parse_duration)

    def size(self, key: str, default: int) -> int:
        """Bytes."""
        return self._parsed(key, default, parse_size)

    def expression(self, key: str, default: str | None = None) -> re.Pattern[str] | None:
        """A regular expression; None when the key is absent and has no default."""
        text = self.text(key, default) if key in self._nodes or default is not None else None
        self._asked.add(key)
        if text is None:
            return None
        try:
            return re.compile(text)
        except re.error as error:
            raise self.wrong(key, f"not a regular expression: {_without_quotes(str(error))}") from None

    def expressions(self, key: str) -> tuple[re.Pattern[str], ...]:
        """A list of regular expressions; empty when the key is absent."""
        patterns = []
        for text, item in zip(self.texts(key), self._items(key, "expressions"), strict=True):
            try:
                patterns.append(re.compile(text))
            except re.error as error:
                line = item.start_mark.line + 1
                problem = f"not a regular expression: {_without_quotes(str(error))}"
                raise InputError(self.file, line, self._dotted(key), problem) from None
        return tuple(patterns)

    def _items(self, key: str, allowed: str) -> list[yaml.Node]:
        self._asked.add(key)
        if key not in self._nodes:
            return []
        node = self._nodes[key][1]
        if not isinstance(node, yaml.SequenceNode):
            raise self.wrong(key, f"a list of {allowed} is needed here")
        return list(node.value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty when the key is absent."""
        for item in self._items(key, "strings"):
            if not isinstance(item, yaml.ScalarNode) or item.tag == _NULL:
                raise InputError(self.file, item.start_mark.line + 1, self._dotted(key), "a string is needed here")
        return tuple(str(item.value) for item in self._items(key, "strings"))

    def mapping(self, key: str) -> dict[str, str]:
        """A mapping of strings to strings; empty when the key is absent."""
        section = self.section(key)
        return {name: section.text(name) for name in section.names()} if section else {}

    def section(self, key: str) -> Section | None:
        """The mapping below `key`; None when the key is absent."""
        self._asked.add(key)
        if key not in self._nodes:
            return None
        return Section(self.file, self._nodes[key][1], self._dotted(key))

    def sections(self, key: str) -> Iterator[Section]:
        """The mappings in the list below `key`."""
        for number, item in enumerate(self._items(key, "mappings")):
            yield Section(self.file, item, f"{self._dotted(key)}[{number}]")

    def finish(self, also: tuple[str, ...] = ()) -> None:
        """Refuse keys that no reader asked for; `also` names further ones that are allowed."""
        self._asked.update(also)
        for key in self._nodes:
            if key not in self._asked:
                known = ", ".join(sorted(self._asked))
                raise self.wrong(key, f"unknown key; allowed are {known}")


def read_file(path: str | Path) -> bytes:
    """All of a regular file; OSError when it is another kind of file, or larger than any configuration.

    A FIFO without a writer would hold up every later reload, and a device like /dev/zero has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise OSError(0, "Is a directory" if stat.S_ISDIR(kind) else "no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(LARGEST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > LARGEST_BYTES:
        raise OSError(0, f"larger than {LARGEST_BYTES >> 20} MiB")
    return content


def load(path: str | Path, text: str | None = None) -> Section | None:
    """The top mapping of a YAML file; None when the file is empty.  InputError when it cannot be read."""
    file = str(path)
    if text is None:
        try:
            text = read_file(path).decode("utf-8").replace("\r\n", "\n")
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise InputError(file, 0, "", f"cannot be read: {problem}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except _UNREADABLE_YAML as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
        raise InputError(file, mark.line + 1 if mark else 0, "", f"not YAML: {_without_quotes(problem)}") from None
    return None if node is None else Section(file, node)
