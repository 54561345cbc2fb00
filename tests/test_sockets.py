"""Trees that look like /proc, and a connect that answers from a table."""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.config import Config
from stallwatch.model import Listener, Observation, Process, ProcessId, Reading, Scene, Server
from stallwatch.signals import PORT_FOREIGN
from stallwatch.sources import Host, Moment
from stallwatch.sources.connections import Attempt, SocketAddress
from stallwatch.sources.socket_diag import Row
from stallwatch.sources.sockets import (
    Sockets,
    format_address,
    has_peer,
    listening_rows,
    own_addresses,
    parse_address,
)

OURS, THEIRS = "net:[4026531840]", "net:[4026532999]"
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ANY4, LOOP4, ANY6, LOOP6 = "0.0.0.0", "127.0.0.1", "::", "::1"

FIB_TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
     |-- 169.254.7.7
        /32 host LOCAL
     +-- 10.42.0.0/24 2 0 2
        |-- 10.42.0.0
           /24 link UNICAST
        |-- 10.42.0.17
           /32 host LOCAL
        |-- 10.42.0.255
           /32 link BROADCAST
"""


def row(address: str, port: int, inode: int, state: str = "0A", queue: int = 0) -> str:
    local = format_address(ipaddress.ip_address(address)).decode()
    rest = f"{'0' * len(local)}:0000 {state} 00000000:{queue:08X} 00:00000000 00000000  1000        0 {inode} 1"
    return f"   0: {local}:{port:04X} {rest} 0000000000000000 100 0 0 10 0\n"


class Tree:
    """A /proc of the test's own making."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process("self", OURS)

    def process(self, pid: int | str, namespace: str = OURS, sockets: Sequence[int] = ()) -> None:
        folder = self.root / str(pid)
        shutil.rmtree(folder, ignore_errors=True)
        for below in ("ns", "net", "fd"):
            (folder / below).mkdir(parents=True)
        (folder / "ns/net").symlink_to(namespace)
        (folder / "fd/0").symlink_to("/dev/null")
        for number, inode in enumerate(sockets, 3):
            (folder / f"fd/{number}").symlink_to(f"socket:[{inode}]")
        self.table(pid)

    def table(self, pid: int | str, *rows: str) -> None:
        for name, wide in (("tcp", False), ("tcp6", True)):
            text = "".join(line for line in rows if (len(line.split()[1]) > 20) == wide)
            (self.root / f"{pid}/net/{name}").write_text(HEAD + text)


class Answers:
    """In place of the network: a result per address, `refused` for all others; keeps what was tried."""

    def __init__(self, results: Mapping[str, str] | None = None) -> None:
        self.results = dict(results or {})
        self.tried: list[Attempt] = []

    def __call__(self, attempts: Sequence[Attempt], seconds: float) -> list[str]:
        self.tried += attempts
        return [self.results.get(attempt.target.address, "refused") for attempt in attempts]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def server(*pids: int, name: str = "vllm-8000", ports: tuple[int, ...] = (8000,), role: str = "server") -> Server:
    ids = [ProcessId(pid, 1) for pid in pids]
    processes = tuple(Process(one, "main" if one is ids[0] else "worker") for one in ids)
    assert role in ("server", "embedded")
    return Server(name, "vllm", role, ids[0], 0.0, processes, ports=ports)  # type: ignore[arg-type]


def source(tree: Tree, answers: Answers | None = None) -> Sockets:
    host = Host(config=Config(), frameworks=(), proc=tree.root)
    return Sockets(host, connect=answers or Answers())


def look(sockets: Sockets, *servers: Server) -> list[Observation]:
    return list(sockets.read(Scene(servers=servers), Moment(0.0, 0.0)))


def values(seen: Sequence[Observation]) -> dict[tuple[str, ...], float | str | None]:
    """Readings by name and labels after the server; a missing one shows its reason."""
    return {
        (item.signal.name, *item.labels[1:]): item.reason if item.value is None else item.value
        for item in seen
        if isinstance(item, Reading)
    }


def listeners(seen: Sequence[Observation]) -> list[Listener]:
    return [item for item in seen if isinstance(item, Listener)]


