"""Whole files told: the rules for `parse` of the contract, on hand-made logs and on those of real servers."""

from __future__ import annotations

import io
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.frameworks import load_frameworks
from stallwatch.parse.input import BLOCK_BYTES, LONGEST_LINE_BYTES
from stallwatch.parse.report import MAX_ERRORS, format_text, parse_files

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


# --- what a rank proves --------------------------------------------------------------------------------------

ARGS = at(0, "server_args=ServerArgs(model_path='/m', tp_size=2)")


@pytest.mark.parametrize(
    ("lines", "rank", "phase", "progress"),
    [
        ([at(1, "Load weight begin. avail mem=1 GB", "TP1")], "TP1", "loading_weights", None),
        ([at(1, "Load weight end. elapsed=1 s, type=X", "TP1")], "TP1", "post_load", 1.0),
        (
            [at(1, "Load weight end. elapsed=1 s, type=X", "TP1"), at(2, "Memory pool end. avail mem=1 GB", "TP1")],
            "TP1",
            "memory_pool",
            1.0,
        ),
        (["Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03, 1.0s/it]"], "TP0", "", 0.25),
        (
            [
                at(1, "Load weight end. elapsed=1 s, type=X", "TP0"),
                "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03, 1.0s/it]",
            ],
            "TP0",
            "",
            1.0,
        ),
    ],
)
def test_a_rank_is_in_the_phase_it_proved_last(
    lines: list[str], rank: str, phase: str, progress: float | None, tmp_path: Path
) -> None:
    told = parsed(written(tmp_path, ARGS, *lines))["ranks"][rank]

    assert told["phase"] == phase or not phase
    assert told["load_progress"] == progress


def test_a_bar_without_a_rank_is_the_first_ranks_and_no_other(tmp_path: Path) -> None:
    bar = "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03, 1.0s/it]"
    begins = [at(1, "Load weight begin. avail mem=1 GB", f"TP{rank}") for rank in (1, 0)]

    ranks = parsed(written(tmp_path, ARGS, *begins, bar))["ranks"]

    assert {name: rank["load_progress"] for name, rank in ranks.items()} == {"TP0": 0.25, "TP1": None}


def test_all_ranks_are_ready_once_the_server_is(tmp_path: Path) -> None:
    ready = at(900, "The server is fired up and ready to roll!")
    not_yet = parsed(written(tmp_path, *DEADLOCK))["ranks"]
    ranks = parsed(written(tmp_path, *DEADLOCK, ready))["ranks"]

    assert {rank["phase"] for rank in ranks.values()} == {"ready"}
    assert {rank["phase"] for rank in not_yet.values()} == {"post_load"}


def test_a_follower_never_proves_that_the_server_is_ready(tmp_path: Path) -> None:
    """It serves a health endpoint of its own, which answers at once."""
    follower = [
        at(0, "server_args=ServerArgs(model_path='/m', tp_size=16, nnodes=2, node_rank=1)"),
        *(at(20 + rank, "Load weight end. elapsed=2 s, type=X", f"TP{8 + rank}") for rank in range(8)),
        "INFO:     Started server process [1]",
        "INFO:     Waiting for application startup.",
        "INFO:     Application startup complete.",
        at(40, "INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)"),
        at(50, 'INFO:     10.0.0.9:4242 - "GET /health HTTP/1.1" 200 OK'),
    ]

    file = parsed(written(tmp_path, *follower))

    assert (file["ready"], file["ready_line"]) == (False, None)
    assert {rank["phase"] for rank in file["ranks"].values()} == {"post_load"}


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ("TP3", "TP3"),
        ("DP0 TP1", "DP0-TP1"),
        ("DP0 PP1 TP3", "DP0-PP1-TP3"),
        ("PP1 TP0", "PP1-TP0"),
        ("DP3", "DP3"),
        ("DP1 TP2 EP2", "DP1-TP2"),
        ("", "TP0"),
    ],
)
def test_a_rank_has_the_parts_that_are_printed(parts: str, name: str, tmp_path: Path) -> None:
    line = at(1, "Load weight begin. avail mem=1 GB", parts)

    assert list(parsed(written(tmp_path, ARGS, line))["ranks"]) == [name]


