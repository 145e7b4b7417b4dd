"""Several processes of this machine at one piece of work that they share out among themselves."""

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
        What each process calls, as ``target(*arguments, jobs)``.
    jobs
        How many processes.
    stop
        True sends them SIGTERM, once.
    what
        The work, for the message if all of them fail.

    Raises
    ------
    WorkerError
        If all of them ended with an exit code other than 0 though ``stop`` did not ask for it.
    """
    # Not forked: torch's threads do not survive that, and each must set its own number of them.
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
