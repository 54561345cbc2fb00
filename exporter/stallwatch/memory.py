"""What outlasts a restart of stallwatch: timelines and episodes as a plain document, and back.

Pure: the document is written and read by state_file.  It holds numbers, and words of closed sets; whatever names
something (a server, its log, its model) stands there as a keyed hash only, which is compared with the hash of what
is found after the restart.  See docs/VERDICTS.md, "Restarts of stallwatch".
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from . import signals
from .cards import Cards
from .episodes import FAILED_KEPT_SECONDS, Episode, Episodes, Startups
from .model import (
    PHASES,
    REASONS,
    STARTUP_BUCKETS_SECONDS,
    STATES,
    WAITS,
    ProcessId,
    RankName,
    Reading,
    Server,
    Signal,
    Verdict,
)
from .server_timeline import ServerTimeline, Speaker, Stats, Steps, Timeouts
from .startup import COUNTERS, RankStartup, Startup
from .timeline import MIB, Timeline
from .tracks import Track, Waits, WaitSample

VERSION = 1

COUNTED_GAP_SECONDS = 600.0
"""A time without us up to this long counts as silence when nothing moved in it; of a longer one nothing counts."""

NAMING_SECONDS = 20.0
"""How long the first looks may find fewer ranks than before: some are named by their log, which is read again."""

HISTORY_SECONDS = 120.0
"""How long a log may take to be read again before it counts as unreadable."""

MOST_SERVERS = 256
MOST_STARTUPS = 64
MOST_RANK_NAMES = 1024
MOST_CARD_FIGURES = 2048
LARGEST_WATTS = 1e5
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

_PROCESS_SIGNALS = (
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
CARRIED_SIGNALS: Mapping[str, Signal] = {signal.name: signal for signal in (*_PROCESS_SIGNALS, *_OTHER_SIGNALS)}
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
    Episode: {
        "verdict": PLAIN,
        "since_timestamp": PLAIN,
        "stalled_seconds": PLAIN,
        "judged_at": CLOCK,
        "startup_seconds": PLAIN,
        "was_ready": PLAIN,
    },
    Verdict: {"state": PLAIN, "reason": PLAIN, "since": CLOCK, "suspect_rank": PLAIN},
}
"""Record -> its fields that are kept, and what their numbers are.  A field that holds records is PLAIN here."""

LEFT_OUT: Mapping[type, frozenset[str]] = {
    # Given by what is found after the restart, or by the first verdict (`is_idle`); `tracks` are kept apart, for their
    # labels are names, and so is what was learned of the node's cards.  What they did before we were away is no move.
    ServerTimeline: frozenset(("name", "server", "start_timestamp", "tracks", "cards", "is_idle")),
    Track: frozenset(("rate",)),  # of two neighbouring looks
    Waits: frozenset(("_measured",)),  # set anew, so that the gap does not end what lasted before and lasts
    Episode: frozenset(("start_timestamp",)),  # as Unix time, which follows steps of the wall clock
}
"""Record -> its fields that are not kept.  tests/test_memory.py holds that no field is forgotten here."""

CLOSED: Mapping[tuple[type, str], tuple[str, ...]] = {
    (Startup, "phase"): PHASES,
    (RankStartup, "phase"): PHASES,
    (Verdict, "state"): STATES,
    (Verdict, "reason"): REASONS,
    (WaitSample, "main"): WAITS,
}
"""Fields whose words another version of ours may have more of than this one knows."""

URGENCY = ("failed", "stalled", "suspect", "unknown", "quiet")
"""States in the order in which servers are kept when there is no room for all."""

_WORD = re.compile(r"#?[A-Za-z0-9_:-]{0,64}")
_RELEASE = re.compile(r"\d[0-9A-Za-z.+-]{0,31}")
_HASHED = "#"

Seal = Callable[..., str]
"""Keyed hash of some words and numbers, as hexadecimal digits."""

Place = tuple[str, tuple[int, int], int, str]
"""One followed log: name, (device, inode), bytes of the file that were told of, and the mark of these bytes."""


# --- records to plain values and back -------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Numbers, words and lists of a value.  Words that are of no closed set are left out."""
    if is_dataclass(value):
        kept = {name: getattr(value, name) for name in CARRIED[type(value)]}
        return {name: plain(_condensed(name, each)) for name, each in kept.items() if not _is_infinite(each)}
    if isinstance(value, Mapping):
        return [[plain(key), plain(each)] for key, each in value.items() if _is_closed(key)]
    if isinstance(value, frozenset | set):
        return sorted(plain(each) for each in value if _is_closed(each))
    if isinstance(value, list | tuple | deque):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("no finite number")
    return value if not isinstance(value, str) or _is_word(value) else ""


