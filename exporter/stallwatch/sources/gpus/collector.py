"""The `gpu` collector: what the cards say, who is on them, and what is known while they say nothing.

The driver is asked by a program of its own (nvml_child), so a read returns in time also when a call hangs.  A value
that was not had is missing with a reason, never 0 and never the last one; a card that was there stays known for a
day, so that its loss does not go away with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from ... import signals
from ...config import Config
from ...model import GpuUse, Observation, Reading, Scene, Signal
from .. import Host, Moment
from ..procfs import ProcFs
from ..told import Told, again
from .faults import UNKNOWN, XID_ERRORS, XID_LAST, Faults
from .nvml_child import Absent, Answer, CardAnswer, Nvml, Row, Unanswered
from .owners import CardList, Joined, Owners
from .unowned import Holders, Left, Unowned
from .xid import Lost, Xid
from .xid_log import XidLog

_GPU = ("gpu",)
MEMORY_TOTAL = Signal("gpu_memory_total_bytes", "Memory of the card in bytes, as far as it can be used.", _GPU, "gpu")
TEMPERATURE = Signal("gpu_temperature_celsius", "Temperature of the card in degrees Celsius.", _GPU, "gpu")
RECOVERY_ACTION = Signal(
    "gpu_recovery_action",
    "What the driver says the card needs: 0 nothing, 1 a reset, 2 a reboot of the node, 3 to be drained from "
    "peer-to-peer, 4 to be drained and reset; newer drivers have more.",
    _GPU,
    "gpu",
)
SM_ACTIVITY = Signal(
    "gpu_sm_activity_ratio",
    "Share of time and of the streaming multiprocessors in which work was resident on them, 0 to 1 (from Hopper on).",
    _GPU,
    "gpu",
)

FIGURES: Mapping[str, Signal] = {
    "memory_used": signals.GPU_MEMORY_USED,
    "memory_total": MEMORY_TOTAL,
    "utilization": signals.GPU_UTILIZATION,
    "memory_utilization": signals.GPU_MEMORY_UTILIZATION,
    "energy": signals.GPU_ENERGY,
    "power": signals.GPU_POWER,
    "power_limit": signals.GPU_POWER_LIMIT,
    "sm_clock": signals.GPU_SM_CLOCK,
    "temperature": TEMPERATURE,
    "pcie_receive": signals.GPU_PCIE_RECEIVE,
    "pcie_transmit": signals.GPU_PCIE_TRANSMIT,
    "recovery_action": RECOVERY_ACTION,
    "sm_activity": SM_ACTIVITY,
    "tensor_activity": signals.GPU_TENSOR_ACTIVITY,
    "dram_activity": signals.GPU_DRAM_ACTIVITY,
}
"""Figure of a CardAnswer -> its signal."""

_REASONS: Mapping[int, str] = {
    **dict.fromkeys((3, 13, 25), "not_supported"),  # the function, or its structure, is newer than the driver
    **dict.fromkeys((4, 17), "permission"),  # 17: the control group forbids the device
    **dict.fromkeys((15, 16), "gpu_lost"),  # 16: a reset is required
    10: "timeout",
}
_NO_ACCESS = frozenset((17, 999))
"""What opening a card gives when a control group forbids it."""

_ONE_LOST = frozenset((15, 16))
"""As the code of the whole: one card is lost, and the driver counts none; that says nothing of the others."""

FORGET_SECONDS = 86400.0
MOST_CARDS = 256
OLD_LISTS = 3
"""Intervals after which what processes hold by their card's last list is not told any more."""
MOST_PAUSE_SECONDS = 300.0
"""Between process lists when that call hangs each time, and blinds us for everything else."""
_LIST_CALL = "RunningProcesses"
_EARLY = 0.1
"""Share of an interval by which a list may be early, so that a little jitter does not put it off by a whole cycle."""

_COHERENT = ("GH200", "GB200", "GB300", "GB10", "Thor", "Orin")
"""Cards whose memory is the system's too: it stays in use after its process ended, and is no leak."""


def reason_of(code: int) -> str:
    """Why there is no value (of READ_REASONS), by the return code of NVML."""
    return _REASONS.get(code, "error")


class Driver(Protocol):
    """Whoever asks the driver; a test does without a child."""

    def ask(self, processes: bool, events: bool) -> Answer | Unanswered | Absent: ...

    def close(self) -> None: ...


