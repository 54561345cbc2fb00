"""Every query of every panel, asked of a real Prometheus that holds recorded stalls and recorded slow starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dashboard_past import DEADLOCK, END, LOCKED, SERVING, SLOW_START, STALL, Node
from grafana.evaluate import QueryError, Series, answers, load

from .past import PastPrometheus, recorded_past

pytestmark = [pytest.mark.e2e, pytest.mark.aside]

Found = Mapping[tuple[str, str], list[Series]]
"""Panel and its query's letter -> what was found."""

WHILE_SERVING = {
    "Accept queue",
    "Requests",
    "Requests finished",
    "Tokens",
    "Health",
    "Health: time to answer",
    "Health: no answer in time",
}
"""Of a server that does not listen there is nothing to tell here."""


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PastPrometheus]:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus is not installed")
    with recorded_past(tmp_path_factory.mktemp("past")) as prometheus:
        yield prometheus


def found(past: PastPrometheus, uid: str, node: Node | None = None) -> Found:
    chosen = {} if node is None else {"instance": node.instance}
    asked = answers(past.view(chosen), load(uid))
    return {(panel["title"], target["refId"]): series for panel, target, series in asked}


def without_data(found: Found) -> set[str]:
    return {f"{title}, {letter}" for (title, letter), series in found.items() if not series}


@pytest.mark.parametrize("uid", ["stallwatch-fleet", "stallwatch-exporter"])
def test_every_query_about_all_nodes_finds_something(past: PastPrometheus, uid: str) -> None:
    assert without_data(found(past, uid)) == set()


def test_every_query_about_a_node_with_cards_finds_something(past: PastPrometheus) -> None:
    assert without_data(found(past, "stallwatch-node", STALL)) == set()


def test_every_query_about_a_server_finds_something(past: PastPrometheus) -> None:
    """In a stall, in a slow start, while it serves, or behind a lock."""
    nodes = (STALL, DEADLOCK, SLOW_START, SERVING, LOCKED)
    nothing = {node.case: without_data(found(past, "stallwatch-server", node)) for node in nodes}

    assert set.intersection(*nothing.values()) == set()


@pytest.mark.parametrize("node", [STALL, DEADLOCK, SLOW_START], ids=lambda node: node.case)
def test_of_a_start_only_what_it_has_not_is_missing(past: PastPrometheus, node: Node) -> None:
    """The panels that tell a stall from a slow start are never the empty ones."""
    titles = {query.rpartition(", ")[0] for query in without_data(found(past, "stallwatch-server", node))}
    without_locks = {"Locks", "What else explains silence"}
    without_cards = {"Memory held", "Utilisation", "Power above resident-idle"}

    assert ("Time left on its own clocks" in titles) is (node != SLOW_START)
    assert (
        titles - {"Time left on its own clocks"}
        <= {"The others wait for", "The server"} | WHILE_SERVING | without_locks | without_cards
    )
    assert (node == STALL) is (without_cards.isdisjoint(titles))


def test_the_stall_is_told_as_one(past: PastPrometheus) -> None:
    panels = found(past, "stallwatch-server", STALL)

    assert [series.name for series in panels["Reason", "A"] if series.points[-1][0] == END] == ["gpu_spin"]
    (state,) = panels["State", "A"]
    assert state.last == 8
    assert max(series.last for series in panels["Since each rank last progressed", "A"]) > 240


def test_the_slow_start_is_told_as_one(past: PastPrometheus) -> None:
    """And not as a stall: the twin of the test above."""
    panels = found(past, "stallwatch-server", SLOW_START)

    (state,) = panels["State", "A"]
    assert state.last == 4
    assert 8 not in [value for _, value in panels["Verdict", "A"][0].points]
    (behind,) = [s for s in panels["Weights loaded", "A"] if s.name == "TP2"]
    assert behind.last > behind.points[0][1]


def test_the_fleet_counts_what_the_nodes_have(past: PastPrometheus) -> None:
    panels = found(past, "stallwatch-fleet")

    assert panels["Stalled", "A"][0].last == 4
    assert panels["Slow", "A"][0].last == 1
    assert panels["Blind", "A"][0].last == 1
    assert panels["Starts per hour", "A"][0].last == 10, "nine servers, and one of them twice"
    assert panels["Starts per hour", "B"][0].last == 1


def test_starts_of_a_model_with_and_without_speculative_decoding_stand_side_by_side(past: PastPrometheus) -> None:
    panels, title = found(past, "stallwatch-fleet"), "Starts, with and without speculative decoding"

    def told(letter: str) -> dict[str, float]:
        ours = [
            s for s in panels[title, letter] if (s.labels["framework"], s.labels["model"]) == ("sglang", "org/model-8b")
        ]
        return {series.labels["speculative"]: series.last for series in ours}

    assert (told("A"), told("B")) == ({"EAGLE": 1}, {"EAGLE": 1})
    assert 0 < told("D")["EAGLE"] < 600
    assert 0 < told("D")["no"] < 600


def test_a_variable_that_is_not_there_is_no_empty_panel(past: PastPrometheus) -> None:
    dashboard = load("stallwatch-fleet")
    dashboard["templating"]["list"] = []

    with pytest.raises(QueryError, match="variable job is unknown"):
        list(answers(past.view(), dashboard))


def test_a_query_that_is_wrong_is_no_empty_panel(past: PastPrometheus) -> None:
    with pytest.raises(QueryError, match="parse error"):
        past.view().run("sum by (", instant=True, legend="")


def test_every_panel_can_be_drawn(past: PastPrometheus, tmp_path: Path) -> None:
    """As in docs/pictures; all panels of all dashboards, whatever they find."""
    pictures = pytest.importorskip("grafana.pictures", reason="matplotlib is not installed")
    for uid in ("stallwatch-fleet", "stallwatch-server", "stallwatch-node", "stallwatch-exporter"):
        picture = pictures.Picture(uid, uid, "", {})
        assert pictures.draw(picture, past.view({"instance": SERVING.instance}), tmp_path).stat().st_size > 20_000
