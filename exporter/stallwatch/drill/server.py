"""Main process of a stand-in server: starts the ranks, waits for their word, then serves HTTP.

Runs as `python -m sglang.launch_server …` from a folder made by `standin`: to /proc it is that command.  Like
servers that wait for their ranks in a plain recv(), it does not notice a rank that dies silently.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

from . import story
from .cards import hold_cards
from .conditions import Condition, from_record, to_record
from .crowd import start_crowd, wait_for_ever
from .leash import tie_to_parent
from .rank import RankPlan, run_detokenizer, run_rank, write_line, write_raw

_PATHS = ("/health", "/v1/models", "/model_info", "/get_model_info", "/ping", "/ready")
_DETOKENIZER_THREADS = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """What the launcher asks of the main process, as a JSON file between the two."""

    condition: Condition
    model: str
    weights: tuple[str, ...]
    port: int
    parent_pid: int
    limit_seconds: float
    cards: str = ""  # folder of the stand-in cards it holds; none

    def save(self, path: Path) -> None:
        plain = ("model", "weights", "port", "parent_pid", "limit_seconds", "cards")
        record = {name: getattr(self, name) for name in plain}
        path.write_text(json.dumps(record | {"condition": to_record(self.condition)}))

    @classmethod
    def load(cls, path: Path) -> Plan:
        record: dict[str, Any] = json.loads(path.read_text())
        record["condition"] = from_record(record["condition"])
        record["weights"] = tuple(record["weights"])
        return cls(**record)


def run_server(plan_file: Path) -> None:
    """The whole life of the main process."""
    plan = Plan.load(plan_file)
    tie_to_parent(plan.parent_pid, plan.limit_seconds)
    write_line(story.arguments(plan.model, plan.condition.ranks, plan.port))
    start_crowd(plan.condition.frontend_threads, 1)
    processes, words = _start_processes(plan)
    _end_on_sigterm(processes)
    if plan.cards:
        ranks = processes[: plan.condition.ranks]
        hold_cards(Path(plan.cards), plan.condition, [rank.pid for rank in ranks if rank.pid is not None])
    for word in words:
        word.recv()
    _serve(plan)
    wait_for_ever()


def _start_processes(plan: Plan) -> tuple[list[BaseProcess], list[Connection]]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(plan.condition.ranks)
    pipes = [context.Pipe(duplex=False) for _ in plan.weights]
    processes: list[BaseProcess] = [
        context.Process(target=run_rank, args=(_rank_plan(plan, rank), barrier, sender), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    processes.append(
        context.Process(
            target=run_detokenizer, args=(os.getpid(), plan.limit_seconds, _DETOKENIZER_THREADS), daemon=True
        )
    )
    for process in processes:
        process.start()
    _KEPT.extend([barrier, pipes])
    return processes, [receiver for receiver, _ in pipes]


_KEPT: list[object] = []
"""What must live as long as the process: the barrier, and our copies of the ranks' ends of the pipes (while
they are open, a rank that dies does not end the wait for its word)."""


def _rank_plan(plan: Plan, rank: int) -> RankPlan:
    return RankPlan(rank, plan.condition, Path(plan.weights[rank]), os.getpid(), plan.limit_seconds)


def _serve(plan: Plan) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", plan.port), _handler(plan.condition.logs_access))
    Thread(target=server.serve_forever, daemon=True).start()
    now = datetime.now().astimezone()
    for rank, text in story.serving(os.getpid(), plan.port):
        write_raw(story.stamp(now, text, rank))
    time.sleep(plan.condition.step_seconds)
    write_line(story.ready())
    for text in story.first_visitors():
        write_line(text)


def _handler(logs_access: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers every known path with 200 and an empty JSON object."""

        def do_GET(self) -> None:
            body = b"{}\n"
            self.send_response(200 if self.path in _PATHS else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            if logs_access:
                host, port = self.client_address[:2]
                write_line(story.access(f"{host}:{port}", self.command, self.path))

    return Handler


def _end_on_sigterm(processes: list[BaseProcess]) -> None:
    """An orderly end, in a deadlock too: the end of a drill is no failure that pages."""

    def end(_number: int, _frame: FrameType | None) -> None:
        for text in story.leaving(os.getpid()):
            write_line(text)
        for process in processes:
            process.kill()
        for process in processes:
            process.join(1.0)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
