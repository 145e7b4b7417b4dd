"""Base of the tasks that are made of a space, data and a recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.core.space import Widening
from nni_petridish.core.widen import find_places, widen_into
from nni_petridish.errors import ConfigError
from nni_petridish.registry import Measure
from nni_petridish.tasks.loop import History, LoopOptions, loop_options
from nni_petridish.tasks.recipes import held_recipe, plain_recipe, scaled_recipe
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record


class SpaceTask(ABC):
    """A task that trains networks of a space by one recipe, the same in every phase."""

    space: Any
    """The space of networks."""
    recipe: Any
    """The recipe of training; its number of epochs is replaced by that of each phase."""
    measure: ClassVar[Measure]
    """Name and form of the ``error`` that `evaluate` returns."""

    @abstractmethod
    def _fit(
        self, net: nn.Module, recipe: Any, seed: int, **options: Unpack[LoopOptions]
    ) -> History:
        """Train on the training data and measure on the validation data."""

    @abstractmethod
    def steps(self, epochs: int) -> int:
        """Return the number of steps in so many epochs."""

    @abstractmethod
    def evaluate(self, net: nn.Module) -> Record:
        """Return the metrics on the validation data; the search minimizes ``error``."""

    @abstractmethod
    def validation_losses(self, net: nn.Module) -> Iterable[Tensor]:
        """Yield differentiable parts of the validation loss, which is their sum."""

    @abstractmethod
    def data_facts(self) -> dict[str, Any]:
        """Return what a user of a model must know of the data, as plain data; saved with it."""

    @abstractmethod
    def test(self, net: nn.Module) -> Record:
        """Measure on the test data, once, for the report on a finished model."""

    @abstractmethod
    def operations(self, net: nn.Module, epochs: int) -> int:
        """Return the forward multiply-adds of so many epochs of training, candidates included."""

    def seed(self) -> Genotype:
        """Return the space's simplest member."""
        genotype: Genotype = self.space.seed()
        return genotype

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network with fresh weights."""
        net: nn.Module = self.space.build(genotype)
        return net

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        """Train by the recipe; measure on the validation data after every epoch."""
        recipe = scaled_recipe(replace(self.recipe, epochs=phase.epochs), phase.lr_factor)
        recipe = held_recipe(recipe, phase.hold_epochs)
        if phase.name == "weak":
            recipe = plain_recipe(recipe)
        history = self._fit(net, recipe, phase.random_seed, **loop_options(phase, callbacks))
        return list(history.records)

    def widen(self, net: nn.Module, genotype: Genotype) -> nn.Module:
        """Return a wider network of the given architecture that predicts the same."""
        if not isinstance(self.space, Widening):
            raise ConfigError(f"networks of {type(self.space).__name__} cannot be widened.")
        wide = self.build(genotype)
        widen_into(wide, net, find_places(net, wide, self.space.place_channels))
        return wide

    def widened(self, genotype: Genotype, factor: float) -> Genotype:
        """Return an architecture with so many times the channels, and at least one more."""
        if not isinstance(self.space, Widening):
            raise ConfigError(f"networks of {type(self.space).__name__} cannot be widened.")
        return self.space.widened(genotype, factor)

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one example, parameters)."""
        size: tuple[int, int] = self.space.size(net)
        return size

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return inputs of a network for one example."""
        inputs: tuple[Tensor, ...] = self.space.example(net)
        return inputs
