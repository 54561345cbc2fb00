"""Launches a stand-in server: `python -m stallwatch.drill.standin CONDITION --port P --for 2m`.

Makes a temporary folder with weight files and a package named sglang (or vllm) whose first module is ours, starts
the first process from it, waits, and leaves nothing behind: not after Ctrl-C, not after the time limit, not
after kill -9 of this process (each process is tied to its parent; a janitor ends the group and removes the rest).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from ..strict_yaml import parse_duration
from .conditions import Condition, UnknownSettingError, with_settings
from .janitor import cleaned_up, end_group
from .leash import die_with_parent
from .memory_cgroup import NoCgroupError
from .neighbours import ACTS as NEIGHBOURS
from .neighbours import Place
from .places import environment
from .server import Plan
from .steps import Step
from .stories import STORIES
from .table import find_condition
from .telling import package_file
from .weights import write_weights

_FIRST_PROCESS = """\
from pathlib import Path

from stallwatch.drill.server import run_server

if __name__ == "__main__":
    run_server(Path({plan!r}))
"""
_SUPERVISOR = """\
#!/bin/sh
while :; do
    "$@"
    sleep 1
done
"""


@dataclass(frozen=True, slots=True)
class Order:
    """What to launch.  `cards`: folder of the stand-in cards that it holds.

    `log` receives stdout and stderr and is kept; without it the log lies in the folder and goes with it.
    """

    condition: Condition
    port: int
    limit_seconds: float
    log: Path | None = None
    cards: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        found = as_node(find_condition(options.condition), options.nodes, options.node_rank, options.waits)
        condition = with_settings(found.at_speed(options.speed), options.set)
        log = Path(options.log) if options.log else None
        return run(Order(condition, options.port, options.limit, log, options.cards))
    except (UnknownSettingError, NoCgroupError) as error:
        print(f"standin: {error}", file=sys.stderr)
        return 2


def as_node(condition: Condition, nodes: int, number: int, waits: bool) -> Condition:
    """The condition on one of several nodes.  UnknownSettingError where there is no such node."""
    if nodes == 1:
        return condition
    if not 0 <= number < nodes or condition.launch.framework != "sglang":
        raise UnknownSettingError(f"{condition.name} on node {number} of {nodes}: only SGLang, and numbers from 0 on")
    steps = (*condition.steps, *([Step("loaded", "wait", "all")] if waits else []))
    return replace(condition, launch=replace(condition.launch, nodes=nodes, node_rank=number), steps=steps)


def run(order: Order) -> int:
    """Start the server and what lives beside it, say which process it is, wait for its end.

    Returns its exit status.  NoCgroupError when the condition needs a cgroup and none can be made.
    """
    with cleaned_up() as (folder, janitor), ExitStack() as beside:
        for name in order.condition.acts("before", "launcher") + order.condition.acts("serving", "launcher"):
            beside.enter_context(NEIGHBOURS[name](Place(order.condition, folder, order.port, janitor)))
        process = _start(folder, order)
        print(process.pid, file=janitor, flush=True)
        print(f"pid {process.pid}", flush=True)
        _end_with_us(process)
        try:
            return process.wait(order.limit_seconds)
        except subprocess.TimeoutExpired:
            return 0
        finally:
            end_group(process.pid)
            process.wait()


def _start(folder: Path, order: Order) -> subprocess.Popen[bytes]:
    condition, story = order.condition, STORIES[order.condition.launch.framework]
    model = folder / "models" / "drill-moe"
    weights = tuple(map(str, write_weights(model, condition.ranks)))
    parent = 0 if condition.launch.supervised else os.getpid()
    plan = Plan(condition, str(model), weights, order.port, parent, order.limit_seconds, str(folder), order.cards)
    plan.save(folder / "plan.json")
    script = folder / "generate.py" if condition.launch.embedded else package_file(folder, story.module)
    script.write_text(_FIRST_PROCESS.format(plan=str(folder / "plan.json")))
    words = [str(script)] if condition.launch.embedded else story.command(plan.stage)
    search = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    with _output(folder, order).open("ab") as output:
        return subprocess.Popen(
            [*_supervised(folder, condition), sys.executable, *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": search, "PYTHONUNBUFFERED": "1"} | dict(environment(folder)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL) if condition.launch.supervised else None,
        )


def _output(folder: Path, order: Order) -> Path:
    if order.condition.launch.log == "nowhere":
        return Path(os.devnull)
    return order.log or folder / "server.log"


def _supervised(folder: Path, condition: Condition) -> list[str]:
    """The words in front of the server's command: a shell that starts it again."""
    if not condition.launch.supervised:
        return []
    script = folder / "supervise.sh"
    script.write_text(_SUPERVISOR)
    return ["/bin/sh", str(script)]


def _end_with_us(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C and SIGTERM here are an orderly shutdown there."""

    def end(_number: int, _frame: FrameType | None) -> None:
        process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stallwatch.drill.standin", description=__doc__)
    parser.add_argument("condition")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--for", dest="limit", type=parse_duration, default=300.0, metavar="DURATION")
    parser.add_argument("--log", metavar="FILE", help="where the server's output goes (kept)")
    parser.add_argument("--cards", default="", metavar="DIR", help="hold the stand-in cards of this folder")
    parser.add_argument("--speed", type=float, default=1.0, metavar="N", help="what its slow work is divided by")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="it is one of so many nodes of one server")
    parser.add_argument("--node-rank", type=int, default=0, metavar="N", help="which of them, from 0 on")
    parser.add_argument("--waits", action="store_true", help="its ranks have loaded and wait for another node")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a changed setting")
    return parser


if __name__ == "__main__":
    sys.exit(main())
