"""`stallwatch serve`: the exporter as a process, with its signals, its HTTP server and its words on stdout."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from .allocator import keep_freed
from .assembly import Settings, make_daemon, read_config
from .daemon import Daemon
from .exposition import render
from .frameworks import load_frameworks
from .heartbeat import Heartbeat, Notifier
from .memory import Memory
from .model import Report
from .presentation import document, server_document, verdict_line
from .state_file import Schedule, StateWriter, open_state
from .strict_yaml import InputError
from .web import Access, HttpServer, ListenError, Published, Renewal, serve_http

log = logging.getLogger(__name__)

ONCE_SECONDS = 20.0
"""`--once` waits no longer than this for a source that hangs."""
COLLECT_AFTER = 10_000, 20, 20
"""Containers made and not freed until the collector of circles looks at them, and how often each next generation."""
LATE_RELOAD_SECONDS = 10.0
"""Who asks for a reload while one has taken this long is told that it does not come."""


@dataclass(frozen=True, slots=True)
class WebSettings:
    listen_addresses: tuple[str, ...]
    telemetry_path: str = "/metrics"
    max_requests: int = 40
    enable_lifecycle: bool = False
    config_file: str | None = None


class Keeper:
    """Keeps what is known in the state folder, so that a restart of ours neither ends nor repeats an alert.

    `memory` is None where nothing can be kept; serve goes on without.
    """

    def __init__(self, folder: str | None, procfs: str) -> None:
        self.memory: Memory | None = None
        self._writer: StateWriter | None = None
        self._schedule = Schedule()
        found = open_state(folder, procfs) if folder else None
        if found is None:
            return
        state, boot, kept = found
        self.memory = Memory(state.seal, boot)
        problem = self.memory.load(kept, time.monotonic()) if kept is not None else "there is none"
        log.info("state is kept", extra={"before": problem or "taken up"})
        self._writer = StateWriter(state)
        self._writer.start()

    def hear(self, report: Report, daemon: Daemon) -> None:
        """Have the state written when it is due."""
        certain = frozenset(s.server.name for s in report.servers if s.verdict.state in ("stalled", "failed"))
        if self._writer is not None and self._schedule.is_due(report.monotonic, certain):
            self._offer(daemon)

    def close(self, daemon: Daemon) -> None:
        """Write a last time."""
        if self._writer is not None:
            self._offer(daemon)
            self._writer.close()

    def _offer(self, daemon: Daemon) -> None:
        state = daemon.remembered()
        if self._writer is not None and state is not None:
            self._writer.offer(state)


class Speaker:
    """One line per server on stdout, whenever its verdict changes.

    Has a thread of its own: a terminal that is held, or a pipe nobody reads, must not hold the tick.  When
    stdout is gone it falls silent.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._heard: object = None  # what may be said of the last report
        self._said: dict[str, tuple[str | None, ...]] = {}
        self._nothing_said = False
        self._latest: Report | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="speaker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hear(self, report: Report) -> None:
        """Take the latest report, if it says something else; one that could not be said in time is left out."""
        before, self._heard = self._heard, (_looked(report), _states(report))
        if before != self._heard:
            self._latest = report
            self._wake.set()

    def _run(self) -> None:
        try:
            while self._wake.wait():
                self._wake.clear()
                if self._latest is not None:
                    self.say(self._latest)
        except (OSError, ValueError):
            log.info("stdout is gone: verdicts are not printed any more")

    def say(self, report: Report) -> None:
        before, self._said = self._said, _states(report)
        for server in report.servers:
            name = server.server.name
            if before.get(name) != self._said[name]:
                line = verdict_line(server_document(server, report.monotonic))
                print(line, file=self._out, flush=True)
        if _looked(report) and not report.servers and not before and not self._nothing_said:
            self._nothing_said = True
            print("no inference server found yet; looking again every few seconds", file=self._out, flush=True)


def _looked(report: Report) -> bool:
    return any(health.source == "processes" and health.success for health in report.health)


def _states(report: Report) -> dict[str, tuple[str | None, ...]]:
    """What is said of each server."""
    return {
        server.server.name: (server.verdict.state, server.verdict.reason, server.verdict.suspect_rank, server.phase)
        for server in report.servers
    }


