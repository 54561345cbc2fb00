"""What a container is called, and its pod: from its id and its pod's uid, by the files of this machine alone.

Asked in the order of how far each is to be trusted: what the runtime itself keeps of the container, then names of log
folders and links.  No environment of a process is read, and no host name: neither is sure to be the pod's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from .host_files import HostFiles, of
from .runtime_folders import (
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

MOST_NAMES_READ = 512
"""Small files of nerdctl, each a name, that are read to find one id."""

_POD_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_LINK = re.compile(r"(?P<pod>[^_]+)_(?P<namespace>[^_]+)_(?P<container>[^_]+)-[0-9a-f]{64}\.log")
_KUBERNETES = re.compile(r"/?k8s_(?P<container>[^_]+)_(?P<pod>[^_]+)_(?P<namespace>[^_]+)_(?P<pod_uid>[^_]+)_\d+")
"""What Docker and cri-o call a container of a pod."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_FORMS = {"container": _NAME, "pod": _POD_NAME, "namespace": _POD_NAME, "pod_uid": _NAME}
_CONTAINERD = {
    "pod": "io.kubernetes.cri.sandbox-name",
    "namespace": "io.kubernetes.cri.sandbox-namespace",
    "container": "io.kubernetes.cri.container-name",
    "pod_uid": "io.kubernetes.cri.sandbox-uid",
}
_CRIO = {
    "pod": "io.kubernetes.pod.name",
    "namespace": "io.kubernetes.pod.namespace",
    "container": "io.kubernetes.container.name",
    "pod_uid": "io.kubernetes.pod.uid",
}
_NERDCTL_NAME = {"container": "nerdctl/name"}


@dataclass(frozen=True, slots=True)
class Names:
    """What people call a container; empty strings where there is no such name or it is not known."""

    pod: str = ""
    namespace: str = ""
    container: str = ""
    pod_uid: str = ""

    def filled(self, other: Names) -> Names:
        """These names, and where one is missing that of another source.

        What another source says of another pod is not taken.
        """
        if self.pod_uid and other.pod_uid and plain_uid(self.pod_uid) != plain_uid(other.pod_uid):
            return self
        missing = {each.name: getattr(other, each.name) for each in fields(self) if not getattr(self, each.name)}
        return replace(self, **missing)

    @classmethod
    def checked(cls, found: Mapping[str, object]) -> Names:
        """Only what has the form of a name."""
        return cls(
            **{key: value for key, value in found.items() if isinstance(value, str) and _FORMS[key].fullmatch(value)}
        )

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to be found out: a container of a pod has its pod's name, too."""
        in_pod = bool(self.pod_uid or self.pod or self.namespace)
        return bool(self.container) and (not in_pod or bool(self.pod and self.namespace and self.pod_uid))


def kubernetes_name(name: str) -> Names:
    """The parts of `k8s_<container>_<pod>_<namespace>_<uid>_<attempt>`; of any other name none."""
    match = _KUBERNETES.fullmatch(name)
    return Names.checked(match.groupdict()) if match else Names()


