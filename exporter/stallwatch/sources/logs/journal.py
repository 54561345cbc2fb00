"""What a unit of systemd says, from the journal: `journalctl` as a child that follows it, and which sockets lead there.

The child is read without waiting, started anew when it ends, and ended with the log.  Only what the unit's own
processes wrote is asked for, not what systemd says about the unit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...children import Child
from .. import Moment

PLACE = "journal:"
"""`journal:<namespace>:<unit>` is the place of a log that is no file; a user's unit is `<uid>/<unit>`."""
READ_BYTES = 64 << 10
PIPE_BYTES = 64 << 10
"""So much the pipe of the child holds: where all of it was read, the child waited and has more to tell in a moment."""
MOST_RECORD_BYTES = 4 << 20
"""A longer record is dropped; a line of 48 KiB is 200 KiB as numbers."""
SETTLE_SECONDS = 1.0
FIRST_WORD_SECONDS = 3.0
"""Without a word for so long (the first one may take longer), or with one younger than itself, the child has told what
the journal held when it was started.
"""
UNKNOWN = 1 << 62
"""Size of the history before it is told."""
SHORTEST_BREAK_SECONDS = 1.0
LONGEST_BREAK_SECONDS = 60.0
_END_SECONDS = 0.2

_UNIT = re.compile(r"(?:[0-9]{1,10}/)?[A-Za-z0-9:_.@\\-]{1,255}")
_MICROSECONDS = re.compile(r"[0-9]{1,17}")
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_STREAM = re.compile(r"/run/systemd/journal(?:\.(?P<namespace>[A-Za-z0-9_.-]{1,64}))?/stdout")
_FIELDS = "MESSAGE,_PID,_LINE_BREAK,_SYSTEMD_UNIT,_SYSTEMD_USER_UNIT,PRIORITY"

_DIAG_BY_FAMILY, _DIAG = 20, 4  # SOCK_DIAG_BY_FAMILY, NETLINK_SOCK_DIAG
_SHOW_NAME_AND_PEER = 1 | 4
_NAME, _PEER = 0, 2  # UNIX_DIAG_NAME, UNIX_DIAG_PEER
_DONE, _ERROR = 3, 2
_HEADER = 16
_MESSAGE = 16


def find_program() -> str:
    """journalctl; "" where there is none."""
    return shutil.which("journalctl") or ""


def place_of(unit: str, namespace: str = "") -> str | None:
    """The place of a unit's log; None for a name that is none."""
    if not _UNIT.fullmatch(unit) or not _NAMESPACE.fullmatch(namespace):
        return None
    return f"{PLACE}{namespace}:{unit}"


# --- sockets -------------------------------------------------------------------------------------------------


def journal_behind(inode: int, peer_name: Callable[[int], str | None] | None = None) -> str | None:
    """Namespace of the journal ("" = the usual one) that a socket is connected to; None = it leads elsewhere.

    A process has a socket for many reasons (a supervisor's, a terminal's, inetd's): only the name at its other end
    tells.
    """
    match = _STREAM.fullmatch((peer_name or _peer_name)(inode) or "")
    return (match["namespace"] or "") if match else None


