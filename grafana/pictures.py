"""Pictures of the dashboards: our own plot of their panels, from their own queries.  Not Grafana's look.

They show what stands where, and what a stall looks like in it.  The grid, titles, queries, units, words and colours are
read from the dashboards' JSON; `tests/dashboard_pictures.py` gives the recorded past that they show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from matplotlib.ticker import FixedLocator, Locator, MaxNLocator

from .evaluate import STEP_SECONDS, Json, Series, View, answers, load
from .panels import COLUMNS
from .units import text_of

matplotlib.rcParams.update({"font.family": "DejaVu Sans", "font.size": 7.5, "svg.hashsalt": "stallwatch"})

COLUMN_INCHES, ROW_INCHES, HEAD_INCHES = 0.62, 0.36, 0.55
DOTS_PER_INCH = 100

BACKGROUND, PAPER, FRAME, INK, PALE = "#f4f5f5", "#ffffff", "#dcdfe3", "#24292e", "#6e7681"
PALETTE = (
    *("#3274d9", "#ff9830", "#56a64b", "#a352cc", "#e02f44", "#37872d", "#8ab8ff", "#c4162a"),
    *("#b877d9", "#fade2a", "#5794f2", "#fa6400"),
)
NAMED = {
    "green": "#56a64b",
    "red": "#e02f44",
    "orange": "#ff780a",
    "yellow": "#e0b400",
    "blue": "#3274d9",
    "purple": "#a352cc",
    "text": INK,
}

Answer = Mapping[str, list[Series]]
"""refId -> what was found."""


@cache
def inches(text: str, points: float = 7.5, bold: bool = False) -> float:
    """Width of a text."""
    font = FontProperties(family="DejaVu Sans", size=points, weight="bold" if bold else "normal")
    return float(TextToPath().get_text_width_height_descent(text, font, False)[0]) / 72


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: these rows of a dashboard (all, if none is named) for these variables."""

    name: str
    uid: str
    caption: str
    chosen: Mapping[str, str]
    rows: tuple[str, ...] = ()
    minutes: float = 20


def draw(picture: Picture, view: View, folder: Path) -> Path:
    """Draw one picture into `folder`."""
    dashboard = load(picture.uid)
    found: dict[int, dict[str, list[Series]]] = {}
    for panel, target, series in answers(view, dashboard):
        found.setdefault(panel["id"], {})[target["refId"]] = series
    shown = list(_rows(dashboard, picture.rows))
    height = sum(rows for _, _, rows in shown)
    figure = Figure(
        figsize=(COLUMNS * COLUMN_INCHES, height * ROW_INCHES + HEAD_INCHES), dpi=DOTS_PER_INCH, facecolor=BACKGROUND
    )
    sheet = Sheet(figure, view)
    sheet.head(dashboard["title"], picture.caption)
    top = 0
    for heading, panels, rows in shown:
        sheet.heading(heading, top)
        for panel in panels:
            place = dict(panel["gridPos"])
            place["y"] += top - heading["gridPos"]["y"]
            sheet.panel(panel, place, found[panel["id"]])
        top += rows
    path = folder / f"{picture.name}.png"
    figure.savefig(path, metadata={"Software": None})
    return path


def _rows(dashboard: Json, wanted: Sequence[str]) -> Iterator[tuple[Json, list[Json], int]]:
    """Heading, panels and height in grid units of each row."""
    rows: list[tuple[Json, list[Json]]] = []
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            rows.append((panel, []))
        else:
            rows[-1][1].append(panel)
    for heading, panels in rows:
        if not wanted or heading["title"] in wanted:
            end = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
            yield heading, panels, end - heading["gridPos"]["y"]


