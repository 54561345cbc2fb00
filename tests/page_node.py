"""Reports for the page: nodes with servers in every state, as many as asked for, with hostile names where asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conftest import GIB
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
    Verdict,
)
from stallwatch.sources.logs.counters import LOG_BACKLOG, LOG_ERRORS, LOG_LAST_LINE, LOG_LINES, LOG_UNMATCHED

NOW, MONOTONIC = 1_700_000_501.0, 1000.0

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"

BUDGET = 600.0

WAITS = {"futex": 205, "poll": 3}


def ranks(number: int, phase: str = "ready", age: float = 4.0) -> tuple[RankState, ...]:
    """Ranks TP0 and on, a card each; those that read weights have read differently much."""
    return tuple(
        RankState(
            rank=f"TP{each}",
            pid=4010 + each,
            gpu=f"GPU-{each}",
            phase=phase,
            load_progress=(41 + 2 * each) / 64 if phase == "loading_weights" else 1.0,
            load_counts=(41 + 2 * each, 64) if phase == "loading_weights" else None,
            alive=True,
            progress_age_seconds=age + each,
            wait=WAITS,
            main_wait="futex",
            gpus=(GpuState(f"GPU-{each}", str(each), (76 + each / 10) * GIB, 78 * GIB, 0.0, 118.2 + each, 117.4),),
        )
        for each in range(number)
    )


def server(
    name: str,
    state: str = "working",
    reason: str = "none",
    *,
    phase: str = "ready",
    of: Sequence[RankState] = (),
    waited_for: str | None = None,
    seconds: float = 400.0,
    age: float = 4.0,
    framework: str = "sglang",
    model: str = "org/model-547b",
) -> ServerReport:
    """One server of a report; `seconds` in its state, `age` since a strong channel moved."""
    moving = "moving" if age < 60 else "flat"
    return ServerReport(
        server=Server(
            name=name,
            framework=framework,
            role="server",
            root=ProcessId(4001, 77),
            started_at=NOW - 900,
            processes=(Process(ProcessId(4001, 77), "main"),),
            version="0.5.9",
            model=model,
            tensor_parallel=max(1, len(of)),
        ),
        verdict=Verdict(state, reason, MONOTONIC - seconds, waited_for),
        since_timestamp=NOW - seconds,
        phase=phase,
        phase_start_timestamp=NOW - seconds - 100,
        phase_budget_seconds=BUDGET,
        ready=phase == "ready",
        ranks_alive=sum(rank.alive is not False for rank in of) if of else None,
        channels=tuple(
            ChannelState(channel, moving, age + number * 3)
            if channel not in ("children", "tokens")
            else ChannelState(channel, "absent", None)
            for number, channel in enumerate(CHANNELS)
        ),
        ranks=tuple(of),
        starts=1,
        stalled_seconds=0.0,
    )


def stalled(name: str = "sglang-8000") -> ServerReport:
    """TP3 still reads its weights while seven others wait at the barrier."""
    each = list(ranks(8, "post_load", 401.0))
    each[3] = replace(
        each[3], phase="loading_weights", load_progress=41 / 64, load_counts=(41, 64), progress_age_seconds=438.0
    )
    found = server(name, "stalled", "idle_wait", phase="post_load", of=each, waited_for="TP3", seconds=401.0, age=401.0)
    return replace(found, deadlines={"sglang_watchdog": NOW + 900}, advice=("look at TP3 first",))


def slow(name: str = "vllm-8001") -> ServerReport:
    """TP3 still reads its weights, and they do come."""
    each = list(ranks(8, "post_load", 401.0))
    each[3] = replace(
        each[3], phase="loading_weights", load_progress=41 / 64, load_counts=(41, 64), progress_age_seconds=12.0
    )
    return server(name, "slow", phase="post_load", of=each, seconds=310.0, age=12.0, framework="vllm")


def failed(name: str = "vllm-8002") -> ServerReport:
    each = list(ranks(4, "capturing_graphs", 90.0))
    each[2] = replace(each[2], alive=False, wait=None, main_wait=None)
    return server(
        name,
        "failed",
        "rank_dead",
        phase="capturing_graphs",
        of=each,
        waited_for="TP2",
        seconds=75.0,
        age=90.0,
        framework="vllm",
    )


def unknown(name: str = "tgi-8003") -> ServerReport:
    """Another user's: nothing of it can be read."""
    found = server(name, "unknown", "unreadable", phase="spawned", framework="tgi", model="")
    return replace(
        found,
        channels=tuple(ChannelState(channel, "unreadable", None) for channel in CHANNELS),
        ranks=(RankState("0", 4300),),
        advice=(f"grant CAP_SYS_PTRACE to read {name}",),
    )


def logs_of(name: str, log: str = "stdout", ago: float = 12.0) -> tuple[Reading, ...]:
    return (
        LOG_LINES.read(412, name, log),
        LOG_UNMATCHED.read(3, name, log),
        LOG_BACKLOG.read(0, name, log),
        LOG_LAST_LINE.read(NOW - ago, name, log),
    )


def node(number: int = 8, *, hostile: bool = False) -> Report:
    """So many servers: the stalled one first, then slow, failed, unknown, and a hostile one; the rest load or serve."""
    servers = [stalled(), slow(), failed(), unknown()][:number]
    if hostile:
        each = tuple(replace(rank, rank=HOSTILE) for rank in ranks(1))
        servers.append(server(HOSTILE, of=each, model=HOSTILE, framework="generic"))
    for port in range(8004, 8004 + number - len(servers)):
        is_loading = port % 2 == 0
        servers.append(
            server(
                f"sglang-{port}",
                "working" if is_loading else "idle",
                phase="loading_weights" if is_loading else "ready",
                of=ranks(8, "loading_weights" if is_loading else "ready"),
            )
        )
    return report_of(servers)


def report_of(servers: Sequence[ServerReport], now: float = NOW, monotonic: float = MONOTONIC) -> Report:
    readings = [
        reading for each in servers for log in ("stdout", "stderr") for reading in logs_of(each.server.name, log)
    ]
    readings += [LOG_ERRORS.read(2, each.server.name, "nccl") for each in servers if each.verdict.state == "failed"]
    return Report(
        timestamp=now,
        monotonic=monotonic,
        readings=tuple(readings),
        servers=tuple(servers),
        health=(SourceHealth("processes", True, 0.25, last_success=monotonic - 2, in_flight_since=None),),
        read_errors={},
    )
