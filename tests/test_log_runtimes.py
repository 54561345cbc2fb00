"""Logs of containers and units through the source `logs`: streams apart, rotated files, the journal."""

from __future__ import annotations

import gc
import gzip
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from far_mount import FarMount
from stallwatch.model import Event, LogPlace, Observation, ProcessId
from stallwatch.sources.logs import journal
from stallwatch.sources.logs.collector import LAST_WORDS_READS
from stallwatch.sources.logs.earlier import earlier_files, is_runtimes
from stallwatch.sources.logs.followed import FollowedLog
from stallwatch.sources.logs.tail import LogTail
from test_journal import printed, record
from test_log_decode import cri, docker
from test_logs import WALL, Node, key_of, known, restarted, seal, values
from test_logs import events as all_events

ID = "0123456789abcdef" * 4
BEGIN, END = "[2026-06-02 08:00:00 TP0] Load weight begin.", "[2026-06-02 08:00:10 TP0] Load weight end."
POOL = "[2026-06-02 08:00:20 TP0] Memory pool end."


def events(seen: list[Observation]) -> list[Event]:
    """Without lines that are merely new."""
    return [event for event in all_events(seen) if event.event != "novel"]


class Container(Node):
    """A server in a container whose runtime writes `log` in the folder."""

    log = f"{ID}-json.log"

    def __init__(self, folder: Path, turn_bytes: int = 64 << 20) -> None:
        super().__init__(folder, turn_bytes=turn_bytes)
        self.server = replace(self.server, started_at=WALL - 100)

    def wrote(self, *lines: bytes, name: str = "", modified: float = WALL) -> Path:
        path = self.folder / (name or self.log)
        with path.open("ab") as file:
            file.write(b"".join(lines))
        os.utime(path, (modified, modified))
        return path

    def find(self) -> None:
        place = self.log_place(self.log)
        self.server = replace(self.server, logs=(replace(place, name="stdout"),))

    def told(self) -> list[tuple[str, str]]:
        return [(event.event, event.log) for event in events(self.read())]


@pytest.fixture
def container(tmp_path: Path) -> Container:
    made = Container(tmp_path)
    made.wrote(docker(f"{BEGIN}\n"))
    made.find()
    return made


# --- streams -------------------------------------------------------------------------------------------------


def test_stdout_and_stderr_of_one_file_are_two_logs(container: Container) -> None:
    first = (container.folder / container.log).stat().st_size
    other = docker("INFO: 10.0.0.7:1 - GET /health\n", "stdout", 5)
    container.wrote(other)

    seen = container.read()

    assert [(event.event, event.log) for event in events(seen)] == [("load_begin", "stderr")]
    assert values(seen, "log_lines_total") == {("stderr",): 1.0, ("stdout",): 1.0}
    assert values(seen, "log_bytes_total") == {("stderr",): float(first), ("stdout",): float(len(other))}
    stamps = values(seen, "log_last_line_timestamp_seconds")
    assert float(stamps["stdout",] or 0) - float(stamps["stderr",] or 0) == 5.0


def test_one_stream_does_not_wind_the_clock_of_the_other(container: Container) -> None:
    before = values(container.read(), "log_last_line_timestamp_seconds")["stderr",]
    container.wrote(docker("x\n", "stdout", 9))

    after = values(container.read(), "log_last_line_timestamp_seconds")

    assert after == {("stderr",): before, ("stdout",): WALL + container.monotonic - 1000}


def test_silence_counts_from_the_files_change_and_between_its_streams_by_the_runtimes_times(
    container: Container,
) -> None:
    """Whatever the clock of the runtime says: a file that was found is as old as its last change."""
    container.wrote(docker("x\n", "stdout", time="2001-01-01T00:00:00Z"))
    container.wrote(docker("x\n", time="2001-01-01T00:07:00Z"), modified=WALL - 60)

    seen = values(container.read(), "log_last_line_timestamp_seconds")

    assert seen == {("stdout",): WALL - 60 - 420, ("stderr",): WALL - 60}


def test_the_history_is_as_old_as_the_file_and_its_lines_as_the_runtime_says(container: Container) -> None:
    """Also of a stream that was silent while the other one wrote to the same file."""
    container.wrote(docker("x\n", "stdout", 9, time="2026-06-02T08:01:40.5Z"))
    (event,) = events(container.read())

    assert event.dated is not None
    assert container.monotonic - event.at == pytest.approx(WALL + 1 - event.dated)


