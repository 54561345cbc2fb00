"""Lines that repeat but for their digits: merely counted, and yet told of as if each had been read."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.frameworks import load_frameworks
from stallwatch.sources.logs import lines as log_lines
from stallwatch.sources.logs import ranks as log_ranks
from stallwatch.sources.logs import repeats as log_repeats
from stallwatch.sources.logs.lines import FIRST_STRETCH, Batch, Hit, LogScanner
from stallwatch.sources.logs.times import parse_time
from stallwatch.startup import Startup

FRAMEWORKS = {framework.name: framework for framework in load_frameworks()}


def line(rank: str, text: str, second: int = 0) -> str:
    return f"[2026-06-02 08:00:{second:02}{rank and ' '}{rank}] {text}"


LINES = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n}.00 GiB.",
    "node1:{n}:77 [{n}] misc/socket.cc:{n} NCCL WARN socketProgress: Connection closed by remote peer",
    "[rank{n}]: Traceback (most recent call last):",
    "[rank{n}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n}.00 GiB. See [rank{n}]: x",
    "node1:{n}:77 [{n}] NCCL INFO Channel 00/0 : {n}[0] -> 1[0] [send] via NET/IB/0",
    line("TP{n}", "No available block found in 60 second."),
    line("TP{n}", "Load weight begin."),
    line("TP{n}", "Load weight end. elapsed={n}2.2 s, type=X, avail mem=57.10 GB", 3),
    line("TP{n}", "Memory pool end. avail mem=2{n}.11 GB", 5),
    line("", "Memory pool end. avail mem=2{n}.11 GB"),
    line("DP{n} TP0", "Scheduler hit an exception: x"),
    line("", 'INFO:     10.0.0.{n}:80 - "GET /health HTTP/1.1" {n}03 Service Unavailable'),
    line("", 'INFO:     10.0.0.{n}:80 - "GET /CUDA%20error HTTP/1.1" {n}03 Service Unavailable'),
    line("TP{n}", "Decode batch, #running-req: {n}, #token: 1, gen throughput (token/s): 1.5, #queue-req: 0"),
    line("", "INFO:     Application startup complete."),
    line("", "The server is fired up and ready to roll!"),
    line("", "server_args=ServerArgs(tp_size={n})"),
    "Loading safetensors checkpoint shards:  1% Completed | {n}/64 [00:01<?, 1it/s]torch.OutOfMemoryError: CUDA out",
    "\rLoading safetensors checkpoint shards:  1% Completed | {n}/64 [00:01<?, 1it/s]",
    "(Worker pid={n}) ERROR 11-29 15:31:08 [a.py:{n}] torch.OutOfMemoryError: CUDA out of memory.",
    "(Worker pid={n}) INFO 11-29 15:31:08 [p.py:1] world_size=2 rank={n} local_rank=1 distributed_init_method=x",
    "(Worker pid={n}) INFO 11-29 15:31:09 [m.py:6] Starting to load model m...",
    "(Worker_TP{n} pid=4) ERROR 11-29 15:31:08 [a.py:1] RuntimeError: CUDA error: an illegal memory access",
    "(EngineCore pid={n}) INFO 05-19 18:59:08 [v.py:7] Using V2 Model Runner",
    "(Worker_TP{n} pid=2) INFO 05-19 18:59:08 [g.py:1] Graph capturing finished in {n} secs, took 1.0 GiB",
    '{{"level":"ERROR","message":"(Worker_TP{n} pid=4) RuntimeError: CUDA error: an illegal memory access"}}',
    "an unknown line {n}",
    "another one {n}",
    "",
]
"""What repeats, what only looks so, what begins and ends starts, and what changes who is which rank."""


def sglang() -> LogScanner:
    return LogScanner(FRAMEWORKS["sglang"], track_shapes=False)


def feed(scanner: LogScanner, *lines: str) -> list[Hit]:
    return scanner.feed("".join(each + "\n" for each in lines).encode()).hits


def events(hits: list[Hit]) -> list[tuple[str, str | None]]:
    return [(hit.event, hit.rank) for hit in hits]


# --- as if each line were read --------------------------------------------------------------------------------


def ends_of_each(hits: list[Hit]) -> list[tuple[object, ...]]:
    """What a block must tell: of trouble the last of each kind and rank, of markers the first and the last."""
    first: dict[tuple[str, str | None, str], int] = {}
    last: dict[tuple[str, str | None, str], int] = {}
    for number, hit in enumerate(hits):
        key = (hit.event, hit.rank, str(hit.fields))
        first.setdefault(key, number)
        last[key] = number
    told = set(last.values()) | {at for (event, *_), at in first.items() if event not in log_repeats.COUNTED}
    return [(hit.event, hit.rank, hit.fields, hit.time, hit.stamp) for at, hit in enumerate(hits) if at in told]


def counted(scanner: LogScanner) -> tuple[object, ...]:
    before = scanner.before_start
    return (
        (scanner.lines, scanner.matched, scanner.heartbeats, scanner.events, scanner.errors),
        (scanner.last_time, scanner.ready, scanner.version),
        (before.lines, before.matched, before.heartbeats, before.events),
    )


class Pair:
    """A scanner and one that knows no repeats, and what the verdict would make of each."""

    def __init__(self, framework: str, ready: bool) -> None:
        self.quick, self.plain = LogScanner(FRAMEWORKS[framework]), LogScanner(FRAMEWORKS[framework])
        self.plain._repeats.learn = lambda *what: None  # type: ignore[method-assign]
        self.startups = Startup(), Startup()
        self.told = 0, 0
        if ready:
            self.quick.be_ready()
            self.plain.be_ready()

    def feed(self, at: float, text: bytes, much: bool) -> None:
        self.quick._repeats_much = much or self.quick._repeats_much
        quick, plain = self.quick.feed(text), self.plain.feed(text)
        for startup, batch in zip(self.startups, (quick, plain), strict=True):
            self.fold(startup, batch, at)
        self.told = self.told[0] + len(quick.hits), self.told[1] + len(plain.hits)

        assert ends_of_each(quick.hits) == ends_of_each(plain.hits)
        assert quick.names == plain.names
        assert counted(self.quick) == counted(self.plain)
        assert self.startups[0] == self.startups[1]

    @staticmethod
    def fold(startup: Startup, batch: Batch, at: float) -> None:
        for hit in batch.hits:
            startup.apply(hit.event, hit.rank, hit.fields, at)


def blocks(text: bytes, cuts: list[int]) -> Iterator[bytes]:
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        yield text[begin:end]


@given(
    st.lists(st.tuples(st.sampled_from(LINES), st.integers(0, 3), st.integers(1, 4)), max_size=40),
    st.lists(st.floats(0, 1), max_size=4),
    st.sampled_from(["sglang", "vllm"]),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_lines_that_repeat_are_counted_and_told_as_if_each_were_read(
    lines: list[tuple[str, int, int]], shares: list[float], name: str, ready: bool, much: bool
) -> None:
    text = b"".join((form.format(n=number) + "\n").encode() * times for form, number, times in lines)
    pair = Pair(name, ready)

    for at, block in enumerate(blocks(text, sorted(int(share * len(text)) for share in shares))):
        pair.feed(float(at), block, much)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_a_long_log_of_everything_is_counted_and_told_as_if_each_line_were_read(name: str) -> None:
    chance, pair = random.Random(1), Pair(name, False)
    rare = [form for form in LINES if "ready to roll" in form or "server_args" in form]
    usual = [form for form in LINES if form not in rare]
    for at in range(30):
        forms = chance.choices([*chance.sample(usual, 5), *rare], [20] * 5 + [0.1] * len(rare), k=200)
        text = "".join(form.format(n=chance.randrange(4)) + "\n" for form in forms)
        pair.feed(float(at), text.encode(), False)

    assert pair.told[0] < pair.told[1]  # else nothing was counted only


def test_a_marker_without_a_rank_is_read_each_time_for_a_rank_may_be_named_meanwhile() -> None:
    """Until a line is TP0's such a marker is ahead of all; then it is TP0's own, and TP2 is ahead."""
    pair = Pair("sglang", False)
    pool = line("", "Memory pool end. avail mem=20.11 GB")
    ends = [line("TP2", f"Load weight end. elapsed={n}.0 s, type=X") for n in range(2)]
    bars = [f"Loading safetensors checkpoint shards:  1% Completed | {k}/64 [00:01<?, 1it/s]" for k in (1, 2)]
    first_rank = "[rank0]: Traceback (most recent call last):"

    pair.feed(0.0, "\n".join(["x", *ends, pool, bars[0], pool, first_rank, bars[1], pool, ""]).encode(), True)

    assert pair.startups[0].phase == "memory_pool"


# --- what is read, what is only counted -----------------------------------------------------------------------


def reads(scanner: LogScanner) -> list[bytes]:
    """The lines that are taken apart from now on."""
    read, read_line = list[bytes](), scanner._read_line

    def spy(block: bytes, line: object, *rest: object) -> bool:
        read.append(block[line.start : line.end])  # type: ignore[attr-defined]
        return read_line(block, line, *rest)  # type: ignore[arg-type]

    scanner._read_line = spy  # type: ignore[method-assign, assignment]
    return read


def test_of_a_flood_of_trouble_no_line_is_read_and_of_markers_one_of_each_rank_in_a_block() -> None:
    scanner = sglang()
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n}.00 GiB."
    flood = [form.format(n=n % 10) for n in range(500) for form in (oom, line("TP{n}", "Memory pool end."))]
    feed(scanner, "x", *flood)
    read = reads(scanner)

    hits = feed(scanner, "x", *flood)

    assert (scanner.errors["oom"], scanner.events["memory_pool"], scanner.matched) == (1000, 1000, 2000)
    assert len(read) == 10
    assert len(hits) == 1 + 2 * 10


@pytest.mark.parametrize(
    "text",
    [
        "Loading safetensors checkpoint shards:  1% Completed | {n}/64 [00:01<?, 1it/s]",  # its figures count
        line("", "server_args=ServerArgs(tp_size={n})"),  # another start
        '{{"level":"ERROR","message":"[2026-06-02 08:00:00 TP{n}] CUDA error: x"}}',  # it may name its writer
        "x" * log_repeats.REPEAT_CHARACTERS + "torch.OutOfMemoryError: CUDA out of memory. {n}",
    ],
)
def test_a_line_whose_digits_say_something_is_read_each_time(text: str) -> None:
    scanner = sglang()
    feed(scanner, "x", *(text.format(n=n) for n in range(10)))

    read = reads(scanner)
    scanner._repeats_much = True
    feed(scanner, "x", *(text.format(n=n) for n in range(10)))

    assert len(scanner._repeats) == 0
    assert all(text.format(n=n).encode() in read for n in range(10)) or "CUDA" in text


def test_a_line_that_repeats_is_read_once_in_a_block_and_its_last_one_told() -> None:
    scanner = sglang()
    lines = [f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n}.00 GiB." for n in range(100, 600)]

    hits = feed(scanner, line("TP0", "x", 1), *lines, line("TP0", "x", 2), *lines)

    assert (scanner.errors["oom"], len(hits)) == (1000, 2)
    assert hits[-1].time == parse_time("2026-06-02 08:00:02")


def test_a_second_load_is_the_draft_models_however_often_it_repeats() -> None:
    scanner = sglang()
    ends = [line(f"TP{rank}", "Load weight end. elapsed=1.0 s, type=X") for rank in (0, 1)]

    feed(scanner, "x", *ends * 3)
    feed(scanner, "x", *ends * 100)

    assert (scanner.events["load_end"], scanner.events["draft_load_end"]) == (2, 2 * 102)


def test_lines_that_repeat_behind_ranks_of_torch_stay_those_of_their_ranks() -> None:
    scanner = LogScanner(FRAMEWORKS["sglang"])
    traceback = [f"[rank{rank}]: Traceback (most recent call last):" for rank in (3, 4, 3, 5)]

    hits = feed(scanner, line("TP0", "x", 1), *traceback, "[rank4]: frame of no file", "last")

    assert events(hits) == [("novel", None), *[("error", f"TP{rank}") for rank in (3, 4, 3, 5)], ("novel", None)]


def test_lines_of_a_process_are_those_of_its_new_rank_as_soon_as_it_has_one() -> None:
    scanner = LogScanner(FRAMEWORKS["vllm"], track_shapes=False)
    load = "(Worker pid=9) INFO 11-29 15:31:09 [m.py:6] Starting to load model m..."
    world = "(Worker pid=9) INFO 11-29 15:31:08 [p.py:1] world_size=2 rank={} local_rank=1 distributed_init_method=x"
    feed(scanner, "x", world.format(0), *[load] * 50)

    hits = feed(scanner, "x", *[load] * 50, world.format(1), *[load] * 50)

    ranks = [hit.rank for hit in hits if hit.event == "load_begin"]
    assert set(ranks[: len(ranks) // 2]) == {"TP0"}
    assert ranks[-1] == "TP1"
    assert scanner.events["load_begin"] == 150


# --- memory and time ------------------------------------------------------------------------------------------


def test_lines_that_repeat_do_not_grow_memory() -> None:
    scanner = sglang()
    letters = random.Random(1)
    for _ in range(3 * log_repeats.MAX_REPEATS):
        feed(
            scanner, "x", "torch.OutOfMemoryError: CUDA out of memory. " + "".join(letters.choices("abcdefghij", k=12))
        )

    assert scanner.errors["oom"] == 3 * log_repeats.MAX_REPEATS
    assert len(scanner._repeats) <= log_repeats.MAX_REPEATS


def test_writers_of_a_line_that_repeats_do_not_grow_memory() -> None:
    scanner = sglang()
    feed(scanner, "x", *(line(f"TP{n}", "No available block found in 60 second.") for n in range(10_000, 13_000)))

    (form,) = scanner._repeats._forms.values()
    assert len(form.known) == log_repeats.MAX_REPEATS
    assert scanner.heartbeats == 3000


def test_ranks_and_processes_without_end_do_not_grow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ranks, "MOST_NAMES", 100)
    monkeypatch.setattr(log_lines, "MAX_PASSED", 100)
    scanner = LogScanner(FRAMEWORKS["vllm"], track_shapes=False)
    load = "(Worker_TP{n} pid={n}) INFO 11-29 15:31:09 [m.py:6] Starting to load model m..."

    feed(scanner, "x", *(load.format(n=n) for n in range(1, 1001)))

    assert scanner.events["load_begin"] == 1000
    assert len(scanner._ranks._names) <= 100
    assert len(scanner._start.passed) == 100


def test_a_block_in_which_every_line_begins_a_start_is_searched_in_short_stretches() -> None:
    """Else each of them would have all that follows it searched again."""
    scanner, searched = sglang(), list[int]()
    find = scanner._lexicon.find_all

    class Lexicon:
        patterns = scanner._lexicon.patterns
        full_candidates = scanner._lexicon.full_candidates

        @staticmethod
        def find_all(block: bytes) -> object:
            searched.append(len(block))
            return find(block)

    scanner._lexicon = Lexicon()  # type: ignore[assignment]
    args = line("", "server_args=ServerArgs(tp_size=2)")

    hits = feed(scanner, *[args] * 3000)

    assert events(hits) == [("args", None)] * 3000
    assert sum(searched[1:]) <= 3000 * (FIRST_STRETCH + len(args) + 1)
