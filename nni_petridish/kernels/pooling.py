"""3x3 pooling, faster in training on the CPU.

In channels_last, PyTorch's pooling is about as slow as a conv with nine taps and no vector units.
Here the maximum of a square is the maximum over rows of maxima over columns, four comparisons of
whole images instead of nine, and the mean is a depthwise conv with ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.kernels.deferred_candidates import DeferredCandidate, running_statistics
from nni_petridish.kernels.late_gradient import BeforeNorm, LateGradient
from nni_petridish.kernels.moments import has_hooks
from nni_petridish.kernels.native.calls import Geometry, native_trains
from nni_petridish.kernels.native.candidates import Kernel
from nni_petridish.kernels.native.pools import Pooling
from nni_petridish.kernels.once import once_differentiable
from nni_petridish.kernels.switch import fast_kernels_apply


class MaxPool3x3(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` of size 3 and padding 1."""

    kind = "max"
    stride: int

    def __init__(self, stride: int) -> None:
        super().__init__(3, stride, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the maxima."""
        if x.requires_grad or not _is_fast(self, x):  # a gradient needs the indices of the maxima
            return super().forward(x)
        return _max_of_three(_max_of_three(x, 2), 3)


class AvgPool3x3(nn.AvgPool2d):
    """`torch.nn.AvgPool2d` of size 3 and padding 1, with the padding not counted."""

    kind = "avg"
    stride: int

    def __init__(self, stride: int) -> None:
        super().__init__(3, stride, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        if not _is_fast(self, x):
            return super().forward(x)
        channels, height, width = x.shape[1:]
        inverse = 1.0 / (_neighbors(height, x)[:, None] * _neighbors(width, x))
        return F.conv2d(x, x.new_ones(channels, 1, 3, 3), padding=1, groups=channels) * inverse


def deferred_pool(
    x: Tensor, pool: MaxPool3x3 | AvgPool3x3 | None, norm: nn.BatchNorm2d
) -> DeferredCandidate | None:
    """Return a pooling, or the identity, and a norm as a deferred candidate, if supported."""
    running = running_statistics([norm], x)
    if running is None or (pool is not None and has_hooks(pool)):
        return None
    kind, stride = ("none", 1) if pool is None else (pool.kind, pool.stride)
    return DeferredCandidate(x, Kernel([Geometry(3, stride, 1)], kind), (), running)


def pooled(x: Tensor, pool: MaxPool3x3 | AvgPool3x3) -> BeforeNorm:
    """Return the pooling of x, in one pass with its moments if the C kernels support that."""
    outputs = x.numel() // x.shape[1] if pool.stride == 1 else x.shape[0] * max(x.shape[2:]) // 2
    if not pool.training or has_hooks(pool) or outputs < 2 or not native_trains(x):
        return BeforeNorm(pool(x))
    late = LateGradient()
    y, mean, variance = _Pool.apply(x, Pooling(pool.kind, pool.stride), late)
    return BeforeNorm(y, (mean, variance), late)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pooling: Pooling, late: LateGradient
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, variance = pooling.forward(x)
        ctx.save_for_backward(x)
        ctx.pooling, ctx.late = pooling, late
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        of = ctx.late.take(grads[0])
        # Hooks on saved tensors may have changed their layout.
        x, g = (value.contiguous(memory_format=torch.channels_last) for value in (x, grads[0]))
        return ctx.pooling.backward(g, of, x), None, None


def _is_fast(pool: nn.MaxPool2d | nn.AvgPool2d, x: Tensor) -> bool:
    return pool.training and pool.stride == 1 and x.device.type == "cpu" and fast_kernels_apply(x)


def _max_of_three(x: Tensor, dim: int) -> Tensor:
    """Return the maximum of each element and its two neighbors along dim."""
    result = x.clone(memory_format=torch.channels_last)
    rest = x.shape[dim] - 1
    for there, here in ((0, 1), (1, 0)):
        target = result.narrow(dim, here, rest)
        torch.maximum(target, x.narrow(dim, there, rest), out=target)
    return result


def _neighbors(size: int, like: Tensor) -> Tensor:
    """Return the number of pixels in the window of three around each position."""
    count = like.new_full((size,), 3.0)
    count[0] -= 1.0
    count[-1] -= 1.0
    return count
