"""The source `logs`: places of servers become readings, events and names of ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.config import Config, Intervals, Limits
from stallwatch.frameworks import load_frameworks
from stallwatch.model import (
    ERROR_KINDS,
    EVENTS,
    Event,
    LogPlace,
    Observation,
    Process,
    ProcessId,
    RankName,
    Reading,
    Scene,
    Server,
)
from stallwatch.sources import Host, Moment
from stallwatch.sources.logs import collector, hits, of_server, past
from stallwatch.sources.logs.collector import ALERT_SECONDS, CATCH_UP_SECONDS, LAST_WORDS_READS, READ_BYTES, Logs
from stallwatch.sources.logs.followed import LONG_REST_TURNS, MUCH_BYTES, REST_TURNS
from stallwatch.sources.logs.lines import Hit, LogScanner
from stallwatch.sources.logs.places import GONE_LOOKS, LOOK_SECONDS

FRAMEWORKS = load_frameworks()
WALL = 1_800_000_000.0


class Node:
    """One server with logs in a folder, and the source that reads them."""

    def __init__(self, folder: Path, limits: Limits | None = None, turn_bytes: int = READ_BYTES) -> None:
        self.folder, self.monotonic = folder, 1000.0
        self.source = Logs(Host(Config(limits=limits or Limits()), FRAMEWORKS), turn_bytes)
        self.server = Server("sglang-30000", "sglang", "server", ProcessId(7, 100), WALL, ())
        self.ready: frozenset[str] = frozenset()
        self.last_readings: list[Reading] = []  # in the last turn

    def write(self, text: str, name: str = "stdout", mode: str = "a", modified: float = WALL) -> Path:
        path = self.folder / name
        with path.open(mode) as file:
            file.write(text)
        os.utime(path, (modified, modified))
        return path

    def place(self, *names: str) -> None:
        self.server = replace(self.server, logs=tuple(self.log_place(name) for name in names))

    def log_place(self, name: str) -> LogPlace:
        path = self.folder / name
        status = path.stat()
        return LogPlace(name, str(path), None, status.st_dev, status.st_ino)

    def read(self, *servers: Server) -> list[Observation]:
        self.monotonic += 1
        scene = Scene(servers or (self.server,), ready=self.ready)
        rests = self.source.rests(scene, self.monotonic)
        seen = list(self.source.read(scene, Moment(self.monotonic, WALL + self.monotonic - 1000)))
        if rests:
            assert seen == self.last_readings  # it need not have been asked
        self.last_readings = [one for one in seen if isinstance(one, Reading)]
        return seen

    def rests(self, *servers: Server) -> bool:
        return self.source.rests(Scene(servers or (self.server,), ready=self.ready), self.monotonic + 1)


def values(seen: list[Observation], name: str) -> dict[tuple[str, ...], float | str | None]:
    return {
        one.labels[1:]: one.reason if one.value is None else one.value
        for one in seen
        if isinstance(one, Reading) and one.signal.name == name
    }


def events(seen: list[Observation]) -> list[Event]:
    return [one for one in seen if isinstance(one, Event)]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.write("[2026-06-02 08:00:00 TP0] Load weight begin.\n")
    node.place("stdout")
    return node


def test_the_history_of_a_log_is_told_as_old_as_its_last_change(node: Node) -> None:
    node.write("", modified=WALL - 300)

    (event,) = events(node.read())

    assert (event.event, event.rank, event.log) == ("load_begin", "TP0", "stdout")
    assert event.at == 1001 - 301
    assert event.dated == WALL - 300


def test_what_comes_later_is_told_as_it_arrives_and_dated_by_what_the_log_prints(node: Node) -> None:
    node.read()

    node.write("[2026-06-02 08:00:10 TP0] Load weight end.\n[2026-06-02 08:00:40] x\n", modified=WALL + 2)
    seen = node.read()

    told = events(seen)[0]
    assert (told.event, told.at, told.dated) == ("load_end", 1002, WALL - 28)
    assert values(seen, "log_last_line_timestamp_seconds") == {("stdout",): WALL + 2}


def test_a_figure_that_is_no_number_costs_no_other_log_its_turn(node: Node) -> None:
    node.write(
        "[2026-06-02 08:30:00 TP0] Decode batch, #running-req: 3, #token: 1, token usage: 0.0, cuda graph: True, "
        "gen throughput (token/s): 1.2.3, #queue-req: 2\n",
        "odd",
    )
    node.place("odd", "stdout")

    told = events(node.read())

    assert [(event.log, event.event) for event in told] == [("odd", "stats"), ("stdout", "load_begin")]
    assert told[0].fields == {"running": 3.0, "waiting": 2.0}


def test_a_line_of_an_absurd_year_has_no_date(node: Node) -> None:
    node.write("[0001-01-01 00:00:00 TP0] Load weight end.\n[9999-12-31 23:59:59 TP0] Memory pool end.\n")

    assert [event.dated for event in events(node.read())] == [None, None, WALL]


def test_counters_over_closed_sets_exist_from_zero(node: Node) -> None:
    seen = node.read()

    (framework,) = [each for each in FRAMEWORKS if each.name == "sglang"]
    named = {pattern.event for pattern in framework.patterns} & set(EVENTS)

    assert values(seen, "log_events_total") == {(event,): float(event == "load_begin") for event in named}
    assert "load_end" in named
    assert "draft_load_end" not in named, "no line of it would be counted"
    assert values(seen, "log_errors_total") == {(kind,): 0.0 for kind in ERROR_KINDS}
    assert values(seen, "log_lines_total") == {("stdout",): 1.0}
    assert values(seen, "log_bytes_total") == {("stdout",): 45.0}
    for name in ("unmatched_lines", "heartbeat_lines", "rotations", "truncations", "read_errors"):
        assert values(seen, f"log_{name}_total") == {("stdout",): 0.0}
    assert values(seen, "log_backlog_bytes") == {("stdout",): 0.0}


def test_rotation_keeps_the_counts_and_flushes_the_last_line(node: Node) -> None:
    node.read()

    path = node.write("[2026-06-02 08:00:10 TP0] Load weight end.")
    path.rename(path.with_suffix(".1"))
    node.write("[2026-06-02 08:00:20 TP0] Memory pool end.\n")
    seen = node.read()

    assert [event.event for event in events(seen)] == ["load_end", "memory_pool"]
    assert values(seen, "log_lines_total") == {("stdout",): 3.0}
    assert values(seen, "log_rotations_total") == {("stdout",): 1.0}


def test_one_file_for_stdout_and_stderr_is_read_once(node: Node) -> None:
    place = node.server.logs[0]
    node.server = replace(node.server, logs=(place, replace(place, name="stderr")))

    seen = node.read()

    assert len(events(seen)) == 1
    assert set(values(seen, "log_lines_total")) == {("stdout",)}


def test_two_files_have_two_clocks(node: Node) -> None:
    node.write("Loading safetensors checkpoint shards:  1% Completed | 1/8 [00:01<?, 1it/s]\n", "stderr")
    node.place("stdout", "stderr")

    seen = node.read()

    assert [(event.log, event.event) for event in events(seen)] == [
        ("stdout", "load_begin"),
        ("stderr", "load_progress"),
    ]


@pytest.mark.parametrize(("reason", "told"), [("absent", {}), ("namespace", {("stdout",): "namespace"})])
def test_a_place_that_is_no_file_is_absent_and_one_that_cannot_be_read_says_why(
    reason: str, told: dict[tuple[str, ...], str], node: Node
) -> None:
    node.server = replace(node.server, logs=(LogPlace("stdout", reason=reason),))

    seen = node.read()

    assert values(seen, "log_bytes_total") == told
    assert values(seen, "log_lines_total") == {}


def test_a_directory_given_as_a_log_is_a_reason_and_no_exception(node: Node) -> None:
    (node.folder / "folder").mkdir()
    node.place("folder")

    seen = node.read()

    assert values(seen, "log_bytes_total") == {("folder",): "not_supported"}
    assert values(seen, "log_read_errors_total") == {("folder",): 1.0}


def test_a_pid_and_its_rank_are_told(node: Node) -> None:
    node.server = replace(node.server, framework="vllm")
    node.write(
        "(Worker pid=4247) INFO 11-29 15:31:08 [p.py:1] world_size=2 rank=1 local_rank=1 distributed_init_method=x\n"
    )

    assert RankName("sglang-30000", 4247, "TP1") in node.read()


def test_what_a_server_owes_is_told_by_rank_and_is_no_reading_of_the_log(node: Node) -> None:
    """What it comes to is worked out in one place, whoever writes such lines."""
    for rank, running in (("DP0 TP0", 3), ("DP1 TP0", 1)):
        node.write(
            f"[2026-06-02 08:30:00 {rank}] Decode batch, #running-req: {running}, #token: 1, token usage: 0.0, "
            "cuda graph: True, gen throughput (token/s): 1.5, #queue-req: 2\n"
        )
    node.server = replace(node.server, metrics_enabled=False)
    seen = node.read()

    stats = [event for event in events(seen) if event.event == "stats"]
    assert [(event.rank, event.fields["running"], event.fields["waiting"]) for event in stats] == [
        ("DP0-TP0", 3.0, 2.0),
        ("DP1-TP0", 1.0, 2.0),
    ]
    assert values(seen, "server_requests_running") == {}


def test_lines_of_iterations_say_what_is_owed(node: Node) -> None:
    """TensorRT-LLM's page counts what is finished."""
    node.server = replace(node.server, framework="trtllm")
    node.write(
        "[12/20/2025-04:30:37] [TRT-LLM] [RANK 0] [I] iter = 4711, global_rank = 0, rank = 0, "
        "num_scheduled_requests: 3, states = {}\n"
    )

    assert [event.fields["running"] for event in events(node.read()) if event.event == "stats"] == [3.0]


