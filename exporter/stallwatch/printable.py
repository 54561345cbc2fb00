"""Strings of foreign origin (titles, model names, labels) made safe to show: one rule for every way out."""

from __future__ import annotations

import re

MAX_BYTES = 128
"""Longest label value, in bytes of UTF-8: names of foreign origin must not make pages of any size."""

_UNSHOWABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, direction overrides (they can make a name read as another one), and
surrogates: what is left of bytes that were no UTF-8."""


def printable(text: str) -> str:
    """`text` with every character that cannot be shown replaced by `?`, cut to MAX_BYTES of UTF-8."""
    if text.isascii() and text.isprintable():
        return text[:MAX_BYTES]
    shown = _UNSHOWABLE.sub("?", text)
    return shown.encode()[:MAX_BYTES].decode(errors="ignore")