def test_a_port_held_by_a_process_of_the_server_listens(tree: Tree) -> None:
    tree.process(10)
    tree.process(11, sockets=[501])
    tree.table(10, row(ANY4, 8000, 501, queue=3))

    seen = look(source(tree, Answers({LOOP4: "ok"})), server(10, 11))

    assert values(seen) == {
        ("port_listening", "8000"): 1,
        ("port_foreign", "8000"): 0,
        ("port_accept_queue", "8000"): 3,
        ("port_connect", "8000", "ok"): 1,
    }
    assert listeners(seen) == [Listener("vllm-8000", 8000, "127.0.0.1")]


def test_a_port_nobody_listens_on_is_refused_and_no_listener(tree: Tree) -> None:
    tree.process(10, sockets=[501])
    tree.table(10, row(ANY4, 8001, 501))

    seen = look(source(tree), server(10))

    assert values(seen) == {
        ("port_listening", "8000"): 0,
        ("port_foreign", "8000"): 0,
        ("port_connect", "8000", "refused"): 1,
    }
    assert listeners(seen) == []


def test_a_port_held_by_somebody_else_is_foreign_and_never_a_listener(tree: Tree) -> None:
    tree.process(10, sockets=[777])
    tree.table(10, row(ANY4, 8000, 501))

    seen = look(source(tree, Answers({LOOP4: "ok"})), server(10))

    assert values(seen)["port_listening", "8000"] == 0
    assert values(seen)["port_foreign", "8000"] == 1
    assert listeners(seen) == []


def test_one_of_several_shared_rows_is_enough_to_own_the_port(tree: Tree) -> None:
    """SO_REUSEPORT: the same address in several rows, held by several processes."""
    tree.process(10, sockets=[502])
    tree.table(10, row(ANY4, 8000, 501), row(ANY4, 8000, 502), row(ANY4, 8000, 503))

    seen = values(look(source(tree), server(10)))

    assert (seen["port_listening", "8000"], seen["port_foreign", "8000"]) == (1, 0)


def test_owner_that_cannot_be_seen_is_missing_with_a_reason(tree: Tree) -> None:
    tree.process(10)
    shutil.rmtree(tree.root / "10/fd")
    (tree.root / "10/fd").write_text("a file, so that it cannot be listed")
    tree.table(10, row(ANY4, 8000, 501))

    seen = look(source(tree, Answers({LOOP4: "ok"})), server(10))

    assert values(seen) == {
        ("port_listening", "8000"): "error",
        ("port_foreign", "8000"): "error",
        ("port_connect", "8000", "ok"): 1,
    }
    assert listeners(seen) == []


def test_without_any_row_the_port_is_known_to_be_shut_even_if_owners_are_hidden(tree: Tree) -> None:
    tree.process(10)
    shutil.rmtree(tree.root / "10/fd")
    (tree.root / "10/fd").write_text("")

    assert values(look(source(tree), server(10)))["port_listening", "8000"] == 0


def test_one_process_that_shows_the_socket_outweighs_others_that_hide_theirs(tree: Tree) -> None:
    tree.process(10)
    shutil.rmtree(tree.root / "10/fd")
    (tree.root / "10/fd").write_text("")
    tree.process(11, sockets=[501])
    tree.table(10, row(ANY4, 8000, 501))

    assert values(look(source(tree), server(10, 11)))["port_listening", "8000"] == 1


def test_a_server_that_vanished_is_missing_and_no_exception(tree: Tree) -> None:
    seen = look(source(tree), server(10))

    assert values(seen) == {("port_listening", "8000"): "vanished", ("port_foreign", "8000"): "vanished"}


def test_a_namespace_that_cannot_be_read_is_missing_with_a_reason(tree: Tree) -> None:
    tree.process(10)
    (tree.root / "10/ns/net").unlink()
    (tree.root / "10/ns/net").write_text("no link")

    seen = look(source(tree), server(10, ports=()))

    assert values(seen) == {("port_listening", ""): "error", ("port_foreign", ""): "error"}


def test_another_process_shows_the_namespace_when_the_root_is_gone(tree: Tree) -> None:
    tree.process(11, sockets=[501])
    tree.table(11, row(ANY4, 8000, 501))

    assert values(look(source(tree), server(10, 11)))["port_listening", "8000"] == 1


def test_a_process_that_vanishes_between_namespace_and_table_is_missing(tree: Tree) -> None:
    tree.process(10)
    shutil.rmtree(tree.root / "10/net")

    assert values(look(source(tree), server(10)))["port_listening", "8000"] == "vanished"


