"""Memory that is given back is kept for the next block of the kind, and no more of it than is said."""

from __future__ import annotations

import ctypes
import platform
import resource
import subprocess
import sys

import pytest

from stallwatch import allocator
from stallwatch.allocator import KEPT_BYTES

_BLOCK = 256 << 10
_PROBE = """
import ctypes, resource, sys, threading
from stallwatch import allocator

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page would be one fault for 512 pages

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def take(size, times):
    before = faults()
    for _ in range(times):
        held = [b"." * size for _ in range(3)]
        del held
    print(faults() - before)

def both():
    take({block}, 2)
    take({block}, 50)
    take({huge}, 50)

if sys.argv[1] == "kept" and not allocator.keep_freed():
    sys.exit("no such setting")
thread = threading.Thread(target=both)
thread.start()
thread.join()
"""


def _faults(how: str) -> list[int]:
    """Pages that were taken from the kernel: at first, for fifty more rounds, and for fifty rounds of huge blocks."""
    probe = _PROBE.format(block=_BLOCK, huge=2 * KEPT_BYTES)
    done = subprocess.run([sys.executable, "-c", probe, how], capture_output=True, text=True, timeout=60, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_block_that_was_freed_is_taken_again_without_the_kernel() -> None:
    pages = _BLOCK // resource.getpagesize()
    kept, plain = _faults("kept"), _faults("plain")

    assert kept[1] < pages
    assert plain[1] > 50 * pages  # else there is nothing to keep, and this module should go


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_what_is_larger_goes_back_at_once() -> None:
    assert _faults("kept")[2] >= 50 * 3 * 2 * KEPT_BYTES // resource.getpagesize()


def test_another_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())

    assert not allocator.keep_freed()
