"""Memory that training frees is kept for the next step.

Each step of training frees the hundreds of megabytes that its activations took. glibc gives such
memory back to the system and asks for it again in the next step, page by page: a step of weak
learning was seen to spend a quarter of its time in page faults.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the allocator of this process to keep what is freed; for processes that train.

    Returns
    -------
    bool
        Whether it took effect: glibc only, elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return all(kept)