def test_a_kernel_without_ipv6_has_one_table(tree: Tree) -> None:
    tree.process(10, sockets=[501])
    tree.table(10, row(ANY4, 8000, 501))
    (tree.root / "10/net/tcp6").unlink()

    assert values(look(source(tree), server(10)))["port_listening", "8000"] == 1


@pytest.mark.parametrize(
    ("rows", "address"),
    [
        ([row(ANY6, 8000, 501)], "::1"),
        ([row(LOOP6, 8000, 501)], "::1"),
        ([row(ANY6, 8000, 501), row(ANY4, 8000, 501)], "127.0.0.1"),
        ([row("10.1.2.3", 8000, 501)], "10.1.2.3"),
        ([row("10.1.2.3", 8000, 501), row(LOOP4, 8000, 501)], "127.0.0.1"),
        ([row("2001:db8::7", 8000, 501)], "2001:db8::7"),
        ([row("::ffff:127.0.0.1", 8000, 501)], "127.0.0.1"),
    ],
)
def test_a_client_here_uses_the_address_that_is_listened_on(tree: Tree, rows: list[str], address: str) -> None:
    tree.process(10, sockets=[501])
    tree.table(10, *rows)
    answers = Answers({address: "ok"})

    seen = look(source(tree, answers), server(10))

    assert listeners(seen) == [Listener("vllm-8000", 8000, address)]
    assert [attempt.target for attempt in answers.tried] == [SocketAddress(address, 8000)]
    assert values(seen)["port_connect", "8000", "ok"] == 1


def test_an_ipv6_wildcard_is_reached_over_ipv4_where_there_is_no_ipv6_loopback(tree: Tree) -> None:
    tree.process(10, sockets=[501])
    tree.table(10, row(ANY6, 8000, 501))

    seen = look(source(tree, Answers({LOOP6: "unreachable", LOOP4: "ok"})), server(10))

    assert listeners(seen) == [Listener("vllm-8000", 8000, "127.0.0.1")]
    assert values(seen)["port_connect", "8000", "ok"] == 1


def test_a_wildcard_in_another_namespace_is_reached_at_that_namespaces_address(tree: Tree) -> None:
    tree.process(10, THEIRS, sockets=[501])
    tree.table(10, row(ANY4, 8000, 501))
    (tree.root / "10/net/fib_trie").write_text(FIB_TRIE)
    answers = Answers({"10.42.0.17": "ok"})
    sockets = source(tree, answers)

    first, second = look(sockets, server(10)), look(sockets, server(10))

    assert listeners(first) == listeners(second) == [Listener("vllm-8000", 8000, "10.42.0.17")]
    assert values(second)["port_connect", "8000", "ok"] == 1
    assert [attempt.is_theirs is not None for attempt in answers.tried] == [True, False]


@pytest.mark.parametrize("result", ["stranger", "timeout", "refused"])
def test_an_address_where_nobody_of_that_namespace_was_seen_is_unreachable(tree: Tree, result: str) -> None:
    """A user's own network may give every namespace an address that means another machine to the node."""
    tree.process(10, THEIRS, sockets=[501])
    tree.table(10, row(ANY4, 8000, 501))
    (tree.root / "10/net/fib_trie").write_text(FIB_TRIE)

    seen = look(source(tree, Answers({"10.42.0.17": result})), server(10))

    assert listeners(seen) == [Listener("vllm-8000", 8000, "", reachable=False)]
    assert values(seen) == {
        ("port_listening", "8000"): 1,
        ("port_foreign", "8000"): 0,
        ("port_accept_queue", "8000"): 0,
        ("port_connect", "8000", "error"): "namespace",
    }


def test_a_stranger_is_not_bothered_twice(tree: Tree) -> None:
    tree.process(10, THEIRS, sockets=[501])
    tree.table(10, row("10.42.0.17", 8000, 501))
    answers = Answers({"10.42.0.17": "stranger"})
    sockets = source(tree, answers)

    look(sockets, server(10))
    look(sockets, server(10))

    assert len(answers.tried) == 1


def test_loopback_only_in_another_namespace_is_listening_and_unreachable(tree: Tree) -> None:
    tree.process(10, THEIRS, sockets=[501])
    tree.table(10, row(LOOP4, 8000, 501))
    (tree.root / "10/net/fib_trie").write_text(FIB_TRIE)
    answers = Answers()

    seen = look(source(tree, answers), server(10))

    assert values(seen)["port_listening", "8000"] == 1
    assert values(seen)["port_connect", "8000", "error"] == "namespace"
    assert answers.tried == []


