"""Numbers as Grafana would write them, for the units that the dashboards use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime


def text_of(value: float, unit: str, decimals: int | None = None) -> str:
    """`4.6 mins`, `76.0 GiB`, `52 %`; an unknown unit is a plain number."""
    return _UNITS.get(unit, _plain)(value, decimals)


def _plain(value: float, decimals: int | None = None) -> str:
    return f"{value:.{decimals}f}" if decimals is not None else f"{value:.4g}"


def _scaled(value: float, step: float, names: tuple[str, ...]) -> str:
    place = 0
    while abs(value) >= step and place < len(names) - 1:
        value, place = value / step, place + 1
    return f"{value:.3g} {names[place]}".rstrip()


def _seconds(value: float, decimals: int | None = None) -> str:
    if abs(value) < 1 and value:
        return f"{value * 1000:.3g} ms"
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "mins")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g} s" if decimals is None else f"{value:.{decimals}f} s"


def _duration(value: float, decimals: int | None = None) -> str:
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (seconds, "s"))
    return " ".join(f"{number}{name}" for number, name in parts if number) or "0s"


_UNITS: Mapping[str, Callable[[float, int | None], str]] = {
    "s": _seconds,
    "dtdurations": _duration,
    "bytes": lambda value, _: _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB")),
    "Bps": lambda value, _: _scaled(value, 1000, ("B/s", "kB/s", "MB/s", "GB/s")),
    "hertz": lambda value, _: _scaled(value, 1000, ("Hz", "kHz", "MHz", "GHz")),
    "ops": lambda value, _: _scaled(value, 1000, ("/s", "K/s", "M/s")),
    "watt": lambda value, _: f"{value:.3g} W",
    "celsius": lambda value, _: f"{value:.3g} °C",
    "percentunit": lambda value, _: f"{value * 100:.3g} %",
    "dateTimeAsIso": lambda value, _: f"{datetime.fromtimestamp(value / 1000, UTC):%Y-%m-%d %H:%M:%S}",
}
