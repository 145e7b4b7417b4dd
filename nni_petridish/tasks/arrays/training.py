"""Training and evaluation on weighted examples in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import DataError, TrainingError
from nni_petridish.tasks.arrays.recipe import ArrayRecipe as ArrayRecipe
from nni_petridish.tasks.averaging import (
    AVERAGED_STEPS,
    STATISTICS_BATCHES,
    AveragedWeights,
    first_averaged_epoch,
)
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.loop import Bar, History, LoopOptions, Steps, run
from nni_petridish.tasks.optim import clip_groups, make_optimizer, take_step
from nni_petridish.tasks.recipes import recipe_identity
from nni_petridish.tasks.task import Record

_EVALUATION_BATCH = 1024


@dataclass(frozen=True)
class Examples:
    """Examples in memory.

    Parameters
    ----------
    inputs
        The standardized inputs, the first dimension being the examples.
    targets
        Classes, of type int64, or numbers to predict.
    weights
        The weight of each example in losses and errors.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        if not len(self.inputs) == len(self.targets) == len(self.weights) > 0:
            raise DataError(
                "examples must be at least one, with a target and a weight each, but got"
                f" {len(self.inputs)}, {len(self.targets)} and {len(self.weights)}."
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def losses(self, outputs: Tensor, chosen: Tensor | slice) -> Tensor:
        """Return the weighted losses of some examples: cross-entropy, or squared errors."""
        targets, weights = self.targets[chosen], self.weights[chosen]
        if targets.dtype == torch.int64:
            return weights * F.cross_entropy(outputs, targets, reduction="none")
        return weights * (outputs.flatten() - targets).square()

    def errors(self, outputs: Tensor, chosen: Tensor | slice) -> Tensor:
        """Return the weighted errors of some examples: whether it is wrong, or squared errors."""
        if self.targets.dtype == torch.int64:
            return self.weights[chosen] * (outputs.argmax(1) != self.targets[chosen])
        return self.losses(outputs, chosen)

    def batches(self) -> Iterator[slice]:
        """Return all examples in order, in batches for evaluation."""
        starts = range(0, len(self), _EVALUATION_BATCH)
        return (slice(start, start + _EVALUATION_BATCH) for start in starts)


def steps_per_epoch(n: int, batch_size: int, most: int | None = None) -> int:
    """Return the number of steps; the batches are of nearly equal size and never too small."""
    steps = max(1, n // batch_size)
    return steps if most is None else min(steps, most)


def fit(
    net: nn.Module,
    train: Examples,
    recipe: ArrayRecipe,
    *,
    seed: int,
    validation: Examples | None = None,
    epoch_steps: int | None = None,
    every_epoch: bool = False,
    **options: Unpack[LoopOptions],
) -> History:
    """Train a network in place; see `nni_petridish.tasks.loop.LoopOptions`.

    ``epoch_steps`` is the largest number of steps of an epoch, which has other examples each time.
    The network is measured on the validation examples after the last epoch, or ``every_epoch``.
    """
    trainer = _ArrayTrainer(net, train, recipe, seed, validation, epoch_steps)
    trainer.every_epoch = every_epoch
    return run(trainer, recipe.epochs, seed, **options)


@torch.no_grad()
def evaluate(net: nn.Module, examples: Examples) -> Record:
    """Return ``error`` and ``loss``, means by weight, in evaluation mode."""
    error = loss = 0.0
    with evaluation_mode(net):
        for chosen in examples.batches():
            outputs = net(examples.inputs[chosen])
            error += float(examples.errors(outputs, chosen).double().sum())
            loss += float(examples.losses(outputs, chosen).double().sum())
    total = float(examples.weights.double().sum())
    if not math.isfinite(loss):
        raise TrainingError("the loss is not finite in evaluation.")
    return {"error": error / total, "loss": loss / total}


class _ArrayTrainer:
    """One training on examples in memory."""

    world = World()
    device = torch.device("cpu")
    every_epoch = False

    def __init__(
        self,
        net: nn.Module,
        train: Examples,
        recipe: ArrayRecipe,
        seed: int,
        validation: Examples | None,
        epoch_steps: int | None,
    ) -> None:
        self.net, self.train, self.recipe, self.validation = net, train, recipe, validation
        self.steps = steps_per_epoch(len(train), recipe.batch_size, epoch_steps)
        self.bar = Bar(self.steps, "step")
        self.mean_weight = train.weights.mean()
        self.optimizer = make_optimizer(
            net, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
        self.clip_groups = clip_groups(net)
        settings = recipe_identity(recipe)
        self._identity = {"seed": seed, "examples": len(train), "recipe": settings}
        first = first_averaged_epoch(recipe.epochs, recipe.average)
        self.average = AveragedWeights(net, first, self._show)

    @property
    def state(self) -> nn.Module:
        """The network, and the average of its weights if there is one."""
        return self.average.state

    def facts(self) -> dict[str, Any]:
        """Return what identifies the run, and how many steps were averaged."""
        return self._identity | self.average.facts()

    def resume(self, tensors: dict[str, Tensor], facts: dict[str, Any], epochs: int) -> bool:
        """Restore weights, averages and momenta of the same run."""
        steps = facts.pop(AVERAGED_STEPS, None)
        return facts == self._identity and self.average.resume(tensors, self.optimizer, steps)

    def epoch(self, epoch: int, seed: int, steps: Steps) -> Record:
        """Show every example once, or as many as an epoch has steps for, in the seed's order."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        total, lr, sums = self.steps * self.recipe.epochs, self.recipe.lr, 0.0
        batches = order.tensor_split(steps_per_epoch(len(order), self.recipe.batch_size))
        self.average.before(epoch)
        for index, chosen in enumerate(batches[: self.steps]):
            steps.before(f"step {index + 1}")
            loss = self._loss(chosen)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise TrainingError(f"the loss is not finite at epoch {epoch + 1}.")
            sums += value
            progress = (epoch * self.steps + index) / total
            lr = self.recipe.lr * 0.5 * (1 + math.cos(math.pi * progress))
            self._update(loss, lr)
            steps.after(1, lambda value=value: f"loss {value:.3f}")  # type: ignore[misc]
        return {"loss": sums / self.steps, "lr": lr}

    def validate(self, before: list[Record]) -> Record:
        """Measure on the validation examples; by default after the last epoch, which counts."""
        is_last = len(before) + 1 >= self.recipe.epochs
        if self.validation is None or not (is_last or self.every_epoch):
            return {}
        with self.average.in_place():
            measured = evaluate(self.net, self.validation)
        return {f"validation_{name}": value for name, value in measured.items()}

    def finish(self) -> None:
        """Give the network the averaged weights, if there are any."""
        self.average.settle()

    def _loss(self, chosen: Tensor) -> Tensor:
        losses = self.train.losses(self.net(self.train.inputs[chosen]), chosen)
        return losses.mean() / self.mean_weight

    def _update(self, loss: Tensor, lr: float) -> None:
        take_step(self.optimizer, loss, self.clip_groups, self.recipe.clip, lambda group: lr)
        self.average.add()

    def _show(self) -> None:
        """Show the network some training examples, always in the same order."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))
        batches = order.tensor_split(steps_per_epoch(len(order), self.recipe.batch_size))
        for chosen in batches[:STATISTICS_BATCHES]:
            self.net(self.train.inputs[chosen])
