"""No secret comes out: planted in logs, command lines, titles, environments and folders, searched in all we write.

Every kind of secret holds a core of 24 letters and digits.  It counts as found where any eight neighbouring ones of
them stand, in either case, as they are or encoded.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from proc_tree import ProcTree, threads
from proc_tree import Thread as ProcThread
from stallwatch.assembly import Settings, make_daemon
from stallwatch.cli import main
from stallwatch.config import Thresholds
from stallwatch.daemon import Daemon
from stallwatch.exposition import Exposition
from stallwatch.frameworks import load_frameworks
from stallwatch.log_format import Formatter
from stallwatch.memory import Memory
from stallwatch.model import Report
from stallwatch.parse import format_text, parse_files
from stallwatch.presentation import document, text, verdict_line
from stallwatch.record import Recorder
from stallwatch.sources.logs.search import literal_finder
from stallwatch.state_file import open_state
from stallwatch.web.log_facts import log_facts
from stallwatch.web.page import Beside, html

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


@pytest.fixture
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
        *("-tp", "2", "--port", "8000"),
        *flags("--api-key", "--ssl-keyfile-password", "--hf-token", "--middleware", "--x"),
        *("--speculative-config", f'{{"model": "/{core("jwt")}/a/b", "token": "{core("github")}", "method": "eagle"}}'),
    ],
    "sglang": [
        *("python3", "-m", "sglang.launch_server", "--model-path", f"/srv/{core('docker')}/org/m", "--tp", "2"),
        *("--port", "30000", "--nnodes", "2", "--dist-init-addr", f"u:{core('amqp')}@10.0.0.1:5000"),
        *flags("--api-key", "--admin-api-key", "--storage-key"),
        *("--speculative-algorithm", SECRETS["pem_key"]),
    ],
    "llamacpp": [
        *("llama-server", "-m", f"s3://{core('aws_access_key')}:x@bucket/a/b/m.gguf#{core('slack')}", "--port", "9000"),
        *flags("--api-key", "-hft", "--hf-token"),
    ],
    "lmdeploy": [
        "lmdeploy",
        "serve",
        "api_server",
        "/m/org/m",
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
        given: dict[str, Any] = {"environ": ENVIRON, "cpu": 1.0, "io": {"rchar": 5}}
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


def pages(report: Report) -> dict[str, str]:
    """Everything that is made of a report."""
    told = document(report)
    page = Exposition().page(report)
    return {
        "metrics": page.text(False).decode(),
        "openmetrics": page.text(True).decode(),
        "json": json.dumps(told),
        "page": html(told, beside=Beside(log_facts(report.readings))),
        "check": text(told),
        "verdicts": "\n".join(map(verdict_line, told["servers"])),
    }


def files_below(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_bytes().decode(errors="replace")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_whole_cycle_writes_no_secret_anywhere(
    tmp_path: Path, talkative: int, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(tmp_path)
    kept, recorded = Kept(), list[str]()
    state_folder = tmp_path / "state"
    state_folder.mkdir(mode=0o700)
    opened = open_state(str(state_folder), str(machine.tree.root))
    assert opened is not None
    state, boot, _ = opened
    reports: list[Report] = []
    recorder = Recorder(recorded.append, 5.0, lambda name: Thresholds(), 0.0)

    with restored_logging():
        logging.getLogger().handlers[:] = [kept]
        logging.getLogger().setLevel(logging.DEBUG)
        config_file = str(configuration(tmp_path, talkative))
        settings = Settings(config_file, procfs=str(machine.tree.root), rootfs=str(machine.root))
        memory = Memory(state.seal, boot)
        daemon = make_daemon(settings, reports.append, witness=recorder.witness, memory=memory)
        try:
            report = Cycle(daemon, reports).steps(3)
            remembered = daemon.remembered()
            assert remembered is not None
            state.write(remembered)
            recorder.begin()
        finally:
            daemon.close()
            state.close()

    found = {server.server.framework for server in report.servers}
    assert found == set(COMMANDS), "every server was found, or nothing was tested"
    read = {reading.labels[0]: reading.value for reading in report.readings if reading.signal.name == "log_lines_total"}
    assert len(read) == len(COMMANDS)
    assert all(value and value > len(SECRETS) for value in read.values())
    assert {server.server.name for server in report.servers} >= {"asked", "broken"}
    assert f"/{core('cookie')}?key={core('query_token')} Bearer {core('bearer')}" in Answers.asked
    assert len(recorded) > 10
    assert kept.lines
    models = {server.server.framework: server.server.model for server in report.servers}
    assert (models["vllm"], models["sglang"], models["llamacpp"]) == ("org/m", "org/m", "b/m.gguf")
    said = capsys.readouterr()
    assert_clean(
        {
            **pages(report),
            "recording": "".join(recorded),
            "remembered": json.dumps(remembered),
            **{f"state/{name}": content for name, content in files_below(state_folder).items()},
            "log": "\n".join(kept.lines),
            "out": said.out,
            "err": said.err,
        }
    )


def test_what_is_wrong_with_a_configuration_is_said_without_what_may_be_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://user:{core('url_user')}@h/x"
    wrong = (
        f"servers: [{{name: a, match: {{port: 1}}, health: {{url: '{url}'}}}}]",
        f"servers: [{{name: a, match: {{port: 1}}, health: {{url: 'http://h/', bearer: '{core('bearer')}'}}}}]",
        f"servers: [{{name: a, match: {{port: 1}}, api_key: '{core('openai')}'}}]",
        f"token: '{core('ngc')}'",
    )
    for number, content in enumerate(wrong):
        file = tmp_path / f"{number}.yml"
        file.write_text(content + "\n")
        with restored_logging():
            assert main(["serve", "--config.check", "--config.file", str(file)]) == 2

    said = capsys.readouterr()
    assert said.err.count("stallwatch: ") == len(wrong)
    assert_clean({"out": said.out, "err": said.err})
