"""NAS-Bench-201: one of five operations on each of the six edges of a cell, 15,625 networks.

An edge that is a skip (or none) can grow a convolution or a pooling, which takes its place in the
table's network. The 15 cells are alike, so their edges share the α tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.core.complexity import count_multiply_adds, count_parameters
from nni_petridish.core.genotype import Genotype, Shortcut
from nni_petridish.core.site import Site
from nni_petridish.errors import ConfigError
from search_spaces.tables.codes import SOURCE, CodeGenotype, inherit

EDGES = ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
"""Start and end of each edge, in the order of the digits; node 0 is the input of the cell."""
SKIP = "1"


@dataclass(frozen=True)
class CellsGenotype(CodeGenotype):
    """A cell of NAS-Bench-201.

    Parameters
    ----------
    code
        One digit for each edge: 0 none, 1 skip, 2 conv 1x1, 3 conv 3x3, 4 average pooling.

    Examples
    --------
    >>> CellsGenotype("111111").grown({"edge_3": (("prev", "conv_3x3"),)}).code
    '111311'
    """

    space: ClassVar[str] = "nas-bench-201"
    key_noun: ClassVar[str] = "edge"
    empty: ClassVar[str] = "01"
    digits: ClassVar[Mapping[str, str]] = {"conv_1x1": "2", "conv_3x3": "3", "avg_pool_3x3": "4"}


class ReluConvNorm(nn.Sequential):
    """ReLU, convolution and batch norm."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        stride: int = 1,
        affine: bool = True,
    ) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(channels_out, affine=affine),
        )


def make_op(op: str, channels: int, affine: bool = True) -> nn.Module:
    """Make an operation of the table; ``affine=False`` makes a candidate, normalized."""
    if op == "avg_pool_3x3":
        pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        return pool if affine else nn.Sequential(pool, nn.BatchNorm2d(channels, affine=False))
    return ReluConvNorm(channels, channels, 1 if op == "conv_1x1" else 3, affine=affine)


class Edge(Site):
    """An edge of a cell: a site while it is a skip or none.

    Parameters
    ----------
    index
        The number of the edge.
    channels
        The width of the cell.
    digit
        Its digit in the genotype.
    """

    pool = "edges"  # one operation is added in a growth

    def __init__(self, index: int, channels: int, digit: str) -> None:
        op = CellsGenotype.op(digit)
        super().__init__(
            CellsGenotype.key(index), [SOURCE], [] if op else list(CellsGenotype.digits)
        )
        self.channels, self.is_skip = channels, digit == SKIP
        self.op = None if op is None else make_op(op, channels)

    def make_op(self, source: str, op: str) -> nn.Module:
        """Make an operation that ends in a batch norm without affine parameters."""
        return make_op(op, self.channels, affine=False)

    def eligible_shortcuts(self) -> list[Shortcut]:
        """Return the operations, until one was added."""
        return [] if self.learners else [(SOURCE, op) for op in self.op_names]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the edge."""
        if self.op is not None:
            return self.op(x)
        return self.boost(x if self.is_skip else torch.zeros_like(x), {SOURCE: x})


class Cell(nn.Module):
    """A cell: the nodes 1 to 3 are sums over the edges that end there."""

    def __init__(self, channels: int, code: str) -> None:
        super().__init__()
        self.edges = nn.ModuleList(Edge(i, channels, digit) for i, digit in enumerate(code))

    def forward(self, x: Tensor) -> Tensor:
        """Return the last node."""
        nodes = [x]
        for node in range(1, 4):
            outputs = [
                edge(nodes[start])
                for edge, (start, end) in zip(self.edges, EDGES, strict=True)
                if end == node
            ]
            nodes.append(torch.stack(outputs).sum(0))
        return nodes[-1]


class Reduction(nn.Module):
    """The residual block between stages, which halves the resolution and doubles the width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wider = 2 * channels
        self.convs = nn.Sequential(
            ReluConvNorm(channels, wider, 3, stride=2), ReluConvNorm(wider, wider, 3)
        )
        self.projection = nn.Conv2d(channels, wider, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the convolutions and the projected, pooled input."""
        return self.projection(F.avg_pool2d(x, 2)) + self.convs(x)


class CellsNetwork(nn.Module):
    """A network of the table, built by `CellsSpace.build`."""

    def __init__(self, space: CellsSpace, genotype: CellsGenotype) -> None:
        super().__init__()
        self.genotype = genotype
        width = space.filters
        self.stem = nn.Sequential(
            nn.Conv2d(space.image_shape[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        layers: list[nn.Module] = []
        for stage in range(3):
            if stage:
                layers.append(Reduction(width))
                width *= 2
            layers += [Cell(width, genotype.code) for _ in range(space.cells_per_stage)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(width, space.num_classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(self.norm(self.layers(self.stem(images))).mean((2, 3)))


@dataclass(frozen=True)
class CellsSpace:
    """The space of NAS-Bench-201; the defaults are those of its networks on CIFAR-10.

    Parameters
    ----------
    image_shape, num_classes
        Those of the data.
    cells_per_stage, filters
        Number of cells in each of the three stages, and the width of the first.

    Examples
    --------
    >>> space = CellsSpace()
    >>> space.size(space.build(space.seed()))
    (7783040, 73306)
    """

    image_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    cells_per_stage: int = 5
    filters: int = 16

    name = CellsGenotype.space

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", tuple(self.image_shape))
        if self.cells_per_stage < 1:
            raise ConfigError(f"cells_per_stage must be at least 1 but got {self.cells_per_stage}.")

    def genotype(self, code: str) -> CellsGenotype:
        """Return the genotype with this code."""
        return self.check(CellsGenotype(code))

    def code(self, genotype: Genotype) -> str:
        """Return the code of a genotype."""
        return self.check(genotype).code

    def seed(self) -> CellsGenotype:
        """Return the cell of skips."""
        return CellsGenotype(SKIP * len(EDGES))

    def build(self, genotype: Genotype) -> CellsNetwork:
        """Build the network that was trained for the table, with fresh weights."""
        return CellsNetwork(self, self.check(genotype))

    def build_grown(self, parent: nn.Module, genotype: Genotype) -> CellsNetwork:
        """Build a network with the weights of its parent.

        The new operation has fresh weights. It takes the place of a skip, so the function is not
        that of the parent.
        """
        net = self.build(genotype)
        inherit(net, parent)
        return net

    def check(self, genotype: Genotype) -> CellsGenotype:
        """Return the genotype if it fits this space, else raise `GenotypeError`."""
        return CellsGenotype.require(genotype).of_length(len(EDGES))

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one example, parameters) of a network of this space."""
        return count_multiply_adds(net, self.image_shape), count_parameters(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return an image for a network of this space."""
        return (torch.zeros(1, *self.image_shape),)

    def describe(self) -> dict[str, Any]:
        """Return the space as plain data; ``CellsSpace(**data)`` is an equal space."""
        return {
            "image_shape": list(self.image_shape),
            "num_classes": self.num_classes,
            "cells_per_stage": self.cells_per_stage,
            "filters": self.filters,
        }
