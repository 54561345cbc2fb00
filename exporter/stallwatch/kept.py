"""What outlasts a restart of stallwatch of one server: its records as JSON text, and back from what is read of it.

Pure.  The tables say which fields are kept, and which numbers are moments; what is read back is taken with suspicion.
The text is made at once, without a plain value in between: most of it is new each time, and there are thousands.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from operator import attrgetter, call
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from . import signals
from .deadlines import Deadlines, Wait
from .episodes import Episode
from .model import CLOCKS, EVENTS, PHASES, REASONS, STATES, WAITS, Signal, Verdict
from .restarts import Restarts
from .server_timeline import ServerTimeline, Speaker, Stats, Steps, Timeouts
from .startup import COUNTERS, RankStartup, Startup
from .timeline import MIB
from .tracks import Track, Waits, WaitSample

MOST_ITEMS = 4096
"""Elements of one list of the document."""
MOST_DURATIONS = 15
"""Steps of a counter that are kept: its quantiles, so that shortest, median and longest are as they were."""

IDLE_AMOUNTS: Mapping[tuple[str, str], float] = {
    (signals.READ_BYTES.name, ""): 0.2 * MIB / 60,
    (signals.PAGE_FAULTS.name, "minor"): 2 / 60,
}
"""(signal, kind) -> what a stuck process adds in a second (docs/NOISE.md, row c): no sign of life in a long gap."""
IDLE_CORES = 0.01

PROCESS_SIGNALS = (
    signals.SERVER_ALIVE,
    signals.RANK_ALIVE,
    signals.CPU_SECONDS,
    signals.PAGE_FAULTS,
    signals.STORAGE_READ,
    signals.READ_BYTES,
    signals.WRITTEN_BYTES,
    signals.RESIDENT_MEMORY,
    signals.CHILD_CPU,
)
_OTHER_SIGNALS = (
    signals.SERVER_SCOPE_ALIVE,
    signals.SERVER_STOPPING,
    signals.SERVER_FROZEN,
    signals.SERVER_PAUSED,
    signals.RANK_TRACED,
    signals.LOCK_AGE,
    signals.LOCK_HELD,
    signals.PORT_LISTENING,
    signals.PORT_FOREIGN,
    signals.HEALTH_TIMEOUTS,
    signals.REQUESTS_RUNNING,
    signals.REQUESTS_WAITING,
    signals.GENERATED_TOKENS,
    signals.PROMPT_TOKENS,
    signals.FINISHED_REQUESTS,
    signals.LOG_BYTES,
)
CARRIED_SIGNALS: Mapping[str, Signal] = {signal.name: signal for signal in (*PROCESS_SIGNALS, *_OTHER_SIGNALS)}
"""Series whose tracks are kept.  Not CHILD_PROCESSES: a first look may not know yet which children are compilers."""

PLAIN, CLOCK, LOOK = "plain", "clock", "look"
"""What becomes of the numbers of a field: they stay; they are moments of our clock; they are moments of a look,
which is as old after the restart as it was before, as after any other pause of ours."""

CARRIED: Mapping[type, Mapping[str, str]] = {
    ServerTimeline: {
        "anchor": CLOCK,
        "startup": PLAIN,
        "waits": PLAIN,
        "moves": CLOCK,
        "rank_moves": CLOCK,
        "busy_at": CLOCK,
        "progress_by_log": CLOCK,
        "deaths": CLOCK,
        "root_gone_at": CLOCK,
        "novel_in_a_row": PLAIN,
        "solid_move": CLOCK,
        "was_ready": PLAIN,
        "logged": PLAIN,
        "children_cpu": PLAIN,
        "markers": PLAIN,
        "steps": PLAIN,
        "stats": PLAIN,
        "timeouts": PLAIN,
        "deadlines": PLAIN,
        "owed_since": CLOCK,
        "demand_until": LOOK,
        "oom_killed_at": CLOCK,
    },
    Startup: {
        "phase": PLAIN,
        "phase_since": CLOCK,
        "starts": PLAIN,
        "ready_at": CLOCK,
        "fatal_at": CLOCK,
        "fatal_rank": PLAIN,
        "shutdown_at": CLOCK,
        "last_progress": CLOCK,
        "last_dated": PLAIN,
        "version": PLAIN,
        "ranks": PLAIN,
        "open_autotunes": PLAIN,
        "open_compiles": PLAIN,
        "seen": PLAIN,
    },
    RankStartup: {
        "phase": PLAIN,
        "markers": PLAIN,
        "load_progress": PLAIN,
        "last_progress": CLOCK,
        "bars": PLAIN,
        "is_loaded": PLAIN,
        "is_named": PLAIN,
    },
    Track: {
        "value": PLAIN,
        "reason": PLAIN,
        "read_at": LOOK,
        "usual_gap": PLAIN,
        "known": PLAIN,
        "known_at": CLOCK,
        "known_since": CLOCK,
        "samples": PLAIN,
        "is_followed": PLAIN,
        "_measured": PLAIN,
    },
    Waits: {
        "samples": PLAIN,
        "counts": PLAIN,
        "read_at": LOOK,
        "stopped_since": CLOCK,
        "disk_since": CLOCK,
        "usual_gap": PLAIN,
    },
    WaitSample: {"at": LOOK, "main": PLAIN, "classes": PLAIN},
    Steps: {"last": CLOCK, "amount": PLAIN, "durations": PLAIN},
    Stats: {"speakers": PLAIN},
    Speaker: {"at": LOOK, "usual_gap": PLAIN, "running": PLAIN, "waiting": PLAIN, "says_speed": PLAIN},
    Timeouts: {"in_a_row": PLAIN, "since": CLOCK, "last": CLOCK, "read_at": LOOK},
    Deadlines: {"waits": PLAIN},
    Wait: {"since": CLOCK, "seconds": PLAIN, "opened_by": PLAIN, "arrived": PLAIN},
    Episode: {
        "verdict": PLAIN,
        "since_timestamp": PLAIN,
        "stalled_seconds": PLAIN,
        "judged_at": CLOCK,
        "startup_seconds": PLAIN,
        "was_ready": PLAIN,
        "restarts": PLAIN,
        "phases": PLAIN,
        "was_stalled": PLAIN,
        "stall_reason": PLAIN,
        "has_ended": PLAIN,
    },
    Restarts: {
        "failed": PLAIN,
        "ended": PLAIN,
        "longest": PLAIN,
        "since": CLOCK,
        "began": CLOCK,
        "over_at": CLOCK,
        "was_orderly": PLAIN,
        "was_unsure": PLAIN,
        "tells_ready": PLAIN,
        "is_held": PLAIN,
        "pod_uid": PLAIN,
    },
    Verdict: {"state": PLAIN, "reason": PLAIN, "since": CLOCK, "suspect_rank": PLAIN},
}
"""Record -> its fields that are kept, and what their numbers are.  A field that holds records is PLAIN here."""

LEFT_OUT: Mapping[type, frozenset[str]] = {
    # Given by what is found after the restart, or by the first verdict (`is_idle`); `tracks` are kept apart, for their
    # labels are names, and so is what was learned of the node's cards.  What they did before we were away is no move.
    ServerTimeline: frozenset(("name", "server", "start_timestamp", "tracks", "cards", "is_idle")),
    Track: frozenset(("rate", "_rate_seconds")),  # of two neighbouring looks
    Waits: frozenset(("_measured",)),  # set anew, so that the gap does not end what lasted before and lasts
    Episode: frozenset(("start_timestamp",)),  # as Unix time, which follows steps of the wall clock
}
"""Record -> its fields that are not kept.  tests/test_memory.py holds that no field is forgotten here."""

CLOSED: Mapping[tuple[type, str], tuple[str, ...]] = {
    (Startup, "phase"): PHASES,
    (RankStartup, "phase"): PHASES,
    (Verdict, "state"): STATES,
    (Verdict, "reason"): REASONS,
    (Episode, "stall_reason"): REASONS,
    (WaitSample, "main"): WAITS,
    (Wait, "opened_by"): EVENTS,
}
"""Fields whose words another version of ours may have more of than this one knows."""

_WORD = re.compile(r"#?[A-Za-z0-9_:-]{0,64}")
_RELEASE = re.compile(r"[0-9][0-9A-Za-z.+-]{0,31}")
"""Plain letters and digits only, as in a word: they are written as they are, and what is read must be the same text."""
HASHED = "#"

Seal = Callable[..., str]
"""Keyed hash of some words and numbers, as hexadecimal digits."""


class Hashes:
    """A seal that remembers what it was asked for the document before: most of it is asked again for each."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._before: dict[tuple[str | int, ...], str] = {}
        self._now: dict[tuple[str | int, ...], str] = {}

    def __len__(self) -> int:
        return len(self._before) + len(self._now)

    def begin(self) -> None:
        """Another document is made."""
        self._before, self._now = self._now, {}

    def __call__(self, *words: str | int) -> str:
        known = self._now.get(words) or self._before.get(words) or self._seal(*words)
        self._now[words] = known
        return known


