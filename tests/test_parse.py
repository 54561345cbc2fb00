"""Whole files told: the rules for `parse` of the contract, on hand-made logs and on those of real servers."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stallwatch.frameworks import load_frameworks
from stallwatch.parse import format_text, parse_files
from stallwatch.parse_input import BLOCK_BYTES, LONGEST_LINE_BYTES

FRAMEWORKS = load_frameworks()
LOGS = Path(__file__).parent / "logs"
PLANTED = "sk-planted-0123456789"


def at(second: int, text: str, rank: str = "") -> str:
    return f"[2026-06-02 08:{second // 60:02}:{second % 60:02}{rank and ' '}{rank}] {text}"


def parsed(path: Path | str, framework: str | None = None) -> dict[str, Any]:
    file: dict[str, Any] = parse_files([str(path)], framework, FRAMEWORKS)["files"][0]
    return file


def written(folder: Path, *lines: str, end: str = "\n") -> Path:
    path = folder / "server.log"
    path.write_text("\n".join(lines) + end)
    return path


DEADLOCK = [
    at(0, f"server_args=ServerArgs(model_path='/m', tp_size=8, api_key='{PLANTED}')"),
    *(at(10, "Init torch distributed begin.", f"TP{rank}") for rank in range(8)),
    *(at(20, "Init torch distributed ends. elapsed=8.12 s, mem usage=1.02 GB", f"TP{rank}") for rank in range(8)),
    *(at(21, "Load weight begin. avail mem=138.01 GB", f"TP{rank}") for rank in range(8)),
    "Loading safetensors checkpoint shards: 100% Completed | 163/163 [00:20<00:00,  8.11it/s]",
    *(at(41 + rank, "Load weight end. elapsed=22.2 s, type=X", f"TP{rank}") for rank in range(8)),
]


def test_the_silent_deadlock_shows_that_all_eight_ranks_loaded(tmp_path: Path) -> None:
    file = parsed(written(tmp_path, *DEADLOCK))

    assert (file["framework"], file["ready"], file["failed"], file["starts"]) == ("sglang", False, False, 1)
    assert file["markers"]["load_begin"] == file["markers"]["load_end"] == 8
    assert file["ranks"] == {f"TP{rank}": {"phase": "post_load", "load_progress": 1.0} for rank in range(8)}
    assert file["longest_progress_silence"] == {"seconds": 20.0, "after_line": 25}


def test_the_phantom_hang_is_ready_at_its_last_line(tmp_path: Path) -> None:
    slow = [
        f"\rLoading safetensors checkpoint shards:  1% Completed | {k}/270 [00:01<00:10,  1.0s/it]"
        for k in range(1, 279 - 8)
    ]
    end = [at(900, "The server is fired up and ready to roll!")]
    lines = [*DEADLOCK[:25], *slow, *DEADLOCK[26:], *end]
    path = written(tmp_path, *lines)

    file = parsed(path)

    assert (file["lines"], file["ready"], file["ready_line"]) == (len(lines), True, len(lines))
    assert file["longest_silence"]["after_line"] == len(lines) - 1
    assert f"{len(lines)} lines read; ready at line {len(lines)}" in format_text(
        parse_files([str(path)], None, FRAMEWORKS)
    )


def test_phases_have_ranks_lines_and_the_times_the_log_prints(tmp_path: Path) -> None:
    file = parsed(written(tmp_path, *DEADLOCK))

    load = [phase for phase in file["phases"] if phase["rank"] == "TP3" and phase["phase"] == "loading_weights"]
    assert load == [
        {
            "phase": "loading_weights",
            "rank": "TP3",
            "begin_line": 21,
            "end_line": 30,
            "begin": "2026-06-02 08:00:21",
            "end": "2026-06-02 08:00:44",
            "seconds": 23.0,
        }
    ]
    assert [phase["phase"] for phase in file["phases"] if phase["rank"] is None] == [
        "spawned",
        "distributed_init",
        "loading_weights",
        "post_load",
    ]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", 0),
        (b"a\n", 1),
        (b"a\nb", 2),
        (b"bar 1\rbar 2\rbar 3\nnext\r\n", 2),
        (b"a\n\n\n", 3),
        (b"x" * (3 * BLOCK_BYTES), 1),
        (b"a\n" + b"x" * (2 * LONGEST_LINE_BYTES + 7) + b"\nb\n", 3),
        (b"\0" * 5000 + b"a\nb\n", 2),
        (b"caf\xe9 \xff\xfe\n\r\n", 2),
    ],
)
def test_lines_are_line_ends_and_an_unterminated_tail(data: bytes, lines: int, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(data)

    file = parsed(path)

    assert (file["lines"], file["bytes"]) == (lines, len(data))


def test_all_but_lines_bytes_and_starts_is_of_the_last_start(tmp_path: Path) -> None:
    first = [
        *DEADLOCK,
        at(100, "No available block found in 60 second. ", "TP0"),
        at(500, "Received sigquit from a child process. It usually means the child failed."),
    ]
    path = written(
        tmp_path, *first, at(600, "server_args=ServerArgs(tp_size=1)"), at(610, "Load weight begin."), "what"
    )

    file = parsed(path)

    assert (file["lines"], file["starts"], file["failed"], file["errors"]) == (len(first) + 3, 2, False, [])
    assert file["markers"] == {"args": 1, "load_begin": 1}
    assert file["ranks"] == {"TP0": {"phase": "loading_weights", "load_progress": None}}
    assert (file["heartbeats"], file["unmatched"]) == (0, 1)
    assert file["longest_silence"] == {"seconds": 10.0, "after_line": len(first) + 1}
    assert file["longest_progress_silence"] == {"seconds": 10.0, "after_line": len(first) + 1}


def test_a_fatal_line_fails_and_leaves_the_phase(tmp_path: Path) -> None:
    lines = [*DEADLOCK[:26], at(30, "Scheduler hit an exception: Traceback (most recent call last):", "TP5")]

    file = parsed(written(tmp_path, *lines))

    assert file["failed"]
    assert file["errors"] == [{"kind": "other", "line": 27, "rank": "TP5"}]
    assert file["ranks"]["TP5"] == {"phase": "loading_weights", "load_progress": None}
    assert file["ranks"]["TP0"]["load_progress"] == 1.0


def test_heartbeats_are_no_progress(tmp_path: Path) -> None:
    beats = [at(60 * minute, "No available block found in 60 second. ", "TP0") for minute in range(2, 12)]

    file = parsed(written(tmp_path, *DEADLOCK, *beats, at(720, "Memory pool end. avail mem=1 GB", "TP0")))

    assert file["heartbeats"] == 10
    assert file["longest_silence"] == {"seconds": 72.0, "after_line": len(DEADLOCK)}
    assert file["longest_progress_silence"] == {"seconds": 672.0, "after_line": len(DEADLOCK)}


def test_a_silence_is_found_wherever_it_is_in_a_large_log(tmp_path: Path) -> None:
    lines, second = [], 0
    for number in range(60_000):
        second += 37 if number == 43_210 else number % 2
        time = datetime(2026, 6, 2) + timedelta(seconds=second)
        lines.append(f"[{time}] x{number}")
    lines.insert(0, at(0, "server_args=ServerArgs(x)"))

    assert parsed(written(tmp_path, *lines))["longest_silence"] == {"seconds": 37.0, "after_line": 43_211}


def test_the_tail_after_the_last_line_and_lines_without_a_time_do_not_count(tmp_path: Path) -> None:
    file = parsed(written(tmp_path, at(0, "server_args=ServerArgs(x)"), "no time", at(5, "x"), "no time"))

    assert file["longest_silence"] == {"seconds": 5.0, "after_line": 1}


def test_a_draft_model_has_its_own_markers_and_its_graphs_are_captures(tmp_path: Path) -> None:
    file = parsed(
        written(
            tmp_path,
            at(0, "server_args=ServerArgs(x)"),
            at(1, "Load weight begin."),
            at(2, "Load weight end."),
            at(3, "Load weight begin."),
            at(4, "Load weight end."),
            at(5, "Capture draft decode CUDA graph begin. backend=full"),
        )
    )

    assert file["markers"] == {
        "args": 1,
        "capture_begin": 1,
        "draft_load_begin": 1,
        "draft_load_end": 1,
        "load_begin": 1,
        "load_end": 1,
    }
    assert file["ranks"] == {"TP0": {"phase": "capturing_graphs", "load_progress": 1.0}}


# --- real logs ---------------------------------------------------------------------------------------------


REAL = {
    "vllm-tp2-complete": (123, True, 94, ["TP0", "TP1"], 0),
    "vllm-embedded": (50, False, None, ["TP0", "TP1"], 0),
    "vllm-v1": (229, True, 80, ["TP0"], 0),
    "vllm-v1-stderr": (14, True, 14, ["TP0"], 0),
    "vllm-v4": (208, True, 129, ["TP0", "TP1"], 2),
    "vllm-va": (59, False, None, ["TP0", "TP1"], 0),
    "vllm-vg": (159, True, 159, ["TP0"], 0),
    "vllm-vh": (94, True, 94, ["TP0"], 0),
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_log_is_told_right(name: str) -> None:
    lines, ready, ready_line, ranks, heartbeats = REAL[name]

    file = parsed(LOGS / f"{name}.log")

    assert (file["framework"], file["starts"], file["failed"]) == ("vllm", 1, False)
    assert (file["lines"], file["ready"], file["ready_line"]) == (lines, ready, ready_line)
    assert (list(file["ranks"]), file["heartbeats"]) == (ranks, heartbeats)
    assert file["version"] == (None if name.endswith("stderr") else "0.32.0")
    assert file["lines"] == (LOGS / f"{name}.log").read_bytes().count(b"\n")


def test_real_ranks_are_ready_when_the_server_is() -> None:
    ranks = parsed(LOGS / "vllm-tp2-complete.log")["ranks"]

    assert {name: rank["phase"] for name, rank in ranks.items()} == {"TP0": "ready", "TP1": "ready"}


def test_a_real_stopped_worker_is_still_in_distributed_init() -> None:
    file = parsed(LOGS / "vllm-va.log")

    assert {rank["phase"] for rank in file["ranks"].values()} == {"distributed_init"}


def test_a_real_slow_load_shows_every_shard() -> None:
    file = parsed(LOGS / "vllm-vg.log")

    assert file["markers"]["load_progress"] == 10
    assert file["ranks"]["TP0"]["load_progress"] == 1.0


def test_a_real_exception_while_serving_is_an_error_and_benign_lines_are_none() -> None:
    assert [error["kind"] for error in parsed(LOGS / "vllm-v1.log")["errors"]] == [
        "other",
        "traceback",
        "traceback",
    ]
    assert parsed(LOGS / "vllm-tp2-complete.log")["errors"] == []
