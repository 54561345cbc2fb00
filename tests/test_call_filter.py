"""The filter that the exporter puts itself under: tried in processes of their own, for it cannot be taken off."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from seccomp_launcher import library
from stallwatch import cli, serve
from stallwatch.call_filter import TABLES, deny_intrusions

_TRY = """
import ctypes, json, os, sys
from stallwatch import call_filter
%s
assert call_filter.deny_intrusions()
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, number in json.loads(sys.argv[1]).items():
    answer = libc.syscall(number, *[ctypes.c_long(-1)] * 6)
    found[name] = ctypes.get_errno() if answer == -1 else 0
print(json.dumps(found))
"""
INTRUSIONS = {
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp"),
}
SIGNALS = {*("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")}

here = pytest.mark.skipif(platform.machine() not in TABLES, reason="another machine")


def run(code: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False, timeout=60)


def errors(before: str = "", **more: int) -> dict[str, int]:
    """name of a call -> what it fails with under the filter; called with -1 everywhere, which reaches nobody."""
    table = TABLES[platform.machine()]
    done = run(_TRY % before, json.dumps(table.intrusions | table.signals | more))
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("machine", TABLES)
def test_every_call_that_acts_on_a_process_has_its_number(machine: str) -> None:
    table = TABLES[machine]

    assert (set(table.intrusions), set(table.signals)) == (INTRUSIONS, SIGNALS)


@pytest.mark.parametrize("machine", TABLES)
def test_the_numbers_are_those_of_libseccomp(machine: str) -> None:
    found: Any = library()
    if found is None:
        pytest.skip("no libseccomp")
    resolve = found.seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    table = TABLES[machine]
    known = table.intrusions | table.signals

    assert {name: resolve(table.architecture, name.encode()) for name in known} == known


@here
def test_those_calls_are_denied_and_no_other(tmp_path: object) -> None:
    found = errors(close=3 if platform.machine() == "x86_64" else 57)

    assert found.pop("close") == errno.EBADF
    assert set(found.values()) == {errno.EPERM}


NO_PIDFD = {
    "a kernel before 5.3": "def refuse(pid): raise OSError(38, 'not implemented')\nos.pidfd_open = refuse",
    "a filter that lets them be opened only": (
        "def refuse(pid, sig): raise OSError(1, 'not permitted')\nimport signal; signal.pidfd_send_signal = refuse"
    ),
    "a Python built with older headers": "del os.pidfd_open",
    "a Python built with headers of 5.1": "import signal; del signal.pidfd_send_signal",
}


@here
@pytest.mark.parametrize("before", NO_PIDFD.values(), ids=NO_PIDFD)
def test_where_children_have_no_pidfd_they_can_still_be_signalled(before: str) -> None:
    found = errors(before)

    assert {name for name, error in found.items() if error == errno.EPERM} == INTRUSIONS


@here
def test_calls_of_another_kind_of_machine_are_denied_whatever_their_number() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("only x86-64 has two more")
    found = errors(x32_getpid=0x40000000 + 39, getpid=39)

    assert (found["x32_getpid"], found["getpid"]) == (errno.EPERM, 0)


_WORKS = """
import signal, subprocess, sys, threading
from stallwatch import cli, serve
from stallwatch.call_filter import deny_intrusions
from stallwatch.children import Child
assert deny_intrusions()
thread = threading.Thread(target=lambda: print("thread", flush=True))
thread.start(), thread.join()
child = Child([sys.executable, "-c", "import os, time; os.kill(os.getppid(), 0)"], stderr=subprocess.DEVNULL)
print("child", child.wait(), flush=True)
child = Child(["sleep", "60"])
child.terminate()
print("ended", child.wait() == -signal.SIGTERM)
"""


@here
def test_threads_and_children_go_on_and_children_are_under_it_too() -> None:
    done = run(_WORKS)

    assert (done.stdout, done.stderr) == (b"thread\nchild 1\nended True\n", b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
@here
def test_whoever_is_no_administrator_gives_up_new_rights_for_it() -> None:
    code = "import os; from stallwatch.call_filter import deny_intrusions; os.setresuid(65534, 65534, 65534)"
    code += "; print(deny_intrusions(), *open('/proc/self/status'), sep='\\n')"
    done = run(code)

    assert done.returncode == 0, done.stderr
    told = done.stdout.decode().splitlines()
    assert {"True", "NoNewPrivs:\t1", "Seccomp:\t2"} <= set(told)


def test_on_another_machine_nothing_is_done() -> None:
    assert not deny_intrusions("riscv64")


def test_a_python_of_32_bits_is_not_locked_out_of_everything() -> None:
    done = run("import sys; sys.maxsize = 2**31 - 1; from stallwatch.call_filter import *; print(deny_intrusions())")

    assert done.stdout == b"False\n"


@pytest.mark.parametrize("takes", [True, False])
def test_serve_begins_under_the_filter_or_says_that_there_is_none(
    takes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = list[str]()

    def noted(name: str, answer: int, *_: object) -> int:
        calls.append(name)
        return answer

    monkeypatch.setattr(cli, "deny_intrusions", partial(noted, "filter", takes))
    monkeypatch.setattr(serve, "serve", partial(noted, "serve", 0))

    assert cli.main(["serve"]) == 0
    assert calls == ["filter", "serve"]
    assert ("takes no filter of system calls" in capsys.readouterr().err) is not takes
