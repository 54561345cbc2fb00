"""The disposable reader of cmdline and environ, run as a program of its own by blocking_reads.

These files wait for the process's mmap lock, so whoever reads them may hang until he is killed.  This program
gives up every right but those two that reading needs, and dies with its parent.  It imports almost nothing.

Input: one line `pid start_ticks` per request.  Output: one JSON line per request,
{"argv": [..], "environ": {..}} or {"reason": ".."}; of environ only the names in WANTED.
"""

import ctypes
import errno
import json
import os
import sys

WANTED = (
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "RANK",
    "LOCAL_RANK",
    "CUDA_VISIBLE_DEVICES",
    # Seconds of the servers' own time-outs.
    "SGLANG_WARMUP_TIMEOUT",
    "VLLM_ENGINE_READY_TIMEOUT_S",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
)
LARGEST = 1 << 17
CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE = 2, 19
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SIGKILL = 9
CAPABILITY_VERSION_3 = 0x20080522


def drop_rights() -> None:
    """Keep at most CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, as far as the parent had them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low then high
    if libc.capget(header, words) != 0:
        return
    keep = (1 << CAP_DAC_READ_SEARCH) | (1 << CAP_SYS_PTRACE)
    kept = words[1] & keep
    reduced = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    libc.capset(header, reduced)


def content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts, size = [], 0
        while size < LARGEST and (part := os.read(fd, 1 << 16)):
            parts.append(part)
            size += len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def start_ticks(folder: str) -> int:
    text = content(folder + "/stat")
    return int(text[text.rindex(b")") + 2 :].split()[19])


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def may_pass(error: OSError) -> bool:
    """As passing.may_pass: a program that is run by its path imports nothing beside it."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR, errno.EAGAIN)


def environ(folder: str) -> "dict[str, str]":
    try:
        raw = content(folder + "/environ")
    except OSError as error:
        if may_pass(error):
            raise
        return {}
    pairs = (item.split(b"=", 1) for item in raw.split(b"\0") if b"=" in item)
    return {text(name): text(value) for name, value in pairs if text(name) in WANTED}


def answer(proc: str, pid: str, ticks: int) -> "dict[str, object]":
    folder = f"{proc}/{pid}"
    try:
        if start_ticks(folder) != ticks:
            return {"reason": "vanished"}
        argv = content(folder + "/cmdline")
        found: dict[str, object] = {"argv": [text(word) for word in argv.rstrip(b"\0").split(b"\0")]}
        found["environ"] = environ(folder)
        return found if start_ticks(folder) == ticks else {"reason": "vanished"}
    except PermissionError:
        return {"reason": "permission"}
    except (FileNotFoundError, ProcessLookupError):
        return {"reason": "vanished"}
    except (OSError, ValueError):
        return {"reason": "error"}


def main() -> None:
    drop_rights()
    for line in sys.stdin:
        pid, ticks = line.split()
        sys.stdout.write(json.dumps(answer(sys.argv[1], pid, int(ticks))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
