"""Epochs of NNI's evaluators: their number, and training with another number.

An evaluator runs as its user made it. A Lightning evaluator gets a new Trainer for each phase,
since a Trainer cannot fit twice. Of a function, only an argument named ``epochs`` is ever set.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nni_petridish.errors import ConfigError
from nni_petridish.nni_adapter.compat.nas import (
    Evaluator,
    FunctionalEvaluator,
    Lightning,
    MutableEvaluator,
    RegressionModule,
    Trainer,
)
from nni_petridish.nni_adapter.evaluators.processes import check_processes, reports_from_all

if TYPE_CHECKING:
    from nni_petridish.tasks.task import Task

__all__ = [
    "TaskEvaluator",
    "check_evaluator",
    "current_epoch",
    "is_minimized",
    "own_epochs",
    "run_evaluator",
    "seeded",
    "steps_per_epoch",
    "without_chatter",
]

_LIGHTNING_DEFAULT = 1000
"""Epochs of a Lightning Trainer without ``max_epochs``."""
_CHATTER = ("GPU avail", "TPU avail", "HPU avail", "💡 Tip", "`Trainer.fit` stopped: `max_epochs")


class TaskEvaluator(MutableEvaluator):
    """An evaluator with a task, which trains in its place under `Petridish`.

    Its training can be interrupted and continues from the last epoch. Subclasses must be decorated
    with ``nni.trace``.
    """

    @property
    def epochs(self) -> int:
        """Default number of epochs."""
        raise NotImplementedError

    def task(self, space: Any) -> Task:
        """Return the task of growing in a space."""
        raise NotImplementedError


def own_epochs(evaluator: Any) -> int:
    """Return the default number of epochs of an evaluator, 1 if it is not known."""
    if isinstance(evaluator, TaskEvaluator):
        return evaluator.epochs
    if isinstance(evaluator, Lightning):
        found = evaluator.trainer.max_epochs
        return _LIGHTNING_DEFAULT if found is None or found < 1 else int(found)
    if isinstance(evaluator, FunctionalEvaluator):
        parameter = inspect.signature(evaluator.function).parameters.get("epochs")
        found = evaluator.arguments.get("epochs", parameter and parameter.default)
        return found if isinstance(found, int) and found >= 1 else 1
    return 1


def check_evaluator(name: str, evaluator: Any, epochs: int | None) -> None:
    """Raise `ConfigError` unless this is an evaluator that can train a number of epochs."""
    if not isinstance(evaluator, Evaluator):
        raise ConfigError(f"the {name} evaluator must be an NNI evaluator but got {evaluator!r}.")
    labels = list(evaluator.simplify()) if isinstance(evaluator, MutableEvaluator) else []
    if labels:
        raise ConfigError(
            f"the {name} evaluator must have no choices of its own but has {', '.join(labels)}."
        )
    if isinstance(evaluator, Lightning):
        check_processes(name, evaluator.trainer)
    if epochs is not None and not _knows_epochs(evaluator):
        raise ConfigError(
            f"{name}_epochs can be set for Lightning evaluators and for functions with an argument"
            f" epochs, but the evaluator is {evaluator!r}; give a {name}_evaluator instead."
        )


def is_minimized(evaluator: Any) -> bool:
    """Return whether lower reports of an evaluator are better, as far as is known."""
    return isinstance(evaluator, Lightning) and isinstance(evaluator.module, RegressionModule)


def steps_per_epoch(evaluator: Any) -> int | None:
    """Return the number of steps of an epoch, None if it is not known."""
    try:
        return len(evaluator.train_dataloaders)
    except (AttributeError, TypeError):
        return None


def current_epoch(evaluator: Any) -> int | None:
    """Return the current epoch, counted from 1, None if it is not known."""
    if isinstance(evaluator, Lightning):
        return int(evaluator.trainer.current_epoch) + 1
    return None


def run_evaluator(evaluator: Any, net: nn.Module, epochs: int) -> int:
    """Train a network; return the number of epochs, 0 if it is not known."""
    if isinstance(evaluator, Lightning):
        return _run_lightning(evaluator, net, epochs)
    if isinstance(evaluator, FunctionalEvaluator) and _knows_epochs(evaluator):
        evaluator.function(net, **{**evaluator.arguments, "epochs": epochs})
        return epochs
    evaluator.evaluate(net)
    return 0


def _run_lightning(evaluator: Any, net: nn.Module, epochs: int) -> int:
    users = evaluator.trainer
    with without_chatter():
        evaluator.trainer = trainer = _new_trainer(users, epochs)
        try:
            with reports_from_all(trainer):
                evaluator.evaluate(net)
        finally:
            evaluator.trainer = users
    return int(trainer.current_epoch)


def _new_trainer(users: Any, epochs: int) -> Any:
    settings = {**users.trace_kwargs, "max_epochs": epochs}
    if settings.get("callbacks"):
        # Callbacks such as early stopping remember the last fit.
        settings["callbacks"] = copy.deepcopy(settings["callbacks"])
    return Trainer(**settings)


@contextmanager
def without_chatter() -> Iterator[None]:
    """Suppress Lightning's messages about hardware and tips, which every new Trainer repeats.

    The user's own Trainer has logged them once. Other messages are kept.
    """
    log = logging.getLogger("pytorch_lightning.utilities.rank_zero")

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_CHATTER)

    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all random generators that an evaluator may use, and restore them afterwards."""
    state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - users' code draws from it
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def _knows_epochs(evaluator: Any) -> bool:
    if isinstance(evaluator, FunctionalEvaluator):
        return "epochs" in inspect.signature(evaluator.function).parameters
    return isinstance(evaluator, Lightning | TaskEvaluator)
