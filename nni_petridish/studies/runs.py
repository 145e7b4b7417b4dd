"""The runs of a study: taken one by one, by one process or by several that share a folder.

A run is finished when its result is on the disk. An idle process takes the first run that is ready
and neither finished nor locked by another process. A lock ends with its process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nni_petridish._support.reading import read_json
from nni_petridish.errors import (
    GalleryError,
    Interrupted,
    SearchError,
    StorageError,
    TrainingError,
)
from nni_petridish.gallery.files import seal, unseal, write_file
from nni_petridish.gallery.locks import ExclusiveLock
from nni_petridish.running.process import StopOnInterrupt, set_threads
from nni_petridish.search.settings import check_number
from nni_petridish.studies.pool import run_in_processes

_POLL_SECONDS = 0.5


class Run(Protocol):
    """A piece of work with one result."""

    @property
    def file(self) -> Path:
        """The file of its result."""
        ...

    @property
    def folder(self) -> Path:
        """The folder it works in; its lock is beside it."""
        ...

    def is_ready(self) -> bool:
        """Return whether all that it depends on is finished."""
        ...


AnyRun = TypeVar("AnyRun", bound=Run)
Result = dict[str, Any]
CarryOut = Callable[[AnyRun, Callable[[], bool]], Result | None]
"""Carries out a run and writes its result; returns None if it was stopped."""
OnRun = Callable[[AnyRun, Result | str], object]
"""Callback for every run that ends, with its result or the reason of its failure."""
Describe = Callable[[AnyRun, Result | str], str]
"""Returns the outcome of a run in one line."""


def run_all(
    runs: Sequence[AnyRun],
    carry_out: CarryOut[AnyRun],
    describe: Describe[AnyRun],
    *,
    jobs: int,
    stop: Callable[[], bool],
    on_run: OnRun[AnyRun],
    what: str,
) -> None:
    """Carry out all runs that are not finished, in this process or in several.

    Parameters
    ----------
    runs
        The runs; several processes get copies of them.
    carry_out, describe
        Functions of a module, which other processes import.
    jobs
        Processes on this machine; each carries out one run at a time.
    stop
        Asked before every training step; true ends the work.
    on_run
        Called with every run that ends, whichever of the jobs carried it out; with a failed one
        only when there is one job. The others print what has failed.
    what
        The name of the work, for errors.
    """
    check_number("jobs", jobs, 1, whole=True)
    if jobs == 1:
        work(runs, carry_out, stop, on_run)
        return
    look = ended(runs, on_run)
    arguments = (runs, carry_out, describe)
    run_in_processes(_work_alone, arguments, jobs, lambda: look() or stop(), what)
    look()


def _work_alone(
    runs: Sequence[AnyRun], carry_out: CarryOut[AnyRun], describe: Describe[AnyRun], jobs: int
) -> None:
    """Work as one of several processes; SIGTERM and SIGINT end it after the running step."""
    set_threads(jobs)

    def tell(run: AnyRun, result: Result | str) -> None:
        # The process that started this one tells of results; of failures it knows nothing.
        if isinstance(result, str):
            print(describe(run, result), file=sys.stderr, flush=True)

    work(runs, carry_out, StopOnInterrupt(on_stop=lambda: None).asked, tell)


def work(
    runs: Sequence[AnyRun],
    carry_out: CarryOut[AnyRun],
    stop: Callable[[], bool],
    on_run: OnRun[AnyRun],
) -> None:
    """Carry out runs until none is left that can be, or ``stop`` says so."""
    failed: set[Path] = set()
    while not stop():
        left = [run for run in runs if not run.file.exists() and run.file not in failed]
        ready = [run for run in left if run.is_ready()]
        if not left or (failed and not ready and not _any_locked(left)):
            return
        if not any(_take(run, carry_out, stop, failed, on_run) for run in ready):
            time.sleep(_POLL_SECONDS)  # others are at work: should one of them die, it is for us


def ended(runs: Sequence[AnyRun], on_run: OnRun[AnyRun]) -> Callable[[], None]:
    """Return a function that calls ``on_run`` with the runs that ended since its last call."""
    left = {run.file: run for run in runs if not run.file.exists()}

    def look() -> None:
        for file, run in list(left.items()):
            result = read_result(file)
            if result is not None:
                del left[file]
                on_run(run, result)

    return look


def read_result(file: Path) -> Result | None:
    """Return the result of a finished run, None if it is not finished."""
    try:
        return unseal(read_json(file), file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GalleryError(f"{file} cannot be read: {error}.") from None


def write_result(file: Path, result: Result) -> None:
    """Write the result of a finished run, with a checksum."""
    write_file(file, seal(result))


def _lock(run: Run) -> ExclusiveLock:
    return ExclusiveLock(run.folder.with_name(f"{run.folder.name}.lock"), f"In {run.folder}")


def _any_locked(runs: Sequence[Run]) -> bool:
    """Return whether another process works on one of the runs, which others may depend on."""
    for run in runs:
        try:
            with _lock(run):
                pass
        except StorageError:
            raise
        except GalleryError:
            return True
    return False


def _take(
    run: AnyRun,
    carry_out: CarryOut[AnyRun],
    stop: Callable[[], bool],
    failed: set[Path],
    on_run: OnRun[AnyRun],
) -> bool:
    """Carry out a run unless another process has its lock; return whether it was free."""
    lock = _lock(run)
    try:
        lock.acquire()
    except StorageError:
        raise
    except GalleryError:
        return False
    with lock:
        if run.file.exists():
            return True
        try:
            result = carry_out(run, stop)
        except (SearchError, TrainingError) as error:
            failed.add(run.file)
            on_run(run, str(error))
            return True
        except Interrupted:
            return True
        if result is not None:
            on_run(run, result)
    return True
