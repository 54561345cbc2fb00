"""What a dashboard is made of: queries, panels, rows and their layout, written as Grafana's JSON.

In an expression `{@` stands for the dashboard's own selector, `{@node` and `{@gpu` for wider and narrower ones; see
Dashboard.  Nothing here knows a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stallwatch.model import CHANNEL_STATES, PHASES, WAITS, WRITE

Json = dict[str, Any]

COLUMNS = 24
SCHEMA_VERSION = 39
"""Of Grafana 10.4; every later one migrates it when it is loaded."""

REPOSITORY = "https://github.com/stallwatch/stallwatch/blob/main"
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}

Choice = tuple[str, str]
"""A word, and its colour.  Colour never stands alone: the word is shown."""

STATES: tuple[Choice, ...] = (
    ("gone", "#8e8e8e"),
    ("idle", "#5794f2"),
    ("working", "#56a64b"),
    ("quiet", "#c8d96f"),
    ("slow", "#f2cc0c"),
    ("unknown", "#a352cc"),
    ("suspect", "#ff9830"),
    ("failed", "#b01e3b"),
    ("stalled", "#f2495c"),
)
"""The least grave first: the place in it is the number a server is sorted by."""

_PHASE_COLORS = (
    *("#c7d0d9", "#8ab8ff", "#5794f2", "#3274d9", "#1f60c4", "#ffb357", "#ff9830", "#fa6400"),
    *("#96d98d", "#56a64b", "#8e8e8e"),
)
_WAIT_COLORS = ("#56a64b", "#5794f2", "#8ab8ff", "#f2cc0c", "#fa6400", "#f2495c", "#c7d0d9", "#a352cc")
_CHANNEL_COLORS = ("#56a64b", "#f2cc0c", "#a352cc", "#c7d0d9")

PHASE_CHOICES: tuple[Choice, ...] = tuple(zip(PHASES, _PHASE_COLORS, strict=True))
WAIT_CHOICES: tuple[Choice, ...] = tuple(zip(WAITS, _WAIT_COLORS, strict=True))
MAIN_WAIT_CHOICES: tuple[Choice, ...] = (*WAIT_CHOICES[:-1], (WRITE, "#8f3bb8"))
CHANNEL_CHOICES: tuple[Choice, ...] = tuple(zip(CHANNEL_STATES, _CHANNEL_COLORS, strict=True))
NO_YES: tuple[Choice, ...] = (("no", "#c7d0d9"), ("yes", "#56a64b"))
NO_BUT: tuple[Choice, ...] = (("no", "#c7d0d9"), ("yes", "#ff9830"))
GONE_LIVES: tuple[Choice, ...] = (("gone", "#f2495c"), ("lives", "#56a64b"))
FAILS_WORKS: tuple[Choice, ...] = (("fails", "#f2495c"), ("works", "#56a64b"))


# --- expressions -------------------------------------------------------------------------------------------


def numbered(metric: str, label: str, choices: Sequence[Choice], by: str) -> str:
    """A family with one series per choice as one number: the place of the choice that is 1."""
    terms = (f'{metric}{{@,{label}="{word}"}} * {number}' for number, (word, _) in enumerate(choices))
    return f"sum by ({by}) ({' or '.join(terms)})"


def mappings(choices: Iterable[Choice]) -> list[Json]:
    """Number -> word and colour."""
    options = {
        str(number): {"text": word, "color": color, "index": number} for number, (word, color) in enumerate(choices)
    }
    return [{"type": "value", "options": options}]


def steps(*bounds: tuple[float, str], base: str = "green") -> Json:
    """Thresholds: `base` below the first bound."""
    first: list[Json] = [{"color": base, "value": None}]
    return {"mode": "absolute", "steps": first + [{"color": color, "value": bound} for bound, color in bounds]}


# --- panels ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression.  `instant`: the value of now, else a line over the whole range."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.  `defaults` and `options` are Grafana's `fieldConfig.defaults` and `options`."""

    kind: str
    title: str
    description: str
    queries: tuple[Query, ...]
    width: int
    height: int
    defaults: Json
    options: Json
    overrides: tuple[Json, ...] = ()
    transformations: tuple[Json, ...] = ()
    runbook: str = ""
    """Name of the alert whose runbook speaks of this."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def stat(
    title: str,
    description: str,
    query: str | tuple[Query, ...],
    width: int,
    unit: str = "none",
    *,
    thresholds: Json | None = None,
    choices: Sequence[Choice] = (),
    legend: str = "",
    no_value: str = "",
    decimals: int | None = None,
    runbook: str = "",
) -> Panel:
    """A number, or with `legend` the word in a label, in large letters."""
    defaults: Json = {"unit": unit, "color": {"mode": "thresholds"}, "thresholds": thresholds or steps(base="text")}
    if choices:
        defaults["mappings"] = mappings(choices)
    if no_value:
        defaults["noValue"] = no_value
    if decimals is not None:
        defaults["decimals"] = decimals
    queries = (Query(query, legend, instant=True),) if isinstance(query, str) else query
    options = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "name" if legend else "value_and_name" if len(queries) > 1 else "value",
    }
    return Panel("stat", title, description, queries, width, 4, defaults, options, runbook=runbook)


def graph(
    title: str,
    description: str,
    queries: tuple[Query, ...],
    width: int,
    unit: str,
    *,
    height: int = 8,
    stacked: bool = False,
    bars: bool = False,
    least: float | None = 0,
    most: float | None = None,
    lines: Json | None = None,
    colors: Iterable[Choice] = (),
    dashed: str = "",
    no_value: str = "",
    runbook: str = "",
) -> Panel:
    """Lines over time.  `lines`: thresholds that are drawn; `dashed`: a pattern of legends that are drawn so."""
    custom: Json = {
        "drawStyle": "bars" if bars else "line",
        "fillOpacity": 60 if stacked or bars else 0,
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if lines else "off"},
    }
    defaults: Json = {
        "unit": unit,
        "color": {"mode": "palette-classic"},
        "custom": custom,
        "thresholds": lines or steps(),
    }
    if no_value:
        defaults["noValue"] = no_value
    for key, bound in (("min", least), ("max", most)):
        if bound is not None:
            defaults[key] = bound
    options: Json = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    overrides = [
        _override("byName", word, color={"mode": "fixed", "fixedColor": color}) for word, color in dict(colors).items()
    ]
    if dashed:
        overrides.append(_override("byRegexp", f"/{dashed}/", **{"custom.lineStyle": {"fill": "dash", "dash": [8, 6]}}))
    return Panel(
        "timeseries",
        title,
        description,
        queries,
        width,
        height,
        defaults,
        options,
        tuple(overrides),
        runbook=runbook,
    )


def timeline(
    title: str,
    description: str,
    queries: tuple[Query, ...],
    width: int,
    choices: Sequence[Choice] = (),
    *,
    height: int = 8,
    thresholds: Json | None = None,
    named: bool = True,
    runbook: str = "",
) -> Panel:
    """One bar per series over time, coloured and named by value; not `named`: the bar says only that it holds."""
    defaults: Json = {
        "unit": "none",
        "color": {"mode": "thresholds"},
        "custom": {"fillOpacity": 75, "lineWidth": 0},
        "thresholds": thresholds or steps(base="blue"),
        "mappings": mappings(choices) if choices else [],
    }
    options: Json = {
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "mergeValues": True,
        "rowHeight": 0.85,
        "showValue": "auto" if named else "never",
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return Panel("state-timeline", title, description, queries, width, height, defaults, options, runbook=runbook)


def bars(
    title: str, description: str, query: Query, width: int, unit: str, *, height: int = 8, thresholds: Json
) -> Panel:
    """One horizontal bar per series of now."""
    defaults: Json = {"unit": unit, "min": 0, "color": {"mode": "thresholds"}, "thresholds": thresholds}
    options: Json = {
        "displayMode": "basic",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
        "valueMode": "color",
    }
    return Panel("bargauge", title, description, (query,), width, height, defaults, options)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.  `field` is a label, or `Value #A` for the number of query A."""

    field: str
    title: str
    unit: str = ""
    choices: Sequence[Choice] = ()
    link: str = ""
    link_title: str = ""


