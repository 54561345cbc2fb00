"""Locks of starting servers: real files, real flocks of real processes, and trees that stand for /proc.

The files lie below a folder that is the root of the server's process; which file system that is says a mountinfo
in the tree, under the number that the folder's mount really has.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from proc_tree import BOOT, ProcTree
from stallwatch.config import Config
from stallwatch.model import Process, Reading, Scene, Server
from stallwatch.sources import Host, Moment
from stallwatch.sources.blocking_reads import BlockingReads
from stallwatch.sources.locks import LOOK_SECONDS, RETRY_SECONDS, Locks, start_looker
from stallwatch.sources.locks_child import (
    MOST_FOUND,
    RULES,
    VARIABLES,
    Root,
    answer,
    mount_of,
    places,
)
from stallwatch.sources.node import Node
from stallwatch.sources.procfs import CLOCK_TICKS, KERNEL_THREAD, ProcFs

KTHREADD = 2
SERVER = 100
STARTED = 1000.0
"""When the server started, seconds since boot."""
NOW = 5000.0
HOME = "home/llm"
BATON = f"{HOME}/.cache/torch_extensions/py312_cu128/fused/lock"
BLOB = f"{HOME}/.cache/huggingface/hub/.locks/models--org--m/abc.lock"
KERNEL = f"{HOME}/.cache/flashinfer/0.6.1/90a/cached_ops/tmp/rope.lock"

Said = dict[tuple[str, str], tuple[float | None, str | None]]


class DirectLooks:
    """Looks without a process of its own; `hangs`: questions that are not answered in time."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self.now = BOOT + NOW
        self.hangs: set[str] = set()
        self.asked: list[dict[str, Any]] = []

    def ask(self, request: str) -> Mapping[str, Any]:
        asked = json.loads(request)
        self.asked.append(asked)
        if asked["ask"] in self.hangs:
            return {"reason": "timeout"}
        found: Mapping[str, Any] = json.loads(json.dumps(answer(str(self._proc), asked, self.now)))
        return found

    def rest(self) -> None:
        """There is nothing to end."""

    def close(self) -> None:
        """There is nothing to end."""


