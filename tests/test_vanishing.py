"""Every single read of a look fails, one after the other: what went, what cannot be opened, what is broken.

A look makes some hundreds of system calls below /proc.  Here the n-th of them fails, for every n, as it does when a
process ends at that very moment, or when no descriptor is left.  No failure may be taken for a death, a new start or a
number that is wrong, and the next look finds everything as it was.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from failing_reads import Reads
from proc_tree import Thread, threads
from process_node import FRAMEWORKS, Node
from stallwatch.model import Observation, Reading, Scene, Server
from stallwatch.sources import Host, Moment
from stallwatch.sources.logs.collector import Logs
from stallwatch.sources.sockets import Sockets
from stallwatch.sources.threads import Threads

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LISTENING = "   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 77 1 0000 100 0 0 10 0\n"
LINE = "(EngineCore pid=101) INFO 06-02 08:00:00 [x.py:1] Starting to load model org/m...\n"
WRITTEN = 1.8e9
PORT = 8000
NAME = f"vllm-8000@{12 * 'a'}"
WORKERS = 1
GROUP = f"0::/system.slice/docker-{64 * 'a'}.scope\n"
OF_FAILURES = ("unidentified_processes", "log_read_errors_total")
"""What counts failures, or what they leave unknown."""
VANISHED = (errno.ENOENT, errno.ESRCH)
UNREADABLE = (errno.EMFILE, errno.EACCES, errno.EIO)


class Machine:
    """vLLM with a worker, each with threads; one of them listens and writes a log.  Looked at by four collectors."""

    def __init__(self, folder: Path) -> None:
        (folder / "proc/self").mkdir(parents=True)
        (folder / "proc/self/cgroup").write_text("0::/\n")
        self.node = Node(folder)
        self.node.vllm(ranks=WORKERS, command=f"vllm serve org/m -tp {WORKERS} --port {PORT}", cgroup=GROUP)
        for pid in (100, 101, *range(110, 110 + WORKERS)):
            self.node.tree.change(pid, tasks={pid: Thread(), **threads(2, Thread(), pid * 100)})
            self._net(str(pid))
        self._net("self")
        self.node.tree.redirect(100, 5, "socket:[77]")
        host = Host(self.node.source._host.config, FRAMEWORKS, self.node.tree.root, folder)
        self.threads = Threads(host, machine="x86_64")
        self.sockets = Sockets(host, connect=lambda attempts, _: ["ok"] * len(attempts))
        (folder / "server.log").write_text(3 * LINE)
        os.utime(folder / "server.log", (WRITTEN, WRITTEN))
        self.node.tree.redirect(100, 1, folder / "server.log")
        self.logs = Logs(host)
        self.failed: set[str] = set()

    def _net(self, pid: str) -> None:
        folder = self.node.tree.root / pid
        for below in ("ns", "net"):
            (folder / below).mkdir(parents=True)
        (folder / "ns" / "net").symlink_to("net:[1]")
        (folder / "net" / "tcp").write_text(HEAD + LISTENING)
        (folder / "net" / "tcp6").write_text(HEAD)

    def look(self, seconds: float = 5.0) -> dict[tuple[str, ...], float | str | None]:
        """(signal, labels) -> value, or why there is none; a collector that failed as a whole is in `failed`."""
        self.failed = set()
        known = self.node.servers
        self._try("processes", lambda: self.node.look(seconds).items)
        if "processes" in self.failed:
            self.node.items = list(known)
        scene, now = Scene(self.node.servers), Moment(self.node.now, self.node.now)
        found = [*self.node.items]
        found += self._try("threads", lambda: list(self.threads.read(scene, now)))
        found += self._try("sockets", lambda: list(self.sockets.read(scene, now)))
        found += self._try("logs", lambda: list(self.logs.read(scene, now)))
        readings = [item for item in found if isinstance(item, Reading)]
        values = {(r.signal.name, *r.labels): r.reason if r.value is None else r.value for r in readings}
        return values | {("container", server.name): server.container for server in self.node.servers}

    def _try(self, collector: str, look: Callable[[], list[Any]]) -> list[Observation | object]:
        try:
            return list(look())
        except OSError:  # as the poller does: nothing of this look counts
            self.failed.add(collector)
            return []

    def close(self) -> None:
        self.node.source.close()
        self.threads.close()
        self.logs.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def constant(found: dict[tuple[str, ...], float | str | None]) -> dict[tuple[str, ...], float | str | None]:
    return {key: value for key, value in found.items() if key[0] not in OF_FAILURES}


def check_no_lie(
    found: dict[tuple[str, ...], float | str | None], right: dict[tuple[str, ...], float | str | None]
) -> None:
    """What was read is as it should be, or says that it could not be read."""
    for key, value in found.items():
        if isinstance(value, float) and key in right and isinstance(right[key], float):
            if key[0] == "threads":  # one thread less is what it is when one ended
                assert right[key] - 1 <= value <= right[key], key  # type: ignore[operator]
            elif key[0] == "log_read_errors_total":  # it counts the reads before, too
                assert value >= right[key], key  # type: ignore[operator]
            elif key[0] not in ("unidentified_processes", "port_foreign"):
                assert value == right[key], key
    alive = {key: value for key, value in found.items() if key[0] in ("rank_alive", "server_alive")}
    assert 0.0 not in alive.values()
    assert {value for key, value in found.items() if key[0] == "server_starts_total"} <= {1.0}
    assert {key[1] for key in found if key[0] == "server_starts_total"} <= {NAME}


@pytest.mark.parametrize("error", [*VANISHED, *UNREADABLE], ids=errno.errorcode.get)
@pytest.mark.parametrize("seconds", [5.0, 31.0], ids=["quick", "full"])
def test_a_read_that_fails_is_no_death_no_start_and_no_wrong_number(
    error: int, seconds: float, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.look()
    right = machine.look()
    reads = Reads(machine.node.tree.root, monkeypatch)
    reads.during(lambda: machine.look(seconds))
    n, total = 0, reads.seen
    while n < total:
        found = reads.during(lambda: machine.look(seconds), n, error)
        total = max(total, reads.seen)
        if error in VANISHED and reads.hit != str(machine.node.tree.root):  # that is the list of all processes
            assert not machine.failed, f"read {n}: {reads.hit}"
        check_no_lie(found, right)

        assert constant(machine.look()) == constant(right), f"behind read {n}"
        assert not machine.failed
        n += 1
    assert total > 40


@pytest.mark.parametrize(("error", "step"), [(errno.ENOENT, 1), (errno.EMFILE, 1)])
def test_a_read_that_fails_while_a_server_is_found_leaves_it_to_be_found_later(
    error: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Machine(tmp_path / "usual")
    reads = Reads(usual.node.tree.root, monkeypatch)
    reads.during(usual.look)
    total, right = reads.seen, constant(usual.look())
    usual.close()
    assert total > 40

    for n in range(0, total, step):
        machine = Machine(tmp_path / str(n))
        reads.move(machine.node.tree.root)
        reads.during(machine.look, n, error)
        for _ in range(2):
            machine.look(31.0)

        found = constant(machine.look())
        assert isinstance(machine.node.server, Server)
        assert found.keys() == right.keys(), f"behind read {n}"
        assert {k: v for k, v in found.items() if v != right[k]} == {}, f"behind read {n}"
        machine.close()


def test_a_process_that_really_goes_is_dead_at_the_second_look(machine: Machine) -> None:
    """The twin."""
    machine.look()
    machine.node.tree.end(110)

    assert machine.look()["rank_alive", NAME, "TP0"] == "vanished"
    assert machine.look()["rank_alive", NAME, "TP0"] == 0.0
