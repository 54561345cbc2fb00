"""Who listens on a server's ports, in the server's own network namespace, and whether a client gets through.

The kernel's socket table says that somebody listens; the descriptors of the server's processes say whether
it is the server.  No namespace is entered: a server elsewhere is reached at its namespace's own address, and
only after the far table has shown our connection, for the same address may mean another machine here.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from ..model import Listener, Observation, Process, ProcessId, Scene, Server, Signal
from ..signals import PORT_FOREIGN, PORT_LISTENING
from . import Host, Moment
from .connections import CONNECT_RESULTS, STRANGER, Attempt, SocketAddress, connect_all
from .procfs import ProcFs, reason_of
from .socket_diag import Address, Row, listening_here

PORT_CONNECT = Signal(
    "port_connect",
    "Result of the last TCP connect to the port; only the current one is exported, as 1: "
    + " ".join(CONNECT_RESULTS)
    + ".",
    ("server", "port", "result"),
)
PORT_ACCEPT_QUEUE = Signal(
    "port_accept_queue",
    "Connections the kernel completed and the server has not accepted yet (rx_queue of its listening row).",
    ("server", "port"),
)

CONNECT_SECONDS = 1.0
QUEUE_LIMIT = 64
"""With so many connections waiting none is added by us: each waits until the server accepts it."""
PORTS_LIMIT = 8
"""Ports of one server that are looked at."""

CLOSED = ""
"""In the place of a link that is gone."""

_READ_BYTES = 4 << 10
_SEARCH_BYTES = 64 << 10
_SEARCH_LIMIT_BYTES = 8 << 20
_ROUTES_LIMIT_BYTES = 256 << 10
_LISTEN = b"0A"


def parse_address(text: bytes) -> Address:
    """`0100007F` or 32 such digits: words in the byte order of the host.  An IPv4-mapped address is IPv4."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    if len(words) == 1:
        return ipaddress.IPv4Address(words[0])
    address = ipaddress.IPv6Address(b"".join(words))
    return address.ipv4_mapped or address


def format_address(address: Address) -> bytes:
    """The reverse of parse_address, for IPv4 the last word of its mapped form too."""
    packed = address.packed
    words = [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]
    return b"".join(b"%08X" % word for word in words)


def parse_row(line: bytes) -> Row:
    """ValueError or IndexError when the line is no row of the table."""
    fields = line.split()
    address, port = fields[1].split(b":")
    waiting = fields[4].split(b":")[1]
    return Row(parse_address(address), int(port, 16), int(fields[9]), int(waiting, 16))


def listening_rows(path: Path) -> list[Row]:
    """The listening sockets of one table.  OSError when it cannot be read.

    They stand first, so reading ends at the first row in another state: a machine with 100,000 connections
    costs no more than an idle one.
    """
    rows: list[Row] = []
    for line in _lines(path):
        fields = line.split(None, 4)
        if len(fields) < 5 or fields[0] == b"sl":
            continue
        if fields[3] != _LISTEN:
            break
        try:
            rows.append(parse_row(line))
        except (ValueError, IndexError):
            continue
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        tail = b""
        while data := os.read(descriptor, _READ_BYTES):
            *lines, tail = (tail + data).split(b"\n")
            yield from lines
        yield tail
    finally:
        os.close(descriptor)


