"""The search of an estimator: in this process, in a gallery that lasts as long as it."""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import Interrupted, TrainingError
from nni_petridish.estimators.models import GrownModel
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.running.coordinator import Coordinator
from nni_petridish.running.process import StopOnInterrupt
from nni_petridish.running.worker import describe_failure, work_on
from nni_petridish.search.records import Growth, ModelRecord, Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import GrowthSettings, SearchSettings
from nni_petridish.tasks.arrays.spaces import describe_space
from nni_petridish.tasks.arrays.task import ArrayTask
from nni_petridish.tasks.task import Callbacks

_log = logging.getLogger(__name__)

ONE_AT_A_TIME = threading.RLock()
"""Held while a model grows: all threads draw from torch's one generator."""


def grow_models(
    task: ArrayTask,
    settings: SearchSettings,
    *,
    max_seconds: float | None = None,
    known: Sequence[GrownModel] = (),
    on_model: Callable[[ModelRecord], object] = lambda record: None,
    progress: bool = False,
) -> list[GrownModel]:
    """Run a search until its limits, Ctrl-C or SIGTERM, and return all its models.

    Parameters
    ----------
    task
        The task.
    settings
        The settings of the search.
    max_seconds
        Time after which a growth under way ends as well. The first model keeps the weights that it
        has by then, so that there is one; a limit of the settings would not even start it.
    known
        Models of an earlier search of the same space to go on from. They are measured again, since
        the examples may be others.
    on_model
        Called with each new model.
    progress
        Whether to show progress bars on a terminal.
    """
    with (
        _stopping(max_seconds) as should_stop,
        torch.random.fork_rng([]),
        tempfile.TemporaryDirectory(prefix="nni-petridish-") as folder,
    ):
        space = describe_space(task.space)
        gallery = Gallery.create(Path(folder) / "gallery", space, settings.identity())
        for model in known:
            _put(model, task, gallery)
        callbacks = Callbacks(should_stop=should_stop, progress=progress)
        search = _run(gallery, task, settings, callbacks, on_model)
        return [_take(record, gallery) for record in search.models()]


def _run(
    gallery: Gallery,
    task: ArrayTask,
    settings: SearchSettings,
    callbacks: Callbacks,
    on_model: Callable[[ModelRecord], object],
) -> Search:
    epochs = (settings.seed_epochs, settings.weak_epochs, settings.final_epochs)
    plan = GrowthSettings(*epochs, complexity=settings.complexity)
    with Coordinator(gallery, settings) as coordinator:
        search = coordinator.search
        while isinstance(answer := coordinator.ask(), Growth):
            if search.models() and callbacks.should_stop():
                break
            try:
                work_on(answer, gallery, lambda: task, plan, callbacks)
            except Interrupted:
                break
            except Exception as error:
                # The search drops the growth, or tries it once more.
                _log.info("%s failed: %s", answer.id, describe_failure(error))
            coordinator.sync()
            for record in search.models():
                if record.id == answer.id:
                    on_model(record)
        coordinator.sync()
        if not search.models():
            reasons = list(search.dropped().values())
            raise TrainingError(reasons[-1] if reasons else "no model was trained.")
        return search


def _put(model: GrownModel, task: ArrayTask, gallery: Gallery) -> None:
    net = model.build()
    measured = dict(task.evaluate(net))
    outcome = replace(Outcome.from_dict(model.outcome), error=measured["error"])
    documents = {
        "genotype": model.genotype,
        "metrics": outcome.to_dict(),
        "lineage": model.growth,
    }
    gallery.save_model(outcome.id, net.state_dict(), documents)


def _take(record: ModelRecord, gallery: Gallery) -> GrownModel:
    weights, documents = gallery.load_model(record.id)
    Genotype.from_dict(documents["genotype"])
    state = {name: np.array(value.numpy()) for name, value in weights.items()}
    return GrownModel(
        asdict(record.growth), record.outcome.to_dict(), documents["genotype"], gallery.space, state
    )


@contextmanager
def _stopping(max_seconds: float | None) -> Iterator[Callable[[], bool]]:
    """Return a function that tells whether the time is over or a signal has come.

    Only the main thread receives signals. A second one stops at once.
    """
    deadline = float("inf") if max_seconds is None else time.monotonic() + max_seconds
    if threading.current_thread() is not threading.main_thread():
        yield lambda: time.monotonic() >= deadline
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    asked = StopOnInterrupt().asked
    try:
        yield lambda: asked() or time.monotonic() >= deadline
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
