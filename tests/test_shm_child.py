"""Real processes hold real segments; the /proc that is looked at shows them and nobody else of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.rights import without_file_rights
from stallwatch.sources.shm_child import LEAST_BYTES, MOST_FILES, OLD_SECONDS, answer, look, segments

MIB = 1 << 20
KTHREAD = 0x00200000
EXITING = 0x00000004

HOLD = """
import ctypes, mmap, os, sys, threading
path, how = sys.argv[1:]
if how == "open":
    kept = open(path, "rb")
elif how == "private":
    with open(path, "rb") as file:
        kept = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
elif how == "alias":  # as glibc makes semaphores: under another name, which is gone by now
    os.link(path, path + ".alias")
    with open(path + ".alias", "r+b") as file:
        kept = mmap.mmap(file.fileno(), 0)
    os.unlink(path + ".alias")
elif how == "alias open":
    os.link(path, path + ".alias")
    kept = open(path + ".alias", "rb")
    os.unlink(path + ".alias")
elif how != "nothing":
    with open(path, "r+b") as file:
        kept = mmap.mmap(file.fileno(), 0)
said = lambda: (print("ready", flush=True), sys.stdin.read(), os._exit(0))
if how == "thread":  # the first thread ends before the others
    threading.Thread(target=said).start()
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
said()
"""


class Machine:
    """A folder of segments on a real tmpfs, and a /proc with the kernel's first thread and who is added."""

    def __init__(self, root: Path, shm: Path) -> None:
        self.proc, self.shm = root / "proc", shm
        self.proc.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []
        self.fake(1, flags=0)
        self.fake(2, flags=KTHREAD)

    def fake(self, pid: int, flags: int = 0, state: str = "S", maps: str = "") -> Path:
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (a) b) {state} 1 1 1 0 -1 {flags} 0 0 0\n")
        (folder / "maps").write_text(maps)
        shutil.copytree(folder, folder / "task" / str(pid))
        return folder

    def segment(self, name: str, size: int = 2 * MIB) -> Path:
        path = self.shm / name
        path.write_bytes(bytes(size))
        return path

    def hold(self, path: Path, how: str = "map") -> subprocess.Popen[bytes]:
        """A live process that holds the segment."""
        holder = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", HOLD, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.started.append(holder)
        (self.proc / str(holder.pid)).symlink_to(f"/proc/{holder.pid}")
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        return holder

    def look(self, *first: int, after: float = OLD_SECONDS + 1) -> dict[str, Any]:
        """As long after now; by names instead of inodes."""
        names = {path.lstat().st_ino: path.name for path in self.shm.iterdir()}
        found = look(str(self.proc), str(self.shm), first, time.time() + after)
        if "unheld" in found:
            found["unheld"] = {names[inode]: size for inode, size in found["unheld"].items()}
        return found

    def unheld(self) -> dict[str, int]:
        found = self.look()["unheld"]
        assert isinstance(found, dict)
        return found

    def end(self) -> None:
        for holder in self.started:
            holder.kill()
            holder.communicate(timeout=60)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    try:
        shm = tempfile.mkdtemp(prefix="stallwatch-test-", dir="/dev/shm")
    except OSError as error:
        pytest.skip(f"no file can be made in /dev/shm: {error.strerror}")
    machine = Machine(tmp_path, Path(shm))
    try:
        yield machine
    finally:
        machine.end()
        shutil.rmtree(shm)


# --- who holds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["map", "open", "private", "alias", "alias open", "thread"])
def test_a_segment_that_is_held_is_no_orphan_and_the_one_beside_it_is(machine: Machine, how: str) -> None:
    holder = machine.hold(machine.segment("psm_held"), how)
    machine.segment("psm_left")

    found = machine.look()

    assert found == {"unheld": {"psm_left": 2 * MIB}, "holders": [holder.pid]}


def test_a_process_that_holds_nothing_changes_nothing(machine: Machine) -> None:
    machine.hold(machine.segment("psm_left"), "nothing")

    assert machine.unheld() == {"psm_left": 2 * MIB}


def test_what_a_killed_process_held_is_left_even_while_nobody_takes_note_of_its_end(machine: Machine) -> None:
    holder = machine.hold(machine.segment("nccl-AbC123"))
    before = machine.unheld()

    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # a zombie now

    assert (before, machine.unheld()) == ({}, {"nccl-AbC123": 2 * MIB})


def test_a_file_of_the_same_name_elsewhere_does_not_hold(machine: Machine, tmp_path: Path) -> None:
    other = tmp_path / "psm_left"
    other.write_bytes(bytes(MIB))
    machine.segment("psm_left")
    machine.hold(other, "open")
    machine.hold(other, "map")

    assert machine.unheld() == {"psm_left": 2 * MIB}


def test_a_mapping_of_the_same_inode_on_another_file_system_does_not_hold(machine: Machine) -> None:
    """A container's own /dev/shm counts its files from 1, too."""
    status = machine.segment("psm_left").stat()
    line = "7f00-7f01 rw-s 00000000 {major:02x}:{minor:02x} {inode} /dev/shm/psm_left\n"
    major, minor = os.major(status.st_dev), os.minor(status.st_dev)
    machine.fake(50, maps=line.format(major=major, minor=minor + 1, inode=status.st_ino))
    other = machine.unheld()
    machine.fake(51, maps=line.format(major=major, minor=minor, inode=status.st_ino))

    assert (other, machine.unheld()) == ({"psm_left": 2 * MIB}, {})


