"""The command line: every flag and its environment variable, and one sentence for what is wrong."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stallwatch import __version__
from stallwatch.cli import COMMANDS, UsageError, build_parser, environment_name, main
from stallwatch.config import COLLECTORS


@pytest.fixture(autouse=True)
def our_log_is_put_back() -> Iterator[None]:
    """`main` sends our log to the stderr of its moment."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the machine the tests run on must not count."""
    for name in [name for name in os.environ if name.startswith("STALLWATCH_")]:
        monkeypatch.delenv(name)


def parsed(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    return vars(build_parser(environ or {}).parse_args(argv))


SERVE_FLAGS = [
    # flag, value on the command line or in the environment, key, what it means, default
    ("--config.file", "a.yml", "config.file", "a.yml", None),
    ("--path.procfs", "/host/proc", "path.procfs", "/host/proc", "/proc"),
    ("--path.rootfs", "/host", "path.rootfs", "/host", "/"),
    ("--web.listen-address", "[::1]:9", "web.listen_address", ["[::1]:9"], None),
    ("--web.telemetry-path", "/m", "web.telemetry_path", "/m", "/metrics"),
    ("--web.max-requests", "7", "web.max_requests", 7, 40),
    ("--log.level", "debug", "log.level", "debug", "info"),
    ("--log.format", "json", "log.format", "json", "logfmt"),
]


@pytest.mark.parametrize(("flag", "value", "key", "meaning", "default"), SERVE_FLAGS)
def test_every_flag_has_a_default_and_an_environment_variable(
    flag: str, value: str, key: str, meaning: object, default: object
) -> None:
    name = environment_name(flag)

    assert parsed(["serve"])[key] == default
    assert parsed(["serve", flag, value])[key] == meaning
    assert parsed(["serve"], {name: value})[key] == meaning


@pytest.mark.parametrize(("flag", "value", "key", "meaning", "default"), SERVE_FLAGS)
def test_the_command_line_wins_over_the_environment(
    flag: str, value: str, key: str, meaning: object, default: object
) -> None:
    others = {"--log.level": "error", "--log.format": "logfmt", "--web.max-requests": "9"}

    assert parsed(["serve", flag, value], {environment_name(flag): others.get(flag, "/other")})[key] == meaning


SWITCHES = [
    *((f"collector.{name}", True) for name in COLLECTORS),
    ("config.check", False),
    ("web.enable-lifecycle", False),
    ("once", False),
]


@pytest.mark.parametrize(("key", "default"), SWITCHES)
def test_every_switch_can_be_set_both_ways_by_flag_and_by_environment(key: str, default: bool) -> None:
    name = environment_name(f"--{key}")

    assert parsed(["serve"])[key] is default
    assert parsed(["serve", f"--{key}"])[key] is True
    assert parsed(["serve", f"--no-{key}"])[key] is False
    for word, value in (("true", True), ("1", True), ("False", False), ("no", False), ("", default)):
        assert parsed(["serve"], {name: word})[key] is value
    assert parsed(["serve", f"--{key}"], {name: "false"})[key] is True


def test_the_names_of_variables_are_those_of_the_flags() -> None:
    assert environment_name("--collector.gpu") == "STALLWATCH_COLLECTOR_GPU"
    assert environment_name("--web.listen-address") == "STALLWATCH_WEB_LISTEN_ADDRESS"


def test_the_help_of_serve_names_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["serve", "--help"])

    text = capsys.readouterr().out
    names = [environment_name(flag) for flag, *_ in SERVE_FLAGS] + [environment_name(f"--{key}") for key, _ in SWITCHES]
    assert done.value.code == 0
    assert [name for name in names if f"[${name}]" not in text] == []


