"""Logs whose lines are JSON records: vLLM with a logging configuration, Dynamo's JSONL, any logger of that kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.frameworks import Framework, load_frameworks
from stallwatch.frameworks.json_lines import Record, read_record
from stallwatch.parse.report import parse_files
from stallwatch.sources.logs.lines import LogScanner
from stallwatch.sources.logs.times import parse_time

FOLDER = Path(__file__).parent / "frameworks"
FRAMEWORKS = load_frameworks()
BY_NAME = {framework.name: framework for framework in FRAMEWORKS}


def record(message: str, **given: Any) -> str:
    """As Dynamo writes it (documented for 0.5 on)."""
    return json.dumps(
        {"time": "2025-09-02T15:53:31.943377Z", "level": "INFO", "target": "log", "message": message, **given},
        separators=(",", ":"),
    )


def events(framework: str, *lines: str) -> dict[str, int]:
    scanner = LogScanner(BY_NAME[framework], track_shapes=False)
    scanner.feed("".join(line + "\n" for line in lines).encode())
    return dict(scanner.events)


def fit(framework: Framework, line: str) -> str | None:
    """The expression that a line fits."""
    prefix, message = framework.split(line)
    found = (one.regex.pattern for one in framework.patterns if framework.fits(one, prefix, message))
    return next(found, None)


# --- records -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (record("a b"), Record("2025-09-02T15:53:31.943377Z", "INFO", "log", "a b")),
        (
            '{"asctime": "2025-11-02 08:14:31,123", "levelname": "warning", "name": "v.x", "message": "q \\"x\\" \\n"}',
            Record("2025-11-02 08:14:31,123", "WARNING", "v.x", 'q "x" \r'),
        ),
        ('{"ts":1756828411.5,"level":"info","msg":"m"}', Record("2025-09-02T15:53:31.500000Z", "INFO", "", "m")),
        ('{"ts":1756828411500,"level":"info","msg":"m"}', Record("2025-09-02T15:53:31.500000Z", "INFO", "", "m")),
        ('{"level":"INFO","fields":{"message":"m"}}', Record("", "INFO", "", "m")),
        ('{"time":"t","message":"cut he', Record("t", "", "", "cut he")),
        ('{"time":"t","extra":{"message":"mi', Record("t", "", "", None)),
        ('{"message":"no time, no level"}', None),
        ('{"role":"user","content":"x"}', None),
        ('{"level":{"message":"m"},"message":"m"}', None),
        ("{}", None),
        ('{"', None),
        ("text", None),
    ],
)
def test_a_record_is_what_a_logger_wrote(text: str, found: Record | None) -> None:
    assert read_record(text) == found


@given(st.text() | st.text('{}[]":,\\\n aetvlmsg0', max_size=80).map(lambda text: '{"time":' + text))
def test_no_text_fails(text: str) -> None:
    read_record(text)
    for framework in FRAMEWORKS:
        framework.split('{"' + text)


def test_a_record_of_a_hundred_thousand_brackets_is_none() -> None:
    assert read_record('{"time":"t","a":' + "[" * 100_000) == Record("t", "", "", None)


# --- lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "tgi"])  # it has records of its own
def test_what_a_logger_writes_means_the_same_as_a_record(name: str) -> None:
    framework = BY_NAME[name]
    for line in yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))["lines"]:
        prefix, message = framework.split(line["line"])
        if not (prefix.own or prefix.uvicorn) or line["line"].startswith(("\r", "\x1b")) or "time" in line:
            continue
        level = prefix.level or ("ERROR" if line["event"] in ("error", "fatal") else "INFO")
        written = record(message, level=level, name="uvicorn.error" if prefix.uvicorn else "engine")

        if name == "dynamo" and "http-request" in line["line"]:
            continue  # in text its target is the span
        assert fit(framework, written.replace('"target":"log",', "")) == fit(framework, line["line"]), line["line"]


def test_a_worker_of_dynamo_is_ready_by_its_record_and_not_by_one_that_quotes_it() -> None:
    ready = "VllmWorker for org/m has been initialized"

    assert events("dynamo-vllm", record(ready)) == {"ready": 1}
    assert events("dynamo-vllm", record("prompt", body={"message": ready, "level": "INFO"})) == {}
    assert events("dynamo-vllm", record(f"got {record(ready)}")) == {}
    assert events("dynamo-vllm", json.dumps({"message": ready})) == {}


def test_the_marks_of_processes_in_front_of_a_record_and_in_it_name_the_rank() -> None:
    scanner = LogScanner(BY_NAME["vllm"], track_shapes=False)
    load = record("Starting to load model m...")
    hits = scanner.feed(f"(Worker_TP3 pid=42) {load}\n{record('(Worker_TP5 pid=43) INFO:')}\n{load}\n".encode()).hits

    assert [(hit.event, hit.rank) for hit in hits] == [("load_begin", "TP3"), ("load_begin", None)]
    sglang = record("[2026-06-02 08:14:55 DP1 TP3] Load weight begin. avail mem=1 GB")
    assert LogScanner(BY_NAME["dynamo-sglang"]).feed(f"{sglang}\n".encode()).hits[0].rank == "DP1-TP3"


def test_the_time_is_that_of_the_record() -> None:
    scanner = LogScanner(BY_NAME["vllm"], track_shapes=False)
    (hit,) = scanner.feed(f"{record('Loading weights took 1.5 seconds')}\n".encode()).hits

    assert (hit.stamp, hit.time) == ("2025-09-02T15:53:31.943377Z", parse_time("2025-09-02 15:53:31.943377"))


def test_words_of_trouble_count_at_a_level_of_trouble_only() -> None:
    words = "EngineCore failed to start."

    assert events("vllm", record(words, level="ERROR")) == {"fatal": 1}
    assert events("vllm", record(words, level="error")) == {"fatal": 1}
    assert events("vllm", record(words)) == {}
    assert events("vllm", record(words, target="x", level="DEBUG")) == {}


def test_a_request_of_uvicorn_is_access_and_no_more() -> None:
    line = record('10.0.0.1:4711 - "GET /health HTTP/1.1" 200', name="uvicorn.access")
    ready = record("Application startup complete.", name="uvicorn.error")

    assert events("vllm", line, ready) == {"access": 1, "ready": 1}
    assert events("vllm", record("Application startup complete.", name="chat")) == {}


@pytest.mark.parametrize("text", ["[Stage-0] ", "[vLLM]", "chat: ", "prod/chat-1 "])
def test_what_vllms_users_put_in_front_of_its_lines_is_passed_over(text: str) -> None:
    """VLLM_LOGGING_PREFIX, which stands behind the mark of the process."""
    line = "INFO 11-02 08:14:31 [gpu_model_runner.py:1] Starting to load model m..."

    (hit,) = LogScanner(BY_NAME["vllm"]).feed(f"(Worker_TP3 pid=42) {text}{line}\n".encode()).hits

    assert (hit.event, hit.rank, hit.stamp) == ("load_begin", "TP3", "11-02 08:14:31")
    assert events("vllm", text + line) == {"load_begin": 1}


@pytest.mark.parametrize("text", ["what is: ", "'", "user says ", "prompt='"])
def test_words_in_front_of_a_line_of_vllm_make_a_quotation_of_it(text: str) -> None:
    assert events("vllm", text + "ERROR 11-02 08:14:31 [core.py:1] EngineCore failed to start.") == {}


STORY = (
    ("08:00:00", "vLLM API server version 0.11.2", "vllm"),
    ("08:00:01", "non-default args: {'model': '/models/m', 'tensor_parallel_size': 1}", "vllm"),
    ("08:00:20", "Starting to load model /models/m...", "vllm"),
    ("08:05:20", "Loading weights took 299.10 seconds", "vllm"),
    ("08:05:30", "Graph capturing finished in 9 secs, took 0.50 GiB", "vllm"),
    ("08:05:40", "Application startup complete.", "uvicorn.error"),
)


def test_a_whole_log_of_records_is_recognised_and_told(tmp_path: Path) -> None:
    path = tmp_path / "server.jsonl"
    lines = [record(text, time=f"2025-09-02T{time}Z", name=name) for time, text, name in STORY]
    path.write_text("".join(line.replace('"target":"log",', "") + "\n" for line in lines))

    (file,) = parse_files([str(path)], None, FRAMEWORKS)["files"]

    assert (file["framework"], file["recognised"], file["ready"], file["version"]) == ("vllm", True, True, "0.11.2")
    assert file["ranks"]["TP0"]["load_progress"] == 1.0
    assert file["longest_silence"] == {"seconds": 300.0, "after_line": 3}
    assert file["longest_progress_silence"] == {"seconds": 300.0, "after_line": 3}


def test_records_of_nobody_are_of_an_unknown_kind(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"role":"user","content":"Starting to load model m..."}\n' * 9)

    (file,) = parse_files([str(path)], None, FRAMEWORKS)["files"]

    assert (file["framework"], file["recognised"], file["markers"]) == ("generic", False, {})
