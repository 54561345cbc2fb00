"""The dashboards: regenerate byte for byte, fit their grid, explain themselves, and ask only for what is exported.

Whether each query finds something is asked of a real Prometheus, in e2e/test_dashboards.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboard_past import signals_by_metric
from grafana.dashboards import DASHBOARDS
from grafana.evaluate import QueryError, filled, load, panels
from grafana.files import CONFIG_MAPS, FILES, JSON_FOLDER
from grafana.panels import COLUMNS, REPOSITORY, STATES, Dashboard, Row, graph, lines_of, mappings, stat
from grafana.units import text_of
from stallwatch import model
from stallwatch.exposition import own_process
from stallwatch.model import Signal

Json = dict[str, Any]

ROOT = Path(__file__).parents[1]
UIDS = ("stallwatch-fleet", "stallwatch-server", "stallwatch-node", "stallwatch-exporter")
BY_PROMETHEUS = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
TARGET_LABELS = {"job", "instance"}

SELECTOR = re.compile(r"\b(?P<metric>[a-z_]\w+)\{(?P<matchers>[^}]*)\}")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right) \((?P<labels>[^)]*)\)")
LEGEND_LABEL = re.compile(r"\{\{(\w+)\}\}")
UNITS = {"none", "s", "bytes", "Bps", "ops", "watt", "hertz", "celsius", "percentunit", "dtdurations", "dateTimeAsIso"}

NOT_SHOWN = {
    "stallwatch_config_last_reload_success_timestamp_seconds": "whether the last one succeeded is shown",
    "stallwatch_gpu_dram_activity_ratio": "from Hopper on, beside the memory's utilisation",
    "stallwatch_gpu_energy_joules_total": "mean power is made of it",
    "stallwatch_gpu_pcie_transmit_bytes_per_second": "weights come in, they do not go out",
    "stallwatch_gpu_sm_activity_ratio": "from Hopper on, beside the utilisation",
    "stallwatch_log_bytes_total": "lines are shown",
    "stallwatch_log_last_line_timestamp_seconds": "the silence since is shown",
    "stallwatch_server_similar_start_timestamp_seconds": "for the text of an alert",
    "stallwatch_server_similar_starts": "for the text of an alert",
    "stallwatch_process_virtual_memory_bytes": "large for every process with a GPU, and no sign of trouble",
    "stallwatch_gpu_tensor_activity_ratio": "from Hopper on, beside the utilisation",
}
"""Metrics on no dashboard, and why."""

each_dashboard = pytest.mark.parametrize("uid", UIDS)


def targets(dashboard: Json) -> Iterator[tuple[Json, Json]]:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield panel, target


def signal_of(metric: str, signals: Mapping[str, Signal]) -> Signal | None:
    return signals.get(metric) or signals.get(re.sub(r"_(bucket|sum|count)$", "", metric))


def unknown_names(expr: str, legend: str = "") -> set[str]:
    """Metrics that nobody exports, and labels that none of the expression's metrics has."""
    signals = signals_by_metric()
    others = BY_PROMETHEUS | {metric.name for metric in own_process()}
    unknown, labels, asked = set(), TARGET_LABELS | {"le"}, set(LEGEND_LABEL.findall(legend))
    for found in SELECTOR.finditer(expr):
        signal = signal_of(found["metric"], signals)
        if signal is None and found["metric"] not in others:
            unknown.add(found["metric"])
        own = set(signal.labels) if signal else set()
        labels |= own
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", found["matchers"]))
        unknown |= {f"{found['metric']}{{{label}}}" for label in matched - own - TARGET_LABELS}
    for grouping in GROUPING.finditer(expr):
        asked |= {label.strip() for label in grouping["labels"].split(",")} - {""}
    return unknown | (asked - labels)


# --- the files ---------------------------------------------------------------------------------------------


