"""From a stuck server to the message: exporter, Prometheus, Alertmanager, webhook; the shipped rules and routes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
import yaml

from stallwatch.drill.nvml_standin import NoCompilerError, build
from stallwatch.drill.nvml_standin import StandIn as Cards
from stallwatch.rules import DEFAULT_FILES, every_key, one_file, rule_files
from stallwatch.strict_yaml import parse_duration

from .harness import (
    CONFIG,
    OPENER,
    PATIENCE,
    ROOT,
    STALL_AFTER,
    WINDOW,
    Exporter,
    Program,
    StandIn,
    fetch,
    free_port,
    wait_until,
)
from .prometheus import Prometheus
from .recorder import COMMAND

pytestmark = pytest.mark.e2e

NOWHERE = "http://127.0.0.1:9099/"
RANKS = 8
SPEED = 12
"""The times of rules and routes are divided by what the verdict's times are divided by."""
Alert = Mapping[str, Any]


def seconds(text: str) -> str:
    """A duration of the rules or the routes, divided by what the verdict's times are divided by."""
    return f"{round(parse_duration(text) / SPEED)}s"


def scaled_rules(**others: str) -> str:
    """The shipped rules with all times divided; `others`: the alerts that wait for something else, and how long."""
    keys = every_key()
    times = {key: seconds(known.default) for key, known in keys.items() if key.endswith((".for", ".keep_firing_for"))}
    return one_file(rule_files(DEFAULT_FILES, times | {f"{alert}.for": time for alert, time in others.items()}))


def scaled_routes(hook: str) -> str:
    text = (ROOT / "deploy/alertmanager/alertmanager.yml").read_text()
    short = re.sub(r"(group_wait|group_interval): (\S+)", lambda m: f"{m[1]}: {seconds(m[2])}", text)
    assert short.count(NOWHERE) == 5
    return short.replace(NOWHERE, hook)


