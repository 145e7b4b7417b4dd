"""The update of a step: SGD with momentum, weight decay and clipping by group of parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from nni_petridish.core.grow import candidate_parameters
from nni_petridish.errors import TrainingError
from nni_petridish.tasks.vision.recipe import Recipe


def make_optimizer(net: nn.Module, recipe: Recipe) -> torch.optim.SGD:
    """Return SGD over the trained parameters.

    A module lists those of its parameters that must not decay in ``no_weight_decay``: α and η.
    """
    trained = [p for p in net.parameters() if p.requires_grad]
    if not trained:
        raise TrainingError("the network has no parameter to train.")
    exempt = {
        id(getattr(module, name))
        for module in net.modules()
        for name in getattr(module, "no_weight_decay", ())
    }
    plain = [p for p in trained if id(p) in exempt]
    decayed = [p for p in trained if id(p) not in exempt]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        fused=True,  # grown networks have hundreds of small parameters: 7 times faster on a CPU
    )
    # From zero instead of from the first gradient, which is the same; then the fused step also
    # takes parameters that get their first gradient late.
    for parameter in trained:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def clip_groups(net: nn.Module) -> list[list[nn.Parameter]]:
    """Return the network's own parameters and those of candidates attached to it.

    Weak learning must not be noticed by the network: one norm over both would let the candidates'
    gradients shorten the network's step.
    """
    groups: list[list[nn.Parameter]] = [[], []]
    candidates = {id(parameter) for parameter in candidate_parameters(net)}
    for parameter in net.parameters():
        if parameter.requires_grad:
            groups[id(parameter) in candidates].append(parameter)
    return [group for group in groups if group]


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> None:
    """Scale the gradients so that their joint norm is at most `limit`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients or math.isinf(limit):
        return
    norm = nn.utils.get_total_norm(gradients)
    # Scaling by 1 is work for nothing, but to know that of a GPU means to wait for it.
    if norm.device.type == "cuda" or float(norm) > limit:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