@dataclass(frozen=True, slots=True)
class Document:
    """All that is kept: the text of each server, the most urgent first, and the rest as plain values, by name."""

    servers: tuple[str, ...]
    rest: Mapping[str, Any]

    def text(self) -> str:
        """As JSON; `json_text` writes what is read of it in the same way."""
        parts = {name: json_text(value) for name, value in self.rest.items()}
        return object_text({**parts, "servers": list_text(self.servers)})


# --- records to text --------------------------------------------------------------------------------------------

Writer = Callable[[Any], str]


def json_text(value: Any) -> str:
    """JSON as it stands in the document: names in order, nothing between."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)


def object_text(parts: Mapping[str, str]) -> str:
    """A JSON object of texts, as `json_text` would write it."""
    return "{" + ",".join([f'"{name}":{text}' for name, text in sorted(parts.items())]) + "}"


def list_text(parts: Iterable[str]) -> str:
    return f"[{','.join(parts)}]"


class InfiniteError(ValueError):
    """A number is infinite: a field of a record that is, is left out."""


class _Numbers(dict[float | None, str]):
    """Number, or none -> its text.  A moment stands in many records of one look, and is made text once."""

    def __missing__(self, value: float | None) -> str:
        if len(self) >= MOST_NUMBERS:
            self.clear()
        if value is None:
            text = "null"
        elif math.isfinite(value):
            text = repr(float(value))
        else:
            raise ValueError("no number") if math.isnan(value) else InfiniteError("no finite number")
        self[value] = text
        return text


MOST_NUMBERS = 512


@lru_cache(maxsize=1024)
def _word_text(value: str) -> str:
    """Words that are of no closed set are left out."""
    return f'"{value}"' if _is_word(value) else '""'


@cache
def writer_of(hint: Any) -> Writer:
    """What makes values of this annotation text; KeyError for one that is not known here."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _optional(next(each for each in arguments if each is not type(None)))
    if hint in CARRIED:
        return record_writer(hint)
    if origin is None:
        return _SCALARS[hint]
    if issubclass(origin, Mapping):
        return _pairs(*arguments)
    if origin is tuple and Ellipsis not in arguments:
        return _row([writer_of(each) for each in arguments])
    if issubclass(origin, Set):
        name = _name_writer(arguments[0])
        return lambda value: f"[{','.join(filter(None, map(name, sorted(value))))}]" if value else "[]"
    one = writer_of(arguments[0])
    return lambda value: f"[{','.join(map(one, value))}]" if value else "[]"


