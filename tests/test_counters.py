"""Progress inside a line: bars, percentages, dots, figures with units; what is drawn again is none."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import yaml

from stallwatch.frameworks import Framework, load_frameworks, quantity
from stallwatch.sources.logs import lines as log_lines
from stallwatch.sources.logs import text as log_text
from stallwatch.sources.logs.lines import Hit, LogScanner
from stallwatch.sources.logs.times import parse_time
from stallwatch.startup import Startup

FRAMEWORKS = {framework.name: framework for framework in load_frameworks()}
FOLDER = Path(__file__).parent / "frameworks"
LONG = 100_000


def scanner(name: str) -> LogScanner:
    return LogScanner(FRAMEWORKS[name], track_shapes=False)


def feed(reader: LogScanner, *texts: str) -> list[Hit]:
    return [hit for text in texts for hit in reader.feed(text.encode()).hits]


def counts(hits: list[Hit]) -> list[tuple[str, object, object]]:
    return [(hit.event, hit.fields.get("done", hit.fields.get("ratio")), hit.fields.get("total")) for hit in hits]


@pytest.mark.parametrize(
    ("text", "figure"),
    [
        ("3", 3.0),
        ("1,024", 1024.0),
        ("12,345,678", 12345678.0),
        ("1.2G", 1.2e9),
        ("530G", 530e9),
        ("496kB", 496e3),
        ("3.5GiB", 3.5 * 1024**3),
        ("7M", 7e6),
    ],
)
def test_figures_are_numbers_whatever_their_separators_and_units(text: str, figure: float) -> None:
    assert quantity(text) == pytest.approx(figure)


@pytest.mark.parametrize("text", [None, "", "1,02", ",1", "1,0245", "G", "1.2.3G", "1Gi2", "\u0663G", "9" * 30])
def test_what_is_no_figure_is_none(text: str | None) -> None:
    assert quantity(text) is None


def bar(done: str, total: str, eta: str = "00:10", name: str = "Fetching 64 files") -> str:
    return f"\r{name}:  12%|█▏        | {done}/{total} [00:01<{eta},  1.00s/it]"


def test_a_counter_moves_when_its_number_rises_not_when_it_is_written_otherwise() -> None:
    hits = feed(scanner("vllm"), bar("999", "2,048"), bar("1,000", "2,048"), bar("1000", "2048"), bar("1,001", "2,048"))

    assert counts(hits) == [("download_progress", k, 2048.0) for k in (999.0, 1000.0, 1001.0)]


def test_another_eta_is_no_progress() -> None:
    hits = feed(scanner("vllm"), *(bar("8", "64", eta) for eta in ("00:10", "00:11", "01:00:00", "?")))

    assert counts(hits) == [("download_progress", 8.0, 64.0)]


def test_two_frozen_bars_drawn_in_turn_are_no_progress() -> None:
    """Files download side by side: each bar is compared with itself."""
    one, two = (bar(k, "3.50G", name=f"model-0000{n}-of-00064.safetensors") for n, k in ((1, "5.07M"), (2, "7.10M")))

    assert len(feed(scanner("sglang"), one, two, one, two, one, two)) == 2


def test_bars_of_many_files_do_not_grow_memory() -> None:
    reader = scanner("sglang")

    feed(reader, *(bar("5.07M", "3.50G", name=f"model-{n:05}-of-99999.safetensors") for n in range(3000)))

    assert len(reader._start.bars) == log_lines.MAX_BARS


def test_a_bar_of_bytes_by_carriage_returns_is_seen_as_soon_as_it_is_drawn() -> None:
    drawn = [
        "\rProcessing Files (3 / 64)      :  12%|█▏        | 63.6G/530G,  512MB/s  ",
        "\rProcessing Files (3 / 64)      :  12%|█▏        | 63.6G/530G,   ???B/s  ",
        "\rProcessing Files (4 / 64)      :  13%|█▎        | 68.9G/530G,  498MB/s  ",
    ]

    assert counts(feed(scanner("vllm"), *drawn)) == [("download_progress", k, 530e9) for k in (63.6e9, 68.9e9)]


def test_what_a_rank_writes_behind_a_bar_of_bytes_is_not_lost() -> None:
    line = drawn = "\rProcessing Files (3 / 64)      :  12%|█▏        | 63.6G/530G,  512MB/s  "
    line += "[2026-06-02 08:14:55 TP3] Load weight begin. avail mem=138.01 GB\n"

    assert [hit.event for hit in feed(scanner("sglang"), line)] == ["download_progress", "load_begin"]
    assert [hit.event for hit in feed(scanner("sglang"), drawn + "\n")] == ["download_progress"]


def test_dots_without_a_line_end_are_hundredths() -> None:
    """llama.cpp draws one for each hundredth of its tensors; the line ends with the load."""
    reader = scanner("llamacpp")
    tensors = "load_tensors: loading model tensors, this can take a while... (mmap = true)\n"

    hits = feed(reader, tensors, "..", "...", "", "." * 93, "\nmain: model loaded\n")

    assert counts(hits) == [
        ("load_begin", None, None),
        ("load_progress", 0.02, None),
        ("load_progress", 0.05, None),
        ("load_progress", 0.98, None),
        ("warmup_end", None, None),
    ]


def test_dots_behind_words_are_no_bar() -> None:
    assert feed(scanner("llamacpp"), "please wait", "...", "......\n") == []


@pytest.mark.parametrize("name", ["sglang", "vllm", "trtllm", "generic"])
def test_an_elapsed_seconds_counter_is_no_progress(name: str) -> None:
    lines = [f"Waiting for the weights, {seconds} s elapsed\n" for seconds in range(5)]

    assert feed(scanner(name), *lines) == []


def test_a_tuner_says_its_progress_and_that_it_ended() -> None:
    tuning = "[AutoTuner]: Tuning flashinfer::moe::gemm1: {}%|##        | {}/22 [00:15<07:51, 42.84s/profile]"
    logger = "2025-12-20 04:21:37,901 - INFO - autotuner.py:256 - flashinfer.jit: [Autotuner]: "
    hits = feed(
        scanner("vllm"),
        logger + "Autotuning process starts ...\n",
        "\r" + tuning.format(0, 0),
        "\r" + tuning.format(0, 0),
        "\r" + tuning.format(5, 1),
        "\n" + logger + "Autotuning process ends\n",
    )

    assert [hit.event for hit in hits] == ["autotune_begin", *["autotune_progress"] * 2, "autotune_end"]


def test_a_kernel_that_is_built_does_not_close_an_open_autotune() -> None:
    hits = feed(scanner("sglang"), "2025-12-20 04:21:27,836 - INFO - flashinfer.jit: Finished loading JIT ops: x\n")

    assert [hit.event for hit in hits] == ["compile_begin"]


@pytest.mark.parametrize(
    ("line", "name", "rank", "shared"),
    [
        (
            "(RayWorkerWrapper pid=8) INFO 11-02 08:14:31 [a.py:1] Model loading took 7.1 GiB and 1.0 seconds",
            "vllm",
            None,
            1,
        ),
        (
            "(Worker_TP1 pid=8) INFO 11-02 08:14:31 [a.py:1] Model loading took 7.1 GiB and 1.0 seconds",
            "vllm",
            "TP1",
            1,
        ),
        ("(Actor pid=8) [2026-06-02 08:22:40 TP3] Load weight end. elapsed=1.0 s", "sglang", "TP3", 1),
        ("[2026-06-02 08:22:40 TP3] Load weight end. elapsed=1.0 s", "sglang", "TP3", None),
    ],
)
def test_lines_that_ray_hands_on_speak_for_no_single_rank(
    line: str, name: str, rank: str | None, shared: int | None
) -> None:
    """Ray folds equal lines of several ranks into one: a rank without such a line is not behind."""
    (hit,) = feed(scanner(name), line + "\n")

    assert (hit.rank, hit.fields.get("shared")) == (rank, shared)


def test_a_worker_of_another_node_names_no_process_of_this_one() -> None:
    world = (
        "INFO 11-02 08:14:31 [p.py:1] world_size=8 rank=3 local_rank=3 distributed_init_method=tcp://x backend=nccl\n"
    )

    away = scanner("vllm").feed(f"(RayWorkerWrapper pid=88, ip=10.0.0.2) {world}".encode())
    here = scanner("vllm").feed(f"(RayWorkerWrapper pid=88) {world}".encode())

    assert (away.names, here.names) == ({}, {88: "TP3"})
    assert [hit.rank for hit in away.hits + here.hits] == ["TP3", "TP3"]


@pytest.mark.parametrize(
    ("text", "seconds_later"),
    [
        ("12/20/2025-04:21:37", "12/20/2025-04:22:37"),
        ("1220 04:21:37.000123", "1220 04:22:37.000123"),
        ("2025-01-01T10:00:00.123456Z", "2025-01-01T10:01:00.123456Z"),
        ("2025-11-02 08:14:31,123", "2025-11-02 08:15:31,123"),
        ("0.21.162.989", "1.21.162.989"),
    ],
)
def test_every_logger_s_time_is_read(text: str, seconds_later: str) -> None:
    earlier, later = parse_time(text), parse_time(seconds_later)

    assert earlier is not None
    assert later is not None
    assert later - earlier == pytest.approx(60.0)


def test_the_stacks_of_a_watchdog_are_no_progress_and_a_new_line_behind_them_is() -> None:
    reader = LogScanner(FRAMEWORKS["sglang"])
    dump = [
        "[2026-06-02 08:24:09 TP4] Pyspy dump for PID 4711:",
        "Process 4711: sglang::scheduler_TP4",
        "Python v3.12.3 (/usr/bin/python3.12)",
        'Thread 4711 (active): "MainThread"',
        "    wait (threading.py:359)",
        'Thread 4790 (idle): "tqdm_monitor"',
        "",
    ]

    said = feed(reader, "\n".join(dump))
    after = feed(reader, "[2026-06-02 08:24:10 TP4] something never said before\n")

    assert [hit.event for hit in said + after] == ["watchdog", "novel"]


# --- no expression may take for ever -----------------------------------------------------------------------

GUARD_SECONDS = 60.0
"""Of CPU, for all expressions of a framework: so far from what they need (below 2) that only an explosion meets it."""


@contextmanager
def guarded(seconds: float = GUARD_SECONDS) -> Iterator[None]:
    """An expression that explodes fails its test instead of hanging it."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("an expression takes for ever")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_the_guard_stops_an_expression_that_explodes() -> None:
    with pytest.raises(TimeoutError), guarded(0.05):
        re.match(r"(?:a+)+$", "a" * 64 + "b")