class Machine:
    """A node with one server, `vllm-8000`, whose root folder is `root`; times are seconds since boot."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        (self.root / HOME).mkdir(parents=True)
        self.tree = ProcTree(folder / "proc")
        self.looks = DirectLooks(self.tree.root)
        self.locks = Locks(Host(Config(), (), self.tree.root, folder / "nothing"), self.looks)
        self.ready: frozenset[str] = frozenset()
        self.now = NOW
        self.user = os.getuid()
        self.tree.add(1, "/sbin/init", comm="systemd", started=0.0)
        self.tree.add(KTHREADD, "", comm="kthreadd", flags=KERNEL_THREAD, started=0.0)
        self.process(SERVER, comm="vllm", started=STARTED, environ={"HOME": f"/{HOME}", "HF_TOKEN": "hf_PLANTED"})
        (self.tree.folder(SERVER) / "root").symlink_to(self.root)
        self.mount("ext4")
        self.server = self._server(SERVER, "vllm-8000")

    def _server(self, pid: int, name: str) -> Server:
        process = Process(self.tree._specs[pid].id, "main", user=self.user)
        return Server(name, "vllm", "server", process.id, BOOT + STARTED, (process,))

    def process(self, pid: int, comm: str = "python3", program: str = "/usr/bin/python3.12", **given: Any) -> None:
        self.tree.add(pid, comm, comm=comm, **given)
        (self.tree.folder(pid) / "exe").symlink_to(program)

    def mount(self, kind: str) -> None:
        """Of which type the file system is on which the server's files lie."""
        folder = os.open(self.root, os.O_RDONLY)
        try:
            number = mount_of(folder)
        finally:
            os.close(folder)
        line = f"{number} 1 0:21 / / rw,relatime - {kind} source rw\n"
        (self.tree.folder(SERVER) / "mountinfo").write_text(line)

    def file(self, path: str, at: float = 100.0, content: str = "") -> Path:
        """A file below the server's root, last changed `at`."""
        made = self.root / path
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(content)
        os.utime(made, (BOOT + at, BOOT + at))
        return made

    def granted(self, *lines: str) -> None:
        (self.tree.root / "locks").write_text("".join(line + "\n" for line in lines))

    def look(self, seconds: float = LOOK_SECONDS) -> Said:
        """(signal, kind) -> value and reason."""
        self.now += seconds
        self.looks.now += seconds
        scene = Scene((self.server,), ready=self.ready)
        found = list(self.locks.read(scene, Moment(self.now, BOOT + self.now)))
        assert {reading.labels[0] for reading in found} <= {"vllm-8000"}
        short = {"server_lock_age_seconds": "age", "server_lock_held": "held"}
        return {(short[r.signal.name], r.labels[1]): (r.value, r.reason) for r in found}

    def held(self, kind: str) -> tuple[float | None, str | None]:
        return self.look()[("held", kind)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def flock_line(pid: int, path: Path, waits: bool = False) -> str:
    """A line of /proc/locks."""
    status = path.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    return f"1: {'-> ' if waits else ''}FLOCK  ADVISORY  WRITE {pid} {device}:{status.st_ino} 0 EOF"


# --- locks that are held by being there ----------------------------------------------------------------------


def test_a_baton_older_than_every_process_is_held_by_nobody(machine: Machine) -> None:
    machine.file(BATON, at=STARTED - 600)

    said = machine.look()

    assert said == {
        ("age", "build"): (NOW + LOOK_SECONDS - STARTED + 600, None),
        ("held", "build"): (0.0, None),
    }


def test_a_baton_of_a_live_compile_is_held(machine: Machine) -> None:
    """The twin: a rank of the server made the file, keeps it open and compiles."""
    lock = machine.file(BATON, at=STARTED + 60)
    machine.tree.redirect(SERVER, 7, lock)

    assert machine.held("build") == (1.0, None)


def test_a_baton_left_by_a_rank_that_was_killed_is_held_by_nobody(machine: Machine) -> None:
    """The others of the same start are older than the file, and do not have it open: they wait for it."""
    machine.file(BATON, at=STARTED + 60)

    assert machine.held("build") == (0.0, None)


def test_another_process_of_the_user_that_has_the_file_open_holds_it(machine: Machine) -> None:
    lock = machine.file(BATON, at=2000)
    machine.process(200, started=1990)
    machine.tree.redirect(200, 3, lock)

    assert machine.held("build") == (1.0, None)

    machine.tree.end(200)

    assert machine.held("build") == (0.0, None)


def test_a_file_that_was_deleted_under_its_holder_is_still_his(machine: Machine) -> None:
    machine.file(BATON, at=2000)
    machine.process(200, started=1990)
    machine.tree.redirect(200, 3, "/somewhere/lock (deleted)")

    assert machine.held("build") == (1.0, None)


def test_another_file_of_the_same_name_is_not_the_lock(machine: Machine) -> None:
    lock = machine.file(BATON, at=2000)
    machine.process(200, started=1990)
    machine.tree.redirect(200, 3, "/elsewhere/lock")
    assert machine.held("build") == (1.0, None)  # before Linux 5.14 it may be

    inode = machine.tree.folder(200) / "fdinfo" / "3"
    inode.parent.mkdir()
    inode.write_text(f"pos:\t0\nflags:\t02\nmnt_id:\t9\nino:\t{lock.stat().st_ino + 1}\n")
    assert machine.held("build") == (0.0, None)

    inode.write_text(f"pos:\t0\nflags:\t02\nmnt_id:\t9\nino:\t{lock.stat().st_ino}\n")
    assert machine.held("build") == (1.0, None)


def test_who_gave_up_the_rights_of_root_counts_for_the_user_he_is(machine: Machine) -> None:
    """His folder in /proc is root's, for he may hold secrets."""
    lock = machine.file(BATON, at=2000)
    machine.process(200, started=1990)
    machine.tree.redirect(200, 3, lock)
    os.chown(lock, 4711, -1) if os.getuid() == 0 else pytest.skip("needs root")
    assert machine.held("build") == (0.0, None)

    (machine.tree.folder(200) / "status").write_text("Name:\tx\nUid:\t4711\t4711\t4711\t4711\nNSpid:\t200\n")

    assert machine.held("build") == (1.0, None)


def test_a_process_younger_than_the_file_did_not_make_it(machine: Machine) -> None:
    """It may have opened it since, as a curious person does."""
    lock = machine.file(BATON, at=STARTED - 600)
    machine.tree.redirect(SERVER, 7, lock)

    assert machine.held("build") == (0.0, None)


def test_a_process_whose_open_files_cannot_be_seen_may_hold_it(machine: Machine) -> None:
    machine.file(BATON, at=2000)
    machine.process(200, started=1990)
    folder = machine.tree.folder(200) / "fd"
    folder.rmdir()
    folder.write_text("")  # as good as forbidden: root may list any folder

    assert machine.held("build") == (1.0, None)


def test_a_process_of_which_only_the_number_of_open_files_can_be_seen_may_hold_it(machine: Machine) -> None:
    """Root without CAP_SYS_PTRACE, as in a container: it may list them, and follow none."""
    machine.file(BATON, at=2000)
    machine.process(200, started=1990)
    (machine.tree.folder(200) / "fd" / "3").write_text("")  # readlink fails, as it does there

    assert machine.held("build") == (1.0, None)


def test_the_first_process_of_the_node_holds_nothing_however_it_is_called(machine: Machine) -> None:
    machine.file(BATON, at=2000)
    machine.tree.change(1, comm="some_api")  # no program to be seen, and no open file either
    (machine.tree.folder(1) / "fd" / "3").write_text("")

    assert machine.held("build") == (0.0, None)


@pytest.mark.parametrize(("comm", "program"), [("bash", "/usr/bin/bash"), ("postgres", "/usr/bin/postgres")])
def test_a_program_that_builds_nothing_holds_nothing(machine: Machine, comm: str, program: str) -> None:
    lock = machine.file(BATON, at=2000)
    machine.process(200, comm, program, started=1990)
    machine.tree.redirect(200, 3, lock)

    assert machine.held("build") == (0.0, None)


def test_a_process_of_another_user_holds_nothing(machine: Machine) -> None:
    lock = machine.file(BATON, at=2000)
    os.chown(lock, 4711, -1) if os.getuid() == 0 else pytest.skip("needs root")
    machine.tree.redirect(SERVER, 7, lock)

    assert machine.held("build") == (0.0, None)


def test_a_baton_that_names_its_holder_is_held_while_he_lives(machine: Machine) -> None:
    """AITER writes its PID, as it is in its own namespace; the open files of others say nothing then."""
    machine.file(f"{HOME}/.aiter/jit/build/lock_module_rmsnorm", at=2000, content="7\nnode\npid:[1]\n9\nflock\n")
    machine.process(200, started=1990, inner_pid=7)

    assert machine.held("build") == (1.0, None)

    machine.tree.end(200)

    assert machine.held("build") == (0.0, None)


def test_the_guard_beside_a_baton_is_no_lock(machine: Machine) -> None:
    machine.file(f"{HOME}/.aiter/jit/build/lock_module_rmsnorm.steal")

    assert machine.look() == {}


def test_a_soft_lock_of_a_download_is_held_by_the_process_it_names(machine: Machine) -> None:
    """What huggingface_hub falls back to where flock is not to be had."""
    machine.file(BLOB, at=2000, content="200\nnode\n")
    machine.process(200, started=1990)

    assert machine.held("download") == (1.0, None)

    machine.tree.end(200)

    assert machine.held("download") == (0.0, None)


def test_in_a_containers_own_layer_only_a_process_of_the_container_holds_a_lock(machine: Machine) -> None:
    machine.mount("overlay")
    machine.file(BATON, at=2000)
    machine.process(200, started=1990)
    machine.tree.redirect(200, 3, "/lock")
    for pid, namespace in ((SERVER, 11), (200, 22)):
        (machine.tree.folder(pid) / "ns").mkdir()
        (machine.tree.folder(pid) / "ns" / "mnt").symlink_to(f"mnt:[{namespace}]")

    assert machine.held("build") == (0.0, None)

    machine.mount("ext4")  # a volume may be another container's, too

    assert machine.held("build") == (1.0, None)


def test_of_several_locks_the_oldest_that_nobody_holds_is_told(machine: Machine) -> None:
    held = machine.file(f"{HOME}/.cache/torch_extensions/py312_cu128/other/lock", at=STARTED + 1)
    machine.process(200, started=1)
    machine.tree.redirect(200, 3, held)
    machine.file(f"{HOME}/.aiter/jit/build/lock_module_a", at=3000, content="8\nnode\n")
    machine.file(f"{HOME}/.aiter/jit/build/lock_module_b", at=2000, content="8\nnode\n")

    said = machine.look()

    assert said[("held", "build")] == (0.0, None)
    assert said[("age", "build")] == (NOW + LOOK_SECONDS - 2000, None)


class CountingProc(ProcFs):
    """Counts how often somebody looks at the open files of a process."""

    listings = 0

    def path(self, pid: int, *parts: str) -> str:
        self.listings += parts == ("fd",)
        return super().path(pid, *parts)


def test_a_cache_with_hundreds_of_locks_costs_no_more_looks_at_open_files_than_one(machine: Machine) -> None:
    proc = machine.locks._proc = CountingProc(machine.tree.root)
    for number in range(200):
        machine.file(f"{HOME}/.aiter/jit/build/lock_module_{number}", at=2000 + number)
    held = machine.file(f"{HOME}/.aiter/jit/build/lock_module_x", at=1000)
    for pid in (200, 201, 202):
        machine.process(pid, started=1)
    machine.tree.redirect(202, 3, held)

    said = machine.look()

    assert (said[("held", "build")], said[("age", "build")]) == ((0.0, None), (NOW + LOOK_SECONDS - 2000, None))
    assert proc.listings == 4  # of the server, too

    machine.look()

    assert proc.listings == 8  # who has what open is looked at anew each time


def test_a_lock_from_the_future_has_no_age(machine: Machine) -> None:
    machine.file(BATON, at=NOW + 3600)

    assert machine.look()[("age", "build")] == (0.0, None)


def test_a_lock_that_is_gone_is_told_no_more(machine: Machine) -> None:
    lock = machine.file(BATON)
    assert machine.look()

    lock.unlink()

    assert machine.look() == {}


def test_between_two_looks_the_age_grows(machine: Machine) -> None:
    machine.file(BATON, at=NOW)

    assert machine.look()[("age", "build")] == (LOOK_SECONDS, None)
    assert machine.look(LOOK_SECONDS / 2)[("age", "build")] == (1.5 * LOOK_SECONDS, None)
    assert [asked["ask"] for asked in machine.looks.asked] == ["environ", "locks"]


def test_a_server_that_is_ready_waits_for_no_lock(machine: Machine) -> None:
    machine.file(BATON)
    machine.ready = frozenset(["vllm-8000"])

    assert machine.look() == {}
    assert machine.looks.asked == []


# --- locks that the kernel keeps -----------------------------------------------------------------------------


def test_a_resting_lock_file_is_no_lock(machine: Machine) -> None:
    """filelock never removes them: a cache is full of them."""
    machine.file(BLOB)
    machine.file(KERNEL)

    assert machine.look() == {}


def test_a_flock_of_another_process_is_held(machine: Machine) -> None:
    lock = machine.file(BLOB)
    machine.process(200, started=1990)
    machine.granted(flock_line(200, lock), flock_line(SERVER, lock, waits=True))

    assert machine.look() == {("age", "download"): (0.0, None), ("held", "download"): (1.0, None)}
    assert machine.look()[("age", "download")] == (LOOK_SECONDS, None)  # since it was first seen


def test_a_flock_that_the_server_holds_itself_is_nothing_it_waits_for(machine: Machine) -> None:
    """Its own rank downloads or builds; if that hangs, no lock excuses it."""
    lock = machine.file(BLOB)
    machine.process(300, ppid=SERVER, started=1990)
    machine.granted(flock_line(300, lock))

    assert machine.look() == {}


def test_whoever_only_waits_for_a_flock_does_not_hold_it(machine: Machine) -> None:
    lock = machine.file(BLOB)
    machine.granted(flock_line(200, lock, waits=True))

    assert machine.look() == {}


def test_the_same_inode_on_another_device_is_another_file(machine: Machine) -> None:
    lock = machine.file(BLOB)
    machine.granted(f"1: FLOCK  ADVISORY  WRITE 200 77:88:{lock.stat().st_ino} 0 EOF")

    assert machine.look() == {}

    machine.mount("overlay")  # which shows another device in stat than to the kernel

    assert machine.held("download") == (1.0, None)


def test_a_free_flock_that_is_tried_again_and_again_is_held_by_nobody(machine: Machine) -> None:
    """Free once only, it is passed on this moment."""
    lock = machine.file(KERNEL)
    machine.looks.now = lock.stat().st_ctime - LOOK_SECONDS  # a waiter changed it just now

    assert machine.look() == {}

    machine.looks.now -= LOOK_SECONDS

    assert machine.held("build") == (0.0, None)


def test_a_flock_that_was_held_and_is_free_is_not_yet_free(machine: Machine) -> None:
    lock = machine.file(KERNEL)
    machine.granted(flock_line(200, lock))
    machine.looks.now = lock.stat().st_ctime - LOOK_SECONDS
    assert machine.held("build") == (1.0, None)

    machine.granted()
    machine.looks.now -= LOOK_SECONDS

    assert machine.look() == {}


class Holder:
    """A real process with a real flock."""

    def __init__(self, path: Path) -> None:
        program = (
            "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.flock(file, fcntl.LOCK_EX);"
            "print('held', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-I", "-S", "-c", program, str(path)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == b"held\n"

    def kill(self) -> None:
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def holder(machine: Machine) -> Iterator[Holder]:
    made = Holder(machine.file(BLOB))
    yield made
    made.kill()


def test_a_real_flock_shows_until_its_holder_is_killed(machine: Machine, holder: Holder) -> None:
    machine.granted(*Path("/proc/locks").read_text().splitlines())
    if not any(f" {holder.child.pid} " in line for line in Path("/proc/locks").read_text().splitlines()):
        pytest.skip("this kernel shows no locks")

    assert machine.held("download") == (1.0, None)

    holder.kill()
    machine.granted(*Path("/proc/locks").read_text().splitlines())

    assert machine.look() == {}


def test_looking_takes_no_lock_and_changes_no_file(machine: Machine) -> None:
    lock = machine.file(BLOB, content="200\nnode\n")
    before = lock.stat()

    machine.look()

    after = lock.stat()
    assert (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns)
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- what cannot be known ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nfs4", "nfs", "fuse.juicefs", "lustre", "gpfs", "9p", "virtiofs", "ceph", "cifs"])
def test_on_a_shared_file_system_nobody_knows_who_holds_a_lock(machine: Machine, kind: str) -> None:
    machine.mount(kind)
    machine.file(BATON, at=STARTED - 600)

    assert machine.held("build") == (None, "not_supported")


def test_on_a_shared_file_system_a_holder_on_this_node_is_known(machine: Machine) -> None:
    machine.mount("nfs4")
    lock = machine.file(BLOB)
    machine.granted(flock_line(200, lock))

    assert machine.held("download") == (1.0, None)


def test_a_file_system_of_which_nothing_is_known_may_be_shared(machine: Machine) -> None:
    machine.file(BATON, at=STARTED - 600)
    machine.mount("somethingfs")

    assert machine.held("build") == (None, "not_supported")


def test_on_a_shared_file_system_a_resting_file_counts_while_its_product_is_missing(machine: Machine) -> None:
    """A soft lock without a record looks like a flock at rest; but after a download the blob is there."""
    machine.mount("nfs4")
    machine.file(BLOB)
    machine.file(KERNEL)

    said = machine.look()
    assert said[("held", "download")] == said[("held", "build")] == (None, "not_supported")

    machine.file(f"{HOME}/.cache/huggingface/hub/models--org--m/blobs/abc")
    machine.file(f"{HOME}/.cache/flashinfer/0.6.1/90a/cached_ops/rope/rope.so")

    assert machine.look() == {}


def test_inside_a_pid_namespace_the_holder_may_be_outside(machine: Machine) -> None:
    machine.tree.end(KTHREADD)
    machine.file(BATON, at=STARTED - 600)

    assert machine.held("build") == (None, "namespace")


def test_where_other_users_are_hidden_the_holder_may_be_one_of_them(machine: Machine) -> None:
    machine.tree.end(1, KTHREADD)
    machine.file(BATON, at=STARTED - 600)

    assert machine.held("build") == (None, "permission")


def test_a_process_that_is_gone_has_no_locks(machine: Machine) -> None:
    machine.file(BATON)
    machine.tree.replace(SERVER, "vllm serve other", started=4000.0)

    assert machine.look() == {}


def test_a_server_that_started_anew_is_looked_at_anew(machine: Machine) -> None:
    machine.look()
    machine.tree.replace(SERVER, "vllm serve m", started=4000.0, environ={"HOME": f"/{HOME}"})
    (machine.tree.folder(SERVER) / "root").symlink_to(machine.root)
    machine.mount("ext4")
    machine.server = machine._server(SERVER, "vllm-8000")
    machine.file(BATON)

    assert machine.look(1.0)[("held", "build")] == (0.0, None)


# --- looks that hang -----------------------------------------------------------------------------------------


def test_a_look_that_hangs_is_a_timeout_and_is_not_tried_again_for_a_while(machine: Machine) -> None:
    machine.file(BATON)
    machine.looks.hangs = {"locks"}

    said = machine.look()

    kinds = ("build", "other", "download")
    assert said == {(signal, kind): (None, "timeout") for signal in ("age", "held") for kind in kinds}
    asked = len(machine.looks.asked)
    machine.looks.hangs = set()
    assert machine.look(RETRY_SECONDS - 1) == said
    assert len(machine.looks.asked) == asked
    assert machine.look(1.0)[("held", "build")] == (0.0, None)


def test_an_environment_that_hangs_is_done_without(machine: Machine) -> None:
    """Its process holds a memory lock; its user's home is known without it."""
    machine.looks.hangs = {"environ"}
    machine.file("etc/passwd", content=f"root:x:{machine.user}:0:r:/{HOME}:/bin/sh\n")
    machine.file(BATON)

    assert machine.look() == {}
    assert machine.look(RETRY_SECONDS)[("held", "build")] == (0.0, None)


def test_the_first_look_that_hangs_ends_the_turn(tmp_path: Path) -> None:
    """However many servers wait on a dead file system, a turn costs one deadline."""
    machine = Machine(tmp_path)
    machine.looks.hangs = {"environ", "locks"}
    servers = []
    for pid in range(300, 310):
        machine.process(pid, started=STARTED)
        servers.append(machine._server(pid, f"vllm-{pid}"))
    scene = Scene(tuple(servers))

    list(machine.locks.read(scene, Moment(1.0, BOOT)))
    assert len(machine.looks.asked) == 1

    list(machine.locks.read(scene, Moment(2.0, BOOT)))
    assert len({asked["pid"] for asked in machine.looks.asked}) == 2


DEADLINE_SECONDS = 0.5
PATIENT_SECONDS = 30.0
"""Where nothing hangs: the machine may be busy."""


def started(proc: Path) -> subprocess.Popen[bytes]:
    """A real looker that has shown that it can answer."""
    child = start_looker(proc)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b'{"ask": "environ", "pid": 0, "ticks": 0}\n')
    assert child.stdout.readline() == b'{"reason": "vanished"}\n'
    return child


def test_a_dead_file_system_leaves_the_other_readings_of_the_node(machine: Machine) -> None:
    """A real child that hangs in open() of a FIFO, as in one of a dead mount."""
    (machine.tree.root / "meminfo").write_text("MemTotal: 9 kB\n")
    os.mkfifo(machine.tree.root / "locks")
    host = Host(Config(), (), machine.tree.root, machine.root)
    node = Node(host, Locks(host, BlockingReads(machine.tree.root, DEADLINE_SECONDS, started)))

    try:
        found = list(node.read(Scene((machine.server,)), Moment(1.0, BOOT)))
    finally:
        node.close()

    readings = {item.signal.name: item for item in found if isinstance(item, Reading)}
    assert readings["node_memory_total_bytes"].value == 9 * 1024
    assert readings["server_lock_age_seconds"].reason == readings["server_lock_held"].reason == "timeout"


def test_the_looker_runs_as_a_program_of_its_own(machine: Machine) -> None:
    machine.file(BATON, at=STARTED - 600)
    looks = BlockingReads(machine.tree.root, PATIENT_SECONDS, start_looker)
    locks = Locks(Host(Config(), (), machine.tree.root), looks)

    try:
        found = list(locks.read(Scene((machine.server,)), Moment(1.0, BOOT + NOW)))
    finally:
        locks.close()

    assert {(r.signal.name, r.labels, r.value) for r in found} == {
        ("server_lock_age_seconds", ("vllm-8000", "build"), NOW - STARTED + 600),
        ("server_lock_held", ("vllm-8000", "build"), 0.0),
    }


# --- where locks are looked for ------------------------------------------------------------------------------


def test_only_known_variables_leave_the_process_that_looks(machine: Machine) -> None:
    machine.look()

    (asked,) = (asked for asked in machine.looks.asked if asked["ask"] == "locks")
    assert asked["environ"] == {"HOME": f"/{HOME}"}
    assert "HF_TOKEN" not in VARIABLES


@pytest.mark.parametrize(
    ("environ", "lock", "kind"),
    [
        ({"TORCH_EXTENSIONS_DIR": "/data/ext"}, "data/ext/fused/lock", "build"),
        ({"XDG_CACHE_HOME": "/data"}, "data/torch_extensions/py312_cu128/fused/lock", "build"),
        ({"AITER_JIT_DIR": "/data/aiter"}, "data/aiter/build/lock_module_x", "build"),
        ({"AITER_JIT_DIR": "/data/aiter"}, "data/aiter/build/module_x/build/lock", "build"),
        ({}, f"{HOME}/.aiter/build/abc/lock", "build"),
        ({}, "sgl-workspace/aiter/aiter/jit/build/lock_module_x", "build"),
        ({"VIRTUAL_ENV": "/v"}, "v/lib/python3.12/site-packages/aiter/jit/build/lock_module_x", "build"),
        ({}, "usr/local/lib/python3.12/dist-packages/aiter/jit/build/lock_module_x", "build"),
        ({}, "tmp/aiter_configs/bf16_tuned_gemm.csv.lock", "other"),
    ],
)
def test_a_baton_is_found_where_its_maker_has_it(
    machine: Machine, environ: Mapping[str, str], lock: str, kind: str
) -> None:
    machine.tree.change(SERVER, environ={"HOME": f"/{HOME}", **environ})
    machine.file(lock)

    assert set(machine.look()) == {("age", kind), ("held", kind)}


@pytest.mark.parametrize(
    ("environ", "lock", "kind"),
    [
        ({"HF_HOME": "/data/hf"}, "data/hf/hub/.locks/models--o--m/a.lock", "download"),
        ({"HF_HUB_CACHE": "/data/c", "HF_HOME": "/x"}, "data/c/.locks/models--o--m/a.lock", "download"),
        ({"FLASHINFER_WORKSPACE_BASE": "/w"}, "w/.cache/flashinfer/90a/cached_ops/tmp/x.lock", "build"),
        ({}, f"{HOME}/.cache/flashinfer/cubins/a/b/c/x.cubin.lock", "download"),
        ({}, f"{HOME}/.cache/modelscope/hub/.lock/o___m", "download"),
        ({}, f"tmp/{'ab' * 32}o-m.lock", "download"),
        ({"TMPDIR": "/var/tmp"}, f"var/tmp/{'ab' * 32}o-m.lock", "download"),
        ({}, "dev/shm/sglang_download_lock_0123456789abcdef", "download"),
        ({}, "tmp/torchinductor_llm/locks/x.lock", "build"),
        ({"TORCHINDUCTOR_CACHE_DIR": "/i"}, "i/locks/x.lock", "build"),
        ({}, f"{HOME}/.cache/vllm/torch_compile_cache/h/rank_0_0/inductor_cache/locks/x.lock", "build"),
        ({}, f"{HOME}/.cache/tvm-ffi/rope_abc/lock", "build"),
    ],
)
def test_a_flock_is_found_where_its_maker_has_it(
    machine: Machine, environ: Mapping[str, str], lock: str, kind: str
) -> None:
    machine.tree.change(SERVER, environ={"HOME": f"/{HOME}", **environ})
    machine.granted(flock_line(200, machine.file(lock)))

    assert set(machine.look()) == {("age", kind), ("held", kind)}


def test_without_a_home_in_the_environment_the_one_of_passwd_counts(machine: Machine) -> None:
    """Titles are written over the environment; the process's own passwd is asked, not ours."""
    machine.tree.change(SERVER, environ={})
    machine.file("etc/passwd", content=f"broken\nllm:x:{machine.user}:0:llm:/srv/llm:/bin/sh\n")
    machine.file("srv/llm/.cache/torch_extensions/py312/fused/lock")

    assert machine.held("build") == (0.0, None)


def test_a_place_that_is_no_absolute_path_is_none(machine: Machine) -> None:
    rule = RULES[0]

    assert places(rule, {"TORCH_EXTENSIONS_DIR": "relative"}, "/home") == ""
    assert places(rule, {}, "") == ""
    assert places(rule, {"TORCH_EXTENSIONS_DIR": "~/e"}, "/home/x") == "/home/x/e"
    assert places(rule, {}, "/home/x") == "/home/x/.cache/torch_extensions"


def test_a_link_leads_where_it_leads_the_process(machine: Machine) -> None:
    """A cache on a data disk, by an absolute link: below the root of the process, not below ours."""
    (machine.root / HOME / ".cache").symlink_to("/data/cache")
    machine.file("data/cache/torch_extensions/py312/fused/lock")

    assert machine.held("build") == (0.0, None)


@pytest.mark.parametrize("target", ["/etc/ours", "../../../../../../../../../../../etc/ours"])
def test_no_link_leads_out_of_the_root_of_the_process(machine: Machine, tmp_path: Path, target: str) -> None:
    (machine.root / "etc/ours").mkdir(parents=True)
    (machine.root / "etc/ours/inside").touch()
    (machine.root / "link").symlink_to(target)
    root = Root(str(machine.root))

    folder = root.folder("/link")

    try:
        assert os.listdir(folder) == ["inside"]
    finally:
        os.close(folder)
        root.close()


def test_links_in_a_circle_end(machine: Machine) -> None:
    (machine.root / HOME / ".cache").symlink_to(".cache")

    assert machine.look() == {}


def test_a_lock_that_is_a_link_a_pipe_or_a_folder_is_none(machine: Machine) -> None:
    folder = machine.root / HOME / ".aiter/jit/build"
    folder.mkdir(parents=True)
    (folder / "lock_a").symlink_to("/etc/passwd")
    os.mkfifo(folder / "lock_b")
    (folder / "lock_c").mkdir()

    assert machine.look() == {}


def test_ten_thousand_resting_files_hide_no_lock(machine: Machine) -> None:
    folder = machine.root / os.path.dirname(BLOB)
    folder.mkdir(parents=True)
    for number in range(10_000):
        os.close(os.open(folder / f"{number}.lock", os.O_CREAT, 0o644))
    os.utime(folder)
    machine.granted(flock_line(200, folder / "4711.lock"))

    assert machine.held("download") == (1.0, None)


def test_of_very_many_locks_the_oldest_are_told(machine: Machine) -> None:
    for number in range(MOST_FOUND + 1):
        machine.file(f"{HOME}/.aiter/jit/build/lock_{number}", at=500 - number)

    request = {"ask": "locks", "pid": SERVER, "ticks": round(STARTED * CLOCK_TICKS), "user": 0, "environ": {}}
    found = answer(str(machine.tree.root), {**request, "environ": {"HOME": f"/{HOME}"}, "root": None}, BOOT)

    assert len(found["locks"]) == MOST_FOUND
    assert found["locks"][0]["modified"] == BOOT + 500 - MOST_FOUND
