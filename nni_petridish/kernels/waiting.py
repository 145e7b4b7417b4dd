"""Threads of OpenMP on a busy machine: the C kernels use fewer, and those that wait sleep at once.

All threads of a kernel wait for the last one. If another process has its core, they wait for a
whole time slice, and those that spin meanwhile keep the last one from running on theirs: on two
cores a small network was seen to train a hundred times slower with two threads than with one.

The C kernels give the same results with any number of threads, bit by bit, so theirs follows what
the machine has to spare: `spare_threads`. The ops of torch do not: another number of threads
changes the rounding of their sums. How their threads wait does not change it.

GNU's OpenMP, PyTorch's on Linux, reads the number of turns to spin from the environment, once, when
torch is imported. But it lets threads sleep (almost) at once while a process has more of its
threads than there are cores. So if the machine is busy, a few more are started, which do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import torch

_STAT = Path("/proc/stat")
_SECONDS = 0.5
_BUSY = 0.3
"""Cores that are missing on a busy machine. One process beside two threads gets 0.67 of two."""
_CALM = 4
"""Number of measurements in a row without missing cores after which threads spin again."""
_missing = 0
"""Number of cores that others take from the threads of this process, as last seen."""
_IDLE_COLUMNS = (3, 4)  # idle, iowait
_COLUMNS = 8  # user to steal; guests are counted in user


def watch_the_machine() -> None:
    """Let the waiting threads of this process sleep while others need the cores; from now on.

    A thread in the background looks at the machine twice a second. Nothing happens with one thread,
    on other systems than Linux, or with ``OMP_WAIT_POLICY=ACTIVE``.
    """
    if sys.platform.startswith("linux") and torch.get_num_threads() > 1 and not _is_active():
        _start_watching(os.getpid())  # threads do not survive a fork


def spare_threads(threads: int) -> int:
    """Return how many of these threads the machine had to spare lately; at least 1.

    Without `watch_the_machine` all of them.
    """
    return max(1, threads - _missing) if _missing else threads


def _is_active() -> bool:
    return os.environ.get("OMP_WAIT_POLICY", "").strip().upper() == "ACTIVE"


@functools.cache
def _start_watching(process: int) -> None:
    try:
        # The runtime of torch, and any function that does nothing.
        process_symbols = ctypes.CDLL(None)
        start, nothing = process_symbols.GOMP_parallel, process_symbols.getpid
    except (AttributeError, OSError):  # another runtime
        return
    crowd = Crowd(lambda n: start(nothing, None, ctypes.c_uint(n), ctypes.c_uint(0)))
    threading.Thread(target=_watch, args=(crowd,), name="busy-machine", daemon=True).start()


class Crowd:
    """Idle threads of OpenMP beside those that compute.

    Parameters
    ----------
    start
        Runs a parallel region of this number of threads, the calling one included.
    """

    def __init__(self, start: Callable[[int], object]) -> None:
        self._start, self._leave = start, threading.Event()
        self._owner: threading.Thread | None = None

    @property
    def is_there(self) -> bool:
        """Whether the threads exist."""
        return self._owner is not None

    def come(self, threads: int) -> None:
        """Start this number of threads; they exist when the method returns."""
        ready = threading.Event()
        self._leave.clear()
        self._owner = threading.Thread(target=self._stay, args=(threads, ready), daemon=True)
        self._owner.start()
        ready.wait()

    def leave(self) -> None:
        """End the threads: they end with the thread that started them."""
        self._leave.set()
        if self._owner is not None:
            self._owner.join()
        self._owner = None

    def _stay(self, threads: int, ready: threading.Event) -> None:
        self._start(threads)
        ready.set()
        self._leave.wait()


def _watch(crowd: Crowd) -> None:
    """Let the crowd come while the machine is busy, and `spare_threads` follow."""
    global _missing
    judgment = Judgment()
    with contextlib.suppress(OSError, ValueError, LookupError):  # a system without the counters
        usage = Usage.now()
        while True:
            time.sleep(_SECONDS)
            before, usage = usage, Usage.now()
            threads = torch.get_num_threads()
            missing = usage.missing_cores(before, threads)
            is_busy = judgment.after(missing)
            _missing = max(1, math.ceil(missing - _BUSY)) if is_busy else 0
            if is_busy and not crowd.is_there:
                # With the threads that compute: one more than there are cores.
                crowd.come(max(2, usage.cores - threads + 2))
            elif crowd.is_there and not is_busy:
                crowd.leave()


class Judgment:
    """Whether the machine is busy: at once if cores are missing, and until none was for a while."""

    def __init__(self) -> None:
        self._is_busy, self._calm = False, 0

    def after(self, missing_cores: float) -> bool:
        """Return whether the machine is busy, given one more measurement."""
        self._calm = 0 if missing_cores > _BUSY else self._calm + 1
        self._is_busy = self._calm == 0 or (self._is_busy and self._calm < _CALM)
        return self._is_busy


class Usage(NamedTuple):
    """Processor time, in seconds, up to a moment."""

    moment: float
    cores: int
    """Number of cores that this process may use."""
    all: float
    """Time that anyone used on these cores; what a hypervisor took away counts too."""
    own: float
    """Time that this process used."""

    @classmethod
    def now(cls) -> Usage:
        """Read the counters of the system."""
        allowed = os.sched_getaffinity(0)
        busy = busy_ticks(_STAT.read_text(), allowed) / os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), len(allowed), busy, time.process_time())

    def missing_cores(self, since: Usage, threads: int) -> float:
        """Return the number of cores by which others restrict these threads; negative for none."""
        others = (self.all - since.all) - (self.own - since.own)
        return others / (self.moment - since.moment) + threads - self.cores


def busy_ticks(stat: str, cores: Collection[int]) -> int:
    """Return the ticks in which these cores were busy, from the text of ``/proc/stat``.

    Examples
    --------
    >>> busy_ticks("cpu0 1 2 3 40 50 6 7 8 9 10", [0])
    27
    """
    lines = {fields[0]: fields[1:] for fields in map(str.split, stat.splitlines()) if fields}
    return sum(
        int(ticks)
        for core in cores
        for column, ticks in enumerate(lines[f"cpu{core}"][:_COLUMNS])
        if column not in _IDLE_COLUMNS
    )
