"""The vision space of the paper: cells of DARTS-style ops on a ResNet-like skeleton.

stem, N normal cells, reduction, N normal, reduction, N normal, BN-ReLU, global average pool,
linear. A reduction halves the resolution and doubles the filters. The seed's cell, normal or
reduction, is ``sep_conv_3x3(prev) + skip(prev)``; everything else grows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.errors import ConfigError, GenotypeError
from nni_petridish.genotype import (
    MERGES,
    MODES,
    VISION_OPS,
    VISION_SOURCES,
    Genotype,
    Shortcut,
    VisionGenotype,
    macro_key,
)
from nni_petridish.weak_learner import Site
from search_spaces.ops import ConcatProject, DropPath, FactorizedReduce, make_op, project

MIN_IMAGE_SIZE = 8


class Shape(NamedTuple):
    """Channels of a layer, and by which power of two its resolution is below the image's."""

    channels: int
    level: int


class Cell(Site):
    """One cell: a site x_k whose seed is ``sep_conv_3x3(prev) + skip(prev)``.

    Parameters
    ----------
    key
        ``normal``, ``reduce`` or ``cell_00``, ...: the α table.
    prev_prev, prev
        The shapes of the outputs of the two cells before.
    out
        The shape of this cell's output.
    op_names
        The eligible operations.
    """

    def __init__(
        self, key: str, prev_prev: Shape, prev: Shape, out: Shape, op_names: Sequence[str]
    ) -> None:
        super().__init__(key, VISION_SOURCES, op_names)
        self.raw = {"prev_prev": prev_prev, "prev": prev}
        self.out = out
        # Ops expect the cell's width, at the resolution of prev: a reduction's ops are strided.
        self.level = prev.level
        self.need_adapter("prev")
        self.seed = make_op("sep_conv_3x3", out.channels, self._stride("prev"), affine=True)
        self.skip = (
            nn.Identity()
            if out.level == prev.level
            else FactorizedReduce(out.channels, out.channels)
        )
        self.drop_path = DropPath()

    def make_adapter(self, source: str) -> nn.Module | None:
        """Project to the cell's width, halving the resolution if it is higher than prev's."""
        raw = self.raw[source]
        if raw.level < self.level:
            return FactorizedReduce(raw.channels, self.out.channels)
        return None if raw.channels == self.out.channels else project(*self._widths(source))

    def make_op(self, source: str, op: str) -> nn.Module:
        """Make a candidate; from the cell's inputs it is strided if the cell reduces."""
        return make_op(op, self.out.channels, self._stride(source))

    def make_merge(self, merge: str, weights: Sequence[float] | None, n: int) -> nn.Module:
        """Concatenate and project (the paper's choice), or sum."""
        if merge == "concat_project":
            return ConcatProject(self.out.channels, n, weights)
        return super().make_merge(merge, weights, n)

    def drop(self, shortcut: Shortcut, value: Tensor) -> Tensor:
        """Drop-path on everything but identities, which keep the signal alive."""
        return value if shortcut[1] == "identity" else self.drop_path(value)

    def forward(self, prev_prev: Tensor, prev: Tensor) -> Tensor:
        """Return x_k, boosted by its weak learners."""
        z = self.adapt({"prev_prev": prev_prev, "prev": prev})
        x_k = self.drop_path(self.seed(z["prev"])) + self.skip(z["prev"])
        return self.boost(x_k, z)

    def _stride(self, source: str) -> int:
        return 2 if source in self.sources and self.out.level > self.level else 1

    def _widths(self, source: str) -> tuple[int, int]:
        return self.raw[source].channels, self.out.channels


class AuxiliaryHead(nn.Module):
    """A second classifier at two thirds of the depth, for the final training only."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Conv2d(channels, 128, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.Conv2d(128, 768, 2, bias=False),
            nn.BatchNorm2d(768),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(768, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the auxiliary logits."""
        return self.classifier(self.features(x).flatten(1))