def test_there_are_four_and_their_uids_are_stable() -> None:
    """Alerts and bookmarks lead to them."""
    assert tuple(dashboard.uid for dashboard in DASHBOARDS) == UIDS
    assert sorted(path.stem for path in JSON_FOLDER.iterdir()) == sorted(UIDS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_committed_is_what_the_code_makes(path: Path) -> None:
    """`python -m grafana` writes them."""
    assert path.read_text(encoding="utf-8") == FILES[path]


def test_the_config_maps_hold_the_same_dashboards() -> None:
    documents = list(yaml.safe_load_all(CONFIG_MAPS.read_text(encoding="utf-8")))

    assert [document["metadata"]["name"] for document in documents] == list(UIDS)
    for document in documents:
        ((name, text),) = document["data"].items()
        assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert text == (JSON_FOLDER / name).read_text(encoding="utf-8")


def test_a_config_map_is_small_enough_for_kubernetes() -> None:
    """A megabyte; and `kubectl apply` keeps a second copy in an annotation of at most 256 KiB."""
    assert all(len(path.read_bytes()) < 250_000 for path in JSON_FOLDER.iterdir())


# --- the layout --------------------------------------------------------------------------------------------


@each_dashboard
def test_no_panel_overlaps_another_or_leaves_the_grid(uid: str) -> None:
    cells: Counter[tuple[int, int]] = Counter()
    for panel in load(uid)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        rows, columns = range(place["y"], place["y"] + place["h"]), range(place["x"], place["x"] + place["w"])
        cells.update((row, column) for row in rows for column in columns)

    height = 1 + max(row for row, _ in cells)
    assert set(cells.values()) == {1}
    assert len(cells) == height * COLUMNS, "a hole"


def test_a_line_that_is_not_filled_or_uneven_is_refused() -> None:
    half = stat("a", "", "up{@}", 12)
    high = graph("b", "", (), 12, "none", height=9)

    assert [len(line) for line in lines_of(Row("good", (half, half)))] == [2]
    for panels_of_row in ((half,), (half, half, half), (half, high), (half, replace(half, width=13))):
        with pytest.raises(ValueError, match="line"):
            list(lines_of(Row("bad", panels_of_row)))


@each_dashboard
def test_every_panel_says_what_it_shows_and_in_which_unit(uid: str) -> None:
    dashboard = load(uid)
    every = list(panels(dashboard))

    assert dashboard["description"].endswith(".")
    for panel in every:
        assert panel["title"] == panel["title"].strip()
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJ"[: len(panel["targets"])])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    repeated = [title for title, times in Counter(panel["title"] for panel in every).items() if times > 1]
    assert repeated == []


@each_dashboard
def test_lines_that_are_several_have_a_legend(uid: str) -> None:
    for panel, target in targets(load(uid)):
        if panel["type"] in ("timeseries", "state-timeline", "bargauge"):
            assert target["legendFormat"] != "__auto", panel["title"]


@each_dashboard
def test_colour_never_stands_alone(uid: str) -> None:
    """Every colour of a value has its word."""
    for panel in panels(load(uid)):
        for mapping in panel["fieldConfig"]["defaults"].get("mappings", ()):
            assert all(option["text"] and option["color"] for option in mapping["options"].values())


def test_words_are_those_of_the_exporter() -> None:
    assert sorted(word for word, _ in STATES) == sorted(model.STATES)
    assert mappings(STATES)[0]["options"]["8"]["text"] == "stalled"


# --- the queries -------------------------------------------------------------------------------------------


@each_dashboard
def test_every_metric_and_label_is_exported(uid: str) -> None:
    for panel, target in targets(load(uid)):
        legend = target["legendFormat"]
        assert unknown_names(target["expr"], legend) == set(), panel["title"]
        assert "{@" not in target["expr"]


@pytest.mark.parametrize(
    ("expr", "legend", "unknown"),
    [
        ('stallwatch_server_state{job="a",state="idle"}', "{{server}}", set()),
        ('stallwatch_server_mood{job="a"}', "", {"stallwatch_server_mood"}),
        ('stallwatch_server_state{phase="ready"}', "", {"stallwatch_server_state{phase}"}),
        ("sum by (rank) (stallwatch_server_state{})", "", {"rank"}),
        ("stallwatch_server_state{}", "{{rank}}", {"rank"}),
        ("sum by (le) (stallwatch_startup_duration_seconds_bucket{})", "", set()),
        ("dcgm_power{}", "", {"dcgm_power"}),
    ],
)
def test_a_name_that_nobody_exports_is_found(expr: str, legend: str, unknown: set[str]) -> None:
    assert unknown_names(expr, legend) == unknown


def test_every_metric_is_on_a_dashboard_or_left_out_for_a_reason() -> None:
    text = "\n".join(target["expr"] for uid in UIDS for _, target in targets(load(uid)))
    variables = "\n".join(str(load(uid)["templating"]) for uid in UIDS)
    named = set(re.findall(r"\bstallwatch_\w+", text + variables))
    signals = signals_by_metric()
    shown = {f"stallwatch_{signal.name}" for metric in named if (signal := signal_of(metric, signals))}

    assert set(signals) - shown == NOT_SHOWN.keys(), "show it, or say in NOT_SHOWN why not"


@each_dashboard
def test_every_selector_keeps_to_the_chosen_nodes(uid: str) -> None:
    for panel, target in targets(load(uid)):
        found = list(SELECTOR.finditer(target["expr"]))
        assert found, panel["title"]
        for selector in found:
            assert "$job" in selector["matchers"], panel["title"]
            assert "$instance" in selector["matchers"], panel["title"]


@each_dashboard
def test_every_variable_in_use_is_there(uid: str) -> None:
    dashboard = load(uid)
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    built_in = {"__range", "__rate_interval"}

    used = {name for _, target in targets(dashboard) for name in re.findall(r"\$(\w+)", target["expr"])}
    assert used - built_in <= names
    assert {"datasource", "job", "instance"} <= names
    assert names - used <= {"datasource"}


def test_a_variable_is_filled_in_and_an_unknown_one_is_told() -> None:
    assert filled('up{job="$job",x="${job}"}[$__range]', {"job": "a", "__range": "60s"}) == 'up{job="a",x="a"}[60s]'
    with pytest.raises(QueryError, match="variable where is unknown"):
        filled('up{instance="$where"}', {"job": "a"})


# --- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (76 * 2.0**30, "bytes", "76 GiB"),
        (0.0, "bytes", "0 B"),
        (155.0, "s", "2.58 mins"),
        (0.004, "s", "4 ms"),
        (0.0, "s", "0 s"),
        (155.0, "dtdurations", "2m 35s"),
        (0.0, "dtdurations", "0s"),
        (0.52, "percentunit", "52 %"),
        (1.98e9, "hertz", "1.98 GHz"),
        (1_700_000_000_000.0, "dateTimeAsIso", "2023-11-14 22:13:20"),
        (4.0, "none", "4"),
    ],
)
def test_numbers_are_written_with_their_unit(value: float, unit: str, text: str) -> None:
    assert text_of(value, unit) == text


