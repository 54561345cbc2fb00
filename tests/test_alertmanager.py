"""The example configuration of Alertmanager: it is accepted, and alerts go where it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stallwatch.rules import DEFAULT_FILES, OPTIONAL_FILES, rule_files

CONFIG = Path(__file__).parents[1] / "deploy/alertmanager/alertmanager.yml"
ALERTS = sorted({rule.name for file in rule_files((*DEFAULT_FILES, *OPTIONAL_FILES)) for rule in file.alerts()})


def amtool(*arguments: str) -> str:
    program = shutil.which("amtool")
    if program is None:
        pytest.skip("amtool is not installed (Debian: apt-get install prometheus-alertmanager)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def config() -> Any:
    return yaml.safe_load(CONFIG.read_text(encoding="utf-8"))


def test_alertmanager_accepts_it() -> None:
    assert "SUCCESS" in amtool("check-config", str(CONFIG))


def test_no_route_is_unreachable_and_no_inhibition_too_wide_for_our_rules() -> None:
    rules = [argument for name in DEFAULT_FILES for argument in ("--rules", str(CONFIG.parents[2] / "rules" / name))]
    command = [str(Path(sys.executable).with_name("amlint")), "check", "--strict", *rules, str(CONFIG)]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("alertname=InferenceServerStalled severity=critical", "page"),
        ("alertname=InferenceServerStalled severity=critical namespace=search", "page-search"),
        ("alertname=InferenceServerStalled severity=critical namespace=searching", "page"),
        ("alertname=InferenceServingStalled severity=warning namespace=search", "day-search"),
        ("alertname=InferenceServerFailed severity=critical", "page"),
        ("alertname=InferenceServerFailed severity=warning", "day"),
        ("alertname=InferenceServerFailed severity=critical namespace=search", "page-search"),
        ("alertname=InferenceGroupStalled severity=critical group=1f2e3d4c", "page"),
        ("alertname=InferenceGroupStalled severity=critical group=1f2e3d4c namespace=search", "page-search"),
        ("alertname=InferenceGroupIncomplete severity=warning group=1f2e3d4c", "day"),
        ("alertname=InferenceGroupIncomplete severity=warning group=1f2e3d4c namespace=search", "day-search"),
        ("alertname=InferenceRankDead severity=warning", "day"),
        ("alertname=InferenceRankDead severity=warning namespace=search", "day-search"),
        ("alertname=InferenceRestartLoop severity=warning", "day"),
        ("alertname=InferenceRestartLoop severity=warning namespace=search", "day-search"),
        ("alertname=InferenceRestartLoop severity=warning namespace=searching", "day"),
        ("alertname=InferenceLogUnreadable severity=warning namespace=search", "day-search"),
        ("alertname=StallwatchBlind severity=warning namespace=search", "day"),
        ("alertname=InferenceRankBehind severity=info", "info"),
        ("alertname=InferenceStartupSlow severity=info namespace=search", "info"),
        ("alertname=GpuXid severity=warning", "day"),
        ("alertname=GpuXid severity=info", "info"),
        ("alertname=StallwatchDown severity=warning", "day"),
        ("alertname=SomethingElse", "day"),
    ],
)
def test_an_alert_goes_to_its_receiver(labels: str, receiver: str) -> None:
    assert amtool("config", "routes", "test", f"--config.file={CONFIG}", *labels.split()).strip() == receiver


def test_only_what_wakes_goes_to_a_pager() -> None:
    for file in rule_files((*DEFAULT_FILES, *OPTIONAL_FILES)):
        for rule in file.alerts():
            severity = str(yaml.safe_load(rule.text)[0]["labels"]["severity"])
            labels = (f"alertname={rule.name}", f"severity={severity}")
            receiver = amtool("config", "routes", "test", f"--config.file={CONFIG}", *labels).strip()
            assert receiver == {"critical": "page", "warning": "day", "info": "info"}[severity], rule.name


def test_every_alert_about_a_server_goes_to_the_team_of_its_namespace() -> None:
    """But what nobody is sent at once."""
    for file in rule_files((*DEFAULT_FILES, *OPTIONAL_FILES)):
        for rule in file.alerts():
            severity = str(yaml.safe_load(rule.text)[0]["labels"]["severity"])
            labels = (f"alertname={rule.name}", f"severity={severity}", "namespace=search")
            receiver = amtool("config", "routes", "test", f"--config.file={CONFIG}", *labels).strip()
            if rule.name.startswith("Inference"):
                assert receiver == {"critical": "page-search", "warning": "day-search", "info": "info"}[severity]


def test_a_death_does_not_wait_and_the_others_ten_seconds() -> None:
    route = config()["route"]
    deaths = next(each for each in route["routes"] if "InferenceServerFailed" in str(each["matchers"]))

    assert route["group_wait"] == "10s"
    assert deaths["group_wait"] == "0s"


def test_every_alert_it_names_is_one_of_ours() -> None:
    """A misspelled name in a matcher inhibits nothing and never says so."""
    routed = [matcher for route in config()["route"]["routes"] for matcher in route["matchers"]]
    rules = [m for rule in config()["inhibit_rules"] for m in (*rule["source_matchers"], *rule["target_matchers"])]
    patterns = [m.partition("~")[2] or m.partition("=")[2] for m in (*routed, *rules) if m.startswith("alertname")]
    names = [name for pattern in patterns for name in pattern.strip('"').split("|")]

    assert len(names) > 10
    assert [name for name in names if not any(re.fullmatch(name, alert) for alert in ALERTS)] == []
