"""The dashboards hold what Grafana's own types know, and nothing else: an option that is misspelled shows nowhere.

The types are those Grafana generates of its schema (grafana-foundation-sdk).  Reading a dashboard into them drops what
they do not know, so what comes back is compared; values are compared with the types that stand in their classes.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest

from grafana.evaluate import load

SDK = "grafana_foundation_sdk"
decoded = pytest.importorskip(f"{SDK}.models.dashboard").Dashboard.from_json
JSONEncoder = pytest.importorskip(f"{SDK}.cog.encoder").JSONEncoder
pytest.importorskip(f"{SDK}.cog.plugins").register_default_plugins()  # else options of panels are of no type

UIDS = ("stallwatch-fleet", "stallwatch-server", "stallwatch-node", "stallwatch-exporter")
OUTSIDE = {".templating.list[].definition"}
"""Written by Grafana itself when it saves a dashboard, and in no schema."""

TYPES_OF_VALUES: dict[object, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (int, float)}


def lost(given: Any, back: Any, path: str = "") -> Iterator[str]:
    """Places in `given` that `back` has not, or has otherwise."""
    if isinstance(given, dict) and isinstance(back, dict):
        for key, value in given.items():
            yield from lost(value, back[key], f"{path}.{key}") if key in back else (f"{path}.{key}",)
    elif isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        for value, other in zip(given, back, strict=True):
            yield from lost(value, other, f"{path}[]")
    elif given != back:
        yield path


def wrong(value: Any, kind: Any, path: str = "") -> list[str]:
    """Places in a decoded value that are not of this kind, or of the kinds that its classes name."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [each for each in inner if (each is type(None)) == (value is None)]
        return min((wrong(value, each, path) for each in kinds), key=len, default=[path])
    if origin is list and isinstance(value, list):
        return [place for each in value for place in wrong(each, inner[0], f"{path}[]")]
    if origin is dict and isinstance(value, dict):
        return [place for each in value.values() for place in wrong(each, inner[1], f"{path}{{}}")]
    if isinstance(value, dict) and hasattr(kind, "from_json"):  # some are left as they are
        return [*lost(value, encoded(kind.from_json(value)), path), *wrong(kind.from_json(value), kind, path)]
    if hasattr(type(value), "from_json"):
        hints = typing.get_type_hints(type(value))
        return [place for name, each in vars(value).items() for place in wrong(each, hints[name], f"{path}.{name}")]
    return [] if is_of(value, kind, origin, inner) else [path]


def is_of(value: Any, kind: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is typing.Literal:
        return value in inner
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value in [each.value for each in kind]
    if kind in TYPES_OF_VALUES:
        return isinstance(value, TYPES_OF_VALUES[kind]) and (kind is bool or not isinstance(value, bool))
    return kind in (object, typing.Any, type(None))


def encoded(read: Any) -> Any:
    return json.loads(JSONEncoder().encode(read))


def faults(dashboard: Any) -> set[str]:
    read = decoded(json.loads(json.dumps(dashboard)))
    return ({*lost(dashboard, encoded(read))} - OUTSIDE) | {*wrong(read, type(read))}


@pytest.mark.parametrize("uid", UIDS)
def test_grafana_knows_every_key_and_value(uid: str) -> None:
    assert faults(load(uid)) == set()


def first(dashboard: Any, kind: str) -> Any:
    return next(panel for panel in dashboard["panels"] if panel["type"] == kind)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda d: d.update(colour="red"), ".colour"),
        (lambda d: d.update(refresh=30), ".refresh"),
        (lambda d: d["templating"]["list"][0].update(sort=99), ".templating.list_val[].sort"),
        (lambda d: first(d, "timeseries").update(height="9"), ".panels[].height"),
        (lambda d: first(d, "timeseries")["options"].update(ledgend={}), ".panels[].options.ledgend"),
        (
            lambda d: first(d, "timeseries")["options"]["legend"].update(placement="left"),
            ".panels[].options.legend.placement",
        ),
        (lambda d: first(d, "timeseries")["targets"][0].update(exp="up"), ".panels[].targets[].exp"),
        (lambda d: first(d, "state-timeline")["options"].update(showValue="yes"), ".panels[].options.show_value"),
        (lambda d: first(d, "stat")["links"][0].update(newTab=True), ".panels[].links[].newTab"),
        (lambda d: first(d, "stat")["options"].update(graphMode=True), ".panels[].options.graph_mode"),
        (
            lambda d: first(d, "timeseries")["fieldConfig"]["defaults"]["custom"].update(lineWidth="2"),
            ".panels[].field_config.defaults.custom.line_width",
        ),
    ],
)
def test_what_grafana_does_not_know_is_found(change: Callable[[Any], None], place: str) -> None:
    dashboard = json.loads(json.dumps(load("stallwatch-server")))
    change(dashboard)

    assert faults(dashboard) == {place}
