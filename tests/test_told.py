"""What did not change is told by the very same readings, and what did is told anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proc_tree import DirectReads
from process_node import FRAMEWORKS, Node
from stallwatch.config import Config
from stallwatch.model import GpuUse, Reading, Server
from stallwatch.signals import CPU_SECONDS, RESIDENT_MEMORY
from stallwatch.sources import Host, readings
from stallwatch.sources.members import Tracked
from stallwatch.sources.processes import Processes
from stallwatch.sources.told import Told, again

FIRST = [
    CPU_SECONDS.read(1.0, "s", "TP0"),
    CPU_SECONDS.read(5.0, "s", "TP1"),
    RESIDENT_MEMORY.missing("error", "s", "TP0"),
]


def told(found: object, made: Iterable[Reading], before: Told | None = None) -> Told:
    return again(before, found, lambda: made)


def test_of_the_same_nothing_is_made_anew() -> None:
    before = told([1, 2], FIRST)

    assert again(before, [1, 2], lambda: pytest.fail("made anew")) is before


def test_what_changed_is_told_and_the_rest_is_the_very_same() -> None:
    before = told(1, FIRST)
    changed = [replace(FIRST[0]), replace(FIRST[1], value=6.0), replace(FIRST[2], reason="timeout")]

    after = told(2, changed, before).readings

    assert after == tuple(changed)
    assert [new is old for new, old in zip(after, FIRST, strict=True)] == [True, False, False]


def test_readings_that_come_and_go_stand_where_they_are_made() -> None:
    after = told(2, FIRST[1:], told(1, FIRST[:2])).readings

    assert after == tuple(FIRST[1:])
    assert after[0] is FIRST[1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    made.vllm(ranks=2)
    yield made
    made.source.close()


def test_a_server_whose_processes_did_nothing_is_told_by_the_very_same(node: Node) -> None:
    before = list(node.look().items)
    after = node.look().items

    assert len(after) == len(before) > 40
    kept = [new is old for new, old in zip(after, before, strict=True) if isinstance(new, Reading | Server)]
    assert kept.count(False) == 1  # what is said of the whole node


def _move(node: Node, pid: int = 110, **given: Any) -> None:
    node.tree.change(pid, **given)


def _end(node: Node, *pids: int) -> None:
    node.tree.end(*pids)


def _replace_rank(node: Node) -> None:
    node.tree.replace(111, "VLLM::Worker_TP1", comm="VLLM::Worker_TP", ppid=101, started=400.0)


def _use_cards(node: Node) -> None:
    node.gpu_uses = (GpuUse("GPU-1", 110), GpuUse("GPU-2", 110))


CHANGES: dict[str, Callable[[Node], object]] = {
    "cpu": lambda node: _move(node, cpu=9.0),
    "memory": lambda node: _move(node, resident=5 << 20),
    "faults of a front end": lambda node: _move(node, 100, minor=70),
    "io": lambda node: _move(node, io={"rchar": 5, "read_bytes": 4096}),
    "no io": lambda node: (node.tree.folder(110) / "io").write_text("x"),
    "garbled": lambda node: (node.tree.folder(110) / "stat").write_text("110 (x"),
    "a debugger": lambda node: _move(node, tracer=7),
    "a zombie": lambda node: _move(node, state="Z", threads=3),
    "a card": _use_cards,
    "another title": lambda node: _move(node, command="VLLM::Worker_TP5", comm="VLLM::Worker_TP5"),
    "another comm": lambda node: _move(node, comm="VLLM::Work"),
    "a tool": lambda node: node.tree.add(130, "nvcc x.cu", comm="nvcc", ppid=110, cpu=3.0),
    "another rank": lambda node: node.tree.add(112, "VLLM::Worker_TP2", comm="VLLM::Worker_TP", ppid=101),
    "a rank ends": lambda node: _end(node, 110),
    "a rank is replaced": _replace_rank,
    "the engine ends": lambda node: _end(node, 101),
    "the server ends": lambda node: _end(node, 100),
    "all end": lambda node: _end(node, 100, 101, 110, 111),
    "a log": lambda node: node.tree.redirect(100, 1, node.root / "proc/stat"),
    "a container": lambda node: _move(node, 100, cgroup=f"0::/system.slice/docker-{'a' * 64}.scope\n"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_told_is_what_a_source_without_a_memory_tells(
    node: Node, change: Callable[[Node], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sources over the same processes; one of them makes everything anew, at each look."""
    other = copy(node)
    other.source = Processes(Host(Config(), FRAMEWORKS, node.tree.root, node.root), DirectReads(node.tree))
    told = []
    for number in range(5):
        if number == 2:
            change(node)
        told.append(_told_in(node.look()))
        other.rank_names, other.gpu_uses = node.rank_names, node.gpu_uses
        with monkeypatch.context() as patch:
            patch.setattr(readings, "again", lambda before, found, make: Told(found, tuple(make())))
            patch.setattr(Tracked, "shown", property(lambda self: None, lambda self, shown: None))
            assert told[-1] == _told_in(other.look())
    other.source.close()

    assert told[0] == told[1] != told[2]


def _told_in(node: Node) -> list[object]:
    return [item for item in node.items if isinstance(item, Reading | Server)]
