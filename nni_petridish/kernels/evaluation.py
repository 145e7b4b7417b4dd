"""Evaluation on the CPU: ops and finished weak learners in one pass over the images.

In evaluation mode a batch norm is a scale and a shift, γ/σ and β − γμ/σ of its running statistics.
The last conv of an op and its norm are then one matrix M and one shift b,

    op(z) = M·u + b,

where u is the output of the last depthwise conv, of a pooling, or of a ReLU. The weak learner
h = norm(W·concat(op_1(z_1), ..., op_n(z_n))) is linear in all u_c, too. With D and d the scale and
the shift of its norm,

    h = Σ D·W_c·M_c·u_c + Σ D·W_c·b_c + d,

so the 1x1 conv of the merge costs nothing beyond those of its shortcuts. The matrices are computed
in every call: nothing is remembered, and weights may change at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nni_petridish.kernels.depthwise import DepthwiseConv2d
from nni_petridish.kernels.moments import has_hooks
from nni_petridish.kernels.native.calls import native_applies
from nni_petridish.kernels.native.terms import (
    Merging,
    Term,
    UnitWeights,
    simple_term,
    sum_terms,
    units_term,
)
from nni_petridish.kernels.pointwise import is_plain_pointwise
from nni_petridish.kernels.separable import UnitModules


def evaluates(x: Tensor) -> bool:
    """Return whether the kernels of evaluation support x: on the CPU, without any gradient."""
    return (
        not torch.is_grad_enabled()
        and native_applies(x)
        and forward_ad._current_level < 0  # no_grad does not switch this off
        and torch._C._get_tracing_state() is None  # torch.jit.trace
        and torch._C._len_torch_dispatch_stack() == 0  # a mode that counts or records ops
    )


def convs_term(x: Tensor, units: Sequence[UnitModules], last: nn.BatchNorm2d) -> Term | None:
    """Return one or two units and a norm as a term; None if not supported."""
    channels, norms = x.shape[1], [*(norm for norm, *_ in units[1:]), last]
    if len(units) > 2 or any(unit.depthwise.geometry.stride > 1 for unit in units[1:]):
        return None
    for (_, depthwise, pointwise), norm in zip(units, norms, strict=True):
        if not (
            norm is not None
            and _is_evaluated(norm, x, channels)
            and _is_known_depthwise(depthwise, x)
            and _fits(pointwise, x, channels)
        ):
            return None
    weights = [UnitWeights(conv.geometry, conv.weight) for _, conv, _ in units]
    between = None
    if len(units) > 1:
        assert norms[0] is not None
        between = units[0].pointwise.weight, norms[0]
    return units_term(x, weights, between, units[-1].pointwise.weight, last)


def pool_term(x: Tensor, kind: str, stride: int, norm: nn.BatchNorm2d) -> Term | None:
    """Return a pooling, or the identity ("none"), and a norm as a term; None if not supported."""
    if not _is_evaluated(norm, x, x.shape[1]):
        return None
    return simple_term(x, kind, stride, (), norm)


def projection_term(x: Tensor, convs: Sequence[nn.Conv2d], norm: nn.BatchNorm2d) -> Term | None:
    """Return one conv of ReLU(x), or two of its even and odd pixels, and a norm as a term."""
    weights = [conv.weight for conv in convs]
    widths = [weight.shape[0] for weight in weights]
    if not (
        all(_fits(conv, x, width) for conv, width in zip(convs, widths, strict=True))
        and widths[0] == sum(widths) // len(widths)
        and _is_evaluated(norm, x, sum(widths))
    ):
        return None
    return simple_term(x, "relu" if len(convs) == 1 else "halves", len(convs), weights, norm)


def value_term(x: Tensor) -> Term:
    """Return x as a term."""
    return simple_term(x.contiguous(memory_format=torch.channels_last), "none", 1, (), None)


def evaluated(terms: Sequence[Term], added: Tensor | None = None) -> Tensor:
    """Return the sum of terms, and of ``added`` if given."""
    return sum_terms(terms, added=added)[0]


def can_evaluate_merge(x_k: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d, n: int) -> bool:
    """Return whether `evaluated_merge` supports the conv and the norm of n shortcuts, and x_k."""
    channels = x_k.shape[1]
    return (
        evaluates(x_k)
        # The products of matrices take as long as so many pixels.
        and x_k.shape[0] * x_k.shape[2] * x_k.shape[3] >= 2 * channels
        and is_plain_pointwise(conv)
        and conv.weight.shape == (channels, n * channels, 1, 1)
        and conv.weight.dtype is x_k.dtype
        and _is_evaluated(norm, x_k, channels)
    )


def evaluated_merge(
    x_k: Tensor,
    eta: Tensor,
    conv: nn.Conv2d,
    norm: nn.BatchNorm2d,
    terms: Sequence[Term],
    wants_h: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return x_k + η·h, and h if wanted.

    Parameters
    ----------
    x_k
        The layer to which η·h is added.
    eta
        η.
    conv, norm
        The 1x1 conv of the concatenated shortcuts, and its norm.
    terms
        The shortcuts.
    wants_h
        Whether h itself is needed.
    """
    return sum_terms(terms, Merging(conv.weight, norm), x_k, eta, wants_h)


def _is_evaluated(norm: nn.BatchNorm2d, x: Tensor, channels: int) -> bool:
    """Return whether a norm of these channels is in evaluation mode and known."""
    if not isinstance(norm, nn.BatchNorm2d) or norm.training or has_hooks(norm):
        return False  # a SyncBatchNorm, for example
    mean, variance = norm.running_mean, norm.running_var
    return (
        mean is not None
        and variance is not None
        and (norm.weight is None) is (norm.bias is None)
        and all(
            t is None or (t.shape == (channels,) and t.dtype is x.dtype)
            for t in (mean, variance, norm.weight, norm.bias)
        )
    )


def _is_known_depthwise(conv: DepthwiseConv2d, x: Tensor) -> bool:
    kernel = conv.geometry.kernel
    return (
        conv.geometry.is_native
        and conv.weight.shape == (x.shape[1], 1, kernel, kernel)
        and conv.weight.dtype is x.dtype
        and not has_hooks(conv)
    )


def _fits(conv: nn.Conv2d, x: Tensor, outputs: int) -> bool:
    return (
        is_plain_pointwise(conv)
        and conv.weight.shape[:2] == (outputs, x.shape[1])
        and conv.weight.dtype is x.dtype
    )
