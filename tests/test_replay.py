"""Recordings judged: the clock and its gaps, what follows where nothing is said, and the document."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stallwatch import signals
from stallwatch.catalogue import derived_signals, read_signals
from stallwatch.cli import main
from stallwatch.config import Config, Thresholds
from stallwatch.frameworks import Framework
from stallwatch.model import FRONTEND
from stallwatch.recordings.format import Header, Reader, known_names, told_servers
from stallwatch.recordings.replay import Replay, lines_of, replay_file
from stallwatch.strict_yaml import InputError

MIB = 1 << 20
TICK = 5.0
ENDLESS = 1e12


@dataclass(slots=True)
class Scribe:
    """Writes a recording by hand: one server `s` whose ranks do what a test says, and no more than noise."""

    ranks: tuple[str, ...] = ("TP0", "TP1")
    fronts: tuple[str, ...] = ("main",)
    facts: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    storage: float = 0.0
    cpu: float = 0.0
    start: float | None = None
    waits: Mapping[str, str] = field(default_factory=dict)

    def processes(self, *names: str) -> list[list[Any]]:
        """What is read of some processes (all, if none is named)."""
        rows: list[list[Any]] = []
        for name in names or (*self.fronts, *self.ranks):
            own = {"server": "s", "rank": name}
            rows += [
                ["process_cpu_seconds_total", own, self.cpu],
                ["process_storage_read_bytes_total", own, self.storage],
                ["process_read_bytes_total", own, self.storage],
                ["process_page_faults_total", {**own, "kind": "minor"}, 1000],
                ["threads", {**own, "wait": self.waits.get(name, "futex")}, 20],
            ]
        if self.start is not None:
            rows.append(["server_start_timestamp_seconds", {"server": "s"}, self.start])
        return rows

    def look(self, t: float, *names: str, also: Iterable[list[Any]] = ()) -> None:
        self.cpu += 0.01
        self.lines.append({"t": t, "readings": [*self.processes(*names), *also]})

    def looks(self, begin: float, end: float, *names: str, loading: float = 0.0, **more: Any) -> None:
        """One look per interval, `end` included; `loading` in MiB per look."""
        for number in range(round((end - begin) / TICK) + 1):
            self.storage += loading * MIB
            self.look(begin + number * TICK, *names, **more)

    def say(self, t: float, event: str, rank: str | None = None, **fields: float) -> None:
        self.lines.append({"t": t, "server": "s", "event": event, **({"rank": rank} if rank else {}), "fields": fields})

    def text(self) -> Iterator[bytes]:
        server = {"server": "s", "framework": "sglang", "log": True, **self.facts}
        header = {"stallwatch_recording": 1, "interval_seconds": TICK, "servers": [server], **self.header}
        for line in (header, *sorted(self.lines, key=lambda line: line["t"])):
            yield json.dumps(line).encode() + b"\n"

    def play(
        self, config: Config | None = None, frameworks: tuple[Framework, ...] | None = ()
    ) -> tuple[Replay, dict[str, Any]]:
        """The finished replay, and what it says of `s`."""
        text = list(self.text())
        records = Reader("a.jsonl", known_names(read_signals(), derived_signals())).read(text)
        header = next(records)
        assert isinstance(header, Header)
        run = Replay(header, frozenset(told_servers(text)), config, frameworks)
        for record in records:
            run.take(record)
        found = {server["server"]: server for server in run.finish()}
        return run, found["s"]

    def story(self, config: Config | None = None) -> list[tuple[float, str, str, str | None]]:
        """(second, state, reason, rank) of every change."""
        changes = self.play(config)[1]["changes"]
        return [(c["t"], c["state"], c["reason"], c["suspect_rank"]) for c in changes]

    def states(self, config: Config | None = None) -> list[tuple[float, str]]:
        return [(t, state) for t, state, _, _ in self.story(config)]

    def write(self, path: Path) -> str:
        data = b"".join(self.text())
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return str(path)


def stuck(loading: float = 0.0) -> Scribe:
    """100 s of loading, then ten minutes in which nothing (or `loading` MiB per look) is read."""
    scribe = Scribe(waits={"TP1": "sleep"})
    scribe.say(0.0, "load_begin", "TP0")
    scribe.say(0.0, "load_begin", "TP1")
    scribe.looks(0.0, 100.0, loading=50.0)
    scribe.looks(105.0, 700.0, loading=loading)
    return scribe


def test_a_stuck_server_stalls_and_its_twin_that_loads_does_not() -> None:
    assert stuck().story() == [
        (0.0, "working", "none", None),
        (165.0, "quiet", "none", None),
        (340.0, "stalled", "idle_wait", "TP1"),
    ]
    assert stuck(loading=2.0).story() == [(0.0, "working", "none", None)]


# --- the clock ---------------------------------------------------------------------------------------------


def test_a_gap_is_counted_by_no_clock() -> None:
    """Ten minutes without readings count as one interval."""
    whole, parted = stuck(), stuck()
    for line in parted.lines:
        line["t"] += 600.0 if line["t"] >= 205.0 else 0.0

    assert whole.states()[1:] == [(165.0, "quiet"), (340.0, "stalled")]
    assert parted.states()[1:] == [(165.0, "quiet"), (940.0, "stalled")]


@pytest.mark.parametrize(("pause", "is_gap"), [(15.0, False), (15.5, True)])
def test_a_gap_is_longer_than_three_intervals(pause: float, is_gap: bool) -> None:
    scribe = Scribe()
    scribe.looks(0.0, 50.0)
    scribe.looks(50.0 + pause, 65.0 + pause)

    quiet_at = scribe.states()[-1]

    assert quiet_at == ((80.0, "quiet") if is_gap else (65.0, "quiet"))


def test_nothing_is_judged_in_a_gap() -> None:
    """The last readings before it are 40 s after the last move: `quiet` comes 60 s after it, not 640 s before."""
    scribe = Scribe()
    scribe.looks(0.0, 40.0)
    scribe.looks(640.0, 700.0)

    assert scribe.states() == [(0.0, "working"), (660.0, "quiet")]


def test_a_line_in_a_gap_counts_as_read_at_its_end() -> None:
    scribe = Scribe()
    scribe.looks(0.0, 50.0)
    scribe.say(300.0, "load_progress", "TP0", done=1, total=9)
    scribe.looks(650.0, 750.0)

    assert scribe.states() == [(0.0, "working"), (715.0, "quiet")]


def test_a_line_between_two_looks_counts_at_its_own_time() -> None:
    scribe = Scribe()
    scribe.say(32.5, "load_begin", "TP0")
    scribe.looks(0.0, 150.0)

    assert scribe.states() == [(0.0, "working"), (95.0, "quiet")]


@pytest.mark.parametrize("last", ["look", "line", "both"])
def test_an_endless_time_is_one_gap_and_not_endless_work(last: str) -> None:
    scribe = Scribe()
    scribe.looks(0.0, 20.0)
    if last != "look":
        scribe.say(ENDLESS - 10.0, "load_progress", "TP0", done=1, total=2)
    if last != "line":
        scribe.look(ENDLESS)

    assert scribe.states() == [(0.0, "working")]


def test_lines_alone_have_their_gaps_among_themselves() -> None:
    scribe = Scribe()
    for t in (0.0, 1e6, 2e6, ENDLESS):
        scribe.say(t, "load_progress", "TP0", done=t, total=ENDLESS)

    assert scribe.states() == [(0.0, "working")]


def test_a_recording_may_begin_at_any_second() -> None:
    late = stuck()
    for line in late.lines:
        line["t"] += 1_700_000_003.0

    changes = [(t - 1_700_000_000.0, state) for t, state in late.states()]
    assert changes == [(5.0, "working"), (170.0, "quiet"), (345.0, "stalled")]  # a tick is at whole intervals


def test_intervals_that_are_no_binary_fraction_tick_all_the_same() -> None:
    """0.1 s: what is read at the moment of a tick belongs to it, and three intervals are no gap."""
    scribe = Scribe(header={"interval_seconds": 0.1})
    for number in range(0, 900, 3):
        scribe.look(round(number * 0.1, 1))

    assert scribe.states()[-1][1] == "quiet"
    assert 60.0 <= scribe.states()[-1][0] <= 60.5


# --- what follows where nothing is said --------------------------------------------------------------------


def test_the_root_is_gone_when_only_the_ranks_are_read() -> None:
    scribe = Scribe()
    scribe.looks(0.0, 50.0)
    scribe.looks(55.0, 90.0, "TP0", "TP1")

    assert scribe.story()[-1][1:3] == ("failed", "exited")
    assert 65.0 <= scribe.story()[-1][0] <= 75.0


def test_the_root_that_vanished_is_gone_at_once() -> None:
    scribe = Scribe()
    scribe.looks(0.0, 50.0)
    gone = ["process_cpu_seconds_total", {"server": "s", "rank": "main"}, None, "vanished"]
    scribe.looks(55.0, 90.0, "TP0", "TP1", also=[gone])

    assert scribe.story()[-1] == (55.0, "failed", "exited", None)


def test_a_root_that_may_not_be_read_lives() -> None:
    scribe = Scribe()
    scribe.looks(0.0, 50.0)
    hidden = ["process_cpu_seconds_total", {"server": "s", "rank": "main"}, None, "permission"]
    scribe.looks(55.0, 90.0, "TP0", "TP1", also=[hidden])

    assert "failed" not in [state for _, state in scribe.states()]


def test_nothing_is_known_of_the_root_when_nothing_is_read_any_more() -> None:
    scribe = Scribe()
    scribe.looks(0.0, 50.0)
    for number in range(20):
        scribe.lines.append({"t": 55.0 + number * TICK, "readings": [["node_oom_kills_total", {}, 0]]})

    assert "failed" not in [state for _, state in scribe.states()]


def test_another_server_that_is_read_shows_that_the_root_is_gone() -> None:
    scribe = Scribe()
    other = ["process_cpu_seconds_total", {"server": "other", "rank": "TP0"}, 1.0]
    scribe.looks(0.0, 50.0, also=[other])
    for number in range(8):
        scribe.lines.append({"t": 55.0 + number * TICK, "readings": [other]})

    assert scribe.story()[-1][1:3] == ("failed", "exited")


def test_a_server_that_said_so_is_gone_and_not_failed() -> None:
    scribe = Scribe()
    scribe.looks(0.0, 50.0)
    scribe.say(50.5, "shutdown")
    scribe.looks(55.0, 90.0, "TP0", "TP1")

    assert scribe.states()[-1][1] == "gone"


@pytest.mark.parametrize("name", ["frontend", "detokenizer", "controller", "worker"])
def test_any_front_end_is_the_root_where_there_is_no_main(name: str) -> None:
    scribe = Scribe(fronts=(name,))
    scribe.looks(0.0, 50.0)
    scribe.looks(55.0, 90.0, "TP0", "TP1")

    assert scribe.states()[-1][1] == "failed"


def test_a_helper_that_is_left_is_not_the_root() -> None:
    scribe = Scribe(fronts=("main", "detokenizer"))
    scribe.looks(0.0, 50.0)
    scribe.looks(55.0, 90.0, "detokenizer", "TP0", "TP1")

    assert scribe.states()[-1][1] == "failed"


def test_a_helper_that_is_gone_is_not_the_root_either() -> None:
    scribe = Scribe(fronts=("main", "detokenizer"))
    scribe.looks(0.0, 50.0)
    scribe.looks(55.0, 90.0, "main", "TP0", "TP1")

    assert "failed" not in [state for _, state in scribe.states()]


def test_a_server_without_front_ends_has_a_root_that_lives() -> None:
    scribe = Scribe(fronts=())
    scribe.looks(0.0, 90.0)

    run, found = scribe.play()

    assert found["final"]["state"] == "quiet"
    track = run.timeline.of("s").track(signals.SERVER_ALIVE, "s")  # type: ignore[union-attr]
    assert track is not None
    assert track.value == 1.0


@pytest.mark.parametrize(("alive", "state"), [(1, "quiet"), (0, "failed")])
def test_a_series_that_says_whether_the_server_lives_decides(alive: int, state: str) -> None:
    scribe = Scribe()
    scribe.looks(0.0, 30.0, also=[["server_alive", {"server": "s"}, 1]])
    scribe.looks(35.0, 90.0, *("TP0", "TP1") if alive else (), also=[["server_alive", {"server": "s"}, alive]])

    assert scribe.states()[-1][1] == state


def test_ranks_that_are_read_live_and_those_never_seen_do_not() -> None:
    scribe = Scribe(facts={"ranks": ["TP0", "TP1", "TP2"]})
    scribe.looks(0.0, 20.0)

    run, _ = scribe.play()

    timeline = run.timeline.of("s")
    assert timeline is not None
    assert timeline.rank_names == ["TP0", "TP1"]
    assert all(timeline.is_alive(rank) for rank in ("TP0", "TP1"))
    assert timeline.server is not None
    assert timeline.server.expected_ranks == ("TP0", "TP1", "TP2")


def test_a_rank_that_is_said_to_be_dead_is_dead() -> None:
    scribe = Scribe()
    alive = [["rank_alive", {"server": "s", "rank": rank}, 1] for rank in ("TP0", "TP1")]
    scribe.looks(0.0, 30.0, also=alive)
    scribe.looks(35.0, 60.0, "main", "TP0", also=[alive[0], ["rank_alive", {"server": "s", "rank": "TP1"}, 0]])

    assert scribe.story()[-1] == (35.0, "failed", "rank_dead", "TP1")


def test_life_of_a_front_end_is_that_of_the_root() -> None:
    scribe = Scribe()
    scribe.looks(0.0, 30.0, also=[["rank_alive", {"server": "s", "rank": "main"}, 1]])
    scribe.looks(35.0, 60.0, "TP0", "TP1", also=[["rank_alive", {"server": "s", "rank": "main"}, 0]])

    run, found = scribe.play()

    assert (found["changes"][-1]["t"], found["final"]["state"]) == (35.0, "failed")
    assert "main" not in run.timeline.of("s").watched_names  # type: ignore[union-attr]


def test_front_ends_that_are_named_singly_are_summed() -> None:
    scribe = Scribe(fronts=("main", "detokenizer"))
    scribe.looks(0.0, 10.0)
    total = 2 * scribe.cpu
    ended = ["process_cpu_seconds_total", {"server": "s", "rank": "detokenizer"}, None, "vanished"]
    scribe.look(15.0, "main", "TP0", "TP1", also=[ended])

    run, _ = scribe.play()

    timeline = run.timeline.of("s")
    assert timeline is not None
    cpu, waits = timeline.track(signals.CPU_SECONDS, "s", FRONTEND), timeline.waits[FRONTEND]
    assert cpu is not None
    assert cpu.value == pytest.approx(total + 0.01)  # what the ended one had used stays in the sum
    assert waits.counts == {"futex": 20}
    assert timeline.track(signals.CPU_SECONDS, "s", "main") is None


def test_a_sum_is_not_readable_while_one_share_is_not() -> None:
    scribe = Scribe(fronts=("main", "detokenizer"))
    hidden = ["process_read_bytes_total", {"server": "s", "rank": "worker"}, None, "permission"]
    scribe.looks(0.0, 10.0, also=[hidden])

    run, _ = scribe.play()

    track = run.timeline.of("s").track(signals.READ_BYTES, "s", FRONTEND)  # type: ignore[union-attr]
    assert track is not None
    assert (track.value, track.reason) == (None, "permission")


def test_waits_that_are_other_here_are_added_to_it() -> None:
    scribe = Scribe()
    waits = {"pipe": 1, "socket": 2, "driver": 3, "zombie": 4, "other": 5}
    scribe.looks(
        0.0, 5.0, also=[["threads", {"server": "s", "rank": "TP0", "wait": wait}, n] for wait, n in waits.items()]
    )

    run, _ = scribe.play()

    assert run.timeline.of("s").waits["TP0"].counts == {"futex": 20, "other": 15}  # type: ignore[union-attr]


def test_numbers_whose_sum_no_float_holds_have_none() -> None:
    scribe, most = Scribe(), 1.7e308
    threads = [["threads", {"server": "s", "rank": "TP0", "wait": wait}, most] for wait in ("pipe", "socket")]
    fronts = [["process_read_bytes_total", {"server": "s", "rank": rank}, most] for rank in ("worker", "detokenizer")]
    scribe.looks(0.0, 5.0, also=[*threads, *fronts])

    run, _ = scribe.play()

    timeline = run.timeline.of("s")
    assert timeline is not None
    assert timeline.waits["TP0"].counts == {"futex": 20}
    track = timeline.track(signals.READ_BYTES, "s", FRONTEND)
    assert track is not None
    assert (track.value, track.reason) == (None, "error")


@pytest.mark.parametrize(
    ("log", "said", "state"),
    [
        (True, False, "stalled"),
        (None, True, "stalled"),
        (None, False, "unknown"),
        (False, True, "unknown"),
        ("unreadable", True, "unknown"),
    ],
)
def test_a_log_is_there_when_the_header_or_a_line_says_so(log: bool | str | None, said: bool, state: str) -> None:
    """Without a log there is not enough evidence for `stalled`."""
    scribe = Scribe(facts={"log": log})
    if said:
        scribe.lines.append({"t": 1.0, "server": "s", "line": "novel"})
    scribe.looks(0.0, 350.0)

    assert scribe.states()[-1][1] == state


@pytest.mark.parametrize(("value", "state"), [(100, "stalled"), (None, "unknown")])
def test_a_series_of_the_log_decides_whether_it_can_be_read(value: float | None, state: str) -> None:
    scribe = Scribe()
    read = ["log_bytes_total", {"server": "s", "log": "server.log"}, 100]
    scribe.looks(0.0, 20.0, also=[read])
    scribe.looks(25.0, 400.0, also=[[*read[:2], value, "permission"]])

    assert scribe.states()[-1][1] == state


def test_a_new_start_begins_anew() -> None:
    """The first start failed; the second works, and is not judged by what was known of the first."""
    scribe = Scribe(start=1_700_000_000.0)
    scribe.looks(0.0, 30.0)
    scribe.looks(35.0, 70.0, "TP0", "TP1")
    scribe.start = 1_700_000_070.0
    scribe.looks(75.0, 120.0)

    assert [state for _, state in scribe.states()] == ["working", "failed", "working"]
    assert scribe.states()[-1][0] == 75.0


def test_a_start_that_is_told_late_is_the_one_that_was_seen() -> None:
    scribe = Scribe()
    scribe.say(0.0, "load_begin", "TP0")
    scribe.looks(0.0, 30.0)
    scribe.start = 1_700_000_000.0
    scribe.looks(35.0, 70.0)

    run, _ = scribe.play()

    timeline = run.timeline.of("s")
    assert timeline is not None
    assert (timeline.anchor, timeline.startup.phase) == (0.0, "loading_weights")


def test_a_process_of_no_known_server_on_a_card_is_no_server(tmp_path: Path) -> None:
    """It is recorded with empty names: that somebody else is on the card decides whether it speaks for the server."""
    scribe = Scribe()
    scribe.looks(0.0, 20.0, also=[["gpu_process_memory_bytes", {"gpu": "GPU-0", "server": "", "rank": ""}, 5e9]])
    path = tmp_path / "tenant.jsonl"
    path.write_bytes(b"".join(scribe.text()))

    assert [server["server"] for server in replay_file(str(path), None, ())["servers"]] == ["s"]


def test_a_configured_server_that_never_came_is_gone_until_it_comes() -> None:
    scribe = Scribe()
    for number in range(100):
        scribe.lines.append({"t": number * TICK, "readings": [["server_starts_total", {"server": "s"}, 0]]})
    scribe.start = 1_700_000_500.0
    scribe.looks(500.0, 530.0, also=[["server_starts_total", {"server": "s"}, 1]])

    assert scribe.states() == [(0.0, "gone"), (500.0, "working")]


def test_a_server_that_is_listed_and_never_read_is_not_known() -> None:
    scribe = Scribe()
    scribe.lines.append({"t": 0.0, "readings": []})

    _, found = scribe.play()

    assert found == {
        "server": "s",
        "changes": [],
        "final": {"state": "unknown", "reason": "no_evidence", "suspect_rank": None},
    }


def test_a_source_that_looks_rarely_is_not_stale_in_between() -> None:
    """Every 30 s: `interval` says so from the first look on."""
    scribe = Scribe()
    scribe.looks(0.0, 300.0)
    for number, line in enumerate(scribe.lines):
        line["interval"] = 30.0
        if number % 6:
            line["readings"] = []

    assert "unknown" not in [state for _, state in scribe.states()]
    assert scribe.states()[-1][1] == "stalled"


@pytest.mark.parametrize(("facts", "ready"), [({"role": "embedded"}, True), ({"node_rank": 1}, True), ({}, False)])
def test_followers_and_embedded_engines_are_ready_after_their_last_marker(facts: dict[str, Any], ready: bool) -> None:
    """As the framework says, which is read when a recording has such a server."""
    scribe = Scribe(facts={**facts, "nnodes": 2})
    scribe.say(1.0, "load_end", "TP0")
    scribe.say(6.0, "capture_end", "TP0")
    scribe.looks(0.0, 20.0)

    run, _ = scribe.play(frameworks=None)

    assert (run.timeline.of("s").startup.phase == "ready") is ready  # type: ignore[union-attr]


@pytest.mark.parametrize(("facts", "ready"), [({"role": "embedded"}, True), ({"node_rank": 1}, True), ({}, False)])
def test_so_they_are_when_another_server_had_its_framework_read_before(facts: dict[str, Any], ready: bool) -> None:
    """One that was there from the beginning, and whose own time-outs were asked for."""
    scribe = Scribe()
    scribe.say(1.0, "load_end", "TP0")
    scribe.looks(0.0, 20.0)
    scribe.lines.append({"t": 6.0, "servers": [{"server": "other", "framework": "sglang", **facts, "nnodes": 2}]})
    for t, event in ((7.0, "load_end"), (8.0, "capture_end")):
        scribe.lines.append({"t": t, "server": "other", "event": event, "rank": "TP0"})

    run, _ = scribe.play(frameworks=None)

    assert (run.timeline.of("other").startup.phase == "ready") is ready  # type: ignore[union-attr]


# --- thresholds --------------------------------------------------------------------------------------------


def test_thresholds_are_those_of_the_header_or_of_a_configuration_file() -> None:
    scribe = Scribe(facts={"verdict": {"window": 10, "stall_after": 30}})
    scribe.looks(0.0, 100.0)

    assert scribe.states() == [(0.0, "working"), (15.0, "quiet"), (30.0, "stalled")]
    assert scribe.states(Config(verdict=Thresholds(window=20.0, stall_after=50.0))) == [
        (0.0, "working"),
        (25.0, "quiet"),
        (50.0, "stalled"),
    ]


# --- files and words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    file = stuck().write(tmp_path / name)

    assert main(["replay", "--format", "json", file]) == 1

    change = {"t": 340.0, "state": "stalled", "reason": "idle_wait", "phase": "loading_weights", "suspect_rank": "TP1"}
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"schema", "recordings"}
    assert found["schema"] == 1
    (recording,) = found["recordings"]
    assert (recording.keys(), recording["file"]) == ({"file", "servers"}, file)
    (server,) = recording["servers"]
    assert server.keys() == {"server", "changes", "final"}
    assert server["changes"][-1] == change
    assert server["final"] == {"state": "stalled", "reason": "idle_wait", "suspect_rank": "TP1"}


def test_words_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = stuck().write(tmp_path / "bad.jsonl"), stuck(loading=2.0).write(tmp_path / "good.jsonl")

    assert main(["replay", good]) == 0
    assert "stalled" not in capsys.readouterr().out
    assert main(["replay", good, bad]) == 1

    words = capsys.readouterr().out
    assert "at  5m40s  stalled (idle_wait) in loading_weights" in words
    assert "in the end stalled (idle_wait): every thread is asleep, the others wait for TP1" in words


def test_a_configuration_file_gives_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yml"
    config.write_text("verdict: {stall_after: 20m}\n")

    assert main(["replay", "--config.file", str(config), stuck().write(tmp_path / "a.jsonl")]) == 0
    assert "quiet" in capsys.readouterr().out


def test_a_name_cannot_draw_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scribe = Scribe(header={"servers": [{"server": "\x1b[31mred"}]})

    assert main(["replay", scribe.write(tmp_path / "a.jsonl")]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", ": is empty; a recording begins with a header line"),
        (b"\n", ":1: is no JSON object"),
        (b"{}\n", ":1: stallwatch_recording: the first line must be the header of a recording"),
        (b"\x1f\x8b\x08\x00garbage", ":1: the packed data is damaged or cut off here"),
        (b"\x00" * 100, ":1: is "),
    ],
)
def test_a_file_that_is_no_recording_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, problem: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)

    assert main(["replay", str(file)]) == 2
    assert f"stallwatch: {file}{problem}" in capsys.readouterr().err


def test_packed_data_that_was_cut_off_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    stuck().write(file)
    file.write_bytes(file.read_bytes()[:-20])

    with pytest.raises(InputError, match=r"a\.jsonl\.gz:\d+: the packed data is damaged or cut off here"):
        replay_file(str(file), None, ())


@pytest.mark.parametrize(
    ("name", "problem"), [(".", "is a directory"), ("none.jsonl", "cannot be read: No such file"), ("", "cannot be")]
)
def test_what_is_no_file_is_named(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        list(lines_of(str(tmp_path / name) if name else ""))
