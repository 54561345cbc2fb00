"""First process of a stand-in server: starts the ranks, waits for their word, then serves HTTP.

Runs as `python -m sglang.launch_server …` (or vLLM's) from a folder made by `standin`: to /proc it is that command.
Like servers that wait for their ranks in a plain recv(), it does not notice a rank that dies silently.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

from .cards import hold_cards
from .conditions import Condition, from_record, to_record
from .crowd import start_crowd, wait_for_ever
from .front import Front
from .leash import tie_to_parent
from .pen import Pen
from .rank import RankPlan, run_rank
from .steps import Moment
from .stories import STORIES
from .telling import Speaker, Stage, Story
from .title import write_title

_HELPER_THREADS = 12
_REAP_SECONDS = 0.2
_SHORT_LIFE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the launcher asks of the first process, as a JSON file between the two."""

    condition: Condition
    model: str
    weights: tuple[str, ...]
    port: int
    parent_pid: int
    limit_seconds: float
    folder: str
    cards: str = ""  # folder of the stand-in cards it holds; none

    def save(self, path: Path) -> None:
        plain = ("model", "weights", "port", "parent_pid", "limit_seconds", "folder", "cards")
        record = {name: getattr(self, name) for name in plain}
        path.write_text(json.dumps(record | {"condition": to_record(self.condition)}))

    @classmethod
    def load(cls, path: Path) -> Plan:
        record: dict[str, Any] = json.loads(path.read_text())
        record["condition"] = from_record(record["condition"])
        record["weights"] = tuple(record["weights"])
        return cls(**record)

    @property
    def story(self) -> Story:
        return STORIES[self.condition.launch.framework]

    @property
    def stage(self) -> Stage:
        launch = self.condition.launch
        return Stage(self.model, self.condition.all_ranks, self.port, launch.nodes, launch.node_rank)

    def pen(self, speaker: Speaker) -> Pen:
        return Pen(self.story, speaker, self.condition.launch.log == "buffered")


@dataclass(frozen=True, slots=True)
class Server:
    """What the acts of the first process work on."""

    processes: list[BaseProcess]
    front: Front


def run_server(plan_file: Path) -> None:
    """The whole life of the first process."""
    plan = Plan.load(plan_file)
    tie_to_parent(plan.parent_pid, plan.limit_seconds)
    condition = plan.condition
    pen = plan.pen(Speaker("script" if condition.launch.embedded else "main", os.getpid()))
    pen.say(plan.story.opening(plan.stage))
    start_crowd(condition.frontend_threads, 1)
    processes, words = _start_processes(plan)
    _end_on_sigterm(processes, pen)
    server = Server(processes, Front(condition, pen))
    _act(server, condition, "starting")
    for word in words:
        word.recv()
    if not condition.launch.embedded and condition.launch.number == 0:
        _serve(server, plan, pen)
    _act(server, condition, "serving")
    wait_for_ever()


def _act(server: Server, condition: Condition, at: Moment) -> None:
    for name in condition.acts(at, "main"):
        ACTS[name](server)


def _serve(server: Server, plan: Plan, pen: Pen) -> None:
    server.front.listen(plan.port)
    for speaker, text in plan.story.going_online(os.getpid(), plan.port):
        pen.say_as(speaker, text)
    time.sleep(plan.condition.step_seconds)
    pen.say(plan.story.online())
    if plan.condition.acts("serving", "launcher"):
        server.front.write_stats()


# --- its processes -----------------------------------------------------------------------------------------


def _start_processes(plan: Plan) -> tuple[list[BaseProcess], list[Connection]]:
    """SGLang's ranks are children of the first process; vLLM's are those of an engine.  With who will say a word."""
    context = multiprocessing.get_context("spawn")
    if plan.condition.launch.framework == "vllm":
        word, sender = context.Pipe(duplex=False)
        engine = context.Process(target=_run_engine, args=(plan, os.getpid(), sender))
        engine.start()
        _KEPT.append(sender)
        return [engine], [word]
    processes, words = _start_ranks(plan)
    processes.append(context.Process(target=_run_helper, args=(plan, os.getpid()), daemon=True))
    processes[-1].start()
    return processes, words