class KernelFaults(Protocol):
    """Whoever reads the kernel log; a test does without one."""

    @property
    def reason(self) -> str | None: ...

    @property
    def is_caught_up(self) -> bool: ...

    def read(self, now: Moment) -> tuple[Xid | Lost, ...]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Known:
    """A card (or MIG instance) that has answered.  Times are monotonic seconds."""

    answer: CardAnswer  # its last one, for its names
    answered_at: float
    figures: set[str] = field(default_factory=set)  # those it ever had
    listed: CardList | None = None
    list_reason: str = ""  # why the last list was not had
    holders: tuple[tuple[str, str], ...] = ()  # server and rank, as last told
    unowned: Unowned = field(default_factory=Unowned)
    left: Left | None = None  # by that list
    shape: object = None  # its names, and which figures it had and had not, as last told
    told: dict[str, Reading] = field(default_factory=dict)  # by figure, and by signal of what is none; of that shape
    held: Told | None = None  # memory by rank, as last told
    nobodys: Told | None = None  # memory that nobody holds, as last told

    @property
    def uuid(self) -> str:
        return self.answer.uuid

    @property
    def index(self) -> str:
        return self.answer.index

    @property
    def address(self) -> str:
        """On the bus, as the kernel log names it; where the driver does not say, the UUID keeps cards apart."""
        return self.answer.pci or self.uuid

    @property
    def is_instance(self) -> bool:
        return self.answer.mig == "instance"

    @property
    def has_lists(self) -> bool:
        """The processes on a card that is split into instances are on those."""
        return self.answer.mig != "enabled"

    @property
    def is_coherent(self) -> bool:
        return any(name in self.answer.name for name in _COHERENT)


