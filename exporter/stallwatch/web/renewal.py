"""Looks every two seconds whether the web configuration or a certificate changed, and reads them again.

On a thread of its own: a dead mount below a key holds nothing else up.  What is wrong changes nothing, and is
logged once.
"""

from __future__ import annotations

import logging
import threading

from .access import Access, InputError, load_access, stamp, takes_away

LOOK_SECONDS = 2.0

log = logging.getLogger(__name__)


class Renewal:
    """`access` is the one that holds; assigned whole, read by the HTTP thread."""

    def __init__(self, file: str) -> None:
        """InputError when the file is wrong: then there is nothing to fall back to."""
        self._file = file
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.access: Access = load_access(file)

    def current(self) -> Access:
        return self.access

    def start(self) -> None:
        threading.Thread(target=self._run, name="web-config", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> str | None:
        """Read again if anything changed, or the last try failed; returns what is wrong, or None."""
        with self._lock:
            seen = self.access.seen
            if self._problem is None and all(stamp(path) == before for path, before in seen.items()):
                return None
            problem = self._read()
            if problem is not None and problem != self._problem:
                log.error("web configuration not reloaded", extra={"problem": problem})
            self._problem = problem
            return problem

    def _read(self) -> str | None:
        try:
            new = load_access(self._file)
        except InputError as error:
            return str(error)
        lost = takes_away(new, self.access)
        if lost is not None:
            return f"{self._file}: {lost}"
        self.access = new
        log.info("web configuration reloaded")
        return None
