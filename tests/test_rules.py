"""Every alert rule: Prometheus accepts it, it is tested and explained, and looks only at what we export."""

from __future__ import annotations

import pkgutil
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import stallwatch
from stallwatch.model import Signal

RULES = Path(__file__).parents[1] / "rules"
FILES = sorted(RULES.glob("*.yml"))
TESTS = sorted(RULES.glob("tests/*.test.yml"))
RUNBOOKS = "https://github.com/stallwatch/stallwatch/blob/main/rules/runbooks/"
HEADINGS = (
    "Meaning",
    "Impact",
    "Look first",
    "Likely causes by reason",
    "What to do",
    "When it is a false alarm",
)

VERDICT = frozenset(("stallwatch_server_state", "stallwatch_server_reason", "stallwatch_server_info"))
"""The verdict, and whom it is about."""

FORBIDDEN = frozenset(("reason", "rank", "phase", "pid"))
"""Labels an alert never has: each change of one would be a second page."""

OWN = re.compile(r"\bstallwatch_[a-z0-9_]+")
AGGREGATION = re.compile(r"\b\w+ (?P<how>by|without) \((?P<labels>[^)]*)\) \(")
NAMES_OF_HISTOGRAM = ("_bucket", "_count", "_sum")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules() -> Iterator[Mapping[str, Any]]:
    for path in FILES:
        for group in load(path)["groups"]:
            yield from group["rules"]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in rules() if "record" in rule}
each_record = pytest.mark.parametrize("name", RECORDS)
each_alert = pytest.mark.parametrize("name", ALERTS)


def exported() -> dict[str, Signal]:
    """Metric name -> signal, for every Signal a module of stallwatch declares."""
    found = {}
    for module in pkgutil.walk_packages(stallwatch.__path__, "stallwatch."):
        if module.name.startswith(("stallwatch.signals", "stallwatch.exposition", "stallwatch.sources.")):
            for value in vars(import_module(module.name)).values():
                for signal in value if isinstance(value, tuple) else (value,):
                    if isinstance(signal, Signal):
                        found[f"stallwatch_{signal.name}"] = signal
    return found


def signal_of(metric: str, signals: Mapping[str, Signal]) -> Signal | None:
    for ending in ("", *NAMES_OF_HISTOGRAM):
        if metric.endswith(ending) and metric.removesuffix(ending) in signals:
            return signals[metric.removesuffix(ending)]
    return None


def carried(expr: str, signals: Mapping[str, Signal]) -> set[str]:
    """The labels of ours an expression can bring into its alert, after its `by (…)` and `without (…)`."""
    labels: set[str] = set()
    while found := AGGREGATION.search(expr):
        end = _end_of_bracket(expr, found.end())
        listed = {label.strip() for label in found["labels"].split(",")}
        inner = carried(expr[found.end() : end - 1], signals)
        labels |= listed if found["how"] == "by" else inner - listed
        expr = expr[: found.start()] + expr[end:]
    for metric in OWN.findall(expr):
        signal = signal_of(metric, signals)
        labels |= set(signal.labels) if signal else set()
    return labels


def _end_of_bracket(text: str, start: int) -> int:
    """The place after the bracket that closes the one opened just before `start`."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[start], 0)
        start += 1
    return start


def texts_of(rule: Mapping[str, Any]) -> str:
    return "\n".join((rule["expr"], *rule.get("annotations", {}).values()))


def outcomes(name: str) -> Iterator[tuple[str, list[bool]]]:
    """For each promtool test that asks for the alert: its name, and whether the alert fires at each time."""
    for path in TESTS:
        for test in load(path)["tests"]:
            asked = [case for case in test.get("alert_rule_test", ()) if case["alertname"] == name]
            if asked:
                yield test["name"], [bool(case.get("exp_alerts")) for case in asked]


def promtool(*arguments: str | Path) -> str:
    """What promtool says on both streams; AssertionError with that text when it is not content."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_prometheus_accepts_the_file_without_a_lint(path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", path)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_the_rules_do_what_their_tests_say(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path)


def test_the_five_first_rules_are_there() -> None:
    assert {
        "InferenceServerStalled",
        "InferenceServerFailed",
        "StallwatchDown",
        "StallwatchCollectorStuck",
        "StallwatchBlind",
    } <= set(ALERTS)


def test_no_two_rules_share_a_name() -> None:
    names = [rule["alert"] for rule in rules() if "alert" in rule]

    assert sorted(set(names)) == sorted(names)


