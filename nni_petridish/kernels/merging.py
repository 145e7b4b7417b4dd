"""A finished weak learner, x_k + η·norm(conv(concat(û_1, ..., û_n))), on the CPU.

In evaluation it is one product (see `nni_petridish.kernels.evaluation`). The rest is training.

û_c = (u_c − μ_c)/σ_c is a shortcut that ends in a batch norm without affine parameters. It is
normalized as the 1x1 conv reads it, image by image: neither û_c nor the concatenation is written.
With y the output of the conv, h = γ·ŷ + β and g = ∇_{x_k} L,

    dη = Σ g·h,    dh = η·g,    dy = γ/σ · (dh − mean(dh) − ŷ · mean(dh·ŷ)),    dû = Wᵀ·dy.

The gradient of u_c is a combination of dû_c and u_c, computed by the conv whose output is u_c (see
`nni_petridish.kernels.late_gradient`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.kernels.deferred_candidates import EPS, MOMENTUM, running_statistics
from nni_petridish.kernels.evaluation import (
    Term,
    can_evaluate_merge,
    evaluated,
    evaluated_merge,
    evaluates,
    value_term,
)
from nni_petridish.kernels.late_gradient import BeforeNorm, LateGradient
from nni_petridish.kernels.moments import has_batch_statistics, has_hooks
from nni_petridish.kernels.native import calls as native
from nni_petridish.kernels.native.calls import native_trains
from nni_petridish.kernels.native.merges import Merge, MergedShortcut, MergeParameters
from nni_petridish.kernels.once import once_differentiable
from nni_petridish.kernels.pointwise import is_plain_pointwise
from nni_petridish.kernels.prepared import EndsInNorm, SharedInput, can_skip


class ConcatConvNorm(ABC):
    """An op_merge that is a 1x1 conv of the concatenated shortcuts and a batch norm."""

    @abstractmethod
    def conv_and_norm(self) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
        """Return the conv and the norm."""


class UnmergedShortcut(NamedTuple):
    """A shortcut as prepared for the merge."""

    before: BeforeNorm
    norm: nn.BatchNorm2d | None
    """The norm to apply; None if the value is the shortcut itself."""
    factors: Tensor | None = None
    """The factor of each image (drop-path)."""


def can_merge(x_k: Tensor, merge: nn.Module, n: int) -> bool:
    """Return whether `merge_into` supports this op_merge of n shortcuts, and x_k."""
    if not (isinstance(merge, ConcatConvNorm) and native_trains(x_k)) or has_hooks(merge):
        return False
    conv, norm = merge.conv_and_norm()
    channels = x_k.shape[1]
    return (
        merge.training
        and x_k.numel() > channels  # the plain norm raises an error
        and conv.training
        and is_plain_pointwise(conv)
        and conv.weight.shape == (channels, n * channels, 1, 1)
        and conv.weight.dtype is x_k.dtype
        and norm.affine
        and norm.weight.shape == (channels,)
        and norm.weight.dtype is norm.bias.dtype is x_k.dtype
        and has_batch_statistics(norm)
        and running_statistics([norm], x_k) is not None
    )


def prepare_shortcut(op: nn.Module, z: SharedInput) -> UnmergedShortcut:
    """Compute op(z) as far as the merge needs it: without the norm at its end, if possible."""
    if z.is_fast and isinstance(op, EndsInNorm) and not has_hooks(op) and can_skip(op.last_norm()):
        norm, before = op.last_norm(), op.before_norm(z)
        if running_statistics([norm], before.value) is not None:
            moments = before.moments or native.moments(
                before.value.detach().contiguous(memory_format=torch.channels_last)
            )
            return UnmergedShortcut(before._replace(moments=moments), norm)
        return UnmergedShortcut(BeforeNorm(norm(before.value)), None)
    return UnmergedShortcut(BeforeNorm(op(z.value)), None)


def merge_into(
    x_k: Tensor,
    eta: Tensor,
    merge: ConcatConvNorm,
    shortcuts: Sequence[UnmergedShortcut],
    wants_h: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return x_k + η·h, and h if wanted.

    Parameters
    ----------
    x_k
        The layer to which η·h is added.
    eta
        η.
    merge
        op_merge.
    shortcuts
        The shortcuts.
    wants_h
        Whether h itself is needed.
    """
    conv, norm = merge.conv_and_norm()
    values = [shortcut.before.value for shortcut in shortcuts]
    out, h = _MergeInto.apply(
        *(x_k, eta, conv.weight, norm.weight, norm.bias, norm, shortcuts, wants_h), *values
    )
    return out, h


