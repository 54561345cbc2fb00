"""What the documents say must be so: links lead somewhere, examples are accepted, tables are complete."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from config_keys import PLACES, every_key
from feed import Feed
from stallwatch.catalogue import all_signals, markdown
from stallwatch.cli import COMMANDS, build_parser
from stallwatch.config import Config, load_config
from stallwatch.frameworks import load_frameworks
from stallwatch.model import CHANNELS, PHASES, READ_REASONS, REASONS, STATES, WAITS, Report
from stallwatch.parse.report import parse_files
from stallwatch.presentation import document
from stallwatch.startup import PHASE_OF_EVENT
from stallwatch.strict_yaml import parse_duration, parse_size
from stallwatch.timeline import FLOORS, MIB
from stallwatch.verdict import CHECKS
from stallwatch.web.app import App, Request
from stallwatch.web.published import Published

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


# --- docs/ -------------------------------------------------------------------------------------------------


def section(name: str, heading: str) -> str:
    """The text below a heading of docs/`name`, up to the next heading."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", read(f"docs/{name}"), re.MULTILINE | re.DOTALL)
    assert found, f"docs/{name} has no section {heading!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows, headings and rules left out."""
    lines = re.findall(r"^\|(.+)\|$", text, re.MULTILINE)
    rules = {number for number, line in enumerate(lines) if re.fullmatch(r"[ |:-]+", line)}
    body = [line for number, line in enumerate(lines) if number not in rules and number + 1 not in rules]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in body]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def named(text: str) -> list[str]:
    """What stands in the first cells of the tables."""
    return [word for row in rows(text) for word in words(row[0])]


def plain(cell: str) -> str:
    return cell.replace("`", "")


def test_the_metrics_are_those_of_the_code(request: pytest.FixtureRequest) -> None:
    file = ROOT / "docs/METRICS.md"
    head, mark, tables = file.read_text(encoding="utf-8").partition("-->\n")
    if request.config.getoption("--update-golden"):
        file.write_text(head + mark + markdown(), encoding="utf-8")
        tables = markdown()

    assert mark
    assert tables == markdown()


def test_no_metric_is_left_out_of_the_tables() -> None:
    assert sorted(named(markdown())) == sorted(f"stallwatch_{signal.name}" for signal in all_signals())


def test_every_name_of_a_verdict_is_explained() -> None:
    assert sorted(named(section("VERDICTS.md", "States"))) == sorted(STATES)
    assert sorted(named(section("VERDICTS.md", "Reasons"))) == sorted(REASONS)


def test_every_phase_stands_with_its_events_and_its_budget() -> None:
    table = rows(section("VERDICTS.md", "Phases"))

    assert [(int(number), *words(phase)) for number, phase, _, _ in table] == list(enumerate(PHASES))
    events = {event: words(phase)[0] for _, phase, cell, _ in table for event in words(cell)}
    assert events == PHASE_OF_EVENT
    budgets = {words(phase)[0]: parse_duration(cell) for _, phase, _, cell in table}
    assert budgets == {phase: Config().verdict.budget(phase) for phase in PHASES}


def test_every_channel_and_every_floor_stands_in_its_table() -> None:
    table = rows(section("VERDICTS.md", "Channels"))
    channels = [words(row[0])[0] for row in table if words(row[0])[0] in CHANNELS and not row[2][:1].isdigit()]
    floors = [(words(row[0])[0], words(row[1])[0], row[2]) for row in table if row[2][:1].isdigit()]

    assert tuple(channels) == CHANNELS
    assert floors == [(floor.channel, floor.signal.name, _amount(floor.amount)) for floor in FLOORS]


def _amount(value: float) -> str:
    return f"{value / MIB:g} MiB" if value >= MIB else f"{value:,.0f}"


def test_the_checks_stand_in_their_order() -> None:
    assert named(section("VERDICTS.md", "The checks, in their order")) == [check.__name__ for check in CHECKS]


def test_a_reason_that_no_check_gives_is_marked_as_not_there_yet() -> None:
    code = read("exporter/stallwatch/verdict/checks.py")
    given = {reason for reason in REASONS if f'"{reason}"' in code}
    table = rows(section("VERDICTS.md", "Reasons"))

    assert {words(row[0])[0] for row in table if row[2] != "not yet"} == given | {"none"}


RANKS = tuple(f"TP{number}" for number in range(8))


def deadlock(feed: Feed, t: float) -> None:
    """Loaded within 25 s; then TP3 sleeps and the others wait for it."""
    feed.waits["TP3"] = "sleep"
    if 5 <= t <= 25:
        load(feed, RANKS)
    for rank in RANKS:
        if t in (5, 25):
            feed.tell(t, "load_begin" if t == 5 else "load_end", rank)


def phantom(feed: Feed, t: float) -> None:
    """Seven ranks are loaded after 25 s; TP5 reads on, a little every half minute."""
    if 5 <= t <= 25:
        load(feed, RANKS)
    elif t < 3480 and t % 30 == 0:
        feed.of["TP5"].storage += 100e6
    for rank in RANKS:
        if t == 5:
            feed.tell(t, "load_begin", rank)
        if t == (3480 if rank == "TP5" else 25):
            feed.tell(t, "load_end", rank)
    if t == 3540:
        feed.tell(t, "ready")


def load(feed: Feed, ranks: tuple[str, ...]) -> None:
    for rank in ranks:
        feed.of[rank].storage += 14e9
        feed.of[rank].cpu += 4


