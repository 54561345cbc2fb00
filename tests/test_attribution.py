"""Whose a process is, by recorded /proc trees and folders of every runtime: tests/fixtures/runtimes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from process_node import Node, configured
from stallwatch.config import ConfiguredServer, Match
from stallwatch.model import Server
from stallwatch.sources.attribution import MOST_PLACE_BYTES, RETRY_SECONDS, Home, mounted
from stallwatch.sources.cgroups import Placement
from stallwatch.sources.runtime_names import Names, kubernetes_name

FOLDER = Path(__file__).parent / "fixtures/runtimes"
SERVER = 4711
OUR_USERS = ["0 0 4294967295"]


def _cases() -> list[dict[str, Any]]:
    return [
        each | {"family": file.stem}
        for file in sorted(FOLDER.glob("*.yaml"))
        for each in yaml.safe_load(file.read_text())
    ]


CASES = _cases()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.source.close()


def lay_out(root: Node, case: dict[str, Any]) -> None:
    """The machine of one case."""
    for pid, given in case["processes"].items():
        process = {key: value for key, value in given.items() if key in ("comm", "ppid", "environ")}
        root.tree.add(pid, given["command"], **process, cgroup="\n".join(given["cgroup"]) + "\n")
        for name, lines in (("mountinfo", []), ("uid_map", OUR_USERS)):
            (root.tree.folder(pid) / name).write_text("\n".join([*given.get(name, lines), ""]))
    _made(root.root / "proc/self/uid_map").write_text("\n".join([*OUR_USERS, ""]))
    for path, content in case.get("files", {}).items():
        _made(root.root / path).write_text(content)
    for path, target in case.get("links", {}).items():
        _made(root.root / path).symlink_to(target)
    for fd in (1, 2):
        root.tree.redirect(SERVER, fd, f"pipe:[{fd}]")


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def labels(server: Server) -> dict[str, str]:
    names = ("name", "pod", "namespace", "container", "unit", "slurm_job")
    return {name: value for name in names if (value := getattr(server, name))}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['family']}: {case['case']}")
def test_a_server_is_known_by_where_it_runs(case: dict[str, Any], node: Node) -> None:
    lay_out(node, case)

    server = node.look().server

    log = case["server"].get("log")
    assert labels(server) == {key: value for key, value in case["server"].items() if key != "log"}
    assert {place.path for place in server.logs} == {str(node.root / log) if log else ""}


@pytest.mark.parametrize("case", [case for case in CASES if "homes" in case], ids=lambda case: case["case"])
def test_what_runs_beside_a_server_is_known_as_well_or_is_nobodys(case: dict[str, Any], node: Node) -> None:
    lay_out(node, case)
    found = {}
    for pid in case["homes"]:
        home = node.source._homes.home(pid, 0.0)
        place = home.placement
        found[pid] = "/".join((home.names.pod, home.names.namespace, home.container, place.unit, place.slurm_job))

    assert found == case["homes"]


def test_the_fixtures_are_as_they_were_made() -> None:
    make = _module(FOLDER / "make.py")

    assert {file.stem: file.read_text() for file in FOLDER.glob("*.yaml")} == {
        family: make.text(family) for family in make.FAMILIES
    }


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("runtimes_make", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


# --- over time ------------------------------------------------------------------------------------------------

UID, OTHER_UID = "6b1f9a55-3f0c-4a53-9d0e-1a2b3c4d5e6f", "0a1b2c3d-0000-1111-2222-333344445555"
ID, NEXT_ID = "4f" * 32, "9a" * 32


def pod(node: Node, pid: int, container: str = ID, uid: str = UID, namespace: str = "ai", pod: str = "chat-0") -> None:
    """A server in a container of a pod."""
    node.vllm(
        pid, ranks=1, command="vllm serve org/m", started=float(pid), cgroup=f"0::/kubepods/pod{uid}/{container}\n"
    )
    (node.root / f"var/log/pods/{namespace}_{pod}_{uid}/server").mkdir(parents=True, exist_ok=True)


def test_a_container_that_is_started_again_keeps_the_name_and_is_another_start(node: Node) -> None:
    pod(node, 100)
    first = node.look().server
    node.tree.end(100, 101, 110)
    node.look()
    pod(node, 200, NEXT_ID)
    second = node.look().server

    assert first.name == second.name == "vllm-8000@chat-0/server"
    assert (first.starts, second.starts) == (1, 2)
    assert first.pod_uid == second.pod_uid == UID


def test_another_pod_of_the_same_name_is_told_from_the_one_before(node: Node) -> None:
    pod(node, 100)
    first = node.look().server
    node.tree.end(100, 101, 110)
    node.look()
    pod(node, 200, NEXT_ID, OTHER_UID)
    (node.root / f"var/log/pods/ai_chat-0_{UID}/server").rmdir()
    second = node.look().server

    assert first.name == second.name
    assert (first.pod_uid, second.pod_uid) == (UID, OTHER_UID)


def test_two_pods_of_one_name_in_two_namespaces_keep_each_its_own_over_restarts(node: Node) -> None:
    pod(node, 100)
    pod(node, 200, NEXT_ID, OTHER_UID, "batch")
    before = {server.namespace: server.name for server in node.look().servers}
    node.tree.end(100, 101, 110, 200, 201, 210)
    node.look()
    pod(node, 300, "1b" * 32, OTHER_UID, "batch")
    pod(node, 400, "2c" * 32)
    after = {server.namespace: server.name for server in node.look().servers}

    assert before == after == {"ai": "vllm-8000@chat-0/server", "batch": "vllm-8000-2@chat-0/server"}


def test_a_name_that_comes_late_is_shown_and_the_servers_own_stays(node: Node) -> None:
    node.vllm(cgroup=f"0::/kubepods/pod{UID}/{ID}\n")
    assert node.look().server.container == ID[:12]
    (node.root / f"var/log/pods/ai_chat-0_{UID}/server").mkdir(parents=True)
    assert node.look().server.pod == ""

    server = node.look(RETRY_SECONDS).server

    assert labels(server) == {
        "name": f"vllm-8000@{ID[:12]}",
        "pod": "chat-0",
        "namespace": "ai",
        "container": "server",
    }


def test_folders_are_looked_at_once_when_all_is_known(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    pod(node, 100)
    node.look()
    monkeypatch.setattr(node.source._homes, "home", None)

    assert node.look(10 * RETRY_SECONDS).server.pod == "chat-0"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("server", True),
        ("chat-0/server", True),
        (ID[:6], True),
        ("chat-0", False),
        ("serve", False),
        ("chat-1/server", False),
        (NEXT_ID[:6], False),
    ],
)
def test_a_configured_container_is_known_by_name_or_id(given: str, found: bool, tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("chat", Match(container=given)))
    pod(node, 100)
    names = node.look().names
    node.source.close()

    assert names == (["chat"] if found else ["chat", "vllm-8000@chat-0/server"])


# --- what counts as a name ------------------------------------------------------------------------------------


def test_a_place_that_is_too_long_for_a_label_is_cut_and_still_told_from_others() -> None:
    places = {Home(Placement(ID), Names("p" * 200 + end, "ai", "server")).place for end in ("a", "b")}

    assert len(places) == 2
    assert {len(place) for place in places} == {MOST_PLACE_BYTES}
    assert Home(Placement(ID), Names("p" * 80, "ai", "server")).place == "p" * 80 + "/server"


@pytest.mark.parametrize(
    "name", ["../../etc/x", "a b", "", "-x", "x\n", "töpf", "x" * 300, 'a"b', "$(x)", "password=hunter2"]
)
def test_what_has_no_form_of_a_name_is_none(name: str) -> None:
    assert Names.checked({"container": name, "pod": name, "namespace": name}) == Names()


def test_only_a_whole_name_of_kubernetes_is_taken_apart() -> None:
    assert kubernetes_name(f"/k8s_server_chat-0_ai_{UID}_0") == Names("chat-0", "ai", "server", UID)
    assert kubernetes_name("/k8s_server_chat-0") == Names()
    assert kubernetes_name(f"/my_k8s_server_chat-0_ai_{UID}_0") == Names()


def test_what_one_source_says_of_another_pod_is_not_mixed_in() -> None:
    known = Names(container="server", pod_uid=UID)

    assert known.filled(Names("chat-0", "ai", "x", OTHER_UID)) == known
    assert known.filled(Names("chat-0", "ai", "x", UID.replace("-", "_"))) == Names("chat-0", "ai", "server", UID)


@pytest.mark.parametrize("text", ["", "\n", "1 2 3", "a b c d e", "1 2 8:1 / / rw - ext4 /dev/sda rw\n"])
def test_mounts_that_say_nothing_name_nobody(text: str) -> None:
    assert mounted(text) == ("", Names())


# --- who would pass for somebody else ---------------------------------------------------------------------------

VICTIM = f"/lib/kubelet/pods/{OTHER_UID}/containers/server/0a1b2c3d"


def forged(node: Node, root: str, point: str, users: str = "         0       1000          1\n") -> None:
    """A server that mounted something itself, in a user namespace of its own."""
    (node.root / "proc/self").mkdir(exist_ok=True)
    (node.root / "proc/self/uid_map").write_text("         0          0 4294967295\n")
    (node.tree.folder(100) / "uid_map").write_text(users)
    (node.tree.folder(100) / "mountinfo").write_text(f"1 2 8:1 {root} {point} rw - ext4 /dev/sda rw\n")


@pytest.mark.parametrize("users", ["         0       1000          1\n", "         0          0 4294967295\n"])
def test_mounts_of_a_user_namespace_of_its_own_name_no_pod(users: str, node: Node) -> None:
    (node.root / f"var/log/pods/ai_chat-0_{OTHER_UID}/server").mkdir(parents=True)
    node.vllm(cgroup="0::/user.slice/user-1000.slice/session-3.scope\n")
    forged(node, VICTIM, "/tmp/x", users)
    is_ours = users.endswith("4294967295\n")

    server = node.look().server

    assert (server.pod, server.name) == (("chat-0", "vllm-8000@chat-0/server") if is_ours else ("", "vllm-8000"))


def test_mounts_of_a_user_namespace_of_its_own_name_no_container(node: Node) -> None:
    node.vllm(cgroup="0::/user.slice/user-1000.slice/session-3.scope\n")
    forged(node, f"/home/u/containers/{ID}/hostname", "/etc/hostname")

    assert (node.look().server.container, node.server.name) == ("", "vllm-8000")


def test_a_pod_that_is_known_by_the_id_stands_before_what_is_mounted(node: Node) -> None:
    """The link of the container's id tells its pod; mounts name another one."""
    for name, uid in (("chat-0", UID), ("victim-0", OTHER_UID)):
        (node.root / f"var/log/pods/ai_{name}_{uid}/server").mkdir(parents=True)
    links = node.root / "var/log/containers"
    links.mkdir(parents=True)
    (links / f"chat-0_ai_server-{ID}.log").symlink_to(f"/var/log/pods/ai_chat-0_{UID}/server/0.log")
    node.vllm(cgroup=f"0::/../cri-containerd-{ID}.scope\n")
    (node.tree.folder(100) / "mountinfo").write_text(f"1 2 8:1 {VICTIM} /tmp/x rw - ext4 /dev/sda rw\n")

    assert (node.look().server.pod, node.server.pod_uid) == ("chat-0", UID)


