"""What is recorded: everything a replay needs to judge as the daemon did, and nothing a secret could hide in."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from feed import TICK, WALL, CardFigures, Feed, server
from proc_tree import ProcTree, threads
from proc_tree import Thread as ProcThread
from stallwatch import signals
from stallwatch.assembly import Settings, make_daemon
from stallwatch.catalogue import derived_signals, read_signals
from stallwatch.config import Config, Thresholds
from stallwatch.daemon import Daemon
from stallwatch.model import Event, Observation, Report, Result, Scene
from stallwatch.poller import Poller
from stallwatch.recordings.format import Header, Line, Reader, known_names, told_servers
from stallwatch.recordings.record import Recorder, Target, record
from stallwatch.recordings.replay import replay_file, replay_lines
from stallwatch.sources import Host, Moment
from stallwatch.strict_yaml import InputError
from stallwatch.timeline import MIB

SECRET = "hunter2"  # noqa: S105  # what must not be found again
KNOWN = known_names(read_signals(), derived_signals())


class Stub:
    """A source that yields what a function returns."""

    signals = ()

    def __init__(self, name: str, yields: Callable[[], Iterable[Observation]]) -> None:
        self.name, self._yields = name, yields

    def read(self, scene: Scene, now: Moment) -> Iterator[Observation]:
        yield from self._yields()

    def close(self) -> None:
        """Nothing is open."""


class Live:
    """One server under a daemon that is recorded; `told` are the changes the daemon itself saw."""

    def __init__(self, config: Config | None = None) -> None:
        config = config or Config()
        self.feed = Feed(server=server(tensor_parallel=2))
        self.now, self.reads_io = 5000.0, True
        self.events: list[Event] = []
        self.told: list[tuple[str, str, str | None]] = []
        self.told_at: list[float] = []
        self.lines: list[str] = []
        self.recorder = Recorder(self.lines.append, config.intervals.tick, config.thresholds_for, WALL)
        host = Host(config, (), Path("/nowhere"), Path("/nowhere"))
        self.daemon = Daemon(
            host, self._pollers, self._publish, lambda: self.now, lambda: WALL + self.now, self.recorder.witness
        )
        self.daemon.tell_pause = self.recorder.pause

    def _pollers(self, scene: Callable[[], Scene], notify: Callable[[Result], None]) -> list[Poller]:
        yields: dict[str, Callable[[], Iterable[Observation]]] = {
            "processes": lambda: [self.feed.server, *self.feed.process_readings(self.reads_io)],
            "threads": self.feed.thread_readings,
            "logs": lambda: [*self.feed.log_readings(), *self._new_events()],
            "gpu": lambda: [r for rank, card in self.feed.cards.items() for r in card.readings("s", rank)],
        }
        sources = [Stub(name, function) for name, function in yields.items()]
        clocks = (lambda: self.now), (lambda: WALL + self.now)
        self.pollers = [Poller(source, TICK, scene, notify, *clocks) for source in sources]  # type: ignore[arg-type]
        return self.pollers

    def _new_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def _publish(self, report: Report) -> None:
        self.recorder.tick()
        for found in report.servers:
            verdict = found.verdict
            change = verdict.state, verdict.reason, verdict.suspect_rank
            if not self.told or self.told[-1] != change:
                self.told.append(change)
                self.told_at.append(self.now)

    def step(self, number: int = 1, seconds: float = TICK, **moves: float) -> None:
        """Some looks and ticks; `moves` are counters of every rank that grow at each."""
        for _ in range(number):
            self.look(seconds, **moves)
            self.daemon.tick()

    def look(self, seconds: float, **moves: float) -> None:
        """The sources look, and nobody takes it yet."""
        self.now += seconds
        self.feed.noise(self.now)
        for rank in self.feed.ranks:
            for name, amount in moves.items():
                counters = self.feed.of[rank]
                setattr(counters, name, getattr(counters, name) + amount)
        for poller in self.pollers:
            poller.turn()

    def say(self, event: str, rank: str | None = None, **fields: float | str) -> None:
        self.feed.log_bytes += 100
        self.events.append(Event(self.now + 1.0, "s", event, rank, "log", fields))

    def replayed(self, config: Config | None = None) -> list[tuple[str, str, str | None]]:
        return [(c["state"], c["reason"], c["suspect_rank"]) for c in self.replayed_changes(config)]

    def replayed_changes(self, config: Config | None = None) -> list[dict[str, Any]]:
        self.recorder.begin()
        lines = [line.encode() for line in self.lines]
        (found,) = replay_lines(Reader("x", KNOWN).read(lines), told_servers(lines), config, ())
        return list(found["changes"])


# --- a recorded run replays to what it was judged live -----------------------------------------------------


def load_and_sleep(live: Live) -> None:
    """Both ranks load; one then sleeps for ever."""
    live.step(2)
    for rank in live.feed.ranks:
        live.say("load_begin", rank)
    live.step(20, storage=50 * MIB, read=50 * MIB)
    live.feed.waits["TP1"] = "sleep"
    live.step(60)


def load_and_be_ready(live: Live) -> None:
    live.step(2)
    live.say("load_begin", "TP0")
    live.step(20, storage=50 * MIB)
    live.step(30)
    live.say("load_end", "TP0")
    live.step(2)
    live.say("ready")
    live.step(20)


def lose_a_rank(live: Live) -> None:
    live.step(20, storage=50 * MIB)
    live.feed.dead.add("TP1")
    live.step(5)


def hide_storage(live: Live) -> None:
    live.step(20, storage=50 * MIB)
    live.reads_io = False
    live.step(60)


def end_and_start_again(live: Live) -> None:
    live.step(20, storage=50 * MIB)
    live.feed.root = False
    live.feed.dead.update(("TP0", "TP1", "frontend"))
    live.step(20)
    live.feed.root = True
    live.feed.dead.clear()
    live.feed.server = replace(live.feed.server, started_at=WALL + 300.0, starts=2)
    live.step(20, storage=50 * MIB)


def pause_us(live: Live) -> None:
    """Ten minutes in which the exporter itself was stopped: no clock counts them."""
    live.step(20, storage=50 * MIB)
    live.step(20)
    live.step(seconds=600.0)
    live.step(60)


def pause_our_ticks_alone(live: Live) -> None:
    """Three times a machine has no core for the daemon, but some for its sources, for a third of what a stall takes."""
    live.step(20, storage=50 * MIB)
    for _ in range(3):
        live.step(2)
        for _ in range(16):
            live.look(TICK)
        live.step()
    live.step(20)
    live.step(30)


def pause_our_ticks_while_few_are_read(live: Live) -> None:
    """The same, and the sources look seldom."""
    live.step(20, storage=50 * MIB)
    live.step(20)
    for _ in range(6):
        live.look(12 * TICK)
    live.step()
    live.step(60)


def be_a_log_less_one(live: Live) -> None:
    live.feed.log = False
    live.step(20, storage=50 * MIB)
    live.step(120)


def spin(live: Live) -> None:
    live.step(20, storage=50 * MIB)
    live.step(200, cpu=5.0)


def with_cards(live: Live) -> list[CardFigures]:
    """Both ranks have loaded, and their cards rest."""
    live.feed.cards = {
        rank: CardFigures(memory_utilization=0.0, power=122.0, limit=700.0, lost=0.0) for rank in live.feed.ranks
    }
    return list(live.feed.cards.values())


def spin_on_cards(live: Live) -> None:
    cards = with_cards(live)
    live.step(20, storage=50 * MIB)
    for card in cards:
        card.utilization, card.power = 1.0, 152.0
    live.step(60)


def spin_on_cards_known_before(live: Live) -> None:
    """What the cards take at rest is known from before the recording."""
    cards = with_cards(live)
    for card in cards:
        card.utilization, card.power = 1.0, 152.0
    live.step(2, storage=50 * MIB)
    for words in list(live.daemon._timeline.cards.wanted()):
        live.daemon._timeline.cards.recall(words, 122.0)
    live.step(60)


def lose_a_card(live: Live) -> None:
    cards = with_cards(live)
    live.step(20, storage=50 * MIB)
    cards[1].lost = 1.0
    live.step(5)


def hang_the_driver(live: Live) -> None:
    cards = with_cards(live)
    live.step(20, storage=50 * MIB)
    for card in cards:
        card.answers = False
    live.step(60)


@pytest.mark.parametrize(
    ("happens", "last"),
    [
        (load_and_sleep, ("stalled", "idle_wait", "TP1")),
        (load_and_be_ready, ("idle", "no_evidence", None)),
        (lose_a_rank, ("failed", "rank_dead", "TP1")),
        (hide_storage, ("unknown", "unreadable", None)),
        (end_and_start_again, ("working", "none", None)),
        (pause_us, ("stalled", "idle_wait", None)),
        (pause_our_ticks_alone, ("stalled", "idle_wait", None)),
        (pause_our_ticks_while_few_are_read, ("stalled", "idle_wait", None)),
        (be_a_log_less_one, ("unknown", "no_evidence", None)),
        (spin, ("suspect", "busy_spin", None)),
        (spin_on_cards, ("stalled", "gpu_spin", None)),
        (spin_on_cards_known_before, ("stalled", "gpu_spin", None)),
        (lose_a_card, ("failed", "gpu_lost", "TP1")),
        (hang_the_driver, ("stalled", "driver_unresponsive", None)),
    ],
)
def test_a_recorded_run_replays_to_its_verdicts(
    happens: Callable[[Live], None], last: tuple[str, str, str | None]
) -> None:
    live = Live()
    happens(live)

    assert live.replayed() == live.told
    assert live.told[-1] == last


@pytest.mark.parametrize("happens", [pause_us, pause_our_ticks_alone, pause_our_ticks_while_few_are_read])
def test_a_pause_of_ours_counts_for_nothing_in_the_replay_either(happens: Callable[[Live], None]) -> None:
    """Also one in which sources went on reading.  Ticks of a replay lie on a grid: moments differ by one at most."""
    live = Live()
    happens(live)
    begun = live.recorder._zero
    assert begun is not None

    found = [change["t"] for change in live.replayed_changes()]

    assert found == [pytest.approx(at - begun, abs=TICK) for at in live.told_at]


def test_without_a_word_of_it_such_a_pause_would_be_silence_of_the_server() -> None:
    live = Live()
    live.daemon.tell_pause = lambda since, until: None
    pause_our_ticks_alone(live)

    assert live.replayed_changes()[-1]["t"] < live.told_at[-1] - 5000.0 - 60.0


class HeldUp(Poller):
    """Its source is done once more while the daemon, which had no core, comes to take."""

    def take(self) -> list[Result]:
        self.turn()
        return super().take()


class OnABusyMachine(Live):
    """Each look takes three seconds of the daemon's tick."""

    def _pollers(self, scene: Callable[[], Scene], notify: Callable[[Result], None]) -> list[Poller]:
        super()._pollers(scene, notify)
        clocks = self._later, lambda: WALL + self.now
        self.pollers = [HeldUp(each.source, TICK, scene, notify, *clocks) for each in self.pollers]
        return self.pollers

    def _later(self) -> float:
        self.now += 1.5  # asked for when a read begins and when it ends
        return self.now


