"""Several processes of this machine that share one piece of work."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from nni_petridish.errors import WorkerError

_POLL_SECONDS = 0.5


def run_in_processes(
    target: Callable[..., object],
    arguments: tuple[Any, ...],
    jobs: int,
    stop: Callable[[], bool],
    what: str,
) -> None:
    """Call ``target`` in so many processes and wait for them.

    Parameters
    ----------
    target, arguments
        The function that each process calls, as ``target(*arguments, jobs)``.
    jobs
        The number of processes.
    stop
        Asked regularly; true sends SIGTERM to the processes, once.
    what
        The name of the work, for the error if all processes fail.

    Raises
    ------
    WorkerError
        If all of them ended with an exit code other than 0 though ``stop`` did not ask for it.
    """
    # Not forked: torch's threads do not survive a fork, and each process sets their number.
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=target, args=(*arguments, jobs), daemon=True) for _ in range(jobs)
    ]
    for process in processes:
        process.start()
    asked = False
    while any(process.is_alive() for process in processes):
        if stop() and not asked:
            asked = True
            for process in processes:
                process.terminate()
        time.sleep(_POLL_SECONDS)
    if all(process.exitcode for process in processes) and not asked:
        codes = ", ".join(str(process.exitcode) for process in processes)
        raise WorkerError(f"All {jobs} processes of {what} ended early (exit codes {codes}).")
