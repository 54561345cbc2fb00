"""Our own log on stderr: event phrase first, facts as `extra`; logfmt or JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from types import TracebackType

_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("logfmt", "json")

log = logging.getLogger(__name__)


class Formatter(logging.Formatter):
    """One line per record: ts, level, logger, msg, then the extra fields in their order."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "ts": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        fields.update((key, value) for key, value in record.__dict__.items() if key not in _OWN)
        if record.exc_info and record.exc_info[0] is not None:
            fields["error"] = record.exc_info[0].__name__
            fields["at"] = _place(record)
        if self._as_json:
            return json.dumps(fields, default=str)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _place(record: logging.LogRecord) -> str:
    """Where an exception was raised: file and line.  Never its text, which may quote what we read."""
    trace = record.exc_info[2] if record.exc_info else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"


def _quoted(value: object) -> str:
    text = str(value)
    plain = text and all(character.isprintable() and character not in ' "=' for character in text)
    return text if plain else json.dumps(text)


def set_up(level: str, log_format: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))  # others tell paths at less
    logging.getLogger(__package__).setLevel(level.upper())


def tell_bugs() -> None:
    """From now on an error that nobody catches is a line of the log, too: where it was raised, never its text."""

    def in_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.critical("a bug ended the process", extra=_bug(kind, trace))

    def in_thread(told: threading.ExceptHookArgs) -> None:
        if told.exc_type is not SystemExit:
            name = told.thread.name if told.thread is not None else ""
            log.critical("a bug ended a thread", extra={"ended": name} | _bug(told.exc_type, told.exc_traceback))

    sys.excepthook, threading.excepthook = in_main, in_thread


def _bug(kind: type[BaseException], trace: TracebackType | None) -> dict[str, str]:
    calls = (f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in traceback.extract_tb(trace))
    return {"error": kind.__name__, "calls": " ".join(calls)}
