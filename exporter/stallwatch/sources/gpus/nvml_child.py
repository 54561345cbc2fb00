"""What the driver says about the cards, got by a helper process (nvml) that may hang in it.

The parent waits no longer than a deadline.  A helper that is overdue is left to finish, for killing one in the middle
of a driver call can break a card; its late answer is dropped and it is asked again.  While it hangs, a second one may
try, never more: the driver itself may be what hangs.

A new driver, a card that was reset and whatever else needs a new process is tried with a second helper as well; it
takes over when it has more to say than the first.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import mmap
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

from ...children import Child
from . import nvml

log = logging.getLogger(__name__)

MOST_CHILDREN = 2
SECOND_SECONDS = 60.0
"""How long the first is overdue before a second one tries."""
KILL_SECONDS = 600.0
"""How long one that was told to end may hang on before it is killed."""
WARN_SECONDS = 10.0
"""How long the driver may owe an answer before that is said: opening many cards for the first time takes seconds."""
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Seconds until a helper that failed is replaced; twice as long each time."""
LONGEST_REPAIR = 300.0
"""The same while other cards answer: a card that is lost mostly stays so, and opening all the others costs them."""
ABSENT_SECONDS = 600.0
"""How often a machine without GPUs is looked at again."""
RENEW_SECONDS, RENEW_BYTES = 86_400.0, 256 << 20
"""When a helper is replaced although it works: driver libraries have leaked memory."""
FORGET_SECONDS = 86_400.0
"""How long a card that was seen is missed."""
LARGEST_ANSWER = 1 << 20
_CLOSE_SECONDS = 0.4

CONTROL = Path("/dev/nvidiactl")
ABSENT = {nvml.LIBRARY_NOT_FOUND: "library", nvml.NO_BINDING: "binding", 9: "driver", nvml.NO_GPU: "cards"}
SICK = frozenset((nvml.UNINITIALIZED, nvml.MISMATCH))
DEAD = frozenset((1, 2, 6, 15, 16, 17, 18, 28, 999))
"""Codes that, when a card says nothing else, may end with a new process."""
CLOSED = frozenset((4, 17))
"""Codes of a card that is there, but not for us."""

HANDED_DOWN = ("LD_LIBRARY_PATH", "NVML_STANDIN_STATE")
"""The only variables a helper gets, where they are set: where libraries are, and what a stand-in library says."""


