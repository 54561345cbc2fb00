"""The parts of a stand-in that need no process: whose turn it is, pens, stories, cgroups."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stallwatch.cli import main
from stallwatch.drill.conditions import Condition, UnknownSettingError
from stallwatch.drill.memory_cgroup import LIMIT_BYTES, Machine, NoCgroupError, limited, refusal
from stallwatch.drill.pen import BLOCK_BYTES, Pen
from stallwatch.drill.places import BLOB, FILE_LOCK, FLOCK, environment
from stallwatch.drill.standin import as_node
from stallwatch.drill.steps import Launch, Step
from stallwatch.drill.stories import STORIES
from stallwatch.drill.table import CONDITIONS, find_condition
from stallwatch.drill.telling import Speaker, Stage, package_file
from stallwatch.frameworks import load_frameworks
from stallwatch.sources.discovery import understand

RANKS = 4


# --- whose turn it is --------------------------------------------------------------------------------------


def test_a_step_is_done_by_the_ranks_it_names_and_by_nobody_else() -> None:
    steps = (Step("loaded", "sleep"), Step("loaded", "spin", "spinner"), Step("joining", "wait", "all"))
    condition = Condition("x", "", "idle", steps=steps, culprit=1, spinner=2, ranks=4)

    assert [condition.acts_of_rank("loaded", number) for number in range(4)] == [[], ["sleep"], ["spin"], []]
    assert [condition.acts_of_rank("joining", number) for number in range(4)] == [["wait"]] * 4
    assert condition.acts_of_rank("loading", 1) == []


def test_a_rank_that_is_first_and_culprit_does_both() -> None:
    condition = Condition("x", "", "idle", steps=(Step("loaded", "read"), Step("loaded", "block", "first")), culprit=0)

    assert condition.acts_of_rank("loaded", 0) == ["read", "block"]
    assert condition.acts("loaded", "main") == []


def test_speed_divides_the_times_of_a_verdict_and_nothing_else() -> None:
    slow = find_condition("slow-load")

    fast = slow.at_speed(20)

    assert (fast.slow_seconds, fast.beat_seconds, fast.pause_seconds) == (36.0, 3.0, 7.5)
    assert fast.load_seconds == slow.load_seconds


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_a_brief_pause_is_longer_than_a_window_and_shorter_than_a_stall(condition: Condition) -> None:
    assert 60 < condition.pause_seconds < 240 - 60


# --- pens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffered", [False, True])
def test_a_buffered_pen_writes_whole_blocks_only(monkeypatch: pytest.MonkeyPatch, buffered: bool) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda _fd, data: written.append(data))
    pen = Pen(STORIES["vllm"], Speaker("engine", 7), buffered)

    pen.say(["one line"])
    few = len(written)
    pen.draw("x" * BLOCK_BYTES)

    assert few == (0 if buffered else 1)
    assert b"".join(written).startswith(b"(EngineCore pid=7) INFO ")
    assert len(written) == (1 if buffered else 2)


# --- stories -----------------------------------------------------------------------------------------------


def whole_log(framework: str) -> str:
    """A start in which the ranks speak one after another."""
    story, stage = STORIES[framework], Stage("/models/drill-moe", RANKS, 8000)
    ranks = [Speaker("rank", 200 + number, number) for number in range(RANKS)]
    main, engine = Speaker("main", 100), Speaker("engine", 101)
    lines = [*((main, text) for text in story.opening(stage)), *((engine, t) for t in story.engine_opening(stage))]
    for number, rank in enumerate(ranks):
        parts = (
            [*story.before_meeting(number, stage), *story.after_meeting(number, stage)],
            [*story.begin_load(number, stage), *story.end_load(number, 4.0), *story.begin_compile()],
            [*story.end_compile(), *story.pools(number), *story.begin_capture(number), *story.end_capture(number)],
        )
        lines += [(rank, text) for part in parts for text in part]
    lines += [*((engine, text) for text in story.engine_end()), *story.going_online(100, 8000)]
    lines += [(main, text) for text in (*story.online(), story.port_in_use(8000), story.heartbeat())]
    lines += [(main, story.access_line("127.0.0.1:5000", "POST", "/v1/completions")), (main, story.stats(3, 40.0))]
    bars = "".join(story.bar(share / 10, ranks[0]) for share in range(11)) + "".join(story.capture_bars(ranks[0]))
    return bars + "".join(story.stamp_line(_NOW, text, speaker) for speaker, text in lines)


_NOW = datetime(2026, 6, 2, 8, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(("framework", "version"), [("sglang", ""), ("vllm", "0.33.0")])
def test_the_log_of_a_start_is_read_as_one_that_became_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], framework: str, version: str
) -> None:
    log = tmp_path / "server.log"
    log.write_text(whole_log(framework))

    assert main(["parse", "--format", "json", str(log)]) == 0

    (found,) = json.loads(capsys.readouterr().out)["files"]
    assert (found["framework"], found["ready"], found["errors"]) == (framework, True, [])
    assert (found["version"] or "") == version
    assert found["ranks"]["TP0"]["load_progress"] == 1.0
    assert found["heartbeats"] >= 1


@pytest.mark.parametrize(
    "launch",
    [Launch(), Launch(nodes=2), Launch("vllm"), Launch("vllm", log="buffered")],
    ids=lambda launch: str(launch),
)
def test_its_command_line_is_that_of_the_framework(launch: Launch) -> None:
    story, stage = STORIES[launch.framework], Stage("/models/drill-moe", RANKS * launch.nodes, 8123, launch.nodes)

    command = understand(load_frameworks(), ("/usr/bin/python3", *story.command(stage)), {})

    assert command.framework == launch.framework
    assert command.facts is not None
    assert (command.facts.port, command.facts.tensor_parallel) == (8123, RANKS * launch.nodes)
    assert (command.facts.nnodes, command.facts.node_rank) == (launch.nodes, launch.nodes - 1)


@pytest.mark.parametrize("framework", sorted(STORIES))
def test_its_titles_are_those_of_the_framework(framework: str) -> None:
    title = STORIES[framework].title(Speaker("rank", 7, 11))

    command = understand(load_frameworks(), (title,), {})

    assert (command.role, command.rank, command.titled_by) == ("rank", "TP11", framework)


def test_a_follower_has_the_last_ranks() -> None:
    assert Stage("/m", 16, 8000, nodes=2).first_rank == 8
    assert [Stage("/m", 12, 8000, nodes=3, node_rank=n).first_rank for n in range(3)] == [0, 4, 8]
    assert Stage("/m", 8, 8000).first_rank == 0


def test_a_condition_is_that_of_one_node_of_several() -> None:
    """Each has its number; the first one serves, and one that waits does so when it has loaded."""
    first, second = (as_node(find_condition("normal"), 3, number, waits=number > 0) for number in (0, 1))

    assert (first.launch.number, first.acts_of_rank("loaded", 2)) == (0, [])
    assert (second.launch.number, second.acts_of_rank("loaded", 2)) == (1, ["wait"])
    assert second.all_ranks == 24
    assert as_node(find_condition("follower"), 1, 0, waits=False).launch.number == 1


@pytest.mark.parametrize(("name", "number"), [("normal", 3), ("normal", -1), ("serving", 0)])
def test_a_node_that_cannot_be_is_refused(name: str, number: int) -> None:
    with pytest.raises(UnknownSettingError, match="node"):
        as_node(find_condition(name), 3, number, waits=False)


def test_a_command_line_says_which_node_it_is() -> None:
    story, stage = STORIES["sglang"], Stage("/models/drill-moe", 12, 8123, 3, 1)

    command = understand(load_frameworks(), ("/usr/bin/python3", *story.command(stage)), {})

    assert command.facts is not None
    assert (command.facts.nnodes, command.facts.node_rank, command.facts.tensor_parallel) == (3, 1, 12)
    assert "'nnodes': 3, 'node_rank': 1," in story.opening(stage)[0]


def test_a_module_is_found_below_the_folder(tmp_path: Path) -> None:
    file = package_file(tmp_path, "vllm.entrypoints.cli.main")

    assert file == tmp_path / "vllm" / "entrypoints" / "cli" / "main.py"
    assert (tmp_path / "vllm" / "entrypoints" / "__init__.py").exists()


def test_caches_lie_in_the_folder_and_nowhere_else(tmp_path: Path) -> None:
    variables = environment(tmp_path)

    assert all(Path(path).is_relative_to(tmp_path) for path in variables.values())
    assert (tmp_path / FILE_LOCK).is_relative_to(variables["TORCH_EXTENSIONS_DIR"])
    assert (tmp_path / FLOCK).is_relative_to(variables["HF_HOME"])
    assert (tmp_path / BLOB).is_relative_to(variables["HF_HOME"])


# --- cgroups -----------------------------------------------------------------------------------------------


def machine(folder: Path, groups: str, own: str, controllers: str = "", panic: str = "0") -> Machine:
    proc, cgroups = folder / "proc", folder / "cgroup"
    for file, text in (
        (proc / "self" / "cgroup", groups),
        (proc / "sys" / "vm" / "panic_on_oom", panic),
        (cgroups / own / "cgroup.subtree_control", controllers),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(text + "\n")
    return Machine(proc, cgroups)


@pytest.mark.parametrize(
    ("groups", "own", "limit"),
    [
        ("4:memory:/job/1\n0::/", "memory/job/1", "memory.limit_in_bytes"),
        ("0::/user.slice/x", "user.slice/x", "memory.max"),
    ],
)
def test_a_cgroup_below_our_own_gets_the_limit(tmp_path: Path, groups: str, own: str, limit: str) -> None:
    here = machine(tmp_path, groups, own, controllers="cpu memory")

    with limited("drill", here) as folder:
        assert folder == here.cgroups / own / "drill"
        assert (folder / limit).read_text() == str(LIMIT_BYTES)


def test_where_none_can_be_made_a_sentence_says_why(tmp_path: Path) -> None:
    no_controller = machine(tmp_path / "a", "0::/x", "x", controllers="cpu")
    no_folder = machine(tmp_path / "b", "0::/elsewhere", "x", controllers="memory")
    would_panic = machine(tmp_path / "c", "0::/x", "x", controllers="memory", panic="2")

    assert "not given on" in refusal(no_controller)
    assert "No such file" in refusal(no_folder)
    assert "panic" in refusal(would_panic)
    with pytest.raises(NoCgroupError), limited("drill", would_panic):
        pass


def test_where_one_can_be_made_nothing_is_refused(tmp_path: Path) -> None:
    here = machine(tmp_path, "0::/x", "x", controllers="memory")

    assert refusal(here) == ""
