"""One card (or MIG instance): what it says, who is on it, and what it does.  Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import signals
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
    highest: float | None = None  # mean of one minute
    _seconds: float = 0.0
    _joules: float = 0.0
    _sums: deque[tuple[float, float]] = field(default_factory=lambda: deque([(0.0, 0.0)]))

    def add(self, watts: float | None, seconds: float) -> None:
        """Take the mean over the last `seconds`; None = not known."""
        self.watts = watts
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
_INDEX = signals.GPU_INFO.labels.index("index")
PCIE = (signals.GPU_PCIE_RECEIVE.name, signals.GPU_PCIE_TRANSMIT.name)

FIGURES: tuple[Signal, ...] = (
    signals.GPU_MEMORY_USED,
    signals.GPU_UTILIZATION,
    signals.GPU_MEMORY_UTILIZATION,
    signals.GPU_POWER,
    signals.GPU_ENERGY,
    signals.GPU_POWER_LIMIT,
    signals.GPU_IDLE_POWER,
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
    touched: set[str] = field(default_factory=set)  # figures read since it was last settled
    holders_touched: set[Holder] = field(default_factory=set)
    has_new_power: bool = False
    _bus: Track = field(default_factory=Track)
    _bus_bytes: float = 0.0

    def of(self, signal: Signal) -> Figure:
        return self.figures[signal.name]

    def state(self, gpu: str, holder: Holder, now: float) -> GpuState:
        """What a person is shown of it beside a rank that uses it; `gpu` is its UUID."""
        idle = self.of(signals.GPU_IDLE_POWER)
        return GpuState(
            gpu=gpu,
            index=self.info[_INDEX] if self.info else "",
            held_bytes=self.held[holder].value(now) if holder in self.held else None,
            used_bytes=self.of(signals.GPU_MEMORY_USED).value(now),
            utilization=self.of(signals.GPU_UTILIZATION).value(now),
            power_watts=self.power.watts if self.reads(now, (_ENERGY, _POWER)) else None,
            idle_power_watts=idle.track.value if idle.holds(now) else None,
        )

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
        if self.is_lost(now) or (unowned is not None and unowned >= UNOWNED_BYTES):
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

    # --- what it does --------------------------------------------------------------------------------------

    def is_above_idle(self, now: float) -> bool | None:
        """Whether its mean power is that of work; None = idle power, work or the power itself is not known."""
        idle = self.of(signals.GPU_IDLE_POWER)
        if self.power.watts is None or not self.reads(now, (_ENERGY, _POWER)):
            return None
        if idle.track.value is None or not idle.holds(now):
            return None
        most = self.power.most_at_rest(idle.track.value, self.of(signals.GPU_POWER_LIMIT).track.known)
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
        utilization = self.of(signals.GPU_UTILIZATION).value(now)
        if self.works(now):
            return False
        if utilization is None or utilization < REST_UTILIZATION:
            return None if utilization is None else True
        memory = self.of(signals.GPU_MEMORY_UTILIZATION).value(now)
        if utilization < SPIN_UTILIZATION or (memory is not None and memory > SPIN_MEMORY_UTILIZATION):
            return False
        return None if self.is_above_idle(now) is None else True

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
        read = signals.GPU_UTILIZATION.name in self.touched
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

    def knows_held(self, server: str, now: float) -> bool:
        """Whether it is read how much every rank of the server holds on it."""
        holders = [(server, rank) for rank in self.ranks_of(server, now)]
        return all(holder in self.held and self.held[holder].value(now) is not None for holder in holders)
