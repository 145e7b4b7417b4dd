"""Calls of the C kernels for recurrent cells (c/recurrence.h).

Arrays of states have shape (..., width): the hidden units fill whole vectors of the processor, and
the units that pad the last one receive no gradient.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nni_petridish.kernels.native.calls import (
    addresses,
    check_memory,
    loaded,
    parts_and_threads,
)
from nni_petridish.kernels.native.structures import (
    CandidateNodeStruct,
    CellSizeStruct,
    CellStruct,
)

KINDS = {"identity": 0, "relu": 1, "tanh": 2, "sigmoid": 3}
_BYTES = 64


def padded(value: Tensor) -> Tensor:
    """Return value with its last dimension padded with zeros, contiguous and aligned to vectors."""
    missing = -value.shape[-1] % (_BYTES // value.element_size())
    if missing:
        return F.pad(value, (0, missing))
    value = value.contiguous()
    return value.clone() if value.data_ptr() % _BYTES else value


class CellArrays(NamedTuple):
    """The arrays of a cell's forward pass. The shapes are those of ``cell`` of recurrence.h."""

    mask: Tensor | None
    first: Tensor
    gates: Tensor  # (nodes + 1, steps, rows, 2, width)
    states: Tensor  # (nodes + 1, steps, rows, width)
    outputs: Tensor  # (steps, rows, width)
    masked: Tensor  # (nodes + 2, steps, rows, width)


class Cell(NamedTuple):
    """A recurrent cell."""

    hidden: int
    nodes: Sequence[tuple[str, int]]
    """``(activation, predecessor)`` of each node."""
    weights: Sequence[Tensor]
    """W_0 and the weight of each node, shape (hidden, 2·hidden)."""
    shares: Tensor
    """The share of s_0, which is zero, and of each node in the output."""

    def forward(self, projected: Tensor, first: Tensor, mask: Tensor | None) -> CellArrays:
        """Compute all steps.

        Parameters
        ----------
        projected
            The projected input, shape (steps, rows, 2, width).
        first, mask
            The state before the first step and the dropout mask, shape (rows, hidden).
        """
        steps, rows, _, width = projected.shape
        states = len(self.nodes) + 1
        gates = projected.new_empty(states, *projected.shape)
        gates[0] = projected
        made = CellArrays(
            None if mask is None else padded(mask),
            padded(first),
            gates,
            projected.new_empty(states, steps, rows, width),
            projected.new_empty(steps, rows, width),
            projected.new_empty(states + 1, steps, rows, width),
        )
        self._run("cell_forward", made, {})
        return made

    def backward(self, made: CellArrays, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the outputs, of [c, a] of all products, and of ``first``.

        ``g`` is the gradient of the outputs at each step alone, of their shape.
        """
        total, dgates = torch.empty_like(g), torch.empty_like(made.gates)
        dfirst = torch.empty_like(made.first)
        arrays = {"g": g, "total": total, "dgates": dgates, "dfirst": dfirst}
        self._run("cell_backward", made, arrays)
        return total, dgates, dfirst

    def _run(self, name: str, made: CellArrays, arrays: dict[str, Tensor]) -> None:
        n = len(self.nodes) + 1
        weights = [weight.contiguous() for weight in self.weights]
        shape = (self.hidden, 2 * self.hidden)
        if any(weight.shape != shape for weight in weights) or len(weights) != n:
            raise ValueError(f"a cell of {n - 1} nodes needs {n} weights of shape {shape}.")
        own = {f"weight_{i}": weight for i, weight in enumerate(weights)}
        places = addresses(shares=self.shares, **made._asdict(), **arrays, **own)
        pointers = (ctypes.c_void_p * n)(*(places.pop(name) for name in own))
        sources = (ctypes.c_long * n)(0, *(j for _, j in self.nodes))
        kinds = (ctypes.c_long * n)(KINDS["tanh"], *(KINDS[f] for f, _ in self.nodes))
        call = CellStruct(
            sources=ctypes.cast(sources, ctypes.c_void_p),
            activations=ctypes.cast(kinds, ctypes.c_void_p),
            weights=ctypes.cast(pointers, ctypes.c_void_p),
            **places,
        )
        steps, rows, width = made.outputs.shape
        size = CellSizeStruct(
            steps, rows, self.hidden, width, n - 1, _threads(steps * rows * width)
        )
        check_memory(getattr(loaded(made.outputs), name)(ctypes.byref(call), size))


class NodeCall(NamedTuple):
    """A candidate node s = z + σ(c)·(f(a) − z), normalized over all steps and rows."""

    activation: str
    weight: Tensor
    running: Sequence[Tensor]
    """Mean, variance and number of batches of its norm, to be updated; empty if not."""


def node_gradients(
    node: NodeCall, alpha: float, z: Tensor, masked: Tensor, g: Tensor, eps: float, momentum: float
) -> tuple[Tensor, float]:
    """Return the gradients of [c, a], shape (steps, rows, 2, width), and of α.

    Parameters
    ----------
    node, alpha
        The candidate and its α.
    z, masked
        The predecessor without and with dropout, shape (steps, rows, width).
    g
        ∇_h L, of the same shape.
    eps, momentum
        The settings of the norm.
    """
    steps, rows, width = z.shape
    hidden = node.weight.shape[0]
    weight = node.weight.contiguous()
    if masked.shape != z.shape or g.shape != z.shape or weight.shape != (hidden, 2 * hidden):
        raise ValueError(f"a node of shape {tuple(weight.shape)} does not fit {tuple(z.shape)}.")
    dgates = z.new_empty(steps, rows, 2, width)
    names = ("running_mean", "running_variance")
    call = CandidateNodeStruct(
        activation=KINDS[node.activation],
        alpha=alpha,
        batches=node.running[2].data_ptr() if node.running else None,
        **addresses(
            weight=weight,
            z=z,
            masked=masked,
            g=g,
            dgates=dgates,
            **dict(zip(names, node.running, strict=False)),
        ),
    )
    size = CellSizeStruct(steps, rows, hidden, width, 0, _threads(steps * rows * width))
    settings = ctypes.c_double(eps), ctypes.c_double(momentum)
    check_memory(loaded(z).node_gradients(ctypes.byref(call), size, *settings))
    return dgates, call.dalpha


def _threads(numbers: int) -> int:
    """Return the number of threads for a cell with so many numbers; it changes no result."""
    _, threads = parts_and_threads(numbers)
    return threads
