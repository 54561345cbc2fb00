"""Where stdout and stderr go, on a folder that looks like /proc: files, runtimes behind pipes, the journal, nowhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from process_node import FRAMEWORKS, Node
from stallwatch.config import Config
from stallwatch.model import Event, LogPlace, Scene
from stallwatch.sources import Host, Moment
from stallwatch.sources.log_streams import SLACK_SECONDS
from stallwatch.sources.logs import Logs
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
