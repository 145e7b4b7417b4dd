"""The gradients of all candidates of a site in one call of C (c/native.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nni_petridish.kernels.native.calls import (
    ONE_TYPE,
    Geometry,
    check_memory,
    check_output,
    loaded,
    parts_and_threads,
)
from nni_petridish.kernels.native.pools import POOLINGS
from nni_petridish.kernels.native.structures import CANDIDATE


class Kernel(NamedTuple):
    """The computation of a candidate before the batch norm, without γ and β, at its end."""

    geometries: Sequence[Geometry]
    """The geometry of one unit, of two with a batch norm between them, or of ``other``."""
    other: str | None = None
    """None for units. Otherwise ``max`` or ``avg`` pooling (padding not counted), ``none`` for the
    identity, or ``reduce`` for ReLU and two 1x1 convs of the even and the odd pixels."""


class CandidateCall(NamedTuple):
    """The arguments of a candidate's kernel in the backward pass."""

    kernel: Kernel
    alpha: float
    x: Tensor
    """The input."""
    dx: Tensor | None
    """Output tensor for the gradient of x; None to skip it."""
    adds: bool
    """Whether the gradient is added to ``dx`` instead of written."""
    parameters: Sequence[Tensor]
    """The depthwise and pointwise weights of one unit; or those of the first unit, γ and β, and
    those of the second; or the two weights of a reduction."""
    gradients: Sequence[Tensor]
    """Output tensors for the gradients of the parameters."""
    running: Sequence[Tensor]
    """Mean, variance and number of batches of each norm, to be updated; empty to skip that."""


_OTHERS = (*POOLINGS, "reduce")
_NOWHERE = (0, 0)


def candidate_gradients(
    g: Tensor, candidates: Sequence[CandidateCall], eps: float, momentum: float
) -> list[float]:
    """Compute the gradients of a site's candidates for g = ∇_{x_k} L, and return those of α."""
    if g.numel() == g.shape[1]:
        raise ValueError(f"expected more than 1 value per channel, got {tuple(g.shape)}")
    _check_types(g, candidates)
    calls = b"".join(_packed(g, candidate) for candidate in candidates)
    memory = ctypes.create_string_buffer(calls, len(calls))
    settings = ctypes.c_double(eps), ctypes.c_double(momentum)
    run = loaded(g).candidate_gradients
    check_memory(
        run(memory, ctypes.c_long(len(candidates)), ctypes.c_void_p(g.data_ptr()), *settings)
    )
    return [found[-1] for found in CANDIDATE.iter_unpack(memory)]


def _packed(g: Tensor, of: CandidateCall) -> bytes:
    (geometries, other), x, running = of.kernel, of.x, of.running
    check_output(g, x, geometries[0].stride)
    n, channels, height, width = x.shape
    weights = [tensor.data_ptr() for tensor in of.parameters] or _NOWHERE
    gradients = [tensor.data_ptr() for tensor in of.gradients] or _NOWHERE
    statistics = [tensor.data_ptr() for tensor in running] or (0, 0, 0)
    first = (*geometries[0], *weights[:2], *gradients[:2])
    if len(geometries) > 1:
        second = (*geometries[1], *weights[4:], *gradients[4:])
        norms = (*weights[2:4], *gradients[2:4], *statistics[:3], 0, 0, 0, 0, *statistics[-3:])
    else:
        second = (0,) * 7
        norms = (0, 0, 0, 0, *statistics, *(0,) * 7)
    return CANDIDATE.pack(
        *(n, height, width, channels, *parts_and_threads(x.numel())),
        *(x.data_ptr(), 0 if of.dx is None else of.dx.data_ptr(), of.adds),
        *((len(geometries), 0) if other is None else (0, _OTHERS.index(other))),
        *(*first, *second, *norms, of.alpha, 0.0),
    )


def _check_types(g: Tensor, candidates: Sequence[CandidateCall]) -> None:
    for candidate in candidates:
        for tensors in ((candidate.x,), candidate.parameters, candidate.running):
            for tensor in tensors:
                # The number of batches is an integer, see `running_statistics`.
                if tensor.dtype is not g.dtype and tensor.dtype is not torch.int64:
                    raise TypeError(ONE_TYPE)
                if not tensor.is_cpu:
                    raise TypeError(ONE_TYPE)