@each_alert
def test_an_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on(name: str) -> None:
    rule = ALERTS[name]

    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"].strip()
    assert "First" in rule["annotations"]["description"], "the description ends with the first thing to do"
    assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}{name}.md"


@each_alert
def test_an_alert_has_a_runbook_with_the_six_headings_in_order(name: str) -> None:
    text = (RULES / "runbooks" / f"{name}.md").read_text(encoding="utf-8")

    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]

    assert tuple(section.partition("\n")[0] for section in sections) == HEADINGS
    assert all(section.partition("\n")[2].strip() for section in sections), "a heading without a text"


def test_every_runbook_belongs_to_an_alert() -> None:
    assert {path.stem for path in RULES.glob("runbooks/*.md")} == set(ALERTS)


@each_alert
def test_an_alert_has_a_test_that_fires_and_a_silent_one(name: str) -> None:
    of_alert = list(outcomes(name))

    assert [test for test, fires in of_alert if any(fires) and f"{name} fires" in test]
    assert [test for test, fires in of_alert if not any(fires) and "silent" in test]


@each_alert
def test_no_label_of_an_alert_changes_while_the_story_stays_the_same(name: str) -> None:
    rule = ALERTS[name]

    assert not FORBIDDEN & set(rule["labels"])
    assert not FORBIDDEN & carried(rule["expr"], exported())
    assert not any("{{" in value for value in rule["labels"].values()), "a templated label changes as well"


@each_alert
def test_a_page_rests_on_the_verdict_alone(name: str) -> None:
    rule = ALERTS[name]

    used = set(OWN.findall(rule["expr"]))
    assert rule["labels"]["severity"] != "critical" or "stallwatch_server_state" in used <= VERDICT


@each_alert
def test_every_metric_in_a_rule_is_exported(name: str) -> None:
    signals = exported()

    assert [m for m in OWN.findall(texts_of(ALERTS[name])) if signal_of(m, signals) is None] == []


@each_alert
def test_every_label_in_a_selector_is_one_the_metric_has(name: str) -> None:
    """`{server=…}` of a metric without that label would match nothing and never say so."""
    signals = exported()
    for metric, selector in re.findall(r"\b(stallwatch_[a-z0-9_]+)\{([^}]*)\}", texts_of(ALERTS[name])):
        signal = signal_of(metric, signals)
        named = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))

        assert signal is not None
        assert named - {"job", "instance"} <= set(signal.labels), metric


@each_record
def test_a_recording_rule_says_level_metric_and_operation_in_its_name(name: str) -> None:
    level, metric, operation = name.split(":")

    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", part) for part in (level, metric, operation))
    assert set(level.split("_")) <= {"server", "rank", "gpu"}


@each_record
def test_a_recording_rule_rests_on_what_is_exported_or_on_others_of_its_group(name: str) -> None:
    signals = exported()
    expr = RECORDS[name]["expr"]
    foreign = re.sub(r"[a-z_]+:([a-z0-9_]+):[a-z_]+", "", expr)

    assert set(re.findall(r"[a-z_]+:[a-z0-9_]+:[a-z_]+", expr)) <= set(RECORDS) - {name}
    assert [metric for metric in OWN.findall(foreign) if signal_of(metric, signals) is None] == []


@each_record
def test_a_recording_rule_has_a_test_with_its_value(name: str) -> None:
    cases = [case for path in TESTS for test in load(path)["tests"] for case in test.get("promql_expr_test", ())]

    assert [case for case in cases if case["expr"] == name and case["exp_samples"]]


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("stallwatch_rank_alive == 0", {"server", "rank"}),
        ("max by (job, instance, server) (stallwatch_rank_alive) == 0", {"job", "instance", "server"}),
        ("min without (rank) (stallwatch_rank_alive) == 0", {"server"}),
        ("max by (server, rank) (stallwatch_rank_alive)", {"server", "rank"}),
        ("max by (server) (stallwatch_rank_alive) or stallwatch_rank_alive", {"server", "rank"}),
        ("max by (server) (max without (server) (stallwatch_rank_alive)) == (1)", {"server"}),
        ("up == 0", set()),
    ],
)
def test_the_labels_an_expression_brings_are_found(expr: str, expected: set[str]) -> None:
    assert carried(expr, {"stallwatch_rank_alive": Signal("rank_alive", "", ("server", "rank"))}) == expected
