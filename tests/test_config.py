"""One wrong file per rule, each with the sentence its author gets to read."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from stallwatch.config import (
    Config,
    ConfiguredServer,
    Discovery,
    Intervals,
    Limits,
    Match,
    Thresholds,
    load_config,
    scaled,
)
from stallwatch.model import PHASES, HealthTarget
from stallwatch.strict_yaml import InputError

FRAMEWORKS = ("generic", "sglang", "vllm")


def load(folder: Path, text: str) -> Config:
    path = folder / "stallwatch.yml"
    path.write_text(text)
    return load_config(path, FRAMEWORKS)


def sentence(folder: Path, text: str) -> str:
    """The complaint about a file, without its folder."""
    with pytest.raises(InputError) as caught:
        load(folder, text)
    return str(caught.value).removeprefix(f"{folder}/")


FULL = r"""
servers:
  - name: chat
    match: {command: 'serve_chat\.py --prod'}
    framework: vllm
    logs: ["/var/log/chat/*.log"]
    port: 9000
    health: {url: "https://localhost:9000/healthz", insecure: true, bearer_file: /etc/token}
    ranks: 4
    model: org/chat
    labels: {team: search}
    verdict: {stall_after: 10m, budgets: {compiling: 1h}}
  - {name: batch, match: {pid_file: /run/batch.pid}, role: embedded}
  - {name: by-unit, match: {unit: llm.service}}
  - {name: by-container, match: {container: 0123456789ab}}
  - {name: by-port, match: {port: 8001}}
