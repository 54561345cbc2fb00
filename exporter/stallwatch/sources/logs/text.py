"""One physical line taken apart: the bars drawn over each other in it, its text, and the figures a pattern found."""

from __future__ import annotations

import re

from ...frameworks import DOTS, NUMBER_FIELDS, quantity

CLASSIFIED_CHARACTERS = 16_384
"""Of a hit line only this much is matched; argument dumps are longer than anything else that matters."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_COUNT = rb"\d[\d.,]{0,20}[kKMGTP]?i?B?"
_BAR = re.compile(
    rb"(?:\[\w+\])?[^|\[\]]{0,160}\|[^\[\]]{0,100}?"
    + _COUNT
    + rb"/"
    + _COUNT
    + rb"(?: \[[^\]\n]{0,100}\]|,\s{1,3}[\d.?]{1,12}[kKMGTP]?i?B/s)(?:[^\S\r\n]|\x1b\[[0-9;]*[A-Za-z])*"
)
_DOTS = re.compile(rb"\.{2,}")
_DIGITS = b"0123456789"


def is_drawn(tail: bytes) -> bool:
    """Whether a line without an end is a bar: tqdm's, or dots that grow (llama.cpp)."""
    return (b"|" in tail and _BAR.match(tail) is not None) or _DOTS.fullmatch(tail) is not None


def pieces_of(line: bytes) -> list[bytes]:
    """A physical line taken apart.

    Of bars drawn over each other only the last counts; what another process wrote behind a bar that had no
    line end is a piece of its own.
    """
    if b"\r" not in line and not (b"|" in line and _BAR.match(line)):
        return [line]
    bars: dict[bytes, bytes] = {}
    pieces: list[bytes] = []
    for segment in line.split(b"\r"):
        bar = _BAR.match(segment)
        if bar:
            bars[bar[0].split(b":", 1)[0].translate(None, _DIGITS)] = bar[0]
            segment = segment[bar.end() :]
        if segment.strip():
            pieces.append(segment)
    return [*bars.values(), *pieces]


def text_of(piece: bytes) -> str:
    text = piece[:CLASSIFIED_CHARACTERS].decode("utf-8", "replace").lstrip("\0").rstrip("\r")
    return _ANSI.sub("", text) if "\x1b" in text else text


def groups_of(match: re.Match[str]) -> dict[str, str]:
    """The named groups that took part in a match."""
    if not match.re.groups:
        return {}
    return {name: text for name, text in match.groupdict().items() if text is not None}


def numbers_of(groups: dict[str, str]) -> dict[str, float | str]:
    """The numbers of a line; text that is no number, or one too long to be one, is as good as none."""
    fields: dict[str, float | str] = {}
    if not groups:
        return fields
    for name, text in groups.items():
        if name in NUMBER_FIELDS and (value := quantity(text)) is not None:
            fields["ratio" if name == "percent" else name] = value / 100 if name == "percent" else value
    if DOTS in groups:
        fields["ratio"] = min(1.0, len(groups[DOTS]) / 100)
    return fields
