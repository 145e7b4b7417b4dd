"""Memory that training frees is kept for the next step, in large pages.

Each step of training frees the hundreds of megabytes that its activations took. glibc gives such
memory back to the system and asks for it again in the next step, page by page: a step of weak
learning was seen to spend a quarter of its time in page faults. And where pages are small, looking
up where they are takes time too, about a twelfth of a step.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)
_NEVER = 2**31 - 1
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 * 1024 * 1024
_RESERVED = 1024 * 1024 * 1024


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
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (AttributeError, OSError):
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), mallopt(_M_TRIM_THRESHOLD, _NEVER)
    if not all(kept):
        return False
    _use_huge_pages(libc)
    return True


def _use_huge_pages(libc: ctypes.CDLL) -> None:
    """Ask for huge pages where the heap will grow: a wish, which the system may not grant.

    The heap is made to grow by taking blocks of addresses and giving them back. No memory is used
    for that: pages come with the first write to them.
    """
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    blocks = [
        block
        for _ in range(_RESERVED // _LARGEST_MMAP_THRESHOLD)
        if (block := libc.malloc(ctypes.c_size_t(_LARGEST_MMAP_THRESHOLD - _HUGE_PAGE)))
    ]
    end = libc.sbrk(0) // _HUGE_PAGE * _HUGE_PAGE
    start = -(-min(blocks, default=end) // _HUGE_PAGE) * _HUGE_PAGE
    if start < end:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))
