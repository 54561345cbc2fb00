"""Our own helper processes: how they are started and ended.

A signal goes to a process by its pidfd, which is of our own child and of nobody else.  So the exporter runs under a
filter that denies kill, tkill and tgkill (deploy/seccomp/stallwatch.json), and can end nothing it did not start.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from contextlib import suppress

subprocess._USE_VFORK = False  # type: ignore[misc]  # the way out that its documentation names
"""With vfork nothing at all goes on in this process until the child is another program, which may be never: first it
closes what it has copies of, and its program is read, either perhaps on a mount that does not answer."""


class Child(subprocess.Popen[bytes]):
    """subprocess.Popen whose signals go by pidfd; `kill` and `terminate` of it use `send_signal`."""

    def send_signal(self, sig: int) -> None:
        """Send it if the process was not seen to end; one that may not be sent is lost, and nothing is raised.

        A child that may not be ended is as one that does not die: who gave it up counts it until it is gone.
        """
        if self.poll() is not None:
            return
        try:
            send(self.pid, sig)
        except ProcessLookupError:
            return
        except OSError:  # no pidfd: a kernel before 5.3, a filter older than they are, no descriptor left
            with suppress(PermissionError):
                super().send_signal(sig)

    def kill_group(self) -> None:
        """SIGKILL to it and, where no filter denies it, to what it started; it must lead a session of its own.

        Its PID is that of the group until it is collected, even when it has ended.
        """
        if self.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.kill()


def send(pid: int, sig: int) -> None:
    """By pidfd; OSError where that cannot be.  The PID cannot be another process's: only we collect our children."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, sig)
    finally:
        os.close(descriptor)
