"""The update of a step: SGD with momentum, weight decay and clipping by group of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from nni_petridish.core.grow import candidate_parameters
from nni_petridish.errors import TrainingError


@runtime_checkable
class HasScalars(Protocol):
    """A module with parameters that must not decay: single numbers such as α and η."""

    @property
    def no_weight_decay(self) -> Sequence[str]:
        """The attributes that are such parameters."""
        ...


def make_optimizer(
    net: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    momentum: float = 0.0,
    scalar_lr: float | None = None,
) -> torch.optim.SGD:
    """Return SGD over the trained parameters; each group remembers its learning rate, ``base_lr``.

    Parameters
    ----------
    net
        The network; its modules may be `HasScalars`.
    lr, weight_decay, momentum
        Those of SGD.
    scalar_lr
        The learning rate of α, η and the like, which never decay; ``lr`` by default.
    """
    trained = [p for p in net.parameters() if p.requires_grad]
    if not trained:
        raise TrainingError("the network has no parameter to train.")
    scalars = _scalars(net)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) not in scalars], "base_lr": lr},
        {
            "params": [p for p in trained if id(p) in scalars],
            "base_lr": lr if scalar_lr is None else scalar_lr,
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        fused=True,  # grown networks have hundreds of small parameters: 7 times faster on a CPU
    )
    if momentum:
        # From zero instead of from the first gradient, which is the same; then the fused step also
        # takes parameters that get their first gradient late.
        for parameter in trained:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def clip_groups(net: nn.Module, *, scalars_apart: bool = False) -> list[list[nn.Parameter]]:
    """Return the network's own parameters and those of candidates attached to it.

    Weak learning must not be noticed by the network: one norm over both would let the candidates'
    gradients shorten the network's step.

    Parameters
    ----------
    net
        The network.
    scalars_apart
        Whether α and η are groups of their own: single numbers with gradients of the size of a
        whole weight matrix's would take the steps of all weights away.
    """
    scalars = _scalars(net) if scalars_apart else set()
    candidates = {id(parameter) for parameter in candidate_parameters(net)}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in net.parameters():
        if parameter.requires_grad:
            group = (id(parameter) in candidates, id(parameter) in scalars)
            groups.setdefault(group, []).append(parameter)
    return [groups[group] for group in sorted(groups)]


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> None:
    """Scale the gradients so that their joint norm is at most `limit`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients or math.isinf(limit):
        return
    norm = nn.utils.get_total_norm(gradients)
    # Scaling by 1 is work for nothing, but to know that of a GPU means to wait for it.
    if norm.device.type == "cuda" or float(norm) > limit:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def _scalars(net: nn.Module) -> set[int]:
    return {
        id(getattr(module, name))
        for module in net.modules()
        if isinstance(module, HasScalars)
        for name in module.no_weight_decay
    }
