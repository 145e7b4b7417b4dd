"""NAS-Bench-Macro: identity, MB3_K3 or MB6_K5 at each of 8 layers, 6,561 networks.

A layer that is the identity can grow one of the two blocks. In a layer that keeps the shape, the
block is added to its input, so a growth is an addition as in Petridish. In a layer that halves the
resolution the identity is a strided 1x1 convolution, which the block replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from nni_petridish.core.complexity import count_multiply_adds, count_parameters
from nni_petridish.core.genotype import Genotype, Shortcut
from nni_petridish.core.site import Site
from nni_petridish.errors import ConfigError
from nni_petridish.kernels.depthwise import DepthwiseConv2d
from search_spaces.tables.codes import SOURCE, CodeGenotype, inherit

BLOCKS = {"MB3_K3": (3, 3), "MB6_K5": (6, 5)}
"""The expansion and the kernel of each block."""
STAGES = (2, 3, 3)


@dataclass(frozen=True)
class MacroGenotype(CodeGenotype):
    """A network of NAS-Bench-Macro.

    Parameters
    ----------
    code
        One digit for each layer: 0 identity, 1 MB3_K3, 2 MB6_K5.

    Examples
    --------
    >>> MacroGenotype("00000000").grown({"layer_1": (("prev", "MB6_K5"),)}).code
    '02000000'
    """

    space: ClassVar[str] = "nas-bench-macro"
    key_noun: ClassVar[str] = "layer"
    empty: ClassVar[str] = "0"
    digits: ClassVar[Mapping[str, str]] = {"MB3_K3": "1", "MB6_K5": "2"}


class InvertedResidual(nn.Sequential):
    """The convolutions of an inverted residual block, without its residual connection.

    Parameters
    ----------
    channels_in, channels_out, stride
        The shape of the layer.
    block
        ``"MB3_K3"`` or ``"MB6_K5"``.
    affine
        Whether the last batch norm is affine; that of a candidate is not, so that |α| compares.
    """

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, block: str, affine: bool = True
    ) -> None:
        expansion, kernel = BLOCKS[block]
        hidden = expansion * channels_in
        super().__init__(
            nn.Conv2d(channels_in, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(inplace=True),
            DepthwiseConv2d(hidden, kernel, stride),
            nn.BatchNorm2d(hidden),
            nn.ReLU(inplace=True),
            nn.Conv2d(hidden, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out, affine=affine),
        )

    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm at the end."""
        return cast(nn.BatchNorm2d, [*self][-1])


class Layer(Site):
    """A layer of the network: a site while it is the identity.

    Parameters
    ----------
    index
        The number of the layer.
    channels_in, channels_out, stride
        The shape of the layer.
    digit
        Its digit in the genotype.
    """

    pool = "layers"  # one block is added in a growth

    def __init__(
        self, index: int, channels_in: int, channels_out: int, stride: int, digit: str
    ) -> None:
        block = MacroGenotype.op(digit)
        super().__init__(MacroGenotype.key(index), [SOURCE], [] if block else list(BLOCKS))
        self.shape = (channels_in, channels_out, stride)
        self.keeps_shape = stride == 1 and channels_in == channels_out
        self.block: InvertedResidual | None = None
        self.projection: nn.Module | None = None
        if block is not None:
            self.block = InvertedResidual(*self.shape, block)
        elif not self.keeps_shape:
            self.projection = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def make_op(self, source: str, op: str) -> nn.Module:
        """Make a block whose last batch norm has no affine parameters."""
        return InvertedResidual(*self.shape, op, affine=False)

    def eligible_shortcuts(self) -> list[Shortcut]:
        """Return the two blocks, until one was added."""
        return [] if self.learners else [(SOURCE, op) for op in self.op_names]

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if self.block is not None:
            return self.block(x) + x if self.keeps_shape else self.block(x)
        return self.boost(x if self.projection is None else self.projection(x), {SOURCE: x})


class MacroNetwork(nn.Module):
    """A network of the table, built by `MacroSpace.build`."""

    def __init__(self, space: MacroSpace, genotype: MacroGenotype) -> None:
        super().__init__()
        self.genotype = genotype
        width = space.filters
        self.stem = _conv_bn_relu(space.image_shape[0], width, 3)
        digits, layers = iter(enumerate(genotype.code)), list[nn.Module]()
        for stage in space.stages:
            for place in range(stage):
                wider = 2 * width if place == 0 else width
                index, digit = next(digits)
                layers.append(Layer(index, width, wider, 2 if place == 0 else 1, digit))
                width = wider
        self.layers = nn.Sequential(*layers)
        self.head = _conv_bn_relu(width, space.features, 1)
        self.classifier = nn.Linear(space.features, space.num_classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(self.head(self.layers(self.stem(images))).mean((2, 3)))


def _conv_bn_relu(channels_in: int, channels_out: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


@dataclass(frozen=True)
class MacroSpace:
    """The space of NAS-Bench-Macro; the defaults are the table's.

    Parameters
    ----------
    image_shape, num_classes
        Those of CIFAR-10.
    stages
        The number of layers of each stage; the first halves the resolution and doubles the width.
    filters, features
        The width of the stem, and of the last convolution.

    Examples
    --------
    >>> space = MacroSpace()
    >>> space.size(space.build(space.seed()))  # the table's columns of 00000000
    (7713280, 387882)
    """

    image_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    stages: tuple[int, ...] = STAGES
    filters: int = 32
    features: int = 1280

    name = MacroGenotype.space

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", tuple(self.image_shape))
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages or min(self.stages) < 1:
            raise ConfigError(f"stages must be at least one whole number but got {self.stages!r}.")

    def genotype(self, code: str) -> MacroGenotype:
        """Return the genotype with this code."""
        return self.check(MacroGenotype(code))

    def code(self, genotype: Genotype) -> str:
        """Return the code of a genotype."""
        return self.check(genotype).code

    def seed(self) -> MacroGenotype:
        """Return the network of identities."""
        return MacroGenotype("0" * sum(self.stages))

    def build(self, genotype: Genotype) -> MacroNetwork:
        """Build the network that was trained for the table, with fresh weights."""
        return MacroNetwork(self, self.check(genotype))

    def build_grown(self, parent: nn.Module, genotype: Genotype) -> MacroNetwork:
        """Build a network with the weights of its parent; only new blocks have fresh weights.

        Where a new block is added to its input it starts at zero, so that the function is that of
        the parent. Where it replaces a strided convolution that is not possible.
        """
        net = self.build(genotype)
        new = inherit(net, parent)
        for name, layer in net.named_modules():
            if not isinstance(layer, Layer) or layer.block is None or not layer.keeps_shape:
                continue
            if f"{name}.block.0.weight" in new:
                nn.init.zeros_(layer.block.last_norm().weight)
        return net

    def check(self, genotype: Genotype) -> MacroGenotype:
        """Return the genotype if it fits this space, else raise `GenotypeError`."""
        return MacroGenotype.require(genotype).of_length(sum(self.stages))

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one example, parameters) of a network of this space."""
        return count_multiply_adds(net, self.image_shape), count_parameters(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return an image for a network of this space."""
        return (torch.zeros(1, *self.image_shape),)

    def describe(self) -> dict[str, Any]:
        """Return the space as plain data; ``MacroSpace(**data)`` is an equal space."""
        return {
            "image_shape": list(self.image_shape),
            "num_classes": self.num_classes,
            "stages": list(self.stages),
            "filters": self.filters,
            "features": self.features,
        }