class VisionNetwork(nn.Module):
    """A network of the vision space; made by `VisionSpace.build`."""

    genotype: VisionGenotype
    memory_format = torch.channels_last

    def __init__(self, space: VisionSpace, genotype: VisionGenotype, auxiliary: bool) -> None:
        super().__init__()
        self.genotype = genotype
        stem = Shape(space.stem_multiplier * space.filters, 0)
        self.stem = nn.Sequential(
            nn.Conv2d(space.image_shape[0], stem.channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(stem.channels),
        )
        self.cells = nn.ModuleList()
        prev_prev, prev = stem, stem
        for key, out in zip(space.keys(), space.shapes(), strict=True):
            cell = Cell(key, prev_prev, prev, out, space.ops)
            for learner in genotype.cells[key]:
                cell.add_learner(learner, genotype.merge)
            self.cells.append(cell)
            prev_prev, prev = prev, out
        self.norm = nn.BatchNorm2d(prev.channels)
        self.classifier = nn.Linear(prev.channels, space.num_classes)
        self.auxiliary_at = 2 * len(self.cells) // 3
        self.auxiliary = (
            AuxiliaryHead(space.shapes()[self.auxiliary_at].channels, space.num_classes)
            if auxiliary
            else None
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        return self._classify(self._run(images)[0])

    def forward_with_auxiliary(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and those of the auxiliary head."""
        if self.auxiliary is None:
            raise ConfigError("the network has no auxiliary head: build it with auxiliary=True.")
        features, middle = self._run(images)
        return self._classify(features), self.auxiliary(middle)

    def set_drop_path(self, keep: float, progress: float) -> None:
        """Set drop-path: linear in depth and in training progress, ``keep`` at the end of both."""
        drop_paths = [m for m in self.cells.modules() if isinstance(m, DropPath)]
        for i, drop_path in enumerate(drop_paths):
            depth = (i + 1) / len(drop_paths)
            drop_path.keep = 1.0 - (1.0 - keep) * depth * progress

    def _run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        # Depthwise and 1x1 kernels leave the layout of their input alone: choose it once, here.
        prev_prev = prev = self.stem(images).contiguous(memory_format=self.memory_format)
        middle = prev
        for i, cell in enumerate(self.cells):
            prev_prev, prev = prev, cell(prev_prev, prev)
            if i == self.auxiliary_at:
                middle = prev
        return prev, middle

    def _classify(self, features: Tensor) -> Tensor:
        return self.classifier(F.relu(self.norm(features)).mean(dim=(2, 3)))


@dataclass(frozen=True)
class VisionSpace:
    """The space of image classifiers that Petridish grows.

    Parameters
    ----------
    image_shape
        (channels, height, width); height and width at least 8.
    num_classes
        How many classes the network tells apart.
    cells_per_stage
        N, the number of normal cells at each resolution (paper: 3 to search, 6 in the end).
    filters
        F, the width of the first stage (paper: 16 to search, 32 in the end).
    mode
        ``"cell"``: one α table per cell type; ``"macro"``: one per cell.
    stages
        How many resolutions there are; a reduction cell lies between two of them.
    ops
        The eligible operations.
    merge
        op_merge of the seed's descendants: ``"concat_project"`` or ``"weighted_sum"``.
    stem_multiplier
        The stem's width in units of ``filters``.

    Examples
    --------
    >>> from search_spaces import VisionSpace
    >>> space = VisionSpace((1, 8, 8), num_classes=10, cells_per_stage=1, filters=8)
    >>> net = space.build(space.seed())
    >>> net.genotype.to_json()
    '{"version": 1, "space": "vision", "mode": "cell", "cells": {"normal": [], "reduce": []}}'
    """

    image_shape: Sequence[int]
    num_classes: int
    cells_per_stage: int = 3
    filters: int = 16
    mode: str = "cell"
    stages: int = 3
    ops: Sequence[str] = field(default=VISION_OPS)
    merge: str = "concat_project"
    stem_multiplier: int = 3

    name = "vision"

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", tuple(self.image_shape))
        object.__setattr__(self, "ops", tuple(self.ops))
        _check_image_shape(self.image_shape)
        for name in ("num_classes", "cells_per_stage", "filters", "stages", "stem_multiplier"):
            _check_count(name, getattr(self, name))
        for name, allowed in (("mode", MODES), ("merge", MERGES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(allowed)} but got {getattr(self, name)!r}."
                )
        if not self.ops or not set(self.ops) <= set(VISION_OPS):
            raise ConfigError(f"ops must be among {', '.join(VISION_OPS)} but got {self.ops!r}.")
        size = min(self.image_shape[1:])
        if 2 ** (self.stages - 1) > size:
            raise ConfigError(
                f"stages must halve a {size}x{size} image at most {size.bit_length() - 1} times"
                f" but got {self.stages} stages."
            )

    def seed(self) -> VisionGenotype:
        """Return the simplest member of the space, where growth starts."""
        return VisionGenotype.seed(self.mode, len(self.shapes()), self.merge)

    def build(self, genotype: Genotype, *, auxiliary: bool = False) -> VisionNetwork:
        """Build a network with fresh weights.

        Parameters
        ----------
        genotype
            The architecture.
        auxiliary
            Whether to add the auxiliary head of the final training.
        """
        return VisionNetwork(self, self.check(genotype), auxiliary).to(
            memory_format=torch.channels_last
        )

    def check(self, genotype: Genotype) -> VisionGenotype:
        """Return the genotype if it fits this space, else raise `GenotypeError`."""
        if not isinstance(genotype, VisionGenotype):
            kind = getattr(genotype, "space", type(genotype).__name__)
            raise GenotypeError(f"space: must be vision but got {kind!r}.")
        if genotype.mode != self.mode:
            raise GenotypeError(f"mode: the space's is {self.mode!r} but got {genotype.mode!r}.")
        if self.mode == "macro" and len(genotype.cells) != len(self.shapes()):
            raise GenotypeError(
                f"cells: the space has {len(self.shapes())} cells but got {len(genotype.cells)}."
            )
        return genotype

    def shapes(self) -> list[Shape]:
        """Return the output shape of every cell, reductions included."""
        result = []
        for stage in range(self.stages):
            shape = Shape(self.filters * 2**stage, stage)
            result += [shape] * (self.cells_per_stage + (stage > 0))
        return result

    def keys(self) -> list[str]:
        """Return the α table's key of every cell."""
        shapes = self.shapes()
        if self.mode == "macro":
            return [macro_key(i) for i in range(len(shapes))]
        levels = [0, *(shape.level for shape in shapes)]
        return [
            "reduce" if after > before else "normal" for before, after in itertools.pairwise(levels)
        ]

    def describe(self) -> dict[str, Any]:
        """Return the space as plain data; ``VisionSpace(**data)`` makes it again."""
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
        }


def _check_image_shape(shape: Sequence[int]) -> None:
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in shape)
    if len(shape) != 3 or not whole or shape[0] < 1 or min(shape[1:]) < MIN_IMAGE_SIZE:
        raise ConfigError(
            "image_shape must be (channels, height, width), at least"
            f" (1, {MIN_IMAGE_SIZE}, {MIN_IMAGE_SIZE}), but got {tuple(shape)!r}."
        )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1 but got {value!r}.")
