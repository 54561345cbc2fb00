"""Every alert rule: Prometheus accepts it, it is tested and explained, and looks only at what we export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from stallwatch.catalogue import all_signals
from stallwatch.config import COLLECTORS
from stallwatch.exposition import own_process
from stallwatch.model import CHANNEL_STATES, CHANNELS, PHASES, REASONS, STATES, Signal
from stallwatch.rules import DEFAULT_FILES, OPTIONAL_FILES

RULES = Path(__file__).parents[1] / "rules"
FILES = sorted(RULES / name for name in (*DEFAULT_FILES, *OPTIONAL_FILES))
"""naive.yml is there to be measured, and never loaded: tests/test_score.py."""
TESTS = sorted(RULES.glob("tests/*.test.yml"))
RUNBOOKS = "https://github.com/stallwatch/stallwatch/blob/main/rules/runbooks/"
DASHBOARDS = re.compile(r"https://grafana\.example\.com/d/stallwatch-(fleet|server|node|exporter)(\?var-.*)?")
HEADINGS = (
    "Meaning",
    "Impact",
    "Look first",
    "Likely causes by reason",
    "What to do",
    "When it is a false alarm",
)

VERDICT = frozenset(
    ("stallwatch_server_state", "stallwatch_server_reason", "stallwatch_server_info", "stallwatch_server_ready")
)
"""The verdict, and whom it is about."""

WHO = "stallwatch_server_info"
"""Whom an alert is about; by it alone no alert begins or ends."""

OF_A_VERDICT = VERDICT - {WHO} | frozenset(("stallwatch_channel_state", "stallwatch_channel_age_seconds"))

FORBIDDEN = frozenset(("reason", "rank", "phase", "pid", "state", "channel", "clock", "log", "port", "endpoint", "xid"))
"""Labels an alert never has: each change of one would be a second page."""

OF_OTHERS = frozenset(("up",))
"""What Prometheus itself writes of a target."""

OF_TARGETS = frozenset(("job", "instance"))

CLOSED_SETS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("stallwatch_server_state", "state"): STATES,
    ("stallwatch_server_reason", "reason"): REASONS,
    ("stallwatch_server_phase", "phase"): PHASES,
    ("stallwatch_channel_state", "state"): CHANNEL_STATES,
    ("stallwatch_channel_state", "channel"): CHANNELS,
    ("stallwatch_channel_age_seconds", "channel"): CHANNELS,
    ("stallwatch_read_errors_total", "collector"): COLLECTORS,
}

LEVELS = frozenset(("server", "namespace", "group", "rank", "gpu", "job", "state", "wait", "model", "le"))
"""Words that the level of a recorded series is put together from."""

HOLDING = frozenset(
    (
        "server_namespace_group:stallwatch_server_info:max",
        "group_namespace:stallwatch_server_info:stalled",
        "group_namespace:stallwatch_server_info:incomplete",
        *(f"server_namespace:stallwatch_server_info:{word}" for word in ("warned", "logs", "blind", "raw")),
    )
)
"""Recordings that look at what they were before: where a server is, which no alert may see change."""

OF_NOBODY_KNOWN = ("InferenceServerAbsent",)
"""It has never come, and has no namespace yet."""

NAMES_OF_HISTOGRAM = ("_bucket", "_count", "_sum")


@cache
def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules() -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for path in FILES:
        for group in load(path)["groups"]:
            for rule in group["rules"]:
                yield path, rule


ALERTS = {f"{rule['alert']}-{rule['labels']['severity']}": rule for _, rule in rules() if "alert" in rule}
"""By name and severity: some have two."""

RAW = frozenset(rule["alert"] for path, rule in rules() if "alert" in rule and path.name == "raw.yml")
NAMES = sorted({rule["alert"] for rule in ALERTS.values()})
RECORDS = {rule["record"]: rule for _, rule in rules() if "record" in rule}
each_record = pytest.mark.parametrize("name", RECORDS)
each_alert = pytest.mark.parametrize("name", ALERTS)
each_name = pytest.mark.parametrize("name", NAMES)


@cache
def exported() -> Mapping[str, Signal]:
    """Metric name -> signal, of all that there is, and of the client library's own."""
    own = {metric.name: Signal(metric.name, "", ()) for metric in own_process()}
    return own | {f"stallwatch_{signal.name}": signal for signal in all_signals()}


def signal_of(metric: str, signals: Mapping[str, Signal]) -> Signal | None:
    for ending in ("", *NAMES_OF_HISTOGRAM):
        if metric.endswith(ending) and metric.removesuffix(ending) in signals:
            return signals[metric.removesuffix(ending)]
    return None


