"""The rank the others wait for; docs/VERDICTS.md has the order of the rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stallwatch.config import Thresholds
from stallwatch.verdict import Evidence
from stallwatch.verdict.evidence import RankEvidence
from stallwatch.verdict.naming import awaited_rank, first_dead

T = Thresholds()


def two(**second: object) -> tuple[RankEvidence, ...]:
    """Two ranks alike, but for what is said of TP1."""
    alike = RankEvidence("TP0", markers=3, main_wait="futex", waits=frozenset(("futex", "poll")), progress_age=300.0)
    return alike, replace(alike, rank="TP1", **second)  # type: ignore[arg-type]


def named(*ranks: RankEvidence) -> str | None:
    return awaited_rank(Evidence(ranks=ranks), T.window)


def test_the_only_dead_rank_is_named_before_all_else() -> None:
    assert named(*two(alive=False, markers=9)) == "TP1"


def test_the_rank_with_the_fewest_markers_is_named() -> None:
    assert named(*two(markers=2)) == "TP1"
    assert named(*two(markers=4)) == "TP0"
    assert named(*two()) is None


def test_one_rank_names_none_and_engines_are_no_ranks() -> None:
    assert named(RankEvidence("TP0", main_wait="sleep")) is None
    assert named(RankEvidence("TP0", markers=1), RankEvidence("engine", is_engine=True)) is None


@pytest.mark.parametrize("wait", ["stopped", "disk", "sleep", "running"])
@pytest.mark.parametrize("others", ["futex", "poll"])
def test_on_a_tie_the_single_rank_that_waits_in_something_else_is_named(wait: str, others: str) -> None:
    ranks = [RankEvidence(f"TP{n}", markers=3, main_wait=others) for n in range(8)]
    ranks[5] = replace(ranks[5], main_wait=wait)

    assert named(*ranks) == "TP5"


def test_two_ranks_that_wait_in_something_else_name_none() -> None:
    ranks = [RankEvidence(f"TP{n}", main_wait="sleep" if n in (2, 5) else "futex") for n in range(8)]

    assert named(*ranks) is None


def test_a_rank_in_futex_among_ranks_in_poll_is_no_culprit() -> None:
    assert named(*two(main_wait="poll")) is None


def test_a_stopped_rank_is_named_although_the_other_sleeps() -> None:
    """Row a of the real servers: the waiting worker polls with short sleeps."""
    stopped = RankEvidence("TP1", main_wait="stopped")

    assert named(RankEvidence("TP0", main_wait="sleep"), stopped) == "TP1"


def test_the_main_threads_decide_before_the_others() -> None:
    sets = frozenset(("futex", "sleep"))

    assert named(*two(waits=sets)) == "TP1"
    assert named(replace(two()[0], waits=sets), replace(two()[1], main_wait="sleep")) == "TP1"


def test_waits_of_which_one_rank_tells_nothing_name_none() -> None:
    unknown = RankEvidence("TP2", markers=3, progress_age=300.0)

    assert named(*two(main_wait="sleep"), unknown) is None


def test_only_ranks_with_the_fewest_markers_come_into_question_on_a_tie() -> None:
    ranks = [RankEvidence(f"TP{n}", markers=2 if n < 2 else 3, main_wait="futex", progress_age=300.0) for n in range(4)]
    ranks[3] = replace(ranks[3], main_wait="sleep", progress_age=900.0)
    assert named(*ranks) is None

    ranks[1] = replace(ranks[1], main_wait="disk")
    assert named(*ranks) == "TP1"


def test_a_rank_whose_write_nobody_takes_is_named_if_it_is_the_only_one() -> None:
    """What it passed stands in the pipe, unread: its markers say nothing."""
    assert named(*two(main_wait="write", markers=5)) == "TP1"
    assert named(replace(two()[0], main_wait="write", markers=2), two(main_wait="write")[1]) is None
    assert named(replace(two()[0], main_wait="other", markers=2), two(main_wait="other")[1]) == "TP0"
    assert named(*two(main_wait="other", markers=5)) == "TP0"


@pytest.mark.parametrize(("age", "expected"), [(361.0, "TP1"), (360.0, None)])
def test_the_rank_whose_progress_is_older_by_more_than_a_window_is_named(age: float, expected: str | None) -> None:
    assert named(*two(progress_age=age)) == expected


def test_a_rank_whose_gpu_is_read_worse_than_the_others_is_not_named_by_its_progress() -> None:
    """It may have moved as late as they did, where nobody sees it: somebody else is on its card."""
    other, behind = two(progress_age=900.0)
    shared = frozenset(("gpu_bus", "gpu_power"))

    assert named(other, behind) == named(replace(other, unread=shared), behind) == "TP1"
    assert named(replace(other, unread=shared), replace(behind, unread=shared)) == "TP1"
    assert named(other, replace(behind, unread=shared)) is None


# --- dead and missing ones -----------------------------------------------------------------------------------


def test_of_several_dead_ranks_the_one_seen_dead_first_is_named() -> None:
    ranks = (RankEvidence("TP0", alive=False), RankEvidence("TP1", alive=False), RankEvidence("TP2"))
    dead = Evidence(ranks=ranks, deaths=((9.0, "TP1"), (3.0, "TP0")))

    assert awaited_rank(dead, T.window) == first_dead(dead) == "TP1"


def test_of_ranks_that_died_at_once_none_is_named() -> None:
    ranks = (RankEvidence("TP0", alive=False), RankEvidence("TP1", alive=False), RankEvidence("TP2", markers=9))
    dead = Evidence(ranks=ranks, deaths=((9.0, "TP1"), (9.0, "TP0")))

    assert awaited_rank(dead, T.window) is first_dead(dead) is None


def test_the_only_rank_is_not_named_when_it_dies() -> None:
    alone = Evidence(ranks=(RankEvidence("TP0", alive=False),), deaths=((1.0, "TP0"),))

    assert first_dead(alone) is None
    assert first_dead(replace(alone, missing=1)) == "TP0"


def test_without_a_death_nobody_is_dead() -> None:
    assert first_dead(Evidence(ranks=two())) is None


def test_the_rank_that_never_came_is_named_before_the_ones_that_are_behind() -> None:
    missing = Evidence(ranks=two(markers=1), missing=1, missing_ranks=("TP2",))

    assert awaited_rank(missing, T.window) == "TP2"


@pytest.mark.parametrize(
    "several", [{"missing": 2, "missing_ranks": ("TP2", "TP3")}, {"missing": 1, "missing_ranks": ()}, {"missing": 2}]
)
def test_missing_ranks_that_are_several_or_have_no_name_name_nobody(several: dict[str, object]) -> None:
    """Nor is somebody else blamed, who only waits for them."""
    assert awaited_rank(Evidence(ranks=two(markers=1), **several), T.window) is None  # type: ignore[arg-type]


def test_a_missing_rank_makes_two_of_one() -> None:
    one = Evidence(ranks=(RankEvidence("TP0", markers=3),), missing=1, missing_ranks=("TP1",))

    assert awaited_rank(one, T.window) == "TP1"
