"""Log lines that are JSON objects, one record each: what the logger says of time and level, and the message.

    {"time":"2025-09-02T15:53:31.943377Z","level":"INFO","target":"log","message":"…","log.target":"main.init"}

Only keys of the record itself count: what a request holds stands in a text or deeper.  A record may be cut off behind
what is wanted of it.  No input raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

BEGIN = '{"'
LONGEST_FIELD = 200
"""Characters of a time, level or name of a logger; a longer one is none."""

_TIMES = ("time", "timestamp", "asctime", "@timestamp", "ts")
_LEVELS = ("level", "levelname", "severity")
_LOGGERS = ("log.target", "logger", "name", "target")
_MESSAGES = ("message", "msg")
_INNER = "fields"
"""Key below which some loggers put the message."""

_KEY = re.compile(r'[ \t]*"([^"\\]{1,60})"[ \t]*:[ \t]*')
_TEXT = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"?')
_NEXT = re.compile(r"[ \t]*,")
_DECODER = json.JSONDecoder(strict=False)
_SECONDS = (1e9, 1e10)
"""Unix times of our days in seconds; larger numbers are of milli-, micro- and nanoseconds."""


@dataclass(frozen=True, slots=True)
class Record:
    """`message` is None where the record was cut off before it; "" = the record says no such thing."""

    time: str = ""
    level: str = ""
    logger: str = ""
    message: str | None = None


def read_record(text: str) -> Record | None:
    """The record that a line is; None when it is none of a logger: one has a time or a level."""
    if not text.startswith(BEGIN):
        return None
    found = dict(_fields(text))
    inner = found.get(_INNER)
    message = _first(found, _MESSAGES)
    if message is None and isinstance(inner, dict):
        message = _first(inner, _MESSAGES)
    time, level, logger = (_short(_first(found, names)) for names in (_TIMES, _LEVELS, _LOGGERS))
    if not (time or level):
        return None
    return Record(time, level.upper(), logger, message if isinstance(message, str) else None)


def _fields(text: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of the record, as far as it goes."""
    at = 1
    while (key := _KEY.match(text, at)) is not None:
        at = key.end()
        if text.startswith('"', at) and (match := _TEXT.match(text, at)) is not None:
            yield key[1], _unescaped(match[1])
            at = match.end()
        else:
            try:
                value, at = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return
            yield key[1], value
        if (comma := _NEXT.match(text, at)) is None:
            return
        at = comma.end()


def _unescaped(text: str) -> str:
    """The text between two quotes; as it stands where it is damaged.  A line end in it makes no two lines of one."""
    if "\\" not in text:
        return text
    try:
        value, _ = _DECODER.raw_decode(f'"{text}"')
    except ValueError:
        return text
    return str(value).replace("\n", "\r")


def _first(found: dict[str, Any], names: tuple[str, ...]) -> object:
    return next((found[name] for name in names if name in found), None)


def _short(value: object) -> str:
    """A text, or a Unix time as ISO writes it; anything else is none."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST_FIELD else ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value < 1e20:
        return ""
    seconds = float(value)
    while seconds >= _SECONDS[1]:
        seconds /= 1000
    if seconds < _SECONDS[0]:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
