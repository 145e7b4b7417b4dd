"""Training a language model as DARTS does: locked dropout, SGD, then averaged SGD.

The gradients of attached candidates are clipped apart. Every epoch starts from the initial state of
the cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import TrainingError
from nni_petridish.tasks.averaging import AVERAGED_STEPS, AveragedWeights, first_averaged_epoch
from nni_petridish.tasks.device import resolve_device
from nni_petridish.tasks.distributed import ALONE, World
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.language.text import to_columns
from nni_petridish.tasks.loop import Bar, History, LoopOptions, Steps, check_seed, run
from nni_petridish.tasks.optim import clip_groups, make_optimizer, take_step
from nni_petridish.tasks.recipes import recipe_identity
from nni_petridish.tasks.task import Record

__all__ = [
    "LanguageMetrics",
    "LanguageModel",
    "evaluate_language",
    "fit_language",
    "language_losses",
]

#: Lengths of backpropagation through time, as in the AWD-LSTM recipe that DARTS follows.
_DEVIATION, _SHORTEST, _LONGER = 5, 5, 20


class LanguageModel(Protocol):
    """The methods of a network that can be trained on text."""

    def set_dropout(self, **rates: float) -> None:
        """Set the rates of dropout by name."""

    def initial_state(self, batch: int) -> Tensor:
        """Return the state before the first word."""

    def features(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs of all steps, as they are and after dropout."""

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the words that follow."""


class LanguageMetrics(NamedTuple):
    """Result of `evaluate_language`: mean cross-entropy in nats, and its exponential."""

    loss: float
    perplexity: float
    n: int


def fit_language(
    net: nn.Module,
    train: Tensor,
    recipe: LanguageRecipe,
    *,
    seed: int,
    validation: Tensor | None = None,
    **options: Unpack[LoopOptions],
) -> History:
    """Train a language model in place; in the end it holds the averaged weights, if there are any.

    Parameters
    ----------
    net
        A `LanguageModel`, such as `RecurrentNetwork`. It is moved to the recipe's device.
    train, validation
        Word numbers, see `load_text`. Without validation SGD is never averaged.
    recipe
        The recipe of the training.
    seed
        The random seed of the lengths of sequences and of dropout. The caller's random state is
        left alone.
    options
        See `LoopOptions`. A checkpoint may be of a training for fewer epochs: nothing in the recipe
        depends on how many follow.

    Returns
    -------
    History
        One record per epoch: ``epoch``, ``loss``, ``error``, ``lr``, ``averaged`` (1 once SGD is
        averaged), ``seconds``, and if validated ``validation_loss`` and ``validation_error``. An
        error is a perplexity here.

    Raises
    ------
    TrainingError
        As soon as the loss is not finite.
    """
    check_seed(seed)
    device = resolve_device(recipe.device)
    net.to(device)
    columns = to_columns(train, recipe.batch_size).to(device)
    trainer = _TextTrainer(net, columns, recipe, seed, validation)
    return run(trainer, recipe.epochs, seed, **options)


def evaluate_language(
    net: nn.Module, text: Tensor, recipe: LanguageRecipe | None = None
) -> LanguageMetrics:
    """Return loss and perplexity on a text: no dropout, and the state carried over throughout.

    The text is read in ``recipe.evaluation_batch`` columns; one column (DARTS's choice for the
    test set) reads all of it in one go, slowly.
    """
    recipe = recipe or LanguageRecipe()
    with evaluation_mode(net), torch.no_grad():
        parts = [part.double() for part in language_losses(net, text, recipe)]
    loss = float(torch.stack(parts).sum())
    if not math.isfinite(loss):
        raise TrainingError("the loss is not finite in evaluation.")
    batch = recipe.evaluation_batch
    return LanguageMetrics(loss, _perplexity(loss), (len(text) // batch - 1) * batch)


def language_losses(net: nn.Module, text: Tensor, recipe: LanguageRecipe) -> Iterator[Tensor]:
    """Yield differentiable parts of the mean loss on a text, which is their sum."""
    model, device = cast(LanguageModel, net), next(net.parameters()).device
    columns = to_columns(text, recipe.evaluation_batch).to(device)
    state = model.initial_state(columns.shape[1])
    for i in range(0, len(columns) - 1, recipe.bptt):
        targets = columns[i + 1 : i + 1 + recipe.bptt]
        outputs, dropped = model.features(columns[i : i + len(targets)], state)
        state = outputs[-1].detach()
        yield model.loss(dropped, targets) * (len(targets) / (len(columns) - 1))


class _TextTrainer:
    """One training on a text."""

    def __init__(
        self,
        net: nn.Module,
        text: Tensor,
        recipe: LanguageRecipe,
        seed: int,
        validation: Tensor | None,
    ) -> None:
        self.net, self.model, self.text = net, cast(LanguageModel, net), text
        self.recipe, self.validation = recipe, validation
        self.steps = len(text) - 1
        self.bar = Bar(self.steps, "word", recipe.batch_size)
        self.model.set_dropout(**recipe.dropout())
        self.optimizer = make_optimizer(
            net, lr=recipe.lr, weight_decay=recipe.weight_decay, scalar_lr=recipe.scalar_lr
        )
        self.clip_groups = clip_groups(net, scalars_apart=True)
        # Without batch norm statistics: a cell has no batch norm, only its candidates have.
        first = first_averaged_epoch(recipe.epochs, recipe.average)
        self.average = AveragedWeights(net, first, is_whole=True)
        settings = recipe_identity(recipe)
        del settings["device"]  # a run may move to another machine
        if not recipe.average:
            del settings["epochs"]  # and be prolonged, if nothing depends on its end
        self._identity = {"seed": seed, "words": text.numel(), "recipe": settings}

    @property
    def state(self) -> nn.Module:
        """The network, and the average of its weights if there is one."""
        return self.average.state

    @property
    def world(self) -> World:
        """A language model trains in one process."""
        return ALONE

    @property
    def device(self) -> torch.device:
        """The device of the text."""
        return self.text.device

    def facts(self) -> dict[str, Any]:
        """Return what identifies the run, and how many steps were averaged."""
        return self._identity | {AVERAGED_STEPS: self.average.steps}

    def resume(self, tensors: dict[str, Tensor], facts: dict[str, Any], epochs: int) -> bool:
        """Restore weights and averages of the same run, which may have been for fewer epochs."""
        steps = facts.pop(AVERAGED_STEPS, None)
        same = facts == self._identity and epochs <= self.recipe.epochs
        return same and self.average.resume(tensors, self.optimizer, steps)

    def epoch(self, epoch: int, seed: int, steps: Steps) -> Record:
        """Read the text once, in stretches of random length."""
        state = self.model.initial_state(self.text.shape[1])
        total, done = 0.0, 0
        self.average.before(epoch)
        for i, length in self._stretches(np.random.default_rng(seed)):
            steps.before(f"word {i}")
            targets = self.text[i + 1 : i + 1 + length]
            loss, state = self._step(self.text[i : i + len(targets)], targets, state)
            if not math.isfinite(loss):
                raise TrainingError(f"the loss is not finite at epoch {epoch + 1}, word {i}.")
            total, done = total + loss * len(targets), done + len(targets)
            mean = total / done
            steps.after(len(targets), partial("perplexity {:.1f}".format, _perplexity(mean)))
        return {
            "loss": total / done,
            "error": _perplexity(total / done),
            "lr": self.recipe.lr,
            "averaged": float(self.average.steps is not None),
        }

    def validate(self, before: list[Record]) -> Record:
        """Measure the averaged weights, or the weights; begin to average if they got no better."""
        if self.validation is None:
            return {}
        with self.average.in_place():
            metrics = evaluate_language(self.net, self.validation, self.recipe)
        losses = [r["validation_loss"] for r in before if "validation_loss" in r]
        old = losses[: -self.recipe.patience]
        if self.average.steps is None and old and metrics.loss > min(old):
            self.average.begin()
        return {"validation_loss": metrics.loss, "validation_error": metrics.perplexity}

    def finish(self) -> None:
        """Give the network the averaged weights."""
        self.average.settle()

    def _stretches(self, random: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Cut the text into stretches of random length; yield where each begins, and its length."""
        bptt, i = self.recipe.bptt, 0
        while i < self.steps:
            middle = bptt if random.random() < 0.95 else bptt / 2
            length = max(_SHORTEST, int(random.normal(middle, _DEVIATION)))
            length = min(length, bptt + _LONGER)
            yield i, length
            i += length

    def _step(self, tokens: Tensor, targets: Tensor, state: Tensor) -> tuple[float, Tensor]:
        recipe = self.recipe
        outputs, dropped = self.model.features(tokens, state)
        loss = plain = self.model.loss(dropped, targets)
        if recipe.activation:
            loss = loss + recipe.activation * dropped.square().mean()
        if recipe.temporal_activation and len(outputs) > 1:
            change = (outputs[1:] - outputs[:-1]).square().mean()
            loss = loss + recipe.temporal_activation * change

        def lr(group: dict[str, Any]) -> float:
            # The loss is a mean over the words: a shorter stretch takes a shorter step.
            return float(group["base_lr"] * len(tokens) / recipe.bptt)

        take_step(self.optimizer, loss, self.clip_groups, recipe.clip, lr)
        self.average.add()
        return float(plain.detach()), outputs[-1].detach()


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
