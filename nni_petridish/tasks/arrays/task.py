"""Arrays in memory as a task: a space, weighted examples and a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from nni_petridish.core.complexity import count_multiply_adds
from nni_petridish.core.space import Space
from nni_petridish.errors import DataError, Interrupted
from nni_petridish.registry import ERROR, Measure
from nni_petridish.tasks.arrays.training import (
    ArrayRecipe,
    Examples,
    evaluate,
    fit,
    steps_per_epoch,
)
from nni_petridish.tasks.loop import History, LoopOptions
from nni_petridish.tasks.space_task import SpaceTask
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record

SQUARED_ERROR = Measure("squared error", is_share=False)


@dataclass(frozen=True)
class ArrayTask(SpaceTask):
    """Classification of arrays in memory.

    Parameters
    ----------
    space
        The space of networks.
    training, validation
        The examples.
    recipe
        The recipe of training; its number of epochs is replaced by that of each phase.
    facts
        What a user of a model must know of the data, as plain data.
    checkpoints
        Whether to write the checkpoints that a growth asks for.
    testing
        The test examples, if there are any.
    epoch_steps
        The largest number of steps of an epoch, see `fit`; by default all examples are shown.
    """

    space: Space
    training: Examples
    validation: Examples
    recipe: ArrayRecipe
    facts: dict[str, Any] = field(default_factory=dict)
    checkpoints: bool = True
    testing: Examples | None = None
    epoch_steps: int | None = None

    measure: ClassVar[Measure] = ERROR

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        """Train by the recipe.

        A seed model that is asked to stop keeps the weights it has, so that there is a model at any
        time.
        """
        if not self.checkpoints:
            phase = replace(phase, checkpoint=None)
        try:
            return super().train(net, phase, callbacks)
        except Interrupted:
            if phase.name != "seed":
                raise
            return []

    def _fit(
        self, net: nn.Module, recipe: ArrayRecipe, seed: int, **options: Unpack[LoopOptions]
    ) -> History:
        return fit(
            net,
            self.training,
            recipe,
            seed=seed,
            validation=self.validation,
            epoch_steps=self.epoch_steps,
            **options,
        )

    def steps(self, epochs: int) -> int:
        """Return the number of steps in so many epochs."""
        batch_size = self.recipe.batch_size
        return epochs * steps_per_epoch(len(self.training), batch_size, self.epoch_steps)

    def evaluate(self, net: nn.Module) -> Record:
        """Return error and loss on the validation examples."""
        return evaluate(net, self.validation)

    def test(self, net: nn.Module) -> Record:
        """Return error and loss on the test examples."""
        if self.testing is None:
            raise DataError("the task has no test examples.")
        return evaluate(net, self.testing)

    def operations(self, net: nn.Module, epochs: int) -> int:
        """Return the forward multiply-adds of so many epochs, candidates included."""
        shape = self.training.inputs.shape[1:]
        share = self.steps(1) / steps_per_epoch(len(self.training), self.recipe.batch_size)
        shown = round(share * len(self.training))
        return epochs * shown * count_multiply_adds(net, shape, candidates=True)

    def data_facts(self) -> dict[str, Any]:
        """Return the facts of the data."""
        return self.facts

    def validation_losses(self, net: nn.Module) -> Iterator[Tensor]:
        """Yield differentiable parts of the validation loss, which is their sum."""
        total = self.validation.weights.sum()
        for chosen in self.validation.batches():
            outputs = net(self.validation.inputs[chosen])
            yield self.validation.losses(outputs, chosen).sum() / total


class ArrayRegression(ArrayTask):
    """Regression of arrays in memory: targets are numbers, the measure is their squared error."""

    measure: ClassVar[Measure] = SQUARED_ERROR
