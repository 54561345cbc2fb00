"""What vLLM 0.33 writes while it starts.  Pure.

Line shapes follow the release; values are invented.  Only the first rank speaks of loads and captures.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from .conditions import Condition
from .telling import Speaker, Stage

VERSION = "0.33.0"
SHARDS = 48
_CAPTURE_STEPS = 23
_UVICORN = "INFO:     "


class Vllm:
    """See telling.Story."""

    module = "vllm.entrypoints.cli.main"

    def command(self, stage: Stage) -> list[str]:
        return [
            *("-m", self.module, "serve", stage.model),
            *("--tensor-parallel-size", str(stage.ranks), "--host", "127.0.0.1", "--port", str(stage.port)),
        ]

    def stamp_line(self, now: datetime, text: str, speaker: Speaker) -> str:
        level = "" if text.startswith(_UVICORN) else f"INFO {now:%m-%d %H:%M:%S} "
        return f"{_name(speaker)} {level}{text}\n"

    def title(self, speaker: Speaker) -> str:
        return "VLLM::EngineCore" if speaker.rank is None else f"VLLM::Worker_TP{speaker.rank}"

    def opening(self, stage: Stage) -> list[str]:
        return [
            f"[api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version {VERSION}",
            f"[api_utils.py:286] non-default args: {{'model_tag': '{stage.model}', 'host': '127.0.0.1', "
            f"'port': {stage.port}, 'model': '{stage.model}', 'tensor_parallel_size': {stage.ranks}}}",
            "[model.py:733] Resolved architecture: DeepseekV3ForCausalLM",
        ]

    def engine_opening(self, stage: Stage) -> list[str]:
        return [
            f"[core.py:133] Initializing a V1 LLM engine (v{VERSION}) with config: model='{stage.model}', "
            f"speculative_config=None, tensor_parallel_size={stage.ranks}, pipeline_parallel_size=1, "
            "data_parallel_size=1"
        ]

    def notices(self, condition: Condition, rank: int) -> list[str]:
        return []

    def before_meeting(self, rank: int, stage: Stage) -> list[str]:
        return [
            f"[parallel_state.py:1906] world_size={stage.ranks} rank={rank} local_rank={rank} "
            "distributed_init_method=tcp://127.0.0.1:41000 backend=nccl"
        ]

    def after_meeting(self, rank: int, stage: Stage) -> list[str]:
        return _first(
            rank,
            f"[parallel_state.py:2350] rank {rank} in world size {stage.ranks} is assigned as DP rank 0, PP rank 0, "
            f"PCP rank 0, TP rank {rank}, EP rank N/A, EPLB rank N/A",
        )

    def begin_load(self, rank: int, stage: Stage) -> list[str]:
        return _first(rank, f"[gpu_model_runner.py:338] Starting to load model {stage.model}...")

    def bar(self, share: float, speaker: Speaker) -> str:
        done = int(share * SHARDS)
        return (
            f"\r{_name(speaker)} Loading safetensors checkpoint shards: {done * 100 // SHARDS:3d}% Completed | "
            f"{done}/{SHARDS} [00:{done:02d}<00:{SHARDS - done:02d},  1.69s/it]" + ("\n" if done == SHARDS else "")
        )

    def end_load(self, rank: int, seconds: float) -> list[str]:
        return _first(
            rank,
            f"[default_loader.py:501] Loading weights took {seconds:.2f} seconds",
            f"[gpu_model_runner.py:501] Model loading took 70.1 GiB and {seconds:.6f} seconds",
        )

    def begin_compile(self) -> list[str]:
        return ["[backends.py:711] [backbone] Starting torch.compile"]

    def end_compile(self) -> list[str]:
        return ["[monitor.py:91] [backbone] Initial profiling/warmup run took 0.03 s"]

    def pools(self, rank: int) -> list[str]:
        return _first(
            rank,
            *self.begin_compile(),
            *self.end_compile(),
            "[gpu_worker.py:298] Available KV cache memory: 51.21 GiB",
        )

    def begin_capture(self, rank: int) -> list[str]:
        return []

    def capture_bars(self, speaker: Speaker) -> Iterator[str]:
        for done in range(_CAPTURE_STEPS + 1):
            yield (
                f"\r{_name(speaker)} Capturing CUDA graphs (PIECEWISE): {done * 100 // _CAPTURE_STEPS:3d}%|"
                f"{'#' * (done // 3):<8}| {done}/{_CAPTURE_STEPS} [00:{done:02d}<00:{_CAPTURE_STEPS - done:02d},  "
                "8.50it/s]" + ("\n" if done == _CAPTURE_STEPS else "")
            )

    def end_capture(self, rank: int) -> list[str]:
        return _first(rank, "[gpu_model_runner.py:3244] Graph capturing finished in 14 secs, took 0.61 GiB")

    def engine_end(self) -> list[str]:
        return [
            "[kv_cache_utils.py:2327] GPU KV cache size: 524,288 tokens, Maximum concurrency for 4096 tokens per "
            "request: 128.00x",
            "[core.py:402] init engine (profile, create kv cache, warmup model) took 21.89 s",
        ]

    def going_online(self, pid: int, port: int) -> list[tuple[Speaker, str]]:
        main = Speaker("main", pid)
        return [
            (main, f"[entry.py:140] Starting vLLM server on http://127.0.0.1:{port}"),
            (main, "[launcher.py:186] Available routes are:"),
            (main, "[launcher.py:195] Route: /health, Methods: GET"),
            (main, f"{_UVICORN}Started server process [{pid}]"),
            (main, f"{_UVICORN}Waiting for application startup."),
        ]

    def online(self) -> list[str]:
        return [f"{_UVICORN}Application startup complete."]

    def access_line(self, client: str, method: str, path: str, status: int = 200) -> str:
        return f'{_UVICORN}{client} - "{method} {path} HTTP/1.1" {status} OK'

    def port_in_use(self, port: int) -> str:
        return f"[launcher.py:88] port {port} is in use."

    def heartbeat(self) -> str:
        return (
            "[shm_broadcast.py:871] No available shared memory broadcast block found in 60 seconds. This typically "
            "happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv "
            "cache quantization)."
        )

    def stats(self, running: int, tokens_per_second: float) -> str:
        return (
            f"[loggers.py:335] Engine 000: Avg prompt throughput: 6.0 tokens/s, Avg generation throughput: "
            f"{tokens_per_second:.1f} tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%, "
            "Prefix cache hit rate: 0.0%"
        )

    def farewell(self, pid: int) -> list[str]:
        return [
            "[launcher.py:254] [shutdown] API server: shutdown triggered",
            f"{_UVICORN}Shutting down",
            f"{_UVICORN}Finished server process [{pid}]",
        ]

    def metrics(self, running: int, prompt_tokens: int, tokens: int, finished: int) -> str:
        model = 'engine="0",model_name="models/drill-moe"'
        lines = []
        for name, kind, more, value in (
            ("num_requests_running", "gauge", "", running),
            ("num_requests_waiting", "gauge", "", 0),
            ("prompt_tokens_total", "counter", "", prompt_tokens),
            ("generation_tokens_total", "counter", "", tokens),
            ("request_success_total", "counter", ',finished_reason="stop"', finished),
        ):
            lines += [f"# TYPE vllm:{name.removesuffix('_total')} {kind}", f"vllm:{name}{{{model}{more}}} {value:.1f}"]
        return "\n".join(lines) + "\n"


def _name(speaker: Speaker) -> str:
    names = {"main": "APIServer", "engine": "EngineCore", "script": "MainProcess", "rank": f"Worker_TP{speaker.rank}"}
    return f"({names[speaker.kind]} pid={speaker.pid})"


def _first(rank: int, *lines: str) -> list[str]:
    return list(lines) if rank == 0 else []