def labels_of(metric: str, signals: Mapping[str, Signal]) -> set[str]:
    if metric in RECORDS:
        return recorded_labels(metric) if metric not in _asked else set()
    signal = signal_of(metric, signals)
    return (set(signal.labels) | ({"le"} if metric.endswith("_bucket") else set())) if signal else set()


_asked: list[str] = []
"""Recordings whose labels are being found: what one was before brings nothing new into what it is."""


@cache
def recorded_labels(name: str) -> set[str]:
    _asked.append(name)
    try:
        return carried(promql.parse(RECORDS[name]["expr"]), exported())
    finally:
        _asked.pop()


# --- expressions as trees ------------------------------------------------------------------------------------


def carried(node: promql.Expr, signals: Mapping[str, Signal]) -> set[str]:
    """The labels of ours an expression can bring into its alert; at most too many."""
    match node:
        case promql.VectorSelector():
            return labels_of(node.name or "", signals)
        case promql.AggregateExpr():
            inner = carried(node.expr, signals)
            if str(node.op) in ("topk", "bottomk"):
                return inner
            if node.modifier is None:
                return set()
            listed = set(node.modifier.labels)
            return listed if node.modifier.type == promql.AggModifierType.By else inner - listed
        case promql.BinaryExpr():
            left, right = carried(node.lhs, signals), carried(node.rhs, signals)
            left |= set((node.modifier and node.modifier.group_labels) or ())
            sides = {"or": left | right, "and": left, "unless": left}
            many = node.modifier is not None and str(node.modifier.card) == "VectorMatchCardinality.OneToMany"
            return sides.get(str(node.op), right if many else left or right)
        case promql.Call():
            return {label for argument in node.args for label in carried(argument, signals)}
        case promql.MatrixSelector():
            return carried(node.vector_selector, signals)
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            return carried(node.expr, signals)
    return set()


def selectors(node: promql.Expr) -> Iterator[promql.VectorSelector]:
    match node:
        case promql.VectorSelector():
            yield node
        case promql.MatrixSelector():
            yield node.vector_selector
        case promql.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql.Call():
            for argument in node.args:
                yield from selectors(argument)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            yield from selectors(node.expr)


def expressions(rule: Mapping[str, Any]) -> Iterator[promql.Expr]:
    """That of the rule, and those its texts ask for: each string of a `printf` that is a query, its places filled."""
    yield promql.parse(rule["expr"])
    for text in rule.get("annotations", {}).values():
        for quoted in re.findall(r'printf ("(?:[^"\\]|\\.)*")', text):
            query = str(yaml.safe_load(quoted))
            if query != "%.0f":
                yield promql.parse(query.replace("%q", '"x"').replace("%f", "1").replace("%s", "vector(1)"))


def selected(rule: Mapping[str, Any]) -> list[promql.VectorSelector]:
    return [selector for expression in expressions(rule) for selector in selectors(expression)]


def used(rule: Mapping[str, Any]) -> set[str]:
    """The exported metrics that its expression rests on, also by what is recorded."""
    found = {selector.name or "" for selector in selectors(promql.parse(rule["expr"]))} - {rule.get("record")}
    return (found - RECORDS.keys()).union(*(used(RECORDS[name]) for name in found & RECORDS.keys()))


def outcomes(name: str) -> Iterator[tuple[str, list[bool]]]:
    """For each promtool test that asks for the alert: its name, and whether the alert fires at each time."""
    for path in TESTS:
        for test in load(path)["tests"]:
            asked = [case for case in test.get("alert_rule_test", ()) if case["alertname"] == name]
            if asked:
                yield test["name"], [bool(case.get("exp_alerts")) for case in asked]


def names_in(test: Mapping[str, Any]) -> set[str]:
    """The metrics that a promtool test gives."""
    return {series["series"].partition("{")[0] for series in test["input_series"]}


