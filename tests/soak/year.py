"""A year of the daemon in minutes: `python -m soak.year --out FILE` (in tests/), see `Year`."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proc_tree import BOOT, DirectReads
from soak.machine import Machine
from soak.sizes import entries
from stallwatch.assembly import _remind
from stallwatch.config import Config, load_config
from stallwatch.daemon import Daemon
from stallwatch.frameworks import load_frameworks
from stallwatch.model import Observation, Report, Result, Scene
from stallwatch.poller import Poller
from stallwatch.serve import Keeper
from stallwatch.sources import Host, Moment, Source
from stallwatch.sources.logs.collector import Logs
from stallwatch.sources.node import Node
from stallwatch.sources.processes import Processes
from stallwatch.sources.threads import Threads
from stallwatch.state_file import STATE
from stallwatch.strict_yaml import InputError
from stallwatch.web import Published

TICK_SECONDS = 5.0
STARTS_PER_TICK = 4
SCRAPE_EVERY, SAMPLE_EVERY = 5, 25
RIGHT = "retention: 1m\n"
WRONG = "retention: soon\n"


@dataclass(frozen=True, slots=True)
class Amounts:
    """What happens in the year, spread evenly over it."""

    starts: int = 10_000
    rotations: int = 100
    reloads: int = 100  # half of them of a file that is wrong
    failures: int = 1_000  # of collectors, in turn

    @property
    def ticks(self) -> int:
        return self.starts // STARTS_PER_TICK


YEAR = Amounts()
SHM = Path("/dev/shm")  # a hundred thousand small files are made, and the state is written to disk thousands of times


@dataclass(frozen=True, slots=True)
class Sample:
    """What must not grow, at one tick."""

    tick: int
    resident_kib: float
    objects: int  # that the garbage collector tracks
    entries: int  # of all containers that daemon, collectors, pages and state hold
    descriptors: int
    threads: int
    series: int
    state_kib: float


class Failing:
    """Lets a collector fail half-way when it is told to."""

    def __init__(self, source: Source) -> None:
        self.source, self.fails, self._read = source, False, source.read
        vars(source)["read"] = self.read  # the daemon knows its collectors by their class: it has to stay that

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        for number, observation in enumerate(self._read(scene, now)):
            if self.fails and number == 3:
                break
            yield observation
        if self.fails:
            self.fails = False
            raise OSError("as if the machine had a fault")


class Year:
    """The real daemon, four collectors, the pages and the state file; the clock is moved by hand.

    The machine is a folder: see soak.machine.  Sockets, endpoints and cards are left out: they need a real machine
    (see tests/test_comings_and_goings.py).
    """

    def __init__(self, folder: Path, amounts: Amounts) -> None:
        self.amounts, self._folder = amounts, folder
        self.machine = Machine(folder)
        self.samples: list[Sample] = []
        self.failures = self.reloads = self.refused = 0
        self._config_file = folder / "config.yml"
        self._config_file.write_text(RIGHT)
        config = load_config(self._config_file, ("sglang",))
        self._keeper = Keeper(str(folder / "state"), "/proc")
        self._frameworks = load_frameworks()
        host = Host(config, self._frameworks, self.machine.tree.root, folder)
        self.collectors = self._collectors(host)
        self.published = Published(TICK_SECONDS, self._monotonic)
        self.daemon = Daemon(
            host, self._pollers, self._publish, self._monotonic, self._wall, memory=self._keeper.memory
        )

    def _collectors(self, host: Host) -> list[Failing]:
        reads = DirectReads(self.machine.tree)
        made: list[Source] = [Processes(host, reads), Threads(host), Logs(host), Node(host)]
        if (memory := self._keeper.memory) is not None:
            for source in made:
                _remind(source, memory)
        self._reads = reads
        return [Failing(source) for source in made]

    def _pollers(self, scene: Callable[[], Scene], notify: Callable[[Result], None]) -> list[Poller]:
        config = Config()
        return [
            Poller(each.source, config.intervals.of(each.source.name), scene, notify, self._monotonic, self._wall)
            for each in self.collectors
        ]

    def _monotonic(self) -> float:
        return self.machine.now

    def _wall(self) -> float:
        return BOOT + self.machine.now

    def _publish(self, report: Report) -> None:
        self.published.publish(report)
        self._keeper.hear(report, self.daemon)

    # --- the year -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        for tick in range(1, self.amounts.ticks + 1):
            self._turn(tick)
            if tick % SAMPLE_EVERY == 0:
                self.samples.append(self._sample(tick))
        for poller in self.daemon.pollers:
            poller.turn()  # undisturbed
        self.daemon.tick()

    def close(self) -> None:
        self._keeper.close(self.daemon)
        self.daemon.close()
        for each in self.collectors:
            each.source.close()

    def _turn(self, tick: int) -> None:
        self.machine.turn(TICK_SECONDS, STARTS_PER_TICK, self._is_due(tick, self.amounts.rotations))
        if self._is_due(tick, self.amounts.reloads):
            self._reload()
        if self._is_due(tick, self.amounts.failures):
            self.collectors[self.failures % len(self.collectors)].fails = True
            self.failures += 1
        for poller in self.daemon.pollers:
            poller.turn()
        self.daemon.tick()
        self._reads.asked.clear()
        if tick % SCRAPE_EVERY == 0:
            self._scrape()

    def _is_due(self, tick: int, times: int) -> bool:
        return tick * times // self.amounts.ticks > (tick - 1) * times // self.amounts.ticks

    def _reload(self) -> None:
        self.reloads += 1
        self._config_file.write_text(WRONG if self.reloads % 2 else RIGHT)
        try:
            self.daemon.reconfigure(load_config(self._config_file, ("sglang",)))
        except InputError:
            self.refused += 1
            self.daemon.reconfigure(None)

    def _scrape(self) -> bytes:
        pages = self.published.pages()
        assert not isinstance(pages, str), pages
        for page in (pages.metrics(True), pages.json(), pages.html("/metrics")):
            assert page.gzipped
        return pages.metrics(False).plain

    def _sample(self, tick: int) -> Sample:
        page = self._scrape()
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
        written = self._folder / "state" / STATE  # what the writer is just making beside it comes and goes
        state = written.stat().st_size / 1024 if written.exists() else 0.0
        return Sample(
            tick=tick,
            resident_kib=resident,
            objects=len(gc.get_objects()),
            entries=entries((self.daemon, self.collectors, self.published, self._keeper)),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            series=sum(not line.startswith(b"#") for line in page.splitlines()),
            state_kib=state,
        )

    def result(self, seconds: float) -> dict[str, Any]:
        health = {each.source: each.success for each in (self.daemon.report or Report(0, 0, (), (), (), {})).health}
        return {
            "amounts": asdict(self.amounts),
            "happened": {
                "starts": self.machine.starts,
                "lines": self.machine.lines,
                "rotations": self.machine.rotations,
                "reloads": self.reloads,
                "refused": self.refused,
                "failures": self.failures,
                "counted_failures": sum(poller.read_errors().get("error", 0) for poller in self.daemon.pollers),
            },
            "healthy": health,
            "seconds": round(seconds, 1),
            "samples": [asdict(sample) for sample in self.samples],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=YEAR.starts)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    share = arguments.starts / YEAR.starts
    rest = (max(1, round(share * each)) for each in (YEAR.rotations, YEAR.reloads, YEAR.failures))
    amounts = Amounts(arguments.starts, *rest)
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        began = time.monotonic()
        year = Year(Path(folder), amounts)
        try:
            year.run()
            arguments.out.write_text(json.dumps(year.result(time.monotonic() - began)) + "\n")
        finally:
            year.close()


if __name__ == "__main__":
    main()