def serve(settings: Settings, web: WebSettings, state_folder: str | None = None) -> int:
    """Run until SIGINT or SIGTERM.  Exit code 0; 2 when an address cannot be listened on; see also `heartbeat`.

    InputError when the configuration, or that of the web, is wrong.
    """
    keep_freed()
    renewal = Renewal(web.config_file) if web.config_file else None
    published: list[Published] = []
    speaker = Speaker()
    keeper = Keeper(state_folder, settings.procfs)

    def publish(report: Report) -> None:
        check_threads(daemon, http)
        published[0].publish(report)
        speaker.hear(report)
        keeper.hear(report, daemon)
        heartbeat.beat()

    daemon = make_daemon(settings, publish, memory=keeper.memory)
    published.append(Published(daemon.config.intervals.tick, time.monotonic))
    heartbeat = Heartbeat(Notifier(os.environ), lambda: daemon.config.intervals.tick)
    reload = Reloading(daemon, settings, published[0], renewal)
    access = renewal.current if renewal else Access
    try:
        http = serve_http(
            published[0],
            web.listen_addresses,
            telemetry_path=web.telemetry_path,
            max_requests=web.max_requests,
            reload=reload.reload if web.enable_lifecycle else None,
            access=access,
        )
    except ListenError as error:
        print(f"stallwatch: {error}", file=sys.stderr)
        return 2
    with suppress(OSError):
        for address in http.addresses:
            scheme = "https" if access().tls else "http"
            print(f"listening on {scheme}://{address.replace('[::]', 'localhost')}", flush=True)
    if sys.stdout.isatty() and sys.stderr.isatty():
        logging.getLogger(Daemon.__module__).setLevel(logging.WARNING)  # each verdict stands there already
    speaker.start()
    if renewal is not None:
        renewal.start()
    _handle_signals(daemon, reload)
    _collect_seldom()
    try:
        daemon.start()
        heartbeat.start()
        daemon.run()
        heartbeat.stop()
        keeper.close(daemon)  # not after a bug in the tick: what it left behind is not to be trusted
    finally:
        http.stop()
        if renewal is not None:
            renewal.stop()
        daemon.close()
    return 0


def _collect_seldom() -> None:
    """Almost nothing of ours is in a circle, so there is little to look for; and what is loaded by now stays."""
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


class LostThreadError(RuntimeError):
    """A thread we cannot do without has ended, or HTTP does nothing: a new process is better than half of one."""


def check_threads(daemon: Daemon, http: HttpServer) -> None:
    """Called by each tick, which ends with the error, and the process with it."""
    lost = [poller.source.name for poller in daemon.pollers if poller.is_lost]
    if not http.is_running or http.is_stuck(time.monotonic()):
        lost.append("http")
    if lost:
        log.error("threads have ended or are stuck: ending", extra={"threads": " ".join(lost)})
        raise LostThreadError


class Reloading:
    """Reads the configuration again on request; a wrong file changes nothing but is logged and exported.

    The web configuration is looked at as well, though it would be anyway.
    """

    def __init__(
        self, daemon: Daemon, settings: Settings, published: Published, renewal: Renewal | None = None
    ) -> None:
        self._daemon, self._settings, self._published = daemon, settings, published
        self._renewal = renewal
        self._lock = threading.Lock()
        self._began: float | None = None  # when the one that reads now began, monotonic
        self._is_next = self._is_told = False  # another waits for its turn; that the first is late was said

    def reload(self) -> str | None:
        """None when it worked, else the sentence about what is wrong.  May wait for the file."""
        with self._lock:
            self._began, self._is_next = time.monotonic(), False
            try:
                return self._read()
            finally:
                self._began, self._is_told = None, False

    def _read(self) -> str | None:
        try:
            config = read_config(self._settings, load_frameworks())
        except InputError as error:
            self._refuse(str(error))
            return str(error)
        self._daemon.reconfigure(config)
        self._published.tick_seconds = config.intervals.tick
        log.info("configuration reloaded")
        return self._renewal.look() if self._renewal else None

    def reload_in_background(self) -> None:
        """Never raises: the handler of a signal may interrupt the tick anywhere.

        At most one waits for its turn, which sees the file as it is then; more would be a thread for each signal
        while a dead mount holds the first.
        """
        began = self._began
        if began is not None and not self._is_told and time.monotonic() - began >= LATE_RELOAD_SECONDS:
            self._is_told = True
            self._refuse("the reload before has not ended")
        if self._is_next:
            return
        self._is_next = True
        try:
            threading.Thread(target=self.reload, name="reload", daemon=True).start()
        except RuntimeError:  # a limit of processes
            self._is_next = False
            self._refuse("no thread can be started")

    def _refuse(self, problem: str) -> None:
        self._daemon.reconfigure(None)
        log.error("configuration not reloaded", extra={"problem": problem})


def _handle_signals(daemon: Daemon, reload: Reloading) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: daemon.stop())
    signal.signal(signal.SIGHUP, lambda *_: reload.reload_in_background())


def serve_once(settings: Settings) -> int:
    """One complete cycle of every collector; the page to stdout."""
    daemon = make_daemon(settings, lambda report: None)
    report = daemon.once(ONCE_SECONDS)
    sys.stdout.write(render(report).decode())
    for server in document(report)["servers"]:
        print(verdict_line(server), file=sys.stderr)
    daemon.close()
    return 0


def check_config(settings: Settings, web_config: str | None = None) -> int:
    """`--config.check`: read the configuration and say that it is right (InputError says what is not)."""
    config = read_config(settings, load_frameworks())
    print(f"{config.file or 'the built-in configuration'}: is valid")
    if web_config is not None:
        Renewal(web_config)
        print(f"{web_config}: is valid")
    return 0
