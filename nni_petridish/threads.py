"""As many threads as the machine has cores for this process: set before torch is imported.

Two processes with two threads each on two cores spin against each other and run tens of times
slower than with one thread each. So every way in sets the number, a larger one that a user asks
for is cut, and threads that wait go to sleep soon.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CGROUPS = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return how many cores this process may use: of the machine, its affinity, its container."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return max(1, math.ceil(min(found, container_cores(_CGROUPS))))


def container_cores(cgroups: Path) -> float:
    """Return the processor time per second that a container is given; infinite without a limit.

    Threads beyond it are not refused but stopped for a part of every tenth of a second.
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
    """Return how many growths run on the machine of one, itself included.

    Parameters
    ----------
    is_seed
        Whether it trains a seed model: until one is ready there is nothing else to run.
    seeds
        Number of seed models of the search.
    concurrency
        How many growths run at the same time, on all machines together.
    machines
        How many there are.

    Examples
    --------
    >>> per_machine(is_seed=True, seeds=1, concurrency=4), per_machine(False, 1, 4, machines=2)
    (1, 2)
    """
    running = min(seeds, concurrency) if is_seed else concurrency
    return math.ceil(running / max(1, machines))


def set_threads(concurrency: int) -> int:
    """Give this process its share of the cores; return the number of threads.

    Fewer, by ``OMP_NUM_THREADS`` or torch's own setting, are the user's choice; more would crawl.

    Parameters
    ----------
    concurrency
        How many such processes run on this machine at the same time. Each of them may be several
        that torchrun started.
    """
    processes = max(1, concurrency) * _number("LOCAL_WORLD_SIZE", 1)
    threads = max(1, cores() // processes)
    threads = min(threads, _number("OMP_NUM_THREADS", threads))
    for name in _VARIABLES:
        os.environ[name] = str(threads)
    _let_waiting_threads_sleep()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        threads = min(threads, torch.get_num_threads())
        torch.set_num_threads(threads)
    return threads


def _let_waiting_threads_sleep() -> None:
    """Let them: where others use the cores too, threads that spin while they wait starve these.

    GNU's OpenMP, PyTorch's on Linux, first spins for about the time that Python needs between two
    kernels: to wake a sleeping thread takes longer. A policy that the user chose is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else otherwise
