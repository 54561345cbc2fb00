"""What several test modules share: golden files, and a Report with one of everything."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from recordings.kept import VARIABLE
from stallwatch import cli, signals
from stallwatch.daemon import Daemon
from stallwatch.drill.nvml_standin import NoCompilerError, build
from stallwatch.model import (
    CHANNELS,
    ChannelState,
    GpuState,
    Process,
    ProcessId,
    RankState,
    Reading,
    Report,
    Server,
    ServerReport,
    SourceHealth,
    StartupHistogram,
    Verdict,
)

# A busy machine is no fault, and what fails fails for everybody: the examples are the same in each run.  Others are
# looked for with HYPOTHESIS_PROFILE=search; what it finds becomes a test of its own.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

GIB = 1 << 30
GOLDEN = Path(__file__).parent / "golden"

Golden = Callable[[str, str], None]
"""Compares a text with the golden file of that name."""


@pytest.fixture(scope="session", autouse=True)
def unfiltered() -> Iterator[None]:
    """A filter of system calls stays for ever: `serve` is under it in processes of its own (test_call_filter), not in
    this one, whose other tests end processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "deny_intrusions", lambda: True)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden; the diff is the review")


def pytest_configure(config: pytest.Config) -> None:
    """A folder for what the workers of this run find out for each other; they are started after this."""
    if VARIABLE not in os.environ:
        folder = TemporaryDirectory(prefix="stallwatch-tests-")
        os.environ[VARIABLE] = folder.name

        def forget() -> None:
            folder.cleanup()
            os.environ.pop(VARIABLE, None)

        config.add_cleanup(forget)


def our_loggers() -> list[logging.Logger]:
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    return [each for each in known if isinstance(each, logging.Logger) and each.name.startswith(("root", "stallwatch"))]


@pytest.fixture(autouse=True)
def levels_of_our_loggers() -> Iterator[None]:
    """A command may make a logger quieter or louder for the rest of its process; here that is the next test."""
    before = {logger: logger.level for logger in our_loggers()}
    handlers = logging.root.handlers[:]
    yield
    for logger in our_loggers():
        logger.setLevel(before.get(logger, logging.NOTSET))
    logging.root.handlers[:] = handlers


@pytest.fixture(scope="session", autouse=True)
def patient_ends() -> Iterator[None]:
    """On a busy machine a look may outlive the second that its source has; the next test would meet its helpers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Daemon.close, "__defaults__", (60.0,))
        yield


@pytest.fixture(scope="session")
def nvml_standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in libnvidia-ml.so.1, built once; `StandIn(tmp_path, nvml_standin, count=8)` steers it."""
    try:
        return build(tmp_path_factory.mktemp("nvml"), "-Wall", "-Wextra", "-Werror")
    except NoCompilerError as error:
        pytest.skip(f"the stand-in libnvidia-ml.so.1 cannot be built: {error}")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    def compare(name: str, actual: str) -> None:
        file = GOLDEN / name
        if request.config.getoption("--update-golden"):
            file.write_text(actual)
        assert actual == file.read_text()

    return compare


STALLED_SERVER = Server(
    name="sglang-8000",
    framework="sglang",
    role="server",
    root=ProcessId(4001, 77),
    started_at=1_700_000_000.0,
    processes=(Process(ProcessId(4001, 77), "main"),),
    version="0.5.9",
    model="org/model-547b",
    tensor_parallel=2,
    labels={"team": "search"},
)

GPUS = (
    GpuState("GPU-0", "0", 76 * GIB, 76.4 * GIB, 0.0, 118.2, 117.4),
    GpuState("GPU-1", "1"),  # nothing of it can be read
)

STALLED = ServerReport(
    server=STALLED_SERVER,
    verdict=Verdict("stalled", "idle_wait", since=599.0, suspect_rank="TP1"),
    since_timestamp=1_700_000_100.0,
    phase="loading_weights",
    phase_start_timestamp=1_700_000_020.0,
    phase_budget_seconds=1800.0,
    ready=False,
    ranks_alive=2,
    channels=(
        ChannelState("log", "flat", 401.5),
        ChannelState("storage", "flat", None),
        ChannelState("memory", "moving", 2.0),
        ChannelState("children", "unreadable", 9.0),
        ChannelState("gpu_memory", "absent", None),
    ),
    ranks=(
        RankState(
            "TP0", 4010, "GPU-0", "post_load", 1.0, True, 401.5, {"futex": 205, "poll": 3, "disk": 0}, "futex", GPUS[:1]
        ),
        RankState("TP1", 4011, None, "loading_weights", 0.64, True, 420.0, {"sleep": 1}, None, GPUS[1:]),
        RankState("TP2"),
    ),
    starts=1,
    stalled_seconds=161.0,
    advice=("grant CAP_SYS_PTRACE to read the children of sglang-8000",),
)

IDLE = ServerReport(
    server=Server(
        name="vllm-8001",
        framework="vllm",
        role="server",
        root=ProcessId(5001, 99),
        started_at=0.0,
        processes=(),
    ),
    verdict=Verdict("idle", "none", since=100.0),
    since_timestamp=1_699_999_601.0,
    phase="ready",
    phase_start_timestamp=1_699_999_601.0,
    phase_budget_seconds=600.0,
    ready=True,
    ranks_alive=None,
    channels=tuple(ChannelState(channel, "flat", 30.0) for channel in CHANNELS),
    ranks=(),
    starts=3,
    stalled_seconds=0.0,
    startup_seconds=93.5,
)


@pytest.fixture
def report() -> Report:
    """Two servers, one stalled with three ranks (of the third nothing is known) and one idle."""
    return Report(
        timestamp=1_700_000_501.0,
        monotonic=1000.0,
        readings=(
            signals.SERVER_STARTS.read(1, "sglang-8000"),
            signals.CPU_SECONDS.read(12.25, "sglang-8000", "TP0"),
            signals.CPU_SECONDS.missing("permission", "sglang-8000", "TP1"),
            signals.THREADS.read(205, "sglang-8000", "TP0", "futex"),
            signals.RANK_INFO.read(1, "sglang-8000", "TP0", "4010", "GPU-0"),
            Reading(signals.SERVER_ALIVE, ("sglang-8000",), True),
        ),
        servers=(STALLED, IDLE),
        health=(
            SourceHealth("processes", True, 0.25, last_success=998.0, in_flight_since=None),
            SourceHealth("gpu", False, 2.0, last_success=None, in_flight_since=990.0),
            SourceHealth("logs", None, None, last_success=None, in_flight_since=None),
        ),
        read_errors={("processes", "permission"): 4},
        startups=(StartupHistogram("vllm", "org/small", "", (0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2), 90093.5),),
        config_reload=(True, 1_700_000_000.0),
        dropped={"ranks": 2},
    )
