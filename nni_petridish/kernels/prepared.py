"""What the forward pass computes of a candidate û = op(z) whose value sf hides.

As little as it can, decided for each candidate on its own:

- a `HiddenCandidate`: nothing; forward and backward are done in C once ∇_{x_k} L is known;
- `Unnormalized`: u, its mean μ and variance σ², of an op that ends in a batch norm û = (u − μ)/σ;
- a tensor: û itself, of an op that the kernels know nothing about.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.kernels.deferred_candidates import HiddenCandidate, has_default_settings
from nni_petridish.kernels.late_gradient import BeforeNorm, LateGradient
from nni_petridish.kernels.moments import has_hooks, row_moments
from nni_petridish.kernels.native.calls import native_trains
from nni_petridish.kernels.switch import fast_kernels_apply


class SharedInput:
    """An input z_i of a site's candidates, with what several of them need of it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @functools.cached_property
    def is_fast(self) -> bool:
        """Whether the batch norm of a candidate can be hidden."""
        return has_fast_norms(self.value)

    @functools.cached_property
    def is_native(self) -> bool:
        """Whether the kernels in C can take it, in a backward pass too."""
        return native_trains(self.value)

    @functools.cached_property
    def rectified(self) -> Tensor:
        """ReLU(z_i), computed once."""
        return F.relu(self.value)


class EndsInNorm(ABC):
    """An op that can be computed without the batch norm at its end."""

    @abstractmethod
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm at its end."""

    @abstractmethod
    def before_norm(self, z: SharedInput) -> BeforeNorm:
        """Return what that batch norm normalizes."""

    def hidden(self, x: Tensor) -> HiddenCandidate | None:
        """Return this op as a candidate for the backward pass, if it can be; x is a native one."""
        return None


class Unnormalized(NamedTuple):
    """A candidate before its batch norm."""

    value: Tensor
    norm: nn.BatchNorm2d
    moments: tuple[Tensor, Tensor]
    late: LateGradient | None = None

    @classmethod
    def of(cls, before: BeforeNorm, norm: nn.BatchNorm2d) -> Unnormalized:
        """Return what a norm takes, with its moments."""
        value, moments, late = before
        # Now, not with those of the other candidates: the value is still in the cache.
        return cls(value, norm, moments or row_moments(value.detach()), late)


Prepared = Tensor | Unnormalized | HiddenCandidate
"""A candidate as far as the forward pass computes it."""


def prepare(op: nn.Module, z: SharedInput) -> Prepared:
    """Compute op(z) as far as the forward pass has to."""
    if z.is_fast:
        if isinstance(op, EndsInNorm) and _can_hide(op.last_norm()) and not has_hooks(op):
            return hide(op, z) or Unnormalized.of(op.before_norm(z), op.last_norm())
        if type(op) is nn.BatchNorm2d and _can_hide(op):
            return Unnormalized.of(BeforeNorm(z.value), op)
    result: Tensor = op(z.value)
    return result


def hide(op: EndsInNorm, z: SharedInput) -> HiddenCandidate | None:
    """Return op(z) as a candidate for the backward pass, if it can be and there will be one."""
    # Without a backward pass to come, the norms see their statistics in the forward pass or never.
    return op.hidden(z.value) if torch.is_grad_enabled() and z.is_native else None


def has_fast_norms(x: Tensor) -> bool:
    """Return whether the batch norms of images such as x can be hidden."""
    return x.ndim == 4 and x.numel() > x.shape[1] and fast_kernels_apply(x)


def _can_hide(norm: nn.BatchNorm2d) -> bool:
    return (
        isinstance(norm, nn.BatchNorm2d)  # and not what is synchronized between processes
        and norm.training
        and norm.track_running_stats
        and not norm.affine
        and has_default_settings(norm)
        and not has_hooks(norm)
    )