_SCALARS: Mapping[Any, Writer] = {
    float: _Numbers().__getitem__,
    int: int.__repr__,
    bool: ("false", "true").__getitem__,
    str: _word_text,
}


def _optional(hint: Any) -> Writer:
    write = writer_of(hint)
    return write if hint is float else lambda value: "null" if value is None else write(value)


def _row(several: Sequence[Writer]) -> Writer:
    if len(several) == 2:  # most are
        first, second = several
        return lambda value: f"[{first(value[0])},{second(value[1])}]"
    return lambda value: list_text(map(call, several, value))


def _pairs(key: Any, value: Any) -> Writer:
    """Of a mapping; keys that are of no closed set are left out with what is theirs."""
    name, one = _name_writer(key), writer_of(value)
    return lambda found: list_text([f"[{text},{one(each)}]" for key, each in found.items() if (text := name(key))])


def _name_writer(hint: Any) -> Callable[[Any], str | None]:
    """Of keys and elements of sets: None of one that is of no closed set."""
    if hint is str:
        return _name_text
    write = writer_of(hint)
    return lambda value: write(value) if is_closed(value) else None


@lru_cache(maxsize=1024)
def _name_text(name: str) -> str | None:
    return f'"{name}"' if _is_closed_word(name) else None


class RecordText:
    """Makes records of one kind text: without what is infinite, for that it is by itself."""

    def __init__(self, kind: type) -> None:
        self._names = sorted(CARRIED[kind])
        self._fields = attrgetter(*self._names, "__class__")  # the last makes a row of a single one, too
        self._writers = [_field_writer(kind, name) for name in self._names]
        self._form = object_text(dict.fromkeys(self._names, "%s"))

    def __call__(self, value: Any) -> str:
        try:
            return self._form % tuple(map(call, self._writers, self._fields(value)))
        except InfiniteError:
            return object_text(self.parts(value))

    def parts(self, value: Any) -> dict[str, str]:
        """Field -> its text."""
        return {
            name: write(each)
            for name, write, each in zip(self._names, self._writers, self._fields(value), strict=False)
            if not (isinstance(each, float) and math.isinf(each))
        }


