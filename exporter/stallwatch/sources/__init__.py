"""The sources: the only code that touches the machine.

A source has a name (= module, flag, label), the signals it may yield, and `read`, which yields what it saw.
It owns no clock and catches only what it expects: a value that cannot be read is a Reading without a value;
a failure of the whole is an exception, caught by the poller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from ..model import Observation, Scene, Signal

if TYPE_CHECKING:
    from ..config import Config
    from ..frameworks import Framework


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as a source may see it: roots, settings, frameworks.  A folder of recorded files is as good.

    `proc` is where /proc is mounted; `root` is prefixed to configured log paths.  `read_deadline_seconds`
    bounds every read that can block (see blocking_reads).
    """

    config: Config
    frameworks: tuple[Framework, ...]
    proc: Path = Path("/proc")
    root: Path = Path("/")
    read_deadline_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Moment:
    """When a read happens: monotonic seconds for ages, Unix seconds for file times."""

    monotonic: float
    wall: float


class Source(Protocol):
    """What the poller runs.  Constructed once with the Host; may keep descriptors and counters.

    It may also have: `configure(config)`, called when the configuration is read again; `again_seconds`, when it wants
    to look sooner than its interval; `in_flight_since`, the monotonic time at which a call began that its last read
    did not wait for; `incomplete`, true when that read got nothing of what it asked for; `absent`, true while there
    is nothing on this node that it could read; `mean_seconds`, how far apart two reads must be for its means to be
    of use; `rests(scene, at)`, whether a read at `at` (monotonic) would yield the readings of the last one and nothing
    else.
    """

    name: ClassVar[str]
    signals: ClassVar[tuple[Signal, ...]]

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """Yield what can be seen now."""
        ...

    def close(self) -> None:
        """Give back descriptors and children."""
        ...