def own_addresses(path: Path) -> list[str]:
    """The namespace's own IPv4 addresses in <proc>/PID/net/fib_trie, loopback and link-local left out.

    OSError when it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while len(text) < _ROUTES_LIMIT_BYTES and (data := os.read(descriptor, _SEARCH_BYTES)):
            text += data
    finally:
        os.close(descriptor)
    found: dict[str, None] = {}
    leaf = b""
    for line in text.split(b"\n"):
        words = line.split()
        if words[:1] == [b"|--"] and len(words) == 2:
            leaf = words[1]
        elif words == [b"/32", b"host", b"LOCAL"]:
            address = ipaddress.IPv4Address(leaf.decode("ascii", "replace"))
            if not address.is_loopback and not address.is_link_local:
                found[str(address)] = None
    return list(found)


def has_peer(paths: Sequence[Path], peer: SocketAddress) -> bool:
    """Whether one of the tables holds a connection with `peer`; False too when none can be read.

    Reads at most 8 MiB of each.
    """
    address = ipaddress.ip_address(peer.address)
    needle = b"%s:%04X " % (format_address(address), peer.port)
    return any(_contains(path, needle) for path in paths)


def _contains(path: Path, needle: bytes) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        tail, left = b"", _SEARCH_LIMIT_BYTES
        while left > 0 and (data := os.read(descriptor, _SEARCH_BYTES)):
            if needle in tail + data:
                return True
            tail, left = data[-len(needle) :], left - len(data)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True, slots=True)
class Space:
    """A network namespace as one of its processes shows it; `reason` is set when it cannot be seen."""

    identity: str
    pid: int
    is_ours: bool
    rows: tuple[Row, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one server.  `listening` and `foreign` are None when they cannot be known (`reason`)."""

    server: str
    port: int
    listening: bool | None
    foreign: bool | None
    reason: str = ""
    queue: int | None = None
    address: str = ""  # where a client on this node gets through; "" = nowhere
    key: tuple[str, str, int] | None = None  # in another namespace: which peer has to be confirmed
    result: str = ""  # of the connect; "" = not tried

    @property
    def label(self) -> str:
        """`""` for a server whose ports cannot be known."""
        return str(self.port) if self.port else ""


