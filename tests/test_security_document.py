"""SECURITY.md and docs/PERMISSIONS.md: what they name is there, and each promise names what keeps it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stallwatch.rights import NEEDED
from stallwatch.sources.admission import Berth, has_room
from stallwatch.sources.process_table import MOST_HUNG, MOST_HUNG_OF_ALL

ROOT = Path(__file__).parents[1]
SECURITY, PERMISSIONS = ((ROOT / name).read_text() for name in ("SECURITY.md", "docs/PERMISSIONS.md"))
PACKAGE = ROOT / "exporter" / "stallwatch"


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, heading
    lines = [line for line in section[1].splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def paths(text: str) -> set[str]:
    return set(re.findall(r"`((?:tests|deploy|sources|web)/[\w./-]+\.\w+)`", text))


@pytest.mark.parametrize("text", [SECURITY, PERMISSIONS], ids=["SECURITY", "PERMISSIONS"])
def test_every_file_that_is_named_is_there(text: str) -> None:
    found = paths(text)

    assert len(found) >= 4
    assert [path for path in found if not (ROOT / path).exists() and not (PACKAGE / path).exists()] == []


@pytest.mark.parametrize("heading", ["What it may do", "What those it watches can do to it", "What leaves the process"])
def test_every_promise_names_a_test_or_what_keeps_it(heading: str) -> None:
    table = rows(SECURITY, heading)

    assert len(table) >= 3
    assert [promise for promise, *kept in table if not paths(" ".join(kept))] == []


def test_the_capabilities_are_those_that_are_looked_for() -> None:
    assert {cell.strip("`") for cell, *_ in rows(PERMISSIONS, "Capabilities")} >= set(NEEDED)


def test_the_calls_that_are_denied_are_those_of_the_profile() -> None:
    profile = json.loads((ROOT / "deploy/seccomp/stallwatch.json").read_text())
    denied = {name for rule in profile["syscalls"] if rule.get("errnoRet") == 1 for name in rule["names"]}
    section = PERMISSIONS.split("## System calls")[1].split("Everything else")[0].split("(EPERM)")[1]

    assert set(re.findall(r"`(\w+)`", section)) <= denied


def test_the_shares_of_room_and_turns_are_as_told() -> None:
    def most(*taken: Berth, of: int = 64) -> int:
        room = list[Berth]()
        for berth in taken:
            while has_room(berth, room, of):
                room.append(berth)
        return len(room)

    assert (most(Berth(user=1)), most(Berth(user=1), Berth(user=2)), most(Berth("x"))) == (32, 48, 48)
    assert f"at most {MOST_HUNG} that hang ({MOST_HUNG_OF_ALL} of all users)" in PERMISSIONS
