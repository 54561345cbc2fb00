"""The real exporter beside things that are made to fail, and what /metrics says the whole time.

`Exporter` scrapes itself four times a second in a thread of its own.  A case is over when it could say what was seen
meanwhile and afterwards; at the end every scrape must have been answered within a second, and with a page, whatever
happened: but for the time in which the kernel let the exporter's threads, or ours, wait for a CPU.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from e2e.harness import Program, fetch, free_port, wait_until

TICK, LOOK = 0.5, 0.5
WINDOW, STALL_AFTER = 3.0, 8.0
SCRAPE_SECONDS = 0.25
SLOWEST_SCRAPE = 1.0
"""No scrape may take longer, whatever is broken, but for what is waited for a CPU."""
OLD_SECONDS = 3 * TICK
"""A report that is older is refused: none may be, but for the same."""
SLOW_SHARE = 0.04
LATE_SHARE = 0.1
"""Of the scrapes, on a machine that is busy with the breaking: more are too many however long was waited."""

TIMES = f"""\
verdict: {{window: {WINDOW:g}s, stall_after: {STALL_AFTER:g}s, suspect_after: 40s, serve_stall_after: {STALL_AFTER:g}s}}
intervals: {{tick: 500ms, processes: 500ms, threads: 1s, ports: 1s, logs: 200ms, health: 1s, \
gpu: 1s, gpu_processes: 1s}}
"""
CONFIG = TIMES + "discovery: {frameworks: [llamacpp]}\n"
"""Only the victims are watched, whatever else runs on the machine."""
ALONE = TIMES + "discovery: {enabled: false}\n"
"""For cases that name their servers."""

ROUNDED = 0.1
"""Seconds: times are said to a tenth."""

PATIENCE = 60.0
"""For what has to come at last, on a machine that is busy with other things, too: how soon is not what is claimed."""

COLLECTORS = ("processes", "threads", "sockets", "logs", "endpoints", "node")
"""Those that every machine has something to read for."""


@dataclass(frozen=True)
class Scrape:
    """One answer of /metrics: when it was asked for (Unix time), how long it took, status and page."""

    at: float
    seconds: float
    status: int
    page: str
    waited: float = 0.0
    """Seconds so far, since the first one, for which the exporter's threads, and ours, waited for a CPU."""

    @cached_property
    def samples(self) -> Mapping[tuple[str, frozenset[tuple[str, str]]], float]:
        """(name, labels) -> value."""
        families = text_string_to_metric_families(self.page)
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def value(self, metric: str, **labels: str) -> float | None:
        """The sum of the samples that have these labels; None when there is none."""
        wanted = labels.items()
        found = [
            value for (name, has), value in self.samples.items() if name == f"stallwatch_{metric}" and wanted <= has
        ]
        return sum(found) if found else None

    def labels(self, metric: str, label: str) -> set[str]:
        """The values of one label, of the samples that are not 0."""
        name = f"stallwatch_{metric}"
        return {dict(has).get(label, "") for (found, has), value in self.samples.items() if found == name and value}

    def state(self, server: str) -> str:
        """The server's state; "" when it is not known."""
        return self._said("state", server)

    def reason(self, server: str) -> str:
        return self._said("reason", server)

    def _said(self, what: str, server: str) -> str:
        found = (
            dict(has) for (found, has), value in self.samples.items() if found == f"stallwatch_server_{what}" and value
        )
        return next((labels[what] for labels in found if labels["server"] == server), "")

    def failed(self) -> set[str]:
        """Collectors whose last read failed, or that have not read yet."""
        return {name for name in COLLECTORS if self.value("collector_success", collector=name) != 1}

    def is_late(self, collector: str, interval: float) -> bool:
        """Whether what the collector's last look read may be three intervals old, and is rightly left out."""
        now = self.value("report_timestamp_seconds")
        then = self.value("collector_last_success_timestamp_seconds", collector=collector)
        took = self.value("collector_duration_seconds", collector=collector)
        return now is None or then is None or took is None or now - then + took > 3 * interval - ROUNDED

    @property
    def age(self) -> float:
        """Of a page that was refused: how old the report was."""
        found = re.search(r"the last report is ([0-9.]+) s old, .* not served as new", self.page)
        return float(found[1]) if found else inf


