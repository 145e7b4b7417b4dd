"""The true decrease of the loss along a candidate: a line search on held-out batches.

The gain of a candidate is a first-order quantity. Here x_k + η·û is really computed, for a few η,
and the loss is looked at. That costs a forward pass for each candidate and η.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.grow import sites
from nni_petridish.core.held_out import Losses, Observation, observe
from nni_petridish.core.modes import evaluation_mode
from nni_petridish.core.weak_learner import Candidates

SHARES = (0.03, 0.1, 0.3)
"""The η that are tried, with ‖η·û‖ as a share of ‖x_k‖."""


def line_score(
    net: nn.Module, losses: Losses, shares: Sequence[float] = SHARES
) -> dict[str, list[float]]:
    """Return the largest decrease of the held-out loss by x_k + η·û for every candidate.

    Parameters
    ----------
    net
        A network with candidates attached, in isolated weak learning. It does not change.
    losses
        Returns parts of the loss on held-out batches.
    shares
        The η that are tried, in the direction ⟨−g, û⟩ in which the loss falls at first.

    Returns
    -------
    dict
        A number for each candidate in the order of its α table, by key; negative where the loss
        rises with every η.
    """
    units = _unit_steps(net, losses)
    learners: dict[str, list[Candidates]] = {}
    for site in sites(net):
        if site.weak_learner is not None:
            learners.setdefault(site.key, []).append(site.weak_learner)

    def loss() -> float:
        return float(sum(float(part) for part in losses(net)))

    def loss_with(key: str, i: int, eta: float) -> float:
        handles = [one.register_forward_hook(_adder(i, eta)) for one in learners[key]]
        try:
            return loss()
        finally:
            for handle in handles:
                handle.remove()

    with evaluation_mode(net), torch.no_grad():
        start = loss()
        return {
            key: [
                max(start - loss_with(key, i, share * unit) for share in shares)
                for i, unit in enumerate(steps)
            ]
            for key, steps in units.items()
        }


def _unit_steps(net: nn.Module, losses: Losses) -> dict[str, list[float]]:
    """Return sign(⟨−g, û⟩)·‖x_k‖/‖û‖ of every candidate, norms over all sites of a table."""
    sums: dict[str, Tensor] = {}

    def visit(seen: Observation) -> None:
        size = float(seen.x_k.square().sum())
        rows = [
            [-float((seen.g * u).sum()), float(u.square().sum()), size] for u in seen.candidates
        ]
        sums[seen.site.key] = sums.get(seen.site.key, 0.0) + torch.tensor(rows).double()

    observe(net, losses, visit)
    return {
        key: [
            (1.0 if inner >= 0 else -1.0) * (size / norm) ** 0.5 if norm > 0 else 0.0
            for inner, norm, size in found.tolist()
        ]
        for key, found in sums.items()
    }


def _adder(i: int, eta: float) -> Callable[[Candidates, Any, Tensor], Tensor]:
    """Return a forward hook that adds η·û of candidate i to x_k."""

    def add(module: Candidates, arguments: Any, x_k: Tensor) -> Tensor:
        op, z = module.ops_with_inputs(arguments[1])[i]
        return x_k + eta * op(z)

    return add
