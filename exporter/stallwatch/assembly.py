"""Puts the parts together: settings -> host -> pollers -> daemon.  Shared by `serve` and `check`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .config import COLLECTORS, Config, load_config
from .daemon import Daemon
from .frameworks import Framework, load_frameworks
from .model import Report, Result, Scene
from .poller import Poller
from .sources import Host
from .sources.logs import Logs
from .sources.table import SOURCES

log = logging.getLogger(__name__)


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


def make_daemon(
    settings: Settings, publish: Callable[[Report], None], config: Config | None = None
) -> Daemon:
    """A daemon that is not started.  InputError when the configuration or a framework file is wrong."""
    frameworks = load_frameworks()
    config = config or read_config(settings, frameworks)
    host = Host(config, frameworks, Path(settings.procfs), Path(settings.rootfs))
    host.proc.joinpath("stat").read_bytes()  # a wrong --path.procfs is said at once

    def pollers(scene: Callable[[], Scene], notify: Callable[[Result], None]) -> Iterable[Poller]:
        for name, make in SOURCES.items():
            if name in settings.collectors:
                source = make(host)
                poller = Poller(source, config.intervals.of(name), scene, notify)
                if isinstance(source, Logs):
                    source.wake = poller.wake
                yield poller

    return Daemon(host, pollers, publish)
