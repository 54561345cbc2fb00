"""Whatever a watched user puts where we read: links, FIFOs, devices, sockets, folders, hard links.

Every place that is read and that somebody we watch may write to is in READERS; each gets every plant in turn.  A
reader that opened a FIFO the wrong way would wait for ever: all run in a thread that is waited for.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from process_node import Node
from stallwatch.model import LogPlace
from stallwatch.sources.cgroup_state import CgroupFiles
from stallwatch.sources.endpoints import read_token
from stallwatch.sources.gpus.kernel_log import open_log
from stallwatch.sources.host_files import HostFiles
from stallwatch.sources.locks_child import Granted, Looker, Root
from stallwatch.sources.logs.earlier import Earlier, moved_aside, read_earlier
from stallwatch.sources.logs.guard import Guards, Questions
from stallwatch.sources.logs.mounts import Mounts
from stallwatch.sources.logs.places import LogPlaces
from stallwatch.sources.logs.tail import LogTail, mark_in
from stallwatch.sources.processes import _pid_in_file
from stallwatch.sources.shm_child import segments
from stallwatch.sources.untrusted_paths import MOST_LINKS, content, matching, names_in, open_file

SECONDS = 20.0
STRANGER = 4321
SECRET = b"424242\nSECRET of another user\n"
HONEST = b"171717\nhonest\n"

T = TypeVar("T")


def within(seconds: float, read: Callable[[], T]) -> T:
    """What `read` returns or raises; AssertionError when it hangs."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(read())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for what was planted"
    if raised:
        raise raised[0]
    return found[0]


class Land:
    """A folder of a user that is watched, and a file of somebody else's that he may not read."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top, self.is_root = tmp_path, os.geteuid() == 0
        self.user = STRANGER if self.is_root else os.geteuid()
        self.folder = tmp_path / "home"
        self.folder.mkdir()
        self.secret = tmp_path / "others" / "server.log"
        self.secret.parent.mkdir()
        self.secret.write_bytes(SECRET)
        self.own(self.folder)
        if not self.is_root:  # we are the watched user then, and the exporter somebody else
            monkeypatch.setattr(os, "geteuid", lambda: self.user + 1)

    def own(self, path: Path) -> None:
        """Give something to the watched user."""
        if self.is_root:
            os.chown(path, self.user, self.user, follow_symlinks=False)

    def link(self, path: Path, target: Path | str) -> None:
        path.symlink_to(target)
        self.own(path)


@pytest.fixture
def land(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Land:
    return Land(tmp_path, monkeypatch)


# --- what is planted -----------------------------------------------------------------------------------------


def link(land: Land, path: Path) -> None:
    land.link(path, land.secret)


def link_of_links(land: Land, path: Path) -> None:
    land.link(path.with_name("next"), land.secret)
    land.link(path, "next")


def link_to_itself(land: Land, path: Path) -> None:
    land.link(path, path)


def link_to_a_device(land: Land, path: Path) -> None:
    land.link(path, "/dev/zero")


def link_to_what_others_wrote_to_the_kernel(land: Land, path: Path) -> None:
    land.link(path, "/proc/self/mem")


def link_to_a_fifo(land: Land, path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    land.link(path, "pipe")


def fifo(land: Land, path: Path) -> None:
    os.mkfifo(path)
    land.own(path)


def unix_socket(land: Land, path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its name may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def folder(land: Land, path: Path) -> None:
    path.mkdir()


def device(land: Land, path: Path) -> None:
    with suppress(PermissionError):  # without the right to make one there is none: then nothing is there
        os.mknod(path, 0o20666, os.makedev(1, 5))


def hard_link(land: Land, path: Path) -> None:
    """The kernel refuses that to users (fs.protected_hardlinks), but need not."""
    if not land.is_root:
        pytest.skip("needs a file of another user, that is: root")
    os.chown(land.secret, STRANGER + 1, STRANGER + 1)
    path.hardlink_to(land.secret)


PLANTS = [
    *(link, link_of_links, link_to_itself, link_to_a_device, link_to_what_others_wrote_to_the_kernel, link_to_a_fifo),
    *(fifo, unix_socket, folder, device, hard_link),
]

# --- who reads -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reader:
    """`read` is given the land and the path where something was planted, and returns what it got out of it."""

    name: str
    read: Callable[[Land, Path], bytes]
    at: str = "server.log"
    may_share: bool = False
    """A user's own file may be led to, and a hard link is as good as the file."""