def test_what_names_no_rank_is_the_first_ones_whatever_its_name(tmp_path: Path) -> None:
    """An engine tells of the KV cache for all its stages: that makes no rank TP0 beside them."""
    begins = [at(1, "Load weight begin. avail mem=1 GB", f"PP{stage}") for stage in (1, 0)]
    bar = "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03, 1.0s/it]"

    file = parsed(written(tmp_path, ARGS, bar, *begins, bar.replace("1/4", "2/4")))

    assert {name: rank["load_progress"] for name, rank in file["ranks"].items()} == {"PP0": 0.5, "PP1": None}
    assert {phase["rank"] for phase in file["phases"]} == {None, "PP0", "PP1"}


def test_ranks_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    lines = [at(1, "Load weight begin. avail mem=1 GB", f"PP{pp} TP{tp}") for pp in (1, 0) for tp in (10, 2)]

    assert list(parsed(written(tmp_path, ARGS, *lines))["ranks"]) == ["PP0-TP2", "PP0-TP10", "PP1-TP2", "PP1-TP10"]


# --- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kind", "rank"),
    [
        (
            "[rank3]:[E602 08:00:01.1 ProcessGroupNCCL.cpp:6] [Rank 3] Watchdog caught collective operation timeout",
            "timeout",
            "TP3",
        ),
        ("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /x", "timeout", None),
        (
            "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4242",
            "rank_died",
            None,
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "oom", None),
        ("Traceback (most recent call last):", "traceback", None),
    ],
)
def test_an_error_has_its_kind_its_line_and_its_rank(line: str, kind: str, rank: str | None, tmp_path: Path) -> None:
    file = parsed(written(tmp_path, ARGS, line, at(9, "x")), "sglang")

    assert file["errors"] == [{"kind": kind, "line": 2, "rank": rank}]
    assert f"    line 2: {kind}" in format_text({"files": [file]})


@pytest.mark.parametrize(
    "line",
    [
        at(1, "Ignore import error when loading sglang.srt.models.x: No module named 'y'"),
        at(1, "Auto-detected error-tolerant mode; failed requests are retried, no fatal error"),
        "/usr/lib/python3/x.py:1: FutureWarning: error_bad_lines is deprecated",
        at(1, 'INFO:     10.0.0.9:1 - "POST /v1/completions?x=Traceback HTTP/1.1" 200 OK'),
        at(1, "Receive: obj=GenerateReqInput(text='Traceback (most recent call last): NCCL error, CUDA error: x')"),
    ],
)
def test_a_benign_line_with_words_of_trouble_is_no_error(line: str, tmp_path: Path) -> None:
    file = parsed(written(tmp_path, ARGS, line), "sglang")

    assert (file["errors"], file["error_lines"], file["failed"]) == ([], 0, False)


def test_of_very_many_errors_the_first_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, ARGS, *["Traceback (most recent call last):", "ValueError: x"] * (MAX_ERRORS + 100))

    file = parsed(path, "sglang")

    assert (len(file["errors"]), file["error_lines"]) == (MAX_ERRORS, MAX_ERRORS + 100)
    text = format_text({"files": [file]})
    assert f"{MAX_ERRORS + 100} errors: {MAX_ERRORS} traceback in the first {MAX_ERRORS}" in text
    assert len(text.splitlines()) < 30


def test_many_different_errors_are_shown_from_both_ends(tmp_path: Path) -> None:
    lines = [at(number, "x", "TP1") for number in range(2)]
    for number in range(40):
        lines += ["Traceback (most recent call last):", f"torch.OutOfMemoryError: CUDA out of memory {number}"]

    text = format_text({"files": [parsed(written(tmp_path, ARGS, *lines), "sglang")]})

    assert "80 errors: 40 traceback, 40 oom" in text
    assert "    60 more in between" in text
    assert "    line 4: traceback" in text
    assert "    line 83: oom" in text


