"""Pictures of a study, by Optuna's own drawings."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, TrialState

from nni_petridish.gallery.files import make_folder, write_file
from nni_petridish.studies.tuning.objective import SEARCHES
from nni_petridish.studies.tuning.tables import completed, measure_of_study

_NAMES = ["error", "multiply-adds"]


def plot_study(study: optuna.Study, folder: Path, prefix: str = "") -> list[Path]:
    """Draw history, importance, contour and Pareto front, as far as there is enough to draw.

    Parameters
    ----------
    study
        The study.
    folder
        The folder of the pictures.
    prefix
        The beginning of their names.

    Returns
    -------
    list of Path
        The pictures.
    """
    study = _of_searches(study)
    done = completed(study)
    error: dict[str, Any] = {"target_name": measure_of_study(study)}
    if len(study.directions) > 1:
        error["target"] = lambda trial: trial.values[0]
    varied = [
        name
        for name in sorted({name for trial in done for name in trial.params})
        if len({trial.params.get(name) for trial in done}) > 1
    ]
    drawings = optuna.visualization.matplotlib
    wanted: dict[str, Callable[[], Any]] = {}
    if done:
        wanted["history"] = lambda: drawings.plot_optimization_history(study, **error)
        wanted["pareto"] = lambda: drawings.plot_pareto_front(
            study, targets=_error_and_size, target_names=_NAMES
        )
    # PED-ANOVA compares the best tenth with all: equal values leave nothing to compare.
    if len({trial.values[0] for trial in done}) > 1 and varied:
        wanted["importance"] = lambda: drawings.plot_param_importances(
            study, params=varied, **error
        )
    if len(done) > 2 and {"l1", "i_max"} <= set(varied):
        wanted["contour"] = lambda: drawings.plot_contour(study, params=["l1", "i_max"], **error)
    make_folder(folder)
    return [_draw(draw, folder / f"{prefix}{name}.png") for name, draw in wanted.items()]


def _of_searches(study: optuna.Study) -> optuna.Study:
    """Return the study without trials that other code has added: they have no searches."""
    trials = study.get_trials(deepcopy=False)
    ours = [t for t in trials if SEARCHES in t.user_attrs or t.state != TrialState.COMPLETE]
    if len(ours) == len(trials):
        return study
    kept = optuna.create_study(directions=study.directions)
    for name, value in study.user_attrs.items():
        kept.set_user_attr(name, value)
    kept.add_trials(ours)
    return kept


def _error_and_size(trial: FrozenTrial) -> tuple[float, float]:
    searches = trial.user_attrs[SEARCHES]
    sizes = [one["multiply_adds"] for one in searches]
    return trial.values[0], sum(sizes) / len(sizes)


def _draw(draw: Callable[[], Any], path: Path) -> Path:
    from matplotlib import pyplot

    with warnings.catch_warnings():
        # Every drawing of optuna.visualization.matplotlib is called experimental, since 2021.
        warnings.simplefilter("ignore", ExperimentalWarning)
        # With two objectives a target has to be named; that low errors are wanted is right.
        warnings.filterwarnings("ignore", "PedAnovaImportanceEvaluator computes", UserWarning)
        # Many equal errors make the parameters equally important: the picture shows that itself.
        warnings.filterwarnings("ignore", "Target and region quantiles select", UserWarning)
        axes = draw()
    figure = axes.figure if not hasattr(axes, "flat") else axes.flat[0].figure
    try:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    finally:
        pyplot.close(figure)
    write_file(path, buffer.getvalue())
    return path
