"""What is known of each inference server, as data: YAML files become frozen records.

One file per framework: how to recognise its processes, what its arguments mean, where to ask it, and what its
log lines say.  `common.yaml` is no framework: its patterns (torch, NCCL, CUDA, tracebacks) hold for all.
A wrong file is an InputError with file, line and key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from ..model import ERROR_KINDS, EVENTS
from ..strict_yaml import InputError, Section, load

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
)
ENDPOINTS = ("health", "models", "metrics")
METRICS = (
    *("requests_running", "requests_waiting", "generated_tokens", "prompt_tokens", "finished_requests"),
    "awake_engines",
)
NUMBER_FIELDS = ("done", "total", "ratio", "percent", "running", "waiting", "generation_tokens_per_second")
"""Named groups that become fields of the event; `percent` becomes `ratio`."""
NAMING_FIELDS = ("rank", "dp", "pp", "tp", "version", "tp_size", "pp_size", "dp_size")
"""Named groups about the server itself: which rank wrote the line, sizes of its groups, its version."""
FIELDS = NUMBER_FIELDS + NAMING_FIELDS
PREFIX_GROUPS = ("time", "parts", "rank", "pid", "level", "uvicorn", "engine")
PREFIX_NEEDS = ("own", "uvicorn", "any")
SPEAKERS = ("every", "first", "first_classic")

_CALM = ("DEBUG", "INFO")
"""No server tells of its trouble at these levels: words of trouble in such a line are an echo."""
_DECIMAL = re.compile(r"[0-9]{1,18}(?:\.[0-9]{0,18})?")
_PARTS = re.compile(r"([A-Z]+(?:_[A-Z]+)*)(\d{1,5})(?!\d)")

Role = Literal["main", "engine", "rank", "worker", "detokenizer", "controller"]
_Need = Literal["own", "uvicorn", "any"]


@dataclass(frozen=True, slots=True)
class Title:
    """A process title (command line joined by spaces) and what that process is.

    Groups: `parts` holds the rank's dimensions ("_DP0_TP3", may be empty), `engine` an engine's number.
    """

    pattern: re.Pattern[str]
    role: Role


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
class Pattern:
    """One kind of log line.

    `literal` occurs in every line the pattern matches.  `regex` is matched at the start of the message, prefix
    and ANSI removed.  `prefix`: `own` = only behind the framework's own prefix, `uvicorn` = only behind
    uvicorn's, `any` = also without one (bars, tracebacks).  `level`: only lines of these levels.
    `speaker`: `first` = only the first local rank writes it, so its absence on another rank says nothing;
    `first_classic` = the same until a line with `every_rank` was seen.  `bulk`: frequent after ready, then
    counted, and only the last one read.  `proves_ready`: an access line that a server gives only once it is ready.
    `again`: the event instead, when the same rank writes the line a second time in one start.
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
    versions: str = ""


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

    def prefix_group(self, prefix: re.Match[str] | None, name: str) -> str | None:
        """A group of a matched prefix; None when the framework prints no such part, or not here."""
        return prefix[name] if prefix and name in self.prefix.groupindex else None

    def fits(self, pattern: Pattern, prefix: re.Match[str] | None, message: str) -> re.Match[str] | None:
        """Match a message, read behind `prefix`, with one pattern, its demands on the prefix included."""
        if pattern.prefix != "any":
            uvicorn = self.prefix_group(prefix, "uvicorn") is not None
            if pattern.prefix == "uvicorn" and not uvicorn:
                return None
            if pattern.prefix == "own" and (uvicorn or not self.prefix_group(prefix, "time")):
                return None
        level = self.prefix_group(prefix, "level")
        if (pattern.level and level not in pattern.level) or (pattern.kind and level in _CALM):
            return None
        return pattern.regex.match(message)

    @cached_property
    def by_literal(self) -> Mapping[bytes, tuple[int, ...]]:
        """Literal -> indexes of the patterns that declare it."""
        found: dict[bytes, tuple[int, ...]] = {}
        for index, pattern in enumerate(self.patterns):
            found[pattern.literal] = (*found.get(pattern.literal, ()), index)
        return found