def promtool(*arguments: str | Path) -> str:
    """What promtool says on both streams; AssertionError with that text when it is not content."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_prometheus_accepts_the_file_without_a_lint(path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", path)


@pytest.mark.parametrize("document", ["README.md", "rules/README.md"])
def test_a_document_names_the_files_to_load_and_no_others(document: str) -> None:
    """A pattern would load what is there to be measured, or to be chosen."""
    text = (RULES.parent / document).read_text(encoding="utf-8")
    blocks = [
        block for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "rule_files" in block
    ]

    named = [path for block in blocks for path in yaml.safe_load(block)["rule_files"]]

    assert {Path(path).name for path in named} in ({"stallwatch.yml"}, set(DEFAULT_FILES))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_the_rules_do_what_their_tests_say(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path)


def test_the_alerts_of_the_first_hour_are_there() -> None:
    assert {
        "InferenceServerStalled",
        "InferenceServerFailed",
        "InferenceServingStalled",
        "InferenceStartupSuspect",
        "StallwatchDown",
        "StallwatchCollectorStuck",
        "StallwatchBlind",
    } <= set(NAMES)


def test_a_name_stands_twice_only_with_two_severities() -> None:
    assert len(ALERTS) == len([rule for _, rule in rules() if "alert" in rule])


@each_alert
def test_an_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on(name: str) -> None:
    rule = ALERTS[name]
    book = "InferenceRaw" if rule["alert"] in RAW else rule["alert"]

    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"].strip()
    assert "First" in rule["annotations"]["description"], "the description ends with the first thing to do"
    assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}{book}.md"
    assert DASHBOARDS.fullmatch(rule["annotations"]["dashboard_url"])


@each_alert
def test_an_alert_about_a_server_names_model_pod_and_unit(name: str) -> None:
    """All but that of a server that has no process, of which nothing else is known."""
    text = ALERTS[name]["annotations"]["description"]

    if "$labels.server" in text and ALERTS[name]["alert"] != "InferenceServerAbsent":
        assert 'label "model"' in text
        assert 'args "namespace" "pod" "container" "unit" "slurm_job"' in text


@each_alert
def test_the_dashboard_of_an_alert_is_there_and_knows_the_variables_it_is_given(name: str) -> None:
    url = ALERTS[name]["annotations"]["dashboard_url"]
    uid, given = re.findall(r"/d/([\w-]+)", url), re.findall(r"[?&]var-(\w+)=", url)

    dashboard = json.loads((RULES.parent / "grafana/dashboards" / f"{uid[0]}.json").read_text(encoding="utf-8"))

    assert dashboard["uid"] == uid[0]
    assert set(given) <= {variable["name"] for variable in dashboard["templating"]["list"]}


def lines_before(path: Path, key: str) -> Iterator[tuple[str, str]]:
    """Each line of a file with this key, and the line before it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return ((before, line) for before, line in pairwise(lines) if line.strip().startswith(key))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_comment_argues_how_long_an_alert_is_kept(path: Path) -> None:
    alerts = [rule for group in load(path)["groups"] for rule in group["rules"] if "alert" in rule]
    kept = list(lines_before(path, "keep_firing_for:"))

    assert len(kept) == len(alerts)
    assert [line for before, line in kept if not before.strip().startswith("# ")] == []


@each_name
def test_an_alert_has_a_runbook_with_the_six_headings_in_order(name: str) -> None:
    text = (RULES / "runbooks" / f"{'InferenceRaw' if name in RAW else name}.md").read_text(encoding="utf-8")

    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]

    assert tuple(section.partition("\n")[0] for section in sections) == HEADINGS
    assert all(section.partition("\n")[2].strip() for section in sections), "a heading without a text"
    assert name in text


def test_every_runbook_belongs_to_an_alert() -> None:
    books = {path.stem for path in RULES.glob("runbooks/*.md")}

    assert books == (set(NAMES) - RAW) | {"InferenceRaw"}


@each_name
def test_an_alert_has_a_test_that_fires_and_a_silent_one(name: str) -> None:
    of_alert = list(outcomes(name))

    assert [test for test, fires in of_alert if any(fires) and f"{name} fires" in test]
    assert [test for test, fires in of_alert if not any(fires) and "silent" in test]


@each_alert
def test_an_alert_has_a_test_that_fires_with_its_severity(name: str) -> None:
    alert, severity = name.split("-")
    cases = [case for path in TESTS for test in load(path)["tests"] for case in test.get("alert_rule_test", ())]

    fired = [each for case in cases if case["alertname"] == alert for each in case.get("exp_alerts") or ()]

    assert severity in {each["exp_labels"]["severity"] for each in fired}


@each_alert
def test_no_label_of_an_alert_changes_while_the_story_stays_the_same(name: str) -> None:
    rule = ALERTS[name]

    assert not FORBIDDEN & set(rule["labels"])
    assert not FORBIDDEN & carried(promql.parse(rule["expr"]), exported())
    assert not any("{{" in value for value in rule["labels"].values()), "a templated label changes as well"


@each_alert
def test_an_alert_about_a_server_or_a_group_has_its_namespace(name: str) -> None:
    labels = carried(promql.parse(ALERTS[name]["expr"]), exported())

    assert ("namespace" in labels) is (
        bool(labels & {"server", "group"}) and ALERTS[name]["alert"] not in OF_NOBODY_KNOWN
    )


@each_alert
def test_a_page_rests_on_the_verdict_alone(name: str) -> None:
    metrics = used(ALERTS[name])

    assert ALERTS[name]["labels"]["severity"] != "critical" or "stallwatch_server_state" in metrics <= VERDICT


