"""The registry of unary operations on images, by name, readable without torch.

A new operation is one decorated function, see `register_op`. `search_spaces.op_registry` says how
other processes find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from search_spaces.op_registry import OpRegistry

if TYPE_CHECKING:
    from torch import nn

OpMaker: TypeAlias = "Callable[[int, int, bool], nn.Module]"
"""A function of (channels, stride, affine) that makes the module of an operation."""

VISION_OPS = (
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
    "max_pool_3x3",
    "avg_pool_3x3",
    "identity",
)
"""The eligible operations of the paper's vision tasks, in the order of the α tables."""

KNOWN_OPS: OpRegistry[OpMaker] = OpRegistry(VISION_OPS)
"""The names of all operations on images."""


def register_op(name: str) -> Callable[[OpMaker], OpMaker]:
    """Register an operation under this name, for spaces, genotypes and networks.

    The decorated function takes ``(channels, stride, affine)`` and returns a module with as many
    output as input channels. Stride is 1, or 2 to halve the resolution, rounding up. The module
    must end in ``nn.BatchNorm2d(channels, affine=affine)``, so that |α| is comparable across
    candidates.

    Parameters
    ----------
    name
        The name of the operation, a unique identifier.

    Examples
    --------
    ::

        @register_op("conv_3x3")
        def conv_3x3(channels: int, stride: int, affine: bool) -> nn.Module:
            conv = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
            return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(channels, affine=affine))

        space = VisionSpace((3, 32, 32), 10, ops=["conv_3x3", "identity"])
    """
    return KNOWN_OPS.register(name)


def op_maker(name: str) -> OpMaker:
    """Return the function registered for an operation; those of the paper are in `ops`."""
    return KNOWN_OPS.maker(name)
