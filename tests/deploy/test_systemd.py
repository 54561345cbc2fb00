"""The unit under a systemd that runs: what it may, what it sees, and how soon it stops."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import CONFIG, PATIENCE, Program, fetch, free_port, wait_until

from .booted import Booted, CannotBootError
from .packages import ROOT, documented

pytestmark = pytest.mark.e2e

CONFIG_FILE, CARDS = "/etc/stallwatch.yml", "/run/cards"
STOP_SECONDS = 5.0
"""What is left of `systemctl stop` when nothing waits: far below the 90 s that systemd would wait by default."""


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory, nvml_standin: Path, port: int) -> Iterator[Booted]:
    try:
        machine = Booted(tmp_path_factory.mktemp("systemd")).__enter__()
    except CannotBootError as error:
        pytest.skip(f"no systemd can be started here: {error}")
    try:
        machine.write(CONFIG_FILE, CONFIG)
        machine.run("mkdir", "-p", CARDS)
        _put(machine, nvml_standin, f"{CARDS}/{nvml_standin.name}")
        machine.write(f"{CARDS}/state", "count 2\n")
        variables = {
            "STALLWATCH_WEB_LISTEN_ADDRESS": f"127.0.0.1:{port}",
            "STALLWATCH_CONFIG_FILE": CONFIG_FILE,
            "LD_LIBRARY_PATH": CARDS,
            "NVML_STANDIN_STATE": f"{CARDS}/state",
        }
        install_as_documented(machine)
        machine.write("/etc/default/stallwatch", "".join(f"{name}={value}\n" for name, value in variables.items()))
        yield machine
    except BaseException as error:
        machine.__exit__(type(error), error, error.__traceback__)
        raise
    machine.__exit__(None, None, None)


def install_as_documented(machine: Booted) -> None:
    """All but the environment, which is this tree's."""
    commands = documented("systemd-sysusers")
    for command in commands:
        if "/opt/stallwatch" not in command:
            machine.run("sh", "-euc", f"cd {ROOT} && {command}")
    assert commands[-1] == "systemctl enable --now stallwatch"
    machine.run("systemctl", "stop", "stallwatch")


def _put(machine: Booted, source: Path, target: str) -> None:
    with Program(machine.inside("sleep", "180"), source.with_suffix(".out")):
        shutil.copy(source, f"/proc/{machine.first}/root{target}")


@pytest.fixture
def started(booted: Booted, port: int) -> Iterator[Booted]:
    booted.run("systemctl", "start", "stallwatch")
    wait_until(lambda: fetch(f"http://127.0.0.1:{port}/-/ready")[0] == 200, PATIENCE, "ready")
    yield booted
    booted.run("systemctl", "stop", "stallwatch")


ATTEMPTS = """\
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)

def error(number, *arguments):
    return ctypes.get_errno() if libc.syscall(number, *arguments) == -1 else 0

found = {}
numbers = {"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "tgkill": 234, "tkill": 200}
for name, number in numbers.items():
    found[name] = error(number, 0, 0, 0, 0, 0, 0)
found["kill"] = error(62, os.getpid(), 0)
found["pidfd_getfd"] = error(438, 0, 0, 0)
found["pidfd_send_signal"] = error(424, os.pidfd_open(os.getpid()), 0, 0, 0)
open("/var/lib/stallwatch/attempts", "w").write(json.dumps(found))
"""
"""Each call that acts, on ourselves, where it is harmless; numbers of x86-64.  0 is allowed, else errno."""


def set_cards(machine: Booted, text: str) -> None:
    """At once: a file that is empty for a moment would end what hangs."""
    machine.write(f"{CARDS}/new", text)
    machine.run("mv", f"{CARDS}/new", f"{CARDS}/state")


def servers(port: int) -> list[dict[str, Any]]:
    status, text = fetch(f"http://127.0.0.1:{port}/api/v1/report")
    return json.loads(text)["servers"] if status == 200 else []