def test_a_tick_is_behind_all_that_it_takes() -> None:
    """Else what was read after it would be judged in the past, and a pause that follows would begin in the future."""
    live = OnABusyMachine()
    live.step(3)
    live.recorder.begin()
    looks = [json.loads(line)["t"] for line in live.lines if '"readings"' in line]

    assert live.daemon.report is not None
    assert live.recorder._zero is not None
    assert max(looks) <= live.daemon.report.monotonic - live.recorder._zero


def test_idle_power_that_was_learned_is_recorded_and_what_is_not_known_is_not() -> None:
    known, twin = Live(), Live()
    spin_on_cards_known_before(known)
    cards = with_cards(twin)
    for card in cards:
        card.utilization, card.power = 1.0, 152.0
    twin.step(62)

    assert '["gpu_resident_idle_power_watts",{"gpu":"GPU-TP0"},122]' in "".join(known.lines)
    assert "gpu_resident_idle_power_watts" not in "".join(twin.lines)
    assert twin.told[-1] == ("suspect", "gpu_spin", None)
    for live, shown in ((known, [122.0, 122.0]), (twin, [])):
        report = live.daemon.report
        assert report is not None
        assert [r.value for r in report.readings if r.signal == signals.GPU_IDLE_POWER] == shown


def test_what_is_owed_by_lines_of_the_log_is_shown_while_it_holds() -> None:
    live = Live()
    live.step(2)
    for rank, running in (("TP0", 3.0), ("TP1", 1.0)):
        live.say("stats", rank, running=running)
    live.step()

    def owed() -> list[float | None]:
        report = live.daemon.report
        assert report is not None
        return [r.value for r in report.readings if r.signal == signals.REQUESTS_RUNNING]

    assert owed() == [4.0]
    live.step(8)
    assert owed() == []


