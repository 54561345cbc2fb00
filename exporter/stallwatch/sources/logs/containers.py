"""From the id of a container to the file its runtime writes stdout and stderr to, by the files of this machine alone.

Docker and nerdctl (json-file), Kubernetes with containerd, cri-o or Docker, Podman (k8s-file).  Every path is taken
below one root.  Drivers that write no file of text (Docker's `local`, remote ones, the journal) are no evidence.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..host_files import HostFiles, of
from ..procfs import reason_of
from ..runtime_folders import (
    CONTAINERD_ROOTS,
    CRIO_ROOTS,
    LINKS,
    NERDCTL,
    POD_FOLDER,
    PODMAN_ROOT,
    PODS,
    TASKS,
    docker_roots,
    plain_uid,
)

log = logging.getLogger(__name__)

_TASK = f"{TASKS}/k8s.io"
_ID = re.compile(r"[0-9a-f]{32}[0-9a-f-]{0,34}")
_NUMBERED = re.compile(r"(\d{1,9})\.log")
_TERMINATION_LOG = re.compile(
    r"/pods/[0-9a-f-]{32,36}/containers/(?P<name>[a-z0-9.-]+)/[0-9a-f]{8} /dev/termination-log "
)
"""In mountinfo: the kubelet mounts a file of the container, in a folder with its name."""


@dataclass(frozen=True, slots=True)
class Found:
    """A regular file, or why there is none: `absent` or a read reason; `driver` that writes no such file, if known."""

    path: str = ""
    reason: str = "absent"
    driver: str = ""


class ContainerLogs:
    """Looks below one root.  What was found is kept while it is there.  `far` as for HostFiles."""

    def __init__(self, root: Path, far: Callable[[str], str | None] = lambda path: None) -> None:
        self._files = HostFiles(root, far)
        self._found: dict[str, str] = {}  # container id -> path
        self._told: set[str] = set()

    def find(self, container: str, pod: str = "", mountinfo: Callable[[], str] = str) -> Found:
        """The log of a container.  `pod` is its pod's uid, `mountinfo` that of a process in it (asked if needed)."""
        if not _ID.fullmatch(container):
            return Found()
        if (known := self._found.get(container)) and self._files.is_file(known):
            return Found(known, "")
        found = self._search(container, pod, mountinfo)
        if found.path:
            self._found[container] = found.path
        elif known and found.reason == "absent":
            return Found(known, "")  # between the renaming of the old file and the making of the new one
        elif found.driver and container not in self._told:
            self._told.add(container)
            log.debug("container without a log file", extra={"driver": found.driver})
        return found

    def unguarded(self, container: str) -> ContainerLogs:
        """The same for one container, to be used in a thread: it goes to far mounts, too."""
        other = ContainerLogs(Path())
        other._files = self._files.unguarded()
        other._found = {container: self._found[container]} if container in self._found else {}
        other._told = self._told & {container}
        return other

    def learn(self, other: ContainerLogs) -> None:
        """Keep what another has found."""
        self._found |= other._found
        self._told |= other._told

    def forget(self, containers: set[str]) -> None:
        """Keep what is known of these containers only."""
        self._found = {name: path for name, path in self._found.items() if name in containers}
        self._told &= containers

    def _search(self, container: str, pod: str, mountinfo: Callable[[], str]) -> Found:
        answers = []
        looks: tuple[Callable[[], Found], ...] = (
            lambda: self._by_link(container),
            lambda: self._by_pod(container, pod, mountinfo),
            lambda: self._podman(container),
            lambda: self._by_crio(container),
            lambda: self._docker(container),
            lambda: self._nerdctl(container),
        )
        for look in looks:
            try:
                answer = look()
            except OSError as error:
                answer = Found(reason=reason_of(error))
            if answer.path or answer.driver:
                return answer
            answers.append(answer.reason)
        return Found(reason=next((reason for reason in answers if reason not in ("absent", "vanished")), "absent"))

    # --- Kubernetes ------------------------------------------------------------------------------------------

    def _by_link(self, container: str) -> Found:
        """`<pod>_<namespace>_<container>-<id>.log`; long names are cut at their end, so the id may be missing."""
        for name in self._files.names(LINKS):
            if name.endswith(f"-{container}.log"):
                return self._file(f"{LINKS}/{name}")
        return Found()

    def _by_pod(self, container: str, pod: str, mountinfo: Callable[[], str]) -> Found:
        """`<namespace>_<pod>_<uid>/<container>/<number of the start>.log`."""
        uid = plain_uid(pod)
        for folder in self._files.names(PODS) if uid else ():
            match = POD_FOLDER.fullmatch(folder)
            if match is None or plain_uid(match["uid"]) != uid:
                continue
            names = self._files.names(f"{PODS}/{folder}")
            name = names[0] if len(names) == 1 else self._container_name(container, mountinfo)
            if name in names:
                return self._newest(f"{PODS}/{folder}/{name}")
        return Found()

    def _newest(self, folder: str) -> Found:
        numbers = [int(match[1]) for name in self._files.names(folder) if (match := _NUMBERED.fullmatch(name))]
        return self._file(f"{folder}/{max(numbers)}.log") if numbers else Found()

    def _container_name(self, container: str, mountinfo: Callable[[], str]) -> str:
        for root in CONTAINERD_ROOTS:
            annotations = self._files.document(f"{root}/{_TASK}/{container}/config.json").get("annotations")
            if isinstance(name := of(annotations, "io.kubernetes.cri.container-name"), str):
                return name
        match = _TERMINATION_LOG.search(mountinfo())
        return match["name"] if match else ""

    def _podman(self, container: str) -> Found:
        """The file of the driver k8s-file, of containers that run as root."""
        for folder in self._files.names(PODMAN_ROOT):
            if folder.endswith("-containers"):
                found = self._file(f"{PODMAN_ROOT}/{folder}/{container}/userdata/ctr.log")
                if found.path:
                    return found
        return Found()

    def _by_crio(self, container: str) -> Found:
        for root in CRIO_ROOTS:
            document = self._files.document(f"{root}/overlay-containers/{container}/userdata/config.json")
            annotations = document.get("annotations")
            if isinstance(path := of(annotations, "io.kubernetes.cri-o.LogPath"), str) and path.endswith(".log"):
                return self._file(path)
            if of(annotations, "io.container.manager") == "libpod":
                return Found(driver="podman")
        return Found()

    # --- Docker ----------------------------------------------------------------------------------------------

    def _docker(self, container: str) -> Found:
        for root in docker_roots(self._files):
            folder = f"{root}/containers/{container}"
            path = self._files.resolved(folder)
            if path is None or not os.path.isdir(path):
                continue
            driver = of(self._files.document(f"{folder}/hostconfig.json").get("LogConfig"), "Type")
            if driver not in (None, "", "json-file"):
                return Found(driver=str(driver) if driver in _DRIVERS else "other")
            named = self._files.document(f"{folder}/config.v2.json").get("LogPath")
            if isinstance(named, str) and named.endswith(f"/{container}-json.log"):
                found = self._file(named)
                if found.path:
                    return found
            found = self._file(f"{folder}/{container}-json.log")
            if not found.path and self._files.resolved(f"{folder}/local-logs") is not None:
                return Found(driver="local")
            return found
        return Found()

    def _nerdctl(self, container: str) -> Found:
        top = NERDCTL
        for address in self._files.names(top):
            for namespace in self._files.names(f"{top}/{address}/containers"):
                found = self._file(f"{top}/{address}/containers/{namespace}/{container}/{container}-json.log")
                if found.path:
                    return found
        return Found()

    def _file(self, path: str) -> Found:
        real = self._files.file(path)
        return Found() if real is None else Found(real, "")


_DRIVERS = frozenset(
    ("none", "local", "journald", "syslog", "gelf", "fluentd", "awslogs", "splunk", "etwlogs", "gcplogs", "logentries")
)
"""Docker's drivers that write no file of text; a plug-in may have any name."""
