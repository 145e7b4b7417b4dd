"""Architectures of the vector space: the weak learners of each dense cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from nni_petridish.core.diagram import CellDiagram, DiagramPart, learner_parts
from nni_petridish.core.genotype import (
    FrozenMapping,
    Learner,
    LearnersGenotype,
    check_learners,
    check_merge,
    learner_name,
    show,
)
from nni_petridish.errors import GenotypeError
from search_spaces.any_model.genotype import VECTOR_OPS
from search_spaces.vision.genotype import macro_key

#: The cell inputs In(x_k) that exist before any growth; ``h0``, ``h1``, ... follow.
VECTOR_SOURCES = ("prev_prev", "prev")
SEED_CELL = (("prev", "relu"), ("prev", "skip"))
"""The operations of a cell without weak learners."""


@dataclass(frozen=True)
class VectorGenotype(LearnersGenotype):
    """An architecture of the vector space.

    Parameters
    ----------
    cells
        The weak learners of each cell (``cell_00``, ``cell_01``, ...) in the order of growth. The
        seed has none: its cell ``relu(prev) + skip(prev)`` is implied.
    merge
        op_merge of all weak learners: ``"concat_project"`` or ``"weighted_sum"``. Written to JSON
        only if it is not the default.

    Examples
    --------
    >>> genotype = VectorGenotype.seed(2).grown({"cell_01": (("prev_prev", "tanh"),)})
    >>> genotype.cells["cell_01"]
    ((('prev_prev', 'tanh'),),)
    """

    cells: Mapping[str, tuple[Learner, ...]]
    merge: str = "concat_project"

    space: ClassVar[str] = "vector"
    table: ClassVar[str] = "cells"

    def __post_init__(self) -> None:
        check_merge(self.merge)
        if not isinstance(self.cells, Mapping) or not self.cells:
            raise GenotypeError(
                f"cells: must be an object with at least one cell but got {show(self.cells)}."
            )
        expected = [macro_key(i) for i in range(len(self.cells))]
        for key, wanted in zip(self.cells, expected, strict=True):
            if key != wanted:
                raise GenotypeError(
                    f"cells: must have the keys {expected[0]}, ... in this order but got"
                    f" {show(key)} in place of {wanted}."
                )
        cells = {
            key: check_learners(f"cells.{key}", learners, VECTOR_SOURCES, VECTOR_OPS)
            for key, learners in self.cells.items()
        }
        object.__setattr__(self, "cells", FrozenMapping(cells))

    @classmethod
    def seed(cls, num_cells: int, merge: str = "concat_project") -> VectorGenotype:
        """Return the genotype of so many cells without weak learners."""
        return cls({macro_key(i): () for i in range(num_cells)}, merge)

    def cell_diagrams(self) -> dict[str, CellDiagram]:
        """Return a diagram of every cell, the seed's operations included."""
        seed = DiagramPart(SEED_CELL)
        return {
            key: CellDiagram(VECTOR_SOURCES, [seed, *learner_parts(learners, learner_name)])
            for key, learners in self.cells.items()
        }