# --- silences ------------------------------------------------------------------------------------------------


def test_the_longest_silences_are_told_with_what_stands_beside_them(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        at(0, "server_args=ServerArgs(x)"),
        at(10, "Load weight begin. avail mem=1 GB"),
        "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03, 1.0s/it]",
        "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:03, 1.0s/it]",
        at(250, "Load weight end. elapsed=240 s, type=X"),
        at(310, "No available block found in 60 second. "),
        at(370, "No available block found in 60 second. "),
        at(375, "what is this?"),
    )

    file = parsed(path)

    assert [(gap["seconds"], gap["after_line"], gap["until_line"]) for gap in file["silences"]] == [
        (240.0, 2, 5),
        (60.0, 5, 6),
        (60.0, 6, 7),
        (10.0, 1, 2),
        (5.0, 7, 8),
    ]
    assert [(gap["after_event"], gap["until_event"]) for gap in file["silences"]] == [
        ("load_begin", "load_end"),
        ("load_end", "heartbeat"),
        ("heartbeat", "heartbeat"),
        ("args", "load_begin"),
        ("heartbeat", "novel"),
    ]
    assert file["progress_silences"][0]["undated_lines"] == 2
    assert (
        "4 min 0 s after line 2 (load_begin), until line 5 (load_end); 2 lines without a time between"
        in format_text({"files": [file]})
    )
    assert "2 heartbeats, lines 6 to 7: neither progress nor trouble" in format_text({"files": [file]})


def test_where_the_clock_was_set_back_a_silence_is_still_found(tmp_path: Path) -> None:
    lines = [at(0, "server_args=ServerArgs(x)"), at(1000, "a"), at(1001, "b"), at(5, "c"), at(6, "d")]

    assert parsed(written(tmp_path, *lines))["longest_silence"] == {"seconds": 1000.0, "after_line": 1}


MOMENTS = st.lists(
    st.tuples(st.integers(0, 3 * 86400), st.booleans(), st.sampled_from(["x", "Starting to load model /m..."])),
    min_size=2,
    max_size=10,
)


@given(st.datetimes(datetime(2025, 3, 1), datetime(2026, 1, 20)), MOMENTS)
@settings(deadline=None, max_examples=60)
def test_times_with_and_without_a_year_in_one_log_show_the_same_silences(
    start: datetime, steps: list[tuple[int, bool, str]]
) -> None:
    """A worker of Dynamo prints its engine's lines, without a year, between its own."""
    moment, moments = start.replace(microsecond=0), list[tuple[datetime, bool, str]]()
    for seconds, has_year, text in steps:
        moment += timedelta(seconds=seconds)
        moments.append((moment, has_year, text))
    told = []
    for forms in [{False: False, True: True}, {False: True, True: True}, {False: False, True: False}]:
        lines = [
            f"{moment:%Y-%m-%dT%H:%M:%S}.000000Z  INFO gpu_model_runner.load_model: {text}"
            if forms[has_year]
            else f"(Worker_TP0 pid=7) INFO {moment:%m-%d %H:%M:%S} [gpu_model_runner.py:1] {text}"
            for moment, has_year, text in moments
        ]
        log = "".join(f"{line}\n" for line in lines).encode()
        file = parse_files(["-"], "dynamo-vllm", FRAMEWORKS, io.BufferedReader(io.BytesIO(log)))["files"][0]
        told.append(
            [(gap["seconds"], gap["after_line"]) for gap in file["silences"]]
            + [(phase["seconds"], phase["begin_line"]) for phase in file["phases"] if phase["rank"] is None]
        )

    assert told[0] == told[1] == told[2]