def test_an_error_repeated_in_one_turn_is_told_once_and_counted_each_time(node: Node) -> None:
    node.write("torch.OutOfMemoryError: CUDA out of memory.\n" * 50)

    seen = node.read()

    assert [event.fields["kind"] for event in events(seen) if event.event == "error"] == ["oom"]
    assert values(seen, "log_errors_total")[("oom",)] == 50.0


def test_once_the_server_is_ready_no_line_is_novel(node: Node) -> None:
    node.write("a line of a new shape\n")
    assert "novel" in [event.event for event in events(node.read())]

    node.ready = frozenset(("sglang-30000",))
    node.write("and another one of which nobody knows\n")

    assert events(node.read()) == []


RESTS, SHORT_RESTS = int(LONG_REST_TURNS), int(REST_TURNS)
ALERT_TURNS = int(ALERT_SECONDS)
"""Turns of a second each."""
BUSY = "[2026-06-02 08:00:10] x\n" * (MUCH_BYTES // 24 + 1)


def serves(node: Node) -> None:
    """Its server got ready, what it said until then is read, and the next turn reads on."""
    node.ready = frozenset(("sglang-30000",))
    node.read()
    node.monotonic += SHORT_RESTS


def lines_read(node: Node) -> list[float]:
    """Lines of the log as of the next turns, in each of which one is written."""
    counts = []
    for _ in range(RESTS + 1):
        node.write("one\n")
        (count,) = values(node.read(), "log_lines_total").values()
        assert isinstance(count, float)
        counts.append(count)
    return [count - counts[0] for count in counts]


def test_a_busy_log_of_a_server_that_serves_is_read_in_one_turn_of_several(node: Node) -> None:
    """Of 64 such logs most of the cost is to go to each of them, not what is read."""
    serves(node)
    node.write(BUSY)
    node.read()

    assert lines_read(node) == [0.0] * RESTS + [RESTS + 1.0]


@pytest.mark.parametrize("text", ["a line\n", ""], ids=["it says little", "it says nothing"])
def test_any_other_log_of_a_server_that_serves_rests_for_half_as_long(text: str, node: Node) -> None:
    serves(node)
    node.write(text)
    node.read()

    turns = SHORT_RESTS + 1
    assert lines_read(node) == [*[0.0] * SHORT_RESTS, *[float(turns)] * turns, 2.0 * turns]


@pytest.mark.parametrize("text", [BUSY, ""], ids=["busy", "silent"])
def test_a_log_of_a_server_that_starts_is_read_in_every_turn(text: str, node: Node) -> None:
    node.read()
    node.write(text)
    node.read()

    assert lines_read(node) == [float(number) for number in range(RESTS + 1)]


def test_rests_are_counted_in_intervals_also_when_those_are_others_by_now(node: Node) -> None:
    node.ready = frozenset(("sglang-30000",))
    node.source.configure(Config(intervals=Intervals(logs=0.1)))
    node.read()

    assert not node.rests()


@pytest.mark.parametrize(("interval", "looks"), [(1.0, 9), (5.0, 1), (10.0, 0), (60.0, 0)])
def test_where_logs_are_looked_at_seldom_none_rests_for_longer_than_elsewhere(
    interval: float, looks: int, node: Node
) -> None:
    """A busy log that is not read for minutes would look like one that fell silent."""
    node.source.configure(Config(intervals=Intervals(logs=interval)))
    serves(node)
    node.write(BUSY)
    node.read()
    rests = []
    for _ in range(looks + 1):
        node.monotonic += interval - 1
        rests.append(node.rests())
        node.monotonic += 1

    assert rests == [True] * looks + [False]


def test_a_busy_log_is_read_at_once_when_its_folder_changes_and_when_its_server_is_gone(node: Node) -> None:
    """It may be moved, or emptied, this moment; and the last words of a server are wanted."""
    serves(node)
    node.write(BUSY)
    node.read()

    node.write("[2026-06-02 08:00:20] one\n")
    node.source.folder_changed()
    told = values(node.read(), "log_lines_total")[("stdout",)]
    node.write("[2026-06-02 08:00:10 TP0] Scheduler hit an exception: Traceback\n")
    last_words = events(node.read(replace(node.server, name="another", logs=())))

    assert told == 2 + BUSY.count("\n")
    assert [event.event for event in last_words] == ["fatal"]


def test_a_busy_log_is_read_at_once_when_a_process_of_its_server_comes_or_goes(node: Node) -> None:
    """Who dies by an error wrote it before."""
    rank, other = (Process(ProcessId(pid, 100), name) for pid, name in ((8, "TP0"), (9, "TP1")))
    node.server = replace(node.server, processes=(rank, other))
    neighbour = replace(node.server, name="neighbour", logs=())
    node.ready = frozenset(("sglang-30000",))
    node.read(node.server, neighbour)
    node.write(BUSY)
    node.read(node.server, neighbour)
    node.write("[2026-06-02 08:00:10 TP1] Scheduler hit an exception: Traceback\n")

    of_neighbour = events(node.read(node.server, replace(neighbour, processes=(rank,))))
    known_again = events(node.read(replace(node.server, processes=(rank, replace(other))), neighbour))
    node.server = replace(node.server, processes=(rank,))
    of_its_own = events(node.read(node.server, neighbour))
    assert (of_neighbour, known_again) == ([], [])
    assert [(event.event, event.rank) for event in of_its_own] == [("fatal", "TP1")]


def test_a_busy_log_is_read_in_every_turn_for_a_while_behind_the_end_of_a_process(node: Node) -> None:
    """Who waits for it tells of it later."""
    rank, other = (Process(ProcessId(pid, 100), name) for pid, name in ((8, "TP0"), (9, "TP1")))
    node.server = replace(node.server, processes=(rank, other))
    node.ready = frozenset(("sglang-30000",))
    node.read()
    node.server = replace(node.server, processes=(rank,))
    counts = [lines_now(node) for _ in range(ALERT_TURNS + 1 + RESTS)]

    told = [after > before for before, after in pairwise([0.0, *counts])]
    assert told == [True] * (ALERT_TURNS + 1) + [False] * RESTS


def lines_now(node: Node) -> float:
    """Lines of the log as of the next turn, before which many are written."""
    node.write(BUSY)
    (count,) = values(node.read(), "log_lines_total").values()
    assert isinstance(count, float)
    return count


def test_a_turn_without_a_log_to_read_tells_all_again_and_looks_at_nothing(
    resting: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, looks = resting.last_readings, list[str]()
    for name in ("stat", "lstat", "fstat", "pread", "open", "readlink", "scandir"):
        monkeypatch.setattr(os, name, partial(noted_call, looks, getattr(os, name)))

    seen = resting.read()
    assert looks == []
    resting.monotonic += LOOK_SECONDS
    resting.read()

    assert seen == told
    assert looks != []  # files may have come meanwhile


@pytest.fixture
def resting(node: Node) -> Node:
    """A server that is ready, one of whose two processes wrote much, to a file that a pattern finds."""
    processes = tuple(Process(ProcessId(pid, 100), name) for pid, name in ((8, "TP0"), (9, "TP1")))
    node.server = replace(node.server, processes=processes)
    patterned(node, "std*")
    serves(node)
    node.write(BUSY)
    node.read()
    return node


def test_while_every_log_rests_the_source_need_not_be_asked(resting: Node) -> None:
    assert resting.rests()
    resting.monotonic += LOOK_SECONDS - 1
    assert not resting.rests()


def test_files_that_are_named_are_not_looked_for_meanwhile(resting: Node) -> None:
    patterned(resting, "stdout")
    resting.read()

    resting.monotonic += LOOK_SECONDS
    assert resting.rests()
    resting.monotonic += LONG_REST_TURNS
    assert not resting.rests()


def test_what_changes_the_servers_or_a_folder_is_seen_in_the_turn_behind_it(resting: Node) -> None:
    server = resting.server
    other = replace(server, name="other", logs=())
    changed = [
        (replace(server, processes=server.processes[:1]),),
        (server, other),
        (other,),
        (replace(server, logs=()),),
    ]

    assert [resting.rests(*servers) for servers in changed] == [False] * len(changed)
    assert resting.rests(replace(server))
    resting.source.folder_changed()
    assert not resting.rests()


def test_a_server_that_is_not_ready_any_more_is_read_at_once(resting: Node) -> None:
    (lines,) = values([*resting.last_readings], "log_lines_total").values()
    assert isinstance(lines, float)
    resting.write("one more\n")
    assert resting.rests()
    assert values(resting.read(), "log_lines_total") == {("stdout",): lines}
    resting.ready = frozenset()

    assert not resting.rests()
    assert values(resting.read(), "log_lines_total") == {("stdout",): lines + 1}
    assert not resting.rests()


def test_the_logs_of_a_server_that_is_not_ready_never_rest(resting: Node) -> None:
    resting.ready = frozenset()
    resting.monotonic += LONG_REST_TURNS
    resting.read()

    assert not resting.rests()


def noted_call(calls: list[str], function: Callable[..., object], *arguments: object, **named: object) -> object:
    calls.append(function.__name__)
    return function(*arguments, **named)


def test_the_last_words_of_a_server_that_is_gone_are_still_heard(node: Node) -> None:
    other = replace(node.server, name="other", logs=())
    node.read()

    node.write("[2026-06-02 08:00:10] Received sigquit from a child process. It usually means the child failed.\n")
    seen = node.read(other)
    assert [event.event for event in events(seen)] == ["fatal"]

    for _ in range(LAST_WORDS_READS):
        node.read(other)
    node.write("[2026-06-02 08:00:20 TP0] Load weight end.\n")
    assert events(node.read(other)) == []


def test_the_last_words_are_heard_when_no_process_is_left_that_shows_where_the_server_wrote(node: Node) -> None:
    """It is still there in the look in which its last process is missing, and nobody has its streams open."""
    node.read()
    node.write("[2026-06-02 08:00:10 TP0] Scheduler hit an exception: Traceback\n")
    node.server = replace(node.server, processes=(), logs=())

    assert [event.event for event in events(node.read())] == ["fatal"]


def test_a_log_that_a_living_server_has_left_is_closed(node: Node) -> None:
    """The twin: its streams lead nowhere now."""
    node.read()
    node.write("[2026-06-02 08:00:10 TP0] Scheduler hit an exception: Traceback\n")
    rank = Process(ProcessId(7, 100), "TP0", 1, "python3", 0)
    node.server = replace(node.server, processes=(rank,), logs=(LogPlace("stdout", reason="absent"),))

    assert events(node.read()) == []
    assert node.source.again_seconds is None


@pytest.mark.parametrize("reason", ["vanished", "permission", "error", "timeout"])
def test_a_log_whose_place_cannot_be_looked_at_once_counts_its_lines_once(reason: str, node: Node) -> None:
    node.read()
    seen = node.server
    node.server = replace(seen, logs=(LogPlace("stdout", reason=reason),))
    node.write("[2026-06-02 08:00:10 TP0] Load weight end.\n")
    hidden = node.read(), node.read()
    node.server = seen
    found = node.read()

    for turn in hidden:
        assert events(turn) == []
        assert values(turn, "log_bytes_total") == {("stdout",): reason}
        assert values(turn, "log_lines_total") == {}
        assert values(turn, "log_events_total")[("load_begin",)] == 1.0
    assert [event.event for event in events(found)] == ["load_end"]
    assert values(found, "log_lines_total") == {("stdout",): 2.0}
    assert values(found, "log_events_total")[("load_begin",)] == 1.0
    assert values(node.read(), "log_lines_total") == {("stdout",): 2.0}


def test_a_new_start_whose_place_cannot_be_looked_at_has_nothing_of_the_one_before(node: Node) -> None:
    node.read()
    node.server = replace(node.server, root=ProcessId(8, 200), logs=(LogPlace("stdout", reason="permission"),))
    node.write("[2026-06-02 08:00:10 TP0] Load weight end.\n")

    assert events(node.read()) == []


def test_a_restart_that_goes_on_in_the_same_file_does_not_read_it_again(node: Node) -> None:
    node.read()

    node.server = replace(node.server, root=ProcessId(8, 200))
    node.write("[2026-06-02 08:00:30] server_args=ServerArgs(x)\n")
    seen = node.read()

    assert [event.event for event in events(seen)] == ["args"]
    assert values(seen, "log_lines_total") == {("stdout",): 2.0}


def test_a_restart_with_a_new_file_keeps_what_was_counted(node: Node) -> None:
    node.read()

    node.write("[2026-06-02 08:00:30] server_args=ServerArgs(x)\n", "second")
    place = replace(node.log_place("second"), name="stdout")
    node.server = replace(node.server, root=ProcessId(8, 200), logs=(place,))
    seen = node.read()

    assert [event.event for event in events(seen)] == ["args"]
    assert values(seen, "log_lines_total") == {("stdout",): 2.0}
    assert values(seen, "log_events_total")[("load_begin",)] == 1.0


def test_a_server_whose_log_has_another_name_after_each_start_keeps_its_counts_but_not_every_name(node: Node) -> None:
    """Soak: a server that is started a thousand times left a thousand logs behind."""
    starts = of_server.MOST_CLOSED + 20
    for start in range(starts):
        node.write("[2026-06-02 08:00:00 TP0] Load weight begin.\n", f"start-{start}.log")
        node.place(f"start-{start}.log")
        node.server = replace(node.server, root=ProcessId(100 + start, 100 + start))
        seen = node.read()

    assert values(seen, "log_events_total")[("load_begin",)] == starts
    assert len(node.source._servers[node.server.name].before) == of_server.MOST_CLOSED


def test_more_logs_than_the_limit_are_said_to_be_unread(tmp_path: Path) -> None:
    node = Node(tmp_path, Limits(logs=1))
    node.write("x\n", "a")
    node.write("x\n", "b")
    node.place("a", "b")

    assert values(node.read(), "log_bytes_total") == {("a",): 2.0, ("b",): "error"}


def test_a_log_left_out_is_counted_once_for_as_long_as_it_is_left_out(tmp_path: Path) -> None:
    node = Node(tmp_path, Limits(logs=1))
    node.write("x\n", "a")
    node.write("x\n", "b")
    counted = []
    for places in (("a",), ("a", "b"), ("a", "b"), ("b",), ("b", "a")):
        node.place(*places)
        node.read()
        counted.append(node.source.dropped_logs)

    assert counted == [0, 1, 1, 1, 2]


HISTORY = "[2026-06-02 08:00:10] server_args=ServerArgs(x)\n" * 5
COUNTED = ("lines", "unmatched_lines", "heartbeat_lines", "rotations", "truncations", "read_errors", "events", "errors")


def counters(seen: list[Observation]) -> set[str]:
    return {name for name in COUNTED if values(seen, f"log_{name}_total")}


def test_no_counter_of_a_log_is_seen_before_its_whole_history_is_counted(tmp_path: Path) -> None:
    node = Node(tmp_path, turn_bytes=len(HISTORY) // 4)
    node.write(HISTORY)
    node.place("stdout")

    for turn in range(1, 4):
        seen = node.read()
        assert counters(seen) == set()
        assert values(seen, "log_bytes_total") == {("stdout",): "timeout"}
        assert values(seen, "log_backlog_bytes") == {("stdout",): len(HISTORY) - turn * (len(HISTORY) // 4)}
        assert events(seen)
        assert node.source.again_seconds == CATCH_UP_SECONDS

    seen = node.read()
    assert counters(seen) == set(COUNTED)
    assert values(seen, "log_bytes_total") == {("stdout",): float(len(HISTORY))}
    assert values(seen, "log_lines_total") == {("stdout",): 5.0}
    assert values(seen, "log_events_total")[("args",)] == 5.0


def test_a_log_that_grows_later_steps_by_what_is_read_in_each_turn(tmp_path: Path) -> None:
    line = len(HISTORY) // 5
    node = Node(tmp_path, turn_bytes=line)
    node.write(HISTORY[:line])
    node.place("stdout")
    node.read()
    node.write(HISTORY[: 2 * line])

    steps = [node.read() for _ in range(2)]

    assert [values(seen, "log_bytes_total")[("stdout",)] for seen in steps] == [2.0 * line, 3.0 * line]
    assert [values(seen, "log_events_total")[("args",)] for seen in steps] == [2.0, 3.0]


def test_the_history_of_a_log_written_faster_than_read_ends_where_it_ended_on_start(tmp_path: Path) -> None:
    line = len(HISTORY) // 5
    node = Node(tmp_path, turn_bytes=line)
    node.write(HISTORY[: 2 * line])
    node.place("stdout")

    told = []
    for _ in range(4):
        told.append(values(node.read(), "log_bytes_total")[("stdout",)])
        node.write(HISTORY[: 2 * line])

    assert told == ["timeout", 2.0 * line, 3.0 * line, 4.0 * line]


def test_one_log_in_its_history_holds_the_counts_of_the_server_and_not_those_of_its_other_logs(tmp_path: Path) -> None:
    node = Node(tmp_path, turn_bytes=len(HISTORY) // 2 + 1)
    node.write(HISTORY)
    node.write(HISTORY[: len(HISTORY) // 5], "small")
    node.place("small", "stdout")

    first, second = node.read(), node.read()

    assert values(first, "log_lines_total") == {("small",): 1.0}
    assert not values(first, "log_events_total")
    assert not values(first, "log_errors_total")
    assert values(second, "log_events_total")[("args",)] == 6.0


def test_a_log_that_cannot_be_read_holds_no_counts_of_the_server(node: Node) -> None:
    node.server = replace(node.server, logs=(*node.server.logs, LogPlace("gone", str(node.folder / "gone"))))

    assert values(node.read(), "log_events_total")[("load_begin",)] == 1.0


def test_no_text_of_the_log_is_in_what_is_yielded(node: Node) -> None:
    node.write("[2026-06-02 08:00:30] server_args=ServerArgs(api_key='sk-planted')\nsk-planted in a novel line\n")

    assert "sk-planted" not in repr(node.read())


def test_closing_gives_every_descriptor_back(node: Node) -> None:
    before = len(os.listdir("/proc/self/fd"))
    node.read()

    node.source.close()

    assert len(os.listdir("/proc/self/fd")) == before


# --- configured files: patterns ----------------------------------------------------------------------------


def patterned(node: Node, *patterns: str) -> None:
    places = (LogPlace(Path(one).name, str(node.folder / one), owner=os.geteuid()) for one in patterns)
    node.server = replace(node.server, logs=tuple(places))


def look(node: Node) -> list[Observation]:
    node.monotonic += LOOK_SECONDS
    return node.read()


def lines_of(seen: list[Observation]) -> dict[tuple[str, ...], float | str | None]:
    return values(seen, "log_lines_total")


def test_each_file_that_a_pattern_finds_is_a_log_of_its_own_and_nothing_else_is(node: Node) -> None:
    for folder in ("a", "b"):
        (node.folder / folder).mkdir()
        node.write("x\n", f"{folder}/server.log")
    (node.folder / "a" / "folder.log").mkdir()
    (node.folder / "a" / "link.log").symlink_to(node.folder / "stdout")
    os.mkfifo(node.folder / "a" / "pipe.log")
    patterned(node, "?/*.log")

    seen = look(node)

    assert lines_of(seen) == {("server.log",): 1.0, ("server.log-2",): 1.0}
    assert set(values(seen, "log_bytes_total")) == {("server.log",), ("server.log-2",)}


def test_a_pattern_that_finds_nothing_is_unreadable_until_a_file_comes(node: Node) -> None:
    patterned(node, "*.log")

    seen = look(node)
    assert values(seen, "log_bytes_total") == {("*.log",): "vanished"}
    assert lines_of(seen) == {}

    node.write("[2026-06-02 08:00:10 TP0] Load weight end.\n", "new.log")
    seen = look(node)
    assert values(seen, "log_bytes_total") == {("new.log",): 43.0}
    assert [event.event for event in events(seen)] == ["load_end"]


def test_a_file_that_a_pattern_finds_no_more_is_closed_after_its_last_words(node: Node) -> None:
    before = len(os.listdir("/proc/self/fd"))
    path = node.write("x\n", "old.log")
    patterned(node, "*.log")
    look(node)

    with path.open("a") as writer:
        path.unlink()
        writer.write("[2026-06-02 08:00:10 TP0] Load weight end.\n")
    assert [event.event for event in events(look(node))] == ["load_end"]
    for _ in range(GONE_LOOKS):
        seen = look(node)

    assert values(seen, "log_bytes_total") == {("*.log",): "vanished"}
    assert values(seen, "log_events_total")[("load_end",)] == 1.0
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_renamed_within_its_pattern_is_not_read_a_second_time(node: Node) -> None:
    path = node.write("x\n", "server.log")
    patterned(node, "server.log*")
    look(node)

    old = path.rename(node.folder / "server.log.1")
    look(node)
    with old.open("a") as writer:
        writer.write("late\n")
    look(node)
    node.write("new\n", "server.log")
    seen = [look(node) for _ in range(GONE_LOOKS + 1)][-1]

    assert lines_of(seen) == {("server.log",): 3.0}
    assert values(seen, "log_rotations_total") == {("server.log",): 1.0}


def test_a_pattern_finds_no_more_files_than_the_limit_and_says_so(tmp_path: Path) -> None:
    node = Node(tmp_path, Limits(logs=2))
    for number in range(9):
        node.write("x\n", f"{number}.log")
    patterned(node, "*.log")

    assert values(node.read(), "log_bytes_total") == {("0.log",): 2.0, ("1.log",): 2.0, ("2.log",): "error"}


def test_a_limit_that_is_another_by_now_holds_for_patterns_too(tmp_path: Path) -> None:
    node = Node(tmp_path, Limits(logs=2))
    for number in range(4):
        node.write("x\n", f"{number}.log")
    patterned(node, "*.log")
    before = values(node.read(), "log_bytes_total")
    node.source.configure(Config(limits=Limits(logs=3)))
    node.monotonic += LOOK_SECONDS
    after = values(node.read(), "log_bytes_total")

    assert before == {("0.log",): 2.0, ("1.log",): 2.0, ("2.log",): "error"}
    assert after == {("0.log",): 2.0, ("1.log",): 2.0, ("2.log",): 2.0, ("3.log",): "error"}


def test_a_limit_of_lines_that_is_another_by_now_holds_for_logs_that_are_followed(node: Node) -> None:
    node.read()
    waiting = [scanner._tail for scanner in scanners(node)]
    node.source.configure(Config(limits=Limits(line_bytes=300)))
    node.write("x" * 301)
    node.read()

    assert (waiting, [scanner._tail for scanner in scanners(node)]) == ([b""], [b""])  # the line is cut, not kept
    assert lines_of([*node.last_readings]) == {("stdout",): 1.0}
    node.write("y\n")
    assert lines_of(node.read()) == {("stdout",): 2.0}


def test_a_line_within_the_limit_waits_for_its_end(node: Node) -> None:
    node.read()
    node.write("x" * 301)
    node.read()

    assert [scanner._tail for scanner in scanners(node)] == [b"x" * 301]


def scanners(node: Node) -> list[LogScanner]:
    (log,) = node.source._servers[node.server.name].logs.values()
    return [voice.scanner for voice in log.voices.values()]


@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_stands_for_the_files_in_it(end: str, node: Node) -> None:
    (node.folder / "run[1]" / "inner").mkdir(parents=True)
    patterned(node, "run[1]")
    node.server = replace(node.server, logs=(replace(node.server.logs[0], path=str(node.folder / "run[1]") + end),))
    assert values(look(node), "log_bytes_total") == {("run[1]",): "vanished"}

    for name in ("a.log", "b.out", "c.log.gz", "inner/d.log"):
        node.write("x\n", f"run[1]/{name}")
    (node.folder / "run[1]" / "link.log").symlink_to(node.folder / "stdout")
    os.mkfifo(node.folder / "run[1]" / "pipe")

    assert lines_of(look(node)) == {("a.log",): 1.0, ("b.out",): 1.0}


def test_of_a_folder_with_too_many_files_the_newest_are_read(tmp_path: Path) -> None:
    node = Node(tmp_path, Limits(logs=2))
    (tmp_path / "run").mkdir()
    for number in range(5):
        node.write("x\n", f"run/{number}.log", modified=WALL + number)
    patterned(node, "run")

    assert set(lines_of(look(node))) == {("4.log",), ("3.log",)}


def test_a_link_to_a_folder_is_not_followed(node: Node) -> None:
    (node.folder / "run").mkdir()
    node.write("x\n", "run/a.log")
    (node.folder / "link").symlink_to(node.folder / "run")
    patterned(node, "link")

    assert values(look(node), "log_bytes_total") == {("link",): "not_supported"}


def test_packed_files_are_no_text(node: Node) -> None:
    for name in ("a.log", "a.log.1", "a.log.2.gz", "a.log.3.zst"):
        node.write("x\n", name)
    patterned(node, "a.log*")

    assert set(lines_of(look(node))) == {("a.log",), ("a.log.1",)}


def test_a_file_found_twice_is_read_once(node: Node) -> None:
    node.write("x\n", "server.log")
    patterned(node, "server.log", "*.log", "s*")

    seen = look(node)

    assert values(seen, "log_bytes_total") == {("server.log",): 2.0, ("stdout",): 45.0}


def test_a_restart_that_goes_on_in_a_configured_file_does_not_read_it_again(node: Node) -> None:
    node.write("[2026-06-02 08:00:10 TP0] Load weight end.\n", "server.log")
    patterned(node, "server.log")
    node.read()

    node.server = replace(node.server, root=ProcessId(8, 200))

    assert events(node.read()) == []


@pytest.mark.parametrize("pattern", ["link.log", "gone.log"])
def test_a_log_that_could_never_be_read_has_no_counts(pattern: str, node: Node) -> None:
    (node.folder / "link.log").symlink_to(node.folder / "stdout")
    patterned(node, pattern)

    told = {one.signal.name: one.value for one in node.read() if isinstance(one, Reading) and one.signal.scope == "log"}

    assert told == {"log_bytes_total": None, "log_read_errors_total": 1.0}


# --- over a restart of ours -----------------------------------------------------------------------------------


def seal(*parts: object) -> str:
    return str(hash(parts))


def restarted(node: Node, turn_bytes: int = READ_BYTES) -> Node:
    """The next process of ours, which knows how far the one before had told of the logs of `node`."""
    places = {(log, file): (told, mark) for log, file, told, mark in known(node)}
    rows = node.source.past.sums(node.monotonic).get(node.server.name, ())
    positions = {row.position: (row.told, row.mark) for row in rows if row.position}
    after = Node(node.folder, turn_bytes=turn_bytes)
    after.server, after.monotonic, after.source.past.seal = node.server, node.monotonic + 60, seal
    after.source.past.told_before = lambda server, log, file: (
        places.get((log, file)) or positions.get(key_of(server, log, *file))
    )
    if node.source.past.key_of is not None:
        after.source.past.key_of = key_of
        after.source.past.counted_before = lambda server: {
            row.key: row for row in rows if server.root == node.server.root
        }
    return after


def key_of(server: Server, log: str, *file: int) -> str:
    return seal("log", server.name, server.root, log, *file)


def known(node: Node) -> list[tuple[str, tuple[int, int], int, str]]:
    return node.source.past.places(node.monotonic).get(node.server.name, [])


@pytest.fixture
def watched(node: Node) -> Node:
    """A log of which three lines were told."""
    node.source.past.seal = seal
    node.write("[2026-06-02 08:00:10 TP0] Load weight end.\n[2026-06-02 08:00:11 TP1] Load weight end.\n")
    assert len(events(node.read())) == 3
    return node


def test_what_was_told_before_a_restart_is_counted_and_not_told_again(watched: Node) -> None:
    after = restarted(watched)
    seen = after.read()

    assert events(seen) == []
    assert values(seen, "log_lines_total") == {("stdout",): 3.0}
    assert values(seen, "log_events_total")["load_end",] == 2.0


def test_what_was_written_while_we_were_down_is_news(watched: Node) -> None:
    after = restarted(watched)
    watched.write("[2026-06-02 08:00:12 TP2] Load weight end.\n", modified=WALL - 9999)
    (event,) = events(after.read())

    assert (event.event, event.rank, event.at) == ("load_end", "TP2", after.monotonic)


def test_a_line_whose_beginning_was_read_before_is_told_when_it_ends(watched: Node) -> None:
    watched.write("[2026-06-02 08:00:12 TP2] Load wei")
    watched.read()
    after = restarted(watched)
    watched.write("ght end.\n")

    assert [event.rank for event in events(after.read())] == ["TP2"]


def test_a_long_history_is_passed_over_turn_by_turn(watched: Node) -> None:
    after = restarted(watched, turn_bytes=50)
    watched.write("[2026-06-02 08:00:12 TP2] Load weight end.\n")
    turns = [after.read() for _ in range(8)]

    assert [event.rank for seen in turns for event in events(seen)] == ["TP2"]
    assert values(turns[0], "log_bytes_total") == {("stdout",): "timeout"}
    assert values(turns[-1], "log_lines_total") == {("stdout",): 4.0}


def test_a_log_that_was_written_anew_to_the_same_size_is_known_after_a_restart(watched: Node) -> None:
    text = (watched.folder / "stdout").read_text()
    watched.write(text.replace("TP0", "TP7"), mode="w")
    assert events(watched.read())

    assert events(restarted(watched).read()) == []


@pytest.mark.parametrize("how", ["written anew", "shorter", "another file"])
def test_another_log_in_the_place_of_the_old_one_is_told_from_its_beginning(how: str, watched: Node) -> None:
    path, line = watched.folder / "stdout", "[2026-06-02 09:00:00 TP5] Load weight end.\n"
    after = restarted(watched)
    if how == "another file":
        path.rename(path.with_suffix(".1"))
    watched.write(line * (1 if how == "shorter" else 9), mode="w")
    after.place("stdout")

    assert {event.rank for event in events(after.read())} == {"TP5"}


@pytest.fixture
def named(node: Node) -> Node:
    """A log named in the configuration, of which three lines were told."""
    node.source.past.seal = seal
    node.write("[2026-06-02 08:00:10 TP0] Load weight end.\n[2026-06-02 08:00:11 TP1] Load weight end.\n")
    patterned(node, "stdout")
    assert len(events(node.read())) == 3
    return node


def moved_while_away(node: Node) -> Node:
    """Written to once more, moved aside, then another file, moved aside too, and a third at the path."""
    after = restarted(node)
    node.write("[2026-06-02 08:00:12 TP2] Load weight end.\n")
    (node.folder / "stdout").rename(node.folder / "stdout.2")
    node.write("[2026-06-02 08:00:13 TP3] Load weight end.\n", "stdout.1")
    node.write("[2026-06-02 08:00:14 TP4] Load weight end.\n")
    return after


def test_a_log_that_was_moved_aside_while_we_were_down_goes_on_where_it_was(named: Node) -> None:
    after = moved_while_away(named)
    named.write("[2026-06-02 07:00:00 TP7] Load weight end.\n", "stdout.7")  # read and told long ago

    seen = after.read()

    assert [event.rank for event in events(seen)] == ["TP2", "TP3", "TP4"]
    assert lines_of(seen) == {("stdout",): 6.0}
    assert values(seen, "log_events_total")["load_end",] == 5.0
    assert events(after.read()) == []


def test_a_log_that_was_empty_before_it_was_moved_aside_while_we_were_down_is_news_as_a_whole(named: Node) -> None:
    (named.folder / "stdout").rename(named.folder / "stdout.1")
    named.write("")
    named.read()
    named.read()
    after = restarted(named)
    named.write("[2026-06-02 08:00:12 TP2] Load weight end.\n")
    (named.folder / "stdout.1").rename(named.folder / "stdout.2")
    (named.folder / "stdout").rename(named.folder / "stdout.1")
    named.write("[2026-06-02 08:00:13 TP3] Load weight end.\n")

    assert [event.rank for event in events(after.read())] == ["TP2", "TP3"]


@pytest.mark.parametrize("how", ["written anew", "not kept", "never told"])
def test_a_file_that_is_not_known_to_be_the_logs_is_no_part_of_it(how: str, named: Node) -> None:
    after = moved_while_away(named)
    if how == "written anew":  # an inode that is used again
        (named.folder / "stdout.2").write_text("[2026-06-02 07:00:00 TP7] Load weight end.\n" * 9)
    elif how == "not kept":
        after.source.past.seal = None
    else:
        after.source.past.told_before = lambda server, log, file: None

    seen = after.read()

    assert [event.rank for event in events(seen)] == ["TP4"]
    assert lines_of(seen) == {("stdout",): 1.0}


def test_files_that_a_pattern_finds_under_their_new_names_are_read_once(named: Node) -> None:
    after = moved_while_away(named)
    patterned(after, "stdout*")

    seen = after.read()

    assert lines_of(seen) == {("stdout",): 1.0, ("stdout.1",): 1.0, ("stdout.2",): 4.0}


# --- counters over a restart of ours --------------------------------------------------------------------------

COUNTERS = ("log_lines_total", "log_bytes_total", "log_unmatched_lines_total", "log_heartbeat_lines_total")
TIMES = ("log_rotations_total", "log_truncations_total", "log_read_errors_total")
SUMS = ("log_events_total", "log_errors_total")
ONE = "[2026-06-02 08:00:12 TP2] Load weight end.\nno pattern knows this\n"
ANEW = "[2026-06-02 09:00:00 TP5] Load weight end.\n"


def counts(seen: list[Observation]) -> dict[tuple[str, ...], float | str | None]:
    """All counters, however the end of a load is called: that depends on what was loaded before."""
    found = {(name, *labels): one for name in (*COUNTERS, *TIMES, *SUMS) for labels, one in values(seen, name).items()}
    if (draft := found.pop(("log_events_total", "draft_load_end"), None)) is not None:
        found["log_events_total", "load_end"] = float(found["log_events_total", "load_end"] or 0) + float(draft)
    return found


def grown(
    after: dict[tuple[str, ...], float | str | None], before: dict[tuple[str, ...], float | str | None]
) -> object:
    """What each counter grew by, without those that stayed."""
    assert after.keys() == before.keys()
    pairs = {key: (float(after[key] or 0), float(before[key] or 0)) for key in after}
    return {key: now - then for key, (now, then) in pairs.items() if now != then}


@pytest.fixture
def counted(named: Node) -> Node:
    """A log named in the configuration that was rotated once and cut once before our restart."""
    named.source.past.key_of = key_of
    named.write(ONE + "Traceback (most recent call last):\n  x\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    named.read()
    (named.folder / "stdout").rename(named.folder / "stdout.1")
    named.write(ONE * 2)
    named.read()
    named.write(ANEW, mode="w")
    named.read()
    return named


def growth_of(lines: int, text: str, unmatched: int = 0) -> dict[tuple[str, ...], float]:
    of_log = {"log_lines_total": 1 * lines, "log_bytes_total": len(text), "log_unmatched_lines_total": unmatched}
    events_of: dict[tuple[str, ...], float] = {("log_events_total", "load_end"): float(text.count("Load weight end"))}
    return events_of | {(name, "stdout"): float(number) for name, number in of_log.items() if number}


def test_after_rotation_and_cut_every_counter_is_where_it_was_before_our_restart(counted: Node) -> None:
    before = counts(counted.read())
    after = restarted(counted)

    seen = after.read()
    assert grown(counts(seen), before) == {}
    assert events(seen) == []
    assert before["log_rotations_total", "stdout"] == before["log_truncations_total", "stdout"] == 1
    assert before["log_lines_total", "stdout"] == 3 + 5 + 4 + 1

    counted.write(ONE)
    assert grown(counts(after.read()), before) == growth_of(2, ONE, unmatched=1)


def test_without_rotation_the_counters_are_those_of_the_file(named: Node) -> None:
    named.source.past.key_of = key_of
    named.read()
    after, without = restarted(named), restarted(named)
    without.source.past.key_of = None
    named.write(ONE)

    assert counts(after.read()) == counts(without.read())


def test_a_state_without_sums_is_read_as_it_was(counted: Node) -> None:
    after = restarted(counted)
    after.source.past.counted_before = lambda server: {}

    assert lines_of(after.read()) == {("stdout",): 1.0}


def test_another_start_of_the_server_begins_its_counters_anew(counted: Node) -> None:
    after = restarted(counted)
    after.server = replace(after.server, root=ProcessId(8, 200))

    assert lines_of(after.read()) == {("stdout",): 1.0}


def test_a_long_file_that_is_read_again_turn_by_turn_shows_no_counter_before_it_is_read(counted: Node) -> None:
    counted.write(ONE * 5)
    before = counts(counted.read())
    after = restarted(counted, turn_bytes=50)

    turns = [counts(after.read()) for _ in range(12)]

    assert turns[0] == {("log_bytes_total", "stdout"): "timeout"}
    assert grown(turns[-1], before) == {}


def cut(node: Node) -> None:
    node.write(ANEW, mode="w")


def cut_and_longer(node: Node) -> None:
    node.write(ANEW * 50, mode="w")


def deleted(node: Node) -> None:
    (node.folder / "stdout").unlink()
    node.write(ANEW)


def moved(node: Node) -> None:
    (node.folder / "stdout").rename(node.folder / "stdout.1")
    node.write(ANEW)


def moved_far(node: Node) -> None:
    """To where nobody finds it."""
    (node.folder / "stdout").rename(node.folder / "x")
    node.write(ANEW)


@pytest.mark.parametrize(
    ("how", "times"),
    [(cut, 1), (cut_and_longer, 50), (deleted, 1), (moved, 1), (moved_far, 1)],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_replaced_a_file_while_we_were_down_is_counted_once_and_nothing_else(
    how: Callable[[Node], None], times: int, counted: Node
) -> None:
    counted.write(ONE * 3)
    before = counts(counted.read())
    after = restarted(counted)
    how(counted)

    seen = after.read()

    assert grown(counts(seen), before) == growth_of(times, ANEW * times)
    assert {event.rank for event in events(seen)} == {"TP5"}


def test_several_rotations_while_we_were_down_are_counted_file_by_file(counted: Node) -> None:
    before = counts(counted.read())
    (counted.folder / "stdout.1").rename(counted.folder / "stdout.3")
    after = moved_while_away(counted)

    written = "".join(f"[2026-06-02 08:00:1{n} TP{n}] Load weight end.\n" for n in (2, 3, 4))
    assert grown(counts(after.read()), before) == growth_of(3, written)


def test_the_same_file_behind_another_number_of_its_device_is_counted_once(counted: Node) -> None:
    before = counts(counted.read())
    after = restarted(counted)
    after.source.past.told_before = lambda server, log, file: None
    counted.write(ONE)

    assert grown(counts(after.read()), before) == growth_of(2, ONE, unmatched=1)


def test_where_it_is_not_known_how_far_a_file_was_read_the_counters_do_not_fall_and_nothing_counts_twice(
    counted: Node,
) -> None:
    before = counts(counted.read())
    after = restarted(counted)
    (row,) = after.source.past.counted_before(counted.server).values()
    after.source.past.told_before = lambda server, log, file: None
    after.source.past.counted_before = lambda server: {row.key: replace(row, position="", told=0, mark="")}

    assert grown(counts(after.read()), before) == {}
    counted.write(ONE)
    assert grown(counts(after.read()), before) == growth_of(2, ONE, unmatched=1)


def test_counters_go_on_over_several_restarts_also_in_the_middle_of_the_file(counted: Node) -> None:
    counted.write(ONE * 5)
    before = counts(counted.read())
    node = counted
    for turns in (1, 2, 1):
        node = restarted(node, turn_bytes=50)
        for _ in range(turns):
            node.read()  # not to the end when we are ended again
        assert known(node) == []
    for _ in range(20):
        seen = node.read()

    assert grown(counts(seen), before) == {}


def test_the_events_of_a_log_that_does_not_come_again_stay_counted(counted: Node) -> None:
    counted.write(ONE, "other")
    counted.place("stdout", "other")
    before = values(counted.read(), "log_events_total")
    after = restarted(counted)
    after.place("stdout")

    assert values(after.read(), "log_events_total") == before
    again = restarted(after)
    again.place("stdout", "other")  # known by its sums
    seen = again.read()
    assert values(seen, "log_events_total") == before
    assert lines_of(seen)["other",] == 2


def test_logs_without_room_leave_their_events(counted: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "MOST_SUMS", 1)
    counted.write(ONE, "other")
    counted.place("stdout", "other")
    before = values(counted.read(), "log_events_total")

    assert len(counted.source.past.sums(counted.monotonic)[counted.server.name]) == 2  # the log, and the rest
    after = restarted(counted)
    after.place("stdout")
    assert values(after.read(), "log_events_total") == before


def noted(node: Node) -> tuple[object, object]:
    return known(node), node.source.past.sums(node.monotonic).get(node.server.name)


def test_how_far_a_log_is_told_stays_known_while_it_is_left_alone_and_is_told_anew_when_it_is_read(
    counted: Node,
) -> None:
    serves(counted)
    counted.write(BUSY)
    counted.read()
    told, seen = noted(counted), list[tuple[object, object]]()
    for _ in range(RESTS):
        counted.write("one\n")
        counted.read()
        seen.append(noted(counted))
    counted.read()

    assert seen == [told] * RESTS
    assert known(counted)[0][2] == (counted.folder / "stdout").stat().st_size
    assert all(one not in (None, told[1]) for one in noted(counted)[1:])


def test_the_last_words_of_a_server_are_noted_too(counted: Node) -> None:
    counted.ready = frozenset(("sglang-30000",))
    counted.write(BUSY)
    for _ in range(3):
        counted.read()
    before = known(counted)[0][2]
    counted.write("one\n")
    counted.read(replace(counted.server, name="another", logs=()))

    assert known(counted)[0][2] == before + len("one\n")


def test_how_far_the_logs_are_told_is_known_for_the_turn_that_was_taken(watched: Node) -> None:
    first, taken = known(watched), watched.monotonic
    watched.write("[2026-06-02 08:00:12 TP2] Load weight end.\n")
    watched.read()

    assert known(watched)[0][2] > first[0][2]
    assert watched.source.past.places(taken)[watched.server.name] == first
    assert watched.source.past.places(taken - 100) == {}


def test_a_process_that_keeps_no_state_marks_nothing(node: Node) -> None:
    node.read()

    assert known(node) == []


def test_who_is_which_rank_is_told_again_from_what_was_told_before(node: Node) -> None:
    node.server, node.source.past.seal = replace(node.server, framework="vllm"), seal
    node.write(
        "(Worker pid=4247) INFO 11-29 15:31:08 [p.py:1] world_size=2 rank=1 local_rank=1 distributed_init_method=x\n"
    )
    node.read()

    seen = restarted(node).read()
    assert [one for one in seen if isinstance(one, RankName)] == [RankName("sglang-30000", 4247, "TP1")]
    assert events(seen) == []


@pytest.mark.parametrize(("name", "is_named"), [("worker-ab12-01000000-{}.out", True), ("worker-{}.out", False)])
def test_the_file_of_a_worker_of_ray_says_whose_lines_are_in_it(name: str, is_named: bool, node: Node) -> None:
    """Ray puts no mark in front of a line there: the PID is in the file's name."""
    for rank in (0, 1):
        node.write(
            f":actor_name:RayWorkerWrapper\n"
            f"INFO 11-02 08:14:20 [p.py:1] world_size=2 rank={rank} local_rank={rank} distributed_init_method=x\n"
            f"INFO 11-02 08:14:31 [m.py:1] Starting to load model m...\n",
            name.format(60 + rank),
        )
    node.server = replace(node.server, framework="vllm")
    patterned(node, "worker-*.out")

    seen = node.read()

    named = {one.pid: one.rank for one in seen if isinstance(one, RankName)}
    assert named == ({60: "TP0", 61: "TP1"} if is_named else {})
    ranks = [event.rank for event in events(seen) if event.event == "load_begin"]
    assert ranks == (["TP0", "TP1"] if is_named else [None, None])


def test_files_below_a_linked_folder_are_found_and_a_link_among_them_is_not(node: Node) -> None:
    """As Ray lays them out: session_latest is a link to the folder of the newest session."""
    folder = node.folder / "session_2026" / "logs"
    folder.mkdir(parents=True)
    (node.folder / "session_latest").symlink_to("session_2026")
    for name in ("worker-aa-01000000-60.out", "worker-bb-01000000-61.out"):
        (folder / name).write_text("[2026-06-02 08:00:00 TP0] Load weight begin.\n")
    (folder / "worker-cc-01000000-62.out").symlink_to(node.folder / "stdout")
    patterned(node, "session_latest/logs/worker-*.out")

    seen = node.read()

    assert set(values(seen, "log_lines_total")) == {("worker-aa-01000000-60.out",), ("worker-bb-01000000-61.out",)}
    assert len(events(seen)) == 2


# --- a turn that reads much --------------------------------------------------------------------------------------


HITS = st.builds(
    Hit,
    st.sampled_from(["load_progress", "novel", "error", "waiting", "stats"]),
    st.sampled_from(["TP0", "TP1", None]),
    st.sampled_from([{}, {"kind": "oom"}, {"kind": "nccl"}]),
    st.integers(1, 9),
    st.none(),
)


@given(st.lists(HITS, max_size=40), st.lists(HITS, max_size=40))
def test_what_is_dropped_of_a_turn_that_goes_on_would_not_be_told(first: list[Hit], then: list[Hit]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hits, "MOST_EVENTS", 3)
        kept = hits.bounded(first)

        assert hits.told_of([*kept, *then]) == hits.told_of([*first, *then])
        assert len(kept) <= 2 * 3


def test_of_very_many_events_the_last_are_told_and_all_are_counted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "MOST_EVENTS", 5)
    monkeypatch.setattr(collector, "MOST_KEPT", 20)
    bars = [f"Loading safetensors checkpoint shards:  1% Completed | {k}/9000 [00:01<?, 1it/s]\n" for k in range(9000)]
    node.write("".join(bars))

    seen = node.read()

    assert [event.fields["done"] for event in events(seen)] == [8995.0, 8996.0, 8997.0, 8998.0, 8999.0]
    counted = [one for one in seen if isinstance(one, Reading) and one.labels[1:] == ("load_progress",)]
    assert [one.value for one in counted] == [9000.0]


FATAL = "[2026-06-02 08:00:10 TP0] Scheduler hit an exception: Traceback\n"


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("is_copied", [True, False])
def test_a_fatal_line_that_a_busy_log_got_just_before_it_was_copied_and_emptied_is_told(
    is_copied: bool, is_named: bool, node: Node
) -> None:
    """The log rested, and its folder is not watched here: what was written meanwhile stands in the copy only."""
    path = node.folder / "stdout"
    with path.open("a") as writer:
        place = node.log_place("stdout")
        stream = replace(place, path=f"/proc/self/fd/{writer.fileno()}")
        node.server = replace(node.server, logs=(replace(place, owner=os.geteuid()) if is_named else stream,))
        serves(node)
        node.write(BUSY)
        node.read()
        node.write(FATAL)
        if is_copied:
            shutil.copy2(path, node.folder / "stdout.1")
        node.write("[2026-06-02 08:00:11 TP0] Load weight end.\n", mode="w")

        turns = [node.read() for _ in range(RESTS + 1)]

    assert all(not events(seen) for seen in turns[:-1])
    assert [event.event for event in events(turns[-1])] == ["fatal"] * is_copied + ["load_end"]
    assert values(turns[-1], "log_lines_total") == {("stdout",): 2.0 + BUSY.count("\n") + is_copied}
    assert values(turns[-1], "log_truncations_total") == {("stdout",): 1.0}
