"""The gates of recurrent nodes, computed for all nodes with the same predecessor at once.

A node with predecessor z is s = z + σ(c)·(f(a) − z), where [c, a] = (m∘z) W. All nodes with the
same predecessor share one matrix product: their weights are concatenated, all c, then all a.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nni_petridish.kernels.once import once_differentiable

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


def highways(
    z: Tensor, masked: Tensor, activations: Sequence[str], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return ``z + σ(c)·(f_k(a) − z)``, ``[c, a] = masked W_k``, for each node k.

    Parameters
    ----------
    z, masked
        The predecessor without and with dropout, shape (rows, hidden).
    activations
        The name of f_k of each node.
    weights
        W_k of each node, shape (hidden, 2·hidden).
    """
    result: tuple[Tensor, ...] = _Highways.apply(z, masked, tuple(activations), *weights)
    return result


class _Highways(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, masked: Tensor, activations: tuple[str, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        merged = merge_weights(weights)
        gates = (masked @ merged).view(len(z), 2, len(weights), -1)
        states = z.new_empty(len(weights), *z.shape)
        open_gates(z, gates, activations, states)
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
            through_gates(grad.unsqueeze(1), source, own, out, [name], direct)
            if grad_z is not None and direct is not None:
                grad_z += direct[:, 0]
        rows = grad_gates.flatten(1)
        grad_masked = rows @ merged.t() if wants_masked else None
        return grad_z, grad_masked, None, *split_weights(masked.t() @ rows, len(grads))


def merge_weights(weights: Sequence[Tensor]) -> Tensor:
    """Concatenate weights (hidden, [c, a]) of several nodes: all c, then all a."""
    if len(weights) == 1:
        return weights[0].detach()
    halves = [weight.chunk(2, 1) for weight in weights]
    return torch.cat([c for c, _ in halves] + [a for _, a in halves], 1)


def split_weights(merged: Tensor, n: int) -> list[Tensor]:
    """Split the result of `merge_weights` into the weights of n nodes."""
    parts = merged.view(len(merged), 2, n, -1).unbind(2)
    return [part.reshape(len(merged), -1) for part in parts]


def open_gates(z: Tensor, gates: Tensor, activations: Sequence[str], out: Tensor) -> None:
    """Turn [c, a] into [σ(c), f(a)] in place, and write the states s = z + σ(c)·(f(a) − z).

    Parameters
    ----------
    z
        The predecessor, shape (batch, hidden).
    gates
        [c, a] of each node, shape (batch, 2, nodes, hidden).
    activations
        The name of f of each node.
    out
        Output tensor for the states, shape (nodes, batch, hidden).
    """
    c, a = gates.unbind(1)
    c.sigmoid_()
    for k, name in enumerate(activations):
        if name in _IN_PLACE:
            _IN_PLACE[name](a[:, k])
    torch.lerp(z, a.transpose(0, 1), c.transpose(0, 1), out=out)


def through_gates(
    ds: Tensor,
    source: Tensor,
    gate: Tensor,
    out: Tensor,
    activations: Sequence[str],
    direct: Tensor | None,
) -> None:
    """Backpropagate through s = z + σ(c)·(f(a) − z): to [c, a], and directly to z.

    Parameters
    ----------
    ds
        Gradient of s, shape (batch, nodes, hidden).
    source
        z, shape (batch, 1, hidden).
    gate
        [σ(c), f(a)], shape (batch, 2, nodes, hidden).
    out
        Output tensor for the gradient of [c, a], of the same shape.
    activations
        The name of f of each node.
    direct
        Output tensor for the direct gradient of z, ds·(1 − σ(c)), of ds's shape; None to skip it.
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
    """Multiply by f', computed from the value of f, in place."""
    if name == "relu":
        aten.threshold_backward.grad_input(grad, value, 0, grad_input=grad)
    elif name in _BACKWARD:
        _BACKWARD[name](grad, value, grad_input=grad)
