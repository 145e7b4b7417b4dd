"""ReLU and 1x1 convs to another width in one pass over the images, in training on the CPU.

As in `nni_petridish.kernels.separable`, only input and output are saved, and the backward pass
computes the gradient of the norm that follows (see `nni_petridish.kernels.late_gradient`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.kernels.deferred_candidates import DeferredCandidate, running_statistics
from nni_petridish.kernels.late_gradient import BeforeNorm, LateGradient
from nni_petridish.kernels.moments import has_hooks
from nni_petridish.kernels.native.calls import Geometry, Projection, native_trains
from nni_petridish.kernels.native.candidates import Kernel
from nni_petridish.kernels.once import once_differentiable


def can_project(x: Tensor, convs: Sequence[nn.Conv2d]) -> bool:
    """Return whether `projection` supports these modules and x."""
    return native_trains(x) and _are_known(convs, x)


def is_pointwise(conv: nn.Conv2d, x: Tensor) -> bool:
    """Return whether a module is a plain 1x1 conv without bias that fits x."""
    return (
        is_plain_pointwise(conv)
        and conv.weight.shape[1:] == (x.shape[1], 1, 1)
        and conv.weight.dtype is x.dtype
    )


def is_plain_pointwise(conv: nn.Conv2d) -> bool:
    """Return whether a module is a plain 1x1 conv without bias."""
    return (
        type(conv) is nn.Conv2d
        and conv.bias is None
        and (conv.stride, conv.padding) == ((1, 1), (0, 0))
        and conv.weight.shape[2:] == (1, 1)
        and not has_hooks(conv)
    )


def _are_known(convs: Sequence[nn.Conv2d], x: Tensor) -> bool:
    widths = [conv.weight.shape[0] for conv in convs]
    if len(widths) == 2 and widths[0] != sum(widths) // 2:
        return False
    return all(conv.training and is_pointwise(conv, x) for conv in convs)


def deferred_reduction(
    x: Tensor, convs: Sequence[nn.Conv2d], norm: nn.BatchNorm2d
) -> DeferredCandidate | None:
    """Return two convs and a norm as a deferred candidate; None if they are not supported."""
    weights = [conv.weight for conv in convs]
    if sum(weight.shape[0] for weight in weights) != x.shape[1] or not _are_known(convs, x):
        return None
    running = running_statistics([norm], x)
    if running is None:
        return None
    return DeferredCandidate(x, Kernel([Geometry(1, 2, 1)], "reduce"), weights, running)


def projection(x: Tensor, convs: Sequence[nn.Conv2d]) -> BeforeNorm:
    """Return one conv of ReLU(x), or two convs of its even and its odd pixels, concatenated."""
    late = LateGradient()
    y, mean, variance = _Project.apply(x, late, *(conv.weight for conv in convs))
    return BeforeNorm(y, (mean, variance), late)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, late: LateGradient, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, variance = Projection([weight.contiguous() for weight in weights]).forward(x)
        ctx.save_for_backward(x, y, *weights)
        ctx.late = late
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y, *weights = ctx.saved_tensors
        of = ctx.late.take(grads[0])
        # Hooks on saved tensors may have changed their layout.
        x, y, g = (
            value.contiguous(memory_format=torch.channels_last) for value in (x, y, grads[0])
        )
        projection = Projection([weight.contiguous() for weight in weights])
        dx, found = projection.backward(g, y, of, x, want_input=ctx.needs_input_grad[0])
        return dx, None, *found
