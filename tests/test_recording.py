"""The format of recordings: what every line means, what is wrong with a bad one, and what is never written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from stallwatch import signals
from stallwatch.catalogue import derived_signals, read_signals
from stallwatch.config import Thresholds
from stallwatch.model import Event, LogPlace, Process, ProcessId, Reading, Server
from stallwatch.recordings.format import (
    NOT_COLLECTED,
    Facts,
    Header,
    Line,
    Look,
    Pause,
    Reader,
    event_line,
    header_line,
    known_names,
    look_line,
    pause_line,
    server_document,
    servers_line,
    told_servers,
)
from stallwatch.strict_yaml import InputError

KNOWN = known_names(read_signals(), derived_signals())
HEADER = {"stallwatch_recording": 1, "interval_seconds": 5, "servers": [{"server": "s"}]}
CPU = ["process_cpu_seconds_total", {"server": "s", "rank": "TP0"}, 12.5]


def read(*lines: Any, file: str = "a.jsonl") -> list[Line]:
    return list(Reader(file, KNOWN).read(encoded(lines)))


def encoded(lines: Iterable[Any]) -> list[bytes]:
    """Objects as JSON; text and bytes as they are."""
    found = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    return [(line if isinstance(line, bytes) else line.encode()) + b"\n" for line in found]


def looks(*rows: Any) -> tuple[Reading, ...]:
    found = read(HEADER, {"t": 5.0, "readings": list(rows)})[1]
    assert isinstance(found, Look)
    return found.readings


# --- what is read ------------------------------------------------------------------------------------------


def test_a_pause_is_read_as_it_was_written() -> None:
    assert read(HEADER, pause_line(12.3456, 7.00049).rstrip())[1:] == [Pause(12.346, 7.0)]


def test_a_pause_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="pause"):
        read(HEADER, {"t": 1.0, "pause": "long"})


def test_a_whole_recording_is_read() -> None:
    header = {
        **HEADER,
        "servers": [
            {
                "server": "sglang-8000",
                "framework": "sglang",
                "version": "0.5.9",
                "port": 8000,
                "ranks": ["TP0", "TP1"],
                "role": "server",
                "nnodes": 2,
                "node_rank": 1,
                "log": "unreadable",
                "verdict": {"window": 6, "stall_after": 20, "budgets": {"compiling": 100}},
                "colour": "green",
            }
        ],
        "nvidia": True,
    }

    found = read(
        header,
        {"t": 5.0, "readings": [CPU, ["gpu_power_watts", {"gpu": "GPU-0"}, None, "driver_unresponsive"]]},
        {"t": 5.4, "server": "s", "rank": "TP0", "event": "load_progress", "fields": {"done": 3, "total": 64}},
        {"t": 9.1, "server": "s", "line": "novel"},
    )

    assert isinstance(found[0], Header)
    server = found[0].servers[0]
    assert (found[0].interval_seconds, server.log) == (5.0, "unreadable")
    assert Thresholds(window=6, stall_after=20, budgets={"compiling": 100}) == server.thresholds
    facts = server.server
    assert (facts.name, facts.framework, facts.version, facts.ports) == ("sglang-8000", "sglang", "0.5.9", (8000,))
    assert (facts.expected_ranks, facts.role, facts.nnodes, facts.node_rank) == (("TP0", "TP1"), "server", 2, 1)
    assert [
        Look(
            5.0,
            (
                signals.CPU_SECONDS.read(12.5, "s", "TP0"),
                signals.GPU_POWER.missing("driver_unresponsive", "GPU-0"),
            ),
        ),
        Event(5.4, "s", "load_progress", "TP0", "log", {"done": 3.0, "total": 64.0}),
        Event(9.1, "s", "novel", None, "log"),
    ] == found[1:]


def test_defaults_are_those_of_a_plain_server() -> None:
    header = read(HEADER)[0]

    assert isinstance(header, Header)
    found = header.servers[0]
    assert (
        found.server.role,
        found.server.nnodes,
        found.server.node_rank,
        found.server.expected_ranks,
        found.log,
        found.thresholds,
    ) == ("server", 1, 0, (), None, None)


def test_the_set_of_labels_decides_and_more_of_them_are_ignored() -> None:
    labels = {"wait": "futex", "job": "stallwatch", "rank": "TP0", "instance": "n1:10077", "server": "s"}

    assert (signals.THREADS.read(205.0, "s", "TP0", "futex"),) == looks(["threads", labels, 205])


def test_the_same_series_is_read_again_with_its_own_value_and_reason() -> None:
    labels = {"server": "s", "rank": "TP0"}
    rows = [[CPU[0], labels, 1], [CPU[0], labels, None, "vanished"], [CPU[0], labels, 2.5], [CPU[0], labels, None]]

    assert [(reading.value, reading.reason) for reading in looks(*rows)] == [
        (1.0, None),
        (None, "vanished"),
        (2.5, None),
        (None, "error"),
    ]


def test_values_are_floats_whatever_json_makes_of_them() -> None:
    assert all(type(reading.value) is float for reading in looks(CPU, [*CPU[:2], 7], [*CPU[:2], 2**60]))


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("process_context_switches_total", {"server": "s", "rank": "TP0", "kind": "voluntary"}),
        ("server_state", {"server": "s", "state": "stalled"}),
        ("channel_age_seconds", {"server": "s", "channel": "log"}),
        ("log_silence_seconds", {"server": "s", "log": "log"}),
        ("report_timestamp_seconds", {}),
        ("collector_success", {"collector": "gpu"}),
        ("startup_duration_seconds_bucket", {"le": "30"}),
    ],
)
def test_what_is_derived_is_accepted_and_ignored(name: str, labels: dict[str, str]) -> None:
    """A recording may be rebuilt from all that Prometheus holds."""
    assert looks([name, labels, 1]) == ()


@pytest.mark.parametrize("name", sorted(NOT_COLLECTED))
def test_signals_that_nothing_collects_yet_are_known(name: str) -> None:
    labels = NOT_COLLECTED[name]

    (reading,) = looks([name, dict.fromkeys(labels, "x"), 1])

    assert (name, ("x",) * len(labels)) == (reading.signal.name, reading.labels)


def test_a_rank_may_be_tied_to_a_card_without_its_process() -> None:
    labels = {"server": "s", "rank": "TP0", "gpu": "GPU-0"}

    assert (signals.RANK_INFO.read(1.0, "s", "TP0", "", "GPU-0"),) == looks(["rank_info", labels, 1])


def test_a_card_may_be_told_of_without_all_its_names() -> None:
    labels = {"gpu": "GPU-0", "driver": "580.95.05"}

    (reading,) = looks(["gpu_info", labels, 1])

    assert reading == signals.GPU_INFO.read(1.0, "GPU-0", "", "", "", "580.95.05", "", "")


def test_further_servers_may_come_later() -> None:
    found = read(HEADER, {"t": 3.0, "servers": [{"server": "late", "framework": "vllm"}]})[1]

    assert isinstance(found, Facts)
    assert [each.server.name for each in found.servers] == ["late"]


def test_servers_that_have_lines_are_found_in_any_writing() -> None:
    lines = encoded(
        [
            HEADER,
            {"t": 1, "readings": [CPU]},
            {"t": 2, "server": "a", "event": "load_begin"},
            '{"t": 3, "server": "b", "l\\u0069ne": "novel"}',
            {"t": 4, "server": "c"},
            "no json",
            '{"event": {}}',
        ]
    )

    assert {"a", "b", ""} == told_servers(lines)


# --- what is wrong -----------------------------------------------------------------------------------------

BAD_LINES: tuple[tuple[Any, str], ...] = (
    ("", "is no JSON object: Expecting value"),
    ("[1]", "is no JSON object"),
    ("7", "is no JSON object"),
    ('{"t": 1', "is no JSON object"),
    ("nonsense", "is no JSON object"),
    (b'{"t": 6, "x": "\xff"}', "is not UTF-8 text"),
    ("[" * 100_000, "is nested too deeply"),
    ('{"t": NaN}', "NaN is no number in JSON"),
    ('{"t": 6, "readings": [["process_cpu_seconds_total", {"server": "s", "rank": "TP0"}, Infinity]]}', "Infinity is"),
    (HEADER, "stallwatch_recording: a second header"),
    ({"readings": []}, "t: a number is needed, not nothing"),
    ({"t": "6", "readings": []}, 't: a number is needed, not "6"'),
    ({"t": True, "readings": []}, "t: a number is needed, not true"),
    ({"t": -1, "readings": []}, "t: -1 is not allowed"),
    ({"t": 1e13, "readings": []}, "t: 1e+13 is not allowed"),
    ('{"t": 1e999, "readings": []}', "t: the number is too large"),
    ('{"t": 1' + "0" * 400 + "}", "t: the number is too large"),
    ('{"t": 1' + "0" * 5000 + "}", "is no JSON object"),
    ({"t": 4.9, "readings": []}, "t: time runs backwards: 4.9 comes after 5"),
    ({"t": 6, "servers": {}}, "servers: a list is needed"),
    ({"t": 6, "readings": {}}, "readings: a list is needed"),
    ({"t": 6, "readings": ["x"]}, "readings[0]: [name, {labels}, value]"),
    ({"t": 6, "readings": [CPU, [CPU[0], CPU[1]]]}, "readings[1]: [name, {labels}, value]"),
    ({"t": 6, "readings": [{}]}, "readings[0]: [name, {labels}, value]"),
    ({"t": 6, "readings": [["stallwatch_threads", {}, 1]]}, 'readings[0]: "stallwatch_threads" is no signal'),
    ({"t": 6, "readings": [[["x"], {}, 1]]}, "readings[0]: a list is no signal"),
    ({"t": 6, "readings": [[CPU[0], ["s"], 1]]}, "readings[0]: process_cpu_seconds_total: labels are an object"),
    ({"t": 6, "readings": [[CPU[0], {"server": "s", "rank": 0}, 1]]}, "labels are an object of texts"),
    ({"t": 6, "readings": [[CPU[0], {"server": "s", "rank": ["TP0"]}, 1]]}, "labels are an object of texts"),
    ({"t": 6, "readings": [[CPU[0], {"server": "s"}, 1]]}, "wrong labels server; needed are server, rank"),
    ({"t": 6, "readings": [[CPU[0], {"server": "", "rank": "TP0"}, 1]]}, "wrong labels"),
    ({"t": 6, "readings": [["rank_info", {"server": "s", "gpu": "GPU-0"}, 1]]}, "wrong labels server, gpu"),
    ({"t": 6, "readings": [["threads", {"server": "s", "rank": "TP0", "wait": "x"}, 1]]}, 'wait "x" is unknown'),
    ({"t": 6, "readings": [["threads", {"server": "s", "rank": "TP0", "wait": "write"}, 1]]}, "is unknown"),
    ({"t": 6, "readings": [[*CPU[:2], "1"]]}, 'process_cpu_seconds_total: a number or null is needed, not "1"'),
    ({"t": 6, "readings": [[*CPU[:2], True]]}, "a number or null is needed, not true"),
    ({"t": 6, "readings": [[*CPU[:2], [1]]]}, "a number or null is needed, not a list"),
    ({"t": 6, "readings": [[*CPU[:2], 10**400]]}, "the number is too large"),
    ('{"t": 6, "readings": [["node_oom_kills_total", {}, 1e999]]}', "the number is too large"),
    ({"t": 6, "readings": [["node_oom_kills_total", {}, 1], ["node_oom_kills_total", {}, True]]}, "readings[1]"),
    ({"t": 6, "readings": [[*CPU[:2], None, "tired"]]}, 'reason "tired" is unknown; allowed are permission'),
    ({"t": 6, "readings": [[*CPU[:2], None, 3]]}, "reason 3 is unknown"),
    ({"t": 6, "readings": [], "interval": "5s"}, 'interval: a number is needed, not "5s"'),
    ({"t": 6, "server": "s", "event": "novel"}, 'event: "novel" is unknown; allowed are'),
    ({"t": 6, "server": "s", "event": 3}, "event: 3 is unknown"),
    ({"t": 6, "server": "s", "line": "load_begin"}, 'line: "load_begin" is unknown; allowed are access, heartbeat'),
    ({"t": 6, "event": "ready"}, "server: a text is needed, not nothing"),
    ({"t": 6, "server": "", "event": "ready"}, 'server: a text is needed, not ""'),
    ({"t": 6, "server": "s", "rank": 3, "event": "ready"}, "rank: a text is needed, not 3"),
    ({"t": 6, "server": "s", "event": "ready", "fields": []}, "fields: an object is needed"),
    ({"t": 6, "server": "s", "event": "stats", "fields": {"running": None}}, "fields.running: a number is needed"),
    ({"t": 6, "server": "s", "event": "stats", "fields": {"running": False}}, "fields.running: a number is needed"),
    ({"t": 6, "server": "s", "event": "error", "fields": {"kind": "odd"}}, 'fields.kind: "odd" is unknown'),
)


@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
def test_a_bad_line_is_named_with_file_line_and_key(line: Any, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        read(HEADER, {"t": 5.0, "readings": [CPU]}, line)

    assert str(caught.value).startswith("a.jsonl:3: ")
    assert problem in str(caught.value)


BAD_SERVERS: tuple[tuple[Any, str], ...] = (
    ("s", "servers[0]: an object is needed"),
    ({}, "servers[0].server: a text is needed"),
    ({"server": 1}, "servers[0].server: a text is needed"),
    ({"server": "s", "ranks": "TP0"}, "servers[0].ranks: a list of names is needed"),
    ({"server": "s", "ranks": [0]}, "servers[0].ranks: a list of names is needed"),
    ({"server": "s", "role": "child"}, 'servers[0].role: "child" is unknown; allowed are server, embedded'),
    ({"server": "s", "log": "yes"}, 'servers[0].log: "yes" is unknown'),
    ({"server": "s", "framework": None}, "servers[0].framework: a text is needed"),
    ({"server": "s", "nnodes": 0}, "servers[0].nnodes: a whole number from 1"),
    ({"server": "s", "nnodes": True}, "servers[0].nnodes: a whole number from 1"),
    ({"server": "s", "node_rank": 1.5}, "servers[0].node_rank: a whole number from 0"),
    ({"server": "s", "port": 70000}, "servers[0].port: a whole number from 0 to 65535"),
    ({"server": "s", "verdict": 3}, "servers[0].verdict: an object is needed"),
    ({"server": "s", "verdict": {"window": "6s"}}, 'servers[0].verdict.window: a number is needed, not "6s"'),
    ({"server": "s", "verdict": {"window": 300}}, "servers[0].verdict.stall_after: must be longer than window"),
    ({"server": "s", "verdict": {"budgets": {"lunch": 1}}}, "servers[0].verdict.budgets: seconds by phase"),
)


@pytest.mark.parametrize(("server", "problem"), BAD_SERVERS)
def test_a_bad_server_is_named_with_its_key(server: Any, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        read({**HEADER, "servers": [server]})

    assert f"a.jsonl:1: {problem}" in str(caught.value)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"t": 5, "readings": []}, "stallwatch_recording: the first line must be the header"),
        ({**HEADER, "stallwatch_recording": 2}, "stallwatch_recording: 2 is unknown; allowed is 1"),
        ({**HEADER, "stallwatch_recording": True}, "stallwatch_recording: true is unknown; allowed is 1"),
        ({"stallwatch_recording": 1}, "interval_seconds: a number is needed, not nothing"),
        ({**HEADER, "interval_seconds": 0}, "interval_seconds: 0 is not allowed"),
        ({**HEADER, "interval_seconds": -5}, "interval_seconds: -5 is not allowed"),
        ({**HEADER, "interval_seconds": 1e9}, "interval_seconds: 1e+09 is not allowed"),
        ({**HEADER, "interval_seconds": "5s"}, 'interval_seconds: a number is needed, not "5s"'),
        ({**HEADER, "servers": [{"server": "s"}, {"server": "s"}]}, 'servers[1].server: "s" is there twice'),
    ],
)
def test_a_bad_header_is_named(header: Any, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        read(header)

    assert f"a.jsonl:1: {problem}" in str(caught.value)


def test_an_empty_recording_is_named() -> None:
    with pytest.raises(InputError, match=r"^a\.jsonl: is empty; a recording begins with a header line$"):
        read()


def test_a_line_that_was_cut_off_is_told_from_one_that_was_never_json() -> None:
    whole, cut = encoded([HEADER])[0], b'{"t": 5.0, "readings": [["proc'

    with pytest.raises(InputError, match=r"^a\.jsonl:2: is cut off: the recording ended in the middle of this line"):
        list(Reader("a.jsonl", KNOWN).read([whole, cut]))
    with pytest.raises(InputError, match=r"^a\.jsonl:2: is no JSON object"):
        list(Reader("a.jsonl", KNOWN).read([whole, cut + b"\n"]))


# --- what is written ---------------------------------------------------------------------------------------


def written(*lines: str) -> list[Line]:
    return list(Reader("a.jsonl", KNOWN).read(line.encode() for line in lines))


def test_what_is_written_is_read_again_as_it_was() -> None:
    facts = {"framework": "vllm", "model": "org/model", "tensor_parallel": 4, "nnodes": 2, "node_rank": 1}
    server = Server("v", role="embedded", root=ProcessId(7, 7), started_at=9.0, processes=(), ports=(8000,), **facts)  # type: ignore[arg-type]
    thresholds = Thresholds(window=6.0, stall_after=20.0, budgets={"compiling": 9.0})
    readings = (
        signals.CPU_SECONDS.read(12.25, "v", "TP0"),
        signals.OOM_KILLS.read(3),
        signals.READ_BYTES.missing("permission", "v", "TP0"),
    )
    event = Event(6.5, "v", "load_progress", "TP0", "server.log", {"done": 3.0, "total": 64.0})
    line = Event(7.0, "v", "novel", None, "server.log")

    header, facts_again, look, *events = written(
        header_line(5.0, 1.7e9, []),
        servers_line(5.0, [server_document(server, thresholds)]),
        look_line(5.0, "processes", 10.0, readings),
        event_line(6.5, event),
        event_line(7.0, line),
    )

    assert Header(5.0, (), 1.7e9) == header
    assert isinstance(facts_again, Facts)
    again = facts_again.servers[0]
    assert facts.items() <= {name: getattr(again.server, name) for name in facts}.items()
    assert (again.server.role, again.server.ports, again.log) == ("embedded", (8000,), False)
    assert again.thresholds is not None
    assert (
        again.thresholds.window,
        again.thresholds.stall_after,
        again.thresholds.budget("compiling"),
    ) == (6.0, 20.0, 9.0)
    assert Look(5.0, readings, 10.0) == look
    assert [event, line] == events


def test_a_value_json_has_no_word_for_is_one_that_cannot_be_read() -> None:
    text = look_line(5.0, "processes", 5.0, [signals.OOM_KILLS.read(float("nan"))])

    assert Look(5.0, (signals.OOM_KILLS.missing("error"),), 5.0) == written(header_line(5.0, 0.0, []), text)[1]


def test_words_of_an_event_are_of_closed_sets() -> None:
    fields: dict[str, float | str] = {"kind": "oom", "running": 3.0, "note": "hunter2", "ratio": float("inf")}
    fields["version"] = "hunter2"

    assert json.loads(event_line(1.0, Event(1.0, "s", "error", fields=fields)))["fields"] == {
        "kind": "oom",
        "running": 3.0,
    }


@pytest.mark.parametrize(
    ("seen", "parallel", "expected"),
    [(2, 2, ["TP0", "TP1"]), (1, 2, None), (0, 1, None)],
)
def test_ranks_are_named_only_when_all_are_known(seen: int, parallel: int, expected: list[str] | None) -> None:
    """Two of four that came are no list of those that are expected."""
    processes = tuple(Process(ProcessId(100 + number, 1), f"TP{number}") for number in range(seen))
    server = Server("s", "sglang", "server", ProcessId(1, 1), 0.0, processes, tensor_parallel=parallel)

    assert expected == server_document(server, Thresholds()).get("ranks")


@pytest.mark.parametrize(
    ("places", "log"),
    [
        ((), False),
        ((LogPlace("stdout", reason="absent"),), False),
        ((LogPlace("server.log", "/x"), LogPlace("stderr", reason="absent")), True),
        ((LogPlace("stdout", reason="permission"),), "unreadable"),
    ],
)
def test_the_header_says_whether_there_is_a_log(places: tuple[LogPlace, ...], log: bool | str) -> None:
    server = Server("s", "sglang", "server", ProcessId(1, 1), 0.0, (), logs=places)

    assert log == server_document(server, Thresholds())["log"]


def test_nothing_of_a_path_and_no_threshold_of_its_own_is_written() -> None:
    places = (LogPlace("server.log", "/home/hunter2/server.log"),)
    server = Server("s", "sglang", "server", ProcessId(1, 1), 0.0, (), logs=places, labels={"key": "hunter2"})

    assert "hunter2" not in json.dumps(server_document(server, Thresholds()))
    assert "verdict" not in server_document(server, Thresholds())
