"""A loop of restarts is one story; a redeploy, and somebody who tries again by hand, are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feed import WALL, Feed, server
from stallwatch.episodes import FAILED_KEPT_SECONDS
from stallwatch.model import ServerReport
from stallwatch.restarts import LEAST_ENDED, LEAST_FAILED, LONGEST_BREAK, LONGEST_LIFE

STALL_AFTER = 240.0


class Life(Feed):
    """A server name whose starts follow each other; `t` is the clock."""

    t = 0.0
    number = 0

    def begin(self, role: str = "server", node_rank: int = 0, pod_uid: str = "") -> None:
        self.number += 1
        when = WALL + self.t
        self.server = server(started_at=when, starts=self.number, role=role, node_rank=node_rank, pod_uid=pod_uid)
        self.root = True
        self.go_on(0.0)

    def go_on(self, seconds: float, step: float = 5.0) -> list[ServerReport]:
        """Look and tick until `seconds` later; something moves all the time."""
        reports, until = [], self.t + seconds
        while True:
            self.of["TP0"].storage += 5e6
            self.look(self.t)
            reports.append(self.tick(self.t))
            if self.t >= until:
                return reports
            self.t = min(until, self.t + step)

    def fail(self, lived: float = 20.0, seen: float = 15.0) -> None:
        """The first process goes without a word; in a session that lives on that is a failure after 10 s."""
        self.go_on(lived)
        self.scope, self.root = 1.0, False
        self.go_on(seen)
        self.t += 5.0

    def state(self) -> tuple[str, str]:
        verdict = self.tick(self.t).verdict
        return verdict.state, verdict.reason


def looping(times: int = LEAST_FAILED, **how: float) -> Life:
    life = Life()
    for _ in range(times):
        life.begin()
        life.fail(**how)
    life.begin()
    return life


def test_one_failure_is_over_when_the_name_starts_again() -> None:
    assert looping(1).state() == ("working", "none")


def test_in_a_loop_each_start_is_failed_from_its_beginning_since_the_first_failure() -> None:
    life = Life()
    life.begin()
    life.fail()
    first = life.t - 20.0  # over when the first process was gone
    life.begin()
    life.fail()
    found = []
    for _ in range(3):
        life.begin()
        found += life.go_on(20.0)
        life.fail(lived=0.0)

    assert {(report.verdict.state, report.verdict.reason) for report in found} == {("failed", "exited")}
    assert {report.since_timestamp - WALL for report in found} == {first}
    assert not life.episodes.changes


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ("pod-1", ("failed", "exited")),  # its container was started again, as another container
        ("pod-2", ("working", "none")),  # a pod of the same name, made anew
        ("", ("failed", "exited")),  # not known this time
    ],
)
def test_a_loop_is_of_one_pod(last: str, state: tuple[str, str]) -> None:
    life = Life()
    for _ in range(LEAST_FAILED):
        life.begin(pod_uid="pod-1")
        life.fail()
    life.begin(pod_uid=last)

    assert life.state() == state


def test_failures_of_the_pod_before_do_not_count_with_those_of_its_successor() -> None:
    life = Life()
    for pod in ("pod-1", "pod-2", "pod-3"):
        life.begin(pod_uid=pod)
        life.fail()
    life.begin(pod_uid="pod-3")

    assert life.state() == ("working", "none")


def test_a_start_that_lives_longer_than_all_before_it_is_judged_by_itself() -> None:
    life = looping(lived=20.0)

    assert [report.verdict.state for report in life.go_on(80.0)][-1] == "failed"
    assert [report.verdict.state for report in life.go_on(10.0)][-1] == "working"


def test_a_start_that_becomes_ready_ends_the_loop_at_once_and_its_story() -> None:
    life = looping()
    life.tell(life.t, "ready")
    assert life.state()[0] == "idle"
    life.fail()
    life.begin()

    assert life.state() == ("working", "none")


def unseen(life: Life) -> None:
    """It goes, and the next one is there at the next look."""
    life.go_on(2.0, step=2.0)
    life.t += 1.0


def seen_gone(life: Life) -> None:
    """It goes with its container, which the runtime starts again."""
    life.go_on(20.0)
    life.scope, life.root = 0.0, False
    life.go_on(10.0)
    life.t += 5.0


def soon_again(life: Life) -> None:
    """It goes, and the next one comes before it is known whether its session lives on."""
    life.go_on(20.0)
    life.scope, life.root = 1.0, False
    life.go_on(5.0)
    life.t += 1.0


@pytest.mark.parametrize("end", [unseen, seen_gone, soon_again])
def test_starts_that_only_end_are_a_loop_when_nobody_would_try_so_often(end: Callable[[Life], None]) -> None:
    life, states = Life(), []
    for _ in range(LEAST_ENDED + 2):
        life.begin()
        states.append(life.state())
        end(life)

    assert {state for state, _ in states[:LEAST_ENDED]} == {"working"}
    assert set(states[LEAST_ENDED:]) == {("failed", "exited")}


@pytest.mark.parametrize("end", [unseen, seen_gone, soon_again])
def test_somebody_who_starts_it_again_by_hand_three_times_is_no_loop(end: Callable[[Life], None]) -> None:
    life, states = Life(), []
    for _ in range(4):
        life.begin()
        states.append(life.state()[0])
        end(life)

    assert states == ["working"] * 4


def orderly(life: Life) -> None:
    life.go_on(20.0)
    life.tell(life.t, "shutdown")
    life.root = False
    life.go_on(10.0)
    life.t += 5.0


def stopped_unit(life: Life) -> None:
    life.go_on(20.0)
    life.stopping, life.root = 1.0, False
    life.go_on(10.0)
    life.stopping = None
    life.t += 5.0


def served(life: Life) -> None:
    life.go_on(20.0)
    life.tell(life.t, "ready")
    life.go_on(5.0)
    soon_again(life)


def lived_long(life: Life) -> None:
    """Longer than a stall takes to be seen, and loads all the time; the next one comes at once."""
    life.go_on(STALL_AFTER + 60.0, step=30.0)
    soon_again(life)


def lived_an_hour(life: Life) -> None:
    life.go_on(LONGEST_LIFE * STALL_AFTER, step=30.0)
    soon_again(life)


def stood_still(life: Life) -> None:
    """One of several nodes, which may wait for another one."""
    life.server = server(started_at=life.server.started_at, starts=life.number, nnodes=2)
    life.quiet_until(life.t, life.t + STALL_AFTER + 30.0)
    life.t += STALL_AFTER + 30.0
    soon_again(life)


def rested_long(life: Life) -> None:
    seen_gone(life)
    life.t += LONGEST_BREAK * STALL_AFTER


@pytest.mark.parametrize("end", [orderly, stopped_unit, served, lived_an_hour, stood_still, rested_long])
def test_redeploys_are_no_loop_however_many(end: Callable[[Life], None]) -> None:
    life, states = Life(), []
    for _ in range(2 * LEAST_ENDED):
        life.begin()
        states.append(life.state()[0])
        end(life)

    assert set(states) == {"working"}


def stalled(life: Life) -> None:
    """Hangs, and a probe kills it soon after that was seen."""
    life.quiet_until(life.t, life.t + STALL_AFTER + 30.0)
    life.t += STALL_AFTER + 30.0
    soon_again(life)


@pytest.mark.parametrize("end", [lived_long, stalled])
def test_slow_starts_that_all_end_before_they_are_ready_are_a_loop_too(end: Callable[[Life], None]) -> None:
    life, states = Life(), []
    for _ in range(LEAST_ENDED + 2):
        life.begin()
        states.append(life.state()[0])
        end(life)

    assert states == ["working"] * LEAST_ENDED + ["failed"] * 2


def test_two_late_failures_are_somebody_who_tries_again() -> None:
    life = looping(lived=STALL_AFTER + 60.0)

    assert life.state() == ("working", "none")


@pytest.mark.parametrize(("log", "node_rank", "is_loop"), [(True, 0, True), (False, 0, False), (True, 1, False)])
def test_where_nothing_says_ready_nobody_knows_what_was_when_it_ended(log: bool, node_rank: int, is_loop: bool) -> None:
    """Short servers of tests, one after the other: they may have done all that was asked of them."""
    life, states = Life(log=log), []
    for _ in range(2 * LEAST_ENDED):
        life.begin(node_rank=node_rank)
        states.append(life.state()[0])
        soon_again(life)

    assert set(states) == ({"working", "failed"} if is_loop else {"working"})


@settings(max_examples=25, deadline=None)
@given(
    ends=st.lists(
        st.sampled_from([orderly, stopped_unit, served, soon_again, seen_gone, unseen, lived_long]), max_size=14
    )
)
def test_fewer_than_five_unexplained_ends_in_a_row_are_never_a_failure(ends: list[Callable[[Life], None]]) -> None:
    """Whatever comes between: an end on purpose, or a start that became ready, begins the row anew."""
    life, row, longest = Life(), 0, 0
    states = []
    for end in ends:
        life.begin()
        states.append(life.state()[0])
        end(life)
        row = 0 if end in (orderly, stopped_unit, served) else row + 1
        longest = max(longest, row)

    assert longest >= LEAST_ENDED or "failed" not in states


def test_jobs_that_end_when_their_work_is_done_are_no_loop() -> None:
    life, states = Life(), []
    for _ in range(2 * LEAST_ENDED):
        life.begin(role="embedded")
        states.append(life.state()[0])
        soon_again(life)

    assert set(states) == {"working"}


def test_an_end_on_purpose_ends_a_loop() -> None:
    life = looping()
    life.tell(life.t, "shutdown")
    life.root = False

    assert life.go_on(10.0)[-1].verdict.state == "gone"


def test_a_container_that_is_not_started_again_is_gone_after_a_while() -> None:
    life = looping()
    life.scope, life.root = 0.0, False
    states = [report.verdict.state for report in life.go_on(LONGEST_BREAK * STALL_AFTER + 30, step=10.0)]

    assert (states[0], states[-1]) == ("failed", "gone")
    assert states == sorted(states)  # and no state twice


def test_what_fails_for_good_after_a_loop_is_still_the_same_failure() -> None:
    life = looping()
    since = life.tick(life.t).since_timestamp
    life.scope, life.root = 1.0, False
    reports = life.go_on(LONGEST_BREAK * STALL_AFTER + 30, step=10.0)

    assert {(report.verdict.state, report.since_timestamp) for report in reports} == {("failed", since)}


def test_a_loop_of_more_than_a_day_is_not_forgotten() -> None:
    life = looping()
    life.t += FAILED_KEPT_SECONDS
    life.begin()

    assert [report.server.name for report in life.go_on(10.0)][-1] == "s"


def test_starts_are_counted_and_stalled_seconds_add_up() -> None:
    def stalled_starts() -> Iterator[ServerReport]:
        life = Life()
        for _ in range(3):
            life.begin()
            life.quiet_until(life.t, life.t + 300.0)
            life.t += 300.0
            yield life.tick(life.t)
            life.root = False
            life.t += 5.0

    assert [(report.starts, report.stalled_seconds) for report in stalled_starts()] == [(1, 60), (2, 125), (3, 190)]
