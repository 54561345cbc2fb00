"""An hour of a server of 8 ranks, replayed: `python -m bench.replay` prints one JSON object.

`seconds` and `cpu_seconds` are those of the whole command, parsing included (best of three; to stay below 2).  CPU per
server and tick is that of timeline and verdict alone, without parsing, early and late in the hour: it must not grow.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stallwatch.catalogue import derived_signals, read_signals
from stallwatch.model import Event
from stallwatch.recordings.format import Header, Line, Look, Reader, known_names
from stallwatch.recordings.replay import Replay, lines_of

SERVER = "sglang-8000"
RANKS = tuple(f"TP{number}" for number in range(8))
SECONDS, INTERVAL = 3600, 5
LOAD_SECONDS, STUCK_SECONDS = 600, 2400  # it loads, waits, and (from 2400 s on) serves
MIB = 1 << 20


def readings(t: int) -> Iterator[list[Any]]:
    """About 170 readings of one look."""
    own = {"server": SERVER}
    yield ["server_alive", own, 1]
    yield ["server_start_timestamp_seconds", own, 1.7e9]
    yield ["server_starts_total", own, 1]
    for kind in ("compiler", "other"):
        yield ["server_child_processes", {**own, "kind": kind}, 0]
        yield ["server_child_cpu_seconds_total", {**own, "kind": kind}, 3.0]
    for name in ("server_requests_running", "server_requests_waiting"):
        yield [name, own, float(t > STUCK_SECONDS)]
    yield ["server_generated_tokens_total", own, 100.0 * max(0, t - STUCK_SECONDS)]
    yield ["log_bytes_total", {**own, "log": "server.log"}, 1000 + t]
    loaded = min(t, LOAD_SECONDS) * 50.0 * MIB
    for number, rank in enumerate((*RANKS, "frontend")):
        labels = {**own, "rank": rank}
        if rank in RANKS:
            yield ["rank_alive", labels, 1]
        yield ["process_cpu_seconds_total", labels, round(100 + t * 0.009 + number, 2)]
        yield ["process_page_faults_total", {**labels, "kind": "minor"}, 200_000 + t // 30]
        yield ["process_page_faults_total", {**labels, "kind": "major"}, 100]
        yield ["process_storage_read_bytes_total", labels, loaded]
        yield ["process_read_bytes_total", labels, loaded + t * 100]
        yield ["process_written_bytes_total", labels, 1e6]
        yield ["process_resident_memory_bytes", labels, 5e9]
        yield ["process_virtual_memory_bytes", labels, 4e11]
        for wait, threads in (("futex", 180), ("poll", 12), ("sleep", 8), ("running", 0), ("disk", 0), ("other", 5)):
            yield ["threads", {**labels, "wait": wait}, threads]
        yield ["main_thread", {**labels, "wait": "futex"}, 1]
    yield ["node_oom_kills_total", {}, 0]


def lines() -> Iterator[dict[str, Any]]:
    server = {"server": SERVER, "framework": "sglang", "port": 8000, "ranks": RANKS, "log": True}
    yield {"stallwatch_recording": 1, "interval_seconds": INTERVAL, "servers": [server]}
    for t in range(0, SECONDS, INTERVAL):
        yield {"t": t, "readings": list(readings(t))}
        if t < LOAD_SECONDS:
            progress = {"done": t, "total": LOAD_SECONDS}
            yield {"t": t + 1, "server": SERVER, "rank": "TP0", "event": "load_progress", "fields": progress}
        elif t == STUCK_SECONDS:
            yield {"t": t + 1, "server": SERVER, "event": "ready"}


def command_seconds(file: Path) -> tuple[float, float]:
    """Best of three runs of the whole command: seconds, and seconds of CPU."""
    seconds, cpu = [], []
    for _ in range(3):
        begun, used = time.perf_counter(), children_cpu()
        subprocess.run([sys.executable, "-m", "stallwatch", "replay", str(file)], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - begun)
        cpu.append(children_cpu() - used)
    return min(seconds), min(cpu)


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tick_milliseconds(file: Path) -> tuple[float, float]:
    """CPU per server and tick without parsing: over the first and over the last quarter of the hour."""
    records: list[Line] = list(
        Reader(str(file), known_names(read_signals(), derived_signals())).read(lines_of(str(file)))
    )
    header = records.pop(0)
    assert isinstance(header, Header)
    quarter = SECONDS / 4
    best = [float("inf"), float("inf")]
    for _ in range(3):
        run, spent, looks = Replay(header, frozenset((SERVER,)), None, ()), [0.0, 0.0], [0, 0]
        for record in records:
            begun = time.process_time()
            run.take(record)
            used = time.process_time() - begun
            t = record.t if isinstance(record, Look) else record.at if isinstance(record, Event) else 0.0
            if not quarter <= t < SECONDS - quarter:
                late = int(t >= quarter)
                spent[late] += used  # a look is taken when the next record comes
                looks[late] += isinstance(record, Look)
        best = [min(before, used / number) for before, used, number in zip(best, spent, looks, strict=True)]
    return best[0] * 1000, best[1] * 1000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hour.jsonl"
        file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines()))
        early, late = tick_milliseconds(file)
        seconds, cpu = command_seconds(file)
        result = {
            "readings_per_look": len(list(readings(0))),
            "looks": SECONDS // INTERVAL,
            "mib": round(file.stat().st_size / MIB, 1),
            "seconds": round(seconds, 2),
            "cpu_seconds": round(cpu, 2),
            "cpu_ms_per_server_and_tick_early": round(early, 3),
            "cpu_ms_per_server_and_tick_late": round(late, 3),
        }
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
