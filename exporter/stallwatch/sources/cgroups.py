"""Which container, pod, unit or job a process belongs to, from the text of /proc/PID/cgroup.

Every line is parsed; the segments are walked from the right, because the last id is the workload's and the ones
before it are nodes inside nodes.  `scope_of` names the same place as a control group: what ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_ID = r"(?P<id>[0-9a-f]{64}|[0-9a-f]{32}-\d{6,12})"
"""64 hex digits, or 32 and a number as the task ids of ECS."""
_UUID = r"(?P<id>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
_CONTAINER = re.compile(rf"(?:cri-containerd[-:]|crio-|docker-|libpod-payload-|libpod-|nerdctl-)?{_ID}(?:\.scope)?")
_ANYTHING = re.compile(".*")

_CONTAINERS: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...] = (
    (_CONTAINER, _ANYTHING),
    (re.compile(_UUID), re.compile("garden|mesos")),
    # Nomad: the allocation and its task.
    (re.compile(rf"{_UUID}\.(?P<name>.+)\.scope"), _ANYTHING),
    (re.compile(r"lxc\.payload\.(?P<name>.+)"), _ANYTHING),
    (re.compile(r"(?P<name>.+)"), re.compile(r"lxc(?:\.payload)?")),
    (re.compile(r"systemd-nspawn@(?P<name>.+)\.service"), _ANYTHING),
    # Not the machines of KVM, which are called the same.
    (re.compile(r"machine-(?!qemu\b|qemu\\x2d)(?P<name>.+)\.scope"), re.compile(r"machine\.slice")),
    # containerd's own client: ids of any form.
    (re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)"), re.compile("default")),
)
"""Shapes of a segment that is a container, each with what the segment above it has to be."""

_NOT_THE_WORKLOAD = re.compile(r"(?:crio-|libpod-)conmon-.*|.+\.(?:mount|swap)|lxc\.monitor(?:\..+)?")
_POD = re.compile(r"(?:.*-)?pod(?P<uid>[0-9a-f]{8}[-_][0-9a-f_-]{27}|[0-9a-f]{32})(?:\.slice)?")
_UNIT = re.compile(r"(?!user@)[^/]+\.service")
_USER_MANAGER = re.compile(r"user@(?P<user>\d{1,10})\.service")
_OWN_CONTAINER = "libpod-payload-"
"""Podman under systemd: the container runs inside the unit that stands for it."""
_DAEMONS = re.compile(
    r"(?:containerd|docker|crio|cri-o|cri-docker|kubelet|k3s|k3s-agent|rke2-server|rke2-agent|podman|slurmd|nomad)\.service"
    r"|snap\..+\.(?:daemon-containerd|dockerd)\.service"
)
"""Units whose processes run the workloads of others."""
_JOB = re.compile(r"job_(?P<job>\d+)")
_JOB_ABOVE = re.compile(r"uid_\d+|(?:.*_)?slurmstepd\.scope|slurm(?:_.+)?")
_STEP = re.compile(r"step_\w+")
_STEPS = re.compile(r"(?:.*_)?slurmstepd\.scope")
"""Holds the steps of all jobs, below the job's number or (Slurm 26) its own id."""
_SESSION = re.compile(r"[^/]+\.(?:service|scope)")
_NO_SCOPE = re.compile(r"init\.scope|user@[^/]*\.service")
"""Hold much besides the server: the first process, everything a user runs."""
_MIXED = re.compile(r"(.+\.slice):([^:]+):([^:]+)")
"""One segment for three: containerd without the systemd driver below a kubelet that has it."""
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a process runs; empty strings where it does not apply.

    `user_unit`: a unit of a user's own manager, as "1000/llm.service".  `node_id`: the container that stands for a
    machine (kind, Docker in Docker, LXC) and runs this one.  `container_name`: where the path names it itself.
    `is_nested`: the pod is that of the node, not the other way round.
    """

    container_id: str = ""
    pod_uid: str = ""
    unit: str = ""
    slurm_job: str = ""
    user_unit: str = ""
    node_id: str = ""
    container_name: str = ""
    is_nested: bool = False

    @property
    def container(self) -> str:
        """What tells the container from every other one here; "" = it is in none."""
        return self.container_id or self.container_name

    @property
    def weight(self) -> tuple[bool, ...]:
        """How much this line tells: container before pod before job before unit."""
        return (bool(self.container), bool(self.pod_uid), bool(self.slurm_job), bool(self.unit or self.user_unit))


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
    parts = _parts(path)
    containers = [(at, found) for at in range(len(parts)) if (found := _container(parts, at)) is not None]
    at, inner = containers[-1] if containers else (len(parts), {})
    around, outer = next(reversed(containers[:-1]), (0, {}))
    pod_at = next((index for index in range(at - 1, -1, -1) if _POD.fullmatch(parts[index])), None)
    unit, user_unit = _units(parts, at if containers else None)
    return Placement(
        container_id=inner.get("id") or "",
        pod_uid="" if pod_at is None else _group(_POD, parts[pod_at], "uid").replace("_", "-"),
        unit=unit,
        slurm_job=_job(parts),
        user_unit=user_unit,
        node_id=outer.get("id") or outer.get("name") or "",
        container_name=inner.get("name") or "",
        is_nested=pod_at is not None and pod_at < around,
    )


def _parts(path: str) -> list[str]:
    """The segments below the root, or below where the reader's own cgroup namespace begins."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    split = [match.groups() if (match := _MIXED.fullmatch(part)) else (part,) for part in parts]
    return [piece for pieces in split for piece in pieces]


