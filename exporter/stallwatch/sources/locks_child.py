"""The disposable looker for lock files, run as a program of its own by locks.

Cache folders lie on file systems that may be dead, and whoever looks into one hangs until he is killed.  This
program gives up every right but those two that looking needs, and dies with its parent.

What is looked at is another's: paths are followed by hand inside the root of that process, links included, so that
none leads to a file of ours; only regular files are opened, and of each no more than the record of its holder.

Input: a JSON line per request.  {"ask": "environ", "pid": .., "ticks": ..} is answered by {"environ": {..}}, of it
only the names in VARIABLES.  {"ask": "locks", "pid": .., "ticks": .., "user": .., "environ": {..}, "root": ..} is
answered by {"locks": [..], "problems": {kind: reason}}: what `Found` holds, and what could not be looked into.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from .blocking_child import content, drop_rights, start_ticks

MOST_NAMES = 50_000
"""Names looked at per rule; a cache has some thousands."""
MOST_FOUND = 256
"""Lock files told per process."""
MOST_LINKS = 40
POLLED_SECONDS = 5.0
"""A file changed within this time is tried again and again: filelock before 4 opens it with O_TRUNC every 50 ms."""

LARGEST_TABLE = 4 << 20
_RECORD_BYTES = 256

LOCAL_FILE_SYSTEMS = frozenset(
    [
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs", "reiserfs", "nilfs2"),
        *("overlay", "tmpfs", "ramfs", "rootfs"),
    ]
)
"""Where nobody on another machine can hold a lock.  All others (NFS, FUSE, Lustre, GPFS, 9p, ..) may be shared."""

_OTHER_DEVICES = ("", "btrfs", "overlay", "zfs")


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of lock file.

    `place`: folders, the first whose variable is set.  `patterns` below it, each part matching within one folder.
    `exists`: the file itself is the lock (whoever finds it waits until it is gone); else the kernel's flock on it
    is, and the file may rest for ever.  `product`: what its holder makes, relative to the file's folder; once
    there, nobody waits long.  `own`: only files of the server's user.
    """

    kind: str
    exists: bool
    place: str
    patterns: tuple[str, ...]
    product: str = ""
    own: bool = False


_HUB = "$HF_HUB_CACHE|$HUGGINGFACE_HUB_CACHE|$HF_HOME/hub|$XDG_CACHE_HOME/huggingface/hub|~/.cache/huggingface/hub"
_AITER = ("aiter/jit/build/lock_*", "aiter/jit/build/*/build/lock")

RULES: tuple[Rule, ...] = (
    # torch.utils.cpp_extension: FileBaton, a file made with O_EXCL and removed at the end; a killed build leaves it.
    Rule(
        "build",
        True,
        "$TORCH_EXTENSIONS_DIR|$XDG_CACHE_HOME/torch_extensions|~/.cache/torch_extensions",
        ("*/lock", "*/*/lock"),
    ),
    # AITER: the same baton per module; newer ones write their PID into it and hold a flock as well.
    Rule("build", True, "$AITER_JIT_DIR|~/.aiter/jit", ("build/lock_*", "build/*/build/lock")),
    Rule("build", True, "~/.aiter", ("build/*/lock",)),
    Rule("build", True, "/sgl-workspace/aiter", _AITER),
    *(
        Rule("build", True, place, tuple(f"python3*/*-packages/{pattern}" for pattern in _AITER))
        for place in ("$VIRTUAL_ENV/lib|$CONDA_PREFIX/lib|/opt/venv/lib", "/usr/local/lib", "/usr/lib")
    ),
    Rule("other", True, "/tmp/aiter_configs", ("*.lock",)),  # noqa: S108  # where AITER has it
    # FlashInfer: filelock around the build of each operator, and around each binary it fetches.
    Rule(
        "build",
        False,
        "$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer|~/.cache/flashinfer",
        ("*/cached_ops/*/*.lock", "*/*/cached_ops/*/*.lock"),
        product="../{stem}/{stem}.so",
    ),
    Rule(
        "download",
        False,
        "$FLASHINFER_CUBIN_DIR|$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/cubins|~/.cache/flashinfer/cubins",
        tuple("*/" * depth + "*.lock" for depth in range(5)),
        product="{stem}",
    ),
    # huggingface_hub: filelock per blob; a SoftFileLock where flock is not to be had.
    Rule("download", False, _HUB, (".locks/*/*.lock",), product="../../{folder}/blobs/{stem}"),
    Rule("download", False, "$MODELSCOPE_CACHE|~/.cache/modelscope/hub", (".lock/*",)),
    # vLLM and SGLang: get_lock(), named by the hash and the name of the model.
    Rule("download", False, "$TMPDIR|/tmp", ("[0-9a-f]" * 64 + "*.lock", "sglang_download_lock_*")),
    Rule("download", False, "/dev/shm", ("sglang_download_lock_*",)),  # noqa: S108  # where SGLang has it
    # torch inductor, alone and inside vLLM's cache; tvm-ffi, which SGLang's own kernels are built by.
    Rule("build", False, "$TORCHINDUCTOR_CACHE_DIR", ("locks/*.lock",)),
    Rule("build", False, "$TMPDIR|/tmp", ("torchinductor_*/locks/*.lock",), own=True),
    Rule(
        "build",
        False,
        "$VLLM_CACHE_ROOT|$XDG_CACHE_HOME/vllm|~/.cache/vllm",
        tuple(f"torch_compile_cache/{depth}/inductor_cache/locks/*.lock" for depth in ("*/*", "*/*/*")),
    ),
    Rule("build", False, "$TVM_FFI_CACHE_DIR|~/.cache/tvm-ffi", ("*/lock",)),
)

