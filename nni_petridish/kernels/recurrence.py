"""A recurrent cell, unrolled over all steps in time, with a handwritten backward pass.

    s_0(t) = h(t-1) + σ(c)·(tanh(a) − h(t-1)),     [c, a] = A(t) + (m∘h(t-1)) W_0
    s_i(t) = s_j(t) + σ(c)·(f_i(a) − s_j(t)),      [c, a] = (m∘s_j(t)) W_i,     j = pred(i)
    h(t)   = Σ_i w_i s_i(t)

m is the locked dropout mask of the hidden units, A(t) the projected input. All nodes with the same
predecessor share one matrix product, states are written into preallocated buffers, and the gradient
of each weight is one matrix product over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nni_petridish.kernels.gates import merge_weights, open_gates, split_weights, through_gates
from nni_petridish.kernels.once import once_differentiable


class Group(NamedTuple):
    """The nodes with the same predecessor, computed by one matrix product."""

    source: int  # slot of the predecessor
    nodes: tuple[int, ...]  # their numbers, counted from 1
    activations: tuple[str, ...]
    first: int  # slot of the first node; the others follow

    @property
    def slots(self) -> slice:
        """The slots of the group's nodes."""
        return slice(self.first, self.first + len(self.nodes))


class Wiring:
    """The graph of a cell, and the slots of its states: slot 0 is s0, then group after group.

    Parameters
    ----------
    nodes
        ``(activation, predecessor)`` of each node.
    """

    def __init__(self, nodes: Sequence[tuple[str, int]]) -> None:
        self.slot = {0: 0}
        self.groups: list[Group] = []
        for source in range(len(nodes)):
            members = [i for i, (_, j) in enumerate(nodes, 1) if j == source]
            if members:
                activations = tuple(nodes[i - 1][0] for i in members)
                first = len(self.slot)
                self.slot |= {i: first + k for k, i in enumerate(members)}
                self.groups.append(Group(self.slot[source], tuple(members), activations, first))
        #: The node in each slot after s0, counted from 0.
        self.order = [i - 1 for i in list(self.slot)[1:]]


@dataclass(frozen=True, eq=False)
class UnrolledCell:
    """The result of the forward pass over all steps, as needed by the backward pass."""

    wiring: Wiring
    mask: Tensor | None
    first: Tensor  # h before the first step, (batch, hidden)
    weight_0: Tensor
    merged: list[Tensor]  # `merge_weights` of each group
    average: Tensor  # w_i by slot, (nodes,)
    gates: list[Tensor]  # of s0 and of each group, (steps, batch, 2, nodes, hidden)
    states: Tensor  # (steps, slots, batch, hidden)
    outputs: Tensor  # (steps, batch, hidden)

    def state(self, node: int) -> Tensor:
        """Return s_node at all steps, shape (steps, batch, hidden)."""
        return self.states[:, self.wiring.slot[node]]

    def previous_outputs(self) -> Tensor:
        """Return h(t-1) at all steps."""
        return torch.cat([self.first.unsqueeze(0), self.outputs[:-1]])


@torch.no_grad()
def unroll_cell(
    wiring: Wiring,
    projected: Tensor,
    first: Tensor,
    mask: Tensor | None,
    weight_0: Tensor,
    weights: Sequence[Tensor],
    average: Tensor,
) -> UnrolledCell:
    """Compute all steps of a cell.

    Parameters
    ----------
    wiring
        The graph of the cell.
    projected
        A, shape (steps, batch, 2·hidden).
    first
        h before the first step, shape (batch, hidden).
    mask
        m, shape (batch, hidden); None keeps all units.
    weight_0, weights
        W_0 and each node's W, shape (hidden, 2·hidden).
    average
        w_i of each node, shape (nodes,).
    """
    steps, batch, _ = projected.shape
    hidden = first.shape[1]
    merged = [merge_weights([weights[i - 1] for i in group.nodes]) for group in wiring.groups]
    states = projected.new_empty(steps, len(wiring.slot), batch, hidden)
    outputs = projected.new_empty(steps, batch, hidden)
    widths = [1, *(len(group.nodes) for group in wiring.groups)]
    gates = [projected.new_empty(steps, batch, 2, width, hidden) for width in widths]
    by_slot = average[wiring.order]
    masked = torch.empty_like(first)

    h = first
    for t in range(steps):
        s, (gate_0, *gate_groups) = states[t], [gate[t] for gate in gates]
        if mask is not None:
            torch.mul(h, mask, out=masked)
        torch.addmm(
            projected[t], h if mask is None else masked, weight_0, out=gate_0.view(batch, -1)
        )
        torch.lerp(h, gate_0[:, 1, 0].tanh_(), gate_0[:, 0, 0].sigmoid_(), out=s[0])
        for group, weight, gate in zip(wiring.groups, merged, gate_groups, strict=True):
            source = s[group.source]
            if mask is not None:
                torch.mul(source, mask, out=masked)
            torch.mm(source if mask is None else masked, weight, out=gate.view(batch, -1))
            open_gates(source, gate, group.activations, s[group.slots])
        torch.mv(s[1:].view(len(by_slot), -1).t(), by_slot, out=outputs[t].view(-1))
        h = outputs[t]
    return UnrolledCell(wiring, mask, first, weight_0, merged, by_slot, gates, states, outputs)


