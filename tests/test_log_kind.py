"""Whose log is it?  Over whole logs, real ones and made ones, and over every framework's own fixture lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stallwatch.frameworks import load_frameworks
from stallwatch.parse.report import parse_files
from stallwatch.sources.logs.kind import recognise

FRAMEWORKS = load_frameworks()
BY_NAME = {framework.name: framework for framework in FRAMEWORKS}
FOLDER = Path(__file__).parent
MADE = FOLDER / "logs" / "made"
"""Whole logs in the shapes of releases of which no log of a real server is at hand; all values are invented."""

GUESSED = {"vllm-v1-stderr", "lmdeploy-0.16.0-turbomind-quiet"}
"""They hold bars and the web server's lines only."""
OF_NOBODY = {"unknown", "vllm-usage"}


def name_of(path: Path) -> str:
    """The framework in the name of a log: dynamo-1.6.1-sglang.log is of dynamo-sglang."""
    program, _, rest = path.stem.partition("-")
    if path.stem in OF_NOBODY:
        return "generic"
    engine = rest.rpartition("-")[2]
    return f"dynamo-{engine}" if program == "dynamo" and engine != "frontend" else program


@pytest.mark.parametrize(
    "path", [*sorted((FOLDER / "logs").glob("*.log")), *sorted(MADE.glob("*.log"))], ids=lambda path: path.stem
)
def test_a_whole_log_is_read_as_that_of_its_own_server(path: Path) -> None:
    found = recognise([path.read_bytes()], FRAMEWORKS)

    assert found.framework.name == name_of(path)
    assert found.is_certain == (path.stem not in GUESSED | OF_NOBODY)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "generic"])
def test_every_line_of_a_framework_alone_is_certain_of_it_or_a_guess_of_nobody_else(name: str) -> None:
    framework = BY_NAME[name]
    for line in yaml.safe_load((FOLDER / "frameworks" / f"{name}.yaml").read_text("utf-8"))["lines"]:
        found = recognise([line["line"].encode() + b"\n"], FRAMEWORKS)

        if found.is_certain:
            assert found.framework.name in (name, framework.extends), line["line"]


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "generic"])
def test_all_lines_of_a_framework_together_are_certain_of_it(name: str) -> None:
    lines = [
        line["line"] for line in yaml.safe_load((FOLDER / "frameworks" / f"{name}.yaml").read_text("utf-8"))["lines"]
    ]

    found = recognise(["\n".join([*lines, ""]).encode()], FRAMEWORKS)

    assert (found.framework.name, found.is_certain) == (name, True)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"hello\n",
        b"INFO:     Application startup complete.\n",  # vLLM, LMDeploy and TensorRT-LLM write it alike
        b"Traceback (most recent call last):\n",
        b"\xff\x00" * 50,
    ],
)
def test_what_nobody_or_everybody_writes_is_of_an_unknown_kind(text: bytes) -> None:
    found = recognise([text], FRAMEWORKS)

    assert (found.framework.name, found.is_certain) == ("generic", False)


def test_a_prompt_in_another_servers_log_makes_it_not_that_of_the_quoted_one() -> None:
    quoted = b"[2026-06-02 08:14:55 TP3] Load weight begin. avail mem=138.01 GB"
    served = (
        b"(APIServer pid=4021) INFO 10-22 09:40:12 [logger.py:41] Received request cmpl-1: prompt: '" + quoted + b"'\n"
    )

    assert recognise([served], FRAMEWORKS).framework.name == "vllm"


QUOTED = {
    "vllm": b"2025-10-21T23:24:52.381069Z  INFO main.init: worker for org/m has been initialized\n",
    "sglang": b"2025-10-21T23:24:52.381069Z  INFO x: Model registration succeeded; processing queued requests\n",
    "trtllm": b"2025-10-21T23:24:52.381069Z ERROR main.init: Failed to serve endpoints: x\n",
}
"""What a worker of Dynamo writes, as the second line of a prompt that is printed as it is."""


@pytest.mark.parametrize(
    ("name", "log"),
    [("vllm", "vllm-0.33.0-tp2-v2-runner"), ("sglang", "sglang-0.4.9-tp2"), ("trtllm", "trtllm-1.3.0-tp2")],
)
def test_a_line_of_a_worker_of_dynamo_in_a_servers_log_makes_it_none(name: str, log: str) -> None:
    text = (MADE / f"{log}.log").read_bytes()
    of_http = (b"INFO:  ", b"Starting vLLM server", b"ready to roll")
    engine = b"".join(line for line in text.splitlines(True) if not any(word in line for word in of_http))

    assert recognise([text + QUOTED[name]], FRAMEWORKS).framework.name == name
    assert recognise([engine + QUOTED[name]], FRAMEWORKS).framework.name == f"dynamo-{name}"


