"""The `threads` collector: how many threads of each rank wait in what.

One descriptor per thread stays open and is read again by pread: its schedstat, which says at half the cost whether it
ran since the last look.  Who slept then and did not run since still waits for the same (or was woken and gets no CPU);
only of the others is read what they wait in (syscall, else wchan).  Where the kernel keeps no schedstat, that file is
the one that stays open.
A process whose CPU clock did not move had no thread running, so nothing changed: it is not read at all.  Of one whose
clock moved mostly the same few threads ran.  They are read first: if the clock moved by exactly what they ran, to the
nanosecond, none of the others did, and these are not read.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import compress, repeat
from operator import ne
from typing import ClassVar

from .. import signals
from ..descriptors import Room, shares
from ..model import WAITS, WRITE, Observation, Process, ProcessId, Reading, Scene, Signal
from . import Host, Moment
from .procfs import KeptFile, ProcFs, Stat, parse_stat, reason_of
from .told import Told, again
from .wait_class import class_of_state, class_of_symbol, class_of_syscall, is_write, writes

READ_BYTES = {"schedstat": 64, "syscall": 4, "wchan": 48}
"""Of syscall only the number (or `runn`): without the arguments equal waits read equal, and are counted at once."""

_MARK = "schedstat"
_NO_MARK = b"0 0 0\n"
"""Of a thread that never ran, and of all where the kernel does not count: one that just began says nothing of those."""

ACTIVE_LOOKS = 30
"""A thread that ran within so many looks is one of the few that are read first."""

_FLEETING = frozenset((b"runn", b"0", b""))
"""Not the content of a thread that sleeps: it may go to sleep without another mark."""

_INTERRUPTED = (b"219", b"128")
"""restart_syscall: a sleep taken up again after a stop; the symbol says which."""

Classes = tuple[dict[bytes, str], dict[int, str]]
"""Wait classes by content, for contents that decide it, and by thread for the others."""


class ThreadFiles:
    """The kept files of one process.

    After `look`: `counts` by class, or None when nothing can be said: the process is gone, or `reason` says
    why it could not be read.
    """

    def __init__(
        self, proc: ProcFs, process: ProcessId, by_number: Mapping[bytes, str], writes: frozenset[bytes], room: Room
    ) -> None:
        self.id = process
        self._proc, self._by_number, self._writes, self._room = proc, by_number, writes, room
        self._fds: dict[int, int] = {}
        self._file = "syscall" if by_number else "wchan"
        self._kept = _MARK  # the file that stays open
        self._marks: dict[int, bytes] = {}  # what schedstat said just before the content was read
        self._known: dict[int, bytes] = {}  # that content
        self._awake: list[int] = []  # those whose content says nothing of a later look
        self._running: dict[int, KeptFile] = {}  # of those that ran before the last look: mostly they go on
        self._clock: int | None = None
        self._looks = 0
        self._active: dict[int, int] = {}  # the few that mostly run -> the look that saw last that they had
        self._others: int | None = None  # ns that all but those ran, until the last look that read them
        self.counts: Counter[str] | None = None
        self.main: str | None = None
        self.reason: str | None = None

    @property
    def said(self) -> tuple[object, ...]:
        """All that is told of the process."""
        return (self.reason, self.main, *(self.counts or {}).items())

    def close(self) -> None:
        for thread in tuple(self._fds):
            self._drop(thread)
        self._rest()

    def _rest(self) -> None:
        """Close the files of those that ran."""
        for file in self._running.values():
            file.close()
        self._running.clear()

    def _drop(self, thread: int) -> None:
        os.close(self._fds.pop(thread))
        self._room.give_back(1)
        self._marks.pop(thread, None)
        self._known.pop(thread, None)
        self._active.pop(thread, None)
        if thread in self._running:
            self._running.pop(thread).close()

    def look(self) -> None:
        """Count again unless nothing ran."""
        self._looks += 1
        try:
            few, _ = self._read(self._active)  # before the clock: what runs in between is missed by none of the two
            clock = self._proc.cpu_clock(self.id.pid)
            if clock is not None and clock == self._clock and self.counts is not None:
                return
            self._clock = clock
            self._count(few if self._are_all_that_ran(few) else None)
            self.reason = None
        except OSError as error:
            reason = reason_of(error)
            self.reason = None if reason == "vanished" else reason
            self.counts = self.main = None
        except (ValueError, IndexError):
            self.reason, self.counts, self.main = "error", None, None

    def _are_all_that_ran(self, few: Mapping[int, bytes]) -> bool:
        """Whether the others ran as long as at the last look that read them: the clock is the sum of all threads'."""
        is_whole = self._others is not None and len(few) == len(self._active)
        return is_whole and self._but_for(few.values()) == self._others

    def _but_for(self, marks: Iterable[bytes]) -> int | None:
        """What all threads but some ran so far, in ns; None without a clock of the process."""
        return None if self._clock is None else self._clock - sum(int(mark.partition(b" ")[0]) for mark in marks)

    def _count(self, few: dict[int, bytes] | None) -> None:
        """`few`: the marks of those that are read first, if no other thread ran; None = all have to be read."""
        stat = self._stat("stat")
        if stat.id != self.id:
            raise ProcessLookupError(errno.ESRCH, "another process has the PID")
        contents = self._contents(few)
        if not contents:
            raise ProcessLookupError(errno.ESRCH, "no thread is left")
        if stat.state in "Tt":  # the files still show the wait that was interrupted
            self.main = class_of_state(stat.state)
            self.counts = Counter({self.main or "other": len(contents)})
            return
        classes = self._classes_by_symbol if self._file == "wchan" else self._classes_by_number
        texts = Counter(contents.values())
        self.counts, self.main = self._counted(contents, texts, classes(contents, texts))

    # --- reading --------------------------------------------------------------------------------------------

    def _contents(self, few: dict[int, bytes] | None = None) -> dict[int, bytes]:
        """thread -> content of its file.

        A thread whose file this kernel does not have, or does not let us read, has the content `0`.
        """
        folder = self._proc.path(self.id.pid, "task")
        if few is not None and self._is_as_many(folder):
            return self._of_few(few)
        self._others = None
        first, _ = self._read(self._active)  # as soon after the clock as can be
        kept = self._read_kept(folder)
        if kept is None:
            return self._without_keeping(folder)
        if self._kept != _MARK:
            return kept
        if kept and all(mark == _NO_MARK for mark in kept.values()):
            self._do_without()
            return self._contents()
        return self._of_all(kept, first)

    def _of_few(self, marks: dict[int, bytes]) -> dict[int, bytes]:
        """The contents, where none but those of `marks` ran."""
        before = self._marks
        ran = [thread for thread, mark in marks.items() if mark != before[thread]]
        contents = self._read_again(ran)
        before.update(marks)
        self._note_active(ran, marks)
        return contents

    def _of_all(self, marks: dict[int, bytes], first: Mapping[int, bytes]) -> dict[int, bytes]:
        """The contents.  `first`: earlier marks of those that are read first."""
        before = self._marks
        if list(marks) != list(before):
            before = {thread: before.get(thread, b"") for thread in marks}
            for ended in self._known.keys() - marks.keys():
                del self._known[ended]
        ran = list(compress(marks, map(ne, marks.values(), before.values())))
        again = [thread for thread in ran if before[thread]]  # the first mark of a thread says nothing of it
        contents = self._read_again(ran)
        self._marks = marks
        self._note_active(again, {**marks, **first})
        return contents

    def _note_active(self, ran: Iterable[int], marks: Mapping[int, bytes]) -> None:
        """Who is read first from now on.  `marks`: of these at least, as read beside the clock."""
        seen, oldest = self._active | dict.fromkeys(ran, self._looks), self._looks - ACTIVE_LOOKS
        self._active = {thread: at for thread, at in seen.items() if thread in marks and at > oldest}
        self._others = self._but_for(marks[thread] for thread in self._active)

    def _read_again(self, ran: Iterable[int]) -> dict[int, bytes]:
        """The contents, read again of threads that ran, and of those that did not sleep."""
        known = self._known
        due = {*ran, *(thread for thread in self._awake if thread in known)}
        for thread in self._running.keys() - due:
            self._running.pop(thread).close()
        for thread in due:
            text = self._text(thread) if thread in known else self._once(thread, self._file)
            if text is None and os.path.exists(self._path(thread)):
                if self._file == "syscall":
                    self._use_symbols()
                    return self._contents()
                text = b"0"
            known[thread] = text or b""
        self._awake = [thread for thread in due if known[thread] in _FLEETING]
        return known if all(known.values()) else {thread: text for thread, text in known.items() if text}

    def _text(self, thread: int) -> bytes | None:
        """What a thread that ran waits in, by a file that stays open; None when it cannot be read."""
        if thread not in self._running:
            self._running[thread] = KeptFile(self._path(thread, self._file), self._room, READ_BYTES[self._file])
        try:
            return self._running[thread].read()
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            return None

    def _read_kept(self, folder: str) -> dict[int, bytes] | None:
        """thread -> content of the kept file, the set of threads brought up to date; None without room for it."""
        if not self._is_as_many(folder) and not self._relist(folder):
            return None
        contents, is_refused = self._read(self._fds)
        if len(contents) < len(self._fds) and not is_refused:
            for ended in self._fds.keys() - contents.keys():  # others may have followed, even by the same number
                self._drop(ended)
            if not self._relist(folder):
                return None
            others, is_refused = self._read([thread for thread in self._fds if thread not in contents])
            contents |= others
        if is_refused and self._kept != "wchan":
            self._do_without()
            return self._read_kept(folder)
        return {**dict.fromkeys(self._fds, b"0"), **contents} if is_refused else contents

    def _is_as_many(self, folder: str) -> bool:
        """Whether the process has as many threads as files are kept open."""
        return os.stat(folder).st_nlink - 2 == len(self._fds)

    def _read(self, threads: Iterable[int]) -> tuple[dict[int, bytes], bool]:
        """Those of them that live, and whether the right to look is gone."""
        contents, is_refused = dict[int, bytes](), False
        fds = map(self._fds.__getitem__, threads)
        reads = zip(threads, map(os.pread, fds, repeat(READ_BYTES[self._kept]), repeat(0)), strict=True)
        while True:  # behind a failure the next thread is read
            try:
                contents.update(reads)
            except ProcessLookupError:
                continue
            except PermissionError:
                is_refused = True
                continue
            break
        is_whole = all(contents.values())
        return contents if is_whole else {thread: text for thread, text in contents.items() if text}, is_refused

    def _do_without(self) -> None:
        """The kept file cannot be had: another one from now on."""
        self.close()
        if self._kept == _MARK:
            self._kept = self._file
        else:
            self._use_symbols()

    def _use_symbols(self) -> None:
        """No right to read syscall, or a kernel without it: wchan from now on."""
        self._file = "wchan"
        self._kept = _MARK if self._kept == _MARK else self._file
        self._rest()
        self._marks.clear()
        self._known.clear()
        self._awake.clear()

    def _relist(self, folder: str) -> bool:
        """Open what came, close what went; False when nothing can be kept open."""
        present = {int(name) for name in os.listdir(folder)}
        for thread in self._fds.keys() - present:
            self._drop(thread)
        new = present - self._fds.keys()
        if not self._room.take(len(new)):
            self.close()
            return False
        before = len(self._fds)
        try:
            for thread in new:
                if (fd := self._open(thread)) is not None:
                    self._fds[thread] = fd
        finally:  # also where the machine has no file left to open: what is open is kept
            self._room.give_back(len(new) - (len(self._fds) - before))
        is_last = self._kept == "wchan"
        if not is_last and any(os.path.exists(self._path(thread)) for thread in new - self._fds.keys()):
            self._do_without()
            return self._relist(folder)
        return len(self._fds) > 0

    def _open(self, thread: int) -> int | None:
        try:
            return os.open(self._path(thread, self._kept), os.O_RDONLY | os.O_CLOEXEC)
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            return None

    def _without_keeping(self, folder: str) -> dict[int, bytes]:
        contents = {}
        for thread in map(int, os.listdir(folder)):
            text = self._once(thread, self._file)
            if text is None and self._file == "syscall" and os.path.exists(self._path(thread)):
                self._use_symbols()
                return self._without_keeping(folder)
            if text is not None or os.path.exists(self._path(thread)):
                contents[thread] = text or b"0"
        return contents

    def _once(self, thread: int, name: str) -> bytes | None:
        """The file of a thread, opened for this one read; None when it cannot be read."""
        try:
            with open(self._path(thread, name), "rb", buffering=0) as file:
                return file.read(READ_BYTES[name])
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            return None

    def _path(self, thread: int, *name: str) -> str:
        return self._proc.path(self.id.pid, "task", str(thread), *name)

    def _stat(self, *path: str) -> Stat:
        with open(self._proc.path(self.id.pid, *path), "rb", buffering=0) as file:
            return parse_stat(file.read(1024))

    def _state_class(self, thread: int) -> str | None:
        """The class that the state of a thread decides; None for a sleeping one."""
        try:
            return class_of_state(self._stat("task", str(thread), "stat").state)
        except (FileNotFoundError, ProcessLookupError, ValueError, IndexError):
            return "other"  # it ended a moment ago

    def _counted(
        self, contents: dict[int, bytes], texts: Counter[bytes], classes: Classes
    ) -> tuple[Counter[str], str | None]:
        """Threads by class, and the class of the main thread."""
        by_text, by_thread = classes
        counts: Counter[str] = Counter(by_thread.values())
        for text, number in texts.items():
            if text in by_text:
                counts[by_text[text]] += number
        content = contents.get(self.id.pid, b"")
        main = by_thread.get(self.id.pid) or by_text.get(content)
        return counts, WRITE if main == "other" and self._is_write(content) else main

    # --- judging --------------------------------------------------------------------------------------------

    def _classes_by_number(self, contents: dict[int, bytes], texts: Counter[bytes]) -> Classes:
        by_text = {text: known for text in texts if (known := self._class_of_number(text))}
        if len(by_text) == len(texts):
            return by_text, {}
        unclear = {thread: text for thread, text in contents.items() if text not in by_text}
        return by_text, {thread: self._class_of_thread(thread, text) for thread, text in unclear.items()}

    def _class_of_number(self, text: bytes) -> str | None:
        """The class a system call's number decides; None when the thread itself has to be looked at."""
        return "running" if text == b"runn" else self._by_number.get(text.partition(b" ")[0].strip())

    def _class_of_thread(self, thread: int, text: bytes) -> str:
        if text.partition(b" ")[0] in _INTERRUPTED:
            symbol = self._once(thread, "wchan") or b""
            return class_of_symbol(symbol.decode("ascii", "replace").strip()) or "other"
        return self._state_class(thread) or "other"

    def _is_write(self, text: bytes) -> bool:
        word = text.partition(b" ")[0].strip()
        return word in self._writes if self._file == "syscall" else is_write(word.decode("ascii", "replace"))

    def _classes_by_symbol(self, contents: dict[int, bytes], texts: Counter[bytes]) -> Classes:
        """By wchan.  `0` of a sleeping thread means that the kernel does not tell: then nothing of it counts."""
        symbols = {text: class_of_symbol(text.decode("ascii", "replace").strip()) for text in texts}
        by_text = {text: known for text, known in symbols.items() if known is not None and known != "other"}
        by_thread: dict[int, str] = {}
        for thread, text in contents.items():
            if text in by_text:
                continue
            state = self._state_class(thread)
            if symbols[text] is None and state in (None, "disk"):
                return {}, dict.fromkeys(contents, "unreadable")
            by_thread[thread] = state or "other"
        return by_text, by_thread


