"""Faults of the node's cards: counters of Xids, and cards that are off the bus until they answer again.

The kernel log names a card by its PCI address, NVML by its UUID.  Counted is by address, so that a fault which is read
before its card has answered, or of a card that never will, finds its name once that is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ...model import Reading, Signal
from .xid import Lost, Xid

XID_ERRORS = Signal(
    "gpu_xid_errors_total",
    "Faults of the card that the driver reported, by Xid (its number for the kind of fault); the kernel log's since "
    "boot, else NVML's since the exporter runs.  gpu is unknown for a card that never answered.",
    ("gpu", "xid"),
    "gpu",
    "counter",
)
XID_LAST = Signal(
    "gpu_xid_last_timestamp_seconds", "Unix time of the card's last fault of this Xid.", ("gpu", "xid"), "gpu"
)
OFF_THE_BUS = 79
UNKNOWN = "unknown"
"""In the place of a UUID."""
MOST_SERIES = 1024


class Faults:
    """See the module.  `pci` is an address as `xid.normalised` writes it."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()  # by address and Xid
        self._last: dict[tuple[str, int], float] = {}
        self._names: dict[str, str] = {}  # by address
        self._off: set[str] = set()

    def take(self, faults: Iterable[Xid | Lost]) -> None:
        """What the kernel log says, in its order."""
        for fault in faults:
            if isinstance(fault, Xid):
                self.count(fault.pci, fault.code, fault.at)
            if isinstance(fault, Lost) or fault.code == OFF_THE_BUS:
                self._off.add(fault.pci)

    def count(self, pci: str, code: int, at: float) -> None:
        key = pci, code
        if key in self._counts or len(self._counts) < MOST_SERIES:
            self._counts[key] += 1
            self._last[key] = max(at, self._last.get(key, at))

    def answered(self, pci: str, uuid: str) -> None:
        """The card is there: it has a name, and is not off the bus."""
        self._names[pci] = uuid
        self._off.discard(pci)

    def is_off(self, pci: str) -> bool:
        """The driver said that the card fell off the bus, and it has not answered since."""
        return pci in self._off

    def readings(self) -> Iterator[Reading]:
        """stallwatch_gpu_xid_errors_total{gpu="GPU-8f3b…",xid="79"} 1"""
        counts: Counter[tuple[str, str]] = Counter()
        last: dict[tuple[str, str], float] = {}
        for (pci, code), count in self._counts.items():
            labels = self._names.get(pci, UNKNOWN), str(code)
            counts[labels] += count
            last[labels] = max(self._last[pci, code], last.get(labels, 0.0))
        for labels, count in counts.items():
            yield XID_ERRORS.read(count, *labels)
            yield XID_LAST.read(last[labels], *labels)