_KEPT: list[object] = []
"""What must live as long as the process: the barrier, and our copies of the ranks' ends of the pipes (while
they are open, a rank that dies does not end the wait for its word)."""


def _start_ranks(plan: Plan) -> tuple[list[BaseProcess], list[Connection]]:
    context = multiprocessing.get_context("spawn")
    barrier, pipes = context.Barrier(plan.condition.ranks), [context.Pipe(duplex=False) for _ in plan.weights]
    _KEPT.extend([barrier, pipes])
    ranks: list[BaseProcess] = []
    for local, (_, sender) in enumerate(pipes):
        ranks.append(context.Process(target=run_rank, args=(_rank_plan(plan, local), barrier, sender), daemon=True))
        ranks[-1].start()
    if plan.cards:
        hold_cards(Path(plan.cards), plan.condition, [rank.pid for rank in ranks if rank.pid is not None])
    return ranks, [receiver for receiver, _ in pipes]


def _rank_plan(plan: Plan, local: int) -> RankPlan:
    weights, folder = Path(plan.weights[local]), Path(plan.folder)
    return RankPlan(local, plan.stage, plan.condition, weights, folder, os.getpid(), plan.limit_seconds)


def _run_engine(plan: Plan, parent_pid: int, word: Connection) -> None:
    """vLLM's engine: starts the ranks and waits for them, with a line now and then if the condition wants one."""
    tie_to_parent(parent_pid, plan.limit_seconds)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pen = plan.pen(Speaker("engine", os.getpid()))
    write_title(plan.story.title(pen.speaker))
    start_crowd(_HELPER_THREADS, 0)
    pen.say(plan.story.engine_opening(plan.stage))
    _, words = _start_ranks(plan)
    for name in plan.condition.acts("starting", "engine"):
        Thread(target=ENGINE_ACTS[name], args=(plan.condition, pen), daemon=True).start()
    for each in words:
        each.recv()
    pen.say(plan.story.engine_end())
    word.send("ready")
    wait_for_ever()


def _run_helper(plan: Plan, parent_pid: int) -> None:
    """SGLang's detokenizer; in a start it only waits."""
    tie_to_parent(parent_pid, plan.limit_seconds)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_title(plan.story.title(Speaker("main", os.getpid())))
    start_crowd(_HELPER_THREADS, 0)
    wait_for_ever()


def _end_on_sigterm(processes: list[BaseProcess], pen: Pen) -> None:
    """An orderly end, in a deadlock too: the end of a drill is no failure that pages."""

    def end(_number: int, _frame: FrameType | None) -> None:
        pen.say(pen.story.farewell(os.getpid()))
        _kill(processes)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(1.0)


# --- what it does out of the ordinary ----------------------------------------------------------------------


def _reap(server: Server) -> None:
    """Wait for children that die, and tell nobody."""

    def look() -> None:
        while True:
            for process in server.processes:
                process.is_alive()
            time.sleep(_REAP_SECONDS)

    Thread(target=look, daemon=True).start()


def _vanish(server: Server) -> None:
    """End without a word."""
    time.sleep(_SHORT_LIFE_SECONDS)
    _kill(server.processes)
    os._exit(1)


def _beat(condition: Condition, pen: Pen) -> None:
    while True:
        time.sleep(condition.beat_seconds)
        pen.say([pen.story.heartbeat()])


ACTS: Mapping[str, Callable[[Server], None]] = {
    "reap": _reap,
    "vanish": _vanish,
    "hang": lambda server: setattr(server.front, "hangs", True),
    "wedge": lambda server: setattr(server.front, "wedges", True),
}
ENGINE_ACTS: Mapping[str, Callable[[Condition, Pen], None]] = {"beat": _beat}
