"""Which container, pod, unit or job a process belongs to, from the text of /proc/PID/cgroup.

Every line is parsed; the segments are walked from the right, because the last id is the workload's and the ones
before it are nodes inside nodes.  `scope_of` names the same place as a control group: what ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_CONTAINER = re.compile(
    r"(?:cri-containerd[-:]|crio-|docker-|libpod-payload-|libpod-|nerdctl-)?(?P<id>[0-9a-f]{64}|[0-9a-f]{32}-\d{6,12})(?:\.scope)?"
)
"""64 hex digits, or 32 and a number as the task ids of ECS."""
_OWN_UNIT = re.compile(r"[^/]+\.service/libpod-payload-")
"""Podman under systemd: the container runs inside the unit that stands for it."""
_NOT_THE_WORKLOAD = re.compile(r"conmon|\.mount$|\.swap$")
_POD = re.compile(r"(?:.*-)?pod(?P<uid>[0-9a-f]{8}[-_][0-9a-f_-]{27}|[0-9a-f]{32})(?:\.slice.*)?")
_UNIT = re.compile(r"[^/]+\.service")
_USER_MANAGER = re.compile(r"/user@(?P<user>\d{1,10})\.service/")
_JOB = re.compile(r"job_(?P<job>\d+)")
_STEP = re.compile(r"step_\w+")
_STEPS = re.compile(r"(?:.*_)?slurmstepd\.scope")
"""Holds the steps of all jobs, below the job's number or (Slurm 26) its own id."""
_SESSION = re.compile(r"[^/]+\.(?:service|scope)")
_NO_SCOPE = re.compile(r"init\.scope|user@[^/]*\.service")
"""Hold much besides the server: the first process, everything a user runs."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a process runs; empty strings where it does not apply.

    `user_unit`: a unit of a user's own manager, as "1000/llm.service".  `node_id`: the container that stands for a
    machine (kind, Docker in Docker) and runs this one.
    """

    container_id: str = ""
    pod_uid: str = ""
    unit: str = ""
    slurm_job: str = ""
    user_unit: str = ""
    node_id: str = ""

    @property
    def weight(self) -> int:
        """How much this line tells: container before job before unit."""
        return 4 * bool(self.container_id) + 2 * bool(self.slurm_job) + bool(self.unit or self.user_unit)


def parse_cgroup(text: str) -> Placement:
    """The most telling line of a cgroup file; v2 wins on a tie, then systemd's hierarchy."""
    best = Placement()
    for line in sorted(text.splitlines(), key=_preference):
        _, _, rest = line.partition(":")
        _, _, path = rest.partition(":")
        found = _parse_path(path.removesuffix(" (deleted)"))
        if found.weight > best.weight:
            best = found
    return best


def _preference(line: str) -> int:
    if line.startswith("0::"):
        return 0
    return 1 if ":name=systemd:" in line else 2


def _parse_path(path: str) -> Placement:
    container = pod = unit = user_unit = job = node = ""
    for segment in reversed(re.split("[/:]", path)):
        if _NOT_THE_WORKLOAD.search(segment):
            continue
        node = node or (_group(_CONTAINER, segment, "id") if container else "")
        container = container or _group(_CONTAINER, segment, "id")
        pod = pod or _group(_POD, segment, "uid").replace("_", "-")
        job = job or _group(_JOB, segment, "job")
        if not unit and _UNIT.fullmatch(segment) and not segment.startswith("user@"):
            unit = segment
    if "/user.slice/" in path or (container and not _OWN_UNIT.search(path)):
        manager = _USER_MANAGER.search(path)
        user_unit = f"{manager['user']}/{unit}" if manager and unit and not container else ""
        unit = ""  # a user's own unit, or the runtime's: not a system unit of the server
    return Placement(container, pod, unit, job, user_unit, node)


def _group(pattern: re.Pattern[str], segment: str, name: str) -> str:
    match = pattern.fullmatch(segment)
    return match[name] if match else ""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One control group: controllers of its hierarchy as /proc/PID/cgroup prints them ("" = v2), and its path."""

    controllers: str
    path: str

    def holds(self, text: str) -> bool:
        """Whether the process of this cgroup file is in the group or below it."""
        below = self.path.rstrip("/") + "/"
        return any(
            line.controllers == self.controllers and (line.path + "/").startswith(below) for line in cgroups_in(text)
        )


def cgroups_in(text: str) -> Iterator[Cgroup]:
    """The groups of a cgroup file, v2 first, then systemd's hierarchy."""
    for line in sorted(text.splitlines(), key=_preference):
        _, colon, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and path.startswith("/"):
            yield Cgroup(controllers, path.removesuffix(" (deleted)"))


def scope_of(text: str) -> Cgroup | None:
    """The group of the container, else of the job step, the unit or the login session; None = in none of them.

    0::/system.slice/docker-<id>.scope/worker -> /system.slice/docker-<id>.scope
    0::/user.slice/user-1000.slice/session-3.scope -> the same
    """
    best, found = 0, None
    for group in cgroups_in(text):
        weight, path = _scope(group.path)
        if weight > best:
            best, found = weight, Cgroup(group.controllers, path)
    return found


def _scope(path: str) -> tuple[int, str]:
    """How telling the best scope on the path is (0 = there is none), and the path up to it."""
    best, end = 0, 0
    parts = path.split("/")
    for index in range(len(parts) - 1, 0, -1):
        weight = _scope_weight(parts[index], parts[index - 1])
        if weight > best:
            best, end = weight, index
    return best, "/".join(parts[: end + 1])


def _scope_weight(part: str, above: str) -> int:
    if _NOT_THE_WORKLOAD.search(part) or _NO_SCOPE.fullmatch(part) or _STEPS.fullmatch(part):
        return 0
    if any(_CONTAINER.fullmatch(piece) for piece in part.split(":")):
        return 5
    if _STEP.fullmatch(part):
        return 4
    if _JOB.fullmatch(part):
        return 3
    if _STEPS.fullmatch(above):
        return 2
    return int(_SESSION.fullmatch(part) is not None)
