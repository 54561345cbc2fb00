"""Whose process it is, from its PID alone: pod, namespace, container, unit, Slurm job.

The control group tells the ids (cgroups.py); where it does not, what the runtime mounted into the container does; the
names of the ids stand in files of the machine (runtime_names.py), and in the command line of Podman's and cri-o's
`conmon`.  No API server is asked, no environment is read, no namespace entered.

Whoever runs in a container shall not pass for another pod: what it can write itself (its mounts in a user namespace of
its own, titles of its processes, the files of a Docker inside it) never names its pod.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from ..model import ProcessId
from .cgroups import Placement, parse_cgroup
from .host_files import HostFiles
from .logs.guard import Questions
from .logs.mounts import FarError
from .passing import may_pass
from .procfs import ProcFs, Stat
from .runtime_names import Names, RuntimeNames, kubernetes_name

MOST_PARENTS = 32
RETRY_SECONDS = 30.0
"""How often a name that is missing is looked for again."""
MOST_KNOWN = 1024
MOST_PLACE_BYTES = 96
"""Longest place in the name of a server, which as a label has 128 bytes with framework and port."""

_MOUNTINFO_BYTES = 256 << 10
_UID = r"(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})"
_KUBELET = re.compile(rf"/pods/{_UID}/(?:etc-hosts|containers/(?P<name>[a-z0-9.-]+)/[0-9a-f]{{8}})")
_HOSTNAME = re.compile(
    r"/(?:containers/(?:[A-Za-z0-9_.-]+/)?|[a-z]+-containers/)(?P<id>[0-9a-f]{64})/(?:userdata/)?hostname"
)
"""What Docker, nerdctl and Podman mount over /etc/hostname; containerd's and cri-o's is their sandbox's."""
_STEP = re.compile(r"slurmstepd: \[(?P<job>\d{1,10})[._]")


@dataclass(frozen=True, slots=True)
class Home:
    """Where a process runs, in ids (`placement`) and in the names people use."""

    placement: Placement
    names: Names = field(default_factory=Names)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing more to find out: it is in no container, or all its names are known."""
        return self.names.is_complete or not (self.placement.container or self.placement.pod_uid)

    @property
    def container(self) -> str:
        """The container's name, else the beginning of its id."""
        return self.names.container or self.placement.container_id[:12]

    @property
    def place(self) -> str:
        """What follows the @ in the name of a server; docs/REFERENCE.md, "Names"."""
        if not self.placement.container and not self.names.container:
            return _bounded(self.placement.unit)
        if self.names.pod and self.names.container:
            return _bounded(f"{self.names.pod}/{self.names.container}")
        return _bounded(self.container)

    def is_called(self, name: str) -> bool:
        """Whether it is the container of this name: `pod/container`, `container`, or the beginning of the id."""
        if not name:
            return False
        names = (self.names.container, f"{self.names.pod}/{self.names.container}")
        return name in names or self.placement.container_id.startswith(name)


def _bounded(place: str) -> str:
    """A place that is too long for a label keeps its beginning, and is still told from every other."""
    raw = place.encode("utf-8", "surrogateescape")
    if len(raw) <= MOST_PLACE_BYTES:
        return place
    digest = hashlib.blake2b(raw, digest_size=4).hexdigest()
    return f"{raw[: MOST_PLACE_BYTES - 9].decode('utf-8', 'ignore')}~{digest}"


def mounted(mountinfo: str) -> tuple[str, Names]:
    """What runtimes mount into a container, and from where: the container's id, or the pod with the container's name.

    Only the ends of paths count: what lies on a file system of its own has no beginning there.
    """
    container, names = "", Names()
    for line in mountinfo.splitlines():
        words = line.split(" ", 5)
        if len(words) < 6:
            continue
        if match := _KUBELET.search(words[3]):
            names = Names(container=match["name"] or names.container, pod_uid=match["uid"])
        elif words[4] == "/etc/hostname" and (match := _HOSTNAME.search(words[3])):
            container = match["id"]
    return "" if names.pod_uid else container, names  # in a pod the hostname is that of its sandbox


@dataclass(frozen=True, slots=True)
class _Known:
    names: Names
    at: float