def test_a_silence_of_minutes_between_times_with_and_without_a_year_is_one_of_minutes(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "2025-12-31T23:58:00.000000Z  INFO main.init: Registering model with endpoint types: chat",
        "(Worker_TP0 pid=7) INFO 01-01 00:01:00 [gpu_model_runner.py:1] Starting to load model /m...",
        "2026-01-01T00:11:00.000000Z  INFO main.init: Registering model with endpoint types: chat",
    )

    assert [gap["seconds"] for gap in parsed(path, "dynamo-vllm")["silences"]] == [600.0, 180.0]


def test_lines_that_unknown_words_stand_on_show_progress_ten_times_in_a_row_at_most(tmp_path: Path) -> None:
    words = ["able", "best", "calm", "dare", "echo", "fast", "glad", "hope", "idle", "just", "kind", "last", "more"]
    lines = [ARGS, *(at(10 * number, f"the {word} thing") for number, word in enumerate(words, 1))]

    file = parsed(written(tmp_path, *lines, at(400, "Load weight begin. avail mem=1 GB")))

    assert file["longest_progress_silence"] == {"seconds": 300.0, "after_line": 11}


def test_layers_that_llama_cpp_will_put_on_cards_are_not_loaded_yet(tmp_path: Path) -> None:
    begin = [
        "build: 4000 (a1b2c3d4) with cc (Debian 12) for x86_64-linux-gnu",
        "load_tensors: loading model tensors, this can take a while... (mmap = true)",
        "load_tensors: offloaded 33/33 layers to GPU",
    ]
    end = ["." * 100, "srv          init: initializing slots, n_slots = 1"]

    loading = [parsed(written(tmp_path, *begin, *dots))["ranks"]["TP0"] for dots in ([], ["." * 42], end)]

    assert loading == [
        {"phase": "loading_weights", "load_progress": None},
        {"phase": "loading_weights", "load_progress": 0.42},
        {"phase": "post_load", "load_progress": 1.0},
    ]


def test_shards_brought_into_the_page_cache_are_progress_and_no_part_of_the_load(tmp_path: Path) -> None:
    fetch = [at(20 + k, f"Rank 1: prefetching {k}/4 checkpoint shards into page cache", "TP1") for k in range(1, 5)]

    file = parsed(written(tmp_path, at(0, "server_args=ServerArgs(x)"), at(10, "Load weight begin.", "TP1"), *fetch))

    assert file["ranks"]["TP1"] == {"phase": "loading_weights", "load_progress": None}
    assert file["last_progress"] == {"line": 6, "event": "download_progress", "rank": "TP1"}


# --- real logs ---------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What must be told of a real log.  `ranks`: name -> phase; `after`: the line before the longest silence."""

    lines: int
    ranks: dict[str, str]
    phase: str
    after: int | None
    ready: int | None = None
    failed: int | None = None
    stopped: int | None = None
    errors: dict[str, int] = {}  # noqa: RUF012  # never changed
    heartbeats: int = 0
    starts: int = 1
    framework: str = "vllm"
    version: str | None = "0.32.0"
    is_certain: bool = True


