"""Predicted gain of candidates, for the diary of a growth: slopes of the loss, and the best step.

The slope alone predicts little. The objective ⟨∇L, x_c⟩ of weak learning is linear in x_c, which
therefore grows large: along x_c the loss falls for a few percent of the way and then rises steeply.
So the loss is also evaluated along the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.core.grow import sites
from nni_petridish.core.modes import evaluation_mode
from nni_petridish.core.weak_learner import Candidates


def slopes(
    net: nn.Module, losses: Callable[[nn.Module], Iterable[Tensor]]
) -> dict[str, dict[tuple[str, str], float]]:
    """Return the slope ⟨∇L, α_ij·u_ij⟩ along each candidate u_ij, over all sites of its α table.

    The slope is α_ij·∂L/∂α_ij: x_c is linear in α, so the inner product in Eq. 7 is a sum over
    candidates, and one backward pass gives all slopes. The network does not change.

    Parameters
    ----------
    net
        A network with candidates attached, in isolated weak learning.
    losses
        Returns parts of the loss, with L as their sum.

    Returns
    -------
    dict
        The slopes by key of the α table and shortcut. Empty if ``losses`` returns nothing.
    """
    tables = {site.key: site.weak_learner.table for site in sites(net) if site.weak_learner}
    alphas = [table.alpha for table in tables.values()]
    totals = [torch.zeros_like(alpha) for alpha in alphas]
    known = False
    passes = [table.backward_passes.clone() for table in tables.values()]
    try:
        with evaluation_mode(net):
            for loss in losses(net):
                known = True
                for table in tables.values():
                    table.l1_came_with_loss = True  # L alone, without λ Σ|α|
                for total, gradient in zip(totals, torch.autograd.grad(loss, alphas), strict=True):
                    total += gradient
    finally:
        for table, count in zip(tables.values(), passes, strict=True):
            table.l1_came_with_loss = False
            table.backward_passes.copy_(count)
    if not known:
        return {}
    return {
        key: {
            shortcut: float(value)
            for shortcut, value in zip(table.shortcuts, table.alpha.detach() * total, strict=True)
        }
        for (key, table), total in zip(tables.items(), totals, strict=True)
    }


class Step(NamedTuple):
    """A step x_k + t·x_c of all sites at once: its size t, and the change of the loss."""

    size: float
    change: float


def best_step(
    net: nn.Module,
    losses: Callable[[nn.Module], Iterable[Tensor]],
    i_max: int,
    backward: bool = False,
) -> Step | None:
    """Return the step along the candidates to be selected that lowers the loss most.

    Their sum Σ α·u is added to every x_k with a common t, which doubles from 2⁻¹⁰ as long as the
    loss falls. Nothing is trained.

    Parameters
    ----------
    net
        A network with candidates attached, in isolated weak learning.
    losses
        Returns parts of the loss.
    i_max
        The number of candidates of each α table to be selected.
    backward
        Whether to step against x_c, for a positive slope: η can become negative too.

    Returns
    -------
    Step or None
        None for networks that do not run their candidates in evaluation. A recurrent cell does not:
        adding x_c at one step would change all later states.
    """
    direction = -1.0 if backward else 1.0
    start, best = _loss_at(net, losses, i_max, 0.0), Step(0.0, 0.0)
    if start is None:
        return None
    for power in range(-10, 1):
        size = direction * 2.0**power
        loss = _loss_at(net, losses, i_max, size)
        assert loss is not None
        if not loss - start < best.change:
            break
        best = Step(size, loss - start)
    return best


def _loss_at(
    net: nn.Module, losses: Callable[[nn.Module], Iterable[Tensor]], i_max: int, size: float
) -> float | None:
    """Return the loss with ``size`` times x_c added; None if no site runs its candidates."""
    handles, added = [], False
    for site in sites(net):
        if (learner := site.weak_learner) is not None:
            chosen = learner.table.top(i_max)

            def add(
                module: Candidates, arguments: Any, x_k: Tensor, chosen: list[int] = chosen
            ) -> Tensor:
                nonlocal added
                added = True
                return x_k + size * module.weighted_sum(arguments[1], chosen)

            handles.append(learner.register_forward_hook(add))
    try:
        with evaluation_mode(net), torch.no_grad():
            loss = math.fsum(float(part) for part in losses(net))
            return loss if added else None
    finally:
        for handle in handles:
            handle.remove()


def add_predictions(
    diary: dict[str, Any], net: nn.Module, losses: Callable[[nn.Module], Iterable[Tensor]]
) -> dict[str, Any]:
    """Add to the diary of a growth a ``slope`` for each α, and the best ``step``.

    The diary is returned unchanged if ``losses`` returns nothing.
    """
    found, i_max = slopes(net, losses), int(diary["i_max"])
    if not found:
        return diary
    tables = {
        key: [{**row, "slope": found[key][row["source"], row["op"]]} for row in rows]
        for key, rows in diary["tables"].items()
    }
    total = math.fsum(row["slope"] for rows in tables.values() for row in rows[:i_max])
    step = best_step(net, losses, i_max, backward=total > 0)
    return {**diary, "tables": tables, "step": None if step is None else step._asdict()}
