"""The recurrence of a cell over all steps in time, with a backward pass written by hand.

    s_0(t) = h(t-1) + σ(c)·(tanh(a) − h(t-1)),     [c, a] = A(t) + (m∘h(t-1)) W_0
    s_i(t) = s_j(t) + σ(c)·(f_i(a) − s_j(t)),      [c, a] = (m∘s_j(t)) W_i,     j = pred(i)
    h(t)   = Σ_i w_i s_i(t)

m is the locked dropout mask of the hidden units, A(t) the part of the input. All nodes of one
predecessor share one matrix product, states are written into buffers made once, and the gradient of
each weight is one matrix product over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
aten = torch.ops.aten
_BACKWARD = {
    "sigmoid": aten.sigmoid_backward.grad_input,
    "tanh": aten.tanh_backward.grad_input,
}
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid_,
    "relu": torch.relu_,
    "tanh": torch.tanh_,
}


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
    merged = [_merge([weights[i - 1] for i in group.nodes]) for group in wiring.groups]
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
            _open_gates(source, gate, group.activations, s[group.slots])
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
        assert ctx.saved_tensors  # raises if one was changed
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
                _through_gates(own, source, gate[t], grad_gate[t], group.activations, direct)
                torch.mm(grad_gate[t].view(batch, -1), weight.t(), out=product)
                _add(ds[group.source].add_(direct.sum(1)), product, run.mask)
            own, source = ds[0].unsqueeze(1), before[t].unsqueeze(1)
            gate_0, grad_0 = run.gates[0][t], self.grads[0][t]
            _through_gates(own, source, gate_0, grad_0, ("tanh",), dh.unsqueeze(1))
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
                result |= dict(zip(group.nodes, _split(merged, len(group.nodes)), strict=True))
        return result


def highways(
    z: Tensor, masked: Tensor, activations: Sequence[str], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return ``z + σ(c)·(f_k(a) − z)``, ``[c, a] = masked W_k``, for each k: one matrix product.

    Parameters
    ----------
    z, masked
        The predecessor, and what dropout leaves of it; shape (rows, hidden).
    activations, weights
        f_k and W_k of each node, shape (hidden, 2·hidden).
    """
    result: tuple[Tensor, ...] = _Highways.apply(z, masked, tuple(activations), *weights)
    return result


class _Highways(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, masked: Tensor, activations: tuple[str, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        merged = _merge(weights)
        gates = (masked @ merged).view(len(z), 2, len(weights), -1)
        states = z.new_empty(len(weights), *z.shape)
        _open_gates(z, gates, activations, states)
        ctx.activations = activations
        ctx.save_for_backward(z, masked, merged, gates)
        return states.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, masked, merged, gates = ctx.saved_tensors
        wants_z, wants_masked, *_ = ctx.needs_input_grad
        grad_z = torch.zeros_like(z) if wants_z else None
        grad_gates, source = torch.empty_like(gates), z.unsqueeze(1)
        for k, (name, grad) in enumerate(zip(ctx.activations, grads, strict=True)):
            own, out = gates[:, :, k : k + 1], grad_gates[:, :, k : k + 1]
            direct = None if grad_z is None else torch.empty_like(grad).unsqueeze(1)
            _through_gates(grad.unsqueeze(1), source, own, out, [name], direct)
            if grad_z is not None and direct is not None:
                grad_z += direct[:, 0]
        rows = grad_gates.flatten(1)
        grad_masked = rows @ merged.t() if wants_masked else None
        return grad_z, grad_masked, None, *_split(masked.t() @ rows, len(grads))


def _merge(weights: Sequence[Tensor]) -> Tensor:
    """Put (hidden, [c, a]) weights side by side: all c, then all a."""
    if len(weights) == 1:
        return weights[0].detach()
    halves = [weight.chunk(2, 1) for weight in weights]
    return torch.cat([c for c, _ in halves] + [a for _, a in halves], 1)


def _split(merged: Tensor, n: int) -> list[Tensor]:
    """Return what `_merge` put side by side."""
    parts = merged.view(len(merged), 2, n, -1).unbind(2)
    return [part.reshape(len(merged), -1) for part in parts]


def _open_gates(z: Tensor, gates: Tensor, activations: Sequence[str], out: Tensor) -> None:
    """Turn [c, a] into [σ(c), f(a)] in place, and write the states s = z + σ(c)·(f(a) − z).

    Parameters
    ----------
    z
        The predecessor, shape (batch, hidden).
    gates
        Shape (batch, 2, members, hidden).
    activations
        f of each member.
    out
        Where the states go, shape (members, batch, hidden).
    """
    c, a = gates.unbind(1)
    c.sigmoid_()
    for k, name in enumerate(activations):
        if name in _IN_PLACE:
            _IN_PLACE[name](a[:, k])
    torch.lerp(z, a.transpose(0, 1), c.transpose(0, 1), out=out)


def _through_gates(
    ds: Tensor,
    source: Tensor,
    gate: Tensor,
    out: Tensor,
    activations: Sequence[str],
    direct: Tensor | None,
) -> None:
    """Write ∂/∂[c, a] of s = z + σ(c)·(f(a) − z), and what z gets directly: ds·(1 − σ(c)).

    Parameters
    ----------
    ds
        Gradient of s, shape (batch, members, hidden).
    source
        z, shape (batch, 1, hidden).
    gate, out
        [σ(c), f(a)] and where their gradients go, shape (batch, 2, members, hidden).
    activations
        f of each member.
    direct
        Where z's direct gradient goes, of ds's shape; None if nobody wants it.
    """
    c, a = gate.unbind(1)
    grad_c, grad_a = out.unbind(1)
    torch.sub(a, source, out=grad_c).mul_(ds)
    _BACKWARD["sigmoid"](grad_c, c, grad_input=grad_c)
    torch.mul(ds, c, out=grad_a)
    if direct is not None:
        torch.sub(ds, grad_a, out=direct)
    for k, name in enumerate(activations):
        _multiply_by_slope(name, grad_a[:, k], a[:, k])


def _multiply_by_slope(name: str, grad: Tensor, value: Tensor) -> None:
    """Multiply by f', which is a function of f's value, in place."""
    if name == "relu":
        aten.threshold_backward.grad_input(grad, value, 0, grad_input=grad)
    elif name in _BACKWARD:
        _BACKWARD[name](grad, value, grad_input=grad)


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