@dataclass(frozen=True, slots=True)
class Row:
    """One process on a card; `bytes` None: the driver does not say."""

    pid: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class CardAnswer:
    """A card, or a MIG instance of one.

    `index` is "3", of an instance "3:1"; `capability` "9.0" or ""; `pci` "0000:10:00.0"; `mig` "" (not supported),
    "disabled", "enabled" or "instance".  `values` in SI units, ratios from 0 to 1: memory_used, memory_total,
    memory_reserved, utilization, memory_utilization, energy, power, power_limit, sm_clock, temperature, pcie_receive,
    pcie_transmit, recovery_action, sm_activity, tensor_activity, dram_activity.  `codes`: the driver's code for each
    that was asked for and not had; a rate or mean that has only one end yet is in neither.
    `processes` None: not asked for this time (of a card split into instances: never), or not had ("processes" is then
    in `codes`).
    """

    uuid: str
    index: str
    name: str
    capability: str
    pci: str
    mig: str
    values: Mapping[str, float]
    codes: Mapping[str, int]
    processes: tuple[Row, ...] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One cycle over all cards.

    `lost`: UUIDs of cards that the driver says are gone, and of those seen before that it does not find any more.
    `broken`: index -> code of cards that cannot be opened.  `xids`: (uuid, xid) since the last answer, from events.
    `code`: 0, else why there is nothing at all (the driver's code; 999 also when the helper died).
    """

    driver: str = ""
    cards: tuple[CardAnswer, ...] = ()
    lost: tuple[str, ...] = ()
    broken: Mapping[int, int] = field(default_factory=dict)
    xids: tuple[tuple[str, int], ...] = ()
    code: int = 0


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The driver owes an answer since `since` (monotonic seconds: when it was asked; the call began then or later).

    `call` and `card` are what the helper is in: "nvmlDeviceGetMemoryInfo", 3; "start" before it comes to the driver,
    "" between two calls.
    """

    since: float
    call: str
    card: int | None


@dataclass(frozen=True, slots=True)
class Absent:
    """No GPU here: no "library", no "binding" (pynvml) for it, no "driver" loaded, or no "cards"."""

    why: str


class Process(Protocol):
    """What is used of subprocess.Popen; a test does without a process."""

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


def start_child(note: int) -> subprocess.Popen[bytes]:
    """The helper, with next to nothing of our environment.  Raises OSError when it cannot be started."""
    found = importlib.util.find_spec("pynvml")  # found, not imported: only the helper pays for it
    folder = Path(found.origin).parent if found is not None and found.origin else Path("/nonexistent")
    return Child(
        [sys.executable, "-I", "-S", nvml.__file__, str(folder), str(note)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        pass_fds=(note,),
        env={name: os.environ[name] for name in HANDED_DOWN if name in os.environ},
    )


class _Child:
    """One helper process: what it was asked, and what has come of it."""

    def __init__(self, start: Callable[[int], Process], now: float) -> None:
        self.began = now
        self.asked: float | None = None  # None: it is free
        self.why = ""  # of a second one: overdue, repair, renew
        self.told_to_end: float | None = None
        self.killed = False
        self.resident = 0
        self._line = bytearray()
        note = os.memfd_create("nvml-note")
        try:
            os.truncate(note, nvml.NOTE.size)
            self._note = mmap.mmap(note, nvml.NOTE.size)
            self.process = start(note)
        finally:
            os.close(note)
        assert self.process.stdin is not None  # noqa: S101  # both pipes were asked for
        assert self.process.stdout is not None  # noqa: S101
        self._input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)

    def ask(self, request: bytes, now: float) -> None:
        """Raises OSError when it is dead."""
        self.asked = now
        self._input.write(request)

    def answered(self) -> dict[str, Any] | None:
        """What has come, once it is whole; None until then.  Raises EOFError when nothing more will come."""
        with suppress(BlockingIOError):
            while part := os.read(self.output.fileno(), 1 << 16):
                self._line += part
                if self._line.endswith(b"\n"):
                    return self._whole()
                if len(self._line) > LARGEST_ANSWER:
                    break
            raise EOFError
        return None

    def _whole(self) -> dict[str, Any]:
        self.asked = None
        line, self._line = bytes(self._line), bytearray()
        try:
            found = json.loads(line)
        except ValueError as error:
            raise EOFError from error
        if not isinstance(found, dict):
            raise EOFError
        self.resident = int(found.get("resident", 0))
        return found

    def is_in(self) -> tuple[str, int | None]:
        """Which call, for which card, as far as it said."""
        began, card, name = nvml.NOTE.unpack_from(self._note)
        call = name.rstrip(b"\0").decode("ascii", "replace")
        if not began:
            return ("" if call else "start"), None
        return call, card if card >= 0 else None

    def end(self, now: float) -> None:
        """Tell it to end: at once when it is idle, else when its call returns."""
        self.told_to_end = now
        if self.is_in()[0] == "start":  # it has not come to the driver yet
            self.process.kill()
        for pipe in (self._input, self.output):
            with suppress(OSError):
                pipe.close()

    def is_gone(self, now: float) -> bool:
        """Whether it has ended; kills it when it had long enough for that."""
        if self.process.poll() is not None:
            self._note.close()
            return True
        if not self.killed and self.told_to_end is not None and now - self.told_to_end >= KILL_SECONDS:
            self.process.kill()
            self.killed = True
        return False


def from_told(told: Mapping[str, Any]) -> Answer:
    """What the helper tells (nvml.Driver.answer).  Raises KeyError, TypeError, ValueError when it is something else."""
    if told["code"]:
        return Answer(code=int(told["code"]))
    return Answer(
        driver=told["driver"],
        cards=tuple(_card(card) for card in told["cards"]),
        lost=tuple(told["lost"]),
        broken={int(index): code for index, code in told["broken"].items()},
        xids=tuple((uuid, xid) for uuid, xid in told["xids"]),
    )


def _card(told: Mapping[str, Any]) -> CardAnswer:
    rows = told["processes"]
    return CardAnswer(**{**told, "processes": None if rows is None else tuple(Row(*row) for row in rows)})


def is_sick(answer: Answer) -> bool:
    """Whether a new process may have more to say."""
    return bool(answer.broken or answer.lost) or any(
        SICK & set(card.codes.values()) or (not card.values and DEAD & set(card.codes.values()))
        for card in answer.cards
    )


def answering(answer: Answer) -> int:
    return sum(1 for card in answer.cards if card.values)


class Nvml:
    """Asks the driver; see the module.  `is_there`: whether the driver's device node is."""

    def __init__(
        self,
        deadline_seconds: float = 2.0,
        start: Callable[[int], Process] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        is_there: Callable[[], bool] = CONTROL.exists,
    ) -> None:
        self._deadline, self._start = deadline_seconds, start or start_child
        self._monotonic, self._is_there = monotonic, is_there
        self._first: _Child | None = None
        self._second: _Child | None = None
        self._ending: list[_Child] = []
        self._since: float | None = None  # the driver owes an answer
        self._rest: tuple[float, Answer | Absent] | None = None  # until when nothing is tried; what is said meanwhile
        self._pause = self._repair_pause = FIRST_PAUSE
        self._repair_at = 0.0
        self._last: Answer | None = None  # of those with cards
        self._known: dict[str, tuple[int, float]] = {}  # UUID -> index and last time of the cards that were seen
        self._was_there = False
        self._said = ""
        self._lock = threading.Lock()
        self._closing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False

    @property
    def in_flight_since(self) -> float | None:
        """Since when the driver owes an answer (monotonic seconds); None when it does not, or not for long."""
        since = self._since
        return since if since is not None and self._monotonic() - since >= self._deadline else None

    def ask(self, processes: bool, events: bool) -> Answer | Unanswered | Absent:
        """What the driver says, within the deadline; `processes` and `events` cost more and are asked for rarely."""
        with self._lock:
            now = self._monotonic()
            if self._closed:
                return Unanswered(now, "start", None)
            self._ending = [helper for helper in self._ending if not helper.is_gone(now)]
            if (told := self._resting(now)) is not None:
                return told
            try:
                found = self._turn(f"{processes:d} {events:d}\n".encode(), now)
                return self._unanswered(now) if found is None else self._taken(from_told(found), now)
            except (OSError, EOFError, KeyError, TypeError, ValueError):  # it died, or is none of ours
                return self._failed(Answer(code=nvml.UNKNOWN), now)

    def close(self) -> None:
        """End every helper; one that hangs in the driver ends by itself when its call returns."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._closing, 1)
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):
            return  # whoever asks still has it; the end of our process closes the pipes
        try:
            now = self._monotonic()
            self._end_second(now)
            self._end_first(now)
            until = time.monotonic() + _CLOSE_SECONDS
            while self._ending and time.monotonic() < until:
                self._ending = [helper for helper in self._ending if not helper.is_gone(now)]
                time.sleep(0.005)
            os.close(self._closing)
        finally:
            self._lock.release()

    def _turn(self, request: bytes, now: float) -> dict[str, Any] | None:
        """What the driver says; None when it does not answer.  Raises OSError, EOFError when the helper is dead."""
        helper = self._ready(request, now)
        if helper is None:
            self._since = self._since or now
            return None
        helper.ask(request, now)
        self._since = self._since or now
        come = select.poll()  # select() refuses descriptors above 1023
        come.register(helper.output, select.POLLIN)
        come.register(self._closing, select.POLLIN)
        until = now + self._deadline
        while (found := helper.answered()) is None:
            left = until - self._monotonic()
            if left <= 0 or self._closed or not come.poll(1000 * left):
                return None
        return found

    def _ready(self, request: bytes, now: float) -> _Child | None:
        """The helper to ask; None while none is free."""
        tried = self._tried()
        if self._first is None:
            if self._has_room():
                self._first = _Child(self._start, now)
            return self._first
        if self._first.asked is not None:
            if self._first.answered() is None:
                return self._first_hangs(request, tried is not None, now)
            self._since = None  # too late to be used, but it works
        self._look_at_second(request, tried, now)
        return self._first

    def _first_hangs(self, request: bytes, second_answers: bool, now: float) -> _Child | None:
        """The second when it answers; else it is started when it is time, and the first given up long after."""
        first, second = self._first, self._second
        assert first is not None  # noqa: S101  # it hangs
        assert first.asked is not None  # noqa: S101
        if second_answers:
            self._end_first(now)
            self._since = None
            return self._first
        if second is None:
            if now - first.asked >= SECOND_SECONDS:
                self._try_second("overdue", request, now)
        elif second.asked is not None and now - second.asked >= KILL_SECONDS:
            self._end_first(now)
            first.told_to_end = now - KILL_SECONDS  # both have had their time: make room for another
        return None

    def _look_at_second(self, request: bytes, tried: Answer | None, now: float) -> None:
        """The first is free: does the second take over, is it superfluous, or is one wanted?"""
        last, second = self._last or Answer(), self._second
        if second is None:
            if why := self._wants_another(now):
                self._try_second(why, request, now)
        elif second.why == "overdue" or (second.why == "repair" and not is_sick(last)):
            self._end_second(now)
        elif tried is not None:
            more = answering(tried) - answering(last)
            if not tried.code and (more > 0 or (more == 0 and second.why == "renew")):
                self._end_first(now)
            else:
                self._end_second(now)
        elif second.asked is not None and now - second.asked >= SECOND_SECONDS:
            self._end_second(now)

    def _wants_another(self, now: float) -> str:
        first = self._first
        assert first is not None  # noqa: S101  # it is free
        if self._last is not None and is_sick(self._last):
            return "repair" if now >= self._repair_at else ""
        is_old = now - first.began >= RENEW_SECONDS or first.resident >= RENEW_BYTES
        return "renew" if is_old and now >= self._repair_at else ""

    def _try_second(self, why: str, request: bytes, now: float) -> None:
        """Start one if there may be another; it has until the next turn, nobody waits for it."""
        if not self._has_room():
            return
        self._repair_at = now + self._repair_pause
        self._repair_pause = min(2 * self._repair_pause, LONGEST_REPAIR)
        with suppress(OSError):
            self._second = _Child(self._start, now)
            self._second.why = why
            self._second.ask(request, now)

    def _tried(self) -> Answer | None:
        """What the second said; one that is dead or talks nonsense is dropped."""
        if self._second is None or self._second.asked is None:
            return None
        try:
            told = self._second.answered()
            return None if told is None else from_told(told)
        except (OSError, EOFError, KeyError, TypeError, ValueError):
            self._end_second(self._monotonic())
            return None

    def _has_room(self) -> bool:
        return (self._first is not None) + (self._second is not None) + len(self._ending) < MOST_CHILDREN

    def _end_first(self, now: float) -> None:
        """The second, if there is one, takes its place."""
        if self._first is not None:
            self._first.end(now)
            self._ending.append(self._first)
        self._first, self._second = self._second, None

    def _end_second(self, now: float) -> None:
        if self._second is not None:
            self._second.end(now)
            self._ending.append(self._second)
        self._second = None

    def _resting(self, now: float) -> Answer | Absent | None:
        """What is said while nothing is tried; None when it is time to try."""
        if self._rest is None:
            return None
        until, told = self._rest
        was_there, self._was_there = self._was_there, self._is_there()
        if now < until and not (isinstance(told, Absent) and self._was_there and not was_there):
            return told
        self._rest = None
        return None

    def _taken(self, answer: Answer, now: float) -> Answer | Absent:
        """An answer that came in time."""
        assert self._first is not None  # noqa: S101  # it answered
        self._since = None
        if not answer.code and not answer.cards and not answer.broken:
            answer = replace(answer, code=nvml.NO_GPU)
        if answer.code:
            return self._failed(answer, now)
        if now - self._first.began >= LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        self._say("answers")
        seen = ((card.uuid, (int(card.index), now)) for card in answer.cards if card.mig != "instance")
        self._known.update(seen)
        answer = replace(answer, lost=self._lost(answer, now))
        if not is_sick(answer):
            self._repair_pause = FIRST_PAUSE
        self._last = answer
        return answer

    def _forget(self, now: float) -> None:
        self._known = {uuid: seen for uuid, seen in self._known.items() if now - seen[1] < FORGET_SECONDS}

    def _lost(self, answer: Answer, now: float) -> tuple[str, ...]:
        """Also those that a new process could not open or find; not when no card answers: then it is our access."""
        self._forget(now)
        found = {card.uuid for card in answer.cards}
        lost = dict.fromkeys(answer.lost)
        for uuid, (index, _) in self._known.items():
            code = answer.broken.get(index, nvml.NO_GPU)
            if uuid not in found and code not in CLOSED and (code == nvml.LOST or answering(answer)):
                lost[uuid] = None
        return tuple(lost)

    def _failed(self, told: Answer, now: float) -> Answer | Absent:
        """No helper that is of use: rest before another one is tried."""
        self._since = None
        self._end_first(now)
        self._forget(now)
        if told.code in ABSENT and not self._known:
            absent = Absent(ABSENT[told.code])
            self._was_there = self._is_there()
            self._rest = now + ABSENT_SECONDS, absent
            self._say("absent", reason=absent.why)
            return absent
        self._say("failed", code=told.code)
        self._rest = now + self._pause, told
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return told

    def _unanswered(self, now: float) -> Unanswered:
        since = now if self._since is None else self._since
        call, card = ("start", None) if self._first is None else self._first.is_in()
        if now - since >= WARN_SECONDS:
            self._say("hangs", call=call, card=card)
        return Unanswered(since, call, card)

    def _say(self, state: str, **facts: object) -> None:
        """One line when something changes."""
        before, self._said = self._said, state
        if state == before or (state == "answers" and before in ("", "absent")):
            return
        level, phrase = _SAID[state]
        log.log(level, phrase, extra=facts)


_SAID = {
    "answers": (logging.INFO, "GPU driver answers again"),
    "absent": (logging.INFO, "no GPU to watch"),
    "hangs": (logging.WARNING, "GPU driver does not answer"),
    "failed": (logging.WARNING, "GPU driver cannot be asked"),
}
