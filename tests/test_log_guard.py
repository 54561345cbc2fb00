"""Logs on mounts that may stop answering, and how such a mount is known without touching it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallwatch.config import Config
from stallwatch.frameworks import load_frameworks
from stallwatch.model import LogPlace, Observation, ProcessId, Reading, Scene, Server
from stallwatch.sources import Host, Moment, untrusted_paths
from stallwatch.sources.logs import guard as log_guard
from stallwatch.sources.logs import tail as log_tail
from stallwatch.sources.logs.collector import Logs
from stallwatch.sources.logs.guard import MOST_WAITING, GuardedTail, Guards
from stallwatch.sources.logs.mounts import LOOK_SECONDS, FarFile, Mounts
from stallwatch.sources.logs.tail import LogTail

MUCH = 1 << 30
TABLE = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw - proc proc rw
30 22 0:40 / /mnt/far\\040away rw shared:2 - nfs4 server:/x rw,vers=4.2
31 22 0:41 / {far} rw - {kind} host:/y rw
32 31 0:42 / {far}/near rw - tmpfs tmpfs rw
33 22 0:43 / /home rw - autofs systemd-1 rw
34 33 254:1 / /home rw - ext4 /dev/vdb rw
"""


class Node:
    """A fake /proc whose table of mounts says that the folder `far` is one of another machine."""

    def __init__(self, folder: Path) -> None:
        self.far, self.near, self.proc = folder / "far", folder / "near", folder / "proc"
        for path in (self.far / "near", self.near, self.proc / "self", self.proc / "7" / "fdinfo"):
            path.mkdir(parents=True)
        self.mount(TABLE)
        self.mounts = Mounts(str(self.proc))
        self.mounts.refresh(0.0)

    def mount(self, table: str, kind: str = "nfs4") -> None:
        for process in ("self", "7"):
            (self.proc / process / "mountinfo").write_text(table.format(far=self.far, kind=kind))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# --- mounts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("{far}/x.log", "0:41"),
        ("{far}", "0:41"),
        ("{far}/near/x.log", "0:41"),  # local, but the way there is not
        ("{far}/near/../x.log", "0:41"),
        ("{near}/x.log", None),
        ("{near}/link/x.log", "0:41"),
        ("{near}/round/x.log", None),
        ("{near}/up/x.log", "0:41"),
        ("{far}-not/x.log", None),
        ("/mnt/far away/x.log", "0:40"),
        ("/home/x.log", None),
    ],
)
def test_a_path_is_far_when_it_leads_below_a_mount_of_another_machine(path: str, key: str | None, node: Node) -> None:
    (node.near / "link").symlink_to(node.far)
    (node.near / "round").symlink_to("round")
    (node.near / "up").symlink_to("../far")

    assert node.mounts.far(path.format(far=node.far, near=node.near)) == key


