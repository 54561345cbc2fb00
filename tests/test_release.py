"""What a release is made by: the workflows call what exists, and every place that has a version has the same one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stallwatch import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
WRITING = {"contents", "packages", "id-token", "attestations"}

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.name))


def version() -> str:
    """As tags, charts and the changelog write it: 1.0.0rc1 of Python is 1.0.0-rc1."""
    return re.sub(r"(?<=\d)(?=(?:a|b|rc)\d)", "-", __version__)


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


def scripts(path: Path) -> str:
    return "\n".join(step.get("run", "") for step in steps(path))


def test_there_is_one_to_test_and_one_to_release() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


@each_workflow
def test_every_step_does_one_thing_and_every_job_ends(path: Path) -> None:
    assert all(("uses" in step) != ("run" in step) for step in steps(path))
    for name, job in jobs(path).items():
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= set(jobs(path)) - {name}
        assert 0 < job["timeout-minutes"] <= 120


@each_workflow
def test_only_what_publishes_may_write(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))

    assert document["permissions"] == {}
    for name, job in jobs(path).items():
        writes = {right for right, value in job["permissions"].items() if value == "write"}
        assert writes <= (
            WRITING if (path.name, name) in {("release.yml", "image"), ("release.yml", "publish")} else set()
        )
        assert set(job["permissions"].values()) <= {"read", "write"}


@each_workflow
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = [line for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]

    assert used
    assert [line for line in used if not PINNED.search(line)] == []


@each_workflow
def test_nothing_that_others_may_write_is_put_into_a_script(path: Path) -> None:
    """Titles and names of branches are text of strangers: `${{ }}` would run it."""
    assert "${{" not in scripts(path)


@each_workflow
def test_what_is_called_exists(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = scripts(path)

    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for file in re.findall(r"(?<![\w/.-])(\.ci/\w+|constraints\.txt|CHANGELOG\.md|Dockerfile)", text):
        assert (ROOT / file).exists(), file
    if path.name == "ci.yml":
        assert ".ci/run" in text


def test_what_is_released_was_tested_as_built() -> None:
    released = jobs(ROOT / ".github/workflows/release.yml")
    test = "\n".join(step.get("run", "") for step in released["test"]["steps"])

    assert released["test"]["needs"] == "build"
    assert set(released["publish"]["needs"]) == {"test", "image"}
    assert "pip install dist/*.whl" in test
    assert "--editable" not in test
    assert "python -m build" not in scripts(ROOT / ".github/workflows/release.yml").partition("SHA256SUMS")[2]


def test_the_tag_is_compared_with_the_line_that_has_the_version() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")

    assert re.findall(r"^ARG VERSION=(.*)$", dockerfile, re.MULTILINE) == [version()]


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)

    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == version()
    assert headings[1][1]
    assert len(headings) == len(re.findall(r"^## ", text, re.MULTILINE))


def test_upgrading_tells_of_this_version() -> None:
    assert f"to {version()}" in (ROOT / "docs/UPGRADING.md").read_text(encoding="utf-8")
