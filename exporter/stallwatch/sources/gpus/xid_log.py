"""The faults of the node's cards that the kernel log tells: kernel_log read through xid."""

from __future__ import annotations

from pathlib import Path

from .. import Moment
from .kernel_log import KernelLog
from .xid import Faults, Lost, Xid


class XidLog:
    """See the module.  The first look tells the history since boot, as far as the kernel still has it."""

    def __init__(self, root: Path, log: KernelLog | None = None) -> None:
        self._log = log or KernelLog(root)
        self._faults = Faults()

    @property
    def reason(self) -> str | None:
        """Why the log could not be read at the last look (of READ_REASONS); None = it could."""
        return self._log.reason

    @property
    def is_caught_up(self) -> bool:
        """Whether the last look read all there was; until the first time what is told is history."""
        return self._log.is_caught_up

    @property
    def missed(self) -> int:
        """Gaps in what was read: the kernel's ring was overwritten, or a record was too long."""
        return self._log.missed

    def read(self, now: Moment) -> tuple[Xid | Lost, ...]:
        """New faults in their order, each once; never waits.

        Only the kernel's own records count: what a user writes to the log has another facility.
        """
        records = (record for record in self._log.read(now) if record.facility == 0)
        return tuple(self._faults.of((record.at, record.text) for record in records))

    def close(self) -> None:
        self._log.close()
