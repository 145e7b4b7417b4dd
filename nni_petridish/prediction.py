"""What candidates promise: the first-order change of the loss, for the diary of a growth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.grow import AlphaRow, sites

Tables = dict[str, list[AlphaRow]]


def predicted_changes(
    net: nn.Module, losses: Callable[[nn.Module], Iterable[Tensor]]
) -> dict[str, dict[tuple[str, str], float]]:
    """Return ⟨∇L, α_ij·u_ij⟩ of every candidate u_ij, summed over the sites of its α table.

    It is α_ij·∂L/∂α_ij: x_c is linear in α, so Eq. 7's inner product is the sum over candidates,
    and one backward pass gives all of them. Nothing but α gets a gradient, and nothing changes.

    Parameters
    ----------
    net
        A network with candidates attached, in isolated weak learning.
    losses
        Gives parts of the loss whose sum is L.
    """
    tables = {site.key: site.weak_learner.table for site in sites(net) if site.weak_learner}
    alphas = [table.alpha for table in tables.values()]
    totals = [torch.zeros_like(alpha) for alpha in alphas]
    modes = {module: module.training for module in net.modules()}
    passes = [table.backward_passes.clone() for table in tables.values()]
    net.eval()
    try:
        for loss in losses(net):
            for table in tables.values():
                table.l1_came_with_loss = True  # L alone, without λ Σ|α|
            for total, gradient in zip(totals, torch.autograd.grad(loss, alphas), strict=True):
                total += gradient
    finally:
        for module, mode in modes.items():
            module.training = mode
        for table, count in zip(tables.values(), passes, strict=True):
            table.l1_came_with_loss = False
            table.backward_passes.copy_(count)
    return {
        key: {
            shortcut: float(value)
            for shortcut, value in zip(table.shortcuts, table.alpha.detach() * total, strict=True)
        }
        for (key, table), total in zip(tables.items(), totals, strict=True)
    }


def add_predictions(
    tables: Tables, net: nn.Module, losses: Callable[[nn.Module], Iterable[Tensor]]
) -> Tables:
    """Return the α tables with ``predicted`` beside each α."""
    changes = predicted_changes(net, losses)
    result: dict[str, Any] = {
        key: [{**row, "predicted": changes[key][row["source"], row["op"]]} for row in rows]
        for key, rows in tables.items()
    }
    return result