ONE, TWO = {"TP0": "ready"}, {"TP0": "ready", "TP1": "ready"}
JOINING = {"TP0": "distributed_init", "TP1": "distributed_init"}
LOADING = {"TP0": "loading_weights", "TP1": "loading_weights"}
LOADED = {"TP0": "post_load", "TP1": "loading_weights"}
READING = {"TP0": "loading_weights"}
EMBEDDED = {"TP0": "warming_up", "TP1": "loading_weights"}
RANK_LOST = {"rank_died": 1, "engine_dead": 2, "traceback": 2}
SHARD_CUT = {"rank_died": 3, "engine_dead": 2, "traceback": 5}
NO_MEMORY = {"rank_died": 1, "engine_dead": 2, "traceback": 7, "other": 2}
LOST_LOADING = {"rank_died": 1, "engine_dead": 2, "traceback": 3}
REAL = {
    # served, then ended in an orderly way; TP2 is over two ranks, of which only the first tells of its load
    "vllm-tp1-served": Told(163, ONE, "stopped", 26, ready=101, stopped=107),
    "vllm-tp2-served": Told(176, TWO, "stopped", 28, ready=113, stopped=119),
    "vllm-tp2-complete": Told(123, TWO, "stopped", 98, ready=94, stopped=104),
    # a model in a script of its own: no server, so never ready
    "vllm-embedded": Told(50, EMBEDDED, "stopped", 47, stopped=50),
    # an exception while it served; its stderr alone, where no line has a time
    "vllm-v1": Told(229, ONE, "ready", 79, ready=80, errors={"other": 1, "traceback": 2}),
    "vllm-v1-stderr": Told(14, ONE, "ready", None, ready=14, version=None, is_certain=False),
    # a worker stopped while it served; one stopped in the start; a slow load; a cold compile
    "vllm-v4": Told(208, TWO, "ready", 206, ready=129, heartbeats=2),
    "vllm-va": Told(59, JOINING, "distributed_init", 39),
    "vllm-vg": Told(159, ONE, "ready", 144, ready=159),
    "vllm-vh": Told(94, ONE, "ready", 76, ready=94),
    # a worker killed while it served; a shard that is cut off; too little memory for the KV cache
    "vllm-worker-killed": Told(194, TWO, "stopped", 28, ready=113, failed=116, stopped=148, errors=RANK_LOST),
    "vllm-broken-shard": Told(395, LOADING, "loading_weights", 28, failed=58, errors=SHARD_CUT),
    "vllm-no-memory": Told(239, LOADED, "post_load", 28, failed=77, errors=NO_MEMORY),
    # ended before it had an engine: a context that is too long, sleep mode without a GPU, a port that is taken
    "vllm-wrong-argument": Told(55, {}, "spawned", 10, errors={"traceback": 1}),
    "vllm-sleep-mode": Told(53, {}, "spawned", 2, errors={"traceback": 1}),
    "vllm-port-taken": Told(38, {}, "spawned", 2, errors={"traceback": 1}),
    # SIGTERM while it loads: this release does not hear it, and becomes ready
    "vllm-term-loading": Told(113, TWO, "ready", 28, ready=113),
    # one that was served and ended, then in the same file one of which a worker was killed while it loads
    "vllm-two-starts": Told(343, LOADED, "post_load", 178, failed=222, errors=LOST_LOADING, starts=2),
    # a flag that does not exist: not one line of a server
    "vllm-usage": Told(5, {}, "", None, starts=0, framework="generic", version=None, is_certain=False),
    # older releases; the first of these draws in colours
    "vllm-0.14.1-served": Told(90, TWO, "stopped", 58, ready=77, stopped=87, version="0.14.1"),
    "vllm-0.20.2-served": Told(162, TWO, "stopped", 58, 86, None, 92, {"traceback": 2}, version="0.20.2"),
    # two stages, whose first rank is not called TP0; two copies, ended while they started; a compile, cold
    "vllm-pp2": Told(169, {"PP0": "ready", "PP1": "ready"}, "stopped", 29, ready=114, stopped=115),
    "vllm-dp2": Told(55, {}, "stopped", 22, stopped=43),
    "vllm-compiled": Told(145, ONE, "ready", 47, ready=101, heartbeats=1),
    # two nodes: the one that serves, and its follower, which never proves that anything is ready
    "vllm-node0": Told(174, ONE, "stopped", 20, ready=102, stopped=119),
    "vllm-node1": Told(45, {"TP1": "post_load"}, "post_load", 18, version=None),
    # llama.cpp: two builds; all it does, then no model, one that is cut off, a port that is taken
    "llamacpp": Told(15, ONE, "ready", 5, ready=8, framework="llamacpp", version=None),
    "llamacpp-served": Told(23, ONE, "stopped", 9, ready=12, stopped=23, framework="llamacpp", version=None),
    "llamacpp-verbose": Told(788, ONE, "stopped", 459, ready=584, stopped=785, framework="llamacpp", version=None),
    "llamacpp-no-model": Told(18, READING, "stopped", 6, None, 18, 17, {"other": 7}, 0, 1, "llamacpp", None),
    "llamacpp-cut-model": Told(16, READING, "stopped", 1, None, 16, 15, {"other": 7}, 0, 1, "llamacpp", None),
    "llamacpp-port-taken": Told(9, {}, "stopped", 1, None, 7, 8, {"other": 2}, 0, 1, "llamacpp", None),
}