def endless(line: str, prefix_end: int) -> Iterator[str]:
    """A known line with 100 kB of something at its places."""
    numbers = [match.end() for match in re.finditer(r"\d", line)]
    places = {0, prefix_end, len(line), *numbers[-1:], *numbers[len(numbers) // 2 :][:1], line.find(" ") + 1}
    for place in places:
        for filler in ("9", " ", "a ", "[", "9.", ",9", "█|", "1/2 "):
            yield line[:place] + filler * (LONG // len(filler)) + line[place:]


def one_line_for_each_pattern(framework: Framework) -> Iterator[tuple[str, str]]:
    """Line and message."""
    shown = set()
    for file in (framework.extends or framework.name, framework.name, "common"):
        for entry in yaml.safe_load((FOLDER / f"{file}.yaml").read_text("utf-8"))["lines"]:
            line = entry["line"].replace("\x1b", "")
            prefix, message = framework.split(line)
            pattern = next((one for one in framework.patterns if framework.fits(one, prefix, message)), None)
            if pattern is not None and pattern not in shown:
                shown.add(pattern)
                yield line, message


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_no_expression_of_a_framework_explodes_on_an_endless_line(name: str) -> None:
    framework, tried = FRAMEWORKS[name], 0
    with guarded():
        for line, known in one_line_for_each_pattern(framework):
            for text in endless(line, len(line) - len(known)):
                _, message = framework.split(text)
                for pattern in framework.patterns:
                    if pattern.literal.decode() in line:
                        pattern.regex.match(message)
                        tried += 1
        for title in framework.titles:
            for text in endless("python -m x VLLM::Worker_TP1 text-generation-server serve m", 0):
                title.pattern.match(text)

    assert tried > 1000


@pytest.mark.parametrize(
    "text", ["9" * LONG, "|9" * LONG, "9/9" * LONG, "a" * LONG + "|", "[x]|" + "9," * LONG, "." * LONG]
)
def test_the_search_for_bars_does_not_explode(text: str) -> None:
    with guarded():
        found = log_text.pieces_of(text.encode())

    assert b"".join(found) == text.encode()


V0 = """\
INFO 12-30 12:00:00 api_server.py:1] vLLM API server version 0.6.6
INFO 12-30 12:00:00 api_server.py:2] args: Namespace(model='m', tensor_parallel_size=3)
INFO 12-30 12:00:10 model_runner.py:1] Starting to load model m...
(VllmWorkerProcess pid=91) INFO 12-30 12:00:10 model_runner.py:1] Starting to load model m...
(VllmWorkerProcess pid=92) INFO 12-30 12:00:10 model_runner.py:1] Starting to load model m...
(VllmWorkerProcess pid=91) INFO 12-30 12:00:40 model_runner.py:2] Loading model weights took 15.0 GB
(VllmWorkerProcess pid=92) INFO 12-30 12:00:41 model_runner.py:2] Loading model weights took 15.0 GB
"""


def folded(text: str) -> Startup:
    startup = Startup()
    for number, hit in enumerate(scanner("vllm").feed(text.encode()).hits):
        startup.apply(hit.event, hit.rank, hit.fields, float(number))
    return startup


def test_a_worker_of_v0_that_does_not_say_which_one_it_is_is_not_the_first_rank() -> None:
    waiting = folded(V0)
    loaded = folded(V0 + "INFO 12-30 12:01:00 model_runner.py:2] Loading model weights took 15.0 GB\n")

    assert (waiting.phase, waiting.ranks["TP0"].is_loaded, set(waiting.ranks)) == ("loading_weights", False, {"TP0"})
    assert waiting.last_progress == 6.0  # but somebody moved
    assert (loaded.phase, loaded.ranks["TP0"].is_loaded) == ("post_load", True)


def test_a_worker_of_v0_is_the_rank_that_a_line_with_its_pid_named() -> None:
    assigned = "INFO 12-30 12:00:05 x.py:1] rank 1 in world size 3 is assigned as DP rank 0, PP rank 0, TP rank 1\n"
    lines = V0.splitlines(keepends=True)

    startup = folded("".join([*lines[:2], f"(VllmWorkerProcess pid=91) {assigned}", *lines[2:]]))

    assert {name: rank.is_loaded for name, rank in startup.ranks.items()} == {"TP1": True, "TP0": False}


def test_the_draft_of_one_worker_of_v0_is_not_the_model_of_another() -> None:
    text = "".join(
        f"(VllmWorkerProcess pid={pid}) INFO 05-06 12:00:00 [loader.py:1] Loading weights took 9.10 seconds\n"
        for pid in (91, 92, 91)
    )

    assert [hit.event for hit in scanner("vllm").feed(text.encode()).hits] == ["load_end", "load_end", "draft_load_end"]


def test_what_a_shard_of_tgi_held_back_is_one_traceback() -> None:
    text = """2025-01-01T10:01:43Z ERROR shard-manager: text_generation_launcher: Shard complete standard error output:

Traceback (most recent call last):

  File "/usr/bin/text-generation-server", line 8, in <module>
torch.OutOfMemoryError: CUDA out of memory. rank=0
2025-01-01T10:01:43.223456Z ERROR text_generation_launcher: Shard 0 failed to start
"""
    reader = scanner("tgi")
    reader.feed(text.encode())

    assert dict(reader.errors) == {"traceback": 1, "oom": 1, "rank_died": 1}
    assert dict(reader.events) == {"error": 2, "fatal": 1}
