"""x_k + sf(x_c), where x_c is the α-weighted sum of candidates, without computing x_c.

sf hides the value of the sum, so the forward pass returns x_k itself. Of a candidate that ends in a
batch norm without affine parameters, û = (u − μ)/σ, not even û is needed: the forward pass takes
its mean and variance only. With g = ∇_{x_k} L, the same for all candidates of a site, the backward
pass is

    dα = ⟨g, û⟩,    du = α/σ · (g − mean(g) − û · mean(g·û)).

A `HiddenCandidate` is not even computed in the forward pass.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nni_petridish.kernels.deferred_candidates import (
    HiddenCandidate,
    HiddenGradients,
    distinct,
    has_default_settings,
)
from nni_petridish.kernels.late_gradient import BeforeNorm, LateGradient
from nni_petridish.kernels.moments import (
    channel_moments,
    has_hooks,
    image_view,
    input_gradient_coefficients,
    pixel_rows,
    row_correlations,
    row_moments,
    update_running_statistics,
    widened,
)
from nni_petridish.kernels.native import calls as native
from nni_petridish.kernels.native.calls import native_applies, native_trains
from nni_petridish.kernels.switch import fast_kernels_apply


class SharedInput:
    """An input z_i of a site's candidates, with what several of them need of it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @functools.cached_property
    def is_native(self) -> bool:
        """Whether the kernels in C can take it, in a backward pass too."""
        return native_trains(self.value)

    @functools.cached_property
    def rectified(self) -> Tensor:
        """ReLU(z_i), computed once."""
        return F.relu(self.value)


class HasLastNorm(ABC):
    """An op that is a batch norm of something."""

    @abstractmethod
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm at its end."""


class EndsInNorm(HasLastNorm):
    """An op that can be computed without the batch norm at its end."""

    def hidden(self, x: Tensor) -> HiddenCandidate | None:
        """Return this op as a candidate for the backward pass, if it can be; x is a native one."""
        return None

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


def hide(op: EndsInNorm, z: SharedInput) -> HiddenCandidate | None:
    """Return op(z) as a candidate for the backward pass, if it can be and there will be one."""
    # Without a backward pass to come, the norms see their statistics in the forward pass or never.
    return op.hidden(z.value) if torch.is_grad_enabled() and z.is_native else None


def can_hide_norms(ops: Iterable[nn.Module], z: Iterable[Tensor]) -> bool:
    """Return whether `add_hidden_sum` can take all op_j(z_i) as they are before their norms."""
    return all(_has_hidable_norm(op) for op in ops) and all(
        value.ndim == 4 and value.numel() > value.shape[1] and fast_kernels_apply(value)
        for value in z
    )


class _Plan(NamedTuple):
    """What a site's candidates are, in the order of the table."""

    order: list[int]
    """The place of each in the table: first those with a value, then the hidden ones."""
    late: Sequence[LateGradient | None]
    hidden: Sequence[HiddenCandidate]
    inputs: list[int]
    """Which of the inputs each hidden one takes."""


class _AddHiddenSum(torch.autograd.Function):
    """The sum over candidates: normalised, of known moments but not normalised yet, or hidden."""

    @staticmethod
    def forward(
        ctx: Any,
        x_k: Tensor,
        alpha: Tensor,
        mean: Tensor | None,
        inv_std: Tensor | None,
        plan: _Plan,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(alpha, mean, inv_std, *tensors)
        ctx.plan, ctx.observed = plan, False
        return x_k.view_as(x_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), plan = grads, ctx.plan
        alpha, mean, inv_std, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[5:]
        n = len(plan.order) - len(plan.hidden)
        grad_alpha, grad_tensors = alpha.new_empty(0), list[Tensor | None]()
        if mean is None and not plan.hidden:
            grad_alpha, grad_tensors = _gradients(g, alpha, tensors, wanted)
        else:
            g = g.contiguous(memory_format=torch.channels_last)
        if mean is not None:
            gradients = _native_gradients if native_applies(g) else _normalized_gradients
            visible = alpha[plan.order[:n]] if plan.hidden else alpha
            grad_alpha, grad_tensors = gradients(
                g, visible, mean, inv_std, tensors[:n], wanted[:n], plan.late
            )
        if plan.hidden:
            hidden = HiddenGradients(plan.hidden, plan.inputs, tensors[n:], wanted[n:])
            weights = alpha.tolist()
            # The norms observe once, should there be more than one backward pass.
            observe, ctx.observed = not ctx.observed, True
            found = hidden.compute(g, [weights[i] for i in plan.order[n:]], observe)
            by_place = dict(zip(plan.order, [*grad_alpha.tolist(), *found], strict=True))
            grad_alpha = alpha.new_tensor([by_place[i] for i in range(len(weights))])
            grad_tensors += hidden.gradients()
        return g, grad_alpha.to(alpha.dtype), None, None, None, *grad_tensors


def add_hidden_sum(
    x_k: Tensor,
    alpha: Tensor,
    candidates: Sequence[Tensor] | Sequence[Unnormalized | HiddenCandidate],
) -> Tensor:
    """Return ``x_k + sf(Σ_c α_c û_c)`` (Algorithm 1, lines 7 and 11) without computing the sum.

    Parameters
    ----------
    x_k
        The layer that is boosted.
    alpha
        One weight for each candidate, shape ``(len(candidates),)``.
    candidates
        The shortcuts û_c = op_j(sg(z_i)), each of x_k's shape: all normalised, or none.
    """
    visible = [i for i, c in enumerate(candidates) if not isinstance(c, HiddenCandidate)]
    hidden = {i: c for i, c in enumerate(candidates) if isinstance(c, HiddenCandidate)}
    unnormalized = [c for c in candidates if isinstance(c, Unnormalized)]
    mean, inv_std = _observed_moments(unnormalized) if unnormalized else (None, None)
    inputs, numbers = distinct([c.x for c in hidden.values()])
    late = [c.late for c in unnormalized]
    plan = _Plan([*visible, *hidden], late, list(hidden.values()), numbers)
    result: Tensor = _AddHiddenSum.apply(
        *(x_k, alpha, mean, inv_std, plan),
        *([c.value for c in unnormalized] or [c for c in candidates if isinstance(c, Tensor)]),
        *inputs,
        *(parameter for c in hidden.values() for parameter in c.parameters),
    )
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
        and has_default_settings(norm)
        and not (has_hooks(norm) or has_hooks(op))
    )
