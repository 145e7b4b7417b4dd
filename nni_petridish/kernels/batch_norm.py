"""Batch norm in training on the CPU whose input gradient is computed by the preceding conv."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.kernels.late_gradient import BeforeNorm, LateGradient
from nni_petridish.kernels.moments import (
    has_batch_statistics,
    input_gradient_coefficients,
    norm_as_affine,
    update_running_statistics,
)
from nni_petridish.kernels.native import calls as native
from nni_petridish.kernels.once import once_differentiable


def normalize(before: BeforeNorm, norm: nn.BatchNorm2d) -> Tensor:
    """Return ``norm(before.value)``."""
    y, moments, late = before
    if moments is None or late is None or not has_batch_statistics(norm):
        return norm(y)
    if y.numel() == y.shape[1]:
        return norm(y)  # raises PyTorch's error: one value per channel has no variance
    result: Tensor = _Normalize.apply(y, norm.weight, norm.bias, norm, moments, late)
    return result


class _Normalize(torch.autograd.Function):
    """Batch norm: x̂ = (x − μ)/σ, y = γ·x̂ + β, or x̂ itself without γ and β."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        norm: nn.BatchNorm2d,
        moments: tuple[Tensor, Tensor],
        late: LateGradient,
    ) -> Tensor:
        mean, variance = moments
        update_running_statistics([norm], mean[None], variance[None], x.numel() // x.shape[1])
        inv_std = torch.rsqrt(variance + norm.eps)
        ctx.save_for_backward(x, gamma, mean, inv_std)
        ctx.late = late
        if gamma is None or beta is None:
            gamma, beta = torch.ones_like(mean), torch.zeros_like(mean)
        scale, shift = norm_as_affine(gamma, beta, mean, inv_std)
        return native.combine(x, x, native.Combination(scale, torch.zeros_like(scale), shift))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, inv_std = ctx.saved_tensors
        g = grads[0].contiguous(memory_format=torch.channels_last)
        dbeta, products = native.correlations(g, x, mean)
        dgamma = products * inv_std
        scale, count = inv_std if gamma is None else gamma * inv_std, x.numel() // x.shape[1]
        ctx.late.store(
            g,
            native.Combination(
                *input_gradient_coefficients(scale, mean, inv_std, dgamma, dbeta, count)
            ),
        )
        return g, *((None, None) if gamma is None else (dgamma, dbeta)), None, None, None
