"""No secret comes out: planted in logs, command lines, titles, environments and folders, searched in all we write.

Every kind of secret holds a core of 24 letters and digits.  It counts as found where any eight neighbouring ones of
them stand, in either case, as they are or encoded.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import http.server
import io
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_node import GpuNode, card
from gpu_node import answer as cards
from proc_tree import ProcTree, threads
from proc_tree import Thread as ProcThread
from stallwatch.assembly import Settings, make_daemon
from stallwatch.cli import COMMANDS as COMMANDS_OF_OURS
from stallwatch.cli import main
from stallwatch.config import Config, Thresholds, load_config
from stallwatch.daemon import Daemon
from stallwatch.exposition import Exposition
from stallwatch.frameworks import load_frameworks
from stallwatch.log_format import Formatter
from stallwatch.memory import Memory
from stallwatch.model import Reading, Report, Scene
from stallwatch.parse.report import format_text, parse_files
from stallwatch.presentation import document, text, verdict_line
from stallwatch.recordings.record import Recorder
from stallwatch.sources import Host, Moment
from stallwatch.sources.discovery import read_facts
from stallwatch.sources.gpus import nvml
from stallwatch.sources.gpus.collector import Gpu
from stallwatch.sources.gpus.kernel_log import KernelLog
from stallwatch.sources.gpus.nvml_child import CardAnswer
from stallwatch.sources.gpus.xid_log import XidLog
from stallwatch.sources.logs.search import literal_finder
from stallwatch.state_file import open_state
from stallwatch.strict_yaml import InputError
from stallwatch.web import Published, serve_http
from stallwatch.web.app import App
from stallwatch.web.log_facts import log_facts
from stallwatch.web.page import Beside, html
from test_endpoints import Peer, answer, look, scene_of, source, values

FRAMEWORKS = load_frameworks()
WINDOW = 8


# --- what is planted -----------------------------------------------------------------------------------------

KINDS = {
    "openai": "sk-proj-{}",
    "anthropic": "sk-ant-api03-{}",
    "hugging_face": "hf_{}",
    "aws_access_key": "AKIA{}",
    "aws_secret_key": "wJalr/{}/bPx",
    "aws_session_token": "FwoGZXIvYXdzE{}==",
    "bearer": "Authorization: Bearer {}",
    "basic": "Authorization: Basic {}",
    "header_dictionary": "{{'authorization': 'Bearer {}', 'accept': '*/*'}}",
    "api_key_header": "X-API-Key: {}",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.{}.c2ln",
    "github": "ghp_{}",
    "gitlab": "glpat-{}",
    "slack": "xoxb-1234-{}",
    "google_key": "AIza{}",
    "google_token": "ya29.{}",
    "azure_storage": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={}==",
    "azure_signature": "https://a.blob.core.windows.net/c?sv=2024&sig={}%3D",
    "presigned_url": "https://b.s3.amazonaws.com/k?X-Amz-Signature={}",
    "query_token": "https://models.example/m?access_token={}",
    "url_user": "https://user:{}@models.example/org/m",
    "git_remote": "https://oauth2:{}@git.example/org/m.git",
    "postgres": "postgresql://vllm:{}@db.example:5432/x",
    "redis": "redis://:{}@cache.example:6379/0",
    "mongodb": "mongodb+srv://u:{}@c.example/?w=majority",
    "amqp": "amqp://guest:{}@q.example//",
    "proxy": "http_proxy=http://me:{}@proxy.example:3128",
    "ssh_key": "-----BEGIN OPENSSH PRIVATE KEY----- b3BlbnNzaC1rZXktdjE{}",
    "pem_key": "-----BEGIN PRIVATE KEY-----\\nMIIEvQ{}\\n-----END PRIVATE KEY-----",
    "certificate_password": "--ssl-keyfile-password {}",
    "npm": "npm_{}",
    "pypi": "pypi-AgEIcHlwaS5vcmc{}",
    "docker": '{{"auths": {{"ghcr.io": {{"auth": "{}"}}}}}}',
    "stripe": "sk_live_{}",
    "sendgrid": "SG.{}.x",
    "wandb": "WANDB_API_KEY={}",
    "ngc": "nvapi-{}",
    "vault": "hvs.{}",
    "kubernetes": "token: {}",
    "cookie": "Cookie: session={}; path=/",
    "set_cookie": "Set-Cookie: sid={}; HttpOnly",
    "password": "password={}",
    "password_json": '{{"user": "u", "password": "{}"}}',
    "databricks": "dapi{}",
    "telegram": "bot123456:{}",
    "datadog": "DD_API_KEY='{}'",
    "age": "AGE-SECRET-KEY-1{}",
    "prompt": "my password is {} please remember it",
    "base64_blob": "data:;base64,{}",
}


def core(kind: str) -> str:
    digest = base64.b64encode(hashlib.sha512(kind.encode()).digest()).decode()
    return re.sub(r"[^A-Za-z0-9]", "", digest)[:24]


SECRETS = {kind: form.format(core(kind)) for kind, form in KINDS.items()}


def needles(kind: str) -> Iterator[str]:
    """What of a secret must not be found, in small letters."""
    plain = core(kind)
    for start in range(len(plain) - WINDOW + 1):
        yield plain[start : start + WINDOW].lower()
    data = plain.encode()
    yield data.hex()
    for shift in range(3):
        yield base64.b64encode(b"x" * shift + data).decode()[4:-4].lower()
    yield plain[::-1].lower()


NEEDLES = [(needle.encode(), kind) for kind in KINDS for needle in needles(kind)]
FIND = literal_finder([needle for needle, _ in NEEDLES])


def leaks(what: str) -> set[str]:
    """The kinds of secrets of which something stands in a text."""
    return {NEEDLES[index][1] for index, _ in FIND(what.lower().encode(errors="replace"))}


def assert_clean(written: Mapping[str, str]) -> None:
    found = {name: sorted(leaks(what)) for name, what in written.items()}
    assert {name: kinds for name, kinds in found.items() if kinds} == {}


def test_forty_kinds_are_planted_and_a_leak_of_any_would_be_found() -> None:
    assert len(KINDS) >= 40
    for kind, secret in SECRETS.items():
        plain = core(kind)
        assert leaks(secret) == {kind}
        assert leaks(f"cut off: {plain[:10]}") == {kind}
        assert leaks(base64.b64encode(f"a:{plain}".encode()).decode()) == {kind}
        assert leaks(plain.encode().hex()) == {kind}
    assert leaks("an innocent text without any") == set()


# --- logs ----------------------------------------------------------------------------------------------------

TIME = "2026-06-02 08:00:01"
SGLANG, VLLM = f"[{TIME}{{rank}}] ", "(APIServer pid=42) INFO 06-02 08:00:01 [api.py:1] "
SGLANG_0 = SGLANG.format(rank="")
ANY_SERVER = (
    "{}",
    "export X={}",
    'INFO:     10.0.0.1:4242 - "GET /v1/models?api_key={} HTTP/1.1" 200 OK',
    'INFO:     10.0.0.1:4242 - "GET /{} HTTP/1.1" 401 Unauthorized',
    "Traceback (most recent call last): {}",
    "ValueError: {}",
    "RuntimeError: {} Connection closed by peer",
    "torch.OutOfMemoryError: {}",
    "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: {}",
    '  File "/srv/{}/run.py", line 1, in <module>',
    "Downloading {}: 10%|#         | 1/10 [00:01<00:09,  1.0s/it]",
    "{}.safetensors:  50%|#####     | 1.0G/2.0G [00:10<00:10, 100MB/s]",
    "Loading {} checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.0it/s]",
    'Waited on lock file "/root/{}/lock" for 10 s',
    "Still waiting to acquire lock on /root/.cache/{} (elapsed: 10.0 seconds)",
    "host:1:1 [0] NCCL INFO NET/Plugin: {}",
    "host:1:1 [0] NCCL WARN Call to connect failed: {}",
    "[rank3]:[E602 08:00:01.1 ProcessGroupNCCL.cpp:6] [Rank 3] Watchdog caught collective operation timeout: {}",
    "[W602 08:00:01.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=1, addr={}): x",
    "\x1b[31m{}\x1b[0m",
    "\r{}\r",
)
FORMS: Mapping[str, tuple[str, ...]] = {
    "sglang": (
        SGLANG_0 + "server_args=ServerArgs(model_path='/m', tp_size=2, api_key='{}', admin_api_key=None)",
        SGLANG_0 + "server_args={{'model_path': '{}', 'tp_size': 2, 'api_key': '{}'}}",
        SGLANG.format(rank=" TP1") + "Load weight begin. {}",
        SGLANG.format(rank=" TP1") + "Scheduler hit an exception: {}",
        SGLANG_0 + "Receive: obj=GenerateReqInput(text='{}', headers={{'authorization': '{}'}})",
        SGLANG_0 + 'INFO:     10.0.0.1:1 - "POST /generate?key={} HTTP/1.1" 200 OK',
        SGLANG.format(rank=" {}") + "Load weight begin. avail mem=1 GB",
        SGLANG_0 + "Prefill batch {}, #new-seq: 1",
    ),
    "vllm": (
        VLLM + "vLLM API server version {}",
        VLLM + "non-default args: {{'model': '{}', 'api_key': ['{}'], 'tensor_parallel_size': 2}}",
        VLLM + "args: Namespace(host=None, api_key='{}', hf_token='{}', tensor_parallel_size=2)",
        VLLM + "Initializing a V1 LLM engine (v0.9.2) with config: model='{}', tensor_parallel_size=2",
        VLLM + "Initializing a V1 LLM engine (v{}) with config: model='m', tensor_parallel_size=2",
        VLLM + "█▄█▀  version {}",
        VLLM + "Received request cmpl-1: prompt: '{}', params: SamplingParams(n=1)",
        "(Worker_TP1 pid=43) INFO 06-02 08:00:01 [x.py:1] Starting to load model {}...",
        "(Worker_{} pid=43) INFO 06-02 08:00:01 [x.py:1] Starting to load model m...",
        "({} pid=43) ERROR 06-02 08:00:01 [core.py:1] EngineCore failed to start. {}",
        "(EngineCore pid=43) ERROR 06-02 08:00:01 [{}] EngineCore encountered a fatal error. {}",
        VLLM + "Route: /{}, Methods: POST",
        '{{"time":"2026-06-02T08:00:01Z","level":"INFO","message":"non-default args: {}","name":"{}"}}',
        '{{"time":"{}","level":"{}","message":"Starting to load model m..."}}',
        '{{"time":"2026-06-02 08:00:01 {}","level":"INFO","message":"vLLM API server version {}"}}',
        '{{"time":"2026-06-02T08:00:01Z","{}":"x","extra":{{"{}":"{}"}},"message":"cut {}',
        "[{}] INFO 06-02 08:00:01 [x.py:1] Starting to load model m...",
    ),
    "trtllm": (
        "[06/02/2026-08:00:01] [TRT-LLM] [I] Using LLM with PyTorch backend {}",
        "[06/02/2026-08:00:01] [TRT-LLM] [RANK 1] [I] LLM Args: model='{}' tokenizer=None api_key='{}'",
        "[TensorRT-LLM][ERROR] {}",
        "[06/02/2026-08:00:01] [TRT-LLM] [RANK 1] [E] {}",
        "[1,3]<stderr>: {}",
    ),
    "tgi": (
        "2026-06-02T08:00:01.123456Z  INFO text_generation_launcher: Args {{",
        '    model_id: "{}",',
        '    api_key: Some("{}"),',
        '    hf_token: Some(\n        "{}",\n    ),',
        '2026-06-02T08:00:01.123456Z  INFO text_generation_launcher: Args {{ model_id: "{}", hf_api_token: "{}" }}',
        '{{"timestamp":"2026-06-02T08:00:01.1Z","level":"INFO","fields":{{"message":"Args {{ api_key: {} }}"}}}}',
        '{{"timestamp":"{}","level":"INFO","fields":{{"message":"Args {{ x"}}}}',
        '{{"timestamp":"2026-06-02 08:00:01 {}","level":"INFO","message":"Args {{ x"}}',
        "2026-06-02T08:00:01.123456Z ERROR text_generation_launcher: {}",
    ),
    "lmdeploy": (
        "2026-06-02 08:00:01,123 - lmdeploy - INFO - api_server.py:1 - Build <pytorch> executor. {}",
        "2026-06-02 08:00:01,123 - lmdeploy - INFO - async_engine.py:1 - input backend=turbomind, api_keys=['{}']",
        "2026-06-02 08:00:01,123 - lmdeploy - ERROR - {}:1 - {}",
        "[TM][INFO][{}] {}",
        "HINT:    Please open http://user:{}@0.0.0.0:23333 in a browser",
    ),
    "llamacpp": (
        "build: 4567 (abcdef0) with {}",
        "0.00.004.658 I srv  llama_server: initializing ... {}",
        "0.00.012.233 W srv  llama_server: security: API key is {}",
        "main: api_keys: ****{}",
        "0.00.018.495 I srv    load_model: loading model '{}'",
        "srv  log_server_r: request: POST /completion?api_key={} 10.0.0.1 200",
    ),
    "dynamo": (
        '2026-06-02T08:00:01.381069Z  INFO dynamo_llm::discovery::watcher: added model model_name="{}" namespace="{}"',
        "2026-06-02T08:00:01.381069Z ERROR dynamo_runtime: {}",
        "2026-06-02T08:00:01.381069Z  INFO {}: x",
        "2026-06-02T08:00:01.381069Z  INFO main: Initializing the worker with config: Config(api_key='{}')",
    ),
    "generic": (
        "2026-06-02 08:00:01 INFO Loading {} 1/4",
        "2026-06-02 08:00:01 ERROR Fatal error: {}",
        "Server is listening on http://u:{}@0.0.0.0:1/",
    ),
}


def planted(form: str, secret: str) -> str:
    return form.format(*[secret] * form.count("{}"))


def log_of(name: str) -> str:
    """A log in which every form holds every secret, after lines by which the framework is known."""
    lines = [planted(form, secret) for form in (*FORMS[name], *ANY_SERVER) for secret in SECRETS.values()]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("logs")
    paths = {name: folder / f"{name}.log" for name in FORMS}
    for name, path in paths.items():
        path.write_text(log_of(name))
    return paths


@pytest.mark.parametrize("reader", [None, *(one.name for one in FRAMEWORKS)])
def test_parse_tells_no_secret_whoever_reads_the_log(reader: str | None, logs: dict[str, Path]) -> None:
    told = parse_files([str(path) for path in logs.values()], reader, FRAMEWORKS)

    assert all(file["lines"] > 2 * len(SECRETS) for file in told["files"])
    assert sum(file["error_lines"] for file in told["files"]) > len(SECRETS)
    assert_clean({"json": json.dumps(told), "text": format_text(told)})


@given(
    name=st.sampled_from(sorted(FORMS)),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    between=st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12),
    data=st.data(),
)
@settings(max_examples=60)
def test_parse_tells_no_secret_wherever_it_stands_in_a_line(
    name: str, kinds: list[str], between: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In the middle of a word, a number, a prefix, an escape: in place of any stretch of a line of the framework."""
    path = tmp_path_factory.getbasetemp() / "wherever.log"
    lines = []
    for kind in kinds:
        line = data.draw(st.sampled_from(FORMS[name])).replace("{{", "{").replace("}}", "}")
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(line))] * 2)))
        lines.append(line[:begin] + SECRETS[kind] + between + SECRETS[kind] + line[end:])
    path.write_text("\n".join(lines), errors="replace")
    told = parse_files([str(path)], name, FRAMEWORKS)

    assert_clean({"json": json.dumps(told), "text": format_text(told)})