def test_a_raw_alert_rests_on_no_verdict() -> None:
    raw = [rule for rule in ALERTS.values() if rule["alert"] in RAW]

    assert raw
    assert [rule["alert"] for rule in raw if used(rule) & OF_A_VERDICT] == []


def test_a_raw_alert_fires_where_nothing_is_known_of_its_server() -> None:
    without = [test for path in TESTS for test in load(path)["tests"] if not names_in(test) & VERDICT]
    asked = [case for test in without for case in test.get("alert_rule_test", ())]

    assert {case["alertname"] for case in asked if case.get("exp_alerts")} >= RAW


@each_alert
def test_every_metric_in_a_rule_is_exported(name: str) -> None:
    signals = exported()
    metrics = {selector.name or "" for selector in selected(ALERTS[name])} - OF_OTHERS - RECORDS.keys()

    assert [metric for metric in metrics if signal_of(metric, signals) is None] == []


@each_alert
def test_every_label_in_a_selector_is_one_the_metric_has_and_its_value_one_it_can_be(name: str) -> None:
    """`{server=…}` of a metric without that label would match nothing and never say so."""
    signals = exported()
    for selector in selected(ALERTS[name]):
        metric = selector.name or ""
        for matcher in selector.matchers.matchers:
            assert matcher.name in OF_TARGETS | labels_of(metric, signals), metric
            allowed = CLOSED_SETS.get((metric, matcher.name))
            assert allowed is None or set(matcher.value.split("|")) <= {*allowed, "x"}, metric


@each_record
def test_a_recording_rule_says_level_metric_and_operation_in_its_name(name: str) -> None:
    level, metric, operation = name.split(":")

    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", part) for part in (level, metric, operation))
    assert set(level.split("_")) <= LEVELS


@each_record
def test_a_recording_rule_rests_on_what_is_exported_or_on_others_of_its_group(name: str) -> None:
    signals = exported()
    metrics = {selector.name or "" for selector in selected(RECORDS[name])}
    recorded, read = {m for m in metrics if ":" in m}, {m for m in metrics if m.startswith("stallwatch_")}

    assert recorded <= set(RECORDS)
    assert (name in recorded) is (name in HOLDING), "what it was before must not be what it is"
    assert (recorded - {name}) | read, "it would record nothing of ours"
    assert [metric for metric in read if signal_of(metric, signals) is None] == []


@each_record
def test_a_recording_rule_has_a_test_with_its_value(name: str) -> None:
    cases = [case for path in TESTS for test in load(path)["tests"] for case in test.get("promql_expr_test", ())]

    assert [case for case in cases if name in case["expr"] and case["exp_samples"]]


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("stallwatch_rank_alive == 0", {"server", "rank"}),
        ("0 == stallwatch_rank_alive", {"server", "rank"}),
        ("max by (job, instance, server) (stallwatch_rank_alive) == 0", {"job", "instance", "server"}),
        ("min without (rank) (stallwatch_rank_alive) == 0", {"server"}),
        ("sum(stallwatch_rank_alive)", set()),
        ("max by (server, rank) (stallwatch_rank_alive)", {"server", "rank"}),
        ("max by (server) (stallwatch_rank_alive) or stallwatch_rank_alive", {"server", "rank"}),
        ("max by (server) (stallwatch_rank_alive) unless on (server) stallwatch_rank_alive", {"server"}),
        ("time() - stallwatch_rank_alive", {"server", "rank"}),
        ("up * on (job) group_left (node) stallwatch_up", {"node"}),
        ("stallwatch_up - on (job) group_right () stallwatch_rank_alive", {"server", "rank"}),
        ("max by (server) (max without (server) (stallwatch_rank_alive)) == (1)", {"server"}),
        ("topk by (server) (1, stallwatch_rank_alive)", {"server", "rank"}),
        ("-increase(stallwatch_rank_alive[5m])", {"server", "rank"}),
        ("up == 0", set()),
    ],
)
def test_the_labels_an_expression_brings_are_found(expr: str, expected: set[str]) -> None:
    signals = {
        "stallwatch_rank_alive": Signal("rank_alive", "", ("server", "rank")),
        "stallwatch_up": Signal("up", "", ("node",)),
    }

    assert carried(promql.parse(expr), signals) == expected


def test_a_query_of_a_text_is_found() -> None:
    text = '{{ with printf "sum(stallwatch_a{server=%q,b=\\"\\"})" $x | query }}{{ printf "%.0f" $value }}{{ end }}'

    found = selected({"expr": "up", "annotations": {"summary": text}})

    assert [selector.name for selector in found] == ["up", "stallwatch_a"]