def table(
    title: str,
    description: str,
    queries: tuple[str, ...],
    columns: Sequence[Column],
    *,
    width: int = COLUMNS,
    height: int = 8,
    sort: str = "",
    hidden: Iterable[str] = (),
    runbook: str = "",
) -> Panel:
    """A row per series of now; several queries are joined by the labels they share.  Labels in `hidden` only join."""
    asked = tuple(Query(expr, instant=True) for expr in queries)
    values = {f"Value #{_letter(number)}" for number in range(len(asked))} if len(asked) > 1 else {"Value"}
    shown = [column.field for column in columns]
    organize: Json = {
        "excludeByName": dict.fromkeys(sorted({"Time", *values, *hidden} - set(shown)), True),
        "indexByName": {name: place for place, name in enumerate(shown)},
        "renameByName": {column.field: column.title for column in columns},
    }
    merge: list[Json] = [{"id": "merge", "options": {}}] if len(asked) > 1 else []
    options: Json = {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}}
    if sort:
        options["sortBy"] = [{"displayName": sort, "desc": True}]
    return Panel(
        "table",
        title,
        description,
        asked,
        width,
        height,
        {"unit": "none", "custom": {"align": "auto", "filterable": True}},
        options,
        tuple(filter(None, map(_column_override, columns))),
        (*merge, {"id": "organize", "options": organize}),
        runbook,
    )