def test_the_same_port_in_two_namespaces_belongs_to_each_its_own(tree: Tree) -> None:
    """The host's table holds a foreign row for the port; the pod's does not."""
    tree.process(10, sockets=[])
    tree.table(10, row(ANY4, 8000, 501))
    tree.process(20, THEIRS, sockets=[601])
    tree.table(20, row(ANY4, 8000, 601))

    seen = look(source(tree), server(10, name="host"), server(20, name="pod"))

    assert [item.server for item in listeners(seen)] == ["pod"]
    assert PORT_FOREIGN.read(1, "host", "8000") in seen
    assert PORT_FOREIGN.read(0, "pod", "8000") in seen


def test_a_namespace_of_two_servers_is_read_once(tree: Tree) -> None:
    tree.process(10, sockets=[501])
    tree.process(20, sockets=[502])
    tree.table(10, row(ANY4, 8000, 501), row(ANY4, 8001, 502))
    shutil.rmtree(tree.root / "20/net")

    seen = look(source(tree), server(10, name="a"), server(20, name="b", ports=(8001,)))

    assert [(item.server, item.port) for item in listeners(seen)] == [("a", 8000), ("b", 8001)]


def test_descriptors_are_listed_again_only_for_a_new_row_or_a_new_process(tree: Tree) -> None:
    tree.process(10, sockets=[501])
    tree.table(10, row(ANY4, 8000, 501))
    sockets = source(tree)
    look(sockets, server(10))
    shutil.rmtree(tree.root / "10/fd")
    (tree.root / "10/fd").mkdir()

    same = values(look(sockets, server(10)))
    tree.table(10, row(ANY4, 8000, 502))
    new_row = values(look(sockets, server(10)))
    tree.process(11, sockets=[502])
    tree.table(10, row(ANY4, 8000, 502))
    new_process = values(look(sockets, server(10, 11)))

    seen = [answer["port_listening", "8000"] for answer in (same, new_row, new_process)]
    assert seen == [1, 0, 1]


def test_a_restarted_server_does_not_inherit_the_port_of_the_start_before(tree: Tree) -> None:
    tree.process(10, sockets=[501])
    tree.table(10, row(ANY4, 8000, 501))
    sockets = source(tree)
    look(sockets, server(10))
    tree.process(12)
    tree.table(12, row(ANY4, 8000, 501))

    assert values(look(sockets, server(12)))["port_foreign", "8000"] == 1


def test_a_server_without_known_ports_shows_what_its_root_listens_on(tree: Tree) -> None:
    tree.process(10, sockets=[501, 502])
    tree.process(11, sockets=[503])
    tree.table(10, *(row(ANY4, port, inode) for port, inode in ((9000, 502), (7000, 501), (6000, 503))))

    seen = look(source(tree), server(10, 11, ports=()))

    assert [item.port for item in listeners(seen)] == [7000, 9000]


def test_no_connect_is_added_to_a_queue_the_server_does_not_empty(tree: Tree) -> None:
    tree.process(10, sockets=[501])
    tree.table(10, row(ANY4, 8000, 501, queue=64))
    answers = Answers({LOOP4: "ok"})

    seen = look(source(tree, answers), server(10))

    assert answers.tried == []
    assert values(seen) == {
        ("port_listening", "8000"): 1,
        ("port_foreign", "8000"): 0,
        ("port_accept_queue", "8000"): 64,
    }
    assert listeners(seen)[0].reachable


def test_an_embedded_engine_has_no_ports(tree: Tree) -> None:
    tree.process(10, sockets=[501])
    tree.table(10, row(ANY4, 8000, 501))

    assert look(source(tree), server(10, role="embedded")) == []


