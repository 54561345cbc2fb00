"""What is deployed, as files: the unit is accepted, leaves no way to act, and every file that is mounted is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "deploy/systemd/stallwatch.service"
MOST_EXPOSED = 35
"""Tenths of what `systemd-analyze security` says: 0 is shut off, 100 is anything at all."""

TO_LOOK = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
TO_ACT = {"ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kill", "tkill", "tgkill"}
HIDES = {"PrivateDevices", "ProtectClock", "ProtectKernelLogs", "PrivateTmp", "PrivateNetwork", "PrivateUsers"}
HIDES |= {"ProtectProc", "ProcSubset", "DeviceAllow", "DynamicUser"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def lines_of(unit: Path) -> list[tuple[str, str]]:
    """(key, value) of every line, in order."""
    found = (re.match(r"(\w+)=(.*)", line) for line in unit.read_text(encoding="utf-8").splitlines())
    return [(line[1], line[2].strip()) for line in found if line]


def values(key: str) -> list[str]:
    return [value for name, value in lines_of(UNIT) if name == key]


def filtered() -> tuple[set[str], set[str]]:
    """System calls and groups that the filter allows in the end, and those it takes away, as written."""
    allowed, denied = set[str](), set[str]()
    for value in values("SystemCallFilter"):
        names = set(value.lstrip("~").split())
        allowed, denied = (allowed - names, denied | names) if value[0] == "~" else (allowed | names, denied - names)
    return allowed, denied


# --- the unit of systemd -----------------------------------------------------------------------------------


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """A program has to stand where ExecStart says."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/stallwatch/bin/stallwatch", "/bin/true"))

    done = run("systemd-analyze", "verify", str(unit))

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_mistake_in_the_unit_would_be_seen(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(
        UNIT.read_text().replace("/opt/stallwatch/bin/stallwatch", "/bin/true") + "\n[Service]\nNonsense=1\n"
    )

    assert "Nonsense" in run("systemd-analyze", "verify", str(unit)).stderr


def test_the_unit_is_shut_off_enough() -> None:
    done = run("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", str(UNIT))

    assert done.returncode == 0, done.stdout[-300:]


def test_the_unit_has_the_rights_to_look_and_no_other() -> None:
    assert set(values("AmbientCapabilities")[0].split()) == TO_LOOK
    assert set(values("CapabilityBoundingSet")[0].split()) == TO_LOOK
    assert values("User") == ["stallwatch"]


def test_the_unit_can_attach_to_nobody_and_signal_nobody() -> None:
    allowed, denied = filtered()

    assert denied >= TO_ACT
    assert not allowed & TO_ACT
    assert allowed == {"@system-service", "capset", "setpriority"}


def test_the_unit_hides_nothing_that_has_to_be_seen() -> None:
    assert not HIDES & {name for name, _ in lines_of(UNIT)}
    assert values("ProtectSystem") == ["full"]


def test_the_unit_bounds_what_it_costs_and_how_long_it_takes() -> None:
    keys = {name for name, _ in lines_of(UNIT)}

    assert keys >= {"LimitNOFILE", "MemoryMax", "TasksMax", "CPUQuota", "WatchdogSec", "TimeoutStopSec"}
    assert (values("Type"), values("KillMode"), values("LimitCORE")) == (["notify"], ["process"], ["0"])
