"""What anybody can do by starting processes that look like servers: bounded, counted, and nobody else's loss."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from process_node import Node
from stallwatch.config import Config, ConfiguredServer, Discovery, Limits, Match
from stallwatch.model import ProcessId
from stallwatch.sources import process_table
from stallwatch.sources.admission import FEW, TRUSTED, Berth, berth_of, has_room
from stallwatch.sources.blocking_reads import CommandLine
from stallwatch.sources.process_table import MOST_HUNG, MOST_HUNG_OF_ALL, in_turn

ID, OTHER = "ab" * 32, "cd" * 32
ATTACKER, VICTIM = 1666, 1000
IN_SESSION = "0::/user.slice/user-1666.slice/session-3.scope\n"
IN_UNIT = "0::/system.slice/vllm.service\n"
IN_CONTAINER = f"0::/system.slice/docker-{ID}.scope\n"
FAKES = 5000


# --- room ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "user", "berth"),
    [
        (IN_SESSION, ATTACKER, Berth(user=ATTACKER)),
        (IN_UNIT, ATTACKER, Berth("vllm.service")),
        (IN_CONTAINER, 0, Berth(ID)),
        ("0::/\n", 0, TRUSTED),
        ("", ATTACKER, Berth(user=ATTACKER)),
        ("0::/user.slice/user-0.slice/session-1.scope\n", 0, TRUSTED),
        # groups that a user made himself, named as a container and as a unit of the machine
        (f"0::/user.slice/user-1666.slice/user@1666.service/docker-{ID}.scope\n", ATTACKER, Berth(user=ATTACKER)),
        ("0::/user.slice/user-1666.slice/user@1666.service/vllm.service\n", ATTACKER, Berth(user=ATTACKER)),
    ],
)
def test_where_a_server_has_its_room(cgroup: str, user: int, berth: Berth) -> None:
    assert berth_of(cgroup, user) == berth


def filled(new: Berth, taken: list[Berth], most: int = 64) -> int:
    """How many of a kind get in."""
    count = 0
    while has_room(new, taken, most):
        taken.append(new)
        count += 1
    return count


def test_nobody_takes_all_the_room() -> None:
    taken: list[Berth] = []

    assert filled(Berth(user=ATTACKER), taken) == 32
    assert filled(Berth(user=ATTACKER + 1), taken) == 16  # with a friend: all users together
    assert filled(Berth(user=ATTACKER + 2), taken) == 0
    assert filled(Berth(OTHER), taken) == 16
    assert filled(TRUSTED, taken) == 0
    assert len(taken) == 64


def test_one_container_leaves_room_for_others() -> None:
    taken: list[Berth] = []

    assert filled(Berth(ID), taken) == 48
    assert filled(Berth("vllm.service"), taken) == 16


def test_what_is_trusted_may_take_all_of_it_and_few_are_not_shared_out() -> None:
    assert filled(TRUSTED, []) == 64
    assert filled(Berth(user=VICTIM), [], FEW - 1) == FEW - 1


# --- a crowd -------------------------------------------------------------------------------------------------


class Owned(Node):
    """Processes of several users: by their PID, for a tree of files has one owner."""

    def __init__(self, root: Path, config: Config | None = None) -> None:
        super().__init__(root, config)
        self.users: dict[int, int] = {}
        self.source._table._proc.owner = lambda pid: self.users.get(pid, 0)  # type: ignore[method-assign]

    def of(self, user: int, pid: int, command: str, **given: Any) -> None:
        self.users[pid] = user
        self.tree.add(pid, command, **given)

    def victims(self, first: int, **given: Any) -> None:
        self.users |= dict.fromkeys((first, first + 1, first + 10, first + 11), VICTIM)
        self.vllm(first, **given)


def crowd(node: Owned, number: int = FAKES, first: int = 10_000) -> None:
    """Somebody's processes, started before everybody else's: engines, ranks and servers."""
    titles = (
        "vllm serve org/m --port {}",
        "python -m sglang.launch_server --port {}",
        "VLLM::Worker_TP{}",
        "sglang::scheduler_TP{}",
    )
    for count in range(number):
        title = titles[count % len(titles)].format(20_000 + count)
        comm = title.split(" ")[0][:15]
        node.of(ATTACKER, first + count, title, comm=comm, started=10.0, cgroup=IN_SESSION)


def looked(node: Owned, times: int = 4) -> list[str]:
    for _ in range(times):
        node.look()
    return node.names


def test_a_real_server_is_found_and_named_among_5000_fakes(tmp_path: Path) -> None:
    node = Owned(tmp_path)
    crowd(node)
    node.vllm(100, command="vllm serve org/m -tp 2 --port 8000", started=900.0, cgroup=IN_UNIT)
    node.victims(200, command="vllm serve org/m -tp 2 --port 8001", started=901.0)

    names = looked(node)

    assert {"vllm-8000@vllm.service", "vllm-8001"} <= set(names)
    assert len(names) <= 34
    real = next(server for server in node.servers if server.name.endswith("vllm.service"))
    assert {process.rank for process in real.processes} == {"main", "engine", "TP0", "TP1"}
    assert node.source.dropped_servers >= FAKES // 2 - 32
    dropped = node.source.dropped_servers
    assert set(looked(node, 2)) == set(names)
    assert node.source.dropped_servers == dropped  # each of them once


def calls(node: Owned) -> int:
    """Functions that are called in a look at all of it, built-in ones too."""
    called = [0]

    def note(frame: FrameType, event: str, argument: object) -> None:
        called[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        looked(node)
    finally:
        sys.setprofile(before)
    return called[0]


def growth(folder: Path, look: Callable[[Owned], None]) -> float:
    """How many times as much is done of four times as many fakes; `look` is done with each of them."""
    few, many = Owned(folder / "few"), Owned(folder / "many")
    for node, number in ((few, 250), (many, 1000)):
        crowd(node, number)
        look(node)
    return calls(many) / calls(few)


def test_what_fakes_cost_grows_with_their_number_only(tmp_path: Path) -> None:
    assert growth(tmp_path, lambda node: None) < 5.0


def test_what_would_look_at_all_for_each_is_found(tmp_path: Path) -> None:
    def spoil(node: Owned) -> None:
        def owner(pid: int) -> int:
            return [node.users.get(pid, 0) for each in 4 * [*node.users] if abs(each)][-1]

        node.source._table._proc.owner = owner  # type: ignore[method-assign]

    assert growth(tmp_path, spoil) > 8.0


def test_discovery_by_user_leaves_none_of_them(tmp_path: Path) -> None:
    node = Owned(tmp_path, Config(discovery=Discovery(users=(str(VICTIM),))))
    crowd(node, 200)
    node.victims(100, started=900.0)

    assert looked(node) == ["vllm-8000"]
    assert node.source.dropped_servers == 0


def test_a_configured_server_has_its_name_whatever_was_there_before(tmp_path: Path) -> None:
    one = ConfiguredServer("mine", Match(unit="vllm.service"), framework="vllm")
    node = Owned(tmp_path, Config(servers=(one,), limits=Limits(servers=8)))
    for number in range(20):
        node.of(ATTACKER, 10_000 + number, "vllm serve m --port 8000", comm="vllm", cgroup=IN_SESSION)
    node.vllm(100, command="vllm serve org/m -tp 2 --port 8000", started=900.0, cgroup=IN_UNIT)

    names = looked(node)

    assert "mine" in names
    assert len(names) == 5  # half of the room is left for others


def test_a_fake_rank_below_nobody_is_nobodys(tmp_path: Path) -> None:
    node = Owned(tmp_path)
    node.vllm(100, started=900.0)
    for number in range(300):
        node.of(ATTACKER, 10_000 + number, f"VLLM::Worker_TP{number}", comm="VLLM::Worker_TP")

    looked(node)

    assert node.names == ["vllm-8000"]
    assert set(node.ranks.values()) == {"main", "engine", "TP0", "TP1"}


def test_command_lines_are_read_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who starts more in each look than are read in one keeps nobody waiting."""
    monkeypatch.setattr(process_table, "MOST_COMMANDS", 20)
    node = Owned(tmp_path)
    for look in range(3):
        crowd(node, 30, 10_000 + look * 100)
        if look == 1:
            node.victims(100, started=900.0)
        node.look()

    assert "vllm-8000" in node.names
    table = list(node.source._table)
    waiting = [known for known in table if known.command is None]
    assert waiting
    assert {known.user for known in waiting} == {ATTACKER}
    assert {known.user for known in in_turn(table)[:2]} == {VICTIM, ATTACKER}


class Hanging:
    """The command lines of some users' processes hang whoever reads them."""

    def __init__(self, node: Owned, users: range) -> None:
        self._node, self.users, self.hung = node, users, 0
        self._whole = node.reads.command_line

    def __call__(self, process: ProcessId) -> CommandLine:
        known = self._node.source._table.find(process)
        if known is not None and known.user in self.users:
            self.hung += 1
            return CommandLine(reason="timeout")
        return self._whole(process)


@pytest.mark.parametrize(("users", "most"), [(1, MOST_HUNG), (50, MOST_HUNG_OF_ALL)])
def test_command_lines_that_hang_cost_a_few_deadlines_in_a_look(users: int, most: int, tmp_path: Path) -> None:
    node = Owned(tmp_path)
    hanging = Hanging(node, range(5000, 5000 + users))
    node.source._table._read_command = hanging
    for number in range(200):
        node.of(5000 + number % users, 10_000 + number, "vllm serve m", comm="vllm")
    node.victims(100, started=900.0)
    for _ in range(6):
        before = hanging.hung
        node.look()

        assert hanging.hung - before <= most

    assert node.names == ["vllm-8000"] if users == 1 else True