class Attribution:
    """Asks for the homes of processes in one /proc, by files below one root; names are kept by container.

    `arguments`: the command line of a process, empty where it cannot be read.
    """

    def __init__(
        self, proc: ProcFs, root: Path, far: Questions, arguments: Callable[[ProcessId], Sequence[str]]
    ) -> None:
        self._proc, self._far, self._arguments = proc, far, arguments
        self._files = HostFiles(root, far.guards.mounts.under)
        self._known: dict[str, _Known] = {}

    def home(self, pid: int, now: float, group: str | None = None) -> Home:
        """Where a process runs; `now` in monotonic seconds, `group`: its cgroup file, if that was read already.

        OSError when that could not be read now.
        """
        placement = parse_cgroup(self._proc.cgroup(pid) if group is None else group)
        container, hints = mounted(self._mountinfo(pid)) if self._has_our_users(pid) else ("", Names())
        if not placement.container:
            placement = replace(placement, container_id=container)
        return self._named(pid, placement, hints, now, retry_after=0.0)

    def container(self, pid: int, now: float) -> Home:
        """The same by the control group alone, without a look at what is mounted: for many processes."""
        placement = parse_cgroup(self._proc.cgroup(pid))
        return self._named(pid, placement, Names(), now) if placement.container else Home(placement)

    def job(self, pid: int) -> str:
        """The Slurm job of a process that its control group does not name: by the step above it; "" = of none."""
        step = self._parent(pid, "slurmstepd")
        match = _STEP.match(" ".join(self._arguments(step.id))) if step is not None else None
        return match["job"] if match else ""

    def forget(self, containers: set[str]) -> None:
        """Keep what is asked of far mounts for these containers only; names are kept while there is room."""
        gone = [key for key in self._known if key not in containers]
        self._far.forget([f"names of {key}" for key in gone])
        for key in gone if len(self._known) > MOST_KNOWN else ():
            del self._known[key]

    def _named(
        self, pid: int, placement: Placement, hints: Names, now: float, retry_after: float = RETRY_SECONDS
    ) -> Home:
        """With the names; those of a container are found once, and looked for again while one is missing."""
        key = placement.container or placement.pod_uid or hints.pod_uid
        if not key:
            return Home(placement)
        known = self._known.get(key)
        if known is None or (not known.names.is_complete and now - known.at >= retry_after):
            known = self._known[key] = _Known(self._find(pid, placement, hints), now)
        return Home(replace(placement, pod_uid=placement.pod_uid or known.names.pod_uid), known.names)

    def _find(self, pid: int, placement: Placement, hints: Names) -> Names:
        """By the id first: a pod that is known by its mounts alone comes after that."""
        if placement.container_name:
            return Names(container=placement.container_name)
        container = placement.node_id if placement.is_nested else placement.container_id
        names = Names(pod_uid=placement.pod_uid)
        if names.pod_uid:
            names = names.filled(hints)
        names = self._looked_up(self._files, container, names.filled(self._in_node(pid, placement)))
        if not names.is_complete and hints.pod_uid:
            names = self._looked_up(self._files, container, names.filled(hints))
        return names if names.is_complete else names.filled(self._of_conmon(pid, placement))

    def _in_node(self, pid: int, placement: Placement) -> Names:
        """What the node knows, where that is a container; one in a pod knows its own containers and no pods."""
        root = node_root(self._proc, pid, placement.node_id) if placement.node_id else None
        if root is None:
            return Names()
        node = HostFiles(Path(root), self._far.guards.mounts.far)
        known = Names(pod_uid="" if placement.is_nested else placement.pod_uid)
        found = self._looked_up(node, placement.container_id, known)
        return Names(container=found.container) if placement.is_nested else found

    def _looked_up(self, files: HostFiles, container: str, names: Names) -> Names:
        """In a thread where the search leads to a far mount."""
        try:
            return RuntimeNames(files).find(container, names)
        except FarError as far:
            unguarded = RuntimeNames(files.unguarded())
            key = f"names of {container or names.pod_uid}"
            return self._far.ask(key, far.mount, lambda: unguarded.find(container, names)) or names

    def _of_conmon(self, pid: int, placement: Placement) -> Names:
        """`conmon … -c <id> -n <name>`: the parent of what Podman and cri-o run, also without root.

        It is outside: one that is in the container itself is only called so.
        """
        parent = self._parent(pid, "conmon") if placement.container_id else None
        if parent is None or parse_cgroup(self._proc.cgroup(parent.pid)).container == placement.container_id:
            return Names()
        options = dict(pairwise(self._arguments(parent.id)))
        name = options.get("-n", "") if options.get("-c") == placement.container_id else ""
        found = kubernetes_name(name)
        return found if found.pod and not placement.is_nested else Names.checked({"container": name})

    def _has_our_users(self, pid: int) -> bool:
        """Whether it is in our user namespace: in one of his own everybody may mount what he likes."""
        return self._content("self", "uid_map") == self._content(str(pid), "uid_map")

    def _parent(self, pid: int, comm: str) -> Stat | None:
        """The nearest process above with this name."""
        stat = self._proc.stat(pid)
        for _ in range(MOST_PARENTS):
            stat = self._proc.stat(stat.ppid) if stat is not None and stat.ppid > 0 else None
            if stat is None or stat.comm == comm:
                return stat
        return None

    def _mountinfo(self, pid: int) -> str:
        return self._content(str(pid), "mountinfo")

    def _content(self, process: str, name: str) -> str:
        """A file of a process; empty when there is none, or it is not for us.  OSError when it cannot be read now."""
        try:
            with open(self._proc.root / process / name, "rb", buffering=0) as file:
                return file.read(_MOUNTINFO_BYTES).decode("utf-8", "replace")
        except OSError as error:
            if may_pass(error):
                raise
            return ""


def node_root(proc: ProcFs, pid: int, node: str) -> str | None:
    """The root of a machine that is a container itself: of that process in it which started what runs in it."""
    for _ in range(MOST_PARENTS):
        stat = proc.stat(pid)
        if stat is None or stat.ppid <= 1:
            return None
        pid = stat.ppid
        if parse_cgroup(proc.cgroup(pid)).container == node:
            return proc.path(pid, "root")
    return None
