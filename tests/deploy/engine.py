"""Podman, where it may run containers here: the only engine that needs no daemon."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .containers import CannotBuildError
from .packages import documented

ENGINE = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "file")
"""crun, its default, refuses the hybrid cgroups of some machines."""

LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
"""Podman raises both by default, which a machine that is a guest itself may forbid."""

SECONDS = 300.0
PYTHON = "/opt/stallwatch/bin/python"
"""In the image."""


def podman(*words: str, check: bool = True) -> str:
    done = subprocess.run([*ENGINE, *words], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert not check or done.returncode == 0, f"podman {words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout.strip()


def need(image: str) -> None:
    """CannotBuildError with what Podman says where it can run no container of the image."""
    if os.geteuid() != 0 or shutil.which("podman") is None or shutil.which("runc") is None:
        raise CannotBuildError("root, podman and runc are needed")
    words = [*ENGINE, "run", "--rm", *LIMITS, "--network", "host", "--entrypoint", "/bin/sh", image, "-c", "exit 0"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode != 0:
        raise CannotBuildError(f"podman: {done.stderr[-300:]}")


@contextmanager
def running(name: str, words: Sequence[str]) -> Iterator[None]:
    """A container of this name while the block runs."""
    podman(*words)
    try:
        yield
    except BaseException as error:
        error.add_note(podman("logs", "--tail", "40", name, check=False))
        raise
    finally:
        podman("rm", "--force", "--time", "3", "--volumes", name, check=False)


def as_documented(image: str, name: str, *extra: str, settings: Sequence[str] = ()) -> list[str]:
    """The words of docs/INSTALL.md's `docker run` for this image and name; a setting takes the place of its like."""
    (line,) = (line for line in documented("docker run") if line.startswith("docker run"))
    words = shlex.split(line)
    assert words[:2] == ["docker", "run"]
    words[words.index("--name") + 1] = name
    replaced = {setting.partition("=")[0]: setting for setting in settings}
    words = [replaced.pop(word.partition("=")[0], word) for word in words]
    more = [word for setting in replaced.values() for word in ("--env", setting)]
    return [*words[1:-1], *LIMITS, *more, *extra, image]
