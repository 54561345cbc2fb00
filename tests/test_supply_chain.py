"""What is pinned is what is needed, and every file of it is known by its hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def pins() -> dict[str, Version]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    return {canonicalize_name(name): Version(version) for name, version in found}


def needed() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(each) for each in project["dependencies"]]


def test_every_dependency_is_pinned_to_a_release_that_is_allowed() -> None:
    pinned = pins()

    for requirement in needed():
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_every_pin_has_hashes() -> None:
    """For at least: x86-64 and aarch64, or one file for all."""
    parts = re.split(r"^(?=[A-Za-z0-9])", (ROOT / "constraints.txt").read_text(), flags=re.M)[1:]

    assert len(parts) == len(pins())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", part) for part in parts)


def test_every_dependency_is_reasoned_for() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()

    assert [one.name for one in needed() if f"| `{one.name}` |" not in text] == []


def test_the_image_is_made_of_the_pinned_files_and_of_ours() -> None:
    """And not of what an index has that day."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = [" ".join(words.split()) for words in re.findall(r"-m pip install ([^&\n]*)", text)]
    usual = "--no-cache-dir --disable-pip-version-check"

    assert installs == [f"{usual} --require-hashes --requirement constraints.txt", f"{usual} --no-deps ."]
