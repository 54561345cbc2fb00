"""Starts real things, watches them through the exporter's own pages, and leaves nothing behind.

`Program` is any child process with everything below it; `StandIn`, `VllmServer` and `Exporter` are kinds of
it.  A `Watch` samples the exporter every half second into a history that the cases ask questions about.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

import psutil
from prometheus_client.parser import text_string_to_metric_families

SAMPLE_SECONDS = 0.5
TICK, WINDOW, STALL_AFTER, SUSPECT_AFTER = 0.5, 6.0, 20.0, 60.0
LOOK = 0.5
"""Interval of the processes collector: how old what a tick knows may be."""
GPU_LOOK = 0.5
"""Interval of the gpu collector."""
SLACK = 1.5
"""What a loaded machine with two cores may add to any moment, in seconds."""

PATIENCE = 60.0
"""For what has to come at last, on a machine that is slow, or busy with other things, too: how soon is not claimed."""

LATE_SHARE = 0.05
"""Samples that may be refused because the last tick is too long ago: with ticks of half a second, a machine whose
two cores are busy with the servers under test does that now and then (the refusal is right)."""

CONFIG = f"""\
verdict: {{window: {WINDOW:g}s, stall_after: {STALL_AFTER:g}s, suspect_after: {SUSPECT_AFTER:g}s, \
serve_stall_after: {STALL_AFTER:g}s}}
intervals: {{tick: 500ms, processes: 500ms, threads: 1s, ports: 1s, logs: 200ms, health: 2s, \
gpu: {GPU_LOOK * 1000:g}ms, gpu_processes: 1s}}
"""
"""The shipped times divided by twelve (stall_after 4m -> 20s, suspect_after 15m -> 1m, window 60s -> 6s)."""

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def discovery(*excluded: str) -> str:
    """Leaves out servers whose command, or that of whoever started them, fits a pattern, and those of cases that run
    beside ours: their logs lie in the folder of another worker."""
    patterns = [*excluded, *([f"/popen-(?!{WORKER}/)"] if WORKER else [])]
    return f"discovery: {{exclude: {json.dumps(patterns)}}}\n"


ROOT = Path(__file__).resolve().parents[2]
OPENER = build_opener(ProxyHandler({}))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str, timeout: float = 5.0) -> tuple[int, str]:
    """Status and body; status 0 when nothing answers."""
    try:
        with OPENER.open(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()
    except (URLError, OSError):
        return 0, ""


def wait_until(condition: Callable[[], Any], within: float, what: str, step: float = 0.05) -> Any:
    """The first true value of `condition`; AssertionError with `what` when there is none in time."""
    deadline = time.monotonic() + within
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what}")
        time.sleep(step)


TIED = ["setpriv", "--pdeathsig", "KILL"]
"""Becomes the program itself, which then ends with us even when we are killed."""


class Program:
    """A child process in its own session, its output in a file, ended with everything below it."""

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.command = list(command)
        self.output = output
        self._environment = os.environ | dict(environment or {})
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"not started: {self.command}"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Self:
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [*TIED, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )
        try:
            self.wait_started()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def wait_started(self) -> None:
        """Overridden by programs that are of use only after a while."""

    def tail(self, lines: int = 15) -> str:
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return "\n".join(line[:300] for line in text.splitlines()[-lines:])

    def family(self) -> list[psutil.Process]:
        """The process, everything below it, and what it left behind in its session, alive or zombie."""
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            found = {process.pid: process for process in (root, *root.children(recursive=True))}
        for process in psutil.process_iter():
            with suppress(OSError):
                if os.getsid(process.pid) == self.pid:
                    found.setdefault(process.pid, process)
        return list(found.values())

    def find(self, title: str) -> psutil.Process | None:
        """The process below this one whose command line begins with `title`."""
        for process in self.family():
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(title):
                    return process
        return None

    def end(self, patience: float = 10.0) -> None:
        """SIGTERM, then SIGKILL for whatever is left; a stopped process is continued first."""
        if self._process is None:
            return
        family = self.family()
        for process in family:
            with suppress(psutil.Error):
                process.resume()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        family = list({*family, *self.family()})
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10.0)
        psutil.wait_procs(family, timeout=5.0)


class StandIn(Program):
    """A stand-in server in a named condition, for at most ten minutes."""

    def __init__(self, condition: str, folder: Path, cards: Path | None = None, **settings: float) -> None:
        """`cards`: folder of the stand-in cards that the ranks hold."""
        self.port = free_port()
        self.log = folder / f"{condition}.log"
        self.name = f"sglang-{self.port}"
        command = [sys.executable, "-m", "stallwatch.drill.standin", condition, "--port", str(self.port)]
        command += ["--for", "10m", "--log", str(self.log)]
        command += [] if cards is None else ["--cards", str(cards)]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        super().__init__(command, folder / f"{condition}.out")

    def wait_started(self) -> None:
        wait_until(self.log.exists, PATIENCE, f"a stand-in with a log\n{self.tail()}")

    def rank(self, number: int) -> psutil.Process:
        found = wait_until(
            lambda: self.find(f"sglang::scheduler_TP{number}"), PATIENCE, f"rank {number}\n{self.tail()}"
        )
        assert isinstance(found, psutil.Process)
        return found

    def lines(self, text: str) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").split("\n") if text in line]

    def wait_for_line(self, text: str, times: int = 1, within: float = PATIENCE) -> None:
        wait_until(lambda: len(self.lines(text)) >= times, within, f"{times} x {text!r} in the log")


class Exporter(Program):
    """`stallwatch serve` as a real process with a scaled configuration."""

    def __init__(
        self,
        folder: Path,
        config: str | None = None,
        command: Sequence[str] | None = None,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config_file = folder / "stallwatch.yml"
        config_file.write_text(CONFIG + discovery() if config is None else config)
        config_file.chmod(0o644)
        base = list(command or [str(Path(sys.executable).with_name("stallwatch"))])
        base += ["serve", "--config.file", str(config_file)]
        base += ["--web.listen-address", f"127.0.0.1:{self.port}"]
        super().__init__([*prefix, *base], folder / "stallwatch.log", environment)
        self.watch = Watch(self.url)

    def wait_started(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, f"the exporter ended:\n{self.tail(40)}"
            return fetch(f"{self.url}/-/ready")[0] == 200

        wait_until(answers, PATIENCE, f"an exporter that is ready\n{self.tail()}")
        self.watch.start()

    def end(self, patience: float = 10.0) -> None:
        self.watch.stop()
        super().end(patience)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        alive = self.process.poll() is None
        super().__exit__(kind, error, trace)
        if error is not None:
            error.add_note(f"what the exporter said:\n{self.tail(40)}\n{self.watch.story()}")
        else:
            assert alive, f"the exporter ended by itself:\n{self.tail(40)}"
            assert not self.watch.failures, self.watch.failures[:3]
            assert len(self.watch.late) <= LATE_SHARE * len(self.watch.history), self.watch.late


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the exporter.  `at` is Unix time; `servers` are those of /api/v1/report by name."""

    at: float
    servers: Mapping[str, Mapping[str, Any]]
    page: str

    def values(self, metric: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Samples of one metric whose labels include these, by their other labels."""
        found = {}
        for family in text_string_to_metric_families(self.page):
            for sample in family.samples:
                if sample.name == metric and labels.items() <= sample.labels.items():
                    found[tuple(sorted(sample.labels.items() - labels.items()))] = sample.value
        return found


@dataclass(slots=True)
class Watch:
    """Samples an exporter every half second in a thread of its own."""

    url: str
    history: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(20.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._look()
            self._stopping.wait(max(0.05, SAMPLE_SECONDS - (time.monotonic() - began)))

    def _look(self) -> None:
        at = time.time()
        (status, report), (page_status, page) = (
            fetch(f"{self.url}/api/v1/report"),
            fetch(f"{self.url}/metrics"),
        )
        if (status, page_status) != (200, 200):
            if not self._stopping.is_set():
                late = {status, page_status} <= {200, 503}
                (self.late if late else self.failures).append(
                    f"{at}: report {status}, metrics {page_status}: {report[:200]}"
                )
            return
        servers = {server["server"]: server for server in json.loads(report)["servers"]}
        self.history.append(Sample(at, servers, page))

    def of(self, name: str, since: float = 0.0) -> list[tuple[float, Mapping[str, Any]]]:
        """(Unix time, server document) of every sample that knows this server."""
        return [(s.at, s.servers[name]) for s in list(self.history) if name in s.servers and s.at >= since]

    def wait_for(self, name: str, within: float, **expected: Any) -> float:
        """Unix time of the first sample in which the server's fields have these values."""

        def seen() -> float | None:
            for at, server in self.of(name):
                if all(_matches(server.get(key), value) for key, value in expected.items()):
                    return at
            return None

        found = wait_until(seen, within, f"{name} with {expected}; it was: {self.story()}", 0.1)
        assert isinstance(found, float)
        return found

    def states(self, name: str, since: float = 0.0) -> set[str]:
        return {str(server["state"]) for _, server in self.of(name, since)}

    def phases(self, name: str) -> list[str]:
        """Phases in the order in which they were seen, without repeats in a row."""
        return _changes(str(server["phase"]) for _, server in self.of(name))

    def last(self) -> Sample:
        return wait_until(lambda: self.history[-1] if self.history else None, PATIENCE, "a sample")  # type: ignore[no-any-return]

    def story(self) -> str:
        """Every change of what was said about every server: what a person needs when a case fails."""
        names = sorted({name for sample in list(self.history) for name in sample.servers})
        return "\n".join(f"{name}: " + "; ".join(self._story_of(name)) for name in names)

    def _story_of(self, name: str) -> Iterable[str]:
        keys = ("state", "reason", "phase", "suspect_rank")
        last: tuple[Any, ...] = ()
        first = self.of(name)[0][0]
        for at, server in self.of(name):
            now = tuple(server.get(key) for key in keys)
            if now != last:
                yield f"+{at - first:.1f}s " + " ".join(map(str, now))
            last = now


def _matches(actual: Any, expected: Any) -> bool:
    return actual in expected if isinstance(expected, (set, frozenset)) else bool(actual == expected)


def _changes(values: Iterable[str]) -> list[str]:
    changed: list[str] = []
    for value in values:
        if not changed or changed[-1] != value:
            changed.append(value)
    return changed


def rest(seconds: float, program: Program) -> None:
    """Let things happen for a while; AssertionError if the program ends meanwhile."""
    with suppress(subprocess.TimeoutExpired):
        status = program.process.wait(seconds)
        raise AssertionError(f"{program.command[:3]} ended with {status}:\n{program.tail()}")


def stop(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, PATIENCE, f"{process.pid} stopped")
