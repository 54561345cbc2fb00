"""Framework files: every one loads, every pattern is shown by a line of its fixture, mistakes are named."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stallwatch.frameworks import FIELDS, Framework, Pattern, load_frameworks, quantity, rank_name
from stallwatch.parse.report import format_text, parse_files
from stallwatch.sources.logs.lines import Hit, LogScanner
from stallwatch.strict_yaml import InputError

FOLDER = Path(__file__).parent / "frameworks"
FRAMEWORKS = {framework.name: framework for framework in load_frameworks()}
SHIPPED = Path(load_frameworks.__code__.co_filename).parent
ANSI = re.compile(r"\x1b\[[0-9;]*m")
KEYS = {"from", "event", "line", "kind", *FIELDS}


def fixture(name: str) -> dict[str, list[dict[str, Any]]]:
    document: dict[str, list[dict[str, Any]]] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    return document


def lines(part: str) -> Iterator[Any]:
    """Every fixture line with the frameworks it must hold for."""
    for name in [*FRAMEWORKS, "common"]:
        for number, line in enumerate(fixture(name)[part]):
            for framework in FRAMEWORKS if name == "common" else [name]:
                yield pytest.param(FRAMEWORKS[framework], line, id=f"{framework}-{name}-{number}")


def matching(framework: Framework, line: str) -> Pattern | None:
    """The first pattern that fits, tried without any search for literals."""
    text = ANSI.sub("", line).strip("\r")
    prefix, message = framework.split(text)
    return next((one for one in framework.patterns if framework.fits(one, prefix, message)), None)


def releases(framework: Framework, line: dict[str, Any]) -> set[str]:
    """The examined releases that a line is of: "0.32.0 real" is of 0.32.0."""
    origins = line["from"] if isinstance(line["from"], list) else [line["from"]]
    words = {origin.split(" ")[0] for origin in origins}
    return {release for release in framework.releases if release in words or release.removesuffix(".0") in words}


def scan(framework: Framework, line: str) -> tuple[LogScanner, list[Hit]]:
    scanner = LogScanner(framework, track_shapes=False, numbered=True)
    return scanner, scanner.feed(line.encode() + b"\n").hits


def test_every_framework_has_a_fixture_and_every_fixture_a_framework() -> None:
    assert {path.stem for path in SHIPPED.glob("*.yaml")} == {path.stem for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize(("framework", "line"), list(lines("lines")))
def test_a_line_means_what_its_fixture_says(framework: Framework, line: dict[str, Any]) -> None:
    scanner, hits = scan(framework, line["line"])

    told = {} if line["event"] == "none" else {line["event"]: 1}
    assert dict(scanner.events) == told
    assert scanner.matched == 1
    if hits:
        assert hits[0].rank == line.get("rank")
    expected = {key: line[key] for key in line.keys() - {"from", "event", "line", "rank", "version"}}
    if line["event"] not in ("none", "access", "heartbeat"):
        assert {key: hits[0].fields.get(key) for key in expected} == expected
    if "version" in line:
        assert scanner.version == line["version"]


@pytest.mark.parametrize(("framework", "line"), list(lines("lines")))
def test_the_literal_of_a_pattern_is_in_every_line_it_matches(framework: Framework, line: dict[str, Any]) -> None:
    pattern = matching(framework, line["line"])

    assert pattern is not None
    assert pattern.literal in line["line"].encode()


RUNS = (
    st.none()
    | st.text("0123456789.\u0663\u096d\u00b2", min_size=1, max_size=24)
    | st.builds(lambda digit, length: digit * length, st.sampled_from("09.\u0663"), st.integers(1, 5000))
)
"""What may stand where a line has a number; None = the number itself."""


@pytest.mark.parametrize("name", FRAMEWORKS)
@given(runs=st.lists(RUNS, min_size=1, max_size=7), ready=st.booleans())
@settings(max_examples=15, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
def test_no_number_in_any_known_line_stops_the_reader(name: str, runs: list[str | None], ready: bool) -> None:
    numbers = cycle(runs)
    known = [one["line"] for part in ("lines", "silent") for file in (name, "common") for one in fixture(file)[part]]
    spoilt = []
    for line in known:
        prefix = FRAMEWORKS[name].prefix.match(line)
        for begin in (0, prefix.end() if prefix else 0):  # a spoilt prefix is often none, and then nothing fits
            rest = re.sub(r"\d+(?:\.\d+)*", lambda number: next(numbers) or number[0], line[begin:])
            spoilt.append(line[:begin] + rest)
    log = "".join(line + "\n" for line in spoilt).encode()

    scanner = LogScanner(FRAMEWORKS[name])
    if ready:
        scanner.be_ready()
    scanner.feed(log)
    document = parse_files(["-"], name, load_frameworks(), io.BufferedReader(io.BytesIO(log)))

    assert scanner.lines == len(spoilt)
    assert format_text(document)


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12.0), ("12.5", 12.5), ("7.", 7.0)]
    + [(text, None) for text in (None, "", ".", "1.2.3", "9" * 400, "\u0663", "1e9", "nan", "inf", "-1", " 1")],
)
def test_a_figure_is_a_plain_decimal_or_none(text: str | None, number: float | None) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize(("framework", "line"), list(lines("silent")))
def test_a_line_that_must_mean_nothing_does(framework: Framework, line: dict[str, Any]) -> None:
    scanner, _ = scan(framework, line["line"])

    assert not scanner.events, line["why"]


WEIGHTY = {"ready", "fatal", "shutdown", "watchdog"}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_no_line_that_weighs_does_so_when_it_is_quoted(name: str) -> None:
    """A prompt may hold any line of any log: behind other words, and in the server's own log, it says nothing."""
    framework = FRAMEWORKS[name]
    files = {name, framework.extends or name, "common"}
    for entry in (entry for file in files for entry in fixture(file)["lines"] if entry["event"] in WEIGHTY):
        line = ANSI.sub("", entry["line"])
        pattern, (_, message) = matching(framework, line), framework.split(line)
        assert pattern is not None
        quoted = [f"what does it mean: {line}", f"'{line}'"]
        if pattern.regex.pattern != ".":  # at this level no request is logged
            quoted.append(line[: len(line) - len(message)] + f"chat: {message}")
        if pattern.prefix != "any":
            quoted.append(message)

        for text in quoted:
            assert not WEIGHTY & set(scan(framework, text)[0].events), text


