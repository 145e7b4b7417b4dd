"""Architectures of the vision space: the weak learners of each cell, or of each kind of cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from nni_petridish.core.diagram import CellDiagram, DiagramPart, learner_parts
from nni_petridish.core.genotype import (
    FrozenMapping,
    Learner,
    LearnersGenotype,
    check_learners,
    check_merge,
    check_width,
    learner_name,
    one_of,
    show,
)
from nni_petridish.errors import GenotypeError
from search_spaces.darts_text import IMAGE_FIELDS, darts_fields
from search_spaces.vision.net_info import read_net_info, write_net_info
from search_spaces.vision.op_registry import KNOWN_OPS

#: The cell inputs In(x_k) that exist before any growth; ``h0``, ``h1``, ... follow.
VISION_SOURCES = ("prev_prev", "prev")
MODES = ("cell", "macro")
CELL_KEYS = ("normal", "reduce")
SEED_CELL = (("prev", "sep_conv_3x3"), ("prev", "skip"))
"""The operations of a cell without weak learners."""


@dataclass(frozen=True)
class VisionGenotype(LearnersGenotype):
    """An architecture of the vision space.

    Parameters
    ----------
    mode
        ``"cell"``: all normal cells grow alike, and so do all reduction cells. ``"macro"``: each
        cell grows on its own.
    cells
        The weak learners of each α table (``normal`` and ``reduce``, or ``cell_00``, ``cell_01``,
        ...) in the order of growth. The seed has none: its cell
        ``sep_conv_3x3(prev) + skip(prev)`` is implied.
    merge
        op_merge of all weak learners: ``"concat_project"`` (the paper's choice) or
        ``"weighted_sum"``. Written to JSON only if it is not the default.
    width
        The filters as a multiple of the space's: more than 1 after a growth that widens. Written to
        JSON only if it is not the default.
    """

    mode: str
    cells: Mapping[str, tuple[Learner, ...]]
    merge: str = "concat_project"
    width: float = 1.0

    space: ClassVar[str] = "vision"
    table: ClassVar[str] = "cells"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise GenotypeError(f"mode: must be {one_of(MODES)} but got {show(self.mode)}.")
        check_merge(self.merge)
        check_width(self.width)
        if not isinstance(self.cells, Mapping):
            raise GenotypeError(f"cells: must be an object but got {show(self.cells)}.")
        _check_keys(self.mode, list(self.cells))
        cells = {
            key: check_learners(f"cells.{key}", learners, VISION_SOURCES, KNOWN_OPS)
            for key, learners in self.cells.items()
        }
        object.__setattr__(self, "cells", FrozenMapping(cells))

    @classmethod
    def seed(
        cls, mode: str = "cell", num_cells: int = 0, merge: str = "concat_project"
    ) -> VisionGenotype:
        """Return the genotype without weak learners; macro mode needs the number of cells."""
        keys = CELL_KEYS if mode == "cell" else [macro_key(i) for i in range(num_cells)]
        return cls(mode, dict.fromkeys(keys, ()), merge)

    def cell_diagrams(self) -> dict[str, CellDiagram]:
        """Return a diagram of every kind of cell, the seed's operations included."""
        seed = DiagramPart(SEED_CELL)
        return {
            key: CellDiagram(VISION_SOURCES, [seed, *learner_parts(learners, learner_name)])
            for key, learners in self.cells.items()
        }

    @classmethod
    def from_net_info(cls, text: str | bytes) -> VisionGenotype:
        """Read cells in the form that the authors of Petridish released (petridishnn's net_info).

        Wiring, operations and merges are read. The skeleton, ``master``, is left to the space.

        Raises
        ------
        GenotypeError
            If the cells are not of this space, with the place.
        """
        return cls("cell", *read_net_info(text))

    def to_net_info(self, cells_per_stage: int = 3, stages: int = 3) -> str:
        """Return the cells in the form of petridishnn, with a skeleton of this size."""
        if self.mode != "cell":
            raise GenotypeError(f"mode: petridishnn's form has two cells but got {self.mode!r}.")
        return write_net_info(self.cells, self.merge, cells_per_stage, stages)

    @classmethod
    def from_darts(cls, text: str) -> NoReturn:
        """Refuse DARTS's cells for images, which this space cannot express, and say why.

        NNI's DARTS space can: `nni_petridish.nni_adapter.read_darts`.
        """
        darts_fields(text, IMAGE_FIELDS)
        raise GenotypeError(
            "normal_concat: a cell of DARTS concatenates its nodes, while one of the vision space"
            " adds its weak learners to sep_conv_3x3(prev) + skip(prev); NNI's DARTS space has such"
            " cells: nni_petridish.nni_adapter.read_darts(text, space)."
        )


def macro_key(index: int) -> str:
    """Return the key of the index-th cell in macro mode: ``cell_00``, ``cell_01``, ..."""
    return f"cell_{index:02d}"


def _check_keys(mode: str, keys: list[Any]) -> None:
    expected = list(CELL_KEYS) if mode == "cell" else [macro_key(i) for i in range(len(keys))]
    if mode == "macro" and not keys:
        raise GenotypeError("cells: must have a key cell_00, cell_01, ... for each cell, has none.")
    for key in keys:
        if key not in expected:
            wanted = "normal and reduce" if mode == "cell" else f"{expected[0]} to {expected[-1]}"
            raise GenotypeError(f"cells: {mode} mode has the keys {wanted} but got {show(key)}.")
    for key in expected:
        if key not in keys:
            raise GenotypeError(f"cells.{key}: is missing.")
