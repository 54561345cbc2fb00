"""One card (or MIG instance): what it says, who is on it, and what it does.  Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from . import signals
from .idle_power import IdleKey, Rest, bucket_of
from .model import GpuState, Reading, Signal
from .tracks import STALE_AFTER_GAPS, Track

MIB = 1 << 20
GPU_MEMORY_BYTES = 16 * MIB
"""Memory of a rank, or of the card, that came or went is a move from here on."""

GPU_BUS_BYTES = 1024 * MIB
"""An idle link chatters at hundreds of KB/s, 60 MB a window; weights come at GiB/s.  Not measured by ourselves."""

UNOWNED_BYTES = 16 * MIB
"""From here on somebody unknown is on the card."""

WORK_SHARE = 1 / 3
"""Of the span from resident idle to work.  Spins were reported at 0.05 to 0.3 of it, with memory utilisation 0."""

WORK_ACTIVITY = 0.02
"""Tensor cores or memory interface: 0 in a spin, above 2 % as soon as a model computes."""

REST_UTILIZATION = 0.05
SPIN_UTILIZATION = 0.95
SPIN_MEMORY_UTILIZATION = 0.01

NOTHING = 0.005
"""A share that a driver shows as 0 %."""

BUS_AT_REST = GPU_BUS_BYTES / 60
"""Bytes per second below which nothing is moved but chatter."""

EMPTY_BYTES = 1024 * MIB
"""A card of which nobody holds anything, and no more than this is in use, has no process on it: a killed one may
leave some hundred MiB and a counter that stands at 100 % for days (NVIDIA Blackwell)."""

UNRESPONSIVE = "driver_unresponsive"

CLEARLY_WORK = 2.0
"""Without a power limit only a minute at this many times the idle power shows what work takes on the card."""

_MINUTE_SECONDS = 60.0
_FINEST_SECONDS = 1.0


@dataclass(slots=True)
class Figure:
    """One series, and what lies between its last two looks."""

    track: Track = field(default_factory=Track)
    mean: float | None = None  # of the last two readings, when both could be read
    seconds: float = 0.0  # between them, and never more than until the older one was stale
    again: bool = False  # read at two moments at least

    def put(self, reading: Reading, at: float, interval: float, measured: float) -> None:
        track, before = self.track, self.track.value
        if track.read_at is not None:
            self.seconds = min(max(0.0, at - track.read_at), STALE_AFTER_GAPS * track.usual_gap)
            self.again = self.again or at > track.read_at
        track.put(reading.value, reading.reason, at, interval, measured)
        self.mean = None if before is None or track.value is None else (before + track.value) / 2

    def begin_anew(self) -> None:
        """The last reading is the first of another series."""
        self.again = False
        self.track.begins_anew(self.track.read_at or 0.0)

    def value(self, now: float) -> float | None:
        """The last reading unless it is too old."""
        return self.track.value if self.track.is_fresh(now) else None

    def holds(self, now: float) -> bool:
        """Fresh, or said once and never again: then it is a fact about the card or the rank, and gets no older."""
        return self.track.is_fresh(now) or (self.track.read_at is not None and not self.again)


@dataclass(slots=True)
class Power:
    """Mean power of a card since the look before, and what work takes on it.  Watts."""

    watts: float | None = None
    seconds: float = 0.0  # over which `watts` is the mean
    highest: float | None = None  # mean of one minute
    _seconds: float = 0.0
    _joules: float = 0.0
    _sums: deque[tuple[float, float]] = field(default_factory=lambda: deque([(0.0, 0.0)]))

    def add(self, watts: float | None, seconds: float) -> None:
        """Take the mean over the last `seconds`; None = not known."""
        self.watts, self.seconds = watts, seconds
        if watts is None or seconds <= 0:
            return
        self._seconds += seconds
        self._joules += watts * seconds
        sums = self._sums
        while len(sums) > 1 and sums[1][0] <= self._seconds - _MINUTE_SECONDS:
            sums.popleft()
        since, joules = sums[0]
        if self._seconds - since >= _MINUTE_SECONDS:
            mean = (self._joules - joules) / (self._seconds - since)
            self.highest = mean if self.highest is None else max(mean, self.highest)
        if self._seconds - sums[-1][0] >= _FINEST_SECONDS:
            sums.append((self._seconds, self._joules))

    def most_at_rest(self, idle: float, limit: float | None) -> float | None:
        """Power above which the card works: a third of the way from idle to work.  None = the span is not known."""
        half, highest = (limit or 0.0) / 2, self.highest or 0.0
        if half <= idle and highest < CLEARLY_WORK * idle:
            return None
        return idle + WORK_SHARE * (max(half, highest) - idle)


_ENERGY, _POWER = signals.GPU_ENERGY.name, signals.GPU_POWER.name
_ACTIVITIES = (signals.GPU_DRAM_ACTIVITY.name, signals.GPU_TENSOR_ACTIVITY.name)
_INDEX, _DRIVER, _MIG = (signals.GPU_INFO.labels.index(label) for label in ("index", "driver", "mig"))
PCIE = (signals.GPU_PCIE_RECEIVE.name, signals.GPU_PCIE_TRANSMIT.name)

FIGURES: tuple[Signal, ...] = (
    signals.GPU_MEMORY_USED,
    signals.GPU_UTILIZATION,
    signals.GPU_MEMORY_UTILIZATION,
    signals.GPU_POWER,
    signals.GPU_ENERGY,
    signals.GPU_POWER_LIMIT,
    signals.GPU_IDLE_POWER,
    signals.GPU_SM_CLOCK,
    signals.GPU_PCIE_RECEIVE,
    signals.GPU_PCIE_TRANSMIT,
    signals.GPU_TENSOR_ACTIVITY,
    signals.GPU_DRAM_ACTIVITY,
    signals.GPU_LOST,
    signals.GPU_UNOWNED_MEMORY,
)
"""What a card itself says."""

Holder = tuple[str, str]
"""Server and rank."""


@dataclass(slots=True)
class Card:
    """One card (or MIG instance): its figures, and who is on it."""

    figures: dict[str, Figure] = field(default_factory=lambda: {signal.name: Figure() for signal in FIGURES})
    ties: dict[Holder, Figure] = field(default_factory=dict)  # by rank_info
    held: dict[Holder, Figure] = field(default_factory=dict)  # bytes
    power: Power = field(default_factory=Power)
    info: tuple[str, ...] = ()  # labels of its gpu_info, as last read
    owner: str | None = None  # the server whose the card was alone when it was last settled
    worked_at: float | None = None  # when it was last seen neither at rest nor spinning
    spins_since: float | None = None  # since when every look showed a spin, as far as could be read
    below_at: float | None = None  # when its power was last known to be none of work
    users: frozenset[Holder] = frozenset()  # who was on it when it was last well
    lost_at: float | None = None
    silent_since: float | None = None  # since when all that is read is that the driver does not answer
    rest: Rest = field(default_factory=Rest)
    learned: float | None = None  # resident-idle power for its driver and clock, in watts
    touched: set[str] = field(default_factory=set)  # figures read since it was last settled
    holders_touched: set[Holder] = field(default_factory=set)
    has_new_power: bool = False
    _bus: Track = field(default_factory=Track)
    _bus_bytes: float = 0.0

    def of(self, signal: Signal) -> Figure:
        return self.figures[signal.name]

    def state(self, gpu: str, holder: Holder, now: float) -> GpuState:
        """What a person is shown of it beside a rank that uses it; `gpu` is its UUID."""
        return GpuState(
            gpu=gpu,
            index=self.info[_INDEX] if self.info else "",
            held_bytes=self.held[holder].value(now) if holder in self.held else None,
            used_bytes=self.of(signals.GPU_MEMORY_USED).value(now),
            utilization=self.of(signals.GPU_UTILIZATION).value(now),
            power_watts=self.power.watts if self.reads(now, (_ENERGY, _POWER)) else None,
            idle_power_watts=self.idle_watts(now),
        )

    def idle_key(self, gpu: str) -> IdleKey:
        """What its resident-idle power depends on now; a look that fails changes neither driver nor clock."""
        driver = self.info[_DRIVER] if self.info else ""
        return IdleKey(gpu, driver, bucket_of(self.of(signals.GPU_SM_CLOCK).track.known))

    @property
    def is_parent(self) -> bool:
        """Divided into MIG instances: what runs, runs on those, and its own figures are the sum over all of them."""
        return bool(self.info) and self.info[_MIG] == "enabled"

    # --- whose it is ---------------------------------------------------------------------------------------

    def is_lost(self, now: float) -> bool:
        """Lost, or the driver does not say: then nothing it says counts."""
        lost = self.of(signals.GPU_LOST)
        return lost.track.is_fresh(now) and lost.track.value != 0

    def is_known(self, now: float) -> bool:
        """Whether anything about the card is recent."""
        series = (*self.figures.values(), *self.ties.values(), *self.held.values())
        return any(figure.track.is_fresh(now) for figure in series)

    def has(self, server: str) -> bool:
        return any(holder[0] == server for holder in (*self.ties, *self.held))

    def ranks_of(self, server: str, now: float) -> set[str]:
        return {rank for name, rank in self._tied(now) if name == server}

    def is_alone(self, server: str, now: float) -> bool:
        return self.owner_at(now) == server

    def owner_at(self, now: float) -> str | None:
        """The server whose processes are all that is on the card; None when there are others, or it is lost.

        Unowned memory that was never readable is left out; once known, it stays in force while unreadable.
        """
        unowned = self.of(signals.GPU_UNOWNED_MEMORY).track.known
        if self.is_parent or self.is_lost(now) or (unowned is not None and unowned >= UNOWNED_BYTES):
            return None
        tied = set(self._tied(now))
        present = {holder for holder in tied if not self._holds_nothing(holder, now)}
        servers = {server for server, _ in present or tied}
        return servers.pop() if len(servers) == 1 else None

    def _tied(self, now: float) -> Iterator[Holder]:
        """Every rank known to use the card."""
        yield from (holder for holder, figure in self.ties.items() if figure.holds(now))
        yield from (
            holder
            for holder, figure in self.held.items()
            if figure.track.is_fresh(now) and figure.track.reason != "vanished"
        )

    def _holds_nothing(self, holder: Holder, now: float) -> bool:
        """Whether the rank is only known by the 0 bytes it holds."""
        tie = self.ties.get(holder)
        return (tie is None or not tie.holds(now)) and self.held[holder].value(now) == 0

    def is_empty(self, now: float) -> bool:
        """Nobody has memory on it, as far as can be read: then whatever it shows, nothing runs on it."""
        held = [figure for figure in self.held.values() if figure.track.is_fresh(now)]
        used = self.of(signals.GPU_MEMORY_USED).value(now)
        if not held:
            return used is not None and used < UNOWNED_BYTES
        nothing = all(figure.track.value == 0 or figure.track.reason == "vanished" for figure in held)
        return nothing and (used is None or used < EMPTY_BYTES)

    # --- what it does --------------------------------------------------------------------------------------

    def utilization(self, now: float) -> float | None:
        """Of an empty card 0: its counter may stand at 100 % since a process was killed on it."""
        value = self.of(signals.GPU_UTILIZATION).value(now)
        return 0.0 if value and self.is_empty(now) else value

    def idle_watts(self, now: float) -> float | None:
        """Resident-idle power: as a recording says, else as learned."""
        said = self.of(signals.GPU_IDLE_POWER)
        return said.track.value if said.track.value is not None and said.holds(now) else self.learned

    def is_above_idle(self, now: float) -> bool | None:
        """Whether its mean power is that of work; None = idle power, work or the power itself is not known."""
        idle = self.idle_watts(now)
        if self.power.watts is None or not self.reads(now, (_ENERGY, _POWER)) or idle is None:
            return None
        most = self.power.most_at_rest(idle, self.of(signals.GPU_POWER_LIMIT).track.known)
        return None if most is None else self.power.watts > most

    def is_active(self, now: float, names: tuple[str, ...] = _ACTIVITIES) -> bool | None:
        """Whether tensor cores or memory interface work; None = neither can be read."""
        values = [value for name in names if (value := self.figures[name].value(now)) is not None]
        return max(values) >= WORK_ACTIVITY if values else None

    def works(self, now: float) -> bool | None:
        signs = (self.is_above_idle(now), self.is_active(now))
        return True if True in signs else (False if False in signs else None)

    def rests(self, now: float) -> bool | None:
        """Whether it is at rest, or spins at idle power, at the last look; None = not known."""
        utilization = self.utilization(now)
        if self.works(now):
            return False
        if utilization is None or utilization < REST_UTILIZATION:
            return None if utilization is None else True
        if not self._looks_like_a_spin(utilization, now):
            return False
        return None if self.is_above_idle(now) is None else True

    def _looks_like_a_spin(self, utilization: float, now: float) -> bool:
        """By what can be read but power: always used, and its memory never."""
        memory = self.of(signals.GPU_MEMORY_UTILIZATION).value(now)
        return utilization >= SPIN_UTILIZATION and (memory is None or memory <= SPIN_MEMORY_UTILIZATION)

    def note_spin(self, at: float) -> None:
        """Keep since when it spins.  A look that fails ends no spin."""
        utilization = self.utilization(at)
        if signals.GPU_UTILIZATION.name not in self.touched or utilization is None:
            return
        if self.is_above_idle(at) is False:
            self.below_at = at
        spins = self._looks_like_a_spin(utilization, at) and not self.works(at)
        if not spins:
            self.spins_since = None
        elif self.spins_since is None:
            self.spins_since = at

    def spin_age(self, now: float) -> float | None:
        """For how long it has been spinning, as far as can be read; None = it does not."""
        is_read = self.of(signals.GPU_UTILIZATION).track.was_readable(now)
        return now - self.spins_since if self.spins_since is not None and is_read else None

    def is_proven_spin(self, now: float, window: float) -> bool:
        """Of a spin: whether its idle power is known and its power none of work, and its memory known to be unused."""
        memory = self.of(signals.GPU_MEMORY_UTILIZATION).track
        return memory.was_readable(now) and self.below_at is not None and now - self.below_at <= window

    def rests_now(self, now: float) -> bool:
        """Whether somebody holds memory on it and nothing runs, as far as can be read; utilisation must be."""
        utilization, memory = self.utilization(now), self.of(signals.GPU_MEMORY_UTILIZATION).value(now)
        bus = [value for name in PCIE if (value := self.figures[name].value(now)) is not None]
        if utilization is None or self.is_empty(now) or self.is_active(now):
            return False
        return utilization < NOTHING and (memory is None or memory < NOTHING) and sum(bus) < BUS_AT_REST

    # --- what became of it ---------------------------------------------------------------------------------

    def note_loss(self, at: float) -> None:
        """Keep since when it is lost, and who was on it then."""
        if self.of(signals.GPU_LOST).value(at) == 1:
            self.lost_at = at if self.lost_at is None else self.lost_at
            self.users |= frozenset(self._tied(at))
        else:
            self.lost_at, self.users = None, frozenset(self._tied(at))

    def note_answers(self) -> None:
        """Keep since when the driver does not answer for it."""
        figures = [self.figures[name] for name in self.touched] + [self.held[each] for each in self.holders_touched]
        times = [figure.track.read_at for figure in figures if figure.track.reason == UNRESPONSIVE]
        if any(figure.track.value is not None for figure in figures):
            self.silent_since = None
        elif times and self.silent_since is None:
            self.silent_since = times[0]

    def silent_age(self, now: float) -> float | None:
        """For how long the driver has not been answering for it; None = it does, or nobody asks any more."""
        if self.silent_since is None:
            return None
        asked = [*self.figures.values(), *self.held.values()]
        is_asked = any(figure.track.is_fresh(now) and figure.track.reason == UNRESPONSIVE for figure in asked)
        return now - self.silent_since if is_asked else None

    # --- what moved since it was last settled --------------------------------------------------------------

    def take_power(self, at: float) -> None:
        """The mean power since the look before, by the energy counter where there is one."""
        self.has_new_power = bool(self.touched & {_ENERGY, _POWER})
        counter, gauge = self.figures[_ENERGY], self.figures[_POWER]
        rate = counter.track.rate if counter.value(at) is not None else None
        if rate is not None and rate >= 0:  # a counter that fell began anew
            self.has_new_power = _ENERGY in self.touched
            if self.has_new_power:
                self.power.add(rate, counter.seconds)
        elif self.has_new_power:
            self.power.add(gauge.mean if _POWER in self.touched else None, gauge.seconds)

    def begin_anew(self, at: float) -> None:
        """Somebody came or went: what was gathered until now is nobody's."""
        self.of(signals.GPU_MEMORY_USED).track.begins_anew(at)
        self._bus.begins_anew(at)

    def used_moved(self, at: float, window: float) -> bool:
        track = self.of(signals.GPU_MEMORY_USED).track
        if signals.GPU_MEMORY_USED.name not in self.touched or track.value is None:
            return False
        return track.gathers(track.value, at, GPU_MEMORY_BYTES, window, two_ways=True)

    def bus_moved(self, at: float, window: float) -> bool:
        read = [self.figures[name] for name in PCIE if name in self.touched]
        self._bus_bytes += sum((figure.value(at) or 0.0) * figure.seconds for figure in read)
        return bool(read) and self._bus.gathers(self._bus_bytes, at, GPU_BUS_BYTES, window)

    def power_moved(self, at: float, window: float) -> bool:
        read = tuple(name for name in _ACTIVITIES if name in self.touched)
        return bool(self.is_active(at, read)) or (self.has_new_power and bool(self.is_above_idle(at)))

    def utilization_moved(self, at: float, window: float) -> bool:
        figure = self.of(signals.GPU_UTILIZATION)
        read = signals.GPU_UTILIZATION.name in self.touched and not self.is_empty(at)
        return read and figure.mean is not None and figure.mean >= REST_UTILIZATION

    def held_moved(self, holder: Holder, at: float, window: float) -> bool:
        track = self.held[holder].track
        if track.value is None:
            return False
        return track.gathers(track.value, at, GPU_MEMORY_BYTES, window, two_ways=True)

    # --- what of it can be read ----------------------------------------------------------------------------

    def reads(self, now: float, names: tuple[str, ...]) -> bool:
        """Whether any of these figures is readable."""
        return any(self.figures[name].value(now) is not None for name in names)

    def knows_held(self, server: str, ranks: Iterable[str], now: float) -> bool:
        """Whether it is read how much each of these ranks of the server holds on it."""
        held = self.held
        return all((server, rank) in held and held[server, rank].value(now) is not None for rank in ranks)