def test_a_conmon_in_the_container_itself_is_only_called_so(node: Node) -> None:
    own = f"0::/kubepods/pod{UID}/{ID}\n"
    forgery = f"conmon -c {ID} -n k8s_server_victim-0_ai_{UID}_0"
    node.tree.add(40, forgery, comm="conmon", cgroup=own)
    node.vllm(cgroup=own)
    node.tree.change(100, ppid=40)

    assert (node.look().server.pod, node.server.container) == ("", ID[:12])


def test_a_group_in_a_pod_that_is_called_like_another_container_is_not_it(node: Node) -> None:
    """Whoever may make groups in his own may call them by any id."""
    for name, uid, container in (("chat-0", UID, NEXT_ID), ("victim-0", OTHER_UID, ID)):
        log = node.root / f"var/log/pods/ai_{name}_{uid}/server/0.log"
        log.parent.mkdir(parents=True)
        log.write_text("x\n")
        link = node.root / f"var/log/containers/{name}_ai_server-{container}.log"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(f"/{log.relative_to(node.root)}")
    node.vllm(cgroup=f"0::/kubepods/pod{UID}/{NEXT_ID}/docker/{ID}\n")
    node.tree.redirect(100, 1, "pipe:[1]")

    server = node.look().server

    assert (server.pod, server.pod_uid, server.container) == ("chat-0", UID, "server")
    assert {place.path for place in server.logs} == {""}


def test_the_docker_in_a_pod_names_its_containers_and_not_the_pod(node: Node) -> None:
    pod = f"0::/kubepods/pod{UID}/{NEXT_ID}"
    node.tree.add(30, "init", comm="init", ppid=2, cgroup=f"{pod}\n")
    node.tree.add(40, "dockerd", comm="dockerd", ppid=30, cgroup=f"{pod}/init\n")
    node.vllm(cgroup=f"{pod}/docker/{ID}\n")
    node.tree.change(100, ppid=40)
    for path in (f"var/log/pods/ai_chat-0_{UID}/dind", f"proc/40/root/var/lib/docker/containers/{ID}"):
        (node.root / path).mkdir(parents=True)
    config = node.root / f"proc/40/root/var/lib/docker/containers/{ID}/config.v2.json"
    config.write_text(json.dumps({"Name": f"/k8s_llm_victim-0_prod_{OTHER_UID}_0"}))

    server = node.look().server

    assert (server.pod, server.namespace, server.pod_uid, server.container) == ("chat-0", "ai", UID, "llm")