def test_every_unit_in_use_can_be_written() -> None:
    """A unit that nobody knows is a plain number, in a picture and in a wrong one in Grafana."""
    assert {unit for unit in UNITS if unit != "none" and text_of(1.5, unit) == "1.5"} == set()


# --- the links ---------------------------------------------------------------------------------------------


def links(dashboard: Json) -> list[str]:
    return re.findall(r'"url": "([^"]+)"', json.dumps(dashboard))


@each_dashboard
def test_every_link_leads_somewhere(uid: str) -> None:
    variables = {each: {v["name"] for v in load(each)["templating"]["list"]} for each in UIDS}
    for url in links(load(uid)):
        if url.startswith(REPOSITORY):
            assert (ROOT / url.removeprefix(f"{REPOSITORY}/")).is_file(), url
        else:
            target = re.match(r"/d/([\w-]+)\?", url)
            assert target, url
            assert set(re.findall(r"var-(\w+)=", url)) <= variables[target[1]], url


def test_alerts_lead_to_dashboards_and_variables_that_are_there() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "rules").glob("*.yml"))
    urls = re.findall(r"/d/([\w-]+)\?(\S.*)", text)

    assert urls
    for uid, query in urls:
        variables = {variable["name"] for variable in load(uid)["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", query)) <= variables


@each_dashboard
def test_each_leads_to_the_others_and_to_a_runbook(uid: str) -> None:
    urls = links(load(uid))

    assert {other for other in UIDS if any(url.startswith(f"/d/{other}?") for url in urls)} >= set(UIDS) - {uid}
    assert any("/runbooks/" in url for url in urls)


def test_the_longest_mark_of_a_selector_comes_first() -> None:
    dashboard = Dashboard("u", "t", "d", (), {"@": 'a="1"', "@gpu": 'b="2"'}, ())

    assert dashboard.expression("x{@gpu} + y{@,c=~'@'}") == 'x{b="2"} + y{a="1",c=~\'@\'}'
