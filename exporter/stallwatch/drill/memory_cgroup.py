"""A memory cgroup with a limit, below our own, for a rank that is to be killed by the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .places import CGROUP

LIMIT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the kernel shows its cgroups."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")


HERE = Machine()


class NoCgroupError(RuntimeError):
    """No memory cgroup can be made here; the text says why."""


def refusal(machine: Machine = HERE) -> str:
    """Why no memory cgroup with a limit can be made here; "" when one can.  Leaves nothing behind."""
    try:
        with limited("stallwatch-drill-trial", machine):
            return ""
    except NoCgroupError as error:
        return str(error)


@contextmanager
def limited(name: str, machine: Machine = HERE) -> Iterator[Path]:
    """A cgroup that kills whoever takes more than the limit; removed at the end.  NoCgroupError."""
    try:
        parent, limits = _own(machine)
        folder = parent / name
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise NoCgroupError(f"a memory cgroup cannot be made here: {error.strerror}") from None
    try:
        _limit(folder, limits)
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def _limit(folder: Path, limits: Mapping[str, str]) -> None:
    try:
        for file, text in limits.items():
            (folder / file).write_text(text)
    except OSError as error:
        raise NoCgroupError(f"a memory cgroup cannot be limited here: {error.strerror}") from None


def enter(folder: Path) -> None:
    """Move this process into the cgroup that a stand-in's folder names."""
    Path((folder / CGROUP).read_text(), "cgroup.procs").write_text(str(os.getpid()))


def _own(machine: Machine) -> tuple[Path, dict[str, str]]:
    """Our own memory cgroup (version 1 or 2), and the files that limit one below it."""
    if (machine.proc / "sys/vm/panic_on_oom").read_text().strip() == "2":
        raise NoCgroupError("vm.panic_on_oom is 2: the kernel would panic")
    lines = (line.split(":", 2) for line in (machine.proc / "self/cgroup").read_text().splitlines())
    groups = {controllers: path.lstrip("/") for _, controllers, path in lines}
    if "memory" in groups:
        limits = {"memory.limit_in_bytes": str(LIMIT_BYTES), "memory.swappiness": "0"}
        return machine.cgroups / "memory" / groups["memory"], limits
    folder = machine.cgroups / groups.get("", "")
    if "memory" not in (folder / "cgroup.subtree_control").read_text().split():
        raise NoCgroupError("a memory cgroup cannot be made here: the controller is not given on to cgroups below ours")
    return folder, {"memory.max": str(LIMIT_BYTES), "memory.swap.max": "0"}
