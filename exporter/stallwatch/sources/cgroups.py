"""Which container, pod, unit or job a process belongs to, from the text of /proc/PID/cgroup.

Every line is parsed; the segments are walked from the right, because the last id is the workload's and the ones
before it are nodes inside nodes.
"""

from __future__ import annotations

import re
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
_JOB = re.compile(r"job_(?P<job>\d+)")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a process runs; empty strings where it does not apply."""

    container_id: str = ""
    pod_uid: str = ""
    unit: str = ""
    slurm_job: str = ""

    @property
    def weight(self) -> int:
        """How much this line tells: container before job before unit."""
        return 4 * bool(self.container_id) + 2 * bool(self.slurm_job) + bool(self.unit)


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
    container = pod = unit = job = ""
    for segment in reversed(re.split("[/:]", path)):
        if _NOT_THE_WORKLOAD.search(segment):
            continue
        container = container or _group(_CONTAINER, segment, "id")
        pod = pod or _group(_POD, segment, "uid").replace("_", "-")
        job = job or _group(_JOB, segment, "job")
        if not unit and _UNIT.fullmatch(segment) and not segment.startswith("user@"):
            unit = segment
    if "/user.slice/" in path or (container and not _OWN_UNIT.search(path)):
        unit = ""  # a user's own unit, or the runtime's: not a system unit of the server
    return Placement(container, pod, unit, job)


def _group(pattern: re.Pattern[str], segment: str, name: str) -> str:
    match = pattern.fullmatch(segment)
    return match[name] if match else ""
