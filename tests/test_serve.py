"""`serve` as a process: what it says, how it reloads, what its signals do.  Its web is tested in test_web."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stallwatch.assembly import Settings, make_daemon
from stallwatch.config import Config
from stallwatch.model import Report, ServerReport, Verdict
from stallwatch.presentation import document, verdict_line
from stallwatch.serve import (
    Keeper,
    LostThreadError,
    Reloading,
    Speaker,
    WebSettings,
    _handle_signals,
    check_threads,
    serve,
    serve_once,
)
from stallwatch.web.published import Published

SOON = 60.0


# --- what it says ------------------------------------------------------------------------------------------


def said(speaker: Speaker, report: Report, capsys: pytest.CaptureFixture[str]) -> list[str]:
    speaker.say(report)
    return [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]


def changed(report: Report, state: str) -> Report:
    first, second = report.servers
    return replace(report, servers=(first, replace(second, verdict=Verdict(state, "none", 1.0))))


def test_a_verdict_is_said_when_it_changes(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    speaker = Speaker()

    assert said(speaker, report, capsys) == ["sglang-8000", "vllm-8001"]
    assert said(speaker, report, capsys) == []
    assert said(speaker, changed(report, "working"), capsys) == ["vllm-8001"]
    assert said(speaker, changed(report, "working"), capsys) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda server: replace(server, verdict=replace(server.verdict, state="failed")),
        lambda server: replace(server, verdict=replace(server.verdict, reason="exited")),
        lambda server: replace(server, verdict=replace(server.verdict, suspect_rank="TP7")),
        lambda server: replace(server, phase="compiling"),
    ],
)
def test_each_part_of_what_is_said_is_said_when_it_changes(
    change: Callable[[ServerReport], ServerReport], report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = report.servers
    later = replace(report, servers=(change(first), second))
    speaker = Speaker()
    said(speaker, report, capsys)

    speaker.say(later)

    assert capsys.readouterr().out == f"{verdict_line(document(later)['servers'][0])}\n"
    assert said(speaker, replace(later, monotonic=later.monotonic + 5.0), capsys) == []


def test_that_there_is_no_server_is_said_once(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    speaker, empty = Speaker(), replace(report, servers=())

    assert said(speaker, empty, capsys) == ["no inference server found yet; looking again every few seconds"]
    assert said(speaker, empty, capsys) == []


def test_that_there_is_no_server_is_not_said_after_one_went(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    speaker = Speaker()
    said(speaker, report, capsys)

    assert said(speaker, replace(report, servers=()), capsys) == []


def test_servers_that_went_are_not_remembered(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    speaker = Speaker()
    said(speaker, report, capsys)
    said(speaker, replace(report, servers=report.servers[:1]), capsys)

    assert said(speaker, report, capsys) == ["vllm-8001"]


# --- reload ------------------------------------------------------------------------------------------------


@pytest.fixture
def reloading(tmp_path: Path) -> tuple[Path, Reloading]:
    """A daemon without collectors under a configuration file that can be changed."""
    file = tmp_path / "a.yml"
    file.write_text("intervals: {tick: 5s}\n")
    settings = Settings(config_file=str(file), collectors=())
    daemon = make_daemon(settings, lambda report: None)
    return file, Reloading(daemon, settings, Published(5.0, lambda: 0.0))


def test_a_good_configuration_is_taken(reloading: tuple[Path, Reloading]) -> None:
    file, reload = reloading
    file.write_text("intervals: {tick: 2s}\nverdict: {stall_after: 3m}\n")

    assert reload.reload() is None
    assert reload._daemon.config.verdict.stall_after == 180.0
    assert reload._published.tick_seconds == 2.0
    assert reload._daemon.tick().config_reload[0] is True


def test_a_bad_configuration_is_refused_with_a_sentence_and_changes_nothing(
    reloading: tuple[Path, Reloading], caplog: pytest.LogCaptureFixture
) -> None:
    file, reload = reloading
    before = reload._daemon.config
    file.write_text("intervals: {tick: soon}\n")

    problem = reload.reload()
    assert problem is not None
    assert problem.startswith(f"{file}:1: intervals.tick: ")
    assert reload._daemon.config is before
    assert reload._daemon.tick().config_reload[0] is False
    assert [(r.message, r.levelno) for r in caplog.records] == [("configuration not reloaded", logging.ERROR)]


def test_a_configuration_that_is_right_again_is_taken_after_a_bad_one(reloading: tuple[Path, Reloading]) -> None:
    file, reload = reloading
    file.unlink()
    assert reload.reload() is not None

    file.write_text("retention: 1m\n")
    assert reload.reload() is None
    assert reload._daemon.tick().config_reload[0] is True


# --- signals -----------------------------------------------------------------------------------------------


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of before come back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ticks(reloading: tuple[Path, Reloading], number: signal.Signals) -> None:
    _, reload = reloading
    _handle_signals(reload._daemon, reload)
    signal.raise_signal(number)

    reload._daemon.run()  # returns, for it was told to stop
    assert reload._daemon.report is None


@pytest.mark.usefixtures("handlers")
def test_sighup_reads_the_configuration_again(reloading: tuple[Path, Reloading]) -> None:
    file, reload = reloading
    done = threading.Event()
    taken = reload._daemon.reconfigure

    def reconfigure(config: Config | None) -> None:
        taken(config)
        done.set()

    reload._daemon.reconfigure = reconfigure  # type: ignore[method-assign]
    _handle_signals(reload._daemon, reload)
    file.write_text("retention: 1m\n")
    signal.raise_signal(signal.SIGHUP)

    assert done.wait(SOON)
    for thread in threading.enumerate():
        if thread.name == "reload":
            thread.join(SOON)


def reload_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reload"]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_reload_that_hangs_keeps_one_more_waiting_and_is_told_once_it_is_late(
    reloading: tuple[Path, Reloading], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    _, reload = reloading
    caplog.set_level(logging.INFO)
    begun, go_on, config = threading.Event(), threading.Event(), reload._daemon.config

    def hangs(*_: object) -> Config:
        begun.set()
        go_on.wait(SOON)
        return config

    monkeypatch.setattr("stallwatch.serve.read_config", hangs)
    reload.reload_in_background()
    assert begun.wait(SOON)
    assert reload._began is not None
    reload._began -= seconds
    for _ in range(50):
        reload.reload_in_background()
    waiting, told = reload_threads(), [record.message for record in caplog.records]
    refused = reload._daemon.tick().config_reload[0] is False
    go_on.set()
    for thread in waiting:
        thread.join(SOON)

    assert len(waiting) == 2
    assert told == (["configuration not reloaded"] if seconds else [])
    assert refused is bool(seconds)
    assert [record.message for record in caplog.records][len(told) :] == ["configuration reloaded"] * 2, "each did it"
    assert reload._daemon.tick().config_reload[0] is True


# --- starting ----------------------------------------------------------------------------------------------


def test_an_address_that_is_none_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(Settings(collectors=()), WebSettings(("nonsense",))) == 2
    assert capsys.readouterr().err.startswith("stallwatch: cannot listen on 'nonsense': ")


def state_folder(tmp_path: Path) -> tuple[str, str]:
    """A state folder that is not there yet, and a /proc with an identity of the boot."""
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("c0ffee\n")
    return str(tmp_path / "state"), str(tmp_path / "proc")


def test_the_state_is_written_when_it_is_due_and_at_the_end(tmp_path: Path, report: Report) -> None:
    folder, proc = state_folder(tmp_path)
    keeper = Keeper(folder, proc)
    assert keeper.memory is not None
    daemon = make_daemon(Settings(collectors=()), lambda report: None, memory=keeper.memory)
    keeper.hear(report, daemon)
    keeper.close(daemon)
    after = Keeper(folder, proc)

    assert (tmp_path / "state" / "state.json").exists()
    assert after.memory is not None
    assert after.memory.boot == keeper.memory.boot
    after.close(daemon)


def test_serve_goes_on_without_a_state_folder(tmp_path: Path, report: Report) -> None:
    daemon = make_daemon(Settings(collectors=()), lambda report: None)
    for folder in (None, "", str(tmp_path / "missing" / "state")):
        keeper = Keeper(folder, str(tmp_path))
        keeper.hear(report, daemon)
        keeper.close(daemon)
        assert keeper.memory is None


def test_once_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_once(Settings(collectors=())) == 0
    assert "\nstallwatch_build_info{" in capsys.readouterr().out


class Held:
    """A stdout that somebody holds: writing waits until it is let go."""

    def __init__(self) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        assert self.let_go.wait(SOON)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""


def test_a_thread_is_woken_for_what_is_to_be_said_alone(report: Report) -> None:
    speaker, empty = Speaker(), replace(report, servers=())
    unseen = replace(empty, health=tuple(replace(each, success=None) for each in report.health))

    def is_woken(report: Report) -> bool:
        speaker._wake.clear()
        speaker.hear(report)
        return speaker._wake.is_set()

    later = replace(report, monotonic=report.monotonic + 5.0)
    told = (unseen, empty, report, later, changed(later, "working"), report)
    assert [is_woken(each) for each in told] == [True, True, True, False, True, True]
    assert speaker._latest is report


def test_a_stdout_that_is_held_does_not_hold_the_tick(report: Report) -> None:
    out = Held()
    speaker = Speaker(out)  # type: ignore[arg-type]  # a file as far as print is concerned
    speaker.start()

    speaker.hear(report)
    assert out.reached.wait(SOON)
    speaker.hear(report)  # returns although the first report is not out yet

    out.let_go.set()


def test_a_stdout_that_is_gone_is_noticed_once_and_stops_nothing(
    report: Report, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(Held):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    speaker = Speaker(Gone())  # type: ignore[arg-type]  # the same
    caplog.set_level(logging.INFO)
    speaker.start()
    speaker.hear(report)
    speaker._thread.join(SOON)
    speaker.hear(report)

    assert [record.message for record in caplog.records] == ["stdout is gone: verdicts are not printed any more"]


def test_nothing_is_said_of_no_server_before_anybody_looked(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    health = tuple(replace(each, success=None) for each in report.health)

    assert said(Speaker(), replace(report, servers=(), health=health), capsys) == []


def test_a_reload_for_which_no_thread_can_be_started_is_refused_and_ends_nothing(
    reloading: tuple[Path, Reloading], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGHUP under a limit of processes: its handler interrupts the tick, and what it raises would end us."""
    _, reload = reloading

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", no_thread)
        reload.reload_in_background()

    assert [record.message for record in caplog.records] == ["configuration not reloaded"]
    assert reload._daemon.tick().config_reload[0] is False
    assert reload.reload() is None
    assert reload._daemon.tick().config_reload[0] is True


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


# --- threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_lost", "web", "expected"),
    [
        (False, (True, False), None),
        (True, (True, False), "processes"),
        (False, (False, False), "http"),
        (False, (True, True), "http"),
        (True, (False, False), "processes http"),
    ],
)
def test_a_thread_that_is_lost_ends_the_tick(
    is_lost: bool, web: tuple[bool, bool], expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    poller = SimpleNamespace(source=SimpleNamespace(name="processes"), is_lost=is_lost)
    daemon, http = SimpleNamespace(pollers=(poller,)), SimpleNamespace(is_running=web[0], is_stuck=lambda now: web[1])
    with pytest.raises(LostThreadError) if expected else nullcontext():
        check_threads(daemon, http)  # type: ignore[arg-type]  # as much of them as is looked at

    assert [record.__dict__["threads"] for record in caplog.records] == ([expected] if expected else [])