def _container(parts: Sequence[str], at: int) -> dict[str, str] | None:
    """Id and name of the container that a segment is; None when it is none.  Of a pod of Podman it is none."""
    above = parts[at - 1] if at else ""
    for shape, parent in _CONTAINERS:
        match = shape.fullmatch(parts[at])
        if match is None or not parent.fullmatch(above):
            continue
        if above == "default" and at != 1:
            continue
        if above == "libpod_parent" and not parts[at].startswith("libpod-"):
            return None
        return {name: unescaped(value) for name, value in match.groupdict().items() if value}
    return None


def unescaped(name: str) -> str:
    """A name as it was before systemd escaped it: `a\\x2db` is a-b."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), name)


def _units(parts: Sequence[str], container: int | None) -> tuple[str, str]:
    """System unit and user's unit.  Of a container only its own one: else it is its runtime's, or one inside it."""
    manager = next((at for at, part in enumerate(parts) if _USER_MANAGER.fullmatch(part)), None)
    after = 0 if manager is None else manager + 1
    unit = next((at for at in range(after, len(parts)) if _UNIT.fullmatch(parts[at])), None)
    if unit is None or _DAEMONS.fullmatch(parts[unit]):
        return "", ""
    is_own = container == unit + 1 and parts[container].startswith(_OWN_CONTAINER) if container is not None else True
    if not is_own or (manager is None and "user.slice" in parts):
        return "", ""
    if manager is None:
        return parts[unit], ""
    user = _group(_USER_MANAGER, parts[manager], "user")
    return "", f"{user}/{parts[unit]}" if container is None else ""


def _job(parts: Sequence[str]) -> str:
    """Number of the Slurm job.  Other programs call a group `job_7` as well, but not there, nor with steps in it."""
    for at in range(len(parts) - 1, -1, -1):
        is_slurm = (at and _JOB_ABOVE.fullmatch(parts[at - 1])) or any(map(_STEP.fullmatch, parts[at + 1 : at + 2]))
        if is_slurm and (job := _group(_JOB, parts[at], "job")):
            return job
    return ""


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


@lru_cache(maxsize=256)
def cgroups_in(text: str) -> tuple[Cgroup, ...]:
    """The groups of a cgroup file, v2 first, then systemd's hierarchy."""
    groups = list[Cgroup]()
    for line in sorted(text.splitlines(), key=_preference):
        _, colon, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and path.startswith("/"):
            groups.append(Cgroup(controllers, path.removesuffix(" (deleted)")))
    return tuple(groups)


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
    if _NOT_THE_WORKLOAD.fullmatch(part) or _NO_SCOPE.fullmatch(part) or _STEPS.fullmatch(part):
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
