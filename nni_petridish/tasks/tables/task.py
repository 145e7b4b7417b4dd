"""Training on the rows of a table, and the facts that a saved model keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from nni_petridish.tasks.arrays.task import ArrayTask
from nni_petridish.tasks.arrays.training import ArrayRecipe, Examples, fit
from nni_petridish.tasks.loop import History, LoopOptions
from nni_petridish.tasks.space_task import SpaceTask
from nni_petridish.tasks.tables.kind import TableRecipe
from nni_petridish.tasks.tables.splits import split_sizes
from nni_petridish.tasks.tables.table import Table, read_table
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record
from search_spaces.vector.space import VectorSpace

FACTS_VERSION = 1
_TEST_SEED = 0
"""Draws the test set; it does not depend on the seed of a search."""


@dataclass(frozen=True)
class Rows:
    """The rows of a table, split and standardized.

    Parameters
    ----------
    training, validation, testing
        The examples; validation is None if nothing is set aside.
    facts
        The facts that a model needs to take rows, see `facts_of`.
    """

    training: Examples
    validation: Examples | None
    testing: Examples
    facts: dict[str, Any]


class TableTask(ArrayTask):
    """Classification of the rows of a table."""

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        """Train by the recipe; a training that is stopped goes on from its checkpoint."""
        return SpaceTask.train(self, net, phase, callbacks)

    def _fit(
        self, net: nn.Module, recipe: ArrayRecipe, seed: int, **options: Unpack[LoopOptions]
    ) -> History:
        known = {"seed": seed, "validation": self.validation, "every_epoch": True}
        return fit(net, self.training, recipe, **known, **options)  # type: ignore[arg-type]


def make_task(space: VectorSpace, rows: Rows, recipe: TableRecipe) -> TableTask:
    """Make the task of a search."""
    validation = rows.training if rows.validation is None else rows.validation
    return TableTask(space, rows.training, validation, recipe, rows.facts, testing=rows.testing)


def load_rows(data: Mapping[str, Any]) -> Rows:
    """Read a table and split it; ``validation`` of 0 sets nothing aside."""
    table = read_table(data)
    rows = len(table.labels)
    train, validation = split_sizes(rows, data.get("validation"))
    order = np.random.default_rng(_TEST_SEED).permutation(rows)
    rest, tests = order[: train + validation], order[train + validation :]
    rest = np.random.default_rng(data.get("seed") or 0).permutation(rest)
    mean, scale = _statistics(table, rest[:train])
    standard = np.nan_to_num((table.features - mean) / scale).astype(np.float32)

    def examples(chosen: np.ndarray) -> Examples:
        return Examples(
            torch.from_numpy(standard[chosen]),
            torch.from_numpy(table.labels[chosen]),
            torch.ones(len(chosen)),
        )

    held_out = examples(rest[train:]) if validation else None
    facts = facts_of(table, mean, scale)
    return Rows(examples(rest[:train]), held_out, examples(tests), facts)


def facts_of(table: Table, mean: np.ndarray, scale: np.ndarray) -> dict[str, Any]:
    """Return the facts of a table that a model needs to take rows and name its classes.

    ``columns`` has the name of each column and the values of those with texts, ``normalisation``
    mean and standard deviation of each feature, ``target`` the name of the column to predict,
    ``classes`` its values.
    """
    columns = [
        {"name": column.name, **({"values": list(column.values)} if column.values else {})}
        for column in table.columns
    ]
    return {
        "version": FACTS_VERSION,
        "columns": columns,
        "normalisation": {"mean": mean.tolist(), "std": scale.tolist()},
        "target": table.target,
        "classes": list(table.classes),
    }


def _statistics(table: Table, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and scale of the features in some rows; features of texts stay 0 and 1."""
    features = np.ma.masked_invalid(table.features[chosen])
    mean = np.ma.filled(features.mean(axis=0), 0.0)
    scale = np.ma.filled(features.std(axis=0), 1.0)
    texts = np.concatenate([[bool(c.values)] * c.width for c in table.columns]).astype(bool)
    constant = ~(scale > 1e-12 * np.abs(mean))
    return np.where(texts, 0.0, mean), np.where(texts | constant, 1.0, scale)
