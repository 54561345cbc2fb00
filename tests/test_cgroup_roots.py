"""From inside a cgroup namespace of its own: where that begins on the machine, by the mounted control groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from process_node import Node
from stallwatch.sources.cgroup_roots import MOST_FOLDERS, absolute, roots
from stallwatch.sources.cgroup_state import CgroupFiles

ID, OURS = "4f" * 32, "9a" * 32
UID = "6b1f9a55-3f0c-4a53-9d0e-1a2b3c4d5e6f"
POD = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
HERE = f"{POD}/cri-containerd-{OURS}.scope"
PID = 4242


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """An empty cgroup file system of v2."""
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text("memory pids\n")
    return folder


def group(top: Path, path: str, *pids: int) -> None:
    folder = top / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))


def found(top: Path, first: str, ours: str = "0::/\n") -> Mapping[str, str]:
    return roots(first, ours, CgroupFiles(top.parents[2]).mounts, PID)


def test_it_is_where_our_own_pid_is(top: Path) -> None:
    group(top, f"{POD}/cri-containerd-{ID}.scope", 42, 424, 14242)
    group(top, HERE, 1, PID)

    assert found(top, "0::/../../../init.scope\n") == {"": HERE}


def test_we_may_be_below_the_beginning(top: Path) -> None:
    group(top, f"{HERE}/init", PID)

    assert found(top, "0::/../../..\n", "0::/init\n") == {"": HERE}


@pytest.mark.parametrize("first", ["0::/\n", "0::/init.scope\n", "", "0::/../..\n", "0::/../../../..\n"])
def test_it_is_not_known_at_the_top_nor_where_we_are_not(first: str, top: Path) -> None:
    group(top, HERE, PID)

    assert found(top, first) == {}


def test_without_the_machines_groups_it_is_not_known(top: Path) -> None:
    """Only our own part of them is mounted."""
    group(top, "/", PID)
    group(top, "/a/b/c", 1)

    assert found(top, "0::/../../..\n") == {}


def test_each_hierarchy_of_v1_begins_elsewhere(tmp_path: Path) -> None:
    for name, path in (
        ("memory", f"/docker/{OURS}"),
        ("cpu,cpuacct", f"/docker/{OURS}"),
        ("systemd", "/system.slice/x"),
    ):
        group(tmp_path / "sys/fs/cgroup" / name, path, PID)
    first = "3:memory:/../..\n2:cpu,cpuacct:/../..\n1:name=systemd:/../../init.scope\n0::/\n"
    ours = "3:memory:/\n2:cpu,cpuacct:/\n1:name=systemd:/\n0::/\n"

    known = roots(first, ours, CgroupFiles(tmp_path).mounts, PID)

    assert known == {
        "memory": f"/docker/{OURS}",
        "cpu,cpuacct": f"/docker/{OURS}",
        "name=systemd": "/system.slice/x",
    }
    assert absolute(f"3:memory:/../{ID}\n0::/a\n", known) == f"3:memory:/docker/{ID}\n0::/a\n"


def test_so_many_groups_are_looked_into_and_no_more(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stallwatch.sources.cgroup_roots.MOST_FOLDERS", 10)
    for number in range(11):
        group(top, f"/g{number}", *([PID] if number == 5 else []))

    assert MOST_FOLDERS > 10
    assert found(top, "0::/..\n") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/\n", f"0::{HERE}\n"),
        ("0::/init\n", f"0::{HERE}/init\n"),
        (f"0::/../cri-containerd-{ID}.scope\n", f"0::{POD}/cri-containerd-{ID}.scope\n"),
        ("0::/../../../system.slice/a.service\n", "0::/system.slice/a.service\n"),
        ("0::/../../../../../x\n", "0::/x\n"),
        ("0::/../../..\n", "0::/\n"),
        ("4:memory:/a\n", "4:memory:/a\n"),
        ("", "\n"),
    ],
)
def test_paths_are_the_machines(text: str, expected: str) -> None:
    assert absolute(text, {"": HERE}) == expected


def test_where_nothing_is_known_the_text_stays_as_it_is() -> None:
    assert absolute("0::/../x", {}) == "0::/../x"


@pytest.mark.parametrize("mounted", [True, False])
def test_a_container_of_our_own_pod_is_known_with_pod_and_scope_where_the_groups_are_mounted(
    mounted: bool, tmp_path: Path, top: Path
) -> None:
    """The pod is not in the text that the kernel gives a container of it."""
    scope = f"{POD}/cri-containerd-{ID}.scope"
    if mounted:
        group(top, HERE, os.getpid())
        group(top, scope, 100)
        (top / scope.lstrip("/") / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    (tmp_path / f"var/log/pods/ai_chat-0_{UID}/server").mkdir(parents=True)
    ours = tmp_path / "proc/self"
    ours.mkdir(parents=True)
    (ours / "cgroup").write_text("0::/\n")
    first = tmp_path / "proc/1"
    first.mkdir()
    (first / "cgroup").write_text("0::/../../../init.scope\n")
    node = Node(tmp_path)
    node.vllm(cgroup=f"0::/../cri-containerd-{ID}.scope\n")
    server = node.look().server
    node.source.close()

    assert (server.pod, server.namespace) == (("chat-0", "ai") if mounted else ("", ""))
    assert server.name == ("vllm-8000@chat-0/server" if mounted else f"vllm-8000@{ID[:12]}")
    assert [reading.value for reading in node.readings("server_frozen")] == ([1.0] if mounted else [])
