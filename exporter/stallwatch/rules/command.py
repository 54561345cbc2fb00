"""`stallwatch rules`: the alert rules on stdout, or as files, with other values where asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from . import DEFAULT_FILES, OPTIONAL_FILES, RulesError, every_key, one_file, rule_files
from .kubernetes import prometheus_rule


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for."""

    names: tuple[str, ...] = ()
    settings: Mapping[str, str] | None = None
    without: tuple[str, ...] = ()
    folder: str | None = None
    for_kubernetes: bool = False


def settings_of(pairs: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` pairs as a mapping; the last one of a key holds.  RulesError for one that is no pair."""
    settings = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise RulesError(f"--set {pair!r} is no KEY=VALUE; stallwatch rules --keys lists the keys")
        settings[key] = value
    return settings


def list_keys(out: TextIO) -> int:
    for key, known in every_key().items():
        out.write(f"{key}={known.default}\n    {known.what}; {known.kind.allowed}\n")
    return 0


def write_rules(wanted: Wanted, out: TextIO) -> int:
    """One file: as it is.  Several: as one file that Prometheus loads, or each by itself in `folder`.

    RulesError says what is not known; OSError when a file cannot be written.
    """
    files = rule_files(wanted.names or _usual(wanted), wanted.settings, wanted.without)
    if wanted.folder is not None:
        folder = Path(wanted.folder)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            (folder / file.name).write_text(file.text(), encoding="utf-8")
    elif wanted.for_kubernetes:
        out.write(prometheus_rule(files))
    else:
        out.write(files[0].text() if len(files) == 1 else one_file(files))
    return 0


def _usual(wanted: Wanted) -> tuple[str, ...]:
    """Into a folder go all: there whoever loads them chooses."""
    return DEFAULT_FILES if wanted.folder is None else (*DEFAULT_FILES, *OPTIONAL_FILES)
