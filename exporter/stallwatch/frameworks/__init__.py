"""What is known of each inference server, as data: YAML files become frozen records.

One file per framework: how to recognise its processes, what its arguments mean, where to ask it, and what its
log lines say.  `common.yaml` is no framework: its patterns (torch, NCCL, CUDA, tracebacks) hold for all.
A file that `extends` another adds its own to what that one says: the same engine inside another program.
A wrong file is an InputError with file, line and key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from ..model import CLOCKS, ERROR_KINDS, EVENTS
from ..strict_yaml import InputError, Section, load
from .json_lines import BEGIN, read_record

NO_EVENT = "none"
"""In a pattern: the line is known and means nothing (a banner, a benign line that holds the word error)."""

COMMON = "common.yaml"

ROLES = ("main", "engine", "rank", "worker", "detokenizer", "controller")
ARGUMENTS = (
    "model",
    "port",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "nnodes",
    "node_rank",
    "rendezvous",
    "rendezvous_port",
    "data_parallel_local",
    "data_parallel_rank",
    "data_parallel_start",
    "data_parallel_address",
    "data_parallel_port",
    "attention_only",
    "speculative",
    "served_model",
    "headless",
    "metrics_enabled",
    "eager",
)
ENDPOINTS = ("health", "models", "metrics")
METRICS = (
    *("requests_running", "requests_waiting", "generated_tokens", "prompt_tokens", "finished_requests"),
    "awake_engines",
)
NUMBER_FIELDS = ("done", "total", "ratio", "percent", "running", "waiting", "generation_tokens_per_second")
"""Named groups that become fields of the event; `percent` becomes `ratio`."""
DOTS = "dots"
"""Named group of a bar drawn as dots, one for each hundredth: their number becomes `ratio`."""
NAMING_FIELDS = ("rank", "dp", "pp", "tp", "version", "tp_size", "pp_size", "dp_size")
"""Named groups about the server itself: which rank wrote the line, sizes of its groups, its version."""
FIELDS = (*NUMBER_FIELDS, DOTS, *NAMING_FIELDS)
PREFIX_GROUPS = ("time", "mark", "parts", "rank", "pid", "level", "uvicorn", "engine", "relay", "nameless")
"""Named groups of a prefix; the same with `_2` … where it has several forms.