def parsed(name: str) -> dict[str, Any]:
    file: dict[str, Any] = parse_files([str(MADE / f"{name}.log")], None, FRAMEWORKS)["files"][0]
    return file


BOTH = {"TP0": 1.0, "TP1": 1.0}
STORIES: dict[str, tuple[bool, dict[str, float], dict[str, int]]] = {
    # ready, load progress of each rank, some markers
    "sglang-0.4.9-tp2": (True, BOTH, {"load_begin": 2, "load_end": 2, "capture_begin": 2, "capture_end": 2}),
    "sglang-0.5.23-dp2-tp2-eagle": (
        True,
        {f"DP{dp}-TP{tp}": 1.0 for dp in (0, 1) for tp in (0, 1)},
        {"load_begin": 4, "load_end": 4, "draft_load_begin": 4, "draft_load_end": 4, "capture_begin": 5},
    ),
    "sglang-0.5.23-follower": (False, {"TP2": 1.0, "TP3": 1.0}, {"load_end": 2, "capture_end": 2}),
    "vllm-0.6.6": (True, {"TP0": 1.0}, {"load_begin": 1, "load_end": 1, "capture_begin": 1, "capture_end": 1}),
    # The classic runner: only the first rank speaks of its weights.
    "vllm-0.11.2-tp2": (True, {"TP0": 1.0, "TP1": 0.0}, {"dist_init_begin": 2, "load_end": 1, "post_load": 1}),
    "vllm-0.33.0-tp2-v2-runner": (True, BOTH, {"load_end": 2, "post_load": 2, "capture_end": 2}),
    # Its bar and its word that the weights are read name no rank.
    "trtllm-1.3.0-tp2": (
        True,
        {"TP0": 1.0, "TP1": 0.0},
        {"load_begin": 4, "autotune_begin": 4, "autotune_end": 4, "warmup_end": 2},
    ),
    "tgi-3.3.7-2-shards": (True, BOTH, {"load_begin": 2, "load_end": 2, "warmup_begin": 1, "warmup_end": 1}),
    "tgi-3.3.7-json": (True, BOTH, {"load_begin": 2, "load_end": 2}),
    "lmdeploy-0.16.0-pytorch": (True, {"TP0": 1.0}, {"load_begin": 1, "load_end": 1, "warmup_end": 1}),
    "lmdeploy-0.16.0-turbomind-quiet": (True, {"TP0": 1.0}, {"load_progress": 1, "listening": 3}),
    "llamacpp-2024": (True, {"TP0": 1.0}, {"load_begin": 4, "load_progress": 1, "load_end": 1, "warmup_end": 1}),
    "dynamo-0.8.0-vllm": (True, {"TP0": 1.0, "TP1": 0.0}, {"load_end": 1, "capture_end": 1, "warmup_end": 1}),
    "dynamo-1.6.1-sglang": (True, {f"DP{dp}-TP{tp}": 1.0 for dp in (0, 1) for tp in (0, 1)}, {"load_end": 4}),
    "dynamo-1.6.1-frontend": (True, {}, {"listening": 1}),
    "unknown": (False, {}, {}),
}


def test_every_made_log_has_its_story() -> None:
    assert set(STORIES) == {path.stem for path in MADE.glob("*.log")}


@pytest.mark.parametrize("name", STORIES)
def test_a_made_log_tells_the_start_it_was_made_of(name: str) -> None:
    ready, loaded, markers = STORIES[name]

    file = parsed(name)

    assert (file["ready"], file["failed"], file["errors"]) == (ready, False, [])
    assert {rank: state["load_progress"] or 0.0 for rank, state in file["ranks"].items()} == loaded
    assert {event: file["markers"].get(event) for event in markers} == markers
    assert file["starts"] == (0 if name == "unknown" else 1)


@pytest.mark.parametrize(
    "name", ["sglang-0.4.9-tp2", "vllm-0.6.6", "trtllm-1.3.0-tp2", "tgi-3.3.7-2-shards", "llamacpp-2024"]
)
def test_a_server_that_is_started_again_and_again_into_one_log_is_told_by_its_last_start(
    name: str, tmp_path: Path
) -> None:
    """Some wrappers start a server for ever: the same phases once more are no progress of the first start."""
    once = (MADE / f"{name}.log").read_bytes()
    path = tmp_path / "again.log"
    path.write_bytes(once * 3)

    (file,) = parse_files([str(path)], None, FRAMEWORKS)["files"]

    assert (file["starts"], file["lines"]) == (3, 3 * once.count(b"\n"))
    assert file["markers"] == parsed(name)["markers"]


def test_only_the_ends_of_the_captures_of_a_follower_stand_last() -> None:
    file = parsed("sglang-0.5.23-follower")

    assert {state["phase"] for state in file["ranks"].values()} == {"capturing_graphs"}
    assert file["longest_silence"] == {"seconds": 360.0, "after_line": 7}
