"""What the groups around a server say, on folders that look like /proc and /sys/fs/cgroup."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from process_node import Node
from stallwatch.model import READ_REASONS
from stallwatch.sources.cgroup_state import MOST_FOLDERS, SETTLE_SECONDS, CgroupFiles
from stallwatch.sources.cgroups import Cgroup
from stallwatch.sources.processes import MOST_ASKED

ID = "4f" * 32
UNIT = "/system.slice/llm.service"
SESSION = "/user.slice/user-1000.slice/session-3.scope"
SERVER = (100, 101, 110, 111)


class Groups:
    """A mounted cgroup file system of version 2 (`version` 1: one hierarchy of that name below it)."""

    def __init__(self, root: Path, hierarchy: str = "") -> None:
        self.top = root / "sys/fs/cgroup" / hierarchy
        self.top.mkdir(parents=True)
        self.is_v2 = hierarchy in ("", "unified")
        if not hierarchy:
            (self.top / "cgroup.controllers").write_text("cpu memory\n")

    def add(self, path: str, populated: bool = True, frozen: bool = False) -> Path:
        folder = self.top / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        if self.is_v2:
            (folder / "cgroup.events").write_text(f"populated {populated:d}\nfrozen {frozen:d}\n")
        else:
            (folder / "cgroup.procs").write_text("100\n" if populated else "")
            (folder / "freezer.state").write_text("FROZEN\n" if frozen else "THAWED\n")
        return folder

    def end(self, path: str) -> None:
        shutil.rmtree(self.top / path.lstrip("/"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.source.close()


def lose(node: Node, *pids: int) -> None:
    """The processes end, and are seen to have ended."""
    node.tree.end(*pids)
    node.look()
    node.look()


def alive(node: Node) -> tuple[float | None, list[float | None]]:
    """server_alive, and server_scope_alive where it is said."""
    return node.value("server_alive"), [reading.value for reading in node.readings("server_scope_alive")]


# --- the scope, by its files -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [UNIT, SESSION, f"/docker/{ID}", "/system.slice/slurmstepd.scope/job_7/step_0"])
def test_while_the_server_lives_so_does_what_it_runs_in(node: Node, path: str) -> None:
    node.vllm(cgroup=f"0::{path}\n")

    assert alive(node.look()) == (1.0, [1.0])


@pytest.mark.parametrize("path", ["/", "/user.slice/user-1000.slice/user@1000.service/app.slice"])
def test_a_server_in_no_scope_has_none_that_lives_or_ends(node: Node, path: str) -> None:
    Groups(node.root).add(path)
    node.vllm(cgroup=f"0::{path}\n")
    before = alive(node.look())
    lose(node, *SERVER)

    assert (before, alive(node)) == ((1.0, []), (0.0, []))


def test_a_scope_whose_group_is_gone_ended_with_the_server(node: Node) -> None:
    groups = Groups(node.root)
    groups.add(SESSION)
    node.vllm(cgroup=f"0::{SESSION}\n")
    node.look()
    groups.end(SESSION)
    lose(node, *SERVER)

    assert alive(node) == (0.0, [0.0])
    assert alive(node.look(500.0)) == (0.0, [0.0])


def test_a_scope_with_nobody_left_ended_with_the_server(node: Node) -> None:
    groups = Groups(node.root)
    groups.add(UNIT)
    node.vllm(cgroup=f"0::{UNIT}\n")
    node.look()
    groups.add(UNIT, populated=False)
    lose(node, *SERVER)

    assert alive(node) == (0.0, [0.0])


def test_a_scope_in_which_others_run_on_outlives_the_server(node: Node) -> None:
    """The twin: a shell in the session, a supervisor in the unit."""
    Groups(node.root).add(SESSION)
    node.vllm(cgroup=f"0::{SESSION}\n")
    node.look()
    lose(node, *SERVER)

    assert alive(node) == (0.0, [1.0])
    assert alive(node.look(500.0)) == (0.0, [1.0])


def test_a_scope_that_takes_a_moment_to_be_taken_down_is_looked_at_again_and_then_no_more(node: Node) -> None:
    groups = Groups(node.root)
    groups.add(UNIT)
    node.vllm(cgroup=f"0::{UNIT}\n")
    node.look()
    node.tree.end(*SERVER)
    found = [alive(node.look())[1], alive(node.look())[1]]
    groups.add(UNIT, populated=False)
    found.append(alive(node.look())[1])
    groups.add(UNIT)
    found.append(alive(node.look(SETTLE_SECONDS))[1])

    assert found == [[1.0], [1.0], [0.0], [0.0]]


def test_a_group_made_anew_under_the_same_name_is_another_one(node: Node) -> None:
    """A unit that is started again has the same path."""
    groups = Groups(node.root)
    before = groups.add(UNIT)
    node.vllm(cgroup=f"0::{UNIT}\n")
    node.look()
    before.rename(node.root / "kept, so that its inode is not used again")
    groups.add(UNIT)
    lose(node, *SERVER)

    assert alive(node) == (0.0, [0.0])


def test_a_server_that_moves_to_another_scope_ends_with_that_one(node: Node) -> None:
    groups = Groups(node.root)
    groups.add(SESSION)
    groups.add(UNIT)
    node.vllm(cgroup=f"0::{SESSION}\n")
    node.look()
    node.tree.change(100, cgroup=f"0::{UNIT}\n")
    node.look()
    groups.end(UNIT)
    lose(node, *SERVER)

    assert alive(node) == (0.0, [0.0])


def test_a_first_process_that_was_only_missed_once_has_a_living_scope_again(node: Node) -> None:
    Groups(node.root).add(UNIT, populated=False)
    node.vllm(cgroup=f"0::{UNIT}\n")
    node.look()
    stat = node.tree.folder(100) / "stat"
    text = stat.read_text()
    stat.write_text("")
    missed = alive(node.look())
    stat.write_text(text)

    assert (missed, alive(node.look())) == ((1.0, [0.0]), (1.0, [1.0]))


@pytest.mark.parametrize("others", [True, False])
def test_in_version_1_the_groups_below_count(node: Node, others: bool) -> None:
    groups = Groups(node.root, "systemd")
    groups.add(UNIT)
    groups.add(f"{UNIT}/deep/er")
    node.vllm(cgroup=f"4:memory:/\n1:name=systemd:{UNIT}\n")
    node.look()
    groups.add(UNIT, populated=False)
    groups.add(f"{UNIT}/deep", populated=False)
    groups.add(f"{UNIT}/deep/er", populated=others)
    lose(node, *SERVER)

    assert alive(node) == (0.0, [float(others)])


def test_a_tree_of_groups_too_large_to_walk_says_nothing(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "memory")
    for number in range(MOST_FOLDERS + 1):
        groups.add(f"/a/{number}", populated=False)
    place = CgroupFiles(tmp_path).folder(Cgroup("memory", "/a"))

    assert place is not None
    assert CgroupFiles(tmp_path).is_populated(*place) is None


# --- the scope, by its processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", [SESSION, f"/../docker-{ID}.scope"])
def test_without_the_files_the_processes_in_the_scope_tell(node: Node, path: str) -> None:
    node.tree.add(90, "bash", comm="bash", cgroup="0::/elsewhere.service\n")
    node.vllm(cgroup=f"0::{path}\n")
    node.look()
    lose(node, *SERVER)

    assert alive(node) == (0.0, [0.0])


def test_without_the_files_a_process_that_runs_on_keeps_the_scope_alive(node: Node) -> None:
    node.tree.add(90, "bash", comm="bash", cgroup=f"0::{SESSION}/deeper\n")
    node.vllm(cgroup=f"0::{SESSION}\n")
    node.look()
    lose(node, *SERVER)
    with_shell = alive(node)
    node.tree.end(90)
    node.look()

    assert (with_shell, alive(node)) == ((0.0, [1.0]), (0.0, [0.0]))


def test_without_the_files_a_later_process_is_the_next_start_and_a_zombie_is_nobody(node: Node) -> None:
    node.tree.add(90, (), comm="bash", state="Z", cgroup=f"0::{SESSION}\n")
    node.vllm(cgroup=f"0::{SESSION}\n")
    node.look()
    node.tree.end(*SERVER)
    node.look()
    node.tree.add(95, "bash", comm="bash", started=900.0, cgroup=f"0::{SESSION}\n")
    node.look()

    assert alive(node) == (0.0, [0.0])


def test_among_very_many_processes_nobody_is_asked(tmp_path: Path, node: Node) -> None:
    node.vllm(cgroup=f"0::{SESSION}\n")
    node.look()
    for pid in range(1000, 1001 + MOST_ASKED):
        folder = node.tree.folder(pid)
        folder.mkdir()
        (folder / "stat").write_text(
            (node.tree.folder(100) / "stat").read_text().replace("100 (vllm)", f"{pid} (sleep)", 1)
        )
    node.tree.add(99, "sleep", comm="sleep")  # raises the counter of forks
    lose(node, *SERVER)

    assert alive(node) == (0.0, [])


# --- the freezer -------------------------------------------------------------------------------------------


def frozen(node: Node) -> list[tuple[float | None, str | None]]:
    return [(reading.value, reading.reason) for reading in node.look().readings("server_frozen")]


@pytest.mark.parametrize(
    ("hierarchy", "line"),
    [("", "0::"), ("unified", "0::"), ("freezer", "6:freezer:"), ("cpu,freezer", "6:cpu,freezer:")],
)
def test_a_frozen_group_and_a_thawed_one_are_told_apart(node: Node, hierarchy: str, line: str) -> None:
    groups = Groups(node.root, hierarchy)
    groups.add(f"/docker/{ID}")
    node.vllm(cgroup=f"{line}/docker/{ID}\n")
    before = frozen(node)
    groups.add(f"/docker/{ID}", frozen=True)
    during = frozen(node)
    groups.add(f"/docker/{ID}")

    assert (before, during, frozen(node)) == ([(0.0, None)], [(1.0, None)], [(0.0, None)])


def test_the_freezer_of_a_group_is_read_once_in_a_look_however_many_servers_are_in_it(tmp_path: Path) -> None:
    """And at the next look again: see the test above."""
    events = Groups(tmp_path).add(UNIT) / "cgroup.events"
    files, line = CgroupFiles(tmp_path), f"0::{UNIT}\n"
    first = files.frozen(line)
    events.write_text("populated 1\nfrozen 1\n")
    second = files.frozen(line)
    files.begin()

    assert (first, second, files.frozen(line)) == (0.0, 0.0, 1.0)


def test_a_group_that_is_being_frozen_counts_as_frozen(node: Node) -> None:
    """One of its threads does not stop yet (it waits for a disk); the others did."""
    (Groups(node.root, "freezer").add("/x") / "freezer.state").write_text("FREEZING\n")
    node.vllm(cgroup="6:freezer:/x\n")

    assert frozen(node) == [(1.0, None)]


def test_in_a_hybrid_node_either_hierarchy_can_freeze(node: Node) -> None:
    unified, freezer = Groups(node.root, "unified"), Groups(node.root, "freezer")
    unified.add(UNIT)
    freezer.add("/x", frozen=True)
    node.vllm(cgroup=f"6:freezer:/x\n0::{UNIT}\n")
    one = frozen(node)
    freezer.add("/x")
    none = frozen(node)
    unified.add(UNIT, frozen=True)

    assert (one, none, frozen(node)) == ([(1.0, None)], [(0.0, None)], [(1.0, None)])


def test_without_control_groups_nothing_is_said_of_a_freezer(node: Node) -> None:
    node.vllm(cgroup=f"6:freezer:/x\n0::{UNIT}\n")

    assert frozen(node) == []


def test_a_kernel_that_does_not_tell_is_no_thawed_group(node: Node) -> None:
    (Groups(node.root).add(UNIT) / "cgroup.events").write_text("populated 1\n")
    node.vllm(cgroup=f"0::{UNIT}\n")

    assert frozen(node) == []


def test_a_file_that_cannot_be_read_is_counted(node: Node) -> None:
    events = Groups(node.root).add(UNIT) / "cgroup.events"
    events.unlink()
    events.mkdir()  # root may read any file
    node.vllm(cgroup=f"0::{UNIT}\n")

    assert frozen(node) == [(None, "error")]
    assert "error" in READ_REASONS


def test_a_server_whose_first_process_is_gone_is_not_said_to_be_frozen(node: Node) -> None:
    Groups(node.root).add(UNIT, frozen=True)
    node.vllm(cgroup=f"0::{UNIT}\n")
    node.look()
    lose(node, 100)

    assert (frozen(node), alive(node)) == ([], (0.0, [1.0]))
