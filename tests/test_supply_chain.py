"""What is pinned is what is needed, every file of it is known by its hash, and the audit tells what it found."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
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


# --- the audit -----------------------------------------------------------------------------------------------


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("supply_chain", ROOT / ".ci/supply_chain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


audit = _loaded()
HOLE = {"id": "PYSEC-2026-7", "fix_versions": ["99.1", "98.4"], "aliases": [], "description": "x"}
Answer = dict[str, Any]
Audit = Callable[..., int]


class Installed(Distribution):
    """A distribution that says this of itself."""

    def __init__(self, name: str, **said: str) -> None:
        lines = {"Metadata-Version": "2.4", "Name": name, "Version": "1.0", **said}
        self._text = "".join(f"{key.replace('_', '-')}: {value}\n" for key, value in lines.items())

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Nothing is looked for."""
        raise NotImplementedError


GOOD = Installed("PyYAML", Classifier="License :: OSI Approved :: MIT License")


def answers(changed: Mapping[str, Answer] | None = None) -> str:
    """What pip-audit prints, all well but what is changed; by normal name."""
    given = changed or {}
    well: Answer = {"vulns": []}
    found = [{"name": name, "version": str(version), **well, **given.get(name, {})} for name, version in pins().items()]
    return json.dumps({"dependencies": found, "fixes": []})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """The audit, with a pip-audit that prints, says and ends as it is told to."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)

    def run(printed: str, status: int = 0, said: str = "", installed: tuple[Distribution, ...] = (GOOD,)) -> int:
        program = tmp_path / "pip-audit"
        (tmp_path / "printed").write_text(printed)
        (tmp_path / "said").write_text(said)
        script = f'echo "$*" >asked\ncat printed\ncat said >&2\nexit {status}\n'
        program.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}")
        program.chmod(0o700)
        return int(audit.main([str(program)], installed))

    return run


def test_where_no_hole_is_known_the_audit_passes(
    run: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(answers()) == 0

    said = capsys.readouterr().out
    assert "holes that are known: 0" in said
    assert "NOT ASKED" not in said
    assert "pyyaml 1.0: mit" in said
    asked = (tmp_path / "asked").read_text()
    assert f"--requirement {ROOT / 'constraints.txt'} --disable-pip --require-hashes --format json" in asked


def test_a_hole_that_is_known_is_told_and_is_an_error(run: Audit, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(pins()))
    assert run(answers({name: {"version": "1.5", "vulns": [HOLE, {"id": "GHSA-x", "fix_versions": []}]}}), 1) == 1

    said = capsys.readouterr().out
    assert "holes that are known: 2" in said
    assert f"{name} 1.5: PYSEC-2026-7, mended in 99.1, 98.4" in said
    assert f"{name} 1.5: GHSA-x, mended in no release" in said


NOT_ASKED: dict[str, tuple[str, int, str, str]] = {
    "no network": ("", 1, "WARNING: x\nrequests: no route to host\n", "requests: no route to host"),
    "nothing said": ("", 3, "", "pip-audit ended with 3"),
    "no JSON": ("all is well", 0, "", "pip-audit ended with 0"),
    "another JSON": ("[]", 0, "", "pip-audit ended with 0"),
    "half of it": (answers()[:-40], 0, "broken pipe", "broken pipe"),
    "nobody in it": ('{"dependencies": []}', 0, "", "not in the answer"),
    "one left out": (
        answers({next(iter(pins())): {"vulns": [], "skip_reason": "no such release"}}),
        0,
        "",
        "no such release",
    ),
}


@pytest.mark.parametrize("case", NOT_ASKED)
def test_what_could_not_be_asked_is_told_and_never_as_clean(
    case: str, run: Audit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, status, said, reason = NOT_ASKED[case]
    assert run(printed, status, said) == 0

    told = capsys.readouterr().out
    assert "holes: NOT ASKED" in told
    assert reason in told
    assert "holes that are known" not in told

    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert run(printed, status, said) == 1


def test_without_pip_audit_nobody_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit.main([str(tmp_path / "nowhere")], [GOOD])

    told = capsys.readouterr().out
    assert "holes: NOT ASKED" in told
    assert "pip-audit cannot be run: No such file or directory" in told


def test_a_hole_is_told_though_another_package_could_not_be_asked_for(
    run: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = list(pins())[:2]
    assert run(answers({first: {"vulns": [HOLE]}, second: {"vulns": [], "skip_reason": "no such release"}}), 1) == 1

    told = capsys.readouterr().out
    assert f"not looked up: {second}: no such release" in told
    assert "PYSEC-2026-7" in told


LICENCES = {
    "mit": Installed("a", License_Expression="MIT"),
    "either": Installed("a", License_Expression="(Apache-2.0 OR GPL-3.0-only)"),
    "both allowed": Installed("a", License_Expression="MIT AND BSD-3-Clause"),
    "words": Installed("a", License="The MIT License\nPermission is hereby granted"),
    "classifier": Installed("a", Classifier="License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"),
    "said elsewhere": Installed("promql_parser"),
}
REFUSED = {
    "gpl": (Installed("a", License_Expression="GPL-3.0-only"), "a 1.0: gpl-3.0-only"),
    "and gpl": (Installed("a", License_Expression="MIT AND GPL-3.0-only"), "a 1.0: mit and gpl-3.0-only"),
    "agpl in words": (Installed("a", License="GNU Affero General Public License v3"), "a 1.0: gnu affero"),
    "gpl classifier": (
        Installed("a", Classifier="License :: OSI Approved :: GNU General Public License"),
        "a 1.0: gnu",
    ),
    "lgpl": (Installed("a", License_Expression="LGPL-2.1-or-later"), "a 1.0: lgpl-2.1-or-later"),
    "limited": (Installed("a", License="Limited commercial licence"), "a 1.0: limited commercial"),
    "permits": (Installed("a", License="GPL, which permits nothing of the kind"), "a 1.0: gpl, which permits"),
    "one of two in words": (Installed("a", License="GPLv2, parts of it MIT"), "a 1.0: gplv2, parts"),
    "nothing said": (Installed("a"), "a 1.0: no licence"),
}


@pytest.mark.parametrize("case", LICENCES)
def test_a_licence_of_the_list_is_allowed(case: str, run: Audit) -> None:
    assert run(answers(), installed=(GOOD, LICENCES[case])) == 0


@pytest.mark.parametrize("case", REFUSED)
def test_any_other_licence_is_refused_by_name(case: str, run: Audit, capsys: pytest.CaptureFixture[str]) -> None:
    refused, told = REFUSED[case]
    assert run(answers(), installed=(GOOD, refused)) == 1

    assert f"not on the list of licences: {told}" in capsys.readouterr().out
