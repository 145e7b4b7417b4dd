"""x_k + sf(x_c), where x_c is the α-weighted sum of candidates, without computing x_c.

sf hides the value of the sum, so the forward pass returns x_k itself. Of a candidate that ends in a
batch norm without affine parameters, û = (u − μ)/σ, not even û is needed: the forward pass takes
its mean and variance only. With g = ∇_{x_k} L, the same for all candidates of a site, the backward
pass is

    dα = ⟨g, û⟩,    du = α/σ · (g − mean(g) − û · mean(g·û)).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nni_petridish import native
from nni_petridish.kernels import fast_kernels_apply
from nni_petridish.late_gradient import BeforeNorm, LateGradient
from nni_petridish.moments import (
    channel_moments,
    image_view,
    input_gradient_coefficients,
    pixel_rows,
    row_correlations,
    row_moments,
    update_running_statistics,
    widened,
)
from nni_petridish.native import native_applies


class SharedInput:
    """An input z_i of a site's candidates, with what several of them need of it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._rectified: Tensor | None = None

    @property
    def rectified(self) -> Tensor:
        """ReLU(z_i), computed once."""
        if self._rectified is None:
            self._rectified = F.relu(self.value)
        return self._rectified


class HasLastNorm(ABC):
    """An op that is a batch norm of something."""

    @abstractmethod
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm at its end."""


class EndsInNorm(HasLastNorm):
    """An op that can be computed without the batch norm at its end."""

    @abstractmethod
    def before_norm(self, z: SharedInput) -> BeforeNorm:
        """Return what that batch norm normalises."""


class Unnormalized(NamedTuple):
    """A candidate before its batch norm."""

    value: Tensor
    norm: nn.BatchNorm2d
    moments: tuple[Tensor, Tensor]
    late: LateGradient | None = None

    @classmethod
    def of(cls, op: EndsInNorm, z: SharedInput) -> Unnormalized:
        """Return op(z) without its batch norm."""
        value, moments, late = op.before_norm(z)
        return cls.from_value(value, op, moments, late)

    @classmethod
    def from_value(
        cls,
        value: Tensor,
        op: HasLastNorm,
        moments: tuple[Tensor, Tensor] | None = None,
        late: LateGradient | None = None,
    ) -> Unnormalized:
        """Take a value as what the op's batch norm normalises."""
        # Now, not with those of the other candidates: the value is still in the cache.
        return cls(value, op.last_norm(), moments or row_moments(value.detach()), late)


def can_hide_norms(ops: Iterable[nn.Module], z: Iterable[Tensor]) -> bool:
    """Return whether `add_hidden_sum` can take all op_j(z_i) as they are before their norms."""
    return all(_has_hidable_norm(op) for op in ops) and all(
        value.ndim == 4 and value.numel() > value.shape[1] and fast_kernels_apply(value)
        for value in z
    )


