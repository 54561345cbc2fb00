"""docs/SCORE.md is what a run gives; and the parts it is made of: scraped series, naive rules, reports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recordings.corpus import CASES
from recordings.truth import Outcome, Truth
from score import document, drills, naive
from score.measure import Measured, measure, question
from score.reports import KINDS, load_reports, unknown_ids
from score.series import held, input_series, scrapes
from stallwatch.catalogue import all_signals, derived_signals, read_signals
from stallwatch.drill.table import CONDITIONS
from stallwatch.model import Event
from stallwatch.recordings.format import Line, Look, Reader, known_names

PORT, SILENCE, USED = "port_listening", "log_silence_seconds", "gpu_memory_used_bytes"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def records(*lines: dict[str, Any], log: bool | str = True) -> Iterator[Line]:
    """The records of a recording of one server `a`, with a look every 5 s."""
    header = {"stallwatch_recording": 1, "interval_seconds": 5, "servers": [{"server": "a", "log": log}]}
    texts = (json.dumps(line).encode() for line in (header, *lines))
    return Reader("test", known_names(read_signals(), derived_signals())).read(texts)


def look(t: float, *rows: list[Any]) -> dict[str, Any]:
    return {"t": t, "readings": list(rows)}


def port(t: float, value: float | None = 1.0) -> dict[str, Any]:
    return look(t, [PORT, {"server": "a", "port": "8000"}, value, *(["error"] if value is None else [])])


def line(t: float, kind: str = "heartbeat") -> dict[str, Any]:
    return {"t": t, "server": "a", "line": kind}


def values(lines: Iterable[Line], metric: str, until: float) -> str:
    """The samples of the only series of a metric; "" where there is none."""
    found = input_series(scrapes(lines, {metric}, until))
    assert len(found) <= 1
    return found[0]["values"] if found else ""


# --- scraped series ----------------------------------------------------------------------------------------


def test_a_scrape_has_the_last_reading_of_a_series_that_is_read() -> None:
    lines = records(*(port(t, float(t >= 30)) for t in range(0, 65, 5)))

    assert values(lines, PORT, 60) == "0x1 1x2"


def test_a_series_that_is_not_read_any_more_ends_with_a_stale_mark() -> None:
    lines = records(*(port(t) if t <= 20 else look(t) for t in range(0, 95, 5)))

    assert values(lines, PORT, 90) == "1x2 stale _x3"  # three intervals after 20 s


def test_a_series_that_is_read_rarely_is_not_stale_between_two_looks() -> None:
    lines = records(*(port(t) if t % 30 == 0 else look(t) for t in range(0, 95, 5)))

    assert "stale" not in values(lines, PORT, 90).partition("stale _ 1")[2]


def test_what_cannot_be_read_is_absent_until_it_can_be() -> None:
    lines = records(*(port(t, None if 15 <= t < 45 else 1.0) for t in range(0, 65, 5)))

    assert values(lines, PORT, 60) == "1 stale _ 1x1"


def test_while_nobody_looks_nothing_is_scraped() -> None:
    lines = records(port(0), port(5), port(100), port(105))

    assert values(lines, PORT, 105) == "1x1 stale _x4 1"


def test_the_silence_of_a_log_counts_from_its_last_line() -> None:
    lines = records(look(0), line(2), *(look(t) for t in range(5, 35, 5)), line(31), look(35), look(40), look(45))

    assert values(lines, SILENCE, 45) == "_ 13 28 14"


@pytest.mark.parametrize("log", [False, "unreadable"])
def test_a_log_that_is_not_read_has_no_silence(log: bool | str) -> None:
    lines = records(look(0), line(2), look(5), look(10), look(15), log=log)

    assert values(lines, SILENCE, 15) == ""


def test_a_log_that_becomes_unreadable_has_no_silence_from_then_on() -> None:
    gone = ["log_bytes_total", {"server": "a", "log": "log"}, None, "permission"]
    lines = records(look(0), line(2), look(5), look(10), look(15), look(20, gone), look(25), look(30))

    assert values(lines, SILENCE, 30) == "_ 13 stale"


def test_front_ends_and_what_no_rule_looks_at_are_left_out() -> None:
    threads = [["threads", {"server": "a", "rank": rank, "wait": "futex"}, 3] for rank in ("TP0", "main")]

    found = input_series(scrapes(records(look(0, *threads, ["node_oom_kills_total", {}, 1])), {"threads"}, 0))

    (only,) = found
    assert 'rank="TP0"' in only["series"]
    assert only["series"].startswith("stallwatch_threads{job=")


def test_a_hang_goes_on_as_it_stood_and_only_repeated_lines_come_again() -> None:
    stuck = [*(port(t, 0.0) for t in range(0, 125, 5)), *(line(t) for t in (1, 60, 119, 120))]
    single = {"t": 118.0, "server": "a", "event": "watchdog"}
    lines = sorted([*stuck, single], key=lambda each: each["t"])

    found = list(held(records(*lines), 0.0, 120))

    assert [each.t for each in found if isinstance(each, Look)] == list(range(0, 245, 5))
    assert [each.at for each in found if isinstance(each, Event)] == [1, 60, 118, 119, 120, 179, 180, 239, 240]


def test_the_last_line_stays_the_last_when_none_comes_again() -> None:
    lines = [line(1), *(port(t, 0.0) for t in range(5, 125, 5))]

    assert values(held(records(*lines), 10.0, 60), SILENCE, 180).endswith("179")


# --- naive rules -------------------------------------------------------------------------------------------


@needs_promtool
def test_promtool_says_when_an_alert_fired_and_that_none_did() -> None:
    """The port is shut from 300 s on in one, and open all the time in the other."""
    shut = records(*(port(t, float(t < 300)) for t in range(0, 1205, 5)))
    quiet = records(*(port(t) for t in range(0, 1205, 5)))
    questions = [
        naive.Question(name, input_series(scrapes(lines, naive.metrics(), 1200)), silent, 1200)
        for name, lines, silent in (("shut", shut, 290.0), ("open", quiet, None))
    ]

    found = naive.ask(questions)

    assert found == {"shut": {("NaivePortNotReady10m", "a"): naive.Firing(900.0, 900.0)}, "open": {}}


def test_what_promtool_says_is_read_case_by_case() -> None:
    text = """
        got: {alertname="A", ever="30", server="s"} 1E+00, {alertname="B", ever="60"} 1E+00
        got: {alertname="A", after="90", server="s"} 1E+00
        got: {case="one"} 1E+00
        got: {case="two"} 1E+00
    """

    found = naive.read(text)

    assert found == {"one": {("A", "s"): naive.Firing(30, 90), ("B", ""): naive.Firing(60, None)}, "two": {}}


@pytest.mark.parametrize("text", ["", "could not parse", 'got: {alertname="A", ever="30"} 1E+00'])
def test_what_promtool_did_not_finish_is_no_answer(text: str) -> None:
    with pytest.raises(naive.NoPromtoolError):
        naive.read(text)


def measured(kind: str, silent_at: float | None, **alerts: naive.Firing) -> Measured:
    truth = Truth("case", kind, None, "stalled", "none", None, None, "constructed", "none")
    return Measured(truth, Outcome((), {}, 0, silent_at), 600, (), alerts)


def test_an_alert_after_the_last_progress_is_a_hang_found() -> None:
    found = measured("page", 100.0, A=naive.Firing(400, 400))

    assert (found.is_false_alert("A"), found.alert_delay("A")) == (False, 300)
    assert found.alert_delay("B") is None


def test_an_alert_before_anything_was_wrong_is_false_and_finds_nothing() -> None:
    found = measured("page", 100.0, A=naive.Firing(90, 100))

    assert (found.is_false_alert("A"), found.alert_delay("A")) == (True, None)


def test_an_alert_for_a_healthy_server_is_false_and_for_one_nobody_can_know_it_is_neither() -> None:
    healthy, unknown = measured("never", None, A=naive.Firing(90)), measured("never", 50.0, A=naive.Firing(90, 90))

    assert (healthy.is_false_alert("A"), healthy.alert_delay("A")) == (True, None)
    assert (unknown.is_false_alert("A"), unknown.alert_delay("A")) == (False, None)


def test_an_alert_for_another_server_of_the_node_is_false() -> None:
    found = Measured(measured("page", 100.0).truth, Outcome((), {}, 0, 100.0), 600, (), {}, frozenset("A"))

    assert found.is_false_alert("A")
    assert not found.is_false_alert("B")


def test_the_obvious_rules_look_at_exported_metrics_and_at_no_verdict() -> None:
    exported = {signal.name for signal in all_signals()}
    derived = {"server_state", "server_reason", "channel_state", "channel_age_seconds", "server_suspect_rank_info"}

    assert naive.metrics() <= exported
    assert not naive.metrics() & derived
    assert len(naive.alerts()) == 7


@needs_promtool
def test_prometheus_accepts_the_obvious_rules_without_a_lint() -> None:
    command = ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(naive.RULES)]

    assert subprocess.run(command, capture_output=True, check=False, timeout=600).returncode == 0


def test_no_setup_tells_to_load_the_obvious_rules() -> None:
    loaded = re.findall(r"^ *- /etc/\S+\.yml", (document.ROOT / "rules" / "README.md").read_text(), re.MULTILINE)

    assert loaded
    assert not any("naive" in path for path in loaded)


def test_rules_of_cards_see_cards_and_others_have_none() -> None:
    with_cards = {row["series"].partition("{")[0] for row in question("h88-collective-mismatch").series}
    without = {row["series"].partition("{")[0] for row in question("silent-deadlock").series}

    assert f"stallwatch_{USED}" in with_cards - without


# --- reports -----------------------------------------------------------------------------------------------


def test_every_report_is_played_or_says_why_not() -> None:
    for report in load_reports():
        assert bool(report.recordings(CASES)) != bool(report.instead), report.id
        assert set(report.also) <= set(CASES), report.id
        assert (report.kind, report.grade) in {(kind, grade) for kind in KINDS for grade in "ABC"}
    assert unknown_ids(CASES) == set()


def test_a_name_with_an_id_that_no_report_has_is_found() -> None:
    assert unknown_ids(["h01-oom-killed", "h999-nobody", "hangs-h998"]) == {"h999"}


def test_sixty_reports_are_played() -> None:
    assert len([report for report in load_reports() if report.recordings(CASES)]) >= 60


# --- the document ------------------------------------------------------------------------------------------


@cache
def found() -> list[Measured]:
    return measure()


@needs_promtool
def test_the_tables_are_what_the_run_gives(request: pytest.FixtureRequest) -> None:
    """Some 25 s on two cores: the recordings are judged only once in a test run, the naive rules here."""
    before = document.DOCUMENT.read_text(encoding="utf-8")
    after = document.written(before, document.tables(found()))
    if request.config.getoption("--update-golden"):
        document.DOCUMENT.write_text(after, encoding="utf-8")
        before = after

    assert after == before


@needs_promtool
def test_the_measures_hold() -> None:
    pages = [each for each in found() if each.truth.kind == "page"]
    warns = [each for each in found() if each.truth.kind == "warn"]
    hangs = [*pages, *warns]
    soon = [each for each in hangs if each.delay is not None and each.delay <= document.SOON_SECONDS]

    assert [each.truth.case for each in found() if each.is_false_page] == []
    assert len(soon) + len(document.LATE) >= 0.95 * len(hangs)
    assert sum(each.is_explained for each in hangs) >= 0.95 * len(hangs)


@needs_promtool
def test_every_miss_and_every_late_page_has_its_cause() -> None:
    late = {each.truth.case for each in found() if (each.delay or 0) > document.SOON_SECONDS}
    missed = {each.truth.case for each in found() if each.misses}

    assert late == set(document.LATE)
    assert missed == set(document.causes_of_misses())


def test_a_table_without_its_place_is_refused() -> None:
    assert document.written("<!-- a: begin -->\nold\n<!-- a: end -->\n", {"a": "new"}) == (
        "<!-- a: begin -->\nnew\n<!-- a: end -->\n"
    )
    with pytest.raises(ValueError, match="no place for b"):
        document.written("<!-- a: begin -->\n<!-- a: end -->\n", {"b": "new"})


# --- drills ------------------------------------------------------------------------------------------------


DEADLOCK = drills.Drilled("barrier-deadlock", "stalled idle_wait TP3", "stalled idle_wait TP3", ("stalled", "working"))
SLOW_LOAD = drills.Drilled("slow-load", "working", "working", ("working",), "barrier-deadlock")


def test_a_drill_is_right_when_only_what_should_be_said_was() -> None:
    assert DEADLOCK.is_right
    assert SLOW_LOAD.is_right
    assert not replace(DEADLOCK, said="stalled idle_wait TP2").is_right
    assert not replace(SLOW_LOAD, states=("stalled", "working")).is_right, "a page on the way"


def test_results_are_noted_only_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(drills.VARIABLE, raising=False)
    drills.note(DEADLOCK)
    monkeypatch.setenv(drills.VARIABLE, str(tmp_path / "results"))
    drills.note(SLOW_LOAD)
    drills.note(DEADLOCK)

    assert list(tmp_path.iterdir()) == [tmp_path / "results"]
    assert list(drills.load(tmp_path / "results").values()) == [DEADLOCK, SLOW_LOAD]
    assert drills.load(tmp_path / "none") == {}


def test_another_run_differs_in_what_it_says_and_not_in_what_it_skips() -> None:
    kept = {each.condition: each for each in (DEADLOCK, SLOW_LOAD)}
    wrong = replace(SLOW_LOAD, said="stalled idle_wait")

    assert drills.differences(kept, {}) == drills.differences(kept, kept) == []
    assert drills.differences(kept, {"slow-load": wrong}) == ["slow-load: stalled idle_wait, kept is working"]
    assert drills.differences({}, {"slow-load": SLOW_LOAD}) == ["slow-load: working, kept is nothing"]


def test_the_kept_drills_are_conditions_and_a_wrong_one_has_its_cause_and_shows_in_the_table() -> None:
    conditions = {condition.name for condition in CONDITIONS}
    wrong = replace(SLOW_LOAD, states=("stalled", "working"))

    assert set(drills.load()) <= conditions
    assert {name for name, each in drills.load().items() if not each.is_right} <= set(drills.CAUSES)
    assert "**no**, stalled and working" in "\n".join(drills.table({"slow-load": wrong}))
    assert "**no**" not in "\n".join(drills.table({"slow-load": SLOW_LOAD}))


def test_the_headline_names_the_rule_that_finds_most() -> None:
    found = [
        measured("page", 100.0, NaiveLogSilent5m=naive.Firing(400, 400), NaiveThreadsInFutex5m=naive.Firing(500, 500)),
        measured("page", 100.0, NaiveThreadsInFutex5m=naive.Firing(420, 420)),
        measured("never", None, NaiveThreadsInFutex5m=naive.Firing(50), NaiveLogSilent5m=naive.Firing(60)),
    ]
    stalled = replace(found[0].outcome, changes=({"t": 340.0, "state": "stalled"},))

    text = document.headline([*(replace(each, outcome=stalled) for each in found[:2]), found[2]])

    assert "2 of 2 hangs that must page, 240 s" in text
    assert "nothing in 0 of 3 recordings" in text
    assert "`NaiveThreadsInFutex5m`, finds 2, after 360 s, and pages for nothing in 1." in text