class Descriptors:
    """Which listening sockets a server's processes hold, remembered while neither side changes."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._known: dict[str, tuple[frozenset[ProcessId], dict[int, bool]]] = {}

    def held(self, key: str, processes: Sequence[Process], rows: Iterable[Row]) -> tuple[frozenset[int], str]:
        """The inodes among `rows` that the processes hold, and why others may be missing ("" = none is).

        Descriptors are listed only when a row or a process is new.
        """
        inodes = {row.inode for row in rows}
        identity = frozenset(process.id for process in processes)
        known_identity, known = self._known.get(key, (identity, {}))
        reason, is_whole = "", True
        if known_identity != identity or not inodes <= known.keys():
            found, reason, is_whole = self._scan(processes, inodes) if inodes else (set(), "", True)
            known = {inode: inode in found for inode in inodes}
        if reason or not is_whole:
            self._known.pop(key, None)  # look again, we may be allowed then, or all of it stands still
        else:
            self._known[key] = identity, {inode: known[inode] for inode in inodes}
        return frozenset(inode for inode in inodes if known[inode]), reason

    def _scan(self, processes: Sequence[Process], inodes: set[int]) -> tuple[set[int], str, bool]:
        """What is held, why others may be missing, and whether everything that was listed could be looked at."""
        wanted = {f"socket:[{inode}]": inode for inode in inodes}
        found: set[int] = set()
        reason, is_whole = "", True
        for process in processes:
            if len(found) == len(inodes):
                return found, "", True
            folder = f"{self._proc}/{process.id.pid}/fd"
            try:
                links = set(_links(folder))
            except (FileNotFoundError, ProcessLookupError):
                is_whole = False  # who is gone holds nothing
                continue
            except OSError as error:
                reason = reason_of(error)
                continue
            found |= {wanted[link] for link in links if link in wanted}
            is_whole = is_whole and CLOSED not in links
        is_all = len(found) == len(inodes)
        return found, "" if is_all else reason, is_all or is_whole

    def keep(self, keys: Iterable[str]) -> None:
        """Forget all other servers."""
        kept = set(keys)
        self._known = {key: value for key, value in self._known.items() if key in kept}


def _links(folder: str) -> Iterator[str]:
    """Where the descriptors lead; CLOSED for one that was closed, or put elsewhere, since they were listed."""
    for name in os.listdir(folder):
        try:
            yield os.readlink(f"{folder}/{name}")
        except (FileNotFoundError, ProcessLookupError):
            yield CLOSED


class Sockets:
    """Source `sockets`."""

    name: ClassVar[str] = "sockets"
    signals: ClassVar[tuple[Signal, ...]] = (PORT_LISTENING, PORT_FOREIGN, PORT_CONNECT, PORT_ACCEPT_QUEUE)

    def __init__(
        self,
        host: Host,
        *,
        connect: Callable[[Sequence[Attempt], float], list[str]] = connect_all,
        here: Callable[[], list[Row]] = listening_here,
    ) -> None:
        """`here`: lists our own namespace at less cost; asked only where <proc> is of this very machine."""
        self._proc = host.proc
        self._connect, self._here = connect, here
        self._tells = ProcFs(host.proc).is_ours  # whether the kernel tells what listens in our namespace
        self._descriptors = Descriptors(host.proc)
        self._confirmed: dict[tuple[str, str, int], bool] = {}  # far peers: theirs, or a stranger's

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        """One look at every port of every server, with all connects at once.

        From <proc>/PID/{ns/net,net/tcp,net/tcp6,net/fib_trie,fd}.  A port whose owner or namespace cannot be
        seen is missing with its reason; a connect that cannot be made is missing, reason namespace.

        stallwatch_port_connect{server="vllm-8000",port="8000",result="refused"} 1
        """
        servers = [server for server in scene.servers if server.role == "server"]
        spaces = self._spaces(servers)
        ports = [port for server in servers for port in self._ports(server, spaces[server.name])]
        self._descriptors.keep([server.name for server in servers])
        keys = {port.key for port in ports}
        self._confirmed = {key: theirs for key, theirs in self._confirmed.items() if key in keys}
        for port in self._connected(ports, spaces):
            yield from _observations(port)

    def close(self) -> None:
        """Nothing is kept open between reads."""

    def _spaces(self, servers: Sequence[Server]) -> dict[str, Space]:
        """The namespace of each server by its name; every table is read once."""
        ours = self._identity("self")
        read: dict[str, Space] = {}
        found: dict[str, Space] = {}
        for server in servers:
            space = self._locate(server, ours)
            if not space.reason:
                if space.identity not in read or read[space.identity].reason:
                    read[space.identity] = self._filled(space)
                space = read[space.identity]
            found[server.name] = space
        return found

    def _identity(self, pid: int | str) -> str | OSError:
        try:
            return os.readlink(f"{self._proc}/{pid}/ns/net")
        except OSError as error:
            return error

    def _locate(self, server: Server, ours: str | OSError) -> Space:
        """The namespace of the first process that lives, the root before all others."""
        error = OSError()
        others = (process.id.pid for process in server.processes if process.id != server.root)
        for pid in (server.root.pid, *others):
            identity = self._identity(pid)
            if isinstance(identity, str):
                return Space(identity, pid, identity == ours)
            error = identity
            if reason_of(identity) != "vanished":
                break
        return Space("", server.root.pid, False, reason=reason_of(error))

    def _filled(self, space: Space) -> Space:
        if space.is_ours and (told := self._told()) is not None:
            return replace(space, rows=told)
        folder = self._proc / str(space.pid) / "net"
        try:
            rows = listening_rows(folder / "tcp")
            try:
                rows += listening_rows(folder / "tcp6")
            except FileNotFoundError:
                os.stat(folder / "tcp")  # still there: a kernel without IPv6
        except OSError as error:
            return replace(space, reason=reason_of(error))
        return replace(space, rows=tuple(rows))

    def _told(self) -> tuple[Row, ...] | None:
        """What listens in our namespace; None where the kernel has to be asked by its tables.

        Once it refused it is not asked again: to be asked it may have to load a module.
        """
        if not self._tells:
            return None
        try:
            return tuple(self._here())
        except InterruptedError:
            return None
        except OSError:
            self._tells = False
            return None

    def _ports(self, server: Server, space: Space) -> Iterator[Port]:
        if space.reason:
            for number in server.ports[:PORTS_LIMIT] or (0,):
                yield Port(server.name, number, None, None, space.reason)
            return
        processes = sorted(server.processes, key=lambda process: process.id != server.root)
        numbers = server.ports
        rows = [row for row in space.rows if row.port in numbers]
        if not numbers:
            rows = list(space.rows)
            processes = processes[:1]
        held, reason = self._descriptors.held(server.name, processes, rows)
        if not numbers:
            numbers = tuple(sorted({row.port for row in rows if row.inode in held}))
            if reason and not numbers:
                yield Port(server.name, 0, None, None, reason)
        for number in numbers[:PORTS_LIMIT]:
            yield self._port(server, number, [row for row in rows if row.port == number], held, reason, space)

    def _port(
        self, server: Server, number: int, rows: list[Row], held: frozenset[int], reason: str, space: Space
    ) -> Port:
        own = [row for row in rows if row.inode in held]
        unknown = bool(rows) and not own and bool(reason)
        address = self._address(own or rows, space)
        return Port(
            server=server.name,
            port=number,
            listening=None if unknown else bool(own),
            foreign=None if unknown else bool(rows) and not own,
            reason=reason if unknown else "",
            queue=sum(row.queue for row in own) if own else None,
            address=address,
            key=None if space.is_ours else (space.identity, address, number),
        )

    def _address(self, rows: list[Row], space: Space) -> str:
        """Where a client here reaches one of the rows; IPv4 before IPv6, wildcard and loopback first."""
        ordered = sorted(rows, key=lambda row: (row.address.version, not _is_general(row.address)))
        if space.is_ours:
            return _local_address(ordered[0].address) if ordered else "127.0.0.1"
        if any(row.address.is_unspecified for row in rows):
            return self._far_address(space)
        specific = [str(row.address) for row in ordered if not row.address.is_loopback]
        return specific[0] if specific else ""

    def _far_address(self, space: Space) -> str:
        try:
            return next(iter(own_addresses(self._proc / str(space.pid) / "net" / "fib_trie")), "")
        except (OSError, ValueError):
            return ""

    def _connected(self, ports: list[Port], spaces: dict[str, Space]) -> list[Port]:
        """The ports with the result of their connect, where one could be made."""
        tried = {i: self._attempt(port, spaces) for i, port in enumerate(ports) if self._is_tried(port)}
        results = dict(zip(tried, self._connect(list(tried.values()), CONNECT_SECONDS), strict=True))
        # A wildcard of IPv6 takes IPv4 too unless told otherwise, and some machines have no ::1.
        again = {
            i: replace(tried[i], target=SocketAddress("127.0.0.1", ports[i].port))
            for i, result in results.items()
            if result == "unreachable" and ports[i].address == "::1" and ports[i].key is None
        }
        second = self._connect(list(again.values()), CONNECT_SECONDS) if again else []
        for i, result in zip(again, second, strict=True):
            if result == "ok":
                results[i], ports[i] = result, replace(ports[i], address="127.0.0.1")
        return [self._judged(replace(port, result=results.get(i, ""))) for i, port in enumerate(ports)]

    def _is_tried(self, port: Port) -> bool:
        if not port.address or (port.queue or 0) >= QUEUE_LIMIT:
            return False
        return port.key is None or (port.listening is not False and self._confirmed.get(port.key, True))

    def _attempt(self, port: Port, spaces: dict[str, Space]) -> Attempt:
        check = None
        if port.key is not None and port.key not in self._confirmed:
            folder = self._proc / str(spaces[port.server].pid) / "net"
            check = partial(has_peer, (folder / "tcp", folder / "tcp6"))
        return Attempt(SocketAddress(port.address, port.port), check)

    def _judged(self, port: Port) -> Port:
        """In another namespace: nothing is known of an address until a connection to it was seen there."""
        if port.key is None:
            return port
        if port.result in ("ok", STRANGER):
            self._confirmed[port.key] = port.result == "ok"
        return port if self._confirmed.get(port.key) else replace(port, address="", result="")


def _is_general(address: Address) -> bool:
    return address.is_unspecified or address.is_loopback


def _local_address(address: Address) -> str:
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return str(address)


def _observations(port: Port) -> Iterator[Observation]:
    labels = (port.server, port.label)
    if port.listening is None or port.foreign is None:
        yield PORT_LISTENING.missing(port.reason, *labels)
        yield PORT_FOREIGN.missing(port.reason, *labels)
    else:
        yield PORT_LISTENING.read(int(port.listening), *labels)
        yield PORT_FOREIGN.read(int(port.foreign), *labels)
    if port.queue is not None:
        yield PORT_ACCEPT_QUEUE.read(port.queue, *labels)
    if port.result:
        yield PORT_CONNECT.read(1, *labels, port.result)
    elif port.listening and not port.address:
        yield PORT_CONNECT.missing("namespace", *labels, "error")
    if port.listening:
        yield Listener(port.server, port.port, port.address, reachable=bool(port.address))