class Sheet:
    """A figure with Grafana's grid on it."""

    def __init__(self, figure: Figure, view: View) -> None:
        self._figure, self._view = figure, view
        self.width, self.height = (float(inches) for inches in figure.get_size_inches())

    def head(self, title: str, caption: str) -> None:
        y = 1 - 0.2 / self.height
        self._figure.text(0.1 / self.width, y, title, fontsize=12, weight="bold", color=INK, va="center")
        self._figure.text(
            1 - 0.1 / self.width,
            y,
            f"{caption}  ·  stallwatch's own plot of the panels",
            color=PALE,
            va="center",
            ha="right",
        )

    def heading(self, row: Json, y: int) -> None:
        at = 1 - (HEAD_INCHES + (y + 0.55) * ROW_INCHES) / self.height
        self._figure.text(0.1 / self.width, at, row["title"], fontsize=9.5, weight="bold", color=INK, va="center")

    def panel(self, panel: Json, place: Json, answer: Answer) -> None:
        left, width = place["x"] * COLUMN_INCHES + 0.05, place["w"] * COLUMN_INCHES - 0.1
        top, height = HEAD_INCHES + place["y"] * ROW_INCHES + 0.04, place["h"] * ROW_INCHES - 0.08
        paper = self.axes(left, top, width, height)
        paper.set_facecolor(PAPER)
        paper.set_xticks([])
        paper.set_yticks([])
        for side in paper.spines.values():
            side.set_color(FRAME)
        paper.text(0.08 / width, 1 - 0.13 / height, panel["title"], weight="bold", color=INK, va="center", fontsize=8)
        paper.set_xlim(0, 1)
        paper.set_ylim(0, 1)
        box = Box(self, left, top + 0.26, width, height - 0.26, self._view)
        if not any(answer.values()) and panel["type"] != "stat":
            text = panel["fieldConfig"]["defaults"].get("noValue", "No data")
            paper.text(0.5, 0.45, text, color=PALE, ha="center", va="center", fontsize=9)
            return
        _KINDS[panel["type"]](box, panel, answer)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at a place in inches from the upper left corner."""
        return self._figure.add_axes(
            (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        )


@dataclass(frozen=True, slots=True)
class Box:
    """The room of a panel below its title, in inches."""

    sheet: Sheet
    left: float
    top: float
    width: float
    height: float
    view: View

    def axes(self, left: float = 0.0, right: float = 0.0, bottom: float = 0.0) -> Axes:
        return self.sheet.axes(self.left + left, self.top, self.width - left - right, max(0.2, self.height - bottom))

    def bare(self) -> Axes:
        axes = self.axes()
        axes.set_axis_off()
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        return axes


# --- colours and words -------------------------------------------------------------------------------------


def _options(defaults: Json) -> Mapping[str, Json]:
    return {key: option for mapping in defaults.get("mappings", ()) for key, option in mapping["options"].items()}


def _word(value: float, defaults: Json) -> str:
    option = _options(defaults).get(f"{value:g}")
    return option["text"] if option else text_of(value, defaults["unit"], defaults.get("decimals"))


def _color(value: float, defaults: Json) -> str:
    option = _options(defaults).get(f"{value:g}")
    if option:
        return str(option["color"])
    steps = defaults.get("thresholds", {}).get("steps", [])
    passed = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return NAMED.get(passed[-1], passed[-1]) if passed else INK


def _fixed_colors(panel: Json) -> Iterator[tuple[str, str]]:
    for override in panel["fieldConfig"]["overrides"]:
        for each in override["properties"]:
            if each["id"] == "color":
                yield override["matcher"]["options"], each["value"]["fixedColor"]


def _ink_on(color: str) -> str:
    """Black or white, whichever can be read."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#111217" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


# --- stat --------------------------------------------------------------------------------------------------


def _stat(box: Box, panel: Json, answer: Answer) -> None:
    defaults, axes = panel["fieldConfig"]["defaults"], box.bare()
    words = []
    for series in (each for found in answer.values() for each in found):
        is_now = series.points[-1][0] >= box.view.end - 2 * STEP_SECONDS
        if is_now and panel["options"]["textMode"] == "name":
            words.append((series.name, _color(series.last, defaults)))
        elif is_now and panel["options"]["textMode"] == "value_and_name":
            words.append((f"{_word(series.last, defaults)} {series.name}", _color(series.last, defaults)))
        elif is_now:
            words.append((_word(series.last, defaults), _color(series.last, defaults)))
    text = ", ".join(word for word, _ in words) or defaults.get("noValue", "No data")
    size = min(20.0, 72 * box.width * 0.92 / (0.62 * max(1, len(text))))
    color = words[0][1] if words else PALE
    axes.text(
        box.width / 2, box.height * 0.42, text, fontsize=size, color=color, ha="center", va="center", weight="bold"
    )