KINDS = tuple(dict.fromkeys(rule.kind for rule in RULES))

_VARIABLE = re.compile(r"\$([A-Z_]+)")
VARIABLES = ("HOME", *dict.fromkeys(name for rule in RULES for name in _VARIABLE.findall(rule.place)))
"""The variables that say where caches are; no other one is ever told."""

_GUARD = ".steal"
"""Ending of AITER's guard files, which rest beside its locks."""
_PID = re.compile(rb"\A(?:(\d{1,10})\n(?!filelock-strict)[^\n]+\n|filelock/2\n(?:[^\n]*\n)*?pid=(\d{1,10})\n)")
"""The record of a holder: AITER and filelock 3.22 on write PID and host, newer ones under names."""


@dataclass(slots=True)
class Found:
    """One lock file.  Times in Unix seconds; `holders`: PIDs to which the kernel granted a lock on it.

    `name` is the last part of its path, to know it by among open files.

    `exists`: it is held by being there.  `polled`: it was changed a moment ago.  `pid`: the holder by its own
    word, in the PID namespace it lives in; None = it left none.
    """

    kind: str
    name: str
    exists: bool
    device: int
    inode: int
    user: int
    modified: float
    polled: bool = False
    pid: int | None = None
    local: bool = False
    layered: bool = False
    holders: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A name in an open folder (its descriptor, what it is called, and on which type of file system it lies)."""

    folder: int
    folder_name: str
    name: str
    file_system: str


class Root:
    """The root folder of a process; `folder` leads to one below it, as the process itself would get there."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def folder(self, path: str) -> int:
        """A descriptor of the folder, to be closed by the caller.  OSError when there is none."""
        at, links = [os.dup(self._fd)], 0
        left = path.split("/")[::-1]
        try:
            while left:
                name = left.pop()
                if name == "..":
                    if len(at) > 1:
                        os.close(at.pop())
                elif name not in ("", "."):
                    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at[-1])
                    if not stat.S_ISLNK(os.fstat(found).st_mode):
                        at.append(found)
                        continue
                    with _closing(found):
                        target = os.readlink("", dir_fd=found)
                    links += 1
                    if links > MOST_LINKS:
                        raise OSError(errno.ELOOP, "too many links")
                    while target.startswith("/") and len(at) > 1:
                        os.close(at.pop())
                    left += target.split("/")[::-1]
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at[-1])
        finally:
            for descriptor in at:
                os.close(descriptor)

    def text(self, folder: str, name: str, most: int) -> bytes:
        """The beginning of a regular file; OSError when it cannot be read."""
        with _closing(self.folder(folder)) as at:
            return _head(at, name, most)