def _column_override(column: Column) -> Json | None:
    properties: Json = {}
    if column.unit:
        properties["unit"] = column.unit
    if column.choices:
        properties["mappings"] = mappings(column.choices)
        properties["custom.cellOptions"] = {"type": "color-text"}
    if column.link:
        properties["links"] = [{"title": column.link_title, "url": column.link, "targetBlank": False}]
    return _override("byName", column.title, **properties) if properties else None


def _override(matcher: str, options: str, /, **properties: Any) -> Json:
    return {
        "matcher": {"id": matcher, "options": options},
        "properties": [{"id": name, "value": value} for name, value in properties.items()],
    }


def _letter(number: int) -> str:
    return chr(ord("A") + number)


# --- variables ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable with the values of one label.  `several`: any number may be chosen, and all at first."""

    name: str
    label: str
    metric: str  # with its selector
    several: bool

    def json(self) -> Json:
        query = f"label_values({self.metric}, {self.name})"
        found: Json = {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": DATASOURCE,
            "definition": query,
            "query": {"qryType": 1, "query": query, "refId": "StandardVariableQuery"},
            "refresh": 2,
            "sort": 1,
            "hide": 0,
            "multi": self.several,
            "includeAll": self.several,
            "options": [],
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]} if self.several else {},
        }
        return found


DATASOURCE_VARIABLE: Json = {
    "name": "datasource",
    "label": "data source",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
    "hide": 0,
    "multi": False,
    "includeAll": False,
    "options": [],
    "current": {},
    "regex": "",
}


# --- dashboards --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`selectors`: what stands for `{@`, `{@node`, `{@gpu` in its expressions, by these marks without the brace."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    selectors: Mapping[str, str]
    rows: tuple[Row, ...]
    links: Mapping[str, str] = field(default_factory=dict)
    """Title -> address of the dashboards to go on to."""

    def json(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["stallwatch"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "annotations": {"list": []},
            "templating": {"list": [DATASOURCE_VARIABLE, *(variable.json() for variable in self.variables)]},
            "links": [*map(_link, self.links.items()), _link(("Runbooks", f"{REPOSITORY}/rules/README.md"))],
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterator[Json]:
        number, y = 1, 0
        for row in self.rows:
            yield {
                "id": number,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
                "panels": [],
            }
            number, y = number + 1, y + 1
            for line in lines_of(row):
                x = 0
                for panel in line:
                    place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
                    yield self._panel(panel, number, place)
                    number, x = number + 1, x + panel.width
                y += line[0].height

    def _panel(self, panel: Panel, number: int, place: Json) -> Json:
        found: Json = {
            "id": number,
            "type": panel.kind,
            "title": panel.title,
            "description": panel.description,
            "gridPos": place,
            "datasource": DATASOURCE,
            "fieldConfig": {"defaults": panel.defaults, "overrides": list(panel.overrides)},
            "options": panel.options,
            "targets": [self._target(panel, place, query) for place, query in enumerate(panel.queries)],
        }
        if panel.transformations:
            found["transformations"] = list(panel.transformations)
        if panel.runbook:
            url = f"{REPOSITORY}/rules/runbooks/{panel.runbook}.md"
            found["links"] = [{"title": f"Runbook {panel.runbook}", "url": url, "targetBlank": True}]
        return found

    def _target(self, panel: Panel, place: int, query: Query) -> Json:
        return {
            "refId": _letter(place),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": self.expression(query.expr),
            "legendFormat": query.legend or "__auto",
            "format": "table" if panel.kind == "table" else "time_series",
            "instant": query.instant,
            "range": not query.instant,
        }

    def expression(self, expr: str) -> str:
        """The longest marks first: `@` is the beginning of the others."""
        for mark in sorted(self.selectors, key=len, reverse=True):
            expr = expr.replace("{" + mark, "{" + self.selectors[mark])
        return expr


def lines_of(row: Row) -> Iterator[list[Panel]]:
    """The panels of a row in lines that fill all columns; ValueError when they do not, or differ in height."""
    line: list[Panel] = []
    for panel in row.panels:
        line.append(panel)
        width = sum(each.width for each in line)
        if width > COLUMNS or len({each.height for each in line}) > 1:
            raise ValueError(f"{row.title}: {panel.title} does not fit into its line")
        if width == COLUMNS:
            yield line
            line = []
    if line:
        raise ValueError(f"{row.title}: the last line is not filled")


def _link(link: tuple[str, str]) -> Json:
    title, url = link
    is_outside = url.startswith("https:")
    return {
        "title": title,
        "type": "link",
        "url": url,
        "icon": "doc" if is_outside else "dashboard",
        "tooltip": "",
        "tags": [],
        "asDropdown": False,
        "includeVars": False,
        "keepTime": not is_outside,
        "targetBlank": is_outside,
    }
