"""The update of a step: SGD with momentum, weight decay and clipping by group of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.grow import candidate_parameters
from nni_petridish.core.momentum import start_of
from nni_petridish.core.scalars import scalar_ids
from nni_petridish.errors import TrainingError

_GRAIN = 32768
"""Numbers from which torch's ops use several threads."""


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
        The network; its modules may be `nni_petridish.core.scalars.HasScalars`.
    lr, weight_decay, momentum
        Options of SGD.
    scalar_lr
        The learning rate of α, η and the like, which never decay; ``lr`` by default.
    """
    trained = [p for p in net.parameters() if p.requires_grad]
    if not trained:
        raise TrainingError("the network has no parameter to train.")
    scalars = scalar_ids(net)
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
        # Starting from zero gives the same numbers as starting from the first gradient, and the
        # fused step then accepts parameters that get their first gradient late.
        for parameter in trained:
            optimizer.state[parameter]["momentum_buffer"] = start_of(parameter)
    return optimizer


def clip_groups(net: nn.Module, *, scalars_apart: bool = False) -> list[list[nn.Parameter]]:
    """Return the groups of parameters whose gradients are clipped together.

    The network's own parameters are one group, those of its candidates another: with one norm over
    both, the candidates' gradients would shorten the network's step.

    Parameters
    ----------
    net
        The network.
    scalars_apart
        Whether α and η are groups of their own: their gradients are as large as those of a whole
        weight matrix, and would shorten the steps of all weights.
    """
    scalars = scalar_ids(net) if scalars_apart else set()
    candidates = {id(parameter) for parameter in candidate_parameters(net)}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in net.parameters():
        if parameter.requires_grad:
            group = (id(parameter) in candidates, id(parameter) in scalars)
            groups.setdefault(group, []).append(parameter)
    return [groups[group] for group in sorted(groups)]


def take_step(
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    groups: Iterable[list[nn.Parameter]],
    clip: float,
    lr: Callable[[dict[str, Any]], float],
) -> None:
    """Update the parameters along the clipped gradients of the loss.

    Parameters
    ----------
    optimizer
        The optimizer.
    loss
        The loss of the step.
    groups
        The parameters whose gradients are clipped together, see `clip_groups`.
    clip
        The largest norm of the gradients of a group.
    lr
        The learning rate for a parameter group of the optimizer.
    """
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    for parameters in groups:
        clip_gradients(parameters, clip)
    for group in optimizer.param_groups:
        group["lr"] = lr(group)
    with _one_thread_if_small(optimizer):
        optimizer.step()


@contextmanager
def _one_thread_if_small(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Use one thread if the parameters are small; it changes no bit of an update.

    The fused step starts the threads anew for each parameter, hundreds of times, and on a busy
    machine every start may take a time slice.
    """
    threads = torch.get_num_threads()
    sizes = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    if threads == 1 or sum(sizes) >= _GRAIN * len(sizes):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> None:
    """Scale the gradients so that their joint norm is at most `limit`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients or math.isinf(limit):
        return
    norm = nn.utils.get_total_norm(gradients)
    # Scaling by 1 is wasted work, but reading the norm of a GPU would wait for it.
    if norm.device.type == "cuda" or float(norm) > limit:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
