"""Separable convs in training on the CPU, each unit in one pass over its images.

A unit is ReLU, depthwise conv and pointwise conv, preceded by a batch norm in all but the first.
Only its input x and output y are saved. Intermediate values are recomputed in the backward pass,
image by image, while they are in the cache. With x̂ = (x − μ)/σ, the norm returns γ·x̂ + β; with b
the gradient of that,

    dβ = Σ b,    dγ = Σ b·x̂,    dx = γ/σ · (b − mean(b) − x̂ · mean(b·x̂)).

dx is a combination of b and x. The previous unit, whose output is x, computes it in its own pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.kernels.deferred_candidates import DeferredCandidate, running_statistics
from nni_petridish.kernels.depthwise import DepthwiseConv2d
from nni_petridish.kernels.late_gradient import BeforeNorm, LateGradient
from nni_petridish.kernels.moments import (
    has_batch_statistics,
    has_hooks,
    running_buffers,
)
from nni_petridish.kernels.native.calls import Unit, native_trains
from nni_petridish.kernels.native.candidates import Kernel
from nni_petridish.kernels.native.norms import Norm, Running, count_of
from nni_petridish.kernels.once import once_differentiable
from nni_petridish.kernels.pointwise import is_pointwise


class UnitModules(NamedTuple):
    """The modules of a unit. Its ReLU needs none."""

    norm: nn.BatchNorm2d | None
    depthwise: DepthwiseConv2d
    pointwise: nn.Conv2d


def can_fuse(units: Sequence[UnitModules], x: Tensor) -> bool:
    """Return whether `separable_convs` supports these modules and x."""
    stride = units[0].depthwise.geometry.stride
    if x.ndim != 4 or (x.shape[0] == 1 and max(x.shape[2:]) <= stride):
        return False  # one value per channel: the plain norm raises an error
    return native_trains(x) and _parameters(units, x) is not None


def deferred_convs(
    x: Tensor, units: Sequence[UnitModules], last: nn.BatchNorm2d
) -> DeferredCandidate | None:
    """Return one or two units and a norm as a deferred candidate; None if not supported."""
    if len(units) > 2 or any(unit.depthwise.geometry.stride > 1 for unit in units[1:]):
        return None
    parameters = _parameters(units, x)
    if parameters is None:
        return None
    norms = [*(norm for norm, *_ in units if norm is not None), last]
    running = running_statistics(norms, x)
    if running is None:
        return None
    kernel = Kernel([unit.depthwise.geometry for unit in units])
    return DeferredCandidate(x, kernel, parameters, running)


def _parameters(units: Sequence[UnitModules], x: Tensor) -> list[Tensor] | None:
    """Return the parameters of one unit after the other: those of the norm, then the weights.

    Returns None if the C kernels do not support the units.
    """
    found: list[Tensor] = []
    channels, dtype = x.shape[1], x.dtype
    for norm, depthwise, pointwise in units:
        if norm is not None:
            if not (norm.affine and has_batch_statistics(norm)):
                return None
            if running_buffers(norm, x) is None or norm.weight.dtype is not dtype:
                return None
            found += norm.weight, norm.bias
            if norm.weight.shape != (channels,) or norm.bias.shape != (channels,):
                return None
        geometry, weights = depthwise.geometry, (depthwise.weight, pointwise.weight)
        if not (
            depthwise.training
            and geometry.is_native
            and weights[0].shape == (channels, 1, geometry.kernel, geometry.kernel)
            and weights[0].dtype is dtype
            and not has_hooks(depthwise)
            and weights[1].shape[0] == channels
            and is_pointwise(pointwise, x)
        ):
            return None
        found += weights
    return found


def separable_convs(x: Tensor, units: Sequence[UnitModules]) -> BeforeNorm:
    """Apply units to x, the first of which has no norm."""
    late = LateGradient()
    parameters = [
        parameter
        for norm, depthwise, pointwise in units
        for parameter in (
            depthwise.weight,
            pointwise.weight,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
        )
    ]
    y, mean, variance = _SeparableConvs.apply(x, units, late, *parameters)
    return BeforeNorm(y, (mean, variance), late)


class _SeparableConvs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        units: Sequence[UnitModules],
        late: LateGradient,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        values, statistics = [x], []
        mean = variance = scale = shift = x.new_empty(0)
        for i, (norm, depthwise, _) in enumerate(units):
            own, affine = parameters[4 * i : 4 * i + 4], None
            if norm is not None:
                before = _norm(own, mean, variance, norm.eps)
                affine = scale, shift = before.affine(_running(norm, x), count_of(values[i]))
            statistics += [mean, variance, scale, shift]
            y, mean, variance = _unit(depthwise, own, affine).forward(values[i])
            values.append(y)
        ctx.save_for_backward(*values, *statistics, *parameters)
        ctx.convs, ctx.late = [unit.depthwise for unit in units], late
        ctx.eps = [0.0 if unit.norm is None else unit.norm.eps for unit in units]
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        n, saved = len(ctx.convs), ctx.saved_tensors  # read once: checkpointing recomputes them
        # Hooks on saved tensors may have changed their layout.
        values = [value.contiguous(memory_format=torch.channels_last) for value in saved[: n + 1]]
        statistics, parameters = saved[n + 1 : 5 * n + 1], saved[5 * n + 1 :]
        of = ctx.late.take(grads[0])
        g: Tensor | None = grads[0].contiguous(memory_format=torch.channels_last)
        found: list[Tensor | None] = []
        for i in reversed(range(n)):
            x, own = values[i], parameters[4 * i : 4 * i + 4]
            mean, variance, scale, shift = statistics[4 * i : 4 * i + 4]
            has_norm = own[2] is not None
            assert g is not None
            gradients = _unit(ctx.convs[i], own, (scale, shift) if has_norm else None).backward(
                *(g, values[i + 1], of, x, mean if has_norm else None),
                want_input=i > 0 or ctx.needs_input_grad[0],
            )
            g, dgamma, dbeta = gradients.before_relu, None, None
            if has_norm:
                norm = _norm(own, mean, variance, ctx.eps[i])
                dgamma, dbeta, of = norm.gradients(
                    gradients.totals, gradients.products, count_of(x)
                )
            found = [gradients.depthwise, gradients.pointwise, dgamma, dbeta, *found]
        return g, None, None, *found


def _unit(
    conv: DepthwiseConv2d,
    parameters: Sequence[Tensor | None],
    affine: tuple[Tensor, Tensor] | None,
) -> Unit:
    depthwise, pointwise, *_ = parameters
    assert depthwise is not None
    assert pointwise is not None
    return Unit(conv.geometry, depthwise.contiguous(), pointwise.contiguous(), affine)


def _norm(parameters: Sequence[Tensor | None], mean: Tensor, variance: Tensor, eps: float) -> Norm:
    *_, gamma, beta = parameters
    assert gamma is not None
    assert beta is not None
    return Norm(gamma.contiguous(), beta.contiguous(), mean, variance, eps)


def _running(norm: nn.BatchNorm2d, x: Tensor) -> Running:
    buffers = running_buffers(norm, x)
    assert buffers is not None
    assert norm.momentum is not None
    return Running(buffers, norm.momentum)
