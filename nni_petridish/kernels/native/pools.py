"""Pooling over 3x3 pixels in C (c/pool.h)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from nni_petridish.kernels.native.calls import (
    Combination,
    addresses,
    batch_of,
    check_memory,
    check_output,
    loaded,
    strided,
)
from nni_petridish.kernels.native.structures import PoolStruct

POOLINGS = ("none", "avg", "max")
"""The poolings in the order of their numbers in C; ``none`` is the identity."""


class Pooling(NamedTuple):
    """Pooling over 3x3 pixels, with the padding not counted."""

    kind: str
    """``avg`` or ``max``."""
    stride: int

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and mean and biased variance of its channels."""
        y = x.new_empty(x.shape[0], *strided(x, self.stride), x.shape[1]).permute(0, 3, 1, 2)
        mean, variance = x.new_empty(2, x.shape[1]).unbind()
        call = self._with(x=x, y=y, mean=mean, variance=variance)
        check_memory(loaded(x).pool_forward(ctypes.byref(call), ctypes.c_long(1), batch_of(x)))
        return y, mean, variance

    def backward(self, g: Tensor, of: Combination, x: Tensor) -> Tensor:
        """Return the gradient of x, given that of the output y as a combination of g and y."""
        check_output(g, x, self.stride)
        dx = torch.empty_like(x)
        nothing = torch.zeros_like(of.of_g)
        of_y = nothing if of.of_x is None else of.of_x
        constant = nothing if of.constant is None else of.constant
        by = addresses(of_g=of.of_g, of_y=of_y, constant=constant)
        call = self._with(x=x, g=g, dx=dx)
        combination = _CombinationStruct(**by)
        check_memory(loaded(x).pool_backward(ctypes.byref(call), combination, batch_of(x)))
        return dx

    def _with(self, **tensors: Tensor) -> PoolStruct:
        """Return the C structure of the pooling with its inputs and outputs."""
        return PoolStruct(POOLINGS.index(self.kind), self.stride, **addresses(**tensors))


class _CombinationStruct(ctypes.Structure):
    """Coefficients: ``combination`` of sums.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("of_g", "of_y", "constant")]
