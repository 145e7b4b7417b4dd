"""What a growth must know of the problem it works on: the space, the data and how to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from nni_petridish.core.genotype import Genotype
from nni_petridish.tasks.training import evaluate, fit
from nni_petridish.tasks.vision.data import DataSet
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.splits import steps_per_epoch

if TYPE_CHECKING:
    from search_spaces import VisionSpace

Record = dict[str, float]
"""What is known after an epoch: ``epoch``, ``loss``, ``validation_error``, ..."""


class Task(Protocol):
    """A problem that networks are grown for."""

    def seed(self) -> Genotype:
        """Return the architecture that growth starts from."""
        ...

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network with fresh weights."""
        ...

    def train(
        self,
        net: nn.Module,
        *,
        phase: str,
        epochs: int,
        seed: int,
        label: str,
        checkpoint: Path | None = None,
        on_epoch: Callable[[Record], object] | None = None,
        stop: Callable[[], bool] | None = None,
        progress: bool = False,
    ) -> list[Record]:
        """Train in place, candidates or not; go on from the checkpoint if there is one.

        ``phase`` says what the training is for: ``seed``, ``weak`` or ``final``.
        """
        ...

    def steps(self, epochs: int) -> int:
        """Return how many steps so many epochs are."""
        ...

    def evaluate(self, net: nn.Module) -> Record:
        """Measure on the validation set; ``error`` is what the search minimises."""
        ...

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds, parameters)."""
        ...


@dataclass(frozen=True)
class VisionTask:
    """Image classification with the paper's recipe.

    Parameters
    ----------
    space
        What networks may look like.
    data
        Training, validation and test images; the test images are never looked at here.
    recipe
        How to train; its number of epochs is replaced by that of each phase.
    """

    space: VisionSpace
    data: DataSet
    recipe: Recipe

    def seed(self) -> Genotype:
        """Return the space's simplest member."""
        return self.space.seed()

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network with fresh weights."""
        return self.space.build(genotype)

    def train(
        self,
        net: nn.Module,
        *,
        phase: str,
        epochs: int,
        seed: int,
        label: str,
        checkpoint: Path | None = None,
        on_epoch: Callable[[Record], object] | None = None,
        stop: Callable[[], bool] | None = None,
        progress: bool = False,
    ) -> list[Record]:
        """Train by the recipe, the same in every phase; measure on the validation set as well."""
        history = fit(
            net,
            self.data.train,
            replace(self.recipe, epochs=epochs),
            seed=seed,
            validation=self.data.validation,
            on_epoch=on_epoch,
            checkpoint=checkpoint,
            progress=progress,
            label=label,
            stop=stop,
        )
        return list(history.records)

    def steps(self, epochs: int) -> int:
        """Return how many steps so many epochs are."""
        return epochs * steps_per_epoch(len(self.data.train), self.recipe.batch_size)

    def evaluate(self, net: nn.Module) -> Record:
        """Return error, accuracy and loss on the validation images."""
        metrics = evaluate(net, self.data.validation, self.recipe)
        return {"error": metrics.error, "accuracy": metrics.accuracy, "loss": metrics.loss}

    def validation_losses(self, net: nn.Module) -> Iterator[Tensor]:
        """Yield differentiable parts of the validation loss; their sum is what `evaluate` says."""
        device, n = next(net.parameters()).device, len(self.data.validation)
        split = self.data.validation.to(device)
        for raw, labels in split.batches(self.recipe.batch_size):
            yield F.cross_entropy(net(split.normalise(raw)), labels, reduction="sum") / n

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one image, parameters)."""
        return self.space.size(net)
