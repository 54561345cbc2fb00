"""What outlasts a restart of stallwatch: timelines and episodes as a plain document, and back.

Pure: the document is written and read by state_file.  It holds numbers, and words of closed sets; whatever names
something (a server, its log, its model) stands there as a keyed hash only, which is compared with the hash of what
is found after the restart.  See docs/VERDICTS.md, "Restarts of stallwatch".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from . import signals
from .cards import Cards
from .episodes import FAILED_KEPT_SECONDS, Episode, Episodes, Startups
from .idle_power import LARGEST_WATTS
from .kept import (
    CARRIED,
    HASHED,
    MOST_ITEMS,
    PROCESS_SIGNALS,
    Document,
    Hashes,
    Seal,
    Shift,
    is_closed,
    json_text,
    list_text,
    object_text,
    read_value,
    record,
    record_text,
    restore,
    sealed_log,
    timeline_text,
    writer_of,
)
from .learned import MOST_KINDS, Kind, Row, kind_of, plain_kinds
from .model import (
    ERROR_KINDS,
    EVENTS,
    STARTUP_BUCKETS_SECONDS,
    LogCounts,
    LogSums,
    ProcessId,
    RankName,
    Reading,
    Server,
)
from .server_timeline import ServerTimeline
from .timeline import Timeline
from .tracks import Track

ANOTHER_START = -1.0
"""In place of the Unix time of a start before the restart, which is not the one that is found now."""

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
LARGEST_COUNT = 1 << 53

URGENCY = ("failed", "stalled", "suspect", "unknown", "quiet")
"""States in the order in which servers are kept when there is no room for all."""

Urgency = tuple[int, float]
"""Smaller is more urgent: by the state, then the one that was saved later."""

Place = tuple[str, tuple[int, int], int, str]
"""One followed log: name, (device, inode), bytes of the file that were told of, and the mark of these bytes."""


@dataclass(slots=True)
class Settling:
    """A server whose series are found again one by one.  Moments are of our clock."""

    since: float
    ranks: set[str]  # alive before and not found again yet
    awaited: set[tuple[str, tuple[str, ...]]]  # (signal, labels) of tracks without a reading yet


@dataclass(slots=True)
class Memory:
    """What was known before the restart, until it is found again; and all that is known, as a document.

    `load` takes the document of the process before.  `position`, `counted` and `starts_before` are asked by other
    threads: what they rest on does not change after that.
    """

    seal: Seal
    boot: str  # identity of this boot of this host, as a hash
    unusable: int = 0  # servers of the document that could not be read
    _servers: dict[str, dict[str, Any]] = field(default_factory=dict)  # hash of the name -> entry
    _startups: dict[str, tuple[list[int], float]] = field(default_factory=dict)
    _cards: dict[str, float] = field(default_factory=dict)  # hash of what it is about -> watts
    _learned: dict[str, Kind] = field(default_factory=dict)  # until the first servers are met
    _positions: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    _sums: Mapping[str, Mapping[str, LogSums]] = field(default_factory=dict)  # hash of the start -> of the log -> sums
    _starts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    _met: dict[str, ProcessId] = field(default_factory=dict)
    _settling: dict[str, Settling] = field(default_factory=dict)
    _hashes: Hashes = field(init=False)

    def __post_init__(self) -> None:
        self._hashes = Hashes(self.seal)

    def load(self, kept: Any, monotonic: float) -> str | None:
        """Take a document in.  None when it is of this boot, else the reason why nothing of it is used.

        But what was learned of cards and of starts is used whenever they are found again: neither is of a boot.
        """
        if isinstance(kept, dict):
            self._learned = dict(_kinds(_listed(kept.get("learned"), MOST_KINDS)))
            self._cards = dict(_card_figures(_listed(kept.get("cards"), MOST_CARD_FIGURES)))
        if not isinstance(kept, dict) or kept.get("boot") != self.boot:
            return "of another boot or host"
        entries = [entry for entry in _listed(kept.get("servers"), MOST_SERVERS) if _is_entry(entry, monotonic)]
        self._servers = {entry["name"]: entry for entry in entries}
        self._starts = {entry["name"]: (entry["start"], entry["starts"]) for entry in entries}
        self._sums = {entry["start"]: {sums.key: sums for sums in _log_sums(entry)} for entry in entries}
        self._positions = dict(position for entry in entries for position in _positions(entry)) | {
            sums.position: (sums.told, sums.mark) for of in self._sums.values() for sums in of.values() if sums.position
        }
        self._startups = dict(_startups(_listed(kept.get("startups"), MOST_STARTUPS)))
        return None

    # --- asked by the sources ---------------------------------------------------------------------------------

    def starts_before(self, name: str, root: ProcessId) -> int:
        """Starts of a server that were counted before the restart, without the present one."""
        start, starts = self._starts.get(self.seal("name", name), ("", 0))
        return max(0, starts - (start == self._start(name, root)))

    def position(self, server: Server, log: str, file: tuple[int, int]) -> tuple[int, str] | None:
        """How many bytes of a log were told of before the restart, and their mark; None = nothing is known."""
        return self._positions.get(self.log_key(server, log, *file))

    def counted(self, server: Server) -> Mapping[str, LogSums]:
        """What was counted of the logs of this start of a server, by `log_key`; of an old document nothing."""
        return self._sums.get(self._start(server.name, server.root), {})

    def _start(self, name: str, root: ProcessId) -> str:
        return self.seal("start", name, root.pid, root.start_ticks)

    def log_key(self, server: Server, log: str, *file: int) -> str:
        """Hash of a log of this start of a server, or of the file (device, inode) that it is in."""
        return self.seal(*_log_words(server, log, *file))

    # --- after the restart --------------------------------------------------------------------------------------

    def meet(
        self, timeline: Timeline, episodes: Episodes, servers: Iterable[Server], at: float, measured: float
    ) -> tuple[RankName, ...]:
        """Put back what was known of servers that are found, and return which process the log said is which rank.

        `at` is on our clock, `measured` the same moment without its pauses taken off.
        """
        if self._cards:
            self._recall_cards(timeline.cards)
        if episodes.learned.seal is not self.seal:
            episodes.learned.use(self.seal, self._learned)
            self._learned = {}
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
        is_known = same or server.starts == 0
        self._put_back(episodes.episode(server.name), kept, timeline, same=is_known, is_counted=counted == gap)
        if same and server.starts:
            self._settling[server.name] = _settling(timeline, at)
            yield from _rank_names(server.name, entry)

    @staticmethod
    def _put_back(episode: Episode, kept: Episode, timeline: ServerTimeline, *, same: bool, is_counted: bool) -> None:
        """The story of the name goes on; of another start only what outlasts a start is kept.

        A row of starts that end does: the start that is found now is the next of them.
        """
        episode.stalled_seconds = kept.stalled_seconds
        was_over = kept.restarts.is_loop or kept.restarts.over_at is not None  # else it may have become ready meanwhile
        if not same and was_over and is_counted:
            episode.restarts, episode.verdict, episode.was_ready = kept.restarts, kept.verdict, kept.was_ready
            episode.start_timestamp = ANOTHER_START
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
        timeline.look_anew()
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
            for signal in PROCESS_SIGNALS:
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
            _find_log(timeline, settling, labels, sealed_log(labels[0], labels[1], self.seal))
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
        sums: Mapping[str, Iterable[LogSums]] = MappingProxyType({}),
    ) -> Document:
        """All that is known, the most urgent server first.  `clock` and `monotonic` are the same moment.

        `places`: server -> its followed logs as of what the timeline was told, and `sums` what was counted of them.
        """
        by_server: dict[str, list[tuple[int, str]]] = {}
        for name in names:
            if is_closed(name.rank):
                by_server.setdefault(name.server, []).append((name.pid, name.rank))
        self._hashes.begin()
        entries = [
            entry
            for known in timeline
            if (entry := self._entry(known, episodes, by_server, places, sums, clock, monotonic)) is not None
        ]
        for waiting in self._servers.values():
            if monotonic - waiting["saved"] <= FAILED_KEPT_SECONDS:
                entries.append((_urgency(waiting["episode"]["verdict"]["state"], waiting["saved"]), json_text(waiting)))
        entries.sort(key=itemgetter(0))
        startups = {
            self._hashes("startups", *kind): (s.counts, s.total_seconds) for kind, s in episodes.kept_startups.items()
        }
        kept = list((self._startups | startups).items())[-MOST_STARTUPS:]
        figures = {self._hashes("card", *words): watts for words, watts in timeline.cards.kept() if _is_watts(watts)}
        cards = self._cards | figures
        learned = episodes.learned.kinds if episodes.learned.seal is self.seal else self._learned
        rest = {
            "boot": self.boot,
            "startups": [[key, list(counts), total] for key, (counts, total) in kept],
            "learned": plain_kinds(learned),
            "cards": [[key, watts] for key, watts in cards.items()][-MOST_CARD_FIGURES:],
        }
        return Document(tuple(text for _, text in entries[:MOST_SERVERS]), rest)

    def _entry(
        self,
        timeline: ServerTimeline,
        episodes: Episodes,
        names: Mapping[str, Iterable[tuple[int, str]]],
        places: Mapping[str, Iterable[Place]],
        sums: Mapping[str, Iterable[LogSums]],
        clock: float,
        monotonic: float,
    ) -> tuple[Urgency, str] | None:
        server, episode = timeline.server, episodes.episode(timeline.name)
        if server is None or episode.verdict is None:
            return None
        if server.starts == 0 and episode.verdict.state != "failed":
            return None
        counted = sums.get(server.name)  # None = its logs were not looked at yet: what was known stays
        start = self._hashes("start", server.name, server.root.pid, server.root.start_ticks)
        logs = [
            (self._hashes(*_log_words(server, log, *file)), told, mark)
            for log, file, told, mark in places.get(server.name, ())
        ]
        try:
            parts = {
                "name": f'"{self._hashes("name", server.name)}"',
                "start": f'"{start}"',
                "saved": _number_text(monotonic),
                "clock": _number_text(clock),
                "starts": str(server.starts),
                "episode": record_text(episode),
                "timeline": "null" if timeline.root_gone_at is not None else timeline_text(timeline, self._hashes),
                "ranks": _ranks_text(names.get(server.name, ())),
                "logs": _logs_text(logs),
                "counted": list_text(map(_sums_text, self.counted(server).values() if counted is None else counted)),
            }
        except (ValueError, TypeError, LookupError):
            return None  # a number or a word that is none: this server begins anew
        return _urgency(episode.verdict.state, monotonic), object_text(parts)


_number_text, _word_text = writer_of(float), writer_of(str)
_ranks_text, _logs_text = writer_of(list[tuple[int, str]]), writer_of(list[tuple[str, int, str]])
_streams_text, _counts_text = writer_of(Mapping[str, tuple[int, ...]]), writer_of(Mapping[str, int])


def _sums_text(sums: LogSums) -> str:
    words = _word_text(sums.key), _word_text(sums.position), str(sums.told), _word_text(sums.mark)
    counts = _streams_text(sums.counts.streams), _counts_text(sums.counts.events), _counts_text(sums.counts.errors)
    return list_text((*words, *counts))


def _log_words(server: Server, log: str, *file: int) -> tuple[str | int, ...]:
    return "position" if file else "log", server.name, server.root.pid, server.root.start_ticks, log, *file


def _urgency(state: str, saved: float) -> Urgency:
    return (URGENCY.index(state) if state in URGENCY else len(URGENCY)), -saved


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
    for labels in [labels for labels in tracks if labels[1].startswith(HASHED)]:
        del tracks[labels]
    for log in [log for log in timeline.progress_by_log if log.startswith(HASHED)]:
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
            key, told, mark = read_value(each, tuple[str, int, str], 0.0, Shift(0.0, 0.0))
        except ValueError:
            continue
        yield key, (told, mark)


def _log_sums(entry: Mapping[str, Any]) -> Iterator[LogSums]:
    hint = tuple[str, str, int, str, dict[str, tuple[int, ...]], dict[str, int], dict[str, int]]
    for each in _listed(entry.get("counted"), MOST_ITEMS):
        try:
            key, position, told, mark, streams, events, errors = read_value(each, hint, 0.0, Shift(0.0, 0.0))
        except (ValueError, TypeError):  # a key of a row may be anything
            continue
        numbers = [number for row in streams.values() for number in row]
        if all(0 <= number < LARGEST_COUNT for number in (*numbers, *events.values(), *errors.values())):
            known = {word: events[word] for word in EVENTS if word in events}
            kinds = {word: errors[word] for word in ERROR_KINDS if word in errors}
            yield LogSums(key, position, told, mark, LogCounts(streams, known, kinds))


def _startups(items: list[Any]) -> Iterator[tuple[str, tuple[list[int], float]]]:
    for each in items:
        try:
            key, counts, total = read_value(each, tuple[str, list[int], float], 0.0, Shift(0.0, 0.0))
        except ValueError:
            continue
        if len(counts) == len(STARTUP_BUCKETS_SECONDS) + 1 and min(counts) >= 0:
            yield key, (counts, total)


def _card_figures(items: list[Any]) -> Iterator[tuple[str, float]]:
    for each in items:
        try:
            key, watts = read_value(each, tuple[str, float], 0.0, Shift(0.0, 0.0))
        except ValueError:
            continue
        if _is_watts(watts):
            yield key, watts


def _kinds(items: list[Any]) -> Iterator[tuple[str, Kind]]:
    for each in items:
        try:
            key, *known = read_value(each, tuple[str, int, float, float, Row, Row], 0.0, Shift(0.0, 0.0))
            yield key, kind_of(*known)
        except ValueError:
            continue


def _is_watts(value: float) -> bool:
    return 0 < value < LARGEST_WATTS


def _rank_names(server: str, entry: Mapping[str, Any]) -> Iterator[RankName]:
    for each in _listed(entry.get("ranks"), MOST_RANK_NAMES):
        try:
            pid, rank = read_value(each, tuple[int, str], 0.0, Shift(0.0, 0.0))
        except ValueError:
            continue
        yield RankName(server, pid, rank)
