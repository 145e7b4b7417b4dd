"""Model spaces as users write them, from NNI's own cells and choices."""

from __future__ import annotations

import nni
import torch
from nni.nas.nn.pytorch import (
    Cell,
    InputChoice,
    LayerChoice,
    ModelSpace,
    MutableConv2d,
    MutableLinear,
    Repeat,
)
from torch import Tensor, nn


def block(channels: int, kernel: int) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(inplace=True),  # as users have it: it overwrites what others may read
        nn.Conv2d(channels, channels, kernel, padding=kernel // 2),
        nn.BatchNorm2d(channels),
    )


class Choices(ModelSpace):
    """Layers, inputs and a depth to choose, outside of cells."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        layers = {"conv3": block(channels, 3), "skip": nn.Identity(), "conv1": block(channels, 1)}
        self.layer = LayerChoice(layers, label="layer")
        self.numbered = LayerChoice(
            [nn.MaxPool2d(3, 1, 1), block(channels, 3), nn.AvgPool2d(3, 1, 1)], label="numbered"
        )
        self.one = InputChoice(n_candidates=2, n_chosen=1, label="one")
        self.some = InputChoice(n_candidates=3, n_chosen=None, label="some")
        self.two = InputChoice(n_candidates=3, n_chosen=2, label="two")
        self.deep = Repeat(
            lambda i: LayerChoice([block(channels, 3), nn.Identity()], label=f"deep{i}"),
            (1, 3),
            label="depth",
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        y = self.layer(x)
        z = self.numbered(y)
        mixed = self.some([self.one([z, x]), y, x]) + self.two([x, y, z])
        return self.head(self.deep(mixed).mean(dim=(2, 3)))


class OwnCells(ModelSpace):
    """Cells of plain modules, one operator per node, and a width to choose."""

    def __init__(self, nodes: int = 2) -> None:
        super().__init__()
        width = nni.choice("width", [4, 6])
        self.stem = MutableConv2d(1, width, 3, padding=1)
        self.cells = nn.ModuleList(
            Cell([nn.AvgPool2d(3, 1, 1), nn.ReLU(inplace=True)], nodes, label="cell")
            for _ in range(2)
        )
        self.project = MutableConv2d(nodes * width, width, 1)
        self.head = MutableLinear(nodes * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        first, second = self.cells
        return self.head(second(self.project(first(self.stem(images)))).mean(dim=(2, 3)))


class Vectors(ModelSpace):
    """No images: a choice between layers on vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LayerChoice(
            [nn.Linear(64, 64), nn.Identity(), nn.Sequential(nn.Linear(64, 64), nn.ReLU())],
            label="layer",
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(torch.flatten(images, 1)))


class WeightedVectors(Vectors):
    """A network of two tensors: images, and a weight for each."""

    def forward(self, images: Tensor, weights: Tensor) -> Tensor:
        return super().forward(images) * weights[:, None]


class Tabular(ModelSpace):
    """Rows of a table in, one number out: a cell, a layer and inputs to choose."""

    def __init__(self, features: int = 10, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        ops = {
            "linear": lambda node, op, source: nn.Linear(width, width),
            "relu": lambda node, op, source: nn.Sequential(nn.Linear(width, width), nn.ReLU()),
            "skip": lambda node, op, source: nn.Identity(),
        }
        self.cell = Cell(ops, 2, label="cell")
        layers = [nn.Identity(), nn.Sequential(nn.Linear(2 * width, 2 * width), nn.Tanh())]
        self.layer = LayerChoice(layers, label="layer")
        self.inputs = InputChoice(n_candidates=2, n_chosen=None, label="inputs")
        self.head = nn.Linear(2 * width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        cell = self.cell(self.stem(rows))
        return self.head(self.inputs([self.layer(cell), cell.relu()]))


class OnlyWidths(ModelSpace):
    """Nothing that could grow."""

    def __init__(self) -> None:
        super().__init__()
        width = nni.choice("width", [4, 8])
        self.first = MutableLinear(64, width)
        self.head = MutableLinear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.first(images.flatten(1)))


class Tiny(ModelSpace):
    """Two architectures in all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layer = LayerChoice({"skip": nn.Identity(), "conv": block(4, 3)}, label="layer")
        self.head = nn.Linear(4, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(self.stem(images)).mean(dim=(2, 3)))


class TwoInputs(ModelSpace):
    """A network of two inputs, the first of which has another width in some cells.

    ``kind``: ``plain``, ``processed`` (with a pre- and a postprocessor), ``loose_end`` or
    ``factory`` (operations that depend on their input).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first_width = 3 if kind in ("processed", "factory") else 8
        options: dict[str, object] = {"merge_op": "loose_end" if kind == "loose_end" else "all"}
        ops: object = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False)]
        if kind == "processed":
            options |= {"preprocessor": WidenFirst(), "postprocessor": PassOn()}
        if kind == "factory":
            ops = {
                name: lambda node, op, source, bias=bias: nn.Linear(
                    3 if source == 0 else 8, 8, bias=bias
                )
                for name, bias in (("biased", True), ("unbiased", False))
            }
        self.cell = Cell(ops, 3, 2, 2, label="cell", **options)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.cell(first, second)


class WidenFirst(nn.Module):
    """A preprocessor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 8)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [self.linear(inputs[0]), inputs[1]]


class PassOn(nn.Module):
    """A postprocessor."""

    def forward(self, cell: Tensor, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        return inputs[-1], cell


class Unused(Vectors):
    """A choice that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = LayerChoice([nn.Linear(2, 2), nn.Identity()], label="unused")
