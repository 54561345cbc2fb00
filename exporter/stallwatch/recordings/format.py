"""The format of recordings: lines of JSON to what the sources read, and back.  See docs/REFERENCE.md, "Recordings".

Pure: takes lines and yields records, or makes lines.  Every mistake is an InputError that names file and line.
Nothing that is not listed here is ever written: no text of a log, no argument, no path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import Thresholds
from ..model import (
    CLOCKS,
    ERROR_KINDS,
    EVENTS,
    LINE_KINDS,
    PHASES,
    READ_REASONS,
    WAITS,
    WRITE,
    Event,
    ProcessId,
    Reading,
    Server,
    Signal,
)
from ..strict_yaml import InputError, is_plain, shown

VERSION = 1
LONGEST_LINE_BYTES = 64 << 20
LARGEST_TIME = 1e12
SHORTEST_INTERVAL, LONGEST_INTERVAL = 0.001, 86400.0

MAIN_THREAD = "main_thread"
"""The signal whose waits are those of one thread: one more than of many."""

ALSO_OTHER = ("pipe", "socket", "driver", "zombie")
"""Waits that read as `other`; two of them in one look are added."""

NOT_COLLECTED: Mapping[str, tuple[str, ...]] = {
    "node_shm_orphan_bytes": (),
}
"""Recordable signals that nothing here reads or judges yet -> the labels they need."""

IGNORED = (
    "process_context_switches_total",
    "startup_duration_seconds_bucket",
    "startup_duration_seconds_sum",
    "startup_duration_seconds_count",
)
"""Accepted and not looked at: no evidence, but in data that was read back from Prometheus."""

_OPTIONAL_LABELS = {
    "rank_info": frozenset(("pid", "gpu")),
    "gpu_info": frozenset(("index", "name", "compute_capability", "driver", "pci_bus_id", "mig")),
}
_OF_ANYBODY = ("gpu_process_memory_bytes",)
"""Signals that may be about processes of no known server."""
_TEXTS = ("framework", "version", "model", "group", "speculative")
_NUMBERS = {"nnodes": 1, "node_rank": 0, "tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 1}
"""Key of a server -> the least number allowed."""
_LARGEST_NUMBER = 1 << 20
_LARGEST_EXACT = 1 << 53
"""Below it every whole number is a float, too."""
_TIMES = ("window", "stall_after", "suspect_after", "serve_stall_after")
_TEXT_FIELDS = {"kind": frozenset(ERROR_KINDS), "clock": frozenset(CLOCKS)}
"""Fields of an event that may be words -> the words allowed in what we write."""

Json = dict[str, Any]


# --- what a recording says ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedServer:
    """One server of a header.  `log` None = not said; `thresholds` None = the defaults."""

    server: Server
    log: bool | str | None = None
    thresholds: Thresholds | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """The first line.  `begun` is the Unix time of second 0, 0 where it is not known."""

    interval_seconds: float
    servers: tuple[RecordedServer, ...] = ()
    begun: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Servers that came, or became better known, since the header."""

    servers: tuple[RecordedServer, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """One line with readings.  `interval`: how often its source looks, where the recording says so."""

    t: float
    readings: tuple[Reading, ...]
    interval: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing was judged from `t` on for so many seconds, whatever was read meanwhile: that time counts for nothing."""

    t: float
    seconds: float


Line = Header | Facts | Look | Event | Pause
"""An Event's `at` is the `t` of its line."""


def known_names(read: Iterable[Signal], derived: Iterable[Signal]) -> dict[str, Signal | None]:
    """Name -> the signal, or None for those that are accepted and ignored."""
    ignored = (*IGNORED, *(signal.name for signal in derived))
    later = {name: Signal(name, "", labels) for name, labels in NOT_COLLECTED.items()}
    return {**dict.fromkeys(ignored), **later, **{signal.name: signal for signal in read}}


def unknown_server(name: str) -> RecordedServer:
    """A server that the header does not know."""
    return RecordedServer(Server(name, "generic", "server", ProcessId(0, 0), 0.0, ()))


# --- reading -----------------------------------------------------------------------------------------------


class Reader:
    """Reads one recording.  `file` is its name in sentences about mistakes."""

    def __init__(self, file: str, known: Mapping[str, Signal | None]) -> None:
        self.file, self._known = file, known
        self._line = 0
        self._t: float | None = None
        self._series: dict[Any, tuple[Signal, tuple[str, ...]] | None] = {}  # a row without its value -> its series

    def read(self, lines: Iterable[bytes]) -> Iterator[Line]:
        """The records of all lines, in order.  InputError at the first mistake."""
        for text in lines:
            self._line += 1
            parsed = self._parse(text)
            if self._line == 1:
                yield self._header(parsed)
            else:
                yield from self._records(parsed)
        if not self._line:
            raise InputError(self.file, 0, "", "is empty; a recording begins with a header line")

    def wrong(self, key: str, problem: str) -> InputError:
        return InputError(self.file, self._line, key, problem)

    def _parse(self, text: bytes) -> Json:
        if len(text) > LONGEST_LINE_BYTES:
            raise self.wrong("", f"the line is longer than {LONGEST_LINE_BYTES >> 20} MiB")
        try:
            parsed = _DECODER.decode(text.decode())
        except UnicodeDecodeError:
            raise self.wrong("", "is not UTF-8 text") from None
        except RecursionError:
            raise self.wrong("", "is nested too deeply") from None
        except ValueError as error:
            raise self.wrong("", self._no_json(text, error)) from None
        if not isinstance(parsed, dict):
            raise self.wrong("", "is no JSON object")
        return parsed

    @staticmethod
    def _no_json(text: bytes, error: ValueError) -> str:
        if isinstance(error, json.JSONDecodeError) and not text.endswith(b"\n"):
            return "is cut off: the recording ended in the middle of this line; delete it to use what is before it"
        problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return f"is no JSON object: {problem}"

    # --- servers

    def _header(self, parsed: Json) -> Header:
        if "stallwatch_recording" not in parsed:
            raise self.wrong("stallwatch_recording", "the first line must be the header of a recording")
        version = parsed["stallwatch_recording"]
        if isinstance(version, bool) or version != VERSION:
            raise self.wrong("stallwatch_recording", f"{_shown(version)} is unknown; allowed is {VERSION}")
        interval = self._number(parsed, "interval_seconds")
        if not SHORTEST_INTERVAL <= interval <= LONGEST_INTERVAL:
            allowed = f"{SHORTEST_INTERVAL:g} to {LONGEST_INTERVAL:g} seconds"
            raise self.wrong("interval_seconds", f"{interval:g} is not allowed; allowed are {allowed}")
        begun = self._number(parsed, "begun_timestamp_seconds", 0.0)
        return Header(interval, self._servers(parsed), begun)

    def _servers(self, parsed: Json) -> tuple[RecordedServer, ...]:
        found = parsed.get("servers", [])
        if not isinstance(found, list):
            raise self.wrong("servers", "a list is needed")
        servers = tuple(self._server(each, f"servers[{number}]") for number, each in enumerate(found))
        names = [each.server.name for each in servers]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise self.wrong(f"servers[{number}].server", f"{_shown(name)} is there twice")
        return servers

    def _server(self, found: Any, key: str) -> RecordedServer:
        if not isinstance(found, dict):
            raise self.wrong(key, "an object is needed")
        name = self._text(found, "server", key)
        ranks = found.get("ranks", [])
        if not (isinstance(ranks, list) and all(isinstance(rank, str) and rank for rank in ranks)):
            raise self.wrong(f"{key}.ranks", "a list of names is needed")
        role, log = found.get("role", "server"), found.get("log")
        if role not in ("server", "embedded"):
            raise self.wrong(f"{key}.role", f"{_shown(role)} is unknown; allowed are server, embedded")
        if not (log is None or isinstance(log, bool) or log == "unreadable"):
            raise self.wrong(f"{key}.log", f'{_shown(log)} is unknown; allowed are true, false, "unreadable"')
        facts: Json = {word: self._text(found, word, key, "") for word in _TEXTS}
        facts |= {word: self._whole(found, word, key, least) for word, least in _NUMBERS.items()}
        port = self._whole(found, "port", key, 0, 65535)
        timeouts = found.get("timeouts", {})
        if not isinstance(timeouts, dict) or not timeouts.keys() <= set(CLOCKS):
            raise self.wrong(f"{key}.timeouts", f"seconds by clock are needed; clocks are {', '.join(CLOCKS)}")
        server = Server(
            name=name,
            role=role,
            root=ProcessId(0, 0),
            started_at=0.0,
            processes=(),
            ports=(port,) if port else (),
            expected_ranks=tuple(dict.fromkeys(ranks)),
            timeouts={clock: self._number(timeouts, clock, 0.0, f"{key}.timeouts") for clock in timeouts},
            **{**facts, "framework": facts["framework"] or "generic"},
        )
        return RecordedServer(server, log, self._thresholds(found, key))

    def _thresholds(self, found: Json, key: str) -> Thresholds | None:
        verdict = found.get("verdict")
        if verdict is None:
            return None
        key = f"{key}.verdict"
        if not isinstance(verdict, dict):
            raise self.wrong(key, "an object is needed")
        budgets = verdict.get("budgets", {})
        if not isinstance(budgets, dict) or not budgets.keys() <= set(PHASES):
            raise self.wrong(f"{key}.budgets", f"seconds by phase are needed; phases are {', '.join(PHASES)}")
        times = {word: self._number(verdict, word, getattr(Thresholds(), word), key) for word in _TIMES}
        result = Thresholds(
            **times, budgets={phase: self._number(budgets, phase, 0.0, f"{key}.budgets") for phase in budgets}
        )
        if not 0 < result.window < result.stall_after:
            raise self.wrong(f"{key}.stall_after", "must be longer than window, and window longer than 0")
        return result

    # --- lines

    def _records(self, parsed: Json) -> Iterator[Line]:
        if "stallwatch_recording" in parsed:
            raise self.wrong("stallwatch_recording", "a second header; one recording has one")
        t = self._time(parsed)
        if "pause" in parsed:
            yield Pause(t, self._number(parsed, "pause"))
        if "servers" in parsed:
            yield Facts(self._servers(parsed))
        if "readings" in parsed:
            interval = self._number(parsed, "interval", 0.0)
            yield Look(t, self._readings(parsed["readings"]), interval if interval > 0 else None)
        for key, allowed in _LINES.items():
            if key in parsed:
                yield self._event(parsed, key, allowed, t)

    def _time(self, parsed: Json) -> float:
        t = self._number(parsed, "t")
        if not 0 <= t <= LARGEST_TIME:
            raise self.wrong("t", f"{t:g} is not allowed; allowed are seconds from 0 to {LARGEST_TIME:g}")
        if self._t is not None and t < self._t:
            raise self.wrong("t", f"time runs backwards: {t:.12g} comes after {self._t:.12g}")
        self._t = t
        return t

    def _event(self, parsed: Json, key: str, allowed: frozenset[str], t: float) -> Event:
        name, rank = parsed[key], parsed.get("rank")
        if not isinstance(name, str) or name not in allowed:
            raise self.wrong(key, f"{_shown(name)} is unknown; allowed are {', '.join(sorted(allowed))}")
        if rank is not None:
            rank = self._text(parsed, "rank")
        return Event(
            at=t,
            server=self._text(parsed, "server"),
            event=name,
            rank=rank or None,
            log=self._text(parsed, "log", default="log"),
            fields=self._fields(parsed),
        )

    def _fields(self, parsed: Json) -> dict[str, float | str]:
        fields = parsed.get("fields", {})
        if not isinstance(fields, dict):
            raise self.wrong("fields", "an object is needed")
        found: dict[str, float | str] = {}
        for name, value in fields.items():
            found[name] = value if isinstance(value, str) else self._number(fields, name, key="fields")
        kind = found.get("kind")
        if kind is not None and kind not in ERROR_KINDS:
            raise self.wrong("fields.kind", f"{_shown(kind)} is unknown; allowed are {', '.join(ERROR_KINDS)}")
        return found

    # --- readings

    def _readings(self, rows: Any) -> tuple[Reading, ...]:
        """The fast way through rows that were seen before and hold a number; everything else is looked at closely."""
        if not isinstance(rows, list):
            raise self.wrong("readings", "a list is needed")
        series_of, found = self._series, []
        for number, row in enumerate(rows):
            try:
                series, value = series_of[row[0], *row[1].items()], row[2]
            except (AttributeError, KeyError, IndexError, TypeError):
                series, value = self._new_series(row, f"readings[{number}]"), row[2]
            if type(value) is int and -_LARGEST_EXACT < value < _LARGEST_EXACT:
                value = float(value)
            elif type(value) is not float or value - value != 0.0:  # not finite
                value = self._value(row, f"readings[{number}]")
            if series is not None:
                signal, labels = series
                reason = self._reason(row, number) if value is None else None
                found.append(Reading(signal, labels, value, reason))
        return tuple(found)

    def _new_series(self, row: Any, key: str) -> tuple[Signal, tuple[str, ...]] | None:
        """Check a row's name and labels; None = ignored.  Remembered, for the same rows come again and again."""
        if not isinstance(row, list) or len(row) < 3:
            raise self.wrong(key, "[name, {labels}, value] or [name, {labels}, null, reason] is needed")
        name, labels = row[0], row[1]
        if not isinstance(name, str) or name not in self._known:
            raise self.wrong(key, f"{_shown(name)} is no signal; `stallwatch signals` lists them, without stallwatch_")
        if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
            raise self.wrong(key, f"{name}: labels are an object of texts")
        signal = self._known[name]
        series = None if signal is None else (signal, self._labels(signal, labels, key))
        self._series[name, *labels.items()] = series
        return series

    def _labels(self, signal: Signal, labels: Mapping[str, str], key: str) -> tuple[str, ...]:
        missing = set(signal.labels) - labels.keys() - _OPTIONAL_LABELS.get(signal.name, frozenset())
        if missing or (labels.get("server") == "" and signal.name not in _OF_ANYBODY):
            needed = ", ".join(signal.labels) or "none"
            raise self.wrong(key, f"{signal.name}: wrong labels {', '.join(labels) or 'none'}; needed are {needed}")
        wait = labels.get("wait")
        waits = WAITS + ALSO_OTHER + ((WRITE,) if signal.name == MAIN_THREAD else ())
        if "wait" in signal.labels and wait not in waits:
            allowed = ", ".join(waits)
            raise self.wrong(key, f"{signal.name}: wait {_shown(wait)} is unknown; allowed are {allowed}")
        return tuple(labels.get(label, "") for label in signal.labels)

    def _value(self, row: list[Any], key: str) -> float | None:
        value = row[2]
        if value is None:
            return None
        return self._finite(value, f"{key}: {row[0]}", "a number or null is needed")

    def _reason(self, row: list[Any], number: int) -> str:
        reason = row[3] if len(row) > 3 else "error"
        if not isinstance(reason, str) or reason not in READ_REASONS:
            allowed = ", ".join(READ_REASONS)
            raise self.wrong(f"readings[{number}]", f"reason {_shown(reason)} is unknown; allowed are {allowed}")
        return reason

    # --- values

    def _finite(self, value: Any, key: str, needed: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"{needed}, not {_shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(key, "the number is too large")
        return number

    def _number(self, found: Json, word: str, default: float | None = None, key: str = "") -> float:
        if word not in found and default is not None:
            return default
        return self._finite(found.get(word), f"{key}.{word}" if key else word, "a number is needed")

    def _whole(self, found: Json, word: str, key: str, least: int, most: int = _LARGEST_NUMBER) -> int:
        value = found.get(word, least)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(f"{key}.{word}", f"a whole number from {least} to {most} is needed, not {_shown(value)}")
        return value

    def _text(self, found: Json, word: str, key: str = "", default: str | None = None) -> str:
        value = found.get(word, default)
        if not isinstance(value, str) or (default is None and not value):
            raise self.wrong(f"{key}.{word}" if key else word, f"a text is needed, not {_shown(value)}")
        return value


_LINES: Mapping[str, frozenset[str]] = {"event": frozenset(EVENTS), "line": frozenset(LINE_KINDS)}


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number in JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _shown(value: Any) -> str:
    """A value in a sentence: short, whatever it is."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**15:
        return "a huge number"
    if isinstance(value, str) and not is_plain(value):
        return shown(value)
    return json.dumps(value)


def told_servers(lines: Iterable[bytes]) -> set[str]:
    """Servers of which an event or a line occurs.  Looks at nothing else, and passes over every mistake."""
    servers = set()
    for text in lines:
        if b'"readings"' in text and not any(word in text for word in (b'"event"', b'"line"', b"\\")):
            continue  # fast: most lines are nothing but readings
        try:
            parsed = _DECODER.decode(text.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, dict) and ("event" in parsed or "line" in parsed):
            server = parsed.get("server")
            servers.add(server if isinstance(server, str) else "")
    return servers


# --- writing -----------------------------------------------------------------------------------------------


def header_line(interval_seconds: float, begun: float, servers: Sequence[Json]) -> str:
    """The first line; `begun` is the Unix time of second 0."""
    return _line(
        {
            "stallwatch_recording": VERSION,
            "interval_seconds": interval_seconds,
            "begun_timestamp_seconds": round(begun, 3),
            "servers": list(servers),
        }
    )


def servers_line(t: float, servers: Sequence[Json]) -> str:
    """Servers that came, or became better known, since the header."""
    return _line({"t": round(t, 3), "servers": list(servers)})


def look_line(t: float, source: str, interval: float, readings: Iterable[Reading]) -> str:
    """What one source read at one look."""
    rows = [_row(reading) for reading in readings]
    return _line({"t": round(t, 3), "source": source, "interval": interval, "readings": rows})


def pause_line(t: float, seconds: float) -> str:
    """A time in which stallwatch itself did not judge."""
    return _line({"t": round(t, 3), "pause": round(seconds, 3)})


def event_line(t: float, event: Event) -> str:
    """One line of a log: what it means, never what it says."""
    found: Json = {"t": round(t, 3), "server": event.server}
    found["event" if event.event in EVENTS else "line"] = event.event
    if event.rank is not None:
        found["rank"] = event.rank
    if event.log:
        found["log"] = event.log
    fields = {name: value for name, value in event.fields.items() if _is_no_text(name, value)}
    if fields:
        found["fields"] = fields
    return _line(found)


def server_document(server: Server, thresholds: Thresholds) -> Json:
    """What the header says of a server.  Its ranks only where all are known: else their number says more."""
    found: Json = {"server": server.name, "role": server.role}
    found |= {word: getattr(server, word) for word in _TEXTS if getattr(server, word)}
    found |= {word: getattr(server, word) for word in _NUMBERS}
    if server.ports:
        found["port"] = server.ports[0]
    seen = tuple(sorted({process.rank for process in server.ranks}))
    ranks = server.expected_ranks or (seen if len(seen) >= server.ranks_expected else ())
    if ranks:
        found["ranks"] = list(ranks)
    if server.timeouts:
        found["timeouts"] = dict(server.timeouts)
    reasons = [place.reason for place in server.logs]
    found["log"] = None in reasons or ("unreadable" if any(reason != "absent" for reason in reasons) else False)
    if thresholds != Thresholds():
        found["verdict"] = {word: getattr(thresholds, word) for word in _TIMES}
        found["verdict"]["budgets"] = {phase: thresholds.budget(phase) for phase in PHASES}
    return found


def _row(reading: Reading) -> list[Any]:
    labels = dict(zip(reading.signal.labels, reading.labels, strict=True))
    value = None if reading.value is None else float(reading.value)
    if value is None or not math.isfinite(value):
        return [reading.signal.name, labels, None, reading.reason or "error"]
    return [reading.signal.name, labels, int(value) if value.is_integer() and abs(value) < _LARGEST_EXACT else value]


def _is_no_text(name: str, value: float | str) -> bool:
    """Numbers, and words of closed sets: nothing a log could bring in."""
    if isinstance(value, str):
        return value in _TEXT_FIELDS.get(name, ())
    return math.isfinite(value)


def _line(found: Json) -> str:
    return json.dumps(found, separators=(",", ":")) + "\n"
