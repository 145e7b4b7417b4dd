"""The recurrence of a cell over all steps in time, with a backward pass written by hand.

    s_0(t) = h(t-1) + σ(c)·(tanh(a) − h(t-1)),     [c, a] = A(t) + (m∘h(t-1)) W_0
    s_i(t) = s_j(t) + σ(c)·(f_i(a) − s_j(t)),      [c, a] = (m∘s_j(t)) W_i,     j = pred(i)
    h(t)   = Σ_i w_i s_i(t)

m is the locked dropout mask of the hidden units, A(t) the part of the input. All nodes of one
predecessor share one matrix product, states are written into buffers made once, and the gradient of
each weight is one matrix product over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nni_petridish.kernels.gates import merge_weights, open_gates, split_weights, through_gates


class Group(NamedTuple):
    """The nodes of one predecessor: computed by one matrix product."""

    source: int  # slot of the predecessor
    nodes: tuple[int, ...]  # their numbers, counted from 1
    activations: tuple[str, ...]
    first: int  # slot of the first of them; the others follow

    @property
    def slots(self) -> slice:
        """Where the states of the group's nodes lie."""
        return slice(self.first, self.first + len(self.nodes))


class Wiring:
    """Which node reads which, and where its state lies: slot 0 is s0, groups follow each other.

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
        #: The node, counted from 0, in each slot after s0.
        self.order = [i - 1 for i in list(self.slot)[1:]]


@dataclass(frozen=True, eq=False)
class Run:
    """What the forward pass computed and the backward pass needs."""

    wiring: Wiring
    mask: Tensor | None
    first: Tensor  # h before the first step, (batch, hidden)
    weight_0: Tensor
    merged: list[Tensor]  # the weights of each group side by side: all gates, then all activations
    average: Tensor  # w_i by slot, (nodes,)
    gates: list[Tensor]  # (steps, batch, 2, members, hidden) of s0 and of each group
    states: Tensor  # (steps, slots, batch, hidden)
    outputs: Tensor  # (steps, batch, hidden)

    def state(self, node: int) -> Tensor:
        """Return s_node at all steps, shape (steps, batch, hidden)."""
        return self.states[:, self.wiring.slot[node]]

    def previous_outputs(self) -> Tensor:
        """Return h(t-1) at all steps."""
        return torch.cat([self.first.unsqueeze(0), self.outputs[:-1]])


@torch.no_grad()
def run_recurrence(
    wiring: Wiring,
    projected: Tensor,
    first: Tensor,
    mask: Tensor | None,
    weight_0: Tensor,
    weights: Sequence[Tensor],
    average: Tensor,
) -> Run:
    """Compute all steps.

    Parameters
    ----------
    wiring
        The cell.
    projected
        A, shape (steps, batch, 2·hidden).
    first
        h before the first step, shape (batch, hidden).
    mask
        m, shape (batch, hidden); None keeps all units.
    weight_0, weights
        W_0 and each node's W, shape (hidden, 2·hidden).
    average
        w, one for each node.
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
    return Run(wiring, mask, first, weight_0, merged, by_slot, gates, states, outputs)


def differentiable(
    run: Run,
    hidden_sum: Tensor | None,
    projected: Tensor,
    first: Tensor,
    weight_0: Tensor,
    weights: Sequence[Tensor],
    average: Tensor,
) -> Tensor:
    """Return the outputs of a run, shape (steps, batch, hidden), as a function of its inputs.

    Parameters
    ----------
    run
        What `run_recurrence` returned for these inputs.
    hidden_sum
        sf(x_c) of every step, zero in value: its gradient is ∇_{h(t)} L, through the loss at step t
        and through all steps after it. It may have been computed from the run's states.
    projected, first, weight_0, weights, average
        The inputs.
    """
    result: Tensor = _Recurrence.apply(
        run, hidden_sum, projected, first, weight_0, average, *weights
    )
    return result


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, hidden_sum: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs[2:])  # so that a weight changed in between is noticed
        return run.outputs.view_as(run.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        _ = ctx.saved_tensors  # reading them raises an error if one was changed in place
        back = _Backward(run)
        total, grad_first = back.through_time(grad)
        _, wants_sum, _, _, wants_0, wants_average, *wanted = ctx.needs_input_grad
        by_node = back.weight_gradients(wanted)
        return (
            None,
            total if wants_sum else None,
            back.grads[0].flatten(2),
            grad_first,
            back.weight_gradient(0, run.previous_outputs()) if wants_0 else None,
            _average_gradient(run, total) if wants_average else None,
            *(by_node[i] for i in range(1, len(wanted) + 1)),
        )


class _Backward:
    """Backpropagation through time for one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.grads = [torch.empty_like(gate) for gate in run.gates]

    def through_time(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of all outputs h(t), and of h before the first step."""
        run, batch = self.run, self.run.first.shape[0]
        pairs = zip(run.gates[1:], self.grads[1:], strict=True)
        groups = list(zip(run.wiring.groups, run.merged, pairs, strict=True))[::-1]
        total = torch.empty_like(run.outputs)
        share = torch.cat([run.average.new_zeros(1), run.average]).view(-1, 1, 1)
        ds = torch.empty_like(run.states[0])
        dh = torch.zeros_like(run.first)
        product = torch.empty_like(run.first)
        before = run.previous_outputs()
        for t in reversed(range(len(total))):
            torch.add(grad[t], dh, out=total[t])
            torch.mul(share, total[t], out=ds)
            for group, weight, (gate, grad_gate) in groups:
                source = run.states[t, group.source].unsqueeze(1)
                own = ds[group.slots].transpose(0, 1)
                direct = torch.empty_like(own)
                through_gates(own, source, gate[t], grad_gate[t], group.activations, direct)
                torch.mm(grad_gate[t].view(batch, -1), weight.t(), out=product)
                _add(ds[group.source].add_(direct.sum(1)), product, run.mask)
            own, source = ds[0].unsqueeze(1), before[t].unsqueeze(1)
            gate_0, grad_0 = run.gates[0][t], self.grads[0][t]
            through_gates(own, source, gate_0, grad_0, ("tanh",), dh.unsqueeze(1))
            torch.mm(grad_0.view(batch, -1), run.weight_0.t(), out=product)
            _add(dh, product, run.mask)
        return total, dh

    def weight_gradient(self, i: int, source: Tensor) -> Tensor:
        """Return the gradient of a group's weights: one matrix product for all steps."""
        masked = source if self.run.mask is None else source * self.run.mask
        return masked.flatten(0, 1).t() @ self.grads[i].flatten(2).flatten(0, 1)

    def weight_gradients(self, wanted: Sequence[bool]) -> dict[int, Tensor | None]:
        """Return the gradient of each node's weight, by the number of the node."""
        result: dict[int, Tensor | None] = dict.fromkeys(range(1, len(wanted) + 1))
        for i, group in enumerate(self.run.wiring.groups, 1):
            if any(wanted[node - 1] for node in group.nodes):
                merged = self.weight_gradient(i, self.run.states[:, group.source])
                result |= dict(
                    zip(group.nodes, split_weights(merged, len(group.nodes)), strict=True)
                )
        return result


def _add(total: Tensor, product: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        total += product
    else:
        total.addcmul_(product, mask)


def _average_gradient(run: Run, total: Tensor) -> Tensor:
    by_slot = torch.einsum("tsbh,tbh->s", run.states[:, 1:], total)
    result = torch.empty_like(by_slot)
    result[run.wiring.order] = by_slot
    return result
