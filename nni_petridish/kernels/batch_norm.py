"""Batch norm in training on the CPU whose input gradient is computed by the preceding conv."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.kernels.late_gradient import BeforeNorm, LateGradient
from nni_petridish.kernels.moments import has_batch_statistics, running_buffers
from nni_petridish.kernels.native.norms import Norm, Running
from nni_petridish.kernels.once import once_differentiable


def normalize(before: BeforeNorm, norm: nn.BatchNorm2d, added: Tensor | None = None) -> Tensor:
    """Return ``norm(before.value)``, plus images of the same shape if given."""
    y, moments, late = before
    running = None
    # One value per channel has no variance: the plain norm raises PyTorch's error.
    if moments is not None and late is not None and y.numel() > y.shape[1]:
        running = running_buffers(norm, y) if has_batch_statistics(norm) else None
    if running is None:
        return norm(y) if added is None else norm(y) + added
    momentum = norm.momentum
    assert momentum is not None
    result: Tensor = _Normalize.apply(
        *(y, norm.weight, norm.bias, added),
        *(norm.eps, Running(running, momentum), moments, late),
    )
    return result


class _Normalize(torch.autograd.Function):
    """Batch norm: x̂ = (x − μ)/σ, y = γ·x̂ + β, or x̂ itself without γ and β."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        added: Tensor | None,
        eps: float,
        running: Running,
        moments: tuple[Tensor, Tensor],
        late: LateGradient,
    ) -> Tensor:
        ctx.save_for_backward(x, gamma, beta, *moments)
        ctx.eps, ctx.late, ctx.adds = eps, late, added is not None
        if added is not None:
            added = added.contiguous(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
        return _norm(gamma, beta, *moments, eps).forward(x, running, added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, variance = ctx.saved_tensors
        # Hooks on saved tensors may have changed their layout.
        g, x = (value.contiguous(memory_format=torch.channels_last) for value in (grads[0], x))
        found = _norm(gamma, beta, mean, variance, ctx.eps).backward(g, x)
        ctx.late.store(g, found.of)
        return g, found.gamma, found.beta, g if ctx.adds else None, None, None, None, None


def _norm(
    gamma: Tensor | None, beta: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Norm:
    if gamma is None or beta is None:
        return Norm(None, None, mean, variance, eps)
    return Norm(gamma.contiguous(), beta.contiguous(), mean, variance, eps)
