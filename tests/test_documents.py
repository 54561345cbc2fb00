"""What the documents say must be so: links lead somewhere, examples are accepted, tables are complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from stallwatch.config import load_config
from stallwatch.model import REASONS, STATES

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("rules/**/*.md"), *ROOT.glob("docs/**/*.md")])


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_inside_the_repository_leads_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        file, _, anchor = target.partition("#")
        if not file.startswith(("http://", "https://")):
            other = (path.parent / file) if file else path
            assert other.exists(), f"{target} does not exist"
            assert not anchor or anchor in anchors(other.read_text(encoding="utf-8")), target


def test_the_configuration_in_the_readme_is_accepted(tmp_path: Path) -> None:
    (example,) = (block for block in blocks(read("README.md"), "yaml") if block.startswith("servers:"))
    file = tmp_path / "stallwatch.yml"
    file.write_text(example)

    config = load_config(file, ("sglang", "vllm", "generic"))

    assert [server.name for server in config.servers] == ["chat", "batch-worker"]
    assert config.thresholds_for("chat").stall_after == 600.0
    assert config.thresholds_for("batch-worker").stall_after == 240.0


def test_the_readme_explains_every_state() -> None:
    table = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", read("README.md"), flags=re.MULTILINE)

    assert sorted(state for state in table if state in STATES) == sorted(STATES)


def test_the_runbooks_of_the_pages_know_only_reasons_there_are() -> None:
    for name in ("InferenceServerStalled", "InferenceServerFailed", "StallwatchBlind"):
        section = read(f"rules/runbooks/{name}.md").partition("## Likely causes by reason")[2]
        rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section.partition("\nThe kind of read")[0], re.MULTILINE)
        named = {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}

        assert named, name
        assert named <= set(REASONS), name


def test_each_dependency_has_its_reason_in_contributing() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    required = {re.split(r"[<>=\[ ]", line, maxsplit=1)[0] for line in project["dependencies"]}

    section = read("CONTRIBUTING.md").partition("## Dependencies")[2]
    explained = set(re.findall(r"^\| `([\w-]+)` \|", section, flags=re.MULTILINE))

    assert explained == required


def test_the_license_is_whole() -> None:
    text = read("LICENSE")

    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text
