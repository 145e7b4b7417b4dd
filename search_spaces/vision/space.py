"""The vision space of the paper: cells of DARTS-style ops on a ResNet-like skeleton.

The space is a description; torch is needed only to build one of its networks.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import MinLen

from nni_petridish.core.genotype import MERGES, Genotype
from nni_petridish.errors import ConfigError, GenotypeError
from nni_petridish.search.constraints import Depth, OneOf, Width, check_fields
from search_spaces.vision.genotype import MODES, VisionGenotype, macro_key
from search_spaces.vision.op_registry import KNOWN_OPS, VISION_OPS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from search_spaces.vision.network import VisionNetwork

MIN_IMAGE_SIZE = 8
STEMS = ("plain", "imagenet")
TRANSITION = "transition"
"""Key of the transition cells of an imagenet stem in macro mode, which do not grow."""


class Shape(NamedTuple):
    """The channels of a layer, and its level: the number of halvings of the image's resolution."""

    channels: int
    level: int


@dataclass(frozen=True)
class VisionSpace:
    """The space of image classifiers that Petridish grows.

    Parameters
    ----------
    image_shape
        (channels, height, width); height and width at least 8, or a height of 1: a signal, which
        has one stage.
    num_classes
        The number of classes.
    cells_per_stage
        N, the number of normal cells at each resolution (paper: 3 to search, 6 to retrain).
    filters
        F, the width of the first stage (paper: 16 to search, 32 to retrain).
    mode
        ``"cell"``: one α table per cell type; ``"macro"``: one per cell.
    stages
        The number of resolutions, with a reduction cell between two stages.
    ops
        The eligible operations.
    merge
        op_merge of all weak learners: ``"concat_project"`` or ``"weighted_sum"``.
    stem_multiplier
        The width of the stem as a multiple of the filters of the first cells.
    stem
        ``"plain"``: the cells start at the image's resolution. ``"imagenet"``: a strided conv and
        two transition cells first bring 224x224 images to 28x28 with F filters.

    Examples
    --------
    >>> from search_spaces import VisionSpace
    >>> space = VisionSpace((1, 8, 8), num_classes=10, cells_per_stage=1, filters=8)
    >>> net = space.build(space.seed())
    >>> net.genotype.to_json()
    '{"version": 1, "space": "vision", "mode": "cell", "cells": {"normal": [], "reduce": []}}'
    """

    image_shape: Sequence[int]
    num_classes: Width
    cells_per_stage: Depth = 3
    filters: Width = 16
    mode: Annotated[str, OneOf(MODES)] = "cell"
    stages: Depth = 3
    ops: Annotated[Sequence[Annotated[str, OneOf(KNOWN_OPS, is_open=True)]], MinLen(1)] = VISION_OPS
    merge: Annotated[str, OneOf(MERGES)] = "concat_project"
    stem_multiplier: Depth = 3
    stem: Annotated[str, OneOf(STEMS)] = "plain"

    name = "vision"

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", tuple(self.image_shape))
        object.__setattr__(self, "ops", tuple(self.ops))
        _check_image_shape(self.image_shape)
        check_fields(self)
        size, halvings = min(self.image_shape[1:]), self.shapes()[-1].level
        if 2**halvings > size:
            stem = " behind an imagenet stem" if self.stem == "imagenet" else ""
            height, width = self.image_shape[1:]
            raise ConfigError(
                f"stages must halve a {height}x{width} image at most {size.bit_length() - 1} times"
                f" but got {self.stages} stages{stem}."
            )

    @property
    def smallest_map(self) -> int:
        """Pixels of the smallest feature maps."""
        height, width = (-(-side // 2 ** self.shapes()[-1].level) for side in self.image_shape[1:])
        return height * width

    def seed(self) -> VisionGenotype:
        """Return the simplest architecture of the space, where growth starts."""
        return VisionGenotype.seed(self.mode, self.num_cells, self.merge)

    def build(self, genotype: Genotype, *, auxiliary: bool = False) -> VisionNetwork:
        """Build a network with fresh weights.

        Parameters
        ----------
        genotype
            The architecture.
        auxiliary
            Whether to add the auxiliary head, for retraining.
        """
        import torch

        from search_spaces.vision.network import VisionNetwork

        own = self.check(genotype)
        net = VisionNetwork(replace(self, filters=self.filters_of(own)), own, auxiliary)
        return net.to(memory_format=torch.channels_last)

    def check(self, genotype: Genotype) -> VisionGenotype:
        """Return the genotype if it fits this space, else raise `GenotypeError`."""
        own = VisionGenotype.require(genotype)
        if own.mode != self.mode:
            raise GenotypeError(f"mode: the space's is {self.mode!r} but got {own.mode!r}.")
        if self.mode == "macro" and len(own.cells) != self.num_cells:
            raise GenotypeError(
                f"cells: the space has {self.num_cells} cells but got {len(own.cells)}."
            )
        return own

    def deepened(self, genotype: Genotype, cells_per_stage: int) -> VisionGenotype:
        """Return an architecture of this space for another number of cells per stage, N.

        In cell mode it does not change. In macro mode N must be a multiple, and every normal cell
        is repeated.
        """
        checked = self.check(genotype)
        if self.mode == "cell" or cells_per_stage == self.cells_per_stage:
            return checked
        times, rest = divmod(cells_per_stage, self.cells_per_stage)
        if rest or not times:
            raise ConfigError(
                f"cells_per_stage must be a multiple of {self.cells_per_stage}, which every cell of"
                f" a macro model was found with, but got {cells_per_stage}."
            )
        reductions = {stage * (self.cells_per_stage + 1) - 1 for stage in range(1, self.stages)}
        learners = [
            copy
            for i, cell in enumerate(checked.cells.values())
            for copy in [cell] * (1 if i in reductions else times)
        ]
        cells = {macro_key(i): cell for i, cell in enumerate(learners)}
        return replace(checked, cells=cells)

    def filters_of(self, genotype: VisionGenotype) -> int:
        """Return F of an architecture, which may be wider than the space."""
        return max(1, round(self.filters * genotype.width))

    def widened(self, genotype: Genotype, factor: float) -> VisionGenotype:
        """Return the architecture with so many times the filters, and at least one more."""
        checked = self.check(genotype)
        filters = self.filters_of(checked)
        more = max(filters + 1, round(filters * factor))
        return replace(checked, width=more / self.filters)

    def place_channels(
        self, name: str, module: nn.Module, inputs: bool, old: int, new: int
    ) -> Tensor:
        """Return the places of old channels in a module of a widened network."""
        from search_spaces.vision.widening import place_channels

        return place_channels(name, module, inputs, old, new)

    @property
    def num_cells(self) -> int:
        """The number of cells, including reductions but not the transition cells of the stem."""
        return self.stages * (self.cells_per_stage + 1) - 1

    def stem_shape(self) -> Shape:
        """Return the output shape of the first conv, which is strided in an imagenet stem."""
        if self.stem == "plain":
            return Shape(self.stem_multiplier * self.filters, 0)
        return Shape(self.stem_multiplier * math.ceil(self.filters / 4), 1)

    def shapes(self) -> list[Shape]:
        """Return the output shape of every cell, reductions and transitions included."""
        result = []
        if self.stem == "imagenet":  # like every reduction, a transition doubles the filters
            half = max(2, math.ceil(self.filters / 2))  # a factorized reduce needs one per phase
            result = [Shape(half, 2), Shape(max(2, self.filters), 3)]
        first = len(result) and result[-1].level
        for stage in range(self.stages):
            shape = Shape(self.filters * 2**stage, first + stage)
            result += [shape] * (self.cells_per_stage + (stage > 0))
        return result

    def keys(self) -> list[str]:
        """Return the key of every cell's α table."""
        shapes = self.shapes()
        if self.mode == "macro":
            transitions = len(shapes) - self.num_cells
            return [TRANSITION] * transitions + [macro_key(i) for i in range(self.num_cells)]
        levels = [self.stem_shape().level, *(shape.level for shape in shapes)]
        return [
            "reduce" if after > before else "normal" for before, after in itertools.pairwise(levels)
        ]

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one image, parameters) of a network of this space."""
        from nni_petridish.core.complexity import count_multiply_adds, count_parameters

        return count_multiply_adds(net, self.image_shape), count_parameters(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return an image for a network of this space."""
        import torch

        return (torch.zeros(1, *self.image_shape),)

    def model_space(self, max_learners: int = 3, max_shortcuts: int = 3) -> Any:
        """Return this space for NNI's experiments and strategies, see `GrowableModelSpace`."""
        adapter = importlib.import_module("nni_petridish.nni_adapter")  # a space needs no NNI
        return adapter.model_space(self, max_learners, max_shortcuts)

    def describe(self) -> dict[str, Any]:
        """Return the space as plain data; ``VisionSpace(**data)`` is an equal space."""
        return {
            "image_shape": list(self.image_shape),
            "num_classes": self.num_classes,
            "cells_per_stage": self.cells_per_stage,
            "filters": self.filters,
            "mode": self.mode,
            "stages": self.stages,
            "ops": list(self.ops),
            "merge": self.merge,
            "stem_multiplier": self.stem_multiplier,
            "stem": self.stem,
        }


def _check_image_shape(shape: Sequence[int]) -> None:
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in shape)
    if len(shape) != 3 or not whole or shape[0] < 1 or not _is_image(*shape[1:]):
        raise ConfigError(
            "image_shape must be (channels, height, width), at least"
            f" (1, {MIN_IMAGE_SIZE}, {MIN_IMAGE_SIZE}), or (1, 1, {MIN_IMAGE_SIZE}) for a signal,"
            f" but got {tuple(shape)!r}."
        )


def _is_image(height: int, width: int) -> bool:
    return width >= MIN_IMAGE_SIZE and (height >= MIN_IMAGE_SIZE or height == 1)
