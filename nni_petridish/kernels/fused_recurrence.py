"""A recurrent cell and its candidates in C, in training on the CPU.

The same numbers as `nni_petridish.kernels.recurrence` and `nni_petridish.kernels.gates`, up to
rounding. One call of C takes each thread's rows of the batch through all steps. Candidates do not
affect the states (sf, sg), so they are computed in the backward pass, once ∇_h L is known, forward
and backward in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.kernels.deferred_candidates import EPS, MOMENTUM, running_statistics
from nni_petridish.kernels.moments import has_hooks
from nni_petridish.kernels.native.library import native_library
from nni_petridish.kernels.native.recurrences import (
    Cell,
    CellArrays,
    NodeCall,
    node_gradients,
    padded,
)
from nni_petridish.kernels.once import once_differentiable
from nni_petridish.kernels.prepared import can_skip
from nni_petridish.kernels.products import product
from nni_petridish.kernels.switch import fast_kernels_apply


def recurrence_applies(x: Tensor) -> bool:
    """Return whether the C kernels support inputs like x, shape (steps, batch, embedding)."""
    return (
        x.device.type == "cpu"
        and x.numel() > 0
        and fast_kernels_apply(x)
        and native_library(x.dtype) is not None
    )


@dataclass(frozen=True, eq=False)
class FusedCell:
    """The result of the forward pass over all steps, as needed by the backward pass."""

    cell: Cell
    arrays: CellArrays
    x: Tensor
    weight: Tensor  # (embedding + hidden, 2·hidden)

    @property
    def hidden(self) -> int:
        """The number of hidden units."""
        return self.cell.hidden

    def outputs(self) -> Tensor:
        """Return h at all steps, shape (steps, batch, hidden)."""
        return self.arrays.outputs[..., : self.hidden].contiguous()

    def state(self, node: int) -> Tensor:
        """Return s_node at all steps, shape (steps, batch, hidden)."""
        return self.arrays.states[node][..., : self.hidden].contiguous()


@torch.no_grad()
def unroll_fused(
    nodes: Sequence[tuple[str, int]],
    x: Tensor,
    first: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    weights: Sequence[Tensor],
    average: Tensor,
) -> FusedCell:
    """Compute all steps of a cell.

    Parameters
    ----------
    nodes
        ``(activation, predecessor)`` of each node.
    x
        Inputs, shape (steps, batch, embedding).
    first, mask
        h before the first step and the mask of the hidden units, shape (batch, hidden).
    weight
        The weights of s_0, of the input and of h, shape (embedding + hidden, 2·hidden).
    weights, average
        W and share of each node.
    """
    hidden = first.shape[1]
    own, weight_0 = weight.split([x.shape[2], hidden])
    projected = product(x.reshape(-1, x.shape[2]), _padded_gates(own))
    shares = torch.cat([average.new_zeros(1), average])
    cell = Cell(hidden, tuple(nodes), (weight_0, *weights), shares)
    arrays = cell.forward(projected.view(*x.shape[:2], 2, -1), first, mask)
    return FusedCell(cell, arrays, x, weight)


def differentiable_fused(
    fused: FusedCell,
    sf_x_c: Tensor | None,
    x: Tensor,
    first: Tensor,
    weight: Tensor,
    weights: Sequence[Tensor],
    average: Tensor,
) -> Tensor:
    """Return the outputs, shape (steps, batch, hidden), as a differentiable function of the inputs.

    ``sf_x_c`` is sf(x_c) of every step, see `nni_petridish.kernels.recurrence`.
    """
    result: Tensor = _FusedRecurrence.apply(fused, sf_x_c, x, first, weight, average, *weights)
    return result


class _FusedRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: FusedCell, sf_x_c: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.fused = fused
        ctx.save_for_backward(*inputs[2:])  # to detect weights changed in place
        return fused.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fused: FusedCell = ctx.fused
        _ = ctx.saved_tensors  # raises an error if one was changed in place
        arrays, hidden, x = fused.arrays, fused.hidden, fused.x
        total, dgates, dfirst = fused.cell.backward(arrays, padded(grad))
        _, wants_sum, wants_x, _, wants_weight, wants_average, *wanted = ctx.needs_input_grad
        rows = dgates.flatten(1, 2).flatten(2)  # (nodes + 1, steps·batch, 2·width)
        masked = arrays.masked.flatten(1, 2)[..., :hidden]
        dx = dweight = daverage = None
        if wants_x:
            own = _padded_gates(fused.weight[: x.shape[2]])
            dx = product(rows[0], own.t()).view(x.shape)
        if wants_weight:
            inputs = torch.cat([x.reshape(-1, x.shape[2]), masked[0]], 1)
            dweight = _without_padding(product(inputs.t(), rows[0]), hidden)
        if wants_average:
            daverage = torch.stack([(state * total).sum() for state in arrays.states[1:]])
        found = [
            _without_padding(product(masked[source + 1].t(), rows[i]), hidden) if want else None
            for i, ((_, source), want) in enumerate(zip(fused.cell.nodes, wanted, strict=True), 1)
        ]
        d_sum = total[..., :hidden] if wants_sum else None
        return None, d_sum, dx, dfirst[:, :hidden], dweight, daverage, *found


class FusedNode(NamedTuple):
    """A candidate node."""

    source: int
    """The number of its predecessor."""
    activation: str
    weight: Tensor
    norm: nn.BatchNorm2d


def can_fuse_nodes(fused: FusedCell, candidates: Sequence[nn.Module]) -> bool:
    """Return whether `fused_candidates` supports these norms and modules, given in any order."""
    like = fused.arrays.outputs[0, :, : fused.hidden]
    rows = fused.arrays.outputs.shape[0] * fused.arrays.outputs.shape[1]
    return rows > 1 and all(
        not has_hooks(module)
        and (
            not isinstance(module, nn.BatchNorm2d)
            or (can_skip(module) and running_statistics([module], like) is not None)
        )
        for module in candidates
    )


def fused_candidates(fused: FusedCell, alpha: Tensor, nodes: Sequence[FusedNode]) -> Tensor:
    """Return sf(Σ α·norm(s)), which is zero, shape (steps, batch, hidden)."""
    result: Tensor = _FusedCandidates.apply(fused, nodes, alpha, *(node.weight for node in nodes))
    return result


class _FusedCandidates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: FusedCell, nodes: Sequence[FusedNode], alpha: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.fused, ctx.nodes, ctx.observed = fused, nodes, False
        ctx.save_for_backward(alpha, *weights)
        outputs = fused.arrays.outputs
        return outputs.new_zeros(()).expand(*outputs.shape[:2], fused.hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fused: FusedCell = ctx.fused
        alpha, *weights = ctx.saved_tensors
        arrays, hidden, g = fused.arrays, fused.hidden, padded(grad)
        # Update running statistics once, even if there are several backward passes.
        observe, ctx.observed = not ctx.observed, True
        dalpha, dweights = [], []
        for node, weight, a in zip(ctx.nodes, weights, alpha.tolist(), strict=True):
            masked = arrays.masked[node.source + 1]
            running = running_statistics([node.norm], g[0, :, :hidden]) if observe else ()
            call = NodeCall(node.activation, weight, running or ())
            dgates, own = node_gradients(
                call, a, arrays.states[node.source], masked, g, EPS, MOMENTUM
            )
            dalpha.append(own)
            rows = masked.flatten(0, 1)[:, :hidden]
            dweight = product(rows.t(), dgates.flatten(0, 1).flatten(1))
            dweights.append(_without_padding(dweight, hidden))
        return None, None, alpha.new_tensor(dalpha), *dweights


def _padded_gates(weight: Tensor) -> Tensor:
    """Pad each half of the columns, c and a, to whole vectors."""
    return padded(weight.view(len(weight), 2, -1)).flatten(1)


def _without_padding(weight: Tensor, hidden: int) -> Tensor:
    """Return the inverse of `_padded_gates`."""
    return weight.view(len(weight), 2, -1)[..., :hidden].reshape(len(weight), -1)