def test_where_a_far_mount_begins_nothing_more_is_touched(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def readlink(path: str) -> str:
        assert not path.startswith(str(node.far))
        raise OSError

    monkeypatch.setattr(os, "readlink", readlink)
    assert node.mounts.far(f"{node.far}/a/b/x.log") == "0:41"


@pytest.mark.parametrize(("mount", "key"), [(22, None), (31, "0:41"), (99, "mount 99")])
def test_the_kernel_tells_the_mount_of_an_open_file(mount: int, key: str | None, node: Node) -> None:
    (node.proc / "7" / "fdinfo" / "1").write_text(f"pos:\t0\nflags:\t01\nmnt_id:\t{mount}\nino:\t7\n")

    assert node.mounts.far(f"{node.proc}/7/fd/1") == key


@pytest.mark.parametrize(("inode", "shown"), [("ino:\t7\n", 7), ("", 0)])
def test_what_the_kernel_tells_of_a_far_file_is_enough_to_know_it(inode: str, shown: int, node: Node) -> None:
    """The inode is shown from Linux 5.14 on."""
    (node.proc / "7" / "fdinfo" / "1").write_text(f"pos:\t0\nflags:\t01\nmnt_id:\t31\n{inode}")

    assert node.mounts.far_file(7, 1) == FarFile("0:41", os.makedev(0, 41), shown)


def test_a_mount_taken_out_of_the_table_is_far_and_a_table_that_is_not_told_is_not(node: Node) -> None:
    """`umount -l`, as is done with mounts that died, leaves the open files where they are."""
    (node.proc / "7" / "fdinfo" / "1").write_text("pos:\t0\nflags:\t01\nmnt_id:\t99\nino:\t7\n")

    assert node.mounts.far_file(7, 1) == FarFile("mount 99", 0, 7)
    (node.proc / "7" / "mountinfo").unlink()
    assert Mounts(str(node.proc)).far_file(7, 1) is None


def test_a_mount_that_came_since_the_last_look_is_not_one_taken_out(node: Node) -> None:
    fdinfo = node.proc / "7" / "fdinfo" / "1"
    fdinfo.write_text("mnt_id:\t22\n")
    assert node.mounts.far_file(7, 1) is None

    node.mount(TABLE + "98 22 254:9 / /new rw - ext4 /dev/vdc rw\n")
    fdinfo.write_text("mnt_id:\t98\n")
    assert node.mounts.far_file(7, 1) is None


def test_a_file_opened_before_the_process_had_mounts_of_its_own_is_on_one_of_ours(node: Node) -> None:
    (node.proc / "7" / "mountinfo").write_text("1 0 0:50 / / rw - overlay o rw\n")
    for number, is_far in ((22, False), (31, True)):
        (node.proc / "7" / "fdinfo" / "1").write_text(f"mnt_id:\t{number}\n")
        assert (node.mounts.far_file(7, 1) is not None) == is_far


@pytest.mark.parametrize(
    ("pattern", "key"),
    [
        ("{far}/*.log", "0:41"),
        ("{far}", "0:41"),
        ("{far}-?/x.log", "{far}-?/x.log"),  # a link may lead there
        ("/*/*.log", "/*/*.log"),
        ("{near}/*.log", None),
        ("{near}", None),
    ],
)
def test_a_pattern_is_far_where_a_part_of_it_may_lead(pattern: str, key: str | None, node: Node) -> None:
    names = {"far": node.far, "near": node.near}
    found = node.mounts.far_around(pattern.format(**names))

    assert found == (key and key.format(**names))
    node.mount("22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    node.mounts.refresh(LOOK_SECONDS)
    assert node.mounts.far_around(pattern.format(**names)) is None


def test_a_path_in_a_container_goes_by_its_own_mounts(node: Node) -> None:
    (node.proc / "7" / "root").mkdir()
    (node.proc / "7" / "mountinfo").write_text("1 0 0:50 / / rw - overlay o rw\n2 1 0:51 / /logs rw - nfs s:/ rw\n")

    assert node.mounts.far(f"{node.proc}/7/root/logs/x.log") == "0:51"
    assert node.mounts.far(f"{node.proc}/7/root/var/x.log") is None


def test_a_mount_that_comes_later_is_seen(node: Node) -> None:
    node.mount("22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    mounts = Mounts(str(node.proc))
    mounts.refresh(0.0)
    assert mounts.far(f"{node.far}/x") is None

    node.mount(TABLE)
    mounts.refresh(LOOK_SECONDS / 2)
    assert mounts.far(f"{node.far}/x") is None
    mounts.refresh(LOOK_SECONDS)
    assert mounts.far(f"{node.far}/x") == "0:41"


@pytest.mark.parametrize("table", ["", "rubbish\n\n - \n1 2 3 4 5\n", "x y z / / rw - nfs\n", "\xff\n"])
def test_a_table_that_says_nothing_makes_nothing_far(table: str, node: Node) -> None:
    node.mount(table)
    mounts = Mounts(str(node.proc))
    mounts.refresh(0.0)

    assert mounts.far("relative") is None
    assert mounts.far(f"{node.proc}/7/fd/1") is None
    assert Mounts("/nowhere").far("/x") is None


# --- one far log -------------------------------------------------------------------------------------------------


class Far:
    """A far log whose mount can be made to hang; time passes when it is told to."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.path = 100.0, node.far / "x.log"
        self.answers = threading.Event()
        self.answers.set()
        self.guards = Guards(node.mounts, deadline_seconds=2.0, turn_seconds=30.0, monotonic=lambda: self.at)
        self.parts = [b""]
        self.path.write_bytes(b"first\n")
        self.tail = self.guards.tail(str(self.path), None)
        self.tail.boundary = lambda: self.parts.append(b"")
        whole = log_guard._read_all

        def blocked(tail: LogTail, *how: object) -> object:
            assert self.answers.wait(60)
            return whole(tail, *how)  # type: ignore[arg-type]

        monkeypatch.setattr(log_guard, "_read_all", blocked)

    def hang(self) -> None:
        self.answers.clear()
        self.guards.turn = 0.0

    def answer(self) -> None:
        """The thread is let go, and has come back when this returns."""
        self.guards.turn = 30.0
        assert isinstance(self.tail, GuardedTail)
        self.answers.set()
        if self.tail._job is not None:
            assert self.tail._job.done.wait(30)

    def read(self) -> bytes:
        chunks = list(self.tail.read(MUCH))
        self.parts[-1] += b"".join(chunks)
        return b"".join(chunks)


@pytest.fixture
def far(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    far = Far(node, monkeypatch)
    yield far
    far.answer()


def test_a_far_log_is_read_like_any_other(far: Far) -> None:
    assert far.read() == b"first\n"
    with far.path.open("ab") as file:
        file.write(b"second\n")
    far.path.rename(far.path.with_suffix(".1"))
    far.path.write_bytes(b"new\n")
    far.parts.clear()
    far.parts.append(b"")
    list(map(len, [far.read()]))

    assert far.tail.far_mount == "0:41"
    assert (far.tail.rotations, far.tail.bytes_read, far.tail.offset, far.tail.reason) == (1, 17, 4, None)
    assert far.tail.identity == (far.path.stat().st_dev, far.path.stat().st_ino)
    assert far.tail.mark(4, lambda *parts: repr(parts)) == repr(("mark", b"new\n", b"new\n"))


@pytest.mark.parametrize("kind", ["fuse.sshfs", "fuse", "virtiofs"])
def test_a_log_on_fuse_is_not_kept_open_and_read_on_where_it_was(kind: str, node: Node, far: Far) -> None:
    """Closing it would wait for a program that may be dead: in every child that we start, too."""
    node.mount(TABLE, kind)
    node.mounts.refresh(LOOK_SECONDS)
    before = set(os.listdir("/proc/self/fd"))
    status = far.path.stat()

    assert far.read() == b"first\n"
    assert set(os.listdir("/proc/self/fd")) == before
    assert far.tail.identity == (status.st_dev, status.st_ino)
    assert far.tail.mark(6, lambda *parts: repr(parts)) == repr(("mark", b"first\n", b"first\n"))
    with far.path.open("ab") as file:
        file.write(b"second\n")
    assert [far.read(), far.read()] == [b"second\n", b""]
    assert (far.tail.rotations, far.tail.truncations, far.tail.errors, far.tail.offset) == (0, 0, 0, 13)

    far.path.rename(far.path.with_suffix(".1"))
    assert (far.read(), far.tail.reason) == (b"", "vanished")
    far.path.write_bytes(b"new\n")
    assert [far.read(), far.read()] == [b"new\n", b""]
    assert (far.tail.rotations, far.tail.bytes_read, far.tail.reason) == (1, 17, None)
    assert far.parts[-1] == b"new\n"
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_log_on_fuse_that_was_moved_aside_is_read_to_its_end_under_its_new_name(node: Node, far: Far) -> None:
    node.mount(TABLE, "fuse.sshfs")
    node.mounts.refresh(LOOK_SECONDS)
    before = set(os.listdir("/proc/self/fd"))
    far.read()
    with far.path.open("ab") as file:
        file.write(b"last\n")
    far.path.rename(f"{far.path}.1")
    far.path.write_bytes(b"new\n")

    read = b"".join(far.read() for _ in range(3))

    assert read == b"last\nnew\n"
    assert len(far.parts) == 2
    assert (far.tail.rotations, far.tail.truncations, far.tail.reason) == (1, 0, None)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_a_far_log_that_was_copied_and_cut_is_read_from_its_copy(kind: str, node: Node, far: Far) -> None:
    node.mount(TABLE, kind)
    node.mounts.refresh(LOOK_SECONDS)
    far.read()
    before = set(os.listdir("/proc/self/fd"))
    for number in (1, 2):
        with far.path.open("ab") as file:
            file.write(b"%d before\n" % number)
        shutil.copy(far.path, f"{far.path}.1")
        far.path.write_bytes(b"%d after\n" % number)
        assert far.read() == b"%d before\n%d after\n" % (number, number)

    assert (far.tail.rotations, far.tail.truncations, far.tail.reason) == (0, 2, None)
    assert (far.tail.bytes_read, far.tail.offset, far.tail.backlog) == (40, 8, 0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_much_of_a_copy_on_fuse_is_read_in_bounded_turns_though_nothing_stays_open(node: Node, far: Far) -> None:
    node.mount(TABLE, "fuse.sshfs")
    node.mounts.refresh(LOOK_SECONDS)
    far.read()
    with far.path.open("ab") as file:
        file.write(b"a" * 100)
    shutil.copy(far.path, f"{far.path}.1")
    far.path.write_bytes(b"new\n")

    steps = [b"".join(far.tail.read(40)) for _ in range(4)]

    assert steps == [b"a" * 40, b"a" * 40, b"a" * 20 + b"new\n", b""]
    assert (far.tail.rotations, far.tail.truncations) == (0, 1)


def test_a_log_on_fuse_that_was_cut_without_a_copy_is_read_anew(node: Node, far: Far) -> None:
    node.mount(TABLE, "fuse.sshfs")
    node.mounts.refresh(LOOK_SECONDS)
    far.read()
    far.path.with_name("x.log.1").write_bytes(b"another\n" * 9)
    far.path.write_bytes(b"new\n")

    assert far.read() == b"new\n"
    assert far.parts == [b"first\n", b"new\n"]


def paths_looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that are looked at from here on: where a stream leads, and what is beside."""
    looked, lstat, opened = list[str](), os.lstat, untrusted_paths.open_file

    def look(path: str) -> os.stat_result:
        looked.append(path)
        return lstat(path)

    def look_into(path: str, follow_last: bool = False) -> int:
        looked.append(path)
        return opened(path, follow_last)

    monkeypatch.setattr(os, "lstat", look)
    monkeypatch.setattr(log_tail, "open_file", look_into)
    return looked


@pytest.mark.parametrize("is_far", [False, True])
def test_beside_a_near_log_nothing_is_looked_at_where_that_may_wait(
    is_far: bool, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single file may be a mount of its own, and any name may be one of a copy."""
    path = node.near / "x.log"
    path.write_bytes(b"first\n")
    if is_far:
        node.mount(f"{TABLE}40 22 0:60 / {path}.2 rw - nfs4 server:/z rw\n")
        node.mounts.refresh(LOOK_SECONDS)
    tail = Guards(node.mounts).tail(str(path), os.geteuid())
    assert b"".join(tail.read(MUCH)) == b"first\n"
    with path.open("ab") as file:
        file.write(b"before\n")
    shutil.copy(path, f"{path}.1")
    path.write_bytes(b"new\n")
    looked = paths_looked_at(monkeypatch)

    assert b"".join(tail.read(MUCH)) == (b"new\n" if is_far else b"before\nnew\n")
    assert (f"{path}.1" in looked) is not is_far


@pytest.mark.parametrize("is_far", [False, True])
def test_where_a_stream_leads_is_not_looked_at_when_that_is_far_here(
    is_far: bool, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is one of where the process runs; here it may lead to a mount that does not answer."""
    path, place = node.near / "x.log", node.proc / "7/fd/1"
    path.write_bytes(b"first\n")
    place.parent.mkdir()
    place.symlink_to(path)
    (node.proc / "7/fdinfo/1").write_text("mnt_id:\t22\n")
    tail = Guards(node.mounts).tail(str(place), None)
    assert (b"".join(tail.read(MUCH)), tail.far_mount) == (b"first\n", None)
    with path.open("ab") as file:
        file.write(b"before\n")
    shutil.copy(path, f"{path}.1")
    path.write_bytes(b"new\n")
    assert tail._file is not None
    tail._file.target = str(node.far / "x.log") if is_far else str(path)
    looked = paths_looked_at(monkeypatch)

    assert b"".join(tail.read(MUCH)) == (b"new\n" if is_far else b"before\nnew\n")
    assert (str(node.far / "x.log") in looked, str(path) in looked) == (False, not is_far)


@pytest.mark.parametrize("mount", ["/logs", "/logs/x.log.2", ""])
def test_where_a_stream_leads_is_not_looked_at_when_that_is_far_where_its_process_runs(
    mount: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mount of ours is far; a container may have one of its own, also of a single file."""
    is_far = bool(mount)
    path, place = node.proc / "7/root/logs/x.log", node.proc / "7/fd/1"
    for folder in (path.parent, place.parent):
        folder.mkdir(parents=True)
    path.write_bytes(b"first\n")
    place.symlink_to(path)
    (node.proc / "self/mountinfo").write_text("22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    far = f"2 1 0:51 / {mount} rw - nfs4 s:/ rw\n" if mount else "2 1 0:51 / /logs rw - ext4 /dev/vdb rw\n"
    (node.proc / "7/mountinfo").write_text(f"1 0 0:50 / / rw - overlay o rw\n{far}")
    (node.proc / "7/fdinfo/1").write_text("mnt_id:\t1\n")
    node.mounts.refresh(LOOK_SECONDS)
    tail = Guards(node.mounts).tail(str(place), None)
    assert (b"".join(tail.read(MUCH)), tail.far_mount) == (b"first\n", None)
    with path.open("ab") as file:
        file.write(b"before\n")
    shutil.copy(path, f"{path}.1")
    path.write_bytes(b"new\n")
    assert tail._file is not None
    tail._file.target = "/logs/x.log"
    looked = paths_looked_at(monkeypatch)

    assert b"".join(tail.read(MUCH)) == (b"new\n" if is_far else b"before\nnew\n")
    assert (str(path) in looked) is not is_far


def test_an_empty_log_on_fuse_is_no_rotation_of_itself(node: Node, far: Far) -> None:
    node.mount(TABLE, "fuse.sshfs")
    node.mounts.refresh(LOOK_SECONDS)
    far.path.write_bytes(b"")

    assert [far.read(), far.read()] == [b"", b""]
    far.path.write_bytes(b"first\n")
    assert (far.read(), far.tail.rotations) == (b"first\n", 0)


@pytest.mark.parametrize(("kind", "is_kept"), [("nfs4", True), ("cifs", True), ("lustre", True), ("fuse.s3fs", False)])
def test_on_which_mounts_a_file_may_be_kept_open(kind: str, is_kept: bool, node: Node) -> None:
    node.mount(TABLE, kind)
    node.mounts.refresh(LOOK_SECONDS)

    assert node.mounts.may_keep("0:41") is is_kept
    assert node.mounts.may_keep("mount 99") is False


def test_a_near_log_has_no_thread(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.near / "x.log").write_bytes(b"first\n")
    monkeypatch.setattr(threading, "Thread", None)
    tail = Guards(node.mounts).tail(str(node.near / "x.log"), None)

    assert (b"".join(tail.read(MUCH)), tail.far_mount) == (b"first\n", None)


def test_a_mount_that_stops_answering_is_late_after_the_deadline_and_loses_nothing(far: Far) -> None:
    far.read()
    far.hang()
    with far.path.open("ab") as file:
        file.write(b"second\n")

    assert (far.read(), far.tail.reason) == (b"", None)  # not late yet
    far.at += 2
    for _ in range(5):
        assert (far.read(), far.tail.reason) == (b"", "timeout")
    assert (far.tail.errors, far.tail.bytes_read, far.guards.waiting) == (1, 6, 1)

    far.answer()
    assert (far.read(), far.tail.reason) == (b"second\n", None)
    assert (far.tail.errors, far.guards.waiting) == (1, 0)


def test_a_mount_taken_away_while_it_is_waited_for_is_late_all_the_same(node: Node, far: Far) -> None:
    far.read()
    far.hang()
    far.read()
    node.mount(TABLE.replace("0:41", "0:49"))
    node.mounts.refresh(LOOK_SECONDS)
    assert node.mounts.far(str(far.path)) == "0:49"

    assert (far.read(), far.tail.reason) == (b"", None)
    far.at += 2
    assert (far.read(), far.tail.reason) == (b"", "timeout")


def test_a_log_that_was_never_reached_is_late_at_once(far: Far) -> None:
    far.hang()

    assert (far.read(), far.tail.reason, far.tail.identity) == (b"", "timeout", None)
    far.answer()
    assert (far.read(), far.tail.reason) == (b"first\n", None)


def test_all_logs_of_a_dead_mount_share_one_thread(far: Far) -> None:
    far.hang()
    others = [far.guards.tail(f"{far.path}{number}", None) for number in range(50)]
    before = threading.active_count()
    for tail in (far.tail, *others):
        assert list(tail.read(MUCH)) == []
        assert tail.reason == "timeout"

    assert far.guards.waiting == 1
    assert threading.active_count() <= before + 1


def test_no_more_mounts_than_allowed_are_waited_for(far: Far) -> None:
    far.hang()
    started = [far.guards.start(f"1:{number}", far.answers.wait) for number in range(MOST_WAITING + 5)]

    assert sum(job is not None for job in started) == MOST_WAITING
    assert far.guards.waiting == MOST_WAITING
    assert (far.read(), far.tail.reason) == (b"", "timeout")
    far.answers.set()
    for job in started:
        assert job is None or job.done.wait(30)
    assert far.guards.waiting == 0


def test_closing_a_log_that_hangs_gives_its_descriptor_back_once_it_answers(far: Far) -> None:
    far.read()
    assert isinstance(far.tail, GuardedTail)
    assert far.tail._far is not None
    assert far.tail._far._file is not None
    descriptor = far.tail._far._file.descriptor
    far.hang()
    far.read()

    far.tail.close()
    os.fstat(descriptor)
    far.answer()

    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_a_failure_in_the_thread_does_not_hold_its_mount(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    job = far.guards.start("0:1", lambda: 1 // 0)

    assert job is not None
    assert job.done.wait(30)
    assert far.guards.waiting == 0


def test_a_mount_for_which_no_thread_can_be_started_is_late_until_one_can(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of processes counts threads, too."""
    far.read()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        assert (far.read(), far.tail.reason, far.guards.waiting) == (b"", "timeout", 0)
    with far.path.open("ab") as log:
        log.write(b"second\n")

    assert (far.read(), far.tail.reason) == (b"second\n", None)


@pytest.mark.parametrize(("kind", "apart"), [("fuse.sshfs", [True, True]), ("nfs4", [False, False])])
def test_what_is_open_on_fuse_during_a_read_no_child_gets(
    kind: str, apart: list[bool], node: Node, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.mount(TABLE, kind)
    node.mounts.refresh(2 * LOOK_SECONDS)
    asked: list[bool] = []
    begin = far.guards._begin

    def beginning(*how: object) -> object:
        job = begin(*how)  # type: ignore[arg-type]
        asked.append(job is not None and job.is_apart)
        return job

    monkeypatch.setattr(far.guards, "_begin", beginning)
    far.read()
    far.read()

    assert far.parts == [b"first\n"]
    assert asked == apart


def test_a_file_that_was_kept_open_on_a_mount_that_goes_is_closed_where_it_was_opened(node: Node, far: Far) -> None:
    far.read()
    assert isinstance(far.tail, GuardedTail)
    assert far.tail._far is not None
    assert far.tail._far._file is not None
    descriptor = far.tail._far._file.descriptor
    node.mount(TABLE, "fuse.sshfs")
    node.mounts.refresh(2 * LOOK_SECONDS)

    assert (far.read(), far.tail.reason) == (b"", None)

    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


# --- in the source -----------------------------------------------------------------------------------------------


def test_a_dead_mount_stops_its_own_log_only_and_says_so(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, whole = threading.Event(), log_guard._read_all

    def blocked(tail: LogTail, *how: object) -> object:
        assert answers.wait(60)
        return whole(tail, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(log_guard, "_read_all", blocked)
    paths = {"far": node.far / "x.log", "near": node.near / "x.log"}
    for path in paths.values():
        path.write_text("x\n")
    places = tuple(LogPlace(name, str(path), owner=os.geteuid()) for name, path in paths.items())
    source = Logs(Host(Config(), load_frameworks(), proc=node.proc))
    source._guards._monotonic = lambda: now
    answers.set()
    now = 0.0
    server = Server("one", "sglang", "server", ProcessId(7, 100), 0.0, (), logs=places)

    def read(at: float) -> dict[str, float | str | None]:
        nonlocal now
        now = at
        seen: list[Observation] = list(source.read(Scene((server,)), Moment(at, at)))
        values = [one for one in seen if isinstance(one, Reading) and one.signal.name == "log_bytes_total"]
        return {one.labels[1]: one.reason if one.value is None else one.value for one in values}

    source._guards.turn = 30.0
    assert read(1) == {"far": 2.0, "near": 2.0}
    for path in paths.values():
        with path.open("a") as file:
            file.write("y\n")
    answers.clear()
    source._guards.turn = 0.0
    assert read(2) == {"far": 2.0, "near": 4.0}
    assert read(2 + source._guards.deadline) == {"far": "timeout", "near": 4.0}
    assert source.again_seconds is None

    answers.set()
    (log,) = (log for log in source._servers["one"].logs.values() if log.place.name == "far")
    assert isinstance(log.tail, GuardedTail)
    assert log.tail._job is not None
    assert log.tail._job.done.wait(30)
    assert read(9) == {"far": 4.0, "near": 4.0}
    source.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_far_log_that_did_not_answer_in_its_turn_does_not_rest(
    is_late: bool, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread brings is told in the next turn, and not once the server's logs have rested."""
    answers, whole = threading.Event(), log_guard._read_all

    def blocked(tail: LogTail, *how: object) -> object:
        assert answers.wait(60)
        return whole(tail, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(log_guard, "_read_all", blocked)
    path = node.far / "x.log"
    path.write_text("x\n")
    status = path.stat()  # known, so that nothing else is asked of the mount
    place = LogPlace("far", str(path), None, status.st_dev, status.st_ino, os.geteuid())
    server = Server("one", "sglang", "server", ProcessId(7, 100), 0.0, (), logs=(place,))
    scene = Scene((server,), ready=frozenset(("one",)))
    source = Logs(Host(Config(), load_frameworks(), proc=node.proc))

    def read(at: float) -> float | None:
        seen = list(source.read(scene, Moment(at, at)))
        return next(one.value for one in seen if isinstance(one, Reading) and one.signal.name == "log_bytes_total")

    answers.set()
    source._guards.turn = 30.0
    assert [read(at) for at in (1, 20, 40)] == [2.0] * 3
    with path.open("a") as file:
        file.write("y\n")
    if is_late:
        answers.clear()
        source._guards.turn = 0.0
        assert read(60) == 2.0
        job = source._servers["one"].logs["far"].tail._job  # type: ignore[union-attr]
        answers.set()
        assert job is not None
        assert job.done.wait(30)
    assert read(61) == 4.0
    with path.open("a") as file:
        file.write("z\n")
    assert read(62) == 4.0
    source.close()