def followed(land: Land, path: Path) -> bytes:
    tail = LogTail(str(path), owner=land.user)
    try:
        return b"".join(tail.read(1 << 20))
    finally:
        tail.close()


def successor(land: Land, path: Path) -> bytes:
    """The log was rotated: what is planted carries the name of the file that was moved aside."""
    log = path.with_suffix("")
    log.write_bytes(b"")
    land.own(log)
    files = [file for files in moved_aside(str(log), land.user).values() for file in files]
    return b"".join(chunk for file in files for chunk in read_earlier(file))


def exchanged(land: Land, path: Path) -> bytes:
    """It was a file when it was looked at, and is something else when it is opened."""
    honest = path.with_name("was-there")
    honest.write_bytes(HONEST)
    status = honest.stat()
    return b"".join(read_earlier(Earlier(str(path), (status.st_dev, status.st_ino), 0.0)))


def marked(land: Land, path: Path) -> bytes:
    """A file is known by its identity: what is planted has another one, but for the honest one."""
    status = os.lstat(path) if path.exists() or path.is_symlink() else land.secret.lstat()
    identity = (status.st_dev, status.st_ino)
    found = mark_in(str(path), identity, 6, lambda *parts: repr(parts))
    return (found or "").encode()


def pid_file(land: Land, path: Path) -> bytes:
    return str(_pid_in_file(str(path))).encode()


def runtimes_document(land: Land, path: Path) -> bytes:
    """Below the root of another process, the folders of which its own users may change."""
    return HostFiles(land.top).content(str(path.relative_to(land.top)), 100)


def token(land: Land, path: Path) -> bytes:
    """Named by whoever wrote the configuration, and only by him; what it waits for is of interest."""
    return read_token(str(path)).encode()


def lock_record(land: Land, path: Path) -> bytes:
    root = Root(str(land.top))
    try:
        looker = Looker(root, {}, Granted())
        found = looker.find(land.user, {"AITER_JIT_DIR": "/home", "HOME": "/home"}, 0.0)
        return repr([(lock.name, lock.pid, lock.exists) for lock in found]).encode()
    finally:
        root.close()


def passwd(land: Land, path: Path) -> bytes:
    root = Root(str(land.top))
    try:
        return root.text("home", path.name, 100)
    finally:
        root.close()


def kernel_log(land: Land, path: Path) -> bytes:
    open_log(path)
    return b"opened"


def segment(land: Land, path: Path) -> bytes:
    """Only the sizes of files are counted: none is opened."""
    return repr(segments(str(path.parent), 4e9).bytes).encode()


READERS = [
    Reader("followed", followed),
    Reader("successor", successor, "server.log.1"),
    Reader("exchanged", exchanged),
    Reader("marked", marked, may_share=True),
    Reader("pid_file", pid_file, "server.pid", may_share=True),
    Reader("passwd", passwd, may_share=True),
    Reader("runtimes_document", runtimes_document, "config.json", may_share=True),
]
ERRORS = (OSError, ValueError)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_what_is_planted_is_neither_read_nor_waited_for(
    reader: Reader, plant: Callable[[Land, Path], None], land: Land
) -> None:
    path = land.folder / reader.at
    plant(land, path)
    read = b""

    with suppress(*ERRORS):
        read = within(SECONDS, lambda: reader.read(land, path))

    is_shared = reader.may_share and (plant is hard_link or not land.is_root)  # without root it is his own
    if not is_shared:
        assert b"SECRET" not in read
        assert b"424242" not in read


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader.name != "exchanged"], ids=lambda it: it.name)
def test_the_readers_do_read_what_is_honest(reader: Reader, land: Land) -> None:
    path = land.folder / reader.at
    path.write_bytes(HONEST)
    land.own(path)

    assert b"171717" in within(SECONDS, lambda: reader.read(land, path))


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("read", [token, kernel_log, segment, lock_record], ids=lambda read: read.__name__)
def test_what_nobody_we_watch_may_write_to_waits_for_nothing_either(
    read: Callable[[Land, Path], bytes], plant: Callable[[Land, Path], None], land: Land
) -> None:
    path = land.folder / "lock_build"
    plant(land, path)

    with suppress(*ERRORS):
        found = within(SECONDS, lambda: read(land, path))
        assert b"SECRET" not in found
        assert found != b"opened"


