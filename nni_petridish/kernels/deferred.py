"""x_k + sf(x_c) without computing x_c, the α-weighted sum of the candidates.

sf(x_c) is zero, so the forward pass returns x_k itself. With g = ∇_{x_k} L, the same for all
candidates û of a site, the backward pass is dα = ⟨g, û⟩ and dû = α·g. For a candidate that ends in
a batch norm without affine parameters, û = (u − μ)/σ, the gradient before the norm is

    du = α/σ · (g − mean(g) − û · mean(g·û)).

`prepared` decides how much of each candidate the forward pass computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.errors import GrowthError
from nni_petridish.kernels.deferred_candidates import DeferredCandidate, DeferredGradients, distinct
from nni_petridish.kernels.late_gradient import LateGradient
from nni_petridish.kernels.moments import (
    channel_moments,
    image_view,
    input_gradient_coefficients,
    pixel_rows,
    row_correlations,
    update_running_statistics,
    widened,
)
from nni_petridish.kernels.native import calls as native
from nni_petridish.kernels.native.calls import native_applies
from nni_petridish.kernels.once import once_differentiable
from nni_petridish.kernels.prepared import (
    Prepared,
    SharedInput,
    Unnormalized,
    has_fast_norms,
    prepare,
)


def add_deferred_sum(
    x_k: Tensor, alpha: Tensor, candidates: Sequence[tuple[nn.Module, Tensor]]
) -> Tensor:
    """Return ``x_k + sf(Σ_c α_c op_c(z_c))`` (Algorithm 1, lines 7 and 11) without the sum.

    The fastest available path is chosen for each candidate independently of the others.

    Parameters
    ----------
    x_k
        The output of the layer.
    alpha
        The weights of the candidates, shape ``(len(candidates),)``.
    candidates
        The op and the input sg(z) of each candidate; op(z) has x_k's shape.
    """
    fast = has_fast_norms(x_k)
    inputs = {id(z): SharedInput(z) for _, z in candidates}
    prepared = [prepare(op, inputs[id(z)]) if fast else op(z) for op, z in candidates]
    for (op, _), made in zip(candidates, prepared, strict=True):
        if isinstance(made, Tensor) and made.shape != x_k.shape:
            raise GrowthError(
                f"a candidate must return the shape of x_k, {tuple(x_k.shape)}, but"
                f" {type(op).__name__} returned {tuple(made.shape)}."
            )
    return add_prepared_sum(x_k, alpha, prepared)


def add_prepared_sum(x_k: Tensor, alpha: Tensor, candidates: Sequence[Prepared]) -> Tensor:
    """Return ``x_k + sf(Σ_c α_c û_c)`` for candidates of any kinds."""
    plain = {i: c for i, c in enumerate(candidates) if isinstance(c, Tensor)}
    unnormalized = {i: c for i, c in enumerate(candidates) if isinstance(c, Unnormalized)}
    deferred = {i: c for i, c in enumerate(candidates) if isinstance(c, DeferredCandidate)}
    mean, inv_std = _observed_moments([*unnormalized.values()]) if unnormalized else (None, None)
    inputs, numbers = distinct([c.x for c in deferred.values()])
    late = [c.late for c in unnormalized.values()]
    kinds = _CandidatesByKind(
        [*plain, *unnormalized, *deferred], late, list(deferred.values()), numbers
    )
    result: Tensor = _AddDeferredSum.apply(
        *(x_k, alpha, mean, inv_std, kinds),
        *plain.values(),
        *(c.value for c in unnormalized.values()),
        *inputs,
        *(parameter for c in deferred.values() for parameter in c.parameters),
    )
    return result


class _CandidatesByKind(NamedTuple):
    """The candidates of a site, sorted by kind: plain, then unnormalized, then deferred."""

    order: list[int]
    """The index of each candidate in the α table."""
    late: Sequence[LateGradient | None]
    """The late gradient of each unnormalized candidate."""
    deferred: Sequence[DeferredCandidate]
    inputs: list[int]
    """The index of the input of each deferred candidate, among the distinct inputs."""

    @property
    def is_table_order(self) -> bool:
        """Whether the order by kind is the order of the α table."""
        return self.order == list(range(len(self.order)))


class _AddDeferredSum(torch.autograd.Function):
    """x_k + sf(Σ α·û) over candidates of three kinds, see `_CandidatesByKind`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_k: Tensor,
        alpha: Tensor,
        mean: Tensor | None,
        inv_std: Tensor | None,
        kinds: _CandidatesByKind,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(alpha, mean, inv_std, *tensors)
        ctx.kinds, ctx.observed = kinds, False
        return x_k.view_as(x_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), kinds = grads, ctx.kinds
        alpha, mean, inv_std, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[5:]
        weights = alpha if kinds.is_table_order else alpha[kinds.order]
        # Unnormalized candidates are at start:end, deferred ones from end on.
        end = len(kinds.order) - len(kinds.deferred)
        start = end - len(kinds.late)
        grad_weights, grad_tensors = list[Tensor](), list[Tensor | None]()
        if start:
            products, found = _gradients(g, weights[:start], tensors[:start], wanted[:start])
            grad_weights.append(products)
            grad_tensors += found
        if kinds.late or kinds.deferred:
            g = g.contiguous(memory_format=torch.channels_last)
        if kinds.late:
            gradients = _native_gradients if native_applies(g) else _normalized_gradients
            own = slice(start, end)
            products, found = gradients(
                g, weights[own], mean, inv_std, tensors[own], wanted[own], kinds.late
            )
            grad_weights.append(products)
            grad_tensors += found
        if kinds.deferred:
            deferred = DeferredGradients(kinds.deferred, kinds.inputs, tensors[end:], wanted[end:])
            # Update running statistics once, even if there are several backward passes.
            observe, ctx.observed = not ctx.observed, True
            grad_weights.append(
                alpha.new_tensor(deferred.compute(g, weights[end:].tolist(), observe))
            )
            grad_tensors += deferred.gradients()
        grad_alpha = torch.cat([part.to(alpha.dtype) for part in grad_weights])
        if not kinds.is_table_order:
            grad_alpha = torch.empty_like(grad_alpha).index_copy_(
                0, torch.tensor(kinds.order, device=grad_alpha.device), grad_alpha
            )
        return g, grad_alpha, None, None, None, *grad_tensors


@torch.no_grad()
def _observed_moments(candidates: Sequence[Unnormalized]) -> tuple[Tensor, Tensor]:
    """Return mean and inverse standard deviation, and update the running statistics."""
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
            place.clear()
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
            place.store(g, combination)
            grad_u.append(g)
        else:
            grad_u.append(native.combine(g, u, combination) if want else None)
    return products.sum(1), grad_u
