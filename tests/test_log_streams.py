"""Where stdout and stderr go, on a folder that looks like /proc: files, runtimes behind pipes, the journal, nowhere."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from far_mount import FarMount
from process_node import FRAMEWORKS, Node, configured
from stallwatch.config import Config, ConfiguredServer, Discovery, Match
from stallwatch.model import Event, LogPlace, Scene
from stallwatch.sources import Host, Moment
from stallwatch.sources.logs.collector import Logs
from stallwatch.sources.logs.streams import SLACK_SECONDS
from stallwatch.sources.processes import NEVER
from test_log_decode import docker

ID = "0123456789abcdef" * 4
UID = "6b1f9a55-1111-2222-3333-444455556666"
LATER = 4_000_000_000.0
"""Behind the start of every server of a tree."""

IN_DOCKER = f"0::/system.slice/docker-{ID}.scope\n"
IN_POD = f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{ID}.scope\n"
IN_UNIT = "0::/system.slice/vllm.service\n"
IN_SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"


class Streams(Node):
    """A server whose streams are links with the text of what the kernel shows."""

    def start(self, cgroup: str, stdout: str, stderr: str | None = None) -> None:
        self.vllm(cgroup=cgroup)
        for fd, target in ((1, stdout), (2, stderr or stdout)):
            self.tree.redirect(100, fd, target)

    def wrote(self, path: str, modified: float = LATER) -> str:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x\n")
        os.utime(file, (modified, modified))
        return str(file)

    def docker(self) -> str:
        return self.wrote(f"var/lib/docker/containers/{ID}/{ID}-json.log")

    @property
    def logs(self) -> list[tuple[str, str, str | None]]:
        return [(place.name, place.path, place.reason) for place in self.look().server.logs]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Streams]:
    made = Streams(tmp_path)
    yield made
    made.source.close()


NOWHERE = [("stdout", "", "absent"), ("stderr", "", "absent")]


def test_a_pipe_of_a_container_leads_to_the_file_of_its_runtime(node: Streams) -> None:
    path = node.docker()
    node.start(IN_DOCKER, "pipe:[11]", "pipe:[12]")

    assert node.logs == [("stdout", path, None)]
    place, status = node.server.logs[0], os.stat(path)
    assert place == LogPlace("stdout", path, None, status.st_dev, status.st_ino)


def test_what_a_server_says_in_a_container_is_heard(node: Streams) -> None:
    path = node.docker()
    Path(path).write_bytes(docker("(EngineCore pid=7) INFO 06-02 08:00:00 [x.py:1] Starting to load model org/m...\n"))
    os.utime(path, (LATER, LATER))
    node.start(IN_DOCKER, "pipe:[11]")
    source = Logs(Host(Config(), FRAMEWORKS, node.tree.root, node.root))

    seen = list(source.read(Scene(node.look().servers), Moment(node.now, LATER)))
    source.close()

    assert [(one.event, one.log) for one in seen if isinstance(one, Event)] == [("load_begin", "stderr")]


def test_a_pipe_of_a_pod_leads_to_its_file(node: Streams) -> None:
    path = node.wrote(f"var/log/pods/ai_chat-0_{UID}/server/0.log")
    node.start(IN_POD, "pipe:[11]")

    assert node.logs == [("stdout", path, None)]


NODE_ID = "fedcba9876543210" * 4


def in_kind(node: Streams, shim: str) -> str:
    """A pod of a node that is a container of Docker; `shim`: control group of what started the pod's container."""
    node.tree.add(40, f"/usr/bin/containerd-shim-runc-v2 -id {ID}", comm="containerd-shim", cgroup=shim)
    uid = UID.replace("-", "_")
    node.start(
        f"0::/docker/{NODE_ID}/kubelet.slice/kubelet-kubepods-pod{uid}.slice/cri-containerd-{ID}.scope\n", "pipe:[1]"
    )
    node.tree.change(100, ppid=40)
    inside = node.tree.folder(40) / "root"
    path = inside / f"var/log/pods/ai_chat-0_{UID}/server/0.log"
    path.parent.mkdir(parents=True)
    path.write_text("x\n")
    os.utime(path, (LATER, LATER))
    return str(path)


