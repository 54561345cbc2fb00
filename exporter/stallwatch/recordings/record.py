"""`stallwatch record`: what the sources read, written as a recording while it is read.

A Recorder makes the lines, from what the daemon takes; `record` runs the daemon and owns the file.  Every tick
ends with a flush, so that a recorder that is killed loses no more than one.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from ..assembly import Settings, make_daemon, read_config
from ..config import Thresholds
from ..frameworks import load_frameworks
from ..model import Report, Result, Server
from ..strict_yaml import InputError
from .format import Json, event_line, header_line, look_line, pause_line, server_document, servers_line

PACKED = ".gz"


class Recorder:
    """Lines of one recording.  `witness` is called with every result in the order in which the daemon takes them."""

    def __init__(
        self,
        write: Callable[[str], object],
        interval_seconds: float,
        thresholds_of: Callable[[str], Thresholds],
        begun: float,
    ) -> None:
        """`begun`: the Unix time of the first result."""
        self._write, self._interval, self._thresholds_of, self._begun = write, interval_seconds, thresholds_of, begun
        self._zero: float | None = None
        self._t = 0.0
        self._told: dict[str, Json] = {}  # server -> what was written of it
        self._before_header: list[str] | None = []
        self.looks = 0

    def witness(self, result: Result, at: float, interval: float) -> None:
        """Write one result: events first, at their own times, for lines of a recording are in order of time."""
        if self._zero is None:
            self._zero = result.started
        if result.servers is not None:
            self._note_servers(result.servers, result.finished)
        for event in result.events:
            self._put(event_line(self._time(min(event.at, result.finished)), event))
        self._put(look_line(self._time(result.finished), result.source, interval, result.readings))
        self.looks += 1

    def pause(self, since: float, until: float) -> None:
        """Between these moments the daemon did not tick, and counts no time; what was read meanwhile comes next."""
        if self._zero is not None:
            began = self._time(since)
            self._put(pause_line(began, max(0.0, until - self._zero - began)))

    def tick(self) -> None:
        """The header waits for the servers that are found first, but not for ever."""
        if self._t >= self._interval:
            self.begin()

    def begin(self) -> None:
        """Write the header, with the servers known so far; does nothing when it is written."""
        if self._before_header is None:
            return
        waiting, self._before_header = self._before_header, None
        self._put(header_line(self._interval, self._begun, list(self._told.values())))
        for line in waiting:
            self._put(line)

    def _note_servers(self, servers: tuple[Server, ...], at: float) -> None:
        new = {server.name: server_document(server, self._thresholds_of(server.name)) for server in servers}
        changed = {name: found for name, found in new.items() if self._told.get(name) != found}
        self._told.update(changed)
        if self._before_header is not None:
            self.begin()
        elif changed:
            self._put(servers_line(self._time(at), list(changed.values())))

    def _time(self, moment: float) -> float:
        """Seconds since the recording began.  Sources overtake each other by a little: time does not run back."""
        self._t = max(self._t, round(moment - (self._zero or 0.0), 3))
        return self._t

    def _put(self, line: str) -> None:
        if self._before_header is None:
            self._write(line)
        else:
            self._before_header.append(line)


def record(settings: Settings, out: str, seconds: float) -> int:
    """Record for so many seconds, or until SIGINT or SIGTERM.  InputError when the file cannot be written."""
    config = read_config(settings, load_frameworks())
    target = Target(out)
    recorder = Recorder(target.write, config.intervals.tick, config.thresholds_for, time.time())

    def publish(report: Report) -> None:
        recorder.tick()
        target.flush()

    try:
        daemon = make_daemon(settings, publish, config, recorder.witness)
        daemon.tell_pause = recorder.pause
        with _ended_by(daemon.stop, seconds):
            print(f"recording to {out}; Ctrl-C ends it", file=sys.stderr)
            try:
                daemon.start()
                daemon.run()
                daemon.gather()
                recorder.begin()
            finally:
                daemon.close()
    finally:
        target.close()
    print(f"{recorder.looks} looks recorded to {out}", file=sys.stderr)
    return 0


@contextmanager
def _ended_by(stop: Callable[[], None], seconds: float) -> Iterator[None]:
    """`stop` is called after so many seconds, or at SIGINT or SIGTERM."""
    before = [(number, signal.signal(number, lambda *_: stop())) for number in (signal.SIGINT, signal.SIGTERM)]
    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in before:
            signal.signal(number, handler)


class Target:
    """The file a recording goes to.  A file that holds something is not written over."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._raw: IO[bytes] = open(path, "ab")  # noqa: SIM115  # closed by `close`; cuts nothing off
        except OSError as error:
            raise self._wrong(error) from None
        if problem := _why_not(self._raw.fileno()):
            self._raw.close()
            raise InputError(path, 0, "--out", problem)
        self._packed = gzip.GzipFile("", "wb", fileobj=self._raw) if path.endswith(PACKED) else None

    def write(self, line: str) -> None:
        try:
            (self._packed or self._raw).write(line.encode())
        except OSError as error:
            raise self._wrong(error) from None

    def flush(self) -> None:
        try:
            if self._packed is not None:
                self._packed.flush()
            self._raw.flush()
        except OSError as error:
            raise self._wrong(error) from None

    def close(self) -> None:
        """What could not be written is lost, and said once."""
        failing = sys.exc_info()[0] is not None
        try:
            if self._packed is not None:
                self._packed.close()
            self._raw.close()
        except OSError as error:
            with suppress(OSError):
                self._raw.close()
            if not failing:
                raise self._wrong(error) from None

    def _wrong(self, error: OSError) -> InputError:
        return InputError(self._path, 0, "--out", f"cannot be written: {error.strerror}")


def _why_not(file: int) -> str:
    """Why a file is not ours to write to; "" when it is.  The lock is let go with the file.

    A recorder that began a moment ago has written nothing yet.  A file system without locks stops nobody.
    """
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "is being written by another program"
    except OSError:
        pass
    return "exists already; a recording is not written over anything" if os.fstat(file).st_size else ""
