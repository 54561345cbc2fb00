"""GPU evidence: which cards belong to which server, and when one of its GPU channels moves.

Pure: all times are passed in, in seconds of a clock that does not count our own pauses.  A card's own figures
speak for a server only while nobody else is on the card; what a rank holds on it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from . import signals
from .card import FIGURES, PCIE, Card, Figure, Holder
from .idle_power import IdleKey, IdlePowers
from .model import AMBIGUOUS_CHANNELS, GpuState, Reading
from .tracks import Track

MOST_CARDS = 256
MOST_RANKS_PER_CARD = 256

_FIGURE_ORDER = tuple(signal.name for signal in FIGURES)
_FIGURE_NAMES = frozenset(_FIGURE_ORDER)

_MOVES: Mapping[str, Callable[[Card, float, float], bool]] = {
    "gpu_memory": Card.used_moved,
    "gpu_bus": Card.bus_moved,
    "gpu_power": Card.power_moved,
    "gpu_utilization": Card.utilization_moved,
}
"""Channel -> whether the card's own figures moved (card, time, window)."""

_STRONG_MOVES = frozenset(channel for channel in _MOVES if channel not in AMBIGUOUS_CHANNELS)

_READABLE: Mapping[str, Callable[[Card, float], bool]] = {
    "gpu_memory": lambda card, now: card.reads(now, (signals.GPU_MEMORY_USED.name,)),
    "gpu_bus": lambda card, now: card.reads(now, PCIE),
    "gpu_power": lambda card, now: card.works(now) is not None,
    "gpu_utilization": lambda card, now: card.reads(now, (signals.GPU_UTILIZATION.name,)),
}
"""Channel -> whether the card's own figures for it are readable."""


_IDLE, _WORK = "idle", "work"

Words = tuple[str | int, ...]
"""What a number that outlasts a restart of ours is about: a card's idle power, or its highest minute."""


@dataclass(frozen=True, slots=True)
class Spin:
    """One rank whose card spins, and for how long; not proven while its idle power or its memory's use is unknown."""

    rank: str
    age: float
    is_proven: bool


@dataclass(frozen=True, slots=True)
class Use:
    """A card that a server uses, as of one moment."""

    gpu: str
    card: Card
    ranks: frozenset[str]  # of the server
    is_alone: bool  # nobody else is on the card
    readable: frozenset[str]  # the GPU channels of the server that can be read on it


def _use(gpu: str, card: Card, server: str, now: float) -> Use:
    ranks, is_alone = frozenset(card.ranks_of(server, now)), card.is_alone(server, now)
    readable = [channel for channel, is_read in _READABLE.items() if is_alone and is_read(card, now)]
    if card.knows_held(server, ranks, now):
        readable.append("gpu_memory")
    return Use(gpu, card, ranks, is_alone, frozenset() if card.is_lost(now) else frozenset(readable))


