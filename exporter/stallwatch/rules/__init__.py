"""The alert rules as text: files with marked places, filled with the shipped values or with others.

The folder `rules/` of the repository holds what comes out with the shipped values.  Texts are put together as text, not
as YAML: the comments say why a number is what it is, and belong to what an operator reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from .settings import SETTINGS, TIMINGS, Kind, number

DEFAULT_FILES = ("servers.yml", "gpus.yml", "stallwatch.yml", "recordings.yml")
"""What a Prometheus loads, in the order of a reader."""

OPTIONAL_FILES = ("optional.yml", "raw.yml")

_MARK = re.compile(r"<<(?P<name>\w+)(?:[: ](?P<word>\w+))?>>")
_RULE = re.compile(r"      - (?P<kind>alert|record): (?P<name>\S+)\n")
_GROUP = re.compile(r"  - name: \S+\n")
_TIMING = re.compile(rf"^ +(?P<line>{'|'.join(TIMINGS)}): (?P<value>\S+)$", re.MULTILINE)


class RulesError(Exception):
    """What was asked for is not there, or no value for its key; the text says what is allowed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule with the comments and blank lines before it."""

    kind: str  # alert or record
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    head: str  # comments, `- name:`, `interval:` and `rules:`
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class RuleFile:
    name: str
    head: str  # comments
    groups: tuple[Group, ...]

    def alerts(self) -> Iterator[Rule]:
        return (rule for group in self.groups for rule in group.rules if rule.kind == "alert")

    def text(self) -> str:
        """The whole file."""
        return self.head + groups_text(self.groups)


def groups_text(groups: Collection[Group]) -> str:
    if not groups:
        return "groups: []\n"
    return "groups:\n" + "".join(group.head + "".join(rule.text for rule in group.rules) for group in groups)


def rule_files(
    names: Collection[str], settings: Mapping[str, str] | None = None, without: Collection[str] = ()
) -> tuple[RuleFile, ...]:
    """These files with `settings` in place of what is shipped, and without the alerts named.

    RulesError for a file, key, value or alert that is not known; one that none of `names` has changes nothing.
    """
    every = {name: _parse(name, _with_fragments(_source(name))) for name in (*DEFAULT_FILES, *OPTIONAL_FILES)}
    _check_known("file", names, every)
    _check_known("alert", without, [rule.name for file in every.values() for rule in file.alerts()])
    settings = settings or {}
    keys = every_key()
    for key in settings.keys() - keys:
        allowed = ", ".join((*SETTINGS, *(f"ALERT.{line}" for line in TIMINGS)))
        raise RulesError(f"{key!r} is no key of the rules; allowed are {allowed}; stallwatch rules --keys lists them")
    for key, value in settings.items():
        if not keys[key].kind.is_right(value):
            raise RulesError(f"{key}: {value!r} is not allowed; allowed is {keys[key].kind.allowed}")
    return tuple(_changed(every[name], settings, without) for name in names)


def one_file(rule_files: Collection[RuleFile]) -> str:
    """All of them as one file that Prometheus loads: it reads no second document."""
    groups: list[Group] = []
    for file in rule_files:
        comment = re.sub(r"^(?=.)", "  ", file.head, flags=re.MULTILINE)
        for place, group in enumerate(file.groups):
            head = (comment if place == 0 else "") + group.head
            groups.append(replace(group, head=f"\n{head}" if groups and place == 0 else head))
    return groups_text(groups)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of `--set`: its shipped value, what is allowed, and what it is."""

    default: str
    kind: Kind
    what: str


@cache
def every_key() -> Mapping[str, Key]:
    """The marked places first, then `ALERT.for`, `ALERT.keep_firing_for` and `ALERT.severity`.

    An alert of two severities has no key for it: they would become one.
    """
    keys = {setting.key: Key(setting.default, setting.kind, setting.what) for setting in SETTINGS.values()}
    alerts = [rule for name in (*DEFAULT_FILES, *OPTIONAL_FILES) for rule in _parse(name, _source(name)).alerts()]
    for rule in alerts:
        for found in _TIMING.finditer(rule.text):
            if found["line"] != "severity" or [other.name for other in alerts].count(rule.name) == 1:
                what = f"{found['line']} of {rule.name}"
                keys.setdefault(f"{rule.name}.{found['line']}", Key(found["value"], TIMINGS[found["line"]], what))
    return keys


def _check_known(what: str, asked: Collection[str], known: Collection[str]) -> None:
    for name in asked:
        if name not in known:
            raise RulesError(f"{name!r} is no {what} of the rules; allowed are {', '.join(dict.fromkeys(known))}")


@cache
def _source(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


@cache
def _fragments() -> Mapping[str, str]:
    parts = re.split(r"^=== (\w+)\n", _source("fragments.txt"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _with_fragments(text: str) -> str:
    """The text with the shared lines in their places, each as far in as its mark."""

    def lines(found: re.Match[str]) -> str:
        mark = _MARK.fullmatch(found["mark"])
        if mark is None or mark["name"] not in _fragments():
            return found[0]
        text = _fragments()[mark["name"]].replace("<<1>>", mark["word"] or "").rstrip("\n")
        return found["before"] + text.replace("\n", "\n" + " " * len(found["before"])) + found["after"]

    return re.sub(rf"^(?P<before>.*?)(?P<mark>{_MARK.pattern})(?P<after>.*)$", lines, text, flags=re.MULTILINE)


def _parse(name: str, text: str) -> RuleFile:
    """Cut at the lines that begin a group or a rule; what stands before such a line and is no part of the last rule
    (comments that are not indented below it, blank lines) goes with the next."""
    head, _, body = text.partition("groups:\n")
    groups: list[tuple[str, list[Rule]]] = []
    waiting = ""
    for line in body.splitlines(keepends=True):
        if _GROUP.fullmatch(line):
            groups.append((waiting + line, []))
            waiting = ""
        elif found := _RULE.fullmatch(line):
            groups[-1][1].append(Rule(found["kind"], found["name"], waiting + line))
            waiting = ""
        elif line.startswith("    rules:"):
            groups[-1] = (groups[-1][0] + waiting + line, [])
            waiting = ""
        elif line.startswith("        "):
            last = groups[-1][1][-1]
            groups[-1][1][-1] = replace(last, text=last.text + waiting + line)
            waiting = ""
        else:
            waiting += line
    return RuleFile(name, head, tuple(Group(head, tuple(rules)) for head, rules in groups))


def _changed(file: RuleFile, settings: Mapping[str, str], without: Collection[str]) -> RuleFile:
    groups = []
    for group in file.groups:
        rules = [rule for rule in group.rules if not (rule.kind == "alert" and rule.name in without)]
        if rules:
            first = replace(rules[0], text=rules[0].text.lstrip("\n"))
            kept = tuple(replace(r, text=_filled(_timed(r, settings), settings)) for r in (first, *rules[1:]))
            groups.append(Group(group.head, kept))
    return RuleFile(file.name, _filled(file.head, settings), tuple(groups))


def _timed(rule: Rule, settings: Mapping[str, str]) -> str:
    def line(found: re.Match[str]) -> str:
        value = settings.get(f"{rule.name}.{found['line']}")
        return found[0] if value is None else found[0].replace(found["value"], value)

    return _TIMING.sub(line, rule.text)


def _filled(text: str, settings: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        setting = SETTINGS[found["name"]]
        chosen = settings.get(setting.key, setting.default).rstrip("/")
        return number(setting, chosen) if found["word"] == "number" else chosen

    return _MARK.sub(value, text)