def test_a_run_with_other_times_replays_with_them() -> None:
    live = Live(Config(verdict=Thresholds(window=20.0, stall_after=60.0)))
    live.step(5, storage=50 * MIB)
    live.step(20)

    assert live.replayed() == live.told
    assert live.told[-1][0] == "stalled"
    assert live.replayed(Config())[-1][0] == "quiet"  # the recording's own times, unless others are given


# --- the lines ---------------------------------------------------------------------------------------------


def read(lines: Iterable[str]) -> list[Line]:
    return list(Reader("x", KNOWN).read(line.encode() for line in lines))


def result(source: str, started: float, finished: float, **found: Any) -> Result:
    return Result(source, started, finished, **found)


class Lines(list[str]):
    """The lines of a Recorder with a tick of 5 s."""

    def __init__(self) -> None:
        self.recorder = Recorder(self.append, 5.0, lambda name: Thresholds(), WALL)

    def take(self, *results: Result) -> None:
        for each in results:
            self.recorder.witness(each, each.finished, 10.0)


def test_the_header_waits_for_the_first_servers() -> None:
    lines = Lines()
    lines.take(result("node", 100.0, 100.1, readings=(signals.OOM_KILLS.read(0),)))
    assert lines == []

    lines.take(result("processes", 100.0, 100.2, servers=(server(),)))

    header = read(lines)[0]
    assert isinstance(header, Header)
    assert [each.server.name for each in header.servers] == ["s"]
    assert [json.loads(line).get("t") for line in lines] == [None, 0.1, 0.2]
    assert header.begun == WALL