@lru_cache(maxsize=1024)
def whole_number(text: str | None) -> int | None:
    """A number that foreign text prints; None when there is none, or one longer than any rank, size or PID."""
    return int(text) if text and text.isdecimal() and len(text) <= 9 else None


def decimal_number(text: str | None) -> float | None:
    """A figure that foreign text prints, as `whole_number`: "12", "12.5"; never infinite, None for "1.2.3"."""
    return float(text) if text and _DECIMAL.fullmatch(text) else None


def rank_name(parts: str) -> str:
    """The name of a rank from the dimensions a title or log prefix prints, in the order DP, PP, TP.

    "_DP0_PP0_TP3_EP3" -> "DP0-PP0-TP3", " TP3" -> "TP3", "" -> "TP0".
    """
    found = dict(_PARTS.findall(parts))
    return "-".join(f"{key}{found[key]}" for key in ("DP", "PP", "TP") if key in found) or "TP0"


def load_frameworks(folder: Path | None = None) -> tuple[Framework, ...]:
    """All frameworks of a folder (default: the shipped one), by name.  InputError names the first mistake."""
    folder = folder or Path(__file__).parent
    common: tuple[Pattern, ...] = ()
    if (folder / COMMON).exists():
        top = _top(folder / COMMON)
        common = _patterns(top, PREFIX_GROUPS)
        top.finish()
    frameworks = [_framework(path) for path in sorted(folder.glob("*.yaml")) if path.name != COMMON]
    return tuple(replace(one, patterns=_ordered(one.patterns + common)) for one in frameworks)


def _ordered(patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
    """Access lines and request echoes first: what a request says is never the server's word."""
    return tuple(sorted(patterns, key=lambda pattern: pattern.event != "access"))


def _top(path: Path) -> Section:
    top = load(path)
    if top is None:
        raise InputError(str(path), 0, "", "the file is empty; a framework needs title, prefix and patterns")
    return top


def _framework(path: Path) -> Framework:
    top = _top(path)
    prefix = top.expression("prefix", "")
    assert prefix is not None  # noqa: S101  a default was given
    for name in prefix.groupindex:
        if name not in PREFIX_GROUPS:
            raise top.wrong("prefix", f"group {name!r} is unknown; allowed are {', '.join(PREFIX_GROUPS)}")
    framework = Framework(
        name=path.stem,
        title=top.text("title"),
        prefix=prefix,
        patterns=_patterns(top, tuple(prefix.groupindex)),
        entry_points=top.texts("entry_points"),
        comms=_comms(top),
        titles=tuple(_title(section) for section in top.sections("titles")),
        arguments=_arguments(top),
        access=_access(top),
        embedded_ready=_events(top, "embedded_ready"),
    )
    top.finish()
    return framework


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
    section.finish()
    return Title(pattern, role)  # type: ignore[arg-type]


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


def _patterns(top: Section, prefix_groups: tuple[str, ...]) -> tuple[Pattern, ...]:
    patterns = tuple(_pattern(section) for section in top.sections("patterns"))
    for pattern, section in zip(patterns, top.sections("patterns"), strict=True):
        if pattern.level and "level" not in prefix_groups:
            raise section.wrong("level", "the prefix has no group named level")
    return patterns


def _pattern(section: Section) -> Pattern:
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
        versions=section.text("versions", ""),
    )
    section.finish()
    return pattern


def _literal(section: Section) -> bytes:
    literal = section.text("literal")
    if len(literal) < 3 or "\n" in literal or "\r" in literal:
        problem = "a literal of at least 3 characters on one line, which every matching line holds, is needed"
        raise section.wrong("literal", problem)
    return literal.encode()


def _kind(section: Section, event: str) -> str:
    if event in ("error", "fatal"):
        return section.choice("kind", ERROR_KINDS)
    if "kind" in section:
        raise section.wrong("kind", "only error and fatal have a kind")
    return ""