class Gpu:
    """See the module.  The attributes are those a source may have (sources.Source)."""

    name: ClassVar[str] = "gpu"
    mean_seconds: ClassVar[float] = 1.0  # the energy counter goes in steps of up to 100 ms
    signals: ClassVar[tuple[Signal, ...]] = (
        signals.GPU_INFO,
        *FIGURES.values(),
        signals.GPU_LOST,
        signals.GPU_PROCESS_MEMORY,
        signals.GPU_UNOWNED_MEMORY,
        signals.GPU_CALL_IN_FLIGHT,
        XID_ERRORS,
        XID_LAST,
    )

    def __init__(self, host: Host, driver: Driver | None = None, kernel: KernelFaults | None = None) -> None:
        self._deadline = host.read_deadline_seconds
        self._driver = driver or Nvml(self._deadline)
        self._kernel = kernel or XidLog(host.root)
        self._config = host.config
        self._proc = ProcFs(host.proc)
        self._owners = Owners(self._proc)
        self._faults = Faults()
        self._knows_history = False  # the kernel log was read to its end once
        self._cards: dict[str, _Known] = {}
        self._told: set[tuple[str, tuple[str, ...]]] = set()  # what was said to be not supported
        self._joined: Mapping[str, Joined] = {}  # by uuid
        self._lists_due = float("-inf")
        self._list_hangs = 0  # lists in a row that did not come back
        self.absent, self.incomplete = True, False
        self.in_flight_since: float | None = None

    def configure(self, config: Config) -> None:
        self._config = config

    def close(self) -> None:
        self._driver.close()
        self._kernel.close()

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """Ask for a cycle; what the kernel log says is taken first, so that an answer is newer than it.

        stallwatch_gpu_memory_used_bytes{gpu="GPU-8f3b…"} 8.16e+10
        """
        self._faults.take(self._kernel.read(now))
        self._knows_history = self._knows_history or self._kernel.is_caught_up or self._kernel.reason is not None
        wants_lists = now.monotonic >= self._lists_due
        answer = self._driver.ask(wants_lists, self._kernel.reason is not None)
        before, self.in_flight_since = self.in_flight_since, None
        if isinstance(answer, Answer):
            reasons = self._take(answer, now, wants_lists and not answer.code)
        else:
            reasons = dict.fromkeys(self._cards, "error")
        if isinstance(answer, Unanswered):
            self.in_flight_since = answer.since
            self._note_hang(answer, before, now.monotonic)
            reasons = dict.fromkeys(self._cards, "driver_unresponsive")
        self._forget(now.monotonic)
        self.incomplete = "" not in reasons.values()
        self.absent = isinstance(answer, Absent) and not self._cards
        if self.absent:
            self.incomplete = False
            return
        yield from self._once(self._readings(answer, reasons, scene, now.monotonic))
        yield from self._uses(scene)

    # --- taking an answer ----------------------------------------------------------------------------------

    def _take(self, answer: Answer, now: Moment, with_lists: bool) -> dict[str, str]:
        """Note what the cards say; uuid -> why a known one says nothing (of READ_REASONS), "" of one that does."""
        if with_lists:
            interval = self._config.intervals
            self._lists_due = now.monotonic + interval.gpu_processes - _EARLY * interval.gpu
            self._list_hangs = 0
        lost = frozenset() if _has_no_access(answer) else frozenset(answer.lost)
        for card in answer.cards:
            if card.uuid not in lost and not _silence(card):
                self._meet(card, now.monotonic, with_lists)
        silent = {card.uuid: _silence(card) for card in answer.cards}
        reasons = {uuid: self._reason(known, answer, silent, lost) for uuid, known in self._cards.items()}
        for uuid in [uuid for uuid, known in self._cards.items() if self._is_removed(known, silent, reasons)]:
            del self._cards[uuid], reasons[uuid]
        self._take_events(answer.xids, now.wall)
        return reasons

    def _meet(self, card: CardAnswer, now: float, with_lists: bool) -> None:
        known = self._cards.get(card.uuid)
        if known is None:
            known = self._cards[card.uuid] = _Known(card, now)
        known.answer, known.answered_at = card, now
        known.figures.update(card.values)
        if not known.has_lists:
            known.listed, known.list_reason, known.holders, known.held = None, "", (), None
        elif card.processes is not None:
            self._list(known, card.processes, now)
        elif with_lists and "processes" in card.codes:
            known.list_reason = reason_of(card.codes["processes"])
        if not known.is_instance:
            self._faults.answered(known.address, card.uuid)

    def _list(self, known: _Known, rows: tuple[Row, ...], now: float) -> None:
        try:
            known.listed, known.list_reason = self._owners.listed(rows, now), ""
        except OSError:
            known.list_reason = "error"

    def _reason(self, known: _Known, answer: Answer, silent: Mapping[str, str], lost: frozenset[str]) -> str:
        """Why a card that is known says nothing.  An instance is lost with its card."""
        if known.uuid in lost:
            return "gpu_lost"
        if known.is_instance and any(self._is_card_of(known, uuid) for uuid in lost):
            return "gpu_lost"
        if answer.code:
            return "error" if answer.code in _ONE_LOST else reason_of(answer.code)
        if known.uuid in silent:
            return silent[known.uuid]
        return next((reason_of(code) for index, code in answer.broken.items() if str(index) == known.index), "error")

    def _is_card_of(self, instance: _Known, uuid: str) -> bool:
        card = self._cards.get(uuid)
        if card is None or card.is_instance or card.answer.pci != instance.answer.pci:
            return False
        return bool(card.answer.pci) or card.index == instance.index.partition(":")[0]

    def _is_removed(self, known: _Known, silent: Mapping[str, str], reasons: Mapping[str, str]) -> bool:
        """An instance that is not there any more while its card answers was removed on purpose."""
        if not known.is_instance or known.uuid in silent:
            return False
        return any(not reason and self._is_card_of(known, uuid) for uuid, reason in reasons.items())

    def _take_events(self, events: Iterable[tuple[str, int]], wall: float) -> None:
        """Xids as NVML tells them, where the kernel log cannot be read."""
        cards = ((self._cards[uuid], code) for uuid, code in events if uuid in self._cards)
        self._faults.take(Xid(known.address, code, None, wall) for known, code in cards)

    def _note_hang(self, unanswered: Unanswered, before: float | None, now: float) -> None:
        """Lists that hang are asked for less and less often; after another call they are due at once."""
        if _LIST_CALL in unanswered.call and before is None:
            self._list_hangs += 1
            self._lists_due = now + min(MOST_PAUSE_SECONDS, self._list_hangs * self._config.intervals.gpu_processes)

    def _forget(self, now: float) -> None:
        """A card that did not answer for a day is nobody's loss any more."""
        for uuid in [uuid for uuid, known in self._cards.items() if now - known.answered_at >= FORGET_SECONDS]:
            del self._cards[uuid]
        while len(self._cards) > MOST_CARDS:
            del self._cards[min(self._cards, key=lambda uuid: self._cards[uuid].answered_at)]
        self._told = {key for key in self._told if key[1][0] in self._cards or key[1][0] == UNKNOWN}

    # --- what is said --------------------------------------------------------------------------------------

    def _readings(
        self, answer: Answer | Unanswered | Absent, reasons: Mapping[str, str], scene: Scene, now: float
    ) -> Iterator[Reading]:
        yield self._in_flight(now)
        if self._knows_history:  # else what is read next would seem to have happened in between
            yield from self._faults.readings()
        if self._kernel.reason is not None:
            yield XID_ERRORS.missing(self._kernel.reason, UNKNOWN, UNKNOWN)
        if isinstance(answer, Answer):
            yield from self._unnamed(answer)
        lists = {uuid: known.listed for uuid, known in self._cards.items() if known.listed is not None}
        self._joined = self._owners.join(lists, scene.servers)
        blind, holders = self._owners.blind, Holders(self._proc)
        for uuid, reason in reasons.items():
            known = self._cards.get(uuid)
            if known is None:
                continue
            if reason:
                yield from self._silent(known, "gpu_lost" if self._faults.is_off(known.address) else reason)
            elif isinstance(answer, Answer):
                yield from _spoken(known, answer.driver).values()
                yield from self._held(known, now)
                yield from self._unowned(known, now, blind, holders)

    def _in_flight(self, now: float) -> Reading:
        since = self.in_flight_since
        return signals.GPU_CALL_IN_FLIGHT.read(0.0 if since is None else max(self._deadline, now - since))

    def _unnamed(self, answer: Answer) -> Iterator[Reading]:
        """What was asked of cards that never answered is counted, too."""
        known = {card.index for card in self._cards.values()}
        if answer.code and not known:
            yield RECOVERY_ACTION.missing(reason_of(answer.code), UNKNOWN)
        for index, code in answer.broken.items():
            if str(index) not in known:
                yield RECOVERY_ACTION.missing(reason_of(code), UNKNOWN)

    def _silent(self, known: _Known, reason: str) -> Iterator[Reading]:
        """A card that says nothing: lost, or not known to be."""
        uuid = known.uuid
        is_lost = reason == "gpu_lost"
        yield signals.GPU_LOST.read(1.0, uuid) if is_lost else signals.GPU_LOST.missing(reason, uuid)
        for figure, signal in FIGURES.items():
            if figure in known.figures:
                yield signal.missing(reason, uuid)
        if known.has_lists:
            yield signals.GPU_UNOWNED_MEMORY.missing(reason, uuid)
            yield from (signals.GPU_PROCESS_MEMORY.missing(reason, uuid, *holder) for holder in known.holders)

    def _held(self, known: _Known, now: float) -> Iterator[Reading]:
        """Memory by rank, repeated from the last list until that is old; once that who held some holds none.

        stallwatch_gpu_process_memory_bytes{gpu="GPU-8f3b…",server="vllm-8000",rank="TP3"} 8.02e+10
        """
        if not known.has_lists or (known.listed is None and not known.list_reason):
            return
        joined = self._joined.get(known.uuid, Joined())
        reason = known.list_reason or self._too_old(known, now) or joined.reason
        if reason:
            for holder in known.holders or (("", ""),):
                yield signals.GPU_PROCESS_MEMORY.missing(reason, known.uuid, *holder)
            return
        before, known.held = known.held, again(known.held, joined, lambda: _sizes(known.uuid, joined))
        if known.held is not before:
            holders = tuple((server, rank) for _, server, rank in (reading.labels for reading in known.held.readings))
            gone = [holder for holder in known.holders if holder not in holders]
            known.holders = holders
            yield from (signals.GPU_PROCESS_MEMORY.missing("vanished", known.uuid, *holder) for holder in gone)
        yield from known.held.readings

    def _too_old(self, known: _Known, now: float) -> str:
        intervals = self._config.intervals
        oldest = now - OLD_LISTS * max(intervals.gpu_processes, intervals.gpu)
        return "timeout" if known.listed is not None and known.listed.at < oldest else ""

    def _unowned(self, known: _Known, now: float, blind: str, holders: Holders) -> Iterator[Reading]:
        """Worked out for each new list, and repeated until the next."""
        if not known.has_lists or (known.listed is None and not known.list_reason):
            return
        joined = self._joined.get(known.uuid, Joined())
        reason = known.list_reason or self._too_old(known, now) or blind or joined.reason
        if not reason and known.listed is not None and known.listed.at == now:
            used = None if known.is_coherent else known.answer.values.get("memory_used")
            known.left = known.unowned.look(joined, used, now, holders)
        left = Left(None, reason) if reason else known.left
        if left is not None:
            known.nobodys = again(known.nobodys, left, lambda: [_nobodys(known.uuid, left)])
            yield from known.nobodys.readings

    def _uses(self, scene: Scene) -> Iterator[GpuUse]:
        """By the last list there was: while the driver hangs or the card is lost, its processes stay on it."""
        found = {
            GpuUse(uuid, owner.process.id.pid): None
            for uuid, joined in self._joined.items()
            for _, owner in joined.owners
            if owner.process is not None
        }
        yield from found

    def _once(self, readings: Iterable[Reading]) -> Iterator[Reading]:
        """What a card does not support is said and counted once, not at every look of a healthy card for ever.

        Until it is had, and not had again.  The same goes for a kernel log that cannot be read.  That a stranger
        holds memory, though not how much, has to be said again and again: else the card would count as ours alone.
        """
        of_told = {name for name, _ in self._told}
        for reading in readings:
            if reading.value is not None and reading.signal.name not in of_told:
                yield reading  # nearly all of them
                continue
            key = reading.signal.name, reading.labels
            if reading.value is not None or self._is_stranger(reading):
                self._told.discard(key)
            elif reading.reason == "not_supported" or reading.signal is XID_ERRORS:
                if key in self._told:
                    continue
                self._told.add(key)
            yield reading

    def _is_stranger(self, reading: Reading) -> bool:
        if reading.signal is not signals.GPU_PROCESS_MEMORY or reading.labels[1]:
            return False
        return not self._cards[reading.labels[0]].list_reason