def test_a_pipe_of_a_pod_in_a_node_that_is_a_container_leads_to_the_nodes_file(node: Streams) -> None:
    path = in_kind(node, f"0::/docker/{NODE_ID}/system.slice/containerd.service\n")

    assert node.logs == [("stdout", path, None)]
    assert node.logs == [("stdout", path, None)]


@pytest.mark.parametrize("shim", ["0::/system.slice/containerd.service\n", f"0::/docker/{ID}\n", "0::/\n"])
def test_a_parent_that_is_not_in_the_node_shows_no_file_of_it(shim: str, node: Streams) -> None:
    in_kind(node, shim)

    assert node.logs == NOWHERE


def test_a_file_of_the_machine_stands_before_that_of_a_node_in_it(node: Streams) -> None:
    """As seen from within the node."""
    in_kind(node, f"0::/docker/{NODE_ID}/system.slice/containerd.service\n")
    path = node.wrote(f"var/log/pods/ai_chat-0_{UID}/server/0.log")

    assert node.logs == [("stdout", path, None)]


def test_a_file_within_a_container_stands_before_what_its_runtime_has(node: Streams) -> None:
    path = node.docker()
    node.wrote("server.log")
    node.start(IN_DOCKER, str(node.root / "server.log"), "pipe:[12]")

    assert [(name, reason) for name, _, reason in node.logs] == [("server.log", None), ("stderr", None)]
    assert node.server.logs[1].path == path


@pytest.mark.parametrize("cgroup", [IN_DOCKER, IN_UNIT, IN_SESSION])
@pytest.mark.parametrize("target", ["pipe:[11]", "socket:[11]", "/dev/null", "/dev/ptmx", "fifo"])
def test_what_leads_to_no_log_is_none_and_never_opened(target: str, cgroup: str, node: Streams) -> None:
    """Opening the FIFO would not even return."""
    os.mkfifo(node.root / "fifo")
    node.start(cgroup, str(node.root / "fifo") if target == "fifo" else target)

    assert node.logs == NOWHERE


@pytest.mark.parametrize("target", ["socket:[11]", "/dev/null", "/dev/ptmx"])
def test_only_a_pipe_leads_to_a_runtime(target: str, node: Streams) -> None:
    node.docker()
    node.start(IN_DOCKER, target)

    assert node.logs == NOWHERE


@pytest.mark.parametrize(("early", "is_read"), [(SLACK_SECONDS + 1, False), (SLACK_SECONDS - 1, True)])
def test_a_runtimes_file_without_a_word_since_the_start_is_not_where_it_writes(
    early: float, is_read: bool, node: Streams
) -> None:
    """What is run in a container by `exec` writes to whoever ran it."""
    path = node.docker()
    node.start(IN_DOCKER, "pipe:[11]")
    begun = node.look().server.started_at
    os.utime(path, (begun - early, begun - early))

    assert node.logs == ([("stdout", path, None)] if is_read else NOWHERE)


def test_a_log_is_kept_while_it_is_rotated(node: Streams) -> None:
    path = node.docker()
    node.start(IN_DOCKER, "pipe:[11]")
    first = node.logs
    os.rename(path, f"{path}.1")

    assert node.logs == first