def _field_writer(kind: type, name: str) -> Writer:
    write, shorten = writer_of(_hints(kind)[name]), SHORTENED.get((kind, name))
    return write if shorten is None else lambda value: write(shorten(value))


def _release_of(version: str) -> str:
    return version if _RELEASE.fullmatch(version) else ""


def _ends(row: Sequence[Any]) -> Sequence[Any]:
    return (row[0], row[-1]) if len(row) > 2 else row


def _quantiles(row: Iterable[float]) -> list[float]:
    ordered, most = sorted(row), MOST_DURATIONS - 1
    if len(ordered) <= most:
        return ordered
    return [ordered[round(n * (len(ordered) - 1) / most)] for n in range(most + 1)]


SHORTENED: Mapping[tuple[type, str], Callable[[Any], Any]] = {
    (Startup, "version"): _release_of,
    (Steps, "durations"): _quantiles,
    (Track, "samples"): _ends,
    (Waits, "samples"): _ends,
}
"""Fields of which less is enough than they hold."""


@cache
def record_writer(kind: type) -> RecordText:
    return RecordText(kind)


def record_text(value: Any) -> str:
    kind: type = type(value)
    return record_writer(kind)(value)


def is_closed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(is_closed, value))
    return not isinstance(value, str) or _is_closed_word(value)


@lru_cache(maxsize=4096)
def _is_closed_word(value: str) -> bool:
    return _WORD.fullmatch(value) is not None


@lru_cache(maxsize=1024)
def _is_word(value: str) -> bool:
    return bool(_WORD.fullmatch(value) or _RELEASE.fullmatch(value))


# --- and back ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shift:
    """What is added to moments: `clock` to those of our clock, `look` to those of looks."""

    clock: float
    look: float

    def of(self, kind: str) -> float:
        return {PLAIN: 0.0, CLOCK: self.clock, LOOK: self.look}[kind]


def record(hint: type, value: Any, shift: Shift) -> Any:
    """The record of a plain value; ValueError when it is none."""
    if not isinstance(value, dict):
        raise ValueError(f"no {hint.__name__}")
    hints, known = _hints(hint), {}
    for name, kind in CARRIED[hint].items():
        if name in value:
            by = shift.of(kind)
            known[name] = (
                _sampled(value[name], shift)
                if _is_samples(hint, name)
                else read_value(value[name], hints[name], by, shift)
            )
    for name, each in known.items():
        if each is not None and each not in CLOSED.get((hint, name), (each,)):
            raise ValueError(f"an unknown {name}")
    private = {name: known.pop(name) for name in list(known) if name.startswith("_")}
    made = _made(hint, known)
    for name, each in private.items():
        setattr(made, name, each)
    return made


def _made(hint: type, known: dict[str, Any]) -> Any:
    """The record; its rows keep the bound they were made with."""
    for each in fields(hint):
        if isinstance(known.get(each.name), deque) and each.default_factory is not MISSING:
            row = each.default_factory()
            row.extend(known[each.name])
            known[each.name] = row
    try:
        return hint(**known)
    except TypeError:
        raise ValueError(f"an incomplete {hint.__name__}") from None


@cache
def _hints(hint: type) -> Mapping[str, Any]:
    return get_type_hints(hint)


def _is_samples(hint: type, name: str) -> bool:
    return hint is Track and name == "samples"


def _sampled(value: Any, shift: Shift) -> deque[tuple[float, float]]:
    """Samples of a track: only the first number of each is a moment."""
    pairs = read_value(value, list[tuple[float, float]], 0.0, shift)
    return deque((at + shift.clock, amount) for at, amount in pairs)


