"""What Prometheus kept of one exporter: the answer of its query API -> what every scrape held.  Pure.

See docs/REFERENCE.md, "From Prometheus back to a verdict".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..derived import PREFIX, REPORT_TIMESTAMP, SERVER_INFO
from ..model import Signal
from ..strict_yaml import InputError

LARGEST_ANSWER_BYTES = 1 << 30

Series = tuple[str, tuple[str, ...]]
"""Name of a signal, its labels."""

_BEGINNINGS = (b'{"status":', b'{"data":', b'{"resultType":')


@dataclass(slots=True)
class Scrape:
    """All samples of one scrape.  `at`: Unix time of the report it got, which the ages in it count to."""

    at: float
    values: dict[Series, float] = field(default_factory=dict)
    info: dict[str, Mapping[str, str]] = field(default_factory=dict)  # server -> the labels of its server_info


def is_answer(beginning: bytes) -> bool:
    """Whether a file that begins like this is an answer of Prometheus and no recording."""
    return beginning.lstrip()[:64].replace(b" ", b"").startswith(_BEGINNINGS)


def scrapes_of(file: str, text: bytes, signals: Mapping[str, Signal]) -> list[Scrape]:
    """Every report that was scraped, in order of time.  `signals`: all that are exported, by name.

    `file` is its name in the InputError that says what is wrong with the answer.
    """
    by_time: dict[float, Scrape] = {}
    instances: set[str] = set()
    for number, series in enumerate(_matrix(file, text)):
        where = f"data.result[{number}]"
        labels, samples = _series(file, where, series)
        name = labels.get("__name__", "")
        if not name.startswith(PREFIX):
            continue
        instances.add(labels.get("instance", ""))
        if len(instances) > 1:
            two = " and ".join(sorted(instances))
            raise InputError(file, 0, where, f"two instances, {two}: ask for one of them")
        _put(by_time, name.removeprefix(PREFIX), labels, samples, signals)
    found = _reports(by_time)
    if not found:
        problem = f"holds no {PREFIX}{REPORT_TIMESTAMP.name}: ask for all series of an instance, not for some"
        raise InputError(file, 0, "data.result", problem)
    return found


def _matrix(file: str, text: bytes) -> list[Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(file, 0, "", "is no whole answer of Prometheus: no JSON, or cut off") from None
    if isinstance(answer, dict) and answer.get("status") == "error":
        raise InputError(file, 0, "error", f"Prometheus answered: {str(answer.get('error'))[:200]}")
    found = answer.get("data", answer) if isinstance(answer, dict) else None
    if not isinstance(found, dict) or found.get("resultType") != "matrix" or not isinstance(found.get("result"), list):
        problem = 'a matrix is needed: ask /api/v1/query for a range, as in query={instance="node7:10077"}[2h]'
        raise InputError(file, 0, "data.resultType", problem)
    return list(found["result"])


def _series(file: str, where: str, series: Any) -> tuple[dict[str, str], list[tuple[float, float]]]:
    """Labels, and (Unix time, value)."""
    try:
        labels = {str(label): str(value) for label, value in series["metric"].items()}
        return labels, [(float(at), float(value)) for at, value in series["values"]]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise InputError(file, 0, where, "metric, and values of a time and a number, are needed") from None


def _put(
    by_time: dict[float, Scrape],
    name: str,
    labels: Mapping[str, str],
    samples: Sequence[tuple[float, float]],
    signals: Mapping[str, Signal],
) -> None:
    """Samples of one scrape have one time.  Labels that the signal does not have are Prometheus's own."""
    signal = signals.get(name)
    if signal is None:
        return
    series = name, tuple(labels.get(label, "") for label in signal.labels)
    for at, value in samples:
        if not math.isfinite(at) or not math.isfinite(value):
            continue
        scrape = by_time.setdefault(at, Scrape(at))
        if name == SERVER_INFO.name:
            scrape.info[labels.get("server", "")] = labels
        else:
            scrape.values[series] = value


def _reports(by_time: Mapping[float, Scrape]) -> list[Scrape]:
    """Those with a report; one that was scraped twice once."""
    found: list[Scrape] = []
    for _, scrape in sorted(by_time.items()):
        report = scrape.values.get((REPORT_TIMESTAMP.name, ()))
        if report is not None and (not found or report > found[-1].at):
            scrape.at = report
            found.append(scrape)
    return found