def test_the_header_does_not_wait_for_ever() -> None:
    """A collector that hangs, or is switched off, must not hold back the rest."""
    lines = Lines()
    lines.take(result("node", 100.0, 104.0))
    lines.recorder.tick()
    assert lines == []

    lines.take(result("node", 105.0, 105.0))
    lines.recorder.tick()

    assert len(lines) == 3


def test_a_server_that_comes_later_or_becomes_better_known_has_a_line_of_its_own() -> None:
    lines = Lines()
    lines.take(result("processes", 100.0, 100.0, servers=()))
    lines.take(*(result("processes", 105.0, 105.0, servers=(server(),)) for _ in range(2)))
    lines.take(result("processes", 110.0, 110.0, servers=(server(nnodes=2),)))

    found = [json.loads(line) for line in lines]

    assert [[each["nnodes"] for each in line["servers"]] for line in found if "servers" in line] == [[], [1], [2]]


def test_time_does_not_run_back_when_sources_overtake_each_other() -> None:
    lines = Lines()
    lines.take(result("processes", 100.0, 100.0, servers=()))
    old = Event(40.0, "s", "load_begin", "TP0", "log")
    lines.take(result("logs", 100.0, 106.0, events=(old, replace(old, at=105.5), replace(old, at=107.0))))
    lines.take(result("threads", 100.0, 105.9))

    assert [json.loads(line)["t"] for line in lines[1:]] == [0.0, 0.0, 5.5, 6.0, 6.0, 6.0]
    assert len(read(lines)) == 7


def test_a_failed_read_is_a_look_without_readings() -> None:
    """So that a collector that fails is no gap."""
    lines = Lines()
    lines.take(result("processes", 100.0, 100.0, servers=(), error="OSError"))

    assert json.loads(lines[1]) == {"t": 0.0, "source": "processes", "interval": 10.0, "readings": []}


# --- no secret ---------------------------------------------------------------------------------------------


