"""Report -> JSON document -> words and exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from stallwatch.model import REASONS, STATES, GpuState, RankState, Report, Verdict
from stallwatch.presentation import (
    PLACES,
    REASON_WORDS,
    SEVERITY,
    by_severity,
    document,
    duration,
    exit_code,
    server_document,
    text,
    verdict_line,
    verdict_words,
)
from stallwatch.printable import printable

Golden = Callable[[str, str], None]
GIB = 1 << 30

CONTRACT_KEYS = {
    "server": (
        *("server", "framework", "role", "state", "reason", "since", "phase", "ready", "suspect_rank"),
        *("ranks", "channels"),
    ),
    "rank": ("rank", "pid", "phase", "load_progress", "alive", "wait", "gpu"),
    "channel": ("channel", "state", "age_seconds"),
}


def test_the_document_is_as_the_golden_file(report: Report, golden: Golden) -> None:
    golden("report.json", json.dumps(document(report), indent=1) + "\n")


def test_the_text_is_as_the_golden_file(report: Report, golden: Golden) -> None:
    golden("report.txt", text(document(report)))


def test_the_text_of_a_fetched_document_is_the_same(report: Report) -> None:
    fetched = json.loads(json.dumps(document(report)))

    assert text(fetched) == text(document(report))


def test_the_document_says_where_a_server_runs(report: Report) -> None:
    first = report.servers[0]
    server = replace(first.server, pod="chat-0", namespace="ai", container="server", unit="", slurm_job="77")
    moved = server_document(replace(first, server=server), report.monotonic)

    assert [moved[name] for name in PLACES] == ["chat-0", "ai", "server", "", "77"]


def test_the_document_has_the_keys_of_the_contract(report: Report) -> None:
    made = document(report)

    assert made["schema"] == 1
    for server in made["servers"]:
        assert set(CONTRACT_KEYS["server"]) <= set(server)
        assert all(set(CONTRACT_KEYS["rank"]) <= set(rank) for rank in server["ranks"])
        assert all(set(CONTRACT_KEYS["channel"]) == set(channel) for channel in server["channels"])


def test_a_document_with_only_the_contracts_keys_can_be_told(report: Report) -> None:
    """`check` may fetch from a `serve` of another version."""
    server = document(report)["servers"][0]
    bare = {key: server[key] for key in CONTRACT_KEYS["server"]}
    bare["ranks"] = [{key: rank[key] for key in CONTRACT_KEYS["rank"]} for rank in server["ranks"]]

    told = text({"schema": 1, "servers": [bare]})

    assert told.startswith("sglang-8000  stalled (idle_wait) in loading_weights: ")


def test_a_stall_is_told_in_one_line(report: Report) -> None:
    line = verdict_line(server_document(report.servers[0], now=1000.0))

    assert line == (
        "sglang-8000  stalled (idle_wait) for 6m41s in loading_weights: every thread is asleep, the others wait for TP1"
    )


@pytest.mark.parametrize(
    ("verdict", "ready", "expected"),
    [
        (Verdict("working", "none", 990.0), False, "sglang-8000  working for 10s in loading_weights"),
        (Verdict("idle", "none", 400.0), True, "sglang-8000  idle for 10m"),
        (Verdict("gone", "none", 400.0), False, "sglang-8000  gone for 10m"),
        (
            Verdict("failed", "rank_dead", 999.0, "TP1"),
            True,
            "sglang-8000  failed (rank_dead) for 1s: a rank is dead, the others wait for TP1",
        ),
        (Verdict("working", "none", 1001.0, "TP1"), True, "sglang-8000  working for 0s"),
    ],
)
def test_other_verdicts_are_told_in_one_line(report: Report, verdict: Verdict, ready: bool, expected: str) -> None:
    server = replace(report.servers[0], verdict=verdict, ready=ready)

    assert verdict_line(server_document(server, now=1000.0)) == expected


def test_what_the_cards_do_is_told_with_whom_they_wait_for(report: Report) -> None:
    ranks = tuple(
        RankState(f"TP{number}", gpus=(GpuState(f"GPU-{number}", str(number), 76.2 * GIB, None, 0.004),))
        for number in range(8)
    )
    verdict = Verdict("stalled", "idle_wait", 599.0, "TP5")
    named, unnamed, blind, well = (
        replace(report.servers[0], ranks=ranks, verdict=verdict),
        replace(report.servers[0], ranks=ranks, verdict=replace(verdict, suspect_rank=None)),
        replace(report.servers[0], ranks=(*ranks, RankState("TP8", gpus=(GpuState("GPU-8"),))), verdict=verdict),
        replace(report.servers[0], ranks=ranks, verdict=replace(verdict, state="quiet", reason="none")),
    )

    told = [
        verdict_words(server_document(each, now=1000.0)).partition(" in loading_weights")[2]
        for each in (named, unnamed, blind, well)
    ]

    assert told == [
        ": every thread is asleep, on each of 8 GPUs 76 GiB held, 0 % used, waiting for TP5",
        ": every thread is asleep, on each of 8 GPUs 76 GiB held, 0 % used",
        ": every thread is asleep, the others wait for TP5",
        "",
    ]


def table_of(ranks: tuple[RankState, ...], report: Report, suspect: str | None = None) -> list[str]:
    """Headings and rows of these ranks."""
    verdict = Verdict("stalled", "idle_wait", 0.0, suspect)
    told = text(document(replace(report, servers=(replace(report.servers[0], verdict=verdict, ranks=ranks),))))
    lines = told.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  rank "))
    return lines[first : first + 1 + len(ranks)]


def busy_rank(name: str, number: int) -> RankState:
    """All that a rank can be, at its widest."""
    return RankState(
        rank=name,
        pid=4_194_304,
        phase="distributed_init",
        load_progress=1.0,
        alive=True,
        progress_age_seconds=86_399.0,
        wait={"futex": 205, "poll": 33, "sleep": 12, "running": 4, "disk": 1},
        main_wait="futex",
        gpus=(GpuState("GPU-0", str(number), 139.6 * GIB, 139.9 * GIB, 1.0, 1000.0, 144.0),),
    )


@pytest.mark.parametrize("names", [["TP0"], [f"TP{n}" for n in range(8)], [f"DP{n // 8}-TP{n % 8}" for n in range(64)]])
def test_the_table_of_ranks_is_aligned_and_fits_a_terminal(names: list[str], report: Report) -> None:
    lines = table_of(tuple(busy_rank(name, n) for n, name in enumerate(names)), report, names[-1])

    assert max(map(len, lines)) <= 120
    assert {line.index("futex") for line in lines[1:]} == {lines[0].index("threads")}
    assert [line[0] for line in lines] == [" "] * len(names) + [">"]
    assert all(line.endswith(", ...") for line in lines[1:])


def test_threads_that_have_room_are_all_told(report: Report) -> None:
    rank = replace(busy_rank("TP0", 0), gpus=())

    header, row = table_of((rank,), report)

    assert header.split() == ["rank", "pid", "phase", "load", "progress", "threads"]
    assert row.endswith("  futex 205 (main), poll 33, sleep 12, running 4, disk 1")


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (RankState("TP0", alive=False, wait={"futex": 3}), "dead"),
        (RankState("TP0", alive=None), "?"),
        (RankState("TP0", alive=True, wait={}), "none"),
        (RankState("TP0", alive=True, wait={"poll": 1}, main_wait="sleep"), "main sleep, poll 1"),
        (RankState("TP0", alive=True, wait={"poll": 1, "sleep": 2}, main_wait="poll"), "sleep 2, poll 1 (main)"),
    ],
)
def test_threads_are_told_by_what_they_wait_in(rank: RankState, expected: str, report: Report) -> None:
    assert table_of((rank,), report)[1].endswith(f"  {expected}")


def test_every_reason_has_words() -> None:
    assert set(REASON_WORDS) == set(REASONS) - {"none"}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], 3),
        (["unknown"], 3),
        (["unknown", "gone"], 3),
        (["unknown", "idle"], 0),
        (["working", "slow", "quiet", "suspect"], 0),
        (["idle", "stalled"], 1),
        (["unknown", "failed"], 1),
    ],
)
def test_the_exit_code_follows_the_contract(states: Sequence[str], expected: int) -> None:
    assert exit_code({"servers": [{"state": state} for state in states]}) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.9, "0s"),
        (41.9, "41s"),
        (60, "1m"),
        (401, "6m41s"),
        (3600, "1h"),
        (3601, "1h"),
        (11640, "3h14m"),
        (90000, "1d1h"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_no_server_is_said_so() -> None:
    assert text({"schema": 1, "servers": []}) == "no inference server found on this node\n"


def test_what_is_no_number_for_json_is_not_known(report: Report) -> None:
    server = replace(report.servers[0], phase_budget_seconds=float("inf"), since_timestamp=float("nan"))

    made = document(replace(report, servers=(server,)))

    assert "null" in json.dumps(made, allow_nan=False)
    assert made["servers"][0]["since"] is None
    assert "since an unknown time" in text(made)


def test_a_hostile_name_cannot_steer_a_terminal(report: Report) -> None:
    server = document(report)["servers"][0]
    server["server"] = "\x1b[2J\rfine\n"

    told = text({"servers": [server]})

    assert "\x1b" not in told
    assert "\r" not in told
    assert told.splitlines()[0].startswith("?[2J?fine?  stalled")


def test_a_name_with_lost_bytes_still_makes_a_document(report: Report) -> None:
    server = replace(
        report.servers[0],
        server=replace(report.servers[0].server, name="v\udcffllm"),
        ranks=(RankState("TP\n0"),),
    )

    made = document(replace(report, servers=(server,)))["servers"][0]

    assert (made["server"], made["ranks"][0]["rank"]) == ("v?llm", "TP?0")
    assert json.dumps(made, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("foreign", "shown"),
    [
        ("vllm-8000", "vllm-8000"),
        ("é" * 70, "é" * 64),
        ("a" * 127 + "é", "a" * 127),
        ("a" * 200, "a" * 128),
        ("a\tb\x7f\x85\u202e", "a?b???"),
        ("\ud800", "?"),
    ],
)
def test_foreign_text_is_cut_and_cleaned(foreign: str, shown: str) -> None:
    assert printable(foreign) == shown


def test_what_needs_a_person_comes_first(report: Report) -> None:
    servers = [{"server": name, "state": state} for name, state in (("a", "idle"), ("b", "stalled"), ("c", "unknown"))]

    assert [server["server"] for server in by_severity(servers)] == ["b", "c", "a"]
    assert set(SEVERITY) == set(STATES)


def test_a_configured_server_that_never_came_is_not_said_to_have_ended() -> None:
    server = {"state": "gone", "reason": "none", "starts": 0, "ready": False, "phase": "spawned", "suspect_rank": None}

    assert verdict_words(server) == "gone: it has not been seen yet"
    assert verdict_words({**server, "starts": 1}) == "gone"
