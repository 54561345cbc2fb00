"""Over a restart of ours: how much of a log was told and counted before, and how far it is read by now.

The state file keeps the answers; here they meet the logs that are there again, under their name or another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...model import LogSums, Server
from .. import Moment
from .counters import ALL, Before, counted, sharing
from .earlier import Earlier, earlier_files, in_line, is_runtimes, moved_aside, read_earlier
from .followed import FollowedLog
from .guard import Guards, Questions
from .journal import JournalTail
from .of_server import Place, ServerLogs
from .opened import Identity
from .tail import LogTail, mark_in

MOST_SUMS = 256
"""Logs of a server of which it is kept what was counted of them, closed ones included; of more the events only."""
KEPT_TURNS = 64
"""Turns of which it is remembered how far the logs were read: more than may wait for the daemon."""


class Past:
    """What was known before, and what is to be known after.

    The attributes are set where a state is kept: `seal` hashes with the key of the state folder; `told_before` says of
    a log and its file up to which byte it was told, and their mark; `key_of` is the hash of a server, a log and its
    file (device, inode) or none; `counted_before` what was counted of the logs of a server, by that hash.
    """

    def __init__(self, guards: Guards, far: Questions) -> None:
        self.seal: Callable[..., str] | None = None
        self.told_before: Callable[[Server, str, Identity], tuple[int, str] | None] = lambda server, log, file: None
        self.key_of: Callable[..., str] | None = None
        self.counted_before: Callable[[Server], Mapping[str, LogSums]] = lambda server: {}
        self._guards, self._far = guards, far
        self._places: tuple[tuple[float, dict[str, list[Place]], dict[str, tuple[LogSums, ...]]], ...] = ()

    def begin(self, logs: ServerLogs) -> None:
        """What was counted of the logs of a server that is seen for the first time."""
        if self.key_of is None:
            return
        logs.unclaimed = dict(self.counted_before(logs.server))
        if (sums := logs.unclaimed.pop(self.key_of(logs.server, ""), None)) is not None:
            logs.given_up = Before.of(sums.counts)

    def claim(self, logs: ServerLogs, log: FollowedLog) -> None:
        if self.key_of is not None and logs.unclaimed:
            logs.claim(log, self.key_of(logs.server, log.place.name))

    def open(self, logs: ServerLogs, log: FollowedLog) -> None:
        """Before a log is read: what of it was told, and what was written before it."""
        if log.told is None and self.seal is not None:
            self._pass_over(log, logs.server)
        if log.earlier is None:
            self._look_back(logs, log)

    def _pass_over(self, log: FollowedLog, server: Server) -> None:
        """Open the log, and find out how much of it was told of before a restart."""
        for _ in log.tail.read(0):
            pass
        if (file := log.tail.identity) is None:
            return
        before, sums, now = self.told_before(server, log.place.name, file), log.sums, None
        told, mark = before or ((sums.told, sums.mark) if sums else (0, ""))  # its device may have another number now
        if told and mark and self.seal is not None:
            now = log.tail.mark(told, self.seal)
        log.told = told if now is not None and now == mark else 0
        log.is_known = bool(log.told) or (before is not None and not told)
        if sums is not None:
            is_another = bool(mark) and (now is not None or (log.tail.found or 0) < told)
            log.is_certain = bool(sums.position) and (log.is_known or not told or is_another)
        if isinstance(log.tail, JournalTail):
            log.tail.told = log.told

    def _look_back(self, logs: ServerLogs, log: FollowedLog) -> None:
        """Once a log is open: what was moved aside before we came, of a container's log since its server began."""
        server = logs.server
        is_named = log.place.owner is not None and self.seal is not None and not log.told
        if not isinstance(log.tail, LogTail) or not (is_named or is_runtimes(log.place.path)):
            log.earlier = []
            return
        if log.tail.identity is None:
            for _ in log.tail.read(0):
                pass
        if (file := log.tail.identity) is None:
            return
        path, mount, asked = log.place.path, log.tail.far_mount, f"earlier {server.name} {log.place.path}"
        if is_runtimes(path):
            log.earlier = self._far.ask(asked, mount, lambda: earlier_files(path, server.started_at, file))
        else:
            log.earlier = self._far.ask(asked, mount, lambda: self._moved_while_away(logs, log))
        if log.earlier is None:
            return
        if mount is not None:
            self._far.forget([asked])
            keeps = self._guards.mounts.may_keep(mount)
            log.chunks_of = lambda earlier: self._guards.chunks(mount, read_earlier(earlier, keeps))
        if not is_runtimes(path):
            return
        is_told = log.is_known
        for earlier in reversed(log.earlier):
            before = self.told_before(server, log.place.name, earlier.identity)
            earlier.told = ALL if is_told else before[0] if before else 0
            is_told = is_told or before is not None
        if log.earlier and not is_told:
            log.is_certain = False  # packed since, it may be, so that it is not known again

    def _moved_while_away(self, logs: ServerLogs, log: FollowedLog) -> list[Earlier]:
        """The file that was followed before a restart of ours, under another name by now, and those that came after.

        It is known by device, inode and mark.  Where it is followed under that name there is nothing to do.
        """
        server, is_apart = logs.server, logs.is_found
        for files in moved_aside(log.place.path, log.place.owner).values():
            for index, file in enumerate(files):
                before = self.told_before(server, log.place.name, file.identity)
                if before is None or self.seal is None:
                    continue
                file.told, mark = before
                if file.told and mark_in(file.path, file.identity, file.told, self.seal) != mark:
                    continue
                line = in_line(files, index)
                return [] if any(is_apart(one.path) for one in line) else line
        return []

    def note(self, servers: Mapping[str, ServerLogs], now: Moment) -> None:
        """Keep how far every log is read as of this turn: the daemon takes the results of a turn later."""
        if self.seal is None:
            return
        places, sums = dict[str, list[Place]](), dict[str, tuple[LogSums, ...]]()
        for name, logs in servers.items():
            noted = (logs.calm.noted if logs.calm is not None else None) or self._noted(logs, self.seal)
            if logs.calm is not None:
                logs.calm.noted = noted
            if noted[0]:
                places[name] = noted[0]
            if self.key_of is not None:
                sums[name] = noted[1]
        self._places = (*self._places[-KEPT_TURNS:], (now.monotonic, places, sums))

    def _noted(self, logs: ServerLogs, seal: Callable[..., str]) -> tuple[list[Place], tuple[LogSums, ...]]:
        places = list[Place]()
        for log in logs.logs.values():
            if (file := log.tail.identity) is None or not log.is_placed:
                continue
            stamp = file, log.tail.offset, log.tail.rotations, log.tail.truncations
            if log.marked_at != stamp:
                log.marked_at = stamp
                log.marked = log.tail.offset, log.tail.mark(log.tail.offset, seal) or ""
            places.append((log.place.name, file, *log.marked))
        return places, self._sums(logs, self.key_of) if self.key_of is not None else ()

    def _sums(self, logs: ServerLogs, key_of: Callable[..., str]) -> tuple[LogSums, ...]:
        """What was counted of every log of a server; of more than there is room for the events only."""
        names = dict.fromkeys((*logs.logs, *logs.before))
        rows = [row for name in names if (row := self._sums_of(logs, name, key_of)) is not None]
        rows += logs.unclaimed.values()
        rest = Before.of(logs.given_up.counts())
        for row in rows[MOST_SUMS:]:
            rest.events.update(row.counts.events)
            rest.errors.update(row.counts.errors)
        if rest.events or rest.errors:
            rows[MOST_SUMS:] = [LogSums(key_of(logs.server, ""), "", 0, "", rest.counts())]
        return tuple(rows[: MOST_SUMS + 1])

    @staticmethod
    def _sums_of(logs: ServerLogs, name: str, key_of: Callable[..., str]) -> LogSums | None:
        """None while nothing is known: of what is still read only what was counted before counts."""
        log, before = logs.logs.get(name), logs.before.get(name)
        if log is not None and log.kept is not None and (log.sums is not None or not log.is_placed):
            return log.kept
        if log is None or not log.is_placed:
            return None if before is None else LogSums(key_of(logs.server, name), "", 0, "", before.counts())
        tail, file, server = log.tail, log.tail.identity, logs.server
        stamp = server.root, file, log.marked, tail.bytes_read, tail.rotations, tail.truncations, tail.errors
        if log.noted is None or log.noted[0] != stamp:
            if log.keys is None or log.keys[0] != stamp[:2]:
                position = key_of(server, name, *file) if file is not None else ""
                log.keys = stamp[:2], key_of(server, name), position
            place = (log.keys[2], *log.marked) if file is not None else ("", 0, "")
            row = LogSums(log.keys[1], *place, counted(log.tail, log.voices, before))
            log.noted = stamp, row if log.noted is None else sharing(row, log.noted[1])
        return log.noted[1]

    def places(self, started: float) -> dict[str, list[Place]]:
        """server -> its logs, as of the turn that began at `started` (or the last one before)."""
        return next((places for at, places, _ in reversed(self._places) if at <= started), {})

    def sums(self, started: float) -> dict[str, tuple[LogSums, ...]]:
        """server -> what was counted of its logs, as of the same turn."""
        return next((sums for at, _, sums in reversed(self._places) if at <= started), {})
