"""Where the logs of a server are, on a folder that looks like /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from process_node import Node, configured
from stallwatch.config import ConfiguredServer, Match
from stallwatch.model import LogPlace


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.source.close()


def logs(node: Node) -> list[tuple[str, str | None]]:
    return [(place.name, place.reason) for place in node.look().server.logs]


def test_two_files_are_two_logs_opened_through_the_descriptor(node: Node) -> None:
    node.vllm()
    for fd, name in ((1, "serve.log"), (2, "errors.log")):
        (node.root / name).write_text("x")
        node.tree.redirect(100, fd, node.root / name)

    assert logs(node) == [("serve.log", None), ("errors.log", None)]
    status = (node.root / "serve.log").stat()
    assert node.server.logs[0] == LogPlace(
        "serve.log", str(node.tree.folder(100) / "fd/1"), None, status.st_dev, status.st_ino
    )


def test_one_file_for_both_streams_is_read_once(node: Node) -> None:
    node.vllm()
    (node.root / "a.log").write_text("x")
    for fd in (1, 2):
        node.tree.redirect(100, fd, node.root / "a.log")

    assert logs(node) == [("a.log", None)]


def test_two_files_of_one_name_are_told_apart(node: Node) -> None:
    node.vllm()
    for fd, folder in ((1, "a"), (2, "b")):
        (node.root / folder).mkdir()
        (node.root / folder / "x.log").write_text("x")
        node.tree.redirect(100, fd, node.root / folder / "x.log")

    assert logs(node) == [("x.log", None), ("stderr", None)]


def test_a_file_that_was_deleted_is_read_through_the_descriptor(node: Node) -> None:
    node.vllm()
    (node.root / "a.log (deleted)").write_text("x")
    node.tree.redirect(100, 1, node.root / "a.log (deleted)")
    node.tree.redirect(100, 2, "/dev/null")

    assert logs(node) == [("a.log", None), ("stderr", "absent")]


@pytest.mark.parametrize("target", ["/dev/null", "/dev/ptmx"])
def test_a_device_is_no_log(node: Node, target: str) -> None:
    node.vllm()
    for fd in (1, 2):
        node.tree.redirect(100, fd, target)

    assert logs(node) == [("stdout", "absent"), ("stderr", "absent")]


def test_a_pipe_is_no_log_and_is_never_opened(node: Node) -> None:
    """Whoever opens it steals the data; here an open would not even return."""
    node.vllm()
    os.mkfifo(node.root / "pipe")
    for fd in (1, 2):
        node.tree.redirect(100, fd, node.root / "pipe")

    assert logs(node) == [("stdout", "absent"), ("stderr", "absent")]


def test_a_stream_that_cannot_be_seen_says_so(node: Node) -> None:
    node.vllm()
    node.tree.redirect(100, 1, "/dev/null")

    assert logs(node) == [("stdout", "absent"), ("stderr", "vanished")]


def test_configured_logs_stand_before_the_streams(tmp_path: Path) -> None:
    node = configured(tmp_path, ConfiguredServer("mine", Match(port=8000), logs=("/var/log/x/*.log", "/b.log")))
    node.vllm()

    assert node.look().server.logs == (
        LogPlace("*.log", "/var/log/x/*.log", owner=os.geteuid()),
        LogPlace("b.log", "/b.log", owner=os.geteuid()),
    )


def test_after_the_first_process_the_streams_of_a_living_one_count(node: Node) -> None:
    node.vllm()
    (node.root / "a.log").write_text("x")
    node.tree.redirect(101, 1, node.root / "a.log")
    node.look()
    node.tree.end(100)

    assert logs(node) == [("a.log", None), ("stderr", "vanished")]


def test_a_log_keeps_its_name_when_it_is_renamed_and_gives_it_to_the_file_that_takes_its_place(node: Node) -> None:
    """Rotation by renaming: until the server opens the new file it writes to the old one."""
    node.vllm()
    log, old = node.root / "s.log", node.root / "s.log.1"
    log.write_text("x")
    node.tree.redirect(100, 1, log)
    node.tree.redirect(100, 2, "/dev/null")
    first, inode = logs(node)[0], node.server.logs[0].inode
    log.rename(old)
    node.tree.redirect(100, 1, old)
    renamed, same = logs(node)[0], node.server.logs[0].inode
    log.write_text("y")
    other = node.root / "s-2.log"
    other.write_text("z")
    node.tree.redirect(100, 1, other)

    assert [first, renamed, logs(node)[0]] == [("s.log", None)] * 3
    assert inode == same != node.server.logs[0].inode


def test_a_log_keeps_its_name_while_it_cannot_be_seen(node: Node) -> None:
    node.vllm()
    (node.root / "s.log").write_text("x")
    node.tree.redirect(100, 1, node.root / "s.log")
    node.tree.redirect(100, 2, "/dev/null")
    node.look()
    stream = node.tree.folder(100) / "fd/1"
    stream.unlink()

    assert logs(node)[0] == ("s.log", "vanished")
    node.tree.redirect(100, 1, node.root / "s.log")
    assert logs(node)[0] == ("s.log", None)


def test_a_stream_that_becomes_a_file_is_named_by_it(node: Node) -> None:
    node.vllm()
    for fd in (1, 2):
        node.tree.redirect(100, fd, "/dev/null")
    before = logs(node)
    (node.root / "s.log").write_text("x")
    node.tree.redirect(100, 1, node.root / "s.log")

    assert (before[0], logs(node)[0]) == (("stdout", "absent"), ("s.log", None))


def test_a_file_keeps_its_name_when_another_stream_leads_to_it(node: Node) -> None:
    node.vllm()
    (node.root / "s.log").write_text("x")
    node.tree.redirect(100, 1, node.root / "s.log")
    node.tree.redirect(100, 2, "/dev/null")
    node.look()
    node.tree.redirect(100, 1, "/dev/null")
    node.tree.redirect(100, 2, node.root / "s.log")

    assert logs(node) == [("stdout", "absent"), ("s.log", None)]


def test_configured_logs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = ("/a/server.log", "/b/server.log", "/a/server.log", "/c/server.log-2")
    node = configured(tmp_path, ConfiguredServer("mine", Match(port=8000), logs=paths))
    node.vllm()

    assert node.look().server.logs == (
        LogPlace("server.log", "/a/server.log", owner=os.geteuid()),
        LogPlace("server.log-2", "/b/server.log", owner=os.geteuid()),
        LogPlace("server.log-2-2", "/c/server.log-2", owner=os.geteuid()),
    )