@dataclass(slots=True)
class CpuWaits:
    """How long was waited for a CPU: by the threads of a process and its children, by whoever asks, and by our host."""

    pid: int
    _seen: dict[str, float] = field(default_factory=dict)
    _seconds: float = 0.0
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> float:
        """Seconds since the first look; of a thread that came since, all of its."""
        with self._asking:
            ours = {"host": stolen_seconds()} | waits([f"/proc/self/task/{threading.get_native_id()}"])
            theirs = waits(self._tasks())
            known = ours | (self._seen or theirs)
            now = ours | theirs
            self._seconds += sum(max(0.0, seconds - known.get(each, 0.0)) for each, seconds in now.items())
            self._seen |= now
            return self._seconds

    def _tasks(self) -> list[str]:
        """A prefix may start the exporter as its child."""
        found = []
        with suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            for pid in (str(self.pid), *children):
                found += [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
        return found


def waits(tasks: Sequence[str]) -> dict[str, float]:
    """Folder of a thread -> seconds for which it could run and did not; threads that are gone are left out."""
    found = {}
    for folder in tasks:
        with suppress(OSError, IndexError):
            found[folder] = int(Path(folder, "schedstat").read_text().split()[1]) / 1e9
    return found


def stolen_seconds() -> float:
    """What the host of a virtual machine kept from it so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Scrapes:
    """What was seen so far, oldest first."""

    url: str
    waits: CpuWaits | None = None
    history: list[Scrape] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._stopping.wait(SCRAPE_SECONDS):
            self.look()

    def look(self) -> Scrape:
        at, begun = time.time(), time.monotonic()
        status, page = fetch(f"{self.url}/metrics")
        seconds = time.monotonic() - begun
        scrape = Scrape(at, seconds, status, page, self.waits.look() if self.waits is not None else 0.0)
        if not self._stopping.is_set():
            self.history.append(scrape)
        return scrape

    def waited(self, number: int, seconds: float) -> float:
        """How long was waited for a CPU in so many seconds before the end of a scrape, its number in the history."""
        scrape = self.history[number]
        begun = scrape.at + scrape.seconds - seconds
        before = [earlier.waited for earlier in self.history[:number] if earlier.at + earlier.seconds <= begun]
        return scrape.waited - (before[-1] if before else 0.0)

    def since(self, at: float) -> list[Scrape]:
        """Pages asked for after a moment (Unix time)."""
        return [scrape for scrape in self.history if scrape.status == 200 and scrape.at >= at]


_QUICK_STATE = (
    "import sys; from stallwatch import cli, state_file; state_file.WRITE_SECONDS = 0.1; sys.exit(cli.main())"
)
QUICK_STATE = (sys.executable, "-c", _QUICK_STATE)
"""The same command, but the state is written with each tick."""


class Exporter(Program):
    """`stallwatch serve` with short intervals and what a case adds; `may_end`: the case ends it itself."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        config: str = CONFIG,
        command: Sequence[str] | None = None,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        working_folder: Path | None = None,
    ) -> None:
        self.port = free_port()
        (folder / "stallwatch.yml").write_text(config)
        base = list(command or [str(Path(sys.executable).with_name("stallwatch"))])
        base += ["serve", "--config.file", str(folder / "stallwatch.yml"), *flags]
        base += ["--web.listen-address", f"127.0.0.1:{self.port}"]
        super().__init__([*prefix, *base], folder / "stallwatch.log", environment, working_folder)
        self.url = f"http://127.0.0.1:{self.port}"
        self.scrapes = Scrapes(self.url)
        self.may_end = False
        self.is_checked = True
        self.leap = 0.0  # seconds by which its clocks go ahead at once, and by which a report is older then

    def wait_started(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, f"the exporter ended:\n{self.tail(40)}"
            return fetch(f"{self.url}/-/ready")[0] == 200

        wait_until(answers, PATIENCE, f"an exporter that is ready\n{self.tail()}")
        self.scrapes.waits = CpuWaits(self.pid)
        self.scrapes.start()

    def end(self, patience: float = 10.0) -> None:
        self.scrapes.stop()
        super().end(patience)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        alive = self.process.poll() is None
        self.end()
        if error is not None:
            error.add_note(f"what the exporter said:\n{self.tail(40)}")
            return
        assert alive or self.may_end, f"the exporter ended by itself:\n{self.tail(40)}"
        if self.is_checked:
            self.check_scrapes()

    def stop(self) -> None:
        """Tell it to end; nothing is scraped any more."""
        self.may_end = True
        self.scrapes.stop()
        self.process.terminate()

    def check_scrapes(self) -> None:
        """All were answered, soon, and with a page, but for what was waited for a CPU; and that is seldom."""
        history, waited = self.scrapes.history, self.scrapes.waited
        slow = {n: scrape.seconds for n, scrape in enumerate(history) if scrape.seconds >= SLOWEST_SCRAPE}
        late = {n: scrape.age for n, scrape in enumerate(history) if scrape.status != 200}
        late = {n: age - self.leap * (age > self.leap) for n, age in late.items()}
        for found, most in ((slow, SLOWEST_SCRAPE), (late, OLD_SECONDS + ROUNDED)):
            ours = {n: (seconds, waited(n, seconds)) for n, seconds in found.items()}
            wrong = {n: times for n, times in ours.items() if times[0] - times[1] > most}
            assert not wrong, f"of {len(history)}, too slow or refused (seconds, for a CPU): {wrong}"
        assert {scrape.status for scrape in history} <= {200, 503}
        assert len(slow) <= 1 + SLOW_SHARE * len(history), f"slow scrapes: {slow} of {len(history)}"
        assert len(late) <= LATE_SHARE * len(history), f"{len(late)} of {len(history)} were refused"

    # --- what it says -------------------------------------------------------------------------------------------

    def wait_for(self, what: str, condition: Callable[[Scrape], object], within: float = PATIENCE) -> Scrape:
        """The first page from now on that fulfils the condition."""
        begun = time.time()

        def seen() -> Scrape | None:
            return next((scrape for scrape in self.scrapes.since(begun) if condition(scrape)), None)

        found = wait_until(seen, within, f"{what}\n{self.tail()}")
        assert isinstance(found, Scrape)
        return found

    def wait_for_server(self, name: str, within: float = PATIENCE) -> Scrape:
        return self.wait_for(f"{name} with its threads", lambda page: page.value("threads", server=name), within)

    def rest(self, seconds: float) -> list[Scrape]:
        """Let it go on; the pages of that time."""
        begun = time.time()
        time.sleep(seconds)
        assert self.process.poll() is None, f"the exporter ended:\n{self.tail(40)}"
        pages = self.scrapes.since(begun)
        assert pages, "not one page"
        return pages

    def said(self, text: str) -> int:
        """How often it stands in what the exporter wrote."""
        return self.output.read_text(errors="replace").count(text)

    @property
    def open_files(self) -> int:
        return psutil.Process(self.pid).num_fds()


class Victim(Program):
    """A stand-in for llama.cpp's server, one process in C that waits; `order` is what else it does (victim.c).

    `output` is what the exporter finds as its log.
    """

    def __init__(
        self,
        program: Path,
        output: Path,
        *order: str,
        prefix: Sequence[str] = (),
        folder: Path | None = None,
        is_ready: Callable[[Victim], bool] = lambda victim: True,
    ) -> None:
        port = free_port()
        self.name = f"llamacpp-{port}"
        command = [*prefix, str(program), "--port", str(port), "-m", "model.gguf"]
        super().__init__(command, output, {"VICTIM": " ".join(order)}, folder)
        self._is_ready = is_ready

    def wait_started(self) -> None:
        wait_until(
            lambda: psutil.Process(self.pid).name() == "llama-server" and self._is_ready(self), PATIENCE, "the victim"
        )


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def tell(order: Path, word: str) -> None:
    """Write a whole word at once: who looks at any moment never finds an empty file."""
    new = order.with_name(f".{order.name}.new")
    new.write_text(word)
    new.replace(order)


def holds_in_time(
    pages: Sequence[Scrape],
    condition: Callable[[Scrape], object],
    what: str,
    collector: str = "threads",
    interval: float = 1.0,
) -> None:
    """For what a collector reads: on every page, but for those on which its last look is three intervals ago.

    On a busy machine that may be so for a moment.
    """
    wrong = [page for page in pages if not condition(page)]
    all_hold(wrong, lambda page: page.is_late(collector, interval), f"{what}, though the look was in time")
    assert len(wrong) <= len(pages) / 3, f"{what}: not on {len(wrong)} of {len(pages)} pages"


def all_hold(pages: Sequence[Scrape], condition: Callable[[Scrape], object], what: str) -> None:
    """Every one of the pages fulfils the condition."""
    wrong = [page for page in pages if not condition(page)]
    assert not wrong, f"{what}: not on {len(wrong)} of {len(pages)} pages, first {wrong[0].at - pages[0].at:.1f} s in"
