"""What the documents tell people to type, ask and write is there: commands, metrics, alerts, keys, YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from config_keys import every_key
from stallwatch.catalogue import all_signals
from stallwatch.cli import UsageError, build_parser, main
from stallwatch.config import load_config
from stallwatch.frameworks import load_frameworks
from test_documents import DOCUMENTS, ROOT, blocks

HISTORY = {"CHANGELOG.md", "UPGRADING.md"}
"""They name what is no more."""

CURRENT = [path for path in DOCUMENTS if path.name not in HISTORY]
CHEAP = {"frameworks", "signals", "rules", "drill list"}
WORDS = re.compile(
    r"(?:^|[\s(])(?:[\w./]*/)?stallwatch ((?:serve|check|parse|record|replay|drill|rules|frameworks|signals)\b.*)"
)
PROGRAMS = {"docker", "systemctl", "kubectl", "helm", "install", "podman"}
INVENTED = ("/NAME.yaml", "/NAME.md", "/lantern.yaml")
"""Files that a recipe tells to make."""
KINDS_OF_METRIC = ("_bucket", "_sum", "_count")

each_document = pytest.mark.parametrize("path", CURRENT, ids=lambda path: str(path.relative_to(ROOT)))


def lines(text: str) -> Iterator[str]:
    """What stands in blocks for a shell, prompts and comments away, continued lines joined."""
    for block in [*blocks(text, "bash"), *blocks(text, "console")]:
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"\s#\s.*", "", line.removeprefix("$ "))


def spans(text: str) -> Iterator[str]:
    """What stands between backticks, outside of blocks."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(text: str) -> Iterator[list[str]]:
    for line in [*lines(text), *spans(text)]:
        found = WORDS.search(f" {line}")
        if found and line.split()[0] not in PROGRAMS and not re.search(r"[…A-Z]{3,}(?:[…\]]|$)", line):
            yield shlex.split(re.split(r"[|>;&]", found[1])[0])


def mistake(words: list[str]) -> str:
    """What is wrong with a command line; "" = nothing, or it is only cut short in a sentence ("`record --out`")."""
    try:
        build_parser({}).parse_args(words)
    except UsageError as error:
        return "" if re.search("arguments are required|expected one argument", str(error)) else str(error)
    return ""


@each_document
def test_every_command_line_is_one_that_is_taken(path: Path) -> None:
    found = [(words, mistake(words)) for words in commands(path.read_text(encoding="utf-8"))]

    assert [each for each in found if each[1]] == []


def test_there_are_commands_in_the_documents_and_a_wrong_one_is_seen() -> None:
    found = [words for path in CURRENT for words in commands(path.read_text(encoding="utf-8"))]

    assert {words[0] for words in found} >= {"serve", "check", "parse", "record", "replay", "drill", "rules"}
    assert "--stack" in mistake(["check", "--stack"])


def cheap() -> list[tuple[str, ...]]:
    found = {tuple(words) for path in CURRENT for words in commands(path.read_text(encoding="utf-8"))}
    asked = (words for words in found if {" ".join(words[:1]), " ".join(words[:2])} & CHEAP)
    return sorted(
        words for words in asked if "--out" not in words and "…" not in " ".join(words) and words[-1] != "--set"
    )


@pytest.mark.parametrize("words", cheap(), ids=" ".join)
def test_what_costs_nothing_is_really_run(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(words)) == 0

    assert capsys.readouterr().out


@each_document
def test_every_metric_that_is_named_is_there(path: Path) -> None:
    known = {f"stallwatch_{signal.name}" for signal in all_signals()}
    recorded = set(re.findall(r"record: (\S+)", "".join(file.read_text("utf-8") for file in ROOT.glob("rules/*.yml"))))
    parts = known | {part for name in recorded for part in name.split(":")}

    for name in re.findall(r"(?<![\w/.@-])stallwatch_[a-z0-9_]+(?![\w*{]*\.)", path.read_text(encoding="utf-8")):
        base = next((name.removesuffix(end) for end in KINDS_OF_METRIC if name.removesuffix(end) in known), name)
        is_family = name.endswith("_") and any(one.startswith(name) for one in known)
        assert base in parts or is_family or name == "stallwatch_recording", name


@each_document
def test_every_alert_that_is_named_is_there(path: Path) -> None:
    rules = "".join(file.read_text("utf-8") for file in ROOT.glob("rules/*.yml"))
    known = set(re.findall(r"alert: (\w+)", rules))

    told = re.findall(r"`((?:Inference|Stallwatch|Gpu|Naive)[A-Z][A-Za-z0-9]+)`", path.read_text(encoding="utf-8"))
    assert [name for name in told if not any(one.endswith(name) for one in known)] == []


@each_document
def test_every_block_of_yaml_can_be_read_and_ours_is_accepted(path: Path, tmp_path: Path) -> None:
    top = {key for key in every_key(tmp_path) if "." not in key}

    for text in blocks(path.read_text(encoding="utf-8"), "yaml"):
        found = yaml.safe_load(text)
        if isinstance(found, dict) and found.keys() <= top:
            file = tmp_path / "stallwatch.yml"
            file.write_text(text)
            load_config(file, tuple(framework.name for framework in load_frameworks()))


@each_document
def test_every_key_of_the_configuration_that_is_named_is_there(path: Path, tmp_path: Path) -> None:
    known = every_key(tmp_path)
    parents = {key.rpartition(".")[0] for key in known} - {""}
    text = path.read_text(encoding="utf-8")

    for span in (span for span in spans(text) if re.fullmatch(r"(?:verdict|intervals|limits|discovery)\.\w+", span)):
        assert span in known or span in parents, span


@each_document
def test_every_target_of_make_that_is_named_is_there(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = path.read_text(encoding="utf-8")

    typed = [*lines(text), *spans(text)]
    assert {name for line in typed for name in re.findall(r"^make ([a-z0-9-]+)", line)} <= targets


@each_document
def test_every_file_of_the_repository_that_is_named_is_there(path: Path) -> None:
    for span in spans(path.read_text(encoding="utf-8")):
        if re.fullmatch(
            r"(?:deploy|docs|exporter|grafana|rules|score|tests|bench)/[\w./-]+", span
        ) and not span.endswith(INVENTED):
            assert (ROOT / span).exists(), span


def test_the_index_has_every_document() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    here = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}

    assert here <= set(re.findall(r"\]\(([A-Z-]+\.md)\)", index))