@pytest.mark.parametrize("name", [*FRAMEWORKS, "common"])
def test_every_pattern_is_shown_by_a_line(name: str) -> None:
    framework = FRAMEWORKS["sglang" if name == "common" else name]
    own = set(framework.patterns) - framework.own if name == "common" else framework.own

    shown = {matching(framework, line["line"]) for line in fixture(name)["lines"]}

    assert own - shown == set()


@pytest.mark.parametrize("name", [name for name, one in FRAMEWORKS.items() if one.releases])
def test_every_pattern_is_shown_at_both_ends_of_its_range_of_releases(name: str) -> None:
    framework = FRAMEWORKS[name]
    shown: dict[Pattern | None, set[str]] = {}
    for line in fixture(name)["lines"]:
        shown.setdefault(matching(framework, line["line"]), set()).update(releases(framework, line))

    ends = {one: {one.versions[0], one.versions[-1]} for one in framework.own}
    assert {one.literal: lacking for one, both in ends.items() if (lacking := both - shown.get(one, set()))} == {}


@pytest.mark.parametrize("name", [name for name, one in FRAMEWORKS.items() if one.releases])
def test_no_line_is_of_a_release_that_does_not_print_it(name: str) -> None:
    framework = FRAMEWORKS[name]
    known = [(line, matching(framework, line["line"])) for line in fixture(name)["lines"]]

    assert [
        line["line"]
        for line, pattern in known
        if pattern in framework.own and not releases(framework, line) <= set(pattern.versions)
    ] == []


