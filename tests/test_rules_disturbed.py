"""Every alert under disturbance: an exporter that is restarted, counters that begin anew, series that are missing.

Made from the promtool tests in which an alert fires, so that a new alert is disturbed as soon as it has one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from stallwatch.rules import DEFAULT_FILES, OPTIONAL_FILES, rule_files

RULES = Path(__file__).parents[1] / "rules"
TESTS = sorted(RULES.glob("tests/*.test.yml"))
STEP = 15
GAP = 4
"""Samples that a restart costs: one minute."""
WATCHED = 7
"""Evaluations from the first firing on, over the gap and the two that see the exporter again."""

_RUN = re.compile(r"(?P<value>-?[0-9.e]+)(?:(?P<step>[+-][0-9.e]+))?(?:x(?P<more>\d+))?")
UNWELL = re.compile(r"<error|<no value>|<nil>|%!|\bNaN\b|\+Inf")
"""What templates leave where something fails or is not there."""


class Firing(NamedTuple):
    """A promtool test in which an alert fires, and the first time it does."""

    file: Path
    rules: str
    test: Mapping[str, Any]
    alert: str
    severity: str
    seconds: int
    times: int


def parse_seconds(text: str) -> int:
    factors = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * factors[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


def samples(text: str) -> list[float | str | None]:
    """promtool's notation written out: a number, `stale`, or None for no sample."""
    found: list[float | str | None] = []
    for word in text.split():
        if word == "stale":
            found.append(word)
        elif word.startswith("_"):
            found += [None] * int(word[2:] or 1)
        else:
            run = _RUN.fullmatch(word)
            assert run, word
            value, step = float(run["value"]), float(run["step"] or 0)
            found += [value + n * step for n in range(int(run["more"] or 0) + 1)]
    return found


def notation(values: Sequence[float | str | None]) -> str:
    return " ".join("_" if value is None else str(value) for value in values)


def restarted(series: Mapping[str, str], at: int) -> dict[str, str]:
    """The series of an exporter that is not there for GAP samples from `at` on, and whose counters then begin anew."""
    values = samples(series["values"])
    if series["series"].startswith("up{"):
        return {**series, "values": notation(values)}
    is_counter = series["series"].partition("{")[0].endswith("_total")
    base = next((v for v in reversed(values[: at + GAP]) if isinstance(v, float)), 0.0) if is_counter else 0.0
    after = [v - base if isinstance(v, float) else v for v in values[at + GAP :]]
    return {**series, "values": notation([*values[:at], "stale", *[None] * (GAP - 1), *after])}


def firings() -> Iterator[Firing]:
    for path in TESTS:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        rules = Path(document["rule_files"][0]).name
        for test in document["tests"]:
            seen = set()
            for case in test.get("alert_rule_test", ()):
                for each in case.get("exp_alerts") or ():
                    key = (case["alertname"], each["exp_labels"]["severity"])
                    if key not in seen:
                        seen.add(key)
                        same = [a for a in case["exp_alerts"] if a["exp_labels"]["severity"] == key[1]]
                        yield Firing(path, rules, test, *key, parse_seconds(case["eval_time"]), len(same))


FIRINGS = list(firings())
each_file = pytest.mark.parametrize("path", sorted({firing.file for firing in FIRINGS}), ids=lambda path: path.name)


NAMES = {file.name: [rule.name for rule in file.alerts()] for file in rule_files((*DEFAULT_FILES, *OPTIONAL_FILES))}


