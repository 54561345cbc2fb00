"""Real vLLM on CPU: what a real server does when it starts, idles, stops, dies or waits.

Started one at a time, for a start takes both cores; those that only wait then do so together, beside the starts of the
others, and under one exporter.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from stallwatch.model import PHASES

from .harness import (
    LOOK,
    PATIENCE,
    SAMPLE_SECONDS,
    SLACK,
    STALL_AFTER,
    TICK,
    WINDOW,
    Exporter,
    Program,
    fetch,
    free_port,
    rest,
    stop,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("STALLWATCH_E2E_CACHE", "/var/cache/stallwatch-e2e"))
HOME = CACHE / "vllm-0.32.0"
START_SECONDS = 300.0
"""A start takes 30 s alone on two warm cores, twice that on a loaded machine, and there are slower ones."""
SLOW_BYTES_PER_SECOND = 8 << 20
"""Readahead comes in bursts of 16 MiB and more: at this speed the gaps between them stay below one window."""
THROTTLE = Path("/sys/fs/cgroup/blkio")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_NO_USAGE_STATS": "1",
    "NO_PROXY": "*",
}
NOT_READY = {"working", "slow"}
EMBEDDED = """\
import sys, time
from vllm import LLM
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=2, enforce_eager=True, max_model_len=512)
    print("the engine is there", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def vllm_is_there() -> None:
    if not list(HOME.glob(".complete-*")):
        pytest.skip(f"no complete vLLM in {HOME} (tests/e2e/install_vllm.sh makes one)")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks are bound to two cores; there is one")


def make_model(folder: Path, layers: int, hidden: int, shards: int) -> Path:
    command = [str(HOME / "bin" / "python"), str(HERE / "mkmodel.py"), str(folder)]
    subprocess.run([*command, str(layers), str(hidden), str(shards)], check=True, timeout=START_SECONDS)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 MB in four shards."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", 4, 256, 4)


