"""`stallwatch rules`: the shipped files are its default output, and other values land where they belong."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stallwatch import cli, rules
from stallwatch.rules import DEFAULT_FILES, OPTIONAL_FILES, every_key
from stallwatch.rules.settings import SETTINGS

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((*DEFAULT_FILES, *OPTIONAL_FILES))

ANOTHER: dict[str, tuple[str, str]] = {
    "job": ("watchers", 'up{job="watchers"}'),
    "dashboards": ("https://grafana.example.org/sub/", "https://grafana.example.org/sub/d/stallwatch-server?"),
    "runbooks": ("https://wiki.example.org/stall", "https://wiki.example.org/stall/GpuLost.md"),
    "suspect_after": ("20m", ") >= 1200"),
    "killed_within": ("90s", "< 90 > 0"),
    "behind_share": ("0.25", ">= 0.25"),
    "restarts": ("5", "> 5 - 0.5"),
    "restarts_window": ("1h30m", "[1h30m]"),
    "health_timeouts": ("2", "> 2 - 0.5"),
    "unmatched_share": ("0.8", ">= 0.8"),
    "unmatched_lines": ("50", ">= 50"),
    "unowned_memory": ("512MiB", "stallwatch_gpu_unowned_memory_bytes > 512 * 2^20"),
    "shm_leftovers": ("1TiB", "stallwatch_node_shm_orphan_bytes > 2^40"),
    "xids": ("79|119", 'xid=~"79|119"'),
    "application_xids": ("13|14[4-9]", 'xid=~"13|14[4-9]"'),
    "xid_window": ("1h", "- 3600"),
    "driver_call": ("2m", "stallwatch_gpu_call_in_flight_seconds > 120"),
    "collector_call": ("5m", "stallwatch_collector_in_flight_seconds > 300"),
    "collector_silence": ("10m", "_success_timestamp_seconds > 600"),
    "stale_after": ("7m", "offset 7m"),
    "raw_silence": ("30m", "_silence_seconds) > 1800"),
    "raw_memory": ("8GiB", "> 8 * 2^30"),
}
"""Per key: a value that is not the shipped one, and the text it makes."""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["rules", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["rules", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1, "one sentence"
    return shown.err


def alerts(text: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"] if "alert" in rule]


def promtool_accepts(text: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    command = [program, "check", "rules", "--lint=all", "--lint-fatal", "/dev/stdin"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_is_the_default_output(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, name) == (ROOT / "rules" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SHIPPED)
def test_no_line_is_lost_between_the_parts_of_a_file(name: str) -> None:
    source = rules._source(name)

    assert rules._parse(name, source).text() == source


def test_a_folder_gets_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--out", str(tmp_path / "new")) == ""

    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert written == {name: (ROOT / "rules" / name).read_bytes() for name in SHIPPED}


def test_alone_it_prints_the_usual_files_as_one_that_prometheus_loads(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)

    shipped = [yaml.safe_load((ROOT / "rules" / name).read_text(encoding="utf-8")) for name in DEFAULT_FILES]
    assert yaml.safe_load(text) == {"groups": [group for file in shipped for group in file["groups"]]}
    promtool_accepts(text)


def test_every_marked_place_has_its_case_here() -> None:
    assert set(ANOTHER) == set(SETTINGS)


@pytest.mark.parametrize("key", ANOTHER)
def test_another_value_changes_its_places_and_nothing_else(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, expected = ANOTHER[key]
    shipped = printed(capsys, *SHIPPED)

    text = printed(capsys, *SHIPPED, "--set", f"{key}={value}")

    assert expected in text
    assert expected not in shipped
    was, now = shipped.splitlines(), text.splitlines()
    assert len(was) == len(now)
    changed = [line for before, line in zip(was, now, strict=True) if before != line]
    shown = value.rstrip("/") if value.rstrip("/") in text else expected
    assert all(shown in line or expected in line or re.search(r"[<>=-] \d+", line) for line in changed)


def test_everything_changed_at_once_is_still_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [f"--set={key}={value}" for key, (value, _) in ANOTHER.items()]

    promtool_accepts(printed(capsys, *SHIPPED, *pairs))


def test_the_times_and_the_severity_of_one_alert(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("for=20m", "keep_firing_for=1h", "severity=page")

    text = printed(capsys, "stallwatch.yml", *(f"--set=StallwatchBlind.{change}" for change in changes))

    (blind,) = (alert for alert in alerts(text) if alert["alert"] == "StallwatchBlind")
    assert (blind["for"], blind["keep_firing_for"], blind["labels"]["severity"]) == ("20m", "1h", "page")
    others = [alert for alert in alerts(text) if alert["alert"] != "StallwatchBlind"]
    shipped = alerts((ROOT / "rules/stallwatch.yml").read_text(encoding="utf-8"))
    assert others == [alert for alert in shipped if alert["alert"] != "StallwatchBlind"]


def test_the_times_of_an_alert_of_two_severities_hold_for_both(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--set", "GpuXid.keep_firing_for=7m")

    assert [alert["keep_firing_for"] for alert in alerts(text) if alert["alert"] == "GpuXid"] == ["7m", "7m"]
    assert "GpuXid.severity" not in every_key()


def test_an_alert_left_out_takes_its_comments_along_and_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "gpus.yml", "--without", "GpuXid", "--without", "ShmLeftovers")

    shipped = (ROOT / "rules/gpus.yml").read_text(encoding="utf-8")
    assert alerts(text) == [a for a in alerts(shipped) if a["alert"] not in ("GpuXid", "ShmLeftovers")]
    assert "no new fault" in shipped
    assert "no new fault" not in text
    assert "server_rank_gpu:stallwatch_rank_info:max" in text
    promtool_accepts(text)


def test_what_has_no_alert_left_is_still_a_rule_file(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "optional.yml", "--without", "InferenceServerAbsent")

    assert yaml.safe_load(text) == {"groups": []}


@pytest.mark.parametrize(
    ("arguments", "named", "allowed"),
    [
        (("--set", "stall_after=5m"), "'stall_after'", "suspect_after"),
        (("--set", "StallwatchBlind.colour=red"), "'StallwatchBlind.colour'", "ALERT.severity"),
        (("--set", "restarts"), "'restarts'", "KEY=VALUE"),
        (("--set", "restarts=0"), "restarts: '0'", "whole number from 1 on"),
        (("--set", "restarts="), "restarts: ''", "whole number from 1 on"),
        (("--set", "suspect_after=soon"), "suspect_after: 'soon'", "90s, 5m or 1h30m"),
        (("--set", "restarts_window=0s"), "restarts_window: '0s'", "above 0"),
        (("--set", "behind_share=2"), "behind_share: '2'", "at most 1"),
        (("--set", "unowned_memory=2"), "unowned_memory: '2'", "MiB"),
        (("--set", 'job=a"b'), "job: 'a\"b'", "a word"),
        (("--set", "dashboards=https://x/{{ 1 }}"), "dashboards: 'https://x/{{ 1 }}'", "https://"),
        (("--set", "xids=.*"), "xids: '.*'", "numbers of Xids"),
        (("--set", "GpuLost.for=\n5m"), r"GpuLost.for: '\n5m'", "90s"),
        (("--without", "GpuXidd"), "'GpuXidd'", "GpuXid,"),
        (("alerts.yml",), "'alerts.yml'", "servers.yml"),
        (("--out", "/dev/null/x"), "/dev/null/x cannot be written", "directory"),
    ],
)
def test_what_is_not_known_is_refused_in_one_sentence_that_says_what_is_allowed(
    arguments: tuple[str, ...], named: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, *arguments)

    assert named in error
    assert allowed in error


def test_the_keys_are_listed_with_their_shipped_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--keys")

    assert "suspect_after=15m\n" in text
    assert "InferenceServerStalled.keep_firing_for=2m\n" in text
    assert len(re.findall(r"^\S+=", text, re.MULTILINE)) == len(every_key())


# --- Kubernetes ----------------------------------------------------------------------------------------------


def test_the_shipped_object_is_the_default_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--kubernetes") == (ROOT / "deploy/kubernetes/rules.yaml").read_text("utf-8")


def test_the_object_holds_the_groups_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    rule = yaml.safe_load(printed(capsys, "--kubernetes"))  # one object

    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(printed(capsys))
    promtool_accepts(yaml.safe_dump(rule["spec"]))
