"""Report -> /metrics: read back by the client library, by promtool, and by eye (tests/golden)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.process_collector import ProcessCollector

from stallwatch import daemon, signals
from stallwatch.catalogue import read_signals
from stallwatch.derived import SIGNALS
from stallwatch.exposition import Exposition, own_process, render
from stallwatch.model import (
    CHANNELS,
    OUTCOME_BUCKETS_SECONDS,
    STATES,
    ChannelState,
    Reading,
    Report,
    Signal,
    StartOutcome,
    StartupHistogram,
    Verdict,
)

Golden = Callable[[str, str], None]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

LEVEL = Signal("test_level", "A level of the test.", ("subject",))


def samples_of(page: bytes, openmetrics: bool = False) -> Samples:
    """Every sample by name and sorted labels; fails on a series that comes twice."""
    found: Samples = {}
    for family in (parse_openmetrics if openmetrics else parse_text)(page.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            assert sample.timestamp is None
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"stallwatch_{name}", tuple(sorted(labels.items()))))


def page(report: Report, openmetrics: bool = False) -> bytes:
    return Exposition(revision="abc1234", python="3.11.0").page(report).text(openmetrics)


def with_readings(report: Report, readings: Iterable[Reading]) -> Report:
    return replace(report, readings=tuple(readings))


def test_the_text_page_is_as_the_golden_file(report: Report, golden: Golden) -> None:
    golden("metrics.txt", page(report).decode())


def test_the_openmetrics_page_is_as_the_golden_file(report: Report, golden: Golden) -> None:
    golden("metrics.openmetrics", page(report, openmetrics=True).decode())


def test_both_formats_carry_the_same_samples(report: Report) -> None:
    text = samples_of(page(report))
    openmetrics = samples_of(page(report, openmetrics=True), openmetrics=True)

    assert text == openmetrics
    assert len(text) > 100


def test_promtool_finds_nothing_to_criticise(report: Report) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (package prometheus)")

    done = subprocess.run([promtool, "check", "metrics"], input=render(report), capture_output=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_one_of_nine_states_is_1(report: Report) -> None:
    samples = samples_of(page(report))

    states = {state: value(samples, "server_state", server="sglang-8000", state=state) for state in STATES}

    assert states == dict.fromkeys(STATES, 0.0) | {"stalled": 1.0}


def test_every_state_is_counted_even_with_no_server(report: Report) -> None:
    samples = samples_of(page(replace(report, servers=(), readings=())))

    assert {state: value(samples, "servers", state=state) for state in STATES} == dict.fromkeys(STATES, 0.0)


def test_only_the_present_reason_phase_and_channel_state_are_shown(report: Report) -> None:
    shown = [
        (name, dict(labels))
        for (name, labels) in samples_of(page(report))
        if dict(labels).get("server") == "sglang-8000"
    ]

    def labels_of(name: str) -> list[dict[str, str]]:
        return [labels for each, labels in shown if each == f"stallwatch_{name}"]

    assert labels_of("server_reason") == [{"server": "sglang-8000", "reason": "idle_wait"}]
    assert labels_of("server_phase") == [{"server": "sglang-8000", "phase": "loading_weights"}]
    assert len(labels_of("channel_state")) == len(report.servers[0].channels)


def test_a_class_that_no_thread_is_in_is_absent_and_any_other_zero_is_shown(report: Report) -> None:
    labels = ("sglang-8000", "TP0")
    each = [signals.THREADS.read(count, *labels, wait) for wait, count in {"futex": 205, "disk": 0}.items()]
    each += [signals.RANK_TRACED.read(0.0, *labels), signals.RANK_ALIVE.read(0.0, *labels)]
    samples = samples_of(page(with_readings(report, each)))
    each[1:3] = [signals.THREADS.read(2, *labels, "disk"), signals.RANK_TRACED.read(1.0, *labels)]
    later = samples_of(page(with_readings(report, each)))

    rank = {"server": labels[0], "rank": labels[1]}
    shown = [(value(s, "threads", **rank, wait="disk"), value(s, "rank_traced", **rank)) for s in (samples, later)]
    assert shown == [(None, None), (2.0, 1.0)]
    assert value(samples, "threads", **rank, wait="futex") == 205.0
    assert value(samples, "rank_alive", **rank) == 0.0


def test_what_is_not_known_is_absent(report: Report) -> None:
    samples = samples_of(page(report))

    assert value(samples, "process_cpu_seconds_total", server="sglang-8000", rank="TP1") is None
    assert value(samples, "rank_load_progress_ratio", server="sglang-8000", rank="TP2") is None
    assert value(samples, "rank_phase_number", server="sglang-8000", rank="TP2") is None
    assert value(samples, "server_ranks_alive", server="vllm-8001") is None
    assert value(samples, "server_startup_duration_seconds", server="sglang-8000") is None
    assert value(samples, "collector_success", collector="logs") is None
    assert value(samples, "collector_last_success_timestamp_seconds", collector="gpu") is None


def test_the_age_of_an_unreadable_channel_is_absent(report: Report) -> None:
    samples = samples_of(page(report))

    ages = {c: value(samples, "channel_age_seconds", server="sglang-8000", channel=c) for c in CHANNELS[:4]}

    assert ages == {"log": 401.5, "storage": None, "memory": 2.0, "children": None}


@pytest.mark.parametrize("state", STATES)
def test_a_suspect_rank_is_named_only_in_an_episode(report: Report, state: str) -> None:
    server = replace(report.servers[0], verdict=Verdict(state, "none", 0.0, "TP1"))

    samples = samples_of(page(replace(report, servers=(server,))))

    named = value(samples, "rank_suspect", server="sglang-8000", rank="TP1")
    assert named == (1.0 if state in ("suspect", "stalled", "failed") else None)


def test_monotonic_moments_are_shown_on_the_wall_clock(report: Report) -> None:
    samples = samples_of(page(report))

    last = value(samples, "collector_last_success_timestamp_seconds", collector="processes")
    assert last == report.timestamp - 2.0
    assert value(samples, "collector_in_flight_seconds", collector="gpu") == 10.0
    assert value(samples, "collector_in_flight_seconds", collector="processes") == 0.0


def test_read_errors_exist_from_0(report: Report) -> None:
    samples = samples_of(page(report))

    assert value(samples, "read_errors_total", collector="processes", reason="permission") == 4.0
    assert value(samples, "read_errors_total", collector="processes", reason="vanished") == 0.0
    assert value(samples, "read_errors_total", collector="gpu", reason="gpu_lost") == 0.0
    assert value(samples, "read_errors_total", collector="logs", reason="gpu_lost") is None


def test_configured_labels_join_the_info_but_hide_nothing(report: Report) -> None:
    labels = {"team": "search", "model": "fake", "not a name": "x", "__reserved": "y"}
    server = replace(report.servers[0], server=replace(report.servers[0].server, labels=labels))

    found = [dict(key[1]) for key in samples_of(page(replace(report, servers=(server,)))) if "server_info" in key[0]]

    assert [(info["team"], info["model"]) for info in found] == [("search", "org/model-547b")]
    assert not {"not a name", "__reserved"} & set(found[0])


def test_the_histogram_ends_in_infinity_sum_and_count(report: Report) -> None:
    labels = {"framework": "vllm", "model": "org/small", "speculative": ""}

    samples = samples_of(page(report))

    assert value(samples, "startup_duration_seconds_bucket", le="120.0", **labels) == 1.0
    assert value(samples, "startup_duration_seconds_bucket", le="+Inf", **labels) == 2.0
    assert value(samples, "startup_duration_seconds_sum", **labels) == 90093.5
    assert value(samples, "startup_duration_seconds_count", **labels) == 2.0


def test_the_same_series_twice_is_shown_once_and_counted(report: Report) -> None:
    twice = with_readings(report, [LEVEL.read(1, "a"), LEVEL.read(2, "a"), LEVEL.read(3, "b")])
    exposition = Exposition()

    first, second = (samples_of(exposition.page(twice).text(False)) for _ in range(2))

    assert value(first, "test_level", subject="a") == 1.0
    assert value(first, "series_dropped_total", reason="duplicate") == 1.0
    assert value(second, "series_dropped_total", reason="duplicate") == 2.0
    assert value(second, "series_dropped_total", reason="ranks") == 2.0


def test_labels_that_read_alike_once_cleaned_are_one_series(report: Report) -> None:
    alike = with_readings(report, [LEVEL.read(1, "a\x00"), LEVEL.read(2, "a\x01")])

    samples = samples_of(page(alike))

    assert value(samples, "test_level", subject="a?") == 1.0
    assert value(samples, "series_dropped_total", reason="duplicate") == 1.0


def test_two_servers_of_one_name_and_two_histograms_alike_do_not_break_the_page(report: Report) -> None:
    histogram = StartupHistogram("vllm", "m" * 200, "", (0,) * 11, 0.0)
    longer = replace(histogram, model="m" * 300)

    samples = samples_of(page(replace(report, servers=report.servers[1:] * 2, startups=(histogram, longer))))

    dropped = value(samples, "series_dropped_total", reason="duplicate")
    assert dropped is not None
    assert dropped > 13


@given(st.text() | st.text('"\\\n\r\u2028\ud800é\U0001f600a', min_size=60, max_size=200))
def test_any_label_value_can_be_read_back(subject: str) -> None:
    empty = Report(0.0, 0.0, (LEVEL.read(1, subject),), (), (), {})

    for openmetrics in (False, True):
        samples = samples_of(page(empty, openmetrics), openmetrics)
        (shown,) = [dict(labels)["subject"] for name, labels in samples if name == "stallwatch_test_level"]
        assert len(shown.encode()) <= 128
        assert "\n" not in shown
        if subject.isascii() and subject.isprintable():
            assert shown == subject[:128]


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (float("inf"), "+Inf"),
        (float("-inf"), "-Inf"),
        (float("nan"), "NaN"),
        (True, "1"),
        (7, "7"),
        (0.1, "0.1"),
        (1e22, "1e+22"),
    ],
)
def test_numbers_are_written_as_the_formats_say(report: Report, number: float, written: str) -> None:
    lines = page(with_readings(report, [LEVEL.read(number, "a")])).decode().splitlines()

    assert f'stallwatch_test_level{{subject="a"}} {written}' in lines


def test_series_that_are_gone_are_forgotten(report: Report) -> None:
    """10,000 restarts with new names must not grow the exporter."""
    exposition = Exposition()

    for start in range(200):
        readings = [LEVEL.read(1, f"{start}-{number}") for number in range(10)]
        exposition.page(with_readings(report, readings))

    family, _ = exposition._readings._families[LEVEL.name]
    assert len(family.texts) == len(family.lines) == 10


def test_families_that_are_gone_are_forgotten(report: Report) -> None:
    exposition = Exposition()
    exposition.page(with_readings(report, [LEVEL.read(1, "a")]))
    assert list(exposition._readings._families) == [LEVEL.name]

    exposition.page(with_readings(report, [signals.CPU_SECONDS.read(1, "a", "TP0")]))

    assert list(exposition._readings._families) == [signals.CPU_SECONDS.name]


@pytest.mark.parametrize(
    "values", [(1.0, 2.0, 2.0, 1.0), (float("nan"), 3.0, float("nan"), float("inf"))], ids=["numbers", "no numbers"]
)
def test_each_page_shows_the_value_of_its_report(values: tuple[float, ...], report: Report) -> None:
    """The lines of values that did not change are kept."""
    exposition = Exposition()
    reports = [with_readings(report, [signals.CPU_SECONDS.read(each, "a", "TP0")]) for each in values]

    pages = [exposition.page(each).text(openmetrics=False) for each in reports]

    assert pages == [Exposition().page(each).text(openmetrics=False) for each in reports]


readings_of_a_page = st.lists(
    st.builds(
        lambda signal, label, value: Reading(signal, (label,) * len(signal.labels), value, None if value else "error"),
        st.sampled_from((LEVEL, signals.THREADS, signals.CPU_SECONDS)),
        st.sampled_from(("a", "b", "c", "a\x00", "a\x01")),
        st.sampled_from((None, 0.0, 1.0, 2.5, float("nan"))),
    ),
    max_size=8,
)


@given(st.lists(readings_of_a_page, max_size=5))
def test_what_is_kept_of_the_page_before_changes_nothing(pages: list[list[Reading]]) -> None:
    """Readings come and go, change places and values, are absent at 0, come twice or read alike."""
    exposition = Exposition()
    duplicates = 0.0
    for readings in pages:
        report = Report(0.0, 0.0, tuple(readings), (), (), {})
        kept, fresh = exposition.page(report).text(False).decode(), Exposition().page(report).text(False).decode()

        duplicates += value(samples_of(fresh.encode()), "series_dropped_total", reason="duplicate") or 0.0
        counted = 'stallwatch_series_dropped_total{reason="duplicate"}'
        assert [line for line in kept.splitlines() if not line.startswith(counted)] == [
            line for line in fresh.splitlines() if not line.startswith(counted)
        ]
        assert f"{counted} {duplicates:.0f}" in kept.splitlines()


def test_of_what_is_as_it_was_the_very_same_block_is_written(report: Report) -> None:
    exposition = Exposition()
    still, moving = LEVEL.read(1, "a"), signals.CPU_SECONDS
    first, second = (
        {
            block.name: block
            for block in exposition.page(with_readings(report, [still, moving.read(n, "a", "b")])).blocks
        }
        for n in (1.0, 2.0)
    )

    assert first["stallwatch_test_level"] is second["stallwatch_test_level"]
    assert first["stallwatch_server_info"] is second["stallwatch_server_info"]
    assert first["stallwatch_process_cpu_seconds_total"] is not second["stallwatch_process_cpu_seconds_total"]


def test_a_server_a_start_and_an_end_that_changed_are_seen(report: Report) -> None:
    """What is written once of them is written anew."""
    exposition = Exposition()
    counts = (1,) * (len(OUTCOME_BUCKETS_SECONDS) + 1)
    ended = StartOutcome("vllm", "", "m", "", {"ready": (counts, 10.0)}, {}, {})
    report = replace(report, outcomes=(ended,))
    before = exposition.page(report).text(openmetrics=False)
    about, started = report.servers[0], report.startups[0]
    changed = replace(
        report,
        servers=(replace(about, server=replace(about.server, version="9.9")), *report.servers[1:]),
        startups=(replace(started, total_seconds=started.total_seconds + 1), *report.startups[1:]),
        outcomes=(replace(ended, durations={"ready": (counts, 11.0)}),),
    )

    after = exposition.page(changed).text(openmetrics=False)

    assert after == Exposition().page(changed).text(openmetrics=False)
    families = {line.partition(b"{")[0] for line in set(after.splitlines()) - set(before.splitlines())}
    assert families == {
        b"stallwatch_server_info",
        b"stallwatch_startup_duration_seconds_sum",
        b"stallwatch_startup_outcome_duration_seconds_sum",
    }


def test_nothing_that_is_worked_out_has_the_name_of_what_is_read() -> None:
    """The two are families apart."""
    read = {signal.name for signal in read_signals()} | {
        signal.name for signal in vars(daemon).values() if isinstance(signal, Signal)
    }

    assert not read & {signal.name for signal in SIGNALS}
    assert len(read) > 50


def test_a_series_that_comes_back_is_shown_again(report: Report) -> None:
    exposition = Exposition()
    exposition.page(with_readings(report, [LEVEL.read(1, "a")]))
    exposition.page(with_readings(report, []))

    samples = samples_of(exposition.page(with_readings(report, [LEVEL.read(3, "a")])).text(False))

    assert value(samples, "test_level", subject="a") == 3.0
    assert value(samples, "series_dropped_total", reason="duplicate") == 0.0


def test_a_family_without_a_sample_is_not_announced(report: Report) -> None:
    exposition = Exposition()
    exposition.page(with_readings(report, [LEVEL.read(1, "a")]))

    assert b"test_level" not in exposition.page(with_readings(report, [])).text(False)


def test_an_unknown_channel_state_of_a_new_channel_needs_no_code(report: Report) -> None:
    server = replace(report.servers[0], channels=(ChannelState("nvlink", "moving", 1.0),))

    samples = samples_of(page(replace(report, servers=(server,))))

    assert value(samples, "channel_state", server="sglang-8000", channel="nvlink", state="moving") == 1.0


def test_our_own_process_is_shown_under_the_client_librarys_names(report: Report) -> None:
    samples = samples_of(Exposition().page(report, own_process()).text(True), openmetrics=True)

    assert samples[("process_resident_memory_bytes", ())] > 1_000_000
    assert ("process_cpu_seconds_total", ()) in samples


def test_of_our_own_process_it_is_said_what_the_client_library_says() -> None:
    theirs = {s.name: s.value for m in ProcessCollector(registry=None).collect() for s in m.samples}
    texts = {s.name: (m.type, m.documentation) for m in ProcessCollector(registry=None).collect() for s in m.samples}
    ours = {metric.name: metric for metric in own_process()}

    assert {name: (metric.kind, metric.help) for name, metric in ours.items()} == texts
    assert ours["process_max_fds"].value == theirs["process_max_fds"]
    assert ours["process_start_time_seconds"].value == pytest.approx(theirs["process_start_time_seconds"], abs=2.0)
    for name in ("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_cpu_seconds_total"):
        assert ours[name].value == pytest.approx(theirs[name], rel=0.2)


def test_our_open_descriptors_are_counted_also_where_the_folder_has_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_fds() -> float:
        return next(metric.value for metric in own_process() if metric.name == "process_open_fds")

    before = open_fds()
    with open("/dev/null") as _:
        assert open_fds() == before + 1
        real = os.stat
        empty = os.stat_result((0o40500, 0, 0, 0, 0, 0, 0, 0, 0, 0))
        monkeypatch.setattr(os, "stat", lambda path, **more: empty if path == "/proc/self/fd" else real(path, **more))
        assert before + 1 <= open_fds() <= before + 2  # listing it opens one
    monkeypatch.undo()

    assert open_fds() == before


def test_nothing_has_a_created_series(report: Report) -> None:
    assert b"_created" not in page(report, openmetrics=True)


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_names_follow_the_conventions(signal: Signal) -> None:
    assert (signal.kind == "counter") == signal.name.endswith("_total")
    assert (signal.kind == "info") == signal.name.endswith("_info")
    assert signal.help.endswith(".")
