"""The unary operations of the vision space, as in DARTS.

``make_op(name, channels, stride, affine=False)`` makes a candidate: its output is normalized by a
batch norm without affine parameters, so that |α| is comparable across candidates. With
``affine=True`` it makes an ordinary layer, as in the cells of the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.errors import GrowthError
from nni_petridish.kernels.batch_norm import normalize
from nni_petridish.kernels.deferred_candidates import DeferredCandidate
from nni_petridish.kernels.depthwise import DepthwiseConv2d
from nni_petridish.kernels.evaluation import (
    Term,
    convs_term,
    evaluated,
    evaluates,
    pool_term,
    projection_term,
)
from nni_petridish.kernels.late_gradient import BeforeNorm
from nni_petridish.kernels.merging import ConcatConvNorm
from nni_petridish.kernels.moments import has_hooks
from nni_petridish.kernels.once import once_differentiable
from nni_petridish.kernels.pointwise import can_project, deferred_reduction, projection
from nni_petridish.kernels.pooling import AvgPool3x3, MaxPool3x3, deferred_pool, pooled
from nni_petridish.kernels.prepared import EndsInNorm, SharedInput
from nni_petridish.kernels.separable import UnitModules, can_fuse, deferred_convs, separable_convs
from nni_petridish.kernels.switch import fast_kernels_apply
from search_spaces.vision.op_registry import op_maker, register_op


class SeparableConvs(nn.Sequential, EndsInNorm):
    """ReLU, depthwise conv, pointwise conv and batch norm, applied one or more times.

    Parameters
    ----------
    channels
        Number of input and output channels.
    kernel
        Height and width of the depthwise kernels.
    strides
        The stride of each application.
    dilation
        Dilation of the depthwise kernels.
    affine
        Whether the last batch norm is affine. All others are.
    """

    def __init__(
        self, channels: int, kernel: int, strides: Sequence[int], dilation: int, affine: bool
    ) -> None:
        layers: list[nn.Module] = []
        for i, stride in enumerate(strides):
            layers += [
                nn.ReLU(),
                DepthwiseConv2d(channels, kernel, stride, dilation),
                nn.Conv2d(channels, channels, 1, bias=False),
                nn.BatchNorm2d(channels, affine=affine or i < len(strides) - 1),
            ]
        super().__init__(*layers)

    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm at the end."""
        return cast(nn.BatchNorm2d, [*self][-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized output."""
        fast = self.evaluated(x)
        return (
            normalize(self.before_norm(SharedInput(x)), self.last_norm()) if fast is None else fast
        )

    def deferred(self, x: Tensor) -> DeferredCandidate | None:
        """Return the op as a deferred candidate, if the C kernels support it."""
        return deferred_convs(x, self._units(), self.last_norm())

    def term(self, x: Tensor) -> Term | None:
        """Return the op in evaluation as a term, if the C kernels support it."""
        return convs_term(x, self._units(), self.last_norm())

    def before_norm(self, z: SharedInput) -> BeforeNorm:
        """Return the output of the last pointwise conv."""
        units = self._units()
        if self.training and can_fuse(units, z.value):
            return separable_convs(z.value, units)
        x = z.rectified
        for norm, depthwise, pointwise in units:
            # In place, because the gradient of a batch norm does not need its output.
            rectified = x if norm is None else F.relu(norm(x), inplace=self.training)
            x = pointwise(depthwise(rectified))
        return BeforeNorm(x)

    def _units(self) -> list[UnitModules]:
        """Return the modules of each unit: the norm before its ReLU, and its convs."""
        layers = cast(Any, [None, *self])
        return [
            UnitModules(layers[i], layers[i + 2], layers[i + 3]) for i in range(0, len(self), 4)
        ]


class Pool(nn.Sequential, EndsInNorm):
    """3x3 pooling, ``max`` or ``avg``, and batch norm."""

    def __init__(self, kind: str, channels: int, stride: int, affine: bool) -> None:
        pool = MaxPool3x3(stride) if kind == "max" else AvgPool3x3(stride)
        super().__init__(pool, nn.BatchNorm2d(channels, affine=affine))

    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm at the end."""
        _, norm = self
        return cast(nn.BatchNorm2d, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized output."""
        fast = self.evaluated(x)
        return (
            normalize(self.before_norm(SharedInput(x)), self.last_norm()) if fast is None else fast
        )

    def deferred(self, x: Tensor) -> DeferredCandidate | None:
        """Return the op as a deferred candidate, if the C kernels support it."""
        pool, norm = cast(Any, self)
        return deferred_pool(x, pool, norm)

    def term(self, x: Tensor) -> Term | None:
        """Return the op in evaluation as a term, if the C kernels support it."""
        pool, norm = cast(Any, self)
        return None if has_hooks(pool) else pool_term(x, pool.kind, pool.stride, norm)

    def before_norm(self, z: SharedInput) -> BeforeNorm:
        """Return the output of the pooling."""
        pool, _ = cast(Any, self)
        return pooled(z.value, pool)


class Identity(nn.BatchNorm2d, EndsInNorm):
    """The identity, normalized."""

    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm, which is the op itself."""
        return self

    def deferred(self, x: Tensor) -> DeferredCandidate | None:
        """Return the op as a deferred candidate, if the C kernels support it."""
        return deferred_pool(x, None, self)

    def term(self, x: Tensor) -> Term | None:
        """Return the op in evaluation as a term, if the C kernels support it."""
        return pool_term(x, "none", 1, self)

    def before_norm(self, z: SharedInput) -> BeforeNorm:
        """Return the input."""
        return BeforeNorm(z.value)


class _EvenAndOddPixels(torch.autograd.Function):
    """The pixels of even rows and columns, and those of odd ones, padded with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.shape = x.shape
        even, odd = _even_and_odd_pixels(x)
        layout = torch.channels_last
        return even.contiguous(memory_format=layout), odd.contiguous(memory_format=layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        even, odd = grads
        n, channels, height, width = ctx.shape
        # In channels_last, unlike the gradient of a slice: mixed layouts slow all later ops.
        dx = even.new_zeros(n, height, width, channels).permute(0, 3, 1, 2)
        dx[:, :, ::2, ::2] = even
        dx[:, :, 1::2, 1::2] = odd[:, :, : height // 2, : width // 2]
        return dx


def _even_and_odd_pixels(x: Tensor) -> tuple[Tensor, Tensor]:
    even, odd = x[:, :, ::2, ::2], x[:, :, 1::2, 1::2]
    return even, F.pad(odd, (0, x.shape[3] % 2, 0, x.shape[2] % 2))


class FactorizedReduce(nn.Module, EndsInNorm):
    """Halve the resolution without losing pixels: ReLU, two strided 1x1 convs, batch norm.

    One conv reads the pixels of even rows and columns, the other those of odd ones, and their
    outputs are concatenated. Odd sizes round up, as in a strided 3x3 conv with padding 1.
    """

    def __init__(self, c_in: int, c_out: int, affine: bool = True) -> None:
        super().__init__()
        if c_out < 2:
            raise GrowthError(f"a factorized reduce needs at least 2 filters but got {c_out}.")
        self.even = nn.Conv2d(c_in, c_out // 2, 1, bias=False)
        self.odd = nn.Conv2d(c_in, c_out - c_out // 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(c_out, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        """Return x at half the resolution."""
        fast = self.evaluated(x)
        return normalize(self.before_norm(SharedInput(x)), self.norm) if fast is None else fast

    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm at the end."""
        return self.norm

    def deferred(self, x: Tensor) -> DeferredCandidate | None:
        """Return the op as a deferred candidate, if the C kernels support it."""
        return deferred_reduction(x, [self.even, self.odd], self.norm)

    def term(self, x: Tensor) -> Term | None:
        """Return the op in evaluation as a term, if the C kernels support it."""
        return projection_term(x, [self.even, self.odd], self.norm)

    def before_norm(self, z: SharedInput) -> BeforeNorm:
        """Return the outputs of the two convs, concatenated."""
        if can_project(z.value, [self.even, self.odd]):
            return projection(z.value, [self.even, self.odd])
        # Slices instead of strided convs: in torch 2.15 on the CPU, the weight gradient of a
        # strided 1x1 conv with few channels in channels_last corrupts memory.
        x = z.rectified
        if self.training and fast_kernels_apply(x):
            even, odd = _EvenAndOddPixels.apply(x)
        else:
            even, odd = _even_and_odd_pixels(x)
        return BeforeNorm(torch.cat([self.even(even), self.odd(odd)], dim=1))


class ReluConvNorm(nn.Sequential):
    """ReLU, 1x1 conv, batch norm; see `project`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x projected to the other width."""
        relu, *rest = cast(Any, self)
        if type(relu) is nn.ReLU and not has_hooks(relu) and len(rest) == 2:
            conv, norm = rest
            if can_project(x, [conv]):
                return normalize(projection(x, [conv]), norm)
            term = projection_term(x, [conv], norm) if evaluates(x) else None
            if term is not None:
                return evaluated([term])
        return super().forward(x)


def project(c_in: int, c_out: int) -> ReluConvNorm:
    """Make ReLU, 1x1 conv and batch norm, which bring an input to the width of a cell."""
    return ReluConvNorm(nn.ReLU(), nn.Conv2d(c_in, c_out, 1, bias=False), nn.BatchNorm2d(c_out))


@register_op("sep_conv_3x3")
def sep_conv_3x3(channels: int, stride: int, affine: bool) -> nn.Module:
    """Make a separable conv, applied twice; only the first application is strided."""
    return SeparableConvs(channels, 3, (stride, 1), 1, affine)


@register_op("sep_conv_5x5")
def sep_conv_5x5(channels: int, stride: int, affine: bool) -> nn.Module:
    """Make a separable conv with a larger kernel, applied twice."""
    return SeparableConvs(channels, 5, (stride, 1), 1, affine)


@register_op("dil_conv_3x3")
def dil_conv_3x3(channels: int, stride: int, affine: bool) -> nn.Module:
    """Make a dilated separable conv (dilation 2), applied once."""
    return SeparableConvs(channels, 3, (stride,), 2, affine)


@register_op("dil_conv_5x5")
def dil_conv_5x5(channels: int, stride: int, affine: bool) -> nn.Module:
    """Make a dilated separable conv with a larger kernel, applied once."""
    return SeparableConvs(channels, 5, (stride,), 2, affine)


@register_op("max_pool_3x3")
def max_pool_3x3(channels: int, stride: int, affine: bool) -> nn.Module:
    """Make a max pooling over 3x3 pixels."""
    return Pool("max", channels, stride, affine)


@register_op("avg_pool_3x3")
def avg_pool_3x3(channels: int, stride: int, affine: bool) -> nn.Module:
    """Make an average pooling over 3x3 pixels, with the padding not counted."""
    return Pool("avg", channels, stride, affine)


@register_op("identity")
def identity(channels: int, stride: int, affine: bool) -> nn.Module:
    """Make an identity, or a factorized reduce if it halves the resolution."""
    if stride == 1:
        return Identity(channels, affine=affine)
    return FactorizedReduce(channels, channels, affine)


def make_op(name: str, channels: int, stride: int = 1, affine: bool = False) -> nn.Module:
    """Make the operation ``name`` on ``channels`` channels, normalized at its end.

    Parameters
    ----------
    name
        One of `search_spaces.vision.op_registry.KNOWN_OPS`.
    channels
        Number of input and output channels.
    stride
        1, or 2 to halve the resolution.
    affine
        Whether the batch norm at the end has a scale and a shift. Those of candidates do not.
    """
    return op_maker(name)(channels, stride, affine)


class ConcatProject(nn.Module, ConcatConvNorm):
    """op_merge = proj(concat(...)), where proj is a 1x1 conv to x_k's width and a batch norm.

    Parameters
    ----------
    channels
        The width of x_k and of each shortcut.
    n
        The number of shortcuts.
    weights
        If given, proj starts as the sum with these weights (its kernel consists of blocks α_c·I):
        the weighted sum of weak learning is a special case of concatenation and projection.
    """

    def __init__(self, channels: int, n: int, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n * channels, channels, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        if weights is not None:
            blocks = torch.cat([weight * torch.eye(channels) for weight in weights], dim=1)
            with torch.no_grad():
                self.conv.weight.copy_(blocks[:, :, None, None])

    def forward(self, shortcuts: Sequence[Tensor]) -> Tensor:
        """Return h."""
        return self.norm(self.conv(torch.cat(list(shortcuts), dim=1)))

    def conv_and_norm(self) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
        """Return proj."""
        return self.conv, self.norm


class DropPath(nn.Module):
    """Drop the whole branch for random images in training (stochastic depth).

    ``keep`` is the probability to keep a branch. It starts at 1; the training recipe sets it.
    """

    keep: float

    def __init__(self) -> None:
        super().__init__()
        self.keep = 1.0

    @property
    def drops(self) -> bool:
        """Whether a branch may be dropped now."""
        return self.training and self.keep < 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Keep each image with probability ``keep`` and scale it by the inverse, or return 0."""
        factors = self.factors(x)
        return x if factors is None else x * factors

    def factors(self, x: Tensor) -> Tensor | None:
        """Draw the factor of each image, 1/``keep`` or 0, shape (N, 1, 1, 1); None if all are 1."""
        if not self.drops:
            return None
        mask = torch.empty((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device)
        return mask.bernoulli_(self.keep).div_(self.keep)

    def extra_repr(self) -> str:
        """Show the probability to keep a branch."""
        return f"keep={self.keep}"
