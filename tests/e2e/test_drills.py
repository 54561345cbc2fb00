"""Every condition, live: what stallwatch says of it is what `drill run` announces, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from score import drills
from stallwatch.drill.command import Pace, server_name
from stallwatch.drill.conditions import Condition
from stallwatch.drill.memory_cgroup import refusal
from stallwatch.drill.nvml_standin import NoCompilerError, build
from stallwatch.drill.nvml_standin import StandIn as Cards
from stallwatch.drill.table import CONDITIONS, find_condition

from . import harness
from .harness import Exporter, Program, free_port, wait_until

pytestmark = pytest.mark.e2e

SPEED = 20.0
SMALL: Mapping[str, float] = {
    "ranks": 4,
    "spinner": 2,
    "threads": 20,
    "frontend_threads": 10,
    "poller_threads": 1,
    "load_seconds": 1.0,
    "slow_seconds": 26.0,
}
"""What two cores bear several times at once; slow work takes more than two stalls."""
WITHIN = 60.0
OTHERS = "discovery: {exclude: ['/batch[.]py']}\n"
"""A real engine of test_vllm, which may run at the same time: the names of embedded ones are counted."""
PAGES = {"stalled", "suspect", "failed", "unknown"}

GROUPS = (
    ("normal", "barrier-deadlock", "phantom-hang", "slow-load"),
    ("stopped-rank", "briefly-stopped-rank", "dead-rank", "zombie-rank"),
    ("blocked-io", "briefly-blocked-io", "stale-lock", "released-lock"),
    ("held-lock", "stuck-download", "slow-download", "heartbeats-only"),
    ("stuck-compile", "busy-compile", "port-taken", "freed-port"),
    ("slow-bar", "buffered-log", "log-to-nowhere", "health-hangs"),
    ("serving", "serving-wedge", "restart-loop", "embedded"),
    ("follower", "stuck-follower", "stuck-embedded", "busy-spin"),
    ("two-servers",),
)
"""Each group at the same time: of embedded engines there is only one in each, for its name does not say which it is.
A killed rank and cards have tests of their own: not every machine can have them."""


ALSO_SEEN: Mapping[str, Mapping[str, float]] = {
    "restart-loop": {"stallwatch_server_starts_total": 3},
    "serving": {"stallwatch_server_generated_tokens_total": 100, "stallwatch_server_finished_requests_total": 5},
    "port-taken": {"stallwatch_port_foreign": 1},
    "stale-lock": {"stallwatch_server_lock_age_seconds": 5},
    "held-lock": {"stallwatch_server_lock_held": 1},
    "stuck-compile": {"stallwatch_server_child_processes": 1},
}
"""By condition: what proves that it really is what it says, and its least sum."""


class Drilled(harness.StandIn):
    """A stand-in as `drill run` starts it, but small."""

    def __init__(self, name: str, folder: Path, cards: Path | None = None, limit: str = "3m") -> None:
        self.condition = find_condition(name)
        settings = {key: value for key, value in SMALL.items() if key != "ranks" or self.condition.ranks > 1}
        super().__init__(name, folder, cards, **settings)
        self.command += ["--speed", f"{SPEED:g}"]
        self.command[self.command.index("4m")] = limit
        self.name = server_name(self.condition, self.port)

    def wait_started(self) -> None:
        wait_until(lambda: "pid " in self.tail(), 20.0, f"a stand-in\n{self.tail()}")


@pytest.mark.parametrize("group", GROUPS, ids="+".join)
def test_stallwatch_says_what_a_drill_expects(tmp_path: Path, group: tuple[str, ...]) -> None:
    names = [*group, *(also for name in group if (also := find_condition(name).also))]
    with ExitStack() as stack:
        exporter = stack.enter_context(Exporter(tmp_path, Pace(SPEED).config() + OTHERS))
        drills = [stack.enter_context(Drilled(name, tmp_path)) for name in names]
        for drill in drills:
            await_verdict(exporter, drill)
        for drill in drills:
            assert exporter.watch.states(drill.name) <= allowed(drill.condition), exporter.watch.story()
            for metric, at_least in ALSO_SEEN.get(drill.condition.name, {}).items():
                assert sum(exporter.watch.last().values(metric, server=drill.name).values()) >= at_least, metric


def test_every_condition_is_run() -> None:
    run = {name for group in GROUPS for name in group} | {"oom-killed-rank", "gpu-spin"}

    assert run == {condition.name for condition in CONDITIONS}


def test_a_rank_that_the_kernel_kills_for_memory_is_named(tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    with Exporter(tmp_path, Pace(SPEED).config()) as exporter, Drilled("oom-killed-rank", tmp_path) as drill:
        await_verdict(exporter, drill)


def test_cards_that_spin_are_suspect(tmp_path: Path) -> None:
    try:
        cards = Cards(tmp_path, build(tmp_path), int(SMALL["ranks"]))
    except NoCompilerError as error:
        pytest.skip(str(error))
    with (
        Exporter(tmp_path, Pace(SPEED).config(), environment=cards.environment()) as exporter,
        Drilled("gpu-spin", tmp_path, tmp_path) as drill,
    ):
        await_verdict(exporter, drill)
        assert exporter.watch.states(drill.name) <= allowed(drill.condition)


def await_verdict(exporter: Exporter, drill: Drilled) -> None:
    condition = drill.condition
    expected = {"state": condition.expected_state, "suspect_rank": condition.expected_rank}
    if condition.expected_state in PAGES:
        expected["reason"] = condition.expected_reason
    try:
        exporter.watch.wait_for(drill.name, WITHIN, **expected)
    finally:
        note_what_was_said(exporter, drill)


def note_what_was_said(exporter: Exporter, drill: Drilled) -> None:
    """For docs/SCORE.md, right or wrong."""
    condition, seen = drill.condition, exporter.watch.of(drill.name)
    said: Mapping[str, Any] = seen[-1][1] if seen else {"state": "nothing", "reason": "none", "suspect_rank": None}
    drills.note(
        drills.Drilled(
            condition.name,
            drills.words(condition.expected_state, condition.expected_reason, condition.expected_rank),
            drills.words(said["state"], said["reason"], said["suspect_rank"]),
            tuple(sorted(exporter.watch.states(drill.name))),
            condition.twin,
        )
    )


def allowed(condition: Condition) -> set[str]:
    """States on the way to what is expected: of a silent condition none that pages or warns."""
    return {"working", "slow", "quiet", "idle", condition.expected_state}


# --- nothing is left ---------------------------------------------------------------------------------------


def halves(names: Iterable[str]) -> list[tuple[str, ...]]:
    every = tuple(names)
    return [every[start::4] for start in range(4)]


ENDED = halves(c.name for c in CONDITIONS if c.name not in ("gpu-spin", "oom-killed-rank"))


WAYS = [
    *((group, how) for group in (*ENDED, ("oom-killed-rank",)) for how in ("ctrl-c", "kill-9")),
    (ENDED[0], "time-limit"),  # the kernel's own clock, the same for every condition
]


@pytest.mark.parametrize(("group", "how"), WAYS, ids=lambda each: each if isinstance(each, str) else each[0])
def test_nothing_outlives_a_drill(tmp_path: Path, group: tuple[str, ...], how: str) -> None:
    """No process, no folder, no lock, no cgroup and no port, whatever ends the launcher."""
    if group == ("oom-killed-rank",) and (why := refusal()):
        pytest.skip(why)
    with ExitStack() as stack:
        limit = "15s" if how == "time-limit" else "3m"
        drills = [stack.enter_context(Drilled(name, tmp_path, limit=limit)) for name in group]
        kept = {drill.name: remains(drill) for drill in drills}
        if how != "time-limit":
            for drill in drills:
                drill.process.send_signal(signal.SIGKILL if how == "kill-9" else signal.SIGINT)
        for drill in drills:
            drill.process.wait(30.0)
            assert_gone(drill, *kept[drill.name])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("after", [0.1, 0.3, 0.6, 1.0])
def test_nothing_outlives_a_drill_that_has_hardly_begun(tmp_path: Path, after: float, number: signal.Signals) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [str(Path(sys.executable).with_name("stallwatch")), "drill", "run", "two-servers"]
    with Program(command, tmp_path / "drill.out", {"TMPDIR": str(temporary)}) as drill:
        with suppress(subprocess.TimeoutExpired):
            drill.process.wait(after)

        drill.process.send_signal(number)
        drill.process.wait(30.0)

        wait_until(lambda: not any(mentions(str(temporary))), 10.0, "no process that knows the folder")
        wait_until(lambda: not list(temporary.iterdir()), 10.0, "no folder")


def mentions(path: str) -> Iterator[bool]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield any(path in word for word in process.cmdline())


def assert_gone(drill: Drilled, family: list[psutil.Process], paths: list[Path]) -> None:
    wait_until(lambda: not any(map(lives, family)), 10.0, f"{drill.condition.name}: all gone: {family}")
    wait_until(lambda: not any(map(os.path.exists, paths)), 10.0, f"{drill.condition.name}: {paths} removed")
    wait_until(lambda: is_free(drill.port), 5.0, f"{drill.condition.name}: port {drill.port} free")


def remains(drill: Drilled) -> tuple[list[psutil.Process], list[Path]]:
    """What must go with it: its processes, once the ranks run, and its folder and cgroup."""
    ranks = find_condition(drill.condition.name).ranks if drill.condition.ranks == 1 else int(SMALL["ranks"])
    family = wait_until(lambda: f if len(f := drill.family()) >= 2 + ranks else None, 30.0, "all processes")
    folder = next(path for process in family if (path := Path(cwd_of(process))).name.startswith("stallwatch-drill-"))
    cgroup = folder / "cgroup"
    return family, [folder, *([Path(cgroup.read_text())] if cgroup.exists() else [])]


def cwd_of(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return "/"


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_a_drill_says_of_each_server_what_to_expect(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("stallwatch")), "drill", "run", "two-servers"]
    environment = {"STALLWATCH_WEB_LISTEN_ADDRESS": f"127.0.0.1:{free_port()}"}
    with Program(command, tmp_path / "drill.out", environment) as drill:
        wait_until(lambda: "configuration:" in drill.tail(60), 20.0, "a word")
        said = [line for line in drill.output.read_text().splitlines() if line.startswith("stallwatch should say")]

        assert [line.split(":")[1].split(",")[0].split(";")[0].strip() for line in said] == ["stalled", "idle"]
