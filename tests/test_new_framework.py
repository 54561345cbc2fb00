"""docs/NEW-FRAMEWORK.md: its invented server is really known by the two files that stand there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from stallwatch.frameworks import Framework, load_frameworks
from stallwatch.parse.report import format_text, parse_files
from stallwatch.sources.logs.lines import LogScanner

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/NEW-FRAMEWORK.md").read_text(encoding="utf-8")
FILE, FIXTURE = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TITLES, LOG, PARSED = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def lantern(tmp_path: Path) -> Framework:
    """Loaded beside what holds for all frameworks, as in the package."""
    shutil.copy(ROOT / "exporter/stallwatch/frameworks/common.yaml", tmp_path)
    (tmp_path / "lantern.yaml").write_text(FILE, encoding="utf-8")
    (found,) = load_frameworks(tmp_path)
    return found


def scanned(framework: Framework, line: str) -> tuple[LogScanner, Any]:
    scanner = LogScanner(framework, track_shapes=False, numbered=True)
    return scanner, next(iter(scanner.feed(line.encode() + b"\n").hits), None)


def test_each_line_means_what_the_page_says(lantern: Framework) -> None:
    lines = yaml.safe_load(FIXTURE)["lines"]

    for line in lines:
        scanner, hit = scanned(lantern, line["line"])
        assert dict(scanner.events) == {line["event"]: 1}, line
        assert getattr(hit, "rank", None) == line.get("rank"), line
        assert scanner.version == line.get("version", ""), line
        for key in line.keys() & {"done", "total"}:
            assert hit.fields[key] == line[key]
    assert {line["event"] for line in lines} == {pattern.event for pattern in lantern.own}


def test_lines_that_must_mean_nothing_do(lantern: Framework) -> None:
    for line in yaml.safe_load(FIXTURE)["silent"]:
        assert not scanned(lantern, line["line"])[0].events, line


def test_its_processes_are_told_apart(lantern: Framework) -> None:
    main, *ranks = (line.split(maxsplit=2)[2] for line in TITLES.splitlines())

    assert lantern.entry_points[0] in main
    assert [[title.role for title in lantern.titles if title.pattern.match(rank)] for rank in ranks] == [["rank"]] * 2
    assert not any(title.pattern.match(main) for title in lantern.titles)


def test_parse_prints_of_the_log_what_the_page_shows(
    lantern: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("server.log").write_text(LOG, encoding="utf-8")

    found = parse_files(["server.log"], "lantern", (lantern,))

    assert format_text(found).strip("\n") == PARSED.strip("\n")
    assert found["files"][0]["ready"] is True
    assert found["files"][0]["errors"] == []
