"""Every condition, live, as a recording and to its end.

What stallwatch says of it is what `drill run` announces; its recording, replayed, says the same; and nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from score import drills
from stallwatch.drill.command import Pace
from stallwatch.drill.conditions import Condition
from stallwatch.drill.memory_cgroup import refusal
from stallwatch.drill.nvml_standin import NoCompilerError, build
from stallwatch.drill.nvml_standin import StandIn as Cards
from stallwatch.drill.story import PLANTED_SECRET
from stallwatch.drill.table import CONDITIONS, find_condition

from .drilled import SMALL, SPEED, Drilled, assert_gone, remains
from .harness import PATIENCE, SLACK, discovery, wait_until
from .recorder import ALARMS, Change, Recorder

pytestmark = pytest.mark.e2e

WITHIN = 75.0
OTHERS = "/batch[.]py"
"""A real engine of test_vllm, which may run at the same time: the names of embedded ones are counted."""

GROUPS = tuple(
    tuple(line.split())
    for line in (
        "normal barrier-deadlock phantom-hang slow-load stopped-rank briefly-stopped-rank dead-rank blocked-io "
        "briefly-blocked-io health-hangs",
        "stale-lock released-lock held-lock stuck-download slow-download heartbeats-only slow-bar stuck-embedded "
        "oom-killed-rank",
        "stuck-compile busy-compile zombie-rank buffered-log log-to-nowhere gpu-spin restart-loop follower",
        "port-taken freed-port serving serving-wedge embedded stuck-follower busy-spin two-servers",
    )
)
"""Each group at the same time: of embedded engines there is only one in each, for its name does not say which it is.
Who never answers is in none with who is known to be ready by its answer alone: questions are asked one by one."""

ALSO_SEEN: Mapping[str, Mapping[str, float]] = {
    "restart-loop": {"stallwatch_server_starts_total": 3},
    "serving": {"stallwatch_server_generated_tokens_total": 100, "stallwatch_server_finished_requests_total": 5},
    "port-taken": {"stallwatch_port_foreign": 1},
    "stale-lock": {"stallwatch_server_lock_age_seconds": 5},
    "held-lock": {"stallwatch_server_lock_held": 1},
    "stuck-compile": {"stallwatch_server_child_processes": 1},
}
"""By condition: what proves that it really is what it says, and its least sum."""


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0]}+{len(group) - 1}")
def test_a_drill_is_what_it_says_live_and_replayed_and_leaves_nothing(tmp_path: Path, group: tuple[str, ...]) -> None:
    """What cannot be had here is left out, and said; `kill -9` ends the rest."""
    cards, left_out = cards_for(group, tmp_path), {}
    if "gpu-spin" in group and cards is None:
        left_out["gpu-spin"] = "no C compiler"
    if "oom-killed-rank" in group and (why := refusal()):
        left_out["oom-killed-rank"] = why
    names = [name for name in group if name not in left_out]
    names += [also for name in names if (also := find_condition(name).also)]
    with ExitStack() as stack:
        sight = None if cards is None else cards.environment()
        recorder = stack.enter_context(Recorder(tmp_path, Pace(SPEED).config() + discovery(OTHERS), sight))
        every = [begin(stack, recorder, name, tmp_path / f"{n}-{name}") for n, name in enumerate(names)]
        for drill in every:
            await_verdict(recorder, drill)
        kept = [(drill, *remains(drill)) for drill in every]
        recorder.finish()
        for drill in every:
            drill.process.kill()
        for drill, family, paths in kept:
            drill.process.wait(PATIENCE)
            assert_gone(drill, family, paths)

    assert_no_secret(recorder, tmp_path)
    replayed = recorder.replayed()
    wrong = [why for drill in every for why in complaints(recorder, drill, replayed.get(drill.name, []))]
    assert not wrong, "\n".join(wrong)
    if left_out:
        pytest.skip(", ".join(f"{name}: {why}" for name, why in left_out.items()))


def test_every_condition_is_run() -> None:
    run = [name for group in GROUPS for name in group]

    assert sorted(run) == sorted(condition.name for condition in CONDITIONS)


def cards_for(group: tuple[str, ...], folder: Path) -> Cards | None:
    if "gpu-spin" not in group:
        return None
    try:
        return Cards(folder, build(folder), int(SMALL["ranks"]))
    except NoCompilerError:
        return None


def begin(stack: ExitStack, recorder: Recorder, name: str, folder: Path) -> Drilled:
    """One after the other: while everything starts at once nobody is seen in time.

    `folder`: its own, for a condition may be there twice; the cards lie in that above.
    """
    folder.mkdir()
    cards = folder.parent if find_condition(name).needs_cards else None
    drill = stack.enter_context(Drilled(name, folder, cards))
    wait_until(lambda: recorder.changes(drill.name), WITHIN, f"{name} is found\n{recorder.tail()}", 0.2)
    return drill


def await_verdict(recorder: Recorder, drill: Drilled) -> None:
    """Wait for what is expected, and note what was said for docs/SCORE.md, right or wrong."""
    condition = drill.condition
    should = (condition.expected_state, condition.expected_reason, condition.expected_rank)
    try:
        recorder.wait_for(drill.name, WITHIN, *(should if condition.expected_state in ALARMS else should[:1]))
    finally:
        changes = recorder.changes(drill.name)
        said = changes[-1].verdict if changes else ("nothing", "none", None)
        if said[0] == should[0] and should in [change.verdict for change in changes]:
            said = should  # on a busy machine a reason may give way for a moment, in the same state
        states = tuple(sorted({change.state for change in changes}))
        drills.note(drills.Drilled(condition.name, drills.words(*should), drills.words(*said), states, condition.twin))


def complaints(recorder: Recorder, drill: Drilled, replayed: list[Change]) -> Iterator[str]:
    """What is wrong with what was said of a drill, live and replayed, in words."""
    name, live = drill.condition.name, recorder.changes(drill.name)
    story = f"\n  live:     {'; '.join(map(str, live))}\n  replayed: {'; '.join(map(str, replayed))}"
    states = {change.state for change in live}
    if not states <= allowed(drill.condition):
        yield f"{name}: {states - allowed(drill.condition)} was said{story}"
    if [change.verdict for change in alarms(live)] != [change.verdict for change in alarms(replayed)]:
        yield f"{name}: other alarms when replayed{story}"
    elif any(abs(a.at - b.at) > APART for a, b in zip(alarms(live), alarms(replayed), strict=True)):
        yield f"{name}: alarms at other times when replayed{story}"
    elif live[-1].state != replayed[-1].state:
        yield f"{name}: ends otherwise when replayed{story}"
    for metric, at_least in ALSO_SEEN.get(name, {}).items():
        if (seen := recorder.sum_of(metric, drill.name)) < at_least:
            yield f"{name}: {metric} is {seen:g}, at least {at_least:g} is needed"


APART = 2 * Pace(SPEED).intervals.tick + SLACK
"""Seconds: ticks are not at the same moments."""


def alarms(changes: Iterable[Change]) -> list[Change]:
    return [change for change in changes if change.state in ALARMS]


def assert_no_secret(recorder: Recorder, folder: Path) -> None:
    recorded = recorder.out.read_text()
    assert PLANTED_SECRET not in recorded
    assert str(folder) not in recorded


def allowed(condition: Condition) -> set[str]:
    """States on the way to what is expected: of a silent condition none that pages or warns."""
    return {"working", "slow", "quiet", "idle", condition.expected_state}