def test_without_the_right_to_see_the_descriptor_the_container_is_still_known(
    node: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.docker()
    node.start(IN_DOCKER, "pipe:[11]")
    deny(monkeypatch)

    assert node.logs == [("stdout", path, None)]


def test_without_that_right_a_server_outside_of_containers_says_so(
    node: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.docker()
    node.start(IN_UNIT, "pipe:[11]")
    deny(monkeypatch)

    assert node.logs == [("stdout", "", "permission"), ("stderr", "", "permission")]


def deny(monkeypatch: pytest.MonkeyPatch) -> None:
    """AppArmor denies it to a container even with the capability."""
    real = os.readlink

    def readlink(path: str) -> str:
        if "/fd/" in path:
            raise PermissionError(13, "no")
        return real(path)

    monkeypatch.setattr(os, "readlink", readlink)


def journal_at(node: Streams, behind: dict[int, str], has_journal: bool = True) -> None:
    node.source._streams.has_journal = lambda: has_journal
    node.source._streams.journal_behind = behind.get


@pytest.mark.parametrize("namespace", ["", "gpu"])
def test_a_socket_of_a_unit_leads_to_the_journal(namespace: str, node: Streams) -> None:
    node.start(IN_UNIT, "socket:[11]")
    journal_at(node, {11: namespace})

    assert node.logs == [("stdout", f"journal:{namespace}:vllm.service", None)]


def test_a_socket_of_a_users_unit_leads_to_that_users_journal(node: Streams) -> None:
    node.start("0::/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service\n", "socket:[11]")
    journal_at(node, {11: ""})

    assert node.logs == [("stdout", "journal::1000/vllm.service", None)]
    assert node.server.unit == ""  # no unit of the system has that name


@pytest.mark.parametrize(
    ("cgroup", "inode", "has_journal"), [(IN_UNIT, 12, True), (IN_UNIT, 11, False), (IN_SESSION, 11, True)]
)
def test_other_sockets_lead_nowhere(cgroup: str, inode: int, has_journal: bool, node: Streams) -> None:
    """A supervisor's socket pair; no journalctl; a login whose words no unit's name finds."""
    node.start(cgroup, f"socket:[{inode}]")
    journal_at(node, {11: ""}, has_journal)

    assert node.logs == NOWHERE


def test_a_real_socket_pair_is_not_the_journal(node: Streams) -> None:
    one, other = socket.socketpair()
    with one, other:
        node.start(IN_UNIT, f"socket:[{os.fstat(one.fileno()).st_ino}]")
        node.source._streams.has_journal = lambda: True

        assert node.logs == NOWHERE


# --- on mounts that may not answer -----------------------------------------------------------------------------


class FarStreams(Streams):
    """Beside what is near there is a far mount, which no look may touch."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, far: str = "far") -> None:
        super().__init__(folder)
        self.mount = FarMount(folder / far, self.tree.root, monkeypatch)

    def start_far(self, stdout: str, stderr: str, inodes: tuple[int, int]) -> None:
        """A server that writes to files of the mount; where these are near they exist."""
        self.start(IN_SESSION, str(self.root / stdout), str(self.root / stderr))
        self.mount.seen_by(100)
        for number, (name, inode) in enumerate(zip((stdout, stderr), inodes, strict=True), 1):
            if not name.startswith("far/"):
                (self.root / name).write_text("x\n")
            self.mount.opened(100, number, inode, 31 if name.startswith("far/") else 22)
        self.mount.watch(self.source._far.guards)
        self.mount.hang()


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarStreams]:
    made = FarStreams(tmp_path, monkeypatch)
    yield made
    made.mount.answer()
    made.source.close()


def test_a_stream_on_a_dead_mount_is_known_without_a_touch(away: FarStreams) -> None:
    away.start_far("far/a/out.log", "far/b/err.log", (5, 6))
    path, device = str(away.tree.folder(100) / "fd"), os.makedev(0, 41)

    assert away.look().server.logs == (
        LogPlace("out.log", f"{path}/1", None, device, 5),
        LogPlace("err.log", f"{path}/2", None, device, 6),
    )
    assert (away.mount.touched, away.source._far.guards.waiting) == (0, 0)


def test_a_near_stream_beside_it_is_known_as_ever(away: FarStreams) -> None:
    away.start_far("near.log", "far/err.log", (5, 6))
    near, far = away.look().server.logs
    status = (away.root / "near.log").stat()

    assert (near.name, near.device, near.inode) == ("near.log", status.st_dev, status.st_ino)
    assert (far.name, far.inode) == ("err.log", 6)


@pytest.mark.parametrize("inode", [5, 0])
def test_both_streams_in_one_far_file_are_one_log(inode: int, away: FarStreams) -> None:
    away.start_far("far/x.log", "far/x.log", (inode, inode))

    assert [place.name for place in away.look().server.logs] == ["x.log"]


@pytest.mark.parametrize("inodes", [(5, 6), (0, 0)])
def test_two_far_files_are_two_logs_also_of_one_name(inodes: tuple[int, int], away: FarStreams) -> None:
    away.start_far("far/a/x.log", "far/b/x.log", inodes)

    assert [place.name for place in away.look().server.logs] == ["x.log", "stderr"]


@pytest.mark.parametrize("inode", [5, 0])
def test_a_far_log_keeps_its_name_when_it_is_moved_aside(inode: int, away: FarStreams) -> None:
    away.start_far("far/x.log", "far/x.log", (inode, inode))
    assert [place.name for place in away.look().server.logs] == ["x.log"]
    for fd in (1, 2):
        away.tree.redirect(100, fd, away.root / "far/x.log.1 (deleted)")

    assert [place.name for place in away.look().server.logs] == ["x.log"]


def test_what_is_said_on_a_far_mount_is_heard(away: FarStreams) -> None:
    (away.root / "far" / "x.log").write_text(
        "(EngineCore pid=7) INFO 06-02 08:00:00 [x.py:1] Starting to load model org/m...\n"
    )
    away.start_far("far/x.log", "far/x.log", (5, 5))
    source = Logs(Host(Config(), FRAMEWORKS, away.tree.root, away.root))
    away.mount.watch(source._guards)
    away.mount.answer()
    servers = away.look().servers

    seen = list(source.read(Scene(servers), Moment(away.now, LATER)))
    source.close()
    assert [one.event for one in seen if isinstance(one, Event)] == ["load_begin"]
    assert away.mount.touched > 0


@pytest.fixture(params=["var/log", "var/log/containers", "var/lib/docker"])
def housed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarStreams]:
    """A machine that keeps the logs of its containers, or what is looked at before, on a far mount."""
    made = FarStreams(tmp_path, monkeypatch, request.param)
    yield made
    made.mount.answer()
    made.source.close()


def test_a_container_is_looked_for_in_a_thread_while_others_go_on(housed: FarStreams) -> None:
    path = housed.docker()
    housed.start(IN_DOCKER, "pipe:[11]")
    (housed.root / "near.log").write_text("x\n")
    housed.vllm(first=300)
    housed.tree.redirect(300, 1, housed.root / "near.log")
    housed.mount.watch(housed.source._far.guards)
    housed.mount.hang()

    def places() -> set[tuple[str, str, str | None]]:
        return {(place.name, place.path, place.reason) for server in housed.look().servers for place in server.logs}

    near = ("near.log", str(housed.tree.folder(300) / "fd/1"), None)
    for _ in range(3):
        found = places()
        assert near in found
        assert ("stdout", "", "timeout") in found
        assert housed.source._far.guards.waiting == 1

    housed.mount.answer()
    places()
    assert ("stdout", path, None) in places()

    housed.mount.hang()
    for _ in range(3):
        assert ("stdout", path, None) in places()


def test_a_container_on_near_mounts_costs_no_thread(away: FarStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    path = away.docker()
    away.start(IN_DOCKER, "pipe:[11]")
    away.mount.watch(away.source._far.guards)
    monkeypatch.setattr(threading, "Thread", None)

    assert away.logs == [("stdout", path, None)]


def test_what_is_known_of_containers_that_went_is_forgotten(housed: FarStreams) -> None:
    housed.docker()
    housed.start(IN_DOCKER, "pipe:[11]")
    housed.mount.watch(housed.source._far.guards)
    housed.look()
    assert housed.source._far._asked

    housed.source._streams.forget(set())
    housed.source._homes.forget(set())
    assert not housed.source._far._asked


def test_a_pid_file_on_a_dead_mount_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (
        ConfiguredServer(name, Match(pid_file=f"/{name}/server.pid"), framework="vllm") for name in ("far", "near")
    )
    node = configured(tmp_path, one, other, discovery=Discovery(enabled=False))
    mount = FarMount(tmp_path / "far", node.tree.root, monkeypatch)
    (tmp_path / "near").mkdir()
    for pid, folder in ((100, "far"), (300, "near")):
        node.vllm(first=pid)
        (tmp_path / folder / "server.pid").write_text(f"{pid}\n")
    mount.watch(node.source._far.guards)
    mount.hang()

    def found() -> dict[str, int]:
        return {server.name: server.root.pid for server in node.look().servers if server.root != NEVER}

    assert found() == {"near": 300}
    mount.answer()
    found()
    assert found() == {"near": 300, "far": 100}
    mount.hang()
    assert found() == found() == {"near": 300, "far": 100}
    mount.answer()
    node.source.close()
