"""A bench has the processes of the machine for itself: run again in a PID namespace, where root may make one."""

from __future__ import annotations

import os
import shutil
import sys

_INSIDE = "STALLWATCH_BENCH_ALONE"
_OWN_SHM = 'mount -t tmpfs shm /dev/shm && exec "$0" "$@"'


def be_alone() -> None:
    """Servers that others run on this machine would be found, and read, and counted; a namespace hides them.

    So it does what others left in /dev/shm, which would be looked through.
    """
    if _INSIDE in os.environ or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    os.environ[_INSIDE] = "1"
    module = sys.modules["__main__"].__spec__
    assert module is not None
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _OWN_SHM, sys.executable]
    os.execvp(command[0], [*command, "-m", module.name, *sys.argv[1:]])  # noqa: S606  # no shell is meant
