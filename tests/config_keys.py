"""Every key of the configuration file, told by the code itself: what it allows where an unknown one stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from stallwatch.config import load_config
from stallwatch.strict_yaml import InputError

SERVER = "servers: [{name: a, match: {port: 1}, "
TOP_PLACES = {
    "": "zzz: 1",
    "discovery.": "discovery: {zzz: 1}",
    "intervals.": "intervals: {zzz: 1}",
    "verdict.": "verdict: {zzz: 1}",
    "limits.": "limits: {zzz: 1}",
}
SERVER_PLACES = {
    "servers.": SERVER + "zzz: 1}]",
    "servers.match.": "servers: [{name: a, match: {port: 1, zzz: 1}}]",
    "servers.health.": SERVER + "health: {url: 'http://a', zzz: 1}}]",
}
PLACES = TOP_PLACES | SERVER_PLACES
"""Where a key can stand -> a configuration that is wrong just there."""


def keys_of(tmp_path: Path, text: str) -> set[str]:
    """The keys the configuration takes where `text` has the unknown key `zzz`, from its own error."""
    file = tmp_path / "wrong.yml"
    file.write_text(text)
    with pytest.raises(InputError, match="unknown key; allowed are ") as caught:
        load_config(file, ("sglang", "vllm", "generic"))
    return set(str(caught.value).partition("allowed are ")[2].split(", "))


def every_key(tmp_path: Path) -> set[str]:
    """With their place before them: `verdict.window`, `servers.match.port`."""
    return {place + key for place, text in PLACES.items() for key in keys_of(tmp_path, text)}
