"""The parent's side of the driver's helper: helpers that answer, hang, die and talk nonsense, all without a process.

A clock that is moved by hand; only a hang costs real time, one short deadline each.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import IO, Any, cast

import pytest

from stallwatch.sources.gpus import nvml
from stallwatch.sources.gpus.nvml_child import (
    ABSENT_SECONDS,
    FORGET_SECONDS,
    KILL_SECONDS,
    LARGEST_ANSWER,
    LONGEST_REPAIR,
    RENEW_BYTES,
    RENEW_SECONDS,
    SECOND_SECONDS,
    WARN_SECONDS,
    Absent,
    Answer,
    CardAnswer,
    Nvml,
    Row,
    Unanswered,
)

DEADLINE = 0.01
INTERVAL = 5.0
Told = Mapping[str, Any] | bytes | None
"""What a helper says to a request: an answer, bytes as they are, or nothing (it hangs)."""


def card(index: str = "0", mig: str = "", codes: Mapping[str, int] | None = None, **values: float) -> dict[str, Any]:
    uuid = f"{'MIG' if mig == 'instance' else 'GPU'}-{index}"
    names = {"uuid": uuid, "index": index, "name": "H100", "capability": "9.0", "pci": "0000:10:00.0", "mig": mig}
    return {**names, "values": values, "codes": codes or {}, "processes": None}


def well(index: str = "0") -> dict[str, Any]:
    return card(index, temperature=40)


def refused(index: str = "0", code: int = 999) -> dict[str, Any]:
    return card(index, codes={"temperature": code})


def told(*cards: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"code": 0, "driver": "580", "cards": cards, "lost": [], "broken": {}, "xids": [], "resident": 0, **more}


WELL = told(well("0"), well("1"))


class Input:
    """A helper's standard input."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take, self.closed = take, False

    def write(self, request: bytes) -> None:
        self._take(request)

    def close(self) -> None:
        self.closed = True


class Helper:
    """Says what `says` is when it is asked; ends when its input is closed, unless it hangs."""

    def __init__(self, note: int, says: Told, lowest_descriptor: int) -> None:
        low, self._write = os.pipe()
        read = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, lowest_descriptor)
        os.close(low)
        self.stdout: IO[bytes] | None = os.fdopen(read, "rb", 0)
        self._input = Input(self._asked)
        self.note = mmap.mmap(note, nvml.NOTE.size)
        self.note[: nvml.NOTE.size] = nvml.NOTE.pack(0.0, -1, b"nvmlInit")
        self.says, self.requests = says, list[bytes]()
        self.hangs = self.dead = self.killed = self.survives_kill = False

    @property
    def stdin(self) -> IO[bytes] | None:
        return cast(IO[bytes], self._input)

    def _asked(self, request: bytes) -> None:
        if self.dead:
            raise BrokenPipeError
        self.requests.append(request)
        if self.says is None:
            self.hangs = True
        else:
            self.answer(self.says)

    def answer(self, says: Mapping[str, Any] | bytes) -> None:
        self.hangs = False
        with suppress(BrokenPipeError):
            os.write(self._write, says if isinstance(says, bytes) else json.dumps(says).encode() + b"\n")

    def is_in(self, call: str, card: int = -1, began: float = 1.0) -> None:
        self.note[: nvml.NOTE.size] = nvml.NOTE.pack(began, card, call.encode())

    @property
    def told_to_end(self) -> bool:
        return self._input.closed

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            os.close(self._write)
            self.note.close()

    def poll(self) -> int | None:
        if self._input.closed and not self.hangs:
            self.die()
        return 0 if self.dead else None

    def kill(self) -> None:
        self.killed = True
        if not self.survives_kill:
            self.die()


