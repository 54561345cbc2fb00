"""What `sockets`, `endpoints` and `gpu` keep while hundreds of servers come and go: as much as after the first few.

The compressed year (tests/soak) has these three not, for they need peers and cards; here they are stand-ins.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from far_mount import FarMount
from gpu_node import GIB, GpuNode, card, instance
from gpu_node import answer as says
from proc_tree import DirectReads, ProcTree
from soak.sizes import by_place
from stallwatch.config import Config, ConfiguredServer, Match
from stallwatch.frameworks import Framework, load_frameworks
from stallwatch.model import HealthTarget, Listener, ProcessId, Reading, Scene, Server
from stallwatch.sources import Host, Moment
from stallwatch.sources.endpoints import Endpoints
from stallwatch.sources.gpus.xid import Lost, Xid
from stallwatch.sources.http_probe import Names
from stallwatch.sources.processes import Processes
from stallwatch.sources.sockets import Sockets
from test_endpoints import Kind, Peer, answer
from test_endpoints import server as one_that_answers
from test_sockets import OURS, Answers, Tree, row
from test_sockets import server as one_that_listens

FEW, MANY = 10, 200

Life = Callable[[int], None]
"""One server comes, is looked at, and goes; the next look is without it."""


def sizes(source: object) -> dict[str, int]:
    return {place: number for place, number in by_place(vars(source)).items() if number}


def assert_nothing_stays(source: object, live: Life) -> None:
    for number in range(FEW):
        live(number)
    few = sizes(source)
    for number in range(FEW, MANY):
        live(number)

    assert sizes(source) == few


# --- sockets --------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


class Listening:
    """Servers that listen, in our namespace and in others; some whose port is another's or cannot be seen."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        answers = Answers({"127.0.0.1": "ok", "10.0.0.9": "ok"})
        self.source = Sockets(Host(Config(), (), tree.root), connect=answers)
        self.kept = 0

    def look(self, *servers: Server) -> list[Reading]:
        found = list(self.source.read(Scene(servers), Moment(0.0, 0.0)))
        return [item for item in found if isinstance(item, Reading)]

    def live(self, number: int) -> None:
        pid, port = 1000 + number, 8000 + number
        far = number % 2
        self.tree.process(pid, f"net:[{number}]" if far else OURS, sockets=[] if number % 5 == 4 else [pid])
        for table in {pid, "self" if not far else pid}:
            self.tree.table(table, row("10.0.0.9" if far else "0.0.0.0", port, pid))
        server = one_that_listens(pid, name=f"vllm-{number}", ports=() if number % 3 == 2 else (port,))
        told = self.look(server)
        self.kept = max(self.kept, sum(sizes(self.source).values()))
        assert number % 5 == 4 or 1.0 in {r.value for r in told if r.signal.name == "port_listening"}
        shutil.rmtree(self.tree.root / str(pid))
        self.look(server)  # it is looked at once more while nobody knows that it went
        self.look()


def test_of_servers_that_listened_and_went_nothing_stays(tree: Tree) -> None:
    machine = Listening(tree)
    assert_nothing_stays(machine.source, machine.live)

    assert machine.kept > sum(sizes(machine.source).values())  # or nothing was ever kept


# --- endpoints ------------------------------------------------------------------------------------------------


