"""Ask a Prometheus what a dashboard asks it: variables filled in, every query of every panel run.

    python -m grafana.evaluate http://prometheus:9090 [hours]

prints every query of the dashboards that fails or finds nothing on the last hours (default 1), with the variables at
their first values.  Finding nothing need be no mistake: a fleet without cards has no panels about cards.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from .files import JSON_FOLDER

Json = dict[str, Any]

STEP_SECONDS = 15
_SECONDS_TO_ANSWER = 30.0
_OPENER = build_opener(ProxyHandler({}))
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.*), (?P<label>\w+)\)")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class QueryError(Exception):
    """Prometheus refused the query, or a variable of it is not known."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer.  `points` are (Unix seconds, value), one of them where the query is instant."""

    labels: Mapping[str, str]
    name: str  # as the panel's legend writes it
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class View:
    """A dashboard as somebody looks at it: which Prometheus, which range, and which variables were chosen."""

    url: str
    start: float
    end: float
    chosen: Mapping[str, str] = field(default_factory=dict)

    def ask(self, path: str, parameters: Mapping[str, Any]) -> Any:
        url = f"{self.url}/api/v1/{path}?{urlencode(parameters)}"
        try:
            with _OPENER.open(url, timeout=_SECONDS_TO_ANSWER) as answer:
                return json.load(answer)["data"]
        except HTTPError as error:
            raise QueryError(json.load(error).get("error", str(error))) from None

    def run(self, expr: str, instant: bool, legend: str) -> list[Series]:
        """The series of one expression, without variables."""
        times: Json = {"time": self.end}
        if not instant:
            times = {"start": self.start, "end": self.end, "step": STEP_SECONDS}
        result = self.ask("query" if instant else "query_range", {"query": expr, **times})["result"]
        return [_series(found, legend) for found in result]

    def values_of(self, dashboard: Json) -> dict[str, str]:
        """Variable -> what stands for it in a query; several values as one regular expression."""
        seconds = int(self.end - self.start)
        values = {"__rate_interval": f"{4 * STEP_SECONDS}s", "__range": f"{seconds}s"}
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                values[variable["name"]] = self._value(variable, values)
        return values

    def _value(self, variable: Json, values: Mapping[str, str]) -> str:
        if variable["name"] in self.chosen:
            return self.chosen[variable["name"]]
        asked = _LABEL_VALUES.fullmatch(variable["query"]["query"])
        if asked is None:
            raise QueryError(f"variable {variable['name']}: {variable['query']['query']}")
        match = {"match[]": filled(asked["selector"], values), "start": self.start, "end": self.end}
        found = self.ask(f"label/{asked['label']}/values", match)
        if not found:
            raise QueryError(f"variable {variable['name']} has no value")
        return "|".join(re.escape(value).replace("\\", "\\\\") for value in found) if variable["multi"] else found[0]


def _series(found: Json, legend: str) -> Series:
    labels = found["metric"]
    points = tuple((float(at), float(value)) for at, value in found.get("values") or [found["value"]])
    name = legend if legend != "__auto" else ", ".join(f"{label}={value}" for label, value in labels.items())
    return Series(labels, _LEGEND.sub(lambda m: labels.get(m[1], ""), name), points)


def filled(expr: str, values: Mapping[str, str]) -> str:
    """The expression with its variables filled in; QueryError where one is unknown."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values:
            raise QueryError(f"variable {name} is unknown")
        return values[name]

    return _VARIABLE.sub(value, expr)


def panels(dashboard: Json) -> Iterator[Json]:
    """Its panels, without the headings of rows."""
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def answers(view: View, dashboard: Json) -> Iterator[tuple[Json, Json, list[Series]]]:
    """Every query with its panel and its answer: (panel, target, series)."""
    values = view.values_of(dashboard)
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield panel, target, view.run(filled(target["expr"], values), target["instant"], target["legendFormat"])


def load(uid: str) -> Json:
    found: Json = json.loads((JSON_FOLDER / f"{uid}.json").read_text(encoding="utf-8"))
    return found


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    hours, now = float(arguments[1]) if len(arguments) > 1 else 1.0, time.time()
    view = View(arguments[0].rstrip("/"), now - hours * 3600, now)
    missing = 0
    for path in sorted(JSON_FOLDER.glob("*.json")):
        for panel, target, series in answers(view, load(path.stem)):
            if not series:
                missing += 1
                print(f"{path.stem}: {panel['title']}: nothing for {target['expr']}")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
