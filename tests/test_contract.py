"""What users rely on is still there: names of release 1.0, in lists of our own (docs/COMPATIBILITY.md).

A name that is gone, or means something else, fails and stays failing: `--update-golden` adds, it never takes away.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from config_keys import PLACES, keys_of
from stallwatch import model
from stallwatch.catalogue import all_signals
from stallwatch.cli import COMMANDS, build_parser
from stallwatch.frameworks import load_frameworks
from stallwatch.model import Report
from stallwatch.parse.report import parse_files
from stallwatch.presentation import document
from stallwatch.recordings.replay import replay_file
from stallwatch.rules import every_key
from stallwatch.sources.table import SOURCES

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "contract"
RECORDING = str(FOLDER / "recording.jsonl.gz")
"""Of two workers of vLLM, one of them stopped before the group joined."""

Names = dict[str, list[str]]
"""What has names -> the names; of a metric its type, then its labels."""


def metrics(report: Report, tmp_path: Path) -> Names:
    return {f"stallwatch_{signal.name}": [signal.kind, *signal.labels] for signal in all_signals()}


def values(report: Report, tmp_path: Path) -> Names:
    """Closed sets that labels take their values from."""
    return {
        "state": [*model.STATES],
        "reason": [*model.REASONS],
        "phase": [f"{number} {phase}" for number, phase in enumerate(model.PHASES)],
        "channel": [*model.CHANNELS],
        "channel_state": [*model.CHANNEL_STATES],
        "wait": [*model.WAITS],
        "event": [*model.EVENTS],
        "error_kind": [*model.ERROR_KINDS],
        "clock": [*model.CLOCKS],
        "read_reason": [*model.READ_REASONS],
        "collector": [*SOURCES],
        "startup_bucket": [f"{bound:g}" for bound in model.STARTUP_BUCKETS_SECONDS],
        "outcome_bucket": [f"{bound:g}" for bound in model.OUTCOME_BUCKETS_SECONDS],
    }


def commands(report: Report, tmp_path: Path) -> Names:
    return {name: sorted(set(_flags(_choices(build_parser({}))[name]))) for name in COMMANDS}


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Long flags, those of a second subcommand (`drill run`) included."""
    yield from (flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))
    for name, inner in _choices(parser).items():
        yield from (f"{name} {flag}" for flag in _flags(inner))


def documents(report: Report, tmp_path: Path) -> Names:
    """Keys of the JSON documents, all of schema 1."""
    log = tmp_path / "server.log"
    log.write_text("one line\n")
    checked: Any = document(report)
    parsed: Any = parse_files([str(log)], None, load_frameworks())
    replayed: Any = replay_file(RECORDING, None, load_frameworks())
    server, judged = checked["servers"][0], replayed["servers"][0]
    return {
        "check": [*checked],
        "check.servers": [*server],
        "check.servers.ranks": [*server["ranks"][0]],
        "check.servers.channels": [*server["channels"][0]],
        "parse": [*parsed],
        "parse.files": [*parsed["files"][0]],
        "replay.recordings": [*replayed],
        "replay.recordings.servers": [*judged],
        "replay.recordings.servers.changes": [*judged["changes"][0]],
        "replay.recordings.servers.final": [*judged["final"]],
    }


def configuration(report: Report, tmp_path: Path) -> Names:
    return {place.removesuffix(".") or "file": sorted(keys_of(tmp_path, text)) for place, text in PLACES.items()}


def alerts(report: Report, tmp_path: Path) -> Names:
    """Alerts and their severities, what is recorded, and the keys of thresholds, of all rules that are shipped."""
    found: dict[str, set[str]] = {"recorded": set(), "settings": {key for key in every_key() if "." not in key}}
    for name in (path.name for path in (ROOT / "exporter/stallwatch/rules").glob("*.yml")):
        groups = yaml.safe_load((ROOT / "rules" / name).read_text(encoding="utf-8"))["groups"]
        for rule in (rule for group in groups for rule in group["rules"]):
            if "record" in rule:
                found["recorded"].add(rule["record"])
            else:
                found.setdefault(rule["alert"], set()).add(rule["labels"]["severity"])
    return {name: sorted(names) for name, names in sorted(found.items())}


LISTS: dict[str, Callable[[Report, Path], Names]] = {
    "metrics": metrics,
    "values": values,
    "commands": commands,
    "documents": documents,
    "configuration": configuration,
    "alerts": alerts,
}


def gone(told: Names, there: Names) -> list[str]:
    """What was promised and is not there."""
    lost = [f"{name}: {part}" for name in told if name in there for part in told[name] if part not in there[name]]
    return [name for name in told if name not in there] + lost


def added(told: Names, there: Names) -> list[str]:
    return gone(there, told)


def together(told: Names, there: Names) -> Names:
    return {
        name: told.get(name, []) + [part for part in there.get(name, []) if part not in told.get(name, [])]
        for name in sorted({*told, *there})
    }


def written(names: Names) -> str:
    """One name a line, so that a difference can be read."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(names[name])}" for name in names) + "\n}\n"


@pytest.mark.parametrize("name", LISTS)
def test_nothing_that_was_promised_is_gone_and_what_is_new_is_listed(
    name: str, report: Report, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file = FOLDER / f"{name}.json"
    told: Names = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    there = LISTS[name](report, tmp_path)

    if request.config.getoption("--update-golden"):
        told = together(told, there)
        file.write_text(written(told), encoding="utf-8")
    assert told
    assert gone(told, there) == []
    assert added(told, there) == []


@pytest.mark.parametrize(
    ("told", "there", "lost", "new"),
    [
        ({"a": ["gauge", "x"]}, {"a": ["gauge", "x"]}, [], []),
        ({"a": ["gauge", "x"]}, {"b": ["gauge", "x"]}, ["a"], ["b"]),
        ({"a": ["gauge", "x"]}, {"a": ["counter", "x"]}, ["a: gauge"], ["a: counter"]),
        ({"a": ["gauge", "x"]}, {"a": ["gauge", "y"]}, ["a: x"], ["a: y"]),
        ({"a": ["gauge"]}, {"a": ["gauge", "x"]}, [], ["a: x"]),
    ],
    ids=["the same", "renamed", "another type", "a label renamed", "a label more"],
)
def test_a_change_is_seen(told: Names, there: Names, lost: list[str], new: list[str]) -> None:
    assert (gone(told, there), added(told, there)) == (lost, new)


def test_what_was_promised_stays_in_the_list_when_it_is_written_anew() -> None:
    assert together({"a": ["x"], "b": []}, {"a": ["y"]}) == {"a": ["x", "y"], "b": []}


def test_a_recording_of_the_first_release_is_judged_as_it_was_then() -> None:
    found: Any = replay_file(RECORDING, None, load_frameworks())
    (server,) = found["servers"]

    changes = [[change[key] for key in ("t", "state", "reason", "suspect_rank")] for change in server["changes"]]
    assert changes == json.loads((FOLDER / "verdicts.json").read_text(encoding="utf-8"))
