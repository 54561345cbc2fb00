from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stallwatch.config import Config
from stallwatch.sources import Host, Moment
from stallwatch.sources.blocking_reads import MOST_ABANDONED
from stallwatch.sources.shm import GIVE_UP_SECONDS, LOOK_SECONDS, SHARE, Orphans, start_looker

MIB = 1 << 20
FUTURE = 4e9
"""Unix seconds at which every file of a test is old."""
HANGS = "import time; time.sleep(600)"


class Node:
    """A folder in the place of /dev/shm, and children that say what they are told to; `asked` is what they were asked.

    Each is a real program: what is tested is how it is waited for and ended.
    """

    def __init__(self, root: Path) -> None:
        self.shm = root / "dev/shm"
        self.shm.mkdir(parents=True)
        self.log = root / "asked"
        self.programs: list[str] = []
        self.children: list[subprocess.Popen[bytes]] = []
        self.orphans = Orphans(Host(Config(), (), proc=root / "proc", root=root), self.start, turn_seconds=0.0)
        self.now = 1000.0

    def start(self, proc: Path) -> subprocess.Popen[bytes]:
        if not self.programs:
            raise FileNotFoundError(errno.ENOENT, "no program")
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self.programs.pop(0), str(self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.children.append(child)
        return child

    def says(self, **answer: Any) -> None:
        text = json.dumps({"holders": [], "cpu": 0.0, **answer})
        self.programs.append(f"import sys; open(sys.argv[1], 'w').write(input()); print('''{text}''')")

    def file(self, name: str, size: int = 2 * MIB) -> int:
        path = self.shm / name
        path.write_bytes(bytes(size))
        return path.stat().st_ino

    def read(self, after: float = 0.0) -> float | str | None:
        """The value or the reason; None when nothing is told."""
        self.now += after
        found = list(self.orphans.read(Moment(self.now, FUTURE)))
        assert len(found) <= 1
        return (found[0].value if found[0].reason is None else found[0].reason) if found else None

    def answered(self, after: float = 0.0) -> float | str | None:
        """As `read`, when the child has had the time it needs."""
        said = self.read(after)
        if self.children:
            self.children[-1].wait(30)
        return self.read() if self.orphans._look is not None else said


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    try:
        yield node
    finally:
        node.orphans.close()
        for child in node.children:
            child.kill()
            child.wait(10)


def test_an_empty_folder_has_no_orphans_and_needs_no_child(node: Node) -> None:
    node.file("small", MIB // 2)

    assert (node.read(), node.read(LOOK_SECONDS)) == (0.0, 0.0)
    assert node.children == []


def test_without_the_folder_nothing_is_known(node: Node) -> None:
    node.shm.rmdir()

    assert (node.read(), node.read()) == ("vanished", None)


def test_what_nobody_holds_is_told_until_the_next_look(node: Node) -> None:
    left = node.file("left")
    node.says(unheld={left: 2 * MIB})

    assert node.answered() == 2 * MIB
    assert node.read(LOOK_SECONDS - 1) == 2 * MIB
    assert len(node.children) == 1


def test_what_is_held_is_none(node: Node) -> None:
    node.file("held")
    node.says(unheld={})

    assert node.answered() == 0.0


def test_little_that_nobody_holds_counts_as_none(node: Node) -> None:
    node.file("held")
    small = node.file("small", MIB // 2)
    node.says(unheld={small: MIB // 2})

    assert node.answered() == 0.0


def test_a_segment_that_was_held_a_look_ago_may_be_changing_hands(node: Node) -> None:
    first, second = node.file("first"), node.file("second")
    node.says(unheld={first: 2 * MIB})
    node.says(unheld={first: 2 * MIB, second: 2 * MIB})
    node.says(unheld={first: 2 * MIB, second: 2 * MIB})

    assert [node.answered(LOOK_SECONDS) for _ in range(3)] == [2 * MIB, 2 * MIB, 4 * MIB]


def test_who_held_something_is_asked_first_at_the_next_look(node: Node) -> None:
    node.file("held")
    node.says(unheld={}, holders=[41, 42])
    node.says(unheld={})
    node.answered()
    node.answered(LOOK_SECONDS)

    assert json.loads(node.log.read_text()) == {"folder": str(node.shm), "first": [41, 42]}


def test_a_dear_look_is_seldom_repeated_but_what_is_removed_is_seen(node: Node) -> None:
    left, gone = node.file("left"), node.file("gone")
    node.says(unheld={left: 2 * MIB, gone: 2 * MIB}, cpu=3.0)
    node.says(unheld={left: 2 * MIB})
    before = node.answered()

    (node.shm / "gone").unlink()

    assert (before, node.read(LOOK_SECONDS)) == (4 * MIB, 2 * MIB)
    assert len(node.children) == 1
    node.answered(3.0 * SHARE)
    assert len(node.children) == 2


def test_where_it_cannot_be_known_the_reason_is_told_once(node: Node) -> None:
    left = node.file("left")
    node.says(unheld={left: 2 * MIB})
    node.says(reason="permission")
    node.says(unheld={left: 2 * MIB})

    told = [node.answered(), node.answered(LOOK_SECONDS), node.read(), node.answered(LOOK_SECONDS)]

    assert told == [2 * MIB, "permission", None, 2 * MIB]


@pytest.mark.parametrize("program", ["", "print('no answer')", "import sys; sys.exit(3)", "print('x' * 9000)"])
def test_a_child_that_fails_is_an_error(node: Node, program: str) -> None:
    left = node.file("left")
    node.programs.append(program)
    node.says(unheld={left: 2 * MIB})

    assert (node.answered(), node.answered(LOOK_SECONDS)) == ("error", 2 * MIB)


def test_a_child_that_does_not_start_is_told(node: Node) -> None:
    node.file("left")

    assert (node.read(), node.read()) == ("vanished", None)


def test_a_child_that_hangs_is_left_alone_for_a_while_and_ended(node: Node) -> None:
    left = node.file("left")
    node.programs.append(HANGS)
    node.says(unheld={left: 2 * MIB})

    told = [node.read(), node.read(GIVE_UP_SECONDS - 1), node.read(1.0), node.read()]

    assert told == [None, None, "timeout", None]
    assert node.children[0].poll() is not None
    assert node.answered(LOOK_SECONDS) == 2 * MIB


def test_children_that_do_not_even_die_are_not_joined_by_more(node: Node) -> None:
    left = node.file("left")
    node.says(unheld={left: 2 * MIB})
    immortal = [subprocess.Popen([sys.executable, "-c", HANGS]) for _ in range(MOST_ABANDONED)]
    node.children += immortal
    node.orphans._abandoned = list(immortal)

    refused = node.read(LOOK_SECONDS)
    for child in immortal:
        child.kill()
        child.wait(10)

    assert (refused, node.answered(LOOK_SECONDS)) == ("timeout", 2 * MIB)


def test_closing_ends_the_child(node: Node) -> None:
    node.file("left")
    node.programs.append(HANGS)
    node.read()

    node.orphans.close()

    assert node.children[0].poll() is not None


def test_the_real_child_answers(tmp_path: Path) -> None:
    """Nobody is seen in this /proc, so that nothing is known of a file that is not young."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev/shm").mkdir(parents=True)

    child = start_looker(tmp_path / "proc")
    out, _ = child.communicate(json.dumps({"folder": str(tmp_path / "dev/shm"), "first": []}).encode() + b"\n", 30)

    found = json.loads(out)
    assert (child.returncode, found["unheld"], found["holders"]) == (0, {}, [])
    assert 0 < found["cpu"] < 10