# --- lines -------------------------------------------------------------------------------------------------


def _graph(box: Box, panel: Json, answer: Answer) -> None:
    defaults, unit = panel["fieldConfig"]["defaults"], panel["fieldConfig"]["defaults"]["unit"]
    custom = defaults["custom"]
    series = [each for found in answer.values() for each in found]
    names = [each.name for each in series]
    fixed = dict(_fixed_colors(panel))
    colors = [fixed.get(name, PALETTE[place % len(PALETTE)]) for place, name in enumerate(names)]
    lines = _legend_lines(names, box.width)
    axes = box.axes(left=0.62, right=0.24, bottom=0.3 + 0.15 * len(lines))
    _prepare(axes, box.view)
    times = _times(box.view)
    is_stacked = custom["stacking"]["mode"] == "normal"
    values = [_on(each, times, 0.0 if is_stacked else math.nan) for each in series]
    if is_stacked:
        _stack(axes, times, values, colors, custom["drawStyle"] == "bars")
    else:
        dashed = _dashed(panel)
        for each, heights, color in zip(series, values, colors, strict=True):
            style = "--" if dashed and dashed(each.name) else "-"
            axes.plot(times, heights, color=color, linewidth=1.3, linestyle=style)
    every = (height for heights in values for height in heights)
    _set_height(axes, defaults, every, custom["thresholdsStyle"]["mode"] != "off")
    axes.yaxis.set_major_formatter(lambda value, _: text_of(value, unit))
    axes.yaxis.set_major_locator(_locator(unit, axes.get_ylim()[1]))
    _legend(box, lines, dict(zip(names, colors, strict=True)))


_SECONDS = (15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)


def _locator(unit: str, most: float) -> Locator:
    """Round numbers of the unit: whole minutes, powers of 1024."""
    if unit == "s" and most > 30:
        step = next((step for step in _SECONDS if most / step <= 5), _SECONDS[-1])
        return FixedLocator([step * place for place in range(7)])
    if unit == "bytes" and most > 1024:
        size = 1024.0 ** int(math.log(most, 1024))
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if most / size / step <= 5)
        return FixedLocator([size * step * place for place in range(7)])
    return MaxNLocator(4, steps=[1, 2, 5, 10])


def _dashed(panel: Json) -> Callable[[str], Any] | None:
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["id"] == "byRegexp":
            return re.compile(override["matcher"]["options"].strip("/")).search
    return None


def _times(view: View) -> list[float]:
    return [view.start + STEP_SECONDS * step for step in range(int((view.end - view.start) / STEP_SECONDS) + 1)]


def _on(series: Series, times: Iterable[float], absent: float) -> list[float]:
    values = dict(series.points)
    return [values.get(at, absent) for at in times]


def _stack(axes: Axes, times: list[float], values: list[list[float]], colors: list[str], bars: bool) -> None:
    if not bars:
        axes.stackplot(times, *values, colors=colors, alpha=0.75, linewidth=0)
        return
    floor = [0.0] * len(times)
    for heights, color in zip(values, colors, strict=True):
        axes.bar(times, heights, width=STEP_SECONDS * 0.9, bottom=floor, color=color, alpha=0.85)
        floor = [below + height for below, height in zip(floor, heights, strict=True)]


