"""What outlasts a restart of stallwatch of one server: its records as plain values, and back.

Pure.  The tables say which fields are kept, and which numbers are moments; what is read back is taken with suspicion.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from operator import attrgetter
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
_RELEASE = re.compile(r"\d[0-9A-Za-z.+-]{0,31}")
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


# --- records to plain values and back -------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Numbers, words and lists of a value.  Words that are of no closed set are left out."""
    kind = type(value)
    if kind is float:
        return _finite(value)
    if kind in _ITSELF:
        return value
    if kind is str:
        return value if _is_word(value) else ""
    if kind in CARRIED:
        return _plain_record(value, kind)
    if kind is dict or (kind not in _ROWS and isinstance(value, Mapping)):
        return [[plain(key), plain(each)] for key, each in value.items() if is_closed(key)]
    if isinstance(value, frozenset | set):
        return sorted(plain(each) for each in value if is_closed(each))
    return [plain(each) for each in value]


def _plain_record(value: Any, kind: type) -> dict[str, Any]:
    """Without what is infinite.  Most fields are numbers, of which there are thousands: they are looked at once."""
    kept = dict[str, Any]()
    for name, each in zip(CARRIED[kind], _FIELDS[kind](value), strict=False):
        if type(each) in _ITSELF or (type(each) is float and math.isfinite(each)):
            kept[name] = each
        elif not _is_infinite(each):
            kept[name] = plain(_condensed(name, each))
    return kept


_ITSELF = frozenset((int, bool, type(None)))
_ROWS = frozenset((list, tuple, deque))
_FIELDS = {kind: attrgetter(*names, "__class__") for kind, names in CARRIED.items()}
"""Record -> all of its kept fields at once; the last makes a row of a single one, too."""


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("no finite number")
    return value


def _is_infinite(value: Any) -> bool:
    """Never, or for ever: as it is by itself, so it need not be kept."""
    return isinstance(value, float) and math.isinf(value)


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


def _condensed(name: str, value: Any) -> Any:
    """What is enough of a long row, by the name of its field."""
    if name == "version":
        return value if _RELEASE.fullmatch(value) else ""
    if name == "durations":
        ordered, most = sorted(value), MOST_DURATIONS - 1
        return (
            ordered
            if len(ordered) <= most
            else [ordered[round(n * (len(ordered) - 1) / most)] for n in range(most + 1)]
        )
    if name == "samples":
        return (value[0], value[-1]) if len(value) > 2 else value
    return value


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


def tracks_of(timeline: ServerTimeline, seal: Seal) -> list[Any]:
    """[signal, labels without the server, track] of every series that is kept."""
    found = []
    for name, tracks in timeline.tracks.items():
        if name not in CARRIED_SIGNALS:
            continue
        for labels, track in tracks.items():
            rest = [sealed_log(timeline.name, labels[1], seal)] if name == signals.LOG_BYTES.name else labels[1:]
            if is_closed(tuple(rest)):
                found.append([name, list(rest), plain(track)])
    return found


def sealed_log(server: str, log: str, seal: Seal) -> str:
    """The hash of the name of a log; one that was not found again yet is a hash already."""
    return log if log.startswith(HASHED) else HASHED + seal("log", server, log)


def timeline_of(timeline: ServerTimeline, seal: Seal) -> dict[str, Any]:
    document: dict[str, Any] = plain(timeline)
    document["progress_by_log"] = [
        [sealed_log(timeline.name, log, seal), at] for log, at in timeline.progress_by_log.items()
    ]
    document["tracks"] = tracks_of(timeline, seal)
    return document


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