class Vllm(Program):
    """`vllm serve MODEL` with two ranks."""

    def __init__(self, folder: Path, model: Path, arguments: Sequence[str] = (), prefix: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.name = f"vllm-{self.port}"
        command = [*prefix, str(HOME / "bin" / "vllm"), "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "-tp", "2", "--enforce-eager", "--max-model-len", "512"]
        super().__init__([*command, *arguments], folder / "vllm.log", ENVIRONMENT, folder)

    def said(self, text: str) -> bool:
        assert self.process.poll() is None, f"vLLM ended:\n{self.tail(40)}"
        return text in self.output.read_text(errors="replace")

    def worker(self, rank: int) -> psutil.Process:
        """The worker, as soon as it has its rank in its title: in the middle of the start."""
        found = wait_until(
            lambda: self.find(f"VLLM::Worker_TP{rank}"),
            START_SECONDS,
            f"a worker TP{rank}\n{self.tail()}",
            0.02,
        )
        assert isinstance(found, psutil.Process)
        return found

    def wait_ready(self) -> None:
        def healthy() -> bool:
            assert self.process.poll() is None, f"vLLM ended:\n{self.tail(40)}"
            return fetch(f"http://127.0.0.1:{self.port}/health")[0] == 200

        wait_until(healthy, START_SECONDS, f"a vLLM that is ready\n{self.tail()}", 0.5)


@dataclass(frozen=True, slots=True)
class Stage:
    """One exporter, and servers that have nothing to do any more: `ready` is asked nothing, the engine of `script` has
    no work, and `lonely` waits for another node."""

    exporter: Exporter
    ready: Vllm
    script: Program
    script_done: float  # Unix time
    lonely: Vllm


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    places = [folder / name for name in ("ready", "script", "lonely")]
    for place in places:
        place.mkdir()
    with ExitStack() as stack:
        exporter = stack.enter_context(Exporter(folder))
        ready = stack.enter_context(Vllm(places[0], model))
        ready.wait_ready()
        script = stack.enter_context(embedded(places[1], model))
        wait_until(lambda: has_engine(script), START_SECONDS, f"an engine\n{script.tail()}", 0.5)
        done = time.time()
        lonely = stack.enter_context(Vllm(places[2], model, [*OF_TWO_NODES, "--master-port", str(free_port())]))
        yield Stage(exporter, ready, script, done, lonely)


OF_TWO_NODES = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]
"""And the other one never comes."""


def embedded(folder: Path, model: Path) -> Program:
    script = folder / "batch.py"
    script.write_text(EMBEDDED)
    return Program([str(HOME / "bin" / "python"), str(script), str(model)], folder / "llm.log", ENVIRONMENT, folder)


def has_engine(script: Program) -> bool:
    assert script.process.poll() is None, f"the script ended:\n{script.tail(40)}"
    return "the engine is there" in script.output.read_text(errors="replace")


def rest_since(at: float, seconds: float, program: Program) -> None:
    """Until so many seconds after a moment (Unix time); most of them have gone by while others started."""
    rest(max(0.0, at + seconds - time.time()), program)


def test_a_stopped_worker_is_stalled_and_named(tmp_path: Path, model: Path, stage: Stage) -> None:
    exporter = stage.exporter
    with Vllm(tmp_path, model) as server:
        stop(server.worker(1))
        stopped = time.time()

        stalled = exporter.watch.wait_for(server.name, STALL_AFTER + 20, state="stalled", suspect_rank="TP1")

        document = exporter.watch.last().servers[server.name]
        assert document["reason"] == "stopped"
        assert stalled - stopped >= WINDOW - LOOK
        assert exporter.watch.states(server.name) <= {"working", "slow", "quiet", "stalled"}


def test_a_killed_worker_fails_the_server(tmp_path: Path, model: Path, stage: Stage) -> None:
    exporter = stage.exporter
    with Vllm(tmp_path, model) as server:
        worker = server.worker(1)
        exporter.watch.wait_for(server.name, PATIENCE, state="working")
        wait_until(lambda: _knows_rank(exporter, server.name, "TP1"), PATIENCE, "the exporter knows TP1")
        worker.kill()
        killed = time.time()

        failed = exporter.watch.wait_for(
            server.name, PATIENCE, state="failed", reason={"rank_dead", "exited"}, suspect_rank="TP1"
        )

        second_look = 2 * LOOK + 1.0
        assert failed - killed <= second_look + 2 * TICK + SAMPLE_SECONDS + SLACK


def _knows_rank(exporter: Exporter, server: str, rank: str) -> bool:
    document = exporter.watch.last().servers.get(server, {"ranks": []})
    return rank in {entry["rank"] for entry in document["ranks"]}


@pytest.fixture
def throttle(tmp_path: Path) -> Iterator[Throttle]:
    """A cgroup whose reads from the device of the model can be slowed down."""
    device = os.stat(tmp_path).st_dev
    if os.geteuid() != 0:
        pytest.skip("a cgroup needs root")
    if not (THROTTLE / "blkio.throttle.read_bps_device").exists():
        pytest.skip("no blkio controller of cgroup v1 (the slow reader of test_stories is the twin)")
    if os.major(device) == 0:
        pytest.skip(f"{tmp_path} is on no block device")
    group = Throttle(THROTTLE / f"stallwatch-e2e-{os.getpid()}", f"{os.major(device)}:{os.minor(device)}")
    group.folder.mkdir()
    try:
        # Somebody is always in it: a systemd that boots beside us, be it in its own namespaces, removes empty groups.
        with Program(["sleep", "3600"], tmp_path / "inhabitant.out") as inhabitant:
            (group.folder / "cgroup.procs").write_text(f"{inhabitant.pid}\n")
            yield group
            group.limit(0)
    finally:
        wait_until(group.is_removed, PATIENCE, f"{group.folder} removed", 0.2)


class Throttle:
    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device

    def limit(self, bytes_per_second: int) -> None:
        """0 = no limit."""
        (self.folder / "blkio.throttle.read_bps_device").write_text(f"{self.device} {bytes_per_second}\n")

    def is_removed(self) -> bool:
        with suppress(OSError):
            self.folder.rmdir()
        return not self.folder.exists()

    @property
    def enter(self) -> list[str]:
        """Command prefix that puts itself into the group."""
        return ["sh", "-c", f'echo $$ >{self.folder}/cgroup.procs && exec "$@"', "sh"]


def test_a_throttled_load_is_working_for_three_times_stall_after(
    tmp_path: Path, throttle: Throttle, stage: Stage
) -> None:
    model, exporter = make_model(tmp_path / "models" / "big", 72, 512, 8), stage.exporter
    with Vllm(tmp_path, model, prefix=throttle.enter) as server:
        wait_until(lambda: server.said("DP group leader"), START_SECONDS, f"workers\n{server.tail()}", 0.1)
        drop_page_cache(model)
        throttle.limit(SLOW_BYTES_PER_SECOND)
        wait_until(lambda: server.said("Starting to load model"), START_SECONDS, "a load", 0.1)
        began = time.time()
        rest(3 * STALL_AFTER, server)

        assert not server.said("Loading weights took"), "the throttle did not hold"
        assert exporter.watch.states(server.name) <= NOT_READY, exporter.watch.story()
        moving = exporter.watch.last().servers[server.name]["channels"]
        assert "storage" in {channel["channel"] for channel in moving if channel["state"] == "moving"}
        throttle.limit(0)
        server.wait_ready()
        exporter.watch.wait_for(server.name, PATIENCE, state="idle", phase="ready")
        assert exporter.watch.states(server.name, began) <= NOT_READY | {"idle"}, exporter.watch.story()


def drop_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


# --- those that wait together: the last, for by now most of their minutes are over -------------------------------


def test_a_start_becomes_ready_and_then_idles(stage: Stage) -> None:
    exporter, server = stage.exporter, stage.ready
    idle = exporter.watch.wait_for(server.name, PATIENCE, state="idle", phase="ready", ready=True)
    rest_since(idle, 3 * STALL_AFTER, server)

    last = exporter.watch.last()
    states = exporter.watch.states(server.name)
    assert states <= NOT_READY | {"idle"}, exporter.watch.story()
    assert last.servers[server.name]["state"] == "idle"
    phases = exporter.watch.phases(server.name)
    assert phases == sorted(phases, key=PHASES.index)
    assert {"spawned", "ready"} < set(phases)  # those between may be shorter than a sample
    for event in ("dist_init_begin", "load_begin", "load_end", "memory_pool", "warmup_end", "ready"):
        counted = last.values("stallwatch_log_events_total", server=server.name, event=event)
        assert sum(counted.values()) >= 1, event
    waits = {labels: v for labels, v in last.values("stallwatch_threads", server=server.name).items() if v}
    asleep = sum(v for labels, v in waits.items() if dict(labels)["wait"] in ("futex", "poll"))
    assert asleep >= 0.8 * sum(waits.values())
    assert {rank["rank"] for rank in last.servers[server.name]["ranks"]} >= {"TP0", "TP1"}
    assert last.values("stallwatch_health_status", server=server.name, endpoint="health") == {(): 200.0}


def test_an_llm_in_a_script_is_embedded_and_idle_when_done(stage: Stage) -> None:
    exporter, script = stage.exporter, stage.script
    name = wait_until(lambda: _server_of(exporter, script), PATIENCE, "a server with the script's ranks")
    idle = exporter.watch.wait_for(name, PATIENCE, state="idle")
    rest_since(max(idle, stage.script_done), 3 * STALL_AFTER, script)

    assert exporter.watch.states(name) <= NOT_READY | {"idle"}, exporter.watch.story()
    document = exporter.watch.last().servers[name]
    assert (document["state"], document["role"]) == ("idle", "embedded")
    assert not exporter.watch.last().values("stallwatch_port_listening", server=name)


def _server_of(exporter: Exporter, program: Program) -> str | None:
    """Name of the server whose ranks are processes of this program."""
    pids = {process.pid for process in program.family()}
    for name, document in exporter.watch.last().servers.items():
        ranks = {rank["pid"] for rank in document["ranks"] if rank["pid"]}
        if ranks and ranks <= pids:
            return name
    return None


def test_another_node_that_never_comes_is_waited_for(stage: Stage) -> None:
    exporter, server = stage.exporter, stage.lonely
    suspect = exporter.watch.wait_for(
        server.name, START_SECONDS + STALL_AFTER, state="suspect", reason="waiting_remote"
    )
    rest_since(suspect, STALL_AFTER, server)

    assert "stalled" not in exporter.watch.states(server.name)
    assert exporter.watch.states(server.name, suspect) == {"suspect"}
    reasons = [document["reason"] for _, document in exporter.watch.of(server.name, suspect)]
    assert set(reasons) <= {"waiting_remote", "busy_spin"}
    assert reasons.count("waiting_remote") >= 0.9 * len(reasons)  # a moment of CPU beside starting servers may be work
