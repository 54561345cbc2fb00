"""From a container's id to its log, on folders as runtimes make them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from stallwatch.sources.host_files import MOST_DOCUMENT_BYTES
from stallwatch.sources.logs.containers import ContainerLogs, Found

ID = "0123456789abcdef" * 4
OTHER = "f" * 64
UID = "6b1f9a55-1111-2222-3333-444455556666"
PODS = "var/log/pods"
ABSENT = Found()


class Tree:
    """The files of a host below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = ContainerLogs(root)

    def write(self, path: str, content: object = "x\n") -> str:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(file)

    def link(self, path: str, target: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(target)

    def docker(self, driver: str | None = "json-file", root: str = "var/lib/docker", **state: object) -> str:
        folder = f"{root}/containers/{ID}"
        if driver is not None:
            self.write(f"{folder}/hostconfig.json", {"LogConfig": {"Type": driver, "Config": {}}})
        self.write(f"{folder}/config.v2.json", {"ID": ID, **state})
        return folder


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# --- Docker --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "root", ["var/lib/docker", "var/lib/docker/100000.100000", "var/snap/docker/common/var-lib-docker"]
)
@pytest.mark.parametrize("driver", ["json-file", None])
def test_docker_writes_a_file_of_json(root: str, driver: str | None, tree: Tree) -> None:
    path = tree.write(f"{tree.docker(driver, root)}/{ID}-json.log")

    assert tree.logs.find(ID) == Found(path, "")
    assert tree.logs.find(OTHER) == ABSENT


def test_docker_says_where_the_file_is(tree: Tree) -> None:
    path = tree.write(f"data/containers/{ID}/{ID}-json.log")
    tree.docker(LogPath=f"/data/containers/{ID}/{ID}-json.log")

    assert tree.logs.find(ID) == Found(path, "")


@pytest.mark.parametrize("named", ["/etc/shadow", f"/elsewhere/{ID}-json.log", "", 7, None])
def test_a_path_that_is_not_its_log_is_not_taken(named: object, tree: Tree) -> None:
    tree.write("etc/shadow")
    path = tree.write(f"{tree.docker(LogPath=named)}/{ID}-json.log")

    assert tree.logs.find(ID) == Found(path, "")


@pytest.mark.parametrize(
    ("driver", "told"), [("local", "local"), ("journald", "journald"), ("none", "none"), ("loki/x:1 s3cret", "other")]
)
def test_drivers_that_write_no_text_are_no_evidence_and_named_once(
    driver: str, told: str, tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    folder = tree.docker(driver)
    tree.write(f"{folder}/local-logs/container.log")
    tree.write(f"{folder}/container-cached.log")

    assert [tree.logs.find(ID) for _ in range(3)] == [Found(driver=told)] * 3
    assert [getattr(record, "driver", "") for record in caplog.records] == [told]


def test_a_container_with_the_driver_local_is_known_by_its_folder(tree: Tree) -> None:
    tree.write(f"{tree.docker(None)}/local-logs/container.log")

    assert tree.logs.find(ID) == Found(driver="local")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"LogConfig": 7}', " " * MOST_DOCUMENT_BYTES + "{}"]
)
def test_a_document_that_is_written_anew_just_now_or_damaged_is_none(content: str, tree: Tree) -> None:
    folder = tree.docker()
    path = tree.write(f"{folder}/{ID}-json.log")
    for name in ("hostconfig.json", "config.v2.json"):
        tree.write(f"{folder}/{name}", content)

    assert tree.logs.find(ID) == Found(path, "")


def test_nerdctl_writes_the_same_form(tree: Tree) -> None:
    path = tree.write(f"var/lib/nerdctl/1935db59/containers/default/{ID}/{ID}-json.log")

    assert tree.logs.find(ID) == Found(path, "")


# --- Kubernetes ----------------------------------------------------------------------------------------------


def test_a_link_names_the_container(tree: Tree) -> None:
    """Links are absolute: below the mounted root of a host they mean the host's files."""
    path = tree.write(f"{PODS}/ai_chat-0_{UID}/kserve-container/0.log")
    tree.link(
        f"var/log/containers/chat-0_ai_kserve-container-{ID}.log", f"/{PODS}/ai_chat-0_{UID}/kserve-container/0.log"
    )
    tree.write(f"{PODS}/ai_chat-0_{UID}/queue-proxy/0.log")

    assert tree.logs.find(ID) == Found(path, "")


def test_dockers_file_behind_two_links_is_found(tree: Tree) -> None:
    folder = f"{PODS}/ai_chat-0_{UID}/server"
    path = tree.write(f"var/lib/docker/containers/{ID}/{ID}-json.log")
    tree.link(f"var/log/containers/chat-0_ai_server-{ID}.log", f"/{folder}/0.log")
    tree.link(f"{folder}/0.log", f"/var/lib/docker/containers/{ID}/{ID}-json.log")

    assert tree.logs.find(ID, UID) == Found(path, "")


@pytest.mark.parametrize("pod", [UID, UID.replace("-", "_"), UID.replace("-", "")])
@pytest.mark.parametrize("folder", [UID, UID.replace("-", "")])
def test_a_pod_is_known_by_its_uid_in_any_form(pod: str, folder: str, tree: Tree) -> None:
    """Names in links are cut at their end, so that the id of the container may be missing."""
    tree.link(f"var/log/containers/{'x' * 200}-0123.log", f"/{PODS}/ai_chat-0_{folder}/server/10.log")
    path = tree.write(f"{PODS}/ai_chat-0_{folder}/server/10.log")
    for name in ("9.log", "10.log.20260602-080000", "11.log.gz", "x.log"):
        tree.write(f"{PODS}/ai_chat-0_{folder}/server/{name}")
    tree.write(f"{PODS}/ai_other-0_{'0' * 32}/server/0.log")

    assert tree.logs.find(ID, pod) == Found(path, "")


