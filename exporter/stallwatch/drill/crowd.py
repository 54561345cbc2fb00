"""The idle threads of an inference server: most sit in futex for ever, a few poll 100 times a second."""

from __future__ import annotations

import select
import threading

_STACK_BYTES = 256 << 10
POLL_SECONDS = 0.01


def start_crowd(sleepers: int, pollers: int) -> None:
    """Start `sleepers` threads that wait for a lock nobody releases and `pollers` that wake at 100 Hz.

    All are daemon threads; they end with the process.
    """
    never = threading.Lock()
    never.acquire()
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(sleepers):
            threading.Thread(target=never.acquire, daemon=True).start()
        for _ in range(pollers):
            threading.Thread(target=_poll, daemon=True).start()
    finally:
        threading.stack_size(before)


def _poll() -> None:
    poller = select.epoll()
    while True:
        poller.poll(POLL_SECONDS)


def wait_for_ever() -> None:
    """Block the calling thread in futex until the process ends (or a signal handler raises)."""
    never = threading.Lock()
    never.acquire()
    never.acquire()