def test_it_runs_as_its_own_user_with_three_capabilities(started: Booted) -> None:
    assert started.property("ActiveState") == "active"
    status = started.run("cat", f"/proc/{started.property('MainPID')}/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    three = f"{1 << 2 | 1 << 19 | 1 << 34:016x}"

    assert {fields[name] for name in ("CapEff", "CapBnd", "CapAmb")} == {three}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert fields["Uid"].split()[0] == started.run("id", "-u", "stallwatch").stdout.strip() != "0"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls are those of x86-64")
def test_its_filter_lets_it_signal_and_attach_to_nobody(booted: Booted) -> None:
    """A unit that is the same but for its program."""
    unit = (ROOT / "deploy/systemd/stallwatch.service").read_text()
    replaced = {"Type": "oneshot", "ExecStart": "/opt/stallwatch/bin/python /run/attempts.py", "Restart": "no"}
    for key, value in replaced.items():
        unit = re.sub(rf"^{key}=.*$", f"{key}={value}", unit, flags=re.MULTILINE)
    booted.write("/run/attempts.py", ATTEMPTS)
    booted.write("/run/systemd/system/attempts.service", unit)
    booted.run("systemctl", "daemon-reload")
    booted.run("systemctl", "start", "attempts")
    found = json.loads(booted.run("cat", "/var/lib/stallwatch/attempts").stdout)

    assert found.pop("pidfd_send_signal") == 0
    assert set(found.values()) == {errno.EPERM}, found
    assert len(found) == 7


def test_it_judges_a_server_of_root(started: Booted, port: int, tmp_path: Path) -> None:
    """The log is root's alone; threads, bytes read and open files are another user's."""
    log = "/root/server.log"
    words = ["/opt/stallwatch/bin/python", "-m", "stallwatch.drill.standin", "barrier-deadlock"]
    words += ["--port", str(free_port()), "--for", "5m", "--log", log]
    with Program(started.inside("sh", "-c", f'umask 077; exec "$@" >{log}.out 2>&1', "sh", *words), tmp_path / "out"):
        server = wait_until(lambda: stalled(port), 2 * PATIENCE, f"stalled: {servers(port)}", 0.2)
        ours = evidence(fetch(f"http://127.0.0.1:{port}/metrics")[1])
        once = ["/opt/stallwatch/bin/stallwatch", "serve", "--once", "--config.file", CONFIG_FILE]
        roots = evidence(started.run(*once).stdout)

    assert (server["reason"], server["suspect_rank"]) == ("idle_wait", "TP3")
    readable = {channel["channel"] for channel in server["channels"] if channel["state"] in ("moving", "flat")}
    assert readable >= {"log", "storage", "memory", "cpu"}
    assert server["ranks"][0]["wait"].get("futex", 0) > 100
    assert len(roots) > 60
    assert ours == roots


def evidence(page: str) -> set[str]:
    """The series of what is read of processes, threads, ports and logs.  Wait classes that come and go are left out."""
    read = re.findall(
        r"^stallwatch_((?:process|threads|port|log|rank_info|rank_alive|server_info)\S*{.*}) ", page, re.M
    )
    return {series for series in read if "threads" not in series or 'wait="futex"' in series}


def stalled(port: int) -> dict[str, Any] | None:
    return next((server for server in servers(port) if server["state"] == "stalled"), None)


def test_a_driver_that_hangs_does_not_hold_it_and_is_not_killed(started: Booted, port: int) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    wait_until(lambda: 'stallwatch_collector_success{collector="gpu"} 1' in fetch(url)[1], PATIENCE, "cards are read")
    set_cards(started, "count 2\nnvmlDeviceGetMemoryInfo_v2 hang:deaf\n")
    wait_until(lambda: in_flight(fetch(url)[1]) > 2, PATIENCE, "a call that hangs")
    children = started.run("pgrep", "-P", started.property("MainPID"), "-f", "nvml").stdout.split()

    began = time.monotonic()
    started.run("systemctl", "stop", "stallwatch")
    took = time.monotonic() - began

    assert took < STOP_SECONDS
    assert started.property("ActiveState") == "inactive"
    assert children
    assert started.run("kill", "-0", *children).returncode == 0
    set_cards(started, "count 2\n")
    wait_until(lambda: started.run("kill", "-0", *children, check=False).returncode, PATIENCE, "it ends with its call")


def in_flight(page: str) -> float:
    """The longest call of the driver that is under way, in seconds."""
    found = re.findall(r"^stallwatch_gpu_call_in_flight_seconds(?:{.*})? (\S+)$", page, re.MULTILINE)
    return max(map(float, found), default=0.0)


def test_a_reload_reads_the_configuration_again(started: Booted, port: int) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    started.write(CONFIG_FILE, "nonsense: 1\n")
    started.run("systemctl", "reload", "stallwatch")
    wait_until(lambda: "stallwatch_config_last_reload_successful 0" in fetch(url)[1], PATIENCE, "refused")

    started.write(CONFIG_FILE, CONFIG)
    started.run("systemctl", "reload", "stallwatch")
    wait_until(lambda: "stallwatch_config_last_reload_successful 1" in fetch(url)[1], PATIENCE, "taken")


def test_one_that_is_stuck_is_started_anew(started: Booted) -> None:
    """The watchdog: who is stopped says nothing."""
    before = started.property("MainPID")
    started.run("mkdir", "-p", "/run/systemd/system/stallwatch.service.d")
    started.write("/run/systemd/system/stallwatch.service.d/soon.conf", "[Service]\nWatchdogSec=3s\nRestartSec=1\n")
    started.run("systemctl", "daemon-reload")
    started.run("systemctl", "restart", "stallwatch")
    first = started.property("MainPID")
    started.run("kill", "-STOP", first)

    wait_until(lambda: started.property("MainPID") not in ("0", before, first), PATIENCE, "another process", 0.5)
    assert int(started.property("NRestarts")) >= 1
