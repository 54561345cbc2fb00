"""Writes a process title the way setproctitle does: over the command line and the environment.

/proc/PID/cmdline then shows the title followed by NUL bytes, /proc/PID/environ holds nothing that can be
read as an environment, and comm is the title cut at 15 bytes.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_NAME = 15
_ARG_START, _ENV_END = 47, 50  # fields of /proc/PID/stat from 0 (man 5 proc: arg_start 48, env_end 51)


def write_title(title: str) -> None:
    """Must be called by the main thread, before other threads start (they inherit its comm).

    OSError when the kernel hides the addresses (fields are 0).
    """
    start, end = _title_area()
    _move_environment_away()
    text = title.encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(title.encode()), 0, 0, 0)


def _title_area() -> tuple[int, int]:
    with open("/proc/self/stat", "rb") as file:
        text = file.read()
    fields = text[text.rindex(b")") + 2 :].split()
    start, end = int(fields[_ARG_START - 2]), int(fields[_ENV_END - 2])
    if start <= 0 or end <= start:
        raise OSError("the kernel does not show where the command line is")
    return start, end


def _move_environment_away() -> None:
    """setenv() copies each value to the heap, so that getenv() and children outlive the overwriting."""
    for key, value in list(os.environ.items()):
        os.putenv(key, value)
