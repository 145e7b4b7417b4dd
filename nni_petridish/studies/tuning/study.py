"""Run a study: `tune`, in this process or in several."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from nni_petridish.errors import ConfigError, SearchError
from nni_petridish.running.cost import check_limit
from nni_petridish.running.process import StopOnInterrupt, set_threads
from nni_petridish.search.ranges import quiet
from nni_petridish.search.settings import check_number
from nni_petridish.studies.pool import run_in_processes
from nni_petridish.studies.tuning.queue import BEATS, Queue, TrialHeartbeat
from nni_petridish.studies.tuning.section import PLACE, TuningSettings
from nni_petridish.studies.tuning.settings import Tuning
from nni_petridish.studies.tuning.storage import open_study

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5

OnTrial = Callable[[FrozenTrial], object]
"""Callback for every trial that ends."""


@dataclass(frozen=True)
class _Objects:
    """Objects of Optuna that take the place of those that the settings name."""

    storage: BaseStorage | None = None
    sampler: BaseSampler | None = None
    pruner: BasePruner | None = None


_NO_OBJECTS = _Objects()


def _named(value: object) -> str | None:
    return value if isinstance(value, str) else None


def tune(
    config: str | os.PathLike[str] | Tuning,
    *,
    trials: int | None = None,
    storage: str | BaseStorage | None = None,
    study: str | None = None,
    jobs: int = 1,
    multi_objective: bool | None = None,
    sampler: str | BaseSampler | None = None,
    pruner: str | BasePruner | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_trial: OnTrial = lambda trial: None,
) -> optuna.Study:
    """Tune λ and I_max, and whatever else the configuration names: one trial is one whole search.

    A study that is there already is continued; several processes, on several machines if they
    share the folder, may call this with the same configuration at the same time.

    Parameters
    ----------
    config
        A configuration file, or the `Tuning` read from one.
    trials, storage, study, multi_objective, sampler, pruner
        Replace those of the configuration, see `TuningSettings`. Storage, sampler and pruner may be
        objects of Optuna, with one job.
    jobs
        Processes on this machine; each carries out one search at a time; with several a script
        needs ``if __name__ == "__main__":``.
    stop
        Asked before every training step; true ends the work, and what was begun goes on later.
    on_trial
        Called with every trial that ends, whichever of the jobs carried it out.

    Returns
    -------
    optuna.Study
        The study with the trials of all processes so far.

    Examples
    --------
    ::

        study = nni_petridish.tune("configs/tune.yml", trials=20, jobs=2)
        study.best_params, study.best_value
    """
    tuning = config if isinstance(config, Tuning) else Tuning.from_yaml(config)
    tuning = tuning.change(
        trials=trials,
        storage=_named(storage),
        study=study,
        multi_objective=multi_objective,
        sampler=_named(sampler),
        pruner=_named(pruner),
    )
    own = _Objects(
        storage=storage if isinstance(storage, BaseStorage) else None,
        sampler=sampler if isinstance(sampler, BaseSampler) else None,
        pruner=pruner if isinstance(pruner, BasePruner) else None,
    )
    check_number("jobs", jobs, 1, whole=True)
    jobs = min(jobs, tuning.section.trials)
    if jobs > 1 and own != _NO_OBJECTS:
        raise ConfigError(f"jobs must be 1 with own objects of Optuna but got {jobs}.")
    opened = open_study(tuning, storage=own.storage)
    if jobs == 1:
        work(tuning, stop, on_trial, own=own)
    else:
        look = _ended(opened, on_trial)
        run_in_processes(work_alone, (tuning,), jobs, lambda: look() or stop(), "the study")
        look()
    return opened


def _ended(study: optuna.Study, on_trial: OnTrial) -> Callable[[], None]:
    """Return a function that calls ``on_trial`` with the trials that ended since its last call."""
    ends = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    seen = {trial.number for trial in study.get_trials(deepcopy=False, states=ends)}

    def look() -> None:
        for trial in study.get_trials(deepcopy=False, states=ends):
            if trial.number not in seen:
                seen.add(trial.number)
                on_trial(trial)

    return look


def work(
    tuning: Tuning,
    stop: Callable[[], bool],
    on_trial: OnTrial = lambda trial: None,
    jobs: int = 1,
    own: _Objects = _NO_OBJECTS,
) -> None:
    """Carry out trials until none is left, or ``stop`` says so, as one of so many processes."""
    limit = tuning.section.max_multiply_adds
    check_limit(tuning.config(tuning.default()), limit, f"{PLACE}.max_multiply_adds")
    with quiet():
        study = open_study(tuning, storage=own.storage)
        study.pruner = own.pruner or make_pruner(tuning)
        queue = Queue(study, tuning, own.sampler)
        while not stop():
            trial = queue.take()
            if trial is None:
                if queue.is_done():
                    return
                # If another process dies, this one takes over its trial.
                time.sleep(_POLL_SECONDS)
                continue
            # Trials of other commands on this machine need their share of the cores, too.
            set_threads(max(jobs, queue.neighbors()))
            _carry_out(tuning, study, queue, trial, stop)
            if not stop():
                on_trial(study.trials[trial.number])


def _carry_out(
    tuning: Tuning, study: optuna.Study, queue: Queue, trial: Trial, stop: Callable[[], bool]
) -> None:
    from nni_petridish.studies.tuning.objective import Stopped, run_trial

    with TrialHeartbeat(trial, tuning.section.lost_after / BEATS) as heartbeat:
        try:
            values = run_trial(tuning, trial, lambda: stop() or heartbeat.is_given_up())
            study.tell(trial, values)
        except optuna.TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
        except (Stopped, KeyboardInterrupt) as error:
            queue.put_back(trial)
            if isinstance(error, KeyboardInterrupt):
                raise
        except UpdateFinishedTrialError:
            _log.warning("trial %d was taken over by another process.", trial.number)
        except SearchError as error:
            _log.warning("trial %d failed: %s", trial.number, error)
            trial.set_user_attr("failure", str(error))
            study.tell(trial, state=TrialState.FAIL)
        except Exception as error:
            # A defect, not a bad setting: no other trial would fare better.
            trial.set_user_attr("failure", repr(error))
            study.tell(trial, state=TrialState.FAIL)
            raise


def make_pruner(tuning: Tuning) -> optuna.pruners.BasePruner:
    """Return the pruner by its name; a step is one model of a search."""
    section: TuningSettings = tuning.section
    pruners = optuna.pruners
    if section.pruner == "none" or section.multi_objective:
        return pruners.NopPruner()
    if section.pruner == "hyperband":
        models = tuning.config(tuning.default()).settings.limits.max_models
        most: Any = "auto" if models is None else models * section.repeats
        return pruners.HyperbandPruner(min_resource=1, max_resource=most)
    # The seed model is the same for all settings of λ and I_max: it says nothing about them.
    return pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)


def work_alone(tuning: Tuning, jobs: int) -> None:
    """Work as one of several processes; SIGTERM and SIGINT end it and put its trial back."""
    set_threads(jobs)
    # The process that started this one speaks for all.
    work(tuning, StopOnInterrupt(on_stop=lambda: None).asked, jobs=jobs)
