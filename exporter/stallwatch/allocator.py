"""What the C library does with memory that is given back: it keeps some, for more will be asked for in a moment.

glibc gives a block of 128 KiB or more back to the kernel at once, and takes a new one for the next, of which the kernel
clears every page when it is touched.  The pieces of logs that are read are of that size, and each is copied some times.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>."""
KEPT_BYTES = 1 << 20
"""So much may be free at the end of the memory of a thread; larger blocks than this go back to the kernel at once."""


def keep_freed() -> bool:
    """Have the C library keep what was freed; False where it is another one that has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(setting, KEPT_BYTES) == 1 for setting in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
