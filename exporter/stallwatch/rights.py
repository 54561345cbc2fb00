"""What this process may read of others, by the capabilities it has, and what to tell where that is not enough."""

from __future__ import annotations

import re
from pathlib import Path

NEEDED = {"CAP_DAC_READ_SEARCH": 2, "CAP_SYS_PTRACE": 19}
"""Capabilities that looking needs, and their numbers (linux/capability.h)."""

_EFFECTIVE = re.compile(r"^CapEff:\s*([0-9a-f]{1,16})$", re.MULTILINE)
_FILTERED = re.compile(r"^Seccomp:\s*2$", re.MULTILINE)

NO_RIGHT = "the capabilities CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH make them readable"
KEPT_OUT = (
    "a security module (AppArmor, SELinux), a user namespace or a mount keeps us out, for we have the capabilities "
    "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
)


def missing(status: str) -> tuple[str, ...] | None:
    """Those of NEEDED that a process lacks, by its /proc/PID/status; None when that does not tell."""
    match = _EFFECTIVE.search(status)
    if match is None:
        return None
    held = int(match[1], 16)
    return tuple(name for name, number in NEEDED.items() if not held >> number & 1)


def remedy(status: str) -> str:
    """What to tell of something that we may not read."""
    lacking = missing(status)
    if lacking is None or len(lacking) == len(NEEDED):
        return NO_RIGHT
    return f"the capability {lacking[0]} makes them readable" if lacking else KEPT_OUT


def our_remedy() -> str:
    """The same of this process."""
    return remedy(_our_status())


def are_calls_filtered() -> bool:
    """Whether this process, and so what it starts, is under a seccomp filter."""
    return _FILTERED.search(_our_status()) is not None


def _our_status() -> str:
    try:
        return Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
