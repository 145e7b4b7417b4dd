"""x_k + η·h of a finished weak learner in one call of C (c/merge.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nni_petridish.kernels.native.calls import (
    ONE_TYPE,
    Combination,
    batch_of,
    check_memory,
    loaded,
)
from nni_petridish.kernels.native.structures import MERGE, SHORTCUT


class MergedShortcut(NamedTuple):
    """One input of the 1x1 conv: ``factors·(u − mean)/σ``, or ``factors·u`` without moments."""

    u: Tensor
    moments: tuple[Tensor, Tensor] | None
    """Mean and biased variance of the channels of u."""
    factors: Tensor | None
    """A factor for each image; None for 1."""


class MergeParameters(NamedTuple):
    """The parameters of a weak learner's merge."""

    eta: Tensor
    weight: Tensor
    """The weights of the 1x1 conv."""
    gamma: Tensor
    beta: Tensor


class Merged(NamedTuple):
    """The result of a merge."""

    out: Tensor
    """x_k + η·h."""
    h: Tensor | None
    """h, if needed."""
    y: Tensor
    """The output of the conv."""
    moments: tuple[Tensor, Tensor]
    """Mean and biased variance of the channels of y."""


class MergeGradients(NamedTuple):
    """The gradients of a merge."""

    parameters: MergeParameters
    shortcuts: list[tuple[Tensor | None, Combination | None]]
    """The gradient of each (u − mean)/σ, and the combination of it and u that is the gradient of
    u; None without moments, where both are the same."""


@dataclass(frozen=True)
class Merge:
    """A merge: 1x1 conv of the concatenated shortcuts, batch norm, and x_k + η·h.

    Attributes
    ----------
    shortcuts
        The inputs of the conv, all of the shape of x_k.
    parameters
        The parameters.
    eps, momentum
        The settings of all norms.
    """

    shortcuts: Sequence[MergedShortcut]
    parameters: MergeParameters
    eps: float
    momentum: float

    def forward(self, x_k: Tensor, running: Sequence[Sequence[Tensor]], wants_h: bool) -> Merged:
        """Return x_k + η·h.

        Parameters
        ----------
        x_k
            The layer to which η·h is added.
        running
            Mean, variance and number of batches of the norm of each shortcut (none without
            moments) and of the last norm. They are updated.
        wants_h
            Whether h itself is needed.
        """
        self._check(x_k)
        mean, variance = x_k.new_empty(2, x_k.shape[1]).unbind()
        y, out = torch.empty_like(x_k), torch.empty_like(x_k)
        h = torch.empty_like(x_k) if wants_h else None
        parts = [
            SHORTCUT.pack(*(0,) * 4, *_three(own), *_inputs(shortcut), *(0,) * 4)
            for shortcut, own in zip(self.shortcuts, running, strict=False)
        ]
        eta, weight, gamma, beta = map(_address, self.parameters)
        norm = gamma, beta, 0, 0, *_three(running[-1])
        moments = _address(mean), _address(variance)
        rest = (
            *norm,
            eta,
            0,
            _address(x_k),
            _address(y),
            *moments,
            _address(h),
            _address(out),
            0,
            0,
        )
        self._run(loaded(x_k).merge_forward, x_k, parts, (weight, 0), rest)
        return Merged(out, h, y, (mean, variance))

    def backward(
        self,
        g: Tensor,
        of_h: Tensor | None,
        y: Tensor,
        moments: tuple[Tensor, Tensor],
        wanted: Sequence[bool],
    ) -> MergeGradients:
        """Return the gradients.

        Parameters
        ----------
        g, of_h
            The gradients of the result and of h; None if h was not used.
        y, moments
            The output of the conv and its moments.
        wanted
            Whether the gradient of each shortcut is needed.
        """
        self._check(g, y, *(() if of_h is None else (of_h,)))
        found = MergeParameters(*map(torch.empty_like, self.parameters))
        vectors = g.new_empty(len(self.shortcuts), 3, g.shape[1])
        gradients: list[tuple[Tensor | None, Combination | None]] = []
        parts: list[bytes] = []
        for shortcut, want, own in zip(self.shortcuts, wanted, vectors.unbind(), strict=True):
            dvalue = torch.empty_like(shortcut.u) if want else None
            combination = None if shortcut.moments is None else Combination(*own.unbind())
            gradients.append((dvalue, combination))
            places = (_address(vector) for vector in combination or (None,) * 3)
            parts.append(SHORTCUT.pack(*(0,) * 7, *_inputs(shortcut), _address(dvalue), *places))
        eta, weight, gamma, beta = map(_address, self.parameters)
        deta, dweight, dgamma, dbeta = map(_address, found)
        norm = gamma, beta, dgamma, dbeta, 0, 0, 0
        rest = (
            *norm,
            eta,
            deta,
            0,
            _address(y),
            *map(_address, moments),
            0,
            0,
            _address(g),
            _address(of_h),
        )
        self._run(loaded(g).merge_backward, g, parts, (weight, dweight), rest)
        return MergeGradients(found, gradients)

    def _run(
        self,
        kernel: Callable[..., int],
        like: Tensor,
        parts: Sequence[bytes],
        weights: tuple[int, int],
        rest: Sequence[int],
    ) -> None:
        memory = ctypes.create_string_buffer(b"".join(parts))
        call = MERGE.pack(len(parts), ctypes.addressof(memory), *weights, *rest)
        settings = ctypes.c_double(self.eps), ctypes.c_double(self.momentum)
        check_memory(kernel(call, batch_of(like), *settings))

    def _check(self, *images: Tensor) -> None:
        """Raise an error if a shape or type differs: the kernels would read beyond the end."""
        like = images[0]
        n, channels = like.shape[:2]
        if like.numel() == channels:
            raise ValueError(f"expected more than 1 value per channel, got {tuple(like.shape)}")
        vectors = [self.parameters.gamma, self.parameters.beta]
        for shortcut in self.shortcuts:
            vectors += shortcut.moments or ()
            if shortcut.factors is not None and shortcut.factors.numel() != n:
                raise ValueError(f"{shortcut.factors.numel()} factors do not fit {n} images")
        images = (*images, *(shortcut.u for shortcut in self.shortcuts))
        if any(image.shape != like.shape for image in images):
            shapes = [tuple(image.shape) for image in images]
            raise ValueError(f"the shapes of the images of a merge differ: {shapes}")
        weight = self.parameters.weight
        if weight.shape != (channels, len(self.shortcuts) * channels, 1, 1):
            raise ValueError(f"a weight of shape {tuple(weight.shape)} does not fit the merge")
        if any(vector.shape != (channels,) for vector in vectors):
            raise ValueError(f"a norm of a merge does not fit {channels} channels")
        if any(
            t.dtype is not like.dtype or not t.is_cpu
            for t in (*images, *vectors, weight, self.parameters.eta)
        ):
            raise TypeError(ONE_TYPE)


def _inputs(shortcut: MergedShortcut) -> tuple[int, int, int, int]:
    mean, variance = shortcut.moments or (None, None)
    return _address(shortcut.u), _address(mean), _address(variance), _address(shortcut.factors)


def _three(running: Sequence[Tensor]) -> Sequence[int]:
    return [tensor.data_ptr() for tensor in running] or (0, 0, 0)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
