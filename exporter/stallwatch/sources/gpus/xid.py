"""Faults of NVIDIA cards as the kernel log tells them: Xid lines, and cards that fell off the bus.  Pure.

The driver (NVRM) prints an Xid as `NVRM: Xid (PCI:0000:61:00): 79, pid=1234, name=python3, GPU has fallen off the bus.`
Older drivers leave out `PCI:` or the PID, an instance of a divided card stands behind its address, and tools that make
such lines for tests leave out the comma.  A card may also be lost without an Xid, which is told over several lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

REPEAT_SECONDS = 5.0
"""One fault prints a line for each channel it hits: the same again within this time is no other fault."""
CAUSE_SECONDS = 60.0
"""What follows a fault on the same card within this time (45, 43, 154 ..) may be its consequence."""
MOST_REMEMBERED = 4096

_LOST_LINES = 3
"""Lines behind `The NVIDIA GPU ..` in which it may say that the card is gone."""

_DRIVER = "NVRM:"
_PCI = r"(?:PCI:)?(?P<pci>(?:[0-9a-f]{4,8}:)?[0-9a-f]{1,2}:[0-9a-f]{1,2}(?:\.[0-7])?)"
_XID = re.compile(
    rf"NVRM:\s+Xid\s+\({_PCI}(?:\s+GPU-I:\w+)?\):\s*(?P<code>\d{{1,5}})\b(?:,?\s*pid='?(?P<pid>\d{{1,10}})\b)?", re.I
)
_LOST = re.compile(rf"NVRM:\s+GPU\s+(?:at\s+)?{_PCI}:\s+GPU has fallen off the bus", re.I)
_NAMED = re.compile(rf"NVRM:\s+The NVIDIA (?:probed )?GPU\s+{_PCI}", re.I)
_GONE = "fallen off the bus"


@dataclass(frozen=True, slots=True)
class Xid:
    """One fault.  `pci` as by `normalised`; `pid` as the host counts, None = not known; `at` in Unix seconds.

    `cause`: the code that came first on this card a short while ago, so that this one may be its consequence; None
    for the first one.
    """

    pci: str
    code: int
    pid: int | None
    at: float
    cause: int | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The driver said that a card fell off the bus, without an Xid (with one it is Xid 79)."""

    pci: str
    at: float


def normalised(pci: str) -> str:
    """`PCI:0000:61:00`, `00000000:61:00.0` and `61:00` are all the card `0000:61:00.0`."""
    address, _, function = pci.strip().lower().removeprefix("pci:").partition(".")
    *domain, bus, device = address.split(":")
    return f"{int(''.join(domain) or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or '0'}"


@dataclass(slots=True)
class Faults:
    """Lines of the kernel log in their order -> faults, each once.  Remembers what may be repeated or caused."""

    _named: list[tuple[str, int]] = field(default_factory=list)  # cards, and in how many lines more they may be lost
    _told: dict[tuple[str, int, int | None], float] = field(default_factory=dict)
    _first: dict[str, Xid] = field(default_factory=dict)  # by card

    def of(self, messages: Iterable[tuple[float, str]]) -> Iterator[Xid | Lost]:
        """`messages`: Unix seconds and the text of each kernel record.  Only those that NVRM begins are looked at.

        A record may hold several lines.  They are believed because the driver began the first: in a record of
        anybody else, such a line would be a name that a user chose.
        """
        for at, text in messages:
            if text.startswith(_DRIVER):
                for line in text.splitlines():
                    yield from self._of_line(at, line.strip())

    def _of_line(self, at: float, line: str) -> Iterator[Xid | Lost]:
        if match := _XID.match(line):
            pid = int(match["pid"]) if match["pid"] else None
            yield from self._once(Xid(normalised(match["pci"]), int(match["code"]), pid, at))
        elif match := _LOST.match(line):
            yield from self._gone(normalised(match["pci"]), at)
        elif line.startswith(_DRIVER):
            yield from self._of_several(at, line)

    def _of_several(self, at: float, line: str) -> Iterator[Xid | Lost]:
        """`The NVIDIA GPU 0000:b3:00.0 .. has fallen off the bus`, broken anywhere behind the address."""
        self._named = [(pci, left - 1) for pci, left in self._named if left > 0]
        if match := _NAMED.match(line):
            self._named.append((normalised(match["pci"]), _LOST_LINES))
        if _GONE in line and self._named:
            yield from self._gone(self._named.pop(0)[0], at)

    def _once(self, xid: Xid) -> Iterator[Xid]:
        if self._is_new((xid.pci, xid.code, xid.pid), xid.at):
            first = self._first.get(xid.pci)
            if first is None or xid.at - first.at > CAUSE_SECONDS:
                self._first[xid.pci] = xid
                yield xid
            else:
                yield replace(xid, cause=first.code)

    def _gone(self, pci: str, at: float) -> Iterator[Lost]:
        if self._is_new((pci, -1, None), at):
            yield Lost(pci, at)

    def _is_new(self, fault: tuple[str, int, int | None], at: float) -> bool:
        """Counted from the one that was told: of a card that never stops, one in each while is told."""
        told = self._told.get(fault)
        if told is not None and 0 <= at - told < REPEAT_SECONDS:
            return False
        if len(self._told) >= MOST_REMEMBERED:
            self._forget(lambda then: at - then >= REPEAT_SECONDS)
        self._told[fault] = at
        return True

    def _forget(self, is_old: Callable[[float], bool]) -> None:
        kept = {fault: then for fault, then in self._told.items() if not is_old(then)}
        self._told = kept if len(kept) < MOST_REMEMBERED else {}
