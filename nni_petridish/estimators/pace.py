"""The length of the trainings of a search, so that several models fit into its time."""

from __future__ import annotations

import time
from dataclasses import replace

from torch import nn

from nni_petridish.core.grow import attach_candidates
from nni_petridish.tasks.arrays.task import ArrayTask
from nni_petridish.tasks.arrays.training import Examples, fit, steps_per_epoch

_STEPS = 400
"""Steps of a seed model, as far as the bounds on its epochs allow."""
_EPOCHS = (5, 100)
_GROWTHS = 3
"""Growths that a time limit leaves room for, unless fewer are asked for."""
_SHARE = 0.8
"""The share of the time that is planned: steps are timed before others join the machine."""
_TIMED = 3
"""Steps that are timed."""
_FEWEST = 20
"""The least number of steps of a seed model."""
_GROWN = 1.5
"""A step of a grown network in steps of the seed, about."""


def paced(task: ArrayTask, max_models: int, seconds: float | None) -> tuple[ArrayTask, int]:
    """Return the task, with shorter epochs if time is short, and the epochs of a seed model.

    A model whose training is cut off by the time limit is worth little, since its learning rate has
    not come down. So the length of all trainings is planned beforehand.

    Parameters
    ----------
    task
        The task of the search.
    max_models
        The largest number of models.
    seconds
        The time of the search, or None.
    """
    epochs = min(max(_STEPS // task.steps(1), _EPOCHS[0]), _EPOCHS[1])
    if seconds is None:
        return task, epochs
    growths = min(max_models - 1, _GROWTHS)
    net = task.space.build(task.space.seed())
    plain = _seconds_of_a_step(net, task)
    weak = _seconds_of_a_step(attach_candidates(net), task) if growths else 0.0
    # A growth takes half of the steps with candidates and half of them without.
    one_step_each = plain + growths * (weak + _GROWN * plain) / 2
    steps = max(_FEWEST, int(_SHARE * seconds / one_step_each))
    if steps >= task.steps(epochs):
        return task, epochs
    return replace(task, epoch_steps=max(1, steps // epochs)), epochs


def _seconds_of_a_step(net: nn.Module, task: ArrayTask) -> float:
    batch = task.recipe.batch_size
    _train(net, task, batch)  # the first step compiles kernels and allocates
    began = time.monotonic()
    steps = _train(net, task, _TIMED * batch)
    return (time.monotonic() - began) / steps


def _train(net: nn.Module, task: ArrayTask, n: int) -> int:
    every = task.training
    few = Examples(every.inputs[:n], every.targets[:n], every.weights[:n])
    fit(net, few, replace(task.recipe, epochs=1), seed=0)
    return steps_per_epoch(len(few), task.recipe.batch_size)
