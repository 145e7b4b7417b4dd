"""A process that trains: its threads, its memory, and the signals that end it.

Two processes with two threads each on two cores spin against each other and run tens of times
slower than with one thread each. Every entry point therefore sets the number of threads before
torch is imported, reduces a larger number that a user set, and lets waiting threads sleep early.
Memory that training frees is kept for the next step, in large pages.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CGROUPS = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)
_NEVER = 2**31 - 1
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 * 1024 * 1024
_RESERVED = 1024 * 1024 * 1024


def cores() -> int:
    """Return the number of cores that machine, affinity and container allow this process."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return max(1, math.ceil(min(found, container_cores(_CGROUPS))))


def container_cores(cgroups: Path) -> float:
    """Return the processor time per second that a container is given; infinite without a limit.

    Threads beyond it run, but are stopped for a part of every tenth of a second.
    """
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()  # version 2
    except (OSError, ValueError):
        try:
            quota = (cgroups / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroups / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return math.inf  # "max", or -1
    return int(quota) / int(period)


def per_machine(is_seed: bool, seeds: int, concurrency: int, machines: int = 1) -> int:
    """Return the number of growths on the machine of a growth, itself included.

    Parameters
    ----------
    is_seed
        Whether the growth trains a seed model: until one is ready, nothing else can run.
    seeds
        Number of seed models of the search.
    concurrency
        The number of growths that run at the same time, on all machines together.
    machines
        The number of machines.

    Examples
    --------
    >>> per_machine(is_seed=True, seeds=1, concurrency=4), per_machine(False, 1, 4, machines=2)
    (1, 2)
    """
    running = min(seeds, concurrency) if is_seed else concurrency
    return math.ceil(running / max(1, machines))


def set_threads(concurrency: int) -> int:
    """Give this process its share of the cores; return the number of threads.

    A smaller ``OMP_NUM_THREADS`` or setting of torch is kept; a larger one is reduced.

    Parameters
    ----------
    concurrency
        The number of such processes on this machine. Each of them may be several that torchrun
        started.
    """
    processes = max(1, concurrency) * _number("LOCAL_WORLD_SIZE", 1)
    threads = max(1, cores() // processes)
    threads = min(threads, _number("OMP_NUM_THREADS", threads))
    for name in _VARIABLES:
        os.environ[name] = str(threads)
    let_waiting_threads_sleep()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        threads = min(threads, torch.get_num_threads())
        torch.set_num_threads(threads)
    return threads


def let_waiting_threads_sleep() -> None:
    """Make idle OpenMP threads sleep instead of spin, so that they do not starve other processes.

    GNU's OpenMP, PyTorch's on Linux, first spins for about the time that Python needs between two
    kernels: to wake a sleeping thread takes longer. A policy that the user chose is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else otherwise


def keep_freed_memory() -> bool:
    """Make the allocator of this process keep freed memory; for processes that train.

    Each step of training frees the hundreds of megabytes that its activations took. glibc gives
    such memory back to the system and asks for it again in the next step, page by page: a step of
    weak learning was seen to spend a quarter of its time in page faults. And where pages are small,
    looking up where they are takes time too, about a twelfth of a step.

    Returns
    -------
    bool
        Whether it took effect, which needs glibc.
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
    """Advise the system to use huge pages where the heap will grow.

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


INTERRUPTED = 130
"""The exit code of a command that was stopped, as shells have it for Ctrl-C."""


def _say_stopping() -> None:
    print("\nStopping after this step...", file=sys.stderr)


class StopOnInterrupt:
    """A request to stop by SIGINT or SIGTERM, after the running step; a second one stops at once.

    Parameters
    ----------
    on_stop
        Called in the signal handler, at the first signal.

    Examples
    --------
    ::

        run_search(config, callbacks=Callbacks(should_stop=StopOnInterrupt().asked))
    """

    def __init__(self, on_stop: Callable[[], object] = _say_stopping) -> None:
        self._asked, self._on_stop = False, on_stop
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def asked(self) -> bool:
        """Return whether a signal has come."""
        return self._asked

    def _on_signal(self, number: int, frame: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._on_stop()


def interrupt_on_term() -> None:
    """Handle SIGTERM like Ctrl-C, so that no process of NNI is left behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
