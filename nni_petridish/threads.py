"""As many threads as the machine has cores for this process: set before torch is imported.

Two processes with two threads each on two cores spin against each other and run tens of times
slower than with one thread each.
"""

from __future__ import annotations

import os
import sys

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(concurrency: int) -> int:
    """Give this process its share of the cores; return the number of threads.

    Parameters
    ----------
    concurrency
        How many such processes run on this machine at the same time.
    """
    threads = max(1, cores() // max(1, concurrency))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        threads = min(threads, int(wanted))  # fewer is the user's choice, more would crawl
    for name in _VARIABLES:
        os.environ[name] = str(threads)
    # Where others use the cores too, threads that spin while they wait starve each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    return threads
