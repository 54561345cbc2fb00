"""One followed log: its bytes, the files that were there before, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator

from ...model import LogPlace, LogSums, Reading
from .counters import Before, Voice
from .decode import Part, StreamUnwrapper
from .earlier import CHUNK_BYTES, Earlier, read_earlier
from .journal import JournalTail
from .lines import Batch, LogScanner
from .tail import LogTail

MUCH_BYTES = 4096
REST_TURNS, LONG_REST_TURNS = 4.5, 9.5
"""A log of a server that serves rests for so many intervals after it was read, for the long time if it gave so much:
to go to it costs much the same however much there is, and it says the same again and again.  Nothing is judged more
often than every five seconds but on a certain sign; and once a process of its server comes or goes it is read at once,
for a fatal line comes before."""
LONGEST_TURN_SECONDS = 1.0
"""Longer intervals count as this: a log that is not read must never be taken for one that is silent."""

Heard = tuple[Voice, Batch]


class FollowedLog:
    """One place of one server: the bytes, what they say, and since when they come as they are written.

    `name_of` names a stream that speaks in a file for the first time.
    """

    def __init__(
        self,
        place: LogPlace,
        tail: LogTail | JournalTail,
        make_scanner: Callable[[], LogScanner],
        name_of: Callable[[str], str],
    ) -> None:
        self.place, self.tail = place, tail
        self.voices: dict[str, Voice] = {}  # by stream, "" for a file that no runtime wrote
        self.told: int | None = None  # bytes whose events were told before a restart of ours; None = not known yet
        self.marked = 0, ""  # bytes read, and their mark
        self.marked_at: tuple[object, ...] = ()  # a file written anew may have been read as far as the one before
        self.sums: LogSums | None = None  # of before a restart of ours, until it is read as far as then
        self.kept: LogSums | None = None  # the same, for ever
        self.before: Before | None = None  # with the numbers of `sums`
        self.is_known = False  # whether the file is the one that was followed then
        self.is_certain = True  # whether it is known where that reading ended, or that its file is gone
        self.noted: tuple[tuple[object, ...], LogSums] | None = None
        self.keys: tuple[tuple[object, ...], str, str] | None = None  # hashes of the log and of its file, and of which
        self.earlier: list[Earlier] | None = None  # files of before that are still to be read; None = not looked for
        self._make_scanner, self._name_of = make_scanner, name_of
        self._unwrapper = StreamUnwrapper()
        self._past: Iterator[list[Heard] | None] | None = None
        self.chunks_of: Callable[[Earlier], Iterator[bytes | None]] = read_earlier  # None = not there yet
        self._is_waiting = False
        self._truncations = 0
        self._caught_up = False
        self._pending: list[Heard] = []
        self.is_hidden = False  # its place could not be looked at this turn: it is neither read nor told of
        self.last_readings: tuple[Reading, ...] = ()  # of the turn that read it last
        self.due = float("-inf")  # monotonic seconds: before that no turn reads it
        self._rested_at = 0  # bytes read when that was decided last
        if isinstance(tail, LogTail):
            tail.boundary = self._at_boundary

    @property
    def is_history(self) -> bool:
        """Whether what is read now was there before we came."""
        return not self._caught_up

    @property
    def catching_up(self) -> bool:
        """Whether the log is open and part of what it held then is still to be read: its counts are not whole."""
        return not self._caught_up and self.tail.identity is not None

    @property
    def is_placed(self) -> bool:
        """Whether all that was counted is what its file holds up to the offset, or was known before.

        While a log is read that nothing was known of, nothing is, so that it is told of as a whole.
        """
        if not self.catching_up:
            return True
        tail = self.tail
        return self.kept is not None and self.sums is None and (not isinstance(tail, LogTail) or self._is_passed(tail))

    @property
    def is_behind(self) -> bool:
        if self._is_waiting or self.tail.reason is not None:
            return False  # coming sooner would not help
        return bool(self.tail.backlog or self.earlier or self._past)

    @property
    def is_silent(self) -> bool:
        """Whether it is not known to be this server's: a unit that never wrote to the journal."""
        return isinstance(self.tail, JournalTail) and not self.tail.heard

    def rest(self, serves: bool, at: float, interval: float) -> None:
        """Behind the turn in which it was read, at `at` (monotonic seconds).  `serves`: its server is ready."""
        read, self._rested_at = self.tail.bytes_read - self._rested_at, self.tail.bytes_read
        rests = serves and self._caught_up and not self.is_behind and not self.tail.is_waiting
        turns = LONG_REST_TURNS if read >= MUCH_BYTES else REST_TURNS
        self.due = at + turns * min(interval, LONGEST_TURN_SECONDS) if rests else float("-inf")

    def be_ready(self) -> None:
        for voice in self.voices.values():
            if not voice.scanner.ready:
                voice.scanner.be_ready()

    def read(self, most_bytes: int) -> Iterator[Heard]:
        """Read on; the batches of this turn.  What was told before a restart says only who is which rank."""
        tail = self.tail
        if self.earlier is None:
            most_bytes = 0  # not open yet: what was before is to be read first
        most_bytes = yield from self._read_earlier(most_bytes)
        while isinstance(tail, LogTail) and (left := (self.told or 0) - tail.offset) > 0 and most_bytes > 0:
            before = tail.bytes_read
            yield from map(_names_only, self._read(min(most_bytes, left)))
            most_bytes -= tail.bytes_read - before
            if tail.rotations or tail.truncations or tail.bytes_read == before:
                self.told = 0  # it is another file by now
        if isinstance(tail, LogTail) and self._is_passed(tail):
            self.settle()
        yield from self._read(most_bytes)

    def _is_passed(self, tail: LogTail) -> bool:
        """Whether all that was told before a restart has been read again."""
        is_open = tail.identity is not None and self.told is not None and self.earlier is not None
        return is_open and not self.earlier and self._past is None and tail.offset >= (self.told or 0)

    def settle(self, *, at_end: bool = False) -> None:
        """Go on from the sums of before a restart: what was counted then and was read again is counted once.

        Called where that reading ended.  Where this is not known, `at_end` of what was there when we came: the
        numbers are those of before, or those of what is there, whichever are higher.
        """
        if self.sums is None or self.before is None or not (self.is_certain or at_end):
            return
        self.before.take_off(self.voices, self.tail, at_least_none=not self.is_certain)
        self.sums = None

    def _read_earlier(self, most_bytes: int) -> Generator[Heard, None, int]:
        """Files of before, each in its turn; returns how many bytes may still be read."""
        while self.earlier and most_bytes > 0:
            file = self.earlier[0]
            self._past = self._past or self._heard_of(file)
            for heard in self._past:
                self._is_waiting = heard is None
                if heard is None:
                    return 0
                yield from heard
                most_bytes -= CHUNK_BYTES
                if most_bytes <= 0:
                    return 0
            self._past = None
            del self.earlier[0]
        return most_bytes

    def _heard_of(self, file: Earlier) -> Iterator[list[Heard] | None]:
        left = file.told
        for chunk in self.chunks_of(file):
            if chunk is None:
                yield None
                continue
            if old := chunk[: max(0, left)]:
                yield list(map(_names_only, self._feed(old)))
            if new := chunk[len(old) :]:
                self.settle()
                yield list(self._feed(new))
            left -= len(chunk)
        yield list(self._hear(self._unwrapper.leave()))
        if not self._unwrapper.form:
            self._unwrapper = StreamUnwrapper()

    def _read(self, most_bytes: int) -> Iterator[Heard]:
        for chunk in self.tail.read(most_bytes):
            yield from self._take_pending()
            if isinstance(self.tail, JournalTail) and self.tail.is_old:
                yield from map(_names_only, self._feed(chunk))
            else:
                if isinstance(self.tail, JournalTail):
                    self.settle()
                yield from self._feed(chunk)
        yield from self._take_pending()

    def _feed(self, chunk: bytes) -> Iterator[Heard]:
        return self._hear(self._unwrapper.feed(chunk))

    def _hear(self, parts: dict[str, Part]) -> Iterator[Heard]:
        for stream, part in parts.items():
            voice = self.voices.get(stream)
            if voice is None:
                name = self._name_of(stream) if stream else self.place.name
                voice = self.voices[stream] = Voice(name, self._make_scanner())
            voice.bytes_read += part.size
            voice.heard = part.time if part.time is not None else voice.heard
            yield voice, voice.scanner.feed(part.text)

    def finish(self) -> list[Heard]:
        """Nothing more will come: what has no line end is a line all the same."""
        left = list(self._hear(self._unwrapper.leave()))
        return [*left, *((voice, voice.scanner.finish()) for voice in self.voices.values())]

    def turn_done(self, spoke: Collection[Voice], wall: float) -> None:
        for voice in spoke:
            voice.last_line = wall if self._caught_up else self.modified(voice)
        self._caught_up = self._caught_up or self._history_is_read()
        if self._caught_up:
            self.settle(at_end=True)

    def modified(self, voice: Voice) -> float | None:
        """Unix time of the last line of a voice: the file's last change, or as much earlier as its runtime says."""
        heard = [other.heard for other in self.voices.values() if other.heard is not None]
        if self.tail.modified is None or voice.heard is None:
            return self.tail.modified if voice.heard is None else voice.heard
        return self.tail.modified - (max(heard) - voice.heard)

    def move(self, place: LogPlace) -> None:
        """The same file is reached by another path now."""
        self.place, self.tail.path, self.tail.owner = place, place.path, place.owner

    def _history_is_read(self) -> bool:
        """All that was there at the first look: a log that is written faster than read never has no backlog."""
        tail = self.tail
        is_read = not tail.backlog or tail.bytes_read >= (tail.found or 0)
        return tail.identity is not None and is_read and self.earlier == [] and self._past is None

    def _at_boundary(self) -> None:
        """Another file follows, or the same one anew.

        A line that a runtime wrote in pieces may go on in the file it made when it moved this one aside.
        """
        self.settle()
        if self._unwrapper.form and self.tail.truncations == self._truncations:
            self._pending.extend(self._hear(self._unwrapper.leave()))
            return
        self._truncations = self.tail.truncations
        self._pending.extend(self.finish())
        self._unwrapper = StreamUnwrapper()

    def _take_pending(self) -> list[Heard]:
        pending, self._pending = self._pending, []
        return pending


def _names_only(heard: Heard) -> Heard:
    return heard[0], Batch(names=heard[1].names)
