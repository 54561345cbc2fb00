"""docs/VERDICTS.md, "The same two, by their series": the figures are those of the recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recordings.corpus import make
from stallwatch.frameworks import load_frameworks
from stallwatch.recordings.replay import replay_file
from test_documents import rows, section, words

TABLE = rows(section("VERDICTS.md", "The same two, by their series"))
COLUMNS = {"silent-deadlock": 2, "phantom-hang": 3}


def figures(recording: str, until: float) -> dict[tuple[str, str, str], float]:
    """(signal, rank, wait) -> what was read last of it."""
    found: dict[tuple[str, str, str], float] = {}
    for line in map(json.loads, recording.splitlines()):
        for signal, labels, value, *_ in line.get("readings", ()) if line.get("t", 0.0) <= until else ():
            found[signal, labels.get("rank", ""), labels.get("wait", "")] = value
    return found


def said(file: Path, until: float) -> list[str]:
    found: Any = replay_file(str(file), None, load_frameworks())
    last = [change for change in found["servers"][0]["changes"] if change["t"] <= until][-1]
    return [last[key] for key in ("state", "reason", "suspect_rank") if last[key]]


@pytest.mark.parametrize("case", COLUMNS)
def test_what_the_table_shows_is_what_was_read_and_said(case: str, tmp_path: Path) -> None:
    recording = make(case).text()
    file = tmp_path / "recording.jsonl"
    file.write_text(recording)

    for row in TABLE:
        until, cell = float(row[0]), row[COLUMNS[case]]
        if row[1] == "the verdict":
            assert words(cell) == said(file, until)
            continue
        signal, wait = [*words(row[1]), ""][:2]
        rank = row[1].split(" of ")[1].split()[0]
        assert float(cell) == pytest.approx(figures(recording, until)[signal, rank, wait], abs=1), row


def test_one_counter_of_one_rank_is_all_that_tells_them_apart() -> None:
    different = {row[1] for row in TABLE if row[2] != row[3]}

    assert different == {"`process_storage_read_bytes_total` of TP5", "the verdict"}