def promtool(folder: Path, disturbed: Iterable[tuple[Firing | Silence, Mapping[str, Any]]]) -> tuple[int, str]:
    """Exit status and output for these tests.  Each alert is alone in its rule file: the others only cost time."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    of_alert: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for asked, test in disturbed:
        of_alert.setdefault((asked.rules, asked.alert), []).append(test)
    paths = []
    for (rules, alert), tests in of_alert.items():
        (alone,) = rule_files((rules,), without=[name for name in NAMES[rules] if name != alert])
        (folder / f"{alert}.yml").write_text(alone.text(), encoding="utf-8")
        text = {"rule_files": [f"{alert}.yml"], "evaluation_interval": f"{STEP}s", "tests": tests}
        paths.append(folder / f"{alert}.test.yml")
        paths[-1].write_text(json.dumps(text), encoding="utf-8")
    done = subprocess.run([program, "test", "rules", *paths], capture_output=True, text=True, check=False, timeout=600)
    return done.returncode, done.stdout + done.stderr


def over_a_restart(firing: Firing) -> dict[str, Any]:
    at = firing.seconds // STEP + 1
    alerts = f'ALERTS{{alertname="{firing.alert}",severity="{firing.severity}",alertstate="firing"}}'
    return {
        "name": firing.test["name"],
        "interval": f"{STEP}s",
        "input_series": [restarted(series, at) for series in firing.test["input_series"]],
        "promql_expr_test": [
            {
                "expr": f"count({alerts}) >= bool {firing.times}",
                "eval_time": f"{firing.seconds + n * STEP}s",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
            for n in range(WATCHED)
        ],
    }


@each_file
def test_an_exporter_that_is_restarted_neither_ends_an_alert_nor_begins_it_anew(path: Path, tmp_path: Path) -> None:
    first = {(firing.alert, firing.severity): firing for firing in reversed(FIRINGS)}

    tests = [(firing, over_a_restart(firing)) for firing in first.values() if firing.file == path]
    status, output = promtool(tmp_path, tests)

    assert status == 0, output


# --- where a server is ---------------------------------------------------------------------------------------

INFO = "stallwatch_server_info"
LATE = 2
"""Samples by which the namespace is found later than the server."""


class Placed(NamedTuple):
    """A firing test whose servers are in a namespace, and the labels by which its alert is known."""

    firing: Firing
    labels: Mapping[str, str]

    def is_always_in(self, namespace: str) -> dict[str, Any]:
        """What is asked: it fired, and in the minutes after none of another namespace even waits."""
        known = {**self.labels, "alertname": self.firing.alert}
        selector = ",".join(f'{name}="{value}"' for name, value in known.items())
        labels = f'{{namespace="{namespace}"}}' if namespace else "{}"
        asked = [
            {
                "expr": f"count by (namespace) (group without (alertstate) (count_over_time(ALERTS{{{chosen}}}[1d])))",
                "eval_time": f"{self.firing.seconds + 2 * WATCHED * STEP}s",
                "exp_samples": [{"labels": labels, "value": 1}],
            }
            for chosen in (selector, f'{selector},alertstate="firing"')
        ]
        return {"promql_expr_test": asked}


def placed() -> Iterator[Placed]:
    """Of each alert about a server or a group, and of each severity, the first test in which it fires."""
    for firing in {(each.alert, each.severity): each for each in reversed(FIRINGS)}.values():
        for case in firing.test["alert_rule_test"]:
            if case["alertname"] == firing.alert and parse_seconds(case["eval_time"]) == firing.seconds:
                first = next(
                    a["exp_labels"] for a in case["exp_alerts"] if a["exp_labels"]["severity"] == firing.severity
                )
                labels = {name: value for name, value in first.items() if name != "namespace"}
                if labels.keys() & {"server", "group"} and firing.alert not in NOWHERE:
                    yield Placed(firing, labels)


NOWHERE = ("InferenceServerAbsent",)
"""One that never came is in no namespace yet."""

PLACED = list(placed())
each_place = pytest.mark.parametrize("path", sorted({each.firing.file for each in PLACED}), ids=lambda path: path.name)


def infos(place: Placed) -> list[Mapping[str, str]]:
    """The info series of the test; where it has none, that of the server whose alert fires."""
    found = [series for series in place.firing.test["input_series"] if series["series"].partition("{")[0] == INFO]
    if found or "server" not in place.labels:
        return found
    labels = ",".join(f'{name}="{place.labels[name]}"' for name in ("job", "instance", "server"))
    return [{"series": f"{INFO}{{{labels}}}", "values": f"1x{place.firing.seconds // STEP + 5 * WATCHED}"}]


def in_namespace(series: Mapping[str, str], namespace: str) -> str:
    bare = re.sub(r',?namespace="[^"]*"', "", series["series"])
    return bare.replace("}", f',namespace="{namespace}"}}')


def with_infos(place: Placed, name: str, infos: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    others = [series for series in place.firing.test["input_series"] if series["series"].partition("{")[0] != INFO]
    return {"name": f"{place.firing.test['name']}: {name}", "interval": f"{STEP}s", "input_series": [*others, *infos]}


def lost_once(place: Placed) -> dict[str, Any]:
    """One scrape lacks the info series, after the alert has begun."""
    at = place.firing.seconds // STEP + 2
    changed = []
    for series in infos(place):
        values = samples(series["values"])
        values[at : at + 1] = ["stale"]
        changed.append({"series": in_namespace(series, "search"), "values": notation(values)})
    return with_infos(place, "the info series is lost once", changed) | place.is_always_in("search")


def found_later(place: Placed) -> dict[str, Any]:
    """The namespace is not known before the alert has begun."""
    at = place.firing.seconds // STEP + 1
    changed = []
    for series in infos(place):
        values = samples(series["values"])
        changed.append({"series": in_namespace(series, ""), "values": notation([*values[:at], "stale"])})
        later = notation([*[None] * at, *values[at:]])
        changed.append({"series": in_namespace(series, "search"), "values": later})
    return with_infos(place, "the namespace is found later", changed) | place.is_always_in("")


def found_later_after_a_restart(place: Placed) -> dict[str, Any]:
    at = place.firing.seconds // STEP + 1
    test = place.firing.test["input_series"]
    changed = [restarted(series, at) for series in test if series["series"].partition("{")[0] != INFO]
    for series in infos(place):
        values = samples(restarted(series, at)["values"])
        back = at + GAP
        bare = notation([*[None] * back, *values[back : back + LATE], "stale"])
        known = notation([*values[:back], *[None] * LATE, *values[back + LATE :]])
        changed.append({"series": in_namespace(series, ""), "values": bare})
        changed.append({"series": in_namespace(series, "search"), "values": known})
    name = f"{place.firing.test['name']}: after a restart the namespace is found later"
    return {"name": name, "interval": f"{STEP}s", "input_series": changed} | place.is_always_in("search")


@each_place
@pytest.mark.parametrize("disturbed", [lost_once, found_later, found_later_after_a_restart])
def test_an_alert_stays_in_the_namespace_in_which_it_began(
    disturbed: Callable[[Placed], dict[str, Any]], path: Path, tmp_path: Path
) -> None:
    tests = [(place.firing, disturbed(place)) for place in PLACED if place.firing.file == path]

    status, output = promtool(tmp_path, tests)

    assert status == 0, output


class Silence(NamedTuple):
    """A promtool test in which an alert is asked for and never fires, and the last moment at which it is asked for."""

    file: Path
    rules: str
    test: Mapping[str, Any]
    alert: str
    seconds: int


def silences() -> Iterator[Silence]:
    for path in TESTS:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        rules = Path(document["rule_files"][0]).name
        for test in document["tests"]:
            cases = test.get("alert_rule_test", ()) if "silent" in test["name"] else ()
            fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
            for alert in sorted({case["alertname"] for case in cases} - fired):
                asked = [parse_seconds(case["eval_time"]) for case in cases if case["alertname"] == alert]
                yield Silence(path, rules, test, alert, max(asked))


NEWS_AFTER_A_RESTART = ("InferenceServerAbsent",)
"""Of a server that ended before it, an exporter that keeps no state does not know that it was ever there."""

SILENCES = list(silences())
CALM = [silence for silence in SILENCES if silence.alert not in NEWS_AFTER_A_RESTART]


def silent_over_a_restart(silence: Silence, at: int) -> dict[str, Any]:
    alerts = f'ALERTS{{alertname="{silence.alert}",alertstate="firing"}}'
    return {
        "name": f"{silence.test['name']}, restarted at sample {at}",
        "interval": f"{STEP}s",
        "input_series": [restarted(series, at) for series in silence.test["input_series"]],
        "promql_expr_test": [
            {"expr": f"count_over_time({alerts}[1d])", "eval_time": f"{silence.seconds}s", "exp_samples": []}
        ],
    }


@pytest.mark.parametrize("path", sorted({each.file for each in CALM}), ids=lambda path: path.name)
def test_an_exporter_that_is_restarted_and_counts_anew_begins_no_alert(path: Path, tmp_path: Path) -> None:
    """Once early and once late: a counter that falls, and series that come back, are no news by themselves."""
    tests = [
        (silence, silent_over_a_restart(silence, max(1, silence.seconds * share // (3 * STEP))))
        for silence in CALM
        if silence.file == path
        for share in (1, 2)
    ]
    status, output = promtool(tmp_path, tests)

    assert status == 0, output


def without(firing: Firing, metric: str) -> dict[str, Any]:
    kept = [series for series in firing.test["input_series"] if series["series"].partition("{")[0] != metric]
    return {
        "name": f"{firing.alert} without {metric}",
        "interval": f"{STEP}s",
        "input_series": kept,
        # Nothing is expected, so that promtool shows the text where it fires all the same.
        "alert_rule_test": [{"alertname": firing.alert, "eval_time": f"{firing.seconds}s"}],
    }


@each_file
def test_a_text_has_no_hole_where_a_metric_is_missing(path: Path, tmp_path: Path) -> None:
    tests = [
        (firing, without(firing, metric))
        for firing in FIRINGS
        if firing.file == path
        for metric in sorted({series["series"].partition("{")[0] for series in firing.test["input_series"]})
    ]
    status, output = promtool(tmp_path, tests)

    texts = re.findall(r'description="((?:[^"\\]|\\.)*)"', output)
    assert status in (0, 1), output
    assert [text for text in texts if UNWELL.search(text)] == []
    assert [text for text in texts if re.search(r" [,.;:]|\(\)|  |: \.", text)] == []


def test_every_alert_is_disturbed() -> None:
    assert {silence.alert for silence in SILENCES} == {firing.alert for firing in FIRINGS}
    assert {firing.alert for firing in FIRINGS} == {name for names in NAMES.values() for name in names}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1x2 stale _x2 0+15x1", [1.0, 1.0, 1.0, "stale", None, None, 0.0, 15.0]),
        ("-7200-15x1 _ 9e9", [-7200.0, -7215.0, None, 9e9]),
    ],
)
def test_the_notation_is_written_out(text: str, expected: list[float | str | None]) -> None:
    assert samples(text) == expected


def test_a_restart_leaves_a_gap_and_counters_begin_anew() -> None:
    counter = {"series": "stallwatch_a_total{}", "values": "5+1x9"}
    gauge = {"series": "stallwatch_b{}", "values": "5+1x9"}

    assert restarted(counter, 2)["values"] == "5.0 6.0 stale _ _ _ 1.0 2.0 3.0 4.0"
    assert restarted(gauge, 2)["values"] == "5.0 6.0 stale _ _ _ 11.0 12.0 13.0 14.0"
