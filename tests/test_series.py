"""How many series a node has: every signal there is, of every subject that can have it, through the exposition.

A bound from above, so that a new signal is counted as soon as it exists.  Left out is what is there in trouble only
(locks, Xids, a debugger); not counted a second time are a server's second log (11 series) and the history of starts
(by model, not by server: here all servers serve one).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from page_node import MONOTONIC, NOW, server
from page_node import ranks as ranks_of
from stallwatch.catalogue import all_signals
from stallwatch.config import COLLECTORS
from stallwatch.derived import SIGNALS
from stallwatch.exposition import Exposition, own_process
from stallwatch.frameworks import load_frameworks
from stallwatch.model import (
    ERROR_KINDS,
    EVENTS,
    STARTUP_BUCKETS_SECONDS,
    WAITS,
    Reading,
    Report,
    ServerReport,
    Signal,
    SourceHealth,
    StartupHistogram,
)

CARDS = 8
(VLLM,) = (framework for framework in load_frameworks() if framework.name == "vllm")
"""It names more events than any other."""

BUDGETS = {(1, 8): 600, (8, 1): 1500, (2, 8): 1500, (8, 8): 2500}
"""(servers, ranks of each) -> series of the node's page."""

WORDS = {
    "log": ("stdout",),
    "port": ("8000",),
    "endpoint": ("health", "metrics"),
    "event": tuple(set(EVENTS) & {pattern.event for pattern in VLLM.patterns}),
    "wait": WAITS,
}
"""Label -> its values at one subject; of `kind` see below."""

KINDS = {
    "process_page_faults_total": ("major", "minor"),
    "log_errors_total": ERROR_KINDS,
    "server_child_processes": ("compiler", "other"),
    "server_child_cpu_seconds_total": ("compiler", "other"),
    "server_lock_age_seconds": (),
    "server_lock_held": (),
}

IN_TROUBLE = ("gpu_xid_errors_total", "gpu_xid_last_timestamp_seconds")
ONE_OF = {"main_thread": "futex", "port_connect": "ok"}
"""Signals of which only the present word is exported."""

OF_FRONT_ENDS = ("process_", "threads")
USUAL_WAITS = ("futex", "poll", "sleep")
"""What threads of a rank wait in at one time, or fewer (measured on vLLM and SGLang: two or three)."""


def values_of(signal: Signal, name: str, ranks: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The values of each label of a signal, for one server."""
    for label in signal.labels:
        if signal.name in ONE_OF and label in ("wait", "result"):
            yield (ONE_OF[signal.name],)
        elif label == "server":
            yield (name,)
        elif label == "rank":
            yield (*ranks, "frontend") if signal.name.startswith(OF_FRONT_ENDS) else ranks
        elif label == "kind":
            yield KINDS[signal.name]
        else:
            yield WORDS.get(label, ("x",))


def of_server(signal: Signal, name: str, ranks: tuple[str, ...]) -> Iterator[Reading]:
    for labels in itertools.product(*values_of(signal, name, ranks)):
        is_zero = signal.name == "rank_traced" or (signal.name == "threads" and labels[-1] not in USUAL_WAITS)
        yield signal.read(0.0 if is_zero else 1.0, *labels)


def readings(servers: int, ranks: int) -> Iterator[Reading]:
    names = tuple(f"TP{number}" for number in range(ranks))
    for signal in all_signals():
        if signal in SIGNALS:  # those are derived below, from the reports
            continue
        if "server" in signal.labels:
            for number in range(servers):
                yield from of_server(signal, f"vllm-{8000 + number}", names)
        elif "gpu" in signal.labels and signal.name not in IN_TROUBLE:
            for card in range(CARDS):
                yield signal.read(1.0, *(f"GPU-{card}" if label == "gpu" else "x" for label in signal.labels))
        elif not signal.labels:
            yield signal.read(1.0)


def report_of(number: int, ranks: int) -> ServerReport:
    found = server(f"vllm-{8000 + number}", of=ranks_of(ranks), framework="vllm")
    return replace(found, startup_seconds=90.0, similar={"no": (3, NOW)}, deadlines={"barrier": NOW})


def page(servers: int, ranks: int) -> bytes:
    counts = (1,) * (len(STARTUP_BUCKETS_SECONDS) + 1)
    report = Report(
        timestamp=NOW,
        monotonic=MONOTONIC,
        readings=tuple(readings(servers, ranks)),
        servers=tuple(report_of(number, ranks) for number in range(servers)),
        health=tuple(SourceHealth(name, True, 0.1, MONOTONIC, None) for name in COLLECTORS),
        read_errors={},
        startups=(StartupHistogram("vllm", "org/model-547b", "", counts, 1.0),),
        config_reload=(True, NOW),
        dropped={f"{what}_limit": 0 for what in ("servers", "ranks", "logs")},
    )
    return Exposition().page(report, own_process()).text(openmetrics=False)


def series(servers: int, ranks: int) -> list[str]:
    return [line for line in page(servers, ranks).decode().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(("servers", "ranks"), BUDGETS)
def test_a_node_has_no_more_series_than_its_budget(servers: int, ranks: int) -> None:
    assert len(series(servers, ranks)) <= BUDGETS[servers, ranks]


def test_every_signal_is_counted_but_those_of_trouble() -> None:
    """A metric that the test above does not know of would be free."""
    counted = {re.split(r"[{ ]", line, maxsplit=1)[0].removesuffix("_bucket") for line in series(1, 8)}

    known = [signal for signal in all_signals() if signal.labels[:1] != ("framework",)]  # the history of starts
    missing = {f"stallwatch_{signal.name}" for signal in known} - counted

    assert missing == {
        *(f"stallwatch_{name}" for name in IN_TROUBLE),
        *(f"stallwatch_{name}" for name, kinds in KINDS.items() if not kinds),
        "stallwatch_rank_suspect",
        "stallwatch_rank_traced",
        "stallwatch_server_similar_starts",
        "stallwatch_server_similar_start_timestamp_seconds",
    }


def test_a_rank_more_costs_what_a_rank_has() -> None:
    """The count is of the page and not of the test: it follows ranks and servers."""
    assert len(series(1, 9)) - len(series(1, 8)) == len(series(2, 9)) / 2 - len(series(2, 8)) / 2 > 15