def test_no_secret_is_recorded(tmp_path: Path) -> None:
    """Planted in arguments, environment, log, and the path of log and model."""
    tree = ProcTree(tmp_path / "proc")
    (tree.root / "stat").write_text(f"cpu 1 2 3\nbtime {int(WALL)}\nprocesses 9\n")
    folder = tmp_path / f"of-{SECRET}"
    folder.mkdir()
    log = folder / "server.log"
    log.write_text(
        f"[2026-06-02 08:00:00] server_args=ServerArgs(model_path='m', api_key='{SECRET}', tp_size=2)\n"
        f"[2026-06-02 08:00:01 TP0] Load weight begin. {SECRET}\n"
        f"[2026-06-02 08:00:02 TP1] something new: {SECRET}-{SECRET}\n"
        f'[2026-06-02 08:00:03] INFO: 1.2.3.4:5 - "POST /v1/chat?key={SECRET} HTTP/1.1" 200 OK\n'
        f"Traceback (most recent call last):\nRuntimeError: CUDA out of memory {SECRET}\n"
        f"[2026-06-02 08:00:04] version={SECRET}\n"
    )
    command = f"python3 -m sglang.launch_server --model-path /{SECRET}/{SECRET}/org/model --api-key {SECRET} --tp 2"
    given: dict[str, Any] = {"environ": {"HF_TOKEN": SECRET, "SGLANG_KEY": SECRET}, "io": {"rchar": 5}}
    tree.add(100, command, **given)
    for rank in range(2):
        pid = 110 + rank
        tree.add(
            pid,
            f"sglang::scheduler_TP{rank}",
            comm="sglang::schedul",
            ppid=100,
            tasks=threads(3, ProcThread(), pid),
            **given,
        )
    for fd in (1, 2):
        tree.redirect(100, fd, log)
    lines: list[str] = []
    recorder = Recorder(lines.append, 5.0, lambda name: Thresholds(), WALL)
    collectors = ("processes", "threads", "logs", "node")
    settings = Settings(procfs=str(tree.root), rootfs=str(tmp_path), collectors=collectors)
    daemon = make_daemon(settings, lambda report: None, witness=recorder.witness)
    try:
        for _ in range(4):
            for poller in daemon.pollers:
                poller.turn()
            daemon.tick()
    finally:
        daemon.close()

    text = "".join(lines)
    assert {"load_begin", "novel"} <= {json.loads(line).get("event") or json.loads(line).get("line") for line in lines}
    assert '"model":"org/model"' in text
    assert '"threads"' in text
    assert len(read(lines)) >= len(lines)
    assert SECRET not in text
    assert str(tmp_path) not in text


# --- the file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_was_flushed_survives_a_kill(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    target = Target(str(path))
    target.write('{"stallwatch_recording":1,"interval_seconds":5}\n')
    target.flush()

    data = path.read_bytes()  # as it lies there when the recorder is killed now

    if name.endswith(".gz"):
        with pytest.raises(EOFError):
            gzip.decompress(data)
        target.close()
        data = gzip.decompress(path.read_bytes())
    assert data == b'{"stallwatch_recording":1,"interval_seconds":5}\n'
    target.close()


def test_a_packed_recording_does_not_hold_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / f"{SECRET}.jsonl.gz"
    target = Target(str(path))
    target.close()

    assert SECRET.encode() not in path.read_bytes()


def test_a_recording_is_not_written_over_anything(tmp_path: Path) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.write_text("x")
    empty.touch()

    with pytest.raises(InputError, match=r"full: --out: exists already; a recording is not written over anything"):
        Target(str(full))
    Target(str(empty)).close()

    assert full.read_text() == "x"


def test_two_recorders_that_begin_at_the_same_moment_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first = Target(str(path))  # has written nothing yet

    with pytest.raises(InputError, match=r"a\.jsonl: --out: is being written by another program"):
        Target(str(path))
    first.write("line\n")
    first.close()

    assert path.read_text() == "line\n"


@pytest.mark.parametrize("where", ["none/a.jsonl", "."])
def test_a_file_that_cannot_be_made_is_named(tmp_path: Path, where: str) -> None:
    with pytest.raises(InputError, match=r"--out: cannot be written: (No such file|Is a directory)"):
        Target(str(tmp_path / where))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_ends_the_recording_with_one_sentence() -> None:
    target = Target("/dev/full")
    target.write("x\n")

    with pytest.raises(InputError, match=r"^/dev/full: --out: cannot be written: No space left on device$"):
        target.flush()
    with pytest.raises(InputError):
        target.close()


def test_a_short_recording_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself, over a tree without servers, until its time is over."""
    tree = ProcTree(tmp_path / "proc")
    (tree.root / "stat").write_text(f"cpu 1 2 3\nbtime {int(WALL)}\nprocesses 9\n")
    out = tmp_path / "a.jsonl"
    settings = Settings(procfs=str(tree.root), rootfs=str(tmp_path), collectors=("processes", "node"))

    assert threading.current_thread() is threading.main_thread()
    assert record(settings, str(out), 0.1) == 0

    assert replay_file(str(out), None, ())["servers"] == []
    assert isinstance(read(out.read_text().splitlines(keepends=True))[0], Header)
    assert f"looks recorded to {out}" in capsys.readouterr().err