@dataclass(slots=True)
class Hook:
    """A webhook; keeps each message with the receiver it was for, and when it came."""

    messages: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Hook:
        messages = self.messages

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                messages.append((time.time(), self.path.strip("/"), json.loads(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Said by the test, if it fails."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.server_address[1]}/"

    def about(self, server: str) -> list[tuple[str, dict[str, Any]]]:
        """Receiver and message; other servers of this machine, of somebody else's tests, are left out."""
        every = list(self.messages)
        return [(receiver, m) for _, receiver, m in every if m["groupLabels"].get("server") == server]

    def told(self, name: str, server: str, status: str = "firing") -> list[tuple[str, Alert]]:
        """Receiver and alert, for each time a message told of this alert in this status."""
        return [
            (receiver, alert)
            for receiver, message in self.about(server)
            for alert in message["alerts"]
            if alert["labels"]["alertname"] == name and alert["status"] == status
        ]

    def story(self) -> str:
        lines = [
            f"{at:.1f} {receiver}: {alert['status']} {alert['labels']}"
            for at, receiver, message in list(self.messages)
            for alert in message["alerts"]
        ]
        return "\n".join(lines)


class Alertmanager(Program):
    """The shipped example with its times divided, and its webhooks led to `hook`."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.port = free_port()
        config = folder / "alertmanager.yml"
        config.write_text(scaled_routes(hook))
        command = ["prometheus-alertmanager", "--config.file", str(config), "--log.level", "warn"]
        command += ["--storage.path", str(folder / "alertmanager"), "--cluster.listen-address="]
        command += ["--web.listen-address", f"127.0.0.1:{self.port}"]
        super().__init__(command, folder / "alertmanager.log")

    def wait_started(self) -> None:
        url = f"http://127.0.0.1:{self.port}/-/ready"
        wait_until(lambda: fetch(url)[0] == 200, PATIENCE, f"Alertmanager\n{self.tail()}")

    def alerts(self) -> list[dict[str, Any]]:
        status, body = fetch(f"http://127.0.0.1:{self.port}/api/v2/alerts")
        return list(json.loads(body)) if status == 200 else []

    def states(self) -> dict[str, str]:
        """`name server` -> active or suppressed."""
        return {
            " ".join(filter(None, (a["labels"]["alertname"], a["labels"].get("server")))): a["status"]["state"]
            for a in self.alerts()
        }

    def post(self, *alerts: Mapping[str, str]) -> None:
        body = json.dumps([{"labels": dict(labels)} for labels in alerts]).encode()
        url = f"http://127.0.0.1:{self.port}/api/v2/alerts"
        with OPENER.open(Request(url, body, {"Content-Type": "application/json"}), timeout=5.0) as answer:
            assert answer.status == 200


@pytest.fixture
def hook() -> Iterator[Hook]:
    for program in ("prometheus", "prometheus-alertmanager"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with Hook() as hook:
        yield hook


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[Cards]:
    try:
        library = build(tmp_path)
    except NoCompilerError as error:
        pytest.skip(str(error))
    cards = Cards(tmp_path, library, RANKS)
    yield cards
    cards.clear()


def test_a_stall_is_one_message_that_says_what_matters_and_one_that_it_is_over(
    tmp_path: Path, hook: Hook, cards: Cards
) -> None:
    with (
        Exporter(tmp_path, environment=cards.environment()) as exporter,
        Alertmanager(tmp_path, hook.url) as alertmanager,
        Prometheus(tmp_path, exporter.port, scaled_rules(), alertmanager.port) as prometheus,
        StandIn("barrier-deadlock", tmp_path, cards=tmp_path, load_seconds=2.0) as server,
    ):
        server.wait_for_line("Load weight end", RANKS)
        last_progress = time.time()
        wait_until(
            lambda: hook.told("InferenceServerStalled", server.name),
            STALL_AFTER + PATIENCE,
            f"a page\n{exporter.watch.story()}",
        )
        paged_after = time.time() - last_progress
        assert_each_rank_is_tied_to_its_card(exporter, server)
        time.sleep(10.0)
        server.rank(3).send_signal(signal.SIGUSR1)
        server.wait_for_line("ready to roll")
        wait_until(
            lambda: hook.told("InferenceServerStalled", server.name, "resolved"), PATIENCE, f"the end\n{hook.story()}"
        )
        last = exporter.watch.last()
        (info,) = last.values("stallwatch_server_info", server=server.name)
        _, kept = prometheus.answer(f'{{instance="127.0.0.1:{exporter.port}"}}[15m]')
        assert_judged_again_as_it_was(kept, tmp_path, server.name)

    told = hook.told("InferenceServerStalled", server.name)
    assert {receiver for receiver, _ in told} == {"page"}
    assert len({alert["startsAt"] for _, alert in told}) == 1, f"one episode\n{hook.story()}"
    paged = [message for receiver, message in hook.about(server.name) if receiver == "page"]
    assert [message["status"] for message in paged] == ["firing", "resolved"], hook.story()
    assert {alert["labels"]["alertname"] for message in paged for alert in message["alerts"]} == {
        "InferenceServerStalled"
    }
    assert paged_after < STALL_AFTER + 10.0, "a tick, a look at the threads, a scrape, an evaluation, a group wait"

    (_, alert) = told[0]
    text, labels = alert["annotations"]["description"], alert["labels"]
    assert labels["severity"] == "critical"
    assert not {"reason", "rank", "phase", "pid", "gpu"} & labels.keys()
    model = dict(info)["model"]
    assert model
    where = r"(, unit [^,)]+)?"  # whoever runs this may be a unit
    whom = rf"Inference server {re.escape(server.name)} \({re.escape(model)}{where}\) on node 127\.0\.0\.1 lives"
    assert re.search(f"{whom} but makes no progress on any rank", text), text
    assert re.search(r"stalled since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text)
    assert "in phase post_load, reason idle_wait" in text
    assert "On each of 8 GPUs: 76 GiB held, 0 % used, waiting for TP3." in text
    assert re.search(r"Threads: \d+ futex", text)
    assert re.search(r"Log: last line \S+.* ago, last progress \S+.* ago\.", text)
    assert "The others wait for rank TP3: look at it first." in text
    assert f"First, on the node: stallwatch check --server {server.name}." in text
    assert alert["annotations"]["runbook_url"].endswith("/InferenceServerStalled.md")
    assert alert["annotations"]["dashboard_url"].endswith(f"&var-server={server.name}")
    assert 500 < sum(series_of(line) in ("", server.name) for line in last.page.splitlines()) <= 600


def assert_judged_again_as_it_was(kept: str, folder: Path, server: str) -> None:
    """What Prometheus kept says by `replay` what was said live: the stall, its reason and rank, and its end."""
    night, config = folder / "night.json", folder / "replay.yml"
    night.write_text(kept)
    config.write_text(CONFIG)
    command = [COMMAND, "replay", "--format", "json", "--config.file", str(config), str(night)]
    answer = subprocess.run(command, capture_output=True, timeout=300.0)
    (recording,) = json.loads(answer.stdout)["recordings"]
    (judged,) = (each for each in recording["servers"] if each["server"] == server)
    alarms = [change for change in judged["changes"] if change["state"] in ("stalled", "failed")]
    assert [(c["state"], c["reason"], c["suspect_rank"]) for c in alarms] == [("stalled", "idle_wait", "TP3")], judged
    assert judged["final"]["state"] == "idle", judged


def series_of(line: str) -> str | None:
    """The server a line of the page is about, "" for the node and the exporter, None for a comment."""
    found = re.search(r'[{,]server="([^"]*)"', line)
    return None if line.startswith("#") else found[1] if found else ""


def assert_each_rank_is_tied_to_its_card(exporter: Exporter, server: StandIn) -> None:
    last = exporter.watch.last()
    ties = [dict(labels) for labels in last.values("stallwatch_rank_info", server=server.name)]
    of_ranks = [each for each in ties if each["rank"].startswith("TP")]
    assert len({each["gpu"] for each in of_ranks}) == RANKS
    assert all(each["gpu"].startswith("GPU-") for each in of_ranks)
    assert set(last.values("stallwatch_gpu_unowned_memory_bytes").values()) <= {0.0}
    assert all(rank["gpu"] for rank in last.servers[server.name]["ranks"] if rank["rank"].startswith("TP"))


def test_a_death_is_told_at_once_and_its_rank_is_not_told_again(tmp_path: Path, hook: Hook) -> None:
    with (
        Exporter(tmp_path) as exporter,
        Alertmanager(tmp_path, hook.url) as alertmanager,
        Prometheus(tmp_path, exporter.port, scaled_rules(), alertmanager.port),
        StandIn("barrier-deadlock", tmp_path, load_seconds=1) as server,
    ):
        server.wait_for_line("Load weight end", RANKS)
        time.sleep(2.0)
        server.rank(5).kill()
        died = time.time()
        wait_until(
            lambda: hook.told("InferenceServerFailed", server.name), PATIENCE, f"a page\n{exporter.watch.story()}"
        )
        paged_after = time.time() - died
        inhibited = wait_until(
            lambda: alertmanager.states().get(f"InferenceRankDead {server.name}"), PATIENCE, f"a rank\n{hook.story()}"
        )
        time.sleep(3.0)

    ((receiver, alert), *_) = hook.told("InferenceServerFailed", server.name)
    assert (receiver, alert["labels"]["severity"]) == ("page", "critical")
    assert "Rank TP5 went first" in alert["annotations"]["description"]
    assert inhibited == "suppressed"
    assert hook.told("InferenceRankDead", server.name) == []
    assert paged_after < 10.0, "two looks, a scrape, an evaluation; no group wait"


BLIND = CONFIG.replace(f"stall_after: {STALL_AFTER:g}s", "stall_after: 8s").replace(
    f"window: {WINDOW:g}s", "window: 4s"
)


class WithoutLog(StandIn):
    def wait_started(self) -> None:
        """There is no log to wait for."""


def test_an_exporter_that_is_down_silences_what_it_could_not_judge(tmp_path: Path, hook: Hook) -> None:
    """The twin is the same server a moment before: not judged, and told."""
    with (
        Exporter(tmp_path, BLIND) as exporter,
        Alertmanager(tmp_path, hook.url) as alertmanager,
        Prometheus(tmp_path, exporter.port, scaled_rules(StallwatchBlind="1s"), alertmanager.port),
        WithoutLog("log-to-nowhere", tmp_path, load_seconds=1) as server,
    ):
        name = f"StallwatchBlind {server.name}"
        wait_until(
            lambda: alertmanager.states().get(name) == "active",
            PATIENCE,
            f"a server not judged\n{exporter.watch.story()}",
        )
        exporter.watch.stop()  # a stopped process owes it no answer
        exporter.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "StallwatchDown" in alertmanager.states(), PATIENCE, f"no exporter\n{alertmanager.states()}")
        wait_until(
            lambda: alertmanager.states().get(name) == "suppressed", PATIENCE, f"silence\n{alertmanager.states()}"
        )
        told = [alert["labels"]["alertname"] for _, _, message in hook.messages for alert in message["alerts"]]

    assert "StallwatchBlind" in told


HERE = {"job": "stallwatch", "instance": "node1:10077"}
SERVER = HERE | {"server": "vllm-8000"}


def labels(name: str, severity: str = "warning", **others: str) -> dict[str, str]:
    return {"alertname": name, "severity": severity, **(SERVER if not others.pop("node", "") else HERE), **others}


def test_what_silences_what(tmp_path: Path, hook: Hook) -> None:
    with Alertmanager(tmp_path, hook.url) as alertmanager:
        alertmanager.post(
            labels("InferenceServerFailed", "critical"),
            labels("InferenceRankBehind", "info"),
            labels("InferenceRankBehind", "info", server="vllm-8001"),
            labels("StallwatchDown", node="yes"),
            labels("StallwatchBlind", server="vllm-8002"),
            labels("StallwatchBlind", server="vllm-8003", instance="node2:10077"),
            labels("GpuDriverUnresponsive", node="yes", instance="node3:10077"),
            labels("StallwatchCollectorStuck", node="yes", instance="node3:10077", collector="gpu"),
            labels("StallwatchCollectorStuck", node="yes", instance="node4:10077", collector="gpu", server="other"),
        )
        expected = {
            "InferenceServerFailed vllm-8000": "active",
            "InferenceRankBehind vllm-8000": "suppressed",
            "InferenceRankBehind vllm-8001": "active",
            "StallwatchDown": "active",
            "StallwatchBlind vllm-8002": "suppressed",
            "StallwatchBlind vllm-8003": "active",
            "GpuDriverUnresponsive": "active",
            "StallwatchCollectorStuck": "suppressed",
            "StallwatchCollectorStuck other": "active",
        }
        wait_until(lambda: alertmanager.states() == expected, PATIENCE, f"{alertmanager.states()}")


def test_a_roll_out_that_goes_wrong_is_one_message_and_teams_get_their_own(tmp_path: Path, hook: Hook) -> None:
    nodes = [f"node{number}:10077" for number in range(30)]
    with Alertmanager(tmp_path, hook.url) as alertmanager:
        alertmanager.post(
            *(labels("StallwatchDown", node="yes", instance=node) for node in nodes),
            labels("InferenceServerStalled", "critical", namespace="search"),
            labels("InferenceServerStalled", "critical", server="vllm-8001", namespace="chat"),
        )
        wait_until(lambda: len(hook.messages) >= 3, PATIENCE, f"three messages\n{hook.story()}")
        time.sleep(2.0)

    by_receiver = {receiver: message["alerts"] for _, receiver, message in hook.messages}
    assert sorted(receiver for _, receiver, _ in hook.messages) == ["day", "page", "page-search"], hook.story()
    assert len(by_receiver["day"]) == len(nodes)
    assert [alert["labels"]["server"] for alert in by_receiver["page-search"]] == ["vllm-8000"]
    assert [alert["labels"]["server"] for alert in by_receiver["page"]] == ["vllm-8001"]


def test_the_scaled_routes_are_the_shipped_ones_but_for_their_times() -> None:
    shipped = yaml.safe_load((ROOT / "deploy/alertmanager/alertmanager.yml").read_text())
    scaled = yaml.safe_load(scaled_routes(NOWHERE))

    assert scaled["inhibit_rules"] == shipped["inhibit_rules"]
    assert (scaled["route"]["group_wait"], scaled["route"]["group_interval"]) == ("1s", "5s")