# --- folders on the way --------------------------------------------------------------------------------------


def put_aside(land: Land, name: str = "logs") -> Path:
    """A folder of the watched user's that he exchanges for a link to one of somebody else's."""
    place = land.folder / name
    land.link(place, land.secret.parent)
    return place / "server.log"


def test_a_folder_that_is_a_link_of_the_user_leads_to_his_own_files_only(land: Land) -> None:
    path = put_aside(land)
    with pytest.raises(PermissionError):
        open_file(str(path)) if land.is_root else _unowned(land, path)

    land.own(land.secret)
    assert content(str(path), 100) == SECRET


def _unowned(land: Land, path: Path) -> None:
    """Without root there is no file of another user to lead to but root's."""
    elsewhere = land.folder / "etc"
    land.link(elsewhere, "/etc")
    open_file(str(elsewhere / "passwd"))


def test_roots_own_links_are_followed(land: Land) -> None:
    """/var/log may lead to another disk."""
    if not land.is_root:
        pytest.skip("needs root")
    (land.top / "var").symlink_to("others")

    assert content(str(land.top / "var" / "server.log"), 100) == SECRET


def test_the_log_behind_such_a_folder_is_not_read_and_its_reason_is_permission(land: Land) -> None:
    """Also where it is root's, of whom logs are read otherwise."""
    tail = LogTail(str(land.folder / "etc" / "passwd"), owner=land.user)
    land.link(land.folder / "etc", "/etc")

    assert (list(tail.read(100)), tail.reason) == ([], "permission")


def test_a_folder_exchanged_later_ends_the_log(land: Land) -> None:
    honest = land.folder / "logs" / "passwd"
    honest.parent.mkdir()
    honest.write_bytes(HONEST)
    land.own(honest)
    tail = LogTail(str(honest), owner=land.user)
    assert b"".join(tail.read(100)) == HONEST

    honest.parent.rename(land.folder / "aside")
    land.link(honest.parent, "/etc")

    assert (b"".join(tail.read(1000)), b"".join(tail.read(1000)), tail.reason) == (b"", b"", "permission")
    tail.close()


def test_names_of_files_behind_a_users_link_are_not_told(land: Land) -> None:
    """The name of a file is a label."""
    put_aside(land)
    (land.folder / "own").mkdir()
    own = land.folder / "own" / "own.log"
    own.write_bytes(HONEST)
    land.own(own)
    land.link(land.folder / "mine", "own")
    if not land.is_root:
        (land.folder / "logs").unlink()
        land.link(land.folder / "logs", "/etc")
    questions = Questions(Guards(Mounts()))
    patterns = (f"{land.folder}/*/*", f"{land.folder}/logs/*", f"{land.folder}/mine/*")

    found = LogPlaces(100, questions).files([LogPlace("p", pattern, owner=land.user) for pattern in patterns], 0.0)

    assert {os.path.basename(place.path) for place in found if place.reason is None} == {"own.log"}


@pytest.mark.parametrize("pattern", ["*", "*.log", "*/*.log", "*/*", "[ab]*/?.log", ".*", "x.log", "*/none.log", "**"])
def test_a_pattern_finds_what_it_finds_in_a_shell(pattern: str, tmp_path: Path) -> None:
    import glob

    for name in ("x.log", ".hidden.log", "a/1.log", "a/.b/2.log", "b/3.log", "b/[ab].log", "[ab]/4.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")

    found = [path for path in matching(f"{tmp_path}/{pattern}") if os.path.lexists(path)]

    assert sorted(found) == sorted(glob.glob(f"{tmp_path}/{pattern}"))


