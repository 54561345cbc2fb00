"""The real exporter beside things that are made to fail, and what /metrics says the whole time.

`Exporter` scrapes itself four times a second in a thread of its own.  A case is over when it could say what was seen
meanwhile and afterwards; at the end every scrape must have been answered within a second, whatever happened.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from e2e.harness import Program, fetch, free_port, wait_until

TICK, LOOK = 0.5, 0.5
WINDOW, STALL_AFTER = 3.0, 8.0
SCRAPE_SECONDS = 0.25
SLOWEST_SCRAPE = 1.0
"""No scrape may take longer, whatever is broken, but for a few on a machine that is busy with the breaking."""
SLOW_SHARE = 0.04
LATE_SHARE = 0.15
"""Scrapes that may be refused because the last tick is three ticks old: half-second ticks on a busy machine."""

TIMES = f"""\
verdict: {{window: {WINDOW:g}s, stall_after: {STALL_AFTER:g}s, suspect_after: 40s, serve_stall_after: {STALL_AFTER:g}s}}
intervals: {{tick: 500ms, processes: 500ms, threads: 1s, ports: 1s, logs: 200ms, health: 1s, \
gpu: 1s, gpu_processes: 1s}}
"""
CONFIG = TIMES + "discovery: {frameworks: [llamacpp]}\n"
"""Only the victims are watched, whatever else runs on the machine."""
ALONE = TIMES + "discovery: {enabled: false}\n"
"""For cases that name their servers."""

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
        name = "stallwatch_server_state"
        found = (dict(has) for (found, has), value in self.samples.items() if found == name and value)
        return next((labels["state"] for labels in found if labels["server"] == server), "")

    def failed(self) -> set[str]:
        """Collectors whose last read failed, or that have not read yet."""
        return {name for name in COLLECTORS if self.value("collector_success", collector=name) != 1}


@dataclass(slots=True)
class Scrapes:
    """What was seen so far, oldest first."""

    url: str
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
        scrape = Scrape(at, time.monotonic() - begun, status, page)
        if not self._stopping.is_set():
            self.history.append(scrape)
        return scrape

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

    def wait_started(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, f"the exporter ended:\n{self.tail(40)}"
            return fetch(f"{self.url}/-/ready")[0] == 200

        wait_until(answers, PATIENCE, f"an exporter that is ready\n{self.tail()}")
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
        """All were answered, soon, and few of them with the refusal of an old report."""
        history = self.scrapes.history
        slow = [(scrape.status, scrape.seconds) for scrape in history if scrape.seconds >= SLOWEST_SCRAPE]
        assert len(slow) <= 1 + SLOW_SHARE * len(history), f"slow scrapes: {slow[:5]} of {len(history)}"
        assert {scrape.status for scrape in history} <= {200, 503}
        late = [scrape for scrape in history if scrape.status == 503]
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


def mostly_holds(pages: Sequence[Scrape], condition: Callable[[Scrape], object], what: str) -> None:
    """For what is there: on a busy machine a reading may be too old for a moment, and then it is rightly left out."""
    wrong = [page for page in pages if not condition(page)]
    assert len(wrong) <= len(pages) / 3, f"{what}: not on {len(wrong)} of {len(pages)} pages"


def all_hold(pages: Sequence[Scrape], condition: Callable[[Scrape], object], what: str) -> None:
    """Every one of the pages fulfils the condition."""
    wrong = [page for page in pages if not condition(page)]
    assert not wrong, f"{what}: not on {len(wrong)} of {len(pages)} pages, first {wrong[0].at - pages[0].at:.1f} s in"