def can_evaluate(x_k: Tensor, merge: nn.Module, n: int) -> bool:
    """Return whether `evaluate_into` supports this op_merge of n shortcuts, and x_k."""
    return (
        isinstance(merge, ConcatConvNorm)
        and not torch.is_grad_enabled()  # at once in training
        and not has_hooks(merge)
        and can_evaluate_merge(x_k, *merge.conv_and_norm(), n)
    )


def shortcut_term(op: nn.Module, z: Tensor) -> Term:
    """Return op(z) in evaluation as a term."""
    if isinstance(op, EndsInNorm) and evaluates(z) and not has_hooks(op):
        term = op.term(z)
        if term is not None:
            return term
    return value_term(op(z))


def dropped(term: Term, factors: Tensor | None) -> Term:
    """Return a term with the factor of each image (drop-path) applied."""
    return term if factors is None else value_term(evaluated([term]) * factors)


def evaluate_into(
    x_k: Tensor, eta: Tensor, merge: ConcatConvNorm, shortcuts: Sequence[Term], wants_h: bool
) -> tuple[Tensor, Tensor | None]:
    """Return x_k + η·h in evaluation, and h if wanted; as `merge_into`."""
    return evaluated_merge(x_k, eta, *merge.conv_and_norm(), shortcuts, wants_h)


def _merge(
    values: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor] | None],
    factors: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
) -> Merge:
    # Hooks on saved tensors may have changed their layout.
    images = [value.contiguous(memory_format=torch.channels_last) for value in values]
    shortcuts = [MergedShortcut(*each) for each in zip(images, moments, factors, strict=True)]
    eta, weight, gamma, beta = (parameter.contiguous() for parameter in parameters)
    return Merge(shortcuts, MergeParameters(eta, weight, gamma, beta), EPS, MOMENTUM)


def _running(norm: nn.BatchNorm2d | None, x: Tensor) -> Sequence[Tensor]:
    return () if norm is None else running_statistics([norm], x) or ()


class _MergeInto(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_k: Tensor,
        eta: Tensor,
        weight: Tensor,
        gamma: Tensor,
        beta: Tensor,
        norm: nn.BatchNorm2d,
        shortcuts: Sequence[UnmergedShortcut],
        wants_h: bool,
        *values: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        moments = [shortcut.before.moments for shortcut in shortcuts]
        factors = [shortcut.factors for shortcut in shortcuts]
        merge = _merge(values, moments, factors, (eta, weight, gamma, beta))
        norms = [*(shortcut.norm for shortcut in shortcuts), norm]
        found = merge.forward(x_k, [_running(each, x_k) for each in norms], wants_h)
        ctx.late = [shortcut.before.late for shortcut in shortcuts]
        ctx.moments, ctx.factors, ctx.own_moments = moments, factors, found.moments
        ctx.save_for_backward(found.y, eta, weight, gamma, beta, *values)
        ctx.set_materialize_grads(False)
        return found.out, found.h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        y, *saved = ctx.saved_tensors  # read once: checkpointing recomputes them
        parameters, values = saved[:4], saved[4:]
        g, of_h = (_laid_out(gradient) for gradient in grads)
        if g is None:
            g = torch.zeros_like(y, memory_format=torch.channels_last)
        merge = _merge(values, ctx.moments, ctx.factors, parameters)
        y = y.contiguous(memory_format=torch.channels_last)
        found = merge.backward(g, of_h, y, ctx.own_moments, ctx.needs_input_grad[8:])
        gradients = [
            _gradient_before_norm(own, shortcut.u, late)
            for own, shortcut, late in zip(found.shortcuts, merge.shortcuts, ctx.late, strict=True)
        ]
        return g, *found.parameters, None, None, None, *gradients


def _laid_out(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous(memory_format=torch.channels_last)


def _gradient_before_norm(
    found: tuple[Tensor | None, native.Combination | None], u: Tensor, late: LateGradient | None
) -> Tensor | None:
    """Return the gradient of u, or leave it to the conv that computed u."""
    gradient, combination = found
    if gradient is None or combination is None:
        return gradient
    if late is None:
        return native.combine(gradient, u, combination)
    late.store(gradient, combination)
    return gradient