class Node:
    """Starts helpers, remembers them, and has the clock.  `says`: what the next one will say."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.says: Told = WELL
        self.is_there = False
        self.lowest_descriptor = 0
        self.problem: OSError | None = None
        self.helpers: list[Helper] = []
        self.driver = Nvml(DEADLINE, self._start, lambda: self.now, lambda: self.is_there)

    def _start(self, note: int) -> Helper:
        if self.problem:
            raise self.problem
        self.helpers.append(Helper(note, self.says, self.lowest_descriptor))
        return self.helpers[-1]

    def ask(self, after: float = INTERVAL) -> Answer | Unanswered | Absent:
        self.now += after
        return self.driver.ask(False, False)

    def living(self) -> list[Helper]:
        return [helper for helper in self.helpers if not helper.dead]

    def hang(self) -> Helper:
        """The first helper has answered once, and hangs now."""
        self.ask()
        helper = self.helpers[0]
        helper.says = None
        assert isinstance(self.ask(), Unanswered)
        return helper

    def end(self) -> None:
        for helper in self.helpers:
            helper.hangs = False
        self.driver.close()
        for helper in self.helpers:
            helper.die()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.end()


def test_one_helper_answers_again_and_again(node: Node) -> None:
    found = [node.ask() for _ in range(20)]

    assert all(isinstance(answer, Answer) and len(answer.cards) == 2 for answer in found)
    assert len(node.helpers) == 1


def test_an_answer_is_made_of_what_is_told(node: Node) -> None:
    row = {**card("3", codes={"power": 3}, temperature=40), "processes": [[7, 100], [8, None]]}
    node.says = told(row, lost=["GPU-9"], broken={"4": 999}, xids=[["GPU-3", 79]])

    found = node.ask()

    expected = CardAnswer(
        *("GPU-3", "3", "H100", "9.0", "0000:10:00.0", ""),
        values={"temperature": 40},
        codes={"power": 3},
        processes=(Row(7, 100), Row(8, None)),
    )
    assert found == Answer("580", (expected,), ("GPU-9",), {4: 999}, (("GPU-3", 79),), 0)


def test_what_is_asked_for_is_passed_on(node: Node) -> None:
    for processes, events in ((False, False), (True, False), (False, True)):
        node.driver.ask(processes, events)

    assert node.helpers[0].requests == [b"0 0\n", b"1 0\n", b"0 1\n"]


# A driver that hangs


def test_a_hang_is_told_with_its_call_its_card_and_its_age(node: Node) -> None:
    helper = node.hang()
    asked = node.now
    helper.is_in("nvmlDeviceGetClockInfo", 3)

    found = [node.ask(), node.ask()]

    assert found == [Unanswered(asked, "nvmlDeviceGetClockInfo", 3)] * 2
    assert node.driver.in_flight_since == asked
    assert len(helper.requests) == 2  # it is not asked while it is in a call


def test_nothing_is_in_flight_before_the_deadline_and_after_an_answer(node: Node) -> None:
    node.ask()
    before = node.driver.in_flight_since
    node.helpers[0].says = None
    node.ask()
    at_once = node.driver.in_flight_since
    node.now += 2 * DEADLINE
    later = node.driver.in_flight_since
    node.helpers[0].says = WELL
    node.helpers[0].answer(WELL)
    node.ask()

    assert (before, at_once, later is None, node.driver.in_flight_since) == (None, None, False, None)


def test_a_call_that_is_about_no_card_has_none_and_a_helper_that_starts_says_so(node: Node) -> None:
    helper = node.hang()

    helper.is_in("nvmlSystemGetDriverVersion")
    system = node.ask()
    helper.is_in("", began=0.0)
    start = node.ask()
    helper.is_in("nvmlDeviceGetName", 2, began=0.0)
    between = node.ask()

    said = [(found.call, found.card) for found in (system, start, between) if isinstance(found, Unanswered)]
    assert said == [("nvmlSystemGetDriverVersion", None), ("start", None), ("", None)]


def test_a_late_answer_is_dropped_and_the_helper_asked_again(node: Node) -> None:
    helper = node.hang()
    helper.says = told(well("0"), driver="fresh")
    helper.answer(told(well("0"), driver="stale"))

    found = node.ask()

    assert isinstance(found, Answer)
    assert found.driver == "fresh"
    assert len(node.helpers) == 1


def test_a_driver_that_is_late_each_time_has_never_hung_for_long(node: Node) -> None:
    helper = node.hang()

    for _ in range(20):
        helper.answer(WELL)
        found = node.ask()
        assert isinstance(found, Unanswered)
        assert found.since == node.now
    assert len(node.helpers) == 1


def test_half_an_answer_is_none_yet(node: Node) -> None:
    helper = node.hang()
    line = json.dumps(WELL).encode() + b"\n"
    helper.says = WELL

    helper.answer(line[:30])
    half = node.ask()
    helper.answer(line[30:])
    whole = node.ask()

    assert (type(half), type(whole)) == (Unanswered, Answer)


def test_a_second_helper_tries_after_a_minute_and_takes_over_when_it_answers(node: Node) -> None:
    first = node.hang()

    early = [type(node.ask()) for _ in range(11)]
    count_early = len(node.helpers)
    started = [type(node.ask()), len(node.helpers)]
    found = node.ask()

    assert (set(early), count_early) == ({Unanswered}, 1)
    assert started == [Unanswered, 2]
    assert isinstance(found, Answer)
    assert (first.told_to_end, first.killed, first.dead) == (True, False, False)


def test_the_first_that_answers_again_keeps_its_place(node: Node) -> None:
    first = node.hang()
    node.says = None
    node.ask(SECOND_SECONDS)
    second = node.helpers[1]
    first.says = WELL
    first.answer(WELL)

    found = node.ask()

    assert isinstance(found, Answer)
    assert (first.told_to_end, second.told_to_end, second.killed) == (False, True, False)


def test_a_helper_that_was_told_to_end_is_killed_only_long_after(node: Node) -> None:
    first = node.hang()
    node.ask(SECOND_SECONDS)
    node.ask()

    node.ask(KILL_SECONDS - 1)
    early = first.killed
    node.ask(2)

    assert (early, first.killed) == (False, True)
    assert [helper.dead for helper in node.helpers] == [True, False]


def test_a_helper_that_was_told_to_end_and_does_is_not_killed(node: Node) -> None:
    first = node.hang()
    node.ask(SECOND_SECONDS)
    node.ask()
    first.hangs = False

    node.ask(2 * KILL_SECONDS)

    assert (first.dead, first.killed) == (True, False)


@pytest.mark.parametrize("survives", [True, False])
def test_there_are_never_more_than_two(node: Node, survives: bool) -> None:
    """The driver hangs for hours; helpers may or may not die of a kill."""
    node.hang()
    node.says = None

    most = 0
    for _ in range(2000):
        node.ask(10.0)
        for helper in node.helpers:
            helper.survives_kill = survives
        most = max(most, len(node.living()))

    assert most == 2
    assert len(node.helpers) == 2 if survives else 2 < len(node.helpers) < 40
    assert isinstance(node.ask(), Unanswered)


def test_two_that_hang_for_long_make_room_for_another(node: Node) -> None:
    """A process of its own may hang where a new one does not."""
    first = node.hang()
    node.says = None
    node.ask(SECOND_SECONDS)
    node.says = WELL

    found = [node.ask(60.0) for _ in range(14)]

    assert first.killed
    assert isinstance(found[-1], Answer)
    assert len(node.living()) <= 2


def test_a_short_hang_is_not_said_a_long_one_once_and_that_it_is_over(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    helper = node.hang()
    helper.is_in("nvmlDeviceGetClockInfo", 3)
    node.ask(WARN_SECONDS - 1)
    short = list(caplog.records)
    node.ask(2)
    node.ask()
    helper.says = WELL
    helper.answer(WELL)
    node.ask()
    node.ask()

    said = [(record.levelname, record.message) for record in caplog.records]
    assert short == []
    assert said == [("WARNING", "GPU driver does not answer"), ("INFO", "GPU driver answers again")]
    assert (caplog.records[0].__dict__["call"], caplog.records[0].__dict__["card"]) == ("nvmlDeviceGetClockInfo", 3)


# A helper that dies, or is none of ours


def test_a_helper_that_died_is_replaced_later_and_later(node: Node) -> None:
    starts = []
    node.says = b""
    for _ in range(60):
        count = len(node.helpers)
        node.ask()
        if len(node.helpers) > count:
            starts.append(node.now)
            node.helpers[-1].die()
        assert len(node.living()) <= 1

    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses[:5] == [10.0, 15.0, 25.0, 45.0, 65.0]  # each is seen to be dead one turn later
    assert set(pauses[5:]) == {65.0}


def test_what_died_is_told_as_a_code(node: Node) -> None:
    node.ask()
    node.helpers[0].die()

    found = [node.ask(), node.ask(1.0)]

    assert found == [Answer(code=999), Answer(code=999)]
    assert node.driver.in_flight_since is None


def test_one_that_lived_for_long_is_replaced_soon(node: Node) -> None:
    for _ in range(5):
        for _ in range(20):
            assert isinstance(node.ask(), Answer)
        node.living()[0].die()
        node.ask()
        found = node.ask()
        assert isinstance(found, Answer)
        assert found.cards


def test_a_helper_that_cannot_be_started_is_said_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.problem = OSError(12, "no memory")
    found = [node.ask() for _ in range(30)]
    node.problem = None

    recovered = [node.ask() for _ in range(13)][-1]

    assert set(map(type, found)) == {Answer}
    assert [record.message for record in caplog.records] == ["GPU driver cannot be asked"]
    assert isinstance(recovered, Answer)
    assert recovered.code == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        b"nonsense\n",
        b"[]\n",
        b"{}\n",
        b"\xff\n",
        b'{"code": "x"}\n',
        b'{"code": 0, "driver": "580", "cards": [{}], "lost": [], "broken": {}, "xids": []}\n',
        b'{"code": 0, "driver": "580", "cards": 7, "lost": [], "broken": {}, "xids": []}\n',
        b'{"code": 0, "resident": null}\n',
    ],
)
def test_nonsense_is_as_good_as_a_death(node: Node, nonsense: bytes) -> None:
    node.says = nonsense

    assert node.ask() == Answer(code=999)
    assert node.helpers[0].told_to_end


def test_an_answer_without_end_is_as_good_as_a_death(node: Node) -> None:
    helper = node.hang()

    found: list[object] = []
    for _ in range(2 * LARGEST_ANSWER // 60_000):
        helper.answer(b"x" * 60_000)
        found.append(node.ask(0.0))
        if isinstance(found[-1], Answer):
            break

    assert found[-1] == Answer(code=999)
    assert helper.told_to_end


# A machine without GPUs


@pytest.mark.parametrize(
    ("says", "why"), [({"code": 12}, "library"), ({"code": 9}, "driver"), (told(), "cards"), ({"code": 28}, "cards")]
)
def test_a_machine_without_gpus_is_said_once_and_looked_at_rarely(
    node: Node, says: Told, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.says = says

    found = [node.ask() for _ in range(300)]

    assert set(found) == {Absent(why)}
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", "no GPU to watch")]
    assert len(node.helpers) == 1 + int(299 * INTERVAL // ABSENT_SECONDS)
    assert not node.living()


def test_a_driver_that_is_installed_later_is_found_at_once(node: Node) -> None:
    node.says = {"code": 12}
    node.ask()
    node.ask()
    node.says, node.is_there = WELL, True

    found = node.ask()

    assert isinstance(found, Answer)


def test_a_device_node_that_was_there_all_along_is_no_reason_to_look(node: Node) -> None:
    node.says, node.is_there = {"code": 9}, True

    found = [node.ask() for _ in range(20)]

    assert set(found) == {Absent("driver")}
    assert len(node.helpers) == 1


@pytest.mark.parametrize("says", [{"code": 9}, {"code": 18}, told()])
def test_cards_that_were_there_make_it_a_failure_and_are_looked_for_again(node: Node, says: dict[str, Any]) -> None:
    node.ask()
    node.living()[0].says = says
    node.says = says
    gone = [node.ask() for _ in range(40)]
    node.says = WELL

    back = [node.ask() for _ in range(13)][-1]

    assert set(map(repr, gone)) == {repr(Answer(driver="580" if not says["code"] else "", code=says["code"] or 28))}
    assert isinstance(back, Answer)
    assert (back.code, len(back.cards)) == (0, 2)


# A new process may have more to say


def sick(node: Node, says: Mapping[str, Any]) -> Helper:
    """The first helper answered well once, and now says that."""
    node.ask()
    node.helpers[0].says = says
    node.says = None
    node.ask()
    return node.helpers[0]


SICK: dict[str, Mapping[str, Any]] = {
    "handle": told(well("0"), refused("1", 2)),
    "lost": told(well("0"), refused("1", 15), lost=["GPU-1"]),
    "unknown": told(well("0"), refused("1", 999)),
    "mismatch": told(well("0"), {**well("1"), "codes": {"power": 18}}),
    "uninitialised": told(well("0"), {**well("1"), "codes": {"power": 1}}),
    "broken": told(well("0"), broken={"1": 999}),
}


@pytest.mark.parametrize("case", sorted(set(SICK) - {"mismatch", "uninitialised"}))
def test_a_new_helper_takes_over_when_it_has_more_to_say(node: Node, case: str) -> None:
    first = sick(node, SICK[case])
    node.says = WELL

    found = [node.ask() for _ in range(3)][-1]

    assert isinstance(found, Answer)
    assert [bool(told.values) for told in found.cards] == [True, True]
    assert first.told_to_end
    assert len(node.living()) == 1


@pytest.mark.parametrize("case", SICK)
def test_a_new_helper_that_says_no_more_goes_and_others_try_more_and_more_rarely(node: Node, case: str) -> None:
    first = sick(node, SICK[case])
    node.says = told(well("0"), broken={"1": 999})
    starts = [node.now]

    for _ in range(400):
        count = len(node.helpers)
        assert isinstance(node.ask(), Answer)
        if len(node.helpers) > count:
            starts.append(node.now)
        assert len(node.living()) <= 2

    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert not first.told_to_end
    assert pauses[-2:] == [LONGEST_REPAIR] * 2
    assert pauses == sorted(pauses)


@pytest.mark.parametrize(
    "says",
    [
        WELL,
        told(well("0"), card("1", codes={"temperature": 3})),  # it knows nothing, and a new one would not either
        told(well("0"), {**well("1"), "codes": {"power": 999}}),  # one call fails, the others do not
    ],
)
def test_without_need_no_second_helper_is_started(node: Node, says: Told) -> None:
    node.says = says

    for _ in range(100):
        node.ask()

    assert len(node.helpers) == 1


def test_a_card_that_comes_back_by_itself_ends_the_second_helper(node: Node) -> None:
    first = sick(node, SICK["lost"])
    node.ask()
    first.says = WELL
    node.ask()

    node.ask()

    assert (len(node.helpers), first.told_to_end, node.helpers[1].told_to_end) == (2, False, True)


def test_a_second_helper_that_hangs_is_left_to_itself(node: Node) -> None:
    """It may hang in the very card that is broken; the first goes on with the others."""
    first = sick(node, SICK["lost"])

    found = [node.ask() for _ in range(40)]

    assert all(isinstance(answer, Answer) for answer in found)
    assert (first.told_to_end, node.helpers[1].told_to_end, node.helpers[1].killed) == (False, True, False)
    assert len(node.living()) == 2


@pytest.mark.parametrize("reason", ["age", "memory"])
def test_a_helper_is_renewed(node: Node, reason: str) -> None:
    node.ask()
    if reason == "memory":
        node.helpers[0].says = {**WELL, "resident": RENEW_BYTES}
        node.ask()
    else:
        node.now += RENEW_SECONDS

    found = [node.ask() for _ in range(3)]

    assert all(isinstance(answer, Answer) and answer.cards for answer in found)
    assert [helper.dead for helper in node.helpers] == [True, False]


def test_a_helper_is_not_renewed_by_one_that_knows_less(node: Node) -> None:
    node.ask()
    node.now += RENEW_SECONDS
    node.says = {"code": 18}

    found = [node.ask() for _ in range(30)]

    assert all(isinstance(answer, Answer) and answer.cards for answer in found)
    assert not node.helpers[0].told_to_end
    assert len(node.living()) <= 2


# Cards that a new process does not find


def lost_after(node: Node, *answers: Mapping[str, Any]) -> tuple[str, ...]:
    found: object = None
    node.ask()
    for says in answers:
        node.helpers[0].says = says
        found = node.ask()
    assert isinstance(found, Answer)
    return found.lost


@pytest.mark.parametrize(
    ("says", "lost"),
    [
        (told(well("0"), broken={"1": 15}), ("GPU-1",)),
        (told(well("0"), broken={"1": 999}), ("GPU-1",)),
        (told(well("0")), ("GPU-1",)),  # it is not even counted
        (told(well("0"), broken={"1": 4}), ()),  # it is there, but not for us
        (told(broken={"0": 999, "1": 999}), ()),  # none answers: it is our access
        (told(broken={"0": 999, "1": 15}), ("GPU-1",)),
        (told(refused("0"), refused("1")), ()),
        (WELL, ()),
    ],
)
def test_a_card_seen_before_and_not_found_is_lost(node: Node, says: Mapping[str, Any], lost: tuple[str, ...]) -> None:
    assert lost_after(node, says) == lost


def test_a_lost_card_is_lost_until_it_is_back(node: Node) -> None:
    gone = told(well("0"))
    node.ask()
    node.says = gone

    assert lost_after(node, gone, gone, gone) == ("GPU-1",)
    assert lost_after(node, WELL) == ()


def test_a_card_is_missed_for_a_day(node: Node) -> None:
    """Then it was taken away on purpose, and no new helper need look for it."""
    gone = told(well("0"))
    node.ask()
    node.says = gone
    assert lost_after(node, gone) == ("GPU-1",)
    node.now += FORGET_SECONDS

    assert lost_after(node, gone) == ()


def test_cards_that_are_gone_for_a_day_leave_a_machine_without_gpus(node: Node) -> None:
    node.ask()
    node.helpers[0].says = node.says = {"code": 9}
    failed = node.ask()
    node.now += FORGET_SECONDS

    assert (failed, node.ask()) == (Answer(code=9), Absent("driver"))


def test_a_card_that_others_have_moved_up_for_is_lost(node: Node) -> None:
    """Without card 0 the other one is number 0."""
    assert lost_after(node, told({**well("1"), "index": "0"})) == ("GPU-0",)


def test_an_instance_that_was_destroyed_is_not_lost(node: Node) -> None:
    node.says = told(card("0", "enabled", temperature=40), card("0:1", "instance", memory_used=7))

    assert lost_after(node, told(card("0", "enabled", temperature=40))) == ()


# The end


def test_closing_wakes_whoever_asks(node: Node) -> None:
    """The daemon ends while a poller waits for the driver."""
    node.driver = Nvml(600.0, node._start, lambda: node.now, lambda: False)
    node.says = None
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(node.ask()))
    asking.start()
    while not (node.helpers and node.helpers[0].requests):
        pass

    node.helpers[0].hangs = False
    node.driver.close()
    asking.join(30.0)

    assert [type(answer) for answer in found] == [Unanswered]
    assert node.helpers[0].dead
    assert isinstance(node.ask(), Unanswered)
    assert len(node.helpers) == 1


def test_closing_twice_or_before_anything_was_asked_does_nothing(node: Node) -> None:
    node.driver.close()
    node.driver.close()

    assert node.helpers == []


def test_a_helper_that_has_not_come_to_the_driver_is_killed_at_the_end(node: Node) -> None:
    helper = node.hang()
    helper.is_in("", began=0.0)

    node.driver.close()

    assert helper.killed


def test_descriptors_above_1023_are_no_trouble(node: Node) -> None:
    """The exporter keeps many open; select() would fail on them."""
    node.lowest_descriptor = 1100

    found = node.ask()

    output = node.helpers[0].stdout
    assert isinstance(found, Answer)
    assert output is not None
    assert output.fileno() >= 1100
