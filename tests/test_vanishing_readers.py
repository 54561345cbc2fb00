"""As tests/test_vanishing.py, for who reads by himself: node, locks, cards, tokens, the table of mounts, the helpers.

What may pass (no descriptor, no memory, an I/O error) tells nothing: nobody is gone for it, a lock is not free, memory
is no stranger's, a mount not local.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from failing_reads import Reads
from gpu_node import GIB, GpuNode, card
from gpu_node import answer as says
from proc_tree import ProcTree
from stallwatch.config import Config
from stallwatch.descriptors import Room
from stallwatch.model import HealthTarget, Reading, Scene
from stallwatch.sources import Host, Moment
from stallwatch.sources.blocking_child import answer as command_line
from stallwatch.sources.locks_child import answer as lock_files
from stallwatch.sources.logs.mounts import Mounts
from stallwatch.sources.members import Member
from stallwatch.sources.node import Node
from stallwatch.sources.process_table import Known
from stallwatch.sources.procfs import CLOCK_TICKS, ProcFs
from stallwatch.sources.shm_child import look as segments_unheld
from test_endpoints import Peer, answer, look, scene_of, source, values
from test_locks import BATON, BLOB, SERVER, flock_line
from test_locks import Machine as LockMachine
from test_node import MEMINFO
from test_shm_child import Machine as ShmMachine
from test_vanishing import UNREADABLE, VANISHED

ERRORS = pytest.mark.parametrize("error", [*VANISHED, *UNREADABLE], ids=errno.errorcode.get)
Found = dict[tuple[str, ...], float | str | None]
FAILED: Found = {}
"""Nothing at all was had, and the collector said so."""


def each(reads: Reads, work: Callable[[], Any], error: int) -> Iterator[tuple[int, Any]]:
    """What `work` comes to when its n-th read fails, for every n; an OSError is as the poller takes it."""

    def attempt() -> Any:
        try:
            return work()
        except OSError:
            return FAILED

    reads.during(attempt)
    n, total = 0, reads.seen
    while n < total:
        found = reads.during(attempt, n, error)
        total = max(total, reads.seen)
        yield n, found
        n += 1
    assert n > 1


def told(readings: list[Any]) -> Found:
    found = [item for item in readings if isinstance(item, Reading)]
    return {(r.signal.name, *r.labels): r.reason if r.value is None else r.value for r in found}


def check_no_lie(found: Found, right: Found, but: tuple[str, ...] = ()) -> None:
    for key, value in found.items():
        if isinstance(value, float | int) and key[0] not in but:
            assert value == right[key], key


# --- node, and locks ------------------------------------------------------------------------------------------


class NodeMachine:
    """A server that waits for two locks, one by its being there and one that the kernel keeps; both are held."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.of = LockMachine(folder)
        self.proc = self.of.tree.root
        (folder / "nothing/dev/shm").mkdir(parents=True)
        (self.proc / "meminfo").write_text(MEMINFO)
        (self.proc / "vmstat").write_text("oom_kill 3\n")
        self.node = Node(Host(Config(), (), self.proc, folder / "nothing"), self.of.locks)
        self.of.process(200, started=1990.0)
        content = "7200\nhost\n" if kind == "named" else ""
        if kind == "named":
            self.of.tree.change(200, inner_pid=7200)
        baton = self.of.file(BATON, at=2000, content=content)
        self.of.tree.redirect(200, 3, baton)
        self.of.granted(flock_line(200, self.of.file(BLOB, at=2000)))
        if kind == "given up":  # who gave up rights shows as another's in the listing: the status says who he is
            with (self.proc / "200/status").open("a") as status:
                status.write("Uid:\t4242\t4242\t4242\t4242\n")
            asked = self.of.looks.ask
            self.of.looks.ask = lambda request: _of_user(asked(request), 4242)  # type: ignore[method-assign]

    def look(self) -> Found:
        self.of.now += 10.0
        self.of.looks.now += 10.0
        now = Moment(self.of.now, self.of.looks.now)
        found = told(list(self.node.read(Scene((self.of.server,)), now)))
        return {
            key: value
            for key, value in found.items()
            if key[0] not in ("server_lock_age_seconds", "node_shm_used_bytes")
        }


