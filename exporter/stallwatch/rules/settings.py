"""What `stallwatch rules --set KEY=VALUE` may change: the marked places of the rules, and three lines of each alert."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..strict_yaml import parse_duration

UNITS = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
"""Unit of a size -> the power of two it stands for."""


class Kind(NamedTuple):
    """A kind of value: what is allowed, in words, and whether a text is it."""

    allowed: str
    is_right: Callable[[str], bool]


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _is_duration(text: str) -> bool:
    try:
        parse_duration(text)
    except ValueError:
        return False
    return True


def _is_lasting(text: str) -> bool:
    return _is_duration(text) and parse_duration(text) > 0


def _is_share(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None and 0 < float(text) <= 1


# Values land in YAML, PromQL and templates: what could end a string in one of them is never allowed.
DURATION = Kind("a duration such as 0s, 90s, 5m or 1h30m", _is_duration)
LASTING = Kind("a duration above 0 such as 90s, 5m or 1h30m", _is_lasting)
COUNT = Kind("a whole number from 1 on", _matches(r"[1-9]\d{0,8}"))
SHARE = Kind("a number above 0, at most 1", _is_share)
SIZE = Kind(f"a whole number and a unit, one of {' '.join(UNITS)}", _matches(rf"[1-9]\d{{0,8}}({'|'.join(UNITS)})"))
WORD = Kind("a word of letters, digits and _ . / -", _matches(r"[A-Za-z0-9][A-Za-z0-9_./-]*"))
XIDS = Kind("numbers of Xids and ranges such as 14[4-9], parted by |", _matches(r"[0-9\[\]-]+(\|[0-9\[\]-]+)*"))
URL = Kind("an http:// or https:// address", _matches(r"https?://[A-Za-z0-9._~:/@%+,=?&-]+"))


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of `--set`: its shipped value, and what it is."""

    key: str
    default: str
    kind: Kind
    what: str


SETTINGS: Mapping[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("job", "stallwatch", WORD, "name of the scrape job"),
        Setting("dashboards", "https://grafana.example.com", URL, "where Grafana is: the base of dashboard_url"),
        Setting(
            "runbooks",
            "https://github.com/stallwatch/stallwatch/blob/main/rules/runbooks",
            URL,
            "folder of the runbooks: the base of runbook_url",
        ),
        Setting("suspect_after", "15m", LASTING, "age from which a server that is suspect is a warning"),
        Setting("killed_within", "3m", LASTING, "how near a server's own time-out must be to be told"),
        Setting("behind_share", "0.5", SHARE, "share of the weights by which a rank is behind the first"),
        Setting("restarts", "3", COUNT, "starts of a server within restarts_window that are a loop"),
        Setting("restarts_window", "30m", LASTING, "the time in which they are counted"),
        Setting("health_timeouts", "3", COUNT, "health requests without an answer within five minutes"),
        Setting("unmatched_share", "0.95", SHARE, "share of a log's lines that no pattern knows"),
        Setting("unmatched_lines", "200", COUNT, "lines within 15 minutes from which that share means something"),
        Setting("unowned_memory", "1GiB", SIZE, "memory of a card that nobody may hold"),
        Setting("shm_leftovers", "1GiB", SIZE, "bytes in /dev/shm that may belong to nobody"),
        Setting(
            "xids", "46|48|62|64|74|79|95|119|120|140|143|155|156|158", XIDS, "Xids that are faults of the card itself"
        ),
        Setting(
            "application_xids", "8|13|31|43|68|69|94|109|14[4-9]|150", XIDS, "Xids that are mostly the program's fault"
        ),
        Setting("xid_window", "10m", LASTING, "how long an Xid is news"),
        Setting("driver_call", "1m", LASTING, "how long a call into the GPU driver may run"),
        Setting("collector_call", "2m", LASTING, "how long a collector's call may run"),
        Setting("collector_silence", "5m", LASTING, "how long a collector may bring nothing"),
        Setting("stale_after", "2m", LASTING, "how old the newest report may be; at least one scrape interval"),
        Setting("raw_silence", "10m", LASTING, "raw.yml: how long a log may show no progress before the port is open"),
        Setting("raw_memory", "1GiB", SIZE, "raw.yml: memory on a GPU from which a server holds it"),
    )
}
"""Places in the texts marked `<<KEY>>` (as it is written) or `<<KEY:number>>` (as PromQL counts: seconds, bytes)."""

TIMINGS: Mapping[str, Kind] = {"for": DURATION, "keep_firing_for": DURATION, "severity": WORD}
"""Lines of an alert that may be set as `ALERT.LINE`."""


def number(setting: Setting, value: str) -> str:
    """A duration as seconds, a size as PromQL writes powers of two; others as they are."""
    if setting.kind is LASTING:
        return f"{parse_duration(value):g}"
    if setting.kind is SIZE:
        count, power = int(value[:-3]), UNITS[value[-3:]]
        return f"2^{power}" if count == 1 else f"{count} * 2^{power}"
    return value