`mark`: the framework's own sign where it prints no time.  `relay`: another program hands the line on and folds
equal lines of several ranks into one.  `nameless`: a process that is a rank, one of several, and does not say which.
"""
PREFIX_NEEDS = ("own", "uvicorn", "any")
SPEAKERS = ("every", "first", "first_classic")
_CALM = ("DEBUG", "INFO")
"""No server tells of its trouble at these levels: words of trouble in such a line are an echo."""
_LEVELS = {
    "V": "DEBUG",
    "D": "DEBUG",
    "I": "INFO",
    "W": "WARNING",
    "E": "ERROR",
    "F": "CRITICAL",
    "TRACE": "DEBUG",
    "WARN": "WARNING",
    "FATAL": "CRITICAL",
}
"""Other spellings of a level."""
RANKED = re.compile(r"\[rank(?P<rank>\d{1,6})\]: ")
"""torch puts it in front of every line of an uncaught exception, in the place of a logger's prefix."""
_NUMBERED = re.compile(r"(\w+?)_\d")
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|[0-9]{1,3}(?:,[0-9]{3}){1,5})([kKMGTP]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_PARTS = re.compile(r"(?<![A-Z])(?<![A-Z]_)([A-Z]+(?:_[A-Z]+)*)(\d{1,5})(?!\d)")

Role = Literal["main", "engine", "rank", "worker", "detokenizer", "controller"]
_Need = Literal["own", "uvicorn", "any"]


@dataclass(frozen=True, slots=True)
class Title:
    """A process title (command line joined by spaces) and what that process is.

    Groups: `parts` holds the rank's dimensions ("_DP0_TP3", may be empty), `engine` an engine's number.
    `rank_from`: variables of the environment that hold the rank's number, where the title does not name it.
    `shared`: other programs have the same title; it counts only below a server that is known otherwise.
    """

    pattern: re.Pattern[str]
    role: Role
    rank_from: tuple[str, ...] = ()
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Argument:
    """How a server takes one argument.

    `flags` as written on the command line; `positional`: else the first word after the entry point that is no
    flag; `is_flag`: present or not, without a value; `inverted`: present means no; `default`: what the server
    takes when it is not given, where that matters.
    """

    flags: tuple[str, ...]
    positional: bool = False
    is_flag: bool = False
    inverted: bool = False
    default: str = ""


@dataclass(frozen=True, slots=True)
class Timeout:
    """How one of the server's own time-outs is set, and what it is without a line that opens it.

    `flags`, `variables`: arguments, and variables of the environment, that hold its seconds.  `seconds`: by default,
    of one that no line opens.  `serving`: it runs while work is owed and no token comes.  `several`: arguments of
    which one must hold a number above 1, else there is no such time-out.
    """

    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    seconds: float = 0.0
    serving: bool = False
    several: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pattern:
    """One kind of log line.

    `literal` occurs in every line the pattern matches.  `regex` is matched at the start of the message, prefix
    and ANSI removed.  `prefix`: `own` = only behind the framework's own prefix, `uvicorn` = only behind
    uvicorn's, `any` = also without one (bars, tracebacks).  `level`: only lines of these levels.
    `speaker`: `first` = only the first local rank writes it, so its absence on another rank says nothing;
    `first_classic` = the same until a line with `every_rank` was seen.  `bulk`: frequent after ready, then
    counted, and only the last one read.  `proves_ready`: an access line that a server gives only once it is ready.
    `again`: the event instead, when the same rank writes the line a second time in one start.
    `last`: tried behind all others, those common to all included.
    `versions`: the examined releases that print it.  They are for people and for the tests: every pattern is tried
    on every log, which need not print its version.  `silent_seconds`: how long a healthy start was seen to be
    silent behind this line.  `timeout_seconds`: after how long the server itself gives up, by its default, counted
    from this line; `clock` names that time-out.  0 = not known.
    """

    event: str
    literal: bytes
    regex: re.Pattern[str]
    prefix: _Need = "own"
    kind: str = ""
    level: tuple[str, ...] = ()
    speaker: str = "every"
    bulk: bool = False
    proves_ready: bool = False
    every_rank: bool = False
    again: str = ""
    last: bool = False
    versions: tuple[str, ...] = ()
    silent_seconds: float = 0.0
    timeout_seconds: float = 0.0
    clock: str = ""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the beginning of a line says, by PREFIX_GROUPS; None = the framework prints no such part, or not here.

    `own`: it is the framework's logger that writes, for the line has a time or its mark.  `uvicorn`: the web
    server's.
    """

    time: str | None = None
    parts: str | None = None
    rank: str | None = None
    pid: str | None = None
    level: str | None = None
    engine: str | None = None
    relay: str | None = None
    nameless: str | None = None
    own: bool = False
    uvicorn: bool = False


NO_PREFIX = Prefix()


@dataclass(frozen=True, slots=True)
class Access:
    """How a server of this kind is asked over HTTP, and which of its own metrics mean what."""

    default_port: int = 0
    endpoints: Mapping[str, str] = field(default_factory=dict)
    default_endpoint: str = "health"
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metrics_default: bool = True


@dataclass(frozen=True, eq=False)
class Framework:
    """One kind of inference server.  `name` is the file's stem and the `framework` label.

    `entry_points`: argv heads without interpreter and directories ("vllm serve", "-m sglang.launch_server").
    `comms`: beginnings of the comm (at most 15 bytes) of its processes besides python.
    `embedded_ready`: events after which an engine inside another program, or a follower, is ready.
    `releases`: what was examined, oldest first.  `extends`: the framework whose file this one adds to.
    `single_process`: its first process runs the model itself, on all cards: that one is the rank TP0.
    `timeouts`: clock -> how that time-out of its own is set.
    """

    name: str
    title: str
    prefix: re.Pattern[str]
    patterns: tuple[Pattern, ...]
    entry_points: tuple[str, ...] = ()
    comms: tuple[str, ...] = ()
    titles: tuple[Title, ...] = ()
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    access: Access = Access()
    embedded_ready: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    extends: str = ""
    single_process: bool = False
    timeouts: Mapping[str, Timeout] = field(default_factory=dict)
    own: frozenset[Pattern] = frozenset()

    @property
    def default_port(self) -> int:
        return self.access.default_port

    @property
    def endpoints(self) -> Mapping[str, str]:
        """Path of `health`, `models`, `metrics`."""
        return self.access.endpoints

    @property
    def default_endpoint(self) -> str:
        """The cheapest endpoint that never makes the server generate."""
        return self.access.default_endpoint

    @property
    def metrics(self) -> Mapping[str, tuple[str, ...]]:
        """Our name of a figure -> metric names of the server's own /metrics, newest first.

        `name{label="value"}` counts only the samples with that label.
        """
        return self.access.metrics

    @property
    def metrics_default(self) -> bool:
        return self.access.metrics_default

    @cached_property
    def _groups(self) -> Mapping[str, tuple[str, ...]]:
        """What a prefix says -> the groups that say it, one for each form of the prefix."""
        found: dict[str, tuple[str, ...]] = {}
        for group in self.prefix.groupindex:
            name = _group_of(group)
            found[name] = (*found.get(name, ()), group)
        return found

    @cached_property
    def prefix_groups(self) -> tuple[tuple[str, int], ...]:
        """What each group of the prefix says, and its place among all groups of a match."""
        return tuple((_group_of(group), number - 1) for group, number in self.prefix.groupindex.items())

    def prefix_group(self, prefix: re.Match[str] | None, name: str) -> str | None:
        """A group of a matched prefix; None when the framework prints no such part, or not here."""
        if prefix is None:
            return None
        for group in self._groups.get(name, ()):
            if (text := prefix[group]) is not None:
                return _LEVELS.get(text, text) if name == "level" else text
        return None

    def split(self, text: str) -> tuple[Prefix, str]:
        """What the beginning of a line says, and the message behind it."""
        match = self.prefix.match(text)
        prefix, message = (_prefix_of(self, match.groups()), text[match.end() :]) if match else (NO_PREFIX, text)
        if prefix.own or prefix.uvicorn:
            return prefix, message
        if message.startswith(BEGIN):
            return self._split_record(prefix, message)
        if not message.startswith("[rank"):
            return prefix, message
        if (ranked := RANKED.match(message)) is None:
            return prefix, message
        return replace(prefix, rank=prefix.rank or ranked["rank"]), message[ranked.end() :]

    def _split_record(self, before: Prefix, text: str) -> tuple[Prefix, str]:
        """As `split`, of a record in JSON: its message may have a prefix of its own, and it has the record's time."""
        record = read_record(text)
        if record is None or record.message is None:
            return (before if record is None else replace(before, time=record.time or None)), text
        level = _LEVELS.get(record.level, record.level)
        match = self.prefix.match(record.message)
        inside, message = (
            (_prefix_of(self, match.groups()), record.message[match.end() :]) if match else (NO_PREFIX, record.message)
        )
        uvicorn = inside.uvicorn or record.logger.startswith("uvicorn")
        return Prefix(
            time=record.time or inside.time,
            parts=inside.parts or before.parts,
            rank=inside.rank or before.rank,
            pid=inside.pid or before.pid,
            level=inside.level or level or None,
            engine=inside.engine or before.engine,
            relay=inside.relay or before.relay,
            nameless=inside.nameless or before.nameless,
            own=not uvicorn,
            uvicorn=uvicorn,
        ), message

    def fits(self, pattern: Pattern, prefix: Prefix, message: str) -> re.Match[str] | None:
        """Match a message, read behind `prefix`, with one pattern, its demands on the prefix included."""
        if pattern.prefix != "any" and not (prefix.own if pattern.prefix == "own" else prefix.uvicorn):
            return None
        if (pattern.level and prefix.level not in pattern.level) or (pattern.kind and prefix.level in _CALM):
            return None
        return pattern.regex.match(message)

    @cached_property
    def by_literal(self) -> Mapping[bytes, tuple[int, ...]]:
        """Literal -> indexes of the patterns that declare it."""
        found: dict[bytes, tuple[int, ...]] = {}
        for index, pattern in enumerate(self.patterns):
            found[pattern.literal] = (*found.get(pattern.literal, ()), index)
        return found


@lru_cache(maxsize=4096)
def _prefix_of(framework: Framework, groups: tuple[str | None, ...]) -> Prefix:
    """The prefix of a line by all groups of the expression: the same for all lines of a rank in one second."""
    found: dict[str, str] = {}
    for name, at in framework.prefix_groups:
        if (text := groups[at]) is not None:
            found.setdefault(name, text)
    uvicorn, mark = "uvicorn" in found, found.pop("mark", None)
    found.pop("uvicorn", None)
    if "level" in found:
        found["level"] = _LEVELS.get(found["level"], found["level"])
    return Prefix(**found, own=bool(found.get("time") or mark) and not uvicorn, uvicorn=uvicorn)


@lru_cache(maxsize=1024)
def whole_number(text: str | None) -> int | None:
    """A number that foreign text prints; None when there is none, or one longer than any rank, size or PID."""
    return int(text) if text and text.isdecimal() and len(text) <= 9 else None


def quantity(text: str | None) -> float | None:
    """A figure of a counter: "12", "1,024", "1.2G" of 1,000 each, "3.5GiB" of 1,024 each.  None when it is none."""
    if not text:
        return None
    if text.isascii() and text.isdecimal() and len(text) <= 18:
        return float(text)
    if (match := _QUANTITY.fullmatch(text)) is None:
        return None
    return float(match[1].replace(",", "")) * float(1024 if match[3] else 1000) ** _POWERS[match[2]]


@lru_cache(maxsize=256)
def _group_of(name: str) -> str:
    """`time` of `time` and of `time_2`."""
    match = _NUMBERED.fullmatch(name)
    return match[1] if match else name


@lru_cache(maxsize=1024)
def rank_name(parts: str) -> str:
    """The name of a rank from the dimensions a title or log prefix prints, in the order DP, PP, TP.

    "_DP0_PP0_TP3_EP3" -> "DP0-PP0-TP3", " TP3" -> "TP3", "" -> "TP0".
    """
    found = dict(_PARTS.findall(parts))
    return "-".join(f"{key}{found[key]}" for key in ("DP", "PP", "TP") if key in found) or "TP0"


def load_frameworks(folder: Path | None = None) -> tuple[Framework, ...]:
    """All frameworks of a folder (default: the shipped one), by name.  InputError names the first mistake."""
    return _shipped() if folder is None else _load(folder)


@lru_cache(maxsize=1)
def _shipped() -> tuple[Framework, ...]:
    """Read once: to compose YAML costs far more than all the rest."""
    return _load(Path(__file__).parent)


def _load(folder: Path) -> tuple[Framework, ...]:
    common: tuple[Pattern, ...] = ()
    if (folder / COMMON).exists():
        top = _top(folder / COMMON)
        common = _patterns(top, PREFIX_GROUPS, ())
        top.finish()
    paths = {
        path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem) if path.name != COMMON
    }
    tops = {name: _top(path) for name, path in paths.items()}
    known: dict[str, Framework] = {}
    for name in sorted(tops, key=lambda name: "extends" in tops[name]):  # what is extended comes first
        known[name] = _framework(paths[name], tops[name], common, known)
    return tuple(known[name] for name in paths)


