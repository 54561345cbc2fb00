"""rules/naive.yml over many recordings, by promtool: when each alert first fired.

promtool only compares.  It is told to expect nothing of an expression that carries the wanted times in a label, and
what it says it got instead is read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .series import SCRAPE_SECONDS

RULES = Path(__file__).parents[1] / "rules" / "naive.yml"
SLOWEST_SECONDS = 900.0
PARTS = 2
EVALUATION_SECONDS = 30.0
"""How often the rules are evaluated: half as often as it could be, for the sake of the run."""

_FIRING = 'timestamp(ALERTS{alertstate="firing"})'
_GOT = re.compile(r"\{(?P<labels>[^}]*)\} 1E\+00")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TEST = re.compile(r"^\s+name: (?P<case>[\w-]+),?$", re.MULTILINE)


class NoPromtoolError(Exception):
    """promtool is not installed, or said what nobody expected."""


@dataclass(frozen=True, slots=True)
class Question:
    """One recording as a test: its series, when it stood still (None = never), how long it lasts."""

    case: str
    series: list[dict[str, str]]
    silent_at: float | None
    until: float


@dataclass(frozen=True, slots=True)
class Firing:
    """When an alert first fired: at all, and after nothing moved any more.  Seconds; None = not at all."""

    ever: float | None = None
    after: float | None = None


Answers = Mapping[str, Mapping[tuple[str, str], Firing]]
"""Case -> (alert, server or empty) -> when it fired."""


def alerts() -> dict[str, str]:
    """Name -> expression of every rule, in the order of the file."""
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def metrics() -> frozenset[str]:
    """The metrics the rules look at, without stallwatch_."""
    return frozenset(re.findall(r"\bstallwatch_(\w+)", " ".join(alerts().values())))


def ask(questions: Iterable[Question]) -> Answers:
    """Run promtool over all of them, a part in each of PARTS processes: it uses one core."""
    asked = list(questions)
    parts = [part for number in range(PARTS) if (part := asked[number::PARTS])]
    with ThreadPoolExecutor(PARTS) as pool:
        return {case: found for answers in pool.map(_ask, parts) for case, found in answers.items()}


def _ask(asked: Iterable[Question]) -> Answers:
    program = shutil.which("promtool")
    if program is None:
        raise NoPromtoolError("promtool is not installed (Debian: apt-get install prometheus)")
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{EVALUATION_SECONDS:g}s",
        "tests": [_test(question) for question in asked],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "naive.test.yml")
        path.write_text(yaml.dump(document, sort_keys=False, width=1 << 20, Dumper=_Dumper), encoding="utf-8")
        done = subprocess.run(
            [program, "test", "rules", str(path)], capture_output=True, text=True, check=False, timeout=SLOWEST_SECONDS
        )
    return read(done.stdout + done.stderr)


_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _test(question: Question) -> dict[str, Any]:
    expressions = [_first("ever", question.until, question.until)]
    if question.silent_at is not None:
        expressions.append(_first("after", question.until - question.silent_at, question.until))
    return {
        "name": question.case,
        "interval": f"{SCRAPE_SECONDS:g}s",
        "input_series": question.series,
        "promql_expr_test": [*expressions, _said(question.case, question.until)],
    }


def _first(word: str, seconds: float, until: float) -> dict[str, Any]:
    """Alert and server -> the first moment at which it fired in the last `seconds`, as a label."""
    firing = f"min by (alertname, server) (min_over_time({_FIRING}[{seconds:.0f}s:{EVALUATION_SECONDS:g}s]))"
    return {
        "expr": f'count_values by (alertname, server) ("{word}", {firing})',
        "eval_time": f"{until:.0f}s",
        "exp_samples": [],
    }


def _said(case: str, until: float) -> dict[str, Any]:
    """Something that never holds, so that a case in which no alert fires is named, too."""
    return {
        "expr": f'label_replace(vector(1), "case", "{case}", "", "")',
        "eval_time": f"{until:.0f}s",
        "exp_samples": [],
    }


def read(text: str) -> Answers:
    """What promtool says it got; the samples of a case stand before the one that names it."""
    answers: dict[str, dict[tuple[str, str], Firing]] = {}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for got in _GOT.finditer(text):
        labels = dict(_LABEL.findall(got["labels"]))
        if "case" in labels:
            answers[labels["case"]] = {key: Firing(**times) for key, times in found.items()}
            found = {}
            continue
        times = found.setdefault((labels["alertname"], labels.get("server", "")), {})
        times |= {word: float(labels[word]) for word in ("ever", "after") if word in labels}
    if found or not answers:
        raise NoPromtoolError(text[-2000:].strip() or "promtool said nothing")
    return answers