def _peer_name(inode: int) -> str | None:
    """The path that the other end of a UNIX socket is bound to, in our network namespace; None = not known."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _DIAG) as link:
            link.settimeout(0.5)
            peer = _asked(link, inode).get(_PEER, b"")
            name = _asked(link, struct.unpack("=I", peer)[0]).get(_NAME, b"") if len(peer) == 4 else b""
    except (OSError, struct.error):
        return None
    return name.rstrip(b"\0").decode("utf-8", "replace") or None


def _asked(link: socket.socket, inode: int) -> dict[int, bytes]:
    """Attributes of one UNIX socket by the kernel (sock_diag(7))."""
    request = struct.pack(
        "=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, inode, _SHOW_NAME_AND_PEER, 0xFFFFFFFF, 0xFFFFFFFF
    )
    link.send(struct.pack("=IHHII", _HEADER + len(request), _DIAG_BY_FAMILY, 1, 0, 0) + request)
    answer = link.recv(8192)
    length, kind = struct.unpack_from("=IH", answer)
    if kind in (_ERROR, _DONE):
        return {}
    attributes, offset = dict[int, bytes](), _HEADER + _MESSAGE
    while offset + 4 <= min(length, len(answer)):
        size, which = struct.unpack_from("=HH", answer, offset)
        if size < 4:
            break
        attributes[which] = answer[offset + 4 : offset + size]
        offset += (size + 3) & ~3
    return attributes


# --- records -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """One record: its text (with a line end unless the line goes on), where it stands, and when it came.

    `time`: Unix microseconds, 0 when it is not known.
    """

    text: bytes
    cursor: str
    time: int


def parse_record(line: bytes, unit: str) -> Record | None:
    """A line of `journalctl -o json`; None when it is damaged, or another unit's.  `unit` as in a place."""
    user, _, unit = unit.rpartition("/")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("_SYSTEMD_USER_UNIT" if user else "_SYSTEMD_UNIT", unit) != unit:
        return None
    text = _message(entry.get("MESSAGE")).replace(b"\n", b"\r")
    goes_on = entry.get("_LINE_BREAK") == "line-max"
    cursor = entry.get("__CURSOR")
    return Record(text if goes_on else text + b"\n", cursor if isinstance(cursor, str) else "", _time(entry))


def _message(value: Any) -> bytes:
    """Text; numbers of its bytes where it is not printable; a list of both where a record holds several."""
    if isinstance(value, list) and not _are_bytes(value):
        return b" ".join(map(_one_message, value))
    return _one_message(value)