def read_value(value: Any, hint: Any, by: float, shift: Shift) -> Any:
    """A plain value as what the annotation says; ValueError when it is something else."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None and type(None) in arguments:
            return None
        return read_value(value, next(each for each in arguments if each is not type(None)), by, shift)
    if origin is None:
        is_record = isinstance(hint, type) and is_dataclass(hint)
        return record(hint, value, shift) if is_record else _scalar(value, hint, by)
    if not isinstance(value, list) or len(value) > MOST_ITEMS:
        raise ValueError("no list, or too long a one")
    return _container(value, origin, arguments, by, shift)


def _container(value: list[Any], origin: Any, arguments: tuple[Any, ...], by: float, shift: Shift) -> Any:
    if origin is tuple:
        several = arguments[:1] * len(value) if Ellipsis in arguments else arguments
        if len(several) != len(value):
            raise ValueError("a tuple of another length")
        return tuple(read_value(each, kind, by, shift) for each, kind in zip(value, several, strict=True))
    if issubclass(origin, Mapping):
        pairs = [read_value(pair, tuple[Any, Any], 0.0, shift) for pair in value]
        return {
            read_value(key, arguments[0], 0.0, shift): read_value(each, arguments[1], by, shift) for key, each in pairs
        }
    return origin(read_value(each, arguments[0], by, shift) for each in value)


def _scalar(value: Any, hint: Any, by: float) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) + by if abs(value) < 1e300 else math.nan
        if math.isfinite(number):
            return number
    elif hint is str:
        if isinstance(value, str) and _is_word(value):
            return value
    elif type(value) is hint and abs(value) < 1 << 62:
        return value
    raise ValueError(f"no {hint}")


# --- one server -----------------------------------------------------------------------------------------------


def tracks_text(timeline: ServerTimeline, seal: Seal) -> str:
    """[signal, labels without the server, track] of every series that is kept."""
    found, write = list[str](), record_writer(Track)
    for name, tracks in timeline.tracks.items():
        if name not in CARRIED_SIGNALS:
            continue
        for labels, track in tracks.items():
            rest = (sealed_log(timeline.name, labels[1], seal),) if name == signals.LOG_BYTES.name else labels[1:]
            if (words := _labels_text(rest)) is not None:
                found.append(f'["{name}",{words},{write(track)}]')
    return list_text(found)


@lru_cache(maxsize=4096)
def _labels_text(labels: tuple[str, ...]) -> str | None:
    """None where one is of no closed set."""
    return list_text(f'"{label}"' for label in labels) if is_closed(labels) else None


def sealed_log(server: str, log: str, seal: Seal) -> str:
    """The hash of the name of a log; one that was not found again yet is a hash already."""
    return log if log.startswith(HASHED) else HASHED + seal("log", server, log)


def timeline_text(timeline: ServerTimeline, seal: Seal) -> str:
    parts = record_writer(ServerTimeline).parts(timeline)
    by_log = {sealed_log(timeline.name, log, seal): at for log, at in timeline.progress_by_log.items()}
    parts["progress_by_log"] = writer_of(dict[str, float])(by_log)
    parts["tracks"] = tracks_text(timeline, seal)
    return object_text(parts)


def restore(timeline: ServerTimeline, document: Any, shift: Shift, measured: float, gap: float) -> None:
    """Put back what was known of this start.  ValueError (and nothing done) when the document is none."""
    if not isinstance(document, dict):
        raise ValueError("no timeline")
    hints, known = _hints(ServerTimeline), dict[str, Any]()
    for name, kind in CARRIED[ServerTimeline].items():
        if name in document:
            known[name] = read_value(document[name], hints[name], shift.of(kind), shift)
    tracks = dict[str, dict[tuple[str, ...], Track]]()
    if any(event not in COUNTERS for event, _ in known.get("steps", ())):
        raise ValueError("an unknown counter")
    if "deadlines" in known and any(clock not in CLOCKS for clock, _ in known["deadlines"].waits):
        raise ValueError("an unknown clock")
    for name, labels, track in read_value(document.get("tracks", []), list[tuple[str, list[str], Any]], 0.0, shift):
        kept = record(Track, track, shift)
        _allow_idle(name, labels, kept, gap)
        if name in CARRIED_SIGNALS:
            tracks.setdefault(name, {})[timeline.name, *labels] = kept
    for name, value in known.items():
        setattr(timeline, name, value)
    timeline.tracks = tracks
    for waits in timeline.waits.values():
        waits._measured = measured
    children = timeline.children_cpu
    if children.known is not None and children.read_at is not None:
        children.known += IDLE_CORES * gap
        children.read_at -= children.usual_gap  # its moves are rates: the next look is not the same one


def _allow_idle(name: str, labels: list[str], track: Track, gap: float) -> None:
    """What a stuck process does in the gap is no move after it."""
    amount = gap * IDLE_AMOUNTS.get((name, labels[1] if len(labels) > 1 else ""), 0.0)
    track.samples = deque((at, value + amount) for at, value in track.samples)
