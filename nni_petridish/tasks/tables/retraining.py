"""Retraining of a network that was found for a table, on all rows but the test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from nni_petridish.core.complexity import count_multiply_adds, count_parameters
from nni_petridish.errors import ConfigError
from nni_petridish.gallery.saved_model import SavedModel
from nni_petridish.registry import ERROR, Measure
from nni_petridish.tasks.arrays.training import fit
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.loop import loop_options
from nni_petridish.tasks.recipes import changed_recipe
from nni_petridish.tasks.retraining import Retraining
from nni_petridish.tasks.tables.kind import (
    SEARCH_ONLY_DATA,
    TableRecipe,
    TableRetrainingOptions,
    make_space,
)
from nni_petridish.tasks.tables.task import Rows, load_rows, make_task
from nni_petridish.tasks.task import Callbacks, Phase, Record
from search_spaces.vector.genotype import VectorGenotype
from search_spaces.vector.network import VectorNetwork
from search_spaces.vector.space import VectorSpace


@dataclass(frozen=True)
class TableRetraining(Retraining[Rows, VectorNetwork]):
    """A retraining on a table; nothing is set aside for validation."""

    genotype: VectorGenotype
    space: VectorSpace
    recipe: TableRecipe

    measure: ClassVar[Measure] = ERROR
    examples: ClassVar[str] = "rows"

    @property
    def name(self) -> str:
        """The name of its folder: model, width, epochs."""
        return f"{self.model}-W{self.space.width}-{self.recipe.epochs}epochs"

    @property
    def title(self) -> str:
        """The model with its width."""
        return f"{self.model} with width {self.space.width}"

    @property
    def widths(self) -> dict[str, int]:
        """The width of the cells."""
        return {"width": self.space.width}

    def size(self) -> tuple[int, int]:
        """Return (multiply-adds of one row, parameters)."""
        with torch.device("meta"):  # shapes alone
            net = self.build()
            return count_multiply_adds(net, (self.space.num_features,)), count_parameters(net)

    def check_world(self, world: World) -> None:
        """Refuse several processes."""
        super().check_world(world)
        if world.size > 1:
            raise ConfigError(f"A table trains in one process but there are {world.size}.")

    def load(self) -> Rows:
        """Load the table; no row is set aside for validation."""
        return load_rows({**self.data, "validation": 0})

    def build(self) -> VectorNetwork:
        """Build the network with fresh weights."""
        return self.space.build(self.genotype)

    def train(
        self, net: VectorNetwork, data: Rows, phase: Phase, callbacks: Callbacks
    ) -> list[Record]:
        """Train by the recipe, without validation."""
        options = loop_options(phase, callbacks)
        history = fit(net, data.training, self.recipe, seed=phase.random_seed, **options)
        return list(history.records)

    def test(self, net: VectorNetwork, data: Rows) -> Record:
        """Measure on the test rows."""
        metrics = make_task(self.space, data, self.recipe).test(net)
        return {f"test_{name}": value for name, value in metrics.items()}

    def count_examples(self, data: Rows) -> int:
        """Return the number of training rows."""
        return len(data.training)

    def data_facts(self, data: Rows) -> dict[str, Any]:
        """Return columns, normalization and classes."""
        return data.facts


def make_retraining(
    model: SavedModel,
    searched: tuple[Mapping[str, Any], TableRecipe] | None,
    options: TableRetrainingOptions,
    changes: Mapping[str, Any],
) -> TableRetraining:
    """Prepare the retraining of a model.

    Parameters
    ----------
    model
        The model that a search found.
    searched
        Data and recipe of the search.
    options
        Width and length of the training; by default the search's width and the recipe's epochs.
    changes
        Changes to the recipe of the search.
    """
    genotype, space = VectorGenotype.require(model.genotype), make_space(model.space)
    if searched is None:
        raise ConfigError("the table of the search is unknown, and a model moves to no other one.")
    if options.width is not None:
        space = replace(space, width=options.width)
    data, recipe = searched
    wanted = {} if options.epochs is None else {"epochs": options.epochs}
    recipe = changed_recipe(recipe, {**wanted, **changes})
    whole = {k: v for k, v in data.items() if k not in SEARCH_ONLY_DATA}
    id = str(model.facts["id"])
    return TableRetraining(id, genotype, space, recipe, whole, options.seed or 0)