class Asked:
    """Servers whose page is there, is not there, or who are asked under a name with a token on a far mount."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.far = FarMount(folder / "far", folder / "proc", monkeypatch)
        host = Host(Config(), (cast(Framework, Kind()),), folder / "proc")
        self.source = Endpoints(host, deadline_seconds=60.0, names=Names(lambda _: ["127.0.0.1"]))
        self.far.watch(self.source._far.guards)
        self.kept = 0
        self.peer = Peer(lambda sock, asked: sock.sendall(answer(404 if b"/metrics" in asked else 200)))
        self.statuses: set[float | None] = set()

    def look(self, config: Config, *servers: Server) -> None:
        self.source.configure(config)
        listeners = tuple(Listener(server.name, self.peer.port, "127.0.0.1") for server in servers)
        found = list(self.source.read(Scene(servers, listeners=listeners), Moment(0.0, 0.0)))
        readings = [item for item in found if isinstance(item, Reading)]
        self.statuses |= {reading.value for reading in readings if reading.signal.name == "health_status"}

    def live(self, number: int) -> None:
        server = one_that_answers(f"vllm-{number}", (self.peer.port,), root=ProcessId(number, 1))
        config = Config()
        if number % 2:
            token = self.far.folder / f"token-{number}"
            token.write_text("abc")
            target = HealthTarget(f"http://host-{number}.example:{self.peer.port}/", bearer_file=str(token))
            server = one_that_answers(server.name, (self.peer.port,), root=server.root, health=target)
            config = Config(servers=(ConfiguredServer(server.name, Match(port=self.peer.port), health=target),))
        self.look(config, server)
        self.look(config, server)
        self.kept = max(self.kept, sum(sizes(self.source).values()))
        self.look(Config())


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    made = Asked(tmp_path, monkeypatch)
    yield made
    made.peer.close()


def test_of_servers_that_were_asked_and_went_nothing_stays(asked: Asked) -> None:
    assert_nothing_stays(asked.source, asked.live)

    assert asked.kept > sum(sizes(asked.source).values())
    assert {200, 404} <= asked.statuses
    assert b"Authorization: Bearer abc" in b"".join(asked.peer.asked)


def test_while_it_is_configured_the_token_and_the_address_of_a_server_that_is_away_stay(asked: Asked) -> None:
    """The twin: the mount, or whoever knows the name, may not answer when it comes again."""
    token = asked.far.folder / "token"
    token.write_text("abc")
    target = HealthTarget(f"http://host.example:{asked.peer.port}/", bearer_file=str(token))
    config = Config(servers=(ConfiguredServer("a", Match(port=asked.peer.port), health=target),))
    asked.look(config, one_that_answers("a", health=target))
    kept = sizes(asked.source)
    asked.look(config)
    asked.look(config)

    assert "abc" in repr(asked.source._far._asked)
    assert asked.source._names._found["host.example"] == ("127.0.0.1",)
    asked.look(Config())

    assert "abc" not in repr(asked.source._far._asked)
    assert sum(sizes(asked.source).values()) < sum(kept.values())


# --- gpu ------------------------------------------------------------------------------------------------------


class OnCards:
    """Two cards for ever.  Servers on them with strangers, instances that are made and removed, faults."""

    def __init__(self, folder: Path) -> None:
        self.node = GpuNode(folder)
        self.kept = 0
        self.told: set[str] = set()

    def look(self, rows: list[tuple[int, int | None]], *instances: int, codes: dict[str, int] | None = None) -> None:
        cards = [card(0, rows, codes=codes or {}), card(1, None, mig="enabled")]
        cards += [instance(1, number, [(pid, GIB) for pid, _ in rows[:1]]) for number in instances]
        self.node.look(says(*cards), 30.0)
        self.told |= {reading.signal.name for reading in self.node.found}

    def live(self, number: int) -> None:
        pid = 1000 + 10 * number
        self.node.serve(f"vllm-{number}", {"TP0": pid, "TP1": pid + 1})
        self.node.tree.add(pid + 2, "train.py")
        self.node.tree.add(pid + 3, "helper", ppid=pid)
        rows: list[tuple[int, int | None]] = [(pid + each, GIB) for each in range(4)]
        self.node.kernel.faults = [Xid("0000:10:00.0", 31, pid, float(number)), Lost("0000:11:00.0", float(number))]
        self.look(rows, number, codes={"pcie_receive": 3})
        self.look(rows, number)
        self.kept = max(self.kept, sum(sizes(self.node.source).values()))
        self.node.tree.end(pid, pid + 1, pid + 2, pid + 3)
        self.look(rows, number)  # they are gone, and still listed
        self.node.servers.clear()
        self.look(rows)
        for _ in range(2):
            self.look([])


def test_of_servers_that_were_on_cards_and_went_nothing_stays(tmp_path: Path) -> None:
    machine = OnCards(tmp_path)
    assert_nothing_stays(machine.node.source, machine.live)

    assert machine.kept > sum(sizes(machine.node.source).values())
    assert {"gpu_process_memory_bytes", "gpu_unowned_memory_bytes", "gpu_xid_errors_total"} <= machine.told


# --- what another configuration leaves behind -------------------------------------------------------------------


def test_of_files_with_pids_on_a_far_mount_that_are_not_configured_any_more_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = ProcTree(tmp_path / "proc")
    far = FarMount(tmp_path / "far", tree.root, monkeypatch)
    source = Processes(Host(Config(), load_frameworks(), tree.root, tmp_path), DirectReads(tree))
    far.watch(source._far.guards)
    at = [1000.0]

    def live(number: int) -> None:
        at[0] += 700.0  # more than what is known of a server that ended is kept
        tree.add(100 + number, "anything", comm="python3")
        (far.folder / f"{number}.pid").write_text(str(100 + number))
        match = Match(pid_file=f"/far/{number}.pid")
        source.configure(Config(servers=(ConfiguredServer("a", match, framework="vllm"),)))
        found = list(source.read(Scene(), Moment(at[0], at[0])))
        assert [item.root.pid for item in found if isinstance(item, Server)] == [100 + number]
        tree.end(100 + number)
        for _ in range(2):
            at[0] += 31.0
            list(source.read(Scene(), Moment(at[0], at[0])))

    assert_nothing_stays(source._far, live)
    source.close()
