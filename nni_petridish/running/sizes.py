"""Children within limits of size: the smallest one, and the best that fits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import attach_candidates, can_grow, finalize_candidates
from nni_petridish.core.site import sites
from nni_petridish.errors import ExhaustedError
from nni_petridish.tasks.sizes import sizes_of
from nni_petridish.tasks.task import Task

_TRIES = 32
"""Selections that are tried in the order of their scores before the smallest one is taken."""

Select = Callable[[nn.Module, Sequence[Genotype], Mapping[str, Sequence[float]] | None], Genotype]
"""Finalizes a network: it must not become one of the given architectures; by these scores."""


def smallest_child(
    task: Task, net: nn.Module, i_max: int, names: Collection[str]
) -> dict[str, float] | None:
    """Return the sizes of the child with the fewest parameters; None if the network is full."""
    if not can_grow(net):
        return None
    with torch.random.fork_rng([]):
        child = copy.deepcopy(net)
        attach_candidates(child)
        finalize_candidates(child, i_max, scores=_smallness(child))
    return sizes_of(task, child, names)


def select_within(
    task: Task,
    net: nn.Module,
    limits: Mapping[str, float],
    taken: Sequence[Genotype],
    select: Select,
) -> Genotype:
    """Finalize a network so that it is within limits of size, by the best scores that allow it.

    Parameters
    ----------
    task
        The task of the network.
    net
        A network with candidates attached.
    limits
        The largest sizes, by name.
    taken
        The architectures that it must not become.
    select
        Finalizes a network by its scores, or by others.

    Raises
    ------
    ExhaustedError
        If the smallest child that is not taken is too large.
    """
    rejected = list(taken)
    for _ in range(_TRIES):
        genotype, sizes = _tried(task, net, limits, lambda trial: select(trial, rejected, None))
        if _fits(sizes, limits):
            return select(net, rejected, None)
        rejected.append(genotype)
    smallness = _smallness(net)
    genotype, sizes = _tried(task, net, limits, lambda trial: select(trial, taken, smallness))
    if not _fits(sizes, limits):
        found = ", ".join(f"{name} {sizes[name]:,.6g}" for name in limits)
        wanted = ", ".join(f"{limit:,.6g}" for limit in limits.values())
        raise ExhaustedError(f"every child is too large: {found}; at most {wanted} is wanted.")
    return select(net, taken, smallness)


def _tried(
    task: Task,
    net: nn.Module,
    limits: Mapping[str, float],
    select: Callable[[nn.Module], Genotype],
) -> tuple[Genotype, dict[str, float]]:
    """Finalize a copy and return its architecture and its sizes."""
    with torch.random.fork_rng([]):
        trial = copy.deepcopy(net)
        genotype = select(trial)
    return genotype, sizes_of(task, trial, tuple(limits))


def _fits(sizes: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    return all(sizes[name] <= limit for name, limit in limits.items())


def _smallness(net: nn.Module) -> dict[str, list[float]]:
    """Return a score of each candidate that is the larger the fewer parameters it has."""
    counts: dict[str, list[float]] = {}
    for site in sites(net):
        if site.weak_learner is not None:
            own = [sum(p.numel() for p in op.parameters()) for op in site.weak_learner.ops]
            before = counts.get(site.key, [0.0] * len(own))
            counts[site.key] = [a + b for a, b in zip(before, own, strict=True)]
    return {key: [1 / (1 + count) for count in values] for key, values in counts.items()}
