"""The seccomp profile that is shipped (deploy/seccomp/stallwatch.json), loaded into real processes by libseccomp.

`strict` runs a program that is killed at the first call which the profile does not allow: what ends well made none.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proc_tree import ProcTree
from seccomp_launcher import library

ROOT = Path(__file__).parents[1]
PROFILE = ROOT / "deploy" / "seccomp" / "stallwatch.json"
LAUNCHER = [sys.executable, str(Path(__file__).with_name("seccomp_launcher.py")), str(PROFILE)]

ACTS = {
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp"),
    *("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"),
    *("bpf", "perf_event_open", "setns", "unshare", "mount", "open_by_handle_at", "init_module", "keyctl"),
}
"""What acts on other processes or on the machine."""


@pytest.fixture(scope="module")
def profile() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PROFILE.read_text())
    return found


@pytest.fixture(scope="module")
def resolve() -> Any:
    found = library()
    if found is None:
        pytest.skip("no libseccomp")
    return lambda name: found.seccomp_syscall_resolve_name(name.encode())


@pytest.fixture(scope="module")
def strict(resolve: Any) -> list[str]:
    """Words before a program; skipped where the kernel or the container takes no filter."""
    del resolve
    command = [*LAUNCHER, "--kill"]
    tried = subprocess.run([*command, sys.executable, "-I", "-c", "pass"], capture_output=True, check=False)
    if b"takes no filter" in tried.stderr:
        pytest.skip("no seccomp here")
    assert tried.returncode == 0, tried.stderr
    return command


def named(profile: dict[str, Any], action: str) -> list[str]:
    return [name for rule in profile["syscalls"] if rule["action"] == action for name in rule["names"]]


def test_every_name_is_one_of_a_call_and_stands_once(profile: dict[str, Any], resolve: Any) -> None:
    names = named(profile, "SCMP_ACT_ALLOW") + named(profile, "SCMP_ACT_ERRNO")

    assert [name for name in names if resolve(name) == -1] == []
    assert sorted(set(names)) == sorted(names)


def test_what_acts_is_denied_and_what_is_not_named_is_unknown(profile: dict[str, Any]) -> None:
    denied = {name for rule in profile["syscalls"] if rule.get("errnoRet") == errno.EPERM for name in rule["names"]}

    assert denied >= ACTS
    assert not ACTS & set(named(profile, "SCMP_ACT_ALLOW"))
    assert (profile["defaultAction"], profile["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", errno.ENOSYS)


_TRY = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, number in json.loads(sys.argv[1]).items():
    found[name] = ctypes.get_errno() if libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 else 0
print(json.dumps(found))
"""


def test_each_call_answers_as_the_profile_says(strict: list[str], resolve: Any) -> None:
    del strict
    numbers = {name: resolve(name) for name in (*ACTS, "io_uring_setup", "landlock_create_ruleset", "clone3", "getpid")}
    told = subprocess.run(
        [*LAUNCHER, sys.executable, "-I", "-c", _TRY, json.dumps(numbers)], capture_output=True, check=False
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)

    assert {name: found[name] for name in ACTS} == dict.fromkeys(ACTS, errno.EPERM)
    assert {found["io_uring_setup"], found["landlock_create_ruleset"], found["clone3"]} == {errno.ENOSYS}
    assert found["getpid"] == 0


@pytest.mark.parametrize("call", ["os.kill(os.getpid(), 0)", "os.killpg(0, 0)", "signal.raise_signal(signal.SIGCONT)"])
def test_a_forbidden_call_ends_what_runs_strictly(strict: list[str], call: str) -> None:
    """So that the tests below prove something."""
    code = f"import os, signal; {call}"

    assert subprocess.run([*strict, sys.executable, "-I", "-c", code], check=False).returncode == -signal.SIGSYS


_HUNG = """
import os, sys
from pathlib import Path
from stallwatch.model import ProcessId
from stallwatch.sources.blocking_reads import BlockingReads
reads = BlockingReads(Path(sys.argv[1]), 1.0)
assert reads.command_line(ProcessId(7, int(sys.argv[2]))).reason == "timeout"
assert [child.wait(20) for child in reads._abandoned] in ([], [-9])
reads.close()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("gone")
"""


def test_a_helper_that_hangs_is_killed_under_the_profile(strict: list[str], tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    spec = tree.add(7, "x")
    (tree.folder(7) / "cmdline").unlink()
    os.mkfifo(tree.folder(7) / "cmdline")

    done = subprocess.run(
        [*strict, sys.executable, "-c", _HUNG, str(tree.root), str(spec.id.start_ticks)],
        capture_output=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, b"gone\n"), done.stderr


_ENDED = """
import subprocess, sys
from stallwatch.children import Child
sleeps = [sys.executable, "-I", "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]
for end in ("kill", "terminate"):
    with Child(sleeps, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        getattr(child, end)()
        print(child.wait(20))
"""


def test_children_are_ended_under_the_profile(strict: list[str]) -> None:
    done = subprocess.run([*strict, sys.executable, "-c", _ENDED], capture_output=True, check=False)

    assert (done.returncode, done.stdout) == (0, b"-9\n-15\n"), done.stderr


def test_one_cycle_makes_no_other_call(strict: list[str]) -> None:
    command = [str(Path(sys.executable).with_name("stallwatch")), "serve", "--once"]
    done = subprocess.run([*strict, *command], capture_output=True, check=False, timeout=600)

    assert done.returncode == 0, done.stderr
    assert b"stallwatch_report_timestamp_seconds" in done.stdout
