from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stallwatch.sources.gpus.xid import CAUSE_SECONDS, MOST_REMEMBERED, REPEAT_SECONDS, Faults, Lost, Xid, normalised

LINES = Path(__file__).with_name("xid_lines.txt")
AT = 1_700_000_000.0
MESSAGE = "NVRM: Xid (PCI:0000:61:00): {code}, pid={pid}, name=python3, Ch {channel}"


def known() -> Iterator[tuple[str, str]]:
    """Each message of the file, and what it means."""
    message: list[str] = []
    for line in LINES.read_text().splitlines():
        if line.startswith("= "):
            yield "\n".join(message), line.removeprefix("= ")
            message = []
        elif line and not line.startswith("#"):
            message.append(line.strip())


KNOWN = list(known())


def meaning(fault: Xid | Lost) -> str:
    if isinstance(fault, Lost):
        return f"lost {fault.pci}"
    return f"xid {fault.pci} {fault.code} {fault.pid or '-'}"


def faults(*messages: tuple[float, str]) -> list[Xid | Lost]:
    return list(Faults().of(messages))


@pytest.mark.parametrize(("message", "expected"), KNOWN)
def test_a_message_means_what_the_file_says(message: str, expected: str) -> None:
    found = faults((AT, message))

    assert (", ".join(map(meaning, found)) or "-") == expected
    assert [fault.at for fault in found] == [AT] * len(found)


@pytest.mark.parametrize(("message", "expected"), [case for case in KNOWN if case[0].startswith("NVRM")])
def test_lines_of_the_driver_are_understood_as_messages_of_their_own(message: str, expected: str) -> None:
    """Kernels and drivers differ in whether a printed text of several lines is one record."""
    found = faults(*((AT, line) for line in message.split("\n")))

    assert (", ".join(map(meaning, found)) or "-") == expected


def test_two_cards_that_go_at_once_are_told_apart() -> None:
    found = faults(
        (AT, "NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330)"),
        (AT, "NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:2330)"),
        (AT, "pcieport 0000:16:01.0: pciehp: Slot(2): Link Down"),
        (AT, "NVRM: installed in this system has fallen off the bus and is not responding to commands."),
        (AT, "NVRM: installed in this system has fallen off the bus and is not responding to commands."),
    )

    assert found == [Lost("0000:18:00.0", AT), Lost("0000:b3:00.0", AT)]


def test_a_card_that_was_named_long_before_is_not_the_one_that_went() -> None:
    other = [(AT, f"NVRM: line {number}") for number in range(4)]

    found = faults((AT, "NVRM: The NVIDIA GPU 0000:18:00.0"), *other, (AT, "NVRM: has fallen off the bus"))

    assert found == []


def test_the_lines_of_all_channels_are_one_fault() -> None:
    lines = [(AT + n / 100, MESSAGE.format(code=45, pid=7, channel=f"{n:08x}")) for n in range(40)]

    assert faults(*lines) == [Xid("0000:61:00.0", 45, 7, AT)]


@pytest.mark.parametrize(
    "other",
    [
        (AT + 1, MESSAGE.format(code=45, pid=8, channel=1)),
        (AT + 1, MESSAGE.format(code=43, pid=7, channel=1)),
        (AT + 1, MESSAGE.format(code=45, pid=7, channel=1).replace("61:00", "62:00")),
        (AT + REPEAT_SECONDS, MESSAGE.format(code=45, pid=7, channel=1)),
        (AT - 1, MESSAGE.format(code=45, pid=7, channel=1)),  # the clock was set back
    ],
    ids=["process", "code", "card", "later", "clock"],
)
def test_what_differs_is_another_fault(other: tuple[float, str]) -> None:
    assert len(faults((AT, MESSAGE.format(code=45, pid=7, channel=1)), other)) == 2


def test_a_card_that_never_stops_is_told_again_and_again() -> None:
    """Else a counter would stand still while the card breaks on."""
    lines = [(AT + n, MESSAGE.format(code=31, pid=7, channel=n)) for n in range(100)]

    assert [fault.at - AT for fault in faults(*lines)] == list(range(0, 100, int(REPEAT_SECONDS)))


def test_a_lost_card_is_told_once() -> None:
    line = "NVRM: GPU 0000:18:00.0: GPU has fallen off the bus."

    assert faults((AT, line), (AT + 1, line)) == [Lost("0000:18:00.0", AT)]


def test_the_first_fault_of_a_card_is_the_cause_of_those_behind_it() -> None:
    codes = [(0.0, 145), (1.0, 45), (2.0, 154), (CAUSE_SECONDS + 1, 45)]

    found = faults(*((AT + after, MESSAGE.format(code=code, pid=7, channel=1)) for after, code in codes))

    assert [(fault.code, fault.cause) for fault in found if isinstance(fault, Xid)] == [
        (145, None),
        (45, 145),
        (154, 145),
        (45, None),
    ]


def test_another_card_is_no_cause() -> None:
    other = MESSAGE.format(code=45, pid=7, channel=1).replace("61:00", "62:00")

    found = faults((AT, MESSAGE.format(code=145, pid=7, channel=1)), (AT, other))

    assert [fault.cause for fault in found if isinstance(fault, Xid)] == [None, None]


def test_what_is_remembered_is_bounded() -> None:
    told = Faults()

    for n in range(3 * MOST_REMEMBERED):
        list(told.of([(AT, MESSAGE.format(code=45, pid=n + 1, channel=1))]))

    assert len(told._told) <= MOST_REMEMBERED


@pytest.mark.parametrize(
    ("pci", "expected"),
    [
        ("00000000:61:00.0", "0000:61:00.0"),
        ("PCI:0000:61:00", "0000:61:00.0"),
        ("0000:AB:1F.1", "0000:ab:1f.1"),
        ("61:00", "0000:61:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
    ],
)
def test_one_card_has_one_address(pci: str, expected: str) -> None:
    assert normalised(pci) == expected