@pytest.mark.parametrize(("heading", "story"), [("The silent deadlock", deadlock), ("The phantom hang", phantom)])
def test_the_stories_go_as_they_are_told(heading: str, story: Callable[[Feed, float], None]) -> None:
    """Each row of the tables, on the real timeline and the real checks."""
    told = {float(row[0]): tuple(map(plain, row[2:])) for row in rows(section("VERDICTS.md", heading))}
    feed, seen = Feed(ranks=RANKS), dict[float, tuple[str, ...]]()

    for number in range(round(max(told) / 5) + 1):
        t = 5.0 * number
        feed.noise(t)
        story(feed, t)
        feed.look(t)
        report = feed.tick(t)
        seen[t] = report.phase, report.verdict.state, report.verdict.reason, report.verdict.suspect_rank or ""

    assert told == {t: seen[t] for t in told}
    if story is phantom:
        assert {verdict[1] for verdict in seen.values()} == {"working", "slow", "idle"}


# --- docs/REFERENCE.md -------------------------------------------------------------------------------------


def flags(command: str) -> dict[str, argparse.Action]:
    """The long flags of a subcommand that its help shows."""
    (commands,) = (a for a in build_parser({})._actions if isinstance(a, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    shown = [action for action in actions if action.help is not argparse.SUPPRESS]
    return {flag: action for action in shown for flag in action.option_strings if flag.startswith("--")}


def test_every_flag_stands_with_its_subcommands() -> None:
    table = [row for row in rows(section("REFERENCE.md", "Command line")) if row[0].startswith("`--")]
    told = {words(row[0])[0]: set(words(row[1])) or set(COMMANDS) for row in table}
    there: dict[str, set[str]] = {}
    for command in COMMANDS:
        for flag in flags(command):
            there.setdefault(flag, set()).add(command)

    assert told == there


def test_the_defaults_of_the_flags_are_those_of_the_code() -> None:
    table = [row for row in rows(section("REFERENCE.md", "Command line")) if row[0].startswith("`--")]
    told = {words(row[0])[0]: plain(row[2]) for row in table}
    every = {flag: action for command in COMMANDS for flag, action in flags(command).items()}
    listen, watch = told.pop("--web.listen-address"), told.pop("--for")
    missing = {"none", "all", ""}

    for flag, default in told.items():
        value = every[flag].default
        if default in ("on", "off"):
            assert value is (default == "on"), flag
        elif default in missing:
            assert value in (None, argparse.SUPPRESS), flag
        else:
            assert default in (str(value), f"{value:g}s" if isinstance(value, float) else None), flag
    assert watch == "15s, record 10m"
    assert [flags(command)["--for"].default for command in ("check", "record")] == [15.0, 600.0]
    assert f"default {listen}" in str(every["--web.listen-address"].help)


def test_every_configuration_key_stands_in_the_reference(tmp_path: Path) -> None:
    there = every_key(tmp_path)
    parents = {place.removesuffix(".") for place in PLACES} - {"servers", "servers.match"}
    top, _, servers = section("REFERENCE.md", "Configuration file").partition("Each of `servers`")

    assert set(named(top)) | {f"servers.{key}" for key in named(servers)} == there - parents | {"servers"}


def test_the_defaults_of_the_configuration_are_those_of_the_code() -> None:
    config = asdict(Config())
    table = rows(section("REFERENCE.md", "Configuration file").partition("Each of `servers`")[0])
    told = {words(row[0])[0]: plain(row[1]) for row in table if row[1].startswith("`")}

    for key, text in told.items():
        parent, _, leaf = key.rpartition(".")
        value: Any = config[parent][leaf] if parent else config[key]
        assert value == next(_readings_of(text)), key
    assert len(told) >= len(config["intervals"]) + len(config["limits"]) + 5


def _readings_of(text: str) -> Iterator[Any]:
    """A default as the table writes it: boolean, number, size or duration."""
    if text in ("true", "false"):
        yield text == "true"
    elif text.isdigit():
        yield int(text)
    elif text.endswith("B"):
        yield parse_size(text)
    else:
        yield parse_duration(text)


def test_every_wait_class_and_every_reason_for_a_missing_value_stands_in_the_reference() -> None:
    assert tuple(named(section("REFERENCE.md", "Wait classes"))) == WAITS
    assert tuple(named(section("REFERENCE.md", "Reasons for a missing value"))) == READ_REASONS


def test_every_path_of_the_reference_is_answered() -> None:
    app = App(Published(5.0, lambda: 0.0))
    answers = {path: app.answer(Request("GET", path)) for path in named(section("REFERENCE.md", "HTTP"))}

    assert len(answers) == 7
    assert 404 not in {getattr(answer, "status", 0) for answer in answers.values()}


def test_the_keys_of_the_report_stand_in_the_reference(report: Report) -> None:
    text = section("REFERENCE.md", "`check --format json` and `/api/v1/report`")
    found = document(report)
    keys = {*found, *found["servers"][0], *found["servers"][0]["ranks"][0], *found["servers"][0]["channels"][0]}

    assert keys <= set(words(text))
    assert set(named(text)) == {*found, *found["servers"][0]}


def test_the_keys_of_parse_stand_in_the_reference(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("one line\n")
    found = parse_files([str(file)], None, load_frameworks())

    assert set(named(section("REFERENCE.md", "`parse --format json`"))) == {*found, *found["files"][0]}


# --- references from the code ------------------------------------------------------------------------------


def test_documents_that_code_refers_to_are_here() -> None:
    """A name, or a name and a section: a reader of a clone can follow each."""
    seen = set()
    for folder in ("exporter", "tests", "bench", "score"):
        for file in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\s+", " ", file.read_text(encoding="utf-8"))
            seen |= {(name, heading) for name, heading in re.findall(r"docs/([A-Z]+\.md)(?:, \"([^\"]+)\")?", text)}

    assert ("VERDICTS.md", "Sufficient evidence") in seen
    for name, heading in seen:
        assert not heading or section(name, heading), (name, heading)
        assert (ROOT / "docs" / name).exists(), name
