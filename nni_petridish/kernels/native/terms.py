"""Ops in evaluation, and their merge, in one pass over the images in C (c/evaluation.h).

An op is matrix·u + shift, where u is the output of its last depthwise conv, of a pooling or of a
ReLU: a `Term`. Here modules become addresses. Their values are read, and norms folded, in C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.kernels.native.calls import (
    ONE_TYPE,
    Geometry,
    batch_of,
    check_memory,
    loaded,
    strided,
)
from nni_petridish.kernels.native.structures import SUM_OF_TERMS, TERM

KINDS = ("none", "avg", "max", "relu", "halves")
"""Kinds of a term without units, in the order of the numbers in C."""
_NO_NORM = (0, 0, 0, 0, 0.0)


class Term(NamedTuple):
    """An op of x in evaluation."""

    packed: bytes
    """The C structure."""
    x: Tensor
    size: tuple[int, int]
    """Height and width of the result."""
    outputs: int
    """The number of channels of the result."""
    alive: Sequence[Tensor] = ()
    """Tensors that the structure points to."""


class UnitWeights(NamedTuple):
    """ReLU and depthwise conv."""

    geometry: Geometry
    depthwise: Tensor


def units_term(
    x: Tensor,
    units: Sequence[UnitWeights],
    between: tuple[Tensor, nn.BatchNorm2d] | None,
    weight: Tensor,
    norm: nn.BatchNorm2d,
) -> Term:
    """Return one or two units as a term.

    Parameters
    ----------
    x
        The input.
    units
        The units.
    between
        The weights of the pointwise conv between two units, and its norm.
    weight, norm
        The weights of the last pointwise conv, and its norm.
    """
    depthwise = [unit.depthwise.contiguous() for unit in units]
    middle = None if between is None else between[0].contiguous()
    weight = weight.contiguous()
    _, channels, height, width = x.shape
    packed = TERM.pack(
        *(len(units), 0, *units[0].geometry, *units[-1].geometry, height, width, channels),
        *(x.data_ptr(), depthwise[0].data_ptr(), depthwise[-1].data_ptr()),
        *(_address(middle), weight.data_ptr(), 0),
        *(_NO_NORM if between is None else _fixed(between[1])),
        *_fixed(norm),
    )
    alive = (*depthwise, weight) if middle is None else (*depthwise, weight, middle)
    return Term(packed, x, strided(x, units[0].geometry.stride), channels, alive)


def simple_term(
    x: Tensor, kind: str, stride: int, weights: Sequence[Tensor], norm: nn.BatchNorm2d | None
) -> Term:
    """Return a term without units: one of `KINDS`, 1x1 convs if there are weights, and a norm."""
    weights = [weight.contiguous() for weight in weights]
    _, channels, height, width = x.shape
    geometry = (3, stride, 1)
    packed = TERM.pack(
        *(0, KINDS.index(kind), *geometry, *geometry, height, width, channels, x.data_ptr()),
        *(0, 0, 0),
        *(*(weight.data_ptr() for weight in weights), 0, 0)[:2],
        *_NO_NORM,
        *(_NO_NORM if norm is None else _fixed(norm)),
    )
    outputs = sum(weight.shape[0] for weight in weights) or channels
    return Term(packed, x, strided(x, stride), outputs, weights)


class Merging(NamedTuple):
    """The 1x1 conv of concatenated ops, and its norm."""

    weight: Tensor
    norm: nn.BatchNorm2d


def sum_terms(
    terms: Sequence[Term],
    merging: Merging | None = None,
    added: Tensor | None = None,
    eta: Tensor | None = None,
    wants_h: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return added + η·h, and h if wanted: the merge of the terms, or without one their sum.

    Without η it is 1, without ``added`` that is 0.
    """
    x, size, outputs = terms[0].x, terms[0].size, terms[0].outputs
    for term in terms:
        if (term.x.shape[0], term.size, term.outputs) != (x.shape[0], size, outputs):
            raise ValueError("the terms of a sum differ in the shape of their results")
    out = x.new_empty(x.shape[0], *size, outputs).permute(0, 3, 1, 2)
    if added is not None and added.shape != out.shape:
        raise ValueError(f"{tuple(added.shape)} cannot be added to {tuple(out.shape)}")
    h = torch.empty_like(out) if wants_h else None
    weight = None if merging is None else merging.weight.contiguous()
    if weight is not None and weight.shape[:2] != (outputs, len(terms) * outputs):
        raise ValueError(f"a weight of shape {tuple(weight.shape)} does not fit the merge")
    if any(
        t is not None and t.dtype is not x.dtype
        for t in (*(t.x for t in terms), added, eta, weight)
    ):
        raise TypeError(ONE_TYPE)
    memory = ctypes.create_string_buffer(b"".join([term.packed for term in terms]))
    call = SUM_OF_TERMS.pack(
        *(len(terms), ctypes.addressof(memory), _address(weight)),
        *(_NO_NORM if merging is None else _fixed(merging.norm)),
        *(_address(eta), _address(added), _address(h), out.data_ptr()),
    )
    check_memory(loaded(x).sum_terms(call, batch_of(out)))
    return out, h


def _fixed(norm: nn.BatchNorm2d) -> tuple[int, int, int, int, float]:
    """Return the fields of ``fixed_norm``; the tensors of a norm are vectors, so contiguous."""
    return (
        _address(norm.weight),
        _address(norm.bias),
        _address(norm.running_mean),
        _address(norm.running_var),
        norm.eps,
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
