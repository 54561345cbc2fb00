"""What a user without rights meets: a real EACCES, also where the tests run as root."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
_FILE_RIGHTS = (1 << 1) | (1 << 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: without them the mode of a file binds root too."""


@contextmanager
def without_file_rights() -> Iterator[None]:
    """This thread, and those it starts, may not read a file of mode 0; whoever is not root never may."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low then high

    def set_effective(low: int) -> None:
        words[0] = low
        if libc.capset(header, words) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    if libc.capget(header, words) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    before = words[0]
    set_effective(before & ~_FILE_RIGHTS)
    try:
        yield
    finally:
        set_effective(before)
