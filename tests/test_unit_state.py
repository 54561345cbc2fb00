"""Is a unit being stopped on purpose: what systemctl says, without systemctl."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from process_node import Node
from stallwatch.sources.unit_state import DEADLINE_SECONDS, MOST_ASKED, UnitStates, find_program, is_stopping

UNIT = "/system.slice/llm.service"
STOPPING = "ActiveState=deactivating\nResult=success\nControlGroup=/system.slice/llm.service\n"
RUNNING = STOPPING.replace("deactivating", "active")
CRASHED = STOPPING.replace("success", "exit-code")


class Systemctl:
    """Stands for Popen: children that answer `says`, at once or (`hangs`) never."""

    def __init__(self, says: str = STOPPING, status: int = 0) -> None:
        self.says, self.status, self.hangs, self.fails = says, status, False, False
        self.asked: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.killed = 0

    def __call__(self, command: list[str], **given: Any) -> Child:
        if self.fails:
            raise FileNotFoundError
        self.asked.append(command)
        self.environments.append(given["env"])
        return Child(self)

    def units(self) -> UnitStates:
        return UnitStates("/usr/bin/systemctl", cast("type[subprocess.Popen[bytes]]", self))


class Child:
    """As much of a Popen as UnitStates uses."""

    def __init__(self, program: Systemctl) -> None:
        self._program = program
        reading, writing = os.pipe()
        os.write(writing, program.says.encode())
        os.close(writing)
        self.stdout = open(reading, "rb", buffering=0)  # noqa: SIM115  # closed by whoever asked

    def poll(self) -> int | None:
        return None if self._program.hangs else self._program.status

    def kill(self) -> None:
        self._program.killed += 1

    def wait(self, seconds: float) -> int:
        if self._program.hangs:
            raise subprocess.TimeoutExpired("systemctl", seconds)
        return 0


@pytest.fixture
def systemctl() -> Systemctl:
    return Systemctl()


@pytest.fixture
def node(tmp_path: Path, systemctl: Systemctl) -> Iterator[Node]:
    made = Node(tmp_path, units=systemctl.units())
    made.vllm(cgroup=f"0::{UNIT}\n")
    made.look()
    yield made
    made.source.close()


def stopping(node: Node) -> list[float | None]:
    return [reading.value for reading in node.readings("server_stopping")]


# --- what an answer means ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (STOPPING, True),
        (RUNNING, False),
        (CRASHED, False),
        (STOPPING.replace("success", "oom-kill"), False),
        (STOPPING.replace("deactivating", "failed"), False),
        # it is over: that it failed is certain, how else it ended is not
        (CRASHED.replace("deactivating", "failed").replace("/system.slice/llm.service", ""), False),
        (CRASHED.replace("deactivating", "activating").replace("/system.slice/llm.service", ""), False),
        (STOPPING.replace("deactivating", "inactive").replace("/system.slice/llm.service", ""), None),
        # not about this server: another unit of that name, one that is gone, no answer
        (STOPPING.replace("/system.slice", "/lxc.payload.c1/system.slice"), None),
        (STOPPING.replace("/system.slice/llm.service", ""), None),
        (STOPPING.replace("/system.slice/llm.service", "/"), None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_only_a_unit_that_is_stopped_without_a_failure_is_stopped_on_purpose(
    answer: str, expected: bool | None
) -> None:
    assert is_stopping(answer.encode(), f"4:memory:/\n0::{UNIT}/worker\n") is expected


def test_a_unit_of_that_name_inside_of_a_container_is_another_one() -> None:
    failed = CRASHED.replace("/system.slice/llm.service", "")

    assert is_stopping(failed.encode(), f"0::/lxc.payload.c1{UNIT}\n") is None
    assert is_stopping(failed.encode(), f"0::{UNIT}\n") is False


def test_systemctl_is_asked_only_where_it_speaks_for_this_machine(tmp_path: Path) -> None:
    """The host's root below another path: systemctl here would speak for the exporter's own container."""
    assert find_program(tmp_path) == ""
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert find_program(tmp_path) == ""


# --- when it is asked --------------------------------------------------------------------------------------


def test_while_nothing_is_missing_nobody_is_asked(node: Node, systemctl: Systemctl) -> None:
    for _ in range(3):
        node.look()

    assert (systemctl.asked, stopping(node)) == ([], [])


@pytest.mark.parametrize("pid", [100, 101, 111])
def test_when_something_went_missing_the_unit_is_asked_and_the_next_look_knows(
    node: Node, systemctl: Systemctl, pid: int
) -> None:
    node.tree.end(pid)
    first = stopping(node.look())

    assert (first, stopping(node.look(1.0))) == ([], [1.0])
    assert [command[-2:] for command in systemctl.asked] == [["--", "llm.service"]]
    assert systemctl.environments == [{"LC_ALL": "C"}]


def test_a_stop_that_has_begun_is_said_to_the_end_and_beyond(node: Node, systemctl: Systemctl) -> None:
    node.tree.end(110, 111)
    node.look()
    node.look()
    systemctl.says = ""
    node.tree.end(100, 101)
    for _ in range(3):
        node.look()

    assert (node.value("server_alive"), stopping(node), len(systemctl.asked)) == (0.0, [1.0], 1)


@pytest.mark.parametrize("says", [RUNNING, CRASHED])
def test_a_rank_that_dies_while_its_unit_runs_on_is_no_stop(node: Node, systemctl: Systemctl, says: str) -> None:
    systemctl.says = says
    node.tree.end(111)
    node.look()
    found = [stopping(node.look()), stopping(node.look())]

    assert found == [[0.0], []]  # an answer is of its moment
    assert len(systemctl.asked) == 1


def test_who_was_not_asked_says_nothing(node: Node, systemctl: Systemctl) -> None:
    systemctl.status = 1
    node.tree.end(111)
    node.look()

    assert stopping(node.look()) == []


@pytest.mark.parametrize("path", ["/", "/docker/" + "4f" * 32, "/user.slice/user-1000.slice/session-3.scope"])
def test_outside_of_units_nobody_is_asked(tmp_path: Path, systemctl: Systemctl, path: str) -> None:
    node = Node(tmp_path / "other", units=systemctl.units())
    node.vllm(cgroup=f"0::{path}\n")
    node.look()
    node.tree.end(111)
    node.look()

    assert (stopping(node.look()), systemctl.asked) == ([], [])


# --- nobody waits ------------------------------------------------------------------------------------------


def test_a_question_without_an_answer_in_time_is_ended(systemctl: Systemctl) -> None:
    units, systemctl.hangs = systemctl.units(), True
    units.ask("s", "a.service", 0.0)
    units.ask("s", "a.service", 0.5)
    early = (units.answer("s", 1.0), systemctl.killed)
    late = (units.answer("s", DEADLINE_SECONDS), systemctl.killed)

    assert (early, late, len(systemctl.asked)) == ((None, 0), (None, 1), 1)
    units.close()


def test_children_that_do_not_even_die_are_not_followed_by_ever_more(systemctl: Systemctl) -> None:
    units, systemctl.hangs = systemctl.units(), True
    for number in range(2 * MOST_ASKED):
        units.ask(str(number), "a.service", 0.0)
        units.answer(str(number), DEADLINE_SECONDS)

    assert len(systemctl.asked) == MOST_ASKED
    systemctl.hangs = False
    units.ask("s", "a.service", 0.0)
    assert units.answer("s", 0.0) == STOPPING.encode()
    units.close()


def test_where_systemctl_cannot_be_started_there_is_no_answer(systemctl: Systemctl) -> None:
    units, systemctl.fails = systemctl.units(), True
    units.ask("s", "a.service", 0.0)

    assert units.answer("s", 5.0) is None
    assert UnitStates("").answer("s", 5.0) is None


@pytest.mark.parametrize("unit", ["*.service", "a[b].service", "-H host.service", "a.service b.service", "a.slice"])
def test_a_name_that_would_be_a_pattern_or_an_option_is_not_asked_for(systemctl: Systemctl, unit: str) -> None:
    units = systemctl.units()
    units.ask("s", unit, 0.0)
    refused = list(systemctl.asked)
    units.ask("s", r"vllm\x2d7b@a:1.service", 0.0)

    assert (refused, len(systemctl.asked)) == ([], 1)
    units.close()
