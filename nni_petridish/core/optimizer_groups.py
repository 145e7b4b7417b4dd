"""Edits of an optimizer in place, for a network whose parameters come and go.

The state of parameters that stay is not touched, and no group is moved or removed: schedulers keep
what they hold about each group. A new parameter joins the group of its neighbors, so that it has
their learning rate and follows their schedule. α, η and the like join a twin of that group without
weight decay. `add_twins` makes the twins, and tells schedulers, which count the groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nni_petridish.errors import GrowthError

_TWIN = "petridish_twin"
"""The option of a twin that holds the index of its group."""
_PER_GROUP = (
    "base_lrs",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
    "lr_lambdas",
    "_last_lr",
)
"""Attributes of torch's schedulers with a value for each group, in the order of the groups."""


def add_twins(optimizer: Optimizer, schedulers: Sequence[LRScheduler] = ()) -> None:
    """Add a twin without weight decay to every group that decays and has none.

    Parameters
    ----------
    optimizer
        The optimizer.
    schedulers
        Its learning-rate schedulers, if there are any: each is told of the twins.
    """
    known = {group[_TWIN] for group in optimizer.param_groups if _TWIN in group}
    missing = [
        i
        for i, group in enumerate(optimizer.param_groups)
        if group.get("weight_decay") and _TWIN not in group and i not in known
    ]
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if missing and scheduled and not schedulers:
        raise GrowthError(
            "the optimizer has a learning-rate scheduler already: make the Grower before it, or"
            " pass it as schedulers=[...]."
        )
    before = len(optimizer.param_groups)
    for i in missing:
        options = {k: v for k, v in optimizer.param_groups[i].items() if k != "params"}
        optimizer.add_param_group({**options, "params": [], "weight_decay": 0.0, _TWIN: i})
    for scheduler in schedulers:
        _extend(scheduler, before, missing)


def _extend(scheduler: LRScheduler, before: int, twins: Sequence[int]) -> None:
    """Repeat what a scheduler, or one inside of it, holds for the groups that have new twins."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _extend(inner, before, twins)
    for name in _PER_GROUP:
        held = getattr(scheduler, name, None)
        if isinstance(held, list) and len(held) == before:
            held.extend(held[i] for i in twins)


def add_parameters(
    optimizer: Optimizer, neighbors: Iterable[tuple[nn.Parameter, int]], scalars: Collection[int]
) -> None:
    """Add parameters to the groups with the given indices, or to the twins of these groups.

    Parameters
    ----------
    optimizer
        The optimizer, with twins.
    neighbors
        Each parameter with the index of the group that it belongs to.
    scalars
        The ids of the parameters that must not decay.
    """
    twins = {group[_TWIN]: i for i, group in enumerate(optimizer.param_groups) if _TWIN in group}
    for parameter, index in neighbors:
        if id(parameter) in scalars:
            index = twins.get(index, index)
        group = optimizer.param_groups[index]
        if _needs_momentum(optimizer, group):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        group["params"].append(parameter)


def _needs_momentum(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether a new parameter needs a buffer: the fused SGD wants all buffers or none.

    From a buffer of zeros it takes the usual first step.
    """
    return (
        isinstance(optimizer, torch.optim.SGD)
        and bool(group.get("fused"))
        and any(
            optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
            for parameter in group["params"]
        )
    )


def remove_parameters(optimizer: Optimizer, gone: Collection[int]) -> None:
    """Remove the parameters with these ids, and their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in gone:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [p for p in group["params"] if id(p) not in gone]


def group_of(optimizer: Optimizer) -> dict[int, int]:
    """Return the index of the group of each parameter, by its id; a twin counts as its group."""
    return {
        id(parameter): group.get(_TWIN, i)
        for i, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def named_groups(optimizer: Optimizer, net: nn.Module) -> list[list[str | None]]:
    """Return the names of the parameters in every group, None for those that are not the net's."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def arrange_groups(optimizer: Optimizer, net: nn.Module, wanted: list[list[str | None]]) -> None:
    """Put the parameters into the order of `named_groups`, which optimizers save their state in.

    Parameters that are not the network's keep their groups and their order.
    """
    own: dict[str, nn.Parameter] = dict(net.named_parameters())
    ids = {id(parameter) for parameter in own.values()}
    groups: list[dict[str, Any]] = optimizer.param_groups
    unknown = sorted({name for names in wanted for name in names if name} - own.keys())
    if len(wanted) != len(groups) or unknown:
        what = f"has no parameter {unknown[0]}" if unknown else f"had {len(wanted)} groups"
        raise GrowthError(f"the saved state does not fit: the network or optimizer {what}.")
    for names, group in zip(wanted, groups, strict=True):
        others = iter([p for p in group["params"] if id(p) not in ids])
        try:
            group["params"][:] = [next(others) if n is None else own[n] for n in names]
        except StopIteration:
            raise GrowthError(
                "the saved state does not fit: a group had more parameters of other networks."
            ) from None