def test_a_name_that_looks_like_a_mapping_does_not_hold(machine: Machine) -> None:
    status = machine.segment("psm_left").stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    machine.fake(50, maps=f"7f00-7f01 r--p 00000000 08:01 5 /tmp/a b c {device} {status.st_ino}\n")

    assert machine.unheld() == {"psm_left": 2 * MIB}


# --- what counts ---------------------------------------------------------------------------------------------


def test_memory_counts_and_not_the_length(machine: Machine) -> None:
    machine.segment("psm_left")
    os.truncate(machine.shm / "psm_left", 1 << 40)

    assert machine.unheld() == {"psm_left": 2 * MIB}


def test_only_files_right_in_the_folder_count_each_once(machine: Machine) -> None:
    """shm_open makes no folders: what lies in one was put there on purpose, a model perhaps."""
    path = machine.segment("sem.left")
    os.link(path, machine.shm / "sem.left.too")
    (machine.shm / "model").mkdir()
    (machine.shm / "model/weights").write_bytes(bytes(4 * MIB))
    (machine.shm / "link").symlink_to("model/weights")
    os.mkfifo(machine.shm / "pipe")

    assert list(machine.unheld().values()) == [2 * MIB]


def test_a_young_segment_may_be_on_its_way(machine: Machine) -> None:
    machine.segment("psm_young")

    young, old = machine.look(after=OLD_SECONDS - 30), machine.look()

    assert (young["unheld"], old["unheld"]) == ({}, {"psm_young": 2 * MIB})


def test_nobody_is_looked_at_while_there_is_little(machine: Machine) -> None:
    machine.segment("psm_a", LEAST_BYTES // 2)
    (machine.fake(50) / "maps").unlink()
    (machine.proc / "50/maps").mkdir()  # would be an error
    little = machine.look()
    machine.segment("psm_b", LEAST_BYTES // 2)

    assert (little, machine.look()) == ({"unheld": {}, "holders": []}, {"reason": "error"})


def test_too_many_files_are_not_counted_in_part(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_FILES >= 10_000
    monkeypatch.setattr("stallwatch.sources.shm_child.MOST_FILES", 2)
    machine.segment("psm_a")
    machine.segment("psm_b")
    both = segments(str(machine.shm), time.time()).bytes
    machine.segment("psm_c")

    assert both == {}
    with pytest.raises(OSError, match="too many"):
        segments(str(machine.shm), time.time())


# --- who is looked at ----------------------------------------------------------------------------------------


def test_who_held_before_and_who_is_named_are_looked_at_first(machine: Machine) -> None:
    """And nobody else, once every holder is found: here the others cannot be looked at."""
    named = machine.hold(machine.segment("psm_named"))
    hinted = machine.hold(machine.segment("psm_hinted"))
    (machine.shm / "psm_named").rename(machine.shm / f"torch_{named.pid}_12_0")
    hidden = machine.fake(4_000_000)
    hidden.joinpath("maps").chmod(0)

    with without_file_rights():
        found, without = machine.look(hinted.pid), machine.look()

    assert found == {"unheld": {}, "holders": [hinted.pid, named.pid]}
    assert without["holders"] == [named.pid, hinted.pid]


def test_who_cannot_be_looked_at_may_hold_what_is_left(machine: Machine) -> None:
    machine.segment("psm_left")
    folder = machine.fake(50)
    before = machine.look()
    folder.joinpath("maps").chmod(0)

    with without_file_rights():
        hidden = machine.look()

    assert before["unheld"] == {"psm_left": 2 * MIB}
    assert hidden == {"reason": "permission"}


def test_whose_open_files_cannot_be_seen_may_hold_them(machine: Machine) -> None:
    machine.segment("psm_left")
    folder = machine.fake(50)
    folder.joinpath("fd").chmod(0)

    with without_file_rights():
        hidden = machine.look()

    assert hidden == {"reason": "permission"}


def test_a_kernel_thread_is_not_asked(machine: Machine) -> None:
    machine.segment("psm_left")
    folder = machine.fake(50, flags=KTHREAD)
    folder.joinpath("maps").chmod(0)

    with without_file_rights():
        assert machine.unheld() == {"psm_left": 2 * MIB}


def test_a_process_on_its_way_out_may_still_hold_what_it_does_not_show(machine: Machine) -> None:
    machine.segment("psm_left")
    machine.fake(50, flags=EXITING, state="Z")
    ended = machine.look()
    machine.fake(51, flags=EXITING, state="D")

    assert ended["unheld"] == {"psm_left": 2 * MIB}
    assert machine.look() == {"reason": "vanished"}


@pytest.mark.parametrize(("left", "reason"), [((1,), "namespace"), ((), "permission")])
def test_where_not_everybody_is_seen_nothing_is_known(machine: Machine, left: tuple[int, ...], reason: str) -> None:
    """Inside a PID namespace, or behind hidepid."""
    machine.segment("psm_left")
    for pid in {1, 2} - set(left):
        shutil.rmtree(machine.proc / str(pid))

    assert machine.look() == {"reason": reason}


def test_where_not_everybody_is_seen_a_holder_still_is(machine: Machine) -> None:
    machine.hold(machine.segment("psm_held"))
    shutil.rmtree(machine.proc / "2")

    assert machine.unheld() == {}


def test_a_look_that_takes_too_long_ends_without_an_answer(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.segment("psm_left")
    machine.fake(50)
    monkeypatch.setattr("stallwatch.sources.shm_child.LONGEST_SECONDS", -1.0)

    assert machine.look() == {"reason": "timeout"}


def test_a_folder_that_is_not_there_is_an_error_of_the_answer(machine: Machine) -> None:
    assert answer(str(machine.proc), {"folder": str(machine.shm / "no"), "first": []}) == {"reason": "error"}