def test_a_repeated_listen_address_adds_up() -> None:
    argv = ["serve", "--web.listen-address", ":1", "--web.listen-address", ":2"]

    assert parsed(argv)["web.listen_address"] == [":1", ":2"]
    assert parsed(argv, {"STALLWATCH_WEB_LISTEN_ADDRESS": ":3"})["web.listen_address"] == [":1", ":2"]


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"STALLWATCH_WEB_MAX_REQUESTS": "many"}, "STALLWATCH_WEB_MAX_REQUESTS: 'many' is no whole number"),
        ({"STALLWATCH_WEB_MAX_REQUESTS": "-1"}, "STALLWATCH_WEB_MAX_REQUESTS: '-1' is no whole number"),
        (
            {"STALLWATCH_LOG_LEVEL": "loud"},
            "STALLWATCH_LOG_LEVEL: 'loud' is unknown; allowed are debug, info, warning, error",
        ),
        ({"STALLWATCH_LOG_FORMAT": "xml"}, "STALLWATCH_LOG_FORMAT: 'xml' is unknown; allowed are logfmt, json"),
        (
            {"STALLWATCH_COLLECTOR_GPU": "maybe"},
            "STALLWATCH_COLLECTOR_GPU: 'maybe' is no boolean; allowed are true and false",
        ),
        ({"STALLWATCH_ONCE": "2"}, "STALLWATCH_ONCE: '2' is no boolean; allowed are true and false"),
    ],
)
def test_a_wrong_variable_is_named_with_what_is_allowed(environ: Mapping[str, str], sentence: str) -> None:
    with pytest.raises(UsageError) as wrong:
        build_parser(environ)

    assert str(wrong.value) == sentence


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["serve", "--frobnicate"], "unrecognized arguments: --frobnicate; see stallwatch serve --help"),
        (["serve", "--web.max", "3"], "unrecognized arguments: --web.max 3; see stallwatch serve --help"),
        (["serve", "--web.max-requests", "many"], "--web.max-requests: 'many' is no whole number"),
        (["serve", "--log.level", "loud"], "invalid choice: 'loud'"),
        (["serve", "--config.file"], "--config.file: expected one argument"),
        (["serve", "surplus"], "unrecognized arguments: surplus; see stallwatch serve --help"),
        (["check", "--for", "2 days"], "'2 days' is no duration; write it as 90s, 5m or 1h30m"),
        (["check", "--format", "xml"], "invalid choice: 'xml'"),
        (["check", "--url", "localhost:10077"], "--url: an http:// or https:// address is needed"),
        (["check", "--url", "http://localhost:port"], "--url: an http:// or https:// address is needed"),
        (["check", "--url", "http://[::1"], "--url: an http:// or https:// address is needed"),
        (["parse"], "the following arguments are required: LOGFILE"),
        (["serve", "--path.procfs", "/nowhere/proc", "--once"], "--path.procfs: is no /proc"),
        (["serve", "--config.file", "/nowhere/a.yml", "--config.check"], "/nowhere/a.yml: cannot be read"),
        (["serve", "--web.listen-address", "nonsense", *(f"--no-collector.{name}" for name in COLLECTORS)], "nonsense"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(argv)

    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("stallwatch: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_wrong_variable_is_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STALLWATCH_COLLECTOR_GPU", "maybe")

    assert main(["signals"]) == 2
    assert capsys.readouterr().err.startswith("stallwatch: STALLWATCH_COLLECTOR_GPU: ")


def test_a_wrong_configuration_is_named_with_file_line_and_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yml"
    file.write_text("retention: 10m\nfrobnicate: 1\n")

    assert main(["serve", "--config.file", str(file), "--config.check"]) == 2
    assert capsys.readouterr().err.startswith(f"stallwatch: {file}:2: frobnicate: ")


def test_a_right_configuration_is_said_to_be_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yml"
    file.write_text("retention: 10m\n")

    assert main(["serve", "--config.file", str(file), "--config.check"]) == 0
    assert capsys.readouterr().out == f"{file}: is valid\n"


def test_bare_stallwatch_prints_the_help_with_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0

    out = capsys.readouterr().out
    assert out.startswith("usage: stallwatch")
    assert [name for name in COMMANDS if f"    {name}" not in out] == []


@pytest.mark.parametrize("argv", [["--version"], ["serve", "--version"], ["parse", "--version"]])
def test_the_version_is_told_everywhere(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(argv)

    assert done.value.code == 0
    assert capsys.readouterr().out == f"stallwatch {__version__}\n"


def test_frameworks_lists_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frameworks"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= {"sglang", "vllm", "generic", "trtllm", "tgi", "lmdeploy", "llamacpp"}
    assert any(line.startswith("    gives up by itself: nccl 10m from dist_init_begin, barrier 5m") for line in lines)


def test_signals_lists_every_signal_once_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["signals"]) == 0

    lines = capsys.readouterr().out.splitlines()
    names = [line.split("{")[0] for line in lines if line.startswith("stallwatch_")]
    helps = [line for line in lines if line.startswith("    ") and line.strip()]
    assert names == sorted(set(names))
    assert len(helps) == len(names)
    assert {"stallwatch_threads", "stallwatch_server_state", "stallwatch_log_silence_seconds"} <= set(names)


def test_once_prints_one_page_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--once", *(f"--no-collector.{name}" for name in COLLECTORS)]) == 0

    out = capsys.readouterr().out
    assert "\nstallwatch_report_timestamp_seconds " in out
    assert out.endswith("\n")


def test_a_variable_that_means_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STALLWATCH_WEB_LISTEN_ADRESS", ":1")
    monkeypatch.setenv("STALLWATCH_WEB_LISTEN_ADDRESS", ":1")
    monkeypatch.setenv("STALLWATCH_COLLECTOR_NODE", "false")
    monkeypatch.setenv("STALLWATCH_E2E_CACHE", "/nowhere")
    monkeypatch.setenv("STALLWATCH_NO_COLLECTOR_NODE", "true")

    assert main(["frameworks"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"stallwatch: the environment variable {name} means nothing here; is it misspelled?"
        for name in ("STALLWATCH_NO_COLLECTOR_NODE", "STALLWATCH_WEB_LISTEN_ADRESS")
    ]


def test_the_path_of_the_metrics_begins_with_a_slash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--web.telemetry-path", "metrics"]) == 2
    assert "'metrics' is no path of a URL; it begins with /" in capsys.readouterr().err


def test_a_full_disk_under_stdout_is_one_sentence() -> None:
    """A real process: what Python buffered is written, and fails, after our own code."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "stallwatch", "frameworks"]
        answer = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, check=False)

    assert (answer.returncode, answer.stderr) == (2, "stallwatch: cannot write: No space left on device\n")


def test_a_root_that_is_no_directory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--path.rootfs", "/nonexistent", "--once"]) == 2
    assert capsys.readouterr().err == "stallwatch: /nonexistent: --path.rootfs: is no directory\n"


def test_a_limit_on_processes_is_one_sentence() -> None:
    """A real process of another user, who may have one process and one thread only."""
    command = ["prlimit", "--nproc=1", "--", sys.executable, "-m", "stallwatch", "serve", "--once"]
    if os.geteuid() != 0 or not os.access(sys.executable, os.X_OK) or shutil.which("prlimit") is None:
        pytest.skip("needs root, to be another user, and prlimit")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        command, user=65534, group=65534, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    if "Permission denied" in answer.stderr or "failed to execute" in answer.stderr:
        pytest.skip("the interpreter is not readable to another user")

    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1] == (
        "stallwatch: no thread can be started: the limit on processes is reached (ulimit -u)"
    )
