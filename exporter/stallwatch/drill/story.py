"""What SGLang 0.5.23 writes while it starts: the lines of a stand-in, in order; `Sglang` tells who says them.  Pure.

Line shapes follow the release's formatter; values are invented.  `{x}` figures do not matter to anyone who
reads the log for progress.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import datetime

from .conditions import Condition
from .telling import Speaker, Stage

SHARDS = 163
PLANTED_SECRET = "planted-admin-key-7f3a"  # noqa: S105  # must never leave the log: tests look for it
LINES_AFTER_READY = 3

_MODELS = ("midashenglm", "nano_nemotron_vl", "paddleocr_vl", "points_v15_chat", "step3_vl", "ernie45_vl")
_CAPTURE_STEPS = 23


def stamp(now: datetime, text: str, rank: int | None = None) -> str:
    """One line as SGLang's formatter writes it; `rank` None = the main process."""
    prefix = "" if rank is None else f" TP{rank}"
    return f"[{now:%Y-%m-%d %H:%M:%S}{prefix}] {text}\n"


def arguments(model_path: str, ranks: int, port: int, nodes: int = 1, number: int = 0) -> str:
    return (
        f"server_args={{'model_path': '{model_path}', 'tokenizer_path': '{model_path}', 'host': '127.0.0.1', "
        f"'port': {port}, 'tp_size': {ranks}, 'pp_size': 1, 'dp_size': 1, 'nnodes': {nodes}, 'node_rank': {number}, "
        f"'load_format': 'auto', 'api_key': None, 'admin_api_key': '{PLANTED_SECRET}', "
        f"'watchdog_timeout': 300}}"
    )


def joining() -> list[str]:
    """Before and after the ranks find each other; every rank."""
    return [
        "Init parallel begin.",
        "Init parallel ends. elapsed=1.83 s",
        "Memory baseline taken. mem usage=1.02 GB",
    ]


def load_begin() -> str:
    return "Load weight begin. avail mem=138.01 GB"


def load_end(seconds: float) -> str:
    return (
        f"Load weight end. elapsed={seconds:.2f} s, type=DeepseekV3ForCausalLM, quant=fp8, "
        f"avail mem=57.10 GB, mem usage=80.91 GB."
    )


def shard_bar(share: float) -> str:
    """The bar of rank 0 as it is redrawn: a carriage return, no newline before it is full."""
    done = int(share * SHARDS)
    end = "\n" if done == SHARDS else ""
    return (
        f"\rMulti-thread loading shards: {done * 100 // SHARDS:3d}% Completed | {done}/{SHARDS} "
        f"[00:{done % 60:02d}<00:{(SHARDS - done) % 60:02d},  7.41it/s]{end}"
    )


def after_barrier() -> list[str]:
    return [
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 512000, KV size: 33.50 GB",
        "Memory pool end. avail mem=20.11 GB",
    ]


def capture_begin() -> str:
    return "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=19.50 GB"


def capture_end() -> str:
    return "Capture target decode CUDA graph end. elapsed=12.31 s, mem usage=1.42 GB, avail mem=18.08 GB."


def capture_bar(done: int) -> str:
    end = "\n" if done == _CAPTURE_STEPS else ""
    return (
        f"\rCapturing batches (bs={8 * (_CAPTURE_STEPS - done) + 1} avail_mem=18.95 GB): "
        f"{done * 100 // _CAPTURE_STEPS:3d}%|{'#' * (done // 3):<8}| {done}/{_CAPTURE_STEPS} "
        f"[00:{done:02d}<00:{_CAPTURE_STEPS - done:02d},  1.85s/it]{end}"
    )


def capture_bars() -> Iterator[str]:
    return (capture_bar(done) for done in range(_CAPTURE_STEPS + 1))


def scheduler_ready() -> str:
    """Rank 0, once."""
    return (
        "max_total_num_tokens=512000, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=2048, context_len=163840, available_gpu_mem=18.08 GB"
    )


def serving(pid: int, port: int) -> list[tuple[int | None, str]]:
    """From the first rank's word to the last line before ready, as (rank, text)."""
    return [
        (
            None,
            "Engine startup timings (s): load_weight=4.02, kv_cache_allocation=0.21, scheduler_e2e=9.80, "
            "cuda_graph={'decode': 12.31}, tokenizer_e2e=10.44",
        ),
        (None, f"INFO:     Started server process [{pid}]"),
        (None, "INFO:     Waiting for application startup."),
        (None, "INFO:     Application startup complete."),
        (None, f"INFO:     Uvicorn running on http://127.0.0.1:{port} (Press CTRL+C to quit)"),
        (None, access("127.0.0.1:50114", "GET", "/model_info")),
        (0, "Prefill batch, #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00, #queue-req: 0"),
        (None, access("127.0.0.1:50120", "POST", "/generate")),
    ]


def ready() -> str:
    return "The server is fired up and ready to roll!"


def first_visitors() -> list[str]:
    paths = ("/health", "/v1/models", "/health")
    return [access(f"127.0.0.1:{50200 + n}", "GET", paths[n]) for n in range(LINES_AFTER_READY)]


