"""The fold of log events into phases, markers and load progress (docs/VERDICTS.md, "Phases")."""

from __future__ import annotations

import pytest

from stallwatch.model import EVENTS, PHASES
from stallwatch.startup import COUNTERS, MARKERS, PHASE_OF_EVENT, PROGRESS_EVENTS, Startup

Fields = dict[str, float | str]


def told(*events: str | tuple[str, str | None] | tuple[str, str | None, Fields]) -> Startup:
    """A start that heard these events, one a second."""
    startup = Startup()
    for at, event in enumerate(events):
        name, rank, fields = (event, None, {}) if isinstance(event, str) else (*event, {})[:3]
        startup.apply(name, rank, fields, float(at))
    return startup


def progress(done: float, total: float = 8.0) -> Fields:
    return {"done": done, "total": total}


def test_every_event_of_the_fold_is_a_known_event_and_every_phase_a_known_phase() -> None:
    assert set(PHASE_OF_EVENT) <= set(EVENTS)
    assert set(PHASE_OF_EVENT.values()) == set(PHASES)


@pytest.mark.parametrize("event", sorted(set(EVENTS) - PROGRESS_EVENTS))
def test_what_is_no_progress_moves_nothing(event: str) -> None:
    startup = Startup()

    moved = startup.apply(event, "TP0", {"done": 3.0, "total": 8.0, "kind": "other"}, 1.0)

    assert not moved
    assert startup.last_progress is None


@pytest.mark.parametrize("event", sorted(MARKERS))
def test_a_marker_is_progress_and_sets_the_phase_of_its_rank(event: str) -> None:
    startup = told((event, "TP3"))

    assert startup.last_progress == 0.0
    assert startup.ranks["TP3"].phase == startup.phase == PHASE_OF_EVENT[event]


@pytest.mark.parametrize("event", sorted(COUNTERS))
def test_a_counter_moves_when_it_shows_another_number(event: str) -> None:
    startup = Startup()

    moves = [startup.apply(event, None, progress(done), 0.0) for done in (0.0, 0.0, 1.0, 1.0, 8.0, 0.0)]

    assert moves == [True, False, True, False, True, True]


def test_a_ratio_is_a_counter_and_nothing_at_all_is_none() -> None:
    startup = Startup()

    assert startup.apply("load_progress", None, {"ratio": 0.25}, 0.0)
    assert not startup.apply("load_progress", None, {}, 0.0)
    assert not startup.apply("load_progress", None, progress(1, 0), 0.0)
    assert startup.ranks["TP0"].load_progress == 0.25


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (progress(41, 64), (41, 64)),
        (progress(1, 3), (1, 3)),
        (progress(64, 64), (64, 64)),
        (progress(0, 64), None),
        ({"ratio": 0.64}, None),
        (progress(63.6e9, 530e9), None),
    ],
)
def test_shards_are_counted_where_the_log_counts_them(fields: Fields, expected: tuple[int, int] | None) -> None:
    startup = told("args", ("load_begin", "TP0"), ("load_progress", "TP0", fields))

    assert startup.ranks["TP0"].load_counts == expected
    startup.apply("load_end", "TP0", {}, 9.0)
    assert startup.ranks["TP0"].load_counts is None


def test_load_progress_is_one_from_load_end_on_whatever_bar_follows() -> None:
    startup = told("args", ("load_begin", "TP0"), ("load_progress", "TP0", progress(2)))
    assert startup.ranks["TP0"].load_progress == 0.25

    startup.apply("load_end", "TP0", {}, 9.0)
    startup.apply("load_progress", "TP0", progress(1), 10.0)

    assert startup.ranks["TP0"].load_progress == 1.0


def test_the_server_is_where_its_foremost_rank_is() -> None:
    startup = told(("load_begin", "TP0"), ("load_end", "TP0"), ("load_begin", "TP1"))

    assert startup.phase == "post_load"
    assert startup.ranks["TP1"].phase == "loading_weights"


def test_a_marker_of_the_one_rank_that_speaks_does_not_make_the_others_look_behind() -> None:
    startup = told(("dist_init_begin", "TP0"), ("dist_init_begin", "TP1"), ("load_end", "TP0", {"shared": 1.0}))

    assert startup.phase == startup.ranks["TP0"].phase == "post_load"
    assert startup.ranks["TP0"].markers == startup.ranks["TP1"].markers == {"dist_init_begin"}