START = {"load_begin", "load_progress", "load_end", "capture_progress", "capture_end", "listening", "ready"}
"""Markers of a whole start.  vLLM's second model runner has a bar and no line where capture begins."""


@pytest.mark.parametrize(
    ("name", "version", "events"),
    [
        ("sglang", "0.5.21", START | {"capture_begin"}),
        ("sglang", "0.5.23", START | {"capture_begin"}),
        ("vllm", "0.32", START),
        ("vllm", "0.33", START),
    ],
)
def test_the_newest_releases_show_a_whole_start(name: str, version: str, events: set[str]) -> None:
    shown = {line["event"] for line in fixture(name)["lines"] if f"{line['from']}.".startswith(f"{version}.")}

    assert events - shown == set()


@pytest.mark.parametrize("name", [*FRAMEWORKS, "common"])
def test_fixtures_name_known_fields_only(name: str) -> None:
    assert {key for line in fixture(name)["lines"] for key in line} <= KEYS


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ("_DP0_PP0_TP3_EP3", "DP0-PP0-TP3"),
        (" DP1 PP0 ATTN_CP0 MOE_DP2 TP3 EP3", "DP1-PP0-TP3"),
        (" TP3 PP1", "PP1-TP3"),
        ("_DP3", "DP3"),
        ("", "TP0"),
    ],
)
def test_rank_names_hold_dp_pp_tp_in_this_order(parts: str, name: str) -> None:
    assert rank_name(parts) == name


@pytest.mark.parametrize(
    ("title", "role", "parts"),
    [
        ("sglang::scheduler_DP0_TP3_EP3", "rank", "_DP0_TP3_EP3"),
        ("sglang::scheduler", "rank", ""),
        ("sglang::detokenizer", "detokenizer", None),
        ("sglang::data_parallel_controller", "controller", None),
        ("VLLM::Worker_TP1", "rank", "_TP1"),
        ("VLLM::Worker", "worker", None),
        ("VLLM::EngineCore", "engine", None),
        ("VLLM::DPCoordinator", "controller", None),
    ],
)
def test_titles_tell_roles(title: str, role: str, parts: str | None) -> None:
    found = [
        (one.role, match.groupdict().get("parts"))
        for framework in FRAMEWORKS.values()
        for one in framework.titles
        if (match := one.pattern.match(title))
    ]

    assert found == [(role, parts)]


def test_the_number_of_an_engine_is_in_its_title() -> None:
    numbers = {}
    for title in ("VLLM::EngineCore", "VLLM::EngineCore_DP0", "VLLM::EngineCore_DP3"):
        matches = [one.pattern.match(title) for one in FRAMEWORKS["vllm"].titles if one.role == "engine"]
        numbers[title] = [match["engine"] for match in matches if match]

    assert numbers == {
        "VLLM::EngineCore": [None],
        "VLLM::EngineCore_DP0": ["0"],
        "VLLM::EngineCore_DP3": ["3"],
    }


def test_no_default_endpoint_makes_a_server_generate() -> None:
    asked = {name: one.endpoints[one.default_endpoint] for name, one in FRAMEWORKS.items() if one.endpoints}

    assert asked == {
        "dynamo": "/health",  # of the front end alone
        "generic": "/health",
        "llamacpp": "/health",
        "lmdeploy": "/health",
        "sglang": "/v1/models",
        "tgi": "/v1/models",
        "trtllm": "/health",
        "vllm": "/health",
    }


