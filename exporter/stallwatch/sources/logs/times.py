"""Times as logs print them: a date or none, a year or none, seconds since the process began.

Only differences of two of them mean anything.  What is no time is None; nothing raises.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import lru_cache

_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,6}))?"
_TIMES = tuple(
    re.compile(form + _CLOCK)
    for form in (
        r"(?:(?P<year>\d{4})-)?(?P<month>\d\d)-(?P<day>\d\d)[ T]",
        r"(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>\d{4})-",  # TensorRT-LLM: 12/20/2025-04:21:37
        r"(?P<month>\d\d)(?P<day>\d\d) ",  # C++ loggers: 1220 04:21:37.000123
    )
)
_UPTIME = re.compile(r"(\d{1,6})\.(\d\d)\.(\d{3})\.(\d{3})")
"""Minutes, seconds, milli- and microseconds since the process began, as llama.cpp prints them."""
_TOO_LONG_AGO = -300 * 86400.0
_EPOCH = datetime(2000, 1, 1)
_NO_YEAR = 366 * 86400.0
"""A time below it was printed without a year, or is one since the process began."""


@lru_cache(maxsize=1024)
def parse_time(text: str) -> float | None:
    """Seconds of a printed local time; without a year it is taken as a leap year.  None when it is none."""
    if (
        len(text) <= 19
        and text[-3:-2] == ":"
        and (second := text[-2:]).isascii()
        and second.isdigit()
        and second < "60"
    ):
        minute = _parse_time(f"{text[:-2]}00")  # the same for sixty seconds
        return None if minute is None else minute + int(second)
    return _parse_time(text)


@lru_cache(maxsize=256)
def _parse_time(text: str) -> float | None:
    if match := _UPTIME.fullmatch(text):
        minutes, seconds, milliseconds, microseconds = map(int, match.groups())
        return minutes * 60 + seconds + milliseconds / 1e3 + microseconds / 1e6
    match = next((match for form in _TIMES if (match := form.search(text))), None)
    if match is None:
        return None
    month, day, hour, minute, second = (int(match[part]) for part in ("month", "day", "hour", "minute", "second"))
    year, fraction = (match.groupdict().get(part) for part in ("year", "fraction"))
    try:
        moment = datetime(int(year or 2000), month, day, hour, minute, second)
    except ValueError:
        return None
    return (moment - _EPOCH).total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)


def on_one_scale(earlier: float, later: float) -> tuple[float, float]:
    """Two printed times; where one has no year and the other has, that one gets the year that brings them nearest."""
    undated = (0 <= earlier < _NO_YEAR, 0 <= later < _NO_YEAR)
    if undated == (True, False):
        return _dated(earlier, later), later
    if undated == (False, True):
        return earlier, _dated(later, earlier)
    return earlier, later


def _dated(time: float, near: float) -> float:
    try:
        moment, year = _EPOCH + timedelta(seconds=time), (_EPOCH + timedelta(seconds=near)).year
    except OverflowError:
        return time
    last_day = 28 if (moment.month, moment.day) == (2, 29) else moment.day  # is there in every year
    years = range(max(1, year - 1), min(9999, year + 1) + 1)
    times = [
        (moment.replace(year=year, day=last_day) - _EPOCH).total_seconds() + (moment.day - last_day) * 86400.0
        for year in years
    ]
    return min(times, key=lambda time: abs(time - near))


def seconds_between(earlier: float, later: float) -> float:
    """Of two printed times; a turn of the year without a year is seen, a clock set back counts as 0."""
    earlier, later = on_one_scale(earlier, later)
    difference = later - earlier
    return difference + 366 * 86400 if difference < _TOO_LONG_AGO else max(0.0, difference)
