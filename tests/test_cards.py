"""GPU channels: each rule with a card that moves and a twin, one figure apart, that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from stallwatch import signals
from stallwatch.card import MIB
from stallwatch.cards import MOST_CARDS, MOST_RANKS_PER_CARD, Cards
from stallwatch.model import GpuState, Reading, Signal

STEP = 5.0
WINDOW = 60.0
IDLE, LIMIT = 122.0, 700.0
"""An H100: 122 W with a context, 152 W in a spin; with this limit work begins at 198 W."""

SPIN, WORK = 152.0, 256.0

NAMES: dict[str, Signal] = {
    "used": signals.GPU_MEMORY_USED,
    "util": signals.GPU_UTILIZATION,
    "memory_util": signals.GPU_MEMORY_UTILIZATION,
    "power": signals.GPU_POWER,
    "energy": signals.GPU_ENERGY,
    "limit": signals.GPU_POWER_LIMIT,
    "idle": signals.GPU_IDLE_POWER,
    "receive": signals.GPU_PCIE_RECEIVE,
    "transmit": signals.GPU_PCIE_TRANSMIT,
    "tensor": signals.GPU_TENSOR_ACTIVITY,
    "dram": signals.GPU_DRAM_ACTIVITY,
    "lost": signals.GPU_LOST,
    "unowned": signals.GPU_UNOWNED_MEMORY,
    "clock": signals.GPU_SM_CLOCK,
}


def card(gpu: str = "GPU-0", **figures: float | None) -> Iterator[Reading]:
    """What one card says at one look; None = asked for, and not readable."""
    for name, value in figures.items():
        signal = NAMES[name]
        yield signal.missing("not_supported", gpu) if value is None else signal.read(value, gpu)


def tie(rank: str = "TP0", gpu: str = "GPU-0", server: str = "s", pid: str = "7") -> Reading:
    return signals.RANK_INFO.read(1, server, rank, pid, gpu)


def held(mib: float | None, rank: str = "TP0", gpu: str = "GPU-0", server: str = "s") -> Reading:
    signal = signals.GPU_PROCESS_MEMORY
    if mib is None:
        return signal.missing("not_supported", gpu, server, rank)
    return signal.read(mib * MIB, gpu, server, rank)


@dataclass(slots=True)
class Node:
    """Cards, and what they said moved."""

    moves: list[tuple[str, str, float, str | None]] = field(default_factory=list)
    cards: Cards = field(init=False)
    at: float = -STEP
    may_rest: bool = True  # its servers are idle, or on their way and not silent

    def __post_init__(self) -> None:
        self.cards = Cards(
            lambda *move: self.moves.append(move), lambda server: WINDOW, lambda server, at: self.may_rest
        )

    def look(self, *readings: Reading, at: float | None = None, pause: float = 0.0) -> None:
        """One result, one interval after the last.  `pause`: how long we stood still ourselves until now."""
        self.at = self.at + STEP if at is None else at
        for reading in readings:
            self.cards.put(reading, self.at, STEP, self.at + pause)
        self.cards.settle(self.at)

    def looks(self, times: int, *readings: Reading) -> None:
        for _ in range(times):
            self.look(*readings)

    @property
    def moved(self) -> list[tuple[str, float]]:
        return [(channel, at) for _, channel, at, _ in self.moves]

    def channels(self, server: str = "s") -> dict[str, bool | None]:
        names = ("gpu_memory", "gpu_bus", "gpu_power", "gpu_utilization")
        return {name: self.cards.channel(server, name, self.at) for name in names}


def watched(**figures: float | None) -> Node:
    """A card that belongs to rank TP0 of server s alone, at its second look."""
    node = Node()
    node.looks(2, tie(), *card("GPU-0", **figures))
    return node


# --- gpu_memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [16.0, -16.0])
def test_memory_of_a_rank_that_came_or_went_by_16_mib_is_its_move(step: float) -> None:
    node, twin = Node(), Node()
    for each in (node, twin):
        each.look(held(1000))

    node.look(held(1000 + step))
    twin.look(held(1000 + step * 0.99))

    assert node.moves == [("s", "gpu_memory", 5.0, "TP0")]
    assert twin.moves == []


def test_memory_that_comes_in_small_steps_moves_within_one_window_only() -> None:
    node, twin = Node(), Node()
    for number in range(24):
        node.look(held(1000 + 2 * number))
        twin.look(held(1000 + 1 * number))

    assert node.moved == [("gpu_memory", 40.0), ("gpu_memory", 80.0)]
    assert twin.moved == []


def test_what_a_rank_holds_counts_on_a_card_of_two_tenants_and_the_used_memory_of_the_card_does_not() -> None:
    node, twin = Node(), Node()
    others = held(500, "TP0", server="other")
    node.look(held(1000), others, *card(used=2000 * MIB))
    twin.look(tie(), others, *card(used=2000 * MIB))

    node.look(held(2000), others, *card(used=3000 * MIB))
    twin.look(tie(), others, *card(used=3000 * MIB))

    assert node.moves == [("s", "gpu_memory", 5.0, "TP0")]
    assert node.channels()["gpu_memory"] is True
    assert twin.moves == []
    assert twin.channels()["gpu_memory"] is False


def test_used_memory_of_the_card_stands_in_for_a_rank_whose_own_is_not_readable() -> None:
    node, twin = Node(), Node()
    for used in (1000, 2000):
        node.look(held(None), *card(used=used * MIB))
        twin.look(held(700), *card(used=used * MIB))

    assert node.moves == [("s", "gpu_memory", 5.0, "TP0")]
    assert twin.moves == []
    assert node.channels()["gpu_memory"] is twin.channels()["gpu_memory"] is True


def test_memory_of_the_process_before_is_no_progress_of_the_rank() -> None:
    node, twin = Node(), Node()
    node.look(tie(pid="7"), held(70_000))
    twin.look(tie(pid="7"), held(70_000))

    node.look(tie(pid="8"), held(500))
    twin.look(tie(pid="7"), held(500))

    assert node.moves == []
    assert twin.moves == [("s", "gpu_memory", 5.0, "TP0")]


def test_two_processes_of_one_rank_are_no_new_process_at_every_look() -> None:
    node = Node()
    for number, pids in enumerate(("78", "78", "8", "89")):
        node.look(*(tie(pid=pid) for pid in pids), held(1000 + 20 * number))

    assert node.moved == [("gpu_memory", 5.0), ("gpu_memory", 10.0), ("gpu_memory", 15.0)]


def test_a_new_process_on_the_same_card_has_it_at_once() -> None:
    node = watched(util=0.0)
    node.look(tie(pid="8"), *card(util=0.0))

    assert node.channels()["gpu_utilization"] is True


# --- gpu_bus -----------------------------------------------------------------------------------------------


def test_a_gibibyte_over_the_bus_within_a_window_is_a_move_and_chatter_is_none() -> None:
    node, twin = Node(), Node()
    node.looks(20, tie(), *card(receive=12 * MIB, transmit=8 * MIB))
    twin.looks(200, tie(), *card(receive=12 * MIB, transmit=4 * MIB))

    assert node.moved == [("gpu_bus", 55.0)]
    assert twin.moved == []


def test_the_first_reading_of_the_bus_is_no_move_and_the_second_at_that_rate_is_one() -> None:
    node = Node()
    node.look(tie(), *card(receive=1024 * MIB))
    first = list(node.moves)

    node.look(tie(), *card(receive=1024 * MIB))

    assert first == []
    assert node.moves == [("s", "gpu_bus", 5.0, "TP0")]


def test_a_rate_says_nothing_about_the_time_in_which_nobody_read_it() -> None:
    """Chatter of 1 MiB/s would be a move after half an hour with a wedged driver."""
    node = watched(receive=MIB)

    node.look(tie(), *card(receive=MIB), at=2000.0)
    node.look(tie(), *card(receive=MIB))

    assert node.moves == []


# --- gpu_power ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("watts", "moved"), [(WORK, True), (200.0, True), (196.0, False), (SPIN, False)])
def test_mean_power_above_a_third_of_the_span_is_a_move(watts: float, moved: bool) -> None:
    """152 W is a spin on an H100; a healthy autotune was silent for hours at 256 W."""
    node = watched(power=watts, limit=LIMIT, idle=IDLE)

    assert node.moves == ([("s", "gpu_power", 5.0, "TP0")] if moved else [])
    assert node.channels()["gpu_power"] is True


def test_the_first_reading_of_power_is_no_move_and_none_can_be_read_from_it() -> None:
    node = Node()
    node.look(tie(), *card(power=WORK, limit=LIMIT, idle=IDLE))

    assert node.moves == []
    assert node.channels()["gpu_power"] is False


def test_power_is_the_mean_of_two_neighbours() -> None:
    node, twin = Node(), Node()
    for first, last in ((IDLE, 280.0), (IDLE, 260.0)):
        each = node if last == 280.0 else twin
        each.look(tie(), *card(power=first, limit=LIMIT, idle=IDLE))
        each.look(tie(), *card(power=last, limit=LIMIT, idle=IDLE))

    assert node.moved == [("gpu_power", 5.0)]
    assert twin.moved == []


def test_the_energy_counter_goes_before_the_gauge() -> None:
    """The gauge sees the last second only."""
    node, twin = Node(), Node()
    for number in range(3):
        node.look(tie(), *card(power=IDLE, energy=number * STEP * WORK, limit=LIMIT, idle=IDLE))
        twin.look(tie(), *card(power=WORK, energy=number * STEP * IDLE, limit=LIMIT, idle=IDLE))

    assert node.moved == [("gpu_power", 5.0), ("gpu_power", 10.0)]
    assert twin.moved == []


def test_a_gauge_read_between_two_looks_at_the_counter_moves_nothing() -> None:
    node = watched(idle=IDLE, limit=LIMIT)
    for energy in (0.0, STEP * WORK):
        node.look(tie(), *card(energy=energy, power=IDLE))
    node.looks(2, tie(), *card(power=IDLE))

    assert node.moved == [("gpu_power", 15.0)]


def test_an_energy_counter_that_falls_says_nothing_and_goes_on_from_there() -> None:
    node = Node()
    for energy in (1e9, 1e9 + STEP * IDLE, 0.0, STEP * IDLE):
        node.look(tie(), *card(energy=energy, limit=LIMIT, idle=IDLE))
        if energy == 0.0:
            assert node.channels()["gpu_power"] is False
    assert node.channels()["gpu_power"] is True
    assert node.moves == []

    node.look(tie(), *card(energy=2 * STEP * IDLE + STEP * WORK, limit=LIMIT, idle=IDLE))

    assert node.moved == [("gpu_power", 20.0)]


def test_energy_used_while_we_stood_still_is_spread_over_that_time() -> None:
    """5 s for us, 65 s for the card: 72 W above idle for that long would look like 940 W."""
    node, twin = Node(), Node()
    for each in (node, twin):
        each.look(tie(), *card(energy=0.0, limit=LIMIT, idle=IDLE))

    node.look(tie(), *card(energy=65 * IDLE, limit=LIMIT, idle=IDLE), pause=60.0)
    twin.look(tie(), *card(energy=65 * IDLE, limit=LIMIT, idle=IDLE))

    assert node.moves == []
    assert twin.moved == [("gpu_power", 5.0)]


@pytest.mark.parametrize("name", ["dram", "tensor"])
def test_an_activity_of_two_percent_is_a_move_even_at_idle_power(name: str) -> None:
    node = watched(power=IDLE, limit=LIMIT, idle=IDLE, **{name: 0.02})
    twin = watched(power=IDLE, limit=LIMIT, idle=IDLE, **{name: 0.019})

    assert node.moved == [("gpu_power", 5.0)]
    assert twin.moved == []


def test_an_activity_read_long_ago_moves_nothing_now() -> None:
    node = watched(dram=0.5)
    node.looks(2, tie(), *card(power=IDLE))

    assert node.moved == [("gpu_power", 5.0)]


def test_without_idle_power_only_the_activities_tell() -> None:
    """500 W may be idle: nobody learned it yet."""
    unlearned = watched(power=500.0, limit=LIMIT, idle=None)
    with_activity = watched(power=500.0, limit=LIMIT, dram=0.0)

    assert unlearned.moves == with_activity.moves == []
    assert unlearned.channels()["gpu_power"] is False
    assert with_activity.channels()["gpu_power"] is True


def test_idle_power_said_once_holds_and_one_that_is_not_learned_any_more_does_not() -> None:
    once, again = Node(), Node()
    for number in range(10):
        once.look(tie(), *card(power=WORK, limit=LIMIT), *(card(idle=IDLE) if number < 1 else ()))
        again.look(tie(), *card(power=WORK, limit=LIMIT), *(card(idle=IDLE) if number < 2 else ()))

    assert once.moved[-1] == ("gpu_power", 45.0)
    assert once.channels()["gpu_power"] is True
    assert again.moved[-1] == ("gpu_power", 20.0)
    assert again.channels()["gpu_power"] is False


def test_a_minute_of_hard_work_raises_what_counts_as_work_and_half_of_one_does_not() -> None:
    node, twin = Node(), Node()
    for each, times in ((node, 14), (twin, 7)):
        each.looks(times, tie(), *card(power=650.0, limit=LIMIT, idle=IDLE))
        each.looks(20, tie(), *card(power=WORK, limit=LIMIT, idle=IDLE))

    assert node.moved[-1][1] <= 14 * STEP
    assert twin.moved[-1][1] == twin.at


def test_without_a_limit_only_clear_work_shows_the_span() -> None:
    """Else the highest minute of a card that never worked is its idle power, and every watt more a move."""
    node, twin = Node(), Node()
    node.looks(14, tie(), *card(power=600.0, idle=IDLE))
    twin.looks(14, tie(), *card(power=IDLE, idle=IDLE))
    twin.looks(14, tie(), *card(power=SPIN, idle=IDLE))

    assert node.moved[-1] == ("gpu_power", node.at)
    assert twin.moves == []
    assert twin.channels()["gpu_power"] is False


def test_a_limit_read_once_in_a_while_is_still_the_limit() -> None:
    node = watched(power=IDLE, limit=LIMIT, idle=IDLE)
    node.looks(10, tie(), *card(power=WORK, idle=IDLE))

    assert node.moved[-1] == ("gpu_power", node.at)


def test_power_is_unreadable_after_three_gaps_and_a_move_before_is_no_move_again() -> None:
    node = watched(power=WORK, limit=LIMIT, idle=IDLE)
    node.looks(3, tie(), *card(idle=IDLE))
    assert node.channels()["gpu_power"] is True

    node.look(tie(), *card(idle=IDLE))

    assert node.channels()["gpu_power"] is False
    assert node.moved == [("gpu_power", 5.0)]


# --- gpu_utilization ---------------------------------------------------------------------------------------


def test_full_utilization_at_idle_power_is_ambiguous_only() -> None:
    spin = watched(util=1.0, memory_util=0.0, power=SPIN, limit=LIMIT, idle=IDLE)
    work = watched(util=1.0, memory_util=0.0, power=WORK, limit=LIMIT, idle=IDLE)

    assert spin.moves == [("s", "gpu_utilization", 5.0, "TP0")]
    assert work.moved == [("gpu_power", 5.0), ("gpu_utilization", 5.0)]


def test_a_mean_of_five_percent_is_a_move_and_one_blip_is_none() -> None:
    node, twin = Node(), Node()
    for util in (0.0, 0.10, 0.0):
        node.look(tie(), *card(util=util))
        twin.look(tie(), *card(util=util * 0.9))

    assert node.moved == [("gpu_utilization", 5.0), ("gpu_utilization", 10.0)]
    assert twin.moved == []


# --- whose card it is --------------------------------------------------------------------------------------

BUSY: dict[str, float] = {"used": 9e9, "util": 1.0, "power": WORK, "limit": LIMIT, "idle": IDLE, "receive": 1e10}


def test_without_a_server_a_card_moves_nothing_and_a_server_without_a_card_has_no_channel() -> None:
    node = Node()
    node.looks(3, *card("GPU-0", **BUSY), tie(gpu=""))

    assert node.moves == []
    assert set(node.channels().values()) == {None}


@pytest.mark.parametrize(
    "neighbour",
    [
        pytest.param(tie(server="other"), id="tied"),
        pytest.param(held(3, server="other"), id="holds memory"),
        pytest.param(held(None, server="other"), id="holds nobody knows how much"),
        pytest.param(signals.GPU_UNOWNED_MEMORY.read(20 * MIB, "GPU-0"), id="20 MiB of nobody"),
        pytest.param(signals.GPU_LOST.read(1, "GPU-0"), id="lost"),
        pytest.param(signals.GPU_LOST.missing("driver_unresponsive", "GPU-0"), id="driver does not answer"),
    ],
)
def test_a_card_that_is_not_ours_alone_is_unreadable_and_moves_nothing(neighbour: Reading) -> None:
    node = Node()
    for number in range(3):
        node.look(tie(), neighbour, *card("GPU-0", **{**BUSY, "used": 9e9 * number}))

    assert node.moves == []
    assert set(node.channels().values()) == {False}
    assert node.cards.at_rest("s", node.at) is None


@pytest.mark.parametrize(
    "neighbour",
    [
        pytest.param(tie("TP1"), id="another rank of ours"),
        pytest.param(held(0, server="other"), id="holds nothing"),
        pytest.param(signals.GPU_UNOWNED_MEMORY.read(15 * MIB, "GPU-0"), id="15 MiB of nobody"),
        pytest.param(signals.GPU_UNOWNED_MEMORY.missing("not_supported", "GPU-0"), id="never known what is unowned"),
        pytest.param(signals.GPU_PROCESS_MEMORY.missing("vanished", "GPU-0", "other", "TP0"), id="has just gone"),
        pytest.param(signals.RANK_INFO.missing("vanished", "other", "TP0", "9", "GPU-0"), id="no rank any more"),
        pytest.param(signals.GPU_LOST.read(0, "GPU-0"), id="not lost"),
    ],
)
def test_its_twin_is_ours_alone(neighbour: Reading) -> None:
    node = Node()
    for number in range(3):
        node.look(tie(), neighbour, *card("GPU-0", **{**BUSY, "used": 9e9 * number}))

    assert {channel for channel, _ in node.moved} == {"gpu_memory", "gpu_bus", "gpu_power", "gpu_utilization"}
    assert set(node.channels().values()) == {True}
    assert node.cards.at_rest("s", node.at) is False


def test_a_lost_card_takes_its_ranks_memory_with_it_and_gives_it_back_without_a_move() -> None:
    node = Node()
    node.look(held(70_000), *card(lost=0.0))
    node.look(held(0), *card(lost=1.0))
    assert node.channels()["gpu_memory"] is False

    node.look(held(70_000), *card(lost=0.0))
    assert node.channels()["gpu_memory"] is True
    assert node.moves == []

    node.look(held(70_100), *card(lost=0.0))
    assert node.moved == [("gpu_memory", 15.0)]


def test_memory_that_a_neighbour_gave_back_when_it_left_is_not_our_move() -> None:
    node = Node()
    for _ in range(2):
        node.look(tie(), held(1000, server="other"), *card(used=80_000 * MIB, util=1.0, power=WORK, idle=1, limit=9))
    node.cards.forget("other")

    node.looks(2, tie(), *card(used=79_000 * MIB, util=0.0, power=1, idle=1, limit=9))
    assert node.moves == []

    node.look(tie(), *card(used=78_000 * MIB))
    assert node.moved == [("gpu_memory", 20.0)]


def test_what_was_gathered_before_a_neighbour_came_is_forgotten() -> None:
    """Its memory and its traffic may still be in the first figures after it left."""
    node = watched(used=1000 * MIB, receive=100 * MIB)
    node.look(tie(), held(10, server="other"), *card(receive=100 * MIB))
    node.cards.forget("other")
    node.look(tie(), *card(util=0.0))

    node.look(tie(), *card(used=1100 * MIB, receive=100 * MIB))

    assert node.moves == []


def test_unowned_memory_that_cannot_be_read_any_more_is_still_there() -> None:
    node = watched(unowned=20 * MIB)
    node.looks(2, tie(), *card(unowned=None, util=1.0))

    assert node.moves == []
    assert node.channels()["gpu_utilization"] is False


def test_a_neighbour_that_is_read_no_more_has_left() -> None:
    node = Node()
    node.looks(2, tie(), tie(server="other"), *card(util=1.0))
    node.looks(5, tie(), *card(util=1.0))

    assert node.channels()["gpu_utilization"] is True
    assert node.moved == [("gpu_utilization", 30.0)]


def test_a_tie_said_once_holds_and_one_that_is_said_no_more_is_stale() -> None:
    once, twin = Node(), Node()
    once.look(tie())
    twin.looks(2, tie())
    for each in (once, twin):
        each.looks(6, *card(util=1.0))

    assert once.channels()["gpu_utilization"] is True
    assert set(twin.channels().values()) == {False}


def test_a_rank_on_another_card_after_its_restart_leaves_the_first_one() -> None:
    node = Node()
    node.look(tie(pid="7", gpu="GPU-0"))
    node.looks(3, tie(pid="8", gpu="GPU-1"), *card("GPU-0", util=1.0))
    assert node.moves == []
    assert node.channels()["gpu_utilization"] is False

    node.looks(2, tie(pid="8", gpu="GPU-1"), *card("GPU-1", util=1.0))

    assert node.moves == [("s", "gpu_utilization", 25.0, "TP0")]


def test_a_process_with_two_cards_has_both() -> None:
    node = Node()
    node.looks(2, tie(gpu="GPU-0"), tie(gpu="GPU-1"), *card("GPU-0", util=1.0), *card("GPU-1", util=1.0))

    assert [move[1] for move in node.moves] == ["gpu_utilization", "gpu_utilization"]


def test_a_mig_instance_is_a_card_like_any_other() -> None:
    node = Node()
    name = "MIG-6f2b1f6e-0000-5000-8000-000000000000"
    node.looks(2, held(1000, gpu=name), *card(name, tensor=0.3))

    assert node.moves == [("s", "gpu_power", 5.0, "TP0")]


def test_a_move_of_a_card_with_two_ranks_names_none_of_them() -> None:
    node = Node()
    node.looks(2, tie("TP0"), tie("TP1"), *card(util=1.0))

    assert node.moves == [("s", "gpu_utilization", 5.0, None)]


def test_a_strong_channel_needs_every_card_and_an_ambiguous_one_any() -> None:
    """Silence of seven cards proves nothing about the eighth; one spin is a spin."""
    node = Node()
    both = (tie("TP0", "GPU-0"), tie("TP1", "GPU-1"))
    figures = {"used": 1e9, "util": 0.0, "receive": 0.0, "dram": 0.0}
    node.looks(2, *both, *card("GPU-0", **figures))
    partly = node.channels()

    node.looks(2, *both, *card("GPU-0", **figures), *card("GPU-1", **figures))

    assert partly == {"gpu_memory": False, "gpu_bus": False, "gpu_power": False, "gpu_utilization": True}
    assert set(node.channels().values()) == {True}


def test_what_cannot_be_read_of_a_rank_is_what_any_card_of_it_does_not_say() -> None:
    node = Node()
    figures = {"used": 1e9, "util": 0.0, "receive": 0.0, "dram": 0.0}
    ties = (tie("TP0", "GPU-0"), tie("TP1", "GPU-1"), tie("TP1", "GPU-2"))
    node.looks(2, *ties, *(reading for gpu in ("GPU-0", "GPU-1") for reading in card(gpu, **figures)))
    without = node.cards.unread("s", node.at)

    node.looks(2, *ties, *card("GPU-2", **figures), held(3, "TP0", "GPU-1", server="other"))
    shared = node.cards.unread("s", node.at)

    assert without == {"TP0": frozenset(), "TP1": frozenset(("gpu_memory", "gpu_bus", "gpu_power"))}
    assert shared["TP1"] == without["TP1"], "somebody else is on one of its cards"
    assert node.cards.unread("other", node.at) == {"TP0": frozenset(("gpu_bus", "gpu_power"))}


def test_figures_and_ties_of_different_collectors_come_together() -> None:
    node = Node()
    for number in range(4):
        node.look(tie(), at=10.0 * number)
        node.look(*card(util=0.5), at=10.0 * number + 1)

    assert node.moved == [("gpu_utilization", 11.0), ("gpu_utilization", 21.0), ("gpu_utilization", 31.0)]


def test_a_server_that_is_forgotten_has_no_card() -> None:
    node = watched(util=1.0)
    node.cards.forget("s")
    node.looks(2, *card(util=1.0))

    assert set(node.channels().values()) == {None}
    assert node.moved == [("gpu_utilization", 5.0)]


def test_a_server_that_is_forgotten_and_comes_again_begins_anew() -> None:
    node = watched(used=70_000 * MIB)
    node.cards.forget("s")

    node.look(tie(pid="8"), *card(used=500 * MIB))

    assert node.moves == []


def test_what_was_read_together_with_a_new_start_is_of_that_start() -> None:
    """The reading that tells of a new start may come after those of its ranks, and rank_info only once."""
    node, twin = Node(), Node()
    for each in (node, twin):
        each.looks(2, tie(pid="7"), tie("TP1", "GPU-1", pid="8"), held(70_000), *card(used=70_000 * MIB, util=0.0))
        for reading in (tie(pid="9"), held(500), *card(used=500 * MIB, util=0.0)):
            each.cards.put(reading, 10.0, STEP, 10.0)
    node.cards.forget("s")
    for each in (node, twin):
        each.cards.settle(10.0)
        each.looks(7, *card(used=500 * MIB, util=0.0))

    assert node.moves == []
    assert node.channels()["gpu_utilization"] is True
    assert twin.channels()["gpu_utilization"] is False


@pytest.mark.parametrize(
    ("change", "channel", "before", "after"),
    [
        pytest.param(
            lambda node: node.cards.put(tie(server="other"), node.at, STEP, node.at), "gpu_bus", True, False, id="put"
        ),
        pytest.param(lambda node: node.cards.forget("other"), "gpu_utilization", False, True, id="over"),
        pytest.param(
            lambda node: [node.cards.recall(words, IDLE) for words in node.cards.wanted()],
            "gpu_power",
            False,
            True,
            id="kept",
        ),
    ],
)
def test_a_change_is_seen_at_the_very_moment_at_which_was_asked_before(
    change: Callable[[Node], object], channel: str, before: bool, after: bool
) -> None:
    """An answer is kept for as long as nothing is told."""
    node = watched(util=0.5, power=WORK, limit=LIMIT, receive=1.0, transmit=1.0)
    if channel == "gpu_utilization":
        node.look(tie(server="other"), at=node.at)
    assert node.channels()[channel] is before

    change(node)

    assert node.channels()[channel] is after


def test_a_settling_is_seen_at_the_very_moment_at_which_was_asked_before() -> None:
    """What a look at the power says is known when it is settled."""
    node = Node()
    node.look(tie(), *card(power=WORK, limit=LIMIT, idle=IDLE))
    for reading in card(power=WORK):
        node.cards.put(reading, 5.0, STEP, 5.0)
    node.at = 5.0
    assert node.channels()["gpu_power"] is False

    node.cards.settle(5.0)

    assert node.channels()["gpu_power"] is True


# --- at rest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        pytest.param({"util": 0.04, "power": IDLE, "idle": IDLE, "limit": LIMIT}, True, id="rest"),
        pytest.param({"util": 0.04}, True, id="rest, power unknown"),
        pytest.param({"util": 0.04, "power": WORK, "idle": IDLE, "limit": LIMIT}, False, id="power of work"),
        pytest.param({"util": 0.04, "dram": 0.1}, False, id="memory interface busy"),
        pytest.param({"util": 1, "memory_util": 0.01, "power": SPIN, "idle": IDLE, "limit": LIMIT}, True, id="spin"),
        pytest.param({"util": 1, "power": SPIN, "idle": IDLE, "limit": LIMIT}, True, id="spin, memory use unknown"),
        pytest.param({"util": 1, "memory_util": 0.02, "power": SPIN, "idle": IDLE, "limit": LIMIT}, False, id="copies"),
        pytest.param({"util": 1, "memory_util": 0.0, "power": WORK, "idle": IDLE, "limit": LIMIT}, False, id="works"),
        pytest.param({"util": 1, "memory_util": 0.0, "power": SPIN}, None, id="full, idle power unknown"),
        pytest.param({"util": 0.5, "memory_util": 0.0, "power": SPIN, "idle": IDLE, "limit": LIMIT}, False, id="half"),
        pytest.param({"util": None, "power": IDLE, "idle": IDLE, "limit": LIMIT}, None, id="unreadable"),
    ],
)
def test_at_rest(figures: dict[str, float | None], expected: bool | None) -> None:
    assert watched(**figures).cards.at_rest("s", STEP) is expected


def test_a_server_rests_when_all_its_cards_do() -> None:
    node = Node()
    both = (tie("TP0", "GPU-0"), tie("TP1", "GPU-1"))
    node.look(*both, *card("GPU-0", util=0.0))
    assert node.cards.at_rest("s", node.at) is None

    node.look(*both, *card("GPU-0", util=0.0), *card("GPU-1", util=0.0))
    assert node.cards.at_rest("s", node.at) is True

    node.look(*both, *card("GPU-0", util=0.0), *card("GPU-1", util=0.6))
    assert node.cards.at_rest("s", node.at) is False


def test_one_look_without_a_kernel_between_two_with_is_no_rest() -> None:
    node = watched(util=0.6)
    node.look(tie(), *card(util=0.0))
    assert node.cards.at_rest("s", node.at) is False

    node.looks(11, tie(), *card(util=0.0))
    assert node.cards.at_rest("s", node.at) is False

    node.look(tie(), *card(util=0.0))
    assert node.cards.at_rest("s", node.at) is True


def test_no_card_and_a_stale_one_are_not_known_to_rest() -> None:
    node = watched(util=0.0)
    node.looks(4, tie())

    assert node.cards.at_rest("s", node.at) is None
    assert node.cards.at_rest("nobody", node.at) is None


# --- learned idle power ------------------------------------------------------------------------------------

REST: dict[str, float | None] = {"util": 0.0, "memory_util": 0.0, "power": IDLE, "limit": LIMIT, "receive": MIB}
LEARNING = 7
"""Looks: one that begins the rest, and 30 s."""


def said_of(gpu: str = "GPU-0", driver: str = "580.95", mig: str = "") -> Reading:
    return signals.GPU_INFO.read(1, gpu, "3", "NVIDIA H100", "9.0", driver, "0000:10:00.0", mig)


def rested(looks: int = LEARNING, /, **figures: float | None) -> Node:
    node = Node()
    node.looks(looks, tie(), held(70_000), *card("GPU-0", **(REST | figures)))
    return node


def learned(node: Node) -> dict[str, float]:
    return {reading.labels[0]: reading.value or 0.0 for reading in node.cards.learned(node.at)}


def test_thirty_seconds_at_rest_teach_what_a_card_takes() -> None:
    assert learned(rested()) == {"GPU-0": IDLE}
    assert learned(rested(LEARNING - 1)) == {}


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param({"util": 0.01}, id="used"),
        pytest.param({"util": None}, id="not known whether it is used"),
        pytest.param({"memory_util": 0.01}, id="its memory used"),
        pytest.param({"receive": 20.0 * MIB}, id="the bus used"),
        pytest.param({"dram": 0.03}, id="its memory interface used"),
        pytest.param({"tensor": 0.03}, id="its tensor cores used"),
        pytest.param({"power": None}, id="power not known"),
        pytest.param({"unowned": 20.0 * MIB}, id="somebody unknown is on it"),
        pytest.param({"lost": 1.0}, id="lost"),
    ],
)
def test_a_card_that_is_not_known_to_rest_teaches_nothing(figures: dict[str, float | None]) -> None:
    assert learned(rested(30, **figures)) == {}


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param({"memory_util": None}, id="use of its memory not known"),
        pytest.param({"receive": None}, id="the bus not known"),
        pytest.param({"used": None}, id="its memory not known"),
        pytest.param({"receive": 15.0 * MIB}, id="chatter"),
        pytest.param({"dram": 0.01}, id="next to nothing"),
        pytest.param({"unowned": 15.0 * MIB}, id="15 MiB of nobody"),
    ],
)
def test_a_condition_on_what_cannot_be_read_is_left_out(figures: dict[str, float | None]) -> None:
    assert learned(rested(**figures)) == {"GPU-0": IDLE}


def test_a_silent_server_teaches_nothing() -> None:
    node, twin = Node(may_rest=False), Node(may_rest=True)
    for each in (node, twin):
        each.looks(30, tie(), held(70_000), *card("GPU-0", **REST))

    assert (learned(node), learned(twin)) == ({}, {"GPU-0": IDLE})


def test_a_card_on_which_nobody_holds_anything_teaches_nothing() -> None:
    """Without a context it takes 50 W less."""
    empty, unknown = Node(), Node()
    empty.looks(LEARNING, tie(), held(0), *card("GPU-0", used=2 * MIB, **REST))
    unknown.looks(LEARNING, tie(), held(None), *card("GPU-0", used=None, **REST))

    assert (learned(empty), learned(unknown)) == ({}, {"GPU-0": IDLE})


def test_a_card_of_two_servers_teaches_nothing() -> None:
    node = Node()
    node.looks(30, tie(), held(70_000), held(3, server="other"), *card("GPU-0", **REST))

    assert learned(node) == {}


def test_thirty_seconds_are_without_a_break() -> None:
    node = rested(LEARNING - 1)
    node.look(tie(), held(70_000), *card("GPU-0", **(REST | {"util": 0.2})))
    node.looks(6, tie(), held(70_000), *card("GPU-0", **REST))
    assert learned(node) == {}

    node.look(tie(), held(70_000), *card("GPU-0", **REST))
    assert learned(node) == {"GPU-0": IDLE}


def test_power_is_what_the_energy_counter_says() -> None:
    node = Node()
    for number in range(LEARNING):
        node.look(tie(), held(70_000), *card("GPU-0", energy=1e6 + 130.0 * STEP * number, **(REST | {"power": 500.0})))

    assert learned(node) == {"GPU-0": 130.0}


def test_idle_power_is_that_of_the_driver_and_of_the_clock() -> None:
    node = Node()
    node.looks(LEARNING, tie(), held(70_000), said_of(), *card("GPU-0", clock=1_980e6, **REST))
    assert learned(node) == {"GPU-0": IDLE}

    node.looks(2, tie(), held(70_000), said_of(), *card("GPU-0", clock=1_755e6, **REST))
    assert learned(node) == {"GPU-0": IDLE}
    node.looks(2, tie(), held(70_000), said_of(), *card("GPU-0", clock=345e6, **(REST | {"power": 72.0})))
    assert learned(node) == {}
    node.looks(2, tie(), held(70_000), said_of(driver="610.57"), *card("GPU-0", clock=1_980e6, **REST))
    assert learned(node) == {}
    node.looks(1, tie(), held(70_000), said_of(), *card("GPU-0", clock=1_980e6, **REST))
    assert learned(node) == {"GPU-0": IDLE}


def test_a_clock_that_cannot_be_read_at_one_look_is_still_the_clock() -> None:
    node = Node()
    node.looks(LEARNING, tie(), held(70_000), said_of(), *card("GPU-0", clock=1_980e6, **REST))
    node.look(tie(), held(70_000), said_of(), *card("GPU-0", clock=None, **REST))

    assert learned(node) == {"GPU-0": IDLE}


def test_learned_idle_power_makes_power_readable_and_work_a_move() -> None:
    node = rested()
    assert node.channels()["gpu_power"] is True
    node.moves.clear()

    node.looks(2, tie(), held(70_000), *card("GPU-0", **(REST | {"power": SPIN, "util": 1.0})))
    assert [channel for channel, _ in node.moved if channel == "gpu_power"] == []
    node.looks(2, tie(), held(70_000), *card("GPU-0", **(REST | {"power": WORK, "util": 1.0})))
    assert [at for channel, at in node.moved if channel == "gpu_power"] == [node.at - STEP, node.at]


def test_idle_power_that_is_said_counts_before_what_was_learned() -> None:
    node = rested()
    node.look(tie(), held(70_000), *card("GPU-0", **REST, idle=90.0))

    (state,) = node.cards.of_ranks("s", node.at)["TP0"]
    assert state.idle_power_watts == 90.0
    assert learned(node) == {}


def test_idle_power_of_a_card_that_is_read_no_more_is_not_shown() -> None:
    node = rested()
    node.looks(4, tie())

    assert learned(node) == {}


def test_what_was_learned_is_put_back_under_the_same_words() -> None:
    node, after = rested(), Node()
    node.looks(14, tie(), held(70_000), *card("GPU-0", **(REST | {"power": 600.0, "util": 1.0})))
    kept = dict(node.cards.kept())
    assert kept == {("idle", "GPU-0", "", -1): IDLE, ("work", "GPU-0"): 600.0}

    after.look(tie(), held(70_000), *card("GPU-0", **REST))
    for words in list(after.cards.wanted()):
        after.cards.recall(words, kept[words])

    assert learned(after) == {"GPU-0": IDLE}
    assert dict(after.cards.kept()) == kept
    assert list(after.cards.wanted()) == [("work", "GPU-0")]


# --- spins -------------------------------------------------------------------------------------------------

SPINNING: dict[str, float | None] = {"util": 1.0, "memory_util": 0.0, "power": SPIN, "limit": LIMIT, "idle": IDLE}


def spun(looks: int = 14, /, **figures: float | None) -> Node:
    node = Node()
    node.looks(looks, tie(), held(70_000), *card("GPU-0", **(SPINNING | figures)))
    return node


def spins(node: Node) -> list[tuple[str, float, bool]]:
    return [(spin.rank, spin.age, spin.is_proven) for spin in node.cards.spins("s", node.at)]


def test_a_card_that_is_always_used_at_idle_power_spins() -> None:
    assert spins(spun()) == [("TP0", 65.0, True)]
    assert spins(spun(2)) == [("TP0", 5.0, True)]
    assert spins(spun(1)) == [("TP0", 0.0, False)]


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param({"util": 0.94}, id="not always used"),
        pytest.param({"memory_util": 0.02}, id="its memory used"),
        pytest.param({"power": WORK}, id="power of work"),
        pytest.param({"dram": 0.03}, id="memory interface works"),
        pytest.param({"util": None}, id="not known whether it is used"),
        pytest.param({"unowned": 20.0 * MIB}, id="not ours alone"),
        pytest.param({"lost": 1.0}, id="lost"),
    ],
)
def test_what_differs_in_one_figure_is_no_spin(figures: dict[str, float | None]) -> None:
    assert spins(spun(30, **figures)) == []


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param({"memory_util": None}, id="use of its memory not known"),
        pytest.param({"idle": None}, id="idle power not known"),
        pytest.param({"power": None}, id="power not known"),
        pytest.param({"limit": None}, id="not known what work takes"),
    ],
)
def test_a_spin_of_which_too_little_is_read_is_not_proven(figures: dict[str, float | None]) -> None:
    assert spins(spun(**figures)) == [("TP0", 65.0, False)]


def test_a_look_that_fails_ends_no_spin_and_one_that_shows_work_does() -> None:
    node, twin = spun(), spun()
    node.look(tie(), held(70_000), *card("GPU-0", util=None, memory_util=None, power=None))
    node.look(tie(), held(70_000), *card("GPU-0", **SPINNING))
    twin.look(tie(), held(70_000), *card("GPU-0", **(SPINNING | {"util": 0.3})))
    twin.look(tie(), held(70_000), *card("GPU-0", **SPINNING))

    assert spins(node) == [("TP0", 75.0, True)]
    assert spins(twin) == [("TP0", 0.0, True)]


def test_a_spin_that_is_read_no_more_is_none() -> None:
    node = spun()
    node.looks(4, tie(), held(70_000))

    assert spins(node) == []


def test_one_rank_spins_and_its_siblings_rest() -> None:
    node = Node()
    for _ in range(14):
        node.look(
            tie("TP0"), tie("TP1", "GPU-1"), *card("GPU-0", **SPINNING), *card("GPU-1", **(SPINNING | {"util": 0.0}))
        )

    assert spins(node) == [("TP0", 65.0, True)]
    assert node.cards.works("s", node.at) is False


def test_a_sibling_that_works_a_little_is_seen() -> None:
    """Small kernels of an autotune: neither rest nor a spin."""
    node, twin = Node(), Node()
    for number in range(40):
        for each, util in ((node, 0.3 if number > 30 else 0.0), (twin, 0.3 if number < 20 else 0.0)):
            each.look(
                tie("TP0"),
                tie("TP1", "GPU-1"),
                *card("GPU-0", **SPINNING),
                *card("GPU-1", **(SPINNING | {"util": util})),
            )

    assert node.cards.works("s", node.at) is True
    assert twin.cards.works("s", twin.at) is False


def test_an_empty_card_that_stands_at_full_use_neither_spins_nor_moves() -> None:
    latched = Node()
    latched.looks(30, tie(), held(0), *card("GPU-0", used=600 * MIB, **SPINNING))
    nobody = Node()
    nobody.looks(30, tie(), *card("GPU-0", used=2 * MIB, **SPINNING))
    for node in (latched, nobody):
        assert spins(node) == []
        assert "gpu_utilization" not in {channel for channel, _ in node.moved}
        assert node.cards.at_rest("s", node.at) is True

    twin = spun(30, used=600.0 * MIB)
    assert len(spins(twin)) == 1
    assert "gpu_utilization" in {channel for channel, _ in twin.moved}


def test_a_spin_of_another_process_is_another_spin() -> None:
    node = spun()
    node.look(tie(), held(70_000), held(5, server="other"), *card("GPU-0", **SPINNING))
    node.cards.forget("other")
    node.looks(5, tie(), held(70_000), *card("GPU-0", **SPINNING))

    assert spins(node) == [("TP0", 20.0, True)]


# --- lost cards, a driver that hangs, divided cards ----------------------------------------------------------


def test_the_ranks_that_were_on_a_lost_card_are_told_and_since_when() -> None:
    node = Node()
    node.looks(2, held(70_000), *card("GPU-0", lost=0.0))
    assert node.cards.lost("s", node.at) == ()

    node.look(signals.GPU_PROCESS_MEMORY.missing("gpu_lost", "GPU-0", "s", "TP0"), *card("GPU-0", lost=1.0))
    node.looks(20, *card("GPU-0", lost=1.0))
    assert node.cards.lost("s", node.at) == ((100.0, "TP0"),)
    assert node.cards.lost("other", node.at) == ()

    node.look(*card("GPU-0", lost=0.0))
    assert node.cards.lost("s", node.at) == ()


def test_a_card_that_is_lost_at_the_first_look_was_used_by_who_is_said_to_be_on_it() -> None:
    node, twin = Node(), Node()
    node.look(tie(), *card(lost=1.0))
    twin.look(*card(lost=1.0))
    twin.look(tie(server="other"), *card(lost=1.0))

    assert node.cards.lost("s", node.at) == ((0.0, "TP0"),)
    assert twin.cards.lost("s", twin.at) == ()


def test_who_left_a_card_before_it_was_lost_did_not_lose_it() -> None:
    node = Node()
    node.looks(2, tie(), held(70_000), *card("GPU-0", lost=0.0))
    node.looks(6, *card("GPU-0", lost=0.0))
    node.look(*card("GPU-0", lost=1.0))

    assert node.cards.lost("s", node.at) == ()


def test_another_start_of_the_server_lost_nothing() -> None:
    node = Node()
    node.looks(2, tie(), *card("GPU-0", lost=0.0))
    node.look(*card("GPU-0", lost=1.0))
    node.cards.forget("s")
    node.look(tie(gpu="GPU-1"), *card("GPU-0", lost=1.0), *card("GPU-1", lost=0.0))

    assert node.cards.lost("s", node.at) == ()


def test_what_cannot_be_read_is_not_lost() -> None:
    node = Node()
    node.looks(2, tie(), *card("GPU-0", lost=0.0))
    node.looks(5, tie(), *card("GPU-0", lost=None, util=None))

    assert node.cards.lost("s", node.at) == ()


def unanswered(gpu: str = "GPU-0") -> list[Reading]:
    return [signals.GPU_UTILIZATION.missing("driver_unresponsive", gpu), signals.GPU_LOST.missing("error", gpu)]


def test_a_driver_that_answers_for_no_figure_of_a_card_for_a_window_hangs() -> None:
    node, twin = Node(), Node()
    for each in (node, twin):
        each.looks(2, tie(), *card("GPU-0", util=0.0, lost=0.0))
    node.looks(13, tie(), *unanswered())
    twin.looks(13, tie(), *unanswered(), *card("GPU-0", power=IDLE))

    assert node.cards.driver_hangs("s", node.at) is True
    assert node.cards.driver_hangs("other", node.at) is False
    assert twin.cards.driver_hangs("s", twin.at) is False
    node.look(tie(), *card("GPU-0", util=0.0, lost=0.0))
    assert node.cards.driver_hangs("s", node.at) is False


def test_a_driver_that_answers_for_one_card_and_not_for_another_hangs() -> None:
    node, twin = Node(), Node()
    ties = (tie("TP0", "GPU-0"), tie("TP1", "GPU-1"))
    for each in (node, twin):
        each.look(*ties, *card("GPU-0", util=0.0), *card("GPU-1", util=0.0))
    node.looks(14, *ties, *card("GPU-0", util=0.0), *unanswered("GPU-1"))
    twin.looks(14, *ties, *card("GPU-0", util=0.0), *unanswered("GPU-2"))

    assert node.cards.driver_hangs("s", node.at) is True
    assert twin.cards.driver_hangs("s", twin.at) is False


def test_a_driver_that_is_not_asked_any_more_does_not_hang() -> None:
    node = Node()
    node.look(tie(), *card(util=0.0))
    node.looks(14, tie(), *unanswered())
    node.looks(4, tie())

    assert node.cards.driver_hangs("s", node.at) is False


def test_a_driver_that_hangs_for_less_than_a_window_does_not_hang() -> None:
    node = Node()
    node.look(tie(), *card("GPU-0", util=0.0))
    node.looks(12, tie(), *unanswered())

    assert node.cards.driver_hangs("s", node.at) is False


@pytest.mark.parametrize(("seconds", "hangs"), [(60.0, True), (59.0, False), (0.0, False)])
def test_while_no_card_is_known_the_call_in_flight_tells(seconds: float, hangs: bool) -> None:
    node = Node()
    node.cards.call.put(seconds, None, 5.0, STEP, 5.0)

    assert node.cards.driver_hangs("s", 5.0) is hangs
    assert node.cards.driver_hangs("s", 50.0) is False


def test_a_call_in_flight_is_no_matter_to_a_server_whose_cards_are_read() -> None:
    node = watched(util=0.0)
    node.cards.call.put(600.0, None, node.at, STEP, node.at)

    assert node.cards.driver_hangs("s", node.at) is False


def test_a_divided_card_is_no_card_of_anybody_and_its_instances_are() -> None:
    node, whole = Node(), Node()
    instance = "MIG-6f2b1f6e-0000-5000-8000-000000000000"
    for each, mig in ((node, "enabled"), (whole, "disabled")):
        ties = (tie(), tie(gpu=instance), held(1000, gpu=instance))
        each.looks(14, said_of(mig=mig), *ties, *card("GPU-0", **SPINNING), *card(instance, tensor=0.0))

    assert spins(node) == []
    assert "gpu_utilization" not in {channel for channel, _ in node.moved}
    assert len(spins(whole)) == 1


# --- bounds ------------------------------------------------------------------------------------------------


def test_cards_are_bounded_and_new_ones_take_the_place_of_those_that_went() -> None:
    node = Node()
    node.look(tie(server="old"))
    node.look(*(reading for number in range(MOST_CARDS + 50) for reading in card(f"GPU-{number}", util=0.0)))
    node.looks(2, tie(gpu="GPU-new"), *card("GPU-new", util=1.0))
    assert len(node.cards) == MOST_CARDS
    assert set(node.channels().values()) == {None}

    node.looks(3)
    node.looks(2, tie(gpu="GPU-new"), *card("GPU-new", util=1.0))

    assert len(node.cards) == 1
    assert node.moved == [("gpu_utilization", node.at)]
    assert set(node.channels("old").values()) == {None}


def test_ranks_of_a_card_are_bounded_too() -> None:
    node = Node()
    for _ in range(2):
        node.look(*(held(1, f"TP{number}") for number in range(MOST_RANKS_PER_CARD)), held(1, "DP0"))
    node.look(held(100, "DP0"), held(100, "TP0"))

    assert [rank for *_, rank in node.moves] == ["TP0"]


def test_memory_per_series_does_not_grow_with_time() -> None:
    """A window of looks is kept, and a minute of sums of energy."""
    node = Node()
    sizes = []
    for number in range(2000):
        node.look(
            tie(), held(1000), *card("GPU-0", used=1e9, receive=MIB, util=0.5, power=IDLE, idle=IDLE, limit=LIMIT)
        )
        if number in (100, 1999):
            found = node.cards._cards["GPU-0"]
            tracks = [found._bus, *(figure.track for figure in (*found.figures.values(), *found.held.values()))]
            sizes.append((len(found.power._sums), [len(track.samples) for track in tracks]))
            node.moves.clear()

    assert sizes[0] == sizes[1]


def test_readings_that_are_not_about_cards_are_ignored() -> None:
    node = Node()
    node.looks(
        2, signals.CPU_SECONDS.read(1.0, "s", "TP0"), Signal("gpu_temperature_celsius", "", ("gpu",)).read(1, "g")
    )

    assert len(node.cards) == 0
    assert set(node.channels().values()) == {None}


# --- what a person is shown --------------------------------------------------------------------------------


def info(gpu: str, index: str) -> Reading:
    return signals.GPU_INFO.read(1, gpu, index, "NVIDIA H100 80GB HBM3", "9.0", "550.90", "0000:10:00.0", "")


def test_a_rank_is_shown_its_card_and_what_is_not_read_is_not_known() -> None:
    node = Node()
    figures = card("GPU-1", used=77e9, util=0.0, power=SPIN, idle=IDLE)
    node.looks(2, info("GPU-1", "1"), held(1000, "TP1", "GPU-1"), tie("TP0"), *figures)

    assert node.cards.of_ranks("s", node.at) == {
        "TP0": (GpuState("GPU-0"),),
        "TP1": (GpuState("GPU-1", "1", 1000 * MIB, 77e9, 0.0, SPIN, IDLE),),
    }
    assert node.cards.of_ranks("other", node.at) == {}


def test_a_card_that_does_not_answer_any_more_keeps_its_index_and_loses_its_figures() -> None:
    node = Node()
    for value in (1e9, None):
        util = None if value is None else 0.0
        node.looks(2, info("GPU-0", "3"), tie(), *card("GPU-0", used=value, util=util, power=value))

    assert node.cards.of_ranks("s", node.at) == {"TP0": (GpuState("GPU-0", "3"),)}


def test_a_rank_that_left_its_card_is_not_shown_on_it() -> None:
    node = Node()
    node.looks(2, held(1000))
    node.looks(20, *card("GPU-0", used=1e9))

    assert node.cards.of_ranks("s", node.at) == {}