class RuntimeNames:
    """Looks below one root.  Raises FarError as HostFiles does, and OSError where it may not look."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def find(self, container: str, known: Names) -> Names:
        """All that can be found of a container's id ("" = unknown), beside what is known already."""
        looks: tuple[Callable[[str, Names], Names], ...] = (
            self._containerd,
            self._crio,
            self._docker,
            self._podman,
            self._nerdctl,
            self._link,
        )
        for look in looks if container else ():
            if known.is_complete:
                return known
            known = known.filled(self._tried(look, container, known))
        return known if known.is_complete else known.filled(self._tried(self._pod_folder, container, known))

    @staticmethod
    def _tried(look: Callable[[str, Names], Names], container: str, known: Names) -> Names:
        """A folder that may not be read hides nothing but itself."""
        try:
            return look(container, known)
        except OSError:
            return Names()

    def _containerd(self, container: str, known: Names) -> Names:
        """The annotations that containerd, and nerdctl, give a task, in whatever namespace of containerd."""
        for root in CONTAINERD_ROOTS:
            for space in self._files.names(f"{root}/{TASKS}"):
                document = self._files.document(f"{root}/{TASKS}/{space}/{container}/config.json")
                if document:
                    annotations = document.get("annotations")
                    return _annotated(annotations, _CONTAINERD).filled(_annotated(annotations, _NERDCTL_NAME))
        return Names()

    def _crio(self, container: str, known: Names) -> Names:
        for root in CRIO_ROOTS:
            document = self._files.document(f"{root}/overlay-containers/{container}/userdata/config.json")
            if document:
                return _annotated(document.get("annotations"), _CRIO)
        return Names()

    def _docker(self, container: str, known: Names) -> Names:
        """Docker's own name; of a container of a pod it holds all names."""
        for root in docker_roots(self._files):
            name = of(self._files.document(f"{root}/containers/{container}/config.v2.json"), "Name")
            if isinstance(name, str):
                in_pod = kubernetes_name(name)
                return in_pod if in_pod.pod else Names.checked({"container": name.removeprefix("/")})
        return Names()

    def _podman(self, container: str, known: Names) -> Names:
        """The list of containers of the storage that Podman keeps as root."""
        for folder in self._files.names(PODMAN_ROOT):
            if not folder.endswith("-containers"):
                continue
            listed = self._files.json(f"{PODMAN_ROOT}/{folder}/containers.json")
            for each in listed if isinstance(listed, list) else ():
                names = of(each, "names")
                if of(each, "id") == container and isinstance(names, list) and names:
                    in_pod = kubernetes_name(str(names[0]))
                    return in_pod if in_pod.pod else Names.checked({"container": names[0]})
        return Names()

    def _nerdctl(self, container: str, known: Names) -> Names:
        """A file for each name, which holds the id."""
        left = MOST_NAMES_READ
        for address in self._files.names(NERDCTL):
            for space in self._files.names(f"{NERDCTL}/{address}/names"):
                for name in self._files.names(f"{NERDCTL}/{address}/names/{space}"):
                    left -= 1
                    if left < 0:
                        return Names()
                    content = self._files.content(f"{NERDCTL}/{address}/names/{space}/{name}", 65)
                    if content.strip() == container.encode():
                        return Names.checked({"container": name})
        return Names()

    def _link(self, container: str, known: Names) -> Names:
        """`<pod>_<namespace>_<container>-<id>.log`: cut at its end where it is long, and then without the id."""
        for name in self._files.names(LINKS):
            if name.endswith(f"-{container}.log") and (match := _LINK.fullmatch(name)):
                folder = os.path.basename(os.path.dirname(os.path.dirname(self._link_target(name))))
                uid = of_folder["uid"] if (of_folder := POD_FOLDER.fullmatch(folder)) else ""
                return Names.checked({**match.groupdict(), "pod_uid": uid})
        return Names()

    def _link_target(self, name: str) -> str:
        """Where a link leads at first: with Docker the log of the pod is a link itself."""
        try:
            return os.readlink(f"{self._files.resolved(LINKS)}/{name}")
        except OSError:
            return ""

    def _pod_folder(self, container: str, known: Names) -> Names:
        """`<namespace>_<pod>_<uid>/<container>`, by the pod's uid; the container's where there is only one."""
        uid = plain_uid(known.pod_uid)
        for folder in self._files.names(PODS) if uid else ():
            match = POD_FOLDER.fullmatch(folder)
            if match is None or plain_uid(match["uid"]) != uid:
                continue
            inside = self._files.names(f"{PODS}/{folder}")
            only = inside[0] if len(inside) == 1 else ""
            return Names.checked({"pod": match["pod"], "namespace": match["namespace"], "container": only})
        return Names()


def _annotated(annotations: object, keys: Mapping[str, str]) -> Names:
    return Names.checked({name: of(annotations, key) for name, key in keys.items()})