class Threads:
    """See the module."""

    name: ClassVar[str] = "threads"
    signals: ClassVar[tuple[Signal, ...]] = (signals.THREADS, signals.MAIN_THREAD)

    def __init__(self, host: Host, machine: str | None = None, most_kept: int | None = None) -> None:
        self._proc = ProcFs(host.proc)
        self._by_number, self._writes = class_of_syscall(machine), writes(machine)
        self._room = Room(shares().threads if most_kept is None else most_kept)
        self._files: dict[ProcessId, ThreadFiles] = {}
        self._told: dict[tuple[str, str], Told] = {}  # by server and rank, of the last look

    def close(self) -> None:
        for files in self._files.values():
            files.close()
        self._files.clear()

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """Count the threads of every process of every server.

        stallwatch_threads{server="sglang-30000",rank="TP3",wait="futex"} 205
        stallwatch_main_thread{server="sglang-30000",rank="TP3",wait="futex"} 1

        Where the kernel does not tell, all threads of the process are `unreadable` and the other classes of
        that rank are absent: never "0 blocked threads".
        """
        told, self._told = self._told, {}
        wanted = {process.id for server in scene.servers for process in server.processes}
        for ended in self._files.keys() - wanted:
            self._files.pop(ended).close()
        for server in scene.servers:
            by_label: dict[str, list[ThreadFiles]] = {}
            for process in server.processes:
                files = self._look(process)
                if files.counts is not None or files.reason is not None:
                    by_label.setdefault(process.label, []).append(files)
            for label, group in by_label.items():
                key, found = (server.name, label), [each.said for each in group]
                self._told[key] = again(told.get(key), found, partial(_report, *key, group))
                yield from self._told[key].readings

    def _look(self, process: Process) -> ThreadFiles:
        files = self._files.get(process.id)
        if files is None:
            files = ThreadFiles(self._proc, process.id, self._by_number, self._writes, self._room)
            self._files[process.id] = files
        files.look()
        return files


def _report(server: str, label: str, group: list[ThreadFiles]) -> Iterator[Reading]:
    counts = group[0].counts if len(group) == 1 else None
    if counts is None:
        counts = sum((files.counts for files in group if files.counts is not None), Counter[str]())
    reasons = [files.reason for files in group if files.reason is not None]
    unreadable = counts.get("unreadable", 0)
    for wait in WAITS:
        if reasons:
            yield signals.THREADS.missing(min(reasons), server, label, wait)
        elif wait == "unreadable" or not unreadable:
            yield signals.THREADS.read(counts.get(wait, 0), server, label, wait)
        else:
            yield signals.THREADS.missing("permission", server, label, wait)
    main = group[0].main
    if len(group) == 1 and main is not None and main != "unreadable":
        yield signals.MAIN_THREAD.read(1.0, server, label, main)
