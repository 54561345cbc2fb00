"""One thread per source: reads at its interval, measures, and holds the one broad `except`.

A source that hangs stops its own thread only; `health()` shows since when.  Results wait in `take()` until the
daemon fetches them; a source is not read again while too many of them wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from . import signals
from .model import Event, GpuUse, Listener, Observation, RankName, Reading, Result, Scene, Server, SourceHealth
from .sources import Moment, Source

log = logging.getLogger(__name__)

MOST_WAITING = 32
"""Results that may wait for the daemon; then the source pauses."""

URGENT_EVENTS = frozenset(("fatal", "shutdown", "ready"))
_DEATHS = frozenset((signals.RANK_ALIVE.name, signals.SERVER_ALIVE.name))

T = TypeVar("T")


def sort(
    name: str, observations: Iterable[Observation], started: float, monotonic: Callable[[], float] = time.monotonic
) -> Result:
    """Make a Result of what a source yielded.  Raises what the source raises."""
    seen = list(observations)
    others: dict[type, list[Observation]] = {kind: [] for kind in (Event, Server, RankName, Listener, GpuUse)}
    rest = [one for one in seen if type(one) is not Reading]  # few, mostly none
    for observation in rest:
        others[type(observation)].append(observation)

    def of(kind: type[T]) -> tuple[T, ...]:
        return tuple(others[kind])  # type: ignore[arg-type]

    return Result(
        source=name,
        started=started,
        finished=monotonic(),
        readings=tuple([one for one in seen if type(one) is Reading] if rest else seen),  # type: ignore[arg-type]
        events=of(Event),
        servers=of(Server) if name == "processes" else None,
        rank_names=of(RankName),
        listeners=of(Listener) if name == "sockets" else None,
        gpu_uses=of(GpuUse) if name == "gpu" else None,
    )


def is_urgent(result: Result) -> bool:
    """A certain sign ticks at once: a death, a fatal line, an orderly end, ready."""
    if any(event.event in URGENT_EVENTS for event in result.events):
        return True
    if result.servers is None:
        return False  # deaths are told by the one source that finds servers
    return any(reading.value == 0 and reading.signal.name in _DEATHS for reading in result.readings)


class Poller:
    """Runs one source in a thread of its own.  `notify` is called (from that thread) with each Result."""

    def __init__(
        self,
        source: Source,
        interval: float,
        scene: Callable[[], Scene],
        notify: Callable[[Result], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.source, self.interval = source, interval
        self._scene, self._notify, self._monotonic, self._wall = scene, notify, monotonic, wall
        self._results: list[Result] = []
        self._errors: Counter[str] = Counter()
        self._missing: list[str] = []  # why which readings of the last read have no value
        self._changed = threading.Condition()
        self._stopping = False
        self._has_ended = self._is_left = False
        self._woken = False
        self._in_flight: float | None = None
        self._overdue: float | None = None  # since when a call waits that outlived the source's last read
        self._incomplete = False  # the source's last read returned, but got nothing
        self._last_success: float | None = None
        self._last: Result | None = None
        self.finished = 0  # reads so far
        self._thread = threading.Thread(target=self._run, name=f"source-{source.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end.  One that hangs in a read is left behind (it is a daemon thread)."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; True when it ended, so that the source may be closed."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Have the source closed by its own thread, should that ever come back from where it hangs."""
        with self._changed:
            self._is_left, has_ended = True, self._has_ended
        if has_ended:
            self.source.close()

    @property
    def is_lost(self) -> bool:
        """Its thread ended though nobody asked it to: what it raised was not to be caught, or could not be."""
        return self._thread.ident is not None and not self._stopping and not self._thread.is_alive()

    def wake(self) -> None:
        """Read again now: the scene changed."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take(self) -> list[Result]:
        """The results since the last call, oldest first."""
        with self._changed:
            results, self._results = self._results, []
            self._changed.notify_all()
        return results

    def health(self) -> SourceHealth:
        last, success = self._last, None
        if last is not None:
            success = last.error is None and not self._incomplete
        return SourceHealth(
            source=self.source.name,
            success=success,
            duration_seconds=last.finished - last.started if last else None,
            last_success=self._last_success,
            in_flight_since=self._in_flight if self._overdue is None else self._overdue,
        )

    @property
    def is_absent(self) -> bool:
        """There is nothing on this node that the source could read: it has no health to speak of, unless it fails."""
        has_failed = self._last is not None and self._last.error is not None
        return bool(getattr(self.source, "absent", False)) and not has_failed

    @property
    def mean_seconds(self) -> float:
        """What should lie between two reads, for the means that the source takes; 0 = nothing."""
        return 0.0 if self.is_absent else float(getattr(self.source, "mean_seconds", 0.0))

    def read_errors(self) -> dict[str, int]:
        """reason -> values that could not be read so far."""
        return dict(self._errors)

    def turn(self) -> Result:
        """Read once and keep the result for `take`."""
        result = self.read_once()
        with self._changed:
            self._results.append(result)
        return result

    def read_once(self) -> Result:
        """One read, measured and guarded; a source that rests is not read, and says what it said last."""
        started = self._in_flight = self._monotonic()
        cpu = time.thread_time()
        seen: list[Observation] = []
        wall = self._wall()
        try:
            if (result := self._as_before(scene := self._scene(), started)) is None:
                seen.extend(self.source.read(scene, Moment(started, wall)))  # up to a failure, too
                result = sort(self.source.name, seen, started, self._monotonic)
        except Exception as error:  # the one broad catch: a broken source must not stop the others
            result = self._failed(error, seen, started)
            self._errors["error"] += 1
            if self._last is None or self._last.error is None:
                log.warning("source failed", exc_info=True, extra={"source": self.source.name})
        else:
            result = self._counted(result)
            if not getattr(self.source, "incomplete", False):
                self._last_success = result.finished
            if self._last is not None and self._last.error is not None:
                log.info("source works again", extra={"source": self.source.name})
        result = replace(result, cpu_seconds=time.thread_time() - cpu, wall=wall)
        self._overdue = getattr(self.source, "in_flight_since", None)
        self._incomplete = getattr(self.source, "incomplete", False)
        self._in_flight, self._last = None, result
        self.finished += 1
        return result

    def _as_before(self, scene: Scene, at: float) -> Result | None:
        """The readings of the last read once more, when the source says that they still hold."""
        last, rests = self._last, getattr(self.source, "rests", None)
        if last is None or last.error is not None or rests is None or not rests(scene, at):
            return None
        return Result(last.source, at, self._monotonic(), readings=last.readings)

    def _counted(self, result: Result) -> Result:
        """Count what could not be read.  Readings that did not change are the very same, so that all can tell."""
        if self._last is None or result.readings != self._last.readings:
            self._missing = [reading.reason for reading in result.readings if reading.reason]
        elif result.readings is not self._last.readings:
            result = replace(result, readings=self._last.readings)
        self._errors.update(self._missing)
        return result

    def _failed(self, error: Exception, seen: list[Observation], started: float) -> Result:
        """No readings; but lines that were read from a log are not read again, so their events are kept."""
        self._missing = []
        kept = [observation for observation in seen if isinstance(observation, Event | RankName)]
        return replace(
            sort(self.source.name, kept, started, self._monotonic),
            servers=None,
            listeners=None,
            gpu_uses=None,
            error=type(error).__name__,
        )

    def _run(self) -> None:
        while self._go_on():
            pass
        with self._changed:
            self._has_ended, is_left = True, self._is_left
        if is_left:
            self.source.close()

    def _go_on(self) -> bool:
        """Read, and rest until the next time; False when there is none."""
        begun = self._monotonic()
        self._notify(self.turn())
        again = getattr(self.source, "again_seconds", None)
        pause = min(self.interval, again) if again else self.interval
        return self._rest(begun + pause)

    def _rest(self, until: float) -> bool:
        """Wait for the next turn; False when it is time to end."""
        with self._changed:
            while not self._stopping:
                left = until - self._monotonic()
                room = len(self._results) < MOST_WAITING
                if room and (left <= 0 or self._woken):
                    self._woken = False
                    return True
                self._changed.wait(left if room else None)
        return False
