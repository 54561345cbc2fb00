"""Where container runtimes keep what they know, below the root of their machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .host_files import HostFiles

PODS = "var/log/pods"
LINKS = "var/log/containers"
POD_FOLDER = re.compile(r"(?P<namespace>[^_]+)_(?P<pod>[^_]+)_(?P<uid>[^_]+)")
"""The kubelet's folder of a pod's logs: none of the three may hold an underscore."""

CONTAINERD_ROOTS = (
    "run/containerd",
    "run/k3s/containerd",
    "var/snap/microk8s/common/run/containerd",
    "run/docker/containerd/daemon",
)
TASKS = "io.containerd.runtime.v2.task"
CRIO_ROOTS = ("run/containers/storage", "var/lib/containers/storage")
PODMAN_ROOT = "var/lib/containers/storage"
NERDCTL = "var/lib/nerdctl"

_DOCKER_ROOTS = ("var/lib/docker", "var/snap/docker/common/var-lib-docker")
_REMAPPED = re.compile(r"\d+\.\d+")
"""Folder of Docker's data when user ids are mapped."""


def docker_roots(files: HostFiles) -> Iterator[str]:
    for root in _DOCKER_ROOTS:
        yield root
        yield from (f"{root}/{name}" for name in files.names(root) if _REMAPPED.fullmatch(name))


def plain_uid(uid: str) -> str:
    """A pod's uid as it is compared: with dashes, underscores or nothing between its parts it is the same."""
    return uid.replace("-", "").replace("_", "").lower()
