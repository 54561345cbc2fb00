"""A server over three nodes: three addresses with an exporter each, one Prometheus, one Alertmanager.

One of them holds up the others, was never started, or is not watched.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from stallwatch.rules import DEFAULT_FILES, one_file, rule_files

from .harness import CONFIG, PATIENCE, STALL_AFTER, Exporter, StandIn, Watch, wait_until
from .prometheus import Prometheus
from .test_pages import Alertmanager, Hook, hook, scaled_rules  # noqa: F401  # hook is a fixture

pytestmark = pytest.mark.e2e

NODES, RANKS, STUCK = 3, 2, 1
"""Ranks are those of one node; STUCK is the number of the node that holds up the others."""

SERVER = "big-model"
SMALL: Mapping[str, float] = {"ranks": RANKS, "culprit": 1, "threads": 10, "frontend_threads": 5, "poller_threads": 1}


class Launch(StandIn):
    """What runs on one node of the server.  `load_seconds` on all alike: none comes less far."""

    def __init__(self, number: int, folder: Path, condition: str, load_seconds: float = 2.0) -> None:
        super().__init__(condition, folder, None, load_seconds=load_seconds, **SMALL)
        self.command += ["--nodes", str(NODES), "--node-rank", str(number)]


class Node(Exporter):
    """The exporter of one node, which sees nothing of the others."""

    def __init__(self, number: int, folder: Path, launch: Launch) -> None:
        only = f"servers: [{{name: {SERVER}, match: {{port: {launch.port}}}}}]\n"
        super().__init__(folder, CONFIG + "discovery: {enabled: false}\n" + only)
        self.address = f"127.0.0.{number + 2}:{self.port}"
        self.command[-1] = self.address
        self.url = f"http://{self.address}"
        self.watch = Watch(self.url)


def prometheus(folder: Path, nodes: list[Node], alertmanager: Alertmanager, rules: str) -> Prometheus:
    found = Prometheus(folder, nodes[0].port, rules, alertmanager.port)
    config = folder / "prometheus.yml"
    targets = "','".join(node.address for node in nodes)
    config.write_text(config.read_text().replace(f"127.0.0.1:{nodes[0].port}'", f"{targets}'"))
    return found


def folders(base: Path) -> list[Path]:
    made = [base / f"node{number}" for number in range(NODES)]
    for folder in made:
        folder.mkdir()
    return made


def test_a_stalled_node_of_three_is_one_page_that_names_it(tmp_path: Path, hook: Hook) -> None:  # noqa: F811
    places = folders(tmp_path)
    with ExitStack() as stack:
        conditions = ["barrier-deadlock" if number == STUCK else "normal" for number in range(NODES)]
        launches = [Launch(n, folder, conditions[n]) for n, folder in enumerate(places)]
        for number in {*range(NODES)} - {STUCK}:
            launches[number].command.append("--waits")
        nodes = [stack.enter_context(Node(n, places[n], launch)) for n, launch in enumerate(launches)]
        alertmanager = stack.enter_context(Alertmanager(tmp_path, hook.url))
        engine = stack.enter_context(prometheus(tmp_path, nodes, alertmanager, scaled_rules()))
        for launch in launches:
            stack.enter_context(launch)
        for launch in launches:
            launch.wait_for_line("Load weight end", RANKS)
        last_progress = time.time()
        story = "\n".join
        wait_until(
            lambda: any(receiver == "page" for _, receiver, _ in hook.messages),
            STALL_AFTER + PATIENCE,
            f"a page\n{story(node.watch.story() for node in nodes)}\n{alertmanager.states()}",
        )
        paged_after = time.time() - last_progress
        time.sleep(5.0)
        seen = engine.query("group:stallwatch_server_info:count")
        (behind,) = engine.query("server_group:stallwatch_server_state:laggard")
        # Before the launches are ended, one after the other: who is told of that is another matter.
        pages = [message for _, receiver, message in hook.messages if receiver == "page"]

    assert len(pages) == 1, hook.story()
    ((alert,), (group,)) = (pages[0]["alerts"], [each["metric"]["group"] for each in seen])
    text = alert["annotations"]["description"]
    assert (alert["labels"]["alertname"], alert["labels"]["group"]) == ("InferenceGroupStalled", group)
    assert [each["value"][1] for each in seen] == [str(NODES)]
    assert behind["metric"]["instance"] == nodes[STUCK].address
    assert re.search(rf"The others wait for {SERVER} on 127\.0\.0\.{STUCK + 2}, rank TP3: look there first", text), text
    assert paged_after < STALL_AFTER + 10.0, f"{paged_after:.1f} s: a look, a scrape, an evaluation, a group wait"


SOON = {
    f"InferenceGroup{name}.{line}": "2s" for name in ("Incomplete", "Unwatched") for line in ("for", "keep_firing_for")
}
"""The two warnings about a group, after two seconds each."""

LATE = 2
"""The number of the node whose launch comes late, and whose exporter goes."""


def told(hook: Hook, name: str, status: str = "firing") -> list[tuple[str, str]]:  # noqa: F811
    """Receiver and text, for each time a message told of this alert in this status."""
    return [
        (receiver, alert["annotations"]["description"])
        for _, receiver, message in list(hook.messages)
        for alert in message["alerts"]
        if (alert["labels"]["alertname"], alert["status"]) == (name, status)
    ]


def test_a_node_that_was_never_started_and_one_that_is_not_watched_are_told(tmp_path: Path, hook: Hook) -> None:  # noqa: F811
    """The twin is the time between: all three are there and watched, and both alerts are over or have not begun."""
    places = folders(tmp_path)
    with ExitStack() as stack:
        launches = [Launch(n, folder, "normal", 2.0 if n == LATE else 25.0) for n, folder in enumerate(places)]
        nodes = [stack.enter_context(Node(n, places[n], launch)) for n, launch in enumerate(launches)]
        alertmanager = stack.enter_context(Alertmanager(tmp_path, hook.url))
        rules = one_file(rule_files(DEFAULT_FILES, SOON))
        engine = stack.enter_context(prometheus(tmp_path, nodes, alertmanager, rules))

        def waits_for(name: str, status: str, within: float) -> None:
            wait_until(lambda: told(hook, name, status), within, f"{name} {status}\n{hook.story()}")

        for number in range(NODES):
            if number == LATE:
                waits_for("InferenceGroupIncomplete", "firing", PATIENCE)
            stack.enter_context(launches[number])
        waits_for("InferenceGroupIncomplete", "resolved", PATIENCE)
        wait_until(
            lambda: engine.query("group:stallwatch_server_ready:all == 1"),
            PATIENCE,
            "\n".join(node.watch.story() for node in nodes),
        )
        time.sleep(5.0)
        assert told(hook, "InferenceGroupUnwatched") == []
        nodes[LATE].watch.stop()  # a stopped process owes it no answer
        nodes[LATE].process.send_signal(signal.SIGSTOP)
        waits_for("InferenceGroupUnwatched", "firing", PATIENCE)
        known = engine.query("group:stallwatch_server_info:count")

    two = f"{SERVER} on 127.0.0.2 (number 0), {SERVER} on 127.0.0.3 (number 1)"
    there = re.escape(f"one over 3 launches, 2 are seen: {two}.")
    assert any(re.search(there, text) for _, text in told(hook, "InferenceGroupIncomplete")), hook.story()
    (receiver, text), *_ = told(hook, "InferenceGroupUnwatched")
    assert re.search(there, text), text
    assert f"Seen within the last hour and not now: 127.0.0.{LATE + 2}." in text
    assert [each["value"][1] for each in known] == [str(NODES - 1)]
    assert receiver == "day"
