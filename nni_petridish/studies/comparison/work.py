"""Carry out the runs of a comparison: `compare`, in this process or in several."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import TrainingError
from nni_petridish.gallery.files import make_folder
from nni_petridish.running.cost import check_limit
from nni_petridish.studies.comparison.progress import describe_run
from nni_petridish.studies.comparison.section import PLACE
from nni_petridish.studies.comparison.settings import GALLERY, RESULTS, RUNS, CompareRun, Comparison
from nni_petridish.studies.runs import Result, run_all, write_result

if TYPE_CHECKING:
    from nni_petridish.gallery.saved_model import SavedModel
    from nni_petridish.tasks.space_task import SpaceTask

WORK_FOLDERS = (f"{RUNS}/*", f"{RUNS}/*/{GALLERY}/work/*", f"{RUNS}/*/final/*")
"""Patterns of the folders with the reports of workers."""
OnRun = Callable[[CompareRun, Result | str], object]
"""Callback for every run that ends, with its result or the reason of its failure."""


def compare(
    config: str | os.PathLike[str] | Comparison,
    *,
    only: Iterable[str] | None = None,
    repeats: int | None = None,
    folder: str | None = None,
    pilot: bool = False,
    jobs: int = 1,
    stop: Callable[[], bool] = lambda: False,
    on_run: OnRun = lambda run, result: None,
) -> Comparison:
    """Run all methods with all random seeds, each for the compute that the first one takes.

    Finished runs are not repeated, interrupted ones go on.

    Parameters
    ----------
    config
        A configuration file, or the `Comparison` read from one.
    only
        Names of methods; all by default. The first one always runs.
    repeats, folder
        Replace those of the configuration.
    pilot
        Whether to run the pilot, with random seeds of its own.
    jobs
        Processes on this machine; with several a script needs ``if __name__ == "__main__":``. With
        one process per core each has one thread, and their processor times compare best.
    stop
        Asked before every training step; true ends the work.
    on_run
        Called with every run that ends, whichever of the jobs carried it out; with a failed one
        only when there is one job.

    Returns
    -------
    Comparison
        The comparison; `tables.to_markdown` makes a page of it.
    """
    comparison = config if isinstance(config, Comparison) else Comparison.from_yaml(config)
    comparison = comparison.change(only=only, repeats=repeats, folder=folder, pilot=pilot)
    prepare(comparison)
    what = "the comparison"
    run_all(
        comparison.runs, carry_out, describe_run, jobs=jobs, stop=stop, on_run=on_run, what=what
    )
    return comparison


def prepare(comparison: Comparison) -> None:
    """Check the limit and make the folders before anything is trained."""
    for name in comparison.methods:
        run = comparison.run(name, comparison.seeds[0])
        if not run.file.exists():
            check_limit(run.config, run.limit, f"{PLACE}.max_multiply_adds")
    for folder in (RUNS, RESULTS):
        make_folder(comparison.folder / folder)


def carry_out(run: CompareRun, stop: Callable[[], bool]) -> Result | None:
    """Run a method, test its best model and write the result; None if it was stopped."""
    import torch

    from nni_petridish.studies.comparison.methods import Assignment, method_of
    from nni_petridish.studies.comparison.trace import Trace, TracedTask, make_clock

    began = time.process_time()
    make_folder(run.folder)
    clock = make_clock(run.config.recipe.device)
    task: SpaceTask = run.config.load_task()  # type: ignore[assignment]
    method = method_of(run.method.kind)
    warm_up(task)
    trace = Trace(run.folder, run.budget, clock)
    earlier = trace.spent().seconds
    reference = None if run.reference is None else run.reference.result()
    given = Assignment(run, TracedTask(task, trace), trace, reference, stop, clock)
    best = method(given)
    if best is None:
        return None
    spent = trace.spent()
    net = best.build()
    result = {
        "method": run.name,
        "seed": run.seed,
        "budget": given.budget,
        "seconds": spent.seconds,
        "operations": spent.operations,
        "threads": torch.get_num_threads(),
        "untrained_error": _untrained_error(task, run.seed),
        "models": trace.models,
        "epochs": trace.epochs,
        "best": {k: v for k, v in best.facts.items() if k in _FACTS},
        "genotype": best.genotype.to_dict(),
        "test_error": task.test(net)["error"],
        "final": run.final and _train(run, best, stop),
    }
    result["total_seconds"] = earlier + time.process_time() - began
    write_result(run.file, result)
    return result


def warm_up(task: SpaceTask) -> None:
    """Train a few steps, so that imports and compiled kernels are in nobody's budget."""
    import torch

    from nni_petridish.core.grow import attach_candidates
    from nni_petridish.running.cost import step_seconds

    # A recipe under which training breaks down shows that in the run.
    with torch.random.fork_rng(), contextlib.suppress(TrainingError):
        net = task.build(task.seed())
        step_seconds(task, net, "seed")
        step_seconds(task, attach_candidates(net), "weak")
        task.evaluate(net)


_FACTS = ("id", "error", "multiply_adds", "parameters")


def _untrained_error(task: SpaceTask, seed: int) -> float:
    """Return the error of a seed model with fresh weights: that of a method without a model."""
    import torch

    torch.manual_seed(seed)
    return float(task.evaluate(task.build(task.seed()))["error"])


def _train(run: CompareRun, best: SavedModel, stop: Callable[[], bool]) -> dict[str, Any]:
    """Train the best model from scratch and test it."""
    from dataclasses import asdict, fields, replace

    from nni_petridish.registry import kind_of
    from nni_petridish.results.retrain.repetitions import run_repetitions
    from nni_petridish.tasks.task import Callbacks

    assert run.final is not None
    kind, config = kind_of(best.space), run.config
    # The size is that of the model as it was found.
    own = {f.name: best.space[f.name] for f in fields(kind.RETRAINING) if f.name in best.space}
    options = {**own, "epochs": run.final.epochs, "seed": run.seed}
    training = kind.make_retraining(best, (config.data, config.recipe), options, run.final.recipe)
    if run.final.limit is not None:
        training = replace(training, data={**training.data, "limit": run.final.limit})
    folder, callbacks = run.folder / "final", Callbacks(should_stop=stop)
    (result,) = run_repetitions(training, folder, callbacks=callbacks)
    return {
        "test_error": result[f"test_{training.measure.name}"],
        "multiply_adds": result["multiply_adds"],
        "parameters": result["parameters"],
        **asdict(run.final),
    }
