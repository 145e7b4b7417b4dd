"""The vector space: a stack of dense cells, for tables.

The space is a description; torch is needed only to build one of its networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import MinLen

from nni_petridish.core.genotype import MERGES, Genotype
from nni_petridish.errors import GenotypeError
from nni_petridish.search.constraints import Depth, OneOf, Width, check_fields
from search_spaces.any_model.genotype import VECTOR_OPS
from search_spaces.vector.genotype import VectorGenotype

if TYPE_CHECKING:
    from torch import Tensor, nn

    from search_spaces.vector.network import VectorNetwork


@dataclass(frozen=True)
class VectorSpace:
    """The space of dense networks that Petridish grows on vectors.

    Parameters
    ----------
    num_features
        The number of features of an example.
    num_outputs
        The number of outputs: classes, or numbers to predict.
    width
        The width of every cell.
    num_cells
        The number of cells; each has its own α table.
    ops
        The eligible operations.
    merge
        op_merge of all weak learners: ``"concat_project"`` or ``"weighted_sum"``.

    Examples
    --------
    >>> from search_spaces.vector import VectorSpace
    >>> space = VectorSpace(13, num_outputs=3, width=8, num_cells=1)
    >>> net = space.build(space.seed())
    >>> net.genotype.to_json()
    '{"version": 1, "space": "vector", "cells": {"cell_00": []}}'
    >>> space.size(net)  # 13 * 8 + 8 * 8 + 8 * 3 multiply-adds
    (192, 235)
    """

    num_features: Width
    num_outputs: Width
    width: Width = 32
    num_cells: Depth = 2
    ops: Annotated[Sequence[Annotated[str, OneOf(VECTOR_OPS)]], MinLen(1)] = VECTOR_OPS
    merge: Annotated[str, OneOf(MERGES)] = "concat_project"

    name = "vector"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        check_fields(self)

    def seed(self) -> VectorGenotype:
        """Return the simplest architecture of the space, where growth starts."""
        return VectorGenotype.seed(self.num_cells, self.merge)

    def build(self, genotype: Genotype) -> VectorNetwork:
        """Build a network with fresh weights."""
        from search_spaces.vector.network import VectorNetwork

        return VectorNetwork(self, self.check(genotype))

    def check(self, genotype: Genotype) -> VectorGenotype:
        """Return the genotype if it fits this space, else raise `GenotypeError`."""
        own = VectorGenotype.require(genotype)
        if len(own.cells) != self.num_cells:
            raise GenotypeError(
                f"cells: the space has {self.num_cells} cells but got {len(own.cells)}."
            )
        return own

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one example, parameters) of a network of this space."""
        from nni_petridish.core.complexity import count_multiply_adds, count_parameters

        return count_multiply_adds(net, (self.num_features,)), count_parameters(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return a row of features for a network of this space."""
        import torch

        return (torch.zeros(1, self.num_features),)

    def describe(self) -> dict[str, Any]:
        """Return the space as plain data; ``VectorSpace(**data)`` is an equal space."""
        return {
            "num_features": self.num_features,
            "num_outputs": self.num_outputs,
            "width": self.width,
            "num_cells": self.num_cells,
            "ops": list(self.ops),
            "merge": self.merge,
        }