def _set_height(axes: Axes, defaults: Json, values: Iterable[float], draws_thresholds: bool) -> None:
    """From the panel's least to its most, or to a little above the highest value; a line at 0 gets room above it."""
    low, high = axes.get_ylim()
    least, most = float(defaults.get("min", low)), float(high)
    if all(value == 0 or math.isnan(value) for value in values):
        most = 1.0
    steps = [step for step in defaults["thresholds"]["steps"] if step["value"] is not None]
    for step in steps if draws_thresholds else ():
        axes.axhline(step["value"], color=NAMED.get(step["color"], step["color"]), linewidth=0.9, linestyle=(0, (5, 3)))
        most = max(most, step["value"] * 1.08)
    axes.set_ylim(least, float(defaults["max"]) * 1.03 if "max" in defaults else most)


def _prepare(axes: Axes, view: View) -> None:
    axes.set_facecolor("none")
    axes.set_xlim(view.start, view.end)
    every = 300 if view.end - view.start > 900 else 120
    ticks = range(math.ceil(view.start / every) * every, int(view.end) + 1, every)
    axes.set_xticks(ticks, [f"{datetime.fromtimestamp(at, UTC):%H:%M}" for at in ticks])
    axes.tick_params(colors=PALE, length=0, labelsize=7)
    axes.tick_params(axis="x", pad=5)
    axes.grid(True, color="#e9ebee", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


MOST_LEGEND_LINES = 5


def _legend_lines(names: Sequence[str], width: float) -> list[list[str]]:
    """The names in as many lines as they need, each name once."""
    lines: list[list[str]] = [[]]
    used = 0.0
    for name in dict.fromkeys(names):
        needed = inches(name, 7) + 0.28
        if lines[-1] and used + needed > width - 0.1:
            lines.append([])
            used = 0.0
        lines[-1].append(name)
        used += needed
    return lines[:MOST_LEGEND_LINES]


def _legend(box: Box, lines: Sequence[Sequence[str]], colors: Mapping[str, str]) -> None:
    axes = box.bare()
    for number, line in enumerate(reversed(lines)):
        x, y = 0.08, box.height - 0.1 - 0.15 * number
        for name in line:
            axes.plot([x, x + 0.11], [y, y], color=colors[name], linewidth=3, solid_capstyle="butt")
            axes.text(x + 0.15, y, name, color=INK, va="center", fontsize=7)
            x += inches(name, 7) + 0.28


# --- states over time --------------------------------------------------------------------------------------


def _timeline(box: Box, panel: Json, answer: Answer) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    series = [each for found in answer.values() for each in found]
    left = min(box.width * 0.4, max(inches(each.name, 7) for each in series) + 0.16)
    axes = box.axes(left=left, right=0.24, bottom=0.27)
    _prepare(axes, box.view)
    axes.grid(False)
    axes.set_ylim(len(series) - 0.45, -0.55)
    axes.set_yticks(range(len(series)), [each.name for each in series])
    names = panel["options"]["showValue"] != "never"
    per_second = (box.width - left - 0.24) / (box.view.end - box.view.start)
    for row, each in enumerate(series):
        for begin, end, value in _runs(each):
            color = _color(value, defaults)
            axes.barh(row, end - begin, left=begin, height=0.82, color=color, edgecolor=PAPER, linewidth=0.6)
            word = _word(value, defaults)
            if names and inches(word, 7) + 0.08 < (end - begin) * per_second:
                axes.text(
                    begin + 0.05 / per_second, row, word, va="center", color=_ink_on(color), fontsize=7, clip_on=True
                )


def _runs(series: Series) -> Iterator[tuple[float, float, float]]:
    """(begin, end, value) of stretches of one value; a gap ends one."""
    begin, last, value = series.points[0][0], series.points[0][0], series.points[0][1]
    for at, new in series.points[1:]:
        if new != value or at - last > 1.5 * STEP_SECONDS:
            yield begin, min(at, last + STEP_SECONDS), value
            begin, value = at, new
        last = at
    yield begin, last + STEP_SECONDS, value


# --- bars and tables ---------------------------------------------------------------------------------------


def _bars(box: Box, panel: Json, answer: Answer) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    series = [each for found in answer.values() for each in found]
    most = max(each.last for each in series) or 1.0
    axes = box.bare()
    height = min(0.42, box.height / len(series))
    for row, each in enumerate(series):
        y = row * height + 0.08
        color = _color(each.last, defaults)
        axes.text(0.1, y + height * 0.2, each.name, va="center", fontsize=7.5, color=INK)
        room = box.width - 0.95
        axes.barh(y + height * 0.55, room, left=0.1, height=height * 0.3, color="#eceef0")
        axes.barh(y + height * 0.55, room * each.last / most, left=0.1, height=height * 0.3, color=color)
        text = text_of(each.last, defaults["unit"])
        axes.text(
            box.width - 0.1, y + height * 0.55, text, va="center", ha="right", fontsize=8, color=color, weight="bold"
        )


Cell = tuple[str, str]
"""Text and colour."""


def _table(box: Box, panel: Json, answer: Answer) -> None:
    columns, rows = _cells(panel, answer)
    used = [place for place in range(len(columns)) if any(row[place][0] for row in rows)]
    widths = [max(inches(text, bold=True) for text in (columns[p], *(row[p][0] for row in rows))) + 0.2 for p in used]
    scale = min(1.4, (box.width - 0.2) / sum(widths))
    axes, x = box.bare(), 0.1
    step = min(0.27, (box.height - 0.1) / (len(rows) + 1))
    for place, width in zip(used, widths, strict=True):
        axes.text(x, step * 0.5, columns[place], fontsize=7.5, weight="bold", color="#1f60c4", va="center")
        for number, row in enumerate(rows):
            text, color = row[place]
            is_marked = color != INK
            axes.text(
                x,
                step * (number + 1.5),
                text,
                fontsize=7.5,
                color=color,
                va="center",
                weight="bold" if is_marked else "normal",
            )
        x += width * scale
    for number in range(1, len(rows) + 1):
        axes.plot([0.08, box.width - 0.08], [step * number] * 2, color=FRAME, linewidth=0.6)


def _cells(panel: Json, answer: Answer) -> tuple[list[str], list[list[Cell]]]:
    """Titles, and rows of cells, after what the panel's transformations do: join, leave out, name, order, sort."""
    organize = panel["transformations"][-1]["options"]
    fields, titles = list(organize["indexByName"]), organize["renameByName"]
    properties = {
        override["matcher"]["options"]: {each["id"]: each["value"] for each in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }
    records = _joined(answer)
    sort = panel["options"].get("sortBy")
    if sort:
        field = next(field for field, title in titles.items() if title == sort[0]["displayName"])
        records.sort(key=lambda record: float(record.get(field, 0.0)), reverse=sort[0]["desc"])
    rows = [[_cell(record.get(field), properties.get(titles[field], {})) for field in fields] for record in records]
    return [titles[field] for field in fields], rows


def _joined(answer: Answer) -> list[dict[str, Any]]:
    """One record per row: labels, and `Value #A`.

    As Grafana does, answers are joined by the columns that all of them have: the labels of any of their series.
    """
    found = {letter: series for letter, series in answer.items() if series}
    keys = sorted(set.intersection(*({label for each in series for label in each.labels} for series in found.values())))
    records: dict[tuple[str, ...], dict[str, Any]] = {}
    for letter, series in found.items():
        for each in series:
            key = tuple(each.labels.get(label, "") for label in keys)
            name = f"Value #{letter}" if len(answer) > 1 else "Value"
            records.setdefault(key if len(found) > 1 else tuple(each.labels.values()), {}).update(
                {**each.labels, name: each.last}
            )
    return list(records.values())


def _cell(value: Any, properties: Json) -> Cell:
    if value is None:
        return "", INK
    if isinstance(value, str):
        return value, INK
    defaults = {"unit": properties.get("unit", "none"), "mappings": properties.get("mappings", [])}
    return _word(value, defaults), _color(value, defaults) if defaults["mappings"] else INK


_KINDS: Mapping[str, Callable[[Box, Json, Answer], None]] = {
    "stat": _stat,
    "timeseries": _graph,
    "state-timeline": _timeline,
    "bargauge": _bars,
    "table": _table,
}
