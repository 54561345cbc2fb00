"""Runs a program under a seccomp profile in Docker's form, loaded by libseccomp.

    python seccomp_launcher.py PROFILE [--kill] PROGRAM...

With --kill a call that is not allowed ends the process (SIGSYS), where the profile only gives an error: so it is seen
that a program makes none.  Calls that libraries try first, and do without, stay unknown.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from ctypes.util import find_library
from typing import Any

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
COMPARE = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
UNKNOWN = -1
TRIED = (b"clone3",)
PR_SET_NO_NEW_PRIVS = 38


class Compare(ctypes.Structure):
    """struct scmp_arg_cmp"""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def library() -> ctypes.CDLL | None:
    name = find_library("seccomp") or "libseccomp.so.2"
    try:
        found = ctypes.CDLL(name, use_errno=True)
    except OSError:
        return None
    found.seccomp_init.restype = ctypes.c_void_p
    found.seccomp_init.argtypes = [ctypes.c_uint32]
    found.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    found.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(Compare),
    ]
    found.seccomp_load.argtypes = [ctypes.c_void_p]
    return found


def load(profile: dict[str, Any], kill: bool) -> None:
    """Put this process, and whatever it becomes, under a profile.  OSError when the kernel takes none."""
    seccomp = library()
    if seccomp is None:
        raise OSError("no libseccomp")
    filtering = seccomp.seccomp_init(KILL_PROCESS if kill else ERRNO | profile["defaultErrnoRet"])
    for rule in profile["syscalls"]:
        allows = rule["action"] == "SCMP_ACT_ALLOW"
        if kill and not allows:
            continue
        compares = [_compare(each) for each in rule.get("args", ())]
        for name in rule["names"]:
            number = seccomp.seccomp_syscall_resolve_name(name.encode())
            array = (Compare * len(compares))(*compares)
            action = ALLOW if allows else ERRNO | rule["errnoRet"]
            if number != UNKNOWN and seccomp.seccomp_rule_add_array(filtering, action, number, len(compares), array):
                raise OSError(f"{name} is refused by libseccomp")
    for name in TRIED if kill else ():
        number = seccomp.seccomp_syscall_resolve_name(name)
        seccomp.seccomp_rule_add_array(filtering, ERRNO | profile["defaultErrnoRet"], number, 0, (Compare * 0)())
    if ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or seccomp.seccomp_load(filtering):
        raise OSError("the kernel takes no filter")


def _compare(told: dict[str, Any]) -> Compare:
    return Compare(told["index"], COMPARE[told["op"]], told["value"], told.get("valueTwo", 0))


if __name__ == "__main__":
    words = sys.argv[2:]
    kills = words[0] == "--kill"
    with open(sys.argv[1], encoding="utf-8") as file:
        load(json.load(file), kills)
    program = words[kills:]
    os.execvp(program[0], program)  # noqa: S606  # the test's own words, no shell
