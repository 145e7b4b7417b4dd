"""Carry out the runs of ablations: `ablate`, in this process or in several.

An interrupted run goes on from its last epoch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from nni_petridish.gallery.files import make_folder, to_json
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.select import require_most_accurate
from nni_petridish.running.cost import check_limit
from nni_petridish.studies.ablations.section import PLACE
from nni_petridish.studies.ablations.settings import RESULTS, SEARCHES, AblationRun, Ablations
from nni_petridish.studies.ablations.tables import describe_run
from nni_petridish.studies.runs import run_all, write_result

if TYPE_CHECKING:
    from nni_petridish.studies.ablations.section import RetrainingSettings

WORK_FOLDERS = (f"{SEARCHES}/*/*/work/*", f"{SEARCHES}/*/*/final/*/*")
"""Patterns of the folders with the reports of workers."""

OnRun = Callable[[AblationRun, dict[str, Any] | str], object]
"""Callback for every run that ends, with its result or the reason of its failure."""


def ablate(
    config: str | os.PathLike[str] | Ablations,
    *,
    only: Iterable[str] | None = None,
    repeats: int | None = None,
    folder: str | None = None,
    jobs: int = 1,
    stop: Callable[[], bool] = lambda: False,
    on_run: OnRun = lambda run, result: None,
) -> Ablations:
    """Run the searches of all variants and retrain their best models.

    Finished runs are not repeated, interrupted ones go on.

    Parameters
    ----------
    config
        A configuration file, or the `Ablations` read from one.
    only
        Names of tables; all of them by default.
    repeats, folder
        Replace those of the configuration.
    jobs
        Processes on this machine; each carries out one run at a time; with several a script
        needs ``if __name__ == "__main__":``.
    stop
        Asked before every training step; true ends the work.
    on_run
        Called with every run that ends, whichever of the jobs carried it out; with a failed one
        only when there is one job.

    Returns
    -------
    Ablations
        The ablations; `tables.table_rows` makes tables of them.
    """
    ablations = config if isinstance(config, Ablations) else Ablations.from_yaml(config)
    ablations = ablations.change(only=only, repeats=repeats, folder=folder)
    _prepare(ablations)
    what = "the ablations"
    run_all(ablations.runs, carry_out, describe_run, jobs=jobs, stop=stop, on_run=on_run, what=what)
    return ablations


def _prepare(ablations: Ablations) -> None:
    """Check all runs and make their folders before anything is trained."""
    checked = set()
    for run in ablations.runs:
        run.config.check_gallery()
        make_folder(run.config.gallery.parent)
        if run.file.exists() or (run.name, run.limit) in checked:
            continue
        checked.add((run.name, run.limit))
        check_limit(run.config, run.limit, f"{PLACE}.max_multiply_adds")
    make_folder(ablations.folder / RESULTS)


def carry_out(run: AblationRun, stop: Callable[[], bool]) -> dict[str, Any] | None:
    """Search, retrain the best model and write the result; None if the search was stopped."""
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
        "final": run.retraining and _train(run, run.retraining, best.id, stop),
    }
    write_result(run.file, result)
    return result


def _train(
    run: AblationRun, settings: RetrainingSettings, id: str, stop: Callable[[], bool]
) -> dict[str, Any]:
    from nni_petridish.results.retrain.preparation import prepare_retraining
    from nni_petridish.results.retrain.repetitions import run_repetitions
    from nni_petridish.tasks.task import Callbacks

    gallery = run.config.gallery
    options = {
        "cells_per_stage": settings.cells_per_stage,
        "filters": settings.filters,
        "epochs": settings.epochs,
        "seed": run.seed,
        "max_multiply_adds": settings.max_multiply_adds,
        "merge": settings.merge,
    }
    training = prepare_retraining(gallery, id, changes=settings.recipe, **options)
    if settings.limit is not None:
        training = replace(training, data={**training.data, "limit": settings.limit})
    # Other settings, other folder: those of an earlier configuration stay where they are.
    digest = hashlib.sha256(to_json([training.identity(), asdict(settings)])).hexdigest()[:8]
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
    """Return the seconds of all epochs of a search, interruptions left out."""
    histories = [gallery.load_documents(id)["history"] for id in ids]
    return sum(
        record["seconds"] for phases in histories for phase in phases.values() for record in phase
    )