BAD = {
    "unknown event": ("event: wrong", "'wrong' is unknown; allowed are"),
    "bad expression": ("regex: '('", "not a regular expression"),
    "unknown group": ("regex: '(?P<color>x)'", "group 'color' is unknown; allowed are"),
    "no literal": ("literal: ''", "a literal of at least 2 characters"),
    "literal over lines": ('literal: "abc\\ndef"', "a literal of at least 2 characters"),
    "kind of no error": ("kind: oom", "only error and fatal have a kind"),
    "level without group": ("level: [ERROR]", "the prefix has no group named level"),
    "unknown key": ("colour: red", "unknown key; allowed are"),
    "silence of no duration": ("silent: long", "'long' is no duration"),
    "a time-out of no duration": ("timeout: 480", "'480' is no duration"),
    "release never examined": ("versions: '1.0-'", "'1.0-' is no range of examined releases; allowed are none"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_in_a_pattern_is_named_with_file_line_and_key(mistake: str, tmp_path: Path) -> None:
    change, problem = BAD[mistake]
    key = change.split(":")[0]
    pattern = {"event": "event: ready", "literal": "literal: abc", "regex": "regex: abc", key: change}
    text = "title: X\npatterns:\n  - " + "\n    ".join(pattern.values()) + "\n"
    (tmp_path / "x.yaml").write_text(text)
    line = 1 + next(number for number, row in enumerate(text.splitlines()) if change in row)

    with pytest.raises(InputError) as caught:
        load_frameworks(tmp_path)

    where = f"{tmp_path / 'x.yaml'}:{line}: patterns[0].{key}: "
    assert str(caught.value).startswith(where)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("patterns: []\n", "title: the key is required"),
        ("title: X\nprefix: '(?P<colour>x)'\n", "group 'colour' is unknown"),
        ("title: X\ncomms: ['sglang::scheduler']\n", "the kernel cuts a comm at 15 bytes"),
        ("title: X\nembedded_ready: [done]\n", "'done' is unknown; allowed are"),
        ("title: X\ntitles: [{role: rank}]\n", "pattern: the key is required"),
        (
            "title: X\naccess: {endpoints: {health: health}}\n",
            "allowed are health, models, metrics with a path",
        ),
        ("title: X\npatterns: [{event: ready, literal: abc}]\n", "regex: the key is required"),
        ("title: X\npatterns: [{event: error, literal: abc, regex: abc}]\n", "kind: the key is required"),
    ],
)
def test_a_mistake_in_a_framework_is_named(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)

    with pytest.raises(InputError, match=re.escape(problem)):
        load_frameworks(tmp_path)


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ("1.0-3.0", ("1.0", "2.0", "3.0")),
        ("2.0-", ("2.0", "3.0")),
        ("-2.0", ("1.0", "2.0")),
        ("2.0", ("2.0",)),
        ("3.0-1.0", None),
        ("2.1-", None),
    ],
)
def test_a_range_of_releases_is_of_those_examined(versions: str, found: tuple[str, ...] | None, tmp_path: Path) -> None:
    pattern = f"{{event: ready, literal: up!, regex: up!, versions: '{versions}'}}"
    (tmp_path / "x.yaml").write_text(f"title: X\nreleases: ['1.0', '2.0', '3.0']\npatterns: [{pattern}]\n")

    if found is None:
        with pytest.raises(InputError, match=r"is no range of examined releases; allowed are 1\.0, 2\.0, 3\.0"):
            load_frameworks(tmp_path)
    else:
        assert load_frameworks(tmp_path)[0].patterns[0].versions == found


def test_silences_and_time_outs_are_seconds_and_a_time_out_has_a_name(tmp_path: Path) -> None:
    known = "{event: ready, literal: up!, regex: up!, silent: 2h, timeout: 8m, clock: barrier}"
    (tmp_path / "x.yaml").write_text(f"title: X\npatterns: [{known}, {{event: ready, literal: up!, regex: up!}}]\n")

    told, untold = load_frameworks(tmp_path)[0].patterns

    assert (told.silent_seconds, told.timeout_seconds, told.clock) == (7200.0, 480.0, "barrier")
    assert (untold.silent_seconds, untold.timeout_seconds, untold.clock) == (0.0, 0.0, "")