class Cards:
    """All cards of the node.  Feed it with `put`, then `settle`; ask `channel`, `at_rest`, `spins`, `lost` …"""

    def __init__(
        self,
        moved: Callable[[str, str, float, str | None], None],
        window_of: Callable[[str], float],
        may_rest: Callable[[str, float], bool] = lambda server, at: False,
    ) -> None:
        """`moved(server, channel, at, rank)` is called for every move; `window_of(server)` is in seconds.

        `may_rest(server, at)`: whether a card of it that seems to rest is known not to be stuck.
        """
        self._moved = moved
        self._window_of = window_of
        self._may_rest = may_rest
        self._idle = IdlePowers()
        self.call = Track()  # seconds the present call into the driver has been running
        self._cards: dict[str, Card] = {}
        self._gpus: dict[str, set[str]] = {}  # server -> its cards, present and past
        self._pids: dict[Holder, frozenset[str]] = {}
        self._pids_said: dict[Holder, set[str]] = {}  # since the last settling
        self._reading_at: float | None = None  # time of the result that is not settled yet
        self._last_uses: tuple[str, float, list[Use]] | None = None  # of whom, when; until anything is put, or over

    def __len__(self) -> int:
        return len(self._cards)

    def put(self, reading: Reading, at: float, interval: float, measured: float) -> None:
        """Take one reading; those that are not about cards are ignored.

        `interval`: how often that source looks, in seconds.  `measured`: `at` on a clock that counts our pauses.
        """
        self._reading_at, self._last_uses, name = at, None, reading.signal.name
        if name == signals.RANK_INFO.name:
            self._put_tie(reading, at, interval, measured)
        elif name == signals.GPU_PROCESS_MEMORY.name:
            self._put_held(reading, at, interval, measured)
        elif name == signals.GPU_INFO.name:
            if reading.value and (card := self._card(reading.labels[0], at)) is not None:
                card.info = reading.labels
        elif name in _FIGURE_NAMES and (card := self._card(reading.labels[0], at)) is not None:
            card.figures[name].put(reading, at, interval, measured)
            card.touched.add(name)

    def _put_tie(self, reading: Reading, at: float, interval: float, measured: float) -> None:
        """Which card a rank's process is on; an empty label says that nobody knows."""
        server, rank, pid, gpu = reading.labels
        if not reading.value:
            return
        self._pids_said.setdefault((server, rank), set()).add(pid)
        card = self._card(gpu, at) if gpu else None
        if card is not None and (figure := _among(card.ties, (server, rank), at)) is not None:
            figure.put(reading, at, interval, measured)
            self._gpus.setdefault(server, set()).add(gpu)

    def _put_held(self, reading: Reading, at: float, interval: float, measured: float) -> None:
        gpu, server, rank = reading.labels
        card = self._card(gpu, at)
        if card is not None and (figure := _among(card.held, (server, rank), at)) is not None:
            figure.put(reading, at, interval, measured)
            card.holders_touched.add((server, rank))
            self._gpus.setdefault(server, set()).add(gpu)

    def _card(self, gpu: str, at: float) -> Card | None:
        """The card of this name; None when there are too many already that all still speak."""
        card = self._cards.get(gpu)
        if card is None and (len(self._cards) < MOST_CARDS or self._drop_unknown(at)):
            card = self._cards[gpu] = Card()
        return card

    def _drop_unknown(self, at: float) -> bool:
        """Forget the cards of which nothing is recent (MIG instances get a new name each time they are made)."""
        for gpu in [gpu for gpu, card in self._cards.items() if not card.is_known(at)]:
            del self._cards[gpu]
            for gpus in self._gpus.values():
                gpus.discard(gpu)
        return len(self._cards) < MOST_CARDS

    def settle(self, at: float) -> None:
        """Draw what the readings put since the last time say together; once after each result."""
        self._last_uses = None
        for holder, pids in self._pids_said.items():
            if pids.isdisjoint(self._pids.get(holder, pids)):
                self._replace(holder, at)
            self._pids[holder] = frozenset(pids)
        self._pids_said.clear()
        self._reading_at = None
        for gpu, card in self._cards.items():
            if card.touched or card.holders_touched:
                self._settle(gpu, card, at)

    def _replace(self, holder: Holder, at: float) -> None:
        """Another process is this rank now: what the one before held, and where, is no progress of it."""
        for card in self._of(holder[0]):
            if holder in card.ties and card.ties[holder].track.read_at != at:
                del card.ties[holder]
            if holder in card.held:
                card.held[holder].track.begins_anew(at)

    def _settle(self, gpu: str, card: Card, at: float) -> None:
        card.take_power(at)
        card.learned = self._idle.of(card.idle_key(gpu))
        card.note_answers()
        card.note_loss(at)
        owner = card.owner_at(at)
        is_same = owner is not None and owner == card.owner
        if not is_same:
            card.begin_anew(at)
        card.owner = owner
        self._settle_held(card, at)
        if owner is not None:
            window, ranks = self._window_of(owner), card.ranks_of(owner, at)
            moves = [channel for channel, has_moved in _MOVES.items() if has_moved(card, at, window)]
            for channel in moves if is_same else ():
                if channel != "gpu_memory" or not card.knows_held(owner, ranks, at):
                    self._moved(owner, channel, at, next(iter(ranks)) if len(ranks) == 1 else None)
        if card.rests(at) is False:
            card.worked_at = at
        if not is_same:
            card.spins_since = card.below_at = None
        card.note_spin(at)
        self._learn(gpu, card, at, is_same)
        card.touched.clear()
        card.holders_touched.clear()

    def _learn(self, gpu: str, card: Card, at: float, is_same: bool) -> None:
        """What it takes at rest, from a server alone on it that is idle, or on its way and not silent."""
        if not card.has_new_power:
            return
        watts, owner, key = card.power.watts, card.owner, card.idle_key(gpu)
        if owner is None or not card.rests_now(at) or not self._may_rest(owner, at):
            card.rest.end()
        elif watts is None or not is_same:
            card.rest.begin(key)
        elif (mean := card.rest.add(key, watts, card.power.seconds)) is not None:
            self._idle.learn(key, mean)
            card.learned = self._idle.of(key)

    def _settle_held(self, card: Card, at: float) -> None:
        is_lost = card.is_lost(at)
        for holder in sorted(card.holders_touched & card.held.keys()):
            if is_lost:
                card.held[holder].track.begins_anew(at)
            elif card.held_moved(holder, at, self._window_of(holder[0])):
                self._moved(holder[0], "gpu_memory", at, holder[1])

    def has(self, server: str) -> bool:
        """Whether a card is known that the server uses, or used."""
        return bool(self._gpus.get(server))

    def channel(self, server: str, channel: str, now: float) -> bool | None:
        """Whether a GPU channel of a server can be read; None = no card of it is known.

        Silence proves something only when every card is read.  An ambiguous channel is readable by a single one:
        to see one spin is enough.
        """
        if not self.has(server):
            return None
        readable = [channel in use.readable for use in self._present(server, now)]
        return any(readable) if channel in AMBIGUOUS_CHANNELS else bool(readable) and all(readable)

    def unread(self, server: str, now: float) -> dict[str, frozenset[str]]:
        """Rank -> the strong channels in which a card of it cannot be read, or not for this server."""
        found: dict[str, frozenset[str]] = {}
        for use in self._present(server, now):
            unread = _STRONG_MOVES - use.readable
            for rank in use.ranks:
                found[rank] = found.get(rank, frozenset()) | unread
        return found

    def of_ranks(self, server: str, now: float) -> dict[str, tuple[GpuState, ...]]:
        """Rank -> the cards it uses now, for people; in no order."""
        found: dict[str, tuple[GpuState, ...]] = {}
        for use in self._uses(server, now):
            for rank in use.ranks:
                found[rank] = (*found.get(rank, ()), use.card.state(use.gpu, (server, rank), now))
        return found

    def at_rest(self, server: str, now: float) -> bool | None:
        """Whether every card of the server was at rest, or spun at idle power, for a window; None = not known."""
        rests = [self._rests(use, server, now) for use in self._present(server, now)]
        if False in rests:
            return False
        return True if rests and None not in rests else None

    def _rests(self, use: Use, server: str, now: float) -> bool | None:
        card = use.card
        if not use.is_alone:
            return None
        if card.worked_at is not None and now - card.worked_at <= self._window_of(server):
            return False
        return card.rests(now)

    # --- spins, losses, a driver that hangs ------------------------------------------------------------------

    def spins(self, server: str, now: float) -> tuple[Spin, ...]:
        """Ranks of the server whose cards spin, each with its longest spin."""
        window, found = self._window_of(server), dict[str, Spin]()
        for use in self._present(server, now):
            age = use.card.spin_age(now)
            if age is None or not use.is_alone:
                continue
            for rank in use.ranks:
                spin, other = Spin(rank, age, use.card.is_proven_spin(now, window)), found.get(rank)
                if other is None or (other.is_proven, other.age) < (spin.is_proven, age):
                    found[rank] = spin
        return tuple(found[rank] for rank in sorted(found))

    def works(self, server: str, now: float) -> bool:
        """Whether a card of the server was seen neither at rest nor spinning within a window."""
        window = self._window_of(server)
        seen = [use.card.worked_at for use in self._present(server, now) if use.is_alone]
        return any(at is not None and now - at <= window for at in seen)

    def lost(self, server: str, now: float) -> tuple[tuple[float, str], ...]:
        """(seconds since then, rank) of every card of the server that is lost, the first loss first."""
        lost = [
            (now - card.lost_at, rank)
            for card in self._of(server)
            for name, rank in card.users
            if name == server and card.lost_at is not None
        ]
        return tuple(sorted(lost, key=lambda each: (-each[0], each[1])))

    def driver_hangs(self, server: str, now: float) -> bool:
        """Whether the driver has not answered for a window: for a card of the server, or, while none is known that
        can be read, for whoever asked."""
        window, present = self._window_of(server), [use.card for use in self._present(server, now)]
        if any((age := card.silent_age(now)) is not None and age >= window for card in present):
            return True
        in_flight = self.call.value if self.call.is_fresh(now) else None
        return (in_flight or 0.0) >= window and not any(card.reads(now, _FIGURE_ORDER) for card in present)

    def why_unreadable(self, server: str, now: float) -> str:
        """Why a channel of the server cannot be read: one of READ_REASONS, `shared` when others are on its cards, else
        `learning`: what they take at rest is not known yet (only power needs that)."""
        for use in self._present(server, now):
            card = use.card
            figures = [
                card.of(signal) for signal in (signals.GPU_LOST, signals.GPU_MEMORY_USED, signals.GPU_UTILIZATION)
            ]
            reasons = [each.track.reason for each in figures if each.track.is_fresh(now) and each.track.reason]
            if reasons or card.is_lost(now):
                return reasons[0] if reasons else "gpu_lost"
            if not use.is_alone:
                return "shared"
        return "learning"

    # --- what was learned --------------------------------------------------------------------------------------

    def learned(self, now: float) -> list[Reading]:
        """Resident-idle power of the cards that are read now, where it was learned and is not said otherwise."""
        return [
            signals.GPU_IDLE_POWER.read(round(card.learned, 2), gpu)
            for gpu, card in sorted(self._cards.items())
            if card.learned is not None and card.learned == card.idle_watts(now) and card.reads(now, _FIGURE_ORDER)
        ]

    def kept(self) -> Iterator[tuple[Words, float]]:
        """Every number that outlasts a restart of ours, and what it is about."""
        for key, watts in self._idle.watts.items():
            yield (_IDLE, *key), watts
        for gpu, card in self._cards.items():
            if card.power.highest is not None:
                yield (_WORK, gpu), card.power.highest

    def wanted(self) -> Iterator[Words]:
        """What the cards that are there would like to know of the time before a restart of ours."""
        for gpu, card in self._cards.items():
            yield (_WORK, gpu)
            if self._idle.of(key := card.idle_key(gpu)) is None:
                yield (_IDLE, *key)

    def recall(self, words: Words, watts: float) -> None:
        """Put back what was kept; what was learned since then is newer."""
        self._last_uses = None
        kind, gpu = words[0], str(words[1])
        card = self._cards.get(gpu)
        if kind == _IDLE:
            self._idle.watts.setdefault(IdleKey(gpu, str(words[2]), int(words[3])), watts)
        if card is not None:
            card.learned = self._idle.of(card.idle_key(gpu))
            if kind == _WORK:
                card.power.highest = max(watts, card.power.highest or 0.0)

    # --- ends --------------------------------------------------------------------------------------------------

    def forget(self, server: str) -> None:
        """The start of the server is over.  What the result says that is being put now is of the next one."""
        self._last_uses = None
        for card in self._of(server):
            card.users = frozenset(holder for holder in card.users if holder[0] != server)
            for holders in (card.ties, card.held):
                self._forget_among(holders, server)
            card.owner = None if card.owner == server else card.owner
        if gpus := {gpu for gpu in self._gpus.pop(server, ()) if self._cards[gpu].has(server)}:
            self._gpus[server] = gpus
        self._pids = {holder: pids for holder, pids in self._pids.items() if holder[0] != server}

    def _forget_among(self, holders: dict[Holder, Figure], server: str) -> None:
        for holder in [holder for holder in holders if holder[0] == server]:
            if holders[holder].track.read_at == self._reading_at:
                holders[holder].begin_anew()
            else:
                del holders[holder]

    def _of(self, server: str) -> list[Card]:
        return [self._cards[gpu] for gpu in sorted(self._gpus.get(server, ()))]

    def _present(self, server: str, now: float) -> list[Use]:
        """The cards the server uses now, in order of their names; of a divided one its instances."""
        return [use for use in self._uses(server, now) if use.ranks and not use.card.is_parent]

    def _uses(self, server: str, now: float) -> list[Use]:
        """How the server uses each card that is or was its own; a verdict and its report ask a dozen times."""
        if self._last_uses is None or self._last_uses[:2] != (server, now):
            gpus = sorted(self._gpus.get(server, ()))
            self._last_uses = server, now, [_use(gpu, self._cards[gpu], server, now) for gpu in gpus]
        return self._last_uses[2]


def _among(holders: dict[Holder, Figure], holder: Holder, at: float) -> Figure | None:
    """The series of one rank on a card; None when too many ranks are on it already."""
    if holder not in holders and len(holders) >= MOST_RANKS_PER_CARD:
        for old in [old for old, figure in holders.items() if not figure.track.is_fresh(at)]:
            del holders[old]
        if len(holders) >= MOST_RANKS_PER_CARD:
            return None
    return holders.setdefault(holder, Figure())