def describe(framework: Framework) -> Iterator[str]:
    """What is known of one framework, a line each: commands, releases, silences, the server's own time-outs."""
    entries = ", ".join(framework.entry_points) or "only by configuration"
    yield f"{framework.name:14} {len(framework.patterns):3} line patterns; started by: {entries}"
    if framework.releases:
        of = f" (engine: see {framework.extends})" if framework.extends else ""
        yield f"examined: {', '.join(framework.releases)}{of}"
    silent: dict[str, float] = {}
    for pattern in (pattern for pattern in framework.patterns if pattern.event != NO_EVENT):
        silent[pattern.event] = max(pattern.silent_seconds, silent.get(pattern.event, 0.0))
    known = [f"{event} {_duration(seconds)}" for event, seconds in silent.items() if seconds]
    if known:
        yield f"healthy and silent for up to, behind: {', '.join(known)}"
    timeouts = {
        f"{pattern.clock} {_duration(pattern.timeout_seconds)} from {pattern.event}": None
        for pattern in framework.patterns
        if pattern.clock
    }
    timeouts |= {
        f"{clock} {_duration(timeout.seconds)} {'without a token' if timeout.serving else 'from its start'}": None
        for clock, timeout in framework.timeouts.items()
        if timeout.seconds
    }
    if timeouts:
        yield f"gives up by itself: {', '.join(timeouts)}"


