"""The guard of tests/failing_reads.py sees every way to read a file, a folder or a link, and lets each of them fail."""

from __future__ import annotations

import errno
import glob
import io
import os
import shutil
import types
from collections.abc import Callable
from os import listdir, readlink, stat
from pathlib import Path
from typing import Any

import pytest

from failing_reads import Reads


class Keeper:
    """As pathlib and glob do it in some releases of Python."""

    look: Any = staticmethod(os.stat)


WAYS: dict[str, Callable[[Path], Any]] = {
    "open": lambda folder: open(folder / "file").read(),  # noqa: SIM115  # the way is what is tested
    "open raw": lambda folder: open(f"{folder}/file", "rb", buffering=0).read(9),  # noqa: SIM115
    "open lines": lambda folder: list(open(folder / "file", "rb")),  # noqa: SIM115
    "io.open": lambda folder: io.open(folder / "file").read(),  # noqa: SIM115, UP020
    "io.FileIO": lambda folder: io.FileIO(folder / "file").readall(),
    "Path.read_bytes": lambda folder: (folder / "file").read_bytes(),
    "Path.read_text": lambda folder: (folder / "file").read_text(),
    "Path.open": lambda folder: (folder / "file").open().read(),
    "Path.stat": lambda folder: (folder / "file").stat(),
    "Path.lstat": lambda folder: (folder / "file").lstat(),
    "Path.exists": lambda folder: (folder / "file").exists(),
    "Path.is_dir": lambda folder: folder.is_dir(),
    "Path.readlink": lambda folder: (folder / "link").readlink(),
    "Path.owner": lambda folder: (folder / "file").stat().st_uid,
    "Path.iterdir": lambda folder: sorted(folder.iterdir()),
    "Path.glob": lambda folder: sorted(folder.glob("*/*")),
    "Path.rglob": lambda folder: sorted(folder.rglob("*")),
    "Path.resolve": lambda folder: (folder / "link").resolve(),
    "glob": lambda folder: glob.glob(f"{folder}/*/*"),
    "os.walk": lambda folder: list(os.walk(folder)),
    "os.fwalk": lambda folder: [each[:3] for each in os.fwalk(folder)],
    "os.scandir": lambda folder: sorted(entry.name for entry in os.scandir(folder)),
    "entry.stat": lambda folder: [entry.stat() for entry in os.scandir(folder)],
    "os.listdir": lambda folder: os.listdir(folder),
    "os.listdir of a descriptor": lambda folder: _opened(folder, os.listdir),
    "os.scandir of a descriptor": lambda folder: _opened(folder, lambda fd: [one.name for one in os.scandir(fd)]),
    "os.read": lambda folder: _opened(folder / "file", lambda fd: os.read(fd, 9)),
    "os.pread": lambda folder: _opened(folder / "file", lambda fd: os.pread(fd, 9, 0)),
    "os.readv": lambda folder: _opened(folder / "file", lambda fd: os.readv(fd, [bytearray(9)])),
    "os.preadv": lambda folder: _opened(folder / "file", lambda fd: os.preadv(fd, [bytearray(9)], 0)),
    "os.fstat": lambda folder: _opened(folder / "file", os.fstat),
    "os.fdopen": lambda folder: _opened(folder / "file", lambda fd: os.fdopen(fd, closefd=False).read()),
    "os.dup": lambda folder: _opened(folder / "file", lambda fd: _closed(os.dup(fd), lambda fd: os.read(fd, 9))),
    "dir_fd of os.open": lambda folder: _opened(folder, lambda fd: _closed(os.open("file", 0, dir_fd=fd), os.fstat)),
    "dir_fd of os.stat": lambda folder: _opened(folder, lambda fd: os.stat("file", dir_fd=fd)),
    "dir_fd of os.readlink": lambda folder: _opened(folder, lambda fd: os.readlink("link", dir_fd=fd)),
    "os.readlink": lambda folder: os.readlink(f"{folder}/link"),
    "os.access": lambda folder: os.access(folder / "file", os.R_OK),
    "os.statvfs": lambda folder: os.statvfs(folder),
    "os.path.exists": lambda folder: os.path.exists(folder / "file"),
    "os.path.islink": lambda folder: os.path.islink(folder / "link"),
    "os.path.realpath": lambda folder: os.path.realpath(folder / "link"),
    "os.path.getsize": lambda folder: os.path.getsize(folder / "file"),
    "shutil.copyfile": lambda folder: shutil.copyfile(folder / "file", folder.parent / "copy"),
    "stat by a name of its own": lambda folder: stat(folder / "file"),
    "listdir by a name of its own": lambda folder: listdir(folder),
    "readlink by a name of its own": lambda folder: readlink(folder / "link"),
    "a class that keeps it": lambda folder: Keeper.look(folder / "file"),
}


def _opened(path: Path, work: Callable[[int], Any]) -> Any:
    return _closed(os.open(path, os.O_RDONLY), work)


def _closed(fd: int, work: Callable[[int], Any]) -> Any:
    try:
        return work(fd)
    finally:
        os.close(fd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "proc"
    (made / "below").mkdir(parents=True)
    (made / "file").write_text("content")
    (made / "below/file").write_text("content")
    (made / "link").symlink_to(made / "file")
    return made


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except OSError as error:
        return error.errno


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_read_is_counted_and_fails(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(folder, monkeypatch)
    right = reads.during(lambda: outcome(lambda: WAYS[way](folder)))
    total = reads.seen
    assert total > 0

    failed = []
    for n in range(total):
        found = reads.during(lambda: outcome(lambda: WAYS[way](folder)), n, errno.EIO)
        assert reads.hit.startswith(str(folder))
        failed.append(found != right)
    assert any(failed)


@pytest.mark.parametrize("way", ["Path.read_text", "Path.read_bytes", "os.listdir", "os.read", "os.readlink"])
def test_what_is_read_elsewhere_is_left_alone(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(tmp_path / "pro", monkeypatch)

    assert reads.during(lambda: WAYS[way](folder), 0, errno.EIO)
    assert reads.seen == 0


def test_an_open_that_the_guard_does_not_know_is_told_by_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = types.SimpleNamespace(open=open, listdir=os.listdir)  # no module, no class: not looked into
    reads = Reads(folder, monkeypatch)
    with pytest.raises(AssertionError):
        reads.during(lambda: holder.listdir(folder))
    reads.evaded.clear()

    with pytest.raises(AssertionError):
        reads.during(lambda: holder.open(folder / "file").close())