def access(client: str, method: str, path: str, status: int = 200) -> str:
    return f'INFO:     {client} - "{method} {path} HTTP/1.1" {status} OK'


def leaving(pid: int) -> list[str]:
    return [
        "INFO:     Shutting down",
        "INFO:     Waiting for application shutdown.",
        "INFO:     Application shutdown complete.",
        f"INFO:     Finished server process [{pid}]",
    ]


def import_notices(condition: Condition, rank: int) -> list[str]:
    """Notices of optional model files that cannot be imported, as every rank prints them.

    As many as make the whole log `total_lines` long; one of each when no length is asked for.
    """
    total = len(_MODELS) * condition.ranks
    if condition.total_lines:
        total = max(0, condition.total_lines - _lines_without_notices(condition.ranks))
    mine = len(range(rank, total, condition.ranks))
    return [
        f"Ignore import error when loading sglang.srt.models.{model}{number // len(_MODELS) or ''}: "
        f"No module named 'transformers.models.{model}'"
        for number, model in zip(range(mine), itertools.cycle(_MODELS), strict=False)
    ]


def _lines_without_notices(ranks: int) -> int:
    every_rank = len(joining()) + len((load_begin(), load_end(0.0))) + len(after_barrier())
    every_rank += len((capture_begin(), capture_end()))
    first_rank = len(("shard bar", "capture bar", scheduler_ready()))
    main = len(("arguments", "ready")) + len(serving(0, 0)) + LINES_AFTER_READY
    return ranks * every_rank + first_rank + main


class Sglang:
    """See telling.Story."""

    module = "sglang.launch_server"

    def command(self, stage: Stage) -> list[str]:
        words = ["-m", self.module, "--model-path", stage.model, "--tp-size", str(stage.ranks)]
        words += ["--host", "127.0.0.1", "--port", str(stage.port)]
        if stage.nodes > 1:
            words += ["--nnodes", str(stage.nodes), "--node-rank", str(stage.number)]
            words += ["--dist-init-addr", "192.0.2.10:20000"]
        return words

    def stamp_line(self, now: datetime, text: str, speaker: Speaker) -> str:
        return stamp(now, text, speaker.rank)

    def title(self, speaker: Speaker) -> str:
        return "sglang::detokenizer" if speaker.rank is None else f"sglang::scheduler_TP{speaker.rank}"

    def opening(self, stage: Stage) -> list[str]:
        return [arguments(stage.model, stage.ranks, stage.port, stage.nodes, stage.number)]

    def engine_opening(self, stage: Stage) -> list[str]:
        return []

    def notices(self, condition: Condition, rank: int) -> list[str]:
        return import_notices(condition, rank)

    def before_meeting(self, rank: int, stage: Stage) -> list[str]:
        return joining()[:1]

    def after_meeting(self, rank: int, stage: Stage) -> list[str]:
        return joining()[1:]

    def begin_load(self, rank: int, stage: Stage) -> list[str]:
        return [load_begin()]

    def bar(self, share: float, speaker: Speaker) -> str:
        return shard_bar(share)

    def end_load(self, rank: int, seconds: float) -> list[str]:
        return [load_end(seconds)]

    def begin_compile(self) -> list[str]:
        return [
            "Entering DeepGEMM JIT Pre-Compile session. It may take a long time (typically 10-20 mins)",
            "Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=4096, K=7168, num_groups=1 with all Ms.",
        ]

    def end_compile(self) -> list[str]:
        return []

    def pools(self, rank: int) -> list[str]:
        return after_barrier()

    def begin_capture(self, rank: int) -> list[str]:
        return [capture_begin()]

    def capture_bars(self, speaker: Speaker) -> Iterator[str]:
        return capture_bars()

    def end_capture(self, rank: int) -> list[str]:
        return [capture_end(), *([scheduler_ready()] if rank == 0 else [])]

    def engine_end(self) -> list[str]:
        return []

    def going_online(self, pid: int, port: int) -> list[tuple[Speaker, str]]:
        return [(Speaker("main" if rank is None else "rank", pid, rank), text) for rank, text in serving(pid, port)]

    def online(self) -> list[str]:
        return [ready(), *first_visitors()]

    def access_line(self, client: str, method: str, path: str, status: int = 200) -> str:
        return access(client, method, path, status)

    def port_in_use(self, port: int) -> str:
        return f"port {port} is in use. Waiting for 5 seconds for the server to be available."

    def heartbeat(self) -> str:
        return "No available block found in 60 second."

    def stats(self, running: int, tokens_per_second: float) -> str:
        return (
            f"Decode batch, #running-req: {running}, #token: 4711, token usage: 0.02, cuda graph: True, "
            f"gen throughput (token/s): {tokens_per_second:.2f}, #queue-req: 0"
        )

    def farewell(self, pid: int) -> list[str]:
        return leaving(pid)

    def metrics(self, running: int, prompt_tokens: int, tokens: int, finished: int) -> str:
        return ""
