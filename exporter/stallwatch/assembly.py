"""Puts the parts together: settings -> host -> pollers -> daemon.  Shared by `serve` and `check`."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .config import COLLECTORS, Config, load_config
from .daemon import Daemon
from .frameworks import Framework, load_frameworks
from .memory import Memory
from .model import Report, Result, Scene
from .poller import Poller
from .rights import our_remedy
from .sources import Host, Source
from .sources.logs.collector import Logs
from .sources.processes import Processes
from .sources.table import SOURCES
from .strict_yaml import InputError

log = logging.getLogger(__name__)

MOST_DESCRIPTORS = 65536
"""Files we may have open: 4.4 KB of kernel memory each (measured), and more threads than a node has."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says about looking at the machine."""

    config_file: str | None = None
    procfs: str = "/proc"
    rootfs: str = "/"
    collectors: tuple[str, ...] = COLLECTORS


def read_config(settings: Settings, frameworks: tuple[Framework, ...]) -> Config:
    """The configuration; defaults without a file.  InputError when the file is wrong."""
    if settings.config_file is None:
        return Config()
    return load_config(settings.config_file, tuple(framework.name for framework in frameworks))


def _check_proc(proc: Path) -> None:
    """A wrong --path.procfs is said at once."""
    try:
        proc.joinpath("stat").read_bytes()
    except OSError as error:
        problem = f"is no /proc: stat cannot be read: {error.strerror}"
        raise InputError(str(proc), 0, "--path.procfs", problem) from None


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise InputError(str(root), 0, "--path.rootfs", "is no directory")


def raise_descriptor_limit() -> None:
    """As many open files as we may have: the threads collector keeps one per thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        log.warning("descriptor limit stays", extra={"limit": soft})


def make_daemon(
    settings: Settings,
    publish: Callable[[Report], None],
    config: Config | None = None,
    witness: Callable[[Result, float, float], None] | None = None,
    memory: Memory | None = None,
) -> Daemon:
    """A daemon that is not started.  InputError when the configuration or a framework file is wrong.

    `witness` and `memory`: see Daemon.
    """
    frameworks = load_frameworks()
    config = config or read_config(settings, frameworks)
    raise_descriptor_limit()
    host = Host(config, frameworks, Path(settings.procfs), Path(settings.rootfs))
    _check_proc(host.proc)
    _check_root(host.root)

    def pollers(scene: Callable[[], Scene], notify: Callable[[Result], None]) -> Iterable[Poller]:
        for name, make in SOURCES.items():
            if name in settings.collectors:
                source = make(host)
                poller = Poller(source, config.intervals.of(name), scene, notify)
                if isinstance(source, Logs):
                    source.wake = poller.wake
                if memory is not None:
                    _remind(source, memory)
                yield poller

    return Daemon(host, pollers, publish, witness=witness, memory=memory, no_right=our_remedy())


def _remind(source: Source, memory: Memory) -> None:
    """Tell a source what it counted and told before a restart of ours."""
    if isinstance(source, Logs):
        source.past.seal, source.past.told_before = memory.seal, memory.position
        source.past.key_of, source.past.counted_before = memory.log_key, memory.counted
    if isinstance(source, Processes):
        source.starts_before = memory.starts_before