def _duration(seconds: float) -> str:
    """As a configuration writes it: "3h15m", "480s" is "8m"."""
    parts = [(int(seconds // 3600), "h"), (int(seconds % 3600 // 60), "m"), (int(seconds % 60), "s")]
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def _ordered(patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
    """Access lines and request echoes first: what a request says is never the server's word."""
    return tuple(sorted(patterns, key=lambda pattern: (pattern.event != "access", pattern.last)))


def _top(path: Path) -> Section:
    top = load(path)
    if top is None:
        raise InputError(str(path), 0, "", "the file is empty; a framework needs title, prefix and patterns")
    return top


def _framework(path: Path, top: Section, common: tuple[Pattern, ...], bases: Mapping[str, Framework]) -> Framework:
    base = _base(top, bases)
    releases = top.texts("releases")
    prefix = _prefix(top, base)
    own = _patterns(top, tuple(map(_group_of, prefix.groupindex)), releases)
    framework = Framework(
        name=path.stem,
        title=top.text("title"),
        prefix=prefix,
        patterns=_ordered(own + (base.patterns if base else common)),
        entry_points=top.texts("entry_points"),
        comms=_comms(top),
        titles=tuple(_title(section) for section in top.sections("titles")),
        arguments={**(base.arguments if base else {}), **_arguments(top)},
        access=_access(top),
        embedded_ready=_events(top, "embedded_ready") or (base.embedded_ready if base else ()),
        releases=releases,
        extends=base.name if base else "",
        single_process=top.boolean("single_process", False),
        timeouts={**(base.timeouts if base else {}), **_timeouts(top)},
        own=frozenset(own),
    )
    top.finish()
    return framework


def _base(top: Section, bases: Mapping[str, Framework]) -> Framework | None:
    if "extends" not in top:
        return None
    known = [name for name, one in bases.items() if not one.extends]
    return bases[top.choice("extends", tuple(known))]


def _prefix(top: Section, base: Framework | None) -> re.Pattern[str]:
    """The prefix of a file; of one that extends another its own form, which must not be empty, or the other's."""
    prefix = top.expression("prefix", "")
    assert prefix is not None  # noqa: S101  a default was given
    for name in prefix.groupindex:
        if _group_of(name) not in PREFIX_GROUPS:
            raise top.wrong("prefix", f"group {name!r} is unknown; allowed are {', '.join(PREFIX_GROUPS)}")
    if base is None or not prefix.pattern:
        return prefix if base is None else base.prefix
    ours = re.sub(r"\(\?P<(\w+?)>", r"(?P<\1_9>", prefix.pattern)
    return re.compile(f"(?:{ours})|(?:{base.prefix.pattern})")


def _comms(top: Section) -> tuple[str, ...]:
    for comm in (comms := top.texts("comms")):
        if not 1 <= len(comm.encode()) <= 15:
            raise top.wrong("comms", f"{comm!r} can never match: the kernel cuts a comm at 15 bytes")
    return comms


def _events(section: Section, key: str) -> tuple[str, ...]:
    for event in (events := section.texts(key)):
        if event not in EVENTS:
            raise section.wrong(key, f"{event!r} is unknown; allowed are {', '.join(EVENTS)}")
    return events


def _title(section: Section) -> Title:
    pattern = section.expression("pattern")
    if pattern is None:
        raise InputError(section.file, section.line, f"{section.path}.pattern", "the key is required")
    role = section.choice("role", ROLES)
    title = Title(pattern, role, section.texts("rank_from"), section.boolean("shared", False))  # type: ignore[arg-type]
    section.finish()
    return title


def _arguments(top: Section) -> dict[str, Argument]:
    below = top.section("arguments")
    if below is None:
        return {}
    arguments = {}
    for name in ARGUMENTS:
        if (section := below.section(name)) is not None:
            arguments[name] = Argument(
                flags=section.texts("flags"),
                positional=section.boolean("positional", False),
                is_flag=section.boolean("is_flag", False),
                inverted=section.boolean("inverted", False),
                default=section.text("default", ""),
            )
            section.finish()
    below.finish(ARGUMENTS)
    return arguments


def _timeouts(top: Section) -> dict[str, Timeout]:
    below = top.section("timeouts")
    if below is None:
        return {}
    timeouts = {}
    for clock in CLOCKS:
        if (section := below.section(clock)) is not None:
            timeouts[clock] = Timeout(
                flags=section.texts("flags"),
                variables=section.texts("variables"),
                seconds=section.duration("seconds", 0.0),
                serving=section.boolean("serving", False),
                several=section.texts("several"),
            )
            section.finish()
    below.finish(CLOCKS)
    return timeouts


def _access(top: Section) -> Access:
    section = top.section("access")
    if section is None:
        return Access()
    endpoints = section.mapping("endpoints")
    for name, path in endpoints.items():
        if name not in ENDPOINTS or not path.startswith("/"):
            raise section.wrong("endpoints", f"{name}: {path!r}: allowed are {', '.join(ENDPOINTS)} with a path")
    access = Access(
        default_port=section.integer("default_port", 0, 0, 65535),
        endpoints=endpoints,
        default_endpoint=section.choice("default_endpoint", ENDPOINTS, "health"),
        metrics=_metrics(section),
        metrics_default=section.boolean("metrics_default", True),
    )
    section.finish()
    return access


def _metrics(parent: Section) -> dict[str, tuple[str, ...]]:
    section = parent.section("metrics")
    if section is None:
        return {}
    metrics = {name: section.texts(name) for name in METRICS if name in section}
    section.finish(METRICS)
    return metrics


def _patterns(top: Section, prefix_groups: tuple[str, ...], releases: tuple[str, ...]) -> tuple[Pattern, ...]:
    patterns = tuple(_pattern(section, releases) for section in top.sections("patterns"))
    for pattern, section in zip(patterns, top.sections("patterns"), strict=True):
        if pattern.level and "level" not in prefix_groups:
            raise section.wrong("level", "the prefix has no group named level")
    return patterns


def _pattern(section: Section, releases: tuple[str, ...]) -> Pattern:
    event = section.choice("event", (*EVENTS, NO_EVENT))
    regex = section.expression("regex")
    if regex is None:
        raise InputError(section.file, section.line, f"{section.path}.regex", "the key is required")
    for name in regex.groupindex:
        if name not in FIELDS:
            raise section.wrong("regex", f"group {name!r} is unknown; allowed are {', '.join(FIELDS)}")
    pattern = Pattern(
        event=event,
        literal=_literal(section),
        regex=regex,
        prefix=section.choice("prefix", PREFIX_NEEDS, "own"),  # type: ignore[arg-type]
        kind=_kind(section, event),
        level=section.texts("level"),
        speaker=section.choice("speaker", SPEAKERS, "every"),
        bulk=section.boolean("bulk", False),
        proves_ready=section.boolean("proves_ready", False),
        every_rank=section.boolean("every_rank", False),
        again=section.choice("again", EVENTS) if "again" in section else "",
        last=section.boolean("last", False),
        versions=_versions(section, releases),
        silent_seconds=section.duration("silent", 0.0),
        timeout_seconds=section.duration("timeout", 0.0),
        clock=section.choice("clock", CLOCKS) if "timeout" in section else "",
    )
    section.finish()
    return pattern


def _versions(section: Section, releases: tuple[str, ...]) -> tuple[str, ...]:
    """The examined releases of a range: "0.4.0-0.5.20", "0.5.21-", "-0.8.5", "0.6.6"; all when none is given."""
    if "versions" not in section:
        return releases
    first, dash, last = (text := section.text("versions")).partition("-")
    last = last if dash else first
    ends = (first or "".join(releases[:1]), last or "".join(releases[-1:]))
    if not set(ends) <= set(releases) or releases.index(ends[0]) > releases.index(ends[1]):
        problem = f"{text!r} is no range of examined releases; allowed are {', '.join(releases) or 'none'}"
        raise section.wrong("versions", problem)
    return releases[releases.index(ends[0]) : releases.index(ends[1]) + 1]


def _literal(section: Section) -> bytes:
    literal = section.text("literal")
    if len(literal) < 2 or "\n" in literal or "\r" in literal:
        problem = "a literal of at least 2 characters on one line, which every matching line holds, is needed"
        raise section.wrong("literal", problem)
    return literal.encode()


def _kind(section: Section, event: str) -> str:
    if event in ("error", "fatal"):
        return section.choice("kind", ERROR_KINDS)
    if "kind" in section:
        raise section.wrong("kind", "only error and fatal have a kind")
    return ""
