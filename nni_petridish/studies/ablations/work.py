"""Carry out the runs of ablations: `ablate`, in this process or in several.

A run is finished when its result is on the disk. Whoever has nothing to do takes the first run that
is neither finished nor locked by another process; a lock dies with its process, and what was begun
goes on from its last epoch.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import GalleryError, Interrupted, SearchError, TrainingError
from nni_petridish.gallery.files import to_json, write_file
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.locks import ExclusiveLock
from nni_petridish.gallery.select import require_most_accurate
from nni_petridish.running.cost import check_limit
from nni_petridish.running.process import StopOnInterrupt, set_threads
from nni_petridish.search.settings import check_number
from nni_petridish.studies.ablations.section import PLACE
from nni_petridish.studies.ablations.settings import RESULTS, Ablations, Run
from nni_petridish.studies.pool import run_in_processes

if TYPE_CHECKING:
    from nni_petridish.studies.ablations.section import Final

_POLL_SECONDS = 0.5

Told = Callable[[Run, dict[str, Any] | str], object]
"""Callback that gets a run that ended: its result, or why there is none."""


def ablate(
    config: str | os.PathLike[str] | Ablations,
    *,
    only: Iterable[str] | None = None,
    repeats: int | None = None,
    folder: str | None = None,
    jobs: int = 1,
    stop: Callable[[], bool] = lambda: False,
    on_run: Told = lambda run, result: None,
) -> Ablations:
    """Run the searches of all variants, and the final trainings of what they found.

    What is finished is not run again, what was interrupted goes on.

    Parameters
    ----------
    config
        A configuration file, or what `Ablations.from_yaml` read from one.
    only
        Names of tables; all of them by default.
    repeats, folder
        In place of the configuration's.
    jobs
        Processes on this machine; each carries out one run at a time; with several a script
        needs ``if __name__ == "__main__":``.
    stop
        Asked before every training step; true ends the work.
    on_run
        Called with every run that ends, when there is one job.

    Returns
    -------
    Ablations
        What `tables.table_rows` makes tables of.
    """
    ablations = config if isinstance(config, Ablations) else Ablations.from_yaml(config)
    ablations = ablations.change(only=only, repeats=repeats, folder=folder)
    check_number("jobs", jobs, 1, whole=True)
    _prepare(ablations)
    if jobs == 1:
        work(ablations, stop, on_run)
    else:
        run_in_processes(work_alone, (ablations,), jobs, stop, "the ablations")
    return ablations


def work(ablations: Ablations, stop: Callable[[], bool], on_run: Told) -> None:
    """Carry out runs until none is left, or ``stop`` says so."""
    failed: set[Path] = set()
    while not stop():
        left = [r for r in ablations.runs if not r.file.exists() and r.file not in failed]
        if not left:
            return
        if not any(_take(run, stop, failed, on_run) for run in left):
            time.sleep(_POLL_SECONDS)  # others are at work: should one of them die, it is for us


def work_alone(ablations: Ablations, jobs: int) -> None:
    """Be one of several processes; SIGTERM and SIGINT end it after the running step."""
    set_threads(jobs)
    from nni_petridish.studies.ablations.tables import describe_run

    def tell(run: Run, result: dict[str, Any] | str) -> None:
        print(describe_run(run, result), flush=True)

    work(ablations, StopOnInterrupt().asked, tell)


def _prepare(ablations: Ablations) -> None:
    """Raise, before anything is trained, if a run cannot be carried out."""
    checked = set()
    for run in ablations.runs:
        run.config.check_gallery()
        run.config.gallery.parent.mkdir(parents=True, exist_ok=True)
        if run.file.exists() or (run.name, run.limit) in checked:
            continue
        checked.add((run.name, run.limit))
        check_limit(run.config, run.limit, f"{PLACE}.max_multiply_adds")
    (ablations.folder / RESULTS).mkdir(parents=True, exist_ok=True)


def _take(run: Run, stop: Callable[[], bool], failed: set[Path], on_run: Told) -> bool:
    """Carry out a run unless another process is at it; tell whether anything was done."""
    gallery = run.config.gallery
    lock = ExclusiveLock(gallery.with_name(f"{gallery.name}.lock"), f"In {gallery}")
    try:
        lock.acquire()
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


def carry_out(run: Run, stop: Callable[[], bool]) -> dict[str, Any] | None:
    """Search, train what was found, and write the result; None if it was stopped in the search."""
    from nni_petridish.running.runner import run_search
    from nni_petridish.tasks.task import Callbacks

    search = run_search(run.config, resume=True, callbacks=Callbacks(should_stop=stop))
    if stop():
        return None
    where = f"{run.name}/{run.config.gallery.name}"
    best = require_most_accurate(search, run.limit, where)
    result = {
        "name": run.name,
        "seed": run.seed,
        "model": best.id,
        "validation_error": best.error,
        "multiply_adds": best.multiply_adds,
        "parameters": best.parameters,
        "models": len(search.models()),
        "seconds": _seconds(Gallery(run.config.gallery), [record.id for record in search.models()]),
        "final": run.final and _train(run, run.final, best.id, stop),
    }
    write_file(run.file, to_json(result))
    return result


def _train(run: Run, final: Final, id: str, stop: Callable[[], bool]) -> dict[str, Any]:
    from nni_petridish.results.retrain.preparation import prepare_retraining
    from nni_petridish.results.retrain.repetitions import run_repetitions
    from nni_petridish.tasks.task import Callbacks

    gallery = run.config.gallery
    options = {
        "cells_per_stage": final.cells_per_stage,
        "filters": final.filters,
        "epochs": final.epochs,
        "seed": run.seed,
        "max_multiply_adds": final.max_multiply_adds,
        "merge": final.merge,
    }
    training = prepare_retraining(gallery, id, changes=final.recipe, **options)
    if final.limit is not None:
        training = replace(training, data={**training.data, "limit": final.limit})
    # Other settings, other folder: those of an earlier configuration stay where they are.
    digest = hashlib.sha256(to_json([training.identity(), asdict(final)])).hexdigest()[:8]
    folder = gallery / "final" / f"{training.name}-{digest}"
    (result,) = run_repetitions(training, folder, callbacks=Callbacks(should_stop=stop))
    return {
        "test_error": result[f"test_{training.measure.name}"],
        "multiply_adds": result["multiply_adds"],
        "parameters": result["parameters"],
        **training.widths,
        training.examples: result[training.examples],
        "seconds": sum(record["seconds"] for record in result["history"]),
    }


def _seconds(gallery: Gallery, ids: list[str]) -> float:
    """Return how long the epochs of a search took, whatever interrupted it."""
    histories = [gallery.load_documents(id)["history"] for id in ids]
    return sum(
        record["seconds"] for phases in histories for phase in phases.values() for record in phase
    )