def test_every_real_log_has_its_truth() -> None:
    assert sorted(REAL) == sorted(path.stem for path in LOGS.glob("*.log"))


@pytest.mark.parametrize("name", REAL)
def test_a_real_log_is_told_right(name: str) -> None:
    file = parsed(LOGS / f"{name}.log")

    phases = [phase["phase"] for phase in file["phases"] if phase["rank"] is None]
    assert REAL[name] == Told(
        lines=file["lines"],
        ranks={rank: state["phase"] for rank, state in file["ranks"].items()},
        phase=phases[-1] if phases else "",
        after=file["longest_silence"]["after_line"],
        ready=file["ready_line"],
        failed=file["failed_line"],
        stopped=file["stopped_line"],
        errors=dict(Counter(error["kind"] for error in file["errors"])),
        heartbeats=file["heartbeats"],
        starts=file["starts"],
        framework=file["framework"],
        version=file["version"],
        is_certain=file["recognised"],
    )
    assert (file["ready"], file["failed"]) == (bool(file["ready_line"]), bool(file["failed_line"]))
    assert file["warnings"] == []


@pytest.mark.parametrize("name", [name for name in REAL if name.startswith("vllm")])
def test_lines_of_a_real_log_are_where_an_editor_finds_them(name: str) -> None:
    """Counted apart from everything else: what `grep -n` says."""
    lines = (LOGS / f"{name}.log").read_bytes().split(b"\n")
    file = parsed(LOGS / f"{name}.log")

    def found(text: bytes) -> list[int]:
        return [number for number, line in enumerate(lines, 1) if text in line and number >= file["begin_line"]]

    assert file["lines"] == len(lines) - (lines[-1] == b"")
    ready = found(b"Application startup complete.") or found(b'HTTP/1.1" 200')  # the first is on stderr
    assert (file["ready_line"] or 0) == (ready or [0])[0]
    told = [error["line"] for error in file["errors"] if error["kind"] == "traceback"]
    assert set(told) <= set(found(b"Traceback (most recent call last)"))
    assert (file["failed_line"] or 0) in [0, *found(b" ERROR ")]


def test_the_start_before_the_last_is_told_in_short() -> None:
    file = parsed(LOGS / "vllm-two-starts.log")

    assert file["earlier_starts"] == [
        {
            "begin_line": 1,
            "end_line": 166,
            "ready_line": 100,
            "failed_line": None,
            "stopped_line": 103,
            "phase": "stopped",
        }
    ]
    text = format_text({"files": [file]})
    assert "2 starts in this file; what follows is the last one, from line 167" in text
    assert "lines 1 to 166: ready at line 100, shut down at line 103" in text


OUTCOMES = {
    "vllm-tp1-served": "163 lines read; ready at line 101; shut down at line 107",
    "vllm-worker-killed": "194 lines read; failed at line 116 (rank_died on TP1); it was ready at line 113",
    "vllm-port-taken": "38 lines read; not ready: last proved is spawned (line 8: args), then traceback at line 9",
    "vllm-va": "59 lines read; not ready: last proved is distributed_init (line 59: dist_init_begin on TP0)",
    "vllm-usage": "5 lines read; not ready: nothing is proved",
    "llamacpp": "15 lines read; ready at line 8",
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_second_line_of_a_report_is_the_whole_story(name: str) -> None:
    text = format_text({"files": [parsed(LOGS / f"{name}.log")]})

    assert text.splitlines()[1] == f"  {OUTCOMES[name]}"


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