@pytest.mark.parametrize("form", ["docker", "cri"])
def test_parse_tells_no_secret_of_a_containers_log(form: str, tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    with path.open("w") as file:
        for number, line in enumerate(log_of("vllm").splitlines()):
            if form == "docker":
                record = {"log": line + "\n", "stream": "stdout", "time": f"2026-06-02T08:00:{number % 60:02}Z"}
                record["attrs"] = {"secret": SECRETS["password"]}  # type: ignore[assignment]
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
            else:
                file.write(f"2026-06-02T08:00:{number % 60:02}Z stderr F {line}\n")
                file.write(f"2026-06-02T08:00:{number % 60:02}Z stderr F:{SECRETS['jwt']} x\n")

    told = parse_files([str(path)], None, FRAMEWORKS)

    assert told["files"][0]["container"] == form
    assert told["files"][0]["framework"] == "vllm"
    assert_clean({"json": json.dumps(told), "text": format_text(told)})


@pytest.mark.parametrize("output", ["text", "json"])
def test_the_command_parse_prints_no_secret_at_any_log_level(
    output: str, logs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    packed = logs["vllm"].with_suffix(".bin")
    packed.write_bytes(bytes(range(32)) * 99 + "".join(SECRETS.values()).encode())
    paths = [str(path) for path in (logs["vllm"], logs["tgi"], packed)]

    with restored_logging():
        status = main(["parse", "--log.level", "debug", "--format", output, *paths])

    said = capsys.readouterr()
    assert status == 2
    assert "is not a text file" in said.err
    assert_clean({"out": said.out, "err": said.err})


# --- a whole cycle -------------------------------------------------------------------------------------------


class restored_logging:  # noqa: N801  # reads as a statement
    """The root logger is as before."""

    def __enter__(self) -> None:
        root = logging.getLogger()
        self.before = root.handlers[:], root.level

    def __exit__(self, *error: object) -> None:
        root = logging.getLogger()
        root.handlers[:], level = self.before
        root.setLevel(level)


class Answers(http.server.BaseHTTPRequestHandler):
    """A server that answers everything with secrets, and remembers what it was asked."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.path} {self.headers['Authorization']}")
        self.send_response(401, SECRETS["bearer"])
        for name, secret in SECRETS.items():
            self.send_header(f"X-{name.replace('_', '-')}", secret)
        self.end_headers()
        self.wfile.write("\n".join(SECRETS.values()).encode())

    def log_message(self, *arguments: object) -> None:
        """It says nothing."""


@pytest.fixture(scope="module")
def talkative() -> Iterator[int]:
    """The port of a server on loopback."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def configuration(folder: Path, port: int) -> Path:
    """One server is asked with a token, under a URL that holds a key; another's token file is none."""
    (folder / "token").write_text(core("bearer") + "\n")
    file = folder / "stallwatch.yml"
    file.write_text(
        f"""
servers:
  - name: asked
    framework: vllm
    match: {{command: "vllm serve .*{core("url_user")}"}}
    health: {{url: "http://127.0.0.1:{port}/{core("cookie")}?key={core("query_token")}", bearer_file: "{folder}/token"}}
    logs: ["/{core("prompt")}/v*.log"]
  - name: broken
    framework: sglang
    match: {{command: "sglang.launch_server"}}
    health: {{url: "http://127.0.0.1:{port}/", bearer_file: "/{core("kubernetes")}/missing"}}
"""
    )
    return file


class Kept(logging.Handler):
    """Our own log, at its most talkative, in both of its forms."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        self._formatters = (Formatter(False), Formatter(True))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [formatter.format(record) for formatter in self._formatters]


def flags(*names: str) -> list[str]:
    """Every secret as the value of flags, in both ways of writing."""
    words = []
    for number, secret in enumerate(SECRETS.values()):
        name = names[number % len(names)]
        words += [f"{name}={secret}"] if number % 2 else [name, secret]
    return words


COMMANDS: Mapping[str, list[str]] = {
    "vllm": [
        *("vllm", "serve", f"https://user:{core('url_user')}@hub.example/{core('vault')}/org/m?token={core('npm')}"),
        *("-tp", "2", "--port", "8000", "--served-model-name"),
        f"https://user:{core('slack')}@hub.example/{core('jwt')}/org/m?token={core('github')}",
        *flags("--api-key", "--ssl-keyfile-password", "--hf-token", "--middleware", "--x"),
        *("--speculative-config", f'{{"model": "/{core("jwt")}/a/b", "token": "{core("github")}", "method": "eagle"}}'),
    ],
    "sglang": [
        *("python3", "-m", "sglang.launch_server", "--model-path", f"/srv/{core('docker')}/org/m", "--tp", "2"),
        f"--served-model-name=oauth2:{core('git_remote')}@git.example/{core('npm')}/org/m",
        *("--port", "30000", "--nnodes", "2", "--dist-init-addr", f"u:{core('amqp')}@10.0.0.1:5000"),
        *flags("--api-key", "--admin-api-key", "--storage-key"),
        *("--speculative-algorithm", SECRETS["pem_key"]),
    ],
    "llamacpp": [
        *("llama-server", "-m", f"s3://{core('aws_access_key')}:x@bucket/a/b/m.gguf#{core('slack')}", "--port", "9000"),
        *("--alias", f"b/m.gguf&api_key={core('vault')}"),
        *flags("--api-key", "-hft", "--hf-token"),
    ],
    "lmdeploy": [
        "lmdeploy",
        "serve",
        "api_server",
        "/m/org/m",
        *("--model-name", f"org/m {SECRETS['bearer']}"),
        *flags("--api-keys", "--ssl"),
        "--server-port",
        "23333",
    ],
    "tgi": ["text-generation-launcher", "--model-id", "org/m", "--port", "3000", *flags("--api-key", "--env")],
    "trtllm": ["trtllm-serve", "org/m", *flags("--api_key", "--hf_token"), "--port", "8001"],
    "dynamo": ["python3", "-m", "dynamo.frontend", *flags("--api-key"), "--http-port", "8002"],
}
ENVIRON = {f"SECRET_{kind.upper()}": secret for kind, secret in SECRETS.items()} | {
    "SLURM_JOB_ID": SECRETS["slack"],
    "RANK": core("jwt"),
    "HF_TOKEN": SECRETS["hugging_face"],
    "VLLM_API_KEY": SECRETS["openai"],
    "PWD": f"/home/{core('password')}",
}


class Machine:
    """A tree of processes that runs one server of each kind, everything about it full of secrets."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / core("pem_key")
        self.tree = ProcTree(self.root / "proc")
        boot = self.tree.root / "sys/kernel/random"
        boot.mkdir(parents=True)
        (boot / "boot_id").write_text(f"{core('sendgrid')}\n")
        (self.tree.root / "meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 1 kB\nCached: 1 kB\n")
        (self.tree.root / "vmstat").write_text("oom_kill 0\n")
        for number, name in enumerate(COMMANDS):
            self._add(1000 + 100 * number, name)

    def _add(self, pid: int, name: str) -> None:
        argv = COMMANDS[name]
        comm = "python3" if argv[0] == "python3" else argv[0][:15]
        cgroup = f"0::/build-{core('vault')}/{core('npm')}/job\n"
        given: dict[str, Any] = {"environ": ENVIRON, "cpu": 1.0, "io": {"rchar": 5}, "cgroup": cgroup}
        given["tasks"] = threads(3, ProcThread(wchan="futex_do_wait"), pid)
        self.tree.add(pid, argv, comm=comm, **given)
        for rank in range(2):
            child = pid + 10 + rank
            given["tasks"] = threads(2, ProcThread(), child)
            titles = {
                "vllm": [f"VLLM::Worker_TP{rank}"],
                "sglang": [f"sglang::scheduler_TP{rank}", SECRETS["bearer"]],
            }
            title = titles.get(name, ["python3", "-c", f"key='{SECRETS['jwt']}'", *SECRETS.values()])
            self.tree.add(child, title, comm=title[0][:15], ppid=pid, **given)
        helper = [f"/opt/{core('hugging_face')}/nvcc", *SECRETS.values()]
        self.tree.add(pid + 20, helper, comm=core("openai")[:15], ppid=pid + 10)
        log = self.root / core("prompt") / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text(log_of(name))
        for stream in (1, 2):
            self.tree.redirect(pid, stream, log)
        self.tree.redirect(pid, 5, self.root / core("github") / "lock")


@dataclass
class Cycle:
    """A daemon over a machine: its collectors look in turn, without threads."""

    daemon: Daemon
    reports: list[Report]

    def steps(self, number: int) -> Report:
        for _ in range(number):
            for poller in self.daemon.pollers:
                result = poller.turn()
                assert result.error is None, (result.source, result.error)
                self.daemon.gather()
            self.daemon.tick()
        return self.reports[-1]


@dataclass
class Life:
    """What a machine full of secrets made us write, and what it was made from."""

    machine: Machine
    report: Report
    config_file: Path
    state_folder: Path
    remembered: str
    log: str
    recording: Path
    url: str


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, talkative: int) -> Iterator[Life]:
    folder = tmp_path_factory.mktemp("life")
    machine, kept, recorded = Machine(folder), Kept(), list[str]()
    config_file, state_folder = configuration(folder, talkative), folder / "state"
    state_folder.mkdir(mode=0o700)
    opened = open_state(str(state_folder), str(machine.tree.root))
    assert opened is not None
    state, boot, _ = opened
    reports: list[Report] = []
    recorder = Recorder(recorded.append, 5.0, lambda name: Thresholds(), 0.0)
    with restored_logging():
        logging.getLogger().handlers[:] = [kept]
        logging.getLogger().setLevel(logging.DEBUG)
        settings = Settings(str(config_file), procfs=str(machine.tree.root), rootfs=str(machine.root))
        daemon = make_daemon(settings, reports.append, witness=recorder.witness, memory=Memory(state.seal, boot))
        try:
            report = Cycle(daemon, reports).steps(3)
            remembered = daemon.remembered()
            assert remembered is not None
            state.write(remembered)
            recorder.begin()
        finally:
            daemon.close()
            state.close()
    recording = folder / "recording.jsonl"
    recording.write_text("".join(recorded))
    published = Published(1e9, lambda: report.monotonic)
    published.publish(report)
    http = serve_http(published, ["127.0.0.1:0"], reload=lambda: "the file is wrong")
    try:
        url = f"http://{http.addresses[0]}"
        told = remembered.text(), "\n".join(kept.lines)
        yield Life(machine, report, config_file, state_folder, *told, recording, url)
    finally:
        http.stop()


def test_the_machine_was_read_or_nothing_was_tested(life: Life) -> None:
    report = life.report
    assert {server.server.framework for server in report.servers} == set(COMMANDS)
    read = {reading.labels[0]: reading.value for reading in report.readings if reading.signal.name == "log_lines_total"}
    assert len(read) == len(COMMANDS)
    assert all(value and value > len(SECRETS) for value in read.values())
    assert {server.server.name for server in report.servers} >= {"asked", "broken"}
    assert f"/{core('cookie')}?key={core('query_token')} Bearer {core('bearer')}" in Answers.asked
    assert life.recording.read_text().count("\n") > 10
    assert life.log
    models = {server.server.framework: server.server.model for server in report.servers}
    assert (models["vllm"], models["sglang"], models["llamacpp"]) == ("org/m", "org/m", "b/m.gguf")
    assert models["lmdeploy"] == "org/m"


MODEL_NAMES = (
    "https://user:{}@hub.example/org/m",
    "https://hub.example/{}/org/m",
    "s3://{}:x@bucket/a/m",
    "oauth2:{}@git.example/m",
    "{}@git.example/m",
    "user:{}@git.example",
    "/srv/{}/org/m",
    "org/m?token={}",
    "org/m#{}",
    "org/m&api_key={}",
    "org/m;{}",
    "m token {}",
    "m, api-key: {}",
    "m Bearer {}",
    '{{"name": "m", "key": "{}"}}',
)
"""Names of models with something in them that is none."""
NAMED_BY = {
    **dict.fromkeys(("vllm", "sglang"), "--served-model-name"),
    "llamacpp": "--alias",
    "lmdeploy": "--model-name",
}
SHAPELESS = frozenset(("aws_secret_key",))
"""Secrets that nobody can tell from a name."""


@pytest.mark.parametrize("framework", NAMED_BY)
def test_no_secret_is_told_in_the_name_that_a_server_is_given_for_its_model(framework: str) -> None:
    of = next(each for each in FRAMEWORKS if each.name == framework)
    names = [form.format(core("bearer")) for form in MODEL_NAMES]
    names += [secret for kind, secret in SECRETS.items() if kind not in SHAPELESS]
    shown = {}
    for name in names:
        for words in ([NAMED_BY[framework], name], [f"{NAMED_BY[framework]}={name}"], ["--model-path", name, name]):
            found = read_facts(of, words).model
            shown[f"{words[0]} {name}"] = found

    assert {"org/m", "a/m", "m"} <= set(shown.values())
    assert_clean(shown)


# --- everything that leaves ----------------------------------------------------------------------------------


def files_below(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_bytes().decode(errors="replace")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


ROUTES = ("/", "/live", "/api/v1/report", "/-/healthy", "/-/ready", "/metrics", "/-/reload")
FORMS_OF_A_PAGE = ("text/plain", "application/openmetrics-text;version=1.0.0")


def asked(life: Life, path: str, method: str = "GET", **headers: str) -> str:
    """Everything of the answer: status line, headers and body, unpacked."""
    client = http.client.HTTPConnection(urlsplit(life.url).netloc, timeout=60)
    try:
        client.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = client.getresponse()
        body = answer.read()
        if answer.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        return f"{answer.status} {answer.reason}\n{answer.headers}\n{body.decode()}"
    finally:
        client.close()


def told_by_http(life: Life) -> dict[str, str]:
    """Every route in every form; and what those are told who ask for secrets themselves."""
    found = {f"{path} {form}": asked(life, path, accept=form) for path in ROUTES for form in FORMS_OF_A_PAGE}
    found |= {f"{path} packed": asked(life, path, accept_encoding="gzip") for path in ROUTES}
    found["wrong path"] = asked(life, f"/{core('jwt')}?key={core('npm')}", authorization=SECRETS["bearer"])
    found["wrong method"] = asked(life, f"/metrics?{core('jwt')}", method=core("vault"))
    found["wrong answer type"] = asked(life, "/metrics", accept=SECRETS["password"], cookie=SECRETS["cookie"])
    found["reload"] = asked(life, "/-/reload", method="POST")
    return found


def told_of_the_report(life: Life) -> dict[str, str]:
    """What is made of a report beside HTTP."""
    document_ = document(life.report)
    page = Exposition().page(life.report)
    facts = Beside(log_facts(life.report.readings))
    return {
        "metrics": page.text(False).decode(),
        "openmetrics": page.text(True).decode(),
        "page": html(document_, beside=facts),
        "check": text(document_),
        "verdicts": "\n".join(map(verdict_line, document_["servers"])),
    }


def kept_by_us(life: Life) -> dict[str, str]:
    """The state: told lines, learned budgets and all; and the log of our own at its most talkative, in both forms."""
    kept = {f"state/{name}": content for name, content in files_below(life.state_folder).items()}
    assert any(kept.values())
    return kept | {"remembered": life.remembered, "log": life.log}


def printed(*arguments: str) -> dict[str, str]:
    """What a command of ours writes on stdout and stderr; on the log, too, at its most talkative."""
    out, err = io.StringIO(), io.StringIO()
    with restored_logging(), redirect_stdout(out), redirect_stderr(err):
        status = main([*arguments[:1], "--log.level", "debug", *arguments[1:]])
    command = " ".join(arguments[:1])
    return {f"{command} out": out.getvalue(), f"{command} err": err.getvalue(), f"{command} status": str(status)}


def where(life: Life) -> tuple[str, ...]:
    roots = ("--path.procfs", str(life.machine.tree.root), "--path.rootfs", str(life.machine.root))
    return "--config.file", str(life.config_file), *roots


def by_serve(life: Life) -> dict[str, str]:
    """A cycle with all its threads."""
    return printed("serve", *where(life), "--once", "--log.format", "json")


def by_check(life: Life) -> dict[str, str]:
    """Of a running serve, whose address holds a password and whose JSON is passed on; and watching by itself."""
    address = life.url.replace("://", f"://user:{core('url_user')}@") + f"/?{core('query_token')}"
    nobody = f"http://user:{core('url_user')}@127.0.0.1:1/prefix?{core('jwt')}"
    told = {form: printed("check", "--url", address, "--stacks", "--format", form) for form in ("text", "json")}
    assert all("sglang" in parts["check out"] for parts in told.values())
    told["alone"] = printed("check", "--url", nobody, *where(life), "--for", "2s", "--stacks")
    told["wrong"] = printed("check", "--url", f"ftp://{core('url_user')}@h")
    return {f"{name} {key}": said for name, parts in told.items() for key, said in parts.items()}


def by_record(life: Life) -> dict[str, str]:
    out = life.state_folder.parent / "by-record.jsonl"
    for seconds in (2, 20, 120):  # a busy machine may take longer for its first looks
        out.unlink(missing_ok=True)
        said = printed("record", *where(life), "--out", str(out), "--for", f"{seconds}s")
        if out.stat().st_size > 1000:
            break
    assert out.stat().st_size > 1000
    return said | {"recording": out.read_text(), "in one process": life.recording.read_text()}


def by_replay(life: Life) -> dict[str, str]:
    """Of a recording, and of such as hold a secret where none belongs."""
    told = {form: printed("replay", "--format", form, str(life.recording)) for form in ("text", "json")}
    broken = life.recording.with_name("broken.jsonl")
    header = life.recording.read_text().partition("\n")[0]
    for kind, secret in SECRETS.items():
        line = {"t": 1e6, secret: secret, "readings": [[secret, {secret: secret}, 1]]}
        broken.write_text(f"{header}\n{json.dumps(line)}\n")
        told[kind] = printed("replay", str(broken))
    return {f"{name} {key}": said for name, parts in told.items() for key, said in parts.items()}


def by_parse(life: Life) -> dict[str, str]:
    """The name of a file is the caller's own word, and is said again."""
    log = str(next(life.machine.root.rglob("vllm.log")))
    said = {form: printed("parse", "--format", form, log) for form in ("text", "json")}
    return {f"{key} {form}": part.replace(log, "") for form, parts in said.items() for key, part in parts.items()}


OUTLETS: Mapping[str, Callable[[Life], dict[str, str]]] = {
    "http": told_by_http,
    "report": told_of_the_report,
    "kept": kept_by_us,
    "serve": by_serve,
    "check": by_check,
    "record": by_record,
    "replay": by_replay,
    "parse": by_parse,
}
READ_NOTHING = frozenset(("drill", "rules", "frameworks", "signals"))
"""Commands that look at no machine, no log and no recording."""


def test_every_command_and_every_route_is_an_outlet() -> None:
    assert set(COMMANDS_OF_OURS) <= OUTLETS.keys() | READ_NOTHING
    app = App(Published(1.0, lambda: 0.0))
    assert set(app._routes) | {"/-/reload"} == set(ROUTES)


@pytest.mark.parametrize("outlet", OUTLETS)
def test_no_secret_leaves(outlet: str, life: Life) -> None:
    told = OUTLETS[outlet](life)
    prefix = str(life.machine.root.parent)

    assert any(told.values())
    assert_clean({name: said.replace(prefix, "") for name, said in told.items()})


def page_of_secrets() -> bytes:
    """A server's own metrics, with every secret as a label, in a comment, in a name and where a number belongs."""
    lines = ['vllm:num_requests_running{model_name="m"} 3']
    for name, secret in SECRETS.items():
        label = secret.replace("\\", "\\\\").replace('"', '\\"')
        lines += [f"# HELP vllm:{name} {secret}", f"# {secret}", f"vllm:{core(name)} 1"]
        lines += [f'vllm:num_requests_waiting{{model_name="{label}",{name}="{label}"}} 1', f"vllm:other {secret}"]
    return "\n".join([*lines, ""]).encode()


def test_the_metrics_of_a_server_leave_numbers_only(caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer(lambda sock, _: sock.sendall(answer(200, page_of_secrets(), f"X-Model: {SECRETS['openai']}")))
    caplog.set_level(logging.DEBUG)
    try:
        seen = look(source(), scene_of({"vllm-8000": peer}))
    finally:
        peer.close()

    found = values(seen)
    assert (found["server_requests_running",], found["server_requests_waiting",]) == (3.0, float(len(SECRETS)))
    assert_clean({"readings": repr(seen), "log": caplog.text})


# --- the kernel's log, and the driver --------------------------------------------------------------------------

KERNEL_LINES = (
    "NVRM: Xid (PCI:0000:10:00): 79, pid=1234, name={}, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:10:00): 13, pid='{}', name={}, Graphics Exception: {}",
    "NVRM: Xid (PCI:0000:10:00 GPU-I:{}): 31, pid=7, name=x, Ch 00000008, intr {}",
    "NVRM: Xid (PCI:{}): 48, pid=1",
    "NVRM: GPU {} has fallen off the bus",
    "NVRM: The NVIDIA GPU {}",
    "NVRM: {}",
    "{}",
    "python3[{}]: segfault at 0 ip 0 sp 0 error 4 in {}[0+1000]",
    "Memory cgroup out of memory: Killed process 12 ({}) total-vm:1kB",
)
"""Processes choose their names, and the driver prints them."""
OF_THE_DRIVER = ("name", "capability", "pci")
"""What a card says of itself in words; its UUID stands for it everywhere."""


def kernel_log(folder: Path) -> Path:
    """Every line with every secret, as the kernel's own and as any user's."""
    (folder / "dev").mkdir()
    lines = [planted(form, secret) for form in KERNEL_LINES for secret in SECRETS.values()]
    both = [(facility, line) for facility in (0, 1) for line in lines]
    records = [f"{3 + 8 * facility},{number},{number},-;{line}\n" for number, (facility, line) in enumerate(both)]
    (folder / "dev/kmsg").write_text("".join(records))
    return folder


def looked_at_cards(folder: Path, card_: CardAnswer) -> tuple[list[Reading], Gpu]:
    node = GpuNode(folder / "node")
    log = XidLog(folder, KernelLog(kernel_log(folder), may_be_file=True))
    source_ = Gpu(Host(Config(), (), node.tree.root, folder), node.driver, log)
    node.driver.says = cards(card_)
    found = list(source_.read(Scene(), Moment(1000.0, 1_700_001_000.0)))
    source_.close()
    return [item for item in found if isinstance(item, Reading)], source_


def test_of_the_kernels_log_numbers_only_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is kept is looked at, too."""
    caplog.set_level(logging.DEBUG)
    told, source_ = looked_at_cards(tmp_path, card())

    xids = {reading.labels[1] for reading in told if reading.signal.name == "gpu_xid_errors_total"}
    assert {"79", "31"} <= xids <= {"79", "31", "13", "48", "unknown"}
    kept = repr(source_._faults.__dict__) + repr(source_._kernel._faults)  # type: ignore[attr-defined]
    assert_clean({"readings": repr(told), "log": caplog.text, "kept": kept})


def test_what_a_card_is_called_is_told_once_and_nobodys_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The names of a card are its maker's; those of processes, which are anybody's, the driver is not asked for."""
    caplog.set_level(logging.DEBUG)
    named: dict[str, Any] = dict.fromkeys(OF_THE_DRIVER, SECRETS["jwt"])
    told, _ = looked_at_cards(tmp_path, card(rows=[(100, 1)], **named))

    leaking = {reading.signal.name for reading in told if leaks(repr((reading.labels, reading.reason)))}
    assert leaking == {"gpu_info"}
    assert_clean({"log": caplog.text})
    asked_for = set(
        re.findall(r"nvml\w*(?:Name|UUID|Version|Serial|Vbios\w*|Comm\w*)\b", Path(nvml.__file__).read_text())
    )
    assert asked_for == {"nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlSystemGetDriverVersion"}


# --- what we are given ---------------------------------------------------------------------------------------

CONFIGURED: dict[str, Any] = {
    "servers": [
        {
            "name": "a",
            "match": {"command": "x"},
            "framework": "vllm",
            "role": "server",
            "logs": ["/var/log/x*.log"],
            "port": 8000,
            "health": {"url": "https://h/x", "insecure": False, "bearer_file": "/t"},
            "ranks": 2,
            "model": "m/x",
            "labels": {"team": "x"},
            "verdict": {"window": "60s", "budgets": {"compiling": "30m"}},
        }
    ],
    "discovery": {"enabled": True, "frameworks": ["vllm"], "users": ["root"], "exclude": ["x"]},
    "intervals": {"tick": "5s", "threads": "10s", "gpu": "5s", "health": "30s"},
    "verdict": {"window": "60s", "stall_after": "4m", "budgets": {"compiling": "30m"}},
    "limits": {"servers": 64, "line_bytes": "1MiB"},
    "retention": "10m",
}
S = core("bearer")
WRONG: tuple[Any, ...] = (S, [S], {S: 1}, f"{S}(", f"(?P<{S}>x)(?P<{S}>y)", f"http://u:{S}@h", f"../{S}\0", ["x", S, S])
NO_YAML = (f"a: *{S}", f"a: [{S}", f'a: "{S}', f"a: !<x:{S}> [", f"a: @{S}", f"{S}: 1\n{S}: 2", f"%{S}\n---\n", S)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything in a configuration."""
    if path:
        yield path
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from places(value[key], (*path, key))


def changed_at(path: tuple[Any, ...], wrong: Any) -> str:
    """The configuration as text, with something wrong at one place."""
    copy = deepcopy(CONFIGURED)
    holder: Any = copy
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = wrong
    return json.dumps(copy, indent=1)  # which is YAML, too


def mistakes(tmp_path: Path, texts: Iterable[str]) -> dict[str, str]:
    """What is said of each text that is wrong."""
    names, found, file = tuple(each.name for each in FRAMEWORKS), {}, tmp_path / "stallwatch.yml"
    for content in texts:
        file.write_text(content)
        try:
            load_config(str(file), names)
        except InputError as error:
            found[content] = str(error)
    return found


@pytest.mark.parametrize("path", list(places(CONFIGURED)), ids=str)
def test_no_mistake_in_a_configuration_is_told_with_a_secret(path: tuple[Any, ...], tmp_path: Path) -> None:
    unknown_key = changed_at((*path[:-1], f"key-{S}"), 1) if isinstance(path[-1], str) else ""
    found = mistakes(tmp_path, [*(changed_at(path, wrong) for wrong in WRONG), unknown_key])

    assert len(found) > 1
    assert_clean({str(number): told for number, told in enumerate(found.values())})


def test_what_is_no_configuration_at_all_is_told_without_a_secret(tmp_path: Path) -> None:
    assert mistakes(tmp_path, [json.dumps(CONFIGURED)]) == {}
    found = mistakes(tmp_path, NO_YAML)

    assert len(found) == len(NO_YAML)
    assert_clean({str(number): told for number, told in enumerate(found.values())})


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", f"--web.token={S}"],
        ["serve", "--web.password", S],
        ["serve", f"--{S}"],
        ["serve", S],
        ["serve", "--web.max-requests", S],
        ["serve", "--web.telemetry-path", S],
        ["check", "--for", S],
    ],
    ids=" ".join,
)
def test_no_wrong_flag_is_told_with_a_secret(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(arguments) == 2

    assert_clean({"said": "".join(capsys.readouterr())})


@pytest.mark.parametrize("name", ["LOG_LEVEL", "COLLECTOR_GPU", "WEB_MAX_REQUESTS", "ONCE", "LOG_FORMAT"])
def test_no_wrong_variable_is_told_with_a_secret(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"STALLWATCH_{name}", S)
    with suppress(SystemExit):
        assert main(["serve", "--once"]) == 2

    said = "".join(capsys.readouterr())
    assert f"STALLWATCH_{name}" in said
    assert_clean({"said": said})