def differentiable_outputs(
    unrolled: UnrolledCell,
    sf_x_c: Tensor | None,
    projected: Tensor,
    first: Tensor,
    weight_0: Tensor,
    weights: Sequence[Tensor],
    average: Tensor,
) -> Tensor:
    """Return the outputs, shape (steps, batch, hidden), as a differentiable function of the inputs.

    Parameters
    ----------
    unrolled
        The result of `unroll_cell` for these inputs.
    sf_x_c
        sf(x_c) of every step, which is zero. Its gradient is ∇_{h(t)} L, through the loss at step t
        and through all later steps. It may be computed from the unrolled states.
    projected, first, weight_0, weights, average
        The inputs of `unroll_cell`.
    """
    result: Tensor = _Recurrence.apply(
        unrolled, sf_x_c, projected, first, weight_0, average, *weights
    )
    return result


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unrolled: UnrolledCell, sf_x_c: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.unrolled = unrolled
        ctx.save_for_backward(*inputs[2:])  # to detect weights changed in place
        return unrolled.outputs.view_as(unrolled.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unrolled: UnrolledCell = ctx.unrolled
        _ = ctx.saved_tensors  # raises an error if one was changed in place
        back = _Backward(unrolled)
        total, grad_first = back.through_time(grad)
        _, wants_sum, _, _, wants_0, wants_average, *wanted = ctx.needs_input_grad
        by_node = back.weight_gradients(wanted)
        return (
            None,
            total if wants_sum else None,
            back.grads[0].flatten(2),
            grad_first,
            back.weight_gradient(0, unrolled.previous_outputs()) if wants_0 else None,
            _average_gradient(unrolled, total) if wants_average else None,
            *(by_node[i] for i in range(1, len(wanted) + 1)),
        )


class _Backward:
    """Backpropagation through time for one unrolled cell."""

    def __init__(self, unrolled: UnrolledCell) -> None:
        self.unrolled = unrolled
        self.grads = [torch.empty_like(gate) for gate in unrolled.gates]

    def through_time(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of all outputs h(t), and of h before the first step."""
        unrolled, batch = self.unrolled, self.unrolled.first.shape[0]
        pairs = zip(unrolled.gates[1:], self.grads[1:], strict=True)
        groups = list(zip(unrolled.wiring.groups, unrolled.merged, pairs, strict=True))[::-1]
        total = torch.empty_like(unrolled.outputs)
        share = torch.cat([unrolled.average.new_zeros(1), unrolled.average]).view(-1, 1, 1)
        ds = torch.empty_like(unrolled.states[0])
        dh = torch.zeros_like(unrolled.first)
        product = torch.empty_like(unrolled.first)
        before = unrolled.previous_outputs()
        for t in reversed(range(len(total))):
            torch.add(grad[t], dh, out=total[t])
            torch.mul(share, total[t], out=ds)
            for group, weight, (gate, grad_gate) in groups:
                source = unrolled.states[t, group.source].unsqueeze(1)
                own = ds[group.slots].transpose(0, 1)
                direct = torch.empty_like(own)
                through_gates(own, source, gate[t], grad_gate[t], group.activations, direct)
                torch.mm(grad_gate[t].view(batch, -1), weight.t(), out=product)
                _add(ds[group.source].add_(direct.sum(1)), product, unrolled.mask)
            own, source = ds[0].unsqueeze(1), before[t].unsqueeze(1)
            gate_0, grad_0 = unrolled.gates[0][t], self.grads[0][t]
            through_gates(own, source, gate_0, grad_0, ("tanh",), dh.unsqueeze(1))
            torch.mm(grad_0.view(batch, -1), unrolled.weight_0.t(), out=product)
            _add(dh, product, unrolled.mask)
        return total, dh

    def weight_gradient(self, i: int, source: Tensor) -> Tensor:
        """Return the gradient of a group's weights: one matrix product for all steps."""
        masked = source if self.unrolled.mask is None else source * self.unrolled.mask
        return masked.flatten(0, 1).t() @ self.grads[i].flatten(2).flatten(0, 1)

    def weight_gradients(self, wanted: Sequence[bool]) -> dict[int, Tensor | None]:
        """Return the gradient of each node's weight, by the number of the node."""
        result: dict[int, Tensor | None] = dict.fromkeys(range(1, len(wanted) + 1))
        for i, group in enumerate(self.unrolled.wiring.groups, 1):
            if any(wanted[node - 1] for node in group.nodes):
                merged = self.weight_gradient(i, self.unrolled.states[:, group.source])
                result |= dict(
                    zip(group.nodes, split_weights(merged, len(group.nodes)), strict=True)
                )
        return result


def _add(total: Tensor, product: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        total += product
    else:
        total.addcmul_(product, mask)


def _average_gradient(unrolled: UnrolledCell, total: Tensor) -> Tensor:
    by_slot = torch.einsum("tsbh,tbh->s", unrolled.states[:, 1:], total)
    result = torch.empty_like(by_slot)
    result[unrolled.wiring.order] = by_slot
    return result
