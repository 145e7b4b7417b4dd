"""A batch norm whose input has known moments, in one call of C (c/norm.h).

In PyTorch it would be some twenty ops on vectors over channels. Of a small network they take as
long as the passes over its images.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nni_petridish.kernels.native.calls import (
    Combination,
    batch_of,
    check_memory,
    loaded,
    pointers,
)
from nni_petridish.kernels.native.structures import LAYER_NORM

_NONE = (None,) * 7


class NormGradients(NamedTuple):
    """The gradients of a `Norm`."""

    gamma: Tensor | None
    beta: Tensor | None
    of: Combination
    """The gradient of x as a combination of that of the output and x."""


class Running(NamedTuple):
    """The running statistics of a norm, and how they are updated."""

    statistics: Sequence[Tensor]
    """Mean, variance and number of batches."""
    momentum: float


class Norm(NamedTuple):
    """The batch norm γ·(x − mean)/σ + β, or without γ and β."""

    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor
    variance: Tensor
    """Mean and biased variance of the channels of x."""
    eps: float

    def affine(self, running: Running, count: int) -> tuple[Tensor, Tensor]:
        """Update the running statistics; return scale and shift: the norm is scale·x + shift.

        ``count`` is the number of values of a channel.
        """
        scale, shift = self._vectors(2)
        call = self._packed(count, running.statistics, (scale, shift, *_NONE[:5]))
        loaded(scale).norm_affine(call, self._channels, *_doubles(self.eps, running.momentum))
        return scale, shift

    def forward(self, x: Tensor, running: Running, added: Tensor | None) -> Tensor:
        """Update the running statistics; return the norm of x, plus images of its shape if given.

        All images are in channels_last.
        """
        y = torch.empty_like(x)
        self._check(x, *(() if added is None else (added,)))
        vectors = self._vectors(2)  # kept until the call is over
        call = self._packed(count_of(x), running.statistics, (*vectors, *_NONE[:5]))
        images = map(ctypes.c_void_p, pointers(y, x, added))
        doubles = _doubles(self.eps, running.momentum)
        loaded(x).normalize(call, *images, batch_of(x), *doubles)
        return y

    def backward(self, g: Tensor, x: Tensor) -> NormGradients:
        """Return the gradients, given that of the output and the input, in channels_last."""
        self._check(x, g)
        totals, products = self._vectors(2)  # kept until the call is over
        found, call = self._gradients(count_of(x), totals, products)
        images = map(ctypes.c_void_p, pointers(g, x))
        eps = ctypes.c_double(self.eps)
        check_memory(loaded(x).norm_image_gradients(call, *images, batch_of(x), eps))
        return found

    def gradients(self, totals: Tensor, products: Tensor, count: int) -> NormGradients:
        """Return the gradients, given Σ g and Σ g·(x − mean) of each channel."""
        found, call = self._gradients(count, totals, products)
        eps = ctypes.c_double(self.eps)
        loaded(totals).norm_gradients(call, self._channels, eps)
        return found

    def _gradients(
        self, count: int, totals: Tensor, products: Tensor
    ) -> tuple[NormGradients, bytes]:
        dgamma, dbeta = (None, None) if self.gamma is None else self._vectors(2)
        of = Combination(*self._vectors(3))
        vectors = None, None, totals, products, *of
        return NormGradients(dgamma, dbeta, of), self._packed(count, (), vectors, dgamma, dbeta)

    @property
    def _channels(self) -> ctypes.c_long:
        return ctypes.c_long(self.mean.shape[0])

    def _vectors(self, n: int) -> Sequence[Tensor]:
        """Return new vectors over channels."""
        return self.mean.new_empty(n, self.mean.shape[0]).unbind()

    def _packed(
        self,
        count: int,
        running: Sequence[Tensor],
        vectors: Sequence[Tensor | None],
        dgamma: Tensor | None = None,
        dbeta: Tensor | None = None,
    ) -> bytes:
        """Return the C structure."""
        mean, variance, batches = running or _NONE[:3]
        parameters = self.gamma, self.beta, dgamma, dbeta, mean, variance
        places = pointers(*parameters, self.mean, self.variance, *vectors)
        counter = 0 if batches is None else batches.data_ptr()  # of another type than the others
        return LAYER_NORM.pack(*places[:6], counter, *places[6:8], count, *places[8:])

    def _check(self, *images: Tensor) -> None:
        """Raise an error if a shape does not fit: the kernels would read beyond the end."""
        like = images[0]
        if any(image.shape != like.shape for image in images) or like.ndim != 4:
            shapes = [tuple(image.shape) for image in images]
            raise ValueError(f"the images of a norm must have one shape but got {shapes}.")
        vectors = self.gamma, self.beta, self.mean, self.variance
        if any(vector is not None and vector.shape != (like.shape[1],) for vector in vectors):
            raise ValueError(f"a norm does not fit {like.shape[1]} channels.")


def count_of(x: Tensor) -> int:
    """Return the number of values of a channel."""
    return x.numel() // x.shape[1]


def _doubles(*numbers: float) -> map[ctypes.c_double]:
    return map(ctypes.c_double, numbers)