discovery: {enabled: false, frameworks: [vllm], users: [llm, "1000"], exclude: ['--dry-run']}
intervals: {tick: 2s, threads: 4s, processes: 3s, ports: 7s, gpu: 6s, gpu_processes: 50s, logs: 500ms, health: 1m}
verdict: {window: 30s, stall_after: 2m, suspect_after: 1h30m, serve_stall_after: 90s, budgets: {loading_weights: 1h}}
limits: {servers: 3, ranks: 16, logs: 8, line_bytes: 64KiB}
retention: 1d
"""


def test_every_key_of_the_contract_is_read(tmp_path: Path) -> None:
    config = load(tmp_path, FULL)

    chat, *others = config.servers
    assert chat.match.command is not None
    assert chat.match.command.pattern == r"serve_chat\.py --prod"
    assert chat.thresholds is not None
    assert chat.thresholds.budgets == {"loading_weights": 3600.0, "compiling": 3600.0}
    assert (chat.thresholds.window, chat.thresholds.stall_after) == (30.0, 600.0)
    assert (
        ConfiguredServer(
            "chat",
            chat.match,
            framework="vllm",
            logs=("/var/log/chat/*.log",),
            port=9000,
            health=HealthTarget("https://localhost:9000/healthz", True, "/etc/token"),
            ranks=4,
            model="org/chat",
            labels={"team": "search"},
            thresholds=chat.thresholds,
        )
        == chat
    )
    assert [
        ConfiguredServer("batch", Match(pid_file="/run/batch.pid"), role="embedded"),
        ConfiguredServer("by-unit", Match(unit="llm.service")),
        ConfiguredServer("by-container", Match(container="0123456789ab")),
        ConfiguredServer("by-port", Match(port=8001)),
    ] == others
    assert Discovery(False, ("vllm",), ("llm", "1000"), config.discovery.exclude) == config.discovery
    assert [pattern.pattern for pattern in config.discovery.exclude] == ["--dry-run"]
    assert Intervals(2, 4, 3, 7, 6, 50, 0.5, 60) == config.intervals
    assert Thresholds(30, 120, 5400, 90, {"loading_weights": 3600.0}) == config.verdict
    assert Limits(3, 16, 8, 65536) == config.limits
    assert config.retention == 86400.0


def test_an_empty_file_is_the_shipped_configuration(tmp_path: Path) -> None:
    config = load(tmp_path, "# nothing yet\n")

    assert replace(Config(), file=str(tmp_path / "stallwatch.yml")) == config


def test_a_server_without_thresholds_of_its_own_has_everybodys(tmp_path: Path) -> None:
    config = load(tmp_path, FULL)

    assert config.thresholds_for("chat").stall_after == 600.0
    assert config.verdict is config.thresholds_for("batch")
    assert config.verdict is config.thresholds_for("vllm-8000")


SERVER = "servers: [{name: a, match: {port: 1}, %s}]\n"
WAYS = "command, pid_file, unit, container, port"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # unknown keys, at every level
        (
            "verdict:\n  windw: 1m\n",
            "stallwatch.yml:2: verdict.windw: unknown key; allowed are"
            " budgets, serve_stall_after, stall_after, suspect_after, window",
        ),
        (
            "\nserver: []\n",
            "stallwatch.yml:2: server: unknown key; allowed are"
            " discovery, intervals, limits, retention, servers, verdict",
        ),
        (
            SERVER % "prt: 1",
            "stallwatch.yml:1: servers[0].prt: unknown key; allowed are"
            " framework, health, labels, logs, match, model, name, port, ranks, role, verdict",
        ),
        (
            "servers: [{name: a, match: {port: 1, comand: x}}]\n",
            "stallwatch.yml:1: servers[0].match.comand: unknown key; allowed are"
            " command, container, pid_file, port, unit",
        ),
        (
            SERVER % "health: {url: 'http://h/', header: x}",
            "stallwatch.yml:1: servers[0].health.header: unknown key; allowed are bearer_file, insecure, url",
        ),
        (
            "verdict: {budgets: {loading: 1m}}\n",
            f"stallwatch.yml:1: verdict.budgets.loading: unknown key; allowed are {', '.join(sorted(PHASES))}",
        ),
        (
            "intervals: {log: 1s}\n",
            "stallwatch.yml:1: intervals.log: unknown key; allowed are"
            " gpu, gpu_processes, health, logs, ports, processes, threads, tick",
        ),
        (
            "limits: {lines: 1}\n",
            "stallwatch.yml:1: limits.lines: unknown key; allowed are line_bytes, logs, ranks, servers",
        ),
        (
            "discovery: {user: x}\n",
            "stallwatch.yml:1: discovery.user: unknown key; allowed are enabled, exclude, frameworks, users",
        ),
        # wrong types
        ("verdict: 5m\n", "stallwatch.yml:1: verdict: a mapping (key: value) is needed here"),
        ("servers: {name: a}\n", "stallwatch.yml:1: servers: a list of mappings is needed here"),
        ("servers: [a]\n", "stallwatch.yml:1: servers[0]: a mapping (key: value) is needed here"),
        (SERVER % "logs: /a.log", "stallwatch.yml:1: servers[0].logs: a list of strings is needed here"),
        (SERVER % "ranks: four", "stallwatch.yml:1: servers[0].ranks: 'four' is no whole number"),
        (SERVER % "model: [a]", "stallwatch.yml:1: servers[0].model: a string is needed here"),
        (
            "discovery: {enabled: maybe}\n",
            "stallwatch.yml:1: discovery.enabled: 'maybe' is no boolean; allowed are true and false",
        ),
        # values
        (
            "retention: 10 minutes\n",
            "stallwatch.yml:1: retention: '10 minutes' is no duration; write it as 90s, 5m or 1h30m",
        ),
        ("retention: 600\n", "stallwatch.yml:1: retention: '600' is no duration; write it as 90s, 5m or 1h30m"),
        (
            "limits: {line_bytes: 1MB}\n",
            "stallwatch.yml:1: limits.line_bytes: '1MB' is no size; write it as 64KiB, 1MiB or a number of bytes",
        ),
        ("limits: {line_bytes: 0}\n", "stallwatch.yml:1: limits.line_bytes: allowed is at least 256 bytes"),
        (
            "limits: {servers: 0}\n",
            "stallwatch.yml:1: limits.servers: 0 is out of range; allowed is at least 1",
        ),
        (
            SERVER % "port: 70000",
            "stallwatch.yml:1: servers[0].port: 70000 is out of range; allowed is at least 1 and at most 65535",
        ),
        (
            "intervals: {tick: 50ms}\n",
            "stallwatch.yml:1: intervals.tick: 0.05s is too short; allowed is at least 100ms",
        ),
        # expressions, with the line of the one that is wrong
        (
            "discovery:\n  exclude:\n    - fine\n    - '(open'\n",
            "stallwatch.yml:4: discovery.exclude: not a regular expression:"
            " missing ), unterminated subpattern at position 0",
        ),
        (
            "servers:\n  - name: a\n    match:\n      command: '*x'\n",
            "stallwatch.yml:4: servers[0].match.command: not a regular expression: nothing to repeat at position 0",
        ),
        ("discovery: {exclude: [~]}\n", "stallwatch.yml:1: discovery.exclude: a string is needed here"),
        # times that cannot judge
        (
            "verdict: {window: 1m, stall_after: 1m}\n",
            "stallwatch.yml:1: verdict.stall_after: stall_after (60s) must be longer than window (60s)",
        ),
        (
            "verdict: {window: 4m}\n",
            "stallwatch.yml:1: verdict.window: stall_after (240s) must be longer than window (240s)",
        ),
        (
            "verdict: {window: 15s}\n",
            "stallwatch.yml:1: verdict.window: window (15s) must be at least twice the longest of"
            " intervals.tick, threads and processes (10s)",
        ),
        (
            "intervals:\n  processes: 31s\n",
            "stallwatch.yml:2: intervals.processes: window (60s) must be at least twice the longest of"
            " intervals.tick, threads and processes (31s)",
        ),
        (
            SERVER % "verdict: {window: 19s}",
            "stallwatch.yml:1: servers[0].verdict.window: window (19s) must be at least twice the longest of"
            " intervals.tick, threads and processes (10s)",
        ),
        # servers
        (
            "servers:\n- {name: a, match: {port: 1}}\n- {name: a, match: {port: 2}}\n",
            "stallwatch.yml:3: servers[1].name: 'a' is used by another server",
        ),
        ("servers: [{match: {port: 1}}]\n", "stallwatch.yml:1: servers[0].name: the key is required"),
        (
            'servers: [{name: "a\\nb", match: {port: 1}}]\n',
            "stallwatch.yml:1: servers[0].name: a name of 1 to 128 bytes, all printable, is needed",
        ),
        (
            f"servers: [{{name: {'é' * 65}, match: {{port: 1}}}}]\n",
            "stallwatch.yml:1: servers[0].name: a name of 1 to 128 bytes, all printable, is needed",
        ),
        ("servers: [{name: a}]\n", "stallwatch.yml:1: servers[0].match: the key is required"),
        (
            "servers: [{name: a, match: {port: 1, unit: b}}]\n",
            f"stallwatch.yml:1: servers[0].match: exactly one of {WAYS} is needed, not 2",
        ),
        (
            "servers: [{name: a, match: {}}]\n",
            f"stallwatch.yml:1: servers[0].match: exactly one of {WAYS} is needed, not 0",
        ),
        (
            "servers: [{name: a, match: {command: ''}}]\n",
            "stallwatch.yml:1: servers[0].match.command: must not be empty: that would fit everything or nothing",
        ),
        (
            SERVER % "framework: vlm",
            "stallwatch.yml:1: servers[0].framework: 'vlm' is unknown; allowed are generic, sglang, vllm",
        ),
        (
            "discovery: {frameworks: [tgi]}\n",
            "stallwatch.yml:1: discovery.frameworks: 'tgi' is unknown; allowed are generic, sglang, vllm",
        ),
        (
            SERVER % "role: client",
            "stallwatch.yml:1: servers[0].role: 'client' is unknown; allowed are server, embedded",
        ),
        (
            SERVER % "labels: {a-b: x}",
            "stallwatch.yml:1: servers[0].labels: 'a-b' is no label name; allowed are letters, digits and _",
        ),
        (
            SERVER % "labels: {model: x}",
            "stallwatch.yml:1: servers[0].labels: 'model' is a label that server_info has already",
        ),
        (
            SERVER % "health: {url: 'ftp://h/'}",
            "stallwatch.yml:1: servers[0].health.url: an http:// or https:// URL without user and password is needed",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path: Path, text: str, expected: str) -> None:
    assert expected == sentence(tmp_path, text)


def test_a_password_in_a_health_url_is_refused_and_not_repeated(tmp_path: Path) -> None:
    text = sentence(tmp_path, SERVER % "health: {url: 'http://admin:hunter2@localhost/health'}")

    assert "servers[0].health.url" in text
    assert "hunter2" not in text


def test_each_collector_has_an_interval() -> None:
    intervals = Intervals(**{field.name: float(index) for index, field in enumerate(fields(Intervals))})

    collectors = ("processes", "threads", "sockets", "logs", "gpu", "endpoints", "node")
    assert [intervals.of(collector) for collector in collectors] == [2.0, 1.0, 3.0, 6.0, 4.0, 7.0, 2.0]


def test_a_drill_is_faster_but_looks_at_most_ten_times_a_second() -> None:
    config = scaled(Config(verdict=Thresholds(budgets={"compiling": 100.0})), 10)

    assert (
        config.verdict.window,
        config.verdict.stall_after,
        config.verdict.suspect_after,
        config.verdict.serve_stall_after,
    ) == (6.0, 24.0, 90.0, 12.0)
    assert tuple(map(config.verdict.budget, ("compiling", "loading_weights", "spawned"))) == (10.0, 180.0, 60.0)
    assert (config.intervals.tick, config.intervals.logs) == (0.5, 0.1)


def test_budgets_fall_back_from_the_file_to_the_phase_to_the_rest() -> None:
    thresholds = Thresholds(budgets={"compiling": 5.0})

    assert [thresholds.budget(phase) for phase in ("compiling", "capturing_graphs", "ready")] == [5.0, 900.0, 600.0]


def test_a_log_path_is_absolute(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("servers:\n- name: a\n  match: {port: 1}\n  logs: [server.log]\n")

    with pytest.raises(InputError) as raised:
        load_config(file, FRAMEWORKS)

    assert str(raised.value) == f"{file}:4: servers[0].logs: 'server.log' is no absolute path"
