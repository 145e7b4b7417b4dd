"""Results of a study, as tables: the trials, the best, and the paper's two ablations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from nni_petridish.registry import kind_of, measure_of
from nni_petridish.results.report.tables import markdown_table, text_table
from nni_petridish.running.display import Headline
from nni_petridish.studies.tuning.objective import SEARCHES, SECONDS
from nni_petridish.studies.tuning.queue import first_number, live
from nni_petridish.studies.tuning.settings import Tuning
from nni_petridish.studies.tuning.storage import IDENTITY

Row = dict[str, str]
_SYMBOLS = {"l1": "λ", "i_max": "I_max"}


def trial_rows(study: optuna.Study) -> list[Row]:
    """Return one row per setting, in the order in which they were tried."""
    trials = sorted(live(study.get_trials(deepcopy=False)), key=first_number)
    names = list(study.user_attrs[IDENTITY]["space"])
    best = {trial.number for trial in best_trials(study)}
    measure = measure_of_study(study)
    return [_row(trial, names, trial.number in best, measure) for trial in trials]


def measure_of_study(study: optuna.Study) -> str:
    """Return the name of the number that the searches of a study minimize."""
    return measure_of(study.user_attrs[IDENTITY]["searchSpace"]).name


def best_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the best trial, or those on the Pareto front; of equal ones the first."""
    if len(study.directions) > 1:
        return sorted(study.best_trials, key=lambda trial: trial.values)
    done = completed(study)
    return [min(done, key=lambda trial: (trial.values[0], first_number(trial)))] if done else []


def completed(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials whose searches ran to their end."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def ablation_by_i_max(study: optuna.Study) -> list[Row]:
    """Return the average lowest error per I_max, as in the paper's ablation."""
    return _ablation(study, "I_max", lambda trial: trial.params.get("i_max"))


def ablation_by_l1(study: optuna.Study) -> list[Row]:
    """Return the average lowest error per λ; each λ counts for the nearest of its group's."""
    groups = kind_of(study.user_attrs[IDENTITY]["searchSpace"]).L1_GROUPS

    def nearest(trial: FrozenTrial) -> float | None:
        l1 = trial.params.get("l1")
        if l1 is None or l1 <= 0:
            return l1
        return min(groups, key=lambda value: abs(math.log(value / l1)))

    return _ablation(study, "λ", nearest)


def describe_trial(trial: FrozenTrial, names: Iterable[str], measure: str = "error") -> str:
    """Return the outcome of a trial in one line.

    Parameters
    ----------
    trial
        The trial.
    names
        The parameters to show, in this order.
    measure
        The name of the number that the searches minimize.
    """
    setting = ", ".join(
        f"{_SYMBOLS.get(name, name)}={_short(trial.params[name])}"
        for name in names
        if name in trial.params
    )
    if trial.state == TrialState.COMPLETE:
        result = "  ".join(_short(value) for value in trial.values)
        return f"trial {first_number(trial)}: {setting}: {measure} {result}"
    return f"trial {first_number(trial)}: {setting}: {trial.state.name.lower()}"


def headline_of(study: optuna.Study, tuning: Tuning) -> Headline:
    """Return the state of a study."""
    ended = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    found = [t for t in live(study.get_trials(deepcopy=False)) if t.state in ended]
    best = best_trials(study)
    text = f"best {tuning.measure.name} {best[0].values[0]:.4f}" if best else "no result yet"
    return Headline(len(found), tuning.section.trials, "trials", text, has_parts=False)


def to_text(rows: Sequence[Row]) -> str:
    """Return rows as a table for a terminal."""
    return text_table(rows) if rows else "nothing yet"


def to_markdown(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown."""
    return markdown_table(rows) if rows else "nothing yet"


def _row(trial: FrozenTrial, names: Sequence[str], is_best: bool, measure: str) -> Row:
    searches: list[dict[str, Any]] = trial.user_attrs.get(SEARCHES, [])
    errors = [one["error"] for one in searches]
    done = trial.state == TrialState.COMPLETE
    row = {"trial": str(first_number(trial))}
    for name in names:
        value = trial.params.get(name)
        row[_SYMBOLS.get(name, name)] = "-" if value is None else _short(value)
    row["state"] = trial.state.name.lower() + (" *" if is_best else "")
    row[measure] = f"{trial.values[0]:.4f}" if done else "-"
    if len(errors) > 1:
        row["each"] = " ".join(f"{error:.4f}" for error in errors)
    sizes = [one["multiply_adds"] for one in searches]
    row["multiply-adds"] = f"{statistics.fmean(sizes):,.0f}" if done and sizes else "-"
    row["models"] = str(len(trial.intermediate_values) or sum(one["models"] for one in searches))
    seconds = trial.user_attrs.get(SECONDS)
    row["seconds"] = "-" if seconds is None else f"{seconds:.0f}"
    return row


def _ablation(study: optuna.Study, name: str, key: Any) -> list[Row]:
    groups: dict[Any, list[FrozenTrial]] = {}
    for trial in completed(study):
        value = key(trial)
        if value is not None:
            groups.setdefault(value, []).append(trial)
    measure = measure_of_study(study)
    return [_ablation_row(name, value, groups[value], measure) for value in sorted(groups)]


def _ablation_row(name: str, value: Any, trials: Sequence[FrozenTrial], measure: str) -> Row:
    errors = [trial.values[0] for trial in trials]
    spread = f"{statistics.stdev(errors):.4f}" if len(errors) > 1 else "-"
    return {
        name: _short(value),
        f"average lowest {measure}": f"{statistics.fmean(errors):.4f}",
        "standard deviation": spread,
        "best": f"{min(errors):.4f}",
        "settings": str(len(errors)),
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
