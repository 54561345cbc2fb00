"""A file system that answers as long as it is let: the content of a folder, over FUSE, without any library.

`FuseFolder` mounts one; `hanging()` stops its server, so that whoever touches the mount waits.  With `hold_from` reads
of a file at that offset or behind it are taken and not answered until `let_go()`: the kernel does not give those up
even for SIGKILL.  Run as a program this file is the server: it ends by itself after LONGEST_SECONDS, and with it
every wait.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

LONGEST_SECONDS = 150
ROOT_NODE = 1
LARGEST_WRITE = 1 << 17
MNT_FORCE, MNT_DETACH = 1, 2
AUTO_INVALIDATE = 1 << 12
"""FUSE_AUTO_INVAL_DATA: what was read is read anew when the file has grown below the mount."""

Handler = Callable[["Server", int, bytes], bytes]


class Server:
    """Answers the requests of <linux/fuse.h> that files, folders and their names need."""

    def __init__(self, device: int, backing: str, hold_from: int | None) -> None:
        self._device, self._hold_from = device, hold_from
        self._paths = {ROOT_NODE: backing}
        self._nodes = {backing: ROOT_NODE}
        self._held: list[tuple[int, int, bytes]] = []

    def run(self) -> None:
        while True:
            try:
                request = os.read(self._device, LARGEST_WRITE + 4096)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue  # ENOENT: the request was given up
            length, code, unique, node = struct.unpack_from("<IIQQ", request)
            self._answer(code, unique, node, request[40:length])

    def let_go(self) -> None:
        self._hold_from, held = None, self._held
        self._held = []
        for unique, node, body in held:
            self._answer(READ, unique, node, body)

    def _answer(self, code: int, unique: int, node: int, body: bytes) -> None:
        if code in WITHOUT_ANSWER:
            return
        if code == READ and self._hold_from is not None and struct.unpack_from("<Q", body, 8)[0] >= self._hold_from:
            self._held.append((unique, node, body))
            return
        status, answer = 0, b""
        try:
            handler = HANDLERS.get(code)
            if handler is None:
                raise OSError(errno.ENOSYS, "not here")
            answer = handler(self, node, body)
        except OSError as error:
            status = -(error.errno or errno.EIO)
        with suppress(OSError):  # ENOENT: whoever asked has gone
            os.write(self._device, struct.pack("<IiQ", 16 + len(answer), status, unique) + answer)

    # --- names and nodes ------------------------------------------------------------------------------------------

    def path(self, node: int) -> str:
        try:
            return self._paths[node]
        except KeyError:
            raise OSError(errno.ESTALE, "no such node") from None

    def below(self, node: int, name: bytes) -> str:
        return os.path.join(self.path(node), os.fsdecode(name.split(b"\0")[0]))

    def entry(self, path: str) -> bytes:
        """fuse_entry_out: nothing of it may be remembered."""
        status = os.lstat(path)
        node = self._nodes.get(path)
        if node is None:
            node = self._nodes[path] = max(self._paths) + 1
            self._paths[node] = path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + attributes(status)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)
        if (gone := self._nodes.pop(new, None)) is not None:
            self._paths[gone] = new + "\0"  # an open file without a name
        if (node := self._nodes.pop(old, None)) is not None:
            self._nodes[new], self._paths[node] = node, new


def attributes(status: os.stat_result) -> bytes:
    """struct fuse_attr."""
    times = (int(status.st_atime), int(status.st_mtime), int(status.st_ctime))
    fractions = (status.st_atime_ns % 10**9, status.st_mtime_ns % 10**9, status.st_ctime_ns % 10**9)
    rest = (status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, 4096, 0)
    return struct.pack("<6Q10I", status.st_ino, status.st_size, status.st_blocks, *times, *fractions, *rest)


def _init(server: Server, node: int, body: bytes) -> bytes:
    return struct.pack("<IIIIHHIIHHI7I", 7, 31, 1 << 17, AUTO_INVALIDATE, 12, 10, LARGEST_WRITE, 1, 32, 0, 0, *[0] * 7)


def _lookup(server: Server, node: int, body: bytes) -> bytes:
    return server.entry(server.below(node, body))


def _getattr(server: Server, node: int, body: bytes) -> bytes:
    return struct.pack("<QII", 0, 0, 0) + attributes(os.lstat(server.path(node)))


def _setattr(server: Server, node: int, body: bytes) -> bytes:
    valid, _, _, size = struct.unpack_from("<IIQQ", body)
    mode = struct.unpack_from("<I", body, 68)[0]
    if valid & 8:
        os.truncate(server.path(node), size)
    if valid & 1:
        os.chmod(server.path(node), stat.S_IMODE(mode))
    return _getattr(server, node, body)


def _opened(server: Server, node: int, body: bytes) -> bytes:
    return struct.pack("<QII", node, 0, 0)


def _create(server: Server, node: int, body: bytes) -> bytes:
    flags, mode = struct.unpack_from("<II", body)
    path = server.below(node, body[16:])
    os.close(os.open(path, (flags & (os.O_EXCL | os.O_TRUNC)) | os.O_CREAT | os.O_WRONLY, stat.S_IMODE(mode)))
    return server.entry(path) + _opened(server, node, body)


def _mkdir(server: Server, node: int, body: bytes) -> bytes:
    path = server.below(node, body[8:])
    os.mkdir(path, stat.S_IMODE(struct.unpack_from("<I", body)[0]))
    return server.entry(path)


def _read(server: Server, node: int, body: bytes) -> bytes:
    offset, size = struct.unpack_from("<QI", body, 8)
    with open(server.path(node), "rb", buffering=0) as file:
        return os.pread(file.fileno(), size, offset)


def _write(server: Server, node: int, body: bytes) -> bytes:
    offset, size = struct.unpack_from("<QI", body, 8)
    with open(server.path(node), "r+b", buffering=0) as file:
        return struct.pack("<II", os.pwrite(file.fileno(), body[40 : 40 + size], offset), 0)


def _list(server: Server, node: int, body: bytes) -> bytes:
    begin, size = struct.unpack_from("<QI", body, 8)
    found, names = b"", sorted(os.listdir(server.path(node)))
    for number, name in list(enumerate(names, 1))[begin:]:
        raw = os.fsencode(name)
        entry = struct.pack("<QQII", number, number, len(raw), 0) + raw
        entry += b"\0" * (-len(entry) % 8)
        if len(found) + len(entry) > size:
            break
        found += entry
    return found


def _unlink(server: Server, node: int, body: bytes) -> bytes:
    os.unlink(server.below(node, body))
    return b""


def _rename(server: Server, node: int, body: bytes) -> bytes:
    return _renamed(server, node, struct.unpack_from("<Q", body)[0], body[8:])


def _rename2(server: Server, node: int, body: bytes) -> bytes:
    return _renamed(server, node, struct.unpack_from("<Q", body)[0], body[16:])


def _renamed(server: Server, node: int, to: int, names: bytes) -> bytes:
    old, new = names.split(b"\0")[:2]
    server.rename(server.below(node, old), server.below(to, new))
    return b""


def _statfs(server: Server, node: int, body: bytes) -> bytes:
    return struct.pack("<5Q4I6I", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0, *[0] * 6)


def _done(server: Server, node: int, body: bytes) -> bytes:
    return b""


READ = 15
WITHOUT_ANSWER = (2, 36, 42)
"""forget, interrupt, batch_forget"""
HANDLERS: dict[int, Handler] = {
    1: _lookup,
    3: _getattr,
    4: _setattr,
    9: _mkdir,
    10: _unlink,
    12: _rename,
    14: _opened,
    READ: _read,
    16: _write,
    17: _statfs,
    18: _done,  # release
    20: _done,  # fsync
    25: _done,  # flush
    26: _init,
    27: _opened,  # opendir
    28: _list,
    29: _done,  # releasedir
    30: _done,  # fsyncdir
    35: _create,
    45: _rename2,
}


def main(mount: str, backing: str, hold_from: str) -> None:
    signal.alarm(LONGEST_SECONDS)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"faults", mount.encode(), b"fuse.faults", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    server = Server(device, backing, int(hold_from) if hold_from else None)
    signal.signal(signal.SIGUSR1, lambda *_: server.let_go())
    print("mounted", flush=True)
    server.run()


class FuseFolder:
    """A mount at `mount` that shows what is in `backing`; both are made in `folder`.  Gone when the context ends."""

    def __init__(self, folder: Path, name: str = "far", hold_from: int | None = None) -> None:
        self.mount, self.backing = folder / name, folder / f"{name}-backing"
        self._hold_from = "" if hold_from is None else str(hold_from)
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        for made in (self.mount, self.backing):
            made.mkdir()
            made.chmod(0o755)
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, __file__, str(self.mount), str(self.backing)]
        self._server = subprocess.Popen([*command, self._hold_from], stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        if self._server.stdout.readline() != b"mounted\n":
            self.__exit__()
            raise AssertionError("the FUSE server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever still waits gets an error: the connection ends with its server."""
        assert self._server is not None
        self._server.kill()
        self._server.wait(10)
        assert self._server.stdout is not None
        self._server.stdout.close()
        ctypes.CDLL(None).umount2(str(self.mount).encode(), MNT_FORCE | MNT_DETACH)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It does not answer meanwhile."""
        assert self._server is not None
        os.kill(self._server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._server.pid, signal.SIGCONT)

    def let_go(self) -> None:
        """Answer what was held, and hold no more."""
        assert self._server is not None
        os.kill(self._server.pid, signal.SIGUSR1)


if __name__ == "__main__":
    main(*sys.argv[1:4])
