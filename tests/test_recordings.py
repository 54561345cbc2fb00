"""Every recording of tests/recordings against the truth table: what was found, when, and what never pages.

The recordings are made in memory when they are needed and go through the code of `stallwatch replay`.
In words, with a table of all cases: docs/RECORDINGS.md (written by `--update-golden`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recordings.corpus import CASES, make
from recordings.played import TRUTH, difference_of, frameworks, play
from recordings.truth import PAGES, Truth, misses
from stallwatch.config import Thresholds
from stallwatch.model import REASONS, STATES
from stallwatch.recordings.replay import replay_file

HANGS = [truth.case for truth in TRUTH.values() if truth.kind != "never"]
DOCUMENT = Path(__file__).parents[1] / "docs" / "RECORDINGS.md"
TESTS = Path(__file__).parent

KNOWN_MISSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "h79-never-scheduled": (
        "The server says that it owes nothing, and nothing that is read tells it from an idle one. A request of one's "
        "own would; stallwatch sends none.",
        ("late: never", "state idle, must be stalled", "reason none, must be no_tokens"),
    ),
    "two-frozen-bars": (
        "A bar that starts again lower is a new bar, and so progress. Two bars that stand, drawn by turns in one "
        "place, look like that.",
        ("late: never", "state working, must be stalled", "reason none, must be idle_wait"),
    ),
}
"""Case -> why it is missed, and exactly how.  A false page can never stand here."""

MOST_FALSE_PAGES = 0
LEAST_RECALL, LEAST_EXPLAINED = 0.95, 0.95
MOST_DIFFERENT = 0.30
"""Share of readings in which a twin may differ from its hang until the verdict must stand."""

TOO_EARLY_SECONDS = 5.0

WITHOUT_NOISE = {"frozen"}
"""Stuck servers that do not even do what stuck ones do: no process of a frozen cgroup runs."""


def misses_of(truth: Truth) -> list[str]:
    return misses(truth, play(truth.case).outcome)


@pytest.mark.parametrize("case", TRUTH)
def test_the_verdict_is_the_true_one(case: str) -> None:
    """In time where it must page or warn, never a page where it must not; state, reason and rank at the end."""
    _, known = KNOWN_MISSES.get(case, ("", ()))

    assert list(known) == misses_of(TRUTH[case]), play(case).outcome.changes


@pytest.mark.parametrize("case", [truth.case for truth in TRUTH.values() if truth.kind == "page" and truth.by])
def test_no_page_from_silence_comes_before_its_time(case: str) -> None:
    """A page that a reading of the very moment of the last progress could make would be luck."""
    result, certain = play(case).outcome, DEATHS
    window, stall_after = Thresholds().window, Thresholds().stall_after

    for change in result.changes:
        if change["state"] not in PAGES or result.silent_at is None or change["reason"] in (*certain, "fatal_log"):
            continue
        least = window if change["reason"] == "stopped" else min(stall_after, Thresholds().serve_stall_after)
        if change["phase"] != "ready" and change["reason"] != "stopped":
            least = stall_after
        assert change["t"] >= result.silent_at + least - TOO_EARLY_SECONDS


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """The measures, over all recordings.  A summary that nobody can fail is no test: the bounds stand above."""
    found = {truth.case: misses_of(truth) for truth in TRUTH.values()}
    false_pages = [case for case, what in found.items() if any(miss.startswith("page") for miss in what)]
    in_time = [case for case in HANGS if not any(miss.startswith(("late", "page")) for miss in found[case])]
    explained = [case for case in HANGS if not any(miss.startswith(("reason", "suspect_rank")) for miss in found[case])]
    steady = [case for case in HANGS if not any(miss.startswith("flaps") for miss in found[case])]
    recall, share = len(in_time) / len(HANGS), len(explained) / len(HANGS)

    with capsys.disabled():
        print(
            f"\n{len(TRUTH)} recordings, {len(HANGS)} hangs: false pages {len(false_pages)}, recall {recall:.1%}, ",
            end="",
        )
        print(f"reason and rank {share:.1%}, steady {len(steady) / len(HANGS):.1%}")
        print("missed:", *(f"{case} ({'; '.join(what)})" for case, what in found.items() if what))

    assert len(false_pages) <= MOST_FALSE_PAGES, false_pages
    assert recall >= LEAST_RECALL
    assert share >= LEAST_EXPLAINED


def test_no_false_page_is_excused() -> None:
    excused = [miss for _, known in KNOWN_MISSES.values() for miss in known if miss.startswith("page")]

    assert excused == []
    assert all(TRUTH[case].kind != "never" for case in KNOWN_MISSES)


# --- the table ---------------------------------------------------------------------------------------------


def test_the_table_has_every_case_and_its_words_exist() -> None:
    assert set(TRUTH) == set(CASES)
    assert {truth.kind for truth in TRUTH.values()} == {"page", "warn", "never"}
    assert {truth.state for truth in TRUTH.values()} <= set(STATES)
    assert {truth.reason for truth in TRUTH.values()} == set(REASONS)


@pytest.mark.parametrize("case", HANGS)
def test_a_hang_has_a_twin_that_is_none(case: str) -> None:
    truth, played = TRUTH[case], play(case)

    assert truth.twin is not None
    assert TRUTH[truth.twin].kind == "never"
    assert truth.by is not None
    assert played.silent_at is not None
    assert played.ends_at >= played.silent_at + truth.by, "it ends before the verdict must stand"


def test_what_never_stands_still_says_so() -> None:
    healthy = [
        truth.case for truth in TRUTH.values() if truth.kind == "never" and truth.state not in ("unknown", "idle")
    ]

    assert [case for case in healthy if play(case).silent_at is not None] == []


def test_thirty_reports_are_played() -> None:
    reports = {found.group() for case in CASES if (found := re.match(r"h\d+", case))}
    cited = {truth.report for truth in TRUTH.values()} - {"constructed"}

    assert len(reports) >= 30
    assert len(cited) >= 30


# --- the recordings ----------------------------------------------------------------------------------------


DEATHS = ("rank_dead", "exited", "out_of_memory", "gpu_lost")
STUCK = [case for case in HANGS if case not in WITHOUT_NOISE and TRUTH[case].reason not in DEATHS]


@pytest.mark.parametrize("case", [case for case in STUCK if case != "h04-ray-rank-died"])
def test_a_stuck_server_still_does_what_stuck_servers_do(case: str) -> None:
    """Exact zeros would be too easy to find; it is stuck all the same, and does next to nothing."""
    played = play(case)

    assert any(played.grown.values())
    assert not all(played.grown.values())


LOUDER = {
    *("half-a-mib-a-minute", "ten-major-faults-a-minute", "memory-grows-10-mib-a-minute", "writes-10-mib-a-minute"),
    *("reads-5-mib-a-minute", "rank-at-3-percent", "500-minor-faults-a-minute"),
}
"""Stuck servers that do more than any measured one, just below a floor."""

STUCK_IN_SILENCE = [
    case for case in HANGS if TRUTH[case].reason in ("idle_wait", "blocked_io", "waiting_remote") and case not in LOUDER
]


@pytest.mark.parametrize("case", STUCK_IN_SILENCE)
def test_the_noise_of_a_stuck_server_is_what_was_measured(case: str) -> None:
    """At most 54 ticks of CPU, 2 faults and 0.2 MB by read() a minute in each process, no storage reads."""
    minutes = (TRUTH[case].by or 0.0) / 60

    for (signal, process, kind), grown in play(case).grown.items():
        assert grown <= MOST_NOISE[signal] * minutes * 1.05 + 0.02 + (kind != ""), (signal, process, kind)


MOST_NOISE = {
    "process_cpu_seconds_total": 0.54,
    "process_page_faults_total": 2.0,
    "process_storage_read_bytes_total": 0.0,
    "process_read_bytes_total": 0.2 * (1 << 20),
    "process_written_bytes_total": 0.0,
    "process_resident_memory_bytes": 0.0,
}
"""Signal -> most it grows by in a minute; docs/NOISE.md, rows a, c and d."""


@pytest.mark.parametrize("case", HANGS)
def test_a_twin_differs_in_few_readings(case: str) -> None:
    found = difference_of(case)

    assert found.readings <= MOST_DIFFERENT * found.of_readings, found


@pytest.mark.parametrize("case", CASES)
def test_time_never_runs_backwards(case: str) -> None:
    assert play(case).is_in_order


def test_a_recording_is_the_same_byte_for_byte_wherever_it_is_made(tmp_path: Path) -> None:
    """In another process, with other hashes; packed, too."""
    names = ("silent-deadlock", "h88-collective-mismatch", "h22-ops-built")
    program = "import sys; from recordings.corpus import make; sys.stdout.write(make(sys.argv[1]).text())"

    for name in names:
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": "7"}
        other = subprocess.run([sys.executable, "-c", program, name], capture_output=True, env=environment, check=True)
        assert make(name).text().encode() == other.stdout
    packed = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    for path in packed:
        make(names[0]).save(path)
    assert packed[0].read_bytes() == packed[1].read_bytes()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_saved_recording_is_judged_as_the_one_in_memory(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"silent-deadlock{suffix}"
    make("silent-deadlock").save(path)

    (server,) = replay_file(str(path), None, frameworks())["servers"]

    assert list(play("silent-deadlock").outcome.changes) == server["changes"]


# --- the document ------------------------------------------------------------------------------------------


def table() -> Iterator[str]:
    """The table of docs/RECORDINGS.md."""
    yield "| case | from | class | by | at the end | rank | twin | differs in |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for truth in TRUTH.values():
        cells: list[Any] = [
            f"`{truth.case}`",
            truth.report,
            truth.kind,
            "",
            f"`{truth.state}`",
            truth.rank or "",
            "",
            "",
        ]
        if truth.reason != "none":
            cells[4] += f" `{truth.reason}`"
        if truth.twin is not None and truth.by is not None:
            found = difference_of(truth.case)
            cells[3], cells[6] = f"{truth.by:g} s", f"`{truth.twin}`"
            cells[7] = f"{found.readings} of {found.of_readings} readings, {found.events} lines"
        yield "| " + " | ".join(cells) + " |"


BEGIN, END = "<!-- cases: begin -->\n", "<!-- cases: end -->\n"


def test_the_document_has_the_table_of_all_cases(request: pytest.FixtureRequest) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    written = head + BEGIN + "\n".join(table()) + "\n" + END + tail

    if request.config.getoption("--update-golden"):
        DOCUMENT.write_text(written, encoding="utf-8")
        text = written

    assert written == text


def test_the_document_lists_what_is_missed() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition("## What is missed")[2]

    assert sorted(KNOWN_MISSES) == sorted(re.findall(r"^- `([\w-]+)`", text, flags=re.MULTILINE))
