"""One trial: the searches of one setting, the reports of their growths, and their results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import optuna
from optuna.trial import Trial

from nni_petridish.errors import GalleryError, StorageError
from nni_petridish.gallery.files import make_folder
from nni_petridish.gallery.locks import ExclusiveLock
from nni_petridish.gallery.select import most_accurate, require_most_accurate
from nni_petridish.running.runner import run_search
from nni_petridish.search.search import Search
from nni_petridish.studies.tuning.queue import first_number
from nni_petridish.studies.tuning.settings import Tuning
from nni_petridish.tasks.task import Callbacks

SEARCHES, SECONDS = "searches", "seconds"
LOCK_FILE = ".trial.lock"


class Stopped(Exception):
    """The trial was asked to stop; it goes on later."""


@dataclass(frozen=True)
class SearchResult:
    """Result of one search.

    Parameters
    ----------
    seed
        The random seed of the search.
    model, error, multiply_adds
        The most accurate model within the limit.
    models
        The number of models of the search.
    hull
        The models on the hull, as (id, multiply-adds, error).
    gallery
        The path of its gallery in the folder of the study.
    """

    seed: int
    model: str
    error: float
    multiply_adds: int
    models: int
    hull: tuple[tuple[str, int, float], ...]
    gallery: str


def run_trial(tuning: Tuning, trial: Trial, stop: Callable[[], bool]) -> list[float]:
    """Run the searches of a trial and return its values; finished growths are not repeated.

    Raises
    ------
    Stopped
        If ``stop`` returned true.
    optuna.TrialPruned
        If the setting is not worth going on with; its galleries stay as they are.
    SearchError
        If a search made no model within the limit.
    """
    began = time.monotonic() - trial.user_attrs.get(SECONDS, 0.0)
    reporter = _Reporter(tuning, trial)
    name = f"trial-{first_number(trial):04d}"
    found: list[SearchResult] = []
    with _alone(tuning.folder / name, stop):
        for repeat in range(tuning.section.repeats):
            config = tuning.config(trial.params, tuning.folder / name / f"run-{repeat}", repeat)
            search = run_search(
                config,
                resume=True,
                callbacks=Callbacks(should_stop=stop),
                on_change=lambda search: reporter.report(search, found),
            )
            trial.set_user_attr(SECONDS, round(time.monotonic() - began, 1))
            if stop():
                raise Stopped
            found.append(_summary(search, tuning, config.settings.seed, f"{name}/run-{repeat}"))
            trial.set_user_attr(SEARCHES, [asdict(one) for one in found])
    error = statistics.fmean(one.error for one in found)
    size = statistics.fmean(one.multiply_adds for one in found)
    return [error, size] if tuning.section.multi_objective else [error]


class _Reporter:
    """Reports the best error after every growth to Optuna, and prunes the trial.

    With several searches in a trial, the value is the mean over the finished searches and the
    running one, so that values at the same step are comparable.
    """

    def __init__(self, tuning: Tuning, trial: Trial) -> None:
        self._section, self._trial = tuning.section, trial
        self._reported = 0
        self._last = tuning.config({}).settings.limits.max_models

    def report(self, search: Search, done: Sequence[SearchResult]) -> None:
        if self._section.multi_objective:
            return  # Optuna prunes single objectives only
        models = search.models()
        before = sum(one.models for one in done)
        for count in range(self._reported - before + 1, len(models) + 1):
            best = most_accurate(models[:count], self._section.max_multiply_adds)
            if best is not None:
                errors = [*(one.error for one in done), best.error]
                self._trial.report(statistics.fmean(errors), before + count - 1)
            self._reported = before + count
        # The last growth of the last search: there is nothing left to save.
        over = len(done) + 1 == self._section.repeats and len(models) == self._last
        if models and not over and self._trial.should_prune():
            raise optuna.TrialPruned


def _summary(search: Search, tuning: Tuning, seed: int, gallery: str) -> SearchResult:
    limit = tuning.section.max_multiply_adds
    best = require_most_accurate(search, limit, gallery)
    hull = tuple((r.id, r.multiply_adds, r.error) for r in search.hull())
    models = len(search.models())
    return SearchResult(seed, best.id, best.error, best.multiply_adds, models, hull, gallery)


@contextmanager
def _alone(folder: Path, stop: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock of a trial's folder; wait for a process that was taken for dead."""
    make_folder(folder)
    lock = ExclusiveLock(folder / LOCK_FILE, f"In {folder}")
    while True:
        try:
            lock.acquire()
            break
        except StorageError:
            raise
        except GalleryError:
            if stop():
                raise Stopped from None
            time.sleep(0.5)
    try:
        yield
    finally:
        lock.release()