def test_ready_is_the_phase_of_all_and_stays_it() -> None:
    startup = told("args", ("load_begin", "TP0"), ("load_begin", "TP1"), "ready", ("load_begin", "TP2"), "listening")

    assert startup.phase == "ready"
    assert {name: state.phase for name, state in startup.ranks.items()} == dict.fromkeys(("TP0", "TP1", "TP2"), "ready")


def test_after_a_fatal_line_the_phase_is_the_one_it_was_in() -> None:
    startup = told("args", ("load_begin", "TP0"), ("fatal", "TP0", {"kind": "oom"}))

    assert (startup.phase, startup.fatal_at, startup.fatal_rank) == ("loading_weights", 2.0, "TP0")


def test_arguments_behind_anything_else_are_another_start() -> None:
    startup = told("start", "args", ("load_begin", "TP1"), "args")

    assert startup.starts == 2
    assert startup.ranks == {}


@pytest.mark.parametrize("end", ["autotune_end", "compile_end"])
def test_an_open_autotune_is_closed_by_its_end_or_that_of_compiling(end: str) -> None:
    startup = told(("autotune_begin", "TP0"))
    assert startup.open_autotunes == {"TP0"}

    startup.apply(end, "TP0", {}, 9.0)

    assert startup.open_autotunes == set()


@pytest.mark.parametrize("end", ["autotune_end", "compile_end"])
def test_a_compile_is_open_until_its_end_or_another_phase(end: str) -> None:
    assert told(("compile_begin", "TP0")).compiles
    assert told(("compile_progress", "TP0", progress(4))).compiles
    assert told("compile_begin").compiles

    assert not told(("compile_begin", "TP0"), (end, "TP0")).compiles
    assert not told("compile_begin", end).compiles
    assert not told(("compile_begin", "TP0"), ("memory_pool", "TP0")).compiles
    assert not told("compile_begin", "memory_pool").compiles
    assert not told("memory_pool").compiles


def test_a_rank_that_still_compiles_while_others_went_on_does() -> None:
    both: tuple[tuple[str, str], ...] = (("compile_begin", "TP0"), ("compile_begin", "TP1"), ("compile_end", "TP0"))

    assert told(*both, ("memory_pool", "TP0")).compiles
    assert not told(*both, ("compile_end", "TP1")).compiles


def test_an_orderly_end_is_stopped_even_after_ready() -> None:
    startup = told("args", "ready", "shutdown")

    assert (startup.phase, startup.shutdown_at) == ("stopped", 2.0)


def test_lines_that_name_no_rank_hold_no_named_rank_back() -> None:
    """Rendezvous lines name no rank; the ranks are DP0-TP0 …, whose markers all stand for the whole server."""
    shared: Fields = {"shared": 1.0}
    begun = ("dist_init_begin", "dist_init_end")

    assert told(*begun, ("load_begin", "DP0-TP0", shared)).phase == "loading_weights"
    assert told(*begun, ("load_begin", "DP0-TP0", shared), ("load_end", "DP0-TP1", shared)).phase == "post_load"
    assert told(*begun, ("load_begin", "DP0-TP0", shared), "memory_pool").phase == "memory_pool"


def test_a_named_rank_that_is_behind_another_named_one_sets_no_phase() -> None:
    ahead: tuple[tuple[str, str], ...] = (("load_begin", "TP0"), ("load_end", "TP0"))

    assert told(*ahead, ("load_begin", "TP1")).phase == "post_load"
    assert told("dist_init_begin", *ahead, ("load_begin", "TP1")).phase == "post_load"


def test_shards_that_come_after_the_load_are_progress_and_no_step_back() -> None:
    """SGLang goes on bringing shards into the page cache in the background."""
    loaded: tuple[tuple[str, str], ...] = (("load_begin", "TP0"), ("load_end", "TP0"))
    startup = told(*loaded, ("download_progress", "TP0", progress(4)))

    assert (startup.phase, startup.ranks["TP0"].phase, startup.last_progress) == ("post_load", "post_load", 2.0)
    assert told(("load_begin", "TP0"), ("download_progress", "TP0", progress(4))).phase == "loading_weights"
