"""Preparation of a candidate û = op(z) in the forward pass, which needs no value of û (sf).

The forward pass computes as little as possible, decided for each candidate independently:

- `DeferredCandidate`: nothing. The C kernels run forward and backward once ∇_{x_k} L is known.
- `Unnormalized`: u with its mean μ and variance σ², if op ends in a batch norm û = (u − μ)/σ.
- `torch.Tensor`: û itself, if op is unknown to the kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.kernels.batch_norm import normalize
from nni_petridish.kernels.deferred_candidates import DeferredCandidate, has_default_settings
from nni_petridish.kernels.evaluation import evaluated, evaluates
from nni_petridish.kernels.late_gradient import BeforeNorm, LateGradient
from nni_petridish.kernels.moments import has_hooks, row_moments
from nni_petridish.kernels.native.calls import native_trains
from nni_petridish.kernels.native.terms import Term
from nni_petridish.kernels.switch import fast_kernels_apply


class SharedInput:
    """An input z_i of a site's candidates, with values that several of them share.

    A compiler cannot trace `functools.cached_property`, so the values are remembered by hand.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._is_fast: bool | None = None
        self._is_native: bool | None = None
        self._rectified: Tensor | None = None

    @property
    def is_fast(self) -> bool:
        """Whether the batch norm of a candidate can be skipped."""
        if self._is_fast is None:
            self._is_fast = has_fast_norms(self.value)
        return self._is_fast

    @property
    def is_native(self) -> bool:
        """Whether the C kernels support it, in a backward pass too."""
        if self._is_native is None:
            self._is_native = native_trains(self.value)
        return self._is_native

    @property
    def rectified(self) -> Tensor:
        """ReLU(z_i), computed once."""
        if self._rectified is None:
            self._rectified = F.relu(self.value)
        return self._rectified


class EndsInNorm(ABC):
    """An op that can be computed without the batch norm at its end."""

    @abstractmethod
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm at the end of the op."""

    @abstractmethod
    def before_norm(self, z: SharedInput) -> BeforeNorm:
        """Return the input of that batch norm."""

    def deferred(self, x: Tensor) -> DeferredCandidate | None:
        """Return op(x) as a deferred candidate for an x that the C kernels support, else None."""
        return None

    def term(self, x: Tensor) -> Term | None:
        """Return op(x) in evaluation as a term for an x that the C kernels support, else None."""
        return None

    def evaluated(self, x: Tensor) -> Tensor | None:
        """Return op(x) in evaluation, computed in one pass; None if not supported."""
        term = self.term(x) if evaluates(x) else None
        return None if term is None else evaluated([term])


def plus(op: nn.Module, x: Tensor, added: Tensor) -> Tensor:
    """Return op(x) + added, added by the pass of the norm at the end of op if supported."""
    if isinstance(op, EndsInNorm) and op.training and not has_hooks(op):
        return normalize(op.before_norm(SharedInput(x)), op.last_norm(), added)
    result: Tensor = op(x) + added
    return result


def evaluated_sum(ops: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """Return Σ op(x) in evaluation, computed in one pass; None if not supported.

    At most one op may be `torch.nn.Identity`.
    """
    if not evaluates(x) or any(map(has_hooks, ops)):
        return None
    terms: list[Term] = []
    added = None
    for op in ops:
        term = op.term(x) if isinstance(op, EndsInNorm) else None
        if term is not None:
            terms.append(term)
        elif type(op) is nn.Identity and added is None:
            added = x
        else:
            return None
    return evaluated(terms, added) if terms else None


class Unnormalized(NamedTuple):
    """A candidate before its batch norm."""

    value: Tensor
    norm: nn.BatchNorm2d
    moments: tuple[Tensor, Tensor]
    late: LateGradient | None = None

    @classmethod
    def of(cls, before: BeforeNorm, norm: nn.BatchNorm2d) -> Unnormalized:
        """Return the input of a norm, with its moments."""
        value, moments, late = before
        # Moments are computed here, while the value is in the cache, not for all candidates later.
        return cls(value, norm, moments or row_moments(value.detach()), late)


Prepared = Tensor | Unnormalized | DeferredCandidate
"""A candidate as prepared by the forward pass."""


def prepare(op: nn.Module, z: SharedInput) -> Prepared:
    """Compute as much of op(z) as the forward pass needs."""
    if z.is_fast:
        if isinstance(op, EndsInNorm) and can_skip(op.last_norm()) and not has_hooks(op):
            return defer(op, z) or Unnormalized.of(op.before_norm(z), op.last_norm())
        if type(op) is nn.BatchNorm2d and can_skip(op):
            return Unnormalized.of(BeforeNorm(z.value), op)
    result: Tensor = op(z.value)
    return result


def defer(op: EndsInNorm, z: SharedInput) -> DeferredCandidate | None:
    """Return op(z) as a deferred candidate; None if not supported or without a backward pass."""
    # Without a backward pass, running statistics are updated in the forward pass or never.
    return op.deferred(z.value) if torch.is_grad_enabled() and z.is_native else None


def has_fast_norms(x: Tensor) -> bool:
    """Return whether the batch norms of candidates with images like x can be skipped."""
    return x.ndim == 4 and x.numel() > x.shape[1] and fast_kernels_apply(x)


def can_skip(norm: nn.BatchNorm2d) -> bool:
    """Return whether a norm of images is known, so that its output need not be computed."""
    return (
        isinstance(norm, nn.BatchNorm2d)  # not SyncBatchNorm
        and norm.training
        and norm.track_running_stats
        and not norm.affine
        and has_default_settings(norm)
        and not has_hooks(norm)
    )
