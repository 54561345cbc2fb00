"""Failures of a read that say nothing of what was to be read, for a moment later it may succeed."""

from __future__ import annotations

import errno

_PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR, errno.EAGAIN))


def may_pass(error: OSError) -> bool:
    """No descriptor, no memory, an I/O error: whoever was asked for is neither gone nor hidden for that."""
    return error.errno in _PASSING