def _has_no_access(answer: Answer) -> bool:
    """Every card at once cannot be opened: a control group took the devices from us, and no card is lost."""
    if any(not _silence(card) for card in answer.cards):
        return False
    return bool(answer.broken) and set(answer.broken.values()) <= _NO_ACCESS


def _silence(card: CardAnswer) -> str:
    """Why a card says nothing at all (of READ_REASONS); "" when it says something, or there is nothing to say."""
    codes = [code for code in card.codes.values() if reason_of(code) != "not_supported"]
    return reason_of(codes[0]) if codes and not card.values else ""


def _spoken(known: _Known, driver: str) -> Mapping[str, Reading]:
    """The figures of a card that answers; the very same readings of those that say the same."""
    card, told = known.answer, known.told
    labels = (card.uuid, card.index, card.name, card.capability, driver, card.pci, card.mig)
    shape = labels, tuple(card.values), card.codes
    if known.shape != shape:
        known.shape, made = shape, _all_spoken(card, labels)
        known.told = {name: told[name] if told.get(name) == reading else reading for name, reading in made.items()}
        return known.told
    for figure, value in card.values.items():
        if figure in told and told[figure].value != value:
            told[figure] = FIGURES[figure].read(value, card.uuid)
    return told


def _all_spoken(card: CardAnswer, labels: tuple[str, ...]) -> dict[str, Reading]:
    told = {signals.GPU_INFO.name: signals.GPU_INFO.read(1.0, *labels)}
    told[signals.GPU_LOST.name] = signals.GPU_LOST.read(0.0, card.uuid)
    for figure, signal in FIGURES.items():
        if figure in card.values:
            told[figure] = signal.read(card.values[figure], card.uuid)
        elif figure in card.codes:
            told[figure] = signal.missing(reason_of(card.codes[figure]), card.uuid)
    return told


def _sizes(uuid: str, joined: Joined) -> Iterator[Reading]:
    """What each holds of a card; never a partial sum."""
    sizes: dict[tuple[str, str], list[int | None]] = {}
    for row, owner in joined.owners:
        sizes.setdefault((owner.server, owner.rank), []).append(row.bytes)
    for holder, found in sizes.items():
        if None in found:
            yield signals.GPU_PROCESS_MEMORY.missing("not_supported", uuid, *holder)
        else:
            yield signals.GPU_PROCESS_MEMORY.read(sum(size or 0 for size in found), uuid, *holder)


def _nobodys(uuid: str, left: Left) -> Reading:
    if left.bytes is None:
        return signals.GPU_UNOWNED_MEMORY.missing(left.reason, uuid)
    return signals.GPU_UNOWNED_MEMORY.read(left.bytes, uuid)
