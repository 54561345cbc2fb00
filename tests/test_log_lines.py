"""The scanner: what blocks of bytes mean, however they are cut and whatever is in them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.config import Limits
from stallwatch.frameworks import load_frameworks
from stallwatch.sources.logs import search as log_search
from stallwatch.sources.logs import shapes as log_shapes
from stallwatch.sources.logs.lines import Hit, LogScanner
from stallwatch.sources.logs.times import parse_time, seconds_between

FRAMEWORKS = {framework.name: framework for framework in load_frameworks()}
STEADY = '[2026-06-02 08:30:00] INFO:     10.0.0.7:4711 - "POST /generate HTTP/1.1" 200 OK'
DECODE = (
    "[2026-06-02 08:30:0{n} TP0] Decode batch, #running-req: {n}, #token: 1, token usage: 0.0, "
    "cuda graph: True, gen throughput (token/s): 1.5, #queue-req: 0"
)


def sglang(**options: bool) -> LogScanner:
    return LogScanner(FRAMEWORKS["sglang"], Limits(line_bytes=4096), **options)


def feed(scanner: LogScanner, *lines: str) -> list[Hit]:
    return scanner.feed("".join(line + "\n" for line in lines).encode()).hits


def events(hits: list[Hit]) -> list[tuple[str, str | None]]:
    return [(hit.event, hit.rank) for hit in hits]


def line(rank: str, text: str, second: int = 0) -> str:
    return f"[2026-06-02 08:00:{second:02}{rank and ' '}{rank}] {text}"


# --- bars --------------------------------------------------------------------------------------------------


def test_a_bar_is_seen_as_soon_as_it_is_drawn_and_again_only_when_it_moved() -> None:
    scanner = sglang()

    drawn = [
        scanner.feed(f"\rLoading safetensors checkpoint shards:  1% Completed | {k}/64 [00:0{k}<?, 1it/s]".encode())
        for k in (1, 1, 2)
    ]

    assert [[hit.fields["done"] for hit in batch.hits] for batch in drawn] == [[1.0], [], [2.0]]


def test_a_bar_drawn_with_carriage_returns_is_one_line_and_counts_its_last_value() -> None:
    scanner = sglang(numbered=True)
    bar = "\r".join(f"Capturing batches (bs={k}):  4%|# | {k}/23 [00:01<00:40, 1.85s/it]" for k in range(1, 24))

    hits = feed(scanner, line("TP0", "Capture target decode CUDA graph begin."), bar, "last")

    assert scanner.lines == 3
    assert [hit.fields.get("done") for hit in hits if hit.event == "capture_progress"] == [23.0]
    assert scanner.events["capture_progress"] == 1


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("block", [7, 1 << 10, 1 << 16])
def test_what_carriage_returns_alone_end_is_heard_and_kept_nowhere_and_is_one_line(block: int, is_ready: bool) -> None:
    """As a program writes that never sends a line feed: its lines are drawn over each other."""
    scanner = sglang()
    if is_ready:
        scanner.be_ready()
    text = "".join(line("TP1", f"Load weight begin. avail mem={n}.00 GB\r", n % 60) for n in range(2000)).encode()

    heard = [hit for at in range(0, len(text), block) for hit in scanner.feed(text[at : at + block]).hits]

    assert {hit.rank for hit in heard} == {"TP1"}
    assert heard[0].event == "load_begin"
    assert (scanner.lines, scanner.matched, scanner._tail) == (0, 1, b"")
    assert feed(scanner, "") == []
    assert (scanner.lines, scanner.partial) == (1, False)
    assert events(feed(scanner, line("TP1", "Load weight end. elapsed=4.20 s, type=X"))) == [("load_end", "TP1")]
    assert scanner.lines == 2


def test_a_line_feed_behind_the_carriage_return_ends_each_line() -> None:
    """The silent twin: lines of a terminal, or of Windows."""
    scanner = sglang()
    scanner.feed("".join(line("TP1", "Load weight begin. avail mem=77.00 GB\r\n", n) for n in range(9)).encode())

    assert (scanner.lines, scanner.matched) == (9, 9)


def test_what_another_rank_writes_behind_an_unfinished_bar_is_not_lost() -> None:
    bar = "\rMulti-thread loading shards:  50% Completed | 4/8 [00:27<03:14, 27.86s/it]"

    hits = feed(sglang(track_shapes=False), bar + line("TP3", "Load weight end. elapsed=4.20 s, type=X"))

    assert events(hits) == [("load_progress", None), ("load_end", "TP3")]


def test_a_bar_without_a_name_belongs_to_the_first_rank_seen() -> None:
    scanner = sglang(track_shapes=False)
    feed(scanner, line("DP1 TP1", "Load weight begin."), line("DP0 TP0", "Load weight begin."))

    hits = feed(scanner, "Loading safetensors checkpoint shards:  1% Completed | 1/64 [00:01<?, 1it/s]")

    assert events(hits) == [("load_progress", "DP0-TP0")]


# --- requests must not speak for the server ----------------------------------------------------------------


@pytest.mark.parametrize("ready", [False, True])
def test_an_access_line_that_holds_fatal_words_is_an_access_line(ready: bool) -> None:
    scanner = LogScanner(FRAMEWORKS["vllm"], track_shapes=False)
    if ready:
        scanner.be_ready()

    hits = feed(scanner, 'INFO:     1.2.3.4:5 - "GET /EngineDeadError/CUDA%20error:/OutOfMemoryError HTTP/1.1" 404')

    assert hits == []
    assert dict(scanner.events) == {"access": 1}


def test_an_echoed_prompt_of_several_lines_is_neither_ready_nor_fatal() -> None:
    scanner = LogScanner(FRAMEWORKS["vllm"], track_shapes=False)
    prefix = "(APIServer pid=7) INFO 10-22 09:40:12 [logger.py:41] "

    hits = feed(
        scanner,
        prefix + "Received request cmpl-1: prompt: 'hello",
        prefix + "INFO:     Application startup complete.",
        prefix + "EngineCore encountered a fatal error.",
        prefix + "RuntimeError: Engine core initialization failed. See root cause above.',",
    )

    assert [hit.event for hit in hits if hit.event in ("ready", "listening")] == []


# --- ranks -------------------------------------------------------------------------------------------------


def test_vllm_lines_tie_a_pid_to_a_rank_for_later_lines() -> None:
    scanner = LogScanner(FRAMEWORKS["vllm"], track_shapes=False)
    world = "INFO 11-29 15:31:08 [p.py:1] world_size=2 rank=1 local_rank=1 distributed_init_method=x backend=gloo"

    batch = scanner.feed(f"(Worker pid=4247) {world}\n".encode())
    hits = feed(scanner, "(Worker pid=4247) INFO 11-29 15:31:09 [m.py:6] Starting to load model m...")

    assert batch.names == {4247: "TP1"}
    assert events(hits) == [("load_begin", "TP1")]


def test_a_rank_number_becomes_stage_and_shard_when_the_arguments_say_so() -> None:
    scanner = LogScanner(FRAMEWORKS["vllm"], track_shapes=False)
    args = "non-default args: {'model': 'm', 'tensor_parallel_size': 2, 'pipeline_parallel_size': 2}"
    feed(scanner, f"(APIServer pid=1) INFO 11-29 15:31:00 [u.py:1] {args}")

    hits = feed(
        scanner,
        "(Worker pid=9) INFO 11-29 15:31:08 [p.py:1] world_size=4 rank=3 local_rank=3 distributed_init_method=x",
    )

    assert events(hits) == [("dist_init_begin", "PP1-TP1")]


def test_engines_of_data_parallel_servers_are_ranks_and_others_are_none() -> None:
    def load(args: str) -> str | None:
        scanner = LogScanner(FRAMEWORKS["vllm"], track_shapes=False)
        feed(
            scanner,
            f"(APIServer pid=1) INFO 11-29 15:31:00 [u.py:1] non-default args: {{'model': 'm'{args}}}",
        )
        return feed(scanner, "(EngineCore_DP3 pid=9) INFO 11-29 15:31:08 [m.py:1] Loading weights took 3.20 seconds")[
            0
        ].rank

    assert load(", 'data_parallel_size': 4") == "DP3"
    assert load("") is None


def test_a_second_load_of_the_same_rank_is_the_draft_model() -> None:
    scanner = sglang(track_shapes=False)

    hits = feed(
        scanner,
        line("TP0", "Load weight begin."),
        line("TP1", "Load weight begin."),
        line("TP0", "Load weight end."),
        line("TP0", "Load weight begin."),
        line("TP0", "Load weight end."),
    )

    assert [hit.event for hit in hits] == [
        "load_begin",
        "load_begin",
        "load_end",
        "draft_load_begin",
        "draft_load_end",
    ]


def test_markers_of_the_first_rank_only_are_marked_until_every_rank_speaks() -> None:
    scanner = LogScanner(FRAMEWORKS["vllm"], track_shapes=False)
    end = "INFO 05-19 18:59:08 [g.py:1] Model loading took 70.1 GiB and 120.0 seconds"

    before = feed(scanner, f"(Worker_TP0 pid=2) {end}")
    feed(scanner, "(EngineCore pid=1) INFO 05-19 18:59:08 [v.py:7] Using V2 Model Runner")
    after = feed(scanner, f"(Worker_TP1 pid=3) {end}")

    assert [hit.fields.get("shared") for hit in before + after] == [1.0, None]


# --- starts and ready --------------------------------------------------------------------------------------


def test_after_ready_frequent_lines_are_counted_and_only_the_last_stats_is_told() -> None:
    scanner = sglang()
    feed(scanner, line("", "The server is fired up and ready to roll!"))

    hits = feed(scanner, STEADY, *(DECODE.format(n=n) for n in range(1, 6)), "unknown")

    assert [(hit.event, hit.fields["running"]) for hit in hits] == [("stats", 5.0)]
    assert (scanner.events["stats"], scanner.events["access"]) == (5, 1)
    assert (scanner.lines, scanner.unmatched) == (8, 1)


def test_lines_behind_ready_in_the_same_block_are_read_as_those_of_a_server_that_serves() -> None:
    scanner = sglang()

    hits = feed(scanner, line("", "The server is fired up and ready to roll!"), "a line of a new shape", STEADY)

    assert [hit.event for hit in hits] == ["ready"]
    assert scanner.events["access"] == 1


def test_a_new_start_in_the_same_log_is_read_as_a_start_again() -> None:
    scanner = sglang()
    feed(scanner, line("", "server_args=ServerArgs(x)"), line("", "The server is fired up and ready to roll!"))

    hits = feed(scanner, STEADY, line("", "server_args=ServerArgs(x)", 9), line("TP0", "a new shape"))

    assert [hit.event for hit in hits] == ["args", "novel"]
    assert not scanner.ready
    assert scanner.before_start.lines == 3


def test_the_first_answered_request_behind_listening_proves_that_vllm_is_ready() -> None:
    access = 'INFO:     127.0.0.1:46836 - "GET /health HTTP/1.1" 200 OK'
    listening = "(APIServer pid=1) INFO 11-29 15:31:14 [e.py:1] Starting vLLM server on http://127.0.0.1:9311"

    def proves(*lines: str) -> list[str]:
        return [hit.event for hit in feed(LogScanner(FRAMEWORKS["vllm"], track_shapes=False), *lines)]

    assert proves(listening, access, access) == ["listening", "ready"]
    assert proves(access) == []
    assert proves(listening, access.replace("200", "503")) == ["listening"]


# --- unknown lines -----------------------------------------------------------------------------------------


def test_a_shape_is_novel_once_whatever_numbers_ids_paths_and_quotes_are_in_it() -> None:
    hits = feed(
        sglang(),
        line("TP0", "retry 1 of request 7f3a9b2c-11aa-4bcd-9e8f-0123456789ab from 10.0.0.1:80 at /a/b 'x'"),
        line("TP1", "retry 2 of request 8a3a9b2c-22aa-4bcd-9e8f-0123456789cd from 10.0.0.2:81 at /c 'y z'"),
        line("TP0", "something else"),
    )

    assert [(hit.event, hit.line) for hit in hits] == [("novel", 1), ("novel", 1)]


@pytest.mark.parametrize(
    "text",
    [
        "(Worker pid=1) WARNING 11-29 15:31:08 [v.py:7] a warning",
        "(Worker pid=1) ERROR 11-29 15:31:08 [v.py:7] an error",
        '  File "x.py", line 3, in run',
        "ValueError: no such thing",
        "[rank3]:[I1123 10:00:00.0 ProcessGroup.cpp:1] dump",
        "[W1129 14:50:07.26 utils.cpp:68] Warning: NUMA",
        "Thread 0x00007f (most recent call first):",
        "",
    ],
)
def test_warnings_tracebacks_and_dumps_are_not_novel(text: str) -> None:
    scanner = LogScanner(FRAMEWORKS["vllm"])

    assert feed(scanner, text) == []
    assert scanner._shapes.shapes == set()


def test_a_hundred_thousand_shapes_do_not_grow_memory() -> None:
    scanner = sglang()
    letters = random.Random(1)

    for _ in range(20):
        feed(scanner, *("".join(letters.choices("abcdefghij", k=12)) for _ in range(5000)))

    shapes = scanner._shapes
    assert len(shapes.shapes) <= len(shapes.cheap_shapes) <= log_shapes.MAX_SHAPES + 5000
    assert scanner.lines == 100_000


# --- bytes -------------------------------------------------------------------------------------------------


def test_a_line_longer_than_allowed_is_cut_and_counted_once() -> None:
    scanner = sglang()

    scanner.feed(b"x" * 10_000)
    scanner.feed(b"y" * 10_000 + b"Load weight end\n" + line("TP0", "Load weight end.").encode() + b"\n")

    assert scanner.lines == 2
    assert scanner.events["load_end"] == 1


def test_carriage_return_line_ends_and_colours_change_nothing() -> None:
    plain, coloured = sglang(), sglang()

    expected = events(feed(plain, line("TP0", "Load weight begin.")))
    got = coloured.feed(b"\x1b[32m" + line("TP0", "Load weight begin.").encode() + b"\x1b[0m\r\n")

    assert events(got.hits) == expected
    assert coloured.lines == 1


def test_a_log_that_begins_with_a_hole_is_read() -> None:
    hits = feed(sglang(track_shapes=False), "\0" * 3000 + line("TP0", "Load weight begin."))

    assert events(hits) == [("load_begin", "TP0")]


def test_the_last_line_without_an_end_counts_when_the_file_ends() -> None:
    scanner = sglang(track_shapes=False)
    scanner.feed(line("TP0", "Load weight begin.").encode())

    before, batch = scanner.lines, scanner.finish()

    assert (before, scanner.lines) == (0, 1)
    assert events(batch.hits) == [("load_begin", "TP0")]


LINES = [
    line("", "server_args=ServerArgs(x)"),
    line("TP0", "Load weight begin."),
    line("TP1", "Load weight begin."),
    "Loading safetensors checkpoint shards:  1% Completed | 1/64 [00:01<?, 1it/s]",
    "an unknown line",
    line("TP0", "Load weight end."),
    line("", "The server is fired up and ready to roll!"),
    STEADY,
    DECODE.format(n=3),
    "Traceback (most recent call last):",
    "",
]


@given(st.lists(st.sampled_from(LINES), max_size=30), st.lists(st.integers(1, 200), min_size=1))
def test_counts_do_not_depend_on_how_the_bytes_are_cut(lines: list[str], cuts: list[int]) -> None:
    text = "".join(each + "\n" for each in lines).encode()
    whole, pieces = sglang(), sglang()

    whole.feed(text)
    at = 0
    for number in range(len(text)):
        size = cuts[number % len(cuts)]
        if at >= len(text):
            break
        pieces.feed(text[at : at + size])
        at += size

    for scanner in (whole, pieces):
        scanner.finish()
    assert pieces.lines == whole.lines == len(lines)
    assert (pieces.events, pieces.unmatched, pieces.errors) == (whole.events, whole.unmatched, whole.errors)


@given(st.lists(st.binary(max_size=300), max_size=8), st.sampled_from(sorted(FRAMEWORKS)), st.booleans())
def test_no_bytes_raise(chunks: list[bytes], framework: str, numbered: bool) -> None:
    scanner = LogScanner(FRAMEWORKS[framework], Limits(line_bytes=100), numbered=numbered)

    for chunk in chunks:
        scanner.feed(chunk)
    scanner.finish()

    joined = b"".join(chunks)
    assert scanner.lines == joined.count(b"\n") + (not joined.endswith(b"\n") and joined != b"")


LITERALS = sorted(FRAMEWORKS["sglang"].by_literal)
PIECES = st.sampled_from([*LITERALS, *(literal[:-1] for literal in LITERALS), b"\n", b"\n", b" ", b"\xff"])


@given(st.lists(PIECES, max_size=30), st.integers(0, 3000), st.integers(1, len(LITERALS)))
def test_all_ways_to_search_find_every_literal_where_it_is(pieces: list[bytes], far: int, number: int) -> None:
    """Few and many literals, close together and far apart, one within another and one over another."""
    block, literals = (b"x" * far).join(pieces), LITERALS[:number]

    fast = log_search.literal_finder(literals)(block)

    assert sorted(fast) == sorted(log_search._plain_finder(literals)(block))
    lines = [block.count(b"\n", 0, offset) for _, offset in fast]
    assert lines == sorted(lines)


def test_literals_within_and_over_each_other_are_all_found() -> None:
    literals = [b"ready", b"already", b"read", b"ready to", b"y to roll", b"roll!"]
    block = b"already ready to roll! read\nnothing\nroll!"

    fast = log_search.literal_finder(literals)(block)

    assert sorted(fast) == sorted(log_search._plain_finder(literals)(block))
    assert len(list(fast)) == 10


@given(
    st.lists(st.sampled_from([b"aa", b"aab", b"ab", b"a", b"\n", b"\n\n", b"\r\n", b"\xff", b"x" * 300]), max_size=60)
)
def test_what_is_merely_counted_is_counted_as_bytes_do(pieces: list[bytes]) -> None:
    """Also a literal that overlaps itself, and a block that is no text."""
    block = b"".join(pieces)
    literals = (b"aa", b"aab", b"a", b"abx")

    assert log_search.line_count(block) == block.count(b"\n")
    assert log_search.counter(literals)(block) == [block.count(literal) for literal in literals]


# --- times -------------------------------------------------------------------------------------------------


def test_a_line_without_a_time_takes_the_last_time_before_it() -> None:
    bar = "Loading safetensors checkpoint shards:  1% Completed | 1/64 [00:01<?, 1it/s]"

    hits = feed(sglang(), line("TP0", "Load weight begin.", 7), bar)

    assert hits[1].time == hits[0].time == parse_time("2026-06-02 08:00:07")
    assert hits[1].stamp == ""


@pytest.mark.parametrize(
    ("earlier", "later", "seconds"),
    [
        ("2026-06-02 08:00:00", "2026-06-02 08:01:00.500", 60.5),
        ("12-31 23:59:59", "01-01 00:00:01", 2.0),
        ("2025-12-31T23:59:59", "01-01 00:00:01", 2.0),
        ("12-31 23:59:59", "2026-01-01T00:00:01", 2.0),
        ("2025-02-28 23:59:59", "03-01 00:00:01", 2.0),
        ("02-29 00:00:00", "2025-03-01 00:00:01", 1.0),  # a day that year had not
        ("9999-12-31 00:00:00", "12-31 00:00:01", 1.0),
        ("2025-10-22 09:00:00", "10-22 08:00:00", 0.0),
        ("10-26 02:59:59", "10-26 02:00:00", 0.0),  # a clock set back
    ],
)
def test_printed_times_count_as_differences_only(earlier: str, later: str, seconds: float) -> None:
    first, second = parse_time(earlier), parse_time(later)

    assert first is not None
    assert second is not None
    assert seconds_between(first, second) == pytest.approx(seconds)


def test_a_time_that_is_none_is_none() -> None:
    assert parse_time("2026-13-41 08:00:00") is None
    assert parse_time("soon") is None


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_numbers_too_long_to_be_one_are_no_number(name: str) -> None:
    """int() refuses more than 4,300 digits, and a float of them is infinite: neither may stop the reader."""
    big = "9" * 5000
    lines = (
        f"[2025-11-02 08:14:47 TP{big}] Load weight begin.",
        f"[2025-11-02 08:14:31] server_args=ServerArgs(tp_size={big}, dp_size={big})",
        f"(Worker_TP{big} pid={big}) INFO 11-29 15:31:08 [a.py:1] Starting to load model x...",
        f"(Worker pid=4) INFO 11-29 15:31:08 [a.py:1] world_size={big} rank={big} local_rank=0",
        f"Loading safetensors checkpoint shards: 1% Completed | {big}/{big} [00:00<?, ?it/s]",
    )
    scanner = LogScanner(next(framework for framework in load_frameworks() if framework.name == name))

    hits = scanner.feed("\n".join([*lines, ""]).encode()).hits

    assert scanner.lines == len(lines)
    assert {hit.rank for hit in hits} <= {None, "TP0"}
    assert all(not isinstance(value, float) or value <= 1 for hit in hits for value in hit.fields.values())


def test_an_engine_whose_number_is_too_long_to_be_one_is_no_rank() -> None:
    args = "(APIServer pid=1) INFO 11-29 15:31:00 [u.py:1] non-default args: {'model': 'm', 'data_parallel_size': 4}"
    load = "(EngineCore_DP{} pid=9) INFO 11-29 15:31:08 [m.py:1] Loading weights took 3.20 seconds"
    scanner = LogScanner(FRAMEWORKS["vllm"], track_shapes=False)

    hits = feed(scanner, args, load.format("9" * 5000), load.format("2"))

    assert [hit.rank for hit in hits if hit.event == "load_end"] == [None, "DP2"]