def test_a_line_in_pieces_is_one_event(container: Container) -> None:
    container.read()
    container.wrote(docker(END[:30]))
    assert container.told() == []
    container.wrote(docker(END[30:] + "\n", "stderr", 1))

    assert container.told() == [("load_end", "stderr")]
    assert values(container.read(), "log_lines_total") == {("stderr",): 3.0}


def test_a_bar_is_seen_before_its_line_ends(container: Container) -> None:
    container.read()
    container.wrote(docker("Loading safetensors checkpoint shards:   7% Completed | 3/46 [00:01<00:20,  2.08it/s]\r"))

    assert container.told() == [("load_progress", "stderr")]


def test_the_last_words_without_an_end_are_heard_once_the_server_is_gone(container: Container) -> None:
    container.read()
    container.wrote(docker("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert container.told() == []

    others = replace(container.server, name="other", logs=())
    seen = [events(container.read(others)) for _ in range(LAST_WORDS_READS)]

    assert [event.event for event in seen[-1]] in (["error"], ["fatal"])
    assert seen[:-1] == [[]] * (LAST_WORDS_READS - 1)


def test_a_configured_file_of_a_runtime_is_read_by_its_streams_too(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.write(cri(BEGIN).decode() + cri(END, "F", "stdout").decode(), "0.log")
    node.write("x\n", "out")
    places = (
        replace(node.log_place("0.log"), inode=0, owner=os.geteuid()),
        replace(node.log_place("out"), name="stdout"),
    )
    node.server = replace(node.server, logs=places)

    seen = node.read()

    assert [(event.event, event.log) for event in events(seen)] == [
        ("load_begin", "stderr"),
        ("load_end", "0.log-stdout"),
    ]
    assert values(seen, "log_lines_total") == {("stderr",): 1.0, ("0.log-stdout",): 1.0, ("stdout",): 1.0}


@pytest.mark.parametrize("text", [f"{BEGIN}\n", '{"log":"Load weight begin."}\n'])
def test_a_file_that_no_runtime_wrote_keeps_its_name(text: str, container: Container) -> None:
    container.write(text, "server.log")
    container.place("server.log")

    assert values(container.read(), "log_lines_total") == {("server.log",): 1.0}


def test_a_configured_path_is_one_of_the_machine_that_is_looked_at(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.source._root = str(tmp_path)
    node.write(f"{BEGIN}\n", "server.log")
    node.server = replace(node.server, logs=(LogPlace("server.log", "/server.log", owner=os.geteuid()),))

    assert [event.event for event in events(node.read())] == ["load_begin"]


# --- rotated files -------------------------------------------------------------------------------------------


def rotate(container: Container, to: str) -> None:
    (container.folder / container.log).rename(container.folder / to)


@pytest.mark.parametrize("at", ["whole line", "piece", "half a line"])
def test_a_line_goes_on_in_the_file_that_follows(at: str, container: Container) -> None:
    container.read()
    container.wrote(*{"whole line": (docker(f"{END}\n"),), "piece": (docker(END[:30]),), "half a line": ()}[at])
    container.read()
    rotate(container, f"{container.log}.1")
    container.wrote(*{"whole line": (), "piece": (docker(END[30:] + "\n"),), "half a line": (docker(f"{END}\n"),)}[at])
    container.wrote(docker(f"{POOL}\n"))
    container.find()
    seen = container.read()

    told = values(seen, "log_events_total")
    assert (told["load_begin",], told["load_end",], told["memory_pool",]) == (1.0, 1.0, 1.0)
    assert values(seen, "log_rotations_total") == {("stderr",): 1.0}


def test_what_was_moved_aside_before_we_came_is_read_first(tmp_path: Path) -> None:
    container = Container(tmp_path)
    with gzip.open(tmp_path / f"{container.log}.2.gz", "wb") as file:
        file.write(docker(f"{BEGIN}\n"))
    os.utime(tmp_path / f"{container.log}.2.gz", (WALL, WALL))
    container.wrote(docker(f"{END}\n"), name=f"{container.log}.1")
    container.wrote(docker(f"{POOL}\n"))
    container.find()

    seen = container.read()

    assert [event.event for event in events(seen)] == ["load_begin", "load_end", "memory_pool"]
    assert values(seen, "log_lines_total") == {("stderr",): 3.0}


def test_a_long_past_is_read_turn_by_turn_and_counted_whole(tmp_path: Path) -> None:
    container = Container(tmp_path, turn_bytes=1)
    for number in (3, 2, 1):
        container.wrote(docker(f"{END}\n".replace("TP0", f"TP{number}")), name=f"{container.log}.{number}")
    container.wrote(docker(f"{POOL}\n"))
    container.find()
    turns = [container.read() for _ in range(300)]

    counts = [values(seen, "log_lines_total") for seen in turns]
    assert next(count for count in counts if count) == {("stderr",): 4.0}
    assert [event.rank for seen in turns for event in events(seen)] == ["TP3", "TP2", "TP1", "TP0"]


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Container, FarMount]]:
    """A container whose log, and all that was moved aside of it, lies on a far mount; one chunk is read in a turn."""
    mount = FarMount(tmp_path / "far", tmp_path / "proc", monkeypatch)
    container = Container(mount.folder, turn_bytes=1)
    container.source._guards.mounts.proc = str(tmp_path / "proc")
    for number in (3, 2, 1):
        container.wrote(docker(f"{END}\n".replace("TP0", f"TP{number}")), name=f"{container.log}.{number}")
    container.wrote(docker(f"{POOL}\n"))
    container.find()
    mount.watch(container.source._guards)
    yield container, mount
    mount.answer()
    container.source.close()


@pytest.mark.parametrize("hangs_at", [None, 0, 1, 2, 3, 5])
def test_a_past_on_a_far_mount_is_read_whole_whenever_it_hangs(
    hangs_at: int | None, far: tuple[Container, FarMount]
) -> None:
    container, mount = far
    turns = []
    for turn in range(300):
        if turn == hangs_at:
            mount.hang()
            for _ in range(3):
                turns.append(container.read())
                assert container.source.again_seconds is None  # nothing is gained by coming soon
            mount.answer()
        turns.append(container.read())

    counts = [values(seen, "log_lines_total") for seen in turns]
    assert next(count for count in counts if count) == {("stderr",): 4.0}
    assert [event.rank for seen in turns for event in events(seen)] == ["TP3", "TP2", "TP1", "TP0"]


def opened() -> Counter[str]:
    """Where our descriptors lead."""
    found = Counter[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found


def test_a_past_that_is_left_in_the_middle_gives_its_descriptor_back(far: tuple[Container, FarMount]) -> None:
    container, mount = far
    before = opened()
    while not events(container.read()):
        pass
    mount.hang()
    container.read()
    container.source.close()
    mount.answer()

    gc.collect()
    mount.answer()
    assert opened() <= before


def test_files_of_the_start_before_are_not_this_servers(tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.wrote(docker(f"{END}\n"), name=f"{container.log}.1", modified=WALL - 101)
    container.wrote(docker(f"{POOL}\n"))
    container.find()

    assert container.told() == [("memory_pool", "stderr")]


def test_rotated_files_of_a_configured_log_are_left_alone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.write(f"{BEGIN}\n", "server.log.1")
    node.write(f"{END}\n", "server.log")
    node.place("server.log")

    assert [event.event for event in events(node.read())] == ["load_end"]


def test_what_was_told_before_a_restart_of_ours_is_not_told_again_from_a_rotated_file(container: Container) -> None:
    container.source.past.seal = seal
    assert container.told() == [("load_begin", "stderr")]
    container.wrote(docker(f"{END}\n"))
    rotate(container, f"{container.log}.1")
    container.wrote(docker(f"{POOL}\n"))
    container.find()
    after = restarted(container)
    after.server = container.server

    seen = after.read()

    assert [event.event for event in events(seen)] == ["load_end", "memory_pool"]
    assert values(seen, "log_lines_total") == {("stderr",): 3.0}
    assert known(after)


@pytest.fixture
def rotated(container: Container) -> Container:
    """Two files were moved aside, of the second one the end of a stream."""
    container.source.past.seal, container.source.past.key_of = seal, key_of
    container.wrote(docker(f"{END}\n"))
    container.read()
    for number in (1, 2):
        for old in range(number, 1, -1):
            (container.folder / f"{container.log}.{old - 1}").rename(container.folder / f"{container.log}.{old}")
        rotate(container, f"{container.log}.1")
        container.wrote(docker(f"{POOL}\n"), docker("x\n", "stdout"))
        container.find()
        container.read()
    return container


LINES = {("stderr",): 4.0, ("stdout",): 2.0}


def gone(container: Container) -> None:
    (container.folder / f"{container.log}.2").unlink()


def packed(container: Container) -> None:
    """Into another file: nothing tells that it is the same."""
    for number in (1, 2):
        old = container.folder / f"{container.log}.{number}"
        Path(f"{old}.gz").write_bytes(gzip.compress(old.read_bytes()))
        os.utime(f"{old}.gz", (WALL, WALL))
        old.unlink()


def rotated_once_more(container: Container) -> None:
    (container.folder / f"{container.log}.2").rename(container.folder / f"{container.log}.3")
    (container.folder / f"{container.log}.1").rename(container.folder / f"{container.log}.2")
    rotate(container, f"{container.log}.1")
    container.wrote(docker("y\n", "stdout"), docker("y\n"))
    container.find()


def rotated_and_packed(container: Container) -> None:
    rotated_once_more(container)
    packed(container)


def rotated_and_gone(container: Container) -> None:
    rotated_once_more(container)
    for number in (1, 2, 3):
        (container.folder / f"{container.log}.{number}").unlink()


@pytest.mark.parametrize(
    ("how", "new"),
    [
        (lambda container: None, 0),
        (gone, 0),
        (packed, 0),
        (rotated_once_more, 1),
        (rotated_and_packed, 1),
        (rotated_and_gone, 1),
    ],
)
def test_the_counters_of_a_containers_log_go_on_whatever_became_of_its_files(
    how: Callable[[Container], None], new: int, rotated: Container
) -> None:
    before = rotated.read()
    assert values(before, "log_lines_total") == LINES
    after = restarted(rotated)
    how(rotated)
    after.server = rotated.server

    seen = after.read()

    assert values(seen, "log_lines_total") == {stream: lines + new for stream, lines in LINES.items()}
    assert values(seen, "log_rotations_total") == values(before, "log_rotations_total")
    rotated.wrote(docker(f"{END}\n"))
    assert values(after.read(), "log_lines_total") == {("stderr",): 5.0 + new, ("stdout",): 2.0 + new}


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        (f"/var/lib/docker/containers/{ID}/{ID}-json.log", True),
        ("/host/var/log/pods/ai_chat-0_6b1f/server/10.log", True),
        ("/var/log/crio/pods/sandbox/server.log", True),
        ("/var/log/vllm/server.log", False),
        ("/var/log/pods/a_b_c/server/0.log/other.txt", False),
        ("journal::vllm.service", False),
    ],
)
def test_logs_that_a_runtime_rotates_are_known_by_their_path(path: str, is_one: bool) -> None:
    assert is_runtimes(path) is is_one


@pytest.mark.parametrize(
    ("log", "names", "expected"),
    [
        ("x-json.log", ["x-json.log.10.gz", "x-json.log.2.gz", "x-json.log.1", "x-json.log.tmp", "y-json.log.1"], 3),
        ("0.log", ["0.log.20260601-080000.gz", "0.log.20260602-075959", "0.log.20260602-080000", "00.log"], 3),
        ("x-json.log", ["x-json-2026-06-01T08-00-00.000.log", "x-json-2026-06-02T08-00-00.000.log"], 2),
    ],
)
def test_files_moved_aside_are_found_oldest_first(log: str, names: list[str], expected: int, tmp_path: Path) -> None:
    for name in [*names, log]:
        (tmp_path / name).write_text("x")

    found = earlier_files(str(tmp_path / log), 0.0, None)

    assert [os.path.basename(file.path) for file in found] == names[:expected]


def test_a_file_and_its_packed_twin_are_one_and_the_current_one_is_none(tmp_path: Path) -> None:
    for name in ("x.log", "x.log.1", "x.log.1.gz", "x.log.2.gz"):
        (tmp_path / name).write_text("x")
    (tmp_path / "x.log.3").symlink_to("x.log")
    status = (tmp_path / "x.log.2.gz").stat()

    found = earlier_files(str(tmp_path / "x.log"), 0.0, (status.st_dev, status.st_ino))

    assert [os.path.basename(file.path) for file in found] == ["x.log.1"]


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b damaged", gzip.compress(docker(f"{BEGIN}\n") * 99)[:-20]])
def test_a_packed_file_that_is_damaged_costs_only_itself(content: bytes, tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.wrote(content, name=f"{container.log}.1.gz")
    container.wrote(docker(f"{POOL}\n"))
    container.find()

    assert container.told()[-1] == ("memory_pool", "stderr")


# --- the journal ---------------------------------------------------------------------------------------------


def unit(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Node:
    program = folder / "journalctl"
    program.write_text(f"#!/bin/sh\n{script}exec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    node = Node(folder)
    node.server = replace(node.server, logs=(LogPlace("stdout", "journal::vllm.service"),))
    return node


def until(node: Node, event: str) -> list[Event]:
    """Turns until an event came from the child."""
    told: list[Event] = []
    while not any(one.event == event for one in told):
        told += events(node.read())
    return told


def test_a_unit_is_read_from_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = printed(*(record(text, _SYSTEMD_UNIT="vllm.service") for text in (BEGIN, END)))
    node = unit(tmp_path, monkeypatch, script)
    told = until(node, "load_end")
    node.monotonic += journal.SETTLE_SECONDS
    seen = node.read()
    node.source.close()

    assert [(event.event, event.log) for event in told] == [("load_begin", "stdout"), ("load_end", "stdout")]
    assert values(seen, "log_lines_total") == {("stdout",): 2.0}
    assert values(seen, "log_bytes_total") == {("stdout",): float(len(BEGIN) + len(END) + 2)}
    assert values(seen, "log_events_total")["load_end",] == 1.0


def test_a_unit_that_never_wrote_to_the_journal_is_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = unit(tmp_path, monkeypatch, "")
    seen = [node.read() for _ in range(5)]
    node.source.close()

    assert [values(one, "log_bytes_total") for one in seen] == [{}] * 5
    assert node.source.again_seconds is None


def test_the_journal_goes_on_when_the_unit_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = unit(tmp_path, monkeypatch, printed(record(BEGIN, _SYSTEMD_UNIT="vllm.service")))
    until(node, "load_begin")
    (log,) = (log for logs in node.source._servers.values() for log in logs.logs.values())
    node.server = replace(node.server, root=ProcessId(8, 200))
    node.read()

    assert [log] == [log for logs in node.source._servers.values() for log in logs.logs.values()]
    node.source.close()


def test_what_a_unit_said_before_a_restart_of_ours_is_counted_and_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = record(BEGIN, _SYSTEMD_UNIT="vllm.service")
    node = unit(tmp_path, monkeypatch, printed(first))
    node.source.past.seal = seal
    until(node, "load_begin")
    node.monotonic += journal.SETTLE_SECONDS
    node.read()
    node.read()
    later = record(END, _SYSTEMD_UNIT="vllm.service", __REALTIME_TIMESTAMP="1780000000500001")
    unit(tmp_path, monkeypatch, printed(first, later))
    after = restarted(node)
    told = until(after, "load_end")
    after.monotonic += journal.SETTLE_SECONDS
    seen = after.read()
    node.source.close()
    after.source.close()

    assert [event.event for event in told] == ["load_end"]
    assert values(seen, "log_events_total")["load_begin",] == 1.0


def test_a_log_is_a_file_or_the_journal(container: Container) -> None:
    container.read()
    (log,) = (log for logs in container.source._servers.values() for log in logs.logs.values())

    assert isinstance(log, FollowedLog)
    assert isinstance(log.tail, LogTail)


# --- the kubelet ---------------------------------------------------------------------------------------------


def test_the_next_start_of_a_container_goes_on_in_the_file_with_the_next_number(container: Container) -> None:
    container.read()
    container.log = "1.log"
    container.wrote(cri(END, "F", "stdout"))
    container.find()
    container.server = replace(container.server, root=ProcessId(8, 200))

    seen = container.read()

    assert [(event.event, event.log) for event in events(seen)] == [("load_end", "stdout")]
    assert values(seen, "log_events_total")["load_begin",] == 1.0


def test_a_rotation_that_is_undone_costs_nothing(container: Container) -> None:
    """The runtime could not open a new file, so the kubelet moves the old one back."""
    container.read()
    aside = container.folder / "0.log.20260602-080000"
    (container.folder / container.log).rename(aside)
    container.read()
    aside.rename(container.folder / container.log)
    container.wrote(docker(f"{END}\n"))
    seen = container.read()

    assert [event.event for event in events(seen)] == ["load_end"]
    assert values(seen, "log_lines_total") == {("stderr",): 2.0}
    assert values(seen, "log_rotations_total") == {("stderr",): 0.0}


def test_a_file_that_is_truncated_in_place_is_read_anew_and_a_line_in_pieces_ends_there(container: Container) -> None:
    """Docker with one file only, in its older versions."""
    container.wrote(docker(END[:30]))
    container.read()
    path = container.folder / container.log
    path.write_bytes(b"")
    container.read()
    container.wrote(docker(f"{POOL}\n"))
    seen = container.read()

    assert [event.event for event in events(seen)] == ["memory_pool"]
    assert values(seen, "log_truncations_total") == {("stderr",): 1.0}
    assert values(seen, "log_lines_total") == {("stderr",): 3.0}


@pytest.mark.parametrize("hole", [b"\0" * 4096, b""])
def test_a_hole_that_an_outside_truncation_leaves_is_no_line(hole: bytes, tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.wrote(hole, docker(f"{BEGIN}\n"), docker(f"{END}\n"))
    container.find()

    assert container.told() == [("load_begin", "stderr"), ("load_end", "stderr")]
