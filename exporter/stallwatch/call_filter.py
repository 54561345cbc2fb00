"""System calls that act on other processes, denied to this process and to all it starts, wherever it runs.

The profiles in `deploy/` allow what is needed and nothing else.  This one takes away what must never be done, also
where nobody set up a profile: from a clone, or in a pod, whose runtime lets through what the capabilities could do.
Numbers are those of the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .children import send

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # of classic BPF, for words and constants
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_X32 = 0x40000000
"""Calls of 32-bit pointers on x86-64 come from here on; on other machines there are none."""


@dataclass(frozen=True, slots=True)
class Table:
    """The kernel's number of an architecture (AUDIT_ARCH_…), and of its calls by name."""

    architecture: int
    intrusions: dict[str, int]
    signals: dict[str, int]


_EVERYWHERE = {"pidfd_getfd": 438, "process_madvise": 440}
TABLES = {
    "x86_64": Table(
        0xC000003E,
        _EVERYWHERE | {"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312},
        {"kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297},
    ),
    "aarch64": Table(
        0xC00000B7,
        _EVERYWHERE | {"ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272},
        {"kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240},
    ),
}


def deny_intrusions(machine: str = platform.machine()) -> bool:
    """From now on those calls fail with EPERM; it cannot be undone.  To be called while there is one thread.

    Signals only where our own children can be ended without (pidfd, Linux 5.3).  False where nothing was done: another
    machine than those, a Python of 32 bits (all its calls are another machine's), or a kernel or container that takes
    no filter.
    """
    table = TABLES.get(machine) if sys.maxsize > 1 << 32 else None
    if table is None:
        return False
    denied = [*table.intrusions.values(), *(table.signals.values() if _has_pidfd() else ())]
    program = b"".join(_program(table.architecture, denied))
    code = ctypes.create_string_buffer(program, len(program))
    filled = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    arguments = _PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(filled), 0, 0
    if prctl(*arguments) == 0:
        return True
    if ctypes.get_errno() != errno.EACCES:
        return False
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # who is not the administrator gives this up for it
    return bool(prctl(*arguments) == 0)


def _program(architecture: int, denied: Iterable[int]) -> Iterator[bytes]:
    """Instructions of struct sock_filter: what was loaded is compared, a jump goes on so many instructions later."""
    numbers = list(denied)
    yield struct.pack("=HBBI", _LOAD, 0, 0, _ARCHITECTURE)
    yield struct.pack("=HBBI", _EQUAL, 0, len(numbers) + 3, architecture)  # another one's numbers mean other calls
    yield struct.pack("=HBBI", _LOAD, 0, 0, _NUMBER)
    yield struct.pack("=HBBI", _AT_LEAST, len(numbers) + 1, 0, _X32)
    for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        yield struct.pack("=HBBI", _EQUAL, left, 0, number)
    yield struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW)
    yield struct.pack("=HBBI", _RETURN, 0, 0, _ERRNO | errno.EPERM)


def _has_pidfd() -> bool:
    """Whether a signal can be sent so: the kernel, a filter, and the headers that Python was built with let it."""
    try:
        send(os.getpid(), 0)
    except OSError:
        return False
    return True