class _closing:  # noqa: N801  # as contextlib.closing, for a descriptor
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _head(folder: int, name: str, most: int) -> bytes:
    """The first bytes of a regular file that is no link."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with _closing(descriptor):
        return os.read(descriptor, most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def places(rule: Rule, environ: Mapping[str, str], home: str) -> str:
    """The folder a rule means for a process with these variables; "" when it is none or not known."""
    for choice in rule.place.split("|"):
        names = _VARIABLE.findall(choice)
        if any(not environ.get(name) for name in names):
            continue
        path = _VARIABLE.sub(lambda match: environ[match[1]], choice)
        if path.startswith("~/"):
            path = home + path[1:] if home else ""
        return path if path.startswith("/") else ""
    return ""


def home_of(root: Root, user: int, environ: Mapping[str, str]) -> str:
    """The home of a process: what its HOME says, else the entry of its user in its own passwd."""
    if environ.get("HOME", "").startswith("/"):
        return environ["HOME"]
    with suppress(OSError):
        for line in root.text("/etc", "passwd", LARGEST_TABLE).split(b"\n"):
            fields = line.split(b":")
            if len(fields) > 5 and fields[2] == str(user).encode():
                return os.fsdecode(fields[5])
    return "/root" if user == 0 else ""


def split_pattern(pattern: str) -> tuple[str, list[str]]:
    """The folders a pattern begins with, and its parts from the first that has a sign in it."""
    parts = pattern.split("/")
    plain = next((at for at, part in enumerate(parts) if any(sign in part for sign in "*?[")), len(parts) - 1)
    return "/".join(parts[:plain]), parts[plain:]


class Looker:
    """Looks for the locks of one process; `problems`: kind -> why a folder could not be looked into."""

    def __init__(self, root: Root, file_systems: Mapping[int, str], granted: Granted) -> None:
        self._root, self._file_systems, self._granted = root, file_systems, granted
        self._left = 0
        self.problems: dict[str, str] = {}

    def find(self, user: int, environ: Mapping[str, str], now: float) -> Iterator[Found]:
        """All locks that somebody may wait for; `now` in Unix seconds."""
        home = home_of(self._root, user, environ)
        for rule in RULES:
            place = places(rule, environ, home)
            self._left = MOST_NAMES
            for pattern in rule.patterns if place else ():
                folders, parts = split_pattern(pattern)
                try:
                    folder = self._root.folder(f"{place}/{folders}")
                except OSError as error:
                    self._note(error, rule)
                    continue
                with _closing(folder):
                    yield from self._below(folder, folders.rpartition("/")[2], parts, rule, user, now)

    def _note(self, error: OSError, rule: Rule) -> None:
        if error.errno in (errno.EACCES, errno.EPERM):
            self.problems[rule.kind] = "permission"
        elif error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            self.problems[rule.kind] = "error"

    def _below(self, folder: int, name: str, parts: list[str], rule: Rule, user: int, now: float) -> Iterator[Found]:
        """`folder` is called `name`; what of it fits the first part, and below that the others."""
        last = len(parts) == 1
        file_system = self._file_systems.get(mount_of(folder), "") if last else ""
        for entry in self._entries(folder, parts[0], rule):
            if last:
                try:
                    found = self._lock(_Seen(folder, name, entry, file_system), rule, user, now)
                except OSError as error:  # mostly gone by now
                    self._note(error, rule)
                    continue
                if found is not None:
                    yield found
                continue
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                below = os.open(entry, flags, dir_fd=folder)
            except OSError as error:
                self._note(error, rule)
                continue
            with _closing(below):
                yield from self._below(below, entry, parts[1:], rule, user, now)

    def _entries(self, folder: int, pattern: str, rule: Rule) -> Sequence[str]:
        if not any(sign in pattern for sign in "*?["):
            return [pattern]
        names = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._left -= 1
                    if self._left < 0:
                        self.problems[rule.kind] = "error"
                        break
                    if fnmatchcase(entry.name, pattern):
                        names.append(entry.name)
        except OSError as error:
            self._note(error, rule)
        return names

    def _lock(self, seen: _Seen, rule: Rule, user: int, now: float) -> Found | None:
        """The lock file, when somebody may wait for it."""
        status = os.stat(seen.name, dir_fd=seen.folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or seen.name.endswith(_GUARD) or (rule.own and status.st_uid != user):
            return None
        found = Found(
            rule.kind,
            seen.name,
            rule.exists,
            status.st_dev,
            status.st_ino,
            status.st_uid,
            status.st_mtime,
            polled=abs(now - status.st_ctime) < POLLED_SECONDS,
            local=seen.file_system in LOCAL_FILE_SYSTEMS,
            layered=seen.file_system == "overlay",
            holders=self._granted.holders(status.st_dev, status.st_ino, seen.file_system),
        )
        if status.st_size and (record := _PID.match(_head(seen.folder, seen.name, _RECORD_BYTES))):
            found.exists, found.pid = True, int(record[1] or record[2])  # a soft lock, or a baton that names its holder
        if found.exists or found.holders or found.polled:
            return found
        return found if not found.local and _is_wanted(seen, rule) else None


def _is_wanted(seen: _Seen, rule: Rule) -> bool:
    """Whether a resting file, where soft locks look the same, guards something that is not there yet."""
    if not rule.product:
        return False
    path = rule.product.format(stem=seen.name.removesuffix(".lock"), folder=seen.folder_name)
    try:
        os.stat(path, dir_fd=seen.folder, follow_symlinks=False)
    except FileNotFoundError:
        return True
    return False


def mount_of(folder: int) -> int:
    """The number of the mount a folder lies on; -1 when it is not known."""
    with suppress(OSError):
        match = re.search(rb"^mnt_id:\s*(\d+)", content(f"/proc/self/fdinfo/{folder}"), re.MULTILINE)
        return int(match[1]) if match else -1
    return -1


def file_systems(table: bytes) -> dict[int, str]:
    """Mount number -> type of its file system, of the text of a mountinfo."""
    found = {}
    for line in table.split(b"\n"):
        before, _, behind = line.partition(b" - ")
        number = before.split(b" ", 1)[0]
        if number.isdigit() and behind:
            found[int(number)] = behind.split(b" ", 1)[0].decode("ascii", "replace")
    return found


@dataclass(slots=True)
class Granted:
    """Who holds locks, by the kernel's word: inode -> (device, PID)."""

    by_inode: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def holders(self, device: int, inode: int, file_system: str) -> list[int]:
        """PIDs.  Some file systems show another device here than in stat: there the inode has to do."""
        same_device = file_system not in _OTHER_DEVICES
        return [pid for at, pid in self.by_inode.get(inode, ()) if at == device or not same_device]