def test_a_time_out_without_a_name_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("title: X\npatterns: [{event: ready, literal: up!, regex: up!, timeout: 8m}]\n")

    with pytest.raises(InputError, match=r"patterns\[0\].clock: the key is required"):
        load_frameworks(tmp_path)


@pytest.mark.parametrize(
    ("name", "event", "clock", "seconds"),
    [
        ("sglang", "load_end", "barrier", {300.0, 480.0}),
        ("sglang", "dist_init_begin", "nccl", {600.0}),
        ("sglang", "dist_init_begin", "gloo", {1800.0}),
        ("sglang", "capture_begin", "gloo", {1800.0}),
        ("sglang", "listening", "warmup", {600.0}),
        ("vllm", "dist_init_begin", "nccl", {600.0}),
    ],
)
def test_the_servers_own_time_outs_stand_beside_the_lines_they_count_from(
    name: str, event: str, clock: str, seconds: set[float]
) -> None:
    found = {one.timeout_seconds for one in FRAMEWORKS[name].patterns if one.event == event and one.clock == clock}

    assert found == seconds


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if not name.startswith(("dynamo", "generic"))])
def test_long_healthy_silences_of_loads_and_tuners_are_known(name: str) -> None:
    silent = {one.event: one.silent_seconds for one in FRAMEWORKS[name].patterns if one.silent_seconds}

    assert max(silent.get(event, 0.0) for event in ("load_begin", "load_progress")) >= 3600.0
    assert silent["autotune_begin"] == 7200.0


BASE = """\
title: Base
releases: ["1.0"]
prefix: '^(?:B (?P<time>\\d{4}-\\d\\d-\\d\\d \\d\\d:\\d\\d:\\d\\d) )?'
arguments: {port: {flags: [--port]}}
access: {default_port: 1234, endpoints: {health: /health}}
entry_points: [base]
embedded_ready: [load_end]
patterns: [{event: load_begin, literal: load, regex: load}]
"""
OVER = """\
title: Over
extends: base
entry_points: [over]
prefix: '^O (?P<time>\\d{4}-\\d\\d-\\d\\d \\d\\d:\\d\\d:\\d\\d) '
patterns: [{event: ready, literal: up!, regex: up!}]
"""


def test_a_framework_that_extends_another_reads_its_lines_behind_either_prefix(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "aover.yaml").write_text(OVER)  # read before the file it extends

    over, base = load_frameworks(tmp_path)

    said = [scan(over, f"{sign} 2026-06-02 08:00:00 {word}")[1] for sign in "BO" for word in ("load", "up!")]
    assert [(hit.event, hit.stamp) for hits in said for hit in hits] == [
        (event, "2026-06-02 08:00:00") for event in ("load_begin", "ready") * 2
    ]
    assert [scan(base, f"O 2026-06-02 08:00:00 {word}")[1] for word in ("load", "up!")] == [[], []]
    assert (over.arguments, over.embedded_ready) == (base.arguments, base.embedded_ready)


def test_a_framework_that_extends_another_takes_neither_its_port_nor_its_commands(tmp_path: Path) -> None:
    """A worker without HTTP must not be watched at the port of a server that has it."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "aover.yaml").write_text(OVER)

    over, _ = load_frameworks(tmp_path)

    assert (over.default_port, dict(over.endpoints), over.entry_points, over.titles) == (0, {}, ("over",), ())


@pytest.mark.parametrize("base", ["nobody", "over"])
def test_only_a_framework_of_its_own_can_be_extended(base: str, tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text(f"title: X\nextends: {base}\npatterns: []\n")

    with pytest.raises(InputError, match=re.escape(f"extends: '{base}' is unknown; allowed are")):
        load_frameworks(tmp_path)


def test_a_new_framework_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").write_text(
        "title: Mini\npatterns: [{event: ready, literal: up!, prefix: any, regex: up!}]\n"
    )

    (framework,) = load_frameworks(tmp_path)

    assert framework.name == "mini"
    assert scan(framework, "up!")[0].events["ready"] == 1
