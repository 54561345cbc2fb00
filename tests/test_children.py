"""Our helper processes are ended by pidfd: real children, with the calls that a filter denies taken away."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallwatch.children import Child

SOURCE = Path(__file__).parents[1] / "exporter" / "stallwatch"
SLEEPS = [sys.executable, "-I", "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]


def started(command: list[str] = SLEEPS) -> Child:
    """A child that waits for the end of its input, and has come so far."""
    child = Child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"\n"
    return child


@pytest.fixture
def child() -> Iterator[Child]:
    made = started()
    yield made
    with made:
        subprocess.Popen.send_signal(made, signal.SIGKILL)


def denied(*_: object) -> None:
    raise PermissionError


def unknown(*_: object) -> int:
    raise OSError


def test_a_child_is_killed_and_told_to_end_where_kill_is_denied(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", denied)
    other = started()

    child.kill()
    other.terminate()

    assert child.wait(60.0) == -signal.SIGKILL
    with other:
        assert other.wait(60.0) == -signal.SIGTERM


def test_a_kernel_without_pidfds_kills_by_pid(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", unknown)

    child.kill()

    assert child.wait(60.0) == -signal.SIGKILL


def test_a_python_without_pidfds_kills_by_pid(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")

    child.kill()

    assert child.wait(60.0) == -signal.SIGKILL


def test_a_child_that_may_not_be_ended_is_as_one_that_does_not_die(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", unknown)
        patch.setattr(os, "kill", denied)

        child.kill()

    assert child.poll() is None


def test_a_child_that_ended_is_sent_nothing(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its PID may be another process's by now."""
    child.kill()
    child.wait(60.0)
    sent: list[object] = []
    for module, name in ((os, "kill"), (os, "killpg"), (os, "pidfd_open"), (signal, "pidfd_send_signal")):
        monkeypatch.setattr(module, name, lambda *given: sent.append(given))

    child.kill()
    child.terminate()
    child.kill_group()

    assert sent == []


def test_no_descriptor_is_kept(child: Child) -> None:
    before = os.listdir("/proc/self/fd")

    child.send_signal(signal.SIGCONT)

    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("call", ["run", "Popen"])
def test_a_group_is_killed_with_what_it_started_also_when_its_first_process_has_ended(call: str) -> None:
    group = started([sys.executable, "-I", "-S", "-c", f"import subprocess; subprocess.{call}({SLEEPS!r})"])
    if call == "Popen":
        os.waitid(os.P_PID, group.pid, os.WEXITED | os.WNOWAIT)

    with group:
        group.kill_group()

        assert group.stdout is not None
        assert group.stdout.read() == b""  # the end: nobody holds it any more


def test_where_a_filter_denies_it_the_first_process_of_a_group_is_killed(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "killpg", denied)
    monkeypatch.setattr(os, "kill", denied)

    child.kill_group()

    assert child.wait(60.0) == -signal.SIGKILL


# --- nothing else ends a process -----------------------------------------------------------------------------

SENDS = {
    *("os.kill", "os.killpg", "os.abort", "signal.raise_signal", "signal.pthread_kill", "signal.pidfd_send_signal"),
    *("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
    *("os.system", "os.popen", "os.fork", "os.forkpty", "os.posix_spawn", "signal.alarm", "signal.setitimer"),
}
"""Calls that send a signal, or make a process whose methods do."""


def sends(source: str) -> set[str]:
    """Which of SENDS are called in a module."""
    called = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {ast.unparse(function) for function in called} & SENDS


def test_what_serves_starts_and_ends_processes_in_one_module_only() -> None:
    """Drills are stand-ins for a test, and no part of what runs beside servers."""
    modules = (path for path in SOURCE.rglob("*.py") if "drill" not in path.parts and path.name != "children.py")

    found = {f"{path.relative_to(SOURCE)}: {name}" for path in modules for name in sends(path.read_text())}

    assert found == set()
    assert sends((SOURCE / "children.py").read_text()) == {"os.killpg", "signal.pidfd_send_signal"}


def test_a_call_that_sends_is_found() -> None:
    assert sends("def f():\n    os.kill(1, 9)\n    child.kill()\n") == {"os.kill"}