def _is_infinite(value: Any) -> bool:
    """Never, or for ever: as it is by itself, so it need not be kept."""
    return isinstance(value, float) and math.isinf(value)


def _is_closed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_closed, value))
    return not isinstance(value, str) or _WORD.fullmatch(value) is not None


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
                _sampled(value[name], shift) if _is_samples(hint, name) else _read(value[name], hints[name], by, shift)
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
    pairs = _read(value, list[tuple[float, float]], 0.0, shift)
    return deque((at + shift.clock, amount) for at, amount in pairs)


def _read(value: Any, hint: Any, by: float, shift: Shift) -> Any:
    """A plain value as what the annotation says; ValueError when it is something else."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(value, next(each for each in arguments if each is not type(None)), by, shift)
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
        return tuple(_read(each, kind, by, shift) for each, kind in zip(value, several, strict=True))
    if issubclass(origin, Mapping):
        pairs = [_read(pair, tuple[Any, Any], 0.0, shift) for pair in value]
        return {_read(key, arguments[0], 0.0, shift): _read(each, arguments[1], by, shift) for key, each in pairs}
    return origin(_read(each, arguments[0], by, shift) for each in value)


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
            rest = [_sealed_log(timeline.name, labels[1], seal)] if name == signals.LOG_BYTES.name else labels[1:]
            if _is_closed(tuple(rest)):
                found.append([name, list(rest), plain(track)])
    return found


def _sealed_log(server: str, log: str, seal: Seal) -> str:
    """The hash of the name of a log; one that was not found again yet is a hash already."""
    return log if log.startswith(_HASHED) else _HASHED + seal("log", server, log)


def timeline_of(timeline: ServerTimeline, seal: Seal) -> dict[str, Any]:
    document: dict[str, Any] = plain(timeline)
    document["progress_by_log"] = [
        [_sealed_log(timeline.name, log, seal), at] for log, at in timeline.progress_by_log.items()
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
            known[name] = _read(document[name], hints[name], shift.of(kind), shift)
    tracks = dict[str, dict[tuple[str, ...], Track]]()
    if any(event not in COUNTERS for event, _ in known.get("steps", ())):
        raise ValueError("an unknown counter")
    for name, labels, track in _read(document.get("tracks", []), list[tuple[str, list[str], Any]], 0.0, shift):
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


# --- all of them ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Settling:
    """A server whose series are found again one by one.  Moments are of our clock."""

    since: float
    ranks: set[str]  # alive before and not found again yet
    awaited: set[tuple[str, tuple[str, ...]]]  # (signal, labels) of tracks without a reading yet


@dataclass(slots=True)
class Memory:
    """What was known before the restart, until it is found again; and all that is known, as a document.

    `load` takes the document of the process before.  `position` and `starts_before` are asked by other threads:
    what they rest on does not change after that.
    """

    seal: Seal
    boot: str  # identity of this boot of this host, as a hash
    unusable: int = 0  # servers of the document that could not be read
    _servers: dict[str, dict[str, Any]] = field(default_factory=dict)  # hash of the name -> entry
    _startups: dict[str, tuple[list[int], float]] = field(default_factory=dict)
    _cards: dict[str, float] = field(default_factory=dict)  # hash of what it is about -> watts
    _positions: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    _starts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    _met: dict[str, ProcessId] = field(default_factory=dict)
    _settling: dict[str, Settling] = field(default_factory=dict)

    def load(self, kept: Any, monotonic: float) -> str | None:
        """Take a document in.  None when it is of this boot, else the reason why nothing of it is used.

        But what was learned of cards is used whenever they are found again: their names are the same for ever.
        """
        if isinstance(kept, dict):
            self._cards = dict(_card_figures(_listed(kept.get("cards"), MOST_CARD_FIGURES)))
        if not isinstance(kept, dict) or kept.get("boot") != self.boot:
            return "of another boot or host"
        entries = [entry for entry in _listed(kept.get("servers"), MOST_SERVERS) if _is_entry(entry, monotonic)]
        self._servers = {entry["name"]: entry for entry in entries}
        self._starts = {entry["name"]: (entry["start"], entry["starts"]) for entry in entries}
        self._positions = dict(position for entry in entries for position in _positions(entry))
        self._startups = dict(_startups(_listed(kept.get("startups"), MOST_STARTUPS)))
        return None

    # --- asked by the sources ---------------------------------------------------------------------------------

    def starts_before(self, name: str, root: ProcessId) -> int:
        """Starts of a server that were counted before the restart, without the present one."""
        start, starts = self._starts.get(self.seal("name", name), ("", 0))
        return max(0, starts - (start == self._start(name, root)))

    def position(self, server: Server, log: str, file: tuple[int, int]) -> tuple[int, str] | None:
        """How many bytes of a log were told of before the restart, and their mark; None = nothing is known."""
        return self._positions.get(self._log_key(server, log, file))

    def _start(self, name: str, root: ProcessId) -> str:
        return self.seal("start", name, root.pid, root.start_ticks)

    def _log_key(self, server: Server, log: str, file: tuple[int, int]) -> str:
        return self.seal("position", server.name, server.root.pid, server.root.start_ticks, log, *file)

    # --- after the restart --------------------------------------------------------------------------------------

    def meet(
        self, timeline: Timeline, episodes: Episodes, servers: Iterable[Server], at: float, measured: float
    ) -> tuple[RankName, ...]:
        """Put back what was known of servers that are found, and return which process the log said is which rank.

        `at` is on our clock, `measured` the same moment without its pauses taken off.
        """
        if self._cards:
            self._recall_cards(timeline.cards)
        names: list[RankName] = []
        met, self._met = self._met, {}  # only of servers that are there: names may come and go without end
        for server in servers:
            if self._startups:
                self._adopt_startups(server, episodes)
            self._met[server.name] = server.root
            if met.get(server.name) != server.root:
                names += self._recall(timeline.of(server.name), episodes, server, at, measured)
        return tuple(names)

    def _recall_cards(self, cards: Cards) -> None:
        for words in list(cards.wanted()):
            watts = self._cards.pop(self.seal("card", *words), None)
            if watts is not None:
                cards.recall(words, watts)

    def _adopt_startups(self, server: Server, episodes: Episodes) -> None:
        kind = (server.framework, server.model, server.speculative)
        found = self._startups.pop(self.seal("startups", *kind), None)
        if found is not None and kind not in episodes.kept_startups:
            episodes.kept_startups[kind] = Startups(list(found[0]), found[1])

    def _recall(
        self, timeline: ServerTimeline | None, episodes: Episodes, server: Server, at: float, measured: float
    ) -> Iterator[RankName]:
        key = self.seal("name", server.name)
        entry = self._servers.get(key)
        if timeline is None or entry is None:
            return
        gap = max(0.0, measured - entry["saved"])
        counted = gap if gap <= COUNTED_GAP_SECONDS else 0.0
        shift = Shift(clock=at - entry["clock"] - counted, look=at - entry["clock"])
        same = entry["start"] == self._start(server.name, server.root)
        try:
            kept = record(Episode, entry.get("episode"), shift)
            failed = kept.verdict is not None and kept.verdict.state == "failed"
            if server.starts == 0 and not failed:
                return  # a configured server that may still come
            if same and server.starts:
                restore(timeline, entry.get("timeline"), shift, measured, gap)
        except ValueError:
            self.unusable += 1
            del self._servers[key]
            return
        del self._servers[key]
        self._put_back(episodes.episode(server.name), kept, timeline, same or server.starts == 0)
        if same and server.starts:
            self._settling[server.name] = _settling(timeline, at)
            yield from _rank_names(server.name, entry)

    @staticmethod
    def _put_back(episode: Episode, kept: Episode, timeline: ServerTimeline, same: bool) -> None:
        """The story of the name goes on; of another start only what outlasts a start is kept."""
        episode.stalled_seconds = kept.stalled_seconds
        if not same:
            return
        for each in CARRIED[Episode]:
            setattr(episode, each, getattr(kept, each))
        episode.start_timestamp = timeline.start_timestamp

    def settle(self, timeline: Timeline, readings: Iterable[Reading], at: float) -> Iterable[Reading]:
        """The readings as the timeline may take them while servers are found again.

        A first look after a restart knows less than the last one before it: ranks their log must name first, a log
        that must be read to its end first, sums without processes that are gone.  None of this is news.
        """
        if not self._settling:
            return readings
        readings = list(readings)
        held = {name for name in self._settling if self._is_held(name, timeline.of(name), readings, at)}
        passed = [
            reading
            for reading in readings
            if not reading.labels
            or reading.labels[0] not in self._settling
            or (reading.labels[0] not in held and self._passes(reading, timeline.of(reading.labels[0]), at))
        ]
        for name, settling in list(self._settling.items()):
            known = timeline.of(name)
            if known is None or at - settling.since > HISTORY_SECONDS or not settling.awaited:
                del self._settling[name]
                if known is not None:
                    _drop_hashed(known)
        return passed

    def _is_held(self, name: str, timeline: ServerTimeline | None, readings: list[Reading], at: float) -> bool:
        """Whether this is a look at the processes of a server that does not find all of its ranks yet."""
        settling = self._settling[name]
        own = [reading for reading in readings if reading.labels and reading.labels[0] == name]
        alive = next((reading.value for reading in own if reading.signal.name == signals.SERVER_ALIVE.name), None)
        if alive is None or timeline is None:
            return False
        settling.ranks -= {reading.labels[1] for reading in own if reading.signal.name == signals.RANK_ALIVE.name}
        if settling.ranks and alive and at - settling.since < NAMING_SECONDS:
            for signal in _PROCESS_SIGNALS:
                _touch(timeline.of(signal).values(), at)
            return True
        for rank in settling.ranks:
            _drop_rank(timeline, rank)
        settling.ranks = set()
        return False

    def _passes(self, reading: Reading, timeline: ServerTimeline | None, at: float) -> bool:
        name, labels = reading.signal.name, reading.labels
        settling = self._settling[labels[0]]
        if timeline is None:
            return True
        if name == signals.LOG_BYTES.name:
            _find_log(timeline, settling, labels, _sealed_log(labels[0], labels[1], self.seal))
        track = timeline.tracks.get(name, {}).get(labels)
        if track is None or (name, labels) not in settling.awaited:
            return True
        if name == signals.LOG_BYTES.name and reading.reason == "timeout":
            _touch((track,), at)
            return False
        settling.awaited.discard((name, labels))
        fell = reading.value is not None and track.known is not None and reading.value < track.known
        if reading.signal.kind == "counter" and fell:
            track.known = track.value = None
            track.samples.clear()
        return True

    # --- the document -------------------------------------------------------------------------------------------

    def document(
        self,
        timeline: Timeline,
        episodes: Episodes,
        names: Iterable[RankName],
        places: Mapping[str, Iterable[Place]],
        clock: float,
        monotonic: float,
    ) -> dict[str, Any]:
        """All that is known, the most urgent server first.  `clock` and `monotonic` are the same moment.

        `places`: server -> its followed logs as of what the timeline was told.
        """
        names = list(names)
        entries = [
            entry
            for known in timeline
            if (entry := self._entry(known, episodes, names, places.get(known.name, ()), clock, monotonic)) is not None
        ]
        waiting = [entry for entry in self._servers.values() if monotonic - entry["saved"] <= FAILED_KEPT_SECONDS]
        entries = sorted((*entries, *waiting), key=_urgency)[:MOST_SERVERS]
        startups = {
            self.seal("startups", *kind): (s.counts, s.total_seconds) for kind, s in episodes.kept_startups.items()
        }
        kept = list((self._startups | startups).items())[-MOST_STARTUPS:]
        cards = self._cards | {self.seal("card", *words): watts for words, watts in timeline.cards.kept()}
        return {
            "boot": self.boot,
            "servers": entries,
            "startups": [[key, list(counts), total] for key, (counts, total) in kept],
            "cards": [[key, watts] for key, watts in cards.items()][-MOST_CARD_FIGURES:],
        }

    def _entry(
        self,
        timeline: ServerTimeline,
        episodes: Episodes,
        names: list[RankName],
        places: Iterable[Place],
        clock: float,
        monotonic: float,
    ) -> dict[str, Any] | None:
        server, episode = timeline.server, episodes.episode(timeline.name)
        if server is None or episode.verdict is None:
            return None
        if server.starts == 0 and episode.verdict.state != "failed":
            return None
        try:
            return {
                "name": self.seal("name", server.name),
                "start": self._start(server.name, server.root),
                "saved": monotonic,
                "clock": clock,
                "starts": server.starts,
                "episode": plain(episode),
                "timeline": None if timeline.root_gone_at is not None else timeline_of(timeline, self.seal),
                "ranks": [[n.pid, n.rank] for n in names if n.server == server.name and _is_closed(n.rank)],
                "logs": [[self._log_key(server, log, file), told, mark] for log, file, told, mark in places],
            }
        except ValueError:
            return None  # a number that is none: this server begins anew


def _urgency(entry: Mapping[str, Any]) -> tuple[int, float]:
    state = entry["episode"]["verdict"]["state"]
    return (URGENCY.index(state) if state in URGENCY else len(URGENCY)), -entry["saved"]


def _settling(timeline: ServerTimeline, at: float) -> Settling:
    alive = {labels[1] for labels, track in timeline.of(signals.RANK_ALIVE).items() if track.value}
    awaited = {(name, labels) for name, tracks in timeline.tracks.items() for labels in tracks}
    return Settling(at, alive, awaited)


def _touch(tracks: Iterable[Track], at: float) -> None:
    for track in tracks:
        if track.read_at is not None:
            track.read_at = at


def _drop_rank(timeline: ServerTimeline, rank: str) -> None:
    """A rank that is not found any more: whether it died, or is named otherwise now, cannot be known."""
    for tracks in timeline.tracks.values():
        for labels in [labels for labels in tracks if labels[1:2] == (rank,)]:
            del tracks[labels]
    timeline.waits.pop(rank, None)


def _find_log(timeline: ServerTimeline, settling: Settling, labels: tuple[str, ...], sealed: str) -> None:
    """The log of this name was known by the hash of it."""
    tracks = timeline.tracks.get(signals.LOG_BYTES.name, {})
    if (track := tracks.pop((labels[0], sealed), None)) is not None:
        tracks[labels] = track
        settling.awaited.discard((signals.LOG_BYTES.name, (labels[0], sealed)))
        settling.awaited.add((signals.LOG_BYTES.name, labels))
    if (at := timeline.progress_by_log.pop(sealed, None)) is not None:
        timeline.progress_by_log.setdefault(labels[1], at)


def _drop_hashed(timeline: ServerTimeline) -> None:
    """Logs that did not come again."""
    tracks = timeline.tracks.get(signals.LOG_BYTES.name, {})
    for labels in [labels for labels in tracks if labels[1].startswith(_HASHED)]:
        del tracks[labels]
    for log in [log for log in timeline.progress_by_log if log.startswith(_HASHED)]:
        del timeline.progress_by_log[log]


# --- the document, as it may be after all -----------------------------------------------------------------------


def _listed(value: Any, most: int) -> list[Any]:
    return value[:most] if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _is_entry(entry: Any, monotonic: float) -> bool:
    """Whether it is an entry, written at a time that was."""
    if not isinstance(entry, dict):
        return False
    numbers = all(_is_number(entry.get(name)) for name in ("saved", "clock"))
    words = all(isinstance(entry.get(name), str) for name in ("name", "start"))
    starts = entry.get("starts")
    counted = type(starts) is int and 0 <= starts < 1 << 31
    return numbers and words and counted and _has_verdict(entry) and bool(entry["saved"] <= monotonic)


def _has_verdict(entry: Mapping[str, Any]) -> bool:
    episode = entry.get("episode")
    verdict = episode.get("verdict") if isinstance(episode, dict) else None
    return isinstance(verdict, dict) and isinstance(verdict.get("state"), str)


def _positions(entry: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, str]]]:
    for each in _listed(entry.get("logs"), MOST_ITEMS):
        try:
            key, told, mark = _read(each, tuple[str, int, str], 0.0, Shift(0.0, 0.0))
        except ValueError:
            continue
        yield key, (told, mark)


def _startups(items: list[Any]) -> Iterator[tuple[str, tuple[list[int], float]]]:
    for each in items:
        try:
            key, counts, total = _read(each, tuple[str, list[int], float], 0.0, Shift(0.0, 0.0))
        except ValueError:
            continue
        if len(counts) == len(STARTUP_BUCKETS_SECONDS) + 1 and min(counts) >= 0:
            yield key, (counts, total)


def _card_figures(items: list[Any]) -> Iterator[tuple[str, float]]:
    for each in items:
        try:
            key, watts = _read(each, tuple[str, float], 0.0, Shift(0.0, 0.0))
        except ValueError:
            continue
        if 0 < watts < LARGEST_WATTS:
            yield key, watts


def _rank_names(server: str, entry: Mapping[str, Any]) -> Iterator[RankName]:
    for each in _listed(entry.get("ranks"), MOST_RANK_NAMES):
        try:
            pid, rank = _read(each, tuple[int, str], 0.0, Shift(0.0, 0.0))
        except ValueError:
            continue
        yield RankName(server, pid, rank)
