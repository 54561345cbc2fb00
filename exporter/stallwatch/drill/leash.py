"""Bounds the life of a stand-in process: never longer than its parent, never longer than its limit."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int, limit_seconds: float) -> None:
    """Die with SIGKILL when the parent's creating thread ends, and with SIGALRM after `limit_seconds`.

    Both are the kernel's work: they need no thread of ours, and the first also reaches a stopped process.
    Must be called by the main thread.  A parent that is gone already ends the process here; 0 is whoever is the
    parent now.
    """
    die_with_parent(parent_pid or os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_seconds)


def die_with_parent(parent_pid: int, last_word: signal.Signals) -> None:
    """Be sent `last_word` when the parent's creating thread ends; one that is gone already ends the process here."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(last_word), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)
