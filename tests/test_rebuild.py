"""What Prometheus kept of a night, judged again: the same verdict as the exporter's own recording."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recordings.corpus import make
from recordings.played import TRUTH, frameworks, play
from recordings.scraped import kept_of
from stallwatch.catalogue import all_signals, collectors, derived_signals, read_signals
from stallwatch.model import Signal
from stallwatch.recordings.format import known_names
from stallwatch.recordings.rebuild import rebuilt
from stallwatch.recordings.replay import replay, replay_file
from stallwatch.recordings.scrapes import Scrape, is_answer, scrapes_of
from stallwatch.strict_yaml import InputError

SCRAPE_SECONDS = 15.0
PAGES = ("stalled", "failed")

CASES = (
    "silent-deadlock",
    "ten-major-faults-a-minute",
    "h109-fuse-lookup-lost",
    "h26-load-never-begins",
    "unified-memory-spins",
    "frozen",
    "blind-and-stuck",
)
"""A path of evidence each, and the silent twin of each."""

TWINS = tuple(dict.fromkeys(str(TRUTH[case].twin) for case in CASES if TRUTH[case].twin))


@pytest.mark.parametrize("case", [*CASES, *TWINS])
def test_a_night_that_prometheus_kept_is_judged_as_it_was(case: str, tmp_path: Path) -> None:
    stage = make(case)
    file = tmp_path / "night.json"
    file.write_text(json.dumps(kept_of(case, stage.text())))

    (server,) = [
        s for s in replay_file(str(file), None, frameworks())["servers"] if s["server"] == stage.servers[0].name
    ]

    lived, again = play(case).outcome.changes, server["changes"]
    assert _named(again[-1]) == _named(lived[-1])
    assert [_named(change) for change in again if change["state"] in PAGES] == [
        _named(change) for change in lived if change["state"] in PAGES
    ]
    if lived[-1]["state"] in PAGES:
        assert again[-1]["t"] <= lived[-1]["t"] + 2 * SCRAPE_SECONDS


def _named(change: Mapping[str, Any]) -> tuple[Any, ...]:
    return change["state"], change["reason"], change["suspect_rank"]


# --- the answer --------------------------------------------------------------------------------------------

SIGNALS = {signal.name: signal for signal in all_signals()}


def answer(*series: tuple[dict[str, str], list[list[Any]]]) -> bytes:
    result = [{"metric": labels, "values": values} for labels, values in series]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()


def named(name: str, instance: str = "node7:10077", **labels: str) -> dict[str, str]:
    return {"__name__": f"stallwatch_{name}", "instance": instance, "job": "stallwatch", **labels}


REPORT = (named("report_timestamp_seconds"), [[1000.0, "999.5"], [1015.0, "1014.5"]])


def test_samples_of_one_time_are_one_scrape_and_labels_of_prometheus_are_left_out() -> None:
    alive = named("rank_alive", server="s", rank="TP0", pod="exporter-xyz")

    first, second = scrapes_of("night.json", answer(REPORT, (alive, [[1000.0, "1"]])), SIGNALS)

    assert (first.at, second.at) == (999.5, 1014.5)
    assert first.values["rank_alive", ("s", "TP0")] == 1.0
    assert ("rank_alive", ("s", "TP0")) not in second.values


def test_a_report_that_was_scraped_twice_is_one() -> None:
    report = (named("report_timestamp_seconds"), [[1000.0, "999.5"], [1001.0, "999.5"], [1015.0, "1014.5"]])

    assert [scrape.at for scrape in scrapes_of("f", answer(report), SIGNALS)] == [999.5, 1014.5]


def test_what_no_number_is_and_series_of_others_are_passed_over() -> None:
    others = ({"__name__": "up", "instance": "other:1"}, [[1000.0, "1"]])
    strange = (named("rank_alive", server="s", rank="TP0"), [[1000.0, "NaN"], [1015.0, "+Inf"]])
    newer = (named("of_a_newer_release", server="s"), [[1000.0, "1"]])

    assert [len(scrape.values) for scrape in scrapes_of("f", answer(REPORT, others, strange, newer), SIGNALS)] == [1, 1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"status":"success","data":{"resultType":"matrix","result":[', "no whole answer"),
        (b'{"status":"error","error":"query timed out"}', "query timed out"),
        (b'{"status":"success","data":{"resultType":"vector","result":[]}}', "a matrix is needed"),
        (b'{"status":"success","data":{"resultType":"matrix","result":{}}}', "a matrix is needed"),
        (answer(), "holds no stallwatch_report_timestamp_seconds"),
        (answer((named("rank_alive", server="s", rank="TP0"), [[1.0, "1"]])), "holds no stallwatch_report"),
        (answer(REPORT, (named("node_shm_used_bytes", "node8:10077"), [[1000.0, "1"]])), "node7:10077 and node8:10077"),
        (b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":{}}]}}', "values of a time"),
        (b'{"status":"success","data":{"resultType":"matrix","result":[7]}}', "values of a time"),
        (answer((named("rank_alive"), [["x", "1"]])), "values of a time"),
    ],
)
def test_an_answer_that_is_none_is_told_in_one_sentence(text: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "night.json"
    file.write_bytes(text)

    with pytest.raises(InputError, match=problem) as found:
        replay_file(str(file), None, None)

    assert str(found.value).startswith(str(file))


@pytest.mark.parametrize("beginning", [b'{"stallwatch_recording":1', b"", b"\x1f\x8b", b'{"t":1}', b"{"])
def test_a_recording_is_no_answer(beginning: bytes) -> None:
    assert not is_answer(beginning)
    assert is_answer(b' \n{ "status": "success"')


def test_a_packed_answer_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "night.json.gz"
    whole = json.dumps(kept_of("normal", make(TWINS[0]).text())).encode()
    file.write_bytes(gzip.compress(whole))

    assert replay([str(file)], None, frameworks(), "text") == 0
    assert make(TWINS[0]).servers[0].name in capsys.readouterr().out

    file.write_bytes(gzip.compress(whole)[:-2000])
    with pytest.raises(InputError, match="damaged or cut off"):
        replay_file(str(file), None, None)


# --- what is made of it ------------------------------------------------------------------------------------

Values = dict[tuple[str, tuple[str, ...]], float]
KNOWN = known_names(read_signals(), derived_signals())
INFO = {"server": "s", "framework": "sglang", "tensor_parallel": "2", "role": "server"}


def scrape(at: float, values: Values) -> Scrape:
    both: Values = {("rank_alive", ("s", rank)): 1.0 for rank in ("TP0", "TP1")}
    return Scrape(at, {**both, ("log_bytes_total", ("s", "stdout")): 1.0, **values}, {"s": INFO})


def events(*scrapes: Scrape, known: dict[str, Signal | None] | None = None) -> list[dict[str, Any]]:
    """Events of all but the first scrape."""
    lines = [json.loads(line) for line in rebuilt(scrapes, known or KNOWN, collectors())]
    return [line for line in lines if ("event" in line or "line" in line) and line["t"] > 0]


def count(event: str, number: float) -> Values:
    return {("log_events_total", ("s", event)): number}


def log_age(seconds: float) -> Values:
    return {("channel_age_seconds", ("s", "log")): seconds}


def phases(first: int, second: int) -> Values:
    return {("rank_phase_number", ("s", "TP0")): first, ("rank_phase_number", ("s", "TP1")): second}


def test_a_rank_that_goes_on_passed_the_markers_of_its_phases_when_the_log_moved() -> None:
    before = scrape(100.0, {**phases(1, 1), **count("load_begin", 0)})
    after = scrape(115.0, {**phases(2, 1), **count("load_begin", 1), **log_age(4.0)})

    (marker,) = events(before, after)

    assert (marker["t"], marker["event"], marker["rank"]) == (11.0, "load_begin", "TP0")


def test_ranks_that_come_to_a_phase_one_after_the_other_are_equally_far_in_it() -> None:
    """Whose markers were counted between which scrapes is chance: nobody is behind by it."""
    begun = scrape(100.0, {**phases(1, 1), **count("load_begin", 0), **count("load_end", 0), **count("post_load", 0)})
    first_there = scrape(
        115.0,
        {**phases(3, 2), **count("load_begin", 2), **count("load_end", 2), **count("post_load", 1), **log_age(4.0)},
    )
    both_there = scrape(
        130.0,
        {**phases(3, 3), **count("load_begin", 2), **count("load_end", 2), **count("post_load", 2), **log_age(4.0)},
    )
    one_goes_on = scrape(
        145.0,
        {**phases(4, 3), **count("load_begin", 2), **count("load_end", 2), **count("post_load", 2), **log_age(4.0)},
    )

    def passed(*scrapes: Scrape) -> tuple[set[str], set[str]]:
        told = [event for event in events(begun, *scrapes) if not event.get("fields")]
        first, second = ({event["event"] for event in told if event["rank"] == rank} for rank in ("TP0", "TP1"))
        return first, second

    first, second = passed(first_there, both_there)
    assert first == second != set()
    ahead, behind = passed(first_there, both_there, one_goes_on)
    assert ahead > behind


def test_a_marker_nobody_passed_alone_is_nobodys() -> None:
    before = scrape(100.0, {**phases(3, 3), **count("draft_load_end", 0)})
    after = scrape(115.0, {**phases(3, 3), **count("draft_load_end", 1), **log_age(4.0)})

    (marker,) = events(before, after)

    assert marker["event"] == "draft_load_end"
    assert "rank" not in marker
    assert marker["fields"] == {"nameless": 1.0}


def test_a_bar_that_is_drawn_and_stands_is_no_progress() -> None:
    before = scrape(100.0, {**phases(6, 6), **count("capture_progress", 3), **log_age(10.0)})
    stands = scrape(115.0, {**phases(6, 6), **count("capture_progress", 9), **log_age(25.0)})
    moves = scrape(115.0, {**phases(6, 6), **count("capture_progress", 9), **log_age(2.0)})

    assert [event["event"] for event in events(before, stands)] == ["heartbeat"]
    assert [(event["event"], event["fields"]) for event in events(before, moves)] == [
        ("capture_progress", {"done": 9.0, "total": 9.0})
    ]


def test_a_log_that_moved_by_no_event_had_a_novel_line() -> None:
    before, after = scrape(100.0, phases(2, 2)), scrape(115.0, {**phases(2, 2), **log_age(3.0)})

    assert [(line["line"], line["t"]) for line in events(before, after)] == [("novel", 12.0)]
    assert events(before, scrape(115.0, {**phases(2, 2), **log_age(16.0)})) == []


def test_errors_keep_their_kind_and_a_counter_that_fell_says_nothing() -> None:
    before = scrape(100.0, {**count("error", 1), ("log_errors_total", ("s", "oom")): 0.0})
    after = scrape(115.0, {**count("error", 2), ("log_errors_total", ("s", "oom")): 1.0})

    assert [(event["event"], event["fields"]) for event in events(before, after)] == [("error", {"kind": "oom"})]
    assert events(after, before) == [] or events(before, before) == []


def test_a_series_that_is_gone_has_the_reason_of_its_collector() -> None:
    power = ("gpu_power_watts", ("GPU-0",))
    refused = ("read_errors_total", ("gpu", "driver_unresponsive"))
    lines = rebuilt([scrape(100.0, {power: 90.0, refused: 0.0}), scrape(115.0, {refused: 1.0})], KNOWN, collectors())
    silent = rebuilt([scrape(100.0, {power: 90.0, refused: 1.0}), scrape(115.0, {refused: 1.0})], KNOWN, collectors())

    assert ["gpu_power_watts", {"gpu": "GPU-0"}, None, "driver_unresponsive"] in json.loads(lines[-1])["readings"]
    assert not any(row[0] == "gpu_power_watts" for row in json.loads(silent[-1])["readings"])


def test_a_zero_that_is_shown_by_absence_is_read_as_zero() -> None:
    traced = ("rank_traced", ("s", "TP0"))
    lines = rebuilt([scrape(100.0, {traced: 1.0}), scrape(115.0, {})], KNOWN, collectors())

    assert SIGNALS["rank_traced"].zero_is_absent
    assert ["rank_traced", {"server": "s", "rank": "TP0"}, 0] in json.loads(lines[-1])["readings"]


def test_the_header_says_what_server_info_said() -> None:
    header = json.loads(rebuilt([scrape(100.0, {("port_listening", ("s", "8000")): 1.0})], KNOWN, collectors())[0])

    assert header["begun_timestamp_seconds"] == 100.0
    (server,) = header["servers"]
    assert (server["framework"], server["tensor_parallel"], server["port"]) == ("sglang", 2, 8000)
    assert server["ranks"] == ["TP0", "TP1"]
    assert server["log"] is True