def _one_message(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    return bytes(value) if isinstance(value, list) and _are_bytes(value) else b""


def _are_bytes(value: list[Any]) -> bool:
    return all(isinstance(item, int) and 0 <= item <= 255 for item in value)


def _time(entry: dict[str, Any]) -> int:
    text = entry.get("__REALTIME_TIMESTAMP")
    return int(text) if isinstance(text, str) and _MICROSECONDS.fullmatch(text) else 0


# --- the child -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    started: Moment
    rest: bytes = b""
    spoke: bool = False


@dataclass(slots=True)
class JournalTail:
    """Follows one unit; used as a LogTail is.

    `clock` tells when it is read; `since` is the Unix time the history begins at.  `heard` says whether the unit
    ever wrote there: until then the log is no evidence.  `offset` is the time of the last record (Unix microseconds);
    `is_old` whether what was read last was told before a restart of ours, up to `told` on the same clock.
    """

    path: str
    since: float
    clock: Callable[[], Moment]
    program: str = field(default_factory=find_program)
    root: str = "/"
    owner: int | None = None
    bytes_read: int = 0
    rotations: int = 0
    truncations: int = 0
    errors: int = 0
    backlog: int = 1
    found: int | None = UNKNOWN
    modified: float | None = None
    reason: str | None = None
    heard: bool = False
    offset: int = 0
    told: int = 0
    is_old: bool = False
    _cursor: str = ""
    _child: _Child | None = field(default=None, repr=False)
    _failures: int = 0
    _retry_at: float = float("-inf")
    _spoke_at: float = float("-inf")

    @property
    def identity(self) -> tuple[int, int] | None:
        """Not that of a file; known as soon as there is somebody to ask."""
        return (0, 0) if self._child is not None or self.heard else None

    @property
    def is_waiting(self) -> bool:
        """Nobody waits for it: what did not come is still to come."""
        return False

    def mark(self, offset: int, seal: Callable[..., str]) -> str | None:
        """A place in it is a time; nothing else is needed to find it again."""
        return seal("journal", self.path) if offset else ""

    def read(self, most_bytes: int) -> Iterator[bytes]:
        """What came since the last call, without waiting for more."""
        if self._child is None and self.clock().monotonic >= self._retry_at:
            self._start()
        if most_bytes <= 0:
            return
        left = most_bytes
        while self._child is not None and left > 0:
            piece = self._available(self._child)
            if piece is None:
                break
            if not piece:
                self._ended()
                break
            left -= len(piece)
            for is_old, text in self._texts(self._child, piece):
                self.is_old = is_old
                self.bytes_read += len(text)
                yield text
        self._settle(left)
        if self._child is not None and most_bytes - left >= PIPE_BYTES:
            self.backlog = 1

    @property
    def _target(self) -> tuple[str, str]:
        """Namespace and unit."""
        namespace, _, unit = self.path.removeprefix(PLACE).partition(":")
        return namespace, unit

    def close(self) -> None:
        """End the child."""
        if (child := self._child) is None:
            return
        self._child = None
        child.process.kill()
        if child.process.stdout is not None:
            child.process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(_END_SECONDS)

    def _command(self) -> list[str]:
        namespace, unit = self._target
        begin = f"--after-cursor={self._cursor}" if self._cursor else f"--since=@{int(self.since)}"
        return [
            *(self.program, "--no-pager", "--quiet", "--all", "--follow", "--lines=all", "--output=json"),
            *(f"--output-fields={_FIELDS}", begin),
            *([f"--root={self.root}"] if self.root != "/" else []),
            *([f"--namespace={namespace}"] if namespace else []),
            *_matches(unit),
        ]

    def _start(self) -> None:
        try:
            process = Child(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={"LC_ALL": "C", "SYSTEMD_COLORS": "0", "PATH": os.environ.get("PATH", os.defpath)},
            )
        except OSError:
            self._fail()
            return
        assert process.stdout is not None  # noqa: S101  # the pipe was asked for
        os.set_blocking(process.stdout.fileno(), False)
        self._child = _Child(process, self.clock())

    def _available(self, child: _Child) -> bytes | None:
        """Bytes of the child; empty at its end, None when there are none now."""
        assert child.process.stdout is not None  # noqa: S101  # as above
        try:
            return os.read(child.process.stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _texts(self, child: _Child, piece: bytes) -> list[tuple[bool, bytes]]:
        """What whole records say: those told before, and those that were not."""
        block = child.rest + piece
        end = block.rfind(b"\n") + 1
        child.rest = block[end:] if len(block) - end <= MOST_RECORD_BYTES else b""
        texts = dict[bool, list[bytes]]()
        for line in block[:end].split(b"\n"):
            if (record := parse_record(line, self._target[1])) is None:
                continue
            self._cursor = record.cursor or self._cursor
            self.offset = max(self.offset, record.time)
            texts.setdefault(record.time <= self.told, []).append(record.text)
        if texts:
            self.heard = child.spoke = True
            self.modified = self.offset / 1e6 or None
            self.reason, self._failures, self._spoke_at = None, 0, self.clock().monotonic
        return [(is_old, b"".join(texts[is_old])) for is_old in (True, False) if is_old in texts]

    def _settle(self, left: int) -> None:
        """Whether all that was there has been told: the child follows, so it does not say."""
        if left <= 0:
            self.backlog = 1
            return
        if self.found != UNKNOWN or self._is_settled():
            self.backlog = 0
            self.found = min(self.found or 0, self.bytes_read)

    def _is_settled(self) -> bool:
        if (child := self._child) is None:
            return True
        if self.modified is not None and self.modified >= child.started.wall:
            return True
        quiet = self.clock().monotonic - (self._spoke_at if child.spoke else child.started.monotonic)
        return quiet >= (SETTLE_SECONDS if child.spoke else FIRST_WORD_SECONDS)

    def _ended(self) -> None:
        """The child is gone: killed, or the journal's files were removed under it."""
        self.close()
        self._fail()

    def _fail(self) -> None:
        self._failures += 1
        self._retry_at = self.clock().monotonic + min(
            LONGEST_BREAK_SECONDS, SHORTEST_BREAK_SECONDS * 2 ** min(10, self._failures - 1)
        )
        if self._failures > 1:
            self.errors += self.reason is None
            self.reason = "error"


def _matches(unit: str) -> tuple[str, ...]:
    """What is asked for: of a user's unit also whose it is, for each user may have one of that name."""
    user, _, name = unit.rpartition("/")
    return (f"_SYSTEMD_USER_UNIT={name}", f"_UID={user}") if user else (f"_SYSTEMD_UNIT={name}",)