class _AddHiddenSum(torch.autograd.Function):
    """The sum over candidates that are normalised, or of known moments but not normalised yet."""

    @staticmethod
    def forward(
        ctx: Any,
        x_k: Tensor,
        alpha: Tensor,
        mean: Tensor | None,
        inv_std: Tensor | None,
        late: Sequence[LateGradient | None],
        *candidates: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(alpha, mean, inv_std, *candidates)
        ctx.late = late
        return x_k.view_as(x_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        alpha, mean, inv_std, *candidates = ctx.saved_tensors
        wanted = ctx.needs_input_grad[5:]
        if mean is None:
            products, grad_u = _gradients(g, alpha, candidates, wanted)
        else:
            g = g.contiguous(memory_format=torch.channels_last)
            gradients = _native_gradients if native_applies(g) else _normalized_gradients
            products, grad_u = gradients(g, alpha, mean, inv_std, candidates, wanted, ctx.late)
        grad_alpha = products.to(alpha.dtype) if ctx.needs_input_grad[1] else None
        return g, grad_alpha, None, None, None, *grad_u


def add_hidden_sum(
    x_k: Tensor, alpha: Tensor, candidates: Sequence[Tensor] | Sequence[Unnormalized]
) -> Tensor:
    """Return ``x_k + sf(Σ_c α_c û_c)`` (Algorithm 1, lines 7 and 11) without computing the sum.

    Parameters
    ----------
    x_k
        The layer that is boosted.
    alpha
        One weight for each candidate, shape ``(len(candidates),)``.
    candidates
        The shortcuts û_c = op_j(sg(z_i)), each of x_k's shape: all normalised, or all not.
    """
    values = [c.value if isinstance(c, Unnormalized) else c for c in candidates]
    unnormalized = [c for c in candidates if isinstance(c, Unnormalized)]
    mean, inv_std = _observed_moments(unnormalized) if unnormalized else (None, None)
    late = [c.late for c in unnormalized]
    result: Tensor = _AddHiddenSum.apply(x_k, alpha, mean, inv_std, late, *values)
    return result


@torch.no_grad()
def _observed_moments(candidates: Sequence[Unnormalized]) -> tuple[Tensor, Tensor]:
    """Return mean and inverse standard deviation, after showing them to the norms."""
    value, norms = candidates[0].value, [c.norm for c in candidates]
    mean, variance = channel_moments([c.moments for c in candidates], value.shape[1])
    update_running_statistics(norms, mean, variance, value.numel() // value.shape[1])
    return mean, torch.rsqrt(variance + norms[0].eps)


def _gradients(
    g: Tensor, alpha: Tensor, candidates: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    products = torch.stack([(g * u).sum() for u in candidates])
    return products, [
        weight * g if want else None for weight, want in zip(alpha.unbind(), wanted, strict=True)
    ]


def _normalized_gradients(
    g: Tensor,
    alpha: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    candidates: Sequence[Tensor],
    wanted: Sequence[bool],
    late: Sequence[LateGradient | None],
) -> tuple[Tensor, list[Tensor | None]]:
    for place in late:
        if place is not None:
            place.nothing()
    g = pixel_rows(g)
    rows = [pixel_rows(u) for u in candidates]
    channels = mean.shape[1]
    per_row, count = g.shape[1] // channels, g.numel() // channels
    wide = widened(torch.stack([mean, inv_std]), per_row)
    found = [
        row_correlations(g, u, *moments) for u, moments in zip(rows, wide.unbind(1), strict=True)
    ]
    pairs = torch.stack([vector for pair in found for vector in pair])
    products, sums = pairs.view(len(rows), 2, per_row, channels).sum(2).unbind(1)
    vectors = input_gradient_coefficients(
        alpha[:, None] * inv_std, mean, inv_std, products, sums, count
    )
    coefficients = widened(vectors, per_row).unbind(1)
    grad_u: list[Tensor | None] = [
        image_view(torch.addcmul(constant, g, of_g).addcmul_(u, of_u), value) if want else None
        for (of_g, of_u, constant), u, value, want in zip(
            coefficients, rows, candidates, wanted, strict=True
        )
    ]
    return products.sum(1), grad_u


def _native_gradients(
    g: Tensor,
    alpha: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    candidates: Sequence[Tensor],
    wanted: Sequence[bool],
    late: Sequence[LateGradient | None],
) -> tuple[Tensor, list[Tensor | None]]:
    found = [native.correlations(g, u, mu) for u, mu in zip(candidates, mean, strict=True)]
    sums, products = (torch.stack(vectors) for vectors in zip(*found, strict=True))
    products *= inv_std
    vectors = input_gradient_coefficients(
        alpha[:, None] * inv_std, mean, inv_std, products, sums, g.numel() // g.shape[1]
    )
    grad_u: list[Tensor | None] = []
    rows = vectors.to(g.dtype).unbind(1)
    for row, u, want, place in zip(rows, candidates, wanted, late, strict=True):
        combination = native.Combination(*row.unbind())
        if place is not None:
            place.leave(g, combination)
            grad_u.append(g)
        else:
            grad_u.append(native.combine(g, u, combination) if want else None)
    return products.sum(1), grad_u


def _has_hidable_norm(op: nn.Module) -> bool:
    if not isinstance(op, HasLastNorm):
        return False
    norm = op.last_norm()
    return (
        isinstance(norm, nn.BatchNorm2d)  # and not what is synchronised between processes
        and norm.training
        and norm.track_running_stats
        and not norm.affine
        # The statistics of all candidates are updated at once, so these must be the same.
        and (norm.momentum, norm.eps) == (0.1, 1e-5)
    )