def test_reading_stops_at_the_first_row_that_does_not_listen(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    many = [row(ANY4, 10_000 + i, i) for i in range(100)]
    table.write_text(HEAD + "".join(many) + row(LOOP4, 9999, 7, state="01") + row(ANY4, 8000, 8))

    assert [found.port for found in listening_rows(table)] == [10_000 + i for i in range(100)]


def test_rows_that_are_none_are_skipped(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(HEAD + "   0: zz:1F40 00000000:0000 0A 0:0 0 0 0 0 9\n\nx\n" + row(ANY4, 8000, 8))

    assert [found.port for found in listening_rows(table)] == [8000]


def test_own_addresses_leave_out_loopback_and_link_local(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text(FIB_TRIE)

    assert own_addresses(tmp_path / "fib_trie") == ["10.42.0.17"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (b"0100007F", "127.0.0.1"),
        (b"00000000000000000000000001000000", "::1"),
        (b"0000000000000000FFFF00000100007F", "127.0.0.1"),
        (b"B80D0120000000000000000007000000", "2001:db8::7"),
    ],
)
def test_addresses_are_words_in_the_order_of_the_host(text: bytes, address: str) -> None:
    """As an x86-64 or arm64 kernel prints them."""
    assert str(parse_address(text)) == address


@given(st.ip_addresses())
def test_an_address_survives_both_ways(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None

    assert parse_address(format_address(address)) == (mapped or address)


@pytest.mark.parametrize("name", ["tcp", "tcp6"])
def test_a_connection_is_found_in_the_far_table_by_our_own_end(tmp_path: Path, name: str) -> None:
    prefix = "0000000000000000FFFF0000" if name == "tcp6" else ""
    filler = row(ANY4, 9, 9) * 2000
    line = f"   1: {prefix}1100000A:1F40 {prefix}0100000A:C350 01 00000000:00000000 00:0 0 0 0 0 1\n"
    (tmp_path / name).write_text(HEAD + filler + line)
    paths = (tmp_path / "tcp", tmp_path / "tcp6")

    assert has_peer(paths, SocketAddress("10.0.0.1", 50000))
    assert not has_peer(paths, SocketAddress("10.0.0.1", 50001))
    assert not has_peer(paths, SocketAddress("10.0.0.2", 50000))


def test_a_process_that_comes_and_goes_leaves_nothing_behind(tree: Tree) -> None:
    sockets = source(tree)
    for pid in range(100, 200):
        tree.process(pid, THEIRS, sockets=[pid])
        tree.table(pid, row("10.0.0.9", 8000, pid))
        look(sockets, server(pid, name=f"vllm-{pid}"))
        shutil.rmtree(tree.root / str(pid))

    look(sockets)

    assert not sockets._confirmed
    assert not sockets._descriptors._known


class Kernel:
    """In place of sock_diag: rows, or an error; counts how often it was asked."""

    def __init__(self, *rows: Row, error: OSError | None = None) -> None:
        self.rows, self.error, self.asked = list(rows), error, 0

    def __call__(self) -> list[Row]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.rows


def told_by(tree: Tree, kernel: Kernel) -> Sockets:
    return Sockets(Host(config=Config(), frameworks=(), proc=tree.root), connect=Answers(), here=kernel)


def be_ours(tree: Tree) -> None:
    """Its PIDs are those of our own system calls from now on."""
    (tree.root / "self").rename(tree.root / str(os.getpid()))
    (tree.root / "self").symlink_to(str(os.getpid()))


def test_our_own_namespace_is_listed_by_the_kernel(tree: Tree) -> None:
    be_ours(tree)
    tree.process(10, sockets=[77])
    kernel = Kernel(Row(ipaddress.ip_address("127.0.0.1"), 8000, 77, 2))

    seen = look(told_by(tree, kernel), server(10))

    assert values(seen)["port_listening", "8000"] == 1
    assert values(seen)["port_accept_queue", "8000"] == 2


@pytest.mark.parametrize("namespace", [OURS, THEIRS])
def test_of_another_namespace_or_another_machine_the_tables_tell(tree: Tree, namespace: str) -> None:
    if namespace == THEIRS:
        be_ours(tree)
    tree.process(10, namespace, sockets=[77])
    tree.table(10, row("10.0.0.9", 8000, 77))
    kernel = Kernel()

    seen = look(told_by(tree, kernel), server(10))

    assert values(seen)["port_listening", "8000"] == 1
    assert kernel.asked == 0


@pytest.mark.parametrize(("number", "asked"), [(errno.ENOENT, 1), (errno.EINTR, 3)])
def test_where_the_kernel_does_not_tell_the_tables_do(tree: Tree, number: int, asked: int) -> None:
    """One that refused is not asked again."""
    be_ours(tree)
    tree.process(10, sockets=[77])
    tree.table(10, row("127.0.0.1", 8000, 77))
    kernel = Kernel(error=OSError(number, os.strerror(number)))
    sockets = told_by(tree, kernel)

    seen = [values(look(sockets, server(10)))["port_listening", "8000"] for _ in range(3)]

    assert seen == [1, 1, 1]
    assert kernel.asked == asked
