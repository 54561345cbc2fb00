"""Which capability would make readable what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from stallwatch.rights import KEPT_OUT, NO_RIGHT, missing, our_remedy, remedy

BOTH, PTRACE, SEARCH, ALL, NONE = 1 << 19 | 1 << 2, 1 << 19, 1 << 2, (1 << 41) - 1, 0


def status(effective: int) -> str:
    return f"Name:\tstallwatch\nCapPrm:\t{ALL:016x}\nCapEff:\t{effective:016x}\nCapBnd:\t{ALL:016x}\n"


@pytest.mark.parametrize(
    ("effective", "lacking"),
    [
        (BOTH, ()),
        (ALL, ()),
        (PTRACE, ("CAP_DAC_READ_SEARCH",)),
        (SEARCH, ("CAP_SYS_PTRACE",)),
        (NONE, ("CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE")),
        (ALL & ~BOTH, ("CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE")),
    ],
)
def test_what_is_missing_is_named(effective: int, lacking: tuple[str, ...]) -> None:
    assert missing(status(effective)) == lacking
    told = remedy(status(effective))
    assert [name for name in ("CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE") if name in told and told != KEPT_OUT] == [
        *lacking
    ]


def test_with_both_it_is_something_else_that_keeps_us_out() -> None:
    assert remedy(status(BOTH)) == KEPT_OUT


@pytest.mark.parametrize("text", ["", "CapEff:\n", "CapEff:\tnonsense\n", "xCapEff:\t0000\n"])
def test_a_status_that_does_not_tell_asks_for_both(text: str) -> None:
    assert missing(text) is None
    assert remedy(text) == NO_RIGHT


def test_our_own_status_tells() -> None:
    assert missing(Path("/proc/self/status").read_text()) is not None
    assert our_remedy() in (NO_RIGHT, KEPT_OUT) or our_remedy().startswith("the capability CAP_")
