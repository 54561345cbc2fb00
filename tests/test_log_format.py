"""What our own log lines look like; never the text of an exception, which may quote what was read."""

from __future__ import annotations

import json
import logging
import sys
import threading

import pytest

from stallwatch import log_format
from stallwatch.log_format import Formatter

MOMENT = 1_700_000_000.25


def record(message: str, level: int = logging.INFO, error: BaseException | None = None, **extra: object) -> str:
    return _format(False, message, level, error, **extra)


def _format(as_json: bool, message: str, level: int, error: BaseException | None, **extra: object) -> str:
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("stallwatch.daemon", level, "daemon.py", 1, message, None, exc_info)
    made.created, made.msecs = MOMENT, 250.0
    made.__dict__.update(extra)
    return Formatter(as_json).format(made)


HEAD = "ts=2023-11-14T22:13:20.250Z level=info logger=stallwatch.daemon"


def test_the_event_comes_first_and_facts_keep_their_order() -> None:
    line = record("server found", server="vllm-8000", rank="TP3", count=2)

    assert f'{HEAD} msg="server found" server=vllm-8000 rank=TP3 count=2' == line


def test_values_that_would_break_the_line_are_quoted() -> None:
    line = record("x", a="two words", b='say "no"', c="k=v", d="line\nbreak", e="", f="\x1b[31mred")

    assert f'{HEAD} msg=x a="two words" b="say \\"no\\"" c="k=v" d="line\\nbreak" e="" f="\\u001b[31mred"' == line


def test_json_is_one_object_a_line() -> None:
    line = _format(True, "verdict changed", logging.WARNING, None, server="a b", since=1.5, other=OSError)

    assert "\n" not in line
    assert {
        "ts": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "stallwatch.daemon",
        "msg": "verdict changed",
        "server": "a b",
        "since": 1.5,
        "other": str(OSError),
    } == json.loads(line)


def test_an_exception_is_its_class_and_place_and_never_its_text() -> None:
    try:
        raise ValueError("--api-key sk-secret")
    except ValueError as error:
        line = record("source failed", logging.WARNING, error)

    assert "secret" not in line
    assert "error=ValueError at=test_log_format.py:" in line


def test_an_exception_that_was_never_raised_has_no_place() -> None:
    assert 'error=OSError at=""' in record("x", error=OSError("secret"))


def test_a_record_without_an_exception_names_none() -> None:
    made = logging.LogRecord("a", logging.INFO, "f", 1, "x", None, sys.exc_info())
    made.created, made.msecs = MOMENT, 250.0

    assert Formatter(False).format(made) == "ts=2023-11-14T22:13:20.250Z level=info logger=a msg=x"


# --- what nobody catches -------------------------------------------------------------------------------------


def raises(*_: object) -> None:
    raise KeyError("sk-secret")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    log_format.tell_bugs()
    return caplog


def test_an_error_that_ends_a_thread_is_told_by_its_place(told: pytest.LogCaptureFixture) -> None:
    thread = threading.Thread(target=raises, name="speaker")
    thread.start()
    thread.join()

    (said,) = told.records
    assert (said.message, said.__dict__["ended"], said.__dict__["error"]) == (
        "a bug ended a thread",
        "speaker",
        "KeyError",
    )
    assert said.__dict__["calls"].rpartition(" ")[2].startswith("test_log_format.py:")
    assert "sk-secret" not in Formatter(True).format(said)


def test_a_thread_that_ends_itself_is_no_bug(told: pytest.LogCaptureFixture) -> None:
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()

    assert told.records == []


def test_an_error_that_ends_us_is_told_by_its_place(told: pytest.LogCaptureFixture) -> None:
    try:
        raises()
    except KeyError as error:
        sys.excepthook(type(error), error, error.__traceback__)

    (said,) = told.records
    assert (said.message, said.__dict__["error"]) == ("a bug ended the process", "KeyError")
    assert "sk-secret" not in Formatter(False).format(said)


@pytest.mark.parametrize(
    ("level", "ours", "others"), [("debug", 10, 30), ("info", 20, 30), ("warning", 30, 30), ("error", 40, 40)]
)
def test_libraries_are_heard_from_warnings_on(
    level: str, ours: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At less watchdog tells the paths of all that it sees."""
    root, package = logging.getLogger(), logging.getLogger("stallwatch")
    for logger in (root, package):
        monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(root, "handlers", [])
    log_format.set_up(level, "logfmt")

    watchdog, daemon = logging.getLogger("watchdog.observers"), logging.getLogger("stallwatch.daemon")
    assert (daemon.getEffectiveLevel(), watchdog.getEffectiveLevel()) == (ours, others)
