"""One rank of a stand-in server: a process that loads, meets the others at a barrier, and then waits."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from .conditions import Condition
from .crowd import start_crowd, wait_for_ever
from .leash import tie_to_parent
from .pen import Pen
from .rank_acts import ACTS, RELEASE, Actor
from .steps import Moment
from .stories import STORIES
from .telling import Speaker, Stage
from .title import write_title
from .weights import BYTES_PER_RANK, read_slowly

__all__ = ["RELEASE", "Rank", "RankPlan", "run_rank"]

_BAR_STEPS = 20


@dataclass(frozen=True, slots=True)
class RankPlan:
    """`local`: its number on this node."""

    local: int
    stage: Stage
    condition: Condition
    weights: Path
    folder: Path
    parent_pid: int
    limit_seconds: float

    @property
    def number(self) -> int:
        return self.stage.first_rank + self.local


def run_rank(plan: RankPlan, barrier: Barrier, ready: Connection) -> None:
    """The whole life of a rank; entry point of the process."""
    tie_to_parent(plan.parent_pid, plan.limit_seconds)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    story, speaker = STORIES[plan.condition.launch.framework], Speaker("rank", os.getpid(), plan.number)
    write_title(story.title(speaker))
    start_crowd(plan.condition.threads, plan.condition.poller_threads)
    rank = Rank(plan, Pen(story, speaker, plan.condition.launch.log == "buffered"), barrier)
    rank.start()
    ready.send(plan.local)
    rank.act("serving")
    wait_for_ever()


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank that starts: what it says and does, in order."""

    plan: RankPlan
    pen: Pen
    barrier: Barrier

    def start(self) -> None:
        story, plan = self.pen.story, self.plan
        self.pen.say(story.notices(plan.condition, plan.local))
        self._join()
        self._load()
        self.act("loaded")
        self.barrier.wait()
        self.act("compiling")
        self.barrier.wait()
        self._capture()

    def act(self, at: Moment) -> None:
        """Whatever the condition asks of this rank at a moment."""
        plan = self.plan
        for name in plan.condition.acts_of_rank(at, plan.local):
            ACTS[name](Actor(plan.condition, self.pen, plan.weights, plan.folder, self.barrier))

    def _join(self) -> None:
        story, number, stage = self.pen.story, self.plan.number, self.plan.stage
        self.pen.say(story.before_meeting(number, stage))
        self.act("joining")
        self.barrier.wait()
        time.sleep(self.plan.condition.step_seconds)
        self.pen.say(story.after_meeting(number, stage))

    def _load(self) -> None:
        story, plan, started = self.pen.story, self.plan, time.monotonic()
        self.pen.say(story.begin_load(plan.number, plan.stage))
        self._draw_bar(0.0)
        self.act("loading")
        drawn = 0
        for share in read_slowly(plan.weights, BYTES_PER_RANK, BYTES_PER_RANK / plan.condition.load_seconds):
            if int(share * _BAR_STEPS) > drawn:
                drawn = int(share * _BAR_STEPS)
                self._draw_bar(share)
        self.pen.say(story.end_load(plan.number, time.monotonic() - started))

    def _draw_bar(self, share: float) -> None:
        if self.plan.number == 0:
            self.pen.draw(self.pen.story.bar(share, self.pen.speaker))

    def _capture(self) -> None:
        story, number, pause = self.pen.story, self.plan.number, self.plan.condition.step_seconds
        self.pen.say(story.pools(number))
        time.sleep(pause)
        self.pen.say(story.begin_capture(number))
        if number == 0:
            for bar in story.capture_bars(self.pen.speaker):
                self.pen.draw(bar)
                time.sleep(pause / 4)
        time.sleep(pause)
        self.pen.say(story.end_capture(number))
