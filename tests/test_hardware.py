"""The checks of `make hardware`: that they run, against the stand-in driver, and that they can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware import checks, machines
from hardware.checks import CHECKS, DIFFERS, NOT_RUN, SAME, SEEN, Place, compared, within
from hardware.machines import GIB, MIB, NotRunError, Pace, Peer, Work, peer
from hardware.run import ABSENCE, MARK, write
from stallwatch.sources import Moment
from stallwatch.sources.gpus.collector import Gpu
from stallwatch.sources.gpus.nvml_child import ABSENT, Absent, Answer, CardAnswer, Row, Unanswered

ROOT = Path(__file__).parents[1]
NO_GPU = 3
LINE = "0, GPU-1, NVIDIA H100 80GB HBM3, 00000000:19:00.0, 580.95.05, 9.0, 1024, 81559, 7, 121.50, 700.00, 35, 1980"


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "exporter")])}
    command = [sys.executable, "-m", "hardware.run", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


# --- the whole, against the stand-in driver ------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretended(nvml_standin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """Exit status, and the page it wrote."""
    out = tmp_path_factory.mktemp("hardware") / "page.md"
    out.write_text(f"# Before\n{MARK}\nresults of the run before\n")
    done = script("--stand-in", "--library", str(nvml_standin), "--out", str(out))
    return done.returncode, out.read_text()


def rows(page: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| (?!what|---)", line)]


def test_with_the_stand_in_driver_nothing_differs(pretended: tuple[int, str]) -> None:
    status, page = pretended

    assert status == 0
    assert page.startswith(f"# Before\n{MARK}\n## Results\n")
    assert "results of the run before" not in page
    assert "with a stand-in driver" in page
    assert {verdict for _, verdict, _ in rows(page)} <= {SAME, SEEN, NOT_RUN}


@pytest.mark.parametrize("title", CHECKS)
def test_every_check_finds_something(pretended: tuple[int, str], title: str) -> None:
    section = pretended[1].partition(f"### {title}\n")[2].partition("\n### ")[0]

    assert rows(section)


def test_only_what_needs_other_rights_is_not_run(pretended: tuple[int, str]) -> None:
    assert {check for check, verdict, _ in rows(pretended[1]) if verdict == NOT_RUN} <= {"without rights"}


@pytest.mark.gpu
def test_with_a_gpu_nothing_differs(tmp_path: Path) -> None:
    """The page in docs is rewritten by `make hardware` only."""
    done = script("--out", str(tmp_path / "page.md"))

    if done.returncode == NO_GPU:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout


# --- each comparison, and its twin that differs --------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (20.0, 24.0, SAME),
        (20.0, 26.0, DIFFERS),
        (1000.0, 1090.0, SAME),
        (1000.0, 1120.0, DIFFERS),
        (None, None, SAME),
        (None, 0.0, DIFFERS),
        (0.0, None, DIFFERS),
    ],
)
def test_what_may_differ_is_an_amount_or_a_share(ours: float | None, theirs: float | None, verdict: str) -> None:
    assert compared("a check", ours, theirs, 5.0, 0.1).verdict == verdict


@pytest.mark.parametrize(
    ("value", "verdict"), [(1.0, SAME), (2.0, SAME), (0.9, DIFFERS), (2.1, DIFFERS), (None, DIFFERS)]
)
def test_what_is_expected_has_two_ends(value: float | None, verdict: str) -> None:
    assert within("a check", value, 1.0, 2.0, "W").verdict == verdict


CARD = CardAnswer(
    "GPU-1",
    "0",
    "NVIDIA H100 80GB HBM3",
    "9.0",
    "0000:19:00.0",
    "disabled",
    {
        "memory_used": 1024 * MIB,
        "memory_total": 81559 * MIB,
        "utilization": 0.07,
        "power": 121.5,
        "power_limit": 700.0,
        "temperature": 35.0,
    },
    {},
    (),
)


class Driver:
    """Says that of its one card, always."""

    def __init__(self, card: CardAnswer = CARD) -> None:
        self.card = card

    def ask(self, processes: bool, events: bool) -> Answer | Unanswered | Absent:
        return Answer("580.95.05", (self.card,))

    def close(self) -> None:
        pass


class Kernel:
    reason, is_caught_up = None, True

    def read(self, now: Moment) -> tuple[()]:
        return ()

    def close(self) -> None:
        pass


class Machine:
    """nvidia-smi says what it is given; work is a process of ours, which the card knows of or not."""

    title = "a test"
    pace = Pace(every=0.0, period=0.0, settle=0.0, between=0.0)

    def __init__(self, said: Peer, driver: Driver, shows_work: bool = True) -> None:
        self.said, self.driver, self.shows_work = said, driver, shows_work

    def peers(self) -> list[Peer]:
        return [self.said]

    @contextmanager
    def work(self, kind: str, card: Peer, size: int) -> Iterator[Work]:
        before = self.driver.card
        if self.shows_work:
            used = {**before.values, "memory_used": before.values["memory_used"] + size}
            self.driver.card = replace(before, values=used, processes=(Row(os.getpid(), size),))
        yield Work(os.getpid())
        self.driver.card = before


def verdicts(check: Any, said: Peer | None = None, shows_work: bool = True) -> dict[str, str]:
    driver = Driver()
    place = Place(Machine(said or peer(LINE), driver, shows_work), Gpu(checks.host(0.0), driver, Kernel()))
    return {found.check: found.verdict for found in check(place)}


def test_the_same_names_are_the_same() -> None:
    assert verdicts(checks.names) == {"card 0": SAME, "number of cards": SAME}


@pytest.mark.parametrize(
    "other", [{"index": "1"}, {"name": "another"}, {"pci": "00000000:20:00.0"}, {"driver": "1"}, {"uuid": "GPU-2"}]
)
def test_another_name_differs(other: dict[str, str]) -> None:
    assert DIFFERS in verdicts(checks.names, replace(peer(LINE), **other)).values()  # type: ignore[arg-type]


def test_the_same_figures_are_the_same() -> None:
    assert set(verdicts(checks.idle_figures).values()) == {SAME}


@pytest.mark.parametrize("figure", checks.PEERS)
def test_another_figure_differs(figure: str) -> None:
    ours = getattr(peer(LINE), figure)

    found = verdicts(checks.idle_figures, replace(peer(LINE), **{figure: 2 * ours + 1}))

    assert [check for check, verdict in found.items() if verdict == DIFFERS] == [f"{figure} of card 0"]


def test_a_holder_is_seen_joined_and_forgotten() -> None:
    assert set(verdicts(checks.holder).values()) == {SAME}


def test_a_holder_that_is_not_seen_differs() -> None:
    found = verdicts(checks.holder, shows_work=False)

    assert [check for check, verdict in found.items() if verdict == DIFFERS] == [
        "memory of a stranger",
        "memory used more than before",
        "memory of a rank",
        "the rank is tied to its card",
    ]


# --- nvidia-smi, work, and the page --------------------------------------------------------------------------


def test_a_line_of_nvidia_smi_is_read_in_our_units() -> None:
    found = peer(LINE)

    assert (found.uuid, found.memory_used, found.utilization, found.power) == ("GPU-1", GIB, 0.07, 121.5)
    assert (found.memory_total, found.sm_clock) == (81559 * MIB, 1.98e9)


def test_what_nvidia_smi_does_not_know_is_none() -> None:
    found = peer("0, GPU-1, NVIDIA GB10, 0000000F:01:00.0, 580.95.05, 12.1, [N/A], [N/A], 0, 4.1, [N/A], 40, 208")

    assert (found.memory_used, found.power_limit, found.utilization) == (None, None, 0.0)


def test_without_nvidia_smi_a_comparison_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(NotRunError, match="no nvidia-smi"):
        machines.Real().peers()


def test_without_libcuda_work_is_not_run() -> None:
    """Where there is one, the work that is asked for does not exist."""
    with pytest.raises(NotRunError, match="no work on the card"), machines.Real().work("nothing", peer(LINE), 1):
        pass


def test_the_results_take_the_place_of_those_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# What it is\n\n{MARK}old")

    write(page, "new")

    assert page.read_text() == f"# What it is\n\n{MARK}\nnew"


def test_every_absence_is_one_sentence() -> None:
    assert set(ABSENCE) == set(ABSENT.values())
    assert not any("." in said.replace("libnvidia-ml.so.1", "") for said in ABSENCE.values())


def test_the_page_of_the_repository_says_what_was_never_seen() -> None:
    page = (ROOT / "docs/HARDWARE.md").read_text()
    head, mark, _ = page.partition(MARK)

    assert mark
    assert "make hardware" in head


def test_readings_of_the_collector_are_taken_apart() -> None:
    driver = Driver(replace(CARD, codes={"energy": 3}))
    look = Place(Machine(peer(LINE), driver), Gpu(checks.host(0.0), driver, Kernel())).look()

    assert look.missing["gpu_energy_joules_total", ("GPU-1",)] == "not_supported"
    assert ("gpu_energy_joules_total", ("GPU-1",)) not in look.values