def test_a_loop_of_folders_ends(land: Land) -> None:
    before = os.listdir("/proc/self/fd")
    land.link(land.folder / "a", "b")
    land.link(land.folder / "b", "a")
    for number in range(MOST_LINKS + 1):
        land.link(land.folder / f"l{number}", f"l{number + 1}")

    for name in ("a", "l0"):
        with pytest.raises(OSError, match="a link that is not followed"):
            open_file(str(land.folder / name / "x"))
    assert os.listdir("/proc/self/fd") == before


def test_no_descriptor_is_left_whatever_was_planted(land: Land) -> None:
    before = os.listdir("/proc/self/fd")
    for plant in PLANTS[:-1]:
        path = land.folder / plant.__name__
        path.mkdir()
        plant(land, path / "x")
        for follow in (False, True):
            with suppress(OSError):
                os.close(within(SECONDS, lambda path=path, follow=follow: open_file(str(path / "x"), follow)))  # type: ignore[misc]
        with suppress(OSError):
            names_in(str(path / "x"))

    assert os.listdir("/proc/self/fd") == before


# --- the root folder of another process ----------------------------------------------------------------------


@pytest.fixture
def within_root() -> Iterator[str]:
    """Ours, by the kernel's own link, as a container's is reached."""
    return iter([f"/proc/{os.getpid()}/root"])


def test_below_the_root_of_a_process_no_link_is_followed(land: Land, within_root: Iterator[str]) -> None:
    root = next(within_root)
    inside = land.top / "absolute"
    inside.symlink_to(land.secret.parent)  # ours: elsewhere it would be followed

    assert content(f"{root}{land.secret}", 100) == SECRET
    for path in (f"{root}{inside}/server.log", f"{root}{land.top}/absolute"):
        with pytest.raises(OSError, match=r"a link that is not followed|regular"):
            content(path, 100)


def test_nothing_is_above_the_root_of_a_process(land: Land, within_root: Iterator[str]) -> None:
    assert content(f"{next(within_root)}/../../..{land.secret}", 100) == SECRET


# --- streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", [fifo, unix_socket, folder, device, link_to_a_device, link_to_a_fifo, link_to_itself])
def test_a_stream_that_is_no_file_is_no_log(plant: Callable[[Land, Path], None], land: Land) -> None:
    node = Node(land.top / "node")
    target = land.folder / "x"
    plant(land, target)
    node.vllm()
    node.tree.redirect(100, 1, str(target))

    places = within(SECONDS, lambda: node.look().server.logs)
    node.source.close()

    assert places[0].reason in ("absent", "error", "vanished", "not_supported")


@pytest.mark.parametrize(("flags", "is_log"), [("00", False), ("0100000", False), ("01", True), ("0102001", True)])
def test_what_a_process_only_reads_is_no_log_of_its(flags: str, is_log: bool, land: Land) -> None:
    node = Node(land.top / "node")
    node.vllm()
    node.tree.redirect(100, 1, str(land.secret))
    described = node.tree.folder(100) / "fdinfo" / "1"
    described.parent.mkdir(exist_ok=True)
    described.write_text(f"pos:\t0\nflags:\t{flags}\nmnt_id:\t1\n")

    places = node.look().server.logs
    node.source.close()

    assert (places[0].reason is None) is is_log


def test_control_groups_that_lead_out_are_not_looked_at(tmp_path: Path) -> None:
    files = CgroupFiles(tmp_path)
    outside = tmp_path / "sys/fs/outside"
    outside.mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir()
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("")
    (outside / "cgroup.events").write_text("frozen 1\n")

    assert files.frozen("0::/../outside\n") is None


def test_documents_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"k": "v" * (2 << 20)}))

    assert HostFiles(tmp_path).document("x.json") == {}