def granted_locks(table: bytes) -> Granted:
    """Of the text of /proc/locks; who waits for a lock (`->`) is left out."""
    granted = Granted()
    for line in table.split(b"\n"):
        words = line.split()
        if len(words) >= 6 and words[1] in (b"FLOCK", b"POSIX", b"OFDLCK"):
            with suppress(ValueError):
                major, minor, inode = words[5].split(b":")
                device = os.makedev(int(major, 16), int(minor, 16))
                granted.by_inode.setdefault(int(inode), []).append((device, int(words[4])))
    return granted


def _whole(path: str) -> bytes:
    """A table of /proc; empty when there is none.  OSError when it could not be read."""
    try:
        with open(path, "rb") as file:
            return file.read(LARGEST_TABLE)
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _environ(folder: str) -> dict[str, str]:
    pairs = (item.split(b"=", 1) for item in content(folder + "/environ").split(b"\0") if b"=" in item)
    found = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
    return {name: found[name] for name in VARIABLES if found.get(name)}


def _locks(proc: str, request: Mapping[str, Any], now: float) -> dict[str, Any]:
    folder = f"{proc}/{request['pid']}"
    try:
        root = Root(f"{folder}/root")
    except PermissionError:
        if request["root"] is None:
            raise
        root = Root(request["root"])
    try:
        mounts = {**file_systems(_whole("/proc/self/mountinfo")), **file_systems(_whole(f"{folder}/mountinfo"))}
        looker = Looker(root, mounts, granted_locks(_whole(f"{proc}/locks")))
        found = sorted(looker.find(request["user"], request["environ"], now), key=lambda lock: lock.modified)
    finally:
        root.close()
    return {"locks": [asdict(lock) for lock in found[:MOST_FOUND]], "problems": looker.problems}


def answer(proc: str, request: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The answer to one request; `reason` alone when there is none."""
    folder = f"{proc}/{request['pid']}"
    try:
        if start_ticks(folder) != request["ticks"]:
            return {"reason": "vanished"}
        if request["ask"] == "environ":
            found: dict[str, Any] = {"environ": _environ(folder)}
        else:
            found = _locks(proc, request, now)
        return found if start_ticks(folder) == request["ticks"] else {"reason": "vanished"}
    except PermissionError:
        return {"reason": "permission"}
    except (FileNotFoundError, ProcessLookupError):
        return {"reason": "vanished"}
    except (OSError, ValueError):
        return {"reason": "error"}


def main() -> None:
    """Answer requests until there are no more."""
    drop_rights()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(sys.argv[1], json.loads(line), time.time())) + "\n")
        sys.stdout.flush()
