"""What a thread waits in, from its `syscall` and `wchan` files: pure functions and tables.

The class comes from the system call where that file can be read, else from the kernel symbol.  Names of kernel
symbols change with the kernel: matched by prefix (docs/NOISE.md, "Names of waits").
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# System call numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
_X86_64 = {
    "futex": (202, 449, 455),  # futex, futex_waitv, futex_wait
    "poll": (
        7,
        23,
        232,
        270,
        271,
        281,
        441,
    ),  # poll select epoll_wait pselect6 ppoll epoll_pwait epoll_pwait2
    "sleep": (35, 230, 34),  # nanosleep clock_nanosleep pause
}
_AARCH64 = {
    "futex": (98, 449, 455),
    "poll": (22, 72, 73, 441),  # epoll_pwait pselect6 ppoll epoll_pwait2
    "sleep": (101, 115),
}
_BY_MACHINE = {"x86_64": _X86_64, "aarch64": _AARCH64}

_WRITES = {"x86_64": (1, 20), "aarch64": (64, 66)}  # write writev

_WRITE_SYMBOLS = ("pipe_write", "anon_pipe_write")
"""A full pipe: since Linux 5.5, and since 6.14; before, its symbol is the same for who reads an empty one."""

_BY_SYMBOL = (
    ("futex_", "futex"),
    ("rt_mutex_schedule", "futex"),
    ("do_epoll_wait", "poll"),
    ("ep_poll", "poll"),
    ("poll_schedule_timeout", "poll"),
    ("do_sys_poll", "poll"),
    ("do_poll", "poll"),
    ("do_select", "poll"),
    ("hrtimer_nanosleep", "sleep"),
    ("do_nanosleep", "sleep"),
    ("__do_sys_pause", "sleep"),
    ("do_signal_stop", "stopped"),
    ("ptrace_stop", "other"),
)


def class_of_syscall(machine: str | None = None) -> Mapping[bytes, str]:
    """The first word of a syscall file -> wait class; empty for an architecture we have no table for."""
    table = _BY_MACHINE.get(machine or os.uname().machine, {})
    return {str(number).encode(): name for name, numbers in table.items() for number in numbers}


def writes(machine: str | None = None) -> frozenset[bytes]:
    """The first words of a syscall file that mean a write."""
    return frozenset(str(number).encode() for number in _WRITES.get(machine or os.uname().machine, ()))


def is_write(symbol: str) -> bool:
    """Whether a wchan symbol means a write that nobody takes."""
    return symbol.startswith(_WRITE_SYMBOLS)


def class_of_symbol(symbol: str) -> str | None:
    """A wchan symbol -> wait class.  None for `0`: running, or no right to look, or an old x86 kernel."""
    if symbol in ("0", ""):
        return None
    return next((name for prefix, name in _BY_SYMBOL if symbol.startswith(prefix)), "other")


def class_of_state(state: str) -> str | None:
    """The class that a process state decides by itself; None for S and I.

    `t` is no `stopped`: a debugger holds the process, which is somebody's wish and no stall.
    """
    return {"T": "stopped", "t": "other", "Z": "other", "X": "other", "D": "disk", "R": "running"}.get(state)
