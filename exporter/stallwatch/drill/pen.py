"""Writes the lines of one process of a stand-in to its stdout."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from .telling import Speaker, Story

BLOCK_BYTES = 8 << 10
"""What libc and Python gather before they write to a file."""


@dataclass(slots=True)
class Pen:
    """Each line is one write() to a file opened for appending: lines of processes never mix.

    `buffered`: nothing is written before a block is full, as without PYTHONUNBUFFERED.
    """

    story: Story
    speaker: Speaker
    buffered: bool = False
    _kept: bytes = b""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.say_as(self.speaker, line)

    def say_as(self, speaker: Speaker, line: str) -> None:
        self.draw(self.story.stamp_line(datetime.now().astimezone(), line, speaker))

    def draw(self, text: str) -> None:
        """As it is, without a prefix."""
        if not self.buffered:
            os.write(1, text.encode())
            return
        with self._lock:
            self._kept += text.encode()
            if len(self._kept) >= BLOCK_BYTES:
                os.write(1, self._kept)
                self._kept = b""