def _of_user(answer: Mapping[str, Any], user: int) -> Mapping[str, Any]:
    return {**answer, "locks": [{**lock, "user": user} for lock in answer.get("locks", ())]} if answer else answer


@ERRORS
@pytest.mark.parametrize("kind", ["open", "named", "given up"])
def test_no_lock_is_free_and_no_number_wrong_because_a_read_of_the_node_failed(
    kind: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = NodeMachine(tmp_path, kind)
    machine.look()
    right = machine.look()
    assert right["server_lock_held", "vllm-8000", "build"] == 1.0
    assert right["server_lock_held", "vllm-8000", "download"] == 1.0
    reads = Reads(tmp_path, monkeypatch)

    for n, found in each(reads, machine.look, error):
        holder = f"{machine.proc}/200"
        ended = error in VANISHED and f"{reads.hit}/".startswith(f"{holder}/")  # then it holds nothing
        ended = ended or (error in VANISHED and reads.hit.endswith("/locks"))  # a kernel without that table
        check_no_lie(found, right, but=("server_lock_held",) if ended else ())
        assert found or reads.hit in (f"{machine.proc}", f"{machine.proc}/meminfo") or error in UNREADABLE, reads.hit
        machine.of.now += 60.0  # as after a look that hung
        machine.look()
        assert machine.look() == right, f"behind read {n}: {reads.hit}"


# --- the PID of another namespace ------------------------------------------------------------------------------


@ERRORS
def test_a_pid_in_a_namespace_of_its_own_that_could_not_be_read_is_asked_for_again(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = ProcTree(tmp_path / "proc")
    tree.add(100, "worker", inner_pid=7)
    stat = ProcFs(tree.root).stat(100)
    assert stat is not None
    reads = Reads(tree.root, monkeypatch)

    for n in range(2):  # its open, and its read
        member = Member(ProcFs(tree.root), Known(stat, 0.0, 0), "worker", "worker", 0.0, Room(2))
        assert reads.during(partial(getattr, member, "inner_pid"), n, error) == 100
        assert reads.hit
        assert member.inner_pid == 7


# --- cards ----------------------------------------------------------------------------------------------------


@ERRORS
def test_no_memory_of_a_card_is_a_strangers_or_nobodys_because_a_read_failed(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank, what it started, and what that started; a stranger; one that is long gone.

    That one alone is hidden (EACCES) no kernel does: it hides all others or none, and then the first thread, too.
    """
    node = GpuNode(tmp_path)
    node.serve("vllm-8000", {"TP0": 100, "TP1": 101})
    node.tree.add(150, "helper", ppid=100)
    node.tree.add(151, "helper", ppid=150)
    node.tree.add(500, "train.py", ppid=1)
    rows = [(100, 30 * GIB), (151, 5 * GIB), (500, 7 * GIB), (999, 11 * GIB)]
    cards = [
        card(number, listed, values={**card().values, "memory_used": used * GIB})
        for number, (listed, used) in enumerate([(rows, 53), ([(101, GIB)], 1), ([], 9)])
    ]

    def looked() -> Found:
        node.look(says(*cards), 30.0)
        return told(list(node.found))

    for _ in range(3):
        right = looked()
    assert right["gpu_process_memory_bytes", "GPU-0", "vllm-8000", "TP0"] == 35 * GIB
    assert right["gpu_process_memory_bytes", "GPU-0", "", ""] == 7 * GIB
    assert right["gpu_unowned_memory_bytes", "GPU-0"] == 11 * GIB
    assert right["gpu_unowned_memory_bytes", "GPU-2"] == 8 * GIB
    reads = Reads(node.tree.root, monkeypatch)

    for n, found in each(reads, looked, error):
        assert found is not FAILED, reads.hit
        is_gone = error in (*VANISHED, errno.EACCES)
        ended = is_gone and any(f"/proc/{pid}/" in f"{reads.hit}/" for pid in (100, 101, 150, 151, 500))
        if not (is_gone and "/proc/2/" in reads.hit):  # then we are blind, see tests/test_gpu_owners.py
            check_no_lie(found, right, but=("gpu_process_memory_bytes",) if ended else ())
        looked()
        assert looked() == right, f"behind read {n}: {reads.hit}"


@ERRORS
def test_no_rank_of_a_container_is_a_stranger_because_a_read_failed(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver gives PIDs of their namespace, and nobody in ours has them."""
    node = GpuNode(tmp_path)
    node.serve("vllm-8000", {"TP0": 100, "TP1": 101})
    for pid in (100, 101):
        node.tree.change(pid, inner_pid=pid + 7000)

    def looked() -> Found:
        node.look(says(card(0, [(7100, GIB), (7101, 2 * GIB)])), 30.0)
        return told(list(node.found))

    right = looked()
    assert right["gpu_process_memory_bytes", "GPU-0", "vllm-8000", "TP1"] == 2 * GIB
    reads = Reads(node.tree.root, monkeypatch)

    for _, found in each(reads, looked, error):
        ended = error in VANISHED and any(f"/proc/{pid}/" in reads.hit for pid in (100, 101))
        check_no_lie(found, right, but=("gpu_process_memory_bytes",) if ended else ())
        assert ended or ("gpu_process_memory_bytes", "GPU-0", "", "") not in found or "/proc/2/" in reads.hit


# --- endpoints ------------------------------------------------------------------------------------------------


@ERRORS
def test_no_request_leaves_without_its_token_because_a_read_failed(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("abc\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    peer = Peer(lambda sock, _: sock.sendall(answer(200)))
    try:
        target = HealthTarget(f"http://127.0.0.1:{peer.port}/", bearer_file=str(tmp_path / "token"))
        scene = scene_of({"vllm-8000": peer}, health=target, metrics_enabled=False)
        reads = Reads(tmp_path, monkeypatch)
        for _, found in each(reads, lambda: look(source(proc=tmp_path / "proc"), scene), error):
            assert values(found)["health_status", "health"] in (200, "error", "permission")
        assert values(look(source(proc=tmp_path / "proc"), scene))["health_status", "health"] == 200
    finally:
        peer.close()

    assert peer.asked
    assert all(b"Authorization: Bearer abc\r\n" in request for request in peer.asked)


# --- the table of mounts --------------------------------------------------------------------------------------

TABLE = "22 1 254:0 / / rw - ext4 /dev/vda rw\n31 22 0:41 / /far rw - nfs4 server:/x rw\n"


def mounts(proc: Path) -> Mounts:
    for pid in ("self", "100"):
        (proc / pid / "fdinfo").mkdir(parents=True, exist_ok=True)
        (proc / pid / "mountinfo").write_text(TABLE)
    (proc / "100/fdinfo/1").write_text("pos:\t0\nmnt_id:\t31\nino:\t7\n")
    (proc / "100/fdinfo/2").write_text("pos:\t0\nmnt_id:\t22\nino:\t8\n")
    return Mounts(str(proc))


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("looked", [0, 1], ids=["first", "later"])
def test_no_dead_mount_is_taken_for_a_local_one_because_a_read_failed(
    looked: int, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next who looks there waits for ever."""
    at = [1000.0]
    reads, seen = Reads(tmp_path, monkeypatch), mounts(tmp_path)
    known = [seen]

    def asked() -> list[bool]:
        known[0].refresh(at[0])
        paths = ("/far/x", f"{tmp_path}/100/root/far/x", f"{tmp_path}/100/fd/1")
        return [known[0].far(path) is not None for path in paths]

    n, total = 0, 1
    while n < total:
        known[0] = mounts(tmp_path)
        for _ in range(looked):
            at[0] += 100.0
            asked()
        at[0] += 100.0
        assert reads.during(asked, n, error) == [True, True, True], reads.hit
        total = max(total, reads.seen)
        at[0] += 6.0
        assert asked() == [True, True, True]
        assert known[0].far("/near") is None
        assert known[0].far(f"{tmp_path}/100/fd/2") is None
        n += 1
    assert total > 3


# --- helpers --------------------------------------------------------------------------------------------------


@ERRORS
def test_a_helper_reads_a_command_line_whole_or_says_why_not(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = LockMachine(tmp_path)
    machine.process(300, comm="vllm", started=5.0, environ={"SLURM_JOB_ID": "7", "RANK": "3"})

    def asked() -> Mapping[str, Any]:
        return command_line(str(machine.tree.root), "300", 5 * CLOCK_TICKS)

    right = asked()
    assert right["environ"] == {"SLURM_JOB_ID": "7", "RANK": "3"}
    reads = Reads(machine.tree.root, monkeypatch)
    for _, found in each(reads, asked, error):
        without = {**right, "environ": {}}  # which needs a right of its own, and is not there of all
        may_lack = error not in (errno.EMFILE, errno.EIO) and "environ" in reads.hit
        assert found == right or set(found) == {"reason"} or (may_lack and found == without), reads.hit
    assert asked() == right


@ERRORS
def test_a_helper_tells_locks_as_they_are_or_why_not(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = LockMachine(tmp_path)
    machine.file(BATON, at=2000)
    machine.granted(flock_line(200, machine.file(BLOB, at=2000)))
    ticks = machine.tree._specs[SERVER].id.start_ticks
    given = {"ask": "locks", "pid": SERVER, "ticks": ticks, "user": os.getuid(), "root": None}
    request = {**given, "environ": {"HOME": "/home/llm"}}

    def asked() -> dict[str, Any]:
        return lock_files(str(machine.tree.root), json.loads(json.dumps(request)), 1_700_005_000.0)

    right = {lock["kind"]: lock for lock in asked()["locks"]}
    assert right["download"]["holders"] == [200]
    assert not right["build"]["holders"]
    reads = Reads(tmp_path, monkeypatch)
    for _, found in each(reads, asked, error):
        if set(found) == {"reason"}:
            continue
        locks = {lock["kind"]: lock for lock in found["locks"]}
        for kind, lock in right.items():
            if kind in locks:
                unknown = {**lock, "local": False, "layered": False}  # which file system it lies on
                is_free = error in VANISHED and reads.hit.endswith("/locks")  # a kernel without that table
                assert locks[kind] in (lock, unknown) or is_free, reads.hit
            else:
                assert error in VANISHED or kind in found["problems"], reads.hit


@pytest.fixture
def shm() -> Iterator[Path]:
    """Where blocks are counted at once."""
    try:
        made = tempfile.mkdtemp(prefix="stallwatch-test-", dir="/dev/shm")
    except OSError as error:
        pytest.skip(f"no file can be made in /dev/shm: {error.strerror}")
    yield Path(made)
    shutil.rmtree(made)


@ERRORS
def test_a_helper_takes_no_segment_for_left_behind_because_a_read_failed(
    error: int, tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is mapped, one is open, one is nobody's; all by a tree, for what the kernel shows does not fail."""
    shm_machine = ShmMachine(tmp_path, shm)
    held, opened, left = (shm_machine.segment(name) for name in ("held", "opened", "left"))
    status = held.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    folder = shm_machine.fake(100, maps=f"7f00-7f10 rw-s 00000000 {device} {status.st_ino}   /dev/shm/held\n")
    (folder / "fd/3").symlink_to(opened)
    (folder / "fdinfo").mkdir()
    (folder / "fdinfo/3").write_text(f"pos:\t0\nino:\t{opened.stat().st_ino}\n")
    now = left.stat().st_mtime + 100.0

    def asked() -> dict[str, Any]:
        return segments_unheld(str(shm_machine.proc), str(shm_machine.shm), (), now)

    assert set(asked()["unheld"]) == {left.stat().st_ino}
    for root in (shm_machine.proc, shm_machine.shm):
        reads = Reads(root, monkeypatch)
        for _, found in each(reads, asked, error):
            if found is FAILED or "reason" in found:
                continue
            ended = error in VANISHED and f"{reads.hit}/".startswith(f"{folder}/")
            wrong = set(found["unheld"]) - {left.stat().st_ino}
            assert not wrong or ended, reads.hit
        monkeypatch.undo()
