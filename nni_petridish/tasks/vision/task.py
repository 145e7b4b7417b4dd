"""Image classification as a task: the vision space, images, and a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from nni_petridish.core.genotype import Genotype
from nni_petridish.registry import ERROR, Measure
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record
from nni_petridish.tasks.vision.data import DataSet
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.splits import steps_per_epoch
from nni_petridish.tasks.vision.training import evaluate, fit

if TYPE_CHECKING:
    from search_spaces import VisionSpace


@dataclass(frozen=True)
class VisionTask:
    """Image classification with the paper's recipe.

    Parameters
    ----------
    space
        The space of networks.
    data
        Training, validation and test images; the test images are never looked at here.
    recipe
        The recipe of training; its number of epochs is replaced by that of each phase.
    """

    space: VisionSpace
    data: DataSet
    recipe: Recipe

    measure: ClassVar[Measure] = ERROR

    def seed(self) -> Genotype:
        """Return the space's simplest member."""
        return self.space.seed()

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network with fresh weights."""
        return self.space.build(genotype)

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        """Train by the recipe, the same in every phase; measure on the validation set as well."""
        history = fit(
            net,
            self.data.train,
            replace(self.recipe, epochs=phase.epochs),
            seed=phase.random_seed,
            validation=self.data.validation,
            on_epoch=lambda record: callbacks.on_epoch(phase.name, record),
            checkpoint=phase.checkpoint,
            progress=callbacks.progress,
            label=phase.label,
            stop=callbacks.should_stop,
        )
        return list(history.records)

    def steps(self, epochs: int) -> int:
        """Return the number of steps in so many epochs."""
        return epochs * steps_per_epoch(len(self.data.train), self.recipe.batch_size)

    def evaluate(self, net: nn.Module) -> Record:
        """Return error, accuracy and loss on the validation images."""
        metrics = evaluate(net, self.data.validation, self.recipe)
        return {"error": metrics.error, "accuracy": metrics.accuracy, "loss": metrics.loss}

    def validation_losses(self, net: nn.Module) -> Iterator[Tensor]:
        """Yield differentiable parts of the validation loss, which is their sum."""
        device, n = next(net.parameters()).device, len(self.data.validation)
        split = self.data.validation.to(device)
        for raw, labels in split.batches(self.recipe.batch_size):
            yield F.cross_entropy(net(split.normalise(raw)), labels, reduction="sum") / n

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one image, parameters)."""
        return self.space.size(net)