MOUNTINFO = "1 2 8:1 /lib/kubelet/pods/{uid}/containers/{name}/0a1b2c3d /dev/termination-log rw - ext4 /dev/sda rw\n"


@pytest.mark.parametrize("how", ["containerd", "k3s", "mountinfo"])
def test_of_several_containers_of_a_pod_the_right_one_is_found(how: str, tree: Tree) -> None:
    paths = {name: tree.write(f"{PODS}/ai_chat-0_{UID}/{name}/0.log") for name in ("sidecar", "server")}
    mountinfo = MOUNTINFO.format(uid=UID, name="server") if how == "mountinfo" else ""
    if how != "mountinfo":
        tree.write(
            f"run/{how}/{'containerd/' * (how == 'k3s')}io.containerd.runtime.v2.task/k8s.io/{ID}/config.json",
            {"annotations": {"io.kubernetes.cri.container-name": "server"}},
        )

    assert tree.logs.find(ID, UID, lambda: mountinfo) == Found(paths["server"], "")


def test_what_is_mounted_in_a_container_tells_no_pod(tree: Tree) -> None:
    """Whoever runs there may mount what he likes: the logs of other pods are not to be had that way."""
    tree.write(f"{PODS}/ai_chat-0_{UID}/server/0.log")

    assert tree.logs.find(ID, "", lambda: MOUNTINFO.format(uid=UID, name="server")) == ABSENT


@pytest.mark.parametrize(
    "mountinfo", ["", MOUNTINFO.format(uid=UID, name="gone"), MOUNTINFO.format(uid=UID, name="..")]
)
def test_of_several_containers_none_is_guessed(mountinfo: str, tree: Tree) -> None:
    for name in ("sidecar", "server"):
        tree.write(f"{PODS}/ai_chat-0_{UID}/{name}/0.log")

    assert tree.logs.find(ID, UID, lambda: mountinfo) == ABSENT


def test_cri_o_says_where_the_file_is(tree: Tree) -> None:
    path = tree.write("var/log/crio/pods/sandbox/server.log")
    tree.write(
        f"run/containers/storage/overlay-containers/{ID}/userdata/config.json",
        {"annotations": {"io.kubernetes.cri-o.LogPath": "/var/log/crio/pods/sandbox/server.log"}},
    )

    assert tree.logs.find(ID) == Found(path, "")


@pytest.mark.parametrize("storage", ["overlay", "vfs"])
def test_podman_writes_a_file_with_the_driver_k8s_file(storage: str, tree: Tree) -> None:
    path = tree.write(f"var/lib/containers/storage/{storage}-containers/{ID}/userdata/ctr.log")

    assert tree.logs.find(ID) == Found(path, "")
    assert tree.logs.find(OTHER) == ABSENT


def test_podman_with_another_driver_is_known_and_no_evidence(tree: Tree) -> None:
    folder = f"var/lib/containers/storage/overlay-containers/{ID}/userdata"
    tree.write(f"{folder}/config.json", {"annotations": {"io.container.manager": "libpod"}})
    tree.write(f"{folder}/attach")

    assert tree.logs.find(ID) == Found(driver="podman")


# --- what the files do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "nothing"])
def test_only_a_regular_file_is_found(kind: str, tree: Tree) -> None:
    path = tree.root / tree.docker() / f"{ID}-json.log"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)

    assert tree.logs.find(ID) == ABSENT


def test_no_link_leads_out_of_the_root(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "x.log"
    outside.write_text("x")
    for number, target in enumerate((str(outside), "../" * 40 + str(outside)[1:])):
        container = f"{number}" * 64
        tree.link(f"var/log/containers/a_b_c-{container}.log", target)
        assert tree.logs.find(container) == ABSENT


def test_a_log_that_is_being_rotated_is_still_that_log(tree: Tree) -> None:
    path = tree.write(f"{tree.docker()}/{ID}-json.log")
    tree.logs.find(ID)
    os.rename(path, f"{path}.1")

    assert tree.logs.find(ID) == Found(path, "")
    tree.logs.forget(set())
    assert tree.logs.find(ID) == ABSENT


def test_a_folder_that_may_not_be_read_is_a_reason(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's folder is root's alone; whether the container's log is in it cannot be known."""
    tree.write(f"{tree.docker()}/{ID}-json.log")
    real = os.lstat

    def lstat(path: str) -> os.stat_result:
        if "/containers" in path:
            raise PermissionError(13, "no")
        return real(path)

    monkeypatch.setattr(os, "lstat", lstat)

    assert tree.logs.find(ID) == Found(reason="permission")


@pytest.mark.parametrize("container", ["", "../../etc", "a", "x" * 64, f"{ID}/..", "0" * 32 + "-1234567890123"])
def test_what_is_no_id_is_looked_for_nowhere_dangerous(container: str, tree: Tree) -> None:
    tree.write(f"{tree.docker()}/{ID}-json.log")

    assert tree.logs.find(container) == ABSENT
