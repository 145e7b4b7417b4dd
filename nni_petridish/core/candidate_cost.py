"""Measured cost of candidates: milliseconds of a training step that each would add.

Multiply-adds are no time: a pooling has none, and takes as long as a convolution of few channels. A
score divided by these milliseconds asks what a candidate brings for its cost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.held_out import Losses, alpha_tables_of
from nni_petridish.core.modes import evaluation_mode
from nni_petridish.core.site import sites
from nni_petridish.core.weak_learner import Candidates
from nni_petridish.errors import GrowthError

_RUNS = 5


def candidate_milliseconds(net: nn.Module, losses: Losses) -> dict[str, list[float]]:
    """Return the milliseconds of each candidate, forward and backward, over all its sites.

    Parameters
    ----------
    net
        A network with candidates attached. It does not change.
    losses
        Returns parts of a loss; the inputs of the first batch are used.

    Returns
    -------
    dict
        A number for each candidate in the order of its α table, by key.
    """
    found: dict[str, list[float]] = {
        key: [0.0] * len(table.shortcuts) for key, table in alpha_tables_of(net).items()
    }
    keys = {id(site.weak_learner): site.key for site in sites(net) if site.weak_learner}
    inputs: list[tuple[str, list[tuple[nn.Module, Tensor]]]] = []

    def keep(module: Candidates, arguments: Any, output: Tensor) -> None:
        pairs = [(op, z.detach()) for op, z in module.ops_with_inputs(arguments[1])]
        inputs.append((keys[id(module)], pairs))

    learners = [site.weak_learner for site in sites(net) if site.weak_learner is not None]
    handles = [learner.register_forward_hook(keep) for learner in learners]
    try:
        with evaluation_mode(net):
            next(iter(losses(net)), None)
            if not inputs:
                raise GrowthError("the cost of candidates is unknown: they do not run.")
            for key, pairs in inputs:
                times = [1000 * _seconds(op, z) for op, z in pairs]
                found[key] = [a + b for a, b in zip(found[key], times, strict=True)]
    finally:
        for handle in handles:
            handle.remove()
    return found


def per_millisecond(
    scores: Mapping[str, Sequence[float]], milliseconds: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """Return each score divided by the candidate's milliseconds.

    >>> per_millisecond({"normal": [4.0, 3.0]}, {"normal": [2.0, 0.5]})
    {'normal': [2.0, 6.0]}
    """
    return {
        key: [score / ms for score, ms in zip(values, milliseconds[key], strict=True)]
        for key, values in scores.items()
    }


def _seconds(op: nn.Module, z: Tensor) -> float:
    """Return the shortest time of a few passes, forward and backward."""
    z = z.requires_grad_()
    wanted = [z, *(p for p in op.parameters() if p.requires_grad)]
    times = []
    for _ in range(_RUNS):
        began = _now(z)
        with torch.enable_grad():
            torch.autograd.grad(op(z).sum(), wanted, allow_unused=True)
        times.append(_now(z) - began)
    return min(times)


def _now(z: Tensor) -> float:
    if z.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
